"""Prepared inputs, lifted out of a Graph before it is scheduled.

`lift_preparations` makes an input of every part that a Preparation gives; the Recipe says which
inputs of the Graph each is made of, and how, as plain data (see `runtime.preparing`). Invariant:
the numbers of inputs that callers use are those of the traced Graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..graph import build, ops
from ..ir.node import Node, topological
from ..ir.rewrite import replace as replaced
from ..ir.types import Tuple
from ..runtime.recipe import Preparing

Array = np.ndarray[Any, Any]


@dataclass
class Lifted:
    """A Graph without Preparations: its own inputs, then the parts."""

    inputs: list[Node]
    results: list[Node]
    kept: list[int]  # numbers of the inputs that are still read as they are
    preparing: list[Preparing]  # `slots` are numbers of `inputs` here

    def donated(self, donate: Sequence[int]) -> list[int]:
        """The numbers that inputs which may be overwritten have now."""
        return [self.kept.index(number) for number in donate if number in self.kept]


def lift_preparations(inputs: Sequence[Node], results: Sequence[Node]) -> Lifted:
    """The Graph with inputs for the parts of its Preparations."""
    call_nodes = [n for n in topological(results) if n.op is ops.call and n.attrs["callee"].once]
    number = {node: i for i, node in enumerate(inputs)}
    fresh: dict[Node, Node] = {}
    made: list[tuple[Node, list[Node]]] = []
    for call in call_nodes:
        parts = build.items(call) if isinstance(call.type, Tuple) else [call]
        new = [build.input_(part.shape, part.dtype) for part in parts]
        fresh.update(zip(parts, new))
        made.append((call, new))
    results = replaced(results, fresh)
    read = set(topological(results))
    sources = {i for call in call_nodes for i in call.inputs}
    kept = [i for i, n in enumerate(inputs) if n in read or n not in sources]
    lifted = Lifted([inputs[i] for i in kept], results, kept, [])
    for call, new in made:
        first = len(lifted.inputs)
        lifted.inputs += new
        lifted.preparing.append(
            Preparing(
                [number[i] for i in call.inputs],
                call.attrs["callee"].to_text(),
                list(range(first, len(lifted.inputs))),
            )
        )
    return lifted


__all__ = ["Lifted", "lift_preparations"]

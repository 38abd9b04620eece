"""Numbers as arguments: Graphs that differ in their constants alone share one Executable.

A loop that computes with another Python number at each turn (a learning rate, a temperature) has
a Graph of the same structure each time. The first is compiled with its numbers as constants, so
that all Rules see them. When the same structure comes with other numbers, those that differ become
inputs and the rest stay constants; from then on calls give only their values. So a number that
never changes (a scale, an epsilon, an exponent) always is a constant. Constants inside Blocks stay.
Invariant: the Executable on its numbers computes what the Graph says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.config import config
from ..core.recent import Recent
from ..graph import build, ops
from ..ir.fingerprint import structure
from ..ir.node import Node, exact
from ..ir.rewrite import replace
from ..runtime.buffer import HOST, Buffer
from .compile import circumstances, executable_for


@dataclass
class Variants:
    """Graphs of one structure: the numbers of the first, and which of them have differed."""

    first: tuple[Any, ...]
    plain: Any  # the Executable for the first numbers
    # positions of the numbers that are inputs, Executable
    lifted: tuple[Sequence[int], Any] = ((), None)


_variants: Recent[Variants] = Recent(lambda: config().keep)


def executable_on_numbers(
    inputs: Sequence[Node], outputs: Sequence[Node], device: str = HOST
) -> tuple[Any, list[Buffer]]:
    """The Executable that computes outputs from inputs, and Buffers to give it after those."""
    if config().eager_debug:
        return executable_for(tuple(inputs), tuple(outputs), (), device), []
    constants: list[Node] = []
    rows = structure(inputs, outputs, None, _is_number, constants)
    numbers = tuple([exact(c.attrs["value"]) for c in constants])
    key = (rows, circumstances(device))
    variants = _variants.get(key)
    if variants is None:
        plain = executable_for(tuple(inputs), tuple(outputs), (), device)
        _variants[key] = Variants(numbers, plain)
        return plain, []
    if numbers == variants.first:
        return variants.plain, []
    positions, executable = variants.lifted
    differ = {i for i, (a, b) in enumerate(zip(numbers, variants.first)) if a != b}
    if not differ <= set(positions):
        positions = sorted(differ | set(positions))
        fresh = {constants[i]: build.input_((), constants[i].dtype) for i in positions}
        kept = {i: i for i in inputs}  # an input may have a value and be computed of these numbers
        executable = executable_for(
            (*inputs, *fresh.values()), tuple(replace(outputs, kept | fresh)), (), device
        )
        variants.lifted = positions, executable
    given = [constants[i] for i in positions]
    return executable, [Buffer.wrap(np.array(c.attrs["value"], c.dtype.numpy)) for c in given]


def _is_number(node: Node) -> bool:
    return node.op is ops.constant and node.dtype.kind != "bool"

"""From a Graph to an Executable, remembered by structure.

Invariant: two Graphs of equal structure share one Executable per Target and Config.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..graph.interpret import interpret
from ..ir.fingerprint import structure
from ..ir.node import Node
from ..runtime.buffer import Buffer

import numpy as np

_memory: dict[Any, Any] = {}


class _Interpreted:
    def __init__(self, inputs, outputs):
        self.inputs, self.outputs = inputs, outputs

    def run(self, buffers: Sequence[Buffer], symbols=None) -> list[Buffer]:
        symbols = symbols or {}
        from ..ir.symbol import evaluate

        given = {
            n: b.array(tuple(evaluate(s, symbols) for s in n.shape), n.dtype)
            for n, b in zip(self.inputs, buffers)
        }
        return [Buffer.wrap(np.ascontiguousarray(r)) for r in interpret(self.outputs, given, symbols)]


def executable_for(
    inputs: tuple[Node, ...], outputs: tuple[Node, ...], donate: tuple[int, ...] = ()
) -> Any:
    """The Executable that computes outputs from inputs (in that order); `donate` numbers the
    inputs whose Buffers it may overwrite. `run(buffers, symbols) -> buffers`."""
    key = (structure(inputs, outputs), donate)
    found = _memory.get(key)
    if found is None:
        found = _memory[key] = _Interpreted(inputs, outputs)
    return found

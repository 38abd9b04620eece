"""Eager debugging: run a Graph op by op and stop at the first NaN or infinity.

Slow on purpose: each Node is computed alone by the interpreter, so the error names the op and
the user's line at which a bad value first appears; on the CPU, whatever the device. Switched on
by TILEGRAD_EAGER=1 or `configure(eager_debug=True)`. Invariant: results equal those of the
compiled Graph within rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..core.errors import UserError
from ..graph.interpret import interpret
from ..ir.node import Node, topological
from ..ir.requirement import Requirement, check_all
from ..ir.symbol import evaluate
from ..runtime.buffer import HOST, Buffer
from ..runtime.device import device
from .pipeline import transfers


class GuardedExecutable:
    """Runs op by op with NaN and infinity guards."""

    def __init__(
        self,
        inputs: Sequence[Node],
        outputs: Sequence[Node],
        device: str = HOST,
        requirements: Sequence[Requirement] = (),
        homes: Sequence[str] = (),
    ) -> None:
        self.inputs, self.outputs, self.device = tuple(inputs), tuple(outputs), device
        self.requirements = requirements
        self.where = [device] * len(self.outputs)  # the Devices of the results
        if homes or transfers(self.outputs):
            from .devices import Cut

            cut = Cut(device)
            cut.find(self.inputs, homes or [device] * len(self.inputs), self.outputs)
            placed = [cut.place[node] for node in self.outputs]
            self.where = [device if place is None else place[1] for place in placed]

    def check(self, symbols: Mapping[str, int] | None) -> None:
        """Raise unless what the ops need of these Symbols holds."""
        check_all(self.requirements, symbols)

    def run(
        self, buffers: Sequence[Buffer], symbols: Mapping[str, int] | None = None
    ) -> list[Buffer]:
        """Run once; raises at the first op that makes a NaN or infinity out of good values."""
        self.check(symbols)
        symbols = symbols or {}
        known: dict[Node, Any] = {}
        for node, buffer in zip(self.inputs, buffers):
            shape = tuple(evaluate(s, symbols) for s in node.shape)
            if buffer.device == HOST:
                known[node] = buffer.array(shape, node.dtype)
            else:
                known[node] = device(buffer.device).download(buffer, shape, node.dtype)
        bad = {node for node, value in known.items() if not _finite(value)}
        for node in topological(self.outputs, stop=known.__contains__):
            if node in known:
                continue
            needed = {i: known[i] for i in node.inputs if i in known}
            known[node] = interpret([node], needed, symbols)[0]
            if _finite(known[node]):
                continue
            bad.add(node)
            if not any(i in bad for i in node.inputs) and node.op.category != "leaf":
                raise first_bad(node, known[node])
        arrays = [np.array(known[o], order="C") for o in self.outputs]
        return [
            Buffer.wrap(array) if name == HOST else device(name).upload(array)
            for array, name in zip(arrays, self.where)
        ]


def _finite(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_finite(v) for v in value)
    array = np.asarray(value)
    if array.dtype.kind in "iub":
        return True
    return bool(np.isfinite(array.astype(np.float64)).all())


def first_bad(node: Node, value: Any) -> UserError:
    """The error that names the op and line where a bad value first appears."""
    array = np.asarray(value[0] if isinstance(value, tuple) else value).astype(np.float64)
    nans, infinities = int(np.isnan(array).sum()), int(np.isinf(array).sum())
    return UserError(
        "the first NaN or infinity appears here",
        op=node.op.name,
        expected="finite values from finite inputs",
        got=f"{nans} NaN and {infinities} infinite of {array.size} elements, {node.type}",
        location=node.location,
        hint="look at the inputs of this op for zeros or large values",
    )

"""Products of one input with several weights as one launch: q/k/v, and gate/up.

`JointMatmul` is the wide matmul over several weights that lie apart. Plain, tiles are taken one
weight after another and each result goes to a place of its own; which weight a tile belongs to
is found from where it begins, by branches that all threads of a role take alike. Gated, a stage
of the ring holds the input's tile and one tile of each weight, a consumer keeps an accumulator
for each (along k one for all, so that the input's tile is read once), and the epilogue makes one
result of the pieces.

Costs: as the wide matmul of the weights put side by side, less the launches and the reads of the
input; gated, also less the results that need not be stored and read again.
Invariant: no tile spans two weights, so every sum is that of a product alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ... import tile
from ...ir.node import Node
from ...ir.symbol import round_up
from ...tile.build import BodyBuilder
from .shape import Epilogue, Operands, Prologue, WidePlan, among, first_wrong
from .wide import WideMatmul


class JointMatmul(WideMatmul):
    """Builds one Body."""

    def __init__(
        self,
        x: Operands,
        plan: WidePlan,
        b: BodyBuilder,
        tokens: Node,
        weights: Sequence[Node],
        results: Sequence[Node],
        epilogues: Sequence[Epilogue],
        prologue: Prologue | None = None,
    ) -> None:
        self.weights, self.results = (list(map(tile.memory, x)) for x in (weights, results))
        few = x.span(plan.tile)[0] <= 128  # of more consumers' registers it would take too many
        apart = x.gated and not x.turned
        self.joined = apart and x.b_along_k and few
        self.apart = x.products if apart and not self.joined else 0
        varying = [w for w in weights if w.type.use != "constant"]  # type: ignore[union-attr]
        first = [*varying, weights[0]][0]  # all are read early, or none
        pair = (first, tokens) if x.turned else (tokens, first)
        super().__init__(x, plan, b, (*pair, results[0]), epilogues[0], prologue=prologue)
        self.epilogues = [tile.outside(e) for e in epilogues]
        self.unit = self.span[0 if x.turned else 1]  # of a weight, in one tile
        self.starts = [0]  # where each weight begins, among tiles side by side
        for n in x.weights:
            self.starts.append(self.starts[-1] + round_up(n, self.unit))

    def why_not_here(self) -> str:
        """What several weights ask for beside."""
        x, plan = self.x, self.plan
        wrong = [
            (len(self.weights) != len(x.weights), "a Memory for each weight"),
            (x.gated and len(set(x.weights)) != 1, "gated weights are of one size"),
            (x.batch != 1 and not x.block, "no batch"),
            (
                any(
                    v % 64 if x.turned else v % 8 for v in x.span(plan.tile)[: 1 if x.turned else 2]
                ),
                "an accumulator has 64 rows, and columns in eights",
            ),
            (x.gated and x.turned and plan.across, "gated weights are not shared"),
        ]
        return first_wrong(wrong)

    # ---- plain: which weight --------------------------------------------------------------

    def each(self, where: Any, do: Callable[[int, Any], None]) -> None:
        """do(number, where in it) for the weight that a tile is of."""
        batch, row, column = where
        along = row if self.x.turned else column

        def here(number: int) -> None:
            start = self.starts[number]
            most = max(0, tile.most(along) - start)
            if number + 1 < len(self.weights):  # a cluster may reach beyond the last weight
                most = min(most, self.starts[number + 1] - self.unit - start)
            place = tile.hold(along - start, "place", (0, most))
            do(number, (batch, place, column) if self.x.turned else (batch, row, place))

        among(along, self.starts[:-1], here)

    def fill_left(self, stage: Any, where: Any, step: Any, number: int = 0) -> None:
        """Turned, tiles of the weights; else of the input."""
        if self.x.turned:
            fill_weights(self, "a", super().fill_left, stage, where, step)
        else:
            super().fill_left(stage, where, step, number)

    def fill_right(self, stage: Any, where: Any, step: Any, number: int = 0) -> None:
        """Turned, a tile of the input; else of the weights."""
        if self.x.turned:
            super().fill_right(stage, where, step, number)
        else:
            fill_weights(self, "weight", super().fill_right, stage, where, step)

    def write_sums(self, own: int, count: Any, where: Any, sums: Sequence[Any]) -> None:
        """To the result of the tile's weight, by its epilogue."""
        if self.x.gated:
            super().write_sums(own, count, where, sums)
            return

        def write(number: int, at: Any) -> None:
            self.c, self.epilogue = self.results[number], self.epilogues[number]
            super(JointMatmul, self).write_sums(own, count, at, sums)

        self.each(where, write)


def fill_weights(
    kernel: JointMatmul, side: str, fill: Any, stage: Any, where: Any, step: Any
) -> None:
    """Gated, a tile of each weight; plain, of the one that the tile is of."""
    gated = kernel.x.gated

    def one(number: int, at: Any) -> None:
        setattr(kernel, side, kernel.weights[number])
        fill(stage, at, step, number if gated else 0)

    if gated:
        for number in range(len(kernel.weights)):
            one(number, where)
    else:
        kernel.each(where, one)

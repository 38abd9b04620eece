"""Products of one input with several weights as one launch: q/k/v, and gate/up.

`joint_matmul` is the wide matmul over several weights that lie apart. Plain, tiles are taken one
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
from ...ir.types import Memory
from ...tile.build import Body, BodyBuilder
from .shape import Epilogue, Operands, Prologue, WidePlan, among, hole_of, side
from .wide import WideMatmul


def joint_matmul(x: Operands, plan: WidePlan) -> Body:
    """The Body with holes `epilogue`; parameters: the input, the weights, the results.

    Plain, weight i has a hole `epilogue{i}(piece, rows, columns)`; gated, there is one,
    `epilogue(piece of each weight, rows, columns)`.
    """
    tokens = x.n if x.turned else x.m
    along = (x.b_along_k, x.a_along_k) if x.turned else (x.a_along_k, x.b_along_k)
    parameters = [("x", Memory(side(tokens, x.k, along[0]), x.dtype, use="value"))]
    for i, n in enumerate(x.weights):
        parameters.append((f"w{i}", Memory(side(n, x.k, along[1]), x.dtype, use="constant")))
    results = x.weights[:1] if x.gated else x.weights
    for i, n in enumerate(results):
        parameters.append((f"c{i}", Memory((tokens, n), x.result, use="result")))
    b = BodyBuilder("joint_matmul", parameters)
    last = 1 + len(x.weights)
    return JointMatmul(
        x, plan, b, b.parameters[0], b.parameters[1:last], b.parameters[last:]
    ).build()


class JointMatmul(WideMatmul):
    """Builds one Body of `joint_matmul`."""

    def __init__(
        self,
        x: Operands,
        plan: WidePlan,
        b: BodyBuilder,
        tokens: Node,
        weights: Sequence[Node],
        results: Sequence[Node],
        epilogues: Sequence[Epilogue] | None = None,
        prologue: Prologue | None = None,
    ) -> None:
        self.weights, self.results = (
            list(map(tile.memory, weights)),
            list(map(tile.memory, results)),
        )
        self.products = len(self.weights) if x.gated else 1
        few = x.span(plan.tile)[0] <= 128  # of more consumers' registers it would take too many
        self.joined = x.gated and not x.turned and x.b_along_k and few
        varying = [w for w in weights if w.type.use != "constant"]  # type: ignore[union-attr]
        first = [*varying, weights[0]][0]  # all are read early, or none
        pair = (first, tokens) if x.turned else (tokens, first)
        super().__init__(x, plan, b, (*pair, results[0]), prologue=prologue)
        self.epilogues = [tile.outside(e) for e in epilogues or ()]
        if epilogues is None:
            names = ["epilogue"] if x.gated else [f"epilogue{i}" for i in range(len(self.results))]
            self.epilogues = [hole_of(x, name, self.products) for name in names]
        self.epilogue = self.epilogues[0]
        self.unit = self.span[0 if x.turned else 1]  # of a weight, in one tile
        self.starts = [0]  # where each weight begins, among tiles side by side
        for n in x.weights:
            self.starts.append(self.starts[-1] + -(-n // self.unit) * self.unit)

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
        return next((why for is_wrong, why in wrong if is_wrong), "")

    # ---- plain: which weight --------------------------------------------------------------

    def each(self, along: Any, do: Callable[[int, Any], None]) -> None:
        """do(number, where along it) for the weight that a tile beginning at `along` is of."""

        def here(number: int) -> None:
            start = self.starts[number]
            most = max(0, tile.most(along) - start)
            if number + 1 < len(self.weights):  # a cluster may reach beyond the last weight
                most = min(most, self.starts[number + 1] - self.unit - start)
            do(number, tile.hold(along - start, "place", (0, most)))

        among(along, self.starts[:-1], here)

    def fill_left(self, stage: Any, where: Any, step: Any, number: int = 0) -> None:
        """Turned, tiles of the weights; else of the input."""
        batch, row, column = where
        if not self.x.turned:
            super().fill_left(stage, where, step, number)
        elif self.x.gated:
            for number, weight in enumerate(self.weights):
                self.a = weight
                super().fill_left(stage, where, step, number)
        else:

            def fill(number: int, at: Any) -> None:
                self.a = self.weights[number]
                super(JointMatmul, self).fill_left(stage, (batch, at, column), step)

            self.each(row, fill)

    def fill_right(self, stage: Any, where: Any, step: Any, number: int = 0) -> None:
        """Turned, a tile of the input; else of the weights."""
        batch, row, column = where
        if self.x.turned:
            super().fill_right(stage, where, step, number)
        elif self.x.gated:
            for number, weight in enumerate(self.weights):
                self.weight = weight
                super().fill_right(stage, where, step, number)
        else:

            def fill(which: int, place: Any) -> None:
                self.weight = self.weights[which]
                super(JointMatmul, self).fill_right(stage, (batch, row, place), step)

            self.each(column, fill)

    def write_sums(self, own: int, count: Any, where: Any, sums: Sequence[Any]) -> None:
        """To the result of the tile's weight, by its epilogue."""
        if self.x.gated:
            super().write_sums(own, count, where, sums)
            return
        batch, row, column = where

        def write(number: int, at: Any) -> None:
            self.c, self.epilogue = self.results[number], self.epilogues[number]
            place = (batch, at, column) if self.x.turned else (batch, row, at)
            super(JointMatmul, self).write_sums(own, count, place, sums)

        self.each(row if self.x.turned else column, write)

    # ---- gated: a tile of each weight -----------------------------------------------------

    def operands(self) -> tuple[Any, Any]:
        """Gated, b's place is one for each weight; along k, they lie one below another."""
        x, stages, (tm, _, tk) = self.x, self.plan.stages, self.plan.tile
        if not x.gated or x.turned or self.joined:
            return super().operands()
        half, each = side(64, tk, x.a_along_k), side(self.unit, tk, x.b_along_k)
        left = tile.shared((stages, tm // 64, *half), x.dtype, "swizzle128")
        return left, tile.shared((stages, self.products, *each), x.dtype, "swizzle128")

    def right_of(self, stage: Any, number: int) -> tuple[Any, int, int]:
        """Where a weight's tile lies in a stage of the ring."""
        if not self.x.gated or self.x.turned:
            return super().right_of(stage, number)
        if self.joined:
            return self.right[stage], number * self.unit, self.unit
        return self.right[stage, number], 0, self.right.shape[2]

    def at(self, number: int, own: int, stage: Any) -> tuple[Any, ...]:
        """Where in the ring the operands of a product lie."""
        if not self.x.gated or self.joined:
            return super().at(number, own, stage)
        if self.x.turned:
            return self.left[stage, number * self.halves + own], self.right[stage]
        return self.left[stage, own], self.right[stage, number]

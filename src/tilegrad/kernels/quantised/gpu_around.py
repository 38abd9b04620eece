"""Products of few tokens on a GPU with what is around them: what `gpu_rows` and `gpu_warps` share.

A program has some rows of the weights. What lies around a product in a decoder may be `Around` it:
a root-mean-square norm of x, a bias, the activation of one half of the rows times the other half,
a value that is added, several results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ... import tile
from ...core.errors import InternalError
from ...ir.symbol import ceil_divide, high, power_of_two, round_up
from ...tile.build import Body, BodyBuilder
from ..matmul.shape import among
from .gpu_layout import ROWS, Groups, groups_of, parts
from .shape import Around, QuantisedShape, parameters
from .words import and_masks, surrounded, there


@dataclass(frozen=True)
class AroundPlan:
    """What such kernels choose."""

    rows: int = 16  # of a program
    warps: int = 4
    groups: int = 128  # of a row that the threads take at once
    stages: int = 1  # turns whose groups are asked for ahead
    resident: int = 0  # programs of a core that registers are to suffice for; 0 to let it be


class AroundKernel:
    """A Body whose programs have some rows each, and what is around their products."""

    tokens: int  # of a program

    def __init__(self, shape: QuantisedShape, plan: AroundPlan, name: str, around: Around) -> None:
        self.shape, self.plan, self.around = shape, plan, around
        self.layout, self.groups = shape.layout, groups_of(shape)
        self.sides = 2 if around.gated else 1
        self.quick = shape.dtype.bits < 32  # whether an approximation will do
        self.each = plan.rows // self.sides  # rows of a side in a program
        self.wide = power_of_two(self.each)  # of a Tile that has them
        self.results = sum(around.results(shape))
        self.rows = round_up(self.results, ROWS)
        self.turns = ceil_divide(self.groups, plan.groups)
        self.programs = self.rows // self.each  # that rows are shared out among
        self.even = not any(s % self.each for s in around.splits)  # a program has one result
        if self.rows % self.each or around.why_not(shape, ROWS):
            raise InternalError("kernels.quantised", f"{plan}, {around} do not fit {shape}")
        self.b = BodyBuilder(name, parameters(shape, parts(shape), around))
        self.memory = tile.memories(self.b)
        self.weights = Groups(shape, self.memory)

    def work(self) -> None:
        """All that a program does."""
        raise InternalError("kernels.quantised", f"{type(self).__name__} does nothing")

    def build(self) -> Body:
        """Which rows and tokens a program has, then its work."""
        plan = self.plan
        grid: list[Any] = [self.programs]
        with tile.into(self.b):
            tile.grid_launch_dependents()
            if high(self.shape.tokens) > self.tokens:  # neighbours read the same weights
                grid.insert(0, ceil_divide(self.shape.tokens, self.tokens))
                block, number = tile.grid(*grid)
            else:
                block, number = 0, tile.grid(*grid)
            self.token, self.row = block * self.tokens, number * self.each
            self.work()
        notes = {"resident": plan.resident} if plan.resident else {}
        return self.b.finish(grid, warps=plan.warps, level="placed", **notes)

    def rows_there(self, *lead: int) -> Any:
        """Which rows of a program there are, of each of some tokens; None for all."""
        size, axis = (*lead, self.wide), len(lead)
        own = there(size, axis, 0, self.each)
        return and_masks(own, there(size, axis, self.row, self.results))

    def load(self, group: Any) -> list[Any]:
        """The weights of a turn, side by side."""
        groups, rows = self.plan.groups, [self.row + side * self.rows for side in range(self.sides)]
        return [x for r in rows for x in self.weights.load(r, group, self.each, groups)]

    def load_bias(self) -> Any:
        """The bias of the program's rows; None where there is none."""
        if not self.around.bias:
            return None
        return tile.load(self.memory["bias"], self.row, self.wide, mask=self.rows_there())

    def put(self, token: int, sides: Sequence[Any], bias: Any, residual: Any, mask: Any) -> None:
        """Rows from a token on, with what is around them, into the result that has them, or those
        that have some."""
        value = surrounded(sides, bias, residual, self.quick).to(self.shape.dtype)
        starts = self.around.starts(self.shape)

        def store(number: int) -> None:
            row, own = self.row - starts[number], mask
            if not self.even:
                line = tile.arange(self.wide) + row
                inside = (line >= 0) & (line < self.around.splits[number])
                own = and_masks(mask, tile.broadcast(inside, value.shape))
            elif number:
                row = tile.maximum(row, 0)
            tile.store(self.memory[f"out{number}"], (self.token + token, row), value, mask=own)

        if self.even:
            among(self.row, starts, store)
        else:
            for number in range(len(starts)):
                store(number)

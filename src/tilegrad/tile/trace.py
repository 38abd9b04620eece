"""Trace a kernel: run its rewritten Python once and collect the Body it describes.

A `Tracer` owns the builder, the grid, the results and the Plan of one Body; loops and branches
are staged by `control`.
Invariant: tracing the same function with the same types, static values and Plan gives a Body
with the same text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..core import dtype as dtypes
from ..core.dtype import DType
from ..core.errors import ShapeError, TraceError, UserError
from ..ir.block import argument
from ..ir.node import Node
from ..ir.symbol import Size, ceil_divide
from ..ir.types import Memory
from . import ops
from .build import Body
from .placed import PlacedBuilder
from .plan import Plan
from .value import (
    MemoryValue,
    TileValue,
    index_of,
    size_of,
    state,
    tile_of,
)


@dataclass(frozen=True)
class Range:
    """What tile.range gives: a loop that is staged."""

    lower: Size
    upper: Size
    step: int
    unroll: int = 1
    block: int | None = None  # rows of each Rows, for tile.range_n


@dataclass(frozen=True)
class Rows:
    """Rows start .. start+count of an array: what a loop over blocks gives."""

    start: Size
    count: int

    @property
    def index(self) -> Any:
        """The first row."""
        return index_of(self.start)


class Tracer:
    """One Body being traced."""

    def __init__(
        self, name: str, parameters: Sequence[tuple[str, Memory]], plan: Plan,
        stated: Plan | None = None,
    ) -> None:  # fmt: skip
        self.name, self.plan = name, plan
        self.stated = plan if stated is None else stated  # what a person set of the Plan
        self.builder = PlacedBuilder(name, parameters)
        self.inputs = [
            MemoryValue(n, node, False) for (n, _), node in zip(parameters, self.builder.parameters)
        ]
        self.results: list[MemoryValue] = []
        self.fills: dict[str, float] = {}
        self.grid: tuple[Size, ...] | None = None
        self.programs: list[Size] = []
        self.hints: dict[str, Any] = {}  # notes that functions leave for the emitter
        self.atoms: dict[Any, Size] = {}
        self.depth = 0  # Blocks around
        self.placed = False
        self.rows: Rows | None = None  # of the program, where the grid is implied
        self.lead: tuple[Size, ...] = ()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, this is the Tracer of the thread."""
        before, state.tracer = state.tracer, self
        try:
            yield
        finally:
            state.tracer = before

    def atom_of(self, node: Node, least: int, most: int) -> Size:
        """An integer scalar as part of index arithmetic; the same Node gives the same atom."""
        b = self.builder
        wide = b.cast(node, dtypes.int64)
        if wide.op is ops.constant:
            return int(wide.attrs["value"])
        known = self.atoms.get((wide, least, most))
        if known is None:
            known = self.atoms[(wide, least, most)] = b.atom("at", wide, least, most)
        return known

    # ---- grid and results -----------------------------------------------------------------

    def set_grid(self, sizes: Sequence[Size]) -> list[Size]:
        """Declare the grid; gives this program's numbers."""
        if self.grid is not None:
            raise TraceError("the grid is declared twice", op="tile.grid",
                             hint="tile.load(rows=...) implies a grid of row blocks")  # fmt: skip
        if self.depth:
            raise TraceError("the grid is declared inside a loop or a branch", op="tile.grid")
        self.grid = tuple(sizes)
        self.programs = [self.builder.program(i, s) for i, s in enumerate(sizes)]
        return self.programs

    def implied_rows(self) -> Rows:
        """This program's rows, where the grid follows from the first array: one program for
        each block of its rows, times the sizes of its leading axes."""
        if self.rows is None:
            if not self.inputs or self.inputs[0].ndim < 2:
                raise ShapeError("the grid cannot be implied", op="tile.load",
                                 expected="a first argument of shape (..., rows, columns)",
                                 got=repr(self.inputs[:1]), hint="declare it with tile.grid(...)",
                                 )  # fmt: skip
            *lead, rows, _ = self.inputs[0].type.shape
            block = self.block_of("m")
            numbers = self.set_grid([*lead, ceil_divide(rows, block)])
            self.lead = tuple(numbers[:-1])
            self.rows = Rows(numbers[-1] * block, block)
        return self.rows

    def block_of(self, name: str) -> int:
        """A block size of the Plan."""
        found = getattr(self.plan, name)
        if found is None:
            raise UserError(f"the Plan has no {name}", op="tile.context")
        return int(found)

    def add_result(
        self, shape: Sequence[Size], dtype: DType, name: str = "", fill: float | None = None
    ) -> MemoryValue:
        """A new array that the kernel gives back."""
        if self.depth:
            raise TraceError("a result is declared inside a loop or a branch", op="tile.result")
        name = name or f"out{len(self.results)}"
        type_ = Memory(tuple(shape), dtype, use="result" if fill is None else "state")
        node = argument(name, type_)
        self.builder.block.arguments = (*self.builder.block.arguments, node)
        self.builder.builder.known[0].add(id(node))
        if fill is not None:
            self.fills[name] = fill
        self.results.append(MemoryValue(name, node, True))
        return self.results[-1]

    def returned(self, value: Any) -> None:
        """Tiles that the function returns become results: blocks of rows of the first array."""
        if value is None:
            return
        for item in value if isinstance(value, tuple) else (value,):
            from .language import store_rows

            found = tile_of(item, op="return")
            rows = self.implied_rows()
            if not found.shape or found.shape[0] != rows.count or found.ndim > 2:
                raise ShapeError(
                    "a returned tile is not a block of rows", op="kernel",
                    expected=f"shape ({rows.count},) or ({rows.count}, columns)", got=repr(found),
                    hint="declare other results with tile.result and write them with tile.store",
                )  # fmt: skip
            *lead, count, _ = self.inputs[0].type.shape
            columns = [] if found.ndim == 1 else [self.columns_of(found)]
            out = self.add_result([*lead, count, *columns], found.dtype)
            store_rows(out, found)

    def columns_of(self, value: TileValue) -> Size:
        """How many columns of a returned tile are elements."""
        edge = value.edges[1]
        return value.shape[1] if edge is None else edge.limit

    def finish(self) -> Body:
        """The Body."""
        if not self.results:
            raise UserError(f"the kernel {self.name} has no result", op="kernel",
                            expected="tile.result(...), or a returned tile")  # fmt: skip
        notes = {k: v for k, v in {**self.plan.notes(), **self.hints}.items() if v is not None}
        level = "placed" if self.placed else "portable"
        body = self.builder.finish(self.grid or (1,), **notes, level=level)
        return body


def make_range(op: str, *given: Any, unroll: int = 1, block: int | None = None) -> Range:
    """tile.range(stop), (start, stop) or (start, stop, step)."""
    if not 1 <= len(given) <= 3:
        raise UserError("wrong number of bounds", op=op, expected="1, 2 or 3", got=len(given))
    lower, upper, step = (0, *given, 1) if len(given) == 1 else (*given, 1)[:3]
    if not isinstance(step, int) or isinstance(step, bool) or step < 1:
        raise UserError("the step is not a positive integer", op=op, got=repr(step))
    return Range(size_of(lower, "bound"), size_of(upper, "bound"), step, unroll, block)

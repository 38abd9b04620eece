"""Bodies of the placed level, written op by op: also such as the tile language would refuse."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tilegrad.core.dtype import DType, bool_
from tilegrad.core.errors import Location
from tilegrad.ir.node import Node, located
from tilegrad.ir.symbol import Size
from tilegrad.ir.types import Type
from tilegrad.tile import ops, placed
from tilegrad.tile.build import BodyBuilder


def at_callers_line(cls: type) -> type:
    """Methods of a class give their Nodes the line that calls them."""

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*given: Any, **named: Any) -> Any:
            frame = sys._getframe(1)
            with located(Location(frame.f_code.co_filename, frame.f_lineno)):
                return method(*given, **named)

        return call

    for name, method in list(vars(cls).items()):
        if callable(method) and name != "role":  # what a role does has lines of its own
            setattr(cls, name, wrap(method))
    return cls


@at_callers_line
class PlacedBuilder(BodyBuilder):
    """A builder with a method for each op of the placed level."""

    def role(self, name: str, warps: int, registers: int, body: Callable[[], object]) -> None:
        """A role; `body` builds its Block."""
        with self.builder.block(name) as block:
            body()
        self.add(placed.role(blocks=(block,), name=name, warps=warps, registers=registers))

    def barrier(self, name: str, count: int, stages: int = 1) -> Node:
        """An array of barriers."""
        return self.add(placed.barrier(name=name, count=count, stages=stages))

    def arrive(self, barrier_: Node, stage: Size = 0) -> None:
        """Arrive."""
        self.add(placed.arrive(barrier_, self.index(stage)))

    def expect(self, barrier_: Node, stage: Size, bytes_: int) -> None:
        """Arrive and announce bytes."""
        self.add(placed.expect(barrier_, self.index(stage), bytes=bytes_))

    def wait(self, barrier_: Node, stage: Size, parity: Size) -> None:
        """Wait for a phase."""
        self.add(placed.wait(barrier_, self.index(stage), self.index(parity)))

    def copy_async(
        self,
        place: Node,
        at: Sequence[Size],
        memory: Node,
        index: Sequence[Size],
        axes: tuple[int, ...],
        barrier_: Node,
        stage: Size,
        rows: tuple[int, int] | None = None,
    ) -> int:
        """Copy a box into the place at a leading index, or into `rows` (first, count) of it; gives
        its bytes."""
        shape, row = place.shape[len(at) :], 0
        if rows is not None:
            row, shape = rows[0], (rows[1], *shape[1:])
        scalars = [self.index(i) for i in (*index, *at)]
        self.add(
            placed.copy_async(
                place,
                memory,
                barrier_,
                self.index(stage),
                *scalars,
                shape=shape,
                axes=axes,
                row=row,
            )
        )
        return place.dtype.storage_bytes(math.prod(shape))

    def copy_multicast(
        self,
        place: Node,
        at: Sequence[Size],
        rows: tuple[Size, int],
        memory: Node,
        index: Sequence[Size],
        axes: tuple[int, ...],
        barrier_: Node,
        stage: Size,
        mask: int,
        first: Size = 0,
    ) -> None:
        """Copy `rows` (first, count) of a place to all programs of the cluster in a mask."""
        shape = (rows[1], *place.shape[len(at) + 1 :])
        scalars = [self.index(i) for i in (*index, *at, rows[0], first)]
        self.add(
            placed.copy_multicast(
                place,
                memory,
                barrier_,
                self.index(stage),
                *scalars,
                shape=shape,
                axes=axes,
                mask=mask,
            )
        )

    def copy_pages(
        self,
        place: Node,
        at: Sequence[Size],
        memory: Node,
        pages: Node,
        index: Sequence[Size],
        shape: tuple[int, int],
        axes: tuple[int, ...],
        barrier_: Node,
        stage: Size,
        hint: str = "",
    ) -> int:
        """Copy boxes of several pages into the rows of a place; gives their bytes."""
        scalars = [self.index(i) for i in (*index, *at)]
        self.add(
            placed.copy_pages(
                place,
                memory,
                barrier_,
                self.index(stage),
                pages,
                *scalars,
                shape=shape,
                axes=axes,
                hint=hint,
            )
        )
        count = math.prod((*pages.shape, *shape))
        return place.dtype.storage_bytes(count)

    def cluster_rank(self, size: int) -> Size:
        """This program's number within its cluster of `size`."""
        return self.atom("rank", self.add(placed.cluster_rank()), 0, size - 1)

    def arrive_remote(self, barrier_: Node, stage: Size, rank: Size) -> None:
        """Arrive at a barrier of another program."""
        self.add(placed.arrive_remote(barrier_, self.index(stage), self.index(rank)))

    def send(
        self, place: Node, value: Node, barrier_: Node, stage: Size, *index: Size, to: str = "all"
    ) -> None:
        """Send a value, or shares of it, to programs of the cluster; if to 'one', the first index
        is its rank."""
        scalars = [self.index(i) for i in (stage, *index)]
        self.add(placed.send(place, value, barrier_, *scalars, to=to))

    def copy_store(
        self,
        memory: Node,
        index: Sequence[Size],
        axes: tuple[int, ...],
        place: Node,
        at: Sequence[Size] = (),
    ) -> None:
        """Write a box of the place back."""
        shape = place.shape[len(at) :]
        scalars = [self.index(i) for i in (*index, *at)]
        self.add(placed.copy_store(memory, place, *scalars, shape=shape, axes=axes))

    def matrix_async(
        self,
        accumulator: Node,
        a: Node,
        b: Node,
        accumulate: Node | bool,
        at: Sequence[Size] = (),
        transpose_a: bool = False,
        transpose_b: bool = False,
    ) -> None:
        """Multiply and accumulate; `at` are the leading indices of accumulator, a and b."""
        if not isinstance(accumulate, Node):
            accumulate = self.constant(accumulate, bool_)
        self.add(
            placed.matrix_async(
                accumulator,
                a,
                b,
                accumulate,
                *[self.index(i) for i in at],
                transpose_a=transpose_a,
                transpose_b=transpose_b,
            )
        )

    def copy_threads(
        self,
        place: Node,
        at: Sequence[Size],
        memory: Node,
        index: Sequence[Size],
        axes: tuple[int, ...],
        rows: tuple[int, int],
    ) -> None:
        """Copy into `rows` (first, count) of a place by all threads of the role."""
        shape = (rows[1], *place.shape[len(at) + 1 :])
        scalars = [self.index(i) for i in (*index, *at)]
        self.add(placed.copy_threads(place, memory, *scalars, shape=shape, axes=axes, row=rows[0]))

    def store_threads(
        self,
        memory: Node,
        index: Sequence[Size],
        axes: tuple[int, ...],
        place: Node,
        at: Sequence[Size] = (),
    ) -> None:
        """Write a box of the place by all threads of the role."""
        shape = place.shape[len(at) :]
        scalars = [self.index(i) for i in (*index, *at)]
        self.add(placed.store_threads(memory, place, *scalars, shape=shape, axes=axes))

    def store_add(
        self, memory: Node, value: Node, index: Sequence[Size], axes: tuple[int, ...]
    ) -> None:
        """Add a tile to what lies at an index."""
        self.add(placed.store_add(memory, value, *[self.index(i) for i in index], axes=axes))

    def load_operand(
        self, operand: Node, place: Node, at: Sequence[Size], start: int, transpose: bool = False
    ) -> None:
        """Registers of an operand of matrix_sync."""
        self.add(
            placed.load_operand(
                operand, place, *[self.index(i) for i in at], start=start, transpose=transpose
            )
        )

    def matrix_sync(self, accumulator: Node, a: Node, b: Node, warps: tuple[int, int]) -> None:
        """Multiply what is in registers and accumulate."""
        self.add(placed.matrix_sync(accumulator, a, b, warps=warps))

    def register_tile(
        self, shape: tuple[int, ...], dtype: DType, fill: float | None = None
    ) -> Node:
        """A place in registers, filled if asked."""
        place = self.add(placed.register_tile(shape=shape, dtype=dtype))
        if fill is not None:
            self.write(place, self.constant(fill, dtype, shape))
        return place

    def read(self, place: Node, *index: Size, rows: tuple[int, ...] = ()) -> Node:
        """The tile of a place, or `rows` (first, count) of it."""
        return self.add(placed.read_place(place, *[self.index(i) for i in index], rows=rows))

    def write(self, place: Node, value: Node, *index: Size) -> None:
        """Replace the tile of a place."""
        self.add(placed.write_place(place, value, *[self.index(i) for i in index]))

    def clear_rows(self, place: Node, start: Size, stop: Size, *index: Size) -> None:
        """Zeros in some rows of a place."""
        self.add(placed.clear_rows(place, *[self.index(i) for i in (start, stop, *index)]))

    def hole(self, name: str, type_: Type, *inputs: Node) -> Node:
        """A named hole."""
        return self.add(ops.hole(*inputs, name=name, type=type_))

"""Trace a kernel: run its rewritten Python once and collect the Body it describes.

A `Tracer` owns the builder, the grid, the results and the Plan of one Body; loops and branches
are staged by `control`.
Invariant: tracing the same function with the same types, static values and Plan gives a Body
with the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from ..core import dtype as dtypes
from ..core.dtype import DType
from ..core.errors import DTypeError, ShapeError, TraceError, UserError, user_location
from ..ir.block import argument
from ..ir.node import Node, located
from ..ir.symbol import Expr, Size, atoms, ceil_divide, combine, high, low
from ..ir.types import Memory, Shape
from . import ops
from .build import Body, BodyBuilder, ends_of
from .plan import Plan
from .row import Misfit, TileOp
from .value import (
    Index,
    MemoryValue,
    TileValue,
    Window,
    current,
    index_of,
    state,
)


@contextmanager
def into(builder: BodyBuilder) -> Iterator[None]:
    """Inside, the language adds to the Body of a builder: how the library's kernels are written.

    Nothing is guarded or judged here, as it is for a kernel that is called: parts of arrays are
    inside of them, or masked; `check` and the interpreter hold the Body to it.
    """
    made = Tracer(builder, Plan(), Plan(), trusts=True)
    with made.active(), located(user_location()):  # one line for all its Nodes
        yield


def memory(node: Node) -> MemoryValue:
    """A parameter of a builder's Body, as the language sees it."""
    return MemoryValue(str(node.attrs.get("name", "array")), node, True)


def memories(b: BodyBuilder) -> dict[str, MemoryValue]:
    """The parameters of a builder's Body by name."""
    return {p.attrs["name"]: memory(p) for p in b.parameters}


def outside(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a builder's Nodes and Sizes, to be called with values of the language."""

    def plain(value: Any) -> Any:
        if isinstance(value, TileValue):
            return value.node
        if isinstance(value, tuple):
            return tuple(plain(v) for v in value)
        return value.size if isinstance(value, Index) else value

    def call(*given: Any) -> Any:
        found = function(*(plain(v) for v in given))
        return TileValue(found) if isinstance(found, Node) else found

    return call


GRID_LIMIT = 2**31 - 1  # programs of a launch


@dataclass(frozen=True)
class Range:
    """What tile.range gives: a loop that is staged."""

    lower: Size
    upper: Size
    step: int
    unroll: int = 1
    block: int | None = None  # rows of each Rows, for tile.range_n
    bounds: tuple[int, int] | None = None  # the least and most that its index is, where known

    @property
    def plain(self) -> bool:
        """Whether it is known how often it runs."""
        return isinstance(self.lower, int) and isinstance(self.upper, int)

    def ends(self) -> tuple[int, int]:
        """The least and the most that its index is."""
        return ends_of(self.lower, self.upper, self.step) if self.bounds is None else self.bounds

    def limit(self) -> Limit:
        """What its index is, by its own bounds."""
        if self.plain:
            return Limit(*self.ends(), self.bounds is None, self.step)
        return Limit(self.lower, combine(self.upper, 1, -1), self.step == 1, self.step)

    def item(self, index: Size) -> Any:
        """What the body gets for an index."""
        return index_of(index) if self.block is None else Rows(index, self.block)

    def __iter__(self) -> Iterator[Any]:
        raise TraceError(
            "a loop that runs in the kernel is a `for` statement of the kernel",
            hint="a comprehension or a list takes Python's own range, which is unrolled",
        )


@dataclass(frozen=True)
class Rows:
    """Rows start .. start+count of an array: what a loop over blocks gives."""

    start: Size
    count: int

    @property
    def index(self) -> Any:
        """The first row."""
        return index_of(self.start)


class Limit(NamedTuple):
    """The least and the most that a program's number or a loop's index is; whether it is both."""

    lower: Size
    upper: Size
    reached: bool
    step: int = 1


@dataclass(frozen=True, eq=False)
class Access:
    """An access of a result: 'store', 'load' or 'add' (atomic).

    A box has an index, offsets are a tile of them. `cut` says that the mask leaves out more than
    what lies beyond the ends of the result. `branches` are the conditions around with their side,
    `empty` the indices of loops around that may not run.
    """

    kind: str
    node: Node
    memory: Node
    branches: tuple[tuple[Node, bool], ...]
    empty: tuple[Expr | Node, ...]
    index: tuple[Size, ...] | None
    tile: Shape
    axes: Shape
    offsets: Node | None = None
    mask: Node | None = None
    cut: bool = False
    unique: bool = False

    @property
    def writes(self) -> bool:
        """Whether it changes the result."""
        return self.kind != "load"

    def length(self, axis: int) -> int:
        """Elements along an axis of the result."""
        return self.tile[self.axes.index(axis)] if axis in self.axes else 1


class Tracer:
    """One Body being traced."""

    def __init__(
        self,
        builder: BodyBuilder,
        plan: Plan,
        stated: Plan,
        guards: bool = False,
        trusts: bool = False,
    ) -> None:
        self.builder, self.plan = builder, plan
        self.stated = stated  # what a person set of the Plan
        self.guards = guards  # indices that only data decides are checked while the kernel runs
        self.trusts = trusts  # what is read and written is inside, or masked: the kernel says so
        self.limits: dict[Expr, Limit] = {}
        self.ranges: dict[Node, tuple[int, int]] = {}
        self.lines: dict[Node, Any] = {}
        self.branches: list[tuple[Node, bool]] = []  # around
        self.empty: list[Expr | Node] = []  # loops around that may be
        self.accesses: dict[Node, Access] = {}  # of results
        self.inputs = [MemoryValue(p.attrs["name"], p, False) for p in builder.parameters]
        self.results: list[MemoryValue] = []
        self.fills: dict[str, float] = {}
        self.loose: set[str] = set()  # results of which nobody reads what is not written
        self.grid: tuple[Size, ...] | None = None
        self.programs: list[Size] = []
        self.notes = plan.notes()  # of the Body
        self.atoms: dict[Any, Size] = {}
        self.rows: Rows | None = None  # of the program, where the grid is implied
        self.lead: tuple[Size, ...] = ()

    @property
    def placed(self) -> bool:
        """Whether it has ops of the placed level."""
        ops_ = (node.op for node in self.builder.block.all_nodes())
        return any(isinstance(op, TileOp) and op.placed for op in ops_)

    @property
    def nested(self) -> bool:
        """Whether a loop, a branch or a role is around."""
        return len(self.builder.builder.open) > 1

    @property
    def maybe(self) -> bool:
        """Whether what is traced may not be run at all."""
        return bool(self.branches or self.empty)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, this is the Tracer of the thread."""
        before, state.tracer = state.tracer, self
        try:
            yield
        except UserError as error:
            error.name("kernel")
            raise
        except Misfit as error:
            if self.trusts:
                raise
            where: dict[str, Any] = {"op": error.where, "location": error.location}
            if error.got is not None:
                where |= {"expected": error.expected, "got": error.got}
                raise DTypeError("no such operands", **where) from None
            raise ShapeError(error.message, **where) from None
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

    def touch(self, kind: str, memory: MemoryValue, at: Window | Node, **facts: Any) -> None:
        """Note the access of a result by the Node that was added last, with facts of an Access:
        of a part of it, or of elements at offsets."""
        if any(memory.node is r.node for r in self.results):
            node = self.builder.builder.open[-1].nodes[-1]
            around = tuple(self.branches), tuple(self.empty)
            if isinstance(at, Node):
                place: tuple[Any, ...] = None, at.shape, (), at
            else:
                place = at.index, at.shape, at.axes
            self.accesses[node] = Access(kind, node, memory.node, *around, *place, **facts)

    # ---- grid and results -----------------------------------------------------------------

    def set_grid(self, sizes: Sequence[Size]) -> list[Size]:
        """Declare the grid; gives this program's numbers."""
        if self.grid is not None:
            raise TraceError(
                "the grid is declared twice",
                hint="tile.load(rows=...) implies a grid of row blocks",
            )
        if self.nested:
            raise TraceError("the grid is declared inside a loop or a branch")
        check_grid(sizes)
        self.grid = tuple(sizes)
        self.programs = [self.builder.program(i, s) for i, s in enumerate(sizes)]
        for atom, size in zip(self.programs, sizes):
            if isinstance(atom, Expr):
                self.limits[atom] = Limit(0, combine(size, 1, -1), True)
        return self.programs

    def implied_rows(self) -> Rows:
        """This program's rows, where the grid follows from the first array: one program for
        each block of its rows, times the sizes of its leading axes."""
        if self.rows is None:
            if not self.inputs or self.inputs[0].ndim < 2:
                raise ShapeError(
                    "the grid cannot be implied",
                    expected="a first argument of shape (..., rows, columns)",
                    got=repr(self.inputs[:1]),
                    hint="declare it with tile.grid(...)",
                )
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
            raise UserError(f"the Plan has no {name}")
        return int(found)

    def add_result(
        self,
        shape: Sequence[Size],
        dtype: DType,
        name: str = "",
        fill: float | str | None = None,
    ) -> MemoryValue:
        """A new array that the kernel gives back."""
        if self.nested:
            raise TraceError("a result is declared inside a loop or a branch")
        name = name or f"out{len(self.results)}"
        number = isinstance(fill, (int, float))
        type_ = Memory(tuple(shape), dtype, use="state" if number else "result")
        node = argument(name, type_)
        self.builder.block.arguments = (*self.builder.block.arguments, node)
        self.builder.builder.known[0].add(id(node))
        if isinstance(fill, (int, float)):
            self.fills[name] = fill
        elif fill is not None:
            self.loose.add(name)
        self.results.append(MemoryValue(name, node, True))
        return self.results[-1]

    def finish(self) -> Body:
        """The Body."""
        if not self.results:
            raise UserError(
                f"the kernel {self.builder.name} has no result",
                expected="tile.result(...), or a returned tile",
            )
        level = "placed" if self.placed else "portable"
        return self.builder.finish(self.grid or (1,), **self.notes, level=level)


def tracer() -> Tracer:
    """The Tracer of the kernel that is being traced in this thread."""
    found: Tracer = current()
    return found


def check_grid(sizes: Sequence[Size]) -> None:
    """A grid is made of static and symbolic sizes, not negative, and a machine can count it."""
    if any(a.kind != "symbol" for size in sizes for a in atoms(size)):
        raise TraceError(
            "the grid depends on what the kernel computes",
            expected="integers and symbolic sizes",
            got=tuple(sizes),
        )
    if not sizes or any(high(size) < 0 for size in sizes):
        raise ShapeError(
            "no grid has such sizes", expected="one size or more, none negative", got=tuple(sizes)
        )
    count = prod(low(size) for size in sizes)
    if count > GRID_LIMIT:
        raise ShapeError(
            "the grid is too large",
            expected=f"at most {GRID_LIMIT} programs",
            got=count,
            hint="let each program do more: a larger block, or a loop",
        )

"""What a kernel's variables hold while it is traced: tiles, indices, Memories and windows of them.

A `TileValue` wraps a Node. It also knows its *edges*: where a tile stands at the end of an array
and part of it lies beyond, an Edge says from which position on there are no elements. Reductions,
dots and stores leave those out, so a kernel needs no masks for its last, partial tiles. An
`Index` is an integer known by its bounds (program numbers, loop indices, symbolic sizes).
Invariant: a value is used only while the kernel it belongs to is traced; operators give values
of the same kind as NumPy would, and a Python number takes the dtype of its partner.
The file is long because these kinds of values know each other.
"""

from __future__ import annotations

import functools
import math
import operator
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..core import dtype as dtypes
from ..core.dtype import DType
from ..core.errors import DTypeError, ShapeError, TraceError, UserError
from ..ir.node import Node
from ..ir.symbol import Expr, Size, combine, high, low, maximum, minimum
from ..ir.types import Memory, Shape
from . import numeric
from .operators import Operators
from .row import memory_of

FAR = 1 << 40  # the most that an index is, unless the kernel says more


class _State(threading.local):
    tracer: Any = None


state = _State()
# Functions that values call and that stand above this file: each file enters its own.
ABOVE: dict[str, Callable[..., Any]] = {}


def current() -> Any:
    """The Tracer (see `trace`) of the kernel that is being traced in this thread."""
    if state.tracer is None:
        raise TraceError(
            "used outside of a kernel", hint="call it inside a function decorated with @kernel"
        )
    return state.tracer


def named(op: str, function: Any) -> Any:
    """The function, whose errors say which op they are of."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except UserError as error:
            error.name(op)
            raise

    return call


class Edge(NamedTuple):
    """Position p of a tile's axis is an element where 0 <= start + p < limit."""

    start: Size
    limit: Size

    def holds_all(self, size: int) -> bool:
        """Whether every one of `size` positions is an element, whatever the Symbols are."""
        return low(self.start) >= 0 and low(combine(self.limit, self.start + size, -1)) >= 0


Edges = tuple["Edge | None", ...]


def index_of(size: Size | Index) -> Any:
    """A Size as a kernel sees it: an int, or an Index."""
    return size if isinstance(size, (int, Index)) else Index(size)


def _decide(a: Size, b: Size, name: str) -> bool | None:
    """What bounds prove of a comparison."""
    gap = combine(b, a, -1)  # b - a
    if name in ("less", "less_equal"):
        least = 1 if name == "less" else 0
        return True if low(gap) >= least else False if high(gap) < least else None
    if low(gap) == high(gap) == 0:
        return name == "equal"
    return name != "equal" if low(gap) > 0 or high(gap) < 0 else None


def operate(name: str, *given: Any) -> Any:
    """An elementwise op; of sizes a size, or what their bounds prove."""
    found = _symbolic(name, *given) if len(given) == 2 else None
    return ABOVE["elementwise"](name, *given) if found is None else found


EXACT: dict[str, Callable[[Any, Any], Size]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "maximum": maximum,
    "minimum": minimum,
    "floor_divide": operator.floordiv,
    "remainder": operator.mod,
}


def _symbolic(name: str, *given: Any) -> Any:
    """An op on two sizes, exact and by their bounds; None for other values, and for what only the
    run tells."""
    if not all(isinstance(x, (int, Index, Expr)) and not isinstance(x, bool) for x in given):
        return None
    a, b = (x.size if isinstance(x, Index) else x for x in given)
    if name in numeric.COMPARE:
        return _decide(a, b, name)
    if name not in EXACT or (name in ("floor_divide", "remainder") and low(b) < 1):
        return None
    return index_of(EXACT[name](a, b))


class Traced(Operators):
    """What a kernel computes with; a part of an array is read first."""

    __slots__ = ()

    def operate(self, name: str, *values: Any) -> Any:
        """An operator."""
        known = [Index(v) if isinstance(v, Expr) else v for v in values]
        if not all(isinstance(v, (int, float, Traced)) for v in known):
            return NotImplemented
        try:
            return operate(name, *known)
        except UserError as error:
            error.name(f"tile.{name}")
            raise


@dataclass(eq=False)
class Undefined(Traced):
    """What a variable holds before it is set, or after the loop that set it."""

    name: str
    why: str = "is not set here"

    def fail(self) -> UserError:
        """The error of using it."""
        return UserError(
            f"the variable {self.name!r} {self.why}",
            hint="set it before the loop or the branch that changes it",
        )

    def _use(self, *_: Any, **__: Any) -> Any:
        raise self.fail()

    operate = __getitem__ = __bool__ = __call__ = __iter__ = __matmul__ = _use
    __int__ = __float__ = __index__ = _use


@dataclass(slots=True, eq=False)
class Index(Traced):
    """A scalar integer known by its bounds; arithmetic with integers stays exact and symbolic."""

    size: Expr

    def __repr__(self) -> str:
        return f"<index {self.size}>"

    def __neg__(self) -> Any:
        return index_of(-self.size)

    def _refuse(self) -> Any:
        raise TraceError(
            f"{self.size} is known only when the kernel runs",
            hint="loop with tile.range(...); a tile's shape is made of plain integers",
        )

    __int__ = __index__ = __float__ = __bool__ = _refuse
    __hash__ = None  # type: ignore[assignment]


class TileValue(Traced):
    """A tile (or a scalar) of a kernel that is being traced."""

    __slots__ = ("block", "edges", "node", "zero")

    def __init__(self, node: Node, edges: Edges | None = None, zero: tuple[bool, ...] = ()) -> None:
        self.node = node
        self.edges: Edges = (None,) * len(node.shape) if edges is None else edges
        self.zero = zero or (False,) * len(node.shape)  # axes beyond whose edge all is 0
        self.block = current().builder.builder.open[-1]  # where it can be used

    def checked(self) -> TileValue:
        """Itself, unless the loop, branch or role it was made in is over."""
        if self.block not in current().builder.builder.open:
            raise UserError(
                f"a tile made in a loop, a branch or a role ({self.block.name}) is used after it",
                got=repr(self),
                hint="what leaves a loop or a branch is a variable set before it; "
                "roles share places, not tiles",
            )
        return self

    def __repr__(self) -> str:
        return repr(self.node.type)

    @property
    def shape(self) -> Shape:
        """Sizes, all static."""
        return self.node.shape

    @property
    def dtype(self) -> DType:
        """Dtype of the elements."""
        return self.node.dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def T(self) -> TileValue:
        """The last two axes swapped."""
        return ABOVE["transpose"](self)

    def to(self, dtype: Any) -> TileValue:
        """Converted to a dtype."""
        return cast(self, dtypes.dtype_of(dtype))

    def __getitem__(self, key: Any) -> TileValue:
        return ABOVE["expand"](self, key if isinstance(key, tuple) else (key,))

    def __matmul__(self, other: Any) -> TileValue:
        return ABOVE["dot"](self, other)

    def _refuse(self) -> Any:
        raise TraceError(
            "a tile has no value while the kernel is traced",
            got=repr(self),
            hint="use tile.where, or & | ~ in place of and, or, not; `if` takes a scalar tile, "
            "without return, break or continue inside",
        )

    __bool__ = __int__ = __index__ = __float__ = __iter__ = _refuse
    __hash__ = None  # type: ignore[assignment]


@dataclass(slots=True, eq=False)
class MemoryValue(Traced):
    """An array a kernel reads or writes, or a place it allocated: `x[rows, 3:11]` is a Window.

    Fewer integers than axes, `place[stage]`, name what lies there: a MemoryValue of the axes that
    are left. `turned` (`place[stage].T`) says that a product takes it transposed.
    """

    name: str
    node: Node
    writable: bool
    lead: tuple[Size, ...] = ()
    turned: bool = False

    def __repr__(self) -> str:
        return f"<{self.name}: {self.node.type}>"

    @property
    def T(self) -> MemoryValue:
        """The same, transposed where a product reads it."""
        return replace(self, turned=not self.turned)

    @property
    def bytes(self) -> int:
        """Bytes of a place."""
        return self[...].bytes

    @property
    def type(self) -> Memory:
        """The Memory type."""
        return memory_of(self.node)

    @property
    def shape(self) -> tuple[Any, ...]:
        """Sizes: ints, or Indices where they are symbolic."""
        return tuple(index_of(s) for s in self.type.shape[len(self.lead) :])

    @property
    def dtype(self) -> DType:
        """Dtype of the elements."""
        return self.type.dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.type.shape) - len(self.lead)

    def __getitem__(self, key: Any) -> Any:
        given = key if isinstance(key, tuple) else (key,)
        fewer = len(given) < self.ndim
        if fewer and all(isinstance(k, (int, Index, Expr, TileValue)) for k in given):
            return replace(self, lead=(*self.lead, *[size_of(k, "index") for k in given]))
        return window_of(self, given)

    def __iter__(self) -> Any:
        raise DTypeError(
            "an array is not looped over in a kernel",
            got=repr(self),
            hint="loop over tile.range(n), and read a part of it",
        )

    def __setitem__(self, key: Any, value: Any) -> None:
        ABOVE["store"](self[key], value)


@dataclass(slots=True, eq=False)
class Window(Traced):
    """A box of a Memory: where it starts, its static shape, and the Memory axis of each axis."""

    memory: MemoryValue
    index: tuple[Size, ...]
    shape: Shape
    axes: Shape

    @property
    def lead(self) -> tuple[Size, ...]:
        """The index of the axes before those of the box."""
        return self.index[: len(self.index) - len(self.shape)]

    @property
    def bytes(self) -> int:
        """Bytes of the box."""
        return self.memory.dtype.storage_bytes(math.prod(self.shape))

    @property
    def edges(self) -> Edges:
        """Where the box leaves the Memory, unless it provably does not."""
        if current().trusts:
            return (None,) * len(self.shape)
        found: list[Edge | None] = []
        for size, axis in zip(self.shape, self.axes):
            edge = Edge(self.index[axis], self.memory.type.shape[axis])
            found.append(None if edge.holds_all(size) else edge)
        return tuple(found)


def spread(key: tuple[Any, ...], rank: int) -> tuple[Any, ...]:
    """Subscripts in which slices of whole axes stand for `...`; None is no axis."""
    for place, k in enumerate(key):
        if k is Ellipsis:
            missing = rank + 1 - sum(other is not None for other in key)
            return (*key[:place], *[slice(None)] * missing, *key[place + 1 :])
    return key


def window_of(memory: MemoryValue, key: tuple[Any, ...]) -> Window:
    """The Window that subscripts describe: integers, and slices of a static length."""
    sizes, lead = memory.type.shape[len(memory.lead) :], memory.lead
    key = spread(key, len(sizes))
    if len(key) != len(sizes):
        raise ShapeError(
            f"{len(key)} subscripts for {memory.name}",
            expected=f"{len(sizes)} for {memory.node.type}",
            got=len(key),
            hint="name every axis: x[i, 0:16], or use ...",
        )
    index: list[Size] = []
    shape: list[int] = []
    axes: list[int] = []
    for axis, (k, size) in enumerate(zip(key, sizes)):
        if not isinstance(k, slice):
            index.append(size_of(k, "index"))
            continue
        start = 0 if k.start is None else size_of(k.start, "index")
        stop = size if k.stop is None else size_of(k.stop, "index")
        length = combine(stop, start, -1)
        if k.step not in (None, 1) or not isinstance(length, int) or length < 1:
            raise ShapeError(
                f"axis {axis} of {memory.name} is cut to a length that is not a static integer",
                expected="start:start+length with an integer length",
                got=f"{start}:{stop}",
                hint="the shape of a tile is fixed when it is compiled; an "
                "integer that was loaded is made an index by tile.index(x)",
            )
        index.append(start)
        shape.append(length)
        axes.append(axis + len(lead))
    return Window(memory, (*lead, *index), tuple(shape), tuple(axes))


# ---- conversions ------------------------------------------------------------------------------


def scalar(size: Size) -> TileValue:
    """A Size as a scalar tile of int64."""
    return TileValue(current().builder.index(size))


def size_of(value: Any, what: str) -> Size:
    """An int, an Index or an integer scalar tile as a Size."""
    if isinstance(value, bool):
        value = int(value)
    if isinstance(value, (int, Expr)):
        return value
    if isinstance(value, Index):
        return value.size
    if isinstance(value, Undefined):
        raise value.fail()
    if isinstance(value, Window) or (isinstance(value, MemoryValue) and not value.ndim):
        value = tile_of(value)  # a number that is read here
    if isinstance(value, TileValue) and value.dtype.is_integer and value.shape == ():
        own = value.dtype if value.dtype.bits < 64 else dtypes.int64
        return current().atom_of(value.checked().node, int(own.lowest), int(own.highest))
    raise DTypeError(
        f"the {what} is not an integer",
        expected="an int, an index or an integer scalar",
        got=repr(value),
    )


def number(value: Any) -> bool:
    """Whether a value takes the dtype of its partner."""
    return isinstance(value, (bool, int, float, Index))


def tile_of(value: Any, dtype: DType | None = None) -> TileValue:
    """A value as a tile; a number becomes a scalar of the dtype given, or of its own."""
    if isinstance(value, TileValue):
        return value.checked()
    if isinstance(value, Undefined):
        raise value.fail()
    b = current().builder
    if isinstance(value, (Index, Expr)):
        return cast(scalar(size_of(value, "number")), dtype or dtypes.int64)
    if isinstance(value, (bool, int, float)):
        own = dtypes.float32 if isinstance(value, float) else dtypes.int64
        chosen = dtype or (dtypes.bool_ if isinstance(value, bool) else own)
        if chosen.is_integer:
            value, count = int(value), 1 << chosen.bits
            if chosen.kind == "int" and count // 2 <= value < count:
                value -= count  # as the bits it is written with
            if not -count // 2 <= value < count:
                raise DTypeError(
                    "a number does not fit the dtype of its partner",
                    expected=chosen,
                    got=value,
                    hint="cast the tile first",
                )
        return TileValue(b.constant(value, chosen))
    if isinstance(value, Window):
        return ABOVE["load"](value)
    if isinstance(value, MemoryValue):
        if not value.ndim:
            return TileValue(b.load(value.node, ()))  # an array without axes is a number
        raise DTypeError(
            "an array is not a tile",
            got=repr(value),
            hint="read a part of it: x[i, 0:64] or tile.load(...)",
        )
    raise DTypeError("not a tile or a number", got=type(value).__name__)


def cast(value: Any, dtype: DType) -> TileValue:
    """A value as a tile of a dtype; its edges stay."""
    x = tile_of(value, dtype)
    if x.dtype is dtype:
        return x
    node = current().builder.cast(x.node, dtype)
    return TileValue(node, x.edges, x.zero)

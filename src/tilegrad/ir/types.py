"""Types of Nodes: arrays of a Graph, tiles and places of a Body, storage, and tuples of these.

Invariant: types are frozen and interned by value; sizes are ints or canonical Exprs, so two
equal types are equal under `==` and hash alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Union

from ..core.dtype import DType
from ..core.errors import ShapeError
from .symbol import Size, high, multiply

Shape = tuple[int, ...]  # a number for each axis: static sizes; of an index, its places


def show_shape(shape: tuple[Size, ...]) -> str:
    """A shape as text: `4,8`."""
    return ",".join(str(s) for s in shape)


@dataclass(frozen=True, slots=True)
class Array:
    """A value of a Graph: logical shape and dtype, no place in memory."""

    shape: tuple[Size, ...]
    dtype: DType

    def __repr__(self) -> str:
        return f"{self.dtype.name}[{show_shape(self.shape)}]"

    @property
    def size(self) -> Size:
        """Number of elements."""
        return product(self.shape)

    @property
    def bytes(self) -> Size:
        """Bytes of its elements; int4 has a byte an element."""
        return self.size * self.dtype.size


LARGEST = (1 << 63) - 1  # bytes that an index of 64 bits reaches


def check_addressable(type_: Array, op: str) -> None:
    """An error for an array whose elements or bytes a 64-bit index does not reach; sizes of 0 do
    not make the others small, since strides are made of them."""
    bits = type_.dtype.bits
    for size in type_.shape:
        bits *= (size if size.__class__ is int else high(size)) or 1
    if bits > LARGEST << 3:
        raise ShapeError(
            "an array of this size cannot be addressed",
            op=op,
            expected=f"at most {LARGEST} bytes (2**63 - 1)",
            got=repr(type_),
        )


@dataclass(frozen=True, slots=True)
class Tile:
    """A block of values moved as one; the shape is static, () is a scalar."""

    shape: Shape
    dtype: DType

    def __repr__(self) -> str:
        return f"tile<{show_shape(self.shape)}>{self.dtype.name}"


@dataclass(frozen=True, slots=True)
class Memory:
    """Storage a Body sees: a parameter ('global') or an allocated place in a Scope.

    `use` marks a parameter 'constant', 'state', 'value' or 'result'; `strides` are in elements
    (row-major where None); `layout` names a swizzle or packing of the Scope, '' for plain.
    """

    shape: tuple[Size, ...]
    dtype: DType
    scope: str = "global"
    use: str = "value"
    strides: tuple[Size, ...] | None = None
    layout: str = ""

    def __repr__(self) -> str:
        text = f"{self.scope}<{show_shape(self.shape)}>{self.dtype.name}"
        if self.strides is not None:
            text += f" strides<{show_shape(self.strides)}>"
        if self.use != "value":
            text += f" {self.use}"
        if self.layout:
            text += f" layout<{self.layout}>"
        return text

    def element_strides(self) -> tuple[Size, ...]:
        """Strides in elements, filled in row-major where none were given."""
        return row_major(self.shape) if self.strides is None else self.strides


@dataclass(frozen=True, slots=True)
class Barrier:
    """A synchronisation object of a Body: `count` arrivals complete a phase."""

    count: int
    kind: str = "mbarrier"

    def __repr__(self) -> str:
        return f"barrier<{self.count},{self.kind}>"


@dataclass(frozen=True, slots=True)
class Tuple:
    """Several values made by one Node."""

    items: tuple[Type, ...]

    def __repr__(self) -> str:
        return "(" + ", ".join(map(repr, self.items)) + ")"


@dataclass(frozen=True, slots=True)
class Nothing:
    """The type of a Node that is run for its effect."""

    def __repr__(self) -> str:
        return "nothing"


NOTHING = Nothing()
Type = Union[Array, Tile, Memory, Barrier, Tuple, Nothing]


def product(sizes: tuple[Size, ...]) -> Size:
    """The product of sizes."""
    total: Size = 1
    for s in sizes:
        total = multiply(total, s)
    return total


def row_major(shape: tuple[Size, ...]) -> tuple[Size, ...]:
    """Element strides of a dense row-major array."""
    strides: list[Size] = []
    step: Size = 1
    for s in reversed(shape):
        strides.append(step)
        step = multiply(step, s)
    return tuple(reversed(strides))


def unravel(number: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The index of a row-major number."""
    index = []
    for size in reversed(shape):
        index.append(number % size)
        number //= size
    return tuple(reversed(index))

"""Layouts: from coordinates to offsets, as hierarchical shape:stride with an optional XOR.

    (4,(2,8)):(16,(1,2)) xor<3,4,3>

Each leaf of the shape has a stride of the same nesting; the offset of a coordinate is the sum of
coordinate times stride, then swizzled. One integer stands for a coordinate of a nested mode: it
runs with the FIRST leaf fastest, as in CuTe, and the last leaf is not wrapped. Sizes are ints or
Exprs and need not be powers of two. Invariant: the operations below are exact, or a UserError
says why the result is no Layout; a Layout prints as text that `Layout.from_text` reads back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any, Union

import numpy as np

from ..core.errors import InternalError, UserError
from .literal import Names, read_symbolic, write, write_symbolic
from .symbol import Expr, Size, ceil_divide, proves_less

Nested = Union[Size, tuple["Nested", ...]]  # an int, an Expr or a tuple of these
Leaf = tuple[Size, Size]  # size and stride


@dataclass(frozen=True, slots=True)
class Swizzle:
    """XOR of `bits` bits at `base` with the bits `shift` above them: a permutation of offsets."""

    bits: int
    base: int
    shift: int

    def __post_init__(self) -> None:
        if not (self.bits >= 1 and self.base >= 0 and self.shift >= self.bits):
            raise UserError("bad swizzle", expected="bits >= 1, base >= 0, shift >= bits", got=self)

    @property
    def period(self) -> int:
        """The pattern repeats after this many offsets."""
        return 1 << (self.bits + self.base + self.shift)

    def __call__(self, offset: Any) -> Any:
        """The swizzled offset, of an int or of a NumPy array; its own inverse."""
        mask = ((1 << self.bits) - 1) << (self.base + self.shift)
        return offset ^ ((offset & mask) >> self.shift)

    def in_elements(self, element_bytes: int) -> Swizzle:
        """The same swizzle on offsets in elements, given one on bytes."""
        lost = element_bytes.bit_length() - 1
        if element_bytes != 1 << lost or lost > self.base:
            raise UserError(
                "swizzle in elements", expected=f"1, 2, .. {1 << self.base}", got=element_bytes
            )
        return Swizzle(self.bits, self.base - lost, self.shift)

    def __repr__(self) -> str:
        return f"xor<{self.bits},{self.base},{self.shift}>"


def byte_swizzle(width: int) -> Swizzle:
    """The swizzle of shared memory on bytes for rows of 32, 64 or 128 bytes (TMA, wgmma)."""
    if width not in (32, 64, 128):
        raise UserError("bad swizzle width", expected="32, 64 or 128", got=width)
    return Swizzle({32: 1, 64: 2, 128: 3}[width], 4, 3)


@dataclass(frozen=True, slots=True)
class Layout:
    """Hierarchical shape:stride, then an optional Swizzle."""

    shape: Nested
    stride: Nested
    swizzle: Swizzle | None = None

    def __post_init__(self) -> None:
        if not _congruent(self.shape, self.stride):
            raise UserError(
                "shape and stride of a Layout must nest alike", got=(self.shape, self.stride)
            )

    @property
    def rank(self) -> int:
        """Number of modes at the top."""
        return len(self.shape) if isinstance(self.shape, tuple) else 1

    def __getitem__(self, mode: int) -> Layout:
        """One mode, without the swizzle."""
        return self.modes()[mode]

    def modes(self) -> tuple[Layout, ...]:
        """The modes at the top, without the swizzle."""
        if isinstance(self.shape, tuple) and isinstance(self.stride, tuple):
            return tuple(Layout(s, d) for s, d in zip(self.shape, self.stride))
        return (Layout(self.shape, self.stride),)

    def leaves(self) -> tuple[Leaf, ...]:
        """(size, stride) of every leaf, the fastest first."""
        return tuple(_leaves(self.shape, self.stride))

    @property
    def size(self) -> Size:
        """Number of coordinates."""
        return size_of(self.shape)

    @property
    def cosize(self) -> Size:
        """One more than the largest offset."""
        if self.swizzle is not None:
            return int(self.offsets().max(initial=-1)) + 1
        top: Size = 1
        for size, stride in self.leaves():
            if isinstance(stride, Expr) or stride > 0:
                top = top + (size - 1) * stride
        return top

    def linear(self, *coordinates: Any) -> Size:
        """The offset before the swizzle."""
        if len(coordinates) == 1 and (self.rank != 1 or not isinstance(self.shape, tuple)):
            return _offset(coordinates[0], self.shape, self.stride)
        return _offset(coordinates, self.shape, self.stride)

    def __call__(self, *coordinates: Any) -> Size:
        """The offset of a coordinate: one value per mode, or one index of the whole."""
        offset = self.linear(*coordinates)
        if self.swizzle is None:
            return offset
        if isinstance(offset, Expr):
            raise InternalError("layout", f"the swizzle of the symbolic offset {offset}")
        swizzled: int = self.swizzle(offset)
        return swizzled

    def offsets(self) -> np.ndarray:
        """Every offset, an array with one axis per mode; sizes must be known."""
        total = reduce(np.add.outer, [_mode_offsets(m) for m in self.modes()])
        return np.asarray(total if self.swizzle is None else self.swizzle(total))

    def to_text(self) -> str:
        """The text, with the Symbols declared at the end if there are any."""
        return write_symbolic(self._write)

    def _write(self, names: Names) -> str:
        text = f"{write(self.shape, names)}:{write(self.stride, names)}".replace(", ", ",")
        return text if self.swizzle is None else f"{text} {self.swizzle}"

    def __repr__(self) -> str:
        return self._write(Names())

    @staticmethod
    def from_text(text: str) -> Layout:
        """The Layout that a text describes."""
        reader = read_symbolic(text, "a Layout")
        shape = reader.value()
        reader.expect(":", " between shape and stride")
        stride = reader.value()
        swizzle = None
        if reader.accept("xor"):
            reader.expect("<")
            bits = reader.integer()
            reader.expect(",")
            base = reader.integer()
            reader.expect(",")
            swizzle = Swizzle(bits, base, reader.integer())
            reader.expect(">")
        if reader.kind != "end":
            raise reader.fail("the end of the Layout")
        return Layout(shape, stride, swizzle)


def _congruent(shape: Any, stride: Any) -> bool:
    if isinstance(shape, tuple) and isinstance(stride, tuple):
        return len(shape) == len(stride) and all(map(_congruent, shape, stride))
    return isinstance(shape, (int, Expr)) and isinstance(stride, (int, Expr))


def _leaves(shape: Any, stride: Any) -> Iterator[Leaf]:
    if not isinstance(shape, tuple):
        yield shape, stride
        return
    for s, d in zip(shape, stride):
        yield from _leaves(s, d)


def size_of(shape: Nested) -> Size:
    """Number of coordinates of a nested shape."""
    if not isinstance(shape, tuple):
        return shape
    total: Size = 1
    for s in shape:
        total = total * size_of(s)
    return total


def _offset(coordinate: Any, shape: Any, stride: Any) -> Size:
    if isinstance(coordinate, tuple):
        if not isinstance(shape, tuple) or len(shape) != len(coordinate):
            raise UserError("coordinate does not fit the Layout", expected=shape, got=coordinate)
        total: Size = 0
        for c, s, d in zip(coordinate, shape, stride):
            total = total + _offset(c, s, d)
        return total
    if not isinstance(shape, tuple):
        offset: Size = coordinate * stride
        return offset
    total = 0
    for position, (s, d) in enumerate(zip(shape, stride)):
        if position == len(shape) - 1:
            return total + _offset(coordinate, s, d)
        size = size_of(s)
        total = total + _offset(coordinate % size, s, d)
        coordinate = coordinate // size
    return total


def _mode_offsets(mode: Layout) -> np.ndarray:
    offsets = np.zeros(1, np.int64)
    for size, stride in mode.leaves():
        steps = np.arange(int(size), dtype=np.int64) * int(stride)
        offsets = np.add.outer(steps, offsets).reshape(-1)
    return offsets


def row_major(shape: Nested) -> Layout:
    """The dense Layout whose last leaf is the fastest."""
    return Layout(shape, _dense(shape, 1, last_first=True)[0])


def column_major(shape: Nested) -> Layout:
    """The dense Layout whose first leaf is the fastest."""
    return Layout(shape, _dense(shape, 1, last_first=False)[0])


def _dense(shape: Nested, step: Size, last_first: bool) -> tuple[Nested, Size]:
    if not isinstance(shape, tuple):
        return step, step * shape
    strides: list[Nested] = []
    for s in reversed(shape) if last_first else shape:
        stride, step = _dense(s, step, last_first)
        strides.append(stride)
    return tuple(reversed(strides) if last_first else strides), step


def join(*modes: Layout, swizzle: Swizzle | None = None) -> Layout:
    """One Layout with these modes at the top."""
    return Layout(tuple(m.shape for m in modes), tuple(m.stride for m in modes), swizzle)


def _from_leaves(leaves: list[Leaf], swizzle: Swizzle | None = None) -> Layout:
    if not leaves:
        return Layout(1, 0, swizzle)
    if len(leaves) == 1:
        return Layout(*leaves[0], swizzle)
    return Layout(tuple(s for s, _ in leaves), tuple(d for _, d in leaves), swizzle)


def coalesce(layout: Layout) -> Layout:
    """The same function of one index, with as few leaves as possible."""
    merged: list[Leaf] = []
    for size, stride in layout.leaves():
        if isinstance(size, int) and size == 1:
            continue
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = (merged[-1][0] * size, merged[-1][1])
        else:
            merged.append((size, stride))
    return _from_leaves(merged, layout.swizzle)


def compose(outer: Layout, inner: Layout) -> Layout:
    """The Layout of `outer(inner(coordinate))`, with the shape of `inner`."""
    if inner.swizzle is not None:
        raise UserError("compose: the inner Layout is swizzled", got=inner)
    if proves_less(outer.size, inner.cosize):
        raise UserError(
            "compose: the inner Layout goes beyond the outer",
            expected=f"offsets below {outer.size}",
            got=f"{inner}, up to {inner.cosize - 1}",
        )
    flat = coalesce(outer).leaves()
    _check_carries(flat, outer, inner)

    def walk(shape: Any, stride: Any) -> tuple[Nested, Nested]:
        if not isinstance(shape, tuple):
            part = _from_leaves(_compose_leaf(flat, shape, stride, outer, inner))
            return part.shape, part.stride
        parts = [walk(s, d) for s, d in zip(shape, stride)]
        return tuple(s for s, _ in parts), tuple(d for _, d in parts)

    return Layout(*walk(inner.shape, inner.stride), outer.swizzle)


def _check_carries(flat: tuple[Leaf, ...], outer: Layout, inner: Layout) -> None:
    """Leaves of `inner` can be composed one by one only if their sum never carries from one
    leaf of `outer` into the next."""
    boundary: Size = 1
    for extent, _ in flat[:-1]:
        boundary = boundary * extent
        top: Size = 0
        for size, stride in inner.leaves():
            top = top + _largest_remainder(size, stride, boundary)
        if not proves_less(top, boundary):
            raise UserError(
                "compose: the result is no Layout",
                expected=f"modes that together stay below {boundary}, or step over it exactly",
                got=f"{outer} of {inner}",
            )


def _largest_remainder(size: Size, stride: Size, boundary: Size) -> Size:
    """The largest of i * stride % boundary over i < size (or more, with Symbols)."""
    if isinstance(stride, int) and stride < 0:
        return boundary
    if proves_less((size - 1) * stride, boundary):
        return (size - 1) * stride
    if stride % boundary == 0:
        return 0
    if boundary % stride == 0:
        return boundary - stride
    if isinstance(size, int) and isinstance(stride, int) and isinstance(boundary, int):
        return max(i * stride % boundary for i in range(size))
    return boundary - 1


def _compose_leaf(
    flat: tuple[Leaf, ...], size: Size, stride: Size, outer: Layout, inner: Layout
) -> list[Leaf]:
    """Leaves that go through `outer` (flat) in `size` steps of `stride`."""
    if stride == 0 or size == 1:
        return [(size, 0)]
    found: list[Leaf] = []
    for extent, step in flat[:-1]:
        if proves_less((size - 1) * stride, extent):  # all the rest stays within this leaf
            return [*found, (size, stride * step)]
        if stride % extent == 0:
            stride = stride // extent
            continue
        count = extent // stride
        if extent % stride != 0 or size % count != 0:
            raise UserError(
                "compose: the result is no Layout",
                expected=f"steps of {stride} that divide the leaf of {extent}",
                got=f"{outer} of {inner}",
            )
        found.append((count, stride * step))
        size, stride = size // count, 1
        if size == 1:
            return found
    return [*found, (size, stride * flat[-1][1])]


def _by_stride(layout: Layout, what: str) -> list[tuple[Size, Size, Size]]:
    """(stride, size, index stride) of the leaves that move, the least stride first."""
    found: list[tuple[Size, Size, Size]] = []
    index: Size = 1
    for size, stride in layout.leaves():
        if not (isinstance(size, int) and size == 1):
            if stride == 0:
                raise UserError(f"{what}: the Layout repeats offsets", got=layout)
            found.append((stride, size, index))
        index = index * size
    return sorted(found, key=lambda leaf: leaf[0])


def _gap(stride: Size, current: Size, layout: Layout, what: str) -> Size:
    if stride % current != 0:
        raise UserError(f"{what}: strides do not nest", got=layout)
    return stride // current


def complement(layout: Layout, size: Size) -> Layout:
    """The Layout of the offsets below `size` at which copies of `layout` fill what it leaves."""
    found: list[Leaf] = []
    current: Size = 1
    moving = [(s, d) for s, d in layout.leaves() if d != 0]
    for stride, extent, _ in _by_stride(_from_leaves(moving), "complement"):
        gap = _gap(stride, current, layout, "complement")
        if gap != 1:
            found.append((gap, current))
        current = stride * extent
    rest = ceil_divide(size, current)
    if rest != 1:
        found.append((rest, current))
    return coalesce(_from_leaves(found))


def divide(layout: Layout, tile: int | tuple[int, ...]) -> Layout:
    """The Layout as ((within a tile), (which tile)), tiling each mode by its own size."""
    sizes = tile if isinstance(tile, tuple) else (tile,)
    modes = layout.modes()
    if len(sizes) != len(modes):
        raise UserError("divide: one tile size per mode", expected=len(modes), got=sizes)
    inside, outside = [], []
    for mode, size in zip(modes, sizes):
        if mode.size % size != 0:
            raise UserError(
                "divide: tiles must fit exactly", expected=f"a divisor of {mode.size}", got=size
            )
        parts = compose(mode, Layout((size, mode.size // size), (1, size)))
        inside.append(parts[0])
        outside.append(parts[1])
    return join(join(*inside), join(*outside), swizzle=layout.swizzle)


def product(layout: Layout, copies: Layout) -> Layout:
    """(layout, places): `copies` counts copies of `layout`, laid next to one another."""
    room = complement(layout, layout.size * copies.cosize)
    return join(Layout(layout.shape, layout.stride), compose(room, copies), swizzle=layout.swizzle)


def inverse(layout: Layout) -> Layout:
    """From offset to index, for every offset that the Layout gives."""
    if layout.swizzle is not None:
        raise UserError("inverse: take the swizzle off first (it is its own inverse)", got=layout)
    found: list[Leaf] = []
    current: Size = 1
    for stride, size, index in _by_stride(layout, "inverse"):
        gap = _gap(stride, current, layout, "inverse")
        if gap != 1:
            found.append((gap, 0))
        found.append((size, index))
        current = stride * size
    return coalesce(_from_leaves(found))


def is_injective(layout: Layout) -> bool:
    """Whether no two coordinates share an offset; with symbolic sizes, whether it is proved."""
    leaves = [(s, d) for s, d in layout.leaves() if not (isinstance(s, int) and s <= 1)]
    if any(isinstance(v, Expr) for leaf in leaves for v in leaf):
        try:
            leaves.sort(key=lambda leaf: leaf[1])
        except UserError:
            return False
        reach: Size = 0
        for size, stride in leaves:
            if not proves_less(reach, stride):
                return False
            reach = reach + (size - 1) * stride
        return True
    offsets = layout.offsets().reshape(-1)
    return len(np.unique(offsets)) == len(offsets)

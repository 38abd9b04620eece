"""Spreads: which thread holds which elements of a Tile, and in which registers.

A coordinate is a part that comes from the thread's number plus one fixed for the register:
`coordinate[axis] = sum of ((thread >> shift) & (2**width - 1)) * stride over the fields of the
axis + registers[r][axis]`. Bits of the thread's number that no field names hold copies.
Invariant: every element of the Tile is held by some thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ...core.errors import InternalError

Field = tuple[int, int, int, int]  # shift, width, axis, stride


@dataclass(frozen=True)
class Spread:
    """The places of a Tile's elements; see the module's docstring."""

    shape: tuple[int, ...]
    fields: tuple[Field, ...]
    registers: tuple[tuple[int, ...], ...]

    @cached_property
    def where(self) -> dict[tuple[int, ...], int]:
        """The register of each register offset."""
        return {at: number for number, at in enumerate(self.registers)}

    def copies(self, threads: int) -> int:
        """The bits of a thread's number that tell copies apart."""
        mask = threads - 1
        for shift, width, _, _ in self.fields:
            mask &= ~(((1 << width) - 1) << shift)
        return mask

    def drop(self, axis: int) -> Spread:
        """Without an axis: what is left after a reduction along it."""
        return self._without(axis, lambda c: c[:axis] + c[axis + 1 :], self._minus(axis))

    def squeeze(self, axes: Sequence[int]) -> Spread:
        """With size 1 along some axes: what a broadcast along them reads."""
        found = self
        for axis in axes:
            shape = found.shape[:axis] + (1,) + found.shape[axis + 1 :]
            made = tuple(dict.fromkeys(c[:axis] + (0,) + c[axis + 1 :] for c in found.registers))
            found = Spread(shape, tuple(f for f in found.fields if f[2] != axis), made)
        return found

    def insert(self, axis: int) -> Spread:
        """With a new axis of size 1."""
        shape = self.shape[:axis] + (1,) + self.shape[axis:]
        fields = tuple((s, w, a + (a >= axis), d) for s, w, a, d in self.fields)
        return Spread(shape, fields, tuple(c[:axis] + (0,) + c[axis:] for c in self.registers))

    def permute(self, order: Sequence[int]) -> Spread:
        """With axes in another order: axis i of the result is axis order[i]."""
        back = {a: i for i, a in enumerate(order)}
        fields = tuple((s, w, back[a], d) for s, w, a, d in self.fields)
        made = tuple(tuple(c[a] for a in order) for c in self.registers)
        return Spread(tuple(self.shape[a] for a in order), fields, made)

    def reshape(self, shape: tuple[int, ...]) -> Spread:
        """The same elements in another row-major shape."""
        if shape == self.shape:
            return self
        steps = _steps(self.shape)
        made = tuple(_unravel(sum(c * s for c, s in zip(at, steps)), shape)
                     for at in self.registers)  # fmt: skip
        fields: list[Field] = []
        for shift, width, axis, stride in self.fields:
            for bit in range(width):
                linear = steps[axis] * stride << bit
                at = _unravel(linear, shape)
                moving = [a for a, c in enumerate(at) if c]
                if len(moving) != 1:
                    raise InternalError("ptx.spread", f"{self} cannot be seen as {shape}")
                fields.append((shift + bit, 1, moving[0], at[moving[0]]))
        return Spread(shape, _merge(fields), made)

    def part(self, start: tuple[int, ...], shape: tuple[int, ...]) -> Spread:
        """A rectangle; what the threads' numbers add must stay within it."""
        reach = [0] * len(shape)
        for _, width, axis, stride in self.fields:
            reach[axis] += ((1 << width) - 1) * stride
        made = []
        for at in self.registers:
            moved = tuple(c - a for c, a in zip(at, start))
            inside = [c >= 0 and c + r < size for c, r, size in zip(moved, reach, shape)]
            outside = any(c + r < 0 or c >= size for c, r, size in zip(moved, reach, shape))
            if not all(inside) and not outside:
                raise InternalError("ptx.spread", f"{self} is not cut at {start}, {shape}")
            if all(inside):
                made.append(moved)
        return Spread(shape, self.fields, tuple(made))

    def _minus(self, axis: int) -> tuple[Field, ...]:
        return tuple((s, w, a - (a > axis), d) for s, w, a, d in self.fields if a != axis)

    def _without(self, axis: int, cut: object, fields: tuple[Field, ...]) -> Spread:
        made = tuple(dict.fromkeys(c[:axis] + c[axis + 1 :] for c in self.registers))
        return Spread(self.shape[:axis] + self.shape[axis + 1 :], fields, made)


SCALAR = Spread((), (), ((),))


def _steps(shape: Sequence[int]) -> list[int]:
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= size
    return steps[::-1]


def _unravel(linear: int, shape: Sequence[int]) -> tuple[int, ...]:
    found = []
    for size in reversed(shape):
        found.append(linear % size)
        linear //= size
    return tuple(reversed(found))


def _merge(fields: Sequence[Field]) -> tuple[Field, ...]:
    """Neighbouring bits of one axis as one field."""
    merged: list[Field] = []
    for shift, width, axis, stride in sorted(fields):
        if merged:
            s, w, a, d = merged[-1]
            if a == axis and s + w == shift and d << w == stride:
                merged[-1] = (s, w + width, a, d)
                continue
        merged.append((shift, width, axis, stride))
    return tuple(merged)


def blocked(shape: tuple[int, ...], threads: int, vector: int) -> Spread:
    """Neighbouring threads hold neighbouring runs of `vector` elements, in rounds.

    Sizes must be powers of two.
    """
    total = math.prod(shape)
    if total & (total - 1):
        raise InternalError("ptx.spread", f"a tile of {shape} has a size that is no power of two")
    vector = max(1, min(vector, total // threads))
    spread_over = min(threads, total // vector)
    rounds = total // (vector * spread_over)
    registers = tuple((turn * vector * spread_over + i,) for turn in range(rounds)
                      for i in range(vector))  # fmt: skip
    width = spread_over.bit_length() - 1
    fields = ((0, width, 0, vector),) if width else ()
    return Spread((total,), fields, registers).reshape(shape)


def accumulator(shape: tuple[int, int], warps: int) -> Spread:
    """D of wgmma m64nN, its 64 rows over the four warps of a warpgroup; warpgroups take
    further blocks of 64 rows, and rows beyond those go into more registers."""
    rows, columns = shape
    groups = warps // 4
    if warps % 4 or rows % (64 * groups) or columns % 8:
        raise InternalError("ptx.spread", f"{shape} does not fit wgmma over {warps} warps")
    fields: list[Field] = [(0, 2, 1, 2), (2, 3, 0, 1), (5, 2, 0, 16)]
    if groups > 1:
        fields.append((7, groups.bit_length() - 1, 0, 64))
    registers = tuple(
        (block * 64 * groups + 8 * (i >> 1 & 1), 8 * (i >> 2) + (i & 1))
        for block in range(rows // (64 * groups)) for i in range(columns // 2)
    )  # fmt: skip
    return Spread(shape, tuple(fields), registers)


def accumulator_80(shape: tuple[int, int], down: int, across: int) -> Spread:
    """C of mma.m16n8 repeated over a Tile; warps stand in a grid of `down` by `across`."""
    rows, columns = shape
    high, wide = rows // down, columns // across
    if rows % (16 * down) or columns % (8 * across):
        raise InternalError("ptx.spread", f"{shape} does not fit mma over {down}x{across} warps")
    fields: list[Field] = [(0, 2, 1, 2), (2, 3, 0, 1)]
    if across > 1:
        fields.append((5, across.bit_length() - 1, 1, wide))
    if down > 1:
        fields.append((5 + across.bit_length() - 1, down.bit_length() - 1, 0, high))
    registers = tuple(
        (16 * i + 8 * (r >> 1), 8 * j + (r & 1))
        for i in range(high // 16) for j in range(wide // 8) for r in range(4)
    )  # fmt: skip
    return Spread(shape, tuple(fields), registers)

"""Spreads: which thread holds which elements of a Tile, and in which registers.

A coordinate is a part that comes from the thread's number plus one fixed for the register:
`coordinate[axis] = sum of ((thread >> shift) & (2**width - 1)) * stride over the fields of the
axis + registers[r][axis]`. Bits of the thread's number that no field names hold copies.
Invariant: every element of the Tile is held by some thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from ...core.errors import InternalError
from ...ir.types import Shape, row_major, unravel

Field = tuple[int, int, int, int]  # shift, width, axis, stride
Sides = tuple[int, int]  # rows and columns
MOST_REGISTERS = 1024  # of one Tile in one thread
LANES: tuple[Field, ...] = ((0, 2, 1, 2), (2, 3, 0, 1))  # of a warp that holds a matrix of 8 x 8


@dataclass(frozen=True)
class Spread:
    """The places of a Tile's elements; see the module's docstring."""

    shape: Shape
    fields: tuple[Field, ...]
    registers: tuple[Shape, ...]

    @cached_property
    def where(self) -> dict[Shape, int]:
        """The register of each register offset."""
        return {at: number for number, at in enumerate(self.registers)}

    def copies(self, threads: int) -> int:
        """The bits of a thread's number that tell copies apart."""
        mask = (1 << (threads - 1).bit_length()) - 1
        for shift, width, _, _ in self.fields:
            mask &= ~(((1 << width) - 1) << shift)
        return mask

    def drop(self, axis: int) -> Spread:
        """Without an axis: what is left after a reduction along it."""
        fields = tuple((s, w, a - (a > axis), d) for s, w, a, d in self.fields if a != axis)
        made = tuple(dict.fromkeys(c[:axis] + c[axis + 1 :] for c in self.registers))
        return Spread(self.shape[:axis] + self.shape[axis + 1 :], fields, made)

    def before_repeat(self, shape: Shape) -> Spread:
        """What a Tile of this shape is held as that is repeated to one held so."""
        more = len(self.shape) - len(shape)
        fields = tuple(
            (s, w, a - more, d) for s, w, a, d in self.fields if a >= more and shape[a - more] != 1
        )
        return Spread(
            shape, fields, tuple(dict.fromkeys(repeated(c, shape) for c in self.registers))
        )

    def stack(self, count: int) -> Spread:
        """Several such Tiles along a new first axis, each in registers of its own."""
        fields = tuple((s, w, a + 1, d) for s, w, a, d in self.fields)
        made = tuple((number, *at) for number in range(count) for at in self.registers)
        return Spread((count, *self.shape), fields, made)

    def permute(self, order: Sequence[int]) -> Spread:
        """With axes in another order: axis i of the result is axis order[i]."""
        back = {a: i for i, a in enumerate(order)}
        fields = tuple((s, w, back[a], d) for s, w, a, d in self.fields)
        made = tuple(tuple(c[a] for a in order) for c in self.registers)
        return Spread(tuple(self.shape[a] for a in order), fields, made)

    def reshape(self, shape: Shape) -> Spread:
        """The same elements in another row-major shape."""
        if shape == self.shape:
            return self
        steps = steps_of(self.shape)
        made = tuple(unravel(sum(c * s for c, s in zip(at, steps)), shape) for at in self.registers)
        fields: list[Field] = []
        for shift, width, axis, stride in self.fields:
            for bit in range(width):
                linear = steps[axis] * stride << bit
                at = unravel(linear, shape)
                moving = [a for a, c in enumerate(at) if c]
                if len(moving) != 1:
                    raise InternalError("ptx.spread", f"{self} cannot be seen as {shape}")
                fields.append((shift + bit, 1, moving[0], at[moving[0]]))
        return Spread(shape, _merge(fields), made)

    def words(self, shape: Shape) -> Spread:
        """Neighbours of the last axis as one element each; they are in one thread."""
        last, each = len(shape) - 1, self.shape[-1] // shape[-1]
        fields = tuple((s, w, a, d // each if a == last else d) for s, w, a, d in self.fields)
        made = tuple((*at[:last], at[last] // each) for at in self.registers[::each])
        if each * len(made) != len(self.registers) or self != Spread(shape, fields, made).apart(
            self.shape
        ):
            raise InternalError("ptx.spread", f"{self} has no words of {each}")
        return Spread(shape, fields, made)

    def apart(self, shape: Shape) -> Spread:
        """The elements of words."""
        last, each = len(shape) - 1, shape[-1] // self.shape[-1]
        fields = tuple((s, w, a, d * each if a == last else d) for s, w, a, d in self.fields)
        made = ((*at[:last], at[last] * each + i) for at in self.registers for i in range(each))
        return Spread(shape, fields, tuple(made))

    def part(self, start: Shape, shape: Shape) -> Spread:
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

    def whole(self, shape: Shape) -> Spread:
        """A Tile of which this holds a part one element wide along some axes and whole along the
        others: threads hold all that lies along those axes."""
        if any(own not in (1, size) for own, size in zip(self.shape, shape)):
            raise InternalError("ptx.spread", f"{self} is no line of {shape}")
        found: list[Shape] = []
        for at in self.registers:
            sides = zip(at, self.shape, shape)
            found += product(*(range(size) if own != size else (c,) for c, own, size in sides))
        return Spread(shape, self.fields, tuple(sorted(found)))  # neighbours move together


SCALAR = Spread((), (), ((),))


def repeated(at: Shape, shape: Shape) -> Shape:
    """The index that a broadcast of a Tile of this shape reads for one of its own."""
    inner = at[len(at) - len(shape) :]
    return tuple(0 if size == 1 else c for c, size in zip(inner, shape))


def steps_of(shape: Sequence[int]) -> list[int]:
    """Elements between neighbours along each axis, row by row."""
    return [int(step) for step in row_major(tuple(shape))]


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


def _bits(shape: Sequence[int]) -> list[Sides]:
    """(axis, stride) of the binary digits of a Tile's coordinates, innermost first.

    An axis of odd * 2 ** n elements has n of them.
    """
    return [
        (axis, 1 << bit)
        for axis in reversed(range(len(shape)))
        for bit in range((shape[axis] & -shape[axis]).bit_length() - 1)
    ]


def _assigned(shape: Shape, thread_bits: Sequence[Sides], fastest: int = -1) -> Spread:
    """The Spread in which a thread's binary digits are the given ones; all others are registers,
    whose coordinate along the axis `fastest` runs fastest."""
    fields = [(shift, 1, *bit) for shift, bit in enumerate(thread_bits)]
    offsets: list[Shape] = [()]
    for axis, size in enumerate(shape):
        taken = sum(bit[1] for bit in thread_bits if bit[0] == axis)
        coordinates = [c for c in range(size) if not c % (size & -size) & taken]
        offsets = [(*at, c) for at in offsets for c in coordinates]
    if len(offsets) > MOST_REGISTERS:
        raise InternalError(
            "ptx.spread", f"a tile of {shape} is {len(offsets)} registers of each thread"
        )
    if fastest >= 0:
        offsets.sort(key=lambda at: (at[:fastest] + at[fastest + 1 :], at[fastest]))
    return Spread(shape, _merge(fields), tuple(offsets))


def blocked(
    shape: Shape, threads: int, vector: int, inner: int = -1, warps_along: int = -1
) -> Spread:
    """Neighbouring threads hold neighbouring runs of `vector` elements, in rounds.

    Runs lie along the axis `inner` (the last where it is -1). Warps are spread over the axis
    `warps_along` first, so that what lies along the others stays within one.
    """
    bits, wanted = sorted(_bits(shape), key=lambda b: b[0] != inner), threads.bit_length() - 1
    run = max(0, min(vector.bit_length() - 1, len(bits) - wanted))
    lanes, free = bits[run:][: min(5, wanted)], bits[run:][min(5, wanted) :]
    free.sort(key=lambda b: b[0] != warps_along)
    return _assigned(shape, (lanes + free)[:wanted], inner)


def lines(shape: Shape, threads: int, axis: int) -> Spread:
    """A thread holds neighbours along an axis, and neighbouring threads what follows."""
    wanted = threads.bit_length() - 1
    size = shape[axis]
    bits = _bits(shape)
    if size & (size - 1):  # no power of two: every thread holds whole lines
        return _assigned(shape, [b for b in bits if b[0] != axis][:wanted])
    run = max(0, len(bits) - wanted)
    return _assigned(shape, [b for b in bits if b[0] != axis or b[1] >> run][:wanted])


def grid(shape: Sides, threads: int) -> Spread:
    """Rectangles of a matrix: runs of four columns, eight threads of a warp along them; rows of
    one thread stand apart."""
    rows, columns = shape
    if rows & (rows - 1) or columns & (columns - 1):
        raise InternalError("ptx.spread", f"a dot of {shape}: sizes must be powers of two")
    down, across = ([b for b in _bits(shape) if b[0] == axis] for axis in (0, 1))
    wanted = threads.bit_length() - 1
    taken, across = across[2:5], across[5:]
    while len(taken) < min(5, wanted) and down:
        taken.append(down.pop(0))
    while len(taken) < wanted and (down or across):
        taken.append(down.pop(0) if len(down) >= len(across) else across.pop(0))
    return _assigned(shape, taken)


def accumulator(shape: Sides, warps: int) -> Spread:
    """D of wgmma m64nN, its 64 rows over the four warps of a warpgroup; warpgroups take
    further blocks of 64 rows, and rows beyond those go into more registers."""
    rows, columns = shape
    groups = warps // 4
    if warps % 4 or rows % (64 * groups) or columns % 8:
        raise InternalError("ptx.spread", f"{shape} does not fit wgmma over {warps} warps")
    pieces = [(i, j) for i in range(0, rows, 64 * groups) for j in range(0, columns, 8)]
    return _of_pieces(shape, [(5, 2, 0, 16), (7, groups.bit_length() - 1, 0, 64)], pieces)


def _of_pieces(shape: Sides, warps: Sequence[Field], pieces: list[Sides]) -> Spread:
    """Pieces of 16 x 8 as a warp holds them."""
    fields = (*LANES, *(field for field in warps if field[1]))
    registers = tuple((i + 8 * (r >> 1), j + (r & 1)) for i, j in pieces for r in range(4))
    return Spread(shape, fields, registers)


def operand_pairs(shape: Sides, warps: int) -> Spread:
    """A of wgmma in registers, as words of two neighbours along k."""
    return accumulator((shape[0], 2 * shape[1]), warps).words(shape)


def accumulator_80(shape: Sides, down: int, across: int) -> Spread:
    """C of mma.m16n8 repeated over a Tile; warps stand in a grid of `down` by `across`."""
    high, wide = shape[0] // down, shape[1] // across
    pieces = [(i, j) for i in range(0, high, 16) for j in range(0, wide, 8)]
    return _of_warps(shape, down, across, (high, wide), 8, pieces)


def accumulator_turns(shape: Sides, down: int, across: int) -> Spread:
    """C of mma.m16n8 by warps that take turns, 16 rows down and 16 columns across each, so that
    whole turns are rectangles of the Tile."""
    rows, columns = (range(0, n, 16 * warps) for n, warps in zip(shape, (down, across)))
    pieces = [(row, column + half) for row in rows for column in columns for half in (0, 8)]
    return _of_warps(shape, down, across, (16, 16), 16, pieces)


def _of_warps(
    shape: Sides,
    down: int,
    across: int,
    apart: Sides,
    width: int,
    pieces: list[Sides],
) -> Spread:
    """C of mma.m16n8 at some pieces of each warp, whose neighbours stand so far apart."""
    if shape[0] % (16 * down) or shape[1] % (width * across):
        raise InternalError("ptx.spread", f"{shape} does not fit mma over {down}x{across} warps")
    high, wide = (n.bit_length() - 1 for n in (down, across))
    return _of_pieces(shape, [(5, wide, 1, apart[1]), (5 + wide, high, 0, apart[0])], pieces)


def operand_words(shape: Sides, down: int) -> Spread:
    """A of mma.m16n8k16 as words of two neighbours along k; each warp has rows of its own."""
    return accumulator_80((shape[0], 2 * shape[1]), down, 1).words(shape)


def operand_rows(shape: Sides, down: int) -> Spread:
    """B of mma.m16n8k16, stored (n, k); each warp has rows of its own."""
    each = shape[0] // down
    fields = (*LANES, (5, down.bit_length() - 1, 0, each))
    columns = (0, 1, 8, 9)
    return Spread(shape, fields, tuple((row, c) for row in range(0, each, 8) for c in columns))

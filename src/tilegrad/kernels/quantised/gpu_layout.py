"""How quantised weights lie in a GPU's memory, and how threads take them apart.

A *group* is 32 neighbouring elements of a row. A thread reads the codes of a group 16 bytes at a
time (a *unit*: a group of nibbles, half a group of bytes), and lanes of a warp read neighbouring
groups, so what one Format keeps together in a block lies here in arrays of their own, the *parts*.
Codes leave `Groups.words` as bytes, four neighbours to an int32, ready for byte products; their
centre is taken off a whole group at a time.

| part    | shape              | holds                                                          |
|---------|--------------------|----------------------------------------------------------------|
| codes   | rows, units,       | bytes, two of nibbles in each (of columns 16 apart): word j of |
|         | groups 4           | a unit has those of elements 2 j, 2 j + 8, 2 j + 1 and 2 j + 9 |
|         |                    | of 16: a thread's own part of what matrix units take           |
|         | rows, 1, groups 2  | pairs of bits: as `pairs`                                      |
| pairs   | rows, groups, 2    | two bits more: of word 4 h + i in h, at bits 8 b + 2 i         |
| bits    | rows, groups       | one bit more: of word i at bits 8 b + i                        |
| small   | rows, groups       | scales (and minima) of a group or its halves, a byte each      |
| scales  | rows, groups [/ 8] | float16 scale; a float16 minimum or zero point above it        |

Nibbles or bytes alone with one scale a group lie in strips of 8 rows, whose groups follow one
another: codes (rows / 8, groups, units, 8 rows 4) and scales (rows / 8, groups, 8 rows). So the 8
rows by 4 groups that a warp multiplies at once are whole lines, and so are those that byte products
take.
Rows are padded to ROWS and groups to STEP with scales of 0. Bits for a weight: those of the file,
but Q4_K and Q5_K an eighth more (scales of 6 bits take 8), Q3_K likewise.
Invariant: `codes - centre`, scales and minima are those of the Format, exactly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ... import tile
from ...core.dtype import float16, float32, int32, uint8, uint16
from ...core.format import NUMPY
from ...ir.symbol import ceil_divide, round_up
from .layout import Array, Layout, joined
from .shape import Part, QuantisedShape
from .words import and_masks, doubled, moved, shifted, there

ROWS = 16  # rows are padded to a multiple of this
GROUP = 32
STRIP = 8
STEP = 32  # groups of a row are padded to a multiple of this
MORE = {1: "bits", 2: "pairs"}  # the part of a plane above the codes, by its bits
BLOCK = 8  # groups that share what `scales` holds, where there are small ones
MAGIC = 0x4B000000  # the bits of 2 ** 23: a byte below makes that number more
NEIGHBOURS = (0x6420, 0x7531)  # of two words the bytes of columns side by side, then 8 further
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the values


def halves_of(x: Layout) -> int:
    """How many scales a group has."""
    return GROUP // x.group


def half_of(x: Layout, word: int) -> int:
    """Which of a group's scales the codes of a word have."""
    return 4 * word * halves_of(x) // GROUP


def words_of(x: Layout) -> int:
    """Words of codes of a group that lie side by side."""
    return min(4, x.planes[0])


def in_strips(x: Layout) -> bool:
    """Whether groups of STRIP rows lie side by side."""
    return x.planes in ((4,), (8,)) and not x.two_levels and not x.doubled


def units_of(x: Layout) -> int:
    """Units of codes of a group."""
    return x.planes[0] // words_of(x)


def groups_of(shape: QuantisedShape) -> int:
    """Groups of a row, padded."""
    return round_up(ceil_divide(shape.columns, GROUP), STEP)


def parts(shape: QuantisedShape) -> list[Part]:
    """The parts in order."""
    x, rows, groups = shape.layout, round_up(shape.rows, ROWS), groups_of(shape)
    words, units = words_of(x), units_of(x)
    if in_strips(x):
        strips, kind = (rows // STRIP, groups), int32 if x.least else float16
        codes = (*strips, units, STRIP * words)
        return [("codes", codes, int32), ("scales", (*strips, STRIP), kind)]
    made: list[Part] = [("codes", (rows, units, groups * words), int32)]
    for bits in x.planes[1:]:
        made.append((MORE[bits], (rows, groups, bits) if bits > 1 else (rows, groups), int32))
    if x.two_levels:
        made.append(("small", (rows, groups), uint16))
    kind = uint8 if x.doubled else int32 if x.least else float16
    made.append(("scales", (rows, groups // (BLOCK if x.two_levels else 1)), kind))
    return made


def bytes_of(shape: QuantisedShape) -> int:
    """Bytes of all parts."""
    return sum(int(np.prod(sizes)) * dtype.size for _, sizes, dtype in parts(shape))


# ---- packing --------------------------------------------------------------------------------


def pack(shape: QuantisedShape, raw: Array) -> dict[str, Array]:
    """The parts of rows (n, row bytes) of the Format."""
    shape = replace(shape, rows=len(raw))
    x, form, groups = shape.layout, shape.format, groups_of(shape)
    assert form.codes is not None and form.scales is not None
    fields = form.split(raw)
    codes: Array
    made = _scales(shape, fields, len(raw))
    if form.name in ("Q4_0", "Q4_1", "Q4_Z"):  # as in the file, but for the order
        made["codes"] = _paired(fields["nibbles"])
    else:
        codes = form.codes(NUMPY, fields).reshape(len(raw), -1)  # int8
        codes = _digits(codes) if x.doubled else codes.view(np.uint8) + np.uint8(x.centre)
        codes = _padded(codes, (len(raw), groups * GROUP)).reshape(-1, groups, GROUP)
        made["codes"] = _codes(x.planes[0], codes)
    for bits in x.planes[1:]:
        above = codes >> np.uint8(x.planes[0])
        words = _words(above, bits)
        made[MORE[bits]] = words if bits > 1 else words[..., 0]
    for name, sizes, dtype in parts(shape):
        found = made[name]
        if in_strips(x):
            found = _stripped(found.reshape(len(raw), -1), sizes)
        made[name] = _padded(found, sizes).astype(dtype.numpy, copy=False)
    return made


def _stripped(values: Array, sizes: Sequence[int]) -> Array:
    """Rows (n, groups words) as strips of rows, group by group."""
    strips, groups, *units, words = sizes
    unit, each = math.prod(units), words // STRIP
    whole = _padded(values, (strips * STRIP, groups * unit * each))
    whole = whole.reshape(strips, STRIP, groups, unit, each)
    return whole.transpose(0, 2, 3, 1, 4).reshape(sizes)


def _padded(values: Array, sizes: Sequence[int]) -> Array:
    if values.shape == tuple(sizes):
        return np.ascontiguousarray(values)
    return np.pad(values, [(0, size - own) for size, own in zip(sizes, values.shape)])


def _paired(units: Array) -> Array:
    """The part `codes` of units (n, units, 16): bytes, or nibbles in which those of 16 columns
    stand above those before."""
    halves = units.reshape(len(units), -1, 2, 8)
    made = np.stack([halves[:, :, 0], halves[:, :, 1]], axis=-1)
    return made.reshape(len(units), 1, -1).view(np.int32)


def _digits(codes: Array) -> Array:
    """The nibbles of doubled E2M1 values."""
    table = np.zeros(256, np.uint8)
    for digit, value in enumerate(E2M1):
        table[value], table[-value] = digit, 8 + digit
    table[0] = 0
    return table[codes.view(np.uint8)]


def _words(codes: Array, bits: int) -> Array:
    """Some bits of each of (n, groups, 32) codes as words (n, groups, bits)."""
    ordered = codes.reshape(*codes.shape[:2], bits, 8 // bits, 4)
    return np.ascontiguousarray(joined(ordered, bits)).view(np.int32)[..., 0]


def _codes(bits: int, codes: Array) -> Array:
    """The part `codes` of codes (n, groups, 32)."""
    lead = codes.shape[:2]
    if bits == 4:
        low, high = codes[..., :16] & np.uint8(15), codes[..., 16:] << np.uint8(4)
        return _paired(low | high)
    if bits == 8:
        return _paired(codes)
    return _words(codes, bits).reshape(lead[0], 1, -1)


def _scales(shape: QuantisedShape, fields: dict[str, Array], n: int) -> dict[str, Array]:
    x = shape.layout
    if x.doubled:
        return {"scales": fields["power"].reshape(n, -1)}
    found = fields["scale"].reshape(n, -1)
    if x.least:
        two = np.stack([found, fields[x.least].reshape(n, -1)], axis=-1)  # the first one is low
        found = two.view(np.int32)[..., 0]
    made = {"scales": found}
    if x.two_levels:
        scale, minimum = shape.format.whole_scales(fields)
        scale = scale.astype(np.int16).reshape(n, -1).astype(np.uint16) & 255
        if minimum is not None:
            low = (-minimum).astype(np.uint16).reshape(n, -1)
            scale = scale | low << np.uint16(8 // halves_of(x))
        if halves_of(x) == 2:
            scale = scale[:, ::2] | scale[:, 1::2] << np.uint16(8)
        made["small"] = scale
    return made


# ---- in a kernel ----------------------------------------------------------------------------


class Groups:
    """Loads groups of some rows in a kernel and takes them apart; Tiles are (rows, groups, 1)."""

    def __init__(self, shape: QuantisedShape, memory: dict[str, Any]) -> None:
        self.x = shape.layout
        self.memories = {name: memory[name] for name, _, _ in parts(shape)}

    def load(self, row: Any, group: Any, rows: int, groups: int) -> list[Any]:
        """All there is of rows and groups from a row and a group on, as it lies; 0 past the last
        ones."""
        made = []
        for name, memory in self.memories.items():
            if in_strips(self.x):
                units = range(memory.shape[2]) if name == "codes" else [None]
                made += [self.strips(memory, row, group, rows, groups, u) for u in units]
                continue
            if name == "codes":
                words = words_of(self.x)
                first = group * words
                shape: tuple[int, ...] = (rows, groups * words)
                inside = of_whole_rows(shape, (row, first), memory.shape[::2])
                for unit in range(memory.shape[1]):
                    found = tile.load(memory, (row, unit, first), shape, axes=(0, 2), mask=inside)
                    made.append(tile.reshape(found, (rows, groups, words)))
                continue
            each = BLOCK if name == "scales" and self.x.two_levels else 1
            more = memory.shape[2:]
            first, shape = group // each, (rows, max(1, groups // each), *more)
            inside = of_whole_rows(shape, (row, first), memory.shape)
            made.append(tile.load(memory, (row, first, *(0 for _ in more)), shape, mask=inside))
        return made

    def strips(
        self, memory: Any, row: Any, group: Any, rows: int, groups: int, unit: int | None = None
    ) -> Any:
        """Rows of a part that lies in strips, whole ones or within one: (rows, groups), of codes
        all units or one, and words."""
        each, within = memory.shape[-1] // STRIP, min(rows, STRIP)
        units = [1 if unit is not None else n for n in memory.shape[2:-1]]
        sizes = (rows // within, groups, *units, within * each)
        first = row % STRIP * each if rows < STRIP else 0
        at = (row // STRIP, group, *[unit or 0 for _ in units], first)
        found = tile.load(memory, at, sizes, mask=of_whole_rows(sizes, at, memory.shape))
        words = [each] if units else []
        found = tile.reshape(found, (rows // within, groups, math.prod(units), within, each))
        found = tile.transpose(found, (0, 3, 1, 2, 4))
        return tile.reshape(found, (rows, groups, *(u for u in units if u > 1), *words))

    def named(self, loaded: Sequence[Any]) -> dict[str, list[Any]]:
        """What `load` gave, by name: of codes a Tile for each of their units."""
        units = len(loaded) + 1 - len(self.memories)
        _, *others = self.memories
        return {"codes": list(loaded[:units])} | {n: [x] for n, x in zip(others, loaded[units:])}

    def words(self, found: dict[str, list[Any]]) -> list[Any]:
        """The codes of a group as bytes, four neighbours in a word."""
        made, bits_of = [], self.x.planes
        planes = [placed(tiles, bits) for tiles, bits in zip(found.values(), bits_of)]
        for parts in zip(*planes):
            total, left = None, 0
            for (word, right), bits in zip(parts, bits_of):
                part = moved(word, bits, right - left, left)
                total, left = part if total is None else total | part, left + bits
            made.append(doubled(total) if self.x.doubled else total)
        return made

    def scales(self, found: dict[str, list[Any]]) -> list[tuple[Any, Any]]:
        """(scale, minimum or None) of a group, or of each of its halves."""
        (own,) = found["scales"]
        if self.x.doubled:
            return [(power(own)[:, :, None], None)]
        if not self.x.two_levels:
            return [halves(own[:, :, None], self.x)]
        (small,), (rows, blocks) = found["small"], own.shape
        groups = small.shape[1]
        own = tile.broadcast(own[:, :, None], (rows, blocks, groups // blocks))
        scale, minimum = halves(tile.reshape(own, (rows, groups))[:, :, None], self.x)
        small = small[:, :, None].to(int32)
        return [self.small(small, half, scale, minimum) for half in range(halves_of(self.x))]

    def small(self, word: Any, number: int, scale: Any, minimum: Any) -> tuple[Any, Any]:
        """The scale and minimum of a half (or of all) of a group."""
        if minimum is None:  # signed
            return scale * (word << 24 - 8 * number >> 24).to(float32), None
        width = 8 // halves_of(self.x)
        low, high = (shifted(word, 8 * number + place) & (1 << width) - 1 for place in (0, width))
        less = minimum * high.to(float32)
        return scale * low.to(float32), -less

    def codes(self, found: dict[str, list[Any]]) -> list[Any]:
        """The codes of the Format as float32, by element of a group."""
        made = []
        base, less = tile.full((), MAGIC, int32), tile.full((), float(1 << 23) + self.x.centre)
        for word in self.words(found):
            for i in range(4):
                bits = tile.byte_permute(word, base, 0x7440 + i)
                made.append(tile.bitcast(bits, float32) - less)
        return made

    def values(self, loaded: Sequence[Any], once: bool) -> Iterator[Any]:
        """The values of groups by element: rounded `once`, or in the order of operations of the
        Format."""
        found = self.named(loaded)
        scales = self.scales(found)
        for element, code in enumerate(self.codes(found)):
            scale, minimum = scales[element * len(scales) // GROUP]
            if once and minimum is not None:
                yield tile.multiply_add(scale, code, minimum)
            else:
                yield scale * code if minimum is None else scale * code + minimum


def placed(tiles: Sequence[Any], bits: int) -> list[tuple[Any, int]]:
    """The words that have the bits of a plane for the 8 words of codes, and where in a byte."""
    if bits < 4:
        words = tiles[0] if bits > 1 else tiles[0][:, :, None]
        return [(one(words, n * bits // 8), n * bits % 8) for n in range(8)]
    near = [
        tile.byte_permute(one(unit, at), one(unit, at + 1), select)
        for unit, select, at in itertools.product(tiles, NEIGHBOURS, (0, 2))
    ]
    return [(near[n % len(near)], n // len(near) * bits) for n in range(8)]


def of_whole_rows(sizes: tuple[int, ...], at: Sequence[Any], limits: Sequence[int]) -> Any:
    """Which elements there are of whole rows, or strips, along the second axis; None for all."""
    inside, past = there(sizes, 1, at[1], limits[1]), tile.most(at[0] - limits[0]) >= 0
    return and_masks(tile.broadcast(at[0] < limits[0], sizes), inside) if past else inside


def one(x: Any, at: int) -> Any:
    """Index `at` of the last axis, (rows, groups, 1)."""
    return x[:, :, at : at + 1]


def half(word: Any, number: int) -> Any:
    """One of two float16 of a word, in float32."""
    return tile.bitcast((word >> 16 if number else word).to(uint16), float16).to(float32)


def halves(found: Any, x: Layout) -> tuple[Any, Any]:
    """(scale, minimum or None) of an entry of `scales`."""
    if not x.least:
        return found.to(float32), None
    scale, other = half(found, 0), half(found, 1)
    return scale, -(scale * other) if x.least == "zero" else other


def power(exponent: Any) -> Any:
    """2 ** (e - 128); the least two are subnormal."""
    e = exponent.to(int32)
    low, tiny = e < 2, tile.full((), 1 << 21, int32)
    tiny = tiny << tile.minimum(e, 1)
    return tile.bitcast(tile.where(low, tiny, e - 1 << 23), float32)


def as_columns(values: Sequence[Any]) -> Any:
    """Values (rows, groups, 1) by element of a group as (rows, groups * 32)."""
    rows, groups, _ = values[0].shape
    whole = tile.transpose(tile.stack(values), (1, 2, 3, 0))
    return tile.reshape(whole, (rows, groups * GROUP))

"""How quantised weights lie in a GPU's memory, and how threads take them apart.

A *group* is 32 neighbouring elements of a row. A thread reads the codes of a group 16 bytes at a
time, and lanes of a warp read neighbouring groups, so what one Format keeps together in a block
lies here in arrays of their own, the *parts*. Codes are unsigned: `offset` is taken off a whole
group at a time. They leave `words` as bytes, four to an int32, in the order `order` says, ready
for byte products.

| part    | shape              | holds                                                         |
|---------|--------------------|---------------------------------------------------------------|
| codes   | rows, 1, groups, 4 | nibbles: digit i of word j is element 8 j + i                 |
|         | rows, 2, groups, 4 | bytes: those of word j of plane p are 16 p + 4 j ..           |
|         | rows, 1, groups, 2 | pairs of bits: as `pairs`, by natural order                   |
| pairs   | rows, groups, 2    | two bits more: of word 4 h + i in h, at bits 8 b + 2 i        |
| bits    | rows, groups       | one bit more: of word i at bits 8 b + i                       |
| small   | rows, groups       | scales (and minima) of a group or its halves, a byte each     |
| scales  | rows, groups [/ 8] | float16 scale, with a float16 minimum above it where there is |

Rows are padded to ROWS and groups to STEP with scales of 0. Bits for a weight: those of the file,
but Q4_K and Q5_K an eighth more (scales of 6 bits take 8), Q3_K likewise.
Invariant: `codes - offset`, scales and minima are those of the Format, exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...core.dtype import DType, float16, float32, int32, int64, uint8, uint16
from ...core.format import NUMPY
from ...ir.node import Node
from ...ir.symbol import Size, floor_divide
from ...ir.types import Memory
from ...tile import ops
from ...tile.build import BodyBuilder
from .shape import QuantisedShape, padded

ROWS = 16  # rows are padded to a multiple of this
GROUP = 32
STEP = 32  # groups of a row are padded to a multiple of this
BLOCK = 8  # groups that share what `scales` holds, where there are small ones
MAGIC = 0x4B000000  # the bits of 2 ** 23: a byte below makes that number more
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the values
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Layout:
    """How one Format is kept."""

    codes: str  # 'nibbles', 'bytes' or 'pairs'
    offset: int  # that codes are above the Format's
    more: str = ""  # 'pairs' or 'bits': what lies above the codes
    scales: str = "one"  # 'one' or 'two' float16, or a 'power' of two
    small: str = ""  # 'two' (scale, minimum), 'halves' (a scale each) or 'digits' (both each)

    @property
    def halves(self) -> int:
        """How many scales a group has."""
        return 2 if self.small in ("halves", "digits") else 1

    @property
    def words(self) -> int:
        """Words of codes that lie side by side."""
        return 2 if self.codes == "pairs" else 4

    def order(self, word: int) -> tuple[int, ...]:
        """The elements of a group whose codes are the bytes of a word."""
        if self.codes == "nibbles":
            return tuple(8 * (word // 2) + word % 2 + 2 * i for i in range(4))
        return tuple(4 * word + i for i in range(4))


LAYOUTS = {
    "Q4_0": Layout("nibbles", 8),
    "Q4_1": Layout("nibbles", 0, scales="two"),
    "Q5_0": Layout("nibbles", 16, "bits"),
    "Q5_1": Layout("nibbles", 0, "bits", "two"),
    "Q8_0": Layout("bytes", 128),
    "Q2_K": Layout("pairs", 0, "", "two", "digits"),
    "Q3_K": Layout("pairs", 4, "bits", "one", "halves"),
    "Q4_K": Layout("nibbles", 0, "", "two", "two"),
    "Q5_K": Layout("nibbles", 0, "bits", "two", "two"),
    "Q6_K": Layout("nibbles", 32, "pairs", "one", "halves"),
    "MXFP4": Layout("nibbles", 12, scales="power"),
}


def layout_of(shape: QuantisedShape) -> Layout:
    """The Layout of a product's weights."""
    return LAYOUTS[shape.format.name]


def groups_of(shape: QuantisedShape) -> int:
    """Groups of a row, padded."""
    return padded(-(-shape.columns // GROUP), STEP)


def parts(shape: QuantisedShape) -> list[tuple[str, tuple[int, ...], DType]]:
    """The parts in order."""
    x, rows, groups = layout_of(shape), padded(shape.rows, ROWS), groups_of(shape)
    planes = 2 if x.codes == "bytes" else 1
    made: list[tuple[str, tuple[int, ...], DType]] = [
        ("codes", (rows, planes, groups, x.words), int32)
    ]
    if x.more == "pairs":
        made.append(("pairs", (rows, groups, 2), int32))
    if x.more == "bits":
        made.append(("bits", (rows, groups), int32))
    if x.small:
        made.append(("small", (rows, groups), uint16))
    kind = {"one": float16, "two": int32, "power": uint8}[x.scales]
    made.append(("scales", (rows, groups // (BLOCK if x.small else 1)), kind))
    return made


def bytes_of(shape: QuantisedShape) -> int:
    """Bytes of all parts."""
    return sum(int(np.prod(sizes)) * dtype.size for _, sizes, dtype in parts(shape))


# ---- packing --------------------------------------------------------------------------------


def pack(shape: QuantisedShape, raw: Array) -> dict[str, Array]:
    """The parts of rows (n, row bytes) of the Format."""
    shape = replace(shape, rows=len(raw))
    x, form, groups = layout_of(shape), shape.format, groups_of(shape)
    assert form.codes is not None and form.scales is not None
    fields = form.split(raw)
    codes: Array
    if form.name in ("Q4_0", "Q4_1"):  # as in the file, but for the order
        codes = _split(fields["nibbles"]).reshape(len(raw), -1)
    else:
        codes = form.codes(NUMPY, fields).reshape(len(raw), -1)  # int8
        codes = _digits(codes) if x.scales == "power" else codes.view(np.uint8) + np.uint8(x.offset)
    codes = _padded(codes, groups * GROUP).reshape(-1, groups, GROUP)
    made = {"codes": _codes(x, codes)}
    if x.more:
        above = codes >> np.uint8(2 if x.codes == "pairs" else 4)
        ordered = above[..., [x.order(k) for k in range(8)]]  # (n, groups, 8 words, 4 bytes)
        made[x.more] = _pairs(ordered) if x.more == "pairs" else _joined(ordered, 1)[..., 0]
    made |= _scales(shape, x, fields, len(raw))
    for name, sizes, dtype in parts(shape):
        made[name] = _padded_rows(made[name], sizes).astype(dtype.numpy, copy=False)
    return made


def _padded(values: Array, width: int) -> Array:
    if values.shape[1] == width:
        return values
    return np.pad(values, ((0, 0), (0, width - values.shape[1])))


def _padded_rows(values: Array, sizes: Sequence[int]) -> Array:
    if values.shape == tuple(sizes):
        return np.ascontiguousarray(values)
    return np.pad(values, [(0, size - own) for size, own in zip(sizes, values.shape)])


def _split(nibbles: Array) -> Array:
    """Codes (n, blocks, 32) of nibbles (n, blocks, 16): the lower ones, then the upper ones."""
    made = np.empty((*nibbles.shape[:-1], 32), np.uint8)
    np.bitwise_and(nibbles, np.uint8(15), out=made[..., :16])
    np.right_shift(nibbles, np.uint8(4), out=made[..., 16:])
    return made


def _digits(codes: Array) -> Array:
    """The nibbles of doubled E2M1 values."""
    table = np.zeros(256, np.uint8)
    for digit, value in enumerate(E2M1):
        table[value], table[-value] = digit, 8 + digit
    table[0] = 0
    return table[codes.view(np.uint8)]


def _joined(values: Array, bits: int) -> Array:
    """Some bits of each of (..., count, 4) bytes as words (..., 1): those of the first lowest."""
    mask, made = np.uint8((1 << bits) - 1), values[..., 0, :] & np.uint8((1 << bits) - 1)
    for place in range(1, values.shape[-2]):
        made |= (values[..., place, :] & mask) << np.uint8(place * bits)
    return np.ascontiguousarray(made).view(np.int32)


def _pairs(ordered: Array) -> Array:
    """Two bits of each of (n, groups, 8 words, 4 bytes), as (n, groups, 2)."""
    return _joined(ordered.reshape(*ordered.shape[:2], 2, 4, 4), 2)[..., 0]


def _codes(x: Layout, codes: Array) -> Array:
    """The part `codes` of codes (n, groups, 32)."""
    lead = codes.shape[:2]
    if x.codes == "nibbles":
        pairs = codes.view(np.uint16)  # two neighbours
        both = (pairs & np.uint16(15)) | (pairs >> np.uint16(4) & np.uint16(0xF0))
        return both.astype(np.uint8).view(np.int32)[:, None]
    if x.codes == "bytes":
        return codes.view(np.int32).reshape(*lead, 2, 4).transpose(0, 2, 1, 3)
    return _pairs(codes.reshape(*lead, 8, 4))[:, None]


def _scales(shape: QuantisedShape, x: Layout, fields: dict[str, Array], n: int) -> dict[str, Array]:
    if x.scales == "power":
        return {"scales": fields["power"].reshape(n, -1)}
    both = [fields[name].reshape(n, -1) for name in ("scale", "minimum")[: 1 + (x.scales == "two")]]
    words = [np.ascontiguousarray(b, np.float16).view(np.uint16).astype(np.uint32) for b in both]
    found = both[0] if x.scales == "one" else (words[0] | words[1] << np.uint32(16)).view(np.int32)
    made = {"scales": found}
    if x.small:
        ones: dict[str, Array] = {
            name: np.ones_like(fields[name]) for name in ("scale", "minimum") if name in fields
        }
        assert shape.format.scales is not None
        scale, minimum = shape.format.scales(NUMPY, {**fields, **ones})
        scale = scale.astype(np.int16).reshape(n, -1).astype(np.uint16) & 255
        if minimum is not None:
            low = (-minimum).astype(np.uint16).reshape(n, -1)
            scale = scale | low << np.uint16(8 if x.small == "two" else 4)
        if x.small != "two":
            scale = scale[:, ::2] | scale[:, 1::2] << np.uint16(8)
        made["small"] = scale
    return made


# ---- in a kernel ----------------------------------------------------------------------------


class Groups:
    """Loads groups of some rows in a kernel and takes them apart; Tiles are (rows, groups, 1)."""

    def __init__(self, b: BodyBuilder, shape: QuantisedShape, memories: Sequence[Node]) -> None:
        self.b, self.x = b, layout_of(shape)
        self.memories = {name: m for (name, _, _), m in zip(parts(shape), memories)}
        self.planes = 2 if self.x.codes == "bytes" else 1

    def load(
        self, row: Size, group: Size, rows: int, groups: int, limit: int | None = None
    ) -> list[Node]:
        """All there is of rows and groups from a row and a group on, as it lies; 0 for groups
        from `limit` on."""
        b, made = self.b, []
        for name, memory in self.memories.items():
            if name == "codes":
                shape: tuple[int, ...] = (rows, groups, self.x.words)
                inside = self.inside(group, shape, limit)
                made += [
                    b.load(memory, (row, p, group, 0), shape, (0, 2, 3), inside)
                    for p in range(self.planes)
                ]
            elif name == "pairs":
                shape = (rows, groups, 2)
                inside = self.inside(group, shape, limit)
                made.append(b.load(memory, (row, group, 0), shape, (0, 1, 2), inside))
            else:
                each = BLOCK if name == "scales" and self.x.small else 1
                shape, first = (rows, max(1, groups // each)), floor_divide(group, each)
                inside = self.inside(first, shape, limit and limit // each)
                made.append(b.load(memory, (row, first), shape, (0, 1), inside))
        return made

    def inside(self, first: Size, shape: tuple[int, ...], limit: int | None) -> Node | None:
        """Which groups (the second axis) are below a limit; None for all."""
        b = self.b
        if limit is None:
            return None
        line = b.apply("add", b.add(ops.iota(size=shape[1], dtype=int64)), b.index(first))
        line = b.apply("less", line, b.constant(limit, int64))
        only = (1, shape[1], *(1 for _ in shape[2:]))
        return b.broadcast(b.add(ops.reshape(line, shape=only)), shape)

    def named(self, loaded: Sequence[Node]) -> dict[str, Node]:
        """What `load` gave, by name; the second plane of codes as 'codes1'."""
        names = [
            n
            for name in self.memories
            for n in ((name, "codes1") if name == "codes" and self.planes == 2 else (name,))
        ]
        return dict(zip(names, loaded))

    def integer(self, value: int) -> Node:
        """A constant of 32 bits."""
        return self.b.constant(value - (1 << 32) if value >> 31 else value, int32)

    def one(self, x: Node, at: int) -> Node:
        """Index `at` of the last axis."""
        rows, groups, _ = x.shape
        return self.b.add(ops.part(x, start=(0, 0, at), shape=(rows, groups, 1)))

    def column(self, x: Node) -> Node:
        """(rows, groups) as (rows, groups, 1)."""
        return self.b.add(ops.reshape(x, shape=(*x.shape, 1)))

    def masked(self, x: Node, by: int, mask: int) -> Node:
        """Bits shifted right (left where negative), and masked."""
        b = self.b
        if by:
            name = "shift_right" if by > 0 else "shift_left"
            x = b.apply(name, x, self.integer(abs(by)))
        return b.apply("bit_and", x, self.integer(mask))

    def word(self, found: dict[str, Node], number: int) -> Node:
        """Four codes of a group, as bytes."""
        b, x = self.b, self.x
        if x.codes == "bytes":
            return self.one(found["codes" if number < 4 else "codes1"], number % 4)
        if x.codes == "nibbles":
            low = self.masked(self.one(found["codes"], number // 2), 4 * (number % 2), 0x0F0F0F0F)
            above = 4
        else:
            low = self.masked(self.one(found["codes"], number // 4), 2 * (number % 4), 0x03030303)
            above = 2
        if x.scales == "power":
            return self.e2m1(low)
        if x.more == "pairs":
            high = self.one(found["pairs"], number // 4)
            return b.apply(
                "bit_or", low, self.masked(high, 2 * (number % 4) - above, 0x03030303 << above)
            )
        if x.more == "bits":
            high = self.column(found["bits"])
            return b.apply("bit_or", low, self.masked(high, number - above, 0x01010101 << above))
        return low

    def e2m1(self, digits: Node) -> Node:
        """Bytes 12 + twice the value of sign, two exponent bits and one of the mantissa."""
        b = self.b
        one, both = 0x01010101, "bit_and"
        first, second, third, sign = (self.masked(digits, by, one) for by in range(4))
        small, low = (b.apply("bit_xor", bit, self.integer(one)) for bit in (third, second))
        size = [
            b.apply(both, first, small),
            b.apply(
                "bit_or",
                b.apply(both, second, small),
                b.apply(both, b.apply(both, first, third), low),
            ),
            b.apply(both, third, b.apply("bit_or", low, first)),
            b.apply(both, third, second),
        ]
        total = size[0]
        for place, bit in enumerate(size[1:], 1):
            total = b.apply("bit_or", total, b.apply("shift_left", bit, self.integer(place)))
        less = b.apply("multiply", sign, self.integer(255))
        taken = b.apply("multiply", b.apply(both, total, less), self.integer(2))
        moved = b.apply("add", total, self.integer(0x0C0C0C0C))
        return b.apply("subtract", moved, taken)

    def half(self, word: Node, number: int) -> Node:
        """One of two float16 of a word, in float32."""
        b = self.b
        if number:
            word = b.apply("shift_right", word, self.integer(16))
        return b.cast(b.add(ops.bitcast(b.cast(word, uint16), dtype=float16)), float32)

    def scales(self, found: dict[str, Node]) -> list[tuple[Node, Node | None]]:
        """(scale, minimum) of a group, or of each of its halves."""
        b, x = self.b, self.x
        own = found["scales"]
        if x.scales == "power":
            return [(self.column(self.power(own)), None)]
        if x.small:
            (rows, blocks), groups = own.shape, found["small"].shape[1]
            own = b.broadcast(
                b.add(ops.reshape(own, shape=(rows, blocks, 1))), (rows, blocks, groups // blocks)
            )
            own = b.add(ops.reshape(own, shape=(rows, groups)))
        own = self.column(own)
        scale = b.cast(own, float32) if x.scales == "one" else self.half(own, 0)
        minimum = None if x.scales == "one" else self.half(own, 1)
        if not x.small:
            return [(scale, minimum)]
        small = b.cast(self.column(found["small"]), int32)
        return [self.small(small, number, scale, minimum) for number in range(x.halves)]

    def small(
        self, word: Node, number: int, scale: Node, minimum: Node | None
    ) -> tuple[Node, Node | None]:
        """The scale and minimum of a half (or of all) of a group."""
        b, x = self.b, self.x
        if x.small == "halves":  # signed
            word = b.apply("shift_left", word, self.integer(24 - 8 * number))
            word = b.apply("shift_right", word, self.integer(24))
            return b.apply("multiply", scale, b.cast(word, float32)), None
        width = 8 if x.small == "two" else 4
        low, high = (
            self.masked(word, 8 * number + place, (1 << width) - 1) for place in (0, width)
        )
        assert minimum is not None
        less = b.apply("multiply", minimum, b.cast(high, float32))
        return b.apply("multiply", scale, b.cast(low, float32)), b.apply("negative", less)

    def codes(self, found: dict[str, Node]) -> list[Node]:
        """The codes of the Format as float32, by element of a group."""
        b, made = self.b, {}
        base, less = self.integer(MAGIC), b.constant(float(1 << 23) + self.x.offset, float32)
        for number in range(8):
            word = self.word(found, number)
            for i, element in enumerate(self.x.order(number)):
                bits = b.apply("byte_permute", word, base, self.integer(0x7440 + i))
                value = b.add(ops.bitcast(bits, dtype=float32))
                made[element] = b.apply("subtract", value, less)
        return [made[element] for element in range(GROUP)]

    def beside(self, values: Sequence[Node]) -> Node:
        """Values (rows, groups, 1) by element of a group as (rows, groups * 32)."""
        b, (rows, groups, _) = self.b, values[0].shape
        whole = b.add(ops.transpose(b.add(ops.stack_rows(*values)), order=(1, 2, 3, 0)))
        return b.add(ops.reshape(whole, shape=(rows, groups * GROUP)))

    def power(self, exponent: Node) -> Node:
        """2 ** (e - 128); the least two are subnormal."""
        b = self.b
        e = b.cast(exponent, int32)
        low = b.apply("less", e, self.integer(2))
        tiny = b.apply("shift_left", self.integer(1 << 21), b.apply("minimum", e, self.integer(1)))
        bits = b.apply("shift_left", b.apply("subtract", e, self.integer(1)), self.integer(23))
        return b.add(ops.bitcast(b.apply("where", low, tiny, bits), dtype=float32))


def part_parameters(shape: QuantisedShape) -> list[tuple[str, Memory]]:
    """The parts as parameters of a Body."""
    return [(name, Memory(sizes, dtype, use="constant")) for name, sizes, dtype in parts(shape)]

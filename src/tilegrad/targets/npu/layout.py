"""How a product lies in a chip's memories: sizes of results and steps, addresses, packed operands.

The (M, K) by (K, N) product is cut into results (some rows by `columns`), each into steps that load
parts of two operands; two places for each operand and two for results let load, execute and store
work at once. With weights in place a step is some tiles of `rows` of K by `columns` of N for many
rows of M; with inputs in place the same with the operands exchanged; with sums in place a part of K
for one tile of results. Where rows are summed, a result is whole rows: all strips of `columns`.
With a `rate` the right operand has two weights in the place of one (`mixed`) or the kept two of
every four with their indices (`sparse`), and a step takes twice as many inputs of K. An operand
whose rows lie whole in memory, begin on beats of the port and are one stride apart is read where it
lies; the host packs the others. Invariant: two steps and two results fit the chip's memories.

A value of a result has a block of rows, one for each row of the result; a line where it is one
number for each of them (in all columns); or a single row where it is the same for all of them. A
step writes over an operand that nothing reads after it. Two values share a block only if the first
is not read once the second is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ...core.errors import UserError
from ...tile.array import ROWS, VectorStep
from .arithmetic import Array
from .parameters import BITS, Parameters

MOST_TILES = 16  # of K that a step loads at once: more hide no more latency


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


Strides = tuple[int, int]  # bytes from a row of an operand to the next, and from a column


@dataclass(frozen=True)
class Narrow:
    """How int32 sums become int8: times `scale`, over 2**`shift`, at least 0 with `relu`; with
    floats, how fp32 becomes bf16."""

    scale: int = 1
    shift: int = 0
    relu: bool = False


@dataclass(frozen=True)
class VectorOperand:
    """An operand of the vector unit: one row for all rows (`held`), or each its own."""

    held: bool
    wide: bool  # 32 bits
    strides: Strides | None = None


@dataclass(frozen=True)
class Stored:
    """A value that is stored, whole or narrow."""

    value: int
    narrow: Narrow | None = None


@dataclass
class Layout:
    """A product on a chip; `narrow` makes int8 of the sums, else they are stored whole. Values are
    numbered: the product (if K > 0), then `vector_operands`, then `steps`. Operands with
    strides may be read where they lie, the others are packed."""

    p: Parameters
    M: int
    N: int
    K: int
    narrow: Narrow | None = None
    vector_operands: tuple[VectorOperand, ...] = ()
    steps: tuple[VectorStep, ...] = ()
    stored: tuple[Stored, ...] = ()
    left_strides: Strides | None = None
    right_strides: Strides | None = None
    rate: str = ""  # of the weights: one a step, `mixed` or `sparse`
    tall: int = field(init=False)  # rows of a result

    def __post_init__(self) -> None:
        p = self.p
        for name, least in (("M", 1), ("N", 1), ("K", 0)):
            if getattr(self, name) < least:
                raise UserError(
                    f"bad {name}", op="npu", expected=f"at least {least}", got=getattr(self, name)
                )
        self.stored = self.stored or (Stored(0, self.narrow),)
        for one in self.stored:
            if p.floating and one.narrow and (one.narrow.scale, one.narrow.shift) != (1, 0):
                raise UserError("sums of floats are not made int8", op="npu", hint="narrow=None")
        self.exchanged = p.dataflow == "is" and self.K > 0
        self.m, self.n = (self.N, self.M) if self.exchanged else (self.M, self.N)
        # A row for all rows of M stands for all columns where operands are exchanged.
        self.held = [b.held and not self.exchanged for b in self.vector_operands]
        self.rows_of: Rows = place_rows(
            bool(self.K), self.held, self.steps, [one.value for one in self.stored]
        )
        self.size = p.element_bits // 8
        self.pairs = 2 if self.rate else 1  # inputs of a row of the mesh in a step
        kept = -(-self.K // self.pairs)  # two in a place, or two of every four
        self.k = kept + kept % 2 if self.rate == "sparse" else kept  # rows of the right operand
        self.wide = p.rows * self.pairs  # elements of a row of the left operand
        self.row = _up(self.wide * self.size, p.dma_bytes)  # its bytes
        self.column = _up(p.columns * self.size, p.dma_bytes)  # of those beside the product
        indices = (2 * p.columns + 7) // 8 if self.rate == "sparse" else 0
        self.right_row = _up(p.columns * self.size + indices, p.dma_bytes)
        self.strips = -(-self.n // p.columns)  # of columns
        self.across = self.strips if any(s.kind in ROWS for s in self.steps) else 1  # of a result
        self.columns = self.strips // self.across  # results
        self._choose_sizes()
        self._choose_lying()
        self._place()

    def planes(self, number: int) -> int:
        """Rows of the scratchpad for a row of an operand of the vector unit."""
        return self.p.planes if self.vector_operands[number].wide else 1

    def _choose_sizes(self) -> None:
        """Rows of a result, tiles or rows of K of a step, so that two of each fit."""
        p = self.p
        planes = [self.planes(i) for i in range(len(self.vector_operands))]
        once = self.across * sum(n for n, held in zip(planes, self.held) if held)
        each = self.across * sum(n for n, held in zip(planes, self.held) if not held)
        counts = self.rows_of.counts
        blocks = max(1, counts[BLOCK]) * self.across + counts[LINE]  # rows for a row of the result
        helds = counts[HELD] * self.across
        most = (p.accumulator_rows // 2 - helds) // blocks
        self.tiles = 1
        if self.K and p.dataflow == "os":
            self.tall = p.rows
            extra = once + each * p.rows
            room = p.bank_rows if p.banks > 2 else p.bank_rows - 2 * extra
            self.deep = min(self.k, room // 2)
            if self.rate == "sparse":
                self.deep -= self.deep % 2  # two steps a group
            self.extras = 2 * p.bank_rows if p.banks > 2 else p.bank_rows + 2 * self.deep
            if most < p.rows:
                least = 2 * (p.rows * blocks + helds)
                raise too_small("accumulator_rows", least, p.accumulator_rows)
            if self.deep < 1 or self.extras + 2 * extra > p.scratchpad_rows:
                raise too_small("bank_rows", extra + 1, p.bank_rows)
        elif self.K:
            spare = p.scratchpad_rows - 2 * p.rows - 2 * once
            self.tall = min(self.m, most, spare // (2 * (1 + each)))
            if self.tall < 1:
                raise too_small("bank_rows", (2 * p.rows + 2 * once) // p.banks + 1, p.bank_rows)
            spare = p.scratchpad_rows - 2 * once - 2 * each * self.tall
            fits = spare // (2 * (self.tall + p.rows))
            self.deep = p.rows  # of K, a tile
            deep = -(-self.k // p.rows)
            steps = -(-deep // max(1, min(fits, MOST_TILES)))
            self.tiles = -(-deep // steps)  # steps of one length hide each other best
            self.extras = 2 * self.tiles * (self.tall + p.rows)
        else:
            self.deep, self.extras = 0, 0
            fits = (p.scratchpad_rows - 2 * once) // (2 * each) if each else self.m
            self.tall = min(self.m, most, fits)
        if self.tall < 1:
            least = 2 * (blocks + helds)
            raise too_small("accumulator_rows", least, p.accumulator_rows)
        self.extra_rows = once + each * self.tall
        self.outers = -(-self.m // self.tall)
        self.depths = -(-self.k // self.deep) if self.K else 0

    # ---- memory ----

    def _choose_lying(self) -> None:
        """Bytes between rows of the operands that are read where they lie; 0 of those packed."""
        p, left, right = self.p, self.left_strides, self.right_strides
        if self.exchanged:
            left, right = (s and s[::-1] for s in (right, left))
        if p.dataflow == "os":  # two rows of K in one are packed
            turned = left[::-1] if left and not self.rate else None
            self.left_apart = self._apart(turned, self.K, self.m, p.rows)
        else:
            self.left_apart = self._apart(left, self.m, self.K, self.wide)
            if self.tiles > 1 and not self._hides_moves():
                self.left_apart = 0
        self.right_apart = self._apart(None if self.rate else right, self.K, self.n, p.columns)
        self.vector_apart = []
        for i, (one, held) in enumerate(zip(self.vector_operands, self.held)):
            strides = one.strides and (one.strides[::-1] if self.exchanged else one.strides)
            rows = 1 if held else self.m
            given = strides if self.planes(i) == 1 else None
            self.vector_apart.append(self._apart(given, rows, self.n, p.columns))

    def _apart(self, strides: Strides | None, rows: int, elements: int, side: int) -> int:
        """Bytes between rows that the DMA can read a tile of `side` elements at a time, else 0."""
        if strides is None or not rows or (elements > 1 and strides[1] != self.size):
            return 0
        beat = self.p.dma_bytes
        if elements > side and side * self.size % beat:  # a tile begins within a beat
            return 0
        apart = strides[0] if rows > 1 else _up(elements * self.size, beat)
        return apart if apart > 0 and apart % beat == 0 and apart < 1 << 32 else 0

    def _hides_moves(self) -> bool:
        """Whether loads of a step, one for each tile of the left operand, take no longer than its
        products, and their words leave half of the program's memory."""
        p, tiles = self.p, self.tiles
        beats = self.tall * self.row // p.dma_bytes + p.rows * self.right_row // p.dma_bytes
        loads = (tiles + 1) * (p.dram_latency + 4) + tiles * beats * p.gap
        work = tiles * (self.tall + 2 * p.rows + p.columns + 5)
        return loads <= work and 8 * (3 * tiles + 2) <= p.program_words // 2

    def _extent(self, apart: int, rows: int, elements: int) -> int:
        """Bytes of memory that an operand lies in."""
        return (rows - 1) * apart + _up(elements * self.size, self.p.dma_bytes)

    def _place(self) -> None:
        """Addresses of operands and results in DRAM."""
        p, os = self.p, self.p.dataflow == "os"
        self.padded = self.k if os else self.depths * p.rows  # rows of the right operand
        left = (self.outers * self.k if os else self.m * self.depths) * self.row
        right = self.strips * self.padded * self.right_row
        self.packed_bytes = (0 if self.left_apart else left) + (0 if self.right_apart else right)
        if self.left_apart:
            left = self._extent(self.left_apart, *((self.K, self.m) if os else (self.m, self.K)))
        if self.right_apart:
            right = self._extent(self.right_apart, self.K, self.n)
        self.right = left
        at = left + right
        self.operand_starts = []
        for i, (held, apart) in enumerate(zip(self.held, self.vector_apart)):
            self.operand_starts.append(at)
            rows = 1 if held else self.m
            packed = self.strips * self.planes(i) * rows * self.column
            self.packed_bytes += 0 if apart else packed
            at += self._extent(apart, rows, self.n) if apart else packed
        self.results, self.strides = [], []
        for one in self.stored:
            bytes = p.columns * (self.size if one.narrow is not None else 4)
            stride = max(p.dma_bytes, 1 << (bytes - 1).bit_length())  # no burst is cut
            at = _up(at, stride)
            self.results.append(at)
            self.strides.append(stride)
            at += self.strips * self.m * stride
        self.bytes = _up(at, p.dma_bytes)

    def pack(self, *operands: Array) -> Array:
        """DRAM with the operands: (M, K) and (K, N) if there is a product, and (M or 1, N) of the
        vector unit. Those that are read where they lie (`lying`) are given as bytes of memory from
        their first element."""
        memory = np.zeros(self.bytes, np.uint8)
        given = list(operands)
        if self.K:
            left, right = (x.T for x in given[1::-1]) if self.exchanged else given[:2]
            given = given[2:]
            first = self._lay if self.left_apart else self._pack_left
            first(memory[: self.right], left)
            second = self._lay if self.right_apart else self._pack_right
            second(memory[self.right :], right)
        for i, array in enumerate(given):
            start = memory[self.operand_starts[i] :]
            if self.vector_apart[i]:
                self._lay(start, array)
                continue
            if not self.held[i]:
                array = np.broadcast_to(array, (self.M, self.N))
            self._pack_vector_operand(start, i, array.T if self.exchanged else array)
        return memory

    @property
    def lying(self) -> tuple[bool, ...]:
        """Which operands are read where they lie, in the order of `pack`."""
        product = [self.left_apart, self.right_apart] if self.K else []
        order = product[::-1] if self.exchanged else product
        return tuple(bool(apart) for apart in (*order, *self.vector_apart))

    def _lay(self, memory: Array, given: Array) -> None:
        """An operand as it lies; bytes behind its rows are those of operands that come later."""
        count = min(len(given), len(memory))
        memory[:count] = given[:count]

    def _pack_left(self, memory: Array, left: Array) -> None:
        p = self.p
        if p.dataflow == "os":
            whole = np.zeros((self.outers * p.rows, self.k * self.pairs), left.dtype)
            whole[: len(left), : self.K] = left
            parts = whole.reshape(self.outers, p.rows, self.k, self.pairs).transpose(0, 3, 1, 2)
            self._panels(memory, parts.reshape(-1, self.k), self.wide, self.row)
            return
        for start in range(0, self.m, self.tall):
            part = left[start : start + self.tall]
            used = self._panels(memory, part.T, self.wide, self.row)
            memory = memory[used.size :]

    def _pack_right(self, memory: Array, right: Array) -> None:
        p, indices = self.p, None
        if self.rate == "sparse":
            right, indices = kept_of(right)
        elif self.rate:
            right = paired(right, p.weights)
        depth = np.zeros((self.padded, right.shape[1]), right.dtype)
        depth[: len(right)] = right
        rows = self._panels(memory, depth.T, p.columns, self.right_row)
        if indices is not None:
            self._add_indices(rows.reshape(self.strips, self.padded, -1), indices)

    def _add_indices(self, rows: Array, indices: Array) -> None:
        """The 2-bit indices of a row behind its elements, four in a byte."""
        columns = self.p.columns
        bytes = (2 * columns + 7) // 8
        whole = np.zeros((self.padded, self.strips * columns), np.uint8)
        whole[: len(indices), : indices.shape[1]] = indices
        wide = np.zeros((self.strips, self.padded, 4 * bytes), np.uint8)
        wide[..., :columns] = whole.reshape(self.padded, self.strips, columns).swapaxes(0, 1)
        fours = wide.reshape(self.strips, self.padded, bytes, 4) << np.array([0, 2, 4, 6], np.uint8)
        start = columns * self.size
        rows[..., start : start + bytes] = np.bitwise_or.reduce(fours, -1)

    def _panels(self, memory: Array, array: Array, side: int, stride: int) -> Array:
        """Tiles of `side` of the first axis; in each, a row for every place of the second. Gives
        the rows."""
        count, length = -(-len(array) // side), array.shape[1]
        padded = np.zeros((count * side, length), array.dtype)
        padded[: len(array)] = array
        tiles = np.ascontiguousarray(padded.reshape(count, side, length).transpose(0, 2, 1))
        rows = memory[: count * length * stride].reshape(count * length, stride)
        rows[:, : side * self.size] = tiles.view(np.uint8).reshape(len(rows), -1)
        return rows

    def _pack_vector_operand(self, memory: Array, number: int, array: Array) -> None:
        """Tiles of columns; in each, the planes of every row, low bits first."""
        planes = self.planes(number)
        if planes > 1:
            kind = np.uint8 if self.size == 1 else np.uint16
            whole = np.ascontiguousarray(array)  # 32 bits each
            parts = whole.view(kind).reshape(*array.shape, planes)
            array = parts.transpose(0, 2, 1).reshape(-1, array.shape[1])  # (row and plane, column)
        self._panels(memory, np.ascontiguousarray(array.T), self.p.columns, self.column)

    def unpack(self, memory: Array, number: int = 0) -> Array:
        """An (M, N) result of DRAM."""
        p, one = self.p, self.stored[number]
        kind = np.dtype(np.int8 if one.narrow is not None else np.int32)
        if p.floating:
            kind = np.dtype(np.uint16 if one.narrow is not None else np.float32)
        stride, start = self.strides[number], self.results[number]
        whole = memory[start : start + self.strips * self.m * stride]
        raw = whole.reshape(self.strips, self.m, stride)
        used = np.ascontiguousarray(raw[:, :, : p.columns * kind.itemsize]).view(kind)
        if self.rows_of.assigned[one.value][0] == LINE:
            return used[0, :, :1]
        found = used.transpose(1, 0, 2).reshape(self.m, -1)[:, : self.n]
        return found.T if self.exchanged else found

    # ---- what a result is made of ----

    def parts(self) -> list[tuple[int, int]]:
        """The steps of a result: the first tile (row with sums in place) of weights, and how
        many."""
        if self.p.dataflow == "os":
            step, whole = self.deep, self.k
        else:
            step, whole = self.tiles, self.depths
        return [(at, min(step, whole - at)) for at in range(0, whole, max(step, 1))]

    def count(self, outer: int) -> int:
        """Rows of a result: fewer of the last."""
        return min(self.tall, self.m - outer * self.tall)

    def row_of(self, result: int, place: tuple[str, int], strip: int, count: int) -> int:
        """The first row of a place for a strip of a result with some rows."""
        kind, number = place
        counts, row = self.rows_of.counts, result % 2 * (self.p.accumulator_rows // 2)
        if kind == BLOCK:
            return row + number * self.across * self.tall + strip * count
        row += max(1, counts[BLOCK]) * self.across * self.tall
        if kind == LINE:
            return row + number * self.tall
        return row + counts[LINE] * self.tall + number * self.across + strip


def paired(weights: Array, kind: str) -> Array:
    """(K, N) weights of half an element's bits as places of two, the first in the low bits."""
    bits = weights.astype(np.int8) & 15 if kind == "int4" else weights
    narrow = np.zeros((-(-len(weights) // 2) * 2, weights.shape[1]), np.uint8)
    narrow[: len(weights)] = bits.view(np.uint8)
    wide = narrow.astype(np.uint8 if kind == "int4" else np.uint16)
    return np.bitwise_or(wide[::2], np.left_shift(wide[1::2], BITS[kind]))


def kept_of(weights: Array) -> tuple[Array, Array]:
    """The two kept of every four of K of (K, N) weights, in their order, and their indices."""
    groups = -(-len(weights) // 4)
    padded = np.zeros((groups * 4, weights.shape[1]), weights.dtype)
    padded[: len(weights)] = weights
    fours = padded.reshape(groups, 4, -1)
    zero = fours == 0
    if (zero.sum(1) < 2).any():
        raise UserError("weights are not 2:4", op="npu", expected="two zeros in every four of K")
    order = np.argsort(zero, axis=1, kind="stable")[:, :2]  # those that are not 0 come first
    indices = np.sort(order, axis=1)
    kept = np.take_along_axis(fours, indices, 1)
    shape = (2 * groups, weights.shape[1])
    return kept.reshape(shape), indices.reshape(shape).astype(np.uint8)


def too_small(name: str, least: int, got: int) -> UserError:
    """What a chip lacks."""
    return UserError(f"{name} is too small for a product", op="npu", expected=least, got=got)


# ---- rows of the accumulators -------------------------------------------------------------------


BLOCK, LINE, HELD = "block", "line", "held"


@dataclass(frozen=True)
class Rows:
    """For each value what it has and the number of that; and how many of each there are."""

    assigned: tuple[tuple[str, int], ...]
    counts: dict[str, int]


def place_rows(
    product: bool, held: Sequence[bool], steps: Sequence[VectorStep], stored: Sequence[int]
) -> Rows:
    """Blocks by last use, in the order of the steps."""
    kinds = [BLOCK] * product + [HELD if h else BLOCK for h in held]
    for step in steps:  # numbers of rows and of lines make lines
        along = step.kind in ROWS or all(kinds[value] == LINE for value in step.values)
        kinds.append(LINE if along else BLOCK)
    given = len(kinds) - len(steps)
    last = dict.fromkeys(range(len(kinds)), -1)
    for at, step in enumerate(steps):
        last.update(dict.fromkeys(step.values, at))
    for value in stored:
        last[value] = len(steps)
    assigned: dict[int, tuple[str, int]] = {}
    free: list[int] = []
    counts = dict.fromkeys((BLOCK, LINE, HELD), 0)

    def have(value: int) -> None:
        if value in assigned:
            return
        kind = kinds[value]
        if kind == BLOCK and free:
            assigned[value] = (kind, free.pop())
            return
        assigned[value] = (kind, counts[kind])
        counts[kind] += 1

    if product:
        have(0)
    for at, step in enumerate(steps):
        for value in step.values:
            have(value)
        for value in dict.fromkeys(step.values):
            if last[value] == at and kinds[value] == BLOCK:
                free.append(assigned[value][1])
        have(given + at)
    for value in sorted(v for v in stored if v < given):
        have(value)
    if any(step.kind in ROWS for step in steps):
        counts[LINE] += 1  # the last: of one strip, before it is added to those before
    order = tuple(assigned.get(v, (BLOCK, 0)) for v in range(len(kinds)))
    return Rows(order, counts)

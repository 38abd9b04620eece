"""Lower `dot` of int8 to a CPU's dot products of bytes, sums exact in int32.

Four neighbours along k are packed as the bytes of a word, and one instruction adds their products
to a sum: all else is as in `dot`, with k counted in words. Instructions of x86 multiply bytes
without sign by bytes with sign, so there 128 is added to a, and what that adds to
sums is taken off: 128 times the sum of a column of b. With few rows b is not packed where it lies
along k: vectors of neighbours along k are read once from memory and multiplied by each row, and
their lanes are added up at the end.

Invariant: k past its end is 0 in b; int32 wraps around, so sums are exact where the result is.
"""

from __future__ import annotations

from ..core.dtype import int8
from ..graph import ops
from ..ir.node import Node
from ..ir.symbol import Size, ceil_divide, high, minimum, round_up
from ..tile import ops as tile_ops
from .dot import PAD, DotLowering, VectorProducts
from .family import Bodies, Offer, Offers, roofline
from .plan import Plan
from .problem import B, Problem
from .region import Region

SIGNS = -0x7F7F7F80  # 128 in each byte of a word
FEW_ROWS = 8  # rows that are multiplied one after the other by weights as they lie
STREAMS = 8  # columns at least whose sums are kept at a time
LINE = 64  # bytes of b that are asked for ahead at a time
PROGRAM_BYTES = 96 << 10  # of b, at least, for a program of few rows


class ByteLowering(DotLowering):
    """Lowers one dot Region of int8."""

    word = step = 4

    def __init__(self, region: Region) -> None:
        super().__init__(region)
        self.input, self.signed = int8, self.target.has("dotprod")

    def at(self, side: int, k: Size, other: Size) -> Node:
        """What is packed: the sign of a turned where bytes are multiplied without."""
        found = super().at(side, k, other)
        return found if self.signed or side == B else self.b.apply("bit_xor", found, -128)

    def packed(self, side: int, k: Size, other: Size, lanes: int) -> Node:
        """The words of four neighbours along k."""
        b, packed = self.b, super().packed
        found = b.turned([packed(side, k * self.word + t, other, lanes) for t in range(self.word)])
        return b.add(tile_ops.words(b.reshape(found, (lanes * self.word,))))

    def line(self, side: int, k: Size, other: Size, lanes: int, whole: bool = True) -> Node:
        """Neighbouring words along k."""
        found = super().line(side, k * self.word, other, lanes * self.word, whole)
        return self.b.add(tile_ops.words(found))

    def allocate_scratch(self) -> None:
        """Scratch for sums of the columns of b as well, where 128 is added to a."""
        super().allocate_scratch()
        if not self.signed:
            shape = (self.plan.block_n // self.plan.nr, self.plan.nr)
            self.offsets = self.b.allocate(shape, self.accumulator, "l1")

    def pack_b(self, at: Size, count: Size) -> None:
        """Words of b, and what 128 in all of a gives with them."""
        super().pack_b(at, count)
        b, nr = self.b, self.plan.nr
        for j in b.each("panel", 0, self.live) if not self.signed else ():
            sums = [b.constant(0, self.accumulator, (nr,))]
            for i in self.of_k(count, 1, sums):
                line = b.load(self.packed_b, (j, i, 0), (nr,))
                sums[0] = self.multiplied(b.constant(SIGNS, line.dtype), line, sums[0])
            b.store(self.offsets, sums[0], (j, 0))

    def with_earlier(self, acc: Node, at: Size, rows: list[Size], start: Size) -> Node:
        """What 128 in all of a has added is taken off."""
        b, plan = self.b, self.plan
        if not self.signed:
            j = (start - self.column) // plan.nr
            acc = b.apply("subtract", acc, b.load(self.offsets, (j, 0), (plan.nr,)))
        return super().with_earlier(acc, at, rows, start)

    def multiplied(self, left: Node, line: Node, sums: Node) -> Node:
        """Sums with products of bytes; Arm takes a lane of the second operand."""
        if self.signed:
            return self.b.apply("signed_byte_dot", line, left, sums)
        return self.b.apply("byte_dot", left, line, sums)


class StreamedBytes(ByteLowering):
    """Lowers one dot Region of few rows of int8, with b along k."""

    def choose(self) -> Plan:
        """A few columns at a time, a few programs for each worker."""
        _, m, _, n = self.problem.most
        lanes, depth = self.target.lanes(self.accumulator), max(1, high(self.depth))
        across, workers = max(1, STREAMS // lanes), self.target.cores
        each = min(4, max(1, n * depth * self.word // (PROGRAM_BYTES * workers)))
        block_n = round_up(ceil_divide(n, workers * each), across * lanes)
        return Plan(1, across, lanes, m, block_n, depth)

    def allocate_scratch(self) -> None:
        """Scratch for all rows of a, and one of 128 where it has no sign."""
        b, plan = self.b, self.plan
        self.along_m = self.lines_of_k = False
        width = round_up(plan.block_k, plan.lanes) + PAD
        self.packed_a = b.allocate((plan.block_m + 1, width), self.accumulator, "l1")
        self.strip = b.allocate((1, plan.nr), self.accumulator, "l1")

    def pack_b(self, at: Size, count: Size) -> None:
        """It is read where it lies."""

    def panels(self, at: Size, count: Size) -> None:
        """All rows, packed once, times some columns after the other."""
        b, (_, m, _, n), plan = self.b, self.problem.sizes, self.plan
        self.pack_a(at, count, [minimum(r, m - 1) for r in range(plan.block_m)])
        last, signs = plan.block_m, b.constant(SIGNS, self.accumulator, (plan.lanes,))
        for i in b.each("k", 0, count, plan.lanes) if not self.signed else ():
            b.store(self.packed_a, signs, (last, i))
        for j in b.each("column_panel", 0, self.live):
            start, whole = self.column + j * plan.nr, n % plan.nr == 0
            columns = [start + c if whole else minimum(start + c, n - 1) for c in range(plan.nr)]
            offsets = None if self.signed else self.streamed(count, last, columns)
            for i in b.each("row", self.row, self.stop, bounds=(0, high(m) - 1)):
                with self.e.scope():
                    acc = self.streamed(count, i, columns)
                    acc = acc if offsets is None else b.apply("subtract", acc, offsets)
                    self.put(acc, at, i, start)

    def streamed(self, count: Size, row: Size, columns: list[Size]) -> Node:
        """Sums of one row with some columns; those of the next are asked for on the way."""
        b, p, plan, lanes = self.b, self.problem, self.plan, self.plan.lanes
        ahead = self.read_along_k(B, 0, [column + plan.nr for column in columns])
        sums = [b.constant(0, self.accumulator, (lanes,)) for _ in columns]
        long = max(lanes, LINE // self.word)
        lines, vectors = (p.sizes[2] // (x * self.word) * x for x in (long, lanes))
        parts = (
            (0, lines, long, True),
            (lines, vectors, lanes, True),
            (vectors, count, lanes, False),
        )
        for first, last, step, whole in parts:
            for i in b.each("k", first, last, step, sums) if first != last else ():
                for memory, offset in ahead:
                    b.prefetch(memory, offset + i * self.word)
                for at in range(0, step, lanes):
                    left = b.load(self.packed_a, (row, i + at), (lanes,))
                    for c, column in enumerate(columns):
                        line = self.line(B, i + at, column, lanes, whole)
                        sums[c] = self.multiplied(left, line, sums[c])
        squares = [sums[s : s + lanes] for s in range(0, plan.nr, lanes)]
        found = [b.reduce(b.add(tile_ops.stack_rows(*s)), 1, "sum") for s in squares]
        return b.reshape(b.add(tile_ops.stack_rows(*found)), (1, plan.nr))


class ByteProducts(VectorProducts):
    """Products of int8 on vectors, by instructions of bytes."""

    def offers(self, region: Region) -> Offers:
        """The roofline: of many rows where no matrix unit takes them."""
        if not of_bytes(region.anchor):
            return "operands are not int8"
        if region.target.matrix_units(int8, int8) and not streams_bytes(region.anchor):
            return "a matrix unit multiplies many rows"
        return [Offer(roofline(region))]

    def lower(self, region: Region, offer: Offer) -> Bodies:
        """The Bodies."""
        kind = StreamedBytes if streams_bytes(region.anchor) else ByteLowering
        return [kind(region).lower()]


def of_bytes(node: Node) -> bool:
    """Whether a product is one of int8 with int8."""
    return node.op is ops.dot and all(x.dtype is int8 for x in node.inputs)


def streams_bytes(dot: Node) -> bool:
    """Whether few rows are multiplied by weights as they lie, along k."""
    (_, m, _, _), b = Problem(dot).most, dot.inputs[1]
    along_k = dot.attrs["contract"][1] == (len(b.shape) - 1,)
    return m <= FEW_ROWS and along_k and b.op is not ops.permute

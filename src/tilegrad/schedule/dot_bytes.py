"""Lower `dot` of int8 to a CPU's dot products of bytes, sums exact in int32.

Four neighbours along k are packed as the bytes of a word, and one instruction adds their products
to a sum: all else is as in `dot`, with k counted in words. Instructions of x86 multiply bytes
without sign by bytes with sign, so there 128 is added to a, and sums begin with what that adds to
them taken off: -128 times the sum of a column of b. With few rows b is not packed where it lies
along k: vectors of neighbours along k are read once from memory and multiplied by each row, and
their lanes are added up at the end.

Invariant: k past its end is 0 in b; int32 wraps around, so sums are exact where the result is.
"""

from __future__ import annotations

from ..core.dtype import int8
from ..core.target import Target
from ..graph import ops
from ..ir.node import Node
from ..ir.symbol import Size, ceil_divide, floor_divide, high, minimum, modulo, round_up
from ..tile import ops as tile_ops
from .dot import PAD, DotLowering, Operand, VectorProducts
from .family import Bodies, Offer, Offers, roofline
from .plan import Plan
from .problem import Problem
from .region import Region

SIGNS = -0x7F7F7F80  # 128 in each byte of a word
FEW_ROWS = 8  # rows that are multiplied one after the other by weights as they lie
STREAMS = 8  # columns at least whose sums are kept at a time
LINE = 64  # bytes of b that are asked for ahead at a time
PROGRAM_BYTES = 96 << 10  # of b, at least, for a program of few rows


class ByteLowering(DotLowering):
    """Lowers one dot Region of int8."""

    word = step = 4

    def __init__(self, region: Region, target: Target, name: str) -> None:
        super().__init__(region, target, name)
        self.input, self.signed = int8, target.has("dotprod")

    def a_at(self, k: Size, row: Size) -> Node:
        """What is packed of a: its sign turned where bytes are multiplied without."""
        found = super().a_at(k, row)
        return found if self.signed else self.b.apply("bit_xor", found, -128)

    def packed(self, operand: Operand, k: Size, other: Size, lanes: int) -> Node:
        """The words of four neighbours along k."""
        found = self.neighbours(operand, k * self.word, other, lanes, self.word)
        return self.b.add(tile_ops.words(self.b.reshape(found, (lanes * self.word,))))

    def line(self, operand: Operand, k: Size, other: Size, lanes: int, whole: bool) -> Node:
        """Neighbouring words along k."""
        count = lanes * self.word
        with self.e.vector(k * self.word, count, self.problem.sizes[2], whole) as lane:
            found = self.b.broadcast(operand(lane, other), (count,))
            return self.b.add(tile_ops.words(self.b.where(self.e.mask, found, 0)))

    def allocate_scratch(self) -> None:
        """Scratch for sums of the columns of b as well, where 128 is added to a."""
        super().allocate_scratch()
        if not self.signed:
            shape = (self.plan.block_n // self.plan.nr, self.plan.nr)
            self.offsets = self.b.allocate(shape, self.accumulator, "l1")

    def pack_b(self, at: Size, count: Size) -> None:
        """Words of b, and what 128 in all of a gives with them, times -1."""
        super().pack_b(at, count)
        b, nr, bounds = self.b, self.plan.nr, (0, self.plan.block_k - 1)
        for j in b.each("panel", 0, self.live) if not self.signed else ():
            sums = [b.constant(0, self.accumulator, (nr,))]
            for i in b.each("k", 0, count, 1, sums, bounds=bounds):
                line = b.load(self.packed_b, (j, i, 0), (nr,), (2,))
                sums[0] = self.multiplied(b.constant(SIGNS, line.dtype), line, sums[0])
            b.store(self.offsets, b.apply("negative", sums[0]), (j, 0), (1,))

    def first_sums(self, j: Size) -> Node:
        """Zeros, or what 128 in all of a adds, taken off."""
        if self.signed:
            return super().first_sums(j)
        plan = self.plan
        return self.b.broadcast(
            self.b.load(self.offsets, (j, 0), (plan.nr,), (1,)), (plan.mr, plan.nr)
        )

    def rows_at(self, i: Size) -> Node:
        """Lanes of a vector, where they are neighbours."""
        if not self.lines_of_k:
            return super().rows_at(i)
        b, mr = self.b, self.plan.mr
        return b.reshape(b.load(self.packed_a, (i, 0), (mr,), (1,)), (mr, 1))

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
        return Plan(1, across, lanes, max(1, m), block_n, depth)

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
            b.store(self.packed_a, signs, (last, i), (1,))
        for j in b.each("column_panel", 0, self.live):
            start, whole = self.column + j * plan.nr, modulo(n, plan.nr) == 0
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
        far = [column + plan.nr for column in columns]
        ahead = self.read_along_k(p.b, lambda k, n: p.index_b(self.batch, k, n), p.sizes[3], 0, far)
        sums = [b.constant(0, self.accumulator, (lanes,)) for _ in columns]
        long = max(lanes, LINE // self.word)
        lines, vectors = (floor_divide(p.sizes[2], x * self.word) * x for x in (long, lanes))
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
                    left = b.load(self.packed_a, (row, i + at), (lanes,), (1,))
                    for c, column in enumerate(columns):
                        line = self.line(self.b_at, i + at, column, lanes, whole)
                        sums[c] = self.multiplied(left, line, sums[c])
        squares = [sums[s : s + lanes] for s in range(0, plan.nr, lanes)]
        found = [b.reduce(b.add(tile_ops.stack_rows(*s)), 1, "sum") for s in squares]
        return b.reshape(b.add(tile_ops.stack_rows(*found)), (1, plan.nr))


class ByteProducts(VectorProducts):
    """Products of int8 on vectors, by instructions of bytes."""

    def offers(self, region: Region, target: Target) -> Offers:
        """The roofline: of many rows where no matrix unit takes them."""
        if not of_bytes(region.anchor):
            return "operands are not int8"
        if target.matrix_units(int8, int8) and not streams_bytes(region.anchor):
            return "a matrix unit multiplies many rows"
        return [Offer(roofline(region, target))]

    def lower(self, region: Region, offer: Offer, target: Target, name: str) -> Bodies:
        """The Bodies."""
        kind = StreamedBytes if streams_bytes(region.anchor) else ByteLowering
        return [kind(region, target, name).lower()]


def of_bytes(node: Node) -> bool:
    """Whether a product is one of int8 with int8."""
    return node.op is ops.dot and all(x.dtype is int8 for x in node.inputs)


def streams_bytes(dot: Node) -> bool:
    """Whether few rows are multiplied by weights as they lie, along k."""
    (_, m, _, _), b = Problem(dot).most, dot.inputs[1]
    along_k = dot.attrs["contract"][1] == (len(b.shape) - 1,)
    return m <= FEW_ROWS and along_k and b.op is not ops.permute

"""Products of few tokens with quantised weights on CPUs: integer dot products of bytes.

A program has some blocks of 16 rows. It first writes the tokens as whole numbers of 16 bits, with
a scale for every step of 32 columns, in two bytes: 256 * high + low, both signed. Then codes are
read once from memory and multiplied by both with `byte_dot`, sums of a group are whole numbers of
32 bits, and only then come scale and minimum, in float32. What a code stands above its value
(`centre`) is taken off as a whole number too. So weights count exactly and a token's element is
rounded to 1/65278 of the largest one of its step.

What lies around a product in a decoder may be `Around` it. The factor of a norm is applied to the
sums, so the squares of a token are added up while it is written as whole numbers, times the norm's
weight. Gates and what they gate are rows half of all rows apart, in one program.

Any number of tokens may be there: a program takes `most` at a time. Invariant: rows past the last
are computed (their codes are zeros) but not stored; a sum is the same for any number of tokens
beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.dtype import DType, float32, int32
from ...core.target import Target
from ...ir.node import Node
from ...ir.symbol import Size, combine, floor_divide, high, minimum, multiply
from ...ir.types import Memory
from ...tile import ops
from ...tile.build import Body, BodyBuilder
from .cpu_parts import QUADS, ROWS, STEP, layout_of, parts
from .shape import NOTHING, Around, QuantisedShape, padded

LIMIT = 32639  # 127 * 256 + 127: the largest that two signed bytes hold
MAGIC, MAGIC_BITS = 12582912.0, 0x4B400000  # 1.5 * 2**23: its low bits count whole numbers
MAGNITUDE = 0x7FFFFFFF  # bits of a float32 without its sign
TINY, LARGE = 2.0**-60, 2.0**60
PROGRAM_ROWS = 320  # at least, for a program: each writes all tokens as whole numbers first
AHEAD = 4096  # bytes of codes that are asked for before they are read
PROGRAM_BYTES = 96 << 10  # of weights, at least, for a program


def programs(shape: QuantisedShape, target: Target) -> int:
    """How many programs share the rows: a few for each worker, none of them too small."""
    blocks, workers = padded(shape.rows, ROWS) // ROWS, max(1, target.cores)
    each = blocks * ROWS * shape.row_bytes // (PROGRAM_BYTES * workers)  # of a worker
    each = min(each, shape.rows // (PROGRAM_ROWS * workers), 8)
    return min(blocks, workers * max(1, each))


def together(tokens: Size, target: Target) -> int:
    """Tokens whose sums are kept in registers at a time, nearly equal parts of all."""
    most = 8 if target.vector_registers >= 32 and target.lanes(float32) == ROWS else 2
    if not isinstance(tokens, int):
        return min(most, 4)  # one by one what is left of these
    return -(-tokens // max(1, -(-tokens // most)))


def multiply_add(b: BodyBuilder, target: Target, x: Node, y: Node, z: Node) -> Node:
    """x * y + z, in one step where the Target has an instruction for it."""
    if any(target.has(f) for f in ("fma", "avx512f", "neon")):
        return b.apply("multiply_add", x, y, z)
    return b.apply("add", b.apply("multiply", x, y), z)


class Weights:
    """Reads the parts of a block of rows; for kernels that work on 16 rows at a time."""

    def __init__(self, b: BodyBuilder, shape: QuantisedShape, memory: dict[str, Node]) -> None:
        self.b, self.shape, self.memory = b, shape, memory
        self.layout = layout_of(shape.format)

    def line(self, name: str, *index: Size) -> Node:
        """16 elements of a part."""
        axes = (len(index),)
        return self.b.load(self.memory[name], (*index, 0), (ROWS,), axes)

    def near(self, block: Size, step: Size, ahead: int) -> None:
        """Ask for the codes of a later step; rows of blocks follow one another in memory."""
        b = self.b
        for v in range(self.layout.vectors):
            index = (block, combine(step, ahead, 1), v, 0)
            b.prefetch(self.memory["codes"], *index)

    def quads(self, block: Size, step: Size) -> list[Node]:
        """The codes of a step, without sign: eight tiles of 16 words."""
        b, found, first, low = self.b, [], 0, 0
        for bits in self.layout.planes:
            lines = [self.line("codes", block, step, first + v) for v in range(bits)]
            found.append(
                [
                    self._bits(lines[j % bits], bits, j // bits * bits - low, low)
                    for j in range(QUADS)
                ]
            )
            first, low = first + bits, low + bits
        total = found[0]
        for other in found[1:]:
            total = [b.apply("bit_or", x, y) for x, y in zip(total, other)]
        return [self._doubled(x) for x in total] if self.layout.doubled else total

    def _bits(self, words: Node, bits: int, right: int, left: int) -> Node:
        """Bits of each byte from `right` (+ left) on, moved to `left`."""
        if bits == 8:
            return words
        return self.masked(self.shifted(words, right), ((1 << bits) - 1) << left)

    def shifted(self, words: Node, right: int) -> Node:
        """Words moved to the right (to the left where it is negative)."""
        if not right:
            return words
        name = "shift_right" if right > 0 else "shift_left"
        return self.b.apply(name, words, self.b.constant(abs(right), int32))

    def masked(self, words: Node, byte: int) -> Node:
        """A mask for each byte."""
        mask = byte * 0x01010101
        return self.b.apply("bit_and", words, self.b.constant(mask - (mask >> 31 << 32), int32))

    def _doubled(self, words: Node) -> Node:
        """Nibbles of E2M1 as 12 above twice their value, all four bytes of a word at once.

        Sizes n = 0 .. 7 stand for n + max(n - 4, 0) + 2 max(n - 6, 0): 0 1 2 3 4 6 8 12.
        """
        b = self.b
        size = self.masked(words, 7)
        beyond = self.masked(self.shifted(size, 2), 1)  # 1 where n >= 4
        step = b.apply("multiply", beyond, b.constant(3, int32))  # two low bits of n - 4
        total = b.apply("add", size, b.apply("bit_and", size, step))
        seven = b.apply("bit_and", self.shifted(size, 1), size)
        seven = self.masked(b.apply("bit_and", seven, beyond), 1)  # 1 where n = 7
        total = b.apply("add", total, b.apply("add", seven, seven))
        sign = self.masked(self.shifted(words, 3), 1)
        all_bits = b.apply("multiply", sign, b.constant(0xFF, int32))
        twice = b.apply("bit_and", b.apply("add", total, total), all_bits)
        middle = b.constant(12 * 0x01010101, int32)
        return b.apply("subtract", b.apply("add", total, middle), twice)

    def groups(self, step: Size) -> list[Size]:
        """The groups of a step."""
        each = STEP // self.layout.group
        return [combine(multiply(step, each), g, 1) for g in range(each)]

    def scale(self, block: Size, step: Size, group: Size, name: str = "scale") -> Node:
        """Scale (or minimum) of a group of 16 rows, in float32."""
        b, layout = self.b, self.layout
        at = floor_divide(multiply(step, STEP), layout.span) if layout.span != STEP else step
        found = b.cast(self.line(name, block, at), float32)
        if layout.small is None:
            return found
        small = self.line("scales" if name == "scale" else "minima", block, group)
        found = b.apply("multiply", found, b.cast(b.cast(small, int32), float32))
        return found if name == "scale" else b.apply("negative", found)


def parameters(shape: QuantisedShape, around: Around) -> list[tuple[str, Memory]]:
    """The parameters in order; see `Around`."""
    dtype, results = shape.dtype, around.results(shape)
    made = [("x", Memory((shape.tokens, shape.columns), dtype))]
    if around.norm is not None:
        made.append(("norm", Memory((shape.columns,), dtype)))
    made += [(n, Memory(s, d)) for n, s, d in parts(shape)]
    if around.bias:
        made.append(("bias", Memory((shape.rows,), dtype)))
    if around.residual:
        made.append(("residual", Memory((shape.tokens, results[0]), dtype)))
    return [
        *made,
        *(
            (n, Memory((shape.tokens, size), dtype, use="result"))
            for n, size in zip(result_names(shape, around), results)
        ),
    ]


def result_names(shape: QuantisedShape, around: Around) -> list[str]:
    """The names of the results."""
    return [f"out{i or ''}" for i in range(len(around.results(shape)))]


class Decode:
    """Builds the Body."""

    def __init__(
        self,
        shape: QuantisedShape,
        target: Target,
        most: int,
        name: str,
        around: Around = NOTHING,
        whole: bool = False,
    ) -> None:
        self.shape, self.target, self.most, self.around = shape, target, most, around
        self.whole = whole  # whether there may be more tokens than `most`
        self.first: Size = 0  # of the tokens at work
        given = parameters(shape, around)
        self.b = BodyBuilder(name, given)
        self.memory = dict(zip((n for n, _ in given), self.b.parameters))
        self.weights = Weights(self.b, shape, self.memory)
        self.layout = self.weights.layout

    def build(self, share: Size = 1) -> Body:
        """The Body; `share` is 1 where it has work to do and 0 where another one has."""
        b, shape = self.b, self.shape
        self.blocks = padded(shape.rows, ROWS) // ROWS // self.sides
        count = min(programs(shape, self.target), self.blocks)
        p = b.program(0, count)
        self.places()
        first, stop = (
            floor_divide(multiply(combine(p, i, 1), self.blocks), count) for i in range(2)
        )

        def block(r: Size, _: list[Node]) -> Sequence[Node]:
            self.rows(r)
            return ()

        def some(token: Size, _: list[Node]) -> Sequence[Node]:
            self.first, left = token, combine(shape.tokens, token, -1)
            self.tokens = minimum(left, self.most)
            b.loop("token", 0, self.tokens, 1, self.take, bounds=(0, self.most - 1))
            b.loop("block", first, stop, 1, block, bounds=(0, self.blocks - 1))
            return ()

        if self.whole and high(shape.tokens) > self.most:
            b.loop("some", 0, shape.tokens, self.most, some, bounds=(0, high(shape.tokens) - 1))
        else:
            some(0, [])
        return b.finish((multiply(count, share),))

    @property
    def sides(self) -> int:
        """Blocks of rows that a block of results is made of."""
        return 2 if self.around.gated else 1

    def scratch(self, *shape: int, dtype: DType = float32) -> Node:
        """A place of the program's own."""
        return self.b.allocate(shape, dtype, "l2")

    def places(self) -> None:
        """Tokens as bytes, scales of their steps, sums of their groups."""
        columns, n = self.shape.columns, self.most
        self.high_bytes = self.scratch(n, columns // 4, dtype=int32)
        self.low_bytes = self.scratch(n, columns // 4, dtype=int32)
        self.scales = self.scratch(n, columns // STEP)
        groups = columns // self.layout.group
        if self.layout.centre:
            self.above = self.scratch(n, groups, dtype=int32)  # to take off
        if self.layout.minimum:
            self.sums = self.scratch(n, groups)
        if self.around.norm is not None:
            self.factors = self.scratch(n)

    # ---- tokens ---------------------------------------------------------------------------

    def take(self, t: Size, _: list[Node]) -> Sequence[Node]:
        """A token, step by step."""
        b, columns, norm = self.b, self.shape.columns, self.around.norm
        own = combine(self.first, t, 1)

        def step(s: Size, carried: list[Node]) -> Sequence[Node]:
            x = b.load(self.memory["x"], (own, multiply(s, STEP)), (STEP,), (1,))
            x = b.cast(x, float32)
            if norm is None:
                self.take_step(t, s, x)
                return ()
            weight = b.load(self.memory["norm"], (multiply(s, STEP),), (STEP,), (0,))
            weight = b.cast(weight, float32)
            if self.around.offset:
                weight = b.apply("add", weight, b.constant(self.around.offset, float32))
            self.take_step(t, s, b.apply("multiply", x, weight))
            return [multiply_add(b, self.target, x, x, carried[0])]

        squares = [] if norm is None else [b.constant(0.0, float32, (STEP,))]
        found = b.loop("step", 0, columns // STEP, 1, step, squares)
        if norm is not None:
            mean = b.add(ops.reduce(found[0], axis=0, kind="sum"))
            mean = b.apply("multiply", mean, b.constant(1 / columns, float32))
            root = b.apply("square_root", b.apply("add", mean, b.constant(norm, float32)))
            b.store(self.factors, b.apply("reciprocal", root), (t,))
        return ()

    def take_step(self, t: Size, s: Size, x: Node) -> None:
        """32 elements as bytes; each quad a word."""
        b = self.b
        bits = b.apply("bit_and", b.add(ops.bitcast(x, dtype=int32)), b.constant(MAGNITUDE, int32))
        most = b.add(ops.reduce(bits, axis=0, kind="max"))  # in the order of sizes; nan is largest
        most = b.add(ops.bitcast(most, dtype=float32))
        small = b.apply("less", most, b.constant(TINY, float32))
        factor, back = (
            b.apply("where", small, b.constant(f, float32), b.constant(1.0, float32))
            for f in (LARGE, TINY)
        )
        near = b.apply("multiply", most, factor)
        none = b.apply("equal", near, b.constant(0.0, float32))
        divisor = b.apply("where", none, b.constant(1.0, float32), near)
        inverse = b.apply("divide", b.constant(LIMIT, float32), divisor)
        whole = b.apply("multiply", b.apply("multiply", x, factor), inverse)
        whole = b.apply("add", whole, b.constant(MAGIC, float32))
        whole = b.apply(
            "subtract", b.add(ops.bitcast(whole, dtype=int32)), b.constant(MAGIC_BITS, int32)
        )
        scale = b.apply("multiply", b.apply("multiply", near, b.constant(1 / LIMIT, float32)), back)
        b.store(self.scales, scale, (t, s))
        self.take_sums(t, s, whole, scale)
        upper = b.apply("add", whole, b.constant(128, int32))
        upper = b.apply("shift_right", upper, b.constant(8, int32))
        lower = b.apply("subtract", whole, b.apply("shift_left", upper, b.constant(8, int32)))
        for place, value in ((self.high_bytes, upper), (self.low_bytes, lower)):
            b.store(place, self.joined(value), (t, multiply(s, QUADS)), (1,))

    def joined(self, x: Node) -> Node:
        """32 small numbers, four and four in the bytes of a word."""
        b = self.b
        turned = b.add(ops.transpose(b.add(ops.reshape(x, shape=(QUADS, 4))), order=(1, 0)))
        total = b.add(ops.extract(turned, index=3))
        total = b.apply("shift_left", total, b.constant(24, int32))
        for byte in range(3):
            one = b.apply("bit_and", b.add(ops.extract(turned, index=byte)), b.constant(255, int32))
            one = b.apply("shift_left", one, b.constant(8 * byte, int32)) if byte else one
            total = b.apply("bit_or", total, one)
        return total

    def take_sums(self, t: Size, s: Size, whole: Node, scale: Node) -> None:
        """Sums of the groups of a step, of the whole numbers: what a token was rounded by then
        counts as much as the values of weights, and not as much as their codes."""
        b, size = self.b, self.layout.group
        if not (self.layout.centre or self.layout.minimum):
            return
        at = (t, multiply(s, STEP // size))
        cut = b.add(ops.reshape(whole, shape=(STEP // size, size)))
        total = b.add(ops.reduce(cut, axis=1, kind="sum"))  # (groups,)
        if self.layout.centre:
            centre = b.constant(-self.layout.centre, int32)
            b.store(self.above, b.apply("multiply", total, centre), at, (1,))
        if self.layout.minimum:
            b.store(self.sums, b.apply("multiply", b.cast(total, float32), scale), at, (1,))

    # ---- rows -----------------------------------------------------------------------------

    def rows(self, block: Size) -> None:
        """The products of a block of 16 rows with all tokens, some at a time."""
        several = together(self.tokens, self.target)
        whole = multiply(floor_divide(self.tokens, several), several)

        def some(count: int, first: Size, stop: Size) -> None:
            def one(t: Size, _: list[Node]) -> Sequence[Node]:
                self.tile(block, t, count)
                return ()

            self.b.loop("tokens", first, stop, count, one, bounds=(0, max(0, self.most - count)))

        some(several, 0, whole)
        if not isinstance(self.tokens, int):
            some(1, whole, self.tokens)
        elif self.tokens % several:
            some(self.tokens % several, whole, self.tokens)

    def tile(self, block: Size, first: Size, count: int) -> None:
        """The results of a block for some tokens."""
        b, shape, around = self.b, self.shape, self.around
        tokens = [combine(first, i, 1) for i in range(count)]
        sides = [
            self.product(combine(block, side * self.blocks, 1), tokens)
            for side in range(self.sides)
        ]
        row = multiply(block, ROWS)
        mask = self.inside(row) if shape.rows % ROWS else None
        for n, t in enumerate(tokens):
            own = [side[n] for side in sides]
            if around.norm is not None:
                factor = b.load(self.factors, (t,))
                own = [b.apply("multiply", x, factor) for x in own]
            if around.bias:
                bias = b.load(self.memory["bias"], (row,), (ROWS,), (0,), mask)
                own = [b.apply("add", own[0], b.cast(bias, float32))]
            value = self.gate(*own) if around.gated else own[0]
            if around.residual:
                at = (combine(self.first, t, 1), row)
                before = b.load(self.memory["residual"], at, (ROWS,), (1,), mask)
                value = b.apply("add", value, b.cast(before, float32))
            self.put(b.cast(value, shape.dtype), combine(self.first, t, 1), block, mask)

    def put(self, value: Node, t: Size, block: Size, mask: Node | None) -> None:
        """Write a token's results of a block where they belong."""
        b, first = self.b, 0
        sizes = self.around.results(self.shape)
        for name, size in zip(result_names(self.shape, self.around), sizes):

            def write(name: str = name, first: int = first) -> Sequence[Node]:
                row = multiply(combine(block, first, -1), ROWS)
                b.store(self.memory[name], value, (t, row), (1,), mask)
                return ()

            if len(sizes) == 1:
                write()
                return
            after = b.less_equal(first, block)
            first += size // ROWS
            b.branch(b.apply("bit_and", after, b.less(block, first)), write)

    def inside(self, row: Size) -> Node:
        """Which rows from `row` on there are."""
        b = self.b
        counted = b.add(ops.iota(size=ROWS, dtype=b.index(0).dtype))
        return b.apply("less", b.apply("add", counted, b.index(row)), b.index(self.shape.rows))

    def gate(self, gate: Node, other: Node) -> Node:
        """silu(gate) * other."""
        b, one = self.b, self.b.constant(1.0, float32)
        below = b.apply("add", b.apply("exp", b.apply("negative", gate)), one)
        return b.apply("multiply", b.apply("divide", gate, below), other)

    def product(self, block: Size, tokens: list[Size]) -> list[Node]:
        """The products of a block of rows with some tokens."""
        b, shape = self.b, self.shape

        def step(s: Size, sums: list[Node]) -> Sequence[Node]:
            return self.step(block, s, tokens, sums)

        zero = b.constant(0.0, float32, (ROWS,))
        return b.loop("step", 0, shape.columns // STEP, 1, step, [zero] * len(tokens), unroll=2)

    def step(self, block: Size, s: Size, tokens: list[Size], sums: list[Node]) -> list[Node]:
        """Sums after one more step."""
        b, weights = self.b, self.weights
        if AHEAD:
            weights.near(block, s, -(-AHEAD // (64 * self.layout.vectors)))
        quads = weights.quads(block, s)
        groups = weights.groups(s)
        each = QUADS // len(groups)
        for g, group in enumerate(groups):
            scale = weights.scale(block, s, group)
            lowest = weights.scale(block, s, group, "minimum") if self.layout.minimum else None
            own = range(g * each, (g + 1) * each)
            for n, t in enumerate(tokens):
                total = self.dot(t, s, [(j, quads[j]) for j in own], group)
                by = b.apply("multiply", b.cast(total, float32), b.load(self.scales, (t, s)))
                sums[n] = multiply_add(b, self.target, by, scale, sums[n])
                if lowest is not None:
                    own_sum = b.load(self.sums, (t, group))
                    sums[n] = multiply_add(b, self.target, lowest, own_sum, sums[n])
        return sums

    def dot(self, t: Size, s: Size, quads: list[tuple[int, Node]], group: Size) -> Node:
        """Whole numbers: codes of a group times a token."""
        b = self.b
        upper, lower = b.constant(0, int32, (ROWS,)), b.constant(0, int32, (ROWS,))
        if self.layout.centre:
            lower = b.broadcast(b.load(self.above, (t, group)), (ROWS,))
        for j, quad in quads:
            at = (t, combine(multiply(s, QUADS), j, 1))
            upper = b.apply("byte_dot", quad, b.load(self.high_bytes, at), upper)
            lower = b.apply("byte_dot", quad, b.load(self.low_bytes, at), lower)
        return b.apply("add", b.apply("shift_left", upper, b.constant(8, int32)), lower)


def decode(
    shape: QuantisedShape,
    target: Target,
    most: int | None = None,
    share: Size = 1,
    name: str = "quantised_decode",
    around: Around = NOTHING,
    whole: bool = False,
) -> Body:
    """The kernel for at most so many tokens, or for so many at a time (`whole`)."""
    limit = high(shape.tokens) if most is None else most
    most = max(1, min(limit, max(1, high(shape.tokens))))
    return Decode(shape, target, most, name, around, whole).build(share)


__all__ = ["Weights", "decode", "multiply_add", "programs", "result_names"]

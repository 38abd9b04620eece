"""Products of tokens with quantised weights on CPUs: integer dot products of bytes.

A program has some blocks of 16 rows. It first writes the tokens as lines of whole numbers
(`cpu_tokens`). Then codes are read once from memory and multiplied by all their bytes with
`byte_dot` (`signed_byte_dot` where that is all a Target has), sums of a group are whole numbers of
32 bits, and only then come scale and minimum, in float32. What a code stands above its value
(`centre`) is taken off as a whole number too. So weights count exactly and a token's element is
rounded to 1/65278 of the largest one of its step.

What lies around a product in a decoder may be `Around` it. The factor of a norm is applied to the
sums, so the squares of a token are added up while it is written as whole numbers, times the norm's
weight. Gates and what they gate are rows half of all rows apart, in one program.

Any number of tokens may be there: a program takes `most` at a time, and of groups one group after
the other. Invariant: rows past the last are computed (their codes are zeros) but not stored; a sum
is the same for any number of tokens beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ... import tile
from ...core.dtype import float32, int32
from ...core.errors import InternalError
from ...core.target import Target
from ...ir.symbol import Size, ceil_divide, high, round_up
from ...ir.types import Memory
from ...tile.build import Body, BodyBuilder
from ..matmul.shape import among
from .cpu_parts import ALL_SIGNS, QUADS, ROWS, STEP, parts
from .cpu_tokens import Line
from .shape import NOTHING, Around, QuantisedShape, parameters
from .words import doubled, moved, surrounded, there

PROGRAM_ROWS = 320  # at least, for a program: each writes all tokens as whole numbers first
AHEAD, NEAR = 4096, 512  # bytes of codes that are asked for before they are read; on Arm
MOST_TOKENS = 1 << 30  # as many as there are
PROGRAM_BYTES = 96 << 10  # of weights, at least, for a program


def programs(shape: QuantisedShape, target: Target) -> int:
    """How many programs share the rows: a few for each worker, none of them too small."""
    blocks, workers = round_up(shape.outputs, ROWS) // ROWS, max(1, target.cores)
    each = blocks * ROWS * shape.row_bytes // (PROGRAM_BYTES * workers)  # of a worker
    each = min(each, shape.outputs // (PROGRAM_ROWS * workers), 8)
    return min(blocks, workers * max(1, each))


def multiply_add(target: Target, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, in one step where the Target has an instruction for it."""
    if any(target.has(f) for f in ("fma", "avx512f", "neon")):
        return tile.multiply_add(x, y, z)
    return x * y + z


class Weights:
    """Reads the parts of a block of rows: of some of its 16 rows at a time, from `first` on.

    Codes have no sign, or, where bytes are multiplied with theirs (`signed`), at most seven bits
    or one."""

    def __init__(self, shape: QuantisedShape, memory: dict[str, Any], signed: bool = False) -> None:
        self.shape, self.memory = shape, memory
        self.layout = shape.layout
        self.turned = signed and max(self.layout.planes) == 8
        if self.turned:  # codes with sign are what they stand for
            self.layout = replace(self.layout, centre=self.layout.centre - 128)
        self.first, self.rows = 0, ROWS

    def line(self, name: str, *index: Any) -> Any:
        """An element of a part for each row."""
        return tile.load(self.memory[name], (*index, self.first), self.rows)

    def near(self, block: Any, step: Any, ahead: int) -> None:
        """Ask for the codes of a later step; rows of blocks follow one another in memory."""
        for v in range(sum(self.layout.planes)):
            tile.prefetch(self.memory["codes"], (block, step + ahead, v, 0))

    def quads(self, block: Any, step: Any) -> list[Any]:
        """The codes of a step: eight tiles of a word for each row."""
        found, first, low = [], 0, 0
        for bits in self.layout.planes:
            lines = [self.line("codes", block, step, first + v) for v in range(bits)]
            found.append(
                [moved(lines[j % bits], bits, j // bits * bits - low, low) for j in range(QUADS)]
            )
            first, low = first + bits, low + bits
        total = found[0]
        for other in found[1:]:
            total = [x | y for x, y in zip(total, other)]
        if self.turned:
            return [x ^ ALL_SIGNS for x in total]
        return [doubled(x) for x in total] if self.layout.doubled else total

    def groups(self, block: Any, step: Any) -> Iterator[tuple[Any, Any, Any]]:
        """The groups of a step: number, scale, minimum (None where the Format has none)."""
        each = STEP // self.layout.group
        for group in (step * each + g for g in range(each)):
            scale = self.scale(block, step, group)
            least = self.scale(block, step, group, "minimum") if self.layout.least else None
            yield group, scale, least

    def scale(self, block: Any, step: Any, group: Any, name: str = "scale") -> Any:
        """Scale (or minimum) of a group of 16 rows, in float32."""
        layout = self.layout
        at = step * STEP // self.shape.format.block if layout.two_levels else step
        found = self.line(name, block, at).to(float32)
        if layout.least == "zero" and name == "minimum":
            return -(found * self.line("scale", block, at).to(float32))
        if not layout.two_levels:
            return found
        small = self.line("scales" if name == "scale" else "minima", block, group)
        found = found * small.to(int32).to(float32)
        return found if name == "scale" else -found


def grouped(shape: QuantisedShape, around: Around = NOTHING) -> list[tuple[str, Memory]]:
    """The parameters in order; where there are groups, their offsets come after x."""
    x, *rest = parameters(shape, parts(shape), around)
    offsets = ("offsets", Memory((shape.groups + 1,), int32))
    return [x, offsets, *rest] if shape.groups > 1 else [x, *rest]


def ends_of(shape: QuantisedShape, memory: dict[str, Any], number: Any) -> list[Any]:
    """The first token of a group, and the one after its last."""
    found = [tile.load(memory["offsets"], number + i).to(tile.i64) for i in range(2)]
    return [tile.hold(x, "offset", (0, high(shape.tokens))) for x in found]


class Writer:
    """What the Bodies of CPU kernels share: sizes, a builder, memories by name, weights."""

    programs: Size

    def __init__(
        self,
        shape: QuantisedShape,
        target: Target,
        given: Sequence[tuple[str, Memory]],
        name: str,
        signed: bool = False,
    ) -> None:
        self.shape, self.target = shape, target
        self.b = BodyBuilder(name, given)
        self.memory = tile.memories(self.b)
        self.weights = Weights(shape, self.memory, signed)
        self.layout = self.weights.layout

    def build(self, share: Size = 1) -> Body:
        """The Body; `share` is 1 where it has work to do and 0 where another one has."""
        with tile.into(self.b):
            self.work(tile.grid(self.programs))
        return self.b.finish((self.programs * share,))

    def work(self, program: Any) -> None:
        """All that a program does."""
        raise InternalError("kernels.quantised", f"{type(self).__name__} does nothing")


class Lines(Writer):
    """What the Bodies that write lines of tokens share."""

    line: Line
    lines: Any  # where they go
    factors: Any  # of their norm
    around = NOTHING
    first: Size = 0  # of the tokens at work

    @tile.function
    def take(self, token: Any) -> None:
        """A token, step by step."""
        columns, norm, own = self.shape.columns, self.around.norm, self.first + token
        squares = None if norm is None else tile.zeros((STEP,))
        for step in tile.range(columns // STEP):
            x = tile.load(self.memory["x"], (own, step * STEP), STEP).to(float32)
            if norm is None:
                self.line.put(self.lines, token, step, x)
            else:
                weight = tile.load(self.memory["norm"], step * STEP, STEP).to(float32)
                weight = weight + self.around.offset if self.around.offset else weight
                self.line.put(self.lines, token, step, x * weight)
                squares = multiply_add(self.target, x, x, squares)
        if norm is not None:
            root = tile.sqrt(tile.sum(squares, 0) * (1 / columns) + norm)
            tile.store(self.factors, token, tile.reciprocal(root))


class Decode(Lines):
    """The kernel for any number of tokens, so many at a time."""

    def __init__(
        self,
        shape: QuantisedShape,
        target: Target,
        most: int = MOST_TOKENS,
        name: str = "quantised_decode",
        around: Around = NOTHING,
        split: bool = False,
    ) -> None:
        self.line = Line(shape.columns, shape.layout)
        given = grouped(shape, around)
        if split:
            given[0] = ("split", self.line.memory(shape.tokens, "value"))
        # whether the instruction for products of four bytes takes signed ones alone
        self.signed = target.has("dotprod") and not target.has("i8mm")
        super().__init__(shape, target, given, name, self.signed)
        self.most, self.around = max(1, min(most, high(shape.tokens))), around
        self.base: Size = 0  # the first block of a group's rows
        # rows of a block whose products are made at a time: what registers hold beside their codes
        self.rows_at_once = 8 if target.multiplies_by_lane else ROWS
        wide = target.vector_registers >= 32 and target.lanes(float32) == ROWS
        self.in_registers = 8 if wide else 4 if target.multiplies_by_lane else 2  # tokens' sums
        self.turns = [range(0, ROWS, self.rows_at_once)]  # rows whose codes are read together
        self.sides = 2 if around.gated else 1  # blocks of rows that results are made of
        self.blocks = round_up(shape.outputs, ROWS) // ROWS // self.sides
        self.programs = min(programs(shape, target), self.blocks)

    @tile.function
    def work(self, program: Any) -> None:
        """Tokens, `most` at a time, with the blocks of rows that the program has."""
        tokens = self.shape.tokens
        self.allocate_scratch()
        ends = [(program + i) * self.blocks // self.programs for i in range(2)]
        if self.shape.groups > 1:
            for number in tile.range(self.shape.groups):
                self.base = number * self.blocks
                self.all(*ends_of(self.shape, self.memory, number), ends)
        elif high(tokens) > self.most:
            self.all(0, tokens, ends)
        else:
            self.some(0, ends, tokens)

    @tile.function
    def all(self, start: Any, stop: Any, ends: Sequence[Any]) -> None:
        """Tokens of a group, or all."""
        for some in tile.range(start, stop, self.most, bounds=(0, high(self.shape.tokens) - 1)):
            self.some(some, ends, stop)

    @tile.function
    def some(self, first: Any, ends: Sequence[Any], stop: Any) -> None:
        """Some tokens as whole numbers, then their products."""
        self.first, self.tokens = first, tile.minimum(stop - first, self.most)
        self.take_all()
        for block in tile.range(*ends, bounds=(0, self.blocks - 1)):
            self.rows(block)

    def allocate_scratch(self) -> None:
        """Lines of tokens, and factors of their norm."""
        self.lines = tile.scratch((self.most, self.line.width), int32)
        if self.around.norm is not None:
            self.factors = tile.scratch((self.most,))

    # ---- tokens ---------------------------------------------------------------------------

    @tile.function
    def take_all(self) -> None:
        """The lines of the tokens at work."""
        for token in tile.range(self.tokens, bounds=(0, self.most - 1)):
            self.take(token)

    # ---- rows -----------------------------------------------------------------------------

    @tile.function
    def rows(self, block: Any) -> None:
        """The products of a block of 16 rows with all tokens, some at a time."""
        count = self.tokens
        several = self.together(count)
        whole = count // several * several
        rest = count % several if isinstance(count, int) else 1  # at a time
        for each, first, stop in ((several, 0, whole), (rest, whole, count)):
            if each:
                bounds = (0, max(0, self.most - each))
                for tokens in tile.range(first, stop, each, bounds=bounds):
                    self.results(block, tokens, each)

    def together(self, tokens: Any) -> int:
        """Tokens whose sums are kept in registers at a time, nearly equal parts of all."""
        if not isinstance(tokens, int):
            return min(self.in_registers, 4)  # one by one what is left of these
        return ceil_divide(tokens, max(1, ceil_divide(tokens, self.in_registers)))

    def results(self, block: Any, first: Any, count: int) -> None:
        """The results of a block for some tokens."""
        shape, around = self.shape, self.around
        tokens = [first + i for i in range(count)]
        blocks = [self.base + block + side * self.blocks for side in range(self.sides)]
        sides = [iter(self.product(own, tokens)) for own in blocks]
        size = self.rows_at_once
        for part in range(0, ROWS, size):
            row = block * ROWS + part
            mask = there((size,), 0, row, shape.rows)
            for token in tokens:
                own, at = [next(side) for side in sides], (self.first + token, row)
                if around.norm is not None:
                    factor = tile.load(self.factors, token)
                    own = [x * factor for x in own]
                bias, residual = (
                    tile.load(self.memory[name], where, size, mask=mask)
                    if name in self.memory
                    else None
                    for name, where in (("bias", row), ("residual", at))
                )
                value = surrounded(own, bias, residual)
                self.put(value.to(shape.dtype), self.first + token, block, part, mask)

    def put(self, value: Any, token: Any, block: Any, row: int, mask: Any) -> None:
        """Write a token's results of a block, from one of its rows on, where they belong."""
        starts = [start // ROWS for start in self.around.starts(self.shape)]

        def store(number: int) -> None:
            at = (token, (block - starts[number]) * ROWS + row)
            tile.store(self.memory[f"out{number}"], at, value, mask=mask)

        among(block, starts, store)

    @tile.function
    def product(self, block: Any, tokens: Sequence[Any]) -> list[Any]:
        """The products of a block with some tokens: of some rows with all, then of others."""
        found: list[Any] = []
        unroll = 1 if self.target.multiplies_by_lane else 2
        for pieces in self.turns:
            sums = [tile.zeros((self.rows_at_once,)) for _ in pieces for _ in tokens]
            for step in tile.range(self.shape.columns // STEP, unroll=unroll):
                sums = self.step(block, step, tokens, pieces, sums)
            found += sums
        return found

    def step(
        self, block: Any, step: Any, tokens: Sequence[Any], pieces: range, sums: Sequence[Any]
    ) -> list[Any]:
        """Sums after one more step."""
        ahead = NEAR if self.target.multiplies_by_lane else AHEAD
        self.weights.near(block, step, ceil_divide(ahead, 64 * sum(self.layout.planes)))
        found: list[Any] = []
        for first in pieces:
            self.weights.first, self.weights.rows = first, self.rows_at_once
            own = sums[len(found) : len(found) + len(tokens)]
            found += self.some_rows(block, step, tokens, own)
        return found

    def some_rows(
        self, block: Any, step: Any, tokens: Sequence[Any], sums: Sequence[Any]
    ) -> list[Any]:
        """Those of some rows."""
        made, quads = list(sums), self.weights.quads(block, step)
        each = QUADS * self.layout.group // STEP
        for g, (group, scale, least) in enumerate(self.weights.groups(block, step)):
            own = quads[g * each : (g + 1) * each]
            at = step * QUADS + g * each
            totals = [x for some in self.lots(tokens) for x in self.dots(some, at, own, group)]
            for n, (token, total) in enumerate(zip(tokens, totals)):
                row = self.row(token)
                by = total.to(float32) * self.line.scale(self.lines, row, step)
                made[n] = multiply_add(self.target, by, scale, made[n])
                if least is not None:
                    own_sum = self.line.sum(self.lines, row, group)
                    made[n] = multiply_add(self.target, least, own_sum, made[n])
        return made

    def lots(self, tokens: Sequence[Any]) -> list[Sequence[Any]]:
        """Tokens whose products are made together: one after the other."""
        return [[token] for token in tokens]

    def dots(
        self, tokens: Sequence[Any], first: Any, quads: Sequence[Any], group: Any
    ) -> list[Any]:
        """Whole numbers: codes of a group times tokens, whose words begin somewhere."""
        dot = tile.signed_byte_dot if self.signed else tile.byte_dot
        parts_ = []
        for part in range(self.line.depth):
            words = [self.words(part, token, first, len(quads)) for token in tokens]
            parts_.append((words, [tile.zeros((self.rows_at_once,), int32) for _ in tokens]))
        for i, quad in enumerate(quads):
            for words, sums in parts_:
                sums[:] = [dot(quad, word(i), before) for word, before in zip(words, sums)]
        totals = parts_[-1][1]
        if self.line.depth == 2:
            totals = [(x << 8) + y for x, y in zip(parts_[0][1], totals)]
        if self.layout.centre:
            above = [self.line.above(self.lines, self.row(token), group) for token in tokens]
            totals = [x + y for x, y in zip(totals, above)]
        return totals

    def words(self, part: int, token: Any, first: Any, count: int) -> Callable[[int], Any]:
        """What reads a token's words: lanes of vectors where the Target multiplies by them."""
        row = self.row(token)
        if not self.target.multiplies_by_lane:
            return lambda i: self.line.words(self.lines, row, part, first + i)
        found = [self.line.words(self.lines, row, part, first + i, 4) for i in range(0, count, 4)]
        return lambda i: found[i // 4][i % 4]

    def row(self, token: Any) -> Any:
        """Where the line of a token at work is."""
        return token

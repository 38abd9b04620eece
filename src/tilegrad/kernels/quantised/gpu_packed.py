"""Some tokens times quantised rows on matrix units that run beside the threads.

`PackedMatmul` is the wide matmul with the weights as rows of the matrix unit and tokens as its
columns; what comes through the ring are codes and scales as they are stored, and a consumer takes
them apart into the registers that its product reads. A thread holds two rows of a step of 16
columns, and of each group of 32 columns two neighbours in every 8: a word of nibbles (two words of
bytes) has just these, so that it shifts once and masks four times (twice each). As bfloat16 codes
below 128 are subnormal, and those above follow at the same steps: a power of two makes them whole
numbers again, and half the range is taken off exactly (as float16 they are the last bits of 1,024,
which is taken off with it); scale and minimum follow in one rounding to x's dtype. Sums are
float32.

Cost for a weight of 4 bits, in lane instructions: 5/8 to cut digits out, 1 to make them values, 0.6
for scales (which four threads make alike), 0.25 to read; 3.0 as assembled. At 4.3 TB/s an H200
brings 28 weights of 5 bits a clock and core: 84 of its 128 lanes; 25 were measured, since what
multiplies registers does not run beside this (docs/decisions/0052). Codes of 8 bits are cut out for
3/4 and read for 1/2, and 17 of them come a clock. Bytes: those of the parts, once; x from L2, once
for each tile of rows. Error: scale, minimum and product are rounded to x's dtype, each once.

Invariant: the order of every sum depends on the shape and the Plan alone; what lies outside of the
weights and of x reads as 0 and is not written.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ... import tile
from ...core.config import invariant
from ...core.dtype import bfloat16, float16, float32, int32
from ...core.errors import InternalError
from ...core.target import Target
from ...ir.symbol import ceil_divide, high, round_up
from ...tile.build import BodyBuilder
from ..matmul.plan import (
    CLUSTERS,
    FEW_IDLE,
    FEW_MEMORY_SECONDS,
    FEW_SHARE,
    FEW_TOKEN,
    NORM,
    most_stages,
)
from ..matmul.shape import Operands, WidePlan, among, box, first_wrong
from ..matmul.wide import WideMatmul
from .gpu_layout import GROUP, STRIP, bytes_of, halves, in_strips, parts, units_of, words_of
from .shape import NOTHING, Around, QuantisedShape, parameters
from .words import and_masks, surrounded, there

DEPTH, PART = 256, 64  # columns of a step (8 groups), and those that are taken apart at once
# columns of a consumer's sums, by consumers: of one product, of each of two
MOST_WIDE = {1: (256, 128), 2: (256, 128), 4: (64, 16)}
REGISTERS = {4: (32, 112)}  # of the producer and of a consumer, by consumers: those of a launch
MOST_TOKENS, MOST_PACKED = 128, 256  # of a tile, of a product
MOST_STAGES, SPARE_BYTES = 16, 512  # spare: where places begin
SWIZZLED_BYTES = 1024  # a swizzled place begins at a multiple
CACHE_RATE = 1.15e13  # bytes/s from L2 to all cores
UNPACK_SECONDS = 1.35e-11  # of a weight on one core: 3 instructions
CONSUMERS = {1: 1.2, 4: 0.99}  # times as long with so many consumers
SHORT = 1.12  # times as long with two stages
RATE = 0.95  # of the peak, of products with an operand in registers
LEAST_COLUMNS = 32  # that they cost
START_SECONDS, SPLIT_SECONDS = 2.0e-6, 0.7e-6
# Digits are made numbers: of bfloat16 as they are, subnormal; of float16 as last bits of ABOVE
BASE, ABOVE = {bfloat16: 0, float16: 0x6400}, {bfloat16: 0.0, float16: 1024.0}
POWER = {bfloat16: 126, float16: 0}  # of 2, that makes the last bit 2 ** -UNIT
UNIT = {bfloat16: 7, float16: 0}


@dataclass(frozen=True)
class PackedPlan(WidePlan):
    """Choices of `PackedMatmul`: those of the wide matmul, and how consumers share rows."""

    ways: int = 1  # consumers of the same rows (1 or 2), each with some parts of every step


def operands_of(shape: QuantisedShape, around: Around) -> Operands:
    """The product as the wide matmul sees it: weights are its rows."""
    rows, dtype = sum(around.results(shape)), shape.dtype
    return Operands(
        rows,
        shape.tokens,
        shape.columns,
        dtype,
        dtype,
        turned=True,
        weights=(rows, rows) if around.gated else (),
        gated=bool(around.gated),
    )


def step_bytes(shape: QuantisedShape, plan: PackedPlan) -> int:
    """Bytes that a step brings."""
    (*_, (_, _, scales)), words = parts(shape), words_of(shape.layout) * units_of(shape.layout)
    of_row = DEPTH // GROUP * (4 * words + scales.size)
    return plan.tile[0] * of_row + plan.tile[1] * DEPTH * shape.dtype.size


# ---- Plans --------------------------------------------------------------------------------------


def why_not(shape: QuantisedShape, target: Target, around: Around = NOTHING) -> str:
    """Why no Plan takes a product; '' where one does."""
    x, sizes = shape.layout, around.results(shape)
    wrong = [
        (not 1 < high(shape.tokens) <= MOST_PACKED, f"2 to {MOST_PACKED} tokens"),
        (invariant(), "invariant: any number of tokens by one kernel"),
        (not target.asynchronous_units, "no matrix units that run beside the threads"),
        (shape.dtype not in POWER, "tokens of 16 bits"),
        (not in_strips(x), "codes of 4 or 8 bits with a scale a group"),
        (around.norm is not None, "no norm: each program would compute it anew"),
        (around.gated not in ("", "silu"), f"the activation {around.gated}"),
        (around.gated and (around.bias or around.splits), "gates with more around them"),
        (around.bias and around.splits, "a bias of several results"),
        (any(s % 64 for s in sizes[:-1]) or any(s % 8 for s in sizes), "results of odd sizes"),
        (shape.columns % 8 != 0, "columns are no multiple of 8"),
    ]
    return first_wrong(wrong)


def plans(shape: QuantisedShape, around: Around, target: Target) -> list[PackedPlan]:
    """Plans to consider, the most promising first."""
    made = [
        plan
        for consumers in ((1, 1), (1, 2), (2, 1), (2, 2))
        for split in (1, 2, 3, 4)
        for plan in _plan(shape, around, target, consumers, split)
    ]
    return sorted(made, key=lambda plan: expected(shape, around, plan, target))


def _plan(
    shape: QuantisedShape,
    around: Around,
    target: Target,
    consumers: tuple[int, int],
    split: int,
) -> Iterator[PackedPlan]:
    """The Plan with consumers (down, of the same rows), each program with a part of k."""
    (halves, ways), products = consumers, 2 if around.gated else 1
    tokens, results = high(shape.tokens), around.results(shape)
    most = min(MOST_TOKENS, MOST_WIDE[halves * ways][products - 1])
    across = ceil_divide(tokens, most)
    wide = round_up(ceil_divide(tokens, across), 8 * split)
    tiles = sum(ceil_divide(s, 64 * halves) for s in results) * across
    if any(s % (64 * halves) for s in results[:-1]):
        return
    if split > 1 and tiles > CLUSTERS[split]:
        return
    if ways > 1 and tokens > 64 and units_of(shape.layout) > 1:
        return  # the sum of their parts costs more than they save, 5 to 25% as measured
    each = wide // split
    staged = each if split > 1 or each <= 64 else next(s for s in (64, 32, 16, 8) if each % s == 0)
    programs = tiles * split if split > 1 else min(target.cores, tiles)
    plan = PackedPlan(
        (64 * halves * products, wide, DEPTH),
        MOST_STAGES,
        programs,
        1,
        staged,
        split=split,
        early=programs <= target.cores,
        ways=ways,
    )
    shares = 64 * halves * products * wide * (ways - 1) * 4
    if ways > 1:  # two barriers of each half follow, and then a swizzled place
        shares = round_up(shares + 2 * 8 * halves, SWIZZLED_BYTES)
    others, step = shares + SPARE_BYTES, step_bytes(shape, plan)
    stages = most_stages(operands_of(shape, around), plan, target, others, step)
    if stages >= 2:
        yield replace(plan, stages=stages)


def expected(shape: QuantisedShape, around: Around, plan: PackedPlan, target: Target) -> float:
    """Seconds that are expected: memory, what comes into a core, instructions, products."""
    (rows, wide, depth), split = plan.tile, plan.split
    products, tokens = 2 if around.gated else 1, high(shape.tokens)
    results = around.results(shape)
    tiles = sum(ceil_divide(s * products, rows) for s in results) * ceil_divide(tokens, wide)
    rounds = ceil_divide(tiles * split, min(plan.programs, target.cores))  # tiles of a core
    steps = rounds * -(-shape.columns // depth // split)
    moved = bytes_of(shape) + tokens * (shape.columns + sum(results)) * shape.dtype.size
    busy = min(tiles * split / rounds, target.cores)
    memory = moved / (FEW_SHARE * target.peak_bytes()) * (target.cores / busy) ** FEW_IDLE
    through = tiles * split * steps / rounds * step_bytes(shape, plan) / CACHE_RATE
    longer = CONSUMERS.get(rows // (2 if around.gated else 1) // 64 * plan.ways, 1.0)
    longer *= SHORT if plan.stages < 3 else 1.0
    rate = RATE * target.peak_flops(bfloat16) / target.cores
    # one after the other: a product that reads registers keeps its threads from working
    work = steps * rows * depth * (UNPACK_SECONDS * longer + 2 * max(wide, LEAST_COLUMNS) / rate)
    weights = step_bytes(shape, plan) - wide * depth * shape.dtype.size
    ahead = moved / (plan.programs * plan.stages * weights) * FEW_MEMORY_SECONDS
    seconds = sum(t**NORM for t in (memory, through, ahead, work)) ** (1 / NORM)
    seconds += START_SECONDS + rounds * wide * FEW_TOKEN
    return seconds + (split - 1) * SPLIT_SECONDS


# ---- the kernel ---------------------------------------------------------------------------------


class PackedMatmul(WideMatmul):
    """The kernel: x (tokens, columns), the parts, what is around, results (tokens, rows)."""

    plan: PackedPlan

    def __init__(self, shape: QuantisedShape, plan: PackedPlan, name: str, around: Around) -> None:
        self.shape, self.around = shape, around
        b = BodyBuilder(name, parameters(shape, parts(shape), around))
        memory = tile.memories(b)
        self.results = [memory[name] for name in around.names(shape)]
        self.bias, self.residual = memory.get("bias"), memory.get("residual")
        self.scales = memory["scales"]
        self.ways, x = plan.ways, operands_of(shape, around)
        turns = DEPTH // PART // plan.ways * x.products
        fits = plan.tile[2] == DEPTH and plan.cluster == 1 and plan.ways <= 2
        if not fits or turns % 2:  # words are written in turn, two by two
            raise InternalError("kernels.quantised", f"{plan} does not fit {shape}")
        self.notes = {"level": "placed"}
        first = [memory[name].node for name in ("codes", "x", "out0")]
        super().__init__(x, plan, b, first)
        self.registers = REGISTERS.get(self.consumers, self.registers)
        self.epilogue = self.surrounded

    # ---- the ring -----------------------------------------------------------------------------

    def operands(self) -> tuple[Any, Any]:
        """Codes and scales of 64 rows each, tokens in parts."""
        stages, (rows, wide, _) = self.plan.stages, self.plan.tile
        lead = (stages, rows // 64, 64 // STRIP, DEPTH // GROUP)
        units, words = units_of(self.shape.layout), words_of(self.shape.layout)
        codes = tile.shared((*lead, units, STRIP * words), int32)
        self.scaled = tile.shared((*lead, STRIP), self.scales.dtype)
        if self.ways > 1:
            self.shares = tile.shared((self.halves, self.products, 64, wide), float32, "held")
            full = tile.barrier("shares_full", 1, self.halves)
            self.met = full, tile.barrier("shares_empty", 1, self.halves)
        return codes, tile.shared((stages, DEPTH // PART, wide, PART), self.x.dtype, "swizzle128")

    @property
    def stage_bytes(self) -> int:
        """Bytes that land in one stage."""
        return step_bytes(self.shape, self.plan)

    def fill_left(self, stage: Any, where: Any, step: Any, number: int = 0) -> None:
        """Codes and scales, 64 rows a copy: gates first, then what they gate."""
        group = (self.share * self.steps + step) * (DEPTH // GROUP)
        for number in range(self.products * self.halves):
            side, own = divmod(number, self.halves)
            strip, full = (where[1] + 64 * own + side * self.x.m) // STRIP, self.ring.full[stage]
            for memory, ring in ((self.a, self.left), (self.scales, self.scaled)):
                place = ring[stage, number]
                strips, groups, *_ = place.shape
                source = memory[strip : strip + strips, group : group + groups, ...]
                tile.copy_async(place, source, full)

    def fill_right(self, stage: Any, where: Any, step: Any, number: int = 0) -> None:
        """Tokens, a part at a time."""
        for part in range(DEPTH // PART):
            place, start = self.right[stage, part], self.along_k(step) + part * PART
            self.copy(place, box(self.weight, (where[2], start), place.shape), stage, False)

    # ---- products -----------------------------------------------------------------------------

    @tile.function
    def multiply(self, own: int, count: Any, totals: Sequence[Any]) -> None:
        """Part by part: taken apart while the product of the part before runs."""
        turn = tile.hold(count * self.turns, "turn")
        words = [tile.register((64, PART // 2), int32) for _ in range(2)]
        self.step(own, turn, totals, words, first=True)
        for step in tile.range(1, self.steps):
            self.step(own, turn + step, totals, words)
        tile.matrix_wait(0)
        tile.fence("async")
        self.release(turn + self.steps - 1)

    def step(
        self, own: int, turn: Any, totals: Sequence[Any], words: Sequence[Any], first: bool = False
    ) -> None:
        """The products of a step. The last one of the step before may still run at its beginning;
        a branch in between would make it wait, so the first step is written apart."""
        way, own = divmod(own, self.halves)
        mine, stage = range(way, DEPTH // PART, self.ways), self.ring.wait(turn)
        for turns, (part, number) in enumerate(itertools.product(mine, range(self.products))):
            place = number * self.halves + own
            found = values(self.left[stage, place], self.scaled[stage, place], part, self.shape)
            tile.matrix_wait(1)
            if turns == 1 and not first:
                tile.fence("async")
                self.release(turn - 1)
            tile.write(words[turns % 2], found)
            tile.matrix_fence()
            more = not first or part > way
            tile.matrix_async(totals[number], words[turns % 2], self.right[stage, part].T, more)
            tile.matrix_commit()

    # ---- results ------------------------------------------------------------------------------

    def surrounded(self, *given: Any) -> Any:
        """A piece of the results with what is around it."""
        *pieces, (_, row, column) = given
        bias, residual, size = None, None, pieces[0].shape[::-1]
        if self.bias is not None:
            bias = tile.load(self.bias, row, 64, mask=there((64,), 0, row, self.x.m))[:, None]
        if self.residual is not None:
            mask = and_masks(there(size, 0, column, self.x.n), there(size, 1, row, self.x.m))
            residual = tile.load(self.residual, (column, row), size, mask=mask).T
        return surrounded(pieces, bias, residual, quick=True)

    def write(self, own: int, count: Any, totals: Sequence[Any]) -> None:
        """The first consumer of some rows adds up the parts of all of them and brings them out."""
        if self.ways == 1:
            super().write(own, count, totals)
            return
        way, half = divmod(own, self.halves)
        full, empty = self.met
        if way:
            empty.wait(half, (count + 1) % 2)
            for number, total in enumerate(totals):
                tile.write(self.shares[half, number], tile.read(total))
            full.arrive(half)
            return
        full.wait(half, count % 2)
        for number, total in enumerate(totals):
            tile.write(total, tile.read(total) + tile.read(self.shares[half, number]))
        empty.arrive(half)
        super().write(half, count, totals)

    def write_sums(self, own: int, count: Any, where: Any, sums: Sequence[Any]) -> None:
        """To the result that has the tile's rows."""
        batch, row, column = where
        sizes, starts = self.around.results(self.shape), self.around.starts(self.shape)

        def write(number: int) -> None:
            self.c = self.results[number]
            most = sizes[number] - 1
            place = tile.hold(row - starts[number], "place", (0, most)) if number else row
            super(PackedMatmul, self).write_sums(own, count, (batch, place, column), sums)

        among(row, starts, write)


# ---- taking apart -------------------------------------------------------------------------------


def values(codes: Any, scales: Any, part: int, shape: QuantisedShape) -> Any:
    """The weights (64, PART) of a part of a step, two neighbours in a word: word j of a group has
    neighbours j of every 8 columns."""
    groups, units = PART // GROUP, units_of(shape.layout)
    words = tile.reshape(part_of(codes, part), (64, groups, units, 1, 4))
    words = tile.broadcast(words, (64, groups, units, 2, 4))
    later = tile.reshape(tile.arange(2, dtype=int32) * 8, (1, 1, 1, 2, 1))  # of every 16 columns
    words = words >> tile.broadcast(later, words.shape)
    words = tile.broadcast(words, (64, groups, 2, 2, 4))
    found = tile.reshape(part_of(scales, part), (64, groups, 1, 1, 1))
    made = numbers(words, 2, *scales_of(found, shape), shape)
    return tile.reshape(made, (64, PART // 2))


def numbers(words: Any, axis: int, scale: Any, minimum: Any, shape: QuantisedShape) -> Any:
    """The weights of words, whose numbers 0 and 1 along an axis are of 16 columns each: nibbles of
    the same bytes, or bytes of other ones."""
    dtype, sizes, base = shape.dtype, words.shape, BASE[shape.dtype]
    (wide,) = shape.layout.planes

    def each(made: Callable[[int], int]) -> Any:
        low, high = (tile.full((), made(start), int32) for start in (0, 4))
        if wide == 8:
            return low
        only = [2 if i == axis else 1 for i in range(len(sizes))]
        second = tile.broadcast(tile.reshape(tile.arange(2) == 1, only), sizes)
        return tile.where(second, high, low)

    digits = words & each(lambda start: twice((1 << wide) - 1 << start))
    digits = digits | twice(base) if base else digits
    middle = middle_of(shape) / 2 ** UNIT[dtype]
    power = each(lambda start: bits(2.0 ** (POWER[dtype] - start), dtype))
    less = each(lambda start: bits(-ABOVE[dtype] / 2**start - middle, dtype))
    exact = tile.pair_multiply_add(digits, power, less, dtype)
    above = tile.broadcast(minimum, sizes) if minimum is not None else pair(0.0, dtype)
    return tile.pair_multiply_add(exact, tile.broadcast(scale, sizes), above, dtype)


def middle_of(shape: QuantisedShape) -> int:
    """What is taken off codes, half of their range."""
    (wide,) = shape.layout.planes
    return 1 << wide - 1


def scales_of(found: Any, shape: QuantisedShape) -> tuple[Any, Any]:
    """Scales as pairs, and what codes less their middle are above (None for nothing)."""
    unit = float(2 ** UNIT[shape.dtype])
    scale, minimum = halves(found, shape.layout)
    if minimum is None:
        return pairs(scale * unit, shape.dtype), None
    minimum = tile.multiply_add(scale, float(middle_of(shape)), minimum)
    return pairs(scale * unit, shape.dtype), pairs(minimum, shape.dtype)


def part_of(place: Any, part: int) -> Any:
    """What a place (strips, groups[, units], words) has of a part: (64, words); threads hold all of
    it."""
    strips, *groups, words = place.shape
    groups, each, count = math.prod(groups), words // STRIP, DEPTH // PART
    found = tile.reshape(tile.read(place), (strips, groups, STRIP, each))
    found = tile.reshape(tile.transpose(found, (0, 2, 1, 3)), (64, count, groups // count * each))
    return found[:, part : part + 1, :]


def twice(bits: int) -> int:
    """16 bits in both halves of a word."""
    word = bits << 16 | bits
    return word - (1 << 32) if word >> 31 else word


def pair(value: float, dtype: Any) -> Any:
    """A number in both halves of a word."""
    return tile.full((), bits(value, dtype), int32)


def bits(value: float, dtype: Any) -> int:
    """The bits of a number, in both halves of a word."""
    return twice(int(dtype.numpy.type(value).view("uint16")))


def pairs(values: Any, dtype: Any) -> Any:
    """Numbers, each in both halves of a word."""
    return tile.repeat_bits(values.to(dtype))

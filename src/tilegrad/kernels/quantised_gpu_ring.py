"""Few tokens times quantised rows on a GPU, by programs that stay: weights through a ring.

A program a core walks over blocks of rows, round robin. One warp brings the codes and scales of a
block, some groups of 32 columns at a time, into a ring of shared memory by bulk copies; the others
round x to integers once (as `quantised_gpu_rows` does) and take each stage by byte products. A
warp has whole rows, so that sums over its lanes are a row's, and warps meet once, when x is
rounded: a stage is given back as soon as its words are in registers. Warps are one or two *crews*,
which take turns by blocks and have stages of their own, and helpers that only round.

The ring takes half of a core's shared memory at most, and registers suffice for two programs. So
the next launch begins while this one works: it has a ring of weights (13 MB over 132 cores, 3 us
of memory) here before its dependency is over, which is what the end of a launch costs. (To let it
begin later, as the ring runs dry, was slower: one slow core holds up all of the next launch.)

Bytes: those of the parts; x comes from L2, once a program. Lane instructions for a group of 32
weights of Q4_1: 12 to take nibbles apart, 16 byte products, 9 for scales and sums, 60 in all with
addresses and x for two rows of a warp. At 4.4 TB/s an H200 brings 0.95 such groups a clock and
core: 57 of 128 lanes. Shared memory gives 20 bytes of weights and 72 of x, shared by a warp's rows,
for a group, and takes 20: 73 of 128 bytes a clock. Without arithmetic the ring streams 4.43 TB/s,
with it 4.32 (weights of 328 MB, where `few_tokens` gets 4.43).

Measured on an H200, Q4_1, one token with what is around it, launch after launch (`few_tokens`
before; bytes at 4.4 TB/s): q+k+v 4.6 us (5.7; 3.6), o 3.2 (3.8; 2.4), gate+up 18.4 (18.9; 16.7),
down 10.3 (10.8; 8.3); all four of a layer after one another 35.5 (38.7; 31.0).

Invariant: the order of every sum depends on the shape and the Plan alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from ..core.dtype import float32
from ..ir.node import Node
from ..ir.symbol import Size, ceil_divide, combine, floor_divide, high, low, modulo, multiply
from ..tile import ops, placed
from ..tile.build import Body
from ..tile.placed import PlacedBuilder
from .quantised_gpu_layout import ROWS, bytes_of, groups_of, layout_of, parts
from .quantised_gpu_rows import RowsKernel, rounded_groups, why_not_around
from .quantised_shape import NOTHING, Around, QuantisedShape, padded

LANES = 32  # groups that a warp takes at once
BARRIER = 0  # at which the warps that multiply meet
PIECE = 16  # bytes that a bulk copy's rows are multiples of
BOX = 256  # elements of a bulk copy's rows at most


@dataclass(frozen=True)
class RingPlan:
    """Choices of `ring_tokens`."""

    rows: int = 16  # of a block, those of both sides where they are gated
    groups: int = 32  # of a stage
    stages: int = 8
    programs: int = 132
    warps: int = 8  # of a crew; one more warp brings weights
    crews: int = 1  # which take turns by blocks, each with stages of its own
    helpers: int = 0  # crews that round a share of x and multiply nothing
    together: int = 2  # tokens that are multiplied at once
    tokens: int = 4


def ring_tokens(
    shape: QuantisedShape, plan: RingPlan, name: str = "quantised_ring", around: Around = NOTHING
) -> Body:
    """The kernel: x (tokens, columns), the parts, out (tokens, rows); see Around."""
    return _Ring(shape, plan, name, around).build()


def stage_bytes(shape: QuantisedShape, plan: RingPlan) -> int:
    """Bytes of a stage."""
    all_ = padded(shape.rows, ROWS) * groups_of(shape)
    return bytes_of(shape) * plan.rows * plan.groups // all_


def shared_bytes(shape: QuantisedShape, plan: RingPlan) -> int:
    """Shared memory that a program needs, but for some barriers."""
    each = rounded_groups(shape, plan) * (72 + 4 * layout_of(shape).halves)
    return plan.stages * stage_bytes(shape, plan) + min(plan.tokens, high(shape.tokens)) * each


def share(shape: QuantisedShape, plan: RingPlan, own: int) -> tuple[int, int]:
    """First and number of the groups of x that a crew rounds: eight elements for every thread, as
    often as for other crews or once less."""
    each = 8 * plan.warps
    whole, more = divmod(rounded_groups(shape, plan) // each, plan.crews + plan.helpers)
    return each * (own * whole + min(own, more)), each * (whole + (own < more))


def blocks(shape: QuantisedShape, plan: RingPlan, around: Around = NOTHING) -> int:
    """Blocks of rows that programs share."""
    return padded(sum(around.results(shape)), ROWS) // (plan.rows // (2 if around.gated else 1))


def why_not(shape: QuantisedShape, plan: RingPlan, around: Around = NOTHING) -> str:
    """Why a Plan does not fit a product; '' where it does."""
    if high(shape.tokens) > plan.tokens:
        return f"more than {plan.tokens} tokens"
    if groups_of(shape) % plan.groups or plan.groups % LANES:
        return f"{groups_of(shape)} groups of a row, {plan.groups} of a stage"
    for name, sizes, dtype in parts(shape):
        total = math.prod(sizes[2:] if name == "codes" else sizes[1:])
        line = total * plan.groups // groups_of(shape)
        if total * dtype.size % PIECE or line * dtype.size % PIECE or line > BOX:
            return f"bulk copies do not take rows of {line} of {name}"
    each = plan.rows // (2 if around.gated else 1)
    if plan.stages % plan.crews:
        return f"{plan.stages} stages for {plan.crews} crews"
    if not share(shape, plan, plan.crews + plan.helpers - 1)[1]:
        return f"{rounded_groups(shape, plan)} groups of x for {plan.crews} crews"
    if each % plan.warps:
        return f"{each} rows of a stage for {plan.warps} warps"
    if any(s % each for s in (padded(sum(around.results(shape)), ROWS), *around.splits)):
        return f"results of {around.results(shape)} rows, {each} of a stage"
    return why_not_around(shape, around)


class _Ring(RowsKernel):
    """Builds the Body of `ring_tokens`."""

    builder = PlacedBuilder
    plan: RingPlan

    def build(self) -> Body:
        """Places, barriers, roles."""
        b, plan = self.b, self.plan
        self.wide = LANES
        b.do(placed.grid_launch_dependents)
        self.rings = [(name, self.ring(name, sizes, dtype))
                      for name, sizes, dtype in parts(self.shape)]  # fmt: skip
        self.full = b.barrier("full", 1, plan.stages)
        self.empty = b.barrier("empty", 1, plan.stages)
        self.program = b.program(0, plan.programs)
        self.allocate_inputs()
        for own in range(plan.crews):
            b.role(f"multiply{own}", plan.warps, 0, lambda own=own: self.consumer(own))
        for own in range(plan.crews, plan.crews + plan.helpers):
            b.role(f"round{own}", plan.warps, 0, lambda own=own: self.round_own(own))
        b.role("bring", 1, 0, self.producer)
        return b.finish((plan.programs,), level="placed", resident=2, early=True, hint="first")

    # ---- the ring -------------------------------------------------------------------------------

    def ring(self, name: str, sizes: tuple[int, ...], dtype: object) -> Node:
        """The stages' places of a part: (stages, sides, planes, rows, groups ...)."""
        planes, groups, *words = sizes[1:] if name == "codes" else (1, *sizes[1:])
        line = (self.plan.groups * groups // self.groups, *words)
        lead = (self.plan.stages, self.sides, planes)
        return self.b.allocate((*lead, self.each, *line), dtype, "shared")

    def slot(self, count: Size, turn: Size) -> tuple[Size, Size]:
        """(stage, lap) of a turn of a block of rows; `count` blocks came before. Each crew has
        stages of its own, so that it knows of every lap."""
        crews, stages = self.plan.crews, self.plan.stages // self.plan.crews
        at = combine(multiply(floor_divide(count, crews), self.turns), turn, 1)
        stage = combine(at % stages, multiply(modulo(count, crews), stages), 1)
        return self.held("stage", stage), at // stages

    def held(self, name: str, value: Size) -> Size:
        """A value computed here, once."""
        if isinstance(value, int):
            return value
        return self.b.atom(name, self.b.index(value), low(value), high(value))

    def for_blocks(self, body: Callable[[Size], None], own: int = 0, crews: int = 1) -> None:
        """body(blocks before) for every block of rows of the program, or of one of its crews; its
        row is `self.row`."""
        programs = self.plan.programs
        mine = ceil_divide(combine(self.rows // self.each, self.program, -1), programs)

        def one(number: Size, _: list[Node]) -> Sequence[Node]:
            count = combine(multiply(number, crews), own, 1)
            block = combine(multiply(count, programs), self.program, 1)
            self.row = self.held("row", multiply(block, self.each))
            body(count)
            return []

        self.b.loop("count", 0, ceil_divide(combine(mine, own, -1), crews), 1, one)

    def producer(self) -> None:
        """Bring weights: they are constants and wait for nothing but room."""
        b, bytes_ = self.b, stage_bytes(self.shape, self.plan)

        def block(count: Size) -> None:
            def turn(number: Size, _: list[Node]) -> Sequence[Node]:
                stage, lap = self.slot(count, number)
                b.wait(self.empty, stage, (lap + 1) % 2)
                b.expect(self.full, stage, bytes_)
                for name, place in self.rings:
                    self.bring(name, place, stage, multiply(number, self.plan.groups))
                return []

            b.loop("turn", 0, self.turns, 1, turn)

        self.for_blocks(block)

    def bring(self, name: str, place: Node, stage: Size, group: Size) -> None:
        """The rows of a part from a group on, of each side and plane."""
        b, memory = self.b, self.memory[name]
        _, _, planes, _, groups, *words = place.type.shape  # type: ignore[union-attr]
        at = floor_divide(group, self.plan.groups // groups)
        axes = (0, 2, 3) if name == "codes" else tuple(range(2 + len(words)))
        for side, plane in product(range(self.sides), range(planes)):
            row = combine(self.row, side * self.rows, 1)
            index = (row, *((plane,) if name == "codes" else ()), at, *[0] * len(words))
            b.copy_async(place, (stage, side, plane), memory, index, axes, self.full, stage)

    # ---- multiplying ----------------------------------------------------------------------------

    def round_own(self, own: int) -> None:
        """Round a share of x; then all who do meet, once."""
        b, plan = self.b, self.plan
        self.share = share(self.shape, plan, own)
        self.norm = self.load_norm()
        b.do(placed.grid_dependency_wait)
        self.round_share()
        threads = 32 * plan.warps * (plan.crews + plan.helpers)
        b.do(placed.named_sync, number=BARRIER, threads=threads)

    def consumer(self, own: int) -> None:
        """Round a share of x, then multiply block after block."""
        b, tokens = self.b, self.tokens
        self.round_own(own)
        self.divisors = [self.roots(token) for token in range(tokens)]

        def block(count: Size) -> None:
            self.bias = self.load_bias()
            self.residuals = [self.load_residual(token) for token in range(tokens)]
            zero = b.constant(0.0, float32, (self.each, LANES, 1))
            self.finish(b.loop("turn", 0, self.turns, 1, lambda turn, sums: self.take(
                count, turn, sums), [zero] * (tokens * self.sides)))  # fmt: skip

        self.for_blocks(block, own, self.plan.crews)

    def take(self, count: Size, turn: Size, sums: list[Node]) -> list[Node]:
        """Sums with those of a stage, which is given back once it is in registers."""
        b = self.b
        stage, lap = self.slot(count, turn)
        b.wait(self.full, stage, lap % 2)
        lines = range(0, self.plan.groups, LANES)
        loaded = [self.load_stage(stage, at) for at in lines]
        b.arrive(self.empty, stage)
        for at, own in zip(lines, loaded):
            group = combine(multiply(turn, self.plan.groups), at, 1)
            sums = self.multiply(self.held("group", group), own, sums)
        return sums

    def load_stage(self, stage: Size, group: int) -> list[Node]:
        """LANES groups of a stage, as `Groups.load` has them."""
        made = []
        for side, (_, place) in product(range(self.sides), self.rings):
            _, _, planes, rows, groups, *words = place.type.shape  # type: ignore[union-attr]
            each = self.plan.groups // groups  # groups that share a scale
            shape = (rows, LANES // each, *words)
            for plane in range(planes):
                index = (stage, side, plane, 0, group // each, *[0] * len(words))
                made.append(self.b.load(place, index, shape, tuple(range(3, 3 + len(shape)))))
        return made

    def met(self, sums: Sequence[Node]) -> list[Node]:
        """Sums as they are: a warp has whole rows."""
        return [self.b.add(ops.reshape(s, shape=(self.each, LANES))) for s in sums]


__all__ = ["RingPlan", "blocks", "ring_tokens", "shared_bytes", "stage_bytes", "why_not"]

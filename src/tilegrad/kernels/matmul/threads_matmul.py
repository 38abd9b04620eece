"""Matrix products whose copies and products the threads make themselves: a @ b of 16-bit floats.

`ThreadMatmul` is the placed kernel for machines whose matrix units belong to a warp: one role of
all warps, one tile a program or persistent programs. A ring of shared tiles is filled by copies of
16 bytes a thread; operands of the next 16 columns of k come to registers while those before are
multiplied, across the ends of stages and tiles too, so that the role meets once for each stage.
Results leave through a staged tile in rows of whole pieces. The hole `epilogue(acc, rows,
columns)` sees pieces of the accumulator and may read further parameters.

Costs of one (m, n) tile over k: reads (m + n) k elements through the ring, and of the ring again
as often as warps stand beside each other; m n k products. Whatever is outside of the matrices
reads as 0 and is not written, so any sizes do whose rows are a multiple of 16 bytes.

Plans are a small space, ranked by a model of their time. A step of k takes a multiprocessor the
longest of its products, of its shared memory (operands are read once for each warp beside another,
and written once) and a fixed time in which the warps meet; bytes through the L2 cache and from
memory bound the whole. What starts and ends a tile is hidden where two programs share a
multiprocessor, and half of it where programs are persistent. The constants stand for an A100 and
for an H200 that is held to a warp's matrix units.

Invariant: the order of a sum over k is that of k, whatever the Plan; every Plan in the space is one
that can be built for these operands.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ... import tile
from ...core.dtype import bfloat16
from ...core.errors import InternalError
from ...core.target import Target
from ...ir.node import Node
from ...ir.symbol import ceil_divide, high, low
from ...tile.build import Body, BodyBuilder
from .shape import Choice, Epilogue, Operands, box, of_batch, side, swizzle_of, tile_at

DEPTH = 16  # of k in one product of the matrix units
Corner = tuple[Any, Any, Any]  # batch, row, column


@dataclass(frozen=True)
class ThreadPlan:
    """Choices of `ThreadMatmul`: the tile, warps, the ring, and how tiles are ordered."""

    tile: tuple[int, int, int] = (128, 256, 64)
    warps: tuple[int, int] = (2, 4)  # down and across the tile
    stages: int = 4
    group: int = 8  # rows of tiles that are taken together
    staged: tuple[int, int] = (128, 64)  # of a piece of the result on its way out
    programs: int = 0  # that take the tiles; 0 for one each


class ThreadMatmul:
    """Builds one Body."""

    own = piece = 0  # as the wide matmul says to its epilogues

    def __init__(
        self,
        x: Operands,
        plan: ThreadPlan,
        b: BodyBuilder,
        memories: Sequence[Node],
        epilogue: Epilogue,
    ) -> None:
        self.x, self.plan, self.b = x, plan, b
        self.epilogue = tile.outside(epilogue)
        self.a, self.weight, self.c = map(tile.memory, memories)
        tm, tn, tk = plan.tile
        self.threads = 32 * plan.warps[0] * plan.warps[1]
        self.steps = ceil_divide(x.k, tk)
        self.k_slices = tk // DEPTH  # of a stage, one product each
        if plan.programs and low(self.steps) < plan.stages - 1:
            raise InternalError(
                "kernels.thread_matmul",
                f"{self.steps} steps of k are fewer than "
                f"a ring of {plan.stages} stages holds ahead",
            )
        self.counts = ceil_divide(x.m, tm), ceil_divide(x.n, tn)
        self.tiles = x.batch * self.counts[0] * self.counts[1]

    def build(self) -> Body:
        """Places and the role."""
        plan, x, (tm, tn, tk) = self.plan, self.x, self.plan.tile
        programs = plan.programs or self.tiles
        with tile.into(self.b):
            self.left, self.right = (
                tile.shared((plan.stages, *shape), x.dtype, swizzle_of(shape[1], x.dtype))
                for shape in (side(tm, tk, x.a_along_k), side(tn, tk, x.b_along_k))
            )
            layout = swizzle_of(plan.staged[1], x.result)
            self.staged = tile.shared((2, *plan.staged), x.result, layout)
            program = tile.grid(programs)
            with tile.role("threads", self.threads // 32):
                self.work(program)
        return self.b.finish((programs,), plan=plan)

    def corner(self, number: Any) -> Corner:
        """(batch, row, column) where a tile begins; within the matrices, which is said where their
        sizes are no Symbols."""
        tm, tn, _ = self.plan.tile
        counts, sizes = (self.x.batch, *self.counts), (1, tm, tn)
        at = tile_at(number, self.x, self.counts, self.plan.group)
        found = []
        for name, place, count, each in zip(("batch", "row", "column"), at, counts, sizes):
            place = place * each
            if isinstance(count, int) and not isinstance(place, int):
                place = tile.minimum(place, (count - 1) * each)
            found.append(tile.hold(place, name))
        return tuple(found)

    # ---- the role ---------------------------------------------------------------------------

    @tile.function
    def work(self, program: Any) -> None:
        """Fill the ring, then tile by tile multiply from it and write."""
        plan, x, (tm, tn, tk) = self.plan, self.x, self.plan.tile
        where = self.corner(program)
        for step in range(plan.stages - 1):
            self.copy(where, step * tk, step, range(self.k_slices))
            tile.commit_threads()
        total = tile.register((tm, tn))
        self.operands = [
            (tile.register((tm, DEPTH), x.dtype), tile.register((tn, DEPTH), x.dtype))
            for _ in range(2)  # of which one is filled while the other is multiplied
        ]
        self.meet(plan.stages - 2)
        self.load(0, 0)
        if plan.programs:
            mine = tile.ceil_divide(self.tiles - program, plan.programs)
            for count in tile.range(mine):
                self.one_tile(total, count, program + count * plan.programs)
        else:
            self.one_tile(total, 0, program, where)
        tile.wait_threads(0)

    @tile.function
    def one_tile(self, total: Any, count: Any, number: Any, where: Corner | None = None) -> None:
        """One tile; copies past its end are those of the next one."""
        plan, following = self.plan, None
        if where is None:
            where = self.corner(number)
            last, after = self.tiles - 1, number + plan.programs
            more = after <= last
            following = (more, self.corner(tile.minimum(after, last)))
        tile.write(total, tile.zeros(total.shape))
        before = tile.hold(count * self.steps, "turn")
        for step in tile.range(self.steps):
            turn = before + step
            source = self.source(step + plan.stages - 1, where, following)
            for k_slice in range(self.k_slices):
                last_one = k_slice == self.k_slices - 1
                if last_one:
                    self.meet(plan.stages - 2)
                self.load((turn + int(last_one)) % plan.stages, k_slice + 1)
                if not last_one:
                    self.copy(*source, (turn + plan.stages - 1) % plan.stages, [k_slice])
                if k_slice == self.k_slices - 2:
                    tile.commit_threads()
                self.multiply(total, k_slice)
        self.write(total, where)

    def source(self, ahead: Any, own: Corner, following: Any) -> tuple[Corner, Any]:
        """Where a step to come reads, and where along k: in this tile, or past its end in the next
        one."""
        tk = self.plan.tile[2]
        k = ahead * tk
        if following is None:
            return own, k
        more, corner = following
        here, end = ahead < self.steps, self.steps * tk
        beyond = tile.where(more, k - end, end)

        def choose(name: str, one: Any, other: Any, most: int) -> Any:
            return tile.hold(tile.where(here, one, other), name, (0, most))

        found = [
            one
            if isinstance(one, int)
            else choose("from", one, other, max(map(tile.most, (one, other))))
            for one, other in zip(own, corner)
        ]
        return tuple(found), choose("k", k, beyond, tile.most(end))  # type: ignore[return-value]

    def meet(self, pending: int) -> None:
        """Copies but those of the last groups are there, for all threads."""
        tile.wait_threads(pending)
        tile.named_sync(0, self.threads)

    def load(self, stage: Any, k_slice: int) -> None:
        """Registers for a slice of k of a stage."""
        left, right = self.operands[k_slice % 2]
        start, (a, b) = k_slice % self.k_slices * DEPTH, (self.left[stage], self.right[stage])
        tile.load_operand(left, a if self.x.a_along_k else a.T, start)
        tile.load_operand(right, b if self.x.b_along_k else b.T, start)

    def multiply(self, total: Any, k_slice: int) -> None:
        """The product of a slice of k."""
        tile.matrix_sync(total, *self.operands[k_slice % 2], self.plan.warps)

    def copy(self, where: Corner, k: Any, stage: Any, k_slices: Sequence[int]) -> None:
        """What is copied beside the products of some slices; past the end of k that is zeros."""
        batch, row, column = where
        sides = (
            (self.left, self.a, side(row, k, self.x.a_along_k)),
            (self.right, self.weight, side(column, k, self.x.b_along_k)),
        )
        parts = [(*one, rows) for one in sides for rows in self.shares(one[0])]
        sharing = max(1, self.k_slices - 1)
        for number, (place, memory, at, (first, rows)) in enumerate(parts):
            if number * sharing // len(parts) in k_slices:
                begin = (at[0] + first, at[1])
                source = box(of_batch(memory, batch), begin, (rows, place.shape[2]))
                tile.copy_threads(place[stage][first : first + rows, :], source)

    def shares(self, place: Any) -> list[tuple[int, int]]:
        """Rows (first, count) of a place that one round of all threads copies."""
        _, rows, columns = place.shape
        round_ = max(8, self.threads * 16 // (columns * self.x.dtype.size))
        return [(first, min(round_, rows)) for first in range(0, rows, round_)]

    # ---- the result -------------------------------------------------------------------------

    def write(self, total: Any, where: Corner) -> None:
        """Piece by piece: epilogue, cast, stage (two places in turn), store."""
        (tm, tn, _), (down, wide) = self.plan.tile, self.plan.staged
        batch, row, column = where
        sums, out = tile.read(total), of_batch(self.c, batch)
        corners = [(r, c) for r in range(0, tm, down) for c in range(0, tn, wide)]
        for number, (r, c) in enumerate(corners):
            piece = sums[r : r + down, c : c + wide]
            at, place = (row + r, column + c), self.staged[number % 2]
            tile.write(place, tile.cast(self.epilogue(piece, (batch, *at)), self.x.result))
            tile.named_sync(0, self.threads)
            tile.store_threads(box(out, at, (down, wide)), place)


# ---- Plans ---------------------------------------------------------------------------------------

SPARE_BYTES = 1024  # of shared memory of a program: alignment
OWN_BYTES = 1024  # of shared memory that the machine takes for each program
SUSTAINED = 0.92  # of a warp's matrix units, at the clock that power allows
WARP_SHARE = 0.62  # of the peak of a machine with wider matrix units, by those of a warp
CACHE_SHARE = 2.0  # bytes a second that are only read from the L2 cache, of those copied through it
SHARED_SHARE = 0.9  # of the bytes a clock of shared memory
STEP_SECONDS = 4e-8  # of a step in which warps meet, per program on a multiprocessor
TILE_SECONDS = 2.5e-6  # from a program's start to its first product, and after its last one
START_SECONDS = 3e-6
GROUP_ROWS = 2048  # taken together: what they read again should still be in the L2 cache
TILES = (  # tile of m and n, warps down and across
    (128, 256, 2, 4),
    (256, 128, 4, 2),
    (128, 128, 2, 2),
    (64, 256, 1, 4),
    (256, 64, 4, 1),
    (64, 128, 2, 2),
    (64, 64, 2, 2),
    (32, 128, 1, 4),
    (32, 64, 1, 4),
    (16, 128, 1, 4),
    (16, 64, 1, 4),
)


def applies(x: Operands) -> bool:
    """Whether rows of both operands and of the result end with a piece of 16 bytes."""
    each = 16 // x.dtype.size
    dense = (x.k if x.a_along_k else x.m, x.k if x.b_along_k else x.n)
    whole = all(size % each == 0 for size in dense)
    return whole and not x.turned and x.n * x.result.size % 16 == 0


def ranked_threads(x: Operands, target: Target) -> list[Choice[ThreadPlan]]:
    """All Plans of the space, the most promising first; operands are never turned."""
    plans = dict.fromkeys(space(x, target))
    found = [Choice(plan, False, expected(x, plan, target)) for plan in plans]
    return sorted(found, key=lambda c: c.seconds)


def space(x: Operands, target: Target) -> Iterator[ThreadPlan]:
    """Plans to consider."""
    if not applies(x):
        return
    most = target.memories["shared"].bytes
    for tm, tn, down, across in TILES:
        small = tm * tn <= 128 * 128
        if (tm > 16 and tm >= 2 * high(x.m)) or (tn > 64 and tn >= 2 * high(x.n)):
            continue
        for tk in (32, 64, 128) if tm <= 32 else (32, 64):
            for resident in (1, 2) if small else (1,):
                room = (most + OWN_BYTES) // resident - OWN_BYTES - SPARE_BYTES
                plan = fitted(x, (tm, tn, tk), (down, across), room, 8192 // resident)
                plan = plan or fitted(x, (tm, tn, tk), (down, across), room, 4096)
                if plan is None:
                    continue
                yield plan
                m, n, _, batch = x.most
                tiles = batch * ceil_divide(m, tm) * ceil_divide(n, tn)
                long = ceil_divide(low(x.k), tk) >= plan.stages - 1
                if not small and long and tiles > target.cores:
                    yield replace(plan, programs=target.cores)


def fitted(
    x: Operands, tile: tuple[int, int, int], warps: tuple[int, int], room: int, staged: int
) -> ThreadPlan | None:
    """The Plan of a tile with as many stages as there is room for beside pieces of the result."""
    tm, tn, tk = tile
    wide = max(16 * warps[1], 64 * 2 // x.result.size)
    down = tm if tm * wide <= staged else max(16 * warps[0], staged // wide)
    if tn % wide or tm % down:
        return None
    left = room - 2 * down * wide * x.result.size
    stages = min(8 if tm > 32 else 12, left // ((tm + tn) * tk * x.dtype.size))
    if stages < 3:
        return None
    return ThreadPlan(tile, warps, stages, max(4, GROUP_ROWS // tm), (down, wide))


def shared_bytes(x: Operands, plan: ThreadPlan) -> int:
    """Bytes of shared memory that a program takes."""
    tm, tn, tk = plan.tile
    staged = 2 * math.prod(plan.staged) * x.result.size
    return plan.stages * (tm + tn) * tk * x.dtype.size + staged + SPARE_BYTES + OWN_BYTES


def residents(x: Operands, plan: ThreadPlan, target: Target) -> int:
    """Programs that a multiprocessor holds at a time."""
    threads = 32 * plan.warps[0] * plan.warps[1]
    registers = plan.tile[0] * plan.tile[1] // threads + 100
    file = target.limits.get("registers_per_core", 65536) // (threads * registers)
    shared = (target.memories["shared"].bytes + OWN_BYTES) // shared_bytes(x, plan)
    return max(1, min(shared, file))


def matrix_rate(target: Target) -> float:
    """FLOP/s of a warp's matrix units of one multiprocessor."""
    share = WARP_SHARE if target.asynchronous_units else 1.0  # else the peak is their own
    return SUSTAINED * share * target.peak_flops(bfloat16) / target.cores


def expected(x: Operands, plan: ThreadPlan, target: Target) -> float:
    """Seconds the model expects."""
    m, n, k, batch = x.most
    (tm, tn, tk), (down, across), size = plan.tile, plan.warps, x.dtype.size
    tiles, steps = batch * ceil_divide(m, tm) * ceil_divide(n, tn), ceil_divide(k, tk)
    together = residents(x, plan, target)
    product = 2 * tm * tn * tk / matrix_rate(target)
    moved = (tm * across + tn * down + tm + tn) * tk * size
    shared = moved / (SHARED_SHARE * (target.memories["shared"].bytes_per_second or 1e12))
    step = max(product, shared) + STEP_SECONDS / together
    ends = TILE_SECONDS / (2 * together if plan.programs else together)
    whole, rest = divmod(tiles, target.cores * together)
    seconds = (whole * together + ceil_divide(rest, target.cores)) * (steps * step + ends)
    through = tiles * steps * (tm + tn) * tk * size
    cache = through / (CACHE_SHARE * (target.memories["l2"].bytes_per_second or 5e12))
    memory = batch * (m * k + n * k) * size + batch * m * n * x.result.size
    return max(seconds, cache, memory / target.peak_bytes()) + START_SECONDS

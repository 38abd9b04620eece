"""Matrix products on matrix units that run beside the threads: a @ b of 16-bit floats.

`WideMatmul` is the placed kernel for large m: persistent programs, one producer that fills a
ring of shared tiles by copies, and consumers of 64 rows each that multiply from the ring; results
leave through a staged tile while the next product begins (`ring`). The hole
`epilogue(acc, rows, columns)` sees pieces of the accumulator and may read further parameters.

Why so: a product of one tile over k reads (m + n) k elements and makes m n k products, so tiles are
as large as the accumulators that registers hold; one warp issues copies of whole tiles, so that
the others only multiply; programs stay, so that the ring is full when the next tile begins, and
neighbouring programs (a cluster) read for each other what they share. What is outside of the
matrices reads as 0 and is not written, so any sizes do whose rows are a multiple of 16 bytes.
Invariant: the order of a sum over k depends on the Plan alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ... import tile
from ...core.errors import InternalError
from ...ir.node import Node
from ...ir.symbol import ceil_divide
from ...tile.build import Body, BodyBuilder
from .ring import Moving
from .shape import (
    Ask,
    Epilogue,
    Operands,
    Prologue,
    WidePlan,
    in_ring,
    side,
    staged_rooms,
    swizzle_of,
    tile_at,
    tile_counts,
    why_not,
)

SMALL = 96  # columns of sums that take few registers


def accumulators(kernel: Moving, joined: bool) -> list[Any]:
    """Places for the sums of a consumer's products: one for each, or for all side by side."""
    many, wide = (1, kernel.products) if joined else (kernel.products, 1)
    return [tile.register((64, wide * kernel.span[1]), kernel.x.sums) for _ in range(many)]


class WideMatmul(Moving):
    """Writes one Body."""

    joined = False  # products side by side in one accumulator
    apart = 0  # products whose tiles of b have places of their own
    ways = 1  # consumers of the same 64 rows
    notes: Mapping[str, Any] = MappingProxyType({})  # further ones of the Body

    def __init__(
        self,
        x: Operands,
        plan: WidePlan,
        b: BodyBuilder,
        memories: Sequence[Node],
        epilogue: Epilogue | None = None,
        costly: bool = False,
        residuals: Sequence[Node] = (),
        prologue: Prologue | None = None,
        ask: Ask | None = None,
    ) -> None:
        self.x, self.plan, self.b = x, plan, b
        self.products = x.products  # whose sums an epilogue takes
        self.epilogue: Any = epilogue and tile.outside(epilogue)
        self.prologue = prologue and tile.outside(prologue)
        self.ask = ask and tile.outside(ask)
        self.costly = costly and not x.gated  # the epilogue needs many registers
        self.a, self.weight, self.c = map(tile.memory, memories)
        self.residuals = list(map(tile.memory, residuals))  # like the result: they come by the ring
        self.check()
        self.span = x.span(plan.tile)
        self.halves = self.span[0] // 64
        self.consumers = self.halves * self.ways
        # of a thread of the producer, of a consumer; 0 for as many as all have: small sums leave
        # some to the launches before and behind, which then are on a core together
        shared_out = {2: (40, 232), 3: (32, 160)} if self.products * self.span[1] > SMALL else {}
        self.registers = shared_out.get(self.consumers, (0, 0))
        self.steps = ceil_divide(ceil_divide(x.k, plan.tile[2]), plan.split)  # of one program
        self.counts = tile_counts(x, plan)
        self.turns = self.steps + self.plan_residuals()  # of the ring, a tile

    def check(self) -> None:
        """Refuse a Plan that no Body can be right for."""
        why = why_not(self.x, self.plan) or self.why_not_here()
        if not all(in_ring(self.x, self.plan, r.dtype) for r in self.residuals):
            why = "no ring for what the epilogue reads"
        if why:
            raise InternalError("kernels.matmul.wide", f"{why}: {self.plan} for {self.x}")

    def why_not_here(self) -> str:
        """Why a kernel of its own kind cannot be right; '' where it can."""
        return ""

    def build(self) -> Body:
        """Places, then the roles beside each other."""
        plan = self.plan
        together = plan.cluster * plan.split
        with tile.into(self.b):
            self.place()
            program = tile.grid(plan.programs)
            rank = tile.cluster(together) if together > 1 else 0
            self.near, self.share = rank % plan.cluster, rank // plan.cluster  # tile, part of k
            self.first = self.share * plan.cluster  # the rank of the first who shares what is read
            self.program, self.clusters = program // together, plan.programs // together
            tiles = self.x.batch * self.counts[0] * self.counts[1]
            self.tiles, self.mine = tiles, tile.ceil_divide(tiles - self.program, self.clusters)
            few, registers = self.registers
            with tile.role("producer", 4, few):
                self.producer()
            for own in range(self.consumers):
                with tile.role(f"consumer{own}", 4, registers):
                    self.consumer(own)
        notes = {"cluster": (together,)} if together > 1 else {}
        return self.b.finish((plan.programs,), plan=plan, **notes, **self.notes)

    def place(self) -> None:
        """The ring, the pieces on their way out, and the barriers."""
        x, plan = self.x, self.plan
        self.left, self.right = self.operands()
        piece = side(64, plan.staged, not x.turned)
        self.rooms = staged_rooms(x, plan)
        layout = swizzle_of(piece[1], x.result)
        self.staged = tile.shared((self.halves, self.rooms, *piece), x.result, layout)
        full = tile.barrier("full", 1, plan.stages)
        if plan.split > 1:
            self.place_parts()
        empty = tile.barrier("empty", self.consumers * plan.cluster, plan.stages)
        self.ring = tile.Pipeline(full, empty)

    def operands(self) -> tuple[Any, Any]:
        """The stages' places of a and of b."""
        x, stages, (tm, tn, tk) = self.x, self.plan.stages, self.plan.tile
        half, whole = side(64, tk, x.a_along_k), side(tn // (self.apart or 1), tk, x.b_along_k)
        each = (self.apart, *whole) if self.apart else whole
        left = tile.shared((stages, tm // 64, *half), x.dtype, "swizzle128")
        return left, tile.shared((stages, *each), x.dtype, "swizzle128")

    def corner(self, number: Any) -> tuple[Any, Any, Any]:
        """(batch, row, column) where a tile begins."""
        (tm, tn), plan = self.span, self.plan
        batch, row, column = tile_at(number, self.x, self.counts, plan.group)
        if plan.across:
            column = column * plan.cluster + self.near
        else:
            row = row * plan.cluster + self.near
        found = ((batch, "batch"), (row * tm, "row"), (column * tn, "column"))
        return tuple(tile.hold(value, name) for value, name in found)

    def count(self) -> None:
        """How many tiles there are, where only the run knows it."""

    def begin_tile(self, where: Any) -> None:
        """What the producer finds out of a tile before its first copy."""

    # ---- the producer -----------------------------------------------------------------------

    @tile.function
    def producer(self) -> None:
        """Fill the ring, tile by tile; the first steps may have come before."""
        early = self.begin_early()
        self.count()
        for count in tile.range(self.mine):
            where = self.corner(self.program + count * self.clusters)
            self.begin_tile(where)
            turn = tile.hold(count * self.turns, "turn")
            for step in tile.range(tile.maximum(early - count * early, 0), self.steps):
                stage = self.ring.acquire(turn + step)
                self.ring.full.expect(stage, self.stage_bytes)
                self.fill_left(stage, where, step)
                self.fill_right(stage, where, step)
            self.fill_residuals(turn, where)

    # ---- the consumers ----------------------------------------------------------------------

    @tile.function
    def consumer(self, own: int) -> None:
        """Multiply 64 rows of every tile, and write them out."""
        plan = self.plan
        self.clear(own)
        tile.grid_dependency_wait()
        if plan.early:
            tile.grid_launch_dependents()
        self.count()
        self.begin(own)
        totals = accumulators(self, self.joined and not self.x.scaled)
        for count in tile.range(self.mine):
            self.multiply(own, count, totals)
            self.write(own, count, totals)
        if not plan.early:
            tile.grid_launch_dependents()
        tile.wait_copies(0)

    @tile.function
    def multiply(self, own: int, count: Any, totals: Sequence[Any]) -> None:
        """The products of a tile, step by step along k."""
        turn = tile.hold(count * self.turns, "turn")
        for step in tile.range(self.steps):
            stage = self.ring.wait(turn + step)
            tile.matrix_fence()
            for number, total in enumerate(totals):
                left, right = self.at(number, own, stage)
                left = left if self.x.a_along_k else left.T
                right = right.T if self.x.b_along_k else right
                tile.matrix_async(total, left, right, step > 0)
            tile.matrix_commit()
            tile.matrix_wait(1)
            if step > 0:
                self.release(turn + step - 1)
        tile.matrix_wait(0)
        self.release(turn + self.steps - 1)

    def at(self, number: int, own: int, stage: Any) -> tuple[Any, ...]:
        """Where in the ring the operands of a product lie."""
        if self.apart:
            return self.left[stage, own], self.right[stage, number]
        return self.left[stage, number * self.halves + own], self.right[stage]

    def release(self, turn: Any) -> None:
        """Give a stage back to every program that fills it."""
        near = range(self.plan.cluster)
        self.ring.release(turn, [self.first + n for n in near] if len(near) > 1 else (None,))

"""How tiles come to a wide matmul, and how its sums leave.

A stage of the ring takes a tile of a, 64 rows a copy, and a tile of b; programs of a cluster bring
each other what they share. The first steps of the first tile come early where an operand is
constant: before the launch before has ended. Matrices like the result that the epilogue reads at
the result's own places come through the ring too, as steps after the last of the product: so they
are there when the accumulator is, and no thread waits for them.

A consumer cuts its accumulator into pieces of columns, hands each to the epilogue, stages what it
gives in shared memory and copies it out, two places in turn. Programs that share a tile, each with
a part of k, send each other the columns they own first.

Invariant: the bytes that a stage expects are those of the copies into it, whoever makes them; a sum
begins with a program's own part of k and goes on with those before it, around.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from ... import tile
from ...core.dtype import bool_
from ...ir.symbol import ceil_divide, high, round_up
from .shape import Operands, WidePlan, box, of_batch, side, waves


def rows_of(kernel: Moving, half: int) -> int:
    """Rows of a that a copy of 64 brings: where one tile has all, no more than there are, in
    eights. A copy that reaches beyond the end takes 0.2 us longer; the other rows of its place
    stay 0 (residuals would fill them)."""
    x, plan, rows = kernel.x, kernel.plan, kernel.plan.tile[0]
    if x.turned or kernel.residuals or not x.a_along_k or plan.cluster > 1:
        return 64
    if not isinstance(x.m, int):
        return 64
    ends_here = rows - 64 < x.m < rows and half == rows // 64 - 1
    return round_up(x.m % 64, 8) if ends_here else 64


def held_as(value: Any, sums: Any) -> Any:
    """A value, held in registers as the accumulator is: `where` holds its operands alike, and here
    always takes the value."""
    rows, columns = value.shape
    held = tile.cast(sums[0:rows, 0:columns], value.dtype)
    return tile.where(tile.full(value.shape, False, bool_), held, value)


def read_sums(totals: Sequence[Any], products: int) -> list[Any]:
    """The sums of each product, of places of their own or side by side in one."""
    sums = [tile.read(total) for total in totals]
    if len(sums) == products:
        return sums
    (whole,), wide = sums, totals[0].shape[1] // products
    return [whole[:, i * wide : (i + 1) * wide] for i in range(products)]


class Moving:
    """The part of a WideMatmul that moves tiles; see there for what it is made of."""

    x: Operands
    plan: WidePlan
    own = 0  # the consumer that is being written
    piece = 0  # the column of its tile that the epilogue's piece begins at

    def __getattr__(self, name: str) -> Any:  # what WideMatmul sets
        raise AttributeError(name)

    @tile.function
    def begin_early(self) -> int:
        """Of the first tile, the first steps of the constant operand come before the launch before
        has ended; gives how many."""
        constant = (self.a if self.x.turned else self.weight).type.use == "constant"
        count = min(self.plan.stages, self.steps) if isinstance(self.steps, int) else 0
        if not constant or not count:
            tile.grid_dependency_wait()
            return 0
        some = self.program < self.tiles
        fills = (self.fill_left, self.fill_right)
        for constant, fill in ((True, fills[not self.x.turned]), (False, fills[self.x.turned])):
            if some:
                where = self.corner(self.program)
                for early in tile.range(count):
                    if constant:
                        self.ring.full.expect(early, self.stage_bytes)
                    fill(early, where, early)
            if constant:
                tile.grid_dependency_wait()
        return count

    @property
    def stage_bytes(self) -> int:
        """Bytes that land in one stage."""
        tm, tn, tk = self.plan.tile
        rows = sum(rows_of(self, half) for half in range(tm // 64))
        return (rows + tn) * tk * self.x.dtype.size

    def clear(self, own: int) -> None:
        """Rows of a consumer's places that no copy brings."""
        rows = rows_of(self, own)
        if rows == 64:
            return
        for stage in range(self.plan.stages):
            tile.clear_rows(self.left[stage, own], rows, 64)
        tile.fence("async")
        tile.named_sync(own, 128)

    def along_k(self, step: Any) -> Any:
        """Where along k a step of this program lies."""
        return (self.share * self.steps + step) * self.plan.tile[2]

    def fill_left(self, stage: Any, where: Any, step: Any, number: int = 0) -> None:
        """A tile of a, that of a weight by number, 64 rows a copy; shared along n, each program
        brings some for all."""
        plan, (batch, row, _) = self.plan, where
        shared = plan.across and plan.cluster > 1
        each = self.halves // plan.cluster if shared else self.halves
        for own in range(each):
            half = self.near * each + own if shared else own
            at = side(row + half * 64, self.along_k(step), self.x.a_along_k)
            place = self.left[stage, number * self.halves + half]
            if not shared and rows_of(self, half) < 64:
                place = place[0 : rows_of(self, half), :]
            self.copy(place, box(of_batch(self.a, batch), at, place.shape), stage, shared)

    def fill_right(self, stage: Any, where: Any, step: Any, number: int = 0) -> None:
        """A tile of b, that of a weight by number; shared along m, each program brings some of its
        rows for all."""
        plan, (batch, _, column) = self.plan, where
        shared = plan.cluster > 1 and not plan.across
        place, begin, rows = self.right_of(stage, number)
        rows = rows // plan.cluster if shared else rows
        first = self.near * rows if shared else 0
        row, column = side(column, self.along_k(step), self.x.b_along_k)
        source = box(of_batch(self.weight, batch), (row + first, column), (rows, place.shape[1]))
        self.copy(place[begin + first : begin + first + rows, :], source, stage, shared)

    def right_of(self, stage: Any, number: int) -> tuple[Any, int, int]:
        """Where a weight's tile of b lies in a stage: the place, its first row there, and rows.
        Along k, those of products that are joined lie one below another."""
        if self.apart:
            return self.right[stage, number], 0, self.right.shape[2]
        rows = self.span[1] if self.joined else self.right.shape[1]
        return self.right[stage], number * rows, rows

    def copy(self, place: Any, source: Any, stage: Any, shared: bool) -> None:
        """A copy into a stage, of this program or of all that share what is read."""
        full = self.ring.full[stage]
        if shared:
            tile.copy_multicast(place, source, full, (1 << self.plan.cluster) - 1, self.first)
        else:
            tile.copy_async(place, source, full)

    # ---- residuals --------------------------------------------------------------------------

    def plan_residuals(self) -> int:
        """How columns of what the epilogue reads share stages; gives the steps it takes."""
        tk, most = self.plan.tile[2], 1
        self.wide = tk if self.x.a_along_k else 64  # columns that come with a step
        self.chunks = ceil_divide(self.span[1], self.wide) if self.residuals else 0
        if self.x.b_along_k:
            most += self.plan.tile[1] // self.span[0]  # chunks that a stage holds
        self.fills = ceil_divide(self.chunks, most)
        self.per_fill = max(1, ceil_divide(self.chunks, max(1, self.fills)))
        return self.fills * len(self.residuals)

    def residual_turn(self, before: Any, fill: int, number: int) -> Any:
        """The turn of the ring that brings columns of a residual."""
        return before + self.steps + fill * len(self.residuals) + number

    def chunks_of(self, fill: int) -> range:
        """The chunks of columns that come with one of the stages that a residual takes."""
        return range(fill * self.per_fill, min(self.chunks, (fill + 1) * self.per_fill))

    def residual_place(self, stage: Any, chunk: int, own: int) -> tuple[Any, int]:
        """Where a consumer's rows of a chunk lie in a stage: the first chunk where a's tile does,
        others one below another where b's does; and the first row."""
        below = chunk % self.per_fill - 1
        if below < 0:
            return self.left[stage, own], 0
        return self.right[stage], 64 * (below * self.halves + own)

    def fill_residuals(self, turn: Any, where: Any) -> None:
        """Some columns of what the epilogue reads, those of each matrix in a stage.

        Programs of a cluster bring each other's rows in equal parts: who has all of his then knows
        that the stage is free everywhere, and may say that it is free again.
        """
        (batch, row, column), cluster = where, self.plan.cluster
        count = 64 // cluster
        first = self.near * count
        for fill, (number, memory) in itertools.product(
            range(self.fills), enumerate(self.residuals)
        ):
            chunks, source = self.chunks_of(fill), of_batch(memory, batch)
            stage = self.ring.acquire(self.residual_turn(turn, fill, number))
            full = self.ring.full[stage]
            bytes_ = len(chunks) * self.span[0] * self.wide * memory.dtype.size
            self.ring.full.expect(stage, bytes_)
            for chunk, own, near in itertools.product(chunks, range(self.halves), range(cluster)):
                at = (row + 64 * own + first, column + chunk * self.wide)
                place, begin = self.residual_place(stage, chunk, own)
                rows = place[begin + first : begin + first + count, :]
                part = box(source, self.of_neighbour(near, *at), (count, self.wide))
                if cluster == 1:
                    tile.copy_async(rows, part, full)
                else:
                    tile.copy_multicast(rows, part, full, 1 << near, self.first)

    def of_neighbour(self, near: int, row: Any, column: Any) -> tuple[Any, Any]:
        """A row and column of this program's tile, in that of another of the cluster."""
        away = near - self.near
        if self.plan.across:
            return row, column + away * self.span[1]
        return row + away * self.span[0], column

    # ---- before the first product -----------------------------------------------------------

    def begin(self, own: int) -> None:
        """What the epilogues of a consumer share, where all its tiles have the same tokens; and
        what they read, where the program has one tile."""
        plan = self.plan
        each = self.span[1] // plan.split
        if self.ask is not None and waves(self.x, plan) == 1:
            batch, row, column = self.corner(self.program)
            column = column + self.share * each
            for start in range(0, each, plan.staged):
                self.own, self.piece = own, start
                self.ask((64, plan.staged), (batch, row + 64 * own, column + start))
        if self.prologue is not None and self.x.turned:
            self.prologue(own, self.share * each if plan.split > 1 else 0, each)
        elif self.prologue is not None:
            one = high(self.counts[0]) == 1 and plan.cluster == 1
            first = 0 if one else self.corner(self.program)[1]
            self.prologue(own, first + 64 * own, 64)

    # ---- pieces -----------------------------------------------------------------------------

    def write(self, own: int, count: Any, totals: Sequence[Any]) -> None:
        """Bring a finished tile out."""
        where = self.corner(self.program + count * self.clusters)
        sums = read_sums(totals, self.products)
        if self.plan.split > 1:
            sums = self.gather(own, sums, self.span[1] // self.plan.split)
        self.write_sums(own, count, where, sums)

    def write_sums(self, own: int, count: Any, where: Any, sums: Sequence[Any]) -> None:
        """Epilogue and cast; then `together` pieces at a time: stage, copy out."""
        plan, (batch, row, column) = self.plan, where
        wide, tn = plan.staged, self.span[1] // plan.split
        row, column = row + 64 * own, column + self.share * tn
        pieces = tn // wide
        ahead = ceil_divide(pieces, 2) if self.costly else pieces
        ahead = self.wide // wide if self.residuals else ahead
        near: list[Any] = []  # of each residual, the chunks of a stage
        for first in range(0, pieces, ahead):
            ready = []  # computed before the next barrier: what it reads comes at once
            fill, chunk = divmod(first // ahead, self.per_fill)
            if chunk == 0:
                near = [
                    self.read_residual(own, count, fill, i, sums[0])
                    for i in range(len(self.residuals))
                ]
            for number in range(first, min(pieces, first + ahead)):
                room = (count * pieces + number) % self.rooms
                start = number * wide
                piece = [s[:, start : start + wide] for s in sums]
                start_near = start - first * wide
                piece += [chunks[chunk][:, start_near : start_near + wide] for chunks in near]
                at = (batch, row, column + start)
                self.own, self.piece = own, start
                value = tile.cast(self.epilogue(*piece, at), self.x.result)
                ready.append((value, at, self.staged[own, room]))
            for some in range(0, len(ready), plan.together):
                self.write_pieces(own, ready[some : some + plan.together])

    def write_pieces(self, own: int, pieces: Sequence[tuple[Any, Any, Any]]) -> None:
        """Pieces of a result on their way out: (value, where it begins, the staged place)."""
        tile.wait_copies(max(0, self.rooms // self.plan.together - 1))
        for value, _, place in pieces:
            tile.write(place, value.T if self.x.turned else value)
        tile.fence("async")
        tile.named_sync(own, 128)
        for _, where, place in pieces:
            self.leave(place, where)
        tile.commit_copies()

    def leave(self, place: Any, where: Any) -> None:
        """One piece out of a staged place."""
        batch, row, column = where
        at = side(row, column, not self.x.turned)
        tile.copy_store(box(of_batch(self.c, batch), at, place.shape), place)

    # ---- parts of k -------------------------------------------------------------------------

    def place_parts(self) -> None:
        """Where sums of the programs that share a tile arrive."""
        split = self.plan.split
        shape = (self.halves * self.products, split - 1, 64, self.span[1] // split)
        self.partial = tile.shared(shape, self.x.sums, "held")
        self.gathered = tile.barrier("gathered", 1, self.halves)

    def gather(self, own: int, sums: Sequence[Any], wide: int) -> list[Any]:
        """Every program that shares the tile gives each other one its columns."""
        split, first = self.plan.split, own * self.products
        others = [tile.hold((self.share + away) % split, "other") for away in range(1, split)]
        self.gathered.expect(own, self.products * (split - 1) * 64 * wide * self.x.sums.size)
        for number, (at, share) in itertools.product(range(self.products), enumerate(others)):
            columns = self.columns_of(sums[number], share, wide)
            rank = self.near + share * self.plan.cluster
            tile.send(self.partial[first + number, at], columns, self.gathered[own], to=rank)
        self.gathered.wait(own, 0)
        found = []
        for number in range(self.products):
            total = self.columns_of(sums[number], self.share, wide)
            for at in range(split - 1):
                total = total + tile.read(self.partial[first + number, at])
            found.append(total)
        return found

    def columns_of(self, sums: Any, share: Any, wide: int) -> Any:
        """The columns of an accumulator that a program owns: chosen, since registers have no
        index."""
        last = (self.plan.split - 1) * wide
        found = sums[:, last : last + wide]
        for before in reversed(range(self.plan.split - 1)):
            chosen = tile.broadcast(share < before + 1, found.shape)
            found = tile.where(chosen, sums[:, before * wide : before * wide + wide], found)
        return found

    # ---- residuals --------------------------------------------------------------------------

    def read_residual(self, own: int, count: Any, fill: int, number: int, sums: Any) -> list[Any]:
        """Columns of a matrix that the ring brought, in chunks; their stage is given back."""
        turn = self.residual_turn(count * self.turns, fill, number)
        stage, found = self.ring.wait(turn), []
        for chunk in self.chunks_of(fill):
            place, begin = self.residual_place(stage, chunk, own)
            found.append(tile.read(place[begin : begin + 64, :]))
        tile.fence("async")
        self.release(turn)
        if self.wide == self.plan.staged:
            return found
        return [held_as(value, sums) for value in found]

"""How the sums of a wide matmul leave: parts of k added up, the epilogue, and the way out.

A consumer cuts its accumulator into pieces of columns, hands each to the epilogue, stages what it
gives in shared memory and copies it out, two places in turn. Programs that share a tile, each with
a part of k, send each other the columns they own first. Matrices like the result that the epilogue
reads at the result's own places come through the ring too, as steps after the last of the product:
so they are there when the accumulator is, and no thread waits for them.
Invariant: a sum begins with a program's own part of k and goes on with those before it, around.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from ... import tile
from ...core.dtype import bool_, float32
from ...ir.symbol import high
from .ring import Bringing
from .shape import box, side, waves


def held_as(value: Any, sums: Any) -> Any:
    """A value, held in registers as the accumulator is: `where` holds its operands alike, and here
    always takes the value."""
    rows, columns = value.shape
    held = tile.cast(sums[0:rows, 0:columns], value.dtype)
    return tile.where(tile.full(value.shape, False, bool_), held, value)


class Leaving(Bringing):
    """The part of a WideMatmul that brings finished tiles out; see there for what it is made of."""

    own = 0  # the consumer that is being written
    piece = 0  # the column of its tile that the epilogue's piece begins at

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
        sums = [tile.read(total) for total in totals]
        if self.joined:
            (whole,), wide = sums, self.span[1]
            sums = [whole[:, i * wide : (i + 1) * wide] for i in range(self.products)]
        if self.plan.split > 1:
            sums = self.gather(own, sums, self.span[1] // self.plan.split)
        self.write_sums(own, count, where, sums)

    def write_sums(self, own: int, count: Any, where: Any, sums: Sequence[Any]) -> None:
        """Epilogue and cast; then `together` pieces at a time: stage, copy out."""
        plan, (batch, row, column) = self.plan, where
        wide, tn = plan.staged, self.span[1] // plan.split
        row, column = row + 64 * own, column + self.share * tn
        pieces = tn // wide
        ahead = -(-pieces // 2) if self.costly else pieces
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
        tile.copy_store(box(self.of_batch(self.c, batch), at, place.shape), place)

    # ---- parts of k -------------------------------------------------------------------------

    def place_parts(self) -> None:
        """Where sums of the programs that share a tile arrive."""
        split = self.plan.split
        shape = (self.halves * self.products, split - 1, 64, self.span[1] // split)
        self.partial = tile.shared(shape, float32, "held")
        self.gathered = tile.barrier("gathered", 1, self.halves)

    def gather(self, own: int, sums: Sequence[Any], wide: int) -> list[Any]:
        """Every program that shares the tile gives each other one its columns."""
        split, first = self.plan.split, own * self.products
        others = [tile.hold((self.share + away) % split, "other") for away in range(1, split)]
        self.gathered.expect(own, self.products * (split - 1) * 64 * wide * float32.size)
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
            chosen = tile.broadcast(tile.less(share, before + 1), found.shape)
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
        self.release(turn)
        if self.wide == self.plan.staged:
            return found
        return [held_as(value, sums) for value in found]

"""Which tiles of an attention a program takes, and which blocks of keys a tile sees.

A tile is a block of queries of one head; programs take tiles in turns, forth and back, longest
first where later queries see more. Sequences that lie one after another have places for tiles
that follow from their starts alone, so that a search finds the sequence of a place. Invariant:
every role walks the same tiles with the same steps, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...core.dtype import int64
from ...ir.node import Node
from ...ir.symbol import (
    Size,
    ceil_divide,
    floor_divide,
    high,
    low,
    maximum,
    minimum,
    modulo,
)
from ...ir.types import Memory
from ...tile.placed import PlacedBuilder
from . import parts
from .shape import AttentionShape

if TYPE_CHECKING:
    from .forward import AttentionPlan


@dataclass(frozen=True)
class Work:
    """One tile: whose queries, and which blocks of keys they see.

    Step j takes the block start + count - 1 - j. Steps before `right` and from `left` on are cut
    by a mask, the first one perhaps.
    """

    batch: Size
    head: Size
    first: Size  # query
    queries: Size  # there are
    limit: Size  # keys there are
    start: Size  # block of keys
    count: Size  # blocks, at least one
    right: Size
    left: Size
    query_start: Size = 0  # token of query 0
    key_start: Size = 0
    sequence: Size = 0  # of those that lie one after another


Step = Callable[[Size, bool], None]  # (number of the step, whether a mask cuts it)


class Walk:
    """The tiles of one kernel, and their steps."""

    def __init__(self, x: AttentionShape, plan: AttentionPlan, b: PlacedBuilder) -> None:
        self.x, self.plan, self.b = x, plan, b
        self.memory = {p.attrs["name"]: p for p in b.parameters}
        self.rows, self.keys = plan.tile
        self.program: Size = 0
        self.blocks = ceil_divide(x.queries, self.rows)
        self.lanes = x.batch * x.heads
        self.packed = "query_starts" in x.extras
        if self.packed:  # a sequence may begin within a tile
            starts = self.memory["query_starts"].type
            assert isinstance(starts, Memory)
            self.sequences = starts.shape[0] - 1
            self.blocks = floor_divide(x.queries, self.rows) + self.sequences
        self.tiles = self.lanes * self.blocks
        self.low, self.high = x.band
        self.ends = self.has_end()
        self.most_right = self.count_right()
        self.factor = self.score_factor()

    # ---- what masks cut ---------------------------------------------------------------------

    def has_end(self) -> bool:
        """Whether some query that matters could see keys past the last one."""
        x = self.x
        if {"key_lengths", "key_starts"} & set(x.extras):
            return True
        past = self.low is not None and high(x.queries + self.low - x.keys) > 0
        if isinstance(x.keys, int) and x.keys % self.keys == 0:
            return past
        within = self.high is not None and low(x.keys - (self.high + x.queries)) >= 0
        return not within

    def count_right(self) -> int:
        """The most blocks at a tile's right end that a mask cuts."""
        if self.high is None:
            return int(self.ends)
        if not isinstance(self.high, int):
            return -(-(self.rows - 1) // self.keys) + 1
        most = 1
        for tile in range(self.keys):
            last = tile * self.rows + self.rows + self.high
            plain = tile * self.rows + self.high + 1
            most = max(most, -(-last // self.keys) - plain // self.keys)
        return most

    def first_columns(self, own: int) -> int:
        """How many keys of the last block of a tile 64 of its queries see at most, if that is the
        same for all tiles; else all of the block's."""
        x, keys, rows = self.x, self.keys, self.rows
        if keys % 64 != 0 or self.low is not None or not isinstance(self.high, int):
            return keys
        if self.high < 0 or self.packed or {"bias", "mask", "key_lengths"} & set(x.extras):
            return keys
        if low(x.keys - (self.high + x.queries)) < 0:
            return keys
        found = set()
        for first in range(self.high, self.high + rows * keys, rows):
            last = -(-(first + rows) // keys)
            if last != first // keys + 1:  # its first queries end in another block
                return keys
            found.add(first + 64 * (own + 1) - (last - 1) * keys)
        only = found.pop()
        return only if not found and only % 64 == 0 else keys

    def skipped(self, work: Work, own: int) -> Size:
        """How many blocks at a tile's right end 64 of its queries do not see; one is left."""
        ends = [own + 1, self.rows // 64]
        if self.high is None or ends[0] == ends[1]:
            return 0
        if isinstance(self.high, int):
            firsts = range(self.high, self.high + self.rows * self.keys, self.rows)
            if not any(
                -(-(first + 64 * ends[0]) // self.keys) < -(-(first + 64 * ends[1]) // self.keys)
                for first in firsts
            ):
                return 0
        last = minimum(work.first + 64 * ends[0], work.queries)
        stop = maximum(minimum(work.limit, last + self.high), 0)
        end = work.start + work.count
        unseen = maximum(end - ceil_divide(stop, self.keys), 0)
        return self.held("skip", minimum(unseen, work.count - 1))

    @property
    def cut_first(self) -> bool:
        """Whether a mask may cut the first step."""
        return self.most_right > 0 or self.low is not None or "mask" in self.x.extras

    def score_factor(self) -> float:
        """What scores are multiplied by in the exponent of 2."""
        x = self.x
        if {"bias", "slopes"} & set(x.extras):
            return parts.LOG2_E
        return (x.softcap or x.scale) * parts.LOG2_E

    # ---- which tile, which stage ------------------------------------------------------------

    def for_tiles(self, body: Callable[[Size, Work, Size], None]) -> tuple[Size, Size]:
        """body(tiles before, tile, steps before modulo two laps) for every tile of this program.

        Programs take turns forth and back, so that each gets long tiles and short ones. Gives
        how many there were, and the steps.
        """
        b, programs, laps = self.b, self.plan.programs, 2 * self.plan.stages
        rounds, rest = floor_divide(self.tiles, programs), modulo(self.tiles, programs)
        last = self.in_round(rounds)
        mine = rounds + minimum(maximum(rest - last, 0), 1)

        begun = 2 * self.plan.query_stages

        def one(count: Size, carried: list[Node]) -> Sequence[Node]:
            turn = b.atom("turn", carried[0], 0, laps - 1)
            number = count * programs + self.in_round(count)
            work = self.locate(self.held("number", maximum(number, 0)))

            def tile(done: Size) -> Sequence[Node]:
                body(done, work, turn)
                return [b.index(modulo(turn + work.count, laps))]

            if not self.packed:
                return tile(count)
            done = b.atom("done", carried[1], 0, begun - 1)
            after = modulo(done + 1, begun)
            some = b.less(work.first, work.queries)
            return b.branch(some, lambda: [*tile(done), b.index(after)], lambda: carried)

        zeros = [b.constant(0, int64)] * (2 if self.packed else 1)
        found = b.loop("count", 0, mine, 1, one, zeros)
        return mine, b.atom("turn", found[0], 0, laps - 1)

    def in_round(self, round_: Size) -> Size:
        """This program's place in a round."""
        back = round_ % 2
        other = self.plan.programs - 1 - self.program * 2
        return self.program + back * other

    def held(self, name: str, value: Size) -> Size:
        """A value computed here, once."""
        if isinstance(value, int):
            return value
        return self.b.atom(name, self.b.index(value), low(value), high(value))

    def corner(self, number: Size) -> tuple[Size, Size]:
        """(number of the batch and head, block of queries) of a tile."""
        section = self.plan.section
        if section == 1:
            lane, block = floor_divide(number, self.blocks), modulo(number, self.blocks)
        elif isinstance(self.lanes, int) and section >= self.lanes:
            block, lane = floor_divide(number, self.lanes), modulo(number, self.lanes)
        else:
            each = section * self.blocks
            first = floor_divide(number, each) * section
            wide: Size = section
            if not isinstance(self.lanes, int) or self.lanes % section:
                wide = maximum(minimum(self.lanes - first, section), 1)
            within = modulo(number, each)
            block, lane = floor_divide(within, wide), first + modulo(within, wide)
        if self.high is not None:  # the last queries see most
            block = self.blocks - 1 - block
        return lane, block

    def locate(self, number: Size) -> Work:
        """A tile by its number."""
        x, held = self.x, self.held
        if self.packed:
            return self.locate_packed(number)
        lane, block = self.corner(number)
        lane = held("lane", lane)
        batch, head = held("batch", lane // x.heads), lane % x.heads
        first = held("first", maximum(block, 0) * self.rows)
        limit = x.keys
        if "key_lengths" in x.extras:
            length = self.b.cast(self.b.load(self.memory["key_lengths"], (batch,)), int64)
            limit = self.held(
                "limit", minimum(self.b.bounded("length", length, 0, high(x.keys)), x.keys)
            )
        return self.blocks_seen(batch, held("head", head), first, x.queries, limit)

    def locate_packed(self, number: Size) -> Work:
        """A tile of sequences that lie one after another: sequence i has the places from
        start // rows + i on, which are enough for its tiles; those left over are empty."""
        x, b, held = self.x, self.b, self.held
        place = held("place", floor_divide(number, self.lanes))
        head = held("head", modulo(number, self.lanes))
        many, start_of = high(self.sequences), self.start_of

        def halve(_: Size, carried: list[Node]) -> Sequence[Node]:
            least, most = (b.atom("side", c, 0, many - 1) for c in carried)
            middle = (least + most + 1) // 2
            first = floor_divide(start_of("query_starts", middle, x.queries), self.rows)
            here = b.less_equal(first + middle, place)
            below = b.index(middle - 1)
            return [
                b.apply("where", here, b.index(middle), carried[0]),
                b.apply("where", here, carried[1], below),
            ]

        ends = [b.constant(0, int64), b.index(self.sequences - 1)]
        found = b.loop("half", 0, (many - 1).bit_length(), 1, halve, ends)
        sequence = b.atom("sequence", found[0], 0, many - 1)
        query_start = start_of("query_starts", sequence, x.queries)
        queries = held(
            "queries",
            maximum(
                start_of("query_starts", sequence + 1, x.queries) - query_start,
                0,
            ),
        )
        key_start, limit = self.keys_of(sequence, queries)
        block = place - (floor_divide(query_start, self.rows) + sequence)
        if self.high is not None:  # the last queries see most
            last = ceil_divide(queries, self.rows) - 1
            block = last - block
        # a place left over lies before the first tile or past the last one: no query is there
        first = held("block", block) * self.rows
        outside = b.apply("where", b.less(first, 0), b.index(queries), b.index(first))
        first = b.atom("first", outside, 0, high(x.queries) + self.rows)
        seen = self.blocks_seen(0, head, first, queries, limit)
        return replace(seen, query_start=query_start, key_start=key_start, sequence=sequence)

    def start_of(self, name: str, sequence: Size, most: Size) -> Size:
        """An entry of the starts of sequences."""
        loaded = self.b.cast(self.b.load(self.memory[name], (sequence,)), int64)
        return self.b.bounded("start", loaded, 0, high(most))

    def keys_of(self, sequence: Size, queries: Size) -> tuple[Size, Size]:
        """The first key of a sequence with so many queries, and how many it has."""
        start = self.start_of("key_starts", sequence, self.x.keys)
        stop = self.start_of("key_starts", sequence + 1, self.x.keys)
        return start, self.held("limit", maximum(stop - start, 0))

    def blocks_seen(self, batch: Size, head: Size, first: Size, queries: Size, limit: Size) -> Work:
        """The blocks of keys that the queries from `first` on see."""
        keys, held = self.keys, self.held
        start: Size = 0
        stop, plain = limit, limit
        if self.low is not None:
            start = held("start", floor_divide(maximum(first + self.low, 0), keys))
        if self.high is not None:
            last = minimum(first + self.rows, queries)
            stop = maximum(minimum(stop, last + self.high), 0)
            plain = maximum(minimum(plain, first + self.high + 1), 0)
        count = held("blocks", maximum(ceil_divide(stop, keys) - start, 1))
        end = start + count
        right: Size = 1
        if self.most_right > 1:
            cut = end - floor_divide(plain, keys)
            right = held("right", minimum(maximum(cut, 1), count))
        left = count
        if self.low is not None:
            reach = first + self.low + self.rows - 1
            cut = end - ceil_divide(maximum(reach, 0), keys)
            left = held("left", minimum(maximum(cut, right), count))
        return Work(batch, head, first, queries, limit, start, count, right, left)

    def steps(self, work: Work, step: Step, first: Size = 0) -> None:
        """All steps after the first, those that a mask cuts in loops of their own."""
        begin = first + 1
        right = maximum(work.right, begin)
        left = maximum(work.left, right)
        if first != 0:
            right, left = self.held("right", right), self.held("left", left)

        def of(cut: bool) -> Callable[[Size, list[Node]], Sequence[Node]]:
            def one(j: Size, _: list[Node]) -> Sequence[Node]:
                step(j, cut)
                return []

            return one

        if self.most_right > 1:
            self.b.loop("right", begin, right, 1, of(True))
        self.b.loop("step", right, left, 1, of("mask" in self.x.extras))
        if self.low is not None:
            self.b.loop("left", left, work.count, 1, of(True))

    def stage(self, turn: Size, step: Size) -> tuple[Size, Size]:
        """(stage, lap) of a step of a tile."""
        at = turn + step
        return modulo(at, self.plan.stages), floor_divide(at, self.plan.stages)

    def query_stage(self, count: Size) -> tuple[Size, Size]:
        """(stage, lap) of a tile's queries."""
        stages = self.plan.query_stages
        return modulo(count, stages), floor_divide(count, stages)

    def key_of(self, work: Work, step: Size) -> Size:
        """The first key of a step's block."""
        last = work.start + work.count - 1
        return (last - step) * self.keys

    def index(
        self, which: int, work: Work, token: Size
    ) -> tuple[tuple[Size, ...], tuple[int, int]]:
        """Where rows of q, k, v or the result begin, and the axes that they walk."""
        order = self.x.orders[which]
        token = token + (work.key_start if which in (1, 2) else work.query_start)
        head = work.head // self.x.group if which in (1, 2) else work.head
        of = {"b": work.batch, "h": head, "t": token, "d": 0}
        return tuple(of[axis] for axis in order), (order.index("t"), 3)

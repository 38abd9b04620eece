"""Which tiles of an attention a program takes, and which blocks of keys a tile sees.

A tile is a block of queries of one head; programs take tiles in turns, forth and back, longest
first where later queries see more. Sequences that lie one after another have places for tiles
that follow from their starts alone, so that a search finds the sequence of a place. Invariant:
every role takes the same tiles with the same steps, in the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ... import tile
from ...core.dtype import int64
from ...ir.symbol import Size, floor_divide, high, low, maximum, minimum, modulo
from ...tile.value import index_of, size_of
from .holes import Holes
from .plan import AttentionPlan
from .shape import AttentionShape
from .softmax import clamped

Memories = Mapping[str, Any]  # by the names of parameters
Step = Callable[[Any, bool], None]


@dataclass(frozen=True)
class Seen:
    """Blocks of keys that some queries see: step j takes the block start + count - 1 - j. Steps
    before `right` and from `left` on are cut by a mask."""

    start: Any
    count: Any  # at least one
    right: Any
    left: Any

    @tile.function
    def steps(self, one: Step, begin: Any, cuts: tuple[bool, bool], always: bool) -> None:
        """one(step, whether a mask cuts it) for all steps from one on; those that it cuts at the
        right and at the left end in loops of their own, or all where one `always` may."""
        if cuts[0]:
            for right in tile.range(begin, self.right):
                one(right, True)
        for step in tile.range(self.right, self.left):
            one(step, always)
        if cuts[1]:
            for left in tile.range(self.left, self.count):
                one(left, True)


def seen_by(
    band: tuple[Any, Any],
    block: tuple[int, int],
    first: Any,
    queries: Any,
    limit: Any,
    least: int,
    cuts: bool,
) -> Seen:
    """The blocks of keys that a block (queries, keys) from the query `first` on sees, of so many
    queries and keys; `least` steps count as cut at the right end, more where it `cuts`."""
    (rows, keys), (low, high_), hold = block, band, tile.hold
    start: Any = 0
    stop, plain = limit, limit
    if low is not None:
        start = hold(tile.maximum(first + low, 0) // keys, "start")
    if high_ is not None:
        last = tile.minimum(first + rows, queries)
        stop = clamped(stop, 0, last + high_)
        plain = clamped(plain, 0, first + high_ + 1)
    count = hold(tile.maximum(tile.ceil_divide(stop, keys) - start, 1), "blocks")
    end, right, left = start + count, least, count
    if cuts:
        right = hold(tile.minimum(tile.maximum(end - plain // keys, least), count), "right")
    if low is not None:
        reach = tile.ceil_divide(tile.maximum(first + low + (rows - 1), 0), keys)
        left = hold(tile.minimum(tile.maximum(end - reach, right), count), "left")
    return Seen(start, count, right, left)


@dataclass(frozen=True)
class Tokens:
    """A block of tokens: of one batch and head, in one sequence."""

    holes: Holes  # of its batch and head
    first: Any  # token
    queries: Any  # there are
    limit: Any  # keys there are
    sequence: Any = 0  # of those that lie one after another


@dataclass(frozen=True)
class Work(Tokens, Seen):
    """One tile: its queries, and which blocks of keys they see; the first step may be cut."""


class TileOrder:
    """The tiles of one kernel, and their steps."""

    listed = False  # whether a list says which tiles there are
    program: Any  # whose tiles these are

    def __init__(self, x: AttentionShape, plan: AttentionPlan, memory: Memories) -> None:
        self.x, self.plan, self.memory = x, plan, memory
        self.rows, self.keys = plan.tile
        self.lanes = x.batch * x.heads
        self.packed = "query_starts" in x.extras
        self.gaps = self.packed and not self.listed  # some tiles have no queries
        self.low, self.high = x.band
        self.ends = x.ends(self.keys)
        self.most_right = self.count_right()
        # whether a mask may cut the first step
        self.cut_first = self.most_right > 0 or self.low is not None or "mask" in x.extras

    # ---- what masks cut ---------------------------------------------------------------------

    def firsts(self, high: int) -> range:
        """The last keys that tiles' first queries see, for all ways tiles lie to blocks of keys."""
        return range(high, high + self.rows * self.keys, self.rows)

    def count_right(self) -> int:
        """The most blocks at a tile's right end that a mask cuts."""
        rows, keys = self.rows, self.keys
        if self.high is None:
            return int(self.ends)
        if not isinstance(self.high, int):
            return -(-(rows - 1) // keys) + 1
        return max(1, *(-(-(f + rows) // keys) - (f + 1) // keys for f in self.firsts(self.high)))

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
        for first in self.firsts(self.high):
            last = -(-(first + rows) // keys)
            if last != first // keys + 1:  # its first queries end in another block
                return keys
            found.add(first + 64 * (own + 1) - (last - 1) * keys)
        only = found.pop()
        return only if not found and only % 64 == 0 else keys

    def skipped(self, work: Work, own: int) -> Any:
        """How many blocks at a tile's right end 64 of its queries do not see; one is left."""
        ends = [own + 1, self.rows // 64]
        if self.high is None or ends[0] == ends[1]:
            return 0
        if isinstance(self.high, int):
            blocks = [
                [-(-(f + 64 * end) // self.keys) for f in self.firsts(self.high)] for end in ends
            ]
            if blocks[0] == blocks[1]:
                return 0
        last = tile.minimum(work.first + 64 * ends[0], work.queries)
        stop = clamped(work.limit, 0, last + self.high)
        unseen = tile.maximum(work.start + work.count - tile.ceil_divide(stop, self.keys), 0)
        return tile.hold(tile.minimum(unseen, work.count - 1), "skip")

    # ---- which tile -------------------------------------------------------------------------

    @functools.cached_property
    def blocks(self) -> Size:
        """Blocks of a head's queries."""
        return block_count(self.x.queries, self.rows, self.memory, self.packed)

    def count(self) -> Any:
        """How many tiles there are."""
        return index_of(self.lanes * self.blocks)

    @tile.function
    def for_tiles(self, body: Callable[[Any, Work, Any], None]) -> tuple[Any, Any]:
        """body(tiles before, tile, steps before modulo two laps) for every tile of this program.

        Programs take turns forth and back, so that each gets long tiles and short ones. Gives
        how many there were, and the steps.
        """
        programs, laps, total = self.plan.programs, 2 * self.plan.stages, self.count()
        rounds, rest = total // programs, total % programs
        mine = rounds + tile.minimum(tile.maximum(rest - self.in_round(rounds), 0), 1)
        begun = 2 * self.plan.query_stages
        turn = done = tile.full((), 0, int64)
        for count in tile.range(mine):
            at = tile.hold(turn, "turn", (0, laps - 1))
            number = tile.maximum(count * programs + self.in_round(count), 0)
            work = self.locate(tile.hold(number, "number"))
            before = tile.hold(done, "done", (0, begun - 1)) if self.gaps else count
            if not self.gaps or work.first < work.queries:
                body(before, work, at)
                turn = (at + work.count) % laps
                done = (before + 1) % begun if self.gaps else done
        return mine, tile.hold(turn, "turn", (0, laps - 1))

    def in_round(self, round_: Any) -> Any:
        """This program's place in a round."""
        back = round_ % 2
        other = self.plan.programs - 1 - self.program * 2
        return self.program + back * other

    def locate(self, number: Any) -> Work:
        """A tile by its number."""
        back = self.high is not None  # the last queries see most
        section = self.lanes if self.packed else self.plan.section
        lane, block = corner(number, self.lanes, self.blocks, section)
        if back and not self.packed:
            block = tile.maximum(self.blocks - 1 - block, 0)
        lane = tile.hold(lane, "lane")
        return self.blocks_seen(tokens_at(self.x, self.memory, lane, block, self.rows, back=back))

    # ---- which blocks -----------------------------------------------------------------------

    def blocks_seen(self, of: Tokens) -> Work:
        """The blocks of keys that a tile's queries see."""
        given = (self.low, self.high), self.plan.tile, of.first, of.queries, of.limit
        return Work(**vars(seen_by(*given, 1, self.most_right > 1)), **vars(of))

    def steps(self, work: Work, one: Step, first: Any = 0) -> None:
        """one(step, whether a mask cuts it) for all steps after the first."""
        begin = first + 1
        plain = tile.maximum(work.right, begin)
        last = tile.maximum(work.left, plain)
        if not isinstance(first, int):
            plain, last = tile.hold(plain, "right"), tile.hold(last, "left")
        cuts, always = (self.most_right > 1, self.low is not None), "mask" in self.x.extras
        replace(work, right=plain, left=last).steps(one, begin, cuts, always)

    def key_of(self, work: Work, step: Any) -> Any:
        """The first key of a step's block."""
        last = work.start + work.count - 1
        return (last - step) * self.keys


# ---- tokens -------------------------------------------------------------------------------------


def corner(number: Any, lanes: Size, blocks: Size, section: int) -> tuple[Any, Any]:
    """(number of the batch and head, block of tokens) of a tile: blocks of some heads are mixed, so
    that what they loop over is near and all end together."""
    at = size_of(number, "number")
    if isinstance(lanes, int) and section >= lanes > 1:
        block, lane = floor_divide(at, lanes), modulo(at, lanes)
    else:
        each = section * blocks
        first = floor_divide(at, each) * section
        wide: Size = section
        if not isinstance(lanes, int) or lanes % section:
            wide = maximum(minimum(lanes - first, section), 1)
        within = modulo(at, each)
        block, lane = floor_divide(within, wide), first + modulo(within, wide)
    return index_of(lane), index_of(block)


def number_at(memory: Any, *index: Any) -> Any:
    """An integer of memory."""
    return tile.cast(memory[index], int64)


def bounded(value: Any, name: str, most: Size, least: int = 0) -> Any:
    """A number from memory, brought within its bounds: what is simplified relies on them."""
    value = tile.minimum(tile.maximum(tile.cast(value, int64), least), high(most))
    return tile.hold(value, name, (least, high(most)))


def block_count(tokens: Size, rows: int, memory: Memories, packed: bool) -> Size:
    """Blocks of a head's tokens; sequence i of several has the places from start // rows + i on,
    which are enough for its blocks; those left over are empty."""
    if not packed:
        return floor_divide(tokens + (rows - 1), rows)
    return floor_divide(tokens, rows) + memory["query_starts"].type.shape[0] - 1


def tokens_at(
    x: AttentionShape,
    memory: Memories,
    lane: Any,
    block: Any,
    rows: int,
    of_keys: bool = False,
    back: bool = False,
) -> Tokens:
    """A block of so many queries or keys by the number of its batch and head (see `block_at`)."""
    hold, (_, heads, group) = tile.hold, x.side(of_keys)
    batch, head = hold(lane // heads, "batch"), hold(lane % heads, "head") * group
    if "query_starts" in x.extras:
        of = "key" if of_keys else "query"
        _, first, spans = block_at(x, memory, hold(block, "block"), rows, of, back)
        (query_start, queries), (key_start, limit) = spans["query"], spans["key"]
        holes = Holes(x, memory, batch, head, of_keys, query_start, key_start)
        return Tokens(holes, first, queries, limit)
    holes = Holes(x, memory, batch, head, of_keys)
    return Tokens(holes, hold(block * rows, "first"), index_of(x.queries), holes.limit)


@tile.function
def block_at(
    x: AttentionShape,
    memory: Memories,
    place: Any,
    rows: int,
    of: str = "query",
    back: bool = False,
) -> tuple[Any, Any, dict[str, tuple[Any, Any]]]:
    """The sequence that has a place, the first token of the place's block of queries or keys, and
    (start, count) of both in the sequence. Blocks are taken from the first on, or `back` from the
    last. A place left over lies before the first one or past the last one: no token is there."""
    sizes, starts = {"query": x.queries, "key": x.keys}, memory[f"{of}_starts"]
    sequences = starts.type.shape[0] - 1
    many = high(sequences)
    lower, upper = tile.full((), 0, int64), tile.cast(index_of(sequences - 1), int64)
    for _ in tile.range((many - 1).bit_length()):  # it is searched for by halves
        least, top = (tile.hold(side, "side", (0, many - 1)) for side in (lower, upper))
        middle = (least + top + 1) // 2
        begin = bounded(starts[middle], "start", sizes[of]) // rows
        here = begin + middle <= place
        below = tile.cast(middle - 1, int64)
        lower, upper = tile.where(here, middle, lower), tile.where(here, upper, below)
    sequence = tile.hold(lower, "sequence", (0, many - 1))
    spans = {}
    for side in [side for side in sizes if f"{side}_starts" in memory]:
        own = memory[f"{side}_starts"]
        ends = [bounded(own[sequence + i], "start", sizes[side]) for i in (0, 1)]
        spans[side] = ends[0], tile.hold(tile.maximum(ends[1] - ends[0], 0), "count")
    start, count = spans[of]
    block = place - (start // rows + sequence)
    if back:
        block = tile.ceil_divide(count, rows) - 1 - block
    first = tile.hold(block, "block") * rows
    first = tile.where(first < 0, tile.cast(count, int64), first)
    return sequence, tile.hold(first, "first", (0, high(sizes[of]) + rows)), spans

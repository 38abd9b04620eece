"""Which tiles of an attention a program takes, and which blocks of keys a tile sees.

A tile is a block of queries of one head; programs take tiles in turns, forth and back, longest
first where later queries see more. Sequences that lie one after another have places for tiles
that follow from their starts alone, so that a search finds the sequence of a place. Invariant:
every role takes the same tiles with the same steps, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ... import tile
from ...core.dtype import int64
from ...ir.symbol import Size, ceil_divide, floor_divide, high, low, maximum, minimum, modulo
from ...tile.value import index_of, size_of
from .holes import Holes
from .plan import AttentionPlan
from .shape import STARTS, AttentionShape
from .softmax import clamped

Memories = Mapping[str, Any]  # by the names of parameters
Step = Callable[[Any, bool], None]


@dataclass(frozen=True)
class Tokens:
    """A block of tokens: of one batch and head, in one sequence."""

    holes: Holes  # of its batch and head
    first: Any  # token
    queries: Any  # there are
    limit: Any  # keys there are
    sequence: Any = 0  # of those that lie one after another

    def seen(self, band: tuple[Any, Any], block: tuple[int, int], least: int, cuts: bool) -> Work:
        """With the blocks of keys that they see, if they are a block of queries; `least` steps
        count as cut at the right end, more where it `cuts`."""
        (rows, keys), hold, first = block, tile.hold, self.first
        stop = tile.minimum(first + rows, self.queries)
        begin, end = reached(band, first, stop, self.limit)
        _, plain = reached(band, first, first + 1, self.limit)
        start = hold(begin // keys, "start")
        count = hold(tile.maximum(tile.ceil_divide(end, keys) - start, 1), "blocks")
        past, right, left = start + count, least, count
        if cuts:
            right = hold(clamped(past - plain // keys, least, count), "right")
        if band[0] is not None:
            begin, _ = reached(band, first + (rows - 1), stop, self.limit)
            left = hold(clamped(past - tile.ceil_divide(begin, keys), right, count), "left")
        return Work(**vars(self), start=start, count=count, right=right, left=left)


@dataclass(frozen=True, kw_only=True)
class Work(Tokens):
    """Queries, and blocks of keys that they see: step j takes the block start + count - 1 - j.
    Steps before `right` and from `left` on are cut by a mask."""

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


def reached(band: tuple[Any, Any], first: Any, stop: Any, count: Any) -> tuple[Any, Any]:
    """Which of so many tokens of one side those of the other from `first` to `stop` see."""
    begin = 0 if band[0] is None else tile.maximum(first + band[0], 0)
    return begin, count if band[1] is None else clamped(count, 0, stop + band[1])


class TileOrder:
    """The tiles of one kernel, and their steps."""

    program: Any  # whose tiles these are
    high: Any  # the most that key number - query number is; None for any

    def __init__(self, x: AttentionShape, plan: AttentionPlan, memory: Memories) -> None:
        self.x, self.plan, self.memory = x, plan, memory
        self.rows, self.keys = plan.tile
        self.lanes, self.blocks = x.batch * x.heads, block_count(x, self.rows, memory)
        self.gaps = "query_starts" in memory  # some tiles have no queries
        self.low, self.high = x.band
        self.ends = x.ends(self.keys)
        # whether a mask may cut the first step, and more than one at the right end
        self.cut_first = self.ends or x.band != (None, None) or "mask" in x.extras
        self.cuts_more = self.cuts_several()

    # ---- what masks cut ---------------------------------------------------------------------

    def firsts(self) -> range:
        """The last keys that tiles' first queries see, for all ways tiles lie to blocks of keys."""
        return range(self.high, self.high + self.rows * self.keys, self.rows)

    def cuts_several(self) -> bool:
        """Whether a mask may cut more than one block at a tile's right end."""
        rows, keys = self.rows, self.keys
        if not isinstance(self.high, int):
            return self.high is not None
        return any(ceil_divide(f + rows, keys) - (f + 1) // keys > 1 for f in self.firsts())

    def first_columns(self, own: int) -> int:
        """How many keys of the last block of a tile 64 of its queries see at most, if that is the
        same for all tiles; else all of the block's."""
        x, keys, rows = self.x, self.keys, self.rows
        if keys % 64 != 0 or self.low is not None or not isinstance(self.high, int):
            return keys
        if self.high < 0 or x.packed or {"bias", "mask", "key_lengths"} & set(x.extras):
            return keys
        if low(x.keys - (self.high + x.queries)) < 0:
            return keys
        found = set()
        for first in self.firsts():
            last = ceil_divide(first + rows, keys)
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
            blocks = [[ceil_divide(f + 64 * n, self.keys) for f in self.firsts()] for n in ends]
            if blocks[0] == blocks[1]:
                return 0
        last = tile.minimum(work.first + 64 * ends[0], work.queries)
        stop = clamped(work.limit, 0, last + self.high)
        unseen = tile.maximum(work.start + work.count - tile.ceil_divide(stop, self.keys), 0)
        return tile.hold(tile.minimum(unseen, work.count - 1), "skip")

    # ---- which tile -------------------------------------------------------------------------

    def count(self) -> Any:
        """How many tiles there are."""
        return self.lanes * self.blocks

    @tile.function
    def for_tiles(self, body: Callable[[Any, Work, Any], None]) -> tuple[Any, Any]:
        """body(tiles before, tile, steps before modulo two laps) for every tile of this program.

        Programs take turns forth and back, so that each gets long tiles and short ones. Gives
        how many there were, and the steps.
        """
        programs, laps, total = self.plan.programs, 2 * self.plan.stages, self.count()
        rounds, rest = total // programs, total % programs
        mine = rounds + clamped(rest - self.in_round(rounds), 0, 1)
        begun = 2 * self.plan.query_stages
        turn = done = tile.full((), 0, int64)
        for count in tile.range(mine):
            at = tile.hold(turn, "turn", (0, laps - 1))
            number = tile.maximum(count * programs + self.in_round(count), 0)
            tokens = self.locate(tile.hold(number, "number"))
            work = tokens.seen((self.low, self.high), self.plan.tile, 1, self.cuts_more)
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

    def locate(self, number: Any) -> Tokens:
        """A tile by its number."""
        section = self.lanes if self.x.packed else self.plan.section
        lane, block = corner(number, self.lanes, self.blocks, section)
        return tokens_at(self.x, self.memory, tile.hold(lane, "lane"), block, self.rows)

    # ---- which blocks -----------------------------------------------------------------------

    def steps(self, work: Work, one: Step, first: Any = 0) -> None:
        """one(step, whether a mask cuts it) for all steps after the first."""
        begin = first + 1
        plain = tile.maximum(work.right, begin)
        last = tile.maximum(work.left, plain)
        if not isinstance(first, int):
            plain, last = tile.hold(plain, "right"), tile.hold(last, "left")
        cuts, always = (self.cuts_more, self.low is not None), "mask" in self.x.extras
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
    return index_of(lane), index_of(minimum(block, blocks - 1))


def number_at(memory: Any, *index: Any) -> Any:
    """An integer of memory."""
    return tile.cast(memory[index], int64)


def bounded(value: Any, name: str, most: Size, least: int = 0) -> Any:
    """A number from memory, brought within its bounds: what is simplified relies on them."""
    value = tile.minimum(tile.maximum(tile.cast(value, int64), least), high(most))
    return tile.hold(value, name, (least, high(most)))


def block_count(x: AttentionShape, rows: int, memory: Memories, of_keys: bool = False) -> Size:
    """Blocks of a head's tokens; sequence i of several has the places from start // rows + i on,
    which are enough for its blocks; those left over are empty."""
    tokens, _, _ = x.side(of_keys)
    if "query_starts" not in memory:
        return ceil_divide(tokens, rows)
    return floor_divide(tokens, rows) + memory["query_starts"].type.shape[0] - 1


def tokens_at(
    x: AttentionShape, memory: Memories, lane: Any, block: Any, rows: int, of_keys: bool = False
) -> Tokens:
    """A block of so many queries or keys by the number of its batch and head (see `block_at`)."""
    hold, (_, heads, group) = tile.hold, x.side(of_keys)
    batch, head = hold(lane // heads, "batch"), hold(lane % heads, "head") * group
    if not x.packed:
        if x.last_first(of_keys):
            block = block_count(x, rows, memory) - 1 - block
        holes = Holes(x, memory, batch, head, of_keys)
        return Tokens(holes, hold(block, "block") * rows, x.queries, holes.limit)
    _, first, spans = block_at(x, memory, hold(block, "block"), rows, of_keys)
    (query_start, queries), (key_start, limit) = spans
    holes = Holes(x, memory, batch, head, of_keys, query_start, key_start)
    return Tokens(holes, first, queries, limit)


@tile.function
def block_at(
    x: AttentionShape, memory: Memories, place: Any, rows: int, of_keys: bool = False
) -> tuple[Any, Any, list[tuple[Any, Any]]]:
    """The sequence that has a place, the first token of the place's block of queries or keys, and
    (start, count) of both in the sequence. A place left over lies before the first one or past the
    last one: no token is there."""
    starts, (tokens, _, _) = memory[STARTS[of_keys]], x.side(of_keys)
    sequences = starts.type.shape[0] - 1
    many = high(sequences)
    lower, upper = tile.full((), 0, int64), tile.cast(sequences - 1, int64)
    for _ in tile.range((many - 1).bit_length()):  # it is searched for by halves
        least, top = (tile.hold(side, "side", (0, many - 1)) for side in (lower, upper))
        middle = (least + top + 1) // 2
        here = bounded(starts[middle], "start", tokens) // rows + middle <= place
        below = tile.cast(middle - 1, int64)
        lower, upper = tile.where(here, middle, lower), tile.where(here, upper, below)
    sequence = tile.hold(lower, "sequence", (0, many - 1))
    spans = []
    for name, most in zip(STARTS, (x.queries, x.keys)):
        if name in memory:
            begin, end = (bounded(memory[name][sequence + i], "start", most) for i in (0, 1))
            spans.append((begin, tile.hold(tile.maximum(end - begin, 0), "count")))
    start, count = spans[of_keys]
    block = place - (start // rows + sequence)
    if x.last_first(of_keys):
        block = tile.ceil_divide(count, rows) - 1 - block
    first = tile.hold(block, "block") * rows
    first = tile.where(first < 0, tile.cast(count, int64), first)
    return sequence, tile.hold(first, "first", (0, high(tokens) + rows)), spans

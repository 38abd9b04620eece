"""Attention of many new tokens a request over a paged cache: prefill, whole or in chunks.

The kernel of `attention`, whose keys and values come page by page: a tile is 128 queries of one
head of one request, its blocks of keys are the pages that the request's row of the table names.
Query i of a request with n new tokens and `length` keys sees the keys up to length - n + i, the
last `window` of them if there is one. `paged_attention` takes requests with few new tokens, in a
launch beside this one.

Tiles are listed once a step for all layers (`tile_list`), those with the most keys first: programs
that take them in turns, forth and back, end together, and none searches for a tile's request.

Keys and values of 8 bits become float16 on their way into the rings.

Costs are those of `attention`: matrix units bound it. Invariant: values in pages of a request past
its last key are finite (`paged_append` leaves zeros there): their weights are 0, not their terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from ... import tile
from ...core.dtype import float16, float32, int32, int64
from ...core.target import Target
from ...ir.symbol import Size, floor_divide, high, symbol
from ...ir.types import Memory
from ...tile.build import Body, BodyBuilder
from ..attention import plan as attention_plan
from ..attention.forward import WideAttention
from ..attention.holes import Holes
from ..attention.plan import AttentionPlan, fitted, padded
from ..attention.shape import STARTS, AttentionShape, Parameters
from ..attention.shape import parameters as attention_parameters
from ..attention.softmax import first_of
from ..attention.tile_order import Tokens, Work, bounded
from .shape import PagedShape, attention_of
from .shape import parameters as step_parameters
from .steps import page_numbers, page_part
from .work import CHUNK, HELD, for_row_blocks, power

LEAST_TOKENS = 64  # tokens of a step from which this kernel is worth a launch of its own
FEW_NEW_TOKENS = 8  # new tokens of a request below which `paged_attention` is the quicker one
TILES = ((128, 128), (128, 64), (64, 64))  # (queries, keys): blocks of keys are whole pages
RECORD = 8  # int32 of a tile
REQUEST, START, QUERIES, LENGTH, FIRST, STEPS = range(6)
# START: the token of the request's first query; LENGTH: its keys; FIRST: the tile's first query;
# STEPS: its blocks of keys, by which tiles are ranked


def shape_of(x: PagedShape) -> AttentionShape:
    """The attention that a step is: requests one after another, their diagonal at the end."""
    last = symbol("offset", 0, high(x.most_pages * x.page))
    first = last - (x.window - 1) if x.window else None
    return attention_of(x, band=(first, last), extras=(*STARTS, "sinks") if x.sinks else STARTS)


def parameters(x: PagedShape, plan: AttentionPlan) -> Parameters:
    """q, keys, values, scales (of 8 bits), table, sinks (if there are any), tiles; out and lse."""
    q, _, _, *results = attention_parameters(shape_of(x))
    cache = step_parameters(x, ("keys", "values", "scales", "table", "sinks"))
    return [q, *cache, ("tiles", tiles_of(x, plan)), *results]


def tiles_of(x: PagedShape, plan: AttentionPlan, use: str = "value") -> Memory:
    """The most tiles of one head, and a row that says how many there are."""
    most = floor_divide(x.tokens, plan.tile[0]) + x.requests + 1
    return Memory((most + 1, RECORD), int32, use=use)


def why_not(x: PagedShape, target: Target) -> str:
    """Why the kernel does not take a step on matrix units that run beside the threads; '' where it
    does."""
    return attention_plan.why_not(shape_of(x)) or ("" if choose(x, target) else "no tile fits")


def choose(x: PagedShape, target: Target) -> AttentionPlan | None:
    """The first Plan that fits; None if none does."""
    of = shape_of(x)
    for size in TILES:
        stages = 3 if padded(x.width) + padded(x.value_width) <= 128 else 2
        # of 8 bits a block of keys and one of values lie there as they came
        taken = size[1] * (x.width + x.value_width) if x.scaled else 0
        found = fitted(of, AttentionPlan(size, stages, target.cores or 132), taken)
        if found is not None:
            return found
    return None


def prefill(x: PagedShape, plan: AttentionPlan) -> Body:
    """The kernel for the tiles of a list; parameters as `parameters` has them."""
    made = _Widened if x.scaled else _Prefill
    return made(x, plan, BodyBuilder("paged_prefill", parameters(x, plan))).build()


class _Prefill(WideAttention):
    """Writes one Body of `prefill`, for the tiles of a list."""

    registers = {1: (0, 0), 2: (56, 224)}  # a producer that looks up pages needs more
    notes: ClassVar[dict[str, Any]] = {"distinct": True, "level": "placed"}

    def __init__(self, x: PagedShape, plan: AttentionPlan, b: BodyBuilder) -> None:
        super().__init__(shape_of(x), plan, b)
        self.paged, self.operand = x, float16 if x.scaled else x.dtype

    # ---- which tile -------------------------------------------------------------------------

    def count(self) -> Any:
        """See `TileOrder`."""
        tiles = self.memory["tiles"]
        most = tiles.type.shape[0] - 1
        return bounded(tiles[most, 0], "listed", most) * self.lanes

    def locate(self, number: Any) -> Tokens:
        """See `TileOrder`."""
        x, hold, tiles = self.x, tile.hold, self.memory["tiles"]
        most = tiles.type.shape[0] - 2
        place = hold(tile.minimum(number // self.lanes, most), "place")
        head = hold(number % self.lanes, "head")

        def field(column: int, name: str, high: Size) -> Any:
            return bounded(tiles[place, column], name, high)

        sequence = field(REQUEST, "sequence", self.memory["table"].type.shape[0] - 1)
        start, queries = field(START, "start", x.queries), field(QUERIES, "queries", x.queries)
        limit, first = field(LENGTH, "limit", x.keys), field(FIRST, "first", x.queries)
        last = hold(tile.maximum(limit - queries, 0), "offset")
        window = self.paged.window
        self.low, self.high = last - (window - 1) if window else None, last
        x = replace(x, band=(self.low, self.high))
        holes = Holes(x, self.memory, 0, head, query_start=start, key_start=0)
        return Tokens(holes, first, queries, limit, sequence)

    # ---- places and copies ------------------------------------------------------------------

    def place(self) -> None:
        """See `WideAttention`; blocks of pages land in the rings."""
        super().place()
        self.landing = {name: (self.ring[name], self.pipes[name]) for name in "kv"}

    def bring(self, name: str, work: Work, turn: Any, token: Any) -> None:
        """Keys and values come page by page."""
        if name == "q":
            return super().bring(name, work, turn, token)
        key = tile.hold(token, "key")
        self.copy(name, work, turn, key, self.pages_of(work, key))

    def pages_of(self, work: Work, key: Any) -> Any:
        """Which pages a block of keys lies in."""
        table = self.memory["table"]
        return page_numbers(self.paged, table, work.sequence, key, self.keys, work.limit)

    def copy(self, name: str, work: Work, turn: Any, key: Any, pages: Any) -> None:
        """A block into the next stage of where blocks land."""
        x, memory = self.paged, self.memory[{"k": "keys", "v": "values"}[name]]
        ring, pipe = self.landing[name]
        stage = pipe.acquire(turn)
        pipe.full.expect(stage, ring[0].bytes)
        place, head = ring[stage, 0], work.holes.head // x.group
        source = page_part(x, memory, 0, head, key, place.shape)
        tile.copy_pages(place, source, pages, pipe.full[stage])


class _Widened(_Prefill):
    """The same over a cache of 8 bits: the producer's warps, of which copies need one, make float16
    of blocks, which land as bytes, on their way into the rings. Queries become float16 too, times
    the scale of keys.

    Costs of 128 keys and values of width 128 beside 128 queries: 8.4 MFLOP, 2,048 cycles of the
    matrix units. Of shared memory, which moves 128 bytes a cycle, copies write 32 KB, threads read
    32 KB and write 64 KB, and products read 160 KB: 2,304 cycles; and there are 16,384 conversions
    of two. Bytes take 32 KB beside the rings.
    """

    registers = {1: (0, 0), 2: (72, 216)}

    def place(self) -> None:
        """Beside the rings: a block of keys and one of values as they lie in the cache."""
        super().place()
        for name, width in zip("kv", (self.width, self.value_width)):
            place = tile.shared((1, 1, self.keys, width), self.paged.cache)
            self.landing[name] = place, tile.pipeline(f"{name}_bytes", 1)

    def scale(self, which: int, work: Work) -> Any:
        """See `WideAttention`."""
        return tile.load(self.memory["scales"][which, work.holes.head // self.paged.group])

    def producer(self) -> None:
        """Blocks in the order of `WideAttention`; queries after the first keys."""
        tile.grid_dependency_wait()
        self.for_tiles(self.one)

    @tile.function
    def one(self, count: Any, work: Work, turn: Any) -> None:
        """One tile."""
        key = tile.hold(self.key_of(work, 0), "key")
        pages = self.pages_of(work, key)
        for name in self.landing:
            self.copy(name, work, turn, key, pages)
        for step in tile.range(work.count):
            self.widen("k", work, turn, step)
            if step > 0:
                self.widen("v", work, turn, step - 1)
            else:
                self.bring_queries(work, count)
        self.widen("v", work, turn, work.count - 1)

    @tile.function
    def widen(self, name: str, work: Work, turn: Any, step: Any) -> None:
        """A step's block into the ring; then the next one, whose pages are looked up before, is
        asked for: behind the fence, since a copy may land among loads that are only issued."""
        at, (place, landed) = turn + step, self.landing[name]
        key = tile.hold(tile.maximum(self.key_of(work, step + 1), 0), "key")
        pages = self.pages_of(work, key)
        found = tile.read(place[landed.wait(at), 0])
        pipe = self.pipes[name]
        stage = pipe.acquire(at)
        self.put(self.ring[name][stage, 0], found)
        pipe.full.arrive(stage)
        landed.release(at)
        if step + 1 < work.count:
            self.copy(name, work, at + 1, key, pages)

    def put(self, place: Any, found: Any) -> None:
        """What products take, where they read it."""
        tile.write(place, tile.cast(found, self.operand))
        tile.fence("async")

    def bring_queries(self, work: Work, turn: Any) -> None:
        """By loads of the threads."""
        pipe, factor = self.pipes["q"], self.scale(0, work)
        stage = pipe.acquire(turn)
        for half in range(self.halves):
            first = work.first + 64 * half
            rows = work.holes.tokens("q", first, (64, self.width))
            there = first_of(64, self.x.queries - work.holes.query_start - first)
            found = tile.load(rows, mask=there[:, None])
            self.put(self.ring["q"][stage, half], tile.cast(found, float32) * factor)
        pipe.full.arrive(stage)


# ---- the list ---------------------------------------------------------------------------------


def tile_list(x: PagedShape, plan: AttentionPlan, least: int) -> Body:
    """(lengths, query_starts) -> tiles: those of requests with so many new tokens or more."""
    given = step_parameters(x, ("lengths", "query_starts"))
    b = BodyBuilder("paged_tiles", [*given, ("tiles", tiles_of(x, plan, "result"))])
    with tile.into(b):
        _write_tiles(x, plan, least, *map(tile.memory, b.parameters))
    return b.finish((1,), warps=8, distinct=True)


@tile.function
def _write_tiles(
    x: PagedShape, plan: AttentionPlan, least: int, lengths: Any, starts: Any, tiles: Any
) -> None:
    """Which request every tile has, then their order: after those with more blocks, or as many
    before."""
    (rows, keys), most = plan.tile, tiles.type.shape[0] - 1
    size = max(CHUNK, power(most))
    known = tile.shared((STEPS + 1, size), int32)
    tile.store(known, (STEPS, 0), tile.zeros((size,), int32))

    def fields(request: Any, first: Any, queries: Any, length: Any, before: Any) -> Sequence[Any]:
        """Of tiles: REQUEST, ..."""
        seen = length - queries + tile.minimum(before + rows, queries)
        if x.window:
            seen = tile.minimum(seen, x.window + rows)
        steps = tile.maximum(seen + (keys - 1), keys) // keys
        return request, first, queries, length, before, steps

    total = for_row_blocks(
        x, (lengths, starts), known, rows, lambda tokens: tokens >= least, fields
    )
    chunk = max(8, min(CHUNK, HELD // size))
    for start in tile.range(0, total, chunk):
        own = tile.load(known, (STEPS, start), (chunk,))[:, None]
        other = tile.load(known, (STEPS, 0), (size,))
        number = tile.arange(chunk) + start
        sooner = (other == own) & (tile.arange(size) < number[:, None])
        rank = tile.sum(tile.cast((other > own) | sooner, int64), 1)
        there = number < total
        for place in range(STEPS):
            value = tile.load(known, (place, start), (chunk,))
            tile.store(tiles, rank * RECORD + place, value, mask=there)
    tiles[most, 0] = total

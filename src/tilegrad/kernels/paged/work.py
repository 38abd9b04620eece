"""The work list of a step over a paged cache, and what becomes of row blocks that it cut.

Every program gets as many blocks of keys, but for one. Row blocks of the requests that the Plan
takes stand one after the other, each with the blocks of keys that its tokens see and with one at
least, so that someone writes its result; those of tokens of no request, which get 0, come last. All
blocks are cut into `ranges`; where a cut or the end of a row block lies an item ends. Item number g
of range p stands in row p if it is the range's first, else in row ranges + g - p - 1, so a program
finds its first item at once and the others in a row. Parts of a row block that was cut go to
partials g, which are neighbours.

`work_list` is the kernel, one program that is run once a step. Costs about 20 dependent reads and
three running sums, whatever the lengths.
Who counts the last part of a row block combines them (`mixed`), or another launch does
(`combine_parts`). Invariant: the list depends on lengths, query starts and the Plan alone; parts
are added in the order of their keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ... import tile
from ...core.dtype import int32, int64
from ...ir.symbol import Size, floor_divide, high, power_of_two
from ...tile.build import Body, BodyBuilder
from ...tile.value import index_of
from ..attention.softmax import clamped, finite, some_sum
from ..attention.tile_order import bounded, number_at
from .shape import FIELDS, KNOWN, RECORD, PagedPlan, PagedShape, parameters

CHUNK = 64  # row blocks whose requests are looked up at once, at most
HELD = 1 << 14  # elements of a tile that the threads hold without spilling
TOGETHER = 32  # parts that are read at once


def work_list(x: PagedShape, plan: PagedPlan) -> Body:
    """The kernel that makes the list."""
    given = parameters(x, ("lengths", "query_starts", "items"), plan, items="result")
    b, count = BodyBuilder("paged_work", given), max(CHUNK, power(plan.row_blocks(x)))
    with tile.into(b):
        _Items(x, plan, *map(tile.memory, b.parameters)).write(count)
    held = max(count // 256, power(plan.ranges(x)) // 64)
    return b.finish((1,), warps=max(8, min(32, held)), distinct=True)


def power(size: Size) -> int:
    """The least power of two that is as large."""
    return power_of_two(high(size))


def request_of(token: Any, starts: Any, requests: Size) -> Any:
    """The number of a token's request; that of requests, if it belongs to none."""
    inside = tile.arange(power(requests)) < requests
    ends = tile.load(starts, (1,), inside.shape, mask=inside)
    return tile.sum(tile.cast((ends <= token) & inside, int64), 0)


@tile.function
def for_row_blocks(
    x: PagedShape,
    memories: tuple[Any, Any],
    into: Any,
    each: int,
    taken: Callable[[Any], Any] | None,
    fields: Callable[..., Sequence[Any]],
    most: int = 0,
) -> Any:
    """into[:, i] = fields(request, its first token, how many it has, its keys, tokens before it) of
    the i-th block of `each` tokens of the requests that are taken for their number of tokens, some
    blocks at a time; tokens of no request are one more, without keys. Of so many where that is
    said, zeros past the last. `memories` are lengths and query starts. Gives how many blocks there
    are."""
    lengths, starts = memories
    size = power(x.requests)
    chunk = max(8, min(CHUNK, HELD // size))
    inside = tile.arange(size) < x.requests
    begin, end = (tile.load(starts[i : i + size], mask=inside) for i in (0, 1))

    def blocks_of(tokens: Any) -> Any:
        """How many blocks so many tokens of a request are."""
        blocks = (tokens + (each - 1)) // each
        return blocks if taken is None else tile.where(taken(tokens), blocks, 0)

    blocks = blocks_of(end - begin)
    nobody = blocks_of(x.tokens - number_at(starts, x.requests))
    ends, total = tile.cumsum(blocks), None
    if not most:
        total = tile.sum(blocks, 0) + nobody
        total = bounded(total, "total", floor_divide(x.tokens, each) + x.requests + 1)
    for start in tile.range(0, most or total, chunk):
        number = tile.arange(chunk) + start
        over = ends <= number[:, None]
        request = tile.minimum(tile.sum(tile.cast(over, int64), 1), index_of(x.requests))
        before = tile.max(tile.where(over, ends, 0), 1)
        own = number - before  # its number among the blocks of the request
        known = request < x.requests
        first = tile.load(starts, request)
        last = tile.load(starts, request + 1, mask=known)
        tokens = tile.where(known, last, index_of(x.tokens)) - first
        length = tile.load(lengths, request, mask=known)
        found = fields(request, first, tokens, length, own * each)
        there = known | (own < nobody)
        for place, value in enumerate(found):
            tile.store(into, (place, start), tile.where(there, value, 0))
    return total


class _Items:
    """Row blocks, then items: the program of `work_list`."""

    def __init__(self, x: PagedShape, plan: PagedPlan, *memories: Any) -> None:
        self.x, self.plan, self.ranges = x, plan, plan.ranges(x)
        self.lengths, self.starts, self.items = memories

    def write(self, count: int) -> None:
        """All of it, for no more row blocks than so many."""
        x, below = self.x, self.plan.below
        known = tile.shared((len(KNOWN), count), int32)
        taken = (lambda tokens: tokens < below) if below else None
        given, each = (self.lengths, self.starts), self.plan.per(x)
        for_row_blocks(x, given, known, each, taken, self.fields, count)
        found = {
            field: tile.cast(tile.load(known, (place, 0), (count,)), int64)
            for place, field in enumerate(KNOWN)
        }
        size = found["blocks"]
        stop, total = tile.cumsum(size), tile.sum(size, 0)
        start = stop - size
        self.total = tile.maximum(total, 1)
        self.programs = clamped(total, 1, self.ranges)

        def program_of(unit: Any) -> Any:
            """The program that takes a unit."""
            return ((unit + 1) * self.programs - 1) // self.total

        first, last = program_of(start), program_of(stop - 1)
        parts = tile.where(size > 0, last - first + 1, 0)
        partials = tile.cumsum(parts) - parts
        self.write_parts((first, start, stop, parts, partials), found)
        # programs without units, where there are fewer of these
        number = tile.arange(power(self.ranges))
        none = (total <= number) & (number < self.ranges)
        self.put(number, none, start=0, stop=-1)

    def put(self, record: Any, mask: Any, **fields: Any) -> None:
        """Some fields of records."""
        for name, value in fields.items():
            tile.store(self.items, record * RECORD + FIELDS.index(name), value, mask=mask)

    def fields(
        self, request: Any, first: Any, queries: Any, length: Any, before: Any
    ) -> Sequence[Any]:
        """Of row blocks, as KNOWN has them."""
        x, block, each = self.x, self.plan.block, self.plan.per(self.x)
        tokens = tile.minimum(queries - before, each)
        sees = length - queries + (before + 1)
        end = tile.maximum(sees + (tokens - 1), 0)
        begin: Any = 0
        if x.window:
            begin = tile.maximum(sees - x.window, 0) // block
        blocks = tile.maximum((end + (block - 1)) // block - begin, 1)
        return request, first + before, tokens, sees, begin, blocks

    @tile.function
    def write_parts(self, known: Sequence[Any], found: dict[str, Any]) -> None:
        """All parts of row blocks that cuts make: at once where they are few enough, else one of
        each after another."""
        size, blocks = power(self.ranges), known[0].shape[0]
        many = high(self.plan.row_blocks(self.x)) * 4 <= self.ranges  # parts of each
        if many and blocks * size <= HELD // 2:
            self.write_part(tile.arange(size)[:, None], known, found)
        else:
            most = tile.hold(tile.max(known[3], 0), "most", (0, self.ranges))
            for part in tile.range(most):
                self.write_part(part, known, found)

    def write_part(self, k: Any, known: Sequence[Any], found: dict[str, Any]) -> None:
        """Part k of every row block that has so many."""
        first, start, stop, parts, partials = known
        there, program = k < parts, first + k
        begin = program * self.total // self.programs  # its units
        end = (program + 1) * self.total // self.programs
        low, high_ = tile.maximum(start, begin), tile.minimum(stop, end)
        partial = partials + k
        leads, closes = start <= begin, end <= stop
        later = partial + (self.ranges - 1) - program
        values = {
            **found,
            "first": found["first"] + (low - start),
            "blocks": high_ - low,
            "partial": tile.where(parts <= 1, -1, partial),
            "from": partials,
            "parts": parts,
        }
        self.put(tile.where(leads, program, later), there, **values)
        # of the program, in its first record
        self.put(program, there & leads, start=partial)
        self.put(program, there & closes, stop=partial)


# ---- parts --------------------------------------------------------------------------------------


def combine_parts(x: PagedShape, plan: PagedPlan) -> Body:
    """Parts of row blocks that were cut become results, weighted by their sums of weights in the
    order of keys; whole row blocks are in `out` already. A program takes a row of one, which it
    finds by its second part: that is the first item of a range. All parts, up to 32 at a time, are
    read at once."""
    given = parameters(x, ("items", "partial", "sums", "out"), plan, out="state")
    b, grid = BodyBuilder("paged_combine", given), (plan.programs, plan.per(x) * x.group)
    with tile.into(b):
        _combine(x, plan, *tile.grid(*grid), tile.memories(b))
    return b.finish(grid, warps=4)


@tile.function
def _combine(x: PagedShape, plan: PagedPlan, own: Any, row: Any, memory: dict[str, Any]) -> None:
    heads, parts_of, bounds = x.key_heads, (memory["partial"], memory["sums"]), plan.bounds(x)
    range_, head = own // heads, own % heads

    def field(name: str) -> Any:
        least, most = bounds[name]
        return bounded(memory["items"][range_, FIELDS.index(name)], name, most, least)

    begin, end, part, first, parts = map(field, ("start", "stop", "partial", "from", "parts"))
    token, tokens = map(field, ("token", "tokens"))
    second = (begin <= end) & (tile.cast(part, int64) == first + 1)
    if second & (row // x.group < tokens):
        shape, where = (TOGETHER, 1, x.value_width), (first, head, row)
        place = (token + row // x.group, head * x.group + row % x.group, 0)
        tile.store(memory["out"], place, mixed(parts_of, where, parts, shape, 1))


@tile.function
def mixed(
    memories: Sequence[Any],
    where: tuple[Any, Any, Any],
    parts: Any,
    shape: tuple[int, int, int],
    real: int,
) -> Any:
    """Results (rows, width) of the parts from the first on: `memories` are partial and sums,
    `where` is (first, key head, row), `shape` (parts at a time, rows, width); `real` rows count."""
    (partial, sums), (first, *which), (together, rows, wide) = memories, where, shape
    best, total = tile.full((rows,), -tile.INF), tile.zeros((rows,))
    result = tile.zeros((rows, wide))
    for part in tile.range(0, parts, together):
        there = (tile.arange(together) + part < parts)[:, None]
        if real < rows:
            there = there & (tile.arange(rows) < real)
        logs = tile.load(sums, (first + part, *which), (together, rows), axes=(0, 2), mask=there)
        at = (first + part, *which, 0)
        found = tile.load(partial, at, shape, axes=(0, 2, 3), mask=there[:, :, None])
        logs = tile.where(there, logs, -tile.INF)
        now = tile.maximum(best, tile.max(logs, 0))
        base = finite(now)
        weights, shrink = tile.exp2(logs - base), tile.exp2(best - base)
        total = tile.multiply_add(total, shrink, tile.sum(weights, 0))
        more = tile.sum(found * weights[:, :, None], 0)
        best, result = now, tile.multiply_add(result, shrink[:, None], more)
    return result / some_sum(total)[:, None]

"""The engines of attention on CPUs: products by vectors, or on a unit of 16 x 16 tiles (AMX).

An engine brings blocks of tokens into scratch as its products read them, and multiplies. A block of
keys (or values) is a left operand: its rows are tokens, or d where it is turned. A block of queries
(or gradients of results) is a right one: its columns are tokens, or d where tokens go deep. What
is computed of scores comes back as an operand of the next product through `Weights`. `choose` gives
the Plan, which says which engine it is, and how large blocks are.

Invariant: rows of a left operand past the last key repeat it on the unit, and d past its end is 0;
`whole` says how many rows of scores a product gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from ... import tile
from ...core.config import invariant
from ...core.dtype import bfloat16
from ...core.target import Target
from ...ir.symbol import high, round_up
from ..attention.shape import AttentionShape
from ..attention.softmax import first_of
from .source import Source

PAD = 16  # elements after each row of scratch: breaks power-of-two strides
TILE = 16
PAIR = 2 * TILE

Operand = Callable[..., Any]


@dataclass(frozen=True)
class CpuPlan:
    """Tunable choices: queries of a program, keys of a block, the register tile."""

    queries: int
    keys: int
    rows: int  # most rows of a register tile
    across: int  # vectors of it
    lanes: int
    strip: int  # queries whose scores are in scratch at a time
    aligned: bool  # blocks of keys begin at multiples of `keys`, whoever reads them
    unit: str = ""  # a matrix unit of the Target, or vectors

    @property
    def panel(self) -> int:
        """Columns of the register tile."""
        return self.across * self.lanes


def fitting(x: AttentionShape, target: Target, most: int, least: int) -> int:
    """Queries of a program, a multiple of `least`: few enough that every worker has several."""
    count, heads = max(1, high(x.queries)), high(x.batch) * x.heads
    queries = most
    while queries > 2 * least and heads * -(-count // queries) < 4 * target.cores:
        queries //= 2
    return min(queries, round_up(count, least))


def choose(x: AttentionShape, target: Target, backward: bool = False) -> CpuPlan:
    """The Plan for a shape: blocks that leave scores, keys and values in the L2 cache; backward has
    fewer keys, since more lies beside them."""
    lanes, aligned = target.lanes(x.dtype.wide), invariant() and not backward
    units = [
        u.name
        for u in target.matrix_units(x.dtype, x.dtype)
        if (u.m, u.n, u.k) == (TILE, TILE, PAIR) and x.dtype is bfloat16
    ]
    if units and lanes == TILE:
        queries = fitting(x, target, 128 if backward else 512, PAIR)
        wide = 64 < max(x.width, x.value_width) <= 128
        block = 128 if backward else 512 if wide else 256
        keys = min(block, PAIR * max(1, -(-high(x.keys) // PAIR)))
        strip = queries if backward else 64 if queries % 64 == 0 else PAIR
        return CpuPlan(queries, keys, TILE, 2, TILE, strip, aligned, units[0])
    rows = 8 if target.multiplies_by_lane else 13 if target.vector_registers >= 32 else 5
    across, panel = 2, 2 * lanes  # vectors of a register tile, and their elements
    if backward:
        queries = max(panel, min(128, round_up(high(x.queries), panel)))
    else:
        queries = fitting(x, target, 128 // panel * panel, panel)
    keys = min((130 if backward else 256) // rows * rows, round_up(high(x.keys), rows))
    return CpuPlan(queries, max(rows, keys), rows, across, lanes, queries, aligned)


class TokenBlock(NamedTuple):
    """A block of tokens: `take(head, first, count)` brings it, the others are operands."""

    take: Callable[..., None]
    plain: Operand
    turned: Operand


class Weights(NamedTuple):
    """What is computed of scores, as an operand: `put` stores so many neighbouring keys at once."""

    put: Callable[..., None]
    operand: Operand
    keys: int = 1


class Product(NamedTuple):
    """place[:, shift ...] = left @ right, added to what is there (times `fade`) if it `adds`."""

    down: Any
    across: int
    depth: Any
    left: Operand
    right: Operand
    place: Any
    adds: bool = False
    fade: Any | None = None
    shift: Any = 0


class Packing(NamedTuple):
    """How tokens lie in tiles of 16 x 32: so many together, a piece of so many elements of each;
    what is `made` of the pieces goes where `at` says."""

    tokens: int
    wide: int
    made: Callable[[Sequence[Any]], Any]
    at: Callable[[Any, Any], tuple[Any, ...]]


class Vectors:
    """Rows of a left operand times panels of columns of a right one."""

    pad = 0  # elements after each row of sums
    unit = 1  # columns that an operand's number counts

    def __init__(self, source: Source, plan: CpuPlan) -> None:
        self.source, self.plan, self.x = source, plan, source.x
        self.sum = source.x.dtype.wide

    def place(self, rows: int, columns: int, pad: int = PAD) -> Any:
        """Scratch."""
        return tile.scratch((rows, columns + pad), self.sum)

    def whole(self, count: Any) -> Any:
        """Rows of scores that a product gives."""
        return count

    @tile.function
    def clear(self, place: Any, width: int) -> None:
        """Zeros in the first columns of scratch."""
        for row in tile.range(place.shape[0]):
            place[row, 0:width] = 0.0

    # ---- operands -------------------------------------------------------------------------

    def keys(self, name: str, plain: bool, turned: bool) -> TokenBlock:
        """Blocks of keys or values."""
        place = self.place(self.plan.keys, round_up(self.x.columns(name), self.plan.panel))
        take = partial(self.copy, place, name)
        return TokenBlock(take, self.left(place), self.left(place, (1, 0)))

    def queries(self, name: str, deep: bool) -> TokenBlock:
        """Blocks of queries or gradients."""
        wide, queries = round_up(self.x.columns(name), self.plan.panel), self.plan.queries
        across, rows = self.place(wide, queries, 0), self.place(queries, wide) if deep else None

        def take(head: Any, first: Any, count: Any) -> None:
            self.take_transposed(name, head, first, across)
            if deep:
                self.copy(rows, name, head, first, count)

        return TokenBlock(take, self.right(across), self.right(rows))

    def left(self, place: Any, axes: tuple[int, int] = (0, 1)) -> Operand:
        """Some rows of a step; `axes` (1, 0) where it lies turned."""

        def read(row: Any, step: Any, size: int) -> Any:
            index = (row, step) if axes == (0, 1) else (step, row)
            return tile.load(place, index, (size, 1), axes=axes)

        return read

    def right(self, place: Any) -> Operand:
        """A panel of a step."""
        return lambda step, column: tile.load(place, (step, column), (1, self.plan.panel))

    def shifted(self, right: Operand, columns: Any) -> Operand:
        """A right operand from some column on."""
        return lambda step, column: right(step, column + columns // self.unit)

    def weights(self, scores: Any, deep: bool) -> Weights:
        """Where the scores lie; keys go deep, or down."""

        def put(key: Any, query: Any, values: Sequence[Any]) -> None:
            tile.store(scores, (key, query), values[0], axes=(1,))

        return Weights(put, self.right(scores) if deep else self.left(scores))

    @tile.function
    def copy(self, place: Any, name: str, head: Any, first: Any, count: Any) -> None:
        """place[r, :] = token first + r."""
        n = self.plan.lanes
        for r in tile.range(count):
            token = self.source.place(name, head, first + r)
            for d in range(0, self.x.columns(name), n):
                place[r, d : d + n] = self.source.load(token, d, (n,))

    @tile.function
    def take_transposed(self, name: str, head: Any, first: Any, place: Any) -> None:
        """place[:, i] = query first + i, 0 past the last."""
        n = self.plan.lanes
        for i in tile.range(0, self.plan.queries, n):
            for d in tile.range(0, self.x.columns(name), n):
                inside = first_of(n, self.source.queries - first - i)
                token = self.source.place(name, head, first + i)
                part = self.source.load(token, d, (n, n), inside)
                tile.store(place, (d, i), tile.cast(part, self.sum).T)

    # ---- products -------------------------------------------------------------------------

    @tile.function
    def product(self, of: Product) -> None:
        """What the record says; rows of its place up to the next multiple of the register tile's
        height are written too where `down` is known only at run time."""
        panel = self.plan.panel
        for start, stop, size in self.spans(of.down):
            for row in tile.range(start, stop, size):
                for column in tile.range(0, round_up(of.across, panel), panel):
                    total = tile.zeros((size, panel), self.sum)
                    if of.adds:
                        total = tile.load(of.place, (row, column), (size, panel))
                    if of.fade is not None:
                        total = total * of.fade[column : column + panel]
                    for step in tile.range(0, of.depth, unroll=4):
                        line = of.right(step, column)
                        total = tile.dot(of.left(row, step, size), line, total)
                    tile.store(of.place, (row, column), total)

    def spans(self, rows: Any) -> list[tuple[Any, Any, int]]:
        """(first, stop, step) of register tiles: of nearly equal ones."""
        most = self.plan.rows
        if not isinstance(rows, int):
            return [(0, rows, most)]
        count = -(-rows // most)
        size, longer = divmod(rows, max(1, count))
        middle = longer * (size + 1)
        spans = [(0, middle, size + 1), (middle, rows, size)]
        return [span for span in spans if span[0] < span[1]]


class TileUnit(Vectors):
    """Tiles of 16 x 16 sums; operands of bfloat16 with two of the depth side by side."""

    pad = unit = TILE

    def tiles(self, *lead: int) -> Any:
        """Scratch of tiles."""
        return tile.scratch((*lead, TILE, PAIR), bfloat16)

    def whole(self, count: Any) -> Any:
        """Pairs of tiles."""
        return tile.ceil_divide(count, PAIR) * PAIR

    # ---- operands -------------------------------------------------------------------------

    def keys(self, name: str, plain: bool, turned: bool) -> TokenBlock:
        """Tile by tile, and turned in pairs of keys."""
        keys, width = self.plan.keys, self.x.columns(name)
        rows = self.tiles(keys // TILE, -(-width // PAIR)) if plain else None
        columns = self.tiles(-(-width // TILE), keys // PAIR) if turned else None

        take = partial(self.pack, ((ROWS, rows), (TURNED, columns)), name)
        return TokenBlock(take, self.packed(rows), self.packed(columns))

    def queries(self, name: str, deep: bool) -> TokenBlock:
        """Pairs of d side by side with queries across, and pairs of queries with d across."""
        queries, width = self.plan.queries, self.x.columns(name)
        across = self.tiles(queries // TILE, -(-width // PAIR))
        rows = self.tiles(queries // PAIR, round_up(width, PAIR) // TILE) if deep else None

        def take(head: Any, first: Any, count: Any) -> None:
            given = (COLUMNS, across), (PAIRS, rows)
            self.pack(given, name, head, first, queries, self.source.queries - 1)

        return TokenBlock(
            take, lambda step, column: self.held(across, column, step, 0, 0), self.packed(rows)
        )

    def held(self, memory: Any, *index: Any) -> Any:
        """A tile in the unit's registers."""
        shape = (TILE, PAIR if memory.dtype is bfloat16 else TILE)
        return tile.matrix_load(memory, index, shape, self.plan.unit)

    def packed(self, memory: Any) -> Operand:
        """A left operand that lies tile by tile."""
        return lambda row, step: self.held(memory, row, step, 0, 0)

    def weights(self, scores: Any, deep: bool) -> Weights:
        """Rounded: in rows of pairs of keys, or row by row."""
        keys = 2 if deep else 1  # side by side
        shape = (self.plan.keys // keys, self.plan.strip * keys + PAIR)
        place = tile.scratch(shape, bfloat16)

        def put(key: Any, query: Any, values: Sequence[Any]) -> None:
            line = interleaved([value.to(bfloat16) for value in values])
            tile.store(place, (key // keys, query * keys), line, axes=(1,))

        return Weights(put, lambda r, s: self.held(place, r * TILE, s * PAIR), keys)

    @tile.function
    def pack(
        self,
        given: Sequence[tuple[Packing, Any]],
        name: str,
        head: Any,
        first: Any,
        count: Any,
        last: Any = None,
    ) -> None:
        """`count` tokens from the first on, up to whole pairs of tiles, in the places that there
        are; past the last (of them, or the one that is given) that one."""
        last = first + count - 1 if last is None else last
        source, width = self.source, self.x.columns(name)
        for how, place in [(how, place) for how, place in given if place is not None]:
            together = tile.ceil_divide(count, PAIR) * (PAIR // how.tokens)
            pieces = -(-width // how.wide)
            for i in tile.range(together):
                numbers = [
                    tile.minimum(first + i * how.tokens + r, last) for r in range(how.tokens)
                ]
                tokens = [source.place(name, head, number) for number in numbers]
                for piece in tile.range(pieces) if how.tokens >= TILE else range(pieces):
                    lines = [source.load(t, piece * how.wide, (how.wide,)) for t in tokens]
                    tile.store(place, how.at(i, piece), how.made(lines))

    # ---- products -------------------------------------------------------------------------

    @tile.function
    def product(self, of: Product) -> None:
        """As on vectors, in squares of two by two tiles."""
        if of.fade is not None:
            columns = slice(of.shift, of.shift + of.across)
            for row in tile.range(round_up(of.down, TILE)):
                of.place[row, columns] *= of.fade[columns]
        rows = tile.ceil_divide(of.down, TILE)
        odd = rows % 2 if isinstance(rows, int) else 0
        for row in tile.range(0, rows - odd, 2, bounds=(0, max(0, tile.most(rows - odd) - 2))):
            self.row(of, [row, row + 1])
        if odd:
            self.row(of, [rows - 1])

    @tile.function
    def row(self, of: Product, rows: Sequence[Any]) -> None:
        """One or two rows of tiles."""
        unit, shift = self.plan.unit, of.shift // TILE
        for column in tile.range(0, round_up(of.across, PAIR) // TILE, 2):
            spots = [(r * TILE, (column + shift + n) * TILE) for r in rows for n in range(2)]
            sums = [
                self.held(of.place, *spot)
                if of.adds
                else tile.matrix_zero((TILE, TILE), self.sum, unit)
                for spot in spots
            ]
            for step in tile.range(tile.ceil_divide(of.depth, PAIR)):
                above = [of.left(r, step) for r in rows]
                besides = [of.right(step, column + n) for n in range(2)]
                sums = [
                    tile.matrix_dot(total, above[n // 2], besides[n % 2], unit)
                    for n, total in enumerate(sums)
                ]
            for total, spot in zip(sums, spots):
                tile.matrix_store(of.place, spot, total, unit)


def turned_pairs(rows: Sequence[Any]) -> Any:
    """16 rows of 16 pairs, with the pairs of a column in a row."""
    pairs = tile.reshape(tile.stack(rows), (TILE, TILE, 2))
    return tile.reshape(tile.transpose(pairs, (1, 0, 2)), (TILE, PAIR))


def interleaved(lines: Sequence[Any]) -> Any:
    """Vectors, element by element in turn."""
    if len(lines) == 1:
        return lines[0]
    return tile.reshape(tile.stack(lines).T, (len(lines) * lines[0].shape[0],))


# keys as they are, and turned in pairs of keys; queries turned in pairs of d, and in pairs
ROWS = Packing(1, PAIR, interleaved, lambda i, d: (i // TILE, d, i % TILE, 0))
TURNED = Packing(
    PAIR,
    TILE,
    lambda lines: turned_pairs([interleaved(lines[r : r + 2]) for r in range(0, PAIR, 2)]),
    lambda i, d: (d, i, 0, 0),
)
COLUMNS = Packing(TILE, PAIR, turned_pairs, lambda i, d: (i, d, 0, 0))
PAIRS = ROWS._replace(tokens=2, wide=TILE)

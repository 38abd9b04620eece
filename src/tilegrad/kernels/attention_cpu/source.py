"""Where the tokens of attention on CPUs lie: arrays, or sequences one after another in them.

A program has a block of tokens of one sequence, which it finds among the starts if there are
several. Queries and keys are numbered within the sequence. `paged.attention_cpu` has a Source whose
keys lie in pages. Invariant: nothing is read past the end of an axis; tokens of no sequence get 0
(and log-sum-exps of -inf) from the first program of their head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from ... import tile
from ...ir.symbol import Size, floor_divide, high, modulo
from ...tile.value import index_of, size_of
from ..attention.holes import Holes
from ..attention.shape import AttentionShape
from ..attention.softmax import LN2, and_masks
from ..attention.tile_order import block_at, block_count

LINE, ASKED = 64, 256  # bytes; of so many only the first line is asked for


def below(start: Any, size: int, limit: Any) -> Any | None:
    """Which of start, start + 1, ... are less than a limit; None where all are known to be."""
    return None if tile.most(start + size - limit) <= 0 else tile.arange(size) + start < limit


class Place(NamedTuple):
    """Where tokens lie: at(name, i, d) is the index of an element of the i-th one."""

    name: str
    at: Callable[[str, Any, Any], Sequence[Any]]


class Source:
    """The tokens of a program: where q, k, v, the result and their gradients lie."""

    notes: ClassVar[dict[str, Any]] = {}  # of the Body
    memory: Mapping[str, Any]  # the parameters of the Body
    batch: Any = 0
    query_start: Any = 0  # where the sequence begins
    key_start: Any = 0
    run = 0  # keys that lie in one piece wherever a multiple of them begins; 0 for all

    def __init__(self, x: AttentionShape, lanes: int) -> None:
        self.x, self.lanes = x, lanes
        self.queries, self.keys = index_of(x.queries), index_of(x.keys)  # of the sequence
        self.several = "query_starts" in x.extras

    # ---- programs -------------------------------------------------------------------------

    def program(self, of: str, per: int, heads: int, parts: int = 1) -> tuple[Size, Any, Any, Any]:
        """The grid, a program for each head and each block of `per` queries or keys (and each part
        of the other ones); this one's block, head and part."""
        x = self.x
        count = x.keys if of == "key" else x.queries
        blocks = block_count(count, per, self.memory, self.several)
        grid = x.batch * heads * blocks * parts
        p = tile.grid(grid)
        rest = size_of(p // parts, "index")
        lane = index_of(floor_divide(rest, blocks))
        self.batch = lane // heads
        return grid, index_of(modulo(rest, blocks)), lane % heads, p % parts

    def find(self, block: Any, per: int, of: str = "query") -> tuple[Any, Any]:
        """The tokens of a block: first <= i < stop, numbers within their sequence."""
        x = self.x
        if self.several:
            _, first, spans = block_at(x, self.memory, block, per, of)
            (self.query_start, self.queries), (self.key_start, self.keys) = spans.values()
            return first, tile.maximum(first, tile.minimum(first + per, spans[of][1]))
        if "key_lengths" in x.extras:
            self.keys = self.holes(0).limit
        first = block * per
        return first, tile.minimum(first + per, index_of(x.keys if of == "key" else x.queries))

    def holes(self, head: Any, turned: bool = False) -> Holes:
        """What stands in the holes for a head."""
        starts = (self.query_start, self.key_start)
        return Holes(self.x, self.memory, self.batch, head, turned, *starts, lanes=0)

    # ---- tokens ---------------------------------------------------------------------------

    def width(self, name: str) -> int:
        """The width of q, k, v, out or of a gradient."""
        return self.x.width if name[-1] in "qk" else self.x.value_width

    def place(self, name: str, head: Any, token: Any) -> Place:
        """Where tokens from one on lie."""
        start = self.key_start if name[-1] in "kv" else self.query_start

        def at(name: str, i: Any, d: Any) -> tuple[Any, ...]:
            return self.x.lying(name, self.batch, head, start + token + i, d)

        return Place(name, at)

    def scale(self, which: int, head: Any) -> Any | None:
        """What keys (0) or values (1) of a key head are to be multiplied by; None for 1."""
        return None

    def load(
        self, place: Place, d: Any, shape: tuple[int, ...], inside: Any | None = None, i: Any = 0
    ) -> Any:
        """A tile of tokens, those `inside`, or a part of the i-th one; 0 past its width."""
        mask = self.mask(place, d, shape[-1], inside)
        axes, index = self.axes(place.name, len(shape)), place.at(place.name, i, d)
        return tile.load(self.memory[place.name], index, shape, axes=axes, mask=mask)

    def mask(self, place: Place, d: Any, size: int, inside: Any | None) -> Any | None:
        """Which elements of tokens, those that are `inside`, lie within the width."""
        rows = None if inside is None else inside[:, None]
        return and_masks(rows, below(d, size, self.width(place.name)))

    def axes(self, name: str, count: int) -> tuple[int, ...]:
        """The axes that a tile has: tokens and d, or d alone."""
        order = self.x.order(name)
        return (order.index("t"), order.index("d"))[2 - count :]

    def put(self, place: Place, d: Any, part: Any, inside: Any | None = None) -> None:
        """Write a piece of a token, or a square of those that are `inside`."""
        mask = self.mask(place, d, self.lanes, inside)
        axes, index = self.axes(place.name, part.ndim), place.at(place.name, 0, d)
        tile.store(self.memory[place.name], index, part, axes=axes, mask=mask)

    def ask(self, place: Place, i: Any) -> None:
        """Ask for a token that is read soon; of a long one machines bring neighbouring lines with
        the first."""
        memory = self.memory[place.name]
        width, size = self.width(place.name), memory.dtype.size
        for d in range(0, width, (LINE if width * size < ASKED else ASKED) // size):
            tile.prefetch(memory, place.at(place.name, i, d))

    @tile.function
    def ask_rows(self, name: str, head: Any, token: Any) -> None:
        """Ask for all lines of `lanes` tokens of an array, which a square reads soon.

        A square reads many rows at once and is no stream. Tokens that are read one after another
        (values) are: machines bring them unasked. A decode of 8 x 32 heads over 4096 keys that
        asked for arrays as for pages, values too, took a third longer on AVX-512.
        """
        memory, place = self.memory[name], self.place(name, head, token)
        for d in tile.range(0, self.width(name), LINE // memory.dtype.size):
            for r in range(self.lanes):
                tile.prefetch(memory, place.at(name, r, d))

    @tile.function
    def clear(self, block: Any, of: str, heads: Sequence[Any], results: Sequence[str]) -> None:
        """What tokens of no sequence get, by the first program of each head."""
        starts = self.memory[f"{of}_starts"]
        count = self.x.keys if of == "key" else self.x.queries
        own = self.key_start if of == "key" else self.query_start
        if block == 0:
            ends = (0, starts.shape[0] - 1)
            begin, end = (tile.hold(starts[i], "end", (0, high(count))) for i in ends)
            for lower, upper in ((0, begin), (end, index_of(count))):
                for t in tile.range(lower, upper, bounds=(0, max(0, high(count) - 1))):
                    for head in heads:
                        for name in results:
                            zeros = tile.zeros((self.lanes,), self.memory[name].dtype)
                            for d in tile.range(0, self.width(name), self.lanes):
                                self.put(self.place(name, head, t - own), d, zeros)
                        if "lse" in self.memory and "out" in results:
                            begun = self.holes(head).begun()  # a sink is all that they see
                            self.memory["lse"][0, head, t] = (
                                -tile.INF if begun is None else begun * LN2
                            )

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
from ...ir.symbol import high
from ..attention.holes import Holes
from ..attention.shape import STARTS, AttentionShape
from ..attention.softmax import LN2, box_mask, clamped, first_of
from ..attention.tile_order import block_at, block_count, number_at

LINE, ASKED = 64, 256  # bytes; of so many only the first line is asked for


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
    queries: Any  # of the sequence
    keys: Any
    run = 0  # keys that lie in one piece wherever a multiple of them begins; 0 for all

    def __init__(self, x: AttentionShape, lanes: int) -> None:
        self.x, self.lanes = x, lanes
        self.queries, self.several = x.queries, x.packed

    def find(self, block: Any, per: int, of_keys: bool) -> tuple[Any, Any]:
        """The tokens of a block: first <= i < stop, numbers within their sequence."""
        x = self.x
        if self.several:
            _, first, spans = block_at(x, self.memory, block, per, of_keys)
            (self.query_start, self.queries), (self.key_start, self.keys) = spans
            return first, first + clamped(spans[of_keys][1] - first, 0, per)
        (count, _, _), self.keys = x.side(of_keys), self.holes(0).limit
        if x.last_first(of_keys):
            block = block_count(x, per, self.memory) - 1 - block
        first = block * per
        return first, first + tile.minimum(count - first, per)

    def holes(self, head: Any, turned: bool = False) -> Holes:
        """What stands in the holes for a head."""
        starts = (self.query_start, self.key_start)
        return Holes(self.x, self.memory, self.batch, head, turned, *starts, lanes=0)

    # ---- tokens ---------------------------------------------------------------------------

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
        memory, where = self.part(place, d, shape, inside)
        return tile.load(memory, place.at(place.name, i, d), shape, **where)

    def put(self, place: Place, d: Any, part: Any, inside: Any | None = None) -> None:
        """Write a piece of a token, or a square of those that are `inside`."""
        memory, where = self.part(place, d, part.shape, inside)
        tile.store(memory, place.at(place.name, 0, d), part, **where)

    def part(self, place: Place, d: Any, shape: tuple[int, ...], inside: Any | None) -> Any:
        """The array of a tile; its axes there, tokens and d or d alone, and what of it there is."""
        name, order = place.name, self.x.order(place.name)
        axes = (order.index("t"), order.index("d"))[2 - len(shape) :]
        mask = box_mask(inside, first_of(shape[-1], self.x.columns(name) - d))
        return self.memory[name], {"axes": axes, "mask": mask}

    def ask(self, place: Place, i: Any) -> None:
        """Ask for a token that is read soon; of a long one machines bring neighbouring lines with
        the first."""
        memory = self.memory[place.name]
        width, size = self.x.columns(place.name), memory.dtype.size
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
        for d in tile.range(0, self.x.columns(name), LINE // memory.dtype.size):
            for r in range(self.lanes):
                tile.prefetch(memory, place.at(name, r, d))

    @tile.function
    def clear(
        self, block: Any, of_keys: bool, heads: Sequence[Any], results: Sequence[str]
    ) -> None:
        """What tokens of no sequence get, by the first program of each head."""
        starts, (count, _, _) = self.memory[STARTS[of_keys]], self.x.side(of_keys)
        own = self.key_start if of_keys else self.query_start
        if block == 0:
            ends = (number_at(starts, i) for i in (0, starts.shape[0] - 1))
            begin, end = (tile.hold(at, "end", (0, high(count))) for at in ends)
            for lower, upper in ((0, begin), (end, count)):
                for t in tile.range(lower, upper):
                    for head in heads:
                        for name in results:
                            zeros = tile.zeros((self.lanes,), self.memory[name].dtype)
                            for d in tile.range(0, self.x.columns(name), self.lanes):
                                self.put(self.place(name, head, t - own), d, zeros)
                        if "lse" in self.memory and "out" in results:
                            begun = self.holes(head).begun()  # a sink is all that they see
                            self.memory["lse"][0, head, t] = (
                                -tile.INF if begun is None else begun * LN2
                            )

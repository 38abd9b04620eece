"""New tokens into a paged cache, queries and keys rotated by their places, in one launch.

A program takes a token and a key head, or all of them where tokens are many: it finds the token's
request and place (the last tokens of `lengths` are the new ones), rotates the query heads of the
key heads and the keys, and writes keys and values to the page that the table names. Costs one read
and one write of everything; finding, and the sines, are done once for all heads of a program. The
token's rows are asked for first of all, so that nothing waits for them once it is found.

Where queries and keys have a norm of each head, it is done on the way, and rounded as if stored.

Pairs of a head's first `rotary` elements turn by the angle place * frequency: element i with i +
rotary / 2, or neighbours where `interleaved`. Angles, sines and products are float32, as in the
models that are run. A cache of 8 bits gets what they give, divided by the head's scale. Queries
of no request (past the last query start) become 0. A request's last token, in a page that began
in this step, leaves zeros for values in the rest of the page: whatever was there before may not be
finite.
Invariant: of the cache, what belongs to the new tokens is written, and that rest, nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ... import tile
from ...core.dtype import DType, float8_e5m2, float32
from ...core.target import Target
from ...ir.symbol import high
from ...ir.types import Memory
from ...tile.build import Body, BodyBuilder
from ..attention.shape import Parameters
from ..attention.softmax import clamped
from ..attention.tile_order import number_at
from .shape import PagedShape, parameters
from .work import request_of

CLEARED = 8  # rows that are written at once
MANY = 256  # tokens of a step from which programs that take all heads of one fill a machine
MOST_HELD = 64 * 128  # elements of a token's queries that a program holds without a spill


@dataclass(frozen=True)
class HeadNorms:
    """Norms of each head before it is turned, whole, in halves: over the root of its mean square
    and an epsilon, times a weight."""

    epsilons: tuple[float, float]  # of queries, of keys
    dtype: DType  # of the weights

    def applied(
        self, x: PagedShape, name: str, squares: Any, parts: Sequence[Any], weights: Sequence[Any]
    ) -> list[Any]:
        """Parts (float32) of heads of q or k, whose sums of squares are known: as if stored."""
        factor = tile.rsqrt(squares / x.width + self.epsilons["qk".index(name)])[:, None]
        made = (part * factor * tile.cast(weight, float32) for part, weight in zip(parts, weights))
        return [tile.cast(tile.cast(part, x.dtype), float32) for part in made]


@dataclass(frozen=True)
class Rotary:
    """How places turn queries and keys, after a norm of each head if there is one."""

    width: int  # elements of a head that are turned; 0 for none
    interleaved: bool = False  # pairs are neighbours, else halves
    factor: float = 1.0  # of cosines and sines
    norms: HeadNorms | None = None

    def whole(self, x: PagedShape) -> bool:
        """Whether heads are turned whole and in halves, as those with norms must be."""
        return self.width == x.width and not self.interleaved

    def turns(self, frequencies: Any, place: Any) -> tuple[Any, Any]:
        """Cosines and sines of a place."""
        angle = frequencies * tile.cast(place, float32)
        return tile.cos(angle) * self.factor, tile.sin(angle) * self.factor


def append_parameters(x: PagedShape, rotary: Rotary, result: str) -> Parameters:
    """q, k, v, frequencies, weights of norms, scales (of 8 bits), table, lengths, query_starts,
    keys, values, and the result."""
    made = parameters(x, ("q", "k", "v"))
    made.append(("frequencies", Memory((max(1, rotary.width // 2),), float32)))
    if rotary.norms is not None:
        made += [(name, Memory((x.width,), rotary.norms.dtype)) for name in ("q_norm", "k_norm")]
    rest = ("scales", "table", "lengths", "query_starts", "sinks", "keys", "values", result)
    return [*made, *parameters(x, rest, turned="result")]


def heads_each(x: PagedShape, target: Target) -> int:
    """Key heads that a program takes: all where tokens are enough for blocks of threads, and
    registers hold their rows."""
    many = target.has_threads and high(x.tokens) >= MANY and x.heads * x.width <= MOST_HELD
    return x.key_heads if many else 1


def append(x: PagedShape, rotary: Rotary, each: int = 1) -> Body:
    """The kernel; a program takes `each` key heads of a token."""
    b = BodyBuilder("paged_append", append_parameters(x, rotary, "turned"))
    with tile.into(b):
        _Append(x, rotary, tile.memories(b), each).run()
    return b.finish((x.tokens, x.key_heads // each), warps=4, distinct=True)


def kept(value: Any, dtype: DType, scale: Any) -> Any:
    """A float32 value as a Memory keeps it: with a scale divided by that, rounded half to even, and
    at the dtype's ends where it lies beyond."""
    if scale is not None:
        low, high = (-57344.0, 57344.0) if dtype is float8_e5m2 else (dtype.lowest, dtype.highest)
        value = value / scale
        value = tile.round(value) if dtype.is_integer else value
        value = clamped(value, float(low), float(high))
    return tile.cast(value, dtype)


@tile.function
def clear_rest(x: PagedShape, values: Any, page: tuple[Any, Any], at: Any, most: int) -> None:
    """Zeros for a head's values in the rest of a page, after a place; so many rows at once."""
    step = min(x.page, most)
    for row in tile.range(0, x.page, step):
        after = (at < tile.arange(step) + row)[:, None]
        zeros = tile.zeros((step, x.value_width), x.cache)
        tile.store(values, (*page, row, 0), zeros, mask=after)


class _Append:
    """What a program of `append` does."""

    def __init__(self, x: PagedShape, rotary: Rotary, memory: dict[str, Any], each: int) -> None:
        self.x, self.rotary, self.memory, self.each = x, rotary, memory, each
        self.half = rotary.width // 2
        self.brought: dict[str, list[Any]] = {}  # of the token, by Memory
        self.token, number = tile.grid(x.tokens, x.key_heads // each)
        self.head = number * each  # the first key head

    @tile.function
    def run(self) -> None:
        """Find the token's request, if it has one; turn and write."""
        x = self.x
        own = (self.token, self.head)
        self.read("q", (self.token, self.head * x.group), self.each * x.group)
        self.read("k", own, self.each)
        self.brought["v"] = [tile.load(self.memory["v"], (*own, 0), (self.each, x.value_width))]
        lines = {"frequencies": (0,)} if self.half else {}
        weights = ("q_norm", "k_norm") if self.rotary.norms else ()
        for name, starts in (lines | dict.fromkeys(weights, (0, self.half))).items():
            self.brought[name] = [tile.load(self.memory[name], (i,), (self.half,)) for i in starts]
        request = request_of(self.token, self.memory["query_starts"], x.requests)
        if request < x.requests:
            self.write(tile.hold(request, "request", (0, high(x.requests) - 1)))
        if request >= x.requests:
            zeros = tile.zeros((self.each * x.group, x.width), x.dtype)
            tile.store(self.memory["turned"], (self.token, self.head * x.group, 0), zeros)

    def read(self, name: str, where: Sequence[Any], count: int) -> None:
        """Heads of queries or keys: the elements of pairs that are turned, and the rest."""
        memory, start, rest = self.memory[name], self.rotary.width, self.x.width - self.rotary.width
        parts = [self.half_of(memory, where, count, i) for i in (0, 1) if self.half]
        parts += [(memory, (*where, start), (count, rest))] if rest else []
        self.brought[name] = [tile.load(*part) for part in parts]

    @tile.function
    def write(self, request: Any) -> None:
        """All of the token that belongs to the key heads."""
        x, memory = self.x, self.memory
        end = number_at(memory["query_starts"], request + 1)
        length = number_at(memory["lengths"], request)
        after = end - self.token
        place = tile.maximum(length - after, 0)
        at = tile.hold(place, "place", (0, high(x.most_pages) * x.page - 1))
        page = number_at(memory["table"], request, at // x.page)
        page = tile.hold(page, "page", (0, high(x.pages) - 1))
        angle: Any = None  # cosines and sines of the token's place
        if self.half:
            cosine, sine = self.rotary.turns(self.brought["frequencies"][0], place)
            angle = cosine[None, :], sine[None, :]
        scales: list[Any] = [None, None]
        if x.scaled:
            scales = [
                tile.load(memory["scales"], (i, self.head), (self.each,))[:, None] for i in range(2)
            ]
        heads, entry = (self.token, self.head * x.group), (page, self.head, at % x.page)
        self.rotate("q", memory["turned"], heads, angle, None)
        self.rotate("k", memory["keys"], entry, angle, scales[0])
        self.put(memory["values"], (*entry, 0), tile.cast(self.brought["v"][0], float32), scales[1])
        count = end - number_at(memory["query_starts"], request)
        if (length - count <= at - at % x.page) & (after == 1):  # the page began in this step
            for number in tile.range(self.each):
                own = (page, self.head + number)
                clear_rest(x, memory["values"], own, at % x.page, CLEARED)

    def rotate(self, name: str, into: Any, to: Sequence[Any], angle: Any, scale: Any) -> None:
        """Heads of queries or keys into another Memory, their first elements turned."""
        parts = [tile.cast(part, float32) for part in self.brought[name]]
        count = parts[0].shape[0]
        if angle is not None:
            first, second = parts[:2]
            if self.rotary.norms is not None:
                squares = tile.sum(first * first + second * second, 1)
                weights = [weight[None, :] for weight in self.brought[f"{name}_norm"]]
                first, second = self.rotary.norms.applied(self.x, name, squares, parts, weights)
            cosine, sine = angle
            turned = first * cosine - second * sine, second * cosine + first * sine
            for i, value in enumerate(turned):
                self.put(into, self.half_of(into, to, count, i)[1], value, scale)
        if self.rotary.width < self.x.width:
            self.put(into, (*to, self.rotary.width), parts[-1], scale)

    def put(self, into: Any, at: Any, value: Any, scale: Any) -> None:
        """Store elements of heads as a Memory keeps them."""
        tile.store(into, at, kept(value, into.dtype, scale), axes=(1, into.ndim - 1))

    def half_of(
        self, memory: Any, where: Sequence[Any], count: int, number: int
    ) -> tuple[Any, ...]:
        """The first or second elements of the pairs of some heads: array, index and shape, or
        linear offsets of every other element."""
        if not self.rotary.interleaved:
            return memory, (*where, number * self.half), (count, self.half)
        start: Any = number
        strides = memory.type.element_strides()
        for i, stride in zip(where, strides):
            start = start + i * stride
        head, pair = tile.arange(count)[:, None], tile.arange(self.half)[None, :]
        return memory, head * strides[1] + pair * 2 + start, None

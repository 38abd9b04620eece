"""New tokens into a paged cache, queries and keys rotated by their places, in one launch.

A program takes a token and a key head: it finds the token's request and place (the last tokens of
`lengths` are the new ones), rotates the query heads of the key head and the key, and writes key
and value to the page that the table names. Costs one read and one write of everything.

Pairs of a head's first `rotary` elements turn by the angle place * frequency: element i with
i + rotary / 2, or neighbours where `interleaved`. Angles, sines and products are float32, as in
the models that are run. Tokens of no request (past the last query start) are left alone.
A request's last token, in a page that began in this step, leaves zeros for values in the rest of
the page: whatever was there before may not be finite.
Invariant: of the cache, what belongs to the new tokens is written, and that rest, nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.dtype import DType, float32, int32, int64
from ...core.errors import InternalError
from ...ir.node import Node
from ...ir.symbol import Size, high
from ...ir.types import Memory
from ...tile import ops
from ...tile.build import Body, BodyBuilder
from .shape import PagedShape, cache_parameters

CLEARED = 8  # rows that are written at once


@dataclass(frozen=True)
class Rotary:
    """How places turn queries and keys."""

    width: int  # elements of a head that are turned; 0 for none
    interleaved: bool = False  # pairs are neighbours, else halves
    factor: float = 1.0  # of cosines and sines


def append_parameters(x: PagedShape, rotary: Rotary) -> list[tuple[str, Memory]]:
    """q, k, v, frequencies, scales (of 8 bits), table, lengths, query_starts, keys, values, and
    the turned queries."""
    made = [
        ("q", Memory((x.tokens, x.heads, x.width), x.dtype)),
        ("k", Memory((x.tokens, x.key_heads, x.width), x.dtype)),
        ("v", Memory((x.tokens, x.key_heads, x.value_width), x.dtype)),
        ("frequencies", Memory((max(1, rotary.width // 2),), float32)),
    ]
    if x.scaled:
        made.append(("scales", Memory((2,), float32)))
    made += [
        ("table", Memory((x.requests, x.most_pages), int32)),
        ("lengths", Memory((x.requests,), int32)),
        ("query_starts", Memory((x.requests + 1,), int32)),
        *cache_parameters(x),
        ("turned", Memory((x.tokens, x.heads, x.width), x.dtype, use="result")),
    ]
    return made


def append(x: PagedShape, rotary: Rotary, name: str = "paged_append") -> Body:
    """The kernel."""
    if rotary.width % 2 or rotary.width > x.width:
        raise InternalError("kernels.paged.append", f"{rotary} for heads of {x.width}")
    return _Append(x, rotary, BodyBuilder(name, append_parameters(x, rotary))).build()


class _Append:
    """Builds the Body of `append`."""

    def __init__(self, x: PagedShape, rotary: Rotary, b: BodyBuilder) -> None:
        self.x, self.rotary, self.b = x, rotary, b
        self.memory = {p.attrs["name"]: p for p in b.parameters}
        self.token = b.program(0, x.tokens)
        self.head = b.program(1, x.key_heads)

    def build(self) -> Body:
        """Find the place, turn, write."""
        b, x = self.b, self.x
        request, there = self.find()

        def write() -> Sequence[Node]:
            self.write(b.atom("request", request, 0, high(x.requests) - 1))
            return ()

        b.branch(there, write)
        return b.finish((x.tokens, x.key_heads), warps=4, distinct=True)

    def find(self) -> tuple[Node, Node]:
        """The token's request, and whether it has one."""
        b, x = self.b, self.x
        size = 1 << max(0, high(x.requests) - 1).bit_length()
        line = b.add(ops.iota(size=size, dtype=int64))
        inside = b.apply("less", line, b.index(x.requests))
        ends = b.load(self.memory["query_starts"], (1,), (size,), (0,), inside)
        over = b.apply("less_equal", b.cast(ends, int64), b.index(self.token))
        over = b.cast(b.apply("bit_and", over, inside), int64)
        request = b.add(ops.reduce(over, axis=0, kind="sum"))
        return request, b.apply("less", request, b.index(x.requests))

    def write(self, request: Size) -> None:
        """All of the token that belongs to the key head."""
        b, x, memory = self.b, self.x, self.memory
        end = b.cast(b.load(memory["query_starts"], (request + 1,)), int64)
        length = b.cast(b.load(memory["lengths"], (request,)), int64)
        after = b.apply("subtract", end, b.index(self.token))
        place = b.apply("maximum", b.apply("subtract", length, after), b.constant(0, int64))
        at = b.atom("place", place, 0, high(x.most_pages) * x.page - 1)
        page = b.cast(b.load(memory["table"], (request, at // x.page)), int64)
        slot = (b.atom("page", page, 0, high(x.pages) - 1), self.head, at % x.page)
        angle = self.angles(place)
        scales = [b.load(memory["scales"], (i,)) for i in range(2)] if x.scaled else []
        queries = (self.token, self.head * x.group)
        self.turn(memory["q"], memory["turned"], queries, queries, x.group, angle, None)
        self.turn(
            memory["k"],
            memory["keys"],
            (self.token, self.head),
            slot,
            1,
            angle,
            scales[0] if scales else None,
        )
        value = b.load(memory["v"], (self.token, self.head, 0), (x.value_width,), (2,))
        value = self.kept(b.cast(value, float32), x.cache, scales[1] if scales else None)
        b.store(memory["values"], value, (*slot, 0), (3,))
        count = b.apply("subtract", end, b.cast(b.load(memory["query_starts"], (request,)), int64))
        last = b.apply("equal", after, b.index(1))
        self.clear(slot, at, b.apply("subtract", length, count), last)

    def clear(self, slot: tuple[Size, Size, Size], at: Size, before: Node, last: Node) -> None:
        """Zeros in the rest of a page, by the last token of a request if the page is new."""
        b, x, (page, head, row) = self.b, self.x, slot
        new = b.apply("less_equal", before, b.index(at - row))
        step = min(x.page, CLEARED)

        def rows(first: Size, _: list[Node]) -> Sequence[Node]:
            shape = (step, x.value_width)
            line = b.apply("add", b.add(ops.iota(size=step, dtype=int64)), b.index(first))
            after = b.apply("less", b.index(row), line)
            after = b.broadcast(b.add(ops.reshape(after, shape=(step, 1))), shape)
            b.store(
                self.memory["values"],
                b.constant(0.0, x.cache, shape),
                (page, head, first, 0),
                (2, 3),
                after,
            )
            return ()

        def zeros() -> Sequence[Node]:
            b.loop("row", 0, x.page, step, rows, [])
            return ()

        b.branch(b.apply("bit_and", new, last), zeros)

    def angles(self, place: Node) -> tuple[Node, Node] | None:
        """Cosines and sines of the token's place."""
        b, half = self.b, self.rotary.width // 2
        if not half:
            return None
        found = b.load(self.memory["frequencies"], (0,), (half,), (0,))
        angle = b.apply("multiply", found, b.cast(place, float32))
        factor = b.constant(self.rotary.factor, float32)
        both = [b.apply("multiply", b.apply(name, angle), factor) for name in ("cos", "sin")]
        cosine, sine = (b.add(ops.reshape(v, shape=(1, half))) for v in both)
        return cosine, sine

    def kept(self, value: Node, dtype: DType, scale: Node | None) -> Node:
        """A value as a Memory keeps it."""
        b = self.b
        if scale is not None:
            value = b.apply("divide", value, b.broadcast(scale, value.shape))
        return b.cast(value, dtype)

    def turn(
        self,
        source: Node,
        into: Node,
        where: Sequence[Size],
        to: Sequence[Size],
        count: int,
        angle: tuple[Node, Node] | None,
        scale: Node | None,
    ) -> None:
        """Heads from one Memory to another, their first elements turned."""
        b, width, rotary = self.b, self.x.width, self.rotary
        ends = (len(source.shape), len(into.shape))
        if angle is not None:
            first, second = (b.cast(self.half(source, where, count, i), float32) for i in (0, 1))
            cosine, sine = (b.broadcast(v, first.shape) for v in angle)
            turned = (
                b.apply(
                    "subtract",
                    b.apply("multiply", first, cosine),
                    b.apply("multiply", second, sine),
                ),
                b.apply(
                    "add", b.apply("multiply", second, cosine), b.apply("multiply", first, sine)
                ),
            )
            for i, value in enumerate(turned):
                self.write_half(into, to, self.kept(value, into.dtype, scale), i)
        rest = width - rotary.width
        if rest:
            shape, axes = (count, rest), [(e - 2, e - 1) for e in ends]
            value = b.load(source, (*where, rotary.width), shape, axes[0])
            value = self.kept(b.cast(value, float32), into.dtype, scale)
            b.store(into, value, (*to, rotary.width), axes[1])

    def half(self, memory: Node, where: Sequence[Size], count: int, number: int) -> Node:
        """The first or second elements of the pairs of some heads."""
        b, half = self.b, self.rotary.width // 2
        if self.rotary.interleaved:
            return b.gather(memory, self.offsets(memory, where, count, number))
        rank = len(memory.shape)
        return b.load(memory, (*where, number * half), (count, half), (rank - 2, rank - 1))

    def write_half(self, memory: Node, where: Sequence[Size], value: Node, number: int) -> None:
        """Write what `half` reads."""
        b, half, count = self.b, self.rotary.width // 2, value.shape[0]
        if self.rotary.interleaved:
            b.scatter(memory, value, self.offsets(memory, where, count, number))
            return
        rank = len(memory.shape)
        b.store(memory, value, (*where, number * half), (rank - 2, rank - 1))

    def offsets(self, memory: Node, where: Sequence[Size], count: int, number: int) -> Node:
        """Linear offsets of every other element."""
        b, half = self.b, self.rotary.width // 2
        start: Size = number
        for i, stride in zip(where, memory.type.element_strides()):  # type: ignore[union-attr]
            start = start + i * stride
        head = b.add(ops.reshape(b.add(ops.iota(size=count, dtype=int64)), shape=(count, 1)))
        pair = b.add(ops.reshape(b.add(ops.iota(size=half, dtype=int64)), shape=(1, half)))
        line = b.apply(
            "add",
            b.apply("multiply", head, b.constant(self.x.width, int64)),
            b.apply("multiply", pair, b.constant(2, int64)),
        )
        return b.apply("add", line, b.index(start))

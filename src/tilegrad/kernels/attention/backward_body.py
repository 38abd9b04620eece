"""The Body of attention's backward whose programs keep tokens of one side and loop over the other.

A producer brings what is kept and fills a ring with blocks of the other side; two consumers
(`backward_consumer`) keep 64 tokens each. Programs of keys see scores transposed (keys as rows), so
that p and ds are left operands in the registers they were made in; what is known of each query
(lse, delta) comes beside the ring. Programs of queries see scores the right way round.

Invariant: what is outside of the tokens, of the band or of a row without a seen key adds exactly
0; sums over blocks go in the order of the blocks, but for dq where a Plan is `fast`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ... import tile
from ...core.dtype import int32
from ...ir.symbol import floor_divide
from ...tile.build import Body, BodyBuilder
from ...tile.value import index_of
from .backward_consumer import BackwardConsumer
from .backward_plan import OWN, ROWS, BackwardPlan, columns_of
from .holes import Holes
from .shape import AttentionShape, Parameters, swizzled, tokens_of
from .softmax import LOG2_E, and_masks, line
from .tile_order import block_count, corner, sequence_at, span_of

PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240  # of a thread


class BackwardBody:
    """Writes one Body."""

    def __init__(
        self,
        x: AttentionShape,
        plan: BackwardPlan,
        gives: Sequence[str],
        parameters: Parameters,
        name: str,
    ) -> None:
        self.x, self.plan, self.gives = x, plan, gives
        self.of_keys = "dq" not in gives
        self.b = BodyBuilder(name, parameters)
        self.memory = {n: tile.memory(p) for (n, _), p in zip(parameters, self.b.parameters)}
        self.fast = plan.fast and self.of_keys
        self.with_changes = "dv" not in gives or "dk" in gives  # ds, and a product with it
        self.columns = plan.queries if self.of_keys else plan.keys
        self.stages = plan.query_stages if self.of_keys else plan.key_stages
        self.heads, self.group = (x.key_heads, x.group) if self.of_keys else (x.heads, 1)
        wide = columns_of(x, plan)
        self.pieces = (2 if self.fast and wide[0] == 128 else 1, 1)  # columns of places, apart
        self.wide = (wide[0] // self.pieces[0], wide[1])
        self.packed = "query_starts" in x.extras
        self.data_says = self.packed or "key_lengths" in x.extras  # how many tokens there are
        tokens = x.keys if self.of_keys else x.queries
        self.blocks = block_count(tokens, ROWS, self.memory, self.packed)

    def build(self) -> Body:
        """Places, then the roles beside each other."""
        programs = self.x.batch * self.heads * self.blocks
        with tile.into(self.b):
            self.place()
            self.locate(tile.grid(programs))
            self.begin, self.end = self.seen_blocks()
            with tile.role("producer", 4, PRODUCER_REGISTERS):
                self.producer()
            for own in range(2):
                with tile.role(f"consumer{own}", 4, CONSUMER_REGISTERS):
                    BackwardConsumer(self, own).run()
        return self.b.finish((programs,), plan=self.plan)

    def place(self) -> None:
        """What is kept, the ring, what is known of each query; ds on its way to dq."""
        dtype, pairs = self.x.dtype, list(zip(self.pieces, self.wide))
        kept = pairs if self.with_changes else pairs[:1]
        self.kept = [swizzled(dtype, 2, n, OWN, w) for n, w in kept]
        self.ring = [swizzled(dtype, self.stages, n, self.columns, w) for n, w in pairs]
        self.ready = tile.barrier("ready", 1)
        full = [tile.barrier(f"full{i}", 1, self.stages) for i in range(2)]
        empty = tile.barrier("empty", 2, self.stages)
        self.come = [tile.Pipeline(one, empty) for one in full]
        if self.of_keys:
            self.known = tile.shared((self.stages, 2, self.columns))
            self.told = tile.Pipeline(tile.barrier("told", 1, self.stages), empty)
        if self.fast:  # (turn, keys, queries, ...)
            self.passed = swizzled(dtype, 2, 2, self.columns // 64, OWN, 64)

    # ---- which tokens -----------------------------------------------------------------------

    def locate(self, program: Any) -> None:
        """Batch, head and tokens of a program; blocks that see most begin first."""
        x, hold = self.x, tile.hold
        lane, block = corner(program, x.batch * self.heads, self.blocks, self.plan.section)
        block = tile.minimum(block, self.blocks - 1)
        if not self.of_keys and x.band[1] is not None:  # the last see most
            block = self.blocks - 1 - block
        block = hold(block, "block")
        self.batch, self.head = hold(lane // self.heads, "batch"), hold(lane % self.heads, "head")
        self.query_start = self.key_start = 0
        self.queries = index_of(x.queries)
        if not self.packed:
            self.first = hold(block * ROWS, "first")
            self.limit = Holes(x, self.memory, self.batch, 0).limit
            return
        sides = [("query_starts", x.queries), ("key_starts", x.keys)]
        own, most = sides[self.of_keys]
        sequence = sequence_at(block, self.memory[own], most, ROWS)
        (self.query_start, self.queries), (self.key_start, self.limit) = (
            span_of(self.memory[name], sequence, tokens, "count") for name, tokens in sides
        )
        start = self.key_start if self.of_keys else self.query_start
        self.first = hold(tile.maximum(block - (start // ROWS + sequence), 0) * ROWS, "first")

    def seen_blocks(self) -> tuple[Any, Any]:
        """The blocks of the other side that tokens of this program see, or are seen by."""
        before, after = self.x.band  # of key - query
        if self.of_keys:
            before, after = (None if s is None else -s for s in (after, before))
        begin: Any = 0
        if before is not None:
            begin = tile.maximum(self.first + before, 0)
        end = self.queries if self.of_keys else self.limit
        if after is not None:
            end = tile.maximum(tile.minimum(end, self.first + after + ROWS), 0)
        if self.data_says:  # nothing is looped over for tokens past the last
            count = self.limit if self.of_keys else self.queries
            end = end * tile.minimum(tile.maximum(count - self.first, 0), 1)
        first = tile.hold(begin // self.columns, "begin")
        last = tile.ceil_divide(end, self.columns)
        # stages are counted round for any number of blocks, whatever the lengths are
        bounds = (0, tile.most(last) + 4 * self.stages) if self.data_says else None
        return first, tile.hold(last, "end", bounds)

    def count(self, member: Any, block: Any) -> Any:
        """How many blocks came before."""
        return member * (self.end - self.begin) + block - self.begin

    def place_of(self, step: Any) -> Any:
        """The block that a step takes. Where programs of a head add to one another's sums,
        each begins elsewhere, so that they do not meet."""
        if not self.fast or self.x.band != (None, None) or self.data_says:
            return step
        count = self.end
        shift = (self.first // ROWS * count).size if not isinstance(self.first, int) else 0
        place = step + index_of(floor_divide(shift, self.blocks))
        past = tile.minimum(tile.maximum(place - count + 1, 0), 1)
        return tile.hold(place - count * past, "place")

    @tile.function
    def for_blocks(self, body: Callable[[Any, Any], None]) -> None:
        """body(member of the group, block) in order."""
        for member in tile.range(self.group):
            for block in tile.range(self.begin, self.end):
                body(member, block)

    def holes(self, member: Any) -> Holes:
        """The holes of a query head of the group."""
        head = self.head * self.group + member if self.of_keys else self.head
        starts = (self.query_start, self.key_start)
        return Holes(self.x, self.memory, self.batch, head, self.of_keys, *starts)

    def tokens(self, name: str, head: Any, token: Any, shape: Any, column: int = 0) -> Any:
        """Tokens of q, k, v, dout or a gradient."""
        like = "out" if name == "dout" else name[-1]
        order = self.x.orders[("q", "k", "v", "out").index(like)]
        token = token + (self.key_start if like in "kv" else self.query_start)
        return tokens_of(self.memory[name], order, (self.batch, head, token), shape, column)

    # ---- the producer -----------------------------------------------------------------------

    def copy(self, number: int, at: Any, token: Any, member: Any, full: Any) -> None:
        """Bring a box of tokens into what is kept (0, 1) or the ring (2, 3)."""
        names = ("k", "v", "q", "dout") if self.of_keys else ("q", "dout", "k", "v")
        name = names[number]
        place = self.kept[number] if number < 2 else self.ring[number - 2]
        head = self.holes(member).head
        if name in "kv":
            head = self.head if self.of_keys else self.head // self.x.group
        for piece in range(self.pieces[number % 2]):
            part = place[at, piece]
            column = piece * self.wide[number % 2]
            tile.copy_async(part, self.tokens(name, head, token, part.shape, column), full)

    def producer(self) -> None:
        """Bring what is kept, then fill the ring."""
        self.ready.expect(0, sum(place.bytes for place in self.kept))
        for number in range(len(self.kept)):
            for half in range(2):
                self.copy(number, half, self.first + OWN * half, 0, self.ready[0])

        def one(member: Any, block: Any) -> None:
            stage = self.come[0].acquire(self.count(member, block))
            token = self.place_of(block) * self.columns
            for number, (ring, come) in enumerate(zip(self.ring, self.come)):
                come.full.expect(stage, ring[0].bytes)
                self.copy(2 + number, stage, token, member, come.full[stage])
            if self.of_keys:
                for number, value in enumerate(self.facts(member, token, self.columns)):
                    tile.write(self.known[stage, number], value)
                self.told.full.arrive(stage)

        self.for_blocks(one)

    def facts(self, member: Any, token: Any, count: int) -> list[Any]:
        """-lse in units of log 2 and delta of some queries; exp2 of anything plus the first is 0
        where there is no query, or none that sees a key."""
        index = (self.batch, self.holes(member).head, token + self.query_start)
        step = self.columns if self.of_keys else ROWS  # queries that are taken at once
        inside = None
        if not isinstance(self.queries, int) or self.queries % max(count, step):
            left = tile.cast(self.queries - token, int32)
            inside = line(count) < left
        lse, delta = (
            tile.load(self.memory[n], index, (count,), mask=inside) for n in ("lse", "delta")
        )
        some = and_masks(inside, lse > -tile.INF)
        return [tile.where(some, lse * -LOG2_E, -tile.INF), delta]

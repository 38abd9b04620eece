"""Backward of attention on matrix units that run beside the threads: gradients of q, k and v.

With p = exp(s - lse) recomputed and ds = p (dout v^T - delta): dv = p^T dout, dk = scale ds^T q,
dq = scale ds k. By default there are two launches: programs of keys give dk and dv, programs of
queries give dq. Both recompute the scores: 7 products instead of 5, no sums between programs, and
the same inputs give the same bits. A `fast` Plan has 5 products: programs of keys also add dq to
float32 sums that a launch before clears and one after rounds; their order is nobody's.

A producer brings the tokens of one side that a program keeps and fills a ring with blocks of the
other side; two consumers keep 64 tokens each. Programs of keys see scores transposed, so that p and
ds are left operands in the registers they were made in. A consumer multiplies scores of a block and
dout v^T first; p comes from the first while the second runs, then ds, and their products, which the
next block waits for. Registers of a product that is under way are neither read nor written.

Invariant: any sizes do whose rows are a multiple of 16 bytes; what is outside of the tokens, of the
band or of a row without a seen key adds exactly 0; sums over blocks go in the order of the blocks,
but for dq where a Plan is `fast`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any

from ... import tile
from ...core.dtype import float32
from ...ir.symbol import Size, ceil_divide
from ...ir.types import Memory
from ...tile.build import Body, BodyBuilder
from .holes import Holes
from .plan import KEY_STAGES, OWN, REGISTERS, ROWS, BackwardPlan, backward_why_not, columns_of
from .shape import GRADIENTS, AttentionShape, parameters, refuse, swizzled
from .softmax import box_mask, clamped, first_of, times
from .tile_order import block_count, corner, reached, tokens_at


def attention_backward(
    x: AttentionShape,
    plan: BackwardPlan,
    more: Sequence[Memory] = (),
    name: str = "attention_backward",
) -> list[Body]:
    """All launches; parameters as `parameters` names them, and `sums` between launches."""
    refuse("kernels.attention.backward", backward_why_not(x, plan), plan, x)
    given = dict(parameters(x, more, GRADIENTS))
    given["sums"] = Memory(sums_shape(x, plan), float32, use="state")

    def body(side: str, *gives: str) -> Body:
        known = [(n, m) for n, m in given.items() if m.use == "value" or n in gives]
        return BackwardBody(x, plan, gives, BodyBuilder(f"{name}_{side}", known)).build()

    if plan.fast:
        rounds = rounded(x, plan, given["dq"], f"{name}_round")
        return [clear(x, plan, f"{name}_clear"), body("keys", "dk", "dv", "sums"), rounds]
    if plan.apart:
        return [body("values", "dv"), body("keys", "dk"), body("queries", "dq")]
    return [body("keys", "dk", "dv"), body("queries", "dq")]


# ---- sums of dq ---------------------------------------------------------------------------------


def sums_shape(x: AttentionShape, plan: BackwardPlan) -> tuple[Size, ...]:
    """Sums of dq as threads hold an accumulator: (batch and head, block of queries, half of it,
    eight columns, warp, row, two columns, upper or lower eight rows, column)."""
    columns = min(64, columns_of(x, plan)[0])
    blocks = ceil_divide(x.queries, plan.queries)
    return (x.batch * x.heads, blocks, 2, columns // 8, 4, 8, 4, 2, 2)


def clear(x: AttentionShape, plan: BackwardPlan, name: str) -> Body:
    """Set all sums to 0."""
    shape = sums_shape(x, plan)
    b = BodyBuilder(name, [("sums", Memory(shape, float32, use="result"))])
    with tile.into(b):
        at = tile.grid(*shape[:3])
        tile.store(tile.memory(b.parameters[0])[(*at, ...)], tile.zeros(shape[3:]))
    return b.finish(shape[:3])


def rounded(x: AttentionShape, plan: BackwardPlan, dq: Memory, name: str) -> Body:
    """dq from its sums."""
    shape = sums_shape(x, plan)
    b = BodyBuilder(name, [("sums", Memory(shape, float32)), ("dq", dq)])
    with tile.into(b):
        sums, out = map(tile.memory, b.parameters)
        lane, block, half = tile.grid(*shape[:3])
        held = tile.load(sums[lane, block, half, ...])
        columns = 8 * int(shape[3])
        value = tile.reshape(tile.transpose(held, (1, 4, 2, 0, 3, 5)), (64, columns)) * x.scale
        apart = plan.queries == 64  # the halves are columns, else queries
        token = block * plan.queries
        token, column = (token, half * 64) if apart else (token + half * 64, 0)
        mask = box_mask(first_of(64, x.queries - token), first_of(columns, x.width - column))
        holes = Holes(x, {"dq": out}, lane // x.heads, lane % x.heads)
        target = holes.tokens("dq", token, (64, columns), column)
        tile.store(target, tile.cast(value, x.dtype), mask=mask)
    return b.finish(shape[:3])


# ---- a launch -----------------------------------------------------------------------------------


class BackwardBody:
    """Writes one Body."""

    def __init__(
        self, x: AttentionShape, plan: BackwardPlan, gives: Sequence[str], b: BodyBuilder
    ) -> None:
        self.x, self.plan, self.gives, self.b = x, plan, gives, b
        self.of_keys, self.fast = "dq" not in gives, plan.fast
        self.memory = tile.memories(b)
        self.with_changes = gives != ("dv",)  # ds, and a product with it
        self.columns = plan.queries if self.of_keys else plan.keys
        self.stages = plan.query_stages if self.of_keys else KEY_STAGES
        _, self.heads, self.group = x.side(self.of_keys)
        wide = columns_of(x, plan)
        self.pieces = (2 if self.fast and wide[0] == 128 else 1, 1)  # columns of places, apart
        self.wide = (wide[0] // self.pieces[0], wide[1])
        self.data_says = x.packed or "key_lengths" in x.extras  # how many tokens there are
        self.blocks = block_count(x, ROWS, self.memory, self.of_keys)

    def build(self) -> Body:
        """Places, then the roles beside each other."""
        programs, (few, many) = self.x.batch * self.heads * self.blocks, REGISTERS[2]
        with tile.into(self.b):
            self.place()
            self.locate(tile.grid(programs))
            self.begin, self.end = self.seen_blocks()
            with tile.role("producer", 4, few):
                self.producer()
            for own in range(2):
                with tile.role(f"consumer{own}", 4, many):
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
        """Batch, head and tokens of a program."""
        x = self.x
        lane, block = corner(program, x.batch * self.heads, self.blocks, self.plan.section)
        self.tokens = own = tokens_at(x, self.memory, lane, block, ROWS, self.of_keys)
        self.first, self.queries, self.limit = own.first, own.queries, own.limit

    def seen_blocks(self) -> tuple[Any, Any]:
        """The blocks of the other side that tokens of this program see, or are seen by."""
        sides, first = self.x.sides(self.of_keys), self.first
        own, other = [self.queries, self.limit][:: -1 if self.of_keys else 1]
        begin, end = reached(sides, first, first + ROWS, other)
        if self.data_says:  # nothing is looped over for tokens past the last
            end = end * clamped(own - first, 0, 1)
        begin = tile.hold(begin // self.columns, "begin")
        last = tile.ceil_divide(end, self.columns)
        # stages are counted round for any number of blocks, whatever the lengths are
        bounds = (0, tile.most(last) + 4 * self.stages) if self.data_says else None
        return begin, tile.hold(last, "end", bounds)

    def count(self, member: Any, block: Any) -> Any:
        """How many blocks came before."""
        return member * (self.end - self.begin) + block - self.begin

    def place_of(self, step: Any) -> Any:
        """The block that a step takes. Where programs of a head add to one another's sums,
        each begins elsewhere, so that they do not meet."""
        if not self.fast or self.x.band != (None, None) or self.data_says:
            return step
        count = self.end
        place = step + self.first // ROWS * count // self.blocks
        past = clamped(place - count + 1, 0, 1)
        return tile.hold(place - count * past, "place", (0, tile.most(count) - 1))

    @tile.function
    def for_blocks(self, body: Callable[[Any, Any], None]) -> None:
        """body(member of the group, block) in order."""
        for member in tile.range(self.group):
            for block in tile.range(self.begin, self.end):
                body(member, block)

    def holes(self, member: Any) -> Holes:
        """The holes of a query head of the group."""
        own = self.tokens.holes
        return replace(own, head=own.head + member)

    # ---- the producer -----------------------------------------------------------------------

    def copy(self, name: str, place: Any, at: Any, token: Any, member: Any, full: Any) -> None:
        """Bring tokens into what is kept or the ring, piece by piece."""
        for piece in range(place.shape[1]):
            part = place[at, piece]
            column = piece * part.shape[1]
            tile.copy_async(part, self.holes(member).tokens(name, token, part.shape, column), full)

    def producer(self) -> None:
        """Bring what is kept, then fill the ring."""
        self.ready.expect(0, sum(place.bytes for place in self.kept))
        names = [("q", "dout"), ("k", "v")]
        own, other = names[::-1] if self.of_keys else names
        for name, place in zip(own, self.kept):
            for half in range(2):
                self.copy(name, place, half, self.first + OWN * half, 0, self.ready[0])

        def one(member: Any, block: Any) -> None:
            stage = self.come[0].acquire(self.count(member, block))
            token = self.place_of(block) * self.columns
            for name, ring, come in zip(other, self.ring, self.come):
                come.full.expect(stage, ring[0].bytes)
                self.copy(name, ring, stage, token, member, come.full[stage])
            if self.of_keys:
                known = self.holes(member).known(token, self.columns, self.queries)
                for number, value in enumerate(known):
                    tile.write(self.known[stage, number], value)
                self.told.full.arrive(stage)

        self.for_blocks(one)


class BackwardConsumer:
    """Writes one consumer: 64 tokens, their sums over all blocks, the way out."""

    def __init__(self, body: BackwardBody, own: int) -> None:
        self.w, self.own, self.x, self.plan = body, own, body.x, body.plan
        columns, dtype = body.columns, self.x.dtype
        self.row = tile.hold(body.first + OWN * own, "row")
        self.scores = tile.register((OWN, columns))
        self.sums: list[Any] = []
        if body.with_changes:
            self.back = tile.register((OWN, columns))  # dout v^T
            wide = (OWN, body.wide[0])
            self.sums = [tile.register(wide, float32, 0.0) for _ in range(body.pieces[0])]
            self.changes = tile.register((OWN, columns), dtype)
        self.with_values = "dv" in body.gives
        if self.with_values:
            self.weights = tile.register((OWN, columns), dtype)
            self.values = tile.register((OWN, body.wide[1]), float32, 0.0)
        if body.fast:
            self.turned = tile.register((64, body.wide[0]))
        self.early = self.with_values and not self.plan.late
        # whether blocks may hold keys beyond the last, which would add something
        sums_over_keys = body.fast or not body.of_keys
        past = self.x.ends(OWN if body.of_keys else columns)
        self.ends = body.data_says or (sums_over_keys and past)
        known = [] if body.of_keys else body.holes(0).known(self.row, OWN, body.queries)
        self.rows = [fact[:, None] for fact in known]

    def run(self) -> None:
        """Every block, then the results."""
        self.w.ready.wait(0, 0)
        self.w.for_blocks(self.block)
        tile.matrix_wait(0)
        if self.w.fast:  # the other's products read these keys too
            tile.named_sync(2, 256)
        self.write()

    # ---- one block --------------------------------------------------------------------------

    @tile.function
    def block(self, member: Any, block: Any) -> None:
        """Scores and dout v^T, p and ds, and their products, which the next block waits for."""
        w, self.holes = self.w, self.w.holes(member)
        self.count = w.count(member, block)  # blocks before it
        self.stage = self.against(0, self.scores)
        tile.matrix_wait(1)  # the block before is done with its operands
        before = (self.count - 1 + w.stages) % w.stages
        if self.count > 0:
            w.come[0].empty.arrive(before)
        if w.with_changes:
            self.against(1, self.back)
        else:
            w.come[1].wait(self.count)
        if w.of_keys:
            w.told.wait(self.count)
        tile.matrix_wait(1 if w.with_changes else 0)
        token = tile.hold(w.place_of(block) * w.columns, "token")
        self.at = (token, self.row) if w.of_keys else (self.row, token)  # first query and key
        self.hide()
        far, delta = self.rows or [tile.read(w.known[self.stage, n]) for n in range(2)]
        p, slope = self.weigh(far)
        keep = self.holes.kept(p.shape, *self.at)
        given = times(p, keep)
        if self.early:
            tile.write(self.weights, tile.cast(given, self.x.dtype))
            tile.matrix_fence()
            self.add_values()
        if not w.with_changes:
            return
        if not self.early:  # long over: it keeps p from being computed behind the wait for dout v^T
            w.ready.wait(0, 0)
        tile.matrix_wait(1 if self.early else 0)
        change = times(p * (times(tile.read(self.back), keep) - delta), slope)
        self.add_changes(block, given, tile.cast(change, self.x.dtype))

    def against(self, number: int, total: Any) -> Any:
        """What is kept times a block of the ring, transposed; gives its stage."""
        w = self.w
        stage = w.come[number].wait(self.count)
        tile.matrix_fence()
        for piece in range(w.pieces[number]):
            left, right = w.kept[number][self.own, piece], w.ring[number][stage, piece]
            tile.matrix_async(total, left, right.T, piece > 0)
        tile.matrix_commit()
        return stage

    def add_values(self) -> None:
        """dv += p^T dout."""
        tile.matrix_async(self.values, self.weights, self.w.ring[1][self.stage, 0], True)
        tile.matrix_commit()

    def add_changes(self, block: Any, p: Any, change: Any) -> None:
        """dk += ds^T q, or dq += ds k; where they are added up here, dq of these queries."""
        w, stage, turn = self.w, self.w.come[0].stage(self.count), self.count % 2
        late = self.with_values and not self.early
        if late:
            tile.write(self.weights, tile.cast(p, self.x.dtype))
        tile.write(self.changes, change)
        if w.fast:  # let both consumers see ds of all keys
            for half in range(w.columns // 64):
                place = w.passed[turn, self.own, half]
                tile.write(place, change[:, 64 * half : 64 * half + 64])
            tile.fence("async")
            tile.named_sync(2, 256)
        tile.matrix_fence()
        if w.fast:
            half, piece = (0, self.own) if w.pieces[0] > 1 else (self.own, 0)
            for keys in range(2):
                passed, kept = w.passed[turn, keys, half], w.kept[0][keys, piece]
                tile.matrix_async(self.turned, passed.T, kept, keys > 0)
            tile.matrix_commit()
        if late:
            self.add_values()
        for piece, total in enumerate(self.sums):
            tile.matrix_async(total, self.changes, w.ring[0][stage, piece], True)
        tile.matrix_commit()
        if w.fast:  # dq of the block is added to what other programs add, as threads hold it
            tile.matrix_wait(1 if self.early else 2)
            place = w.place_of(block)
            lines = tile.reshape(tile.read(self.turned), (4, 2, 8, w.wide[0] // 8, 4, 2))
            held = tile.transpose(lines, (3, 0, 2, 4, 1, 5))
            lane = self.holes.batch * self.x.heads + self.holes.head
            tile.store_add(w.memory["sums"][lane, place, self.own, ...], held)
            tile.matrix_wait(1)  # p has been read

    # ---- p ----------------------------------------------------------------------------------

    def weigh(self, far: Any) -> tuple[Any, Any | None]:
        """p, and the slope of the soft limit of scores if there is one."""
        raw, holes, at = tile.read(self.scores), self.holes, self.at
        slope = holes.slope(holes.bent(raw))
        s = tile.multiply_add(holes.score(raw, *at), holes.factor, far)
        if self.x.softcap:
            s = holes.hidden(s, *at, self.w.limit, self.ends)
        elif "mask" in self.x.extras:
            s = tile.where(holes.extra_block("mask", s.shape, *at), s, -tile.INF)
        return tile.quick_exp2(s), slope

    @tile.function
    def hide(self) -> None:
        """-inf where a query does not see a key, in blocks in which that can be."""
        if self.x.softcap:  # `weigh` hides, under the soft limit
            return
        w, (least, most) = self.w, self.holes.sides(*self.at)
        cuts = []
        if least is not None:
            cuts.append(least + OWN - 1 > 0)
        if most is not None:
            cuts.append(most < w.columns - 1)
        if self.ends:
            cuts.append(w.limit < self.at[1] + (OWN if w.of_keys else w.columns))
        if cuts:
            if reduce(or_, cuts):
                end = w.limit - self.at[1] if self.ends else None
                seen = self.holes.inside(self.scores.shape, *self.at, end)
                tile.write(self.scores, tile.where(seen, tile.read(self.scores), -tile.INF))

    # ---- results ----------------------------------------------------------------------------

    def write(self) -> None:
        """Results go out through the places of what was kept; of a sequence in a row of others,
        by threads, which stop at its end."""
        x, w, tokens = self.x, self.w, self.w.holes(0).tokens
        scale = tile.full((), x.scale)
        found = []  # whose gradient, the place of what was kept, first column, value
        for piece, total in enumerate(self.sums):
            value = tile.cast(tile.read(total) * scale, x.dtype)
            place = w.kept[0][self.own, piece]
            found.append(("dk" if w.of_keys else "dq", place, piece * w.wide[0], value))
        if self.with_values:
            place = w.kept[1 if w.with_changes else 0][self.own, 0]
            found.append(("dv", place, 0, tile.cast(tile.read(self.values), x.dtype)))
        if x.packed or (not w.with_changes and w.wide[0] != w.wide[1]):
            for name, _, column, value in found:
                inside = first_of(OWN, (w.limit if w.of_keys else w.queries) - self.row)
                some = value[:, : x.columns(name) - column]
                target = tokens(name, self.row, some.shape, column)
                tile.store(target, some, mask=box_mask(inside, None))
            return
        for _, place, _, value in found:
            tile.write(place, value)
        tile.fence("async")
        tile.named_sync(self.own, 128)
        for name, place, column, _ in found:
            tile.copy_store(tokens(name, self.row, place.shape, column), place)
        tile.commit_copies()
        tile.wait_copies(0)

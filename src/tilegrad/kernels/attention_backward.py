"""Backward of attention on matrix units that run beside the threads: gradients of q, k and v.

With p = exp(s - lse) recomputed and ds = p (dout v^T - delta): dv = p^T dout, dk = scale ds^T q,
dq = scale ds k. A program keeps 128 tokens of one side and walks over blocks of the other, which
a producer brings through a ring; two consumers keep 64 tokens each. Programs of keys (`dk, dv`)
see scores transposed, so p and ds leave the registers in which they are made only as operands of
the next products; programs of queries give dq from scores the right way round. Both recompute
the scores: 7 products instead of 5, no sums between programs. Every sum has one order: the same
inputs give the same bits.

Invariant: what is outside of the tokens, of the band or of a row without a seen key adds exactly
0, and any sizes do whose rows are a multiple of 16 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..core.dtype import bfloat16, float16, float32, int64
from ..core.errors import InternalError
from ..core.target import Target
from ..ir.node import Node
from ..ir.symbol import (
    Size,
    ceil_divide,
    combine,
    floor_divide,
    high,
    low,
    maximum,
    minimum,
    modulo,
    multiply,
)  # fmt: skip
from ..ir.types import Memory
from ..tile import ops, placed
from ..tile.build import Body
from ..tile.placed import PlacedBuilder
from .attention_shape import AttentionShape, Parameters, backward_parameters

LOG2_E = 1.4426950408889634
ROWS = 128  # tokens a program keeps
OWN = 64  # of which a consumer has
SHARED_BYTES = 227 << 10
EXTRAS = ("sinks", "key_lengths")


@dataclass(frozen=True)
class BackwardPlan:
    """Choices: blocks that are walked over, rings, registers of the producer and consumers."""

    queries: int = 64  # a block that programs of keys walk over
    query_stages: int = 2
    keys: int = 128  # a block that programs of queries walk over
    key_stages: int = 2
    held: bool = False  # what programs keep is held in registers as an operand
    late: bool = False  # products with p wait for ds: fewer registers, less at the same time
    registers: tuple[int, int] = (24, 240)


@dataclass(frozen=True)
class Launch:
    """One Body and the names of its arguments: of parameters or scratch."""

    body: Body
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Backward:
    """Launches in order, and the scratch between them."""

    launches: tuple[Launch, ...]
    scratch: tuple[tuple[str, Memory], ...] = ()


def why_not(x: AttentionShape, plan: BackwardPlan | None = None, wanted: Sequence[str] = ()
            ) -> str:  # fmt: skip
    """Why no Body can be right for a shape (with a Plan); '' where one can."""
    plan = plan or BackwardPlan()
    other = sorted(set(x.extras) - set(EXTRAS))
    wrong = [
        (x.dtype not in (bfloat16, float16), "q, k and v are bfloat16 or float16"),
        (any(w % 8 or not 8 <= w <= 128 for w in (x.width, x.value_width)),
         "head sizes are multiples of 8 up to 128"),
        (x.heads % x.key_heads != 0, "query heads come in whole groups"),
        (bool(x.softcap), "no softcap yet"),
        (bool(x.dropout), "no dropout yet"),
        (bool(other), f"not with {', '.join(other)} yet"),
        (bool(wanted), f"no gradient of {', '.join(wanted)} here"),
        (any(order[-1] != "d" for order in x.orders), "heads' elements lie next to each other"),
        (any(b % 16 or not 16 <= b <= 256 for b in (plan.queries, plan.keys)),
         "blocks are multiples of 16 up to 256"),
        (min(plan.query_stages, plan.key_stages) < 2, "a ring has two stages or more"),
        (any(shared_bytes(x, plan, side) > SHARED_BYTES for side in ("keys", "queries")),
         "the ring does not fit shared memory"),
    ]  # fmt: skip
    return next((why for is_wrong, why in wrong if is_wrong), "")


def padded(width: int) -> int:
    """Columns of a place that holds rows of so many elements: whole swizzled spans."""
    return 32 * -(-width // 32)


def shared_bytes(x: AttentionShape, plan: BackwardPlan, side: str) -> int:
    """About what a program of keys or of queries needs."""
    wide = 2 * (padded(x.width) + padded(x.value_width))
    if side == "keys":
        return ROWS * wide + plan.query_stages * plan.queries * (wide + 8) + 2048
    return ROWS * wide + plan.key_stages * plan.keys * wide + 2048


def candidates(x: AttentionShape, target: Target, fast: bool = False) -> list[BackwardPlan]:
    """Plans worth a trial, the expected best first."""
    narrow = max(padded(x.width), padded(x.value_width)) <= 64
    if narrow:
        found = [BackwardPlan(128, 2, 128, 2, late=True), BackwardPlan(64, 4, 128, 2, held=True),
                 BackwardPlan(96, 3, 144, 2), BackwardPlan(96, 3, 128, 3, late=True),
                 BackwardPlan(80, 3, 112, 3, held=True), BackwardPlan(64, 4, 160, 2)]  # fmt: skip
    else:
        found = [BackwardPlan(64, 3, 128, 2), BackwardPlan(80, 2, 112, 2, late=True),
                 BackwardPlan(64, 4, 96, 2), BackwardPlan(64, 2, 144, 2)]  # fmt: skip
    return [p for p in found if not why_not(x, p)]


def choose(x: AttentionShape, target: Target, fast: bool = False) -> BackwardPlan:
    """The Plan for a shape: wide blocks where accumulators leave registers for them."""
    return candidates(x, target, fast)[0]


def attention_backward(
    x: AttentionShape, plan: BackwardPlan, more: Sequence[Memory] = (), wanted: Sequence[str] = (),
    name: str = "attention_backward",
) -> Backward:  # fmt: skip
    """All launches; arguments are named as `backward_parameters` names them."""
    why = why_not(x, plan, wanted)
    if why:
        raise InternalError("kernels.attention_backward", f"{why}: {plan} for {x}")
    given = dict(backward_parameters(x, more, wanted))
    inputs = [n for n in given if n not in ("dq", "dk", "dv")]
    launches = []
    for side, results in (("keys", ("dk", "dv")), ("queries", ("dq",))):
        names = [*inputs, *results]
        body = Walk(x, plan, side, [(n, given[n]) for n in names], f"{name}_{side}").build()
        launches.append(Launch(body, tuple(names)))
    return Backward(tuple(launches))


class Walk:
    """Builds the Body whose programs keep tokens of one side and walk over the other."""

    def __init__(
        self, x: AttentionShape, plan: BackwardPlan, side: str, parameters: Parameters, name: str
    ) -> None:
        self.x, self.plan, self.side = x, plan, side
        self.of_keys = side == "keys"
        self.b = PlacedBuilder(name, parameters)
        self.memory = dict(zip((n for n, _ in parameters), self.b.parameters))
        self.columns = plan.queries if self.of_keys else plan.keys
        self.stages = plan.query_stages if self.of_keys else plan.key_stages
        self.kept_tokens, self.walked_tokens = (x.keys, x.queries) if self.of_keys else (
            x.queries, x.keys)  # fmt: skip
        self.heads = x.key_heads if self.of_keys else x.heads
        self.group = x.group if self.of_keys else 1
        self.blocks = ceil_divide(self.kept_tokens, ROWS)

    def build(self) -> Body:
        """Places, barriers, roles."""
        b, plan = self.b, self.plan
        self.places()
        lines = multiply(self.x.batch, self.heads)
        line, block = b.program(0, lines), b.program(1, self.blocks)
        if not self.of_keys and self.x.band[1] is not None:  # the last see most: they come first
            block = combine(combine(self.blocks, 1, -1), block, -1)
        self.batch = self.held("batch", floor_divide(line, self.heads))
        self.head = self.held("head", modulo(line, self.heads))
        self.first = multiply(block, ROWS)
        self.begin, self.end = self.walked()
        few, many = plan.registers
        b.role("producer", 4, few, self.producer)
        for own in range(2):
            b.role(f"consumer{own}", 4, many, lambda own=own: self.consumer(own))  # type: ignore[misc]
        return b.finish((lines, self.blocks), plan=plan)

    def places(self) -> None:
        """What is kept (both sides of each product), the ring, what is known of each query."""
        b, x = self.b, self.x
        wide = padded(x.width), padded(x.value_width)
        self.kept = [self.place((2, OWN, w)) for w in wide]
        self.ring = [self.place((self.stages, self.columns, w)) for w in wide]
        self.ready = b.barrier("ready", 1)
        self.full = [b.barrier(f"full{i}", 1, self.stages) for i in range(2)]
        self.empty = b.barrier("empty", 2, self.stages)
        if self.of_keys:
            self.known = b.allocate((self.stages, 2, self.columns), float32, "shared")
            self.told = b.barrier("told", 1, self.stages)

    def place(self, shape: tuple[int, ...]) -> Node:
        """A swizzled place of 16-bit floats."""
        layout = "swizzle64" if shape[-1] % 64 else "swizzle128"
        return self.b.allocate(shape, self.x.dtype, "shared", layout)

    # ---- which tokens -----------------------------------------------------------------------

    def held(self, name: str, value: Size) -> Size:
        """A value computed here, once."""
        if isinstance(value, int):
            return value
        return self.b.atom(name, self.b.index(value), low(value), high(value))

    def walked(self) -> tuple[Size, Size]:
        """The blocks of the other side that tokens of this program see, or are seen by."""
        least, most = self.x.band  # of key - query
        before, after = (most, least) if self.of_keys else (least, most)
        sign = -1 if self.of_keys else 1
        begin: Size = 0
        if before is not None:
            begin = maximum(combine(self.first, before, sign), 0)
        end: Size = self.walked_tokens
        if after is not None:
            last = combine(combine(self.first, after, sign), ROWS, 1)
            end = maximum(minimum(end, last), 0)
        first = self.held("begin", floor_divide(begin, self.columns))
        return first, self.held("end", ceil_divide(end, self.columns))

    def turn(self, member: Size, block: Size) -> tuple[Size, Size]:
        """(stage, lap) of a block walked over for a query head of the group."""
        each = combine(self.end, self.begin, -1)
        turn = combine(multiply(member, each), combine(block, self.begin, -1), 1)
        return turn % self.stages, turn // self.stages

    def for_blocks(self, body: Callable[[Size, Size], None]) -> None:
        """body(member of the group, block) in order."""
        def member(m: Size, _: list[Node]) -> Sequence[Node]:
            def block(s: Size, _: list[Node]) -> Sequence[Node]:
                body(m, s)
                return []

            self.b.loop("block", self.begin, self.end, 1, block)
            return []

        self.b.loop("member", 0, self.group, 1, member)

    def index(self, name: str, head: Size, token: Size) -> tuple[tuple[Size, ...], tuple[int, int]]:
        """Where a token of q, k, v or out lies: an index, and the axes of tokens and elements."""
        order = self.x.orders[("q", "k", "v", "out").index(name)]
        of = {"b": self.batch, "h": head, "t": token, "d": 0}
        return tuple(of[axis] for axis in order), (order.index("t"), 3)

    def query_head(self, member: Size) -> Size:
        """The head of queries that a member of the group is."""
        if self.of_keys:
            return combine(multiply(self.head, self.group), member, 1)
        return self.head

    # ---- the producer -------------------------------------------------------------------------

    @property
    def names(self) -> tuple[tuple[str, str, str], ...]:
        """(parameter, whose order it has, whose head) of what is kept, then of what is walked."""
        of_queries = (("q", "q", "q"), ("dout", "out", "q"))
        of_keys = (("k", "k", "k"), ("v", "v", "k"))
        return of_keys + of_queries if self.of_keys else of_queries + of_keys

    def copy(self, number: int, place: Node, at: tuple[Size, ...], token: Size, member: Size,
             barrier: Node, stage: Size) -> None:  # fmt: skip
        """Bring a box of tokens."""
        name, order, whose = self.names[number]
        head = self.query_head(member) if whose == "q" else self.key_head
        index, axes = self.index(order, head, token)
        self.b.copy_async(place, at, self.memory[name], index, axes, barrier, stage)

    @property
    def key_head(self) -> Size:
        """The head of keys of this program."""
        return self.head if self.of_keys else floor_divide(self.head, self.x.group)

    def producer(self) -> None:
        """Bring what is kept, then fill the ring."""
        b = self.b
        bytes_ = [int(math.prod(p.type.shape[1:])) * self.x.dtype.size  # type: ignore[union-attr]
                  for p in (*self.kept, *self.ring)]  # fmt: skip
        b.expect(self.ready, 0, 2 * (bytes_[0] + bytes_[1]))
        for number, place in enumerate(self.kept):
            for half in range(2):
                self.copy(number, place, (half,), combine(self.first, OWN * half, 1), 0,
                          self.ready, 0)  # fmt: skip

        def one(member: Size, block: Size) -> None:
            stage, lap = self.turn(member, block)
            b.wait(self.empty, stage, (lap + 1) % 2)
            token = multiply(block, self.columns)
            for number, place in enumerate(self.ring):
                b.expect(self.full[number], stage, bytes_[2 + number])
                self.copy(2 + number, place, (stage,), token, member, self.full[number], stage)
            if self.of_keys:
                for number, value in enumerate(self.facts(member, token, self.columns)):
                    b.write(self.known, value, stage, number)
                b.arrive(self.told, stage)

        self.for_blocks(one)

    def facts(self, member: Size, token: Size, count: int) -> list[Node]:
        """-lse in units of log 2 and delta of some queries; exp2 of anything plus the first is 0
        where there is no query, or none that sees a key."""
        b = self.b
        index = (self.batch, self.query_head(member), token)
        inside = b.apply("less", self.positions(count, token), b.index(self.x.queries))
        lse, delta = (b.load(self.memory[n], index, (count,), (2,), inside)
                      for n in ("lse", "delta"))  # fmt: skip
        nothing = b.constant(-math.inf, float32)
        scaled = b.apply("multiply", lse, b.constant(-LOG2_E, float32))
        some = b.apply("bit_and", inside, b.apply("less", nothing, lse))
        return [b.apply("where", some, scaled, nothing), delta]

    # ---- consumers ------------------------------------------------------------------------------

    def consumer(self, own: int) -> None:
        """Sums of 64 tokens over all blocks, then their way out."""
        b, x = self.b, self.x
        wide = (padded(x.width), padded(x.value_width))
        scores = b.register_tile((OWN, self.columns), float32)
        slopes = b.register_tile((OWN, self.columns), float32)  # dout v^T
        sums = [b.register_tile((OWN, wide[0]), float32, 0.0)]
        if self.of_keys:
            sums.append(b.register_tile((OWN, wide[1]), float32, 0.0))
        weights = b.register_tile((OWN, self.columns), x.dtype) if self.of_keys else None
        changes = b.register_tile((OWN, self.columns), x.dtype)
        row = combine(self.first, OWN * own, 1)
        rows = [] if self.of_keys else [
            b.add(ops.reshape(f, shape=(OWN, 1))) for f in self.facts(0, row, OWN)]  # fmt: skip
        b.wait(self.ready, 0, 0)
        kept, at = self.kept, (own,)
        if self.plan.held:
            kept, at = [self.hold(place, own) for place in self.kept], ()

        def one(member: Size, block: Size) -> None:
            stage, lap = self.turn(member, block)
            b.wait(self.full[0], stage, lap % 2)
            b.do(placed.matrix_fence)
            b.matrix_async(scores, kept[0], self.ring[0], False, (*at, stage),
                           transpose_b=True)  # fmt: skip
            b.do(placed.matrix_commit)
            b.do(placed.matrix_wait, pending=1)  # the block before is done with its operands
            self.release_before(member, block)
            b.wait(self.full[1], stage, lap % 2)
            b.do(placed.matrix_fence)
            b.matrix_async(slopes, kept[1], self.ring[1], False, (*at, stage),
                           transpose_b=True)  # fmt: skip
            b.do(placed.matrix_commit)
            if self.of_keys:
                b.wait(self.told, stage, lap % 2)
            b.do(placed.matrix_wait, pending=1)
            token = multiply(block, self.columns)
            self.hide(scores, row, token)
            far, delta = rows or [b.read(self.known, stage, n) for n in range(2)]
            factor = b.constant(x.scale * LOG2_E, float32)
            p = b.apply("quick_exp2", b.apply("multiply_add", b.read(scores), factor, far))
            early = weights is not None and not self.plan.late
            if early:
                b.write(weights, b.cast(p, x.dtype))
                b.do(placed.matrix_fence)
                b.matrix_async(sums[1], weights, self.ring[1], True, (stage,))
                b.do(placed.matrix_commit)
            b.do(placed.matrix_wait, pending=1 if early else 0)
            change = b.apply("multiply", p, b.apply("subtract", b.read(slopes), delta))
            b.write(changes, b.cast(change, x.dtype))
            if weights is not None and not early:
                b.write(weights, b.cast(p, x.dtype))
            b.do(placed.matrix_fence)
            if weights is not None and not early:
                b.matrix_async(sums[1], weights, self.ring[1], True, (stage,))
            b.matrix_async(sums[0], changes, self.ring[0], True, (stage,))
            b.do(placed.matrix_commit)

        self.for_blocks(one)
        b.do(placed.matrix_wait, pending=0)
        self.write(own, row, sums)

    def hold(self, place: Node, own: int) -> Node:
        """An operand in registers."""
        made = self.b.register_tile(place.type.shape[1:], self.x.dtype)  # type: ignore[union-attr]
        self.b.write(made, self.b.read(place, own))
        return made

    def release_before(self, member: Size, block: Size) -> None:
        """Give back the stage of the block before: its products are done."""
        b = self.b
        each = combine(self.end, self.begin, -1)
        count = combine(multiply(member, each), combine(block, self.begin, -1), 1)
        before = modulo(combine(combine(count, 1, -1), self.stages, 1), self.stages)
        b.branch(b.less(0, count), lambda: b.arrive(self.empty, before) or ())

    def positions(self, count: int, start: Size = 0) -> Node:
        """start, start + 1, ..."""
        b = self.b
        return b.apply("add", b.add(ops.iota(size=count, dtype=int64)), b.index(start))

    def hide(self, scores: Node, row: Size, token: Size) -> None:
        """-inf where a query does not see a key, in blocks in which that can be."""
        b, shape = self.b, (OWN, self.columns)
        bounds = self.bounds(row, token)
        crossed, seen = None, None
        for kind, offset in bounds:  # column <= row + offset, or >=
            if kind == "least":
                cut = b.less(0, combine(offset, OWN - 1, 1))
            elif kind == "most":
                cut = b.less(offset, self.columns - 1)
            else:
                cut = b.less(offset, self.columns)
            crossed = cut if crossed is None else b.apply("bit_or", crossed, cut)
        if crossed is None:
            return

        def inside() -> Sequence[Node]:
            nonlocal seen
            columns = self.positions(self.columns)
            for kind, offset in bounds:
                if kind == "end":
                    one = b.broadcast(b.apply("less", columns, b.index(offset)), shape)
                else:
                    limit = b.add(ops.reshape(self.positions(OWN, offset), shape=(OWN, 1)))
                    pair = (limit, columns) if kind == "least" else (columns, limit)
                    one = b.apply("less_equal", *pair)
                seen = b.logical_and(seen, one)
            hidden = b.constant(-math.inf, float32)
            assert seen is not None
            b.write(scores, b.apply("where", seen, b.read(scores), hidden))
            return ()

        b.branch(crossed, inside)

    def bounds(self, row: Size, token: Size) -> list[tuple[str, Size]]:
        """What a block's columns are held against: ('least' | 'most', offset) that the column is
        at least or at most row + offset, ('end', n) that it is under n."""
        least, most = self.x.band
        apart = combine(row, token, -1)
        found: list[tuple[str, Size]] = []
        if self.of_keys:  # key row - query column within the band
            if most is not None:
                found.append(("least", combine(apart, most, -1)))
            if least is not None:
                found.append(("most", combine(apart, least, -1)))
            return found
        if most is not None:
            found.append(("most", combine(apart, most, 1)))
        if least is not None:
            found.append(("least", combine(apart, least, 1)))
        if not isinstance(self.x.keys, int) or self.x.keys % self.columns:
            found.append(("end", combine(self.x.keys, token, -1)))
        return found

    def write(self, own: int, row: Size, sums: Sequence[Node]) -> None:
        """Results go out through the places of what was kept."""
        b, x = self.b, self.x
        scale = b.constant(x.scale, float32)
        results = (("dk", "k"), ("dv", "v")) if self.of_keys else (("dq", "q"),)
        for number, total in enumerate(sums):
            value = b.read(total)
            if number == 0:
                value = b.apply("multiply", value, scale)
            b.write(self.kept[number], b.cast(value, x.dtype), own)
        b.do(placed.fence, kind="async")
        b.do(placed.named_sync, number=own, threads=128)
        for number, (name, order) in enumerate(results):
            index, axes = self.index(order, self.head, row)
            b.copy_store(self.memory[name], index, axes, self.kept[number], (own,))
        b.do(placed.commit_copies)
        b.do(placed.wait_copies, pending=0)

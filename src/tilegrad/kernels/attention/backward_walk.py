"""The Body of attention's backward whose programs keep tokens of one side and walk over the other.

A producer brings what is kept and fills a ring with blocks of the other side; two consumers keep
64 tokens each. Programs of keys see scores transposed (keys as rows), so that p and ds are left
operands in the registers they were made in; what is known of each query (lse, delta) comes beside
the ring. Programs of queries see scores the right way round. Products of a block and those of the
next are issued without waiting in between, so the matrix units always have work of both consumers.

Invariant: what is outside of the tokens, of the band or of a row without a seen key adds exactly
0; sums over blocks go in the order of the blocks, but for dq where a Plan is `fast`. It is long
because producer and consumers keep one protocol, which is read on one page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ...core.dtype import float32, int32, int64
from ...ir.node import Node
from ...ir.symbol import (
    Size,
    ceil_divide,
    combine,
    floor_divide,
    high,
    low,
    maximum,
    minimum,
    modulo,
)
from ...tile import ops, placed
from ...tile.build import Body
from ...tile.placed import PlacedBuilder
from . import dropout, parts
from .backward_plan import OWN, ROWS, BackwardPlan, columns_of
from .shape import AttentionShape, Parameters

LIMITS = tuple[Size | None, Size | None]


class Walk:
    """Builds one Body."""

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
        self.b = PlacedBuilder(name, parameters)
        self.memory = dict(zip((n for n, _ in parameters), self.b.parameters))
        self.fast = plan.fast and self.of_keys
        self.with_changes = "dv" not in gives or "dk" in gives  # ds, and a product with it
        self.columns = plan.queries if self.of_keys else plan.keys
        self.stages = plan.query_stages if self.of_keys else plan.key_stages
        tokens = (x.keys, x.queries) if self.of_keys else (x.queries, x.keys)
        self.blocks, self.walked_tokens = ceil_divide(tokens[0], ROWS), tokens[1]
        self.heads, self.group = (x.key_heads, x.group) if self.of_keys else (x.heads, 1)
        wide = columns_of(x, plan)
        self.pieces = (2 if self.fast and wide[0] == 128 else 1, 1)  # columns of places, apart
        self.wide = (wide[0] // self.pieces[0], wide[1])
        self.packed = "query_starts" in x.extras
        if self.packed:  # a sequence may begin within a block
            self.sequences = int(self.memory["query_starts"].shape[0]) - 1
            self.blocks = tokens[0] // ROWS + self.sequences

    def build(self) -> Body:
        """Places, barriers, roles."""
        b, x = self.b, self.x
        if self.plan.dependent:
            b.do(placed.grid_dependency_wait)
            b.do(placed.grid_launch_dependents)
        self.places()
        programs = x.batch * self.heads * self.blocks
        line, block = self.corner(b.program(0, programs))
        self.batch = self.held("batch", line // self.heads)
        self.head = self.held("head", line % self.heads)
        self.query_start: Size = 0
        self.key_start: Size = 0
        self.queries, self.limit = x.queries, x.keys
        if self.packed:
            self.locate(block)
        else:
            self.first = self.held("first", block * ROWS)
            self.limit = self.key_limit()
        self.begin, self.end = self.walked()
        few, many = self.plan.registers
        b.role("producer", 4, few, self.producer)
        for own in range(2):
            b.role(f"consumer{own}", 4, many, lambda own=own: Consumer(self, own).run())  # type: ignore[misc]
        return b.finish((programs,), plan=self.plan)

    def corner(self, number: Size) -> tuple[Size, Size]:
        """(number of the batch and head, block of tokens) of a program: blocks of some heads are
        mixed, the longest first, so that what they walk over is near and all end together."""
        section, lines = self.plan.section, self.x.batch * self.heads
        if section == 1:
            line, block = floor_divide(number, self.blocks), modulo(number, self.blocks)
        elif isinstance(lines, int) and section >= lines:
            block, line = floor_divide(number, lines), modulo(number, lines)
        else:
            each = section * self.blocks
            first = floor_divide(number, each) * section
            wide = maximum(minimum(lines - first, section), 1)
            within = modulo(number, each)
            block, line = floor_divide(within, wide), first + modulo(within, wide)
        block = minimum(block, self.blocks - 1)
        if not self.of_keys and self.x.band[1] is not None:  # the last see most
            block = self.blocks - 1 - block
        return line, self.held("block", block)

    def places(self) -> None:
        """What is kept, the ring, what is known of each query; ds on its way to dq."""
        b = self.b
        count = 2 if self.with_changes else 1
        self.kept = [self.place((2, n, OWN, w)) for n, w in zip(self.pieces[:count], self.wide)]
        self.ring = [
            self.place((self.stages, n, self.columns, w)) for n, w in zip(self.pieces, self.wide)
        ]
        self.ready = b.barrier("ready", 1)
        self.full = [b.barrier(f"full{i}", 1, self.stages) for i in range(2)]
        self.empty = b.barrier("empty", 2, self.stages)
        if self.of_keys:
            self.known = b.allocate((self.stages, 2, self.columns), float32, "shared")
            self.told = b.barrier("told", 1, self.stages)
        if self.fast:  # (turn, keys, queries, ...)
            self.passed = self.place((2, 2, self.columns // 64, OWN, 64))

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

    def key_limit(self) -> Size:
        """Keys there are: of this batch, if each has its own number."""
        x, b = self.x, self.b
        if "key_lengths" not in x.extras:
            return x.keys
        length = b.cast(b.load(self.memory["key_lengths"], (self.batch,)), int64)
        some = b.bounded("length", length, 0, high(x.keys))
        return self.held("limit", minimum(some, x.keys))

    @property
    def data_says(self) -> bool:
        """Whether numbers of tokens are data."""
        return self.packed or "key_lengths" in self.x.extras

    def locate(self, place: Size) -> None:
        """The sequence and tokens of a program: sequence i has the places from start // ROWS + i
        on, which are enough for its blocks; those left over are empty."""
        b, x = self.b, self.x
        names = ("key_starts", "query_starts") if self.of_keys else ("query_starts", "key_starts")

        def start_of(name: str, sequence: Size) -> Size:
            loaded = b.cast(b.load(self.memory[name], (sequence,)), int64)
            return b.bounded("start", loaded, 0, high(x.keys if name[0] == "k" else x.queries))

        def halve(_: Size, carried: list[Node]) -> Sequence[Node]:
            least, most = (b.atom("side", c, 0, self.sequences - 1) for c in carried)
            middle = (least + most + 1) // 2
            first = start_of(names[0], middle) // ROWS
            here = b.less_equal(first + middle, place)
            below = b.index(middle - 1)
            return [
                b.apply("where", here, b.index(middle), carried[0]),
                b.apply("where", here, carried[1], below),
            ]

        ends = [b.constant(0, int64), b.constant(self.sequences - 1, int64)]
        found = b.loop("half", 0, (self.sequences - 1).bit_length(), 1, halve, ends)
        sequence = b.atom("sequence", found[0], 0, self.sequences - 1)
        starts = {name: start_of(name, sequence) for name in names}
        counts = {
            name: self.held(
                "count",
                maximum(start_of(name, sequence + 1) - starts[name], 0),
            )
            for name in names
        }
        self.query_start, self.key_start = starts["query_starts"], starts["key_starts"]
        self.queries, self.limit = counts["query_starts"], counts["key_starts"]
        block = place - (starts[names[0]] // ROWS + sequence)
        self.first = self.held("first", maximum(block, 0) * ROWS)

    def walked(self) -> tuple[Size, Size]:
        """The blocks of the other side that tokens of this program see, or are seen by."""
        least, most = self.x.band  # of key - query
        before, after = (most, least) if self.of_keys else (least, most)
        sign = -1 if self.of_keys else 1
        begin: Size = 0
        if before is not None:
            begin = maximum(combine(self.first, before, sign), 0)
        end: Size = self.queries if self.of_keys else self.limit
        if after is not None:
            last = combine(self.first, after, sign) + ROWS
            end = maximum(minimum(end, last), 0)
        if self.data_says:  # nothing is walked over for tokens past the last
            count = self.limit if self.of_keys else self.queries
            some = minimum(maximum(count - self.first, 0), 1)
            end = end * some
        first = self.held("begin", floor_divide(begin, self.columns))
        last = ceil_divide(end, self.columns)
        if not self.data_says:
            return first, self.held("end", last)
        # stages are counted round for any number of blocks, whatever the lengths are
        return first, self.b.atom("end", self.b.index(last), 0, high(last) + 4 * self.stages)

    def count(self, member: Size, block: Size) -> Size:
        """How many blocks came before."""
        each = self.end - self.begin
        return member * each + block - self.begin

    def turn(self, member: Size, block: Size) -> tuple[Size, Size]:
        """(stage, lap) of a block walked over for a query head of the group."""
        count = self.count(member, block)
        return count % self.stages, count // self.stages

    def place_of(self, step: Size) -> Size:
        """The block that a step walks over. Where programs of a head add to one another's sums,
        each begins elsewhere, so that they do not meet."""
        if not self.fast or self.x.band != (None, None) or self.data_says:
            return step
        count = self.end
        shift = floor_divide(self.first // ROWS * count, self.blocks)
        place = step + shift
        past = minimum(maximum(place - count + 1, 0), 1)
        return self.held("place", place - count * past)

    def for_blocks(self, body: Callable[[Size, Size], None]) -> None:
        """body(member of the group, block) in order."""

        def member(m: Size, _: list[Node]) -> Sequence[Node]:
            def block(s: Size, _: list[Node]) -> Sequence[Node]:
                body(m, s)
                return []

            self.b.loop("block", self.begin, self.end, 1, block)
            return []

        self.b.loop("member", 0, self.group, 1, member)

    def index(
        self, name: str, head: Size, token: Size, element: int = 0
    ) -> tuple[tuple[Size, ...], tuple[int, int]]:
        """Where a token of q, k, v or out lies: an index, and the axes of tokens and elements."""
        order = self.x.orders[("q", "k", "v", "out").index(name)]
        token = token + (self.key_start if name in "kv" else self.query_start)
        of = {"b": self.batch, "h": head, "t": token, "d": element}
        return tuple(of[axis] for axis in order), (order.index("t"), 3)

    def query_head(self, member: Size) -> Size:
        """The head of queries that a member of the group is."""
        if self.of_keys:
            return self.head * self.group + member
        return self.head

    @property
    def step(self) -> int:
        """Queries that are taken at once."""
        return self.columns if self.of_keys else ROWS

    # ---- the producer -------------------------------------------------------------------------

    @property
    def names(self) -> tuple[tuple[str, str], ...]:
        """(parameter, whose order it has) of what is kept, then of what is walked over."""
        of_queries, of_keys = (("q", "q"), ("dout", "out")), (("k", "k"), ("v", "v"))
        return of_keys + of_queries if self.of_keys else of_queries + of_keys

    def copy(
        self, number: int, at: Size, token: Size, member: Size, barrier: Node, stage: Size
    ) -> None:
        """Bring a box of tokens into what is kept (0, 1) or the ring (2, 3)."""
        name, order = self.names[number]
        place = self.kept[number] if number < 2 else self.ring[number - 2]
        key_head = self.head if self.of_keys else self.head // self.x.group
        head = key_head if name in "kv" else self.query_head(member)
        for piece in range(self.pieces[number % 2]):
            index, axes = self.index(order, head, token, piece * self.wide[number % 2])
            self.b.copy_async(place, (at, piece), self.memory[name], index, axes, barrier, stage)

    def producer(self) -> None:
        """Bring what is kept, then fill the ring."""
        b = self.b
        row = [n * w * self.x.dtype.size for n, w in zip(self.pieces, self.wide)]
        b.expect(self.ready, 0, ROWS * sum(row[: len(self.kept)]))
        for number in range(len(self.kept)):
            for half in range(2):
                self.copy(number, half, self.first + OWN * half, 0, self.ready, 0)

        def one(member: Size, block: Size) -> None:
            stage, lap = self.turn(member, block)
            b.wait(self.empty, stage, (lap + 1) % 2)
            token = self.place_of(block) * self.columns
            for number in range(2):
                b.expect(self.full[number], stage, self.columns * row[number])
                self.copy(2 + number, stage, token, member, self.full[number], stage)
            if self.of_keys:
                for number, value in enumerate(self.facts(member, token, self.columns)):
                    b.write(self.known, value, stage, number)
                b.arrive(self.told, stage)

        self.for_blocks(one)

    def facts(self, member: Size, token: Size, count: int) -> list[Node]:
        """-lse in units of log 2 and delta of some queries; exp2 of anything plus the first is 0
        where there is no query, or none that sees a key."""
        b = self.b
        index = (self.batch, self.query_head(member), token + self.query_start)
        inside = None
        if not isinstance(self.queries, int) or self.queries % max(count, self.step):
            left = b.cast(b.index(self.queries - token), int32)
            inside = b.apply("less", parts.line(b, count), left)
        lse, delta = (
            b.load(self.memory[n], index, (count,), (2,), inside) for n in ("lse", "delta")
        )
        nothing = parts.number(b, -math.inf)
        some = b.logical_and(inside, b.apply("less", nothing, lse))
        assert some is not None
        return [b.apply("where", some, parts.scaled(b, lse, -parts.LOG2_E), nothing), delta]


class Consumer:
    """Builds one consumer: sums of 64 tokens over all blocks, then their way out."""

    def __init__(self, walk: Walk, own: int) -> None:
        self.w, self.own, self.b, self.x, self.plan = walk, own, walk.b, walk.x, walk.plan
        b, columns, of_keys = self.b, walk.columns, walk.of_keys
        self.row = walk.held("row", walk.first + OWN * own)
        self.scores = b.register_tile((OWN, columns), float32)
        self.sums: list[Node] = []
        if walk.with_changes:
            self.back = b.register_tile((OWN, columns), float32)  # dout v^T
            self.sums = [
                b.register_tile((OWN, walk.wide[0]), float32, 0.0) for _ in range(walk.pieces[0])
            ]
            self.changes = b.register_tile((OWN, columns), self.x.dtype)
        self.with_values = "dv" in walk.gives
        if self.with_values:
            self.weights = b.register_tile((OWN, columns), self.x.dtype)
            self.values = b.register_tile((OWN, walk.wide[1]), float32, 0.0)
        if walk.fast:
            self.turned = b.register_tile((64, walk.wide[0]), float32)
        self.early = self.with_values and not self.plan.late
        self.rows = [] if of_keys else [parts.column(b, f) for f in walk.facts(0, self.row, OWN)]

    def run(self) -> None:
        """Every block, then the results."""
        b = self.b
        b.wait(self.w.ready, 0, 0)
        if self.plan.turns and self.own:  # the other begins
            b.do(placed.named_arrive, number=3, threads=256)
        self.w.for_blocks(self.block)
        b.do(placed.matrix_wait, pending=0)
        if self.w.fast:  # the other's products read these keys too
            b.do(placed.named_sync, number=2, threads=256)
        self.write()

    # ---- one block ------------------------------------------------------------------------------

    def block(self, member: Size, block: Size) -> None:
        """Scores and dout v^T, p and ds, and their products, which the next block waits for."""
        b, w = self.b, self.w
        stage, lap = w.turn(member, block)
        if self.plan.turns:
            b.do(placed.named_sync, number=3 + self.own, threads=256)
        self.against(0, self.scores, stage, lap)
        b.do(placed.matrix_wait, pending=1)  # the block before is done with its operands
        self.release_before(member, block)
        if w.with_changes:
            self.against(1, self.back, stage, lap)
        else:
            b.wait(w.full[1], stage, lap % 2)
        if self.plan.turns:
            b.do(placed.named_arrive, number=4 - self.own, threads=256)
        if w.of_keys:
            b.wait(w.told, stage, lap % 2)
        b.do(placed.matrix_wait, pending=1 if w.with_changes else 0)
        token = w.held("token", w.place_of(block) * w.columns)
        self.hide(token)
        far, delta = self.rows or [b.read(w.known, stage, n) for n in range(2)]
        p, slope = self.weigh(member, token, far)
        keep = self.keep(member, token) if self.x.dropout else None
        given = p if keep is None else b.apply("multiply", p, keep)
        if self.early:
            b.write(self.weights, b.cast(given, self.x.dtype))
            b.do(placed.matrix_fence)
            self.add_values(stage)
            b.do(placed.matrix_commit)
        if not w.with_changes:
            return
        if not self.early:  # long over: it keeps p from being computed behind the wait for dout v^T
            b.wait(w.ready, 0, 0)
        b.do(placed.matrix_wait, pending=1 if self.early else 0)
        back = b.read(self.back)
        back = back if keep is None else b.apply("multiply", back, keep)
        change = b.apply("multiply", p, b.apply("subtract", back, delta))
        change = change if slope is None else b.apply("multiply", change, slope)
        self.add_changes(member, block, given, b.cast(change, self.x.dtype))

    def against(self, number: int, total: Node, stage: Size, lap: Size) -> None:
        """What is kept times a block of the ring, transposed."""
        b, w = self.b, self.w
        b.wait(w.full[number], stage, lap % 2)
        b.do(placed.matrix_fence)
        for piece in range(w.pieces[number]):
            at = (self.own, piece, stage, piece)
            b.matrix_async(total, w.kept[number], w.ring[number], piece > 0, at, transpose_b=True)
        b.do(placed.matrix_commit)

    def add_values(self, stage: Size) -> None:
        """dv += p^T dout."""
        self.b.matrix_async(self.values, self.weights, self.w.ring[1], True, (stage, 0))

    def add_changes(self, member: Size, block: Size, p: Node, change: Node) -> None:
        """dk += ds^T q, or dq += ds k; where they are added up here, dq of these queries."""
        b, w = self.b, self.w
        stage, _ = w.turn(member, block)
        turn = w.count(member, block) % 2
        late = self.with_values and not self.early
        if late:
            b.write(self.weights, b.cast(p, self.x.dtype))
        b.write(self.changes, change)
        if w.fast:
            self.pass_on(turn, change)
        b.do(placed.matrix_fence)
        if w.fast:
            half, piece = (0, self.own) if w.pieces[0] > 1 else (self.own, 0)
            for keys in range(2):
                b.matrix_async(
                    self.turned,
                    w.passed,
                    w.kept[0],
                    keys > 0,
                    (turn, keys, half, keys, piece),
                    transpose_a=True,
                )
            b.do(placed.matrix_commit)
        if late:
            self.add_values(stage)
            b.do(placed.matrix_commit)
        for piece, total in enumerate(self.sums):
            b.matrix_async(total, self.changes, w.ring[0], True, (stage, piece))
        b.do(placed.matrix_commit)
        if w.fast:
            b.do(placed.matrix_wait, pending=1 if self.early else 2)
            self.add_dq(member, w.place_of(block))
            b.do(placed.matrix_wait, pending=1)  # p has been read

    def pass_on(self, turn: Size, change: Node) -> None:
        """Let both consumers see ds of all keys."""
        b, w = self.b, self.w
        for half in range(w.columns // 64):
            part = b.add(ops.part(change, start=(0, 64 * half), shape=(OWN, 64)))
            b.write(w.passed, part, turn, self.own, half)
        b.do(placed.fence, kind="async")
        b.do(placed.named_sync, number=2, threads=256)

    def release_before(self, member: Size, block: Size) -> None:
        """Give back the stage of the block before: its products are done."""
        b, stages = self.b, self.w.stages
        count = self.w.count(member, block)
        before = modulo(count - 1 + stages, stages)
        b.branch(b.less(0, count), lambda: b.arrive(self.w.empty, before))

    # ---- p ----------------------------------------------------------------------------------

    def weigh(self, member: Size, token: Size, far: Node) -> tuple[Node, Node | None]:
        """p, and the slope of the soft limit of scores if there is one."""
        b, x = self.b, self.x
        s, factor, slope = b.read(self.scores), x.scale * parts.LOG2_E, None
        if x.softcap:
            s = parts.quick_tanh(b, s, x.scale / x.softcap)
            one = parts.number(b, 1.0)
            slope = b.apply("subtract", one, b.apply("multiply", s, s))
            factor = x.softcap * parts.LOG2_E
        more = self.added(member, token)
        if more is not None:
            far = b.apply("multiply_add", more, parts.number(b, parts.LOG2_E), far)
        s = b.apply("multiply_add", s, parts.number(b, factor), far)
        for name in ("mask",) if "mask" in x.extras else ():
            s = parts.hidden(b, s, self.beside(name, member, token))
        if x.softcap:  # what hides lies under the soft limit
            seen = self.seen(token)
            s = s if seen is None else parts.hidden(b, s, seen)
        return b.apply("quick_exp2", s), slope

    def keep(self, member: Size, token: Size) -> Node:
        """What dropout multiplies probabilities by."""
        b, x, w = self.b, self.x, self.w
        query, key = (token, self.row) if w.of_keys else (self.row, token)
        query, key = query + w.query_start, key + w.key_start
        line = w.batch * x.heads + w.query_head(member)
        start = (line * x.queries + query) * x.keys + key
        down, across = (b.add(ops.iota(size=n, dtype=int64)) for n in (OWN, w.columns))
        step = b.index(x.keys)
        if w.of_keys:
            across = b.apply("multiply", across, step)
        else:
            down = b.apply("multiply", down, step)
        linear = b.apply("add", b.apply("add", parts.column(b, down), across), b.index(start))
        key_, offset = (b.load(w.memory[n], ()) for n in ("key", "offset"))
        return dropout.keep(b, key_, offset, linear, x.dropout)

    def added(self, member: Size, token: Size) -> Node | None:
        """Bias and slopes, which are added to scores."""
        b, x, w = self.b, self.x, self.w
        found = None
        if "bias" in x.extras:
            found = b.cast(self.beside("bias", member, token), float32)
        if "slopes" in x.extras:
            slope = b.load(w.memory["slopes"], (w.query_head(member),))
            apart = self.row - token
            pair = (parts.column(b, parts.line(b, OWN, apart)), parts.line(b, w.columns))
            far = b.cast(b.apply("subtract", *(pair if w.of_keys else pair[::-1])), float32)
            lean = b.apply("multiply", far, slope)
            found = lean if found is None else b.apply("add", found, lean)
        return found

    def beside(self, name: str, member: Size, token: Size) -> Node:
        """A block of the bias or mask, 0 beyond its ends."""
        b, w = self.b, self.w
        memory = w.memory[name]
        sizes = memory.shape
        query, key = (token, self.row) if w.of_keys else (self.row, token)
        at = (
            w.batch,
            w.query_head(member),
            query + w.query_start,
            key + w.key_start,
        )
        index = [0 if size == 1 else place for size, place in zip(sizes, at)]
        order = (3, 2) if w.of_keys else (2, 3)
        axes = tuple(a for a in order if sizes[a] != 1)
        counts = dict(zip(order, (OWN, w.columns)))
        inside: Node | None = None
        for axis in axes:
            left = b.cast(b.index(sizes[axis] - index[axis]), int32)
            one = b.apply("less", parts.line(b, counts[axis]), left)
            first = len(axes) > 1 and axis == axes[0]
            inside = b.logical_and(inside, parts.column(b, one) if first else one)
        found = b.load(memory, index, tuple(counts[a] for a in axes), axes, inside)
        if axes == order[:1]:
            found = parts.column(b, found)
        return b.broadcast(found, (OWN, w.columns))

    # ---- what is seen -----------------------------------------------------------------------

    def hide(self, token: Size) -> None:
        """-inf where a query does not see a key, in blocks in which that can be."""
        crossed = self.crossed(token)
        if crossed is None or self.x.softcap:
            return
        b = self.b

        def inside() -> Sequence[Node]:
            seen = self.seen(token)
            assert seen is not None
            b.write(self.scores, parts.hidden(b, b.read(self.scores), seen))
            return ()

        b.branch(crossed, inside)

    def limits(self, token: Size) -> LIMITS:
        """The least and the most that column - row may be."""
        apart = self.row - token
        sides = self.x.band[::-1] if self.w.of_keys else self.x.band
        sign = -1 if self.w.of_keys else 1
        least, most = (None if s is None else combine(apart, s, sign) for s in sides)
        return least, most

    @property
    def ends(self) -> bool:
        """Whether blocks may hold keys beyond the last, which would add something."""
        x, w = self.x, self.w
        if w.data_says:
            return True
        step = OWN if w.of_keys else w.columns
        uneven = not isinstance(x.keys, int) or x.keys % step != 0
        return uneven and (w.fast or not w.of_keys)

    def crossed(self, token: Size) -> Node | None:
        """Whether something of a block is not seen; None where all is."""
        b, w = self.b, self.w
        least, most = self.limits(token)
        cuts = []
        if least is not None:
            cuts.append(b.less(0, least + OWN - 1))
        if most is not None:
            cuts.append(b.less(most, w.columns - 1))
        if self.ends:
            key, count = (self.row, OWN) if w.of_keys else (token, w.columns)
            cuts.append(b.less(w.limit, key + count))
        found = cuts[0] if cuts else None
        for cut in cuts[1:]:
            found = b.apply("bit_or", found, cut)  # type: ignore[arg-type]
        return found

    def seen(self, token: Size) -> Node | None:
        """Which elements of a block are seen; None where all are."""
        b, w = self.b, self.w
        shape = (OWN, w.columns)
        least, most = self.limits(token)
        end = w.limit - token if self.ends and not w.of_keys else None
        found = None
        if least is not None or most is not None or end is not None:
            found = parts.within(b, shape, least, most, end)
        if self.ends and w.of_keys:
            left = b.cast(b.index(w.limit - self.row), int32)
            inside = b.apply("less", parts.column(b, parts.line(b, OWN)), left)
            found = b.logical_and(found, b.broadcast(inside, shape))
        return found

    # ---- results ----------------------------------------------------------------------------

    def add_dq(self, member: Size, block: Size) -> None:
        """Add dq of a block of queries to what other programs add, as threads hold it."""
        b, w = self.b, self.w
        groups = w.wide[0] // 8
        lines = b.add(ops.reshape(b.read(self.turned), shape=(4, 2, 8, groups, 4, 2)))
        held = b.add(ops.transpose(lines, order=(3, 0, 2, 4, 1, 5)))
        line = w.batch * self.x.heads + w.query_head(member)
        index = (line, block, self.own, *[0] * 6)
        b.store_add(w.memory["sums"], held, index, tuple(range(3, 9)))

    def results(self) -> list[tuple[str, int, int, Node]]:
        """(whose gradient, number of the place, piece of its columns, value)."""
        b, x, w = self.b, self.x, self.w
        scale, found = parts.number(b, x.scale), []
        for piece, total in enumerate(self.sums):
            value = b.cast(b.apply("multiply", b.read(total), scale), x.dtype)
            found.append(("k" if w.of_keys else "q", 0, piece, value))
        if self.with_values:
            place = 1 if w.with_changes else 0
            found.append(("v", place, 0, b.cast(b.read(self.values), x.dtype)))
        return found

    def write(self) -> None:
        """Results go out through the places of what was kept; of a sequence in a row of others,
        by threads, which stop at its end."""
        b, w = self.b, self.w
        found = self.results()
        if w.packed or (not w.with_changes and w.wide[0] != w.wide[1]):
            for name, _, piece, value in found:
                self.write_rows(name, piece, value)
            return
        for _, number, piece, value in found:
            b.write(w.kept[number], value, self.own, piece)
        b.do(placed.fence, kind="async")
        b.do(placed.named_sync, number=self.own, threads=128)
        for name, number, piece, _ in found:
            index, axes = w.index(name, w.head, self.row, piece * w.wide[number])
            b.copy_store(w.memory[f"d{name}"], index, axes, w.kept[number], (self.own, piece))
        b.do(placed.commit_copies)
        b.do(placed.wait_copies, pending=0)

    def write_rows(self, name: str, piece: int, value: Node) -> None:
        """Rows of a result that are tokens of the sequence."""
        b, x, w = self.b, self.x, self.w
        columns = value.shape[1]
        index, axes = w.index(name, w.head, self.row, piece * columns)
        count = w.limit if w.of_keys else w.queries
        left = b.cast(b.index(count - self.row), int32)
        inside = parts.column(b, b.apply("less", parts.line(b, OWN), left))
        width = (x.value_width if name == "v" else x.width) - piece * columns
        if width < columns:
            across = b.apply("less", parts.line(b, columns), b.constant(width, int32))
            inside = b.apply("bit_and", inside, across)
        b.store(w.memory[f"d{name}"], value, index, axes, b.broadcast(inside, value.shape))

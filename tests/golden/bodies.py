"""Six golden kernels as Bodies: what Tile IR must be able to say on every kind of machine.

Each function builds one Body from small sizes; `GOLDEN` lists them with the sizes stored as text
in this folder. The shapes are those of the real kernels scaled down, the structure is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from looped import looped
from placed_builder import PlacedBuilder

from tilegrad.core.dtype import bfloat16, float32, int32, int64
from tilegrad.core.target import AVX512_AMX, H200, MatrixUnit, MemorySpace, Target
from tilegrad.ir.node import Node
from tilegrad.ir.symbol import Size, ceil_divide, minimum
from tilegrad.ir.types import Memory, Tile
from tilegrad.tile import ops, placed
from tilegrad.tile.build import Body, BodyBuilder, fill

LOG2_E = 1.4426950408889634

HOPPER = Target(
    "hopper",
    "ptx",
    vector_bytes=128,
    cores=132,
    limits=H200.limits,
    memories={
        "global": MemorySpace(80 << 30, 128, ("load", "store"), 4.8e12, shared=True),
        "shared": MemorySpace(227 << 10, 128, ("copy_async", "copy_store")),
        "register": MemorySpace(256 << 10, 4),
    },
)
SYSTOLIC = Target(
    "systolic",
    "systolic",
    memories={
        "global": MemorySpace(1 << 30, 64, ("load", "store"), shared=True),
        "scratchpad": MemorySpace(64 << 10, 64, ("load", "store")),
        "weights": MemorySpace(2 << 10, 64, ("load", "store")),
        "accumulator": MemorySpace(16 << 10, 64),
    },
    matrix=(MatrixUnit("systolic", 8, 16, 16, (bfloat16, bfloat16), float32, "weights"),),
)


def positions(b: BodyBuilder, size: int, start: Size = 0) -> Node:
    """start .. start+size-1 as a tile."""
    steps = b.add(ops.iota(size=size, dtype=int64))
    return steps if start == 0 else b.apply("add", steps, b.index(start))


def scale(b: BodyBuilder, x: Node, factor: float) -> Node:
    """x times a number."""
    return b.apply("multiply", x, b.constant(factor, x.dtype))


def column(b: BodyBuilder, x: Node) -> Node:
    """A tile (n,) as (n, 1)."""
    return b.add(ops.reshape(x, shape=(*x.shape, 1)))


# ---- (a) packed AMX matmul ----------------------------------------------------------------------


def amx_pack(k: int = 64, n: int = 64) -> Body:
    """Weights (k, n) to blocks of 16 columns with pairs of k side by side: (n/16, k/2, 32)."""
    b = BodyBuilder(
        "amx_pack",
        [
            ("weight", Memory((k, n), bfloat16, use="constant")),
            ("packed", Memory((n // 16, k // 2, 32), bfloat16, use="result")),
        ],
    )
    weight, packed = b.parameters
    block, step = b.program(0, n // 16), b.program(1, k // 32)
    tile = b.load(weight, (step * 32, block * 16), (32, 16), (0, 1))
    pairs = b.add(ops.transpose(b.add(ops.reshape(tile, shape=(16, 2, 16))), order=(0, 2, 1)))
    rows = b.add(ops.reshape(pairs, shape=(16, 32)))
    b.store(packed, rows, (block, step * 16, 0), (1, 2))
    return b.finish((n // 16, k // 32))


def amx_matmul(m: int = 32, n: int = 64, k: int = 64) -> Body:
    """c = a @ unpacked(packed): 2 x 2 accumulators of 16 x 16, carried over k in steps of 32."""
    b = BodyBuilder(
        "amx_matmul",
        [
            ("a", Memory((m, k), bfloat16)),
            ("packed", Memory((n // 16, k // 2, 32), bfloat16, use="constant")),
            ("c", Memory((m, n), float32, use="result")),
        ],
    )
    a, packed, c = b.parameters
    i, j = b.program(0, m // 32), b.program(1, n // 32)
    unit = "tdpbf16ps"

    def load(memory: Node, index: Sequence[Size], shape: tuple[int, int]) -> Node:
        scalars = [b.index(x) for x in index]
        return b.add(ops.matrix_load(memory, *scalars, shape=shape, unit=unit))

    def step(s: Size, sums: list[Node]) -> list[Node]:
        left = [load(a, (i * 32 + r * 16, s * 32), (16, 32)) for r in range(2)]
        right = [load(packed, (j * 2 + q, s * 16, 0), (16, 32)) for q in range(2)]
        return [
            b.add(ops.matrix_dot(sums[r * 2 + q], left[r], right[q], unit=unit))
            for r in range(2)
            for q in range(2)
        ]

    zeros = [b.add(ops.matrix_zero(shape=(16, 16), dtype=float32, unit=unit)) for _ in range(4)]
    for number, total in enumerate(looped(b, "k", 0, k // 32, 1, step, zeros)):
        where = (i * 32 + number // 2 * 16, j * 32 + number % 2 * 16)
        b.add(ops.matrix_store(c, total, *[b.index(x) for x in where], unit=unit))
    return b.finish((m // 32, n // 32))


# ---- (b) ping-pong matmul -----------------------------------------------------------------------


def ping_pong_matmul(
    m: int = 64,
    n: int = 32,
    k: int = 64,
    tile: tuple[int, int, int] = (16, 16, 16),
    stages: int = 3,
    programs: int = 2,
) -> Body:
    """c = a @ b^T, persistent: a producer fills a ring, two consumers take tiles in turn.

    While one consumer multiplies, the other stores; named barriers 0 and 1 say whose turn it is.
    The hole epilogue(accumulator, rows, columns) is not filled.
    """
    tm, tn, tk = tile
    steps, count = k // tk, (m // tm) * (n // tn) // programs
    b = PlacedBuilder(
        "ping_pong_matmul",
        [
            ("a", Memory((m, k), bfloat16)),
            ("b", Memory((n, k), bfloat16, use="constant")),
            ("c", Memory((m, n), bfloat16, use="result")),
        ],
    )
    a, weight, c = b.parameters
    left = b.allocate((stages, tm, tk), bfloat16, "shared", "swizzle128")
    right = b.allocate((stages, tn, tk), bfloat16, "shared", "swizzle128")
    staged = b.allocate((2, tm, tn), bfloat16, "shared", "swizzle128")
    full, empty = b.barrier("full", 1, stages), b.barrier("empty", 1, stages)
    program = b.program(0, programs)

    def corner(number: Size) -> tuple[Size, Size]:
        at = number * programs + program
        return at // (n // tn) * tm, at % (n // tn) * tn

    def stage_of(number: Size, step: Size) -> tuple[Size, Size]:
        turn = number * steps + step
        return turn % stages, turn // stages

    def producer() -> None:
        b.do(placed.grid_dependency_wait)

        def one(number: Size, step: Size) -> None:
            row, col = corner(number)
            stage, lap = stage_of(number, step)
            b.wait(empty, stage, (lap + 1) % 2)
            b.expect(full, stage, (tm + tn) * tk * 2)
            b.copy_async(left, (stage,), a, (row, step * tk), (0, 1), full, stage)
            b.copy_async(right, (stage,), weight, (col, step * tk), (0, 1), full, stage)

        def all_steps(number: Size, _: list[Node]) -> list[Node]:
            looped(b, "step", 0, steps, 1, lambda s, _: one(number, s) or [])
            return []

        looped(b, "number", 0, count, 1, all_steps)

    def consumer(own: int) -> None:
        b.do(placed.grid_dependency_wait)
        total = b.register_tile((tm, tn), float32)
        if own == 1:
            b.do(placed.named_arrive, number=0, threads=256)

        def one_tile(number: Size, _: list[Node]) -> list[Node]:
            b.do(placed.named_sync, number=own, threads=256)
            b.do(placed.matrix_fence)

            def step(s: Size, _: list[Node]) -> list[Node]:
                stage, lap = stage_of(number, s)
                b.wait(full, stage, lap % 2)
                b.matrix_async(total, left, right, b.less(0, s), (stage, stage), transpose_b=True)
                b.do(placed.matrix_commit)
                b.do(placed.matrix_wait, pending=1)
                b.branch(b.less(0, s), lambda: b.arrive(empty, stage_of(number, s - 1)[0]) or ())
                return []

            looped(b, "step", 0, steps, 1, step)
            b.do(placed.named_arrive, number=1 - own, threads=256)
            b.do(placed.matrix_wait, pending=0)
            b.arrive(empty, stage_of(number, steps - 1)[0])
            finish_tile(number)
            return []

        def finish_tile(number: Size) -> None:
            row, col = corner(number)
            rows, columns = column(b, positions(b, tm, row)), positions(b, tn, col)
            sums = b.read(total)
            result = b.hole(
                "epilogue",
                Tile((tm, tn), float32),
                sums,
                rows,
                b.add(ops.reshape(columns, shape=(1, tn))),
            )
            b.do(placed.wait_copies, pending=0)
            b.write(staged, b.cast(result, bfloat16), own)
            b.do(placed.fence, kind="async")
            b.do(placed.named_sync, number=2 + own, threads=128)
            b.copy_store(c, (row, col), (0, 1), staged, (own,))
            b.do(placed.commit_copies)

        looped(b, "number", own, count, 2, one_tile)
        b.do(placed.wait_copies, pending=0)

    b.role("producer", 4, 40, producer)
    b.role("consumer0", 4, 232, lambda: consumer(0))
    b.role("consumer1", 4, 232, lambda: consumer(1))
    return b.finish((programs,), launch="persistent")


def bias_gelu(b: PlacedBuilder, inputs: Sequence[Node], added: Sequence[Node]) -> Node:
    """gelu(acc + bias[columns]), the exact one."""
    total, _, columns = inputs
    x = b.apply("add", total, b.gather(added[0], columns))
    wave = b.apply("erf", scale(b, x, 1 / math.sqrt(2)))
    return b.apply("multiply", scale(b, x, 0.5), b.apply("add", wave, b.constant(1, float32)))


def ping_pong_matmul_gelu(n: int = 32, **sizes: int) -> Body:
    """The ping-pong matmul, its epilogue filled with bias and gelu."""
    bias = ("bias", Memory((n,), float32, use="constant"))
    return fill(ping_pong_matmul(n=n, **sizes), "epilogue", bias_gelu, [bias])


# ---- (c) FlashAttention-3 forward ---------------------------------------------------------------


def flash_attention(
    heads: int = 2,
    tokens: int = 64,
    width: int = 16,
    rows: int = 16,
    keys: int = 16,
    stages: int = 2,
    causal: bool = True,
) -> Body:
    """softmax(q k^T / sqrt(width)) v and the log-sum-exp; two consumers with `rows` queries each.

    QK of block j and PV of block j-1 are issued together; softmax of j runs beside PV of j-1.
    """
    shape = (heads, tokens, width)
    b = PlacedBuilder(
        "flash_attention",
        [
            *[(name, Memory(shape, bfloat16)) for name in ("q", "k", "v")],
            ("o", Memory(shape, bfloat16, use="result")),
            ("lse", Memory((heads, tokens), float32, use="result")),
        ],
    )
    q, k, v, o, lse = b.parameters
    blocks_of_queries = tokens // (2 * rows)
    head, block = b.program(0, heads), b.program(1, blocks_of_queries)
    first = block * (2 * rows)
    last: Size = tokens // keys
    if causal:
        last = minimum(last, ceil_divide(first + 2 * rows, keys))
    queries = b.allocate((2, rows, width), bfloat16, "shared")
    rings = [b.allocate((stages, keys, width), bfloat16, "shared") for _ in "kv"]
    q_full = b.barrier("q_full", 1)
    full = [b.barrier(f"{x}_full", 1, stages) for x in "kv"]
    empty = [b.barrier(f"{x}_empty", 2, stages) for x in "kv"]

    def producer() -> None:
        b.expect(q_full, 0, 2 * rows * width * 2)
        for half in range(2):
            b.copy_async(queries, (half,), q, (head, first + half * rows, 0), (1, 2), q_full, 0)

        def one(j: Size, _: list[Node]) -> list[Node]:
            for ring, source, filled, free in zip(rings, (k, v), full, empty):
                b.wait(free, j % stages, (j // stages + 1) % 2)
                b.expect(filled, j % stages, keys * width * 2)
                index = (head, j * keys, 0)
                b.copy_async(ring, (j % stages,), source, index, (1, 2), filled, j % stages)
            return []

        looped(b, "j", 0, last, 1, one)

    b.role("producer", 4, 40, producer)
    for own in range(2):
        b.role(
            f"consumer{own}",
            4,
            232,
            lambda own=own: _attend(  # type: ignore[misc]
                b,
                own,
                queries,
                rings,
                q_full,
                full,
                empty,
                (head, first + own * rows, last),
                (o, lse),
                causal,
            ),
        )
    return b.finish((heads, blocks_of_queries), causal=causal)


def _attend(
    b: PlacedBuilder,
    own: int,
    queries: Node,
    rings: list[Node],
    q_full: Node,
    full: list[Node],
    empty: list[Node],
    where: tuple[Size, Size, Size],
    outputs: tuple[Node, Node],
    causal: bool,
) -> None:
    """One consumer of flash_attention."""
    (_, rows, width), (stages, keys, _) = queries.type.shape, rings[0].type.shape
    head, first, last = where
    scores = b.register_tile((rows, keys), float32)
    weights = b.register_tile((rows, keys), bfloat16)
    total = b.register_tile((rows, width), float32)
    row_max = b.register_tile((rows, 1), float32, -math.inf)
    row_sum = b.register_tile((rows, 1), float32, 0.0)
    factor = LOG2_E / math.sqrt(width)

    def multiply_keys(j: Size) -> None:
        b.wait(full[0], j % stages, j // stages % 2)
        b.matrix_async(scores, queries, rings[0], False, (own, j % stages), transpose_b=True)
        b.do(placed.matrix_commit)

    def multiply_values(j: Size) -> None:
        b.wait(full[1], j % stages, j // stages % 2)
        b.matrix_async(total, weights, rings[1], b.less(0, j), (j % stages,))
        b.do(placed.matrix_commit)

    def softmax(j: Size) -> tuple[Node, Node]:
        """Weights of block j and the factor for what was summed before; updates max and sum."""
        s = scale(b, b.read(scores), factor)
        if causal:
            at = column(b, positions(b, rows, first))
            seen = b.apply("less_equal", positions(b, keys, j * keys), at)
            s = b.apply("where", seen, s, b.constant(-math.inf, float32))
        before = b.read(row_max)
        now = b.apply("maximum", before, column(b, b.add(ops.reduce(s, axis=1, kind="max"))))
        p = b.apply("exp2", b.apply("subtract", s, now))
        shrink = b.apply("exp2", b.apply("subtract", before, now))
        more = column(b, b.add(ops.reduce(p, axis=1, kind="sum")))
        b.write(row_max, now)
        b.write(row_sum, b.apply("multiply_add", b.read(row_sum), shrink, more))
        return p, shrink

    def together(j: Size, _: list[Node]) -> list[Node]:
        b.do(placed.named_sync, number=own, threads=256)
        b.do(placed.matrix_fence)
        multiply_keys(j)
        multiply_values(j - 1)
        b.do(placed.named_arrive, number=1 - own, threads=256)
        b.do(placed.matrix_wait, pending=1)
        b.arrive(empty[0], j % stages)
        p, shrink = softmax(j)
        b.do(placed.matrix_wait, pending=0)
        b.arrive(empty[1], (j - 1) % stages)
        b.write(total, b.apply("multiply", b.read(total), shrink))
        b.write(weights, b.cast(p, bfloat16))
        return []

    if own == 1:
        b.do(placed.named_arrive, number=0, threads=256)
    b.wait(q_full, 0, 0)
    b.do(placed.matrix_fence)
    multiply_keys(0)
    b.do(placed.matrix_wait, pending=0)
    b.arrive(empty[0], 0)
    p, _ = softmax(0)
    b.write(weights, b.cast(p, bfloat16))
    looped(b, "j", 1, last, 1, together)
    b.do(placed.matrix_fence)
    multiply_values(last - 1)
    b.do(placed.matrix_wait, pending=0)
    b.arrive(empty[1], (last - 1) % stages)
    _write_attention(b, own, queries, (head, first), outputs, total, row_max, row_sum)


def _write_attention(
    b: PlacedBuilder,
    own: int,
    queries: Node,
    where: tuple[Size, Size],
    outputs: tuple[Node, Node],
    total: Node,
    row_max: Node,
    row_sum: Node,
) -> None:
    """Divide by the sums; the result goes out through the place of the queries."""
    (head, first), (o, lse), sums = where, outputs, b.read(row_sum)
    b.write(queries, b.cast(b.apply("divide", b.read(total), sums), bfloat16), own)
    b.do(placed.fence, kind="async")
    b.do(placed.named_sync, number=2 + own, threads=128)
    b.copy_store(o, (head, first, 0), (1, 2), queries, (own,))
    b.do(placed.commit_copies)
    natural = scale(b, b.apply("add", b.read(row_max), b.apply("log2", sums)), 1 / LOG2_E)
    flat = b.add(ops.reshape(natural, shape=(natural.shape[0],)))
    b.store(lse, flat, (head, first), (1,))
    b.do(placed.wait_copies, pending=0)


# ---- (d) split-KV paged decode ------------------------------------------------------------------


def paged_decode(
    requests: int = 3,
    heads: int = 2,
    width: int = 8,
    pages: int = 12,
    most: int = 5,
    page: int = 16,
    splits: int = 2,
) -> Body:
    """One query a request over its pages; each program takes a share of the pages."""
    cache = Memory((pages, heads, page, width), bfloat16, use="state")
    b = BodyBuilder(
        "paged_decode",
        [
            ("q", Memory((requests, heads, width), bfloat16)),
            ("k", cache),
            ("v", cache),
            ("table", Memory((requests, most), int32)),
            ("lengths", Memory((requests,), int32)),
            ("partial", Memory((requests, heads, splits, width), float32, use="result")),
            ("lse", Memory((requests, heads, splits), float32, use="result")),
        ],
    )
    q, k, v, table, lengths, partial, lse = b.parameters
    r, h, split = b.program(0, requests), b.program(1, heads), b.program(2, splits)
    length = b.atom("length", b.cast(b.load(lengths, (r,)), int64), 0, most * page)
    count = ceil_divide(length, page)
    share = ceil_divide(count, splits)
    lower = split * share
    upper = minimum(lower + share, count)
    query = b.cast(b.load(q, (r, h, 0), (width,), (2,)), float32)
    query = scale(b, query, LOG2_E / math.sqrt(width))

    def one_page(number: Size, carried: list[Node]) -> list[Node]:
        best, total, sums = carried
        where = b.atom("page", b.cast(b.load(table, (r, number)), int64), 0, pages - 1)
        rows = b.cast(b.load(k, (where, h, 0, 0), (page, width), (2, 3)), float32)
        s = b.add(ops.reduce(b.apply("multiply", rows, query), axis=1, kind="sum"))
        seen = b.apply("less", positions(b, page, number * page), b.index(length))
        s = b.apply("where", seen, s, b.constant(-math.inf, float32))
        now = b.apply("maximum", best, b.add(ops.reduce(s, axis=0, kind="max")))
        p = b.apply("exp2", b.apply("subtract", s, now))
        shrink = b.apply("exp2", b.apply("subtract", best, now))
        values = b.cast(b.load(v, (where, h, 0, 0), (page, width), (2, 3)), float32)
        weighted = b.apply("multiply", column(b, p), values)
        more = b.add(ops.reduce(weighted, axis=0, kind="sum"))
        total = b.apply("multiply_add", total, shrink, b.add(ops.reduce(p, axis=0, kind="sum")))
        return [now, total, b.apply("multiply_add", sums, shrink, more)]

    start = [
        b.constant(-math.inf, float32),
        b.constant(0, float32),
        b.constant(0, float32, (width,)),
    ]
    best, total, sums = looped(b, "number", lower, upper, 1, one_page, start, bounds=(0, most - 1))
    some = b.apply("less", b.constant(0, float32), total)
    safe = b.apply("where", some, total, b.constant(1, float32))
    b.store(partial, b.apply("divide", sums, safe), (r, h, split, 0), (3,))
    natural = scale(b, b.apply("add", best, b.apply("log2", safe)), 1 / LOG2_E)
    b.store(lse, natural, (r, h, split))
    return b.finish((requests, heads, splits))


def paged_combine(requests: int = 3, heads: int = 2, width: int = 8, splits: int = 2) -> Body:
    """The shares of paged_decode, weighted by exp(log-sum-exp); no pages give 0."""
    b = BodyBuilder(
        "paged_combine",
        [
            ("partial", Memory((requests, heads, splits, width), float32)),
            ("lse", Memory((requests, heads, splits), float32)),
            ("o", Memory((requests, heads, width), bfloat16, use="result")),
        ],
    )
    partial, lse, o = b.parameters
    r, h = b.program(0, requests), b.program(1, heads)
    logs = b.load(lse, (r, h, 0), (splits,), (2,))
    best = b.add(ops.reduce(logs, axis=0, kind="max"))
    some = b.apply("less", b.constant(-math.inf, float32), best)
    best = b.apply("where", some, best, b.constant(0, float32))
    weight = b.apply("exp", b.apply("subtract", logs, best))
    total = b.add(ops.reduce(weight, axis=0, kind="sum"))
    total = b.apply("where", some, total, b.constant(1, float32))
    rows = b.load(partial, (r, h, 0, 0), (splits, width), (2, 3))
    mixed = b.add(ops.reduce(b.apply("multiply", rows, column(b, weight)), axis=0, kind="sum"))
    b.store(o, b.cast(b.apply("divide", mixed, total), bfloat16), (r, h, 0), (2,))
    return b.finish((requests, heads))


# ---- (e) split-K matmul -------------------------------------------------------------------------


def split_k_partial(m: int = 16, n: int = 32, k: int = 64, splits: int = 4) -> Body:
    """partial[s] = a[:, share s] @ b[share s], in tiles of 8 x 16 x 8."""
    b = BodyBuilder(
        "split_k_partial",
        [
            ("a", Memory((m, k), float32)),
            ("b", Memory((k, n), float32)),
            ("partial", Memory((splits, m, n), float32, use="result")),
        ],
    )
    left, right, partial = b.parameters
    i, j, s = b.program(0, m // 8), b.program(1, n // 16), b.program(2, splits)
    share = k // splits

    def step(at: Size, carried: list[Node]) -> list[Node]:
        x = b.load(left, (i * 8, s * share + at), (8, 8), (0, 1))
        y = b.load(right, (s * share + at, j * 16), (8, 16), (0, 1))
        return [b.add(ops.dot(x, y, carried[0]))]

    (total,) = looped(b, "k", 0, share, 8, step, [b.constant(0, float32, (8, 16))], unroll=2)
    b.store(partial, total, (s, i * 8, j * 16), (1, 2))
    return b.finish((m // 8, n // 16, splits))


def split_k_reduce(m: int = 16, n: int = 32, splits: int = 4) -> Body:
    """c = partial[0] + partial[1] + ..., always in this order."""
    b = BodyBuilder(
        "split_k_reduce",
        [
            ("partial", Memory((splits, m, n), float32)),
            ("c", Memory((m, n), float32, use="result")),
        ],
    )
    partial, c = b.parameters
    i, j = b.program(0, m // 8), b.program(1, n // 16)

    def step(s: Size, carried: list[Node]) -> list[Node]:
        return [b.apply("add", carried[0], b.load(partial, (s, i * 8, j * 16), (8, 16), (1, 2)))]

    (total,) = looped(b, "s", 0, splits, 1, step, [b.constant(0, float32, (8, 16))])
    b.store(c, total, (i * 8, j * 16), (0, 1))
    return b.finish((m // 8, n // 16))


# ---- (f) weight-stationary systolic matmul ------------------------------------------------------


def systolic_matmul(m: int = 32, n: int = 32, k: int = 48) -> Body:
    """c = a @ b: a 16 x 16 block of weights stays in the array while all rows stream through."""
    b = BodyBuilder(
        "systolic_matmul",
        [
            ("a", Memory((m, k), bfloat16)),
            ("b", Memory((k, n), bfloat16, use="constant")),
            ("c", Memory((m, n), float32, use="result")),
        ],
    )
    a, weight, c = b.parameters
    j = b.program(0, n // 16)
    array = b.allocate((16, 16), bfloat16, "weights")
    sums = b.allocate((m, 16), float32, "accumulator")
    stream = b.allocate((m, 16), bfloat16, "scratchpad")
    unit, zero = "systolic", b.index(0)

    def clear(row: Size, _: list[Node]) -> list[Node]:
        b.store(sums, b.constant(0, float32, (8, 16)), (row, 0), (0, 1))
        return []

    def block(s: Size, _: list[Node]) -> list[Node]:
        b.store(array, b.load(weight, (s * 16, j * 16), (16, 16), (0, 1)), (0, 0), (0, 1))
        held = b.add(ops.matrix_load(array, zero, zero, shape=(16, 16), unit=unit))

        def rows(row: Size, _: list[Node]) -> list[Node]:
            at = b.index(row)
            b.store(stream, b.load(a, (row, s * 16), (8, 16), (0, 1)), (row, 0), (0, 1))
            moving = b.add(ops.matrix_load(stream, at, zero, shape=(8, 16), unit=unit))
            old = b.add(ops.matrix_load(sums, at, zero, shape=(8, 16), unit=unit))
            new = b.add(ops.matrix_dot(old, moving, held, unit=unit))
            b.add(ops.matrix_store(sums, new, at, zero, unit=unit))
            return []

        looped(b, "row", 0, m, 8, rows)
        return []

    def drain(row: Size, _: list[Node]) -> list[Node]:
        b.store(c, b.load(sums, (row, 0), (8, 16), (0, 1)), (row, j * 16), (0, 1))
        return []

    looped(b, "row", 0, m, 8, clear)
    looped(b, "s", 0, k // 16, 1, block)
    looped(b, "row", 0, m, 8, drain)
    return b.finish((n // 16,))


# name: (builder, level, Target)
GOLDEN: dict[str, tuple[Callable[[], Body], str, Target]] = {
    "amx_pack": (amx_pack, "portable", AVX512_AMX),
    "amx_matmul": (amx_matmul, "portable", AVX512_AMX),
    "ping_pong_matmul": (ping_pong_matmul, "placed", HOPPER),
    "ping_pong_matmul_gelu": (ping_pong_matmul_gelu, "placed", HOPPER),
    "flash_attention": (flash_attention, "placed", HOPPER),
    "flash_attention_full": (lambda: flash_attention(causal=False), "placed", HOPPER),
    "paged_decode": (paged_decode, "portable", AVX512_AMX),
    "paged_combine": (paged_combine, "portable", AVX512_AMX),
    "split_k_partial": (split_k_partial, "portable", AVX512_AMX),
    "split_k_reduce": (split_k_reduce, "portable", AVX512_AMX),
    "systolic_matmul": (systolic_matmul, "portable", SYSTOLIC),
}

"""Kernels called on Tensors: jit, derivatives, batches, Plans, tuning, the seed's attention."""

from __future__ import annotations

import json

import numpy as np
import pytest

import tilegrad as tg
from tilegrad import kernel, tile
from tilegrad.core.target import A100, H200
from tilegrad.graph import build
from tilegrad.graph.interpret import interpret
from tilegrad.ir.symbol import symbol
from tilegrad.ir.text import parse_block, print_block
from tilegrad.kernels.plan_table import Entry
from tilegrad.tensor.trace import traced_for
from tilegrad.tile import INF, KTile, f16, f32
from tilegrad.tune import kernel_plans

RANDOM = np.random.default_rng(11)


def normal(*shape, dtype=np.float32):
    return tg.tensor(RANDOM.standard_normal(shape).astype(dtype))


@kernel
def softmax(x):
    """Softmax over the last axis, a block of columns at a time."""
    rows, columns = x.shape
    block, i = 32, tile.grid(rows)
    out = tile.result(x.shape, x.dtype)
    m, total = tile.full((), -INF), tile.zeros(())
    for j in tile.range(0, columns, block):
        part = tile.load(x, (i, j), (block,))
        new = tile.maximum(m, tile.max(part))
        total = total * tile.exp(m - new) + tile.sum(tile.exp(part - new))
        m = new
    for j in tile.range(0, columns, block):
        out[i, j : j + block] = tile.exp(x[i, j : j + block] - m) / total


@softmax.vjp
def softmax_backward(inputs, y, g):
    return ((g - (g * y).sum(-1, keepdim=True)) * y,)


@softmax.jvp
def softmax_forward(inputs, y, tangents):
    (t,) = tangents
    return (y * (t - (t * y).sum(-1, keepdim=True)),)


@kernel
def matmul(a, b):
    (m, k), n = a.shape, b.shape[1]
    T = tile.context()
    i, j = tile.grid(tile.ceil_divide(m, T.m), tile.ceil_divide(n, T.n))
    total = tile.zeros((T.m, T.n))
    for p in tile.range(0, k, T.k):
        left, right = tile.load(a, (i * T.m, p), (T.m, T.k)), tile.load(b, (p, j * T.n), (T.k, T.n))
        total = tile.dot(left, right, total)
    out = tile.result((m, n), a.dtype)
    tile.store(out, (i * T.m, j * T.n), total)


@kernel
def stats(x):
    """Two results."""
    rows, columns = x.shape
    i = tile.grid(rows)
    mean, spread = tile.result((rows,)), tile.result((rows,))
    row = tile.load(x, (i, 0), (64,))
    middle = tile.sum(row) / columns
    tile.store(mean, (i,), middle)
    tile.store(spread, (i,), tile.sum((row - middle) ** 2) / columns)


# ---- calling ----------------------------------------------------------------------------------


def test_calls_are_lazy_and_right():
    x = normal(5, 100)
    y = softmax(x)
    assert y.node.op.name == "call" and y.shape == (5, 100)
    np.testing.assert_allclose(y.numpy(), tg.softmax(x, -1).numpy(), atol=1e-6)
    np.testing.assert_allclose(softmax.interpret(x), y.numpy(), atol=1e-6)
    np.testing.assert_allclose(softmax(x.numpy()).numpy(), y.numpy())  # arrays are arguments too


def test_other_ops_around_it_in_one_jit():
    x, w = normal(6, 40), normal(40, 40)

    @tg.jit
    def layer(x, w):
        return (softmax(x @ w * 2) + 1).sum(0), softmax(x)

    total, plain = layer(x, w)
    np.testing.assert_allclose(
        total.numpy(), (tg.softmax(x @ w * 2, -1) + 1).sum(0).numpy(), atol=1e-5
    )
    np.testing.assert_allclose(plain.numpy(), tg.softmax(x, -1).numpy(), atol=1e-6)
    layer(x + 1, w)
    assert layer.traces == 1


def test_several_results_and_some_unused():
    x = normal(7, 50)
    mean, spread = stats(x)
    np.testing.assert_allclose(mean.numpy(), x.numpy().mean(1), atol=1e-6)
    np.testing.assert_allclose(spread.numpy(), x.numpy().var(1), atol=1e-5)
    only = tg.jit(lambda x: stats(x)[1] * 2)(x)
    np.testing.assert_allclose(only.numpy(), 2 * x.numpy().var(1), atol=1e-5)


def test_equal_calls_are_one_node():
    x = normal(4, 32)
    assert softmax(x).node is softmax(x).node
    assert matmul(x, x.T).node is not matmul.schedule(block=(8, 8))(x, x.T).node


def test_the_graph_with_a_call_is_text_and_is_interpreted():
    x = build.input_((4, 40), tg.float32)
    callee = softmax(tg.zeros(4, 40)).node.attrs["callee"]
    from tilegrad.graph import ops
    from tilegrad.ir.block import pure_block

    y = ops.call(x, callee=callee)
    data = RANDOM.standard_normal((4, 40)).astype(np.float32)
    (found,) = interpret([y], {x: data})
    np.testing.assert_allclose(found, tg.softmax(tg.tensor(data), -1).numpy(), atol=1e-6)
    text = print_block(pure_block("main", (), (y,)), "graph")
    again = parse_block(text)
    assert again.results[0].attrs["callee"].to_text() == callee.to_text()


def test_symbolic_sizes():
    traced = tg.jit(lambda x: softmax(x) + 0.0, dynamic={"x": {0: symbol("rows", 1, 64)}})
    for rows in (1, 5, 64):
        x = normal(rows, 70)
        np.testing.assert_allclose(traced(x).numpy(), tg.softmax(x, -1).numpy(), atol=1e-6)
    assert traced.traces == 1
    both = tg.jit(
        matmul,
        dynamic={
            "a": {0: symbol("m", 1, 100), 1: symbol("k", 1, 100)},
            "b": {0: symbol("k", 1, 100)},
        },
    )
    for m, k in ((3, 9), (40, 70), (100, 100)):
        a, b = normal(m, k), normal(k, 24)
        np.testing.assert_allclose(both(a, b).numpy(), a.numpy() @ b.numpy(), atol=1e-4)
    assert both.traces == 1


def test_a_kernel_inside_a_loop():
    def step(x, _):
        return softmax(x), None

    x = normal(3, 20)
    last, _ = tg.scan(step, x, length=3)
    expected = x
    for _ in range(3):
        expected = tg.softmax(expected, -1)
    np.testing.assert_allclose(last.numpy(), expected.numpy(), atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 1, 1), (16, 16, 16), (33, 65, 70), (128, 96, 64)])
@pytest.mark.parametrize("block", [None, (16, 16), (64, 32)])
def test_matmul(shape, block):
    m, n, k = shape
    a, b = normal(m, k), normal(k, n)
    chosen = matmul if block is None else matmul.schedule(block=block, k=16)
    np.testing.assert_allclose(chosen(a, b).numpy(), a.numpy() @ b.numpy(), atol=2e-4)


# ---- derivatives and batches ------------------------------------------------------------------


def slope(function, x, direction, step=1e-3):
    high, low = (function(tg.tensor(x + s * step * direction)).item() for s in (1, -1))
    return (high - low) / (2 * step)


def test_gradient_against_finite_differences():
    x = RANDOM.standard_normal((3, 10))
    weight = tg.tensor(RANDOM.standard_normal((3, 10)))

    def loss(x):
        return (softmax(x) * weight).sum()

    found = tg.grad(loss)(tg.tensor(x)).numpy()
    for _ in range(4):
        direction = RANDOM.standard_normal((3, 10))
        assert abs((found * direction).sum() - slope(loss, x, direction)) < 1e-6
    y, moved = tg.jvp(softmax, (tg.tensor(x),), (tg.tensor(np.ones_like(x)),))
    np.testing.assert_allclose(moved.numpy(), 0, atol=1e-12)
    np.testing.assert_allclose(y.numpy(), tg.softmax(tg.tensor(x), -1).numpy(), rtol=1e-12)


def test_backward_and_jit_of_grad():
    x = tg.tensor(RANDOM.standard_normal((3, 10)).astype(np.float32), requires_grad=True)
    (softmax(x) ** 2).sum().backward()
    plain = tg.grad(lambda x: (tg.softmax(x, -1) ** 2).sum())(x.detach())
    np.testing.assert_allclose(x.grad.numpy(), plain.numpy(), atol=1e-6)
    jitted = tg.jit(tg.grad(lambda x: (softmax(x) ** 2).sum()))(x.detach())
    np.testing.assert_allclose(jitted.numpy(), plain.numpy(), atol=1e-6)


def test_custom_vjp_around_a_kernel():
    @tg.custom_vjp
    def product(a, b):
        return matmul(a, b)

    product.defvjp(
        lambda a, b: (matmul(a, b), (a, b)),
        lambda kept, g: (matmul(g, kept[1].T), matmul(kept[0].T, g)),
    )
    a, b = normal(9, 20), normal(20, 11)
    mine = tg.grad(lambda a, b: (product(a, b) ** 2).sum(), argnums=(0, 1))(a, b)
    plain = tg.grad(lambda a, b: ((a @ b) ** 2).sum(), argnums=(0, 1))(a, b)
    for x, y in zip(mine, plain):
        np.testing.assert_allclose(x.numpy(), y.numpy(), rtol=1e-3, atol=1e-3)


def test_derivatives_of_equal_kernels_are_told_apart():
    def make(factor):
        @kernel
        def copied(x):
            tile.store(tile.result((4,)), (0,), tile.load(x, (0,), (4,)))

        copied.vjp(lambda inputs, y, g: (g * factor,))
        return copied

    one, two = make(1.0), make(2.0)
    x = normal(4)
    for factor, function in ((1, one), (2, two), (1, one)):
        assert tg.grad(lambda x: function(x).sum())(x).tolist() == [factor] * 4  # noqa: B023
        batch = tg.grad(lambda x: tg.vmap(function)(x).sum())(tg.stack([x, x]))  # noqa: B023
        assert batch.tolist() == [[factor] * 4] * 2
    assert repr(one(x).node.attrs["callee"]) == repr(two(x).node.attrs["callee"])
    both = tg.stack([x, x])
    assert tg.vmap(one)(both).node is tg.vmap(one)(both).node


def test_no_derivative_is_an_error():
    with pytest.raises(tg.UserError, match="matmul has no reverse derivative"):
        tg.grad(lambda a: matmul(a, a).sum())(normal(4, 4))
    with pytest.raises(tg.StateError, match="already"):
        softmax.vjp(softmax_backward)

    @kernel
    def bad(x):
        tile.store(tile.result((4,)), (0,), tile.load(x, (0,), (4,)))

    bad.vjp(lambda inputs, y, g: (g, g))
    with pytest.raises(tg.UserError, match="another number of values"):
        tg.grad(lambda x: bad(x).sum())(normal(4))


def test_vmap():
    x = normal(4, 5, 40)
    np.testing.assert_allclose(tg.vmap(softmax)(x).numpy(), tg.softmax(x, -1).numpy(), atol=1e-6)
    swapped = tg.vmap(softmax, in_axes=1, out_axes=1)(x)
    np.testing.assert_allclose(swapped.numpy(), tg.softmax(x, -1).numpy(), atol=1e-6)
    a, b = normal(3, 20, 30), normal(30, 10)
    np.testing.assert_allclose(
        tg.vmap(matmul, (0, None))(a, b).numpy(), a.numpy() @ b.numpy(), atol=1e-4
    )
    twice = tg.vmap(tg.vmap(softmax))(normal(2, 3, 4, 33))
    np.testing.assert_allclose(twice.sum(-1).numpy(), 1, atol=1e-5)


def test_vmap_of_grad_and_grad_of_vmap():
    x = normal(4, 5, 12)

    def loss(x):
        return (softmax(x) ** 2).sum()

    plain = tg.grad(lambda x: (tg.softmax(x, -1) ** 2).sum())(x).numpy()
    np.testing.assert_allclose(tg.vmap(tg.grad(loss))(x).numpy(), plain, atol=1e-6)
    over = tg.grad(lambda x: (tg.vmap(softmax)(x) ** 2).sum())(x)
    np.testing.assert_allclose(over.numpy(), plain, atol=1e-6)


def test_vmap_of_gathers_and_atomics():
    @kernel
    def histogram(x):
        (size,) = x.shape
        tile.grid(1)
        out = tile.result((8,), tile.f32, fill=0)
        at = tile.load(x, (0,), (32,))
        tile.atomic_add(out, tile.cast(at, tile.i64), 1.0)
        assert size <= 32

    x = RANDOM.integers(0, 8, (5, 30)).astype(np.int32)
    expected = np.stack([np.bincount(row, minlength=8) for row in x])
    np.testing.assert_array_equal(tg.vmap(histogram)(tg.tensor(x)).numpy(), expected)


def test_atomics_of_many_programs_lose_nothing():
    @kernel
    def count(x):
        (size,) = x.shape
        i = tile.grid(tile.ceil_divide(size, 16))
        out, order = tile.result((4,), tile.i32, fill=0), tile.result((size,), tile.i32)
        at = tile.load(x, (i * 16,), (16,))
        tile.store(order, (i * 16,), tile.atomic_add(out, at, 1))

    x = RANDOM.integers(0, 4, 50_000).astype(np.int32)
    total, order = count(tg.tensor(x))
    np.testing.assert_array_equal(total.numpy(), np.bincount(x, minlength=4))
    for value in range(4):  # every count was given out once
        seen = np.sort(order.numpy()[x == value])
        np.testing.assert_array_equal(seen, np.arange(seen.size))


# ---- the seed's kernel ------------------------------------------------------------------------


def exact_attention(q, k, v, causal=False):
    q, k, v = (x.numpy().astype(np.float64) for x in (q, k, v))
    scores = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
    if causal:
        scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


@pytest.fixture
def flash_attention(tmp_path):
    """As the seed has it, but for the folder of its cache."""

    # fmt: off
    @kernel.autotune(
      space = dict(BM=[64,128], BN=[64,128], BD=[64,128],
                   warps=[4,8], stages=[2,3], vector=[4,8]),
      metric="latency_ms", budget_ms=200, cache=str(tmp_path))
    def flash_attention(Q: KTile[f16], K: KTile[f16], V: KTile[f16]) -> KTile[f16]:
        T = tile.context()           # exposes BM/BN/BD from schedule
        Qb = tile.load(Q, rows=T.m, cols=T.d, vector=T.vector, prefetch=2)
        acc = tile.zeros((T.m, T.d), f32); m = tile.full((T.m,), -INF); l = tile.zeros((T.m,), f32)  # noqa: E702, E741
        for nblk in tile.range_n(Q.shape, T.n):
            Kb = tile.load(K, nblk, cols=T.d, vector=T.vector, prefetch=2)
            Vb = tile.load(V, nblk, cols=T.d, vector=T.vector, prefetch=2)
            scores = tile.dot(Qb, tile.transpose(Kb)) * tile.rsqrt(float(T.d))
            p, m_curr, l_curr = tile.softmax_online(scores)     # numerically safe primitive
            acc, m, l = tile.softmax_accumulate(acc, m, l, p, Vb, m_curr, l_curr)  # noqa: E741
        return tile.cast(acc / l[:, None], f16)
    # fmt: on

    return flash_attention


@pytest.mark.parametrize("shape", [(64, 64), (2, 3, 150, 64), (1, 200, 32)])
def test_the_seeds_flash_attention(flash_attention, shape):
    q, k, v = (normal(*shape, dtype=np.float16) for _ in "qkv")
    exact = exact_attention(q, k, v)
    fixed = flash_attention.schedule(block=(128, 128), k=64).warps(8).stages(3).vector(8)
    fixed = fixed.swizzle("xor")
    (body,) = fixed.lower(q, k, v)
    assert {n: body.notes[n] for n in ("warps", "stages", "vector", "swizzle")} == {
        "warps": 8,
        "stages": 3,
        "vector": 8,
        "swizzle": "xor",
    }
    np.testing.assert_allclose(fixed(q, k, v).numpy(), exact, atol=2e-3)
    if len(shape) == 2:
        np.testing.assert_allclose(flash_attention(q, k, v).numpy(), exact, atol=2e-3)
        np.testing.assert_allclose(fixed.interpret(q, k, v), exact, atol=2e-3)


def test_wrong_dtypes_and_plans(flash_attention):
    wide = normal(64, 64)
    with pytest.raises(tg.DTypeError, match="argument Q has another dtype"):
        flash_attention.schedule(k=64)(wide, wide, wide)
    long = normal(64, 128, dtype=np.float16)
    with pytest.raises(tg.ShapeError, match="does not hold a whole row"):
        flash_attention.schedule(k=64)(long, long, long)
    with pytest.raises(tg.UserError, match="unknown swizzle"):
        softmax.swizzle("round")
    with pytest.raises(tg.UserError, match="bad warps"):
        softmax.warps(0)
    with pytest.raises(tg.UserError, match="has no argument 'depth'"):
        softmax.schedule(depth=3)(wide)


def test_causal_attention_with_a_computed_bound():
    @kernel
    def causal(q, k, v, *, block: int = 16):
        tokens, width = q.shape
        first = tile.grid(tile.ceil_divide(tokens, block)) * block
        rows = first + tile.arange(block)
        query = tile.load(q, (first, 0), (block, width))
        acc, m, total = tile.zeros((block, width)), tile.full((block,), -INF), tile.zeros((block,))
        for j in tile.range(0, tile.minimum(tokens, first + block), block):
            scores = tile.dot(query, tile.load(k, (j, 0), (block, width)).T) * width**-0.5
            scores = tile.where(rows[:, None] >= j + tile.arange(block), scores, -INF)
            p, m_now, l_now = tile.softmax_online(scores)
            values = tile.load(v, (j, 0), (block, width))
            acc, m, total = tile.softmax_accumulate(acc, m, total, p, values, m_now, l_now)
        tile.store(tile.result(q.shape), (first, 0), acc / total[:, None])

    q, k, v = (normal(75, 32) for _ in "qkv")
    np.testing.assert_allclose(causal(q, k, v).numpy(), exact_attention(q, k, v, True), atol=1e-5)


# ---- tuning -----------------------------------------------------------------------------------


def tuned(tmp_path, **options):
    @kernel.autotune(
        dict(block=[(16, 16), (32, 32)], BK=[16, 64], warps=[4, 8]), cache=str(tmp_path), **options
    )
    def product(a, b):
        (m, k), n = a.shape, b.shape[1]
        T = tile.context()
        i, j = tile.grid(tile.ceil_divide(m, T.m), tile.ceil_divide(n, T.n))
        total = tile.zeros((T.m, T.n))
        for p in tile.range(0, k, T.k):
            left = tile.load(a, (i * T.m, p), (T.m, T.k))
            total = tile.dot(left, tile.load(b, (p, j * T.n), (T.k, T.n)), total)
        tile.store(tile.result((m, n)), (i * T.m, j * T.n), total)

    return product


def test_autotune_keeps_the_best_on_disk(tmp_path):
    a, b = normal(64, 64), normal(64, 64)
    first = tuned(tmp_path)
    np.testing.assert_allclose(first(a, b).numpy(), a.numpy() @ b.numpy(), atol=1e-4)
    timed = [t for t in first.trials if t.milliseconds is not None]
    assert len(first.trials) == 8 and 1 <= len(timed) <= 4
    assert sum("the same program" in t.note for t in first.trials) >= 1  # warps, on the CPU
    assert "m=16, n=16, k=16, warps=4" in first.report()
    (file,) = tmp_path.glob("product-*.json")
    record = json.loads(file.read_text())
    best = min(timed, key=lambda t: t.milliseconds).plan
    (entry,) = record["plans"].values()
    assert entry["plan"] == best.to_record()
    entry["plan"] = {"m": 8, "n": 8, "k": 8}  # what stands in the table is what runs
    file.write_text(json.dumps(record))
    second = tuned(tmp_path)
    np.testing.assert_allclose(second(a, b).numpy(), a.numpy() @ b.numpy(), atol=1e-4)
    assert (
        second(a, b).node.attrs["callee"].key
        == tuned(tmp_path).schedule(block=(8, 8), k=8)(a, b).node.attrs["callee"].key
    )
    file.write_text("not json")
    third = tuned(tmp_path)
    np.testing.assert_allclose(third(a, b).numpy(), a.numpy() @ b.numpy(), atol=1e-4)
    assert len(third.trials) == 8


def test_autotune_inside_jit_and_other_problems(tmp_path):
    product = tuned(tmp_path, budget_ms=20)
    a, b = normal(32, 48), normal(48, 16)
    found = tg.jit(lambda a, b: product(a, b) * 2)(a, b)
    np.testing.assert_allclose(found.numpy(), 2 * (a.numpy() @ b.numpy()), atol=1e-4)
    product(b, normal(16, 48)).realize()
    assert len(list(tmp_path.glob("*.json"))) == 2


def test_autotune_of_static_arguments(tmp_path):
    @kernel.autotune(dict(block=[(8, 8)], width=[16, 32]), cache="")
    def add_one(x, *, width: int):
        (size,) = x.shape
        i = tile.grid(tile.ceil_divide(size, width))
        out = tile.result((size,))
        out[i * width : i * width + width] = x[i * width : i * width + width] + 1.0

    x = normal(100)
    np.testing.assert_allclose(add_one(x).numpy(), x.numpy() + 1)
    assert {dict(t.plan.sizes)["width"] for t in add_one.trials} == {16, 32}
    assert not list(tmp_path.iterdir())


def test_bad_tuning():
    with pytest.raises(tg.UserError, match="unknown metric"):
        kernel.autotune({"BM": [1]}, metric="energy")
    empty = kernel.autotune({}, cache="")(matmul.definition.function)
    with pytest.raises(tg.UserError, match="an empty space"):
        empty(normal(4, 4), normal(4, 4))

    @kernel.autotune(dict(k=[1, 2]), cache="")
    def never(x):
        tile.store(tile.result((4, 4)), (0, 0), tile.zeros((tile.context().d, 4)))

    with pytest.raises(tg.ShapeError, match="does not hold a whole row"):  # as of all Plans
        never(normal(4, 4))


def test_a_mistake_in_a_tuned_kernel_is_told_once():
    @kernel.autotune(dict(BM=[16, 32], BN=[16, 32]), cache="")
    def annotated(x: KTile[tg.float16]):
        tile.store(tile.result((4,)), (0,), tile.zeros((4,)))

    @kernel.autotune(dict(BM=[16, 32], warps=[4, 8]), cache="")
    def bits(x):
        T = tile.context()
        i = tile.grid(tile.ceil_divide(x.shape[0], T.m))
        tile.store(tile.result(x.shape), (i * T.m,), tile.load(x, (i * T.m,), (T.m,)) & 3)

    @kernel.autotune(dict(width=[1, 2, 3]), cache="")
    def several(x, *, width: int):
        if width == 1:
            tile.store(tile.result((4,)), (0,), tile.load(x, (0,), (4,)) & 3)
        tile.store(tile.result((4,)), (0,), tile.zeros((4,)) + tile.zeros((4 + width,)))

    for wrong, expected in ((annotated, "float16"), (bits, "integers or bools")):
        with pytest.raises(tg.DTypeError) as found:
            wrong(normal(64))
        text = str(found.value)
        assert text.count("got: float32") == 1 and text.count(f"expected: {expected}") == 1
        assert "test_kernel.py" in text
    with pytest.raises(tg.UserError, match="no Plan of the space can be run") as found:
        several(normal(4))
    text = str(found.value)
    assert text.count("got: float32") == 1 and "1 of 3" in text and "2 of 3" in text


def test_autotune_for_a_machine_that_is_not_here(tmp_path, monkeypatch):
    """Nothing is measured: the best Plan known for that Target, else the first of the space."""
    product, a, b = tuned(tmp_path), normal(32, 48), normal(48, 16)
    monkeypatch.setattr(kernel_plans, "search", lambda *_: pytest.fail("something was measured"))
    first = product.schedule(block=(16, 16), k=16).warps(4)

    def callee(of, target):
        with traced_for(target):
            return of(a, b).node.attrs["callee"].key

    assert callee(product, H200) == callee(first, H200)
    tg.explain(lambda a, b: product(a, b), a, b, target="h200", level="schedule")
    given, tensors = product._bind((a, b), {})
    plans, problem = product._plans(), product._problem(given, tensors)
    plans.table.put(plans._key(problem, H200), Entry({"m": 8, "n": 8, "k": 8}))
    assert callee(product, H200) == callee(product.schedule(block=(8, 8), k=8), H200)
    assert callee(product, A100) == callee(first, A100)

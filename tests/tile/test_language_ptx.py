"""Kernels of the tile language as PTX: assembled, simulated, and compared with the interpreter.

The same functions as in the tests of the language and of `tensor.kernel`; nothing in a kernel
knows where it will run.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from simulator import simulate

import tilegrad as tg
from tilegrad import kernel, tile
from tilegrad.compiler.pipeline import fitted
from tilegrad.core.dtype import BY_NUMPY
from tilegrad.core.target import A100, H100
from tilegrad.ir.types import Array
from tilegrad.targets.ptx.assemble import assemble, find_ptxas
from tilegrad.targets.ptx.emit import emit
from tilegrad.tile import INF, KTile, f16, f32
from tilegrad.tile.plan import Plan

RANDOM = np.random.default_rng(5)
TARGETS = pytest.mark.parametrize("target", [H100, A100], ids=lambda t: t.cpu)


def normal(*shape, dtype=np.float32):
    return RANDOM.standard_normal(shape).astype(dtype)


def as_ptx(function, *arrays, target=H100, tolerance=1e-5, plan=None, **static):
    """Emit, assemble where ptxas is, simulate; compare with the interpreter, give the results."""
    names = list(function.definition.signature.parameters)
    types = {n: Array(a.shape, BY_NUMPY[a.dtype]) for n, a in zip(names, arrays)}
    given = function.definition.bind((), {**types, **static}, Plan())
    callee = function.definition.callee(given, plan or Plan(), target)
    expected = callee.interpret(*arrays)
    results = [np.zeros_like(e) for e in expected]
    for body, roles in callee.launches:
        text, entry = emit(fitted(body, target), body.name, target)
        if find_ptxas() is not None:
            assemble(text, target.cpu)
        simulate(text, entry, [arrays[i] if r == "read" else results[i] for r, i in roles])
    for got, one in zip(results, expected):
        np.testing.assert_allclose(
            got.astype(np.float64), one.astype(np.float64), rtol=tolerance, atol=tolerance
        )
    return results


@kernel
def many_things(x, index, *, block: int):
    """Loads at an edge, masks, gathers, reductions, scans, branches and loops in one kernel."""
    rows, columns = x.shape
    i = tile.grid(rows)
    out, found = tile.result((rows, columns)), tile.result((rows, 4))
    total, count = 0.0, 0
    for j in tile.range(0, columns, block):
        part = tile.load(x, (i, j), (block,))
        if tile.max(part) > 1.5:
            part = part * 0.5
            count += 1
        total = total + tile.sum(part)
        tile.store(out, (i, j), tile.cumsum(tile.exp(tile.minimum(part, 1.0))))
    at = tile.load(index, (0,), (16,))
    picked = tile.load(x, at + i * columns, mask=at < columns - 1, other=2.0)
    tile.store(found, (i, 0), total)
    tile.store(found, (i, 1), count)
    tile.store(found, (i, 2), tile.sum(picked))
    tile.store(found, (i, 3), tile.load(x, (i, tile.load(index, (i,)))))


@TARGETS
def test_many_things(target):
    x, index = normal(3, 50), RANDOM.integers(0, 50, 16).astype(np.int32)
    as_ptx(many_things, x, index, target=target, block=32)


@kernel
def histogram(x):
    (size,) = x.shape
    i = tile.grid(tile.ceil_divide(size, 64))
    counts = tile.result((8,), tile.i32, fill=0)
    tile.atomic_add(counts, tile.load(x, (i * 64,), (64,)), 1)


def test_atomics():
    x = RANDOM.integers(0, 8, 150).astype(np.int32)
    (found,) = as_ptx(histogram, x)
    np.testing.assert_array_equal(found, np.bincount(x, minlength=8))


@kernel
def matmul(a, b):
    (m, k), n = a.shape, b.shape[1]
    T = tile.context()
    i, j = tile.grid(tile.ceil_divide(m, T.m), tile.ceil_divide(n, T.n))
    total = tile.zeros((T.m, T.n))
    for p in tile.range(0, k, T.k):
        left = tile.load(a, (i * T.m, p), (T.m, T.k))
        total = tile.dot(left, tile.load(b, (p, j * T.n), (T.k, T.n)), total)
    tile.store(tile.result((m, n)), (i * T.m, j * T.n), total)


@TARGETS
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(32, 32, 64), (33, 20, 40)])
def test_matmul(target, dtype, shape):
    m, n, k = shape
    a, b = normal(m, k, dtype=dtype), normal(k, n, dtype=dtype)
    plan = Plan().with_(block=(32, 32), k=32, warps=4)
    (found,) = as_ptx(matmul, a, b, target=target, plan=plan, tolerance=1e-4)
    np.testing.assert_allclose(found, a.astype(np.float64) @ b.astype(np.float64), atol=1e-4)


def test_odd_sizes_of_a_dot_are_refused_with_the_line():
    types = {"a": Array((40, 40), tg.float32), "b": Array((40, 40), tg.float32)}
    plan = Plan().with_(block=(32, 24), k=16)
    ((body, _),) = matmul.definition.callee(types, plan, H100).launches
    with pytest.raises(tg.UserError, match=r"\(32, 24, 16\) does not fit h100") as caught:
        fitted(body, H100)
    assert caught.value.location.file == __file__


@kernel
def flash_attention(Q: KTile[f16], K: KTile[f16], V: KTile[f16]) -> KTile[f16]:
    """The seed's."""
    T = tile.context()
    Qb = tile.load(Q, rows=T.m, cols=T.d, vector=T.vector, prefetch=2)
    acc, m, total = tile.zeros((T.m, T.d), f32), tile.full((T.m,), -INF), tile.zeros((T.m,), f32)
    for nblk in tile.range_n(Q.shape, T.n):
        Kb = tile.load(K, nblk, cols=T.d, vector=T.vector, prefetch=2)
        Vb = tile.load(V, nblk, cols=T.d, vector=T.vector, prefetch=2)
        scores = tile.dot(Qb, tile.transpose(Kb)) * tile.rsqrt(float(T.d))
        p, m_curr, l_curr = tile.softmax_online(scores)
        acc, m, total = tile.softmax_accumulate(acc, m, total, p, Vb, m_curr, l_curr)
    return tile.cast(acc / total[:, None], f16)


@TARGETS
@pytest.mark.parametrize("tokens", [64, 50])
def test_flash_attention(target, tokens):
    q, k, v = (normal(2, tokens, 32, dtype=np.float16) for _ in "qkv")
    plan = Plan().with_(block=(64, 32), warps=4, stages=2)
    (found,) = as_ptx(flash_attention, q, k, v, target=target, plan=plan, tolerance=2e-3)
    exact = [x.astype(np.float64) for x in (q, k, v)]
    scores = exact[0] @ exact[1].swapaxes(-1, -2) / np.sqrt(32)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    exact_result = weights / weights.sum(-1, keepdims=True) @ exact[2]
    np.testing.assert_allclose(found, exact_result, atol=2e-3)


@kernel
def pipelined(a, b, *, stages: int = 2):
    """a @ b^T at the placed level: TMA, mbarriers, wgmma."""
    (m, k), n = a.shape, b.shape[0]
    i, j = tile.grid(m // 64, n // 64)
    out = tile.result((m, n), f32)
    left = tile.shared((stages, 64, 64), a.dtype, layout="swizzle128")
    right = tile.shared((stages, 64, 64), b.dtype, layout="swizzle128")
    ring = tile.pipeline("ab", stages, consumers=1)
    with tile.role("producer", warps=4):
        tile.grid_dependency_wait()
        for s in tile.range(k // 64):
            ring.acquire(s)
            ring.expect(s, 2 * 64 * 64 * 2)
            at = ring.stage(s)
            tile.copy_async(left[at], a[i * 64 : i * 64 + 64, s * 64 : s * 64 + 64], ring.full[at])
            tile.copy_async(right[at], b[j * 64 : j * 64 + 64, s * 64 : s * 64 + 64], ring.full[at])
    with tile.role("consumer", warps=4):
        tile.grid_dependency_wait()
        total = tile.register((64, 64), f32, fill=0.0)
        tile.matrix_fence()
        for s in tile.range(k // 64):
            ring.wait(s)
            at = ring.stage(s)
            tile.matrix_async(total, left[at], right[at].T)
            tile.matrix_commit()
            tile.matrix_wait(0)
            ring.release(s)
        tile.store(out, (i * 64, j * 64), tile.read(total))


def test_the_placed_level():
    a, b = normal(64, 256, dtype=ml_dtypes.bfloat16), normal(128, 256, dtype=ml_dtypes.bfloat16)
    (found,) = as_ptx(pipelined, a, b, tolerance=1e-3)
    np.testing.assert_allclose(found, a.astype(np.float64) @ b.astype(np.float64).T, atol=1e-3)
    types = {"a": Array(a.shape, tg.bfloat16), "b": Array(b.shape, tg.bfloat16), "stages": 2}
    ((body, _),) = pipelined.definition.callee(types, Plan(), H100).launches
    text, _ = emit(fitted(body, H100), body.name, H100)
    assert "wgmma.mma_async" in text and "cp.async.bulk.tensor" in text


@kernel
def stacked(a, b):
    """a - b: both land in one place, one below the other."""
    i = tile.grid(a.shape[0] // 64)
    out = tile.result(a.shape, f32)
    both = tile.shared((128, 64), a.dtype, layout="swizzle128")
    full = tile.barrier("full", 1, 1)
    with tile.role("producer", warps=1):
        tile.grid_dependency_wait()
        full.expect(0, 2 * 64 * 64 * 2)
        tile.copy_async(both[0:64, :], a[i * 64 : i * 64 + 64, :], full[0])
        tile.copy_async(both[64:128, :], b[i * 64 : i * 64 + 64, :], full[0])
    with tile.role("consumer", warps=4):
        tile.grid_dependency_wait()
        full.wait(0, 0)
        above, below = tile.read(both[0:64, :]), tile.read(both[64:128, :])
        tile.store(out, (i * 64, 0), tile.cast(above, f32) - tile.cast(below, f32))


def test_rows_of_a_place():
    a, b = (normal(128, 64, dtype=ml_dtypes.bfloat16) for _ in range(2))
    (found,) = as_ptx(stacked, a, b, tolerance=0.0)
    np.testing.assert_array_equal(found, a.astype(np.float32) - b.astype(np.float32))


def test_the_default_plan_of_a_gpu_is_assembled():
    """Blocks of 128 x 128 with 8 warps, as a call on a GPU would have them."""
    if find_ptxas() is None:
        pytest.skip("NO PTXAS HERE: the default Plan's PTX is not assembled")
    array = Array((2, 1024, 64), tg.float16)
    callee = flash_attention.definition.callee({n: array for n in "QKV"}, Plan(), H100)
    ((body, _),) = callee.launches
    text, entry = emit(fitted(body, H100), body.name, H100)
    assert entry.threads == 256 and entry.grid[:1]
    assemble(text, H100.cpu)

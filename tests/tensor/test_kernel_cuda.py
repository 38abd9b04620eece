"""Kernels of the tile language on Tensors of a GPU: a fake driver, the interpreter or simulator."""

from __future__ import annotations

import numpy as np
import pytest
from test_cuda import cuda, numbers  # noqa: F401  (a fixture)
from test_kernel import matmul, softmax

import tilegrad as tg
from tilegrad import kernel, tile
from tilegrad.tile import INF, KTile, f16


def exact_softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_a_kernel_runs_where_its_arguments_are(cuda) -> None:  # noqa: F811
    data = numbers(5, 70)
    x = tg.tensor(data).cuda()
    y = softmax(x)
    assert y.device == "cuda:0"
    np.testing.assert_allclose(y.numpy(), exact_softmax(data), atol=1e-6)
    assert y.buffer().device == "cuda:0"
    np.testing.assert_allclose(softmax(tg.tensor(data)).numpy(), exact_softmax(data), atol=1e-6)


def test_jit_gradients_and_batches(cuda) -> None:  # noqa: F811
    data = numbers(3, 4, 40)
    x = tg.tensor(data).cuda()
    found = tg.jit(lambda x: softmax(x * 2) + 1)(x[0])
    np.testing.assert_allclose(found.numpy(), exact_softmax(data[0] * 2) + 1, atol=1e-6)
    np.testing.assert_allclose(tg.vmap(softmax)(x).numpy(), exact_softmax(data), atol=1e-6)
    gradient = tg.grad(lambda x: (softmax(x) ** 2).sum())(x[0])
    plain = tg.grad(lambda x: (tg.softmax(x, -1) ** 2).sum())(tg.tensor(data[0]))
    np.testing.assert_allclose(gradient.numpy(), plain.numpy(), atol=1e-6)


def test_matmul_by_a_chosen_plan(cuda) -> None:  # noqa: F811
    a, b = numbers(33, 40), numbers(40, 20)
    chosen = matmul.schedule(block=(32, 32), k=16).warps(4)
    found = chosen(tg.tensor(a).cuda(), tg.tensor(b).cuda())
    np.testing.assert_allclose(found.numpy(), a @ b, atol=1e-4)


def test_tuned_attention(cuda) -> None:  # noqa: F811
    @kernel.autotune(dict(BM=[16, 32], BN=[32], warps=[4]), budget_ms=1, cache="")
    def attention(Q: KTile[f16], K: KTile[f16], V: KTile[f16]) -> KTile[f16]:
        T = tile.context()
        query = tile.load(Q, rows=T.m, cols=T.d)
        acc, m, total = tile.zeros((T.m, T.d)), tile.full((T.m,), -INF), tile.zeros((T.m,))
        for block in tile.range_n(K.shape, T.n):
            keys, values = tile.load(K, block, cols=T.d), tile.load(V, block, cols=T.d)
            scores = tile.dot(query, tile.transpose(keys)) * tile.rsqrt(float(T.d))
            p, m_now, l_now = tile.softmax_online(scores)
            acc, m, total = tile.softmax_accumulate(acc, m, total, p, values, m_now, l_now)
        return tile.cast(acc / total[:, None], f16)

    data = [numbers(40 + i, 16)[:40].astype(np.float16) for i in range(3)]
    found = attention(*[tg.tensor(x).cuda() for x in data])
    q, k, v = (x.astype(np.float64) for x in data)
    np.testing.assert_allclose(found.numpy(), exact_softmax(q @ k.T / 4) @ v, atol=2e-3)
    assert attention.trials[0].milliseconds is not None


def test_arguments_on_two_devices(cuda) -> None:  # noqa: F811
    here, there = tg.tensor(numbers(4, 4)), tg.tensor(numbers(4, 4)).cuda()
    with pytest.raises(tg.UserError, match="several devices"):
        matmul(here, there)

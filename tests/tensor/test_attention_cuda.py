"""Attention on Tensors of a GPU: the library's kernels through a fake driver that interprets."""

from __future__ import annotations

import numpy as np
import pytest
from test_cuda import cuda, numbers  # noqa: F401  (a fixture)

import tilegrad as tg


def inputs(*sizes: tuple[int, ...]) -> list[tg.Tensor]:
    return [tg.tensor(numbers(*size)).bfloat16() for size in sizes]


def close(found: tg.Tensor, wanted: tg.Tensor, most: float = 2e-2) -> None:
    a, b = found.float().numpy(), wanted.float().numpy()
    assert np.linalg.norm(a - b) <= most * np.linalg.norm(b)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("causal", [False, True])
def test_forward_and_backward_reach_the_kernels(cuda, causal) -> None:  # noqa: F811
    q, k, v = inputs((1, 2, 70, 64), (1, 1, 70, 64), (1, 1, 70, 64))

    def loss(q, k, v):
        return (tg.attention(q, k, v, causal=causal).float() ** 2).sum()

    step = tg.jit(tg.value_and_grad(loss, (0, 1, 2)))
    on_gpu = [x.cuda() for x in (q, k, v)]
    value, gradients = step(*on_gpu)
    names = " ".join(cuda.kernels)
    assert "attention_attention_get" in names and "attention_attention_backward" in names
    assert "exp" not in names
    wanted_value, wanted = tg.value_and_grad(loss, (0, 1, 2))(q, k, v)
    close(value, wanted_value)
    for a, b in zip(gradients, wanted):
        assert a.device == "cuda:0" and a.shape == b.shape
        close(a, b)


def test_what_no_kernel_takes_is_decomposed(cuda) -> None:  # noqa: F811
    q, k, v = (tg.tensor(numbers(1, 2, 20, 16)) for _ in range(3))  # float32
    found = tg.jit(lambda *x: tg.attention(*x, causal=True))(*(x.cuda() for x in (q, k, v)))
    np.testing.assert_allclose(found.numpy(), tg.attention(q, k, v, causal=True).numpy(), atol=1e-5)

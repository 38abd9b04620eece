"""Rows of attention that see nothing are what the plain code gives, found as attention or not.

nan for a row of -inf, the mean of the values for equal finite scores; derivatives too. What
`scaled_dot_product_attention` gives for such rows is torch's.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from sampled import sampled

import tilegrad as tg
from tilegrad.graph.recognize import recognize
from tilegrad.ir.rewrite import Log

torch = pytest.importorskip("torch")
SHAPE, KEYS = (2, 2, 5, 16), 7
FILLS = (-math.inf, -1e9, -1e30, float(np.finfo(np.float32).min))
random = np.random.default_rng(0)
Q, K, V = (random.standard_normal((2, 2, n, 16)).astype(np.float32) for n in (5, KEYS, KEYS))
MASK = random.random((2, 1, 5, KEYS)) < 0.6
MASK[0, 0, 2] = MASK[1, 0, 0] = False
MASK[:, :, 4] = True


def scores(m, q, k):
    return m.matmul(q, k.transpose(-1, -2)) * 0.25


def out(m, x, v):
    return m.matmul(m.softmax(x, -1), v)


def floats(m, mask, fill, x):
    zeros, low = m.zeros_like(mask, dtype=x.dtype), m.full_like(mask, fill, dtype=x.dtype)
    return m.where(mask, zeros, low)


def where(m, q, k, v, mask, fill):
    x = scores(m, q, k)
    return out(m, m.where(mask, x, m.full_like(x, fill)), v)


def masked_fill(m, q, k, v, mask, fill):
    return out(m, scores(m, q, k).masked_fill(~mask, fill), v)


def added(m, q, k, v, mask, fill):
    x = scores(m, q, k)
    return out(m, x + floats(m, mask, fill, x), v)


def multiplied(m, q, k, v, mask, fill):
    x = scores(m, q, k)
    hidden = 1.0 - mask.to(x.dtype)
    return out(m, x + (hidden * fill if math.isfinite(fill) else floats(m, mask, fill, x)), v)


def of_positions(m, q, k, v, mask, fill):
    band = m.tril(m.ones(5, KEYS), -1) > 0  # the first query sees nothing
    return out(m, scores(m, q, k).masked_fill(~band, fill), v)


def logs(m, q, k, v, mask, fill):
    x = scores(m, q, k).masked_fill(~mask, fill)
    return m.matmul(m.exp(m.log_softmax(x, -1)), v)


def home(m):
    return torch.nn.functional if m is torch else tg.nn.functional


def sdpa_of_floats(m, q, k, v, mask, fill):
    return home(m).scaled_dot_product_attention(q, k, v, attn_mask=floats(m, mask, fill, q))


def sdpa(m, q, k, v, mask, fill):
    return home(m).scaled_dot_product_attention(q, k, v, attn_mask=mask)


SPELLINGS = (where, masked_fill, added, multiplied, of_positions, logs, sdpa_of_floats, sdpa)


@pytest.mark.parametrize("fill", sampled(FILLS, lambda fill: fill in FILLS[::2]), ids=str)
@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda f: f.__name__)
def test_rows_that_see_nothing(spelling, fill):
    given = [torch.tensor(x, requires_grad=True) for x in (Q, K, V)]
    wanted = spelling(torch, *given, torch.tensor(MASK), fill)
    weight = np.linspace(0.5, 1.5, wanted.numel(), dtype=np.float32).reshape(wanted.shape)
    (wanted * torch.tensor(weight)).sum().backward()

    def loss(q, k, v, mask):
        return (spelling(tg, q, k, v, mask, fill) * tg.tensor(weight)).sum()

    inputs = [tg.tensor(x) for x in (Q, K, V, MASK)]
    forward = tg.jit(lambda *x: spelling(tg, *x, fill))
    found = [forward(*inputs), *tg.jit(tg.grad(loss, argnums=(0, 1, 2)))(*inputs)]
    wide = [wanted.detach(), *[x.grad for x in given]]
    if spelling is sdpa_of_floats and fill < -1e4:
        found, wide = found[:1], wide[:1]  # torch's own derivatives differ from its plain code's
    for name, a, b in zip(("result", "q", "k", "v"), found, wide):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("fill", FILLS, ids=str)
def test_they_are_still_found(fill):
    for spelling in (where, added, of_positions):
        lowered = tg.jit(lambda *x, f=spelling: f(tg, *x, fill)).lower(
            *[tg.tensor(x) for x in (Q, K, V, MASK)]
        )
        log = Log()
        recognize(list(lowered.outputs), log)
        assert log.fired.get("attention") == 1, spelling.__name__


def test_a_mask_that_shows_every_query_a_key_costs_nothing():
    """The guard is an elementwise pass over the result: causal attention has none."""

    def causal(q, k, v):
        seen = tg.tril(tg.ones(KEYS, KEYS)) > 0
        return out(tg, scores(tg, q, k).masked_fill(~seen, -math.inf), v)

    lowered = tg.jit(causal).lower(*[tg.tensor(K)] * 3)
    (node,) = recognize(list(lowered.outputs))
    while node.op.category == "movement" or node.op.name == "cast":
        node = node.inputs[0]
    assert node.op.name == "get"

"""Gradients of every differentiable function, against torch's autograd, in float64.

All cases of a table share one backward pass over fresh leaves, so that they compile together.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from torch_tables import data, flat, torch

import tilegrad as tg

WEIGHTS = np.random.default_rng(7).uniform(0.5, 1.5, 4096)


def weighed(m, results):
    """One number of all float results, each element with its own weight."""
    total = 0.0
    for result in flat(results):
        if not (result.is_floating_point() and result.requires_grad):
            continue
        count = int(np.prod(result.shape))
        weights = WEIGHTS[:count].reshape(tuple(result.shape))
        weights = tg.tensor(weights) if m is tg else torch.from_numpy(weights)
        total = total + (result * weights).sum()
    return total


def check(cases, *inputs):
    leaves, total = [], 0.0
    for name, function in cases:
        mine = [
            tg.from_torch(i).requires_grad_() if i.is_floating_point() else tg.from_torch(i)
            for i in inputs
        ]
        total = total + weighed(tg, function(tg, *mine))
        leaves.append((name, mine))
    total.backward()
    tg.realize([t.grad for _, row in leaves for t in row if t.grad is not None])
    wrong = []
    for (name, mine), (_, function) in zip(leaves, cases):
        theirs = [i.clone().requires_grad_() if i.is_floating_point() else i for i in inputs]
        weighed(torch, function(torch, *theirs)).backward()
        for i, (a, b) in enumerate(zip(mine, theirs)):
            if b.grad is None:
                continue
            got = np.zeros(tuple(b.shape)) if a.grad is None else a.grad.numpy()
            close = 1e-6 if name.startswith("hardsigmoid") else 1e-9  # torch's 1/6 is a float32
            if not np.allclose(got, b.grad.numpy(), close, 1e-10, equal_nan=True):
                wrong.append(f"{name}, input {i}:\n{got}\ntorch says\n{b.grad.numpy()}")
    assert not wrong, "\n".join(wrong)


def named(*names):
    return [(n, lambda m, x, n=n: getattr(m, n)(x)) for n in names]


def functional(name, **options):
    def run(m, x):
        return getattr(tg if m is tg else torch.nn.functional, name)(x, **options)

    return (f"{name} {options or ''}", run)


X = data("float64", (3, 5))
Y = data("float64", (3, 5), 1)
UNIT = data("float64", (3, 5), 2, 0.05, 0.95)
EDGES = torch.tensor(
    [0.0, 1.0, -1.0, 3.0, -3.0, 6.0, 30.0, -30.0, 800.0, -800.0, 0.5, -0.5], dtype=torch.float64
)


def test_maths():
    check(
        named(
            "exp",
            "exp2",
            "expm1",
            "sin",
            "cos",
            "tan",
            "atan",
            "sinh",
            "cosh",
            "tanh",
            "asinh",
            "sigmoid",
            "erf",
            "erfc",
            "abs",
            "neg",
            "square",
            "deg2rad",
            "frac",
            "floor",
            "sign",
            "nan_to_num",
            "reciprocal",
        ),
        X,
    )
    check(
        named(
            "log",
            "log2",
            "log10",
            "log1p",
            "sqrt",
            "rsqrt",
            "asin",
            "acos",
            "atanh",
            "erfinv",
            "logit",
            "reciprocal",
        ),
        UNIT,
    )
    check([("acosh", lambda m, x: m.acosh(x + 1.2))], UNIT)


ACTIVATIONS = [
    functional(n)
    for n in (
        "relu",
        "silu",
        "softplus",
        "elu",
        "selu",
        "celu",
        "hardtanh",
        "relu6",
        "hardswish",
        "hardsigmoid",
        "mish",
        "softsign",
        "logsigmoid",
        "leaky_relu",
        "gelu",
        "softshrink",
        "hardshrink",
        "tanhshrink",
        "tanh",
        "sigmoid",
    )
]


def test_activations():
    check(
        [
            *ACTIVATIONS,
            functional("gelu", approximate="tanh"),
            functional("elu", alpha=0.5),
            functional("celu", alpha=2.0),
            functional("softplus", beta=2.0, threshold=1.0),
        ],
        X,
    )
    check([functional("glu", dim=0)], data("float64", (4, 3)))


def test_kinks_and_far_ends():
    kinked = {"hardswish ", "hardsigmoid ", "mish ", "gelu "}
    check([c for c in ACTIVATIONS if c[0] not in kinked], EDGES)
    check(
        [
            ("clamp", lambda m, x: m.clamp(x, -1.0, 3.0)),
            ("abs", lambda m, x: m.abs(x)),
            ("asinh", lambda m, x: m.asinh(x)),
            ("sign", lambda m, x: m.sign(x) * x),
            ("logaddexp", lambda m, x: m.logaddexp(x, x.flip(0))),
            ("softmax", lambda m, x: m.softmax(x, 0)),
            ("amax", lambda m, x: m.amax(m.cat([x, x]), 0)),
            ("max", lambda m, x: m.max(m.stack([x, x]), 0)),
            ("std of same", lambda m, x: (x * 0).std()),
            ("norm of zero", lambda m, x: m.norm(x * 0)),
            ("maximum", lambda m, x: m.maximum(x, x * 1)),
        ],
        EDGES,
    )


def test_two_operands():
    check(
        [
            ("add", lambda m, x, y: x + y),
            ("sub", lambda m, x, y: x - y * 2),
            ("mul", lambda m, x, y: x * y),
            ("div", lambda m, x, y: x / y),
            ("row", lambda m, x, y: x * y[0]),
            ("number", lambda m, x, y: 2 / y + 3 * x),
            ("maximum", lambda m, x, y: m.maximum(x, y)),
            ("minimum", lambda m, x, y: m.minimum(x, y)),
            ("fmax", lambda m, x, y: m.fmax(x, y)),
            ("atan2", lambda m, x, y: m.atan2(x, y)),
            ("logaddexp", lambda m, x, y: m.logaddexp(x, y)),
            ("hypot", lambda m, x, y: m.hypot(x, y)),
            ("copysign", lambda m, x, y: m.copysign(x, y)),
            ("lerp", lambda m, x, y: m.lerp(x, y, 0.3)),
            ("lerp tensor", lambda m, x, y: m.lerp(x, y, y)),
            ("addcmul", lambda m, x, y: m.addcmul(x, x, y, value=2.0)),
            ("addcdiv", lambda m, x, y: m.addcdiv(x, x, y)),
            ("remainder", lambda m, x, y: m.remainder(x, y)),
            ("fmod", lambda m, x, y: m.fmod(x, y)),
            ("where", lambda m, x, y: m.where(x > y, x, y * 2)),
            ("clamp tensors", lambda m, x, y: m.clamp(x, y - 1, y + 1)),
            ("powers", lambda m, x, y: [x**2, x**3, x**4, x**-1, x**0, x**1, abs(x) ** 0.5]),
            ("power", lambda m, x, y: abs(x) ** y),
            ("base", lambda m, x, y: 2.0**y),
            ("cast", lambda m, x, y: (x.float() * 2).double()),
            ("detached", lambda m, x, y: x.detach() * y),
            ("in place", _in_place),
        ],
        X,
        Y,
    )


def _in_place(m, x, y):
    z = x * 1
    z += y
    z *= x
    z.clamp_(-2, 2)
    return z


def test_movement():
    check(
        [
            ("reshape", lambda m, x: x.reshape(5, 3)),
            ("permute", lambda m, x: x.t()),
            ("expand", lambda m, x: x.unsqueeze(0).expand(2, 3, 5)),
            ("flip", lambda m, x: x.flip(1)),
            ("repeat", lambda m, x: x.repeat(2, 2)),
            ("roll", lambda m, x: x.roll(2, 1)),
            ("interleave", lambda m, x: x.repeat_interleave(2, 1)),
            ("cat", lambda m, x: m.cat([x, x * 2], 1)),
            ("stack", lambda m, x: m.stack([x, x])),
            ("split", lambda m, x: [p * (i + 1) for i, p in enumerate(x.split(2, 1))]),
            ("unbind", lambda m, x: x.unbind(1)[1]),
            ("unfold", lambda m, x: x.unfold(1, 3, 1)),
            ("diagonal", lambda m, x: x.diagonal(1)),
            ("diag", lambda m, x: m.diag(x[0])),
            ("tril", lambda m, x: m.tril(x)),
            ("triu", lambda m, x: m.triu(x, 1)),
            ("squeeze", lambda m, x: x[:1].squeeze(0)),
            ("rot90", lambda m, x: m.rot90(x)),
            ("diag_embed", lambda m, x: m.diag_embed(x, 1)),
            ("movedim", lambda m, x: x.movedim(0, 1)),
            ("narrow", lambda m, x: x.narrow(1, 1, 2)),
        ],
        X,
    )
    check(
        [
            (
                mode,
                lambda m, x, mode=mode: (m if m is tg else torch.nn.functional).pad(
                    x.unsqueeze(0), (2, 1), mode=mode
                ),
            )
            for mode in ("constant", "reflect", "replicate", "circular")
        ],
        X,
    )


def test_reductions():
    check(
        [
            ("sum", lambda m, x: [x.sum(), x.sum(0), x.sum(1, True)]),
            ("mean", lambda m, x: x.mean(1)),
            ("prod", lambda m, x: [x.prod(), x.prod(1)]),
            ("var", lambda m, x: [x.var(), x.var(1)]),
            ("std", lambda m, x: x.std(0)),
            ("amax", lambda m, x: [x.amax(), x.amax(1)]),
            ("max", lambda m, x: [x.max(), x.max(1).values, x.min(0).values]),
            ("logsumexp", lambda m, x: m.logsumexp(x, 1)),
            ("softmax", lambda m, x: m.softmax(x, 1)),
            ("log_softmax", lambda m, x: m.log_softmax(x, 0)),
            *[
                (f"norm {p}", lambda m, x, p=p: [m.norm(x, p), m.norm(x, p, 1)])
                for p in (1, 2, 3, math.inf)
            ],
            ("nansum", lambda m, x: m.nansum(x, 1)),
            ("nanmean", lambda m, x: m.nanmean(x)),
            ("cumsum", lambda m, x: x.cumsum(1)),
            ("cumprod", lambda m, x: x.cumprod(1)),
            ("cummax", lambda m, x: m.cummax(x, 1).values),
            ("cummin", lambda m, x: m.cummin(x, 0).values),
            ("logcumsumexp", lambda m, x: m.logcumsumexp(x, 1)),
            ("median", lambda m, x: [m.median(x), m.median(x, 1).values]),
            ("kthvalue", lambda m, x: m.kthvalue(x, 2, 1).values),
            ("quantile", lambda m, x: m.quantile(x, 0.3, 1)),
            ("sort", lambda m, x: m.sort(x, 1).values),
            ("topk", lambda m, x: m.topk(x, 2, 0).values),
            ("trace", lambda m, x: m.trace(x)),
        ],
        X,
    )
    zero = X.clone()
    zero[0, 1] = zero[1, 2] = zero[1, 3] = 0.0
    check([("prod", lambda m, x: x.prod(1)), ("cumprod", lambda m, x: x.cumprod(1))], zero)


def test_products():
    check(
        [
            ("matmul", lambda m, x, y: x @ y.t()),
            ("vector", lambda m, x, y: x @ y[0]),
            ("dot", lambda m, x, y: x[0] @ y[1]),
            ("outer", lambda m, x, y: m.outer(x[0], y[:, 0])),
            ("batch", lambda m, x, y: x.unsqueeze(0).expand(2, 3, 5) @ y.t()),
            ("einsum", lambda m, x, y: m.einsum("ij,kj,il->kl", x, y, y)),
            ("einsum diagonal", lambda m, x, y: m.einsum("ii->i", x[:, :3])),
            ("tensordot", lambda m, x, y: m.tensordot(x, y, ([0, 1], [0, 1]))),
            (
                "linear",
                lambda m, x, y: (m if m is tg else torch.nn.functional).linear(x, y, y[:, 0]),
            ),
            ("addmm", lambda m, x, y: m.addmm(x[:, :3], x, y.t(), beta=0.5, alpha=2.0)),
            ("kron", lambda m, x, y: m.kron(x, y[:1, :2])),
        ],
        X,
        Y,
    )


def _assigned(key, value=None):
    def run(m, x, y, i):
        z = x * 2
        place = key(m, x, i)
        z[place] = y[place] * 3 if value is None else value
        return z

    return run


def test_indexing():
    index = torch.tensor([[0, 2, 1, 0, 2], [2, 1, 0, 1, 1]])
    check(
        [
            ("basic", lambda m, x, y, i: [x[1], x[:, 1:4:2], x[..., None, -1]]),
            ("list", lambda m, x, y, i: x[[0, 0, 2]]),
            ("pair", lambda m, x, y, i: x[i[0], i[1]]),
            ("mixed", lambda m, x, y, i: x[:, i]),
            ("mask", lambda m, x, y, i: x[x > 0]),
            ("gather", lambda m, x, y, i: x.gather(0, i)),
            ("scatter", lambda m, x, y, i: x.scatter(0, i[:1], y[:1])),
            ("scatter value", lambda m, x, y, i: x.scatter(0, i[:1], 2.0)),
            ("scatter_add", lambda m, x, y, i: x.scatter_add(0, i, y[:2])),
            ("index_select", lambda m, x, y, i: x.index_select(1, i[0])),
            ("index_add", lambda m, x, y, i: x.index_add(0, i[0, :3], y)),
            ("index_copy", lambda m, x, y, i: x.index_copy(0, i[0, :3], y)),
            ("index_fill", lambda m, x, y, i: x.index_fill(1, i[0], 0.5)),
            ("take", lambda m, x, y, i: m.take(x, i)),
            ("take_along_dim", lambda m, x, y, i: m.take_along_dim(x, i, 0)),
            ("masked_fill", lambda m, x, y, i: x.masked_fill(y > 0, 1.0)),
            ("masked_select", lambda m, x, y, i: m.masked_select(x, y > 0)),
            ("masked_scatter", lambda m, x, y, i: x.masked_scatter(x > 0, y)),
            ("sum reduce", lambda m, x, y, i: x.scatter_reduce(0, i, y[:2], "sum")),
            ("mean reduce", lambda m, x, y, i: x.scatter_reduce(0, i, y[:2], "mean")),
            ("max reduce", lambda m, x, y, i: x.scatter_reduce(0, i, y[:2], "amax")),
            ("assign slice", _assigned(lambda m, x, i: (slice(None), slice(1, 3)))),
            ("assign int", _assigned(lambda m, x, i: 1)),
            ("assign steps", _assigned(lambda m, x, i: (0, slice(None, None, 2)))),
            ("assign list", _assigned(lambda m, x, i: [0, 2])),
            ("assign mask", _assigned(lambda m, x, i: x > 0)),
            ("assign mask number", _assigned(lambda m, x, i: x > 0, 0.25)),
            ("assign number", _assigned(lambda m, x, i: (1, 2), 5.0)),
        ],
        X,
        Y,
        index,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_low_precision_gradients_have_the_dtype(dtype):
    x = tg.from_torch(data(dtype, (3, 5))).requires_grad_()
    (x.softmax(-1) * x.gelu() + x.mean()).sum().backward()
    assert x.grad.dtype is x.dtype and np.isfinite(x.grad.float().numpy()).all()


def test_detached_copies_are_apart():
    x = tg.tensor([2.0, 3.0])
    y = x.detach().requires_grad_()
    (y * x).sum().backward()
    assert y.grad.tolist() == [2.0, 3.0] and x.grad is None


def test_no_grad_in_place():
    x = tg.ones(2, requires_grad=True)
    with tg.no_grad():
        x += 1
        x[0] = 5.0
    assert x.tolist() == [5.0, 2.0] and x.requires_grad and x.is_leaf
    (x * x).sum().backward()
    assert x.grad.tolist() == [10.0, 4.0]


def test_sigmoid_far_out() -> None:
    """Neither the value nor the derivative is nan where the exponential overflows."""
    far = np.array([-1e4, -200.0, -90.0, 0.0, 90.0, 200.0, 1e4], np.float32)
    for function in (tg.sigmoid, tg.silu):
        x = tg.tensor(far, requires_grad=True)
        value = function(x)
        value.sum().backward()
        same = torch.tensor(far, requires_grad=True)
        expected = getattr(torch.nn.functional, function.__name__)(same)
        expected.sum().backward()
        np.testing.assert_allclose(value.numpy(), expected.detach().numpy(), atol=1e-37)
        np.testing.assert_allclose(x.grad.numpy(), same.grad.numpy(), atol=1e-37)

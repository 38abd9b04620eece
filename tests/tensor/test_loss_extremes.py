"""Losses and softmaxes of extreme logits: large ones, rows of -1e30, -inf columns, infinities.

Torch judges in float32 and in float64: ours must be either's value, or as near to float64's as
float32 is, or twice as near as torch is. Gradients too.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

import tilegrad as tg

torch = pytest.importorskip("torch")
INF = math.inf
ROWS = {
    "plain": [[1.0, 2.0, 3.0, -1.0], [0.5, 0.1, -2.0, 4.0]],
    "large": [[1e4, 1e4 + 1, 1e4 - 2, 1e4], [9e4, 9e4 + 0.25, 9e4 - 1, 9e4 + 2]],
    "larger": [[1e7, 1e7 + 1, 1e7 + 2, 1e7 + 4], [-1e7, -1e7 - 1, -1e7 - 2, -1e7 + 3]],
    "equal": [[1e30] * 4, [3.0] * 4],
    "low": [[-1e30] * 4, [-1e9] * 4],
    "mixed": [[1e30, -1e30, 0.0, 5.0], [-1e30, -1e30, 0.0, 1.0]],
    "masked column": [[-INF, 1.0, 2.0, 3.0], [-INF, -INF, 0.0, 1.0]],
    "masked row": [[-INF] * 4, [1.0, 2.0, 3.0, 4.0]],
    "infinite": [[INF, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]],
    "largest": [[3e38, -3e38, 1.0, 2.0], [3e38, 3e38, 3e38, 3e38]],
}
TARGET = np.array([1, 3])
WEIGHT = np.array([0.5, 1.0, 2.0, 0.25], np.float32)
SHARES = np.array([[0.1, 0.2, 0.3, 0.4], [0.0, 1.0, 0.0, 0.0]], np.float32)


def loss(name, target=TARGET, **options):
    def run(m, x):
        home = torch.nn.functional if m is torch else tg.nn.functional

        def like(value):
            if not isinstance(value, np.ndarray):
                return value
            found = m.tensor(value)
            return found.to(x.dtype) if value.dtype.kind == "f" else found

        given = {key: like(value) for key, value in options.items()}
        return getattr(home, name)(x, like(target), **given)

    return run


def entropy(target=TARGET, **options):
    return loss("cross_entropy", target, **options)


CASES = {
    "cross_entropy": entropy(),
    "each": entropy(reduction="none"),
    "sum": entropy(reduction="sum"),
    "smoothed": entropy(label_smoothing=0.1, reduction="none"),
    "weighted": entropy(weight=WEIGHT),
    "both": entropy(weight=WEIGHT, label_smoothing=0.2, reduction="none"),
    "ignored": entropy(ignore_index=3),
    "soft": entropy(SHARES),
    "soft all": entropy(SHARES, weight=WEIGHT, reduction="none", label_smoothing=0.1),
    "log_softmax": lambda m, x: m.log_softmax(x, 1),
    "softmax": lambda m, x: m.softmax(x, 1),
    "of columns": lambda m, x: m.log_softmax(x, 0),
    "logsumexp": lambda m, x: m.logsumexp(x, 1),
    "nll": loss("nll_loss"),
    "nll weighted": loss("nll_loss", weight=WEIGHT, ignore_index=3),
    "binary": loss("binary_cross_entropy_with_logits", SHARES, reduction="none"),
    "binary weighted": loss(
        "binary_cross_entropy_with_logits", SHARES, reduction="none", pos_weight=WEIGHT
    ),
    "kl": loss("kl_div", SHARES, reduction="none"),
    "kl of logs": loss("kl_div", np.log(SHARES + 1e-3), reduction="none", log_target=True),
}
# torch's gradient of logsumexp is exp(x - result), which rounds: 4 ones for 4 equal large logits
NEARER = {("logsumexp", "equal"), ("logsumexp", "low"), ("logsumexp", "largest")}


def theirs(function, array, dtype):
    x = torch.tensor(array, dtype=dtype, requires_grad=True)
    y = function(torch, x)
    share = torch.linspace(0.5, 1.5, y.numel(), dtype=dtype).reshape(y.shape)
    (y * share).sum().backward()
    return y.detach().double().numpy(), x.grad.double().numpy()


def ours(function, array):
    x = tg.tensor(array, requires_grad=True)
    y = function(tg, x)
    count = int(np.prod(y.shape))
    share = np.linspace(0.5, 1.5, count).reshape(y.shape)
    (y * tg.tensor(share, dtype="float32")).sum().backward()
    return y, x.grad


@pytest.mark.parametrize("rows", ROWS)
def test_extreme_logits(rows):
    array = np.array(ROWS[rows], np.float32)
    found = {name: ours(function, array) for name, function in CASES.items()}
    tg.realize([t for pair in found.values() for t in pair])
    wrong = []
    for name, function in CASES.items():
        near, exact = (theirs(function, array, d) for d in (torch.float32, torch.float64))
        for what, a, b, c in zip(("value", "gradient"), found[name], near, exact):
            a = a.numpy().astype(np.float64)
            with np.errstate(all="ignore"):
                allowed = np.maximum(2e-6 * np.abs(c) + 1e-6, 2 * np.abs(b - c))
                good = (a == b) | (a == c) | (np.abs(a - c) <= allowed)
                good |= np.isnan(a) & (np.isnan(b) | np.isnan(c))
            if not good.all() and not (what == "gradient" and (name, rows) in NEARER):
                wrong.append(f"{what} of {name}: {a}, torch {b}, exactly {c}")
    assert not wrong, "\n".join(wrong)

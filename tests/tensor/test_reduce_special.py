"""Every reduction, value and gradient, over special inputs: nan, infinities, ties, zeros, nothing.

A case is a function of (library, x) that reduces the last axis, or all. Torch judges values,
dtypes, which inputs are refused, and gradients: where nan or a tie decides who gets them too.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from sampled import sampled
from torch_tables import difference, flat, torch

import tilegrad as tg

NAN, INF = math.nan, math.inf
INPUTS = {
    "plain": [[1.5, -2.0, 0.25, 3.0], [0.5, 4.0, -1.0, 2.5]],
    "nan": [[1.0, NAN, 2.0, -1.0], [NAN, 1.0, NAN, 3.0]],
    "nan_last": [[1.0, 2.0, 3.0, NAN], [3.0, 2.0, 1.0, NAN]],
    "all_nan": [[NAN, NAN, NAN, NAN], [1.0, 2.0, 2.0, 1.0]],
    "inf": [[1.0, INF, 2.0, -1.0], [0.5, 1.0, INF, INF]],
    "negative_inf": [[1.0, -INF, 2.0, -1.0], [-INF, -INF, 1.0, 0.5]],
    "both_inf": [[INF, -INF, 2.0, -1.0], [1.0, INF, -INF, INF]],
    "all_negative_inf": [[-INF, -INF, -INF, -INF], [1.0, 1.0, 1.0, 1.0]],
    "all_inf": [[INF, INF, INF, INF], [-1e30, -1e30, -1e30, -1e30]],
    "inf_and_nan": [[INF, NAN, -INF, 1.0], [NAN, -INF, 2.0, INF]],
    "ties": [[2.0, 2.0, 1.0, 2.0], [1.0, 1.0, 2.0, 1.0]],
    "one_zero": [[2.0, 0.0, 3.0, -1.0], [1.0, 2.0, 3.0, 4.0]],
    "two_zeros": [[2.0, 0.0, 3.0, 0.0], [0.0, 0.0, 3.0, 4.0]],
    "all_zero": [[0.0, 0.0, 0.0, 0.0], [0.0, -0.0, -0.0, 0.0]],
    "equal": [[3.0, 3.0, 3.0, 3.0], [-1.0, -1.0, -1.0, -1.0]],
    "large": [[1e30, -1e30, 3e30, 2e30], [1e38, 3e38, 1e38, -3e38]],
    "small": [[1e-30, 2e-30, -1e-38, 3e-45], [1e-20, -1e-20, 1e-25, 1e-45]],
    "single": [[2.0], [-3.0]],
    "single_zero": [[0.0], [-0.0]],
    "single_nan": [[NAN], [INF]],
    "single_negative_inf": [[-INF], [INF]],
    "nothing": np.zeros((2, 0)),
    "no_rows": np.zeros((0, 3)),
}


def by_row(name, *args, **options):
    return lambda m, x: getattr(m, name)(x, *args, **{"dim": -1, **options})


def of_all(name, *args, **options):
    return lambda m, x: getattr(m, name)(x, *args, **options)


def functional(name, *args, **options):
    def run(m, x):
        home = torch.nn.functional if m is torch else tg.nn.functional
        return getattr(home, name)(x, *args, **options)

    return run


SUMS = {
    "sum": by_row("sum"),
    "sum all": of_all("sum"),
    "mean": by_row("mean"),
    "mean all": of_all("mean"),
    "nansum": by_row("nansum"),
    "nanmean": by_row("nanmean"),
    "prod": by_row("prod"),
    "prod all": of_all("prod"),
    "cumsum": by_row("cumsum"),
    "cumprod": by_row("cumprod"),
    "logsumexp": by_row("logsumexp"),
    "logcumsumexp": by_row("logcumsumexp"),
    "softmax": by_row("softmax"),
    "log_softmax": by_row("log_softmax"),
    "count_nonzero": by_row("count_nonzero"),
    "any": by_row("any"),
    "all": by_row("all"),
    "trace": of_all("trace"),
}
MOMENTS = {
    "var": by_row("var"),
    "var 0": by_row("var", correction=0),
    "var all": of_all("var"),
    "std": by_row("std"),
    "std 0": by_row("std", correction=0),
    "std all": of_all("std"),
    "var_mean": by_row("var_mean"),
    "std_mean": by_row("std_mean"),
}
NORMS = {f"norm {p}": by_row("norm", p=p) for p in (0, 0.5, 1, 1.5, 2, 3, INF, -INF, -1)}
NORMS |= {f"norm {p} all": of_all("norm", p=p) for p in (0, 1, 2, 3, INF)}
NORMS |= {
    "normalize": functional("normalize"),
    "normalize 1": functional("normalize", p=1),
    "normalize inf": functional("normalize", p=INF),
}
EXTREMES = {
    "amax": by_row("amax"),
    "amin": by_row("amin"),
    "amax all": of_all("amax"),
    "amin all": of_all("amin"),
    "aminmax": by_row("aminmax"),
    "max": by_row("max"),
    "min": by_row("min"),
    "max all": of_all("max"),
    "min all": of_all("min"),
    "argmax": by_row("argmax"),
    "argmin": by_row("argmin"),
    "argmax all": of_all("argmax"),
    "cummax": by_row("cummax"),
    "cummin": by_row("cummin"),
}
ORDERED = {
    "sort": by_row("sort", stable=True),
    "sort down": by_row("sort", stable=True, descending=True),
    "argsort": by_row("argsort", stable=True),
    "median": by_row("median"),
    "median all": of_all("median"),
    "kthvalue": by_row("kthvalue", 1),
    "kthvalue 3": by_row("kthvalue", 3),
    "topk": lambda m, x: m.topk(x, 2, -1)[0],
    "topk low": lambda m, x: m.topk(x, 2, -1, False)[0],
    "quantile": by_row("quantile", 0.4),
    "msort": of_all("msort"),
    "unique": lambda m, x: m.unique(x.detach()),
    "unique counts": lambda m, x: m.unique(x.detach(), return_inverse=True, return_counts=True),
    "searchsorted": lambda m, x: m.searchsorted(m.sort(x.detach(), dim=-1)[0], x.detach()),
    "searchsorted right": lambda m, x: m.searchsorted(
        m.sort(x.detach(), dim=-1)[0], x.detach(), right=True
    ),
    "bucketize": lambda m, x: m.bucketize(x.detach(), m.tensor([-1.0, 0.0, 2.0, NAN])),
}
TABLES = {
    "sums": SUMS,
    "moments": MOMENTS,
    "norms": NORMS,
    "extremes": EXTREMES,
    "ordered": ORDERED,
}
TIED = (
    "nan",
    "all_nan",
    "negative_inf",
    "all_negative_inf",
    "all_inf",
    "ties",
    "two_zeros",
    "all_zero",
    "equal",
    "large",
)
INFINITE = (
    "inf",
    "negative_inf",
    "both_inf",
    "all_negative_inf",
    "all_inf",
    "inf_and_nan",
    "single_nan",
    "single_negative_inf",
)
NANS = ("nan", "nan_last", "all_nan", "inf_and_nan", "single_nan")
# (results, inputs): where ours differs from torch, and why that is no fault
EXCUSED = [
    # which of equal elements is the k-th is free: ours is the first, torch's depends on its sort
    (("kthvalue[1]", "kthvalue 3[1]", "gradient of kthvalue", "gradient of kthvalue 3",
      "gradient of topk", "gradient of topk low"), TIED),
    # the product of the others, without torch's division by nan or infinity
    (("gradient of prod", "gradient of prod all", "gradient of cumprod"),
     (*INFINITE, *NANS, "large")),
    # finite where torch divides 0 by 0, or has lost the digits of a large sum
    (("gradient of nanmean", "gradient of logcumsumexp"), (*INFINITE, *NANS, "large")),
    (("gradient of logsumexp",), ("all_inf",)),
    # the order of torch's additions depends on the machine: they may overflow on the way
    (("sum[0]", "sum all[0]", "mean[0]", "mean all[0]", "nansum[0]", "nanmean[0]", "cumsum[0]",
      "gradient of std all"), ("large",)),
    (("gradient of norm 0.5",), ("large",)),
    (("gradient of normalize inf",), INFINITE),
    # torch's mean is nan here, unlike x.mean(); its CPU squares in float64
    (("var_mean[1]", "std_mean[1]"), (*INFINITE, "large")),
    (("std[0]", "std 0[0]", "std_mean[0]"), ("large",)),
    (("gradient of var", "gradient of var 0", "gradient of var all", "gradient of var_mean",
      "gradient of std", "gradient of std 0", "gradient of std_mean"),
     (*INFINITE, "large", "small")),
]  # fmt: skip


def attempt(function, *args):
    """What a function gives, or the error."""
    try:
        found = function(*args)
        return flat(list(found) if isinstance(found, tuple) else [found])
    except (RuntimeError, IndexError, ValueError, tg.UserError) as error:
        return error


def weights(results):
    """Fixed weights for the gradient of each differentiable result."""
    found = []
    for i, r in enumerate(results):
        count = int(np.prod(tuple(r.shape)))
        found.append(np.linspace(0.5, 1.5 + i, count).reshape(tuple(r.shape)))
    return found


def torch_case(function, array):
    x = torch.tensor(array, requires_grad=True)
    results = attempt(function, torch, x)
    if isinstance(results, Exception):
        return results, None
    floats = [r for r in results if r.is_floating_point() and r.requires_grad]
    if floats:
        sum(
            (r * torch.from_numpy(w).to(r.dtype)).sum() for r, w in zip(floats, weights(floats))
        ).backward()
    return results, x.grad


def our_case(function, array):
    x = tg.tensor(array, requires_grad=True)
    results = attempt(function, tg, x)
    if isinstance(results, Exception):
        return results, None
    floats = [r for r in results if r.dtype.is_float and r.requires_grad]
    if floats:
        sum(
            (r * tg.tensor(w, dtype=r.dtype)).sum() for r, w in zip(floats, weights(floats))
        ).backward()
    return results, x.grad


def judged(table, array):
    """All differences of a table on one input."""
    cases = [(name, torch_case(f, array), our_case(f, array)) for name, f in TABLES[table].items()]
    known = [c for c in cases if not isinstance(c[2][0], Exception)]
    tg.realize(
        [r for _, _, (rows, _) in known for r in rows]
        + [g for _, _, (_, g) in known if g is not None]
    )
    wrong = []
    for name, (theirs, their_grad), (mine, my_grad) in cases:
        if isinstance(theirs, Exception) or isinstance(mine, Exception):
            if isinstance(theirs, Exception) != isinstance(mine, Exception):
                wrong.append(f"{name}: {mine!r:.100}, torch says {theirs!r:.100}")
            continue
        pairs = [(f"{name}[{i}]", a, b) for i, (a, b) in enumerate(zip(mine, theirs))]
        if their_grad is not None and my_grad is None:
            wrong.append(f"{name}: no gradient")
        elif their_grad is not None:
            pairs.append((f"gradient of {name}", my_grad, their_grad))
        elif my_grad is not None:
            wrong.append(f"{name}: a gradient, torch has none")
        for label, a, b in pairs:
            fault = difference(a, b)
            if fault:
                wrong.append(f"{label}: {fault}")
    return wrong


MOST = {
    *("plain", "nan", "inf", "both_inf", "all_negative_inf", "inf_and_nan", "ties", "two_zeros"),
    *("large", "single_nan", "nothing", "no_rows"),
}


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:var", "ignore:std")
@pytest.mark.parametrize("name", sampled(INPUTS, lambda name: name in MOST))
@pytest.mark.parametrize("table", TABLES)
def test_special(table, name):
    array = np.array(INPUTS[name], np.float32)
    free = {result for results, inputs in EXCUSED if name in inputs for result in results}
    wrong = [w for w in judged(table, array) if w.split(":")[0] not in free]
    assert not wrong, "\n".join(wrong)


def test_cosine_similarity_repeats_a_reduced_axis():
    a, b = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), np.ones((3, 1), np.float32)

    def run(m, x, y):
        home = torch.nn.functional if m is torch else tg.nn.functional
        return home.cosine_similarity(x, y, dim=1)

    for left, right in ((a, b), (b, a), (a[:1], a), (a * 0, a)):
        found = run(tg, tg.tensor(left), tg.tensor(right))
        assert not difference(found, run(torch, torch.tensor(left), torch.tensor(right)))


def test_running_sum_and_product_carry_float64():
    x = np.full(200_000, 0.1, np.float32)
    sums, products = tg.tensor(x).cumsum(0).numpy(), tg.tensor(x * 10.00001).cumprod(0).numpy()
    exact = np.cumsum(x.astype(np.float64))
    assert np.abs(sums / exact - 1).max() < 2e-7
    exact = np.cumprod((x * 10.00001).astype(np.float64))
    assert np.abs(products / exact - 1).max() < 2e-7
    wide = np.repeat(x[:20_000, None], 8, 1)  # vectors along the other axis
    exact = np.cumsum(wide.astype(np.float64), 0)
    assert np.abs(tg.tensor(wide).cumsum(0).numpy() / exact - 1).max() < 1e-6

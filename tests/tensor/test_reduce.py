"""Reductions, running reductions, softmax and order statistics against torch."""

from __future__ import annotations

import math

import pytest
from torch_tables import FLOATS, INTEGERS, compare, data, torch

import tilegrad as tg

DIMS = [None, 0, -1, (0, 2)]


def over(name, dims=DIMS, **options):
    cases = []
    for dim in dims:
        given = dict(options) if dim is None else {**options, "dim": dim}
        cases.append((f"{name} {given}", lambda m, x, g=given: getattr(m, name)(x, **g)))
        if dim is not None:
            kept = {**given, "keepdim": True}
            cases.append((f"{name} {kept}", lambda m, x, g=kept: getattr(m, name)(x, **g)))
    return cases


ANY = (
    over("sum")
    + over("amax")
    + over("amin")
    + over("any")
    + over("all")
    + [
        *over("argmax", [None, 0, -1]),
        *over("argmin", [None, 0, 1]),
        *over("prod", [None, 0, -1]),
        *over("max", [None, 0, -1]),
        *over("min", [None, 1]),
        ("count_nonzero", lambda m, x: [m.count_nonzero(x), m.count_nonzero(x, dim=1)]),
        ("sum to float", lambda m, x: m.sum(x, dim=0, dtype=m.float32)),
        ("cumsum", lambda m, x: [m.cumsum(x, 1), x.cumsum(-1)]),
        ("cumprod", lambda m, x: m.cumprod(x, 0)),
        ("aminmax", lambda m, x: m.aminmax(x, dim=0)),
    ]
)
OF_FLOATS = [
    *over("mean"),
    *over("var"),
    *over("std"),
    *over("var", correction=0),
    *over("logsumexp", [0, (0, 2)]),
    *over("nansum"),
    *over("nanmean"),
    *over("var_mean", [0, -1]),
    *over("std_mean", [0]),
    ("softmax", lambda m, x: [m.softmax(x, d) for d in (0, -1)]),
    ("log_softmax", lambda m, x: [x.log_softmax(d) for d in (1, -1)]),
    ("softmin", lambda m, x: _home(m).softmin(x, dim=1)),
    ("softmax dtype", lambda m, x: m.softmax(x, 0, dtype=m.float32)),
    ("logcumsumexp", lambda m, x: m.logcumsumexp(x, 1)),
    *[
        (
            f"norm {p}",
            lambda m, x, p=p: [m.norm(x, p), m.norm(x, p, dim=1), x.norm(p, (0, 2), True)],
        )
        for p in (1, 2, 3, 0, math.inf, -math.inf)
    ],
]


def _home(m):
    return torch.nn.functional if m is torch else m


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, "bool"])
def test_reductions(dtype):
    x = data(dtype, (3, 5, 4))
    skip = [n for n, _ in ANY if n.startswith(("argmax", "argmin", "max", "min", "aminmax"))]
    compare(ANY, x, skip=skip if dtype == "bool" else ())


@pytest.mark.parametrize("dtype", FLOATS)
def test_float_reductions(dtype):
    compare(OF_FLOATS, data(dtype, (3, 5, 4)))


def test_ties_and_special_values():
    x = torch.tensor(
        [
            [1.0, 3.0, 3.0, 2.0],
            [math.nan, 1.0, math.nan, 5.0],
            [-math.inf, math.inf, 0.0, -0.0],
            [-math.inf] * 4,
        ]
    )
    compare(
        [
            ("max", lambda m, x: m.max(x, 1)),
            ("min", lambda m, x: m.min(x, 1)),
            ("amax", lambda m, x: m.amax(x, 1)),
            ("argmax", lambda m, x: m.argmax(x, 1)),
            ("cummax", lambda m, x: m.cummax(x, 1)),
            ("cummin", lambda m, x: m.cummin(x, 1)),
            ("logsumexp", lambda m, x: m.logsumexp(x, 1)),
            ("softmax", lambda m, x: m.softmax(x, 1)),
            ("nansum", lambda m, x: m.nansum(x, 1)),
            ("nanmean", lambda m, x: m.nanmean(x, 1)),
            ("median", lambda m, x: m.median(x[:2], 1)),
            ("all nan", lambda m, x: m.median(x[1])),
            ("norm zero", lambda m, x: m.norm(x[0] * 0)),
            ("logcumsumexp", lambda m, x: m.logcumsumexp(x[2:], 1)),
        ],
        x,
    )
    big = torch.tensor([-200.0, -100.0, 0.0, 100.0, 50.0])
    compare(
        [
            ("logcumsumexp", lambda m, x: m.logcumsumexp(x, 0)),
            ("log_softmax", lambda m, x: m.log_softmax(x, 0)),
        ],
        big,
    )


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
def test_order_statistics(dtype):
    x = data(dtype, (5, 4))
    x = x + torch.arange(20).reshape(5, 4).to(x.dtype) * 10  # no ties
    compare(
        [
            ("median", lambda m, x: [m.median(x), *m.median(x, 0), *x.median(1, True)]),
            ("kthvalue", lambda m, x: [*m.kthvalue(x, 2, 0), *m.kthvalue(x, 3, 1, True)]),
            ("cummax", lambda m, x: [*m.cummax(x, 0), *m.cummin(x, 1)]),
        ],
        x,
    )
    if dtype != "int32":
        cases = [
            (
                how,
                lambda m, x, how=how: [
                    m.quantile(x, 0.3, interpolation=how),
                    m.quantile(x, 0.6, 0, interpolation=how),
                    m.quantile(x, 0.25, dim=1, keepdim=True, interpolation=how),
                ],
            )
            for how in ("linear", "lower", "higher", "nearest", "midpoint")
        ]
        compare(cases, x)
        q = torch.tensor([0.0, 0.4, 1.0], dtype=x.dtype)
        compare(
            [
                (
                    "several",
                    lambda m, x, q: [
                        m.quantile(x, q),
                        m.quantile(x, q, 1),
                        m.quantile(x, q, 0, True),
                    ],
                )
            ],
            x,
            q,
        )


def test_empty_and_scalar():
    empty = data("float32", (0, 3))
    compare(
        [
            ("sum", lambda m, x: [x.sum(), x.sum(0), x.sum(1)]),
            ("prod", lambda m, x: x.prod()),
            ("mean", lambda m, x: [x.mean(), x.mean(0)]),
            ("amax", lambda m, x: x.amax(1)),
            ("any", lambda m, x: [x.any(), x.all(), x.any(0)]),
            ("var", lambda m, x: x.var(0)),
            ("softmax", lambda m, x: [x.softmax(0), x.softmax(1)]),
            ("cumsum", lambda m, x: x.cumsum(0)),
            ("norm", lambda m, x: x.norm()),
            ("logsumexp", lambda m, x: x.logsumexp(0)),
        ],
        empty,
    )
    compare(
        [
            ("sum", lambda m, x: [x.sum(), x.sum(0), x.sum(-1)]),
            ("max", lambda m, x: x.max()),
            ("max dim", lambda m, x: x.max(0)),
            ("softmax", lambda m, x: x.softmax(0)),
            ("mean", lambda m, x: x.mean()),
            ("argmax", lambda m, x: [x.argmax(), x.argmax(0)]),
            ("cumsum", lambda m, x: x.cumsum(0)),
            ("all", lambda m, x: x.all()),
            ("empty dims", lambda m, x: x.sum(())),
        ],
        data("float32", ()),
    )
    compare(
        [("var of one", lambda m, x: m.var(x)), ("std", lambda m, x: m.std(x, 0))],
        data("float32", (1,)),
    )


def test_max_of_two_tensors():
    compare(
        [("max", lambda m, x, y: m.max(x, y)), ("min", lambda m, x, y: m.min(x, y))],
        data("float32", (3,)),
        data("float32", (3,), 1),
    )


def test_non_contiguous():
    x = data("float32", (6, 5, 4)).permute(2, 0, 1)[:, ::2]
    compare([*over("sum"), *over("amax"), ("softmax", lambda m, x: x.softmax(1))], x)


def test_long_low_precision_sum():
    x = torch.full((1000, 3), 0.1, dtype=torch.bfloat16)
    compare([("sum", lambda m, x: x.sum(0)), ("mean", lambda m, x: x.mean(0))], x)


def test_axis_is_an_alias():
    x = tg.ones(2, 3)
    assert x.sum(axis=1).shape == (2,) and x.mean(axis=0).shape == (3,)
    assert x.max(axis=1).values.tolist() == [1.0, 1.0]


def test_numpys_names_are_taken_as_by_pytorch():
    """`axis` and `keepdims` wherever a function has `dim` and `keepdim`."""
    x = data("float32", (2, 3))
    sums = ("sum", "prod", "mean", "nansum", "nanmean", "var", "std", "var_mean", "logsumexp")
    extremes = ("amax", "amin", "max", "min", "argmax", "argmin", "median", "any", "all")
    for name in (*sums, *extremes, "count_nonzero"):
        keep = {} if name == "count_nonzero" else {"keepdims": True}
        compare([(name, lambda m, x, n=name, k=keep: getattr(m, n)(x, axis=1, **k))], x)
    for name in ("cumsum", "softmax", "log_softmax", "sort", "unsqueeze", "unbind"):
        compare([(name, lambda m, x, n=name: getattr(x, n)(axis=0))], x)
    compare([("sum", lambda m, x: m.sum(x, 0, keepdims=True))], x)
    compare([("std_mean", lambda m, x: m.std_mean(x, axis=0, keepdims=True))], x)
    compare([(n, lambda m, x, n=n: getattr(m, n)([x, x], axis=1)) for n in ("cat", "stack")], x)


@pytest.mark.parametrize("given", [{"keepdims": True, "keepdim": True}, {"axes": 0}])
def test_a_name_that_nobody_has_is_refused(given):
    with pytest.raises(TypeError, match=next(iter(given))):
        tg.ones(2, 3).sum(0, **given)

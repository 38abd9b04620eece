"""Python numbers beside Tensors: every function that takes one gives torch's dtype and values.

A case is a function of (library, x, number); it runs for each dtype of x with an int, a float that
no binary format holds and a bool. What torch refuses is left out.
"""

from __future__ import annotations

import math

import pytest
from sampled import sampled
from torch_tables import compare, data, torch

import tilegrad as tg

DTYPES = ("float64", "float32", "bfloat16", "float16", "int64", "int32", "int8", "uint8", "bool")
NUMBERS = {"float": 0.1, "large": 1e9 / 3, "int": 2, "bool": True}


def home(m):
    """Where a library has its activations and losses."""
    return torch.nn.functional if m is torch else tg.nn.functional


def places(m):
    return m.tensor([[0, 1], [2, 0]])


def mask(m):
    return m.tensor([[True, False, True], [False, True, False]])


def assigned(m, x, key, n):
    y = x.clone()
    y[key] = n
    return y


ARITHMETIC = {
    "add": lambda m, x, n: m.add(x, n),
    "radd": lambda m, x, n: n + x,
    "sub": lambda m, x, n: m.sub(x, n),
    "rsub": lambda m, x, n: n - x,
    "mul": lambda m, x, n: x * n,
    "div": lambda m, x, n: x / n,
    "rdiv": lambda m, x, n: n / (x + 4),
    "pow": lambda m, x, n: abs(x) ** n,
    "rpow": lambda m, x, n: n ** abs(x),
    "float_power": lambda m, x, n: m.float_power(abs(x), n),
    "add_alpha": lambda m, x, n: m.add(x, x, alpha=n),
    "add_scalar_alpha": lambda m, x, n: m.add(x, 3, alpha=n),
    "sub_alpha": lambda m, x, n: m.sub(x, x, alpha=n),
    "maximum": lambda m, x, n: m.maximum(x, m.tensor(n)),
    "lerp": lambda m, x, n: m.lerp(x, x + 1, n),
    "addcmul": lambda m, x, n: m.addcmul(x, x, x, value=n),
    "addcdiv": lambda m, x, n: m.addcdiv(x, x, x + 4, value=n),
    "atan2": lambda m, x, n: m.atan2(x, m.tensor(n)),
    "xor": lambda m, x, n: x ^ n,
    "shift": lambda m, x, n: x << n,
    "copysign": lambda m, x, n: m.copysign(x, n),
}
COMPARED = {
    "eq": lambda m, x, n: m.eq(x, n),
    "ne": lambda m, x, n: x != n,
    "lt": lambda m, x, n: x < n,
    "le": lambda m, x, n: m.le(x, n),
    "gt": lambda m, x, n: x > n,
    "ge": lambda m, x, n: m.ge(x, n),
    "eq_of_itself": lambda m, x, n: m.full_like(x, n) == n,
    "isclose": lambda m, x, n: m.isclose(x, m.full_like(x, n)),
    "isin": lambda m, x, n: m.isin(x, n),
    "isin_of_itself": lambda m, x, n: m.isin(m.full_like(x, n), n),
}
CHOSEN = {
    "where_first": lambda m, x, n: m.where(mask(m), n, x),
    "where_second": lambda m, x, n: m.where(mask(m), x, n),
    "where_both": lambda m, x, n: m.where(x > 0, n, 2 * n),
    "clamp_min": lambda m, x, n: m.clamp(x, min=n),
    "clamp_max": lambda m, x, n: m.clamp(x, max=n),
    "clamp": lambda m, x, n: m.clamp(x, n, n + 1),
    "clamp_mixed": lambda m, x, n: m.clamp(x, 0, n),
    "nan_to_num": lambda m, x, n: m.nan_to_num(x / 0, n, n, n),
    "threshold": lambda m, x, n: home(m).threshold(x, n, 20),
    "threshold_value": lambda m, x, n: home(m).threshold(x, 1, n),
    "hardtanh": lambda m, x, n: home(m).hardtanh(x, -n, n),
    "hardtanh_default": lambda m, x, n: home(m).hardtanh(x),
    "relu6": lambda m, x, n: home(m).relu6(x),
    "relu": lambda m, x, n: home(m).relu(x),
    "leaky_relu": lambda m, x, n: home(m).leaky_relu(x, n),
    "elu": lambda m, x, n: home(m).elu(x, n),
    "celu": lambda m, x, n: home(m).celu(x, n),
    "softplus": lambda m, x, n: home(m).softplus(x, n),
    "softshrink": lambda m, x, n: home(m).softshrink(x, n),
    "hardshrink": lambda m, x, n: home(m).hardshrink(x, n),
}
WRITTEN = {
    "full_like": lambda m, x, n: m.full_like(x, n),
    "full": lambda m, x, n: m.full((2,), n),
    "full_dtype": lambda m, x, n: m.full((2,), n, dtype=x.dtype),
    "new_full": lambda m, x, n: x.new_full((2,), n),
    "pad": lambda m, x, n: home(m).pad(x, (1, 2), value=n),
    "masked_fill": lambda m, x, n: m.masked_fill(x, mask(m), n),
    "masked_fill_in_place": lambda m, x, n: x.clone().masked_fill_(mask(m), n),
    "index_fill": lambda m, x, n: m.index_fill(x, 1, m.tensor([0, 2]), n),
    "scatter": lambda m, x, n: m.scatter(x, 1, places(m), n),
    "scatter_value": lambda m, x, n: x.scatter(1, places(m), value=n),
    "scatter_add": lambda m, x, n: m.scatter(x, 1, places(m), n, reduce="add"),
    "scatter_multiply": lambda m, x, n: m.scatter(x, 1, places(m), n, reduce="multiply"),
    "index_add": lambda m, x, n: m.index_add(x, 1, m.tensor([0, 2]), x[:, :2], alpha=n),
    "fill_": lambda m, x, n: x.clone().fill_(n),
    "assign": lambda m, x, n: assigned(m, x, 0, n),
    "assign_slice": lambda m, x, n: assigned(m, x, (slice(None), slice(0, 2)), n),
    "assign_mask": lambda m, x, n: assigned(m, x, mask(m), n),
    "assign_index": lambda m, x, n: assigned(m, x, (slice(None), m.tensor([0, 2])), n),
    "searchsorted": lambda m, x, n: m.searchsorted(m.sort(x.reshape(-1)).values, n),
    "searchsorted_of_itself": lambda m, x, n: m.searchsorted(m.full_like(x[0], n), n),
    "add_": lambda m, x, n: x.clone().add_(n),
    "mul_": lambda m, x, n: x.clone().mul_(n),
    "clamp_": lambda m, x, n: x.clone().clamp_(n),
    "index_fill_0d": lambda m, x, n: m.index_fill(x[0, 0], 0, m.tensor([0]), n),
    "arange": lambda m, x, n: m.arange(0, 3 * n, n, dtype=x.dtype),
    "arange_default": lambda m, x, n: m.arange(0, 3 * n, n),
    "linspace": lambda m, x, n: m.linspace(0, n, 4, dtype=x.dtype),
}
SUMMED = {
    "addmm": lambda m, x, n: m.addmm(x, x[:, :2], x, beta=n, alpha=n),
    "addmv": lambda m, x, n: m.addmv(x[:, 0], x, x[0], beta=n),
    "baddbmm": lambda m, x, n: m.baddbmm(x[None], x[None, :, :2], x[None], alpha=n),
    "norm": lambda m, x, n: m.norm(x, n),
    "norm_dim": lambda m, x, n: m.norm(x, p=n, dim=1),
    "quantile": lambda m, x, n: m.quantile(x, min(n, 1) / 1),
    "var": lambda m, x, n: m.var(x, dim=1, correction=n),
    "std": lambda m, x, n: m.std(x, dim=1, correction=n),
    "normalize": lambda m, x, n: home(m).normalize(x, p=n),
    "pairwise_distance": lambda m, x, n: home(m).pairwise_distance(x, x + 1, p=2, eps=n),
    "cosine_similarity": lambda m, x, n: home(m).cosine_similarity(x, x + 1, eps=n),
    "smooth_l1": lambda m, x, n: home(m).smooth_l1_loss(x, x + 1, beta=n),
    "huber": lambda m, x, n: home(m).huber_loss(x, x + 1, delta=n),
    "margin": lambda m, x, n: home(m).margin_ranking_loss(x, x + 1, x, margin=n),
    "layer_norm": lambda m, x, n: home(m).layer_norm(x, (3,), eps=n),
    "cross_entropy": lambda m, x, n: home(m).cross_entropy(
        x, m.tensor([0, 2]), label_smoothing=min(n, 1)
    ),
}
TABLES = {
    "arithmetic": ARITHMETIC,
    "compared": COMPARED,
    "chosen": CHOSEN,
    "written": WRITTEN,
    "summed": SUMMED,
}
OF_FLOATS = ("isclose", "arange", "pairwise_distance", "margin")  # integers have other rules here


def sample(dtype):
    x = data(dtype, (2, 3), seed=4)
    return x if dtype == "bool" else x.where(x != 0, torch.ones_like(x))


def refused(function, x, number):
    try:
        function(torch, x, number)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return True
    return False


@pytest.mark.sampled(5)
@pytest.mark.filterwarnings("ignore:var\\(\\)", "ignore:std\\(\\)")
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(
    "dtype", sampled(DTYPES, lambda dtype: dtype not in ("float16", "int32", "int8"))
)
def test_number_beside_a_tensor(table, dtype):
    x = sample(dtype)
    cases = []
    for kind, number in NUMBERS.items():
        for name, function in TABLES[table].items():
            wanted = x.is_floating_point() or name not in OF_FLOATS
            if wanted and not refused(function, x, number):
                cases.append((f"{name}({kind})", lambda m, x, f=function, n=number: f(m, x, n)))
    compare(cases, x)


SCATTERED = [
    (
        f"{mode} {include}",
        lambda m, x, mode=mode, include=include: m.scatter_reduce(
            x, 1, m.tensor([[0, 0, 2], [1, 1, 1]]), x, mode, include_self=include
        ),
    )
    for mode in ("sum", "prod", "mean", "amax", "amin")
    for include in (True, False)
]


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != "bool"])
def test_scatter_reduce_keeps_the_dtype(dtype):
    compare(SCATTERED, sample(dtype))


EQUATIONS = (
    "ij->i",
    "ij->ji",
    "ij->",
    "ij,ij->ij",
    "ij,ij->i",
    "ij,ij->",
    "ij,kj->ik",
    "ij,k->i",
    "ij,k->ijk",
    "ij,kl->",
    "ij,kj,kj->ik",
)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int32", "int64", "float32"])
def test_einsum_sums_integers_alone_in_int64(dtype):
    x = sample(dtype)

    def case(equation):
        parts = equation.split("->")[0].split(",")
        return equation, lambda m, x: m.einsum(
            equation, *[x[0] if len(p) == 1 else x for p in parts]
        )

    compare([case(e) for e in EQUATIONS], x)


def test_alpha_of_integers_is_whole():
    with pytest.raises(tg.UserError, match="whole alpha"):
        tg.add(tg.tensor([1, 2]), tg.tensor([1, 2]), alpha=0.5)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "int64"])
@pytest.mark.parametrize("value", [-1, 127, 128, 300, 2**40, -(2**40), 2**63, 3.9, 1e20, math.nan])
def test_numbers_that_integers_cannot_hold_are_refused(dtype: str, value: float) -> None:
    """As torch has it: nothing wraps but negative numbers of unsigned dtypes."""
    kinds = getattr(torch, dtype), getattr(tg, dtype)
    try:
        expected = torch.tensor([value], dtype=kinds[0]).tolist()
    except (RuntimeError, ValueError, OverflowError):
        for make in (lambda d: tg.tensor([value], dtype=d), lambda d: tg.tensor(value, dtype=d)):
            with pytest.raises(tg.UserError):
                make(kinds[1])
        with pytest.raises(tg.UserError):
            tg.full((2,), value, dtype=kinds[1])
        return
    assert tg.tensor([value], dtype=kinds[1]).tolist() == expected
    assert tg.full((1,), value, dtype=kinds[1]).tolist() == expected


@pytest.mark.parametrize("bounds", [(math.nan,), (0, math.inf), (0.0, 4.0, math.nan)])
def test_ranges_without_an_end_are_refused(bounds: tuple[float, ...]) -> None:
    with pytest.raises(tg.UserError, match="not finite"):
        tg.arange(*bounds)

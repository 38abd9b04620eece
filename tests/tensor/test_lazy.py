"""Being lazy never changes a value: not yet computed, random Tensors give what computed ones give.

Each case gets a Tensor `w` that is random and lazy, or the same one computed, and must give the
same numbers: through every transform, as an argument or captured, copied, saved, read twice.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilegrad as tg

X = np.array([0.5, -1.0, 2.0, 0.25], np.float32)


def f(w: Any, x: Any) -> Any:
    """Something smooth of two vectors."""
    return tg.sin(w * x) + w


def _custom(w: Any) -> Any:
    @tg.custom_vjp
    def scaled(x: Any) -> Any:
        return f(w, x)

    scaled.defvjp(lambda x: (f(w, x), w * x), lambda kept, g: (g * tg.cos(kept) * w,))
    return scaled


def _in_place(w: Any) -> Any:
    before = w * 1.0
    made = tg.vmap(lambda x: before * x)(tg.tensor(X))
    w.add_(1.0)  # what was captured is what it was
    return made + w


def _twice(w: Any) -> Any:
    first = (w * 2).numpy()
    return tg.tensor(first) + w + (w - w)


def _pickled(w: Any) -> Any:
    return pickle.loads(pickle.dumps(w)) - w * 0 + copy.deepcopy(w) + copy.copy(w)


CASES: dict[str, Callable[[Any, Any], Any]] = {
    "vmap, shared": lambda w, x: tg.vmap(f, in_axes=(None, 0))(w, x),
    "vmap, captured": lambda w, x: tg.vmap(lambda x: f(w, x))(x),
    "vmap, mapped": lambda w, x: tg.vmap(f, in_axes=(0, None))(w, x),
    "vmap of a view": lambda w, x: tg.vmap(lambda x: f(w[::2], x))(x),
    "vmap in vmap": lambda w, x: tg.vmap(lambda x: tg.vmap(lambda y: f(w, x) * y)(x * w))(
        tg.stack([x, x])
    ),
    "vmap of grad": lambda w, x: tg.vmap(tg.grad(lambda x: f(w, x).sum()))(tg.stack([x, -x])),
    "grad of vmap": lambda w, x: tg.grad(lambda x: tg.vmap(lambda x: f(w, x))(x).sum())(x),
    "vmap of scan": lambda w, x: tg.vmap(
        lambda x: tg.scan(lambda c, s: (c + f(w, s), c), w * 0, x)[0]
    )(tg.stack([x, -x])),
    "jacrev": lambda w, x: tg.jacrev(lambda x: f(w, x))(x),
    "jacrev of w": lambda w, x: tg.jacrev(lambda w: f(w, x))(w),
    "jacfwd": lambda w, x: tg.jacfwd(lambda x: f(w, x))(x),
    "jacfwd of w": lambda w, x: tg.jacfwd(lambda w: f(w, x))(w),
    "hessian": lambda w, x: tg.hessian(lambda x: f(w, x).sum())(x),
    "grad": lambda w, x: tg.grad(lambda w: f(w, x).sum())(w),
    "vjp": lambda w, x: tg.vjp(lambda x: f(w, x), x)[1](w)[0],
    "jvp": lambda w, x: tg.jvp(lambda x: f(w, x), (x,), (w,))[1],
    "scan": lambda w, x: tg.scan(lambda c, s: (c + f(w, s), c), w, x)[1],
    "cond": lambda w, x: tg.cond(w.sum() > 0, lambda: f(w, x), lambda: f(w, -x)),
    "checkpoint": lambda w, x: tg.grad(lambda x: tg.checkpoint(lambda x: f(w, x), x).sum())(x),
    "custom_vjp": lambda w, x: tg.grad(lambda x: _custom(w)(x).sum())(x),
    "vmap of custom_vjp": lambda w, x: tg.vmap(_custom(w))(tg.stack([x, -x])),
    "jit, captured": lambda w, x: tg.jit(lambda x: f(w, x))(x),
    "jit, argument": lambda w, x: tg.jit(f)(w, x),
    "jit of vmap": lambda w, x: tg.jit(tg.vmap(f, in_axes=(None, 0)))(w, x),
    "vmap of jit": lambda w, x: tg.vmap(tg.jit(f), in_axes=(None, 0))(w, x),
    "in place after capture": lambda w, x: _in_place(w),
    "read twice": lambda w, x: _twice(w),
    "copied": lambda w, x: _pickled(w),
}


def made(seed: int, draw: str, lazy: bool) -> Any:
    """A random Tensor of 4 elements."""
    tg.manual_seed(seed)
    w = (
        tg.rand(4)
        if draw == "rand"
        else tg.randn(4)
        if draw == "randn"
        else (tg.nn.functional.dropout(tg.ones(4) * 3, 0.5, True) + tg.randn(2).sum())
    )
    return w if lazy else w.realize()


def numbers(value: Any) -> np.ndarray:
    """The values of a result."""
    return value.numpy()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 1000), draw=st.sampled_from(["rand", "randn", "dropout"]))
def test_lazy_and_computed_give_the_same(name: str, seed: int, draw: str) -> None:
    x = tg.tensor(X)
    lazy = numbers(CASES[name](made(seed, draw, True), x))
    computed = numbers(CASES[name](made(seed, draw, False), x))
    assert np.allclose(lazy, computed, rtol=1e-5, atol=1e-6), name


def test_an_unmapped_random_tensor_is_one_value() -> None:
    rows = tg.vmap(lambda w, x: w * x, in_axes=(None, 0))(tg.randn(4), tg.ones(3)).numpy()
    assert (rows == rows[0]).all()


def test_what_a_mapped_function_draws_is_drawn_for_each_example() -> None:
    rows = tg.vmap(lambda x: tg.randn(4) * x)(tg.ones(3)).numpy()
    assert len(np.unique(rows)) == 12


@pytest.mark.parametrize("transform", [tg.jacrev, tg.jacfwd])
def test_a_jacobian_is_that_of_one_draw(transform: Any) -> None:
    kept: list[Any] = []

    def noisy(x: Any) -> Any:
        kept.append(tg.randn(3))
        return x.sum() * kept[-1]

    found = transform(noisy)(tg.ones(4)).numpy()
    assert len(kept) == 1
    assert np.allclose(found, np.repeat(kept[0].numpy()[:, None], 4, 1))


def test_a_lazy_random_tensor_is_one_value_in_all_graphs() -> None:
    w = tg.randn(5)
    parts = [(w + i).numpy() - i for i in range(3)]
    assert np.allclose(parts[0], parts[1], atol=1e-6) and np.allclose(parts[0], w.numpy())


def test_a_leaf_assigned_many_times_before_it_is_read() -> None:
    """Each value stands on the one before; nothing recurses over them."""
    w = tg.ones(3, requires_grad=True)
    with tg.no_grad():
        for _ in range(1500):
            w.assign(w + 1.0)
    assert w.device == "cpu"
    assert w.numpy().tolist() == [1501.0] * 3


def test_leaves_that_stand_on_one_another_are_computed_together() -> None:
    a, b = tg.ones(3, requires_grad=True), tg.ones(3, requires_grad=True)
    with tg.no_grad():
        for _ in range(5):
            a.assign(a + b)
            b.assign(b * 2.0)
    both = a * b
    values = [1.0, 1.0]
    for _ in range(5):
        values = [values[0] + values[1], values[1] * 2]
    assert both.numpy().tolist() == [values[0] * values[1]] * 3
    assert (a.tolist(), b.tolist()) == ([values[0]] * 3, [values[1]] * 3)


def test_a_long_chain_is_dropped_without_deep_calls() -> None:
    x = y = tg.tensor(X)
    for _ in range(60_000):
        y = y + x
    assert y.shape == (4,)
    del y  # a hundred thousand Nodes, each the last holder of the next

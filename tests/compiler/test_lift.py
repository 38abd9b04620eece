"""compiler/lift.py: numbers are arguments; and what of compiled Graphs is kept in memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

import tilegrad as tg
from tilegrad.compiler import compile as compiler
from tilegrad.compiler import lift
from tilegrad.core.config import override
from tilegrad.core.recent import Recent

X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing compiled before, in memory or on disk."""
    monkeypatch.setattr(compiler, "_memory", Recent(lambda: 256))
    monkeypatch.setattr(lift, "_variants", Recent(lambda: 256))
    with override(cache_folder=""):
        yield


def compiled() -> int:
    """Graphs compiled so far."""
    return compiler.counters["compiled"]


def test_a_loop_over_numbers_compiles_twice() -> None:
    before, x = compiled(), tg.tensor(X)
    expected = X.copy()
    for i in range(1, 40):
        x = (x * (1 - 0.01 * i) + 3.0).realize()
        expected = expected * np.float32(1 - 0.01 * i) + 3
    assert np.allclose(x.numpy(), expected, rtol=1e-5)
    assert compiled() - before == 2  # with constants, then with the one that changes as an input


@pytest.mark.parametrize("again", [False, True])
def test_a_number_of_a_value_that_was_read_stays_there(again: bool) -> None:
    """What an input was computed of is no part of the Graph, though it has the same number, also
    where that is an input too."""
    mask, leaf = tg.tensor(X > 2), tg.tensor(X, requires_grad=True)
    for number in (1.25, 1.0, 3.0):
        x = (leaf + 1.0).realize()
        got = tg.where(mask, number, x) + (leaf if again else 0)
        want = np.where(X > 2, np.float32(number), X + 1) + (X if again else 0)
        np.testing.assert_array_equal(got.detach().numpy(), want)


def test_only_numbers_that_change_become_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    real = lift.executable_for

    def note(inputs, outputs, donate, device):
        given.append(len(inputs))
        return real(inputs, outputs, donate, device)

    monkeypatch.setattr(lift, "executable_for", note)
    for rate in (0.1, 0.2, 0.3, 0.1):
        found = (tg.tensor(X) * rate + 0.25 / 1.5).numpy()
        assert np.allclose(found, X * np.float32(rate) + 0.25 / 1.5)
    assert given == [1, 2]


def test_two_numbers_that_change_one_after_the_other() -> None:
    before = compiled()
    pairs = [(0.5, 0.25), (0.75, 0.25), (0.5, 0.125), (0.3, 0.7), (0.5, 0.25)]
    for a, b in pairs:
        assert np.allclose((tg.tensor(X) * a + b).numpy(), X * np.float32(a) + np.float32(b))
    assert compiled() - before == 3


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int32, np.int64, np.uint8])
def test_numbers_arrive_exactly(dtype: type) -> None:
    """A value is what it is, whether it was compiled in or handed over."""
    values = [0.1, 1 / 3, 1e-300, -0.0, 1e30] if np.dtype(dtype).kind == "f" else [1, 7, 100, 0]
    x = X.astype(dtype)
    for value in values:
        found = (tg.tensor(x) * value).numpy()
        with np.errstate(over="ignore", under="ignore"):
            assert np.array_equal(found, x * np.array(value, dtype)), value
            assert np.array_equal(np.signbit(found), np.signbit(x * np.array(value, dtype)))


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 2.0, 0.5, float("inf"), float("nan")])
def test_special_numbers_after_others(value: float) -> None:
    x = tg.tensor(np.array([0.0, 1.0, -2.0, np.inf, np.nan], np.float32))
    for number in (0.3, 0.7, value):
        found = (x * number + x ** abs(number)).numpy()
    with np.errstate(all="ignore"):
        v = np.float32(value)
        assert np.allclose(found, x.numpy() * v + x.numpy() ** abs(v), equal_nan=True)


def test_attention_with_another_scale_each_time() -> None:
    random = np.random.default_rng(0)
    q, k, v = (tg.tensor(random.standard_normal((1, 2, 8, 4), np.float32)) for _ in range(3))
    before = compiled()
    for scale in (0.5, 0.4, 0.3, 0.2):
        plain = tg.softmax((q @ k.transpose(-1, -2)) * scale, -1) @ v
        s = np.einsum("bhqd,bhkd->bhqk", q.numpy(), k.numpy()) * scale
        e = np.exp(s - s.max(-1, keepdims=True))
        assert np.allclose(plain.numpy(), e / e.sum(-1, keepdims=True) @ v.numpy(), atol=1e-5)
    assert compiled() - before == 2


# ---- what is kept ----------------------------------------------------------------------------


@pytest.mark.usefixtures("quick_collect")
def test_compiled_graphs_in_memory_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_memory", Recent(lambda: 4))
    monkeypatch.setattr(lift, "_variants", Recent(lambda: 4))
    monkeypatch.setattr(compiler, "_bodies", {})
    gone = []
    for n in range(1, 13):
        x = tg.tensor(np.ones((n, 3), np.float32))
        assert (x * 2).numpy().sum() == 6 * n
        last = list(compiler._memory._values.values())[-1]
        gone.append(weakref.ref(next(iter(last.launcher.modules.values()))))
    del last
    gc.collect()
    assert len(compiler._memory) == 4
    assert sum(ref() is not None for ref in gone) <= 5  # code goes with its Executables


@pytest.mark.usefixtures("quick_collect")
def test_code_that_a_function_holds_is_not_unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_memory", Recent(lambda: 1))
    held = tg.jit(lambda x: x * 3 + 1)
    x = tg.tensor(X)
    assert np.array_equal(held(x).numpy(), X * 3 + 1)
    for n in range(1, 6):
        (tg.tensor(np.ones(n, np.float32)) - 5).numpy()
    gc.collect()
    before = compiled()
    assert np.array_equal(held(x).numpy(), X * 3 + 1)
    assert compiled() == before


def test_traces_of_a_jitted_function_are_bounded() -> None:
    function = tg.jit(lambda x: x + 1)
    with override(keep=3):
        for n in range(1, 9):
            assert function(tg.tensor(np.zeros(n, np.float32))).shape == (n,)
            function(tg.tensor(np.zeros(1, np.float32)))  # used all the time: it stays
    assert len(function._lowered) == 3
    traces = function.traces
    function(tg.tensor(np.zeros(1, np.float32)))
    assert function.traces == traces


# ---- results made together -------------------------------------------------------------------


def test_the_first_gradient_that_is_read_computes_all() -> None:
    layers = [tg.tensor(np.eye(4, dtype=np.float32), requires_grad=True) for _ in range(6)]
    h = tg.tensor(np.ones((2, 4), np.float32))
    for w in layers:
        h = tg.tanh(h @ w)
    h.sum().backward()
    before = compiled()
    together = [w.grad.numpy() for w in layers]
    assert compiled() - before == 1
    assert all(np.isfinite(g).all() and g.any() for g in together)


@pytest.mark.usefixtures("quick_collect")
def test_gradients_that_nobody_holds_are_not_computed() -> None:
    a = tg.tensor(X, requires_grad=True)
    b = tg.tensor(X, requires_grad=True)
    (a * b).sum().backward()
    kept = weakref.ref(b.grad)
    b.grad = None
    gc.collect()
    assert kept() is None
    assert np.array_equal(a.grad.numpy(), X)


def test_results_of_value_and_grad_are_made_together() -> None:
    before = compiled()
    value, grads = tg.value_and_grad(lambda p: sum((q * q).sum() for q in p))(
        [tg.tensor(X + i) for i in range(4)]
    )
    for i, g in enumerate(grads):
        assert np.array_equal(g.numpy(), 2 * (X + i))
    assert np.isclose(value.item(), sum(((X + i) ** 2).sum() for i in range(4)))
    assert compiled() - before == 1

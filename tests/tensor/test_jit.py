"""jit: signatures, state, donation, symbols, errors, threads."""

# ruff: noqa: F821, UP037

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections import namedtuple

import numpy as np
import pytest

from tilegrad.core.errors import DTypeError, ShapeError, StateError, TraceError, UserError
from tilegrad.ir.symbol import symbol
from tilegrad.tensor import elementwise, lowered, matmul, movement, reduce  # noqa: F401
from tilegrad.tensor.jit import jit
from tilegrad.tensor.random import rand
from tilegrad.tensor.tensor import Tensor, no_grad


def tensor(*values: float) -> Tensor:
    return Tensor(np.array(values, np.float32))


class Layer:
    """What jit knows of a Module: `tensors()` and `settings()`."""

    def __init__(self) -> None:
        self.w = Tensor(np.array([1.0, 2.0], np.float32), requires_grad=True)
        self.count = Tensor(np.zeros((), np.float32))
        self.training = True

    def tensors(self) -> dict[str, Tensor]:
        return {"w": self.w, "count": self.count}

    def settings(self) -> bool:
        return self.training

    def __call__(self, x: Tensor) -> Tensor:
        if self.training:
            with no_grad():
                self.count.assign(self.count + 1.0)
        return x * self.w


class Descent:
    """What jit knows of an optimizer."""

    def __init__(self, layer: Layer) -> None:
        self.parameters = [layer.w]
        self.rate = Tensor(np.array(0.5, np.float32))

    def tensors(self) -> dict[str, Tensor]:
        return {"p0": self.parameters[0], "rate": self.rate}

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None

    def step(self) -> None:
        with no_grad():
            for p in self.parameters:
                p.assign(p - self.rate * p.grad)


# ---- signatures ------------------------------------------------------------------------------


def test_one_trace_per_signature():
    @jit
    def f(a, b):
        return a * b + 1.0

    assert f(tensor(1, 2), tensor(3, 4)).tolist() == [4.0, 9.0]
    assert f(tensor(2, 2), tensor(5, 5)).tolist() == [11.0, 11.0]
    assert f.traces == 1
    f(tensor(1), tensor(2))
    f(Tensor([1, 2]), tensor(3, 4))
    assert f.traces == 3
    f.clear()
    f(tensor(1), tensor(2))
    assert f.traces == 4


def test_retrace_is_logged_with_the_argument(caplog):
    @jit
    def f(x, y):
        return x + y

    with caplog.at_level(logging.INFO, logger="tilegrad.jit"):
        f(tensor(1, 2), tensor(1))
        assert not caplog.records
        f(tensor(1, 2, 3), tensor(1))
    assert "argument x changed from float32[2] to float32[3]" in caplog.text
    assert "test_jit.py:" in caplog.text and "argument y" not in caplog.text


def test_numbers_are_inputs():
    @jit
    def f(x, n, scale):
        return x * scale + n

    assert f(tensor(1, 2), 1, 0.5).tolist() == [1.5, 2.0]
    assert f(tensor(1, 2), 2, 1.5).tolist() == [3.5, 5.0]
    assert f.traces == 1
    assert f(Tensor([1, 2]), 2, 3).tolist() == [5, 8]
    half = Tensor(np.ones(2, np.float16))
    assert f(half, 1, 0.5).dtype.name == "float16"


def test_static_arguments():
    @jit(static="n")
    def f(x, n, *, deep=False):
        return sum((x for _ in range(n)), x) if not deep else -x

    assert f(tensor(1), 2).tolist() == [3.0]
    assert f(tensor(1), 3).tolist() == [4.0]
    assert f(tensor(1), n=3, deep=True).tolist() == [-1.0]
    assert f(x=tensor(5), n=3, deep=True).tolist() == [-5.0]
    assert f.traces == 3
    with pytest.raises(DTypeError, match=r"static argument n is not hashable(.|\n)*hint: use a"):
        f(tensor(1), [1])
    with pytest.raises(UserError, match=r"static names no parameter(.|\n)*x, n, deep"):
        jit(f.function, static="m")


def test_bool_and_none_are_static():
    @jit
    def f(x, flag=None):
        return x if flag is None else x * 2.0 if flag else x * 3.0

    got = [f(tensor(1), *a).item() for a in ((), (None,), (True,), (False,), (True,))]
    assert got == [1.0, 1.0, 2.0, 3.0, 2.0] and f.traces == 3


def test_containers_varargs_and_defaults():
    Out = namedtuple("Out", "total parts")

    @jit
    def f(first, *rest, scale=2.0, **named):
        total = first["a"] * scale
        for r in rest:
            total = total + r
        return Out(total, {"n": [named["z"][0] + 1.0, None, "text"]})

    got = f({"a": tensor(1)}, tensor(2), tensor(3), z=(tensor(10),))
    assert got.total.item() == 7.0 and got.parts["n"][0].item() == 11.0
    assert got.parts["n"][1:] == [None, "text"]
    assert f({"a": tensor(1)}, z=(tensor(10),), scale=5.0).total.item() == 5.0
    with pytest.raises(DTypeError, match="missing a required argument: 'first'"):
        f()


def test_arrays_and_same_tensor_twice():
    f = jit(lambda a, b: a - b)
    x = tensor(1, 2)
    assert f(x, x).tolist() == [0.0, 0.0]
    assert f(x, tensor(5, 5)).tolist() == [-4.0, -3.0]
    assert f.traces == 1
    assert f(np.float32([3, 4]), x).tolist() == [2.0, 2.0]


def test_results_that_are_arguments_or_constants():
    @jit
    def f(x):
        return x, Tensor([7.0]), x, 3

    x = tensor(1, 2)
    a, b, c, d = f(x)
    assert a.tolist() == c.tolist() == [1.0, 2.0] and b.item() == 7.0 and d == 3
    assert f(tensor(3, 4))[0].tolist() == [3.0, 4.0] and f.traces == 1


def test_nested_jit_and_methods():
    class Thing:
        def __init__(self, scale):
            self.scale = scale

        @jit
        def run(self, x):
            return inner(x) * self.scale

    inner = jit(lambda x: x + 1.0)
    assert Thing(2.0).run(tensor(1)).item() == 4.0
    assert Thing(3.0).run(tensor(1)).item() == 6.0
    assert inner.traces == 0
    assert Thing.run.__name__ == "run"


def test_lower_gives_the_graph_and_does_not_run():
    f = jit(lambda a, b: a * b)
    found = f.lower(tensor(1, 2), tensor(3, 4))
    assert len(found.inputs) == 2 and [n.op.name for n in found.outputs] == ["multiply"]
    assert found.executable is None
    f(tensor(1, 2), tensor(3, 4))
    assert f.traces == 1


def test_unused_arguments_are_not_bound():
    f = jit(lambda a, b: a + 1.0)
    assert len(f.lower(tensor(1), tensor(2)).inputs) == 1


# ---- what a trace cannot do ------------------------------------------------------------------


def test_data_dependent_branch():
    @jit
    def f(x):
        return x if x.sum() > 0 else -x

    with pytest.raises(
        TraceError,
        match=r"value of a Tensor was read(.|\n)*traced Tensor bool"
        r"(.|\n)*test_jit.py:\d+(.|\n)*hint: use where\(\)/cond\(\)",
    ):
        f(tensor(1))
    assert f.traces == 0
    assert tensor(2).item() == 2.0  # nothing is left of the failed trace


def test_numbers_cannot_be_sizes():
    f = jit(lambda x, n: [x for _ in range(n)])
    with pytest.raises(TraceError, match="mark the argument static"):
        f(tensor(1), 3)


def test_leaked_tensor():
    kept = []

    @jit
    def f(x):
        kept.append(x * 2.0)
        return x

    f(tensor(1))
    with pytest.raises(TraceError, match="kept from inside of one"):
        kept[0].item()
    with pytest.raises(TraceError, match="kept from inside of one"):
        f(kept[0])
    with pytest.raises(TraceError, match="kept from inside of one"):
        jit(lambda x: x + kept[0])(tensor(1))


def test_side_effect_on_a_captured_tensor():
    total = tensor(0)

    @jit
    def f(x):
        total.assign(total + x)
        return x

    with pytest.raises(
        TraceError,
        match=r"jitted function test_side.*f assigned to a Tensor"
        r"(.|\n)*test_jit.py:\d+(.|\n)*hint: pass the Tensor",
    ):
        f(tensor(1))
    assert total.item() == 0.0
    w = Tensor([1.0], requires_grad=True)
    with pytest.raises(TraceError, match="set the gradient of a Tensor"):
        jit(lambda x: (x * w).sum().backward())(tensor(1))
    assert w.grad is None


def test_bad_argument():
    with pytest.raises(DTypeError, match=r"argument x\['k'\] cannot be traced(.|\n)*got: set"):
        jit(lambda x: 1)({"k": {1, 2}})


# ---- captured Tensors ------------------------------------------------------------------------


def test_captured_tensor_is_read_at_each_call():
    w = tensor(1, 2)
    f = jit(lambda x: x * w)
    assert f(tensor(1, 1)).tolist() == [1.0, 2.0]
    w.assign(tensor(5, 6))
    assert f(tensor(1, 1)).tolist() == [5.0, 6.0] and f.traces == 1
    w._node = tensor(1, 2, 3)._node
    with pytest.raises(ShapeError, match=r"captured has changed(.|\n)*float32\[2\]"):
        f(tensor(1, 1))


# ---- state -----------------------------------------------------------------------------------


def test_state_is_written_back():
    layer = Layer()

    @jit
    def f(layer, x):
        return layer(x)

    for i in range(3):
        assert f(layer, tensor(1, 1)).tolist() == [1.0, 2.0]
        assert layer.count.item() == i + 1
    layer.training = False
    f(layer, tensor(1, 1))
    assert layer.count.item() == 3.0 and f.traces == 2
    g = jit(layer)
    layer.training = True
    g(tensor(1, 1))
    assert layer.count.item() == 4.0


def test_training_step_matches_eager():
    def step(layer, optimizer, x):
        optimizer.zero_grad()
        loss = (layer(x) * layer(x)).sum()
        loss.backward()
        optimizer.step()
        return loss

    layer, plain = Layer(), Layer()
    optimizer, plain_optimizer = Descent(layer), Descent(plain)
    jitted = jit(step)
    x = tensor(0.25, 0.5)
    for _ in range(3):
        a, b = jitted(layer, optimizer, x), step(plain, plain_optimizer, x)
        np.testing.assert_allclose(a.item(), b.item(), rtol=1e-6)
        np.testing.assert_allclose(layer.w.numpy(), plain.w.numpy(), rtol=1e-6)
        assert layer.count.item() == plain.count.item()
    assert jitted.traces == 1 and layer.w.is_leaf and layer.w.requires_grad
    with pytest.raises(TraceError, match="kept from inside"):
        layer.w.grad.tolist()
    kept = jit(step, keep_gradients=True)
    kept(layer, optimizer, x)
    step(plain, plain_optimizer, x)
    np.testing.assert_allclose(layer.w.grad.numpy(), plain.w.grad.numpy(), rtol=1e-5)


def test_gradients_left_outside_are_seen_and_accumulate():
    layer, plain = Layer(), Layer()

    def collect(layer, x):
        (layer(x) * 2.0).sum().backward()

    f = jit(collect)
    for _ in range(3):
        f(layer, tensor(1, 3))
        collect(plain, tensor(1, 3))
        assert layer.w.grad.tolist() == plain.w.grad.tolist()
    assert f.traces == 2  # without and with a gradient there before
    optimizer = Descent(layer)
    jit(lambda o: o.step())(optimizer)
    np.testing.assert_allclose(layer.w.numpy(), [1 - 0.5 * 6, 2 - 0.5 * 18])


def test_shared_state_is_copied_before_it_is_given_away():
    layer = Layer()
    before = layer.w.detach()
    view = layer.w
    alias = Tensor(layer.w._node)
    optimizer = Descent(layer)

    @jit
    def f(layer, optimizer, x):
        optimizer.zero_grad()
        layer(x).sum().backward()
        optimizer.step()

    f(layer, optimizer, tensor(1, 1))
    assert alias.tolist() == [1.0, 2.0] and before.tolist() == [1.0, 2.0]
    assert view.tolist() == [0.5, 1.5]


def test_state_is_not_copied_at_every_call(monkeypatch):
    copies = []
    copy = lowered.copy_of
    monkeypatch.setattr(lowered, "copy_of", lambda b: copies.append(b) or copy(b))
    layer = Layer()
    optimizer = Descent(layer)

    @jit
    def f(layer, optimizer, x):
        optimizer.zero_grad()
        layer(x).sum().backward()
        optimizer.step()

    for _ in range(5):
        f(layer, optimizer, tensor(1, 1))
    assert len(copies) <= 2  # the first time: the data came from NumPy


def test_in_place_on_an_argument_reaches_the_caller():
    @jit
    def f(x, y):
        x.assign(x + y)
        return x * 2.0

    x = tensor(1, 2)
    assert f(x, tensor(1, 1)).tolist() == [4.0, 6.0]
    assert x.tolist() == [2.0, 3.0]


@pytest.mark.usefixtures("quick_collect")
def test_objects_are_known_by_identity_and_freed():
    f = jit(lambda layer, x: layer(x))
    one, two = Layer(), Layer()
    two.w.assign(tensor(3, 3))
    assert f(one, tensor(1, 1)).tolist() == [1.0, 2.0]
    assert f(two, tensor(1, 1)).tolist() == [3.0, 3.0]
    assert f.traces == 2 and len(f._lowered) == 2
    gone = weakref.ref(two)
    del two
    gc.collect()
    assert gone() is None and len(f._lowered) == 1


# ---- donation --------------------------------------------------------------------------------


def test_donated_argument():
    @jit(donate="state")
    def f(state, x):
        return state + x

    state = tensor(1, 2)
    new = f(state, tensor(1, 1))
    assert new.tolist() == [2.0, 3.0]
    with pytest.raises(StateError, match=r"was donated at .*test_jit.py:\d+(.|\n)*hint: use the"):
        state.numpy()
    with pytest.raises(StateError, match="was donated"):
        f(state, tensor(1, 1))
    assert f(new, tensor(1, 1)).tolist() == [3.0, 4.0]
    assert f.lower(tensor(1, 2), tensor(1, 1)).donate == (0,)
    both = tensor(1, 1)
    with pytest.raises(StateError, match="donated Buffer is passed twice"):
        f(both, both)
    assert both.tolist() == [1.0, 1.0]


# ---- symbolic sizes --------------------------------------------------------------------------


def test_symbolic_size_needs_no_retrace():
    @jit(dynamic={"x": {0: ("N", 1, 64)}, "y": {0: ("N", 1, 64)}})
    def f(x, y):
        return (x * y).sum(0), x + 1.0

    for n in (1, 3, 64):
        x = np.arange(2 * n, dtype=np.float32).reshape(n, 2)
        total, more = f(Tensor(x), Tensor(x))
        np.testing.assert_allclose(total.numpy(), (x * x).sum(0))
        np.testing.assert_allclose(more.numpy(), x + 1)
    assert f.traces == 1
    with pytest.raises(ShapeError, match=r"argument x does not(.|\n)*1 <= N <= 64(.|\n)*N = 65"):
        f(Tensor(np.ones((65, 2))), Tensor(np.ones((65, 2))))
    with pytest.raises(ShapeError, match=r"argument y(.|\n)*N = 3, as in argument x(.|\n)*N = 4"):
        f(Tensor(np.ones((3, 2))), Tensor(np.ones((4, 2))))


def test_a_size_may_be_a_symbol_and_a_number() -> None:
    size = symbol("N", 1, 8)
    sums = jit(lambda x, ends: ends[1:] * x, dynamic={"x": {0: size}, "ends": {0: size + 1}})
    for n in (3, 7):
        x = Tensor(np.arange(n, dtype=np.float32))
        assert sums(x, Tensor(np.ones(n + 1, np.float32))).tolist() == x.tolist()
    assert sums.traces == 1
    with pytest.raises(ShapeError, match="N = 3, as in argument x"):
        sums(Tensor(np.ones(3)), Tensor(np.ones(3)))
    with pytest.raises(ShapeError, match="1 <= N <= 8"):
        sums(Tensor(np.ones(8)), Tensor(np.ones(10)))
    for wrong in (size * 2, size + symbol("M", 1, 4), size // 2):
        with pytest.raises(UserError, match="a size is a Symbol"):
            jit(lambda x: x, dynamic={"x": {0: wrong}})


def test_symbols_by_annotation():
    @jit(symbols={"S": (1, 128)})
    def f(x: Tensor["S", 4], w: Tensor[4, "D"]) -> Tensor["S", "D"]:
        return x @ w

    w = np.ones((4, 3), np.float32)
    for n in (2, 5, 100):
        assert f(Tensor(np.ones((n, 4), np.float32)), Tensor(w)).shape == (n, 3)
    assert f.traces == 1
    with pytest.raises(ShapeError, match=r"argument x(.|\n)*expected: Tensor\['S', 4\]"):
        f(Tensor(np.ones((2, 5), np.float32)), Tensor(w))


# ---- threads, randomness ---------------------------------------------------------------------


def test_threads():
    layer = Layer()
    layer.training = False
    w = tensor(2, 2)

    @jit
    def f(layer, x, k):
        return layer(x) * w + k

    wrong = []

    def work(seed: int) -> None:
        for i in range(20):
            size = (2,) if i % 2 else (1 + (seed + i) % 3, 2)
            x = np.full(size, seed + i, np.float32)
            got = f(layer, Tensor(x), float(i)).numpy()
            if not np.allclose(got, x * [1, 2] * 2 + i):
                wrong.append((seed, i))

    threads = [threading.Thread(target=work, args=(s,)) for s in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and f.traces == 4


def test_random_offsets_advance_by_what_was_drawn():
    from tilegrad.tensor.random import Generator

    g = Generator(3)
    f = jit(lambda: rand(4, generator=g) + rand(4, generator=g))
    a, b = f().tolist(), f().tolist()
    assert a != b and g.offset == 4
    g.manual_seed(3)
    assert (rand(4, generator=g) + rand(4, generator=g)).tolist() == a


def test_default_numbers_stay_numbers():
    @jit
    def f(x, scale=2.0, times=3):
        assert isinstance(scale, float) and isinstance(times, int)
        return sum([x * scale for _ in range(times)], x * 0)

    assert f(tensor(1, 2)).tolist() == [6.0, 12.0]


def test_equal_constants_may_be_donated_together():
    from tilegrad import zeros

    @jit(donate="state")
    def f(state, x):
        return {"m": state["m"] + x, "v": state["v"] + 2 * x}

    state = {"m": zeros(2), "v": zeros(2)}
    state = f(state, tensor(1, 2))
    state = f(state, tensor(1, 2))
    assert state["m"].tolist() == [2.0, 4.0] and state["v"].tolist() == [4.0, 8.0]


# ---- Python floats ---------------------------------------------------------------------------

FLOATS = {
    "product": lambda x, a: x * a,
    "of the number alone": lambda x, a: x * (1 - a / 3) + a**2,
    "compared": lambda x, a: (x > a) * x,
    "chosen": lambda x, a: elementwise.where(x > 1, a, x),
    "less": lambda x, a: a - x,
    "a divisor": lambda x, a: x / a,
    "beside a scalar": lambda x, a: x.sum() * a,
}


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_python_float_is_what_it_is_outside(name: str, dtype: type) -> None:
    """Exact beside float64; beside float32 it does not promote."""
    x = Tensor(np.array([1.0, 3.0, 0.1], dtype))
    for a in (0.1, 1 / 3, 1e-40, 2.0):
        expected, found = FLOATS[name](x, a), jit(FLOATS[name])(x, a)
        assert found.dtype is expected.dtype
        limit = 1e-15 if dtype is np.float64 else 3e-7
        assert np.allclose(found.numpy(), expected.numpy(), rtol=limit, atol=0), a


def test_a_number_alone_has_the_dtype_of_numbers() -> None:
    assert jit(lambda a: a * 2)(0.1).dtype is Tensor([0.1]).dtype


def test_bounds_of_symbols_are_any_ints() -> None:
    x = rand(2, 3)
    bounds = ("N", np.int64(1), np.int64(9))
    assert jit(lambda a: a * 2, dynamic={"a": {0: bounds}})(x).numpy().shape == (2, 3)
    with pytest.raises(UserError, match="no int"):
        jit(lambda a: a * 2, dynamic={"a": {0: ("N", 1.0, 9)}})(x)

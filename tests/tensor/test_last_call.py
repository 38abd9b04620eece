"""The call before: what counts as a call like it, and what does not."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest

from tilegrad.core.errors import StateError
from tilegrad.tensor import elementwise, last_call, reduce  # noqa: F401
from tilegrad.tensor import jit as jits
from tilegrad.tensor.jit import jit
from tilegrad.tensor.tensor import Tensor, no_grad


def tensor(*values: float) -> Tensor:
    return Tensor(np.array(values, np.float32))


@pytest.fixture
def hits(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For every call that asked whether it is like the one before: whether it was."""
    found: list[bool] = []

    def counted(args, before):
        buffers = last_call.buffers_of(args, before)
        found.append(buffers is not None)
        return buffers

    monkeypatch.setattr(jits, "buffers_of", counted)
    return found


def test_the_same_tensors_need_no_key(hits) -> None:
    f = jit(lambda a, b: (a + b, a * 2.0))
    x, y = tensor(1, 2), tensor(3, 4)
    for _ in range(4):
        total, twice = f(x, y)
        np.testing.assert_array_equal(total.numpy(), [4, 6])
        np.testing.assert_array_equal(twice.numpy(), [2, 4])
    assert hits == [True, True] and f.traces == 1


def test_results_share_their_types(hits) -> None:
    f = jit(lambda a: a * 2.0)
    x = f(tensor(1, 2))
    for _ in range(5):
        x = f(x)
    np.testing.assert_array_equal(x.numpy(), [64, 128])
    assert hits[-3:] == [True] * 3 and f.traces == 1


def test_other_types_are_other_calls(hits) -> None:
    f = jit(lambda a: a + 1.0)
    x, longer = tensor(1, 2), tensor(1, 2, 3)
    whole = Tensor(np.array([1, 2], np.int32))
    for _ in range(3):
        assert f(x).numpy().tolist() == [2, 3]
        assert f(longer).numpy().tolist() == [2, 3, 4]
        assert f(whole).dtype == (whole + 1.0).dtype
    assert f.traces == 3 and not any(hits)


def test_derivatives_are_recorded_as_asked() -> None:
    f = jit(lambda a: (a * a).sum())
    x = tensor(1, 2)
    for _ in range(3):
        assert not f(x).requires_grad
    x.requires_grad = True
    assert f(x).requires_grad
    with no_grad():
        assert not f(x).requires_grad
    f(x).backward()
    np.testing.assert_array_equal(x.grad.numpy(), [2, 4])


def test_arguments_that_are_not_tensors() -> None:
    f = jit(lambda a, b: a * b)
    x = tensor(1, 2)
    for _ in range(3):
        assert f(x, x).numpy().tolist() == [1, 4]
    assert f(x, 3.0).numpy().tolist() == [3, 6]
    assert f(x, b=2.0).numpy().tolist() == [2, 4]
    assert f(x, np.array([5, 6], np.float32)).numpy().tolist() == [5, 12]


def test_state_and_donation_take_the_other_path(hits) -> None:
    f = jit(lambda a: a + 1.0, donate=(0,))
    x = tensor(1, 2)
    for _ in range(3):
        x = f(x)
    assert not hits and x.numpy().tolist() == [4, 5]
    g, old = jit(lambda a: a + 1.0), tensor(1, 2)
    for _ in range(3):
        g(old)
    f(old)
    with pytest.raises(StateError, match="donated"):
        g(old)


@pytest.mark.usefixtures("quick_collect")
def test_nothing_is_kept_alive() -> None:
    f = jit(lambda a: a + 1.0)
    x = tensor(1, 2)
    for _ in range(3):
        f(x)
    node = weakref.ref(x._node)
    del x
    gc.collect()
    assert node() is None


def test_threads_with_types_of_their_own() -> None:
    f = jit(lambda a: a + 1.0)
    wrong = []

    def work(size: int) -> None:
        x = Tensor(np.zeros(size, np.float32))
        for _ in range(200):
            if f(x).numpy().tolist() != [1.0] * size:
                wrong.append(size)

    threads = [threading.Thread(target=work, args=(size,)) for size in (1, 2, 3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and f.traces == 3

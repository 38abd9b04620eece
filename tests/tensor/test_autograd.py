"""Reverse mode on Tensors, against torch."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from torch_peer import torch

from tilegrad.core.errors import DTypeError, ShapeError, StateError
from tilegrad.tensor import elementwise, matmul, movement, reduce  # noqa: F401
from tilegrad.tensor.autograd import grad_of
from tilegrad.tensor.jit import jit
from tilegrad.tensor.tensor import Tensor, no_grad


def leaf(*values: float) -> Tensor:
    return Tensor(np.array(values, np.float64), requires_grad=True)


def test_backward_matches_torch():
    x, w = np.random.RandomState(0).randn(2, 3, 4), np.random.RandomState(1).randn(4, 5)
    a, b = Tensor(x, requires_grad=True), Tensor(w, requires_grad=True)
    ((a @ b).tanh() * 2.0).mean().backward()
    ta, tb = torch.tensor(x, requires_grad=True), torch.tensor(w, requires_grad=True)
    ((ta @ tb).tanh() * 2.0).mean().backward()
    np.testing.assert_allclose(a.grad.numpy(), ta.grad.numpy(), rtol=1e-10)
    np.testing.assert_allclose(b.grad.numpy(), tb.grad.numpy(), rtol=1e-10)


def test_gradients_accumulate():
    x = leaf(1.0, 2.0)
    (x * x).sum().backward()
    (x * 3.0).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), [5.0, 7.0])
    x.grad = None
    x.sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), [1.0, 1.0])


def test_equal_leaves_are_told_apart():
    """Nodes of equal values are shared; the leaves on them are not."""
    a = Tensor(np.zeros(2)) * 0.0 + 1.0
    b = a.detach()
    a.requires_grad = b.requires_grad = True
    (a * 2.0 + b * 3.0).sum().backward()
    assert a.grad.tolist() == [2.0, 2.0] and b.grad.tolist() == [3.0, 3.0]
    assert a.tolist() == [1.0, 1.0]


def test_gradient_of_a_vector_needs_a_start():
    x = leaf(1.0, 2.0)
    with pytest.raises(
        ShapeError,
        match=r"backward: needs a gradient(.|\n)*shape \(2,\)(.|\n)*"
        r"test_autograd.py:\d+(.|\n)*hint: reduce it first",
    ):
        (x * x).backward()
    with pytest.raises(ShapeError, match=r"another shape(.|\n)*expected: \(2,\)(.|\n)*got: \(3,\)"):
        (x * x).backward(Tensor([1.0, 1.0, 1.0]))
    (x * x).backward(Tensor([1.0, 10.0]))
    assert x.grad.tolist() == [2.0, 40.0]


def test_errors_without_a_leaf():
    with pytest.raises(StateError, match="no Tensor that requires a gradient is reachable"):
        Tensor([1.0]).sum().backward()
    x = leaf(1.0)
    with no_grad():
        y = (x * x).sum()
        with pytest.raises(StateError, match=r"switched off(.|\n)*inside no_grad"):
            y.backward()
    with pytest.raises(StateError, match="no Tensor that requires"):
        y.backward()
    with pytest.raises(StateError, match="no Tensor that requires"):
        (x.detach() * 2.0).sum().backward()
    with pytest.raises(DTypeError, match="only floats"):
        Tensor([1, 2], requires_grad=True)


def test_detach_and_no_grad_cut_part_of_the_history():
    x = leaf(3.0)
    with no_grad():
        y = x * x
    (x * y + x.detach() * x).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), [9.0 + 3.0])


def test_gradient_has_no_history_unless_asked():
    x = leaf(2.0)
    (x * x * x).sum().backward()
    assert not x.grad.requires_grad
    first = x.grad
    x.grad = None
    (x * first).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), [12.0])
    x.grad = None
    (x * x * x).sum().backward(create_graph=True)
    second = x.grad
    x.grad = None
    second.sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), [12.0])


def test_grad_of():
    x, y = leaf(2.0), leaf(5.0)
    z = x * x * y
    gx, gy = grad_of(z, [x, y])
    assert gx.tolist() == [20.0] and gy.tolist() == [4.0]
    assert x.grad is None
    middle = x * 3.0
    assert grad_of((middle * middle).sum(), middle)[0].tolist() == [12.0]
    with pytest.raises(StateError, match="does not influence"):
        grad_of(x * 2.0, [y])
    assert grad_of(x * 2.0, [y], allow_unused=True) == (None,)
    (first,) = grad_of(x * x * x, x, create_graph=True)
    assert grad_of(first, x)[0].tolist() == [12.0]


def test_backward_inputs_only():
    x, y = leaf(2.0), leaf(5.0)
    (x * y).sum().backward(inputs=[x])
    assert x.grad.tolist() == [5.0] and y.grad is None


def test_update_under_no_grad():
    w = leaf(1.0)
    for _ in range(3):
        w.grad = None
        (w * w).sum().backward()
        with no_grad():
            w.assign(w - 0.25 * w.grad)
    assert w.requires_grad and w.is_leaf
    np.testing.assert_allclose(w.numpy(), [0.125])


@pytest.mark.usefixtures("quick_collect")
def test_leaf_is_freed():
    w = leaf(1.0)
    (w * w).sum().backward()
    gone = weakref.ref(w)
    del w
    gc.collect()
    assert gone() is None


def test_backward_through_the_result_of_a_jitted_function():
    calls = []

    @jit
    def f(a, b):
        calls.append(1)
        return (a * b).tanh()

    x, y = leaf(0.5), leaf(2.0)
    out = f(x, y)
    assert out.requires_grad
    (out * out).sum().backward()
    tx, ty = (torch.tensor([v], dtype=torch.float64, requires_grad=True) for v in (0.5, 2.0))
    ((tx * ty).tanh() ** 2).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), tx.grad.numpy())
    np.testing.assert_allclose(y.grad.numpy(), ty.grad.numpy())
    f(f(x, y), y).sum().backward()
    assert len(calls) == 1
    with no_grad():
        assert not f(x, y).requires_grad


def test_a_second_backward_says_where_the_first_was() -> None:
    w = Tensor([1.0, 2.0], requires_grad=True)
    loss = (w * w).sum()
    loss.backward()
    with pytest.raises(StateError, match="called on this Tensor before") as error:
        loss.backward()
    assert "test_autograd.py" in str(error.value) and "retain_graph=True" in str(error.value)
    assert w.grad.tolist() == [2.0, 4.0]  # nothing was added
    (w * w).sum().backward()  # computed anew: an equal value, another Tensor
    assert w.grad.tolist() == [4.0, 8.0]


def test_a_second_backward_where_the_first_kept_the_graph() -> None:
    w = Tensor([1.0, 2.0], requires_grad=True)
    loss = (w * w).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert w.grad.tolist() == [4.0, 8.0]
    with pytest.raises(StateError):
        loss.backward()


def test_backward_of_a_step_that_did_it_says_why() -> None:
    w = Tensor([1.0, 2.0], requires_grad=True)

    @jit
    def step(w):
        loss = (w * w).sum()
        loss.backward()
        return loss

    loss = step(w)
    with pytest.raises(StateError, match="jitted function that called backward"):
        loss.backward()

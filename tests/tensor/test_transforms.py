"""Transforms alone and composed, against torch and closed forms."""

from __future__ import annotations

import numpy as np
import pytest
from torch_peer import torch

from tilegrad.core.errors import AxisError, DTypeError, ShapeError, TraceError, UserError
from tilegrad.tensor import elementwise, matmul, movement, reduce  # noqa: F401
from tilegrad.tensor.control import cond, scan, while_loop
from tilegrad.tensor.custom import checkpoint, custom_jvp, custom_vjp
from tilegrad.tensor.jit import jit
from tilegrad.tensor.random import manual_seed, rand
from tilegrad.tensor.tensor import Tensor, no_grad
from tilegrad.tensor.transforms import (
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    value_and_grad,
    vjp,
    vmap,
)

RANDOM = np.random.RandomState(0)
X = RANDOM.randn(3)
M = RANDOM.randn(4, 3)


def cube(x):
    return (x * x * x).sum()


def smooth(x):
    return (x.tanh() * x).sum()


def close(ours, theirs) -> None:
    np.testing.assert_allclose(ours.numpy(), np.asarray(theirs), rtol=1e-9, atol=1e-12)


# ---- derivatives -----------------------------------------------------------------------------


def test_grad_and_value():
    value, found = value_and_grad(cube)(Tensor(X))
    close(value, (X**3).sum())
    close(found, 3 * X**2)
    close(grad(cube)(Tensor(X)), 3 * X**2)


def test_argnums_containers_and_aux():
    def f(params, x, scale):
        y = params["w"] * x + params["b"][0]
        return (y * y).sum() * scale, {"y": y, "n": 3}

    w, b, x = X, X + 1.0, X * 2.0
    params = {"w": Tensor(w), "b": (Tensor(b),)}
    found, aux = grad(f, argnums=(0, 2), has_aux=True)(params, Tensor(x), 2.0)
    y = w * x + b
    close(found[0]["w"], 4 * y * x)
    close(found[0]["b"][0], 4 * y)
    np.testing.assert_allclose(found[1].item(), (y * y).sum(), rtol=1e-6)
    close(aux["y"], y)
    assert aux["n"] == 3


def test_grad_of_an_object_with_tensors():
    class Layer:
        def __init__(self):
            self.w, self.b = Tensor(X), Tensor(X)

        def tensors(self):
            return {"w": self.w, "b": self.b, "n": Tensor([1])}

    layer = Layer()
    found = grad(lambda layer, x: (layer.w * x + layer.b * 2.0).sum())(layer, Tensor(M[0]))
    assert set(found) == {"w", "b"}
    close(found["w"], M[0])
    close(found["b"], np.full(3, 2.0))


def test_higher_orders_and_closure_over_the_argument():
    close(grad(lambda x: grad(cube)(x).sum())(Tensor(X)), 6 * X)
    third = grad(lambda x: grad(lambda y: grad(cube)(y).sum())(x).sum())
    close(third(Tensor(X)), np.full(3, 6.0))
    # d/dx [x * d/dy (x * y)] at y = x is d/dx [x * x]: the closure is not the argument
    outer = grad(lambda x: (x * grad(lambda y: (x * y).sum())(x)).sum())
    close(outer(Tensor(X)), 2 * X)


def test_vjp_and_jvp_agree():
    def f(a, b):
        return {"p": (a @ b).tanh(), "q": a * 2.0}

    a, b = Tensor(M), Tensor(RANDOM.randn(3, 2))
    ta, tb = Tensor(RANDOM.randn(4, 3)), Tensor(RANDOM.randn(3, 2))
    value, pull = vjp(f, a, b)
    same, moved = jvp(f, (a, b), (ta, tb))
    close(value["p"], np.tanh(a.numpy() @ b.numpy()))
    close(same["q"], 2 * M)
    cotangent = {"p": Tensor(RANDOM.randn(4, 2)), "q": Tensor(RANDOM.randn(4, 3))}
    ga, gb = pull(cotangent)
    left = sum((moved[k] * cotangent[k]).sum().item() for k in moved)
    right = (ga * ta).sum().item() + (gb * tb).sum().item()
    np.testing.assert_allclose(left, right, rtol=1e-10)


def test_jacobians_and_hessian_match_torch():
    def f(x):
        return (x * x).sum() * x.tanh()

    def g(x):
        return (x * x).sum() * x.tanh()

    theirs = torch.autograd.functional.jacobian(g, torch.tensor(X))
    close(jacrev(f)(Tensor(X)), theirs)
    close(jacfwd(f)(Tensor(X)), theirs)
    matrix = jacrev(lambda x, y: x @ y)(Tensor(M), Tensor(X))
    close(
        matrix, torch.autograd.functional.jacobian(lambda x: x @ torch.tensor(X), torch.tensor(M))
    )
    second = torch.autograd.functional.hessian(lambda x: g(x).sum(), torch.tensor(X))
    close(hessian(lambda x: f(x).sum())(Tensor(X)), second)
    close(jit(hessian(lambda x: f(x).sum()))(Tensor(X)), second)


def test_errors_of_grad():
    with pytest.raises(ShapeError, match=r"must return a scalar(.|\n)*float64\[3\](.|\n)*hint: r"):
        grad(lambda x: x)(Tensor(X))
    with pytest.raises(DTypeError, match=r"one Tensor(.|\n)*got: tuple(.|\n)*has_aux=True"):
        grad(lambda x: (x.sum(), 1))(Tensor(X))
    with pytest.raises(AxisError, match="there is no argument 2"):
        grad(cube, argnums=2)(Tensor(X))
    with pytest.raises(DTypeError, match=r"only floats have gradients(.|\n)*int64\[2\]"):
        grad(lambda x: (x * 1.0).sum())(Tensor([1, 2]))
    with pytest.raises(ShapeError, match="not arranged like"):
        vjp(cube, Tensor(X))[1]((Tensor(1.0), Tensor(1.0)))


def test_values_can_be_read_inside_grad():
    """Outside of jit, a Python branch on a value is fine."""

    def f(x):
        return cube(x) if x.sum().item() > -1e9 else x.sum()

    close(grad(f)(Tensor(X) * 1.0), 3 * X**2)
    with pytest.raises(TraceError, match="was read"):
        vmap(lambda x: x if x.item() > 0 else -x)(Tensor(X))


def test_grad_under_no_grad_and_history_of_the_result():
    with no_grad():
        close(grad(cube)(Tensor(X)), 3 * X**2)
    x = Tensor(X, requires_grad=True)
    grad(cube)(x).sum().backward()
    close(x.grad, 6 * X)
    close(grad(lambda y: (y * _stopped(y)).sum())(Tensor(X)), X)


def _stopped(y):
    with no_grad():
        return y * 1.0


# ---- batches ---------------------------------------------------------------------------------


def test_vmap_axes_and_containers():
    a, b = Tensor(M), Tensor(X)
    close(vmap(lambda r, v: (r * v).sum(), in_axes=(0, None))(a, b), M @ X)
    close(vmap(lambda c: c.sum(), in_axes=1)(a), M.sum(0))
    out = vmap(lambda d: {"s": d["r"] + d["k"], "c": Tensor(1.0)}, in_axes=({"r": 0, "k": None},))(
        {"r": a, "k": b}
    )
    close(out["s"], M + X)
    assert out["c"].shape == (4,)
    close(vmap(lambda r: r * 2.0, out_axes=1)(a), 2 * M.T)
    close(vmap(vmap(lambda x: x * x))(a), M * M)
    with pytest.raises(ShapeError, match=r"different sizes(.|\n)*\[4, 3\](.|\n)*hint: give in"):
        vmap(lambda r, v: r)(a, b)
    with pytest.raises(ShapeError, match="an axis for each argument"):
        vmap(lambda r: r, in_axes=(0, 1))(a)


def test_vmap_of_grad_is_grad_of_vmap():
    per_example = vmap(grad(smooth))(Tensor(M))
    whole = grad(lambda m: vmap(smooth)(m).sum())(Tensor(M))
    close(per_example, whole.numpy())
    t = torch.tensor(M, requires_grad=True)
    (t.tanh() * t).sum().backward()
    close(per_example, t.grad)


def test_vmap_draws_anew_for_each_example():
    manual_seed(0)
    drawn = vmap(lambda x: rand(5) + x * 0.0)(Tensor(np.zeros(3, np.float32))).numpy()
    assert len({tuple(r) for r in drawn.tolist()}) == 3


# ---- with jit --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "made",
    [
        lambda: jit(grad(smooth)),
        lambda: grad(jit(smooth)),
        lambda: jit(grad(jit(smooth))),
        lambda: lambda x: jvp(jit(smooth), (x,), (x * 0.0 + 1.0,))[1] * 0.0 + grad(smooth)(x),
    ],
)
def test_jit_and_grad_in_any_order(made):
    t = torch.tensor(X, requires_grad=True)
    (t.tanh() * t).sum().backward()
    f = made()
    close(f(Tensor(X)), t.grad)
    close(f(Tensor(X)), t.grad)


def test_jit_of_vmap_of_grad():
    f = jit(vmap(grad(lambda r, v: (r * v * r).sum()), in_axes=(0, None)))
    close(f(Tensor(M), Tensor(X)), 2 * M * X)
    assert f.traces == 1


# ---- control ---------------------------------------------------------------------------------


def test_scan():
    def body(carry, x):
        total, _ = carry
        return (total + x, x), {"running": total * 2.0}

    init = (Tensor(np.zeros(())), Tensor(np.zeros(())))
    (total, last), out = scan(body, init, Tensor(X))
    close(total, X.sum())
    close(last, X[-1])
    close(out["running"], 2 * np.concatenate([[0], np.cumsum(X)[:-1]]))
    (total, last), _ = jit(lambda x: scan(body, init, x, reverse=True))(Tensor(X))
    close(last, X[0])
    count, _ = scan(lambda c, _: (c + 1, None), Tensor(0), length=5)
    assert count.item() == 5


def test_grad_through_scan_with_captured_weights():
    w = Tensor(np.array(0.5), requires_grad=True)
    last, _ = scan(lambda c, x: ((c * w + x).tanh(), None), Tensor(np.zeros(())), Tensor(X))
    last.backward()
    tw = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    c = torch.zeros((), dtype=torch.float64)
    for x in X:
        c = (c * tw + x).tanh()
    c.backward()
    close(w.grad, tw.grad)


def test_random_differs_between_steps():
    manual_seed(1)
    _, drawn = scan(lambda c, _: (c, rand(4)), Tensor(0.0), length=3)
    assert len({tuple(r) for r in drawn.tolist()}) == 3
    manual_seed(1)
    _, again = jit(lambda: scan(lambda c, _: (c, rand(4)), Tensor(0.0), length=3))()
    np.testing.assert_array_equal(drawn.numpy(), again.numpy())


def test_array_literals_inside_a_body():
    table = np.array([1.0, 2.0, 3.0])
    _, out = scan(lambda c, x: (c, (Tensor(table) * x).sum()), Tensor(0.0), Tensor(X))
    close(out, 6 * X)


def test_errors_of_scan():
    with pytest.raises(ShapeError, match="carries change type"):
        scan(lambda c, x: (c.reshape(1) + x, None), Tensor(np.zeros(())), Tensor(X))
    with pytest.raises(ShapeError, match="the carries are arranged differently"):
        scan(lambda c, x: ((c, c), None), Tensor(0.0), Tensor(X))
    with pytest.raises(DTypeError, match=r"returns \(carry, y\)"):
        scan(lambda c, x: c, Tensor(0.0), Tensor(X))
    with pytest.raises(ShapeError, match="number of steps is not clear"):
        scan(lambda c, x: (c, None), Tensor(0.0))


def test_cond():
    @jit
    def f(x):
        return cond(x.sum() > 0.0, lambda a: {"y": a * 2.0}, lambda a: {"y": -a}, x)["y"]

    close(f(Tensor(np.abs(X))), 2 * np.abs(X))
    close(f(Tensor(-np.abs(X))), np.abs(X))
    assert f.traces == 1
    found = grad(lambda x: cond(x.sum() > 0.0, lambda: x * x, lambda: x).sum())(Tensor(np.abs(X)))
    close(found, 2 * np.abs(X))
    with pytest.raises(ShapeError, match="branches are arranged differently"):
        cond(Tensor(True), lambda: Tensor(1.0), lambda: (Tensor(1.0),))
    with pytest.raises(ShapeError, match=r"not a scalar(.|\n)*hint: use where"):
        cond(Tensor([True, False]), lambda: Tensor(1.0), lambda: Tensor(1.0))


def test_while_loop():
    f = jit(
        lambda n: while_loop(
            lambda c: c[0] < n, lambda c: (c[0] * 2, c[1] + 1), (Tensor(1), Tensor(0))
        )
    )
    assert [t.item() for t in f(100)] == [128, 7]
    assert [t.item() for t in f(5)] == [8, 3]
    assert f.traces == 1
    with pytest.raises(UserError, match="no reverse derivative"):
        grad(lambda x: while_loop(lambda c: c.sum() < 9.0, lambda c: c * 2.0, x).sum())(Tensor(X))


# ---- custom derivatives, checkpoint ----------------------------------------------------------


def test_custom_vjp():
    @custom_vjp
    def clip(x, bound):
        return x.tanh()

    def forward(x, bound):
        return clip(x, bound), (x, bound)

    clip.defvjp(forward, lambda kept, g: (g * kept[0] * 10.0, None))
    found = grad(lambda x: clip(x, 1.0).sum())
    close(clip(Tensor(X), 1.0), np.tanh(X))
    close(found(Tensor(X)), 10 * X)
    close(jit(found)(Tensor(X)), 10 * X)
    close(vmap(grad(lambda x: clip(x, 1.0).sum()))(Tensor(M)), 10 * M)
    close(grad(lambda m: vmap(lambda x: clip(x, 1.0).sum())(m).sum())(Tensor(M)), 10 * M)
    x = Tensor(X, requires_grad=True)
    clip(x, 1.0).sum().backward()
    close(x.grad, 10 * X)
    with pytest.raises(UserError, match="only a custom reverse derivative"):
        jvp(lambda x: clip(x, 1.0), (Tensor(X),), (Tensor(X),))
    with pytest.raises(UserError, match="no derivative was given"):
        custom_vjp(lambda x: x)(Tensor(X))


def test_custom_vjp_checks_the_cotangent():
    @custom_vjp
    def f(x):
        return x

    f.defvjp(lambda x: (x, None), lambda _, g: (g.sum(),))
    with pytest.raises(ShapeError, match=r"another shape(.|\n)*float64\[3\](.|\n)*float64\[\]"):
        grad(lambda x: f(x).sum())(Tensor(X))


def test_custom_jvp_serves_both_directions():
    @custom_jvp
    def f(x, y):
        return x * y

    f.defjvp(lambda p, t: (f(*p), p[1] * t[0] * 3.0 + t[1]))
    x, y = Tensor(X), Tensor(X + 1.0)
    close(jvp(f, (x, y), (x, x))[1], (X + 1) * X * 3 + X)
    gx, gy = grad(lambda a, b: f(a, b).sum(), argnums=(0, 1))(x, y)
    close(gx, 3 * (X + 1))
    close(gy, np.ones(3))
    close(vmap(grad(lambda a: f(a, a)))(x), 3 * X + 1)


def test_checkpoint():
    w = Tensor(X, requires_grad=True)

    def block(x, scale=1.0):
        return (x * w).tanh() * scale

    def loss(x, run):
        return (run(run(x)) * 2.0).sum()

    plain = Tensor(M, requires_grad=True)
    loss(plain, block).backward()
    expected, expected_w = plain.grad.numpy(), w.grad.numpy()
    w.grad = None
    again = Tensor(M, requires_grad=True)
    value = loss(again, lambda x: checkpoint(block, x))
    close(value, loss(plain, block).numpy())
    value.backward()
    close(again.grad, expected)
    close(w.grad, expected_w)
    close(grad(lambda x: loss(x, checkpoint(block)))(Tensor(M)), expected)
    close(jit(grad(lambda x: loss(x, checkpoint(block))))(Tensor(M)), expected)
    close(jvp(checkpoint(cube), (Tensor(X),), (Tensor(X),))[1], 3 * (X**3).sum())
    twice = Tensor(X, requires_grad=True)
    checkpoint(lambda a, b: (a * a * b).sum(), twice, twice).backward()
    close(twice.grad, 3 * X**2)
    close(hessian(checkpoint(cube))(Tensor(X)), np.diag(6 * X))


def test_checkpoint_recomputes_behind_a_barrier():
    found = jit(grad(lambda x: checkpoint(lambda y: y.tanh().tanh(), x).sum()))
    from tilegrad.ir.node import topological

    ops_ = [n.op.name for n in topological(found.lower(Tensor(X)).outputs)]
    assert "barrier" in ops_
    assert ops_.count("tanh") >= 2

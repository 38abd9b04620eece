"""Derivatives: backward, grad, vjp, jvp, vmap, and derivatives of derivatives."""

import tilegrad as tg

# As methods, with gradients collected on leaves.
w = tg.tensor([1.0, 2.0, 3.0], requires_grad=True)
loss = ((w * w).sum() - 1.0) ** 2
loss.backward()
print("backward:", w.grad.tolist())


# As functions of functions.
def energy(position):
    return 0.5 * (position**2).sum() + tg.cos(position).sum()


point = tg.tensor([0.1, 0.2, 0.3])
print("grad:    ", tg.grad(energy)(point).tolist())
value, gradient = tg.value_and_grad(energy)(point)
print("value:   ", value.item())

# Forward mode: the derivative along one direction.
value, slope = tg.jvp(energy, (point,), (tg.ones(3),))
print("jvp:     ", slope.item())

# Reverse mode: pull a cotangent back.
value, pull = tg.vjp(tg.sin, point)
print("vjp:     ", pull(tg.ones(3))[0].tolist())

# Higher orders compose.
cube = tg.grad(tg.grad(tg.grad(lambda x: x**4)))
print("third:   ", cube(tg.tensor(2.0)).item())
print("hessian: ", tg.hessian(energy)(point).tolist())

# A gradient for each example of a batch, without a loop.
batch = tg.tensor([[1.0, 2.0, 3.0], [0.0, 0.5, 1.0]])
print("vmap:    ", tg.vmap(tg.grad(energy))(batch).tolist())

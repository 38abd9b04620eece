"""Derivatives of one's own (custom_vjp, custom_jvp) and recomputation (checkpoint)."""

import tilegrad as tg


# A straight-through estimator: round forwards, pass the gradient unchanged backwards.
@tg.custom_vjp
def quantize(x):
    return (x * 8).round() / 8


quantize.defvjp(lambda x: (quantize.function(x), None), lambda residuals, given: (given,))
x = tg.tensor([0.1, 0.26, 0.9])
print("values:  ", quantize(x).tolist())
print("gradient:", tg.grad(lambda v: (quantize(v) ** 2).sum())(x).tolist())


# A stable derivative of log(1 + exp(x)), which a plain formula gets wrong for large x.
@tg.custom_jvp
def softplus(x):
    return tg.log(1 + tg.exp(x))


@softplus.defjvp
def softplus_rule(primals, tangents):
    (x,), (direction,) = primals, tangents
    return softplus(x), tg.sigmoid(x) * direction


print("at 0, 30:", tg.vmap(tg.grad(softplus))(tg.tensor([0.0, 30.0])).tolist())


# Clip the gradient that flows through a value, with the limit kept for backward.
@tg.custom_vjp
def clip_gradient(x, limit):
    return x * 1.0


def forward(x, limit):
    return x * 1.0, limit


def backward(limit, given):
    return tg.minimum(tg.maximum(given, -limit), limit), None


clip_gradient.defvjp(forward, backward)
limit = tg.tensor(0.5)
print("clipped: ", tg.grad(lambda v: (clip_gradient(v, limit) * 10).sum())(x).tolist())


# checkpoint keeps only the inputs of a part of the function; backward computes it again.
def deep(x, weights, wrap):
    for weight in weights:
        x = wrap(lambda h, w: tg.tanh(h @ w), x, weight)
    return x.sum()


weights = [tg.randn(16, 16) * 0.2 for _ in range(4)]
rows = tg.randn(8, 16)
plain = tg.grad(lambda v: deep(v, weights, lambda f, *a: f(*a)))(rows)
again = tg.grad(lambda v: deep(v, weights, tg.checkpoint))(rows)
print("checkpoint agrees:", tg.allclose(plain, again, atol=1e-6))

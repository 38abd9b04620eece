"""Train a small network on two spirals: functional parameters, one jitted step with momentum."""

from itertools import pairwise

import numpy as np

import tilegrad as tg


def spirals(count):
    """Points of two spirals and which of the two each belongs to."""
    random = np.random.default_rng(0)
    turn = np.sqrt(random.random(count)) * 3 * np.pi
    label = random.integers(0, 2, count)
    sign = 2 * label - 1
    points = np.stack([sign * turn * np.cos(turn), sign * turn * np.sin(turn)], 1) / 10
    points += 0.02 * random.standard_normal(points.shape)
    return points.astype(np.float32), label


def make_parameters(sizes):
    """Weights and biases of each layer."""
    return [
        {"weight": tg.randn(a, b) * (2 / a) ** 0.5, "bias": tg.zeros(b)} for a, b in pairwise(sizes)
    ]


def predict(parameters, x):
    """Logits, (batch, 2)."""
    for layer in parameters[:-1]:
        x = (x @ layer["weight"] + layer["bias"]).relu()
    return x @ parameters[-1]["weight"] + parameters[-1]["bias"]


def loss_of(parameters, x, y):
    """Mean cross-entropy."""
    scores = predict(parameters, x).log_softmax(-1)
    return -scores.gather(1, y.unsqueeze(1)).mean()


@tg.jit
def train_step(parameters, speed, x, y, rate):
    """One step of gradient descent with momentum."""
    loss, gradients = tg.value_and_grad(loss_of)(parameters, x, y)
    new_parameters, new_speed = [], []
    for layer, moving, slope in zip(parameters, speed, gradients):
        faster = {name: 0.9 * moving[name] + slope[name] for name in layer}
        new_speed.append(faster)
        new_parameters.append({name: layer[name] - rate * faster[name] for name in layer})
    return new_parameters, new_speed, loss


tg.manual_seed(0)
points, labels = spirals(1024)
x, y = tg.tensor(points), tg.tensor(labels)
parameters = make_parameters([2, 64, 64, 2])
speed = [{name: tg.zeros(*t.shape) for name, t in layer.items()} for layer in parameters]
for step in range(600):
    parameters, speed, loss = train_step(parameters, speed, x, y, 0.05)
    if step % 100 == 0:
        print(f"step {step:4d}  loss {loss.item():.4f}")
accuracy = (predict(parameters, x).argmax(-1) == y).to(tg.float32).mean().item()
print(f"accuracy {accuracy:.3f}")
assert accuracy > 0.9

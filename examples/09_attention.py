"""Attention: written plainly, found by the compiler, run as one kernel.

python examples/09_attention.py
"""

import math

import tilegrad as tg


def plain(q, k, v):
    """Causal attention as one would write it on paper."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    tokens = tg.arange(q.shape[-2])
    seen = tokens.unsqueeze(0) <= tokens.unsqueeze(1)
    return tg.softmax(tg.where(seen, scores, -math.inf), -1) @ v


tg.manual_seed(0)
q, k, v = (tg.randn(1, 4, 256, 32) for _ in range(3))

shown = tg.explain(plain, q, k, v)
print("one attention op:", shown.final_graph.count("attention("))
print("scores in memory:", "256,256" in shown.schedule)

# The same, asked for by name; keys and values may have fewer heads than queries.
named = tg.attention(q, k, v, causal=True)
print("same values:", tg.allclose(plain(q, k, v), named, atol=1e-5))
few = tg.attention(q, k[:, :2], v[:, :2], causal=True, window=64, softcap=30.0)
print("two key heads for four:", tuple(few.shape))


def loss(q, k, v):
    return (plain(q, k, v) ** 2).sum()


# The derivative is attention's own: no probabilities are kept for it.
step = tg.jit(tg.value_and_grad(loss, (0, 1, 2)))
value, gradients = step(q, k, v)
print("loss:", round(value.item(), 2), "gradients:", [tuple(g.shape) for g in gradients])


# What the compiler could not find, it says: here probabilities are wanted themselves.
def weights_too(q, k, v):
    weights = tg.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1)
    return weights @ v, weights


for line in str(tg.explain(weights_too, q, k, v)).splitlines():
    if "not attention" in line:
        print(line.split("not attention: ")[-1])

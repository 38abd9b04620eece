"""jit: a whole function compiled once for each signature; what changes only binds buffers."""

import time

import tilegrad as tg


def attention(q, k, v, scale):
    weights = ((q @ k.transpose(-1, -2)) * scale).softmax(-1)
    return weights @ v


fast = tg.jit(attention)
q, k, v = (tg.randn(4, 128, 32).realize() for _ in range(3))

start = time.perf_counter()
fast(q, k, v, 0.1)
first = time.perf_counter() - start
start = time.perf_counter()
for step in range(100):
    scale = 0.1 + step / 1000  # a Python number is an input: it traces nothing anew
    out = fast(q, k, v, scale)
later = (time.perf_counter() - start) / 100
print(f"first call {1e3 * first:.1f} ms, later {1e6 * later:.0f} us, traces: {fast.traces}")
same = tg.allclose(out, attention(q, k, v, scale), atol=1e-5)  # up to rounding
print("same as plain:", same)
assert same


# Symbolic sizes: one compile serves every length within the bounds.
@tg.jit(dynamic={"x": {0: ("N", 1, 64)}})
def normalize(x):
    return x / x.norm(dim=-1, keepdim=True)


for rows in (3, 17, 64):
    normalize(tg.ones(rows, 8))
print("three lengths, traces:", normalize.traces)


# A donated argument gives its buffer away: the result takes its place.
@tg.jit(donate=("state",))
def advance(state, change):
    return state * 0.9 + change


state = tg.zeros(1000)
for _ in range(10):
    state = advance(state, tg.ones(1000))
print("state:", round(state[0].item(), 4))


# What cannot be traced is refused at your line, never run slowly in secret.
@tg.jit
def branch(x):
    return x if x.sum() > 0 else -x


try:
    branch(tg.ones(3))
except tg.TraceError as error:
    print(error)

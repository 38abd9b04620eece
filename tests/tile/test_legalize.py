"""Large tiles cut up for few registers: random kernels against themselves uncut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilegrad as tg
from tilegrad import kernel, tile
from tilegrad.core.target import AVX512, AVX512_AMX, H100, SSE2
from tilegrad.tile.check import verify_body, walk
from tilegrad.tile.interpret import run
from tilegrad.tile.legalize import legalize, limit_of
from tilegrad.tile.pieces import large

OPS = (
    "add",
    "multiply",
    "maximum",
    "rows",
    "columns",
    "turn",
    "dot",
    "scan",
    "scan_rows",
    "where",
    "loop",
    "branch",
    "narrow",
    "reshape",
    "carry",
    "swap",
)


@tile.function
def apply(name, a, b, i):
    """One step of a random kernel on square tiles a and b."""
    size = a.shape[0]
    if name == "add":
        a = a + b * 0.5
    elif name == "multiply":
        a = a * tile.tanh(b)
    elif name == "maximum":
        a = tile.maximum(a, b - 0.25)
    elif name == "rows":
        a = a - tile.max(a, 1)[:, None] * 0.1
    elif name == "columns":
        a = a + tile.sum(b, 0) / size
    elif name == "turn":
        a = tile.transpose(b) - a
    elif name == "dot":
        a = tile.dot(a, b) / size
    elif name == "scan":
        a = tile.cumsum(a, 0) / size
    elif name == "scan_rows":
        a = tile.cummax(a, 1)
    elif name == "where":
        a = tile.where(tile.arange(size)[:, None] >= tile.arange(size), a, -b)
    elif name == "loop":
        for j in tile.range(3):
            a = a * 0.5 + b * (j + 1)
    elif name == "branch":
        if tile.sum(a) > 0:
            a = a + 1.0
        else:
            b = b - 1.0
    elif name == "narrow":
        a = tile.cast(tile.cast(a, tile.f16), tile.f32)
    elif name == "reshape":
        a = tile.reshape(tile.reshape(a, (size * size,)) + 1.0, (size, size))
    elif name == "carry":
        total = tile.zeros((size,))
        for j in tile.range(2):
            total = total + tile.sum(a + j, 1)
            b = tile.transpose(b)
        a = a + total[:, None] / size
    else:
        for j in tile.range(i + 2):
            a, b = b, a + j * 0.1
    return a, b


@kernel
def random_kernel(x, y, *, steps, size):
    i = tile.grid(2)
    a, b = tile.load(x, (i, 0, 0), (size, size)), tile.load(y, (i, 0, 0), (size, size))
    for name in steps:
        a, b = apply(name, a, b, i)
    out, other = tile.result(x.shape), tile.result(x.shape)
    tile.store(out, (i, 0, 0), a)
    tile.store(other, (i, 0, 0), b)


@settings(max_examples=14, deadline=None, derandomize=True)
@given(
    steps=st.lists(st.sampled_from(OPS), min_size=1, max_size=6),
    whole=st.booleans(),
    size=st.sampled_from([8, 16, 20]),
)
def test_random_kernels(steps, whole, size):
    if not whole and {"dot", "turn", "carry", "reshape"} & set(steps):
        whole = True  # squares with an edge on one axis only fit in some orders
    random = np.random.default_rng(size)
    rows = size if whole else size - 3
    x, y = (random.standard_normal((2, rows, size)).astype(np.float32) for _ in "xy")
    (body,) = random_kernel.lower(tg.tensor(x), tg.tensor(y), steps=tuple(steps), size=size)
    expected = [np.zeros_like(x), np.zeros_like(x)]
    run(body, [x, y, *expected])
    for target in (SSE2, AVX512):
        new = legalize(body, target)
        verify_body(new, "portable", target)
        registers = 4 * limit_of(target)  # a dot's sums may take most of them
        assert not any(large(n.type, registers) for n, _ in walk(new.block))
        found = [np.zeros_like(x), np.zeros_like(x)]
        run(new, [x, y, *found])
        for got, wanted in zip(found, expected):
            np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-3, err_msg=target.name)


@pytest.mark.parametrize("steps", [OPS[:8], OPS[8:], ("dot", "turn", "dot", "swap", "carry")])
def test_compiled(steps):
    random = np.random.default_rng(1)
    x, y = (tg.tensor(random.standard_normal((2, 32, 32)).astype(np.float32)) for _ in "xy")
    expected = random_kernel.interpret(x, y, steps=steps, size=32)
    for got, wanted in zip(random_kernel(x, y, steps=steps, size=32), expected):
        np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-3, atol=1e-3)


def test_a_machine_of_many_threads_keeps_its_tiles():
    x = tg.tensor(np.zeros((2, 32, 32), np.float32))
    (body,) = random_kernel.lower(x, x, steps=("dot",), size=32)
    assert legalize(body, H100) is body
    assert legalize(body, AVX512_AMX) is not body

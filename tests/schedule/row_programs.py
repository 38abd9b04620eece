"""Random programs over rows: what a row becomes depends on that row alone.

Products, norms, softmax, gates, attention over given keys, in chains that also read earlier values.
Invariant: a program depends only on its seed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import tilegrad as tg
from tilegrad.nn.functional import gelu, layer_norm, silu

WIDTHS = (17, 32, 64, 100, 576, 600)
KEYS = 300


class RowProgram:
    """A chain of row-wise functions with weights of its own."""

    def __init__(
        self, seed: int, dtype: Any = tg.float32, widths: tuple[int, ...] = WIDTHS
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.dtype, self.widths = dtype, widths
        self.width = int(self.rng.choice(widths))
        self.steps: list[Callable[[Any, list[Any]], Any]] = []
        self.names: list[str] = []
        width = self.width
        kinds = list(KINDS)
        for _ in range(5):
            name = str(self.rng.choice(kinds))
            step, width = KINDS[name](self, width)
            self.steps.append(step)
            self.names.append(f"{name} {width}")

    def drawn(self, *shape: int, scale: float | None = None) -> Any:
        """Random weights."""
        by = shape[-1] ** -0.5 if scale is None else scale
        values = (self.rng.standard_normal(shape) * by).astype(np.float32)
        return tg.tensor(values).to(self.dtype)

    def rows(self, count: int) -> Any:
        """The first rows of many."""
        random = np.random.default_rng(99)
        return random.standard_normal((128, self.width)).astype(np.float32)[:count]

    def __call__(self, x: Any) -> Any:
        values = [x]
        for step in self.steps:
            values.append(step(values[-1], values))
        return values[-1]


Step = tuple[Callable[[Any, list[Any]], Any], int]


def _linear(p: RowProgram, width: int) -> Step:
    to = int(p.rng.choice(p.widths))
    turned = bool(p.rng.integers(2))
    weight = p.drawn(to, width) if turned else p.drawn(width, to, scale=width**-0.5)
    bias = p.drawn(to, scale=1.0)

    def run(x: Any, _: list[Any]) -> Any:
        return (x @ weight.transpose(0, 1) if turned else x @ weight) + bias

    return run, to


def _gated(p: RowProgram, width: int) -> Step:
    gate, up = p.drawn(64, width), p.drawn(64, width)
    down = p.drawn(width, 64)

    def run(x: Any, _: list[Any]) -> Any:
        inner = silu(x @ gate.transpose(0, 1)) * (x @ up.transpose(0, 1))
        return x + inner @ down.transpose(0, 1)

    return run, width


def _norm(p: RowProgram, width: int) -> Step:
    weight = p.drawn(width, scale=1.0)
    return lambda x, _: tg.rms_norm(x, (width,), weight, 1e-5), width


def _layer_norm(p: RowProgram, width: int) -> Step:
    weight, bias = p.drawn(width, scale=1.0), p.drawn(width, scale=1.0)
    return lambda x, _: layer_norm(x, (width,), weight, bias), width


def _softmax(p: RowProgram, width: int) -> Step:
    return lambda x, _: tg.softmax(x, -1) * 8.0, width


def _curve(p: RowProgram, width: int) -> Step:
    divisor = p.drawn(width, scale=1.0).exp()
    return lambda x, _: gelu(x) + tg.tanh(x).exp() / divisor, width


def _earlier(p: RowProgram, width: int) -> Step:
    def run(x: Any, values: list[Any]) -> Any:
        same = [v for v in values[:-1] if v.shape[-1] == width]
        return x + same[0] * 0.5 if same else x * x

    return run, width


def _attention(p: RowProgram, width: int) -> Step:
    """Heads of 16 over given keys; every row is a query."""
    heads, size = 4, 16
    into, out = p.drawn(heads * size, width), p.drawn(width, heads * size)
    keys, values = (p.drawn(1, 2, KEYS, size, scale=1.0) for _ in range(2))

    def run(x: Any, _: list[Any]) -> Any:
        q = (x @ into.transpose(0, 1)).reshape(1, -1, heads, size).transpose(1, 2)
        found = tg.attention(q, keys, values)  # (1, heads, rows, size)
        return x + found.transpose(1, 2).reshape(-1, heads * size) @ out.transpose(0, 1)

    return run, width


def _spelled(p: RowProgram, width: int) -> Step:
    """Attention of one head in small ops."""
    keys, values = p.drawn(KEYS, width, scale=1.0), p.drawn(KEYS, width, scale=1.0)

    def run(x: Any, _: list[Any]) -> Any:
        scores = tg.softmax((x @ keys.transpose(0, 1)) * width**-0.5, -1)
        return x + scores @ values

    return run, width


def _score(p: RowProgram, width: int) -> Step:
    """One number a row, given back to all of its elements."""
    weight = p.drawn(width, scale=1.0)
    return lambda x, _: x * tg.sigmoid((x * weight).sum(-1, keepdim=True)), width


KINDS: dict[str, Callable[[RowProgram, int], Step]] = {
    "linear": _linear,
    "gated": _gated,
    "norm": _norm,
    "layer_norm": _layer_norm,
    "softmax": _softmax,
    "curve": _curve,
    "earlier": _earlier,
    "attention": _attention,
    "spelled": _spelled,
    "score": _score,
}

"""Initial values of Parameters, with PyTorch's names and formulas.

Invariant: a function `name_` gives the Tensor a new value and returns it; the value is drawn
from our own Generator when it is first needed, so a Parameter that is loaded right after costs
nothing, and `manual_seed` makes it the same bits again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from ..core.errors import ShapeError, UserError
from ..graph import build
from ..tensor.creation import eye, full
from ..tensor.random import Generator, normal, truncated_normal, uniform
from ..tensor.tensor import Tensor, from_array, no_grad, own_node, wrap

GAINS = {"tanh": 5.0 / 3.0, "relu": math.sqrt(2.0), "selu": 0.75}
PLAIN = (
    "linear",
    "sigmoid",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
)


_skips: ContextVar[bool] = ContextVar("skips", default=False)


@contextmanager
def skipped() -> Iterator[None]:
    """Within the block nothing is drawn: for a model that gets all its weights right after."""
    token = _skips.set(True)
    try:
        yield
    finally:
        _skips.reset(token)


def _set(tensor: Tensor, value: Tensor) -> Tensor:
    """Give a Tensor a value that is computed once, when it is first needed."""
    with no_grad():
        return tensor.assign(wrap(own_node(value.node)))


def calculate_gain(nonlinearity: str, param: float | None = None) -> float:
    """The factor that keeps the variance through a nonlinearity."""
    if nonlinearity in PLAIN:
        return 1.0
    if nonlinearity == "leaky_relu":
        return math.sqrt(2.0 / (1.0 + (0.01 if param is None else param) ** 2))
    if nonlinearity not in GAINS:
        raise UserError(
            "unknown nonlinearity",
            op="calculate_gain",
            got=repr(nonlinearity),
            expected=", ".join((*PLAIN, *GAINS, "leaky_relu")),
        )
    return GAINS[nonlinearity]


def fans(tensor: Tensor) -> tuple[int, int]:
    """How many inputs and outputs one element of a weight connects."""
    if tensor.ndim < 2:
        raise ShapeError(
            "needs at least 2 axes",
            op="init",
            expected="(out, in, ...)",
            got=build.show(tensor.shape),
        )
    window = math.prod(tensor.shape[2:])
    return tensor.shape[1] * window, tensor.shape[0] * window


def _fan(tensor: Tensor, mode: str) -> int:
    if mode not in ("fan_in", "fan_out"):
        raise UserError("unknown mode", op="init", expected="'fan_in' or 'fan_out'", got=repr(mode))
    return fans(tensor)[0 if mode == "fan_in" else 1]


def uniform_(
    tensor: Tensor, a: float = 0.0, b: float = 1.0, generator: Generator | None = None
) -> Tensor:
    """Uniform in [a, b)."""
    if _skips.get():
        return tensor
    return _set(tensor, uniform(a, b, tensor.shape, tensor.dtype, generator))


def normal_(
    tensor: Tensor, mean: float = 0.0, std: float = 1.0, generator: Generator | None = None
) -> Tensor:
    """Normal."""
    if _skips.get():
        return tensor
    return _set(tensor, normal(mean, std, tensor.shape, tensor.dtype, generator))


def trunc_normal_(
    tensor: Tensor,
    mean: float = 0.0,
    std: float = 1.0,
    a: float = -2.0,
    b: float = 2.0,
    generator: Generator | None = None,
) -> Tensor:
    """Normal, cut to [a, b]."""
    if _skips.get():
        return tensor
    drawn = truncated_normal(mean, std, a, b, tensor.shape, tensor.dtype, generator)
    return _set(tensor, drawn)


def constant_(tensor: Tensor, val: float) -> Tensor:
    """One value everywhere."""
    return _set(tensor, full(tensor.shape, val, dtype=tensor.dtype))


def ones_(tensor: Tensor) -> Tensor:
    """Ones."""
    return constant_(tensor, 1.0)


def zeros_(tensor: Tensor) -> Tensor:
    """Zeros."""
    return constant_(tensor, 0.0)


def eye_(tensor: Tensor) -> Tensor:
    """Ones on the diagonal of a matrix."""
    if tensor.ndim != 2:
        raise ShapeError(
            "needs a matrix", op="eye_", expected="2 axes", got=build.show(tensor.shape)
        )
    return _set(tensor, eye(*tensor.shape, dtype=tensor.dtype))


def xavier_uniform_(
    tensor: Tensor, gain: float = 1.0, generator: Generator | None = None
) -> Tensor:
    """Uniform with variance 2 / (fan_in + fan_out)."""
    bound = gain * math.sqrt(6.0 / sum(fans(tensor)))
    return uniform_(tensor, -bound, bound, generator)


def xavier_normal_(tensor: Tensor, gain: float = 1.0, generator: Generator | None = None) -> Tensor:
    """Normal with variance 2 / (fan_in + fan_out)."""
    return normal_(tensor, 0.0, gain * math.sqrt(2.0 / sum(fans(tensor))), generator)


def kaiming_uniform_(
    tensor: Tensor,
    a: float = 0.0,
    mode: str = "fan_in",
    nonlinearity: str = "leaky_relu",
    generator: Generator | None = None,
) -> Tensor:
    """Uniform with variance gain ** 2 / fan."""
    if 0 in tensor.shape:
        return tensor
    bound = calculate_gain(nonlinearity, a) * math.sqrt(3.0 / _fan(tensor, mode))
    return uniform_(tensor, -bound, bound, generator)


def kaiming_normal_(
    tensor: Tensor,
    a: float = 0.0,
    mode: str = "fan_in",
    nonlinearity: str = "leaky_relu",
    generator: Generator | None = None,
) -> Tensor:
    """Normal with variance gain ** 2 / fan."""
    if 0 in tensor.shape:
        return tensor
    std = calculate_gain(nonlinearity, a) / math.sqrt(_fan(tensor, mode))
    return normal_(tensor, 0.0, std, generator)


def orthogonal_(tensor: Tensor, gain: float = 1.0, generator: Generator | None = None) -> Tensor:
    """Orthonormal rows or columns, whichever are fewer (computed now, by NumPy)."""
    if tensor.ndim < 2:
        raise ShapeError(
            "needs at least 2 axes",
            op="orthogonal_",
            expected="(rows, ...)",
            got=build.show(tensor.shape),
        )
    rows = int(tensor.shape[0])
    drawn = normal(0.0, 1.0, (rows, tensor.numel() // rows), "float32", generator).numpy()
    wide = drawn.shape[0] < drawn.shape[1]
    found, triangle = np.linalg.qr(drawn.T if wide else drawn)
    found = found * np.sign(np.diag(triangle))
    value: Any = gain * (found.T if wide else found).reshape([int(s) for s in tensor.shape])
    with no_grad():
        return tensor.assign(wrap(from_array(value.astype(np.float32))))


__all__ = [
    "calculate_gain",
    "constant_",
    "eye_",
    "fans",
    "kaiming_normal_",
    "kaiming_uniform_",
    "normal_",
    "ones_",
    "orthogonal_",
    "trunc_normal_",
    "uniform_",
    "xavier_normal_",
    "xavier_uniform_",
    "zeros_",
]

"""Fourier transforms, by PyTorch's names, of complex numbers that are pairs.

There is no complex dtype: a complex array is a Tensor with a last axis of 2, the real and the
imaginary parts, as `torch.view_as_real` gives it. `dim` counts the axes without that one. A
transform is a few products with small matrices: sizes are split into factors of at most 64
(Cooley and Tukey); a large prime factor becomes a convolution of a power of two (Bluestein).

Invariant: every function is plain Tensor code, so it runs anywhere and has all derivatives; factors
are computed in float64 and rounded once to the dtype of the data.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core import dtype as dtypes
from ..core.dtype import DType, dtype_of
from ..core.errors import DTypeError, ShapeError, UserError
from ..graph import build
from ..ir.whole import whole, wholes
from .creation import arange
from .elementwise import where
from .maths import cast
from .matmul import matmul
from .movement import cat, flip, movedim, roll, stack
from .padding import pad
from .tensor import Tensor, lift

LARGEST = 64  # factor of a size that is one matrix
PRIME = 128  # largest prime that is one matrix
NORMS = ("backward", "ortho", "forward")
Dims = int | Sequence[int] | None


# ---- pairs ----------------------------------------------------------------------------------


def _floats(op: str, x: Any) -> Tensor:
    tensor = lift(x)
    if not tensor.dtype.is_float:
        return cast(tensor, dtypes.float32)
    if tensor.dtype.bits < 32:
        raise DTypeError(
            "the dtype does not fit",
            op=f"fft.{op}",
            expected="float32 or float64",
            got=tensor.dtype,
            hint="cast it first: x.to(tilegrad.float32)",
        )
    return tensor


def _paired(op: str, x: Any) -> Tensor:
    tensor = _floats(op, x)
    if tensor.ndim < 2 or tensor.shape[-1] != 2:
        raise ShapeError(
            "needs complex numbers as pairs",
            op=f"fft.{op}",
            expected="a last axis of 2: real and imaginary parts",
            got=build.show(tensor.shape),
            hint="fft.pairs(real, imaginary) makes them; rfft takes reals",
        )
    return tensor


def _real(op: str, x: Any) -> Tensor:
    tensor = _floats(op, x)
    if not tensor.ndim:
        raise ShapeError("needs an axis", op=f"fft.{op}", got="()")
    return tensor


def pairs(real: Any, imaginary: Any = None) -> Tensor:
    """Complex numbers as pairs: a last axis of 2 with real and imaginary parts."""
    first = _floats("pairs", real)
    second = first * 0.0 if imaginary is None else _floats("pairs", imaginary)
    return stack([first, second], -1)


def _constant(values: np.ndarray[Any, Any], dtype: DType) -> Tensor:
    """Complex constants as pairs."""
    return lift(np.stack([values.real, values.imag], -1).astype(dtype.numpy))


def _times(x: Tensor, factor: Tensor) -> Tensor:
    """Pairs times pairs, element by element."""
    c, s, re, im = factor[..., 0], factor[..., 1], x[..., 0], x[..., 1]
    return stack([re * c - im * s, re * s + im * c], -1)


# ---- one axis -------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def roots(rows: int, columns: int, size: int, sign: int) -> np.ndarray[Any, Any]:
    """exp(sign 2 pi i j k / size), complex, exact to float64."""
    phases = np.outer(np.arange(rows), np.arange(columns)) % size / size
    return np.exp(2j * np.pi * sign * phases)


@functools.lru_cache(maxsize=64)
def matrix(size: int, sign: int, real: bool, dtype: DType) -> np.ndarray[Any, Any]:
    """What a row of pairs (or of reals) is multiplied by: (2 size, 2 size) or (size, 2 size)."""
    root = roots(size, size, size, sign)
    first = np.stack([root.real, root.imag], -1).reshape(size, 2 * size)
    if real:
        return first.astype(dtype.numpy)
    second = np.stack([-root.imag, root.real], -1).reshape(size, 2 * size)
    return np.stack([first, second], 1).reshape(2 * size, 2 * size).astype(dtype.numpy)


def _factor(size: int) -> int:
    """The largest factor that is one matrix, or the smallest prime above that."""
    if size <= LARGEST:
        return size
    found = [d for d in range(2, LARGEST + 1) if size % d == 0]
    if found:
        return found[-1]
    return next((d for d in range(LARGEST, math.isqrt(size) + 1) if size % d == 0), size)


def transform(x: Tensor, sign: int, real: bool = False) -> Tensor:
    """The sums of x[j] exp(sign 2 pi i j k / n): x (..., n, 2), or (..., n) if real."""
    lead, size = x.shape[: -1 if real else -2], x.shape[-1 if real else -2]
    first = _factor(size)
    if first == size:
        if size > PRIME:
            return _chirped(pairs(x) if real else x, sign)
        flat = x if real else x.reshape(*lead, 2 * size)
        found = matmul(flat, lift(matrix(size, sign, real, x.dtype)))
        return found.reshape(*lead, size, 2)
    second: int = size // first
    axis = len(lead)
    rest = () if real else (2,)
    columns = movedim(x.reshape(*lead, first, second, *rest), axis, axis + 1)
    found = transform(columns, sign, real)  # (..., second, first, 2)
    found = _times(found, _constant(roots(second, first, size, sign), x.dtype))
    found = transform(movedim(found, axis, axis + 1), sign)  # (..., first, second, 2)
    return movedim(found, axis, axis + 1).reshape(*lead, size, 2)


def _chirped(x: Tensor, sign: int) -> Tensor:
    """A transform of prime size as a convolution: j k = (j^2 + k^2 - (k - j)^2) / 2."""
    size = x.shape[-2]
    long = 1 << (2 * size - 1).bit_length()
    phases = np.arange(size) ** 2 % (2 * size) / (2 * size)
    chirp = np.exp(2j * np.pi * sign * phases)
    kernel = np.zeros(long, complex)
    kernel[:size] = chirp.conj()
    kernel[long - size + 1 :] = chirp.conj()[:0:-1]
    spectrum = transform(_constant(kernel / long, x.dtype), -1)
    chirped = _constant(chirp, x.dtype)
    moved = pad(_times(x, chirped), (0, 0, 0, long - size))
    found = transform(_times(transform(moved, -1), spectrum), 1)
    return _times(found[..., :size, :], chirped)


def _fitted(x: Tensor, size: int | None, axis: int, op: str) -> Tensor:
    """x cut, or filled with zeros, to a size along an axis."""
    now = x.shape[axis]
    wanted = now if size is None else whole(size, f"fft.{op}", "the size")
    if not isinstance(now, int) or not isinstance(wanted, int) or wanted < 1:
        raise ShapeError(
            "the size of a transform is a positive integer known now",
            op=f"fft.{op}",
            got=str(wanted),
        )
    if wanted <= now:
        return x.narrow(axis, 0, wanted) if wanted < now else x
    amounts = [0, 0] * (x.ndim - 1 - axis) + [0, wanted - now]
    return pad(x, amounts)


def _scale(norm: str | None, size: int, inverse: bool, op: str) -> float:
    if norm not in (None, *NORMS):
        raise UserError("unknown norm", op=f"fft.{op}", expected=", ".join(NORMS), got=repr(norm))
    if norm == "ortho":
        return 1.0 / math.sqrt(size)
    return 1.0 / size if ((norm == "forward") != inverse) else 1.0


def _axis(x: Tensor, dim: int, op: str, real: bool) -> int:
    """The place of an axis, counted without that of the pairs."""
    count = x.ndim - (0 if real else 1)
    if not -count <= dim < count:
        raise ShapeError(
            "no such axis", op=f"fft.{op}", expected=f"-{count} <= dim < {count}", got=dim
        )
    return dim % count


def _along(
    op: str, x: Tensor, n: int | None, dim: int, norm: str | None, inverse: bool, real: bool = False
) -> Tensor:
    axis = _axis(x, dim, op, real)
    x = _fitted(x, n, axis, op)
    size: int = x.shape[axis]
    last = x.ndim - (1 if real else 2)
    found = transform(movedim(x, axis, last), 1 if inverse else -1, real)
    scale = _scale(norm, size, inverse, op)
    found = found if scale == 1.0 else found * scale
    return movedim(found, last, axis)


def fft(input: Any, n: int | None = None, dim: int = -1, norm: str | None = None) -> Tensor:
    """The transform of pairs along an axis."""
    return _along("fft", _paired("fft", input), n, dim, norm, False)


def ifft(input: Any, n: int | None = None, dim: int = -1, norm: str | None = None) -> Tensor:
    """The inverse transform of pairs along an axis."""
    return _along("ifft", _paired("ifft", input), n, dim, norm, True)


def rfft(input: Any, n: int | None = None, dim: int = -1, norm: str | None = None) -> Tensor:
    """The first half of the transform of reals, as pairs."""
    x = _real("rfft", input)
    axis = _axis(x, dim, "rfft", True)
    found = _along("rfft", x, n, axis, norm, False, True)
    return found.narrow(axis, 0, found.shape[axis] // 2 + 1)


def _mirrored(op: str, x: Tensor, n: int | None, axis: int) -> Tensor:
    """All of a spectrum whose half is given: what a transform of reals has."""
    half = x.shape[axis]
    size = 2 * (half - 1) if n is None else n
    x = _fitted(x, size // 2 + 1 if size > 0 else 0, axis, op)
    tail = flip(x.narrow(axis, 1, (size - 1) // 2), (axis,))
    conjugate = lift(np.array([1.0, -1.0], x.dtype.numpy))
    whole = cat([x, tail * conjugate], axis) if size > 2 else x.narrow(axis, 0, size)
    shape = [1] * (x.ndim - 1)
    shape[axis] = size
    at = arange(size).reshape(*shape)
    own = (at == 0) | (at * 2 == size)  # real by themselves
    return stack([whole[..., 0], where(own, 0.0, whole[..., 1])], -1)


def irfft(input: Any, n: int | None = None, dim: int = -1, norm: str | None = None) -> Tensor:
    """Reals (n of them) from the first half of their transform, given as pairs."""
    x = _paired("irfft", input)
    axis = _axis(x, dim, "irfft", False)
    return _along("irfft", _mirrored("irfft", x, n, axis), None, axis, norm, True)[..., 0]


def hfft(input: Any, n: int | None = None, dim: int = -1, norm: str | None = None) -> Tensor:
    """The real transform of a signal that is its own mirrored conjugate, half of it given."""
    x = _paired("hfft", input)
    axis = _axis(x, dim, "hfft", False)
    return _along("hfft", _mirrored("hfft", x, n, axis), None, axis, norm, False)[..., 0]


def ihfft(input: Any, n: int | None = None, dim: int = -1, norm: str | None = None) -> Tensor:
    """The inverse of hfft: the first half of the inverse transform of reals, as pairs."""
    x = _real("ihfft", input)
    axis = _axis(x, dim, "ihfft", True)
    found = _along("ihfft", x, n, axis, norm, True, True)
    return found.narrow(axis, 0, found.shape[axis] // 2 + 1)


# ---- several axes ---------------------------------------------------------------------------


def _axes(op: str, x: Tensor, s: Any, dim: Any, real: bool) -> list[tuple[int, int | None]]:
    """Axes with the sizes asked for (-1: as it is)."""
    count = x.ndim - (0 if real else 1)
    sizes = None if s is None else wholes(s, f"fft.{op}", "a size")
    if dim is None:
        axes = list(range(count - len(sizes) if sizes is not None else 0, count))
    else:
        axes = [_axis(x, d, op, real) for d in wholes(dim, f"fft.{op}", "axis")]
    wanted = [None] * len(axes) if sizes is None else [None if v == -1 else v for v in sizes]
    if len(wanted) != len(axes) or len(set(axes)) != len(axes):
        raise ShapeError(
            "axes and sizes do not fit",
            op=f"fft.{op}",
            expected="one size for each axis, each axis once",
            got=f"s={s}, dim={dim}",
        )
    return list(zip(axes, wanted))


def fftn(input: Any, s: Any = None, dim: Dims = None, norm: str | None = None) -> Tensor:
    """The transform of pairs along several axes (all if none are named)."""
    x = _paired("fftn", input)
    for axis, n in _axes("fftn", x, s, dim, False):
        x = _along("fftn", x, n, axis, norm, False)
    return x


def ifftn(input: Any, s: Any = None, dim: Dims = None, norm: str | None = None) -> Tensor:
    """The inverse transform of pairs along several axes."""
    x = _paired("ifftn", input)
    for axis, n in _axes("ifftn", x, s, dim, False):
        x = _along("ifftn", x, n, axis, norm, True)
    return x


def rfftn(input: Any, s: Any = None, dim: Dims = None, norm: str | None = None) -> Tensor:
    """The transform of reals along several axes, half of it along the last, as pairs."""
    x = _real("rfftn", input)
    *rest, (last, n) = _axes("rfftn", x, s, dim, True)
    found = rfft(x, n, last, norm)
    for axis, n in rest:
        found = _along("rfftn", found, n, axis, norm, False)
    return found


def irfftn(input: Any, s: Any = None, dim: Dims = None, norm: str | None = None) -> Tensor:
    """Reals from what rfftn gave."""
    x = _paired("irfftn", input)
    *rest, (last, n) = _axes("irfftn", x, s, dim, False)
    for axis, size in rest:
        x = _along("irfftn", x, size, axis, norm, True)
    return irfft(x, n, last, norm)


def fft2(input: Any, s: Any = None, dim: Dims = (-2, -1), norm: str | None = None) -> Tensor:
    """The transform of pairs along two axes."""
    return fftn(input, s, dim, norm)


def ifft2(input: Any, s: Any = None, dim: Dims = (-2, -1), norm: str | None = None) -> Tensor:
    """The inverse transform of pairs along two axes."""
    return ifftn(input, s, dim, norm)


def rfft2(input: Any, s: Any = None, dim: Dims = (-2, -1), norm: str | None = None) -> Tensor:
    """The transform of reals along two axes, as pairs."""
    return rfftn(input, s, dim, norm)


def irfft2(input: Any, s: Any = None, dim: Dims = (-2, -1), norm: str | None = None) -> Tensor:
    """Reals from what rfft2 gave."""
    return irfftn(input, s, dim, norm)


# ---- frequencies ----------------------------------------------------------------------------


def fftfreq(n: int, d: float = 1.0, *, dtype: Any = None) -> Tensor:
    """The frequencies of a transform of n samples with distance d."""
    n = whole(n, "fftfreq", "n")
    return _over(roll(arange(n) - n // 2, -(n // 2), 0), n * d, dtype)


def rfftfreq(n: int, d: float = 1.0, *, dtype: Any = None) -> Tensor:
    """The frequencies of a half transform of n samples."""
    n = whole(n, "rfftfreq", "n")
    return _over(arange(n // 2 + 1), n * d, dtype)


def _over(x: Tensor, step: float, dtype: Any) -> Tensor:
    return cast(x, dtypes.float32 if dtype is None else dtype_of(dtype)) / step


def fftshift(input: Any, dim: Dims = None) -> Tensor:
    """Frequency 0 in the middle; `dim` counts all axes (name them for pairs)."""
    return _shifted(lift(input), dim, 1)


def ifftshift(input: Any, dim: Dims = None) -> Tensor:
    """The inverse of fftshift."""
    return _shifted(lift(input), dim, -1)


def _shifted(x: Tensor, dim: Dims, sign: int) -> Tensor:
    axes = range(x.ndim) if dim is None else wholes(dim, "fftshift", "axis")
    wanted = [build.axis_of(x.node, a, "fftshift") for a in axes]
    for axis in wanted:
        size: int = x.shape[axis]
        x = roll(x, size // 2 if sign > 0 else -(size // 2), axis)
    return x

"""Recipes: how weights are rounded, given what comes in. NumPy, a layer at a time.

`plain` takes each group from its least to its greatest value; `searched` shrinks that range where
the error becomes less; `gptq` rounds one column after the other and lets those to come make up for
it (Frantar et al. 2022); `awq` and `smooth` find factors of input channels that are taken off
the inputs before and put on the weights (Lin et al. 2023, Xiao et al. 2022).
Invariant: what a recipe gives is codes, scales and zero points of a Format; an error is measured on
what the Format holds, scales rounded as it stores them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.errors import UserError
from ..core.format import Format, format_of
from ..core.scaled import NUMPY, packed_bits

Array = np.ndarray[Any, Any]
SHRUNK = np.linspace(1.0, 0.55, 19, dtype=np.float32)  # ranges that are tried
POWERS = np.linspace(0.0, 0.95, 20)  # of AWQ and SmoothQuant
DAMPED, AT_ONCE = 0.01, 64  # of GPTQ: share of the mean that is added, columns
JUDGED = 256  # rows of each matrix that AWQ's factors are judged by


@dataclass(frozen=True)
class Coded:
    """Weights (rows, columns) as whole numbers above a zero point, in groups."""

    codes: Array  # uint8 (rows, columns)
    scale: Array  # float16 (rows, groups)
    zero: Array  # uint8 (rows, groups)
    bits: int
    before: Array | None = None  # of GPTQ: what each was when it was rounded, in float32

    @property
    def group(self) -> int:
        """Columns of a group."""
        return self.codes.shape[1] // self.scale.shape[1]

    @property
    def format(self) -> Format:
        """The Format of `raw`."""
        return format_of(f"INT{self.bits}_G{self.group}_F16_ZERO")

    def values(self) -> Array:
        """What they stand for, in float32."""
        shape = (*self.scale.shape, self.group)
        codes = self.codes.reshape(shape).astype(np.float32)
        scale = self.scale.astype(np.float32)[..., None]
        wide = (codes - self.zero[..., None].astype(np.float32)) * scale
        return np.asarray(wide.reshape(self.codes.shape))

    def raw(self) -> Array:
        """Bytes (rows, bytes of a row) of the Format."""
        codes = np.asarray(packed_bits(NUMPY, self.codes, self.bits))
        return np.concatenate([codes, self.scale.view(np.uint8), self.zero], axis=1)


def finite(name: str, weight: Array) -> Array:
    """A layer's weights as they are; an error where some are nan or infinite."""
    bad = weight.size - int(np.isfinite(weight).sum())
    if bad:
        raise UserError(
            "weights are not finite",
            op="quantise",
            expected=f"finite numbers in {name}",
            got=f"{bad} of {weight.size} are nan or infinite",
        )
    return weight


def _grid(low: Array, high: Array, bits: int) -> tuple[Array, Array]:
    """Scale and zero point of ranges."""
    most = (1 << bits) - 1
    scale = ((high - low) / np.float32(most)).astype(np.float16)
    scale = np.where(scale > 0, scale, np.float16(1e-4))
    zero = np.clip(np.round(-low / scale.astype(np.float32)), 0, most).astype(np.uint8)
    return scale, zero


def _rounded(x: Array, scale: Array, zero: Array, bits: int) -> Array:
    """Codes, as floats."""
    found = np.round(x / scale.astype(np.float32)) + zero.astype(np.float32)
    return np.asarray(np.clip(found, 0, (1 << bits) - 1))


def _groups(weight: Array, group: int) -> Array:
    if group < 1 or weight.shape[1] % group:
        raise UserError(
            "columns are no multiple of the group",
            op="quantise",
            expected=f"a divisor of {weight.shape[1]}",
            got=group,
        )
    return weight.reshape(len(weight), -1, group)


def plain(weight: Array, bits: int, group: int) -> Coded:
    """Every group from its least to its greatest value."""
    return searched(weight, bits, group, None, SHRUNK[:1])


def searched(
    weight: Array, bits: int, group: int, importance: Array | None, tried: Array = SHRUNK
) -> Coded:
    """Ranges with the least error, weighted by how important each column is."""
    x = _groups(np.asarray(weight, np.float32), group)
    factor = np.ones(x.shape[1:], np.float32)
    if importance is not None:
        factor = np.asarray(importance, np.float32).reshape(x.shape[1:])
    low, high = np.minimum(x.min(-1), 0), np.maximum(x.max(-1), 0)
    best: tuple[Array, ...] | None = None
    for share in tried:
        scale, zero = _grid(low * share, high * share, bits)
        codes = _rounded(x, scale[..., None], zero[..., None], bits)
        wide = (codes - zero[..., None].astype(np.float32)) * scale.astype(np.float32)[..., None]
        error = (factor * (wide - x) ** 2).sum(-1)
        if best is None:
            best = (error, scale, zero, codes)
        else:
            better = error < best[0]
            best = (
                np.where(better, error, best[0]),
                np.where(better, scale, best[1]),
                np.where(better, zero, best[2]),
                np.where(better[..., None], codes, best[3]),
            )
    assert best is not None
    _, scale, zero, codes = best
    return Coded(codes.astype(np.uint8).reshape(weight.shape), scale, zero, bits)


def gptq(weight: Array, products: Array, bits: int, group: int, damped: float = DAMPED) -> Coded:
    """Columns in the order of their importance, each rounded after what those before it cost;
    `products` is x.T @ x over the inputs. Groups are those of the weights as they were."""
    wide, matrix = np.array(weight, np.float64), np.array(products, np.float64)
    diagonal = np.diag(matrix).copy()
    dead = diagonal <= 0
    matrix[dead, dead] = 1.0
    start = searched(weight, bits, group, np.where(dead, 1e-12, diagonal))
    order = np.argsort(-diagonal, kind="stable")
    wide, matrix = wide[:, order], matrix[np.ix_(order, order)]
    matrix[np.diag_indices_from(matrix)] += damped * diagonal.mean() + 1e-12
    upper = _inverse(np.linalg.cholesky(matrix[::-1, ::-1])[::-1, ::-1]).astype(np.float32)
    wide = wide.astype(np.float32)
    codes, before = np.empty(weight.shape, np.uint8), np.empty(weight.shape, np.float32)
    rows, columns = weight.shape
    for first in range(0, columns, AT_ONCE):
        end = min(first + AT_ONCE, columns)
        part, errors = wide[:, first:end].copy(), np.empty((rows, end - first), np.float32)
        for at in range(end - first):
            own = int(order[first + at]) // group
            scale, zero = start.scale[:, own], start.zero[:, own]
            code = _rounded(part[:, at], scale, zero, bits)
            value = (code - zero.astype(np.float32)) * scale.astype(np.float32)
            codes[:, order[first + at]], before[:, order[first + at]] = code, part[:, at]
            row = upper[first + at, first + at : end]
            errors[:, at] = (part[:, at] - value) / row[0]
            part[:, at:] -= errors[:, at : at + 1] * row
        wide[:, end:] -= errors @ upper[first:end, end:]
    return Coded(codes, start.scale, start.zero, bits, before)


def _inverse(upper: Array) -> Array:
    """Of an upper triangular matrix, by halves. Where `upper @ upper.T` is a matrix, its result is
    the Cholesky factor of the inverse of that."""
    half = len(upper) // 2
    if half < 32:
        return np.asarray(np.linalg.inv(upper))
    first, last = _inverse(upper[:half, :half]), _inverse(upper[half:, half:])
    found = np.zeros_like(upper)
    found[:half, :half], found[half:, half:] = first, last
    found[:half, half:] = -(first @ upper[:half, half:]) @ last
    return found


def loss(change: Array, products: Array) -> float:
    """The square of what a change of weights changes in results."""
    wide = change.astype(np.float32)
    return float(((wide @ products.astype(np.float32)) * wide).sum(dtype=np.float64))


def awq(weights: Sequence[Array], mean: Array, products: Array, bits: int, group: int) -> Array:
    """Factors of input channels with which rounding all of these weights costs least; `mean` is
    that of the inputs' sizes. Rows of a matrix are many: some of them, evenly spread, judge."""
    best, found = np.inf, np.ones_like(mean)
    weights = [w[:: max(1, len(w) // JUDGED)] for w in weights]
    for power in POWERS:
        factors = np.maximum(mean, 1e-8) ** power
        factors = (factors / np.sqrt(factors.max() * factors.min())).astype(np.float32)
        total = 0.0
        for weight in weights:
            near = plain(weight * factors, bits, group).values() / factors
            total += loss(near - weight, products)
        if total < best:
            best, found = total, factors
    return found


def smooth(weights: Sequence[Array], rows: Array, most: Array) -> Array:
    """Factors of input channels with which int8 of inputs (each row by its absmax) and of weights
    (each channel by its own) costs least; `most` is the largest size in each channel."""
    largest = np.max([np.abs(w).max(0) for w in weights], axis=0)
    best, found = np.inf, np.ones_like(most)
    for power in POWERS:
        factors = np.maximum(most, 1e-5) ** power / np.maximum(largest, 1e-5) ** (1 - power)
        factors = np.ones_like(most) if not power else factors.astype(np.float32)
        factors = (factors / np.exp(np.log(factors).mean())).astype(np.float32)
        given = _by_rows(rows / factors) * factors
        total = 0.0
        for weight in weights:
            near = _by_rows(weight * factors) / factors
            total += float(((given @ near.T - rows @ weight.T) ** 2).sum(dtype=np.float64))
        if total < best:
            best, found = total, factors
    return found


def _by_rows(x: Array) -> Array:
    """Rounded to int8, each row by its absmax."""
    scale = np.maximum(np.abs(x).max(-1, keepdims=True), 1e-20) / np.float32(127)
    return np.asarray(np.round(x / scale) * scale)


__all__ = ["Coded", "awq", "finite", "gptq", "loss", "plain", "searched", "smooth"]

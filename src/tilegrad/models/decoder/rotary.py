"""Rotary positions: how fast each pair of features turns, and the turning.

A `Rotary` is data: a base, how many features turn, and how the speeds are scaled for contexts
longer than those of training (linear, llama3, yarn, or a divisor for each pair, as in longrope
and in GGUF files). Invariant: feature i turns with feature i + width / 2, the layout of Hugging
Face weights; speeds and angles are float32 whatever the dtype of the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ...core import dtype as dtypes
from ...tensor.maths import cast, cos, sin
from ...tensor.movement import cat
from ...tensor.tensor import Tensor, lift

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Rotary:
    """How positions turn queries and keys."""

    base: float = 10000.0
    width: int = 0  # how many features of a head turn, the first ones
    kind: str = "default"  # or linear, llama3, yarn
    factor: float = 1.0  # how much longer the context became
    original: int = 0  # the context of training: llama3, yarn
    low: float = 1.0  # llama3: turns over the original context, below which all is scaled
    high: float = 4.0  # llama3: and above which nothing is
    beta_fast: float = 32.0  # yarn: as high
    beta_slow: float = 1.0  # yarn: as low
    truncate: bool = True  # yarn: the ramp begins and ends at whole pairs
    divisors: tuple[float, ...] = ()  # one for each pair
    attention_factor: float = 1.0  # on both sines and cosines

    def frequencies(self) -> Array:
        """Radians a position, one for each pair, float32."""
        return _frequencies(self)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines (..., 1, width / 2) of positions (...): the same for all heads."""
        angles = cast(positions, dtypes.float32)[..., None, None] * lift(self.frequencies())
        if self.attention_factor == 1.0:
            return cos(angles), sin(angles)
        return cos(angles) * self.attention_factor, sin(angles) * self.attention_factor


@lru_cache(maxsize=64)
def _frequencies(rotary: Rotary) -> Array:
    pairs = np.arange(0, rotary.width, 2, dtype=np.float64) / rotary.width
    plain = 1.0 / rotary.base**pairs
    if rotary.divisors:
        found = plain / np.asarray(rotary.divisors, np.float64)
    elif rotary.kind == "linear":
        found = plain / rotary.factor
    elif rotary.kind == "llama3":
        found = _llama3(rotary, plain)
    elif rotary.kind == "yarn":
        found = _yarn(rotary, plain)
    else:
        found = plain
    result = found.astype(np.float32)
    result.setflags(write=False)
    return result


def _llama3(rotary: Rotary, plain: Array) -> Array:
    """Slow pairs are scaled, fast ones kept, those between are mixed."""
    rotations = rotary.original * plain / (2.0 * math.pi)  # over the context of training
    mix = (rotations - rotary.low) / (rotary.high - rotary.low)
    mixed = (1.0 - mix) * plain / rotary.factor + mix * plain
    return np.where(
        rotations < rotary.low,
        plain / rotary.factor,
        np.where(rotations > rotary.high, plain, mixed),
    )


def _yarn(rotary: Rotary, plain: Array) -> Array:
    """A ramp over the pairs from kept to scaled."""

    def pair(rotations: float) -> float:  # the pair that turns so often over the original context
        return (
            rotary.width
            * math.log(rotary.original / (rotations * 2.0 * math.pi))
            / (2.0 * math.log(rotary.base))
        )

    first, last = pair(rotary.beta_fast), pair(rotary.beta_slow)
    if rotary.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary.width - 1)
    last = last + 0.001 if first == last else last
    ramp = np.clip((np.arange(rotary.width // 2) - first) / (last - first), 0.0, 1.0)
    return plain / rotary.factor * ramp + plain * (1.0 - ramp)


def yarn_factor(factor: float, by: float = 1.0) -> float:
    """The attention factor yarn recommends."""
    return 1.0 if factor <= 1.0 else 0.1 * by * math.log(factor) + 1.0


def longrope_factor(factor: float, original: int) -> float:
    """The attention factor longrope recommends."""
    return 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(original))


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """x (..., heads, head_width) turned by its positions; features beyond the width stay."""
    cosines, sines = angles
    half = cosines.shape[-1]
    wide = cast(x, dtypes.float64 if x.dtype is dtypes.float64 else dtypes.float32)
    first, second = wide[..., :half], wide[..., half : 2 * half]
    parts = [first * cosines - second * sines, second * cosines + first * sines]
    if 2 * half < x.shape[-1]:
        parts.append(wide[..., 2 * half :])
    return cast(cat(parts, -1), x.dtype)


__all__ = ["Rotary", "longrope_factor", "rotate", "yarn_factor"]

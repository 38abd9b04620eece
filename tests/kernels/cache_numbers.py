"""Numbers for paged caches in tests: scales, what a cache holds of them, how near it must be."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilegrad.core.dtype import int8
from tilegrad.graph import paged_reference
from tilegrad.kernels.paged.shape import PagedShape


def scales_of(x: PagedShape) -> Any:
    """Of keys and of values in 8 bits, other ones for each head."""
    if not x.scaled:
        return np.ones((2, 1), np.float32)
    made = np.array([[0.5], [2.0]], np.float32) * (1 + np.arange(x.key_heads, dtype=np.float32) / 4)
    return made if x.cache.is_float else made / 32


def sinks_of(x: PagedShape) -> list[Any]:
    """A sink for each head, if there are any: near the scores, none, far above and far below."""
    some = [1.5, -np.inf, 200.0, -1e30, 1e30, -50.0, 4.0, 0.0]
    return [np.resize(np.array(some, np.float32), x.heads)] if x.sinks else []


def stored(x: PagedShape, cache: Any) -> Any:
    """Numbers as a cache holds them; of int8 what is none as any."""
    return paged_reference.kept(cache if x.cache.is_float else cache * 40, x.cache.numpy)


def agree_stored(x: PagedShape, found: Any, right: Any, rounding: float) -> None:
    """What a cache holds beside what it should before it is rounded."""
    whole = x.cache is int8
    right = np.clip(right, -128, 127) if whole else right
    within = 0.0 if whole else 2.0**-4 if x.scaled else rounding
    near = 0.501 if whole else within / 16
    np.testing.assert_allclose(
        found.astype(np.float64), right, rtol=within, atol=near, equal_nan=True
    )

"""Emitted PTX on the simulator beside tilegrad: an Entry and Symbols become plain numbers.

Invariant: `ptxsim` sees text and numbers only; what they mean is read from the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import ptxsim
from tilegrad.ir.symbol import evaluate
from tilegrad.targets.ptx.program import Entry, TensorMap


def map_of(given: TensorMap, symbols: Mapping[str, int]) -> ptxsim.TensorMap:
    """A tensor map with its Symbols filled in."""
    sizes, strides = (
        tuple(evaluate(s, symbols) for s in axes) for axes in (given.sizes, given.strides)
    )
    return ptxsim.TensorMap(
        given.parameter, given.dtype.numpy, sizes, strides, given.box, given.swizzle
    )


def launch_of(entry: Entry, symbols: Mapping[str, int]) -> ptxsim.Launch:
    """The launch of an Entry where Symbols have these values."""

    def argument(kind: str, value: Any) -> tuple[str, Any]:
        if kind == "map":
            return kind, map_of(value, symbols)
        return ("value", symbols[value]) if kind == "symbol" else (kind, value)

    return ptxsim.Launch(
        entry.name,
        tuple(argument(*a) for a in entry.arguments),
        tuple(evaluate(size, symbols) for size in entry.grid),
        entry.threads,
        entry.shared_bytes,
        entry.cluster,
        entry.dependent,
    )


def simulate(
    text: str,
    entry: Entry,
    memories: Sequence[np.ndarray | int],
    symbols: Mapping[str, int] | None = None,
    **options: Any,
) -> None:
    """Run an emitted Entry over its grid, changing the Body's memories in place."""
    ptxsim.simulate(text, launch_of(entry, symbols or {}), memories, **options)

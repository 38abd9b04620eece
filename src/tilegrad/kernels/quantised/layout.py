"""How kernels of all machines keep the codes of a Format: without sign, in planes of bits.

A value is scale * (code - centre) + minimum for each group of columns, or scale * (code - zero).
Formats of two levels keep both: a scale (and minimum) for a block of 256 columns, and whole numbers
for a group. Where planes and scales lie in memory is another matter: see `cpu_parts`, `gpu_layout`.
Invariant: with these, codes and scales are those of the Format, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Layout:
    """What is kept of one Format."""

    planes: tuple[int, ...]  # bits of each plane, the lowest bits first
    centre: int = 0  # what codes stand above their values
    least: str = ""  # the Field beside the scale: 'minimum', or 'zero', which is in scales
    group: int = 32  # columns
    two_levels: bool = False
    doubled: bool = False  # codes stand for twice a float of 4 bits (E2M1), scales are powers of 2


LAYOUTS = {
    "Q4_0": Layout((4,), 8),
    "Q4_1": Layout((4,), least="minimum"),
    "Q4_Z": Layout((4,), least="zero"),
    "Q5_0": Layout((4, 1), 16),
    "Q5_1": Layout((4, 1), least="minimum"),
    "Q8_0": Layout((8,), 128),
    "Q2_K": Layout((2,), 0, "minimum", 16, True),
    "Q3_K": Layout((2, 1), 4, "", 16, True),
    "Q4_K": Layout((4,), 0, "minimum", 32, True),
    "Q5_K": Layout((4, 1), 0, "minimum", 32, True),
    "Q6_K": Layout((4, 2), 32, "", 16, True),
    "MXFP4": Layout((4,), 12, doubled=True),
}


def joined(codes: Array, bits: int) -> Array:
    """Some bits of each of (..., count, 4) bytes in one of (..., 4): those of the first lowest."""
    mask = np.uint8((1 << bits) - 1)
    made = codes[..., 0, :] & mask
    for place in range(1, codes.shape[-2]):
        made |= (codes[..., place, :] & mask) << np.uint8(place * bits)
    return made

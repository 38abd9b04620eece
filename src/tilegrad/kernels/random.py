"""Random bits within kernels: the counter-based generator on Tiles.

Philox-2x32-10 of a linear index, as the Graph's random_bits has them. Invariant: what is drawn
depends on key, offset and index alone, never on the tiles of a kernel.
"""

from __future__ import annotations

from typing import Any

from ..core.dtype import uint32
from ..tile.arithmetic import elementwise

MULTIPLIER, WEYL, ROUNDS = 0xD256D193, 0x9E3779B9, 10


def random_bits(key: Any, offset: Any, linear: Any) -> Any:
    """Random bits (uint32) of linear indices (int64)."""
    x, y = linear.to(uint32), (linear >> 32).to(uint32) ^ offset
    for turn in range(ROUNDS):
        top, bottom = elementwise("multiply_high", x, MULTIPLIER), x * MULTIPLIER
        x, y = top ^ key ^ y, bottom
        key = key + WEYL if turn < ROUNDS - 1 else key
    return x

"""Random bits within kernels: the counter-based generator on Tiles.

Philox-2x32-10 of a linear index, as the Graph's random_bits has them. Invariant: what is drawn
depends on key, offset and index alone, never on the tiles of a kernel.
"""

from __future__ import annotations

from ..core.dtype import uint32
from ..ir.node import Node
from ..tile.build import BodyBuilder

MULTIPLIER, WEYL, ROUNDS = 0xD256D193, 0x9E3779B9, 10


def random_bits(b: BodyBuilder, key: Node, offset: Node, linear: Node) -> Node:
    """Random bits (uint32) of linear indices (int64)."""
    x = b.cast(linear, uint32)
    y = b.cast(b.apply("shift_right", linear, 32), uint32)
    y = b.apply("bit_xor", y, offset)
    for turn in range(ROUNDS):
        top = b.apply("multiply_high", x, MULTIPLIER)
        bottom = b.apply("multiply", x, MULTIPLIER)
        x, y = b.apply("bit_xor", b.apply("bit_xor", top, key), y), bottom
        if turn < ROUNDS - 1:
            key = b.apply("add", key, WEYL)
    return x

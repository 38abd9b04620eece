"""Dropout of attention's probabilities within kernels: the counter-based generator on Tiles.

The bits are those of the Graph's random_bits of shape (batch, heads, queries, keys): Philox-2x32-10
of the row-major linear index. Invariant: forward and backward kernels, whatever their tiles, drop
the same probabilities as the decomposition does.
"""

from __future__ import annotations

from ...core.dtype import float32, int64, uint32
from ...ir.node import Node
from ...tile.build import BodyBuilder

MULTIPLIER, WEYL, ROUNDS = 0xD256D193, 0x9E3779B9, 10


def threshold(rate: float) -> int:
    """Kept are probabilities whose bits, shifted right by 8, are more than this."""
    return int(float(float32.numpy.type(rate)) * (1 << 24))


def bits(b: BodyBuilder, key: Node, offset: Node, linear: Node) -> Node:
    """Random bits (uint32) of linear indices (int64)."""
    x = b.cast(linear, uint32)
    y = b.cast(b.apply("shift_right", linear, b.constant(32, int64)), uint32)
    y = b.apply("bit_xor", y, offset)
    multiplier, weyl = b.constant(MULTIPLIER, uint32), b.constant(WEYL, uint32)
    for turn in range(ROUNDS):
        top = b.apply("multiply_high", x, multiplier)
        bottom = b.apply("multiply", x, multiplier)
        x, y = b.apply("bit_xor", b.apply("bit_xor", top, key), y), bottom
        if turn < ROUNDS - 1:
            key = b.apply("add", key, weyl)
    return x


def keep(b: BodyBuilder, key: Node, offset: Node, linear: Node, rate: float) -> Node:
    """What probabilities at linear indices are multiplied by: 0 or 1 / (1 - rate)."""
    drawn = b.apply("shift_right", bits(b, key, offset, linear), b.constant(8, uint32))
    kept = b.apply("less", b.constant(threshold(rate), uint32), drawn)
    grown, none = (b.constant(value, float32) for value in (1 / (1 - rate), 0.0))
    return b.apply("where", kept, b.broadcast(grown, kept.shape), b.broadcast(none, kept.shape))

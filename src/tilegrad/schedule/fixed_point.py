"""Fixed-point functions in tiles: the entries of the tables are computed where they are needed.

Entries are numbers of float64 rounded to the nearest, so they are exact; lines between them are
integers. Invariant: the bits of `core/fixed.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import tile
from ..core.dtype import float64, int32, int64
from ..core.fixed import INT32_MAX, LOG2E
from ..ir.node import Node, located
from ..tile.build import BodyBuilder
from ..tile.value import TileValue


def between(entry: Callable[[Any], Any], i: Any, part: Any, rising: bool) -> Any:
    """`part` of 256 from entry i, of 16 bits after the point, to the next one; the way between is
    rounded down."""
    low, next_ = (tile.floor(entry(j.to(float64)) * 65536.0 + 0.5).to(int64) for j in (i, i + 1))
    return low + ((next_ - low) * part >> 8) if rising else low - ((low - next_) * part >> 8)


def leading(x: Any) -> tuple[Any, Any]:
    """The place of the highest 1 of positive numbers, and they with it shifted to bit 30."""
    x = tile.maximum(x, 1)
    place = (tile.bitcast(x.to(float64), int64) >> 52) - 1023
    return place, x << 30 - place


def shifted(x: Any, left: Any) -> Any:
    """x * 2**left, rounded down."""
    return x << tile.maximum(left, 0) >> tile.maximum(-left, 0)


def exp(x: Any) -> Any:
    """See `core/fixed.py`."""
    z = tile.minimum(x, 0) * LOG2E >> 16
    down, f = -(z >> 16), z & 0xFFFF
    found = between(lambda i: tile.exp2(i * (1 / 256)), f >> 8, f & 255, True)
    return tile.where(down < 32, found >> tile.minimum(down, 31), 0)


def reciprocal(x: Any) -> Any:
    """See `core/fixed.py`."""
    place, m = leading(x)
    i, part = m >> 22 & 255, m >> 14 & 255
    found = between(lambda i: tile.reciprocal(i * (1 / 256) + 1.0), i, part, False)
    return tile.where(x < 1, INT32_MAX, shifted(found, 14 - place))


def rsqrt(x: Any) -> Any:
    """See `core/fixed.py`."""
    place, m = leading(x)
    i, part, odd = m >> 23 & 127, m >> 15 & 255, ((place & 1) + 1).to(float64)
    found = between(
        lambda i: tile.reciprocal(tile.sqrt((i * (1 / 128) + 1.0) * odd)), i, part, False
    )
    return tile.where(x < 1, INT32_MAX, shifted(found, 8 - (place >> 1)))


FIXED = {"exp": exp, "reciprocal": reciprocal, "rsqrt": rsqrt}


def fixed_point(body: BodyBuilder, node: Node, x: Node) -> Node:
    """A `fixed` Node of an int32 value."""
    with tile.into(body), located(node.location):
        return FIXED[node.attrs["kind"]](TileValue(x).to(int64)).to(int32).node

"""Words of codes, and what follows a product: what kernels of quantised weights do alike.

A word is 32 bits, four codes of 8. Invariant: no function depends on the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ... import tile
from ...core.dtype import float32

BYTES = 0x01010101  # 1 in each byte of a word


def shifted(words: Any, right: int) -> Any:
    """Words moved to the right (to the left where it is negative)."""
    return words >> right if right > 0 else words << -right if right else words


def masked(words: Any, byte: int) -> Any:
    """A mask for each byte."""
    return words & byte * BYTES


def moved(words: Any, bits: int, right: int, left: int = 0) -> Any:
    """Bits of each byte from `right` (+ left) on, moved to `left`."""
    return words if bits == 8 else masked(shifted(words, right), ((1 << bits) - 1) << left)


def doubled(words: Any) -> Any:
    """Nibbles of E2M1 as 12 above twice their value, all four bytes of a word at once.

    Sizes n = 0 .. 7 stand for n + max(n - 4, 0) + 2 max(n - 6, 0): 0 1 2 3 4 6 8 12.
    """
    size = masked(words, 7)
    beyond = masked(shifted(size, 2), 1)  # 1 where n >= 4
    total = size + (size & beyond * 3)  # two low bits of n - 4
    seven = masked(shifted(size, 1) & size & beyond, 1)  # 1 where n = 7
    total = total + (seven + seven)
    sign = masked(shifted(words, 3), 1)
    twice = total + total & sign * 0xFF
    return total + 12 * BYTES - twice


def surrounded(sides: Sequence[Any], bias: Any, residual: Any, quick: bool = False) -> Any:
    """A product with what is around it: of two sides silu(the first) * the second."""
    value = sides[0] if bias is None else sides[0] + bias.to(float32)
    if len(sides) > 1:
        unit = tile.full((), 1.0)
        below = (tile.quick_exp if quick else tile.exp)(-value) + unit
        value = (tile.quick_divide(value, below) if quick else value / below) * sides[1]
    return value if residual is None else value + residual.to(float32)


def there(size: tuple[int, ...], axis: int, start: Any, limit: Any) -> Any:
    """Which elements of a tile, from a start on, lie below a limit of an axis; None for all."""
    if tile.most(start + size[axis] - limit) <= 0:
        return None
    line, only = tile.arange(size[axis]), [1] * len(size)
    line = line if isinstance(start, int) and start == 0 else line + start
    only[axis], inside = size[axis], line < limit
    return inside if len(size) == 1 else tile.broadcast(tile.reshape(inside, only), size)


def and_masks(a: Any, b: Any) -> Any:
    """Two masks; None is true."""
    return a if b is None else b if a is None else a & b

"""Tensors in a Format: packed to its bytes, unpacked, or rounded to what it can hold.

Invariant: `rounded` is `unpack(pack(x))` in values; its derivative is that of x where it is asked
for (straight through), and none else.
"""

from __future__ import annotations

from typing import Any

from ..core.dtype import DType, float32
from ..core.errors import UserError
from ..core.format import Format, format_of
from ..core.scaled import not_whole
from ..graph import build
from ..tensor.tensor import Tensor, lift, node_of, wrap


def pack(x: Any, format: Format | str, scale: Any = None) -> Tensor:
    """The bytes (..., bytes of a row) of values (..., columns); `scale` (..., groups of a row) is
    found where it is not given."""
    form, values = format_of(format), lift(x)
    if not form.apart:
        hint = f"format_of({form.name!r}).pack(array) packs NumPy arrays"
        why = "scales lie within the blocks" if form.quantised else "nothing to quantise"
        raise UserError(why, op="quant.pack", got=form.name, hint=hint)
    if form.whole and values.dtype.is_float:
        raise not_whole(form, values.dtype.name, "quant.pack")
    columns = values.shape[-1] if values.ndim else 0
    if not isinstance(columns, int) or not columns or columns % form.block:
        expected = f"(..., columns), columns a multiple of {form.block}"
        raise UserError("bad columns", op="quant.pack", expected=expected, got=values.shape)
    given = None if scale is None else node_of(lift(scale))
    floats = values if values.dtype.is_float else values.to(float32)
    return wrap(build.pack(node_of(floats), form.name, given))


def unpack(raw: Any, format: Format | str, dtype: DType = float32) -> Tensor:
    """The values of bytes."""
    return wrap(build.unpack(node_of(lift(raw)), format_of(format).name, dtype))


def rounded(
    x: Any, format: Format | str, scale: Any = None, straight_through: bool = False
) -> Tensor:
    """x as a Format can hold it."""
    given = lift(x)
    found = unpack(pack(given.detach(), format, scale), format, given.dtype)
    return given + (found - given).detach() if straight_through else found


__all__ = ["pack", "rounded", "unpack"]

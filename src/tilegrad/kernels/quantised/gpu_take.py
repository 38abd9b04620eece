"""Writes a row of quantised weights on a GPU; see `take`.

Each thread takes a group of the row apart. Costs the bytes of a row read and written.
"""

from __future__ import annotations

from typing import Any

from ... import tile
from .gpu_layout import GROUP, Groups, as_columns, groups_of
from .shape import QuantisedShape
from .words import there

MOST_GROUPS = 128  # that the threads of a program take at once


@tile.function
def write_row(shape: QuantisedShape, memory: dict[str, Any], row: Any, out: Any) -> dict[str, Any]:
    """A row of the weights; gives how many warps do it."""
    weights = Groups(shape, memory)
    count, groups = groups_of(shape), MOST_GROUPS
    while count % groups:
        groups //= 2
    wide = groups * GROUP
    for group in tile.range(0, count, groups):
        found = weights.values(weights.load(row, group, 1, groups), once=False)
        values = as_columns(list(found)).to(shape.dtype)
        values = tile.reshape(values, (wide,))
        first = group * GROUP
        mask = there((wide,), 0, first, shape.columns)
        tile.store(out[first : first + wide], values, mask=mask)
    return {"warps": groups // 32}

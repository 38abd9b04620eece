"""What a launch is told beside the text: arguments, sizes, memories of tensor maps; plain numbers.

Invariant: the records name no compiler's types, so any source of PTX can fill them in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class TensorMap:
    """A tensor map over one memory: sizes and strides outermost first.

    `memory` numbers the memory it points into; `strides` are in elements, the last is 1; `box`
    is what one copy moves; `swizzle` is 0, 32, 64 or 128 bytes.
    """

    memory: int
    dtype: np.dtype[Any]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0


@dataclass(frozen=True)
class Launch:
    """One launch of an entry: its arguments in order, and how many threads run it.

    Each argument is ('pointer', number of the memory), ('value', an integer, as an s64) or
    ('map', TensorMap, a 128-byte grid constant). `grid` holds one to three sizes, x first;
    `cluster` likewise. `dependent` says that it was launched programmatically dependent, so
    that it must wait (griddepcontrol) before it touches what others wrote.
    """

    name: str
    arguments: tuple[tuple[str, Any], ...]
    grid: tuple[int, ...]
    threads: int
    shared_bytes: int = 0
    cluster: tuple[int, ...] = ()
    dependent: bool = False

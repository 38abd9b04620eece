"""Who else holds the memory of a state: what decides between writing in place and a copy.

Invariant: memory that another Tensor, array or Buffer can still read is never called exclusive.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.errors import StateError
from ..runtime.buffer import Buffer
from .tensor import Tensor
from .trace import Source


class _Probe:
    __slots__ = ("item",)
    item: Any


def alone() -> int:
    """The reference count of an object that one attribute holds, read through it."""
    probe = _Probe()
    probe.item = _Probe()
    return sys.getrefcount(probe.item)


def is_exclusive(tensor: Tensor, buffers: list[Buffer], position: int) -> bool:
    """Whether a Tensor's memory is held by nothing else that could still be read."""
    least = alone()
    buffer = buffers[position]
    if not buffer.writable or buffers.count(buffer) > 1:
        return False
    del buffer
    if sys.getrefcount(tensor._node) > least or sys.getrefcount(buffers[position]) > least + 1:
        return False
    owner = buffers[position].owner
    if isinstance(owner, np.ndarray) and owner.base is not None:
        return False
    return sys.getrefcount(owner) <= least + 1


def is_alone(tensor: Tensor, buffers: list[Buffer], position: int) -> bool:
    """Whether a Tensor's memory is exclusive once what nobody can reach any more is gone."""
    if not is_exclusive(tensor, buffers, position):
        gc.collect()  # cycles keep Nodes, and so their memory, until they are looked for
    return is_exclusive(tensor, buffers, position)


def is_kept(leaves: Sequence[Any], source: Source) -> bool:
    """Whether an object says that state of such a name is never to be copied."""
    if source.kind != "state":
        return False
    return source.name.startswith(tuple(getattr(leaves[source.index], "never_copied", ())))


def would_copy(name: str, what: str, why: str) -> StateError:
    """The error for state that could not be written in place."""
    return StateError(
        f"the state {what} would be copied: {why}",
        op=f"jit {name}",
        expected="state that is written in place",
        got=why,
        hint="keep no other Tensor or array of it",
    )


__all__ = ["alone", "is_alone", "is_exclusive", "is_kept", "would_copy"]

"""The call before of a jitted function: a call like it needs no key.

Looking up a signature costs more than launching a kernel should. Where all arguments are Tensors
whose values are on the device that the function runs on, a call is like the one before if every
Tensor has the very same type (compared by identity, which is quick and enough: results of jitted
functions share their types) and records derivatives as before. Invariant: whatever `buffers_of`
accepts has the signature of the call that was remembered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

from ..core.config import config
from ..runtime.buffer import Buffer
from .lowered import Lowered, known
from .tensor import Tensor, mode

LastCall = tuple[list[tuple[Any, bool]], bool, str, Lowered, tuple[str, ...]]


def remembered(args: Sequence[Any], lowered: Lowered) -> LastCall | None:
    """What to remember of a call; None if the next one must look its signature up."""
    if lowered.executable is None or not lowered.is_direct(len(args)):
        return None
    for leaf in args:
        buffer = known.get(ref(leaf._node)) if leaf.__class__ is Tensor else None
        if buffer is None or buffer.device != lowered.device:
            return None
    types = [(leaf._node.type, leaf._requires_grad) for leaf in args]
    return types, mode.grad_enabled, lowered.device, lowered, lowered.numerics


def buffers_of(args: Sequence[Any], before: LastCall) -> list[Buffer] | None:
    """The Buffers of a call like the one before; None if it is not."""
    types, recorded, device, _, numerics = before
    if mode.grad_enabled is not recorded or config().numerics != numerics:
        return None
    found: list[Buffer] = []
    for leaf, (type_, tracked) in zip(args, types):
        if leaf.__class__ is not Tensor or leaf._requires_grad is not tracked:
            return None
        node = leaf._node
        buffer = known.get(ref(node))
        if node.type is not type_ or buffer is None or buffer.device != device:
            return None
        found.append(buffer)
    return found

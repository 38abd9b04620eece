"""Whole numbers as people give them: sizes, axes, counts and offsets.

NumPy's integers, arrays of one integer without axes and integer Tensors stand for ints, by
`__index__`, as in PyTorch. Invariant: what comes out is an int or a size that is an expression;
floats and bools are a user error that names the op.
"""

from __future__ import annotations

from operator import index
from typing import Any

from ..core.errors import DTypeError
from .symbol import Expr


def whole(value: Any, op: str, what: str) -> Any:
    """An int; an expression as it is."""
    if value.__class__ is int or isinstance(value, Expr):
        return value
    try:
        if not isinstance(value, bool):
            return index(value)
    except TypeError:
        pass  # NumPy says so of floats, bools and arrays with axes
    raise DTypeError(f"{what} is not an int", op=op, expected="int", got=type(value).__name__)


def is_one(value: Any) -> bool:
    """Whether it stands for one number, where several may be given."""
    if value.__class__ is tuple or value.__class__ is list:
        return False
    if hasattr(value, "__index__"):
        return not getattr(value, "ndim", 0)
    return not hasattr(value, "__iter__")


def wholes(value: Any, op: str, what: str, none: bool = False) -> tuple[Any, ...]:
    """Ints of one number or of several; with `none`, a None stays one."""
    given = (value,) if is_one(value) else value
    return tuple([v if none and v is None else whole(v, op, what) for v in given])


__all__ = ["is_one", "whole", "wholes"]

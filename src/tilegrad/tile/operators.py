"""Python's operators on values, each of which is an elementwise op.

Invariant: a class that has these says in `operate` what an op of its values is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Operator = Callable[[Any, Any], Any]


def _operator(name: str) -> Operator:
    return lambda self, other: self.operate(name, self, other)


def _mirrored(name: str) -> tuple[Operator, Operator]:
    """An operator, and the same where the other one stands before it."""
    return _operator(name), lambda self, other: self.operate(name, other, self)


def _function(name: str) -> Callable[[Any], Any]:
    return lambda self: self.operate(name, self)


class Operators:
    """All of Python's operators that are Tile ops; `operate` gives NotImplemented for values that
    it knows nothing of."""

    __slots__ = ()
    operate: Callable[..., Any]

    __add__, __radd__ = _mirrored("add")
    __sub__, __rsub__ = _mirrored("subtract")
    __mul__, __rmul__ = _mirrored("multiply")
    __truediv__, __rtruediv__ = _mirrored("divide")
    __floordiv__, __rfloordiv__ = _mirrored("floor_divide")
    __mod__, __rmod__ = _mirrored("remainder")
    __pow__, __rpow__ = _mirrored("power")
    __and__, __rand__ = _mirrored("bit_and")
    __or__, __ror__ = _mirrored("bit_or")
    __xor__, __rxor__ = _mirrored("bit_xor")
    __lshift__, __rlshift__ = _mirrored("shift_left")
    __rshift__, __rrshift__ = _mirrored("shift_right")
    __lt__, __gt__ = _mirrored("less")
    __le__, __ge__ = _mirrored("less_equal")
    __eq__ = _operator("equal")
    __ne__ = _operator("not_equal")
    __hash__ = object.__hash__
    __neg__, __abs__, __invert__ = map(_function, ("negative", "absolute", "bit_not"))

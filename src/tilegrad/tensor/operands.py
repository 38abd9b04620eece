"""The operands of elementwise functions: checked, promoted, broadcast.

Invariant: promotion is PyTorch's, Python numbers and Tensors without axes included; a Python
float stays exact next to low precision.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core import dtype as dtypes
from ..core.dtype import DType, promote_scalar
from ..core.errors import DTypeError
from ..graph import build
from ..ir.node import Node, Op
from ..ir.symbol import Expr
from .tensor import Tensor, lift, operand, wrap


def checked(op: str, *values: Any) -> None:
    """Refuse operands that are neither Tensors, arrays nor numbers."""
    for value in values:
        if isinstance(value, (Tensor, bool, int, float, np.ndarray, np.generic, Expr)):
            continue
        if type(value).__module__ == "torch":
            continue
        raise DTypeError(
            "operand is not a Tensor or a number",
            op=op,
            expected="Tensor, array, bool, int or float",
            got=type(value).__name__,
            hint="tilegrad.tensor(...) makes a Tensor of a list",
        )


def binary(op: Op, a: Any, b: Any, name: str = "") -> Tensor:
    """An op of two operands as a Tensor."""
    left, right, dtype = paired(name or op.name, a, b, op.category == "binary")
    result = op(left, right)
    return wrap(build.cast(result, dtype) if op.category == "binary" else result, a, b)


def paired(op: str, a: Any, b: Any, exact: bool = True) -> tuple[Node, Node, DType]:
    """Two operands promoted and broadcast, and the dtype to give back.

    A Python float that a low precision does not hold exactly stays exact: arithmetic is done in
    float32, as in PyTorch. A comparison rounds it: 0.1 equals the 0.1 of a Tensor.
    """
    checked(op, a, b)
    left, right = operand(a), operand(b)
    nodes = build.promoted(op, left, right)
    dtype = nodes[0].dtype
    for value in (left, right):
        if exact and isinstance(value, float) and dtype.is_float and dtype.bits < 32:
            with np.errstate(over="ignore"):
                held = float(dtype.numpy.type(value))
            if held != value:
                wide = [
                    build.cast(v, dtypes.float32) if isinstance(v, Node) else v
                    for v in (left, right)
                ]
                nodes = build.promoted(op, *wide)
    return nodes[0], nodes[1], dtype


def number_for(number: Any, dtype: DType) -> Any:
    """A Python number beside a Tensor whose dtype the result keeps: whole beside integers."""
    return number if dtype.is_float or not isinstance(number, float) else int(number)


def promoted_like(value: Any, x: Tensor) -> Tensor:
    """A value to compare with a Tensor: a number in the dtype both promote to."""
    if isinstance(value, (bool, int, float)):
        return lift(value, promote_scalar(x.dtype, value))
    return lift(value)


def common(op: str, *values: Any) -> tuple[list[Tensor], DType]:
    """Operands promoted and broadcast together, at least float32, and the dtype to give back."""
    checked(op, *values)
    given = [operand(v) for v in values]
    dtype = build.promoted(op, *given)[0].dtype
    if not dtype.is_float:
        dtype = dtypes.float32
    wide = dtypes.float32 if dtype.bits < 32 else dtype
    nodes = [build.cast(g, wide) if isinstance(g, Node) else g for g in given]
    return [wrap(n, v) for n, v in zip(build.promoted(op, *nodes), values)], dtype

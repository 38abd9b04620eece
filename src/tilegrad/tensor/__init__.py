"""Tensors and the functions on them; importing the folder attaches every method to `Tensor`.

The functions themselves are public as `tilegrad.<name>`. Invariant: this folder, called, is
`creation.tensor`, so that both `tilegrad.tensor([1, 2])` and `tilegrad.tensor.jit` work.
"""

import sys
from types import ModuleType
from typing import Any

from . import (
    activation,
    compare,
    convert,
    creation,
    cumulative,
    distance,
    einsum,
    elementwise,
    index,
    interop,
    maths,
    matmul,
    movement,
    padding,
    pieces,
    random,
    reduce,
    select,
    sort,
    special,
)
from .tensor import Tensor, grad_mode, is_symbolic, no_grad, realize


class _Callable(ModuleType):
    def __call__(self, data: Any, **options: Any) -> Tensor:
        return creation.tensor(data, **options)


sys.modules[__name__].__class__ = _Callable

__all__ = [
    "Tensor", "activation", "compare", "convert", "creation", "cumulative", "distance",
    "einsum",
    "elementwise", "grad_mode", "index", "interop", "is_symbolic", "maths", "matmul", "movement",
    "no_grad", "padding", "pieces", "random", "realize", "reduce", "select", "sort", "special",
]  # fmt: skip

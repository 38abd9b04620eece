"""Typed shapes."""

# ruff: noqa: F821, UP037

from __future__ import annotations

import numpy as np
import pytest

from tilegrad.core.dtype import bfloat16, float32
from tilegrad.core.errors import DTypeError, ShapeError, UserError
from tilegrad.ir.symbol import symbol
from tilegrad.tensor import elementwise, matmul, movement, reduce  # noqa: F401
from tilegrad.tensor.annotation import Annotation, annotation, typed
from tilegrad.tensor.jit import jit
from tilegrad.tensor.tensor import Tensor


def ones(*shape: int, dtype=np.float32) -> Tensor:
    return Tensor(np.ones(shape, dtype))


def test_annotation_reads_back():
    made = Tensor["B", "S", 64, bfloat16]
    assert isinstance(made, Annotation)
    assert repr(made) == "Tensor['B', 'S', 64, bfloat16]"
    assert repr(Tensor[..., "D", "f32"]) == "Tensor[..., 'D', float32]"
    assert repr(Tensor["N"]) == "Tensor['N']"
    with pytest.raises(DTypeError, match="names, sizes and a dtype"):
        annotation(("B", 1.5))
    with pytest.raises(UserError, match="does not make them"):
        made()


def test_typed_checks_names_across_arguments_and_result():
    @typed
    def f(x: Tensor["B", "D"], w: Tensor["D", "E"], scale: float = 1.0) -> Tensor["B", "E"]:
        return x @ w if scale == 1.0 else (x @ w).sum(0)

    assert f(ones(2, 3), ones(3, 4)).shape == (2, 4)
    with pytest.raises(
        ShapeError,
        match=r"f: argument w has another size on axis 0(.|\n)*"
        r"Tensor\['D', 'E'\] with D = 3, as in argument x(.|\n)*"
        r"got: float32 \(5, 4\)(.|\n)*at .*test_annotation.py:\d+",
    ):
        f(ones(2, 3), ones(5, 4))
    with pytest.raises(ShapeError, match="the result has another number of axes"):
        f(ones(2, 3), ones(3, 4), scale=2.0)
    with pytest.raises(DTypeError, match=r"argument x is not a Tensor(.|\n)*got: int"):
        f(3, ones(3, 4))


def test_dtype_literals_and_leading_axes():
    @typed
    def f(x: Tensor[..., "S", 4, float32], y: Tensor["S"] = None):
        return x

    assert f(ones(7, 2, 3, 4)).shape == (7, 2, 3, 4)
    f(ones(3, 4), ones(3))
    with pytest.raises(DTypeError, match=r"argument x has another dtype(.|\n)*float64 \(3, 4\)"):
        f(ones(3, 4, dtype=np.float64))
    with pytest.raises(ShapeError, match="argument x has another size on axis 2"):
        f(ones(2, 3, 5))
    with pytest.raises(ShapeError, match="another number of axes"):
        f(ones(4))
    with pytest.raises(ShapeError, match="with S = 3"):
        f(ones(3, 4), ones(2))


def test_symbols_in_annotations():
    size = symbol("S", 2, 8)

    @jit
    def f(x: Tensor[size, 4], y: Tensor["S"]) -> Tensor["S"]:
        return x.sum(1) + y

    for n in (2, 5, 8):
        assert f(ones(n, 4), ones(n)).shape == (n,)
    assert f.traces == 1
    with pytest.raises(ShapeError, match="2 <= S <= 8"):
        f(ones(9, 4), ones(9))
    with pytest.raises(ShapeError, match=r"S = 3, as in argument x(.|\n)*S = 4"):
        f(ones(3, 4), ones(4))
    with pytest.raises(UserError, match=r"annotation Tensor\[unknown\] cannot be read"):

        @typed
        def g(x: Tensor[unknown]):
            return x


def test_jit_checks_annotations():
    @jit
    def f(x: Tensor["N", float32], y: Tensor["N"]) -> Tensor["N"]:
        return x + y

    assert f(ones(3), ones(3)).shape == (3,)
    with pytest.raises(ShapeError, match=r"argument y(.|\n)*N = 3, as in argument x"):
        f(ones(3), ones(1))
    with pytest.raises(DTypeError, match="argument x has another dtype"):
        f(ones(3, dtype=np.float64), ones(3))
    bad = jit(lambda x: x)
    bad.result_annotation = Tensor[5]
    with pytest.raises(ShapeError, match="the result has another size"):
        bad(ones(3))

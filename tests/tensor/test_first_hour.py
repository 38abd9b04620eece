"""Mistakes of the first hour, as people who come from torch make them: each is told with what was
expected, what came and, where it helps, the nearest name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tilegrad as tg
from tilegrad import nn, optim
from tilegrad.core.errors import MemoryLimitError, UserError

CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "sizes for data": (lambda: tg.Tensor(2, 3), "zeros() and ones() take sizes"),
    "dtype of to": (lambda: tg.ones(3).to("flaot32"), "did you mean float32?"),
    "dtype": (lambda: tg.ones(3, dtype="bflot16"), "did you mean bfloat16?"),
    "device": (lambda: tg.ones(3, device="cdua"), "did you mean cuda?"),
    "device of to": (lambda: tg.ones(3).to("gpu:0"), "no such device"),
    "one CPU": (lambda: tg.ones(3).to("cpu:3"), "no such device"),
    "a Tensor": (lambda: optim.SGD(tg.ones(3), lr=0.1), "[parameter]"),
    "a Module": (lambda: optim.AdamW(nn.Linear(2, 3), lr=0.1), "model.parameters()"),
    "Modules": (lambda: optim.Adam(nn.Sequential(nn.ReLU()), lr=0.1), "model.parameters()"),
    "a number": (lambda: optim.SGD(3, lr=0.1), "a list of float Tensors"),
    "a state dict": (lambda: optim.SGD(nn.Linear(2, 3).state_dict(), lr=1), "float Tensors"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_mistake(name: str) -> None:
    work, said = CASES[name]
    with pytest.raises(UserError) as told:
        work()
    assert said in str(told.value), told.value
    assert "expected" in str(told.value) and "got" in str(told.value)
    assert __file__ in str(told.value), "the line is the person's"


def test_what_is_computed_is_not_trained() -> None:
    weight = tg.ones(3, requires_grad=True) * 0.1
    with pytest.raises(UserError, match="gets no gradient"):
        optim.SGD([weight], lr=0.1)
    leaf = weight.detach()
    leaf.requires_grad = True
    optim.SGD([leaf], lr=0.1)


def test_a_gradient_has_the_shape_of_its_tensor() -> None:
    x = tg.ones(3, requires_grad=True)
    for wrong in (3, tg.ones(4), [1.0, 2.0, 3.0]):
        with pytest.raises(UserError, match=r"expected: None, or a Tensor of shape \(3,\)"):
            x.grad = wrong  # type: ignore[assignment]
    x.grad = tg.ones(3)
    x.grad = None


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot write the file: No such file") as told:
        tg.save(tg.ones(3), tmp_path / "none" / "x.safetensors")
    assert "x.safetensors" in str(told.value) and ".part" not in str(told.value)


@pytest.mark.parametrize("size", [10**15, 10**16, 10**18])
def test_a_tensor_that_no_memory_holds(size: int) -> None:
    with pytest.raises(MemoryLimitError, match="no more memory"):
        (tg.ones(size) + 1).numpy()

"""Gradients of maxima and minima that were read before, while their operands were not kept.

The derivative asks which operand equals the extreme. The Graph of the gradients computes the
operands anew and may round them otherwise, so the extreme that was read must not be what they are
compared with. Here the values that were read are spoilt: no gradient may depend on them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import tilegrad as tg
from tilegrad.tensor.tensor import values

ROWS = [[0, 2, 1, 1], [3, 3, 0, 2], [1, 1, 1, 1]]
CASES: dict[str, Callable[..., object]] = {
    "amax": lambda m, y: m.amax(y, dim=1),
    "amin of all": lambda m, y: m.amin(y, dim=(0, 1)),
    "max": lambda m, y: m.max(y, dim=0).values,
    "cummax": lambda m, y: m.cummax(y, dim=1).values,
    "cummin": lambda m, y: m.cummin(y, dim=0).values,
    "scatter_reduce": lambda m, y: m.scatter_reduce(
        y, 0, m.tensor(ROWS, dtype=m.int64), y[:3].exp() - 1.5, "amax"
    ),
    "a row of an amax": lambda m, y: m.amax(y, dim=1).reshape(1, -1).expand(2, 5),
}


@pytest.mark.parametrize("name", CASES)
def test_what_was_read_does_not_matter(name: str) -> None:
    drawn = np.random.default_rng(7).standard_normal((5, 4)).astype(np.float32)

    def found(m: object, x: object) -> object:
        y = x / (1 + x.square().mean(0)).sqrt()  # type: ignore[attr-defined]
        return CASES[name](m, y)

    x = tg.tensor(drawn).requires_grad_()
    result = found(tg, x)
    read = result.numpy().copy()  # type: ignore[attr-defined]
    kept = values[result._node].array(read.shape, np.float32)  # type: ignore[attr-defined]
    kept[...] = read * np.float32(1 + 2e-7)
    (result * result).sum().backward()  # type: ignore[operator]
    theirs = torch.from_numpy(drawn).requires_grad_()
    expected = found(torch, theirs)
    (expected * expected).sum().backward()  # type: ignore[operator]
    np.testing.assert_allclose(x.grad.numpy(), theirs.grad.numpy(), rtol=2e-5, atol=1e-6)

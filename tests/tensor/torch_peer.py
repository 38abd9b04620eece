"""Run one function in tilegrad and in torch on the same numbers; compare values and gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tilegrad import Tensor

torch = pytest.importorskip("torch")


def random_array(shape: Sequence[int], seed: int = 0) -> np.ndarray[Any, Any]:
    """Reproducible normal numbers."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def close(ours: Any, theirs: Any, tolerance: float = 2e-5, what: str = "") -> None:
    """Assert shape, dtype kind and values."""
    found, wanted = ours.numpy(), theirs.detach().numpy()
    assert found.shape == wanted.shape, what
    assert found.dtype.kind == wanted.dtype.kind, what
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance, err_msg=what)


def compare(
    ours: Callable[..., Any],
    theirs: Callable[..., Any],
    *arrays: Any,
    tolerance: float = 2e-5,
    gradients: bool = True,
) -> None:
    """Both on the arrays (floats are differentiated), value and gradients against each other."""
    mine = [_leaf(Tensor(a), gradients) if _float(a) else Tensor(a) for a in arrays]
    peers = [torch.tensor(a, requires_grad=gradients and _float(a)) for a in arrays]
    found, wanted = ours(*mine), theirs(*peers)
    close(found, wanted, tolerance, "value")
    if not gradients:
        return
    weights = random_array(tuple(wanted.shape), 7)
    (found * Tensor(weights)).sum().backward()
    (wanted * torch.tensor(weights)).sum().backward()
    for i, (a, b) in enumerate(zip(mine, peers)):
        if b.grad is not None:
            assert a.grad is not None, f"gradient {i}"
            close(a.grad, b.grad, tolerance, f"gradient {i}")


def _float(array: Any) -> bool:
    return np.asarray(array).dtype.kind == "f"


def _leaf(tensor: Tensor, wanted: bool) -> Tensor:
    tensor.requires_grad = wanted
    return tensor

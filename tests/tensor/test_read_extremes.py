"""A maximum that was read is computed anew beside what a derivative compares it with."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import tilegrad as tg
import tilegrad.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent / "targets"))

from recorded import recording


@pytest.mark.parametrize("keep", [False, True], ids=["cut", "kept"])
@pytest.mark.parametrize("name", ["amax", "amin"])
def test_no_graph_is_given_the_extreme(name: str, keep: bool) -> None:
    """Its Graph reads x alone: another one may round operands otherwise, and none is equal then."""
    values = np.random.default_rng(0).standard_normal((2, 5, 5)).astype(np.float32)
    x = tg.tensor(values, requires_grad=True)
    with recording() as recorder:
        y = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        top = getattr(y, name)(dim=(0, 1), keepdim=keep)
        top.numpy()
        top.sum().backward()
        assert x.grad is not None and np.isfinite(x.grad.numpy()).all()
    whole = [c for c in recorder.cases.values() if tuple(c.output.shape) == values.shape]
    given = [n for c in whole for n in c.inputs if n.dtype is tg.float32 and np.prod(n.shape) > 1]
    assert given and all(n.shape[-2:] == (5, 5) for n in given)

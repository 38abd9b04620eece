"""A norm of the last axis is found as people write it, and nothing else is taken for one."""

from __future__ import annotations

from typing import Any

import pytest

import tilegrad as tg
from tilegrad.graph import ops
from tilegrad.graph.recognize_norm import last_norm
from tilegrad.nn.functional import rms_norm
from tilegrad.tensor.tensor import lift

X = lift(tg.zeros((3, 4, 8), dtype=tg.bfloat16))
WEIGHT = lift(tg.tensor([1.0, 2.0] * 4)).to(tg.bfloat16).realize()


def test_found_with_all_that_it_says() -> None:
    found = last_norm(rms_norm(X, 8, WEIGHT, 1e-5).node)
    assert found is not None
    assert found.source is X.node and found.weight is WEIGHT.node
    assert found.epsilon == pytest.approx(1e-5)


OTHERS: dict[str, Any] = {
    "no weight": lambda: rms_norm(X, 8, None, 1e-5),
    "a weight that is computed": lambda: rms_norm(X, 8, WEIGHT + WEIGHT, 1e-5),
    "more than the last axis": lambda: rms_norm(X, (4, 8), lift(tg.ones((4, 8))), 1e-5),
    "a norm and more": lambda: rms_norm(X, 8, WEIGHT, 1e-5) * 2.0,
    "wider than its source": lambda: rms_norm(X.to(tg.float32), 8, WEIGHT, 1e-5),
}


@pytest.mark.parametrize("label", OTHERS)
def test_others_are_not(label: str) -> None:
    node = OTHERS[label]().node
    assert node.op in (ops.cast, ops.multiply) and last_norm(node) is None

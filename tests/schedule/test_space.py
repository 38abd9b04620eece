"""schedule/space.py: along which elements vectors run."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import tilegrad as tg
from tilegrad.compiler.compile import host, schedule_for
from tilegrad.schedule.schedule import Launch
from tilegrad.tile.check import walk


def memory_ops(shape: tuple[int, ...], index: tuple[int, ...]) -> Counter[str]:
    """What x[i] does to memory on this CPU."""
    x, i = tg.zeros(shape), tg.zeros(index, dtype=tg.int64)
    lowered = tg.jit(lambda x, i: x[i]).lower(x, i)
    schedule = schedule_for(lowered.inputs, lowered.outputs, host())
    bodies = [s.body for k in schedule.kernels for s in k.steps if isinstance(s, Launch)]
    names = (n.op.name for body in bodies for n, _ in walk(body.block))
    return Counter(name for name in names if name in ("load", "gather", "store", "scatter"))


@pytest.mark.parametrize(
    "shape, index",
    [
        ((32, 768, 256), (40,)),
        ((50000, 512), (3, 7)),
        ((64, 48), (5,)),
    ],
)
def test_rows_by_number_are_read_as_lines(shape: tuple[int, ...], index: tuple[int, ...]) -> None:
    """Long rows are copied by vectors, not element by element."""
    assert memory_ops(shape, index) == {"load": 2, "store": 1}


@pytest.mark.parametrize("shape, index", [((50000, 3), (128,)), ((1000,), (64,))])
def test_short_rows_are_gathered(shape: tuple[int, ...], index: tuple[int, ...]) -> None:
    assert memory_ops(shape, index)["gather"]


@pytest.mark.parametrize("shape, index", [((6, 4, 40), (7,)), ((9, 33), (2, 3)), ((9, 3), (5,))])
def test_rows_by_number(shape: tuple[int, ...], index: tuple[int, ...]) -> None:
    random = np.random.default_rng(0)
    x, i = random.standard_normal(shape).astype(np.float32), random.integers(0, shape[0], index)
    found = tg.jit(lambda x, i: x[i] * 2.0)(tg.tensor(x), tg.tensor(i)).numpy()
    np.testing.assert_array_equal(found, x[i] * 2.0)

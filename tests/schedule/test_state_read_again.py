"""schedule/state.py: values that an update writes are never computed of what it has overwritten."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "targets"))

from interpreted import run_interpreted
from recorded import recording

import tilegrad as tg
from tilegrad.core.target import A100, AVX512, H200, NEON, Target

ROWS, COLUMNS = 13, 9
ORDER = np.random.default_rng(1).permutation(ROWS)
INDEX = np.broadcast_to(ORDER[:, None], (2, ROWS, COLUMNS)).copy()
CASES: dict[str, Callable[[Any], Any]] = {
    "scatter": lambda v: tg.scatter(v, 1, tg.tensor(INDEX), v * 2),
    "scattered sums": lambda v: tg.scatter_add(v, 1, tg.tensor(INDEX), v * 2),
    "copied rows": lambda v: tg.index_copy(v, 1, tg.tensor(ORDER), v * 2),
    "added rows": lambda v: tg.index_add(v, 1, tg.tensor(ORDER), v * 2),
    "rows that move by one": lambda v: tg.slice_scatter(v, v[:, :-1] * 2, 1, 1, ROWS),
    "rows turned around": lambda v: tg.slice_scatter(v, v.flip(1) * 2, 1, 0, ROWS),
}


@pytest.mark.parametrize("target", [A100, H200, AVX512, NEON], ids=lambda t: t.name)
@pytest.mark.parametrize("name", CASES)
def test_a_state_that_is_read_again(name: str, target: Target) -> None:
    values = np.random.default_rng(0).standard_normal((8, ROWS, COLUMNS)).astype(np.float32)
    with recording() as recorder:
        state = tg.index_select(tg.tensor(values), 0, tg.tensor([2, 5]))
        CASES[name](state).realize()
    for case in recorder.cases.values():
        given = target.with_cores(2) if not target.has_threads else target
        (got,) = run_interpreted(given, case.inputs, [case.output], case.values)
        np.testing.assert_allclose(got, case.expected, rtol=1e-5, atol=1e-5)

"""Every elementwise function as emitted PTX on the simulator, over the samples of the CPU's test.

The simulator rounds approximations (ex2.approx, rcp.approx) correctly; what their error adds is
in test_ptx_rules.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from simulated import TEXTS, assembled, run_graph  # noqa: F401

import tilegrad as tg

table = pytest.importorskip("accuracy_table")
PARTS = 4
HEAVY = {"where", "isclose"}  # of many operands or constants, told by their parts


def simulated(row: Any, dtype: str, inputs: list[np.ndarray]) -> np.ndarray:
    """A row's results as PTX."""
    arrays = [x.astype(dtype) for x in inputs]
    lowered = tg.jit(lambda *xs: row.call(tg, *xs)).lower(*[tg.tensor(a) for a in arrays])
    if not lowered.outputs:  # the operand itself
        return inputs[0]
    (found,) = run_graph(lowered.inputs, lowered.outputs, arrays)
    return found if found.dtype.kind == "b" else found.astype(np.float64)


@pytest.mark.parametrize("part", range(PARTS))
def test_functions(part: int) -> None:
    wrong = []
    for row in [r for r in table.ROWS if r.count < 3 and r.covers not in HEAVY][part::PARTS]:
        if "float32" in row.dtypes:
            count = 12 if row.count == 1 else 4
            wrong += table.measure(row, "float32", count, few=True, ours=simulated).wrong
    assert not wrong, "\n".join(wrong)


def test_far_ways_are_written_once(assembled: Any) -> None:  # noqa: F811
    x = np.float32([3.0, 1e30, -2e9, 0.1, np.inf, 7e6, np.nan, -1.0] * 40)
    y = np.float32([7.0, 1e-3, 3.0, 2.0, 5.0, -0.1, 1.0, np.inf] * 40)
    inputs = [tg.tensor(x), tg.tensor(y)]
    with np.errstate(all="ignore"):
        cases = (
            (lambda a, b: tg.sin(a) + b * 0.0, np.sin(x.astype(np.float64)) + y * 0.0),
            (lambda a, b: tg.fmod(a, b), np.fmod(x, y)),
        )
    for function, wanted in cases:
        lowered = tg.jit(function).lower(*inputs)
        (got,) = run_graph(lowered.inputs, lowered.outputs, [x, y])
        np.testing.assert_allclose(got, wanted.astype(np.float32), rtol=2e-7)
    assert all(text.count("far_") < 8 for text in TEXTS.values())  # labels and branches of one loop

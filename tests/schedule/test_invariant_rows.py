"""The level `invariant`, compiled: random row-wise programs give a row the same bits whatever the
number of rows, and whether that is known when they are compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from row_programs import RowProgram

import tilegrad as tg
from tilegrad.core.config import override

COUNTS = (1, 3, 40)
MOST = 40


def outputs(program: RowProgram, level: str) -> dict[str, Any]:
    """Results for some numbers of rows, as bits of float32."""
    found = {}
    with override(determinism=level):
        for count in COUNTS:
            x = tg.tensor(program.rows(count)).to(program.dtype)
            found[str(count)] = tg.jit(program.__call__)(x).to(tg.float32).numpy().view(np.uint32)
        run = tg.jit(program.__call__, dynamic={"x": {0: ("rows", 1, 128)}})
        for count in (1, MOST):
            x = tg.tensor(program.rows(count)).to(program.dtype)
            found[f"symbol {count}"] = run(x).to(tg.float32).numpy().view(np.uint32)
    return found


@pytest.mark.parametrize("seed", (0, 1, 2, 4, 8, 9, 12, 17))
def test_rows_do_not_depend_on_their_number(seed: int) -> None:
    program = RowProgram(seed, tg.bfloat16 if seed % 3 == 2 else tg.float32)
    found = outputs(program, "invariant")
    whole = found[str(MOST)]
    assert np.isfinite(whole.view(np.float32)).all()
    for name, got in found.items():
        np.testing.assert_array_equal(got, whole[: len(got)], err_msg=f"{program.names}: {name}")

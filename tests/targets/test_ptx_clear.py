"""clear_rows: zeros in some rows of a place, interpreted, checked, simulated, assembled."""

from __future__ import annotations

import numpy as np
import pytest
from placed_builder import PlacedBuilder
from simulator import simulate

from tilegrad.core.dtype import DType, bfloat16, float32, int32, int64
from tilegrad.core.target import H200
from tilegrad.ir.types import Memory
from tilegrad.targets.ptx.assemble import assemble, find_ptxas
from tilegrad.targets.ptx.emit import emit
from tilegrad.tile import interpret, placed
from tilegrad.tile.build import Body
from tilegrad.tile.prove import check_body


def cleared(rows: int, columns: int, dtype: DType, layout: str, warps: int) -> Body:
    """x with some of its rows zeros, through a place of two stages."""
    b = PlacedBuilder(
        "cleared",
        [
            ("x", Memory((rows, columns), dtype)),
            ("ends", Memory((2,), int32)),
            ("out", Memory((rows, columns), dtype, use="result")),
        ],
    )
    x, ends, out = b.parameters
    place = b.allocate((2, rows, columns), dtype, "shared", layout)

    def meet() -> None:
        b.do(placed.named_sync, number=0, threads=32 * warps)

    def role() -> None:
        start, stop = (
            b.atom("end", b.cast(b.load(ends, (i,)), int64), -1000, 1000) for i in range(2)
        )
        b.write(place, b.load(x, (0, 0), (rows, columns), (0, 1)), 1)
        meet()
        b.clear_rows(place, start, stop, 1)
        meet()
        b.store(out, b.read(place, 1), (0, 0), (0, 1))

    b.role("worker", warps, 0, role)
    return b.finish((1,))


PLACES = [
    (64, 128, bfloat16, "swizzle128", 4),
    (16, 64, bfloat16, "swizzle128", 4),
    (64, 32, bfloat16, "swizzle64", 4),
    (128, 128, bfloat16, "swizzle128", 8),
    (32, 32, float32, "", 4),
]


@pytest.mark.parametrize("rows, columns, dtype, layout, warps", PLACES)
def test_cleared(rows: int, columns: int, dtype: DType, layout: str, warps: int) -> None:
    """Rows from start to before stop, within the place and beyond it."""
    body = cleared(rows, columns, dtype, layout, warps)
    assert not [f for f in check_body(body, H200) if f.rule != "bank_conflict"]
    text, entry = emit(body, "cleared", H200)
    for start, stop in ((0, 0), (3, 9), (-5, 2), (rows - 1, rows + 70), (-1, rows), (9, 3)):
        x = np.random.default_rng(0).standard_normal((rows, columns)).astype(dtype.numpy)
        wanted = x.copy()
        wanted[max(start, 0) : max(stop, 0)] = 0
        for simulated in (False, True):
            given = [x, np.array([start, stop], np.int32), np.full_like(x, 7)]
            if simulated:
                simulate(text, entry, given, policy="random", seed=1)
            else:
                interpret.run(body, given)
            np.testing.assert_array_equal(given[-1], wanted)
    if find_ptxas():
        assemble(text)

"""All rows of quantised weights unpacked on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from simulator import simulate

from tilegrad.core import format as formats
from tilegrad.core.dtype import bfloat16, float32
from tilegrad.core.format import QUANTISED, Format
from tilegrad.core.target import H200
from tilegrad.kernels.quantised import gpu as kernels
from tilegrad.kernels.quantised.shape import QuantisedShape
from tilegrad.targets.ptx.assemble import assemble, find_ptxas
from tilegrad.targets.ptx.emit import emit
from tilegrad.tile.check import verify_body
from tilegrad.tile.interpret import run
from tilegrad.tile.prove import check_body


def parts_of(shape: QuantisedShape, raw: np.ndarray) -> dict[str, np.ndarray]:
    found = kernels.pack(shape, raw)
    return {name: found[name] for name, _, _ in kernels.parts(shape)}


@pytest.mark.parametrize("form", QUANTISED, ids=lambda f: f.name)
def test_values_are_the_formats_own(form: Format) -> None:
    rows, columns = 21, 2 * form.block + (0 if form.block > 32 else 32)
    shape = QuantisedShape(form, rows, columns, 1, float32)
    raw = np.random.default_rng(0).integers(0, 256, (rows, shape.row_bytes), dtype=np.uint8)
    out, body = (
        np.full((rows, columns), np.nan, np.float32),
        kernels.unpack_callee(shape, H200).launches[0][0],
    )
    verify_body(body, "portable", H200)
    assert not [f for f in check_body(body, H200) if f.severity == "error"]
    simulated, parts = out.copy(), list(parts_of(shape, raw).values())
    with np.errstate(all="ignore"):
        run(body, [*parts, out])
        simulate(*emit(body, "entry", H200), [*parts, simulated])
    np.testing.assert_array_equal(out, form.to_float32(raw))
    np.testing.assert_array_equal(simulated, out)


def test_assembled() -> None:
    if find_ptxas() is None:
        pytest.skip("NO PTXAS HERE")
    for form in (formats.Q4_1, formats.Q8_0, formats.Q6_K):
        shape = QuantisedShape(form, 28672, 4096, 1, bfloat16)
        text, _ = emit(kernels.unpack_callee(shape, H200).launches[0][0], "entry", H200)
        assemble(text).check_library("entry")

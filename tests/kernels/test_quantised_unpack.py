"""All rows of quantised weights unpacked on a GPU, and products that do so first."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from quantised_rows import random_rows

from tilegrad.compiler.compile import schedule_for
from tilegrad.core import format as formats
from tilegrad.core.dtype import bfloat16, float32
from tilegrad.core.format import QUANTISED, Format
from tilegrad.core.target import H200
from tilegrad.graph import build
from tilegrad.graph.interpret import interpret
from tilegrad.ir.node import topological
from tilegrad.ir.symbol import symbol
from tilegrad.kernels.quantised import gpu as kernels
from tilegrad.kernels.quantised.gpu_take import unpack
from tilegrad.kernels.quantised.shape import QuantisedShape
from tilegrad.targets.ptx.assemble import assemble, find_ptxas
from tilegrad.targets.ptx.emit import emit
from tilegrad.targets.ptx.simulate import simulate
from tilegrad.tensor import quantised
from tilegrad.tensor.creation import tensor
from tilegrad.tensor.tensor import node_of, wrap
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
    out, body = np.full((rows, columns), np.nan, np.float32), unpack(shape)
    verify_body(body, "portable", H200)
    assert not [f for f in check_body(body, H200) if f.level == "error"]
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
        text, _ = emit(unpack(QuantisedShape(form, 28672, 4096, 1, bfloat16)), "entry", H200)
        assemble(text).check_library("entry")


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, rows: int, columns: int) -> Any:
    """Weights as a GPU's kernels want them, and their values."""
    monkeypatch.setattr(quantised, "_target", lambda device: H200)
    raw = random_rows(formats.Q4_1, rows, columns)
    parts = parts_of(QuantisedShape(formats.Q4_1, rows, columns, 1, bfloat16), raw)
    packed = quantised.Packed(
        formats.Q4_1, (rows, columns), {n: tensor(a) for n, a in parts.items()}, "cpu"
    )
    return packed, formats.Q4_1.to_float32(raw).astype(np.float64)


def test_many_tokens_unpack_first(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, weights = on_a_gpu(monkeypatch, 32, 64)
    tokens = kernels.MANY
    x = np.random.default_rng(1).standard_normal((tokens, 64)).astype(ml_dtypes.bfloat16)
    leaf = tensor(x)
    made = quantised.quantised_matmul(leaf.reshape(2, tokens // 2, 64), packed)
    assert made.shape == (2, tokens // 2, 32) and made.dtype is bfloat16
    known = {node_of(t): t.numpy() for t in (leaf, *packed.parts.values())}
    (found,) = interpret([node_of(made)], known)
    want = x.astype(np.float64) @ weights.T
    error = np.abs(found.reshape(tokens, 32).astype(np.float64) - want)
    assert error.max() <= 2.0**-6 * np.abs(want).max()
    kernels_made = schedule_for(list(known), [node_of(made)], H200).kernels
    assert [k.name.split("_")[0] for k in kernels_made] == ["quantised", "dot"]


@pytest.mark.parametrize(
    ("least", "dtype", "first"),
    [
        (kernels.MANY, bfloat16, True),
        (kernels.MANY - 1, bfloat16, False),
        (1, bfloat16, False),
        (kernels.MANY, float32, False),
    ],
)
def test_which_products_do(
    least: int, dtype: Any, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, _ = on_a_gpu(monkeypatch, 32, 64)
    x = wrap(build.input_((symbol("tokens", least, 8192), 64), dtype))
    made = node_of(quantised.quantised_matmul(x, packed))
    callees = {n.attrs["callee"].name for n in topological([made]) if "callee" in n.attrs}
    assert callees == {"quantised_unpack" if first else "quantised_matmul"}
    monkeypatch.undo()
    assert quantised.unpacked_from(dtype, "cpu") == 0

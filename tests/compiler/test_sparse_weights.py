"""compiler/sparse_weights.py: 2:4 weights through the Graph, against float64."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "schedule"))
sys.path.insert(0, str(Path(__file__).parent.parent / "targets"))

from interpreted import run_interpreted
from simulated import assembled, run_graph
from test_code_products import BF16, Layers, by_token, draw, product, rounded, unpacked

from tilegrad.compiler.breaks import breaks_of
from tilegrad.compiler.compile import schedule_for
from tilegrad.compiler.pipeline import run_pipeline
from tilegrad.compiler.sparse_weights import Kept, parse_kept
from tilegrad.core.config import override
from tilegrad.core.dtype import bfloat16, float32, int64
from tilegrad.core.errors import UserError
from tilegrad.core.format import format_of
from tilegrad.core.kept import positions_of, spread_out
from tilegrad.core.target import A100, H200, Target
from tilegrad.graph import build, ops
from tilegrad.graph.interpret import interpret
from tilegrad.graph.sparse import weights_of
from tilegrad.ir.node import Node, topological
from tilegrad.ir.symbol import symbol
from tilegrad.schedule.schedule import Launch

EIGHT, SIXTEEN = "E4M3_ROW_F32_SPARSE", "BF16_SPARSE"


@pytest.mark.parametrize(
    ("form", "rows", "columns"), [(EIGHT, 144, 288), (EIGHT, 128, 256), (SIXTEEN, 16, 96)]
)
def test_kept(form: str, rows: int, columns: int) -> None:
    """Elements bit for bit, words that say where they were, whole tiles of rows."""
    raw = format_of(form).pack(draw(1, rows, columns))
    made = parse_kept(Kept(form, rows, columns).to_text())
    parts = made.pack(raw)
    assert [(n, parts[n].shape) for n, _, _ in made.parts()] == [(n, s) for n, s, _ in made.parts()]
    fields = format_of(form).split(raw)
    codes = parts["codes"]
    assert codes[:rows].tobytes() == np.ascontiguousarray(fields["codes"]).tobytes()
    assert not codes[rows:].astype(np.float32).any()
    depth = 128 // codes.dtype.itemsize
    places = positions_of(parts["words"], codes.dtype.itemsize, depth)
    first, second = np.moveaxis(places.reshape(len(places), -1, 2), -1, 0)
    assert (first < second).all()
    whole = spread_out(codes, places[:, : columns // 2])[:rows].astype(np.float64)
    whole = whole * parts["scale"][:rows] if "scale" in parts else whole
    np.testing.assert_allclose(whole, unpacked(raw, form), rtol=1e-7)


def test_rows_in_turn() -> None:
    """What is packed by whole tiles is what is packed at once."""
    raw = format_of(EIGHT).pack(draw(1, 300, 64))
    layout = Kept(EIGHT, 300, 64)
    whole, parts = layout.pack(raw), [layout.pack(raw[s : s + 128]) for s in (0, 128, 256)]
    for name, found in whole.items():
        np.testing.assert_array_equal(
            found.view(np.uint8), np.concatenate([p[name] for p in parts]).view(np.uint8)
        )


def test_one_place_for_two() -> None:
    raw = format_of(SIXTEEN).pack(draw(1, 16, 64))
    raw[3, 64] = 0  # the first byte of places
    with pytest.raises(UserError, match="one place"):
        Kept(SIXTEEN, 16, 64).pack(raw)


def test_spread_out_by_ops() -> None:
    """The ordinary ops of other kernels give the same weights."""
    for form, rows, columns in ((EIGHT, 48, 160), (SIXTEEN, 144, 96)):
        layout = Kept(form, rows, columns)
        parts = layout.pack(format_of(form).pack(draw(1, rows, columns)))
        x = build.input_((4, columns), layout.dtype)
        given = [build.input_(shape, dtype) for _, shape, dtype in layout.parts()[:2]]
        size = layout.dtype.size
        dot = ops.sparse_dot(x, *given, rows=rows, depth=128 // size, dtype=float32)
        values = dict(zip(given, (parts["codes"], parts["words"])))
        (found,) = interpret([weights_of(dot)], values)
        places = positions_of(parts["words"], size, 128 // size)[:, : columns // 2]
        wanted = spread_out(parts["codes"], places)[:rows]
        np.testing.assert_array_equal(found.astype(np.float32), wanted.astype(np.float32))


def sparse_dots(results: list[Node], layers: Layers, target: Target) -> list[Node]:
    """The sparse products that a Graph has for a Target."""
    made, _ = run_pipeline(layers.nodes, results, target)
    return [n for n in topological(made) if n.op.name == "sparse_dot"]


def one(m: tuple[int, ...], n: int, k: int, form: str) -> tuple[Layers, Node, np.ndarray]:
    """(inputs, a product in float32, what float64 says)."""
    layers = Layers()
    x = layers.given(draw(1, *m, k).astype(BF16))
    result = product(rounded(x) if form == EIGHT else x, layers.weight(n, k, form), float32)
    values = layers.values[0].astype(np.float32)
    left = by_token(values) if form == EIGHT else values.astype(np.float64)
    return layers, result, left @ unpacked(layers.values[1], form).T


CASES = {
    "tokens x channels": ((20,), 144, 288, EIGHT),
    "bf16": ((20,), 144, 272, SIXTEEN),
    "axes before": ((3, 30), 64, 128, EIGHT),
    "one token": ((1,), 128, 256, EIGHT),
    "more tokens than a tile has": ((300,), 64, 160, SIXTEEN),
}


@pytest.mark.parametrize("name", CASES)
def test_product(name: str) -> None:
    layers, result, wanted = one(*CASES[name])
    assert len(sparse_dots([result], layers, H200)) == 1
    (got,) = run_interpreted(H200, layers.nodes, [result], layers.values)
    assert np.abs(got - wanted).max() <= 1e-3 * np.abs(wanted).max()


def bodies(layers: Layers, results: list[Node], target: Target = H200) -> list[str]:
    """The names of the Bodies' engines: which kernels there are."""
    schedule = schedule_for(layers.nodes, results, target)
    steps = [s for k in schedule.kernels for s in k.steps if isinstance(s, Launch)]
    return [n.op.name for s in steps for n in s.body.block.all_nodes()]


@pytest.mark.usefixtures(assembled.__name__)
@pytest.mark.parametrize(("form", "m", "n", "k"), [(EIGHT, 20, 144, 160), (SIXTEEN, 72, 64, 96)])
def test_simulated(form: str, m: int, n: int, k: int) -> None:
    layers, result, wanted = one((m,), n, k, form)
    (got,) = run_graph(layers.nodes, [result], layers.values, target=H200)
    assert np.abs(got - wanted).max() <= 1e-3 * np.abs(wanted).max()


def test_what_follows_is_the_epilogue() -> None:
    """Bias, a gate and a residual are computed of the products on their way out: two launches of
    products and one that encodes."""
    layers = Layers()
    x = layers.given(draw(1, 40, 128).astype(BF16))
    bias, rest = (layers.given(draw(i, *s).astype(BF16)) for i, s in ((7, (64,)), (8, (40, 64))))
    left = rounded(x)
    gate, up = (product(left, layers.weight(64, 128, EIGHT), bfloat16) for _ in range(2))
    total = build.multiply(build.add(gate, build.broadcast_to(bias, gate.shape)), up)
    result = build.cast(build.add(total, rest), float32)
    (got,) = run_interpreted(H200, layers.nodes, [result], layers.values)
    own = by_token(layers.values[0].astype(np.float32))
    gates, ups = (own @ unpacked(layers.values[i], EIGHT).T for i in (3, 4))
    wanted = (gates + layers.values[1].astype(float)) * ups + layers.values[2].astype(float)
    assert np.abs(got - wanted).max() <= 3e-2 * np.abs(wanted).max()
    schedule = schedule_for(layers.nodes, [result], H200)
    assert len([s for k in schedule.kernels for s in k.steps if isinstance(s, Launch)]) == 3


def test_no_kernel_of_the_library() -> None:
    """Results that no matrix unit stores: weights are spread out by the kernel that multiplies."""
    layers, result, wanted = one((20,), 48, 96, SIXTEEN)
    whole = build.cast(build.multiply(result, 8.0), int64)
    assert len(sparse_dots([whole], layers, H200)) == 1
    assert "matrix_async" not in bodies(layers, [whole])
    (got,) = run_interpreted(H200, layers.nodes, [whole], layers.values)
    assert np.abs(got - np.trunc(8 * wanted)).max() <= 1


def test_other_targets_unpack() -> None:
    layers, result, wanted = one((20,), 48, 96, SIXTEEN)
    assert not sparse_dots([result], layers, A100)
    (got,) = run_interpreted(A100, layers.nodes, [result], layers.values)
    assert np.abs(got - wanted).max() <= 1e-3 * np.abs(wanted).max()


def test_any_number_of_tokens() -> None:
    """A Symbol, and the level invariant: a row's sums are the same with any neighbours."""
    tokens = symbol("T", 1, 2000)
    layers = Layers()
    layers.values.append(draw(1, 9, 96).astype(BF16))
    layers.nodes.append(build.input_((tokens, 96), bfloat16))
    result = product(layers.nodes[0], layers.weight(64, 96, SIXTEEN), float32)
    assert breaks_of([result], H200) == {"T": (65, 129, 193, 257)}
    assert breaks_of([result], A100) == {"T": (32,)}
    with override(determinism="invariant"):
        (got,) = run_interpreted(H200, layers.nodes, [result], layers.values, {"T": 9})
        few = [layers.values[0][:2], layers.values[1]]
        (less,) = run_interpreted(H200, layers.nodes, [result], few, {"T": 2})
    np.testing.assert_array_equal(got[:2], less)
    wanted = layers.values[0].astype(float) @ unpacked(layers.values[1], SIXTEEN).T
    assert np.abs(got - wanted).max() <= 1e-3 * np.abs(wanted).max()

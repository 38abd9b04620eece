"""compiler/block_weights.py: fp8 with scales of blocks through the Graph, against float64."""

from __future__ import annotations

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "schedule"))
sys.path.insert(0, str(Path(__file__).parent.parent / "targets"))

from interpreted import run_interpreted
from simulated import assembled, run_graph
from test_code_products import BF16, Layers, draw, norm, product, rounded, silu, unpacked

from tilegrad.compiler.block_weights import Blocks, parse_blocks
from tilegrad.compiler.breaks import breaks_of
from tilegrad.compiler.compile import schedule_for
from tilegrad.compiler.pipeline import run_pipeline
from tilegrad.core.config import override
from tilegrad.core.dtype import bfloat16, float32, int32, int64, uint8
from tilegrad.core.errors import InternalError, UserError
from tilegrad.core.format import format_of
from tilegrad.core.target import A100, H200, Target
from tilegrad.graph import build, ops
from tilegrad.graph.blocks import grain_of, operand_of, scales_of
from tilegrad.graph.interpret import interpret
from tilegrad.ir.node import Node, topological
from tilegrad.ir.symbol import symbol
from tilegrad.schedule.schedule import Launch

BLOCKS, TOKENS = "E4M3_128X128_F32", "E4M3_G128_F32"


def weight(layers: Layers, n: int, k: int, form: str = BLOCKS) -> Node:
    """Unpacked weights of any number of rows, and their bytes."""
    whole = draw(len(layers.nodes), -(-n // 128) * 128, k, scale=k**-0.5)
    raw = format_of(form).pack(whole * (1 + np.arange(len(whole))[:, None] // 128))[:n]
    layers.nodes.append(build.input_(raw.shape, uint8))
    layers.values.append(raw)
    return build.unpack(layers.nodes[-1], form, bfloat16)


def by_groups(values: np.ndarray) -> np.ndarray:
    """Values rounded to codes of each 128 columns, with products by the inverse of the scale."""
    cut = values.astype(np.float32).reshape(*values.shape[:-1], -1, 128)
    most = np.abs(cut).max(-1, keepdims=True)
    inverse = np.float32(448) / np.maximum(most, np.float32(448 * 2.0**-126))
    codes = np.clip(cut * inverse, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return (codes.astype(np.float64) * (most / np.float64(448))).reshape(values.shape)


def one(m: tuple[int, ...], n: int, k: int, form: str = BLOCKS) -> tuple[Layers, Node, np.ndarray]:
    """(inputs, a product in float32, what float64 says)."""
    layers = Layers()
    scales = 1 + 9.0 * (np.arange(k) // 128)
    x = layers.given((draw(1, *m, k) * scales).astype(BF16))
    result = product(rounded(x, TOKENS), weight(layers, n, k, form), float32)
    left = by_groups(layers.values[0].astype(np.float32))
    return layers, result, left @ unpacked(layers.values[1], form).T


def block_dots(results: list[Node], layers: Layers, target: Target) -> list[Node]:
    """The products in blocks that a Graph has for a Target."""
    made, _ = run_pipeline(layers.nodes, results, target)
    return [n for n in topological(made) if n.op is ops.block_dot]


def near(got: np.ndarray, wanted: np.ndarray, off: float = 1e-3) -> None:
    assert np.abs(got - wanted).max() <= off * np.abs(wanted).max()


@pytest.mark.parametrize(
    ("form", "rows"), [(BLOCKS, 256), (BLOCKS, 176), ("E4M3_128X128_BF16", 16)]
)
def test_blocks(form: str, rows: int) -> None:
    """Codes bit for bit, one scale a block, whole blocks of rows; also block by block."""
    layers = Layers()
    weight(layers, rows, 384, form)
    (raw,), layout = layers.values, parse_blocks(Blocks(form, rows, 384).to_text())
    parts = layout.pack(raw)
    assert [(n, parts[n].shape) for n, _, _ in layout.parts()] == [
        (n, s) for n, s, _ in layout.parts()
    ]
    scales = np.repeat(np.repeat(parts["scale"], 128, 0), 128, 1)
    whole = parts["codes"].astype(np.float32) * scales
    np.testing.assert_array_equal(whole[:rows], format_of(form).to_float32(raw))
    assert not parts["codes"][rows:].astype(np.float32).any()
    turns = [layout.pack(raw[s : s + 128]) for s in range(0, rows, 128)]
    for name, found in parts.items():
        in_turn = np.concatenate([p[name] for p in turns])
        np.testing.assert_array_equal(found.view(np.uint8), in_turn.view(np.uint8))


def test_rows_that_share_nothing() -> None:
    """Rows that begin within a block are refused, where else a scale would be another's."""
    layers = Layers()
    weight(layers, 256, 128)
    with pytest.raises(UserError, match="other scales"):
        Blocks(BLOCKS, 192, 128).pack(layers.values[0][64:])


def test_unpacked_by_ops() -> None:
    """The ordinary ops of other kernels give the same operands."""
    rng = np.random.default_rng(0)
    shapes = [(5, 256), (144, 256), (5, 2), (2, 2)]
    values = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    given = [build.input_(v.shape, float32) for v in values]
    dot = ops.block_dot(*given, block=128, rows=128, dtype=float32)
    pair = [operand_of(dot, side) for side in range(2)]
    found, left, right = interpret([dot, *pair], dict(zip(given, values)))
    np.testing.assert_allclose(found, left @ right.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(right[130, 129], values[1][130, 129] * values[3][1, 1])


def test_groups_unpacked_by_ops() -> None:
    """So with weights of groups, of which each has whole blocks."""
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(s).astype(np.float32) for s in [(5, 256), (3, 144, 256)]]
    values += [rng.standard_normal(s).astype(np.float32) for s in [(5, 2), (6, 2)]]
    ends = np.array([0, 2, 2, 5], np.int32)
    x, weights, left, right = (build.input_(v.shape, float32) for v in values)
    offsets = build.input_((4,), int32)
    dot = ops.grouped_dot(x, weights, offsets, left, right, axis=2, block=0)
    assert grain_of(dot) == (72, 128) and scales_of(dot) == (left, right)
    assert ops.group_lists(dot) == () and dot.dtype is float32
    given = dict(zip([x, weights, left, right, offsets], [*values, ends]))
    found, a, b = interpret([dot, *(operand_of(dot, side) for side in range(2))], given)
    wanted = np.concatenate([a[:2] @ b[0].T, a[2:] @ b[2].T])
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    assert b[1, 72, 129] == values[1][1, 72, 129] * values[3][3, 1]
    for shape in ((5, 2), (5, 2)), ((5, 3), (6, 3)), ((4, 2), (6, 2)), ((5, 2), (3, 72)):
        scales = [build.input_(s, float32) for s in shape]
        with pytest.raises(InternalError, match="no factors"):
            ops.grouped_dot(x, weights, offsets, *scales, axis=2, block=0)


CASES = {
    "some tokens": ((20,), 144, 384),
    "axes before": ((3, 30), 64, 128),
    "one token": ((1,), 272, 256),
    "many tokens": ((300,), 256, 256),
}


@pytest.mark.parametrize("name", CASES)
def test_product(name: str) -> None:
    layers, result, wanted = one(*CASES[name])
    assert len(block_dots([result], layers, H200)) == 1
    (got,) = run_interpreted(H200, layers.nodes, [result], layers.values)
    near(got, wanted)


@pytest.mark.usefixtures(assembled.__name__)
@pytest.mark.parametrize(("m", "n", "k"), [(20, 144, 384), (130, 80, 256)])
def test_simulated(m: int, n: int, k: int) -> None:
    layers, result, wanted = one((m,), n, k)
    (got,) = run_graph(layers.nodes, [result], layers.values)
    near(got, wanted)


def launches(layers: Layers, results: list[Node], target: Target = H200) -> list[Launch]:
    schedule = schedule_for(layers.nodes, results, target)
    return [s for k in schedule.kernels for s in k.steps if isinstance(s, Launch)]


def ops_of(found: list[Launch]) -> list[str]:
    return [n.op.name for s in found for n in s.body.block.all_nodes()]


@pytest.mark.parametrize("tokens", [20, 200])
def test_what_is_around(tokens: int) -> None:
    """A norm before, a gate and a residual behind: one launch for the sum of a row, one that
    encodes, one for both products."""
    layers = Layers()
    x = layers.given(draw(1, tokens, 256).astype(BF16))
    factor = layers.given(draw(2, 256).astype(BF16))
    left = rounded(norm(x, factor), TOKENS)
    gate, up = (product(left, weight(layers, 128, 256), bfloat16) for _ in range(2))
    rest = layers.given(draw(8, tokens, 128).astype(BF16))
    result = build.cast(build.add(build.multiply(silu(gate), up), rest), float32)
    (got,) = run_interpreted(H200, layers.nodes, [result], layers.values)
    exact = layers.values[0].astype(np.float64)
    exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5)
    own = by_groups(exact * layers.values[1].astype(np.float64))
    gates, ups = (own @ unpacked(layers.values[i], BLOCKS).T for i in (2, 3))
    near(got, gates / (1 + np.exp(-gates)) * ups + layers.values[4].astype(float), 6e-2)
    assert len(launches(layers, [result])) == 3


def side_by_side(tokens: int, *rows: int) -> tuple[Layers, list[Node], list[np.ndarray]]:
    """Products of one input, in float32: inputs, results, what float64 says."""
    layers = Layers()
    left = rounded(layers.given(draw(1, tokens, 256).astype(BF16)), TOKENS)
    results = [product(left, weight(layers, n, 256), float32) for n in rows]
    exact = by_groups(layers.values[0].astype(np.float32))
    return layers, results, [exact @ unpacked(raw, BLOCKS).T for raw in layers.values[1:]]


@pytest.mark.parametrize("tokens", [1, 20, 200])
def test_side_by_side(tokens: int) -> None:
    """Weights of other sizes, whose last blocks are not whole: one launch."""
    layers, results, wanted = side_by_side(tokens, 144, 80, 16)
    for got, exact in zip(run_interpreted(H200, layers.nodes, results, layers.values), wanted):
        near(got, exact)
    assert len(launches(layers, results)) == 2


@pytest.mark.usefixtures(assembled.__name__)
@pytest.mark.parametrize("gated", [False, True], ids=["apart", "gated"])
def test_side_by_side_simulated(gated: bool) -> None:
    layers, results, wanted = side_by_side(20, 80, 80)
    if gated:
        results = [build.multiply(silu(results[0]), results[1])]
        wanted = [wanted[0] / (1 + np.exp(-wanted[0])) * wanted[1]]
    for got, exact in zip(run_graph(layers.nodes, results, layers.values), wanted):
        near(got, exact, 1e-2 if gated else 1e-3)
    assert len(launches(layers, results)) == 2


def test_no_kernel_of_the_library() -> None:
    """Results that no matrix unit stores: the kernel that multiplies unpacks."""
    layers, result, wanted = one((20,), 48, 128)
    whole = build.cast(build.multiply(result, 8.0), int64)
    assert len(block_dots([whole], layers, H200)) == 1
    assert "matrix_async" not in ops_of(launches(layers, [whole]))
    (got,) = run_interpreted(H200, layers.nodes, [whole], layers.values)
    assert np.abs(got - np.trunc(8 * wanted)).max() <= 1


def test_other_targets_unpack() -> None:
    layers, result, wanted = one((20,), 48, 128)
    assert not block_dots([result], layers, A100)
    (got,) = run_interpreted(A100, layers.nodes, [result], layers.values)
    near(got, wanted, 1e-2)


def test_any_number_of_tokens() -> None:
    """A Symbol, and the level invariant: a row's sums are the same with any neighbours."""
    tokens = symbol("T", 1, 2000)
    layers = Layers()
    layers.values.append(draw(1, 77, 256).astype(BF16))
    layers.nodes.append(build.input_((tokens, 256), bfloat16))
    result = product(rounded(layers.nodes[0], TOKENS), weight(layers, 144, 256), float32)
    assert breaks_of([result], H200) == {"T": (65, 129, 193, 257)}
    wanted = by_groups(layers.values[0].astype(np.float32)) @ unpacked(layers.values[1], BLOCKS).T
    (got,) = run_interpreted(H200, layers.nodes, [result], layers.values, {"T": 77})
    near(got, wanted)
    with override(determinism="invariant"):
        (got,) = run_interpreted(H200, layers.nodes, [result], layers.values, {"T": 77})
        few = [layers.values[0][:2], layers.values[1]]
        (less,) = run_interpreted(H200, layers.nodes, [result], few, {"T": 2})
        assert "matrix_async" in ops_of(launches(layers, [result]))
    near(got, wanted)
    np.testing.assert_array_equal(got[:2], less)

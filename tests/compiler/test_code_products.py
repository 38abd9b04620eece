"""compiler/code_products.py: products of fp8 and of int8 through the Graph, against float64 of
what is unpacked.

Schedules for an H200 run on the Tile interpreter, one on the PTX simulator; what an 8B model's
layer has is assembled. Products of exact inputs are held to 1e-3 of float64, and those of int8 to
the rounding of their scales: their sums are exact.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "schedule"))
sys.path.insert(0, str(Path(__file__).parent.parent / "targets"))

from assembled import assemble_all
from interpreted import run_interpreted
from simulated import assembled, run_graph

from tilegrad.compiler.breaks import breaks_of
from tilegrad.compiler.compile import schedule_for
from tilegrad.compiler.pipeline import run_pipeline
from tilegrad.core.config import override
from tilegrad.core.dtype import bfloat16, float32, int8, int32, uint8
from tilegrad.core.errors import UserError
from tilegrad.core.format import format_of
from tilegrad.core.scaled import most_of, pack_array
from tilegrad.core.target import A100, AVX512, AVX512_AMX, H200, NEON
from tilegrad.graph import build, ops
from tilegrad.graph.interpret import interpret
from tilegrad.ir.node import Node
from tilegrad.ir.symbol import symbol
from tilegrad.schedule.schedule import Launch
from tilegrad.targets.ptx.assemble import find_ptxas
from tilegrad.targets.ptx.emit import emit
from tilegrad.tile.check import walk

BF16 = ml_dtypes.bfloat16
ROW, TENSOR, INT8 = "E4M3_ROW_F32", "E4M3_TENSOR_F32", "INT8_ROW_F32"


def draw(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape) * scale


class Layers:
    """A Graph under construction: its inputs, and what they hold."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.values: list[np.ndarray] = []

    def given(self, value: np.ndarray) -> Node:
        kinds = {np.dtype(BF16): bfloat16, np.dtype(np.float32): float32}
        self.nodes.append(build.input_(value.shape, kinds[value.dtype]))
        self.values.append(value)
        return self.nodes[-1]

    def weight(self, rows: int, columns: int, form: str = ROW) -> Node:
        """Unpacked weights, and their bytes."""
        raw = format_of(form).pack(draw(len(self.nodes), rows, columns, scale=columns**-0.5))
        self.nodes.append(build.input_(raw.shape, uint8))
        self.values.append(raw)
        return build.unpack(self.nodes[-1], form, bfloat16)


def rounded(x: Node, form: str = ROW, scale: Node | None = None) -> Node:
    return build.unpack(build.pack(x, form, scale), form, x.dtype)


def product(x: Node, weight: Node, dtype: object = None) -> Node:
    return build.dot(x, weight, ((), ()), ((len(x.shape) - 1,), (1,)), dtype)  # type: ignore[arg-type]


def norm(x: Node, weight: Node) -> Node:
    wide = build.cast(x, float32)
    mean = build.multiply(build.sum_(build.multiply(wide, wide), 1, keep=True), 1.0 / x.shape[-1])
    root = build.unary(ops.square_root, build.add(mean, 1e-5))
    scaled = build.multiply(wide, build.unary(ops.reciprocal, root))
    return build.cast(build.multiply(scaled, build.cast(weight, float32)), x.dtype)


def silu(x: Node) -> Node:
    below = build.add(build.unary(ops.exp, build.multiply(x, -1.0)), 1.0)
    return build.multiply(x, build.unary(ops.reciprocal, below))


def unpacked(raw: np.ndarray, form: str) -> np.ndarray:
    return format_of(form).to_float32(raw).astype(np.float64)


def by_token(values: np.ndarray, scale: float | None = None, form: str = ROW) -> np.ndarray:
    """Values rounded to codes of their row, or of a scale: as `pack` has it, but for ties, which go
    where a product with the inverse of the scale takes them."""
    most = np.abs(values).max(-1, keepdims=True).astype(np.float32)
    limit, eight = np.float32(most_of(format_of(form))), form == INT8
    top = limit
    if scale is not None:
        most, top = np.full_like(most, scale), np.float32(1)
    inverse = np.where(most == 0, np.float32(1), top / np.where(most == 0, 1, most))
    codes = np.clip(values.astype(np.float32) * inverse, -limit, limit)
    codes = np.rint(codes) if eight else codes.astype(ml_dtypes.float8_e4m3fn)
    return codes.astype(np.float64) * (most / np.float64(top))


def test_ties() -> None:
    """Codes that differ from those of `pack` are as near to what they stand for."""
    x = draw(1, 300, 400).astype(BF16).astype(np.float32)
    ours, packed = by_token(x), unpacked(pack_array(format_of(ROW), x), ROW)
    off = np.abs(ours - packed) > 1e-6 * np.abs(packed)
    assert off.mean() < 1e-3
    assert np.allclose(np.abs(ours - x)[off], np.abs(packed - x)[off], rtol=1e-5)


def one_product(m: int, n: int, k: int, forms: tuple[str, str], scale: float | None = None):
    """(inputs, results, values, what float64 says) of one product in float32."""
    layers = Layers()
    x = layers.given(draw(1, m, k).astype(BF16))
    fixed = None if scale is None else build.constant(scale, float32)
    same = None if fixed is None else build.broadcast_to(fixed, (1, 1))
    result = product(rounded(x, forms[0], same), layers.weight(n, k, forms[1]), float32)
    values = layers.values[0].astype(np.float32)
    found = None if scale is None else np.full((m, 1), scale, np.float32)
    own = scale is not None or forms[0] in (ROW, INT8)
    given = pack_array(format_of(forms[0]), values, found)
    left = by_token(values, scale, forms[0]) if own else unpacked(given, forms[0])
    return layers, result, left @ unpacked(layers.values[1], forms[1]).T


CASES = {
    "tokens x channels": (20, 144, 272, (ROW, ROW), None),
    "tensors, a fixed scale": (72, 64, 256, (TENSOR, TENSOR), 0.01),
    "a tensor's own scale": (9, 64, 128, (TENSOR, ROW), None),
    "scales in bfloat16": (20, 64, 128, (ROW, "E4M3_ROW_BF16"), None),
    "tokens' scales in bfloat16": (20, 64, 128, ("E4M3_ROW_BF16", ROW), None),
    "tokens' scales in float16": (20, 64, 128, ("E4M3_ROW_F16", ROW), None),
    "powers of two are unpacked": (20, 64, 128, (ROW, "E4M3_ROW_E8M0"), None),
    "one token": (1, 128, 512, (ROW, ROW), None),
    "one token, streamed": (1, 256, 4096, (ROW, ROW), None),
    "one token of odd lines": (1, 264, 6144, (ROW, ROW), None),
    "one token, a fixed scale": (1, 256, 2048, (TENSOR, ROW), 0.01),
    "many tokens": (300, 144, 400, (ROW, TENSOR), None),
    "int8": (20, 144, 272, (INT8, INT8), None),
    "int8, one token": (1, 256, 4096, (INT8, INT8), None),
    "int8, widths of sixteens": (40, 144, 272, (INT8, INT8), None),
    "int8, many tokens": (300, 144, 400, (INT8, "INT8_TENSOR_F32"), None),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_product(name: str) -> None:
    m, n, k, forms, scale = CASES[name]
    layers, result, wanted = one_product(m, n, k, forms, scale)
    (got,) = run_interpreted(H200, layers.nodes, [result], layers.values)
    least = 1e-6 if INT8 in forms else 1e-3
    assert np.abs(got - wanted).max() <= least * np.abs(wanted).max()


@pytest.mark.usefixtures(assembled.__name__)
@pytest.mark.parametrize(
    "m, n, k, form",
    [(20, 144, 272, ROW), (1, 16, 2048, ROW), (1, 16, 4096, ROW), (40, 144, 272, INT8)],
)
def test_simulated(m: int, n: int, k: int, form: str) -> None:
    layers, result, wanted = one_product(m, n, k, (form, form))
    (got,) = run_graph(layers.nodes, [result], layers.values)
    assert np.abs(got - wanted).max() <= (1e-6 if form == INT8 else 1e-3) * np.abs(wanted).max()


def test_sums_of_int8_are_exact() -> None:
    """A plain product of int8 in int32, whose sums float32 does not have."""
    m, n, k = 24, 144, 2048
    a, b = (
        np.random.default_rng(i).integers(-128, 128, s, np.int8)
        for i, s in ((0, (m, k)), (1, (n, k)))
    )
    a[0], b[0] = -128, -128
    given = [build.input_(x.shape, int8) for x in (a, b)]
    (got,) = run_interpreted(H200, given, [product(*given, int32)], [a, b])
    assert np.array_equal(got, a.astype(np.int64) @ b.astype(np.int64).T)


@pytest.mark.usefixtures(assembled.__name__)
def test_simulated_norm() -> None:
    """The norm's factor is behind the product, and cancels out of the codes."""
    layers = Layers()
    x, ones = (layers.given(draw(i, *s).astype(BF16)) for i, s in enumerate([(1, 2048), (2048,)]))
    result = product(rounded(norm(x, ones)), layers.weight(32, 2048), float32)
    (got,) = run_graph(layers.nodes, [result], layers.values)
    wide, factors = (v.astype(np.float64) for v in layers.values[:2])
    root = np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)
    wanted = by_token(wide * factors) / root @ unpacked(layers.values[2], ROW).T
    assert np.abs(got - wanted).max() <= 1e-3 * np.abs(wanted).max()


def test_nothing() -> None:
    """A row of zeros has codes of zeros, of one token and of several."""
    for m in (1, 3):
        layers, result, _ = one_product(m, 32, 2048, (ROW, ROW))
        layers.values[0][0] = 0
        (got,) = run_interpreted(H200, layers.nodes, [result], layers.values)
        assert np.all(got[0] == 0) and np.isfinite(got).all()
        layers.values[0][0, :2] = (1e-36, -5e-37)  # the inverse of its scale would be infinite
        (got,) = run_interpreted(H200, layers.nodes, [result], layers.values)
        weight = unpacked(layers.values[1], ROW)
        wanted = layers.values[0].astype(np.float64)[:1] @ weight.T
        assert np.abs(got[:1] - wanted).max() <= 0.1 * np.abs(wanted).max()


def llama_layer(
    layers: Layers, x: Node, width: int, inner: int, scale: float | None = None, form: str = ROW
) -> Node:
    """A layer whose attention is q * k * v, with inputs of every product rounded by token, or by
    a scale that is given."""

    def weight(rows: int, columns: int) -> Node:
        return layers.weight(rows, columns, form)

    def rounded(x: Node) -> Node:
        if scale is None:
            return build.unpack(build.pack(x, form), form, x.dtype)
        given = build.broadcast_to(build.constant(scale, float32), (1, 1))
        return build.unpack(build.pack(x, TENSOR, given), TENSOR, x.dtype)

    ones = (1 + draw(5, width, scale=0.1)).astype(BF16)
    y = rounded(norm(x, layers.given(ones)))
    q, k, v = (product(y, weight(width, width)) for _ in range(3))
    mixed = build.multiply(build.multiply(q, k), v)
    x = build.add(x, product(rounded(mixed), weight(width, width)))
    y = rounded(norm(x, layers.given(ones)))
    gate, up = (product(y, weight(inner, width)) for _ in range(2))
    gated = rounded(build.multiply(silu(gate), up))
    return build.add(x, product(gated, weight(width, inner)))


def layer_reference(
    values: list[np.ndarray], scale: float | None = None, form: str = ROW
) -> np.ndarray:
    """The same in float64, with the roundings to codes that the recipe asks for and no others."""
    x, first, q, k, v, o, second, gate, up, down = values
    q, k, v, o, gate, up, down = (unpacked(w, form).T for w in (q, k, v, o, gate, up, down))

    def normed(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        root = np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
        return held(x / root * w.astype(np.float64))

    def held(x: np.ndarray) -> np.ndarray:
        return by_token(x.astype(np.float32), scale, form)

    x = x.astype(np.float64)
    y = normed(x, first)
    x = x + held((y @ q) * (y @ k) * (y @ v)) @ o
    y = normed(x, second)
    return x + held((y @ gate) / (1 + np.exp(-(y @ gate))) * (y @ up)) @ down


LAYERS = [  # tokens, width, inner, the scale of inputs, the Format of codes
    (3, 256, 384, None, ROW),
    (70, 256, 384, None, ROW),
    (3, 256, 384, 0.02, ROW),
    (70, 256, 384, 0.02, ROW),
    (3, 256, 384, None, INT8),
    (70, 256, 384, None, INT8),
    pytest.param(1, 2048, 2048, None, ROW, marks=pytest.mark.slow),  # test_simulated_norm is short
    pytest.param(1, 2048, 2048, 0.02, ROW, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("tokens, width, inner, scale, form", LAYERS)
def test_layer(tokens: int, width: int, inner: int, scale: float | None, form: str) -> None:
    """A last bit may turn a code, 1/16 of a value: the Graph's own bf16 roundings do as much."""
    layers = Layers()
    x = layers.given(draw(7, tokens, width).astype(BF16))
    result = llama_layer(layers, x, width, inner, scale, form)
    (got,) = run_interpreted(H200, layers.nodes, [result], layers.values)
    (judge,) = interpret([result], dict(zip(layers.nodes, layers.values)))
    wanted = layer_reference(layers.values, scale, form)
    error, own = (np.abs(x.astype(np.float64) - wanted).mean() for x in (got, judge))
    assert error <= 1.1 * own <= 0.06 * np.abs(wanted).mean()


@pytest.mark.usefixtures(assembled.__name__)
@pytest.mark.parametrize("tokens", [3, 70])
def test_simulated_codes_out(tokens: int) -> None:
    """With a scale that is given, a product's kernel stores the codes of the next one's input."""
    layers, scale = Layers(), build.broadcast_to(build.constant(0.02, float32), (1, 1))
    x = layers.given(draw(1, tokens, 128).astype(BF16))
    first, second = layers.weight(144, 128), layers.weight(64, 144)
    middle = build.unary(ops.tanh, product(rounded(x, TENSOR, scale), first, float32))
    result = product(rounded(middle, TENSOR, scale), second, float32)
    launched = [s for k in schedule_for(layers.nodes, [result], H200).kernels for s in k.steps]
    assert len(launched) == 3  # codes of x, and the products
    (got,) = run_graph(layers.nodes, [result], layers.values)
    x, first, second = layers.values[0].astype(np.float32), *map(of_row, layers.values[1:])
    wanted = by_token(np.tanh(by_token(x, 0.02) @ first.T), 0.02) @ second.T
    assert np.abs(got - wanted).mean() <= 1e-3 * np.abs(wanted).max()


def of_row(raw: np.ndarray) -> np.ndarray:
    return unpacked(raw, ROW)


def launches_of(tokens: int, width: int, inner: int, form: str) -> list[Launch]:
    layers = Layers()
    layers.weight = lambda n, k, form=ROW: build.unpack(  # type: ignore[method-assign]
        layers.nodes.append(build.input_((n, format_of(form).row_bytes(k)), uint8))
        or layers.nodes[-1],
        form,
        bfloat16,
    )
    x = layers.given(np.zeros((tokens, width), BF16))
    result = llama_layer(layers, x, width, inner, form=form)
    schedule = schedule_for(layers.nodes, [result], H200)
    return [s for k in schedule.kernels for s in k.steps if isinstance(s, Launch)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "tokens, form", [(1, ROW), (32, ROW), (2048, ROW), (1, INT8), (2048, INT8)]
)
def test_launches(tokens: int, form: str) -> None:
    """Each norm, and each product, is one launch with what it hands on; all are the library's.
    Products of one token encode it themselves."""
    made = launches_of(tokens, 4096, 14336, form)
    products = [step for step in made if "plan" in step.body.notes]
    rows = [step for step in made if "plan" not in step.body.notes]
    encoding = 0 if tokens == 1 else 4
    assert len(products) <= 5 and len(rows) == encoding, [step.body.name for step in made]
    written = [p.dtype.name for s in rows for p in s.body.parameters if p.type.use == "result"]
    codes = "int8" if form == INT8 else "float8_e4m3"
    assert written.count(codes) == encoding  # with what their scales follow from
    if find_ptxas() is None:
        pytest.skip("NO PTXAS HERE")
    texts = {s.body.name: emit(s.body, s.body.name, H200)[0] for s in made}
    for done in assemble_all(texts, H200.cpu).values():
        for report in done.reports.values():
            least = 8 if form == INT8 else 0  # of q * k * v: sums are int32 first, then float32
            assert max(report.spill_stores, report.spill_loads, report.stack_bytes) <= least


@pytest.mark.parametrize("m, n, k", [(20, 144, 272), (1, 128, 512)])
def test_int8_on_a_cpu(m: int, n: int, k: int) -> None:
    """Tiles of a CPU's units multiply codes of int8; one token is a sum over rows of codes."""
    target = AVX512_AMX.with_cores(2)
    layers, result, wanted = one_product(m, n, k, (INT8, INT8))
    (got,) = run_interpreted(target, layers.nodes, [result], layers.values)
    assert np.abs(got - wanted).max() <= 1e-6 * np.abs(wanted).max()
    schedule = schedule_for(layers.nodes, [result], target)
    bodies = [s.body for kernel in schedule.kernels for s in kernel.steps if isinstance(s, Launch)]
    units = {node.attrs.get("unit") for body in bodies for node, _ in walk(body.block)}
    assert ("tdpbssd" in units) == (m > 1)


@pytest.mark.parametrize("m", [1, 20])
@pytest.mark.parametrize("more", ["+dotprod", ""])
def test_int8_by_products_of_bytes(m: int, more: str) -> None:
    """Arm multiplies codes of int8 with its instruction for bytes, and unpacks them without,
    to bfloat16."""
    target = dataclasses.replace(NEON, features=f"+neon,{more}".rstrip(",")).with_cores(2)
    layers, result, wanted = one_product(m, 48, 80, (INT8, INT8))
    (got,) = run_interpreted(target, layers.nodes, [result], layers.values)
    assert np.abs(got - wanted).max() <= (1e-6 if more else 1e-2) * np.abs(wanted).max()
    bodies = [
        s.body
        for kernel in schedule_for(layers.nodes, [result], target).kernels
        for s in kernel.steps
        if isinstance(s, Launch)
    ]
    found = {node.op.name for body in bodies for node, _ in walk(body.block)}
    assert ("signed_byte_dot" in found) == bool(more)


@pytest.mark.parametrize("target", [A100, AVX512.with_cores(2)], ids=["a100", "avx512"])
def test_without_units(target: object) -> None:
    layers, result, _ = one_product(20, 144, 272, (ROW, ROW))
    _, stages = run_pipeline(layers.nodes, [result], target)  # type: ignore[arg-type]
    (stage,) = (s for s in stages if s.name == "weights")
    assert "product_of_codes" not in stage.fired
    assert any("no matrix unit" in note for note in stage.notes), stage.notes


@pytest.mark.parametrize("kinds", [("E4M3", "E5M2"), ("E5M2", "E4M3"), ("E5M2", "E5M2")])
def test_other_floats(kinds: tuple[str, str]) -> None:
    """Units multiply codes of E5M2 too, and no kernel does: it is said, and they are unpacked."""
    given, form = (f"{kind}_ROW_F32" for kind in kinds)
    layers, result, wanted = one_product(20, 64, 128, (given, form))
    _, stages = run_pipeline(layers.nodes, [result], H200)
    (stage,) = (s for s in stages if s.name == "weights")
    assert "product_of_codes" not in stage.fired
    assert any("are of float8_e4m3 or int8, not of" in note for note in stage.notes), stage.notes
    (got,) = run_interpreted(H200, layers.nodes, [result], layers.values)
    assert np.abs(got - wanted).max() <= 1e-2 * np.abs(wanted).max()


def test_blocks_of_int8_are_unpacked() -> None:
    """Sums of blocks are promoted for fp8 alone."""
    layers, result, wanted = one_product(20, 128, 256, ("INT8_G128_F32", "INT8_128X128_F32"))
    for target in (H200, AVX512_AMX.with_cores(2)):
        _, stages = run_pipeline(layers.nodes, [result], target)
        (stage,) = (s for s in stages if s.name == "weights")
        assert "product_of_codes" not in stage.fired
        assert any("float8_e4m3, not of" in note for note in stage.notes), stage.notes
    (got,) = run_interpreted(H200, layers.nodes, [result], layers.values)
    assert np.abs(got - wanted).max() <= 1e-2 * np.abs(wanted).max()


def test_neighbours() -> None:
    """A scale of all rows would make a request's answer depend on the others."""
    layers, result, _ = one_product(9, 64, 128, (TENSOR, ROW))
    with override(determinism="invariant"), pytest.raises(UserError, match="neighbours"):
        schedule_for(layers.nodes, [result], H200)


def test_any_number_of_tokens() -> None:
    """A step of prompts: other Plans from 129 tokens on, and the same values."""
    layers, tokens = Layers(), symbol("tokens", 1, 2048)
    x = layers.given(draw(1, 77, 128).astype(BF16))
    x = layers.nodes[0] = build.input_((tokens, 128), bfloat16)
    result = product(rounded(x), layers.weight(64, 128), float32)
    assert breaks_of([result], H200) == {"tokens": (65, 129, 193, 257)}
    (got,) = run_interpreted(H200, layers.nodes, [result], layers.values, {"tokens": 77})
    wanted = by_token(layers.values[0].astype(np.float32)) @ unpacked(layers.values[1], ROW).T
    assert np.abs(got - wanted).max() <= 1e-3 * np.abs(wanted).max()


@pytest.mark.parametrize("form", [ROW, INT8])
@pytest.mark.parametrize("tokens", [1, 8, 16])
def test_a_second_result_fits_beside_the_ring(form: str, tokens: int) -> None:
    """A residual and a product, stored rounded and whole: threads exchange the second."""
    rows, columns = 2048, 4096
    x, residual = build.input_((tokens, columns), bfloat16), build.input_((tokens, rows), float32)
    raw = build.input_((rows, format_of(form).row_bytes(columns)), uint8)
    left = build.unpack(build.pack(x, form), form, bfloat16)
    weights = build.unpack(raw, form, bfloat16)
    product = build.cast(build.dot(left, weights, ((), ()), ((1,), (1,)), bfloat16), float32)
    whole = build.add(product, residual)
    schedule = schedule_for([x, residual, raw], [build.cast(whole, bfloat16), whole], H200)
    bodies = [s.body for k in schedule.kernels for s in k.steps if isinstance(s, Launch)]
    assert any("dot" in body.name for body in bodies)
    for body in bodies:
        bytes_ = emit(body, body.name, H200)[1].shared_bytes
        assert bytes_ <= H200.memories["shared"].bytes, body.name

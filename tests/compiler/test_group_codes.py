"""compiler/code_products.py: products of groups of rows (experts) in fp8 and int8, against float64
of what is unpacked.

Schedules for an H200 run on the Tile interpreter, some on the PTX simulator; what a layer of
experts of Qwen3-30B-A3B has in fp8 is assembled. Products of exact inputs are held to 1e-3 of
float64.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from assembled import assemble_all
from interpreted import run_interpreted
from simulated import assembled, run_graph

from tilegrad.compiler.compile import schedule_for
from tilegrad.compiler.pipeline import run_pipeline
from tilegrad.core.config import override
from tilegrad.core.dtype import bfloat16, float32, int32, int64, uint8
from tilegrad.core.format import format_of
from tilegrad.core.target import A100, AVX512, AVX512_AMX, H200, Target
from tilegrad.graph import build, ops
from tilegrad.graph.blocks import scales_of
from tilegrad.graph.interpret import interpret
from tilegrad.ir.node import Node, topological
from tilegrad.ir.symbol import symbol
from tilegrad.kernels.matmul.shape import WidePlan
from tilegrad.models.decoder.config import DecoderConfig
from tilegrad.models.decoder.model import Experts, norm_of
from tilegrad.nn import init
from tilegrad.schedule.schedule import Launch
from tilegrad.targets.ptx.assemble import find_ptxas
from tilegrad.targets.ptx.emit import emit
from tilegrad.tensor.tensor import wrap

BF16 = ml_dtypes.bfloat16
ROW, TENSOR, INT8 = "E4M3_ROW_F32", "E4M3_TENSOR_F32", "INT8_ROW_F32"
BLOCKS = "E4M3_128X128_F32"
INPUTS = {INT8: INT8, BLOCKS: "E4M3_G128_F32"}  # what rows are rounded to, if not by row to e4m3
QWEN3 = {
    "model_type": "qwen3_moe",
    "vocab_size": 1000,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "num_hidden_layers": 1,
}


def draw(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape) * scale


def by_token(values: np.ndarray, form: str = ROW) -> np.ndarray:
    """Values rounded to codes of their row, or of each 128 columns."""
    if form == INPUTS[BLOCKS]:
        return by_token(values.reshape(len(values), -1, 128)).reshape(values.shape)
    top = 127 if form == INT8 else 448
    most = np.abs(values).max(-1, keepdims=True).astype(np.float32)
    codes = np.clip(values.astype(np.float32) * (np.float32(top) / most), -top, top)
    codes = np.rint(codes) if form == INT8 else codes.astype(ml_dtypes.float8_e4m3fn)
    return codes.astype(np.float64) * (most / np.float64(top))


class Case:
    """Rows of groups, of which some have none, times stored weights of their own, in float32."""

    def __init__(self, rows: int, groups: int, columns: int, depth: int, form: str = ROW) -> None:
        self.x = draw(1, rows, depth).astype(BF16)
        whole = -(-groups * columns // 128) * 128  # rows in whole blocks
        drawn = draw(2, whole, depth, scale=depth**-0.5)
        self.raw = format_of(form).pack(drawn)[: groups * columns]
        ends = np.sort(np.random.default_rng(3).integers(0, rows + 1, groups - 1))
        self.offsets = np.array([0, *ends, rows], np.int32)
        if groups > 2:
            self.offsets[2] = self.offsets[1]  # nobody picks it
        self.raw = self.raw.reshape(groups, columns, -1)
        self.form, self.inputs = form, INPUTS.get(form, ROW)

    @property
    def values(self) -> list[np.ndarray]:
        return [self.x, self.raw, self.offsets]

    def nodes(self, rows: object = None) -> list[Node]:
        shape = (self.x.shape[0] if rows is None else rows, self.x.shape[1])
        return [
            build.input_(shape, bfloat16),
            build.input_(self.raw.shape, uint8),
            build.input_(self.offsets.shape, int32),
        ]

    def product(self, x: Node, raw: Node, offsets: Node) -> Node:
        weights = build.unpack(raw, self.form, float32)
        form = self.inputs
        left = build.unpack(build.pack(build.cast(x, float32), form), form, float32)
        return ops.grouped_dot(left, weights, offsets, axis=2, block=0)

    def wanted(self) -> np.ndarray:
        left = by_token(self.x.astype(np.float32), self.inputs)
        return products(left, values_of(self.raw, self.form), self.offsets)

    def check(self, got: np.ndarray) -> None:
        wanted = self.wanted()
        assert np.abs(got - wanted).max() <= 1e-3 * np.abs(wanted).max()


def values_of(raw: np.ndarray, form: str) -> np.ndarray:
    found = format_of(form).to_float32(raw.reshape(-1, raw.shape[-1]))
    return found.astype(np.float64).reshape(*raw.shape[:-1], -1)


def products(x: np.ndarray, weights: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    rows = np.split(x, offsets[1:-1])
    return np.concatenate([part @ own.T for part, own in zip(rows, weights)])


def launches_of(nodes: list[Node], results: list[Node], target: Target = H200) -> list[Launch]:
    schedule = schedule_for(nodes, results, target)
    return [s for k in schedule.kernels for s in k.steps if isinstance(s, Launch)]


CASES = {
    "few rows": (20, 5, 144, 272),
    "one row": (1, 4, 64, 128),
    "many rows": (300, 3, 144, 400),
    "no more rows than groups": (6, 40, 64, 128),
    "scales of tensors": (20, 5, 64, 128, TENSOR),
    "scales in bfloat16": (20, 5, 64, 128, "E4M3_ROW_BF16"),
    "few rows, int8": (20, 5, 144, 272, INT8),
    "one row, int8": (1, 4, 64, 128, INT8),
    "many rows, int8": (300, 3, 144, 400, INT8),
    "no more rows than groups, int8": (6, 40, 64, 128, INT8),
    "few rows, blocks": (20, 5, 256, 384, BLOCKS),
    "one row, blocks": (1, 4, 128, 128, BLOCKS),
    "many rows, blocks": (300, 3, 128, 384, BLOCKS),
    "no more rows than groups, blocks": (6, 40, 128, 256, BLOCKS),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_product(name: str) -> None:
    case = Case(*CASES[name])
    nodes = case.nodes()
    result = case.product(*nodes)
    assert any(isinstance(s.body.notes.get("plan"), WidePlan) for s in launches_of(nodes, [result]))
    (got,) = run_interpreted(H200, nodes, [result], case.values)
    case.check(got)


@pytest.mark.usefixtures(assembled.__name__)
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "sizes",
    [
        (20, 5, 144, 272),
        (1, 4, 64, 128),
        (150, 2, 64, 128),
        (20, 5, 144, 272, INT8),
        (150, 2, 64, 128, INT8),
        (20, 5, 256, 384, BLOCKS),
        (1, 4, 128, 128, BLOCKS),
        (150, 2, 128, 256, BLOCKS),
    ],
)
def test_simulated(sizes: tuple) -> None:
    case = Case(*sizes)
    nodes = case.nodes()
    (got,) = run_graph(nodes, [case.product(*nodes)], case.values)
    case.check(got)


def test_only_picked_weights_count() -> None:
    """Weights and scales of a group without rows may be anything."""
    case = Case(40, 5, 64, 128)
    case.raw[1] = 0xFF
    nodes = case.nodes()
    (got,) = run_interpreted(H200, nodes, [case.product(*nodes)], case.values)
    case.raw[1] = 0
    case.check(got)


@pytest.mark.parametrize("rows", [1, 20])
def test_no_kernel_of_the_library(rows: int) -> None:
    """Results that no matrix unit stores: the kernel that multiplies unpacks blocks."""
    case = Case(rows, 3, 128, 256, BLOCKS)
    nodes = case.nodes()
    result = build.cast(build.multiply(case.product(*nodes), 8.0), int64)
    made, _ = run_pipeline(nodes, [result], H200)
    assert any(scales_of(n) for n in topological(made) if n.op is ops.grouped_dot)
    assert not any("plan" in s.body.notes for s in launches_of(nodes, [result]))
    (got,) = run_interpreted(H200, nodes, [result], case.values)
    assert np.abs(got - np.trunc(8 * case.wanted())).max() <= 1


@pytest.mark.parametrize("form, depth", [(ROW, 128), (BLOCKS, 256)])
def test_symbols(form: str, depth: int) -> None:
    case, tokens = Case(20, 8, 128, depth, form), symbol("tokens", 1, 1000)
    nodes = case.nodes(2 * tokens)
    (got,) = run_interpreted(H200, nodes, [case.product(*nodes)], case.values, {"tokens": 10})
    case.check(got)


@pytest.mark.parametrize("form", [ROW, BLOCKS])
def test_invariant(form: str) -> None:
    """A row's result does not depend on how many others there are."""
    found = []
    for rows in (5, 200):
        case = Case(200, 3, 128, 256, form)
        case.x, case.offsets = case.x[:rows], np.array([0, 5, 5, rows], np.int32)
        nodes = case.nodes()
        with override(determinism="invariant"):
            (got,) = run_interpreted(H200, nodes, [case.product(*nodes)], case.values)
        case.check(got)
        found.append(got[:5])
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("sizes", [(20, 5, 144, 272), (1, 4, 64, 128)], ids=["rows", "one row"])
def test_int8_on_a_cpu_with_units(sizes: tuple[int, ...]) -> None:
    case, target = Case(*sizes, INT8), AVX512_AMX.with_cores(2)
    nodes = case.nodes()
    result = case.product(*nodes)
    _, stages = run_pipeline(nodes, [result], target)
    assert any("groups_of_codes" in stage.fired for stage in stages)
    (got,) = run_interpreted(target, nodes, [result], case.values)
    case.check(got)


@pytest.mark.parametrize(
    "target, sizes, form, why",
    [
        (A100, (20, 3, 64, 128), ROW, "no matrix unit"),
        (AVX512.with_cores(2), (20, 3, 64, 128), ROW, "no matrix unit"),
        (AVX512.with_cores(2), (20, 3, 64, 128), INT8, "no matrix unit"),
        (H200, (20, 3, 64, 136), ROW, "no multiples of 16"),
        (A100, (20, 3, 128, 128), BLOCKS, "no matrix unit"),
        (H200, (20, 4, 160, 128), BLOCKS, "in whole blocks"),
    ],
    ids=["a100", "avx512", "int8 on avx512", "odd sizes", "blocks on a100", "cut blocks"],
)
def test_unpacked(target: Target, sizes: tuple, form: str, why: str) -> None:
    """Where no kernel multiplies codes, weights are unpacked, and it is said why."""
    case = Case(*sizes, form)
    nodes = case.nodes()
    result = case.product(*nodes)
    _, stages = run_pipeline(nodes, [result], target)
    (stage,) = (s for s in stages if s.name == "weights")
    assert "groups_of_codes" not in stage.fired
    assert any(why in note for note in stage.notes), stage.notes
    (got,) = run_interpreted(target, nodes, [result], case.values)
    case.check(got)


# ---- layers of experts --------------------------------------------------------------------------


class Layer:
    """A norm, experts in fp8 and what is added to: its Graph, of inputs that are not there yet."""

    def __init__(
        self, tokens: object, scale: float | None = None, form: str = ROW, **sizes: int
    ) -> None:
        self.form = form
        self.config = DecoderConfig.from_huggingface({**QWEN3, **sizes})
        with init.skipped():
            self.norm = norm_of(self.config, self.config.width, "bfloat16")
            self.experts = Experts(self.config, "bfloat16")
        self.nodes = [build.input_((tokens, self.config.width), bfloat16)]  # type: ignore[arg-type]
        self.depths: dict[Node, int] = {}
        for module in (self.norm, self.experts):
            module.requires_grad_(False)
            for name, parameter in module.named_parameters():
                parameter.node = self.weight(name, tuple(parameter.shape))
        for name in ("gate", "down"):
            given = INPUTS.get(form, form)
            self.experts.round_inputs(name, given if scale is None else TENSOR, scale)
        for _, buffer in self.experts.named_buffers():
            buffer.node = build.broadcast_to(build.constant(scale, float32), (1, 1))
        x = wrap(self.nodes[0])
        self.result = (x + self.experts(self.norm(x))).node

    def weight(self, name: str, shape: tuple[int, ...]) -> Node:
        stored = len(shape) == 3
        bytes_ = (*shape[:-1], format_of(self.form).row_bytes(shape[-1]))
        self.nodes.append(build.input_(*((bytes_, uint8) if stored else (shape, bfloat16))))
        self.depths[self.nodes[-1]] = shape[-1]
        return build.unpack(self.nodes[-1], self.form, bfloat16) if stored else self.nodes[-1]

    def values(self, tokens: int) -> list[np.ndarray]:
        found = [draw(0, tokens, self.config.width).astype(BF16)]
        for number, node in enumerate(self.nodes[1:], 1):
            if node.dtype is uint8:
                *lead, _ = node.shape
                depth = self.depths[node]
                rows = draw(number, int(np.prod(lead)), depth, scale=depth**-0.5)
                found.append(format_of(self.form).pack(rows).reshape(node.shape))
            else:
                found.append((draw(number, *node.shape) * node.shape[-1] ** -0.25).astype(BF16))
        return found


SMALL = {
    "hidden_size": 128,
    "moe_intermediate_size": 144,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}

WHOLE = {**SMALL, "hidden_size": 256, "moe_intermediate_size": 128}  # blocks


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tokens", [1, 3, 70])
@pytest.mark.parametrize("scale, form", [(None, ROW), (0.02, ROW), (None, INT8), (None, BLOCKS)])
def test_layer(tokens: int, scale: float | None, form: str) -> None:
    """A last bit may turn a code, 1/16 of a value: the Graph's own bf16 roundings do as much."""
    layer = Layer(tokens, scale, form, **(WHOLE if form == BLOCKS else SMALL))
    values = layer.values(tokens)
    (got,) = run_interpreted(H200, layer.nodes, [layer.result], values)
    (judge,) = interpret([layer.result], dict(zip(layer.nodes, values)))
    error = np.abs(got.astype(np.float64) - judge.astype(np.float64))
    assert error.mean() <= 0.01 * np.abs(judge.astype(np.float64)).mean()


@pytest.mark.usefixtures(assembled.__name__)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", [ROW, BLOCKS])
@pytest.mark.parametrize("tokens", [1, 5])
def test_layer_simulated(tokens: int, form: str) -> None:
    layer = Layer(tokens, form=form, **{**WHOLE, "hidden_size": 128})
    values = layer.values(tokens)
    (got,) = run_graph(layer.nodes, [layer.result], values)
    (judge,) = interpret([layer.result], dict(zip(layer.nodes, values)))
    error = np.abs(got.astype(np.float64) - judge.astype(np.float64))
    assert error.mean() <= 0.01 * np.abs(judge.astype(np.float64)).mean()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", [ROW, INT8, BLOCKS])
@pytest.mark.parametrize("tokens, most", [(1, 7), (8, 8), (32, 9), (8192, 10)])
def test_launches(tokens: int, most: int, form: str) -> None:
    """Of a layer of Qwen3-30B-A3B: gate and up are one launch, and down one, on codes; rows between
    are encoded once. Nothing spills. Of many rows in blocks registers do not hold the sums of gate
    and up at once: they are two launches."""
    apart = form == BLOCKS and tokens == 8192
    most = most + 2 * apart
    layer = Layer(tokens, form=form)
    made = launches_of(layer.nodes, [layer.result])
    assert len(made) <= most, [s.body.name for s in made]
    wide = [s.body for s in made if "grouped_dot" in s.body.name]
    assert len(wide) == 2 + apart and all(isinstance(b.notes["plan"], WidePlan) for b in wide)
    for body in wide:
        kinds = [p.dtype.name for p in body.parameters if len(p.shape) == 3]
        assert set(kinds) == {"int8" if form == INT8 else "float8_e4m3"}
        assert [p.dtype for p in body.parameters if p.type.use == "result"] == [bfloat16]
    if find_ptxas() is None:
        pytest.skip("NO PTXAS HERE")
    texts = {s.body.name: emit(s.body, s.body.name, H200)[0] for s in made}
    for done in assemble_all(texts, H200.cpu).values():
        for report in done.reports.values():
            assert report.spill_stores == report.spill_loads == report.stack_bytes == 0


def test_rows_are_encoded_before_they_are_sorted() -> None:
    """Each token once: its largest value is found of tokens, not of rows."""
    layer = Layer(64)
    (made,), _ = run_pipeline(layer.nodes, [layer.result], H200)
    largest = [n for n in topological([made]) if n.op is ops.max_]
    assert [n.shape[0] for n in largest] == [64, 512]

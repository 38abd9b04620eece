"""Routing of experts: kernels against the Graph interpreter on every kind of machine and as PTX,
what of plain code is found, and the launches of a layer."""

from __future__ import annotations

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from interpreted import run_interpreted
from judge import compare

sys.path.insert(0, str(Path(__file__).parent.parent / "targets"))

from assembled import assemble_all
from simulated import assembled, check_graph, run_graph  # noqa: F401

import tilegrad as tg
from tilegrad.compiler.compile import schedule_for
from tilegrad.compiler.pipeline import run_pipeline
from tilegrad.core.config import override
from tilegrad.core.dtype import BY_NUMPY, float32
from tilegrad.core.target import A100, AVX512, H200, Target
from tilegrad.graph import build, ops
from tilegrad.graph.interpret import interpret
from tilegrad.ir.node import Node, topological
from tilegrad.ir.symbol import symbol
from tilegrad.models.decoder.config import DecoderConfig
from tilegrad.models.decoder.model import Experts
from tilegrad.schedule.schedule import Launch
from tilegrad.targets.ptx.assemble import find_ptxas
from tilegrad.targets.ptx.emit import emit
from tilegrad.tensor.matmul import group_rows

BF16 = ml_dtypes.bfloat16
MODEL = {
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def scores(tokens: int, experts: int, dtype: object = np.float32) -> np.ndarray:
    return np.random.default_rng(tokens * experts).standard_normal((tokens, experts)).astype(dtype)


def route(count: int, powers: bool = True, whole: bool = True):
    def made(x: Node) -> list[Node]:
        return build.items(ops.route(x, count=count, powers=powers, whole=whole))

    return made


CASES = [(1, 128, 8), (5, 20, 3), (16, 16, 4), (17, 16, 4), (150, 9, 9), (530, 16, 4)]


@pytest.mark.parametrize("target", [A100, H200, AVX512], ids=lambda t: t.name)
@pytest.mark.parametrize("sizes", CASES, ids=str)
def test_kernels(target: Target, sizes: tuple[int, int, int]) -> None:
    tokens, experts, count = sizes
    if target is AVX512 and tokens > 500:
        tokens //= 2  # lanes are interpreted one by one
    x = scores(tokens, experts)
    node = build.input_(x.shape, float32)
    for powers, whole in ((True, True), (False, False)):
        outputs = route(count, powers, whole)(node)
        expected = interpret(outputs, {node: x})
        for made, a, b in zip(outputs, run_interpreted(target, [node], outputs, [x]), expected):
            compare(made, a, b)


@pytest.mark.usefixtures("assembled")
@pytest.mark.parametrize("sizes", [(1, 128, 8), (9, 20, 3), (70, 16, 2)], ids=str)
def test_simulated(sizes: tuple[int, int, int]) -> None:
    tokens, experts, count = sizes
    check_graph(route(count), scores(tokens, experts, BF16))


def test_any_scores() -> None:
    """Equal scores, signed zeros, what is infinite or no number: as a sort has it, and a token's
    experts are never the same."""
    x = scores(6, 12)
    x[0], x[1, ::2], x[1, 1::2] = 1.0, 0.0, -0.0
    x[2, 3:5], x[2, 7], x[3], x[4, 5:] = np.inf, -np.inf, -np.inf, np.nan
    node = build.input_(x.shape, float32)
    outputs = route(5, False, False)(node)
    expected = interpret(outputs, {node: x})
    for found, wanted in zip(run_interpreted(H200, [node], outputs, [x]), expected):
        np.testing.assert_array_equal(found, wanted)
    x[4, 5:] = np.nan  # of a softmax: all of the row
    found = run_interpreted(H200, [node], route(5)(node), [x])
    np.testing.assert_array_equal(np.sort(found[2]), np.arange(30))


def test_symbols() -> None:
    """One kernel for any number of tokens up to a bound."""
    for most, values in ((40, (3, 40)), (300, (1, 65, 200))):
        tokens = symbol("tokens", 1, most)
        node = build.input_((tokens, 16), float32)
        outputs = route(4)(node)
        for value in values:
            x = scores(value, 16)
            expected = interpret(outputs, {node: x}, {"tokens": value})
            found = run_interpreted(H200, [node], outputs, [x], {"tokens": value})
            for made, a, b in zip(outputs, found, expected):
                compare(made, a, b)


# ---- what is found ------------------------------------------------------------------------------


class Layers(tg.nn.Module):
    """Experts one after the other, each added to its input."""

    def __init__(self, count: int, **given: object) -> None:
        super().__init__()
        config = DecoderConfig.from_huggingface({**MODEL, **given})
        self.feeds = tg.nn.ModuleList(Experts(config, "bfloat16") for _ in range(count))

    def forward(self, x: tg.Tensor) -> tg.Tensor:
        for feed in self.feeds:
            x = x + feed(x)
        return x


def lowered(layers: Layers, tokens: int):
    """The Graph of layers, its inputs and their values."""
    draw = np.random.default_rng(tokens)
    x = draw.standard_normal((tokens, layers.feeds[0].gate.shape[2])).astype(BF16)
    with tg.no_grad():
        found = tg.jit(lambda y: layers(y)).lower(tg.tensor(x))
    values = [
        x if n.shape == x.shape else (draw.standard_normal(n.shape) / 8).astype(BF16)
        for n in found.inputs
    ]
    return found.inputs, found.outputs, values


def kernels_of(inputs, outputs, target: Target = H200) -> list[str]:
    schedule = schedule_for(inputs, outputs, target)
    launches = [s for k in schedule.kernels for s in k.steps if isinstance(s, Launch)]
    return [launch.body.name.split("_")[0] for launch in launches]


@pytest.mark.parametrize("tokens, most", [(1, 5), (8, 6), (32, 7), (200, 7)])
def test_launches_of_a_layer(tokens: int, most: int) -> None:
    """One token: scores, routing, two products and the way back to the next layer's input; no
    sort, gather or list of its own. More: rows are gathered before the product, and from 17 tokens
    on one launch more routes."""
    inputs, outputs, _ = lowered(Layers(3), tokens)
    found = kernels_of(inputs, outputs)
    assert len(found) == 3 * most and "sort" not in found
    for name in ("route", "gated") if tokens < 17 else ("count", "place", "gated"):
        assert found.count(name) == 3


@pytest.mark.parametrize("given", [{}, {"norm_topk_prob": False}], ids=["whole", "plain"])
def test_a_layer(given: dict) -> None:
    for tokens in (3, 70):
        inputs, outputs, values = lowered(Layers(1, **given), tokens)
        (expected,) = interpret(outputs, dict(zip(inputs, values)))
        (found,) = run_interpreted(H200, inputs, outputs, values)
        compare(outputs[0], found, expected, 2.0)


@pytest.mark.usefixtures("assembled")
@pytest.mark.parametrize("tokens", [5, 33])
def test_a_layer_simulated(tokens: int) -> None:
    inputs, outputs, values = lowered(Layers(1), tokens)
    (expected,) = interpret(outputs, dict(zip(inputs, values)))
    (found,) = run_graph(inputs, outputs, values)
    compare(outputs[0], found, expected, 2.0)


@pytest.mark.usefixtures("assembled")
@pytest.mark.parametrize("tokens", [1, pytest.param(2, marks=pytest.mark.slow), 4])
def test_few_rows_stream_their_weights(tokens: int) -> None:
    """A program has four rows of an expert's weights; tokens that pick the same one share them
    (there are 6 for 4 a token)."""
    few = {"hidden_size": 256, "moe_intermediate_size": 768, "num_experts": 6}
    inputs, outputs, values = lowered(Layers(1, **few), tokens)
    schedule = schedule_for(inputs, outputs, H200)
    launches = [s for k in schedule.kernels for s in k.steps if isinstance(s, Launch)]
    programs = {s.body.name.split("_")[0]: s.body.grid[0] for s in launches}
    assert programs["gated"] / 768 == programs["dot"] / 256 >= min(6, 4 * tokens) / 4
    (expected,) = interpret(outputs, dict(zip(inputs, values)))
    (found,) = run_graph(inputs, outputs, values)
    compare(outputs[0], found, expected, 2.0)


def test_what_else_reads_a_sort_keeps_it() -> None:
    """Picks that are read elsewhere too, and other sorts, stay as they are."""

    def layer(x: tg.Tensor, whole: bool) -> tuple[tg.Tensor, ...]:
        values, picked = tg.softmax(x, -1).topk(3, -1)
        order, _, offsets = group_rows(picked.reshape(-1), 16)
        return (order, offsets, values, picked) if whole else (order, offsets, values)

    x = tg.tensor(scores(7, 16))
    for whole in (False, True):
        found = tg.jit(layer, static=("whole",)).lower(x, whole=whole)
        made, _ = run_pipeline(found.inputs, found.outputs, H200)
        kinds = {n.op for n in topological(made)}
        assert (ops.sort in kinds) == whole
        expected = interpret(found.outputs, {found.inputs[0]: x.numpy()})
        for a, b in zip(run_interpreted(H200, found.inputs, found.outputs, [x.numpy()]), expected):
            np.testing.assert_allclose(a, b, rtol=1e-5)


def test_invariant_and_training_keep_their_way() -> None:
    layers = Layers(1)
    inputs, outputs, _ = lowered(layers, 8)
    assert "route" in kernels_of(inputs, outputs)
    with override(determinism="invariant"):
        assert "route" not in kernels_of(inputs, outputs)
    assert "route" not in kernels_of(inputs, outputs, AVX512)
    x = tg.tensor(scores(8, 128, BF16))
    found = tg.jit(tg.value_and_grad(lambda y: layers(y).float().sum())).lower(x)
    assert "route" not in kernels_of(found.inputs, found.outputs)


@pytest.mark.parametrize("wrong", ["max", "sum", "shares"])
def test_another_axis_is_no_softmax(wrong: str) -> None:
    """Where there are as many rows as columns, a row's number may be repeated along the rows."""
    tokens, count = (4, 4) if wrong == "shares" else (8, 2)

    def layer(x: tg.Tensor) -> tuple[tg.Tensor, ...]:
        powers = tg.exp(x - x.amax(1, keepdim=wrong != "max"))
        share = powers / powers.sum(1, keepdim=wrong != "sum")
        values, picked = share.topk(count, -1)
        values = values / values.sum(1, keepdim=wrong != "shares")
        order, places, offsets = group_rows(picked.reshape(-1), x.shape[1])
        return values, order, places, offsets

    x = scores(tokens, 8)
    found = tg.jit(layer).lower(tg.tensor(x))
    expected = interpret(found.outputs, {found.inputs[0]: x})
    for a, b in zip(run_interpreted(H200, found.inputs, found.outputs, [x]), expected):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_rows_that_no_library_takes() -> None:
    """A gathered product of the plain kernel: the result's rows are no whole steps of 16 bytes."""
    draw = np.random.default_rng(4)
    x = draw.standard_normal((6, 64)).astype(BF16)
    rows = np.array([5, 0, 3, 3, 1, 2, 0, 4], np.int32)
    offsets = np.array([0, 3, 3, 7, 8], np.int32)
    blocks = np.zeros((9, 4), np.int32)
    blocks[:4, :3] = [[3, 0, 0], [0, 0, 3], [2, 3, 7], [3, 7, 8]]
    for wide in (20, 24):
        weights = draw.standard_normal((4, wide, 64)).astype(BF16)
        values = [x, weights, offsets, blocks, rows]
        nodes = [build.input_(v.shape, BY_NUMPY[v.dtype]) for v in values]
        made = ops.grouped_dot(*nodes, axis=2, block=8)
        (expected,) = interpret([made], dict(zip(nodes, values)))
        (found,) = run_interpreted(H200, nodes, [made], values)
        compare(made, found, expected)


@pytest.mark.parametrize("tokens", [1, 5])
def test_rows_that_come_back_are_added_with_the_residual(tokens: int) -> None:
    """Of few parts, in order, with what is read around them; sums of many stay sums."""
    draw = np.random.default_rng(tokens)
    for each, parts in ((3, True), (20, False)):
        x, found = (draw.standard_normal((n, 40)).astype(np.float32) for n in (tokens, 50))
        shares = draw.standard_normal((tokens, each)).astype(np.float32)
        places = draw.integers(0, 50, tokens * each)

        def back(x, found, shares, places, each=each):
            own = found.index_select(0, places).reshape(x.shape[0], each, 40)
            return x + (own * shares.unsqueeze(-1)).sum(1)

        values = [x, found, shares, places]
        made = tg.jit(back).lower(*map(tg.tensor, values))
        (final,), _ = run_pipeline(made.inputs, made.outputs, H200)
        assert any(n.op is ops.sum_ for n in topological([final])) != parts
        (got,) = run_interpreted(H200, made.inputs, made.outputs, values)
        own = found[places].astype(np.float64).reshape(tokens, each, 40)
        np.testing.assert_allclose(got, x + (own * shares[..., None]).sum(1), atol=1e-5)


def test_a_sum_of_gathered_rows_is_rounded_once() -> None:
    rows = np.repeat(np.array([[6e4], [6e4], [-6e4], [-6e4]], np.float16), 40, 1)
    places = np.arange(4)
    made = tg.jit(lambda x, at: x.index_select(0, at).reshape(1, 4, 40).sum(1)).lower(
        tg.tensor(rows), tg.tensor(places)
    )
    for level in ("reproducible", "invariant"):
        with override(determinism=level):
            (got,) = run_interpreted(H200, made.inputs, made.outputs, [rows, places])
        np.testing.assert_array_equal(got, np.zeros((1, 40)))


@pytest.mark.parametrize("rows", [8, 40])
@pytest.mark.parametrize("gathered", [False, True])
def test_what_is_read_twice_is_walked_once(rows: int, gathered: bool) -> None:
    """30 steps that read the one before twice: 2^30 ways down."""

    def steps(x, other, at):
        own = other.index_select(0, at)
        y = own if gathered else x
        for _ in range(30):
            y = y + tg.sin(y)
        return y.sum(0), own

    values = [scores(rows, 16), scores(50, 16), np.arange(rows)]
    made = tg.jit(steps).lower(*map(tg.tensor, values))
    (final, *_), _ = run_pipeline(made.inputs, made.outputs, H200)
    assert any(n.op is ops.sum_ for n in topological([final])) != (gathered and rows == 8)
    assert kernels_of(made.inputs, made.outputs)


@pytest.mark.skipif(find_ptxas() is None, reason="no ptxas")
@pytest.mark.parametrize("experts", [128, 256, 512])
def test_no_spills(experts: int) -> None:
    """Of many tokens, whatever the number of experts."""
    node = build.input_((4096, experts), float32)
    schedule = schedule_for([node], route(8)(node), H200)
    launches = [s for k in schedule.kernels for s in k.steps if isinstance(s, Launch)]
    assert len(launches) == 2
    texts = {s.body.name: emit(s.body, s.body.name, H200)[0] for s in launches}
    for name, made in assemble_all(texts, H200.cpu).items():
        for report in made.reports.values():
            assert report.spill_stores == report.spill_loads == 0, name

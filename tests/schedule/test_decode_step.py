"""The kernels of a decode step: how many, which, and that they compute what the model says.

Two layers without their attention run on the Tile interpreter (one of them on the PTX simulator)
and are held to float64; the launches of a Llama-3-8B-shaped step are counted for an H200.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from interpreted import run_interpreted

sys.path.insert(0, str(Path(__file__).parent.parent / "targets"))

from assembled import assemble_all
from simulated import run_graph

import tilegrad as tg
from tilegrad import nn
from tilegrad.compiler.compile import schedule_for
from tilegrad.core import dtype as dtypes
from tilegrad.core.format import Format, format_of
from tilegrad.core.target import H200
from tilegrad.generate.sampling import Variant
from tilegrad.generate.step import Rows, step
from tilegrad.graph import build, ops
from tilegrad.ir.node import Node
from tilegrad.models.decoder.config import DecoderConfig
from tilegrad.models.decoder.model import Decoder
from tilegrad.quant.calibrate import put
from tilegrad.quant.layers import PackedLinear
from tilegrad.schedule.schedule import Launch, Schedule
from tilegrad.targets.ptx.assemble import find_ptxas
from tilegrad.targets.ptx.emit import emit
from tilegrad.tensor.stored import stored
from tilegrad.tile.build import Body

BF16 = ml_dtypes.bfloat16
EPSILON = 1e-5
FP8, BLOCKS = "E4M3_ROW_F32", "E4M3_128X128_F32"
INPUTS = {FP8: FP8, BLOCKS: "E4M3_G128_F32"}  # what tokens are rounded to


def dot(x: Node, w: Node) -> Node:
    """x @ w^T."""
    return build.dot(x, w, batch=((), ()), contract=((1,), (1,)))


def norm(x: Node, w: Node) -> Node:
    """RMS norm, as the model writes it."""
    wide = build.cast(x, dtypes.float32)
    mean = build.multiply(build.sum_(build.multiply(wide, wide), 1, keep=True), 1.0 / x.shape[-1])
    root = build.unary(ops.square_root, build.add(mean, EPSILON))
    found = build.multiply(
        build.multiply(wide, build.unary(ops.reciprocal, root)), build.cast(w, dtypes.float32)
    )
    return build.cast(found, x.dtype)


def silu(x: Node) -> Node:
    """x * sigmoid(x)."""
    below = build.add(build.unary(ops.exp, build.multiply(x, -1.0)), 1.0)
    return build.multiply(x, build.unary(ops.reciprocal, below))


def layer(x: Node, weights: list[Node]) -> Node:
    """A layer whose attention is q * k * v, each of them stored as if a kernel read it."""
    first, q, k, v, o, second, gate, up, down = weights
    y = norm(x, first)
    mixed = build.multiply(build.multiply(dot(y, q), dot(y, k)), dot(y, v))
    x = build.add(x, dot(mixed, o))
    y = norm(x, second)
    return build.add(x, dot(build.multiply(silu(dot(y, gate)), dot(y, up)), down))


def reference(x: np.ndarray, weights: list[np.ndarray]) -> np.ndarray:
    """The layer in float64."""
    first, q, k, v, o, second, gate, up, down = (w.astype(np.float64) for w in weights)

    def normed(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * w

    y = normed(x, first)
    x = x + ((y @ q.T) * (y @ k.T) * (y @ v.T)) @ o.T
    y = normed(x, second)
    g = y @ gate.T
    return x + (g / (1 + np.exp(-g)) * (y @ up.T)) @ down.T


def draw(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    """Random numbers in bfloat16."""
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(BF16)


def drawn_layer(width: int, hidden: int, seed: int) -> list[np.ndarray]:
    """Weights of a layer."""
    shapes = [
        (width,),
        *[(width, width)] * 4,
        (width,),
        (hidden, width),
        (hidden, width),
        (width, hidden),
    ]
    return [
        draw(seed + i, *s, scale=s[-1] ** -0.5 if len(s) == 2 else 1.0)
        for i, s in enumerate(shapes)
    ]


def error_of(m: int, run: object, width: int = 256, hidden: int = 384, layers: int = 2) -> float:
    """The largest error of some layers for m tokens, over the largest value."""
    values = [draw(m, m, width)]
    for i in range(layers):
        values += drawn_layer(width, hidden, 10 * i + 1)
    nodes = [build.input_(v.shape, dtypes.bfloat16) for v in values]
    x, expected = nodes[0], values[0].astype(np.float64)
    for i in range(layers):
        part = slice(9 * i + 1, 9 * i + 10)
        x, expected = layer(x, nodes[part]), reference(expected, values[part])
    (got,) = run(nodes, [x], values)  # type: ignore[operator]
    return float(np.abs(got.astype(np.float64) - expected).max() / np.abs(expected).max())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("m", [1, 3, 8, 40, 72, 128, 200])
def test_layers_are_right(m: int) -> None:
    assert error_of(m, lambda *given: run_interpreted(H200, *given)) < 1.5e-2


def test_two_tiles_of_rows_for_few_cores() -> None:
    """Programs have several tiles, all of the same rows, by whose norms they scale."""
    few = H200.with_cores(4)
    assert error_of(256, lambda *given: run_interpreted(few, *given), layers=1) < 1.5e-2


@pytest.mark.parametrize("m, width, hidden", [(1, 320, 448), (2, 256, 248), (1, 512, 264)])
def test_sizes_that_some_kernels_refuse(m: int, width: int, hidden: int) -> None:
    found = error_of(m, lambda *given: run_interpreted(H200, *given), width, hidden, layers=1)
    assert found < 1.5e-2


def test_simulated() -> None:
    assert error_of(3, run_graph, hidden=256, layers=1) < 1.5e-2


# ---- a step of a model ------------------------------------------------------------------------

LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


class Zeros:
    """Weights of a file, all zeros: rows of a Format's bytes."""

    def __init__(self, form: Format, rows: int, columns: int) -> None:
        self.format, self.shape = form, (rows, columns)
        self.raw = np.zeros((rows, form.row_bytes(columns)), np.uint8)

    def drop(self) -> None:
        """Nothing is mapped."""


def in_fp8(model: Decoder, scale: float | None, head: bool, form: str = FP8) -> None:
    """Every linear layer, the head if asked for: weights by channel or in blocks, inputs by token
    (and 128 columns), or with a scale that is given, which layers side by side share."""
    given = INPUTS[form] if scale is None else "E4M3_TENSOR_F32"
    scales: dict[str, tg.Tensor] = {}
    made: dict[tuple[int, int], Zeros] = {}
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    for path, layer in layers:
        if head or path.rpartition(".")[2] != "head":
            size = (layer.out_features, layer.in_features)
            zeros = made.setdefault(size, Zeros(format_of(form), *size))
            layer.weight.node = stored(zeros, layer.weight.dtype).node
            rounds = PackedLinear(layer, None, given, scale)
            near = path.rpartition(".")[0]
            rounds.input_scale = scales.setdefault(near, rounds.input_scale)
            put(model, path, rounds)


def step_schedule(
    batch: int,
    layers: int,
    fp8: bool = False,
    scale: float | None = None,
    head: bool = False,
    kept: dtypes.DType = tg.bfloat16,
    form: str = FP8,
    **sizes: Any,
) -> Schedule:
    """The Schedule of the engine's decode step, for an H200."""
    config = DecoderConfig.from_huggingface({**LLAMA, "num_hidden_layers": layers, **sizes})
    model = Decoder(config, tg.bfloat16)
    if fp8:
        in_fp8(model, scale, head, form)
    cache = nn.PagedCache(
        config.layers,
        4,
        64,
        config.key_heads,
        config.head_width,
        requests=batch + 1,
        most_pages=32,
        dtype=kept,
    )
    rows = Rows(batch + 1, cache.device)
    slots, starts = (tg.tensor(np.zeros(n, np.int32)) for n in (batch, batch + 1))
    with tg.no_grad():
        traced = tg.jit(step, static="variant")
        lowered = traced.lower(model, cache, rows, None, Variant(), slots, starts)
    return schedule_for(lowered.inputs, lowered.outputs, H200, lowered.donate)


def launches(schedule: Schedule) -> list[str]:
    """The names of the Bodies that a Schedule launches, in order."""
    return [s.body.name for k in schedule.kernels for s in k.steps if isinstance(s, Launch)]


@pytest.mark.parametrize("batch", [1, 2, 8, 32, 128])
def test_launches_of_a_layer(batch: int) -> None:
    some, more = (launches(step_schedule(batch, n)) for n in (3, 5))
    assert len(more) - len(some) <= 2 * 6
    assert len(set(more)) == len(set(some)), "equal layers share their Programs"
    each = (len(more) - len(some)) // 2
    assert len(some) + 29 * each <= (166 if batch <= 8 else 199)  # of 32 layers


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_norms_of_heads_are_no_launch(batch: int) -> None:
    """Whoever appends does them."""
    counts = [len(launches(step_schedule(batch, 2, model_type=m))) for m in ("llama", "qwen3")]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("kept", [tg.float8_e4m3, tg.int8], ids=str)
@pytest.mark.parametrize("batch", [2, 128])
def test_launches_with_a_cache_of_8_bits(batch: int, kept: dtypes.DType) -> None:
    """The same kernels, that take scales: nothing is widened in a launch of its own."""
    plain, eight = (launches(step_schedule(batch, 2, kept=k)) for k in (tg.bfloat16, kept))

    def names(found: list[str]) -> list[str]:
        return [name.rpartition("_")[0] if "loops" in name else name for name in found]

    assert names(eight) == names(plain) and any("paged_attention" in name for name in plain)


FP8_LAUNCHES = {1: 5, 8: 9, 32: 10, 128: 10}  # of a layer
BLOCK_LAUNCHES = {1: 11, 8: 11, 32: 12, 128: 12}


@pytest.mark.parametrize("scale", [None, 0.01], ids=["by token", "given"])
@pytest.mark.parametrize("batch", FP8_LAUNCHES)
def test_launches_of_a_layer_in_fp8(batch: int, scale: float | None) -> None:
    """Each product's input is encoded by a launch, the norm before it included, but for what gate
    and up give with a scale that is known before. Products of one token encode it themselves."""
    some, more = (launches(step_schedule(batch, n, True, scale)) for n in (3, 5))
    expected = FP8_LAUNCHES[batch] - (scale is not None and batch > 1)
    assert len(more) - len(some) == 2 * expected
    assert len(set(more)) == len(set(some)), "equal layers share their Programs"


@pytest.mark.parametrize("batch", FP8_LAUNCHES)
def test_launches_of_a_layer_in_blocks(batch: int) -> None:
    """As in fp8, but that sums of rows for norms are launches of their own: q, k and v are one
    product, and gate and up."""
    some, more = (step_schedule(batch, n, True, form=BLOCKS) for n in (1, 2))
    kinds = [k.kind for k in more.kernels]
    assert kinds.count("dots") == kinds.count("gated") == 2
    assert len(launches(more)) - len(launches(some)) == BLOCK_LAUNCHES[batch]


@pytest.mark.parametrize("batch", [8, 32, 128])
def test_norms_ask_for_weights_before_they_wait(batch: int) -> None:
    """The weight of the norm that is encoded comes from memory while the product before still runs;
    all else is read behind the wait."""
    (body,) = {
        s.body.name: s.body
        for k in step_schedule(batch, 2, True).kernels
        for s in k.steps
        if isinstance(s, Launch) and s.body.name.startswith("loops_max") and "_sum_" in s.body.name
    }.values()
    before, after = emit(body, "entry", H200)[0].split("griddepcontrol.wait")
    (weight,) = (i for i, p in enumerate(body.parameters) if p.type.use == "constant")
    assert body.parameters[weight].type.shape == (LLAMA["hidden_size"],)
    assert before.count("ld.global.L1::no_allocate") == after.count("ld.global.v4") > 0
    assert "st.global" not in before and "ld.global.v4" not in before


@pytest.mark.parametrize("batch", [2, 8, 32])
def test_gated_codes_of_few_tokens_have_weights_as_rows(batch: int) -> None:
    """Tiles of 256 rows of weights: a decode step of an 8B model is 2 us a layer faster so than
    with tiles of 64 rows of tokens, most of which nobody has."""
    plans = [
        k.steps[0].body.notes["plan"]
        for k in step_schedule(batch, 1, True).kernels
        if k.kind == "gated"
    ]
    assert [plan.tile for plan in plans] == [(256, 8 * -(-batch // 8), 128)]


@pytest.mark.parametrize("batch", FP8_LAUNCHES)
def test_logits_of_a_head_in_fp8(batch: int) -> None:
    """What draws tokens reads them more than once: they are stored scaled, in 16 bits."""
    schedule = step_schedule(batch, 1, True, head=True)
    bodies = [s.body for k in schedule.kernels for s in k.steps if isinstance(s, Launch)]
    (head,) = (b for b in bodies if any(LLAMA["vocab_size"] in s for s in results_of(b)))
    assert [p.dtype for p in head.parameters if p.type.use == "result"] == [dtypes.bfloat16]


def results_of(body: Body) -> list[tuple[int, ...]]:
    """The shapes of what a product's Body stores."""
    made = "plan" in body.notes
    return [p.type.shape for p in body.parameters if made and p.type.use == "result"]


@pytest.mark.skipif(find_ptxas() is None, reason="no ptxas")
@pytest.mark.parametrize("form", ["", FP8, BLOCKS], ids=["bf16", "fp8", "blocks"])
@pytest.mark.parametrize("batch", [1, 8, 32, 128])
def test_programs_fit_their_registers(batch: int, form: str) -> None:
    texts = {}
    for kernel in step_schedule(batch, 2, bool(form), form=form).kernels:
        for one in kernel.steps:
            if isinstance(one, Launch) and one.body.name not in texts:
                texts[one.body.name], _ = emit(one.body, "entry", H200)
    for name, made in assemble_all(texts, H200.cpu).items():
        assert made.warnings == [], name
        for report in made.reports.values():
            if batch > 1 and name.startswith("dot_dot_add"):
                # of small sums: an encode fits beside it on a core
                assert 384 * report.registers + 512 * 56 <= 65536, name
            assert report.spill_stores == report.spill_loads == report.stack_bytes == 0, name


@pytest.mark.parametrize("batch", (2, 16))
@pytest.mark.parametrize("width, hidden, heads", [(2048, 4096, 16), (1024, 3072, 8)])
def test_shared_memory_has_room_for_sums(batch: int, width: int, hidden: int, heads: int) -> None:
    """Rings of many stages leave what the sums of an epilogue take."""
    sizes = {
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": 4,
        "vocab_size": 1024,
    }
    schedule = step_schedule(batch, 1, **sizes)
    launches = [s for k in schedule.kernels for s in k.steps if isinstance(s, Launch)]
    assert len(launches) > 6
    for launch in launches:
        _, entry = emit(launch.body, "kernel", H200)
        assert entry.shared_bytes <= H200.memories["shared"].bytes, launch.body.name

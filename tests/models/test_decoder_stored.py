"""models/decoder/names.py: decoders that keep a file's weights quantised."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilegrad as tg
from tilegrad.compiler.compile import schedule_for
from tilegrad.core import format as formats
from tilegrad.core.dtype import bfloat16
from tilegrad.core.errors import ShapeError, UserError
from tilegrad.core.format import Format
from tilegrad.core.target import AVX512, H200
from tilegrad.exchange.mapped import Stored
from tilegrad.models.decoder.config import DecoderConfig
from tilegrad.models.decoder.model import Decoder
from tilegrad.models.decoder.names import Names
from tilegrad.models.decoder.rotary import Rotary
from tilegrad.runtime import prepared
from tilegrad.runtime.buffer import Buffer
from tilegrad.tensor.placement import values
from tilegrad.tensor.stored import bytes_to_prepare, stored_in

CONFIG = {
    "family": "llama",
    "vocabulary": 100,
    "width": 64,
    "layers": 2,
    "heads": 4,
    "key_heads": 2,
    "head_width": 16,
    "hidden": 96,
    "context": 64,
    "rotary": Rotary(10000.0, 16),
}


def pairs_of(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head as llama.cpp orders them."""
    half = array.shape[0] // heads // 2
    cut = array.reshape(heads, 2, half, *array.shape[1:])
    return cut.swapaxes(1, 2).reshape(array.shape)


def file_of(config: DecoderConfig, chosen: Any) -> dict[str, Stored]:
    """A GGUF file's tensors of a random decoder; `chosen(name)` is a Format."""
    draw = np.random.default_rng(2)
    names, found = Names(config, {"token_embd.weight": None}), {}
    for ours, parameter in Decoder(config).named_parameters():
        source = names.sources(ours)[0]
        values = draw.standard_normal(tuple(parameter.shape)).astype(np.float32) * 0.1
        values = values + 1.0 if values.ndim == 1 else values
        if source.interleaved:
            heads = config.heads if ".query." in ours else config.key_heads
            values = pairs_of(values, heads)
        form: Format = chosen(source.name) if values.ndim > 1 else formats.F32
        found[source.name] = Stored(source.name, values.shape, form, form.pack(values))
    return found


def logits(config: DecoderConfig, file: dict[str, Stored], **options: Any) -> tuple[Any, Any]:
    model = Decoder(config).requires_grad_(False).eval()
    model.load(file, **options)
    tokens = np.random.default_rng(4).integers(0, config.vocabulary, (2, 9))
    return model, model(tg.tensor(tokens)).numpy()


def buffers_of(model: Decoder) -> list[Buffer]:
    """All that was prepared of a model's weights."""
    found = []
    for tensor in stored_in(model.parameters()):
        source = values[tensor.node.inputs[0]]
        found += [b for parts in prepared._table[source].values() for b in parts.buffers]
    return found


def prepared_of(model: Decoder, layers: Any) -> set[Any]:
    """The pieces of memory that hold what the codes of some layers were prepared to."""
    found = set()
    for layer in layers:
        source = values[layer.weight.node.inputs[0]]
        (alone,) = [p for k, p in prepared._table[source].items() if not k[-1]]
        whole = [
            q.buffers[0]
            for other in prepared._table.values()
            for k, q in other.items()
            if k[-1] and _within(alone.buffers[0], q.buffers[0])
        ]
        found |= {b.pointer for b in whole} or {alone.buffers[0].pointer}
    return found


def _within(part: Buffer, whole: Buffer) -> bool:
    return whole.pointer <= part.pointer < whole.pointer + whole.bytes


def q4_1(name: str) -> Format:
    return formats.Q8_0 if "token_embd" in name or name.startswith("output") else formats.Q4_1


@pytest.mark.parametrize("tied", [True, False])
def test_a_decoder_of_quantised_weights(tied: bool) -> None:
    config = DecoderConfig(**CONFIG, tied=tied)
    file = file_of(config, q4_1)
    model, got = logits(config, file, keep="quantised")
    _, want = logits(config, file)
    assert np.abs(got - want).max() < 2e-3 * np.abs(want).max()
    assert len(stored_in(model.parameters())) == 7 * 2 + (1 if tied else 2)
    assert (model.head.weight is model.embed.weight) is tied
    block = model.blocks[1]
    together = prepared_of(model, (block.attention.query, block.attention.key))
    assert len(together) == 1 and len(prepared_of(model, (block.feed.gate, block.feed.up))) == 1
    room = {id(b.owner): b.owner.bytes for b in buffers_of(model)}
    size = sum(s.bytes for s in file.values())
    assert len(room) == 1 and sum(room.values()) < 1.3 * size  # 100 rows take room for 112


BIASED = {
    "qkv_bias": True,
    "output_bias": True,
    "feed_bias": True,
    "norm": "layer",
    "gated": False,
    "activation": "gelu",
    "parallel": True,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "traits",
    [
        {
            "family": "olmo2",
            "pre_norms": False,
            "post_norms": True,
            "head_norms": True,
            "whole_norms": True,
        },
        {"family": "phi2", **BIASED, "shared_norm": True, "head_bias": True},
        {"family": "gptneox", **BIASED},
        {"family": "granite", "residual_scale": 0.4, "logit_scale": 0.2, "embedding_scale": 6.0},
        {"family": "gemma", "embedding_scale": 8.0, "activation": "gelu_tanh", "tied": True},
        {"family": "smollm3", "rotated": (True, False)},
    ],
    ids=lambda t: t["family"],
)
def test_quantised_weights_of_every_kind_of_block(traits: dict[str, Any]) -> None:
    config = DecoderConfig(**{**CONFIG, **traits})
    file = file_of(config, q4_1)
    model, got = logits(config, file, keep="quantised")
    assert stored_in([model.blocks[0].attention.query.weight])
    assert np.abs(got - logits(config, file)[1]).max() < 3e-3 * np.abs(got).max()


def greedy(model: Decoder, count: int) -> list[list[int]]:
    """The likeliest tokens after two prompts; all in one window, of the size of `logits`."""
    known = np.zeros((2, 9), np.int64)
    known[:, :5] = [5, 17, 3, 42, 8], [61, 2, 90, 33, 7]
    for end in range(5, 5 + count):
        known[:, end] = model(tg.tensor(known)).numpy()[:, end - 1].argmax(-1)
    return known[:, : 5 + count].tolist()


EXPERTS = {"family": "qwen3moe", "experts": 6, "experts_used": 2, "layers": 2}
FORMATS = ["Q4_0", "Q4_1", "Q8_0", "MXFP4", "Q4_K", "Q6_K"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FORMATS)
def test_experts_stay_quantised(name: str) -> None:
    """Tokens are those of unpacked experts, and memory holds little more than the file."""
    form = formats.format_of(name)
    wide = max(64, form.block)
    config = DecoderConfig(**{**CONFIG, **EXPERTS, "width": wide, "expert_hidden": wide})
    file = file_of(config, lambda name: form if "_exps" in name else formats.F32)
    model, got = logits(config, file, keep="quantised")
    plain, want = logits(config, file)
    kept = stored_in(model.parameters())
    assert len(kept) == 3 * 2 and all(tuple(t.shape) == (6, wide, wide) for t in kept)
    off = np.abs(got - want).max(-1) / np.abs(want).max()
    assert np.sort(off.reshape(-1))[-2] < 3e-4  # what is rounded may let one token pick another
    assert greedy(model, 3) == greedy(plain, 3)
    held, stored = sum(b.bytes for b in buffers_of(model)), [s for s in file.values()]
    size = sum(s.bytes for s in stored if s.format.quantised)
    assert size <= held <= 1.2 * size
    assert held == bytes_to_prepare(kept, "cpu")


def test_experts_of_a_tensor_each_stay_too() -> None:
    config = DecoderConfig(**{**CONFIG, **EXPERTS, "expert_hidden": 64})
    file = file_of(config, lambda name: formats.Q4_0 if "_exps" in name else formats.F32)
    apart = {}
    for name, tensor in file.items():
        if "_exps" not in name:
            apart[name] = tensor
            continue
        for number, raw in enumerate(tensor.raw):
            one = name.replace("_exps.", f".{number}.")
            apart[one] = Stored(one, tensor.shape[1:], tensor.format, raw)
    model, got = logits(config, apart, keep="quantised")
    assert len(stored_in(model.parameters())) == 3 * 2
    np.testing.assert_array_equal(got, logits(config, file, keep="quantised")[1])


def test_experts_that_no_kernel_reads_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    config = DecoderConfig(**{**CONFIG, **EXPERTS, "expert_hidden": 64})
    form = formats.format_of("E4M3_ROW_F32")
    file = file_of(config, lambda name: form if "_exps" in name else formats.F32)
    model, got = logits(config, file, keep="quantised")
    assert not stored_in(model.parameters()) and "are unpacked" in caplog.text
    np.testing.assert_array_equal(got, logits(config, file)[1])


def test_formats_that_differ_are_packed_apart() -> None:
    def chosen(name: str) -> Format:
        return formats.Q8_0 if "attn_v" in name else q4_1(name)

    config = DecoderConfig(**CONFIG)
    file = file_of(config, chosen)
    model, got = logits(config, file, keep="quantised")
    attention = model.blocks[0].attention
    assert len(prepared_of(model, (attention.query, attention.key))) == 1
    assert len(prepared_of(model, (attention.query, attention.value))) == 2
    assert np.abs(got - logits(config, file)[1]).max() < 2e-3 * np.abs(got).max()


def test_what_is_not_quantised_stays_as_ever() -> None:
    def chosen(name: str) -> Format:
        return formats.F16 if "ffn" in name or "token_embd" in name else q4_1(name)

    config = DecoderConfig(**CONFIG, qkv_bias=True)
    file = file_of(config, chosen)
    model, got = logits(config, file, keep="quantised")
    assert not stored_in([model.blocks[0].feed.up.weight, model.embed.weight])
    assert stored_in([model.blocks[0].attention.key.weight])
    assert np.abs(got - logits(config, file)[1]).max() < 2e-3 * np.abs(got).max()


def test_a_narrow_model_and_progress() -> None:
    config, told = DecoderConfig(**CONFIG, tied=True), []
    file = file_of(config, q4_1)
    model = Decoder(config, bfloat16).requires_grad_(False).eval()
    model.load(file, keep="quantised")
    found = model(tg.tensor([[1, 2, 3]]))
    assert found.dtype is bfloat16
    with prepared.telling(lambda *a: told.append(a)):
        found.numpy()
    assert told[-1][0] == "pack" and told[-1][1] == told[-1][2] > 0
    assert [a[1] for a in told] == sorted(a[1] for a in told)


def test_nothing_is_prepared_twice() -> None:
    """Decode, prefill, single layers, and an embedding tied to its head read the same bytes."""
    config = DecoderConfig(**CONFIG, tied=True)
    file = file_of(config, q4_1)
    model = Decoder(config).requires_grad_(False).eval()
    model.load(file, keep="quantised")
    step = tg.jit(lambda model, tokens: model(tokens))
    for count in (1, 9, 40):
        step(model, tg.tensor(np.zeros((1, count), np.int32))).numpy()
    model.blocks[0].attention.key(tg.ones(1, 64)).numpy()
    room = {id(b.owner): b.owner.bytes for b in buffers_of(model)}
    assert len(room) == 1


def test_layers_of_files_do_not_train() -> None:
    config = DecoderConfig(**CONFIG)
    model = Decoder(config)
    model.load(file_of(config, q4_1), keep="quantised")
    assert not model.blocks[0].feed.up.weight.requires_grad and model.norm.weight.requires_grad
    model(tg.tensor([[1, 2, 3]])).sum().backward()
    assert model.norm.weight.grad is not None


def test_a_block_is_four_products() -> None:
    """Norms, gates, residuals and joint products are found, on every Target."""
    config = DecoderConfig(**{**CONFIG, "layers": 3}, tied=True)
    model = Decoder(config).requires_grad_(False).eval()
    model.load(file_of(config, q4_1), keep="quantised")

    def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
        return q * 2.0 + k.repeat_interleave(2, 1) * v.repeat_interleave(2, 1)

    step = tg.jit(lambda model, tokens, positions: model.step(tokens, positions, attend))
    lowered = step.lower(model, tg.tensor([1]), tg.tensor([5]))
    found = []
    for target in (AVX512.with_cores(2), H200):
        schedule = schedule_for(lowered.inputs, lowered.outputs, target)
        names = [k.name for k in schedule.kernels]
        found.append(sum(n.startswith("quantised_around") for n in names))
        assert sum(n == "quantised_take" for n in names) == 1
    assert found == [3 * 4 + 1] * 2


def test_errors() -> None:
    config = DecoderConfig(**CONFIG)
    file = file_of(config, q4_1)
    with pytest.raises(UserError, match="unknown way"):
        logits(config, file, keep="forever")
    wrong = formats.Q4_1.pack(np.ones((32, 64), np.float32))
    file["blk.1.attn_output.weight"] = Stored("o", (32, 64), formats.Q4_1, wrong)
    with pytest.raises(ShapeError, match="does not fit"):
        logits(config, file, keep="quantised")

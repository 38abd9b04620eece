"""models/decoder/packed.py: decoders that keep a file's weights quantised."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilegrad as tg
from tilegrad import nn
from tilegrad.core import format as formats
from tilegrad.core.dtype import bfloat16
from tilegrad.core.errors import ShapeError, UserError
from tilegrad.core.format import Format
from tilegrad.exchange.mapped import Stored
from tilegrad.models.decoder.config import DecoderConfig
from tilegrad.models.decoder.model import Decoder
from tilegrad.models.decoder.names import Names
from tilegrad.models.decoder.rotary import Rotary

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
        form: Format = chosen(source.name) if values.ndim == 2 else formats.F32
        found[source.name] = Stored(source.name, values.shape, form, form.pack(values))
    return found


def logits(config: DecoderConfig, file: dict[str, Stored], **options: Any) -> tuple[Any, Any]:
    model = Decoder(config).requires_grad_(False).eval()
    model.load(file, **options)
    tokens = np.random.default_rng(4).integers(0, config.vocabulary, (2, 9))
    return model, model(tg.tensor(tokens)).numpy()


def q4_1(name: str) -> Format:
    return formats.Q8_0 if "token_embd" in name or name.startswith("output") else formats.Q4_1


@pytest.mark.parametrize("tied", [True, False])
def test_a_decoder_of_quantised_weights(tied: bool) -> None:
    config = DecoderConfig(**CONFIG, tied=tied)
    file = file_of(config, q4_1)
    model, got = logits(config, file, keep="quantised")
    _, want = logits(config, file)
    assert np.abs(got - want).max() < 2e-3 * np.abs(want).max()
    block = model.blocks[1]
    assert block.attention.query.packed is block.attention.value.packed
    assert block.feed.gate.packed is block.feed.up.packed
    assert block.feed.down.packed.format is formats.Q4_1
    assert isinstance(model.embed, nn.PackedEmbedding)
    assert (model.head.packed is model.embed.packed) is tied
    sizes = sum(t.numel() * t.dtype.size for t in model.tensors().values())
    assert sizes < 1.3 * sum(s.bytes for s in file.values())  # 100 rows take room for 112


BIASED = {
    "qkv_bias": True,
    "output_bias": True,
    "feed_bias": True,
    "norm": "layer",
    "gated": False,
    "activation": "gelu",
    "parallel": True,
}


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
        {"family": "smollm3", "turned": (True, False)},
    ],
    ids=lambda t: t["family"],
)
def test_quantised_weights_of_every_kind_of_block(traits: dict[str, Any]) -> None:
    config = DecoderConfig(**{**CONFIG, **traits})
    file = file_of(config, q4_1)
    model, got = logits(config, file, keep="quantised")
    assert isinstance(model.blocks[0].attention.query, nn.PackedLinear)
    assert np.abs(got - logits(config, file)[1]).max() < 3e-3 * np.abs(got).max()


def test_formats_that_differ_are_packed_apart() -> None:
    def chosen(name: str) -> Format:
        return formats.Q8_0 if "attn_v" in name else q4_1(name)

    config = DecoderConfig(**CONFIG)
    file = file_of(config, chosen)
    model, got = logits(config, file, keep="quantised")
    attention = model.blocks[0].attention
    assert attention.query.packed.shape == (64, 64) and attention.value.packed.shape == (32, 64)
    assert np.abs(got - logits(config, file)[1]).max() < 2e-3 * np.abs(got).max()


def test_what_is_not_quantised_stays_as_ever() -> None:
    def chosen(name: str) -> Format:
        return formats.F16 if "ffn" in name or "token_embd" in name else q4_1(name)

    config = DecoderConfig(**CONFIG, qkv_bias=True)
    file = file_of(config, chosen)
    model, got = logits(config, file, keep="quantised")
    assert isinstance(model.blocks[0].feed.up, nn.Linear) and isinstance(model.embed, nn.Embedding)
    assert isinstance(model.blocks[0].attention.key, nn.PackedLinear)
    assert np.abs(got - logits(config, file)[1]).max() < 2e-3 * np.abs(got).max()


def test_a_narrow_model_and_progress() -> None:
    config, told = DecoderConfig(**CONFIG, tied=True), []
    file = file_of(config, q4_1)
    model = Decoder(config, bfloat16).requires_grad_(False).eval()
    model.load(file, keep="quantised", progress=lambda *a: told.append(a))
    assert model(tg.tensor([[1, 2, 3]])).dtype is bfloat16
    assert told[-1][0] == "pack" and told[-1][1] == told[-1][2] > 0
    assert [a[1] for a in told] == sorted(a[1] for a in told)


def test_errors() -> None:
    config = DecoderConfig(**CONFIG)
    file = file_of(config, q4_1)
    with pytest.raises(UserError, match="unknown way"):
        logits(config, file, keep="forever")
    wrong = formats.Q4_1.pack(np.ones((32, 64), np.float32))
    file["blk.1.attn_output.weight"] = Stored("o", (32, 64), formats.Q4_1, wrong)
    with pytest.raises(ShapeError, match="does not fit"):
        logits(config, file, keep="quantised")

"""Configurations of published models, both spellings of scaling, rotary speeds, and errors."""

import copy
from typing import Any

import numpy as np
import pytest
from decoder_families import FAMILIES, LLAMA3, LLAMA_31_8B, LONG, YARN, peer, tokens, transformers
from torch_peer import torch

from tilegrad.core.errors import UserError
from tilegrad.models.decoder.config import DecoderConfig
from tilegrad.models.decoder.model import Decoder

# As published, without what says nothing about the model.
QWEN_25 = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "sliding_window": 32768,
    "use_sliding_window": False,
    "max_window_layers": 21,
    "tie_word_embeddings": True,
}
GEMMA_3 = {
    "model_type": "gemma3_text",
    "vocab_size": 262144,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "hidden_activation": "gelu_pytorch_tanh",
}


def test_published_configurations() -> None:
    llama = DecoderConfig.from_huggingface(LLAMA_31_8B)
    assert (llama.head_width, llama.key_heads, llama.tied) == (128, 8, False)
    assert llama.rotary is not None and llama.rotary.kind == "llama3"
    assert llama.attention(0) == {"scale": 128**-0.5, "softcap": 0.0, "window": None}
    qwen = DecoderConfig.from_huggingface(QWEN_25)
    assert qwen.qkv_bias and not qwen.output_bias and qwen.tied and not any(qwen.windows)
    gemma = DecoderConfig.from_huggingface(GEMMA_3)
    assert [i for i, w in enumerate(gemma.windows) if not w] == [5, 11, 17, 23]
    assert gemma.softcap == gemma.logit_softcap == 0.0 and gemma.tied and gemma.head_norms
    assert gemma.rotary_of(5).base == 1000000.0 and gemma.rotary_of(0).base == 10000.0
    seeing = {"model_type": "gemma3", "text_config": GEMMA_3, "vision_config": {}}
    assert DecoderConfig.from_huggingface(seeing) == gemma


def test_smollm2_from_gguf_metadata() -> None:
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 30,
        "llama.context_length": 8192,
        "llama.embedding_length": 576,
        "llama.feed_forward_length": 1536,
        "llama.attention.head_count": 9,
        "llama.attention.head_count_kv": 3,
        "llama.rope.freq_base": 100000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": 64,
        "tokenizer.ggml.tokens": ["a"] * 49152,
    }
    config = DecoderConfig.from_gguf(metadata, {"token_embd.weight": np.zeros((49152, 1))})
    assert (config.vocabulary, config.head_width, config.tied) == (49152, 64, True)
    each = np.full(30, 3, np.int32)
    same = DecoderConfig.from_gguf({**metadata, "llama.attention.head_count_kv": each})
    assert same.key_heads == 3 and not same.tied
    each[4] = 9
    with pytest.raises(UserError, match="the same for all layers"):
        DecoderConfig.from_gguf({**metadata, "llama.attention.head_count_kv": each})
    with pytest.raises(UserError, match="more tokens than the embedding"):
        DecoderConfig.from_gguf(metadata, {"token_embd.weight": np.zeros((49000, 1))})
    with pytest.raises(UserError, match=r"missing field 'llama\.block_count'"):
        DecoderConfig.from_gguf({n: v for n, v in metadata.items() if "block" not in n})
    with pytest.raises(UserError, match="unknown architecture"):
        DecoderConfig.from_gguf({"general.architecture": "mamba"})


@pytest.mark.parametrize("name", FAMILIES)
def test_older_spelling_of_rotary_positions(name: str) -> None:
    given = peer(name).config.to_dict()
    wanted = DecoderConfig.from_huggingface(given)
    newer = given.pop("rope_parameters", None)
    if newer is None or "full_attention" in newer:
        return
    scaling = {k: v for k, v in newer.items() if k not in ("rope_theta", "partial_rotary_factor")}
    kind = scaling.pop("rope_type")
    older = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    for field in ("rope_theta", "partial_rotary_factor"):
        if field in newer:
            given[older[field] if name.startswith("gpt_neox") else field] = newer[field]
    given["rope_scaling"] = None if kind == "default" else {"type": kind, **scaling}
    assert DecoderConfig.from_huggingface(given) == wanted


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
        LLAMA3,
        YARN,
        {**YARN, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False, "attention_factor": 0.7},
        {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4},
    ],
)
def test_rotary_speeds(scaling: dict[str, Any]) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=128, rope_parameters=scaling
    )
    speeds, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")
    rotary = DecoderConfig.from_huggingface(config.to_dict()).rotary
    assert rotary is not None
    np.testing.assert_allclose(rotary.frequencies(), speeds.numpy(), rtol=2e-6)
    assert rotary.attention_factor == pytest.approx(factor)


def test_longrope_has_two_sets_of_divisors() -> None:
    given = peer("phi3").config.to_dict()
    short = DecoderConfig.from_huggingface(given)
    long = DecoderConfig.from_huggingface(given, context=192)
    assert short.rotary is not None and long.rotary is not None
    assert (short.context, short.rotary.divisors) == (96, tuple(LONG["short_factor"]))
    assert (long.context, long.rotary.divisors) == (192, tuple(LONG["long_factor"]))
    with pytest.raises(UserError, match="not so many positions"):
        DecoderConfig.from_huggingface(given, context=193)


def test_dynamic_speeds_are_those_of_the_context() -> None:
    """As trained up to the context of training; a longer one that is asked for is slower."""
    model = peer("llama_dynamic")
    given = model.config.to_dict()
    plain = DecoderConfig.from_huggingface(given)
    assert (plain.context, plain.longest) == (128, 512) and plain.rotary.base == 10000.0
    prompt = tokens(1, 200, seed=5)
    long = Decoder(DecoderConfig.from_huggingface(given, context=200)).requires_grad_(False)
    long.load(model.state_dict())
    with torch.no_grad():  # in float32 its first answer and its second may differ by 3e-3
        theirs = copy.deepcopy(model).double()(torch.tensor(prompt)).logits.numpy()
    assert np.abs(long(prompt).numpy() - theirs).max() < 2e-4
    with pytest.raises(UserError, match=r"1\.\.512"):
        DecoderConfig.from_huggingface(given, context=513)


GOOD = LLAMA_31_8B


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "mamba"}, "unknown architecture"),
        ({"model_type": None}, "unknown architecture"),
        ({"vocab_size": None}, "missing field 'vocab_size'"),
        ({"vocab_size": "128256"}, "bad field 'vocab_size'"),
        ({"hidden_size": 4096.5}, "bad field 'hidden_size'"),
        ({"hidden_size": 4097}, "bad field 'hidden_size'"),
        ({"num_hidden_layers": 0}, "bad layers"),
        ({"num_hidden_layers": True}, "bad field 'num_hidden_layers'"),
        ({"num_attention_heads": 0}, "bad field 'num_attention_heads'"),
        ({"num_key_value_heads": 5}, "heads do not share key heads"),
        ({"head_dim": 63}, "bad count of features that turn"),
        ({"hidden_act": "tanh"}, "bad field 'hidden_act'"),
        ({"rms_norm_eps": float("nan")}, "bad field 'rms_norm_eps'"),
        ({"tie_word_embeddings": "yes"}, "bad field 'tie_word_embeddings'"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "bad field 'rope_type'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 0.5}}, "bad field 'factor'"),
        ({"model_type": "granite", "logits_scaling": 0}, "bad field 'logits_scaling'"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 2]}, "bad field 'no_rope_layers'"),
        ({"model_type": "smollm3", "no_rope_layer_interval": 0}, "'no_rope_layer_interval'"),
        ({"model_type": "phi", "qk_layernorm": True}, "bad field 'qk_layernorm'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "missing field 'factor'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.0}}, "bad factor"),
        ({"rope_scaling": "linear"}, "bad field 'rope_scaling'"),
        (
            {"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}},
            "high_freq_factor > low_freq_factor",
        ),
        (
            {"rope_parameters": {"rope_theta": 1.0, "rope_type": "default"}},
            "bad field 'rope_scaling'",
        ),
        ({"layer_types": ["full_attention"]}, "bad field 'layer_types'"),
        ({"layer_types": ["sliding_attention"] * 32}, "bad field 'sliding_window'"),
        ({"layer_types": ["linear_attention"] * 32}, "bad field 'layer_types'"),
    ],
)
def test_errors_name_the_field(change: dict[str, Any], message: str) -> None:
    DecoderConfig.from_huggingface(GOOD)
    with pytest.raises(UserError) as caught:
        DecoderConfig.from_huggingface({**GOOD, **change})
    assert message in str(caught.value)


def test_errors_of_experts() -> None:
    given = peer("qwen2_moe").config.to_dict()
    changes: list[tuple[dict[str, Any], str]] = [
        ({"num_experts_per_tok": 7}, "bad count of experts"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"shared_expert_intermediate_size": None}, "missing field"),
    ]
    for change, message in changes:
        with pytest.raises(UserError) as caught:
            DecoderConfig.from_huggingface({**given, **change})
        assert message in str(caught.value)
    gpt2 = {**peer("gpt2").config.to_dict(), "scale_attn_by_inverse_layer_idx": True}
    with pytest.raises(UserError, match="scale_attn_by_inverse_layer_idx"):
        DecoderConfig.from_huggingface(gpt2)

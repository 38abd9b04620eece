"""Tiny models of every family, made by transformers from a configuration with random weights."""

import functools
from typing import Any

import numpy as np
import pytest
from torch_peer import torch

from tilegrad.models.decoder.config import DecoderConfig
from tilegrad.models.decoder.model import Decoder

transformers = pytest.importorskip(
    "transformers", reason="parity of models needs transformers: pip install tilegrad[peers]"
)
transformers.logging.set_verbosity_error()

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
FLAT = {**YARN, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.5, 2.0],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 96,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
PART = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
NEAR = ["sliding_attention", "sliding_attention", "full_attention"]
# name -> (transformers' class of configurations, what differs from SIZES)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama3": ("Llama", {"head_dim": 16, "rope_parameters": LLAMA3}),
    "llama_yarn": ("Llama", {"head_dim": 16, "rope_parameters": YARN}),
    "llama_bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_dynamic": ("Llama", {"head_dim": 16, "rope_parameters": DYNAMIC}),
    "smollm2": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
    "smollm3_fourth": ("SmolLM3", {"num_hidden_layers": 4}),
    "smollm3_window": ("SmolLM3", {"no_rope_layer_interval": 2, "use_sliding_window": True,
                                   "sliding_window": 7}),
    "granite": ("Granite", {"embedding_multiplier": 3.0, "attention_multiplier": 0.2,
                            "residual_multiplier": 0.7, "logits_scaling": 2.5}),
    "olmo2": ("Olmo2", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 8, "sliding_window": 7, "query_pre_attn_scalar": 11}),
    "gemma3": ("Gemma3Text", {"head_dim": 8, "sliding_window": 7, "layer_types": NEAR}),
    "phi2": ("Phi", {"rope_parameters": PART}),
    "phi3": ("Phi3", {"rope_parameters": LONG, "max_position_embeddings": 192,
                      "original_max_position_embeddings": 96}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen2_moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 40,
                               "decoder_sparse_step": 2}),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True}),
    "gpt_oss": ("GptOss", {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 16,
                           "sliding_window": 7, "swiglu_limit": 0.7, "rope_parameters": FLAT}),
    "gpt_neox": ("GPTNeoX", {"num_key_value_heads": 4, "rope_parameters": PART}),
    "gpt_neox_serial": ("GPTNeoX", {"num_key_value_heads": 4, "use_parallel_residual": False,
                                    "rope_parameters": PART}),
    "gpt2": ("GPT2", {}),
}  # fmt: skip
# As published, without what says nothing about the model.
LLAMA_31_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
GPT2 = {
    "vocab_size": 96,
    "n_positions": 128,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@functools.cache
def peer(name: str) -> Any:
    """A model of transformers in float32; weights are wide enough for each part to matter."""
    kind, more = FAMILIES[name]
    config = getattr(transformers, f"{kind}Config")(
        **(GPT2 if kind == "GPT2" else {**SIZES, **more})
    )
    ending = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    torch.manual_seed(len(name))
    model = getattr(transformers, kind.removesuffix("Text") + ending)(config).eval()
    middle = 0.0 if kind.startswith("Gemma") else 1.0
    for path, parameter in model.named_parameters():
        one = middle if parameter.ndim == 1 and "bias" not in path else 0.0
        torch.nn.init.normal_(parameter, one, 0.2)
    return model.requires_grad_(False)


def loaded(name: str, dtype: Any = None) -> Decoder:
    """Our model with the weights of the peer."""
    model = peer(name)
    ours = Decoder(DecoderConfig.from_huggingface(model.config.to_dict()), dtype)
    keys = ours.load(model.state_dict())
    assert not keys.missing_keys and not keys.unexpected_keys
    return ours.requires_grad_(False).eval()


def tokens(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Random tokens."""
    return np.random.default_rng(seed).integers(3, 96, shape)

"""Shapes of models that benches run with random weights, and folders of them without weights.

A folder has config.json and a tokenizer with a word for every id, so that each token is text of its
own; `tilegrad serve FOLDER --random-weights` serves it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LLAMA_3_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        **QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-14b": {
        **QWEN3,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "tie_word_embeddings": False,
    },
    "llama-3-8b": {**LLAMA_3_8B, "num_hidden_layers": 32},
    "tiny": {  # for trying a bench on a CPU
        **LLAMA_3_8B,
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
DIGITS = "abcdefghijklmnop"


def word(number: int) -> str:
    """A word of letters for a number, another for each."""
    return "".join(DIGITS[int(digit, 16)] for digit in f"{number:x}")


def write_shape(folder: Path, shape: dict[str, Any]) -> Path:
    """A model folder of a shape, without weights."""
    folder.mkdir(exist_ok=True)
    words = {"Ġ" + word(i): i for i in range(shape["vocab_size"])}  # the sign of a space
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    level["trim_offsets"] = True
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": words, "merges": []},
    }
    (folder / "config.json").write_text(json.dumps(shape))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder

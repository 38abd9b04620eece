"""A tiny random llama as files: a GGUF of float32 weights, or a folder as Hugging Face has it."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tilegrad.exchange.gguf_write import write_gguf

WIDTH, HIDDEN, HEAD, LAYERS, BYTES = 32, 48, 16, 2, 256
END = BYTES + 1
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPES = {
    "attn_q": (WIDTH, WIDTH),
    "attn_k": (HEAD, WIDTH),
    "attn_v": (HEAD, WIDTH),
    "attn_output": (WIDTH, WIDTH),
    "ffn_gate": (HIDDEN, WIDTH),
    "ffn_up": (HIDDEN, WIDTH),
    "ffn_down": (WIDTH, HIDDEN),
}
FOLDER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def letters() -> list[str]:
    """The printable letters that stand for the 256 bytes in byte-pair vocabularies."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    signs = {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}
    return [signs[b] for b in range(256)]


def weights(seed: int = 5) -> dict[str, Any]:
    """Random weights by the names of GGUF files; the token that ends an answer has none."""
    random = np.random.default_rng(seed)

    def drawn(rows: int, columns: int) -> Any:
        return (random.standard_normal((rows, columns)) * 0.3).astype(np.float32)

    ones = np.ones(WIDTH, np.float32)
    embedding = drawn(BYTES + 2, WIDTH)
    embedding[BYTES:] = 0.0
    found: dict[str, Any] = {"token_embd.weight": embedding, "output_norm.weight": ones}
    for i in range(LAYERS):
        found |= {f"blk.{i}.{n}.weight": drawn(*shape) for n, shape in SHAPES.items()}
        found |= {f"blk.{i}.{n}.weight": ones for n in ("attn_norm", "ffn_norm")}
    return found


def write_file(path: Path, context: int = 128, template: str | None = TEMPLATE) -> Path:
    """The model as a GGUF file; bytes are tokens."""
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.embedding_length": WIDTH,
        "llama.block_count": LAYERS,
        "llama.attention.head_count": WIDTH // HEAD,
        "llama.attention.head_count_kv": 1,
        "llama.feed_forward_length": HIDDEN,
        "llama.context_length": context,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.tokens": [*letters(), "<|im_start|>", "<|im_end|>"],
        "tokenizer.ggml.token_type": [1] * BYTES + [3, 3],
        "tokenizer.ggml.eos_token_id": END,
    }
    if template is not None:
        metadata["tokenizer.chat_template"] = template
    write_gguf(path, metadata, weights(), kinds={"tokenizer.ggml.merges": ("array", "string")})
    return path


def write_folder(folder: Path, generation: dict[str, Any], dtype: Any = np.float32) -> Path:
    """The same as a folder; its query and key rows are in the order of halves."""
    from safetensors.numpy import save_file

    folder.mkdir()
    named = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    }
    for i in range(LAYERS):
        named |= {
            f"model.layers.{i}.{theirs}.weight": f"blk.{i}.{ours}.weight"
            for ours, theirs in FOLDER_NAMES.items()
        }
    found = weights()
    save_file({n: found[g].astype(dtype) for n, g in named.items()}, folder / "model.safetensors")
    config = {
        "model_type": "llama",
        "vocab_size": BYTES + 2,
        "hidden_size": WIDTH,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": WIDTH // HEAD,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
    signs = {sign: i for i, sign in enumerate(letters())}
    extra = [
        {
            "id": BYTES + i,
            "content": text,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for i, text in enumerate(("<|im_start|>", "<|im_end|>"))
    ]
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    tokenizer = {
        "version": "1.0",
        "added_tokens": extra,
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": signs, "merges": []},
    }
    tables = {
        "config.json": config,
        "generation_config.json": generation,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {"eos_token": "<|im_end|>", "chat_template": TEMPLATE},
    }
    for name, table in tables.items():
        (folder / name).write_text(json.dumps(table))
    return folder

"""A folder of a tiny gpt-oss with experts in MXFP4, and its weights unpacked."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

OSS = {
    "model_type": "gpt_oss",
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 64,  # as wide as the features: shapes do not tell the axes apart
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "sliding_window": 8,
}
SMALL = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def write_folder(folder: Path) -> dict[str, np.ndarray]:
    """Write the folder; gives all weights by name, plain."""
    draw = np.random.default_rng(0)
    plain: dict[str, np.ndarray] = {}
    tables: dict[str, np.ndarray] = {}

    def both(name: str, *shape: int) -> None:
        plain[name] = tables[name] = (draw.standard_normal(shape) * 0.2).astype(np.float32)

    def packed(name: str, rows: int, columns: int) -> None:
        blocks = draw.integers(0, 256, (3, rows, columns // 32, 16)).astype(np.uint8)
        scales = draw.integers(122, 126, (3, rows, columns // 32)).astype(np.uint8)
        tables[f"{name}_blocks"], tables[f"{name}_scales"] = blocks, scales
        codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*scales.shape, 32)
        values = SMALL[codes] * np.float32(2.0) ** (scales.astype(np.float32)[..., None] - 127)
        plain[name] = np.ascontiguousarray(values.reshape(3, rows, columns).swapaxes(1, 2))

    for name, *shape in (("model.embed_tokens", 40, 64), ("lm_head", 40, 64), ("model.norm", 64)):
        both(f"{name}.weight", *shape)
    for layer in range(2):
        start = f"model.layers.{layer}."
        for part, rows, columns in (("q", 64, 64), ("k", 32, 64), ("v", 32, 64), ("o", 64, 64)):
            both(f"{start}self_attn.{part}_proj.weight", rows, columns)
            both(f"{start}self_attn.{part}_proj.bias", rows)
        both(f"{start}self_attn.sinks", 4)
        both(f"{start}input_layernorm.weight", 64)
        both(f"{start}post_attention_layernorm.weight", 64)
        both(f"{start}mlp.router.weight", 3, 64)
        both(f"{start}mlp.router.bias", 3)
        packed(f"{start}mlp.experts.gate_up_proj", 128, 64)
        packed(f"{start}mlp.experts.down_proj", 64, 64)
        both(f"{start}mlp.experts.gate_up_proj_bias", 3, 128)
        both(f"{start}mlp.experts.down_proj_bias", 3, 64)
    save_file(tables, folder / "model.safetensors")
    table = {**OSS, "quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(table))
    return plain

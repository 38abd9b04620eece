"""The fields of a DecoderConfig from the metadata of a GGUF file.

Architectures are llama.cpp's: Llama, SmolLM2, Mistral and Mixtral files all say `llama`. What
the metadata leaves out (tied heads, biases, divisors of rotary speeds) the tensors tell.
Invariant: norms of GGUF files need no offset, Gemma's is in their weights already.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...core.errors import UserError
from .fields import Fields
from .rotary import Rotary, longrope_factor, yarn_factor

OP = "DecoderConfig.from_gguf"
GEMMA: dict[str, Any] = {"gemma": True, "tied": True, "activation": "gelu_tanh"}
GEMMA_2 = {**GEMMA, "post_norms": True}
BIASED = {"qkv_bias": True, "output_bias": True, "feed_bias": True}
LAYERED: dict[str, Any] = {**BIASED, "norm": "layer", "gated": False, "activation": "gelu_tanh"}
OSS = {"qkv_bias": True, "output_bias": True, "clamped": True, "sinks": True}
# What the architectures are where metadata is silent. `wide` is the depth of the one size whose
# scores are scaled by width / heads and not by the width of a head.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"head_norms": True},
    "smollm3": {"tied": True, "base": 2000000.0, "unrotated": 4},
    "granite": {"scales": True},
    "olmo2": {"pre_norms": False, "post_norms": True, "head_norms": True, "whole_norms": True},
    "gemma": GEMMA,
    "gemma2": {**GEMMA_2, "pattern": 2, "wide": 46, "softcap": 50.0, "logit_softcap": 30.0},
    "gemma3": {**GEMMA_2, "pattern": 6, "wide": 62, "head_norms": True, "base": 1000000.0},
    "phi2": {**LAYERED, "head_bias": True, "parallel": True, "shared_norm": True},
    "phi3": {},
    "qwen2moe": {"qkv_bias": True, "shared": True, "normalize_experts": False},
    "qwen3moe": {"head_norms": True},
    "gpt-oss": {**OSS, "base": 150000.0, "pattern": 2, "window": 128, "truncate": False},
    "gptneox": {**LAYERED, "activation": "gelu", "parallel": True},
    "gpt2": {**LAYERED, "tied": True, "learned": True},
}
CLAMPED = {"expert_bias": True, "gate_limit": 7.0}  # numbers that these files do not say
TRAITS = (
    "norm",
    "pre_norms",
    "post_norms",
    "head_norms",
    "whole_norms",
    "gated",
    "parallel",
    "shared_norm",
    "activation",
    "sinks",
)


def read(metadata: Mapping[str, Any], tensors: Mapping[str, Any] | None) -> dict[str, Any]:
    """Fields of a DecoderConfig from GGUF metadata and the tensors by name."""
    kind = metadata.get("general.architecture")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UserError(
            "unknown architecture",
            op=OP,
            expected=", ".join(FAMILIES),
            got=repr(kind),
            hint="'general.architecture' says it",
        )
    family, fields = FAMILIES[kind], Fields(metadata, f"{OP} ({kind})", f"{kind}.")
    width, layers = fields.whole("embedding_length"), fields.layers("block_count")
    heads = _same(fields, "attention.head_count", None)
    if heads < 1 or (fields.get("attention.key_length") is None and width % heads):
        raise fields.wrong("attention.head_count", f"a divisor of {width}", heads)
    head_width = fields.whole("attention.key_length", width // heads)
    if width < 1 or head_width < 1:
        raise fields.wrong("attention.key_length", "above 0", head_width)
    if fields.whole("attention.value_length", head_width) != head_width:
        raise fields.wrong("attention.value_length", f"as key_length, {head_width}", "another")
    rms = "rms_" if family.get("norm") != "layer" else ""
    found: dict[str, Any] = {
        "family": kind,
        "vocabulary": _vocabulary(fields, tensors),
        "width": width,
        "layers": layers,
        "heads": heads,
        "key_heads": _same(fields, "attention.head_count_kv", heads),
        "head_width": head_width,
        "hidden": _same(fields, "feed_forward_length", None),
        "context": fields.whole("context_length"),
        "norm_epsilon": fields.number(f"attention.layer_norm_{rms}epsilon"),
        **{trait: family[trait] for trait in TRAITS if trait in family},
        **_told(family, tensors),
    }
    if "parallel" in family and "shared_norm" not in family:
        found["parallel"] = fields.flag("use_parallel_residual", True)
    found |= _scales(fields, family, found)
    every = family.get("unrotated", 0)
    found["rotated"] = tuple(not every or (i + 1) % every != 0 for i in range(layers))
    found["windows"] = _windows(fields, family, layers)
    if fields.whole("expert_count", 0):
        found |= _experts(fields, family, layers, tensors)
    return found | ({} if "learned" in family else _positions(fields, family, found, tensors))


def _scales(fields: Fields, family: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """What scores, embeddings, parts and logits are scaled and capped by."""
    width, heads, scales, scale = found["width"], found["heads"], {}, 0.0
    if "gemma" in family:
        wide = found["layers"] == family.get("wide")
        scale = (width / heads if wide else found["head_width"]) ** -0.5
        scales["embedding_scale"] = width**0.5
        for ours, name in (("softcap", "attn"), ("logit_softcap", "final")):
            scales[ours] = fields.number(f"{name}_logit_softcapping", family.get(ours, 0.0))
    if "scales" in family:
        divisor = fields.number("logit_scale", 1.0)
        if divisor == 0.0:
            raise fields.wrong("logit_scale", "not 0", divisor)
        scales = {
            "logit_scale": 1.0 / divisor,
            "embedding_scale": fields.number("embedding_scale", 1.0),
            "residual_scale": fields.number("residual_scale", 1.0),
        }
    return {"scale": fields.number("attention.scale", scale), **scales}


def _same(fields: Fields, name: str, default: int | None) -> int:
    """An int, or a list of equal ones, one for each layer."""
    value = fields.get(name)
    if isinstance(value, (list, tuple, np.ndarray)):
        found = {Fields({name: v}, fields.op).whole(name) for v in value}
        if len(found) != 1:
            raise fields.wrong(name, "the same for all layers", value)
        return found.pop()
    return fields.whole(name, default)


def _vocabulary(fields: Fields, tensors: Mapping[str, Any] | None) -> int:
    """Rows of the embedding; without tensors, how many tokens the tokenizer has."""
    tokens = fields.given.get("tokenizer.ggml.tokens")
    if tokens is not None and not isinstance(tokens, (list, tuple, np.ndarray)):
        raise UserError(
            "the tokens are no list",
            op=fields.op,
            expected="tokenizer.ggml.tokens",
            got=type(tokens).__name__,
        )
    count = None if tokens is None else len(tokens)
    if tensors is None or "token_embd.weight" not in tensors:
        return fields.whole("vocab_size", count)
    rows = int(tensors["token_embd.weight"].shape[0])
    if count is not None and count > rows:
        raise UserError(
            "the tokenizer has more tokens than the embedding has rows",
            op=fields.op,
            expected=f"at most {rows}",
            got=count,
        )
    return rows


def _told(family: dict[str, Any], tensors: Mapping[str, Any] | None) -> dict[str, bool]:
    """Biases and the tied head: by what tensors there are, or by the family."""
    names = {
        "qkv_bias": ("blk.0.attn_q.bias", "blk.0.attn_qkv.bias"),
        "output_bias": ("blk.0.attn_output.bias",),
        "feed_bias": ("blk.0.ffn_up.bias",),
        "head_bias": ("output.bias",),
    }
    if tensors is None:
        return {n: family.get(n, False) for n in (*names, "tied")}
    told = {n: any(w in tensors for w in wanted) for n, wanted in names.items()}
    return {**told, "tied": "output.weight" not in tensors}


def _windows(fields: Fields, family: dict[str, Any], layers: int) -> tuple[int, ...]:
    usual = family.get("window", 4096 if "pattern" in family else 0)
    window = fields.whole("attention.sliding_window", usual)
    every = family.get("pattern", 0)
    return tuple(window if not every or (i + 1) % every else 0 for i in range(layers))


def _experts(
    fields: Fields, family: dict[str, Any], layers: int, tensors: Mapping[str, Any] | None
) -> dict[str, Any]:
    hidden = _same(fields, "feed_forward_length", None)
    shared = family.get("shared", False)
    routed = (True,) * layers
    if tensors is not None:
        routed = tuple(f"blk.{i}.ffn_gate_inp.weight" in tensors for i in range(layers))
    return {
        "experts": fields.whole("expert_count"),
        "experts_used": fields.whole("expert_used_count"),
        "expert_hidden": fields.whole("expert_feed_forward_length", hidden),
        "shared_hidden": fields.whole("expert_shared_feed_forward_length") if shared else 0,
        "normalize_experts": family.get("normalize_experts", True),
        "routed": routed,
        **(CLAMPED if "clamped" in family else {}),
    }


def _positions(
    fields: Fields, family: dict[str, Any], found: dict[str, Any], tensors: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The rotary positions; divisors of speeds are tensors of the file."""
    width = fields.whole("rope.dimension_count", found["head_width"])
    rotary: dict[str, Any] = {
        "base": fields.number("rope.freq_base", family.get("base", 10000.0)),
        "width": width,
    }
    kind = fields.word("rope.scaling.type", "none")
    original = fields.whole("rope.scaling.original_context_length", found["context"])
    factor = fields.number("rope.scaling.factor", 1.0)
    extra: dict[str, Any] = {}
    if "gemma" in family and "head_norms" in family:  # Gemma 3: near layers turn as ever
        extra["local_rotary"] = Rotary(10000.0, width)
    if tensors is not None and "rope_freqs.weight" in tensors:
        rotary["divisors"] = _values(tensors["rope_freqs.weight"])
    elif tensors is not None and "rope_factors_short.weight" in tensors:
        usual = longrope_factor(found["context"] / max(original, 2), max(original, 2))
        rotary["divisors"] = _values(tensors["rope_factors_short.weight"])
        rotary["attention_factor"] = fields.number("rope.scaling.attn_factor", usual)
        extra["context"] = min(original, found["context"])
    elif kind == "linear":
        rotary |= {"kind": "linear", "factor": factor}
    elif kind == "yarn":
        by = fields.number("rope.scaling.attn_factor", 1.0) * yarn_factor(factor)
        rotary |= {"kind": "yarn", "factor": factor, "original": original, "attention_factor": by}
        rotary["truncate"] = family.get("truncate", True)
    elif kind != "none":
        raise fields.wrong("rope.scaling.type", "none, linear or yarn, or tensors of factors", kind)
    return {"rotary": Rotary(**rotary), **extra}


def _values(tensor: Any) -> tuple[float, ...]:
    array = tensor.values() if hasattr(tensor, "values") else tensor  # as files store it, or plain
    return tuple(float(v) for v in np.asarray(array).reshape(-1))


__all__ = ["FAMILIES", "read"]

"""The fields of a DecoderConfig from a Hugging Face `config.json`.

One table says what a family is besides what its file says (`FAMILIES`); the rest reads fields.
Both spellings of rotary scaling are known: `rope_theta` with `rope_scaling`, and the newer
`rope_parameters`. Invariant: a trait this decoder does not have is an error, not ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.errors import UserError
from .fields import Fields
from .rotary import Rotary, longrope_factor, yarn_factor

OP = "DecoderConfig.from_huggingface"
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
GEMMA: dict[str, Any] = {
    "norm_offset": 1.0,
    "tied": True,
    "activation": "gelu_pytorch_tanh",
    "head_width": 256,
}
GEMMA_2 = {**GEMMA, "post_norms": True}
# What the families are where their files are silent. Traits by the names of DecoderConfig hold
# whatever a file says; `names` are those of fields that a family calls otherwise.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"window": 4096},
    "smollm3": {"tied": True, "base": 2000000.0, "unrotated": 4, "asks_window": True},
    "granite": {"scales": True},
    "olmo2": {"epsilon": 1e-5, "pre_norms": False, "post_norms": True, "head_norms": True,
              "whole_norms": True},
    "qwen2": {"qkv_bias": True, "asks_window": True},
    "qwen3": {"head_norms": True, "asks_window": True},
    "gemma": {**GEMMA, "activations": {"gelu": "gelu_tanh"}},  # as its makers meant it
    "gemma2": {**GEMMA_2, "softcap": 50.0, "logit_softcap": 30.0, "window": 4096, "pattern": 2},
    "gemma3_text": {**GEMMA_2, "head_norms": True, "window": 4096, "pattern": 6,
                    "base": 1000000.0},
    "phi": {"norm": "layer", "epsilon": 1e-5, "biased": True, "feed_bias": True,
            "head_bias": True, "gated": False, "parallel": True, "shared_norm": True,
            "activation": "gelu_new", "share": 0.5},
    "phi3": {"epsilon": 1e-5},
    "mixtral": {"experts": "num_local_experts", "epsilon": 1e-5, "base": 1000000.0},
    "qwen2_moe": {"experts": "num_experts", "qkv_bias": True, "shared": True,
                  "asks_window": True},
    "qwen3_moe": {"experts": "num_experts", "head_norms": True, "asks_window": True},
    "gpt_oss": {"experts": "num_local_experts", "epsilon": 1e-5, "base": 150000.0, "biased": True,
                "window": 128, "pattern": 2, "head_width": 64, "clamped": True, "sinks": True},
    "gpt_neox": {"norm": "layer", "epsilon": 1e-5, "biased": True, "feed_bias": True,
                 "gated": False, "activation": "gelu", "share": 0.25, "asks_parallel": True,
                 "names": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}},
    "gpt2": {},
}  # fmt: skip

TRAITS = (
    "norm",
    "norm_offset",
    "pre_norms",
    "post_norms",
    "head_norms",
    "whole_norms",
    "gated",
    "parallel",
    "shared_norm",
    "sinks",
)


def read(given: Mapping[str, Any], context: int | None = None) -> dict[str, Any]:
    """Fields of a DecoderConfig from the dict of a config.json."""
    if not isinstance(given, Mapping):
        raise UserError("not a configuration", op=OP, expected="a dict", got=type(given).__name__)
    if isinstance(given.get("text_config"), Mapping):  # the text part of a model that also sees
        given = given["text_config"]
    family = given.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise UserError(
            "unknown architecture",
            op=OP,
            expected=", ".join(FAMILIES),
            got=repr(family),
            hint="the field 'model_type' says it",
        )
    fields = Fields(given, f"{OP} ({family})")
    found = _gpt2(fields) if family == "gpt2" else _rotating(fields, FAMILIES[family])
    if found["context"] < 1:
        raise UserError(
            "the model has no positions", op=OP, expected="above 0", got=found["context"]
        )
    found["longest"] = found["context"]
    if family != "gpt2":
        found |= _positions(fields, FAMILIES[family], found, context)
    if context is not None:
        if not 0 < context <= found["longest"]:
            raise UserError(
                "the model has not so many positions",
                op=OP,
                expected=f"1..{found['longest']}",
                got=context,
            )
        found["context"] = context
    return {"family": family, **found}


def _gpt2(fields: Fields) -> dict[str, Any]:
    """GPT-2 has names of its own."""
    for name, wanted in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        if fields.flag(name, wanted) is not wanted:
            raise fields.wrong(name, wanted, not wanted)
    width, heads = fields.whole("n_embd", 768), fields.whole("n_head", 12)
    _divides(fields, "n_embd", width, heads)
    return {
        "vocabulary": fields.whole("vocab_size"),
        "width": width,
        "layers": fields.layers("n_layer", 12),
        "heads": heads,
        "key_heads": heads,
        "head_width": width // heads,
        "hidden": fields.whole("n_inner", 4 * width),
        "context": fields.whole("n_positions", 1024),
        "norm": "layer",
        "norm_epsilon": fields.number("layer_norm_epsilon", 1e-5),
        "qkv_bias": True,
        "output_bias": True,
        "feed_bias": True,
        "gated": False,
        "activation": fields.choice("activation_function", ACTIVATIONS, "gelu_new"),
        "tied": fields.flag("tie_word_embeddings", True),
    }


def _rotating(fields: Fields, family: dict[str, Any]) -> dict[str, Any]:
    """All others: sizes, norms, biases, windows, experts."""
    width, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    if heads < 1:
        raise fields.wrong("num_attention_heads", "above 0", heads)
    if fields.get("head_dim") is None and "head_width" not in family:
        _divides(fields, "hidden_size", width, heads)
    gemma, layered = "norm_offset" in family, family.get("norm") == "layer"
    for name in ("use_bidirectional_attention", "qk_layernorm"):  # what this decoder has not
        if fields.flag(name, False):
            raise fields.wrong(name, False, True)
    bias = fields.flag("attention_bias", family.get("biased", False))
    act = "hidden_activation" if fields.get("hidden_activation") else "hidden_act"
    found: dict[str, Any] = {
        "vocabulary": fields.whole("vocab_size"),
        "width": width,
        "layers": fields.layers("num_hidden_layers"),
        "heads": heads,
        "key_heads": fields.whole("num_key_value_heads", heads),
        "head_width": fields.whole("head_dim", family.get("head_width", width // heads)),
        "hidden": fields.whole("intermediate_size"),
        "context": fields.whole("max_position_embeddings"),
        "norm_epsilon": fields.number(
            "layer_norm_eps" if layered else "rms_norm_eps", family.get("epsilon", 1e-6)
        ),
        "qkv_bias": fields.flag("qkv_bias", True) if family.get("qkv_bias") else bias,
        "output_bias": bias,
        "feed_bias": fields.flag("mlp_bias", family.get("feed_bias", False)),
        "head_bias": fields.flag("lm_head_bias", family.get("head_bias", False)),
        "activation": fields.choice(
            act, {**ACTIVATIONS, **family.get("activations", {})}, family.get("activation", "silu")
        ),
        "parallel": "asks_parallel" in family and fields.flag("use_parallel_residual", True),
        "embedding_scale": width**0.5 if gemma else 1.0,
        "tied": fields.flag("tie_word_embeddings", family.get("tied", False)),
        **{trait: family[trait] for trait in TRAITS if trait in family},
    }
    if gemma:
        found |= _gemma(fields, family, found["head_width"])
    if "scales" in family:
        found |= _scales(fields)
    found["rotated"] = _rotated(fields, family, found["layers"])
    found["windows"] = _windows(fields, family, found["rotated"])
    return found | (_experts(fields, family, found["layers"]) if "experts" in family else {})


def _gemma(fields: Fields, family: dict[str, Any], head_width: int) -> dict[str, Any]:
    """Scores are scaled by a number of its own, and capped."""
    scalar = fields.number("query_pre_attn_scalar", float(head_width))
    if scalar <= 0.0:
        raise fields.wrong("query_pre_attn_scalar", "above 0", scalar)
    capped = {}
    for ours, name in (
        ("softcap", "attn_logit_softcapping"),
        ("logit_softcap", "final_logit_softcapping"),
    ):
        said = name in fields.given  # null switches a cap off, absence does not
        capped[ours] = fields.number(name, 0.0 if said else family.get(ours, 0.0))
    return {"scale": scalar**-0.5, **capped}


def _scales(fields: Fields) -> dict[str, Any]:
    """Granite scales scores, embeddings, what parts add, and logits."""
    divisor = fields.number("logits_scaling", 1.0)
    if divisor == 0.0:
        raise fields.wrong("logits_scaling", "not 0", divisor)
    return {
        "scale": fields.number("attention_multiplier", 1.0),
        "logit_scale": 1.0 / divisor,
        "embedding_scale": fields.number("embedding_multiplier", 1.0),
        "residual_scale": fields.number("residual_multiplier", 1.0),
    }


def _rotated(fields: Fields, family: dict[str, Any], layers: int) -> tuple[bool, ...]:
    """Which layers turn queries and keys: of SmolLM3 every fourth does not."""
    if "unrotated" not in family:
        return (True,) * layers
    said = fields.get("no_rope_layers")  # 1: the layer turns, whatever the name says
    if said is not None:
        if (
            not isinstance(said, (list, tuple))
            or len(said) < layers
            or any(v not in (0, 1) for v in said)
        ):
            raise fields.wrong("no_rope_layers", f"{layers} times 0 or 1", said)
        return tuple(bool(v) for v in said[:layers])
    every = fields.whole("no_rope_layer_interval", family["unrotated"])
    if every < 1:
        raise fields.wrong("no_rope_layer_interval", "above 0", every)
    return tuple((i + 1) % every != 0 for i in range(layers))


def _windows(fields: Fields, family: dict[str, Any], rotated: tuple[bool, ...]) -> tuple[int, ...]:
    """How far back each layer sees; 0: to the start."""
    layers = len(rotated)
    said = "sliding_window" in fields.given  # null switches it off, absence does not
    window = fields.whole("sliding_window", 0 if said else family.get("window", 0))
    asked = fields.get("use_sliding_window")
    if asked is False or (asked is None and "asks_window" in family):
        window = 0
    kinds = fields.get("layer_types")
    if kinds is not None:
        known = {"full_attention": 0, "sliding_attention": window}
        if not isinstance(kinds, (list, tuple)) or len(kinds) != layers:
            raise fields.wrong("layer_types", f"{layers} words, one a layer", kinds)
        if any(not isinstance(k, str) or k not in known for k in kinds):
            raise fields.wrong("layer_types", " or ".join(known), kinds)
        if "sliding_attention" in kinds and not window:
            raise fields.wrong("sliding_window", "above 0: layer_types has such layers", window)
        return tuple(known[k] for k in kinds)
    if not window:
        return (0,) * layers
    if "unrotated" in family:
        return tuple(0 if t else window for t in rotated)
    if "pattern" in family:
        every = fields.whole("sliding_window_pattern", family["pattern"])
        if every < 1:
            raise fields.wrong("sliding_window_pattern", "above 0", every)
        return tuple(window if (i + 1) % every else 0 for i in range(layers))
    if fields.get("max_window_layers") is not None:  # Qwen
        from_layer = fields.whole("max_window_layers")
        if fields.given["model_type"] == "qwen2_moe":
            return tuple(window if i < from_layer and i % 2 == 0 else 0 for i in range(layers))
        return tuple(window if i >= from_layer else 0 for i in range(layers))
    return (window,) * layers


def _experts(fields: Fields, family: dict[str, Any], layers: int) -> dict[str, Any]:
    """Routed experts; Qwen may keep some layers dense."""
    name = family["experts"] if fields.get(family["experts"]) is not None else "num_local_experts"
    if family["experts"] == "num_local_experts":  # Mixtral and gpt-oss
        clamped = {
            "expert_bias": True,
            "gate_limit": fields.number("swiglu_limit", 7.0),
            "gate_slope": fields.number("swiglu_alpha", 1.702),
        }
        return {
            "experts": fields.whole(name),
            "expert_hidden": fields.whole("intermediate_size"),
            "experts_used": fields.whole("num_experts_per_tok"),
            **(clamped if "clamped" in family else {}),
        }
    every = fields.whole("decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers", ())
    if every < 1 or not isinstance(dense, (list, tuple)):
        raise fields.wrong("decoder_sparse_step", "above 0, and mlp_only_layers a list", every)
    shared = fields.whole("shared_expert_intermediate_size") if family.get("shared") else 0
    return {
        "experts": fields.whole(name),
        "experts_used": fields.whole("num_experts_per_tok"),
        "expert_hidden": fields.whole("moe_intermediate_size"),
        "shared_hidden": shared,
        "normalize_experts": fields.flag("norm_topk_prob", False),
        "routed": tuple(i not in dense and (i + 1) % every == 0 for i in range(layers)),
    }


# ---- rotary positions -------------------------------------------------------------------------


def _positions(
    fields: Fields, family: dict[str, Any], found: dict[str, Any], context: int | None
) -> dict[str, Any]:
    """The rotary positions, and those of layers with a window where they differ."""
    base = fields.number(
        family.get("names", {}).get("rope_theta", "rope_theta"), family.get("base", 10000.0)
    )
    newer, older = fields.get("rope_parameters"), fields.get("rope_scaling")
    if newer is not None and older is not None and newer != older:
        raise fields.wrong("rope_scaling", "rope_parameters alone", older)
    part = (
        newer
        if newer is not None
        else {"rope_theta": base, **_mapping(fields, "rope_scaling", older)}
    )
    part = _mapping(fields, "rope_parameters", part)
    local = None
    if "full_attention" in part:  # one for each kind of layer
        local = _mapping(fields, "rope_parameters", part.get("sliding_attention"))
        part = _mapping(fields, "rope_parameters", part["full_attention"])
    elif fields.given["model_type"] == "gemma3_text":
        local = {"rope_theta": fields.number("rope_local_base_freq", 10000.0)}
    name = family.get("names", {}).get("partial_rotary_factor", "partial_rotary_factor")
    share = fields.number(name, family.get("share", 1.0))
    result = _rotary(fields, part, found, base, share, context)
    if local is not None:
        result["local_rotary"] = _rotary(fields, local, found, 10000.0, share, None)["rotary"]
    return result


def _mapping(fields: Fields, name: str, value: Any) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise fields.wrong(name, "an object", value)
    return value or {}


def _rotary(
    fields: Fields,
    given: Mapping[str, Any],
    found: dict[str, Any],
    base: float,
    share: float,
    context: int | None,
) -> dict[str, Any]:
    """One Rotary; longrope and dynamic also say how many positions there are."""
    part = Fields(given, fields.op)
    kind = part.word("rope_type", part.word("type", "default"))
    rotary: dict[str, Any] = {
        "base": part.number("rope_theta", base),
        "width": int(found["head_width"] * part.number("partial_rotary_factor", share)),
    }
    if kind == "default":
        return {"rotary": Rotary(**rotary)}
    original = part.whole(
        "original_max_position_embeddings", fields.whole("original_max_position_embeddings", 0)
    )
    if kind == "linear":
        rotary["factor"] = part.number("factor")
    elif kind == "llama3":
        rotary |= {
            "factor": part.number("factor"),
            "original": original,
            "low": part.number("low_freq_factor"),
            "high": part.number("high_freq_factor"),
        }
    elif kind == "yarn":
        rotary |= _yarn(part, original or found["context"], found["context"])
    elif kind in ("longrope", "su"):
        return _longrope(part, rotary, original, found["context"], context)
    elif kind == "dynamic":
        return _dynamic(part, rotary, found["context"], context)
    else:
        raise part.wrong("rope_type", "default, linear, dynamic, llama3, yarn or longrope", kind)
    return {"rotary": Rotary(kind=kind, **rotary)}


def _yarn(part: Fields, original: int, context: int) -> dict[str, Any]:
    factor = part.number("factor", context / original)
    by, by_all = part.number("mscale", 0.0), part.number("mscale_all_dim", 0.0)
    usual = yarn_factor(factor)
    if by and by_all:
        usual = yarn_factor(factor, by) / yarn_factor(factor, by_all)
    return {
        "factor": factor,
        "original": original,
        "beta_fast": part.number("beta_fast", 32.0),
        "beta_slow": part.number("beta_slow", 1.0),
        "truncate": part.flag("truncate", True),
        "attention_factor": part.number("attention_factor", usual),
    }


def _dynamic(
    part: Fields, rotary: dict[str, Any], most: int, context: int | None
) -> dict[str, Any]:
    """Speeds as trained up to the context of training; slower ones where more is asked for."""
    factor, width = part.number("factor"), rotary["width"]
    if factor < 1.0 or width < 4:
        raise part.wrong("factor", "at least 1, of 4 features or more", factor)
    if context is not None and context > most:
        grown = factor * context / most - (factor - 1.0)
        rotary = {**rotary, "base": rotary["base"] * grown ** (width / (width - 2))}
    return {"rotary": Rotary(**rotary), "longest": int(most * factor)}


def _longrope(
    part: Fields, rotary: dict[str, Any], original: int, most: int, context: int | None
) -> dict[str, Any]:
    """Phi-3: short divisors up to the original context, long ones where more is asked for."""
    if original < 2:
        raise part.wrong("original_max_position_embeddings", "above 1", original)
    context = min(original, most) if context is None else context
    factor = part.number("factor", most / original)
    name = "long_factor" if context > original else "short_factor"
    usual = longrope_factor(factor, original)
    made = Rotary(
        divisors=part.numbers(name),
        **rotary,
        attention_factor=part.number("attention_factor", usual),
    )
    return {"rotary": made, "context": context}


def _divides(fields: Fields, name: str, width: int, heads: int) -> None:
    if heads < 1 or width % heads:
        raise fields.wrong(name, f"a multiple of {heads} heads", width)


__all__ = ["ACTIVATIONS", "FAMILIES", "read"]

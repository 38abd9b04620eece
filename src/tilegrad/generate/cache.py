"""What keys and values are kept in: the model's dtype, e4m3 or int8 with scales.

Asked for as users of vLLM do (`kv_cache_dtype`): "auto" is what the model's files ask for, else the
model's dtype. Scales are those of the files (`k_scale`, `v_scale`, for a layer or for each of its
key heads), given, or calibrated over a text, for each key head; else e4m3 has 1.0, as vLLM has,
and int8, for which 1.0 would be senseless, is calibrated. Imported only where there are 8 bits.
Invariant: a scale is a finite number above 0; what the files ask for is kept, or refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.dtype import DType, float8_e4m3, int8
from ..core.errors import UserError
from ..models.decoder.model import Decoder
from ..tensor.attention import attention
from ..tensor.creation import tensor
from ..tensor.jit import jit
from ..tensor.movement import stack
from ..tensor.tensor import Tensor, no_grad
from .load import CacheFacts, Loaded

OP = "LLM(kv_cache_dtype=...)"
NAMES = {"fp8": float8_e4m3, "fp8_e4m3": float8_e4m3, "int8": int8}
WORDS = {float8_e4m3: "fp8", int8: "int8"}
LAYER = re.compile(r"\.([0-9]{1,6})\.self_attn\.(?:[kv]_proj\.)?(k|v|kv)_scale\Z")
CALIBRATED, MARGIN, TOKENS = "calibrated", 1.2, 512  # of what other texts may have more
TEXT = """The harbour was quiet when the first boat came in. Three people stood on the pier, and
one of them held a lamp. "How many boxes?" asked the oldest. "Twenty-seven," said the captain, "and
four letters." In 1893 a crossing took nine days; now it takes two.

def area(width, height):
    return width * height  # in square metres

1. Boil 250 ml of water. 2. Add salt, rice and a little oil. 3. Wait for 12 minutes.
Energy is never made or lost: it changes its form, from motion to heat, from heat to light. Why
does ice float? Because it is lighter than the water it came from, by about 9 %."""
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Kept:
    """How keys and values are kept."""

    dtype: DType
    scales: Any = None  # (layers, 2, key heads) of 8 bits

    @property
    def name(self) -> str:
        """As it is asked for."""
        return WORDS.get(self.dtype, str(self.dtype))


def kept_for(wanted: str, given: Any, loaded: Loaded) -> Kept:
    """How a model's keys and values are kept, as it was asked for and as its files say."""
    own, files, config = loaded.model.norm.weight.dtype, loaded.cache, loaded.model.config
    dtype = kept_in(wanted, own, files)
    if dtype.bits != 8:
        if given is not None:
            raise UserError("scales are for keys and values of 8 bits", op=OP, got=f"{dtype}")
        return Kept(dtype)
    if given is not None and not isinstance(given, str):
        return Kept(dtype, given)
    if given is None and files is not None and files.scales:
        found = scales_of(files.scales, config.layers, config.key_heads)
        said = asked_by(files.scheme) or float8_e4m3
        return Kept(dtype, found * (_most(said) / _most(dtype)))
    if given not in (None, CALIBRATED):
        raise UserError("no such scales", op=OP, expected=f"numbers or {CALIBRATED!r}", got=given)
    if given is None and dtype is not int8:
        return Kept(dtype, np.ones((config.layers, 2, config.key_heads), np.float32))
    return Kept(dtype, calibrated(loaded.model, text_ids(loaded), dtype))


def kept_in(wanted: Any, own: DType, files: CacheFacts | None) -> DType:
    """The dtype of keys and values of a model that computes in its own. What files ask for is
    looked at where nothing else is wanted."""
    if not isinstance(wanted, str) or wanted not in ("auto", str(own), *NAMES):
        raise UserError(
            "no such dtype of keys and values",
            op=OP,
            expected=f"auto, {own}, {', '.join(NAMES)}",
            got=repr(wanted)[:80],
            hint="fp8 is e4m3" if "e5m2" in str(wanted) else None,
        )
    if wanted == "auto" and files is not None:
        return asked_by(files.scheme) or own
    return NAMES.get(wanted, own)


def _most(dtype: DType) -> float:
    return float(dtype.highest)


# ---- what files say -----------------------------------------------------------------------------


def asked_by(scheme: Any) -> DType | None:
    """The dtype that `kv_cache_scheme` of compressed-tensors and ModelOpt, or ModelOpt's
    `kv_cache_quant_algo`, ask for; None for none."""
    if scheme is None:
        return None
    if isinstance(scheme, str):
        found = {"FP8": float8_e4m3, "INT8": int8}.get(scheme.upper())
    else:
        table = scheme if isinstance(scheme, Mapping) else {}
        kinds = {("float", 8): float8_e4m3, ("int", 8): int8}
        kind, bits = table.get("type"), table.get("num_bits")
        named = isinstance(kind, str) and isinstance(bits, int)
        found = kinds.get((kind, bits)) if named else None  # type: ignore[arg-type]
        static = not table.get("dynamic") and table.get("symmetric", True)
        strategy = table.get("strategy") or "tensor"
        if not static or strategy not in ("tensor", "attn_head"):
            found = None
    if found is None:
        raise UserError(
            "the model asks for keys and values in a way that is not known",
            op=OP,
            expected="symmetric fp8 or int8 with fixed scales, one of a layer or one of a head",
            got=repr(scheme)[:120],
            hint="kv_cache_dtype with the dtype of the model keeps them as they are",
        )
    return found


def scales_of(tensors: Mapping[str, Any], layers: int, key_heads: int) -> Array:
    """(layers, 2, key heads) of tensors by name; 1.0 where a layer has none."""
    found = np.ones((layers, 2, key_heads), np.float32)
    for name, stored in tensors.items():
        match = LAYER.search(name)
        if name.endswith("q_scale"):
            continue  # queries are not rounded
        numbers = np.asarray(stored.array()).astype(np.float32).reshape(-1)
        layer = layers if match is None else int(match[1])
        right = np.isfinite(numbers).all() and (numbers > 0).all()
        if match is None or layer >= layers or numbers.size not in (1, key_heads) or not right:
            raise UserError(
                f"{name[:100]} is no scale of keys or values",
                op=OP,
                expected=f"1 or {key_heads} numbers above 0, of a layer below {layers}",
                got=numbers[:4],
            )
        for which in "kv" if match[2] == "kv" else match[2]:
            found[layer, "kv".index(which)] = numbers
    return found


# ---- calibration --------------------------------------------------------------------------------


def text_ids(loaded: Loaded) -> list[int]:
    """Ids of the text, or any where the model has no tokenizer."""
    config, tokenizer = loaded.model.config, loaded.tokenizer
    ids = tokenizer.encode(TEXT) if len(tokenizer) else list(range(1, 65))
    return [i % config.vocabulary for i in ids][: min(TOKENS, config.context)]


def calibrated(model: Decoder, ids: Sequence[int], dtype: DType) -> Array:
    """(layers, 2, key heads): scales that hold the largest keys and values of some tokens, with a
    margin."""
    config = model.config

    def largest(model: Decoder, tokens: Tensor, positions: Tensor) -> Tensor:
        found: dict[int, Tensor] = {}

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
            found[layer] = stack([x.float().abs().amax((0, 2)) for x in (k, v)])
            how = {**config.attention(layer), **more}
            return attention(q, k, v, causal=True, layout="thd", **how)

        model.hidden(tokens, positions, attend)
        return stack([found[layer] for layer in range(config.layers)])

    with no_grad():
        device = model.norm.weight.device
        inputs = (np.asarray(ids, np.int32), np.arange(len(ids), dtype=np.int32))
        most = jit(largest)(model, *(tensor(x, device=device) for x in inputs)).numpy()
    if not np.isfinite(most).all():
        raise UserError("keys or values are no numbers", op=OP, got="nan or inf", expected="finite")
    return np.maximum(most, 1e-6).astype(np.float32) * np.float32(MARGIN / _most(dtype))


__all__ = ["Kept", "asked_by", "calibrated", "kept_for", "kept_in", "scales_of"]

"""Adapters for a decoder: whose tensors belong to which of its layers, stacked for all of them.

Names are those of the base model on Hugging Face, whatever files its weights come from; what is
fused there (query_key_value, gate_up_proj) is several layers here, which share A and have their own
rows of B. Invariant: every tensor of an adapter has found its layer, or the error names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...core.errors import UserError
from ...exchange.adapter import START, Adapter
from ...nn.adapted import AdaptedLinear, Picks, replaced
from ...nn.linear import Linear
from ...nn.module import Module
from ...tensor.creation import tensor
from .config import DecoderConfig
from .model import Decoder
from .names import Names, Source

OP = "adapter"
Array = np.ndarray[Any, Any]
Change = tuple[Array, Array]  # down (rank, in) and up (rank, out), the scale in it


def layers_of(model: Decoder) -> dict[str, list[tuple[str, Source]]]:
    """Our layers that can be changed, by the name of the module that Hugging Face has there."""
    names = Names(model.config, {})
    found: dict[str, list[tuple[str, Source]]] = {}
    for path, module in model.named_modules():
        if path == "head" or not isinstance(module, Linear):
            continue
        for source in names.sources(f"{path}.weight"):
            theirs = source.name.removesuffix(".weight")
            found.setdefault(theirs, []).append((path, replace(source, transposed=False)))
    return found


def changes_of(model: Decoder, adapter: Adapter) -> dict[str, Change]:
    """What an adapter does, by the names of our layers."""
    layers, names = layers_of(model), Names(model.config, {})
    found: dict[str, Change] = {}
    for module, (a, b, scale) in adapter.pairs.items():
        targets = layers.get(module) or layers.get(module.replace("language_model.", "", 1))
        if targets is None:
            raise _unknown(adapter, f"{START}{module}.lora_A.weight", model.config, layers)
        down, up = a.values(), b.values() * np.float32(scale)
        if not np.isfinite(up).all():
            raise _unfit(adapter, b.name, "finite numbers, times the scale", "infinity")
        for path, source in targets:
            layer: Any = model.get_submodule(path)
            if down.shape[1] != layer.in_features:
                raise _unfit(adapter, a.name, f"(rank, {layer.in_features})", down.shape)
            own = names.arranged(f"{path}.weight", source, up) if source.part else up
            if len(own) != layer.out_features:
                raise _unfit(adapter, b.name, f"({layer.out_features}, rank)", up.shape)
            found[path] = (down, own.T)
    return found


def adapted(
    model: Decoder, adapters: Sequence[Adapter], picks: Picks, device: str, dtype: Any
) -> Decoder:
    """A decoder with the weights of another, whose layers have these adapters beside them."""
    changes = [changes_of(model, adapter) for adapter in adapters]
    layers: dict[str, Module] = {}
    for path in dict.fromkeys(path for one in changes for path in one):
        base: Any = model.get_submodule(path)
        rank = max(len(one[path][0]) for one in changes if path in one)
        down = np.zeros((len(changes), rank, base.in_features), np.float32)
        up = np.zeros((len(changes), rank, base.out_features), np.float32)
        for number, one in enumerate(changes):
            if path in one:
                own_down, own_up = one[path]
                down[number, : len(own_down)], up[number, : len(own_up)] = own_down, own_up
        below, above = (tensor(p.astype(dtype.numpy), device=device) for p in (down, up))
        layers[path] = AdaptedLinear(base, below, above, picks)
    made: Decoder = replaced(model, layers)  # type: ignore[assignment]
    return made


def _unknown(
    adapter: Adapter, name: str, config: DecoderConfig, layers: Mapping[str, Any]
) -> UserError:
    last = dict.fromkeys(layer.rsplit(".", 1)[-1] for layer in layers)
    return UserError(
        f"{adapter.path}: tensor {name[:200]!r} changes no layer of this model",
        op=OP,
        expected=f"of {config.layers} layers ({config.family}): {', '.join(last)}",
        got=name[:200],
        hint="embeddings, the head and experts take no adapter",
    )


def _unfit(adapter: Adapter, name: str, expected: str, got: Any) -> UserError:
    return UserError(
        f"{adapter.path}: tensor {name[:200]!r} does not fit", op=OP, expected=expected, got=got
    )


__all__ = ["adapted", "changes_of"]

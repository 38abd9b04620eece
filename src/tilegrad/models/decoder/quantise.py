"""A decoder quantised block by block: which layers share an input, and how a block is run.

Invariant: embedding, head, norms and routers stay as they are; the blocks of experts are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...core.dtype import float32
from ...core.errors import UserError
from ...nn.module import Module
from ...quant.layerwise import Recipe, Rounding, Shared, round_block
from ...quant.mixed import Option, sensitivity
from ...tensor.creation import arange, tensor
from ...tensor.tensor import Tensor, no_grad
from .config import DecoderConfig
from .model import Decoder

Array = np.ndarray[Any, Any]


def shared_inputs(config: DecoderConfig, block: Module) -> list[Shared]:
    """Layers of a block by what they read."""
    if getattr(block.get_submodule("feed"), "router", None) is not None:
        raise UserError("experts are not quantised here", op="quantise", got=config.family)
    alone = config.norm == "rms" and not config.parallel and not config.shared_norm
    offset = config.norm_offset

    def norm(name: str) -> str:
        return name if alone and getattr(block, name, None) is not None else ""

    heads = tuple(f"attention.{p}" for p in ("query", "key", "value"))
    value = "attention.value" if config.heads == config.key_heads else ""
    gated = config.gated
    inner = ("feed.gate", "feed.up") if gated else ("feed.up",)
    return [
        Shared(heads, norm("attention_norm"), offset),
        Shared(("attention.output",), value),
        Shared(inner, norm("feed_norm"), offset),
        Shared(("feed.down",), "feed.up" if gated else ""),
    ]


def runner(model: Decoder, layer: int, count: int) -> Callable[[Tensor], Tensor]:
    """One block on (batch, tokens, width)."""
    config, block = model.config, model.blocks[layer]
    rotary = config.rotary_of(layer)
    angles = None if rotary is None else rotary.angles(arange(count))
    return lambda x: block(x, model._causal, angles)


def first_states(model: Decoder, samples: Sequence[Array]) -> list[Array]:
    """What comes into the first block, of rows of tokens (batch, tokens)."""
    found = []
    with no_grad():
        for tokens in samples:
            x = model.embed(tensor(tokens))
            if model.config.embedding_scale != 1.0:
                x = x * model.config.embedding_scale
            if model.config.rotary is None:
                x = x + model.positions(arange(tokens.shape[1]))
            found.append(np.array(x.to(float32).numpy()))
    return found


def quantise_decoder(
    model: Decoder,
    recipe: Recipe,
    samples: Sequence[Array],
    keep: Callable[[int, Rounding], Any] | None = None,
    each: Sequence[Mapping[str, Recipe]] = (),
) -> Iterator[tuple[int, list[Rounding]]]:
    """Round the blocks of a model in place, one at a time; (number, layers) of each as it is done.

    `samples` are tokens (batch, tokens), all of one length; `keep(number, layer)` may give what the
    model reads in the layer's place, such as a tensor of a file; `each` has for every block the
    recipes of layers that are rounded by another.
    """
    if recipe.needs_samples and not samples:
        raise UserError("this recipe needs text to look at", op="quantise", got=recipe.name)
    states = first_states(model, samples)
    count = samples[0].shape[1] if samples else 1
    for number, block in enumerate(model.blocks):
        run = runner(model, number, count)
        groups = shared_inputs(model.config, block)

        def kept(layer: Rounding, number: int = number) -> Any:
            return None if keep is None else keep(number, layer)

        others = each[number] if each else None
        states, made = round_block(block, groups, states, run, recipe, kept, others)
        yield number, made


def sensitivities(
    model: Decoder, recipe: Recipe, samples: Sequence[Array]
) -> Iterator[tuple[int, dict[str, list[Option]]]]:
    """What the layers of each block cost at how many bits; the model stays as it is."""
    if not samples:
        raise UserError("bits are chosen by text", op="quantise", got=recipe.name)
    states = first_states(model, samples)
    for number, block in enumerate(model.blocks):
        run = runner(model, number, samples[0].shape[1])
        groups = shared_inputs(model.config, block)
        states, found = sensitivity(block, groups, states, run, recipe)
        yield number, found


def perplexity(model: Decoder, samples: Sequence[Array]) -> float:
    """exp of the mean loss of each token of rows (batch, tokens) but the first."""
    total, count = 0.0, 0
    with no_grad():
        for tokens in samples:
            logits = model(tensor(tokens)).to(float32).numpy()[:, :-1]
            top = logits.max(-1, keepdims=True)
            sums = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
            wanted = np.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
            total += float((sums - wanted).sum(dtype=np.float64))
            count += wanted.size
    if not count:
        raise UserError("no tokens to judge by", op="perplexity", expected="two in a row")
    return float(np.exp(total / count))


__all__ = ["perplexity", "quantise_decoder", "sensitivities", "shared_inputs"]

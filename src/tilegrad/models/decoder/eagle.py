"""EAGLE heads: one decoder layer that guesses how a decoder goes on from its own features.

The layout is the first one published under that name: `fc` joins the embedding of a token with what
the decoder's head read one token earlier (after its last norm); one layer follows, without a norm
before attention, and its result is the guessed feature, which the decoder's own head reads.
Entry i has the features at position i and the token at i + 1.
Invariant: a head has the width and the words of the decoder it is for; what a folder has besides
or lacks is an error here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ... import nn
from ...core.errors import ShapeError, UserError
from ...tensor.movement import cat
from ...tensor.tensor import Tensor, lift, no_grad
from .config import DecoderConfig
from .model import Attend, Block

OP = "EagleHead"
LAYER = "layers.0."
NAMES = {  # ours -> theirs
    "joined.weight": "fc.weight",
    "joined.bias": "fc.bias",
    "embed.weight": "embed_tokens.weight",
    "block.attention.query.weight": LAYER + "self_attn.q_proj.weight",
    "block.attention.key.weight": LAYER + "self_attn.k_proj.weight",
    "block.attention.value.weight": LAYER + "self_attn.v_proj.weight",
    "block.attention.output.weight": LAYER + "self_attn.o_proj.weight",
    "block.feed_norm.weight": LAYER + "post_attention_layernorm.weight",
    "block.feed.gate.weight": LAYER + "mlp.gate_proj.weight",
    "block.feed.up.weight": LAYER + "mlp.up_proj.weight",
    "block.feed.down.weight": LAYER + "mlp.down_proj.weight",
}


class EagleHead(nn.Module):
    """Guesses features of a decoder; `load` gives it the weights of a folder."""

    def __init__(
        self, config: DecoderConfig, dtype: Any = None, bias: bool = True, embeds: bool = True
    ) -> None:
        """`bias` says whether `fc` has one, `embeds` whether the head has its own embedding."""
        super().__init__()
        self.config = replace(config, windows=(), rotated=(), routed=(), layers=1)
        self.embed = nn.Embedding(config.vocabulary, config.width, dtype=dtype) if embeds else None
        self.joined = nn.Linear(2 * config.width, config.width, bias, dtype)
        self.block = Block(self.config, 0, dtype)
        self.block.attention_norm = None

    def forward(
        self, tokens: Tensor, features: Tensor, attend: Attend, embed: Any, angles: Any = None
    ) -> Tensor:
        """(N,), (N, C) -> (N, C): features one position on; `embed` is the decoder's, for heads
        without one. `attend` is that of `Decoder.step`."""
        words = (self.embed or embed)(tokens)
        return self.block(self.joined(cat([words, features], -1)), attend, angles)

    def load(self, weights: Mapping[str, Any]) -> None:
        """Take weights by their published names."""
        ours = dict(self.named_parameters())
        missing = [NAMES[name] for name in ours if NAMES[name] not in weights]
        unused = sorted(set(weights) - {NAMES[name] for name in ours})
        if missing or unused:
            raise UserError(
                "the names do not fit an EAGLE head",
                op=OP,
                expected=", ".join(missing) or "no other names",
                got=", ".join(unused) or "none of these",
            )
        values = {name: lift(weights[NAMES[name]]) for name in ours}
        for name, value in values.items():
            if tuple(value.shape) != tuple(ours[name].shape):
                raise ShapeError(
                    f"{NAMES[name]} does not fit",
                    op=OP,
                    got=tuple(value.shape),
                    expected=tuple(ours[name].shape),
                )
        with no_grad():
            for name, value in values.items():
                ours[name].assign(value)


def is_eagle(tensors: Mapping[str, Any]) -> bool:
    """Whether a folder's tensors are those of such a head."""
    return NAMES["joined.weight"] in tensors


def refuse_other(config: DecoderConfig, decoder: DecoderConfig) -> None:
    """An error unless a head was made for a decoder like this one."""
    for name in ("width", "vocabulary"):
        ours, theirs = getattr(decoder, name), getattr(config, name)
        if ours != theirs:
            raise UserError(
                f"the EAGLE head is for a model of another {name}", op=OP, expected=ours, got=theirs
            )
    if decoder.norm != "rms" or decoder.rotary is None or config.experts or config.head_norms:
        raise UserError(
            "EAGLE heads are read for models like Llama",
            op=OP,
            expected="RMS norms, rotary positions, no experts",
            got=f"{config.family} for {decoder.family}",
        )


__all__ = ["EagleHead", "is_eagle", "refuse_other"]

"""GPT-2: the model, its published sizes, and generation.

Shapes: B batch, T tokens, C features, H heads, V vocabulary. Names in the state_dict are those
of Hugging Face's `gpt2`; its Conv1D weights are (in, out), ours (out, in), and
`load_state_dict` turns them. Invariant: logits at position t depend on tokens 0..t alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from .. import nn
from ..core.errors import ShapeError, UserError
from ..ir.requirement import require
from ..nn.functional import cross_entropy, gelu, scaled_dot_product_attention, softmax
from ..nn.module import Keys
from ..tensor.creation import arange
from ..tensor.jit import jit
from ..tensor.maths import pick
from ..tensor.random import Generator
from ..tensor.tensor import Tensor, lift, no_grad

TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
DROPPED = (".attn.bias", ".attn.masked_bias")  # masks that old checkpoints carry


@dataclass(frozen=True)
class GPT2Config:
    """Sizes of a GPT-2."""

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    dropout: float = 0.0
    layer_norm_epsilon: float = 1e-5


PRESETS: dict[str, GPT2Config] = {
    "gpt2": GPT2Config(),  # 124M
    "gpt2-medium": GPT2Config(n_embd=1024, n_layer=24, n_head=16),  # 350M
    "gpt2-large": GPT2Config(n_embd=1280, n_layer=36, n_head=20),  # 774M
    "gpt2-xl": GPT2Config(n_embd=1600, n_layer=48, n_head=25),  # 1558M
    "tiny": GPT2Config(vocab_size=96, n_positions=128, n_embd=128, n_layer=4, n_head=4),
}


class Attention(nn.Module):
    """Causal self-attention over several heads."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        if config.n_embd % config.n_head:
            raise UserError(
                "features do not divide into heads",
                op="GPT2",
                expected=f"n_embd a multiple of {config.n_head}",
                got=config.n_embd,
            )
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)  # query, key, value in one
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        self.n_head, self.rate = config.n_head, config.dropout

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        q, k, v = self.c_attn(x).chunk(3, -1)  # (B, T, C) each
        q, k, v = (self._heads(part) for part in (q, k, v))  # (B, H, T, C / H)
        rate = self.rate if self.training else 0.0
        y = scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        y = y.transpose(1, 2).flatten(2)  # (B, T, C)
        return self.dropout(self.c_proj(y))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.n_head, x.shape[-1] // self.n_head)).transpose(1, 2)


class MLP(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        x = gelu(self.c_fc(x), approximate="tanh")  # (B, T, 4 * C)
        return self.dropout(self.c_proj(x))


class Block(nn.Module):
    """Attention and MLP, each after a norm and added to its input."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """The language model: tokens to logits of the next ones."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),  # tokens
                "wpe": nn.Embedding(config.n_positions, config.n_embd),  # positions
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
                "ln_f": nn.LayerNorm(config.n_embd, config.layer_norm_epsilon),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight  # tied
        self._initialize()

    def _initialize(self) -> None:
        """GPT-2's initial values: residual projections are scaled down with depth."""
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, 0.0, 0.02 / (2.0 * self.config.n_layer) ** 0.5)
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, 0.0, 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    @classmethod
    def preset(cls, name: str) -> GPT2:
        """A model of a published size with fresh weights."""
        if name not in PRESETS:
            raise UserError("unknown size", op="GPT2.preset", expected=", ".join(PRESETS), got=name)
        return cls(PRESETS[name])

    def forward(self, tokens: Any) -> Tensor:
        """(B, T) -> (B, T, V)."""
        index = lift(tokens)
        count = index.shape[-1]
        require(
            self.config.n_positions - count,
            ShapeError,
            "too many tokens",
            op="GPT2",
            got="{count}",
            expected="at most {most}",
            count=count,
            most=self.config.n_positions,
        )
        parts: Any = self.transformer
        x = parts["wte"](index) + parts["wpe"](arange(count))  # (B, T, C)
        x = parts["drop"](x)
        for block in parts["h"]:
            x = block(x)
        return self.lm_head(parts["ln_f"](x))

    def loss(self, tokens: Any, targets: Any) -> Tensor:
        """The mean cross-entropy of the targets, (B, T) each."""
        logits = self(tokens)  # (B, T, V)
        return cross_entropy(logits.flatten(0, -2), lift(targets).reshape(-1))

    # ---- generation -----------------------------------------------------------------------

    def generate(
        self,
        tokens: Any,
        count: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: Generator | None = None,
    ) -> Tensor:
        """(B, T) continued by `count` tokens; temperature 0 takes the likeliest.

        One step is compiled once: it reads a window of all positions and is told where in it
        the last token stands.
        """
        _check_sampling(temperature, top_k, self.config.vocab_size)
        given = lift(tokens).long().numpy()  # (B, T); sizes that grow stay out of the Graph
        if given.ndim != 2 or not given.shape[1]:
            raise ShapeError(
                "needs at least one token in each row",
                op="generate",
                expected="(batch, tokens)",
                got=given.shape,
            )
        width, first = self.config.n_positions, given.shape[1]
        known = np.concatenate([given, np.zeros((len(given), count), np.int64)], 1)
        step = _sampler(temperature, top_k, generator)
        with no_grad():
            for end in range(first, first + count):
                seen = known[:, max(0, end - width) : end]
                window = np.zeros((len(known), width), np.int64)
                window[:, : seen.shape[1]] = seen
                known[:, end] = step(self, lift(window), seen.shape[1] - 1).numpy()[:, 0]
        return lift(known)

    # ---- checkpoints ----------------------------------------------------------------------

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Keys:
        """Also takes Hugging Face's names and its (in, out) weights."""
        state = {n: v for n, v in state_dict.items() if not n.endswith(DROPPED)}
        if not any(n.startswith("transformer.") for n in state):
            state = {
                n if n == "lm_head.weight" else f"transformer.{n}": v for n, v in state.items()
            }
        state.setdefault("lm_head.weight", state.get("transformer.wte.weight"))
        return super().load_state_dict(self._transposed(state), strict)

    def _transposed(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The weights of Conv1D as (out, in)."""
        joint = state.get("transformer.h.0.attn.c_attn.weight")
        transposed = joint is not None and tuple(joint.shape) == (
            self.config.n_embd,
            3 * self.config.n_embd,
        )
        if not transposed:
            return dict(state)
        return {n: lift(v).t() if n.endswith(TRANSPOSED) else v for n, v in state.items()}


def _check_sampling(temperature: float, top_k: int | None, vocabulary: int) -> None:
    if not temperature >= 0.0:
        raise UserError(
            "bad temperature", op="generate", expected="temperature >= 0", got=temperature
        )
    if top_k is not None and not 1 <= top_k <= vocabulary:
        raise UserError("bad top_k", op="generate", expected=f"1..{vocabulary}", got=top_k)


@lru_cache(maxsize=8)
def _sampler(temperature: float, top_k: int | None, generator: Generator | None) -> Any:
    """A jitted step(model, window, last) -> next tokens (B, 1)."""

    def step(model: GPT2, window: Tensor, last: Any) -> Tensor:
        logits = model(window).narrow(1, last, 1).squeeze(1)  # (B, V)
        if temperature == 0.0:
            return logits.argmax(-1, keepdim=True)
        logits = logits / temperature
        if top_k is not None:
            least = logits.topk(top_k, -1).values[:, -1:]
            logits = pick(logits < least, float("-inf"), logits)
        return softmax(logits, -1).multinomial(1, generator=generator)

    return jit(step, name="GPT2.generate")


__all__ = ["GPT2", "PRESETS", "GPT2Config"]

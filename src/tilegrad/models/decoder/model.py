"""The decoder: one definition of the language models people run, configured by data.

Llama, SmolLM, Qwen, Mistral, Gemma, Granite, OLMo-2, Phi, Mixtral, Qwen-MoE, gpt-oss, GPT-NeoX and
GPT-2 differ in what `DecoderConfig` says, not in code. Shapes: B batch, T tokens, C features,
H heads, K key heads, D features of a head, F features within the feed-forward part, E experts, V
vocabulary.

Attention is a function passed in, `attend(layer, q, k, v)`: without one it is plain causal
attention over the tokens given, and with a cache the same model decodes. Invariant: logits at a
position depend on tokens up to it alone; each layer calls `attend` once, in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from ... import nn
from ...core import dtype as dtypes
from ...core.errors import ShapeError
from ...nn.experts import routed
from ...nn.functional import attention, gelu, relu, silu, softmax
from ...nn.linear import new_parameter
from ...nn.module import Keys
from ...quant.rounding import rounded
from ...tensor.creation import arange, tensor
from ...tensor.maths import cast, sigmoid, tanh
from ...tensor.matmul import grouped_dot
from ...tensor.norm import rms_norm
from ...tensor.tensor import Tensor, lift
from .config import DecoderConfig
from .names import load
from .rotary import rotate

Attend = Callable[..., Tensor]  # attend(layer, q, k, v), with `sinks` where heads have them
Angles = tuple[Tensor, Tensor]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "relu": relu,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
}


class Norm(nn.RMSNorm):
    """RMS norm whose weight is counted from `offset` (Gemma keeps the distance from 1)."""

    def __init__(self, width: int, epsilon: float, offset: float, dtype: Any) -> None:
        super().__init__(width, epsilon, dtype=dtype)
        self.offset = offset
        if offset:
            nn.init.constant_(self.weight, 1.0 - offset)

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C)."""
        weight = self.weight
        if self.offset:  # added in float32: bfloat16 has few bits around 1
            wide = weight if weight.dtype is dtypes.float64 else cast(weight, dtypes.float32)
            weight = wide + self.offset
        return rms_norm(x, self.normalized_shape, weight, self.eps)


def norm_of(config: DecoderConfig, width: int, dtype: Any) -> nn.Module:
    """The norm of a family."""
    if config.norm == "layer":
        return nn.LayerNorm(width, config.norm_epsilon, dtype=dtype)
    return Norm(width, config.norm_epsilon, config.norm_offset, dtype)


class Attention(nn.Module):
    """Queries, keys and values of one layer, and what comes out of attention projected back."""

    def __init__(self, config: DecoderConfig, layer: int, dtype: Any) -> None:
        super().__init__()
        inner, outer = config.heads * config.head_width, config.key_heads * config.head_width
        self.query = nn.Linear(config.width, inner, config.qkv_bias, dtype)
        self.key = nn.Linear(config.width, outer, config.qkv_bias, dtype)
        self.value = nn.Linear(config.width, outer, config.qkv_bias, dtype)
        self.output = nn.Linear(inner, config.width, config.output_bias, dtype)
        if config.head_norms:
            each = config.whole_norms
            self.query_norm = norm_of(config, inner if each else config.head_width, dtype)
            self.key_norm = norm_of(config, outer if each else config.head_width, dtype)
        if config.sinks:
            self.sinks = nn.init.zeros_(new_parameter(config.heads, dtype=dtype))
        self.layer, self.config = layer, config

    def forward(self, x: Tensor, attend: Attend, angles: Angles | None) -> Tensor:
        """(..., C) -> (..., C)."""
        return self.output(self.attended(x, attend, angles))

    def attended(self, x: Tensor, attend: Attend, angles: Angles | None) -> Tensor:
        """(..., C) -> (..., H D): what is projected back."""
        config = self.config
        q, k, v = self.query(x), self.key(x), self.value(x)
        if config.head_norms and config.whole_norms:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k, v = (self._heads(y) for y in (q, k, v))  # (..., H, D), (..., K, D), (..., K, D)
        if config.head_norms and not config.whole_norms:
            q, k = self.query_norm(q), self.key_norm(k)
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        more = {"sinks": self.sinks} if config.sinks else {}
        return attend(self.layer, q, k, v, **more).flatten(-2)

    def _heads(self, x: Tensor) -> Tensor:
        width = self.config.head_width
        return x.unflatten(-1, (x.shape[-1] // width, width))


class FeedForward(nn.Module):
    """Two linear layers with an activation between them, gated by a third or not."""

    def __init__(self, config: DecoderConfig, inner: int, dtype: Any) -> None:
        super().__init__()
        if config.gated:
            self.gate = nn.Linear(config.width, inner, config.feed_bias, dtype)
        self.up = nn.Linear(config.width, inner, config.feed_bias, dtype)
        self.down = nn.Linear(inner, config.width, config.feed_bias, dtype)
        self.gated, self.activation = config.gated, config.activation

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C)."""
        act = ACTIVATIONS[self.activation]
        inner = act(self.gate(x)) * self.up(x) if self.gated else act(self.up(x))  # (..., F)
        return self.down(inner)


class Experts(nn.Module):
    """Feed-forward parts of which a router picks a few for each token, and only those compute it:
    tokens are sorted by expert, and each gets its results back (`nn.experts`)."""

    def __init__(self, config: DecoderConfig, dtype: Any) -> None:
        super().__init__()
        count, inner, width = config.experts, config.expert_hidden, config.width
        self.router = nn.Linear(width, count, config.expert_bias, dtype)
        self.gate = _drawn(count, inner, width, dtype)
        self.up = _drawn(count, inner, width, dtype)
        self.down = _drawn(count, width, inner, dtype)
        if config.expert_bias:
            for name, rows in (("gate", inner), ("up", inner), ("down", width)):
                setattr(
                    self, f"{name}_bias", nn.init.zeros_(new_parameter(count, rows, dtype=dtype))
                )
        if config.shared_hidden:
            self.shared = FeedForward(config, config.shared_hidden, dtype)
            self.shared_gate = nn.Linear(width, 1, False, dtype)
        self.used, self.normalize = config.experts_used, config.normalize_experts
        self.has_shared, self.config = bool(config.shared_hidden), config
        self.formats: dict[str, str] = {}  # what inputs of which weights are rounded to

    def round_inputs(self, name: str, form: str, scale: float | None) -> None:
        """Round what gate and up, or down, read to a Format, as stored weights ask for."""
        self.formats[name] = form
        given = None if scale is None else tensor(np.full((1, 1), scale, np.float32))
        self.register_buffer(f"{name}_scale", given)

    def _rounded(self, x: Tensor, name: str) -> Tensor:
        """Inputs of some weights as these ask for them."""
        form = self.formats.get(name)
        return x if form is None else rounded(x, form, getattr(self, f"{name}_scale"))

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C)."""
        y = x.reshape(-1, x.shape[-1])  # (N, C)
        shares, picked = self._picked(y)  # (N, K) each
        inputs = self._rounded(y, "gate")  # once, before rows are sorted
        result = routed(inputs, picked, shares, self.gate.shape[0], self._compute)  # (N, C)
        if self.has_shared:
            result = result + sigmoid(self.shared_gate(y)) * self.shared(y)
        return result.reshape(x.shape)

    def _compute(self, rows: Tensor, offsets: Tensor, owners: Tensor) -> Tensor:
        """(R, C) -> (R, C): rows that are sorted by expert."""

        def product(x: Tensor, name: str) -> Tensor:
            found = grouped_dot(x, getattr(self, name), offsets)
            if not self.config.expert_bias:
                return found
            return found + getattr(self, f"{name}_bias").index_select(0, owners)

        gate, up = product(rows, "gate"), product(rows, "up")  # (R, F)
        limit = self.config.gate_limit
        if not limit:
            inner = ACTIVATIONS[self.config.activation](gate) * up
        else:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            inner = gate * sigmoid(self.config.gate_slope * gate) * (up + 1.0)
        return product(self._rounded(inner, "down"), "down")

    def _picked(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """How much the picked experts count, and which they are: (N, K) each."""
        chances = softmax(cast(self.router(y), dtypes.float32), -1)  # (N, E)
        values, picked = chances.topk(self.used, -1)
        if self.normalize:
            values = values / values.sum(-1, keepdim=True)
        return values, picked


def _drawn(count: int, rows: int, columns: int, dtype: Any) -> nn.Parameter:
    """Weights of all experts, drawn as those of Linear are."""
    weight = new_parameter(count, rows, columns, dtype=dtype)
    nn.init.uniform_(weight, -1.0 / math.sqrt(columns), 1.0 / math.sqrt(columns))
    return weight


class Block(nn.Module):
    """Attention and a feed-forward part, each added to its input, with norms before or after."""

    def __init__(self, config: DecoderConfig, layer: int, dtype: Any) -> None:
        super().__init__()

        def norm(there: bool) -> nn.Module | None:
            return norm_of(config, config.width, dtype) if there else None

        self.attention_norm = norm(config.pre_norms)
        self.attention = Attention(config, layer, dtype)
        self.feed_norm = norm(config.pre_norms and not config.shared_norm)
        routed = config.experts and config.routed[layer]
        self.feed = Experts(config, dtype) if routed else FeedForward(config, config.hidden, dtype)
        self.attention_post_norm = norm(config.post_norms)
        self.feed_post_norm = norm(config.post_norms)
        self.scale, self.parallel = config.residual_scale, config.parallel
        self.shared_norm = config.shared_norm

    def forward(self, x: Tensor, attend: Attend, angles: Angles | None) -> Tensor:
        """(..., C) -> (..., C)."""
        return self.finished(x, self.attended(x, attend, angles))

    def attended(self, x: Tensor, attend: Attend, angles: Angles | None) -> Tensor:
        """(..., C) -> (..., H D): what tokens see of each other."""
        return self.attention.attended(_normed(x, self.attention_norm), attend, angles)

    def finished(self, x: Tensor, y: Tensor) -> Tensor:
        """(..., C), (..., H D) -> (..., C): the rest, of each token alone."""
        feed_norm = self.attention_norm if self.shared_norm else self.feed_norm
        after = x + self._part(self.attention.output(y), self.attention_post_norm)
        y = self.feed(_normed(x if self.parallel else after, feed_norm))
        return after + self._part(y, self.feed_post_norm)

    def _part(self, y: Tensor, norm: nn.Module | None) -> Tensor:
        """What a part adds."""
        y = _normed(y, norm)
        return y if self.scale == 1.0 else y * self.scale


def _normed(x: Tensor, norm: nn.Module | None) -> Tensor:
    return x if norm is None else norm(x)


class Decoder(nn.Module):
    """The language model: tokens to logits of the next ones."""

    def __init__(self, config: DecoderConfig, dtype: Any = None) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocabulary, config.width, dtype=dtype)
        if config.rotary is None:
            self.positions = nn.Embedding(config.context, config.width, dtype=dtype)
        self.blocks = nn.ModuleList(Block(config, i, dtype) for i in range(config.layers))
        self.norm = norm_of(config, config.width, dtype)
        self.head = nn.Linear(config.width, config.vocabulary, config.head_bias, dtype)
        if config.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Any) -> Tensor:
        """(B, T) -> (B, T, V): every token sees those before it."""
        index = lift(tokens)
        if index.ndim != 2:
            raise ShapeError(
                "tokens are rows of a batch",
                op="Decoder",
                expected="(batch, tokens)",
                got=index.shape,
            )
        count = index.shape[1]
        if isinstance(count, int) and count > self.config.context:
            raise ShapeError(
                "too many tokens",
                op="Decoder",
                got=count,
                expected=f"at most {self.config.context}",
            )
        return self.logits(self.hidden(index, arange(count), self._causal))

    def step(
        self, tokens: Any, positions: Any, attend: Attend, rows: Any = None, rotated: bool = True
    ) -> Tensor:
        """(N,), (N,) -> (N, V), or the logits of some rows alone.

        `attend(layer, q, k, v)` gets (N, H, D), (N, K, D) and (N, K, D), keeps keys and values
        where it likes and gives (N, H, D); where heads have sinks it gets those too, (H,). How to
        attend is in `config.attention(layer)`. With `rotated=False` it also turns q and k, by
        `config.rotary_of(layer)`: see `paged`.
        """
        x, y = self.attended(lift(tokens), lift(positions), attend, rotated)  # (N, C), (N, H D)
        if rows is not None:
            x, y = x.index_select(0, rows), y.index_select(0, rows)
        return self.logits(self.finished(x, y))

    def hidden(
        self, tokens: Tensor, positions: Tensor, attend: Attend, rotated: bool = True
    ) -> Tensor:
        """(...) -> (..., C): what the head reads, before its norm."""
        return self.finished(*self.attended(tokens, positions, attend, rotated))

    def attended(
        self, tokens: Tensor, positions: Tensor, attend: Attend, rotated: bool = True
    ) -> tuple[Tensor, Tensor]:
        """(...) -> (..., C), (..., H D): what comes into the last layer, and what its tokens see of
        each other. The rest is of each token alone: see `finished`."""
        config = self.config
        x = self.embed(tokens)  # (..., C)
        if config.embedding_scale != 1.0:
            x = x * config.embedding_scale
        if config.rotary is None:
            x = x + self.positions(positions)
        angles_of = {r: r.angles(positions) for r in config.rotaries()} if rotated else {}
        rotaries = [config.rotary_of(layer) for layer in range(config.layers)]
        angles = [None if r is None else angles_of.get(r) for r in rotaries]
        *before, last = self.blocks
        for block, own in zip(before, angles):
            x = block(x, attend, own)
        return x, last.attended(x, attend, angles[-1])

    def finished(self, x: Tensor, y: Tensor) -> Tensor:
        """What `attended` gives, or some rows of it, -> (..., C)."""
        return self.blocks[-1].finished(x, y)

    def logits(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., V)."""
        return self.read(self.norm(x))

    def read(self, features: Tensor) -> Tensor:
        """(..., C) -> (..., V): the logits of features that are normed already."""
        found = self.head(features)
        if self.config.logit_scale != 1.0:
            found = found * self.config.logit_scale
        cap = self.config.logit_softcap
        return cap * tanh(found / cap) if cap else found

    def _causal(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
        """Plain causal attention: (B, T, H, D) -> (B, T, H, D)."""
        how = {**self.config.attention(layer), **more}
        found = attention(q, k, v, causal=True, layout="bthd", **how)
        return found

    def load(
        self,
        weights: Mapping[str, Any],
        strict: bool = True,
        keep: str = "",
        device: str = "",
    ) -> Keys:
        """Take weights by the names of Hugging Face or of GGUF files; see `names`.

        With `keep="quantised"` weights that are tensors of files (`exchange.Stored`) stay there,
        quantised, and are prepared for a device's kernels when something runs; they do not train.
        Experts in fp8 stay so where a `device` is named that multiplies them.
        """
        return load(self, self.config, weights, strict, keep, device)


def paged(
    config: DecoderConfig,
    cache: nn.PagedCache,
    table: Any,
    lengths: Any,
    query_starts: Any,
    queries: int | None = None,
    single: bool = False,
    most: Any = None,
) -> Attend:
    """An `attend` over a paged cache that turns q and k itself: for `step(..., rotated=False)`.

    `single` says that no request has more than one new token, `most` (a number or a Symbol) how
    many keys at most.
    """

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
        rotary, how = config.rotary_of(layer), {**config.attention(layer), **more}
        speeds = (
            {}
            if rotary is None
            else {"frequencies": rotary.frequencies(), "factor": rotary.attention_factor}
        )
        how["window"] = how["window"] or 0
        return cache.step(
            layer,
            q,
            k,
            v,
            table,
            lengths,
            query_starts,
            **speeds,
            **how,
            queries=queries,
            single=single,
            most=most,
        )

    return attend


__all__ = ["Attention", "Block", "Decoder", "Experts", "FeedForward", "Norm", "paged"]

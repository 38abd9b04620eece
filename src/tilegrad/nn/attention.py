"""Multi-head attention.

Invariant: parameters have PyTorch's names and shapes (`in_proj_weight` holds query, key and
value one below the other), and masks its meaning: True marks what may NOT be looked at.
"""

from __future__ import annotations

import math
from typing import Any

from ..core import dtype as dtypes
from ..core.errors import UserError
from ..tensor.attention import scaled_dot_product_attention
from ..tensor.creation import tri, zeros
from ..tensor.maths import cast, pick
from ..tensor.matmul import linear, matmul
from ..tensor.random import dropout
from ..tensor.reduce import mean, softmax
from ..tensor.tensor import Tensor, lift
from . import init
from .linear import Linear, new_parameter
from .module import Module, Parameter


class MultiheadAttention(Module):
    """Several attentions side by side, each on its slice of the features."""

    def __init__(
        self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True,
        add_bias_kv: bool = False, add_zero_attn: bool = False, kdim: int | None = None,
        vdim: int | None = None, batch_first: bool = False, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if add_bias_kv or add_zero_attn:
            raise UserError("not supported", op="MultiheadAttention", got="add_bias_kv or "
                            "add_zero_attn", expected="both False")  # fmt: skip
        if embed_dim % num_heads:
            raise UserError("features do not divide into heads", op="MultiheadAttention",
                            expected=f"a multiple of {num_heads}", got=embed_dim)  # fmt: skip
        self.embed_dim, self.num_heads, self.dropout = embed_dim, num_heads, dropout
        self.kdim, self.vdim = kdim or embed_dim, vdim or embed_dim
        self.batch_first, self.head_dim = batch_first, embed_dim // num_heads
        same = self.kdim == self.vdim == embed_dim
        joint = new_parameter(3 * embed_dim, embed_dim, dtype=dtype) if same else None
        self.register_parameter("in_proj_weight", joint)
        for name, size in (("q", embed_dim), ("k", self.kdim), ("v", self.vdim)):
            own = None if same else new_parameter(embed_dim, size, dtype=dtype)
            self.register_parameter(f"{name}_proj_weight", own)
        offset = Parameter(zeros(3 * embed_dim, dtype=dtype)) if bias else None
        self.register_parameter("in_proj_bias", offset)
        self.out_proj = Linear(embed_dim, embed_dim, bias, dtype=dtype)
        for name, parameter in self.named_parameters(recurse=False):
            if name.endswith("weight"):
                init.xavier_uniform_(parameter)
        if bias:
            init.zeros_(self.out_proj.bias)

    def forward(
        self, query: Any, key: Any, value: Any, key_padding_mask: Any = None,
        need_weights: bool = True, attn_mask: Any = None, average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """(output, weights): of (tokens, batch, features), or batch first where set so."""
        q, k, v = (lift(x) for x in (query, key, value))
        single = q.ndim == 2
        if single:
            q, k, v = (x.unsqueeze(0) for x in (q, k, v))
        elif not self.batch_first:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        q, k, v = self._project(q, k, v)  # (batch, heads, tokens, head_dim)
        alone = not need_weights and attn_mask is None and key_padding_mask is None
        causal = is_causal and alone  # said by a band, not by a mask
        mask = self._mask(q, k, key_padding_mask, attn_mask, is_causal and not causal, single)
        rate = self.dropout if self.training else 0.0
        if need_weights:
            result, weights = self._explicit(q, k, v, mask, rate)
            shown = mean(weights, 1) if average_attn_weights else weights
        else:
            result, shown = scaled_dot_product_attention(q, k, v, mask, rate, causal), None
        joined = self.out_proj(result.transpose(1, 2).flatten(2))
        if single:
            return joined.squeeze(0), None if shown is None else shown.squeeze(0)
        return (joined if self.batch_first else joined.transpose(0, 1)), shown

    def _project(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        found = [linear(x, w, b) for x, w, b in zip((q, k, v), weights, biases)]
        return [x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in found]

    def _mask(self, q: Tensor, k: Tensor, padding: Any, mask: Any, is_causal: bool,
              single: bool) -> Tensor | None:  # fmt: skip
        """What is added to the scores, (batch or 1, heads or 1, queries, keys)."""
        total: Tensor | None = None
        if mask is not None:
            total = _additive(lift(mask), q)
            if total.ndim == 3:  # (batch * heads, queries, keys)
                total = total.unflatten(0, (-1, self.num_heads))
        elif is_causal:
            seen = tri(q.shape[-2], k.shape[-2], dtype=dtypes.bool_)
            total = _additive(seen.logical_not(), q)
        if padding is not None:
            found = _additive(lift(padding), q)
            found = (found.unsqueeze(0) if single else found)[:, None, None, :]
            total = found if total is None else total + found
        return total

    def _explicit(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
                  rate: float) -> tuple[Tensor, Tensor]:  # fmt: skip
        scores = matmul(q, k.transpose(-2, -1)) / math.sqrt(self.head_dim)
        weights = softmax(scores if mask is None else scores + mask, -1)
        weights = dropout(weights, rate)
        return matmul(weights, v), weights


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    """A mask as numbers to add: -inf where a bool mask is True."""
    if mask.dtype is dtypes.bool_:
        return pick(mask, lift(-math.inf).to(like.dtype), lift(0.0).to(like.dtype))
    return cast(mask, like.dtype)


__all__ = ["MultiheadAttention"]

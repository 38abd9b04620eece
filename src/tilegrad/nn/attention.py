"""Multi-head attention.

Invariant: parameters have PyTorch's names and shapes (`in_proj_weight` holds query, key and
value one below the other); the arithmetic is that of `tensor/heads.py`.
"""

from __future__ import annotations

from typing import Any

from ..tensor.creation import zeros
from ..tensor.heads import check_heads, multi_head_attention_forward
from ..tensor.tensor import Tensor, lift
from . import init
from .linear import Linear, new_parameter
from .module import Module, Parameter


class MultiheadAttention(Module):
    """Several attentions side by side, each on its slice of the features."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        check_heads("MultiheadAttention", embed_dim, num_heads)
        self.embed_dim, self.num_heads, self.dropout = embed_dim, num_heads, dropout
        self.kdim, self.vdim = kdim or embed_dim, vdim or embed_dim
        self.batch_first, self.head_dim = batch_first, embed_dim // num_heads
        self.add_zero_attn = add_zero_attn
        same = self.kdim == self.vdim == embed_dim
        joint = new_parameter(3 * int(embed_dim), embed_dim, dtype=dtype) if same else None
        self.register_parameter("in_proj_weight", joint)
        for name, size in (("q", embed_dim), ("k", self.kdim), ("v", self.vdim)):
            own = None if same else new_parameter(embed_dim, size, dtype=dtype)
            self.register_parameter(f"{name}_proj_weight", own)
        offset = Parameter(zeros(3 * int(embed_dim), dtype=dtype)) if bias else None
        self.register_parameter("in_proj_bias", offset)
        for name in ("bias_k", "bias_v"):
            own = new_parameter(1, 1, embed_dim, dtype=dtype) if add_bias_kv else None
            self.register_parameter(name, own)
        self.out_proj = Linear(embed_dim, embed_dim, bias, dtype=dtype)
        for name, parameter in self.named_parameters(recurse=False):
            if name.endswith("weight"):
                init.xavier_uniform_(parameter)
        if add_bias_kv:
            init.xavier_normal_(self.bias_k)
            init.xavier_normal_(self.bias_v)
        if bias:
            init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: Any,
        key: Any,
        value: Any,
        key_padding_mask: Any = None,
        need_weights: bool = True,
        attn_mask: Any = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(output, weights): of (tokens, batch, features), or batch first where set so."""
        given = [lift(x) for x in (query, key, value)]
        turned = self.batch_first and given[0].ndim == 3
        q, k, v = (x.transpose(0, 1) if turned else x for x in given)
        joined, weights = multi_head_attention_forward(
            q,
            k,
            v,
            self.embed_dim,
            self.num_heads,
            **self._parameters,  # they bear the names of its arguments
            add_zero_attn=self.add_zero_attn,
            dropout_p=self.dropout,
            training=self.training,
            key_padding_mask=key_padding_mask,
            need_weights=need_weights,
            attn_mask=attn_mask,
            average_attn_weights=average_attn_weights,
            is_causal=is_causal,
        )
        return self.out_proj(joined.transpose(0, 1) if turned else joined), weights


__all__ = ["MultiheadAttention"]

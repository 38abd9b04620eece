"""Multi-head attention as a function: what `nn.MultiheadAttention` computes.

Invariant: arguments and masks have PyTorch's meaning: True in a mask marks what may NOT be looked
at, and a mask of numbers is added to the scores.
"""

from __future__ import annotations

import math
from typing import Any

from ..core import dtype as dtypes
from ..core.errors import ShapeError, UserError
from .attention import scaled_dot_product_attention
from .creation import tri
from .maths import cast, pick
from .matmul import linear, matmul
from .movement import cat
from .padding import pad
from .random import dropout
from .reduce import mean, softmax
from .tensor import Tensor, lift

OP = "multi_head_attention_forward"


def multi_head_attention_forward(
    query: Any,
    key: Any,
    value: Any,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Any,
    in_proj_bias: Any,
    bias_k: Any,
    bias_v: Any,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Any = None,
    out_proj_bias: Any = None,
    training: bool = True,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Any = None,
    k_proj_weight: Any = None,
    v_proj_weight: Any = None,
    static_k: Any = None,
    static_v: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(output, weights) of queries, keys and values of (tokens, batch, features); without an
    `out_proj_weight` the heads of the output are joined, and that is all."""
    if static_k is not None or static_v is not None:
        raise UserError("not supported", op=OP, expected="None", got="static_k or static_v")
    if (bias_k is None) != (bias_v is None):
        raise UserError("one without the other", op=OP, expected="bias_k and bias_v, or neither")
    check_heads(OP, embed_dim_to_check, num_heads)
    separate = (q_proj_weight, k_proj_weight, v_proj_weight)
    joint = in_proj_weight is not None and not use_separate_proj_weight
    weights = lift(in_proj_weight).chunk(3) if joint else separate
    q, k, v = (lift(x) for x in (query, key, value))
    if q.ndim not in (2, 3) or q.shape[-1] != embed_dim_to_check:
        expected = f"(tokens, batch, {embed_dim_to_check}), or without a batch"
        raise ShapeError("the queries do not fit", op=OP, expected=expected, got=q.shape)
    single = q.ndim == 2  # without a batch
    q, k, v = (x.unsqueeze(0) if single else x.transpose(0, 1) for x in (q, k, v))
    biases = (None,) * 3 if in_proj_bias is None else lift(in_proj_bias).chunk(3)
    q, k, v = (linear(x, w, b) for x, w, b in zip((q, k, v), weights, biases))
    shape = (*q.shape[:2], k.shape[1])  # batch, queries, keys without the added ones
    k, v = _extended(k, bias_k, add_zero_attn), _extended(v, bias_v, add_zero_attn)
    q, k, v = (x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in (q, k, v))
    added = int(bias_k is not None) + int(add_zero_attn)
    alone = not need_weights and attn_mask is None and key_padding_mask is None and not added
    causal = is_causal and alone  # said by a band, not by a mask
    mask = _mask(q, shape, num_heads, key_padding_mask, attn_mask, is_causal and not causal)
    mask = pad(mask, (0, added)) if added and mask is not None else mask
    rate = dropout_p if training else 0.0
    shown: Tensor | None = None
    if need_weights:
        scores = matmul(q, k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
        shown = dropout(softmax(scores if mask is None else scores + mask, -1), rate)
        result = matmul(shown, v)
        shown = mean(shown, 1) if average_attn_weights else shown
    else:
        result = scaled_dot_product_attention(q, k, v, mask, rate, causal)
    joined = result.transpose(1, 2).flatten(2)
    if out_proj_weight is not None:
        joined = linear(joined, out_proj_weight, out_proj_bias)
    if single:
        return joined.squeeze(0), None if shown is None else shown.squeeze(0)
    return joined.transpose(0, 1), shown


def check_heads(op: str, features: int, num_heads: int) -> None:
    """Refuse features that cannot be shared by the heads."""
    if features % num_heads:
        expected = f"a multiple of {num_heads}"
        raise UserError("features do not divide into heads", op=op, expected=expected, got=features)


def _extended(x: Tensor, bias: Any, add_zero: bool) -> Tensor:
    """Keys or values, (batch, tokens, features), with a learned one and a zero at the end."""
    if bias is not None:
        x = cat([x, lift(bias).expand(x.shape[0], 1, x.shape[2])], 1)
    return pad(x, (0, 0, 0, 1)) if add_zero else x


def _mask(
    q: Tensor, shape: tuple[Any, ...], num_heads: int, padding: Any, mask: Any, is_causal: bool
) -> Tensor | None:
    """What is added to the scores, (batch or 1, heads or 1, queries, keys)."""
    batch, queries, keys = shape
    total: Tensor | None = None
    if mask is not None:
        total = _additive(lift(mask), q)
        if total.ndim == 3:  # (batch * heads, queries, keys)
            total = total.unflatten(0, (-1, num_heads))
    elif is_causal:
        total = _additive(tri(queries, keys, dtype=dtypes.bool_).logical_not(), q)
    if padding is not None:
        found = _additive(lift(padding), q).reshape(batch, 1, 1, keys)
        total = found if total is None else total + found
    return total


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    """A mask as numbers to add: -inf where a bool mask is True."""
    if mask.dtype is dtypes.bool_:
        return pick(mask, lift(-math.inf).to(like.dtype), lift(0.0).to(like.dtype))
    return cast(mask, like.dtype)

"""Attention on Tensors: `attention` with every option, and PyTorch's function on top of it.

Both make one `attention` Node, whose kernels keep no probabilities in memory. Invariant: a query
that sees no key gives 0 (and a log-sum-exp of -inf), with gradients of 0; what a Node cannot
say is an error here, before anything is built.
"""

from __future__ import annotations

import math
from typing import Any

from ..core import dtype as dtypes
from ..core.dtype import DType
from ..core.errors import DTypeError, ShapeError, UserError
from ..graph import attention as graph
from ..graph import build, ops
from ..graph.attention_types import EXTRAS, LEAST_SCORE, OP, SCORES, Band, Sizes
from ..graph.attention_types import sizes as sizes_of
from ..ir.block import argument_op
from ..ir.node import Node
from ..ir.symbol import Size, combine
from ..ir.types import product
from ..ir.whole import is_one, wholes
from .random import Generator, next_key_and_offset
from .tensor import Tensor, lift, node_of, wrap

Shape = tuple[Size, ...]


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    causal: bool | str = False,
    window: Any = None,
    softcap: float = 0.0,
    bias: Any = None,
    mask: Any = None,
    slopes: Any = None,
    sinks: Any = None,
    key_lengths: Any = None,
    query_starts: Any = None,
    key_starts: Any = None,
    dropout: float = 0.0,
    layout: str = "bhtd",
    return_lse: bool = False,
    generator: Generator | None = None,
) -> Any:
    """softmax(scale q k^T) v over what each query sees; with return_lse also its log-sum-exp.

    q, k and v lie as `layout` says: b (batch, may be left out), h (heads), t (tokens), d (width);
    k and v may have fewer heads, each then shared by several of q. A query i sees a key j if
    j <= i (`causal`; "bottom_right" counts both from their ends); within `window`: the last so
    many keys up to its own (either side where not causal), or (left, right) counts; where `mask`
    (True = seen) says so; where j is less than its entry of `key_lengths` (one for each of the
    batch); in its own sequence, where `query_starts` and `key_starts` give where each of the
    sequences packed in t starts, and the last one ends. Scores are capped by softcap * tanh(score
    / softcap), then `bias` is added, and `slopes` (one for each head) times j - i. `sinks` are
    one more score for each head, of a key that has no value.
    """
    parents = [q, k, v, bias, slopes, sinks]
    order = layout if "b" in layout else "b" + layout
    q, k, v = (node_of(x) for x in (q, k, v))
    if order != layout:
        q, k, v = (build.unsqueeze(x, 0) for x in (q, k, v))
    sizes = sizes_of((q, k, v), (order,) * 4)
    extras = (bias, mask, slopes, sinks, key_lengths, query_starts, key_starts)
    more = _extras(dict(zip(EXTRAS, extras)), q.dtype.wide)
    if not 0.0 <= dropout <= 1.0:
        raise ShapeError("not a probability", op=OP, expected="0 <= dropout <= 1", got=dropout)
    if not isinstance(softcap, (int, float)) or not 0.0 <= softcap < math.inf:
        raise UserError("softcap is not a number from 0", op=OP, expected="0 or more", got=softcap)
    if 0.0 < dropout < 1.0:
        more["key"], more["offset"] = next_key_and_offset(generator)
    out, lse = graph.attention(
        q,
        k,
        v,
        more,
        scale=1.0 / math.sqrt(max(sizes.width, 1)) if scale is None else float(scale),
        band=_band(causal, window, sizes, packed="query_starts" in more),
        softcap=float(softcap),
        dropout=float(dropout) if dropout < 1.0 else 0.0,
        orders=(order,) * 4,
    )
    if dropout == 1.0:
        out = build.multiply(out, 0.0)
    if order != layout:
        out, lse = build.squeeze(out, (order.index("b"),)), build.squeeze(lse, (0,))
    result = wrap(out, *parents)
    return (result, wrap(lse, *parents)) if return_lse else result


# ---- checks ---------------------------------------------------------------------------------


def _band(causal: bool | str, window: Any, sizes: Sizes, packed: bool) -> Band:
    """Bounds of j - i."""
    if causal not in (True, False, "top_left", "bottom_right"):
        raise UserError(
            "causal is not known",
            op=OP,
            got=repr(causal),
            expected="True, False, 'top_left' or 'bottom_right'",
        )
    low: Size | None = None
    high: Size | None = 0 if causal else None
    if window is not None:
        left, right = _window(window, bool(causal))
        low = None if left is None else -left
        high = right if high is None else high
    if causal != "bottom_right":
        return low, high
    if packed:
        raise UserError(
            "sequences that are packed have no common end",
            op=OP,
            expected="causal=True with query_starts",
            got="'bottom_right'",
        )
    shift = combine(sizes.keys, sizes.queries, -1)
    return (None if low is None else combine(low, shift, 1)), shift


def _window(window: Any, causal: bool) -> tuple[int | None, int | None]:
    """How many keys before and after its own a query sees; None for all."""
    pair = wholes(window, OP, "a window", none=True)
    pair = (pair[0] - 1, 0 if causal else pair[0] - 1) if is_one(window) else pair
    if len(pair) == 2 and all(w is None or (isinstance(w, int) and w >= 0) for w in pair):
        return pair
    raise UserError(
        "not a window", op=OP, got=window, expected="a count of at least 1, or (left, right) counts"
    )


def _extras(given: dict[str, Any], wide: DType) -> dict[str, Node]:
    """The further inputs that were given, with the axes and of the dtypes that the Node has."""
    found = {name: node_of(x) for name, x in given.items() if x is not None}
    for name, x in found.items():
        axes, dtype, _ = EXTRAS[name]
        if axes is SCORES:
            found[name] = _with_rank(x, 4)
        elif dtype is None and x.dtype.is_float:
            found[name] = build.cast(x, wide)
        elif isinstance(dtype, DType) and x.dtype.is_integer:
            found[name] = build.cast(x, dtype)
    return found


# ---- PyTorch's function ---------------------------------------------------------------------


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(query @ key.T * scale + mask) @ value over (..., heads, tokens, head_dim).

    A bool mask is True where a query may look; a float mask is added. `enable_gqa` lets several
    query heads share a key head.
    """
    op = "scaled_dot_product_attention"
    tensors = [lift(x) for x in (query, key, value)]
    mask = None if attn_mask is None else lift(attn_mask)
    _check_torch(op, tensors, mask, is_causal)
    nodes = [node_of(x) for x in tensors]
    given = None if mask is None else node_of(mask)
    if given is not None and given.dtype.is_float and is_data(given):
        given = build.where(build.equal(given, -math.inf), given, build.maximum(given, LEAST_SCORE))
    rank = max(len(x.shape) for x in nodes)
    nodes = [_with_rank(x, rank) for x in nodes]
    bare = rank == 2 or not isinstance(nodes[0].shape[-3], int)  # no heads, but a batch
    if bare:
        nodes = [build.unsqueeze(x, -3) for x in nodes]
        if given is not None and len(given.shape) >= 3:
            given = build.unsqueeze(given, -3)
    lead, (q, k, v) = _four(op, nodes, enable_gqa)
    more: dict[str, Any] = {}
    if given is not None:
        name = "mask" if given.dtype is dtypes.bool_ else "bias"
        more[name] = wrap(_flat_mask(op, given, lead, (q.shape[1], q.shape[2], k.shape[2])), mask)
    own = [wrap(x, y) for x, y in zip((q, k, v), tensors)]
    out = attention(*own, scale=scale, causal=is_causal, dropout=dropout_p, **more)
    return out.reshape(*lead, *out.shape[2 if bare else 1 :])


def is_data(node: Node) -> bool:
    """Whether a value comes from outside; others are read when attention is recognized."""
    while node.op.category == "movement" or node.op is ops.cast:
        node = node.inputs[0]
    return node.op in (ops.input_, argument_op)


def _with_rank(x: Node, rank: int) -> Node:
    return build.reshape(x, (1,) * (rank - len(x.shape)) + x.shape)


def _four(op: str, nodes: list[Node], shared: bool) -> tuple[Shape, list[Node]]:
    """The leading axes, and q, k and v with these in one; heads only repeated where they must."""
    lead = build.broadcast_shapes(op, *(x.shape[:-3] for x in nodes))
    counts = [x.shape[-3] for x in nodes]
    heads, key_heads = counts[0], counts[1] if counts[2] == 1 else counts[2]
    if not shared and heads == 1:
        heads = key_heads  # one query head against many
    if not shared and key_heads not in (1, heads):
        raise ShapeError(
            "the heads differ",
            op=op,
            expected=f"{heads} heads in key and value, as in query",
            got=key_heads,
            hint="enable_gqa=True shares them",
        )
    return lead, [_joined(op, x, lead, n) for x, n in zip(nodes, (heads, key_heads, key_heads))]


def _joined(op: str, x: Node, lead: Shape, heads: Size) -> Node:
    """A value over (..., heads, i, j) with its leading axes in one."""
    whole = build.broadcast_to(x, (*lead, heads, *x.shape[-2:]), op)
    return build.reshape(whole, (product(lead), heads, *x.shape[-2:]))


def _flat_mask(op: str, given: Node, lead: Shape, scores: Shape) -> Node:
    """A mask over (..., heads, queries, keys) with its leading axes in one, not repeated."""
    whole = (*lead, *scores)
    x = _with_rank(given, len(whole))
    if len(x.shape) > len(whole) or any(a not in (1, b) for a, b in zip(x.shape, whole)):
        raise ShapeError(
            "attn_mask does not fit",
            op=op,
            got=build.show(given.shape),
            expected=f"what broadcasts to {build.show(whole)}",
        )
    shared = all(s == 1 for s in x.shape[:-3])  # by all of the batch
    return _joined(op, x, (1,) * len(lead) if shared else lead, x.shape[-3])


def _check_torch(op: str, tensors: list[Tensor], mask: Tensor | None, is_causal: bool) -> None:
    if min(x.ndim for x in tensors) < 2:
        raise ShapeError(
            "the shapes do not fit",
            op=op,
            got=", ".join(build.show(x.shape) for x in tensors),
            expected="query (..., queries, d), key (..., keys, d), value (..., keys, e)",
        )
    if mask is not None and is_causal:
        raise UserError(
            "attn_mask and is_causal are given both",
            op=op,
            expected="one of them",
            got="both",
            hint="add the causal part to the mask",
        )
    if mask is not None and not (mask.dtype is dtypes.bool_ or mask.dtype.is_float):
        raise DTypeError("a mask is bool or float", op=op, got=mask.dtype)


__all__ = ["attention", "scaled_dot_product_attention"]

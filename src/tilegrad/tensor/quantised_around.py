"""Products with quantised weights and what lies around them in a decoder, in one launch if it can.

`surrounded_matmul` is the product of `tensor.quantised` after a root-mean-square norm of x, with a
bias, gates and a value that is added; `split_matmul` gives several results (queries, keys, values).
Where a device's kernels take it (few tokens) all of it is one launch that reads the weights once;
elsewhere it is the same written out in Tensor operations. Invariant: both ways give the same
numbers within the rounding of x's dtype.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..core.config import config
from ..core.dtype import float32
from ..core.target import Target
from ..graph import build, ops
from ..ir.symbol import multiply
from ..kernels.quantised.shape import Around, QuantisedShape
from ..tile.callee import KernelCallee
from .activation import silu
from .convert import cast
from .kernel import target_of
from .norm import rms_norm
from .quantised import Packed, kernels_of, quantised_matmul
from .tensor import Tensor, lift, node_of, wrap


@dataclass(frozen=True)
class Norm:
    """x over the root of its mean square plus `epsilon`, times `weight + offset`."""

    weight: Tensor  # (columns,)
    epsilon: float
    offset: float = 0.0


def surrounded_matmul(
    x: Any,
    packed: Packed,
    *,
    norm: Norm | None = None,
    bias: Any = None,
    gated: str = "",
    residual: Any = None,
) -> Tensor:
    """x (..., columns), normed, times the transpose of packed weights, plus a bias (rows,); with
    `gated="silu"` the activation of the first half of the rows times the second half; plus
    `residual`, which is like the result."""
    around = Around(
        None if norm is None else norm.epsilon,
        0.0 if norm is None else norm.offset,
        bias is not None,
        gated,
        residual is not None,
    )
    found = _launched(lift(x), packed, around, norm, bias, residual)
    if found is None:
        return _written_out(lift(x), packed, norm, bias, gated, residual)
    return found[0]


def split_matmul(
    x: Any, packed: Packed, splits: Sequence[int], norm: Norm | None = None
) -> tuple[Tensor, ...]:
    """x, normed, times the transpose of packed weights, as results of so many rows each."""
    around = Around(
        None if norm is None else norm.epsilon,
        0.0 if norm is None else norm.offset,
        splits=tuple(splits),
    )
    found = _launched(lift(x), packed, around, norm, None, None)
    if found is not None:
        return found
    whole = surrounded_matmul(x, packed, norm=norm)
    ends = list(itertools.accumulate(splits))
    return tuple(whole[..., end - size : end] for size, end in zip(splits, ends))


def _launched(
    x: Tensor, packed: Packed, around: Around, norm: Norm | None, bias: Any, residual: Any
) -> tuple[Tensor, ...] | None:
    """The results of one launch; None where no kernel takes it."""
    lead = x.shape[:-1]
    tokens = functools.reduce(multiply, lead, 1)
    shape, target = packed.problem(tokens, x.dtype), _target(packed)
    kernels = kernels_of(target)
    first = [] if norm is None else [norm.weight]
    last = [lift(t) for t in (bias, residual) if t is not None]
    if around.splits and not getattr(kernels, "SPLITS", False):
        return None
    if (
        not hasattr(kernels, "around_callee")
        or any(t.dtype is not x.dtype for t in (*first, *last))
        or (x.shape[-1] != packed.shape[1] or kernels.why_not_around(shape, target, around))
    ):
        return None
    sizes = around.results(shape)
    if residual is not None:
        last[-1] = last[-1].reshape(tokens, sizes[0])
    given = [x.reshape(tokens, packed.shape[1]), *first, *packed.parts.values(), *last]
    made = ops.call(*map(node_of, given), callee=_callee(shape, target, around))
    found = [made] if len(sizes) == 1 else build.items(made)
    return tuple(wrap(n, x).reshape(*lead, size) for n, size in zip(found, sizes))


def _written_out(
    x: Tensor, packed: Packed, norm: Norm | None, bias: Any, gated: str, residual: Any
) -> Tensor:
    """The same in Tensor operations."""
    if norm is not None:
        weight = norm.weight
        if norm.offset:
            weight = cast(weight, float32) + norm.offset
        x = rms_norm(x, (x.shape[-1],), weight, norm.epsilon)
    found = quantised_matmul(x, packed)
    if bias is not None:
        found = found + bias
    if gated:
        half = packed.shape[0] // 2
        found = silu(found[..., :half]) * found[..., half:]
    return found if residual is None else residual + found


def _target(packed: Packed) -> Target:
    return target_of(packed.device, config().threads)


@functools.lru_cache(maxsize=256)
def _callee(shape: QuantisedShape, target: Target, around: Around) -> KernelCallee:
    return kernels_of(target).around_callee(shape, target, around)  # type: ignore[no-any-return]


__all__ = ["Norm", "split_matmul", "surrounded_matmul"]

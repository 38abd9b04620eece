"""A norm of the last axis, as people write it: x over the root of its mean square, times a weight.

Kernels that read what is normed may do it on the way. Invariant: what is found says all of the
norm, whose sum is in float32 and whose result has the dtype of x.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.dtype import float32
from ..ir.node import Node
from ..ir.pattern import any_, of
from . import notation, ops


@dataclass(frozen=True)
class LastNorm:
    """cast(source / root(mean(source^2) + epsilon) * weight)."""

    source: Node  # (..., columns)
    weight: Node  # (columns,), as it is stored
    epsilon: float


_wide = of(ops.cast, any_("source"), dtype=float32)
_total = of(ops.reshape, of(ops.sum_, _wide * _wide, name="total"))
_mean = _total / any_("count", ops=notation.REPEATS)
_root = of(ops.square_root, _mean + any_("epsilon", ops=notation.REPEATS))
_factor = of(ops.expand, of(ops.reciprocal, _root))
_weight = of(ops.expand, of(ops.reshape, of(ops.cast, any_("weight"), dtype=float32)))
NORM = of(ops.cast, _wide * _factor * _weight).variants()


def last_norm(node: Node) -> LastNorm | None:
    """The norm that a value is, with a weight that is stored; None for others."""
    for pattern in NORM:
        bound: dict[str, Node] = {}
        if not pattern.fits(node, bound):
            continue
        source, weight = bound["source"], bound["weight"]
        while weight.op is ops.stop_gradient:
            weight = weight.inputs[0]
        columns, epsilon = source.shape[-1], ops.constant_value(bound["epsilon"])
        last = bound["total"].attrs["axes"] == (len(source.shape) - 1,)
        whole = last and ops.constant_value(bound["count"]) == columns
        stored = not weight.inputs and weight.shape == (columns,)
        if whole and stored and epsilon is not None and node.dtype is source.dtype:
            return LastNorm(source, weight, float(epsilon))
    return None

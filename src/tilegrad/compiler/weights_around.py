"""What lies around products with unpacked weights in a decoder, found in a Graph.

A root-mean-square norm before, a bias and a value that is added after, gates (`silu(a) * b`).
Invariant: what is found is what the Graph computes, up to the rounding of the tokens' dtype;
whatever looks otherwise is not found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..core.dtype import DType, float32
from ..graph import ops
from ..ir.node import Node
from .norms import factors_of

MOVES = {ops.reshape, ops.expand}


@dataclass(frozen=True)
class RowNorm:
    """x over the root of its mean square plus `epsilon`, times `weight + offset`."""

    x: Node  # (..., columns)
    weight: Node  # (columns,)
    epsilon: float
    offset: float = 0.0


@dataclass(frozen=True)
class Fused:
    """A product with some of what comes after it: `top` is the value with all of that."""

    top: Node
    bias: Node | None = None  # (rows,)
    residual: Node | None = None  # like the result


def bare(node: Node) -> Node:
    """A value without repetition and axes of 1."""
    while node.op in MOVES:
        node = node.inputs[0]
    return node


def number(node: Node) -> Any:
    """The number that all elements are, or None."""
    found = bare(node)
    return found.attrs["value"] if found.op is ops.constant else None


def line_of(node: Node, size: Any) -> Node | None:
    """The (size,) values that a value repeats for every row, or None."""
    found = bare(node)
    ones = all(s == 1 for s in found.shape[:-1])
    if found.op is ops.constant or not found.shape or found.shape[-1] != size or not ones:
        return None
    return found if len(found.shape) == 1 and node.shape[-1] == size else None


# ---- norms --------------------------------------------------------------------------------------


def norm_of(node: Node) -> RowNorm | None:
    """The norm that a value is, or None."""
    dtype, whole = node.dtype, node
    if dtype is not float32:
        if node.op is not ops.cast or node.inputs[0].dtype is not float32:
            return None
        whole = node.inputs[0]
    factors = factors_of(whole)
    if len(factors) != 3:
        return None
    for factor in factors:
        found = _root(factor)
        if found is None:
            continue
        core, epsilon = found
        rest = [f for f in factors if f is not factor]
        if core not in rest or core.shape != whole.shape:
            return None
        rest.remove(core)
        x = _narrow(core, dtype)
        line = line_of(rest[0], whole.shape[-1])
        weight = None if line is None else _offset(line, dtype)
        return None if x is None or weight is None else RowNorm(x, weight[0], epsilon, weight[1])
    return None


def _narrow(node: Node, dtype: DType) -> Node | None:
    """The value of a dtype behind one in float32."""
    if node.dtype is dtype:
        return node
    return node.inputs[0] if node.op is ops.cast and node.inputs[0].dtype is dtype else None


def _offset(line: Node, dtype: DType) -> tuple[Node, float] | None:
    """A weight and what is added to it."""
    offset = 0.0
    if line.op is ops.add:
        values = [(a, number(b)) for a, b in (line.inputs, line.inputs[::-1])]
        found = next(((a, v) for a, v in values if v is not None), None)
        if found is None:
            return None
        line, offset = found[0], float(found[1])
    weight = _narrow(line, dtype)
    return None if weight is None or len(weight.shape) != 1 else (weight, offset)


def _root(factor: Node) -> tuple[Node, float] | None:
    """Of 1 / root(mean(core ** 2) + epsilon): the core and epsilon."""
    node = bare(factor)
    if node.op is not ops.reciprocal:
        return None
    node = bare(node.inputs[0])
    if node.op is not ops.square_root:
        return None
    node = bare(node.inputs[0])
    if node.op is not ops.add:
        return None
    for mean, epsilon in (node.inputs, node.inputs[::-1]):
        value = number(epsilon)
        core = None if value is None else _squared(bare(mean))
        if core is not None:
            return core, float(value)
    return None


def _squared(mean: Node) -> Node | None:
    """What a value is the mean square of, over the last axis."""
    if mean.op not in (ops.multiply, ops.divide):
        return None
    total, share = mean.inputs
    if mean.op is ops.multiply and number(total) is not None:
        total, share = share, total
    total, value = bare(total), number(share)
    if value is None or total.op is not ops.sum_:
        return None
    square = total.inputs[0]
    columns = square.shape[-1]
    if total.attrs["axes"] != (len(square.shape) - 1,) or not isinstance(columns, int):
        return None
    expected = columns if mean.op is ops.divide else 1 / columns
    if square.op is not ops.multiply or square.inputs[0] is not square.inputs[1]:
        return None
    close = abs(value - expected) <= 1e-6 * expected
    return square.inputs[0] if close else None


# ---- what comes after ---------------------------------------------------------------------------


def fused_forms(dot: Node, dtype: DType, reader: Callable[[Node], Node | None]) -> list[Fused]:
    """A product alone, with its bias, with what is added: as far as nothing else reads it."""
    found = [Fused(dot)] if dot.dtype is dtype else []
    top, bias = dot, None
    after = reader(top)
    if after is not None and after.op is ops.add:
        line = line_of(_other(after, top), dot.shape[-1])
        if line is not None:
            bias = _narrow(line, dtype)
            if dot.dtype is not dtype:  # a bias is added in float32
                after = reader(after)
                if after is None or after.op is not ops.cast or after.dtype is not dtype:
                    return found
            if bias is None or len(bias.shape) != 1:
                return found
            top = after
            found.append(Fused(top, bias))
    if top.dtype is not dtype:
        return found
    after = reader(top)
    if after is not None and after.op is ops.add:
        other = _other(after, top)
        if other is not top and other.shape == top.shape:
            found.append(Fused(after, bias, other))
    return found


def _other(pair: Node, one: Node) -> Node:
    a, b = pair.inputs
    return b if a is one else a


# ---- gates --------------------------------------------------------------------------------------


def gates_of(node: Node, dtype: DType) -> tuple[Node, Node] | None:
    """(a, b) of silu(a) * b."""
    if node.op is not ops.multiply or node.dtype is not dtype:
        return None
    for first, second in (node.inputs, node.inputs[::-1]):
        gate = _silu(first, dtype)
        if gate is not None:
            return gate, second
    return None


def _silu(node: Node, dtype: DType) -> Node | None:
    """x of x / (1 + e ** -x)."""
    if dtype is not float32:
        if node.op is not ops.cast or node.inputs[0].dtype is not float32:
            return None
        node = node.inputs[0]
    if node.op is not ops.multiply:
        return None
    for x, chance in (node.inputs, node.inputs[::-1]):
        if _is_sigmoid(chance, x):
            return _narrow(x, dtype)
    return None


def _is_sigmoid(node: Node, x: Node) -> bool:
    if node.op is not ops.reciprocal or node.inputs[0].op is not ops.add:
        return False
    for power, one in (node.inputs[0].inputs, node.inputs[0].inputs[::-1]):
        if number(one) == 1 and power.op is ops.exp:
            minus = power.inputs[0]
            return minus.op is ops.negative and minus.inputs[0] is x
    return False


__all__ = ["Fused", "RowNorm", "fused_forms", "gates_of", "norm_of"]

"""The types of the ops that pick tokens from rows of a vocabulary: `draw`, `top_k`, `add_listed`.

A row belongs to a slot, and settings are kept by slot. Invariant: what passes here has a meaning
in `draw_reference`.
"""

from __future__ import annotations

from ..core.dtype import DType, float32, int32, uint32
from ..core.errors import InternalError
from ..ir.node import Node
from ..ir.types import Array, Type


def _rows(op: str, x: Node) -> Array:
    if not isinstance(x.type, Array) or len(x.shape) != 2 or x.dtype is not float32:
        raise InternalError(f"graph.{op}", f"{x.type}, expected rows of float32")
    return x.type


def _fits(op: str, **given: tuple[Node, tuple[object, ...], DType]) -> None:
    for name, (node, shape, dtype) in given.items():
        if node.dtype is not dtype or node.shape != shape:
            raise InternalError(f"graph.{op}", f"{name} is {node.type}, expected {dtype}{shape}")


def draw_type(
    p: Node,
    floats: Node,
    limits: Node,
    seeds: Node,
    slots: Node,
    positions: Node,
    *,
    top_p: int,
    min_p: int,
) -> Type:
    """(rows,) int32."""
    rows = _rows("draw", p).shape[0]
    count = floats.shape[0]
    if len(floats.shape) != 2 or not 0 <= min(top_p, min_p) <= max(top_p, min_p) < floats.shape[1]:
        raise InternalError("graph.draw", f"floats are {floats.type}, columns {top_p}, {min_p}")
    _fits(
        "draw",
        floats=(floats, floats.shape, float32),
        limits=(limits, (count,), int32),
        seeds=(seeds, (count, 2), uint32),
        slots=(slots, (rows,), int32),
        positions=(positions, (rows,), int32),
    )
    return Array((rows,), int32)


def top_k_type(x: Node, *, count: int) -> Type:
    """(rows, count) int32."""
    rows, columns = _rows("top_k", x).shape
    if isinstance(columns, int) and not 0 < count <= columns:
        raise InternalError("graph.top_k", f"{count} of {columns}")
    return Array((rows, count), int32)


def add_listed_type(x: Node, counts: Node, ids: Node, values: Node, slots: Node) -> Type:
    """As x."""
    rows = _rows("add_listed", x).shape[0]
    count, most = ids.shape
    _fits(
        "add_listed",
        counts=(counts, (count,), int32),
        ids=(ids, (count, most), int32),
        values=(values, (count, most), float32),
        slots=(slots, (rows,), int32),
    )
    return x.type

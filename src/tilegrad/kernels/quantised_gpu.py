"""Quantised products on GPUs: which kernel a shape gets; see `quantised_shape` for the functions.

Few tokens go to `quantised_gpu_rows`. Invariant: what a Target can run is decided by its facts
alone, and the Plan by the shape.
"""

from __future__ import annotations

from ..core.dtype import bfloat16, float16, float32
from ..core.target import Target
from ..ir.symbol import high
from ..tile.callee import KernelCallee
from .quantised_gpu_layout import LAYOUTS, ROWS, groups_of, layout_of, pack, parts
from .quantised_gpu_rows import RowsPlan, few_tokens
from .quantised_shape import QuantisedShape

FEW = 8  # tokens that one pass over the weights takes


def why_not(shape: QuantisedShape, target: Target) -> str:
    """Why no kernel takes this; '' where one does."""
    if shape.format.name not in LAYOUTS:
        return f"weights of {shape.format} are not quantised"
    if not shape.columns or not shape.rows or high(shape.tokens) < 1:
        return "there is nothing to multiply"
    if shape.dtype not in (float32, bfloat16, float16):
        return "tokens are float32, bfloat16 or float16"
    if high(shape.tokens) > FEW:
        return f"at most {FEW} tokens"
    return ""


def rows_plan(shape: QuantisedShape) -> RowsPlan:
    """The Plan for few tokens: enough bytes asked for at once, and registers for them."""
    groups = 128
    while groups_of(shape) % groups:
        groups //= 2
    tokens, x = high(shape.tokens), layout_of(shape)
    wide = x.codes == "bytes" or x.more == "pairs"
    rows = 16 if tokens == 1 and not wide else 8
    return RowsPlan(rows, groups // 32, groups)


def callee(shape: QuantisedShape, target: Target) -> KernelCallee:
    """The product: x (tokens, columns) and the parts to (tokens, rows)."""
    roles = (*(("read", i) for i in range(1 + len(parts(shape)))), ("store", 0))
    return KernelCallee("quantised_matmul", ((few_tokens(shape, rows_plan(shape)), roles),))


__all__ = ["ROWS", "callee", "pack", "parts", "why_not"]

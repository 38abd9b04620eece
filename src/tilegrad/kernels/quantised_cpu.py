"""Quantised products on CPUs: which kernel a shape gets; see `quantised_shape` for the functions.

Few tokens go to `quantised_cpu_decode`. Invariant: what a Target can run is decided by its facts
alone.
"""

from __future__ import annotations

from ..core.dtype import bfloat16, float16, float32
from ..core.target import Target
from ..tile.callee import KernelCallee
from .quantised_cpu_decode import decode
from .quantised_cpu_parts import LAYOUTS, ROWS, STEP, pack, parts
from .quantised_cpu_take import take
from .quantised_shape import QuantisedShape


def why_not(shape: QuantisedShape, target: Target) -> str:
    """Why no kernel takes this; '' where one does."""
    if shape.format.name not in LAYOUTS:
        return f"weights of {shape.format} are not quantised"
    if shape.columns % STEP or not shape.columns or not shape.rows:
        return f"columns are a multiple of {STEP}"
    if shape.dtype not in (float32, bfloat16, float16):
        return "tokens are float32, bfloat16 or float16"
    return ""


def callee(shape: QuantisedShape, target: Target) -> KernelCallee:
    """The product: x (tokens, columns) and the parts to (tokens, rows)."""
    reads = 1 + len(parts(shape))
    roles = (*(("read", i) for i in range(reads)), ("store", 0))
    return KernelCallee("quantised_matmul", ((decode(shape, target), roles),))


def take_callee(shape: QuantisedShape, target: Target) -> KernelCallee:
    """Rows by number: ids (tokens,) and the parts to (tokens, columns)."""
    reads = 1 + len(parts(shape))
    roles = (*(("read", i) for i in range(reads)), ("store", 0))
    return KernelCallee("quantised_take", ((take(shape, target), roles),))


__all__ = ["ROWS", "callee", "pack", "parts", "take_callee", "why_not"]

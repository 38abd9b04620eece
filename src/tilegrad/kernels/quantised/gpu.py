"""Quantised products on GPUs: which kernel a shape gets; see `shape` for the functions.

Up to FEW tokens go to `gpu_rows`, more of them to `gpu_matrix`, and so does a
number of tokens that only the step knows; from MANY on weights are unpacked first. At the level
`invariant` all go to `gpu_matrix` by one Plan. Invariant:
what a Target can run is decided by its facts alone, and the Plan by the shape.
"""

from __future__ import annotations

from ...core.config import invariant
from ...core.dtype import bfloat16, float16, float32
from ...core.target import Target
from ...ir.symbol import high
from ...tile.callee import KernelCallee
from . import gpu_rows
from .gpu_layout import LAYOUTS, ROWS, groups_of, layout_of, pack, parts
from .gpu_matrix import MatrixPlan, many_tokens
from .gpu_rows import RowsPlan, few_tokens, shared_bytes
from .gpu_take import take, unpack
from .shape import Around, QuantisedShape, padded

SPLITS = True
CORES = 128  # that tiles are to suffice for
MANY = 32  # tokens from which weights are unpacked before a product
FEW = 8  # tokens that byte products take faster than matrix units


def why_not(shape: QuantisedShape, target: Target) -> str:
    """Why no kernel takes this; '' where one does."""
    if shape.format.name not in LAYOUTS:
        return f"weights of {shape.format} are not quantised"
    if not shape.columns or not shape.rows or high(shape.tokens) < 1:
        return "there is nothing to multiply"
    if shape.dtype not in (float32, bfloat16, float16):
        return "tokens are float32, bfloat16 or float16"
    return ""


def is_heavy(shape: QuantisedShape) -> bool:
    """Whether codes take many registers to take apart."""
    x = layout_of(shape)
    return bool(x.more) or x.scales == "power"


def rows_plan(shape: QuantisedShape) -> RowsPlan:
    """The Plan for few tokens: enough bytes asked for at once, and registers for them."""
    groups, tokens, x = groups_of(shape), high(shape.tokens), layout_of(shape)
    heavy = is_heavy(shape)
    if groups <= 32:
        return RowsPlan(16, 2, 32)
    if tokens == 1 and groups <= 128:
        return RowsPlan(16, 8, 64, stages=2)
    if tokens == 1:
        return RowsPlan(16, 8, 64, stages=2) if heavy else RowsPlan(8, 8, 256, resident=2)
    if groups <= 128:
        return RowsPlan(16, 8, 64, together=2, stages=2, resident=2)
    stages = 1 if heavy or x.codes == "bytes" else 2
    return RowsPlan(32, 16, 64, together=2, stages=stages, resident=1)


def matrix_plan(shape: QuantisedShape) -> MatrixPlan:
    """The Plan for more tokens: a warp for every 8 rows, and what is heavy on all cores."""
    most = high(shape.tokens)
    if not isinstance(shape.tokens, int):
        most = min(most, 64)  # steps are of all sizes
    if invariant():
        most = 64
    tokens = next((t for t in (16, 32) if most <= t), 64)
    rows = padded(shape.rows, ROWS)
    sizes = [r for r in (64, 32, 16) if rows % r == 0 and (r <= 32 or tokens <= 32)]
    programs = -(-most // tokens)
    fill = [r for r in sizes if rows // r * programs >= CORES]
    heavy = is_heavy(shape)
    tall = (fill or sizes)[0] if heavy else sizes[0]
    return MatrixPlan(tokens, tall, 2 if heavy and tokens > 32 else 4, tall // 8)


def are_few(shape: QuantisedShape, target: Target) -> bool:
    """Whether byte products take this."""
    if invariant():
        return False
    room = target.memories["shared"].bytes
    return high(shape.tokens) <= FEW and shared_bytes(shape, rows_plan(shape)) <= room


def callee(shape: QuantisedShape, target: Target) -> KernelCallee:
    """The product: x (tokens, columns) and the parts to (tokens, rows)."""
    roles = (*(("read", i) for i in range(1 + len(parts(shape)))), ("store", 0))
    if are_few(shape, target):
        body = few_tokens(shape, rows_plan(shape))
    else:
        body = many_tokens(shape, matrix_plan(shape))
    return KernelCallee("quantised_matmul", ((body, roles),))


def why_not_around(shape: QuantisedShape, target: Target, around: Around) -> str:
    """Why a product is not computed with what is around it; '' where it is."""
    if not are_few(shape, target):
        return f"more than {FEW} tokens, or too many columns"
    return gpu_rows.why_not_around(shape, around) or why_not(shape, target)


def around_callee(shape: QuantisedShape, target: Target, around: Around) -> KernelCallee:
    """A product with what is around it; arguments in the order of `Around`."""
    body = few_tokens(shape, rows_plan(shape), "quantised_around", around)
    results = len(around.results(shape))
    roles = (
        *(("read", i) for i in range(len(body.parameters) - results)),
        *(("store", i) for i in range(results)),
    )
    return KernelCallee("quantised_around", ((body, roles),))


def take_callee(shape: QuantisedShape, target: Target) -> KernelCallee:
    """Rows by number: ids (tokens,) and the parts to (tokens, columns)."""
    roles = (*(("read", i) for i in range(1 + len(parts(shape)))), ("store", 0))
    return KernelCallee("quantised_take", ((take(shape), roles),))


def unpack_callee(shape: QuantisedShape, target: Target) -> KernelCallee:
    """All rows: the parts to (rows, columns)."""
    roles = (*(("read", i) for i in range(len(parts(shape)))), ("store", 0))
    return KernelCallee("quantised_unpack", ((unpack(shape), roles),))


__all__ = [
    "MANY",
    "ROWS",
    "SPLITS",
    "around_callee",
    "callee",
    "pack",
    "parts",
    "take_callee",
    "unpack_callee",
    "why_not",
    "why_not_around",
]

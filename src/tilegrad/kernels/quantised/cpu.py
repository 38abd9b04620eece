"""Quantised products on CPUs: which kernel a shape gets; see `shape` for the functions.

Few tokens go to `cpu_decode`, many to `cpu_many` where bytes are multiplied fastest, else to
`cpu_prefill`. At the level `invariant` any number gives the same sums: products of bytes where the
Target has instructions for them, else panels on vectors.
Invariant: what a Target can run is decided by its facts alone.
"""

from __future__ import annotations

from ...core.config import invariant
from ...core.dtype import DType, float32
from ...core.format import Format
from ...core.target import Target
from ...ir.symbol import Size, combine, high, low, maximum, minimum
from ...tile.callee import KernelCallee
from .cpu_decode import Decode
from .cpu_many import many as many_bodies
from .cpu_parts import ROWS, STEP, parts
from .cpu_parts import pack as pack
from .cpu_prefill import prefill, unit_of
from .cpu_take import write_row
from .shape import NOTHING, Around, QuantisedShape
from .take import rows_body

LANE_TOKENS = 6  # for more than which codes are unpacked once, where tokens are lanes
FEW_TOKENS = 24  # tokens; from about here on unpacking for a matrix unit costs less


def why_not(shape: QuantisedShape, target: Target) -> str:
    """Why no kernel takes this; '' where one does."""
    if shape.columns % STEP or not shape.columns or not shape.rows:
        return f"columns are a multiple of {STEP}"
    return shape.why_not(ROWS)


def many(form: Format, rows: int, dtype: DType, target: Target) -> int:
    """Tokens from which weights are unpacked before a product: never."""
    return 0


def callee(shape: QuantisedShape, target: Target, around: Around = NOTHING) -> KernelCallee:
    """The product: x (tokens, columns) and the parts to (tokens, rows); with what is around it,
    arguments in the order of `Around`.

    Where the number of tokens is known at run time only, both kernels are launched, and the grid
    of one of them is empty. Results but the first are scratch.
    """
    if around != NOTHING:
        body = Decode(shape, target, name="quantised_around", around=around).build()
        return KernelCallee.named("quantised_around", [body], around.names(shape))
    if invariant() and few(target) == 1:
        return KernelCallee.named(
            "quantised_matmul", prefill(shape, target, vectors=True), ("out0",)
        )
    alone, bodies = bytes_alone(target), []
    most = LANE_TOKENS if target.multiplies_by_lane else few(target)
    if low(shape.tokens) <= most:
        own = 1 if high(shape.tokens) <= most else _between(combine(most + 1, shape.tokens, -1))
        bodies.append(Decode(shape, target, most).build(own))
    if high(shape.tokens) > most:
        own = 1 if low(shape.tokens) > most else _between(combine(shape.tokens, most, -1))
        bodies += (many_bodies if alone else prefill)(shape, target, own)
    return KernelCallee.named("quantised_matmul", bodies, ("out0", "split"))


def grouped_callee(shape: QuantisedShape, target: Target, block: int) -> KernelCallee:
    """The product of groups: x, offsets and the parts to (tokens, rows of a group)."""
    if few(target) == 1:
        bodies = prefill(shape, target, vectors=True)
    elif high(shape.tokens) <= LANE_TOKENS * shape.groups:
        bodies = [Decode(shape, target, few(target)).build()]
    else:
        bodies = many_bodies(shape, target)
    return KernelCallee.named("grouped_quantised", bodies, ("out0", "split"))


def bytes_alone(target: Target) -> bool:
    """Whether any number of tokens is multiplied as bytes, to the same bits: at `invariant`, and
    where a vector holds a block of rows or lanes are factors, and there is no faster unit."""
    wide = target.multiplies_by_lane or target.lanes(float32) == ROWS
    return invariant() or (target.multiplies_bytes and wide and not unit_of(target))


def few(target: Target) -> int:
    """Tokens up to which weights are multiplied as they are: with instructions for products of
    four bytes, of pairs, or without."""
    if target.multiplies_bytes or target.has("i8mm"):
        return FEW_TOKENS
    return FEW_TOKENS // 4 if target.has("avx2") or target.has("avx512bw") else 1


def _between(value: Size) -> Size:
    """1 where it is positive, else 0."""
    return minimum(1, maximum(0, value))


def why_not_around(shape: QuantisedShape, target: Target, around: Around) -> str:
    """Why a product is not computed with what is around it; '' where it is."""
    if invariant():
        return "invariant: what is around a product is computed apart, for any number of tokens"
    if high(shape.tokens) > few(target):
        return f"more than {few(target)} tokens"
    return around.why_not(shape, ROWS) or why_not(shape, target)


def take_callee(shape: QuantisedShape, target: Target) -> KernelCallee:
    """Rows by number: ids (tokens,) and the parts to (tokens, columns)."""
    return KernelCallee.named(
        "quantised_take", [rows_body(shape, parts(shape), write_row)], ("out",)
    )

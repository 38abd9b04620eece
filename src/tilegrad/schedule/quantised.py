"""Families of quantised weights: what reads them as they are stored, and how they are laid out.

A product or a gather of `unpack(bytes)` is one kernel that unpacks as it reads; a product of many
tokens of 16 bits had better unpack its weights to scratch memory first, and then be an ordinary
one. The pass that finds them, with what is around them, is `compiler/weights_products.py`.
Invariant: the Layout of weights follows from Format, sizes and Target alone, so that every
Executable reads the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.config import invariant
from ..core.dtype import DType
from ..core.format import Format, format_of
from ..core.target import Target
from ..graph import ops
from ..ir.node import Node
from ..ir.symbol import Size, high, low
from ..ir.types import product
from ..kernels.quantised.prepare import Preparation, kernels_of, kind_of
from ..kernels.quantised.shape import Around, QuantisedShape
from .access import base_of
from .families import KINDS, family_of, rows_of
from .family import Family, Offer, Offers, Verdict, judged

UNPACK = "unpack first"  # the Plan of `Unpacked`


class Quantised(Family):
    """Products of quantised weights, and their rows by number."""

    def why_not_shape(self, shape: QuantisedShape, target: Target) -> str:
        """Why no kernel takes this; '' if one does."""
        return kernels_of(target).why_not(shape, target)

    def why_not_around(self, shape: QuantisedShape, target: Target, around: Around) -> str:
        """Why no kernel takes a product with this around it; '' if one does."""
        return kernels_of(target).why_not_around(shape, target, around)

    def offers_for(self, shape: QuantisedShape, target: Target) -> Offers:
        """One Plan with its seconds, or why there is none."""
        return self.why_not_shape(shape, target) or [Offer(self.seconds(shape, target))]

    def seconds(self, shape: QuantisedShape, target: Target) -> float:
        """The roofline: the stored bytes are read once."""
        tokens, size = high(shape.tokens), shape.dtype.size
        moved = shape.rows * shape.row_bytes + tokens * (shape.rows + shape.columns) * size
        flops = 2 * tokens * shape.rows * shape.columns
        return max(moved / target.peak_bytes(), flops / max(1.0, target.peak_flops(shape.dtype)))

    def layout(self, rows: Sequence[int], form: str, columns: int, target: Target) -> Preparation:
        """How the bytes of weights that one product reads together are prepared."""
        return Preparation(kind_of(target), form, rows, columns)


class Unpacked(Quantised):
    """Products that unpack their weights to scratch memory first (docs/decisions/0026)."""

    def offers_for(self, shape: QuantisedShape, target: Target) -> Offers:
        """One Plan from as many tokens on as pay for it."""
        many = self.first(shape.format, high(shape.rows), shape.dtype, target)
        if not many:
            at = "at the level invariant: " if invariant() else ""
            return f"{at}products unpack their weights as they read them"
        if low(shape.tokens) < many:
            return f"for {many} tokens and more"
        return [Offer(self.seconds(shape, target), UNPACK)]

    def first(self, form: Format, rows: int, dtype: DType, target: Target) -> int:
        """Tokens from which this is the better way; 0 for never."""
        if invariant() or dtype.bits != 16:
            return 0
        return kernels_of(target).many(form, rows, dtype, target)

    def breaks(self, node: Node, target: Target) -> Sequence[tuple[Size, int]]:
        """(the tokens of a product, the first number that is many)."""
        x = next(i for i in node.inputs if weight_of(i).op is not ops.unpack)
        (weight,) = (w for w in map(weight_of, node.inputs) if w.op is ops.unpack)
        rows = high(product(weight.shape[:-1]))
        many = self.first(format_of(weight.attrs["format"]), rows, x.dtype, target)
        return [(product(x.shape[:-1]), many)] if many else ()


def weight_of(node: Node) -> Node:
    """What an operand of a product is, before casts and movements."""
    return base_of(node, passing=(ops.cast, ops.permute, ops.reshape))


def families_of(target: Target) -> tuple[Unpacked, Quantised]:
    """The Families of quantised weights on a Target: those that unpack first, those that read."""
    first, then = (family_of(row) for row in rows_of(KINDS["unpack"], "unpack", target))
    assert isinstance(first, Unpacked) and isinstance(then, Quantised)
    return first, then


def chosen_for(
    shape: QuantisedShape, target: Target, around: Around | None = None, rows: bool = False
) -> tuple[Offer, Verdict]:
    """The best offer for a product that some Family takes, with what is around it, or for rows by
    number."""
    first, then = families_of(target)
    alone = first.offers_for(shape, target)
    if around is not None or rows:
        alone = "only for products with nothing around them"
    return judged([(first, alone), (then, then.offers_for(shape, target))])[1:]

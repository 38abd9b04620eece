"""Descriptors of shared operands of wgmma.

A descriptor is 64 bits: the address, the distances between groups of 8 rows and between column
blocks, in units of 16 bytes, and the swizzle. Only its low half depends on where the operand lies,
so a step along k or to another block of rows is one addition. Invariant: the operand lies in a
swizzled place whose patterns begin on their boundaries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...core.errors import InternalError
from ...ir.node import Node
from ...ir.types import Memory
from .emit_shared import SWIZZLES

if TYPE_CHECKING:
    from .emit_placed import PlacedEmitter

SWIZZLE_CODES = {0: 0, 128: 1, 64: 2, 32: 3}


class Operand:
    """Descriptors of a shared operand of wgmma."""

    def __init__(
        self, emitter: PlacedEmitter, place: Node, lead: list[Node], along_k: bool, depth: int
    ) -> None:
        self.e, self.along_k, self.depth = emitter, along_k, depth
        type_ = place.type
        assert isinstance(type_, Memory)
        self.size: int = type_.dtype.size
        self.rows, self.columns = (int(s) for s in type_.shape[-2:])
        self.swizzle = SWIZZLES[type_.layout]
        if not self.swizzle:
            raise InternalError("ptx.emit", "a matrix operand lies in a swizzled place")
        self.span = self.swizzle // self.size  # columns of a block
        address = emitter.lead_address(place, lead)
        w = emitter.w
        leading = 1 if along_k else self.rows * self.swizzle >> 4
        high = (8 * self.swizzle >> 4) | SWIZZLE_CODES[self.swizzle] << 30
        # an address in a cluster has the rank of its program above the bits of the place
        low = w.value("b32", "bfe.u32", address, "4", "14")
        self.low = w.value("b32", "or.b32", low, str(leading << 16))
        self.high = w.value("b32", "mov.b32", str(high))
        self.known: dict[int, str] = {}

    def at(self, row: int, step: int, groups: int = 1) -> str:
        """The descriptor for elements from `row` (of m or n) on, at a step of k."""
        if self.along_k:
            column = step * self.depth
            offset = (column // self.span) * self.rows * self.swizzle
            offset += column % self.span * self.size + row * self.swizzle
            apart = 64 * self.swizzle
        else:
            offset = (row // self.span) * self.rows * self.swizzle
            offset += row % self.span * self.size + step * self.depth * self.swizzle
            apart = (64 // self.span) * self.rows * self.swizzle
        if offset not in self.known:
            w = self.e.w
            low = self.low
            if groups > 1:
                low = w.value("b32", "mad.lo.s32", self.e.group(), str(apart >> 4), low)
            if offset:
                low = w.value("b32", "add.s32", low, str(offset >> 4))
            self.known[offset] = w.value("b64", "mov.b64", f"{{{low}, {self.high}}}")
        return self.known[offset]

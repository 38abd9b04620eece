"""Descriptors of shared operands of wgmma.

A descriptor is 64 bits: the address, the distances between groups of 8 rows and between column
blocks, in units of 16 bytes, and the swizzle. Only its low half depends on where the operand lies,
so a step along k or to another block of rows is one addition. Invariant: the operand lies in a
swizzled place whose patterns begin on their boundaries.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.errors import InternalError
from ...ir.node import Node
from .addresses import lead_address
from .emission import Emission, memory_of
from .shared import SWIZZLES
from .write import braced

SWIZZLE_CODES = {0: 0, 128: 1, 64: 2, 32: 3}


class Operand:
    """Descriptors of a shared operand of wgmma."""

    def __init__(
        self, e: Emission, place: Node, lead: Sequence[Node], along_k: bool, depth: int
    ) -> None:
        self.w, self.threads, self.along_k, self.depth = e.w, e.threads, along_k, depth
        type_ = memory_of(place)
        self.size = type_.dtype.size
        self.swizzle = SWIZZLES[type_.layout]
        if not self.swizzle:
            raise InternalError("ptx.emit", "a matrix operand lies in a swizzled place")
        self.span = self.swizzle // self.size  # columns of a block
        self.block = int(type_.shape[-2]) * self.swizzle  # bytes of one
        leading = 1 if along_k else self.block >> 4
        high = (8 * self.swizzle >> 4) | SWIZZLE_CODES[self.swizzle] << 30
        # an address in a cluster has the rank of its program above the bits of the place
        low = e.w.value("bfe.u32", lead_address(e, place, lead), "4", "14")
        self.low = e.w.value("or.b32", low, str(leading << 16))
        self.high = e.w.copy("b32", high)
        self.known: dict[int, str] = {}

    def at(self, row: int, step: int, groups: int = 1) -> str:
        """The descriptor for elements from `row` (of m or n) on, at a step of k."""
        k = step * self.depth
        column, down = (k, row) if self.along_k else (row, k)
        offset = (column // self.span) * self.block
        offset += column % self.span * self.size + down * self.swizzle
        if offset not in self.known:
            low = self.low
            if groups > 1:
                apart = 64 * self.swizzle if self.along_k else 64 // self.span * self.block
                low = self.w.mad(self.threads.group(), apart >> 4, low)
            if offset:
                low = self.w.add(low, offset >> 4)
            self.known[offset] = self.w.value("mov.b64", braced((low, self.high)))
        return self.known[offset]

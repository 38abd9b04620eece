"""Products of 16-bit floats as an array adds them, on the CPU: the same values to the bit.

A tile of the unit's depth is summed from zero, k after k, and added to the tiles before it; with
sums in place the unit's depth is that of the whole product. Subnormal numbers are zero of their
sign: operands, products and sums. Invariant: what the array's simulator gives, NaNs' bits apart.
"""

from __future__ import annotations

from dataclasses import replace

from ..core.dtype import float16, float32
from ..core.target import MatrixUnit
from ..ir.node import Node
from ..ir.symbol import Size, high, modulo
from .dot import DotLowering
from .plan import Plan

TINY, HALF_TINY = 2.0**-126, 2.0**-14  # the smallest normal fp32, fp16


class ArrayDot(DotLowering):
    """Lowers one product in the order of the array at a rate."""

    rate = ""

    @property
    def unit(self) -> MatrixUnit:
        """The array as it multiplies at this rate."""
        return next(u for u in self.target.array_rates if u.name == self.rate or not self.rate)

    def choose(self) -> Plan:
        """The host's, with blocks of k that are tiles of the array."""
        depth = min(self.unit.k, high(self.problem.sizes[2]))
        return replace(super().choose(), block_k=depth, unroll=1)

    def flushed(self, x: Node, least: float = TINY) -> Node:
        """x without subnormal numbers."""
        b = self.b
        small = b.apply("less", b.apply("absolute", x), b.constant(least, float32, ()))
        return b.apply("where", small, b.apply("multiply", x, b.constant(0, float32, ())), x)

    def multiplied(self, left: Node, line: Node, sums: Node) -> Node:
        """A product, then a sum, each rounded."""
        half = float16 in [x.dtype for x in self.region.values[0].inputs]
        given = [self.flushed(x, HALF_TINY if half else TINY) for x in (left, line)]
        product = self.flushed(self.b.apply("multiply", *given))
        return self.flushed(self.b.apply("add", sums, product))

    def with_earlier(self, acc: Node, at: Size, rows: list[Size], start: Size) -> Node:
        """The tiles before it and this one; rows of the array that have no k add zeros."""
        b, k = self.b, self.problem.sizes[2]
        unit = self.unit
        whole = unit.k if unit.k <= 2 * unit.m else 2 if self.rate else 1  # of k, without zeros
        if modulo(k, whole) != 0:
            zero = b.apply("add", acc, b.constant(0, float32, ()))
            acc = b.branch(b.less(k, at + unit.k), lambda: [zero], lambda: [acc])[0]
        return self.flushed(super().with_earlier(acc, at, rows, start))

    def epilogue(self, row: Size, lane: Size, acc: Node) -> None:
        """Sums as they are stored: fp16 has no subnormal numbers either."""
        half = self.region.values[0].dtype is float16
        super().epilogue(row, lane, self.flushed(acc, HALF_TINY) if half else acc)

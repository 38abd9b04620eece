"""Programs run word by word, without cycles: the values of the register-level simulator, quickly.

`order` gives the words in an order in which they may run; which one does not matter to a program
without races, and others are refused. Invariant: DRAM at the end is what the register-level
simulator leaves, to the bit.
"""

from __future__ import annotations

import numpy as np

from ...core.errors import UserError
from . import arithmetic
from .arithmetic import Array
from .check import Order, check, uses
from .dma import Memories, chances, stored, unpack
from .execute import at, combined, taken
from .instructions import Code, Instruction, text
from .parameters import Parameters
from .timing import planes_of, row_bytes


class Functional(Memories):
    """The memories of a chip, and what each word does to them."""

    def __init__(self, p: Parameters, memory: Array) -> None:
        super().__init__(p)
        self.memory = memory
        self.still = np.zeros((p.rows, p.columns), np.uint16)
        self.still_index = np.zeros((p.rows, p.columns), np.uint8)
        self.mesh = np.zeros((p.rows, p.columns), self.sums.dtype)  # sums in place
        self.random = arithmetic.seeded(1, p.lanes)

    def run(self, program: Code) -> None:
        """A whole program."""
        check(self.p, program)
        order = Order(self.p, program, timed=False)
        with np.errstate(all="ignore"):
            for one in order.words():
                if order.seed is not None:
                    self.random, order.seed = arithmetic.seeded(order.seed, self.p.lanes), None
                if one.op != "sync":
                    getattr(self, one.op)(one)

    # ---- load and store ----

    def _rows(self, one: Instruction) -> Array:
        """The bytes of the rows of a move, which may be written."""
        starts = one["dram"] + np.arange(one["rows"]) * one["stride"]
        addresses = starts[:, None] + np.arange(row_bytes(self.p, one))
        if addresses.max() >= len(self.memory):
            raise UserError(
                "an address outside of DRAM", op="npu", expected=len(self.memory), got=text(one)
            )
        return addresses

    def move_in(self, one: Instruction) -> None:
        """Rows of DRAM into the scratchpad."""
        at = slice(one["local"], one["local"] + one["rows"])
        found = unpack(self.p, one, self.memory[self._rows(one)])
        self.scratchpad[at], self.indices[at] = found

    def move_out(self, one: Instruction) -> None:
        """Rows of sums to DRAM, as they are or narrow."""
        extra, self.random = chances(self.p, one, one["rows"], self.random)
        sums = self.sums[one["local"] : one["local"] + one["rows"]]
        made = np.ascontiguousarray(stored(self.p, one, sums, extra)[:, : one["columns"]])
        self.memory[self._rows(one)] = made.view(np.uint8)

    # ---- the mesh ----

    def values(self, bits: Array) -> Array:
        """Numbers of elements, as the multipliers take them."""
        return arithmetic.values_of(self.p.element)[bits]

    def preload(self, one: Instruction) -> None:
        """What stays in the mesh."""
        rows, columns = one["rows"], self.p.columns
        at = slice(one["local"], one["local"] + rows)
        self.still[:], self.still_index[:] = 0, 0
        self.still[:rows] = self.scratchpad[at, :columns]
        self.still_index[:rows] = self.indices[at, :columns]

    def weights(self, bits: Array, mixed: int) -> Array:
        """Numbers of rows of weights, of two where each place has two."""
        if not mixed:
            return self.values(bits)
        pairs = arithmetic.pairs_of(self.p.weights, self.p.element)[:, bits]
        return pairs.transpose(1, 0, 2).reshape(-1, self.p.columns)

    def matmul(self, one: Instruction) -> None:
        """A product, in the order of the mesh."""
        p, count = self.p, one["count"]
        lanes = p.rows * (1 + (one["mixed"] | one["sparse"]))
        first = self.values(self.scratchpad[one["local"] : one["local"] + count, :lanes])
        if p.dataflow != "os":
            zeros = np.zeros((count, p.columns), self.sums.dtype)
            found = self._product(one, zeros, first, self.still, self.still_index)
            self._sum(one, slice(one["result"], one["result"] + count), found)
            return
        at = slice(one["second"], one["second"] + count)
        second, index = (x[at, : p.columns] for x in (self.scratchpad, self.indices))
        start = self.mesh if one["keep"] else np.zeros_like(self.mesh)
        left = first.reshape(-1, p.rows).T  # of two places, the second half of a row is the second
        self.mesh = self._product(one, start, left, second, index)
        if one["drain"]:
            rows = one["rows"]
            self._sum(one, slice(one["result"], one["result"] + rows), self.mesh[:rows])
            self.mesh = np.zeros_like(self.mesh)

    def _product(
        self, one: Instruction, sums: Array, left: Array, bits: Array, index: Array
    ) -> Array:
        """Sums with inputs (rows, K) times weights; an index picks one of the inputs of a step."""
        right = self.weights(bits, one["mixed"])
        if one["mixed"] or not (one["sparse"] or index.any()):
            return self._through(sums, left[:, :, None], right)
        steps = np.arange(len(right))[:, None]
        if one["sparse"]:
            return self._through(sums, left[:, steps // 2 * 4 + index], right)
        return self._through(
            sums, np.where(index == 0, left[:, :, None], left.dtype.type(0)), right
        )

    def _through(self, sums: Array, left: Array, right: Array) -> Array:
        """Sums along k one after the other, of inputs (rows, K, columns or one for all); those of
        integers have no order."""
        if not self.p.floating:
            wide, weights = left.astype(np.float64), right.astype(np.float64)  # exact below 2**53
            if left.shape[2] == 1:
                return sums + arithmetic.wrapped(wide[:, :, 0] @ weights)
            return sums + arithmetic.wrapped(np.einsum("mkn,kn->mn", wide, weights))
        for k in range(left.shape[1]):
            products = arithmetic.flush(left[:, k] * right[k])
            sums = arithmetic.flush(sums + products)
        return sums

    def _sum(self, one: Instruction, at: slice, found: Array) -> None:
        if one["accumulate"]:
            found = self.sums[at] + found
            found = arithmetic.flush(found) if self.p.floating else found
        self.sums[at] = found

    # ---- the vector unit ----

    def vector(self, one: Instruction) -> None:
        """Rows of sums, or of the scratchpad."""
        if planes := planes_of(self.p, one):
            self._take(one, planes)
            return
        for rows in self._runs(one):  # rows that read no row written in the same run
            self.sums[at(one["result"], rows)] = combined(self.p, one, self.sums, rows)

    reduce = vector

    def _runs(self, one: Instruction) -> list[slice]:
        """Rows in runs: all at once, or one by one where a row reads what one before it wrote."""
        count, result = one["count"], one["result"]
        reads = [(one[name], rows) for name, _, rows in uses(self.p, one) if name != "result"]
        if any(
            start < result + count and result < start + rows and (rows < count or start < result)
            for start, rows in reads
        ):
            return [slice(i, i + 1) for i in range(count)]
        return [slice(0, count)]

    def _take(self, one: Instruction, planes: int) -> None:
        count = one["count"]
        rows = 1 if one["hold_first"] else count
        found = self.scratchpad[one["local"] : one["local"] + rows * planes]
        self.sums[at(one["result"], slice(0, count))] = taken(self.p, found, planes)

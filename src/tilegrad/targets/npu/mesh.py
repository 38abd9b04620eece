"""The mesh, register by register: one NumPy step is one clock edge of every multiplier.

With weights or inputs in place (`ws`, `is`) a multiplier keeps a value, passes inputs to the right
and sums down. With sums in place (`os`) it passes inputs to the right and weights down, and sums
move down only when they are drained. With a 2:4 unit a lane carries four inputs and the index
beside a weight picks one. Multipliers of mixed precision take two inputs with the two weights whose
bits lie in the place of one, the first product added first. Invariant: arrays are exactly the
registers of the RTL's mesh, before the edge; `step` is the edge.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .arithmetic import Array, bits_of, flush, pairs_of
from .parameters import Parameters

SMALL = 2.0**-40
Row = tuple[Array, Array, Array]  # numbers, 2:4 indices and bits of weights


class Skew:
    """Lanes that leave later than they came: lane i by `delays[i]` cycles."""

    def __init__(self, delays: Array, shape: tuple[int, ...], kind: Any) -> None:
        self.depth = int(delays.max()) + 1
        lanes = len(delays)
        self.memory: Array = np.zeros((self.depth, *shape), kind)
        self.flat = self.memory.reshape(self.depth * lanes, *shape[1:])
        turns = np.arange(self.depth)[:, None]
        self.leaving = (turns - delays) % self.depth * lanes + np.arange(lanes)
        self.now = 0

    def step(self, row: Array) -> Array:
        """Takes the lanes of this cycle and gives those that leave in it."""
        self.now = now = (self.now + 1) % self.depth
        self.memory[now] = row
        return self.flat.take(self.leaving[now], 0)


class Mesh:
    """The registers of the mesh, of the skew before it and of the deskew behind it."""

    def __init__(self, p: Parameters) -> None:
        self.p = p
        rows, columns = p.rows, p.columns
        kind: Any = np.float32 if p.floating else np.int32
        four = (p.lane,) if p.lane > 1 else ()
        self.inputs = np.zeros((rows, columns, *four), kind)
        self.sums = np.zeros((rows, columns), kind)
        self.still = np.zeros((rows, columns), kind)  # ws, is: what stays; os: what moves down
        self.index = np.zeros((rows, columns), np.uint8)  # of each, in its group of four
        self.raw = np.zeros((rows, columns), np.uint16)  # mixed: the bits of each
        self.mixed = False  # whether they are two weights in this cycle
        self.pairs = pairs_of(p.weights, p.element) if p.mixed else None
        self.left = Skew(np.arange(rows), (rows, *four), kind)
        self.top = Skew(np.arange(columns), (columns,), kind)
        self.top_index = Skew(np.arange(columns), (columns,), np.uint8)
        self.top_raw = Skew(np.arange(columns), (columns,), np.uint16)
        self.bottom = Skew(np.arange(columns)[::-1].copy(), (columns,), kind)
        self.no_inputs = np.zeros((rows, *four), kind)
        self.nothing = self.row(np.zeros(columns, kind))
        self.tiny = False  # whether a number came that is below SMALL and not 0

    def row(self, values: Array) -> Row:
        """Weights that are not two in a place, without 2:4."""
        bits = bits_of(values, self.p.element).astype(np.uint16)
        return values, np.zeros(len(values), np.uint8), bits

    def see(self, values: Array) -> None:
        """Numbers of bf16 that will come. Without tiny ones every product and sum is a multiple of
        2**-94, so that none is subnormal and none need be flushed."""
        if not self.tiny:
            least = float((values * values).min())  # 0 and NaN are looked at closer
            self.tiny = not least >= SMALL and bool((np.abs(values[values != 0]) < SMALL).any())

    def added(self, sums: Array, inputs: Array, still: Array, index: Array, raw: Array) -> Array:
        """Sums with what every multiplier gives."""
        if self.mixed and self.pairs is not None:
            for i, weights in enumerate(self.pairs[:, raw]):
                sums = self.flushed(sums + self.flushed(inputs[..., i] * weights))
            return sums
        if self.p.sparse:
            inputs = np.take_along_axis(inputs, index[..., None].astype(np.intp), -1)[..., 0]
        elif self.pairs is not None:
            inputs = inputs[..., 0]
        return self.flushed(sums + self.flushed(inputs * still))

    def arriving(self, feed: Array | None) -> Array:
        """Inputs before each multiplier: from the skew, or from the left neighbour."""
        edge = self.left.step(self.no_inputs if feed is None else feed)
        return _below(self.inputs.swapaxes(0, 1), edge).swapaxes(0, 1)

    def flushed(self, x: Array) -> Array:
        """What a multiplier keeps of a product or a sum."""
        return flush(x) if self.tiny else x

    def leaving(self) -> Array:
        """The row that leaves the deskew in this cycle (ws, is)."""
        return self.bottom.step(self.sums[-1])

    def step_stationary(self, feed: Array | None, load: Row | None) -> None:
        """One edge with `feed` from the left; with `load`, what stays moves down a row."""
        inputs = self.arriving(feed)
        above = _below(self.sums, 0)
        self.sums = self.added(above, inputs, self.still, self.index, self.raw)
        self.inputs = inputs
        if load is not None:
            held = (self.still, self.index, self.raw)
            self.still, self.index, self.raw = map(_below, held, load)

    def step_output(self, feed: Array | None, row: Row | None, clear: bool, drain: bool) -> None:
        """One edge with sums in place: `row` from the top."""
        inputs = self.arriving(feed)
        values, index, raw = row or self.nothing
        still = _below(self.still, self.top.step(values))
        index_below = (
            _below(self.index, self.top_index.step(index)) if self.p.sparse else self.index
        )
        raw_below = _below(self.raw, self.top_raw.step(raw)) if self.pairs is not None else self.raw
        if clear:
            self.sums = np.zeros_like(self.sums)
        elif drain:
            self.sums = _below(self.sums, 0)
        else:
            self.sums = self.added(self.sums, inputs, still, index_below, raw_below)
        self.inputs, self.still, self.index, self.raw = inputs, still, index_below, raw_below


def _below(registers: Array, top: Array | int) -> Array:
    """Registers that took what was above them (of lanes: before them)."""
    made = np.empty_like(registers)
    made[0], made[1:] = top, registers[:-1]
    return made

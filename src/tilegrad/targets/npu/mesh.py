"""The mesh, register by register: one NumPy step is one clock edge of every multiplier.

With weights or inputs in place (`ws`, `is`) a multiplier keeps a value, passes inputs to the right
and sums down. With sums in place (`os`) it passes inputs to the right and weights down, and sums
move down only when they are drained. With a 2:4 unit a lane carries four inputs and the index
beside a weight picks one. Invariant: arrays are exactly the registers of the RTL's mesh, before the
edge; `step` is the edge.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .arithmetic import flush
from .parameters import Parameters

Array = np.ndarray
SMALL = 2.0**-40


class Skew:
    """Lanes that leave later than they came: lane i by `delays[i]` cycles."""

    def __init__(self, delays: Array, shape: tuple[int, ...], kind: Any) -> None:
        self.depth = int(delays.max()) + 1
        lanes = len(delays)
        self.memory: Array = np.zeros((self.depth, *shape), kind)
        self.flat = self.memory.reshape(self.depth * lanes, *shape[1:])
        turns = np.arange(self.depth)[:, None]
        self.places = (turns - delays) % self.depth * lanes + np.arange(lanes)
        self.now = 0

    def step(self, row: Array) -> Array:
        """Takes the lanes of this cycle and gives those that leave in it."""
        self.now = now = (self.now + 1) % self.depth
        self.memory[now] = row
        return self.flat.take(self.places[now], 0)


class Mesh:
    """The registers of the mesh, of the skew before it and of the deskew behind it."""

    def __init__(self, p: Parameters) -> None:
        self.p = p
        rows, columns = p.rows, p.columns
        kind: Any = np.float32 if p.floating else np.int32
        four = (4,) if p.sparse else ()
        self.zero = kind(0)
        self.inputs = np.zeros((rows, columns, *four), kind)
        self.sums = np.zeros((rows, columns), kind)
        self.still = np.zeros((rows, columns), kind)  # ws, is: what stays; os: what moves down
        self.index = np.zeros((rows, columns), np.uint8)  # of each, in its group of four
        self.left = Skew(np.arange(rows), (rows, *four), kind)
        self.top = Skew(np.arange(columns), (columns,), kind)
        self.top_index = Skew(np.arange(columns), (columns,), np.uint8)
        self.bottom = Skew(np.arange(columns)[::-1].copy(), (columns,), kind)
        self.no_inputs = np.zeros((rows, *four), kind)
        self.no_row = np.zeros(columns, kind)
        self.no_index = np.zeros(columns, np.uint8)
        self.tiny = False  # whether a number came that is below SMALL and not 0

    def see(self, values: Array) -> None:
        """Numbers of bf16 that will come. Without tiny ones every product and sum is a multiple of
        2**-94, so that none is subnormal and none need be flushed."""
        if not self.tiny:
            least = float((values * values).min())  # 0 and NaN are looked at closer
            self.tiny = not least >= SMALL and bool((np.abs(values[values != 0]) < SMALL).any())

    def product(self, inputs: Array, still: Array, index: Array) -> Array:
        """What every multiplier gives."""
        if self.p.sparse:
            inputs = np.take_along_axis(inputs, index[..., None].astype(np.intp), -1)[..., 0]
        return self.flushed(inputs * still)

    def arriving(self, feed: Array | None) -> Array:
        """Inputs before each multiplier: from the skew, or from the left neighbour."""
        edge = self.left.step(self.no_inputs if feed is None else feed)
        made = np.empty_like(self.inputs)
        made[:, 0] = edge
        made[:, 1:] = self.inputs[:, :-1]
        return made

    def flushed(self, x: Array) -> Array:
        """What a multiplier keeps of a product or a sum."""
        return flush(x) if self.tiny else x

    def leaving(self) -> Array:
        """The row that leaves the deskew in this cycle (ws, is)."""
        return self.bottom.step(self.sums[-1])

    def step_stationary(self, feed: Array | None, load: tuple[Array, Array] | None) -> None:
        """One edge with `feed` from the left; with `load`, what stays moves down a row."""
        inputs = self.arriving(feed)
        products = self.product(inputs, self.still, self.index)
        above = np.empty_like(self.sums)
        above[0] = self.zero
        above[1:] = self.sums[:-1]
        self.sums = self.flushed(above + products)
        self.inputs = inputs
        if load is not None:
            self.still = np.concatenate([load[0][None], self.still[:-1]])
            self.index = np.concatenate([load[1][None], self.index[:-1]])

    def step_output(
        self, feed: Array | None, row: tuple[Array, Array] | None, clear: bool, drain: bool
    ) -> None:
        """One edge with sums in place: `row` from the top."""
        inputs = self.arriving(feed)
        values, index = row if row is not None else (self.no_row, self.no_index)
        still = np.empty_like(self.still)
        still[0], still[1:] = self.top.step(values), self.still[:-1]
        if self.p.sparse:
            places = np.empty_like(self.index)
            places[0], places[1:] = self.top_index.step(index), self.index[:-1]
        else:
            places = self.index
        if clear:
            self.sums = np.zeros_like(self.sums)
        elif drain:
            self.sums = np.concatenate([self.no_row[None], self.sums[:-1]])
        else:
            self.sums = self.flushed(self.sums + self.product(inputs, still, places))
        self.inputs, self.still, self.index = inputs, still, places


__all__ = ["Mesh", "Skew"]

"""Measure Plans of a matrix product on a GPU: what a worker process runs.

Operands are random, in so many sets that together they pass the L2 cache several times; launches
over all sets are replayed as one graph. The first launch is judged: one row in every 64 of the
result is read back, all of it must have been written, and some columns are compared with NumPy.
Several Plans are measured in turns, so that a drift of the clock meets all of them.
Invariant: seconds are given only for Plans whose result was right.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..core.dtype import DType, dtype_of
from ..kernels.matmul.shape import Operands
from ..runtime.buffer import Buffer
from ..targets.ptx.context import Event
from ..targets.ptx.driver import Device, open_device
from ..targets.ptx.launch import Prepared
from ..targets.ptx.launcher import LaunchGraph, Operation
from ..targets.ptx.program import Entry

PERIOD = (1 << 20) - 3  # elements after which random operands repeat: odd, so that rows differ
CACHES = 4  # how often the sets of operands pass the L2 cache
MOST_SETS = 64
ROWS, COLUMNS = 128, 256  # of a result that are looked at, at most
TOLERANCE = 1e-2  # of a result's error, relative
GRAPH_SECONDS, ROUND_SECONDS = 1e-3, 2e-3  # about, of one graph and one measurement


@dataclass(frozen=True)
class Product:
    """A product to measure, as plain data for another process; dense along `layout`'s axes."""

    m: int
    n: int
    k: int
    dtype: str
    layout: str = "kk"

    @property
    def operands(self) -> Operands:
        """The same as the kernel knows it."""
        dtype = dtype_of(self.dtype)
        return Operands(
            self.m, self.n, self.k, dtype, dtype, self.layout[0] == "k", self.layout[1] == "k"
        )

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k} {self.dtype}" + (
            "" if self.layout == "kk" else f" {self.layout}"
        )


@dataclass(frozen=True)
class Code:
    """A Plan made ready: machine code (or PTX text), its Entry, and whether operands are turned."""

    code: bytes
    entry: str
    turned: bool


@dataclass(frozen=True)
class Timing:
    """What came of a Plan: its median seconds (None where the result was wrong), its error."""

    seconds: float | None
    error: float


def open_gpu(number: int = 0) -> str:
    """Open a GPU in this process; its name."""
    return str(open_device(number).attributes["name"])


def measure(
    product: Product, codes: Sequence[Code], number: int = 0, rounds: int = 5
) -> list[Timing]:
    """The Timing of each Plan, all measured in turns on one GPU."""
    inputs = inputs_for(product, number)
    ready = [inputs.prepared(code) for code in codes]
    errors = [inputs.error(one, code.turned) for one, code in zip(ready, codes)]
    good = [i for i, error in enumerate(errors) if error <= TOLERANCE]
    graphs = {i: inputs.replay(ready[i], codes[i].turned) for i in good}
    repeats = {i: _repeats(inputs, graphs[i]) for i in good}
    times: dict[int, list[float]] = {i: [] for i in good}
    for turn in range(rounds):
        for i in good if turn % 2 == 0 else reversed(good):
            times[i].append(inputs.seconds(graphs[i], repeats[i]))
    return [
        Timing(statistics.median(times[i]) if i in times else None, error)
        for i, error in enumerate(errors)
    ]


def _repeats(inputs: Inputs, graph: LaunchGraph) -> int:
    inputs.seconds(graph, 1)  # to warm up
    once = inputs.seconds(graph, 1) * inputs.launches
    return max(1, int(ROUND_SECONDS / max(once, 1e-7)))


class Inputs:
    """Operands and results of one product on a GPU, in several sets."""

    def __init__(self, product: Product, device: Device) -> None:
        self.product, self.device = product, device
        m, n, k = product.m, product.n, product.k
        self.dtype: DType = dtype_of(product.dtype)
        size = self.dtype.size
        cache = device.target.memories["l2"].bytes
        count = min(MOST_SETS, max(2, -(-CACHES * cache // (size * (m * k + n * k + m * n)))))
        random = np.random.default_rng(0)
        self.patterns = [
            random.standard_normal(PERIOD, np.float32).astype(self.dtype.numpy) for _ in range(2)
        ]
        self.sets = [
            tuple(device.allocate(size * s) for s in (m * k, n * k, m * n)) for _ in range(count)
        ]
        for one in self.sets:
            for buffer, pattern in zip(one, self.patterns):
                self._fill(buffer, pattern)
        device.synchronize()
        target = device.target
        expected = max(
            2 * m * n * k / target.peak_flops(self.dtype),
            size * (m * k + n * k + m * n) / target.peak_bytes(),
        )
        self.turns = max(1, min(MOST_SETS, int(GRAPH_SECONDS / expected)) // count)

    @property
    def launches(self) -> int:
        """Launches of one graph."""
        return self.turns * len(self.sets)

    def _fill(self, buffer: Buffer, pattern: np.ndarray[Any, Any]) -> None:
        """The pattern, over and over."""
        data = pattern.view(np.uint8)[: buffer.bytes]
        self.device.write(buffer, data)
        done = data.nbytes
        while done < buffer.bytes:
            more = min(done, buffer.bytes - done)
            self.device.copy_bytes(buffer.pointer + done, buffer.pointer, more)
            done += more

    def prepared(self, code: Code) -> Prepared:
        """A launch but for its pointers."""
        entry = Entry.from_text(code.entry)
        module = self.device.load(code.code)
        function = module.function(entry.name)
        return Prepared(function, entry)

    def pointers(self, number: int, turned: bool) -> tuple[int, ...]:
        """Of one set, in the order of the kernel's parameters."""
        a, b, c = (buffer.pointer for buffer in self.sets[number])
        return (b, a, c) if turned else (a, b, c)

    def replay(self, prepared: Prepared, turned: bool) -> LaunchGraph:
        """A graph of launches over all sets, in turns."""
        return LaunchGraph(
            self.device,
            [
                Operation(prepared, self.pointers(i % len(self.sets), turned))
                for i in range(self.launches)
            ],
        )

    def seconds(self, graph: LaunchGraph, repeats: int) -> float:
        """Seconds of one launch."""
        start = Event(self.device).record()
        for _ in range(repeats):
            graph.launch()
        stop = Event(self.device).record()
        return stop.seconds_since(start) / repeats / self.launches

    # ---- right or wrong -------------------------------------------------------------------

    def error(self, prepared: Prepared, turned: bool) -> float:
        """The relative error of what one launch gives; infinite where not all was written."""
        n, size = self.product.n, self.dtype.size
        result = self.sets[0][2]
        self.device.fill(result, 0xFF)  # which is no number in any of the dtypes
        prepared.point(self.pointers(0, turned))
        prepared.start()
        self.device.synchronize()
        rows, columns, wanted = self.judged
        found = np.stack([self._row(result, int(row), n, size) for row in rows])
        if not np.isfinite(found).all():
            return float("inf")
        return float(np.linalg.norm(found[:, columns] - wanted) / np.linalg.norm(wanted))

    @cached_property
    def judged(self) -> tuple[np.ndarray[Any, Any], ...]:
        """Rows and columns of the result that are looked at, and the values wanted there."""
        m, n = self.product.m, self.product.n
        random = np.random.default_rng(m)
        starts = np.arange(0, m, max(64, -(-m // ROWS)))
        rows = np.minimum(starts + random.integers(0, 64, len(starts)), m - 1)
        columns = np.unique(random.integers(0, n, COLUMNS))
        return rows, columns, self.left(rows) @ self.right(columns).T

    def _row(self, result: Buffer, row: int, n: int, size: int) -> np.ndarray[Any, Any]:
        part = Buffer(result.pointer + row * n * size, n * size, result, self.device.name)
        return self.device.download(part, (n,), self.dtype).astype(np.float32)

    def left(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Rows of a, as they were filled."""
        m, k = self.product.m, self.product.k
        return self._part(0, rows, m, k)

    def right(self, columns: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Columns of b, as they were filled."""
        n, k = self.product.n, self.product.k
        return self._part(1, columns, n, k)

    def _part(self, operand: int, lines: Any, count: int, k: int) -> np.ndarray[Any, Any]:
        across, along = (k, 1) if self.product.layout[operand] == "k" else (1, count)
        at = lines[:, None].astype(np.int64) * across + np.arange(k) * along
        return np.asarray(self.patterns[operand][at % PERIOD], np.float32)


_held: list[tuple[Any, Inputs]] = []  # the last product's, for the next Plan of it


def inputs_for(product: Product, number: int) -> Inputs:
    """The operands of a product, kept until another is asked for."""
    if not _held or _held[0][0] != (product, number):
        _held.clear()
        _held.append(((product, number), Inputs(product, open_device(number))))
    return _held[0][1]

"""How the benches on a GPU measure: ours and torch interleaved, as replayed graphs of launches.

Both sides run on one stream. A graph holds enough launches over enough sets of inputs that
together they pass the L2 cache several times; a round replays one side, then the other,
alternating which goes first; the result is the median of the rounds' ratios. The ceilings of the
run (a device copy, a read, a large bf16 product) are measured first and printed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from measure import commit, measured_at

from tilegrad.core.target import Target
from tilegrad.targets.ptx.assemble import assemble, find_ptxas
from tilegrad.targets.ptx.driver import open_device
from tilegrad.targets.ptx.emit import emit
from tilegrad.targets.ptx.launch import Prepared
from tilegrad.tile.build import Body

L2_BYTES = 60 << 20


class Bench:
    """One device, one stream that torch and we share."""

    def __init__(self) -> None:
        torch.zeros(1, device="cuda")
        self.device = open_device(0)
        self.stream = torch.cuda.ExternalStream(int(self.device.stream))
        self.target: Target = self.device.target

    def kernel(
        self, body: Body, name: str = "kernel", symbols: dict[str, int] | None = None
    ) -> Prepared:
        """A Body made ready to launch; spills and serialised products are errors."""
        text, entry = emit(body, name, self.target)
        code: bytes | str = text
        if find_ptxas() is not None:
            made = assemble(text)
            made.check_library(name)
            code = made.cubin
        function = self.device.load(code).function(name)
        return Prepared(function, entry, symbols or {})

    def graph(self, work: Sequence[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
        """A graph of launches, in order."""
        with torch.cuda.stream(self.stream):
            for one in work:
                one()
            self.stream.synchronize()
            made = torch.cuda.CUDAGraph()
            with torch.cuda.graph(made, stream=self.stream):
                for one in work:
                    one()
        return made

    def seconds(self, graph: torch.cuda.CUDAGraph, count: int, repeats: int = 1) -> float:
        """Seconds of one of `count` launches of a graph."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.stream):
            start.record()
            for _ in range(repeats):
                graph.replay()
            stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3 / count / repeats

    def interleave(
        self,
        ours: Sequence[Callable[[], Any]],
        theirs: Sequence[Callable[[], Any]],
        rounds: int = 7,
        least: float = 2e-3,
    ) -> dict[str, float]:
        """Median seconds of a launch of both sides, and the median of the rounds' ratios."""
        graphs = [self.graph(ours), self.graph(theirs)]
        counts = [len(ours), len(theirs)]
        repeats = []
        for graph, count in zip(graphs, counts):
            self.seconds(graph, count)
            once = self.seconds(graph, count) * count
            repeats.append(max(1, int(least / once)))
        times: tuple[list[float], list[float]] = ([], [])
        for number in range(rounds):
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                times[side].append(self.seconds(graphs[side], counts[side], repeats[side]))
        ratios = sorted(b / a for a, b in zip(*times))
        return {
            "ratio": statistics.median(ratios),
            "ratio_low": ratios[0],
            "ratio_high": ratios[-1],
            "ours_us": 1e6 * statistics.median(times[0]),
            "peer_us": 1e6 * statistics.median(times[1]),
        }

    def alone(
        self, work: Sequence[Callable[[], Any]], rounds: int = 5, least: float = 2e-3
    ) -> float:
        """Median seconds of a launch."""
        graph = self.graph(work)
        self.seconds(graph, len(work))
        once = self.seconds(graph, len(work)) * len(work)
        repeats = max(1, int(least / once))
        return statistics.median(self.seconds(graph, len(work), repeats) for _ in range(rounds))

    def about(self) -> dict[str, str]:
        """When and on what this was measured."""
        driver = torch.cuda.get_device_properties(0)
        return {
            "date": measured_at(),
            "device": driver.name,
            "torch": torch.__version__,
            "cuda": str(torch.version.cuda),
            "driver": str(self.device.attributes.get("driver_version", "")),
            "commit": commit(),
        }

    def ceilings(self) -> dict[str, float]:
        """Copy and read bytes/s, and FLOP/s of a large bf16 product through torch."""
        x = torch.randn(1 << 28, device="cuda")
        y = torch.empty_like(x)
        copy = self.alone([lambda: torch.abs(x, out=y)] * 4)  # copy_ takes the copy engine
        read = self.alone([lambda: torch.sum(x)] * 4)
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        c = torch.empty_like(a)
        product = self.alone([lambda: torch.mm(a, b, out=c)] * 4)
        return {
            "copy_bytes_per_second": 8 * x.numel() / copy,
            "read_bytes_per_second": 4 * x.numel() / read,
            "bf16_flops": 2 * 8192**3 / product,
        }


def sets(bytes_: int) -> int:
    """How many sets of inputs pass the L2 cache several times."""
    return max(2, min(64, -(-4 * L2_BYTES // max(1, bytes_))))

"""The memory behind the DMA port, as AXI4 sees it: a fixed latency and a fixed rate.

A read's first beat comes `latency` cycles after its address, later beats every `gap` cycles, reads
in order. Writes are taken every `gap` cycles and answered `latency` cycles after their last beat.
With `stalls` addresses and beats are held back by a seeded chance. Invariant: outputs depend on
what was taken in earlier cycles alone, so that one object serves the simulator and an RTL
testbench.
"""

from __future__ import annotations

import random
from collections import deque

import numpy as np

from ...core.errors import InternalError, UserError


class Dram:
    """Bytes behind AXI4; see the module's docstring."""

    def __init__(
        self, data: np.ndarray, width: int, latency: int, gap: int, stalls: int | None = None
    ) -> None:
        self.data, self.width, self.latency, self.gap = data, width, latency, gap
        self.chance = random.Random(stalls) if stalls is not None else None
        self.now = 0
        self.reads: deque[tuple[int, bytes, bool]] = deque()
        self.last_read = -gap
        self.next_write = 0
        self.bursts: deque[list[int]] = deque()  # address and beats of writes under way
        self.answers: deque[int] = deque()
        self.read_bytes = self.written_bytes = 0
        self.nothing = (0, bytes(width), False)
        self.arready = self.awready = True
        self.outputs()

    def outputs(self) -> None:
        """What the port shows in this cycle."""
        if self.chance is not None:
            self.arready = self.chance.random() < 0.7
            self.awready = self.chance.random() < 0.7
        self.wready = self.awready and self.now >= self.next_write
        self.rvalid = bool(self.reads) and self.reads[0][0] <= self.now
        _, self.rdata, self.rlast = self.reads[0] if self.rvalid else self.nothing
        self.bvalid = bool(self.answers) and self.answers[0] <= self.now

    def _span(self, address: int, beats: int) -> slice:
        end = address + beats * self.width
        if end > len(self.data):
            raise UserError(
                "an address outside of DRAM",
                op="npu",
                expected=f"at most {len(self.data)}",
                got=f"{address:#x} to {end:#x}",
            )
        if address // 4096 != (end - 1) // 4096:
            raise InternalError("npu dram", f"a burst at {address:#x} crosses 4096 bytes")
        return slice(address, end)

    def step(
        self,
        read: tuple[int, int] | None,
        rready: bool,
        write: tuple[int, int] | None,
        beat: tuple[bytes, int, bool] | None,
        bready: bool,
    ) -> None:
        """One edge: what the master shows (addresses with beats, a beat with its strobes)."""
        if read is not None and self.arready:
            self._take_read(*read)
        if self.rvalid and rready:
            self.reads.popleft()
            self.read_bytes += self.width
        if write is not None and self.awready:
            self._span(*write)
            self.bursts.append(list(write))
        if beat is not None and self.wready:
            self._take_beat(*beat)
        if self.bvalid and bready:
            self.answers.popleft()
        self.now += 1
        self.outputs()

    def _take_read(self, address: int, beats: int) -> None:
        data = self.data[self._span(address, beats)].tobytes()
        for i in range(beats):
            when = max(self.now + self.latency, self.last_read + self.gap)
            part = data[i * self.width : (i + 1) * self.width]
            self.reads.append((when, part, i == beats - 1))
            self.last_read = when

    def _take_beat(self, data: bytes, strobes: int, last: bool) -> None:
        burst = self.bursts[0]
        written = [i for i in range(self.width) if strobes >> i & 1]
        self.data[burst[0] + np.array(written, int)] = np.frombuffer(data, np.uint8)[written]
        self.written_bytes += len(written)
        burst[0] += self.width
        burst[1] -= 1
        if last != (burst[1] == 0):
            raise InternalError("npu dram", "WLAST is not at the last beat")
        if last:
            self.bursts.popleft()
            self.answers.append(self.now + self.latency)
        self.next_write = self.now + self.gap

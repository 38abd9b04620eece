"""Load and store, register by register: rows between DRAM and the memories on the chip.

A row begins on a beat of the port, and bursts end at 4096 bytes as AXI4 asks. Load asks for all
bursts, one a cycle, while beats come; a whole row is unpacked and written in the cycle after its
last beat. Store reads a row of sums, makes it narrow some lanes a cycle, and sends it.
Invariant: load alone writes the scratchpad, store alone has the second read port of the
accumulators, so that no port is used twice in a cycle.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .arithmetic import TO_NARROW, float_bits, requantise, seeded, wide_of, xorshift
from .dram import Dram
from .front import Queue, Tokens
from .instructions import Instruction
from .parameters import BITS, Parameters
from .timing import burst, row_beats, row_bytes
from .unit import RUN, Unit

READ, LATCH, NARROW, ADDRESS, BEATS, ANSWERS = range(6)  # states of the store within a row


def unpack(p: Parameters, word: Instruction, data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bits and 2:4 indices of the elements of rows of bytes; those behind their columns are 0."""
    columns, rows = word["columns"], len(data)
    bits, index = (np.zeros((rows, p.row_elements), kind) for kind in (np.uint16, np.uint8))
    width = BITS[p.weights] if word["narrow"] else p.element_bits
    used = (columns * width + 7) // 8
    found = data[:, :used]
    if width == 4:
        found = np.stack([found & 15, found >> 4], 2).reshape(rows, -1)[:, :columns]
    elif width == 16:
        found = np.ascontiguousarray(found).view("<u2")
    wide = width < p.element_bits
    bits[:, :columns] = wide_of(p.weights, p.element)[found] if wide else found
    if word["indexed"]:
        pairs = data[:, used : used + (columns * 2 + 7) // 8]
        four = np.stack([pairs >> 2 * i & 3 for i in range(4)], 2).reshape(rows, -1)
        index[:, :columns] = four[:, :columns]
    return bits, index


def stored(p: Parameters, word: Instruction, sums: np.ndarray, extra: Any) -> np.ndarray:
    """Sums as they are stored: 32 bits as they are, or narrow; by chance with `extra` bits."""
    relu = bool(word["relu"])
    if word["raw"]:
        return float_bits(sums) if p.floating else sums.view(np.uint32)
    if p.floating:
        return TO_NARROW[p.element](sums, relu, extra)
    scale = word["scale"] - (word["scale"] >> 15 << 16)
    return requantise(sums, scale, word["shift"], relu, extra)


class Load(Unit):
    """`move_in`."""

    number = 0

    def __init__(self, p: Parameters, queue: Queue, tokens: Tokens, dram: Dram) -> None:
        super().__init__(p, queue, tokens)
        self.dram = dram
        self.scratchpad = np.zeros((p.scratchpad_rows, p.row_elements), np.uint16)
        self.indices = np.zeros((p.scratchpad_rows, p.row_elements), np.uint8)
        self.asking = False  # arvalid
        self.address = self.row_address = self.left = self.ask_rows = 0
        self.row = self.beat = self.beats = 0
        self.plain: str | None = None  # elements of a row that lie as they are
        self.no_index = np.zeros(p.row_elements, np.uint8)
        self.buffer = bytearray(-(-4096 // p.dma_bytes) * p.dma_bytes)
        self.writing = False
        self.write_row = 0
        self.written: tuple[int, np.ndarray, np.ndarray] | None = None  # in this cycle

    def begin(self, word: Instruction) -> None:
        """Sets the registers."""
        self.asking = True
        self.address = self.row_address = word["dram"]
        self.beats = row_beats(self.p, word)
        whole = "<u2" if self.p.element_bits == 16 else "<u1"
        self.plain = None if word["narrow"] or word["indexed"] else whole
        self.left, self.ask_rows = self.beats, word["rows"]
        self.row = self.beat = 0
        self.writing = False

    @property
    def read(self) -> tuple[int, int] | None:
        """Address and beats shown to the port."""
        return (self.address, burst(self.p, self.address, self.left)) if self.asking else None

    def run(self) -> bool:
        """One cycle: write the row that is whole, take a beat, ask for a burst."""
        word = self.word
        done = False
        self.written = None
        if self.writing:
            bits, index = np.zeros_like(self.scratchpad[0]), self.no_index
            if self.plain is None:
                row = np.frombuffer(bytes(self.buffer), np.uint8)
                bits, index = (found[0] for found in unpack(self.p, word, row[None]))
            else:
                bits[: word["columns"]] = np.frombuffer(self.buffer, self.plain, word["columns"])
            self.scratchpad[self.write_row], self.indices[self.write_row] = bits, index
            self.written = (self.write_row, bits, index)
            done = self.row == word["rows"]
        self._take_beat()
        if self.asking and self.dram.arready:
            self._asked(word)
        return done

    def _take_beat(self) -> None:
        self.writing = False
        if not self.dram.rvalid:
            self.cause = "dram"
            return
        width = self.p.dma_bytes
        self.buffer[self.beat * width : (self.beat + 1) * width] = self.dram.rdata
        self.beat += 1
        if self.beat == self.beats:
            self.beat = 0
            self.writing = True
            self.write_row = (self.word["local"] + self.row) % self.p.scratchpad_rows
            self.row += 1

    def _asked(self, word: Instruction) -> None:
        beats = burst(self.p, self.address, self.left)
        self.left -= beats
        self.address = (self.address + beats * self.p.dma_bytes) % 2**32
        if self.left == 0:
            self.ask_rows -= 1
            self.asking = self.ask_rows > 0
            self.row_address = (self.row_address + word["stride"]) % 2**32
            self.address, self.left = self.row_address, self.beats


class Store(Unit):
    """`move_out`."""

    number = 2

    def __init__(
        self, p: Parameters, queue: Queue, tokens: Tokens, dram: Dram, sums: np.ndarray
    ) -> None:
        super().__init__(p, queue, tokens)
        self.dram, self.sums = dram, sums
        self.phase = READ
        self.row = self.lane = self.beat = self.sent = self.open = 0
        self.address = self.row_address = self.left = 0
        self.q = np.zeros(p.columns, sums.dtype)
        self.latched = np.zeros(p.columns, sums.dtype)
        self.buffer = bytearray(-(-p.columns * 4 // p.dma_bytes) * p.dma_bytes)
        self.random = seeded(1, p.lanes)

    def begin(self, word: Instruction) -> None:
        """Sets the registers."""
        self.phase = READ
        self.row = self.open = 0
        self.address = self.row_address = word["dram"]

    @property
    def write(self) -> tuple[int, int] | None:
        """Address and beats shown to the port."""
        shown = self.state == RUN and self.phase == ADDRESS
        return (self.address, burst(self.p, self.address, self.left)) if shown else None

    @property
    def shown(self) -> tuple[bytes, int, bool] | None:
        """The beat shown to the port, its strobes and whether it ends a burst."""
        if self.state != RUN or self.phase != BEATS:
            return None
        width = self.p.dma_bytes
        start = self.beat * width
        count = min(width, row_bytes(self.p, self.word) - start)
        return bytes(self.buffer[start : start + width]), (1 << count) - 1, self.sent == 1

    def run(self) -> bool:
        """One cycle of the row's states."""
        done = False
        answered = self.dram.bvalid
        opened = False
        word = self.word
        if self.phase == READ:
            self.q = self.sums[(word["local"] + self.row) % self.p.accumulator_rows].copy()
            self.phase = LATCH
        elif self.phase == LATCH:
            self.latched = self.q
            self.phase, self.lane = NARROW, 0
        elif self.phase == NARROW:
            self._narrow(word)
        elif self.phase == ADDRESS:
            if self.dram.awready:
                self.sent = burst(self.p, self.address, self.left)
                self.phase = BEATS
                opened = True
            else:
                self.cause = "dram"
        elif self.phase == BEATS:
            self._send(word)
        else:
            self.cause = "dram"
            done = self.open == 0
        self.open += opened - answered
        return done

    def _narrow(self, word: Instruction) -> None:
        lanes = self.p.lanes
        part = self.latched[self.lane : self.lane + lanes]
        extra = None
        if word["stochastic"] and self.p.stochastic:
            extra = self.random
            self.random = xorshift(self.random)
        made = stored(self.p, word, part, extra)
        size = made.itemsize
        self.buffer[self.lane * size : (self.lane + lanes) * size] = made.tobytes()
        self.lane += lanes
        if self.lane == self.p.columns:
            self.phase, self.beat, self.left = ADDRESS, 0, row_beats(self.p, word)

    def _send(self, word: Instruction) -> None:
        if not self.dram.wready:
            self.cause = "dram"
            return
        self.beat += 1
        self.left -= 1
        self.sent -= 1
        self.address = (self.address + self.p.dma_bytes) % 2**32
        if self.sent:
            return
        if self.left:
            self.phase = ADDRESS
            return
        self.row += 1
        self.row_address = (self.row_address + word["stride"]) % 2**32
        self.address = self.row_address
        self.phase = ANSWERS if self.row == word["rows"] else READ

"""Load and store, register by register: rows between DRAM and the memories on the chip.

A row begins on a beat of the port, and bursts end at 4096 bytes as AXI4 asks. Load asks for all
bursts, one a cycle, while beats come; a whole row is unpacked and written in the cycle after its
last beat. Store reads a row of sums, makes it narrow some lanes a cycle, and sends it. Load alone
writes the scratchpad, store alone has the second read port of the accumulators, so that no port is
used twice in a cycle.

Load, execute and store are units. A unit is idle, runs or posts. It takes the head of its queue in
an idle cycle, if the tokens that the instruction waits for are there; runs a number of cycles that
follows from the instruction and the parameters; and posts in one more cycle, later if a channel is
full. Registers change in `step` alone, once a cycle.

The memory behind the port has a fixed latency and a fixed rate, as AXI4 sees it. A read's first
beat comes `latency` cycles after its address, later beats every `gap` cycles, reads in order.
Writes are taken every `gap` cycles and answered `latency` cycles after their last beat. With
`stalls` addresses and beats are held back by a seeded chance. Invariant: outputs depend on what was
taken in earlier cycles alone, so that one object serves the simulator and an RTL testbench.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np

from ...core.errors import InternalError, UserError
from .arithmetic import TO_NARROW, Array, float_bits, requantise, seeded, wide_of, xorshift
from .front import Queue, Tokens, posts, waits
from .instructions import Instruction
from .parameters import BITS, Parameters
from .timing import burst, row_beats, row_bytes

READ, LATCH, NARROW, ADDRESS, BEATS, ANSWERS = range(6)  # states of the store within a row


# ---- units --------------------------------------------------------------------------------------


IDLE, RUN, POST = 0, 1, 2
NOTHING = Instruction("halt")


class Memories:
    """The memories on the chip: the scratchpad with 2:4 indices of its elements, and the sums."""

    def __init__(self, p: Parameters) -> None:
        self.p, size = p, (p.scratchpad_rows, p.row_elements)
        self.scratchpad, self.indices = np.zeros(size, np.uint16), np.zeros(size, np.uint8)
        kind: Any = np.float32 if p.floating else np.int32
        self.sums = np.zeros((p.accumulator_rows, p.columns), kind)


class Unit:
    """The states of one unit."""

    number: int  # of its queue

    def __init__(self, p: Parameters, tokens: Tokens, memories: Memories, dram: Dram) -> None:
        self.p, self.tokens, self.memories, self.dram = p, tokens, memories, dram
        self.queue = Queue(p.queue)
        self.state = IDLE
        self.word = NOTHING
        self.cause = "empty"  # what this cycle was spent on
        self.reset()

    def reset(self) -> None:
        """The registers that keep something from one instruction to the next."""

    def step(self) -> None:
        """One edge."""
        if self.state == IDLE:
            self._take()
        elif self.state == RUN:
            self.cause = "busy"
            if self.run():
                self.state = POST
        else:
            done = self.tokens.put(posts(self.number, self.word["tokens"]))
            self.cause = "busy" if done else "token_room"
            if done:
                self.state = IDLE

    def _take(self) -> None:
        if not self.queue.items:
            self.cause = "empty"
            return
        word = self.queue.items[0]
        if not self.tokens.take(waits(self.number, word["tokens"])):
            self.cause = "token"
            return
        self.cause = "busy"
        self.queue.popped = True
        self.word = word
        self.state = POST if word.op == "sync" else RUN
        if self.state == RUN:
            self.begin(word)

    def begin(self, word: Instruction) -> None:
        """Sets the registers of an instruction that runs from the next cycle on."""

    def run(self) -> bool:
        """One cycle of it; whether it was the last."""
        return True


# ---- load and store -----------------------------------------------------------------------------


def unpack(p: Parameters, word: Instruction, data: Array) -> tuple[Array, Array]:
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


def stored(p: Parameters, word: Instruction, sums: Array, extra: Any) -> Array:
    """Sums as they are stored: 32 bits as they are, or narrow; by chance with `extra` bits."""
    relu = bool(word["relu"])
    if word["raw"]:
        return float_bits(sums) if p.floating else sums.view(np.uint32)
    if p.floating:
        return TO_NARROW[p.element](sums, relu, extra)
    scale = word["scale"] - (word["scale"] >> 15 << 16)
    return requantise(sums, scale, word["shift"], relu, extra)


def chances(p: Parameters, word: Instruction, rows: int, state: Any) -> tuple[Any, Array]:
    """The random bits of some rows that are stored by chance, none of others; and the state of the
    lanes after them."""
    if not (word["stochastic"] and p.stochastic):
        return None, state
    drawn = []
    for _ in range(rows * p.columns // p.lanes):
        drawn.append(state)
        state = xorshift(state)
    return np.stack(drawn).reshape(rows, p.columns), state


class Load(Unit):
    """`move_in`."""

    number = 0

    def reset(self) -> None:
        """See `Unit`."""
        self.asking = False  # arvalid
        self.buffer = bytearray(-(-4096 // self.p.dma_bytes) * self.p.dma_bytes)
        self.written: tuple[int, Array, Array] | None = None  # in this cycle

    def begin(self, word: Instruction) -> None:
        """Sets the registers."""
        self.asking = True
        self.address = self.row_address = word["dram"]
        self.beats = row_beats(self.p, word)
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
            row = np.frombuffer(bytes(self.buffer), np.uint8)
            bits, index = (found[0] for found in unpack(self.p, word, row[None]))
            self.memories.scratchpad[self.write_row] = bits
            self.memories.indices[self.write_row] = index
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

    def reset(self) -> None:
        """See `Unit`."""
        self.buffer = bytearray(-(-self.p.columns * 4 // self.p.dma_bytes) * self.p.dma_bytes)
        self.random = seeded(1, self.p.lanes)

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
            row = (word["local"] + self.row) % self.p.accumulator_rows
            self.latched = self.memories.sums[row].copy()
            self.phase = LATCH
        elif self.phase == LATCH:
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
        self.lane += self.p.lanes
        if self.lane == self.p.columns:
            extra, self.random = chances(self.p, word, 1, self.random)
            made = stored(self.p, word, self.latched[None], extra).tobytes()
            self.buffer[: len(made)] = made
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


# ---- DRAM ---------------------------------------------------------------------------------------


class Dram:
    """Bytes behind AXI4; see the module's docstring."""

    def __init__(
        self, data: Array, width: int, latency: int, gap: int, stalls: int | None = None
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

"""What a program does, counted from its words: bytes of each memory, multiplications, energy.

Invariant: the counts of a program's words are those of the register-level simulator at its end;
`counters_of` is the one place where counts become energy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from .front import words
from .instructions import Instruction
from .parameters import Parameters
from .timing import row_beats, row_bytes


@dataclass(frozen=True)
class Counters:
    """What a run did: cycles of each unit by cause, bytes of each memory, energy in pJ by part."""

    cycles: int
    causes: dict[str, dict[str, int]]
    bytes: dict[str, int]
    macs: int  # of the whole mesh, padding too
    peak_macs: int  # a cycle
    energy: dict[str, float]


@dataclass(frozen=True)
class Counts:
    """Events: rows of memories read and written, beats of lanes, bytes of DRAM."""

    cycles: int = 0
    macs: int = 0
    scratchpad_reads: int = 0
    accumulator_reads: int = 0
    accumulator_writes: int = 0
    lane_beats: int = 0
    read_bytes: int = 0
    written_bytes: int = 0

    def plus(self, other: Counts, times: int = 1) -> Counts:
        """The sum of these and some times others."""
        return Counts(
            *(getattr(self, f.name) + times * getattr(other, f.name) for f in fields(Counts))
        )


@dataclass
class _Tally:
    p: Parameters
    found: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, count: int) -> None:
        self.found[name] = self.found.get(name, 0) + count

    def word(self, one: Instruction) -> None:
        """What one word does, as its unit gets it."""
        p, count = self.p, one["count"]
        if one.op == "move_in":
            self.add("read_bytes", one["rows"] * row_beats(p, one) * p.dma_bytes)
        elif one.op == "move_out":
            self.add("written_bytes", one["rows"] * row_bytes(p, one))
        elif one.op == "preload":
            self.add("scratchpad_reads", one["rows"])
        elif one.op == "matmul":
            self._matmul(one)
        elif one.op == "reduce" or (one.op == "vector" and one.kind not in ("take", "load")):
            self.add("accumulator_reads", count * (1 if one.op == "reduce" else 2))
            self.add("accumulator_writes", count)
            self.add("lane_beats", count * p.columns)
        elif one.op == "vector":
            self.add("scratchpad_reads", count * (1 if one.kind == "take" else p.planes))
            self.add("accumulator_writes", count)

    def _matmul(self, one: Instruction) -> None:
        p, count = self.p, one["count"]
        self.add("macs", p.rows * p.columns * count * (1 + one["mixed"]))
        self.add("scratchpad_reads", count if p.dataflow != "os" else 2 * count)
        rows = count if p.dataflow != "os" else one["rows"] * one["drain"]
        self.add("accumulator_writes", rows)
        if one["accumulate"]:
            self.add("accumulator_reads", rows)


def counts_of(p: Parameters, program: Sequence[Instruction], cycles: int) -> Counts:
    """The counts of a program that takes some cycles."""
    tally = _Tally(p)
    for one in words(program):
        tally.word(one)
    return Counts(cycles, **tally.found)


def counters_of(
    p: Parameters, counts: Counts, causes: dict[str, dict[str, int]] | None = None
) -> Counters:
    """Bytes and energy of counts."""
    e = p.energy
    row, sums = p.row_elements * p.stored_bits // 8, p.columns * 4
    made = {
        "dram_read": counts.read_bytes,
        "dram_written": counts.written_bytes,
        "scratchpad_read": counts.scratchpad_reads * row,
        "scratchpad_written": counts.read_bytes,
        "accumulator_read": counts.accumulator_reads * sums,
        "accumulator_written": counts.accumulator_writes * sums,
    }
    scratchpad = made["scratchpad_read"] + made["scratchpad_written"]
    accumulator = made["accumulator_read"] + made["accumulator_written"]
    energy = {
        "mac": counts.macs * e.mac,
        "scratchpad": scratchpad * e.scratchpad_byte,
        "accumulator": accumulator * e.accumulator_byte,
        "vector": counts.lane_beats * e.vector,
        "dram": (made["dram_read"] + made["dram_written"]) * e.dram_byte,
        "idle": counts.cycles * e.idle_cycle,
    }
    return Counters(counts.cycles, causes or {}, made, counts.macs, p.peak_macs, energy)

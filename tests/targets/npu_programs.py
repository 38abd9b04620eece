"""Random programs for an NPU, by seed: every instruction, loops, tokens; and whole products."""

from __future__ import annotations

import random

import numpy as np

from tilegrad.targets.npu.arithmetic import FLOAT_KINDS
from tilegrad.targets.npu.instructions import VECTOR, Instruction, instruction
from tilegrad.targets.npu.parameters import Parameters

DRAM = 1 << 14
SMALL = {
    "rows": 4,
    "columns": 4,
    "bank_rows": 32,
    "accumulator_rows": 32,
    "program_words": 128,
    "lanes": 2,
    "dma_bytes": 4,
    "dram_latency": 5,
    "dram_bandwidth": 8.0,
    "queue": 2,
    "tokens": 3,
}


def small(**given: object) -> Parameters:
    """A chip that simulates and synthesises fast."""
    return Parameters(**{**SMALL, **given})  # type: ignore[arg-type]


def random_memory(seed: int, size: int = DRAM, floating: bool = False) -> np.ndarray:
    """Bytes of DRAM; for floats every second seed has bf16 near 1, else all bits."""
    rng = np.random.default_rng(seed)
    if floating and seed % 2:
        values = rng.standard_normal(size // 2) * 2.0 ** rng.integers(-12, 12, size // 2)
        return (values.astype(np.float32).view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    return rng.integers(0, 256, size).astype(np.uint8)


class Writer:
    """Picks fields that `check` lets pass."""

    def __init__(self, p: Parameters, seed: int) -> None:
        self.p, self.r = p, random.Random(seed)
        self.filled: list[int] = []  # rows of the scratchpad where a load began

    def place(self, count: int, most: int) -> int:
        """A first row for `count` rows."""
        return self.r.randrange(most - count + 1)

    def loaded(self, count: int, bank: int | None = None) -> int:
        """Mostly where something was loaded, so that the mesh has more than zeros; with sums in
        place within a bank."""
        p, r = self.p, self.r
        first, most = (0, p.scratchpad_rows) if bank is None else (bank * p.bank_rows, p.bank_rows)
        known = [row - first for row in self.filled if first <= row < first + most]
        if known and r.random() < 0.8:
            return first + min(r.choice(known), most - count)
        return first + self.place(count, most)

    def fill(self) -> list[Instruction]:
        """Loads of whole rows at the start of two banks."""
        p = self.p
        made = []
        for bank in (0, 1):
            self.filled.append(bank * p.bank_rows)
            stride = -(-p.row_elements * 4 // p.dma_bytes) * p.dma_bytes
            at = {"rows": min(p.rows, 8), "columns": p.row_elements, "stride": stride}
            indexed = int(p.sparse)
            dram = self.address(at["rows"], stride, 4 * p.row_elements)
            made.append(
                instruction("move_in", local=bank * p.bank_rows, dram=dram, indexed=indexed, **at)
            )
        return made

    def address(self, rows: int, stride: int, row: int) -> int:
        """An address in DRAM of rows that fit."""
        most = DRAM - rows * stride - row - 4 * self.p.dma_bytes
        return self.r.randrange(most // self.p.dma_bytes) * self.p.dma_bytes

    def move_in(self, tokens: str = "", **given: int) -> Instruction:
        p, r = self.p, self.r
        rows, columns = r.randint(1, 6), r.randint(1, p.row_elements)
        stride = r.randrange(1, 40) * p.dma_bytes
        flags = {"narrow": r.randrange(2), "indexed": r.randrange(2) if p.sparse else 0}
        local = self.place(rows, p.scratchpad_rows - 4)
        self.filled.append(local)
        return instruction(
            "move_in",
            tokens,
            rows=rows,
            columns=columns,
            stride=stride,
            local=local,
            dram=self.address(rows + 4, stride, 4 * p.row_elements),
            **flags,
            **given,
        )

    def move_out(self, tokens: str = "", **given: int) -> Instruction:
        p, r = self.p, self.r
        rows, columns = r.randint(1, 5), r.randint(1, p.columns)
        stride = r.randrange(1, 40) * p.dma_bytes
        return instruction(
            "move_out",
            tokens,
            rows=rows,
            columns=columns,
            stride=stride,
            raw=r.randrange(2),
            relu=r.randrange(2),
            stochastic=r.randrange(2) if p.stochastic else 0,
            scale=r.randrange(-(1 << 15), 1 << 15),
            shift=r.choice([0, 1, 7, 15, 20, 31, 46]),
            local=self.place(rows, p.accumulator_rows),
            dram=self.address(rows + 4, stride, 4 * p.columns),
            **given,
        )

    def preload(self, tokens: str = "") -> Instruction:
        rows = self.r.randint(1, self.p.rows)
        return instruction("preload", tokens, rows=rows, local=self.loaded(rows))

    def matmul(self, tokens: str = "") -> Instruction:
        p, r = self.p, self.r
        count, flags = r.randint(1, 9), {"accumulate": r.randrange(2)}
        if p.sparse and r.randrange(2):
            flags["sparse"], count = 1, 2 * r.randint(1, 4)
        elif p.mixed and r.randrange(2):
            flags["mixed"] = 1
        if p.dataflow != "os":
            result = self.place(count, p.accumulator_rows)
            local = self.loaded(count)
            return instruction("matmul", tokens, local=local, result=result, count=count, **flags)
        rows = r.randint(1, p.rows)
        first, second = r.sample(range(p.banks), 2)
        return instruction(
            "matmul",
            tokens,
            local=self.loaded(count, first),
            second=self.loaded(count, second),
            result=self.place(rows, p.accumulator_rows),
            count=count,
            rows=rows,
            keep=r.randrange(2),
            drain=r.randrange(2),
            **flags,
        )

    def vector(self, tokens: str = "", kind: str = "") -> Instruction:
        p, r = self.p, self.r
        count = r.randint(1, 3)
        kind = kind or r.choice(FLOAT_KINDS if p.floating else list(VECTOR))
        reads = {"take": 1, "load": p.planes}.get(kind, 0)
        most = p.scratchpad_rows if reads else p.accumulator_rows
        return instruction(
            "vector",
            tokens,
            kind=kind,
            count=count,
            hold_first=r.randrange(2),
            hold_second=r.randrange(2),
            immediate=r.randrange(2),
            local=self.place(count * max(reads, 1), most),
            second=self.place(count, p.accumulator_rows),
            result=self.place(count, p.accumulator_rows),
            shift=0 if p.floating else r.choice([0, 1, 8, 16, 31, 40]),
            value=r.getrandbits(32),
        )

    def reduce(self, tokens: str = "") -> Instruction:
        p, r = self.p, self.r
        count = r.randint(1, 3)
        return instruction(
            "reduce",
            tokens,
            kind=r.choice(["sum", "max"]),
            count=count,
            columns=r.randint(1, p.columns),
            local=self.place(count, p.accumulator_rows),
            result=self.place(count, p.accumulator_rows),
        )

    def executes(self) -> list[Instruction]:
        """A few words of the execute queue."""
        made = []
        for _ in range(self.r.randint(1, 3)):
            one = self.r.choice([self.matmul, self.matmul, self.vector, self.reduce])
            if one == self.matmul and self.p.dataflow != "os" and self.r.random() < 0.7:
                made.append(self.preload())
            made.append(one())
        return made

    def round(self) -> list[Instruction]:
        """Load, execute and store, each after the one before."""
        loads = [self.move_in() for _ in range(self.r.randrange(3))] + [self.move_in("post_next")]
        sync = instruction("sync", "wait_prev", queue="execute")
        last = instruction("sync", "post_next", queue="execute")
        stores = [self.move_out("wait_prev")] + [
            self.move_out() for _ in range(self.r.randrange(2))
        ]
        return [*loads, sync, *self.executes(), last, *stores]


def random_program(p: Parameters, seed: int, rounds: int = 3) -> list[Instruction]:
    """Rounds of moves and work, one of them in a loop that moves its addresses."""
    writer = Writer(p, seed)
    r = writer.r
    made = []
    if p.stochastic:
        made.append(instruction("config", seed=1, dram=r.getrandbits(32)))
    made += writer.fill()
    for _ in range(rounds):
        made += writer.round()
    made.append(instruction("config", set=1, level=0, local=1, dram=p.dma_bytes))
    made.append(instruction("config", set=2, level=1, local=1, dram=0))
    made.append(instruction("loop", turns=r.randint(1, 3)))
    made += [writer.move_in(set=1), instruction("loop", turns=2)]
    made += [*writer.executes(), instruction("end"), instruction("end")]
    return [*made, *writer.round(), instruction("halt")]


__all__ = ["DRAM", "SMALL", "Writer", "random_memory", "random_program", "small"]

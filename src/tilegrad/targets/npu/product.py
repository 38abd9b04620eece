"""Products of matrices as programs: tiles, operands laid out for the DMA, queues that overlap.

The (M, K) by (K, N) product is cut into steps that load two operands and run one `matmul`; two
places for each operand and two for results let load, execute and store work at once. With weights
in place a step is `rows` of K by `columns` of N for many rows of M; with inputs in place the same
with the operands exchanged; with sums in place a part of K for one tile of results. Invariant: the
values are those of integer NumPy, the times those of `timeline`; each program fits the chip's
program memory and starts with no tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ...core.errors import UserError
from .instructions import Instruction, instruction
from .machine import Machine
from .parameters import Parameters
from .timing import timeline

HALT = instruction("halt")


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


@dataclass(frozen=True)
class Narrow:
    """How int32 sums become int8: times `scale`, over 2**`shift`, at least 0 with `relu`."""

    scale: int = 1
    shift: int = 0
    relu: bool = False


@dataclass(frozen=True)
class Step:
    """One `matmul` with what it loads: tiles by number, and how long it streams."""

    outer: int  # which rows of the left operand (ws: rows of M; os: tile of M)
    column: int  # which tile of the right operand's columns
    depth: int  # which part of K
    first: bool
    last: bool


@dataclass
class Product:
    """A product on a chip; `narrow` makes int8 of the sums, else they are stored whole."""

    p: Parameters
    M: int
    N: int
    K: int
    narrow: Narrow | None = None
    stream: int = field(init=False)  # rows of one step that move through the mesh

    def __post_init__(self) -> None:
        p = self.p
        for name in ("M", "N", "K"):
            if getattr(self, name) < 1:
                raise UserError(
                    f"bad {name}", op="npu", expected="at least 1", got=getattr(self, name)
                )
        if self.narrow is not None and p.floating:
            raise UserError("sums of floats are not made int8", op="npu", hint="narrow=None")
        self.exchanged = p.dataflow == "is"
        self.m, self.n = (self.N, self.M) if self.exchanged else (self.M, self.N)
        if p.dataflow == "os":
            self.stream = min(self.K, p.bank_rows // 2)
            if p.accumulator_rows < 2 * p.rows:
                raise _small("accumulator_rows", 2 * p.rows, p.accumulator_rows)
        else:
            spare = p.scratchpad_rows - 2 * p.rows
            self.stream = min(self.m, p.accumulator_rows // 2, spare // 2)
            if self.stream < 1:
                raise _small("bank_rows", 2 * p.rows // p.banks + 1, p.bank_rows)
        self.size = p.element_bits // 8
        self.row = _up(p.rows * self.size, p.dma_bytes)  # bytes of a row of the left operand
        self.column = _up(p.columns * self.size, p.dma_bytes)  # of the right
        out = 4 if self.narrow is None else self.size
        self.out = _up(p.columns * out, p.dma_bytes)
        self.columns = -(-self.n // p.columns)
        self.right = self._left_bytes()
        self.result = self.right + self._right_bytes()
        self.bytes = self.result + self.columns * self._result_rows() * self.out

    # ---- memory ----

    def _left_bytes(self) -> int:
        """The left operand: tiles of `rows` (of K, or of M with sums in place), each row by row."""
        along = self.m if self.p.dataflow == "os" else self.K
        other = self.K if self.p.dataflow == "os" else self.m
        return -(-along // self.p.rows) * other * self.row

    def _right_bytes(self) -> int:
        return self.columns * self._depth() * self.column

    def _depth(self) -> int:
        """Rows of the right operand, padded to whole tiles where they stay in the mesh."""
        return self.K if self.p.dataflow == "os" else _up(self.K, self.p.rows)

    def _result_rows(self) -> int:
        return _up(self.m, self.p.rows) if self.p.dataflow == "os" else self.m

    def pack(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """DRAM with both operands, (M, K) and (K, N)."""
        memory = np.zeros(self.bytes, np.uint8)
        p = self.p
        if self.exchanged:
            left, right = right.T, left.T
        rows = left if p.dataflow == "os" else left.T  # (what tiles count, the other)
        self._panels(memory[: self.right], rows, p.rows, self.row)
        depth = np.zeros((self._depth(), right.shape[1]), right.dtype)
        depth[: len(right)] = right
        self._panels(memory[self.right : self.result], depth.T, p.columns, self.column)
        return memory

    def _panels(self, memory: np.ndarray, array: np.ndarray, side: int, stride: int) -> None:
        """Tiles of `side` of the first axis; in each, a row for every place of the second."""
        count, length = -(-len(array) // side), array.shape[1]
        padded = np.zeros((count * side, length), array.dtype)
        padded[: len(array)] = array
        tiles = np.ascontiguousarray(padded.reshape(count, side, length).transpose(0, 2, 1))
        raw = tiles.view(np.uint8).reshape(count * length, side * self.size)
        memory.reshape(count * length, stride)[:, : side * self.size] = raw

    def unpack(self, memory: np.ndarray) -> np.ndarray:
        """The (M, N) result of DRAM."""
        kind = np.dtype(np.int8 if self.narrow is not None else np.int32)
        if self.p.floating:
            kind = np.dtype(np.float32)
        raw = memory[self.result : self.bytes].reshape(self.columns, self._result_rows(), self.out)
        used = np.ascontiguousarray(raw[:, : self.m, : self.p.columns * kind.itemsize]).view(kind)
        found = used.transpose(1, 0, 2).reshape(self.m, -1)[:, : self.n]
        return found.T if self.exchanged else found

    # ---- instructions ----

    def steps(self) -> Iterator[Step]:
        """All steps, results one after the other."""
        if self.p.dataflow == "os":
            outers, depths = -(-self.m // self.p.rows), -(-self.K // self.stream)
        else:
            outers, depths = -(-self.m // self.stream), -(-self.K // self.p.rows)
        for outer in range(outers):
            for column in range(self.columns):
                for depth in range(depths):
                    yield Step(outer, column, depth, depth == 0, depth == depths - 1)

    def program(self) -> Iterator[list[Instruction]]:
        """Programs that the chip runs one after the other."""
        words: list[Instruction] = []
        step_of, result_of = 0, 0
        group: list[Instruction] = []
        for step in self.steps():
            group += self._step(step, step_of, result_of)
            step_of += 1
            if not step.last:
                continue
            group.append(self._store(step, result_of))
            result_of += 1
            if len(group) >= self.p.program_words:
                raise _small("program_words", 1 << len(group).bit_length(), self.p.program_words)
            if len(words) + len(group) + 1 > self.p.program_words and words:
                yield [*words, HALT]
                # the group again, as the first of its program
                words, step_of, result_of = [], 0, 0
                group = self._again(step)
                step_of, result_of = self._depths(step), 1
            words += group
            group = []
        if words:
            yield [*words, HALT]

    def _depths(self, last: Step) -> int:
        return last.depth + 1

    def _again(self, last: Step) -> list[Instruction]:
        """The steps of one result, when nothing ran before."""
        made: list[Instruction] = []
        count = self._depths(last)
        for depth in range(count):
            step = Step(last.outer, last.column, depth, depth == 0, depth == count - 1)
            made += self._step(step, depth, 0)
        return [*made, self._store(last, 0)]

    def _step(self, step: Step, number: int, result: int) -> list[Instruction]:
        """Loads and the matmul; from the third on, a place must be free before it is loaded."""
        free = "wait_next" if number >= 2 else ""
        waits = "wait_next" if step.first and result >= 2 else ""
        posts = "post_prev post_next" if step.last else "post_prev"
        if self.p.dataflow == "os":
            return self._step_output(step, number % 2, result % 2, free, waits, posts)
        return self._step_stationary(step, number % 2, result % 2, free, waits, posts)

    def _step_stationary(
        self, step: Step, slot: int, half: int, free: str, waits: str, posts: str
    ) -> list[Instruction]:
        p, m = self.p, self.stream
        count = min(m, self.m - step.outer * m)
        inputs, weights = slot * m, 2 * m + slot * p.rows
        source = (step.depth * self.m + step.outer * m) * self.row
        rows = (step.column * self._depth() + step.depth * p.rows) * self.column + self.right
        return [
            _move(free, inputs, count, p.rows, self.row, source),
            _move("post_next", weights, p.rows, p.columns, self.column, rows),
            instruction("preload", f"wait_prev {waits}", local=weights, rows=p.rows),
            instruction(
                "matmul",
                posts,
                local=inputs,
                result=half * m,
                count=count,
                accumulate=int(not step.first),
            ),
        ]

    def _step_output(
        self, step: Step, slot: int, half: int, free: str, waits: str, posts: str
    ) -> list[Instruction]:
        p, deep = self.p, self.stream
        count = min(deep, self.K - step.depth * deep)
        local, second = slot * deep, p.bank_rows + slot * deep
        left = (step.outer * self.K + step.depth * deep) * self.row
        right = (step.column * self.K + step.depth * deep) * self.column + self.right
        rows = min(p.rows, self.m - step.outer * p.rows)
        return [
            _move(free, local, count, p.rows, self.row, left),
            _move("post_next", second, count, p.columns, self.column, right),
            instruction(
                "matmul",
                f"wait_prev {waits} {posts}",
                local=local,
                second=second,
                result=half * p.rows,
                count=count,
                rows=rows if step.last else 0,
                keep=int(not step.first),
                drain=int(step.last),
            ),
        ]

    def _store(self, step: Step, result: int) -> Instruction:
        p = self.p
        tall = p.rows if p.dataflow == "os" else self.stream
        row = step.outer * tall
        narrow = self.narrow
        return instruction(
            "move_out",
            "wait_prev post_prev",
            local=result % 2 * tall,
            rows=min(tall, self.m - row),
            columns=min(p.columns, self.n - step.column * p.columns),
            stride=self.out,
            dram=self.result + (step.column * self._result_rows() + row) * self.out,
            raw=int(narrow is None),
            scale=narrow.scale if narrow else 0,
            shift=narrow.shift if narrow else 0,
            relu=int(bool(narrow and narrow.relu)),
        )

    # ---- running ----

    def run(self, left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, int]:
        """The result and the cycles, by the register-level simulator."""
        memory, cycles = self.pack(left, right), 0
        for words in self.program():
            cycles += Machine(self.p, words, memory).run()
        return self.unpack(memory), cycles

    def cycles(self) -> int:
        """The cycles by closed forms."""
        return sum(timeline(self.p, words).cycles for words in self.program())


def _small(name: str, least: int, got: int) -> UserError:
    return UserError(f"{name} is too small for a product", op="npu", expected=least, got=got)


def _move(tokens: str, local: int, rows: int, columns: int, stride: int, dram: int) -> Instruction:
    given = {"local": local, "rows": rows, "columns": columns, "stride": stride, "dram": dram}
    return instruction("move_in", tokens, **given)


__all__ = ["Narrow", "Product", "Step"]

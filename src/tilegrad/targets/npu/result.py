"""The words of one result of a Product: loads, products, vector steps, stores, and their tokens.

Loads of a step stand before the work of the step before it. Many steps are a loop of two, with
addresses that move. Invariant: load, execute and store meet by tokens alone: a place is loaded when
it is free, worked on when it is loaded, stored when it is done.
"""

from __future__ import annotations

from dataclasses import dataclass

from .instructions import Instruction, instruction
from .layout import Layout

UNROLLED = 7  # steps of a result that are written out; more are a loop


@dataclass
class Result:
    """The words of one result; `number` steps and `result` results of its program are before it."""

    of: Layout
    outer: int
    column: int
    number: int
    result: int

    def __post_init__(self) -> None:
        self.parts = self.of.parts()
        self.count = self.of.count(self.outer)

    def words(self, following: list[Instruction]) -> list[Instruction]:
        """All but the loads of its first step; `following` are those of the next result."""
        made: list[Instruction] = []
        last = max(len(self.parts), 1) - 1

        def step(i: int, sets: bool = False) -> None:
            made.extend(self.loads(i + 1, sets) if i < last else following)
            made.extend(self.executes(i))

        turns = (len(self.parts) - 4) // 2
        if len(self.parts) > UNROLLED:
            step(0)
            step(1)
            made += self._config()
            made.append(instruction("loop", turns=turns))
            step(2, True)
            step(3, True)
            made.append(instruction("end"))
            for i in range(2 + 2 * turns, last + 1):
                step(i)
        else:
            for i in range(last + 1):
                step(i)
        return made + self._stores()

    def _config(self) -> list[Instruction]:
        """What two steps of a loop add to addresses of DRAM."""
        of = self.of
        if of.p.dataflow == "os":
            left = right = 2 * of.deep
        else:
            left, right = 2 * of.tiles * self.count, 2 * of.tiles * of.p.rows
        return [
            instruction("config", set=1, dram=left * of.row),
            instruction("config", set=2, dram=right * of.column),
        ]

    def loads(self, i: int, sets: bool = False) -> list[Instruction]:
        """What step i brings in; from the third of a program on, its place must be free before."""
        free = "wait_next" if self.number + i >= 2 else ""
        made = []
        if i >= len(self.parts) - 1 and self.of.beside:
            made = self._load_beside(free)
            free = ""
        if self.parts:
            made += self._load_output(i, free, sets) if self._output else self._load(i, free, sets)
        made[-1] = _with(made[-1], "post_next")
        return made

    def executes(self, i: int) -> list[Instruction]:
        """What step i computes; the last one goes on with the vector unit."""
        made: list[Instruction] = []
        if self.parts:
            made = self._matmul_output(i) if self._output else self._matmuls(i)
        tokens = "post_prev"
        if i >= len(self.parts) - 1:
            made += self._vector()
            tokens = "post_prev post_next"
        waits = "wait_prev" + (" wait_next" if i == 0 and self.result >= 2 else "")
        made[0] = _with(made[0], waits)
        made[-1] = _with(made[-1], tokens)
        return made

    @property
    def _output(self) -> bool:
        return self.of.p.dataflow == "os"

    # ---- weights or inputs in place ----

    def _slots(self, i: int) -> tuple[int, int]:
        """Where inputs and weights of a step lie in the scratchpad."""
        of, slot = self.of, (self.number + i) % 2
        weights = 2 * of.tiles * of.tall + slot * of.tiles * of.p.rows
        return slot * of.tiles * of.tall, weights

    def _load(self, i: int, free: str, sets: bool) -> list[Instruction]:
        of, p, (depth, tiles) = self.of, self.of.p, self.parts[i]
        inputs, weights = self._slots(i)
        source = (self.outer * of.tall * of.depths + depth * self.count) * of.row
        rows = (self.column * of.padded + depth * p.rows) * of.column + of.right
        one, two = ({"set": 1}, {"set": 2}) if sets else ({}, {})
        return [
            _move(free, inputs, tiles * self.count, p.rows, of.row, source, **one),
            _move("", weights, tiles * p.rows, p.columns, of.column, rows, **two),
        ]

    def _matmuls(self, i: int) -> list[Instruction]:
        made, rows = [], self.of.p.rows
        inputs, weights = self._slots(i)
        for tile in range(self.parts[i][1]):
            made += [
                instruction("preload", local=weights + tile * rows, rows=rows),
                instruction(
                    "matmul",
                    local=inputs + tile * self.count,
                    result=self.of.at(self.result, 0),
                    count=self.count,
                    accumulate=int(i > 0 or tile > 0),
                ),
            ]
        return made

    # ---- sums in place ----

    def _load_output(self, i: int, free: str, sets: bool) -> list[Instruction]:
        of, p, (start, count) = self.of, self.of.p, self.parts[i]
        slot = (self.number + i) % 2 * of.deep
        left = (self.outer * of.K + start) * of.row
        right = (self.column * of.K + start) * of.column + of.right
        one, two = ({"set": 1}, {"set": 2}) if sets else ({}, {})
        return [
            _move(free, slot, count, p.rows, of.row, left, **one),
            _move("", p.bank_rows + slot, count, p.columns, of.column, right, **two),
        ]

    def _matmul_output(self, i: int) -> list[Instruction]:
        of, slot = self.of, (self.number + i) % 2 * self.of.deep
        last = i == len(self.parts) - 1
        return [
            instruction(
                "matmul",
                local=slot,
                second=of.p.bank_rows + slot,
                result=of.at(self.result, 0),
                count=self.parts[i][1],
                rows=self.count if last else 0,
                keep=int(i > 0),
                drain=int(last),
            )
        ]

    # ---- the vector unit ----

    def _locals(self) -> list[int]:
        """Where each operand of the vector unit lies in the scratchpad."""
        of = self.of
        at = of.extras + self.result % 2 * of.extra_rows
        found = []
        for i, held in enumerate(of.held):
            found.append(at)
            at += of.planes(i) * (1 if held else of.tall)
        return found

    def _load_beside(self, free: str) -> list[Instruction]:
        of, made = self.of, []
        for i, local in enumerate(self._locals()):
            planes, held = of.planes(i), of.held[i]
            rows = planes * (1 if held else self.count)
            first = 0 if held else self.outer * of.tall * planes
            tile = planes * (1 if held else of.m)
            source = of.places[i] + (self.column * tile + first) * of.column
            made.append(_move(free, local, rows, of.p.columns, of.column, source))
            free = ""
        return made

    def _vector(self) -> list[Instruction]:
        """Operands from the scratchpad as they are first used, then the steps."""
        of, places = self.of, self._locals()
        first = int(of.K > 0)
        made: list[Instruction] = []
        here: set[int] = {0} if of.K else set()

        def row_of(value: int) -> tuple[int, bool]:
            if value not in here and value < first + len(of.beside):
                here.add(value)
                number = value - first
                row, held = of.row_of(self.result, value)
                given = {"local": places[number], "result": row}
                given["count"] = 1 if held else self.count
                kind = "load" if of.beside[number].wide else "take"
                made.append(instruction("vector", kind=kind, **given))
            return of.row_of(self.result, value)

        for number, step in enumerate(of.steps, first + len(of.beside)):
            row, hold = row_of(step.first)
            given = {"local": row, "hold_first": int(hold), "shift": step.shift}
            if step.number:
                given |= {"immediate": 1, "value": step.second}
            else:
                row, hold = row_of(step.second)
                given |= {"second": row, "hold_second": int(hold)}
            given |= {"result": of.row_of(self.result, number)[0], "count": self.count}
            made.append(instruction("vector", kind=step.kind, **given))
        for one in of.stored:
            row_of(one.value)
        return made

    def _stores(self) -> list[Instruction]:
        of, p, made = self.of, self.of.p, []
        row, count = self.outer * of.tall, len(of.stored)
        for i, one in enumerate(of.stored):
            narrow = one.narrow
            tokens = ("wait_prev " if i == 0 else "") + ("post_prev" if i == count - 1 else "")
            made.append(
                instruction(
                    "move_out",
                    tokens,
                    local=of.row_of(self.result, one.value)[0],
                    rows=self.count,
                    columns=min(p.columns, of.n - self.column * p.columns),
                    stride=of.strides[i],
                    dram=of.results[i] + (self.column * of.m + row) * of.strides[i],
                    raw=int(narrow is None),
                    scale=narrow.scale if narrow and not p.floating else 0,
                    shift=narrow.shift if narrow else 0,
                    relu=int(bool(narrow and narrow.relu)),
                )
            )
        return made


def _with(one: Instruction, tokens: str) -> Instruction:
    """The same word with more tokens."""
    known = {name: value for name, value in one.values if name != "tokens"}
    more = instruction(one.op, tokens)["tokens"]
    return instruction(one.op, one["tokens"] | more, **known)


def _move(
    tokens: str, local: int, rows: int, columns: int, stride: int, dram: int, **sets: int
) -> Instruction:
    given = {"local": local, "rows": rows, "columns": columns, "stride": stride, "dram": dram}
    return instruction("move_in", tokens, **given, **sets)


__all__ = ["Result"]

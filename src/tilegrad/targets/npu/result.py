"""The words of one result of a Product: loads, products, vector steps, stores, and their tokens.

Loads of a step stand before the work of the step before it. Many steps are a loop of two, with
addresses that move. Invariant: load, execute and store meet by tokens alone: a place is loaded when
it is free, worked on when it is loaded, stored when it is done.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...tile.array import ROWS, VectorStep
from .instructions import Instruction, Words, instruction
from .layout import BLOCK, HELD, LINE, Layout, Narrow

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

    def words(self, following: Words) -> Words:
        """All but the loads of its first step; `following` are those of the next result."""
        made: Words = []
        last = max(len(self.parts), 1) - 1

        def step(i: int, sets: bool = False) -> None:
            made.extend(self.loads(i + 1, sets) if i < last else following)
            made.extend(self.executes(i))

        first, turns = 0, (len(self.parts) - 4) // 2
        if len(self.parts) > UNROLLED:
            step(0)
            step(1)
            made += self._config()
            made.append(instruction("loop", turns=turns))
            step(2, True)
            step(3, True)
            made.append(instruction("end"))
            first = 2 + 2 * turns
        for i in range(first, last + 1):
            step(i)
        return made + self._stores()

    def _config(self) -> Words:
        """What two steps of a loop add to addresses of DRAM."""
        of, rows = self.of, self.of.p.rows
        deep = 2 * of.deep if self._output else 2 * of.tiles * rows  # rows of the right operand
        if self._output:
            left = deep * (of.left_apart or of.row)
        elif of.left_apart:
            left = deep * of.pairs * of.size
        else:
            left = 2 * of.tiles * self.count * of.row
        right = deep * (of.right_apart or of.right_row)
        return [instruction("config", set=1, dram=left), instruction("config", set=2, dram=right)]

    def loads(self, i: int, sets: bool = False) -> Words:
        """What step i brings in; from the third of a program on, its place must be free before."""
        made = self._load_vector_operands() if i >= len(self.parts) - 1 else []
        if self.parts:
            made += self._load_output(i, sets) if self._output else self._load(i, sets)
        made[0] = _with(made[0], "wait_next" if self.number + i >= 2 else "")
        made[-1] = _with(made[-1], "post_next")
        return made

    def executes(self, i: int) -> Words:
        """What step i computes; the last one goes on with the vector unit."""
        made: Words = []
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
    def _rate(self) -> dict[str, int]:
        return {self.of.rate: 1} if self.of.rate else {}

    @property
    def _output(self) -> bool:
        return self.of.p.dataflow == "os"

    # ---- weights or inputs in place ----

    def _halves(self, i: int) -> tuple[int, int]:
        """Where inputs and weights of a step lie in the scratchpad."""
        of, half = self.of, (self.number + i) % 2
        weights = 2 * of.tiles * of.tall + half * of.tiles * of.p.rows
        return half * of.tiles * of.tall, weights

    def _load(self, i: int, sets: bool) -> Words:
        of, p, (depth, tiles) = self.of, self.of.p, self.parts[i]
        inputs, weights = self._halves(i)
        made = []
        if of.left_apart:
            first = self.outer * of.tall * of.left_apart
            for tile in range(tiles):
                start = (depth + tile) * of.wide
                at, columns = first + start * of.size, min(of.wide, of.K - start)
                local = inputs + tile * self.count
                made.append(_move(local, self.count, columns, of.left_apart, at, set=sets))
        else:
            at = (self.outer * of.tall * of.depths + depth * self.count) * of.row
            rows = tiles * self.count
            made.append(_move(inputs, rows, of.wide, of.row, at, set=sets))
        rows = min(tiles * p.rows, of.K - depth * p.rows) if of.right_apart else tiles * p.rows
        return [*made, self._load_right(weights, depth * p.rows, rows, sets)]

    def _deep(self, tile: int) -> int:
        """Rows of the right operand of a tile: fewer of the last."""
        return min(self.of.p.rows, self.of.k - tile * self.of.p.rows)

    def _load_right(self, local: int, start: int, rows: int, sets: bool) -> Instruction:
        """Rows of the right operand, from `start` on."""
        of, columns = self.of, self.of.p.columns
        if of.right_apart:
            at = of.right + start * of.right_apart + self.column * columns * of.size
            columns = min(columns, of.n - self.column * columns)
        else:
            at = (self.column * of.padded + start) * of.right_row + of.right
        given = {"set": 2 * sets, "indexed": int(of.rate == "sparse")}
        return _move(local, rows, columns, of.right_apart or of.right_row, at, **given)

    def _matmuls(self, i: int) -> Words:
        made, rows = [], self.of.p.rows
        inputs, weights = self._halves(i)
        depth, tiles = self.parts[i]
        for tile in range(tiles):
            deep = self._deep(depth + tile) if self.of.right_apart else rows
            made += [
                instruction("preload", local=weights + tile * rows, rows=deep),
                instruction(
                    "matmul",
                    local=inputs + tile * self.count,
                    result=self._row(0),
                    count=self.count,
                    accumulate=int(i > 0 or tile > 0),
                    **self._rate,
                ),
            ]
        return made

    # ---- sums in place ----

    def _load_output(self, i: int, sets: bool) -> Words:
        of, p, (start, count) = self.of, self.of.p, self.parts[i]
        half = (self.number + i) % 2 * of.deep
        if of.left_apart:
            at = start * of.left_apart + self.outer * p.rows * of.size
            lying = (self.count, of.left_apart)
        else:
            at = (self.outer * of.k + start) * of.row
            lying = (of.wide, of.row)
        left = _move(half, count, *lying, at, set=sets)
        return [left, self._load_right(p.bank_rows + half, start, count, sets)]

    def _matmul_output(self, i: int) -> Words:
        of, half = self.of, (self.number + i) % 2 * self.of.deep
        last = i == len(self.parts) - 1
        return [
            instruction(
                "matmul",
                local=half,
                second=of.p.bank_rows + half,
                result=self._row(0),
                count=self.parts[i][1],
                rows=self.count if last else 0,
                keep=int(i > 0),
                drain=int(last),
                **self._rate,
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
            at += of.across * of.planes(i) * (1 if held else of.tall)
        return found

    def _load_vector_operands(self) -> Words:
        of, made = self.of, []
        for i, local in enumerate(self._locals()):
            planes, held, apart = of.planes(i), of.held[i], of.vector_apart[i]
            rows = planes * (1 if held else self.count)
            first = 0 if held else self.outer * of.tall * planes
            strip = planes * (1 if held else of.m)
            for s in range(of.across):
                columns, column = of.p.columns, (self.column + s) * of.p.columns
                at = ((self.column + s) * strip + first) * of.column
                if apart:
                    at, columns = first * apart + column * of.size, min(columns, of.n - column)
                stride = apart or of.column
                place = local + s * rows
                made.append(_move(place, rows, columns, stride, of.operand_starts[i] + at))
        return made

    def _row(self, value: int, strip: int = 0) -> int:
        return self.of.row_of(self.result, self.of.rows_of.assigned[value], strip, self.count)

    def _vector(self) -> Words:
        """Operands from the scratchpad as they are first used, then the steps."""
        of = self.of
        first = int(of.K > 0)
        given = first + len(of.vector_operands)
        made: Words = []
        here = set(range(first))

        def need(value: int) -> None:
            if value in here or value >= given:
                return
            here.add(value)
            i = value - first
            rows = of.across * (1 if of.held[i] else self.count)
            kind = "load" if of.vector_operands[i].wide else "take"
            at = {"local": self._locals()[i], "result": self._row(value), "count": rows}
            made.append(instruction("vector", kind=kind, **at))

        for number, step in enumerate(of.steps, given):
            for value in step.values:
                need(value)
            made += self._step(number, step)
        for one in of.stored:
            need(one.value)
        return made

    def _step(self, number: int, step: VectorStep) -> Words:
        """One word where all values are blocks or all lines, else one for each strip."""
        of = self.of
        kinds = {of.rows_of.assigned[v][0] for v in (*step.values, number)}
        if step.kind in ROWS:
            return [w for s in range(of.across) for w in self._along(number, step, s)]
        strips = of.across if len(kinds) > 1 else 1
        made = []
        for s in range(strips):
            held = [int(of.rows_of.assigned[v][0] == HELD) for v in step.values]
            at = {"local": self._row(step.first, s), "hold_first": held[0], "shift": step.shift}
            if step.number:
                at |= {"immediate": 1, "value": step.second}
            else:
                at |= {"second": self._row(step.second, s), "hold_second": held[1]}
            rows = self.count * (of.across if kinds == {BLOCK} else 1)
            at |= {"result": self._row(number, s), "count": rows}
            made.append(instruction("vector", kind=step.kind, **at))
        return made

    def _along(self, number: int, step: VectorStep, strip: int) -> Words:
        """A strip of rows to one number each, joined to those of the strips before it."""
        of, kind = self.of, ROWS[step.kind]
        result = self._row(number)
        part = of.row_of(self.result, (LINE, of.rows_of.counts[LINE] - 1), 0, self.count)
        columns = min(of.p.columns, of.n - strip * of.p.columns)
        at = {"local": self._row(step.first, strip), "result": part if strip else result}
        made = [instruction("reduce", kind=kind, count=self.count, columns=columns, **at)]
        if strip:
            at = {"local": result, "second": part, "result": result, "count": self.count}
            made.append(instruction("vector", kind="add" if kind == "sum" else kind, **at))
        return made

    def _stores(self) -> Words:
        of, made = self.of, []
        row = self.outer * of.tall
        for i, one in enumerate(of.stored):
            line = of.rows_of.assigned[one.value][0] == LINE
            for s in range(1 if line else of.across):
                strip = self.column + s
                columns = 1 if line else min(of.p.columns, of.n - strip * of.p.columns)
                dram = of.results[i] + (strip * of.m + row) * of.strides[i]
                made.append(self._store(i, self._row(one.value, s), columns, dram))
        made[0] = _with(made[0], "wait_prev")
        made[-1] = _with(made[-1], "post_prev")
        return made

    def _store(self, number: int, local: int, columns: int, dram: int) -> Instruction:
        given = self.of.stored[number].narrow
        narrow = given or Narrow(scale=0)
        return instruction(
            "move_out",
            local=local,
            rows=self.count,
            columns=columns,
            stride=self.of.strides[number],
            dram=dram,
            raw=int(given is None),
            scale=0 if self.of.p.floating else narrow.scale,
            shift=narrow.shift,
            relu=int(narrow.relu),
        )


def _with(one: Instruction, tokens: str) -> Instruction:
    """The same word with more tokens."""
    known = {name: value for name, value in one.values if name != "tokens"}
    more = instruction(one.op, tokens)["tokens"]
    return instruction(one.op, one["tokens"] | more, **known)


def _move(local: int, rows: int, columns: int, stride: int, dram: int, **sets: int) -> Instruction:
    given = {"local": local, "rows": rows, "columns": columns, "stride": stride, "dram": dram}
    return instruction("move_in", **given, **sets)

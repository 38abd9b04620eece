"""The execute unit, register by register: it feeds the mesh and the vector lanes by a counter.

All that happens in a cycle of an instruction follows from its counter, so that lengths are closed
forms (`timing.py`). Memories are read one cycle and used in the next; a sum leaves the mesh, is
added to its row and written in one cycle. Invariant: the accumulators are written here alone, so a
row of the vector unit is computed when its last beat is over.
"""

from __future__ import annotations

import numpy as np

from . import arithmetic
from .arithmetic import Array
from .dma import Unit
from .instructions import Instruction
from .mesh import Mesh, Row
from .parameters import Parameters
from .timing import planes_of, run_cycles

READERS = ("first", "second")  # of the scratchpad


class Execute(Unit):
    """`preload`, `matmul`, `vector` and `reduce`."""

    number = 1

    def reset(self) -> None:
        """See `Unit`."""
        p, self.sums = self.p, self.memories.sums
        self.mesh, self.table = Mesh(p), arithmetic.values_of(p.element)
        self.quiet = 0  # edges since anything came to the mesh
        no_elements = np.zeros(p.row_elements, np.uint16)
        self.q = dict.fromkeys(READERS, no_elements)
        self.q_index = dict.fromkeys(READERS, np.zeros(p.row_elements, np.uint8))
        self.held = no_elements  # 2:4 with sums in place: the row before
        self.planes: list[Array] = []  # of the row at hand
        self.written: tuple[int, Array] | None = None  # in this cycle
        self.scratchpad_reads = self.accumulator_reads = self.accumulator_writes = 0
        self.lane_beats = self.macs = 0

    def begin(self, word: Instruction) -> None:
        """Sets the registers."""
        self.time, self.last = 0, run_cycles(self.p, word) - 1

    def step(self) -> None:
        """One edge; the mesh has one in every cycle, which changes nothing once it is at rest."""
        self.written = None
        self.feed: Array | None = None
        self.top: Row | None = None
        self.clear = self.drain = self.mesh.mixed = False
        resting = self.quiet > 2 * (self.p.rows + self.p.columns)
        self.leaving = None if self.p.dataflow == "os" or resting else self.mesh.leaving()
        super().step()
        if self.feed is not None or self.top is not None or self.clear or self.drain:
            self.quiet = 0
        else:
            self.quiet += 1
            if resting:
                return
        if self.p.dataflow == "os":
            self.mesh.step_output(self.feed, self.top, self.clear, self.drain)
        else:
            self.mesh.step_stationary(self.feed, self.top)

    def run(self) -> bool:
        """One cycle of the instruction."""
        word = self.word
        if word.op == "preload":
            self._preload(word)
        elif word.op == "matmul":
            self.mesh.mixed = bool(word["mixed"])
            if self.p.dataflow == "os":
                self._matmul_output(word)
            else:
                self._matmul_stationary(word)
        elif planes := planes_of(self.p, word):
            self._take_rows(word, planes)
        else:
            self._vector(word)
        self.time += 1
        return self.time > self.last

    # ---- memories ----

    def values(self, bits: Array) -> Array:
        """Numbers of elements, as the multipliers take them."""
        found: Array = self.table[bits]
        if self.p.floating:
            self.mesh.see(found)
        return found

    def weights(self, reader: str) -> Row:
        """What comes to the mesh from above."""
        bits, index = (x[reader][: self.p.columns] for x in (self.q, self.q_index))
        return self.values(bits), index, bits

    def read(self, row: int, reader: str = "first") -> None:
        """Asks a reader of the scratchpad for a row; the second is of another bank."""
        row %= self.p.scratchpad_rows
        self.q[reader] = self.memories.scratchpad[row].copy()
        if self.p.sparse:
            self.q_index[reader] = self.memories.indices[row].copy()
        self.scratchpad_reads += 1

    def read_sums(self, row: int) -> None:
        """Asks for a row of sums."""
        self.q_sums = self.sums[row % self.p.accumulator_rows].copy()
        self.accumulator_reads += 1

    def write_sums(self, row: int, values: Array) -> None:
        """Writes a row of sums."""
        row %= self.p.accumulator_rows
        self.sums[row] = values
        self.written = (row, values)
        self.accumulator_writes += 1

    def added(self, value: Array) -> Array:
        """A row that leaves the mesh, added to its sums."""
        made = self.q_sums + value
        return arithmetic.flush(made) if self.p.floating else made

    # ---- the mesh ----

    def _preload(self, word: Instruction) -> None:
        rows, time = self.p.rows, self.time
        if time > 0:
            row = rows - time  # that was asked for in the cycle before
            if row < word["rows"]:
                self.top = self.weights("first")
            else:
                self.top = self.mesh.nothing
        row = rows - 1 - time
        if 0 <= row < word["rows"]:
            self.read(word["local"] + row)

    def lanes(self, values: Array, word: Instruction) -> Array:
        """Inputs of each row of the mesh from a row of the scratchpad."""
        rows = self.p.rows
        if self.mesh.inputs.ndim == 2:
            return values[:rows]
        made = np.zeros((rows, self.p.lane), values.dtype)
        if word["sparse"]:
            made[:] = np.repeat(values[: 2 * rows].reshape(-1, 4), 2, 0)
        elif word["mixed"]:
            pairs = values[: 2 * rows]
            made[:, :2] = (
                pairs.reshape(2, -1).T if self.p.dataflow == "os" else pairs.reshape(-1, 2)
            )
        else:
            made[:, 0] = values[:rows]
        return made

    def _matmul_stationary(self, word: Instruction) -> None:
        p, time, count = self.p, self.time, word["count"]
        if 1 <= time <= count:
            self.feed = self.lanes(self.values(self.q["first"]), word)
            self.macs += p.rows * p.columns * (1 + word["mixed"])
        if time < count:
            self.read(word["local"] + time)
        row = time - (p.rows + p.columns)
        if row >= 0 and self.leaving is not None:
            value = self.leaving
            if word["accumulate"]:
                value = self.added(value)
            self.write_sums(word["result"] + row, value)
        if word["accumulate"] and 0 <= row + 1 < count:
            self.read_sums(word["result"] + row + 1)

    def _matmul_output(self, word: Instruction) -> None:
        p, count = self.p, word["count"]
        late = word["sparse"] if p.sparse else 0
        time = self.time - late  # of the second operand
        if self.time == 0 and not word["keep"]:
            self.clear = True
        if 1 <= time <= count:
            self.top = self.weights("second")
            self.macs += p.rows * p.columns * (1 + word["mixed"])
        if late:
            self._gather(time, count)
        elif 1 <= time <= count:
            self.feed = self.lanes(self.values(self.q["first"]), word)
        if self.time < count:
            self.read(word["local"] + self.time)
        if 0 <= time < count:
            self.read(word["second"] + time, "second")
        if word["drain"]:
            self._drain(word, self.time - (count + p.rows + p.columns - 1 + late))

    def _gather(self, time: int, count: int) -> None:
        """2:4 with sums in place: two rows of pairs make the four inputs of two steps."""
        rows = self.p.rows
        if 1 <= time <= count:
            if time % 2:
                old, new = self.values(self.held), self.values(self.q["first"])
                pairs = (old[:rows], old[rows : 2 * rows], new[:rows], new[rows : 2 * rows])
                self.feed = np.stack(pairs, 1)
                self.group = self.feed
            else:
                self.feed = self.group
        self.held = self.q["first"]

    def _drain(self, word: Instruction, turn: int) -> None:
        """Sums move down a row a cycle; the lowest is written."""
        p = self.p
        if turn >= 0:
            row = p.rows - 1 - turn
            self.drain = True
            if row < word["rows"]:
                value = self.mesh.sums[-1]
                if word["accumulate"]:
                    value = self.added(value)
                self.write_sums(word["result"] + row, value)
        row = p.rows - 2 - turn
        if turn >= -1 and 0 <= row < word["rows"] and word["accumulate"]:
            self.read_sums(word["result"] + row)

    # ---- the vector unit ----

    def _take_rows(self, word: Instruction, planes: int) -> None:
        """32-bit values from rows of the scratchpad, low bits first."""
        row, phase = divmod(self.time, planes + 2)
        if 1 <= phase <= planes:
            self.planes.append(self.q["first"])
        if phase < planes:
            self.read(word["local"] + (0 if word["hold_first"] else row) * planes + phase)
        if phase == planes + 1:
            (made,) = taken(self.p, np.stack(self.planes), planes)
            self.write_sums(word["result"] + row, made)
            self.planes = []

    def _vector(self, word: Instruction) -> None:
        """A row when its last beat is over: none but this unit writes sums."""
        p, last = self.p, self.p.columns // self.p.lanes + 3
        row, phase = divmod(self.time, last + 1)
        if phase == last:
            (made,) = combined(p, word, self.sums, slice(row, row + 1))
            self.write_sums(word["result"] + row, np.broadcast_to(made, p.columns))
            self.accumulator_reads += 1 if word.op == "reduce" else 2
            self.lane_beats += p.columns


# ---- values of the vector unit, which need no registers ------------------------------------------


def at(start: int, rows: slice) -> slice:
    """Rows of an operand."""
    return slice(start + rows.start, start + rows.stop)


def taken(p: Parameters, found: Array, planes: int) -> Array:
    """Rows of sums from rows of the scratchpad: elements as numbers, or 32 bits in planes."""
    found = found[:, : p.columns]
    if planes == 1:
        return arithmetic.values_of(p.element)[found]
    parts = found.reshape(-1, planes, p.columns).astype(np.uint32)
    shifts = (np.arange(planes, dtype=np.uint32) * p.element_bits)[None, :, None]
    return arithmetic.wide_values(np.bitwise_or.reduce(parts << shifts, 1), p.floating)


def combined(p: Parameters, word: Instruction, sums: Array, rows: slice) -> Array:
    """Some rows of a `vector` or a `reduce`, from rows of sums."""

    def given(name: str, held: str) -> Array:
        return sums[at(word[name], slice(0, 1) if word[held] else rows)]

    first = given("local", "hold_first")
    if word.op == "vector":
        number = arithmetic.wide_values(np.array([[word["value"]]], np.uint32), p.floating)
        second = number if word["immediate"] else given("second", "hold_second")
        return arithmetic.vector(word.kind, first, second, word["shift"], p.floating)
    kind = "add" if word.kind == "sum" else "max"
    found = np.full((len(first), 1), arithmetic.first_of(word.kind, p.floating), sums.dtype)
    for column in range(word["columns"]):  # one after the other
        found = arithmetic.vector(kind, found, first[:, column : column + 1], 0, p.floating)
    return found

"""Programs checked before they run: what an NPU of these parameters can do with each word.

Loops are run, so addresses are those of every turn. Invariant: a program that passes uses no row
that is not there, no port twice in a cycle, and no unit the chip lacks; an error names the word,
the field and its bound. That queues end and do not race is `prove`'s to say.

`prove` gives the words in an order in which they may run, with the proof that any other does too.
Load, execute and store meet by tokens alone, and each channel has one queue that posts and one that
waits: the n-th token taken is the n-th posted, whatever memory does to times. So whether the queues
end does not depend on times, and who knows of whom is decided by the clocks of Tile IR's checks
(`tile/access`). A program whose words all come has no deadlock, with queues and channels as long as
the chip's, and no two queues that touch a row without a token between them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from ...core.errors import UserError
from ...tile.access import Clock, join
from .arithmetic import FLOAT_KINDS
from .front import CHANNELS, LEVELS, posts, waits, words
from .instructions import EXECUTE, LOAD, QUEUES, STORE, Code, Instruction, text
from .parameters import Parameters
from .timing import Event, Queues, planes_of, row_beats


def _bad(one: Instruction, name: str, expected: str, got: object) -> UserError:
    return UserError(
        f"{one.op}: bad {name}", op="npu", expected=expected, got=f"{got} in {text(one)}"
    )


def _within(one: Instruction, name: str, least: int, most: int) -> None:
    if not least <= one[name] <= most:
        raise _bad(one, name, f"{least} to {most}", one[name])


def memory_rows(p: Parameters) -> dict[str, int]:
    """How many rows the chip's memories have."""
    return {"scratchpad": p.scratchpad_rows, "accumulators": p.accumulator_rows}


def uses(p: Parameters, one: Instruction) -> Iterator[tuple[str, str, int]]:
    """The rows of the chip's memories that a word reads or writes: the field that says where they
    begin, the memory, and how many."""
    output, planes = p.dataflow == "os", planes_of(p, one)
    count = one["count"] if one.op in ("matmul", "vector", "reduce") else one["rows"]
    first = 1 if one["hold_first"] else count
    if one.op in ("move_in", "preload", "matmul") or planes:
        yield "local", "scratchpad", first * max(1, planes)
    elif one.op in ("move_out", "vector", "reduce"):
        yield "local", "accumulators", first
    if one.op == "matmul" and output:
        yield "second", "scratchpad", count
    elif one.op == "vector" and not planes and not one["immediate"]:
        yield "second", "accumulators", 1 if one["hold_second"] else count
    if one.op in ("matmul", "vector", "reduce"):
        drained = one["rows"] * one["drain"]
        yield "result", "accumulators", drained if one.op == "matmul" and output else count


def _check_move(p: Parameters, one: Instruction) -> None:
    _within(one, "rows", 1, 65535)
    _within(one, "columns", 1, p.columns if one.op == "move_out" else p.row_elements)
    for name in ("dram", "stride"):
        if one[name] % p.dma_bytes:
            raise _bad(one, name, f"a multiple of dma_bytes ({p.dma_bytes})", one[name])


def _check_matmul(p: Parameters, one: Instruction) -> None:
    _within(one, "count", 1, 65535)
    if one["mixed"] and (not p.mixed or one["sparse"]):
        why = "not with sparse" if p.mixed else f"weights are {p.element} too"
        raise _bad(one, "mixed", f"0: {why}", 1)
    if p.dataflow != "os":
        return
    if one["sparse"] and one["count"] % 2:
        raise _bad(one, "count", "even with 2:4, two steps a group", one["count"])
    if one["drain"]:
        _within(one, "rows", 1, p.rows)
    last = one["count"] - 1
    banks = [{one[n] // p.bank_rows, (one[n] + last) // p.bank_rows} for n in ("local", "second")]
    if len(banks[0]) > 1 or len(banks[1]) > 1 or banks[0] == banks[1]:
        expected = f"each operand within one bank of {p.bank_rows} rows, and not the same"
        raise _bad(one, "second", expected, f"{one['local']} and {one['second']}")


def _check_vector(p: Parameters, one: Instruction) -> None:
    _within(one, "count", 1, 65535)
    if one.op == "reduce":
        _within(one, "columns", 1, p.columns)
        return
    if p.floating and one.kind not in FLOAT_KINDS:
        raise _bad(one, "kind", f"one of {', '.join(FLOAT_KINDS)} for {p.element}", one.kind)
    if p.floating and one["shift"]:
        raise _bad(one, "shift", f"0 for {p.element}", one["shift"])


def check_word(p: Parameters, one: Instruction) -> None:
    """One word with its addresses as a queue gets it."""
    if one.op in ("move_in", "move_out"):
        _check_move(p, one)
    elif one.op == "preload":
        if p.dataflow == "os":
            raise _bad(one, "op", "a mesh that keeps weights or inputs", "os")
        _within(one, "rows", 1, p.rows)
    elif one.op == "matmul":
        _check_matmul(p, one)
    elif one.op in ("vector", "reduce"):
        _check_vector(p, one)
    elif one.op == "sync" and one["queue"] > 2:
        raise _bad(one, "queue", "load, execute or store", one["queue"])
    _within(one, "shift", 0, 46)
    for name, there, unit in (
        ("stochastic", p.stochastic, "stochastic rounding"),
        ("indexed", p.sparse, "2:4 unit"),
        ("sparse", p.sparse, "2:4 unit"),
    ):
        if one[name] and not there:
            raise _bad(one, name, f"0: the chip has no {unit}", 1)
    sizes = memory_rows(p)
    for name, memory, count in uses(p, one):
        if one[name] + count > sizes[memory]:
            got = f"{one[name]} + {count}"
            raise _bad(one, name, f"{count} rows within {sizes[memory]}", got)


def check(p: Parameters, program: Code) -> None:
    """A whole program, its loops run."""
    if len(program) > p.program_words:
        hint = f"program_words = {1 << (len(program) - 1).bit_length()}, or loops"
        raise UserError(
            "the program is too long",
            op="npu",
            expected=p.program_words,
            got=len(program),
            hint=hint,
        )
    depth = 0
    for one in program:
        depth += (one.op == "loop") - (one.op == "end")
        if not 0 <= depth <= LEVELS:
            raise _bad(one, "nesting", f"loops that end, at most {LEVELS} deep", depth)
        if one.op == "loop":
            _within(one, "turns", 1, 65535)
    if depth or not program or program[-1].op != "halt":
        raise UserError("a program ends with halt, its loops before it", op="npu")
    for one in words(program):
        check_word(p, one)


# ---- order --------------------------------------------------------------------------------------


MEMORIES = {  # the two queues that touch each, the one that writes first
    "scratchpad": (LOAD, EXECUTE),
    "accumulators": (EXECUTE, STORE),
    "DRAM": (STORE, LOAD),
}
Rows = Any  # numbers of rows: a slice or an array


def touches(p: Parameters, one: Instruction) -> Iterator[tuple[str, Rows]]:
    """The memories that a word shares with another queue, and which rows (beats of DRAM). Execute
    and store may read a row of sums side by side."""
    for name, memory, count in uses(p, one):
        if one.queue != EXECUTE or memory == "scratchpad" or name == "result":
            yield memory, slice(one[name], one[name] + count)
    if one.op in ("move_in", "move_out"):
        starts = (one["dram"] + np.arange(one["rows"]) * one["stride"]) // p.dma_bytes
        yield "DRAM", (starts[:, None] + np.arange(row_beats(p, one))).ravel()


class Order(Queues):
    """The same with what each queue knows of the others."""

    def __init__(self, p: Parameters, program: Code, timed: bool = True) -> None:
        super().__init__(p, program, timed)
        self.clocks: list[Clock] = [[0] * len(QUEUES) for _ in QUEUES]
        self.tokens: list[deque[Clock]] = [deque() for _ in CHANNELS]
        sizes = {**memory_rows(p), "DRAM": 0}
        # by memory and queue: the count of the word that touched a row last
        self.last = {
            (m, q): np.zeros(size, np.int64) for m, size in sizes.items() for q in MEMORIES[m]
        }

    def post(self, number: int) -> bool:
        """A token tells what its queue knows."""
        event, done = self.running[number], super().post(number)
        if event is not None and done:
            for c in posts(number, event.word["tokens"]):
                self.tokens[c].append(list(self.clocks[number]))
        return done

    def take(self, number: int) -> Event | None:
        """An error where a word touches what another queue touched, and no token says when."""
        event = super().take(number)
        if event is None:
            return None
        one, clock = event.word, self.clocks[number]
        for c in waits(number, one["tokens"]):
            join(clock, self.tokens[c].popleft())
        clock[number] += 1
        for memory, rows in touches(self.p, one):
            pair = MEMORIES[memory]
            other = pair[pair[0] == number]
            if memory == "DRAM":
                self._grow(int(rows.max()) + 1)
            seen = self.last[memory, other][rows]
            latest = int(seen.max()) if seen.size else 0
            if latest > clock[other]:
                raise UserError(
                    f"{QUEUES[number]} and {QUEUES[other]} race in the {memory}",
                    op="npu",
                    got=f"{text(one)}; {text(self.events[other][latest - 1].word)}",
                    hint="a token posted by the one and waited for by the other orders them",
                )
            self.last[memory, number][rows] = clock[number]
        return event

    def _grow(self, beats: int) -> None:
        for q in MEMORIES["DRAM"]:
            known = self.last["DRAM", q]
            if len(known) < beats:
                self.last["DRAM", q] = np.zeros(2 * beats, np.int64)
                self.last["DRAM", q][: len(known)] = known


def prove(p: Parameters, program: Code) -> Order:
    """That a program ends and that its queues do not race, whatever memory does to times."""
    made = Order(p, program)
    for _ in made.words():
        pass
    return made

"""Programs checked before they run: what an NPU of these parameters can do with each word.

Loops are run, so addresses are those of every turn. Invariant: a program that passes uses no
row that is not there, no port twice in a cycle, and no unit the chip lacks; an error names the
word, the field and its bound. That queues end and do not race is `order.prove`'s to say.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.errors import UserError
from .arithmetic import FLOAT_KINDS
from .front import LEVELS, words
from .instructions import Instruction, text
from .parameters import Parameters


def _bad(one: Instruction, name: str, expected: str, got: object) -> UserError:
    return UserError(
        f"{one.op}: bad {name}", op="npu", expected=expected, got=f"{got} in {text(one)}"
    )


def _within(one: Instruction, name: str, least: int, most: int) -> None:
    if not least <= one[name] <= most:
        raise _bad(one, name, f"{least} to {most}", one[name])


def _rows(one: Instruction, name: str, count: int, most: int) -> None:
    if one[name] + count > most:
        raise _bad(one, name, f"{count} rows within {most}", f"{one[name]} + {count}")


def _check_move(p: Parameters, one: Instruction) -> None:
    out = one.op == "move_out"
    _within(one, "rows", 1, 65535)
    _within(one, "columns", 1, p.columns if out else p.row_elements)
    _rows(one, "local", one["rows"], p.accumulator_rows if out else p.scratchpad_rows)
    for name in ("dram", "stride"):
        if one[name] % p.dma_bytes:
            raise _bad(one, name, f"a multiple of dma_bytes ({p.dma_bytes})", one[name])
    if one["stochastic"] and not p.stochastic:
        raise _bad(one, "stochastic", "0: the chip has no stochastic rounding", 1)
    if out and one["shift"] > 46:
        raise _bad(one, "shift", "at most 46", one["shift"])
    if one["indexed"] and not p.sparse:
        raise _bad(one, "indexed", "0: the chip has no 2:4 unit", 1)


def _check_matmul(p: Parameters, one: Instruction) -> None:
    _within(one, "count", 1, 65535)
    if one["sparse"] and not p.sparse:
        raise _bad(one, "sparse", "0: the chip has no 2:4 unit", 1)
    if one["mixed"] and (not p.mixed or one["sparse"]):
        why = "not with sparse" if p.mixed else f"weights are {p.element} too"
        raise _bad(one, "mixed", f"0: {why}", 1)
    _rows(one, "local", one["count"], p.scratchpad_rows)
    if p.dataflow != "os":
        _rows(one, "result", one["count"], p.accumulator_rows)
        return
    _rows(one, "second", one["count"], p.scratchpad_rows)
    if one["sparse"] and one["count"] % 2:
        raise _bad(one, "count", "even with 2:4, two steps a group", one["count"])
    if one["drain"]:
        _within(one, "rows", 1, p.rows)
        _rows(one, "result", one["rows"], p.accumulator_rows)
    last = one["count"] - 1
    banks = [{one[n] // p.bank_rows, (one[n] + last) // p.bank_rows} for n in ("local", "second")]
    if len(banks[0]) > 1 or len(banks[1]) > 1 or banks[0] == banks[1]:
        expected = f"each operand within one bank of {p.bank_rows} rows, and not the same"
        raise _bad(one, "second", expected, f"{one['local']} and {one['second']}")


def _check_vector(p: Parameters, one: Instruction) -> None:
    _within(one, "count", 1, 65535)
    _rows(one, "result", one["count"], p.accumulator_rows)
    if one.op == "reduce":
        _within(one, "columns", 1, p.columns)
        _rows(one, "local", one["count"], p.accumulator_rows)
        return
    if p.floating and one.kind not in FLOAT_KINDS:
        raise _bad(one, "kind", f"one of {', '.join(FLOAT_KINDS)} for {p.element}", one.kind)
    if p.floating and one["shift"]:
        raise _bad(one, "shift", f"0 for {p.element}", one["shift"])
    if one["shift"] > 46:
        raise _bad(one, "shift", "at most 46", one["shift"])
    count = 1 if one["hold_first"] else one["count"]
    if one.kind in ("take", "load"):
        planes = 1 if one.kind == "take" else p.planes
        _rows(one, "local", count * planes, p.scratchpad_rows)
        return
    _rows(one, "local", count, p.accumulator_rows)
    if not one["immediate"]:
        _rows(one, "second", 1 if one["hold_second"] else one["count"], p.accumulator_rows)


def check_word(p: Parameters, one: Instruction) -> None:
    """One word with its addresses as a queue gets it."""
    if one.op in ("move_in", "move_out"):
        _check_move(p, one)
    elif one.op == "preload":
        if p.dataflow == "os":
            raise _bad(one, "op", "a mesh that keeps weights or inputs", "os")
        _within(one, "rows", 1, p.rows)
        _rows(one, "local", one["rows"], p.scratchpad_rows)
    elif one.op == "matmul":
        _check_matmul(p, one)
    elif one.op in ("vector", "reduce"):
        _check_vector(p, one)
    elif one.op == "sync" and one["queue"] > 2:
        raise _bad(one, "queue", "load, execute or store", one["queue"])


def check(p: Parameters, program: Sequence[Instruction]) -> None:
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

"""The instruction set: eleven words of 128 bits, as records, as text and as numbers.

Three in-order queues run them: load (`move_in`), execute (`preload`, `matmul`, `vector`,
`reduce`) and store (`move_out`); `sync` stands in any queue. Each may wait for a token of the queue
before it (`prev`) or after it (`next`) and post one when it is done. The front end itself runs
`config`, `loop`, `end` and `halt`. Invariant: `assemble(text(i)) == [i]`; the table `FIELDS` is all
there is to know of the words' bits, and the RTL is emitted from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...core.errors import UserError

LOAD, EXECUTE, STORE = 0, 1, 2
QUEUES = ("load", "execute", "store")


class Field(NamedTuple):
    """Bits of a word: where they begin and how many."""

    name: str
    low: int
    width: int


QUEUE_OF = {"move_in": LOAD, "move_out": STORE}
QUEUE_OF |= dict.fromkeys(("preload", "matmul", "vector", "reduce"), EXECUTE)
# Bits of the tokens: wait for the queue before or after, post to it.
WAIT_PREV, WAIT_NEXT, POST_PREV, POST_NEXT = 1, 2, 4, 8
TOKENS = {
    "wait_prev": WAIT_PREV,
    "wait_next": WAIT_NEXT,
    "post_prev": POST_PREV,
    "post_next": POST_NEXT,
}
QUEUE, TOKEN, SET = Field("queue", 4, 2), Field("tokens", 6, 4), Field("set", 10, 2)
LOCAL, DRAM = Field("local", 16, 16), Field("dram", 96, 32)
SECOND, RESULT, COUNT = Field("second", 32, 16), Field("result", 48, 16), Field("count", 64, 16)
RESULT_SET = Field("result_set", 94, 2)
KIND = Field("kind", 80, 8)
FIELDS: dict[str, tuple[Field, ...]] = {
    "halt": (),
    # level: the loop whose turns add `local` and `dram` to the addresses of a set;
    # seed: the state of stochastic rounding instead
    "config": (SET, Field("level", 12, 2), Field("seed", 14, 1), LOCAL, DRAM),
    # narrow: elements as weights lie in DRAM; indexed: 2-bit indices follow the elements of a row
    "move_in": (
        TOKEN,
        SET,
        Field("narrow", 12, 1),
        Field("indexed", 13, 1),
        LOCAL,
        Field("rows", 32, 16),
        Field("columns", 48, 16),
        Field("stride", 64, 32),
        DRAM,
    ),
    "move_out": (
        TOKEN,
        SET,
        Field("raw", 12, 1),  # 32 bits as they are
        Field("relu", 13, 1),
        Field("stochastic", 14, 1),
        LOCAL,
        Field("rows", 32, 16),
        Field("columns", 48, 10),
        Field("shift", 58, 6),
        Field("scale", 64, 16),
        Field("stride", 80, 16),
        DRAM,
    ),
    "preload": (TOKEN, SET, LOCAL, Field("rows", 32, 16)),
    # count: rows that stream (ws, is) or steps of the sum (os); rows: of the result (os)
    "matmul": (
        TOKEN,
        SET,
        Field("accumulate", 12, 1),
        Field("keep", 13, 1),
        Field("drain", 14, 1),
        Field("sparse", 15, 1),
        LOCAL,
        SECOND,
        RESULT,
        COUNT,
        Field("rows", 80, 12),
        Field("second_set", 92, 2),
        RESULT_SET,
        Field("mixed", 96, 1),  # two weights of half the bits in each place, and two inputs
    ),
    "vector": (
        TOKEN,
        SET,
        Field("hold_first", 12, 1),  # the same first row for all
        Field("hold_second", 13, 1),
        Field("immediate", 14, 1),  # `value` is the second operand
        LOCAL,
        SECOND,
        RESULT,
        COUNT,
        KIND,
        Field("shift", 88, 6),
        RESULT_SET,
        Field("value", 96, 32),
    ),
    "reduce": (TOKEN, SET, LOCAL, RESULT, COUNT, KIND, RESULT_SET, Field("columns", 96, 16)),
    "sync": (QUEUE, TOKEN),
    "loop": (Field("turns", 16, 16),),
    "end": (),
}
OPS = {name: number for number, name in enumerate(FIELDS)}
# What the vector unit does with a row, by number; `take` and `load` read the scratchpad.
VECTOR = ("add", "sub", "max", "min", "mul", "exp", "reciprocal", "rsqrt", "take", "load")
KINDS = {"vector": VECTOR, "reduce": ("sum", "max")}


@dataclass(frozen=True)
class Instruction:
    """One word: its op and its fields, those left out being 0."""

    op: str
    values: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "_at", dict(self.values))

    def __getitem__(self, name: str) -> int:
        return self._at.get(name, 0)  # type: ignore[attr-defined]

    @property
    def queue(self) -> int | None:
        """The queue that runs it, if one does."""
        return self["queue"] if self.op == "sync" else QUEUE_OF.get(self.op)

    @property
    def kind(self) -> str:
        """The name of what the vector unit does."""
        return KINDS[self.op][self["kind"]]


Words = list[Instruction]
Code = Sequence[Instruction]


def instruction(op: str, tokens: str | int = "", **given: int | str) -> Instruction:
    """An Instruction of named fields: `instruction("move_in", "wait_next", rows=4, ...)`."""
    if op not in OPS:
        raise UserError("unknown instruction", op="npu", expected=", ".join(OPS), got=repr(op))
    known = {f.name: f for f in FIELDS[op]}
    values: dict[str, int] = {}
    bits = tokens if isinstance(tokens, int) else 0
    for token in tokens.split() if isinstance(tokens, str) else ():
        if token not in TOKENS:
            raise UserError(f"{op}: unknown token", op="npu", expected=", ".join(TOKENS), got=token)
        bits |= TOKENS[token]
    if bits:
        given = {**given, "tokens": bits}
    for name, value in given.items():
        if name not in known:
            expected = ", ".join(known) or "no fields"
            raise UserError(f"{op} has no field {name}", op="npu", expected=expected)
        values[name] = _number(op, known[name], value)
    return Instruction(op, tuple((n, values[n]) for n in known if values.get(n)))


def _number(op: str, field: Field, value: int | str) -> int:
    """A field's bits: names of kinds and queues are known, negative numbers wrap."""
    if isinstance(value, str):
        names = QUEUES if field.name == "queue" else KINDS.get(op, ())
        if value not in names:
            expected = ", ".join(names) or "a number"
            raise UserError(f"{op}: bad {field.name}", op="npu", expected=expected, got=value)
        return names.index(value)
    most = 1 << field.width
    wraps = field.name in ("local", "dram", "value", "scale")
    if not (-(most >> 1) if wraps else 0) <= value < most:
        raise UserError(
            f"{op}: {field.name} does not fit its {field.width} bits",
            op="npu",
            expected=f"0 to {most - 1}",
            got=value,
        )
    return value % most


def encode(one: Instruction) -> int:
    """The word of an Instruction."""
    word = OPS[one.op]
    for field in FIELDS[one.op]:
        word |= one[field.name] << field.low
    return word


def text(one: Instruction) -> str:
    """One line: `op field=value ... wait_prev post_next`."""
    parts = [one.op]
    for field in FIELDS[one.op]:
        value = one[field.name]
        if not value or field.name == "tokens":
            continue
        if field.name == "kind":
            parts.append(f"kind={one.kind}")
        elif field.name == "queue":
            parts.append(f"queue={QUEUES[value]}")
        else:
            parts.append(
                f"{field.name}={value:#x}" if field.name == "dram" else f"{field.name}={value}"
            )
    parts += [name for name, bit in TOKENS.items() if one["tokens"] & bit]
    return " ".join(parts)


def disassemble(program: Code) -> str:
    """The text of a program, loops indented."""
    lines, depth = [], 0
    for one in program:
        depth -= one.op == "end"
        lines.append("  " * max(depth, 0) + text(one))
        depth += one.op == "loop"
    return "\n".join(lines) + "\n"


def assemble(source: str) -> Words:
    """The program of a text; `;` begins a comment, errors name the line."""
    made = []
    for number, line in enumerate(source.splitlines(), 1):
        words = line.split(";")[0].split()
        if not words:
            continue
        try:
            made.append(_parse(words))
        except UserError as error:
            raise UserError(f"line {number}: {error}", op="npu", got=line.strip()) from error
    return made


def _parse(words: list[str]) -> Instruction:
    tokens = [w for w in words[1:] if "=" not in w]
    given: dict[str, int | str] = {}
    for word in words[1:]:
        if "=" in word:
            name, value = word.split("=", 1)
            if name in given:
                raise UserError(f"{name} is given twice", op="npu")
            try:
                given[name] = int(value, 0)
            except ValueError:
                given[name] = value
    return instruction(words[0], " ".join(tokens), **given)

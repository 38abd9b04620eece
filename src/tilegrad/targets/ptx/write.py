"""Write PTX: lines of instructions over virtual registers.

Registers are untyped and made on demand in four kinds, `pred`, `b16`, `b32` and `b64`: PTX lets
a register without a type hold any value of its size, so a bitcast costs nothing. Invariant:
every line goes through `put`, which the tests hold to the forms that ptxas knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, reduce
from typing import Any

KINDS = {"pred": "%p", "b16": "%h", "b32": "%r", "b64": "%d"}
TYPES = {f"{letter}{bits}": f"b{bits}" for letter in "bsuf" for bits in (16, 32, 64)}
TYPES |= {"pred": "pred", "bf16": "b16", "e4m3x2": "b16", "e5m2x2": "b16"}
TYPES |= {"f16x2": "b32", "bf16x2": "b32"}
Registers = list[str]
Operand = str | int  # a register, a literal, an address; or a number


def braced(registers: Sequence[str]) -> str:
    """Several registers as one operand."""
    return "{" + ", ".join(registers) + "}"


def vector(form: str, kind: str, registers: Sequence[str]) -> tuple[str, str]:
    """The form and the operand of an instruction on one register, or on neighbours at once."""
    if len(registers) == 1:
        return f"{form}.{kind}", registers[0]
    return f"{form}.v{len(registers)}.{kind}", braced(registers)


@cache
def written(form: str) -> str:
    """The kind of register that an instruction writes: its first type says it."""
    name, *parts = form.split(".")
    if name == "setp":
        return "pred"
    first = next(p for p in parts if p in TYPES)
    return "b64" if "wide" in parts else TYPES[first]


def _on_two(form: str) -> Callable[[Any, str, Operand], str]:
    """An instruction on two operands, of which the second may be a number."""
    return lambda writer, a, b: writer.value(form, a, b)


class Writer:
    """The body of one entry under construction."""

    def __init__(self) -> None:
        self.lines: Registers = []
        self.counts = dict.fromkeys(KINDS, 0)
        self._labels = 0
        self.parts: dict[str, tuple[str, int]] = {}  # of words: the half, or the byte of 8 bits
        self._cut: dict[str, Registers] = {}  # by word

    def new(self, kind: str) -> str:
        """A fresh register."""
        self.counts[kind] += 1
        return f"{KINDS[kind]}{self.counts[kind] - 1}"

    def put(self, form: str, *operands: Operand, guard: str = "") -> None:
        """One instruction; `guard` is a predicate register, '!' before it for its opposite."""
        given = [str(operand) for operand in operands]
        if given and given[0] in self._cut:  # the word is written again
            for part in self._cut.pop(given[0]):
                self.parts.pop(part, None)
        if form == "mov.b32" and given[0][0] == "{":
            for number, half in enumerate(given[0].strip("{}").split(", ")):
                self.note_part(half, given[1], number)
        before = f"@{guard} " if guard else ""
        self.lines.append(
            f"\t{before}{form} {', '.join(given)};" if given else f"\t{before}{form};"
        )

    def note_part(self, register: str, word: str, number: int) -> None:
        """Remember which half or byte of a word a register holds."""
        self._cut.setdefault(word, []).append(register)
        self.parts[register] = (word, number)

    def value(self, form: str, *operands: Operand) -> str:
        """The register a new instruction writes first."""
        result = self.new(written(form))
        self.put(form, result, *operands)
        return result

    # ---- on 32 bits, and whole registers ----------------------------------------------------

    add, sub, mul = map(_on_two, ("add.s32", "sub.s32", "mul.lo.s32"))
    shl, shr = map(_on_two, ("shl.b32", "shr.u32"))  # shr of what is not negative
    mask, xor = map(_on_two, ("and.b32", "xor.b32"))
    and_predicates = _on_two("and.pred")

    def all_of(self, predicates: Iterable[str]) -> str:
        """A predicate that holds where all of some do."""
        return reduce(self.and_predicates, dict.fromkeys(predicates))

    def mad(self, a: str, b: Operand, c: str) -> str:
        """a * b + c."""
        return self.value("mad.lo.s32", a, b, c)

    def test(self, form: str, a: str, b: Operand) -> str:
        """A predicate: `form` is the comparison and the type, such as lt.s32."""
        return self.value(f"setp.{form}", a, b)

    def copy(self, kind: str, value: Operand) -> str:
        """A fresh register with a value."""
        return self.value(f"mov.{kind}", value)

    def move(self, to: Sequence[str], registers: Sequence[str], kind: str, guard: str = "") -> None:
        """Set registers to others."""
        for a, b in zip(to, registers):
            self.put(f"mov.{kind}", a, b, guard=guard)

    def label(self, stem: str) -> str:
        """A fresh label, not yet placed."""
        self._labels += 1
        return f"${stem}_{self._labels}"

    def place(self, label: str) -> None:
        """Put a label here."""
        self.lines.append(f"{label}:")

    @contextmanager
    def loop(self, *names: str) -> Iterator[Callable[[str], None]]:
        """A loop, which `leave(guard)` leaves."""
        head, done = map(self.label, names)
        self.place(head)
        yield lambda guard: self.put("bra", done, guard=guard)
        self.put("bra", head)
        self.place(done)

    def declarations(self) -> Registers:
        """The `.reg` lines of all registers made."""
        return [
            f"\t.reg .{kind} {KINDS[kind]}<{count}>;"
            for kind, count in self.counts.items()
            if count
        ]


def several(w: Writer, kind: str, count: int) -> Registers:
    """Some fresh registers."""
    return [w.new(kind) for _ in range(count)]


def halves_of(w: Writer, word: str) -> Registers:
    """The two halves of a word."""
    halves = several(w, "b16", 2)
    w.put("mov.b32", braced(halves), word)
    return halves

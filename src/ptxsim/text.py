"""Read a PTX module: declarations, labels and instructions with their operands.

The text is what our emitter prints, or a person writes in tests: one entry, registers of sizes
(typed ones are taken by their size), static and dynamic shared memory. Invariant: an Instruction
holds the line number and text it came from, and its registers are numbers of slots, so that the
decoders never look at names of registers. The function statements is long because one loop
cuts labels, blocks, directives and instructions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache

from .errors import TextError

KINDS = {
    "pred": "pred",
    "b8": "b16",
    "u8": "b16",
    "s8": "b16",
    **{f"{letter}{bits}": f"b{bits}" for letter in "busf" for bits in (16, 32, 64)},
    "b128": "b128",
}
LOCATION = re.compile(r"//\s*(\S+:\d+)")
LABEL = re.compile(r"([$\w.]+)\s*:(?!:)")
REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.S)
SHARED = re.compile(
    r"(\.extern\s+|\.visible\s+)?\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([$%\w]+)"
    r"\s*((?:\[\d*\])*)"
)
PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s*[^,]*?)?([$%\w]+)"
    r"\s*(?:\[(\d+)\])?\s*$"
)
BYTES = {"b8": 1, "u8": 1, "s8": 1, **{f"{x}{n}": n // 8 for x in "busf" for n in (16, 32, 64)}}


@dataclass(frozen=True)
class Operand:
    """An operand: kind 'register', 'number', 'special', 'name', 'memory', 'vector', 'pair',
    'not' or 'sink'; `slot` and `size` of a register, `text` of names and numbers, `parts`."""

    kind: str
    text: str = ""
    slot: int = -1
    size: str = ""
    parts: tuple[Operand, ...] = ()
    offset: int = 0

    def registers(self) -> list[int]:
        """The slots of all registers in it."""
        if self.kind == "register":
            return [self.slot]
        return [slot for part in self.parts for slot in part.registers()]


@dataclass
class Instruction:
    """One instruction: its name cut at the dots, operands, guard (operand, wanted value)."""

    number: int
    line: int
    text: str
    note: str
    name: str
    operands: tuple[Operand, ...]
    guard: tuple[int, bool] | None = None
    words: list[str] = field(default_factory=list)
    target: int = -1  # of a branch


@dataclass
class Variable:
    """A shared variable or a parameter."""

    name: str
    align: int
    bytes: int
    dynamic: bool = False
    offset: int = 0


@dataclass
class Module:
    """A parsed module with one entry."""

    entry: str
    parameters: list[Variable]
    shared: list[Variable]
    registers: list[str]  # the kind of each slot
    slots: dict[str, int]
    code: list[Instruction]
    labels: dict[str, int]
    directives: dict[str, str]


def split(text: str, separator: str = ",") -> list[str]:
    """Cut at separators outside of brackets and braces."""
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        if letter in "[{(":
            depth += 1
        elif letter in "]})":
            depth -= 1
        elif letter == separator and not depth:
            parts.append(text[start:place].strip())
            start = place + 1
    last = text[start:].strip()
    return [*parts, last] if last or parts else []


class Reader:
    """Reads statements into a Module."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.slots: dict[str, int] = {}
        self.module = Module("", [], [], [], self.slots, [], {}, {})

    def read(self) -> Module:
        """The whole text."""
        for line, note, statement in self.statements():
            self.statement(line, note, statement)
        if not self.module.entry:
            raise TextError("the text has no .entry")
        for instruction in self.module.code:
            if instruction.words[0] == "bra":
                label = instruction.operands[0].text
                if label not in self.module.labels:
                    raise TextError(f"no label {label}", instruction)
                instruction.target = self.module.labels[label]
        return self.module

    def statements(self) -> list[tuple[int, str, str]]:
        """(line, note, text) of everything that ends in ';', ':' or opens or closes a block."""
        found: list[tuple[int, str, str]] = []
        pending, start, note, inside = "", 0, "", False
        for number, raw in enumerate(self.text.splitlines(), 1):
            comment = LOCATION.search(raw)
            if comment:
                note = comment.group(1)
            line = re.sub(r"/\*.*?\*/", "", raw.split("//")[0]).strip()
            while line:
                if not pending:
                    start = number
                    if line[0] in "{}":
                        inside, line = True, line[1:].strip()
                        continue
                    head = line.split()[0]
                    if head in (".version", ".target", ".address_size", ".loc", ".file"):
                        found.append((number, note, line))
                        break
                    label = LABEL.match(line)
                    if label and inside:
                        found.append((number, note, label.group(1) + ":"))
                        line = line[label.end() :].strip()
                        continue
                if not inside and ".entry" in f"{pending} {line}":
                    body = line.find("{")
                    if body < 0:
                        pending += f" {line}"
                        break
                    found.append((start, note, (pending + " " + line[:body]).strip()))
                    pending, line, inside = "", line[body + 1 :].strip(), True
                    continue
                end = line.find(";")
                if end < 0:
                    pending += f" {line}"
                    break
                found.append((start, note, (pending + " " + line[:end]).strip()))
                pending, line = "", line[end + 1 :].strip()
        if pending.strip():
            raise TextError(f"line {start}: no end of {pending.strip()[:60]!r}")
        return found

    def statement(self, line: int, note: str, text: str) -> None:
        """One statement."""
        if not text:
            return
        if text.endswith(":") and " " not in text:
            self.module.labels[text[:-1]] = len(self.module.code)
        elif ".entry" in text:
            self.entry(text)
        elif text.startswith(".reg"):
            self.registers(text)
        elif ".shared" in text.split("[")[0] and text.startswith((".extern", ".shared", ".vis")):
            self.shared(text)
        elif text.startswith("."):
            words = text.split()
            self.module.directives[words[0][1:]] = " ".join(words[1:])
        else:
            self.instruction(line, note, text)

    def entry(self, text: str) -> None:
        """The head of the entry: name, parameters, directives."""
        found = re.search(r"\.entry\s+([$%\w]+)\s*(?:\((.*?)\))?(.*)", text, re.S)
        if found is None or self.module.entry:
            raise TextError(f"one entry is expected, not {text[:60]!r}")
        self.module.entry = found.group(1)
        offset = 0
        for part in split(found.group(2) or ""):
            match = PARAMETER.match(part)
            if match is None:
                raise TextError(f"parameter {part!r}")
            size = BYTES[match.group(2)] * int(match.group(4) or 1)
            align = int(match.group(1) or BYTES[match.group(2)])
            offset = -(-offset // align) * align
            self.module.parameters.append(Variable(match.group(3), align, size, offset=offset))
            offset += size
        for name, value in re.findall(r"\.(\w+)\s*([\d, ]*)", found.group(3)):
            self.module.directives[name] = value.strip()

    def registers(self, text: str) -> None:
        """A `.reg` line."""
        match = REGISTERS.match(text)
        if match is None or match.group(1) not in KINDS:
            raise TextError(f"registers {text!r}")
        kind = KINDS[match.group(1)]
        for name in split(match.group(2)):
            counted = re.fullmatch(r"([$%\w]+)<(\d+)>", name)
            names = (
                [f"{counted.group(1)}{i}" for i in range(int(counted.group(2)))]
                if counted
                else [name]
            )
            for one in names:
                self.slots[one] = len(self.module.registers)
                self.module.registers.append(kind)

    def shared(self, text: str) -> None:
        """A shared variable."""
        match = SHARED.match(text)
        if match is None:
            raise TextError(f"shared memory {text!r}")
        sizes = re.findall(r"\[(\d*)\]", match.group(5))
        dynamic = bool(sizes) and not sizes[0]
        count = 1
        for size in sizes:
            count *= int(size or 0)
        self.module.shared.append(
            Variable(
                match.group(4),
                int(match.group(2) or BYTES[match.group(3)]),
                BYTES[match.group(3)] * count,
                dynamic,
            )
        )

    def instruction(self, line: int, note: str, text: str) -> None:
        """One instruction."""
        guard, rest = None, text
        if text[0] == "@":
            head, rest = text[1:].split(None, 1)
            name = head.lstrip("!")
            if name not in self.slots:
                raise TextError(f"line {line}: no register {name}")
            guard = (self.slots[name], not head.startswith("!"))
        name, _, operands = (
            rest.strip().partition(" ") if " " in rest.strip() else rest.strip().partition("\t")
        )
        parsed = tuple(self.operand(part, line) for part in split(operands))
        self.module.code.append(
            Instruction(
                len(self.module.code),
                line,
                " ".join(text.split()),
                note,
                name,
                parsed,
                guard,
                name.split("."),
            )
        )

    def operand(self, text: str, line: int) -> Operand:
        """One operand."""
        text = text.strip()
        if text in self.slots:
            slot = self.slots[text]
            return Operand("register", text, slot, self.module.registers[slot])
        if text == "_":
            return Operand("sink")
        if text[0] == "{":
            return Operand("vector", parts=tuple(self.operand(p, line) for p in split(text[1:-1])))
        if text[0] == "[":
            parts = split(text[1:-1])
            base, offset = self.address(parts[0])
            inner = (self.operand(base, line), *(self.operand(p, line) for p in parts[1:]))
            return Operand("memory", parts=inner, offset=offset)
        if "|" in text:
            return Operand("pair", parts=tuple(self.operand(p, line) for p in text.split("|")))
        if text[0] == "!":
            return Operand("not", parts=(self.operand(text[1:], line),))
        if text[0].isdigit() or text[0] in "-+.":
            return Operand("number", text)
        if text[0] == "%":
            if re.fullmatch(r"%[a-z]+\d+", text) and not text.startswith(("%clock", "%pm")):
                raise TextError(f"line {line}: no register {text}")
            return Operand("special", text)
        base, offset = self.address(text)
        return Operand("name", base, offset=offset)

    @staticmethod
    def address(text: str) -> tuple[str, int]:
        """'base+offset' as its two parts."""
        match = re.fullmatch(r"(.*?[^\s+-])\s*([+-])\s*([-\w]+)", text.strip())
        if match is None:
            return text.strip(), 0
        offset = int(match.group(3), 0)
        return match.group(1), offset if match.group(2) == "+" else -offset


@lru_cache(maxsize=64)
def parse(text: str) -> Module:
    """The module a text holds."""
    return Reader(text).read()

"""PTX broken in one place: every barrier, fence, arrival, count, parity and wait in turn.

`mutants(text)` gives each broken text with a label that says line, instruction and change. It
works on any text of ours, so that emitted kernels can be shaken as well as hand-written ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

DROPPED = re.compile(
    r"bar\.|barrier\.|fence|membar|mbarrier\.(arrive|init)|wgmma\.(fence|commit|wait)"
    r"|cp\.async\.(bulk\.)?(commit|wait)|griddepcontrol\.wait"
)
WAIT = re.compile(r"mbarrier\.try_wait\.parity\S* (%\w+), (\[.*?\]), (\S+?)(, \S+)?;")


def _number(line: str, pattern: str, change: int) -> str | None:
    """A line with the number that a pattern ends in changed."""
    found = re.search(rf"(?:{pattern})(?P<number>\d+);", line)
    if found is None:
        return None
    place = found.span("number")
    return line[: place[0]] + str(int(found["number"]) + change) + line[place[1] :]


def _changes(line: str) -> Iterator[tuple[str, str]]:
    """(label, new line) of changes within a line."""
    wait = WAIT.search(line)
    if wait is not None:
        register = "%mutant"
        head = f"\t{{ .reg .b32 {register}; xor.b32 {register}, {wait[3]}, 1;\n"
        yield (
            "parity flipped",
            head + line.replace(f"{wait[2]}, {wait[3]}", f"{wait[2]}, {register}") + "\n\t}",
        )
    for what, pattern, change in (
        ("count + 1", r"mbarrier\.init\S* \[.*\], ", 1),
        ("count - 1", r"mbarrier\.init\S* \[.*\], ", -1),
        ("bytes + 16", r"expect_tx\S* \S+, \[.*\], ", 16),
        ("bytes - 16", r"expect_tx\S* \S+, \[.*\], ", -16),
        ("threads + 32", r"bar(rier)?\.(sync|arrive)\S* \S+, ", 32),
        ("groups + 1", r"wait_group(\.\w+)* ", 1),
    ):
        new = _number(line, pattern, change)
        if new is not None and new.strip():
            yield what, new


def mutants(text: str) -> Iterator[tuple[str, str]]:
    """(label, text) of every text with one thing broken."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        bare = line.strip()
        name = re.sub(r"^@!?%\w+ ", "", bare).split(" ")[0].rstrip(";")

        def made(label: str, *new: str, skip: int = 1, at: int = number) -> tuple[str, str]:
            broken = [*lines[:at], *new, *lines[at + skip :]]
            return f"line {at + 1} {name}: {label}", "\n".join(broken) + "\n"  # noqa: B023

        if DROPPED.match(name):
            yield made("dropped")
            after = lines[number + 1].strip() if number + 1 < len(lines) else ""
            follower = re.sub(r"^@!?%\w+ ", "", after).split(" ")[0].rstrip(";")
            if DROPPED.match(follower) and follower != name:
                yield made(f"after {follower}", lines[number + 1], line, skip=2)
        if WAIT.search(line) and "bra" in lines[number + 1]:
            yield made("dropped with its loop", skip=2)
            yield made("tried once", line, skip=2)
        for label, new in _changes(line):
            yield made(label, new)

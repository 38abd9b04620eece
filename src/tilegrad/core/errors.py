"""The errors of tilegrad: `UserError` for a mistake in the program, `InternalError` for ours.

Invariant: every raise in the package is one of these (or a subclass), names the op, what was
expected and what came, and a user error carries the user's own file and line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import NamedTuple

MOST_SHOWN = 1000  # characters of each part of an error
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
COMMANDS = os.path.join(PACKAGE, "cli", "")  # what called a command is no program of a person's
LIBRARY = os.path.dirname(os.__file__) + os.sep  # Python's own: it may stand between two of ours
INSTALLED = tuple(os.path.join(LIBRARY, name, "") for name in ("site-packages", "dist-packages"))
PROMPTS = ("<stdin>", "<console>", "<python-input-", "<ipython-input-")  # lines typed at one


class Location:
    """A place in the user's source: file and line."""

    __slots__ = ("file", "line")

    def __init__(self, file: str, line: int) -> None:
        self.file = file
        self.line = line

    def __repr__(self) -> str:
        return f"{self.file}:{self.line}"


USERS, OURS, NOBODYS = range(3)  # whose a frame is; above the last there are none of a user's
_owners: dict[str, int] = {}  # by file


def user_location() -> Location | None:
    """The innermost frame outside of tilegrad: the user's line; None where there is none."""
    frame = sys._getframe(1)
    owners = _owners
    while frame is not None:
        file = frame.f_code.co_filename
        owner = owners.get(file)
        if owner is None:
            owner = owners[file] = _owner(file)
        if owner != OURS:
            return None if owner == NOBODYS else Location(file, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _owner(file: str) -> int:
    if file.startswith(COMMANDS):
        return NOBODYS
    if file.startswith((*PROMPTS, *INSTALLED)) and not file.startswith(PACKAGE):
        return USERS
    return OURS if file.startswith((PACKAGE, LIBRARY, "<")) else USERS


def shortened(value: object) -> str:
    """Text of a value, without its middle if it is long: what a user gave may be a megabyte."""
    text = str(value)
    if len(text) <= MOST_SHOWN:
        return text
    half = MOST_SHOWN // 2
    return f"{text[:half]} ... {text[-half:]} ({len(text)} characters)"


def meant(name: object, known: Iterable[str]) -> str | None:
    """A hint with the known name that is most like one that is not; None where none is."""
    import difflib

    near = difflib.get_close_matches(str(name), list(known), 1)
    return f"did you mean {near[0]}?" if near else None


class TilegradError(Exception):
    """Base of all tilegrad errors."""


class UserError(TilegradError):
    """A mistake in the user's program, with op, expected, got, location and hint."""

    def __init__(
        self,
        message: str,
        *,
        op: str | None = None,
        expected: object = None,
        got: object = None,
        hint: str | None = None,
        location: Location | None = None,
    ) -> None:
        self.op, self.expected, self.got, self.hint = op, expected, got, hint
        self.location = location if location is not None else user_location()
        message = shortened(message)
        lines = [f"{op}: {message}" if op else message]
        if expected is not None:
            lines.append(f"  expected: {shortened(expected)}")
        if got is not None:
            lines.append(f"  got: {shortened(got)}")
        if self.location is not None:
            lines.append(f"  at {self.location}")
        if hint:
            lines.append(f"  hint: {shortened(hint)}")
        super().__init__("\n".join(lines))

    def name(self, op: str) -> None:
        """Say which op it was, where nobody has."""
        if self.op is None:
            self.op, self.args = op, (f"{op}: {self.args[0]}",)


class ShapeError(UserError, ValueError):
    """Shapes do not fit."""


class DTypeError(UserError, TypeError):
    """A dtype or a Python type does not fit."""


class AxisError(UserError, IndexError):
    """An axis or an index is out of range."""

    results: object = None  # of a run that went to its end with such an index clamped or dropped


class StateError(UserError, RuntimeError):
    """A Buffer was read after it was freed or donated, or state would be copied silently."""


class TraceError(UserError, RuntimeError):
    """A jitted function did what a traced function cannot do."""


class MemoryLimitError(UserError, MemoryError):
    """Memory ran out; names the peak and what holds it."""


class InternalError(TilegradError):
    """A fault of tilegrad itself; names the pass."""

    def __init__(self, where: str, message: str) -> None:
        self.where, self.message = where, message
        super().__init__(f"internal error in {where}: {message} (please report this)")

    def name(self, where: str) -> None:
        """Say where it was, where nobody has."""
        if not self.where:
            InternalError.__init__(self, where, self.message)


class Site(NamedTuple):
    """A condition of a Program: what is wrong where it does not hold, and the line ('file:line')
    that made it."""

    message: str
    location: str

    def error(self) -> AxisError:
        """The error of a condition that did not hold."""
        file, _, line = self.location.rpartition(":")
        where = Location(file, int(line)) if line.isdigit() else None
        return AxisError(self.message, location=where)

"""What reaches a person's terminal: answers on stdout, all else on stderr, nothing that acts.

A model's words are not ours, nor are names in its files: control characters in them could move
the cursor, rewrite what stands there or set a title. Invariant: of the control characters only
newlines and tabs are written as they are; the others are shown as signs that do nothing. `--json`
output has them escaped instead, and so loses nothing.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from ..core.errors import TilegradError, UserError

INTERRUPTED = 130  # the status of a command that Ctrl-C ended
# U+2400 on are pictures of the characters 0 to 31, U+2421 that of DEL; U+0080 to U+009F have none.
SIGNS: dict[int, int] = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
SIGNS |= {0x7F: 0x2421} | {code: 0xFFFD for code in range(0x80, 0xA0)}
SIGNS |= {code: 0xFFFD for code in range(0xD800, 0xE000)}  # halves of pairs, which no UTF-8 holds


def harmless(text: str) -> str:
    """Text with its control characters, but newlines and tabs, shown as signs."""
    return text.replace("\r\n", "\n").translate(SIGNS)


def stdout() -> TextIO:
    """Where results go; an error where it is closed, so that none is lost without a word."""
    if sys.stdout is None:
        raise UserError("stdout is closed", op="tilegrad", expected="a terminal, a file or a pipe")
    return sys.stdout


class Answers:
    """A stream for a model's words as they come: made harmless and shown at once."""

    def __init__(self, file: TextIO | None = None) -> None:
        self.file: Any = stdout() if file is None else file
        if hasattr(self.file, "reconfigure"):  # a terminal without UTF-8 shows "?" and goes on
            self.file.reconfigure(errors="replace")
        self.held = ""  # a carriage return whose newline may still come
        self.last = "\n"

    def write(self, text: str) -> None:
        """Show some more text."""
        text, self.held = self.held + text, ""
        if text.endswith("\r"):
            text, self.held = text[:-1], "\r"
        self._put(harmless(text))

    def end(self) -> None:
        """End the answer: on a line of its own."""
        self._put(harmless(self.held))
        self.held = ""
        if self.last != "\n":
            self._put("\n")

    def _put(self, text: str) -> None:
        if text:
            self.file.write(text)
            self.file.flush()
            self.last = text[-1]


def status(text: str) -> None:
    """A line for the person, on stderr; to nobody where that is closed."""
    if sys.stderr is None:  # print would take stdout in its place
        return
    if hasattr(sys.stderr, "reconfigure"):
        sys.stderr.reconfigure(errors="replace")
    print(harmless(text), file=sys.stderr, flush=True)


def put(text: str) -> None:
    """A line of a result, on stdout."""
    out = Answers()
    out.write(text)
    out.end()


def error_text(error: TilegradError) -> str:
    """What an error says, but for the line of our own that called: a command has no program."""
    text = str(error)
    if isinstance(error, UserError) and error.location is not None:
        text = text.replace(f"\n  at {error.location}", "", 1)
    return text


def readable_stdin() -> Any:
    """Stdin; None where there is none: it is closed, or cannot be read (as nohup leaves it)."""
    try:
        if sys.stdin is not None and not sys.stdin.isatty():
            os.read(sys.stdin.fileno(), 0)
    except io.UnsupportedOperation:  # a stream without a file below it
        return sys.stdin
    except (OSError, ValueError):
        return None
    return sys.stdin


def is_terminal(stream: Any) -> bool:
    """Whether a person sits at a stream."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # no stream, or a closed one
        return False


def size_text(count: float) -> str:
    """Bytes as people read them."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            shown = count / scale
            return f"{shown:.1f} {unit}" if shown < 99.95 else f"{shown:.0f} {unit}"
    return f"{count:.0f} B"


def count_text(count: float) -> str:
    """A count as people read it: 134.5 million."""
    for unit, scale in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count:,.0f}"


def columns(rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> str:
    """Rows of words in columns; those named in `right` end at one place."""
    table = [[harmless(str(word)).replace("\n", " ") for word in row] for row in rows]
    if not table:
        return ""
    ends = set(right)
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = []
    for row in table:
        words = [
            w.rjust(n) if i in ends else w.ljust(n)
            for i, (w, n) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(words).rstrip())
    return "\n".join(lines)

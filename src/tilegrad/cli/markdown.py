"""A model's answer at a terminal: markdown drawn as it comes, wrapped at words, code coloured.

Text is cut into blocks (a paragraph, a list, code between fences). A block that is whole is written
once and stays; the last one, which still grows, is drawn anew a few times a second, its end alone
where it is taller than the screen. Invariant: no word of an answer is lost: HTML is shown as the
text it is, and a line break stays one. Control characters act no more than elsewhere (terminal.py).
"""

from __future__ import annotations

import re
import sys
import time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment, Segments

from .terminal import harmless

FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")
PAUSE, SHARE = 0.06, 10  # seconds between drawings; at least so many times what one took


class Rendered:
    """A stream for a model's words, as `Answers` is, for a terminal that can be drawn on."""

    def __init__(self, console: Any = None) -> None:
        if hasattr(sys.stdout, "reconfigure"):  # a terminal without UTF-8 shows "?" and goes on
            sys.stdout.reconfigure(errors="replace")
        self.console = console or Console(highlight=False)
        self.text = ""  # of the block that still grows
        self.live: Any = None
        self.later = 0.0  # when it may be drawn again
        self.first = True

    def write(self, text: str) -> None:
        """Show some more text."""
        self.text += text
        whole, rest = cut(self.text)
        if whole:
            self._settle(whole)
            self.text = rest
        start = time.monotonic()
        if start >= self.later:
            self._draw()
            took = time.monotonic() - start
            self.later = start + took + max(PAUSE, SHARE * took)

    def end(self) -> None:
        """End the answer: on a line of its own."""
        self._settle([self.text])
        self.text, self.first, self.later = "", True, 0.0

    def _draw(self) -> None:
        """Draw the end of the block that grows."""
        lines = self._lines(self.text)[-max(self.console.height - 2, 1) :]
        if not lines:
            return
        if self.live is None:
            self.live = Live(
                console=self.console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self.live.start()
        self.live.update(self._together(lines), refresh=True)

    def _settle(self, blocks: list[str]) -> None:
        """Write blocks that stay, with an empty line between."""
        if self.live is not None:
            live, self.live = self.live, None
            live.stop()
        for block in blocks:
            lines = self._lines(block)
            if lines:
                self.console.print(self._together(lines))
                self.first = False

    def _together(self, lines: list[list[Segment]]) -> Segments:
        """Lines as one thing to show, after an empty one if there are blocks above."""
        above: list[list[Segment]] = [] if self.first else [[]]
        return Segments([part for line in above + lines for part in (*line, Segment.line())])

    def _lines(self, block: str) -> list[list[Segment]]:
        """The lines of a block, as wide as the terminal at most; none above or below is empty."""
        lines = [trimmed(line) for line in self.console.render_lines(parsed(block), pad=False)]
        while lines and not lines[0]:
            lines.pop(0)
        while lines and not lines[-1]:
            lines.pop()
        return lines


def parsed(block: str) -> Markdown:
    """A block of markdown, in which HTML is text and a line break is one."""
    from markdown_it import MarkdownIt

    found = Markdown("", hyperlinks=False)
    parser = MarkdownIt().enable("strikethrough").enable("table")
    parser.disable(["html_block", "html_inline", "reference", "lheading"])
    found.parsed = parser.parse(harmless(block))
    for token in found.parsed:
        for inner in token.children or ():
            if inner.type == "softbreak":
                inner.type = "hardbreak"
    return found


def trimmed(line: list[Segment]) -> list[Segment]:
    """A line without the blanks at its end that show nothing."""
    line = list(line)
    while line:
        text, style, control = line[-1]
        if control or (style is not None and style.bgcolor is not None):
            break
        line.pop()
        if text.rstrip():
            line.append(Segment(text.rstrip(), style))
            break
    return line


def cut(text: str) -> tuple[list[str], str]:
    """Blocks that are whole, and the rest: blocks end before a line that follows an empty one and
    is not indented, and with the fence of code."""
    blocks: list[str] = []
    start = place = 0
    fence, empty = "", False
    for line in text.splitlines(keepends=True):
        whole = line.endswith("\n")
        mark = FENCE.match(line.rstrip())
        if fence:
            if whole and mark and mark[1].startswith(fence) and not mark[2]:
                blocks.append(text[start : place + len(line)])
                fence, start = "", place + len(line)
        elif line.strip():
            if empty and not line[0].isspace():
                blocks.append(text[start:place])
                start = place
            fence = mark[1] if mark and whole else ""
        empty = not fence and not line.strip()
        place += len(line)
    return blocks, text[start:]

"""Answers drawn as markdown: blocks as they come, nothing lost, nothing that acts."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest

from tilegrad.cli import markdown
from tilegrad.cli.markdown import Console, Rendered, cut

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
ANSWER = """# Title

A **bold** word and `a<b>` in a paragraph that is a good deal longer than the screen is wide.
A line <b>of its own</b> [a link](http://x.y)

1. one

   more of one
2. two

```python
def f(x):

    return "a [bold]string[/bold]"
```
| a | b |
|---|---|
| 1 | 2 |

[ref]: http://kept <think>kept</think>
Heading or not
---
"""


def screen(text: str, width: int) -> list[str]:
    """The lines of a terminal after all that was written, where lines may be gone up and erased."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
        if part == "\n":
            row += 1
            if row == len(lines):
                lines.append("")
        elif part.endswith("A") and part[0] == "\x1b":
            row -= int(part[2:-1] or 1)
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part[0] not in "\x1b\r":
            lines[row] += part
            assert len(lines[row]) <= width, "wrapped by us, at words"
    return lines


def drawn(pieces: list[str], monkeypatch: pytest.MonkeyPatch, width: int = 40) -> list[str]:
    monkeypatch.setattr(markdown, "PAUSE", 0.0)
    monkeypatch.setattr(markdown, "SHARE", 0)
    file = io.StringIO()
    shown = Rendered(
        Console(
            file=file,
            force_terminal=True,
            width=width,
            height=12,
            highlight=False,
            legacy_windows=False,
        )
    )
    for piece in pieces:
        shown.write(piece)
    shown.end()
    return [line.rstrip() for line in screen(file.getvalue(), width)]


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_an_answer_in_pieces(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [ANSWER[i : i + size] for i in range(0, len(ANSWER), size)]
    lines = drawn(pieces, monkeypatch)
    assert lines == drawn([ANSWER], monkeypatch), "how it came does not matter"
    text = "\n".join(lines)
    for words in (
        "Title",
        "A bold word and a<b> in a paragraph that",
        "A line <b>of its own</b>",
        "http://x.y",
        " 1 one",
        "more of one",
        " 2 two",
        "def f(x):",
        'return "a [bold]string[/bold]"',
        "[ref]: http://kept",
        "<think>kept</think>",
        "Heading or not",
    ):
        assert words in text, (words, text)
    assert "**" not in text and "```" not in text and "|---" not in text


def test_blocks_are_cut_where_they_end() -> None:
    blocks, rest = cut(ANSWER)
    assert "".join(blocks) + rest == ANSWER
    assert [b.split()[0] for b in blocks] == [
        "#",
        "A",
        "1.",
        "```python",
        "|",
    ]
    assert cut("a\n\n") == ([], "a\n\n") and cut("a\n\n  b") == ([], "a\n\n  b")
    assert cut("```\na\n\nb\n") == ([], "```\na\n\nb\n")
    assert cut("````\n```\n\nb\n````\nc") == (["````\n```\n\nb\n````\n"], "c")


def test_long_blocks_and_several_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [f"word{i} " for i in range(300)]
    text = " ".join(drawn(words, monkeypatch))
    assert re.findall(r"word\d+", text)[-1] == "word299"
    file = io.StringIO()
    shown: Any = Rendered(Console(file=file, width=40))
    for _ in range(2):
        shown.write("x\n\ny")
        shown.end()
    assert ESCAPES.sub("", file.getvalue()) == "x\n\ny\n" * 2


def test_words_cannot_act(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n".join(drawn(["\x1b]0;ti", "tle\x07 \x1b[2J\r", "\nnext"], monkeypatch))
    assert "␛]0;title␇ ␛[2J" in text and "next" in text

"""Bars for what takes a while: a download, loading, packing, compiling.

Invariant: bars are drawn on stderr and only where that is a terminal; elsewhere only lines that a
person must have seen (a licence, another try) are written. Every bar is gone once its block ends.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from .terminal import harmless, is_terminal, status

WORDS = {"load": "loading", "pack": "packing", "compile": "compiling"}
TOLD = ("licence", "retry", "done")  # stages of a fetch that are lines, not bars


class Bars:
    """A block in which `report` (of a fetch) and `stage` (of loading) may be called."""

    def __init__(self) -> None:
        self.drawn: Any = None
        self.tasks: dict[str, Any] = {}
        self.over = False

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        self.close()

    def close(self) -> None:
        """Take all bars away, for good: from here on the terminal is the answer's."""
        self.over = True
        if self.drawn is not None:
            self.drawn.stop()
            self.drawn, self.tasks = None, {}

    def report(self, progress: Any) -> None:
        """How far a fetch is: a `Progress` of exchange/fetch.py."""
        if progress.stage in TOLD:
            self.line(progress.text)
        else:
            self.stage(progress.text, progress.done, progress.total)

    def line(self, text: str) -> None:
        """A line that stays, above the bars."""
        if self.drawn is None:
            status(text)
        else:
            self.drawn.console.print(harmless(text), markup=False, highlight=False)

    def stage(self, name: str, done: float, total: float) -> None:
        """How far a stage is; a total of 0 is not known, one of 1 has no parts to show."""
        if self.drawn is None:
            if self.over or not is_terminal(sys.stderr):
                return
            self.drawn = _drawing()
            self.drawn.start()
        if name not in self.tasks:
            words = harmless(WORDS.get(name, name)).replace("[", "\\[")
            self.tasks[name] = self.drawn.add_task(words, total=None)
        self.drawn.update(self.tasks[name], completed=done, total=total if total > 1 else None)
        if total and done >= total:  # done: its line makes room for the next
            self.drawn.remove_task(self.tasks.pop(name))


def _drawing() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeElapsedColumn

    columns = ("{task.description}", BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    # By its own choice rich would put itself in the place of sys.stdout, for whoever takes that
    # while a bar is drawn: answers would come a line each, and on stderr.
    return Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False)

"""How far what takes a while is: a download, loading, packing, compiling, training.

Invariant: all of it goes to stderr. Bars are drawn only where that is a terminal, and gone once
their block ends; elsewhere a stage that lasts has a line now and then, and a command that is quick
has none. Lines that a person must have seen (a licence, another try) are always written.
"""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any

from .terminal import harmless, is_terminal, put, status

WORDS = {
    "load": "loading",
    "pack": "packing",
    "compile": "compiling",
    "prepare": "preparing",
    "quantise": "quantising",
}
TOLD = ("licence", "retry", "done")  # stages of a fetch that are lines, not bars
EVERY = 10.0  # seconds between lines where no bar is drawn


class Bars:
    """A block in which `report` (of a fetch) and `stage` (of loading) may be called."""

    def __init__(self) -> None:
        self.drawn: Any = None
        self.told: Lines | None = None
        self.tasks: dict[str, Any] = {}
        self.over = False

    def __enter__(self) -> Bars:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take all bars away, for good: from here on the terminal is the answer's."""
        self.over = True
        if self.drawn is not None:
            self.drawn.stop()
            self.drawn, self.tasks = None, {}
        if self.told is not None:
            self.told.stop()
            self.told = None

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

    def put(self, text: str) -> None:
        """A line of a result, on stdout; bars make room for it."""
        if self.drawn is None:
            put(text)
            return
        self.drawn.stop()
        put(text)
        self.drawn.start()

    def stage(self, name: str, done: float, total: float, note: str = "") -> None:
        """How far a stage is; a total of 0 is not known, one of 1 has no parts to show."""
        if self.over:
            return
        words = harmless(WORDS.get(name, name))
        if not is_terminal(sys.stderr):
            self.told = self.told or Lines()
            self.told.stage(words, done, total, note)
            return
        if self.drawn is None:
            self.drawn = _drawing()
            self.drawn.start()
        if name not in self.tasks:
            words = words.replace("[", "\\[")
            self.tasks[name] = self.drawn.add_task(words, total=None, note="")
        self.drawn.update(
            self.tasks[name], completed=done, total=total if total > 1 else None, note=note
        )
        if total and done >= total:  # done: its line makes room for the next
            self.drawn.remove_task(self.tasks.pop(name))


class Lines:
    """Stages where no bar is drawn: a line now and then says how far those are that last."""

    def __init__(self) -> None:
        self.stages: dict[str, str] = {}
        self.start, self.over = time.monotonic(), threading.Event()
        self.teller = threading.Thread(target=self._tell, name="progress", daemon=True)
        self.teller.start()

    def stage(self, words: str, done: float, total: float, note: str) -> None:
        """How far a stage is."""
        if total and done >= total:
            self.stages.pop(words, None)
            return
        share = f"{100 * done / total:.0f}%" if total > 1 else ""
        self.stages[words] = ", ".join(text for text in (words, share, note) if text)

    def stop(self) -> None:
        """No more lines."""
        self.over.set()
        self.teller.join()

    def _tell(self) -> None:
        while not self.over.wait(EVERY):
            for text in list(self.stages.values()):
                status(f"[{text}; {time.monotonic() - self.start:.0f} s]")


def _drawing() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeElapsedColumn

    columns = (
        "{task.description}",
        BarColumn(),
        TaskProgressColumn(),
        "{task.fields[note]}",
        TimeElapsedColumn(),
    )
    # By its own choice rich would put itself in the place of sys.stdout, for whoever takes that
    # while a bar is drawn: answers would come a line each, and on stderr.
    return Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False)

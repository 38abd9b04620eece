"""Trials on disk: one JSON line for each Plan that was measured, so that a search can go on.

A line holds the problem, the Plan, seconds or why there are none, the hash of the target text
that ran, device, date and commit. Invariant: lines are only ever added; one that cannot be read
is passed over; a Trial counts again only on the same device and for the same text.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..core.errors import UserError
from ..kernels.plan_table import Record, Trial

LOG = logging.getLogger("tilegrad.tune")


class TrialLog:
    """The Trials of a file (None: only those of this process)."""

    def __init__(self, path: Path | None, origin: Record) -> None:
        self.path, self.origin = path, dict(origin)
        self.known: dict[tuple[str, str], Trial] = {}
        if path is not None and path.exists():
            for number, line in enumerate(path.read_text().splitlines(), 1):
                self._read(line, number)

    def _read(self, line: str, number: int) -> None:
        try:
            record = json.loads(line)
            seconds = None if record["seconds"] is None else float(record["seconds"])
            trial = Trial(dict(record["plan"]), seconds, str(record["note"]))
            if record["device"] == self.origin["device"]:
                self.known[str(record["problem"]), str(record["text"])] = trial
        except (ValueError, KeyError, TypeError) as error:
            LOG.warning("%s:%d is not a Trial: %s", self.path, number, error)

    def get(self, problem: str, text: str) -> Trial | None:
        """What is known of a text for a problem."""
        return self.known.get((problem, text))

    def add(self, problem: str, text: str, trial: Trial, **facts: Any) -> None:
        """Keep a Trial."""
        self.known[problem, text] = trial
        if self.path is None:
            return
        record = {"problem": problem, **asdict(trial), **facts, "text": text, **self.origin}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise UserError(
                "Trials cannot be kept",
                op="tune",
                got=f"{self.path}: {error}",
                hint="name another file",
            ) from error

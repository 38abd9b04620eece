"""The PlanTable: the best Plan of each kernel and problem, kept on disk as JSON.

One file for a kernel's problem, named by their hash, so that processes never overwrite each
other's answers by halves: a file is written whole and then renamed. Invariant: a table that
cannot be read is as good as an empty one; it never stops a program.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.config import config
from ..core.errors import UserError
from ..tile.plan import Plan, from_record

LOG = logging.getLogger("tilegrad.tune")


@dataclass(frozen=True)
class Trial:
    """One Plan that was tried: its best milliseconds, or why there are none."""

    plan: Plan
    milliseconds: float | None
    note: str = ""

    def __str__(self) -> str:
        time = "-" if self.milliseconds is None else f"{self.milliseconds:.4f} ms"
        return f"{time:>12}  {self.plan}" + (f"  ({self.note})" if self.note else "")


@dataclass(frozen=True)
class Entry:
    """What the table holds of a problem."""

    plan: Plan
    trials: tuple[Trial, ...] = ()


class PlanTable:
    """Plans by key, in memory and in a folder (None: the cache folder; "" for memory only)."""

    def __init__(self, folder: str | None = None) -> None:
        if folder is None:
            cache = config().cache_folder
            folder = os.path.join(cache, "plans") if cache else ""
        self.folder = Path(folder).expanduser() if folder else None
        self.known: dict[str, Entry] = {}

    def get(self, key: str) -> Entry | None:
        """The Entry of a problem, if it is known."""
        if key not in self.known and self.folder is not None:
            found = self._read(self.folder / f"{key}.json")
            if found is not None:
                self.known[key] = found
        return self.known.get(key)

    def put(self, key: str, entry: Entry) -> None:
        """Keep an Entry."""
        self.known[key] = entry
        if self.folder is None:
            return
        record = {
            "plan": entry.plan.to_record(),
            "trials": [{"plan": t.plan.to_record(), "milliseconds": t.milliseconds,
                        "note": t.note} for t in entry.trials],
        }  # fmt: skip
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.folder, suffix=".part")
            with os.fdopen(handle, "w") as file:
                json.dump(record, file, indent=1)
            os.replace(name, self.folder / f"{key}.json")
        except OSError as error:
            LOG.warning("the Plan of %s was not kept: %s", key, error)

    def _read(self, path: Path) -> Entry | None:
        try:
            record: dict[str, Any] = json.loads(path.read_text())
            trials = tuple(
                Trial(from_record(t["plan"]), t["milliseconds"], t["note"])
                for t in record["trials"]
            )
            return Entry(from_record(record["plan"]), trials)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, UserError) as error:
            LOG.warning("%s is not a Plan: %s", path, error)
            return None

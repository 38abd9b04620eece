"""The PlanTable: the best Plan known of each problem, as plain data that compile reads.

A problem is a key that begins with its family ("matmul-h200-..."), its Plan a record that the
family knows how to read. A table lies in a folder, a file for each problem, so that processes
never overwrite each other's answers by halves (a file is written whole and then renamed); or in
one file, as those that ship do. Both kinds of file hold the same JSON. `plans()` is the table
that compile reads: what a person tuned, then what ships (core/config.py: TILEGRAD_PLANS).

Invariant: a file that cannot be read is as good as an empty one, unless a person named it; it
never stops a program. `digest` is another when a Plan is another.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..core.config import config
from ..core.errors import UserError

LOG = logging.getLogger("tilegrad.plans")
FORMAT = 1
SHIPPED = Path(__file__).resolve().parent / "data"
LOOKED_UP = "matmul-*"  # kernels of the library whose Plans compile looks up
FAULTS = (OSError, ValueError, KeyError, TypeError, AttributeError, UserError)

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Trial:
    """One Plan that was tried: its seconds, or why there are none."""

    plan: Any  # its record, or the Plan that was read from that
    seconds: float | None
    note: str = ""

    @property
    def milliseconds(self) -> float | None:
        """The time in the unit that kernels of milliseconds are told in."""
        return None if self.seconds is None else 1e3 * self.seconds

    def __str__(self) -> str:
        time = "-" if self.seconds is None else f"{1e3 * self.seconds:.4f} ms"
        return f"{time:>12}  {self.plan}" + (f"  ({self.note})" if self.note else "")


@dataclass(frozen=True)
class Entry:
    """What a table holds of a problem: the best Plan, its seconds, and where they come from."""

    plan: Record
    seconds: float | None = None
    origin: Mapping[str, Any] = field(default_factory=dict)  # device, date, commit, source
    trials: tuple[Trial, ...] = ()


def entry_of(record: Record) -> Entry:
    """The Entry of a record, which may have no more than a Plan."""
    origin, given = record.get("origin", {}), record.get("trials", ())
    trials = tuple(Trial(dict(t["plan"]), _seconds(t["seconds"]), str(t["note"])) for t in given)
    return Entry(dict(record["plan"]), _seconds(record.get("seconds")), dict(origin), trials)


class PlanTable:
    """Entries by key, in memory and in a folder (None: the cache folder; "" for memory only)."""

    def __init__(self, folder: str | None = "") -> None:
        if folder is None:
            cache = config().cache_folder
            folder = os.path.join(cache, "plans") if cache else ""
        self.folder = Path(folder).expanduser() if folder else None
        self.known: dict[str, Entry] = {}
        self._digest = ""

    def get(self, key: str, reader: Callable[[Record], Any] = dict) -> Entry | None:
        """The Entry of a problem, if it is known and its Plan is one that `reader` takes."""
        if key not in self.known and self.folder is not None:
            self._read(self.folder / f"{key}.json")
        found = self.known.get(key)
        if found is None:
            return None
        try:
            for plan in (found.plan, *(t.plan for t in found.trials)):
                reader(plan)
        except FAULTS as error:
            LOG.warning("%s is not a Plan for %s: %s", dict(found.plan), key, error)
            return None
        return found

    def put(self, key: str, entry: Entry) -> None:
        """Keep an Entry."""
        self.known[key] = entry
        self._digest = ""
        if self.folder is None:
            return
        try:
            write_whole(self.folder / f"{key}.json", text_of({key: entry}))
        except OSError as error:
            LOG.warning("the Plan of %s was not kept: %s", key, error)
        forget()

    def read_all(self, folder: Path, keys: str) -> PlanTable:
        """Bring all files of a folder whose names are so; returns self."""
        for path in sorted(folder.glob(f"{keys}.json")):
            self._read(path)
        return self

    @property
    def digest(self) -> str:
        """A hash of every key and Plan, equal in every process; '' for an empty table."""
        if self.known and not self._digest:
            plans = sorted((key, sorted(e.plan.items())) for key, e in self.known.items())
            text = json.dumps(plans, sort_keys=True)
            self._digest = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
        return self._digest

    def _read(self, path: Path) -> None:
        try:
            self.known.update(entries_in(path.read_text()))
            self._digest = ""
        except FileNotFoundError:
            pass
        except FAULTS as error:
            LOG.warning("%s is not a PlanTable: %s", path, error)


# ---- files ----------------------------------------------------------------------------------


def entries_in(text: str) -> dict[str, Entry]:
    """The Entries of a table's text."""
    record = json.loads(text)
    if record["format"] != FORMAT:
        raise UserError("another format of PlanTable", expected=FORMAT, got=record["format"])
    return {str(key): entry_of(one) for key, one in record["plans"].items()}


def text_of(entries: Mapping[str, Entry], about: Mapping[str, Any] | None = None) -> str:
    """A table as text, a problem a line, in the order of keys."""
    lines = [
        f"  {json.dumps(key)}: {json.dumps(asdict(entries[key]))}"
        for key in sorted(entries, key=natural)
    ]
    body = ",\n".join(lines)
    head = f'"format": {FORMAT},\n "about": {json.dumps(dict(about or {}))},\n "plans": '
    return "{" + head + ("{\n" + body + "\n }" if lines else "{}") + "\n}\n"


def natural(key: str) -> list[Any]:
    """Orders keys by the numbers in them."""
    parts = re.findall(r"([^-]*?)(\d*)(?:-|$)", key)
    return [(word, int(number or 0)) for word, number in parts]


def read_table(path: str | Path) -> PlanTable:
    """The table in one file that a person named; UserError where it cannot be read."""
    table = PlanTable("")
    try:
        table.known = entries_in(Path(path).expanduser().read_text())
    except FAULTS as error:
        raise UserError(
            "not a PlanTable",
            op="plans",
            expected="a file that `tilegrad tune` wrote",
            got=f"{path}: {error}",
        ) from error
    return table


def write_whole(path: Path, text: str) -> None:
    """Write a file so that no reader sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(name, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


# ---- what compile reads ---------------------------------------------------------------------

_tables: dict[tuple[str | None, str], PlanTable] = {}


def plans() -> PlanTable:
    """The table that compile reads, as the Config asks for; read once a process."""
    key = (config().plan_table, config().cache_folder)
    found = _tables.get(key)
    if found is None:
        found = _tables[key] = _assembled(config().plan_table)
    return found


def forget() -> None:
    """Read the tables again at the next use: a file of theirs has changed."""
    _tables.clear()


def shipped() -> PlanTable:
    """All tables that come with the package."""
    return PlanTable("").read_all(SHIPPED, "*")


def _assembled(name: str | None) -> PlanTable:
    if name is not None:
        return read_table(name) if name else PlanTable("")
    own, found = PlanTable(None).folder, shipped()
    return found if own is None else found.read_all(own, LOOKED_UP)


def _seconds(value: Any) -> float | None:
    return None if value is None else float(value)

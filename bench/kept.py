"""The files in bench/results: of which machine and which time each is, and which are current.

A machine's current results are those of its newest date: of the newest one's day, or, where both
say their time, of the 24 hours before it (a night's measurements cross midnight). Of two of one
kind the newer counts. All others were measured before.
"""

from __future__ import annotations

import datetime
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
NAME = re.compile(r"(?P<kind>.+?)-\d{4}-\d\d-\d\d(-.+)?")
DAY = datetime.timedelta(hours=24)
THE_GPU = "NVIDIA H200"  # where a file says `cuda` and no name
NOT_NAMED = "a machine that the file does not name"


@dataclass(frozen=True)
class Result:
    """One file."""

    kind: str
    record: dict[str, Any]

    @cached_property
    def machine(self) -> str:
        """The GPU, else the CPU and how many cores of it."""
        device, machine = self.record.get("device", ""), self.record.get("machine")
        if device.startswith("cuda"):
            return (machine.get("gpu") if isinstance(machine, dict) else "") or THE_GPU
        if device and device != "cpu":
            return str(device)
        if isinstance(machine, dict):
            return f"{machine['cpu'] or machine['system']}, {machine['cores']} cores"
        if isinstance(machine, str):
            return "Linux " + machine.removesuffix(", shared")  # older files
        return NOT_NAMED

    @property
    def day(self) -> str:
        """The date, without the time."""
        return str(self.record["date"][:10])

    @property
    def time(self) -> datetime.datetime | None:
        """When, where the file says more than the day."""
        text = self.record["date"]
        return datetime.datetime.fromisoformat(text) if "T" in text else None

    @property
    def commit(self) -> str:
        """The commit measured."""
        return self.record.get("commit") or "not noted"

    def same_date(self, newest: Result) -> bool:
        """Whether it is of the newest one's day, or of the 24 hours before it."""
        if self.day == newest.day:
            return True
        return bool(self.time and newest.time and newest.time - self.time < DAY)

    def where(self) -> str:
        """On what, when and of which commit it was measured, and beside which torch."""
        record = self.record
        parts = [self.machine, self.day, f"commit {self.commit}"]
        if torch := record.get("torch") or record.get("versions", {}).get("torch"):
            parts.append(f"torch {torch}")
        if "calibration" in record:
            found = [record["calibration"], *(c.get("calibration", 0) for c in of_cases(record))]
            parts.append(f"calibration {max(found):.0f} GFLOP/s")
        return ", ".join(parts)

    def beside(self, head: Result) -> str:
        """What to say of it in a table whose head names another result."""
        parts = [self.day] if self.day != head.day else []
        parts += [f"commit {self.commit}"] if parts or self.commit != head.commit else []
        return f" ({', '.join(parts)})" if parts else ""


def of_cases(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The cases that each had a calibration."""
    cases = record.get("cases", [])
    return cases if isinstance(cases, list) else []


def kept(folder: Path = RESULTS) -> list[Result]:
    """All files that have a date, the newest first; those of one day by kind."""
    found = []
    for path in sorted(folder.glob("*.json")):
        name, record = NAME.fullmatch(path.stem), json.loads(path.read_text())
        if name and "date" in record:
            found.append(Result(name["kind"], record))
    return sorted(found, key=lambda r: r.record["date"], reverse=True)


def newest(kind: str) -> dict[str, Any] | None:
    """The newest file of a kind."""
    return next((r.record for r in kept() if r.kind == kind), None)


def by_machine(results: Iterable[Result]) -> dict[str, list[Result]]:
    """The results of each machine."""
    groups: dict[str, list[Result]] = defaultdict(list)
    for one in results:
        groups[one.machine].append(one)
    return groups


def current(results: Iterable[Result]) -> list[Result]:
    """Those of each machine's newest date; what names no machine is none of them."""
    found = []
    for machine, group in by_machine(results).items():
        group = sorted(group, key=lambda r: r.record["date"], reverse=True)
        if machine != NOT_NAMED:
            kinds: dict[str, Result] = {}
            for one in group:
                if one.same_date(group[0]):
                    kinds.setdefault(one.kind, one)
            found += kinds.values()
    return found

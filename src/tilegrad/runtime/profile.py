"""Profile: what each kernel of one run took, as a table and as a trace for people.

Bytes and FLOPs are estimates of the compiler, from shapes: each array that a kernel names is read
or written once, of a gathered one what is gathered. Drivers fill the Records and say in `how` what
a time is. Invariant: `perfetto()` is Trace Event JSON, times in microseconds, one event a Record,
in order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

# Lanes of the trace.
KERNELS, RUNS = 1, 2


@dataclass(frozen=True)
class Record:
    """One kernel or copy of a run."""

    name: str
    region: str  # the ops it computes, in short
    start_us: float
    us: float
    bytes: int  # read and written, estimated
    flops: int = 0


@dataclass(frozen=True)
class Row:
    """All launches of one kernel."""

    kernel: str
    region: str
    calls: int
    us: float  # of all of them
    bytes: int
    flops: int
    percent: float  # of the bandwidth limit, 0 where none is known

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return 1e6 * self.bytes / self.us if self.us > 0 else 0.0


@dataclass(frozen=True)
class Profile:
    """The Records of one run."""

    name: str
    device: str
    how: str  # what the times are
    records: tuple[Record, ...] = field(default=())
    run_us: float = 0.0  # of the same run as it is run otherwise, kernels overlapping

    @property
    def us(self) -> float:
        """Time of all kernels, each by itself."""
        return sum(r.us for r in self.records)

    @property
    def bytes(self) -> int:
        """Bytes of all kernels."""
        return sum(r.bytes for r in self.records)

    def with_bytes(self, known: Mapping[str, float]) -> Profile:
        """The same with the bytes of a launch of the kernels whose name has a key in it: where
        shapes tell too much, as of a paged cache that is read as far as the lengths go."""
        made = [
            replace(r, bytes=int(next((b for k, b in known.items() if k in r.name), r.bytes)))
            for r in self.records
        ]
        return replace(self, records=tuple(made))

    def table(self, limit_bandwidth: float = 0.0) -> list[Row]:
        """Launches gathered by kernel, longest first; `limit_bandwidth` in bytes a second."""
        groups: dict[str, list[Record]] = {}
        for record in self.records:
            groups.setdefault(record.name, []).append(record)
        rows = []
        for name, several in groups.items():
            us, moved = sum(r.us for r in several), sum(r.bytes for r in several)
            percent = 1e8 * moved / us / limit_bandwidth if us > 0 and limit_bandwidth else 0.0
            rows.append(
                Row(
                    name,
                    several[0].region,
                    len(several),
                    us,
                    moved,
                    sum(r.flops for r in several),
                    percent,
                )
            )
        return sorted(rows, key=lambda r: -r.us)

    def text(self, limit_bandwidth: float = 0.0, rows: int = 40) -> str:
        """The table for people."""
        lines = [
            f"{self.name} on {self.device}: {len(self.records)} launches, {self.us:.1f} us by "
            f"themselves, {self.run_us:.1f} us in a run ({self.how})"
        ]
        lines.append(f"{'us':>9} {'calls':>5} {'MB':>9} {'GB/s':>7} {'limit':>6}  kernel")
        found = self.table(limit_bandwidth)
        for row in found[:rows]:
            share = f"{row.percent:5.1f}%" if limit_bandwidth else "     -"
            lines.append(
                f"{row.us:9.1f} {row.calls:5d} {row.bytes / 1e6:9.3f} "
                f"{row.rate / 1e9:7.1f} {share}  {row.kernel}  {row.region}"
            )
        if len(found) > rows:
            rest = found[rows:]
            lines.append(f"{sum(r.us for r in rest):9.1f}  {len(rest)} more kernels")
        return "\n".join(lines)

    def perfetto(self) -> dict[str, Any]:
        """Trace Event JSON, which ui.perfetto.dev opens."""
        events: list[dict[str, Any]] = [
            _named("process_name", 0, f"{self.device}: {self.name}"),
            _named("thread_name", KERNELS, "kernels"),
            _named("thread_name", RUNS, "runs"),
        ]
        for record in self.records:
            rate = 1e-3 * record.bytes / record.us if record.us > 0 else 0.0
            events.append(
                {
                    "name": record.name,
                    "cat": "kernel",
                    "ph": "X",
                    "pid": 1,
                    "tid": KERNELS,
                    "ts": record.start_us,
                    "dur": record.us,
                    "args": {
                        "region": record.region,
                        "bytes": record.bytes,
                        "flops": record.flops,
                        "GB/s": round(rate, 1),
                    },
                }
            )
        if self.records:
            last = self.records[-1]
            events.append(
                {
                    "name": self.name,
                    "cat": "run",
                    "ph": "X",
                    "pid": 1,
                    "tid": RUNS,
                    "ts": self.records[0].start_us,
                    "dur": last.start_us + last.us - self.records[0].start_us,
                    "args": {"how": self.how, "us in a run": self.run_us},
                }
            )
        return {
            "traceEvents": events,
            "displayTimeUnit": "ns",
            "otherData": {"device": self.device, "how": self.how},
        }

    def save(self, path: str | Path) -> Path:
        """Write the trace as a JSON file."""
        file = Path(path)
        file.write_text(json.dumps(self.perfetto()) + "\n")
        return file


def _named(what: str, lane: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": 1, "tid": lane, "args": {"name": name}}


def in_order(parts: Iterable[tuple[str, str, float, int, int]]) -> tuple[Record, ...]:
    """Records one after the other, of (name, region, us, bytes, flops)."""
    found, at = [], 0.0
    for name, region, us, moved, flops in parts:
        found.append(Record(name, region, at, us, moved, flops))
        at += us
    return tuple(found)


def timed(run: Callable[[], None]) -> float:
    """Microseconds that something takes."""
    start = perf_counter()
    run()
    return 1e6 * (perf_counter() - start)


def measured(
    about: tuple[str, str, str],
    parts: Iterable[tuple[str, str, int, int]],
    runs: int,
    restore: Callable[[], None],
    whole: Callable[[], float],
    each: Callable[[], Sequence[float]],
    empty: float = 0.0,
) -> Profile:
    """A Profile (its name, device and how) of `runs` runs, of whose times the median counts.

    whole() gives that of a run, each() those of its parts (name, region, bytes, FLOPs), `empty`
    more than they take; `restore` puts back what a run changed.
    """
    total, times = [], []
    for _ in range(runs):
        restore()
        total.append(whole())
        restore()
        times.append(each())
    restore()
    us = [max(0.0, median(several) - empty) for several in zip(*times)]
    records = in_order((n, r, t, b, f) for (n, r, b, f), t in zip(parts, us))
    return Profile(*about, records, median(total))


__all__ = ["Profile", "Record", "Row", "in_order", "measured", "timed"]

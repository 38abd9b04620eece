"""How every bench measures: ours and one named peer interleaved in one process.

A round times both sides, alternating which goes first; the result is the median of the rounds'
ratios (peer time / our time, so above 1 is faster than the peer). Before each case NumPy's
1024 x 1024 matmul is timed: under 80% of the best that the machine gave in this run (many tries
at its start), the case is void.
"""

from __future__ import annotations

import ctypes
import datetime
import importlib.metadata
import json
import math
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

VALID_SHARE = 0.8
RESULTS = Path(__file__).resolve().parent / "results"
Run = Callable[[], Any]


def reuse_memory() -> None:
    """Keep freed memory in the process, so that a peer without a pool reuses its outputs too."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no mapping of its own for a large block
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: give nothing back


best_gflops = [0.0]  # the most that `calibrate` found


def calibrate(repeats: int = 5) -> float:
    """GFLOP/s of NumPy's 1024 x 1024 float32 matmul, best of `repeats`."""
    random = np.random.default_rng(0)
    a = random.standard_normal((1024, 1024), np.float32)
    b, out = a.T.copy(), np.empty_like(a)
    np.matmul(a, b, out=out)
    best = min(timed(lambda: np.matmul(a, b, out=out), 1) for _ in range(repeats))
    found = 2 * 1024**3 / best / 1e9
    best_gflops[0] = max(best_gflops[0], found)
    return found


def settle() -> float:
    """The first calibration of a run, of many tries, which later ones are compared with."""
    found = calibrate(100)
    print(
        f"calibration: NumPy 1024 matmul {found:.0f} GFLOP/s; a case during which it is under "
        f"{VALID_SHARE:.0%} of the best is void"
    )
    return found


def busy(calibration: float) -> bool:
    """Whether the machine was busy while a calibration ran."""
    return calibration < VALID_SHARE * best_gflops[0]


def timed(run: Run, count: int) -> float:
    """Seconds of one of `count` calls; each includes its own synchronisation."""
    start = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - start) / count


def interleave(ours: Run, theirs: Run, rounds: int, least: float = 0.25) -> dict[str, Any]:
    """Times of both sides by round, the median ratio and its spread."""
    counts = [repeats(run, least) for run in (ours, theirs)]
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            run = (ours, theirs)[side]
            time.sleep(0.01)  # let the other side's threads stop spinning
            if rounds > 1:
                run()
            times[side].append(timed(run, counts[side]))
    ratios = sorted(b / a for a, b in zip(*times))
    return {
        "ratio": statistics.median(ratios),
        "ratio_low": ratios[0],
        "ratio_high": ratios[-1],
        "ours_seconds": statistics.median(times[0]),
        "peer_seconds": statistics.median(times[1]),
        "rounds": rounds,
    }


def repeats(run: Run, least: float) -> int:
    """How many calls take about `least` seconds; warms up on the way."""
    run()
    once = timed(run, 1)
    if once < least:
        once = min(once, *(timed(run, 1) for _ in range(2)))
    return max(1, min(10_000, math.ceil(least / max(once, 1e-9))))


def geometric_mean(values: list[float]) -> float:
    """The mean that ratios want."""
    return math.exp(sum(math.log(v) for v in values) / len(values)) if values else math.nan


def measured_at() -> str:
    """The time of a measurement, in UTC; its first ten characters are the day."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def facts(**more: Any) -> dict[str, Any]:
    """Date, machine, versions and commit, for the head of a result file."""
    return {
        "date": measured_at(),
        "machine": {
            "cpu": _cpu_name(),
            "gpu": _gpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("tilegrad", "numpy", "torch", "llvmlite")},
        },
        "commit": commit(),
        **more,
    }


def commit() -> str:
    """The commit measured, with '+' if files differ from it."""
    told = os.environ.get("TILEGRAD_COMMIT")  # where the tree is a copy without its history
    if told:
        return told

    def git(*words: str) -> str:
        found = subprocess.run(
            ["git", *words], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
        )
        return found.stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "")


def save(kind: str, record: dict[str, Any]) -> Path:
    """Write a result file bench/results/<kind>-<date>.json; what another CPU measured on that day
    stays, and this one's file has its name too."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{kind}-{record['date'][:10]}.json"
    if path.exists() and cpu_of(json.loads(path.read_text())) != cpu_of(record):
        own = re.sub(r"[^a-z0-9]+", "-", cpu_of(record).lower()).strip("-")
        path = path.with_stem(f"{path.stem}-{own}")
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def cpu_of(record: dict[str, Any]) -> str:
    """The CPU that measured, by its name, else its kind (`Linux aarch64`)."""
    return record["machine"]["cpu"] or record["machine"]["system"]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.processor()


def _gpu_name() -> str:
    """The first NVIDIA GPU's name; empty where there is none."""
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        if found := re.search(r"Model:\s*(.+)", path.read_text()):
            return found[1].strip()
    return ""

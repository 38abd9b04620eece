"""All checks on a GPU, and a record of them for bench/results.

    python tests/gpu/run_all.py --out bench/results/gpu-tests-<date>.json

Runs smoke.py, and then, some beside one another, bound_checks.py, quantised_checks.py,
cache_checks.py, packed_checks.py and sanitize.py, and sanitize.py again under compute-sanitizer's
memcheck and racecheck (attention in runs of its own) where that is on the PATH (its absence is in
the record). `--simulator` also runs the simulator's tests on hardware, which needs pytest. Ends
with a status other than 0 if anything failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SECONDS = 580.0


def environment() -> dict[str, str]:
    """The environment with the package of this checkout first."""
    path = os.pathsep.join(p for p in (str(ROOT / "src"), os.environ.get("PYTHONPATH", "")) if p)
    return {**os.environ, "PYTHONPATH": path}


def run(name: str, command: list[str], seconds: float, alone: bool = True) -> dict[str, Any]:
    """Run a command; its rows, whether it succeeded, and how long it took. What it says is shown as
    it comes if it runs alone, else when it ends."""
    if alone:
        print(f"== {name}", flush=True)
    start = time.perf_counter()
    lines: list[str] = []
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        text=True,
        bufsize=1,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as child:
        assert child.stdout is not None
        timer = threading.Timer(seconds, child.kill)
        timer.start()
        try:
            for line in child.stdout:
                if alone:
                    print(line, end="", flush=True)
                lines.append(line.rstrip().replace(f"{ROOT}/", ""))
        finally:
            timer.cancel()
            if sys.exc_info()[0] is not None:
                child.kill()
    took = time.perf_counter() - start
    good = child.returncode == 0
    if not alone:
        print("\n".join((f"== {name}", *lines)), flush=True)
    return {
        "name": name,
        "ok": good,
        "status": child.returncode,
        "seconds": round(took, 1),
        "killed": not good and took >= seconds,
        "rows": rows_of(lines),
        "tail": [] if good else lines[-40:],
    }


def rows_of(lines: list[str]) -> list[str]:
    """The lines that say how something went."""
    starts = (
        "ok",
        "FAIL",
        "SKIP",
        "========= ERROR SUMMARY",
        "========= RACECHECK SUMMARY",
        "========= LEAK SUMMARY",
    )
    ends = ("failed", "passed")
    return [x for x in lines if x.startswith(starts) or x.endswith(ends) or " passed" in x]


def commands(simulator: bool) -> list[tuple[str, list[str]]]:
    """What is run, by name."""
    sanitize = [sys.executable, str(HERE / "sanitize.py")]
    found = [
        ("smoke", [sys.executable, str(HERE / "smoke.py"), "--trials"]),
        ("bound", [sys.executable, str(HERE / "bound_checks.py")]),
        ("quantised", [sys.executable, str(HERE / "quantised_checks.py")]),
        ("cache", [sys.executable, str(HERE / "cache_checks.py")]),
        ("packed", [sys.executable, str(HERE / "packed_checks.py")]),
        ("sanitize", sanitize),
    ]
    tool = sanitizer()
    if tool:
        for kind in ("memcheck", "racecheck"):
            under = [tool, "--tool", kind, "--error-exitcode", "9", *sanitize]
            found.append((kind, [*under, "--without", "attention"]))
            found.append((f"{kind} of attention", [*under, "--only", "attention"]))
    if simulator:
        found.append(
            (
                "simulator's tests",
                [sys.executable, str(ROOT / "tests" / "ptxsim" / "ptx_device.py")],
            )
        )
    return found


def sanitizer() -> str:
    """Where compute-sanitizer is, or ''."""
    usual = Path("/usr/local/cuda/bin/compute-sanitizer")
    return shutil.which("compute-sanitizer") or (str(usual) if usual.exists() else "")


def about() -> dict[str, Any]:
    """Date, GPU, driver and commit."""
    asked = "name,driver_version,memory.total"
    try:
        said = subprocess.run(
            ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout
    except FileNotFoundError:
        said = "no nvidia-smi"
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "kind": "gpu-tests",
        "date": now.isoformat(timespec="seconds"),
        "gpus": said.strip().splitlines(),
        "commit": commit(),
        "python": sys.version.split()[0],
        "compute_sanitizer": version(sanitizer()),
    }


def version(tool: str) -> str:
    """The last line of what a tool says of its version."""
    if not tool:
        return "absent"
    said = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False).stdout
    return said.strip().splitlines()[-1] if said.strip() else "unknown"


def commit() -> str:
    """The commit that is run, '+' where files differ from it."""
    told = os.environ.get("TILEGRAD_COMMIT")  # where the tree is a copy without its history
    if told:
        return told
    said = subprocess.run(
        ["git", "describe", "--always", "--dirty=+"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    return said.stdout.strip()


def main() -> int:
    """Run everything; the number that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="", help="where the JSON goes")
    parser.add_argument("--only", action="append", default=[], help="smoke, sanitize, memcheck ...")
    parser.add_argument("--simulator", action="store_true")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="at most, for each")
    parser.add_argument("--together", type=int, default=4, help="runs beside one another")
    given = parser.parse_args()
    record = {**about(), "results": []}
    print({k: v for k, v in record.items() if k != "results"}, flush=True)
    chosen = [c for c in commands(given.simulator) if not given.only or c[0] in given.only]

    def keep(result: dict[str, Any]) -> None:
        record["results"].append(result)
        if given.out:  # after each, so that what is done is kept
            Path(given.out).write_text(json.dumps(record, indent=1) + "\n")

    for name, command in (c for c in chosen if c[0] == "smoke"):
        keep(run(name, command, given.seconds))  # it measures time
    with ThreadPoolExecutor(given.together) as pool:
        alone = given.together == 1
        others = [
            pool.submit(run, name, command, given.seconds, alone)
            for name, command in chosen
            if name != "smoke"
        ]
        for done in as_completed(others):
            keep(done.result())
    failed = [r["name"] for r in record["results"] if not r["ok"]]
    print(f"{len(record['results'])} runs, failed: {', '.join(failed) or 'none'}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(min(1, main()))

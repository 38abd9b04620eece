"""`import tilegrad` loads only what it needs, starts nothing, and is quick."""

from __future__ import annotations

import json
import subprocess
import sys

THIRD_PARTIES = {"numpy", "ml_dtypes"}
SCRIPT = """
import json, sys, threading, time
before = set(sys.modules)
start = time.perf_counter()
import tilegrad
seconds = time.perf_counter() - start
loaded = sorted({name.split(".")[0] for name in set(sys.modules) - before})
print(json.dumps({"seconds": seconds, "loaded": loaded, "threads": threading.active_count()}))
"""


def fresh(*flags: str) -> dict:
    """What a fresh process says of its import."""
    found = subprocess.run(
        [sys.executable, *flags, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    return json.loads(found.stdout)


def native_threads(script: str) -> int:
    """Threads that the system counts after a script."""
    count = "import os; print(len(os.listdir('/proc/self/task')))"
    found = subprocess.run(
        [sys.executable, "-c", f"{script}\n{count}"], capture_output=True, text=True, check=True
    )
    return int(found.stdout)


def test_only_numpy_and_ml_dtypes_are_loaded() -> None:
    loaded = set(fresh()["loaded"]) - {"tilegrad", "__editable___tilegrad_finder"}
    assert loaded - set(sys.stdlib_module_names) <= THIRD_PARTIES


def test_no_thread_is_started() -> None:
    assert fresh()["threads"] == 1
    if sys.platform.startswith("linux"):  # NumPy's own threads are not ours
        assert native_threads("import tilegrad") == native_threads("import numpy, ml_dtypes")


def test_import_time_is_shown(capsys) -> None:
    """Best of 10 with warm bytecode; the bar (0.25 s on a quiet machine) is the bench's to hold."""
    best = min(fresh()["seconds"] for _ in range(10))
    with capsys.disabled():
        print(f"\nimport tilegrad: best of 10 {best:.3f} s")

"""How the compiler's time grows with a program: long chains, many parts, many steps.

    python bench/compile_scale.py            writes bench/results/compile-scale-<date>.json
    python bench/compile_scale.py --quick    a tenth of the sizes, no file

Each program is built, compiled with an empty store and run once, in a fresh process, at a quarter,
half and all of its size. Time is that of the processor, so that a busy machine shows little; what
the first compile of a process costs (imports, LLVM) is spent before the clock starts. A program is
linear where twice the size takes no more than about twice the time: the last column.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import measure
import numpy as np

BAR = 2.6  # times the time, for twice the size
SIZES = {"chain": 50_000, "cat": 2_000, "sum": 2_000, "rnn": 400}
TITLES = {
    "chain": "elementwise ops in a row",
    "cat": "Tensors in one cat",
    "sum": "Tensors added up",
    "rnn": "steps of an RNN, and backward",
}


def chain(n: int) -> Any:
    """n elementwise ops in a row."""
    import tilegrad as tg

    x = tg.tensor(np.linspace(0, 1, 512, dtype=np.float32))
    for _ in range(n // 3):
        x = tg.sin(x * 1.01 + 0.5)
    return x.numpy()


def _many(n: int) -> list[Any]:
    import tilegrad as tg

    return [tg.tensor(np.full((4, 8), i, np.float32)) for i in range(n)]


def cat(n: int) -> Any:
    """n Tensors behind one another."""
    import tilegrad as tg

    return tg.cat(_many(n)).numpy()


def total(n: int) -> Any:
    """The sum of n Tensors."""
    return sum(_many(n)).numpy()  # type: ignore[attr-defined]


def rnn(n: int) -> Any:
    """n steps of a recurrent network, and the gradients of its weights."""
    import tilegrad as tg

    random = np.random.default_rng(0)
    x = tg.tensor(random.standard_normal((n, 4, 16), np.float32))
    w = tg.tensor(random.standard_normal((16, 16), np.float32) / 8, requires_grad=True)
    b = tg.zeros(16, requires_grad=True)
    h = tg.zeros(4, 16)
    for i in range(n):
        h = tg.tanh(h @ w + x[i] + b)
    h.sum().backward()
    return w.grad.numpy(), b.grad.numpy()


PROGRAMS: dict[str, Callable[[int], Any]] = {"chain": chain, "cat": cat, "sum": total, "rnn": rnn}


def one(name: str, n: int) -> dict[str, Any]:
    """Processor seconds of a program at a size, and what was compiled."""
    from tilegrad.compiler.compile import counters

    PROGRAMS[name](4)
    before = dict(counters)
    wall, start = time.perf_counter(), time.process_time()
    PROGRAMS[name](n)
    seconds = time.process_time() - start
    made = {key: counters[key] - before[key] for key in counters}
    return {"size": n, "seconds": seconds, "wall": time.perf_counter() - wall, **made}


def fresh(name: str, n: int) -> dict[str, Any]:
    """`one` in a process of its own, with an empty store."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TILEGRAD_CACHE": folder, "TILEGRAD_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, __file__, "--one", name, str(n)],
            check=True,
            capture_output=True,
            text=True,
            env=environment,
        )
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main() -> int:
    """Measure all programs; 1 if one is not linear."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--one", nargs=2)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(one(given.one[0], int(given.one[1]))))
        return 0
    rows: dict[str, Any] = {}
    print(f"{'':34}{'n/4':>9}{'n/2':>9}{'n':>9}   twice the size takes")
    for name, size in SIZES.items():
        size = size // 10 if given.quick else size
        found = [fresh(name, n) for n in (size // 4, size // 2, size)]
        times = [f["seconds"] for f in found]
        ratio = times[2] / times[1]
        rows[name] = {"runs": found, "ratio": ratio, "linear": ratio <= BAR}
        shown = "".join(f"{t:8.2f}s" for t in times)
        print(f"{size:>7} {TITLES[name]:26}{shown}   {ratio:.2f} x", flush=True)
    if not given.quick:
        print(measure.save("compile-scale", measure.facts(bar=BAR, programs=rows)))
    return 0 if all(row["linear"] for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

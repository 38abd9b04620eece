"""Two trees of this repository beside each other on a CPU: the CPU table, compile time, import.

    python bench/beside.py OLD               OLD: the root of another checkout; 15 rounds
    python bench/beside.py OLD --only conv   cases of bench/cpu.py whose name holds the word
    python bench/beside.py OLD --skip cases  without the CPU table (or: compile, import)

Both trees run the cases of this tree's bench/cpu.py (public API alone), each in a process of its
own that lives through the run; a round times one after the other, alternating which goes first.
A ratio is old time / new time: above 1 the new tree is faster. The bar of the project: no
geometric mean of a group under 0.95; compile, import and the jitted call no longer than before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compile_time
import measure

HERE = Path(__file__).resolve().parent
GROUP_BAR, TIME_BAR = 0.95, 1.05
LEAST = 0.05  # seconds of one timing
SIDES = ("old", "new")
IMPORT = "import time; t = time.perf_counter(); import tilegrad; print(time.perf_counter() - t)"


def environment(tree: Path, cache: str) -> dict[str, str]:
    """The environment of a process that imports tilegrad from `tree`."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPATH": str(tree / "src"), "TILEGRAD_CACHE": cache}


# ---- a process of one tree ------------------------------------------------------------------


def worker(quick: bool) -> None:
    """Answer lines of commands: `names`, `make N`, `time`. Each answer is a line of JSON."""
    import cpu
    import torch

    import tilegrad

    # Peers are not timed here, and compiling them would take most of the run.
    torch.compile = lambda function: function  # type: ignore[assignment]
    answers, sys.stdout = sys.stdout, sys.stderr
    measure.reuse_memory()
    torch.set_num_threads(cpu.THREADS)
    tilegrad.set_threads(cpu.THREADS)
    cases = [case for family in cpu.FAMILIES for case in family(quick)]
    ours: Any = None
    count = 0
    for line in sys.stdin:
        command, *rest = line.split()
        answer: Any = None
        if command == "names":
            answer = [(case.name, case.group) for case in cases]
        elif command == "make":
            ours = cases[int(rest[0])].make()[0]
            count = measure.repeats(ours, LEAST)
        elif command == "time":
            ours()
            answer = measure.timed(ours, count)
        print(json.dumps(answer), file=answers, flush=True)


class Tree:
    """One tree's worker."""

    def __init__(self, root: Path, cache: str, quick: bool) -> None:
        command = [sys.executable, str(HERE / "beside.py"), str(root), "--worker"]
        self.process = subprocess.Popen(
            command + ["--quick"] * quick,
            env=environment(root, cache),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, command: str) -> Any:
        """Send one command, wait for its answer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"the worker ended at {command!r}")
        return json.loads(answer)

    def close(self) -> None:
        """End the worker."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


# ---- the parts ------------------------------------------------------------------------------


def order(number: int) -> tuple[int, int]:
    """Which side goes first in a round."""
    return (0, 1) if number % 2 == 0 else (1, 0)


def summary(times: list[list[float]]) -> dict[str, float]:
    """Medians of both sides, the median ratio and its spread."""
    ratios = sorted(a / b for a, b in zip(*times, strict=True))
    return {
        "old_seconds": statistics.median(times[0]),
        "new_seconds": statistics.median(times[1]),
        "ratio": statistics.median(ratios),
        "ratio_low": ratios[0],
        "ratio_high": ratios[-1],
    }


def cases(trees: list[Path], rounds: int, only: list[str], quick: bool) -> Iterator[dict[str, Any]]:
    """The CPU table, a row a case."""
    with tempfile.TemporaryDirectory() as folder:
        pair = [Tree(t, f"{folder}/{s}", quick) for t, s in zip(trees, SIDES, strict=True)]
        for number, (name, group) in enumerate(pair[1].ask("names")):
            if only and not any(word in name for word in only):
                continue
            for tree in pair:
                tree.ask(f"make {number}")
            times: list[list[float]] = [[], []]
            for turn in range(rounds):
                for side in order(turn):
                    times[side].append(pair[side].ask("time"))
            yield {"name": name, "group": group, **summary(times)}
        for tree in pair:
            tree.close()


def compiles(trees: list[Path], rounds: int, quick: bool) -> dict[str, Any]:
    """Cold and warm compile time of the training step of bench/compile_time.py."""
    size = compile_time.SMALL if quick else compile_time.FULL
    times: dict[str, list[list[float]]] = {"cold": [[], []], "warm": [[], []]}
    for number in range(rounds):
        for side in order(number):
            with tempfile.TemporaryDirectory() as cache:
                for kind in ("cold", "warm"):
                    command = [sys.executable, str(HERE / "compile_time.py"), "--child", "run"]
                    found = subprocess.run(
                        [*command, json.dumps(size)],
                        env=environment(trees[side], cache),
                        capture_output=True,
                        text=True,
                        check=True,
                    )
                    answer = json.loads(found.stdout.splitlines()[-1])
                    times[kind][side].append(answer["compile_seconds"])
    return {kind: summary(found) for kind, found in times.items()}


def imports(trees: list[Path], rounds: int) -> dict[str, Any]:
    """The import of tilegrad in a fresh process."""
    times: list[list[float]] = [[], []]
    for number in range(-1, rounds):  # the first writes the bytecode
        for side in order(number):
            found = subprocess.run(
                [sys.executable, "-c", IMPORT],
                env=environment(trees[side], ""),
                capture_output=True,
                text=True,
                check=True,
            )
            if number >= 0:
                times[side].append(float(found.stdout))
    return {"import": summary(times)}


def groups(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The geometric mean of each group of cases, and its least ratio."""
    found = []
    for group in dict.fromkeys(r["group"] for r in rows):
        ratios = [r["ratio"] for r in rows if r["group"] == group]
        mean = measure.geometric_mean(ratios)
        found.append({"group": group, "mean": mean, "least": min(ratios), "met": mean >= GROUP_BAR})
    return found


def line(name: str, row: dict[str, Any]) -> str:
    """One row for people."""
    return (
        f"{name:36} {row['ratio']:6.3f} [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]  "
        f"old {1e3 * row['old_seconds']:10.3f} ms  new {1e3 * row['new_seconds']:10.3f} ms"
    )


def main() -> None:
    """Run the parts, print them, write the file; ends with 1 where one is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, help="the root of the other checkout")
    parser.add_argument("--only", action="append", default=[], help="cases whose name holds this")
    parser.add_argument(
        "--skip", action="append", default=[], choices=("cases", "compile", "import")
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compiles", type=int, default=3, help="rounds of compile time")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that all runs")
    parser.add_argument("--out", type=Path, help="the result file (default: by kind and date)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.quick)
        return
    trees = [options.old.resolve(), HERE.parent]
    times: dict[str, Any] = {}
    if "import" not in options.skip:
        times |= imports(trees, options.rounds)
    if "compile" not in options.skip:
        times |= compiles(trees, options.compiles, options.quick)
    for name, row in times.items():
        row["met"] = row["new_seconds"] <= TIME_BAR * row["old_seconds"]
        print(line(name, row) + ("" if row["met"] else "  MISSED"), flush=True)
    rows = []
    if "cases" not in options.skip:
        for row in cases(trees, options.rounds, options.only, options.quick):
            rows.append(row)
            print(line(row["name"], row), flush=True)
    found = groups(rows)
    for v in found:
        verdict = "met" if v["met"] else "MISSED"
        print(f"{v['group']}: mean {v['mean']:.3f}, least {v['least']:.3f}: {verdict}")
    record = measure.facts(kind="beside", times=times, cases=rows, groups=found)
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    elif not options.quick:
        print(f"written: {measure.save('beside', record)}")
    sys.exit(0 if all(one["met"] for one in (*times.values(), *found)) else 1)


if __name__ == "__main__":
    main()

"""Random programs, compared with torch: values and gradients on the CPU, and programs for GPUs.

    python bench/fuzz.py --seconds 600             a seed from the clock; it is printed
    python bench/fuzz.py --seconds 600 --seed 7    the same programs again
    python bench/fuzz.py --seed 7 --only 123       one program, with its text

Each program (tests/tensor/random_programs.py) is run lazily, value by value or jitted, with the
gradients of its float arguments; some are also scheduled, emitted, assembled and simulated for
sm_80 and sm_90a, with the Graph interpreter as the judge. Programs run in a child process, so a
crash or a hang is a find like any other. A find is shrunk to the lines that it needs and printed;
the exit status says whether there was any.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
sys.path[:0] = [str(TESTS / name) for name in ("ir", "graph", "tensor", "schedule", "targets")]

HANGS = 400.0  # seconds of one program on one machine
GPUS = ("sm_80", "sm_90a")
ROUNDS = 60  # tries to make a find smaller


# ---- one program --------------------------------------------------------------------------------


def check(program: Any, way: str) -> str:
    """How a program fails on the CPU; '' where it does not."""
    from differential import compare_with_torch

    try:
        return compare_with_torch(program, way)
    except Exception as failure:
        return f"{type(failure).__name__}: {first_line(failure)}"


def check_gpu(program: Any, names: list[str]) -> str:
    """How a program fails as programs for GPUs."""
    from differential import compiled_for_gpus

    try:
        return compiled_for_gpus(program, names)
    except Exception as failure:
        return f"{type(failure).__name__}: {first_line(failure)}"


def first_line(failure: Exception) -> str:
    """What an error says first."""
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return " ".join(lines[:4])[:400]


def shrink(program: Any, fails: Callable[[Any], str]) -> Any:
    """The same failure with fewer lines: one result, and values as leaves instead of computed."""
    from random_programs import Program

    kind = fails(program).split(":")[0]
    left = ROUNDS

    def still(smaller: Program) -> bool:
        nonlocal left
        left -= 1
        return left >= 0 and bool(smaller.lines) and fails(smaller).split(":")[0] == kind

    for output in program.outputs:
        smaller = program.slice([output])
        if len(program.outputs) > 1 and still(smaller):
            program = smaller
            break
    changed = True
    while changed and left > 0:
        changed = False
        for smaller in cut(program):
            if len(smaller.lines) < len(program.lines) and still(smaller):
                program, changed = smaller, True
                break
    return program


def cut(program: Any) -> Iterator[Any]:
    """Programs in which one value is given instead of computed."""
    import torch
    from random_programs import Leaf, Program, names_stored

    values = program.run(torch, torch.nn.functional, [leaf.torch() for leaf in program.leaves])
    for at in range(len(program.lines) - 1, -1, -1):
        (name,) = names_stored(program.lines[at])
        if name in program.outputs and len(program.outputs) == 1:
            continue
        value = values[name].detach()
        dtype = str(value.dtype).removeprefix("torch.")
        wide = value.double() if value.is_floating_point() else value
        lines = [line for i, line in enumerate(program.lines) if i != at]
        outputs = [o for o in program.outputs if o != name]
        leaves = [*program.leaves, Leaf(name, dtype, wide.numpy())]
        yield Program(leaves, lines, outputs).slice(outputs)


def one(seed: int, number: int) -> tuple[Any, str]:
    """A program by its number, and the way in which it is run."""
    from random_programs import make

    lines = (3, 6, 10, 16)[number % 4]
    return make((seed, number), lines), ("lazy", "jit", "steps")[number % 3]


# ---- the child ----------------------------------------------------------------------------------


def child(seed: int, first: int, seconds: float, step: int, gpu_share: float) -> None:
    """Run programs from `first` on, every step-th, and say what happened, a line each."""
    start = time.perf_counter()
    spent = 0.0  # on GPUs
    number = first
    while time.perf_counter() - start < seconds:
        program, way = one(seed, number)
        say({"begin": number})
        wrong = judge(number, program, way, lambda p, way=way: check(p, way))
        on_gpus = not wrong and spent < gpu_share * (time.perf_counter() - start)
        begun = time.perf_counter()
        for name in GPUS if on_gpus else ():
            say({"begin": number})
            judge(number, program, name, lambda p, name=name: check_gpu(p, [name]))
        spent += time.perf_counter() - begun
        say({"done": number, "lines": len(program.lines), "gpu": on_gpus})
        number += step


def judge(number: int, program: Any, way: str, fails: Callable[[Any], str]) -> bool:
    """Whether a program fails; how, and its smallest part that does, is said."""
    failure = fails(program)
    if failure:
        say({"find": number, "way": way, "failure": failure})
        smaller = shrink(program, fails)
        say({"shrunk": number, "text": str(smaller), "failure": fails(smaller)})
    return bool(failure)


def say(what: dict[str, Any]) -> None:
    """One line for the parent."""
    print("fuzz " + json.dumps(what), flush=True)


# ---- the parent ---------------------------------------------------------------------------------


class Runs:
    """Counts what the children say, and prints finds."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.finds: dict[tuple[int, str], str] = {}

    def hear(self, told: dict[str, Any]) -> None:
        """One line of a child."""
        if "find" in told:
            self.finds[told["find"], told["way"]] = told["failure"]
            print(f"FOUND in program {told['find']} ({told['way']}): {told['failure']}", flush=True)
        elif "shrunk" in told:
            print(f"shrunk: {told['failure']}\n{told['text']}\n", flush=True)
        elif "done" in told:
            self.counts["programs"] += 1
            self.counts["lines"] += told["lines"]
            self.counts["for GPUs"] += told["gpu"]

    def died(self, number: int, why: str) -> None:
        """A child ended in the middle of a program."""
        self.finds[number, "process"] = why
        print(f"FOUND in program {number}: {why}", flush=True)


def follow(given: argparse.Namespace, seed: int, worker: int, runs: Runs) -> None:
    """Keep one child running for so long; it begins anew after a program that ended it."""
    start, number, workers = time.perf_counter(), worker, given.workers
    while (left := given.seconds - (time.perf_counter() - start)) > 1:
        arguments = [str(x) for x in (seed, number, left, workers, given.gpu_share)]
        with tempfile.TemporaryDirectory() as cache:
            begun, why = run_child(arguments, cache, runs)
        if not why:
            return
        number = (number if begun is None else begun) + workers
        if begun is not None:
            runs.died(begun, why)
        else:
            print(why, flush=True)
            runs.finds[-1, "process"] = why
            return


def run_child(arguments: list[str], cache: str, runs: Runs) -> tuple[int | None, str]:
    """One child to its end: the program it was in, and why it ended ('' where it was time)."""
    command = [sys.executable, str(Path(__file__).resolve()), "--child", *arguments]
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TILEGRAD_CACHE": cache},
    )
    lines: queue.Queue[str] = queue.Queue()
    said: list[str] = []
    readers = [
        threading.Thread(target=lambda: [lines.put(x) for x in child.stdout or ()], daemon=True),
        threading.Thread(target=lambda: said.extend(child.stderr or ()), daemon=True),
    ]
    for reader in readers:
        reader.start()
    begun: int | None = None
    last = time.perf_counter()
    while readers[0].is_alive() or not lines.empty():
        try:
            line = lines.get(timeout=1)
        except queue.Empty:
            if time.perf_counter() - last > HANGS:
                child.kill()
                return begun, f"no end within {HANGS:.0f} s"
            continue
        last = time.perf_counter()
        if line.startswith("fuzz "):
            told = json.loads(line[5:])
            begun = told.get("begin", begun)
            runs.hear(told)
    status = child.wait()
    if status == 0:
        return begun, ""
    readers[1].join(5)
    return begun, f"the process ended with {status}: {''.join(said)[-600:].strip()}"


def main() -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--only", type=int, default=None, help="run and show one program")
    parser.add_argument("--gpu-share", type=float, default=0.4, help="of the time, for GPUs")
    parser.add_argument("--child", nargs=5, default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        seed, first, seconds, step, share = given.child
        child(int(seed), int(first), float(seconds), int(step), float(share))
        return 0
    seed = int(time.time()) % 1_000_000 if given.seed is None else given.seed
    if given.only is not None:
        program, way = one(seed, given.only)
        print(f"{program}\n")
        found = check(program, way) or check_gpu(program, list(GPUS))
        print(f"{way}: {found or 'right'}")
        return 1 if found else 0
    print(f"seed {seed}, {given.seconds:.0f} s, {given.workers} processes", flush=True)
    runs = Runs()
    workers = [
        threading.Thread(target=follow, args=(given, seed, i, runs)) for i in range(given.workers)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    counts = runs.counts
    print(
        f"{counts['programs']} programs of {counts['lines']} lines, {counts['for GPUs']} of them"
        f" for GPUs too, seed {seed}: {len(runs.finds)} found"
    )
    return 1 if runs.finds or not counts["programs"] else 0


if __name__ == "__main__":
    sys.exit(main())

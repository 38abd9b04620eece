"""Every Graph of the op suite as programs for GPUs: scheduled, emitted, assembled and simulated.

    python bench/gpu_ops.py                          all of them, for sm_80 and sm_90a (hours)
    python bench/gpu_ops.py --sample 200 --seed 1    some of them
    python bench/gpu_ops.py --files tensor/test_reduce.py --target sm_90a

No GPU is needed. The Graphs are those that the tests of functions of Tensors compute, with their
arguments: dtypes, odd shapes, gradients (see tests/targets/recorded.py). The judge is the Graph
interpreter. What fails is listed by kind; the exit status says whether any did.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
sys.path[:0] = [str(TESTS / name) for name in ("ir", "graph", "tensor", "schedule", "targets")]

from recorded import Case, Took, record, run_case  # noqa: E402

from tilegrad.core.target import A100, H200, Target  # noqa: E402

TARGETS = {"sm_80": A100, "sm_90a": H200}
FILES = (
    "tensor/test_elementwise.py",
    "tensor/test_reduce.py",
    "tensor/test_movement.py",
    "tensor/test_index.py",
    "tensor/test_matmul.py",
    "tensor/test_norm.py",
    "tensor/test_loss.py",
    "tensor/test_convolution.py",
    "tensor/test_attention.py",
    "tensor/test_creation.py",
    "tensor/test_gradients.py",
    "tensor/test_random.py",
    "tensor/test_transforms.py",
    "nn/test_layers.py",
)


def attempt(case: Case, target: Target) -> tuple[Took, str]:
    """What a Case took, and how it failed."""
    try:
        return run_case(case, target), ""
    except Exception as failure:
        words = [w for w in str(failure).strip().splitlines() if w.strip()]
        if isinstance(failure, AssertionError) and len(words) > 2 and "tolerance" in str(failure):
            words = ["wrong: " + " ".join(w.strip() for w in words[:4])]
        return Took(), f"{type(failure).__name__}: {words[0] if words else ''}"


def kind_of(failure: str) -> str:
    """Failures that differ in numbers alone are of one kind."""
    return re.sub(r"[-+]?\d[\d.e+-]*", "#", failure)[:140]


def main() -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=0, help="cases; 0 for all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", nargs="*", default=FILES, help="test files, below tests/")
    parser.add_argument("--target", choices=list(TARGETS), action="append", default=[])
    parser.add_argument("--seconds", type=float, default=0.0, help="stop after so many; 0: never")
    parser.add_argument("--match", default="", help="only cases whose text has this")
    parser.add_argument("--out", default="", help="where the JSON goes")
    given = parser.parse_args()
    start = time.perf_counter()
    cases = [c for c in record(given.files) if given.match in str(c)]
    print(f"{len(cases)} graphs recorded in {time.perf_counter() - start:.0f} s", flush=True)
    if given.sample and given.sample < len(cases):
        cases = random.Random(given.seed).sample(cases, given.sample)
    kinds: Counter[str] = Counter()
    rows: list[dict[str, Any]] = []
    slowest: tuple[float, str] = (0.0, "")
    done = programs = simulated = 0
    for case in cases:
        if given.seconds and time.perf_counter() - start > given.seconds:
            break
        for name in given.target or TARGETS:
            took, failure = attempt(case, TARGETS[name])
            done, programs = done + 1, programs + took.programs
            simulated += took.simulated
            slowest = max(slowest, (took.seconds, f"{name} {case}"))
            if failure:
                kinds[f"{name} {kind_of(failure)}"] += 1
                rows.append({"target": name, "case": str(case), "failure": failure})
                print(f"FAILED {name} {case}\n    {failure[:300]}", flush=True)
    print(
        f"{done} runs of {len(cases)} graphs, {simulated} simulated, {programs} programs,"
        f" {time.perf_counter() - start:.0f} s; the slowest in ptxas: {slowest[0]:.2f} s"
        f" {slowest[1][:120]}"
    )
    for kind, count in kinds.most_common():
        print(f"{count:5d} {kind}")
    print(f"{len(rows)} failed")
    if given.out:
        Path(given.out).write_text(json.dumps({"failures": rows, "runs": done}, indent=1) + "\n")
    return 1 if rows else 0


if __name__ == "__main__":
    sys.exit(main())

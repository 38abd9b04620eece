"""bf16 matrix products by the matrix units of a warp (what an A100 has) beside cuBLAS.

    python bench/gemm_sm80.py             the model's choice for each case, interleaved
    python bench/gemm_sm80.py --sweep     every Plan of a small space for each case, best first
    python bench/gemm_sm80.py --cases square,tall

On a machine with wider matrix units the kernel is held to those of a warp by a Target without
the wider ones. Results are checked against a float32 product first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "kernels"))

from gemm import LAYERS, Case
from product_bodies import thread_matmul
from verdict import end, verdict, wrong

from gpu import Bench
from tilegrad.core.dtype import bfloat16
from tilegrad.core.target import A100, Target
from tilegrad.kernels.matmul.shape import Operands
from tilegrad.kernels.matmul.threads_matmul import (
    ThreadPlan,
    expected,
    ranked_threads,
    shared_bytes,
)
from tilegrad.tile.build import fill

BAR = 0.6  # of cuBLAS
CASES = {
    "square": (4096, 4096, 4096),
    "tall": (8192, 4096, 4096),
    **{name: (2048, n, k) for name, (n, k) in LAYERS.items()},
}
SHAPES = (  # tile, warps, stages that may fit, pieces of the result
    ((128, 256, 64), (2, 4), (3, 4), (128, 64)),
    ((256, 128, 64), (4, 2), (3, 4), (128, 64)),
    ((128, 256, 32), (2, 4), (5, 8), (128, 64)),
    ((256, 128, 32), (4, 2), (5, 8), (128, 64)),
    ((128, 128, 64), (2, 2), (3,), (64, 64)),
    ((128, 128, 32), (2, 2), (4, 5), (64, 64)),
)


def held(target: Target) -> Target:
    """The machine with the matrix units of a warp alone."""
    return replace(target, name=f"{target.name}-warps", matrix=A100.matrix)


def plans(x: Operands, target: Target) -> Iterator[ThreadPlan]:
    """The space of a sweep."""
    most = target.memories["shared"].bytes
    for tile, warps, stages, staged in SHAPES:
        rows = (2048 // tile[0], 1024 // tile[0])
        for count, group in itertools.product(stages, rows):
            plan = ThreadPlan(tile, warps, count, group, staged)
            if shared_bytes(x, plan) - 1024 > most:
                continue
            yield plan
            if 32 * warps[0] * warps[1] == 256 and count - 1 <= x.k // tile[2]:
                yield replace(plan, programs=target.cores)


def label(plan: ThreadPlan) -> str:
    """A Plan in a few characters."""
    return (
        f"{'x'.join(map(str, plan.tile))} w{plan.warps[0]}x{plan.warps[1]} s{plan.stages}"
        f" g{plan.group} out{plan.staged[0]}x{plan.staged[1]} p{plan.programs}"
    )


def launches(bench: Bench, case: Case, plan: ThreadPlan) -> list[Any]:
    """Launches of our kernel with a Plan."""
    body = fill(thread_matmul(case.operands, plan), "epilogue", lambda b, given, added: given[0])
    kernel = bench.kernel(body, "matmul")

    def launch(i: int) -> None:
        kernel.point((case.x[i].data_ptr(), case.w[i].data_ptr(), case.y[i].data_ptr()))
        kernel.start()

    return [lambda i=i: launch(i) for i in range(len(case.x))]


def sweep(bench: Bench, names: list[str], count: int) -> dict[str, Any]:
    """Every Plan for every case, best first."""
    rows: dict[str, Any] = {}
    target = held(bench.target)
    for name in names:
        m, n, k = CASES[name]
        case = Case(bench, m, n, k)
        base, found = bench.alone(case.theirs()), []
        for plan in itertools.islice(plans(case.operands, target), count):
            try:
                ours = launches(bench, case, plan)
                error = case.error(ours[0])
                found.append(
                    (bench.alone(ours), label(plan), error, expected(case.operands, plan, target))
                )
            except Exception as failure:  # one Plan that fails must not end the sweep
                print(f"  {label(plan)}: {type(failure).__name__} {str(failure)[:300]}")
        print(
            f"{name} {m}x{n}x{k}: cuBLAS {1e6 * base:.1f} us"
            f" ({2 * m * n * k / base / 1e12:.0f} TFLOP/s)"
        )
        for seconds, text, error, hoped in sorted(found):
            print(
                f"  {base / seconds:.3f}x {1e6 * seconds:8.1f} us"
                f" {2 * m * n * k / seconds / 1e12:5.0f} TFLOP/s  {text:46}"
                f" expected {1e6 * hoped:.1f} error {error:.1e}"
                f"{wrong(error < 1e-2)}",
                flush=True,
            )
        rows[name] = [(text, base / seconds, error) for seconds, text, error, _ in sorted(found)]
    best(rows)
    return rows


def best(rows: dict[str, Any]) -> None:
    """Plans by their least share of cuBLAS over all cases."""
    shares: dict[str, list[float]] = {}
    for found in rows.values():
        for text, share, error in found:
            shares.setdefault(text, []).append(share if error < 1e-2 else 0.0)
    whole = [(min(s), text) for text, s in shares.items() if len(s) == len(rows)]
    for least, text in sorted(whole, reverse=True)[:8]:
        print(f"least {least:.3f} of cuBLAS over {len(rows)} cases: {text}")


def chosen(bench: Bench, names: list[str]) -> list[dict[str, Any]]:
    """The model's choice for every case, interleaved with cuBLAS."""
    rows, target = [], held(bench.target)
    for name in names:
        m, n, k = CASES[name]
        case = Case(bench, m, n, k, bfloat16)
        plan = ranked_threads(case.operands, target)[0].plan
        ours = launches(bench, case, plan)
        error = case.error(ours[0])
        found = bench.interleave(ours, case.theirs())
        rate = 2e-6 * m * n * k / found["ours_us"]
        rows.append(
            {
                "case": name,
                "m": m,
                "n": n,
                "k": k,
                "error": error,
                "plan": label(plan),
                "tflops": rate,
                **found,
            }
        )
        print(
            f"{name:8} {found['ratio']:.3f}x [{found['ratio_low']:.3f},"
            f" {found['ratio_high']:.3f}] ours {found['ours_us']:8.1f} us cuBLAS"
            f" {found['peer_us']:8.1f} us {rate:5.0f} TFLOP/s {label(plan)} error {error:.1e}"
            f"{wrong(error < 1e-2)}",
            flush=True,
        )
    worst = min(r["ratio"] for r in rows)
    print(f"least {worst:.3f} of cuBLAS (bar {BAR}): {verdict(worst >= BAR)}")
    return rows


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--plans", type=int, default=64, help="of a sweep, for each case")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--out", default="", help="where the JSON goes")
    given = parser.parse_args()
    bench = Bench()
    names = given.cases.split(",")
    rows = sweep(bench, names, given.plans) if given.sweep else chosen(bench, names)
    if given.out:
        Path(given.out).write_text(json.dumps({**bench.about(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
    end()

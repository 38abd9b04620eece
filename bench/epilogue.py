"""Matrix products with fused epilogues beside our plain product of the same size.

    python bench/epilogue.py                      bias, residual and gate at every M
    python bench/epilogue.py --case gate --sizes 64,2048

Everything is jitted Tensor code and so goes through the scheduler; the rows say how many kernels
each became. The plain product that a case is held to has as many columns in all: `gate` is
silu(x @ w) * (x @ u) with two weights of n columns, against one product with 2n. At most 3% more
time is the bar. Results are checked against float32 first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as TF
from jitted import Launches
from verdict import end, failures, verdict, wrong

import tilegrad as tg
import tilegrad.nn.functional as F
from gpu import Bench, sets

SIZES, COLUMNS, DEPTH = (1, 64, 512, 2048, 8192), 14336, 4096
MOST = 1.03  # of the plain product's time
GRAPH = 8  # launches in a graph, at least


def numbers(*shape: int) -> Any:
    """Random bf16 numbers; weights are scaled so that products stay near 1."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def weight(n: int, k: int) -> Any:
    return numbers(n, k).mul_(k**-0.5)


@dataclass(frozen=True)
class Case:
    """An epilogue: ours, the same in torch, its inputs, and columns of all its weights over n."""

    ours: Callable[..., Any]
    peer: Callable[..., Any]
    inputs: Callable[[int, int, int], tuple[Any, ...]]
    weights: int = 1


CASES: dict[str, Case] = {
    "bias": Case(
        lambda x, w, b: F.linear(x, w, b),
        lambda x, w, b: TF.linear(x, w, b),
        lambda m, n, k: (numbers(m, k), weight(n, k), numbers(n)),
    ),
    "residual": Case(
        lambda x, w, r: r + F.linear(x, w),
        lambda x, w, r: r + TF.linear(x, w),
        lambda m, n, k: (numbers(m, k), weight(n, k), numbers(m, n)),
    ),
    "gate": Case(
        lambda x, w, u: F.silu(F.linear(x, w)) * F.linear(x, u),
        lambda x, w, u: TF.silu(TF.linear(x, w)) * TF.linear(x, u),
        lambda m, n, k: (numbers(m, k), weight(n, k), weight(n, k)),
        2,
    ),
}
PLAIN = Case(
    lambda x, w: F.linear(x, w),
    lambda x, w: TF.linear(x, w),
    lambda m, n, k: (numbers(m, k), weight(n, k)),
)


def bound(bench: Bench, case: Case, m: int, n: int, k: int) -> tuple[list[Launches], float]:
    """Our launches over several sets of inputs, and the relative error of the first."""
    count = sets(2 * (m * k + case.weights * n * k + m * n))
    inputs = [case.inputs(m, n, k) for _ in range(count)]
    torch.cuda.synchronize()
    function = tg.jit(case.ours)
    made = [Launches(bench.device, function, *(tg.from_torch(t) for t in one)) for one in inputs]
    (result,) = made[0].results
    result.torch().fill_(float("nan"))
    torch.cuda.synchronize()
    made[0]()
    bench.device.synchronize()
    found = result.torch()
    torch.backends.cuda.matmul.allow_tf32 = False
    wanted = case.peer(*(t.float() for t in inputs[0]))
    error = float((found.float() - wanted).norm() / wanted.norm())
    return made * -(-GRAPH // count), error


def measure(bench: Bench, name: str, m: int, n: int, k: int) -> dict[str, Any]:
    """One case at one M, interleaved with the plain product."""
    case = CASES[name]
    fused, error = bound(bench, case, m, n, k)
    plain, plain_error = bound(bench, PLAIN, m, n * case.weights, k)
    right = error < 1e-2 and plain_error < 1e-2
    row: dict[str, Any] = {
        "case": name,
        "m": m,
        "n": n,
        "k": k,
        "kernels": fused[0].kernels,
        "programs": fused[0].programs,
        "plain_kernels": plain[0].kernels,
        "plain_programs": plain[0].programs,
        "error": error,
        "right": right,
        "met": False,
    }
    if right:
        row |= bench.interleave(fused, plain)
        row["plain_us"] = row.pop("peer_us")
        row["share"] = 1 / row["ratio"]  # of the plain product's time
        row["met"] = row["share"] <= MOST
    return row


def show(row: dict[str, Any]) -> None:
    """One line."""
    head = (
        f"{row['case']:9} m={row['m']:<5} {row['kernels']} kernels (plain"
        f" {row['plain_kernels']}) error {row['error']:.1e}"
    )
    if not row["right"]:
        print(f"{head}{wrong(False)}", flush=True)
        return
    print(
        f"{head} {row['ours_us']:8.1f} us, plain {row['plain_us']:8.1f} us:"
        f" {100 * (row['share'] - 1):+.1f}% [{100 * (1 / row['ratio_high'] - 1):+.1f},"
        f" {100 * (1 / row['ratio_low'] - 1):+.1f}] (at most +{100 * (MOST - 1):.0f}%):"
        f" {verdict(row['met'])}",
        flush=True,
    )


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", choices=list(CASES), default=[])
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="M, comma-separated")
    parser.add_argument("--columns", type=int, default=COLUMNS)
    parser.add_argument("--depth", type=int, default=DEPTH)
    parser.add_argument("--out", default="", help="where the JSON goes")
    given = parser.parse_args()
    bench = Bench()
    ceilings = bench.ceilings()
    print(bench.device, {k: f"{v:.3e}" for k, v in ceilings.items()}, flush=True)
    rows = []
    for name in given.case or CASES:
        for m in map(int, given.sizes.split(",")):
            try:
                row = measure(bench, name, m, given.columns, given.depth)
                show(row)
            except Exception as failure:  # one case that fails must not end the others
                row = {"case": name, "m": m, "failed": f"{type(failure).__name__}: {failure}"}
                print(f"{name:9} m={m:<5} FAILED {row['failed'][:1000]}", flush=True)
                failures.append("FAILED")
            rows.append(row)
    missed = [f"{r['case']} m={r['m']}" for r in rows if not r.get("met")]
    print(f"{len(rows)} cases, missed: {', '.join(missed) or 'none'}")
    if given.out:
        record = {"kind": "epilogue", **bench.about(), **ceilings, "rows": rows}
        Path(given.out).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
    end()

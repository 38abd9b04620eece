"""Products with 2:4 weights on sparse matrix units, beside our dense ones of the same sizes.

    python bench/gemm_sparse.py                          fp8 and bf16, layers of an 8B model
    python bench/gemm_sparse.py --sweep --sizes 2048     other Plans of each case too

Weights of the dense products are not pruned, so both have the power that random numbers take.
Results are checked against a float32 product with the pruned weights first; fp8 has scales of each
token and channel in both. Bar: 2:4 fp8 at least 1.25 times as fast as dense fp8 from 2,048 tokens.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gemm import LAYERS, Case, mean, scaled_epilogue
from product_bodies import sparse_matmul
from verdict import end, verdict, wrong

from gpu import Bench
from tilegrad.core.dtype import DType, bfloat16, dtype_of, float8_e4m3, float32
from tilegrad.core.kept import words_of
from tilegrad.ir.types import Memory
from tilegrad.kernels.matmul.plan import choose, transposed
from tilegrad.kernels.matmul.shape import WidePlan
from tilegrad.kernels.matmul.table import tuned
from tilegrad.kernels.matmul.wide_sparse import choose_sparse, depth_of, plans
from tilegrad.tile.build import fill

BAR, MANY = 1.25, 2048


class Pruned(Case):
    """One product, dense and with two of every four of its weights."""

    def __init__(self, bench: Bench, m: int, n: int, k: int, dtype: DType) -> None:
        super().__init__(bench, m, n, k, dtype)
        self.whole, self.pruned, self.kept, self.words = self.w, [], [], []
        bits = torch.uint8 if self.eight else torch.int16
        for w in self.whole:
            fours = w.float().abs().view(n, k // 4, 4)
            places = fours.topk(2).indices.sort().values
            raw = w.view(bits).view(n, k // 4, 4)
            kept = raw.gather(2, places)
            self.pruned.append(
                torch.zeros_like(raw).scatter(2, places, kept).view(n, k).view(w.dtype)
            )
            self.kept.append(kept.reshape(n, k // 2).contiguous())
            found = words_of(
                places.to(torch.uint8).cpu().numpy().reshape(n, -1), dtype.size, depth_of(dtype)
            )
            self.words.append(torch.from_numpy(found).cuda())

    def sparse(self, plan: WidePlan) -> list[Any]:
        """Launches of the sparse kernel with a Plan."""
        x = transposed(replace(self.operands, sparse=True))
        more: tuple[tuple[str, Memory], ...] = ()
        if self.eight:
            sizes = ((x.m, "rows"), (x.n, "columns"))
            more = tuple((name, Memory((size,), float32, use="value")) for size, name in sizes)
        body = fill(sparse_matmul(x, plan), "epilogue", scaled_epilogue(x, more), more)
        kernel = self.bench.kernel(body, "sparse_matmul")

        def launch(i: int) -> None:
            scales = self.scales[::-1] if self.eight else []
            given = (self.kept[i], self.x[i], self.y[i], self.words[i], *scales)
            kernel.point(tuple(t.data_ptr() for t in given))
            kernel.start(dependent=True)

        return [lambda i=i: launch(i) for i in range(len(self.x))]

    def sparse_error(self, run: Any) -> float:
        """Relative error of a sparse product."""
        self.w = self.pruned
        found = self.error(run)
        self.w = self.whole
        return found


def other_plans(plan: WidePlan) -> Iterator[WidePlan]:
    """Plans near one: alone or in pairs, fewer stages, other orders of tiles, all cores."""
    for cluster in (1, 2):
        each = plan.programs // plan.cluster * plan.cluster
        for programs in dict.fromkeys((each, 132)):
            for group in (4, 8, 16):
                yield replace(plan, cluster=cluster, programs=programs, group=group)
    yield replace(plan, stages=plan.stages - 1)
    yield replace(plan, early=not plan.early)


def measure(bench: Bench, name: str, m: int, dtype: DType, sweep: bool) -> dict[str, Any]:
    """One case: checked, then interleaved with the dense product."""
    n, k = LAYERS[name]
    case = Pruned(bench, m, n, k, dtype)
    dense = tuned(case.operands, bench.target) or choose(case.operands, bench.target)
    choice = choose_sparse(replace(case.operands, sparse=True), bench.target)
    assert choice is not None
    theirs, ours = case.ours(dense.plan, dense.turned), case.sparse(choice.plan)
    error = case.sparse_error(ours[0])
    found = bench.interleave(ours, theirs)
    flops = 2 * m * n * k / (found["ours_us"] * 1e-6) / 1e12
    row = {"layer": name, "m": m, "n": n, "k": k, "dtype": dtype.name, "error": error, **found}
    row |= {"tflops": flops, "plan": str(choice.plan), "expected_us": 1e6 * choice.seconds}
    print(
        f"{dtype.name:12} {name:8} m={m:<5} n={n:<6} k={k:<6} {row['ratio']:.3f}x"
        f" [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}] 2:4 {row['ours_us']:8.1f} us"
        f" dense {row['peer_us']:8.1f} us expected {row['expected_us']:7.1f} {flops:5.0f} TFLOP/s"
        f" (of the dense product) error {error:.1e}{wrong(error < 1e-2)}",
        flush=True,
    )
    known = [choice.plan, *plans(replace(case.operands, sparse=True), bench.target)]
    for plan in dict.fromkeys([*known, *other_plans(choice.plan)]) if sweep else ():
        try:
            runs = case.sparse(plan)
            off = case.sparse_error(runs[0])
            seconds = bench.alone(runs)
            print(
                f"    {1e6 * seconds:8.1f} us {'x'.join(map(str, plan.tile))} s{plan.stages}"
                f" p{plan.programs} g{plan.group} c{plan.cluster} e{plan.early:d}"
                f" error {off:.1e}{wrong(off < 1e-2)}",
                flush=True,
            )
        except Exception as failure:  # one Plan that fails must not end the sweep
            print(f"    {plan}: {type(failure).__name__} {str(failure)[:200]}")
    return row


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--sizes", default="16,128,512,2048,8192")
    parser.add_argument("--dtypes", default=f"{float8_e4m3.name},{bfloat16.name}")
    parser.add_argument("--out", default="", help="where the JSON goes")
    given = parser.parse_args()
    bench = Bench()
    ceilings = bench.ceilings()
    print(bench.device, {k: f"{v:.3e}" for k, v in ceilings.items()}, flush=True)
    rows = [
        measure(bench, name, int(m), dtype_of(dtype), given.sweep)
        for dtype in given.dtypes.split(",")
        for name in given.layers.split(",")
        for m in given.sizes.split(",")
    ]
    some = [r for r in rows if r["m"] >= MANY and r["dtype"] == float8_e4m3.name]
    if some:
        met = verdict(mean(some) >= BAR)
        print(f"2:4 fp8 from {MANY} tokens: {mean(some):.3f} of dense fp8 (bar {BAR}): {met}")
    if given.out:
        Path(given.out).write_text(
            json.dumps({**bench.about(), "ceilings": ceilings, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
    end()

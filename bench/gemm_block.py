"""Products of fp8 with a scale for each block, sums promoted: ours beside torch._scaled_mm.

    python bench/gemm_block.py                            layers of an 8B model, and of DeepSeek-V3
    python bench/gemm_block.py --sweep --sizes 2048       other Plans of each case too

Weights have a scale for each 128 x 128, tokens one for each 128 columns; the peer is torch's
blockwise recipe (1 x 128, 128 x 128). Results of both are checked against a float32 product of what
is unpacked first. The last column is the fp8 product with a scale a row, whose sums are not
promoted. Bar: 0.95 of torch from 512 tokens.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gemm import LAYERS, Case, mean, plans
from product_bodies import block_matmul
from verdict import end, verdict, wrong

from gpu import Bench
from tilegrad.core.dtype import float8_e4m3
from tilegrad.kernels.matmul.plan import BLOCK, choose, transposed
from tilegrad.kernels.matmul.shape import WidePlan
from tilegrad.tile.build import fill

BAR, MANY = 0.95, 512
DEEPSEEK = {"q_b": (24576, 1536), "o_v3": (7168, 16384), "dense": (36864, 7168)}
ALL = {**LAYERS, **DEEPSEEK}


class InBlocks(Case):
    """One product with scales of blocks."""

    def __init__(self, bench: Bench, m: int, n: int, k: int) -> None:
        super().__init__(bench, m, n, k, float8_e4m3)
        shapes = ((m, k // BLOCK), (-(-n // BLOCK), k // BLOCK))
        self.blocks = [torch.rand(s, device="cuda") + 0.5 for s in shapes]
        self.in_blocks = replace(self.operands, scaled=True)

    def theirs(self) -> list[Any]:
        """Launches of torch's recipe: scales of tokens lie token by token."""
        first, second = self.blocks[0].t().contiguous().t(), self.blocks[1].t()
        return [
            lambda i=i: torch._scaled_mm(
                self.x[i],
                self.w[i].t(),
                first,
                second,
                out_dtype=torch.bfloat16,
                use_fast_accum=False,
                out=self.y[i],
            )
            for i in range(len(self.x))
        ]

    def promoted(self, plan: WidePlan, turned: bool) -> list[Any]:
        """Launches of our kernel with a Plan."""
        x = transposed(self.in_blocks) if turned else self.in_blocks
        body = fill(block_matmul(x, plan), "epilogue", lambda b, inputs, added: inputs[0])
        kernel = self.bench.kernel(body, "block_matmul")

        def launch(i: int) -> None:
            pair = (self.w, self.x) if turned else (self.x, self.w)
            given = (*(p[i] for p in pair), self.y[i], *self.blocks)
            kernel.point(tuple(t.data_ptr() for t in given))
            kernel.start(dependent=True)

        return [lambda i=i: launch(i) for i in range(len(self.x))]

    def wanted(self, number: int) -> torch.Tensor:
        """The product of what is unpacked, in float32."""
        first, second = (s.repeat_interleave(BLOCK, 1) for s in self.blocks)
        second = second.repeat_interleave(BLOCK, 0)[: self.n]
        return (self.x[number].float() * first) @ (self.w[number].float() * second).t()


def measure(bench: Bench, name: str, m: int, sweep: bool, count: int) -> dict[str, Any]:
    """One case: checked, then interleaved with torch's."""
    n, k = ALL[name]
    case = InBlocks(bench, m, n, k)
    choice = choose(case.in_blocks, bench.target)
    ours, theirs = case.promoted(choice.plan, choice.turned), case.theirs()
    errors = [case.error(ours[0])]
    try:
        errors.append(case.error(theirs[0]))
        found = bench.interleave(ours, theirs)
    except RuntimeError as failure:  # sizes that the recipe does not take
        print(f"    torch: {str(failure)[:200]}")
        seconds = 1e6 * bench.alone(ours)
        found = {"ours_us": seconds, "peer_us": 0.0, "ratio": 0.0, "ratio_low": 0.0}
    row_wise = choose(case.operands, bench.target)
    once = 1e6 * bench.alone(case.ours(row_wise.plan, row_wise.turned))
    flops = 2 * m * n * k / (found["ours_us"] * 1e-6) / 1e12
    floor = 1e6 * max((m * k + n * k + 2 * m * n) / 4.47e12, m * n * k / 800e12)
    row = {"layer": name, "m": m, "n": n, "k": k, "errors": errors, **found, "tflops": flops}
    row |= {"floor_us": floor, "row_scales_us": once, "plan": str(choice.plan)}
    row |= {"turned": choice.turned, "expected_us": 1e6 * choice.seconds}
    shown = ", ".join(f"{e:.1e}" for e in errors)
    print(
        f"{name:8} m={m:<5} n={n:<6} k={k:<6} {row['ratio']:.3f}x ours {row['ours_us']:8.1f} us"
        f" torch {row['peer_us']:8.1f} us floor {floor:7.1f} expected {row['expected_us']:7.1f}"
        f" {flops:5.0f} TFLOP/s errors {shown}{wrong(errors[0] < 1e-2)} by rows {once:8.1f} us",
        flush=True,
    )
    for label, plan, turned in plans(case.in_blocks, bench.target, count) if sweep else ():
        try:
            runs = case.promoted(plan, turned)
            off = case.error(runs[0])
            seconds = 1e6 * bench.alone(runs)
            print(f"    {seconds:8.1f} us {label} error {off:.1e}{wrong(off < 1e-2)}", flush=True)
        except Exception as failure:  # one Plan that fails must not end the sweep
            print(f"    {label}: {type(failure).__name__} {str(failure)[:200]}")
    return row


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--plans", type=int, default=12, help="of a sweep, for each case")
    parser.add_argument("--layers", default=",".join(ALL))
    parser.add_argument("--sizes", default="1,16,64,128,512,2048,8192")
    parser.add_argument("--out", default="", help="where the JSON goes")
    given = parser.parse_args()
    bench = Bench()
    ceilings = bench.ceilings()
    print(bench.device, {k: f"{v:.3e}" for k, v in ceilings.items()}, flush=True)
    rows = [
        measure(bench, name, int(m), given.sweep, given.plans)
        for name in given.layers.split(",")
        for m in given.sizes.split(",")
    ]
    for label, some in (
        (f"from {MANY} tokens", [r for r in rows if r["m"] >= MANY and r["ratio"]]),
        ("fewer tokens", [r for r in rows if r["m"] < MANY and r["ratio"]]),
    ):
        if some:
            met = verdict(mean(some) >= BAR)
            print(f"fp8 in blocks, {label}: {mean(some):.3f} of torch (bar {BAR}): {met}")
    if given.out:
        Path(given.out).write_text(
            json.dumps({**bench.about(), "ceilings": ceilings, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
    end()

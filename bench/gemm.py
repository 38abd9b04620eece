"""Matrix products of an LLM's layers (bf16, fp16, tf32, fp8, int8): ours beside cuBLAS by torch.

    python bench/gemm.py                  the table of layers and M
    python bench/gemm.py --sweep          every Plan of a small space for each case
    python bench/gemm.py --sizes 1,512    few cases
    python bench/gemm.py --untuned        with an empty PlanTable
    python bench/gemm.py --dtype float8_e4m3 --scales row     beside torch._scaled_mm, by row
    python bench/gemm.py --dtype int8 --random 0  beside torch._int_mm, which wants over 16 rows
    python bench/gemm.py --layers none --cube 0 --random 0 --few 8     few tokens, more random sizes
    python bench/gemm.py --sweep --layers random --sizes 64,128 --plans 6

Where the PlanTable has another Plan than the model would choose, both are measured in turns.
Results are checked against a float32 product first. Products of fp8 give bf16, with scales for each
row and column ("row") or one for each operand ("tensor") in the epilogue; torch's fast
accumulation is on. Products of int8 give int32, as torch's do, and are equal to the bit.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "kernels"))

from jitted import Launches
from product_bodies import wide_matmul
from verdict import end, verdict, wrong

from gpu import Bench, sets
from tilegrad.core.config import configure
from tilegrad.core.dtype import DType, bfloat16, dtype_of, float8_e4m3, float32, int8, int32
from tilegrad.core.target import Target
from tilegrad.ir.types import Memory
from tilegrad.kernels.matmul.plan import choose, ranked, transposed
from tilegrad.kernels.matmul.shape import Choice, Operands, WidePlan
from tilegrad.kernels.matmul.table import tuned
from tilegrad.tile.build import fill

LAYERS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate+up": (28672, 4096), "down": (4096, 14336)}
SCALES = ["row"]  # of fp8
SIZES = (1, 8, 32, 64, 128, 256, 512, 2048, 8192)


class Case:
    """One product: inputs in several sets, ours and theirs."""

    def __init__(self, bench: Bench, m: int, n: int, k: int, dtype: DType = bfloat16) -> None:
        self.bench, self.m, self.n, self.k, self.dtype = bench, m, n, k, dtype
        self.eight = dtype is float8_e4m3
        result = {float8_e4m3: bfloat16, int8: int32}.get(dtype, dtype)
        self.operands = Operands(m, n, k, dtype, result)
        self.y_of_ours: list[Any] = []
        kind = torch.float8_e4m3fn if self.eight else getattr(torch, dtype.name)
        torch.backends.cuda.matmul.allow_tf32 = True
        count = sets(dtype.size * (m * k + n * k) + result.size * m * n)
        wide = 1 if dtype.is_float else 40
        self.x, self.w = (
            [
                (wide * torch.randn(s, k, device="cuda")).clamp(-127, 127).to(kind)
                for _ in range(count)
            ]
            for s in (m, n)
        )
        out = getattr(torch, result.name)
        self.y = [torch.empty(m, n, device="cuda", dtype=out) for _ in range(count)]
        by_row = SCALES[0] == "row"
        self.scales = [
            torch.rand((size if by_row else 1, 1), device="cuda") + 0.5 for size in (m, n)
        ]

    def scaled(self) -> list[Any]:
        """Launches of torch's product of fp8."""
        first, second = self.scales[0], self.scales[1].t()
        return [
            lambda i=i: torch._scaled_mm(
                self.x[i],
                self.w[i].t(),
                first,
                second,
                out_dtype=torch.bfloat16,
                use_fast_accum=True,
                out=self.y[i],
            )
            for i in range(len(self.x))
        ]

    def theirs(self) -> list[Any]:
        """Launches of cuBLAS."""
        if self.eight:
            return self.scaled()
        multiply = torch.mm if self.dtype.is_float else torch._int_mm
        return [
            lambda i=i: multiply(self.x[i], self.w[i].t(), out=self.y[i])
            for i in range(len(self.x))
        ]

    def ours(self, plan: WidePlan, turned: bool) -> list[Any]:
        """Launches of our kernel with a Plan."""
        x = transposed(self.operands) if turned else self.operands
        more: tuple[tuple[str, Memory], ...] = ()
        if self.eight:
            sizes = ((x.m, "rows"), (x.n, "columns")) if SCALES[0] == "row" else ((1, "all"),) * 2
            more = tuple(
                (f"{name}{i}", Memory((size,), float32, use="value"))
                for i, (size, name) in enumerate(sizes)
            )
        body = fill(wide_matmul(x, plan), "epilogue", scaled_epilogue(x, more), more)
        kernel = self.bench.kernel(body, "matmul")

        def launch(i: int) -> None:
            first, second = (self.w, self.x) if turned else (self.x, self.w)
            scales = (self.scales[::-1] if turned else self.scales) if self.eight else []
            given = (first[i], second[i], self.y[i], *scales)
            kernel.point(tuple(t.data_ptr() for t in given))
            kernel.start(dependent=True)

        return [lambda i=i: launch(i) for i in range(len(self.x))]

    def jitted(self) -> list[Any]:
        """Launches of what the scheduler makes of a linear layer; results in place of `y`."""
        import tilegrad as tg
        import tilegrad.nn.functional as F

        function = tg.jit(lambda x, w: F.linear(x, w))  # 16-bit floats alone
        made = [
            Launches(self.bench.device, function, tg.from_torch(x), tg.from_torch(w))
            for x, w in zip(self.x, self.w)
        ]
        self.y_of_ours = [m.results[0].torch() for m in made]
        return made

    def error(self, run: Any, number: int = 0) -> float:
        """Relative error against a float32 product, every element written."""
        result = self.y_of_ours[number] if self.y_of_ours else self.y[number]
        result.fill_(float("nan") if result.is_floating_point() else -1)
        torch.cuda.synchronize()
        with torch.cuda.stream(self.bench.stream):
            run()
        self.bench.stream.synchronize()
        torch.backends.cuda.matmul.allow_tf32 = False
        wanted = self.wanted(number)
        torch.backends.cuda.matmul.allow_tf32 = True  # what cuBLAS is asked for with float32
        if not self.dtype.is_float:
            return float((result.double() - wanted).abs().max())  # to the bit
        return float((result.float() - wanted).norm() / wanted.norm())

    def wanted(self, number: int) -> torch.Tensor:
        """The product in float32."""
        wide = torch.float32 if self.dtype.is_float else torch.float64
        found = self.x[number].to(wide) @ self.w[number].to(wide).t()
        return found * self.scales[0] * self.scales[1].t() if self.eight else found


def scaled_epilogue(x: Operands, more: Sequence[tuple[str, Memory]]) -> Any:
    """A piece times the scales of its rows and columns, where there are some."""

    def epilogue(b: Any, inputs: Any, added: Any) -> Any:
        piece = inputs[0]
        for (_, memory), scales, at, size in zip(more, added, inputs[1:], (x.m, x.n)):
            if memory.shape == (1,):
                at, size = b.apply("multiply", at, b.broadcast(b.index(0), at.shape)), 1
            inside = b.apply("less", at, b.broadcast(b.index(size), at.shape))
            factor = b.gather(scales, at, inside)
            piece = b.apply("multiply", piece, b.broadcast(factor, piece.shape))
        return piece

    return epilogue


def plans(x: Operands, target: Target, count: int) -> Iterator[tuple[str, WidePlan, bool]]:
    """The Plans the model likes best, and what it expects of them."""
    for choice in ranked(x, target)[:count]:
        p = choice.plan
        label = (
            f"{'turned ' if choice.turned else ''}{'x'.join(map(str, p.tile))} s{p.stages}"
            f" p{p.programs} g{p.group} c{p.cluster} a{p.across:d} k{p.split}"
            f" e{p.early:d}"
        )
        yield f"{label:44} expected {1e6 * choice.seconds:.1f}", p, choice.turned


def sweep(
    bench: Bench, names: list[str], sizes: list[int], count: int, dtype: DType = bfloat16
) -> None:
    """Every Plan for every case, best first."""
    shapes = [(name, *LAYERS[name]) for name in names if name in LAYERS]
    shapes += [("random", n, k) for n, k in few_shapes(4)] if "random" in names else []
    for name, n, k in shapes:
        for m in sizes:
            case = Case(bench, m, n, k, dtype)
            theirs = case.theirs()
            base = bench.alone(theirs)
            found = []
            for label, plan, turned in plans(case.operands, bench.target, count):
                try:
                    ours = case.ours(plan, turned)
                    error = case.error(ours[0])
                    found.append((bench.alone(ours), label, error))
                except Exception as failure:  # one Plan that fails must not end the sweep
                    print(f"  {label}: {type(failure).__name__} {str(failure)[:300]}")
            floor = (dtype.size * (m * k + n * k) + 2 * m * n) / 4.47e12
            print(
                f"{name} m={m} n={n} k={k}: cuBLAS {1e6 * base:.1f} us"
                f" ({2 * m * n * k / base / 1e12:.0f} TFLOP/s,"
                f" floor {1e6 * floor:.1f} us)"
            )
            for seconds, label, error in sorted(found):
                print(
                    f"  {base / seconds:.3f}x {1e6 * seconds:8.1f} us"
                    f" {2 * m * n * k / seconds / 1e12:6.0f} TFLOP/s  {label}"
                    f"  error {error:.1e}{wrong(error < 1e-2)}",
                    flush=True,
                )
            del case


def table(bench: Bench, names: list[str], sizes: list[int], dtype: DType) -> list[dict[str, Any]]:
    """The chosen Plan of every case beside cuBLAS."""
    cases = [(name, m, *LAYERS[name]) for name in names for m in sizes]
    return [measure(bench, name, m, n, k, dtype) for name, m, n, k in cases]


def random_cases(bench: Bench, count: int, dtype: DType) -> list[dict[str, Any]]:
    """Sizes that no table holds."""
    draw = random.Random(0)
    found = []
    for number in range(count):
        n, k = draw.randrange(1024, 16384, 64), draw.randrange(1024, 16384, 64)
        m = (1, 8, 32, 64, 128, 512, 2048, 8192)[number % 8]
        if m > least_rows(dtype):
            found.append(measure(bench, "random", m, n, k, dtype))
    return found


FEW = (1, 8, 32, 64, 128)


def few_shapes(count: int) -> list[tuple[int, int]]:
    """(n, k) whose tiles of 64 columns leave cores idle, then random ones; no table holds them."""
    draw = random.Random(1)
    known = [(8960, 7616), (5248, 9344), (9280, 3264), (5632, 3264)]
    drawn = [
        (draw.randrange(1024, 16384, 64), draw.randrange(1024, 16384, 64))
        for _ in range(max(0, count - len(known)))
    ]
    return (known + drawn)[:count]


def few_cases(bench: Bench, count: int, dtype: DType) -> list[dict[str, Any]]:
    """Every number of few tokens, for sizes that no table holds."""
    some = [m for m in FEW if m > least_rows(dtype)]
    return [measure(bench, "random", m, n, k, dtype) for n, k in few_shapes(count) for m in some]


def least_rows(dtype: DType) -> int:
    """Rows that torch does not multiply: 16 of int8."""
    return 16 if dtype is int8 else 0


def measure(bench: Bench, name: str, m: int, n: int, k: int, dtype: DType) -> dict[str, Any]:
    """One case: checked, then interleaved with cuBLAS."""
    case = Case(bench, m, n, k, dtype)
    one_row = m == 1 and dtype.size == 2  # the scheduler makes a reduction of it
    known = None if one_row else tuned(case.operands, bench.target)
    choice = known or choose(case.operands, bench.target)
    ours = case.jitted() if one_row else case.ours(choice.plan, choice.turned)
    error = case.error(ours[0])
    found = bench.interleave(ours, case.theirs())
    seconds = found["ours_us"] * 1e-6
    size = dtype.size
    moved = size * (m * k + n * k) + case.operands.result.size * m * n
    floor = max(moved / 4.47e12, size * m * n * k / 800e12)
    row = {
        "layer": name,
        "m": m,
        "n": n,
        "k": k,
        "dtype": dtype.name,
        "error": error,
        **found,
        "floor_us": 1e6 * floor,
        "tflops": 2 * m * n * k / seconds / 1e12,
        "plan": ", ".join(ours[0].programs) if one_row else str(choice.plan),
        "turned": choice.turned,
        "expected_us": 1e6 * choice.seconds,
        "tuned": known is not None,
    }
    print(
        f"{name:8} m={m:<5} n={n:<6} k={k:<6} {row['ratio']:.3f}x [{row['ratio_low']:.3f},"
        f" {row['ratio_high']:.3f}] ours {row['ours_us']:8.1f} us cuBLAS {row['peer_us']:8.1f} us"
        f" floor {row['floor_us']:7.1f} expected {row['expected_us']:7.1f}"
        f" {row['tflops']:5.0f} TFLOP/s error {error:.1e}{wrong(error < 1e-2)}",
        flush=True,
    )
    if known is not None:
        row["over_untuned"] = over_untuned(case, known, ours)
    return row


def over_untuned(case: Case, known: Choice, ours: list[Any]) -> float:
    """How much faster the PlanTable's Plan is than what the model chooses, measured in turns."""
    plain = choose(case.operands, case.bench.target)
    if (plain.plan, plain.turned) == (known.plan, known.turned):
        return 1.0
    found = case.bench.interleave(ours, case.ours(plain.plan, plain.turned))
    print(
        f"{'':8} tuned {found['ours_us']:.1f} us, untuned {found['peer_us']:.1f} us:"
        f" {found['ratio']:.3f}x [{found['ratio_low']:.3f}, {found['ratio_high']:.3f}]"
        f" {known.plan} over {plain.plan}",
        flush=True,
    )
    return found["ratio"]


def mean(rows: list[dict[str, Any]]) -> float:
    """Geometric mean of ratios."""
    return math.exp(sum(math.log(r["ratio"]) for r in rows) / max(1, len(rows)))


def report(rows: list[dict[str, Any]]) -> None:
    """The bars."""
    for label, sizes, bar, least in (
        ("large M", (512, 2048, 8192), 1.0, 0.93),
        (
            "small M",
            (1, 8, 32, 64, 128),
            1.05 if any(r["dtype"] != "int8" for r in rows) else 1.0,
            0.95,
        ),
    ):
        some = [r for r in rows if r["m"] in sizes and r["layer"] in LAYERS]
        if some:
            worst = min(r["ratio"] for r in some)
            met = mean(some) >= bar and worst >= least
            print(
                f"{label}: geometric mean {mean(some):.3f} (bar {bar}), least {worst:.3f} (bar"
                f" {least}) of {len(some)}: {verdict(met)}"
            )
    for label, some in (
        ("few tokens", lambda m: m <= max(FEW)),
        ("many tokens", lambda m: m > max(FEW)),
    ):
        other = [r for r in rows if r["layer"] == "random" and some(r["m"])]
        if other:
            print(
                f"random sizes, {label}: geometric mean {mean(other):.3f},"
                f" least {min(r['ratio'] for r in other):.3f} of {len(other)}"
            )
    gains = [r["over_untuned"] for r in rows if "over_untuned" in r]
    if gains:
        middle = math.exp(sum(map(math.log, gains)) / len(gains))
        met = verdict(max(gains) <= 1.05)
        print(
            f"tuned over untuned: geometric mean {middle:.3f}, most {max(gains):.3f}"
            f" (bar 1.05) of {len(gains)}: {met}"
        )


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--plans", type=int, default=16, help="of a sweep, for each case")
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--random", type=int, default=20, help="cases with random n and k")
    parser.add_argument("--few", type=int, default=0, help="more random n and k, with few tokens")
    parser.add_argument("--cube", type=int, default=8192, help="a product with m = n = k; 0: none")
    parser.add_argument("--untuned", action="store_true", help="with an empty PlanTable")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--scales", default="row", choices=("row", "tensor"), help="of fp8")
    parser.add_argument("--out", default="", help="where the JSON goes")
    given = parser.parse_args()
    if given.untuned:
        configure(plan_table="")
    bench = Bench()
    ceilings = bench.ceilings()
    print(bench.device, {k: f"{v:.3e}" for k, v in ceilings.items()}, flush=True)
    names, sizes = given.layers.split(","), [int(s) for s in given.sizes.split(",")]
    dtype = dtype_of(given.dtype)
    sizes = [s for s in sizes if s > least_rows(dtype)]
    SCALES[0] = given.scales
    if given.sweep:
        sweep(bench, names, sizes, given.plans, dtype)
        return
    rows = table(bench, names, sizes, dtype) if given.layers != "none" else []
    if given.cube:
        rows.append(measure(bench, "cube", given.cube, given.cube, given.cube, dtype))
    rows += random_cases(bench, given.random, dtype) + few_cases(bench, given.few, dtype)
    report(rows)
    if given.out:
        Path(given.out).write_text(
            json.dumps({**bench.about(), "ceilings": ceilings, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
    end()

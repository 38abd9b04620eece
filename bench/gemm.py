"""bf16 (fp16, tf32) matrix products of an LLM's layers: ours beside cuBLAS through torch.

    python bench/gemm.py                  the table of layers and M
    python bench/gemm.py --sweep          every Plan of a small space for each case
    python bench/gemm.py --quick          few cases

Results are checked against a float32 product first.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from gpu import Bench, sets

from tilegrad.core.dtype import DType, bfloat16
from tilegrad.kernels.matmul import Operands, WidePlan, wide_matmul
from tilegrad.tile.placed import fill

LAYERS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate+up": (28672, 4096), "down": (4096, 14336)}
ROOM = 232_448 - 1024 - 512  # shared bytes for tiles, past alignment and barriers
SIZES = (1, 8, 32, 64, 128, 256, 512, 2048, 8192)


class Case:
    """One product: inputs in several sets, ours and theirs."""

    def __init__(self, bench: Bench, m: int, n: int, k: int, dtype: DType = bfloat16) -> None:
        self.bench, self.m, self.n, self.k, self.dtype = bench, m, n, k, dtype
        kind = getattr(torch, dtype.name)
        count = sets(2 * (m * k + n * k + m * n))
        self.x = [torch.randn(m, k, device="cuda", dtype=kind) for _ in range(count)]
        self.w = [torch.randn(n, k, device="cuda", dtype=kind) for _ in range(count)]
        self.y = [torch.empty(m, n, device="cuda", dtype=kind) for _ in range(count)]

    def theirs(self) -> list[Any]:
        """Launches of cuBLAS."""
        return [lambda i=i: torch.mm(self.x[i], self.w[i].t(), out=self.y[i])
                for i in range(len(self.x))]  # fmt: skip

    def ours(self, plan: WidePlan, turned: bool) -> list[Any]:
        """Launches of our kernel with a Plan."""
        if turned:
            x = Operands(self.n, self.m, self.k, self.dtype, self.dtype, turned=True)
        else:
            x = Operands(self.m, self.n, self.k, self.dtype, self.dtype)
        body = fill(wide_matmul(x, plan), "epilogue", lambda b, inputs, added: inputs[0])
        kernel = self.bench.kernel(body, "matmul")

        def launch(i: int) -> None:
            first, second = (self.w, self.x) if turned else (self.x, self.w)
            kernel.point((first[i].data_ptr(), second[i].data_ptr(), self.y[i].data_ptr()))
            kernel.start(dependent=plan.dependent)

        return [lambda i=i: launch(i) for i in range(len(self.x))]

    def error(self, run: Any, number: int = 0) -> float:
        """Relative error against a float32 product, every element written."""
        self.y[number].fill_(float("nan"))
        with torch.cuda.stream(self.bench.stream):
            run()
        self.bench.stream.synchronize()
        torch.backends.cuda.matmul.allow_tf32 = False
        wanted = self.x[number].float() @ self.w[number].float().t()
        return float((self.y[number].float() - wanted).norm() / wanted.norm())


def turned_plans(m: int, n: int) -> Iterator[tuple[str, WidePlan, bool]]:
    """Weights as rows, few tokens as columns."""
    space = itertools.product((64, 128, 256), (64, 128, 256), (1, 2, 3, 4), ((0, 0), (1, 1), (1, 0)))
    for rows, depth, split, (dependent, early) in space:
        wide = max(8 * split, -(-m // (8 * split)) * 8 * split)
        tiles = -(-n // rows)
        if (wide > 64 and rows == 64) or tiles < 20 or (tiles > 132 and split > 1):
            continue
        if split > 1 and tiles * split > 132 or (tiles * split < 60 and split < 4):
            continue
        staged = wide // split if split > 1 else min(64, wide)
        if wide % (staged * split):
            continue
        partial = rows * wide * 4 if split > 1 else 0
        stage = (rows + wide) * 2 * depth
        stages = min(24, (ROOM - rows // 64 * 2 * staged * 128 - partial) // stage)
        if stages < 3:
            continue
        programs = tiles * split if split > 1 else min(132, tiles)
        yield (f"turned {rows}x{wide}x{depth} s{stages} p{programs} k{split} d{dependent} e{early}",
               WidePlan((rows, wide, depth), stages, programs, 1, staged, 1, split,
                        bool(dependent), bool(early)), True)  # fmt: skip


def plans(m: int, n: int, k: int) -> Iterator[tuple[str, WidePlan, bool]]:
    """A small space of Plans for a case."""
    if m <= 128:
        yield from turned_plans(m, n)
    if m > 64:
        wides = (256, 224, 192, 160, 144, 128, 112, 96) if m < 2048 else (256, 224, 192)
        for tn, cluster, split in itertools.product(wides, (1, 2), (1, 2, 3, 4, 6)):
            tm = 128
            if (cluster > 1 and split > 1) or tn % (8 * split):
                continue
            staged = (64 if tn % 64 == 0 else 32 if tn % 32 == 0 else 16) if split == 1 else (
                tn // split)  # fmt: skip
            partial = tm * tn * 4 if split > 1 else 0
            room = ROOM - tm // 64 * 2 * 64 * staged * 2 - partial
            stages = min(8, room // ((tm + tn) * 128))
            tiles = -(-m // (tm * cluster)) * cluster * -(-n // tn)
            if (split > 1 and not 60 < tiles * split <= 132) or stages < 3:
                continue
            programs = tiles * split if split > 1 else min(132, tiles)
            for group in (8,) if m < 2048 else (8, 16):
                yield (f"{tm}x{tn} s{stages} p{programs} g{group} c{cluster} k{split} d1",
                       WidePlan((tm, tn, 64), stages, programs, group, staged, cluster, split,
                                True), False)  # fmt: skip


def sweep(bench: Bench, names: list[str], sizes: list[int]) -> None:
    """Every Plan for every case, best first."""
    for name in names:
        n, k = LAYERS[name]
        for m in sizes:
            case = Case(bench, m, n, k)
            theirs = case.theirs()
            base = bench.alone(theirs)
            found = []
            for label, plan, turned in plans(m, n, k):
                try:
                    ours = case.ours(plan, turned)
                    error = case.error(ours[0])
                    found.append((bench.alone(ours), label, error))
                except Exception as failure:  # one Plan that fails must not end the sweep
                    print(f"  {label}: {type(failure).__name__} {str(failure)[:300]}")
            floor = 2 * (m * k + n * k + m * n) / 4.47e12
            print(f"{name} m={m}: cuBLAS {1e6 * base:.1f} us"
                  f" ({2 * m * n * k / base / 1e12:.0f} TFLOP/s, floor {1e6 * floor:.1f} us)")  # fmt: skip
            for seconds, label, error in sorted(found)[:8]:
                print(f"  {base / seconds:.3f}x {1e6 * seconds:8.1f} us"
                      f" {2 * m * n * k / seconds / 1e12:6.0f} TFLOP/s  {label}"
                      f"  error {error:.1e}{'' if error < 1e-2 else '  WRONG'}", flush=True)  # fmt: skip
            del case


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    given = parser.parse_args()
    bench = Bench()
    print(bench.device, {k: f"{v:.3e}" for k, v in bench.ceilings().items()}, flush=True)
    names, sizes = given.layers.split(","), [int(s) for s in given.sizes.split(",")]
    if given.sweep:
        sweep(bench, names, sizes)


if __name__ == "__main__":
    main()

"""Products of one input with several weights as one launch, beside launches apart.

    python bench/joint.py                   q/k/v and gate/up at every M: ours joint, apart, torch
    python bench/joint.py --sweep 6         the Plans the model likes best, for its constants
    python bench/joint.py --sizes 16,4096 --case gated

`apart` is our own matmul, a launch for each weight (and for a gate torch's silu and product
after them); `one` is our plain product with all columns in one weight: what joining costs over
it is the price of the branches, or of two accumulators. Results are checked first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as TF

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "kernels"))

from product_bodies import joint_matmul, wide_matmul
from verdict import end, wrong

from gpu import Bench, sets
from tilegrad.core.dtype import bfloat16, float32
from tilegrad.kernels.matmul.plan import choose, ranked, transposed
from tilegrad.kernels.matmul.shape import Operands, WidePlan
from tilegrad.kernels.matmul.table import tuned
from tilegrad.tile.build import fill

SIZES = (1, 16, 64, 128, 512, 2048, 8192)
CASES = {"apart": (4096, 1024, 1024), "gated": (14336, 14336)}
DEPTH = 4096


def gate(b: Any, inputs: list[Any], _: Any) -> Any:
    """silu(first) * second."""
    first, second = inputs[:2]
    one, zero = (b.constant(v, float32, first.shape) for v in (1.0, 0.0))
    below = b.apply("add", one, b.apply("quick_exp", b.apply("subtract", zero, first)))
    return b.apply("multiply", b.apply("quick_divide", first, below), second)


class Case:
    """One input, several weights, in several sets."""

    def __init__(self, bench: Bench, name: str, m: int) -> None:
        self.bench, self.m, self.gated = bench, m, name == "gated"
        self.weights = CASES[name]
        n = self.weights[0] if self.gated else sum(self.weights)
        self.operands = Operands(
            m, n, DEPTH, bfloat16, bfloat16, weights=self.weights, gated=self.gated
        )
        self.count = sets(2 * (m * DEPTH + sum(self.weights) * DEPTH + m * n))
        self.x = [self.numbers(m, DEPTH) for _ in range(self.count)]
        self.w = [
            [self.numbers(w, DEPTH).mul_(DEPTH**-0.5) for w in self.weights]
            for _ in range(self.count)
        ]
        kept = self.weights[:1] if self.gated else self.weights
        self.y = [[self.numbers(m, w) for w in kept] for _ in range(self.count)]

    def numbers(self, *shape: int) -> Any:
        """Random bf16 numbers."""
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    def joint(self, plan: WidePlan, turned: bool) -> list[Callable[[], None]]:
        """Launches of the joint kernel."""
        body = joint_matmul(transposed(self.operands) if turned else self.operands, plan)
        if self.gated:
            body = fill(body, "epilogue", gate)
        else:
            for i in range(len(self.weights)):
                body = fill(body, f"epilogue{i}", lambda b, inputs, added: inputs[0])
        kernel = self.bench.kernel(body, "joint")

        def launch(i: int) -> None:
            kernel.point(tuple(t.data_ptr() for t in (self.x[i], *self.w[i], *self.y[i])))
            kernel.start(dependent=True)

        return [lambda i=i: launch(i) for i in range(self.count)]  # type: ignore[misc]

    def single(self, n: int) -> Callable[[Any, Any, Any], None]:
        """One product of ours, as a function (x, weight, result)."""
        operands = Operands(self.m, n, DEPTH, bfloat16, bfloat16)
        chosen = tuned(operands, self.bench.target) or choose(operands, self.bench.target)
        x = transposed(operands) if chosen.turned else operands
        kernel = self.bench.kernel(
            fill(wide_matmul(x, chosen.plan), "epilogue", lambda b, inputs, added: inputs[0]), "one"
        )

        def launch(x: Any, w: Any, y: Any) -> None:
            pair = (w, x) if chosen.turned else (x, w)
            kernel.point(tuple(t.data_ptr() for t in (*pair, y)))
            kernel.start(dependent=True)

        return launch

    def apart(self) -> list[Callable[[], None]]:
        """A launch of ours for each weight."""
        products = {n: self.single(n) for n in set(self.weights)}
        between = [self.numbers(self.m, n) for n in self.weights]

        def run(i: int) -> None:
            results = between if self.gated else self.y[i]
            for n, w, y in zip(self.weights, self.w[i], results):
                products[n](self.x[i], w, y)
            if self.gated:
                torch.mul(TF.silu(between[0]), between[1], out=self.y[i][0])

        return [lambda i=i: run(i) for i in range(self.count)]  # type: ignore[misc]

    def one(self) -> list[Callable[[], None]]:
        """Our plain product with all columns in one weight."""
        n = sum(self.weights)
        product = self.single(n)
        weights = [torch.cat(w) for w in self.w]
        y = self.numbers(self.m, n)
        return [
            lambda i=i: product(self.x[i], weights[i], y)  # type: ignore[misc]
            for i in range(self.count)
        ]

    def theirs(self) -> list[Callable[[], None]]:
        """torch, a product for each weight."""

        def run(i: int) -> None:
            if self.gated:
                first, second = (self.x[i] @ w.t() for w in self.w[i])
                torch.mul(TF.silu(first), second, out=self.y[i][0])
                return
            for w, y in zip(self.w[i], self.y[i]):
                torch.mm(self.x[i], w.t(), out=y)

        return [lambda i=i: run(i) for i in range(self.count)]  # type: ignore[misc]

    def error(self, run: Callable[[], None]) -> float:
        """Largest relative error against float32 products, every element written."""
        for y in self.y[0]:
            y.fill_(float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(self.bench.stream):
            run()
        self.bench.stream.synchronize()
        torch.backends.cuda.matmul.allow_tf32 = False
        wanted = [self.x[0].float() @ w.float().t() for w in self.w[0]]
        if self.gated:
            wanted = [TF.silu(wanted[0]) * wanted[1]]
        return max(float((y.float() - w).norm() / w.norm()) for y, w in zip(self.y[0], wanted))


def measure(bench: Bench, name: str, m: int) -> dict[str, Any]:
    """The chosen Plan beside the other ways."""
    case = Case(bench, name, m)
    chosen = tuned(case.operands, bench.target) or choose(case.operands, bench.target)
    joint = case.joint(chosen.plan, chosen.turned)
    row: dict[str, Any] = {
        "case": name,
        "m": m,
        "error": case.error(joint[0]),
        "expected_us": 1e6 * choose(case.operands, bench.target).seconds,
        "plan": str(chosen.plan),
        "turned": chosen.turned,
    }
    for label, other in (("apart", case.apart()), ("one", case.one()), ("torch", case.theirs())):
        found = bench.interleave(joint, other)
        row |= {
            f"over_{label}": found["ratio"],
            f"{label}_us": found["peer_us"],
            "ours_us": found["ours_us"],
        }
    print(
        f"{name:6} m={m:<5} joint {row['ours_us']:8.1f} us (expected {row['expected_us']:.1f});"
        f" apart {row['over_apart']:.3f}x, one {row['over_one']:.3f}x,"
        f" torch {row['over_torch']:.3f}x; error {row['error']:.1e}"
        f"{wrong(row['error'] < 1e-2)} {chosen.plan}",
        flush=True,
    )
    return row


def sweep(bench: Bench, name: str, m: int, count: int) -> None:
    """The Plans the model likes best, as measured."""
    case = Case(bench, name, m)
    for choice in ranked(case.operands, bench.target)[:count]:
        joint = case.joint(choice.plan, choice.turned)
        error = case.error(joint[0])
        print(
            f"{name:6} m={m:<5} {1e6 * bench.alone(joint):8.1f} us, expected"
            f" {1e6 * choice.seconds:8.1f}, error {error:.1e} turned={choice.turned:d}"
            f" {choice.plan}",
            flush=True,
        )


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", choices=list(CASES), default=[])
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="M, comma-separated")
    parser.add_argument("--sweep", type=int, default=0, help="how many Plans of each case")
    parser.add_argument("--out", default="", help="where the JSON goes")
    given = parser.parse_args()
    bench = Bench()
    rows = []
    for name in given.case or CASES:
        for m in map(int, given.sizes.split(",")):
            if given.sweep:
                sweep(bench, name, m, given.sweep)
            else:
                rows.append(measure(bench, name, m))
    if given.out:
        record = {"kind": "joint", **bench.about(), "rows": rows}
        Path(given.out).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
    end()

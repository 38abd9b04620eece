"""Products of few tokens with quantised weights at the shapes of Llama-3-8B, on a GPU.

    python bench/quantised.py                          Q4_1, Q8_0, Q4_K, Q6_K for 1, 2, 4 tokens
    python bench/quantised.py --formats Q4_1 --tokens 1
    python bench/quantised.py --variants [--limit 12]  several Plans for each shape, best first
    python bench/quantised.py --around --tokens 1      with norms, gates and residuals of a decoder
    python bench/quantised.py --many --tokens 8,16,64,512   by the matrix units

Graphs of launches, each of which may start before the one before has ended, over sets of weights
that pass the L2 cache several times. Bytes are those of the Format's file. Results are checked
against float64 products with unpacked weights first: 512 different rows, repeated.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu import Bench, sets
from tilegrad.core.dtype import bfloat16
from tilegrad.core.errors import TilegradError
from tilegrad.core.format import BY_NAME, Format
from tilegrad.kernels.quantised.gpu import matrix_plan, rows_plan
from tilegrad.kernels.quantised.gpu_layout import groups_of, pack, parts
from tilegrad.kernels.quantised.gpu_matrix import MatrixPlan, many_tokens
from tilegrad.kernels.quantised.gpu_rows import RowsPlan, few_tokens
from tilegrad.kernels.quantised.shape import Around, QuantisedShape
from tilegrad.targets.ptx.assemble import assemble, find_ptxas
from tilegrad.targets.ptx.emit import emit
from tilegrad.targets.ptx.prepare import Prepared

LIMIT = 4.47e12  # bytes/s of a pure read
SHAPES = (
    ("q+k+v", 6144, 4096),
    ("o", 4096, 4096),
    ("gate+up", 28672, 4096),
    ("down", 4096, 14336),
    ("head", 128256, 4096),
)
DISTINCT = 512
# what a decoder computes with each product
AROUND = {
    "q+k+v": Around(norm=1e-5),
    "o": Around(residual=True),
    "gate+up": Around(norm=1e-5, gated="silu"),
    "down": Around(residual=True),
    "head": Around(norm=1e-5),
}
Case = tuple[str, QuantisedShape, RowsPlan | MatrixPlan]


def random_rows(form: Format, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Bytes of rows: random codes, scales of a sensible size."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, columns // form.block, form.block_bytes), np.uint8)
    for field in form.fields:
        if field.dtype.is_float:
            made = rng.uniform(0.5, 1.5, (*blocks.shape[:2], field.count)) * 0.01
            made = made * np.where(field.name == "minimum", -4.0, 1.0)
            width = field.count * field.dtype.size
            blocks[..., field.offset : field.offset + width] = (
                made.astype(field.dtype.numpy).view(np.uint8).reshape(*blocks.shape[:2], width)
            )
    return blocks.reshape(rows, -1)


class Weights:
    """The parts of a Format's weights in several sets, and the unpacked rows they repeat."""

    def __init__(self, shape: QuantisedShape) -> None:
        raw = random_rows(shape.format, DISTINCT, shape.columns)
        self.exact = torch.from_numpy(shape.format.to_float32(raw)).cuda().double()
        made = pack(shape, raw)
        which = torch.arange(-(-shape.rows // 16) * 16, device="cuda") % DISTINCT
        packed = [torch.from_numpy(made[name]).cuda() for name, _, _ in parts(shape)]
        self.bytes = shape.format.storage_bytes((shape.rows, shape.columns))
        first = [view(p)[which] for p in packed]
        self.sets = [first] + [[p.clone() for p in first] for _ in range(sets(self.bytes) - 1)]


def view(part: torch.Tensor) -> torch.Tensor:
    """A tensor of a dtype that torch can index."""
    return part.view(torch.int16) if part.dtype == torch.uint16 else part


def made_ready(bench: Bench, cases: Sequence[Case], around: bool) -> list[Prepared | None]:
    """Kernels of cases, assembled side by side; one that spills is left out, and said."""

    def one(number: int) -> tuple[Any, Any, str]:
        name = f"quantised_{number}"
        label, shape, plan = cases[number]
        if isinstance(plan, RowsPlan):
            body = few_tokens(shape, plan, name, AROUND[label] if around else Around())
        else:
            body = many_tokens(shape, plan, name)
        text, entry = emit(body, name, bench.target)
        if find_ptxas() is None:
            return text, entry, name
        assembled = assemble(text)
        try:
            assembled.check_library(name)
        except TilegradError as error:
            print(f"  {label} {shape} {text_of(plan)}: {str(error)[:120]}", flush=True)
            return None, entry, name
        return assembled.cubin, entry, name

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(one, range(len(cases))))
    found: list[Prepared | None] = []
    for code, entry, name in texts:
        made = code and bench.device.load(code).function(name, entry.shared_bytes, entry.cluster)
        found.append(made and Prepared(made, entry, {}))
    return found


class Run:
    """A kernel over all sets of weights."""

    def __init__(
        self, bench: Bench, case: Case, kernel: Prepared, weights: Weights, around: Around
    ) -> None:
        self.bench, self.kernel, self.weights, self.around = bench, kernel, weights, around
        shape = case[1]
        results = shape.rows // (2 if around.gated else 1)
        self.norm = torch.rand(shape.columns, device="cuda", dtype=torch.bfloat16)
        self.residual = torch.randn(shape.tokens, results, device="cuda", dtype=torch.bfloat16)
        count = len(weights.sets)
        self.x = [
            torch.randn(shape.tokens, shape.columns, device="cuda", dtype=torch.bfloat16)
            for _ in range(count)
        ]
        self.out = [
            torch.full((shape.tokens, results), float("nan"), device="cuda", dtype=torch.bfloat16)
            for _ in range(count)
        ]

    def launch(self, i: int) -> None:
        """One launch on a set."""
        norm = [] if self.around.norm is None else [self.norm]
        residual = [self.residual] if self.around.residual else []
        given = (self.x[i], *norm, *self.weights.sets[i], *residual, self.out[i])
        self.kernel.point([t.data_ptr() for t in given])
        self.kernel.start(dependent=True)

    def error(self) -> float:
        """The worst error of a set, of the norm of a token's results."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self.bench.stream):
            self.launch(0)
        self.bench.stream.synchronize()
        x, around = self.x[0].double(), self.around
        if around.norm is not None:
            x = x / (x.square().mean(-1, keepdim=True) + around.norm).sqrt() * self.norm.double()
        wanted = x @ self.weights.exact.T
        rows = self.out[0].shape[1] * (2 if around.gated else 1)
        wanted = wanted.repeat(1, -(-rows // DISTINCT))[:, :rows]
        if around.gated:
            wanted = torch.nn.functional.silu(wanted[:, : rows // 2]) * wanted[:, rows // 2 :]
        wanted = wanted + self.residual.double() if around.residual else wanted
        return float(((self.out[0].double() - wanted).norm(dim=1) / wanted.norm(dim=1)).max())

    def seconds(self, rounds: int) -> float:
        """Of a launch."""
        return self.bench.alone([lambda i=i: self.launch(i) for i in range(len(self.x))], rounds)


def plain_cases(formats: Sequence[str], tokens: Sequence[int]) -> Iterator[Case]:
    """Every shape with the Plan that is chosen for it."""
    for name in formats:
        for label, rows, columns in SHAPES:
            for count in tokens:
                shape = QuantisedShape(BY_NAME[name], rows, columns, count, bfloat16)
                yield label, shape, rows_plan(shape)


# rows, warps, groups at once, stages, resident programs, tokens at once, tokens of a program
PLANS = {
    (128, 1): (
        (16, 8, 64, 2),
        (16, 8, 128),
        (8, 8, 128),
        (8, 8, 64, 2),
        (8, 8, 64, 1),
        (16, 8, 64, 1),
        (16, 16, 64, 2),
        (16, 16, 128),
        (16, 4, 64, 2),
        (32, 16, 64, 2),
        (16, 8, 32, 4),
    ),
    (448, 1): (
        (8, 8, 256),
        (16, 8, 64, 2),
        (32, 16, 64, 2),
        (32, 16, 64, 3),
        (16, 16, 64, 2),
        (16, 16, 128),
        (32, 16, 128),
        (8, 8, 128),
        (8, 8, 64, 3),
        (16, 8, 128),
        (4, 8, 256),
        (8, 16, 256),
    ),
    (128, 4): (
        (8, 8, 128),
        (8, 4, 128),
        (4, 4, 128),
        (16, 8, 128),
        (8, 4, 64),
        (8, 4, 64, 2),
        (8, 8, 64, 2),
        (8, 8, 128, 1, 2),
        (8, 8, 128, 1, 3),
        (8, 8, 128, 1, 0, 2),
        (16, 8, 128, 1, 2, 2),
        (8, 4, 128, 1, 4, 2),
        (16, 8, 64, 2, 2, 2),
        (16, 8, 64, 2, 2, 1),
        (16, 16, 128, 1, 1, 4),
        (16, 16, 128, 1, 2, 4),
        (16, 16, 128, 1, 2, 2),
        (32, 16, 128, 1, 1, 2),
        (32, 16, 64, 2, 1, 2),
    ),
}
PLANS[448, 4] = (
    *PLANS[128, 4],
    (8, 8, 128, 1, 0, 4, 2),
    (8, 8, 256, 1, 0, 4, 2),
    (8, 8, 256, 1, 0, 4, 1),
    (16, 16, 128, 1, 2, 4, 2),
    (16, 8, 64, 2, 0, 4, 2),
    (32, 16, 64, 2, 0, 4, 2),
)


def variants(shape: QuantisedShape, limit: int) -> list[RowsPlan]:
    """The chosen Plan and others."""
    found = [rows_plan(shape)]
    for rows, warps, groups, *more in PLANS[groups_of(shape), 1 if shape.tokens == 1 else 4]:
        stages, resident, together, tokens = (*more, *(1, 0, 4, 4)[len(more) :])
        found.append(RowsPlan(rows, warps, groups, together, tokens, stages, resident))
    kept = [p for p in dict.fromkeys(found) if -(-shape.rows // 16) * 16 % p.rows == 0]
    return kept[:limit]


def variant_cases(formats: Sequence[str], tokens: Sequence[int], limit: int) -> Iterator[Case]:
    """Several Plans for each shape."""
    for label, shape, _ in plain_cases(formats, tokens):
        if label != "head":
            for plan in variants(shape, limit):
                yield label, shape, plan


def many_cases(formats: Sequence[str], tokens: Sequence[int]) -> Iterator[Case]:
    """The matrix kernel, for the two largest shapes of a layer."""
    for name in formats:
        for label, rows, columns in SHAPES[2:4]:
            for count in tokens:
                shape = QuantisedShape(BY_NAME[name], rows, columns, count, bfloat16)
                yield label, shape, matrix_plan(shape)


def text_of(plan: RowsPlan | MatrixPlan) -> str:
    """A Plan in a line."""
    if isinstance(plan, MatrixPlan):
        return f"tile {plan.tokens}x{plan.rows} groups {plan.groups} warps {plan.warps}"
    return (
        f"rows {plan.rows} warps {plan.warps} groups {plan.groups} stages {plan.stages}"
        f" resident {plan.resident} together {plan.together} of {plan.tokens}"
    )


def timed(
    bench: Bench, cases: Sequence[Case], rounds: int, around: bool = False
) -> list[dict[str, Any]]:
    """A row for every case; weights are made once for cases that follow one another."""
    rows, weights, last = [], None, None
    for case, kernel in zip(cases, made_ready(bench, cases, around)):
        label, shape, plan = case
        if kernel is None:
            continue
        key = (shape.format.name, shape.rows, shape.columns)
        if key != last:
            weights, last = None, key
            torch.cuda.empty_cache()
            weights = Weights(shape)
        assert weights is not None
        run = Run(bench, case, kernel, weights, AROUND[label] if around else Around())
        error, seconds = run.error(), run.seconds(rounds)
        rate = weights.bytes / seconds
        rows.append(
            {
                "format": shape.format.name,
                "case": label,
                "rows": shape.rows,
                "columns": shape.columns,
                "tokens": shape.tokens,
                "plan": text_of(plan),
                "us": 1e6 * seconds,
                "bytes": weights.bytes,
                "tb_per_s": rate / 1e12,
                "share_of_limit": rate / LIMIT,
                "error": error,
            }
        )
        wrong = "" if error < 4e-3 else " WRONG"
        flops = 2 * shape.tokens * shape.rows * shape.columns / seconds
        if isinstance(plan, MatrixPlan):
            wrong = f" {flops / 1e12:.0f} TFLOP/s" + wrong
        print(
            f"{shape.format.name:5s} {label:8s} {shape.rows:6d}x{shape.columns:5d}"
            f" tokens {shape.tokens}: {1e6 * seconds:7.2f} us {rate / 1e12:5.2f} TB/s"
            f" {100 * rate / LIMIT:5.1f}%  {text_of(plan)}  error {error:.1e}{wrong}",
            flush=True,
        )
    return rows


def report(rows: Sequence[dict[str, Any]]) -> None:
    """What all layers and the head take together, by format and tokens."""
    for name in dict.fromkeys(r["format"] for r in rows):
        for tokens in dict.fromkeys(r["tokens"] for r in rows if r["format"] == name):
            own = [r for r in rows if (r["format"], r["tokens"]) == (name, tokens)]
            times = {r["case"]: (32 if r["case"] != "head" else 1) for r in own}
            seconds = sum(times[r["case"]] * r["us"] for r in own) / 1e6
            share = sum(times[r["case"]] * r["bytes"] for r in own) / seconds / LIMIT
            print(
                f"{name} tokens {tokens}: 32 layers and head {1e3 * seconds:.3f} ms,"
                f" {100 * share:.1f}% of the limit of the bytes (bar 75%):"
                f" {'met' if share >= 0.75 else 'MISSED'}"
            )


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", default="Q4_1,Q8_0,Q4_K,Q6_K")
    parser.add_argument("--tokens", default="1,2,4")
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--around", action="store_true")
    parser.add_argument("--many", action="store_true")
    parser.add_argument("--limit", type=int, default=24, help="Plans of a shape at most")
    parser.add_argument("--out", default="", help="where the JSON goes")
    given = parser.parse_args()
    formats = given.formats.split(",")
    tokens = [int(t) for t in given.tokens.split(",")]
    bench, began = Bench(), time.perf_counter()
    ceilings = bench.ceilings()
    print(bench.device, {k: f"{v:.3e}" for k, v in ceilings.items()}, flush=True)
    if given.variants:
        cases = list(variant_cases(formats, tokens, given.limit))
        rows = timed(bench, cases, 3)
        for label in dict.fromkeys((r["format"], r["case"], r["tokens"]) for r in rows):
            own = [r for r in rows if (r["format"], r["case"], r["tokens"]) == label]
            best = min(own, key=lambda r: r["us"])
            print(
                "best",
                *label,
                f"{best['us']:.2f} us {100 * best['share_of_limit']:.1f}%",
                best["plan"],
            )
    elif given.many:
        rows = timed(bench, list(many_cases(formats, tokens)), 5)
    else:
        rows = timed(bench, list(plain_cases(formats, tokens)), 5, given.around)
        report(rows)
    print(f"{time.perf_counter() - began:.0f} s in all")
    if given.out:
        record = {**bench.about(), "ceilings": ceilings, "rows": rows}
        Path(given.out).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()

"""Products of quantised weights at the shapes of Llama-3-8B on a GPU, for 1 to 256 tokens.

    python bench/quantised.py                       Q4_1: a layer's four products, chained
    python bench/quantised.py --formats Q4_1,Q8_0 --tokens 1,8,64
    python bench/quantised.py --plans --tokens 8,64 every Plan for each product alone, then in turn
                                                    in the chain, which keeps the best

Graphs of launches, each of which may start before the one before has ended, over sets of weights
that pass the L2 cache several times; bfloat16 products of torch beside them. Bytes are those of the
Format's file, the limit is 4.3 TB/s. Results are checked against float64 products with unpacked
weights first: 512 different rows, repeated.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from verdict import end, verdict, wrong

from tilegrad.core.dtype import bfloat16
from tilegrad.core.errors import TilegradError
from tilegrad.core.format import BY_NAME, Format
from tilegrad.core.target import H200
from tilegrad.kernels.quantised.gpu import body_of, plans_for
from tilegrad.kernels.quantised.gpu_layout import pack, parts
from tilegrad.kernels.quantised.gpu_packed import expected
from tilegrad.kernels.quantised.gpu_packed import plans as packed_plans
from tilegrad.kernels.quantised.shape import Around, QuantisedShape

LIMIT = 4.3e12  # bytes/s
BARS = {1: 85, 4: 85, 8: 80, 16: 70, 32: 60, 64: 45}  # percent of the limit, by tokens
SHAPES = (
    ("q+k+v", 6144, 4096),
    ("o", 4096, 4096),
    ("gate+up", 28672, 4096),
    ("down", 4096, 14336),
)
# what a decoder computes with each product; a norm only where one token makes it worth while
AROUND = {
    "q+k+v": Around(splits=(4096, 1024, 1024)),
    "o": Around(residual=True),
    "gate+up": Around(gated="silu"),
    "down": Around(residual=True),
}
DISTINCT = 512


@dataclass(frozen=True)
class Case:
    """A product by a Plan."""

    label: str
    shape: QuantisedShape
    plan: Any

    @property
    def text(self) -> str:
        """The Plan in a line."""
        plan = self.plan
        if not hasattr(plan, "tile"):
            return str(plan)
        return (
            f"tile {'x'.join(map(str, plan.tile))} ways {plan.ways} split {plan.split}"
            f" stages {plan.stages} programs {plan.programs}"
        )


def assembled(case: Case) -> Any:
    """(code, entry) of a case, in a process of its own, or why there is none."""
    from tilegrad.targets.ptx.assemble import assemble, find_ptxas
    from tilegrad.targets.ptx.emit import emit

    try:
        body = body_of(case.shape, case.plan, "quantised", AROUND[case.label])
        text, entry = emit(body, "quantised", H200)
        if find_ptxas() is None:
            return text, entry
        made = assemble(text)
        made.check_library("quantised")
    except TilegradError as error:
        return str(error)[:160]
    return made.cubin, entry


def best(shape: QuantisedShape, around: Around) -> Sequence[Any]:
    """The Plan that is chosen."""
    return plans_for(shape, H200, around)[:1]


def every(shape: QuantisedShape, around: Around) -> Sequence[Any]:
    """All Plans, those of several tokens for one as well."""
    more = packed_plans(shape, around, H200) if shape.tokens == 1 else []
    return [*plans_for(shape, H200, around), *more]


def random_rows(form: Format, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Bytes of rows: random codes, scales of a sensible size."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, columns // form.block, form.block_bytes), np.uint8)
    for field in form.fields:
        if field.dtype.is_float:
            made = rng.uniform(0.5, 1.5, (*blocks.shape[:2], field.count)) * 0.01
            made = made * np.where(field.name == "minimum", -8.0, 1.0)
            width = field.count * field.dtype.size
            blocks[..., field.offset : field.offset + width] = (
                made.astype(field.dtype.numpy).view(np.uint8).reshape(*blocks.shape[:2], width)
            )
    return blocks.reshape(rows, -1)


class Weights:
    """The parts of a Format's weights in several sets, and the unpacked rows they repeat."""

    def __init__(self, shape: QuantisedShape, count: int) -> None:
        import torch

        raw = random_rows(shape.format, DISTINCT, shape.columns)
        self.exact = torch.from_numpy(shape.format.to_float32(raw)).cuda().double()
        made = pack(shape, raw)
        rows = -(-shape.rows // 16) * 16
        self.bytes = shape.format.storage_bytes((shape.rows, shape.columns))
        found = [torch.from_numpy(made[name]).cuda() for name, _, _ in parts(shape)]
        found = [p.view(torch.int16) if p.dtype == torch.uint16 else p for p in found]
        first = [p[torch.arange(rows * len(p) // DISTINCT, device="cuda") % len(p)] for p in found]
        self.sets = [first] + [[p.clone() for p in first] for _ in range(count - 1)]


class Run:
    """A kernel over all sets of weights."""

    def __init__(self, bench: Any, case: Case, made: Any, weights: Weights) -> None:
        import torch

        from tilegrad.targets.ptx.launch import Prepared

        cubin, entry = made
        function = bench.device.load(cubin).function("quantised")
        self.bench, self.case, self.weights = bench, case, weights
        self.kernel = Prepared(function, entry, {})
        shape, self.around = case.shape, AROUND[case.label]
        sizes = self.around.results(shape)
        new = {"device": "cuda", "dtype": torch.bfloat16}
        self.residual = torch.randn(shape.tokens, sizes[0], **new)
        self.x = torch.randn(shape.tokens, shape.columns, **new)
        self.out = [torch.full((shape.tokens, s), float("nan"), **new) for s in sizes]

    def launch(self, i: int) -> None:
        """One launch on a set."""
        residual = [self.residual] if self.around.residual else []
        given = (self.x, *self.weights.sets[i % len(self.weights.sets)], *residual, *self.out)
        self.kernel.point([t.data_ptr() for t in given])
        self.kernel.start(dependent=True)

    def error(self) -> float:
        """The worst error of a token, of the norm of its results."""
        import torch

        torch.cuda.synchronize()
        with torch.cuda.stream(self.bench.stream):
            self.launch(0)
        self.bench.stream.synchronize()
        wanted = self.x.double() @ self.weights.exact.T
        rows = self.case.shape.rows
        wanted = wanted.repeat(1, -(-rows // DISTINCT))[:, :rows]
        if self.around.gated:
            wanted = torch.nn.functional.silu(wanted[:, : rows // 2]) * wanted[:, rows // 2 :]
        wanted = wanted + self.residual.double() if self.around.residual else wanted
        found = torch.cat(self.out, 1).double()
        return float(((found - wanted).norm(dim=1) / wanted.norm(dim=1)).max())

    def seconds(self, rounds: int) -> float:
        """Of a launch."""
        count = max(8, len(self.weights.sets))
        return self.bench.alone([lambda i=i: self.launch(i) for i in range(count)], rounds)


def chained(bench: Any, chain: Sequence[Run], count: int = 8) -> float:
    """Seconds of a layer's products, one after the other."""
    work = [lambda r=r, i=i: r.launch(i) for i in range(count) for r in chain]
    return bench.alone(work, 5) * len(chain)


def chained_bf16(bench: Any, tokens: int) -> float:
    """Seconds of torch's bfloat16 products of a layer, one after the other."""
    import torch

    work, kept = [], []
    for _ in range(2):
        for _, rows, columns in SHAPES:
            w = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16).normal_()
            x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
            out = torch.empty(tokens, rows, device="cuda", dtype=torch.bfloat16)
            kept.append((w, x, out))
            work.append(lambda w=w, x=x, out=out: torch.mm(x, w.T, out=out))
    return bench.alone(work, 5) * len(SHAPES)


def shapes_of(name: str, tokens: int) -> list[tuple[str, QuantisedShape]]:
    """The products of a layer."""
    form = BY_NAME[name]
    return [(label, QuantisedShape(form, r, c, tokens, bfloat16)) for label, r, c in SHAPES]


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", default="Q4_1")
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64,128,256")
    parser.add_argument("--plans", action="store_true")
    parser.add_argument("--limit", type=int, default=12, help="Plans of a product at most")
    parser.add_argument("--out", default="", help="where the JSON goes")
    given = parser.parse_args()
    began = time.perf_counter()
    formats, tokens = given.formats.split(","), [int(t) for t in given.tokens.split(",")]
    cases = [
        Case(label, shape, plan)
        for name in formats
        for count in tokens
        for label, shape in shapes_of(name, count)
        for plan in (every if given.plans else best)(shape, AROUND[label])[: given.limit]
    ]
    with ProcessPoolExecutor(16, multiprocessing.get_context("spawn")) as pool:
        made = dict(zip(cases, pool.map(assembled, cases)))
    print(f"{len(cases)} kernels made in {time.perf_counter() - began:.0f} s", flush=True)
    from gpu import Bench, sets

    bench, rows = Bench(), []
    print(bench.device, flush=True)
    for name in formats:
        weights = {
            label: Weights(shape, sets(shape.format.storage_bytes((shape.rows, shape.columns))))
            for label, shape in shapes_of(name, 1)
        }
        for count in tokens:
            rows.append(layer(bench, name, count, made, weights, given.plans))
    print(f"{time.perf_counter() - began:.0f} s in all")
    if given.out:
        record = {**bench.about(), "rows": rows}
        Path(given.out).write_text(json.dumps(record, indent=1))


def layer(
    bench: Any, name: str, tokens: int, made: dict[Case, Any], weights: Any, every: bool
) -> dict[str, Any]:
    """The products of a layer alone, by every Plan, and chained by the best of each."""
    chain, found, others = [], {}, []
    for label, shape in shapes_of(name, tokens):
        runs: list[tuple[float, Run]] = []
        for case, ready in made.items():
            if (case.label, case.shape) != (label, shape):
                continue
            if isinstance(ready, str):
                print(f"  {label} {tokens}: {case.text}: {ready}", flush=True)
                continue
            try:
                run = Run(bench, case, ready, weights[label])
            except TilegradError as fault:
                print(f"  {label} {tokens}: {case.text}: {str(fault)[:160]}", flush=True)
                continue
            error, seconds = run.error(), run.seconds(3)
            share = 100 * weights[label].bytes / seconds / LIMIT
            guess = plan_seconds(case)
            print(
                f"{name} {label:8s} tokens {tokens:3d}: {1e6 * seconds:7.2f} us {share:5.1f}%"
                f" guess {1e6 * guess:6.1f}  {case.text}  error {error:.1e}{wrong(error < 6e-3)}",
                flush=True,
            )
            runs.append((seconds, run))
        seconds, best = min(runs, key=lambda r: r[0]) if every else runs[0]
        if every:
            print(f"best {label} {tokens}: {1e6 * seconds:.2f} us {best.case.text}", flush=True)
        found[label] = 1e6 * seconds
        chain.append(best)
        others.append([run for _, run in sorted(runs, key=lambda r: r[0])])
    seconds = chained(bench, chain)
    for at, runs_of in enumerate(others if every else ()):
        for run in runs_of:
            tried = [*chain[:at], run, *chain[at + 1 :]]
            took = chained(bench, tried)
            label = f"{run.case.label} {tokens}"
            print(f"  chained {1e6 * took:6.2f} us with {label}: {run.case.text}", flush=True)
            if took < seconds:
                seconds, chain = took, tried
    if every:
        print("\n".join(f"kept: {r.case.label} {tokens}: {r.case.text}" for r in chain))
    plain = chained_bf16(bench, tokens)
    share = 100 * sum(w.bytes for w in weights.values()) / seconds / LIMIT
    bar = BARS.get(tokens)
    met = "" if bar is None else f" (bar {bar}%: {verdict(share >= bar)})"
    print(
        f"== {name} tokens {tokens:3d}: a layer chained {1e6 * seconds:7.1f} us, {share:.1f}% of"
        f" the limit of its bytes{met}; bfloat16 {1e6 * plain:.1f} us, {plain / seconds:.2f}x",
        flush=True,
    )
    return {
        "format": name,
        "tokens": tokens,
        "us": 1e6 * seconds,
        "share": share,
        "bf16_us": 1e6 * plain,
        "alone_us": found,
    }


def plan_seconds(case: Case) -> float:
    """What the Plan's model expects; 0 where there is none."""
    if not hasattr(case.plan, "tile"):
        return 0.0
    return expected(case.shape, AROUND[case.label], case.plan, H200)


if __name__ == "__main__":
    main()
    end()

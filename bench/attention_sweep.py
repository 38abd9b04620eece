"""Attention forward, every candidate Plan beside torch SDPA (cuDNN and FlashAttention-2).

    python bench/attention_sweep.py                       all cases, all candidates
    python bench/attention_sweep.py --widths 128 --tokens 8192 --causal both
    python bench/attention_sweep.py --chosen              only the Plan that `choose` takes
    python bench/attention_sweep.py --only "128x176" --rounds 11
    python bench/attention_sweep.py --dry                 no GPU: build and assemble everything

Each case has 16384 tokens and heads x head size 2048, as peers.md has. Bodies are emitted and
assembled in parallel, each is checked against SDPA in float32, and then timed as replayed graphs,
alternating with cuDNN. Causal counts half of the operations.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tilegrad.core.dtype import bfloat16, dtype_of
from tilegrad.core.target import H200
from tilegrad.kernels.attention.forward import wide_attention
from tilegrad.kernels.attention.plan import AttentionPlan, choose, ordered, plans, why_not
from tilegrad.kernels.attention.shape import AttentionShape
from tilegrad.targets.ptx.assemble import assemble
from tilegrad.targets.ptx.emit import emit
from tilegrad.targets.ptx.program import Entry

TOKENS = 16384
Case = tuple[int, int, bool]  # head size, sequence length, causal


def shape_of(case: Case, total: int, features: int, dtype: str, group: int) -> AttentionShape:
    """The attention of a case."""
    width, tokens, causal = case
    heads = max(1, features // width)
    return AttentionShape(
        batch=max(1, total // tokens),
        heads=heads,
        key_heads=max(1, heads // group),
        queries=tokens,
        keys=tokens,
        width=width,
        value_width=width,
        dtype=dtype_of(dtype),
        scale=1 / math.sqrt(width),
        band=(None, 0 if causal else None),
    )


def candidates(x: AttentionShape) -> list[AttentionPlan]:
    """Plans to measure: every tile, with other rings and orders."""
    found: dict[AttentionPlan, None] = {}
    for made in plans(x, H200):
        narrow = replace(made, chained=True, narrow=True)
        tried = [
            ordered(x, made),
            made,
            replace(made, chained=True),
            replace(made, narrow=True),
            narrow,
            replace(made, late=True),
            replace(narrow, late=True),
            replace(made, late=True, narrow=True),
            replace(made, query_stages=1),
            replace(made, stages=made.stages + 1),
            replace(made, section=max(1, made.section // 4)),
            replace(made, section=4 * made.section),
        ]
        for plan in tried:
            if not why_not(x, plan) and (not plan.narrow or x.band[1] is not None):
                found[plan] = None
    return list(found)


def label(p: AttentionPlan) -> str:
    """A Plan in one word."""
    return (
        f"{p.tile[0]}x{p.tile[1]} s{p.stages} q{p.query_stages} o{p.staged}"
        f" section{p.section} p{p.programs}"
        + "".join(
            f" {name}={value}"
            for name, value in asdict(p).items()
            if name not in KNOWN and value != getattr(AttentionPlan(), name)
        )
    )


KNOWN = {
    "tile",
    "stages",
    "query_stages",
    "staged",
    "section",
    "programs",
}


def build(job: tuple[AttentionShape, AttentionPlan]) -> tuple[bytes, str, str, str]:
    """(cubin, entry, report, fault) of a Plan."""
    x, plan = job
    try:
        text, entry = emit(wide_attention(x, plan), "attention", H200)
        made = assemble(text)
        report = made.reports["attention"]
        said = f"{report.registers} registers, {entry.shared_bytes} bytes shared"
        try:
            made.check_library("attention")
        except Exception as failure:  # slow, not wrong: say so and measure it all the same
            said += f" SLOW: {str(failure)[:160]}"
        return made.cubin, entry.to_text(), said, ""
    except Exception as failure:
        return b"", "", "", f"{type(failure).__name__}: {str(failure)[:300]}"


def flops(x: AttentionShape) -> float:
    """Operations that count."""
    pairs = x.batch * x.heads * x.queries * x.keys  # type: ignore[operator]
    return (0.5 if x.band[1] is not None else 1.0) * 2 * pairs * (x.width + x.value_width)  # type: ignore[no-any-return]


class Measured:
    """Inputs of one case on the GPU, and torch's side."""

    def __init__(self, bench: Any, x: AttentionShape) -> None:
        import torch

        from gpu import sets

        self.torch, self.bench, self.x = torch, bench, x
        kind = getattr(torch, x.dtype.name)
        bytes_ = sum(x.dtype.size * math.prod(x.sizes(n)) for n in ("q", "k", "v", "out"))
        count = min(6, sets(bytes_))

        def made(name: str) -> list[Any]:
            return [torch.randn(*x.sizes(name), device="cuda", dtype=kind) for _ in range(count)]

        self.q, self.k, self.v = made("q"), made("k"), made("v")
        self.out = [torch.empty(*x.sizes("out"), device="cuda", dtype=kind) for _ in range(count)]
        self.lse = [torch.empty(*x.rows, device="cuda") for _ in range(count)]

    def wanted(self, number: int = 0) -> tuple[Any, Any]:
        """SDPA in float32 of one batch element and two heads, with its log-sum-exp."""
        torch, x = self.torch, self.x
        heads = [0, x.heads - 1]
        q = self.q[number][-1:, heads].float()
        k, v = (t[number][-1:, [h // x.group for h in heads]].float() for t in (self.k, self.v))
        out, lse = torch.empty(*q.shape[:3], x.value_width, device="cuda"), q.new_empty(q.shape[:3])
        for start in range(0, q.shape[2], 1024):
            rows = slice(start, start + 1024)
            s = (q[:, :, rows].double() @ k.double().transpose(-1, -2)) * x.scale
            if x.band[1] is not None:
                i = torch.arange(start, start + s.shape[2], device="cuda")[:, None]
                s = s.masked_fill(
                    torch.arange(s.shape[3], device="cuda")[None] > i + x.band[1], -math.inf
                )
            lse[:, :, rows] = torch.logsumexp(s, -1).float()
            out[:, :, rows] = (torch.softmax(s, -1) @ v.double()).float()
        return out, lse

    def torch_launches(self, backend: str) -> list[Any]:
        """Launches of SDPA with one of torch's backends."""
        torch, x = self.torch, self.x
        from torch.nn.attention import SDPBackend, sdpa_kernel

        chosen = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}[backend]

        def one(i: int) -> None:
            with sdpa_kernel(chosen):
                torch.nn.functional.scaled_dot_product_attention(
                    self.q[i],
                    self.k[i],
                    self.v[i],
                    is_causal=x.band[1] is not None,
                    scale=x.scale,
                    enable_gqa=x.group > 1,
                )

        return [lambda i=i: one(i) for i in range(len(self.q))]

    def ours(self, cubin: bytes, entry: Entry) -> list[Any]:
        """Launches of one of our kernels."""
        from tilegrad.targets.ptx.launch import Prepared

        function = self.bench.device.load(cubin).function("attention")
        kernel = Prepared(function, entry, {})

        def launch(i: int) -> None:
            kernel.point(
                (
                    self.q[i].data_ptr(),
                    self.k[i].data_ptr(),
                    self.v[i].data_ptr(),
                    self.out[i].data_ptr(),
                    self.lse[i].data_ptr(),
                )
            )
            kernel.start()

        return [lambda i=i: launch(i) for i in range(len(self.q))]

    def error(self, run: Any) -> tuple[float, float]:
        """Relative error of results and largest error of log-sum-exps; all must be written."""
        torch, x = self.torch, self.x
        self.out[0].fill_(float("nan"))
        self.lse[0].fill_(float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(self.bench.stream):
            run()
        self.bench.stream.synchronize()
        if not bool(torch.isfinite(self.out[0]).all()) or not bool(
            torch.isfinite(self.lse[0]).all()
        ):
            return math.inf, math.inf
        if not hasattr(self, "known"):
            self.known = self.wanted()
        heads = [0, x.heads - 1]
        out, lse = self.out[0][-1:, heads].float(), self.lse[0][-1:, heads]
        return (
            float((out - self.known[0]).norm() / self.known[0].norm()),
            float((lse - self.known[1]).abs().max()),
        )


def measure(
    bench: Any, x: AttentionShape, built: list[tuple[AttentionPlan, Any]], rounds: int
) -> dict[str, Any]:
    """One case: peers, then every Plan interleaved with cuDNN."""
    case = Measured(bench, x)
    work = flops(x)
    row: dict[str, Any] = {"plans": []}
    for backend in ("cudnn", "flash"):
        try:
            seconds = bench.alone(case.torch_launches(backend))
            row[backend] = work / seconds / 1e12
        except Exception as failure:
            print(f"  {backend}: {type(failure).__name__} {str(failure)[:200]}", flush=True)
    peer = "cudnn" if "cudnn" in row else "flash"
    theirs = case.torch_launches(peer)
    print(
        "  " + ", ".join(f"{b} {row[b]:.0f} TFLOP/s" for b in ("cudnn", "flash") if b in row),
        flush=True,
    )
    for plan, (cubin, entry, report, fault) in built:
        if fault:
            print(f"  {label(plan)}: {fault}", flush=True)
            continue
        try:
            launches = case.ours(cubin, Entry.from_text(entry))
            errors = case.error(launches[0])
            found = bench.interleave(launches, theirs, rounds)
        except Exception as failure:
            print(f"  {label(plan)}: {type(failure).__name__} {str(failure)[:300]}", flush=True)
            if "CUDA" in str(failure) or "ILLEGAL" in str(failure).upper():
                traceback.print_exc()
            continue
        speed = work / found["ours_us"] / 1e6
        wrong = "" if errors[0] < 1e-2 and errors[1] < 1e-2 else "  WRONG"
        row["plans"].append(
            {
                "plan": label(plan),
                "fields": asdict(plan),
                "tflops": speed,
                "error": errors[0],
                "lse_error": errors[1],
                "report": report,
                **found,
            }
        )
        print(
            f"  {found['ratio']:.3f}x [{found['ratio_low']:.3f}, {found['ratio_high']:.3f}]"
            f" {speed:5.0f} TFLOP/s {found['ours_us']:8.1f} us  {label(plan)}"
            f"  error {errors[0]:.1e} {errors[1]:.1e}{wrong}"
            f"{'  ' + report if 'SLOW' in report else ''}",
            flush=True,
        )
    row["plans"].sort(key=lambda p: -p["ratio"])
    if row["plans"]:
        best = row["plans"][0]
        print(
            f"  best {best['ratio']:.3f}x {best['tflops']:.0f} TFLOP/s: {best['plan']}", flush=True
        )
    return row


def few(plans: list[AttentionPlan], count: int) -> list[AttentionPlan]:
    """Plans of the first so many tiles; 0: all."""
    tiles = list(dict.fromkeys(p.tile for p in plans))[: count or None]
    return [p for p in plans if p.tile in tiles]


def cases_of(given: argparse.Namespace) -> list[Case]:
    """Head sizes x lengths x causal or not."""
    causal = {"both": (True, False), "yes": (True,), "no": (False,)}[given.causal]
    return [
        (int(w), int(t), c)
        for w in given.widths.split(",")
        for t in given.tokens.split(",")
        for c in causal
    ]


def main() -> None:
    """Run the sweep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", default="128,64")
    parser.add_argument("--tokens", default="512,2048,8192,16384")
    parser.add_argument("--causal", default="both", choices=("both", "yes", "no"))
    parser.add_argument("--group", type=int, default=1, help="query heads of a key head")
    parser.add_argument("--dtype", default=bfloat16.name)
    parser.add_argument("--total", type=int, default=TOKENS, help="tokens of a case")
    parser.add_argument("--features", type=int, default=2048, help="heads x head size")
    parser.add_argument("--chosen", action="store_true", help="only what the model chooses")
    parser.add_argument("--only", default="", help="Plans whose label has this in it")
    parser.add_argument("--tiles", type=int, default=0, help="how many tiles of the model's list")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dry", action="store_true", help="build and assemble, do not run")
    parser.add_argument("--out", default="", help="where the JSON goes")
    given = parser.parse_args()
    cases = cases_of(given)
    shapes = {c: shape_of(c, given.total, given.features, given.dtype, given.group) for c in cases}
    wanted = {
        c: [choose(x, H200)]
        if given.chosen
        else few([p for p in candidates(x) if given.only in label(p)], given.tiles)
        for c, x in shapes.items()
    }
    jobs = [(shapes[c], p) for c in cases for p in wanted[c]]
    with ProcessPoolExecutor(max(1, given.workers)) as pool:
        made = dict(zip(jobs, pool.map(build, jobs)))
    print(f"{len(jobs)} kernels built", flush=True)
    if given.dry:
        for (x, plan), (_, _, report, fault) in made.items():
            print(x.width, x.queries, x.band, label(plan), report, fault)
        sys.exit(1 if any(m[3] or "SLOW" in m[2] for m in made.values()) else 0)
    from gpu import Bench

    bench, rows = Bench(), []
    for case in cases:
        x = shapes[case]
        print(
            f"d{case[0]} tokens {case[1]} {'causal' if case[2] else 'full'}"
            f" ({x.batch} x {x.heads} heads, {x.key_heads} key heads)",
            flush=True,
        )
        found = measure(bench, x, [(p, made[x, p]) for p in wanted[case]], given.rounds)
        rows.append({"width": case[0], "tokens": case[1], "causal": case[2], **found})
    best = [r["plans"][0]["ratio"] for r in rows if r["plans"]]
    if best:
        mean = math.exp(sum(map(math.log, best)) / len(best))
        print(f"best Plans: geometric mean {mean:.3f}x, least {min(best):.3f}x of {len(best)}")
    if given.out:
        Path(given.out).write_text(json.dumps({**bench.about(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()

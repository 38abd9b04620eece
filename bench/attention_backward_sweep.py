"""Attention backward, every candidate Plan beside torch SDPA's backward (cuDNN, FlashAttention-2).

    python bench/attention_backward_sweep.py                  all cases, all candidates, both modes
    python bench/attention_backward_sweep.py --chosen --modes fast --widths 128 --tokens 8192
    python bench/attention_backward_sweep.py --only late --causal no
    python bench/attention_backward_sweep.py --dry            no GPU: build and assemble everything

Each case has 16384 tokens and heads x head size 2048, as peers.md has. Ours is the launches of a
Plan on raw buffers; delta, which an ordinary kernel gives in a compiled program, is given. Every
Plan is checked against float64 of two heads (and cuDNN's error is shown beside), the reproducible
ones are repeated 20 times to the bit, and then timed as replayed graphs, alternating with cuDNN;
launches of a Plan are also timed alone. FLOPs are 10 x tokens^2 x head size a head, half if causal.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tilegrad.core.dtype import bfloat16, dtype_of
from tilegrad.core.target import H200
from tilegrad.kernels.attention.backward import attention_backward
from tilegrad.kernels.attention.plan import BackwardPlan
from tilegrad.kernels.attention.plan import backward_why_not as why_not
from tilegrad.kernels.attention.plan import choose_backward as choose
from tilegrad.kernels.attention.shape import AttentionShape
from tilegrad.targets.ptx.assemble import assemble
from tilegrad.targets.ptx.emit import emit
from tilegrad.targets.ptx.program import Entry

TOKENS = 16384
REPEATS = 20
Case = tuple[int, int, bool]  # head size, sequence length, causal
Built = tuple[str, bytes, str, tuple[str, ...], str]  # name, cubin, entry, arguments, report


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


def candidates(x: AttentionShape, fast: bool) -> list[BackwardPlan]:
    """The chosen Plan, and others with its blocks, rings and ways changed."""
    first = choose(x, fast)
    found = [first, *(replace(first, query_stages=n, late=not first.late) for n in (2, 3, 4))]
    if not fast:
        sizes = ((64, 4, 160), (80, 2, 112), (64, 4, 96), (96, 3, 144), (64, 2, 144))
        names = ("queries", "query_stages", "keys")
        found += [
            replace(first, **dict(zip(names, size)), late=late)  # type: ignore[arg-type]
            for size in sizes
            for late in (False, True)
        ]
    return [p for p in dict.fromkeys(found) if not why_not(x, p)]


def label(p: BackwardPlan) -> str:
    """A Plan in a few words."""
    changed = [
        f"{name}={value}"
        for name, value in asdict(p).items()
        if name not in KNOWN and value != getattr(BackwardPlan(), name)
    ]
    ways = [name for name in ("fast", "late") if getattr(p, name)]
    of_keys = "" if p.fast else f" k{p.keys}"
    mixed = [f"section{p.section}"] if p.section > 1 else []
    return " ".join([f"q{p.queries} s{p.query_stages}{of_keys}", *ways, *mixed, *changed])


KNOWN = {
    "queries",
    "query_stages",
    "keys",
    "fast",
    "late",
    "section",
}


def build(job: tuple[AttentionShape, BackwardPlan]) -> tuple[list[Built], str]:
    """The launches of a Plan, and what went wrong."""
    x, plan = job
    found: list[Built] = []
    try:
        for body in attention_backward(x, plan):
            name = body.name
            text, entry = emit(body, name, H200)
            made = assemble(text)
            arguments = tuple(p.attrs["name"] for p in body.parameters)
            said = f"{made.reports[name].registers} registers, {entry.shared_bytes} bytes shared"
            try:
                made.check_library(name)
            except Exception as failure:  # slow, not wrong: say so and measure it all the same
                said += f" SLOW: {str(failure)[:160]}"
            found.append((name, made.cubin, entry.to_text(), arguments, said))
    except Exception as failure:
        return [], f"{type(failure).__name__}: {str(failure)[:300]}"
    return found, ""


def flops(x: AttentionShape) -> float:
    """Operations that count: five products."""
    pairs = x.batch * x.heads * x.queries * x.keys  # type: ignore[operator]
    half = 0.5 if x.band[1] is not None else 1.0
    return half * 2 * pairs * (3 * x.width + 2 * x.value_width)  # type: ignore[no-any-return]


class Measured:
    """Inputs of one case on the GPU, and torch's side."""

    def __init__(self, bench: Any, x: AttentionShape) -> None:
        import torch

        from gpu import sets

        self.torch, self.bench, self.x = torch, bench, x
        kind = getattr(torch, x.dtype.name)
        names = {"q": "q", "k": "k", "v": "v", "dout": "out", "dq": "q", "dk": "k", "dv": "v"}
        bytes_ = sum(x.dtype.size * math.prod(x.sizes(n)) for n in names.values())  # type: ignore[arg-type]
        count = min(4, sets(bytes_))
        self.sets: list[dict[str, Any]] = []
        for _ in range(count):
            one = {
                n: torch.randn(*x.sizes(of), device="cuda", dtype=kind) for n, of in names.items()
            }
            one["lse"], one["delta"] = self.facts(one)
            self.sets.append(one)
        self.scratch: dict[str, Any] = {}

    def rows(self, one: dict[str, Any], batch: int, head: int, wide: Any) -> Any:
        """Blocks of scores of a head: (rows, q, k, v, scores, hidden)."""
        torch, x = self.torch, self.x
        q, k, v = (one[n][batch, head if n == "q" else head // x.group].to(wide) for n in "qkv")
        columns = torch.arange(k.shape[0], device="cuda")[None]
        for start in range(0, q.shape[0], 1024):
            rows = slice(start, min(q.shape[0], start + 1024))
            s = (q[rows] @ k.T) * x.scale
            if x.band[1] is not None:
                line = torch.arange(rows.start, rows.stop, device="cuda")[:, None]
                s = s.masked_fill(columns > line + x.band[1], -math.inf)
            yield rows, q, k, v, s

    def facts(self, one: dict[str, Any]) -> tuple[Any, Any]:
        """lse and delta of a set of inputs, in float32 products."""
        torch, x = self.torch, self.x
        torch.backends.cuda.matmul.allow_tf32 = False
        lse, delta = (torch.empty(*x.rows, device="cuda") for _ in range(2))
        for batch in range(x.batch):  # type: ignore[arg-type]
            for head in range(x.heads):
                for rows, _, _, v, s in self.rows(one, batch, head, torch.float32):
                    lse[batch, head, rows] = torch.logsumexp(s, -1)
                    out = torch.softmax(s, -1) @ v
                    dout = one["dout"][batch, head, rows].float()
                    delta[batch, head, rows] = (out * dout).sum(-1)
        return lse, delta

    def wanted(self) -> dict[str, Any]:
        """Gradients in float64 of the last batch and the heads of its last key head."""
        torch, x, one = self.torch, self.x, self.sets[0]
        batch, heads = x.batch - 1, range(x.heads - x.group, x.heads)  # type: ignore[operator]
        found: dict[str, Any] = {"dk": 0.0, "dv": 0.0, "dq": []}
        for head in heads:
            dq = torch.empty(x.queries, x.width, device="cuda", dtype=torch.float64)
            for rows, q, k, v, s in self.rows(one, batch, head, torch.float64):
                p, dout = torch.softmax(s, -1), one["dout"][batch, head, rows].double()
                dp = dout @ v.T
                ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * x.scale
                dq[rows] = ds @ k
                found["dk"] = found["dk"] + ds.T @ q[rows]
                found["dv"] = found["dv"] + p.T @ dout
            found["dq"].append(dq)
        found["dq"] = torch.stack(found["dq"])
        return found

    def errors(self, given: dict[str, Any]) -> list[float]:
        """Relative errors of gradients of the checked heads; inf where one is not finite."""
        if not hasattr(self, "known"):
            self.known = self.wanted()
        heads = {"dq": slice(-self.x.group, None), "dk": -1, "dv": -1}
        found = []
        for name, wanted in self.known.items():
            if not bool(self.torch.isfinite(given[name]).all()):
                found.append(math.inf)
                continue
            part = given[name][-1][heads[name]].double()
            found.append(float((part - wanted).norm() / wanted.norm()))
        return found

    def torch_launches(self, backend: str) -> list[Callable[[], Any]]:
        """Launches of SDPA's backward with one of torch's backends."""
        torch, x = self.torch, self.x
        from torch.nn.attention import SDPBackend, sdpa_kernel

        chosen = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}[backend]
        made = []
        with torch.cuda.stream(self.bench.stream):
            for one in self.sets:
                given = [one[n].detach().requires_grad_() for n in "qkv"]
                with sdpa_kernel(chosen):
                    out = torch.nn.functional.scaled_dot_product_attention(
                        *given,
                        is_causal=x.band[1] is not None,
                        scale=x.scale,
                        enable_gqa=x.group > 1,
                    )
                made.append(
                    lambda out=out, given=given, dout=one["dout"]: torch.autograd.grad(
                        out, given, dout, retain_graph=True
                    )
                )
        return made

    def ours(
        self, built: Sequence[Built], scratch: Sequence[tuple[str, Any]]
    ) -> tuple[list[Callable[[], None]], list[list[Callable[[], None]]]]:
        """Whole passes by set of inputs, and single launches by number and set."""
        from tilegrad.targets.ptx.launch import Prepared

        torch = self.torch
        buffers = {
            n: torch.empty(*t.shape, device="cuda", dtype=getattr(torch, t.dtype.name))
            for n, t in scratch
        }
        single: list[list[Callable[[], None]]] = []
        for name, cubin, entry_text, arguments, _ in built:
            entry = Entry.from_text(entry_text)
            function = self.bench.device.load(cubin).function(name)
            kernel = Prepared(function, entry, {})

            def launch(i: int, kernel: Any = kernel, names: Any = arguments) -> None:
                kernel.point(tuple({**self.sets[i], **buffers}[n].data_ptr() for n in names))
                kernel.start()

            single.append([lambda i=i, launch=launch: launch(i) for i in range(len(self.sets))])

        def whole(i: int) -> None:
            for launches in single:
                launches[i]()

        return [lambda i=i: whole(i) for i in range(len(self.sets))], single

    def once(self, run: Callable[[], None]) -> dict[str, Any]:
        """Gradients of one run, poisoned before."""
        torch, one = self.torch, self.sets[0]
        for name in ("dq", "dk", "dv"):
            one[name].fill_(math.nan)
        torch.cuda.synchronize()
        with torch.cuda.stream(self.bench.stream):
            run()
        self.bench.stream.synchronize()
        return {name: one[name].clone() for name in ("dq", "dk", "dv")}

    def repeated(self, run: Callable[[], None]) -> int:
        """How many of many runs give the same bits."""
        torch = self.torch
        first = self.once(run)
        same = 0
        for _ in range(REPEATS):
            found = self.once(run)
            same += all(
                torch.equal(first[n].view(torch.int16), found[n].view(torch.int16)) for n in first
            )
        return same


def measure(
    bench: Any, x: AttentionShape, built: list[tuple[BackwardPlan, Any]], rounds: int
) -> dict[str, Any]:
    """One case: peers, then every Plan interleaved with cuDNN."""
    case = Measured(bench, x)
    work = flops(x)
    row: dict[str, Any] = {"plans": []}
    for backend in ("cudnn", "flash"):
        try:
            launches = case.torch_launches(backend)
            row[backend] = work / bench.alone(launches) / 1e12
            grads = dict(zip(("dq", "dk", "dv"), launches[0]()))
            row[f"{backend}_errors"] = case.errors(grads)
        except Exception as failure:
            print(f"  {backend}: {type(failure).__name__} {str(failure)[:200]}", flush=True)
    peer = "cudnn" if "cudnn" in row else "flash"
    theirs = case.torch_launches(peer)
    print(
        "  "
        + ", ".join(
            f"{b} {row[b]:.0f} TFLOP/s errors "
            + " ".join(f"{e:.1e}" for e in row.get(f"{b}_errors", ()))
            for b in ("cudnn", "flash")
            if b in row
        ),
        flush=True,
    )
    for plan, (launches_, fault) in built:
        if fault:
            print(f"  {label(plan)}: {fault}", flush=True)
            continue
        try:
            row["plans"].append(one_plan(bench, case, plan, launches_, theirs, work, rounds))
        except Exception as failure:
            print(f"  {label(plan)}: {type(failure).__name__} {str(failure)[:300]}", flush=True)
            traceback.print_exc()
    for fast in (False, True):
        some = sorted(
            (p for p in row["plans"] if p["fields"]["fast"] == fast), key=lambda p: -p["ratio"]
        )
        if some:
            row["best fast" if fast else "best"] = some[0]
            print(
                f"  best {'fast' if fast else 'reproducible'} {some[0]['ratio']:.3f}x"
                f" {some[0]['tflops']:.0f} TFLOP/s: {some[0]['plan']}",
                flush=True,
            )
    return row


def one_plan(
    bench: Any,
    case: Measured,
    plan: BackwardPlan,
    built: Sequence[Built],
    theirs: list[Any],
    work: float,
    rounds: int,
) -> dict[str, Any]:
    """One Plan: checked, repeated, timed as a whole beside the peer and launch by launch."""
    parameters = [p for body in attention_backward(case.x, plan) for p in body.parameters]
    scratch = [("sums", p.type) for p in parameters if p.attrs["name"] == "sums"]
    ours, single = case.ours(built, scratch)
    errors = case.errors(case.once(ours[0]))
    same = REPEATS if plan.fast else case.repeated(ours[0])
    found = bench.interleave(ours, theirs, rounds)
    parts = {
        b[0].removeprefix("attention_backward_"): 1e6 * bench.alone(launches)
        for b, launches in zip(built, single)
    }
    speed = work / found["ours_us"] / 1e6
    wrong = "" if max(errors) < 2e-2 and same == REPEATS else f"  WRONG ({same} repeats alike)"
    slow = "; ".join(b[4] for b in built if "SLOW" in b[4])
    print(
        f"  {found['ratio']:.3f}x [{found['ratio_low']:.3f}, {found['ratio_high']:.3f}]"
        f" {speed:5.0f} TFLOP/s {found['ours_us']:8.1f} us ("
        + ", ".join(f"{n} {us:.1f}" for n, us in parts.items())
        + f")  {label(plan)}  errors {' '.join(f'{e:.1e}' for e in errors)}{wrong}"
        f"{'  ' + slow if slow else ''}",
        flush=True,
    )
    return {
        "plan": label(plan),
        "fields": asdict(plan),
        "tflops": speed,
        "errors": errors,
        "same": same,
        "parts_us": parts,
        "reports": [b[4] for b in built],
        **found,
    }


def cases_of(given: argparse.Namespace) -> list[Case]:
    """Head sizes x lengths x causal or not."""
    causal = {"both": (True, False), "yes": (True,), "no": (False,)}[given.causal]
    return [
        (int(w), int(t), c)
        for w in given.widths.split(",")
        for t in given.tokens.split(",")
        for c in causal
    ]


def arguments() -> argparse.Namespace:
    """What to measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", default="128,64")
    parser.add_argument("--tokens", default="512,2048,8192,16384")
    parser.add_argument("--causal", default="both", choices=("both", "yes", "no"))
    parser.add_argument("--modes", default="reproducible,fast")
    parser.add_argument("--group", type=int, default=1, help="query heads of a key head")
    parser.add_argument("--dtype", default=bfloat16.name)
    parser.add_argument("--total", type=int, default=TOKENS, help="tokens of a case")
    parser.add_argument("--features", type=int, default=2048, help="heads x head size")
    parser.add_argument("--chosen", action="store_true", help="only what the model chooses")
    parser.add_argument("--only", default="", help="Plans whose label has this in it")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dry", action="store_true", help="build and assemble, do not run")
    parser.add_argument("--out", default="", help="where the JSON goes")
    return parser.parse_args()


def main() -> None:
    """Run the sweep."""
    given = arguments()
    cases = cases_of(given)
    shapes = {c: shape_of(c, given.total, given.features, given.dtype, given.group) for c in cases}
    modes = [mode == "fast" for mode in given.modes.split(",")]
    wanted = {
        c: [
            p
            for fast in modes
            for p in ([choose(x, fast)] if given.chosen else candidates(x, fast))
            if given.only in label(p)
        ]
        for c, x in shapes.items()
    }
    jobs = [(shapes[c], p) for c in cases for p in wanted[c]]
    with ProcessPoolExecutor(max(1, given.workers)) as pool:
        made = dict(zip(jobs, pool.map(build, jobs)))
    print(f"{len(jobs)} Plans built", flush=True)
    if given.dry:
        for (x, plan), (built, fault) in made.items():
            print(x.width, x.queries, x.band, label(plan), [b[4] for b in built], fault)
        bad = any(fault or any("SLOW" in b[4] for b in built) for built, fault in made.values())
        sys.exit(1 if bad else 0)
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
    for name, bar in (("best", 0.75), ("best fast", 0.9)):
        ratios = [r[name]["ratio"] for r in rows if name in r]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            print(
                f"{name}: geometric mean {mean:.3f}x (bar {bar}), least {min(ratios):.3f}x"
                f" of {len(ratios)}"
            )
    if given.out:
        Path(given.out).write_text(json.dumps({**bench.about(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()

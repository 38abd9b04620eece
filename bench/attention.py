"""Attention forward and backward beside cuDNN and FlashAttention-2 (torch's SDPA), on a GPU.

    python bench/attention.py                        the table, forward, backward, both modes
    python bench/attention.py --only forward         one part: forward, backward, accuracy, repeat
    python bench/attention.py --widths 128 --tokens 2048 8192

bf16, batch x tokens = 16384, heads x head size = 2048. Ours is ordinary Tensor code, jitted; both
sides are replayed graphs, interleaved, on the same random inputs, rotated past the L2 cache.
A backward pass is timed alone on both sides (torch: `autograd.grad` of a kept graph; ours: from
q, k, v, the result, its log-sum-exps and the gradient). FLOPs are counted as 4 (forward) and 10
(backward) x tokens^2 x head size a head, half for causal; the floor is FLOPs over the rate of a
large bf16 product in this run. Errors are against float64 of a part of the heads, ours and theirs.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jitted import Launches
from measure import geometric_mean
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as torch_attention
from verdict import end, failures, verdict, wrong

import tilegrad as tg
from gpu import Bench, sets
from tilegrad.graph import ops
from tilegrad.kernels.attention.shape import PLAIN
from tilegrad.tensor.tensor import node_of, wrap

TOKENS, FEATURES = 16384, 2048
PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash2": SDPBackend.FLASH_ATTENTION}
HEADS = 32  # whose gradients are compared: of causal ones few rows make most of the error
BARS = {  # (geometric mean, least) of cuDNN's time over ours
    "forward": (0.97, 0.88),
    "backward fast": (0.9, 0.8),
    "backward": (0.75, 0.0),
    "forward 256": (0.9, 0.9),
}


@dataclass(frozen=True)
class Case:
    """One size of self-attention."""

    width: int
    tokens: int
    causal: bool

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, tokens, width)."""
        return TOKENS // self.tokens, FEATURES // self.width, self.tokens, self.width

    def flops(self, backward: bool) -> float:
        """Of one call, as peers count them."""
        b, h, t, d = self.shape
        return (10 if backward else 4) * b * h * t * t * d * (0.5 if self.causal else 1.0)

    @property
    def text(self) -> str:
        return f"d{self.width} t{self.tokens} {'causal' if self.causal else 'full'}"


def cases(widths: Sequence[int], tokens: Sequence[int]) -> list[Case]:
    """Every combination."""
    return [Case(w, t, c) for w in widths for t in tokens for c in (False, True)]


# ---- both sides -----------------------------------------------------------------------------


def ours_forward(causal: bool) -> Any:
    """(q, k, v) -> (result, log-sum-exps)."""
    return tg.jit(lambda q, k, v: tg.attention(q, k, v, causal=causal, return_lse=True))


def ours_backward(causal: bool) -> Any:
    """(q, k, v, result, log-sum-exps, gradient) -> gradients of q, k, v: the derivative's Node."""

    def run(q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any) -> Any:
        delta = (dout.float() * out.float()).sum(-1)
        node = ops.attention_backward(
            *(node_of(x) for x in (q, k, v, dout, lse, delta)),
            scale=q.shape[-1] ** -0.5,
            band=(None, 0 if causal else None),
            softcap=0.0,
            dropout=0.0,
            extras=(),
            orders=PLAIN,
            wanted=(),
        )
        return tuple(wrap(ops.get(node, index=i), q) for i in range(3))

    return tg.jit(run)


def peer_forward(q: Any, k: Any, v: Any, causal: bool, backend: Any) -> Callable[[], Any]:
    """torch's forward through one backend, with what its backward needs."""

    def run() -> Any:
        with sdpa_kernel(backend), torch.no_grad():
            return torch_attention(q, k, v, is_causal=causal)

    return run


def peer_backward(
    q: Any, k: Any, v: Any, dout: Any, causal: bool, backend: Any
) -> Callable[[], Any]:
    """torch's backward alone."""
    given = [x.detach().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(backend):
        out = torch_attention(*given, is_causal=causal)
    return lambda: torch.autograd.grad(out, given, dout, retain_graph=True)


def exact(q: Any, k: Any, v: Any, dout: Any, causal: bool) -> list[Any]:
    """Result and gradients in float64, of the first batch and HEADS heads at most."""
    count = min(HEADS, q.shape[1])
    parts = [
        exact_head(*(x[:1, h : h + 1].double() for x in (q, k, v, dout)), causal)
        for h in range(count)
    ]
    return [torch.cat(one, 1) for one in zip(*parts)]


def exact_head(q: Any, k: Any, v: Any, dout: Any, causal: bool) -> list[Any]:
    """The same of one head."""
    wide = [x.requires_grad_() for x in (q, k, v)]
    s = wide[0] @ wide[1].mT / math.sqrt(q.shape[-1])
    if causal:
        n = s.shape[-1]
        s = s.masked_fill(torch.ones(n, n, device=s.device, dtype=torch.bool).triu(1), -math.inf)
    out = torch.softmax(s, -1) @ wide[2]
    return [out.detach(), *torch.autograd.grad(out, wide, dout)]


def error(found: Any, wanted: Any) -> float:
    """Root mean square error over root mean square."""
    part = found[: wanted.shape[0], : wanted.shape[1]].double()
    return float((part - wanted).norm() / wanted.norm().clamp_min(1e-300))


# ---- the table ------------------------------------------------------------------------------


class Measured:
    """One case on a GPU."""

    def __init__(self, bench: Bench, case: Case) -> None:
        self.bench, self.case = bench, case
        bytes_ = 8 * math.prod(case.shape)
        self.inputs = [self.draw() for _ in range(sets(bytes_))]

    def draw(self) -> list[Any]:
        """q, k, v and the gradient of the result."""
        return [torch.randn(self.case.shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]

    def bound(self, function: Any, rows: Sequence[Sequence[Any]]) -> list[Launches]:
        """Our function bound to each set of inputs."""
        torch.cuda.synchronize()
        return [
            Launches(self.bench.device, function, *(tg.from_torch(x) for x in row)) for row in rows
        ]

    def results(self, launches: Launches) -> list[Any]:
        """Run once; results as torch tensors, poisoned before."""
        for r in launches.results:
            r.torch().fill_(math.nan)
        torch.cuda.synchronize()
        launches()
        self.bench.device.synchronize()
        return [r.torch() for r in launches.results]

    def forward(self, peers: Sequence[str]) -> dict[str, Any]:
        """The row of the forward pass."""
        start = time.perf_counter()
        ours = self.bound(ours_forward(self.case.causal), [row[:3] for row in self.inputs])
        row = self.head("forward", ours[0], time.perf_counter() - start)
        q, k, v, dout = self.inputs[0]
        wanted = exact(q, k, v, dout, self.case.causal) if self.case.tokens <= 8192 else None
        out = self.results(ours[0])[0]
        self.judge(
            row,
            [out],
            wanted and wanted[:1],
            [peer_forward(q, k, v, self.case.causal, PEERS["cudnn"])()],
        )
        self.time(
            row, ours, peers, lambda one, backend: peer_forward(*one[:3], self.case.causal, backend)
        )
        return row

    def backward(self, peers: Sequence[str], fast: bool) -> dict[str, Any]:
        """The row of the backward pass."""
        forward = self.bound(ours_forward(self.case.causal), [row[:3] for row in self.inputs])
        rows = []
        for launches, (q, k, v, dout) in zip(forward, self.inputs):
            out, lse = self.results(launches)
            rows.append([q, k, v, out, lse, dout])
        with tg.override(determinism="fast" if fast else "reproducible"):
            start = time.perf_counter()
            ours = self.bound(ours_backward(self.case.causal), rows)
            row = self.head(
                "backward fast" if fast else "backward", ours[0], time.perf_counter() - start
            )
        q, k, v, dout = self.inputs[0]
        wanted = exact(q, k, v, dout, self.case.causal) if self.case.tokens <= 8192 else None
        found = self.results(ours[0])
        self.judge(
            row,
            found,
            wanted and wanted[1:],
            peer_backward(q, k, v, dout, self.case.causal, PEERS["cudnn"])(),
        )
        self.time(
            row, ours, peers, lambda one, backend: peer_backward(*one, self.case.causal, backend)
        )
        return row

    def head(self, part: str, ours: Launches, seconds: float) -> dict[str, Any]:
        """What a row begins with."""
        return {
            "part": part,
            "case": self.case.text,
            "width": self.case.width,
            "tokens": self.case.tokens,
            "causal": self.case.causal,
            "kernels": ours.kernels,
            "programs": ours.programs,
            "compile_seconds": seconds,
        }

    def judge(self, row: dict[str, Any], found: Sequence[Any], wanted: Any, peer: Any) -> None:
        """Errors of ours and of cuDNN against float64, or against each other where too large."""
        if wanted is None:
            row["errors"] = [error(a, b.double()) for a, b in zip(found, peer)]
            row["right"] = max(row["errors"]) < 1e-2
            return
        row["errors"] = [error(a, b) for a, b in zip(found, wanted)]
        row["peer_errors"] = [error(a, b) for a, b in zip(peer, wanted)]
        row["right"] = all(
            a <= max(1.02 * b, 1e-4) for a, b in zip(row["errors"], row["peer_errors"])
        )

    def time(
        self, row: dict[str, Any], ours: Sequence[Any], peers: Sequence[str], make: Any
    ) -> None:
        """Interleave with each peer."""
        flops = self.case.flops(row["part"] != "forward")
        for name in peers:
            with torch.cuda.stream(self.bench.stream):
                theirs = [make(one, PEERS[name]) for one in self.inputs]
            found = self.bench.interleave(ours, theirs)
            row[name] = found | {"tflops": 1e-6 * flops / found["peer_us"]}
            row["us"] = found["ours_us"]
        row["tflops"] = 1e-6 * flops / row["us"]


def show(row: dict[str, Any], rate: float) -> None:
    """One line."""
    errors = " ".join(f"{e:.1e}" for e in row["errors"])
    theirs = " ".join(f"{e:.1e}" for e in row.get("peer_errors", ()))
    peers = " ".join(
        f"{n} {row[n]['tflops']:4.0f} ratio {row[n]['ratio']:.3f}" for n in PEERS if n in row
    )
    print(
        f"{row['part']:13} {row['case']:18} {row['us']:8.1f} us {row['tflops']:4.0f} TFLOP/s"
        f" ({1e12 * row['tflops'] / rate:.2f} of a product) {peers} | {row['kernels']} kernels,"
        f" errors {errors} (cudnn {theirs}) {wrong(row['right'])}",
        flush=True,
    )


def verdicts(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means and least ratios of each part against its bar."""
    found: dict[str, Any] = {}
    for part, (mean, least) in BARS.items():
        wide = part.endswith("256")
        name = part.removesuffix(" 256")
        mine = [
            r["cudnn"]["ratio"]
            for r in rows
            if r.get("part") == name and "cudnn" in r and (r["width"] == 256) == wide
        ]
        if mine:
            got = geometric_mean(mine)
            found[part] = {
                "mean": got,
                "least": min(mine),
                "bar": mean,
                "bar_least": least,
                "met": got >= mean and min(mine) >= least,
            }
            print(
                f"{part}: geometric mean {got:.3f} (bar {mean}), least {min(mine):.3f}"
                f" (bar {least}) of {len(mine)}:"
                f" {verdict(found[part]['met'])}"
            )
    return found


def repeat(bench: Bench, runs: int = 1000) -> dict[str, Any]:
    """One bit pattern in many runs of the reproducible backward pass."""
    case = Case(128, 2048, True)
    made = Measured(bench, case)
    q, k, v, dout = made.inputs[0]
    out, lse = made.results(made.bound(ours_forward(True), [[q, k, v]])[0])
    ours = made.bound(ours_backward(True), [[q, k, v, out, lse, dout]])[0]
    first = [x.clone() for x in made.results(ours)]
    same = 0
    for _ in range(runs):
        found = made.results(ours)
        same += all(
            torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(first, found)
        )
    print(f"reproducible backward: {same} of {runs} runs with the same bits")
    return {"runs": runs, "same": same}


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", action="append", default=[], choices=["forward", "backward", "fast", "repeat"]
    )
    parser.add_argument("--widths", type=int, nargs="*", default=[64, 128, 256])
    parser.add_argument("--tokens", type=int, nargs="*", default=[512, 2048, 8192, 16384])
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=["cudnn"])
    parser.add_argument("--out", default="", help="where the JSON goes")
    given = parser.parse_args()
    parts = given.only or ["forward", "backward", "fast", "repeat"]
    bench = Bench()
    ceilings = bench.ceilings()
    print(bench.device, {k: f"{v:.3e}" for k, v in ceilings.items()}, flush=True)
    rows: list[dict[str, Any]] = []
    for case in cases(given.widths, given.tokens):
        for part in parts:
            if part == "repeat":
                continue
            try:
                made = Measured(bench, case)
                row = (
                    made.forward(given.peers)
                    if part == "forward"
                    else made.backward(given.peers, part == "fast")
                )
                show(row, ceilings["bf16_flops"])
            except Exception as failure:  # one case that fails must not end the others
                row = {
                    "part": part,
                    "case": case.text,
                    "failed": f"{type(failure).__name__}: {failure}",
                }
                print(f"{part:13} {case.text} FAILED {row['failed'][:1000]}", flush=True)
                failures.append("FAILED")
            rows.append(row)
            torch.cuda.empty_cache()
    record = {
        "kind": "attention",
        **bench.about(),
        **ceilings,
        "rows": rows,
        "verdicts": verdicts(rows),
    }
    if "repeat" in parts:
        record["repeat"] = repeat(bench)
    if given.out:
        Path(given.out).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
    end()

"""Attention by the matrix units of a warp (what an A100 has) beside FlashAttention-2, on a GPU.

    python bench/attention_sm80.py                       forward and backward, the model's Plans
    python bench/attention_sm80.py --only forward --tokens 2048 --widths 128
    python bench/attention_sm80.py --only paged          decode over pages beside our sm_90a kernel
    python bench/attention_sm80.py --sweep               Plans for each case, best first
    python bench/attention_sm80.py --out FILE            JSON

bf16, batch x tokens = 16384, heads x head size = 2048. Ours is PTX of `.target sm_80`, handed to
the driver; theirs torch's SDPA with its flash backend forced. Both sides are replayed graphs,
interleaved, on the same random inputs, rotated past the L2 cache. FLOPs are counted as 4 (forward)
and 10 (backward) x tokens^2 x head size a head, half for causal. Results are held to float64 of one
head first, beside theirs. Backward is from q, k, v, log-sum-exps, delta and the gradient.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import decode_attention
import torch
from attention import PEERS, Case, cases, error, exact, peer_backward, peer_forward
from measure import geometric_mean
from verdict import end, failures, verdict, wrong

from gpu import Bench, sets
from tilegrad.core.dtype import bfloat16
from tilegrad.core.target import A100, Target
from tilegrad.kernels.attention import threads
from tilegrad.kernels.attention.shape import AttentionShape
from tilegrad.kernels.attention.threads import WarpPlan
from tilegrad.targets.ptx.emit import emit
from tilegrad.targets.ptx.launch import Prepared
from tilegrad.tile.build import Body

BARS = {"forward": (0.85, 0.75), "backward": (0.85, 0.75)}  # geometric mean, least
PAGED = 0.85  # of the bandwidth of our kernel for sm_90a, the geometric mean
FLASH = PEERS["flash2"]
TILES = {
    "forward": [(128, k, 4) for k in (32, 48, 64, 96, 128)] + [(64, 64, 4), (128, 64, 8)],
    "backward": [(64, 32, 4), (64, 64, 4), (128, 32, 4), (128, 32, 8), (128, 64, 8)],
}


def held(target: Target) -> Target:
    """The machine with the matrix units of a warp alone, and PTX that an A100 takes too."""
    return replace(target, name=f"{target.name}-warps", cpu=A100.cpu, matrix=A100.matrix)


class Measured:
    """One case: inputs in several sets, and our kernels on them."""

    def __init__(self, bench: Bench, case: Case) -> None:
        self.bench, self.case, self.target = bench, case, held(bench.target)
        b, h, t, d = case.shape
        band = (None, 0 if case.causal else None)
        self.x = AttentionShape(b, h, h, t, t, d, d, bfloat16, d**-0.5, band)

        def draw() -> Any:
            return torch.randn(case.shape, device="cuda", dtype=torch.bfloat16)

        self.inputs = [[draw() for _ in range(4)] for _ in range(sets(8 * b * h * t * d))]
        rows = case.shape[:3]
        self.memories = [
            {
                **dict(zip(("q", "k", "v", "dout"), given)),
                **{n: torch.empty_like(given[0]) for n in ("out", "dq", "dk", "dv")},
                **{n: torch.empty(rows, device="cuda") for n in ("lse", "delta")},
            }
            for given in self.inputs
        ]

    def launch(self, bodies: Sequence[Body]) -> list[Callable[[], None]]:
        """Launches of Bodies one after another, for each set of inputs."""
        made = []
        for number, body in enumerate(bodies):
            text, entry = emit(body, f"kernel{number}", self.target)
            assert ".target sm_80" in text
            function = self.bench.device.load(text).function(entry.name)
            made.append((Prepared(function, entry, {}), [p.attrs["name"] for p in body.parameters]))

        def run(memories: dict[str, Any]) -> None:
            for kernel, names in made:
                kernel.point(tuple(memories[n].data_ptr() for n in names))
                kernel.start()

        return [lambda m=m: run(m) for m in self.memories]  # type: ignore[misc]

    def forward(self, plan: Any = None) -> list[Callable[[], None]]:
        """Our forward pass."""
        plan = plan or threads.plans(self.x, self.target)[0]
        return self.launch([threads.attend(self.x, plan, self.target)])

    def backward(self, plan: Any = None) -> list[Callable[[], None]]:
        """Our backward pass, after a forward pass that leaves log-sum-exps."""
        for run in self.forward():
            run()
        self.bench.device.synchronize()
        for m in self.memories:
            m["delta"].copy_((m["dout"].float() * m["out"].float()).sum(-1))
        torch.cuda.synchronize()
        chosen = [
            (side, plan or threads.plans(self.x, self.target, side)[0]) for side in threads.SIDES
        ]
        return self.launch([threads.attend(self.x, p, self.target, (), side) for side, p in chosen])

    def theirs(self, part: str) -> list[Callable[[], Any]]:
        """FlashAttention-2 on the same inputs."""
        with torch.cuda.stream(self.bench.stream):
            if part == "forward":
                return [peer_forward(*g[:3], self.case.causal, FLASH) for g in self.inputs]
            return [peer_backward(*g, self.case.causal, FLASH) for g in self.inputs]

    def errors(self, part: str, ours: Sequence[Callable[[], None]]) -> tuple[list[float], Any]:
        """Of ours and of theirs against float64, of one head (against theirs where too long)."""
        names = ("out",) if part == "forward" else ("dq", "dk", "dv")
        for n in names:
            self.memories[0][n].fill_(float("nan"))
        torch.cuda.synchronize()
        ours[0]()
        self.bench.device.synchronize()
        found = [self.memories[0][n] for n in names]
        peer = self.theirs(part)[0]()
        peer = [peer] if part == "forward" else list(peer)
        torch.cuda.synchronize()
        if self.case.tokens > 8192:
            return [error(a, b.double()) for a, b in zip(found, peer)], None
        whole = exact(*(g[:1, :1] for g in self.inputs[0]), self.case.causal)
        whole = whole[:1] if part == "forward" else whole[1:]
        return [error(a, b) for a, b in zip(found, whole)], [
            error(a, b) for a, b in zip(peer, whole)
        ]

    def row(self, part: str, plan: Any = None) -> dict[str, Any]:
        """One measured row."""
        ours = getattr(self, part)(plan)
        errors, peer_errors = self.errors(part, ours)
        found = self.bench.interleave(ours, self.theirs(part))
        flops = self.case.flops(part == "backward")
        right = max(errors) < 1e-2
        if peer_errors is not None:
            right = all(a <= max(1.1 * b, 1e-4) for a, b in zip(errors, peer_errors))
        row = {
            "part": part,
            "case": self.case.text,
            "width": self.case.width,
            "tokens": self.case.tokens,
            "plan": str(plan or self.chosen(part)),
            "errors": errors,
            "peer_errors": peer_errors,
            "right": right,
            "tflops": 1e-6 * flops / found["ours_us"],
            "peer_tflops": 1e-6 * flops / found["peer_us"],
            **found,
        }
        print(
            f"{part:8} {row['case']:18} {row['ratio']:.3f}x of FlashAttention-2"
            f" ({row['tflops']:4.0f} of {row['peer_tflops']:4.0f} TFLOP/s) {row['plan']}"
            f" errors {' '.join(f'{e:.1e}' for e in errors)} {wrong(right)}",
            flush=True,
        )
        return row

    def chosen(self, part: str) -> Any:
        """The model's Plans."""
        if part == "forward":
            return threads.plans(self.x, self.target)[0]
        return [threads.plans(self.x, self.target, s)[0] for s in threads.SIDES]

    def plans(self, part: str) -> list[Any]:
        """Plans of a sweep that fit shared memory."""
        made = [WarpPlan((m, n), w, s) for m, n, w in TILES[part] for s in (2, 1)]
        most, side = self.target.memories["shared"].bytes, "" if part == "forward" else "keys"
        return [p for p in made if threads.shared_bytes(self.x, p, side) <= most]


class Warps(Bench):
    """The same device, for PTX of sm_80."""

    def __init__(self, of: Bench) -> None:
        self.device, self.stream, self.target = of.device, of.stream, held(of.target)

    def kernel(
        self, body: Body, name: str = "kernel", symbols: dict[str, int] | None = None
    ) -> Prepared:
        """A Body made ready to launch."""
        text, entry = emit(body, name, self.target)
        assert ".target sm_80" in text
        function = self.device.load(text).function(name)
        return Prepared(function, entry, symbols or {})


def paged(bench: Bench, page: int = 64) -> list[dict[str, Any]]:
    """Decode over a paged cache: both kernels of ours, interleaved, each on inputs of its own."""
    rows = []
    for batch, length in decode_attention.CASES:
        sides = [decode_attention.Case(of, [length] * batch, page) for of in (Warps(bench), bench)]
        errors = [side.check() for side in sides]
        found = bench.interleave(*(side.ours() for side in sides))
        rates = [sides[0].bytes / found[f"{who}_us"] * 1e-6 for who in ("ours", "peer")]
        row = {"part": "paged", "case": f"B={batch} S={length}", "plan": str(sides[0].plan)}
        rows.append({**row, "right": max(errors) < 1e-2, "errors": errors, "tb": rates, **found})
        print(
            f"paged    {row['case']:18} {found['ratio']:.3f}x of sm_90a ({rates[0]:.2f} of"
            f" {rates[1]:.2f} TB/s) {row['plan']} {wrong(rows[-1]['right'])}",
            flush=True,
        )
        del sides
        torch.cuda.empty_cache()
    mean = geometric_mean([r["ratio"] for r in rows if r["right"]])
    met = mean >= PAGED and all(r["right"] for r in rows)
    print(f"paged: geometric mean {mean:.3f} (bar {PAGED}): {verdict(met)}")
    return rows


def verdicts(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means and least ratios of each part against its bar."""
    found: dict[str, Any] = {}
    for part, (mean, least) in BARS.items():
        mine = [r["ratio"] for r in rows if r["part"] == part and r.get("right")]
        if mine:
            got = geometric_mean(mine)
            met = got >= mean and min(mine) >= least
            found[part] = {"mean": got, "least": min(mine), "met": met}
            print(
                f"{part}: geometric mean {got:.3f} (bar {mean}), least {min(mine):.3f}"
                f" (bar {least}) of {len(mine)}: {verdict(met)}"
            )
    return found


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=[*BARS, "paged"], action="append", default=[])
    parser.add_argument("--widths", type=int, nargs="*", default=[64, 128])
    parser.add_argument("--tokens", type=int, nargs="*", default=[512, 2048, 8192, 16384])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out", default="", help="where the JSON goes")
    given = parser.parse_args()
    bench = Bench()
    rows: list[dict[str, Any]] = []
    if "paged" in given.only or not (given.only or given.sweep):
        rows += paged(bench)
    for case in cases(given.widths, given.tokens):
        for part in [p for p in given.only or BARS if p in BARS]:
            made = Measured(bench, case)
            for plan in made.plans(part) if given.sweep else [None]:
                try:
                    rows.append(made.row(part, plan))
                except Exception as failure:  # one that fails must not end the others
                    said = f"{type(failure).__name__}: {failure}"
                    rows.append({"part": part, "case": case.text, "failed": said})
                    print(f"{part:8} {case.text} {plan} FAILED {said[:600]}", flush=True)
                    failures.append("FAILED")
            del made
            torch.cuda.empty_cache()
    found = {} if given.sweep else verdicts(rows)
    if given.out:
        record = {"kind": "attention sm_80", **bench.about(), "rows": rows, "verdicts": found}
        Path(given.out).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
    end()

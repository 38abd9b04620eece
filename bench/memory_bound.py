"""Kernels that memory bounds: norms, softmax, SwiGLU, rotary, cross-entropy and AdamW.

    python bench/memory_bound.py                       every case, beside torch.compile
    python bench/memory_bound.py --case rms_norm       one of them (may be repeated)
    python bench/memory_bound.py --no-peer             ours alone: torch.compile takes its time

Each case is ordinary Tensor code, jitted, beside torch.compile of the ordinary torch code on the
same memory, both as replayed graphs. Bytes are counted by hand: each input read once and each
output written once, whatever a side really moves. A graph holds LAUNCHES calls at least, so that
what a replay costs by itself hardly counts. Results are first checked against torch in float64; a
wrong one has no time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as TF
from jitted import Launches
from verdict import end, failures, verdict, wrong

import tilegrad as tg
import tilegrad.nn.functional as F
from gpu import Bench, sets

FORWARD_BAR, BACKWARD_BAR, SHARE = 3.7e12, 3.5e12, 0.9  # bytes/s, bytes/s, of a copy
LAUNCHES, ROUNDS = 4, 15
RATE, BETA1, BETA2, SMALL, DECAY = 1e-2, 0.9, 0.999, 1e-8, 0.1
Array = Any  # a Tensor or a torch tensor


# ---- the functions, ours and torch's --------------------------------------------------------


def rms_norm(x: Array, w: Array) -> Array:
    return F.rms_norm(x, (x.shape[-1],), w, 1e-5)


def rms_norm_peer(x: Array, w: Array) -> Array:
    return TF.rms_norm(x, (x.shape[-1],), w, 1e-5)


def layer_norm(x: Array, w: Array, b: Array) -> Array:
    return F.layer_norm(x, (x.shape[-1],), w, b, 1e-5)


def layer_norm_peer(x: Array, w: Array, b: Array) -> Array:
    return TF.layer_norm(x, (x.shape[-1],), w, b, 1e-5)


def rms_norm_backward(x: Array, w: Array, upstream: Array) -> Any:
    return tg.vjp(rms_norm, x, w)[1](upstream)


def layer_norm_backward(x: Array, w: Array, b: Array, upstream: Array) -> Any:
    return tg.vjp(layer_norm, x, w, b)[1](upstream)


def softmax(x: Array) -> Array:
    return F.softmax(x, -1)


def softmax_peer(x: Array) -> Array:
    return TF.softmax(x, -1)


def swiglu(gate: Array, up: Array) -> Array:
    return F.silu(gate) * up


def swiglu_peer(gate: Array, up: Array) -> Array:
    return TF.silu(gate) * up


def rotary(q: Array, cos: Array, sin: Array) -> Array:  # (tokens, heads, size), (tokens, size)
    half = q.shape[-1] // 2
    turned = tg.cat([-q[..., half:], q[..., :half]], -1)
    return q * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def rotary_peer(q: Array, cos: Array, sin: Array) -> Array:
    half = q.shape[-1] // 2
    turned = torch.cat([-q[..., half:], q[..., :half]], -1)
    return q * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def cross_entropy(logits: Array, targets: Array) -> Array:
    return F.cross_entropy(logits.float(), targets)


def cross_entropy_peer(logits: Array, targets: Array) -> Array:
    return TF.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), targets)


def cross_entropy_both(logits: Array, targets: Array) -> Any:
    return tg.value_and_grad(cross_entropy)(logits, targets)


def adamw(w: Array, m: Array, v: Array, g: Array, count: Array) -> Any:
    g = g.float()
    m = BETA1 * m + (1 - BETA1) * g
    v = BETA2 * v + (1 - BETA2) * g * g
    size = RATE / (1 - BETA1**count)
    root = (v / (1 - BETA2**count)).sqrt() + SMALL
    w = w * (1 - RATE * DECAY) - size * m / root
    return w, m, v, w.bfloat16()


def adamw_peer(w: Array, m: Array, v: Array, g: Array, count: Array) -> Any:
    g = g.to(w.dtype)
    m.copy_(BETA1 * m + (1 - BETA1) * g)
    v.copy_(BETA2 * v + (1 - BETA2) * g * g)
    size = RATE / (1 - BETA1**count)
    root = (v / (1 - BETA2**count)).sqrt() + SMALL
    w.copy_(w * (1 - RATE * DECAY) - size * m / root)
    return w, m, v, w.bfloat16()


# ---- the cases ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One function at one size. `wanted` numbers the inputs whose gradients torch is asked for;
    without `forward` its forward pass is done before, and the last input is the gradient of the
    result."""

    ours: Callable[..., Any]
    peer: Callable[..., Any]
    inputs: Callable[..., tuple[Any, ...]]
    sizes: tuple[int, ...]
    small: tuple[int, ...]  # sizes of a quick check
    outputs: Callable[..., int]  # bytes
    bar: float = 0.0  # bytes/s; 0: SHARE of a copy
    wanted: tuple[int, ...] = ()
    forward: bool = False
    donate: tuple[int, ...] = ()


def numbers(*shape: int, dtype: Any = torch.bfloat16, place: Any = "cuda") -> Any:
    """Random numbers."""
    return torch.randn(*shape, device=place, dtype=dtype)


def norm_inputs(count: int) -> Callable[..., tuple[Any, ...]]:
    """x and `count` vectors of weights."""
    return lambda rows, columns, place="cuda": (
        numbers(rows, columns, place=place),
        *(numbers(columns, place=place) for _ in range(count)),
    )


def backward_inputs(count: int) -> Callable[..., tuple[Any, ...]]:
    """The same and the gradient of the result."""
    forward = norm_inputs(count)
    return lambda rows, columns, place="cuda": (
        *forward(rows, columns, place),
        numbers(rows, columns, place=place),
    )


def swiglu_inputs(rows: int, columns: int, place: Any = "cuda") -> tuple[Any, ...]:
    return numbers(rows, columns, place=place), numbers(rows, columns, place=place)


def rotary_inputs(tokens: int, heads: int, size: int, place: Any = "cuda") -> tuple[Any, ...]:
    angle = torch.rand(tokens, size // 2, device=place) * 6.3
    angle = torch.cat([angle, angle], -1)
    return (
        numbers(tokens, heads, size, place=place),
        angle.cos().bfloat16(),
        angle.sin().bfloat16(),
    )


def entropy_inputs(rows: int, columns: int, place: Any = "cuda") -> tuple[Any, ...]:
    return (numbers(rows, columns, place=place), torch.randint(0, columns, (rows,), device=place))


def adamw_inputs(rows: int, columns: int, place: Any = "cuda") -> tuple[Any, ...]:
    w, m = (numbers(rows, columns, dtype=torch.float32, place=place) for _ in range(2))
    v = numbers(rows, columns, dtype=torch.float32, place=place).square_()
    return (
        w,
        m.mul_(0.1),
        v,
        numbers(rows, columns, place=place),
        torch.full((), 10.0, device=place),
    )


NORM, TINY = (16384, 4096), (8, 256)
CASES: dict[str, Case] = {
    "rms_norm": Case(rms_norm, rms_norm_peer, norm_inputs(1), NORM, TINY,
                     lambda r, c: 2 * r * c, FORWARD_BAR),
    "layer_norm": Case(layer_norm, layer_norm_peer, norm_inputs(2), NORM, TINY,
                       lambda r, c: 2 * r * c, FORWARD_BAR),
    "rms_norm_backward": Case(
        rms_norm_backward, rms_norm_peer, backward_inputs(1), NORM, TINY,
        lambda r, c: 2 * r * c + 2 * c, BACKWARD_BAR, wanted=(0, 1)),
    "layer_norm_backward": Case(
        layer_norm_backward, layer_norm_peer, backward_inputs(2), NORM, TINY,
        lambda r, c: 2 * r * c + 4 * c, BACKWARD_BAR, wanted=(0, 1, 2)),
    "softmax": Case(softmax, softmax_peer, norm_inputs(0), NORM, TINY, lambda r, c: 2 * r * c),
    "swiglu": Case(swiglu, swiglu_peer, swiglu_inputs, (16384, 14336), TINY,
                   lambda r, c: 2 * r * c),
    "rotary": Case(rotary, rotary_peer, rotary_inputs, (16384, 32, 128), (8, 4, 128),
                   lambda t, h, s: 2 * t * h * s),
    "cross_entropy": Case(cross_entropy, cross_entropy_peer, entropy_inputs, (4096, 128256),
                          (4, 1002), lambda r, c: 4),
    "cross_entropy_backward": Case(  # the loss and its gradient, both sides from the logits
        cross_entropy_both, cross_entropy_peer, entropy_inputs, (4096, 128256), (4, 1002),
        lambda r, c: 4 + 2 * r * c, wanted=(0,), forward=True),
    "adamw": Case(adamw, adamw_peer, adamw_inputs, (24576, 4096), TINY,
                  lambda r, c: 14 * r * c, donate=(0, 1, 2)),
}  # fmt: skip


# ---- checking and timing --------------------------------------------------------------------


def input_bytes(inputs: Sequence[Any]) -> int:
    """Bytes of all inputs."""
    return sum(t.numel() * t.element_size() for t in inputs)


def peer_call(case: Case, function: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """torch's side as a function of nothing that gives a tuple of results."""
    if not case.wanted:
        return lambda: as_tuple(function(*inputs))
    given = [t.detach().requires_grad_(i in case.wanted) for i, t in enumerate(inputs)]
    sought = [given[i] for i in case.wanted]
    if case.forward:

        def both() -> tuple[Any, ...]:
            loss = function(*given)
            return loss.detach(), *torch.autograd.grad(loss, sought)

        return both
    result = function(*given[:-1])
    upstream = given[-1]
    return lambda: torch.autograd.grad(result, sought, upstream, retain_graph=True)


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def reference(case: Case, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """The results in float64."""
    wide = [t.double() if t.dtype.is_floating_point else t for t in inputs]
    return peer_call(case, case.peer, wide)()


def errors(found: Sequence[Any], wanted: Sequence[Any]) -> list[tuple[float, float]]:
    """For each result its relative error and what it may be at most."""
    pairs = []
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape, (a.shape, b.shape)
        most = 1e-5 if a.dtype == torch.float32 else 1e-2
        difference = (a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)
        pairs.append((float(difference), most))
    return pairs


def jitted(case: Case) -> Any:
    """Our side."""
    return tg.jit(case.ours, donate=case.donate)


class Measured:
    """One case on a GPU: several sets of inputs, ours bound to each."""

    def __init__(self, bench: Bench, name: str) -> None:
        self.bench, self.name, self.case = bench, name, CASES[name]
        first = self.case.inputs(*self.case.sizes)
        self.bytes = input_bytes(first) + self.case.outputs(*self.case.sizes)
        more = (self.case.inputs(*self.case.sizes) for _ in range(sets(self.bytes) - 1))
        self.inputs = [first, *more]
        function = jitted(self.case)
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.ours = [
            Launches(bench.device, function, *(tg.from_torch(t) for t in one))
            for one in self.inputs
        ]
        self.compile_seconds = time.perf_counter() - start

    def check(self) -> list[tuple[float, float]]:
        """Errors of our results."""
        wanted = reference(self.case, self.inputs[0])
        torch.cuda.synchronize()
        for result in self.ours[0].results:
            poison(result.torch(), self.inputs[0])
        torch.cuda.synchronize()
        self.ours[0]()
        self.bench.device.synchronize()
        return errors([r.torch() for r in self.ours[0].results], wanted)

    def theirs(self) -> list[Callable[[], Any]]:
        """torch.compile's side."""
        function = torch.compile(self.case.peer, dynamic=False)
        with torch.cuda.stream(self.bench.stream):
            made = [peer_call(self.case, function, one) for one in self.inputs]
            for one in made:
                one()
        torch.cuda.synchronize()
        return made

    def row(self, peer: bool, copy: float) -> dict[str, Any]:
        """Check and time."""
        found = self.check()
        right = all(error <= most for error, most in found)
        row: dict[str, Any] = {
            "case": self.name,
            "sizes": self.case.sizes,
            "bytes": self.bytes,
            "kernels": self.ours[0].kernels,
            "copies": self.ours[0].copies,
            "programs": self.ours[0].programs,
            "errors": [e for e, _ in found],
            "right": right,
            "compile_seconds": self.compile_seconds,
        }
        if not right:
            return row
        if peer:
            start = time.perf_counter()
            theirs = self.theirs()
            row["peer_compile_seconds"] = time.perf_counter() - start
            many = -(-LAUNCHES // len(self.ours))
            row |= self.bench.interleave(self.ours * many, theirs * many, ROUNDS)
            row["peer_bytes_per_second"] = self.bytes / (1e-6 * row["peer_us"])
        else:
            row["ours_us"] = 1e6 * self.bench.alone(self.ours)
        row["bytes_per_second"] = self.bytes / (1e-6 * row["ours_us"])
        row["share_of_copy"] = row["bytes_per_second"] / copy
        row["bar_bytes_per_second"] = self.case.bar or SHARE * copy
        row["met"] = (
            row["bytes_per_second"] >= row["bar_bytes_per_second"] and row.get("ratio", 1.0) >= 1.0
        )
        return row


def poison(result: Any, inputs: Sequence[Any]) -> None:
    """Make sure that every element is written; results that are inputs keep their values."""
    if all(result.data_ptr() != t.data_ptr() for t in inputs):
        result.fill_(float("nan"))


def show(row: dict[str, Any]) -> None:
    """One line."""
    worst = max(row["errors"])
    head = f"{row['case']:22} {row['kernels']} kernels {row['copies']} copies error {worst:.1e}"
    if not row["right"]:
        print(f"{head}{wrong(False)} {row['errors']}", flush=True)
        return
    peer = ""
    if "ratio" in row:
        peer = (
            f" torch.compile {1e-12 * row['peer_bytes_per_second']:5.2f} TB/s ratio"
            f" {row['ratio']:.3f} [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]"
            f" compiled in {row['peer_compile_seconds']:.1f} s"
        )
    met = verdict(row["met"])
    print(
        f"{head} {row['ours_us']:8.1f} us {1e-12 * row['bytes_per_second']:5.2f} TB/s"
        f" ({row['share_of_copy']:.2f} of a copy, bar"
        f" {1e-12 * row['bar_bytes_per_second']:.2f} TB/s){peer} ours in"
        f" {row['compile_seconds']:.1f} s: {met}",
        flush=True,
    )


def settle_torch() -> None:
    """Settings without which torch cannot run a compiled backward pass twice."""
    import torch._functorch.config as settings

    if hasattr(settings, "donated_buffer"):
        settings.donated_buffer = False


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", choices=list(CASES), default=[])
    parser.add_argument("--no-peer", action="store_true", help="without torch.compile")
    parser.add_argument("--out", default="", help="where the JSON goes")
    given = parser.parse_args()
    settle_torch()
    bench = Bench()
    ceilings = bench.ceilings()
    print(bench.device, {k: f"{v:.3e}" for k, v in ceilings.items()}, flush=True)
    rows = []
    for name in given.case or CASES:
        try:
            row = Measured(bench, name).row(not given.no_peer, ceilings["copy_bytes_per_second"])
            show(row)
        except Exception as failure:  # one case that fails must not end the others
            row = {"case": name, "failed": f"{type(failure).__name__}: {failure}"}
            print(f"{name:22} FAILED {row['failed'][:1000]}", flush=True)
            failures.append("FAILED")
        rows.append(row)
        torch.cuda.empty_cache()
        torch._dynamo.reset()
    missed = [r["case"] for r in rows if not r.get("met")]
    print(f"{len(rows)} cases, missed: {', '.join(missed) or 'none'}")
    if given.out:
        record = {"kind": "memory_bound", **bench.about(), **ceilings, "rows": rows}
        Path(given.out).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
    end()

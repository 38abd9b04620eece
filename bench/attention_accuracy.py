"""Errors of attention and of its gradients against float64, beside those of cuDNN and others.

    python bench/attention_accuracy.py [--only words] [--workers 6] [--out results.json]
    python bench/attention_accuracy.py --cpu          small, float32, on the CPU: checks this script

Ours is ordinary Tensor code, jitted: a result and its `vjp`, sums "reproducible" and "fast". The
peer is torch's SDPA: the first of cuDNN, FlashAttention-2, the memory-efficient kernel that takes
the case and gives numbers; what a peer has no word for (windows, key lengths) it gets as a mask,
packed sequences one by one. An error is relative to the root mean square of the float64 result
(of its root mean square and of its largest element); right is at most 1.05 times the peer's root
mean square error and 2 times its largest. Where there is no peer (softcap, sinks, ALiBi slopes,
dropout, rows that see nothing) the yardstick is a float64 computation that rounds what a kernel
for matrix units rounds (weights, their gradients, results), and right is at most 2 times its
errors. Queries that see nothing must give exactly 0, and no nan anywhere. Long because the cases
stand beside the formula that judges them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as torch_attention

import tilegrad as tg

PEERS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash2": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
NAMES = ("out", "dq", "dk", "dv")
RMS, LARGEST, YARDSTICK = 1.05, 2.0, 2.0
LEAST = (1e-4, 1e-3)  # errors below these are right whatever a peer's are
Tensors = list[Any]


@dataclass(frozen=True)
class Case:
    """Sizes, options, and how the inputs are drawn."""

    name: str
    batch: int = 2
    heads: int = 8
    key_heads: int = 8
    queries: int = 512
    keys: int = 512
    width: int = 128
    value_width: int = 0  # 0: as the width
    dtype: str = "bfloat16"
    layout: str = "bhtd"
    options: dict[str, Any] = field(default_factory=dict)  # of tg.attention, without tensors
    extras: tuple[str, ...] = ()  # tensors of tg.attention, drawn by `extra`
    draw: str = ""  # "scaled", "huge key"
    lengths: tuple[int, ...] = ()  # of packed sequences, or of keys
    modes: tuple[str, ...] = ("reproducible",)
    peers: bool = True

    @property
    def columns(self) -> int:
        """How wide values are."""
        return self.value_width or self.width

    def small(self) -> Case:
        """The same options at sizes for the CPU, in float32."""
        size = {n: min(getattr(self, n), 48) for n in ("queries", "keys")}
        lengths = self.lengths
        if "query_starts" in self.extras:
            lengths = tuple(min(n, 20) for n in lengths)
            size = {"queries": sum(lengths), "keys": sum(lengths)}
        elif lengths:
            lengths = tuple(min(n, size["keys"]) for n in lengths)
        heads = min(self.heads, 4)
        return replace(
            self,
            heads=heads,
            key_heads=max(1, heads * self.key_heads // self.heads),
            dtype="float32",
            width=min(self.width, 32),
            lengths=lengths,
            value_width=min(self.columns, 24),
            modes=("reproducible",),
            **size,
        )


BOTH = ("reproducible", "fast")
ONE = {"batch": 1}


def cases() -> Iterator[Case]:
    """Every case."""
    for width in (64, 128, 256):
        for causal in (False, True):
            name = f"d{width} {'causal' if causal else 'full'}"
            yield Case(name, width=width, options={"causal": causal}, modes=BOTH)
    causal_ = {"causal": True}
    yield Case(
        "d128 causal t1024",
        queries=1024,
        keys=1024,
        heads=4,
        key_heads=4,
        options=causal_,
        modes=BOTH,
    )
    yield Case("float16 d64", dtype="float16", width=64, modes=BOTH)
    yield Case("float16 d128 causal", dtype="float16", options=causal_)
    yield Case("queries times 30", draw="scaled", modes=BOTH)
    yield Case("queries times 30, causal d64", draw="scaled", width=64, options=causal_)
    yield Case("float16 queries times 30", dtype="float16", draw="scaled")
    yield Case("a huge key", draw="huge key", modes=BOTH)
    yield Case("a huge key, causal", draw="huge key", options=causal_)
    yield Case("mask with empty rows", extras=("mask",))
    yield Case("mask", extras=("mask without empty rows",))
    yield Case("bias", extras=("bias",))
    yield Case("bias with -inf", extras=("bias with -inf",))
    yield Case("bias of -inf rows", extras=("bias of -inf rows",))
    yield Case(
        "key lengths",
        batch=4,
        heads=4,
        key_heads=4,
        extras=("key_lengths",),
        lengths=(1, 512, 77, 300),
    )
    yield Case(
        "key lengths 0 and 1",
        batch=4,
        heads=4,
        key_heads=4,
        extras=("key_lengths",),
        lengths=(0, 1, 0, 300),
        options=causal_,
        modes=BOTH,
    )
    yield Case("one query", batch=64, queries=1, keys=1024)
    yield Case("one key", batch=16, queries=512, keys=1)
    yield Case("one query, one key", batch=256, queries=1, keys=1)
    yield Case("odd sizes", batch=4, queries=77, keys=131, width=72, value_width=40, modes=BOTH)
    yield Case(
        "odd sizes, causal",
        batch=4,
        queries=131,
        keys=77,
        width=72,
        value_width=40,
        options=causal_,
    )
    yield Case("narrow values", width=128, value_width=64)
    yield Case("prefix", queries=128, keys=512, options={"causal": "bottom_right"})
    yield Case("GQA 8/2", key_heads=2, options=causal_, modes=BOTH)
    yield Case("MQA", key_heads=1, modes=BOTH)
    yield Case("GQA 8/2 d64", key_heads=2, width=64)
    yield Case("window", options={"causal": True, "window": 100}, modes=BOTH)
    yield Case("window both sides", options={"window": (50, 20)})
    yield Case("softcap", options={"causal": True, "softcap": 2.0}, peers=False)
    yield Case("softcap, queries times 30", draw="scaled", options={"softcap": 20.0}, peers=False)
    yield Case("slopes", extras=("slopes",), options=causal_, peers=False)
    yield Case("sinks", extras=("sinks",), options=causal_, peers=False)
    packed = {
        **ONE,
        "queries": 1000,
        "keys": 1000,
        "extras": ("query_starts", "key_starts"),
        "lengths": (300, 0, 1, 128, 571),
    }
    yield Case("packed, causal", options=causal_, **packed)  # type: ignore[arg-type]
    yield Case("packed, full, GQA", key_heads=2, **packed)  # type: ignore[arg-type]
    yield Case("bthd", layout="bthd", options=causal_, modes=BOTH)
    yield Case("bthd, GQA d64", layout="bthd", key_heads=2, width=64)
    yield Case(
        "dropout", **ONE, queries=256, keys=256, width=256, options={"dropout": 0.25}, peers=False
    )


# ---- inputs ---------------------------------------------------------------------------------


class Inputs:
    """q, k, v and the gradient of the result as (batch, heads, tokens, width), and the extras."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device = case, device
        self.generator = torch.Generator(device).manual_seed(1 + sum(map(ord, case.name)))
        c, dtype = case, getattr(torch, case.dtype)
        q = self.normal(c.batch, c.heads, c.queries, c.width)
        k = self.normal(c.batch, c.key_heads, c.keys, c.width)
        v = self.normal(c.batch, c.key_heads, c.keys, c.columns)
        if c.draw == "scaled":
            q = q * 30
        if c.draw == "huge key":
            k[:, :, c.keys // 3] *= 200
        dout = self.normal(c.batch, c.heads, c.queries, c.columns)
        self.main = [x.to(dtype) for x in (q, k, v, dout)]
        self.extras = dict(self.extra(name) for name in c.extras)
        self.keep: Any = None  # what dropout keeps, once it is known

    def normal(self, *shape: int) -> Any:
        """Standard normal numbers."""
        return torch.randn(*shape, device=self.device, generator=self.generator)

    def extra(self, name: str) -> tuple[str, Any]:
        """The word of tg.attention, and its tensor."""
        c, dtype = self.case, getattr(torch, self.case.dtype)
        scores = (c.batch, c.heads, c.queries, c.keys)
        if name.startswith("mask"):
            mask = self.normal(*scores) > -0.5
            if name == "mask":
                mask[:, :, 5 : c.queries : 7] = False
                mask[0, 0, : c.queries // 2] = False
            else:
                mask[..., 0] = True
            return "mask", mask
        if name.startswith("bias"):
            bias = self.normal(*scores)
            if name != "bias":
                bias[self.normal(*scores) > 0.5] = -math.inf
                bias[..., 0] = 0.0
            if name == "bias of -inf rows":
                bias[:, :, 3 : c.queries : 5] = -math.inf
            return "bias", bias.to(dtype)
        if name == "key_lengths":
            return name, torch.tensor(c.lengths, dtype=torch.int32, device=self.device)
        if name in ("query_starts", "key_starts"):
            starts = torch.tensor([0, *c.lengths]).cumsum(0)
            return name, starts.to(torch.int32).to(self.device)
        if name == "slopes":
            return name, 2.0 ** -torch.arange(1.0, c.heads + 1, device=self.device)
        return name, self.normal(c.heads)  # sinks

    def laid(self, x: Any) -> Any:
        """In the case's layout."""
        return x if self.case.layout == "bhtd" else x.transpose(1, 2).contiguous()

    def seen(self) -> Any:
        """(batch, heads, queries, keys): which keys a query sees, biases of -inf included."""
        c = self.case
        seen = torch.ones(c.batch, c.heads, c.queries, c.keys, dtype=torch.bool, device=self.device)
        i, j = (x.to(self.device) for x in self.places())
        away = j[None, :] - i[:, None]
        causal, window = c.options.get("causal"), c.options.get("window")
        if causal:
            seen &= away <= (c.keys - c.queries if causal == "bottom_right" else 0)
        if window is not None:
            left, right = window if isinstance(window, tuple) else (window - 1, 0)
            seen &= (away >= -left) & (away <= right)
        if "query_starts" in self.extras:
            number = torch.repeat_interleave(torch.arange(len(c.lengths)), torch.tensor(c.lengths))
            number = number.to(self.device)
            seen &= number[:, None] == number[None, :]
        if "key_lengths" in self.extras:
            seen &= j < self.extras["key_lengths"][:, None, None, None]
        if "mask" in self.extras:
            seen &= self.extras["mask"]
        if "bias" in self.extras:
            seen &= self.extras["bias"] > -math.inf
        return seen

    def places(self) -> tuple[Any, Any]:
        """i of every query and j of every key, from the start of their sequence."""
        c = self.case
        if "query_starts" not in self.extras:
            return torch.arange(c.queries), torch.arange(c.keys)
        found = torch.cat([torch.arange(n) for n in c.lengths])
        return found, found


# ---- float64, and float64 that rounds what kernels round ------------------------------------


class Exact:
    """The formula in float64; with a dtype, weights, their gradients and results rounded to it."""

    def __init__(self, inputs: Inputs, rounded: Any = None) -> None:
        self.inputs, self.rounded = inputs, rounded
        c = inputs.case
        self.group = c.heads // c.key_heads
        self.q, k, v, self.dout = (x.double() for x in inputs.main)
        self.k, self.v = (x.repeat_interleave(self.group, 1) for x in (k, v))
        self.scale = c.width**-0.5
        self.seen = inputs.seen()

    def round(self, x: Any) -> Any:
        """To the dtype of a kernel's operands, where asked."""
        return x if self.rounded is None else x.to(self.rounded).double()

    def scores(self) -> tuple[Any, Any]:
        """Scores, -inf where not seen, and the derivative of the cap."""
        given, case = self.inputs.extras, self.inputs.case
        s = self.scale * (self.q @ self.k.mT)
        slope: Any = 1.0
        cap = case.options.get("softcap", 0.0)
        if cap:
            s = cap * torch.tanh(s / cap)
            slope = 1 - (s / cap) ** 2
        if "bias" in given:
            s = s + given["bias"].double()
        if "slopes" in given:
            i, j = (x.to(s.device) for x in self.inputs.places())
            s = s + given["slopes"].double()[:, None, None] * (j[None, :] - i[:, None])
        return s.masked_fill(~self.seen, -math.inf), slope

    def run(self) -> Tensors:
        """Result and gradients of q, k, v, as (batch, heads, tokens, width)."""
        s, slope = self.scores()
        top = s.amax(-1, keepdim=True)
        sinks = self.inputs.extras.get("sinks")
        if sinks is not None:
            sinks = sinks.double()[:, None, None]
            top = torch.maximum(top, sinks)
        top = top.masked_fill(top == -math.inf, 0.0)
        weights = torch.exp(s - top)
        total = weights.sum(-1, keepdim=True) + (0.0 if sinks is None else torch.exp(sinks - top))
        total = total.masked_fill(total == 0.0, 1.0)
        keep = self.keep()
        out = self.round((self.round(weights * keep) @ self.v) / total)
        p = weights / total
        dv = self.round(p * keep).mT @ self.dout
        delta = (self.dout * out).sum(-1, keepdim=True)
        ds = self.round(p * ((self.dout @ self.v.mT) * keep - delta) * slope)
        gradients = [
            self.scale * (ds @ self.k),
            self.summed(self.scale * (ds.mT @ self.q)),
            self.summed(dv),
        ]
        return [out, *(self.round(g) for g in gradients)]

    def keep(self) -> Any:
        """What dropout multiplies weights by."""
        kept = self.inputs.keep
        return 1.0 if kept is None else kept / (1 - self.inputs.case.options["dropout"])

    def summed(self, x: Any) -> Any:
        """Over the query heads of a key head."""
        b, h, t, d = x.shape
        return x.reshape(b, h // self.group, self.group, t, d).sum(2)


# ---- ours and peers -------------------------------------------------------------------------


class Ours:
    """Our result and gradients, compiled once."""

    def __init__(self, inputs: Inputs, mode: str) -> None:
        self.inputs, self.mode = inputs, mode
        case, names = inputs.case, tuple(inputs.extras)

        def run(q: Any, k: Any, v: Any, dout: Any, *more: Any) -> Any:
            given = dict(zip(names, more))

            def attend(q: Any, k: Any, v: Any) -> Any:
                return tg.attention(q, k, v, layout=case.layout, **given, **case.options)

            out, pull = tg.vjp(attend, q, k, v)
            return (out, *pull(dout))

        self.function = tg.jit(run)
        given = [inputs.laid(x) for x in inputs.main] + list(inputs.extras.values())
        self.given = [tg.from_torch(x) for x in given]

    def __call__(self) -> Tensors:
        """As (batch, heads, tokens, width)."""
        self.meet()
        if "dropout" in self.inputs.case.options:
            tg.manual_seed(7)
        with tg.override(determinism=self.mode):
            found = self.function(*self.given)
            shared = [x.torch() for x in found]
        self.meet()
        values = [x.clone() for x in shared]
        turned = self.inputs.case.layout != "bhtd"
        return [x.transpose(1, 2) for x in values] if turned else values

    def meet(self) -> None:
        """Streams of torch and ours wait for each other."""
        if self.inputs.device == "cuda":
            torch.cuda.synchronize()


def peer(inputs: Inputs) -> tuple[str, Tensors]:
    """The name of the first peer that takes the case and gives numbers, and its results."""
    refused = []
    for name, backend in PEERS.items():
        try:
            with sdpa_kernel(backend), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = peer_results(inputs)
        except (RuntimeError, ValueError) as error:
            refused.append(f"{name}: {str(error).splitlines()[0][:60]}")
            continue
        if all(bool(torch.isfinite(x).all()) for x in found):
            return name, found
        refused.append(f"{name}: nan")
    return "; ".join(refused), []


def peer_results(inputs: Inputs) -> Tensors:
    """torch's result and gradients."""
    case = inputs.case
    q, k, v = (x.detach().requires_grad_() for x in inputs.main[:3])
    more: dict[str, Any] = {"enable_gqa": True} if case.key_heads != case.heads else {}
    if "query_starts" in inputs.extras:
        causal = bool(case.options.get("causal"))
        ends = inputs.extras["query_starts"].tolist()
        parts = [
            torch_attention(*(x[:, :, a:b] for x in (q, k, v)), is_causal=causal, **more)
            for a, b in itertools.pairwise(ends)
            if b > a
        ]
        out = torch.cat(parts, 2)
    else:
        plain = not inputs.extras and "window" not in case.options
        causal = case.options.get("causal") is True and plain
        if not causal and (case.options.get("causal") or not plain):
            more["attn_mask"] = peer_mask(inputs)
        out = torch_attention(q, k, v, is_causal=causal, **more)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs.main[3])]


def peer_mask(inputs: Inputs) -> Any:
    """What a query sees, or a bias that says so."""
    seen = inputs.seen()
    if "bias" in inputs.extras:
        return inputs.extras["bias"].masked_fill(~seen, -math.inf)
    return seen


# ---- the verdict ----------------------------------------------------------------------------


def errors(inputs: Inputs, found: Tensors, wanted: Tensors) -> list[tuple[float, float]]:
    """Root mean square and largest error of each, over the root mean square of what is wanted."""
    q, k, v, dout = (size(x.double()) for x in inputs.main)
    case = inputs.case
    terms = dout * v * math.sqrt(case.columns / case.width)  # of the gradient of a score
    natural = [v, terms * k, terms * q, dout]
    rows = []
    for a, b, usual in zip(found, wanted, natural):
        scale = size(b)
        if scale < 1e-6 * usual:  # a gradient that is nothing at all, as of a single key
            scale = usual
        away = (a.double() - b).abs()
        rows.append((size(away) / scale, float(away.max()) / scale))
    return rows


def size(x: Any) -> float:
    """Root mean square."""
    return float(x.square().mean().sqrt())


def empty_rows(inputs: Inputs, found: Tensors) -> str:
    """What is wrong with queries that see nothing, and with numbers at all; '' if nothing."""
    if any(not bool(torch.isfinite(x).all()) for x in found):
        return "not finite: " + ", ".join(
            n for n, x in zip(NAMES, found) if not bool(torch.isfinite(x).all())
        )
    empty = ~inputs.seen().any(-1)
    if bool((found[0][empty] != 0).any() or (found[1][empty] != 0).any()):
        return "queries that see nothing give something"
    return ""


def kept_by_dropout(inputs: Inputs) -> tuple[Any, str]:
    """What dropout keeps, seen through equal weights and values that are a unit matrix."""
    case, rate = inputs.case, inputs.case.options["dropout"]
    q, k, v, dout = inputs.main
    probe = Inputs(replace(case, width=case.width, value_width=case.keys), inputs.device)
    eye = torch.eye(case.keys, device=inputs.device, dtype=v.dtype)
    probe.main = [
        q * 0,
        k,
        eye.expand(*v.shape[:2], *eye.shape).contiguous(),
        torch.zeros(*dout.shape[:3], case.keys, device=dout.device, dtype=dout.dtype),
    ]
    out = Ours(probe, "reproducible")()[0]
    keep = out > 0
    value = 1 / case.keys / (1 - rate)
    share, count = float(keep.double().mean()), keep.numel()
    away = abs(share - (1 - rate)) / math.sqrt(rate * (1 - rate) / count)
    wrong = "" if away < 5 else f"keeps {share:.4f}"
    if float((out.double() - keep * value).abs().max()) > 0.01 * value:
        wrong = "kept weights are not p / (1 - rate)"
    return keep.double(), wrong


def judge(
    inputs: Inputs, mode: str, wanted: Tensors, bars: Tensors, of: tuple[float, float]
) -> dict[str, Any]:
    """Our errors beside their bars; twice the same bits unless sums may differ."""
    ours = Ours(inputs, mode)
    runs = [ours(), ours()]
    wrong = empty_rows(inputs, runs[0])
    if mode == "reproducible" and not all(torch.equal(a, b) for a, b in zip(*runs)):
        wrong = wrong or "two runs differ"
    found = errors(inputs, runs[0], wanted)
    good = [
        all(e <= max(f * b, least) for e, f, b, least in zip(one, of, bar, LEAST))
        for one, bar in zip(found, bars)
    ]
    return {
        "mode": mode,
        "errors": found,
        "bars": bars,
        "wrong": wrong,
        "outside": [n for n, g in zip(NAMES, good) if not g],
        "right": not wrong and all(good),
    }


def measure(case: Case, device: str) -> list[dict[str, Any]]:
    """One row for each mode."""
    inputs = Inputs(case, device)
    start = time.perf_counter()
    noted = ""
    if "dropout" in case.options:
        inputs.keep, noted = kept_by_dropout(inputs)
    wanted = Exact(inputs).run()
    yardstick = errors(inputs, Exact(inputs, getattr(torch, case.dtype)).run(), wanted)
    name, theirs = peer(inputs) if case.peers and device == "cuda" else ("none", [])
    bars = errors(inputs, theirs, wanted) if theirs else yardstick
    of = (RMS, LARGEST) if theirs else (YARDSTICK, YARDSTICK)
    if device == "cpu":  # float32: sums of the peer's kind, not of the rounding of 16 bits
        bars, of, name = [(1e-5, 1e-4)] * 4, (1.0, 1.0), "cpu"
    rows = []
    for mode in case.modes:
        row = judge(inputs, mode, wanted, bars, of)
        if noted:
            row |= {"wrong": noted, "right": False}
        rows.append(
            {
                "case": case.name,
                "peer": name if theirs else "",
                "refused": "" if theirs else name,
                "yardstick": yardstick,
                **row,
            }
        )
    rows[-1]["seconds"] = time.perf_counter() - start
    return rows


def show(row: dict[str, Any]) -> None:
    """One line."""
    if "failed" in row:
        print(f"{row['case']:30} FAILED {row['failed']}", flush=True)
        return
    mine, bars = ([f"{a:.1e}/{b:.1e}" for a, b in row[n]] for n in ("errors", "bars"))
    cpu = row["refused"] == "cpu"
    peer_ = row["peer"] or ("bars" if cpu else "float64 with rounded weights, times 2:")
    why = row["wrong"] or " ".join(row["outside"])
    print(
        f"{row['case']:30} {row['mode'][:4]} ours {' '.join(mine)} | {peer_}"
        f" {' '.join(bars)} {'RIGHT' if row['right'] else 'WRONG ' + why}"
        + (f" (no peer: {row['refused']})" if row["refused"] not in ("", "none", "cpu") else ""),
        flush=True,
    )


def work(given: tuple[Case, str]) -> list[dict[str, Any]]:
    """One case, in whatever process."""
    case, device = given
    try:
        return measure(case, device)
    except Exception as failure:  # one case that fails must not end the others
        text = f"{type(failure).__name__}: {failure}"
        return [{"case": case.name, "failed": text[:600], "right": False}]


def results(chosen: Sequence[Case], device: str, workers: int) -> Iterator[dict[str, Any]]:
    """Rows in the order of the cases; processes compile side by side."""
    given = [(c, device) for c in chosen]
    if workers < 2:
        for one in given:
            yield from work(one)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        for rows in pool.map(work, given):
            yield from rows


def main() -> int:
    """Run the cases; 0 if all are right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose names hold this")
    parser.add_argument("--workers", type=int, default=6, help="processes, on a GPU")
    parser.add_argument("--cpu", action="store_true", help="small, float32, on the CPU")
    parser.add_argument("--out", default="", help="where the JSON goes")
    given = parser.parse_args()
    chosen = [c for c in cases() if given.only in c.name]
    about: dict[str, Any] = {}
    if given.cpu:
        chosen = [c.small() for c in chosen]
    else:
        from gpu import Bench

        about = Bench().about()
        print(about, flush=True)
    start = time.perf_counter()
    print(f"errors of {', '.join(NAMES)}: root mean square/largest, relative", flush=True)
    rows = []
    device = "cpu" if given.cpu else "cuda"
    for row in results(chosen, device, 0 if given.cpu else min(given.workers, len(chosen))):
        show(row)
        rows.append(row)
    wrong = [f"{r['case']} ({r.get('mode', 'failed')})" for r in rows if not r["right"]]
    with_peer = sum(bool(r.get("peer")) for r in rows)
    print(
        f"{len(rows)} rows, {with_peer} beside a peer, {len(rows) - len(wrong)} right,"
        f" {time.perf_counter() - start:.0f} s; wrong: {', '.join(wrong) or 'none'}"
    )
    if given.out:
        record = {
            "kind": "attention accuracy",
            **about,
            "bars": {"rms": RMS, "largest": LARGEST, "yardstick": YARDSTICK},
            "rows": rows,
        }
        Path(given.out).write_text(json.dumps(record, indent=1) + "\n")
    return min(1, len(wrong))


if __name__ == "__main__":
    sys.exit(main())

"""A decode step of the Llama-3-8B shape on a GPU: ours beside torch.compile in a CUDA graph.

    python bench/llm_decode.py                         batches 1, 8, 32, 128; prefill; peers
    python bench/llm_decode.py --batches 1 --profile   each kernel of the step, its time and bytes
    python bench/llm_decode.py --format Q4_1 --batches 1
    python bench/llm_decode.py --format fp8            e4m3 by channel, inputs by token, a bf16 head
    python bench/llm_decode.py --format int8           int8 by channel, inputs by token
    python bench/llm_decode.py --format blocks         e4m3 by 128 x 128, inputs by token and 128
    python bench/llm_decode.py --format fp8 --fp8-head          the head in fp8 too
    python bench/llm_decode.py --format fp8 --input-scale 0.02  inputs with a scale that is given
    python bench/llm_decode.py --format fp8 --kv-cache-dtype fp8   keys and values in e4m3, or int8

Random bf16 weights made on the device and shared by both sides; contexts of 1024 tokens, greedy.
Ours is the engine's decode step (paged cache, pages in random order), one graph; the peer is a
plain torch decoder, each block compiled, over a contiguous cache, captured as one CUDA graph. A
round times several steps of one side, then of the other; medians of the rounds are told, beside
the limit of the bytes at the read rate of this run. Logits of both sides are compared first.
Long because both sides stand on one page: what is not the same can be seen.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as TF
from shapes import LLAMA_3_8B
from verdict import end, verdict

import tilegrad as tg
from gpu import Bench
from tilegrad import nn
from tilegrad.core.format import Format, format_of
from tilegrad.generate.engine import Engine
from tilegrad.generate.sampling import Variant
from tilegrad.generate.steps import Part
from tilegrad.models.decoder.config import DecoderConfig
from tilegrad.models.decoder.model import Decoder
from tilegrad.quant.calibrate import put
from tilegrad.quant.layers import PackedLinear
from tilegrad.tensor.realize import from_buffer
from tilegrad.tensor.stored import bytes_to_prepare, stored
from tilegrad.tensor.tensor import wrap

BARS = {1: 4.2, 8: 4.5, 32: 5.4, 128: 9.0}  # ms
PEERS = {1: 5.09, 8: 5.40, 32: 6.51, 128: 10.78}  # vLLM 0.24, measured on the same kind of GPU
PREFILL_BAR = 43_000  # tokens a second
LAUNCHES_BAR, HOST_BAR, QUANTISED_BAR = 200, 50.0, 0.75
EIGHT = {  # Formats of weights and of inputs
    "fp8": ("E4M3_ROW_F32", "E4M3_ROW_F32"),
    "int8": ("INT8_ROW_F32", "INT8_ROW_F32"),
    "blocks": ("E4M3_128X128_F32", "E4M3_G128_F32"),
}
FIXED = "E4M3_TENSOR_F32"  # of inputs with a scale that is given
FP8_BARS = {1: 2.15, 8: 2.4, 32: 3.25, 128: 6.9}  # ms; vLLM 0.24: 3.50, 3.87, 5.47, 9.24
FP8_CACHE_BARS = {128: 5.2}  # with keys and values in e4m3
FP8_PREFILL_BAR = 72_000
CACHES = {"auto": (None, 1.0), "fp8": (tg.float8_e4m3, 1.0), "int8": (tg.int8, 0.5 / 32)}
HEAD, ROUTER = "head", "router"
CONTEXT, AHEAD = 1024, 64
READ_RATE = 4.47e12  # bytes a second, what the limits of the bars were counted with


def configured(layers: int) -> DecoderConfig:
    """The shape with so many layers."""
    return DecoderConfig.from_huggingface({**LLAMA_3_8B, "num_hidden_layers": layers})


def weights(model: Decoder) -> dict[str, torch.Tensor]:
    """Random weights on the device for every Parameter, shared with torch."""
    torch.manual_seed(0)
    made = {}
    with tg.no_grad():
        for name, parameter in model.named_parameters():
            shape = tuple(int(s) for s in parameter.shape)
            drawn = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
            if len(shape) == 1:
                drawn.uniform_(0.5, 1.5)
            else:
                drawn.normal_(0.0, shape[-1] ** -0.5)
            made[name] = drawn
            parameter.assign(tg.from_torch(drawn))
    torch.cuda.synchronize()
    return made


class Blocks:
    """Random weights (rows, columns), or (experts, rows, columns), as a file of a Format would have
    them: so many rows, again and again."""

    def __init__(self, form: Format, *shape: int, distinct: int = 128) -> None:
        self.format, self.shape, (*lead, columns) = form, shape, shape
        sample = np.random.default_rng(0).normal(0.0, columns**-0.5, (distinct, columns))
        packed = form.pack(sample.astype(np.float32))
        rows = int(np.prod(lead))
        self.raw = np.tile(packed, (-(-rows // distinct), 1))[:rows].reshape(*lead, -1)

    def drop(self) -> None:
        """Nothing is mapped."""


def quantise(
    model: Decoder,
    form: Format,
    inputs: str = "",
    head: bool = False,
    scale: float | None = None,
) -> int:
    """Give all linear layers random quantised weights; the bytes of a step once they are prepared.

    Each layer has weights of its own on the device, made of the same bytes. Where `inputs` are
    rounded to a Format too, the head stays as it is, if it is not asked for. Layers side by side
    share a `scale` of inputs."""
    scales: dict[str, Any] = {}
    blocks: dict[tuple[str, int, int], Blocks] = {}
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    plain = (*([] if head else [HEAD]), ROUTER)
    kept = [m for n, m in layers if inputs and n.rpartition(".")[2] in plain]
    layers = [(n, m) for n, m in layers if m not in kept]
    for path, layer in layers:
        rows, columns = layer.out_features, layer.in_features
        key = (path.rpartition(".")[2], rows, columns)
        if key not in blocks:
            blocks[key] = Blocks(form, rows, columns)
        layer.weight.node = stored(blocks[key], layer.weight.dtype).node
        if inputs:
            rounds = PackedLinear(layer, None, inputs, scale)
            near = path.rpartition(".")[0]
            rounds.input_scale = scales.setdefault(near, rounds.input_scale)
            put(model, path, rounds)
    more = sum(m.in_features * m.out_features * m.weight.dtype.size for m in kept)
    return more + bytes_to_prepare([layer.weight for _, layer in layers], "cuda:0")


def from_dlpack_bytes(tensor: tg.Tensor) -> torch.Tensor:
    """The bytes of a Tensor of 8 bits, as int8."""
    shape = tuple(int(s) for s in tensor.shape)
    return torch.from_dlpack(wrap(from_buffer(tensor.buffer(), shape, tg.int8)))


class Ours:
    """An engine with so many requests of CONTEXT tokens in random pages, and its decode step."""

    def __init__(self, model: Decoder, requests: int, page: int, kept: str = "auto") -> None:
        self.model, self.requests, (dtype, scale) = model, requests, CACHES[kept]
        self.engine = Engine(
            model,
            device="cuda:0",
            requests=requests,
            context=CONTEXT + AHEAD,
            page=page,
            cache_dtype=dtype,
            cache_scales=(scale, scale),
            chunk=8 * CONTEXT,
        )
        self.cache, self.steps = self.engine.cache, self.engine.steps
        draw = np.random.default_rng(0)
        self.tokens = draw.integers(0, model.config.vocabulary, requests).astype(np.int32)
        order = draw.permutation(self.engine.pool.pages).astype(np.int32)
        self.table = order.reshape(requests, -1)
        began = time.perf_counter()
        self.slots = list(range(requests))
        self.tails = self.table[:, CONTEXT // page].tolist()  # where the next token goes
        self.found = self.step()
        self.compile_seconds = time.perf_counter() - began
        bound = self.steps.bound(requests)
        assert bound is not None
        self.bound = bound
        self.again()

    def again(self) -> None:
        """Every request back to CONTEXT tokens, the next of which is not in yet."""
        nobody = np.zeros((1, self.table.shape[1]), np.int32)
        self.bound.write("cache.table", np.concatenate([self.table, nobody]))
        self.bound.write("cache.lengths", np.array([CONTEXT] * self.requests + [0], np.int32))
        self.bound.write("rows.last", np.append(self.tokens, np.int32(0)).astype(np.int32))

    def fill(self, seed: int = 1) -> None:
        """Random keys and values in the cache."""
        torch.manual_seed(seed)
        for tensor in (*self.cache.keys, *self.cache.values):
            if tensor.dtype.bits == 8:
                bytes_ = from_dlpack_bytes(tensor)
                drawn = torch.randn(bytes_.shape, device="cuda", dtype=torch.bfloat16)
                if tensor.dtype is tg.int8:
                    bytes_.copy_((drawn * 32).round().clamp(-128, 127).to(torch.int8))
                else:
                    bytes_.copy_((drawn * 0.5).to(torch.float8_e4m3fn).view(torch.int8))
                continue
            shared = torch.from_dlpack(tensor)
            shared.normal_(0.0, 0.5)
        torch.cuda.synchronize()

    def ids(self) -> np.ndarray[Any, Any]:
        """The next token of every request."""
        self.again()
        return self.step().ids

    def step(self) -> Any:
        """One decode step, with every id on the host."""
        columns = [CONTEXT // self.cache.page] * len(self.slots)
        return self.steps.decode(self.slots, self.tails, columns, Variant()).wait()

    def host_us(self, bench: Bench, count: int = 50) -> float:
        """Host time of a run: many put on the stream, none waited for."""
        self.again()
        bench.device.synchronize()
        times = []
        for _ in range(5):
            began = time.perf_counter()
            for _ in range(count // 5):
                self.bound.run()
            times.append((time.perf_counter() - began) / (count // 5))
            bench.device.synchronize()
        return 1e6 * min(times)

    def served_ms(self, count: int = 40) -> float:
        """Wall time of a step as a caller of the engine sees it, with every id on the host."""
        self.again()
        self.step()
        began = time.perf_counter()
        for _ in range(count):
            self.step()
        return 1e3 * (time.perf_counter() - began) / count


class Theirs:
    """The same step in torch."""

    def __init__(
        self, config: DecoderConfig, weights: dict[str, torch.Tensor], requests: int, ours: Ours
    ) -> None:
        self.config, self.weights, self.requests = config, weights, requests
        heads, width = config.key_heads, config.head_width
        shape = (requests, heads, CONTEXT + 1, width)
        self.caches = [
            tuple(torch.empty(shape, device="cuda", dtype=torch.bfloat16) for _ in "kv")
            for _ in range(config.layers)
        ]
        self.tokens = torch.from_numpy(ours.tokens).cuda().long()
        self.take_cache(ours)
        inverse = 500000.0 ** (-torch.arange(0, width, 2, device="cuda").float() / width)
        angles = CONTEXT * inverse
        self.cosines = torch.cat([angles.cos()] * 2)
        self.sines = torch.cat([angles.sin()] * 2)
        self.block = torch.compile(self.one_block)
        self.last = torch.compile(self.head)
        self.out = self.run()

    def take_cache(self, ours: Ours) -> None:
        """Keys and values of our pages, one after the other."""
        table = torch.from_numpy(ours.table).cuda().long()
        for layer, pair in enumerate(self.caches):
            for mine, paged_ in zip(pair, (ours.cache.keys[layer], ours.cache.values[layer])):
                pages = torch.from_dlpack(paged_)[table]  # (requests, pages, heads, page, width)
                flat = pages.transpose(1, 2).reshape(*mine.shape[:2], -1, mine.shape[-1])
                mine.copy_(flat[:, :, : CONTEXT + 1])

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMS norm in float32."""
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config.norm_epsilon)
        return (wide * scale).to(x.dtype) * weight

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        """Rotary positions."""
        half = x.shape[-1] // 2
        other = torch.cat((-x[..., half:], x[..., :half]), -1)
        return (x * self.cosines + other * self.sines).to(x.dtype)

    def one_block(self, x: Any, parts: Sequence[Any], keys: Any, values: Any) -> Any:
        """One layer."""
        n1, q, k, v, o, n2, gate, up, down = parts
        width = self.config.head_width
        y = self.norm(x, n1)
        heads = [TF.linear(y, w).view(self.requests, -1, width) for w in (q, k, v)]
        keys[:, :, CONTEXT] = self.turn(heads[1])
        values[:, :, CONTEXT] = heads[2]
        found = TF.scaled_dot_product_attention(
            self.turn(heads[0])[:, :, None], keys, values, enable_gqa=True
        )
        x = x + TF.linear(found.reshape(self.requests, -1), o)
        y = self.norm(x, n2)
        return x + TF.linear(TF.silu(TF.linear(y, gate)) * TF.linear(y, up), down)

    def head(self, x: Any, norm: Any, weight: Any) -> Any:
        """Logits and the likeliest tokens."""
        logits = TF.linear(self.norm(x, norm), weight)
        return logits.argmax(-1), logits

    def run(self) -> Any:
        """One step."""
        w = self.weights
        x = TF.embedding(self.tokens, w["embed.weight"])
        for layer in range(self.config.layers):
            names = (
                "attention_norm",
                "attention.query",
                "attention.key",
                "attention.value",
                "attention.output",
                "feed_norm",
                "feed.gate",
                "feed.up",
                "feed.down",
            )
            parts = [w[f"blocks.{layer}.{n}.weight"] for n in names]
            x = self.block(x, parts, *self.caches[layer])
        return self.last(x, w["norm.weight"], w["head.weight"])


def step_bytes(config: DecoderConfig, requests: int, context: int = CONTEXT) -> int:
    """Bytes that a decode step must read: all weights but the embedding, and the cache."""
    layer = config.width * (config.heads + 2 * config.key_heads) * config.head_width
    layer += config.heads * config.head_width * config.width + 3 * config.width * config.hidden
    weights = config.layers * layer + config.vocabulary * config.width
    return 2 * weights + cache_bytes(config, requests, context)


def cache_bytes(config: DecoderConfig, requests: int, context: int = CONTEXT) -> int:
    """Bytes of the keys and values that a decode step reads."""
    return 4 * config.layers * config.key_heads * config.head_width * context * requests


def by_kernel(bound: Any) -> list[dict[str, Any]]:
    """Each kind of kernel of a step: launches, us of one, and the bytes told of it; an event lies
    between any two, so nothing overlaps here."""
    return [
        {
            "kernel": r.kernel,
            "launches": r.calls,
            "us": r.us / r.calls,
            "share_ms": r.us / 1e3,
            "bytes": r.bytes,
        }
        for r in bound.profile(5).table()
    ]


def timed(
    bench: Bench,
    sides: Sequence[Callable[[], Any]],
    rounds: int,
    steps: int = 6,
    before: Callable[[], Any] = lambda: None,
) -> list[float]:
    """Median seconds of a run of each side, in turns; `before` every turn."""
    for side in sides:
        with torch.cuda.stream(bench.stream):
            side()
            side()
    found: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds):
        for times, side in zip(found, sides):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before()
            with torch.cuda.stream(bench.stream):
                side()
                start.record()
                for _ in range(steps):
                    side()
                stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) / 1e3 / steps)
    return [statistics.median(times) for times in found]


def agreement(ours: Ours, theirs: Theirs) -> dict[str, float]:
    """How near our choices are to the best by the peer's logits, in shares of their spread."""
    ids, other = ours.ids(), theirs.run()[1].float().cpu().numpy()
    best = other.max(-1)
    gap = float(((best - other[np.arange(len(ids)), ids]) / other.std(-1)).max())
    if not gap < 0.2:
        print(f"  TOKENS DIFFER: {gap:.3f} below the best", flush=True)
    return {"logit_gap": gap, "same_argmax": float((ids == other.argmax(-1)).mean())}


def decode(
    bench: Bench,
    model: Decoder,
    shared: dict[str, torch.Tensor],
    requests: int,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """One batch: ours, the peer, launches, host time."""
    config = model.config
    ours = Ours(model, requests, options.page, options.kv_cache_dtype)
    ours.fill()
    kept = cache_bytes(config, requests)
    weights_ = options.bytes or step_bytes(config, requests) - kept
    limit = (weights_ + (kept if options.kv_cache_dtype == "auto" else kept // 2)) / READ_RATE
    row: dict[str, Any] = {
        "batch": requests,
        "page": options.page,
        "launches": ours.bound.launches,
        "compile_s": ours.compile_seconds,
        "limit_ms": 1e3 * limit,
    }
    sides: list[Callable[[], Any]] = [ours.bound.run]
    if options.peer:
        theirs = Theirs(config, shared, requests, ours)
        row.update(agreement(ours, theirs))
        sides.append(bench.graph([theirs.run]).replay)
    seconds = timed(bench, sides, options.rounds, before=ours.again)
    row["ms"] = 1e3 * seconds[0]
    row["host_us"], row["served_ms"] = ours.host_us(bench), ours.served_ms()
    if options.peer:
        row["torch_ms"] = 1e3 * seconds[1]
    if options.profile:
        ours.again()
        row["kernels"] = by_kernel(ours.bound)
    return row


def prefill(bench: Bench, model: Decoder, options: argparse.Namespace) -> dict[str, Any]:
    """8 prompts of 1024 tokens in one ragged step, as the engine runs them."""
    ours = Ours(model, 8, options.page, options.kv_cache_dtype)
    draw = np.random.default_rng(0)
    last = (CONTEXT - 1) // options.page
    prompts = draw.integers(0, model.config.vocabulary, (8, CONTEXT)).tolist()
    parts = [Part(i, int(ours.table[i, last]), CONTEXT, prompts[i]) for i in range(8)]

    def run() -> None:
        ours.steps.ragged(parts, Variant()).wait()

    for _ in range(2):  # the first time it is bound
        run()
    times = []
    for _ in range(5):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    seconds = statistics.median(times)
    row: dict[str, Any] = {"tokens_per_second": 8 * CONTEXT / seconds, "ms": 1e3 * seconds}
    if options.profile:
        (bound,) = ours.steps._chunks.values()
        row["kernels"] = by_kernel(bound)
    return row


def show(row: dict[str, Any]) -> None:
    """One line of a batch, and its kernels."""
    batch, bar = row["batch"], BARS.get(row["batch"])
    peer = f", torch {row['torch_ms']:.2f} ms" if "torch_ms" in row else ""
    said = f" (bar {bar}, vLLM {PEERS[batch]})" if bar else ""
    print(
        f"batch {batch:4}: {row['ms']:.3f} ms{said}{peer}, limit {row['limit_ms']:.2f} ms = "
        f"{100 * row['limit_ms'] / row['ms']:.0f}%, {row['launches']} launches, host "
        f"{row['host_us']:.0f} us, {row['served_ms']:.3f} ms with ids on the host, compile "
        f"{row['compile_s']:.1f} s",
        flush=True,
    )
    if "logit_gap" in row:
        print(
            f"    same tokens as torch {100 * row['same_argmax']:.0f}%, others at most "
            f"{row['logit_gap']:.3f} deviations below its best",
            flush=True,
        )
    show_kernels(row)


def show_kernels(row: dict[str, Any]) -> None:
    """A line for each kind of kernel."""
    for one in row.get("kernels", ()):
        print(
            f"    {one['launches']:4} x {one['us']:8.2f} us = {one['share_ms']:7.3f} ms  "
            f"{one['kernel']}",
            flush=True,
        )


def report(
    rows: Sequence[dict[str, Any]], prefilled: dict[str, Any] | None, form: str, kept: str = "auto"
) -> None:
    """The bars."""
    eight = form in EIGHT  # all have the bars of fp8: as many bytes
    quantised, bars = bool(form) and not eight, FP8_BARS if eight else BARS
    if eight and kept != "auto":
        bars = {**bars, **FP8_CACHE_BARS}
    for row in rows:
        wrong = []
        share = row["limit_ms"] / row["ms"]
        if quantised and row["batch"] == 1 and share < QUANTISED_BAR:
            wrong.append(f"{100 * share:.0f}% of the limit (bar {100 * QUANTISED_BAR:.0f}%)")
        if not quantised and row["batch"] in bars and row["ms"] > bars[row["batch"]]:
            wrong.append(f"{row['ms']:.2f} ms a step (bar {bars[row['batch']]})")
        if row["launches"] > LAUNCHES_BAR and not eight:
            wrong.append(f"{row['launches']} launches (bar {LAUNCHES_BAR})")
        if row["host_us"] > HOST_BAR:
            wrong.append(f"{row['host_us']:.0f} us of the host (bar {HOST_BAR})")
        print(f"batch {row['batch']}: {verdict(not wrong)} {', '.join(wrong)}")
    if prefilled is not None:
        met = prefilled["tokens_per_second"] >= (FP8_PREFILL_BAR if eight else PREFILL_BAR)
        print(f"prefill: {verdict(met)}")


def parsed() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-peer", dest="peer", action="store_false")
    parser.add_argument("--no-prefill", dest="prefill", action="store_false")
    parser.add_argument("--format", default="", help="quantised weights: Q4_1, fp8, blocks, ...")
    parser.add_argument("--fp8-head", action="store_true", help="the head in fp8 too")
    parser.add_argument("--input-scale", type=float, help="of inputs in fp8; else one a token")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=CACHES)
    parser.add_argument("--page", type=int, default=32)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", default="")
    return parser.parse_args()


def main() -> None:
    """Measure and write the result."""
    options, bench = parsed(), Bench()
    model = Decoder(configured(options.layers), "bfloat16")
    shared = weights(model)
    options.bytes = 0
    if options.format:
        form, inputs = EIGHT.get(options.format, (options.format, ""))
        fixed = options.input_scale
        inputs = FIXED if inputs and fixed is not None else inputs
        given = (format_of(form), inputs, options.fp8_head, fixed)
        options.bytes, options.peer = quantise(model, *given), False
        shared.clear()
        torch.cuda.empty_cache()
    options.peer &= options.kv_cache_dtype == "auto"
    ceilings = bench.ceilings()
    print(f"read {ceilings['read_bytes_per_second'] / 1e12:.2f} TB/s", flush=True)
    result: dict[str, Any] = {
        **bench.about(),
        "ceilings": ceilings,
        "layers": options.layers,
        "format": options.format or "BF16",
        "fp8_head": options.fp8_head,
        "input_scale": options.input_scale,
        "kv_cache_dtype": options.kv_cache_dtype,
        "batches": [],
    }
    for requests in (int(b) for b in options.batches.split(",") if b):
        row = decode(bench, model, shared, requests, options)
        result["batches"].append(row)
        show(row)
        torch.cuda.empty_cache()
    if options.prefill:
        result["prefill"] = found = prefill(bench, model, options)
        print(
            f"prefill 8x{CONTEXT}: {found['tokens_per_second']:.0f} tok/s (bar {PREFILL_BAR})",
            flush=True,
        )
        show_kernels(found)
    report(result["batches"], result.get("prefill"), options.format, options.kv_cache_dtype)
    if options.out:
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n")
        print("written:", options.out)


if __name__ == "__main__":
    main()
    end()

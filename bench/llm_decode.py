"""A decode step of the Llama-3-8B shape on a GPU: ours beside torch.compile in a CUDA graph.

    python bench/llm_decode.py                         batches 1, 8, 32, 128; prefill; peers
    python bench/llm_decode.py --batches 1 --profile   each kernel of the step, its time and bytes
    python bench/llm_decode.py --no-peer --layers 4

Random bf16 weights made on the device and shared by both sides; contexts of 1024 tokens, greedy.
Ours is one bound step (paged cache, pages in random order) launched as one graph; the peer is a
plain torch decoder, each block compiled, over a contiguous cache, captured as one CUDA graph. A
round times several steps of one side, then of the other; medians of the rounds are told, beside
the limit of the bytes at the read rate of this run. Logits of both sides are compared first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as TF

import tilegrad as tg
from gpu import Bench
from tilegrad import nn
from tilegrad.models.decoder import Decoder, paged
from tilegrad.models.decoder_config import DecoderConfig
from tilegrad.targets.ptx.graph import Operation, Replay

LLAMA_3_8B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
BARS = {1: 4.2, 8: 4.5, 32: 5.4, 128: 9.0}  # ms
PEERS = {1: 5.09, 8: 5.40, 32: 6.51, 128: 10.78}  # vLLM 0.24, measured on the same kind of GPU
PREFILL_BAR = 43_000  # tokens a second
LAUNCHES_BAR, HOST_BAR = 200, 50.0
CONTEXT, PAGE = 1024, 64
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


class Ours:
    """One bound step of so many requests, each of CONTEXT tokens of which `new` are new."""

    def __init__(self, model: Decoder, requests: int, new: int = 1) -> None:
        config = model.config
        self.model, self.requests, self.new = model, requests, new
        length = CONTEXT + 1 if new == 1 else new
        each = -(-length // PAGE)
        draw = np.random.default_rng(0)
        device = "cuda:0"
        self.cache = nn.PagedCache(
            config.layers, requests * each, PAGE, config.key_heads, config.head_width,
            requests=requests, most_pages=each, dtype=tg.bfloat16, device=device,
        )  # fmt: skip
        tokens = draw.integers(0, config.vocabulary, requests * new).astype(np.int32)
        positions = np.tile(np.arange(length - new, length, dtype=np.int32), requests)
        table = draw.permutation(requests * each).astype(np.int32).reshape(requests, each)
        lengths = np.full(requests, length, np.int32)
        starts = (np.arange(requests + 1) * new).astype(np.int32)
        rows = (starts[1:] - 1).astype(np.int32)
        given = (tokens, positions, table, lengths, starts, rows)
        self.tokens, self.table = tokens, table
        self.arguments = (model, self.cache, *(tg.tensor(a, device=device) for a in given))

        def step(model: Decoder, cache: Any, tokens: Any, positions: Any, table: Any,
                 lengths: Any, starts: Any, rows: Any) -> Any:  # fmt: skip
            attend = paged(config, cache, table, lengths, starts, queries=new)
            logits = model.step(tokens, positions, attend, rows if new > 1 else None, turned=False)
            return logits.argmax(-1), logits

        self.step = tg.jit(step)
        began = time.perf_counter()
        with tg.no_grad():
            self.bound = self.step.bind(*self.arguments)
        self.compile_seconds = time.perf_counter() - began

    def fill(self, seed: int = 1) -> None:
        """Random keys and values in the cache."""
        torch.manual_seed(seed)
        for tensor in (*self.cache.keys, *self.cache.values):
            shared = torch.from_dlpack(tensor)
            shared.normal_(0.0, 0.5)
        torch.cuda.synchronize()

    def logits(self) -> np.ndarray[Any, Any]:
        """Logits of one run, as float32."""
        self.bound.run()
        return np.asarray(self.bound.outputs[1].numpy(), np.float32)

    def operations(self) -> list[Operation]:
        """The launches of a step."""
        return list(self.bound.replay.operations)

    def host_us(self, bench: Bench, count: int = 50) -> float:
        """Host time of a run: many put on the stream, none waited for."""
        bench.device.synchronize()
        times = []
        for _ in range(5):
            began = time.perf_counter()
            for _ in range(count):
                self.bound.run()
            times.append((time.perf_counter() - began) / count)
            bench.device.synchronize()
        return 1e6 * min(times)


class Theirs:
    """The same step in torch."""

    def __init__(self, config: DecoderConfig, weights: dict[str, torch.Tensor], requests: int,
                 ours: Ours) -> None:  # fmt: skip
        self.config, self.weights, self.requests = config, weights, requests
        heads, width = config.key_heads, config.head_width
        shape = (requests, heads, CONTEXT + 1, width)
        self.caches = [tuple(torch.empty(shape, device="cuda", dtype=torch.bfloat16)
                             for _ in "kv") for _ in range(config.layers)]  # fmt: skip
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
        found = TF.scaled_dot_product_attention(self.turn(heads[0])[:, :, None], keys, values,
                                                enable_gqa=True)  # fmt: skip
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
            names = ("attention_norm", "attention.query", "attention.key", "attention.value",
                     "attention.output", "feed_norm", "feed.gate", "feed.up", "feed.down")
            parts = [w[f"blocks.{layer}.{n}.weight"] for n in names]
            x = self.block(x, parts, *self.caches[layer])
        return self.last(x, w["norm.weight"], w["head.weight"])


def step_bytes(config: DecoderConfig, requests: int, context: int = CONTEXT) -> int:
    """Bytes that a decode step must read: all weights but the embedding, and the cache."""
    layer = config.width * (config.heads + 2 * config.key_heads) * config.head_width
    layer += config.heads * config.head_width * config.width + 3 * config.width * config.hidden
    weights = config.layers * layer + config.vocabulary * config.width
    cache = 2 * config.layers * config.key_heads * config.head_width * context * requests
    return 2 * (weights + cache)


def by_kernel(bench: Bench, operations: Sequence[Operation]) -> list[dict[str, Any]]:
    """Each kind of kernel of the step alone: all its launches in a row, as one graph."""
    groups: dict[str, list[Operation]] = defaultdict(list)
    for operation in operations:
        name = operation.prepared.entry.name if operation.prepared else "copy"
        groups[name].append(operation)
    rows = []
    for name, several in groups.items():
        repeated = several * max(1, 32 // len(several))
        replay = Replay(bench.device, repeated)
        seconds = timed(bench, [replay.launch], 3)[0] / len(repeated)
        rows.append({"kernel": name, "launches": len(several), "us": 1e6 * seconds,
                     "share_ms": 1e3 * seconds * len(several)})  # fmt: skip
    return sorted(rows, key=lambda r: -r["share_ms"])


def timed(bench: Bench, sides: Sequence[Callable[[], Any]], rounds: int, steps: int = 6
          ) -> list[float]:  # fmt: skip
    """Median seconds of a run of each side, in turns."""
    for side in sides:
        with torch.cuda.stream(bench.stream):
            side()
            side()
    found: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds):
        for times, side in zip(found, sides):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
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
    """How near the logits of both sides are."""
    mine, other = ours.logits(), theirs.run()[1].float().cpu().numpy()
    error = float(np.abs(mine - other).max() / np.abs(other).max())
    same = float((mine.argmax(-1) == other.argmax(-1)).mean())
    if not error < 0.05:
        print(f"  LOGITS DIFFER: {error:.3f} of the largest", flush=True)
    return {"logit_error": error, "same_argmax": same}


def decode(bench: Bench, model: Decoder, shared: dict[str, torch.Tensor], requests: int,
           options: argparse.Namespace) -> dict[str, Any]:  # fmt: skip
    """One batch: ours, the peer, launches, host time."""
    config = model.config
    ours = Ours(model, requests)
    ours.fill()
    operations = ours.operations()
    limit = step_bytes(config, requests) / READ_RATE
    row: dict[str, Any] = {"batch": requests, "launches": len(operations),
                           "compile_s": ours.compile_seconds, "limit_ms": 1e3 * limit}  # fmt: skip
    sides: list[Callable[[], Any]] = [ours.bound.run]
    if options.peer:
        theirs = Theirs(config, shared, requests, ours)
        row.update(agreement(ours, theirs))
        sides.append(bench.graph([theirs.run]).replay)
    seconds = timed(bench, sides, options.rounds)
    row["ms"] = 1e3 * seconds[0]
    row["host_us"] = ours.host_us(bench)
    if options.peer:
        row["torch_ms"] = 1e3 * seconds[1]
    if options.profile:
        row["kernels"] = by_kernel(bench, operations)
    return row


def prefill(bench: Bench, model: Decoder, options: argparse.Namespace) -> dict[str, Any]:
    """8 prompts of 1024 tokens in one step."""
    ours = Ours(model, 8, CONTEXT)
    seconds = timed(bench, [ours.bound.run], 3, 2)[0]
    row = {"tokens_per_second": 8 * CONTEXT / seconds, "ms": 1e3 * seconds,
           "launches": len(ours.operations())}  # fmt: skip
    if options.profile:
        row["kernels"] = by_kernel(bench, ours.operations())
    return row


def show(row: dict[str, Any]) -> None:
    """One line of a batch, and its kernels."""
    batch, bar = row["batch"], BARS.get(row["batch"])
    peer = f", torch {row['torch_ms']:.2f} ms" if "torch_ms" in row else ""
    said = f" (bar {bar}, vLLM {PEERS[batch]})" if bar else ""
    print(f"batch {batch:4}: {row['ms']:.3f} ms{said}{peer}, limit {row['limit_ms']:.2f} ms = "
          f"{100 * row['limit_ms'] / row['ms']:.0f}%, {row['launches']} launches, host "
          f"{row['host_us']:.0f} us, compile {row['compile_s']:.1f} s", flush=True)  # fmt: skip
    if "logit_error" in row:
        print(f"    logits differ by {row['logit_error']:.4f} of the largest, same argmax "
              f"{100 * row['same_argmax']:.0f}%", flush=True)  # fmt: skip
    for one in row.get("kernels", ()):
        print(f"    {one['launches']:4} x {one['us']:8.2f} us = {one['share_ms']:7.3f} ms  "
              f"{one['kernel']}", flush=True)  # fmt: skip


def parsed() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-peer", dest="peer", action="store_false")
    parser.add_argument("--no-prefill", dest="prefill", action="store_false")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", default="")
    return parser.parse_args()


def main() -> None:
    """Measure and write the result."""
    options, bench = parsed(), Bench()
    model = Decoder(configured(options.layers), "bfloat16")
    shared = weights(model)
    ceilings = bench.ceilings()
    print(f"read {ceilings['read_bytes_per_second'] / 1e12:.2f} TB/s", flush=True)
    result: dict[str, Any] = {**bench.about(), "ceilings": ceilings, "layers": options.layers,
                              "batches": []}  # fmt: skip
    for requests in (int(b) for b in options.batches.split(",") if b):
        row = decode(bench, model, shared, requests, options)
        result["batches"].append(row)
        show(row)
        torch.cuda.empty_cache()
    if options.prefill:
        result["prefill"] = found = prefill(bench, model, options)
        print(f"prefill 8x{CONTEXT}: {found['tokens_per_second']:.0f} tok/s "
              f"(bar {PREFILL_BAR}), {found['launches']} launches", flush=True)  # fmt: skip
        for one in found.get("kernels", ()):
            print(f"    {one['launches']:4} x {one['us']:8.2f} us = {one['share_ms']:7.3f} ms  "
                  f"{one['kernel']}", flush=True)  # fmt: skip
    if options.out:
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n")
        print("written:", options.out)


if __name__ == "__main__":
    main()

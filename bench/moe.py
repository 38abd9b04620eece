"""Experts of the Qwen3-30B-A3B shape on a GPU: a layer beside torch, and the whole model.

    python bench/moe.py                        the layer at 1, 8, 32, 1,024 and 8,192 tokens
    python bench/moe.py --profile              each kernel of the layer, its time and bytes
    python bench/moe.py --model --layers 48    decode of 1, 8 and 32 requests, prompts of 1,024
    python bench/moe.py --model --format fp8   weights in e4m3 by channel, inputs by token; or int8
    python bench/moe.py --format blocks        e4m3 by 128 x 128, inputs by token and 128 columns

Random weights, in bf16, fp8 or int8 (but router and head); the router is random too, so that picks
are about uniform (in the whole model they are drawn), and how many experts are picked is counted.
Ours is the model's own layer, jitted and bound: one graph of several layers, each with weights of
its own. The peer is torch with `_grouped_mm` over rows sorted by expert, as a CUDA graph. The limit
is the larger of the bytes of the picked experts at the read rate and the FLOPs at the sustained
rate of the matrix units. Results of both sides are compared first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as TF
from llm_decode import (
    CONTEXT,
    EIGHT,
    READ_RATE,
    Blocks,
    Ours,
    by_kernel,
    cache_bytes,
    quantise,
    timed,
    weights,
)

import tilegrad as tg
from gpu import Bench
from tilegrad import nn
from tilegrad.core.format import format_of
from tilegrad.generate.sampling import Variant
from tilegrad.generate.steps import Part
from tilegrad.models.decoder.config import DecoderConfig
from tilegrad.models.decoder.model import Decoder, Experts
from tilegrad.tensor.stored import stored

QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
BARS = {1: 2.1, 8: 8.0, 32: 15.5}  # ms of a step
FP8_BARS = {1: 1.5, 8: 4.8, 32: 9.0}
MOST = 8192  # tokens of a step
DISTINCT = 8192  # rows of experts' weights in fp8: neighbours have others
MATRIX_RATE = 8.0e14  # FLOP/s of bf16 that the clock allows


def configured(layers: int) -> DecoderConfig:
    """The shape with so many layers."""
    return DecoderConfig.from_huggingface({**QWEN3_30B_A3B, "num_hidden_layers": layers})


class Layers(nn.Module):
    """Experts one after the other, each added to its input."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.feeds = nn.ModuleList(Experts(config, "bfloat16") for _ in range(config.layers))

    def forward(self, x: tg.Tensor) -> tg.Tensor:
        """(N, C) -> (N, C)."""
        for feed in self.feeds:
            x = x + feed(x)
        return x


class Even(nn.Module):
    """A router whose picks are random and even, whatever tokens are: those of random weights come
    to resemble each other from layer to layer, and then pick alike."""

    def __init__(self, router: nn.Module, chances: np.ndarray) -> None:
        super().__init__()
        self.router = router
        self.register_buffer("chances", tg.tensor(chances, device="cuda"))

    def forward(self, y: tg.Tensor) -> tg.Tensor:
        """(N, C) -> (N, E): what the router says, and far more that is drawn for each place."""
        return self.router(y) * 1e-3 + self.chances[: y.shape[0]]


def forced(model: nn.Module, config: DecoderConfig) -> list[np.ndarray]:
    """Make picks even; what is drawn, for each layer."""
    draw, made = np.random.default_rng(0), []
    for feed in (m for _, m in list(model.named_modules()) if isinstance(m, Experts)):
        made.append(draw.standard_normal((MOST, config.experts)).astype(np.float32))
        feed.router = Even(feed.router, made[-1])
    return made


def picked(made: list[np.ndarray], requests: int, used: int) -> float:
    """Different experts of a layer that so many requests pick."""
    found = [np.argsort(-layer[:requests], axis=1)[:, :used] for layer in made]
    return statistics.mean(len(np.unique(x)) for x in found)


def in_bytes(model: nn.Module, name_of: str, shared: dict[str, torch.Tensor] | None = None) -> None:
    """Give experts weights of 8 bits, and linear layers of a whole model; what is shared with
    torch has the values of those."""
    blocks: dict[tuple[int, ...], Blocks] = {}
    weights_in, inputs = EIGHT[name_of]
    form = format_of(weights_in)
    for path, feed in list(model.named_modules()):
        if not isinstance(feed, Experts):
            continue
        for name in ("gate", "up", "down"):
            weight = getattr(feed, name)
            shape = tuple(int(s) for s in weight.shape)
            if shape not in blocks:
                blocks[shape] = Blocks(form, *shape, distinct=DISTINCT)
            weight.requires_grad = False
            weight.node = stored(blocks[shape], weight.dtype).node
            if shared is not None:
                rows = blocks[shape].raw.reshape(-1, blocks[shape].raw.shape[-1])
                values = torch.from_numpy(form.to_float32(rows).reshape(shape))
                shared[f"{path}.{name}"] = values.to("cuda", torch.bfloat16)
        feed.round_inputs("gate", inputs, None)
        feed.round_inputs("down", inputs, None)
    if isinstance(model, Decoder):
        quantise(model, form, inputs)
        torch.cuda.empty_cache()


class Theirs:
    """The same in torch."""

    def __init__(self, config: DecoderConfig, shared: dict[str, torch.Tensor], x: Any) -> None:
        self.config, self.shared, self.x = config, shared, x
        self.picked: list[Any] = []

    def run(self) -> Any:
        """All layers."""
        x, self.picked = self.x, []
        for layer in range(self.config.layers):
            x = x + self.layer(x, layer)
        return x

    def layer(self, x: Any, layer: int) -> Any:
        """One layer: sort by expert, three grouped products, back in order."""
        names = ("router.weight", "gate", "up", "down")
        router, gate, up, down = (self.shared[f"feeds.{layer}.{name}"] for name in names)
        count, each = self.config.experts, self.config.experts_used
        shares, picked = torch.softmax(TF.linear(x, router).float(), -1).topk(each, -1)
        shares = shares / shares.sum(-1, keepdim=True)
        self.picked.append(picked)
        ids, order = picked.flatten().sort(stable=True)
        numbers = torch.arange(count, device=x.device)
        ends = (ids[None, :] <= numbers[:, None]).sum(1).to(torch.int32)
        rows = x[order // each]
        a, b = (torch._grouped_mm(rows, w.transpose(1, 2), offs=ends) for w in (gate, up))
        found = torch._grouped_mm(TF.silu(a) * b, down.transpose(1, 2), offs=ends)
        own = found[order.argsort()].reshape(x.shape[0], each, -1)
        return (own * shares.to(x.dtype)[..., None]).sum(1)


def limit(config: DecoderConfig, tokens: int, experts: float, size: int = 2) -> float:
    """Seconds of one layer's experts at least, with weights of so many bytes."""
    each = 3 * config.width * config.expert_hidden
    flops = 2 * tokens * config.experts_used * each
    return max(size * experts * each / READ_RATE, flops * size / 2 / MATRIX_RATE)


def layer(bench: Bench, model: Layers, shared: Any, config: DecoderConfig, options: Any) -> None:
    """Every number of tokens."""
    for tokens in options.tokens:
        x = torch.randn(tokens, config.width, device="cuda", dtype=torch.bfloat16)
        theirs = Theirs(config, shared, x)
        expected = theirs.run()
        distinct = statistics.mean(len(p.unique()) for p in theirs.picked)
        torch.cuda.synchronize()
        with tg.no_grad():
            bound = tg.jit(lambda y: model(y)).bind(tg.from_torch(x))
        made = bound.run()
        bench.device.synchronize()
        found = made.torch().float()
        error = float((found - expected.float()).abs().max() / expected.float().abs().max())
        sides = [bound.run, *([bench.graph([theirs.run]).replay] if options.peer else [])]
        seconds = [s / config.layers for s in timed(bench, sides, options.rounds)]
        least = limit(config, tokens, distinct, options.size)
        row = {
            "tokens": tokens,
            "experts": distinct,
            "us": 1e6 * seconds[0],
            "limit_us": 1e6 * least,
            "torch_us": 1e6 * seconds[1] if options.peer else None,
            "launches": bound.launches / config.layers,
            "error": error,
        }
        peer = f", torch {1e6 * seconds[1]:.1f} us" if options.peer else ""
        print(
            f"layer, {tokens:5} tokens, {distinct:5.1f} experts: {1e6 * seconds[0]:7.1f} us{peer}, "
            f"limit {1e6 * least:.1f} us = {100 * least / seconds[0]:.0f}%, "
            f"{row['launches']:.0f} launches, error {error:.1e}",
            flush=True,
        )
        if options.profile:
            row["kernels"] = by_kernel(bound)
            for one in row["kernels"]:
                print(f"    {one['us']:8.1f} us x {one['launches']:3}  {one['kernel']}")
        options.rows.append(row)


def whole(bench: Bench, options: Any) -> None:
    """Decode steps and prompts of the whole model."""
    config = configured(options.layers)
    model = Decoder(config, "bfloat16").eval()
    weights(model)
    if options.format:
        in_bytes(model, options.format)
    drawn = forced(model, config)
    bars, size = FP8_BARS if options.format else BARS, options.size
    each = 3 * config.width * config.expert_hidden
    rest = config.width * config.head_width * 2 * (config.heads + config.key_heads)
    for requests in options.requests:
        ours = Ours(model, requests, 16)
        ours.fill()
        (seconds,) = timed(bench, [ours.bound.run], options.rounds, before=ours.again)
        experts = picked(drawn, requests, config.experts_used)
        read = size * config.layers * (experts * each + rest)
        read += 2 * config.vocabulary * config.width
        least = (read + cache_bytes(config, requests)) / READ_RATE
        bar = f" (bar {bars.get(requests)})" if options.layers == 48 else ""
        print(
            f"model, {requests:3} requests: {1e3 * seconds:.2f} ms{bar}, "
            f"limit {1e3 * least:.2f} ms for {experts:.1f} experts a layer, "
            f"{ours.bound.launches} launches",
            flush=True,
        )
        row = {"requests": requests, "ms": 1e3 * seconds, "limit_ms": 1e3 * least}
        if options.profile:
            ours.again()
            row["kernels"] = by_kernel(ours.bound)
            for one in row["kernels"]:
                print(f"    {one['us']:8.1f} us x {one['launches']:3}  {one['kernel']}")
        options.rows.append(row)
    for prompts in (1, 8):
        seconds = prefill(model, prompts)
        rate = prompts * CONTEXT / seconds
        print(f"model, {prompts} x 1,024 tokens: {1e3 * seconds:.1f} ms, {rate:,.0f} tok/s")
        options.rows.append({"prompts": prompts, "ms": 1e3 * seconds})


def prefill(model: Decoder, prompts: int) -> float:
    """Seconds of prompts of CONTEXT tokens in one ragged step, as the engine runs them."""
    ours = Ours(model, prompts, 16)
    draw, last = np.random.default_rng(0), (CONTEXT - 1) // 16
    tokens = draw.integers(0, model.config.vocabulary, (prompts, CONTEXT)).tolist()
    parts = [Part(i, int(ours.table[i, last]), CONTEXT, tokens[i]) for i in range(prompts)]
    times = []
    for _ in range(7):
        began = time.perf_counter()
        ours.steps.ragged(parts, Variant()).wait()
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])  # the first time it is bound


def parsed() -> argparse.Namespace:
    """The options."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=numbers, default=[1, 8, 32, 1024, 8192])
    parser.add_argument("--requests", type=numbers, default=[1, 8, 32])
    parser.add_argument("--layers", type=int, default=0, help="4 alone, 48 in the model")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--model", action="store_true", help="the whole model, not a layer")
    parser.add_argument("--format", default="", choices=["", *EIGHT], help="of weights, else bf16")
    parser.add_argument("--no-peer", dest="peer", action="store_false")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", default="", help="where the JSON goes")
    found = parser.parse_args()
    found.rows, found.size = [], 1 if found.format else 2
    found.layers = found.layers or (48 if found.model else 4)
    return found


def main() -> None:
    """Run what was asked for."""
    options, bench = parsed(), Bench()
    if options.model:
        whole(bench, options)
    else:
        config = configured(options.layers)
        model = Layers(config).eval()
        shared = weights(model)  # type: ignore[arg-type]
        if options.format:
            in_bytes(model, options.format, shared)
        layer(bench, model, shared, config, options)
    if options.out:
        about = {"kind": "moe", **bench.about(), "layers": options.layers, "model": options.model}
        about["format"] = options.format or "bf16"
        Path(options.out).write_text(json.dumps({**about, "rows": options.rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

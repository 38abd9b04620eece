"""The engine at full load on a GPU: the published offline script, first tokens, and idle time.

    python bench/serve_offline.py                          Qwen3-0.6B's shape, 256 requests
    python bench/serve_offline.py --shape qwen3-14b
    python bench/serve_offline.py --shape llama-3-8b --first-tokens --requests 128

Random bf16 weights made on the device. The script is that of nano-vllm and mini-sglang: 256
requests at once, prompts and answers of 100 to 1024 tokens, temperature 0.6, no stop token. Told
are output tokens a second of several runs of one process (without a prefix cache, since no prompt
may be known), what `prepare` took, what was compiled or bound after it (nothing may be), and by
events on the stream how long the GPU had nothing to do between two steps: while the same requests
go on, and where one came or went. Run it twice: the second process finds its programs in the cache.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llm_decode import weights
from shapes import SHAPES

from gpu import Bench
from tilegrad.generate.engine import Engine
from tilegrad.generate.request import Request
from tilegrad.generate.sampling import Sampling
from tilegrad.generate.sampling_limits import SERVED
from tilegrad.models.decoder.config import DecoderConfig
from tilegrad.models.decoder.model import Decoder
from tilegrad.serve.load.script import Call, mini_sglang
from tilegrad.targets.ptx.driver import open_device
from tilegrad.tensor.bound import Bound

BARS = {"qwen3-0.6b": 26_500, "qwen3-14b": 6_500}  # output tokens a second
VLLM = {"qwen3-0.6b": 21_334, "qwen3-14b": 5_918}  # 0.24, on the same kind of GPU
# ms to the first token of a prompt; 160 has none: what a prompt costs just past 128
FIRST_BARS = {16: 6.0, 128: 8.0, 160: None, 1000: 27.0, 2000: 50.0}
IDLE_BARS = {"same": (50.0, 150.0), "changed": (400.0, 400.0)}  # us: one request, 256
CONTEXT = 2048 + 64


class Idle:
    """Events around every run of a Bound: how long the GPU waited for the next one."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.kind = bench, "same"
        self.marks: list[tuple[Any, Any]] = []
        self.kinds: list[str] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within this every run is marked."""
        plain = Bound.run

        def marked(bound: Bound) -> Any:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(self.bench.stream)
            found = plain(bound)
            stop.record(self.bench.stream)
            self.marks.append((start, stop))
            self.kinds.append(self.kind)
            return found

        Bound.run = marked  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            Bound.run = plain  # type: ignore[method-assign]

    def gaps(self) -> dict[str, list[float]]:
        """us between two runs, by what the later one was."""
        torch.cuda.synchronize()
        found: dict[str, list[float]] = {"same": [], "changed": []}
        for (_, end), (begin, _), kind in zip(self.marks, self.marks[1:], self.kinds[1:]):
            found[kind].append(1e3 * end.elapsed_time(begin))
        return found

    def busy(self) -> float:
        """Seconds of all runs."""
        return sum(start.elapsed_time(stop) for start, stop in self.marks) / 1e3


def run(engine: Engine, calls: list[Call], idle: Idle | None = None) -> dict[str, float]:
    """All requests at once until the last is done."""
    made = steps = changed = 0
    began = time.perf_counter()
    for number, call in enumerate(calls):
        engine.add(
            Request(
                number,
                call.prompt,  # type: ignore[arg-type]
                Sampling(temperature=0.6, seed=number),
                max_tokens=call.max_tokens,
            )
        )
    before: Any = None
    launch = engine._launch

    def launched(batch: Any) -> Any:
        nonlocal before, changed, steps
        same = batch is before
        before, steps, changed = batch, steps + 1, changed + (not same)
        if idle is not None:
            idle.kind = "same" if same else "changed"
        return launch(batch)

    engine._launch = launched  # type: ignore[method-assign]
    while engine.busy:
        for one in engine.step():
            if one.error is not None:
                raise one.error
            made += 1
    engine._launch = launch  # type: ignore[method-assign]
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "tokens": made, "steps": steps, "changed": changed}


def first_token(engine: Engine, length: int, seed: int) -> tuple[float, float, float]:
    """ms from adding a prompt to its first token, of which the host has so many before the launch
    and the GPU so many from the launch to its end."""
    ids = np.random.default_rng(seed).integers(0, 10_000, length).tolist()
    request = Request(f"{length}-{seed}", tuple(ids), Sampling(temperature=0.6), max_tokens=1)
    plain, launched, events = Bound.run, [], [torch.cuda.Event(enable_timing=True) for _ in "ab"]
    stream = torch.cuda.ExternalStream(int(open_device(0).stream))

    def marked(bound: Bound) -> Any:
        launched.append(time.perf_counter())
        events[0].record(stream)
        found = plain(bound)
        events[1].record(stream)
        return found

    Bound.run = marked  # type: ignore[method-assign, assignment]
    try:
        began = time.perf_counter()
        engine.add(request)
        while engine.busy:
            engine.step()
        whole = time.perf_counter() - began
    finally:
        Bound.run = plain  # type: ignore[method-assign]
    torch.cuda.synchronize()
    return 1e3 * whole, 1e3 * (launched[0] - began), events[0].elapsed_time(events[1])


def first_tokens(engine: Engine, profile: bool) -> dict[int, Any]:
    """Prompts of each length and of a few tokens less, every one of a new length; with `profile`
    the kernels of the step that ran the longest of them."""
    found: dict[int, Any] = {}
    for i in range(20):  # a GPU that was idle takes some time to clock up
        first_token(engine, 256 + i, i)
    for length, bar in FIRST_BARS.items():
        times = [first_token(engine, length - i, i) for i in range(6)]
        found[length] = {n: list(t) for n, t in zip(("ms", "host_ms", "gpu_ms"), zip(*times))}
        shown = " ".join(f"{t:.1f}" for t in found[length]["ms"])
        host, gpu = (statistics.median(found[length][n]) for n in ("host_ms", "gpu_ms"))
        print(f"first token of {length} tokens and a few less: {shown} ms (bar {bar})")
        print(f"  before the launch {host:.2f} ms, on the GPU {gpu:.2f} ms", flush=True)
        if profile:
            bound, rows, tokens = engine.steps._ragged_bound(1, length, SERVED[0])
            print(
                f"  a step of {rows} rows, {tokens} tokens:\n{bound.profile().text()}", flush=True
            )
    return found


def made_so_far(engine: Engine) -> tuple[int, ...]:
    """How much was compiled and bound."""
    steps = engine.steps
    decoding = sum(map(len, steps._decoding.values()))
    return len(steps._compiled), decoding, len(steps._chunks)


def quantiles(values: list[float]) -> dict[str, float]:
    """The median, the 90th and the 99th of a hundred, and the most."""
    if not values:
        return {}
    at = np.percentile(values, [50, 90, 99, 100])
    return dict(zip(("p50", "p90", "p99", "most"), map(float, at)))


def parsed() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, default=0, help="fewer layers than the shape has")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of a step, at most")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--few", type=int, default=0, help="only so many requests of the script")
    parser.add_argument("--first-tokens", action="store_true", help="prompts of new lengths alone")
    parser.add_argument("--no-script", dest="script", action="store_false")
    parser.add_argument("--profile", action="store_true", help="host time of a run by function")
    parser.add_argument("--out", default="")
    return parser.parse_args()


def prepared(model: Decoder, options: argparse.Namespace, calls: list[Call]) -> tuple[Any, Any]:
    """An engine that is ready, and what that took."""
    began = time.perf_counter()
    tokens = sum(len(c.prompt) + c.max_tokens + 64 for c in calls)
    engine = Engine(
        model,
        device="cuda:0",
        requests=options.requests,
        context=CONTEXT,
        pages=-(-tokens // 32),
        chunk=options.chunk,
        prefix_cache=False,
    )
    profile = cProfile.Profile()
    if options.profile:
        profile.runcall(engine.prepare)
        pstats.Stats(profile).sort_stats("cumtime").print_stats(90)
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)
    else:
        engine.prepare()
    torch.cuda.synchronize()
    took = {"prepare_s": time.perf_counter() - began, "made": made_so_far(engine)}
    print(f"ready after {took['prepare_s']:.1f} s; compiled, decode, prompts {took['made']}")
    return engine, took


def main() -> None:
    """Measure and write the result."""
    options, bench = parsed(), Bench()
    shape = dict(SHAPES[options.shape])
    if options.layers:
        shape["num_hidden_layers"] = options.layers
    model = Decoder(DecoderConfig.from_huggingface(shape), "bfloat16")
    kept = weights(model)
    calls = mini_sglang()[: options.few or None]
    engine, took = prepared(model, options, calls)
    result: dict[str, Any] = {
        **bench.about(),
        "shape": options.shape,
        "chunk": options.chunk,
        **took,
        "runs": [],
    }
    if options.first_tokens:
        result["first"] = first_tokens(engine, options.profile)
    for _ in range(options.runs if options.script else 0):
        row = run(engine, calls)
        result["runs"].append(row)
        print(
            f"{row['tokens'] / row['seconds']:.0f} output tok/s (bar {BARS.get(options.shape)}, "
            f"vLLM {VLLM.get(options.shape)}), {row['seconds']:.2f} s, {row['steps']} steps, "
            f"{row['changed']} of them with other requests or pages",
            flush=True,
        )
    if options.script:
        idle = Idle(bench)
        with idle.watched():
            row = run(engine, calls, idle)
        result["idle_us"] = {kind: quantiles(v) for kind, v in idle.gaps().items()}
        result["busy_share"] = idle.busy() / row["seconds"]
        for kind, found in result["idle_us"].items():
            shown = ", ".join(f"{k} {v:.0f}" for k, v in found.items())
            print(f"idle before a step ({kind}): {shown} us (bars {IDLE_BARS[kind]})")
        print(f"the GPU was busy {100 * result['busy_share']:.1f}% of {row['seconds']:.2f} s")
        alone = Idle(bench)
        with alone.watched():
            run(engine, calls[:1], alone)
        same = alone.gaps()["same"]
        result["idle_alone_us"] = quantiles(same)
        print(f"one request alone: idle median {statistics.median(same):.0f} us (bar 50)")
    result["made_after"] = made_so_far(engine)
    if result["made_after"] != result["made"]:
        print(f"MADE LATER: {result['made']} before, {result['made_after']} after")
    if options.profile:
        profile = cProfile.Profile()
        profile.runcall(run, engine, calls)
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    if options.out:
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n")
    kept.clear()


if __name__ == "__main__":
    main()

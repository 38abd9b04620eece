"""Host time of a decode step: a Bound beside the plain jitted call.

    python bench/bound.py                     on the CPU
    python bench/bound.py --device cuda       on a GPU: launches only, then waited for
    python bench/bound.py --profile           each kernel, its time and bytes

A decoder of 32 small layers over a paged cache (64 Tensors of keys and values, all state), greedy,
lengths and last ids on the device. On a GPU the host's own time is that of many runs put on the
stream without waiting, few enough that the stream never fills. On a CPU a run computes before it
returns; what the host adds to the native call is timed with that call left out. Tokens of the
Bound are compared with those of the plain calls first.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import tilegrad as tg
from tilegrad.models.decoder.config import DecoderConfig
from tilegrad.models.decoder.model import Decoder, paged
from tilegrad.nn import PagedCache
from tilegrad.tensor.placement import synchronize

LAYERS, WIDTH, HEADS, KEY_HEADS, HEAD_WIDTH, VOCABULARY = 32, 128, 2, 1, 64, 512
PAGE, MOST_PAGES = 64, 16
HOST_BAR = 50.0  # us on a GPU


class Requests:
    """The last token of each request."""

    def __init__(self, count: int, device: str) -> None:
        first = np.arange(count, dtype=np.int32)
        self.last = (tg.tensor(first, device=device) * 1).realize()

    def tensors(self) -> dict[str, tg.Tensor]:
        """State, for jit."""
        return {"last": self.last}


class Setting:
    """A model with its cache, and the step over them."""

    def __init__(self, device: str, requests: int, layers: int) -> None:
        tg.manual_seed(0)
        self.device, self.count = device, requests
        self.config = DecoderConfig(
            "llama",
            vocabulary=VOCABULARY,
            width=WIDTH,
            layers=layers,
            heads=HEADS,
            key_heads=KEY_HEADS,
            head_width=HEAD_WIDTH,
            hidden=2 * WIDTH,
            context=PAGE * MOST_PAGES,
        )
        self.dtype = tg.float32 if device == "cpu" else tg.bfloat16
        self.model = Decoder(self.config, self.dtype)
        if device != "cpu":
            self.model.to(device)
        self.start()
        self.jitted = tg.jit(self.step)
        self.made: Any = None  # the Bound

    def start(self) -> None:
        """A fresh cache, and requests of no tokens."""
        count = self.count
        self.cache = PagedCache(
            self.config.layers,
            count * MOST_PAGES,
            PAGE,
            KEY_HEADS,
            HEAD_WIDTH,
            requests=count,
            most_pages=MOST_PAGES,
            dtype=self.dtype,
            device=self.device,
        )
        table = np.arange(count * MOST_PAGES, dtype=np.int32).reshape(count, MOST_PAGES)
        self.cache.table.assign(tg.tensor(table, device=self.device))
        self.requests = Requests(count, self.device)

    def step(self, model: Decoder, cache: PagedCache, requests: Requests) -> tg.Tensor:
        """One more token of every request."""
        count = self.count
        lengths = cache.lengths + 1
        starts = tg.arange(count + 1, dtype=tg.int32)
        attend = paged(self.config, cache, cache.table, lengths, starts, queries=1)
        logits = model.step(requests.last, cache.lengths, attend, rotated=False)
        found = logits.argmax(-1).to(tg.int32)
        cache.lengths.assign(lengths)
        requests.last.assign(found)
        return found

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Of the step."""
        return self.model, self.cache, self.requests


def host_us(device: str, work: Callable[[], Any], count: int = 40, rounds: int = 7) -> float:
    """Host time of one of `count` calls in a row, nobody waiting in between; the best round."""
    times = []
    for _ in range(rounds):
        _wait(device)
        began = time.perf_counter()
        for _ in range(count):
            work()
        times.append((time.perf_counter() - began) / count)
    _wait(device)
    return 1e6 * min(times)


def _wait(device: str) -> None:
    if device != "cpu":
        synchronize(device)


def measure(setting: Setting) -> dict[str, Any]:
    """Times of all kinds."""
    device = setting.device
    wanted = [setting.jitted(*setting.arguments).numpy().tolist() for _ in range(8)]
    plain = host_us(device, lambda: setting.jitted(*setting.arguments), 10, 5)
    setting.start()
    made = setting.jitted.bind(*setting.arguments)
    found = []
    for _ in range(8):
        made.run()
        found.append(made.read().tolist())
    assert found == wanted, "a Bound gives other tokens than plain calls"

    def waited() -> None:
        made.run()
        made.read()

    lengths = np.full(setting.count, 8, np.int32)
    made.write("cache.lengths", lengths)
    row = {
        "device": device,
        "layers": setting.config.layers,
        "requests": setting.count,
        "state_tensors": len(setting.cache.tensors()) + 1,
        "launches": made.launches,
        "copied": made.copied,
        "plain_us": plain,
        "run_us": host_us(device, made.run),
        "launch_us": host_us(device, made._replay.run),
        "waited_us": host_us(device, waited),
    }
    made.write("cache.lengths", lengths)
    row["write_us"] = host_us(device, lambda: made.write("cache.lengths", lengths))
    row["read_later_us"] = host_us(device, made.read_later)
    setting.made = made
    row["added_us"] = added_us(made)
    return row


def added_us(made: Any) -> float:
    """What `run` does besides the launch itself."""

    class Nothing:
        def run(self) -> None:
            """In place of the launch."""

    kept, made._replay = made._replay, Nothing()
    try:
        return host_us("cpu", made.run, 1000)
    finally:
        made._replay = kept


def main() -> int:
    """Run it; 1 if a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--requests", type=int, default=2)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument(
        "--profile",
        default=None,
        nargs="?",
        const="-",
        help="the table of kernels; a file name keeps the trace",
    )
    parser.add_argument("--out", default="", help="where the JSON goes")
    given = parser.parse_args()
    device = "cuda:0" if given.device == "cuda" else given.device
    with tg.no_grad():
        setting = Setting(device, given.requests, given.layers)
        row = measure(setting)
        word = "host time" if device != "cpu" else "time"
        print(
            f"{device}: {row['state_tensors']} Tensors of state, {row['launches']} launches a"
            f" run; {word} of a run {row['run_us']:.1f} us (the launch alone"
            f" {row['launch_us']:.1f}, all else {row['added_us']:.2f}), run and read"
            f" {row['waited_us']:.1f} us, a plain jitted call {row['plain_us']:.1f} us; write"
            f" {row['write_us']:.1f} us, read_later {row['read_later_us']:.1f} us;"
            f" copied: {', '.join(row['copied']) or 'none'}"
        )
        met = device == "cpu" or row["run_us"] <= HOST_BAR
        if device != "cpu":
            print(f"bar of {HOST_BAR:.0f} us of host time: {'met' if met else 'MISSED'}")
        if given.profile:
            found = setting.made.profile()
            print(found.text(rows=20))
            if given.profile != "-":
                print("trace:", found.save(given.profile))
    if given.out:
        Path(given.out).write_text(json.dumps({"kind": "bound", "rows": [row]}, indent=1) + "\n")
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())

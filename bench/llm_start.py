"""From the start of a process to the first token on a GPU: the Llama-3-8B shape, random weights.

    python bench/llm_start.py            cold (an empty cache folder), then warm, a process each
    python bench/llm_start.py --one      this process alone, with the cache as it is

Told apart: import, opening the device, making weights (which a user would read from a file, and
which does not count), compiling and running the prompt of 1024 tokens, and the second token.
"""

from __future__ import annotations

import time

BEGAN = time.perf_counter()

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from shapes import LLAMA_3_8B  # noqa: E402

BARS = {"cold": 20.0, "warm": 8.0}
PROMPT = 1024


def once(layers: int) -> dict[str, float]:
    """Seconds of each part in this process."""
    import numpy as np

    import tilegrad as tg
    from tilegrad.generate.engine import Engine
    from tilegrad.generate.request import Request
    from tilegrad.models.decoder.config import DecoderConfig
    from tilegrad.models.decoder.model import Decoder
    from tilegrad.runtime.device import device

    times = {"import": time.perf_counter() - BEGAN}
    at = time.perf_counter()
    tg.set_default_device("cuda:0")
    gpu = device("cuda:0")
    gpu.synchronize()
    times["open"] = time.perf_counter() - at
    at = time.perf_counter()
    config = DecoderConfig.from_huggingface({**LLAMA_3_8B, "num_hidden_layers": layers})
    model = Decoder(config, "bfloat16")
    for parameter in model.parameters():
        parameter.realize()
    gpu.synchronize()
    weights = time.perf_counter() - at
    at = time.perf_counter()
    engine = Engine(model, device="cuda:0", requests=1, context=2 * PROMPT)
    tokens = np.random.default_rng(0).integers(0, config.vocabulary, PROMPT).tolist()
    engine.add(Request(0, tokens, max_tokens=4))
    found: list[Any] = []
    while len(found) < 1:
        found += engine.step()
    times["first"] = time.perf_counter() - at
    total = time.perf_counter() - BEGAN - weights
    at = time.perf_counter()
    while len(found) < 2:
        found += engine.step()
    return {**times, "second": time.perf_counter() - at, "weights": weights, "total": total}


def child(layers: int, cache: str) -> dict[str, Any]:
    """The same in a process of its own with a cache folder."""
    environment = {**os.environ, "TILEGRAD_CACHE": cache}
    run = subprocess.run(
        [sys.executable, __file__, "--one", "--layers", str(layers)],
        env=environment,
        capture_output=True,
        text=True,
    )
    if run.returncode:
        sys.exit(run.stderr)
    return dict(json.loads(run.stdout.splitlines()[-1]))


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--one", action="store_true")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(once(options.layers)))
        return
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("cold", "warm"):
            row = rows[name] = child(options.layers, folder)
            met = row["total"] <= BARS[name]
            print(
                f"{name}: {row['total']:.1f} s to the first token (bar {BARS[name]:.0f}): "
                f"{'met' if met else 'MISSED'}; import {row['import']:.1f}, open "
                f"{row['open']:.1f}, compile and prompt {row['first']:.1f}; second token "
                f"{row['second']:.1f}; weights {row['weights']:.1f} s aside",
                flush=True,
            )
    if options.out:
        from measure import facts  # imports much: not before the clock has stopped

        record = facts(device="cuda:0", layers=options.layers, **rows)
        Path(options.out).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

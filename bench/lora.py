"""What adapters cost: a batch of 32 with 8 of rank 16 mixed, against the same batch with none.

    python bench/lora.py [--requests 32] [--adapters 8] [--rank 16] [--targets all] [--rounds 3]
                         [--model smollm2] [--threads N] [--cpu-time] [--out results.json]

Two engines have the same requests, one of them with adapters for every linear layer of a block
(`--targets qv`: of queries and values alone, as many are trained). Their steps take turns, one by
one, so that whatever else runs on the machine meets both alike. A round is a whole batch of answers
on both sides; the median step of each side counts, of the best round. Random adapters cost what
trained ones do. `--cpu-time` counts the process's own time: for machines that others use.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from measure import facts
from verdict import end, verdict

from tilegrad.generate.llm import LLM
from tilegrad.generate.request import Request

BAR = 0.15
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
FEED = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
TARGETS = {"all": (*ATTENTION, *FEED), "attention": ATTENTION, "qv": (ATTENTION[0], ATTENTION[2])}


def write_adapter(folder: Path, config: Any, targets: tuple[str, ...], rank: int, seed: int) -> str:
    """A random adapter of a Llama, as PEFT writes it."""
    from safetensors.numpy import save_file

    width, hidden = config.width, config.hidden
    inner, outer = config.heads * config.head_width, config.key_heads * config.head_width
    sizes = {
        "q_proj": (inner, width),
        "k_proj": (outer, width),
        "v_proj": (outer, width),
        "o_proj": (width, inner),
        "gate_proj": (hidden, width),
        "up_proj": (hidden, width),
        "down_proj": (width, hidden),
    }
    random, tensors = np.random.default_rng(seed), {}
    for layer in range(config.layers):
        for target in targets:
            rows, columns = sizes[target.split(".")[-1]]
            name = f"base_model.model.model.layers.{layer}.{target}"
            for side, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                values = random.standard_normal(shape, np.float32) * 0.02
                tensors[f"{name}.lora_{side}.weight"] = values
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    names = [target.split(".")[-1] for target in targets]
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": names}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return str(folder)


def begin(llm: LLM, names: list[str], prompt: int, tokens: int, seed: int) -> None:
    """Give an engine a whole batch, and let all of it come to decode."""
    draw, engine = np.random.default_rng(seed), llm.engine
    for number in range(engine.requests):
        given = tuple(int(t) for t in draw.integers(0, llm.config.vocabulary, prompt))
        adapter = names[number % len(names)] if names else ""
        engine.add(
            Request((seed, number), given, max_tokens=tokens, adapter=adapter, salt=str(seed))
        )
    while engine.waiting or not all(work.decodes for work in engine.running.values()):
        engine.step()


def round_of(llms: list[LLM], names: list[str], options: Any, seed: int) -> list[float]:
    """The median seconds of a step of each engine, steps taking turns."""
    clock = time.process_time if options.cpu_time else time.perf_counter
    for llm, used in zip(llms, ([], names)):
        begin(llm, used, options.prompt, options.tokens, seed)
    seconds: list[list[float]] = [[], []]
    while all(llm.engine.busy for llm in llms):
        for found, llm in zip(seconds, llms):
            began = clock()
            llm.engine.step()
            found.append(clock() - began)
    for llm in llms:
        while llm.engine.busy:
            llm.engine.step()
    return [median(found) for found in seconds]


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", choices=TARGETS, default="all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default=None)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    opening = {
        "context": options.prompt + options.tokens,
        "requests": options.requests,
        "threads": options.threads,
        "device": options.device,
    }
    plain = LLM(options.model, **opening)
    with tempfile.TemporaryDirectory() as folder:
        names = {
            f"adapter-{i}": write_adapter(
                Path(folder) / str(i), plain.config, TARGETS[options.targets], options.rank, i
            )
            for i in range(options.adapters)
        }
        mixed = LLM(options.model, adapters=names, **opening)
    found = []
    for number in range(options.rounds + 1):  # the first compiles
        seconds = round_of([plain, mixed], list(names), options, number)
        if number:
            found.append(seconds)
            print(
                f"round {number}: {1e3 * seconds[0]:.1f} ms a step without, "
                f"{1e3 * seconds[1]:.1f} ms with, {100 * (seconds[1] / seconds[0] - 1):+.1f}%",
                flush=True,
            )
    best = min(found, key=sum)
    slower = best[1] / best[0] - 1
    met = verdict(slower <= BAR)
    print(f"{100 * slower:.1f}% slower with adapters (bar {100 * BAR:g}%): {met}")
    if options.out:
        record = {
            **facts(),
            "device": str(plain.device),
            "model": options.model,
            "requests": options.requests,
            "adapters": options.adapters,
            "rank": options.rank,
            "targets": options.targets,
            "clock": "process" if options.cpu_time else "wall",
            "threads": options.threads,
            "rounds": [{"without_s": a, "with_s": b} for a, b in found],
            "slower": slower,
            "bar": BAR,
        }
        Path(options.out).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
    end()

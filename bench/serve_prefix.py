"""Time to the first token with a prefix that another request had before: SmolLM2 on a CPU.

    python bench/serve_prefix.py [--rounds 3] [--prefix 2000] [--own 32] [--out results.json]

Each round has a salt of its own, so that its first request finds nothing; the second has the same
prefix and other tokens after it. A request before the rounds compiles. The best of the rounds
counts, of both sides: the machine may have others on it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from measure import facts
from verdict import end, verdict

from tilegrad.generate.llm import LLM
from tilegrad.generate.request import Request

BAR = 5.0


def first_token(llm: LLM, tokens: list[int], salt: str) -> tuple[float, int]:
    """Seconds until the first token, and how many tokens of the prompt were there before."""
    engine = llm.engine
    began = time.perf_counter()
    engine.add(Request((salt, time.monotonic_ns()), tuple(tokens), max_tokens=2, salt=salt))
    while not (made := engine.step()):
        pass
    seconds = time.perf_counter() - began
    while engine.busy:
        engine.step()
    return seconds, made[0].cached


def measured(llm: LLM, prefix: int, own: int, rounds: int) -> list[dict[str, Any]]:
    """Both times of each round."""
    draw = np.random.default_rng(0)
    words = llm.config.vocabulary

    def some(count: int) -> list[int]:
        return [int(t) for t in draw.integers(0, words, count)]

    shared = some(prefix)
    for _ in range(2):  # the second has the prefix: both kinds of steps are compiled
        first_token(llm, shared + some(own), "compile")
    found = []
    for number in range(rounds):
        cold, none = first_token(llm, shared + some(own), f"round {number}")
        warm, cached = first_token(llm, shared + some(own), f"round {number}")
        found.append({"cold": cold, "warm": warm, "cached": cached})
        print(
            f"round {number}: {cold:.2f} s without ({none} tokens known), "
            f"{warm:.2f} s with {cached} of {prefix + own} tokens known",
            flush=True,
        )
    return found


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefix", type=int, default=2000)
    parser.add_argument("--own", type=int, default=32)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    context = options.prefix + options.own + 64
    llm = LLM(options.model, context=context, requests=2)
    rounds = measured(llm, options.prefix, options.own, options.rounds)
    cold, warm = (min(r[name] for r in rounds) for name in ("cold", "warm"))
    met = verdict(cold / warm >= BAR)
    print(f"first token: {cold:.2f} s and {warm:.2f} s, {cold / warm:.1f}x (bar {BAR:g}x): {met}")
    if options.out:
        record = {
            **facts(),
            "model": options.model,
            "prefix": options.prefix,
            "own": options.own,
            "load": os.getloadavg()[0],
            "rounds": rounds,
            "cold": cold,
            "warm": warm,
            "ratio": cold / warm,
        }
        Path(options.out).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
    end()

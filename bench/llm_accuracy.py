"""Is a model right? Perplexity and logits of `LLM` beside the same weights in float64 and float32.

    python bench/llm_accuracy.py                    smollm2, writes bench/results/llm-accuracy-...
    python bench/llm_accuracy.py MODEL.gguf         another plain Llama model
    python bench/llm_accuracy.py --quick            few tokens and no file: to see that it runs
    python bench/llm_accuracy.py --device cuda      on a GPU
    python bench/llm_accuracy.py --freeze FILE      keep what float64 says of a few tokens

The text is the Shakespeare that training ships; the judge is bench/llama_numpy.py, which shares
nothing with the compiler. Four things are held against bars:

- perplexity by `LLM.score` within 0.5% of float64;
- logits of a prompt in chunks, as prefill computes them, and of one token after another, as decode
  does: the five largest of float32 within 0.02, the largest the same wherever float32 has it more
  than 0.04 above the next;
- what `LLM.generate` picks greedily, prompt and all: never more than 0.04 below the largest.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import measure
import numpy as np
from llama_numpy import Llama, log_softmax

import tilegrad
from tilegrad import nn
from tilegrad.exchange.fetch import find_model
from tilegrad.exchange.gguf import read_gguf
from tilegrad.ir.symbol import symbol
from tilegrad.models.decoder.model import paged
from tilegrad.models.tokens.tokenizer import Tokenizer

TEXT = Path(tilegrad.__file__).parent / "train" / "text" / "shakespeare.txt"
PERPLEXITY_BAR, LOGIT_BAR, GAP_BAR = 0.005, 0.02, 0.04
PAGE, CHUNK, TOP = 64, 512, 5
Array = np.ndarray[Any, Any]


# ---- the judge --------------------------------------------------------------------------------


class Judged:
    """What float32 says of every position: its five largest, and how far the first is above."""

    def __init__(self, path: Path, tokens: list[int]) -> None:
        self.ids, self.values = [], []
        for part in Llama(path, np.float32).logits_in_parts(tokens):
            ids = np.argpartition(part, -TOP, -1)[:, -TOP:]
            values = np.take_along_axis(part, ids, -1)
            order = np.argsort(-values, -1)
            self.ids.append(np.take_along_axis(ids, order, -1))
            self.values.append(np.take_along_axis(values, order, -1))
        self.ids, self.values = np.concatenate(self.ids), np.concatenate(self.values)

    def compare(self, first: int, logits: Array) -> dict[str, Array]:
        """Errors of our logits (rows, V) from position `first` on."""
        rows = slice(first, first + len(logits))
        found = np.take_along_axis(logits, self.ids[rows], -1)
        gap = self.values[rows, 0] - self.values[rows, 1]
        return {
            "error": np.abs(found - self.values[rows]).max(-1),
            "gap": gap,
            "wrong": (logits.argmax(-1) != self.ids[rows, 0]) & (gap > GAP_BAR),
            "finite": np.isfinite(logits).all(-1),
        }


def exact_logprobs(path: Path, tokens: list[int]) -> Array:
    """The logprob of each token but the first, in float64."""
    found, first = [], 0
    for part in Llama(path, np.float64).logits_in_parts(tokens[:-1]):
        following = tokens[first + 1 : first + 1 + len(part)]
        found.append(log_softmax(part)[np.arange(len(part)), following])
        first += len(part)
    return np.concatenate(found)


def freeze(path: Path, target: Path, count: int = 400) -> None:
    """Keep tokens of the text and their exact logprobs, for tests that are to be quick."""
    tokens = Tokenizer.from_gguf(read_gguf(path).metadata).encode(TEXT.read_text()[:8000])[:count]
    found = [round(float(x), 7) for x in exact_logprobs(path, tokens)]
    target.write_text(json.dumps({"tokens": tokens, "logprobs": found}) + "\n")


# ---- ours -------------------------------------------------------------------------------------


def advance(
    model: Any, cache: Any, given: Any, positions: Any, table: Any, lengths: Any, starts: Any
) -> Any:
    """Tokens of one request through the model as the engine's step does it: all their logits."""
    attend = paged(model.config, cache, table, lengths, starts)
    return model.step(given, positions, attend, rotated=False)


class Forced:
    """The model of an LLM over a cache of its own, fed tokens that are given."""

    def __init__(self, llm: Any, most: int) -> None:
        config, pages = llm.config, -(-most // PAGE)
        self.model, self.device, self.done = llm.model, llm.device, 0
        self.cache = nn.PagedCache(
            config.layers,
            pages,
            PAGE,
            config.key_heads,
            config.head_width,
            requests=1,
            most_pages=pages,
            dtype=llm.engine.cache.keys[0].dtype,
            device=llm.device,
        )
        self.table = self._whole(np.arange(pages)[None])
        tokens = symbol("tokens", 1, CHUNK)
        self.several = tilegrad.jit(
            advance, dynamic={"given": {0: tokens}, "positions": {0: tokens}}
        )
        self.one = tilegrad.jit(advance)

    def _whole(self, values: Any) -> Any:
        return tilegrad.tensor(np.asarray(values, np.int32), device=self.device)

    def feed(self, tokens: list[int]) -> Array:
        """Logits (tokens, V) of the next tokens, float32."""
        step = self.one if len(tokens) == 1 else self.several
        places = np.arange(self.done, self.done + len(tokens))
        self.done += len(tokens)
        with tilegrad.no_grad():
            found = step(
                self.model,
                self.cache,
                self._whole(tokens),
                self._whole(places),
                self.table,
                self._whole([self.done]),
                self._whole([0, len(tokens)]),
            )
        return np.asarray(found.float().numpy(), np.float32)


def forced(llm: Any, judged: Judged, tokens: list[int], prefix: int, step: int) -> dict[str, Any]:
    """Compare logits over `tokens`, fed `step` at a time behind a prefix that is fed in chunks."""
    feed, parts = Forced(llm, len(tokens)), []
    for first in range(0, prefix, CHUNK):
        feed.feed(tokens[first : min(first + CHUNK, prefix)])
    start = time.perf_counter()
    for first in range(prefix, len(tokens), step):
        logits = feed.feed(tokens[first : first + step])
        parts.append(judged.compare(first, logits))
    joined = {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
    error, decided = joined["error"], joined["gap"] > GAP_BAR
    return {
        "tokens": len(error),
        "after": prefix,
        "fed": step,
        "worst": float(error.max()),
        "mean": float(error.mean()),
        "over": int((error > LOGIT_BAR).sum()),
        "decided": int(decided.sum()),
        "wrong": int(joined["wrong"].sum()),
        "bar": LOGIT_BAR,
        "seconds": time.perf_counter() - start,
        "met": bool(
            error.max() <= LOGIT_BAR and not joined["wrong"].any() and joined["finite"].all()
        ),
    }


def perplexity(llm: Any, path: Path, windows: list[list[int]]) -> dict[str, Any]:
    """Perplexity of the windows, ours and exact."""
    start = time.perf_counter()
    ours = np.concatenate([llm.score(w) for w in windows]).astype(np.float64)
    seconds = time.perf_counter() - start
    exact = np.concatenate([exact_logprobs(path, w) for w in windows])
    found, wanted = math.exp(-ours.mean()), math.exp(-exact.mean())
    return {
        "tokens": len(exact),
        "ours": found,
        "float64": wanted,
        "ratio": found / wanted,
        "worst_logprob": float(np.abs(ours - exact).max()),
        "bar": PERPLEXITY_BAR,
        "seconds": seconds,
        "met": abs(found / wanted - 1) <= PERPLEXITY_BAR,
    }


def greedy(llm: Any, path: Path, prompt: list[int], count: int) -> dict[str, Any]:
    """How far below float32's largest what the engine picked is, token by token."""
    answer = llm.generate(prompt, max_tokens=count, temperature=0.0, ignore_end=True)
    made = list(answer.tokens)
    logits = Llama(path, np.float32).logits([*prompt, *made])[len(prompt) - 1 : -1]
    below = logits.max(-1) - logits[np.arange(len(made)), made]
    return {
        "tokens": len(made),
        "prompt": len(prompt),
        "worst": float(below.max()),
        "differ": int((below > 0).sum()),
        "bar": GAP_BAR,
        "met": len(made) == count and bool(below.max() <= GAP_BAR),
    }


# ---- running ----------------------------------------------------------------------------------


def main() -> None:
    """Measure, print, write; exits with 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--freeze", type=Path, help="write logprobs in float64 and end")
    parser.add_argument("--quick", action="store_true", help="few tokens, no file")
    told = parser.parse_args()
    count, window, singly, made = (200, 200, 40, 20) if told.quick else (2048, 2048, 320, 300)
    path = find_model(told.model)
    if told.freeze:
        freeze(path, told.freeze)
        return
    llm = tilegrad.LLM(path, device=told.device, dtype=told.dtype)
    ids = llm.tokenizer.encode(TEXT.read_text()[: 16 * (count + 2 * window)])
    tokens, prefix = ids[:count], count - singly
    judged = Judged(path, tokens)
    results: dict[str, Any] = {}

    def say(name: str, row: dict[str, Any]) -> None:
        results[name] = row
        shown = ", ".join(
            f"{k} {v:.6g}" if isinstance(v, float) else f"{k} {v}"
            for k, v in row.items()
            if k not in ("met", "seconds")
        )
        print(f"{name:12} {'met' if row['met'] else 'MISSED'}: {shown}", flush=True)

    say("prefill", forced(llm, judged, tokens, 0, CHUNK))
    say("decode", forced(llm, judged, tokens, prefix, 1))
    say("first tokens", forced(llm, judged, tokens[:singly], 0, 1))
    say("perplexity", perplexity(llm, path, [ids[n * window : (n + 1) * window] for n in (0, 1)]))
    say("greedy", greedy(llm, path, ids[:64], made))
    if not told.quick:
        record = measure.facts(
            kind="llm-accuracy",
            model=path.name,
            device=llm.device,
            dtype=str(llm.dtype),
            results=results,
        )
        print(f"written: {measure.save('llm-accuracy', record)}")
    sys.exit(0 if all(row["met"] for row in results.values()) else 1)


if __name__ == "__main__":
    main()

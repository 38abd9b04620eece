"""What keys and values in 8 bits cost: perplexity of a text, beside that of a plain cache.

    python bench/kv_cache_accuracy.py                        smollm2, this repository's own pages
    python bench/kv_cache_accuracy.py --model FOLDER --text FILE --tokens 4096 --device cuda

A text is scored in windows of the context, each from its start, with keys and values in the model's
dtype, in fp8 (scales 1.0; calibrated for each head) and in int8 (calibrated). Printed are the mean
logprob of a token, the perplexity and its ratio, and the largest difference of a logprob.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from tilegrad.generate import LLM

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("docs/map.md", "docs/attention.md", "docs/llm.md", "CONTRIBUTING.md")
WAYS: dict[str, dict[str, Any]] = {
    "auto": {},
    "fp8, scales 1.0": {"kv_cache_dtype": "fp8"},
    "fp8, calibrated": {"kv_cache_dtype": "fp8", "kv_cache_scales": "calibrated"},
    "int8, calibrated": {"kv_cache_dtype": "int8"},
}


def scored(given: argparse.Namespace, how: dict[str, Any], text: str) -> np.ndarray[Any, Any]:
    """Logprobs of the text's tokens."""
    llm = LLM(given.model, device=given.device, context=given.window, requests=1, **how)
    ids = llm.tokenizer.encode(text)[: given.tokens]
    parts = [ids[i : i + given.window] for i in range(0, len(ids) - 1, given.window)]
    return np.concatenate([llm.score(part) for part in parts if len(part) > 1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", default="", help="a file; else pages of this repository")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--device", default=None)
    parser.add_argument("--out", default="", help="where the JSON goes")
    given = parser.parse_args()
    files = [Path(given.text)] if given.text else [ROOT / page for page in PAGES]
    text = "\n\n".join(file.read_text(encoding="utf-8") for file in files)
    plain: np.ndarray[Any, Any] | None = None
    rows = []
    for name, how in WAYS.items():
        found = scored(given, how, text)
        plain = found if plain is None else plain
        mean, before = float(found.mean()), float(plain.mean())
        row = {
            "kv_cache": name,
            "tokens": len(found),
            "mean_logprob": mean,
            "perplexity": math.exp(-mean),
            "ratio": math.exp(before - mean),
            "largest": float(np.abs(found - plain).max()),
        }
        rows.append(row)
        print(
            f"{name:18} {len(found)} tokens, perplexity {row['perplexity']:.4f} "
            f"({row['ratio']:.5f} of plain), a logprob differs by {row['largest']:.3f} at most",
            flush=True,
        )
    if given.out:
        Path(given.out).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

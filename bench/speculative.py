"""Guesses looked up in the text so far: tokens a second beside plain decoding, SmolLM2, batch 1.

    python bench/speculative.py                 bar: 1.6 times as many tokens a second
    python bench/speculative.py --guesses 7     other numbers of guesses a step
    python bench/speculative.py --rounds 8 --out results.json

Two tasks over texts of the repository that repeat themselves: a table of words is copied on
(editing), and a page is said again in a chat (summarising, as far as a model this small can). Both
models decode in turns, and the best round of each counts, because the machine may have other work.
The answers must be the same.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from measure import facts

from tilegrad.generate.llm import LLM

ROOT = Path(__file__).resolve().parents[1]
BAR = 1.6
CONTEXT = 1024


def prompts(llm: LLM) -> dict[str, list[int]]:
    """Prompts by the names of their tasks."""
    lines = (ROOT / "docs" / "vocabulary.md").read_text().splitlines()
    table = "\n".join(line for line in lines if line.startswith("| "))[:1400]
    copied = table[: table.rindex("\n") + 1]
    again = "\n".join(copied.splitlines()[:4]) + "\n"
    page = (ROOT / "docs" / "decisions" / "0003-low-floats-in-float32.md").read_text()[:1200]
    return {
        "edit a table": llm.tokenizer.encode(f"{copied}\nThe same table once more:\n{again}"),
        "repeat a page": llm.chat_ids(f"Repeat this text word for word.\n\n{page}"),
    }


def rate(llm: LLM, prompt: list[int], tokens: int) -> tuple[float, Any]:
    """Tokens a second after the first, and the tokens."""
    answer = llm.generate(prompt, max_tokens=tokens, ignore_end=True)
    return answer.timing.rate, answer.tokens


def compared(plain: LLM, fast: LLM, prompt: list[int], rounds: int, tokens: int) -> dict[str, Any]:
    """One task by both, in turns."""
    speculation = fast.engine.speculation
    assert speculation is not None
    guessed, true = speculation.guessed, speculation.true
    rates: dict[str, list[float]] = {"plain": [], "ngram": []}
    made: dict[str, Any] = {}
    for number in range(rounds + 1):  # the first compiles, and leaves the prompt's pages
        for side, llm in (("plain", plain), ("ngram", fast)):
            found, made[side] = rate(llm, prompt, tokens)
            if number:
                rates[side].append(found)
    best = {side: max(found) for side, found in rates.items()}
    return {
        "prompt": len(prompt),
        "rates": rates,
        **best,
        "ratio": best["ngram"] / best["plain"],
        "true": (speculation.true - true) / max(1, speculation.guessed - guessed),
        "same": made["plain"] == made["ngram"],
    }


def main() -> int:
    """Measure, and say whether the bar is met."""
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    options.add_argument("--guesses", type=int, default=3)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--tokens", type=int, default=96)
    options.add_argument("--out", default="")
    given = options.parse_args()
    how: dict[str, Any] = {"requests": 1, "context": CONTEXT}
    plain = LLM("smollm2", **how)
    fast = LLM("smollm2", **how, speculate="ngram", guesses=given.guesses)
    tasks: dict[str, Any] = {}
    for name, prompt in prompts(plain).items():
        found = tasks[name] = compared(plain, fast, prompt, given.rounds, given.tokens)
        same = "same answer" if found["same"] else "ANSWERS DIFFER"
        print(
            f"{name}: {found['prompt']} tokens of prompt, plain {found['plain']:.1f} tok/s, "
            f"ngram {found['ngram']:.1f} tok/s, {found['ratio']:.2f}x, "
            f"{found['true']:.0%} of guesses true, {same}",
            flush=True,
        )
    met = all(found["same"] and found["ratio"] >= BAR for found in tasks.values())
    print(f"bar {BAR}x: {'met' if met else 'NOT met'}")
    if given.out:
        record = {
            **facts(),
            "model": "smollm2",
            "guesses": given.guesses,
            "tokens": given.tokens,
            "load": os.getloadavg()[0],
            "bar": BAR,
            "met": met,
            "tasks": tasks,
        }
        Path(given.out).write_text(json.dumps(record, indent=1) + "\n")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())

"""Guesses looked up in the text so far: tokens a second beside plain decoding, SmolLM2, batch 1.

    python bench/speculative.py                 bar: 1.6 times as many tokens a second
    python bench/speculative.py --guesses 7     other numbers of guesses a step
    python bench/speculative.py --rounds 8

Two tasks over texts of the repository that repeat themselves: a table of words is copied on
(editing), and a page is said again in a chat (summarising, as far as a model this small can). Both
models decode in turns, and the best round of each counts, because the machine may have other work.
The answers must be the same.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

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


def main() -> int:
    """Measure, and say whether the bar is met."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--guesses", type=int, default=3)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--tokens", type=int, default=96)
    given = options.parse_args()
    how: dict[str, Any] = {"requests": 1, "context": CONTEXT}
    plain = LLM("smollm2", **how)
    fast = LLM("smollm2", **how, speculate="ngram", guesses=given.guesses)
    met = True
    for name, prompt in prompts(plain).items():
        best: dict[str, float] = {"plain": 0.0, "ngram": 0.0}
        made: dict[str, Any] = {}
        speculation = fast.engine.speculation
        assert speculation is not None
        guessed, true = speculation.guessed, speculation.true
        for _ in range(given.rounds):
            for side, llm in (("plain", plain), ("ngram", fast)):
                found, made[side] = rate(llm, prompt, given.tokens)
                best[side] = max(best[side], found)
        ratio = best["ngram"] / best["plain"]
        share = (speculation.true - true) / max(1, speculation.guessed - guessed)
        same = "same answer" if made["plain"] == made["ngram"] else "ANSWERS DIFFER"
        met = met and ratio >= BAR and made["plain"] == made["ngram"]
        print(
            f"{name}: {len(prompt)} tokens of prompt, plain {best['plain']:.1f} tok/s, "
            f"ngram {best['ngram']:.1f} tok/s, {ratio:.2f}x, {share:.0%} of guesses true, {same}"
        )
    print(f"bar {BAR}x: {'met' if met else 'NOT met'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())

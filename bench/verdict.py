"""Words for what a bench found, and the status it ends with: 1 after a miss or a wrong result."""

from __future__ import annotations

import sys

failures: list[str] = []


def verdict(met: bool) -> str:
    """Whether a bar is met, as a word."""
    return _word(met, "met", "MISSED")


def wrong(right: bool) -> str:
    """A word if a result is not right."""
    return _word(right, "", " WRONG")


def _word(good: bool, word: str, bad: str) -> str:
    if not good:
        failures.append(bad.strip())
    return word if good else bad


def end() -> None:
    """End the process."""
    sys.exit(1 if failures else 0)

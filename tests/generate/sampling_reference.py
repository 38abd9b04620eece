"""Sampling in NumPy and float64, written from the text of the semantics and nothing else.

Invariant: no code of the package is used; rows are Python loops.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np


def processed(
    logits: np.ndarray,
    *,
    bias: Mapping[int, float] | None = None,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
) -> np.ndarray:
    """Logits with the bias added and the penalties taken off."""
    x = np.asarray(logits, np.float64).copy()
    for token, value in (bias or {}).items():
        x[token] += value
    for token in set(prompt) | set(output):
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    for token, count in Counter(output).items():
        x[token] -= frequency * count + presence
    return x


def cut(p: np.ndarray, top_k: int, top_p: float, min_p: float) -> tuple[np.ndarray, float]:
    """(which of the probabilities stay, how near the sum was to where another set would stay)."""
    least = min_p * max(p)
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    order = [i for i in order if p[i] > 0 and p[i] >= least]
    if top_k > 0:
        order = order[:top_k]
    total, wanted, near = 0.0, top_p * math.fsum(p[i] for i in order), math.inf
    kept = np.zeros(len(p), bool)
    for i in order:
        kept[i] = True
        total += p[i]
        if top_p < 1:
            near = min(near, abs(total - wanted) / max(wanted, 1e-300))
            if total >= wanted:
                break
    return kept, near


def distribution(
    x: np.ndarray, *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """The probability of each token, from processed logits."""
    if temperature < 1e-5:
        return (np.arange(len(x)) == int(np.argmax(x))).astype(np.float64)
    p = np.exp((x - x.max()) / temperature)
    p = np.where(cut(p / p.sum(), top_k, top_p, min_p)[0], p, 0.0)
    return p / p.sum()


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Logprobs of a row of logits."""
    x = np.asarray(x, np.float64)
    highest = x.max()
    return x - highest - math.log(np.exp(x - highest).sum())


__all__ = ["cut", "distribution", "log_softmax", "processed"]

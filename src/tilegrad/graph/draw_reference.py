"""What `draw`, `top_k` and `add_listed` mean, in NumPy: the judge of their kernels.

Tokens of a row are in order of probability, then of place. min-p keeps those whose probability is
at least so much and not 0, top-k the first of them (0: all; below: none), top-p the fewest first
ones whose sum is at least that share of what is left. Then a race: token i with probability p(i)
arrives after an exponential time of that rate; the first to arrive is drawn, the lower id of
equals. Its uniform number is a hash of the row's seed, its position and i. A row without a kept
token gives 0.
Invariant: sums are in float64, so a set may differ from a kernel's where a sum is within rounding
of its limit; the hash and the race are in the integers and floats that kernels compute in.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Ndarray = np.ndarray[Any, Any]
MULTIPLIERS = (0x85EBCA6B, 0xC2B2AE35)  # of murmur3's last step
GOLDEN, SILVER = 0x9E3779B9, 0xB5297A4D
WORD = np.uint64(0xFFFFFFFF)


def _mixed(x: Any) -> Any:
    """32 bits mixed, in uint64."""
    x = ((x ^ (x >> np.uint64(16))) * np.uint64(MULTIPLIERS[0])) & WORD
    x = ((x ^ (x >> np.uint64(13))) * np.uint64(MULTIPLIERS[1])) & WORD
    return x ^ (x >> np.uint64(16))


def uniform(seed: Ndarray, position: int, tokens: Ndarray) -> Ndarray:
    """The float32 numbers within (0, 1) of some tokens."""
    low, high, number = (np.uint64(int(n) & 0xFFFFFFFF) for n in (*seed, position))
    golden, silver = np.uint64(GOLDEN), np.uint64(SILVER)
    first = _mixed((_mixed((low + number * golden) & WORD) + high) & WORD)
    second = _mixed(_mixed((high + number * silver + golden) & WORD) ^ ((low + silver) & WORD))
    drawn = _mixed(_mixed((tokens.astype(np.uint64) * golden + first) & WORD) ^ second)
    unit = drawn.astype(np.uint32).astype(np.float32) * np.float32(2.0**-32)
    return np.minimum(unit + np.float32(2.0**-33), np.float32(1.0 - 2.0**-24))


def kept(p: Ndarray, k: int, top_p: float, min_p: float) -> Ndarray:
    """The tokens of a row that stay, the likeliest first."""
    order = np.argsort(-p.astype(np.float64), kind="stable")
    order = order[(p[order] > 0) & (p[order] >= min_p)]
    if k:
        order = order[: max(k, 0)]
    if top_p >= 1.0 or not order.size:
        return order
    sums = np.cumsum(p[order].astype(np.float64))
    return order[: 1 + int(np.searchsorted(sums, top_p * sums[-1]))]


def draw(inputs: list[Any], attrs: dict[str, Any]) -> Ndarray:
    """A token of each row."""
    p, floats, limits, seeds, slots, positions = inputs
    found = np.zeros(len(p), np.int32)
    for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist())):
        settings = floats[slot]
        tokens = kept(
            p[row],
            int(limits[slot]),
            float(settings[attrs["top_p"]]),
            float(settings[attrs["min_p"]]),
        )
        if tokens.size:
            tokens = np.sort(tokens)
            early = p[row, tokens] / -np.log1p(-uniform(seeds[slot], position, tokens))
            found[row] = tokens[int(np.argmax(early))]
    return found


def top_k(inputs: list[Any], attrs: dict[str, Any]) -> Ndarray:
    """Places of the largest of each row; the last place stands for those that are NaN."""
    (x,), count = inputs, attrs["count"]
    found = np.full((len(x), count), x.shape[1] - 1, np.int32)
    for row, values in enumerate(x):
        order = np.argsort(-values.astype(np.float64), kind="stable")
        order = order[~np.isnan(values[order])][:count]
        found[row, : len(order)] = order
    return found


def add_listed(inputs: list[Any], attrs: dict[str, Any]) -> Ndarray:
    """x with the values of each row's slot added at their ids."""
    x, counts, ids, values, slots = inputs
    found = x.copy()
    for row, slot in enumerate(slots.tolist()):
        for number in range(int(counts[slot])):
            if 0 <= ids[slot, number] < x.shape[1]:
                found[row, ids[slot, number]] += values[slot, number]
    return found

"""Sizes of steps that are compiled and bound: a step runs in the next larger one, the rest pads.

Few requests are told apart one by one, many by tens, so that little is computed in vain and few
sizes are made. What pads is not free (docs/decisions/0037 has what it costs).
Invariant: the sizes rise, and the last is the most.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

END = 1 << 62
DECODE = ((8, 1), (64, 8), (128, 16), (192, 32), (END, 64))  # up to so many rows, in such steps
PROMPTS = ((8, 1), (128, 8), (512, 32), (2048, 64), (END, 512))  # tokens of a step with prompts
ROWS = (8, 64)  # of a step with prompts: rows cost less there, their logits alone


def sizes_up_to(most: int, parts: Sequence[tuple[int, int]]) -> list[int]:
    """Sizes from 1 to the most."""
    found = [0]
    for end, by in parts:
        while found[-1] < min(end, most):
            found.append(min(found[-1] + by, end, most))
    return found[1:]


def decode_sizes(requests: int) -> list[int]:
    """Rows of decode steps."""
    return sizes_up_to(requests, DECODE)


def verify_sizes(requests: int, guesses: int) -> list[int]:
    """Rows of steps that verify guesses: of two requests or of one with a guess, to all."""
    most, found = requests + guesses, [2]
    while found[-1] < most:
        found.append(min(2 * found[-1], most))
    return found


def prompt_sizes(chunk: int, requests: int) -> list[tuple[int, int]]:
    """(rows, tokens) of steps with prompts; one has no more rows than tokens."""
    rows = [r for r in ROWS if r < requests] + [requests]
    return [
        (row, tokens)
        for i, row in enumerate(rows)
        for tokens in sizes_up_to(chunk, PROMPTS)
        if not i or tokens > rows[i - 1]
    ]


def by_rows(sizes: Sequence[tuple[int, int]]) -> dict[int, list[int]]:
    """The sizes of tokens for each number of rows; both rise."""
    return {row: sorted(t for r, t in sizes if r == row) for row in sorted({r for r, _ in sizes})}


def powers_up_to(most: int) -> list[int]:
    """Powers of two below the most, and the most: for steps that are rarely needed."""
    return [1 << i for i in range((most - 1).bit_length())] + [most]


def rare_prompt_sizes(chunk: int, requests: int) -> list[tuple[int, int]]:
    """The same for steps with prompts: of all rows."""
    return [(requests, tokens) for tokens in powers_up_to(chunk) if tokens >= min(8, chunk)]


def next_size(sizes: Sequence[int], wanted: int) -> int:
    """The smallest of sizes that holds what is wanted."""
    return sizes[bisect_left(sizes, wanted)]


def next_power(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()


__all__ = [
    "by_rows",
    "decode_sizes",
    "next_power",
    "next_size",
    "powers_up_to",
    "prompt_sizes",
    "rare_prompt_sizes",
    "sizes_up_to",
    "verify_sizes",
]

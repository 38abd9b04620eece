"""Rows of quantised weights made from random bytes, and how far a product of them may be off."""

from __future__ import annotations

import numpy as np

from tilegrad.core.dtype import float16
from tilegrad.core.format import Format

STEP = 32


def random_rows(form: Format, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Bytes (rows, row bytes): any codes and small scales, and tame outer scales."""
    draw = np.random.default_rng([seed, rows, columns])
    raw = draw.integers(0, 256, (rows, form.row_bytes(columns)), dtype=np.uint8)
    blocks = raw.reshape(rows, -1, form.block_bytes)
    for field in form.fields:
        if field.name == "zero":
            whole = draw.integers(0, 17, blocks.shape[:2]).astype(np.float16)
            blocks[..., field.offset : field.offset + 2] = whole[..., None].view(np.uint8)
        elif field.dtype is float16:
            values = draw.standard_normal(blocks.shape[:2]) * 0.02
            bytes_ = values.astype(np.float16)[..., None].view(np.uint8)
            blocks[..., field.offset : field.offset + 2] = bytes_
        elif field.name == "power":
            blocks[..., field.offset] = draw.integers(112, 126, blocks.shape[:2])
    return raw


def decode_bound(x: np.ndarray, w: np.ndarray, limit: int = 32639) -> np.ndarray:
    """What rounding tokens to 1/limit of the largest of a step may do, and float32 sums."""
    steps = np.abs(x).reshape(len(x), -1, STEP)
    largest = np.broadcast_to(steps.max(-1, keepdims=True), steps.shape).reshape(x.shape)
    return (largest / (2 * limit) * 1.001) @ np.abs(w).T + rounding(x, w)


def prefill_bound(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Products of high and low parts leave out less than 3 * 2**-17 of each."""
    return 3 * 2.0**-17 * (np.abs(x) @ np.abs(w).T) + rounding(x, w)


def rounding(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Sums in float32: what they may be off. A matrix unit takes what is below the least normal
    number (1.2e-38) for 0: parts of tokens, of weights and products."""
    lost = 1.2e-38 * (1 + np.abs(w).max() + np.abs(x).max()) * x.shape[1]
    return 2.0**-22 * np.sqrt(x.shape[1]) * (np.abs(x) @ np.abs(w).T) + lost

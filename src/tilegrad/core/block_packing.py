"""Packing of the block formats of llama.cpp: values (blocks, elements) as the Fields of each block.

Formats of 32 elements are packed as the `gguf` package packs them, bit for bit. Those of 256 have
no one way to be packed: scales of sub-blocks are found by least squares over a few candidates, then
rounded to whole numbers of a scale of the block, then codes are the nearest.
Invariant: whatever is packed unpacks by the Format's own rules; nothing here knows a Format.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
TRIED = np.linspace(0.8, 1.1, 13, dtype=np.float32)  # of the scale that just fits
BLOCKS_AT_ONCE = 4096  # blocks that are compared with all values of a table at a time


def inverse(scale: Array) -> Array:
    """1 / scale, 0 where that is no number."""
    found = np.float32(1) / scale
    return np.where(np.isfinite(found), found, np.float32(0))


def folded(codes: Array, bits: int, run: int) -> Array:
    """Codes (blocks, n) as bytes: those of a run lie in one another's higher bits."""
    count = 8 // bits
    cut = codes.astype(np.uint8).reshape(len(codes), -1, count, run)
    found = np.zeros((len(codes), cut.shape[1], run), np.uint8)
    for place in range(count):
        found |= (cut[:, :, place] & np.uint8((1 << bits) - 1)) << np.uint8(bits * place)
    return found.reshape(len(codes), -1)


def _signed(blocks: Array, half: int) -> tuple[Array, Array]:
    """The scale that maps the largest to -half, and codes from 0."""
    largest = np.abs(blocks).argmax(axis=-1, keepdims=True)
    scale = np.take_along_axis(blocks, largest, axis=-1) / np.float32(-half)
    codes = np.trunc(blocks * inverse(scale) + np.float32(half + 0.5))
    return scale, np.clip(codes, 0, 2 * half - 1).astype(np.uint8)


def _spanned(blocks: Array, most: int) -> tuple[Array, Array, Array]:
    """Scale and minimum from the least to the greatest, and codes."""
    minimum = blocks.min(axis=-1, keepdims=True)
    scale = (blocks.max(axis=-1, keepdims=True) - minimum) / np.float32(most)
    codes = np.trunc((blocks - minimum) * inverse(scale) + np.float32(0.5))
    return scale, minimum, np.clip(codes, 0, most).astype(np.uint8)


def pack_q4_0(blocks: Array) -> dict[str, Array]:
    """d and nibbles."""
    scale, codes = _signed(blocks, 8)
    return {"scale": scale, "nibbles": folded(codes, 4, 16)}


def pack_q4_1(blocks: Array) -> dict[str, Array]:
    """d, m and nibbles."""
    scale, minimum, codes = _spanned(blocks, 15)
    return {"scale": scale, "minimum": minimum, "nibbles": folded(codes, 4, 16)}


def pack_q4_z(blocks: Array) -> dict[str, Array]:
    """d, z and nibbles: 0 is a value of its own."""
    low = np.minimum(blocks.min(axis=-1, keepdims=True), 0)
    high = np.maximum(blocks.max(axis=-1, keepdims=True), 0)
    scale = ((high - low) / np.float32(15)).astype(np.float16).astype(np.float32)
    zero = np.rint(-low * inverse(scale)).clip(0, 15)
    codes = (np.rint(blocks * inverse(scale)) + zero).clip(0, 15)
    return {"scale": scale, "zero": zero, "nibbles": folded(codes.astype(np.uint8), 4, 16)}


def pack_q5_0(blocks: Array) -> dict[str, Array]:
    """d, fifth bits and nibbles."""
    scale, codes = _signed(blocks, 16)
    return {"scale": scale, "fifth": _bits(codes >> 4), "nibbles": folded(codes, 4, 16)}


def pack_q5_1(blocks: Array) -> dict[str, Array]:
    """d, m, fifth bits and nibbles."""
    scale, minimum, codes = _spanned(blocks, 31)
    found = {"scale": scale, "minimum": minimum, "fifth": _bits(codes >> 4)}
    return {**found, "nibbles": folded(codes, 4, 16)}


def _bits(ones: Array) -> Array:
    return np.packbits(ones, axis=-1, bitorder="little")


def pack_q8_0(blocks: Array) -> dict[str, Array]:
    """d and codes; halves are rounded away from zero."""
    scale = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
    codes = blocks * inverse(scale)
    size = np.floor(np.abs(codes))
    size = size + np.floor(2 * (np.abs(codes) - size))
    return {"scale": scale, "codes": np.copysign(size, codes)}


E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def pack_mxfp4(blocks: Array) -> dict[str, Array]:
    """The power of two that fits the largest, and the nearest codes, the first of equals."""
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    power = np.where(largest > 0, np.floor(np.log2(largest)) - 2 + 127, 0).astype(np.uint8)
    wide = power.astype(np.uint32)
    half = np.where(wide < 2, np.uint32(0x00200000) << wide, (wide - 1) << np.uint32(23))
    scale = half.astype(np.uint32).view(np.float32)
    codes = np.empty(blocks.shape, np.uint8)
    for first in range(0, len(blocks), BLOCKS_AT_ONCE):
        part = slice(first, first + BLOCKS_AT_ONCE)
        errors = np.abs(scale[part][..., None] * E2M1 - blocks[part][..., None])
        codes[part] = errors.argmin(axis=-1)
    return {"power": power, "nibbles": folded(codes, 4, 16)}


# ---- blocks of 256 ------------------------------------------------------------------------------


def _fit_offset(x: Array, most: int) -> tuple[Array, Array]:
    """Scales and minima (at least 0, taken off) of groups (..., n) for codes from 0 to most."""
    low = np.minimum(x.min(-1, keepdims=True), 0)
    span = (x.max(-1, keepdims=True) - low) / np.float32(most)
    best, least, error = span, -low, np.full(span.shape, np.inf, np.float32)
    count = np.float32(x.shape[-1])
    for share in TRIED:
        codes = np.clip(np.round((x - low) * inverse(span * share)), 0, most)
        sums, squares = codes.sum(-1, keepdims=True), (codes * codes).sum(-1, keepdims=True)
        total, products = x.sum(-1, keepdims=True), (x * codes).sum(-1, keepdims=True)
        solved = (count * products - sums * total) * inverse(count * squares - sums * sums)
        minimum = (sums * solved - total) / count
        flat = minimum < 0
        solved = np.where(flat, products * inverse(squares), solved)
        minimum = np.where(flat, 0, minimum)
        found = ((solved * codes - minimum - x) ** 2).sum(-1, keepdims=True)
        better = (found < error) & (solved > 0)
        best, least = np.where(better, solved, best), np.where(better, minimum, least)
        error = np.where(better, found, error)
    return best[..., 0], least[..., 0]


def _fit_scale(x: Array, half: int) -> Array:
    """Scales of groups (..., n), of either sign, for codes from -half to half - 1."""
    largest = np.abs(x).argmax(-1, keepdims=True)
    whole = np.take_along_axis(x, largest, -1) / np.float32(-half)
    best, error = whole, np.full(whole.shape, np.inf, np.float32)
    for share in TRIED:
        codes = np.clip(np.round(x * inverse(whole * share)), -half, half - 1)
        solved = (x * codes).sum(-1, keepdims=True) * inverse(
            (codes * codes).sum(-1, keepdims=True)
        )
        found = ((solved * codes - x) ** 2).sum(-1, keepdims=True)
        better = found < error
        best, error = np.where(better, solved, best), np.where(better, found, error)
    return best[..., 0]


def _levels(scales: Array, most: int) -> tuple[Array, Array, Array]:
    """Scales (blocks, groups) as whole numbers up to `most` of one of the block (float16)."""
    whole = (scales.max(-1, keepdims=True) / np.float32(most)).astype(np.float16)
    wide = whole.astype(np.float32)
    small = np.clip(np.round(scales * inverse(wide)), 0, most)
    return whole, small.astype(np.uint8), wide * small


def _signed_levels(scales: Array, half: int) -> tuple[Array, Array, Array]:
    """The same of either sign: the largest becomes -half."""
    largest = np.abs(scales).argmax(-1, keepdims=True)
    whole = np.take_along_axis(scales, largest, -1) / np.float32(-half)
    whole = whole.astype(np.float16)
    wide = whole.astype(np.float32)
    small = np.clip(np.round(scales * inverse(wide)), -half, half - 1)
    return whole, small.astype(np.int8), wide * small


def _with_offset(blocks: Array, group: int, most: int, largest: int) -> dict[str, Array]:
    """Blocks of groups with a scale and a minimum each, both whole numbers up to `largest`."""
    x = blocks.reshape(len(blocks), -1, group)
    scales, minima = _fit_offset(x, most)
    whole, small, real = _levels(scales, largest)
    least, lower, off = _levels(minima, largest)
    codes = np.round((x + off[..., None]) * inverse(real[..., None]))
    codes = np.clip(codes, 0, most).astype(np.uint8).reshape(blocks.shape)
    return {"scale": whole, "minimum": least, "small": small, "lower": lower, "codes": codes}


def pack_q2_k(blocks: Array) -> dict[str, Array]:
    """Groups of 16: scale and minimum a nibble each."""
    found = _with_offset(blocks, 16, 3, 15)
    small = found["small"] | found["lower"] << np.uint8(4)
    pairs = folded(found["codes"], 2, 32)
    return {"scales": small, "pairs": pairs, **_scale_and_minimum(found)}


def _scale_and_minimum(found: dict[str, Array]) -> dict[str, Array]:
    return {"scale": found["scale"], "minimum": found["minimum"]}


def _six_bits(found: dict[str, Array]) -> dict[str, Array]:
    """Eight scales and minima of six bits in twelve bytes."""
    small, lower = found["small"], found["lower"]
    low = np.uint8(15)
    low_bits = (small[:, 4:] & low) | (lower[:, 4:] & low) << np.uint8(4)
    top = [x[:, :4] | (x[:, 4:] >> np.uint8(4)) << np.uint8(6) for x in (small, lower)]
    return {"scales": top[0], "minima": top[1], "both": low_bits}


def pack_q4_k(blocks: Array) -> dict[str, Array]:
    """Groups of 32."""
    found = _with_offset(blocks, 32, 15, 63)
    return {
        **_scale_and_minimum(found),
        **_six_bits(found),
        "nibbles": folded(found["codes"], 4, 32),
    }


def pack_q5_k(blocks: Array) -> dict[str, Array]:
    """Groups of 32, with fifth bits."""
    found = _with_offset(blocks, 32, 31, 63)
    codes = found["codes"]
    fifth = folded(codes >> np.uint8(4), 1, 32)
    return {
        **_scale_and_minimum(found),
        **_six_bits(found),
        "fifth": fifth,
        "nibbles": folded(codes, 4, 32),
    }


def _without_offset(blocks: Array, half: int, largest: int) -> tuple[Array, Array, Array]:
    """Groups of 16 with a scale each: the block's, the groups' and codes from 0."""
    x = blocks.reshape(len(blocks), -1, 16)
    whole, small, real = _signed_levels(_fit_scale(x, half), largest)
    codes = np.clip(np.round(x * inverse(real[..., None])), -half, half - 1) + half
    return whole, small, codes.astype(np.uint8).reshape(blocks.shape)


def pack_q3_k(blocks: Array) -> dict[str, Array]:
    """Scales of six bits, in nibbles and pairs of bits above them."""
    whole, small, codes = _without_offset(blocks, 4, 32)
    above = (small + np.int8(32)).astype(np.uint8)
    return {
        "third": folded(codes >> np.uint8(2), 1, 32),
        "pairs": folded(codes, 2, 32),
        "scales": folded(above, 4, 8),
        "high_scales": folded(above >> np.uint8(4), 2, 4),
        "scale": whole,
    }


def pack_q6_k(blocks: Array) -> dict[str, Array]:
    """Scales of eight bits."""
    whole, small, codes = _without_offset(blocks, 32, 128)
    return {
        "nibbles": folded(codes, 4, 64),
        "pairs": folded(codes >> np.uint8(4), 2, 32),
        "scales": small,
        "scale": whole,
    }


__all__ = [
    *("pack_mxfp4", "pack_q2_k", "pack_q3_k", "pack_q4_0", "pack_q4_1", "pack_q4_k"),
    *("pack_q5_0", "pack_q5_1", "pack_q5_k", "pack_q6_k", "pack_q8_0"),
]

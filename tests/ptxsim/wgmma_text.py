"""Operands of matrix instructions for the simulator's tests, laid out by loops over elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

TYPES: dict[str, Any] = {
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "tf32": np.float32,
    "s8": np.int8,
    "u8": np.uint8,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "f32": np.float32,
    "s32": np.int32,
}


def random(shape: tuple[int, ...], type_: str, seed: int) -> np.ndarray:
    """Small random numbers, exact in the type (tf32 too)."""
    rng = np.random.default_rng(seed)
    low = 0 if type_ == "u8" else -8
    return (rng.integers(low, 9, shape) / (1 if type_ in ("s8", "u8") else 4)).astype(TYPES[type_])


def product(a: np.ndarray, b: np.ndarray, c: np.ndarray, into: str) -> np.ndarray:
    """a @ b.T + c."""
    total = a.astype(np.float64) @ b.astype(np.float64).T + c.astype(np.float64)
    return total.astype(TYPES[into])


CODES = {0: 0, 128: 1, 64: 2, 32: 3}


def descriptor(start: int, leading: int, stride: int, swizzle: int) -> int:
    """A descriptor by its fields in bytes."""
    return (start >> 4) | (leading >> 4) << 16 | (stride >> 4) << 32 | CODES[swizzle] << 62


def place(image: np.ndarray, at: int, value: np.ndarray) -> None:
    """Put one element's bytes at an address of the image."""
    image[at : at + value.nbytes] = np.frombuffer(value.tobytes(), np.uint8)


def lay_out(
    matrix: np.ndarray, swizzle: int, transposed: bool, image: np.ndarray, start: int
) -> tuple[int, int]:
    """Write (rows, k) into an image at an offset that is a multiple of 1024; gives the leading
    and the stride offset for its descriptor. Tiles of one atom's width lie one after another."""
    rows, depth = matrix.shape
    size = matrix.dtype.itemsize
    if not swizzle:  # core matrices of 8 rows of 16 bytes, along k first
        wide, each = (rows, 16 // size) if transposed else (depth, 16 // size)
        along = wide // each * 128
        for r in range(rows):
            for k in range(depth):
                i, j = (k, r) if transposed else (r, k)  # j runs along the 16 bytes
                at = i // 8 * along + j // each * 128 + i % 8 * 16 + j % each * size
                place(image, start + at, matrix[r, k])
        return (along, 128) if transposed else (128, along)
    wide = swizzle // size  # elements in a row of an atom
    outer = depth if transposed else rows
    for r in range(rows):
        for k in range(depth):
            i, j = (k, r) if transposed else (r, k)
            byte = j % wide * size
            at = j // wide * outer * swizzle + i * swizzle
            line = {128: i % 8, 64: i // 2 % 4, 32: i // 4 % 2}[swizzle]
            at += (byte // 16 ^ line) * 16 + byte % 16
            place(image, start + at, matrix[r, k])
    return outer * swizzle, 8 * swizzle


SMEM = 1024  # where dynamic shared memory begins


def kernel(columns: int, instructions: Sequence[str], bytes_: int, accumulators: int = 0) -> str:
    """Copy an image into shared memory, run instructions, store the accumulators %r100..."""
    count = accumulators or columns // 2
    body = f"""
	ld.param.u64 %d0, [p0];
	ld.param.u64 %d1, [p1];
	mov.u32 %r0, %tid.x;
	mov.u32 %r1, smem;
	shl.b32 %r2, %r0, 4;
	mov.u32 %r5, %r2;
$copy:
	cvt.u64.u32 %d3, %r5;
	add.s64 %d4, %d0, %d3;
	add.u32 %r6, %r1, %r5;
	ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%d4];
	st.shared.v4.b32 [%r6], {{%r10, %r11, %r12, %r13}};
	add.u32 %r5, %r5, 2048;
	setp.lt.u32 %p0, %r5, {bytes_};
	@%p0 bra $copy;
	fence.proxy.async.shared::cta;
	bar.sync 0;
	setp.eq.u32 %p1, 0, 0;
	setp.ne.u32 %p2, 0, 0;
	wgmma.fence.sync.aligned;
"""
    body += "".join(f"\t{line}\n" for line in instructions)
    body += """
	wgmma.commit_group.sync.aligned;
	wgmma.wait_group.sync.aligned 0;
	mul.wide.u32 %d3, %r0, 4;
	add.s64 %d1, %d1, %d3;
"""
    for n in range(count):
        body += f"\tst.global.b32 [%d1+{512 * n}], %r{100 + n};\n"
    return body


def listed(count: int) -> str:
    """The accumulators in braces."""
    return "{" + ", ".join(f"%r{100 + n}" for n in range(count)) + "}"


def accumulated(result: np.ndarray, columns: int) -> np.ndarray:
    """(registers, threads) as the (64, columns) matrix."""
    matrix = np.zeros((64, columns), result.dtype)
    for r in range(result.shape[0]):
        for thread in range(128):
            row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (r >> 1 & 1)
            matrix[row, 8 * (r >> 2) + thread % 4 * 2 + (r & 1)] = result[r, thread]
    return matrix

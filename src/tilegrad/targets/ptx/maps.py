"""Tensor maps: what the bulk copy engine needs to know of a tensor, encoded by the driver.

The driver writes 128 bytes to an address that must be aligned to 128; the bindings' own object
is not, so the function is called through its address with memory of ours. Maps are remembered
by all that goes into them. Invariant: everything the hardware demands of a map is checked here
first, with the sizes in the message; the driver would only say "invalid value".
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from ...core.errors import InternalError, UserError
from ...ir.symbol import evaluate
from .cuda_api import api, call, fail
from .program import TensorMap

MAP_BYTES = 128
ALIGNMENT = 128
# CUtensorMapDataType by dtype; dtypes the engine does not know travel as plain bits
DATA_TYPES = {
    "uint8": 0,
    "int8": 0,
    "bool": 0,
    "float8_e4m3": 0,
    "float8_e5m2": 0,
    "uint16": 1,
    "int16": 1,
    "uint32": 2,
    "int32": 3,
    "uint64": 4,
    "int64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
}
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
PROMOTION = 2  # L2 fetches 128 bytes for a miss: with 256 an H200 streams 8% slower
RANK_LIMIT, BOX_LIMIT = 5, 256
SIZE_LIMIT, STRIDE_LIMIT = 1 << 32, 1 << 40

Sizes = tuple[int, ...]
Shape = tuple[int, Sizes, Sizes, Sizes, int]  # see `shape_of`


def shape_of(map_: TensorMap, symbols: Mapping[str, int] | None = None) -> Shape:
    """Checked numbers of a map but for its address: (data type, sizes, byte strides of all axes but
    the innermost, box, swizzle), innermost first."""
    known = symbols or {}
    sizes, strides, box = (
        tuple(int(evaluate(s, known)) for s in reversed(given))
        for given in (map_.sizes, map_.strides, map_.box)
    )
    bytes = tuple(s * map_.dtype.size for s in strides[1:])
    _check(map_, sizes, strides, box, bytes)
    return DATA_TYPES[map_.dtype.name], sizes, bytes, box, SWIZZLES[map_.swizzle]


def _check(
    map_: TensorMap,
    sizes: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    bytes: Sequence[int],
) -> None:
    """Refuse what the hardware does not take."""
    rank, row = len(sizes), (*box, 0)[0] * map_.dtype.size
    limits = (
        (
            1 <= rank <= RANK_LIMIT and len(strides) == rank and len(box) == rank,
            f"1 to {RANK_LIMIT} axes, as many strides and box sizes",
            f"{rank} sizes, {len(strides)} strides, box {map_.box}",
        ),
        (map_.dtype.name in DATA_TYPES, "a dtype of 1, 2, 4 or 8 bytes", map_.dtype),
        (map_.swizzle in SWIZZLES, f"a swizzle of {tuple(SWIZZLES)} bytes", map_.swizzle),
        (
            all(1 <= s <= SIZE_LIMIT for s in sizes),
            f"sizes from 1 to {SIZE_LIMIT}",
            tuple(reversed(sizes)),
        ),
        (
            all(1 <= b <= BOX_LIMIT for b in box),
            f"box sizes from 1 to {BOX_LIMIT}",
            map_.box,
        ),
        (strides[:1] == (1,), "an innermost stride of 1", strides[:1]),
        (row % 16 == 0, "an innermost box size that is a multiple of 16 bytes", f"{row} bytes"),
        (
            not map_.swizzle or row <= map_.swizzle,
            f"an innermost box size of at most the swizzle's {map_.swizzle} bytes",
            f"{row} bytes",
        ),
        *(
            (
                stride % 16 == 0 and 0 <= stride < STRIDE_LIMIT,
                f"strides that are multiples of 16 bytes, under {STRIDE_LIMIT}",
                f"{stride} bytes at axis {rank - 1 - axis}",
            )
            for axis, stride in enumerate(bytes, 1)
        ),
    )
    for holds, expected, got in limits:
        if not holds:
            raise UserError(
                f"a tensor map cannot describe parameter {map_.parameter}",
                op="tensor map",
                expected=expected,
                got=got,
                hint="pad the sizes, or use a Plan that loads without bulk tensor copies",
            )


# ---- encoding -------------------------------------------------------------------------------

# the map; data type, rank; address, sizes, strides, box, steps; interleaving, swizzle, ...
_POINTER, _CHOICE = [ctypes.c_void_p], [ctypes.c_int]
_TYPE = ctypes.CFUNCTYPE(
    ctypes.c_int, *_POINTER, *_CHOICE, ctypes.c_uint32, *5 * _POINTER, *4 * _CHOICE
)


@lru_cache(maxsize=1)
def _function(driver: Any) -> Any:
    """A driver's cuTensorMapEncodeTiled, by its address."""
    address, _ = call("cuGetProcAddress", b"cuTensorMapEncodeTiled", 12000, 0)
    if not int(address):
        raise InternalError("ptx maps", "this driver has no cuTensorMapEncodeTiled")
    return _TYPE(int(address))


def aligned(bytes: int) -> tuple[Any, int]:
    """Zeroed host memory, and an address in it that is aligned with `bytes` bytes after it."""
    memory = ctypes.create_string_buffer(bytes + ALIGNMENT)
    at = ctypes.addressof(memory)
    return memory, at + -at % ALIGNMENT


@lru_cache(maxsize=16384)
def encoded(shape: Shape, pointer: int) -> bytes:
    """The 128 bytes of a map at an address."""
    data_type, sizes, strides, box, swizzle = shape
    if pointer % 16:
        raise UserError(
            "a tensor map cannot begin at this address",
            op="tensor map",
            expected="a multiple of 16",
            got=hex(pointer),
        )
    rank = len(sizes)
    memory, at = aligned(MAP_BYTES)
    steps = (ctypes.c_uint64 * max(1, rank - 1))(*strides)
    status = _function(api())(
        at,
        data_type,
        rank,
        pointer,
        (ctypes.c_uint64 * rank)(*sizes),
        steps,
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,
        swizzle,
        PROMOTION,
        0,
    )
    if status:
        fail("cuTensorMapEncodeTiled", api().CUresult(status), f"map {shape} at {pointer:#x}")
    result = ctypes.string_at(at, MAP_BYTES)
    del memory
    return result

"""Entries as text, and tensor maps: what the hardware demands is refused with its numbers."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from fake_cuda import FakeCuda

from tilegrad.core import dtype as dtypes
from tilegrad.core.errors import InternalError, UserError
from tilegrad.ir.symbol import symbol
from tilegrad.targets.ptx import cuda_api, maps
from tilegrad.targets.ptx.program import Entry, TensorMap

ROWS = symbol("rows", 1, 4096)
PLAIN = TensorMap(0, dtypes.bfloat16, (128, 512), (512, 1), (64, 64), 128)
SYMBOLIC = TensorMap(1, dtypes.float32, (ROWS, 64), (64, 1), (32, 32), 128)


def test_an_entry_survives_its_text() -> None:
    arguments = (("pointer", 0), ("symbol", "rows"), ("map", PLAIN), ("map", SYMBOLIC))
    entry = Entry("matmul", arguments, ((ROWS + 127) // 128, 4, 1), 384, 200_000, (2,), True)
    again = Entry.from_text(entry.to_text())
    assert again == entry and again.to_text() == entry.to_text()
    assert isinstance(again.arguments[2][1].box, tuple)
    with pytest.raises(InternalError, match="thing"):
        replace(entry, arguments=(("thing", 1),)).to_text()


def test_numbers_are_innermost_first() -> None:
    assert maps.shape_of(PLAIN) == (9, (512, 128), (1024,), (64, 64), 3)
    assert maps.shape_of(SYMBOLIC, {"rows": 7})[1:3] == ((64, 7), (256,))
    line = TensorMap(0, dtypes.uint8, (4096,), (1,), (256,))
    assert maps.shape_of(line) == (0, (4096,), (), (256,), 0)


@pytest.mark.parametrize(
    "change, match",
    [
        ({"box": (64, 128)}, "at most the swizzle's 128 bytes[\\s\\S]*256 bytes"),
        ({"box": (257, 64)}, "from 1 to 256"),
        ({"box": (64, 4)}, "multiple of 16 bytes[\\s\\S]*8 bytes"),
        ({"box": (64,)}, "as many strides"),
        ({"strides": (511, 1)}, "multiples of 16 bytes[\\s\\S]*1022 bytes at axis 0"),
        ({"strides": (1 << 40, 1)}, "multiples of 16 bytes"),
        ({"strides": (512, 2)}, "innermost stride of 1"),
        ({"swizzle": 48}, "a swizzle of"),
        ({"sizes": (0, 512)}, "sizes from 1"),
        ({"sizes": (1,) * 6, "strides": (16,) * 6, "box": (1,) * 6}, "1 to 5 axes"),
    ],
)
def test_what_the_hardware_refuses(change, match) -> None:
    with pytest.raises(UserError, match=match):
        maps.shape_of(replace(PLAIN, **change))


def test_an_address_must_be_aligned() -> None:
    with pytest.raises(UserError, match="multiple of 16"):
        maps.encoded(maps.shape_of(PLAIN), 1032)


def test_encoding_calls_the_driver_with_aligned_memory() -> None:
    seen = []

    def encoder(at, kind, rank, pointer, sizes, strides, box, steps, *rest) -> int:
        seen.append(
            (
                at % 128,
                kind,
                rank,
                pointer,
                np.ctypeslib.as_array((ctypes.c_uint64 * rank).from_address(sizes)).tolist(),
                ctypes.c_uint64.from_address(strides).value,
                np.ctypeslib.as_array((ctypes.c_uint32 * rank).from_address(box)).tolist(),
                np.ctypeslib.as_array((ctypes.c_uint32 * rank).from_address(steps)).tolist(),
                rest,
            )
        )
        ctypes.memset(at, 0xAB, 128)
        return 0

    function = maps._TYPE(encoder)
    fake = FakeCuda()
    fake.addresses = {b"cuTensorMapEncodeTiled": ctypes.cast(function, ctypes.c_void_p).value}
    maps.encoded.cache_clear()
    with patch.object(cuda_api, "_api", fake):
        assert maps.encoded(maps.shape_of(PLAIN), 4096) == b"\xab" * 128
        assert maps.encoded(maps.shape_of(PLAIN), 4096) == b"\xab" * 128
    assert seen == [(0, 9, 2, 4096, [512, 128], 1024, [64, 64], [1, 1], (0, 3, 2, 0))]
    maps.encoded.cache_clear()
    maps._function.cache_clear()

"""graph/unpack.py and ops.unpack: bytes of a Format as values."""

from __future__ import annotations

import numpy as np
import pytest

from tilegrad.core.dtype import bfloat16, float32, int32, uint8
from tilegrad.core.errors import InternalError
from tilegrad.core.format import QUANTISED, Format
from tilegrad.graph import build, ops
from tilegrad.graph.batch import batched
from tilegrad.graph.interpret import interpret
from tilegrad.graph.unpack import unpacked
from tilegrad.ir.block import pure_block
from tilegrad.ir.node import topological
from tilegrad.ir.text import parse_block, print_block
from tilegrad.ir.verify import verify


def bytes_of(form: Format, *lead: int, blocks: int = 2) -> np.ndarray:
    draw = np.random.default_rng(1)
    return draw.integers(0, 256, (*lead, blocks * form.block_bytes), dtype=np.uint8)


@pytest.mark.parametrize("form", QUANTISED, ids=str)
def test_smaller_ops_give_the_same_bits(form: Format) -> None:
    raw = bytes_of(form, 2, 3)
    given = build.input_(raw.shape, uint8)
    node = build.unpack(given, form.name, float32)
    assert node.shape == (2, 3, 2 * form.block)
    small = unpacked(node)
    verify(pure_block("test", (), (small,)), "graph")
    assert not [n for n in topological([small]) if n.op is ops.unpack]
    with np.errstate(all="ignore"):
        whole, parts = interpret([node, small], {given: raw})
    np.testing.assert_array_equal(whole, form.to_float32(raw))
    np.testing.assert_array_equal(parts, whole)


def test_rounded_to_the_dtype_and_printed() -> None:
    (form,) = (f for f in QUANTISED if f.name == "Q8_0")
    raw = form.pack(np.linspace(-3, 3, 64, dtype=np.float32).reshape(1, 64))
    given = build.input_(raw.shape, uint8)
    node = build.unpack(given, "Q8_0", bfloat16)
    (value,) = interpret([node], {given: raw})
    np.testing.assert_array_equal(value, form.to_float32(raw).astype(bfloat16.numpy))
    text = print_block(pure_block("main", (given,), (node,)), "graph")
    assert 'format="Q8_0"' in text
    assert print_block(parse_block(text), "graph") == text


def test_more_rows_by_batching() -> None:
    form = QUANTISED[0]
    raw = bytes_of(form, 4, 3)
    one, many = build.input_(raw.shape[1:], uint8), build.input_(raw.shape, uint8)
    ((made, _),) = batched([build.unpack(one, form.name, float32)], {one: many}, 4)
    (value,) = interpret([made], {many: raw})
    np.testing.assert_array_equal(value, form.to_float32(raw))


@pytest.mark.parametrize(
    ("shape", "dtype", "form", "to"),
    [
        ((2, 18), int32, "Q4_0", float32),
        ((2, 19), uint8, "Q4_0", float32),
        ((2, 18), uint8, "Q4_0", int32),
        ((2, 16), uint8, "F32", float32),
        ((), uint8, "Q4_0", float32),
    ],
)
def test_what_it_refuses(shape: tuple, dtype, form: str, to) -> None:
    with pytest.raises(InternalError, match="unpack"):
        build.unpack(build.input_(shape, dtype), form, to)

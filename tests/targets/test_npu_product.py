"""Whole products by programs: right to the bit, and as long as closed forms say."""

from __future__ import annotations

import numpy as np
import pytest
from npu_programs import small

from tilegrad.core.errors import UserError
from tilegrad.targets.npu.arithmetic import requantise
from tilegrad.targets.npu.instructions import Instruction
from tilegrad.targets.npu.parameters import Parameters
from tilegrad.targets.npu.product import Narrow, Product

SIZES = [(5, 7, 9), (40, 9, 20), (1, 13, 70), (33, 4, 4)]


def operands(m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(m + n + k)
    return tuple(rng.integers(-128, 128, s).astype(np.int8) for s in ((m, k), (k, n)))  # type: ignore[return-value]


@pytest.mark.parametrize("dataflow", ["ws", "os", "is"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products_of_any_size(dataflow: str, sizes: tuple[int, int, int]) -> None:
    p = small(dataflow=dataflow, columns=6, lanes=3)
    left, right = operands(*sizes)
    made = Product(p, *sizes)
    found, cycles = made.run(left, right)
    np.testing.assert_array_equal(found, left.astype(int) @ right)
    assert cycles == made.cycles()


@pytest.mark.parametrize("dataflow", ["ws", "os", "is"])
def test_sums_made_int8(dataflow: str) -> None:
    left, right = operands(11, 10, 13)
    made = Product(small(dataflow=dataflow), 11, 10, 13, Narrow(300, 16, True))
    found, _ = made.run(left, right)
    sums = (left.astype(np.int64) @ right).astype(np.int32)
    np.testing.assert_array_equal(found, requantise(sums, 300, 16, True, None))


def test_bf16_sums_in_order() -> None:
    """Small whole numbers are exact in fp32, whatever the order."""
    rng = np.random.default_rng(0)
    values = [rng.integers(-8, 9, s).astype(np.float32) for s in ((9, 10), (10, 5))]
    bits = [(v.view(np.uint32) >> 16).astype(np.uint16) for v in values]
    found, _ = Product(small(element="bf16"), 9, 5, 10).run(*bits)
    np.testing.assert_array_equal(found, values[0] @ values[1])


def test_long_products_are_several_programs() -> None:
    p = small(program_words=32)
    left, right = operands(40, 20, 9)
    made = Product(p, 40, 20, 9)
    programs: list[list[Instruction]] = list(made.program())
    assert len(programs) > 3 and max(map(len, programs)) <= 32
    np.testing.assert_array_equal(made.run(left, right)[0], left.astype(int) @ right)
    with pytest.raises(UserError, match="program_words is too small"):
        Product(p, 4, 4, 200).cycles()


def test_work_overlaps() -> None:
    """A layer of ResNet-50 keeps a 16 x 16 mesh busy for more than half of the time."""
    macs = 196 * 256 * 2304
    assert 1 < Product(Parameters(), 196, 256, 2304).cycles() / (macs / 256) < 2

"""Whole products by programs: right to the bit, and as long as closed forms say."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from npu_programs import small

from tilegrad.core.errors import UserError
from tilegrad.targets.npu.arithmetic import requantise
from tilegrad.targets.npu.functional import Functional
from tilegrad.targets.npu.instructions import Instruction
from tilegrad.targets.npu.layout import Narrow, Stored, VectorOperand
from tilegrad.targets.npu.machine import Machine
from tilegrad.targets.npu.parameters import Parameters
from tilegrad.targets.npu.product import Product
from tilegrad.targets.npu.timing import Counts
from tilegrad.tile.array import VectorStep

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


def lying(array: np.ndarray, beat: int) -> tuple[np.ndarray, tuple[int, int]]:
    """Bytes of memory with an array whose rows are apart, other numbers between; its strides."""
    apart = -(-array.shape[1] // beat) * beat + beat
    memory = np.random.default_rng(9).integers(-128, 128, (len(array), apart)).astype(np.int8)
    memory[:, : array.shape[1]] = array
    return memory.view(np.uint8).reshape(-1), (apart, 1)


@pytest.mark.parametrize("turned", ["neither", "left", "right", "both"])
@pytest.mark.parametrize("dataflow", ["ws", "os", "is"])
@pytest.mark.parametrize("sizes", [*SIZES, (12, 8, 200)], ids=str)
def test_operands_are_read_where_they_lie(
    dataflow: str, sizes: tuple[int, int, int], turned: str
) -> None:
    """Rows or columns of an operand whole in memory: what the mesh takes by rows is not packed."""
    p = small(dataflow=dataflow, dram_latency=4, program_words=1024)
    arrays = operands(*sizes)
    given, strides = [], []
    for array, name in zip(arrays, ("left", "right")):
        flip = turned in (name, "both")
        raw, (row, column) = lying(array.T if flip else array, p.dma_bytes)
        given.append(raw)
        strides.append((column, row) if flip else (row, column))
    made = Product(p, *sizes, left_strides=strides[0], right_strides=strides[1])
    by_rows = [turned in ("neither", "right"), turned in ("neither", "left")]
    wanted = {"ws": by_rows, "is": [not b for b in by_rows], "os": [not by_rows[0], by_rows[1]]}
    least = [a.shape[b] == 1 for a, b in zip(arrays, (0, 1))]  # one row is as good as one column
    for one, want, free in zip(made.lying, wanted[dataflow], least):
        assert one == want or free
    packed = Product(p, *sizes)
    share = sum(one for one in made.lying)
    assert made.packed_bytes < packed.packed_bytes if share else made.packed_bytes > 0
    assert (made.packed_bytes == 0) == (share == 2)
    memory = made.pack(*(g if one else a for g, a, one in zip(given, arrays, made.lying)))
    again, cycles = memory.copy(), 0
    for words in made.program():
        cycles += Machine(p, words, memory).run()
        Functional(p, again).run(words)
    np.testing.assert_array_equal(memory, again)
    np.testing.assert_array_equal(made.unpack(memory), arrays[0].astype(int) @ arrays[1])
    assert cycles == made.cycles()


@pytest.mark.parametrize("dataflow", ["ws", "os", "is"])
def test_sums_made_int8(dataflow: str) -> None:
    left, right = operands(11, 10, 13)
    made = Product(small(dataflow=dataflow), 11, 10, 13, Narrow(300, 16, True))
    found, _ = made.run(left, right)
    sums = (left.astype(np.int64) @ right).astype(np.int32)
    np.testing.assert_array_equal(found, requantise(sums, 300, 16, True, None))


def pruned(weights: np.ndarray) -> np.ndarray:
    """(K, N) weights with two of every four of K set to 0, in some fours more."""
    rng = np.random.default_rng(len(weights))
    groups = -(-len(weights) // 4)
    keep = np.argsort(rng.random((groups, 4, weights.shape[1])), 1) < 2
    keep[::3, 1] = False
    return np.where(keep.reshape(groups * 4, -1)[: len(weights)], weights, 0).astype(weights.dtype)


@pytest.mark.parametrize("rate", ["mixed", "sparse"])
@pytest.mark.parametrize("dataflow", ["ws", "os", "is"])
@pytest.mark.parametrize("sizes", [*SIZES, (6, 5, 3), (12, 8, 203)], ids=str)
def test_products_at_both_rates(dataflow: str, sizes: tuple[int, int, int], rate: str) -> None:
    """Two int4 weights in a place, and 2:4: NumPy's values in the cycles of closed forms, in fewer
    of them where K is long; with inputs in place the other operand is the one that stays."""
    given = {"weights": "int4"} if rate == "mixed" else {"sparse": True}
    p = small(dataflow=dataflow, columns=6, lanes=3, program_words=1024, **given)
    left, right = operands(*sizes)
    if dataflow == "is":
        left = (pruned(left.T) if rate == "sparse" else left.T % 16 - 8).T.astype(np.int8)
    else:
        right = (pruned(right) if rate == "sparse" else right % 16 - 8).astype(np.int8)
    made = Product(p, *sizes, rate=rate)
    memory = made.pack(left, right)
    again, total = memory.copy(), Counts()
    for words in made.program():
        machine = Machine(p, words, memory)
        machine.run()
        total = total.plus(machine.counts())
        Functional(p, again).run(words)
        assert all(w[rate] for w in words if w.op == "matmul")
    np.testing.assert_array_equal(memory, again)
    np.testing.assert_array_equal(made.unpack(memory), left.astype(int) @ right)
    assert total == made.counts
    if sizes[2] >= 70:
        assert made.cycles() < 0.8 * Product(p, *sizes).cycles()


@pytest.mark.parametrize("dataflow", ["ws", "os"])
def test_dense_products_beside_a_unit_for_two_of_four_are_plain(
    dataflow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No input is spread over the columns where no weight has an index."""
    p = small(sparse=True, dataflow=dataflow)
    made = Product(p, 5, 6, 9)
    left, right = operands(5, 6, 9)
    through, widths = Functional._through, []

    def watched(
        self: Functional, sums: np.ndarray, left: np.ndarray, *more: np.ndarray
    ) -> np.ndarray:
        widths.append(left.shape[2])
        return through(self, sums, left, *more)

    monkeypatch.setattr(Functional, "_through", watched)
    memory = made.pack(left, right)
    for words in made.program():
        Functional(p, memory).run(words)
    np.testing.assert_array_equal(made.unpack(memory), left.astype(int) @ right)
    assert set(widths) == {1}


def test_weights_that_are_not_pruned_are_refused() -> None:
    made = Product(small(sparse=True), 4, 4, 8, rate="sparse")
    with pytest.raises(UserError, match="weights are not 2:4"):
        made.pack(*operands(4, 4, 8))


@pytest.mark.parametrize("dataflow", ["ws", "os"])
@pytest.mark.parametrize("element", ["bf16", "fp16"])
def test_fp8_weights_by_words(dataflow: str, element: str) -> None:
    """Two fp8 weights a step: registers and words agree; small whole numbers are exact."""
    p = small(element=element, weights="fp8", dataflow=dataflow)
    rng = np.random.default_rng(3)
    left, right = rng.integers(-9, 10, (9, 21)), rng.integers(-9, 10, (21, 5))
    kind = ml_dtypes.bfloat16 if element == "bf16" else np.float16
    made = Product(p, 9, 5, 21, rate="mixed")
    memory = made.pack(left.astype(kind).view(np.uint16), right.astype(ml_dtypes.float8_e4m3fn))
    again, cycles = memory.copy(), 0
    for words in made.program():
        cycles += Machine(p, words, memory).run()
        Functional(p, again).run(words)
    np.testing.assert_array_equal(memory, again)
    np.testing.assert_array_equal(made.unpack(memory), left @ right)
    assert cycles == made.cycles()


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


STEPS = (
    VectorStep("add", 0, 1),  # a row for all
    VectorStep("mul", 4, 2, shift=9),
    VectorStep("sub", 5, 3),  # int8, each its own
    VectorStep("max", 6, -90, True),
    VectorStep("min", 4, 6),
)
VECTOR_OPERANDS = (
    VectorOperand(True, True),
    VectorOperand(True, True),
    VectorOperand(False, False),
)


def by_hand(sums: np.ndarray, bias: np.ndarray, scales: np.ndarray, other: np.ndarray) -> list:
    biased = (sums + bias).astype(np.int32)
    scaled = ((biased.astype(np.int64) * scales + 256) >> 9).astype(np.int32)
    less = scaled - other
    return [np.maximum(less, -90), np.minimum(biased, less)]


@pytest.mark.parametrize("dataflow", ["ws", "os", "is"])
@pytest.mark.parametrize("sizes", [(11, 10, 13), (19, 5, 70)], ids=str)
def test_vector_steps_follow(dataflow: str, sizes: tuple[int, int, int]) -> None:
    """Registers, words and NumPy give the same values; closed forms count what registers do."""
    p = small(dataflow=dataflow, columns=6, lanes=3, accumulator_rows=64, bank_rows=64)
    m, n, k = sizes
    rng = np.random.default_rng(k)
    left, right = operands(*sizes)
    bias = rng.integers(-5000, 5000, (1, n)).astype(np.int32)
    scales = rng.integers(1, 90, (1, n)).astype(np.int32)
    other = rng.integers(-128, 128, (m, n)).astype(np.int8)
    stored = (Stored(7, Narrow()), Stored(8), Stored(8, Narrow(3, 4, True)))
    made = Product(p, m, n, k, vector_operands=VECTOR_OPERANDS, steps=STEPS, stored=stored)
    memory = made.pack(left, right, bias, scales, other)
    again, total = memory.copy(), Counts()
    for words in made.program():
        machine = Machine(p, words, memory)
        machine.run()
        total = total.plus(machine.counts())
        Functional(p, again).run(words)
    np.testing.assert_array_equal(memory, again)
    assert total == made.counts
    sums = (left.astype(np.int64) @ right).astype(np.int32)
    high, low = by_hand(sums, bias, scales, other)
    np.testing.assert_array_equal(made.unpack(memory, 0), np.clip(high, -128, 127))
    np.testing.assert_array_equal(made.unpack(memory, 1), low)
    np.testing.assert_array_equal(made.unpack(memory, 2), requantise(low, 3, 4, True, None))


def test_vector_steps_alone() -> None:
    p = small()
    rng = np.random.default_rng(0)
    a, b = rng.integers(-(2**31), 2**31, (2, 9, 7)).astype(np.int32)
    steps = (VectorStep("add", 0, 1), VectorStep("max", 2, 0, True))
    made = Product(
        p,
        9,
        7,
        0,
        vector_operands=(VectorOperand(False, True),) * 2,
        steps=steps,
        stored=(Stored(3),),
    )
    memory, cycles = made.pack(a, b), 0
    for words in made.program():
        cycles += Machine(p, words, memory).run()
    np.testing.assert_array_equal(made.unpack(memory), np.maximum(a + b, 0))
    assert cycles == made.cycles()


@pytest.mark.parametrize("dataflow", ["ws", "os"])
def test_bf16_by_words(dataflow: str) -> None:
    """The same sums in the same order, word by word."""
    p = small(element="bf16", dataflow=dataflow)
    rng = np.random.default_rng(3)
    values = [rng.standard_normal(s).astype(np.float32) for s in ((9, 21), (21, 5))]
    bits = [(v.view(np.uint32) >> 16).astype(np.uint16) for v in values]
    made = Product(p, 9, 5, 21, stored=(Stored(0), Stored(0, Narrow(relu=True))))
    memory = made.pack(*bits)
    again = memory.copy()
    for words in made.program():
        Machine(p, words, memory).run()
        Functional(p, again).run(words)
    np.testing.assert_array_equal(memory, again)

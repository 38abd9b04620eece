"""Jitted functions on a chip: what its array takes, at every level, and what is the host's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from npu_programs import small

import tilegrad as tg
from tilegrad.core.dtype import int8, int32, int64
from tilegrad.core.errors import UserError
from tilegrad.nn import functional as F
from tilegrad.quant import fixed
from tilegrad.runtime.device import device, target_for
from tilegrad.targets.npu.device import NpuDevice
from tilegrad.targets.npu.kernel import LEVELS, ArrayKernel

RNG = np.random.default_rng(0)
CHIPS = {
    "ws": small(columns=6, lanes=3, bank_rows=64, accumulator_rows=64),
    "os": small(dataflow="os", bank_rows=64, accumulator_rows=64),
    "is": small(dataflow="is", bank_rows=64, accumulator_rows=64),
}


def numbers(*shape: int, most: int = 128, kind: type = np.int8) -> np.ndarray:
    return RNG.integers(-most, most, shape).astype(kind)


def scaled(sums: tg.Tensor, scales: tg.Tensor | int, shift: int) -> tg.Tensor:
    """Sums over 2**shift to the nearest, within int8."""
    factor = scales if isinstance(scales, int) else scales.to(int64)
    found = ((sums.to(int64) * factor + (1 << (shift - 1))) >> shift).to(int32)
    return tg.clip(found, -128, 127).to(int8)


def dense(x: tg.Tensor, w: tg.Tensor, b: tg.Tensor, scales: tg.Tensor) -> tg.Tensor:
    return tg.relu(scaled(x.to(int32) @ w.to(int32) + b, scales, 12))


def one_scale(x: tg.Tensor, w: tg.Tensor) -> tg.Tensor:
    return scaled(x.to(int32) @ w.to(int32), 77, 15)


def both(x: tg.Tensor, w: tg.Tensor) -> tuple[tg.Tensor, tg.Tensor]:
    sums = x.to(int32) @ w.to(int32)
    return sums, scaled(sums, 3, 9)


def heads(q: tg.Tensor, k: tg.Tensor) -> tg.Tensor:
    return q.to(int32) @ k.to(int32).mT


def convolved(x: tg.Tensor, w: tg.Tensor, b: tg.Tensor) -> tg.Tensor:
    sums = F.conv2d(x.to(int32), w.to(int32), stride=2, padding=1) + b.reshape(1, -1, 1, 1)
    return tg.clip(scaled(sums, 100, 16).to(int32), 0, 127).to(int8)


def grouped(x: tg.Tensor, w: tg.Tensor) -> tg.Tensor:
    return F.conv2d(x.to(int32), w.to(int32), groups=4)


def residual(x: tg.Tensor, y: tg.Tensor) -> tg.Tensor:
    return scaled(x.to(int32) * 90 + y.to(int32) * 37, 5, 9)


CASES: dict[str, tuple[Callable, list[np.ndarray]]] = {
    "dense": (
        dense,
        [numbers(9, 14), numbers(14, 7), numbers(7, most=900, kind=np.int32),
         numbers(7, most=99, kind=np.int32)],
    ),
    "a row": (dense, [numbers(1, 30), numbers(30, 9), numbers(9, kind=np.int32),
                      numbers(9, kind=np.int32)]),
    "one scale": (one_scale, [numbers(5, 9), numbers(9, 6)]),
    "sums and int8": (both, [numbers(7, 9), numbers(9, 6)]),
    "heads": (heads, [numbers(2, 3, 5, 8), numbers(2, 3, 6, 8)]),
    "convolution": (
        convolved, [numbers(1, 3, 7, 7), numbers(6, 3, 3, 3), numbers(6, kind=np.int32)]
    ),
    "groups": (grouped, [numbers(1, 4, 5, 5), numbers(8, 1, 3, 3)]),
    "residual": (residual, [numbers(5, 11), numbers(5, 11)]),
}  # fmt: skip


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("case", CASES)
def test_values_and_cycles(case: str, chip: str) -> None:
    """All levels give the CPU's values to the bit; registers take the cycles of closed forms."""
    function, arrays = CASES[case]
    expected = tg.jit(function)(*map(tg.tensor, arrays))
    expected = [e.numpy() for e in (expected if isinstance(expected, tuple) else (expected,))]
    for level in LEVELS:
        name = tg.device("npu", chip=CHIPS[chip], level=level)
        machine = device(name)
        assert isinstance(machine, NpuDevice)
        machine.clear()
        found = tg.jit(function)(*(tg.tensor(a, device=name) for a in arrays))
        for want, got in zip(expected, found if isinstance(found, tuple) else (found,)):
            assert got.device == name
            np.testing.assert_array_equal(got.numpy(), want)
        account = machine.account()
        assert account.launches == 1
        if level == "registers":
            assert account.simulated == account.counters.cycles


def sliced(x: tg.Tensor, w: tg.Tensor) -> tg.Tensor:
    """Part of the columns of one by part of the rows of the other."""
    return x[:, 4:16].to(int32) @ w[8:20, :12].to(int32)


def sides_turned(x: tg.Tensor, w: tg.Tensor) -> tg.Tensor:
    return x[:12].T.to(int32) @ w[:12, 4:].to(int32)


def by_heads(x: tg.Tensor, w: tg.Tensor) -> tg.Tensor:
    """Heads side by side in memory: a part of a batch is some columns."""
    heads = x[:16, :16].reshape(16, 2, 8).permute(1, 0, 2)
    return heads.to(int32) @ w[:16, :16].reshape(2, 8, 16).to(int32)


@pytest.mark.parametrize("chip", ["ws", "os", "is"])
@pytest.mark.parametrize("function", [sliced, sides_turned, by_heads])
def test_operands_are_read_where_they_lie(function: Callable, chip: str) -> None:
    """Slices, transposed operands and heads go in by strides: what the host would pack is less, the
    words have the stride of the parameter, and bits and cycles are equal."""
    p = small(dataflow=chip, bank_rows=64, accumulator_rows=64, dram_latency=4)
    arrays = numbers(20, 24), numbers(24, 20)
    expected = tg.jit(function)(*map(tg.tensor, arrays)).numpy()
    for level in LEVELS:
        name = tg.device("npu", chip=p, level=level)
        machine = device(name)
        assert isinstance(machine, NpuDevice)
        machine.clear()
        found = tg.jit(function)(*(tg.tensor(a, device=name) for a in arrays)).numpy()
        np.testing.assert_array_equal(found, expected)
    account = machine.account()
    assert account.simulated == account.counters.cycles
    (kernel,) = machine.launched
    without = tuple(replace(o, strides=()) for o in kernel.work.operands)
    packed = ArrayKernel(p, replace(kernel.work, operands=without))
    assert account.packed_bytes == kernel.packed_bytes < packed.packed_bytes
    listing = tg.explain(function, *(tg.tensor(a, device=name) for a in arrays)).section("npu")
    assert "read where it lies: nothing" not in listing
    assert f"packed by the host: {kernel.packed_bytes} bytes" in listing
    assert "stride=24" in listing or "stride=20" in listing
    assert "stride=24" not in packed.listing() and "stride=20" not in packed.listing()


def normed(x: tg.Tensor, f: tg.Tensor) -> tg.Tensor:
    return fixed.rms_norm(x, f, 20)


def layer_normed(x: tg.Tensor, f: tg.Tensor, b: tg.Tensor) -> tg.Tensor:
    return fixed.layer_norm(x, f, 22, b)


def softmaxed(x: tg.Tensor, mask: tg.Tensor) -> tg.Tensor:
    return fixed.softmax(x, 1e-3, mask)


def attended(q: tg.Tensor, k: tg.Tensor, v: tg.Tensor, mask: tg.Tensor) -> tg.Tensor:
    return scaled(fixed.attention(q, k, v, 1e-4, mask), 99, 14)


def largest(x: tg.Tensor) -> tuple[tg.Tensor, tg.Tensor]:
    most = x.to(int32).amax(-1)
    return most, fixed.rsqrt(most * most + 1)


HIDDEN = np.triu(np.full((7, 7), fixed.HIDDEN, np.int32), 1)
BY_ROWS: dict[str, tuple[Callable, list[np.ndarray], int]] = {
    "norm": (normed, [numbers(9, 14), numbers(14, most=999, kind=np.int32)], 1),
    "one strip": (normed, [numbers(40, 3), numbers(3, most=999, kind=np.int32)], 1),
    "layer norm": (
        layer_normed,
        [numbers(2, 5, 13), numbers(13, most=9999, kind=np.int32), numbers(13, kind=np.int32)],
        1,
    ),
    "softmax": (softmaxed, [numbers(7, 7, most=5000, kind=np.int32), HIDDEN], 1),
    "softmax of far scores": (
        softmaxed,
        [numbers(7, 7, most=2**31 - 1, kind=np.int32), HIDDEN],
        1,
    ),
    "attention": (attended, [*(numbers(2, 7, 8) for _ in range(3)), HIDDEN], 3),
    "numbers of rows": (largest, [numbers(11, 10)], 1),
}


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("case", BY_ROWS)
def test_rows_whole(case: str, chip: str) -> None:
    """Norms, softmax and attention are the array's: the CPU's bits at all levels, by registers in
    the cycles of closed forms."""
    function, arrays, launches = BY_ROWS[case]
    expected = tg.jit(function)(*map(tg.tensor, arrays))
    expected = [e.numpy() for e in (expected if isinstance(expected, tuple) else (expected,))]
    assert np.ptp(expected[0].astype(int)) > 3
    placed = tg.placement(
        function, *map(tg.tensor, arrays), device=tg.device("npu", chip=CHIPS[chip])
    )
    assert placed.host_share == 0, placed
    for level in LEVELS:
        name = tg.device("npu", chip=CHIPS[chip], level=level)
        machine = device(name)
        assert isinstance(machine, NpuDevice)
        machine.clear()
        found = tg.jit(function)(*(tg.tensor(a, device=name) for a in arrays))
        for want, got in zip(expected, found if isinstance(found, tuple) else (found,)):
            np.testing.assert_array_equal(got.numpy(), want)
        account = machine.account()
        assert account.launches == launches
        if level == "registers":
            assert account.simulated == account.counters.cycles


def test_everything_else_is_the_hosts() -> None:
    def f(x: tg.Tensor, w: tg.Tensor, v: tg.Tensor) -> tg.Tensor:
        sums = x.to(int32) @ w.to(int32)
        return tg.softmax(sums * 0.01, -1) @ v

    arrays = [numbers(6, 20), numbers(20, 8), RNG.standard_normal((8, 5)).astype(np.float32)]
    name = tg.device("npu", chip=CHIPS["ws"], level="registers")
    given = [tg.tensor(a, device=name) for a in arrays]
    np.testing.assert_allclose(
        tg.jit(f)(*given).numpy(), f(*map(tg.tensor, arrays)).numpy(), rtol=1e-6
    )
    found = tg.placement(f, *map(tg.tensor, arrays), device=name)
    assert [k.device for k in found.kernels] == ["npu-npu", "cpu", "cpu"]
    assert 0.2 < found.host_share < 0.4
    assert any("multiplies int8 by int8, not float32" in why for why in found.reasons())
    explained = tg.explain(f, *given)
    assert "of FLOPs on the array" in explained.section("placement")
    assert " on cpu: flops" in explained.section("schedule")
    assert "preload" in explained.section("npu")


def test_loops_and_branches() -> None:
    """Kernels of the array inside a loop are simulated as often as it turns."""

    def f(x: tg.Tensor, w: tg.Tensor) -> tuple[tg.Tensor, tg.Tensor]:
        def turn(carry: tg.Tensor, _: None) -> tuple[tg.Tensor, tg.Tensor]:
            return scaled(carry.to(int32) @ w.to(int32), 9, 12), carry

        return tg.scan(turn, x, None, length=40)

    arrays = numbers(3, 6), numbers(6, 6)
    expected = tg.jit(f)(*map(tg.tensor, arrays))
    for level in ("compiled", "words"):
        name = tg.device("npu", chip=CHIPS["ws"], level=level)
        device(name).clear()  # type: ignore[attr-defined]
        found = tg.jit(f)(*(tg.tensor(a, device=name) for a in arrays))
        for want, got in zip(expected, found):
            np.testing.assert_array_equal(got.numpy(), want.numpy())
        assert device(name).account().launches == 40  # type: ignore[attr-defined]


def test_bound_while_values_decide() -> None:
    """What is bound goes on as values say, at each run anew."""

    def f(x: tg.Tensor) -> tg.Tensor:
        return tg.while_loop(lambda c: c.sum() < 100.0, lambda c: c * 2, x)

    name = tg.device("npu", chip=CHIPS["ws"], level="words")
    given = np.ones(4, np.float32)
    bound = tg.jit(f).bind(tg.tensor(given, device=name))
    for _ in range(2):
        np.testing.assert_array_equal(bound.run().numpy(), np.full(4, 32.0, np.float32))


def test_chips_by_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('preset = "edge"\nrows = 4\n')
    name = tg.device("npu", chip=str(file))
    assert target_for(name).name == "npu-mine"
    assert tg.device("npu", chip=str(file)) == name
    assert target_for("npu:0").array.m == 16  # type: ignore[union-attr]
    with pytest.raises(UserError, match="no such chip"):
        tg.device("npu", chip="nothing.toml")
    with pytest.raises(UserError, match="no such level"):
        tg.device("npu", chip="edge", level="gates")
    with pytest.raises(UserError, match="no such chip"):
        target_for("npu:99")


def test_what_does_not_fit_is_told() -> None:
    """A chip whose program memory holds no result of a long product leaves it to the host."""
    tiny = small(program_words=16)
    name = tg.device("npu", chip=tiny)
    found = tg.placement(
        heads, tg.zeros((9, 64), dtype=int8), tg.zeros((9, 64), dtype=int8), device=name
    )
    assert found.host_share == 1.0
    assert "program_words is too small" in next(iter(found.reasons()))


def product(x: tg.Tensor, w: tg.Tensor) -> tg.Tensor:
    return x @ w


def attended(x: tg.Tensor, w: tg.Tensor) -> tg.Tensor:
    return F.softmax(x @ w, -1) @ w.mT


def picture(x: tg.Tensor, w: tg.Tensor) -> tg.Tensor:
    windows = F.conv2d(x.reshape(1, 1, *x.shape), w[:3, :3].reshape(1, 1, 3, 3), padding=1)
    return tg.relu(windows)


@pytest.mark.parametrize("dataflow", ["ws", "os", "is"])
@pytest.mark.parametrize("element", [tg.bfloat16, tg.float16])
@pytest.mark.parametrize("function", [product, attended, picture])
def test_floats_are_added_in_the_arrays_order(
    function: Callable, element: tg.DType, dataflow: str
) -> None:
    """The same bits at every level: sums whose order matters, and numbers near the smallest."""
    named = {tg.bfloat16: "bf16", tg.float16: "fp16"}[element]
    p = small(element=named, dataflow=dataflow, bank_rows=64, accumulator_rows=64)
    tiny = 2.0**-75 if element is tg.bfloat16 else 2.0**-9
    for rows, inner, columns, scale in ((6, 10, 5, 1.0), (1, 8, 4, 1.0), (5, 7, 9, tiny)):
        a = RNG.standard_normal((rows, inner)) * 2.0 ** RNG.integers(-5, 5, (rows, inner)) * scale
        b = RNG.standard_normal((inner, columns)) * scale
        found = []
        for level in LEVELS:
            name = tg.device("npu", chip=p, level=level)
            given = [tg.tensor(v.astype(np.float32)).to(element).to(name) for v in (a, b)]
            found.append(tg.jit(function)(*given).to(tg.float32).numpy().copy())
        assert device(name).account().launches > 0
        for one in found[1:]:
            np.testing.assert_array_equal(one.view(np.uint32), found[0].view(np.uint32))
        if function is product and scale == 1.0:
            exact = np.abs(a) @ np.abs(b)
            assert (np.abs(found[0] - a @ b) <= 0.02 * exact).all()


def test_what_a_float_array_leaves_to_the_host_is_told() -> None:
    name = tg.device("npu", chip=small(element="bf16"))
    x = tg.zeros((4, 4), device=name)
    said = str(tg.placement(lambda x: F.softmax(x @ x, -1), x, device=name))
    assert "multiplies bfloat16 by bfloat16, not float32 by float32" in said
    assert "subnormal" in said

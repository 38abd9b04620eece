"""tensor/quantised.py: packing tensors of files, products and rows of them, on the CPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import tilegrad as tg
from tilegrad.core import format as formats
from tilegrad.core.dtype import bfloat16
from tilegrad.core.errors import DTypeError, ShapeError, UserError
from tilegrad.core.format import QUANTISED, Format
from tilegrad.ir.symbol import symbol
from tilegrad.tensor import quantised
from tilegrad.tensor.quantised import Packed, Room, pack, quantised_matmul, take_rows, why_not


@dataclass
class Tensor:
    """A tensor of a file, which counts how often its pages were dropped."""

    shape: tuple[int, ...]
    format: Format
    raw: Any = field(repr=False)
    dropped: int = 0

    def drop(self) -> None:
        self.dropped += 1

    @property
    def values(self) -> Any:
        return self.format.to_float32(self.raw).astype(np.float64)


def stored(form: Format, rows: int, columns: int, seed: int = 0) -> Tensor:
    draw = np.random.default_rng([seed, rows])
    if form.packer is not None:
        raw = form.pack(draw.standard_normal((rows, columns)).astype(np.float32))
    else:
        raw = draw.integers(0, 64, (rows, form.row_bytes(columns)), dtype=np.uint8)
    return Tensor((rows, columns), form, raw)


def tokens(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).standard_normal(shape).astype(np.float32)


def near(got: Any, want: np.ndarray, error: float = 1e-4) -> None:
    size = max(1e-30, np.abs(want).max())
    assert got.shape == want.shape
    assert np.abs(got.numpy().astype(np.float64) - want).max() / size < error


@pytest.mark.parametrize("form", QUANTISED, ids=str)
def test_every_format(form: Format) -> None:
    weights = stored(form, 40, 256)
    packed = pack(weights, "cpu")
    assert packed.shape == (40, 256) and packed.format is form and packed.device == "cpu"
    assert packed.bytes <= 1.2 * 48 / 40 * weights.raw.nbytes
    assert sorted(packed.tensors()) == sorted(packed.parts)
    x, w = tokens(2, 3, 256), weights.values
    with np.errstate(all="ignore"):
        near(quantised_matmul(tg.tensor(x), packed), x.astype(np.float64) @ w.T)
    rows = take_rows(packed, tg.tensor(np.array([[39, 0], [7, 7]])))
    np.testing.assert_array_equal(rows.numpy(), w.astype(np.float32)[[[39, 0], [7, 7]]])


@pytest.mark.parametrize("sizes", [(16, 16), (5, 37, 3), (48, 1, 1, 30), (8, 8, 8)])
@pytest.mark.parametrize("chunk", [1, 4000, 1 << 20])
def test_several_become_one(sizes: tuple[int, ...], chunk: int, monkeypatch: Any) -> None:
    """Rows follow one another whatever they are cut into."""
    monkeypatch.setattr(quantised, "CHUNK_BYTES", chunk)
    several = [stored(formats.Q4_1, rows, 64, seed) for seed, rows in enumerate(sizes)]
    packed = pack(several)
    w = np.concatenate([s.values for s in several])
    got = take_rows(packed, tg.tensor(np.arange(sum(sizes))))
    np.testing.assert_array_equal(got.numpy(), w.astype(np.float32))
    assert [s.dropped for s in several] == [1] * len(several)


def test_room_for_many() -> None:
    """All parts lie in one piece of memory and none in another; what is too much has its own."""
    groups = [[stored(formats.Q4_1, 40, 64, i), stored(formats.Q4_1, 8, 64, i)] for i in range(5)]
    room = Room(groups)
    packed = [pack(g, "cpu", room) for g in groups]
    assert room.used == room.whole.bytes
    places = sorted(
        (t.buffer().pointer, t.buffer().bytes) for p in packed for t in p.parts.values()
    )
    assert all(a + size <= b and a % 64 == 0 for (a, size), (b, _) in pairwise(places))
    assert places[-1][0] + places[-1][1] - places[0][0] <= room.whole.bytes
    packed.append(pack(groups[0], "cpu", room))
    groups.append(groups[0])
    for group, one in zip(groups, packed):
        w = np.concatenate([s.values for s in group])
        got = take_rows(one, tg.tensor(np.arange(48)))
        np.testing.assert_array_equal(got.numpy(), w.astype(np.float32))


def test_one_compiled_function_for_all_counts() -> None:
    weights = [stored(formats.Q4_1, 64, 96), stored(formats.Q8_0, 40, 64)]
    packed = [pack(w) for w in weights]
    count = symbol("tokens", 1, 64)

    def both(x: Any, first: Packed, second: Packed) -> Any:
        return quantised_matmul(quantised_matmul(x, first), second)

    step = tg.jit(both, dynamic={"x": {0: count}})
    for size in (1, 40, 3, 24, 25, 64, 2):
        x = tokens(size, 96)
        want = x.astype(np.float64) @ weights[0].values.T @ weights[1].values.T
        near(step(tg.tensor(x), *packed), want, 3e-4)


def test_results_have_the_dtype_of_tokens() -> None:
    weights = stored(formats.Q8_0, 32, 64)
    packed, x = pack(weights), tokens(3, 64)
    narrow = tg.tensor(x).to(bfloat16)
    got = quantised_matmul(narrow, packed)
    assert got.dtype is bfloat16
    near(got.float(), narrow.float().numpy().astype(np.float64) @ weights.values.T, 2e-2)
    assert take_rows(packed, tg.tensor([1]), bfloat16).dtype is bfloat16
    assert quantised_matmul(tg.tensor(x[0]), packed).shape == (32,)


def test_weights_are_never_expanded(monkeypatch: Any) -> None:
    """Nothing that is made while packing is larger than a chunk's parts."""
    seen = []
    kernels = quantised.kernels_of(quantised._target("cpu"))
    own = kernels.pack

    def counted(shape: Any, raw: Any) -> Any:
        found = own(shape, raw)
        seen.append((raw.nbytes, sum(a.nbytes for a in found.values())))
        return found

    monkeypatch.setattr(kernels, "pack", counted)
    monkeypatch.setattr(quantised, "CHUNK_BYTES", 1 << 14)
    weights = stored(formats.Q4_1, 1024, 256)
    packed = pack(weights)
    assert packed.bytes == weights.raw.nbytes == sum(made for _, made in seen)
    assert max(made for _, made in seen) <= 1 << 14


def test_errors() -> None:
    first = stored(formats.Q4_1, 32, 64)
    with pytest.raises(ShapeError, match="fit together"):
        pack([first, stored(formats.Q4_1, 32, 96)])
    with pytest.raises(DTypeError, match="formats"):
        pack([first, stored(formats.Q8_0, 32, 64)])
    with pytest.raises(UserError, match="nothing"):
        pack([])
    plain = Tensor((4, 64), formats.F32, np.zeros((4, 256), np.uint8))
    assert "quantised" in why_not(plain) and why_not(first) == ""
    with pytest.raises(UserError, match="no kernel"):
        pack(plain)
    packed = pack(first)
    with pytest.raises(ShapeError, match="64"):
        quantised_matmul(tg.tensor(tokens(2, 32)), packed)
    with pytest.raises(DTypeError, match="integers"):
        take_rows(packed, tg.tensor([0.5]))
    with pytest.raises(UserError, match="float32"):
        quantised_matmul(tg.tensor(np.zeros((1, 64))), packed)

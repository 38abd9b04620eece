"""runtime/prepared.py: the table of prepared weights."""

from __future__ import annotations

import gc
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tilegrad.core.format import Q4_1
from tilegrad.kernels.quantised.prepare import Preparation
from tilegrad.runtime import prepared as table
from tilegrad.runtime.device import device
from tilegrad.runtime.prepared import Source, prepared, prepared_bytes, telling

COLUMNS = 64


class Weights:
    """Rows of a file, which counts how often its pages were dropped and its bytes were read."""

    def __init__(self, rows: int, seed: int = 0) -> None:
        draw = np.random.default_rng([seed, rows])
        self.raw = Q4_1.pack(draw.standard_normal((rows, COLUMNS)).astype(np.float32))
        self.dropped = self.read = 0

    def source(self) -> Source:
        def read() -> Any:
            self.read += 1
            return self.raw

        def drop() -> None:
            self.dropped += 1

        return Source(self.raw.shape, read, drop)


def layout(*rows: int) -> Preparation:
    return Preparation("vectors", "Q4_1", rows, COLUMNS)


def arrays(buffers: Any, of: Preparation) -> list[np.ndarray]:
    return [np.array(b.array(s, d)) for b, (_, s, d) in zip(buffers, of.parts())]


@pytest.mark.parametrize("sizes", [(16, 16), (5, 37, 3), (48, 1, 1, 30), (8, 8, 8)])
@pytest.mark.parametrize("chunk", [1, 4000, 1 << 20])
def test_rows_follow_one_another(sizes: tuple[int, ...], chunk: int, monkeypatch: Any) -> None:
    """Whatever they are cut into."""
    monkeypatch.setattr(table, "CHUNK_BYTES", chunk)
    several = [Weights(rows, seed) for seed, rows in enumerate(sizes)]
    sources = [w.source() for w in several]
    (buffers,) = prepared([(sources, layout(*sizes))], device("cpu"))
    for got, want in zip(
        arrays(buffers, layout(*sizes)), layout(*sizes).interpret(*(w.raw for w in several))
    ):
        np.testing.assert_array_equal(got, want)
    assert [w.dropped for w in several] == [1] * len(several)


@pytest.mark.usefixtures("quick_collect")
def test_made_once_and_gone_with_the_source() -> None:
    weights = Weights(32)
    source = weights.source()
    first = prepared([([source], layout(32))], device("cpu"))
    again = prepared([([source], layout(32)), ([source], layout(32))], device("cpu"))
    assert first[0] is again[0] is again[1] and weights.read == 1
    before = len(table._table)
    del source
    gc.collect()
    assert len(table._table) == before - 1
    other = weights.source()  # which may have the id of the one before
    assert prepared([([other], layout(32))], device("cpu"))[0] is not first[0]


def test_weights_of_a_product_can_be_read_alone() -> None:
    several = [Weights(32, 1), Weights(16, 2), Weights(20, 3)]
    sources, sizes = [w.source() for w in several], (32, 16, 20)
    (whole,) = prepared([(sources, layout(*sizes))], device("cpu"))
    for weights, source, rows in zip(several, sources, sizes):
        (alone,) = prepared([([source], layout(rows))], device("cpu"))
        for got, want in zip(arrays(alone, layout(rows)), layout(rows).interpret(weights.raw)):
            np.testing.assert_array_equal(got, want)
        for part, of in zip(alone, whole):
            assert of.pointer <= part.pointer < of.pointer + of.bytes
        assert weights.read == 1
    assert prepared([(sources, layout(*sizes))], device("cpu"))[0] is whole
    (turned,) = prepared([(sources[::-1], layout(*sizes[::-1]))], device("cpu"))
    assert turned is not whole


def test_all_that_is_missing_lies_in_one_piece() -> None:
    several = [[Weights(40, i), Weights(8, i)] for i in range(5)]
    sources = [[w.source() for w in group] for group in several]
    wanted = [(group, layout(40, 8)) for group in sources]
    made = prepared(wanted, device("cpu"))
    places = sorted((b.pointer, b.bytes) for buffers in made for b in buffers)
    assert all(a + size <= b and a % 64 == 0 for (a, size), (b, _) in pairwise(places))
    assert places[-1][0] + places[-1][1] - places[0][0] <= 5 * prepared_bytes(layout(40, 8))


def test_nothing_is_expanded(monkeypatch: Any) -> None:
    """Nothing that is made on the way is larger than a chunk's parts."""
    seen = []
    own = Preparation.pack

    def counted(self: Preparation, raw: Any) -> Any:
        found = own(self, raw)
        seen.append(sum(a.nbytes for a in found.values()))
        return found

    monkeypatch.setattr(Preparation, "pack", counted)
    monkeypatch.setattr(table, "CHUNK_BYTES", 1 << 14)
    weights = Weights(1024)
    prepared([([weights.source()], layout(1024))], device("cpu"))
    assert sum(seen) == weights.raw.nbytes and max(seen) <= 1 << 14


def test_progress() -> None:
    told: list[Any] = []
    sources = [Weights(16, i).source() for i in range(3)]
    with telling(lambda *a: told.append(a)):
        prepared([([s], layout(16)) for s in sources], device("cpu"))
    total = sum(s.bytes for s in sources)
    assert [a[0] for a in told] == ["pack"] * 3 and [a[2] for a in told] == [total] * 3
    assert told[-1][1] == total
    prepared([([Weights(16, 9).source()], layout(16))], device("cpu"))
    assert len(told) == 3


def test_a_source_is_read_when_it_must_be() -> None:
    weights = Weights(16)
    source = weights.source()
    assert source.bytes == weights.raw.nbytes and source.adapts and not weights.read
    np.testing.assert_array_equal(source.array(weights.raw.shape, np.uint8), weights.raw)
    assert not source.writable


def test_weights_read_alone_first_are_not_kept_twice() -> None:
    several = [Weights(32, 1), Weights(16, 2)]
    sources = [w.source() for w in several]
    (before,) = prepared([([sources[1]], layout(16))], device("cpu"))
    (whole,) = prepared([(sources, layout(32, 16))], device("cpu"))
    (after,) = prepared([([sources[1]], layout(16))], device("cpu"))
    assert after is not before and after[0].owner is whole[0].owner
    for got, want in zip(arrays(after, layout(16)), arrays(before, layout(16))):
        np.testing.assert_array_equal(got, want)

"""tile/writes.py and tile/inside.py: what is proved of real kernels costs nothing when they run."""

from __future__ import annotations

import numpy as np
import pytest

import tilegrad as tg
from tilegrad import kernel, tile
from tilegrad.core.config import override
from tilegrad.core.errors import AxisError, DTypeError
from tilegrad.core.target import AVX512, H200
from tilegrad.ir.symbol import symbol
from tilegrad.ir.types import Array
from tilegrad.tile.build import body_sites

ROWS, COLUMNS = symbol("rows", 1, 4096), symbol("columns", 0, 512)
F32 = tg.float32


def copy(x, *, block):
    (size,) = x.shape
    i = tile.grid(tile.ceil_divide(size, block))
    out = tile.result((size,), x.dtype)
    out[i * block : (i + 1) * block] = x[i * block : (i + 1) * block]


def scale_rows(x):
    rows, columns = x.shape
    i = tile.grid(rows)
    out = tile.result(x.shape, x.dtype)
    for j in tile.range(0, columns, 64):
        out[i, j : j + 64] = x[i, j : j + 64] * 2


def product(a, b):
    (m, k), n, T = a.shape, b.shape[1], tile.context()
    i, j = tile.grid(tile.ceil_divide(m, T.m), tile.ceil_divide(n, T.n))
    total = tile.zeros((T.m, T.n), F32)
    for p in tile.range(0, k, T.k):
        left = tile.load(a, (i * T.m, p), (T.m, T.k))
        total = tile.dot(left, tile.load(b, (p, j * T.n), (T.k, T.n)), total)
    tile.store(tile.result((m, n), a.dtype), (i * T.m, j * T.n), total)


def swizzled(x):
    """Programs in groups of 8 rows of tiles, as products take them for the sake of a cache."""
    rows, columns = x.shape
    across, down = columns // 64, rows // 64
    p = tile.grid(across * down)
    group, inside = p // (8 * across), p % (8 * across)
    i, j = group * 8 + inside % 8, inside // 8
    out = tile.result(x.shape, x.dtype)
    out[i * 64 : i * 64 + 64, j * 64 : j * 64 + 64] = (
        x[i * 64 : i * 64 + 64, j * 64 : j * 64 + 64] + 0
    )


def persistent(x):
    (n,) = x.shape
    p = tile.grid(8)
    out = tile.result((n,), x.dtype)
    for number in tile.range(p, tile.ceil_divide(n, 64), 8):
        out[number * 64 : number * 64 + 64] = x[number * 64 : number * 64 + 64]


def heads(x):
    batch, count, rows, _ = x.shape
    i, j, k = tile.grid(batch, count, tile.ceil_divide(rows, 32))
    tile.store(tile.result(x.shape), (i, j, k * 32, 0), tile.load(x, (i, j, k * 32, 0), (32, 64)))


def by_offsets(x, *, block):
    """As kernels over pointers are written: offsets and masks."""
    rows, columns = x.shape
    i, j = tile.grid(tile.ceil_divide(rows, block), tile.ceil_divide(columns, block))
    row, column = i * block + tile.arange(block), j * block + tile.arange(block)
    at = row[:, None] * columns + column[None, :]
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    tile.store(tile.result(x.shape, x.dtype), at, tile.load(x, at, mask=mask) * 2, mask=mask)


def rows_by_offsets(x):
    rows, columns = x.shape
    i = tile.grid(rows)
    at = tile.arange(64)
    mask = at < columns
    line = i * columns + at
    tile.store(tile.result(x.shape, x.dtype), line, tile.load(x, line, mask=mask), mask=mask)


def split_number(x):
    """One axis of programs for several of the array."""
    batch, rows, columns = x.shape
    blocks = tile.ceil_divide(columns, 32)
    p = tile.grid(batch * rows * blocks)
    i, j, k = p // (rows * blocks), p // blocks % rows, p % blocks
    out = tile.result(x.shape, x.dtype, fill="none")
    out[i, j, k * 32 : k * 32 + 32] = x[i, j, k * 32 : k * 32 + 32] * 2


def first_writes(x):
    rows = x.shape[0]
    i = tile.grid(rows)
    out, total = tile.result((rows,), x.dtype), tile.result((1,), x.dtype, fill="none")
    out[i] = tile.sum(tile.load(x, (i, 0), (64,)))
    if i == rows - 1:
        total[0] = tile.sum(tile.load(x, (0, 0), (64,)))


PROVED = [
    (split_number, {"x": (ROWS, 6, 100)}),
    (split_number, {"x": (64, 8, 4096)}),
    (first_writes, {"x": (ROWS, COLUMNS)}),
    (by_offsets, {"x": (4000, 5000), "block": 64}),
    (by_offsets, {"x": (ROWS, COLUMNS), "block": 8}),
    (by_offsets, {"x": (4096, 64), "block": 64}),
    (rows_by_offsets, {"x": (100_000, 50)}),
    (rows_by_offsets, {"x": (ROWS, symbol("few", 1, 64))}),
    (copy, {"x": (ROWS,), "block": 64}),
    (copy, {"x": (COLUMNS,), "block": 8}),
    (copy, {"x": (1000,), "block": 7}),
    (scale_rows, {"x": (ROWS, COLUMNS)}),
    (scale_rows, {"x": (100_000, 1000)}),
    (product, {"a": (ROWS, 128), "b": (128, COLUMNS)}),
    (product, {"a": (8192, 8192), "b": (8192, 8192)}),
    (swizzled, {"x": (4096, 2048)}),
    (persistent, {"x": (100_000,)}),
    (persistent, {"x": (ROWS,)}),
    (heads, {"x": (ROWS, 4, COLUMNS, 64)}),
]


def traced(function, settings, target=AVX512):
    given = {n: Array(v, F32) if isinstance(v, tuple) else v for n, v in settings.items()}
    made = kernel(function)
    return made.definition.callee(given, made.plan, target)


@pytest.mark.parametrize(
    ("function", "settings"), PROVED, ids=lambda v: getattr(v, "__name__", str(v))
)
def test_real_kernels_are_proved(function, settings) -> None:
    """One launch, so nothing is filled; no Site, so no index is looked at."""
    callee = traced(function, settings)
    assert [len(body_sites(body)) for body, _ in callee.launches] == [0]


def fifth(x):
    tile.grid(1)
    tile.store(tile.result((1,)), (0,), x[5])


def one_more(x):
    i = tile.grid(x.shape[0] + 1)
    tile.store(tile.result((x.shape[0],)), (i,), 1.0)


def test_symbolic_sizes() -> None:
    assert [len(body_sites(body)) for body, _ in traced(fifth, {"x": (ROWS,)}).launches] == [1]
    with pytest.raises(AxisError, match="expected: 0 <= index < rows along axis 0"):
        traced(one_more, {"x": (ROWS,)})
    jitted = tg.jit(lambda x: kernel(fifth)(x), dynamic={"x": {0: symbol("n", 1, 64)}})
    assert jitted(tg.arange(8.0)).tolist() == [5.0]
    with pytest.raises(AxisError, match=r"test_writes\.py"):
        jitted(tg.arange(5.0))


def some(x):
    i = tile.grid(4)
    part = tile.load(x, (i * 16,), (16,))
    tile.store(tile.result((64,)), (i * 16,), part, mask=part > 60)


def loose(x):
    i = tile.grid(4)
    part = tile.load(x, (i * 16,), (16,))
    tile.store(tile.result((64,), fill="none"), (i * 16,), part, mask=part > 60)


def test_what_is_not_known_to_be_written_is_zero() -> None:
    x = tg.arange(64.0)
    for _ in range(3):
        tg.full((64,), 7.0).numpy()  # leaves its memory to the next result
        assert kernel(some)(x).tolist() == [0.0] * 61 + [61.0, 62.0, 63.0]
    assert len(traced(some, {"x": (64,)}).launches) == 2
    assert len(traced(loose, {"x": (64,)}).launches) == 1
    assert kernel(loose)(x).tolist()[61:] == [61.0, 62.0, 63.0]
    assert tg.vmap(kernel(some))(tg.stack([x, x])).numpy().sum() == 2 * 186


def by_data(x, at):
    i = tile.grid(at.shape[0])
    out = tile.result((at.shape[0],))
    out[i] = x[tile.load(at, (i,))]


def test_checked_gpu_kernels_find_it_too() -> None:
    from simulated import launch

    given = {"x": Array((8,), F32), "at": Array((4,), tg.int64)}
    made = kernel(by_data)
    with override(checked=True):
        ((body, _),) = made.definition.callee(given, made.plan, H200).launches
    x, out = np.arange(8, dtype=np.float32), np.zeros(4, np.float32)
    launch(body, [x, np.array([1, 7, 0, 2]), out], {})
    assert out.tolist() == [1, 7, 0, 2]
    with pytest.raises(AxisError, match="an index of x is out of bounds"):
        launch(body, [x, np.array([1, 8, 0, 2]), out], {})


def too_large(x):
    tile.grid(1)
    tile.store(tile.result((8,), tg.int32), (0,), tile.load(x, (0,), (8,)) + (1 << 40))


def test_numbers_fit_their_dtype() -> None:
    with pytest.raises(DTypeError, match="does not fit"):
        kernel(too_large)(tg.tensor(np.arange(8, dtype=np.int32)))


def scan(x):
    tile.grid(1)
    for row in x:
        tile.store(tile.result((1,)), (0,), row)


def test_an_array_is_not_looped_over() -> None:
    with pytest.raises(tg.UserError, match="looped over"):
        kernel(scan)(tg.arange(8.0))


def by_a_part(x, at):
    tile.grid(1)
    tile.store(tile.result((4,)), (0,), tile.load(x, at[0:4]))


def test_offsets_may_be_a_part_of_an_array() -> None:
    at = tg.tensor(np.array([3, 0, 7, 1]))
    assert kernel(by_a_part)(tg.arange(8.0), at).tolist() == [3.0, 0.0, 7.0, 1.0]

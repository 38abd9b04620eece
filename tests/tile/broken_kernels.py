"""Kernels that are wrong, by templates and parameters, and right ones of the same shapes.

`cases()` are wrong: those of the stage "trace" must be refused while they are traced, those of the
stage "run" only the data decides, and a run must end in an error. `good()` are right, with what
they compute. `python broken_kernels.py start|end` runs all that must be run with every Buffer by a
page that nothing may touch, and prints what is amiss as JSON.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

import tilegrad as tg
from tilegrad import kernel, tile

FLOATS, WHOLE = np.float32, np.int32
N = 24  # of a line
ROWS, COLUMNS = 6, 20


@dataclass
class Case:
    """A wrong kernel: what is called with what, and when it must be refused."""

    name: str
    stage: str
    function: Callable[..., Any]
    arguments: list[np.ndarray]
    settings: dict[str, Any]

    @property
    def lines(self) -> range:
        """The kernel's own lines."""
        source, first = inspect.getsourcelines(self.function)
        return range(first, first + len(source))


def line(dtype: Any = FLOATS, size: int = N) -> np.ndarray:
    return np.arange(size).astype(dtype)


def matrix(dtype: Any = FLOATS) -> np.ndarray:
    return np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS).astype(dtype)


# ---- indices that are known while tracing ------------------------------------------------------
# `way` says what is done at a scalar index along an axis, or at offsets.


def touch(way: str, x: Any, index: tuple[Any, ...]) -> None:
    """Read, write or add at an index."""
    if way == "load":
        tile.store(tile.result((1,), fill=0), (0,), tile.load(x, index), unique=True)
    elif way == "window":
        tile.store(
            tile.result((4,), fill=0),
            (0,),
            tile.load(x, (*index[:-1], 0), (4,))
            if len(index) > 1
            else tile.broadcast(x[index[0]] + 0, (4,)),
            unique=True,
        )
    elif way == "store":
        tile.store(tile.result(x.shape, x.dtype, fill=0), index, 1, unique=True)
    elif way == "atomic":
        tile.atomic_add(tile.result(x.shape, x.dtype, fill=0), index, 1)
    else:
        place = tile.shared(tuple(int(s) for s in x.shape), x.dtype)
        tile.store(place, (0,) * x.ndim, tile.zeros(tuple(int(s) for s in x.shape), x.dtype))
        if way == "shared store":
            tile.store(place, index, 1)
        tile.store(
            tile.result((1,), x.dtype, fill=0),
            (0,),
            tile.load(place, index if way == "shared load" else (0,) * x.ndim),
            unique=True,
        )


WAYS = ("load", "store", "atomic", "shared load", "shared store")


def by_program(x, *, way, axis, off):
    i = tile.grid(x.shape[axis])
    touch(way, x, tuple(i + off if a == axis else 0 for a in range(x.ndim)))


def by_constant(x, *, way, axis, at):
    tile.grid(2)
    touch(way, x, tuple(at if a == axis else 0 for a in range(x.ndim)))


def by_loop(x, *, way, axis, more):
    tile.grid(1)
    out = tile.result((1,), x.dtype)
    total = tile.zeros((), x.dtype)
    for j in tile.range(x.shape[axis] + more):
        if way == "load":
            total = total + tile.load(x, tuple(j if a == axis else 0 for a in range(x.ndim)))
        else:
            tile.store(out, (j,), total)
    tile.store(out, (0,), total)


def window_outside(x, *, way, axis, start):
    tile.grid(1)
    index = tuple(start if a == axis else 0 for a in range(x.ndim))
    if way == "load":
        tile.store(tile.result((8,), x.dtype), (0,), tile.load(x, index, (8,), axes=(axis,)))
    else:
        out = tile.result(x.shape, x.dtype, fill=0)
        tile.store(out, index, tile.zeros((8,), x.dtype), axes=(axis,))


def offsets_outside(x, *, way, factor, shift):
    i = tile.grid(2)
    at = tile.arange(8) * factor + shift + i * 0
    if way == "gather":
        tile.store(tile.result((2, 8), x.dtype), (i, 0), tile.load(x, at))
    elif way == "scatter":
        tile.store(tile.result(x.shape, x.dtype, fill=0), at, tile.zeros((8,)), unique=True)
    else:
        tile.atomic_add(tile.result(x.shape, x.dtype, fill=0), at, 1)


# ---- results that are not written whole ---------------------------------------------------------


def grid_too_small(x, *, block, less):
    (n,) = x.shape
    i = tile.grid(n // block - less)
    out = tile.result((n,), x.dtype)
    out[i * block : (i + 1) * block] = x[i * block : (i + 1) * block]


def rows_left_out(x, *, less):
    rows, columns = x.shape
    i = tile.grid(rows - less)
    tile.store(tile.result((rows, columns), x.dtype), (i, 0), tile.load(x, (i, 0), (32,)))


def columns_left_out(x, *, width):
    rows, columns = x.shape
    i = tile.grid(rows)
    out = tile.result((rows, columns), x.dtype)
    for j in tile.range(0, columns - width, width):
        out[i, j : j + width] = x[i, j : j + width]


def gaps(x, *, block, apart):
    (n,) = x.shape
    i = tile.grid(n // apart)
    tile.store(tile.result((n,), x.dtype), (i * apart,), tile.load(x, (i * apart,), (block,)))


def shorter_value(x, *, size):
    rows = x.shape[0]
    i = tile.grid(rows)
    tile.store(tile.result((rows, size), x.dtype), (i, 0), tile.load(x, (i, 0), (64,)))


def never_written(x, *, shape):
    tile.grid(1)
    tile.store(tile.result((8,), x.dtype), (0,), tile.zeros((8,), x.dtype))
    tile.result(shape, x.dtype)


def by_some_programs(x, *, count):
    (n,) = x.shape
    i = tile.grid(n)
    out = tile.result((n,), x.dtype)
    if i < count:
        out[i] = x[i]


def masked_away(x, *, count):
    (n,) = x.shape
    i = tile.grid(1)
    at = i + tile.arange(32)
    tile.store(tile.result((n,), x.dtype), at, tile.load(x, at), mask=at < count)


def added_to_nothing(x, *, shape):
    tile.grid(4)
    tile.atomic_add(tile.result(shape, x.dtype), (0,) * len(shape), 1)


# ---- programs that touch one element ------------------------------------------------------------


def all_write_all(x, *, programs):
    (n,) = x.shape
    tile.grid(programs)
    tile.store(tile.result((n,), x.dtype), (0,), tile.load(x, (0,), (32,)))


def overlapping(x, *, block, apart):
    (n,) = x.shape
    i = tile.grid(n // apart)
    tile.store(tile.result((n,), x.dtype), (i * apart,), tile.load(x, (i * apart,), (block,)))


def an_axis_too_many(x, *, axes):
    rows, columns = x.shape
    i = tile.grid(rows, *[2] * axes)[0]
    tile.store(tile.result((rows, columns), x.dtype), (i, 0), tile.load(x, (i, 0), (32,)))


def read_modify_write(x, *, programs, bins):
    i = tile.grid(programs)
    out = tile.result((bins,), x.dtype, fill=0)
    out[i % bins] = out[i % bins] + x[i]


def reads_its_neighbour(x, *, by):
    (n,) = x.shape
    i = tile.grid(n)
    out = tile.result((n,), x.dtype, fill=0)
    out[i] = x[i]
    other = tile.load(out, ((i + by) % n,))
    out[i] = other + 1


def adds_and_stores(x, *, at):
    (n,) = x.shape
    i = tile.grid(n)
    out = tile.result((n,), x.dtype, fill=0)
    tile.atomic_add(out, (at,), 1)
    out[i] = x[i]


def crossing_stores(x, *, shift):
    (n,) = x.shape
    i = tile.grid(n // 8)
    out = tile.result((n,), x.dtype, fill=0)
    out[i * 8 : i * 8 + 8] = x[i * 8 : i * 8 + 8]
    tile.store(out, (i * 8 + shift,), tile.zeros((8,), x.dtype))


def overlapping_offsets(x, *, apart):
    i = tile.grid(4)
    at = (i * apart + tile.arange(2))[:, None] * COLUMNS + tile.arange(16)[None, :]
    tile.store(tile.result(x.shape, x.dtype, fill=0), at, tile.load(x, at), mask=at >= 0)


def scatter_by_data(x, at, *, way):
    i = tile.grid(at.shape[0])
    out = tile.result(x.shape, x.dtype, fill=0)
    if way == "index":
        out[tile.load(at, (i,))] = x[i]
    elif way == "window":
        start = tile.index(tile.load(at, (i,)), 0, 8)
        out[start : start + 4] = x[0:4]
    else:
        tile.store(out, tile.load(at, (0,), (4,)) + i, 1.0)


# ---- grids and placed kernels -------------------------------------------------------------------


def bad_grid(x, *, sizes):
    tile.grid(*sizes)
    tile.store(tile.result((1,), x.dtype), (0,), x[0])


def grid_of_data(x):
    tile.grid(tile.index(tile.cast(x[0], tile.i64)))
    tile.store(tile.result((1,), x.dtype), (0,), x[0])


def early(x, *, way, program):
    i = tile.grid(8)
    out = tile.result((8, N), x.dtype)
    with tile.role("one", warps=4):
        tile.grid_dependency_wait()
    with tile.role("two", warps=4):
        if way == "write" and program is None:
            tile.store(out, (i, 0), tile.zeros((N,), x.dtype))
        if program is not None and way == "write":
            if i == program:
                tile.store(out, (i, 0), tile.zeros((N,), x.dtype))
        if way == "read":
            if i == program:
                tile.store(out, (i, 0), tile.load(x, (0,), (N,)))
        tile.grid_dependency_wait()
        tile.store(out, (i, 0), tile.zeros((N,), x.dtype))


def place_outside(x, *, at):
    i = tile.grid(2)
    out = tile.result((2, 8), x.dtype)
    place = tile.shared((3, 8), x.dtype)
    with tile.role("one", warps=4):
        tile.grid_dependency_wait()
        tile.write(place[at], tile.zeros((8,), x.dtype))
        tile.store(out, (i, 0), tile.zeros((8,), x.dtype))


def adds_and_loads(x, *, by):
    i = tile.grid(4)
    out, seen = tile.result((8,), x.dtype, fill=0), tile.result((4,), x.dtype)
    tile.atomic_add(out, (i,), 1)
    seen[i] = out[(i + by) % 4]


def read_before_written(x, *, fill):
    (n,) = x.shape
    i = tile.grid(n)
    out = tile.result((n,), x.dtype, fill=fill)
    out[i] = out[i] + x[i]


def place_partly_written(x, *, size):
    i = tile.grid(2)
    place = tile.shared((16,), x.dtype)
    tile.store(place, (0,), tile.zeros((size,), x.dtype))
    tile.store(tile.result((2, 16), x.dtype), (i, 0), tile.load(place, (0,), (16,)))


def bad_result(x, *, shape, fill):
    tile.grid(1)
    tile.result(shape, WHOLE, fill=fill)


def traced() -> Iterator[Case]:
    """Kernels that are refused while they are traced."""

    def case(function: Any, *arguments: np.ndarray, **settings: Any) -> Case:
        values = ", ".join(f"{k}={v}" for k, v in settings.items())
        kinds = ", ".join(f"{a.dtype}{list(a.shape)}" for a in arguments)
        return Case(
            f"{function.__name__}({kinds}; {values})", "trace", function, [*arguments], settings
        )

    for way, x in product(WAYS, (line(), line(WHOLE), matrix(), matrix(WHOLE))):
        for axis in range(x.ndim):
            yield case(by_program, x, way=way, axis=axis, off=1)
            yield case(by_program, x, way=way, axis=axis, off=-1)
            yield case(by_constant, x, way=way, axis=axis, at=x.shape[axis])
            yield case(by_constant, x, way=way, axis=axis, at=-1)
    for way, at in product(WAYS, (2**31, 2**40, -(2**40))):
        yield case(by_constant, line(), way=way, axis=0, at=at)
    for way, x, more in product(("load", "store"), (line(), matrix()), (1, 7)):
        yield case(by_loop, x, way=way, axis=x.ndim - 1, more=more)
    for way, x, off in product(("load", "store"), (line(), matrix()), (0, 9)):
        axis = x.ndim - 1
        yield case(window_outside, x, way=way, axis=axis, start=x.shape[axis] + off)
        yield case(window_outside, x, way=way, axis=axis, start=-8 - off)
    for way, x in product(("gather", "scatter", "atomic"), (line(), matrix())):
        for factor, shift in ((x.size, 0), (1, x.size - 4), (-1, 0), (1, -1)):
            if (way, x.ndim, factor) != ("scatter", 1, 1):  # a window: what is beyond is left out
                yield case(offsets_outside, x, way=way, factor=factor, shift=shift)
    for dtype in (FLOATS, WHOLE, np.float16):
        for block in (1, 4, 8):
            yield case(grid_too_small, line(dtype), block=block, less=1)
        yield case(rows_left_out, matrix(dtype), less=2)
        yield case(columns_left_out, matrix(dtype), width=4)
        yield case(gaps, line(dtype), block=4, apart=6)
        yield case(shorter_value, matrix(dtype), size=COLUMNS + 1)
        yield case(never_written, line(dtype), shape=(3, 3))
        yield case(by_some_programs, line(dtype), count=5)
        yield case(masked_away, line(dtype), count=20)
        yield case(all_write_all, line(dtype), programs=2)
        yield case(overlapping, line(dtype), block=8, apart=6)
        yield case(an_axis_too_many, matrix(dtype), axes=1)
        yield case(read_modify_write, line(dtype), programs=N, bins=4)
        yield case(reads_its_neighbour, line(dtype), by=1)
        yield case(crossing_stores, line(dtype), shift=4)
        yield case(overlapping_offsets, matrix(dtype), apart=1)
        for way in ("index", "window", "offsets"):
            yield case(scatter_by_data, line(dtype), np.arange(4), way=way)
    for dtype in (FLOATS, WHOLE, np.int64):
        yield case(added_to_nothing, line(dtype), shape=(4,))
        yield case(added_to_nothing, line(dtype), shape=(2, 2))
        yield case(adds_and_stores, line(dtype), at=3)
        yield case(adds_and_loads, line(dtype), by=1)
        yield case(place_partly_written, line(dtype), size=8)
        for fill in (None, "none"):
            yield case(read_before_written, line(dtype), fill=fill)
    for shape, fill in (((-1,), 0), ((4,), float("nan")), ((4,), 1.5), ((4,), 1 << 31)):
        yield case(bad_result, line(), shape=shape, fill=fill)
    for sizes in ((2**31,), (2**40,), (2**16, 2**16), (2**63,), (-1,), (4, -4)):
        yield case(bad_grid, line(), sizes=sizes)
    yield case(grid_of_data, line())
    for way, program in (("write", None), ("write", 3), ("write", 0), ("read", 3), ("read", 7)):
        yield case(early, line(), way=way, program=program)
    for at in (3, -1, 100):
        yield case(place_outside, line(), at=at)


# ---- what only the data decides -----------------------------------------------------------------


def index_by_data(x, at, *, way, axis):
    i = tile.grid(at.shape[0])
    where = tile.load(at, (i,))
    touch(way, x, tuple(where if a == axis else 0 for a in range(x.ndim)))


def offsets_by_data(x, at, *, way):
    (m,) = at.shape
    i = tile.grid(1)
    where = tile.load(at, (i * m,), (m,))
    if way == "gather":
        tile.store(tile.result((m,), x.dtype), (0,), tile.load(x, where))
    elif way == "masked gather":
        tile.store(tile.result((m,), x.dtype), (0,), tile.load(x, where, mask=where != 7))
    elif way == "scatter":
        tile.store(tile.result(x.shape, x.dtype, fill=0), where, tile.full((m,), 1, x.dtype))
    else:
        tile.atomic_add(tile.result(x.shape, x.dtype, fill=0), where, 1)


def loop_by_data(x, at):
    tile.grid(1)
    total = tile.zeros((), x.dtype)
    for j in tile.range(tile.max(tile.load(at, (0,), (4,))) + 1):
        total = total + x[j]
    tile.store(tile.result((1,), x.dtype), (0,), total)


def promised(x, at):
    tile.grid(1)
    start = tile.index(tile.load(at, (0,)), 0, N - 4)
    tile.store(tile.result((4,), x.dtype), (0,), x[start : start + 4])


def required(x, at):
    i = tile.grid(at.shape[0])
    where = tile.load(at, (i,))
    tile.require((where >= 0) & (where < x.shape[0]), "no such element")
    tile.store(tile.result((at.shape[0],), x.dtype), (i,), x[tile.where(where < 3, where, 0) % 3])


def promised_loop(x, at):
    tile.grid(1)
    total = tile.zeros((), x.dtype)
    for j in tile.range(tile.load(at, (0,)) + 1, bounds=(0, N - 1)):
        total = total + x[j]
    tile.store(tile.result((1,), x.dtype), (0,), total)


def promised_hold(x, at):
    tile.grid(1)
    tile.store(tile.result((1,), x.dtype), (0,), x[tile.hold(at[0], bounds=(0, N - 1))])


def from_afar(x, at):
    tile.grid(1)
    total = tile.zeros((), x.dtype)
    for j in tile.range(at[0] - 2**41, at[0] - 2**41 + 1):
        total = total + x[j + 2**41]
    tile.store(tile.result((1,), x.dtype), (0,), total)


def run_kernels() -> Iterator[tuple[str, Any, list[np.ndarray], dict[str, Any], int]]:
    """(name, function, arguments but for the indices, settings, size of what is indexed)."""
    for way, x in product((*WAYS, "window"), (line(), matrix(WHOLE))):
        for axis in range(x.ndim if way != "window" else 1):
            yield f"{way} {axis}", index_by_data, [x], {"way": way, "axis": axis}, x.shape[axis]
    ways = ("gather", "masked gather", "scatter", "atomic")
    for way, x in product(ways, (line(), matrix(WHOLE))):
        yield way, offsets_by_data, [x], {"way": way}, x.size
    yield "loop", loop_by_data, [line()], {}, N
    yield "promised", promised, [line()], {}, N - 3
    yield "required", required, [line()], {}, N
    yield "promised loop", promised_loop, [line()], {}, N
    yield "promised hold", promised_hold, [line()], {}, N
    yield "from afar", from_afar, [line()], {}, N


FIRST = (promised, promised_loop, promised_hold, from_afar)  # they read one number


def run() -> Iterator[Case]:
    """Kernels that end in an error when they run."""
    for name, function, given, settings, size in run_kernels():
        for dtype in (np.int64, WHOLE):
            bad = [size] if function in (loop_by_data, promised_loop) else [size, -1]
            if dtype is np.int64 and len(bad) > 1:
                bad += [1 << 40, -(1 << 62)]
            for number, place in zip(bad, (0, 3, 1, 2)):
                at = np.array([0, 1, 2, 0], dtype)
                at[0 if function in FIRST else place] = number
                shapes = "x".join(str(list(g.shape)) for g in given)
                yield Case(
                    f"{name} {shapes} {dtype.__name__} {number}",
                    "run",
                    function,
                    [*given, at],
                    settings,
                )


def cases() -> list[Case]:
    """All wrong kernels."""
    return [*traced(), *run()]


# ---- right ones ---------------------------------------------------------------------------------


def add_blocks(x, y, *, block):
    (n,) = x.shape
    i = tile.grid(tile.ceil_divide(n, block))
    here = slice(i * block, (i + 1) * block)
    out = tile.result((n,), x.dtype)
    out[here] = x[here] + y[here]


def add_rows(x, *, width):
    rows, columns = x.shape
    i = tile.grid(rows)
    out = tile.result((rows, columns), x.dtype)
    for j in tile.range(0, columns, width):
        out[i, j : j + width] = x[i, j : j + width] + 1


def one_row_and_its_sum(x):
    rows, columns = x.shape
    i = tile.grid(rows)
    out, sums = tile.result((rows, columns), x.dtype), tile.result((rows,), x.dtype)
    row = tile.load(x, (i, 0), (32,))
    tile.store(out, (i, 0), row)
    tile.store(sums, (i,), tile.sum(row))


def halo(x):
    (n,) = x.shape
    i = tile.grid(tile.ceil_divide(n, 8))
    left = tile.fill(tile.load(x, (i * 8 - 1,), (8,)), 0)
    tile.store(tile.result((n,), x.dtype), (i * 8,), tile.load(x, (i * 8,), (8,)) + left)


def flat_grid(x, *, block):
    rows, columns = x.shape
    across = tile.ceil_divide(columns, block)
    p = tile.grid(rows * across)
    out = tile.result((rows, columns), x.dtype)
    row, start = p // across, p % across * block
    out[row, start : start + block] = x[row, start : start + block] * 2


def last_program_writes(x):
    (n,) = x.shape
    i = tile.grid(n)
    out, total = tile.result((n,), x.dtype), tile.result((1,), x.dtype)
    out[i] = x[i]
    if i == n - 1:
        total[0] = tile.sum(tile.load(x, (0,), (32,)))


def two_halves(x):
    (n,) = x.shape
    i = tile.grid(n // 8)
    out = tile.result((n,), x.dtype)
    out[i * 8 : i * 8 + 4] = x[i * 8 + 4 : i * 8 + 8]
    out[i * 8 + 4 : i * 8 + 8] = x[i * 8 : i * 8 + 4]


def triton_style(x, *, block):
    rows, columns = x.shape
    i, j = tile.grid(tile.ceil_divide(rows, 4), tile.ceil_divide(columns, block))
    row, column = i * 4 + tile.arange(4), j * block + tile.arange(block)
    at = row[:, None] * columns + column[None, :]
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    out = tile.result((rows, columns), x.dtype)
    tile.store(out, at, tile.load(x, at, mask=mask) + 1, mask=mask)


def histogram(x):
    (n,) = x.shape
    i = tile.grid(n)
    tile.atomic_add(tile.result((8,), x.dtype, fill=0), (tile.load(x, (i,)) % 8,), 1)


def permuted(x, at):
    i = tile.grid(at.shape[0])
    out = tile.result(x.shape, x.dtype)
    tile.store(out, (tile.load(at, (i,)),), x[i], unique=True)


def not_known_is_zero(x):
    (n,) = x.shape
    i = tile.grid(tile.ceil_divide(n, 8))
    part = tile.load(x, (i * 8,), (8,))
    tile.store(tile.result((n,), x.dtype), (i * 8,), part, mask=part > 5)


def in_place_twice(x):
    (n,) = x.shape
    i = tile.grid(n // 8)
    out = tile.result((n,), x.dtype)
    here = slice(i * 8, i * 8 + 8)
    out[here] = x[here]
    out[here] = out[here] * 2


def good() -> Iterator[tuple[str, Any, list[np.ndarray], dict[str, Any], list[np.ndarray]]]:
    """(name, function, arguments, settings, results)."""
    x, m = line(), matrix()
    for block, dtype in product((1, 5, 8, 64), (FLOATS, WHOLE, np.float16)):
        yield (
            f"add {block} {dtype.__name__}",
            add_blocks,
            [line(dtype)] * 2,
            {"block": block},
            [line(dtype) * 2],
        )
    for width in (3, 4, 32):
        yield f"rows {width}", add_rows, [m], {"width": width}, [m + 1]
    yield "sums", one_row_and_its_sum, [m], {}, [m, m.sum(1)]
    yield "halo", halo, [x], {}, [x + np.concatenate([[0], x[:-1]]).astype(FLOATS)]
    for block in (3, 4, 32):
        yield f"flat {block}", flat_grid, [m], {"block": block}, [m * 2]
        yield f"triton {block}", triton_style, [m], {"block": block}, [m + 1]
    yield "last", last_program_writes, [x], {}, [x, x.sum(keepdims=True)]
    yield "halves", two_halves, [x], {}, [x.reshape(-1, 2, 4)[:, ::-1].reshape(-1)]
    counts = np.bincount(line(WHOLE) % 8, minlength=8).astype(WHOLE)
    yield "histogram", histogram, [line(WHOLE)], {}, [counts]
    order = np.arange(N)[::-1].copy()
    yield "permuted", permuted, [x, order], {}, [x[::-1]]
    yield "zeros", not_known_is_zero, [x], {}, [np.where(x > 5, x, 0)]
    yield "twice", in_place_twice, [x], {}, [x * 2]
    for name, function, given, settings, size in run_kernels():
        at = np.array([0, 1, 2, size - 1])
        if function is index_by_data and settings["way"] in ("store", "shared store"):
            at = at[:1]
        expected = expected_of(function, given[0], at, settings)
        yield f"good {name} {given[0].ndim}d", function, [*given, at], settings, expected


def expected_of(function: Any, x: np.ndarray, at: np.ndarray, settings: Any) -> list[Any]:
    """What the kernels of `run_kernels` compute at good indices; [] if that is not looked at."""
    zeros = np.zeros_like(x)
    if function is offsets_by_data:
        if "gather" in settings["way"]:
            return [x.reshape(-1)[at]]
        zeros.reshape(-1)[at] = 1
        return [zeros]
    if function is loop_by_data:
        return [x.sum(keepdims=True)]
    if function is index_by_data and settings["way"] in ("atomic", "store"):
        index = [at if a == settings["axis"] else np.zeros_like(at) for a in range(x.ndim)]
        np.add.at(zeros, tuple(index), 1)
        return [zeros]
    return []


# ---- running them -------------------------------------------------------------------------------


def refused(case: Case) -> str:
    """What is amiss with how a wrong kernel ends; '' if all is well."""
    given = [a.copy() for a in case.arguments]
    made = kernel(case.function)
    try:
        tensors = [tg.tensor(a) for a in given]
        if case.stage == "trace":
            made.lower(*tensors, **case.settings)
        else:
            found = made(*tensors, **case.settings)
            for one in found if isinstance(found, tuple) else (found,):
                one.numpy()
        return "it was accepted"
    except tg.UserError as error:
        if error.location is None or Path(error.location.file).name != Path(__file__).name:
            return f"the error names no line of it: {error}"
        if error.location.line not in {*case.lines, *TOUCH}:
            return f"the error names line {error.location.line}, not {case.lines}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    changed = [i for i, (a, b) in enumerate(zip(given, case.arguments)) if not np.array_equal(a, b)]
    return f"arguments {changed} were changed" if changed else ""


TOUCH = range(inspect.getsourcelines(touch)[1], inspect.getsourcelines(touch)[1] + 26)


def main(side: str) -> None:
    """Run all that must be run under guard pages; prints what is amiss."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tensor"))
    from guard_pages import install

    install(side)
    amiss, ran = {}, 0
    for name, function, given, settings, expected in good():
        found = kernel(function)(*[tg.tensor(a) for a in given], **settings)
        arrays = [f.numpy() for f in (found if isinstance(found, tuple) else (found,))]
        ran += 1
        for got, want in zip(arrays, expected):
            if not np.array_equal(got, want):
                amiss[name] = f"{got} is not {want}"
    for case in run():
        ran += 1
        if why := refused(case):
            amiss[case.name] = why
    print(json.dumps({"ran": ran, "amiss": amiss}))


if __name__ == "__main__":
    main(sys.argv[1])

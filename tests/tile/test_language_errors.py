"""Mistakes in kernels: each is a UserError that names the user's own line."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import tilegrad as tg
from tilegrad import kernel, tile

X = tg.tensor(np.zeros((4, 8), np.float32))


def shapes(x):
    tile.grid(1)
    a = tile.load(x, (0, 0), (4, 8))
    b = a + tile.arange(5)  # here
    tile.store(tile.result((4, 8)), (0, 0), b)


def unknown_name(x):
    tile.grid(1)
    a = tile.load(x, (0, 0), (4, 8))
    tile.sotre(tile.result((4, 8)), (0, 0), a)  # here


def symbolic_shape(x):
    i = tile.grid(4)
    a = tile.zeros((i + 1,))  # here
    tile.store(tile.result((4,)), (0,), a)


def open_slice(x):
    i = tile.grid(4)
    a = x[0, i:8] + 1.0  # here
    tile.store(tile.result((8,)), (0,), a)


def wrong_dot(x):
    tile.grid(1)
    a = tile.load(x, (0, 0), (4, 8))
    tile.store(tile.result((4, 4)), (0, 0), tile.dot(a, a))  # here


def stores_to_argument(x):
    tile.grid(1)
    tile.store(x, (0, 0), tile.zeros((4, 8)))  # here


def undefined_variable(x):
    tile.grid(1)
    for j in tile.range(4):
        last = tile.load(x, (j, 0), (8,))
    tile.store(tile.result((8,)), (0,), last)  # here


def set_in_one_branch(x):
    i = tile.grid(4)
    if i == 2:
        value = tile.load(x, (i, 0))
    tile.store(tile.result((4,)), (i,), value)  # here


def changes_dtype(x):
    tile.grid(1)
    total = tile.zeros((8,), tile.f16)
    for j in tile.range(4):  # here
        total = total + tile.load(x, (j, 0), (8,))
    tile.store(tile.result((8,)), (0,), total)


def early_return(x):
    tile.grid(1)
    for j in tile.range(4):  # here
        if j == 2:
            return


def python_condition(x):
    tile.grid(1)
    a = tile.load(x, (0, 0), (8,))
    b = a if a > 0 else -a  # here
    tile.store(tile.result((8,)), (0,), b)


def whole_tile_condition(x):
    tile.grid(1)
    a = tile.load(x, (0, 0), (8,))
    if a > 0:  # here
        a = -a
    tile.store(tile.result((8,)), (0,), a)


def indices(x):
    i = tile.grid(4)
    tile.store(tile.result((4,)), (i,), tile.load(x, (i,)))  # here


def mask_shape(x):
    tile.grid(1)
    a = tile.load(x, (0, 0), (4, 8), mask=tile.arange(4) < 2)  # here
    tile.store(tile.result((4, 8)), (0, 0), a)


def axis(x):
    tile.grid(1)
    a = tile.load(x, (0, 0), (4, 8))
    tile.store(tile.result((8,)), (0,), tile.sum(a, 2))  # here


def two_grids(x):
    tile.grid(1)
    tile.grid(2)  # here


def cut_partial(x):
    tile.grid(1)
    a = tile.load(x, (0, 0), (4, 16))
    b = tile.reshape(a, (64,))  # here
    tile.store(tile.result((64,)), (0,), b)


def different_ends(x):
    tile.grid(1)
    a, b = tile.load(x, (0, 0), (16,)), tile.load(x, (0, 4), (16,))
    tile.store(tile.result((16,)), (0,), a + b)  # here


def result_in_loop(x):
    tile.grid(1)
    for j in tile.range(4):
        out = tile.result((4,))  # here
        tile.store(out, (j,), 1.0)


def an_array_is_no_tile(x):
    tile.grid(1)
    tile.store(tile.result((4, 8)), (0, 0), tile.exp(x))  # here


def atomic_on_half(x):
    tile.grid(1)
    out = tile.result((4,), tile.f16, fill=0)
    tile.atomic_add(out, tile.arange(4), 1.0)  # here


def loops_over_index(x):
    i = tile.grid(4)
    for _ in range(i):  # here
        pass


def leaks_from_loop(x):
    tile.grid(1)
    kept = []
    for j in tile.range(4):
        kept.append(tile.load(x, (j, 0), (8,)))
    tile.store(tile.result((8,)), (0,), kept[0])  # here


def leaks_from_role(x):
    tile.grid(1)
    with tile.role("one", warps=4):
        a = tile.load(x, (0, 0), (8,))
    tile.store(tile.result((8,)), (0,), a)  # here


def moving_end_leaves_branch(x):
    i = tile.grid(4)
    a = tile.zeros((8,))
    if i == 2:  # here
        a = tile.load(x, (0, tile.load(x, (0, 0)).to("int32")), (8,))
    tile.store(tile.result((8,)), (0,), a)


def no_result(x):
    tile.grid(1)


CASES = {
    shapes: (tg.ShapeError, r"do not fit.*\(4, 8\) and \(5,\)"),
    unknown_name: (AttributeError, "sotre"),
    symbolic_shape: (tg.ShapeError, "not static"),
    open_slice: (tg.ShapeError, "not a static integer"),
    wrong_dot: (tg.ShapeError, "do not multiply"),
    stores_to_argument: (tg.TraceError, "only read"),
    undefined_variable: (tg.UserError, "'last' is set only inside the loop"),
    set_in_one_branch: (tg.UserError, "'value' is set in only one branch"),
    changes_dtype: (tg.ShapeError, "changes the type of 'total'"),
    early_return: (tg.TraceError, "cannot be left early"),
    python_condition: (tg.TraceError, "no value while the kernel is traced"),
    whole_tile_condition: (tg.DTypeError, "not a scalar"),
    indices: (tg.ShapeError, "1 indices for x"),
    mask_shape: (tg.ShapeError, "do not fit"),
    axis: (tg.AxisError, "no such axis"),
    two_grids: (tg.TraceError, "declared twice"),
    cut_partial: (tg.ShapeError, "cannot be cut up"),
    different_ends: (tg.ShapeError, "end in different places"),
    result_in_loop: (tg.TraceError, "inside a loop"),
    an_array_is_no_tile: (tg.DTypeError, "not a tile"),
    atomic_on_half: (tg.DTypeError, "no atomic"),
    loops_over_index: (tg.TraceError, "known only when the kernel runs"),
    leaks_from_loop: (tg.UserError, r"made in a loop[^\n]*\(j\) is used after it"),
    leaks_from_role: (tg.UserError, r"made in a[^\n]*role \(one\) is used after it"),
    moving_end_leaves_branch: (tg.ShapeError, "'a' carries a partial tile whose end moves"),
    no_result: (tg.UserError, "has no result"),
}


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_mistakes(function):
    kind, message = CASES[function]
    with pytest.raises(kind, match=f"(?s){message}") as caught:
        kernel(function).interpret(X)
    lines, first = inspect.getsourcelines(function)
    marked = [first + i for i, line in enumerate(lines) if "# here" in line]
    if marked and isinstance(caught.value, tg.UserError):
        assert caught.value.location.file == __file__
        assert caught.value.location.line == marked[0]
    if isinstance(caught.value, AttributeError):
        assert caught.traceback[-2].lineno + 1 == marked[0]


def test_language_outside_of_a_kernel():
    with pytest.raises(tg.TraceError, match="outside of a kernel"):
        tile.zeros((4,))
    with pytest.raises(tg.TraceError, match="outside of a kernel"):
        tile.function(lambda x: x)(1)


def test_bad_definitions():
    with pytest.raises(tg.DTypeError, match="only a Python function"):
        kernel(3)
    with pytest.raises(tg.UserError, match="names all of its arguments"):
        kernel(lambda *xs: None)
    with pytest.raises(tg.UserError, match="do not fit"):
        kernel(shapes)(X, X)
    space: dict = {}
    exec("def hidden(x):\n    pass", space)
    with pytest.raises(tg.UserError, match="source of the kernel cannot be read"):
        kernel(space["hidden"])(X)

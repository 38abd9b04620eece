"""Subscripts, gather and scatter, masks, sorting and searching against torch."""

from __future__ import annotations

import numpy as np
import pytest
from torch_tables import compare, data, torch

import tilegrad as tg

KEYS = {
    "int": lambda m: 1,
    "negative": lambda m: -1,
    "two": lambda m: (0, 2),
    "all ints": lambda m: (1, -2, 3),
    "slice": lambda m: slice(1, None),
    "steps": lambda m: (slice(None), slice(None, None, 2), slice(1, 4, 2)),
    "negative bounds": lambda m: (slice(-2, None), slice(-3, -1)),
    "beyond": lambda m: slice(1, 100),
    "empty": lambda m: slice(2, 1),
    "dots": lambda m: (Ellipsis, 0),
    "dots middle": lambda m: (0, Ellipsis, slice(1, 3)),
    "new": lambda m: (None, slice(None), None),
    "new and int": lambda m: (0, None, slice(1, 2)),
    "list": lambda m: [1, 0, 1],
    "tensor": lambda m: m.tensor([[0, 1], [1, 0]]),
    "negative tensor": lambda m: m.tensor([-1, 0]),
    "second": lambda m: (slice(None), [2, 0]),
    "last": lambda m: (Ellipsis, m.tensor([3, 1])),
    "pair": lambda m: ([0, 1], [2, 0]),
    "broadcast pair": lambda m: (m.tensor([[0], [1]]), m.tensor([0, 2])),
    "apart": lambda m: ([0, 1], slice(None), [1, 2]),
    "int and tensor": lambda m: (0, slice(None), m.tensor([1, 2])),
    "tensor and int": lambda m: (m.tensor([0, 1]), slice(None), 1),
    "tensor, new, tensor": lambda m: (m.tensor([0, 1]), None, m.tensor([2, 0])),
    "three": lambda m: ([0, 1], [0, 1], [0, 1]),
    "slice then pair": lambda m: (slice(0, 1), [0, 2], [1, 3]),
    "scalar tensor": lambda m: m.tensor(1),
    "scalar array": lambda m: np.array(-1),
    "scalar array and list": lambda m: (np.array(1, np.int8), slice(None), [0, 2]),
    "int32": lambda m: m.tensor([1], dtype=m.int32),
    "scalar tensors": lambda m: (m.tensor(0), slice(None), m.tensor(2)),
    "scalar and line": lambda m: (m.tensor(0), slice(None), m.tensor([2, 1])),
    "no index": lambda m: (),
    "empty list": lambda m: [],
    "reordered": lambda m: (slice(None), m.tensor([[2, 1]]), slice(1, 3)),
}
MASKS = {
    "mask": lambda m, x: x > 0,
    "mask of axis": lambda m, x: m.tensor([True, False]),
    "mask second": lambda m, x: (slice(None), m.tensor([True, False, True])),
    "mask of two": lambda m, x: x[..., 0] > 0,
    "mask and int": lambda m, x: (x[:, 0, 0] > -9, 1),
    "list mask": lambda m, x: [True, False],
    "none true": lambda m, x: x > 99,
    "mask last": lambda m, x: (Ellipsis, m.tensor([True, False, True, False])),
    "mask and list": lambda m, x: (m.tensor([True, True]), [0, 1]),
    "mask slice": lambda m, x: (m.tensor([False, True]), slice(1, None)),
}


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool", "bfloat16"])
def test_getitem(dtype):
    x = data(dtype, (2, 3, 4))
    compare([(n, lambda m, x, k=k: x[k(m)]) for n, k in KEYS.items()], x)
    if dtype != "bool":
        compare([(n, lambda m, x, k=k: x[k(m, x)]) for n, k in MASKS.items()], x)
    compare([("true", lambda m, x: [x[True], x[False], x[None, True]])], x)


def test_negative_steps_as_in_numpy():
    array = np.arange(24).reshape(2, 3, 4)
    x = tg.from_numpy(array)
    for key in (
        (slice(None, None, -1),),
        (0, slice(None, None, -2)),
        (Ellipsis, slice(3, 0, -2)),
        (slice(None), slice(0, 2, -1)),
    ):
        assert np.array_equal(x[key].numpy(), array[key]), key
    changed = array.copy()
    changed[0, ::-1, 3:0:-2] = np.arange(6).reshape(3, 2)
    x[0, ::-1, 3:0:-2] = tg.arange(6).reshape(3, 2)
    assert np.array_equal(x.numpy(), changed)


def assigned(key, value):
    def run(m, x):
        y = x.clone()
        place = key(m)
        y[place] = value(m, y[place])
        return y

    return run


VALUES = {
    "number": lambda m, part: 7,
    "same": lambda m, part: part + 1,
    "row": lambda m, part: m.ones(part.shape[-1:] or (1,), dtype=part.dtype) * 3,
    "float": lambda m, part: 1.5,
}


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_setitem(dtype, value):
    # a place named twice has no defined winner in torch
    skip = ("list", "tensor") if value == "same" else ()
    if value == "row":
        skip = ("all ints", "empty list")
    compare(
        [(n, assigned(k, VALUES[value])) for n, k in KEYS.items()],
        data(dtype, (2, 3, 4)),
        skip=skip,
    )


def masked(key, value):
    def run(m, x):
        y = x.clone()
        place = key(m, x)
        y[place] = value(m, x[place])
        return y

    return run


@pytest.mark.parametrize("value", ["number", "same", "float"])
def test_setitem_with_masks(value):
    compare([(n, masked(k, VALUES[value])) for n, k in MASKS.items()], data("float32", (2, 3, 4)))


def test_mask_assignment_of_rows():
    def rows(m, x):
        y = x.clone()
        y[x[:, 0] > 0] = m.arange(4.0)
        z = x.clone()
        z[x > 0] = 2 * x[x > 0]
        return [y, z]

    compare([("rows", rows)], data("float32", (5, 4)))
    x = tg.zeros(3)
    with pytest.raises(tg.ShapeError, match="as many values as true elements"):
        x[tg.tensor([True, True, False]).realize()] = tg.ones(3)


def test_assignment_reads_old_values():
    x = tg.arange(4)
    y = x
    x[1:] = x[:-1]
    assert x.tolist() == [0, 0, 1, 2] and y is x
    x[0] += 10
    assert x.tolist() == [10, 0, 1, 2]


@pytest.mark.parametrize("dtype", ["float32", "int64", "bfloat16"])
def test_gather_and_scatter(dtype):
    x, src = data(dtype, (3, 5)), data(dtype, (3, 5), 1)
    index = torch.tensor([[0, 2, 1, 0, 2], [2, 1, 0, 1, 1]])
    once = torch.tensor([[0, 2, 1, 0, 2], [2, 1, 0, 1, 1], [1, 0, 2, 2, 0]])
    compare(
        [
            ("gather", lambda m, x, s, i, o: [m.gather(x, 0, i), x.gather(1, i[:, :2])]),
            ("take_along_dim", lambda m, x, s, i, o: m.take_along_dim(x, i[:1], dim=0)),
            ("take_along flat", lambda m, x, s, i, o: m.take_along_dim(x, i)),
            ("scatter", lambda m, x, s, i, o: x.scatter(0, o, s)),
            ("scatter part", lambda m, x, s, i, o: m.scatter(x, 1, o[:, 2:4], s[:, 1:4])),
            ("scatter value", lambda m, x, s, i, o: x.scatter(0, i, 2)),
            ("scatter_add", lambda m, x, s, i, o: x.scatter_add(0, i, s)),
            (
                "index_select",
                lambda m, x, s, i, o: [m.index_select(x, 1, i[0]), x.index_select(0, o[0, :2])],
            ),
            ("index_add", lambda m, x, s, i, o: x.index_add(0, i[0, :3], s)),
            ("index_copy", lambda m, x, s, i, o: x.index_copy(0, o[0, :3], s)),
            ("index_fill", lambda m, x, s, i, o: x.index_fill(1, i[0], 3)),
            ("take", lambda m, x, s, i, o: m.take(x, i * 2)),
            (
                "masked_fill",
                lambda m, x, s, i, o: [x.masked_fill(s > 0, 5), x.masked_fill(s[0] > 0, 1)],
            ),
            ("masked_select", lambda m, x, s, i, o: m.masked_select(x, s > 0)),
            ("masked_scatter", lambda m, x, s, i, o: x.masked_scatter(x > 0, s)),
            (
                "put",
                lambda m, x, s, i, o: (
                    [m.Tensor.put(x, o[0, :2], s[0, :2])]
                    if m is tg
                    else [x.clone().put_(o[0, :2], s[0, :2])]
                ),
            ),
        ],
        x,
        src,
        index,
        once,
    )


@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
def test_scatter_reduce(reduce):
    x, src = data("float32", (3, 5)), data("float32", (3, 5), 1)
    index = torch.tensor([[0, 2, 1, 0, 2], [2, 1, 0, 1, 1], [0, 0, 0, 0, 0]])
    compare(
        [
            ("self", lambda m, x, s, i: x.scatter_reduce(0, i, s, reduce)),
            ("without", lambda m, x, s, i: x.scatter_reduce(1, i, s, reduce, include_self=False)),
        ],
        x,
        src,
        index,
    )


@pytest.mark.parametrize("dtype", ["float32", "int64", "bfloat16", "uint8"])
def test_sorting(dtype):
    x = torch.from_numpy(np.random.default_rng(3).permutation(60).reshape(3, 4, 5))
    x = x.to(getattr(torch, dtype))  # no ties: torch leaves their order open
    compare(
        [
            ("sort", lambda m, x: [*m.sort(x), *x.sort(0), *m.sort(x, 1, descending=True)]),
            ("argsort", lambda m, x: [m.argsort(x, -1), x.argsort(0, descending=True)]),
            ("topk", lambda m, x: [*m.topk(x, 2), *x.topk(3, 1), *m.topk(x, 2, 0, largest=False)]),
            ("msort", lambda m, x: m.msort(x)),
        ],
        x,
    )


def test_sort_is_stable_and_puts_nan_last():
    x = torch.tensor([1.0, 0.0, 1.0, float("nan"), 0.0, -1.0])
    compare(
        [
            ("up", lambda m, x: m.sort(x, stable=True)),
            ("down", lambda m, x: m.sort(x, descending=True, stable=True)),
        ],
        x,
    )


def test_searching():
    row, wanted = torch.tensor([1.0, 2.0, 2.0, 4.0, 8.0]), data("float32", (3, 4), 0, 0, 9)
    compare(
        [
            ("left", lambda m, r, w: [m.searchsorted(r, w), m.searchsorted(r, r)]),
            ("right", lambda m, r, w: m.searchsorted(r, r, right=True)),
            ("side", lambda m, r, w: m.searchsorted(r, w, side="right", out_int32=True)),
            ("bucketize", lambda m, r, w: m.bucketize(w, r)),
            ("rows", lambda m, r, w: m.searchsorted(m.stack([r, r, r * 2]), w)),
        ],
        row,
        wanted,
    )


def test_counting():
    x, weights = torch.tensor([1, 3, 1, 0, 5]), torch.tensor([0.5, 1.0, 2.0, 1.0, 1.0])
    compare(
        [
            ("bincount", lambda m, x, w: [m.bincount(x), m.bincount(x, minlength=9)]),
            ("weights", lambda m, x, w: m.bincount(x, weights=w)),
            ("unique", lambda m, x, w: m.unique(x)),
            ("unique all", lambda m, x, w: m.unique(x, return_inverse=True, return_counts=True)),
            ("unique of one", lambda m, x, w: m.unique(x[1], return_inverse=True)),
            ("unique dim", lambda m, x, w: m.unique(m.stack([x, x * 0, x]), dim=0)),
            ("nonzero", lambda m, x, w: [m.nonzero(x), *m.nonzero(x > 1, as_tuple=True)]),
            ("argwhere", lambda m, x, w: m.argwhere(m.stack([x, x - 1]))),
            ("where", lambda m, x, w: m.where(x > 1)),
            ("isin", lambda m, x, w: m.isin(x, m.tensor([1, 5]))),
        ],
        x,
        weights,
    )


def test_in_place_forms():
    x = tg.zeros(3)
    x.scatter_add_(0, tg.tensor([0, 0, 2]), tg.ones(3))
    x.masked_fill_(tg.tensor([False, True, False]), 9)
    assert x.tolist() == [2.0, 9.0, 1.0]


@pytest.mark.parametrize("read", [False, True])
def test_scatters_of_overlapping_views_write_one_element(read: bool) -> None:
    """Windows share what they were made of; a copy of them shares nothing."""
    numbers = np.arange(16, dtype=np.float32)
    windows = tg.tensor(numbers).unfold(-1, 6, 2)
    if read:
        windows.realize()
    plain = np.lib.stride_tricks.sliding_window_view(numbers, 6)[::2]
    for found, place, values in (
        (tg.select_scatter(windows, windows[:, 0] * 2, 1, 5), np.s_[:, 5], plain[:, 0] * 2),
        (tg.slice_scatter(windows, windows[:, :2] + 1, 1, 3, 5), np.s_[:, 3:5], plain[:, :2] + 1),
        (tg.diagonal_scatter(windows, windows[0] - 1), np.s_[range(6), range(6)], plain[0] - 1),
    ):
        expected = plain.copy()
        expected[place] = values
        np.testing.assert_array_equal(found.numpy(), expected)

"""Indices out of range are errors of every op that takes them, wherever their values come from.

Each row runs with indices that are in range, one too large and one too small, lazy, jitted, mapped,
in a loop and under a derivative; PyTorch refuses what is refused here. What a Graph proves to be in
range is not checked when it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from torch_peer import torch

import tilegrad as tg
from tilegrad.compiler import compile as compiler
from tilegrad.compiler.explain import explain_graph
from tilegrad.core.errors import AxisError
from tilegrad.core.target import H200
from tilegrad.graph import build
from tilegrad.graph.interpret import interpret
from tilegrad.graph.ranges import range_of, surely_inside
from tilegrad.ir.fingerprint import UserLine, structure
from tilegrad.ir.symbol import symbol
from tilegrad.nn import functional as F
from tilegrad.tile.build import body_sites

TABLE = np.arange(15, dtype=np.float32).reshape(5, 3)


class Row(NamedTuple):
    """function(x, index), and the same in PyTorch; 0..size-1 are good, and `from_end` -size..-1 too
    (also in some functions where PyTorch refuses those)."""

    name: str
    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    size: int = 5
    from_end: bool = True


def put(x: Any, index: Any, clone: Any) -> Any:
    y = clone(x)
    y[index] = 7.0
    return y


T = torch
ROWS = [
    Row("embedding", lambda x, i: tg.embedding(i, x), lambda x, i: T.embedding(x, i),
        from_end=False),
    Row("x[i]", lambda x, i: x[i], lambda x, i: x[i]),
    Row("x[:, i]", lambda x, i: x[:, i], lambda x, i: x[:, i], 3),
    Row("x[i, i]", lambda x, i: x[i, i], lambda x, i: x[i, i], 3),
    Row("x[i] = 7", lambda x, i: put(x, i, lambda x: x + 0),
        lambda x, i: put(x, i, T.clone)),
    Row("take", lambda x, i: x.take(i), lambda x, i: x.take(i), 15),
    Row("index_select", lambda x, i: x.index_select(0, i), lambda x, i: x.index_select(0, i)),
    Row("gather", lambda x, i: x.gather(0, i.reshape(2, 1)),
        lambda x, i: x.gather(0, i.reshape(2, 1))),
    Row("take_along_dim", lambda x, i: x.take_along_dim(i.reshape(2, 1), 0),
        lambda x, i: x.take_along_dim(i.reshape(2, 1), 0)),
    Row("scatter", lambda x, i: x.scatter(0, i.reshape(2, 1), 1.0),
        lambda x, i: x.scatter(0, i.reshape(2, 1), 1.0)),
    Row("scatter_add", lambda x, i: x.scatter_add(0, i.reshape(2, 1), tg.ones(2, 1)),
        lambda x, i: x.scatter_add(0, i.reshape(2, 1), T.ones(2, 1))),
    Row("scatter_reduce", lambda x, i: x.scatter_reduce(0, i.reshape(2, 1), tg.ones(2, 1), "amax"),
        lambda x, i: x.scatter_reduce(0, i.reshape(2, 1), T.ones(2, 1), "amax")),
    Row("index_add", lambda x, i: x.index_add(0, i, tg.ones(2, 3)),
        lambda x, i: x.index_add(0, i, T.ones(2, 3))),
    Row("index_copy", lambda x, i: x.index_copy(0, i, tg.ones(2, 3)),
        lambda x, i: x.index_copy(0, i, T.ones(2, 3))),
    Row("index_fill", lambda x, i: x.index_fill(0, i, 2.0), lambda x, i: x.index_fill(0, i, 2.0)),
    Row("put", lambda x, i: x.put(i, tg.ones(2)), lambda x, i: x.put(i, T.ones(2)), 15),
    Row("one_hot", lambda x, i: x.sum() * tg.one_hot(i, 5),
        lambda x, i: x.sum() * T.nn.functional.one_hot(i, 5), from_end=False),
    Row("cross_entropy", lambda x, i: F.cross_entropy(x[:2], i),
        lambda x, i: T.nn.functional.cross_entropy(x[:2], i), 3, False),
    Row("cross_entropy, weights", lambda x, i: F.cross_entropy(x[:2], i, tg.ones(3) * 2),
        lambda x, i: T.nn.functional.cross_entropy(x[:2], i, T.ones(3) * 2), 3, False),
    Row("cross_entropy, smoothed", lambda x, i: F.cross_entropy(x[:2], i, label_smoothing=0.1),
        lambda x, i: T.nn.functional.cross_entropy(x[:2], i, label_smoothing=0.1), 3, False),
    Row("nll_loss", lambda x, i: F.nll_loss(x[:2], i),
        lambda x, i: T.nn.functional.nll_loss(x[:2], i), 3, False),
    Row("multi_margin_loss", lambda x, i: F.multi_margin_loss(x[:2], i),
        lambda x, i: T.nn.functional.multi_margin_loss(x[:2], i), 3, False),
]  # fmt: skip

WAYS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "known": lambda f: f,
    "lazy": lambda f: lambda x, i: f(x, i + 0),
    "jit": lambda f: tg.jit(lambda x, i: f(x, i)),
    "grad": lambda f: tg.jit(lambda x, i: tg.grad(lambda x: (f(x, i) ** 2).sum())(x)),
}


def indices(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("row", ROWS, ids=[r.name for r in ROWS])
def test_out_of_range_is_an_error(row: Row, way: str) -> None:
    run = WAYS[way](row.ours)
    if way == "grad" and row.name == "one_hot":
        return  # nothing of the index is left in the derivative
    good = indices(0, row.size - 1)
    got = run(tg.tensor(TABLE), tg.tensor(good)).numpy()
    if way != "grad":
        wanted = row.theirs(torch.tensor(TABLE), torch.tensor(good)).numpy()
        np.testing.assert_allclose(got, wanted, 1e-5)
    for wrong in (row.size, -row.size - 1 if row.from_end else -1, 1 << 40, -(1 << 40)):
        bad = indices(0, wrong)
        if row.name != "take_along_dim":  # PyTorch takes them modulo the size
            with pytest.raises((IndexError, RuntimeError)):
                row.theirs(torch.tensor(TABLE), torch.tensor(bad))
        with pytest.raises(AxisError, match="out of range") as caught:
            run(tg.tensor(TABLE), tg.tensor(bad)).numpy()
        assert Path(caught.value.location.file).name == Path(__file__).name  # type: ignore[union-attr]
    again = run(tg.tensor(TABLE), tg.tensor(good)).numpy()  # an error leaves nothing behind
    np.testing.assert_array_equal(again, got)


def test_ignored_targets_are_no_classes() -> None:
    x, t = tg.tensor(TABLE[:3]), indices(0, -100, 2)
    for ours, theirs in (
        (F.cross_entropy, T.nn.functional.cross_entropy),
        (F.nll_loss, T.nn.functional.nll_loss),
    ):
        wanted = theirs(torch.tensor(TABLE[:3]), torch.tensor(t)).numpy()
        np.testing.assert_allclose(ours(x, tg.tensor(t)).numpy(), wanted, 1e-5)
        with pytest.raises(AxisError):
            ours(x, tg.tensor(t), ignore_index=-1).numpy()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda f: tg.jit(lambda x, i: tg.vmap(lambda i: f(x, i))(i)),
        lambda f: tg.jit(lambda x, i: tg.scan(lambda c, i: (c, f(x, i)), tg.ones(()), i)[1]),
        lambda f: tg.jit(lambda x, i: tg.cond(i[0] == 0, lambda: f(x, i[1]), lambda: x[0])),
        lambda f: tg.jit(lambda x, i: tg.jvp(lambda x: f(x, i), (x,), (x,))[1]),
        lambda f: tg.jit(lambda x, i: tg.checkpoint(lambda x: f(x, i))(x)),
    ],
    ids=["vmap", "scan", "cond", "jvp", "checkpoint"],
)
def test_transforms_keep_the_check(wrap: Callable[..., Any]) -> None:
    run = wrap(lambda x, i: x[i] * 2)
    run(tg.tensor(TABLE), tg.tensor(indices(0, 4))).numpy()
    with pytest.raises(AxisError, match="-5 <= index < 5"):
        run(tg.tensor(TABLE), tg.tensor(indices(0, 5))).numpy()


def test_op_by_op_and_interpreted() -> None:
    with tg.override(eager_debug=True), pytest.raises(AxisError, match="0 <= index < 5"):
        (tg.embedding(tg.tensor(indices(5)) + 0, tg.tensor(TABLE)) + 1).numpy()
    index = build.input_((2,), tg.int64)
    node = build.in_range(index, 5, "here")
    np.testing.assert_array_equal(interpret([node], {index: indices(0, 4)})[0], [0, 4])
    with pytest.raises(AxisError, match="here: an index is out of range"):
        interpret([node], {index: indices(0, 5)})


def test_an_empty_table_has_no_rows() -> None:
    empty = tg.zeros(0, 3)
    with pytest.raises(AxisError):
        tg.embedding(tg.tensor(indices(0)) + 0, empty).numpy()
    assert tg.embedding(tg.zeros(0).long() + 0, empty).shape == (0, 3)
    with pytest.raises(AxisError):
        tg.jit(lambda x, i: x[i])(empty, tg.tensor(indices(0)))


def test_state_is_whole_after_an_error() -> None:
    """A step that meets a bad index is done to its end, as on a GPU, and then it is an error."""

    class Counts:
        def __init__(self) -> None:
            self.table, self.steps = tg.tensor(TABLE) + 0, tg.zeros(())

        def tensors(self) -> dict[str, tg.Tensor]:
            return {"table": self.table, "steps": self.steps}

    @tg.jit
    def step(counts: Counts, index: tg.Tensor) -> tg.Tensor:
        counts.table.assign(counts.table.index_add(0, index, tg.ones(2, 3)))
        counts.steps.assign(counts.steps + 1)
        return counts.table.sum()

    counts = Counts()
    with pytest.raises(AxisError, match="index_add"):
        step(counts, tg.tensor(indices(0, 9)))
    wanted = TABLE.copy()
    wanted[0] += 1
    np.testing.assert_array_equal(counts.table.numpy(), wanted)
    step(counts, tg.tensor(indices(0, 4)))
    assert counts.steps.item() == 2


# ---- what is not checked ---------------------------------------------------------------------


def sites(function: Callable[..., Any], *arrays: np.ndarray, target: Any = None) -> int:
    """How many conditions the programs of a function have."""
    lowered = tg.jit(function).lower(*map(tg.tensor, arrays))
    found = explain_graph(lowered.inputs, lowered.outputs, target=target)
    return sum(len(body_sites(p.body)) for p in found.programs)


X = np.ones((6, 8), np.float32)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.topk(3).values,
        lambda x: x.kthvalue(2).values,
        lambda x: x.median(1).values,
        lambda x: x.take_along_dim(x.argsort(1), 1),
        lambda x: x[tg.arange(3)],
        lambda x: x.gather(1, x.argmax(1).unsqueeze(1)),
        lambda x: x[x.long().clamp(0, 5)[:, 0]],
        lambda x: x[(x.long() % 6)[:, 0]],
        lambda x: x[:, x.argmax(1)],
        lambda x: x.roll(2, 0),
        lambda x: tg.one_hot(x.argmax(1), 8),
        lambda x: F.cross_entropy(x, x.argmax(1)),
        lambda x: tg.searchsorted(x[0], x[1]),
        lambda x: x.scatter(1, x.argsort(1), 1.0),
    ],
    ids=range(14),
)
def test_what_the_graph_proves_is_not_checked(function: Callable[..., Any]) -> None:
    assert sites(function, X) == 0


def test_one_check_for_one_index() -> None:
    ids, table = np.zeros(256, np.int64), np.ones((50, 8), np.float32)
    for target in (None, H200):
        assert sites(lambda i, w: tg.embedding(i, w), ids, table, target=target) == 1
        assert sites(lambda x, t: F.cross_entropy(x, t), table[:6], ids[:6], target=target) == 1


def test_the_check_of_a_gather_on_a_gpu_is_a_compare_and_a_store() -> None:
    ids, table = np.zeros(256, np.int64), np.ones((50, 64), np.float32)
    lowered = tg.jit(lambda i, w: tg.embedding(i, w)).lower(tg.tensor(ids), tg.tensor(table))
    (program,) = explain_graph(lowered.inputs, lowered.outputs, target=H200).programs
    lines = program.text.splitlines()
    assert len([x for x in lines if "st.relaxed.sys" in x and "@!" in x]) == 1
    assert not [x for x in lines if "bar." in x or "atom" in x or "membar" in x or "fence" in x]


# ---- ranges and lines ------------------------------------------------------------------------


def test_ranges() -> None:
    size = symbol("N", 1, 64)
    x = build.input_((size, 4), tg.int64)
    line = build.iota(size)
    assert surely_inside(line, size) and not surely_inside(line, 63) and surely_inside(line, 64)
    assert surely_inside(build.cast(line, tg.int32), size)
    assert surely_inside(build.minimum(build.maximum(x, 0), 5), 6)
    assert not surely_inside(build.minimum(x, 5), 6)
    assert not surely_inside(build.cast(build.add(line, 200), tg.uint8), 255)  # may wrap
    assert range_of(build.subtract(build.iota(4), 3)) == (-3, 0)
    assert range_of(build.cast(x, tg.uint8)) == (0, 255)
    assert range_of(x) is None


def test_lines_are_in_the_key_of_memory_and_not_of_the_disk() -> None:
    def made(place: str) -> Any:
        index = build.input_((2,), tg.int64)
        node = tg.graph.ops.in_range(index, size=5, message="m", place=UserLine(place))
        return (index,), (build.add(node, 1),)

    first, other = made("a.py:1"), made("b.py:2")
    assert structure(*first) != structure(*other)
    lines: dict[UserLine, int] = {}
    assert structure(*first, lines) == structure(*other, {}) and list(lines) == ["a.py:1"]
    compiler.executable_for(*first)
    before = dict(compiler.counters)
    recipe = compiler.executable_for(*other).recipe
    assert compiler.counters["compiled"] == before["compiled"]
    assert [s.location for part in recipe.sites for s in part] == ["b.py:2"] == recipe.lines


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("way", ["jit", "vmap"])
def test_a_table_of_one_value_is_indexed_too(row: Row, way: str) -> None:
    """What is read is known, and yet there is nothing to read."""

    def read(index: Any) -> Any:
        return row.ours(tg.ones(*TABLE.shape), index)

    run = tg.jit(read) if way == "jit" else tg.jit(tg.vmap(read))
    good = np.zeros((2, 2), np.int64) if way == "vmap" else np.zeros(2, np.int64)
    run(tg.tensor(good)).numpy()
    for bad in (row.size, -row.size - 1):
        wrong = good.copy()
        wrong[..., -1] = bad
        with pytest.raises(AxisError):
            run(tg.tensor(wrong)).numpy()

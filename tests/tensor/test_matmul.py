"""Products that contract axes, and einsum, against torch."""

from __future__ import annotations

import pytest
from torch_tables import FLOATS, compare, data

import tilegrad as tg

SHAPES = [
    ((3, 4), (4, 5)),
    ((4,), (4,)),
    ((3, 4), (4,)),
    ((4,), (4, 5)),
    ((2, 3, 4), (4, 5)),
    ((2, 3, 4), (2, 4, 5)),
    ((2, 1, 3, 4), (3, 4, 2)),
    ((3, 0), (0, 2)),
    ((0, 4), (4, 2)),
    ((1, 1), (1, 1)),
    ((2, 3, 4), (4,)),
    ((7, 17), (17, 3)),
]


@pytest.mark.parametrize("dtype", [*FLOATS, "int32", "int64"])
def test_matmul(dtype):
    for i, (a, b) in enumerate(SHAPES):
        compare(
            [(f"{a} @ {b}", lambda m, x, y: [x @ y, m.matmul(x, y)])],
            data(dtype, a, i),
            data(dtype, b, i + 50),
        )


@pytest.mark.parametrize("dtype", FLOATS)
def test_family(dtype):
    a, b, v = data(dtype, (3, 4)), data(dtype, (4, 5)), data(dtype, (4,))
    compare(
        [
            ("mm", lambda m, a, b, v: m.mm(a, b)),
            ("mv", lambda m, a, b, v: m.mv(a, v)),
            ("dot", lambda m, a, b, v: m.dot(v, v)),
            ("outer", lambda m, a, b, v: m.outer(v, a[0])),
            ("tensordot", lambda m, a, b, v: m.tensordot(a, b, 1)),
            ("tensordot axes", lambda m, a, b, v: m.tensordot(a, b, ([1], [0]))),
            ("inner", lambda m, a, b, v: m.inner(a, v)),
            ("kron", lambda m, a, b, v: m.kron(a, b)),
            ("addmm", lambda m, a, b, v: m.addmm(b[0], a, b)),
            ("linear", lambda m, a, b, v: _linear(m, a, b.t())),
            ("linear bias", lambda m, a, b, v: _linear(m, a, b.t(), b[1])),
        ],
        a,
        b,
        v,
    )
    x, y = data(dtype, (2, 3, 4)), data(dtype, (2, 4, 5))
    compare(
        [
            ("bmm", lambda m, x, y: m.bmm(x, y)),
            ("linear 3", lambda m, x, y: _linear(m, x, y[0].t(), y[0, 0])),
        ],
        x,
        y,
    )
    if dtype in ("float32", "float64"):
        compare(
            [
                ("baddbmm", lambda m, x, y: m.baddbmm(y[:, :3], x, y, beta=0.5, alpha=2)),
                ("tensordot 2", lambda m, x, y: m.tensordot(x, y, ([0, 2], [0, 1]))),
                ("bilinear", lambda m, x, y: _bilinear(m, x[0], y[0, :3], y, x[0, 0, :2])),
            ],
            x,
            y,
        )
        compare(
            [
                ("addmm scaled", lambda m, a, b, v: m.addmm(b[:3], a, b, beta=2, alpha=0.5)),
                ("addmv", lambda m, a, b, v: m.addmv(a[:, 0], a, v)),
            ],
            a,
            b,
            v,
        )


def _linear(m, *args):
    return m.linear(*args) if m is tg else m.nn.functional.linear(*args)


def _bilinear(m, a, b, weight, bias):
    return (m if m is tg else m.nn.functional).bilinear(a, b, weight, bias)


def test_torch_refuses_what_we_refuse():
    with pytest.raises(tg.DTypeError, match="the dtypes do not fit"):
        tg.ones(2, 2) @ tg.ones(2, 2, dtype=tg.float64)


EQUATIONS = [
    ("ij,jk->ik", (3, 4), (4, 5)), ("ij,jk", (3, 4), (4, 5)),
    ("bij,bjk->bik", (2, 3, 4), (2, 4, 5)),
    ("i,j->ij", (3,), (4,)), ("i,i->", (4,), (4,)), ("ij,ij->ij", (3, 4), (3, 4)),
    ("ij,ij->", (3, 4), (3, 4)), ("ij->ji", (3, 4)), ("ij->", (3, 4)), ("ij->j", (3, 4)),
    ("ii->i", (4, 4)), ("ii", (4, 4)), ("iij->ji", (3, 3, 4)), ("iii->i", (3, 3, 3)),
    ("...ij,...jk->...ik", (2, 3, 4), (2, 4, 5)), ("...ij,jk", (2, 3, 4), (4, 5)),
    ("...i->...", (2, 3, 4)), ("i...->...i", (2, 3, 4)), ("...,...->...", (2, 3), (3,)),
    ("bhqd,bhkd->bhqk", (2, 3, 4, 5), (2, 3, 6, 5)), ("ij,kj,lk->il", (3, 4), (5, 4), (2, 5)),
    ("a,ab,abc->bc", (2,), (2, 3), (2, 3, 4)), ("ab,bc,cd,de->ae", (2, 3), (3, 4), (4, 5), (5, 2)),
    ("ij,j->ij", (3, 4), (1,)), ("ba,ca->bc", (3, 4), (1, 4)), ("ij,kl->", (2, 3), (4, 5)),
    ("ij , jk -> ik", (3, 4), (4, 5)), ("ij,ik->ijk", (3, 4), (3, 5)), ("ii,ij->j", (3, 3), (3, 4)),
    ("i,->i", (3,), ()), ("zyx->xyz", (2, 3, 4)), ("Ab,bC->AC", (3, 4), (4, 5)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "int64"])
def test_einsum(dtype):
    two = [e for e in EQUATIONS if len(e) <= 3]
    for equation, *shapes in EQUATIONS if dtype == "float64" else two[:16]:
        inputs = [data(dtype, s, i) for i, s in enumerate(shapes)]
        compare([(equation, lambda m, *x, e=equation: m.einsum(e, *x))], *inputs)


def test_einsum_of_lists():
    a, b = tg.ones(2, 3), tg.ones(3, 4)
    assert tg.einsum(a, [0, 1], b, [1, 2], [0, 2]).tolist() == [[3.0] * 4] * 2
    assert tg.einsum("ij,jk->ik", [a, b]).shape == (2, 4)


def test_einsum_chooses_the_cheap_order():
    a, b, c = tg.ones(1, 50), tg.ones(50, 50), tg.ones(50, 50)
    node = tg.einsum("ij,jk,kl->il", a, b, c).node
    sizes = []
    stack = [node]
    while stack:
        found = stack.pop()
        if found.op.name == "dot":
            sizes.append(found.type.size)
        stack.extend(found.inputs)
    assert max(sizes) == 50


def test_numpy_on_the_left():
    import numpy as np

    assert (np.ones((2, 3), np.float32) @ tg.ones(3, 2)).tolist() == [[3.0, 3.0]] * 2

"""The placed level of the tile language: a warp-specialised matmul, its twin and its faults."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import tilegrad as tg
from tilegrad import kernel, tile
from tilegrad.tile.check import verify_body
from tilegrad.tile.interpret import run
from tilegrad.tile.text import body_text, parse_body

BLOCK, DEPTH = 16, 16


def box(x, row, step):
    """A block of rows, a step of columns."""
    row, column = row * BLOCK, step * DEPTH
    return x[row : row + BLOCK, column : column + DEPTH]


def pipelined(release: bool = True, parity: int = 0):
    """c = a @ b^T: a producer fills a ring of stages, one consumer multiplies."""

    @kernel
    def matmul(a, b, *, stages: int = 3):
        (m, k), n = a.shape, b.shape[0]
        i, j = tile.grid(m // BLOCK, n // BLOCK)
        out = tile.result((m, n), tile.f32)
        left = tile.shared((stages, BLOCK, DEPTH), a.dtype)
        right = tile.shared((stages, BLOCK, DEPTH), b.dtype)
        ring = tile.pipeline("ab", stages, consumers=1)
        with tile.role("producer", warps=4):
            tile.grid_dependency_wait()
            for s in tile.range(k // DEPTH):
                at = ring.stage(s)
                ring.acquire(s)
                ring.expect(s, 2 * BLOCK * DEPTH * 2)
                tile.copy_async(left[at], box(a, i, s), ring.full[at])
                tile.copy_async(right[at], box(b, j, s), ring.full[at])
        with tile.role("consumer", warps=4):
            tile.grid_dependency_wait()
            total = tile.register((BLOCK, BLOCK), tile.f32, fill=0.0)
            tile.matrix_fence()
            for s in tile.range(k // DEPTH):
                ring.wait(s + parity * stages)
                at = ring.stage(s)
                tile.matrix_async(total, left[at], right[at].T)
                tile.matrix_commit()
                tile.matrix_wait(0)
                if release:
                    ring.release(s)
            tile.store(out, (i * BLOCK, j * BLOCK), tile.read(total))

    return matmul


def operands():
    random = np.random.default_rng(3)
    return [random.standard_normal((32, 128)).astype(ml_dtypes.bfloat16) for _ in "ab"]


@kernel
def twin(a, b):
    """The same product at the portable level."""
    (m, k), n = a.shape, b.shape[0]
    i, j = tile.grid(m // BLOCK, n // BLOCK)
    total = tile.zeros((BLOCK, BLOCK))
    for s in tile.range(0, k, DEPTH):
        right = tile.load(b, (j * BLOCK, s), (BLOCK, DEPTH))
        total = tile.dot(tile.load(a, (i * BLOCK, s), (BLOCK, DEPTH)), right.T, total)
    tile.store(tile.result((m, n)), (i * BLOCK, j * BLOCK), total)


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_roles_agree_with_the_portable_twin(seed):
    a, b = operands()
    (body,) = pipelined().lower(tg.tensor(a), tg.tensor(b))
    assert body.notes["level"] == "placed"
    verify_body(body, "placed")
    assert body_text(parse_body(body_text(body))) == body_text(body)
    out = np.zeros((32, 32), np.float32)
    run(body, [a, b, out], seed=seed)
    np.testing.assert_allclose(out, twin(tg.tensor(a), tg.tensor(b)).numpy(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("fault", [{"release": False}, {"parity": 1}])
def test_faults_of_the_protocol_are_found_before_launch(fault):
    a, b = operands()
    with pytest.raises(tg.UserError, match="deadlock: producer waits on ab_empty") as caught:
        pipelined(**fault).lower(tg.tensor(a), tg.tensor(b))
    lines = Path(__file__).read_text().splitlines()
    line = 1 + next(i for i, text in enumerate(lines) if "ring.acquire(s)" in text)
    assert caught.value.location.file == __file__ and caught.value.location.line == line


def test_a_place_that_is_read_before_it_is_written():
    @kernel
    def early(x):
        tile.grid(1)
        place = tile.shared((8,))
        value = tile.load(place, (0,), (8,))
        tile.store(tile.result((8,)), (0,), value + tile.load(x, (0,), (8,)))

    with pytest.raises(tg.UserError, match="which nothing has written"):
        early.lower(tg.tensor(np.zeros(8, np.float32)))


def test_a_placed_kernel_needs_a_machine_with_roles():
    a, b = operands()
    with pytest.raises(tg.UserError, match="placed level"):
        pipelined()(tg.tensor(a), tg.tensor(b)).realize()
    with pytest.raises(tg.UserError, match="no batch"):
        tg.vmap(pipelined(), (0, None))(tg.tensor(np.stack([a, a])), tg.tensor(b))


def exchange(to="one", kind=None):
    """Programs of a cluster of two, each of which sends its row to the other."""

    @kernel
    def rows(x):
        i = tile.grid(2)
        rank = tile.cluster(2)
        place, given = tile.shared((1, 8)), tile.barrier("given", 1)
        out = tile.result((2, 8))
        with tile.role("worker", warps=1):
            if kind is not None:
                tile.fence(kind)
            given.expect(0, 32)
            receiver = 1 - rank if to == "one" else to
            tile.send(place, tile.load(x, (i, 0), (1, 8)), given[0], to=receiver)
            given.wait(0, 0)
            tile.store(out, (i, 0), tile.read(place))

    return rows


def test_programs_of_a_cluster_send():
    """To one program, by its rank; what is not known is refused with what is."""
    x = np.arange(16, dtype=np.float32).reshape(2, 8)
    (body,) = exchange().lower(tg.tensor(x))
    out = np.zeros_like(x)
    run(body, [x, out], seed=1)
    np.testing.assert_array_equal(out, x[::-1])
    with pytest.raises(tg.UserError, match=r"to 'others'[\s\S]*shares"):
        exchange("others").lower(tg.tensor(x))
    with pytest.raises(tg.UserError, match=r"no fence[\s\S]*global"):
        exchange(kind="cluster").lower(tg.tensor(x))


def test_every_op_has_a_function():
    from tilegrad.tile import ROLES, placed
    from tilegrad.tile.row import TileOp

    other = {
        "atomic_add",
        "arrive",
        "arrive_remote",
        "expect",
        "wait",
        "register_tile",
        "read_place",
        "write_place",
        "cluster_rank",
    }  # methods of barriers, or under a shorter name
    names = {op.name for op in vars(placed).values() if isinstance(op, TileOp)}
    assert names - other - ROLES == set()
    assert all(callable(getattr(tile, name)) for name in ROLES)

"""tile/ops.py and tile/placed.py: every op has a meaning, and inference refuses what is wrong."""

from __future__ import annotations

import pytest

from tilegrad.core.dtype import bool_, float32, int8, int32, int64
from tilegrad.core.errors import InternalError
from tilegrad.ir.block import argument
from tilegrad.ir.types import NOTHING, Barrier, Memory, Tile
from tilegrad.tile import interpret, ops, placed, skeleton
from tilegrad.tile.row import TileOp

X = argument("x", Tile((4, 8), float32))
Y = argument("y", Tile((4, 8), int32))
M = argument("m", Memory((16, 8), float32))
I = ops.constant(value=0, dtype=int64, shape=())  # noqa: E741


def test_every_op_has_a_row_in_the_interpreter() -> None:
    """No op of the dialect lacks a meaning."""
    control = {"role", "loop", "branch", *interpret.SPECIAL, *skeleton.STEADY}
    silent = {"prefetch", "grid_launch_dependents"}
    for name, op in ops.tile.ops.items():
        assert isinstance(op, TileOp) and (
            op.meaning or op.category in ("unary", "binary", "compare")
        )
        assert op.numpy or op.effects or name in control | silent, name
        assert op.effect or not op.effects, name


def test_every_elementwise_op_has_a_row_in_llvm() -> None:
    """No elementwise op lacks instructions."""
    from tilegrad.targets.llvm.rules import ROWS

    assert set(ops.ELEMENTWISE) == set(ROWS)


def test_pure_ops_are_interned_and_effects_are_not() -> None:
    """The same value is the same Node; two loads are two."""
    add = ops.ELEMENTWISE["add"]
    assert add(X, X) is add(X, X)
    load = [ops.load(M, I, I, shape=(8,), axes=(1,), masked=False) for _ in range(2)]
    assert load[0] is not load[1]


@pytest.mark.parametrize(
    "build",
    [
        lambda: ops.ELEMENTWISE["add"](X, Y),
        lambda: ops.where(X, X, X),
        lambda: ops.broadcast(X, shape=(4, 9)),
        lambda: ops.dot(X, X, X),
        lambda: ops.load(M, I, shape=(8,), axes=(1,), masked=False),
        lambda: ops.load(M, I, I, X, shape=(8,), axes=(1,), masked=True),
        lambda: ops.store(M, Y, I, I, axes=(0, 1), masked=False),
        lambda: placed.arrive(M, I),
        lambda: placed.wait(placed.barrier(name="b", count=1, stages=1), I),
        lambda: placed.copy_async(
            M,
            M,
            placed.barrier(name="b", count=1, stages=1),
            I,
            I,
            shape=(16, 8),
            axes=(0, 1),
            row=0,
        ),
        lambda: placed.copy_async(
            M,
            M,
            placed.barrier(name="b", count=1, stages=1),
            I,
            I,
            I,
            shape=(8, 8),
            axes=(0, 1),
            row=9,
        ),
        lambda: placed.read_place(M, rows=(12, 8)),
        lambda: placed.read_place(M, rows=(4, 8)),
        lambda: placed.read_place(placed.register_tile(shape=(16, 8), dtype=float32), rows=(0, 8)),
        lambda: placed.matrix_async(
            M,
            M,
            M,
            ops.constant(value=True, dtype=bool_, shape=()),
            transpose_a=False,
            transpose_b=False,
        ),
        lambda: placed.write_place(M, X),
    ],
)
def test_inference_refuses(build: object) -> None:
    """Operands that do not fit are an InternalError when the Node is made."""
    with pytest.raises((InternalError, TypeError)):
        build()


def test_types() -> None:
    """Types of Nodes."""
    assert ops.ELEMENTWISE["less"](X, X).type == Tile((4, 8), bool_)
    assert ops.reduce(X, axis=0, kind="sum").type == Tile((8,), float32)
    assert ops.transpose(X, order=(1, 0)).type == Tile((8, 4), float32)
    assert ops.cast(X, dtype=int8).type == Tile((4, 8), int8)
    assert placed.barrier(name="b", count=2, stages=3).type == Barrier(2)
    register = placed.register_tile(shape=(4,), dtype=int8)
    assert register.type == Memory((4,), int8, "register", "state")
    assert placed.read_place(M, I, rows=()).type == Tile((8,), float32)
    assert placed.read_place(M, rows=(8, 4)).type == Tile((4, 8), float32)
    barrier = placed.barrier(name="b", count=1, stages=1)
    copied = placed.copy_async(M, M, barrier, I, I, I, shape=(4, 8), axes=(0, 1), row=12)
    assert copied.type == NOTHING
    assert placed.fence(kind="async").type == NOTHING

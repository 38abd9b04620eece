"""Stored PTX of small Bodies: a change of emission is seen, and meant.

`python tests/targets/test_ptx_golden.py` writes the stored texts anew.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from looped import looped

from tilegrad.core.dtype import bfloat16, float32, int64
from tilegrad.core.target import A100, H200, Target
from tilegrad.ir.symbol import ceil_divide, multiply, symbol
from tilegrad.ir.types import Memory
from tilegrad.targets.ptx.assemble import assemble, find_ptxas
from tilegrad.targets.ptx.emit import emit
from tilegrad.tile import ops
from tilegrad.tile.build import Body, BodyBuilder

FOLDER = Path(__file__).parent.parent / "golden"


def masked_add() -> Body:
    """x + y of n elements, n known at run time, 16 bytes a thread."""
    n = symbol("n", 0, 1 << 20)
    length = multiply(n, 8)
    given = Memory((length,), bfloat16)
    b = BodyBuilder(
        "masked_add",
        [("x", given), ("y", given), ("z", Memory((length,), bfloat16, "global", "result"))],
    )
    at = multiply(b.program(0, ceil_divide(1 << 23, 256)), 256)
    numbers = b.apply("add", b.index(at), b.add(ops.iota(size=256, dtype=int64)))
    mask = b.apply("less", numbers, b.index(length))
    x, y = (b.cast(b.load(m, (at,), (256,), (0,), mask), float32) for m in b.parameters[:2])
    b.store(b.parameters[2], b.cast(b.apply("add", x, y), bfloat16), (at,), (0,), mask)
    return b.finish((ceil_divide(length, 256),), warps=1)


def row_softmax() -> Body:
    """A row of 1024 a program: shuffles, then warps through shared memory."""
    b = BodyBuilder(
        "row_softmax",
        [
            ("x", Memory((64, 1024), float32)),
            ("y", Memory((64, 1024), float32, "global", "result")),
        ],
    )
    p = b.program(0, 64)
    x = b.load(b.parameters[0], (p, 0), (1024,), (1,))
    e = b.apply("exp", b.apply("subtract", x, b.add(ops.reduce(x, axis=0, kind="max"))))
    total = b.add(ops.reduce(e, axis=0, kind="sum"))
    scaled = b.apply("multiply", e, b.apply("reciprocal", total))
    b.store(b.parameters[1], scaled, (p, 0), (1,))
    return b.finish((64,), warps=4)


def small_dot() -> Body:
    """A tile of a product over k: ldmatrix and mma, two buffers in turn."""
    b = BodyBuilder(
        "small_dot",
        [
            ("a", Memory((32, 256), bfloat16)),
            ("b", Memory((256, 32), bfloat16)),
            ("c", Memory((32, 32), float32, "global", "result")),
        ],
    )

    def step(k, carried):
        left = b.load(b.parameters[0], (0, k), (32, 32), (0, 1))
        right = b.load(b.parameters[1], (k, 0), (32, 32), (0, 1))
        return [b.add(ops.dot(left, right, carried[0]))]

    total = looped(b, "k", 0, 256, 32, step, [b.constant(0, float32, (32, 32))])[0]
    b.store(b.parameters[2], total, (0, 0), (0, 1))
    return b.finish((1,), warps=4)


def required() -> Body:
    """Elements by number, each of which must be one of 100."""
    b = BodyBuilder(
        "required",
        [
            ("x", Memory((100,), float32)),
            ("at", Memory((256,), int64)),
            ("y", Memory((256,), float32, "global", "result")),
        ],
    )
    at = b.load(b.parameters[1], (0,), (256,), (0,))
    low = b.apply("less_equal", b.constant(0, int64), at)
    inside = b.logical_and(low, b.apply("less", at, b.constant(100, int64)))
    b.require(inside, "an index is out of bounds", "kernel.py:7")
    b.store(b.parameters[2], b.gather(b.parameters[0], at, inside), (0,), (0,))
    return b.finish((1,), warps=4)


GOLDEN: dict[str, tuple[Callable[[], Body], Target]] = {
    "masked_add": (masked_add, H200),
    "row_softmax": (row_softmax, H200),
    "small_dot": (small_dot, A100),
    "required": (required, H200),
}


def text_of(name: str) -> str:
    """What is emitted now."""
    builder, target = GOLDEN[name]
    return emit(builder(), name, target)[0]


@pytest.mark.parametrize("name", GOLDEN)
def test_text_is_unchanged(name: str) -> None:
    assert text_of(name) == (FOLDER / f"{name}.ptx").read_text()
    assert text_of(name) == text_of(name)


@pytest.mark.parametrize("name", GOLDEN)
def test_stored_text_assembles(name: str) -> None:
    if find_ptxas() is None:
        pytest.skip("NO PTXAS HERE: the stored texts are not assembled")
    report = assemble((FOLDER / f"{name}.ptx").read_text(), GOLDEN[name][1].cpu).reports[name]
    assert report.spill_stores == report.spill_loads == report.stack_bytes == 0


if __name__ == "__main__":
    for golden in GOLDEN:
        (FOLDER / f"{golden}.ptx").write_text(text_of(golden))

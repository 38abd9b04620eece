"""tile.store_add: programs add tiles to the same elements, interpreted, checked, simulated."""

from __future__ import annotations

import numpy as np
import pytest
from placed_builder import PlacedBuilder
from simulator import simulate

from tilegrad.core.dtype import bfloat16, float32
from tilegrad.core.errors import InternalError
from tilegrad.core.target import H200
from tilegrad.ir.types import Memory
from tilegrad.targets.ptx.assemble import assemble, find_ptxas
from tilegrad.targets.ptx.emit import emit
from tilegrad.tile import interpret, ops, placed
from tilegrad.tile.build import Body
from tilegrad.tile.check import verify_body
from tilegrad.tile.prove import check_body


def product(wait: bool = True) -> Body:
    """Each of 3 programs adds a (64, 64) @ b (64, 64) to one total; two roles take rows of it."""
    b = PlacedBuilder(
        "product",
        [
            ("a", Memory((3, 2, 64, 64), bfloat16)),
            ("b", Memory((3, 64, 64), bfloat16)),
            ("c", Memory((2, 8, 4, 8, 4, 2, 2), float32, use="state")),
        ],
    )
    a, right, total = b.parameters
    program = b.program(0, 3)
    places = [
        b.allocate(shape, bfloat16, "shared", "swizzle128") for shape in ((2, 64, 64), (64, 64))
    ]
    full = b.barrier("full", 1)

    def producer() -> None:
        b.expect(full, 0, 3 * 64 * 64 * 2)
        for own in range(2):
            b.copy_async(places[0], (own,), a, (program, own, 0, 0), (2, 3), full, 0)
        b.copy_async(places[1], (), right, (program, 0, 0), (1, 2), full, 0)

    def consumer(own: int) -> None:
        sums = b.register_tile((64, 64), float32)
        b.wait(full, 0, 0)
        b.do(placed.matrix_fence)
        b.matrix_async(sums, places[0], places[1], False, (own,))
        b.do(placed.matrix_commit)
        if wait:
            b.do(placed.matrix_wait, pending=0)
        lines = b.add(ops.reshape(b.read(sums), shape=(4, 2, 8, 8, 4, 2)))
        held = b.add(ops.transpose(lines, order=(3, 0, 2, 4, 1, 5)))
        b.store_add(total, held, (own, 0, 0, 0, 0, 0, 0), (1, 2, 3, 4, 5, 6))

    b.role("producer", 4, 0, producer)
    for own in range(2):
        b.role(f"consumer{own}", 4, 0, lambda own=own: consumer(own))
    return b.finish((3,))


def numbers() -> tuple[list[np.ndarray], np.ndarray]:
    """Memories, and what the total has at the end."""
    draw = np.random.default_rng(0)
    a, b = (draw.standard_normal(s).astype(bfloat16.numpy) for s in ((3, 2, 64, 64), (3, 64, 64)))
    total = draw.standard_normal((2, 64, 64)).astype(np.float32)
    wanted = total + np.einsum("pomk,pkn->omn", *(x.astype(np.float64) for x in (a, b)))

    def held(x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x.reshape(2, 4, 2, 8, 8, 4, 2).transpose(0, 4, 1, 3, 5, 2, 6))

    return [a, b, held(total)], held(wanted)


def test_interpreted() -> None:
    """Sums are right, and no fault is found."""
    body = product()
    verify_body(body, "placed", H200)
    assert not check_body(body, H200)
    memories, wanted = numbers()
    interpret.run(body, memories, seed=1)
    np.testing.assert_allclose(memories[2], wanted, atol=1e-4)


def test_broken() -> None:
    """The value is held to the rules of registers."""
    assert any(f.severity == "error" for f in check_body(product(wait=False), H200))
    b = PlacedBuilder("wrong", [("c", Memory((4,), float32, use="state"))])
    with pytest.raises(InternalError, match="indices"):
        b.store_add(b.parameters[0], b.constant(1.0, float32, (4,)), (), (0,))


def test_simulated() -> None:
    """In the emitted PTX a thread adds 16 bytes at once."""
    text, entry = emit(product(), "product", H200)
    assert text.count("red.relaxed.gpu.global.add.v4.f32") == 16
    memories, wanted = numbers()
    simulate(text, entry, memories)
    np.testing.assert_allclose(memories[2], wanted, atol=1e-4)
    if find_ptxas() is not None:
        assemble(text).check_library("product")

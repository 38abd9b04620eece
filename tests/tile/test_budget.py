"""tile/budget.py: shared bytes, registers, barriers and boxes against a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "golden"))

import bodies
from placed_builder import PlacedBuilder

from tilegrad.core.dtype import bfloat16, float32
from tilegrad.core.target import A100, AVX512, H100
from tilegrad.ir.types import Memory
from tilegrad.tile import placed
from tilegrad.tile.budget import check_budget
from tilegrad.tile.build import Body
from tilegrad.tile.check import Finding

PARAMETERS = [("x", Memory((4096, 4096), bfloat16)), ("out", Memory((4096, 4096), float32))]


def one(build: Callable[[PlacedBuilder], object], warps: int = 4, registers: int = 0) -> Body:
    """A Body of one role."""
    b = PlacedBuilder("budget", PARAMETERS)
    b.role("only", warps, registers, lambda: build(b))
    return b.finish((1,))


def found(body: Body) -> list[Finding]:
    """Against the H100."""
    return check_budget(body, H100)


def test_golden_bodies_fit() -> None:
    """All of them, and none is judged by a GPU's budget on another machine."""
    for builder, _, target in bodies.GOLDEN.values():
        assert not check_budget(builder(), target)
    huge = one(lambda b: b.allocate((1 << 20,), float32, "shared"))
    assert found(huge) and not check_budget(huge, AVX512)


def test_shared_bytes_with_alignment_and_barriers() -> None:
    """227 KiB to the byte: a swizzled place begins at a multiple of 1024."""

    def body(first: int, more: int) -> Body:
        b = PlacedBuilder("places", PARAMETERS)
        b.allocate((first,), bfloat16, "shared")
        b.allocate((2, 64, 64), bfloat16, "shared", "swizzle128")
        b.allocate((more,), bfloat16, "shared")
        b.barrier("full", 1, 4)
        return b.finish((1,))

    rest = (227 << 10) - 1024 - 16384 - 32 - 1024  # the last to align the whole
    assert not found(body(8, rest // 2))
    (finding,) = found(body(520, rest // 2))
    assert finding.rule == "shared_bytes" and "which has 232448" in finding.message
    assert "(allocate)" in finding.line


def test_registers_of_an_accumulator() -> None:
    """128 x 256 sums are 256 registers of 128 threads: too many for one role, fine for two."""

    def role(b: PlacedBuilder) -> None:
        b.register_tile((128, 256), float32)

    (finding,) = found(one(role, 4, 240))
    assert finding.severity == "error" and "take 256 registers a thread" in finding.message
    assert not found(one(role, 8, 232))


def test_registers_that_roles_ask_for() -> None:
    """Multiples of 8, and all together within the file."""
    assert "multiple of 8" in found(one(lambda b: None, 4, 100))[0].message
    b = PlacedBuilder("roles", PARAMETERS)
    for number in range(3):
        b.role(f"role{number}", 4, 232, lambda: None)
    assert "take 89088 registers, there are 65536" in found(b.finish((1,)))[0].message


def copy(shape: tuple[int, ...], layout: str = "") -> Body:
    """A Body that copies a box into a place of its shape."""
    b = PlacedBuilder("boxes", PARAMETERS)
    place, full = b.allocate(shape, bfloat16, "shared", layout), b.barrier("full", 1)
    b.copy_async(place, (), b.parameters[0], (0, 0), (0, 1), full, 0)
    return b.finish((1,))


@pytest.mark.parametrize(
    "shape,layout,message",
    [
        ((64, 64), "swizzle128", ""),
        ((64, 256), "swizzle128", ""),
        ((16, 16), "swizzle128", ""),
        ((64, 256), "", ""),
        ((512, 64), "", "side above 256"),
        ((8, 512), "", "side above 256"),
        ((8, 12), "", "multiple of 16"),
        ((8, 96), "swizzle128", "spans of swizzle128"),
    ],
)
def test_boxes(shape: tuple[int, ...], layout: str, message: str) -> None:
    """What one copy takes: sides to 256, rows of 16 bytes, whole swizzle spans."""
    findings = found(copy(shape, layout))
    assert bool(findings) == bool(message)
    assert all(message in f.message and "(copy_async)" in f.line for f in findings)


def test_named_barriers_and_warps() -> None:
    """Numbers that are free, whole warps, groups of 4 warps for matrix ops, 1024 threads."""

    def sync(number: int, threads: int) -> Callable[[PlacedBuilder], None]:
        return lambda b: b.do(placed.named_sync, number=number, threads=threads)

    assert not found(one(sync(13, 128)))
    assert "numbers 0 to 13 are free" in found(one(sync(14, 128)))[0].message
    assert "no whole number of warps" in found(one(sync(0, 100)))[0].message

    def multiply(b: PlacedBuilder) -> None:
        place = b.allocate((64, 64), bfloat16, "shared", "swizzle128")
        b.matrix_async(b.register_tile((64, 64), float32), place, place, False)

    assert not found(one(multiply))
    assert "matrix_async takes groups of 4" in found(one(multiply, warps=2))[0].message
    assert "1056 threads" in found(one(lambda b: None, warps=33))[0].message


def test_engines_of_the_machine() -> None:
    """Copies back and clusters are not everywhere."""
    b = PlacedBuilder("out", PARAMETERS)
    place = b.allocate((8, 8), float32, "shared")
    b.copy_store(b.parameters[1], (0, 0), (0, 1), place)
    body = b.finish((4,), cluster=(4,))
    assert not check_budget(body, H100)
    rules = [f.rule for f in check_budget(body, A100)]
    assert rules == ["copies", "cluster"]

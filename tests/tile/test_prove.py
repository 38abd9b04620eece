"""tile/prove.py: all checks together, their speed, and the error that lists them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "golden"))

import bodies
from placed_builder import PlacedBuilder
from product_bodies import wide_matmul

from tilegrad.compiler.compile import schedule_for
from tilegrad.core.dtype import bfloat16, float32
from tilegrad.core.errors import InternalError, UserError
from tilegrad.core.target import AVX512, AVX512_AMX
from tilegrad.graph import build as g
from tilegrad.graph import ops as graph_ops
from tilegrad.ir.node import Node
from tilegrad.ir.symbol import symbol
from tilegrad.ir.types import Memory
from tilegrad.kernels.matmul.shape import Operands, WidePlan
from tilegrad.schedule.schedule import Launch
from tilegrad.tile.build import Body
from tilegrad.tile.prove import check_body, require
from tilegrad.tile.text import parse_body


@pytest.mark.parametrize("name", bodies.GOLDEN)
def test_golden_bodies_pass(name: str) -> None:
    """As built, and as read back from their stored text."""
    builder, _, target = bodies.GOLDEN[name]
    text = (Path(bodies.__file__).parent / f"{name}.tile").read_text()
    assert check_body(builder(), target) == [] == check_body(parse_body(text), target)


def x(*shape: object, dtype: object = float32) -> Node:
    """An input."""
    return g.input_(shape, dtype)


N = symbol("rows", 1, 40)
GRAPHS: dict[str, Callable[[], tuple[list[Node], Node]]] = {
    "sum": lambda: (i := [x(5, 7), x(7)], g.sum_(g.add(i[0], i[1]))),
    "softmax": lambda: (i := [x(N, 300)], softmax(i[0])),
    "matmul": lambda: (i := [x(133, 247), x(247, 229)], g.matmul(i[0], i[1])),
    "narrow matmul": lambda: (
        i := [x(N, 96, dtype=bfloat16), x(96, 64, dtype=bfloat16)],
        g.matmul(i[0], i[1]),
    ),
    "vector": lambda: (i := [x(33, 47), x(47)], g.matmul(i[0], i[1])),
    "concatenate": lambda: (i := [x(3, 4), x(2, 4)], g.concatenate(i, 0)),
    "column sums": lambda: (i := [x(130, 210)], g.sum_(i[0], 0)),
}


def softmax(a: Node) -> Node:
    """Along the last axis."""
    e = g.unary(graph_ops.exp, g.subtract(a, g.max_(a, -1, keep=True)))
    return g.divide(e, g.sum_(e, -1, keep=True))


@pytest.mark.parametrize("target", (AVX512, AVX512_AMX), ids=lambda t: t.name)
@pytest.mark.parametrize("name", GRAPHS)
def test_scheduled_bodies_pass(name: str, target: object) -> None:
    """Bodies that the compiler makes for a CPU."""
    inputs, output = GRAPHS[name]()
    schedule = schedule_for(inputs, [output], target)
    launched = [s.body for k in schedule.kernels for s in k.steps if isinstance(s, Launch)]
    assert launched and [check_body(body, target) for body in launched] == [[]] * len(launched)


def test_real_sizes_are_judged_at_once() -> None:
    """128 x 256 x 64 tiles, 4 stages: far less than a compile may take, and no Finding."""
    x = Operands(8192, 8192, 4096, bfloat16, bfloat16)
    body = wide_matmul(x, WidePlan(tile=(128, 256, 64), stages=4, programs=132))
    start = time.process_time()
    assert [f for f in check_body(body, bodies.HOPPER) if f.severity == "error"] == []
    assert time.process_time() - start < 10  # about 0.1 s; step by step it would be minutes


def broken() -> Body:
    """A wait nobody ends, and a place nobody filled."""
    b = PlacedBuilder("broken", [("out", Memory((4,), float32))])
    place, full = b.allocate((4,), float32, "shared"), b.barrier("full", 1)

    def role() -> None:
        b.store(b.parameters[0], b.read(place), (0,), (0,))
        b.wait(full, 0, 0)

    b.role("only", 4, 0, role)
    return b.finish((1,))


def test_require_lists_all_errors() -> None:
    """One error with all Findings, at the kernel's own line; of the pass that made the Body."""
    with pytest.raises(UserError) as caught:
        require(broken())
    text = str(caught.value)
    assert "broken fails 2 checks" in text and "uninitialised" in text and "deadlock" in text
    assert "only waits on full[0] (phase 0: 0 of 1 arrivals) with parity 0" in text
    assert text.count("test_prove.py:") >= 4 and "hint: write it first" in text
    assert caught.value.location is not None and "test_prove" in caught.value.location.file
    with pytest.raises(InternalError, match=r"internal error in tile\.overlap: broken fails 2"):
        require(broken(), maker="tile.overlap")


def test_require_gives_warnings() -> None:
    """What is only slow does not stop a launch."""
    b = PlacedBuilder("slow", [("out", Memory((32, 32), float32))])
    place = b.allocate((32, 32), float32, "shared")

    def role() -> None:
        b.store(place, b.constant(0, float32, (32, 32)), (0, 0), (1, 0))

    b.role("only", 4, 0, role)
    (warning,) = require(b.finish((1,)), bodies.HOPPER)
    assert warning.rule == "bank_conflict" and str(warning).startswith("warning: bank_conflict: ")

"""targets/ptx/emit_placed.py and emit_barriers.py: what programs of a cluster send one another.

Emitted, simulated, assembled; and each part of the handing over is left out in turn, which the
simulator sees.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from placed_builder import PlacedBuilder
from product_bodies import wide_matmul
from simulator import simulate

from ptxsim.errors import (
    BarrierError,
    DeadlockError,
    RaceError,
    SimulationError,
    UninitialisedError,
)
from tilegrad.core.dtype import bfloat16, float32
from tilegrad.core.errors import InternalError
from tilegrad.core.target import H200
from tilegrad.ir.node import Node
from tilegrad.ir.types import Memory
from tilegrad.kernels.matmul.shape import Operands, WidePlan
from tilegrad.targets.ptx.assemble import assemble, find_ptxas
from tilegrad.targets.ptx.emit import emit
from tilegrad.targets.ptx.emit_barriers import ends_alone, waits_for_sends
from tilegrad.targets.ptx.emit_placed import STORE
from tilegrad.tile import ops
from tilegrad.tile.build import Body, fill

PARAMETERS = [("x", Memory((4, 128), float32)), ("out", Memory((4, 128), float32, use="result"))]
WAIT = "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64"
EXPECT = "mbarrier.arrive.expect_tx.shared::cta.b64 _, "
EARLY = (RaceError, UninitialisedError, BarrierError)  # what is read has not landed, or not whole
MAP = "mapa.shared::cluster.u32 "


def exchange(*, warps: int = 4, held: bool = False, rows: int = 1) -> Body:
    """Each of two programs sends its row to the other, which stores it; it lies at the last of
    `rows` rows there, as it is or as threads hold it."""
    b = PlacedBuilder("exchange", PARAMETERS)
    x, out = b.parameters
    place = b.allocate((rows, 128), float32, "shared", "held" if held else "")
    given = b.barrier("given", 1)
    program, rank = b.program(0, 4), b.cluster_rank(2)

    def role() -> None:
        b.expect(given, 0, 512)
        row = b.load(x, (program, 0), (128,), (1,))
        b.send(place, row, given, 0, 1 - rank, rows - 1, to="one")
        b.wait(given, 0, 0)
        b.store(out, b.read(place, rows - 1), (program, 0), (1,))

    b.role("worker", warps, 0, role)
    return b.finish((4,), cluster=(2,))


def run(text: str, entry: object, policy: str = "random") -> None:
    """Rows change places."""
    x = np.arange(512, dtype=np.float32).reshape(4, 128)
    out = np.full((4, 128), -1, np.float32)
    simulate(text, entry, [x, out], policy=policy, seed=1)  # type: ignore[arg-type]
    np.testing.assert_array_equal(out, x[[1, 0, 3, 2]])


@pytest.mark.parametrize(
    "warps, held, rows, form",
    [
        (4, False, 1, "b32"),
        (4, False, 3, "b32"),
        (1, False, 2, "v4.b32"),
        (1, True, 2, "v4.b32"),
        (8, False, 1, "b32"),
    ],
)
def test_exchange(warps: int, held: bool, rows: int, form: str) -> None:
    """Stores that land on a barrier, and a wait that acquires them: no fence, no arrival, nobody
    waits for the other to end."""
    body = exchange(warps=warps, held=held, rows=rows)
    text, entry = emit(body, "exchange", H200)
    assert text.startswith(".version 8.5")
    assert [text.count(part) for part in (f"{STORE}.{form} ", STORE, WAIT, EXPECT)] == [1] * 4
    assert not re.search(r"fence\.acq_rel|st\.shared::cluster|arrive\S*\.shared::cluster", text)
    assert ends_alone(body) and text.count("barrier.cluster.wait") == 1
    for policy in ("round", "far", "random"):
        run(text, entry, policy)
    if find_ptxas():
        assemble(text)


def broken(text: str) -> Iterator[tuple[str, str]]:
    """(what, text) with one part of the handing over left out or changed."""
    lines = text.splitlines(keepends=True)
    waited = next(i for i, line in enumerate(lines) if WAIT in line)
    stored = next(i for i, line in enumerate(lines) if STORE in line)
    expected = next(i for i, line in enumerate(lines) if EXPECT in line)
    maps = [i for i, line in enumerate(lines) if MAP in line]
    assert len(maps) == 2 and maps[1] < stored

    def without(*numbers: int) -> str:
        return "".join(line for i, line in enumerate(lines) if i not in numbers)

    def here(number: int) -> str:
        own = lines[number].replace(MAP, "mov.b32 ").rsplit(",", 1)[0] + ";\n"
        return "".join([*lines[:number], own, *lines[number + 1 :]])

    yield "no store", without(stored)
    yield "stored twice", "".join([*lines[:stored], lines[stored], *lines[stored:]])
    yield "no wait", without(waited, waited + 1)
    yield "a wait that acquires nothing", text.replace(WAIT, WAIT.replace("acquire", "relaxed"))
    yield "a wait of its block's scope", text.replace(WAIT, WAIT.replace(".acquire.cluster", ""))
    yield "nothing expected", without(expected)
    for what, bytes_ in (("too much", 528), ("too little", 496)):
        other = lines[expected].replace(", 512;", f", {bytes_};")
        yield f"{what} expected", "".join([*lines[:expected], other, *lines[expected + 1 :]])
    yield "to the place here", here(maps[0])
    yield "on the barrier here", here(maps[1])


@pytest.mark.parametrize("policy", ("round", "far", "random"))
@pytest.mark.parametrize(
    "what, error",
    [
        ("no store", DeadlockError),
        ("stored twice", EARLY),
        ("no wait", EARLY),
        ("a wait that acquires nothing", RaceError),
        ("a wait of its block's scope", RaceError),
        ("nothing expected", DeadlockError),
        ("too much expected", DeadlockError),
        ("too little expected", EARLY),
        ("to the place here", SimulationError),
        ("on the barrier here", SimulationError),
    ],
)
def test_what_is_left_out_shows(what: str, error: Any, policy: str) -> None:
    text, entry = emit(exchange(), "exchange", H200)
    with pytest.raises(error):
        run(dict(broken(text))[what], entry, policy)


def test_places_that_take_nothing_of_others() -> None:
    """Elements of four bytes, and no swizzled places."""
    for dtype, layout in ((bfloat16, ""), (float32, "swizzle128")):
        b = PlacedBuilder("refused", [("x", Memory((8, 32), dtype))])
        place, given = b.allocate((8, 32), dtype, "shared", layout), b.barrier("given", 1)

        def role(b: PlacedBuilder = b, place: Node = place, given: Node = given) -> None:
            row = b.load(b.parameters[0], (0, 0), (8, 32), (0, 1))
            b.send(place, row, given, 0, 1, to="one")

        b.role("worker", 1, 0, role)
        with pytest.raises(InternalError, match="no stores of"):
            emit(b.finish((2,), cluster=(2,)), "refused", H200)


@pytest.mark.parametrize("split, cluster", [(2, 1), (3, 1), (2, 2), (1, 2)])
def test_wide_matmul(split: int, cluster: int) -> None:
    """Sums of a split k are sent, and waited for so; stages of a ring, which carry no stores, are
    not. Where there is no ring of several programs, each may end alone."""
    plan = WidePlan((64, 96, 64), 2, split * cluster, staged=16, split=split, cluster=cluster)
    body = fill(
        wide_matmul(Operands(64 * cluster, 96, 400, bfloat16, bfloat16), plan),
        "epilogue",
        lambda b, inputs, attrs: inputs[0],
    )
    assert [n.inputs[0].attrs["name"] for n in waits_for_sends(body)] == ["gathered"] * (split > 1)
    text, _ = emit(body, "matmul", H200)
    assert text.startswith(".version 8.5") and "fence.acq_rel" not in text
    assert (text.count(WAIT), STORE in text) == (int(split > 1), split > 1)
    assert ("mbarrier.arrive.shared::cluster.b64" in text) == (cluster > 1)
    assert ends_alone(body) == (cluster == 1)
    assert text.count("barrier.cluster.wait") == (1 if cluster == 1 else 2)


# ---- what is sent to all ------------------------------------------------------------------------


def sent(warps: int, cluster: int, both: bool = True, straight: bool = True) -> Body:
    """Programs send shares of a tile and a line of sums; each stores the sum of what it got."""
    b = PlacedBuilder(
        "sent",
        [
            ("x", Memory((8, 128, 8), float32)),
            ("out", Memory((8, 128 // cluster + 1, 8), float32, use="result")),
        ],
    )
    x, out = b.parameters
    each = 128 // cluster
    shares = b.allocate((cluster, each, 8), float32, "shared")
    lines = b.allocate((cluster, 8), float32, "shared")
    given = b.barrier("given", 1)
    program, rank = b.program(0, 8), b.cluster_rank(cluster)

    def role() -> None:
        b.expect(given, 0, (128 + cluster) * 8 * 4)
        total = b.register_tile((128, 8), float32)
        b.write(total, b.load(x, (program, 0, 0), (128, 8), (1, 2)))
        b.send(shares, b.read(total), given, 0, rank, to="shares")
        line = b.add(ops.reduce(b.read(total), axis=0, kind="max"))
        if straight:
            b.send(lines, line, given, 0, rank)
        else:
            b.branch(b.less(program, 8), lambda: b.send(lines, line, given, 0, rank) or ())
        b.wait(given, 0, 0)
        for place, at in ((shares, 0), (lines, each)):
            sums = b.read(place, 0)
            for r in range(1, cluster):
                sums = b.apply("add", sums, b.read(place, r))
            sums = b.add(ops.reshape(sums, shape=(1 if at else each, 8)))
            b.store(out, sums, (program, at, 0), (1, 2))

    b.role("worker", warps, 0, role)
    if not both:
        b.role("idle", 1, 0, lambda: None)
    return b.finish((8,), cluster=(cluster,))


@pytest.mark.parametrize("warps, cluster", [(4, 2), (4, 4), (4, 8), (8, 8), (1, 2), (8, 4)])
def test_sent(warps: int, cluster: int) -> None:
    """Each program gets its rows of all, and all lines; no fence, no arrival, no end together."""
    text, entry = emit(sent(warps, cluster), "sent", H200)
    assert "fence.acq_rel" not in text and "mbarrier.arrive.release" not in text
    assert text.count("barrier.cluster.wait") == 1
    x = np.random.default_rng(0).integers(-8, 8, (8, 128, 8)).astype(np.float32)
    out = np.full((8, 128 // cluster + 1, 8), -1, np.float32)
    simulate(text, entry, [x, out], policy="random", seed=2)
    by = x.reshape(8 // cluster, cluster, cluster, 128 // cluster, 8)
    found = out.reshape(8 // cluster, cluster, -1, 8)
    np.testing.assert_array_equal(found[:, :, :-1], by.sum(1))
    lines = x.max(1).reshape(8 // cluster, cluster, 8).sum(1)
    np.testing.assert_array_equal(found[:, :, -1], np.repeat(lines[:, None], cluster, 1))
    if find_ptxas():
        assemble(text)


def test_programs_that_may_end_alone() -> None:
    """Where each waits for what is sent to it, right where it sends itself; else they end
    together."""
    assert ends_alone(sent(4, 2))
    assert not ends_alone(sent(4, 2, straight=False))
    text, entry = emit(sent(4, 2), "sent", H200)
    with pytest.raises(RaceError):
        x = np.zeros((8, 128, 8), np.float32)
        simulate(
            text.replace(WAIT, WAIT.replace("acquire", "relaxed")),
            entry,
            [x, np.zeros((8, 65, 8), np.float32)],
            policy="random",
            seed=1,
        )

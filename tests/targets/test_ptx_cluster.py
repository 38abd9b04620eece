"""targets/ptx/plan_cluster.py: which arrivals, waits and fences carry stores to other programs.

Emitted, simulated, assembled; and each part of the handing over is left out in turn, which the
simulator sees.
"""

from __future__ import annotations

import numpy as np
import pytest

from tilegrad.core.dtype import bfloat16, float32
from tilegrad.core.target import H200
from tilegrad.ir.types import Memory
from tilegrad.kernels.matmul import Operands, WidePlan, wide_matmul
from tilegrad.targets.ptx.assemble import assemble, find_ptxas
from tilegrad.targets.ptx.emit import emit
from tilegrad.targets.ptx.plan_cluster import ends_alone, handed_over
from tilegrad.targets.ptx.simulate import simulate
from tilegrad.targets.ptx.simulate_errors import RaceError
from tilegrad.tile import ops, placed
from tilegrad.tile.build import Body
from tilegrad.tile.placed import PlacedBuilder, fill

PARAMETERS = [("x", Memory((4, 128), float32)), ("out", Memory((4, 128), float32, use="result"))]
FENCE = "\tbar.warp.sync -1;\n\tfence.acq_rel.cluster;\n"
ARRIVAL = "mbarrier.arrive.relaxed.cluster.shared::cluster.b64"
WAIT = "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64"


def exchange(*, read_between: bool = False, again: bool = False) -> Body:
    """Each of two programs gives its row to the other, which stores it.

    `read_between` reads between fence and arrival; `again` stores once more before the last fence.
    """
    b = PlacedBuilder("exchange", PARAMETERS)
    x, out = b.parameters
    place, second = (b.allocate((128,), float32, "shared") for _ in range(2))
    given = b.barrier("given", 1)
    program, rank = b.program(0, 4), b.cluster_rank(2)
    other = 1 - rank

    def role() -> None:
        row = b.load(x, (program, 0), (128,), (1,))
        b.write_remote(place, row, other)
        b.do(placed.fence, kind="cluster")
        if read_between:
            b.write(second, row)
        b.arrive_remote(given, 0, other)
        b.wait(given, 0, 0)
        if again:
            b.write(second, row)
        b.do(placed.fence, kind="cluster")
        b.store(out, b.read(place), (program, 0), (1,))

    b.role("worker", 4, 0, role)
    return b.finish((4,), cluster=(2,))


def run(text: str, entry: object, policy: str = "random") -> None:
    """Rows change places."""
    x = np.arange(512, dtype=np.float32).reshape(4, 128)
    out = np.full((4, 128), -1, np.float32)
    simulate(text, entry, [x, out], policy=policy, seed=1)  # type: ignore[arg-type]
    np.testing.assert_array_equal(out, x[[1, 0, 3, 2]])


def test_exchange() -> None:
    """One fence, after the lanes have met; a relaxed arrival, a wait that acquires."""
    text, entry = emit(exchange(), "exchange", H200)
    assert text.startswith(".version 8.6")
    assert [text.count(part) for part in (FENCE, "fence.acq_rel", ARRIVAL, WAIT)] == [1] * 4
    assert text.index(FENCE) < text.index(ARRIVAL) < text.index(WAIT)
    run(text, entry)
    if find_ptxas():
        assemble(text)


@pytest.mark.parametrize("old, new", [
    ("\tfence.acq_rel.cluster;\n", ""),
    (WAIT, WAIT.replace("acquire", "relaxed")),
])  # fmt: skip
def test_what_is_left_out_shows(old: str, new: str) -> None:
    text, entry = emit(exchange(), "exchange", H200)
    with pytest.raises(RaceError):
        run(text.replace(old, new), entry)


@pytest.mark.parametrize("read_between, again, relaxed, acquired", [
    (True, False, 0, 0), (False, True, 1, 0), (False, False, 1, 1),
])  # fmt: skip
def test_only_straight_runs(read_between: bool, again: bool, relaxed: int, acquired: int) -> None:
    """Where anything is stored in between, forms stay plain and the fence stays."""
    body = exchange(read_between=read_between, again=again)
    found = handed_over(body)
    assert (len(found.arrivals), len(found.waits), len(found.fences)) == (
        relaxed, acquired, acquired)  # fmt: skip
    text, entry = emit(body, "exchange", H200)
    assert text.count("fence.acq_rel.cluster") == 2 - acquired
    run(text, entry)


@pytest.mark.parametrize("split, cluster", [(2, 1), (3, 1), (2, 2), (1, 2)])
def test_wide_matmul(split: int, cluster: int) -> None:
    """Sums of a split k are handed over so; stages of a ring, which carry no stores, are not."""
    plan = WidePlan((64, 96, 64), 2, split * cluster, staged=16, split=split, cluster=cluster)
    body = fill(wide_matmul(Operands(64 * cluster, 96, 400, bfloat16, bfloat16), plan), "epilogue",
                lambda b, inputs, attrs: inputs[0])  # fmt: skip
    found = handed_over(body)
    assert all(n.inputs[0].attrs["name"] == "gathered" for n in found.arrivals | found.waits)
    assert (len(found.arrivals), len(found.waits), len(found.fences)) == (
        split - 1, min(1, split - 1), min(1, split - 1))  # fmt: skip
    text, _ = emit(body, "matmul", H200)
    assert text.startswith(".version 8.6" if split > 1 else ".version 8.5")
    assert ("mbarrier.arrive.shared::cluster.b64" in text) == (cluster > 1)


# ---- what is sent -------------------------------------------------------------------------------


def sent(warps: int, cluster: int, both: bool = True, straight: bool = True) -> Body:
    """Programs send shares of a tile and a line of sums; each stores the sum of what it got."""
    b = PlacedBuilder("sent", [("x", Memory((8, 128, 8), float32)),
                               ("out", Memory((8, 128 // cluster + 1, 8), float32, use="result"))])
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
    assert not ends_alone(exchange())
    text, entry = emit(sent(4, 2), "sent", H200)
    with pytest.raises(RaceError):
        x = np.zeros((8, 128, 8), np.float32)
        simulate(text.replace(WAIT, WAIT.replace("acquire", "relaxed")), entry,
                 [x, np.zeros((8, 65, 8), np.float32)], policy="random", seed=1)  # fmt: skip

"""tile/interpret.py: programs of a cluster run together, and races between them show."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "golden"))

import mutants
from placed_builder import PlacedBuilder
from product_bodies import wide_matmul

from tilegrad.core.dtype import bfloat16, float32
from tilegrad.core.errors import InternalError
from tilegrad.ir.node import Node
from tilegrad.ir.types import Memory
from tilegrad.kernels.matmul.shape import Operands, WidePlan
from tilegrad.tile import interpret, ops
from tilegrad.tile.build import Body, fill
from tilegrad.tile.concurrent import DeadlockError, RaceError
from tilegrad.tile.prove import check_body

SEEDS = (None, 0, 1, 2, 3)
PARAMETERS = [("x", Memory((4, 8), float32)), ("out", Memory((4, 8), float32, use="result"))]


def exchange(
    *,
    bytes_: int | None = 32,
    sends: int = 1,
    waits: bool = True,
    parity: int = 0,
    stage: int = 0,
    late: bool = False,
    early: bool = False,
    to: int | None = None,
    same: bool = False,
    cluster: int = 2,
) -> Body:
    """Each program sends its row of x to the other, which stores it; every guard can be left out.

    `late` expects after the send, `early` waits before it, `to` names a fixed rank, `stage` is
    where the bytes land, `same` stores to one row; without `bytes_` nothing is expected.
    """
    b = PlacedBuilder("exchange", PARAMETERS)
    x, out = b.parameters
    place = b.allocate((8,), float32, "shared")
    given = b.barrier("given", 1, 2)
    program = b.program(0, 4)
    rank = b.cluster_rank(cluster)
    other = 1 - rank if to is None else to

    def expect() -> None:
        if bytes_ is not None:
            b.expect(given, 0, bytes_)

    def role() -> None:
        if not late:
            expect()
        if early:
            b.wait(given, 0, parity)
        for _ in range(sends):
            row = b.load(x, (program, 0), (8,), (1,))
            b.send(place, row, given, stage, other, to="one")
        if late:
            expect()
        if waits and not early:
            b.wait(given, 0, parity)
        b.store(out, b.read(place), (program // 2 if same else program, 0), (1,))

    b.role("worker", 1, 0, role)
    return b.finish((4,), cluster=(cluster,))


def run(body: Body, seed: int | None, programs: list[int] | None = None) -> np.ndarray:
    """The rows that were stored."""
    x, out = np.arange(32, dtype=np.float32).reshape(4, 8), np.full((4, 8), -1, np.float32)
    interpret.run(body, [x, out], programs=programs, seed=seed)
    return out


@pytest.mark.parametrize("late", (False, True))
@pytest.mark.parametrize("seed", SEEDS)
def test_programs_run_together(seed: int | None, late: bool) -> None:
    """Neighbours exchange rows; of a cluster all run, of the others none. Bytes may land before
    they are expected."""
    body = exchange(late=late)
    rows = np.arange(32).reshape(4, 8)
    np.testing.assert_array_equal(run(body, seed), rows[[1, 0, 3, 2]])
    np.testing.assert_array_equal(run(body, seed, [2])[2:], rows[[3, 2]])
    assert (run(body, seed, [3, 2])[:2] == -1).all()
    assert not check_body(body)


@pytest.mark.parametrize(
    "change, error, words",
    [
        ({"bytes_": None}, DeadlockError, r"of rank 0 waits .*; worker of rank 1 waits"),
        ({"bytes_": 48}, DeadlockError, "48 bytes expected and 32 copied"),
        ({"bytes_": 16}, DeadlockError, "16 bytes expected and 32 copied"),
        ({"bytes_": 0}, RaceError, "(race|phase): .* of rank"),
        ({"waits": False}, RaceError, "race: .* of rank"),
        ({"parity": 1}, InternalError, "race: .* of rank|deadlock"),  # by the order
        ({"early": True}, DeadlockError, r"of rank 0 waits .*; worker of rank 1 waits"),
        ({"sends": 0}, DeadlockError, r"of rank 0 waits .*; worker of rank 1 waits"),
        ({"sends": 2}, RaceError, "race: copies on .* writes"),
        ({"stage": 1}, DeadlockError, r"of rank 0 waits .*; worker of rank 1 waits"),
        ({"stage": 2}, InternalError, "send at stage 2 of the 2 barriers given"),
        ({"to": 2}, InternalError, "send to rank 2 of a cluster of 2"),
        ({"to": -1}, InternalError, "send to rank -1 of a cluster of 2"),
        ({"to": 0}, RaceError, "race: copies on .* writes"),
        ({"same": True}, RaceError, "race: .* writes out while"),
    ],
)
def test_what_is_left_out_shows(change: dict[str, object], error: type, words: str) -> None:
    """Each guard is needed, in whatever order the roles run; the static check agrees."""
    body = exchange(**change)  # type: ignore[arg-type]
    for seed in SEEDS:
        with pytest.raises(error, match=words):
            run(body, seed)
    assert any(f.severity == "error" for f in check_body(body))


def test_sent_to_whom() -> None:
    """To all, to each its share, or to one, whose rank is then the first index."""
    b = PlacedBuilder("sends", PARAMETERS)
    place, given = b.allocate((2, 8), float32, "shared"), b.barrier("given", 1)
    row = b.load(b.parameters[0], (0, 0), (8,), (1,))
    b.send(place, row, given, 0, 1, 0, to="one")
    b.send(place, row, given, 0, 0)
    for index, to in (((), "one"), ((0,), "one"), ((0, 0), "all"), ((0,), "others")):
        with pytest.raises(InternalError, match="send"):
            b.send(place, row, given, 0, *index, to=to)


def ring(*, told: bool = True) -> Body:
    """Each program sends the other two rows, one after the other, into one place: the second when
    it is told that the first has been stored."""
    b = PlacedBuilder("ring", PARAMETERS)
    x, out = b.parameters
    place = b.allocate((4,), float32, "shared")
    given, empty = b.barrier("given", 1), b.barrier("empty", 1)
    program, rank = b.program(0, 4), b.cluster_rank(2)

    def role() -> None:
        for half in range(2):
            b.expect(given, 0, 16)
            if half and told:
                b.wait(empty, 0, 0)
            row = b.load(x, (program, 4 * half), (4,), (1,))
            b.send(place, row, given, 0, 1 - rank, to="one")
            b.wait(given, 0, half)
            b.store(out, b.read(place), (program, 4 * half), (1,))
            if not half:
                b.arrive_remote(empty, 0, 1 - rank)

    b.role("worker", 1, 0, role)
    return b.finish((4,), cluster=(2,))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_place_is_sent_to_again(seed: int | None) -> None:
    """After who read it has arrived here; otherwise it is a race."""
    np.testing.assert_array_equal(run(ring(), seed), np.arange(32).reshape(4, 8)[[1, 0, 3, 2]])
    assert not check_body(ring())
    with pytest.raises(RaceError, match=r"race: copies on given\[0\] of rank"):
        run(ring(told=False), seed)
    assert any(f.severity == "error" for f in check_body(ring(told=False)))


def test_grids_of_whole_clusters() -> None:
    """A grid that clusters do not divide is refused."""
    with pytest.raises(InternalError, match=r"a grid \(4,\) of clusters of 3"):
        run(exchange(cluster=3), None)


def shared(mask: int = 3, first: int = 0, wait: bool = True, rows: int = 1) -> Body:
    """Each of two programs brings one row for both; each stores both."""
    b = PlacedBuilder("shared", PARAMETERS)
    x, out = b.parameters
    place = b.allocate((2, 8), float32, "shared")
    full = b.barrier("full", 1)
    program = b.program(0, 4)
    rank = b.cluster_rank(2)

    def producer() -> None:
        b.expect(full, 0, 2 * 8 * 4)
        b.copy_multicast(place, (), (rank, rows), x, (program, 0), (0, 1), full, 0, mask, first)
        b.wait(full, 0, 0)  # its own copies have landed before it ends

    def consumer() -> None:
        if wait:
            b.wait(full, 0, 0)
        sums = b.apply("add", row(b, place, 0), row(b, place, 1))
        b.store(out, sums, (program, 0), (1,))

    b.role("producer", 1, 0, producer)
    b.role("consumer", 1, 0, consumer)
    return b.finish((4,), cluster=(2,))


def sent(*, bytes_: int = 96, waits: bool = True, cut: bool = True, late: bool = False) -> Body:
    """Each of two programs sends the other half of its row of x, and all of it; each stores what
    it got: halves of both rows, and the sum of both."""
    b = PlacedBuilder("sent", PARAMETERS)
    x, out = b.parameters
    halves = b.allocate((2, 4, 1) if cut else (2, 8, 1), float32, "shared")
    whole = b.allocate((2, 8), float32, "shared")
    given = b.barrier("given", 1)
    program, rank = b.program(0, 4), b.cluster_rank(2)

    def role() -> None:
        if not late:
            b.expect(given, 0, bytes_)
        line = b.load(x, (program, 0), (8,), (1,))
        column = b.add(ops.reshape(line, shape=(8, 1)))
        b.send(halves, column, given, 0, rank, to="shares" if cut else "all")
        b.send(whole, line, given, 0, rank)
        if late:
            b.expect(given, 0, bytes_)
        if waits:
            b.wait(given, 0, 0)
        sums = b.apply("add", b.read(whole, 0), b.read(whole, 1))
        b.store(out, sums, (program, 0), (1,))
        if cut:
            for i in range(2):
                b.store(out, b.read(halves, i), (program, 4 * i), (1, 0))

    b.role("worker", 1, 0, role)
    return b.finish((4,), cluster=(2,))


@pytest.mark.parametrize("late", (False, True))
@pytest.mark.parametrize("seed", SEEDS)
def test_sent(seed: int | None, late: bool) -> None:
    """What is cut goes to those it belongs to, in the order of ranks; bytes may land before they
    are expected."""
    body = sent(late=late)
    assert not check_body(body)
    rows = np.arange(32).reshape(2, 2, 2, 4)  # cluster, program, half
    np.testing.assert_array_equal(run(body, seed).reshape(2, 2, 2, 4), rows.swapaxes(1, 2))
    whole = run(sent(cut=False, bytes_=128), seed)
    np.testing.assert_array_equal(
        whole.reshape(2, 2, 8),
        np.repeat(np.arange(32).reshape(2, 2, 8).sum(1, keepdims=True), 2, 1),
    )


@pytest.mark.parametrize(
    "change, error, words",
    [
        ({"waits": False}, RaceError, "race: worker of rank"),
        ({"bytes_": 112}, DeadlockError, "waits"),
        ({"bytes_": 80}, InternalError, "race: worker of rank|deadlock"),  # by the order
    ],
)
def test_what_is_sent_is_expected_and_waited_for(
    change: dict[str, object], error: type, words: str
) -> None:
    body = sent(**change)  # type: ignore[arg-type]
    with pytest.raises(error, match=words):
        run(body, 0)
    assert any(f.severity == "error" for f in check_body(body))


def row(b: PlacedBuilder, place: Node, number: int) -> Node:
    """One row of a place."""
    return b.read(place, number)


@pytest.mark.parametrize("seed", SEEDS)
def test_copies_to_all(seed: int | None) -> None:
    """Both rows land in both programs, on the barriers of each."""
    x = np.arange(32).reshape(4, 8)
    sums = [x[0] + x[1], x[0] + x[1], x[2] + x[3], x[2] + x[3]]
    np.testing.assert_array_equal(run(shared(), seed), sums)
    with pytest.raises(RaceError, match=r"race: .*copies on full\[0\] of rank"):
        run(shared(wait=False), seed)
    with pytest.raises(DeadlockError):
        run(shared(mask=1), seed)
    with pytest.raises(InternalError, match="of a cluster of 2"):
        run(shared(first=1), seed)
    with pytest.raises(InternalError, match="leaves"):
        run(shared(rows=2), seed)


PLANS = {
    "cluster": (
        Operands(128, 128, 96, bfloat16, bfloat16),
        WidePlan((64, 64, 32), 2, 2, staged=32, cluster=2),
    ),
    "split": (
        Operands(64, 32, 128, bfloat16, bfloat16),
        WidePlan((64, 32, 32), 2, 2, staged=16, split=2),
    ),
}
REMOTE = ("arrive_remote", "copy_multicast", "send", "fence", "expect", "wait ", "matrix_wait")


@pytest.mark.parametrize("name", PLANS)
def test_interpreter_alone(name: str) -> None:
    """What the static check refuses the interpreter catches too, without its help.

    But for warps of one role that have not met: here a role is one thread.
    """
    x, plan = PLANS[name]
    body = fill(wide_matmul(x, plan), "epilogue", lambda b, inputs, added: inputs[0])
    caught, missed = 0, []
    for label, broken in mutants.mutants(body):
        if label.startswith(REMOTE) and any(f.severity == "error" for f in check_body(broken)):
            if interpreter_reports(broken):
                caught += 1
            elif not label.startswith("fence after named_sync"):
                missed.append(label)
    assert not missed and caught > 20


def interpreter_reports(body: Body) -> bool:
    """Whether a race, a deadlock or an error shows in some order."""
    for seed in SEEDS:
        memories = [np.ones(p.type.shape, p.dtype.numpy) for p in body.parameters]
        try:
            interpret.run(body, memories, seed=seed)
        except InternalError:
            return True
    return False

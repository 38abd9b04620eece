"""tile/prove.py: races, deadlock and fences of placed Bodies, proved by breaking them.

Every barrier op, fence, wait and commit of each kernel is dropped or changed in turn (see
golden/mutants.py); the check or, where it finds nothing, the interpreter must catch it. What both
let pass is listed with the reason why it does no harm. `pytest -s` prints who caught what.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "golden"))

import bodies
import mutants
from looped import looped
from placed_builder import PlacedBuilder
from product_bodies import wide_matmul

from tilegrad.core.dtype import bfloat16, float32, int64
from tilegrad.core.errors import InternalError
from tilegrad.ir.node import Node
from tilegrad.ir.types import Memory
from tilegrad.kernels.matmul.shape import Operands, WidePlan
from tilegrad.tile import interpret, ops, placed
from tilegrad.tile.build import Body, fill
from tilegrad.tile.check import Finding
from tilegrad.tile.happening import DO
from tilegrad.tile.prove import check_body, check_protocol
from tilegrad.tile.row import Effect
from tilegrad.tile.skeleton import Skeleton

SEEDS = (None, 0, 1)


def filled(body: Body) -> Body:
    """The epilogue that changes nothing."""
    return fill(body, "epilogue", lambda b, inputs, added: inputs[0])


def small_matmul() -> Body:
    """The library's matmul, small enough to interpret: 3 tiles a program, 3 steps, 2 stages."""
    plan = WidePlan(tile=(128, 64, 32), stages=2, programs=2, staged=32)
    return filled(wide_matmul(Operands(192, 192, 96, bfloat16, bfloat16), plan))


KERNELS: dict[str, Callable[[], Body]] = {
    "ping_pong_matmul_gelu": bodies.ping_pong_matmul_gelu,
    "flash_attention": bodies.flash_attention,
    "wide_matmul": small_matmul,
}
TURN = "named barrier 4 is as good as 3: nobody else uses it"
ORDERED = "the first consumer waited for the same phase before it handed over the turn"
FILLED = "before keys come the values of the block before, and these wait for the whole trip"
LAST = "the release of the last values: nobody waits for it"
EQUIVALENT: dict[str, dict[str, str]] = {
    "ping_pong_matmul_gelu": {"named_sync 3 number + 1": TURN},
    "flash_attention": {
        "named_sync 3 number + 1": TURN,
        "named_arrive 1 number + 1": "the second consumer takes the first turn instead",
        "wait 9 dropped": ORDERED,
        "wait 10 dropped": ORDERED,
        "arrive 3 dropped": LAST,
        "arrive 7 dropped": LAST,
        "matrix_wait after arrive (40)": LAST,
        "matrix_wait after arrive (87)": LAST,
        "wait after matrix_async (97)": ORDERED,
        "wait after matrix_async (100)": ORDERED,
        "matrix_wait after arrive (57)": FILLED,
        "matrix_wait after arrive (104)": FILLED,
    },
    "wide_matmul": {
        "named_sync 2 number + 1": "the barrier of the second consumer alone may have any number",
        "named_sync 3 number + 1": "the barrier of the second consumer alone may have any number",
        "expect 0 next stage": "at the start both stages are expected before either is waited for",
    },
}


def errors(body: Body) -> list[Finding]:
    """Findings of level 'error'."""
    return [f for f in check_body(body) if f.severity == "error"]


def run(body: Body, seed: int | None) -> list[np.ndarray]:
    """The parameters after a run on random numbers."""
    memories = []
    for number, parameter in enumerate(body.parameters):
        shape = parameter.type.shape
        values = np.random.default_rng(number).standard_normal(shape)
        memories.append(values.astype(parameter.dtype.numpy))
    interpret.run(body, memories, seed=seed)
    return memories


def interpreter_reports(body: Body, expected: list[np.ndarray]) -> bool:
    """Whether a race, a deadlock or a wrong number shows in some order."""
    for seed in SEEDS:
        try:
            found = run(body, seed)
        except InternalError:
            return True
        for ours, theirs in zip(found, expected):
            if not np.array_equal(ours, theirs, equal_nan=True):
                return True
    return False


@pytest.mark.parametrize("name", KERNELS)
def test_every_mutant_is_caught(name: str) -> None:
    """By the check, else by the interpreter; the rest does no harm and is listed."""
    body = KERNELS[name]()
    assert not errors(body)
    expected = run(body, None)
    judges: Counter[str] = Counter()
    missed = set()
    for label, broken in mutants.mutants(body):
        found = errors(broken)
        if found:
            judge = "check: " + ", ".join(sorted({f.rule for f in found}))
        elif interpreter_reports(broken, expected):
            judge = "interpreter"
        else:
            judge = "nobody"
            missed.add(label)
        judges[judge.split(":")[0]] += 1
        print(f"{name}: {label}: {judge}")
    print(f"{name}: {sum(judges.values())} mutants, caught by {dict(judges)}")
    assert missed == set(EQUIVALENT[name])
    assert judges["check"] > 0.9 * sum(judges.values())


LONG: dict[str, Callable[[], Body]] = {
    "matmul": lambda: wide_matmul(
        Operands(512, 512, 2560, bfloat16, bfloat16), WidePlan(programs=3, stages=3)
    ),
    "ping_pong": lambda: bodies.ping_pong_matmul(128, 64, 512, (16, 16, 16), 4, 1),
    "attention": lambda: bodies.flash_attention(1, 768, 16, 16, 16, 3),
}


@pytest.mark.parametrize("name", LONG)
def test_what_is_left_out_changes_no_verdict(name: str) -> None:
    """Loops run whole and with their middle left out: the same Bodies are refused."""
    body = LONG[name]()
    shorter = 0
    for number, (label, broken) in enumerate([("", body), *mutants.mutants(body)]):
        if number % 13:
            continue
        skeleton = Skeleton(broken)
        scenario = skeleton.scenarios()[-1]
        short, whole = skeleton.trace(scenario), skeleton.trace(scenario, whole=True)
        shorter += count(short) < count(whole)
        verdicts = [
            any(f.severity == "error" for f in check_protocol(skeleton, scenario, w))
            for w in (False, True)
        ]
        assert verdicts[0] == verdicts[1], label
        assert verdicts[0] or not number or label in ACCEPTED, label
    assert shorter


ACCEPTED = (
    {label for listed in EQUIVALENT.values() for label in listed}
    | {f"grid_dependency_wait {n} dropped" for n in (1, 2)}
    | {f"named_sync {n} number + 1" for n in range(12)}
)


def count(trace: list) -> int:
    """Events of a trace."""
    return sum(len(events) for item in trace if item[0] == "roles" for _, events in item[1])


def test_clusters() -> None:
    """Two programs that fill each other's rings: correct as written, every mutant refused but for
    those that do no harm."""
    plan = WidePlan(tile=(128, 128, 64), stages=2, programs=4, cluster=2)
    body = wide_matmul(Operands(512, 256, 192, bfloat16, bfloat16), plan)
    assert not errors(body)
    missed = {label for label, broken in mutants.mutants(body) if not errors(broken)}
    assert missed <= ACCEPTED, missed


def test_programs_that_share_a_tile() -> None:
    """Parts of k over a cluster: sums are sent to each other's places, expected and waited for."""
    x = Operands(128, 128, 256, bfloat16, bfloat16)

    def body(cluster: int) -> Body:
        return wide_matmul(
            x,
            WidePlan(
                tile=(64, 128, 64),
                stages=2,
                split=2,
                cluster=cluster,
                staged=32,
                programs=4 * cluster,
            ),
        )

    assert not errors(body(1)) and not errors(body(2))
    found = {
        label: bool(errors(b))
        for label, b in mutants.mutants(body(1))
        if label.startswith("send") or label in GATHERED
    }
    assert len(found) == len(GATHERED) + 4 and found.pop("send 0 other rank") is False  # (1)
    assert all(found.values()), found


# (1) each sends itself what is the other's: well ordered, and wrong, as the interpreter sees
GATHERED = (
    "expect 1 dropped",
    "expect 1 twice",
    "expect 1 more bytes",
    "expect 1 no bytes",
    "wait 1 dropped",
    "wait 1 parity flipped",
)


@pytest.mark.parametrize("stages", (2, 3, 5))
def test_correct_bodies_pass(stages: int) -> None:
    """Sizes that do not divide the ring, one step, one tile, many."""
    for steps in (1, 2, 3, 7, 24):
        for tiles in (1, 2, 5, 16):
            body = bodies.ping_pong_matmul(16 * tiles, 16, 16 * steps, (16, 16, 16), stages, 1)
            assert not check_body(body), (steps, tiles)
        for causal in (True, False):
            body = bodies.flash_attention(1, 32 * steps, 16, 16, 16, stages, causal)
            assert not check_body(body), (steps, causal)
        x = Operands(500, 260, 64 * steps, bfloat16, bfloat16)
        for tile in ((128, 256, 64), (64, 128, 64)):
            plan = WidePlan(tile=tile, stages=stages, programs=3)
            assert not check_body(wide_matmul(x, plan)), (steps, tile)


def test_one_stage_is_a_deadlock() -> None:
    """Releasing the stage before the last needs two of them: both waits are named."""
    (found,) = errors(bodies.ping_pong_matmul(16, 16, 64, (16, 16, 16), 1, 1))
    assert found.rule == "deadlock" and found.line.endswith("(wait)")
    assert "producer waits on empty[0] (phase 0: 0 of 1 arrivals) with parity 0" in found.message
    assert "consumer0 waits on full[0]" in found.message and "bodies.py:" in found.message


# ---- one rule each ------------------------------------------------------------------------------

PARAMETERS = [("x", Memory((8, 16), float32)), ("out", Memory((8, 16), float32, use="result"))]


def roles(*builds: Callable[[PlacedBuilder, Node, Node], object], count: int = 1) -> Body:
    """Roles of 4 warps over a shared place (2, 16) and the barrier 'full' of two stages."""
    b = PlacedBuilder("roles", PARAMETERS)
    place, full = b.allocate((2, 16), float32, "shared"), b.barrier("full", count, 2)
    for number, build in enumerate(builds):
        b.role(f"role{number}", 4, 0, lambda build=build: build(b, place, full))
    return b.finish((1,))


def rules(body: Body, level: str = "error") -> set[str]:
    """Names of the rules that a Body breaks."""
    return {f.rule for f in check_body(body) if f.severity == level}


def producer(b: PlacedBuilder, place: Node, full: Node) -> None:
    """Copies two rows."""
    for stage in range(2):
        b.expect(full, stage, 64)
        b.copy_async(place, (stage,), b.parameters[0], (stage, 0), (1,), full, stage)


def consumer(b: PlacedBuilder, place: Node, full: Node) -> None:
    """Writes them out."""
    for stage in range(2):
        b.wait(full, stage, 0)
        b.store(b.parameters[1], b.read(place, stage), (stage, 0), (1,))


def test_lines_and_words_of_a_race() -> None:
    """Both lines of the kernel, the place and its stage, and what would help."""

    def hasty(b: PlacedBuilder, place: Node, full: Node) -> None:
        b.wait(full, 0, 0)
        b.read(place, 1)

    assert not rules(roles(producer, consumer))
    found = [f for f in check_body(roles(producer, hasty)) if f.rule == "race"]
    assert "role1 reads the shared place 2x16 float32 at [1] while copies on full[1] writes it" in (
        found[0].message
    )
    assert "test_protocol.py:" in found[0].line and "(read_place)" in found[0].line
    assert "(copy_async)" in found[0].other and "wait for it" in found[0].hint
    assert str(found[0]).count("test_protocol.py:") == 2


def test_copies_that_nobody_waits_for() -> None:
    """A program that ends while a copy is on its way."""
    assert rules(roles(producer, lambda b, place, full: b.wait(full, 0, 0))) == {"unfinished"}


def test_bytes_that_do_not_add_up() -> None:
    """Named even where nobody waits."""

    def wrong(b: PlacedBuilder, place: Node, full: Node) -> None:
        b.expect(full, 0, 80)
        b.copy_async(place, (0,), b.parameters[0], (0, 0), (1,), full, 0)

    (found,) = errors(roles(wrong))
    assert found.rule == "bytes" and "80 bytes expected and 64 copied" in found.message


def test_a_barrier_that_may_overtake() -> None:
    """A second phase that does not wait for who waits for the first."""

    def twice(b: PlacedBuilder, place: Node, full: Node) -> None:
        b.arrive(full, 0)
        b.wait(full, 0, 0)
        b.wait(full, 1, 0)
        b.arrive(full, 0)

    def slow(b: PlacedBuilder, place: Node, full: Node) -> None:
        b.arrive(full, 1)
        b.wait(full, 0, 0)

    found = errors(roles(twice, slow))  # in this order it would come in time
    assert [f.rule for f in found] == ["phase"] and found[0].line.endswith("(wait)")
    assert "full[0] may end phase 1 before role1 comes to wait for phase 0" in found[0].message
    assert rules(roles(slow, twice)) == {"deadlock"}


def test_who_ends_a_phase_knows_it() -> None:
    """The only one to arrive may do so again, if nobody can miss the phase between."""

    def alone(b: PlacedBuilder, place: Node, full: Node) -> None:
        for parity in range(2):
            b.arrive(full, 0)
            b.wait(full, 1, parity)

    def answers(b: PlacedBuilder, place: Node, full: Node) -> None:
        for parity in range(2):
            b.wait(full, 0, parity)
            b.arrive(full, 1)

    assert not check_body(roles(lambda b, place, full: [b.arrive(full, 0) for _ in range(3)]))
    assert not check_body(roles(alone, answers))
    assert "phase" in rules(
        roles(
            lambda b, place, full: [b.arrive(full, 0) for _ in range(2)],
            lambda b, place, full: b.arrive(full, 0),
            count=2,
        )
    )


def test_every_op_has_a_rule() -> None:
    """Ops with effects are events of the protocol, or are known to touch nothing it minds."""
    silent = {"role", "loop", "branch", "hole", "prefetch", "grid_launch_dependents", "require"}
    effects = {name for name, op in ops.tile.ops.items() if op.effect}
    assert effects == {name for name, op in ops.tile.ops.items() if op.effects} | silent
    assert set(get_args(Effect)) == set(DO)


def test_too_many_arrivals_and_bad_stages() -> None:
    """Arrivals beyond the count while bytes are due; a stage that is not there."""

    def crowd(b: PlacedBuilder, place: Node, full: Node) -> None:
        b.expect(full, 0, 64)
        b.arrive(full, 0)

    assert "arrivals" in rules(roles(crowd))
    assert rules(roles(lambda b, place, full: b.arrive(full, 2))) == {"index"}
    assert rules(
        roles(lambda b, place, full: b.write(place, b.constant(0, float32, (16,)), 2))
    ) == {"index"}


def staged(fence: bool, sync: bool, swap: bool = False) -> Body:
    """A role of 4 warps stores a row and copies it out."""

    def role(b: PlacedBuilder, place: Node, full: Node) -> None:
        b.write(place, b.constant(1, float32, (16,)), 0)
        steps = [
            fence and (placed.fence, {"kind": "async"}),
            sync and (placed.named_sync, {"number": 1, "threads": 128}),
        ]
        for step in reversed(steps) if swap else steps:
            if step:
                b.do(step[0], **step[1])
        b.copy_store(b.parameters[1], (0, 0), (1,), place, (0,))
        b.do(placed.commit_copies)
        b.do(placed.wait_copies, pending=0)

    return roles(role)


def test_stores_are_fenced_and_warps_meet() -> None:
    """fence('async'), then a barrier of the role, then the copy."""
    assert not check_body(staged(True, True))
    for case in (staged(False, True), staged(True, False), staged(True, True, swap=True)):
        assert rules(case) == {"fence"}


def test_a_fence_after_the_barrier_does_not_help_others() -> None:
    """Another role's copy must know of the fence, not only of the stores."""

    def build(late: bool) -> Body:
        def first(b: PlacedBuilder, place: Node, full: Node) -> None:
            b.write(place, b.constant(1, float32, (16,)), 0)
            for step in range(2):
                if (step == 1) == late:
                    b.do(placed.fence, kind="async")
                else:
                    b.do(placed.named_arrive, number=1, threads=256)

        def second(b: PlacedBuilder, place: Node, full: Node) -> None:
            b.do(placed.named_sync, number=1, threads=256)
            b.copy_store(b.parameters[1], (0, 0), (1,), place, (0,))
            b.do(placed.commit_copies)
            b.do(placed.wait_copies, pending=0)

        return roles(first, second)

    assert not rules(build(late=False))
    assert rules(build(late=True)) == {"fence"}


@pytest.mark.parametrize("others", [False, True])
def test_loads_are_fenced_before_a_copy_lands_on_them(others: bool) -> None:
    """Loads that were only issued would see what lands: seen on a GPU, where a role that read a
    block asked for the next one at once. Here it lands where both or another role's warps read."""

    def build(*steps: str) -> Body:
        def reader(b: PlacedBuilder, place: Node, full: Node) -> None:
            b.wait(full, 0, 0)
            b.store(b.parameters[1], b.read(place, 0), (0, 0), (1,))
            for step in steps:
                if step == "fence":
                    b.do(placed.fence, kind="async")
                else:
                    b.do(placed.named_sync, number=1, threads=128)
            if others:
                b.arrive(full, 1)
            else:
                again(b, place, full)

        def again(b: PlacedBuilder, place: Node, full: Node) -> None:
            b.expect(full, 0, 64)
            b.copy_async(place, (0,), b.parameters[0], (1, 0), (1,), full, 0)
            b.wait(full, 0, 1)

        def first(b: PlacedBuilder, place: Node, full: Node) -> None:
            b.expect(full, 0, 64)
            b.copy_async(place, (0,), b.parameters[0], (0, 0), (1,), full, 0)
            if others:
                b.wait(full, 1, 0)
                b.wait(full, 0, 0)
                again(b, place, full)

        return roles(first, reader)

    assert not rules(build("fence", "sync"))
    assert rules(build("sync")) == {"fence"}
    if not others:  # to arrive is to meet
        assert rules(build("fence")) == rules(build("sync", "fence")) == {"fence"}


def test_uninitialised_boxes() -> None:
    """A stage that nobody filled, a register tile that was only made, parts that make a whole."""

    def reads(b: PlacedBuilder, place: Node, full: Node) -> None:
        b.write(place, b.constant(1, float32, (16,)), 0)
        b.store(b.parameters[1], b.read(place, 1), (0, 0), (1,))

    def register(b: PlacedBuilder, place: Node, full: Node) -> None:
        b.store(b.parameters[1], b.read(b.register_tile((16,), float32)), (0, 0), (1,))

    def parts(b: PlacedBuilder, place: Node, full: Node) -> None:
        for start in (0, 8):
            b.store(place, b.constant(1, float32, (2, 8)), (0, start), (0, 1))
        b.do(placed.named_sync, number=1, threads=128)
        b.store(b.parameters[1], b.read(place), (0, 0), (0, 1))

    (found,) = errors(roles(reads))
    assert found.rule == "uninitialised" and "at [1], which nothing has written" in found.message
    assert rules(roles(register)) == {"uninitialised"}
    assert not check_body(roles(parts))


def test_own_stores_read_back_are_a_warning() -> None:
    """The warps of a role have to meet between store and load, if threads read others' parts."""

    def build(meet: bool) -> Body:
        def role(b: PlacedBuilder, place: Node, full: Node) -> None:
            b.write(place, b.constant(1, float32, (2, 16)))
            if meet:
                b.do(placed.named_sync, number=1, threads=128)
            b.store(b.parameters[1], b.read(place), (0, 0), (0, 1))

        return roles(role)

    assert rules(build(True), "warning") == set()
    assert rules(build(False), "warning") == {"warps"} and not rules(build(False))


def test_roles_inside_of_a_loop_are_joined() -> None:
    """Each trip starts the roles anew; what one trip's roles did, the next trip knows."""

    def build(trips: int, parity: Callable[[object], object]) -> Body:
        b = PlacedBuilder("trips", PARAMETERS)
        place, full = b.allocate((16,), float32, "shared"), b.barrier("full", 1)

        def trip(i: object, _: list[Node]) -> list[Node]:
            def fills() -> None:
                b.expect(full, 0, 64)
                b.copy_async(place, (), b.parameters[0], (0, 0), (1,), full, 0)

            def drains() -> None:
                b.wait(full, 0, parity(i))
                b.store(b.parameters[1], b.read(place), (0, 0), (1,))
                b.do(placed.fence, kind="async")

            b.role("fills", 4, 0, fills)
            b.role("drains", 4, 0, drains)
            return []

        looped(b, "i", 0, trips, 1, trip)
        return b.finish((1,))

    assert not check_body(build(3, lambda i: i % 2)) and not check_body(build(100, lambda i: i % 2))
    assert rules(build(3, lambda i: 0)) == {"deadlock"}


def test_results_of_two_roles_may_not_overlap() -> None:
    """Boxes of a parameter that two roles write; neighbours are fine, masked ones unknown."""

    def build(start: int, masked: bool = False) -> Body:
        def write(at: int) -> Callable[[PlacedBuilder, Node, Node], None]:
            def role(b: PlacedBuilder, place: Node, full: Node) -> None:
                mask = b.apply("less", b.add(ops.iota(size=8, dtype=int64)), b.index(4))
                b.store(
                    b.parameters[1],
                    b.constant(1, float32, (8,)),
                    (0, at),
                    (1,),
                    mask if masked else None,
                )

            return role

        return roles(write(0), write(start))

    assert not rules(build(8)) and not rules(build(4, masked=True))
    assert rules(build(4)) == {"race"}


def test_data_and_symbols_are_tried_at_their_ends() -> None:
    """A trip count from memory: the ring works for none, one and many; a missing wait shows."""

    def build(broken: bool) -> Body:
        b = PlacedBuilder("counted", [("count", Memory((1,), int64)), *PARAMETERS])
        place = b.allocate((2, 16), float32, "shared")
        full, empty = b.barrier("full", 1, 2), b.barrier("empty", 1, 2)

        def trips() -> object:
            return b.atom("count", b.load(b.parameters[0], (0,)), 0, 1 << 20)

        def fills(i: object, _: list[Node]) -> list[Node]:
            if not broken:
                b.wait(empty, i % 2, (i // 2 + 1) % 2)
            b.expect(full, i % 2, 64)
            b.copy_async(place, (i % 2,), b.parameters[1], (0, 0), (1,), full, i % 2)
            return []

        def drains(i: object, _: list[Node]) -> list[Node]:
            b.wait(full, i % 2, i // 2 % 2)
            b.read(place, i % 2)
            b.do(placed.fence, kind="async")
            b.arrive(empty, i % 2)
            return []

        b.role("producer", 4, 0, lambda: looped(b, "i", 0, trips(), 1, fills))
        b.role("consumer", 4, 0, lambda: looped(b, "i", 0, trips(), 1, drains))
        return b.finish((1,))

    assert Skeleton(build(False)).data and not check_body(build(False))
    assert {"race", "phase"} <= rules(build(True))


# ---- random roles -------------------------------------------------------------------------------

Step = Callable[[PlacedBuilder, Node, Node, random.Random, int], object]


def copied_out(b: PlacedBuilder, place: Node, bar: Node, rng: random.Random, own: int) -> None:
    """A stage goes out to the role's own row, and is mostly waited for."""
    b.copy_store(b.parameters[1], (own, 0), (1,), place, (rng.randint(0, 1),))
    b.do(placed.commit_copies)
    if rng.random() < 0.8:
        b.do(placed.wait_copies, pending=0)


def copied_in(b: PlacedBuilder, place: Node, bar: Node, rng: random.Random, own: int) -> None:
    """A stage is filled."""
    b.expect(bar, 0, 64)
    b.copy_async(place, (rng.randint(0, 1),), b.parameters[0], (0, 0), (1,), bar, 0)


STEPS: list[Step] = [
    lambda b, place, bar, rng, own: b.write(
        place, b.constant(1, float32, (16,)), rng.randint(0, 1)
    ),
    lambda b, place, bar, rng, own: b.read(place, rng.randint(0, 1)),
    lambda b, place, bar, rng, own: b.load(place, (0, 0), (2, 4), (0, 1)),
    lambda b, place, bar, rng, own: b.arrive(bar, 0),
    lambda b, place, bar, rng, own: b.wait(bar, 0, 0 if rng.random() < 0.7 else 1),
    lambda b, place, bar, rng, own: b.do(placed.fence, kind="async"),
    lambda b, place, bar, rng, own: b.do(placed.named_sync, number=1, threads=128),
    lambda b, place, bar, rng, own: b.do(placed.named_sync, number=2, threads=256),
    lambda b, place, bar, rng, own: b.do(placed.named_arrive, number=2, threads=256),
    lambda b, place, bar, rng, own: b.store(
        b.parameters[1], b.constant(0, float32, (16,)), (rng.randint(0, 3), 0), (1,)
    ),
    copied_in,
    copied_out,
]


def random_body(seed: int) -> Body:
    """Two or three roles of a few random steps over one place and two barriers."""
    rng = random.Random(seed)
    b = PlacedBuilder("random", PARAMETERS)
    place = b.allocate((2, 16), float32, "shared")
    bars = [b.barrier("one", 1), b.barrier("both", rng.choice((1, 2)))]

    def role(own: int) -> None:
        for _ in range(rng.randint(1, 5)):
            rng.choice(STEPS)(b, place, rng.choice(bars), rng, own)

    for own in range(rng.choice((2, 2, 3))):
        b.role(f"role{own}", 4, 0, lambda own=own: role(own))
    return b.finish((1,))


def test_random_roles_agree_with_the_interpreter() -> None:
    """What the check lets pass, the interpreter runs in every order it tries."""
    passed = 0
    for seed in range(500):
        body = random_body(seed)
        if rules(body) - {"uninitialised"}:  # the interpreter reads what was not written
            continue
        passed += 1
        for order in SEEDS:
            run(body, order)
    assert passed > 25

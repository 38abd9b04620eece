"""Small launches that do not need one another, as one: their programs side by side.

A step begins and ends with many small pieces (rows of a table, lengths, zeros to count in), each of
which takes a launch about as long as it takes itself. Kernels of plain loops, and updates of a
launch, that follow one another become one Body whose first programs are the first's, and so on.
For Targets whose launches are bought one by one; never within loops or branches of a Schedule.
Invariant: none of the joined Kernels reads or writes what another of them writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from ..ir.block import Block
from ..ir.node import Node
from ..ir.symbol import high
from ..ir.types import Memory
from ..tile import ops
from ..tile.build import Body, BodyBuilder, copy_block
from .check import reads_writes
from .lowering import Lowering
from .reuse import find_lives, only_moves
from .schedule import Kernel, Launch, Schedule

MOST_PROGRAMS = 1024
MOST_ELEMENTS = 1 << 22  # that one of them writes
MOST_KERNELS = 6  # of one launch
# ops that a joined Body has not
OTHERS = ("allocate", "role", "barrier", "cumulative", "sort", "grid_dependency_wait")


def put_side_by_side(lowering: Lowering, schedule: Schedule) -> None:
    """The pass: join what may be joined, and find lives anew."""
    if lowering.frame.loops:
        return
    kernels = schedule.kernels
    found: list[Kernel] = []
    run: list[Kernel] = []

    def close() -> None:
        found.extend([_joined(run)] if len(run) > 1 else run)
        run.clear()

    for kernel in kernels:
        small = _is_small(kernel)
        if run and not (small and len(run) < MOST_KERNELS and _apart(run, kernel, schedule)):
            close()
        if small:
            run.append(kernel)
        else:
            found.append(kernel)
    close()
    kernels[:] = found
    find_lives(lowering, schedule)


def _is_small(kernel: Kernel) -> bool:
    """Whether a Kernel is one small launch of plain loops or of an update."""
    if kernel.kind not in ("loops", "update") or kernel.depth or len(kernel.steps) != 1:
        return False
    step = kernel.steps[0]
    if not isinstance(step, Launch):
        return False
    body = step.body
    if len(body.grid) != 1 or not isinstance(body.grid[0], int) or body.grid[0] > MOST_PROGRAMS:
        return False
    reads, stored = kernel.region
    if any(high(v.size) > MOST_ELEMENTS for v in stored):
        return False
    if len(reads) == len(stored) == 1 and reads[0].size == stored[0].size:
        if only_moves(stored[0], reads[0]):
            return False  # another shape of a value: `take_over` may leave no launch of it
    return not body.block.find(*OTHERS)


def _apart(run: Sequence[Kernel], kernel: Kernel, schedule: Schedule) -> bool:
    """Whether a Kernel has nothing to do with what others before it write, nor they with it."""

    def owners(kernel: Kernel) -> list[set[int]]:
        return [{schedule.storage(s) for s in slots} for slots in reads_writes(kernel.steps[0])]

    reads, writes = owners(kernel)
    for other in run:
        read, written = owners(other)
        if written & (reads | writes) or writes & read:
            return False
    return True


def _joined(run: Sequence[Kernel]) -> Kernel:
    """Several Kernels as one."""
    steps = [k.steps[0] for k in run]
    body = side_by_side([s.body for s in steps])
    reads = tuple(dict.fromkeys(r for k in run for r in k.region[0]))
    stored = tuple(v for k in run for v in k.region[1])
    joined = Kernel(body.name, "loops", (reads, stored))
    joined.key = body.name if all(kernel.key for kernel in run) else ""
    joined.notes["verdict"] = run[0].notes.get("verdict")
    joined.flops, joined.bytes = sum(k.flops for k in run), sum(k.bytes for k in run)
    joined.steps.append(Launch(body, tuple(slot for s in steps for slot in s.slots)))
    return joined


def side_by_side(bodies: Sequence[Body]) -> Body:
    """One Body whose programs are those of all: the first's first."""
    name = "_and_".join([bodies[0].name, *(b.name.rsplit("_", 1)[-1] for b in bodies[1:])])
    parameters: list[tuple[str, Memory]] = []
    for number, body in enumerate(bodies):
        parameters += [(f"{p.attrs['name']}_{number}", p.type) for p in body.parameters]  # type: ignore[misc]
    b = BodyBuilder(name, parameters)
    program = b.add(ops.program(axis=0))
    pieces: list[tuple[int, Block, list[Node]]] = []  # first program, what it runs on what
    given, count = iter(b.parameters), 0
    for body in bodies:
        pieces.append((count, body.block, list(islice(given, len(body.parameters)))))
        count += int(high(body.grid[0]))

    def among(pieces: Sequence[tuple[int, Block, list[Node]]]) -> None:
        (first, block, arguments), *others = pieces

        def here() -> None:
            own = b.apply("subtract", program, first) if first else program
            copy_block(
                b, block, arguments, lambda _, node, __: own if node.op is ops.program else None
            )

        if others:
            b.branch(b.apply("less", program, others[0][0]), here, lambda: among(others))
        else:
            here()

    among(pieces)
    notes: dict[str, Any] = {"warps": max(body.notes.get("warps", 4) for body in bodies)}
    if any(body.notes.get("distinct") for body in bodies):
        notes["distinct"] = True
    return b.finish((count,), **notes)

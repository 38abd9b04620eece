"""What each Effect does to an Order: the one place that says how ops order each other.

`come` is told of every Node that a role comes to, by the checks before launch and by the
interpreter. Invariant: DO has one row per kind of Effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..ir.node import Node
from . import row
from .access import Touched, join
from .ordering import Known, Order, Role, Waiting, scalar
from .row import Touch, effects_of, is_place


def come(order: Order, role: Role, node: Node, values: Known) -> Iterator[Waiting]:
    """A role comes to a Node with effects: what each does, and what the role waits for."""
    role.clock[role.number] += 1
    for effect in effects_of(node):
        yield from DO[type(effect)](order, role, node, effect, values) or ()


def _touch(order: Order, role: Role, node: Node, touch: Touch, values: Known) -> None:
    found = order.region(role, role.rank, node, touch, values)
    if found is not None:
        order.plain(found, role, node, touch)


def _make(order: Order, role: Role, node: Node, _: row.Make, values: Any) -> None:
    if is_place(node):
        order.place(role.rank, node).fresh()
        return
    if (role.rank, node) in order.made:
        text = f"the barrier {node.attrs['name']} is set up several times"
        order.report("unproved", text, node, None, "set it up once, before the roles", "warning")
    order.made.add((role.rank, node))


def _arrive(order: Order, role: Role, node: Node, arrive: row.Arrive, values: Known) -> None:
    for rank in order.reached(role, node, arrive, values):
        bar = order.bar(rank, node, arrive, values)
        if bar is not None:
            order.come(role, bar, node, 1, arrive.bytes, 0)


def _wait(order: Order, role: Role, node: Node, wait: row.Wait, values: Known) -> Iterator[Waiting]:
    bar = order.bar(role.rank, node, wait, values)
    if bar is None:
        return
    while (over := len(bar.over)) % 2 == scalar(wait.parity, values):
        yield Waiting(role, node, bar, over)
    if role.clock[bar.agent] < over - 1:
        text = f"{role.name} waits on {bar.name} for phase {over - 1} without knowing"
        text += " that the phase before is over: it may go on too early"
        order.report("phase", text, node)
    bar.waits.append((over, role.number, role.epoch, node))
    if over:
        ended = bar.over[over - 1]
        role.synced = max(role.synced, ended[role.number])
        join(role.clock, ended)


def _meet(order: Order, role: Role, node: Node, meet: row.Meet, values: Any) -> Iterator[Waiting]:
    round_ = order.rounds[role.rank, meet.number]
    over, threads, came = len(round_.over), meet.threads, round_.arrived + 32 * role.warps
    if round_.arrived and threads != round_.count:
        text = f"{round_.name} is used with {round_.count} and with {threads} threads"
        order.report("arrivals", text, node, round_.node)
    if came > threads:
        order.report("arrivals", f"{round_.name}: {came} of {threads} threads came", node)
    round_.count = max(threads, came)
    order.come(role, round_, node, 32 * role.warps, 0, 0)
    round_.node = node
    if meet.waits:
        if len(round_.over) == over:
            yield Waiting(role, node, round_, over)
        role.synced = max(role.synced, role.epoch)
        join(role.clock, round_.over[over])
        copies = role.groups["copy_threads"]  # what each thread waited for, all now know of
        role.clock[copies.agent] = max(role.clock[copies.agent], copies.known)


def _fence(order: Order, role: Role, node: Node, fence: row.Fence, values: Any) -> None:
    if fence.kind == "async":
        for plain in role.unfenced:
            plain.fence = role.epoch
        role.unfenced = []
    elif fence.kind == "matrix":
        role.registers.clear()
        role.fenced = True


def _land(order: Order, role: Role, node: Node, land: row.Land, values: Known) -> None:
    if land.parts not in (0, order.ranks):
        text = f"{node.op.name} of {land.parts} shares to {order.ranks} programs"
        order.report("index", text, node)
        return
    source = None
    if land.source is not None:
        source = order.region(role, role.rank, node, land.source, values)
    for rank in order.reached(role, node, land, values):
        bar = order.bar(rank, node, land, values)
        into = order.region(role, rank, node, land.into, values)
        if bar is None or into is None:
            continue
        made = Touched(bar.agent, len(bar.over) + 1, node)
        if source is not None and rank == role.rank:
            order.asynchronous(source, role, made, False)
        order.asynchronous(into, role, made, True, land.source is not None)
        order.come(role, bar, node, 0, 0, land.into.bytes, land.tells)


def _work(order: Order, role: Role, node: Node, work: row.Work, values: Known) -> None:
    group = role.groups[work.engine]
    if work.alone and group.issued > group.known:
        text = f"{node.op.name} with words of what is kept while another is under way"
        order.report("race", text, node, group.last, "put matrix_wait(pending=0) before it")
    group.issued += 1
    group.last = node
    made = Touched(group.agent, group.issued, node)
    for touch in work.touches:
        if touch.when is not None and not values[touch.when]:
            continue
        found = order.region(role, role.rank, node, touch, values)
        if found is None:
            continue
        if not work.by_threads:
            order.unfenced(found.place, role, node)
            order.asynchronous(found, role, made, touch.writes)
        elif touch.writes:
            hint = "named_sync with the role's own threads between the two"
            for near in found.around():
                if (read := near.reads.get(role.number)) is not None:
                    order.met(found.place, read, role, node, "writes", "read", hint)
            order.touch(found, role, made, True)
        else:
            order.plain(found, role, node, touch)


def _close(order: Order, role: Role, node: Node, close: row.Close, values: Any) -> None:
    group = role.groups[close.engine]
    group.committed.append(group.issued)


def _drain(order: Order, role: Role, node: Node, drain: row.Drain, values: Any) -> None:
    group = role.groups[drain.engine]
    covered = len(group.committed) - drain.pending
    if covered > 0:
        group.known = max(group.known, group.committed[covered - 1])
        if drain.engine != "copy_threads":  # else each thread knows of its own, until they meet
            role.clock[group.agent] = group.known


def _depend(order: Order, role: Role, node: Node, _: row.Depend, values: Any) -> None:
    role.clock[order.grid], role.waited = 1, True


DO: dict[type, Callable[..., Iterator[Waiting] | None]] = {
    Touch: _touch,
    row.Make: _make,
    row.Arrive: _arrive,
    row.Wait: _wait,
    row.Meet: _meet,
    row.Fence: _fence,
    row.Land: _land,
    row.Work: _work,
    row.Close: _close,
    row.Drain: _drain,
    row.Depend: _depend,
}

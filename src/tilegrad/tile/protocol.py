"""Races and deadlock across roles, without data: the skeleton's events run against each other.

`check_protocol` runs the events of all roles (`skeleton`) once, each as far as it can go, and an
Order (`ordering`) finds races, missing fences, uninitialised boxes, phases that are not certain,
deadlock and accesses before the dependency wait, whatever the order in which roles run.
Invariant: what is found does not hang on whose turn it was.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from math import prod
from typing import Any

from ..ir.node import Node
from .finding import Finding
from .happening import event
from .ordering import Order, Role
from .skeleton import Event, Scenario, Skeleton


class _Turn:
    """A role, and the events it has to run."""

    def __init__(self, role: Role, events: list[Event]) -> None:
        self.role, self.events, self.base, self.at = role, events, role.epoch, 0

    @property
    def done(self) -> bool:
        return self.at >= len(self.events)

    @property
    def here(self) -> Event:
        return self.events[self.at]

    def advance(self, order: Order) -> bool:
        """Run until it waits or ends; whether it moved."""
        before, role = self.at, self.role
        while not self.done:
            role.clock[role.number] = self.base + self.at + 1
            if not event(order, role, *self.here):
                break
            self.at += 1
        return self.at > before


def check_protocol(skeleton: Skeleton, scenario: Scenario, whole: bool = False) -> list[Finding]:
    """Races, deadlock, fences, uninitialised places and the dependency wait of one scenario."""
    ranks, program = prod(skeleton.body.notes.get("cluster", (1,))), scenario.program
    first = program[0] // ranks * ranks if program else 0
    traces = []
    for rank in range(ranks):
        own = (first + rank, *program[1:]) if program else ()
        traces.append(skeleton.trace(replace(scenario, program=own, rank=rank), whole))
    order = Order(skeleton.body, scenario.symbols, ranks)
    if _run(order, traces):
        order.end()
    return list(order.findings.values())


Part = tuple[list[Event], list[tuple[Node, list[Event]]]]


def _parts(trace: list[Any]) -> list[Part]:
    """A trace cut behind each set of roles: the program's events, then those of the roles."""
    found: list[Part] = [([], [])]
    for item in trace:
        if item[0] == "roles":
            found[-1] = (found[-1][0], item[1])
            found.append(([], []))
        else:
            found[-1][0].append(item)
    return found


def _run(order: Order, traces: list[list[Any]]) -> bool:
    """Run all ranks' events, up to roles, then these, and so on; False after a deadlock."""
    for parts in zip_longest(*map(_parts, traces), fillvalue=([], [])):
        mains = [_Turn(order.roles[rank, None], events) for rank, (events, _) in enumerate(parts)]
        if not _schedule(order, mains):
            return False
        forks = [(rank, [node for node, _ in roles]) for rank, (_, roles) in enumerate(parts)]
        events = [events for _, roles in parts for _, events in roles]
        turns = [_Turn(role, own) for role, own in zip(order.fork(forks), events)]
        if not _schedule(order, turns):
            return False
        for turn in turns:
            order.settled(turn.role)
            order.joined(turn.role)
    return True


def _schedule(order: Order, turns: list[_Turn]) -> bool:
    """Give turns until all have ended; False after a deadlock."""
    while any([turn.advance(order) for turn in turns]):
        pass
    stuck = [turn for turn in turns if not turn.done]
    if stuck:
        waits = [order.awaited(turn.role, *turn.here) for turn in stuck]
        nodes: list[Node] = [turn.here[0] for turn in stuck]
        order.report("deadlock", "; ".join(waits), nodes[0], nodes[1] if len(nodes) > 1 else None)
    return not stuck

"""Instance: a kernel's definition, what one call gives it, and the Plan that a person stated.

A Graph that calls a kernel holds an Instance and no Target: Bodies for a Target, and what nobody
stated of its Plan, are made when the Schedule asks. Invariant: an Instance means what the kernel
meant when it was called: where something that it reaches has changed since, or where a Plan that
is chosen gives results of other shapes, the Bodies for any machine are taken, which were traced
then.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from ..core.config import config
from ..core.errors import UserError
from ..core.target import Target
from ..ir.node import exact
from ..ir.types import Array, Type
from .callee import Launches
from .define import Definition
from .plan import Plan
from .reach import reached, stable, value_key
from .stage import staged

LOG = logging.getLogger("tilegrad.kernel")
# What is filled in of Plans for any machine: small blocks, or large ones where a kernel needs them.
PORTABLE = (Plan(32, 64, 64, 1, 1, 8, "none"), Plan(128, 128, 64, 8, 3, 8, "xor"))


class Instance:
    """What makes the Bodies of one call of a kernel."""

    def __init__(self, definition: Definition, given: Mapping[str, Any], plan: Plan) -> None:
        self.definition, self.given, self.plan = definition, dict(given), plan
        self.reached = reached(definition.function)
        self.values = staged(definition.function).values()
        self.checked = config().checked
        self._portable: Launches | None = None
        self.known: dict[tuple[str, bool], Launches] = {}

    @cached_property
    def key(self) -> str:
        """A hash of the code that is reached, the arguments, and the Plan."""
        given = [
            f"{n}: {v}" if isinstance(v, Array) else f"{n}={stable(value_key(v))} {v}"
            for n, v in self.given.items()
        ]
        parts = (stable(self.reached), given, str(self.plan), self.checked)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]

    @property
    def portable(self) -> Launches:
        """Bodies for any machine; the kernel's own mistakes are told here."""
        first: UserError | None = None
        for other in PORTABLE if self._portable is None else ():
            try:
                self._portable = self._traced(other, guards=True)
                break
            except UserError as error:
                first = first or error
        if self._portable is None:
            assert first is not None
            raise first
        return self._portable

    def launches(self, target: Target) -> Launches:
        """Bodies for a Target, by the Plan that suits it."""
        guards = not target.has_threads or self.checked
        found = self.known.get((target.key, guards))
        if found is None:
            found = self._made(target, guards)
            self.known[target.key, guards] = found
        return found

    def _made(self, target: Target, guards: bool) -> Launches:
        name = self.definition.name
        if reached(self.definition.function) != self.reached:
            LOG.info("kernel %s: what it reaches has changed since it was called", name)
            return self.portable
        made = self._traced(self.plan.filled(target), guards)
        if _results(made) != _results(self.portable):
            LOG.info("kernel %s: shapes of its results follow from its Plan", name)
            return self.portable
        return made

    def _traced(self, filled: Plan, guards: bool) -> Launches:
        own = {n: v for n, v in vars(self.plan).items() if v is not None}
        full = Plan(**{**vars(filled), **own})
        return self.definition.trace(self.given, self.plan, full, guards, self.values)


def instance(definition: Definition, given: Mapping[str, Any], plan: Plan) -> Instance:
    """The Instance of a call; calls that are alike share one."""
    values = tuple([(n, exact(v)) for n, v in given.items()])
    key = (
        "instance",
        values,
        plan,
        exact(plan.sizes),
        reached(definition.function),
        config().checked,
    )
    found: Instance | None = definition.recall(key, given)
    if found is None:
        found = definition.known[key] = Instance(definition, given, plan)
    return found


def _results(launches: Launches) -> dict[int, Type]:
    """Types of the results."""
    return {
        place: parameter.type
        for body, roles in launches
        for parameter, (kind, place) in zip(body.parameters, roles)
        if kind == "store"
    }

"""KernelPlans: the best Plans of one kernel of a person, by problem and machine.

A problem is what a person calls the kernel for; the machine is the Device that its arguments are
on, or the Target that is traced for. Invariant: a problem is searched once for a Device's Target,
and what was found is kept in the folder that the person named.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..core.target import Target
from ..kernels.plan_table import Entry, PlanTable, Trial
from ..runtime.device import target_for
from ..tile.plan import Plan, from_record
from .search import Build, plans_in, search

LOG = logging.getLogger("tilegrad.tune")
Arguments = Callable[[], tuple[Sequence[Any], Mapping[str, int]]]


class KernelPlans:
    """The table of one kernel in a folder (None: the cache folder, "": this process only)."""

    def __init__(self, name: str, folder: str | None) -> None:
        self.name, self.table = name, PlanTable(folder)

    def known(self, problem: tuple[Any, ...], device: str | Target) -> Plan | None:
        """The best Plan for a Device, or for a machine that is not here, if a search found one."""
        entry = self._entry(self._key(problem, device))
        return None if entry is None else from_record(entry.plan)

    def tuned(
        self,
        problem: tuple[Any, ...],
        space: Mapping[str, Sequence[Any]],
        base: Plan,
        make: Build,
        arguments: Arguments,
        budget_ms: float,
        device: str,
    ) -> tuple[Plan, tuple[Trial, ...]]:
        """The best Plan of a space and every Trial, searched for where nothing is known."""
        key = self._key(problem, device)
        entry = self._entry(key)
        if entry is None:
            plans = plans_in(space, base)
            entry = search(plans, make, *arguments(), budget_ms, device)
            self.table.put(key, entry)
            best = from_record(entry.plan)
            LOG.info("autotune %s: %s of %d Plans", self.name, best, len(plans))
        trials = tuple(replace(t, plan=from_record(t.plan)) for t in entry.trials)
        return from_record(entry.plan), trials

    def _entry(self, key: str) -> Entry | None:
        return self.table.get(key, from_record)

    def _key(self, problem: tuple[Any, ...], device: str | Target) -> str:
        target = device if isinstance(device, Target) else target_for(device)
        made = hashlib.sha256(repr((*problem, target.key)).encode()).hexdigest()[:24]
        return f"{self.name}-{made}"

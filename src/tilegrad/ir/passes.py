"""Pass: one line of the page that lists every pass; Stage: what one did.

A Pass names its function as "module:function" within the package; the module is imported when the
Pass first runs, so what does not apply to a Target costs nothing. Invariant: whether a Pass applies
follows from the facts of the Target alone, never from where it stands in a list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from ..core.errors import UserError
from ..core.target import Target
from .node import Node

PACKAGE = __package__.rpartition(".")[0]


@dataclass(frozen=True)
class Pass:
    """A pass by name: where its function is, for which Targets, and why it is always there."""

    name: str
    where: str  # "folder.module:function" of this package
    applies: Callable[[Target | None], bool] | None = None  # given the facts; None: to any
    needed: str = ""  # why it cannot be left out; '' where it can

    @property
    def function(self) -> Any:
        """The function, imported now if it was not before."""
        found = _functions.get(self.where)
        if found is None:
            module, _, name = self.where.partition(":")
            found = _functions[self.where] = getattr(import_module(f"{PACKAGE}.{module}"), name)
        return found


_functions: dict[str, Any] = {}


@dataclass
class Stage:
    """What a pass did, for `explain`: the Graph after it, or counts of Regions and Kernels."""

    name: str
    results: list[Node] = field(default_factory=list)
    fired: dict[str, int] = field(default_factory=dict)
    changed: bool = False
    notes: list[str] = field(default_factory=list)
    skipped: str = ""  # why it did not run


def chosen(
    passes: Sequence[Pass], target: Target | None, without: Sequence[str]
) -> list[tuple[Pass, str]]:
    """Every pass with '' where it runs, else why it does not."""
    found = []
    for one in passes:
        applies = one.applies is None or one.applies(target)
        reason = "" if applies else "not for this Target"
        found.append((one, "left out" if one.name in without else reason))
    return found


def check_names(passes: Sequence[Pass], without: Sequence[str]) -> None:
    """Raise unless every name is that of a pass that can be left out."""
    known = {one.name: one for one in passes}
    for name in without:
        if name not in known:
            free = [one.name for one in passes if not one.needed]
            raise UserError(
                f"no pass is called {name!r}",
                op="without",
                expected="one of " + ", ".join(free),
                got=name,
            )
        if known[name].needed:
            raise UserError(
                f"the pass {name!r} cannot be left out",
                op="without",
                expected="a pass that only makes programs faster or smaller",
                got=f"{name}: {known[name].needed}",
            )

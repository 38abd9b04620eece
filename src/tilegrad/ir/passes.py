"""Pass: one line of the page that lists every pass; Stage: what one did.

A Pass names its function as "module:function" within the package; the module is imported when the
Pass first runs, so what does not apply to a Target costs nothing. Invariant: whether a Pass applies
follows from the facts of the Target and the level of determinism, never from where it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..core.config import config, invariant
from ..core.errors import UserError
from .node import Node, needs

if TYPE_CHECKING:
    from ..core.target import Target

PACKAGE = __package__.rpartition(".")[0]


@dataclass(frozen=True)
class Pass:
    """A pass by name: where its function is, for which Targets, and why it is always there."""

    name: str
    where: str | Callable[..., Any]  # "folder.module:function" of this package, or the function
    applies: Callable[[Target | None], bool] | None = None  # given the facts; None: to any
    needed: str = ""  # why it cannot be left out; '' where it can
    on: tuple[str, ...] = ()  # ops of a Graph, or kinds of Regions, without which it does nothing
    checks: bool = False  # whether it only looks for faults, where the Config asks for that
    varies: str = ""  # what of its work depends on the number of rows: not for `invariant` then

    @property
    def function(self) -> Any:
        """The function, imported now if it was not before."""
        if not isinstance(self.where, str):
            return self.where
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


BLOCKS = "blocks"  # in `Pass.on`: any op that owns Blocks


def ops_in(results: Sequence[Node]) -> set[str]:
    """Names of the ops in a Graph, those in Blocks of it too."""
    found: set[str] = set()
    waiting, seen = list(results), set(results)
    while waiting:
        node = waiting.pop()
        found.add(node.op.name)
        below: Sequence[Node] = node.inputs
        if node.blocks:
            found.add(BLOCKS)
            inside = [n for b in node.blocks for n in (*b.nodes, *b.results)]
            below = [*needs(node), *inside]
        for one in below:
            if one not in seen:
                seen.add(one)
                waiting.append(one)
    return found


def chosen(
    passes: Sequence[Pass], target: Target | None, without: Sequence[str]
) -> list[tuple[Pass, str]]:
    """Every pass with '' where it runs, else why it does not."""
    found = []
    for one in passes:
        applies = one.applies is None or one.applies(target)
        reason = "" if applies else "not for this Target"
        if one.checks and not config().verify:
            reason = "only where faults are looked for"
        if one.varies and not reason and invariant():
            reason = f"invariant: {one.varies}"
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

"""Rows of Families, those from outside the package, and what of them is in every compile key.

It stands apart from the table of Families so that a warm start, which only needs the key, imports
none of it. Invariant: two processes with the same `outside()` select the same Families.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING

from ..core.target import Target
from ..runtime.registry import Registry

if TYPE_CHECKING:
    from .family import Family

GROUP = "tilegrad.families"  # of entry points


def any_target(target: Target) -> bool:
    """No fact is asked for."""
    return True


@dataclass(frozen=True)
class Row:
    """One Family: the kinds of Regions it is for, the ops that start them, facts, class."""

    name: str
    anchors: tuple[str, ...]  # names of Graph ops
    where: str | Family  # "module:Class or function" of this folder, or one from outside
    applies: Callable[[Target], bool] = any_target
    kinds: tuple[str, ...] = ()  # of Regions, where they are not named as its anchors
    fallback: bool = False  # whether it is taken only where no other Family offers

    @property
    def taken(self) -> tuple[str, ...]:
        """The kinds of Regions it takes."""
        return self.kinds or self.anchors


OUTSIDE: Registry[Row] = Registry("family", GROUP, {})
MADE: dict[str, Family] = {}  # Families by the names of their rows


def family_of(row: Row) -> Family:
    """The Family of a row, imported now if it was not before."""
    found = MADE.get(row.name)
    if found is None:
        if isinstance(row.where, str):
            module, _, name = row.where.partition(":")
            found = getattr(import_module(f".{module}", __package__), name)
            if isinstance(found, type):
                found = found()
            else:
                from .family import ByFunction

                found = ByFunction(found)
        else:
            found = row.where
        found.name, found.fallback = row.name, row.fallback or found.fallback
        MADE[row.name] = found
    return found


@lru_cache(maxsize=1)
def outside() -> tuple[str, ...]:
    """What is registered: names with a hash of their code."""
    names = OUTSIDE.names()
    if not names:
        return ()
    import hashlib
    import inspect

    found = []
    for row in map(OUTSIDE.get, names):
        source = inspect.getsource(type(family_of(row)))
        code = hashlib.sha256(source.encode()).hexdigest()[:16]
        found.append(f"{row.name} {','.join(row.anchors)} {code}")
    return tuple(sorted(found))

"""Registries: what target folders, and packages from outside, add to tilegrad by name.

An entry is an object, or the text "module:name" that says where one is; a package that is installed
names its own under the Registry's group of entry points. Invariant: a module is imported when an
entry of it is first asked for, never before; a name means the same for the life of the process
unless somebody registers it again.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, TypeVar, cast

from ..core.errors import InternalError, UserError
from ..core.lock import new_lock

Entry = TypeVar("Entry")


class Registry(Generic[Entry]):
    """Entries by name; `group` is the entry points' group of packages from outside."""

    def __init__(self, what: str, group: str, built_in: Mapping[str, str]) -> None:
        self.what, self.group = what, group
        self._named: dict[str, Entry | str] = dict(built_in)
        self._found: dict[str, Entry] = {}
        self._looked = False  # at the entry points of packages
        self._lock = new_lock()

    def register(self, name: str, entry: Entry | str) -> None:
        """Add an entry, or put it in another's place."""
        with self._lock:
            self._named[name] = entry
            self._found.pop(name, None)

    def remove(self, name: str) -> None:
        """Take an entry back."""
        with self._lock:
            self._named.pop(name, None)
            self._found.pop(name, None)

    @contextmanager
    def replaced(self, name: str, entry: Entry | str) -> Iterator[None]:
        """Within the block a name means another entry."""
        before = self._named.get(name)
        self.register(name, entry)
        try:
            yield
        finally:
            self.remove(name)
            if before is not None:
                self.register(name, before)

    def find(self, name: str) -> Entry | None:
        """The entry of a name, imported now if need be; None if there is none."""
        found = self._found.get(name)
        if found is None and self.has(name):
            named = self._named[name]
            found = _imported(named) if isinstance(named, str) else named
            self._found[name] = found
        return found

    def get(self, name: str) -> Entry:
        """The entry of a name; an error names those that there are."""
        found = self.find(name)
        if found is None:
            raise UserError(
                f"no such {self.what}",
                op=self.what,
                expected=", ".join(self.names()),
                got=repr(name),
                hint=f"packages add their own as entry points of {self.group!r}",
            )
        return found

    def names(self) -> list[str]:
        """All names, ours first."""
        self._look()
        return list(self._named)

    def has(self, name: str) -> bool:
        """Whether there is an entry of a name; nothing is imported."""
        if name not in self._named:
            self._look()
        return name in self._named

    def _look(self) -> None:
        """Take in what installed packages name; ours are never replaced."""
        if self._looked:
            return
        if not named_somewhere(self.group):
            self._looked = True
            return
        from importlib.metadata import entry_points

        for point in entry_points(group=self.group):
            self._named.setdefault(point.name, point.value)
        self._looked = True


def named_somewhere(group: str) -> bool:
    """Whether an installed package has entry points of a group: a look at the folders of
    sys.path, since importlib.metadata takes tens of milliseconds to import."""
    for folder in sys.path:
        try:
            entries = [e for e in os.listdir(folder) if e.endswith((".dist-info", ".egg-info"))]
        except OSError:
            continue
        for entry in entries:
            try:
                with open(os.path.join(folder, entry, "entry_points.txt"), "rb") as file:
                    if group.encode() in file.read():
                        return True
            except OSError:
                continue
    return False


def _imported(text: str) -> Any:
    module, _, name = text.partition(":")
    found = importlib.import_module(module.strip())
    for part in name.strip().split("."):
        if not hasattr(found, part):
            raise InternalError("registry", f"{module} has no {name}")
        found = cast(Any, getattr(found, part))
    return found


__all__ = ["Registry"]

"""Recent: a table of bounded length that forgets what was not asked for longest; and
SecondChance, one that is read as a plain dict, where asking must cost nothing.

Invariant: neither holds more than its bound; threads may read one together. What is forgotten goes
when its last user goes: nothing that runs or is held elsewhere is ended.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from .lock import new_lock

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """Values by key, at most `bound()` of them."""

    def __init__(self, bound: Callable[[], int]) -> None:
        self.bound = bound
        self._lock = new_lock()
        self._values: OrderedDict[Hashable, Value] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable) -> Value | None:
        """The value, now the one asked for last; None if there is none."""
        with self._lock:
            found = self._values.get(key)
            if found is not None:
                self._values.move_to_end(key)
            return found

    def __setitem__(self, key: Hashable, value: Value) -> None:
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            while len(self._values) > max(1, self.bound()):
                self._values.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._values.clear()


class SecondChance(dict[Any, Value]):
    """A dict whose values have a flag `used`, set by who reads them: one that was used since its
    last turn gets another before it is forgotten. One thread at a time calls `keep`."""

    def keep(self, key: Hashable, value: Value, bound: int) -> None:
        """Add a value, and let others go until no more than `bound` are left."""
        self[key] = value
        while len(self) > max(1, bound):
            oldest = next(iter(self))
            found: Any = self.pop(oldest)
            if found.used or oldest == key:
                found.used = False
                self[oldest] = found

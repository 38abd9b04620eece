"""Fields of a configuration that comes from a file, read with care.

Invariant: a value is of the kind asked for, or a UserError names its field and what was there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...core.errors import UserError

WHOLE, REAL = (int, np.integer), (int, float, np.integer, np.floating)
LARGEST, LAYERS = 1 << 31, 1 << 12  # far above what models have; beyond them a file lies


def is_finite(value: Any) -> bool:
    """Whether a value is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, REAL):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond all floats
        return False


class Fields:
    """A mapping from a file; `prefix` is before each name."""

    def __init__(self, given: Mapping[str, Any], op: str, prefix: str = "") -> None:
        self.given, self.op, self.prefix = given, op, prefix

    def get(self, name: str, default: Any = None) -> Any:
        """A value as it is, or the default where it is absent or null."""
        value = self.given.get(self.prefix + name)
        return default if value is None else value

    def whole(self, name: str, default: int | None = None, most: int = LARGEST) -> int:
        """An int from -most to most."""
        value = self._needed(name, default)
        if isinstance(value, bool) or not isinstance(value, WHOLE):
            raise self.wrong(name, "an int", value)
        if not -most <= value <= most:
            raise self.wrong(name, f"an int up to {most}", value)
        return int(value)

    def layers(self, name: str, default: int | None = None) -> int:
        """How many layers there are."""
        return self.whole(name, default, LAYERS)

    def word(self, name: str, default: str) -> str:
        """A str."""
        value = self.get(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, "a word", value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite float."""
        value = self._needed(name, default)
        if not is_finite(value):
            raise self.wrong(name, "a finite number", value)
        return float(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of finite floats."""
        value = self._needed(name, None)
        if not isinstance(value, (list, tuple, np.ndarray)) or not all(map(is_finite, value)):
            raise self.wrong(name, "a list of finite numbers", value)
        return tuple(float(v) for v in value)

    def flag(self, name: str, default: bool | None = None) -> bool:
        """A bool."""
        value = self._needed(name, default)
        if not isinstance(value, (bool, np.bool_)):
            raise self.wrong(name, "true or false", value)
        return bool(value)

    def choice(self, name: str, known: Mapping[str, str], default: str | None = None) -> str:
        """What a word stands for."""
        value = self._needed(name, default)
        if not isinstance(value, str) or value not in known:
            raise self.wrong(name, " or ".join(known), value)
        return known[value]

    def wrong(self, name: str, expected: Any, got: Any) -> UserError:
        """The error of a field that has another value than it may have."""
        return UserError(
            f"bad field {self.prefix + name!r}", op=self.op, expected=expected, got=repr(got)[:80]
        )

    def _needed(self, name: str, default: Any) -> Any:
        value = self.get(name, default)
        if value is None:
            raise UserError(
                f"missing field {self.prefix + name!r}",
                op=self.op,
                expected="a configuration that has it",
                got=f"{len(self.given)} other fields",
            )
        return value


__all__ = ["Fields"]

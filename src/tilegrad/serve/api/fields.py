"""The fields of a request's body, read one by one with their types and ranges.

Invariant: a field that is not there, or null, is not given; one with a wrong value is refused by
its name. Fields that nobody asks for are ignored, as clients expect.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from ..refused import Refused

_NONE = object()


def parsed(data: bytes, depth: int) -> Fields:
    """The fields of a body: a JSON object in UTF-8."""
    try:
        body = json.loads(data.decode(), parse_constant=_no_constant)
    except UnicodeDecodeError:
        raise Refused("the body is not UTF-8", code="invalid_json") from None
    except RecursionError:
        raise Refused("the body is nested too deeply", code="invalid_json") from None
    except ValueError as error:
        where = f" (character {error.pos})" if isinstance(error, json.JSONDecodeError) else ""
        raise Refused(f"the body is not JSON{where}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise Refused("the body is not a JSON object", code="invalid_json")
    if deeper(body, depth):
        raise Refused(f"the body is nested deeper than {depth} levels", code="invalid_json")
    return Fields(body)


def _no_constant(word: str) -> Any:
    raise Refused(f"{word} is not JSON", code="invalid_json")


def deeper(value: Any, depth: int) -> bool:
    """Whether data is nested deeper than so many levels."""
    containers = [value]
    for _ in range(depth):
        items = (v.values() if isinstance(v, dict) else v for v in containers)
        containers = [i for each in items for i in each if isinstance(i, (dict, list))]
        if not containers:
            return False
    return True


class Fields:
    """A JSON object whose fields are asked for by name; `path` is where it stands."""

    def __init__(self, body: dict[str, Any], path: str = "") -> None:
        self.body, self.path = body, path

    def name(self, field: str) -> str:
        """A field as the client knows it."""
        return f"{self.path}.{field}" if self.path else field

    def wrong(self, field: str, expected: str) -> Refused:
        """What is said of a field that does not fit."""
        code = "missing_required_parameter" if self.body.get(field) is None else "invalid_value"
        return Refused(
            f"'{self.name(field)}' must be {expected}", param=self.name(field), code=code
        )

    def has(self, field: str) -> bool:
        """Whether a field is given."""
        return self.body.get(field) is not None

    def any(self, field: str) -> Any:
        """A field as it is; None where it is not given."""
        return self.body.get(field)

    def number(
        self, field: str, low: float, high: float = math.inf, *, above: bool = False
    ) -> float | None:
        """A number within a range; `above`: its lower end is not in it."""
        value = self.body.get(field)
        if value is None:
            return None
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not good or not low <= value <= high or (above and value == low):
            words = f"above {low:g}" if above else f"at least {low:g}"
            limit = "" if high == math.inf else f" and at most {high:g}"
            raise self.wrong(field, f"a number {words}{limit}")
        return float(value)

    def whole(self, field: str, low: int, high: int) -> int | None:
        """A whole number within a range."""
        value = self.body.get(field)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(field, f"a whole number from {low} to {high}")
        return value

    def flag(self, field: str, default: bool = False) -> bool:
        """True or false."""
        value = self.body.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(field, "true or false")
        return value

    def text(self, field: str, default: Any = _NONE, most: int = 1 << 16) -> Any:
        """A string; needed where there is no default."""
        value = self.body.get(field)
        if value is None and default is not _NONE:
            return default
        if not isinstance(value, str) or len(value) > most:
            raise self.wrong(field, f"a string of at most {most} characters")
        return value

    def choice(self, field: str, known: Sequence[str], default: str | None = None) -> str | None:
        """One of some words."""
        value = self.body.get(field)
        if value is None:
            return default
        if not isinstance(value, str) or value not in known:
            raise self.wrong(field, "one of " + ", ".join(known))
        return value

    def listed(self, field: str, most: int, *, needed: bool = False) -> list[Any]:
        """A list of at most so many items; an empty one where it is not given."""
        value = self.body.get(field)
        if value is None and not needed:
            return []
        if not isinstance(value, list) or len(value) > most or (needed and not value):
            raise self.wrong(field, f"a list of {'1 to' if needed else 'at most'} {most} items")
        return value

    def inner(self, field: str) -> Fields | None:
        """An object in a field."""
        value = self.body.get(field)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(field, "an object")
        return Fields(value, self.name(field))

    def items(self, field: str, most: int, *, needed: bool = False) -> list[Fields]:
        """The objects of a list."""
        found = []
        for place, item in enumerate(self.listed(field, most, needed=needed)):
            where = f"{self.name(field)}[{place}]"
            if not isinstance(item, dict):
                raise Refused(f"'{where}' must be an object", param=where, code="invalid_value")
            found.append(Fields(item, where))
        return found

    def refuse(self, *fields: str, why: str = "is not supported") -> None:
        """Refuse fields that would change what a request means, and are not served."""
        for field in fields:
            if self.body.get(field) not in (None, False, [], {}, ""):
                raise Refused(
                    f"'{self.name(field)}' {why}",
                    param=self.name(field),
                    code="unsupported_parameter",
                )


__all__ = ["Fields", "deeper", "parsed"]

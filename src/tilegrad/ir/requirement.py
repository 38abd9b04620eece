"""Requirements: what an op needs of symbolic sizes that their bounds do not prove.

`require` answers at once where the bounds decide, with the error that a known size gives. What
they leave open is gathered while a function is traced, becomes data of its Recipe, and is checked
when the Symbols have values: once for each choice of them. Invariant: a requirement that fails
raises the class and the text that the same sizes give when they are static, with the line of the
op; a text that round-trips says the same.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..core import errors
from ..core.errors import Location, UserError, user_location
from .literal import Names, read_symbolic, write, write_symbolic
from .symbol import Expr, Size, evaluate, high, low

Value = Any  # of a placeholder: a size, a shape, or anything that prints itself


@dataclass(frozen=True, slots=True)
class Requirement:
    """`value` is 0 (exact), or not negative; else an error whose texts name `sizes` in braces."""

    value: Expr
    exact: bool
    error: str  # the name of a class of `core.errors`
    texts: tuple[str, str, str, str, str]  # op, message, expected, got, hint; "" for none
    sizes: tuple[tuple[str, Value], ...]
    place: tuple[str, int] | None  # file and line of the op

    def check(self, symbols: Mapping[str, int]) -> None:
        """Raise unless it holds for these values of the Symbols."""
        found = evaluate(self.value, symbols)
        if found < 0 or (self.exact and found):
            raise self.failure(symbols)

    def failure(self, symbols: Mapping[str, int] | None = None) -> UserError:
        """The error, with numbers in the place of Symbols."""
        values = {name: _known(value, symbols) for name, value in self.sizes}
        op, message, *rest = (text.format(**values) for text in self.texts)
        expected, got, hint = (text or None for text in rest)
        place = None if self.place is None else Location(*self.place)
        kind: type[UserError] = getattr(errors, self.error)
        return kind(message, op=op or None, expected=expected, got=got, hint=hint, location=place)

    def __str__(self) -> str:
        relation = "==" if self.exact else ">="
        where = "" if self.place is None else f"  @ {self.place[0]}:{self.place[1]}"
        return f"{self.value} {relation} 0 ({self.texts[0]}){where}"

    def to_text(self, placed: bool = True) -> str:
        """All of it on one line; not `placed`, it is the same wherever the op was written."""
        sizes = tuple([(n, v if _is_plain(v) else str(v)) for n, v in self.sizes])
        place = self.place if placed else None
        record = (self.value, self.exact, self.error, self.texts, sizes, place)

        def parts(names: Names) -> str:
            return write(record, names)

        return write_symbolic(parts)

    @staticmethod
    def from_text(text: str) -> Requirement:
        """What `to_text` wrote."""
        return Requirement(*read_symbolic(text, "requirement").value())


class _Gathering(threading.local):
    found: dict[Any, Requirement] | None = None


_gathering = _Gathering()


@contextmanager
def gathering(found: dict[Any, Requirement]) -> Iterator[None]:
    """Requirements that are left open inside go into `found`, each once."""
    before, _gathering.found = _gathering.found, found
    try:
        yield
    finally:
        _gathering.found = before


def require(
    value: Size,
    error: type[UserError],
    message: str,
    *,
    op: str,
    expected: str = "",
    got: str = "",
    hint: str = "",
    exact: bool = False,
    **sizes: Value,
) -> None:
    """value >= 0 (== 0 where exact) or an error, now or when the Symbols are known.

    The texts name `sizes` in braces. Outside of a trace nobody could check later: then an equality
    that is not proved is refused, and of an inequality `graph.sizes` takes care.
    """
    lowest, highest = low(value), high(value)
    if lowest >= 0 and not (exact and highest):
        return
    found = _gathering.found
    place = user_location()
    needed = Requirement(
        value,  # type: ignore[arg-type]
        exact,
        error.__name__,
        (op, message, expected, got, hint),
        tuple(sizes.items()),
        None if place is None else (place.file, place.line),
    )
    if highest < 0 or (exact and (lowest > 0 or found is None)):
        raise needed.failure()
    if found is not None:
        found.setdefault((value, exact), needed)


def check_all(requirements: Iterable[Requirement], symbols: Mapping[str, int] | None) -> None:
    """Raise the first that does not hold, in the order of the ops."""
    for requirement in requirements:
        requirement.check(symbols or {})


def _known(value: Value, symbols: Mapping[str, int] | None) -> Value:
    if symbols is not None and isinstance(value, Expr):
        return evaluate(value, symbols)
    return tuple([_known(v, symbols) for v in value]) if isinstance(value, tuple) else value


def _is_plain(value: Value) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(v) for v in value)
    return isinstance(value, (int, str, Expr))

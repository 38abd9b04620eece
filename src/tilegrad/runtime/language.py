"""Languages: how programs for a Target are written as text and made into object code.

A target folder, or a package from outside, brings one; `Target.language` names it. Invariant: a
Language needs none of the machines it writes for, and is imported when a Target that names it is
first compiled for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from .registry import Registry

if TYPE_CHECKING:
    from ..core.target import Target
    from ..ir.passes import Pass
    from ..tile.build import Body


@dataclass(frozen=True)
class ProgramText:
    """A Body as target text, with what its launch must know."""

    text: str
    scratch: int = 0  # bytes a worker needs
    entry: str = ""  # what `Device.prepare` must know besides, as text

    def renamed(self, before: str, after: str) -> ProgramText:
        """The same with its function called `after`."""
        text, entry = self.text.replace(before, after), self.entry.replace(before, after)
        return replace(self, text=text, entry=entry)


@dataclass(frozen=True)
class Language:
    """What the compiler asks of who writes programs."""

    emit: Callable[[Body, str, Target], ProgramText]
    symbols: Callable[[Body], list[str]]  # of a Body, in the order its kernel takes them
    compile: Callable[[str, Target, str], bytes]  # text to object code for a Device's `arch`;
    # threads may call it
    listings: Mapping[str, Callable[[str, Target], str]] = field(
        default_factory=dict
    )  # what `explain` shows of a text, by name
    passes: Sequence[Pass] = ()  # over Bodies (compiler/pipeline.py, TILES), after the page's own
    # What a launch costs by the Language's own count, by name; {} where it counts none.
    costs: Callable[[Body, Target], Mapping[str, float]] | None = None
    # At what rate an array multiplies in a launch, and why not faster; '' where it has one.
    rate_note: Callable[[Body, Target], str] | None = None
    # About how long an array takes for a work (`tile/array.py`) as text, or why it cannot do it.
    seconds: Callable[[str, Target], float | str] | None = None


LANGUAGES: Registry[Language] = Registry(
    "language",
    "tilegrad.languages",
    {
        "llvm": "tilegrad.targets.llvm.language:LANGUAGE",
        "ptx": "tilegrad.targets.ptx.language:LANGUAGE",
        "npu": "tilegrad.targets.npu.language:LANGUAGE",
    },
)


def language_of(target: Target) -> Language:
    """Who writes programs for a Target."""
    return LANGUAGES.get(target.language)


def as_it_is(text: str, target: Target) -> str:
    """The listing of a text that is the text."""
    return text


__all__ = ["LANGUAGES", "Language", "ProgramText", "language_of"]

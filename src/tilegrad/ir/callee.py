"""Callees: what a Graph needs to know of a kernel it calls, and no more.

Invariant: two Callees with the same key compute the same thing; hash and equality go by key.
A concrete Callee registers a parser of its text in `ir.text.ATTRIBUTE_PARSERS` under its
`text_name`, so that a Graph that calls it can be read back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from .types import Type


class Callee(ABC):
    """A kernel as a Graph sees it."""

    text_name = "callee"
    verdict: Any = None  # by whom it was chosen, for people: no part of the key
    once = False  # whether the runtime does it, once for all runs, and no step does

    @property
    @abstractmethod
    def key(self) -> str:
        """The hash of the content: everything that decides what is computed."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name, for people."""

    @property
    def states(self) -> tuple[int, ...]:
        """Arguments that it writes in place; what they hold then are its last results."""
        return ()

    @abstractmethod
    def result_types(self, argument_types: tuple[Type, ...]) -> tuple[Type, ...]:
        """The types of the results, or a UserError if the arguments do not fit."""

    @abstractmethod
    def to_text(self) -> str:
        """The text from which the registered parser makes an equal Callee."""

    @abstractmethod
    def interpret(self, *arrays: Any) -> tuple[Any, ...]:
        """The results for NumPy arrays: the judge of every compiled form."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Callee) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"<callee {self.name} {self.key[:8]}>"

"""LLVM IR as a Language: Bodies to text, text to object code.

Invariant: the emitter is loaded when a text is needed, not where object code is in the Store.
"""

from __future__ import annotations

from ...core.target import Target
from ...runtime.language import Language, ProgramText, as_it_is
from ...tile.build import Body, body_symbols
from .driver import assembly, compile_text, optimized


def emitted(body: Body, name: str, target: Target) -> ProgramText:
    """A Body as LLVM IR."""
    from .emit import emit

    return ProgramText(*emit(body, name, target))


def symbols(body: Body) -> list[str]:
    """The Symbols of a Body, which its function takes after the pointers."""

    return [s.name for s in body_symbols(body)]


def compiled(text: str, target: Target, arch: str) -> bytes:
    """Object code."""
    return compile_text(text, target)


LANGUAGE = Language(
    emitted,
    symbols,
    compiled,
    {"llvm": as_it_is, "optimized": optimized, "assembly": assembly},
)

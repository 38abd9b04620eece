"""Executables some of whose inputs are prepared: they are found in a table at every run.

`PreparedExecutable` gives an Executable the parts (see `prepared`) in the place of the bytes that
the caller gives. Invariant: the numbers of inputs that callers use are those of the traced Graph;
bytes that are only prepared are never read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .buffer import Buffer
from .device import Device
from .executable import Executable
from .prepared import Layout, prepared
from .recipe import Back, Recipe

LayoutOf = Callable[[str, Sequence[Buffer]], Layout]  # of a Recipe's text, for some sources


def inner_recipe(recipe: Recipe) -> Recipe:
    """The Recipe as a driver binds it: the parts are inputs like others, after those kept."""
    parts = [slot for one in recipe.preparing for slot in one.slots]
    kept = [slot for slot in recipe.inputs if slot >= 0]
    return replace(recipe, inputs=[*kept, *parts], preparing=[])


class PreparedExecutable:
    """An Executable some of whose inputs are prepared."""

    def __init__(
        self, inner: Executable, recipe: Recipe, device: Device, layout_of: LayoutOf
    ) -> None:
        self.inner, self.recipe, self.device, self.layout_of = inner, recipe, device, layout_of
        self.sources = list(dict.fromkeys(i for one in recipe.preparing for i in one.sources))
        self.kept = [i for i, slot in enumerate(recipe.inputs) if slot >= 0]
        self.count = sum(len(one.slots) for one in recipe.preparing)
        self.owners, self.check = inner.owners, inner.check
        self.input_of = {slot: i for i, slot in enumerate(recipe.inputs) if slot >= 0}
        self._refs: list[Any] = []  # to the sources that `_parts` are made of
        self._parts: list[Buffer] | None = None

    def parts(self, buffers: Sequence[Buffer]) -> list[Buffer]:
        """The parts of the sources among some inputs."""
        given = [buffers[i] for i in self.sources]
        found = self._parts
        if found is not None and all([r() is b for r, b in zip(self._refs, given)]):
            return found
        wanted = []
        for one in self.recipe.preparing:
            sources = [buffers[i] for i in one.sources]
            wanted.append((sources, self.layout_of(one.layout, sources)))
        made = prepared(wanted, self.device)
        found = [buffer for buffers in made for buffer in buffers]
        forget = weakref.WeakMethod(self._forget)

        def gone(_: Any) -> None:
            method = forget()
            if method is not None:
                method()

        self._refs, self._parts = [weakref.ref(b, gone) for b in given], found
        return found

    def _forget(self) -> None:
        """A source is gone: what was made of it may go."""
        self._parts = None

    def given(self, buffers: Sequence[Buffer]) -> list[Buffer]:
        """The inputs as the Executable takes them; Buffers after the inputs stay last."""
        more = buffers[len(self.recipe.inputs) :]
        return [*(buffers[i] for i in self.kept), *self.parts(buffers), *more]

    def number(self, at: int) -> int:
        """The number that an input, or a Buffer after them, has for the Executable."""
        count = len(self.recipe.inputs)
        return self.kept.index(at) if at < count else at - count + len(self.kept) + self.count

    def run(
        self, buffers: Sequence[Buffer], symbols: Mapping[str, int] | None = None
    ) -> list[Buffer]:
        """Run once; see the Executable."""
        return self.inner.run(self.given(buffers), symbols)

    def replay(
        self,
        buffers: Sequence[Buffer],
        symbols: Mapping[str, int],
        placed: Mapping[int, int],
        back: Sequence[Back],
    ) -> ReplayOfParts:
        """Bound to Buffers that stay, to run again and again."""
        return ReplayOfParts(self, buffers, symbols, placed, back)


class ReplayOfParts:
    """A Replay of the Executable, holding the parts that it reads."""

    def __init__(
        self,
        executable: PreparedExecutable,
        buffers: Sequence[Buffer],
        symbols: Mapping[str, int],
        placed: Mapping[int, int],
        back: Sequence[Back],
    ) -> None:
        self.executable = executable
        given = executable.given(buffers)
        self.held = executable.parts(buffers)
        number = executable.number
        moved = [
            replace(
                b, number=b.number if b.is_output else number(b.number), target=number(b.target)
            )
            for b in back
        ]
        there = {output: number(at) for output, at in placed.items()}
        self.replay = executable.inner.replay(given, symbols, there, moved)
        made = self.replay
        self.run, self.result, self.profile = made.run, made.result, made.profile
        self.captured = made.captured

    @property
    def launches(self) -> int:
        """Kernels and copies of a run."""
        return self.replay.launches

    def point(self, buffers: Sequence[Buffer]) -> None:
        """Use these Buffers from now on."""
        given = self.executable.given(buffers)
        self.held = self.executable.parts(buffers)
        self.replay.point(given)


__all__ = ["LayoutOf", "PreparedExecutable", "inner_recipe"]

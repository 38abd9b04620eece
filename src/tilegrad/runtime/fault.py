"""Faults: what a running program finds wrong with its data, and the error that says so.

A Program with `require` ops gets one more pointer, to a word of its launch; a condition that does
not hold writes the number of its Site there, and the program goes on. Who ran it looks at the words
afterwards: on the CPU when the run is over, on a GPU at the next read of any value. Invariant: a
launch without Sites has no word and costs nothing; a word that was reported is 0 again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.errors import Site
from ..core.lock import new_lock

if TYPE_CHECKING:
    from .recipe import Recipe

WORD_BYTES = 16  # of a launch: kernels take pointers that are multiples of 16
PART_BYTES = 4096  # of the memory that a Device's words come from at a time


def fault_slots(recipe: Recipe) -> list[tuple[int, list[Site]]]:
    """The Slots of a Recipe's fault words and their Sites, in the order of the launches."""
    if not recipe.sites:
        return []
    return [
        (step.slots[-1], recipe.sites[step.program])
        for step in recipe.steps
        if step.kind == "kernel" and recipe.sites[step.program]
    ]


class Faults:
    """Fault words in host memory, which is all 0: one of WORD_BYTES for each launch with Sites."""

    def __init__(self, memory: np.ndarray[Any, Any]) -> None:
        self.sites: list[list[Site]] = []  # by word
        self.open_end = False  # values decide how long a run takes: a fault may end it
        self.memory = memory
        self._bytes, self._zeros = memory.data, bytes(memory.nbytes)

    @staticmethod
    def on_host(recipe: Recipe) -> Faults | None:
        """Words of its own for a run of a Recipe; None if it has no Sites."""
        found = fault_slots(recipe)
        if not found:
            return None
        faults = Faults(host_words(len(found) * WORD_BYTES))
        faults.open_end = any(step.kind == "jump_unless" for step in recipe.steps)
        return faults

    def add(self, sites: list[Site]) -> int:
        """The address of the next word, for a launch with these Sites."""
        self.sites.append(sites)
        return self.memory.ctypes.data + (len(self.sites) - 1) * WORD_BYTES

    def seen(self) -> bool:
        """Whether a condition did not hold."""
        return self._bytes != self._zeros

    def check(self) -> None:
        """Raise the error of the first launch that has one; all words are 0 then."""
        if self._bytes == self._zeros:
            return
        words = self.memory.view(np.uint32)[:: WORD_BYTES // 4].tolist()
        self.memory[:] = 0
        for number, sites in zip(words, self.sites):
            if number:
                raise sites[number - 1].error()


def host_words(bytes: int) -> np.ndarray[Any, Any]:
    """Host memory for fault words, all 0."""
    whole = np.zeros(bytes + WORD_BYTES, np.uint8)
    start = -whole.ctypes.data % WORD_BYTES
    return whole[start : start + bytes]


class FaultWords:
    """The fault words of one Device, where a kernel's store shows on the host without a copy.

    Nobody writes a word but a condition that does not hold, so it costs a launch a pointer. A word
    is never handed out twice: a fault is reported with its own line even when its Executable is
    gone. `memory` gives so many bytes of such memory, all 0.
    """

    def __init__(self, memory: Callable[[int], np.ndarray[Any, Any]] = host_words) -> None:
        self.parts: list[Faults] = []
        self._memory = memory
        self._lock = new_lock()

    def add(self, sites: list[Site]) -> int:
        """The address of a new word for a launch with these Sites."""
        with self._lock:
            if not self.parts or len(self.parts[-1].sites) * WORD_BYTES == PART_BYTES:
                self.parts.append(Faults(self._memory(PART_BYTES)))
            return self.parts[-1].add(sites)

    def check(self) -> None:
        """Raise the error of a condition that did not hold in the work done so far."""
        for part in self.parts:
            part.check()

"""What a Bound runs on: Tensors of the caller, Buffers of its own, and where each one's memory is.

A Node's value must not change, yet a run changes memory. So Tensors are held, not their Nodes or
Buffers: plain calls, and other Bounds over the same state, still find it exclusive. `look` is asked
when Nodes were made or Tensors rebound since the last run. A Tensor that has other memory by now
is followed there; where something else holds the Node (or Buffer) of a value that runs change, the
Tensor gets a new Node over the same memory and the old Buffer is ended. Invariant: nothing that
was built on a value before a run can be read after it with another value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from sys import getrefcount
from typing import Any
from weakref import ref

import numpy as np

from ..core.errors import user_location
from ..ir.node import next_serial
from ..runtime.buffer import Buffer
from .bound_copies import write
from .lowered import bytes_of, known
from .ownership import alone, is_alone, is_exclusive, is_kept, would_copy
from .placement import copy_of, moved, on_host, opened
from .tensor import Tensor, from_buffer
from .tensor import leaves as leaf_tensors
from .trace import Source

NODE = attrgetter("_node")


class Clock:
    """Serial numbers that Bounds took themselves: all others are Nodes made or Tensors rebound."""

    drawn = 0


def moment() -> int:
    """Changes when a Node is made or a Tensor is rebound, and at nothing else."""
    Clock.drawn += 1
    return next_serial() - Clock.drawn


class Inputs:
    """The Buffers of a Bound by number: of a Tensor, or its own."""

    def __init__(self, name: str, device: str, leaves: Sequence[Any]) -> None:
        self.name, self.device, self.leaves = name, device, leaves
        self.alignment = opened(device).alignment
        self.tensors: list[Tensor | None] = []
        self.own: list[Buffer | None] = []
        self.sources: list[Source] = []
        self.labels: list[str] = []  # for messages
        self.changing: set[int] = set()  # numbers of what runs and writes change
        self.pointers: list[int] = []  # where runs find them
        self.results: list[Tensor] = []  # that runs change too
        self._origins: list[tuple[int, str]] = []
        self._refs: list[Any] = []
        self._watched: list[Tensor] = []
        self._others: list[Tensor] = []
        self._counts = (0, 0)
        self.moment = -1

    def add(self, source: Source, label: str, tensor: Tensor | None, own: Buffer | None) -> int:
        """One more; gives its number."""
        self.sources.append(source)
        self.labels.append(label)
        self.tensors.append(tensor)
        self.own.append(own)
        return len(self.own) - 1

    def make_changing(self, at: int) -> None:
        """From now on this one may change: the next `buffers` sees that its memory is its own."""
        self.changing.add(at)
        if at < len(self._origins):
            self._origins[at] = (0, "")

    # ---- memory ---------------------------------------------------------------------------

    def buffers(self) -> list[Buffer]:
        """The Buffers to run on; what changes has its memory to itself, made so if need be."""
        found: list[Any] = [
            own if tensor is None else _buffer(tensor, source, self.device)
            for tensor, own, source in zip(self.tensors, self.own, self.sources)
        ]
        before = self._origins
        for at in self.changing:
            tensor = self.tensors[at]
            same = at < len(before) and (found[at].pointer, found[at].device) == before[at]
            if (
                tensor is not None
                and not same
                and (self._is_misplaced(found[at]) or not self._is_own(at, tensor, found))
            ):
                found[at] = self._apart(at, tensor, found[at])
        self._origins = [_place(b, self.device) for b in found]
        for at, buffer in enumerate(found):
            if self._is_misplaced(buffer):  # small values adapt: a copy stays here
                found[at] = self.own[at] = self._copied(buffer)
        self.pointers = [0 if b.is_source else b.pointer for b in found]
        return found

    def _is_own(self, at: int, tensor: Tensor, found: list[Buffer]) -> bool:
        """Whether nothing else holds its memory; what may not be copied is looked at twice."""
        kept = is_kept(self.leaves, self.sources[at])
        return (is_alone if kept else is_exclusive)(tensor, found, at)

    def _apart(self, at: int, tensor: Tensor, buffer: Buffer) -> Buffer:
        """A copy of shared memory, which the Tensor has from now on."""
        if is_kept(self.leaves, self.sources[at]):
            raise would_copy(self.name, self.labels[at], "something else holds it")
        fresh = self._copied(buffer)
        rebind(tensor, fresh)
        return fresh

    def _is_misplaced(self, buffer: Buffer) -> bool:
        """Whether kernels cannot use it: on another device, or not aligned for this one."""
        if buffer.is_source:  # it is prepared
            return False
        return buffer.device != self.device or bool(buffer.pointer % self.alignment)

    def _copied(self, buffer: Buffer) -> Buffer:
        return copy_of(buffer) if buffer.device == self.device else moved(buffer, self.device)

    def snapshot(self, most: int) -> Callable[[], None]:
        """Keep the values that runs change and that have at most so many bytes; call what it gives
        to put them back."""
        found = []
        for at in sorted(self.changing):
            tensor = self.tensors[at]
            buffer = self.own[at] if tensor is None else tensor.buffer(self.device)
            if buffer is not None and buffer.bytes <= most:
                size = (buffer.bytes,)
                found.append((self.pointers[at], np.array(on_host(buffer, size, np.uint8))))

        def restore() -> None:
            for pointer, value in found:
                write(self.device, pointer, value)

        return restore

    # ---- watching -------------------------------------------------------------------------

    def arm(self) -> None:
        """Remember how things are: every changing value is held by its Tensor alone."""
        changing = [self.tensors[at] for at in sorted(self.changing)]
        unique = {id(t): t for t in [*changing, *self.results] if t is not None}
        self._watched = list(unique.values())
        rest = {id(t): t for t in self.tensors if t is not None and id(t) not in unique}
        self._others = list(rest.values())
        for tensor in self._watched:
            if is_held(tensor):
                renew(tensor)
        self._refs, self._counts = self._state()
        self.moment = moment()

    def _state(self) -> tuple[list[Any], tuple[int, int]]:
        """Which Nodes the Tensors have, and how often those that change are referred to."""
        nodes = [*map(NODE, self._watched)]
        refs = [*map(ref, nodes)]
        held = [*map(known.get, refs)]
        counts = (sum(map(getrefcount, nodes)), sum(map(getrefcount, held)))
        refs.extend(map(ref, map(NODE, self._others)))
        return refs, counts

    def look(self) -> bool:
        """Take in what happened since `arm`; whether memory is elsewhere now (ask `buffers`)."""
        refs, counts = self._state()
        if refs == self._refs and counts == self._counts:
            self.moment = moment()
            return False
        del refs
        now = [
            before if tensor is None else _place(_buffer(tensor, source, self.device), self.device)
            for tensor, before, source in zip(self.tensors, self._origins, self.sources)
        ]
        if now != self._origins or any(d != self.device for _, d in now):
            return True
        self.arm()
        return False


def _buffer(tensor: Tensor, source: Source, device: str) -> Buffer:
    """What runs read of a Tensor: its value, or the bytes of weights of a file."""
    return bytes_of(tensor, "a bound function") if source.stored else tensor.buffer(device)


def _place(buffer: Buffer, device: str) -> tuple[int, str]:
    """Where a value is; bytes of a file are in one place for all devices."""
    return (id(buffer), device) if buffer.is_source else (buffer.pointer, buffer.device)


def is_held(tensor: Tensor) -> bool:
    """Whether something besides a Tensor refers to its Node or to its Buffer."""
    least = alone()
    return getrefcount(tensor._node) > least or getrefcount(known.get(ref(tensor._node))) > least


def renew(tensor: Tensor) -> None:
    """A new Node over the same memory; who holds the old one cannot read it any more."""
    rebind(tensor, tensor.buffer().donate(user_location(), "overwritten"))


def rebind(tensor: Tensor, buffer: Buffer) -> None:
    """Let a Tensor have the value of a Buffer."""
    tensor._node = node = from_buffer(buffer, tensor._node.shape, tensor._node.dtype)
    if tensor._requires_grad:
        leaf_tensors[node] = tensor


__all__ = ["Inputs", "moment", "rebind"]

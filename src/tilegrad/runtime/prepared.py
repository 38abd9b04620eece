"""Prepared weights: one table for the process, of what Executables read instead of a file's bytes.

A Recipe may say that inputs are prepared, and how. What is made is kept here, by Layout and by the
Buffer that holds the bytes (the source), so that all Executables read the same memory. It goes when
its source goes: when a Tensor is assigned another value, for example. All that one Executable lacks
is made in one piece of memory, so that the system can use large pages, some rows at a time; the
pages of the source are given back to the system after each. Weights that are made
together (those of one product) can be read alone too: as views where rows permit.
Invariant: bytes of a source never change; beside the parts, preparing needs memory for some rows.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..core.dtype import DType, uint8
from ..core.errors import InternalError
from ..core.lock import new_lock
from .buffer import HOST, Buffer
from .device import Device

if TYPE_CHECKING:
    from .bundle import Bundle

Array = np.ndarray[Any, Any]
CHUNK_BYTES = 1 << 20  # of the source that are packed at a time
ALIGNED = 64
LABEL = "prepared weights"
Tell = Callable[[str, float, float], None]


class Source(Buffer):
    """Bytes of weights as a file stores them, (..., bytes of a row), read when they are needed.

    It adapts: what runs elsewhere is given what was prepared of it, never the bytes.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        read: Callable[[], Array],
        drop: Callable[[], None],
        name: str = "",
    ) -> None:
        """`read` gives (rows, bytes of a row), of all leading axes; `name` tells it from others of
        its model, in a Bundle."""
        super().__init__(0, math.prod(shape), None, label="weights of a file", writable=False)
        self.shape, self.read, self.drop, self.name = shape, read, drop, name
        self.adapts = True

    is_source = True

    @property
    def pointer(self) -> int:
        """The address of the bytes; those that are arranged otherwise in the file are copied."""
        if not self._pointer and self.bytes:
            array = np.ascontiguousarray(self.read())
            self.owner, self._pointer = array, array.ctypes.data
        return self._pointer


class Layout(Protocol):
    """How weights are prepared; see `kernels.quantised.prepare`."""

    @property
    def key(self) -> str:
        """Everything that decides what is made."""

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of each of the weights."""

    @property
    def step(self) -> int:
        """Rows that are packed together."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of a source."""

    def parts(self) -> list[tuple[str, tuple[int, ...], DType]]:
        """Names, shapes and dtypes of what is made; first axes are cut as rows are."""

    def pack(self, raw: Array) -> dict[str, Array]:
        """The parts of some rows, a multiple of `step` but for the last."""

    def alone(self, member: int) -> Layout:
        """The Layout of one of several weights."""


class Ready:
    """A Layout whose weights a Bundle has: they are read, and nothing is packed."""

    rows: tuple[int, ...] = ()
    step = row_bytes = 1

    def __init__(self, bundle: Bundle, key: str, sources: Sequence[str]) -> None:
        self.bundle, self.key, self.sources = bundle, key, sources

    def parts(self) -> list[tuple[str, tuple[int, ...], DType]]:
        """The parts as bytes."""
        sizes = self.bundle.part_bytes(self.key, self.sources)
        return [(str(i), (size,), uint8) for i, size in enumerate(sizes)]

    def fill(self, device: Device, buffers: Sequence[Buffer]) -> None:
        """Read all parts into Buffers."""
        for number, buffer in enumerate(buffers):
            there = device.name == HOST
            room = buffer if there else Buffer.allocate(buffer.bytes)
            self.bundle.read_part(self.key, self.sources, number, room)
            if not there:
                device.write(buffer, room.array((room.bytes,), np.uint8))

    def pack(self, raw: Array) -> dict[str, Array]:
        """Nothing is packed."""
        raise InternalError("bundle", "weights of a bundle are never packed")

    def alone(self, member: int) -> Layout:
        """Each Layout is in the Bundle under its own key."""
        raise InternalError("bundle", "weights of a bundle are not taken apart")


class Parts:
    """What was made of some sources; it does not keep them."""

    def __init__(self, sources: Sequence[Buffer], buffers: list[Buffer]) -> None:
        self.others = [weakref.ref(s) for s in sources[1:]]
        self.buffers = buffers

    def is_of(self, sources: Sequence[Buffer]) -> bool:
        """Whether it was made of these: ids are used again."""
        return all(ref() is s for ref, s in zip(self.others, sources[1:]))


_table: weakref.WeakKeyDictionary[Buffer, dict[Any, Parts]] = weakref.WeakKeyDictionary()
_lock = new_lock()

Wanted = Sequence[tuple[Sequence[Buffer], Layout]]


class _Told(threading.local):
    """Who is told what this thread prepares."""

    def __init__(self) -> None:
        self.tellers: list[Tell] = []


_told = _Told()


@contextlib.contextmanager
def telling(tell: Tell) -> Iterator[None]:
    """Tell how far preparing has come, as `tell("pack", bytes done, bytes in all)`."""
    _told.tellers.append(tell)
    try:
        yield
    finally:
        _told.tellers.remove(tell)


def prepared(wanted: Wanted, device: Device) -> list[list[Buffer]]:
    """The parts of each of some sources in a Layout, made if they are not there yet."""
    with _lock:
        missing = {}
        for sources, layout in wanted:
            if find(sources, layout, device.name) is None and not _taken(sources, layout, device):
                missing[tuple(map(id, sources)), layout.key] = (sources, layout)
        if missing:
            _make(list(missing.values()), device)
        found = [find(sources, layout, device.name) for sources, layout in wanted]
    return [parts.buffers for parts in found if parts is not None]


def find(sources: Sequence[Buffer], layout: Layout, device: str) -> Parts | None:
    """What is there already."""
    found = _table.get(sources[0], {}).get(_key(sources, layout, device))
    return found if found is not None and found.is_of(sources) else None


def prepared_bytes(layout: Layout) -> int:
    """Bytes that the parts of a Layout take."""
    return _part_starts(layout)[-1]


def _key(sources: Sequence[Buffer], layout: Layout, device: str) -> Any:
    return layout.key, device, tuple(map(id, sources[1:]))


def _part_starts(layout: Layout) -> list[int]:
    """Where each part begins; the last is the end."""
    sizes = [math.prod(s) * d.size for _, s, d in layout.parts()]
    return list(itertools.accumulate((-(-z // ALIGNED) * ALIGNED for z in sizes), initial=0))


def _taken(sources: Sequence[Buffer], layout: Layout, device: Device) -> bool:
    """Whether a Bundle has them in memory already; then they are noted."""
    if device.name != HOST or not isinstance(layout, Ready):
        return False
    buffers = layout.bundle.take_parts(layout.key, layout.sources)
    if buffers is not None:
        _note(sources, layout, device.name, buffers)
    return buffers is not None


def _make(missing: Wanted, device: Device) -> None:
    total = sum(s.bytes for sources, _ in missing for s in sources)
    ends = [prepared_bytes(layout) for _, layout in missing]
    whole = device.allocate(max(1, sum(ends)), LABEL)
    done = used = 0
    for (sources, layout), end in zip(missing, ends):
        _pack(sources, layout, device, whole.part(used, end))
        used += end
        done += sum(s.bytes for s in sources)
        for tell in _told.tellers:
            tell("pack", done, total)


def _pack(sources: Sequence[Buffer], layout: Layout, device: Device, room: Buffer) -> None:
    """Make the parts of some weights in a piece of memory, and note them."""
    starts, parts = _part_starts(layout), layout.parts()
    buffers = [
        room.part(start, math.prod(shape) * dtype.size)
        for start, (_, shape, dtype) in zip(starts, parts)
    ]
    if isinstance(layout, Ready):
        layout.fill(device, buffers)
        _note(sources, layout, device.name, buffers)
        return
    rows, first = -(-sum(layout.rows) // layout.step) * layout.step, 0
    given = (_rows_of(s, n, layout, device) for s, n in zip(sources, layout.rows))
    for raw in _chunks(given, layout):
        made = layout.pack(raw)
        for buffer, (name, shape, _) in zip(buffers, parts):
            each = buffer.bytes // shape[0]
            part = buffer.part(first * shape[0] // rows * each, made[name].nbytes)
            device.write(part, made[name])
        first += len(raw)
    for source in sources:
        if isinstance(source, Source):
            source.drop()
    _note(sources, layout, device.name, buffers)
    if len(sources) > 1 and all(n % layout.step == 0 for n in layout.rows[:-1]):
        _note_members(sources, layout, device.name, buffers, rows)


def _note(sources: Sequence[Buffer], layout: Layout, device: str, buffers: list[Buffer]) -> None:
    _table.setdefault(sources[0], {})[_key(sources, layout, device)] = Parts(sources, buffers)


def _note_members(
    sources: Sequence[Buffer], layout: Layout, device: str, buffers: list[Buffer], rows: int
) -> None:
    """Each of the weights alone: its rows of every part."""
    first = 0
    for member, source in enumerate(sources):
        own, views = layout.alone(member), []
        for buffer, (_, shape, dtype) in zip(buffers, own.parts()):
            padded = -(-own.rows[0] // layout.step) * layout.step
            size = math.prod(shape) * dtype.size
            views.append(buffer.part(first * (size // padded), size))
        _note([source], own, device, views)
        first += own.rows[0]


def _rows_of(source: Buffer, rows: int, layout: Layout, device: Device) -> Array:
    if isinstance(source, Source):
        return source.read()
    if source.device == HOST:
        return source.array((rows, layout.row_bytes), np.uint8)
    return device.download(source).reshape(rows, layout.row_bytes)


def _chunks(several: Iterable[Array], layout: Layout) -> Iterator[Array]:
    """Rows of all weights in turn, a multiple of `layout.step` at a time but for the last."""
    step, row_bytes = layout.step, layout.row_bytes
    most = max(1, CHUNK_BYTES // max(1, row_bytes * step)) * step
    left = np.zeros((0, row_bytes), np.uint8)
    for raw in several:
        start = 0
        if len(left):  # rows of the weights before that make no whole step
            start = min(step - len(left), len(raw))
            left = np.concatenate([left, raw[:start]])
            if len(left) == step:
                yield left
                left = left[:0]
        whole = start + (len(raw) - start) // step * step
        for first in range(start, whole, most):
            yield raw[first : min(first + most, whole)]
        if whole < len(raw):
            left = raw[whole:].copy()
    if len(left):
        yield left


__all__ = ["Layout", "Ready", "Source", "find", "prepared", "prepared_bytes", "telling"]

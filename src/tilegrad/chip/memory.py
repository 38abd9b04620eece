"""Memories in time: what stacked DRAM really gives, and tiles that are loaded while others work.

`Stacked` is HBM: channels of banks, whose rows must be opened before bursts can be read, and which
are refreshed. `double_buffered` is a scratchpad with room for the next tile beside this one.
Invariant: the closed form of `Stacked` is what `bursts_in_time` counts, for streams that are long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..core.errors import UserError


@dataclass(frozen=True)
class Stacked:
    """Stacked DRAM. Times in ns; the defaults are usual for HBM3, and are assumptions."""

    peak: float = 4.8e12  # bytes/s of all channels
    channels: int = 96  # six stacks of sixteen
    banks: int = 16  # of a channel, which open rows side by side
    burst: int = 64  # bytes
    row: int = 1024  # bytes
    open_row: float = 45.0  # from one opening of a bank's row to the next of that bank
    refresh: float = 350.0  # a channel stands still
    refresh_every: float = 3900.0

    def __post_init__(self) -> None:
        for name in ("peak", "channels", "banks", "burst", "row", "open_row", "refresh_every"):
            if getattr(self, name) <= 0:
                raise _bad(name, "above 0", getattr(self, name))
        if not 0 <= self.refresh < self.refresh_every:
            raise _bad("refresh", f"0 to below {self.refresh_every:g}", self.refresh)

    @property
    def burst_time(self) -> float:
        """ns of a burst on its channel."""
        return 1e9 * self.burst * self.channels / self.peak

    def share(self, hits: float | None = None) -> float:
        """Of the peak, what bursts get of which a share `hits` finds its row open.

        Without `hits` whole rows are read. Banks open rows while others send; when rows are opened
        faster than the banks can, the openings bound.
        """
        if hits is None:
            hits = 1 - self.burst / self.row
        if not 0 <= hits <= 1:
            raise _bad("hits", "0 to 1", hits)
        opening = (1 - hits) * self.open_row / self.banks
        alive = 1 - self.refresh / self.refresh_every
        return alive * self.burst_time / max(self.burst_time, opening)

    def bandwidth(self, hits: float | None = None) -> float:
        """Bytes/s."""
        return self.peak * self.share(hits)


def bursts_in_time(memory: Stacked, rows: Sequence[int]) -> float:
    """ns that one channel takes for bursts of these rows, in order, burst by burst.

    Row `r` lies in bank `r % banks`. A bank opens its next row as soon as its last one is sent.
    """
    opened = np.full(memory.banks, -1)
    free = np.full(memory.banks, -np.inf)  # when a bank may open its next row
    bus, alive = 0.0, memory.refresh_every - memory.refresh
    for row in rows:
        bank = row % memory.banks
        start = bus
        if opened[bank] != row:
            start = max(bus, free[bank])
            opened[bank], free[bank] = row, start + memory.open_row
        bus = start + memory.burst_time
    return bus + (bus // alive) * memory.refresh


@dataclass(frozen=True)
class Overlap:
    """When tiles are moved while others work."""

    cycles: float
    stalls: float  # cycles in which the array waits


def double_buffered(
    loads: Sequence[float], works: Sequence[float], stores: Sequence[float], buffers: int = 2
) -> Overlap:
    """Tiles one after the other: load, work, store, each of its own unit, with some buffers.

    A tile is loaded when the buffer is free that the tile `buffers` before it used; it is stored
    while the next works, if there are two.
    """
    if not len(loads) == len(works) == len(stores) or not loads:
        raise _bad("tiles", "as many loads as works and stores", len(loads))
    if buffers < 1:
        raise _bad("buffers", "at least 1", buffers)
    loaded: list[float] = []
    worked: list[float] = []
    stored: list[float] = []
    for i, (load, work, store) in enumerate(zip(loads, works, stores)):
        free = worked[i - buffers] if i >= buffers else 0.0
        out_free = stored[i - buffers] if i >= buffers else 0.0
        loaded.append(max(loaded[-1] if loaded else 0.0, free) + load)
        worked.append(max(worked[-1] if worked else 0.0, loaded[-1], out_free) + work)
        stored.append(max(stored[-1] if stored else 0.0, worked[-1]) + store)
    return Overlap(stored[-1], stored[-1] - sum(works))


def _bad(field: str, expected: str, got: object) -> UserError:
    return UserError(f"bad {field} of a memory", op="chip", expected=expected, got=got)


__all__ = ["Overlap", "Stacked", "bursts_in_time", "double_buffered"]

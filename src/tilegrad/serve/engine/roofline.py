"""How fast a device reads memory, and so about how fast a decoder can write.

A token needs every weight once: bytes a second over bytes a token is the estimate. A GPU's rate is
known of its Target; a CPU's is measured by summing a block as large as the weights (a model that
fits a cache is read at the cache's rate), once, and kept in the Store.

Invariant: a Rate says how it was come by, and whether other programs ran meanwhile: such a one is
not kept. Measuring takes well under a second or two.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

MIB = 1 << 20
SMALLEST, LARGEST = 64 * MIB, 1024 * MIB
VERSION = "2"
SECONDS, LEAST_RUNS = 0.3, 4
BUSY = 0.1  # of all cores, used by other programs


@dataclass(frozen=True)
class Rate:
    """Bytes a second that a device reads, and how that is known."""

    bytes_per_second: float
    how: str
    busy: bool = False  # other programs ran meanwhile: an idle machine is faster


def known_rate(device: str, working: int) -> Rate | None:
    """How fast a device reads, if that needs no measuring."""
    from ...runtime.device import target_for
    from ...runtime.store import default_store

    target = target_for(device)
    if target.has_threads:
        return Rate(target.peak_bytes(), f"known of {target.name}")
    key, how = _place(target, block_size(working))
    kept = _parsed(default_store().get(key))
    return Rate(kept, f"{how}, kept from an earlier run") if kept else None


def _place(target: Any, size: int) -> tuple[str, str]:
    """Where the rate of a CPU is kept, and in words how it is measured."""
    from ...core.config import config
    from ...runtime.store import content_key

    threads = config().threads
    key = content_key("read rate", VERSION, target.key, str(threads), str(size))
    return key, f"measured here, {threads} {'thread' if threads == 1 else 'threads'}"


def read_rate(device: str, working: int, fresh: bool = False) -> Rate:
    """How fast a device reads `working` bytes again and again; `fresh` measures anew."""
    from ...runtime.device import target_for
    from ...runtime.store import default_store

    known = known_rate(device, working)
    target = target_for(device)
    if known is not None and (target.has_threads or not fresh):
        return known
    size, store = block_size(working), default_store()
    key, how = _place(target, size)
    kept = 0.0 if known is None else known.bytes_per_second
    others = Others()
    found, share = measure(size), others.share()
    if share > BUSY:
        return Rate(found, f"{how}, while other programs used {100 * share:.0f}% of the CPU", True)
    found = max(found, kept)
    store.put(key, json.dumps({"bytes_per_second": found}).encode())
    return Rate(found, how)


def block_size(working: int) -> int:
    """The block that is read to measure: the power of two above, within bounds and memory."""
    size = SMALLEST
    while size < min(working, LARGEST):
        size *= 2
    while size > SMALLEST and size > free_bytes() // 4:
        size //= 2
    return size


def free_bytes() -> int:
    """Bytes of memory that are free, as far as the system tells."""
    import os

    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 4 * LARGEST


def measure(size: int) -> float:
    """Bytes a second of summing a block of float32 on the CPU's workers: the best of some runs."""
    from ...tensor.creation import from_numpy
    from ...tensor.jit import jit

    block = from_numpy(np.ones(size // 4, np.float32))
    total: Any = jit(lambda x: x.sum())
    total(block).item()  # compiles, and touches every page
    best, runs, end = float("inf"), 0, time.perf_counter() + SECONDS
    while runs < LEAST_RUNS or time.perf_counter() < end:
        start = time.perf_counter()
        total(block).item()
        best, runs = min(best, time.perf_counter() - start), runs + 1
    return size / best


class Others:
    """What other programs use of all cores, from the making of this on; 0 where nothing tells."""

    def __init__(self) -> None:
        self.start = self._now()

    def share(self) -> float:
        """Their share of the time of all cores since then."""
        used, whole, own = (now - then for now, then in zip(self._now(), self.start))
        return min(max((used - own) / whole, 0.0), 1.0) if whole > 0 else 0.0

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """Seconds that all cores were used, that they were there, and that this process used."""
        times = core_times()
        return sum(times) - sum(times[3:5]), sum(times), time.process_time()


def core_times() -> list[float]:
    """Seconds of all cores: user, nice, system, idle, waiting, interrupts (two), stolen."""
    import os

    try:
        with open("/proc/stat", encoding="ascii") as file:
            words = file.readline().split()[1:9]
        return [int(word) / os.sysconf("SC_CLK_TCK") for word in words]
    except (OSError, ValueError, AttributeError):
        return []


def _parsed(data: bytes | None) -> float:
    try:
        return float(json.loads(data)["bytes_per_second"]) if data else 0.0
    except (ValueError, KeyError, TypeError):
        return 0.0

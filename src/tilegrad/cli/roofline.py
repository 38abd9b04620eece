"""How fast a device reads memory, and so how fast a decoder can write at most.

A token needs every weight once: bytes a token over bytes a second is the limit. A GPU's rate is
known of its Target; a CPU's is measured by summing a block as large as the weights (a model that
fits a cache is read at the cache's rate), once, and kept in the Store.

Invariant: a Rate says how it was come by, and measuring takes well under a second or two.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

MIB = 1 << 20
SMALLEST, LARGEST = 64 * MIB, 1024 * MIB
VERSION = "1"
SECONDS, LEAST_RUNS = 0.3, 4


@dataclass(frozen=True)
class Rate:
    """Bytes a second that a device reads, and how that is known."""

    bytes_per_second: float
    how: str


def read_rate(device: str, working: int, fresh: bool = False) -> Rate:
    """How fast a device reads `working` bytes again and again; `fresh` measures anew."""
    from ..compiler.dispatch import target_for
    from ..core.config import config
    from ..runtime.store import content_key, default_store

    target = target_for(device)
    if target.kind != "cpu":
        return Rate(target.peak_bytes(), f"known of {target.name}")
    size = block_size(working)
    threads = config().threads
    how = f"measured here, {threads} {'thread' if threads == 1 else 'threads'}"
    store = default_store()
    key = content_key("read rate", VERSION, target.key, str(threads), str(size))
    kept = _parsed(store.get(key))
    if kept and not fresh:
        return Rate(kept, f"{how}, kept from an earlier run")
    found = max(measure(size), kept or 0.0)
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
    from ..tensor.creation import from_numpy
    from ..tensor.jit import jit

    block = from_numpy(np.ones(size // 4, np.float32))
    total: Any = jit(lambda x: x.sum())
    total(block).item()  # compiles, and touches every page
    best, runs, end = float("inf"), 0, time.perf_counter() + SECONDS
    while runs < LEAST_RUNS or time.perf_counter() < end:
        start = time.perf_counter()
        total(block).item()
        best, runs = min(best, time.perf_counter() - start), runs + 1
    return size / best


def _parsed(data: bytes | None) -> float:
    try:
        return float(json.loads(data)["bytes_per_second"]) if data else 0.0
    except (ValueError, KeyError, TypeError):
        return 0.0

"""The worker pool: persistent threads that run step tables natively.

A step is a record of raw addresses, so running it costs one native call. The calling thread is
worker 0; the others are daemon threads that live in native code and never hold the GIL.
The native loop comes back every 50 ms between entries, so Ctrl-C ends a long step early.

Invariant: one step runs at a time; when `run` returns or raises, no worker touches the step's
memory any more. Threads start at the first parallel step and never before.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from ...core.config import config, usable_cores
from ...core.errors import InternalError, StateError
from ...core.lock import new_lock, new_rlock, renew_in_child
from ...core.target import NEON, SSE2
from ...runtime.buffer import HUGE_PAGE, Buffer
from ...runtime.fault import Faults
from ...runtime.store import content_key, default_store
from .driver import compile_text, llvm_version, load
from .native_loop import DONE, POOL, STATE, native_loop_text, sources
from .table import ARGUMENT_LIMIT, COUNTER_LIMIT

LOG = logging.getLogger("tilegrad.workers")
IDLE_SECONDS = 2e-3  # how long a worker spins for the next step before it sleeps
BARRIER_SECONDS = 100e-6
CROWDED_SECONDS = 1e-6  # the same where there are more workers than cores
SCRATCH_BYTES = 256 << 10
SLOT_LIMIT = 512
RECORD = struct.Struct("<6Q")  # table, entries, argument index, slots, number of slots, scalars


POINTER, INTEGER = ctypes.c_void_p, ctypes.c_int64
TYPES: dict[str, tuple[Any, ...]] = {  # of entry points: what they give, what they take
    "start": (INTEGER, POINTER, POINTER, INTEGER),
    "resume": (INTEGER, POINTER, INTEGER),
    "stop": (INTEGER, POINTER),
    "serve": (None, POINTER, POINTER, INTEGER, ctypes.c_int32),
    "quit": (None, POINTER),
    "spin": (None, INTEGER),
}
_given: list[bytes] = []  # a native loop that was compiled before


def use_native_loop(code: bytes) -> None:
    """Take this object code for the native loop, so that nothing needs compiling."""
    _given.append(code)


def native_loop_for(machine: str) -> bytes:
    """The native loop's object code for a machine."""
    targets = {"x86_64": SSE2, "aarch64": NEON}
    if machine not in targets:
        raise InternalError("worker pool", f"no native loop for {machine}")
    store, key = default_store(), content_key("native loop", llvm_version(), machine, sources())
    found = store.get(key)
    if found is None:
        found = compile_text(native_loop_text(machine), targets[machine])
        store.put(key, found)
    return found


@functools.cache
def native() -> SimpleNamespace:
    """The native loop's entry points by name, compiled (or found in the Store) and loaded once."""
    module = load(_given[-1] if _given else native_loop_for(os.uname().machine))
    made: dict[str, Any] = {
        name: ctypes.CFUNCTYPE(*types)(module.address(name)) for name, types in TYPES.items()
    }
    rate = _spins_per_second(made["spin"])
    return SimpleNamespace(module=module, spins_per_second=rate, **made)


def _spins_per_second(spin: Callable[..., int]) -> float:
    best, times = 1.0, 1000
    for _ in range(3):
        begin = time.perf_counter()
        spin(times)
        best = min(best, time.perf_counter() - begin)
    return times / best


def _aligned(bytes: int) -> np.ndarray:
    """Zeroed bytes whose first lies on a line of 64."""
    raw = np.zeros(bytes + 64, np.uint8)
    at = -raw.ctypes.data % 64
    return raw[at : at + bytes]


class Team:
    """The memory shared by `workers` workers, a state for each, and their threads."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.running = 0  # workers that a parallel step has; 0 until the threads are started
        self.memory = _aligned(POOL.itemsize)
        self.words = self.memory.view(POOL)[0]
        self.pool: int = self.memory.ctypes.data
        self.states = _aligned(STATE.itemsize * workers).view(STATE)
        self.words["caller_state"][0] = self.states.ctypes.data
        self.threads: list[threading.Thread] = []
        self.slot_limit = self.scratch_bytes = 0
        self._kept: dict[tuple[int, str], np.ndarray] = {}
        self._give("args", ARGUMENT_LIMIT * 8)
        self._give("counters", COUNTER_LIMIT * 8)
        self.reserve(SLOT_LIMIT, SCRATCH_BYTES)
        crowded = workers > usable_cores()
        rate = native().spins_per_second
        for name, seconds in (("idle_spins", IDLE_SECONDS), ("barrier_spins", BARRIER_SECONDS)):
            spins = int(rate * (CROWDED_SECONDS if crowded else seconds))
            self.words[name] = max(1, spins)

    def reserve(self, slots: int, scratch_bytes: int) -> None:
        """Grow each worker's slots and scratch; no step may be running."""
        if slots > self.slot_limit:
            self.slot_limit = max(slots, 2 * self.slot_limit)
            self._give("own_slots", self.slot_limit * 8)
        if scratch_bytes > self.scratch_bytes:
            self.scratch_bytes = scratch_bytes
            self._give("scratch", scratch_bytes)

    def start_threads(self) -> int:
        """Start the other workers; how many workers there are then."""
        epoch = int(self.words["epoch"][0])
        for worker in range(1, self.workers):
            state = self.states[worker:].ctypes.data
            thread = threading.Thread(
                target=_serve,
                args=(self, state, worker, epoch),
                daemon=True,
                name=f"tilegrad-worker-{worker}",
            )
            try:
                thread.start()
            except RuntimeError as error:
                LOG.warning("only %d of %d workers: %s", worker, self.workers, error)
                break
            self.threads.append(thread)
        self.running = 1 + len(self.threads)
        return self.running

    def quit(self) -> None:
        """End the threads and wait for them; no step may be running."""
        threads, self.threads, self.running = self.threads, [], 0
        if threads:
            native().quit(self.pool)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(1.0)

    def _give(self, field: str, bytes: int) -> None:
        """Memory of its own for each worker."""
        for worker in range(self.workers):
            if field == "scratch":  # whole huge pages: packed tiles spread evenly over the cache
                whole = Buffer.allocate(-(-bytes // HUGE_PAGE) * HUGE_PAGE, "scratch")
                memory = whole.array((bytes,), np.uint8)
            else:
                memory = _aligned(bytes)
            self._kept[worker, field] = memory
            self.states[field].flat[worker * STATE[field].itemsize // 8] = memory.ctypes.data


def _serve(team: Team, state: int, worker: int, epoch: int) -> None:
    native().serve(team.pool, state, worker, epoch)


class WorkerPool:
    """Runs steps on `threads` workers; see the module's docstring."""

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or config().threads
        self._lock = new_rlock()
        self._busy = False
        self._team: Team | None = None
        self._scratch_bytes = SCRATCH_BYTES
        self._finalizer: weakref.finalize | None = None  # runs at interpreter exit too
        renew_in_child(self._after_fork)

    def run_step(
        self, record: int, n_slots: int, inline: bool = False, faults: Faults | None = None
    ) -> None:
        """Run the table of a packed RECORD at an address that stays valid; inline: on this thread
        only. A condition that did not hold is raised at the end; where values decide how long a run
        takes, at the next pause."""
        with self._lock:
            team = self._team or self._form()
            if self._busy:
                self._refuse()
            if n_slots > team.slot_limit:
                team.reserve(n_slots, 0)
            workers = 1 if inline else team.running or team.start_threads()
            self._busy = True
            try:
                code = native().start(team.pool, record, workers)
                while code:  # paused: Python has now looked at its signals
                    if faults is not None and faults.open_end and faults.seen():
                        self._stop(team)
                        break
                    code = native().resume(team.pool, workers)
            except BaseException:
                self._stop(team)
                raise
            finally:
                self._busy = False
            if faults is not None:
                faults.check()

    def reserve(self, scratch_bytes: int) -> None:
        """Give each worker at least this much scratch from the next step on."""
        with self._lock:
            if scratch_bytes > self._scratch_bytes:
                if self._busy:
                    self._refuse()
                self._scratch_bytes = scratch_bytes
                if self._team is not None:
                    self._team.reserve(0, scratch_bytes)

    def resize(self, threads: int) -> None:
        """Use `threads` workers from the next step on."""
        with self._lock:
            if threads != self.threads:
                self.close()
                self.threads = threads

    def close(self) -> None:
        """End the threads; a later run starts them anew."""
        with self._lock:
            if self._busy:
                self._refuse()
            if self._finalizer is not None:
                self._finalizer()
            self._team = self._finalizer = None

    def _form(self) -> Team:
        team = Team(self.threads)
        team.reserve(0, self._scratch_bytes)
        self._finalizer = weakref.finalize(self, team.quit)
        self._team = team
        return team

    def _stop(self, team: Team) -> None:
        while True:
            try:
                if native().stop(team.pool) == DONE:
                    return
            except KeyboardInterrupt:  # impatience: workers are still in a kernel
                continue

    def _refuse(self) -> None:
        raise StateError(
            "a step is already running on this thread",
            op="run",
            hint="a signal handler or finaliser may not run tilegrad code during a step",
        )

    def _after_fork(self) -> None:
        """In a forked child: forget the parent's threads and start anew at the next run."""
        if self._finalizer is not None:
            self._finalizer.detach()
        self._busy = False
        self._team = self._finalizer = None


_shared: WorkerPool | None = None
_shared_lock = new_lock()


def worker_pool() -> WorkerPool:
    """The process-wide pool, with as many threads as the Config says."""
    global _shared
    pool, threads = _shared, config().threads
    if pool is None:
        with _shared_lock:
            pool = _shared = _shared or WorkerPool(threads)
    if pool.threads != threads:
        pool.resize(threads)
    return pool

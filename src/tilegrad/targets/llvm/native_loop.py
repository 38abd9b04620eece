"""The native loop over steps: what worker threads do, without Python, in the language of `native`.

Exports: `start` (publish a step and run it as worker 0), `resume` (go on after a pause),
`stop` (end a step early), `serve` (the life of another worker), `quit`, and `spin` (to time the
pause instruction). It returns PAUSED to Python between entries once SLICE nanoseconds
have passed, so that signals are honoured; the other workers wait in their next barrier.

Invariant: only worker 0 starts steps, and `start`/`resume` return DONE only when every worker
has left the step. All shared words are on lines of their own and only touched by atomics while
workers run. Waiting is always: spin for a bounded time, then sleep in the kernel.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from . import table

DONE, PAUSED, STOPPED = 0, 1, 2
LINUX = sys.platform.startswith("linux")

# The pool's shared memory: one line of 64 bytes for each word that is written often, and behind a
# word that workers wait for the number of those that sleep.
POOL = np.dtype(
    [
        ("epoch", "i4", 16),
        ("epoch_sleepers", "i4", 16),
        ("count", "i4", 16),
        ("turn", "i4", 16),
        ("turn_sleepers", "i4", 16),
        ("done", "i4", 16),
        ("done_sleepers", "i4", 16),
        ("ticket", "i8", 8),
        ("stopping", "i4"),
        ("quitting", "i4", 15),
        ("table", "u8"),  # the record of a step, from here to scalars
        ("entries", "i8"),
        ("index", "u8"),
        ("slots", "u8"),
        ("n_slots", "i8"),
        ("scalars", "u8"),
        ("workers", "i8"),
        ("active", "i8"),
        ("barrier_spins", "i4"),
        ("idle_spins", "i4"),
        ("caller_state", "u8", 7),
    ]
)
# The state of one worker.
STATE = np.dtype(
    [
        ("place", "i8"),
        ("own_slots", "u8"),
        ("args", "u8"),
        ("counters", "u8"),
        ("scratch", "u8", 4),
    ]
)
NUMBERS = {
    **{name: number for name, number in vars(table).items() if isinstance(number, int)},
    "COPY_GRAIN": 65536,
    "RECORD_BYTES": 48,
    "SLICE": 50_000_000,
    "DONE": DONE,
    "PAUSED": PAUSED,
    "STOPPED": STOPPED,
}
PAUSES = {
    "x86_64": "call void @llvm.x86.sse2.pause()",
    "aarch64": "call void @llvm.aarch64.hint(i32 1)",
}


def native_loop_text(machine: str) -> str:
    """The loop as LLVM IR for a CPU family ('x86_64' or 'aarch64')."""
    from .native import Module, Value  # not needed where the Store has the loop

    pause = PAUSES[machine]
    numbers = {**NUMBERS, "FUTEX": 202 if machine == "x86_64" else 98, "CLOCK": 6 if LINUX else 1}
    names = {name: Value("", str(number)) for name, number in numbers.items()}
    names["null"] = Value("ptr", "null")
    records = {"pool": POOL, "state": STATE, "row": table.ENTRY}
    made = Module(records, names, {"pause": pause})
    declared = pause.replace("call", "declare").replace("i32 1", "i32")
    return f"{declared}\n{made.text(SOURCE)}\n"


LIBC = """
def syscall(number: i64, *more) -> i64: ...
def clock_gettime(clock: i32, time: ptr) -> i32: ...
def usleep(microseconds: i32) -> i32: ...
def sched_yield() -> i32: ...
def memcpy(to: ptr, source: ptr, bytes: i64) -> ptr: ...
def memset(to: ptr, byte: i32, bytes: i64) -> ptr: ...

def now() -> i64:
    time = room(16)
    clock_gettime(CLOCK, time)
    return i64[time] * 1000000000 + i64[time, 1]

@exported
def spin(times: i64):
    while times > 0:
        pause()
        times = times - 1
"""

# Sleep while the word still has `value`, at most one slice where the caller must look up
# (`bounded`); wake whoever sleeps on the word.
# A sleeper counts itself before the kernel compares the word, a waker changes the word before
# it reads the count: one of the two always sees the other.
FUTEX = """
@noinline
def sleep(word: ptr, value: i32, bounded: i1):
    slice = room(16)
    i64[slice] = 0
    i64[slice, 1] = SLICE
    add(i32[word + 64], 1, seq_cst)
    limit = slice if bounded else null
    syscall(FUTEX, word, i32(128), value, limit, null, i32(0))
    sub(i32[word + 64], 1, seq_cst)

def wake(word: ptr):
    if load(i32[word + 64], seq_cst) > 0:
        syscall(FUTEX, word, i32(129), i32(2147483647), null, null, i32(0))
"""

# Without futexes: short naps.
NAP = """
@noinline
def sleep(word: ptr, value: i32, bounded: i1):
    usleep(50)

def wake(word: ptr):
    return
"""

# `wait_once` waits until the word differs from `value`, or until one sleep has ended; whether it
# differs. The last worker to come to a barrier resets the count and the ticket, and turns it over;
# `turn` is read before `stopping`, and `stop` writes them in the other order.
WAIT = """
def wait_once(word: ptr, value: i32, spins: i32, bounded: i1) -> i1:
    i = i32(0)
    while i < spins:
        if load(i32[word], acquire) != value:
            return True
        pause()
        i = i + 1
        if i & 127 == 0:
            sched_yield()
    sleep(word, value, bounded)
    return load(i32[word], acquire) != value

def wait_change(word: ptr, value: i32, spins: i32):
    while wait_once(word, value, spins, False) == False:
        pause()

def barrier(pool: pool, workers: i64):
    if workers == 1:
        return
    turn = load(pool.turn, acquire)
    if load(pool.stopping, acquire):
        return
    if add(pool.count, 1, acq_rel) + 1 == i32(workers):
        store(pool.ticket, 0, monotonic)
        store(pool.count, 0, monotonic)
        store(pool.turn, turn + 1, seq_cst)
        wake(at(pool.turn))
    else:
        wait_change(at(pool.turn), turn, pool.barrier_spins)

def barrier_after(pool: pool, workers: i64, last: i1):
    if last == False:
        barrier(pool, workers)
"""

# One entry of a table. `share` is the boundary before a worker's part of a copy, a multiple of the
# grain. JUMP_UNLESS ends in a barrier: nobody may go on to write the byte before all have read it.
STEP = """
def grid_of(pool: pool, row: row) -> i64:
    if row.flags & GRID_SCALAR:
        return i64[pool.scalars, row.grid]
    return row.grid

def value_of(pool: pool, row: row) -> i64:
    if row.flags & VALUE_SCALAR:
        return i64[pool.scalars, row.c]
    return row.c

def least(a: i64, b: i64) -> i64:
    return a if a < b else b

def share(worker: i64, workers: i64, grid: i64, grain: i64) -> i64:
    units = (grid + grain - 1) // grain
    return least(units * worker // workers * grain, grid)

def gather(pool: pool, state: state, row: row):
    first = i64(row.args)
    i = 0
    while i < i64(row.args_count):
        number = i32[pool.index, first + i]
        ptr[state.args, i] = ptr[state.own_slots, i64(number)]
        i = i + 1

def programs(pool: pool, state: state, row: row, start: i64, stop: i64):
    if start < stop:
        scalars = pool.scalars + 8 * i64(row.scalars)
        row.function(state.args, scalars, start, stop, state.scratch)

def kernel(pool: pool, state: state, row: row, worker: i64, workers: i64):
    gather(pool, state, row)
    grid = grid_of(pool, row)
    grain = i64(row.grain) if row.grain else 1
    if row.flags & SINGLE or workers == 1:
        if worker == 0:
            programs(pool, state, row, 0, grid)
    else:
        drawn = add(pool.ticket, grain, monotonic)
        while drawn < grid:
            programs(pool, state, row, drawn, least(drawn + grain, grid))
            drawn = add(pool.ticket, grain, monotonic)

def copy(pool: pool, slots: ptr, row: row, worker: i64, workers: i64):
    bytes = grid_of(pool, row)
    if bytes > 0:
        grain = bytes if row.flags & SINGLE else COPY_GRAIN
        start = share(worker, workers, bytes, grain)
        stop = share(worker + 1, workers, bytes, grain)
        to = ptr[slots, i64(row.args)] + start
        memcpy(to, ptr[slots, i64(row.args_count)] + start, stop - start)

def set_slot(slots: ptr, counters: ptr, row: row):
    pointer = ptr[slots, i64(row.args_count)] + row.c
    if row.a >= 0:
        pointer = pointer + i64[counters, row.a] * row.b
    ptr[slots, i64(row.args)] = pointer

def swap_slots(slots: ptr, row: row):
    left = ptr[slots, row.b]
    ptr[slots, row.b] = ptr[slots, row.c]
    ptr[slots, row.c] = left

def take_entries(pool: pool, state: state, worker: i64, workers: i64, deadline: i64) -> i64:
    slots = state.own_slots
    counters = state.counters
    while state.place < pool.entries:
        if load(pool.stopping, acquire):
            return STOPPED
        if deadline:
            if now() > deadline:
                return PAUSED
        row: row = pool.table + 64 * state.place
        kind = row.kind
        state.place = state.place + 1
        if kind == KERNEL:
            kernel(pool, state, row, worker, workers)
            barrier_after(pool, workers, state.place == pool.entries)
        elif kind == COPY:
            copy(pool, slots, row, worker, workers)
            barrier_after(pool, workers, state.place == pool.entries)
        elif kind == JUMP:
            state.place = row.a
        elif kind == JUMP_UNLESS:
            if load(i8[ptr[slots, row.b] + row.c], monotonic) == 0:
                state.place = row.a
            barrier(pool, workers)
        elif kind == SET_COUNTER:
            i64[counters, row.b] = value_of(pool, row)
        elif kind == ADD_COUNTER:
            i64[counters, row.b] = i64[counters, row.b] + value_of(pool, row)
        elif kind == JUMP_COUNTER_LESS:
            if i64[counters, row.b] < value_of(pool, row):
                state.place = row.a
        elif kind == SET_SLOT:
            set_slot(slots, counters, row)
        elif kind == SWAP_SLOTS:
            swap_slots(slots, row)
    return DONE
"""

# `join` waits until the other workers have left the step; PAUSED when the deadline passes first.
# `stop` ends the running step: workers leave after the entry they are in. DONE when all have left.
WORKERS = """
def prepare(pool: pool, state: state):
    state.place = 0
    memcpy(state.own_slots, pool.slots, pool.n_slots * 8)
    memset(state.counters, 0, COUNTER_LIMIT * 8)

def join(pool: pool, workers: i64, deadline: i64) -> i64:
    others = i32(workers) - 1
    done = load(pool.done, acquire)
    while done != others:
        if wait_once(at(pool.done), done, pool.barrier_spins, True) == False:
            if now() > deadline:
                return PAUSED
        done = load(pool.done, acquire)
    pool.active = 0
    return DONE

@exported
def start(pool: pool, record: ptr, workers: i64) -> i64:
    memcpy(at(pool.table), record, RECORD_BYTES)
    pool.workers = workers
    state: state = pool.caller_state
    prepare(pool, state)
    if workers != 1:
        store(pool.done, 0, monotonic)
        store(pool.ticket, 0, monotonic)
        pool.active = 1
        add(pool.epoch, 1, seq_cst)
        wake(at(pool.epoch))
    return resume(pool, workers)

@exported
def resume(pool: pool, workers: i64) -> i64:
    deadline = now() + SLICE
    state: state = pool.caller_state
    code = take_entries(pool, state, 0, workers, deadline)
    if code == PAUSED or workers == 1:
        return code
    return join(pool, workers, deadline)

@exported
def serve(pool: pool, state: state, worker: i64, epoch: i32):
    while True:
        wait_change(at(pool.epoch), epoch, pool.idle_spins)
        epoch = load(pool.epoch, acquire)
        if load(pool.quitting, acquire):
            return
        prepare(pool, state)
        take_entries(pool, state, worker, pool.workers, 0)
        add(pool.done, 1, seq_cst)
        wake(at(pool.done))

@exported
def stop(pool: pool) -> i64:
    if pool.active == 0:
        return DONE
    store(pool.stopping, 1, seq_cst)
    add(pool.turn, 1, seq_cst)
    wake(at(pool.turn))
    if join(pool, pool.workers, now() + SLICE) == PAUSED:
        return PAUSED
    store(pool.count, 0, monotonic)
    store(pool.ticket, 0, monotonic)
    store(pool.stopping, 0, seq_cst)
    return DONE

@exported
def quit(pool: pool):
    store(pool.quitting, 1, seq_cst)
    add(pool.epoch, 1, seq_cst)
    wake(at(pool.epoch))
"""

SOURCE = LIBC + (FUTEX if LINUX else NAP) + WAIT + STEP + WORKERS


def sources() -> str:
    """All that the text depends on: this file, the language it is written in, and the table."""
    here = Path(__file__)
    texts = [here.with_name(name).read_text() for name in (here.name, "native.py", "table.py")]
    return "\n".join([sys.platform, *texts])

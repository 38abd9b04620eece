"""The native loop over steps as LLVM IR text: what worker threads do, without Python.

Exports: `start` (publish a step and run it as worker 0), `resume` (go on after a pause),
`stop` (end a step early), `serve` (the life of another worker), `quit`, and `spin` (to time the
pause instruction). It returns PAUSED to Python between entries once SLICE_NANOSECONDS
have passed, so that signals are honoured; the other workers wait in their next barrier.

The file is long because it is one program in one language.

Invariant: only worker 0 starts steps, and `start`/`resume` return DONE only when every worker
has left the step. All shared words are on lines of their own and only touched by atomics while
workers run. Waiting is always: spin for a bounded time, then sleep in the kernel.
"""

from __future__ import annotations

import re
import sys

from .table import COUNTER_LIMIT, DYNAMIC, GRID_SCALAR, NO_BARRIER, SINGLE, VALUE_SCALAR

DONE, PAUSED, STOPPED = 0, 1, 2
SLICE_NANOSECONDS = 50_000_000
COPY_GRAIN = 65536

# Byte offsets in the pool's shared memory: one line for each word that is written often.
POOL = {
    "epoch": 0,
    "epoch_sleepers": 64,
    "count": 128,
    "turn": 192,
    "turn_sleepers": 256,
    "done": 320,
    "done_sleepers": 384,
    "ticket": 448,
    "stopping": 512,
    "quitting": 516,
    "table": 576,
    "entries": 584,
    "index": 592,
    "slots": 600,
    "n_slots": 608,
    "scalars": 616,
    "workers": 624,
    "active": 632,
    "barrier_spins": 640,
    "idle_spins": 644,
    "caller_state": 648,
}
POOL_BYTES = 704
RECORD_BYTES = 48  # of a step: table to scalars, in the order above
# Byte offsets in the state of one worker.
STATE = {"place": 0, "own_slots": 8, "args": 16, "counters": 24, "scratch": 32}
STATE_BYTES = 64

NUMBERS = {
    "DYNAMIC": DYNAMIC,
    "NO_BARRIER": NO_BARRIER,
    "SINGLE": SINGLE,
    "GRID_SCALAR": GRID_SCALAR,
    "VALUE_SCALAR": VALUE_SCALAR,
    "COPY_GRAIN": COPY_GRAIN,
    "COUNTER_BYTES": COUNTER_LIMIT * 8,
    "RECORD_BYTES": RECORD_BYTES,
    "SLICE": SLICE_NANOSECONDS,
    "DONE": DONE,
    "PAUSED": PAUSED,
    "STOPPED": STOPPED,
}


# `%x = field T, ptr %record, i64 at` reads a value of a record, `%x = flag %flags, bit` asks for a
# bit, and `%x = entry T, ptr %list, i32 %number` reads one of a list.
SHORT = {
    r"field (\w+), (.+)": r"  %\1.at = getelementptr i8, \3\n  %\1 = load \2, ptr %\1.at",
    r"flag (.+), (.+)": r"  %\1.bits = and i32 \2, \3\n  %\1 = icmp ne i32 %\1.bits, 0",
    r"entry (\w+), (.+), i32 (.+)": r"  %\1.wide = zext i32 \4 to i64\n"
    r"  %\1.at = getelementptr \2, \3, i64 %\1.wide\n  %\1 = load \2, ptr %\1.at",
}


def native_loop_text(machine: str) -> str:
    """The loop as LLVM IR for a CPU family ('x86_64' or 'aarch64')."""
    linux = sys.platform.startswith("linux")
    pause = {
        "x86_64": "call void @llvm.x86.sse2.pause()",
        "aarch64": "call void @llvm.aarch64.hint(i32 1)",
    }.get(machine, "")
    declare = {
        "x86_64": "declare void @llvm.x86.sse2.pause()",
        "aarch64": "declare void @llvm.aarch64.hint(i32)",
    }.get(machine, "")
    text = "\n".join(
        [declare, DECLARE, FUTEX if linux else NAP, WAIT, BARRIER, KERNEL, COPY, LOOP, STEP, SERVE]
    )
    words = {f"pool.{name}": at for name, at in POOL.items()}
    words |= {f"state.{name}": at for name, at in STATE.items()}
    words |= {**NUMBERS, "FUTEX": {"x86_64": 202}.get(machine, 98), "CLOCK": 6 if linux else 1}
    for name in sorted(words, key=len, reverse=True):
        text = text.replace(f"${name}", str(words[name]))
    for short, long in SHORT.items():
        text = re.sub(rf"(?m)^  %([\w.]+) = {short}$", long, text)
    return text.replace("$PAUSE", pause)


DECLARE = """
declare i64 @syscall(i64, ...)
declare i32 @clock_gettime(i32, ptr)
declare i32 @usleep(i32)
declare i32 @sched_yield()
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
declare i64 @llvm.smin.i64(i64, i64)

define internal i64 @now() {
  %time = alloca [2 x i64]
  %code = call i32 @clock_gettime(i32 $CLOCK, ptr %time)
  %seconds = load i64, ptr %time
  %rest = field i64, ptr %time, i64 8
  %whole = mul i64 %seconds, 1000000000
  %all = add i64 %whole, %rest
  ret i64 %all
}

define void @spin(i64 %times) {
entry:
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%n, %loop]
  $PAUSE
  %n = add i64 %i, 1
  %more = icmp slt i64 %n, %times
  br i1 %more, label %loop, label %end
end:
  ret void
}
"""

# Sleep while the word still has `value`, at most one slice where the caller must look up
# (`bounded`); wake whoever sleeps on the word.
# A sleeper counts itself before the kernel compares the word, a waker changes the word before
# it reads the count: one of the two always sees the other.
FUTEX = """
define internal void @sleep(ptr %word, i32 %value, ptr %sleepers, i1 %bounded) noinline {
  %slice = alloca [2 x i64]
  store i64 0, ptr %slice
  %rest.at = getelementptr i8, ptr %slice, i64 8
  store i64 $SLICE, ptr %rest.at
  %limit = select i1 %bounded, ptr %slice, ptr null
  %before = atomicrmw add ptr %sleepers, i32 1 seq_cst
  %code = call i64 (i64, ...) @syscall(i64 $FUTEX, ptr %word, i32 128, i32 %value, ptr %limit,
                                       ptr null, i32 0)
  %after = atomicrmw sub ptr %sleepers, i32 1 seq_cst
  ret void
}

define internal void @wake(ptr %word, ptr %sleepers) {
  %asleep = load atomic i32, ptr %sleepers seq_cst, align 4
  %any = icmp sgt i32 %asleep, 0
  br i1 %any, label %call, label %end
call:
  %code = call i64 (i64, ...) @syscall(i64 $FUTEX, ptr %word, i32 129, i32 2147483647, ptr null,
                                       ptr null, i32 0)
  br label %end
end:
  ret void
}
"""

# Without futexes: short naps.
NAP = """
define internal void @sleep(ptr %word, i32 %value, ptr %sleepers, i1 %bounded) noinline {
  %code = call i32 @usleep(i32 50)
  ret void
}
define internal void @wake(ptr %word, ptr %sleepers) {
  ret void
}
"""

# Wait until the word differs from `value`, or until one sleep has ended. True: it differs.
WAIT = """
define internal i1 @wait_once(ptr %word, i32 %value, ptr %sleepers, i32 %spins, i1 %bounded) {
entry:
  br label %loop
loop:
  %i = phi i32 [0, %entry], [%n, %breath], [%n, %polite]
  %seen = load atomic i32, ptr %word acquire, align 4
  %same = icmp eq i32 %seen, %value
  br i1 %same, label %again, label %changed
again:
  $PAUSE
  %n = add i32 %i, 1
  %more = icmp ult i32 %n, %spins
  br i1 %more, label %breath, label %tired
breath:
  %bits = and i32 %n, 127
  %often = icmp ne i32 %bits, 0
  br i1 %often, label %loop, label %polite
polite:
  %yielded = call i32 @sched_yield()
  br label %loop
tired:
  call void @sleep(ptr %word, i32 %value, ptr %sleepers, i1 %bounded)
  %last = load atomic i32, ptr %word acquire, align 4
  %moved = icmp ne i32 %last, %value
  ret i1 %moved
changed:
  ret i1 true
}

define internal void @wait_change(ptr %word, i32 %value, ptr %sleepers, i32 %spins) {
entry:
  br label %loop
loop:
  %moved = call i1 @wait_once(ptr %word, i32 %value, ptr %sleepers, i32 %spins, i1 false)
  br i1 %moved, label %end, label %loop
end:
  ret void
}
"""

# The last worker to come resets the count and the ticket, and turns the barrier over.
# `turn` is read before `stopping`, and `stop` writes them in the other order.
BARRIER = """
define internal void @barrier(ptr %pool, i64 %workers) {
entry:
  %alone = icmp eq i64 %workers, 1
  br i1 %alone, label %end, label %arrive
arrive:
  %turn.at = getelementptr i8, ptr %pool, i64 $pool.turn
  %sleepers = getelementptr i8, ptr %pool, i64 $pool.turn_sleepers
  %turn = load atomic i32, ptr %turn.at acquire, align 4
  %stopping.at = getelementptr i8, ptr %pool, i64 $pool.stopping
  %stopping = load atomic i32, ptr %stopping.at acquire, align 4
  %leave = icmp ne i32 %stopping, 0
  br i1 %leave, label %end, label %count
count:
  %count.at = getelementptr i8, ptr %pool, i64 $pool.count
  %before = atomicrmw add ptr %count.at, i32 1 acq_rel
  %here = add i32 %before, 1
  %all = trunc i64 %workers to i32
  %last = icmp eq i32 %here, %all
  br i1 %last, label %release, label %wait
release:
  %ticket.at = getelementptr i8, ptr %pool, i64 $pool.ticket
  store atomic i64 0, ptr %ticket.at monotonic, align 8
  store atomic i32 0, ptr %count.at monotonic, align 4
  %next = add i32 %turn, 1
  store atomic i32 %next, ptr %turn.at seq_cst, align 4
  call void @wake(ptr %turn.at, ptr %sleepers)
  br label %end
wait:
  %spins = field i32, ptr %pool, i64 $pool.barrier_spins
  call void @wait_change(ptr %turn.at, i32 %turn, ptr %sleepers, i32 %spins)
  br label %end
end:
  ret void
}

define internal void @barrier_after(ptr %pool, i64 %workers, i32 %flags, i1 %at_end) {
entry:
  %free = flag %flags, $NO_BARRIER
  %dynamic = flag %flags, $DYNAMIC
  %static = xor i1 %dynamic, true
  %skip = and i1 %free, %static
  %none = or i1 %skip, %at_end
  br i1 %none, label %end, label %do
do:
  call void @barrier(ptr %pool, i64 %workers)
  br label %end
end:
  ret void
}

; A number, or the scalar of that number where the bit of the flags is set.
define internal i64 @number_of(i64 %given, ptr %scalars, i32 %flags, i32 %bit) {
entry:
  %indirect = flag %flags, %bit
  br i1 %indirect, label %read, label %end
read:
  %at = getelementptr i64, ptr %scalars, i64 %given
  %value = load i64, ptr %at
  br label %end
end:
  %result = phi i64 [%given, %entry], [%value, %read]
  ret i64 %result
}

define internal i64 @grid_of(ptr %row, ptr %scalars, i32 %flags) {
  %grid = field i64, ptr %row, i64 32
  %result = call i64 @number_of(i64 %grid, ptr %scalars, i32 %flags, i32 $GRID_SCALAR)
  ret i64 %result
}

; The boundary before this worker's share of the grid, a multiple of the grain.
define internal i64 @share(i64 %worker, i64 %workers, i64 %grid, i64 %grain) {
  %more = add i64 %grid, %grain
  %sum = sub i64 %more, 1
  %units = udiv i64 %sum, %grain
  %product = mul i64 %units, %worker
  %unit = udiv i64 %product, %workers
  %at = mul i64 %unit, %grain
  %result = call i64 @llvm.smin.i64(i64 %at, i64 %grid)
  ret i64 %result
}
"""

KERNEL = """
define internal void @gather(ptr %row, ptr %index, ptr %slots, ptr %counters, ptr %args) {
entry:
  %first = field i32, ptr %row, i64 16
  %count = field i32, ptr %row, i64 20
  %first.wide = zext i32 %first to i64
  %count.wide = zext i32 %count to i64
  %list = getelementptr i32, ptr %index, i64 %first.wide
  %none = icmp eq i32 %count, 0
  br i1 %none, label %end, label %loop
loop:
  %i = phi i64 [0, %entry], [%n, %put]
  %number.at = getelementptr i32, ptr %list, i64 %i
  %number = load i32, ptr %number.at
  %special = icmp slt i32 %number, 0
  br i1 %special, label %put, label %read
read:
  %slot = entry ptr, ptr %slots, i32 %number
  br label %put
put:
  %value = phi ptr [%counters, %loop], [%slot, %read]
  %arg.at = getelementptr ptr, ptr %args, i64 %i
  store ptr %value, ptr %arg.at
  %n = add i64 %i, 1
  %more = icmp ult i64 %n, %count.wide
  br i1 %more, label %loop, label %end
end:
  ret void
}

define internal void @kernel(ptr %pool, ptr %row, ptr %args, ptr %all_scalars, ptr %scratch,
                             i64 %worker, i64 %workers, i32 %flags) {
entry:
  %function = field ptr, ptr %row, i64 8
  %offset = field i32, ptr %row, i64 24
  %offset.wide = zext i32 %offset to i64
  %scalars = getelementptr i64, ptr %all_scalars, i64 %offset.wide
  %given = field i32, ptr %row, i64 28
  %none = icmp eq i32 %given, 0
  %least = select i1 %none, i32 1, i32 %given
  %grain = zext i32 %least to i64
  %grid = call i64 @grid_of(ptr %row, ptr %all_scalars, i32 %flags)
  %set = flag %flags, $SINGLE
  %alone = icmp eq i64 %workers, 1
  %single = or i1 %set, %alone
  br i1 %single, label %one, label %many
one:
  %mine = icmp eq i64 %worker, 0
  %some = icmp sgt i64 %grid, 0
  %go = and i1 %mine, %some
  br i1 %go, label %whole, label %end
whole:
  call void %function(ptr %args, ptr %scalars, i64 0, i64 %grid, ptr %scratch)
  br label %end
many:
  %dynamic = flag %flags, $DYNAMIC
  br i1 %dynamic, label %draw, label %static
static:
  %next = add i64 %worker, 1
  %start = call i64 @share(i64 %worker, i64 %workers, i64 %grid, i64 %grain)
  %stop = call i64 @share(i64 %next, i64 %workers, i64 %grid, i64 %grain)
  %empty = icmp sge i64 %start, %stop
  br i1 %empty, label %end, label %part
part:
  call void %function(ptr %args, ptr %scalars, i64 %start, i64 %stop, ptr %scratch)
  br label %end
draw:
  %ticket.at = getelementptr i8, ptr %pool, i64 $pool.ticket
  %from = atomicrmw add ptr %ticket.at, i64 %grain monotonic
  %over = icmp sge i64 %from, %grid
  br i1 %over, label %end, label %drawn
drawn:
  %far = add i64 %from, %grain
  %to = call i64 @llvm.smin.i64(i64 %far, i64 %grid)
  call void %function(ptr %args, ptr %scalars, i64 %from, i64 %to, ptr %scratch)
  br label %draw
end:
  ret void
}
"""

COPY = """
define internal void @copy(ptr %row, ptr %slots, ptr %scalars, i64 %worker, i64 %workers,
                           i32 %flags) {
entry:
  %to.number = field i32, ptr %row, i64 16
  %source.number = field i32, ptr %row, i64 20
  %to.base = entry ptr, ptr %slots, i32 %to.number
  %source.base = entry ptr, ptr %slots, i32 %source.number
  %a = field i64, ptr %row, i64 40
  %b = field i64, ptr %row, i64 48
  %to = getelementptr i8, ptr %to.base, i64 %a
  %source = getelementptr i8, ptr %source.base, i64 %b
  %bytes = call i64 @grid_of(ptr %row, ptr %scalars, i32 %flags)
  %single = flag %flags, $SINGLE
  %grain = select i1 %single, i64 %bytes, i64 $COPY_GRAIN
  %none = icmp sle i64 %bytes, 0
  br i1 %none, label %end, label %split
split:
  %next = add i64 %worker, 1
  %start = call i64 @share(i64 %worker, i64 %workers, i64 %bytes, i64 %grain)
  %stop = call i64 @share(i64 %next, i64 %workers, i64 %bytes, i64 %grain)
  %length = sub i64 %stop, %start
  %mine.to = getelementptr i8, ptr %to, i64 %start
  %mine.source = getelementptr i8, ptr %source, i64 %start
  call void @llvm.memcpy.p0.p0.i64(ptr %mine.to, ptr %mine.source, i64 %length, i1 false)
  br label %end
end:
  ret void
}
"""

# JUMP_UNLESS ends in a barrier: nobody may go on to rewrite the byte before all have read it.
LOOP = """
define internal i64 @value_of(i64 %c, ptr %scalars, i32 %flags) {
  %result = call i64 @number_of(i64 %c, ptr %scalars, i32 %flags, i32 $VALUE_SCALAR)
  ret i64 %result
}

define internal i64 @take_entries(ptr %pool, ptr %state, i64 %worker, i64 %workers, i64 %deadline) {
entry:
  %table = field ptr, ptr %pool, i64 $pool.table
  %entries = field i64, ptr %pool, i64 $pool.entries
  %index = field ptr, ptr %pool, i64 $pool.index
  %scalars = field ptr, ptr %pool, i64 $pool.scalars
  %stopping.at = getelementptr i8, ptr %pool, i64 $pool.stopping
  %slots = field ptr, ptr %state, i64 $state.own_slots
  %args = field ptr, ptr %state, i64 $state.args
  %counters = field ptr, ptr %state, i64 $state.counters
  %scratch = field ptr, ptr %state, i64 $state.scratch
  %place.at = getelementptr i8, ptr %state, i64 $state.place
  %first = load i64, ptr %place.at
  %place = alloca i64
  store i64 %first, ptr %place
  %timed = icmp ne i64 %deadline, 0
  br label %next

next:
  %here = load i64, ptr %place
  %finished = icmp sge i64 %here, %entries
  br i1 %finished, label %done, label %check
check:
  %stopping = load atomic i32, ptr %stopping.at acquire, align 4
  %leave = icmp ne i32 %stopping, 0
  br i1 %leave, label %stopped, label %watch
watch:
  br i1 %timed, label %clock, label %fetch
clock:
  %now = call i64 @now()
  %late = icmp sgt i64 %now, %deadline
  br i1 %late, label %paused, label %fetch

fetch:
  %entry.at = getelementptr [64 x i8], ptr %table, i64 %here
  %kind = load i32, ptr %entry.at
  %flags = field i32, ptr %entry.at, i64 4
  %a = field i64, ptr %entry.at, i64 40
  %b = field i64, ptr %entry.at, i64 48
  %c = field i64, ptr %entry.at, i64 56
  %after = add i64 %here, 1
  store i64 %after, ptr %place
  %at_end = icmp eq i64 %after, %entries
  switch i32 %kind, label %next [
    i32 1, label %kernel
    i32 2, label %jump
    i32 3, label %jump_unless
    i32 4, label %set_counter
    i32 5, label %add_counter
    i32 6, label %jump_counter_less
    i32 7, label %set_slot
    i32 8, label %swap_slots
    i32 9, label %copy
  ]

kernel:
  call void @gather(ptr %entry.at, ptr %index, ptr %slots, ptr %counters, ptr %args)
  call void @kernel(ptr %pool, ptr %entry.at, ptr %args, ptr %scalars, ptr %scratch,
                    i64 %worker, i64 %workers, i32 %flags)
  call void @barrier_after(ptr %pool, i64 %workers, i32 %flags, i1 %at_end)
  br label %next
copy:
  call void @copy(ptr %entry.at, ptr %slots, ptr %scalars, i64 %worker, i64 %workers, i32 %flags)
  call void @barrier_after(ptr %pool, i64 %workers, i32 %flags, i1 %at_end)
  br label %next
jump:
  store i64 %a, ptr %place
  br label %next
jump_unless:
  %bool.slot = getelementptr ptr, ptr %slots, i64 %b
  %bool.base = load ptr, ptr %bool.slot
  %bool.at = getelementptr i8, ptr %bool.base, i64 %c
  %bool = load atomic i8, ptr %bool.at monotonic, align 1
  %false = icmp eq i8 %bool, 0
  %target = select i1 %false, i64 %a, i64 %after
  store i64 %target, ptr %place
  call void @barrier(ptr %pool, i64 %workers)
  br label %next
set_counter:
  %set.at = getelementptr i64, ptr %counters, i64 %b
  %set.value = call i64 @value_of(i64 %c, ptr %scalars, i32 %flags)
  store i64 %set.value, ptr %set.at
  br label %next
add_counter:
  %add.at = getelementptr i64, ptr %counters, i64 %b
  %add.value = call i64 @value_of(i64 %c, ptr %scalars, i32 %flags)
  %add.old = load i64, ptr %add.at
  %add.new = add i64 %add.old, %add.value
  store i64 %add.new, ptr %add.at
  br label %next
jump_counter_less:
  %less.at = getelementptr i64, ptr %counters, i64 %b
  %less.value = load i64, ptr %less.at
  %bound = call i64 @value_of(i64 %c, ptr %scalars, i32 %flags)
  %less = icmp slt i64 %less.value, %bound
  %less.target = select i1 %less, i64 %a, i64 %after
  store i64 %less.target, ptr %place
  br label %next
set_slot:
  %to = field i32, ptr %entry.at, i64 16
  %base = field i32, ptr %entry.at, i64 20
  %to.wide = zext i32 %to to i64
  %base.pointer = entry ptr, ptr %slots, i32 %base
  %constant = getelementptr i8, ptr %base.pointer, i64 %c
  %fixed = icmp slt i64 %a, 0
  br i1 %fixed, label %put_slot, label %stride
stride:
  %step.at = getelementptr i64, ptr %counters, i64 %a
  %step = load i64, ptr %step.at
  %bytes = mul i64 %step, %b
  %moved = getelementptr i8, ptr %constant, i64 %bytes
  br label %put_slot
put_slot:
  %pointer = phi ptr [%constant, %set_slot], [%moved, %stride]
  %to.slot = getelementptr ptr, ptr %slots, i64 %to.wide
  store ptr %pointer, ptr %to.slot
  br label %next
swap_slots:
  %left.at = getelementptr ptr, ptr %slots, i64 %b
  %right.at = getelementptr ptr, ptr %slots, i64 %c
  %left = load ptr, ptr %left.at
  %right = load ptr, ptr %right.at
  store ptr %right, ptr %left.at
  store ptr %left, ptr %right.at
  br label %next

done:
  store i64 %here, ptr %place.at
  ret i64 $DONE
paused:
  store i64 %here, ptr %place.at
  ret i64 $PAUSED
stopped:
  store i64 %here, ptr %place.at
  ret i64 $STOPPED
}
"""

STEP = """
define internal void @prepare(ptr %pool, ptr %state) {
  %place.at = getelementptr i8, ptr %state, i64 $state.place
  store i64 0, ptr %place.at
  %own = field ptr, ptr %state, i64 $state.own_slots
  %slots = field ptr, ptr %pool, i64 $pool.slots
  %count = field i64, ptr %pool, i64 $pool.n_slots
  %bytes = shl i64 %count, 3
  call void @llvm.memcpy.p0.p0.i64(ptr %own, ptr %slots, i64 %bytes, i1 false)
  %counters = field ptr, ptr %state, i64 $state.counters
  call void @llvm.memset.p0.i64(ptr %counters, i8 0, i64 $COUNTER_BYTES, i1 false)
  ret void
}

define i64 @start(ptr %pool, ptr %record, i64 %workers) {
entry:
  %table.at = getelementptr i8, ptr %pool, i64 $pool.table
  call void @llvm.memcpy.p0.p0.i64(ptr %table.at, ptr %record, i64 $RECORD_BYTES, i1 false)
  %workers.at = getelementptr i8, ptr %pool, i64 $pool.workers
  store i64 %workers, ptr %workers.at
  %state = field ptr, ptr %pool, i64 $pool.caller_state
  call void @prepare(ptr %pool, ptr %state)
  %alone = icmp eq i64 %workers, 1
  br i1 %alone, label %go, label %publish
publish:
  %done.at = getelementptr i8, ptr %pool, i64 $pool.done
  store atomic i32 0, ptr %done.at monotonic, align 4
  %ticket.at = getelementptr i8, ptr %pool, i64 $pool.ticket
  store atomic i64 0, ptr %ticket.at monotonic, align 8
  %active.at = getelementptr i8, ptr %pool, i64 $pool.active
  store i64 1, ptr %active.at
  %epoch.at = getelementptr i8, ptr %pool, i64 $pool.epoch
  %epoch = atomicrmw add ptr %epoch.at, i32 1 seq_cst
  %sleepers = getelementptr i8, ptr %pool, i64 $pool.epoch_sleepers
  call void @wake(ptr %epoch.at, ptr %sleepers)
  br label %go
go:
  %code = call i64 @resume(ptr %pool, i64 %workers)
  ret i64 %code
}

define i64 @resume(ptr %pool, i64 %workers) {
entry:
  %state = field ptr, ptr %pool, i64 $pool.caller_state
  %now = call i64 @now()
  %deadline = add i64 %now, $SLICE
  %code = call i64 @take_entries(ptr %pool, ptr %state, i64 0, i64 %workers, i64 %deadline)
  %paused = icmp eq i64 %code, $PAUSED
  %alone = icmp eq i64 %workers, 1
  %return = or i1 %paused, %alone
  br i1 %return, label %end, label %join
join:
  %joined = call i64 @join(ptr %pool, i64 %workers, i64 %deadline)
  ret i64 %joined
end:
  ret i64 %code
}

; Wait until the other workers have left the step; PAUSED when the deadline passes first.
define internal i64 @join(ptr %pool, i64 %workers, i64 %deadline) {
entry:
  %done.at = getelementptr i8, ptr %pool, i64 $pool.done
  %sleepers = getelementptr i8, ptr %pool, i64 $pool.done_sleepers
  %spins = field i32, ptr %pool, i64 $pool.barrier_spins
  %all = trunc i64 %workers to i32
  %others = sub i32 %all, 1
  br label %loop
loop:
  %done = load atomic i32, ptr %done.at acquire, align 4
  %finished = icmp eq i32 %done, %others
  br i1 %finished, label %end, label %wait
wait:
  %moved = call i1 @wait_once(ptr %done.at, i32 %done, ptr %sleepers, i32 %spins, i1 true)
  br i1 %moved, label %loop, label %look
look:
  %now = call i64 @now()
  %late = icmp sgt i64 %now, %deadline
  br i1 %late, label %paused, label %loop
end:
  %active.at = getelementptr i8, ptr %pool, i64 $pool.active
  store i64 0, ptr %active.at
  ret i64 $DONE
paused:
  ret i64 $PAUSED
}
"""

SERVE = """
define void @serve(ptr %pool, ptr %state, i64 %worker, i32 %epoch) {
entry:
  %epoch.at = getelementptr i8, ptr %pool, i64 $pool.epoch
  %epoch.sleepers = getelementptr i8, ptr %pool, i64 $pool.epoch_sleepers
  %done.at = getelementptr i8, ptr %pool, i64 $pool.done
  %done.sleepers = getelementptr i8, ptr %pool, i64 $pool.done_sleepers
  %quitting.at = getelementptr i8, ptr %pool, i64 $pool.quitting
  br label %idle
idle:
  %seen = phi i32 [%epoch, %entry], [%now, %work]
  %spins = field i32, ptr %pool, i64 $pool.idle_spins
  call void @wait_change(ptr %epoch.at, i32 %seen, ptr %epoch.sleepers, i32 %spins)
  %now = load atomic i32, ptr %epoch.at acquire, align 4
  %quitting = load atomic i32, ptr %quitting.at acquire, align 4
  %leave = icmp ne i32 %quitting, 0
  br i1 %leave, label %end, label %work
work:
  call void @prepare(ptr %pool, ptr %state)
  %workers = field i64, ptr %pool, i64 $pool.workers
  %code = call i64 @take_entries(ptr %pool, ptr %state, i64 %worker, i64 %workers, i64 0)
  %before = atomicrmw add ptr %done.at, i32 1 seq_cst
  call void @wake(ptr %done.at, ptr %done.sleepers)
  br label %idle
end:
  ret void
}

; End the running step: workers leave after the entry they are in. DONE when all have left.
define i64 @stop(ptr %pool) {
entry:
  %active = field i64, ptr %pool, i64 $pool.active
  %idle = icmp eq i64 %active, 0
  br i1 %idle, label %end, label %signal
signal:
  %stopping.at = getelementptr i8, ptr %pool, i64 $pool.stopping
  store atomic i32 1, ptr %stopping.at seq_cst, align 4
  %turn.at = getelementptr i8, ptr %pool, i64 $pool.turn
  %turn = atomicrmw add ptr %turn.at, i32 1 seq_cst
  %turn.sleepers = getelementptr i8, ptr %pool, i64 $pool.turn_sleepers
  call void @wake(ptr %turn.at, ptr %turn.sleepers)
  %workers = field i64, ptr %pool, i64 $pool.workers
  %now = call i64 @now()
  %deadline = add i64 %now, $SLICE
  %code = call i64 @join(ptr %pool, i64 %workers, i64 %deadline)
  %paused = icmp eq i64 %code, $PAUSED
  br i1 %paused, label %waiting, label %clear
clear:
  %count.at = getelementptr i8, ptr %pool, i64 $pool.count
  store atomic i32 0, ptr %count.at monotonic, align 4
  %ticket.at = getelementptr i8, ptr %pool, i64 $pool.ticket
  store atomic i64 0, ptr %ticket.at monotonic, align 8
  store atomic i32 0, ptr %stopping.at seq_cst, align 4
  br label %end
waiting:
  ret i64 $PAUSED
end:
  ret i64 $DONE
}

define void @quit(ptr %pool) {
  %quitting.at = getelementptr i8, ptr %pool, i64 $pool.quitting
  store atomic i32 1, ptr %quitting.at seq_cst, align 4
  %epoch.at = getelementptr i8, ptr %pool, i64 $pool.epoch
  %epoch = atomicrmw add ptr %epoch.at, i32 1 seq_cst
  %sleepers = getelementptr i8, ptr %pool, i64 $pool.epoch_sleepers
  call void @wake(ptr %epoch.at, ptr %sleepers)
  ret void
}
"""

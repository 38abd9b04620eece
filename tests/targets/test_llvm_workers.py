"""The worker pool: every entry kind, many threads, interrupts, fork, and what a step costs."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tilegrad.core.config import config, override, set_threads
from tilegrad.core.errors import InternalError, StateError
from tilegrad.core.target import NEON, SSE2
from tilegrad.targets.llvm import driver
from tilegrad.targets.llvm import table as tables
from tilegrad.targets.llvm.launcher import Record
from tilegrad.targets.llvm.native_loop import native_loop_text
from tilegrad.targets.llvm.table import ENTRY, check_table
from tilegrad.targets.llvm.workers import RECORD, WorkerPool, native, worker_pool

LONG = 600.0  # seconds; only against hanging

NEON_HERE = os.uname().machine == "aarch64"
HEAD = "(ptr %args, ptr %scalars, i64 %start, i64 %stop, ptr %scratch)"


def loop(name: str, body: str) -> str:
    """A kernel that runs `body` for each program %i; %x, %y are its first two arguments."""
    return f"""
define void @{name}{HEAD} {{
entry:
  %x = load ptr, ptr %args
  %y.at = getelementptr ptr, ptr %args, i64 1
  %y = load ptr, ptr %y.at
  br label %loop
loop:
  %i = phi i64 [%start, %entry], [%next, %loop]
  %at = getelementptr i64, ptr %x, i64 %i
{body}
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %stop
  br i1 %more, label %loop, label %end
end:
  ret void
}}
"""


BUMP = "  %v = load i64, ptr %at\n  %w = add i64 %v, {}\n  store i64 %w, ptr %at"
KERNELS = "\n".join(
    [
        f"define void @empty{HEAD} {{\n  ret void\n}}",
        loop("bump", BUMP.format(1)),
        loop("add_scalar", "  %s = load i64, ptr %scalars\n" + BUMP.format("%s")),
        # x[i] = y[i] + y[n - 1 - i]: reads what other workers wrote before the barrier
        loop(
            "mirror",
            """
  %n = load i64, ptr %scalars
  %last = sub i64 %n, 1
  %j = sub i64 %last, %i
  %p.at = getelementptr i64, ptr %y, i64 %i
  %q.at = getelementptr i64, ptr %y, i64 %j
  %p = load i64, ptr %p.at
  %q = load i64, ptr %q.at
  %r = add i64 %p, %q
  store i64 %r, ptr %at""",
        ),
        # y: a byte that becomes x[0] < scalars[0]
        loop(
            "less",
            """
  %v = load i64, ptr %x
  %bound = load i64, ptr %scalars
  %c = icmp slt i64 %v, %bound
  %b = zext i1 %c to i8
  store i8 %b, ptr %y""",
        ),
        # x[0] += 1, and the byte y becomes x[0] < scalars[0]
        loop(
            "tick",
            """
  %v = load i64, ptr %x
  %w = add i64 %v, 1
  store i64 %w, ptr %x
  %bound = load i64, ptr %scalars
  %c = icmp slt i64 %w, %bound
  %b = zext i1 %c to i8
  store i8 %b, ptr %y""",
        ),
        # x[i] = how many programs this call was given; scratch is written first and read back
        loop(
            "scratch",
            """
  %n = sub i64 %stop, %start
  %far = getelementptr i64, ptr %scratch, i64 8191
  store volatile i64 %n, ptr %far
  %m = load volatile i64, ptr %far
  store i64 %m, ptr %at""",
        ),
        # spins for scalars[0] rounds
        f"""
define void @slow{HEAD} {{
entry:
  %n = load i64, ptr %scalars
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%next, %loop]
  store volatile i64 %i, ptr %scratch
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %n
  br i1 %more, label %loop, label %end
end:
  ret void
}}
""",
    ]
)


class TableBuilder(tables.TableBuilder):
    """The same with the values of control entries by name."""

    def __len__(self):
        return len(self._rows)

    def point(self, entry, to):
        self._rows[entry]["a"] = to

    def jump(self, to=-1):
        return self.control("jump", to)

    def jump_unless(self, slot, to=-1, offset=0):
        number = self.control("jump_unless", slot, to)
        self._rows[number]["c"] = offset
        return number

    def set_counter(self, counter, value, flags=0):
        return self.control("set_counter", counter, value, flags=flags)

    def add_counter(self, counter, value, flags=0):
        return self.control("add_counter", counter, value, flags=flags)

    def jump_counter_less(self, counter, bound, to=-1, flags=0):
        return self.control("jump_counter_less", counter, bound, to, flags=flags)

    def set_slot(self, slot, base, counter=-1, stride=0, offset=0):
        return self.control("set_slot", slot, base, counter, stride, offset)

    def swap_slots(self, first, second):
        return self.control("swap_slots", first, second)


@pytest.fixture(scope="module")
def kernels():
    return driver.load(driver.compile_text(KERNELS, NEON if NEON_HERE else SSE2))


@pytest.fixture(scope="module", params=[1, 2, 5], ids=lambda n: f"{n}-workers")
def pool(request):
    pool = WorkerPool(request.param)
    yield pool
    pool.close()


def run(pool, builder, arrays, scalars=(0,), inline=False):
    """Run a table over arrays as slots."""
    slots = (ctypes.c_uint64 * len(arrays))(*[a.ctypes.data for a in arrays])
    numbers = (ctypes.c_int64 * len(scalars))(*scalars)
    record = Record(*builder.finish(len(slots), len(numbers)), slots, numbers)
    pool.run_step(record.at, len(slots), inline)


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "parallel"])
@pytest.mark.parametrize("flags", [0, tables.SINGLE])
@pytest.mark.parametrize(("grid", "grain"), [(1000, 1), (1000, 64), (7, 3), (1, 1), (0, 1)])
def test_each_program_runs_once(pool, kernels, inline, flags, grid, grain):
    x = np.zeros(1001, np.int64)
    builder = TableBuilder()
    for _ in range(3):
        builder.kernel(kernels.address("bump"), [0, 0], grid, grain=grain, flags=flags)
    run(pool, builder, [x], inline=inline)
    assert (x[:grid] == 3).all() and (x[grid:] == 0).all()


def test_kernels_see_what_came_before(pool, kernels):
    n = 4099
    x, y = np.arange(n), np.zeros(n, np.int64)
    expected = x.copy()
    builder = TableBuilder()
    for _ in range(20):
        builder.kernel(kernels.address("mirror"), [1, 0], n)
        builder.swap_slots(0, 1)
    for _ in range(20):
        expected = expected + expected[::-1]
    run(pool, builder, [x, y], [n])
    assert (x == expected).all()  # an even number of swaps


def test_scalars_and_grids_from_scalars(pool, kernels):
    x = np.zeros(100, np.int64)
    builder = TableBuilder()
    builder.kernel(kernels.address("add_scalar"), [0, 0], 1, scalars=2, flags=tables.GRID_SCALAR)
    builder.kernel(kernels.address("add_scalar"), [0, 0], 0, scalars=3, flags=tables.GRID_SCALAR)
    run(pool, builder, [x], [100, 60, 7, -5])
    assert (x[:60] == 2).all() and (x[60:] == -5).all()


def test_counted_loop_with_moving_slot(pool, kernels):
    x = np.zeros((6, 50), np.int64)
    builder = TableBuilder()
    builder.set_counter(3, 1)
    top = builder.set_slot(1, 0, counter=3, stride=400, offset=8)
    builder.kernel(kernels.address("bump"), [1, 1], 49)
    builder.add_counter(3, 1)
    builder.jump_counter_less(3, 5, to=top)
    run(pool, builder, [x, x])
    expected = np.zeros((6, 50), np.int64)
    expected[1:5, 1:] = 1
    assert (x == expected).all()


def test_counters_from_scalars(pool, kernels):
    x = np.zeros(10, np.int64)
    builder = TableBuilder()
    builder.set_counter(1, 0, flags=tables.VALUE_SCALAR)
    top = builder.kernel(kernels.address("bump"), [0, 0], 10)
    builder.add_counter(1, 1, flags=tables.VALUE_SCALAR)
    builder.jump_counter_less(1, 2, to=top, flags=tables.VALUE_SCALAR)
    run(pool, builder, [x], [5, 3, 30])
    assert (x == len(range(5, 30, 3))).all()


def test_jump_skips(pool, kernels):
    x = np.zeros(10, np.int64)
    builder = TableBuilder()
    jump = builder.jump()
    builder.kernel(kernels.address("bump"), [0, 0], 10)
    builder.point(jump, len(builder))
    builder.kernel(kernels.address("bump"), [0, 0], 5)
    run(pool, builder, [x])
    assert x.tolist() == [1] * 5 + [0] * 5


def test_while_loop_on_a_predicate(pool, kernels):
    """The predicate is rewritten each time round: no worker may miss the value it had."""
    x, flag = np.zeros(64, np.int64), np.zeros(4, np.uint8)
    builder = TableBuilder()
    top = builder.kernel(kernels.address("less"), [0, 1], 1, flags=tables.SINGLE)
    leave = builder.jump_unless(1)
    builder.kernel(kernels.address("bump"), [0, 0], 64)
    builder.jump(top)
    builder.point(leave, len(builder))
    for bound in (0, 1, 500):
        x[:] = 0
        run(pool, builder, [x, flag], [bound])
        assert (x == bound).all()


def test_a_predicate_rewritten_at_once(pool, kernels):
    """Nothing stands between reading the predicate and writing it anew: the jump must wait."""
    x, flag = np.zeros(1, np.int64), np.zeros(1, np.uint8)
    builder = TableBuilder()
    top = builder.kernel(kernels.address("tick"), [0, 1], 1, flags=tables.SINGLE)
    leave = builder.jump_unless(1)
    builder.jump(top)
    builder.point(leave, len(builder))
    for _ in range(20):
        x[:] = 0
        run(pool, builder, [x, flag], [100])
        assert x[0] == 100


@pytest.mark.parametrize("size", [0, 1, 100, 65536, 1_000_003])
@pytest.mark.parametrize("flags", [0, tables.SINGLE])
def test_copy(pool, size, flags):
    source = np.random.default_rng(size).integers(0, 255, size + 10).astype(np.uint8)
    to = np.zeros(size + 20, np.uint8)
    builder = TableBuilder()
    builder.copy(0, 1, size, flags=flags)
    run(pool, builder, [to, source])
    assert (to[:size] == source[:size]).all() and not to[size:].any()


def test_slots_of_the_caller_stay(pool, kernels):
    x, y = np.zeros(4, np.int64), np.zeros(4, np.int64)
    slots = np.array([x.ctypes.data, y.ctypes.data], np.uint64)
    builder = TableBuilder()
    builder.swap_slots(0, 1)
    builder.kernel(kernels.address("bump"), [0, 0], 4)
    entries, index = builder.finish(2)
    record = np.array(
        [entries.ctypes.data, 2, index.ctypes.data, slots.ctypes.data, 2, slots.ctypes.data],
        np.uint64,
    )
    assert record.nbytes == RECORD.size
    for inline in (False, True):
        pool.run_step(record.ctypes.data, 2, inline)
    assert slots.tolist() == [x.ctypes.data, y.ctypes.data]
    assert not x.any() and (y == 2).all()


def test_many_slots_and_large_scratch(kernels):
    pool = WorkerPool(3)
    arrays = [np.zeros(8, np.int64) for _ in range(2000)]
    builder = TableBuilder()
    for number in range(2000):
        builder.kernel(kernels.address("bump"), [number, number], 8)
    run(pool, builder, arrays)
    assert all((a == 1).all() for a in arrays)
    pool.reserve(8 << 20)
    builder = TableBuilder()
    builder.kernel(kernels.address("scratch"), [0, 0], 8, grain=3)
    run(pool, builder, arrays)
    assert arrays[0].tolist() == [3, 3, 3, 3, 3, 3, 2, 2]
    pool.close()


def test_empty_table(pool):
    untouched = np.full(1, 7.0)
    run(pool, TableBuilder(), [untouched])
    assert untouched.tolist() == [7.0]


def test_several_python_threads(pool, kernels):
    """Steps of several callers do not mix."""
    faults = []

    def work(seed):
        x = np.zeros(500, np.int64)
        builder = TableBuilder()
        for _ in range(5):
            builder.kernel(
                kernels.address("bump"), [0, 0], 500, grain=7, flags=seed % 2 * tables.SINGLE
            )
        for i in range(40):
            run(pool, builder, [x], inline=i % 3 == 0)
            if not (x == 5 * (i + 1)).all():
                faults.append((seed, i))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def test_threads_start_late_and_end(kernels):
    def workers():
        return [t for t in threading.enumerate() if t.name.startswith("tilegrad-worker")]

    before = len(workers())
    pool = WorkerPool(3)
    builder = TableBuilder()
    builder.kernel(kernels.address("bump"), [0, 0], 9)
    x = np.zeros(9, np.int64)
    run(pool, builder, [x], inline=True)
    assert len(workers()) == before
    run(pool, builder, [x])
    assert len(workers()) == before + 2
    pool.resize(5)
    assert len(workers()) == before
    run(pool, builder, [x])
    assert len(workers()) == before + 4
    assert (x == 3).all()
    del pool
    assert len(workers()) == before


def test_the_shared_pool_follows_the_config(kernels):
    builder = TableBuilder()
    builder.kernel(kernels.address("bump"), [0, 0], 9)
    x = np.zeros(9, np.int64)
    with override():
        for count in (1, 3, 2):
            set_threads(count)
            assert worker_pool().threads == count == config().threads
            run(worker_pool(), builder, [x])
    assert (x == 3).all() and worker_pool() is worker_pool()


def test_long_idle_and_back(pool, kernels):
    """Workers that fell asleep wake again."""
    x = np.zeros(100, np.int64)
    builder = TableBuilder()
    builder.kernel(kernels.address("bump"), [0, 0], 100)
    builder.kernel(kernels.address("bump"), [0, 0], 100)
    for _ in range(10):
        time.sleep(0.003)
        run(pool, builder, [x])
    assert (x == 20).all()


def test_steps_longer_than_a_slice_resume(pool, kernels):
    x = np.zeros(100, np.int64)
    builder = TableBuilder()
    top = builder.kernel(kernels.address("slow"), [0, 0], 100)
    builder.kernel(kernels.address("bump"), [0, 0], 100)
    builder.add_counter(0, 1)
    builder.jump_counter_less(0, 100, to=top)
    begin = time.perf_counter()
    run(pool, builder, [x], [2_000_000 if pool.threads == 1 else 200_000])  # of each share
    assert time.perf_counter() - begin > 0.05
    assert (x == 100).all()


def test_a_handler_that_raises_ends_the_step(pool, kernels):
    """Any exception from a signal handler ends the table early and leaves a working pool."""

    class Alarm(Exception):
        pass

    def ring(*_):
        try:
            run(pool, quick, [np.zeros(100, np.int64)])
        except StateError as error:
            assert "already running" in str(error)
            raise Alarm from error
        signal.setitimer(signal.ITIMER_REAL, 0.1)  # it came before the step began

    x = np.zeros(100, np.int64)
    quick, endless = TableBuilder(), TableBuilder()
    quick.kernel(kernels.address("bump"), [0, 0], 100)
    top = endless.kernel(kernels.address("bump"), [1, 1], 100)
    endless.jump(top)
    old = signal.signal(signal.SIGALRM, ring)
    try:
        for inline in (False, True):
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(Alarm):
                run(pool, endless, [x, np.zeros(100, np.int64)], inline=inline)
            run(pool, quick, [x])
    finally:
        signal.signal(signal.SIGALRM, old)
    assert (x == 2).all()


SCRIPT = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
import numpy as np
sys.path.insert(0, {folder!r})
from test_llvm_workers import KERNELS, SSE2, NEON, NEON_HERE, TableBuilder, driver, run
from tilegrad.targets.llvm.workers import WorkerPool
kernels = driver.load(driver.compile_text(KERNELS, NEON if NEON_HERE else SSE2))
pool, builder, x = WorkerPool({threads}), TableBuilder(), np.zeros(100, np.int64)
top = builder.kernel(kernels.address("bump"), [0, 0], 100)
if {endless}:
    builder.jump(top)
try:
    print("ready", flush=True)
    run(pool, builder, [x], inline={inline})
except KeyboardInterrupt:
    print("interrupted", flush=True)
    raise
"""


def child(**values):
    code = SCRIPT.format(folder=os.path.dirname(__file__), **values)
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(("threads", "inline"), [(1, False), (2, False), (4, False), (2, True)])
def test_control_c(threads, inline):
    process = child(threads=threads, inline=inline, endless=True)
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    try:
        out, error = process.communicate(timeout=LONG)  # it would go on for ever
    finally:
        process.kill()
    assert out == "interrupted\n" and "KeyboardInterrupt" in error
    assert process.returncode == -signal.SIGINT


def test_clean_exit_with_live_workers():
    process = child(threads=4, inline=False, endless=False)
    try:
        _, error = process.communicate(timeout=LONG)
    finally:
        process.kill()
    assert process.returncode == 0 and error == ""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork(pool, kernels):
    x = np.zeros(100, np.int64)
    builder = TableBuilder()
    for _ in range(3):
        builder.kernel(kernels.address("bump"), [0, 0], 100)
    run(pool, builder, [x])
    process = os.fork()
    if process == 0:
        code = 2
        try:
            for _ in range(20):
                run(pool, builder, [x])
            code = 0 if (x == 63).all() else 1
        finally:
            os._exit(code)
    assert os.waitpid(process, 0)[1] == 0
    run(pool, builder, [x])
    assert (x == 6).all()


def test_crowded(kernels):
    """Many more workers than cores, and several such pools at once: slow, but no livelock."""
    x = [np.zeros(64, np.int64) for _ in range(3)]
    builder = TableBuilder()
    for _ in range(50):
        builder.kernel(kernels.address("bump"), [0, 0], 64)

    def work(array):
        pool = WorkerPool(16)
        for _ in range(3):
            run(pool, builder, [array])
        pool.close()

    threads = [threading.Thread(target=work, args=(array,)) for array in x]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((array == 150).all() for array in x)


def test_entry_is_one_line_of_memory():
    assert ENTRY.itemsize == 64
    offsets = {name: ENTRY.fields[name][1] for name in ENTRY.names}
    assert offsets == {
        "kind": 0,
        "flags": 4,
        "function": 8,
        "args": 16,
        "args_count": 20,
        "scalars": 24,
        "grain": 28,
        "grid": 32,
        "a": 40,
        "b": 48,
        "c": 56,
    }


@pytest.mark.parametrize(
    "write",
    [
        lambda b: b.kernel(0, [0], 1),
        lambda b: b.kernel(1, [5], 1),
        lambda b: b.kernel(1, [-1], 1),
        lambda b: b.kernel(1, [0], -1),
        lambda b: b.kernel(1, [0], 9, flags=tables.GRID_SCALAR),
        lambda b: b.kernel(1, [0] * 2000, 1),
        lambda b: b.jump(7),
        lambda b: b.jump(),
        lambda b: b.jump_unless(9, to=0),
        lambda b: b.set_counter(64, 0),
        lambda b: b.add_counter(0, 5, flags=tables.VALUE_SCALAR),
        lambda b: b.jump_counter_less(0, 1, to=9),
        lambda b: b.set_slot(0, 4),
        lambda b: b.set_slot(0, 1, counter=64),
        lambda b: b.swap_slots(-1, 0),
        lambda b: b.copy(0, 3, 10),
    ],
)
def test_bad_tables_are_refused(write):
    builder = TableBuilder()
    write(builder)
    with pytest.raises(InternalError, match="step table: entry 0"):
        builder.finish(2, 1)


def test_unknown_kinds_are_refused():
    with pytest.raises(InternalError, match="unknown kind"):
        check_table(np.zeros(1, ENTRY), np.zeros(1, np.int32), 1, 0)


def test_the_native_loop_compiles_for_arm():
    names = driver.function_names(driver.compile_text(native_loop_text("aarch64"), NEON))
    assert {"start", "resume", "stop", "serve", "quit", "spin"} == set(names)


def test_a_step_is_cheap(kernels):
    """The best of many, with all of the Python in it, in units of what this machine needs to add
    up a thousand numbers (about 10 us)."""

    def best(work):
        times = []
        for _ in range(2000):
            begin = time.perf_counter()
            work()
            times.append(time.perf_counter() - begin)
        return min(times)

    pool = WorkerPool(2)
    builder = TableBuilder()
    builder.kernel(kernels.address("empty"), [0], 8)
    record = Record(*builder.finish(1), (ctypes.c_uint64 * 1)(), (ctypes.c_int64 * 1)())
    unit = best(lambda: sum(range(1000)))
    assert best(lambda: pool.run_step(record.at, 1, True)) < 3 * unit
    assert best(lambda: pool.run_step(record.at, 1, False)) < 50 * unit
    pool.close()
    assert native().spins_per_second > 0


def test_the_key_of_the_native_loop_follows_its_language_and_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A loop in the Store is not found again once a file that its text depends on is another."""
    from tilegrad.targets.llvm import native_loop

    here = Path(native_loop.__file__)
    before = native_loop.sources()
    for changed in (here.name, "native.py", "table.py"):
        for name in (here.name, "native.py", "table.py"):
            more = "# changed\n" if name == changed else ""
            (tmp_path / name).write_text(here.with_name(name).read_text() + more)
        monkeypatch.setattr(native_loop, "__file__", str(tmp_path / here.name))
        assert native_loop.sources() != before

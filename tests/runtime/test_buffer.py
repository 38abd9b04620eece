"""Buffer: alignment, reuse, views that keep memory, ended Buffers, accounts and limits."""

import gc
import os
import threading
import weakref

import numpy as np
import pytest

from tilegrad.core.config import override
from tilegrad.core.dtype import bfloat16, float32
from tilegrad.core.errors import MemoryLimitError, ShapeError, StateError
from tilegrad.runtime.buffer import (
    POOL,
    Buffer,
    Pool,
    memory_in_use,
    memory_peak,
    reset_peak,
    size_class,
)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 1000, 4097, 70_000, 1 << 20, (3 << 20) + 5])
def test_alignment(size):
    buffer = Buffer.allocate(size)
    assert buffer.bytes == size
    assert buffer.pointer % (2 << 20 if size >= 1 << 20 else 64) == 0
    view = buffer.array((size,), np.uint8)
    view[:] = 7
    assert view.sum(dtype=np.int64) == 7 * size


def test_size_classes_waste_little():
    for size in [*range(1, 5000, 37), 10**6, 10**7 + 1, 10**9 + 1]:
        given = size_class(size)
        assert given >= size and given % 64 == 0
        assert given - size < max(64, size / 7)
        assert size_class(given) == given


def test_memory_is_reused():
    buffer = Buffer.allocate(123_456)
    pointer = buffer.pointer
    buffer.free()
    assert Buffer.allocate(123_400).pointer == pointer


def test_views_keep_memory_alive():
    buffer = Buffer.allocate(4096)
    view = buffer.array((32, 32), float32)
    view[:] = 3
    pointer = buffer.pointer
    buffer.free()
    del buffer
    others = [Buffer.allocate(4096) for _ in range(20)]
    assert pointer not in [other.pointer for other in others]
    assert (view == 3).all()
    part = view[4:6]
    del view, others
    assert pointer != Buffer.allocate(4096).pointer and (part == 3).all()
    del part
    assert pointer in [b.pointer for b in [Buffer.allocate(4096) for _ in range(64)]]


def test_array_types_and_bounds():
    buffer = Buffer.allocate(64)
    assert buffer.array((4, 8), bfloat16).dtype == bfloat16.numpy
    assert buffer.array((), np.float64).shape == ()
    assert buffer.array((0, 5), np.float32).size == 0
    with pytest.raises(ShapeError, match="larger"):
        buffer.array((17,), np.float32)


@pytest.mark.usefixtures("quick_collect")
def test_wrap_is_zero_copy():
    array = np.arange(12, dtype=np.float32)
    buffer = Buffer.wrap(array, label="weights")
    assert buffer.pointer == array.ctypes.data and buffer.bytes == 48
    buffer.array((12,), np.float32)[3] = -1
    assert array[3] == -1
    gone = weakref.ref(array)
    del array
    assert gone() is not None
    del buffer
    gc.collect()
    assert gone() is None
    with pytest.raises(ShapeError, match="contiguous"):
        Buffer.wrap(np.zeros((4, 4))[:, 1:])
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    assert not Buffer.wrap(frozen).array((3,), np.float64).flags.writeable


def test_part_shares_memory():
    buffer = Buffer.allocate(256)
    part = buffer.part(64, 128)
    assert part.pointer == buffer.pointer + 64
    part.array((128,), np.uint8)[:] = 9
    assert buffer.array((256,), np.uint8)[64] == 9
    with pytest.raises(ShapeError):
        buffer.part(200, 100)


def test_ended_buffers_refuse_and_say_where():
    buffer = Buffer.allocate(64, label="cache")
    heir = buffer.donate()
    assert buffer.state == "donated" and heir.state == "alive"
    heir.array((64,), np.uint8)[:] = 1
    for read in (lambda: buffer.pointer, lambda: buffer.array((1,), np.uint8), buffer.donate):
        with pytest.raises(StateError, match=r"'cache'.*donated at .*test_buffer.py:\d+"):
            read()
    heir.free()
    heir.free()
    with pytest.raises(StateError, match="freed at"):
        _ = heir.pointer


@pytest.mark.usefixtures("quick_collect")
def test_accounts():
    gc.collect()
    before = memory_in_use()
    reset_peak()
    buffers = [Buffer.allocate(10_240) for _ in range(10)]
    assert memory_in_use() - before == 10 * size_class(10_240)
    del buffers
    assert memory_in_use() == before
    assert memory_peak() - before == 10 * size_class(10_240)


@pytest.mark.usefixtures("quick_collect")
def test_limit_names_peak_and_holders():
    gc.collect()
    limit = memory_in_use() + (8 << 20)
    with override(memory_bytes=limit):
        kept = [Buffer.allocate(3 << 20, label="kv cache") for _ in range(2)]
        with pytest.raises(MemoryLimitError, match=r"(?s)peak.*kv cache 6\.0 MiB in 2"):
            Buffer.allocate(4 << 20)
        del kept
        assert Buffer.allocate(4 << 20).bytes == 4 << 20


def test_a_refusal_of_the_system():
    with pytest.raises(MemoryLimitError, match="no more memory"):
        Buffer.allocate(1 << 60)


def test_pool_limit():
    pool = Pool(keep_bytes=100_000)
    blocks = [pool.take(40_960) for _ in range(5)]
    del blocks
    assert pool.in_use == 0 and 0 < pool.kept <= 100_000
    pool.trim()
    assert pool.kept == 0


def test_many_threads():
    before = memory_in_use()
    faults = []

    def work(seed):
        random = np.random.default_rng(seed)
        held = []
        for _ in range(400):
            size = int(random.integers(1, 20_000))
            view = Buffer.allocate(size).array((size,), np.uint8)
            view[:] = seed
            held.append(view)
            if len(held) > 10:
                view = held.pop(int(random.integers(0, 10)))
                if not (view == seed).all():
                    faults.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert memory_in_use() == before


@pytest.mark.usefixtures("quick_collect")
def test_cycles_collected_inside_the_pool_do_not_deadlock():
    gc.collect()
    before, thresholds = memory_in_use(), gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(300):
            cycle = [Buffer.allocate(100)]
            cycle.append(cycle)
    finally:
        gc.set_threshold(*thresholds)
    del cycle
    gc.collect()
    assert memory_in_use() <= before  # less where what others left was collected too


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_while_the_lock_is_held():
    POOL._lock.acquire()
    try:
        child = os.fork()
        if child == 0:
            Buffer.allocate(1000).array((1000,), np.uint8)[:] = 1
            os._exit(0)
    finally:
        POOL._lock.release()
    assert os.waitpid(child, 0)[1] == 0

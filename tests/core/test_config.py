"""Config: what the environment says, defaults, and overriding it for a while."""

import asyncio
import queue
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilegrad.core.config import (
    adopt,
    config,
    configure,
    override,
    read_environment,
    set_threads,
    usable_cores,
)
from tilegrad.core.errors import UserError


def test_defaults():
    read = read_environment({"XDG_CACHE_HOME": "/somewhere"})
    assert read.threads == usable_cores() >= 1
    assert read.cache_folder == "/somewhere/tilegrad"
    assert read.cache_bytes == 2048 << 20
    assert (read.device, read.log_level, read.memory_bytes) == ("cpu", "warning", 0)
    assert not read.verify and not read.eager_debug


def test_every_variable_is_read():
    read = read_environment(
        {
            "TILEGRAD_THREADS": "3",
            "TILEGRAD_CACHE": "/c",
            "TILEGRAD_CACHE_MB": "5",
            "TILEGRAD_DEVICE": "gpu",
            "TILEGRAD_LOG": "DEBUG",
            "TILEGRAD_VERIFY": "1",
            "TILEGRAD_EAGER": "on",
            "TILEGRAD_MEMORY_MB": "7",
            "TILEGRAD_DETERMINISM": "fast",
            "TILEGRAD_DOTS": "tf32",
            "TILEGRAD_KEEP": "9",
        }
    )
    assert read.threads == 3 and read.cache_folder == "/c"
    assert read.cache_bytes == 5 << 20 and read.memory_bytes == 7 << 20
    assert read.device == "gpu" and read.log_level == "debug"
    assert read.verify and read.eager_debug
    assert (read.determinism, read.dots, read.keep) == ("fast", "tf32", 9)


def test_bad_sums_are_refused_and_change_nothing():
    with pytest.raises(UserError, match="reproducible, fast"):
        configure(determinism="any")
    assert config().determinism == "reproducible"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TILEGRAD_THREADS", "0"),
        ("TILEGRAD_THREADS", "many"),
        ("TILEGRAD_THREADS", "1025"),
        ("TILEGRAD_CACHE_MB", "-1"),
        ("TILEGRAD_LOG", "loud"),
        ("TILEGRAD_VERIFY", "maybe"),
        ("TILEGRAD_DETERMINISM", "some"),
        ("TILEGRAD_DOTS", "fp8"),
    ],
)
def test_bad_values_name_the_variable(name, value):
    with pytest.raises(UserError, match=name):
        read_environment({name: value})


def test_verifiers_run_under_pytest():
    assert read_environment({"PYTEST_VERSION": "8"}).verify
    assert not read_environment({"PYTEST_VERSION": "8", "TILEGRAD_VERIFY": "0"}).verify


def test_override_ends_even_after_an_error():
    before = config()
    with pytest.raises(ZeroDivisionError), override(threads=17, device="x") as inner:
        assert config() is inner and config().threads == 17
        raise ZeroDivisionError
    assert config() is before
    with pytest.raises(UserError, match="unknown setting"), override(colour=1):
        pass
    assert config() is before


def test_set_threads():
    with override():
        set_threads(5)
        assert config().threads == 5
        set_threads(np.int64(3))
        assert type(config().threads) is int and config().threads == 3
        with pytest.raises(UserError):
            set_threads(0)
    with override(), pytest.raises(UserError):
        configure(nonsense=True)


def test_import_loads_only_numpy_and_ml_dtypes():
    code = (
        "import sys, threading; import tilegrad, tilegrad.core.config, tilegrad.core.target;"
        "import tilegrad.runtime.buffer, tilegrad.runtime.store, tilegrad.targets.llvm.driver;"
        "import tilegrad.targets.llvm.workers, tilegrad.targets.llvm.target;"
        "assert 'llvmlite' not in sys.modules, 'llvmlite';"
        "assert threading.active_count() == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


# ---- threads and contexts --------------------------------------------------------------------

CHANGES = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["enter", "leave", "look"]), st.integers(1, 9)),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(CHANGES)
def test_blocks_of_several_threads_do_not_meet(changes):
    """Threads enter and leave blocks in any order; each sees its own, and nothing stays."""
    before = config()
    turns = [queue.Queue() for _ in range(4)]
    answers: queue.Queue = queue.Queue()

    def live(turn):
        stack, expected = [], [before.threads]
        while (todo := turn.get()) is not None:
            what, value = todo
            if what == "enter":
                stack.append(override(threads=value))
                stack[-1].__enter__()
                expected.append(value)
            elif what == "leave" and stack:
                stack.pop().__exit__(None, None, None)
                expected.pop()
            answers.put(config().threads == expected[-1])
        while stack:
            stack.pop().__exit__(None, None, None)
        answers.put(config() is before)

    threads = [threading.Thread(target=live, args=(turn,)) for turn in turns]
    for thread in threads:
        thread.start()
    good = []
    for number, what, value in changes:
        turns[number].put((what, value))
        good.append(answers.get(timeout=300))
    for turn in turns:
        turn.put(None)
    good += [answers.get(timeout=300) for _ in threads]
    for thread in threads:
        thread.join()
    assert all(good) and config() is before


def test_a_block_belongs_to_its_task():
    async def one(value):
        with override(threads=value):
            await asyncio.sleep(0)
            configure(determinism="fast")
            await asyncio.sleep(0)
            return config().threads, config().determinism

    async def both():
        return await asyncio.gather(one(3), one(4))

    before = config()
    assert asyncio.run(both()) == [(3, "fast"), (4, "fast")]
    assert config() is before


def test_configure_reaches_every_thread():
    before = config()
    try:
        configure(cache_bytes=12345)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(lambda: config().cache_bytes).result() == 12345
    finally:
        configure(cache_bytes=before.cache_bytes)


def test_threads_of_ours_have_their_makers_settings():
    with (
        override(cache_bytes=777),
        ThreadPoolExecutor(1, initializer=adopt, initargs=(config(),)) as pool,
    ):
        assert pool.submit(lambda: config().cache_bytes).result() == 777

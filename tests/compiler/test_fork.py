"""Forks beside running threads: a child computes and compiles, whatever its parent was doing.

Each case runs in a process of its own, which forks again and again while threads trace, compile,
run and draw; a child that waits for a thread it does not have would wait for ever.
"""

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

BUSY = {
    "jitted calls": "f(x)",
    "lazy graphs": "(x * 2 + x).sum().item()",
    "compiling": "tg.jit(lambda v: v.exp().sum(1))(tg.ones(next(numbers), 3)).numpy()",
    "drawing": "tg.randn(64).sum().item()",
    "settings": "settings(f, x)",
}

PROGRAM = """
import itertools, os, signal, sys, threading, time
import tilegrad as tg

numbers = itertools.count(2)
tg.set_threads(2)

@tg.jit
def f(v):
    return (v @ v).tanh().sum(0)

def settings(f, v):
    with tg.override(threads=1 + next(numbers) % 2):
        f(v).numpy()

x = tg.ones(96, 96)
expected = f(x).tolist()
(x * 2 + x).sum().item()
stop = threading.Event()

def live():
    while not stop.is_set():
        BUSY

threads = [threading.Thread(target=live, daemon=True) for _ in range(3)]
for thread in threads:
    thread.start()
children = []
for n in range(FORKS):
    time.sleep(0.011 * (n % 5))
    child = os.fork()
    if child == 0:
        signal.alarm(280)  # ends a child that hangs
        good = f(x).tolist() == expected and (x * 2 + x).sum().item() == 3 * 96 * 96
        fresh = tg.jit(lambda v: v * (n + 1.5))(tg.ones(3 + n)).tolist() == [n + 1.5] * (3 + n)
        tg.randn(3).numpy()
        os._exit(0 if good and fresh else 3)
    children.append(child)
stop.set()
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
for thread in threads:
    thread.join(280)
assert codes == [0] * FORKS, codes
"""


@pytest.mark.parametrize("busy", BUSY)
def test_a_child_of_a_busy_process(busy, tmp_path):
    program = textwrap.dedent(PROGRAM).replace("BUSY", BUSY[busy]).replace("FORKS", "6")
    environment = {**os.environ, "TILEGRAD_CACHE": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        timeout=600,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]

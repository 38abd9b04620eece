"""Bounds and profiles on a machine with a GPU: run by hand or by run_all.py, not by pytest.

    PYTHONPATH=src python tests/gpu/bound_checks.py [--only name]

Prints one row per check and ends with a status other than 0 if any failed. Results are held to
plain calls of the same jitted function on state of their own, bit for bit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import tilegrad as tg
from tilegrad.core.errors import StateError
from tilegrad.targets.ptx.driver import open_device

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

HOST_BAR = 50.0  # us of a run
WIDTH = 1024
Check = Callable[[Any], str]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    """Add a check."""
    CHECKS[function.__name__] = function
    return function


class State:
    """Rows, a count, and the last row, with memory of their own."""

    never_copied = ("rows",)

    def __init__(self) -> None:
        self.rows = (tg.tensor(np.zeros((64, WIDTH), np.float32), device="cuda") + 0).realize()
        self.count = (tg.tensor(np.zeros(4, np.int32), device="cuda") + 0).realize()
        self.last = (tg.tensor(np.zeros(WIDTH, np.float32), device="cuda") + 0).realize()

    def tensors(self) -> dict[str, tg.Tensor]:
        """For jit."""
        return {"rows": self.rows, "count": self.count, "last": self.last}


def step(state: State, x: Any, at: Any, n: Any) -> tuple[Any, Any]:
    """A row more, of what the rows before give."""
    value = x * 2 + state.rows.sum(0) * 0.001 + n
    state.rows[at] = value
    state.count.assign(state.count + 1)
    state.last.assign(value)
    return state.count * 3, value.sum()


def row_of(turn: int) -> np.ndarray[Any, Any]:
    """The input of a turn."""
    return np.sin(np.arange(WIDTH) * (turn + 1)).astype(np.float32)


def bound_step() -> tuple[Any, State, Any]:
    """The jitted step, fresh state, and both bound."""
    jitted, state = tg.jit(step), State()
    at = tg.tensor(np.array([0], np.int64), device="cuda")
    x = tg.tensor(row_of(0), device="cuda")
    return jitted, state, jitted.bind(state, x, at, 0.5)


@check
def runs_are_plain_calls(device: Any) -> str:
    """200 turns of writes and runs, nothing waited for, against plain calls."""
    jitted, state, made = bound_step()
    other, pending = State(), []
    for turn in range(200):
        made.write("x", row_of(turn))
        made.write("at", np.array([turn % 64]))
        made.write("n", turn / 8)
        made.run()
        pending.append((made.read_later(0), made.read_later(1)))
    for turn, (count, total) in enumerate(pending):
        x = tg.tensor(row_of(turn), device="cuda")
        at = tg.tensor(np.array([turn % 64]), device="cuda")
        wanted = jitted(other, x, at, turn / 8)
        assert np.array_equal(count.wait(), wanted[0].numpy()), turn
        assert np.array_equal(total.wait(), wanted[1].numpy()), turn
        del wanted
    for name, tensor in other.tensors().items():
        assert np.array_equal(state.tensors()[name].numpy(), tensor.numpy()), name
    return f"{made.launches} launches a run, copied: {', '.join(made.copied) or 'none'}"


@check
def plain_calls_in_between(device: Any) -> str:
    """State stays where it is, whoever runs."""
    jitted, state, made = bound_step()
    place = state.rows.buffer().pointer
    x, at = tg.tensor(row_of(0), device="cuda"), tg.tensor(np.array([1]), device="cuda")
    for turn in range(10):
        found = made.run() if turn % 2 else jitted(state, x, at, 0.5)
        assert found[0].numpy().tolist() == [3 * (turn + 1)] * 4
        del found
    assert state.rows.buffer().pointer == place
    late = state.count + 1
    made.run()
    try:
        late.numpy()
    except StateError:
        return "in place; an old expression is refused"
    raise AssertionError("an expression built before a run was read after it")


@check
def writes_overtake_nothing(device: Any) -> str:
    """More bytes of writes than the pinned memory holds, each one read back."""
    made = tg.jit(lambda x: x * 1).bind(tg.tensor(np.zeros(1 << 15, np.float32), device="cuda"))
    pending = []
    for turn in range(64):  # 8 MiB through a ring of 1 MiB
        made.write("x", np.full(1 << 15, turn, np.float32))
        made.run()
        pending.append(made.read_later())
    for turn, found in enumerate(pending):
        value = found.wait()
        assert value[0] == turn and value[-1] == turn and (value == turn).all(), turn
    return "64 writes of 128 KiB"


@check
def decoder(device: Any) -> str:
    """32 layers over a paged cache: the tokens of plain calls, and the host time of a run."""
    from bound import Setting, measure

    with tg.no_grad():
        found = measure(Setting("cuda:0", 2, 32))
    said = (
        f"{found['state_tensors']} Tensors of state, {found['launches']} launches, host"
        f" {found['run_us']:.1f} us a run, {found['waited_us']:.1f} us with its result, plain"
        f" call {found['plain_us']:.1f} us, write {found['write_us']:.1f} us, read_later"
        f" {found['read_later_us']:.1f} us"
    )
    assert found["run_us"] <= HOST_BAR, said
    return said


@check
def profile(device: Any) -> str:
    """Times of kernels are near what one knows, and a trace is written."""
    size = 64 << 20
    x = tg.tensor(np.zeros(size // 4, np.float32), device="cuda")
    y = tg.tensor(np.zeros((4096, 4096), np.float32), device="cuda").bfloat16().realize()
    made = tg.jit(lambda x, y: (x + 1, y @ y)).bind(x, y)
    made.run()
    found = made.profile(runs=9)
    add, product = (
        max(found.records, key=key)
        for key in (lambda r: r.bytes - 1e9 * ("dot" in r.region), lambda r: r.flops)
    )
    assert add.bytes == 2 * size, add
    rate, peak = add.bytes / add.us / 1e6, product.flops / product.us / 1e6
    said = (
        f"add {add.us:.1f} us = {rate:.2f} TB/s, product {product.us:.1f} us ="
        f" {peak:.0f} TFLOP/s; {found.us:.1f} us alone, {found.run_us:.1f} us in a run"
    )
    assert 1.0 < rate < 8.0 and 100 < peak < 1200, said
    assert 0.6 * found.run_us < found.us < 1.5 * found.run_us + 20, said
    with tempfile.TemporaryDirectory() as folder:
        assert found.save(Path(folder) / "trace.json").stat().st_size > 500
    return said


def main() -> int:
    """Run the checks; the number that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", default=[])
    options = parser.parse_args()
    device = open_device(0)
    chosen = {n: f for n, f in CHECKS.items() if not options.only or n in options.only}
    failed = 0
    for name, function in chosen.items():
        start = time.perf_counter()
        try:
            state, said = "ok", function(device)
            device.synchronize()
        except BaseException as error:
            failed += 1
            state, said = "FAIL", f"{type(error).__name__}: {error}"
            traceback.print_exc()
        seconds = time.perf_counter() - start
        print(f"{state:4s} {name:24s} {seconds:6.2f} s  {said}", flush=True)
    print(f"{len(chosen)} checks, {failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(min(1, main()))

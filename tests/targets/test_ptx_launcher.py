"""Recipes on a fake GPU: single launches, graphs, patches, dependent launches, control flow."""

from __future__ import annotations

import ctypes
import threading
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
from fake_cuda import FakeCuda, floats

from tilegrad.core.config import override
from tilegrad.core.errors import UserError
from tilegrad.ir.symbol import symbol
from tilegrad.runtime.buffer import Buffer
from tilegrad.runtime.executable import Executable
from tilegrad.runtime.recipe import Recipe, Step, Storage
from tilegrad.targets.ptx import context, cuda_api, driver
from tilegrad.targets.ptx.launcher import GRAPHS
from tilegrad.targets.ptx.program import Entry

N = 8
ROWS = symbol("rows", 1, 64)
DEPENDENT = "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"


def increment(a: int, b: int) -> None:
    floats(b, N)[:] = floats(a, N) + 1


def double(a: int, b: int) -> None:
    floats(b, N)[:] = floats(a, N) * 2


def less(a: int, flag: int) -> None:
    ctypes.c_uint8.from_address(flag).value = int(floats(a, N)[0] < 10)


def ones(out: int, rows: int) -> None:
    floats(out, rows)[:] = 1


@pytest.fixture
def cuda():
    kernels = {"increment": increment, "double": double, "less": less, "ones": ones}
    fake = FakeCuda(kernels, {name: [8, 8] for name in kernels})
    context._thread.__dict__.clear()
    with patch.object(cuda_api, "_api", fake):
        yield fake
    context._thread.__dict__.clear()


@pytest.fixture
def device(cuda):
    return driver.Device(0)


NAMES = ("increment", "double", "less", "ones")


def recipe(steps, slots, inputs, outputs, arena=0, dependent=False) -> Recipe:
    pair = (("pointer", 0), ("pointer", 1))
    entries = [Entry(n, pair, (4,), 128, dependent=dependent) for n in NAMES[:3]]
    entries.append(Entry("ones", (("pointer", 0), ("symbol", "rows")), (ROWS,), 32))
    made = Recipe(
        [(n, "code") for n in NAMES],
        slots,
        steps,
        inputs,
        outputs,
        arena,
        0,
        False,
        entries=[e.to_text() for e in entries],
    )
    return Recipe.from_text(made.to_text())


def kernel(number: int, *slots: int) -> Step:
    return Step("kernel", number, list(slots), 4)


def storage(kind: str, offset: int = 0, alias: int = -1, bytes=4 * N) -> Storage:
    return Storage(kind, bytes, offset, alias)


def make(device, steps, slots, inputs, outputs, **options) -> Executable:
    made = recipe(steps, slots, inputs, outputs, **options)
    return Executable(made, {"code": device.keep("code", b"ptx")}, device)


def values(device, buffer) -> list[float]:
    return device.download(buffer, (N,), np.float32).tolist()


def given(device, start=0.0) -> Buffer:
    return device.upload(np.full(N, start, np.float32))


def chain(device, dependent=False, count=3) -> Executable:
    """count increments through scratch, then an output."""
    slots = [storage("input"), storage("output"), storage("scratch"), storage("scratch", 64)]
    places = [0, *[2 + i % 2 for i in range(count - 1)], 1]
    steps = [kernel(0, a, b) for a, b in pairwise(places)]
    return make(device, steps, slots, [0], [1], arena=128, dependent=dependent)


def test_one_kernel_is_launched_directly(device, cuda) -> None:
    run = make(device, [kernel(1, 0, 1)], [storage("input"), storage("output")], [0], [1])
    for start in (1.0, 3.0):
        (out,) = run.run([given(device, start)])
        assert values(device, out) == [2 * start] * N
    assert cuda.count("cuLaunchKernelEx") == 2 and cuda.count("cuGraphLaunch") == 0


def test_a_sequence_becomes_a_graph_that_is_replayed(device, cuda) -> None:
    run, x = chain(device), given(device)
    for _ in range(5):
        (out,) = run.run([x])
        assert values(device, out) == [3.0] * N and out.device == "cuda:0"
        del out  # its address comes back
    assert cuda.count("cuGraphInstantiate") == 1 and cuda.count("cuGraphLaunch") == 5
    assert cuda.count("cuLaunchKernelEx") == 3 and cuda.count("cuMemAlloc") == 3


def test_other_addresses_get_other_graphs_then_patches(device, cuda) -> None:
    run, x = chain(device), given(device)
    kept = [run.run([x])[0] for _ in range(GRAPHS + 3)]
    assert cuda.count("cuGraphInstantiate") == GRAPHS
    assert cuda.count("cuGraphExecKernelNodeSetParams") == 3  # the last kernel alone, each time
    assert all(values(device, b) == [3.0] * N for b in kept)
    kept = [run.run([given(device, float(i))])[0] for i in range(6)]
    assert [values(device, b)[0] for b in kept] == [3.0 + i for i in range(6)]
    assert cuda.count("cuGraphInstantiate") == GRAPHS


@pytest.mark.parametrize("dependent", [False, True])
def test_dependent_entries_follow_kernels_programmatically(device, cuda, dependent) -> None:
    run = chain(device, dependent)
    run.run([given(device)])
    (graph,) = {c[1][0] for c in cuda.calls if c[0] == "cuGraphLaunch"}
    edges = [DEPENDENT in node[3] for node in cuda.graphs[graph]]
    assert edges == [False, dependent, dependent]  # the first waits for all before the graph


def test_a_copy_breaks_the_chain_of_dependent_launches(device, cuda) -> None:
    slots = [storage("input"), storage("output"), storage("scratch")]
    steps = [kernel(0, 0, 2), Step("copy", -1, [1, 2], 4 * N), kernel(0, 2, 1)]
    run = make(device, steps, slots, [0], [1], arena=64, dependent=True)
    (out,) = run.run([given(device)])
    assert values(device, out) == [2.0] * N
    graph = next(c[1][0] for c in cuda.calls if c[0] == "cuGraphLaunch")
    assert [n[0] for n in cuda.graphs[graph]] == ["kernel", "copy", "kernel"]
    assert DEPENDENT not in cuda.graphs[graph][2][3]
    kept = [run.run([given(device)])[0] for _ in range(GRAPHS + 2)]  # a moved copy: rebuilt
    assert all(values(device, b) == [2.0] * N for b in kept)


def test_a_counted_loop_is_unrolled_into_the_graph(device, cuda) -> None:
    slots = [storage("input"), storage("output"), storage("scratch"), storage("scratch", 64)]
    steps = [
        Step("copy", -1, [2, 0], 4 * N),
        Step("set_counter", numbers=[0, 0]),
        kernel(0, 2, 3),
        Step("swap_slots", -1, [2, 3]),
        Step("add_counter", numbers=[0, 1]),
        Step("jump_counter_less", numbers=[0, 5, 2]),
        Step("copy", -1, [1, 2], 4 * N),
    ]
    run = make(device, steps, slots, [0], [1], arena=128)
    (out,) = run.run([given(device)])
    assert values(device, out) == [5.0] * N
    assert cuda.count("cuLaunchKernelEx") == 5 and cuda.count("cuGraphLaunch") == 1


def test_views_move_with_a_counter(device) -> None:
    slots = [
        storage("input", bytes=4 * N * 3),
        storage("output", bytes=4 * N * 3),
        storage("view", alias=0),
        storage("view", alias=1),
    ]
    steps = [
        Step("set_counter", numbers=[0, 0]),
        Step("set_slot", -1, [2, 0], numbers=[0, 4 * N, 0]),
        Step("set_slot", -1, [3, 1], numbers=[0, -4 * N, 8 * N]),
        kernel(1, 2, 3),
        Step("add_counter", numbers=[0, 1]),
        Step("jump_counter_less", numbers=[0, 3, 1]),
    ]
    run = make(device, steps, slots, [0], [1])
    rows = np.arange(3 * N, dtype=np.float32).reshape(3, N)
    (out,) = run.run([device.upload(rows)])
    assert np.array_equal(device.download(out, (3, N), np.float32), 2 * rows[::-1])


def while_loop(device) -> Executable:
    slots = [
        storage("input"),
        storage("output"),
        storage("scratch"),
        storage("scratch", 64),
        storage("scratch", 128, bytes=1),
    ]
    steps = [
        Step("copy", -1, [2, 0], 4 * N),
        kernel(2, 2, 4),
        Step("jump_unless", -1, [4], numbers=[6]),
        kernel(0, 2, 3),
        Step("swap_slots", -1, [2, 3]),
        Step("jump", numbers=[1]),
        Step("copy", -1, [1, 2], 4 * N),
    ]
    return make(device, steps, slots, [0], [1], arena=192)


def test_a_loop_that_depends_on_data_is_taken_by_the_host(device, cuda) -> None:
    run = while_loop(device)
    for start, end in ((3.0, 10.0), (12.5, 12.5)):
        (out,) = run.run([given(device, start)])
        assert values(device, out) == [end] * N
    assert cuda.count("cuStreamBeginCapture") == 0


def test_symbols_bind_launches_and_sizes(device, cuda) -> None:
    slots = [storage("output", bytes=ROWS * 4)]
    run = make(device, [Step("kernel", 3, [0], ROWS)], slots, [], [0])
    for rows in (5, 9, 5):
        (out,) = run.run([], {"rows": rows})
        assert out.bytes == 4 * rows
        assert device.download(out, (rows,), np.float32).tolist() == [1.0] * rows
    assert len(run.bindings) == 2


def test_outputs_that_alias_inputs_and_values_of_the_host(device, cuda) -> None:
    slots = [storage("input"), storage("view", alias=0)]
    run = make(device, [kernel(0, 0, 1)], slots, [0], [1])
    x = given(device, 5.0)
    (out,) = run.run([x])
    assert out.pointer == x.pointer and values(device, x) == [6.0] * N
    (out,) = run.run([Buffer.wrap(np.full(N, 7, np.float32))])  # came along from the host
    assert values(device, out) == [8.0] * N and out.device == "cuda:0"
    with pytest.raises(UserError, match="another device"):
        run.run([Buffer(0, 4 * N, None, "cuda:1")])


def test_synchronous_mode_runs_no_graph(device, cuda) -> None:
    run = chain(device)
    with override(cuda_sync=True):
        (out,) = run.run([given(device)])
    assert values(device, out) == [3.0] * N and cuda.count("cuGraphLaunch") == 0


def test_a_failed_capture_is_ended(device, cuda) -> None:
    run = chain(device)
    cuda.failing["cuLaunchKernelEx"] = 1
    with pytest.raises(Exception, match="kernel increment"):
        run.run([given(device)])
    assert cuda.capturing is None
    (out,) = run.run([given(device)])
    assert values(device, out) == [3.0] * N


def test_threads_share_an_executable(device) -> None:
    run, wrong = chain(device), []

    def work(start: float) -> None:
        for _ in range(20):
            (out,) = run.run([given(device, start)])
            if values(device, out) != [start + 3] * N:
                wrong.append(start)

    threads = [threading.Thread(target=work, args=(float(i),)) for i in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong


def test_kernels_get_aligned_pointers(device, cuda) -> None:
    seen = []
    cuda.kernels["double"] = lambda a, b: (seen.append((a, b)), double(a, b))
    slots = [
        storage("input", bytes=4 * 27),
        storage("output", bytes=4 * 27),
        storage("view", alias=0),
        storage("view", alias=1),
    ]
    steps = [
        Step("set_counter", numbers=[0, 0]),
        Step("set_slot", -1, [2, 0], numbers=[0, 36, 0]),
        Step("set_slot", -1, [3, 1], numbers=[0, 36, 0]),
        kernel(1, 2, 3),
        Step("add_counter", numbers=[0, 1]),
        Step("jump_counter_less", numbers=[0, 3, 1]),
    ]
    run = make(device, steps, slots, [0], [1])
    rows = np.arange(27, dtype=np.float32).reshape(3, 9)
    (out,) = run.run([device.upload(rows)])
    found = device.download(out, (3, 9), np.float32)
    assert np.array_equal(found[:, :N], 2 * rows[:, :N])
    assert len(seen) == 3 and not any(p % 16 for pair in seen for p in pair)
    odd = device.upload(np.arange(N + 1, dtype=np.float32)).part(4, 4 * N)
    single = make(device, [kernel(1, 0, 1)], [storage("input"), storage("output")], [0], [1])
    (out,) = single.run([odd])
    assert values(device, out) == [2.0 * i for i in range(1, N + 1)]
    assert not any(p % 16 for pair in seen for p in pair)

"""Bounds on a GPU, with a fake driver that does nothing before it has to.

Work on the stream (copies, launches, graphs) waits until somebody synchronises, so a test sees
whatever uses pinned memory again too early or reads results too soon.
"""

from __future__ import annotations

import ctypes
import gc
from unittest.mock import patch

import numpy as np
import pytest
from fake_cuda import FakeCuda
from test_bound import WIDTH, Counters, step
from test_cuda import Interpreted, forget

import tilegrad as tg
from tilegrad.compiler import compile as compiler
from tilegrad.compiler import lift
from tilegrad.core.config import override
from tilegrad.core.errors import StateError, UserError
from tilegrad.core.target import H200
from tilegrad.ir.symbol import symbol
from tilegrad.nn import PagedCache
from tilegrad.runtime.language import LANGUAGES
from tilegrad.targets.ptx import context, cuda_api, driver
from tilegrad.targets.ptx.context import Ring
from tilegrad.tensor import placement


class LateCuda(FakeCuda):
    """A driver whose stream runs when it is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list = []

    def later(self, work) -> None:
        self.waiting.append(work)

    def run_until(self, event: int | None = None) -> None:
        """Do what waits, to the end or to the last record of an event."""
        marks = [i for i, work in enumerate(self.waiting) if work == event]
        count = len(self.waiting) if event is None else (marks[-1] + 1 if marks else 0)
        work, self.waiting = self.waiting[:count], self.waiting[count:]
        for one in work:
            if callable(one):
                one()

    def is_pinned(self, address: int) -> bool:
        places = [(ctypes.addressof(m), len(m)) for m in self.__dict__.get("pinned", [])]
        return any(start <= address < start + size for start, size in places)

    def do_cuStreamSynchronize(self, stream) -> None:
        self.run_until()

    def do_cuEventSynchronize(self, event) -> None:
        self.run_until(event)

    def do_cuEventRecord(self, event, stream) -> None:
        self.later(event)

    def do_cuMemcpyHtoDAsync(self, target, source, bytes, stream) -> None:
        if self.is_pinned(source):
            self.later(lambda: ctypes.memmove(target, source, bytes))
        else:  # the driver takes these at once
            data = ctypes.string_at(source, bytes)
            self.later(lambda: ctypes.memmove(target, data, bytes))

    def do_cuMemcpyDtoHAsync(self, target, source, bytes, stream) -> None:
        self.later(lambda: ctypes.memmove(target, source, bytes))

    def do_cuMemcpyDtoDAsync(self, target, source, bytes, stream) -> None:
        if self.capturing is not None:
            super().do_cuMemcpyDtoDAsync(target, source, bytes, stream)
        else:
            self.later(lambda: ctypes.memmove(target, source, bytes))

    def do_cuMemsetD8Async(self, target, byte, bytes, stream) -> None:
        self.later(lambda: ctypes.memset(target, byte, bytes))

    def run(self, name, values) -> None:
        self.later(lambda: self.kernels[name](*values))

    def do_cuGraphLaunch(self, graph, stream) -> None:
        for node in [list(n) for n in self.graphs[graph]]:
            if node[0] == "kernel":
                self.run(node[1], node[2])
            elif node[0] == "copy":
                self.later(lambda n=node: ctypes.memmove(n[1], n[2], n[3]))
            else:
                self.later(node[1])


@pytest.fixture
def cuda(monkeypatch, quick_collect):
    fake = LateCuda()
    forget()
    monkeypatch.setattr(driver, "_devices", {})
    monkeypatch.setattr(context, "_thread", type(context._thread)())
    monkeypatch.setattr(lift, "_variants", {})
    for name in ("_memory", "_bodies"):
        monkeypatch.setattr(compiler, name, {})
    monkeypatch.setattr(driver.Device, "target", H200)
    language = LANGUAGES.replaced("ptx", Interpreted(fake).language())
    with patch.object(cuda_api, "_api", fake), override(cache_folder=""), language:
        yield fake
        gc.collect()
        forget()
    placement.state.active = False


def fresh(array: np.ndarray) -> tg.Tensor:
    return tg.tensor(array, device="cuda").clone().realize()


class There(Counters):
    """The same state on the GPU."""

    def __init__(self) -> None:
        self.rows = fresh(np.zeros((4, WIDTH), np.float32))
        self.count = fresh(np.zeros(WIDTH, np.int32))
        self.last = fresh(np.zeros(3, np.float32))


def bound():
    state, jitted = There(), tg.jit(step)
    x = fresh(np.ones(WIDTH, np.float32))
    return jitted, state, x, jitted.bind(state, x, 3)


def test_a_run_is_one_graph_and_waits_for_nothing(cuda) -> None:
    _, state, _, made = bound()
    cuda.calls.clear()
    for _ in range(5):
        made.run()
    assert cuda.names() == ["cuGraphLaunch"] * 5
    assert made.outputs.numpy().tolist() == [13] * WIDTH
    assert state.count.numpy().tolist() == [5] * WIDTH
    assert state.rows.numpy()[1].tolist() == [1.0] * WIDTH and made.launches >= 2


def test_writes_and_reads_are_in_order_though_nobody_waits(cuda) -> None:
    _, state, _, made = bound()
    pending = []
    cuda.calls.clear()
    for turn in range(40):
        made.write("n", 100 * turn)
        made.write("x", np.full(WIDTH, turn, np.float32))
        made.run()
        pending.append((made.read_later(), made.read_later("state.rows")))
    assert not {"cuStreamSynchronize", "cuEventSynchronize"} & set(cuda.names())
    for turn, (found, rows) in enumerate(pending):
        assert found.wait().tolist() == [2 * (turn + 1) + 100 * turn] * WIDTH
        assert rows.wait()[1].tolist() == [float(turn)] * WIDTH
    assert made.read("state.count").tolist() == [40] * WIDTH
    assert state.count.numpy().tolist() == [40] * WIDTH


def test_places_of_reads_are_used_again(cuda) -> None:
    _, _, _, made = bound()
    for turn in range(30):
        made.run()
        made.read_later()  # nobody waits for this one
        assert made.read_later().wait()[0] == 2 * turn + 5
    assert cuda.count("cuMemHostAlloc") <= 5


def test_the_ring_waits_before_it_writes_where_a_copy_reads(cuda, monkeypatch) -> None:
    monkeypatch.setattr(context, "PART", 256)
    monkeypatch.setattr(context, "PARTS", 2)
    device = driver.open_device(0)
    ring, target = Ring(device), device.allocate(64 * 64)
    for turn in range(64):
        row = np.full(16, turn, np.int32)
        ring.write(target.pointer + 64 * turn, row.ctypes.data, row.nbytes)
    big = device.upload(np.zeros(1024, np.uint8))
    numbers = np.arange(1024, dtype=np.uint8)
    ring.write(big.pointer, numbers.ctypes.data, 1024)  # larger than a part
    found = device.download(target, (64, 16), np.int32)
    assert np.array_equal(found, np.repeat(np.arange(64), 16).reshape(64, 16))
    assert np.array_equal(device.download(big), np.arange(1024, dtype=np.uint8))
    assert cuda.count("cuEventSynchronize") >= 14


def test_plain_calls_and_writes_to_state(cuda) -> None:
    jitted, state, x, made = bound()
    place = state.rows.buffer().pointer
    for turn in range(6):
        found = made.run() if turn % 2 else jitted(state, x, 3)
        assert found.numpy().tolist() == [2 * turn + 5] * WIDTH
        del found
    made.write("state.count", 70, row=2)
    assert jitted(state, x, 0).numpy()[:4].tolist() == [14, 14, 142, 14]
    assert state.rows.buffer().pointer == place


def test_old_expressions_and_assigned_state(cuda) -> None:
    _, state, _, made = bound()
    made.run()
    late = state.count + 1
    graphs = cuda.count("cuGraphInstantiate")
    made.run()
    with pytest.raises(StateError, match="test_bound_cuda"):
        late.numpy()
    assert cuda.count("cuGraphInstantiate") == graphs
    state.count.assign(np.full(WIDTH, 50, np.int32))
    assert made.run().numpy()[0] == 105 and state.count.numpy()[0] == 51


def test_values_of_the_host_come_along(cuda) -> None:
    scale = tg.tensor(3.0)  # without axes: it adapts
    x = fresh(np.ones(WIDTH, np.float32))
    made = tg.jit(lambda x, s: x * s).bind(x, scale)
    assert made.run().numpy()[0] == 3.0
    made.write("s", 4.0)
    assert made.run().numpy()[0] == 4.0 and scale.item() == 3.0


def test_state_of_the_host_moves_once(cuda) -> None:
    class Scale:
        def __init__(self) -> None:
            self.scale = tg.tensor(3.0)

        def tensors(self):
            return {"scale": self.scale}

    def grow(state, x):
        state.scale.assign(state.scale + 1)
        return x * state.scale

    state, x = Scale(), fresh(np.ones(WIDTH, np.float32))
    made = tg.jit(grow).bind(state, x)
    place = state.scale.buffer().pointer
    assert state.scale.buffer().device == "cuda:0"
    for turn in range(3):
        assert made.run().numpy()[0] == 4.0 + turn
    assert state.scale.item() == 6.0 and state.scale.buffer().pointer == place


def test_an_odd_address_is_copied(cuda) -> None:
    device = driver.open_device(0)
    memory = device.upload(np.arange(12, dtype=np.float32))
    x = tg.tensor(np.zeros(8, np.float32), device="cuda")
    placement.values[x.node] = memory.part(4, 32)
    made = tg.jit(lambda x: x + 1).bind(x)
    assert made.run().numpy().tolist() == list(range(2, 10))


def test_what_the_gpu_decides_cannot_be_bound(cuda) -> None:
    @tg.jit
    def halve(x):
        return tg.while_loop(lambda x: x.sum() > 1, lambda x: x / 2, x)

    with pytest.raises(UserError, match="decides the course"):
        halve.bind(fresh(np.ones(WIDTH, np.float32)))


def test_waiting_after_each_launch(cuda) -> None:
    with override(cuda_sync=True):
        _, state, _, made = bound()
        made.run()
        assert cuda.count("cuGraphLaunch") == 0 and state.count.numpy()[0] == 1


def test_a_profile_is_a_graph_with_events(cuda) -> None:
    _, state, _, made = bound()
    made.run()
    found = made.profile(runs=2)
    assert len(found.records) == made.launches and found.device == "cuda:0"
    assert found.records[-1].name == "copy" and found.run_us > 0 and "events" in found.how
    assert all(r.name in cuda.kernels and r.region and r.bytes for r in found.records[:-1])
    assert state.count.numpy().tolist() == [1] * WIDTH  # put back
    assert made.run().numpy().tolist() == [7] * WIDTH


def test_two_bounds_on_one_cache(cuda) -> None:
    def append(cache, k, table, lengths, starts):
        cache.append(0, k, k, k, table, lengths, starts)
        return lengths * 1

    cache = PagedCache(1, 4, 64, 1, 64, requests=2, most_pages=2, dtype=tg.bfloat16, device="cuda")
    jitted = tg.jit(
        append,
        dynamic={
            "k": {0: ("T", 1, 4)},
            "table": {0: ("R", 1, 2)},
            "lengths": {0: ("R", 1, 2)},
            "starts": {0: symbol("R", 1, 2) + 1},
        },
    )

    def arguments(requests: int):
        k = np.arange(requests * 64).reshape(requests, 1, 64) + 1
        table = np.arange(2 * requests, dtype=np.int32).reshape(requests, 2)
        numbers = (table, np.ones(requests, np.int32), np.arange(requests + 1, dtype=np.int32))
        return [
            tg.tensor(k.astype(np.float32), device="cuda").bfloat16(),
            *(tg.tensor(n, device="cuda") for n in numbers),
        ]

    one, two = (jitted.bind(cache, *arguments(n)) for n in (1, 2))
    place = cache.keys[0].buffer().pointer
    for made, length in ((two, 1), (one, 2), (two, 3), (one, 4)):
        made.write("lengths", np.full(1 if made is one else 2, length, np.int32))
        made.run()
    jitted(cache, *arguments(2))
    keys = cache.keys[0].float().numpy()
    assert cache.keys[0].buffer().pointer == place and jitted.traces == 1
    assert [float(keys[0, 0, j, 0]) for j in range(5)] == [1, 1, 1, 1, 0]
    assert [float(keys[2, 0, j, 0]) for j in range(5)] == [65, 0, 65, 0, 0]

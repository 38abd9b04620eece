"""Devices: the registry, what a machine from outside must say, and how long code is kept."""

from __future__ import annotations

import gc
import json
from unittest.mock import patch

import numpy as np
import pytest
from fake_cuda import FakeCuda
from toy_device import ToyDevice, install

import tilegrad as tg
from tilegrad.core.config import override
from tilegrad.core.errors import AxisError, InternalError, UserError
from tilegrad.runtime.buffer import Buffer
from tilegrad.runtime.device import KINDS, Device, device, device_name
from tilegrad.runtime.registry import Registry, named_somewhere
from tilegrad.targets.ptx import context, cuda_api, driver
from tilegrad.tensor import placement


@pytest.fixture
def toy():
    kinds, languages = install()
    with kinds, languages, override(cache_folder=""):
        yield device("toy:0")
    for node, buffer in list(placement.values.items()):
        if buffer.device.startswith("toy"):
            del placement.values[node]
    placement.state.active = False


# ---- the registry ---------------------------------------------------------------------------


def test_names() -> None:
    assert device_name("cpu") == device_name("cpu:0") == "cpu"
    assert device_name("cuda") == "cuda:0" and device_name("cuda:3") == "cuda:3"
    with pytest.raises(UserError, match="no such device"):
        device_name("nothing:1")
    assert KINDS.get("cpu").count() == 1 and device("cpu") is device("cpu")


def test_packages_add_entries_by_entry_points(monkeypatch, tmp_path) -> None:
    folder = tmp_path / "toys-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 1.0\n")
    assert not named_somewhere("tilegrad.toys")
    named = "[tilegrad.toys]\ntoy = toy_device:ToyKind\nours = toy_device:BASE\n"
    (folder / "entry_points.txt").write_text(named)
    monkeypatch.syspath_prepend(tmp_path)
    assert named_somewhere("tilegrad.toys")
    found: Registry = Registry("device", "tilegrad.toys", {"ours": "json:loads"})
    assert found.get("ours") is json.loads  # ours come first
    assert found.get("toy").__name__ == "ToyKind" and found.names() == ["ours", "toy"]
    with pytest.raises(UserError, match="ours, toy"):
        found.get("another")
    found.register("bad", "json:nothing")
    with pytest.raises(InternalError, match="json has no nothing"):
        found.get("bad")
    assert not Registry("device", "tilegrad.nothing_of_the_kind", {}).names()


def test_an_entry_is_put_back() -> None:
    found: Registry = Registry("thing", "tilegrad.things", {"a": "json:loads"})
    before = found.get("a")
    with found.replaced("a", 3), found.replaced("b", 4):
        assert found.get("a") == 3 and found.get("b") == 4
    assert found.get("a") is before and not found.has("b")


def test_a_device_names_what_it_lacks() -> None:
    bare = Device("bare:0")
    for ask in (lambda: bare.allocate(8), lambda: bare.target, lambda: bare.put(0, 0, 1)):
        with pytest.raises(InternalError, match="Device has no"):
            ask()


# ---- a machine from outside -----------------------------------------------------------------


def test_memory_of_another_machine(toy: ToyDevice) -> None:
    values = np.arange(12, dtype=np.float32)
    there = toy.upload(values, "mine")
    assert there.device == "toy:0" and toy.download(there, (3, 4), np.float32)[2, 3] == 11
    again = toy.copy(there)
    assert again.pointer != there.pointer
    other = device("toy:1").receive(again)  # through the host
    assert other.device == "toy:1" and other.pointer in device("toy:1").memory
    assert device("toy:1").download(other, (12,), np.float32).tolist() == values.tolist()
    assert toy.fitting(there) is there
    odd = Buffer(there.pointer + 4, 40, there.owner, "toy:0")
    moved = toy.fitting(odd)
    assert moved.pointer % 16 == 0 and toy.download(moved, (10,), np.float32)[0] == 1
    with pytest.raises(UserError, match="another device"):
        toy.fitting(other)
    landing = toy.land(there.pointer + 8, 8)
    toy.post(there.pointer + 8, np.zeros(2, np.float32))
    assert landing.wait().view(np.float32).tolist() == [2.0, 3.0]
    assert toy.download(there, (12,), np.float32)[3] == 0
    start = toy.event().record()
    assert toy.event().record().seconds_since(start) >= 0


def test_tensors_live_on_it(toy: ToyDevice) -> None:
    data = np.random.default_rng(0).standard_normal((6, 7)).astype(np.float32)
    x = tg.tensor(data, device="toy")
    assert x.device == "toy:0"
    y = (x * 2 + 1).sum(1)
    assert np.allclose(y.numpy(), (data * 2 + 1).sum(1), rtol=1e-5) and toy.launches
    assert np.allclose((x @ x.T).softmax(-1).numpy().sum(), 6, rtol=1e-5)
    z = x.to("cpu")
    assert z.device == "cpu" and np.array_equal(z.numpy(), data)
    with pytest.raises(UserError, match="different devices"):
        (x + tg.tensor(data)).numpy()


def test_loops_and_symbols_run_step_by_step(toy: ToyDevice) -> None:
    @tg.jit
    def doubled(x):
        return tg.while_loop(lambda c: c.sum() < 100, lambda c: c * 2, x)

    assert doubled(tg.tensor([1.0, 2.0], device="toy")).tolist() == [64.0, 128.0]

    @tg.jit
    def carried(x):
        return tg.scan(lambda c, row: (c + row, c * row), tg.zeros(3), x)[0]

    rows = np.arange(60, dtype=np.float32).reshape(20, 3)
    assert np.allclose(carried(tg.tensor(rows, device="toy")).numpy(), rows.sum(0))


def test_bound_functions_on_it(toy: ToyDevice) -> None:
    class Total:
        def __init__(self) -> None:
            self.sum = tg.tensor(np.zeros(4, np.float32), device="toy").clone().realize()

        def tensors(self) -> dict[str, tg.Tensor]:
            return {"sum": self.sum}

    def step(total: Total, x):
        total.sum.assign(total.sum + x)
        return total.sum * 2

    total, x = Total(), tg.tensor(np.ones(4, np.float32), device="toy")
    bound = tg.jit(step).bind(total, x)
    for turn in range(1, 4):
        assert bound.run().tolist() == [2.0 * turn] * 4
    bound.write(1, np.full(4, 10, np.float32))
    assert bound.run().tolist() == [26.0] * 4 and total.sum.tolist() == [13.0] * 4
    shown = bound.profile(2)
    assert shown.device == "toy:0" and shown.records


def test_a_fault_shows_at_the_next_read(toy: ToyDevice) -> None:
    x = tg.tensor(np.arange(8, dtype=np.float32), device="toy")
    at = tg.tensor(np.array([1, 9]), device="toy")
    with pytest.raises(AxisError):
        x[at].numpy()


# ---- how long code is kept ------------------------------------------------------------------


@pytest.mark.usefixtures("quick_collect")
def test_machine_code_that_nobody_uses_is_unloaded() -> None:
    fake = FakeCuda()
    context._thread.__dict__.clear()
    with patch.object(cuda_api, "_api", fake), override(keep=2):
        gpu = driver.Device(0)
        held = gpu.load(b"\x7fELF first").function("f")
        for number in range(40):
            gpu.load(b"\x7fELF" + bytes([number]))
        gc.collect()
        assert len(gpu.modules) == 2 * driver.MODULES
        assert fake.count("cuModuleLoadData") == 41
        unloaded = [a[0] for n, a in fake.calls if n == "cuModuleUnload"]
        assert len(unloaded) == 41 - 2 * driver.MODULES - 2  # the last one waits; one is held
        assert held.module.handle not in unloaded
    context._thread.__dict__.clear()


def test_gpus_copy_from_each_other() -> None:
    fake = FakeCuda()
    context._thread.__dict__.clear()
    with patch.object(cuda_api, "_api", fake):
        first, second = driver.Device(0), driver.Device(0)
        second.name = "cuda:1"
        x = first.upload(np.arange(6, dtype=np.int32))
        y = second.allocate(x.bytes)
        before = fake.count("cuMemcpyDtoHAsync")
        second.copy_across(y.pointer, x.pointer, x.bytes, first)
        assert fake.count("cuMemcpyPeerAsync") == 1 and fake.count("cuStreamWaitEvent") == 2
        assert fake.count("cuMemcpyDtoHAsync") == before
        assert second.download(y, (6,), np.int32).tolist() == list(range(6))
    context._thread.__dict__.clear()

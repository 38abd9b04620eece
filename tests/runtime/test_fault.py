"""Faults: a condition that does not hold ends in an error with its line, on every machine."""

from __future__ import annotations

import inspect
import sys
import threading
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

import tilegrad as tg
from tilegrad import kernel, tile
from tilegrad.compiler import compile as compiling
from tilegrad.core.errors import AxisError, Site
from tilegrad.runtime.executable import Executable
from tilegrad.runtime.fault import WORD_BYTES, Faults
from tilegrad.runtime.recipe import Recipe, Step, Storage
from tilegrad.targets.ptx import context, cuda_api, driver
from tilegrad.targets.ptx.program import Entry

sys.path.insert(0, str(Path(__file__).parent.parent / "targets"))
from fake_cuda import FakeCuda, floats
from test_ptx_golden import required

N = 8


@kernel
def pick(x, at, *, block: int = 16):
    (n,), (m,) = x.shape, at.shape
    i = tile.grid(tile.ceil_divide(m, block))
    out = tile.result((m,), x.dtype)
    where = tile.load(at, (i * block,), (block,))
    inside = (where >= 0) & (where < n)
    tile.require(inside, "no such element")
    out[i * block : (i + 1) * block] = tile.load(x, where, mask=inside)


LINE = inspect.getsourcelines(pick.definition.function)[1] + 7


def indices(*numbers: int) -> tg.Tensor:
    return tg.tensor(np.array(numbers, np.int64))


def check_error(error: Exception) -> None:
    assert "no such element" in str(error) and f"{Path(__file__).name}:{LINE}" in str(error)


@pytest.mark.parametrize("block", [1, 16, 4096])  # a scalar, a vector, a tile by pieces
@pytest.mark.parametrize("bad", [-1, 100, 1 << 40])
def test_a_condition_ends_the_run(block: int, bad: int) -> None:
    x = tg.arange(100.0)
    assert pick(x, indices(1, 99, 0), block=block).tolist() == [1.0, 99.0, 0.0]
    for at in (indices(bad), indices(*[3] * 40, bad), indices(bad, *[3] * 40)):
        with pytest.raises(AxisError) as caught:
            pick(x, at, block=block).tolist()
        check_error(caught.value)
        with pytest.raises(AxisError) as caught:
            pick.interpret(x, at, block=block)
        check_error(caught.value)
    assert pick(x, indices(1, 99, 0), block=block).tolist() == [1.0, 99.0, 0.0]


def test_jitted_bound_and_in_a_loop() -> None:
    x, at = tg.arange(100.0), indices(4, 5)
    jitted = tg.jit(lambda x, at: pick(x * 2, at) + 1)
    bound = jitted.bind(x, at)
    mapped = tg.jit(lambda x, at: tg.vmap(pick, in_axes=(None, 0))(x, at))
    for _ in range(2):
        assert jitted(x, at).tolist() == bound.run().tolist() == [9.0, 11.0]
        assert mapped(x, tg.stack([at, at + 1])).tolist() == [[4.0, 5.0], [5.0, 6.0]]
        with pytest.raises(AxisError) as caught:
            jitted(x, at + 96)
        check_error(caught.value)
        bound.write(1, np.array([100, 1]))
        with pytest.raises(AxisError) as caught:
            bound.run()
        check_error(caught.value)
        bound.write(1, np.array([4, 5]))
        with pytest.raises(AxisError):
            mapped(x, tg.stack([at, at + 95]))


def test_a_loop_that_would_not_end_does() -> None:
    def until(x, at):
        return tg.while_loop(
            lambda c: c[0].sum() < 3, lambda c: (pick(x, c[1]), c[1]), (tg.zeros(1), at)
        )[0]

    jitted = tg.jit(until)
    assert jitted(tg.arange(100.0), indices(7)).tolist() == [7.0]
    with pytest.raises(AxisError) as caught:
        jitted(tg.arange(100.0), indices(100))  # masked off it reads as 0, for ever
    check_error(caught.value)


def test_threads_get_their_own_faults() -> None:
    jitted, x = tg.jit(lambda x, at: pick(x, at)), tg.arange(100.0)
    jitted(x, indices(1))
    wrong: list[str] = []

    def work(number: int) -> None:
        good, bad = indices(number), indices(100 + number)
        for turn in range(50):
            faulty = (turn + number) % 3 == 0
            try:
                found = jitted(x, bad if faulty else good).tolist()
            except AxisError:
                found = None
            if found != (None if faulty else [float(number)]):
                wrong.append(f"{number} {turn} {found}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_sites_are_data_of_the_recipe_and_come_from_the_store() -> None:
    x = tg.arange(100.0)
    lowered = tg.jit(lambda x, at: pick(x, at)).lower(x, indices(1))
    recipe = lowered.compiled().recipe
    again = Recipe.from_text(recipe.to_text())
    assert again == recipe and again.slots[-1].kind == "fault"
    assert next(s for sites in again.sites for s in sites).location.endswith(f":{LINE}")
    compiling._memory.clear()  # as a new process would find it
    before = compiling.counters["loaded"]
    with pytest.raises(AxisError) as caught:
        tg.jit(lambda x, at: pick(x, at))(x, indices(100))
    check_error(caught.value)
    assert compiling.counters["loaded"] > before
    plain = tg.jit(lambda x: x * 2).lower(x).compiled()
    assert plain.launcher.faults is None and not plain.recipe.sites


# ---- GPUs -------------------------------------------------------------------------------------


def test_ptx_leaves_the_number_of_the_site() -> None:
    from simulated import check_body, launch

    body = required()
    x, at = np.arange(100, dtype=np.float32), np.arange(256) % 100
    check_body(body, x, at, np.zeros(256, np.float32))
    for place, bad in ((0, -1), (255, 100), (130, 1 << 40)):
        wrong = at.copy()
        wrong[place] = bad
        with pytest.raises(AxisError, match=r"an index is out of bounds\n  at kernel.py:7"):
            launch(body, [x, wrong, np.zeros(256, np.float32)], {})


def guarded(a: int, b: int, fault: int) -> None:
    floats(b, N)[:] = floats(a, N)
    if floats(a, N)[0] < 0:
        np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint32 * 1).from_address(fault))[:] = 2


@pytest.fixture
def cuda():
    fake = FakeCuda({"guarded": guarded}, {"guarded": [8, 8, 8]})
    context._thread.__dict__.clear()
    with patch.object(cuda_api, "_api", fake):
        yield fake
    context._thread.__dict__.clear()


def on_gpu(device: driver.Device, launches: int) -> Executable:
    """Launches in a row, each with a fault word of its own."""
    slots = [Storage("input", 4 * N), *[Storage("output", 4 * N) for _ in range(launches)]]
    slots += [Storage("fault", WORD_BYTES, i * WORD_BYTES) for i in range(launches)]
    steps = [Step("kernel", 0, [i, i + 1, 1 + launches + i], 1) for i in range(launches)]
    entry = Entry("guarded", tuple(("pointer", i) for i in range(3)), (1,), 32)
    recipe = Recipe(
        [("guarded", "code")],
        slots,
        steps,
        [0],
        [launches],
        0,
        0,
        False,
        entries=[entry.to_text()],
        sites=[[Site("first", "a.py:1"), Site("second", "b.py:2")]],
    )
    code = {"code": device.keep("code", b"ptx")}
    return Executable(Recipe.from_text(recipe.to_text()), code, device)


@pytest.mark.parametrize("launches", [1, 3])
def test_a_gpu_shows_it_at_the_next_read(cuda: FakeCuda, launches: int) -> None:
    device = driver.Device(0)
    run = on_gpu(device, launches)
    good, bad = (device.upload(np.full(N, v, np.float32)) for v in (1, -1))
    (out,) = run.run([good])
    assert device.download(out, (N,), np.float32).tolist() == [1.0] * N
    waits = cuda.count("cuEventSynchronize") + cuda.count("cuStreamSynchronize")
    for _ in range(3):
        run.run([bad])
    assert waits == cuda.count("cuEventSynchronize") + cuda.count("cuStreamSynchronize")
    for read in (
        lambda: device.download(good),
        device.synchronize,
        lambda: device.land(good.pointer, 4 * N).wait(),
    ):
        run.run([bad])
        with pytest.raises(AxisError, match=r"second\n  at b.py:2"):
            read()
        read()  # it was reported
    fixed = run.replay([bad], {}, {}, [])
    fixed.run()
    with pytest.raises(AxisError, match="second"):
        device.download(fixed.result(0))


def test_words_are_never_shared(cuda: FakeCuda) -> None:
    device = driver.Device(0)
    found = {device.faults.add([Site(str(i), "")]) for i in range(600)}
    assert len(found) == 600 and all(address % WORD_BYTES == 0 for address in found)
    assert len(device.faults.parts) == 3
    device.faults.parts[2].memory[0] = 1
    with pytest.raises(AxisError, match=r"^512"):
        device.faults.check()
    assert not any(part.seen() for part in device.faults.parts)


def test_no_sites_no_words() -> None:
    assert Faults.on_host(Recipe([], [], [], [], [], 0, 0, True)) is None

"""Tensors on a GPU, with a fake driver whose kernels are run by the Tile interpreter, or by the
simulator of the PTX that is emitted for them."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
from unittest.mock import patch

import numpy as np
import pytest
from fake_cuda import FakeCuda
from simulator import simulate

import tilegrad as tg
from tilegrad.compiler import compile as compiler
from tilegrad.compiler import lift
from tilegrad.core.config import override
from tilegrad.core.errors import AxisError, Site, StateError, UserError
from tilegrad.core.target import H200
from tilegrad.ir.symbol import evaluate
from tilegrad.runtime.language import LANGUAGES, Language, ProgramText
from tilegrad.targets.ptx import context, cuda_api, driver
from tilegrad.targets.ptx.emit import emit
from tilegrad.targets.ptx.program import Entry
from tilegrad.tensor import dlpack, interop, placement
from tilegrad.tile import interpret
from tilegrad.tile.build import body_sites, body_symbols


class Interpreted:
    """The functions of a target folder whose machine code is the Body itself."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.bodies = cuda, {}

    def language(self) -> Language:
        return Language(self.emit, lambda body: [], self.compile)

    def emit(self, body, name, target) -> ProgramText:
        symbols = [s.name for s in body_symbols(body)]
        pointers = len(body.parameters) + bool(body_sites(body))
        arguments = [("pointer", i) for i in range(pointers)]
        arguments += [("symbol", s) for s in symbols]
        entry = Entry(name, tuple(arguments), tuple(body.grid), 128, dependent=True)
        number = f"body{len(self.bodies)}"
        self.bodies[number] = (body, symbols)
        return ProgramText(f"{number} {name}", 0, entry.to_text())

    def compile(self, text, target, machine) -> bytes:
        assert machine == "sm_90a"
        number, name = text.split()
        body, symbols = self.bodies[number]
        pointers = len(body.parameters) + bool(body_sites(body))
        self.cuda.parameters[name] = [8] * (pointers + len(symbols))
        self.cuda.kernels[name] = lambda *values: self.run(body, symbols, values)
        return text.encode()

    def run(self, body, symbols, values) -> None:
        memories, bound = self.bound(body, symbols, values)
        try:
            interpret.run(body, memories[: len(body.parameters)], bound)
        except AxisError as error:
            told = [str(Site(**n.attrs).error()) for n in body_sites(body)]
            memories[-1][0] = 1 + told.index(str(error))

    def bound(self, body, symbols, values) -> tuple[list[np.ndarray], dict[str, int]]:
        """The memories and Symbols that a launch names; the word of its faults is the last."""
        count, faults = len(body.parameters), bool(body_sites(body))
        bound = dict(zip(symbols, values[count + faults :]))
        memories = []
        for pointer, parameter in zip(values, body.parameters):
            shape = [evaluate(s, bound) for s in parameter.type.shape]
            strides = [evaluate(s, bound) for s in parameter.type.element_strides()]
            span = 1 + sum((a - 1) * b for a, b in zip(shape, strides)) if 0 not in shape else 0
            bytes_ = min(span * parameter.dtype.size, self.cuda.room(pointer))
            data = (ctypes.c_uint8 * bytes_).from_address(pointer)
            memories.append(np.ctypeslib.as_array(data).view(parameter.dtype.numpy))
        if faults:
            word = (ctypes.c_uint32 * 4).from_address(values[count])
            memories.append(np.ctypeslib.as_array(word))
        return memories, bound


class Simulated(Interpreted):
    """The same with the PTX that is emitted, run by the simulator."""

    def emit(self, body, name, target) -> ProgramText:
        text, entry = emit(body, name, target)
        number = f"body{len(self.bodies)}"
        self.bodies[number] = (body, [v for k, v in entry.arguments if k == "symbol"], text, entry)
        return ProgramText(f"{number} {name}", 0, entry.to_text())

    def compile(self, text, target, machine) -> bytes:
        assert machine == "sm_90a"
        number, name = text.split()
        body, symbols, code, entry = self.bodies[number]
        entry, code = dataclasses.replace(entry, name=name), code.replace("KERNEL_NAME", name)
        self.cuda.parameters[name] = [128 if k == "map" else 8 for k, _ in entry.arguments]

        def run(*values) -> None:
            simulate(code, entry, *self.bound(body, symbols, values))

        self.cuda.kernels[name] = run
        return text.encode()


def forget() -> None:
    """Drop values of Nodes that outlive the fake device they were on."""
    for node, buffer in list(placement.values.items()):
        if buffer.device != "cpu":
            del placement.values[node]


@pytest.fixture(params=[Interpreted, Simulated])
def cuda(request, monkeypatch, quick_collect):
    fake = FakeCuda()
    forget()
    monkeypatch.setattr(driver, "_devices", {})
    monkeypatch.setattr(context, "_thread", type(context._thread)())
    monkeypatch.setattr(compiler, "_memory", {})
    monkeypatch.setattr(lift, "_variants", {})
    monkeypatch.setattr(compiler, "_bodies", {})
    monkeypatch.setattr(placement, "state", placement.state)
    monkeypatch.setattr(driver.Device, "target", H200)
    language = LANGUAGES.replaced("ptx", request.param(fake).language())
    with patch.object(cuda_api, "_api", fake), override(cache_folder=""), language:
        yield fake
        gc.collect()
        forget()
    placement.state.active = False


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def test_there_and_back(cuda) -> None:
    data = numbers(5, 7)
    x = tg.tensor(data)
    assert x.device == "cpu"
    y = x.to("cuda")
    assert y.device == "cuda:0" and x.device == "cpu" and y.to("cuda") is y
    assert np.array_equal(y.numpy(), data) and np.array_equal(y.cpu().numpy(), data)
    assert y.cpu().device == "cpu" and x.cuda().device == "cuda:0" and x.cuda(0).device == "cuda:0"
    assert y.buffer().device == "cuda:0" and float(y[1, 2]) == data[1, 2]
    with pytest.raises(StateError, match=r"cuda:0 has no address here[\s\S]*x\.cpu"):
        y.buffer().array((5, 7), np.float32)


def test_ops_run_where_their_tensors_are(cuda) -> None:
    a, b = numbers(6, 8), numbers(6, 8) + 1
    x, y = tg.tensor(a).cuda(), tg.tensor(b, device="cuda")
    z = (x * 2 + y).exp().sum(1)
    assert z.device == "cuda:0"
    np.testing.assert_allclose(z.numpy(), np.exp(a * 2 + b).sum(1), rtol=1e-5)
    assert z.buffer().device == "cuda:0"
    np.testing.assert_allclose((tg.tensor(a) + 1).numpy(), a + 1)


def test_matmul_and_softmax(cuda) -> None:
    a, b = numbers(16, 24), numbers(24, 8)
    x, y = tg.tensor(a).cuda(), tg.tensor(b).cuda()
    np.testing.assert_allclose((x @ y).numpy(), a @ b, atol=1e-4)
    e = np.exp(a - a.max(1, keepdims=True))
    np.testing.assert_allclose(x.softmax(1).numpy(), e / e.sum(1, keepdims=True), rtol=1e-5)


def test_float32_products_may_be_rounded(cuda) -> None:
    x, w = numbers(72, 64), numbers(40, 64)
    given = tg.tensor(x).cuda(), tg.tensor(w).cuda()
    exact = tg.jit(lambda x, w: x @ w.T)(*given).numpy()
    with override(dots="tf32"):
        quick = tg.jit(lambda x, w: x @ w.T)(*given).numpy()
    wanted = x.astype(np.float64) @ w.T
    assert np.abs(exact - wanted).max() < 1e-5
    assert np.abs(quick - wanted).max() < 3e-2
    assert sum(name.startswith("dot") for name in cuda.kernels) == 2  # two Programs


def test_creation_on_a_device(cuda) -> None:
    assert tg.zeros(3, device="cuda").device == "cuda:0"
    for made, wanted in (
        (tg.zeros(3, device="cuda"), np.zeros(3)),
        (tg.full((2,), 7.0, device="cuda"), [7, 7]),
        (tg.arange(4, device="cuda:0"), np.arange(4)),
        (tg.eye(2, device="cuda"), np.eye(2)),
        (tg.as_tensor([1, 2], device="cuda"), [1, 2]),
        (tg.as_tensor(np.arange(3), device="cuda"), np.arange(3)),
        (tg.Tensor([1.0], device="cuda"), [1.0]),
    ):
        assert np.array_equal(made.numpy(), wanted) and made.buffer().device == "cuda:0"
    x = tg.tensor([1.0, 2.0], device="cuda")
    for made in (tg.ones_like(x), x.new_zeros(4), tg.rand_like(x), tg.randn(2, device="cuda")):
        assert made.device == "cuda:0" and made.realize().buffer().device == "cuda:0"
    assert tg.zeros(3).realize().buffer().device == "cpu"  # the same constant, on the CPU
    with pytest.raises(UserError, match="no such device"):
        tg.zeros(3, device="gpu")
    with pytest.raises(UserError, match="no such GPU"):
        tg.zeros(3, device="cuda:4")


def test_random_numbers_are_the_same_on_any_device(cuda) -> None:
    tg.manual_seed(3)
    here = tg.rand(20).numpy()
    tg.manual_seed(3)
    assert np.array_equal(tg.rand(20, device="cuda").numpy(), here)


def test_what_adapts(cuda) -> None:
    x = tg.tensor([1.0, 2.0, 3.0], device="cuda")
    assert (x + tg.tensor(2.0)).tolist() == [3.0, 4.0, 5.0]  # no axes
    assert (x + tg.ones(3)).tolist() == [2.0, 3.0, 4.0]  # a constant
    assert (x + np.array([1, 1, 0], np.float32)).tolist() == [2.0, 3.0, 3.0]  # an array
    assert (x + np.float32(1)).tolist() == [2.0, 3.0, 4.0]
    assert x[[2, 0]].tolist() == [3.0, 1.0]
    tg.ones(3).realize()
    assert (x + tg.ones(3)).tolist() == [2.0, 3.0, 4.0]  # a constant that was read on the CPU


def test_mixed_devices_are_an_error(cuda) -> None:
    x, y = tg.tensor([1.0, 2.0]), tg.tensor([1.0, 2.0], device="cuda")
    with pytest.raises(UserError, match=r"different devices[\s\S]*cuda:0[\s\S]*hint: move them"):
        (x + y).numpy()
    with pytest.raises(UserError, match="different devices"):
        (tg.from_numpy(np.ones(2, np.float32)) * y).numpy()
    with pytest.raises(UserError, match=r"add.*different devices"):
        tg.jit(lambda a, b: a + b)(x, y)
    with pytest.raises(UserError, match=r"runs on cuda:0 and uses a Tensor on cpu"):
        tg.jit(lambda b: x + b)(y)
    assert tg.jit(lambda b: b.cpu())(y).device == "cpu"
    assert tg.jit(lambda a, b: a.to("cuda") + b)(x, y).tolist() == [2.0, 4.0]


def test_default_device(cuda) -> None:
    with override(device="cpu"):
        tg.set_default_device("cuda")
        assert tg.get_default_device() == "cuda:0"
        assert tg.tensor([1.0]).buffer().device == "cuda:0"
        assert (tg.zeros(3) + 1).realize().buffer().device == "cuda:0"
        assert tg.from_numpy(np.ones(2)).device == "cpu"
        assert tg.tensor([1.0], device="cpu").device == "cpu"
    assert (tg.zeros(3) + 1).realize().buffer().device == "cpu"
    assert tg.ones(2).cuda().realize().device == "cuda:0"


def test_jit_on_both_devices(cuda) -> None:
    calls_ = []

    @tg.jit
    def f(a, b, scale):
        calls_.append(a.device)
        return (a * scale + b).sum(), tg.zeros_like(a) + a

    a, b = numbers(4, 8), numbers(4, 8) + 1
    for device in ("cpu", "cuda", "cpu", "cuda"):
        x, y = tg.tensor(a, device=device), tg.tensor(b, device=device)
        total, same = f(x, y, 3.0)
        np.testing.assert_allclose(float(total), (a * 3 + b).sum(), rtol=1e-5)
        assert np.array_equal(same.numpy(), a) and total.device == same.device == x.device
    assert calls_ == ["cpu", "cuda:0"]


def test_a_jitted_call_repeats_without_compiling_or_allocating(cuda) -> None:
    f = tg.jit(lambda a: a * 2 + 1)
    x = tg.tensor(numbers(64), device="cuda")
    f(x)
    before = {n: cuda.count(n) for n in ("cuMemAlloc", "cuModuleLoadDataEx", "cuLaunchKernelEx")}
    for _ in range(5):
        f(x)
    assert cuda.count("cuMemAlloc") <= before["cuMemAlloc"] + 1
    assert cuda.count("cuModuleLoadDataEx") == before["cuModuleLoadDataEx"]
    assert cuda.count("cuLaunchKernelEx") == before["cuLaunchKernelEx"] + 5


def test_symbolic_sizes(cuda) -> None:
    f = tg.jit(lambda x: (x + 1).sum(), dynamic={"x": {0: ("N", 1, 64)}})
    for size in (3, 17, 3):
        data = numbers(size)
        found = f(tg.tensor(data, device="cuda"))
        np.testing.assert_allclose(float(found), (data + 1).sum(), rtol=1e-5)
    assert f.traces == 1


def test_control_flow(cuda) -> None:
    x = tg.tensor(1.0, device="cuda")

    @tg.jit
    def doubled(x):
        return tg.while_loop(lambda v: v < 100.0, lambda v: v * 2, x)

    assert float(doubled(x)) == 128.0
    rows = numbers(5, 4)
    last, sums = tg.jit(lambda r: tg.scan(lambda c, v: (c + v, c), r[0] * 0, r))(
        tg.tensor(rows, device="cuda")
    )
    np.testing.assert_allclose(last.numpy(), rows.sum(0), rtol=1e-5)
    np.testing.assert_allclose(sums.numpy()[1:], rows.cumsum(0)[:-1], rtol=1e-5)


def test_derivatives_and_training(cuda) -> None:
    w = tg.tensor(numbers(3, 3), device="cuda", requires_grad=True)
    x = tg.tensor(numbers(2, 3), device="cuda")
    (x @ w).square().sum().backward()
    wanted = 2 * x.numpy().T @ (x.numpy() @ w.numpy())
    np.testing.assert_allclose(w.grad.numpy(), wanted, rtol=1e-4)
    assert w.grad.device == "cuda:0"
    with pytest.raises(UserError, match="from one device to another"):
        (w * 2).cpu()
    assert (w * 2).detach().cpu().device == "cpu" and w.cpu().requires_grad

    model = tg.nn.Linear(3, 2).to("cuda")
    assert {p.device for p in model.parameters()} == {"cuda:0"}
    optimizer = tg.train.AdamW(model.parameters(), lr=0.1)

    def step(model, optimizer, x):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    run = tg.jit(step)
    losses = [float(run(model, optimizer, x)) for _ in range(4)]
    assert losses[-1] < losses[0] and model.weight.device == "cuda:0"
    assert all(t.device == "cuda:0" for n, t in optimizer.tensors().items() if t.ndim)
    assert model.cpu().weight.device == "cpu"


def test_state_of_constants_comes_to_the_gpu(cuda) -> None:
    tg.zeros(3, 2).realize()  # known on the CPU before
    linear = tg.nn.Linear(2, 3)
    twin = tg.train.AdamW(linear.parameters(), lr=0.1)
    linear.to("cuda")

    @tg.jit
    def step(model, optimizer, x):
        loss = model(x).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    x = tg.tensor(numbers(4, 2), device="cuda")
    assert float(step(linear, twin, x)) > float(step(linear, twin, x))
    assert {t.device for t in twin.tensors().values() if t.ndim} == {"cuda:0"}


def test_in_place_and_donation(cuda) -> None:
    x = tg.tensor([1.0, 2.0], device="cuda")
    x += 1
    x.assign([5.0, 6.0])
    assert x.device == "cuda:0" and x.tolist() == [5.0, 6.0]
    f = tg.jit(lambda a: a * 2, donate=0)
    assert f(x).tolist() == [10.0, 12.0]
    with pytest.raises(StateError, match="donated"):
        x.numpy()


def test_guards_name_the_op_on_a_gpu_too(cuda) -> None:
    x = tg.tensor([1.0, 0.0], device="cuda")
    with override(eager_debug=True):
        assert (x + 1).tolist() == [2.0, 1.0]
        with pytest.raises(UserError, match="first NaN or infinity"):
            (1.0 / x).numpy()


@pytest.mark.usefixtures("quick_collect")
def test_dlpack_capsules(cuda) -> None:
    data = numbers(2, 3, 4)
    x = tg.tensor(data, device="cuda")
    assert x.__dlpack_device__() == (2, 0)
    held = len(dlpack._given)
    capsule = x.__dlpack__(stream=1)
    buffer, shape, dtype = dlpack.buffer_of(capsule)
    assert shape == (2, 3, 4) and dtype is tg.float32 and buffer.device == "cuda:0"
    assert buffer.pointer == x.buffer().pointer and len(dlpack._given) == held + 1
    with pytest.raises(UserError, match="not a fresh"):
        dlpack.buffer_of(capsule)
    del buffer, capsule
    gc.collect()
    assert len(dlpack._given) == held
    unused = x.__dlpack__(stream=77)
    assert cuda.count("cuStreamWaitEvent") == 1
    del unused
    gc.collect()
    assert len(dlpack._given) == held


def test_from_dlpack_shares_gpu_memory(cuda) -> None:
    x = tg.tensor(numbers(4), device="cuda")

    class Other:
        def __dlpack_device__(self):
            return x.__dlpack_device__()

        def __dlpack__(self, stream=None):
            assert stream == int(driver.open_device(0).stream)
            return x.__dlpack__(stream=1)

    y = interop.from_dlpack(Other())
    assert y.buffer().pointer == x.buffer().pointer and y.device == "cuda:0"
    assert np.array_equal((y + 1).numpy(), x.numpy() + 1)


def test_text_pickle_and_explain(cuda) -> None:
    import pickle

    x = tg.tensor([1.0, 2.0], device="cuda")
    assert "1., 2." in repr(x)
    assert pickle.loads(pickle.dumps(x)).tolist() == [1.0, 2.0]
    shown = tg.explain(lambda a: a + 1, x, level="summary")
    assert "multiprocessors" in str(shown)


def test_memory_goes_back(cuda) -> None:
    device = driver.open_device(0)
    x = tg.tensor(numbers(1000), device="cuda")
    y = (x + 1).realize()
    device.pool.settle()
    assert device.pool.in_use >= 8000
    del x, y
    gc.collect()
    device.pool.settle()
    assert device.pool.in_use < 1024
    tg.synchronize("cuda")


def test_recipes_are_bound_again_from_disk(cuda, tmp_path) -> None:
    with override(cache_folder=str(tmp_path)):
        x = tg.tensor(numbers(8), device="cuda")
        assert np.array_equal((x * 3).numpy(), x.numpy() * 3)
        compiler._memory.clear()
        lift._variants.clear()
        loaded = compiler.counters["loaded"]
        assert np.array_equal((x * 3).numpy(), x.numpy() * 3)
        assert compiler.counters["loaded"] == loaded + 1


def test_real_programs_are_assembled_and_loaded(cuda) -> None:
    from tilegrad.targets.ptx.assemble import find_ptxas

    if find_ptxas() is None:
        pytest.skip("no ptxas here")
    LANGUAGES.register("ptx", "tilegrad.targets.ptx.language:LANGUAGE")
    x = tg.tensor(numbers(64, 64), device="cuda")
    tg.jit(lambda a: (a * 2 + 1).sum(1))(x)  # the fake runs nothing
    (image,) = [a[0] for n, a in cuda.calls if n == "cuModuleLoadData"]
    assert image[:4] == b"\x7fELF"
    (launch,) = [a[0] for n, a in cuda.calls if n == "cuLaunchKernelEx"]
    assert launch.gridDimX >= 1 and launch.blockDimX % 32 == 0
    assert ".visible .entry" in tg.explain(lambda a: a + 1, x).section("ptx")


@pytest.mark.usefixtures("quick_collect")
def test_torch_understands_the_capsules(cuda, monkeypatch) -> None:
    """The fake GPU's memory is the host's, so torch can take it for memory of the CPU."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(dlpack, "CUDA", dlpack.CPU)
    for dtype in ("float32", "bfloat16", "int64", "bool", "float16", "uint8"):
        x = tg.tensor(np.arange(24).reshape(2, 3, 4) % 2, dtype=dtype, device="cuda")
        held = len(dlpack._given)
        theirs = torch.utils.dlpack.from_dlpack(x.__dlpack__(stream=1))
        assert str(theirs.dtype) == f"torch.{dtype}" and theirs.shape == (2, 3, 4)
        assert theirs.data_ptr() == x.buffer().pointer
        assert np.array_equal(theirs.float().numpy(), x.numpy().astype(np.float32))
        assert len(dlpack._given) == held + 1
        del theirs
        gc.collect()
        assert len(dlpack._given) == held
        given = torch.arange(6).reshape(2, 3).to(getattr(torch, dtype))
        buffer, shape, found = dlpack.buffer_of(torch.utils.dlpack.to_dlpack(given))
        assert (shape, found.name, buffer.pointer) == ((2, 3), dtype, given.data_ptr())
        del buffer
    with pytest.raises(UserError, match=r"row-major[\s\S]*contiguous"):
        dlpack.buffer_of(torch.utils.dlpack.to_dlpack(torch.zeros(3, 4).T))


def test_an_index_out_of_range_shows_at_the_next_read(cuda) -> None:
    table = tg.tensor(numbers(4, 3), device="cuda")
    rows = tg.jit(lambda i, t: tg.embedding(i, t))
    good, bad = (tg.tensor(np.array(i), device="cuda") for i in ([0, 3], [0, 4]))
    np.testing.assert_array_equal(rows(good, table).numpy(), table.numpy()[[0, 3]])
    rows(bad, table)  # nobody waits for it
    with pytest.raises(AxisError, match="embedding: an index is out of range") as caught:
        table.numpy()
    assert caught.value.location.file == __file__
    np.testing.assert_array_equal(rows(good, table).numpy(), table.numpy()[[0, 3]])

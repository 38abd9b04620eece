"""The CUDA driver over a fake: memory, copies, modules, launches, events, errors."""

from __future__ import annotations

import ctypes
import gc
import inspect
from unittest.mock import patch

import numpy as np
import pytest
from direct import launch, pack, timed
from fake_cuda import FakeCuda, floats

from tilegrad.core.config import override
from tilegrad.core.errors import InternalError, MemoryLimitError, UserError
from tilegrad.targets.ptx import context, cuda_api, driver
from tilegrad.targets.ptx.context import Event
from tilegrad.targets.ptx.driver import Device
from tilegrad.targets.ptx.launch import launch_config, parameter_memory


@pytest.fixture
def cuda():
    fake = FakeCuda()
    context._thread.__dict__.clear()
    with patch.object(cuda_api, "_api", fake):
        yield fake
    context._thread.__dict__.clear()


@pytest.fixture
def device(cuda):
    return Device(0)


def add(a: int, b: int, c: int, count: int) -> None:
    floats(c, count)[:] = floats(a, count) + floats(b, count)


def test_facts_of_a_device(cuda) -> None:
    (facts,) = context.devices()
    assert facts["name"] == "NVIDIA H200" and facts["multiprocessor_count"] == 132
    assert Device(0).arch == "sm_90a"


def test_no_driver_is_a_clear_error(monkeypatch) -> None:
    monkeypatch.setattr(cuda_api, "_api", None)
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings", None)
    with pytest.raises(UserError, match="cuda-bindings>=13"):
        cuda_api.api()
    assert context.devices() == []


def test_a_number_that_is_not_there(cuda) -> None:
    with pytest.raises(UserError, match="no such GPU"):
        driver.open_device(3)


def test_upload_and_download_pass_through_pinned_parts(device, cuda, monkeypatch) -> None:
    monkeypatch.setattr(context, "PART", 1000)
    values = np.random.default_rng(0).integers(0, 255, 5500).astype(np.uint8)
    buffer = device.upload(values)
    assert np.array_equal(device.download(buffer), values)
    assert cuda.count("cuMemcpyHtoDAsync") == 6 and cuda.count("cuMemHostAlloc") == 4
    twin = device.copy(buffer)
    assert np.array_equal(device.download(twin, (55, 100), np.uint8), values.reshape(55, 100))
    device.fill(twin, 7)
    assert (device.download(twin) == 7).all()


def test_memory_comes_back_at_the_same_address(device, cuda) -> None:
    first = device.allocate(1000, "a")
    at = first.pointer
    assert device.pool.in_use == 1024 and at % 512 == 0
    del first
    second = device.allocate(900)
    assert second.pointer == at and cuda.count("cuMemAlloc") == 1
    third = device.allocate(900)
    assert third.pointer != at and device.pool.peak == 2048
    del second, third
    device.pool.trim()
    assert cuda.held() == 0 and device.pool.in_use == 0


def test_memory_that_is_kept_is_given_up_when_the_gpu_is_full(cuda) -> None:
    cuda.memory_bytes = 10 << 20
    device = Device(0)
    kept = device.allocate(6 << 20)
    del kept
    large = device.allocate(9 << 20, "weights")
    with pytest.raises(MemoryLimitError, match=r"3.0 MiB on cuda:0[\s\S]*weights 9.0 MiB"):
        device.allocate(3 << 20)
    assert device.pool.in_use == large.bytes


def test_a_launch_gets_its_arguments(device, cuda) -> None:
    cuda.kernels["add"] = add
    cuda.parameters["add"] = [8, 8, 8, 8]
    a, b = (np.arange(6, dtype=np.float32) + i for i in range(2))
    inputs = [device.upload(a), device.upload(b)]
    out = device.allocate(24)
    function = device.load("// text").function("add")
    launch(function, (1,), 32, [*inputs, out, 6])
    assert np.array_equal(device.download(out, (6,), np.float32), a + b)


def test_packing() -> None:
    assert pack(-1) == b"\xff" * 8 and pack(2**63) == b"\0" * 7 + b"\x80"
    assert pack(1.0) == np.float32(1).tobytes()
    assert pack(np.int32(5)) == b"\5\0\0\0"
    with pytest.raises(InternalError, match="list"):
        pack([1])


def test_tensor_maps_are_aligned_among_the_parameters() -> None:
    memory, table = parameter_memory([8, 128, 4, 128])
    assert [t % 128 for t in (table[1], table[3])] == [0, 0]
    assert table[0] + 8 <= table[1] and table[1] + 128 <= table[2] and table[2] + 4 <= table[3]
    assert table[3] + 128 <= ctypes.addressof(memory) + len(memory)


def test_modules_and_functions_are_loaded_once(device, cuda) -> None:
    cubin = b"\x7fELF...."
    assert device.load(cubin) is device.load(cubin)
    assert device.load("text") is not device.load("other")
    assert cuda.count("cuModuleLoadData") == 1 and cuda.count("cuModuleLoadDataEx") == 2
    loaded = device.load(cubin)
    function = loaded.function("f")
    assert loaded.function("f") is function
    function.allow(100_000)
    function.allow(100_000)
    assert cuda.count("cuFuncSetAttribute") == 1
    with pytest.raises(UserError, match=r"kernel f needs too much shared memory[\s\S]*232448"):
        function.allow(300_000)


def test_ptx_that_does_not_compile_shows_the_log(device, cuda) -> None:
    cuda.failing["cuModuleLoadDataEx"] = 218
    with pytest.raises(InternalError, match="cannot compile this PTX"):
        device.load("bad")


def test_a_refused_launch_names_the_kernel(device, cuda) -> None:
    function = device.load("x").function("shiny")
    cuda.failing["cuLaunchKernelEx"] = 1
    with pytest.raises(InternalError, match=r"kernel shiny, grid 3x2x1, block 64x1x1"):
        launch(function, (3, 2), 64)


def test_a_fault_names_the_last_kernel(device, cuda) -> None:
    launch(device.load("x").function("wild"), (1,), 32)
    cuda.failing["cuStreamSynchronize"] = 700
    with pytest.raises(InternalError, match=r"outside of any allocation[\s\S]*last was wild"):
        device.synchronize()


def test_synchronous_mode_waits_after_each_launch(device, cuda) -> None:
    function = device.load("x").function("slow")
    with override(cuda_sync=True):
        launch(function, (1,), 32)
        cuda.failing["cuStreamSynchronize"] = 719
        with pytest.raises(InternalError, match="kernel slow"):
            launch(function, (1,), 32)
    assert cuda.count("cuStreamSynchronize") == 2


def test_launch_attributes(cuda) -> None:
    made = launch_config((4,), (128,), 0, 5, cluster=(2,), dependent=True)
    assert [a.id for a in made.attrs] == [
        "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION",
        "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION",
    ]
    assert made.numAttrs == 2 and made.attrs[0].value.clusterDim.x == 2


def test_events_measure_seconds(device) -> None:
    first, second = Event(device).record(), Event(device).record()
    assert second.seconds_since(first) == pytest.approx(1.5e-3)
    assert timed(device, lambda: None, repeats=3) == pytest.approx([1.5e-3] * 3)


@pytest.mark.usefixtures("quick_collect")
def test_buffers_go_back_from_the_garbage_collector(device) -> None:
    held = [device.allocate(512) for _ in range(4)]
    held.append(held)  # a cycle
    del held
    gc.collect()
    device.pool.settle()
    assert device.pool.in_use == 0


# ---- against the real bindings, where they are installed --------------------------------------


@pytest.fixture
def bindings():
    real = pytest.importorskip("cuda.bindings.driver")
    with patch.object(cuda_api, "_api", real):
        yield real


def test_real_launch_config(bindings) -> None:
    made = launch_config((4, 3), (128,), 1000, bindings.CUstream(5), (2,), True)
    raw = ctypes.string_at(made.getPtr(), 56)
    assert np.frombuffer(raw[:28], np.uint32).tolist() == [4, 3, 1, 128, 1, 1, 1000]
    stream, attributes, count = np.frombuffer(raw[32:], np.uint64).tolist()
    assert stream == 5 and count & 0xFFFFFFFF == 2
    entries = [ctypes.string_at(attributes + 72 * i, 72) for i in range(2)]
    assert [e[0] for e in entries] == [4, 6]
    assert np.frombuffer(entries[0][8:20], np.uint32).tolist() == [2, 1, 1]
    assert entries[1][8] == 1
    plain = launch_config((1,), (32,), 0, bindings.CUstream(5))
    assert plain.numAttrs == 0 and bytes(ctypes.string_at(plain.getPtr(), 56))[48] == 0


def test_every_call_has_as_many_arguments_as_the_real_one(bindings) -> None:
    for name, run in inspect.getmembers(FakeCuda, inspect.isfunction):
        if name.startswith("do_"):
            real = getattr(bindings, name[3:]).__doc__.split("\n")[0]
            inside = real[real.index("(") + 1 : real.rindex(")")]
            depth, count = 0, 1 if inside else 0
            for letter in inside:
                depth += {"[": 1, "]": -1}.get(letter, 0)
                count += letter == "," and depth == 0
            assert len(inspect.signature(run).parameters) - 1 == count, real


def test_names_of_the_real_enumerations(bindings) -> None:
    for attribute in context.ATTRIBUTES:
        assert hasattr(bindings.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{attribute.upper()}")
    for kind in (
        "SHARED_SIZE_BYTES",
        "MAX_DYNAMIC_SHARED_SIZE_BYTES",
        "NON_PORTABLE_CLUSTER_SIZE_ALLOWED",
    ):
        assert hasattr(bindings.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{kind}")
    assert not bindings.CUresult.CUDA_SUCCESS and int(bindings.CUresult(700)) in cuda_api.FAULTS


def test_arguments_are_what_the_real_functions_take(bindings) -> None:
    """Arguments are converted before the driver's library is looked for, so this needs none."""
    b = bindings
    stream, function, event, node = b.CUstream(5), b.CUfunction(7), b.CUevent(9), b.CUgraphNode(3)
    graph, made, jit = b.CUgraph(3), b.CUgraphExec(3), b.CUjit_option
    config = launch_config((1,), (32,), 0, stream, (2,), True)
    options = [jit.CU_JIT_ERROR_LOG_BUFFER, jit.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
    most = b.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    window = b.CUstreamAttrID.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW
    mode = b.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    given = {
        "cuMemFree": (4096,),
        "cuMemHostAlloc": (100, 0),
        "cuEventRecord": (event, stream),
        "cuMemcpyHtoDAsync": (4096, 8192, 10, stream),
        "cuStreamWaitEvent": (1234, event, 0),
        "cuMemcpyDtoHAsync": (8192, 4096, 10, stream),
        "cuMemsetD8Async": (4096, 3, 10, stream),
        "cuMemcpyDtoDAsync": (8192, 4096, 10, stream),
        "cuModuleLoadData": (b"code",),
        "cuModuleLoadDataEx": (b"text\0", 2, options, [bytearray(64), 64]),
        "cuModuleGetFunction": (b.CUmodule(4), b"name"),
        "cuFuncLoad": (function,),
        "cuFuncSetAttribute": (function, most, 5),
        "cuLaunchKernelEx": (config, function, 4096, 0),
        "cuStreamSetAttribute": (stream, window, b.CUstreamAttrValue()),
        "cuStreamBeginCapture": (stream, mode),
        "cuGraphInstantiate": (graph, 0),
        "cuGraphExecKernelNodeSetParams": (made, node, b.CUDA_KERNEL_NODE_PARAMS()),
        "cuGraphLaunch": (made, stream),
        "cuGetErrorName": (b.CUresult(700),),
        "cuGetProcAddress": (b"cuTensorMapEncodeTiled", 12000, 0),
        "cuStreamCreate": (0,),
    }
    if calls_library_is_here(bindings):
        pytest.skip("a driver is here: these numbers are no handles")
    for name, arguments in given.items():
        with pytest.raises(Exception, match=r"dlopen|driver library|libcuda") as caught:
            getattr(bindings, name)(*arguments)
        assert not isinstance(caught.value, (TypeError, ValueError)), name


def calls_library_is_here(bindings) -> bool:
    try:
        bindings.cuInit(0)
    except Exception:
        return False
    return True

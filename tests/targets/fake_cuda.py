"""A stand-in for `cuda.bindings.driver` that keeps memory in NumPy and records every call.

Kernels are Python functions of their parameters, found by the name of the entry; so a test sees
both what was asked of the driver and what a program computes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

SUCCESS = 0
ENCODER = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 12)


class Names:
    """Enumeration members by name: any name exists and is itself."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def __getattr__(self, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name

    def __call__(self, value: Any) -> Any:
        return value


class Record:
    """A struct: any field may be set; a nested one is made when it is read."""

    def __init__(self) -> None:
        self.__dict__["fields"] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.fields.setdefault(name, Record())

    def __setattr__(self, name: str, value: Any) -> None:
        self.fields[name] = value


ATTRIBUTES = {
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "MULTIPROCESSOR_COUNT": 132,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448,
    "MAX_SHARED_MEMORY_PER_BLOCK": 49152,
    "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 233472,
    "L2_CACHE_SIZE": 60 << 20,
    "MAX_THREADS_PER_BLOCK": 1024,
    "WARP_SIZE": 32,
    "MAX_REGISTERS_PER_BLOCK": 65536,
    "MAX_THREADS_PER_MULTIPROCESSOR": 2048,
    "MAX_REGISTERS_PER_MULTIPROCESSOR": 65536,
    "MAX_BLOCKS_PER_MULTIPROCESSOR": 32,
    "GLOBAL_MEMORY_BUS_WIDTH": 6144,
    "MEMORY_CLOCK_RATE": 3201000,
    "CLOCK_RATE": 1980000,
}


class FakeCuda:
    """See the module's docstring."""

    STRUCTS = (
        "CUlaunchConfig",
        "CUlaunchAttribute",
        "CUstreamAttrValue",
        "CUDA_KERNEL_NODE_PARAMS",
    )

    def __init__(
        self,
        kernels: dict[str, Callable[..., None]] | None = None,
        parameters: dict[str, list[int]] | None = None,
        memory_bytes: int = 1 << 30,
        devices: int = 1,
    ) -> None:
        self.kernels = kernels or {}
        self.parameters = parameters or {}  # sizes of each entry's parameters; 8 bytes each else
        self.memory_bytes, self.devices = memory_bytes, devices
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.memory: dict[int, Any] = {}
        self.functions: dict[int, str] = {}
        self.capturing: list[Any] | None = None
        self.graphs: dict[int, list[Any]] = {}
        self.failing: dict[str, int] = {}  # function -> the status of its next call
        self._encoder = ENCODER(lambda *_: 0)  # makes maps of zeros
        address = ctypes.cast(self._encoder, ctypes.c_void_p).value or 0
        self.addresses = {b"cuTensorMapEncodeTiled": address}  # of functions asked for by name
        self.next_handle = 1000

    # ---- what the tests look at -----------------------------------------------------------

    def names(self, *only: str) -> list[str]:
        """The calls so far, by name."""
        return [n for n, _ in self.calls if not only or n in only]

    def count(self, name: str) -> int:
        """How often a function was called."""
        return len(self.names(name))

    def held(self) -> int:
        """Bytes allocated from the driver."""
        return sum(len(m) for m in self.memory.values())

    def room(self, pointer: int) -> int:
        """Bytes from an address to the end of the memory it is in."""
        for start, memory in self.memory.items():
            if start <= pointer < start + len(memory):
                return start + len(memory) - pointer
        return 0

    # ---- machinery ------------------------------------------------------------------------

    def handle(self) -> int:
        """A fresh handle."""
        self.next_handle += 1
        return self.next_handle

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in self.STRUCTS:
            return Record
        if name.startswith("CU"):
            return Names(name)
        if not name.startswith("cu"):
            raise AttributeError(name)
        run = getattr(type(self), "do_" + name, None)
        if run is None:
            raise AttributeError(f"the fake driver has no {name}")

        def called(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, arguments))
            status = self.failing.pop(name, SUCCESS)
            if status:
                return (status, None)
            result = run(self, *arguments)
            if isinstance(result, int):
                return (result, None)
            return (SUCCESS, *result) if isinstance(result, tuple) else (SUCCESS,)

        return called

    def do_cuGetErrorName(self, status: int) -> Any:
        return (f"CUDA_ERROR_{status}".encode(),)

    def do_cuGetErrorString(self, status: int) -> Any:
        return (b"some error",)

    def do_cuDeviceGetCount(self) -> Any:
        return (self.devices,)

    def do_cuDeviceGet(self, number: int) -> Any:
        return (number,)

    def do_cuDeviceGetName(self, length: int, device: int) -> Any:
        return (b"NVIDIA H200\0\0",)

    def do_cuDeviceTotalMem(self, device: int) -> Any:
        return (self.memory_bytes,)

    def do_cuDriverGetVersion(self) -> Any:
        return (13000,)

    def do_cuDeviceGetAttribute(self, kind: str, device: int) -> Any:
        return (ATTRIBUTES.get(kind.removeprefix("CU_DEVICE_ATTRIBUTE_"), 1),)

    def do_cuDevicePrimaryCtxRetain(self, device: int) -> Any:
        return (self.handle(),)

    def do_cuCtxSetCurrent(self, context: int) -> None: ...

    def do_cuStreamCreate(self, flags: int) -> Any:
        return (self.handle(),)

    def do_cuStreamSynchronize(self, stream: int) -> None: ...

    def do_cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> None: ...

    def do_cuStreamSetAttribute(self, stream: int, kind: str, value: Any) -> None: ...

    def do_cuCtxSetLimit(self, limit: str, value: int) -> None: ...

    def do_cuMemGetInfo(self) -> Any:
        return self.memory_bytes - self.held(), self.memory_bytes

    # memory

    def do_cuMemAlloc(self, bytes: int) -> Any:
        if self.held() + bytes > self.memory_bytes:
            return 2
        memory = np.zeros(bytes + 512, np.uint8)
        pointer = memory.ctypes.data + -memory.ctypes.data % 512
        self.memory[pointer] = memory[pointer - memory.ctypes.data :][:bytes]
        return (pointer,)

    def do_cuMemFree(self, pointer: int) -> None:
        del self.memory[pointer]

    def do_cuMemHostAlloc(self, bytes: int, flags: int) -> Any:
        memory = ctypes.create_string_buffer(bytes)
        self.__dict__.setdefault("pinned", []).append(memory)
        return (ctypes.addressof(memory),)

    def do_cuMemcpyHtoDAsync(self, target: int, source: int, bytes: int, stream: int) -> None:
        ctypes.memmove(target, source, bytes)

    def do_cuMemcpyDtoHAsync(self, target: int, source: int, bytes: int, stream: int) -> None:
        ctypes.memmove(target, source, bytes)

    def do_cuMemcpyDtoDAsync(self, target: int, source: int, bytes: int, stream: int) -> None:
        if self.capturing is not None:
            self.capturing.append(["copy", target, source, bytes, self.handle()])
        else:
            ctypes.memmove(target, source, bytes)

    def do_cuMemcpyPeerAsync(
        self, target: int, context: int, source: int, origin: int, bytes: int, stream: int
    ) -> None:
        ctypes.memmove(target, source, bytes)

    def do_cuMemsetD8Async(self, target: int, byte: int, bytes: int, stream: int) -> None:
        ctypes.memset(target, byte, bytes)

    # events

    def do_cuEventCreate(self, flags: int) -> Any:
        return (self.handle(),)

    def do_cuEventRecord(self, event: int, stream: int) -> None: ...

    def do_cuEventRecordWithFlags(self, event: int, stream: int, flags: int) -> None:
        assert self.capturing is not None and flags == 1
        self.capturing.append(["event", event, self.handle()])

    def do_cuEventSynchronize(self, event: int) -> None: ...

    def do_cuEventDestroy(self, event: int) -> None: ...

    def do_cuEventElapsedTime(self, first: int, second: int) -> Any:
        return (1.5,)

    # code

    def do_cuModuleLoadData(self, data: bytes) -> Any:
        return (self.handle(),)

    def do_cuModuleLoadDataEx(self, text: bytes, count: int, options: Any, values: Any) -> Any:
        assert text.endswith(b"\0") and count == len(options) == len(values)
        return (self.handle(),)

    def do_cuModuleUnload(self, module: int) -> None: ...

    def do_cuModuleGetFunction(self, module: int, name: bytes) -> Any:
        handle = self.handle()
        self.functions[handle] = name.decode()
        return (handle,)

    def do_cuFuncLoad(self, function: int) -> None: ...

    def do_cuFuncGetAttribute(self, kind: str, function: int) -> Any:
        return (0,)

    def do_cuFuncSetAttribute(self, function: int, kind: str, value: int) -> None: ...

    def do_cuOccupancyMaxActiveBlocksPerMultiprocessor(
        self, function: int, threads: int, shared: int
    ) -> Any:
        return (2,)

    def do_cuGetProcAddress(self, name: bytes, version: int, flags: int) -> Any:
        return (self.addresses[name], 0)

    # launches

    def values(self, name: str, table: int) -> list[Any]:
        """The parameters of a launch: ints of 8 bytes, bytes otherwise."""
        sizes = self.parameters.get(name, [])
        found: list[Any] = []
        for number, size in enumerate(sizes):
            at = ctypes.c_uint64.from_address(table + 8 * number).value
            data = ctypes.string_at(at, size)
            found.append(int.from_bytes(data, "little") if size == 8 else data)
        return found

    def do_cuLaunchKernelEx(self, config: Any, function: int, table: int, extra: int) -> None:
        name = self.functions[function]
        values = self.values(name, table)
        kinds = [a.id for a in config.attrs]
        if self.capturing is not None:
            self.capturing.append(["kernel", name, values, kinds, self.handle()])
        else:
            self.run(name, values)

    def run(self, name: str, values: list[Any]) -> None:
        """Run the Python function that stands for a kernel."""
        if name in self.kernels:
            self.kernels[name](*values)

    # graphs

    def do_cuStreamBeginCapture(self, stream: int, mode: str) -> None:
        assert self.capturing is None
        self.capturing = []

    def do_cuStreamGetCaptureInfo(self, stream: int) -> Any:
        last = self.capturing[-1:] if self.capturing else []
        return (1, 7, 8, [n[-1] for n in last], [None for _ in last], len(last))

    def do_cuStreamEndCapture(self, stream: int) -> Any:
        handle = self.handle()
        self.graphs[handle], self.capturing = self.capturing or [], None
        return (handle,)

    def do_cuGraphInstantiate(self, graph: int, flags: int) -> Any:
        handle = self.handle()
        self.graphs[handle] = [list(n) for n in self.graphs[graph]]
        return (handle,)

    def do_cuGraphDestroy(self, graph: int) -> None: ...

    def do_cuGraphExecDestroy(self, graph: int) -> None:
        del self.graphs[graph]

    def do_cuGraphUpload(self, graph: int, stream: int) -> None: ...

    def do_cuGraphExecKernelNodeSetParams(self, graph: int, node: int, parameters: Any) -> None:
        (entry,) = [n for n in self.graphs[graph] if n[-1] == node]
        name = self.functions[parameters.func]
        assert name == entry[1]
        entry[2] = self.values(name, parameters.kernelParams)

    def do_cuGraphLaunch(self, graph: int, stream: int) -> None:
        for node in self.graphs[graph]:
            if node[0] == "kernel":
                self.run(node[1], node[2])
            elif node[0] == "copy":
                ctypes.memmove(node[1], node[2], node[3])


def floats(pointer: int, count: int) -> np.ndarray[Any, Any]:
    """Float32 values at an address of the fake GPU."""
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(pointer))

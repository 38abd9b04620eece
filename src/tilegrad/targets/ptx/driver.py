"""The CUDA driver: devices, modules, functions, launches, streams and events.

`devices()` lists what is here; `open_device(number)` opens one on its primary context (the one
torch uses too), with one stream, which waits for the legacy default stream and is waited for by
it: work handed over from or to torch on its default stream is in order without events. Machine
code is loaded once by content; what was not used for long is unloaded. Invariant: a call with a
Device makes its context current in the calling thread first; after a launch `Recent.kernel` names
it.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ...core.config import config
from ...core.errors import InternalError, UserError
from ...core.lock import new_lock
from ...core.recent import Recent as Kept
from ...core.target import Target
from ...runtime import device as runtime
from ...runtime.buffer import Buffer
from ...runtime.fault import FaultWords
from ...runtime.recipe import Recipe
from ...runtime.store import content_key
from .cuda_api import Recent, api, available, call, fail
from .maps import MAP_BYTES, aligned
from .memory import Pool, Staging, mapped_words
from .module import Function, Module

# What `Device.attributes` holds: attributes of the driver by their names in lower case.
ATTRIBUTES = (
    "compute_capability_major",
    "compute_capability_minor",
    "multiprocessor_count",
    "max_threads_per_block",
    "max_threads_per_multiprocessor",
    "max_blocks_per_multiprocessor",
    "max_registers_per_block",
    "max_registers_per_multiprocessor",
    "warp_size",
    "max_shared_memory_per_block",
    "max_shared_memory_per_block_optin",
    "max_shared_memory_per_multiprocessor",
    "reserved_shared_memory_per_block",
    "l2_cache_size",
    "max_persisting_l2_cache_size",
    "max_access_policy_window_size",
    "global_memory_bus_width",
    "memory_clock_rate",
    "clock_rate",
    "cooperative_launch",
    "cluster_launch",
    "pci_bus_id",
    "pci_device_id",
)

MODULES = 8  # of machine code, that are kept for each Executable that is

_devices: dict[int, Device] = {}
_open_lock = new_lock()
_thread = threading.local()


def devices() -> list[dict[str, Any]]:
    """Facts of each GPU here, without opening it; empty where there is none."""
    if not available():
        return []
    return [_facts(number) for number in range(int(call("cuDeviceGetCount")))]


def _facts(number: int) -> dict[str, Any]:
    handle = call("cuDeviceGet", number)
    kinds = api().CUdevice_attribute
    name = call("cuDeviceGetName", 256, handle)
    facts: dict[str, Any] = {
        "name": name.split(b"\0")[0].decode(),
        "number": number,
        "total_memory": int(call("cuDeviceTotalMem", handle)),
        "driver_version": int(call("cuDriverGetVersion")),
    }
    for attribute in ATTRIBUTES:
        kind = getattr(kinds, f"CU_DEVICE_ATTRIBUTE_{attribute.upper()}")
        facts[attribute] = int(call("cuDeviceGetAttribute", kind, handle))
    return facts


def open_device(number: int = 0) -> Device:
    """The Device with this number, opened once per process."""
    found = _devices.get(number)
    if found is None:
        with _open_lock:
            found = _devices.get(number)
            if found is None:
                count = int(call("cuDeviceGetCount"))
                if not 0 <= number < count:
                    raise UserError(
                        "no such GPU",
                        op="cuda",
                        expected=f"cuda:0 to cuda:{count - 1}" if count else "a GPU",
                        got=f"cuda:{number}",
                    )
                found = _devices[number] = Device(number)
    if found.process != os.getpid():
        raise UserError(
            "a GPU that was opened before a fork cannot be used after it",
            op="cuda",
            expected="a process that was spawned",
            got="a forked process",
            hint='start processes with multiprocessing.get_context("spawn")',
        )
    return found


class Device(runtime.Device):
    """One opened GPU: its facts, memory, stream and loaded modules."""

    alignment = 16  # of the pointers that kernels get

    def __init__(self, number: int) -> None:
        super().__init__(f"cuda:{number}")
        self.number, self.process = number, os.getpid()
        self.attributes = _facts(number)
        self.handle = call("cuDeviceGet", number)
        self.context = call("cuDevicePrimaryCtxRetain", self.handle)
        self.activate()
        self.stream = call("cuStreamCreate", 0)  # in order with the legacy default stream
        # Graphs are captured on one of their own, which the legacy stream does not touch.
        self.capture_stream = call("cuStreamCreate", 1)
        self.pool = Pool(self, config().memory_bytes)
        self.staging = Staging(self)
        self.modules: Kept[Module] = Kept(lambda: MODULES * config().keep)
        self.retired: deque[Any] = deque()  # handles of modules that nobody uses any more
        self._target: Target | None = None
        self._pinned: Any = None
        self.faults = FaultWords(self._mapped)

    def __repr__(self) -> str:
        return f"Device({self.name}, {self.attributes['name']})"

    @property
    def target(self) -> Target:
        """The facts of this machine that the compiler uses."""
        if self._target is None:
            from .target import target_of

            self._target = target_of(self.attributes)
        return self._target

    @property
    def arch(self) -> str:  # type: ignore[override]
        """The architecture to assemble for, with the features of exactly this one."""
        major = self.attributes["compute_capability_major"]
        minor = self.attributes["compute_capability_minor"]
        return f"sm_{major}{minor}" + ("a" if major >= 9 else "")

    def activate(self) -> None:
        """Make the context current in this thread."""
        if getattr(_thread, "device", None) is not self:
            call("cuCtxSetCurrent", self.context)
            _thread.device = self

    def new_stream(self, ordered: bool = False) -> Any:
        """Another stream; `ordered` ones are in order with the legacy default stream."""
        self.activate()
        return call("cuStreamCreate", 0 if ordered else 1)

    def hand_over(self, stream: int) -> None:
        """Let another stream of this context wait for all work on ours."""
        Event(self, timing=False).record().wait(stream)

    def event(self, timing: bool = True) -> Event:
        """A new Event."""
        return Event(self, timing)

    def synchronize(self) -> None:
        """Wait until all work on the stream is done; a kernel's fault shows here."""
        self.activate()
        call("cuStreamSynchronize", self.stream)
        self.faults.check()

    # ---- memory ---------------------------------------------------------------------------

    def allocate(self, bytes: int, label: str = "") -> Buffer:
        """A new Buffer with uninitialised memory from the pool."""
        block = self.pool.take(bytes, label)
        return Buffer(block.pointer, bytes, block, self.name, label=label)

    def put(self, pointer: int, source: int, bytes: int) -> None:
        """Copy host memory to the GPU; `source` may be changed when this returns."""
        self.activate()
        self.staging.upload(pointer, source, bytes, self.stream)

    def get(self, target: int, pointer: int, bytes: int) -> None:
        """Copy memory of the GPU to the host, after all work so far."""
        self.activate()
        self.staging.download(target, pointer, bytes, self.stream)

    def copy_across(self, target: int, source: int, bytes: int, origin: runtime.Device) -> None:
        """Copy from another Device: straight from another GPU, else through the host."""
        if not isinstance(origin, Device):
            super().copy_across(target, source, bytes, origin)
        elif bytes:
            ready = Event(origin, timing=False).record()
            self.activate()
            ready.wait(self.stream)
            peers = (target, self.context, source, origin.context)
            call("cuMemcpyPeerAsync", *peers, bytes, self.stream)
            done = Event(self, timing=False).record()
            done.wait(origin.stream)  # what was read may be handed out again there

    def _mapped(self, bytes: int) -> np.ndarray[Any, Any]:
        """Memory of the host that kernels write to, all 0."""
        self.activate()
        return mapped_words(bytes)

    def post(self, pointer: int, array: np.ndarray[Any, Any]) -> None:
        """Copy a contiguous array to an address, before all work from now on; nobody waits."""
        self.pinned[0].write(pointer, array)

    def land(self, pointer: int, bytes: int) -> Any:
        """A Landing of the bytes that are at an address after all work so far."""
        return self.pinned[1].start(pointer, bytes)

    @property
    def pinned(self) -> Any:
        """Pinned memory for small copies: what leaves from (a Ring), what lands in (Landings)."""
        if self._pinned is None:
            from .pinned import Landings, Ring

            self._pinned = Ring(self), Landings(self)
        return self._pinned

    def copy_bytes(self, target: int, source: int, bytes: int, stream: Any = None) -> None:
        """Copy between addresses of this GPU, on the stream."""
        if bytes:
            self.activate()
            there = self.stream if stream is None else stream
            call("cuMemcpyDtoDAsync", target, source, bytes, there)

    def fill(self, buffer: Buffer, byte: int = 0) -> None:
        """Set every byte of a Buffer."""
        if buffer.bytes:
            self.activate()
            call("cuMemsetD8Async", buffer.pointer, byte, buffer.bytes, self.stream)

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes as the driver counts them."""
        self.activate()
        free, total = call("cuMemGetInfo")
        return int(free), int(total)

    def trim(self) -> None:
        """Give memory that nothing holds back to the driver (waits for the GPU)."""
        self.pool.trim()

    def persist(self, buffer: Buffer, ratio: float = 1.0) -> None:
        """Ask that a Buffer stays in the L2 cache while the stream's kernels read it."""
        self.activate()
        here = api()
        most = self.attributes["max_persisting_l2_cache_size"]
        limit = here.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE
        call("cuCtxSetLimit", limit, min(most, buffer.bytes))
        value = here.CUstreamAttrValue()
        window = value.accessPolicyWindow
        window.base_ptr = buffer.pointer
        window.num_bytes = min(buffer.bytes, self.attributes["max_access_policy_window_size"])
        window.hitRatio = float(ratio)
        window.hitProp = here.CUaccessProperty.CU_ACCESS_PROPERTY_PERSISTING
        window.missProp = here.CUaccessProperty.CU_ACCESS_PROPERTY_STREAMING
        value.accessPolicyWindow = window
        self._set_window(value)

    def _set_window(self, value: Any) -> None:
        kind = api().CUstreamAttrID.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW
        for stream in (self.stream, self.capture_stream):
            call("cuStreamSetAttribute", stream, kind, value)

    def end_persistence(self) -> None:
        """Let the L2 cache hold what it likes again."""
        self.activate()
        value = api().CUstreamAttrValue()
        window = value.accessPolicyWindow
        window.num_bytes = 0
        value.accessPolicyWindow = window
        self._set_window(value)
        call("cuCtxResetPersistingL2Cache")

    # ---- code -----------------------------------------------------------------------------

    def load(self, code: bytes | str) -> Module:
        """The module of a cubin, or of PTX text that the driver compiles; loaded once."""
        data = code.encode() if isinstance(code, str) else code
        return self.keep(content_key(data), data)

    def loaded(self, key: str) -> Module | None:
        """A module that is loaded under a key."""
        return self.modules.get(key)

    def keep(self, key: str, code: bytes) -> Module:
        """The module of machine code under a key; those asked for longest ago are let go."""
        with self.lock:
            found = self.modules.get(key)
            if found is None:
                self._unload()
                found = self.modules[key] = Module(self, code)
            return found

    def _unload(self) -> None:
        """Unload modules that nobody uses any more; kernels of theirs may be under way."""
        if self.retired:
            self.activate()
            call("cuStreamSynchronize", self.stream)
            while self.retired:
                call("cuModuleUnload", self.retired.popleft())

    def launcher(self, recipe: Recipe, code: Mapping[str, Any]) -> Any:
        """What runs a Recipe here: single launches, graphs, or step by step."""
        from .launcher import CudaLauncher

        return CudaLauncher(recipe, code, self)


# ---- launches -------------------------------------------------------------------------------


def launch_config(
    grid: Sequence[int],
    block: Sequence[int],
    shared: int,
    stream: Any,
    cluster: Sequence[int] = (),
    dependent: bool = False,
    cooperative: bool = False,
) -> Any:
    """A CUlaunchConfig; `dependent` lets the launch begin before what comes before has ended."""
    here = api()
    made = here.CUlaunchConfig()
    made.gridDimX, made.gridDimY, made.gridDimZ = three(grid)
    made.blockDimX, made.blockDimY, made.blockDimZ = three(block)
    made.sharedMemBytes, made.hStream = shared, stream
    attributes = []
    if cluster:
        one = here.CUlaunchAttribute()
        one.id = here.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = one.value.clusterDim
        size.x, size.y, size.z = three(cluster)
        attributes.append(one)
    if dependent:
        one = here.CUlaunchAttribute()
        one.id = here.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        one.value.programmaticStreamSerializationAllowed = 1
        attributes.append(one)
    if cooperative:
        one = here.CUlaunchAttribute()
        one.id = here.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        one.value.cooperative = 1
        attributes.append(one)
    made.attrs = attributes
    made.numAttrs = len(attributes)
    return made


def three(sizes: Sequence[int]) -> tuple[int, int, int]:
    """One to three sizes as x, y and z."""
    x, y, z = (*(int(s) for s in sizes), 1, 1, 1)[:3]
    return x, y, z


def launch(
    function: Function,
    grid: Sequence[int],
    block: Sequence[int] | int,
    arguments: Iterable[Any] = (),
    shared: int = 0,
    cluster: Sequence[int] = (),
    dependent: bool = False,
    cooperative: bool = False,
    stream: Any = None,
) -> None:
    """Launch once. Arguments: Buffers (their pointers), ints (64 bits), floats (32 bits), NumPy
    scalars (as they are), and bytes (as they are; 128 of them are a tensor map)."""
    device = function.device
    device.activate()
    function.allow(shared, cluster)
    block = (block,) if isinstance(block, int) else block
    stream = device.stream if stream is None else stream
    config_ = launch_config(grid, block, shared, stream, cluster, dependent, cooperative)
    packed = [pack(a) for a in arguments]
    memory, table = parameter_memory([len(p) for p in packed])
    for at, data in zip(table, packed):
        ctypes.memmove(at, data, len(data))
    start(function, config_, ctypes.addressof(table) if len(packed) else 0)
    del memory


def start(function: Function, config_: Any, table: int, captured: bool = False) -> None:
    """The launch itself, checked; in synchronous mode waits for it unless it is captured."""
    status = api().cuLaunchKernelEx(config_, function.handle, table, 0)[0]
    if status:
        shape = (
            f"grid {config_.gridDimX}x{config_.gridDimY}x{config_.gridDimZ}, "
            f"block {config_.blockDimX}x{config_.blockDimY}x{config_.blockDimZ}, "
            f"{config_.sharedMemBytes} bytes of shared memory"
        )
        fail("cuLaunchKernelEx", status, f"kernel {function.name}, {shape}")
    Recent.kernel = function.name
    if config().cuda_sync and not captured:
        call("cuStreamSynchronize", config_.hStream, during=f"kernel {function.name}")


def pack(argument: Any) -> bytes:
    """An argument as the bytes of a kernel parameter."""
    if isinstance(argument, Buffer):
        return struct.pack("<Q", argument.pointer)
    if isinstance(argument, np.generic):
        return argument.tobytes()
    if isinstance(argument, bool) or not isinstance(argument, (int, float, bytes)):
        raise InternalError("ptx driver", f"cannot pass {type(argument).__name__} to a kernel")
    if isinstance(argument, int):
        return struct.pack("<q" if argument < 0 else "<Q", argument)
    return struct.pack("<f", argument) if isinstance(argument, float) else argument


def parameter_memory(sizes: Sequence[int]) -> tuple[Any, Any]:
    """Memory for parameters of these sizes, and the table of their addresses; tensor maps are
    aligned to 128 bytes, the others to 16."""
    places, at = [], 0
    for size in sizes:
        unit = MAP_BYTES if size >= MAP_BYTES else 16
        at += -at % unit
        places.append(at)
        at += size
    memory, base = aligned(max(at, 16))
    return memory, (ctypes.c_uint64 * len(sizes))(*[base + p for p in places])


# ---- events ---------------------------------------------------------------------------------


class Event:
    """A point on a stream; two of them measure the time between."""

    __slots__ = ("device", "handle")

    def __init__(self, device: Device, timing: bool = True) -> None:
        self.device = device
        device.activate()
        self.handle = call("cuEventCreate", 0 if timing else 2)

    def record(self, stream: Any = None) -> Event:
        """Put the event on a stream, after all work so far; returns self."""
        self.device.activate()
        call("cuEventRecord", self.handle, self.device.stream if stream is None else stream)
        return self

    def record_within(self, stream: Any) -> None:
        """Let a graph that is being captured from a stream record the event at each launch."""
        call("cuEventRecordWithFlags", self.handle, stream, 1)  # external

    def synchronize(self) -> None:
        """Wait until the stream has come to the event."""
        call("cuEventSynchronize", self.handle)

    def wait(self, stream: Any) -> None:
        """Let a stream wait for the event."""
        call("cuStreamWaitEvent", stream, self.handle, 0)

    def seconds_since(self, earlier: Event) -> float:
        """Seconds between two recorded events; waits for this one."""
        self.synchronize()
        return float(call("cuEventElapsedTime", earlier.handle, self.handle)) * 1e-3

    def __del__(self) -> None:
        try:
            api().cuEventDestroy(self.handle)
        except Exception:
            return  # the interpreter is going down


def timed(device: Device, work: Any, repeats: int = 10, warmup: int = 2) -> list[float]:
    """Seconds of the GPU for each of `repeats` calls of `work`, after some that do not count."""
    for _ in range(warmup):
        work()
    events = [Event(device) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    events[-1].synchronize()
    return [b.seconds_since(a) for a, b in pairwise(events)]

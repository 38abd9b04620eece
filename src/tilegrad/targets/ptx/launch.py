"""Machine code on a GPU and its launches: modules, functions, and what the driver is told.

A Prepared is a launch of an Entry made ready once, so that repeating it costs only its pointers.
The parameters lie in one block of host memory; `point` writes the pointers (and the tensor maps
that hold them) in place and `start` gives the block to the driver, which copies it. Invariant:
between `point` and `start` nothing else may use a Prepared; its owner's lock sees to that; an error
names kernel, grid and block.

Modules are loaded from cubins or PTX text. A function is loaded whole when it is asked for, never
in the middle of a capture, and its limits are raised before a launch needs them, or the error names
kernel and limit. A module is unloaded when none of its functions is held any more, at the next
load.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...core.config import config
from ...core.errors import InternalError, UserError
from ...ir.symbol import evaluate
from .context import Context
from .cuda_api import Recent, api, call, describe, fail
from .maps import MAP_BYTES, Shape, aligned, encoded, shape_of
from .program import Entry


def launch_config(
    grid: Sequence[int],
    block: Sequence[int],
    shared: int,
    stream: Any,
    cluster: Sequence[int] = (),
    dependent: bool = False,
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
    made.attrs = attributes
    made.numAttrs = len(attributes)
    return made


def three(sizes: Sequence[int]) -> tuple[int, int, int]:
    """One to three sizes as x, y and z."""
    x, y, z = (*(int(s) for s in sizes), 1, 1, 1)[:3]
    return x, y, z


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


def parameter_memory(sizes: Sequence[int]) -> tuple[Any, Any]:
    """Memory for parameters of these sizes, and the table of their addresses; tensor maps are
    aligned to 128 bytes, the others to 16."""
    offsets, at = [], 0
    for size in sizes:
        unit = MAP_BYTES if size >= MAP_BYTES else 16
        at += -at % unit
        offsets.append(at)
        at += size
    memory, base = aligned(max(at, 16))
    return memory, (ctypes.c_uint64 * len(sizes))(*[base + p for p in offsets])


# ---- launches made ready ------------------------------------------------------------------------


class Prepared:
    """One Entry with its Symbols bound: a launch but for the pointers."""

    def __init__(
        self, function: Function, entry: Entry, symbols: Mapping[str, int] | None = None
    ) -> None:
        self.function, self.entry, self.symbols = function, entry, dict(symbols or {})
        self.grid = tuple(int(evaluate(s, self.symbols)) for s in entry.grid)
        self.empty = any(s == 0 for s in self.grid)
        sizes = [MAP_BYTES if kind == "map" else 8 for kind, _ in entry.arguments]
        self._memory, self._table = parameter_memory(sizes)
        self._pointers: list[tuple[Any, int]] = []  # (place, number of the parameter)
        self._maps: list[tuple[int, int, Shape]] = []  # (place, parameter, all but the address)
        for (kind, value), at in zip(entry.arguments, self._table):
            self._argument(kind, value, at)
        function.allow(entry.shared_bytes, entry.cluster)
        self.table = ctypes.addressof(self._table) if sizes else 0
        self.handle = function.handle
        stream = function.device.stream
        shape = (self.grid, (entry.threads,), entry.shared_bytes, stream, entry.cluster)
        self.config = launch_config(*shape)
        dependent = launch_config(*shape, dependent=True) if entry.dependent else self.config
        self.configs = self.config, dependent  # the second where the launch before is a kernel
        self.last: tuple[int, ...] | None = None

    def _argument(self, kind: str, value: Any, at: int) -> None:
        if kind == "pointer":
            self._pointers.append((ctypes.c_uint64.from_address(at), value))
        elif kind == "symbol":
            if value not in self.symbols:
                raise InternalError("ptx launch", f"{self.entry.name}: no value of Symbol {value}")
            ctypes.c_int64.from_address(at).value = self.symbols[value]
        elif kind == "map":
            if not self.empty:
                self._maps.append((at, value.parameter, shape_of(value, self.symbols)))
        else:
            raise InternalError("ptx launch", f"{self.entry.name}: argument of kind {kind!r}")

    def point(self, pointers: Sequence[int]) -> None:
        """Set the pointers of all Memory parameters, by number."""
        self.last = None
        for place, number in self._pointers:
            place.value = pointers[number]
        for at, number, shape in self._maps:
            ctypes.memmove(at, encoded(shape, pointers[number]), MAP_BYTES)

    def start(self, dependent: bool = False, captured: bool = False) -> None:
        """Launch with the pointers set, or on the stream that graphs are captured from;
        `dependent` where the one before is a kernel."""
        chosen, device = self.configs[dependent], self.function.device
        if self.empty:
            return
        chosen.hStream = device.capture_stream if captured else device.stream
        try:
            start(self.function, chosen, self.table, captured)
        finally:
            chosen.hStream = device.stream

    def launch(self, pointers: tuple[int, ...]) -> None:
        """Point and start, with the least work on the way."""
        if pointers != self.last:
            self.point(pointers)
            self.last = pointers
        if self.empty:
            return
        if config().cuda_sync:
            self.start()
            return
        status = api().cuLaunchKernelEx(self.config, self.handle, self.table, 0)[0]
        if status:
            self.start()  # again, for its message
        Recent.kernel = self.entry.name

    def node_parameters(self) -> Any:
        """The launch as parameters of a graph's kernel node."""
        made = api().CUDA_KERNEL_NODE_PARAMS()
        made.func = self.handle
        made.gridDimX, made.gridDimY, made.gridDimZ = three(self.grid)
        made.blockDimX, made.blockDimY, made.blockDimZ = self.entry.threads, 1, 1
        made.sharedMemBytes = self.entry.shared_bytes
        made.kernelParams = self.table
        return made


# ---- machine code -------------------------------------------------------------------------------


PLAIN_SHARED = 48 << 10  # dynamic shared memory that needs no leave
LOG_BYTES = 16 << 10
PORTABLE_CLUSTER = 8


class Module:
    """Loaded machine code, and its functions."""

    def __init__(self, device: Context, data: bytes) -> None:
        self.device = device
        # Whoever launches a function holds it, and it holds its module.
        self._functions: weakref.WeakValueDictionary[str, Function] = weakref.WeakValueDictionary()
        self.handle: Any = None
        device.activate()
        if data[:4] == b"\x7fELF":
            self.handle = call("cuModuleLoadData", data)
        else:
            self.handle = self._compiled(data)

    def _compiled(self, text: bytes) -> Any:
        """PTX text compiled by the driver; an error carries its log."""
        kinds = api().CUjit_option
        log = bytearray(LOG_BYTES)
        options = [kinds.CU_JIT_ERROR_LOG_BUFFER, kinds.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
        values = [log, LOG_BYTES]
        status, handle = api().cuModuleLoadDataEx(text + b"\0", len(options), options, values)
        if status:
            said = log.split(b"\0")[0].decode(errors="replace").strip()
            raise InternalError(
                "ptx driver", f"the driver cannot compile this PTX: {describe(status)}\n{said}"
            )
        return handle

    def __del__(self) -> None:
        if self.handle is not None:  # a collector may run in the middle of a capture
            self.device.retired.append(self.handle)

    def function(self, name: str) -> Function:
        """An entry by name."""
        found = self._functions.get(name)
        if found is None:
            found = self._functions[name] = Function(self, name)
        return found


class Function:
    """An entry of a module: handle, name and the shared memory it has of its own."""

    def __init__(self, module: Module, name: str) -> None:
        self.module, self.device, self.name = module, module.device, name
        self.device.activate()
        self.handle = call("cuModuleGetFunction", module.handle, name.encode(), during=name)
        call("cuFuncLoad", self.handle, during=name)  # now, not in the middle of a capture
        kind = api().CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        self._static = int(call("cuFuncGetAttribute", kind, self.handle, during=name))
        self._shared = PLAIN_SHARED
        self._wide = False

    def __repr__(self) -> str:
        return f"Function({self.name})"

    def allow(self, shared_bytes: int, cluster: Sequence[int] = ()) -> None:
        """Raise the limits of the function as far as a launch needs."""
        kinds = api().CUfunction_attribute
        if shared_bytes > self._shared:
            static = self._static
            limit = self.device.attributes["max_shared_memory_per_block_optin"] - static
            if shared_bytes > limit:
                raise UserError(
                    f"the kernel {self.name} needs too much shared memory",
                    op="launch",
                    expected=f"at most {limit} bytes on {self.device.attributes['name']}"
                    + (f" beside its own {static}" if static else ""),
                    got=f"{shared_bytes} bytes",
                    hint="smaller tiles or fewer stages",
                )
            kind = kinds.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call("cuFuncSetAttribute", self.handle, kind, shared_bytes, during=self.name)
            self._shared = shared_bytes
        if int(np.prod(cluster or (1,))) > PORTABLE_CLUSTER and not self._wide:
            kind = kinds.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            call("cuFuncSetAttribute", self.handle, kind, 1, during=self.name)
            self._wide = True

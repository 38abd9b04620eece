"""Launches: what the driver is told of one, and where the bytes of its parameters lie.

Invariant: after a launch `Recent.kernel` names it; an error names kernel, grid and block.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from ...core.config import config
from .cuda_api import Recent, api, call, fail
from .maps import MAP_BYTES, aligned
from .module import Function


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

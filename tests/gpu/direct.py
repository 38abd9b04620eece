"""One launch at a time, by hand: arguments packed here, and seconds by events of the GPU."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from tilegrad.core.errors import InternalError
from tilegrad.runtime.buffer import Buffer
from tilegrad.targets.ptx.context import Context, Event
from tilegrad.targets.ptx.launch import Function, launch_config, parameter_memory, start


def launch(
    function: Function,
    grid: Sequence[int],
    block: Sequence[int] | int,
    arguments: Iterable[Any] = (),
    shared: int = 0,
    cluster: Sequence[int] = (),
    dependent: bool = False,
    stream: Any = None,
) -> None:
    """Launch once. Arguments: Buffers (their pointers), ints (64 bits), floats (32 bits), NumPy
    scalars (as they are), and bytes (as they are; 128 of them are a tensor map)."""
    device = function.device
    device.activate()
    function.allow(shared, cluster)
    block = (block,) if isinstance(block, int) else block
    stream = device.stream if stream is None else stream
    config_ = launch_config(grid, block, shared, stream, cluster, dependent)
    packed = [pack(a) for a in arguments]
    memory, table = parameter_memory([len(p) for p in packed])
    for at, data in zip(table, packed):
        ctypes.memmove(at, data, len(data))
    start(function, config_, ctypes.addressof(table) if len(packed) else 0)
    del memory


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


def timed(device: Context, work: Any, repeats: int = 10, warmup: int = 2) -> list[float]:
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

"""Placement: which device a value is on, and moving values between devices.

A Node has no device; its leaves have: a Buffer is somewhere, and an input made with `device=`
has a home. What is computed from them is computed there. Python numbers, constants, small tables
of the library and Tensors without axes adapt to whatever they meet; what meets nothing goes to
the default device. Invariant: all leaves of a Graph that do not adapt are on one device, or
reading it is an error that names them; with no GPU in use nothing here costs anything.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..core.config import config, configure
from ..core.errors import UserError
from ..graph import ops
from ..ir.node import Node, topological
from ..runtime.buffer import HOST, Buffer
from ..runtime.device import device as opened
from ..runtime.device import device_name


class State:
    """Whether anything but the CPU was ever used in this process."""

    active: bool = False


state = State()
# The known values of Nodes. A Node with a Buffer is a leaf of every Graph that is run.
values: weakref.WeakKeyDictionary[Node, Buffer] = weakref.WeakKeyDictionary()
# Inputs that stand for another Node: they take its value when one is needed.
stand_ins: weakref.WeakKeyDictionary[Node, Node] = weakref.WeakKeyDictionary()
# Inputs without a value that must be computed on a device.
homes: weakref.WeakKeyDictionary[Node, str] = weakref.WeakKeyDictionary()


def use(device: Any, op: str) -> str:
    """The full name of a device that is about to be used; it is opened now if it is a GPU."""
    name = device_name(device, op)
    if name != HOST:
        opened(name)
        state.active = True
    return name


def elsewhere() -> bool:
    """Whether values may be on another device than the CPU."""
    return state.active or config().device != HOST


def default_device() -> str:
    """Where Tensors live that are made of nothing that has a device."""
    name = device_name(config().device, "TILEGRAD_DEVICE")
    if name != HOST and not state.active:
        use(name, "TILEGRAD_DEVICE")
    return name


def set_default_device(device: Any) -> None:
    """Make new Tensors live on a device: "cpu", "cuda" or "cuda:1"."""
    configure(device=use(device, "set_default_device"))


def get_default_device() -> str:
    """The device that new Tensors live on."""
    return default_device()


# ---- finding ---------------------------------------------------------------------------------


def adapts(node: Node, buffer: Buffer) -> bool:
    """Whether a known value goes to whatever device it meets."""
    return buffer.adapts or (buffer.device == HOST and (not node.shape or is_pure(node)))


def is_pure(node: Node) -> bool:
    """Whether a Node is computed of constants alone; equal ones are one Node everywhere."""
    return not any(n.op is ops.input_ for n in topological([node]))


def settled(nodes: Iterable[Node]) -> dict[str, Node]:
    """The devices of the leaves below some Nodes that do not adapt, each with one such leaf."""
    found: dict[str, Node] = {}
    seen: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        order = topological(waiting, stop=lambda n: n in values or n in seen)
        waiting = []
        for node in order:
            if node in seen:
                continue
            seen.add(node)
            buffer = values.get(node)
            if buffer is not None:
                if not adapts(node, buffer):
                    found.setdefault(buffer.device, node)
            elif node in homes:
                found.setdefault(homes[node], node)
            elif node in stand_ins:
                waiting.append(stand_ins[node])
    return found


def common_device(
    nodes: Iterable[Node], fallback: str | None = None, op: str = "read", location: Any = None
) -> str:
    """The one device of some Nodes (or the fallback, or the default); an error if there are
    several."""
    found = settled(nodes)
    if len(found) > 1:
        shown = ", ".join(f"{leaf.type} on {device}" for device, leaf in found.items())
        one = next(device for device in found if device != HOST)
        raise UserError(
            "Tensors on different devices cannot be used together",
            op=op,
            expected="all of them on one device",
            got=shown,
            location=location,
            hint=f'move them first: x.to("{one}")',
        )
    if found:
        return next(iter(found))
    return default_device() if fallback is None else fallback


def check_device(device: str, node: Node, name: str) -> None:
    """Refuse a Tensor on another device than the jitted function `name` runs on."""
    found = next((d for d in settled([node]) if d != device), None)
    if found is not None:
        raise UserError(
            f"the jitted function {name} runs on {device} and uses a Tensor on {found}",
            op="jit",
            expected=f"Tensors on {device}",
            got=f"{node.type} on {found}",
            hint=f'move it first: x.to("{device}")',
        )


def is_stored(node: Node) -> bool:
    """Whether a Node is weights of a file: `unpack` of bytes that stay there (see `stored`)."""
    if node.op is not ops.unpack:
        return False
    buffer = values.get(node.inputs[0])
    return buffer is not None and buffer.is_source


def tag(node: Node) -> str:
    """What a signature says of a Node's device: its name, empty on the CPU or where it adapts."""
    buffer = values.data.get(weakref.ref(node))  # type: ignore[attr-defined]
    if buffer is not None:
        return "" if buffer.device == HOST else buffer.device
    name = next(iter(settled([node])), "")
    return "" if name == HOST else name


# ---- moving ----------------------------------------------------------------------------------


def moved(buffer: Buffer, device: str) -> Buffer:
    """The same bytes in a Buffer on a device (itself if it is there, or is prepared there)."""
    if buffer.device == device or buffer.is_source:
        return buffer
    if device == HOST:
        return Buffer.wrap(on_host(buffer, (buffer.bytes,), np.uint8))
    return opened(device).receive(buffer)


def on_host(buffer: Buffer, shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
    """The values of a Buffer as a NumPy array, copied if they are on a GPU."""
    if buffer.device == HOST:
        return buffer.array(tuple(shape), dtype)
    return opened(buffer.device).download(buffer, shape, dtype)


def copy_of(buffer: Buffer) -> Buffer:
    """A Buffer of its own with the same bytes, where the first one is."""
    if buffer.device != HOST:
        return opened(buffer.device).copy(buffer)
    fresh = Buffer.allocate(buffer.bytes, buffer.label)
    shape = (buffer.bytes,)
    fresh.array(shape, np.uint8)[...] = buffer.array(shape, np.uint8)
    return fresh


def synchronize(device: Any = None) -> None:
    """Wait until a GPU (the default one if none is named) has done all its work."""
    name = default_device() if device is None else use(device, "synchronize")
    if name != HOST:
        opened(name).synchronize()

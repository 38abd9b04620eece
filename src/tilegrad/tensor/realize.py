"""Giving Nodes values: the Buffers that are known, and `compute`, which runs what is not.

Invariant: a Node never changes its value; a value is kept as long as its Node lives and no
longer. Nothing here knows of Tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..core.dtype import DType, dtype_of
from ..core.errors import TraceError
from ..graph import build, ops
from ..ir.node import Node, topological
from ..ir.symbol import Size
from ..runtime.buffer import BIG_BYTES, HOST, Buffer
from .placement import common_device, elsewhere, homes, is_pure, is_stored, moved, stand_ins, values


def own_node(node: Node, device: str | None = None) -> Node:
    """A fresh input that takes the Node's value when one is needed, computed on `device`."""
    fresh = build.input_(node.shape, node.dtype)
    if node in values and not is_pure(node):  # a constant may be wanted elsewhere than it is known
        buffer = values[node]
        values[fresh] = buffer if device is None else _kept_on(buffer, device)
    else:
        stand_ins[fresh] = stand_ins.get(node, node)
        if device is not None:
            homes[fresh] = device
    return fresh


def _kept_on(buffer: Buffer, device: str) -> Buffer:
    """The value on a device, which it does not leave any more."""
    there = moved(buffer, device)
    return there.part(0, there.bytes) if there.adapts else there


def from_array(array: np.ndarray[Any, Any], adapts: bool = True) -> Node:
    """An input Node that shares the array's memory (copied if not contiguous); it goes to any
    device it is needed on if it adapts, as tables and lists do, but a person's Tensors do not."""
    dtype = dtype_of(array.dtype)
    node = build.input_(tuple(array.shape), dtype)
    buffer = values[node] = Buffer.wrap(np.ascontiguousarray(array).reshape(array.shape))
    buffer.adapts = adapts
    return node


def copy_of(array: np.ndarray[Any, Any], dtype: Any) -> np.ndarray[Any, Any]:
    """A contiguous copy; a large one in memory of the pool: whole lines, on huge pages."""
    bytes = array.size * np.dtype(dtype).itemsize
    if bytes < BIG_BYTES:
        return array.astype(dtype, order="C")
    found = Buffer.allocate(bytes).array(array.shape, dtype)
    found[...] = array
    return found


def from_buffer(buffer: Buffer, shape: tuple[Size, ...], dtype: DType) -> Node:
    """An input Node on a Buffer."""
    node = build.input_(shape, dtype)
    values[node] = buffer
    return node


def by_device(wanted: Sequence[Node], device: str | None) -> dict[str, list[Node]]:
    """Nodes by the device that each is to be computed on."""
    found: dict[str, list[Node]] = {}
    for node in wanted:
        name = common_device([node], device, location=node.location)
        found.setdefault(name, []).append(node)
    return found


def compute(wanted: Sequence[Node], device: str | None = None) -> None:
    """Run the Graph below the Nodes and keep their values."""
    if not wanted:
        return
    if device is None and elsewhere():
        device = common_device(wanted, location=wanted[0].location)
    for layer in _layers(wanted, _usable_on(device or HOST)):
        _run([s for s in dict.fromkeys(stand_ins[n] for n in layer) if s not in values], device)
        _fill(layer, device)
    _run(wanted, device)


def _run(wanted: Sequence[Node], device: str | None) -> None:
    """Run the Graph below Nodes whose inputs all have values."""
    known = _usable_on(device or HOST)
    wanted = [n for n in wanted if not known(n)]
    if not wanted:
        return
    order = topological(wanted, stop=known)
    while anew := _extremes_to_recompute(order, known):
        known = _without(known, anew)
        order = topological(wanted, stop=known)
    inputs = [n for n in order if known(n) or n.op is ops.input_]
    from ..compiler.loader import executable_on_numbers  # the compiler loads when first needed

    executable, numbers = executable_on_numbers(inputs, wanted, device or HOST)
    given = [*(values[n] for n in inputs), *numbers]
    if device is not None:
        given = [moved(buffer, device) for buffer in given]
    buffers = executable.run(given)
    for node, buffer in zip(wanted, buffers):
        values[node] = buffer


def _extremes_to_recompute(order: Sequence[Node], known: Callable[[Node], bool]) -> set[Node]:
    """Known maxima and minima that are compared with operands which are not known.

    A derivative asks which operand equals the extreme. Another Graph may round the operands
    otherwise, and then none does; so the extreme is computed anew beside them.
    """
    found: set[Node] = set()
    for node in order:
        if node.op is ops.equal and not known(node):
            for side in node.inputs:
                path = [side]  # what is known may be the extreme, or that with its axes kept
                while path[-1].op.category == "movement" or path[-1].op is ops.gather:
                    path.append(path[-1].inputs[0])
                if _is_extreme(path[-1]) and not all(map(known, path[-1].inputs)):
                    found.update(filter(known, path))
    return found


def _is_extreme(node: Node) -> bool:
    """Whether each element of a Node is one of its operand's."""
    kind = node.attrs.get("kind") or node.attrs.get("mode")
    return node.op in (ops.max_, ops.min_) or kind in ("max", "min")


def _without(known: Callable[[Node], bool], nodes: set[Node]) -> Callable[[Node], bool]:
    """Whether a Node is known and none of these."""
    return lambda node: node not in nodes and known(node)


def _layers(wanted: Sequence[Node], usable: Callable[[Node], bool]) -> list[list[Node]]:
    """The inputs below the Nodes that stand for others, in layers: what one stands for needs
    inputs of the layers before alone."""

    def below(nodes: Sequence[Node]) -> list[Node]:
        order = topological(nodes, stop=lambda n: usable(n) or n in values)
        found = [n for n in order if n.op is ops.input_ and n not in values]
        for node in found:
            if node not in stand_ins:
                raise unknown_value(wanted[0])
        return found

    depth: dict[Node, int] = {}
    needed: dict[Node, list[Node]] = {}
    stack = below(wanted)
    while stack:
        node = stack[-1]
        if node in depth:
            stack.pop()
        elif node not in needed:
            needed[node] = below([stand_ins[node]])
            stack += needed[node]
        else:
            depth[node] = 1 + max([depth[n] for n in needed[node]], default=-1)
    layers: list[list[Node]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for node, at in depth.items():
        layers[at].append(node)
    return layers


def _fill(inputs: Sequence[Node], device: str | None) -> None:
    """Give inputs that stand for other Nodes the values of these."""
    sources = [stand_ins.pop(n) for n in inputs]
    for node, source in zip(inputs, sources):
        home = homes.pop(node, None) or device
        values[node] = values[source] if home is None else _kept_on(values[source], home)
    for source in sources:
        shared = device not in (None, HOST) and is_pure(source)  # by Graphs for any device
        if shared or is_stored(source):  # weights of a file are for who asked alone
            values.pop(source, None)


def _usable_on(device: str) -> Callable[[Node], bool]:
    """Whether a Node's value is known for a Graph that runs on a device: what is computed of
    constants alone is one Node everywhere, so its value elsewhere says nothing here."""

    def usable(node: Node) -> bool:
        buffer = values.get(node)
        return buffer is not None and (buffer.device == device or not is_pure(node))

    return usable


def unknown_value(node: Node) -> TraceError:
    """The error for reading what has no value now."""
    return TraceError(
        "the value of a Tensor was read inside a jitted function (or kept from inside of one)",
        op="read",
        expected="code that does not depend on the values of Tensors",
        got=f"a traced Tensor {node.type}",
        hint="use where()/cond() in place of a Python branch, or mark the argument static",
    )


__all__ = [
    "by_device",
    "compute",
    "from_array",
    "from_buffer",
    "own_node",
    "stand_ins",
    "unknown_value",
    "values",
]

"""Batch a kernel: one more grid axis, along which the arguments that have a batch are taken.

Every program of the new first axis sees its own part of the batched Memories; arguments without
a batch are shared. Invariant: program (i, ...) of the new Body does to example i what program
(...) of the old one did.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.errors import InternalError
from ..ir.node import Node
from ..ir.symbol import Size
from ..ir.types import Memory, product
from . import ops
from .build import Body, BodyBuilder, copy_block
from .callee import Launches

INDEXED = {"load": 1, "store": 2, "matrix_load": 1, "matrix_store": 2}  # first index input
OFFSET = {"gather": 1, "scatter": 2, "atomic_add": 2}  # input with linear offsets


def batched_launches(launches: Launches, flags: Sequence[bool], size: Size) -> Launches:
    """The launches of a kernel over a batch; `flags` says which arguments have the batch."""
    found = []
    for body, roles in launches:
        own = [kind == "store" or flags[place] for kind, place in roles]
        found.append((_Batcher(body, own, size).run(), roles))
    return tuple(found)


class _Batcher:
    def __init__(self, body: Body, flags: Sequence[bool], size: Size) -> None:
        self.body, self.size = body, size
        given = [
            (p.attrs["name"], _with_batch(p.type, size) if on else p.type)
            for p, on in zip(body.parameters, flags)
        ]
        self.b = BodyBuilder(body.name, given)  # type: ignore[arg-type]
        self.batched = {p for p, on in zip(body.parameters, flags) if on}

    def run(self) -> Body:
        self.number = self.b.add(ops.program(axis=0))
        copy_block(self.b, self.body.block, self.b.parameters, self.node)
        return self.b.finish((self.size, *self.body.grid), **self.body.notes)

    def node(self, b: BodyBuilder, node: Node, inputs: tuple[Node, ...]) -> Node | None:
        """An op that says which program it is of, or touches a batched Memory."""
        attrs = dict(node.attrs)
        if node.op is ops.program:
            attrs["axis"] += 1
        elif node.inputs and node.inputs[0] in self.batched:
            inputs, attrs = self.memory(node, inputs, attrs)
        else:
            return None
        return node.op.make(inputs, attrs, location=node.location)

    def memory(
        self, node: Node, inputs: tuple[Node, ...], attrs: dict[str, Any]
    ) -> tuple[tuple[Node, ...], dict[str, Any]]:
        """An op on a batched Memory: this program's number leads its index."""
        name = node.op.name
        if name in INDEXED:
            first = INDEXED[name]
            if "axes" in attrs:
                attrs["axes"] = tuple(a + 1 for a in attrs["axes"])
            return (*inputs[:first], self.number, *inputs[first:]), attrs
        if name in OFFSET:
            place = OFFSET[name]
            type_ = node.inputs[0].type
            assert isinstance(type_, Memory)
            stride = self.b.index(product(type_.shape))
            start = self.b.apply("multiply", self.number, stride)
            moved = self.b.apply("add", inputs[place], start)
            return (*inputs[:place], moved, *inputs[place + 1 :]), attrs
        if name == "prefetch":
            return (inputs[0], self.number, *inputs[1:]), attrs
        raise InternalError("tile.batch", f"no batch of {node.op}")


def _with_batch(type_: Any, size: Size) -> Memory:
    strides = type_.strides
    if strides is not None:
        strides = (product(type_.shape), *strides)
    return Memory((size, *type_.shape), type_.dtype, type_.scope, type_.use, strides, type_.layout)

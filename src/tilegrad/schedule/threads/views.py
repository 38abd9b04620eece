"""Views: a parameter of a Body seen with other axes, strides and any size.

Invariant: views are named after the parameters they stand for (`Viewed.numbers`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...ir.block import argument
from ...ir.node import Node
from ...ir.symbol import Size, high, low
from ...ir.types import Memory
from ...tile.build import Body, BodyBuilder
from ...tile.row import memory_of

FAR = 1 << 40  # the size of a view's axis whose bounds the offset itself keeps


class Viewed(BodyBuilder):
    """Builds a Body whose parameters may be seen through several Memory types."""

    def __init__(self, name: str, parameters: Sequence[tuple[str, Memory]]) -> None:
        super().__init__(name, parameters)
        self.views: dict[Any, Node] = {}
        self.numbers: list[int] = list(range(len(self.parameters)))

    def view(self, memory: Node, strides: tuple[Size, ...]) -> Node:
        """The parameter with other axes: strides in elements, any size."""
        name = f"{memory.attrs['name']}_{len(self.views)}"
        return self._seen(memory, strides, name, (FAR,) * len(strides), strides)

    def matrix(self, memory: Node, shape: tuple[Size, ...], strides: tuple[Size, ...]) -> Node:
        """The parameter as a matrix (or a batch of them) of a given shape."""
        name = f"{memory.attrs['name']}_matrix"
        return self._seen(memory, (shape, strides), name, shape, strides)

    def _seen(
        self, memory: Node, how: Any, name: str, shape: tuple[Size, ...], strides: tuple[Size, ...]
    ) -> Node:
        if (memory, how) not in self.views:
            old = memory.type
            assert isinstance(old, Memory)
            made = argument(name, Memory(shape, old.dtype, old.scope, old.use, strides))
            self.views[memory, how] = made
            self.builder.known[0].add(id(made))  # it is an argument of the outermost Block
        return self.views[memory, how]

    def finish(self, grid: Sequence[Size], **notes: Any) -> Body:
        """Close the Block; `numbers` says which parameter each of the Body's stands for.

        Inputs come first in their order, then their other views, then results.
        """
        body = super().finish(grid, **notes)
        if body.block.find("scatter"):
            body.notes["distinct"] = True  # no element is written twice
        used = {id(i) for node in body.block.all_nodes() for i in node.inputs}
        seen_as: list[list[Node]] = []
        for own in self.parameters:
            found = [own] + [v for (m, _), v in self.views.items() if m is own]
            seen_as.append([f for f in found if id(f) in used] or [own])
        uses = [memory_of(p).use for p in self.parameters]
        last = [n for n, use in enumerate(uses) if use in ("result", "state")]
        first = [n for n in range(len(self.parameters)) if n not in last]
        ordered = [(n, seen_as[n][0]) for n in first]
        ordered += [(n, v) for n in first for v in seen_as[n][1:]]
        ordered += [(n, v) for n in last for v in seen_as[n]]
        body.block.arguments = tuple(node for _, node in ordered)
        self.numbers = [number for number, _ in ordered]
        return body


def seen_along(body: Viewed, memory: Node, axes: list[tuple[Size, Size]], start: Size) -> Any:
    """A parameter seen along axes of (stride, base), `start` elements further on."""
    strides, index = [s for s, _ in axes], [base for _, base in axes]
    if strides == [1]:
        return memory, (index[0] + start,)
    constant = start if isinstance(start, int) else start.constant
    if constant < 0 and low(start - constant) >= 0:
        strides, index = [*strides, -1], [*index, -constant]  # back, by an axis of its own
        start = start - constant
    elif low(start) < 0 < high(start):  # whole steps of an axis may be negative
        for n, s in enumerate(strides):
            rest = start % s
            if isinstance(rest, int):
                index[n] = index[n] + start // s
                start = rest
                break
        else:
            return None
    if low(start) < 0:
        strides, index = [*strides, -1], [*index, start * -1]
    elif 1 in strides:
        at = strides.index(1)
        index[at] = index[at] + start
    elif start != 0:
        strides, index = [*strides, 1], [*index, start]
    return body.view(memory, tuple(strides)), tuple(index)

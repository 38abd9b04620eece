"""A Body under construction: parameters with what each stands for, a builder and an evaluator.

Every lowering begins its Bodies so, and ends each with the one record of what it gives (`Made`).
Invariant: the role of a parameter is set where the parameter is, and stays with it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from ..ir.node import Node
from ..ir.symbol import Size
from ..ir.types import Array, Memory, product
from ..tile.build import Body, BodyBuilder
from .access import Index, offset_of, unravel
from .evaluate import Evaluator
from .family import Made
from .region import Region


@dataclass(frozen=True)
class Parameter:
    """A parameter of a Body: its name, its Memory, what it stands for and the value it holds."""

    name: str
    memory: Memory
    role: tuple[str, Any]
    node: Node | None = None


def memory_of(node: Node, use: str = "value") -> Memory:
    """The Memory of a stored value: its elements in one line."""
    return Memory((node.size,), node.dtype, "global", use)


def reads(nodes: Sequence[Node], constants: Container[Node] = ()) -> list[Parameter]:
    """What a Body reads."""
    return [
        Parameter(f"in{i}", memory_of(n, "constant" if n in constants else "value"), ("read", i), n)
        for i, n in enumerate(nodes)
    ]


def results(nodes: Sequence[Node]) -> list[Parameter]:
    """What a Body stores."""
    return [
        Parameter(f"out{i}", memory_of(n, "result"), ("store", i), n) for i, n in enumerate(nodes)
    ]


def scratch(types: Iterable[tuple[str, Array]], use: str = "value") -> list[Parameter]:
    """Named scratch that launches hand to one another; `use` as this Body uses it."""
    return [
        Parameter(name, Memory(t.shape, t.dtype, "global", use), ("scratch", (t, name)))
        for name, t in types
    ]


def state(node: Node) -> Parameter:
    """The state that a Body writes in place."""
    return Parameter("state", memory_of(node, "state"), ("state", 0))


class Sheet:
    """A Body under construction."""

    b: BodyBuilder
    e: Evaluator
    builder: type[BodyBuilder] = BodyBuilder
    evaluator: type[Evaluator] = Evaluator

    def __init__(self, name: str, parameters: Sequence[Parameter]) -> None:
        self.roles = [p.role for p in parameters]
        self.b = self.builder(name, [(p.name, p.memory) for p in parameters])
        self.inputs: dict[Node, Node] = {}
        self.outputs: dict[Node, Node] = {}
        self.others: dict[str, Node] = {}  # scratch and states, by name
        for p, memory in zip(parameters, self.b.parameters):
            if p.node is None:
                self.others[p.name] = memory
            else:
                (self.inputs if p.role[0] == "read" else self.outputs)[p.node] = memory
        self.e = self.evaluator(self.b, self.inputs)

    @classmethod
    def of(cls, region: Region, *more: Parameter) -> Self:
        """The Body of a Region: what it reads, what it stores, and more."""
        return cls(region.name, [*reads(region.inputs), *results(region.arrays), *more])

    def programs(self, *sizes: Size) -> tuple[Size, Index]:
        """A program for each index of some sizes, the last of which changes first: (grid, the
        program's own index)."""
        grid = product(sizes)
        return grid, unravel(self.b.program(0, grid), sizes)

    def write(self, node: Node, index: Index) -> None:
        """Evaluate a value at an index and store it there."""
        x = self.e.value(node, index)
        self.e.store(self.outputs[node], x, offset_of(node, index))

    def end(self, grid: Size, **notes: Any) -> Made:
        """Close the Body."""
        return self.made(self.b.finish((grid,), **notes))

    def made(self, body: Body) -> Made:
        """A Body that the builder has closed, with the roles of its parameters."""
        return Made(body, [self.roles[n] for n in self.numbers()])

    def numbers(self) -> Sequence[int]:
        """For each parameter of the closed Body the one that it was begun with."""
        return range(len(self.roles))

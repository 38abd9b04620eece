"""Functions whose derivatives are given in what they returned: nothing is computed twice.

The rules are those of kernels: rule(inputs, outputs, moved) on tuples of Tensors. A function
with only a forward rule has the transpose of it as its reverse one. Invariant: inputs and outputs
are flat; arguments that are no Tensors are part of the function, not of the derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...graph import build
from ...ir.node import Node
from ..custom import Call
from ..tensor import Tensor, wrap
from ..transforms import inside_transform

Rule = Callable[..., Any]


class Derived:
    """A function of Tensors, then of plain values, with the rules of its derivatives."""

    def __init__(self, function: Rule, forward: Rule, reverse: Rule | None = None) -> None:
        self.function, self.forward, self.reverse = function, forward, reverse

    def __call__(self, *args: Any) -> Any:
        """The function's result: one Tensor or a tuple of them."""
        call = Call(args)
        plain = [x for x in call.leaves if not isinstance(x, Tensor)]
        rules = _Rules(self, plain, len(call.nodes))
        nodes = build.custom(lambda xs: call.apply(self.function, xs), call.nodes, rules)
        return call.finish(nodes)


class _Rules:
    """What the Graph asks of a custom Node."""

    def __init__(self, owner: Derived, plain: Sequence[Any], count: int) -> None:
        self.owner, self.plain = owner, plain
        self.count = count  # of the arguments; what the function captured comes after them
        self.vjp = None if owner.reverse is None else self._vjp

    def _vjp(self, inputs: list[Node], outputs: list[Node], moved: list[Any]) -> list[Any]:
        return self._run(self.owner.reverse, inputs, outputs, moved, inputs[: self.count])

    def jvp(self, inputs: list[Node], outputs: list[Node], moved: list[Any]) -> list[Any]:
        """Tangents of the outputs."""
        return self._run(self.owner.forward, inputs, outputs, moved[: self.count], outputs)

    def _run(
        self,
        rule: Any,
        inputs: Sequence[Node],
        outputs: Sequence[Node],
        moved: Sequence[Any],
        like: Sequence[Node],
    ) -> list[Any]:
        with inside_transform():
            own = _tensors(inputs[: self.count])
            found = rule(own, _tensors(outputs), _tensors(moved), *self.plain)
        return [None if f is None else build.cast(f.node, n.dtype) for f, n in zip(found, like)]


def _tensors(nodes: Sequence[Node | None]) -> tuple[Any, ...]:
    return tuple([None if n is None else wrap(n) for n in nodes])

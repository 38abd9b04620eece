"""Evaluate exponentials: quick ones where that is enough, exp(x - max) as a power of two.

exp(x - shift) is 2**(x factor - level): one multiply-add and one exponential an element, where a
shift belongs to many. The level's rounding is the same for all of them: it cancels where they are
divided by their sum, and is no more than the shift's own where the shift is added to the sum's
logarithm. A sum that is looked at alone is off by 2**-24 of the shift.

Invariant: what rests on one shift, in any kernel, is computed with the same factor and level.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from ...core.dtype import float32
from ...graph import ops
from ...ir.node import Node, walk
from ...tile.build import BodyBuilder
from ..access import MOVEMENT, Index
from ..evaluate import Evaluator

LOG2_E = 1.4426950408889634
VAST = 2.0**31  # from here on two floats are equal, or at least 128 apart

CHOICES = 64  # values looked at that a largest one may be among
QUICK = {ops.exp: "quick_exp", ops.reciprocal: "quick_reciprocal", ops.divide: "quick_divide"}


def below_largest(node: Node) -> bool:
    """Whether an exp is of x - max(x): at most 1, and an error in it weighs as it does."""
    x = node.inputs[0]
    return x.op is ops.subtract and _is_largest(x.inputs[1])


def _is_largest(node: Node) -> bool:
    """Whether a value is a largest one, or chosen between that and others."""

    def step(current: Node) -> Sequence[Node]:
        if current.op in MOVEMENT or current.op is ops.stop_gradient:
            return current.inputs
        return current.inputs[1:] if current.op is ops.where else ()

    return any(n.op is ops.max_ for n in islice(walk([node], step), CHOICES))


class ExponentEvaluator(Evaluator):
    """Evaluates exponentials, reciprocals and quotients as exactly as they are seen."""

    def __init__(self, body: BodyBuilder, memories: dict[Node, Node]) -> None:
        super().__init__(body, memories)
        self.rounded: set[Node] = set()  # values of which only 16 bits are ever seen

    def tile_op(self, node: Node) -> str:
        """The quick form where the result is rounded to 16 bits, or weighed by its own size."""
        quick = QUICK.get(node.op)
        if quick is None or not node.dtype.is_float:
            return node.op.name
        rounded = node.dtype.bits <= 16 or node in self.rounded
        return quick if rounded or (node.op is ops.exp and below_largest(node)) else node.op.name

    def _value(self, node: Node, index: Index) -> Node:
        """exp of a difference from a largest value that a row has one of."""
        if self._shifted(node):
            x, shift = (self.value(i, index) for i in node.inputs[0].inputs)
            if x.dtype is shift.dtype is float32 and shift.shape[-1:] in ((), (1,)):
                return self.raised(x, *self.exponent(shift))
        return super()._value(node, index)

    def exponent(self, shift: Node) -> tuple[Node, Node]:
        """(factor, scaled shift) so that exp(x - shift) is 2**(x factor - scaled shift). Of a vast
        shift it is 1 or nothing: there the factor is 1, as no product would be exact enough."""
        b, dtype = self.body, shift.dtype
        if dtype is not float32:
            return b.constant(1.0, dtype, shift.shape), shift
        near = b.apply("less", b.apply("absolute", shift), VAST)
        factor = b.where(near, b.constant(LOG2_E, dtype), 1.0)
        return factor, b.apply("multiply", shift, factor)

    def power(self, x: Node) -> Node:
        """A difference of scaled shifts as a factor."""
        return self.body.apply("quick_exp2" if x.dtype is float32 else "quick_exp", x)

    def raised(self, x: Node, factor: Node, scaled_shift: Node) -> Node:
        """exp(x - shift), given what `exponent` gives of the shift."""
        if x.dtype is not float32:
            return self.power(self.body.apply("subtract", x, scaled_shift))
        return self.power(
            self.body.apply("multiply_add", x, factor, self.body.apply("negative", scaled_shift))
        )

    def _shifted(self, node: Node) -> bool:
        """Whether a Node is a quick exp of x - max(x), and the difference is its own."""
        return (
            node.op is ops.exp
            and node not in self.memories
            and below_largest(node)
            and node.inputs[0] not in self.memories
        )

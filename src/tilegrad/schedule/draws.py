"""Families of drawing tokens: how many tokens of a row a program takes at a time.

A block of threads takes many and shares them out; a thread with vectors takes a few, and looks
whether a block has any token before it counts places. Invariant: which token is drawn does not
depend on the Target, but for how sums are rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.target import Target
from ..graph import ops
from ..ir.node import Node
from ..ir.symbol import Size, high
from ..kernels import draw as kernels
from ..tile.define import Definition
from ..tile.plan import Plan
from .chosen import Chosen, Surroundings
from .family import Offer

PARTS, PART = 16, 4096  # programs that share a row at most, tokens that each takes at least
SOME = 4  # programs that share a row where there may be few rows or many
# Tokens of a row that a program takes at a time, where it is one thread: one vector, which stays in
# a register between ops; of more, each op is a loop through memory (slower, and three times as long
# to compile).
OF_VECTORS = 16
FEWEST_TOKENS, MOST_TOKENS = 256, 4096  # the same, of a block of threads
EACH = 256  # tokens that a warp takes
RACING = 2  # a draw takes so many times fewer of both: lists are short


class Draws(Chosen):
    """Rows of many tokens: the largest, what a list adds to, and one drawn."""

    def replacements(
        self, node: Node, inputs: Sequence[Node], offer: Offer, near: Surroundings, target: Target
    ) -> list[Node]:
        """One launch, or two for a draw."""
        columns = high(node.inputs[0].shape[1])

        def call(definition: Definition, given: Sequence[Node], **static: Any) -> list[Node]:
            plan, block = Plan(), OF_VECTORS
            if target.has_threads:
                fewer = RACING if definition is kernels.draw else 1
                found = min(MOST_TOKENS, max(FEWEST_TOKENS, 1 << (columns - 1).bit_length()))
                plan, block = Plan().with_(warps=found // EACH), found // fewer
            return near.launch(definition, given, plan, target, block=block, **static)

        if node.op is ops.top_k:
            return call(kernels.largest, inputs, **node.attrs)
        if node.op is ops.add_listed:
            return call(kernels.biased, inputs)
        parts = self.parts(node.inputs[0].shape[0], columns, target)
        found = call(kernels.pick, inputs, parts=parts, skip=not target.has_threads, **node.attrs)
        p, floats, _, seeds, slots, positions = inputs
        return call(kernels.draw, [p, *found, floats, seeds, slots, positions], **node.attrs)

    def parts(self, rows: Size, columns: int, target: Target) -> int:
        """Programs that share a row: a power of two, more where rows are few."""
        programs = target.cores or 1
        most = programs // max(1, high(rows))
        if not isinstance(rows, int):
            most = max(most, min(SOME, programs))
        most = min(most, PARTS, columns // PART)
        return 1 << max(0, most.bit_length() - 1)

"""Many tokens times quantised rows on a GPU: weights are taken apart on their way to a product.

A program computes a tile of tokens by rows. For each step of columns its threads take apart the
groups they hold (asked for a step ahead), lay the values down in shared memory in x's dtype
beside the tile of x, and multiply by the matrix units. Weights are read packed, once for each
block of tokens, mostly from L2. Values are rounded to x's dtype, as those of a model that is
stored in it would be; sums are float32. float32 tokens are multiplied as float32.

Invariant: the order of every sum depends on the shape and the Plan alone; tokens past the end
are neither read nor written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.dtype import float32, int64
from ...core.errors import InternalError
from ...ir.node import Node
from ...ir.symbol import Size, ceil_divide, minimum
from ...ir.types import Memory
from ...tile import ops, placed
from ...tile.build import Body, BodyBuilder
from .gpu_layout import (
    BLOCK,
    GROUP,
    ROWS,
    Groups,
    groups_of,
    part_parameters,
)
from .shape import QuantisedShape, padded


@dataclass(frozen=True)
class MatrixPlan:
    """Choices of `many_tokens`."""

    tokens: int = 64  # of a tile
    rows: int = 128
    groups: int = 2  # of a step of columns
    warps: int = 8


def many_tokens(shape: QuantisedShape, plan: MatrixPlan, name: str = "quantised_matrix") -> Body:
    """The kernel: x (tokens, columns), the parts, out (tokens, rows)."""
    return _Matrix(shape, plan, name).build()


class _Matrix:
    """Builds the Body of `many_tokens`."""

    def __init__(self, shape: QuantisedShape, plan: MatrixPlan, name: str) -> None:
        self.shape, self.plan = shape, plan
        self.b = b = BodyBuilder(
            name,
            [
                ("x", Memory((shape.tokens, shape.columns), shape.dtype)),
                *part_parameters(shape),
                ("out", Memory((shape.tokens, shape.rows), shape.dtype, use="result")),
            ],
        )
        self.input, self.out = b.parameters[0], b.parameters[-1]
        self.weights = Groups(b, shape, b.parameters[1:-1])
        self.groups, self.rows = groups_of(shape), padded(shape.rows, ROWS)
        if BLOCK % plan.groups or self.rows % plan.rows:
            raise InternalError("kernels.quantised", f"{plan} does not fit {shape}")

    def build(self) -> Body:
        """Step by step along the columns, then write."""
        b, plan = self.b, self.plan
        blocks = ceil_divide(self.shape.tokens, plan.tokens)
        self.row = b.program(0, self.rows // plan.rows) * plan.rows
        self.token = b.program(1, blocks) * plan.tokens
        self.wide = plan.groups * GROUP
        last = self.groups - plan.groups
        while last * GROUP >= self.shape.columns:
            last -= plan.groups  # groups that are there for their number alone

        def step(group: Size, carried: list[Node]) -> Sequence[Node]:
            at = minimum(group + plan.groups, last)
            following = [self.load_input(at), *self.load_weights(at)]
            return [self.multiply(carried[0], carried[1:]), *following]

        weights = self.load_weights(0)
        # the launch after this one begins when it ends: programs that wait would take its place
        b.add(placed.grid_dependency_wait())
        zero = b.constant(0.0, float32, (plan.tokens, plan.rows))
        given = [zero, self.load_input(0), *weights]
        carried = b.loop("group", 0, last + 1, plan.groups, step, given)
        self.finish(carried[0])
        return b.finish((self.rows // plan.rows, blocks), warps=plan.warps, level="placed")

    def load_weights(self, group: Size) -> list[Node]:
        """A step of the weights, as they lie."""
        return self.weights.load(self.row, group, self.plan.rows, self.plan.groups)

    def load_input(self, group: Size) -> Node:
        """A step of x."""
        b, plan = self.b, self.plan
        shape = (plan.tokens, self.wide)
        mask = self.tokens_there(shape)
        if self.shape.columns % self.wide:
            line = b.add(ops.iota(size=self.wide, dtype=int64))
            at = b.apply("add", line, b.index(group * GROUP))
            inside = b.apply("less", at, b.constant(self.shape.columns, int64))
            inside = b.broadcast(b.add(ops.reshape(inside, shape=(1, self.wide))), shape)
            mask = b.logical_and(mask, inside)
        return b.load(self.input, (self.token, group * GROUP), shape, (0, 1), mask)

    def tokens_there(self, shape: tuple[int, int]) -> Node | None:
        """Which tokens of a tile there are; None for all."""
        b, tokens = self.b, self.shape.tokens
        if isinstance(tokens, int) and tokens % self.plan.tokens == 0:
            return None
        line = b.apply("add", b.add(ops.iota(size=shape[0], dtype=int64)), b.index(self.token))
        inside = b.apply("less", line, b.index(tokens))
        return b.broadcast(b.add(ops.reshape(inside, shape=(shape[0], 1))), shape)

    def multiply(self, total: Node, loaded: Sequence[Node]) -> Node:
        """One step."""
        b, weights, dtype = self.b, self.weights, self.shape.dtype
        found, made = weights.named(loaded[1:]), []
        scales = weights.scales(found)
        for element, code in enumerate(weights.codes(found)):
            scale, minimum = scales[element * len(scales) // GROUP]
            value = (
                b.apply("multiply", scale, code)
                if minimum is None
                else b.apply("multiply_add", scale, code, minimum)
            )
            made.append(b.cast(value, dtype))
        right = b.add(ops.transpose(weights.beside(made), order=(1, 0)))
        return b.add(ops.dot(loaded[0], right, total))

    def finish(self, total: Node) -> None:
        """Write the tile."""
        b, plan = self.b, self.plan
        shape = (plan.tokens, plan.rows)
        mask = self.tokens_there(shape)
        if self.rows != self.shape.rows:
            line = b.apply("add", b.add(ops.iota(size=plan.rows, dtype=int64)), b.index(self.row))
            inside = b.apply("less", line, b.constant(self.shape.rows, int64))
            inside = b.broadcast(b.add(ops.reshape(inside, shape=(1, plan.rows))), shape)
            mask = b.logical_and(mask, inside)
        b.store(self.out, b.cast(total, self.shape.dtype), (self.token, self.row), (0, 1), mask)

"""Products of vectors and of chains of matrices.

Invariant: a chain is multiplied in the order that costs the fewest multiplications, and the result
does not depend on names: every function is plain matmul or elementwise ops below.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ...core.errors import ShapeError
from ...graph import build
from ...ir.whole import whole
from ..creation import eye
from ..matmul import matched, matmul
from ..movement import broadcast_to, roll
from ..tensor import Tensor, lift
from .matrix import floats, same_dtype, squared
from .solve import inv


def vecdot(x: Any, y: Any, *, dim: int = -1) -> Tensor:
    """The sum of x * y along an axis, after broadcasting."""
    a, b = floats("vecdot", x, low=True), floats("vecdot", y, low=True)
    same_dtype("vecdot", a, b)
    return (a * b).sum(dim)


def cross(input: Any, other: Any, *, dim: int = -1) -> Tensor:
    """The cross product of vectors of 3 along an axis; the other axes broadcast."""
    a, b = matched("linalg.cross", input, other)
    if a.ndim != b.ndim:
        raise ShapeError(
            "the numbers of axes differ",
            op="linalg.cross",
            expected=build.show(a.shape),
            got=build.show(b.shape),
        )
    axis = build.axis_of(a.node, dim, "linalg.cross")
    if a.shape[axis] != 3 or b.shape[axis] != 3:
        raise ShapeError(
            "not vectors of 3",
            op="linalg.cross",
            expected=f"3 along axis {axis}",
            got=f"{build.show(a.shape)} and {build.show(b.shape)}",
        )
    left, right = (roll(x, -1, axis) for x in (a, b))
    return roll(a * right - left * b, -1, axis)


def matrix_power(A: Any, n: int) -> Tensor:
    """A times itself n times; the inverse's power where n is negative."""
    a = lift(A)
    squared("matrix_power", a)
    n = whole(n, "linalg.matrix_power", "the power")
    if n == 0:
        return broadcast_to(eye(a.shape[-1], dtype=a.dtype), a.shape)
    base, left = (a, n) if n > 0 else (inv(a), -n)
    found: Tensor | None = None
    while left:
        if left & 1:
            found = base if found is None else matmul(found, base)
        left >>= 1
        base = matmul(base, base) if left else base
    return found  # type: ignore[return-value]


def multi_dot(tensors: Sequence[Any]) -> Tensor:
    """The product of matrices (the first and last may be vectors), in the cheapest order."""
    if len(tensors) < 2:
        raise ShapeError(
            "needs at least two matrices", op="linalg.multi_dot", expected=">= 2", got=len(tensors)
        )
    chain = matched("linalg.multi_dot", *tensors)
    first, last = chain[0].ndim == 1, chain[-1].ndim == 1
    if first:
        chain[0] = chain[0].unsqueeze(0)
    if last:
        chain[-1] = chain[-1].unsqueeze(-1)
    for before, after in pairwise(chain):
        if before.ndim != 2 or after.ndim != 2 or before.shape[1] != after.shape[0]:
            raise ShapeError(
                "the sizes do not fit",
                op="linalg.multi_dot",
                expected="matrices with equal inner sizes",
                got=f"{build.show(before.shape)} and {build.show(after.shape)}",
            )
    found = _chained(chain)
    if first and last:
        return found.reshape(())
    return found.squeeze(0) if first else found.squeeze(-1) if last else found


def _chained(chain: Sequence[Tensor]) -> Tensor:
    """The product of matrices by the cheapest cuts: cost[i, j] of the part from i to j."""
    sizes: list[Any] = [chain[0].shape[0], *[m.shape[1] for m in chain]]
    cost: dict[tuple[int, int], Any] = {(i, i): 0 for i in range(len(chain))}
    cut: dict[tuple[int, int], int] = {}
    for length in range(1, len(chain)):
        for i in range(len(chain) - length):
            j = i + length
            costs = [
                cost[i, k] + cost[k + 1, j] + sizes[i] * sizes[k + 1] * sizes[j + 1]
                for k in range(i, j)
            ]
            cost[i, j] = min(costs)
            cut[i, j] = i + costs.index(cost[i, j])

    def product(i: int, j: int) -> Tensor:
        if i == j:
            return chain[i]
        return matmul(product(i, cut[i, j]), product(cut[i, j] + 1, j))

    return product(0, len(chain) - 1)

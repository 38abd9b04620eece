"""Which operands of products are worth a copy that lies as a matrix.

The library's products read operands where they lie, as matrices whose rows are whole steps of 16
bytes. What movement makes of a stored value often is none: heads that are put side by side again
after attention, a part of a row that begins in the middle. Such a product would be left to the
plain tiled kernel, which is several times slower; where the copy takes less time than that loses,
the operand becomes a value of its own. Invariant: a copied operand is as large as what it is a
copy of, or nearly (windows stay unfolded).
"""

from __future__ import annotations

import math

from ..core.target import Target
from ..graph import ops
from ..ir.node import Node, topological
from ..ir.symbol import high, loop_index
from ..ir.types import product
from .access import base_of
from .dot_wide import WideDot, matrix_of
from .lowering import Lowering
from .problem import Problem
from .region import Region

SLOWER = 4.0  # the tiled kernel beside the library's, at least
LAUNCH = 3e-6  # seconds
GROWS = 1.25  # times the elements it is made of, at most


def lay_out(lowering: Lowering) -> None:
    """The pass: operands of large products that lie as no matrix become values."""
    values, target = lowering.fuser.values, lowering.target
    arguments, results = lowering.arguments, lowering.results
    for dot in topological(results, stop=set(arguments).__contains__):
        if dot.op is ops.dot and dot not in arguments:
            moved = [
                x
                for side, x in enumerate(dot.inputs)
                if x not in values and _pays(side, dot, values, target)
            ]
            if moved and _takes(dot, values | set(moved), target):
                values.update(moved)


def _pays(side: int, dot: Node, values: set[Node], target: Target) -> bool:
    """Whether an operand that lies as no matrix is copied in less time than it would cost."""
    p, x = Problem(dot), dot.inputs[side]
    batch, m, k, n = (loop_index(name, size) for name, size in zip("bmkn", p.sizes))
    index = p.index_b(batch, k, n) if side else p.index_a(batch, m, k)
    if matrix_of(x, index, (batch, k, n) if side else (batch, m, k), values) is not None:
        return False
    source = base_of(x, values)
    elements = high(product(x.shape))
    if source not in values or elements > GROWS * high(product(source.shape)):
        return False
    products = math.prod(high(size) for size in p.sizes)
    best = 2.0 * products / target.peak_flops(dot.inputs[0].dtype)
    copy = 2.0 * elements * x.dtype.size / target.peak_bytes() + LAUNCH
    return (SLOWER - 1) * best > copy


def _takes(dot: Node, values: set[Node], target: Target) -> bool:
    """Whether the library takes a product of such operands."""
    order = topological(dot.inputs, values.__contains__)
    reads = [n for n in order if n in values]
    like = Region("dot", [dot], product(dot.shape), stored=[dot])
    return WideDot(like, reads, target).choice is not None

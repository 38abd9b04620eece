"""Take what a whole row has one of out of the row's sums, so that fewer sums wait for others.

A program of a GPU that holds a row in registers stops for every sum that needs one before it.
sum(x * r), where r is the same for the whole row, is sum(x) * r: it need not wait for r. Terms
that are zero by their meaning, r * (x - mean of x), are dropped; the derivative of a norm has such
ones. So the gradient of a layer norm waits twice and not three times, that of a softmax twice and
not three times too. What is added twice is doubled where that costs a row one product.

Invariant: a sum is rewritten only where it then rests on fewer reductions below one another and
is still one sum: nothing is subtracted that was not before.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.dtype import float32, float64
from ..core.target import Target
from ..graph import build, ops
from ..ir.node import Node, is_shallow
from ..ir.pattern import Match, Rule, RuleSet
from ..ir.rewrite import Log, rewrite
from ..ir.types import product

Axes = tuple[int, ...]


class Depths:
    """How many reductions lie below one another under a value."""

    def __init__(self) -> None:
        self.found: dict[Node, int] = {}

    def __call__(self, node: Node) -> int:
        """Those under one value, its own included."""
        stack = [node]
        while stack:
            current = stack[-1]
            waiting = [i for i in current.inputs if i not in self.found]
            if waiting:
                stack.extend(waiting)
                continue
            below = max((self.found[i] for i in current.inputs), default=0)
            self.found[current] = below + (current.op.category == "reduce")
            stack.pop()
        return self.found[node]


def _one_a_row(node: Node, axes: Axes) -> Node | None:
    """The value of size 1 along some axes that a Node repeats along them."""
    if node.op is not ops.expand or any(node.inputs[0].shape[a] != 1 for a in axes):
        return None
    return node.inputs[0]


READ = {ops.negative, ops.add, ops.subtract, ops.multiply}  # what terms are read through


def _strip(node: Node, axes: Axes) -> tuple[Node | None, list[Node]]:
    """A product without the factors that a row has one of, and those."""
    one = _one_a_row(node, axes)
    if one is not None:
        return None, [one]
    if node.op is not ops.multiply:
        return node, []
    (a, own), (b, other) = (_strip(i, axes) for i in node.inputs)
    if not own and not other:
        return node, []
    core = ops.multiply(a, b) if a is not None and b is not None else a if b is None else b
    return core, own + other


def _terms(node: Node, axes: Axes) -> list[tuple[Node | None, list[Node], bool]]:
    """A value as a sum of (values, factors that a row has one of, are they negative)."""
    if node.op is ops.negative:
        return [(c, f, not n) for c, f, n in _terms(node.inputs[0], axes)]
    if node.op in (ops.add, ops.subtract) and not _is_deviation(node, axes):
        first, second = (_terms(i, axes) for i in node.inputs)
        flip = node.op is ops.subtract
        return first + [(c, f, n != flip) for c, f, n in second]
    core, factors = _strip(node, axes)
    if core is None or not factors:
        return [(core, factors, False)]
    return [(c, f + factors, n) for c, f, n in _terms(core, axes)]


def _is_deviation(node: Node, axes: Axes) -> bool:
    """Whether a value is x - mean of x along the axes: its sum is 0."""
    if node.op is not ops.subtract:
        return False
    x, repeated = node.inputs
    mean = _one_a_row(repeated, axes)
    count = product(tuple(x.shape[a] for a in axes))
    if mean is None or not isinstance(count, int) or mean.op not in (ops.multiply, ops.divide):
        return False
    total, scale = mean.inputs
    factor = ops.constant_value(scale)
    total = total.inputs[0] if total.op is ops.reshape else total
    if factor is None or total.op is not ops.sum_ or total.inputs[0] is not x:
        return False
    near = factor * count if mean.op is ops.multiply else factor / count
    return total.attrs["axes"] == axes and abs(near - 1) < 1e-6


def _shallower(m: Match, depths: Depths) -> Node | None:
    node = m.root
    x, axes = node.inputs[0], node.attrs["axes"]
    if node.dtype not in (float32, float64) or not axes:
        return None
    if sorted(axes) != list(range(len(x.shape) - len(axes), len(x.shape))):
        return None  # only rows are held while several sums are found
    if x.op not in (ops.multiply, ops.negative, ops.add, ops.subtract) or depths(x) == 0:
        return None
    if not is_shallow([x], READ):
        return None
    terms = _terms(x, axes)
    left = [t for t in terms if t[0] is None or not _is_deviation(t[0], axes)]
    if len(left) != 1 or left[0][0] is None or (len(terms) == 1 and not left[0][1]):
        return None
    core, factors, negative = left[0]
    assert core is not None
    if depths(core) >= depths(x):
        return None
    total = ops.sum_(core, axes=axes)
    for f in factors:  # it may be one for all rows too
        own = tuple(size for axis, size in enumerate(f.shape) if axis not in axes)
        total = ops.multiply(total, build.expand(build.reshape(f, own), node.shape))
    return ops.negative(total) if negative else total


def _twice(m: Match) -> Node | None:
    """(a + r * x) + r * x -> a + (2 * r) * x, where r is repeated: a square's derivative."""
    node = m.root
    if not node.dtype.is_float:
        return None
    for total, term in (node.inputs, node.inputs[::-1]):
        if total.op is not ops.add or term.op is not ops.multiply or term not in total.inputs:
            continue
        rest = total.inputs[1] if total.inputs[0] is term else total.inputs[0]
        for repeated, x in (term.inputs, term.inputs[::-1]):
            if repeated.op is ops.expand:
                double = build.expand(build.multiply(repeated.inputs[0], 2.0), repeated.shape)
                return ops.add(rest, ops.multiply(double, x))
    return None


def shallow_sums(
    arguments: Sequence[Node], results: list[Node], log: Log, target: Target | None = None
) -> list[Node]:
    """The pass, for programs of threads."""
    depths = Depths()
    rules = [
        Rule("sum_of_a_row_s_factor", ops.sum_, lambda m: _shallower(m, depths)),
        Rule("added_twice", ops.add, _twice),
    ]
    return rewrite(results, RuleSet("shallow sums", rules), log)

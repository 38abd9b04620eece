"""Recognition: big ops found in the small ones people write.

A product summed over axes that both factors have is a `dot`, whatever broadcasts, permutes,
axes of size 1 and casts stand between; a `dot` takes the movement of its operands into its own
axes. Each factor is followed down to the value it moves (`trace`), its axes labelled by the
axes of the product, and the dot is built from the labels (`contract`).

| found            | in                                                            |
|------------------|---------------------------------------------------------------|
| dot              | sum(a * b), sum(cast(a * b)): `sum_of_product`                |
| dot              | dot(moved a, moved b), dot(cast a, cast b): `dot_*`           |
| band, slopes     | the mask and bias of an attention: `band of attention`        |
| attention        | dot -> scale, mask -> softmax -> dot: `recognize_attention`   |

Recognition (`recognize`) runs before the derivative and batching walks and, after SIMPLIFY,
again in the pipeline. A new row is a Rule at the end of RECOGNIZE, rooted at the last op of the
big one; attention, which must know who else reads its scores, is a walk of its own after them.
Invariant: the type stays; values differ only by the order and the width of accumulation (for
attention see there).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..core.config import invariant
from ..core.dtype import DType
from ..ir.node import Node
from ..ir.passes import ops_in
from ..ir.pattern import Match, Rule, RuleSet, any_, of
from ..ir.rewrite import Log, rewrite
from ..ir.symbol import Size
from . import build, ops
from .movement import unit_map
from .simplify import holds

Labels = tuple[int, ...]


class Factor(NamedTuple):
    """A value and, for each of its axes, the axis of the product it stands for."""

    node: Node
    labels: Labels


def trace(node: Node, labels: tuple[int | None, ...], kept: frozenset[int]) -> Factor:
    """The value under movement and casts, without axes that only repeat it.

    Labels in `kept` must survive: an expand that would lose one is not looked through.
    """
    casts: list[DType] = []
    while True:
        source = node.inputs[0] if node.inputs else node
        if node.op is ops.cast:
            casts.append(node.dtype)
            found: tuple[int | None, ...] | None = labels
        elif node.op is ops.permute:
            order = node.attrs["order"]
            found = tuple([labels[order.index(a)] for a in range(len(order))])
        elif node.op is ops.expand:
            repeated = [a == 1 and b != 1 for a, b in zip(source.shape, node.shape)]
            lost = {a for a, r in zip(labels, repeated) if r}
            found = tuple([None if r else a for a, r in zip(labels, repeated)])
            found = None if lost & kept else found
        elif node.op is ops.reshape:
            found = _through_reshape(source, node, labels)
        else:
            found = None
        if found is None:
            break
        node, labels = source, found
    node = build.squeeze(node, [i for i, a in enumerate(labels) if a is None])
    for dtype in reversed(casts):
        node = build.cast(node, dtype)
    return Factor(node, tuple([a for a in labels if a is not None]))


def _through_reshape(
    source: Node, node: Node, labels: tuple[int | None, ...]
) -> tuple[int | None, ...] | None:
    """Labels below a reshape that only adds or drops axes of size 1."""
    unit_axes = unit_map(source.shape, node.shape)
    if unit_axes is None:
        return None
    found: list[int | None] = [None] * len(source.shape)
    for new, old in unit_axes.items():
        found[old] = labels[new]
    return tuple(found)


def contract(
    a: Factor, b: Factor, summed: set[int], shape: tuple[Size, ...], rest: Labels, dtype: DType
) -> Node:
    """The dot of two labelled factors over the summed labels.

    `rest` labels the axes of the result and `shape` is its shape; axes that neither factor has
    are repeated.
    """
    inner = [n for n in a.labels if n in summed]
    lead = [n for n in rest if n in a.labels and n in b.labels]
    a, b = (_in_order(f, lead, rest, inner) for f in (a, b))
    batch = ([a.labels.index(n) for n in lead], [b.labels.index(n) for n in lead])
    axes = ([a.labels.index(n) for n in inner], [b.labels.index(n) for n in inner])
    result = build.dot(a.node, b.node, batch, axes, dtype)
    given = [*lead, *_own(a, lead, summed), *_own(b, lead, summed)]
    wanted = [n for n in rest if n in given]
    result = build.permute(result, [given.index(n) for n in wanted])
    sizes = tuple([s if n in given else 1 for n, s in zip(rest, shape)])
    return build.expand(build.reshape(result, sizes), shape)


def _in_order(factor: Factor, lead: list[int], rest: Labels, inner: list[int]) -> Factor:
    """The factor with its own axes in the order of the result: better it moves than the result."""
    own = [n for n in rest if n in factor.labels and n not in lead]
    if own == [n for n in factor.labels if n in own]:
        return factor
    labels = (*lead, *own, *inner)
    return Factor(build.permute(factor.node, [factor.labels.index(n) for n in labels]), labels)


def _own(factor: Factor, lead: list[int], summed: set[int]) -> list[int]:
    return [n for n in factor.labels if n not in lead and n not in summed]


# ---- sum(a * b) -----------------------------------------------------------------------------


def _product_dot(m: Match) -> Node | None:
    """sum(a * b) as a dot where it pays: both have the summed axes, one has axes of its own.

    One row has none: at the level `invariant` a sum stays one.
    """
    product, root = m.product, m.root
    if invariant():
        return None
    if product.dtype.kind == "bool" or not _exact_cast(product, root):
        return None
    labels = tuple([None if s == 1 else i for i, s in enumerate(product.shape)])
    a, b = (trace(f, labels, frozenset()) for f in product.inputs)
    summed = {i for i in root.attrs["axes"] if labels[i] is not None}
    shared = set(a.labels) & set(b.labels)
    if not summed or not summed <= shared or set(a.labels) == set(b.labels):
        return None
    if set(a.labels) | set(b.labels) != {n for n in labels if n is not None}:
        return None  # an axis that neither has: SIMPLIFY moves it out first
    rest = tuple([i for i in range(len(product.shape)) if i not in root.attrs["axes"]])
    first = next(n for n in rest if (n in a.labels) != (n in b.labels))
    if first not in a.labels:  # the factor whose own axes come first goes left
        a, b = b, a
    return contract(a, b, summed, root.shape, rest, root.dtype)


def _exact_cast(product: Node, root: Node) -> bool:
    """Whether summing in the root's dtype may skip rounding the product to its own."""
    return product.dtype is root.dtype or (
        product.dtype.is_float and holds(root.dtype, product.dtype)
    )


# ---- dots -----------------------------------------------------------------------------------


def _dot_moved(m: Match) -> Node | None:
    """A dot on what its operands move."""
    node = m.root
    left, right = node.inputs
    batch, inner = node.attrs["batch"], node.attrs["contract"]
    a: list[int] = [-1] * len(left.shape)
    b: list[int] = [-1] * len(right.shape)
    for n, (i, j) in enumerate(zip(batch[0], batch[1])):
        a[i] = b[j] = n
    rest = list(range(len(node.shape)))
    for k, (i, j) in enumerate(zip(inner[0], inner[1])):
        a[i] = b[j] = len(rest) + k
    free = iter(rest[len(batch[0]) :])
    for side in (a, b):
        for i, n in enumerate(side):
            if n == -1:
                side[i] = next(free)
    summed = set(range(len(rest), len(rest) + len(inner[0])))
    units = {n for side, x in ((a, left), (b, right)) for n, s in zip(side, x.shape) if s == 1}
    kept = frozenset(summed)
    first, second = trace(left, tuple(a), kept), trace(right, tuple(b), kept)
    if not summed <= set(first.labels) & set(second.labels) or units & summed:
        return None
    if first.node is left and second.node is right:
        return None
    return contract(first, second, summed, node.shape, tuple(rest), node.dtype)


# (operand, cast to): every value is kept, and sums are accumulated as they were
READ_AS_THEY_ARE = {
    ("float16", "float32"),
    ("bfloat16", "float32"),
    ("float8_e4m3", "float32"),
    ("float8_e5m2", "float32"),
    ("float8_e4m3", "float16"),
    ("float8_e5m2", "float16"),
    ("float8_e4m3", "bfloat16"),
    ("float8_e5m2", "bfloat16"),
    ("int8", "int32"),
    ("uint8", "uint32"),
}


def _dot_cast(m: Match) -> Node | None:
    """dot(cast a, cast b) reads a and b as they are."""
    if m.a.dtype is not m.b.dtype:
        return None
    if (m.a.dtype.name, m.root.inputs[0].dtype.name) not in READ_AS_THEY_ARE:
        return None
    return ops.dot.make((m.a, m.b), m.root.attrs)


def _seen(m: Match) -> Node | None:
    """What a mask and a bias of an attention say, found in them."""
    if not {"mask", "bias"} & set(m.root.attrs["extras"]):
        return None
    from .recognize_extras import refined

    return refined(m.root)


MOVED = (ops.permute, ops.expand, ops.reshape, ops.cast)
x, y = any_("x"), any_("y")
_product = any_("product", ops=ops.multiply)
RECOGNIZE = RuleSet(
    "recognize",
    [
        Rule("sum_of_product", of(ops.sum_, _product), _product_dot),
        Rule("sum_of_cast_product", of(ops.sum_, of(ops.cast, _product)), _product_dot),
        Rule("dot_cast", of(ops.dot, of(ops.cast, any_("a")), of(ops.cast, any_("b"))), _dot_cast),
        Rule("dot_moved_left", of(ops.dot, any_("x", ops=MOVED), y), _dot_moved),
        Rule("dot_moved_right", of(ops.dot, x, any_("y", ops=MOVED)), _dot_moved),
        Rule("band of attention", (ops.attention, ops.attention_backward), _seen),
    ],
)


def recognize(roots: Sequence[Node], log: Log | None = None, derived: bool = False) -> list[Node]:
    """The roots with every big op found: dots by their Rules, then attention. What is `derived`
    afterwards keeps the derivatives of what was written too."""
    found = rewrite(roots, RECOGNIZE, log)
    if "dot" not in ops_in(found):
        return found
    from .recognize_attention import recognize_attention

    return recognize_attention(found, log, derived)

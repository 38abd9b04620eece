"""What the Nodes of a Graph need of symbolic sizes, so that nothing lies outside of its operand.

Functions of Tensors say what they need in their own words (`ir.requirement`). This is the net
below them: every Node of a traced Graph, whoever built it, is held to the few facts that lowering
takes for granted. Invariant: where the requirements hold, no size is negative, every slice lies
in its operand, and a reshape keeps the number of elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ..core.errors import AxisError, ShapeError, UserError
from ..ir.node import Node, Op, topological
from ..ir.requirement import Requirement
from ..ir.symbol import Expr, Size, combine, high, low, minimum, multiply
from ..ir.types import Array, Tuple, product
from . import ops

Need = tuple[Size, bool, type[UserError], str, str, dict[str, Any]]  # value, exact, error, texts


def size_requirements(
    inputs: Sequence[Node], outputs: Sequence[Node], known: Iterable[Requirement] = ()
) -> list[Requirement]:
    """The known requirements, and what the Nodes need beyond them."""
    if not any(isinstance(s, Expr) for x in inputs for s in x.shape):
        return list(known)
    found = {(r.value, r.exact): r for r in known}
    for node in _nodes(outputs):
        for value, exact, error, message, expected, sizes in _needs(node):
            lowest, highest = low(value), high(value)
            if isinstance(value, int) or (lowest >= 0 and not (exact and highest)):
                continue
            texts = (node.op.name, message, expected, "{got}", "")
            place = None if node.location is None else (node.location.file, node.location.line)
            found.setdefault(
                (value, exact),
                Requirement(value, exact, error.__name__, texts, tuple(sizes.items()), place),
            )
    return list(found.values())


def _nodes(roots: Sequence[Node]) -> Iterator[Node]:
    """Every Node, those of Blocks too."""
    for node in topological(roots):
        yield node
        for block in node.blocks:
            yield from _nodes(block.results)


def _needs(node: Node) -> Iterator[Need]:
    types = node.type.items if isinstance(node.type, Tuple) else (node.type,)
    for type_ in types:
        if not isinstance(type_, Array):
            continue
        for size in type_.shape:
            if isinstance(size, Expr) and size.low < 0:
                yield (
                    size,
                    False,
                    ShapeError,
                    "a size is negative",
                    "sizes >= 0",
                    {"got": type_.shape},
                )
    row = NEEDS.get(node.op)
    if row is not None:
        yield from row(node)


def _slice(node: Node) -> Iterator[Need]:
    parts = zip(node.inputs[0].shape, node.shape, *(node.attrs[k] for k in ("start", "step")))
    for axis, (size, count, start, step) in enumerate(parts):
        if all(isinstance(v, int) for v in (size, count, start)):
            continue
        some = minimum(count, 1)  # an empty slice may lie anywhere
        last = combine(start, multiply(combine(count, 1, -1), step), 1)
        after = combine(combine(size, last, -1), 1, -1)
        told = {"axis": axis, "size": size, "got": (start, count)}
        for room in (start, after):
            if low(room) < 0:
                yield (
                    multiply(some, room),
                    False,
                    AxisError,
                    "reaches past the axis",
                    "(start, count) within 0..{size} on axis {axis}",
                    told,
                )


def _pad(node: Node) -> Iterator[Need]:
    for amount in (*node.attrs["low"], *node.attrs["high"]):
        yield (
            amount,
            False,
            ShapeError,
            "an amount is negative",
            "amounts >= 0",
            {"got": (node.attrs["low"], node.attrs["high"])},
        )


def _reshape(node: Node) -> Iterator[Need]:
    before, after = node.inputs[0].shape, node.shape
    yield (
        combine(product(after), product(before), -1),
        True,
        ShapeError,
        "the number of elements changes",
        "{count} elements as in {before}",
        {"count": product(before), "before": before, "got": after},
    )


def _gather(node: Node) -> Iterator[Need]:
    x, index = node.inputs[:2]
    for axis in node.attrs["axes"]:
        size = x.shape[axis]
        yield (
            combine(minimum(size, 1), minimum(product(index.shape), 1), -1),
            False,
            AxisError,
            "there is nothing to choose from",
            "at least one element on axis {axis}",
            {"axis": axis, "got": x.shape},
        )


NEEDS: dict[Op, Callable[[Node], Iterator[Need]]] = {
    ops.slice_: _slice,
    ops.pad: _pad,
    ops.reshape: _reshape,
    ops.gather: _gather,
}

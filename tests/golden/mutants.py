"""Bodies broken in one place: every barrier op, fence, wait and commit dropped or changed in turn.

`mutants(body)` gives each broken Body with a label that says op, number of its kind and change.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from tilegrad.core.dtype import int64
from tilegrad.ir.node import Node
from tilegrad.tile import placed
from tilegrad.tile.build import Body, BodyBuilder, rebuild
from tilegrad.tile.check import walk

DROPS = (
    "wait",
    "arrive",
    "expect",
    "matrix_wait",
    "matrix_fence",
    "fence",
    "copy_async",
    "named_sync",
    "named_arrive",
    "matrix_commit",
    "wait_copies",
    "commit_copies",
    "grid_dependency_wait",
    "arrive_remote",
    "copy_multicast",
    "copy_pages",
    "send",
)
# pairs of ops in a row of which the first must stay the first
ORDERS = {
    ("matrix_wait", "arrive"),
    ("fence", "named_sync"),
    ("named_sync", "copy_store"),
    ("wait", "matrix_async"),
    ("wait", "expect"),
    ("matrix_fence", "matrix_async"),
    ("copy_store", "commit_copies"),
    ("matrix_async", "matrix_commit"),
    ("wait_copies", "write_place"),
    ("write_place", "fence"),
    ("matrix_commit", "matrix_wait"),
    ("matrix_wait", "arrive_remote"),
    ("send", "wait"),
}
Change = Callable[[BodyBuilder, Node, tuple[Node, ...]], Node]


def nodes_of(body: Body, op: str) -> list[Node]:
    """The Nodes of an op in order."""
    return [node for node, _ in walk(body.block) if node.op.name == op]


def changed(body: Body, victim: Node, change: Change) -> Body:
    """The Body with one Node replaced."""
    return rebuild(body, lambda b, node, i: change(b, node, i) if node is victim else None)


def swapped(body: Body, first: Node, second: Node) -> Body:
    """The Body in which one Node comes after a later one of its Block."""
    late: list[tuple[Node, tuple[Node, ...]]] = []

    def replace(b: BodyBuilder, node: Node, inputs: tuple[Node, ...]) -> Node | None:
        if node is first:
            late.append((node, inputs))
            return b.constant(0, int64)
        if node is not second:
            return None
        made = b.add(node.op.make(inputs, node.attrs))
        b.add(first.op.make(late[0][1], first.attrs))
        return made

    return rebuild(body, replace)


def in_a_row(body: Body) -> Iterator[tuple[Node, Node]]:
    """Ops with effects next to each other in a Block."""
    blocks = [body.block, *[b for node, _ in walk(body.block) for b in node.blocks]]
    for block in blocks:
        effects = [n for n in block.nodes if n.op.effect and n.op.name != "read_place"]
        yield from itertools.pairwise(effects)


def drop(b: BodyBuilder, node: Node, inputs: tuple[Node, ...]) -> Node:
    """Nothing in its place."""
    return b.constant(0, int64)


def flip(b: BodyBuilder, node: Node, inputs: tuple[Node, ...]) -> Node:
    """The other parity."""
    other = b.apply("subtract", b.constant(1, int64), inputs[2])
    return b.add(node.op.make((*inputs[:2], other), {}))


def one_on(at: int, size: int) -> Change:
    """The index of an input one further, of `size` around."""

    def change(b: BodyBuilder, node: Node, inputs: tuple[Node, ...]) -> Node:
        further = b.apply("add", inputs[at], b.constant(1, int64))
        further = b.apply("remainder", further, b.constant(size, int64))
        return b.add(node.op.make((*inputs[:at], further, *inputs[at + 1 :]), node.attrs))

    return change


def misdirected(node: Node) -> Iterator[tuple[str, Change]]:
    """The ways to reach a wrong barrier, program or place; a cluster is one of two."""
    name, inputs = node.op.name, node.inputs
    barrier = {"send": 2, "wait": 0, "arrive": 0, "expect": 0, "arrive_remote": 0}.get(name)
    if barrier is not None and inputs[barrier].attrs["stages"] > 1:
        yield "next stage", one_on(barrier + 1, inputs[barrier].attrs["stages"])
    if name == "arrive_remote":
        yield "other rank", one_on(2, 2)
    if name == "send" and node.attrs["to"] == "one":
        yield "other rank", one_on(4, 2)
        for at, size in enumerate(inputs[0].type.shape[: len(inputs) - 5]):  # type: ignore[union-attr]
            if size > 1:
                yield f"next place along {at}", one_on(5 + at, int(size))


def twice(b: BodyBuilder, node: Node, inputs: tuple[Node, ...]) -> Node:
    """The op two times."""
    b.add(node.op.make(inputs, node.attrs))
    return b.add(node.op.make(inputs, node.attrs))


def with_attrs(**new: object) -> Change:
    """Other attrs."""
    return lambda b, node, i: b.add(node.op.make(i, {**node.attrs, **new}))


def as_arrive(b: BodyBuilder, node: Node, inputs: tuple[Node, ...]) -> Node:
    """A named_sync that does not wait."""
    return b.add(placed.named_arrive.make((), node.attrs))


def changes(node: Node) -> Iterator[tuple[str, Change]]:
    """The ways to break one Node."""
    name, a = node.op.name, node.attrs
    if name in DROPS:
        yield "dropped", drop
    if name == "wait":
        yield "parity flipped", flip
    yield from misdirected(node)
    if name in ("arrive", "expect", "arrive_remote", "send"):
        yield "twice", twice
    if name == "copy_multicast" and a["mask"] != 1:
        yield "to one", with_attrs(mask=1)
    if name == "expect":
        yield "more bytes", with_attrs(bytes=a["bytes"] + 16)
        yield "half the bytes", with_attrs(bytes=a["bytes"] // 2)
        yield "no bytes", with_attrs(bytes=0)
    if name in ("matrix_wait", "wait_copies"):
        yield "one more pending", with_attrs(pending=a["pending"] + 1)
    if name == "barrier":
        yield "count + 1", with_attrs(count=a["count"] + 1)
        if a["count"] > 1:
            yield "count - 1", with_attrs(count=a["count"] - 1)
    if name in ("named_sync", "named_arrive"):
        yield "threads doubled", with_attrs(threads=a["threads"] * 2)
        yield "threads halved", with_attrs(threads=a["threads"] // 2)
        yield "number + 1", with_attrs(number=a["number"] + 1)
    if name == "named_sync":
        yield "arrives only", as_arrive
    if name == "fence" and a["kind"] == "async":
        yield "kind 'global'", with_attrs(kind="global")


def mutants(body: Body) -> Iterator[tuple[str, Body]]:
    """Every broken Body with its label."""
    counts: dict[str, int] = {}
    for node, _ in walk(body.block):
        name = node.op.name
        number = counts[name] = counts.get(name, -1) + 1
        for label, change in changes(node):
            yield f"{name} {number} {label}", changed(body, node, change)
    for number, (first, second) in enumerate(in_a_row(body)):
        pair = (first.op.name, second.op.name)
        if pair in ORDERS:
            label = f"{pair[0]} after {pair[1]} ({number})"
            yield label, swapped(body, first, second)

"""Find routing in the code of a layer of experts: scores, the largest of each row, rows sorted.

What plain code says with a softmax, a sort of which the first columns are kept, their sum and
`group_rows` becomes one op, `route`, where a Family takes it. Invariant: the sort is gone then: all
that read it reads the op, so that shares and order are of the same picks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.dtype import float32
from ..core.target import Target
from ..graph import ops
from ..ir.node import Node, located, topological, users
from ..ir.pattern import any_, of
from ..ir.rewrite import Log, rebuild

ROW = (1,)  # the axis of a row's scores


def _is_row(node: Node) -> bool:
    """Whether an expand repeats one number a row."""
    return node.inputs[0].shape == (*node.shape[:-1], 1)


def _each(pattern: Any) -> Any:
    """What all elements of a row share."""
    return of(ops.expand, of(ops.reshape, pattern), test=_is_row)


_X, _E = any_("x"), any_("powers")
_POWERS = of(ops.exp, of(ops.subtract, _X, _each(of(ops.max_, _X, axes=ROW))), name="powers")
_SOFTMAX = of(ops.divide, _POWERS, _each(of(ops.sum_, _E, axes=ROW)))
_PARTS = of(ops.divide, _X, _each(of(ops.sum_, _X, axes=ROW)))
_SORT = of(ops.sort, any_("scores"), name="sort", axis=1, descending=True)
_IDS = of(ops.reshape, of(ops.slice_, of(ops.get, _SORT, index=1), name="ids"))


def find_routing(
    arguments: Sequence[Node], results: list[Node], log: Log, target: Target | None
) -> list[Node]:
    """The pass."""
    assert target is not None
    order, found = topological(results), dict[Node, Node]()
    around = Around(order, results)
    for node in order:
        if node.op is ops.group_rows:
            with located(node.location):
                routed = around.routed(node, target)
            log.count("route", bool(routed))
            found |= routed
    done: dict[Node, Node] = {}
    for node in order if found else ():
        new = found.get(node, node)
        if new is not node:  # a result of the op
            done[new.inputs[0]] = rebuild(new.inputs[0], done)
        done[node] = rebuild(new, done)
    return [done.get(r, r) for r in results]


class Around:
    """Who reads what."""

    def __init__(self, order: Sequence[Node], results: Sequence[Node]) -> None:
        self.readers, self.results = users(order), set(results)

    def of(self, node: Node) -> list[Node]:
        """The Nodes that read one."""
        return self.readers.get(node, [])

    def only(self, node: Node, *allowed: Node) -> bool:
        """Whether nobody else reads a Node."""
        return node not in self.results and set(self.of(node)) <= set(allowed)

    def routed(self, node: Node, target: Target) -> dict[Node, Node]:
        """What takes the place of Nodes, where a sort of rows is the last step of a routing."""
        from ..schedule.families import why_not

        bound: dict[str, Node] = {}
        if not _IDS.fits(node.inputs[0], bound):
            return {}
        sort, ids, scores = bound["sort"], bound["ids"], bound["scores"]
        count, columns = ids.shape[1], scores.shape[1]
        kept = {"start": (0, 0), "stop": (scores.shape[0], count), "step": (1, 1)}
        if ids.attrs != kept or node.attrs["groups"] != columns or scores.dtype is not float32:
            return {}
        value, place = (ops.get(sort, index=i) for i in range(2))
        shares = ops.slice_(value, **kept)
        steps = ((sort, value, place), (value, shares), (place, ids), (ids, node.inputs[0]))
        if not all(self.only(*step) for step in (*steps, (node.inputs[0], node))):
            return {}
        whole = self.parts_of(shares)
        x, powers = self.powers_of(scores, sort)
        made = ops.route(x, count=count, powers=powers, whole=whole is not None)
        if why_not(made, target):
            return {}
        found = {ops.get(node, index=i): ops.get(made, index=i + 1) for i in range(3)}
        return {**found, whole or shares: ops.get(made, index=0)}

    def parts_of(self, shares: Node) -> Node | None:
        """Shares over their sum, where nothing else reads them."""
        for node in self.of(shares):
            bound: dict[str, Node] = {}
            if _PARTS.fits(node, bound) and bound["x"] is shares:
                each = node.inputs[1]
                column = each.inputs[0]
                total = column.inputs[0]
                steps = ((shares, node, total), (total, column), (column, each), (each, node))
                return node if all(self.only(*step) for step in steps) else None
        return None

    def powers_of(self, scores: Node, sort: Node) -> tuple[Node, bool]:
        """(what scores are the softmax of, True), or scores themselves."""
        bound: dict[str, Node] = {}
        if not self.only(scores, sort) or not _SOFTMAX.fits(scores, bound):
            return scores, False
        x = bound["x"]
        is_cast = x.op is ops.cast and x.inputs[0].dtype.is_float
        return (x.inputs[0] if is_cast and x.inputs[0].dtype.size < 4 else x), True


__all__ = ["find_routing"]

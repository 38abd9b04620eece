"""A Node of a paged cache as its kernels see it: sizes, and where a Symbol changes the kernel.

Invariant: nothing here makes a kernel, so that what is found compiled costs little.
"""

from __future__ import annotations

from typing import Any

from ..core.config import invariant
from ..core.target import Target
from ..graph import ops
from ..graph.paged_types import APPEND, ATTEND, named
from ..ir.node import Node
from ..ir.symbol import Expr, high
from ..kernels.paged.shape import PagedShape, short_keys


def shape_of(node: Node) -> PagedShape:
    """The sizes and options of an append or an attention."""
    append = node.op is ops.paged_append
    given = named(APPEND if append else ATTEND, node.inputs)
    q, keys, values, table = (given[n] for n in ("q", "keys", "values", "table"))
    (tokens, heads, width), (pages, key_heads, page, _) = q.shape, keys.shape
    requests, most_pages = table.shape
    attrs: dict[str, Any] = {"scale": 1.0, "window": 0, "softcap": 0.0} if append else node.attrs
    return PagedShape(
        heads,
        key_heads,
        width,
        values.shape[3],
        page,
        tokens,
        requests,
        pages,
        most_pages,
        attrs["scale"],
        q.dtype,
        keys.dtype,
        attrs["window"],
        attrs["softcap"],
    )


def breaks(node: Node, target: Target) -> list[tuple[Expr, int]]:
    """Steps of single tokens and few keys are one launch a layer; with more keys another kernel
    shares the work out: (the Symbol of the most keys, the first number that is many)."""
    most = node.attrs["most_keys"]
    if not isinstance(most, Expr) or not node.attrs["single"] or not target.asynchronous_units:
        return []
    if invariant():
        return []  # one kernel for all of them
    x = shape_of(node)
    few = short_keys(x, target)
    return [(most, few + 1)] if few and few < high(x.most_pages) * x.page else []

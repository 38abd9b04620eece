"""The table of Families: everything the Schedule can choose to compute a Region by.

A row is data: which Graph ops start a Region of it, by which facts of a Target it is there, and
where its class is, or the function that lowers, which is imported when a Graph for such a Target
first has such an op. A package from outside adds a row with `register`, or names one under the
entry points of `outside.GROUP`; its Family then takes part wherever a Region starts with one of
its ops. Invariant: a Region has one
kind, which follows from its first op alone; what is registered is part of every compile key.
"""

from __future__ import annotations

from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING

from ..core.errors import UserError
from ..core.target import Target
from .outside import MADE, OUTSIDE, Row, any_target, family_of, outside

if TYPE_CHECKING:
    from ..ir.node import Node
    from .family import Family
    from .region import Region

ANY = ("*",)  # ops that no other row names


def vectors(target: Target) -> bool:
    """Programs are single threads with vectors."""
    return not target.has_threads


array = attrgetter("array")  # one with queues of its own is beside the CPU
threads = attrgetter("has_threads")  # programs are blocks of threads that share memory
asynchronous = attrgetter("asynchronous_units")  # threads go on while matrix units run


def vectors_alone(target: Target) -> bool:
    """Programs are single threads with vectors, and nothing is beside them."""
    return not (target.has_threads or target.array)


def bytes_alone(target: Target) -> bool:
    """The same, with instructions for products of bytes."""
    return vectors_alone(target) and target.multiplies_bytes


def own_tiles(target: Target) -> bool:
    """A single thread runs matrix units over tiles of their own."""
    return any(unit.threads == 1 for unit in target.matrix)


def threads_units(target: Target) -> bool:
    """Threads run matrix units together."""
    return any(unit.threads > 1 for unit in target.matrix)


_LOOPS, _DOTS, _ATTENTION = ("loops", "mixed", "pair"), ("dot",), ("attention",)
_PRODUCTS = ("dot", "grouped_dot", "sparse_dot", "block_dot")
_PICKED = ("picked_dot", "grouped_dot")
_ATTEND = ("attention", "attention_backward")
_APPEND, _PAGED, _UNPACK = ("paged_append",), ("paged_attention",), ("unpack",)
_DRAWS, _GROUPS = ("draw", "top_k", "add_listed"), ("group_rows", "route", "grouped_outer")
TABLE = [
    Row("loops on the array", ANY, "array:ArrayLoops", array, _LOOPS),
    Row("loops on the host", ANY, "array:HostLoops", array, _LOOPS),
    Row("loops on vectors", ANY, "loops:lower_loops", vectors_alone, _LOOPS),
    Row("loops on threads", ANY, "threads.loops_threads:lower_loops", threads, _LOOPS),
    # Ways to see products with picked weights; a pass asks them, and products may be left.
    Row("own weights", _PICKED, "grouped:OwnWeights", any_target, ("picked",)),
    Row("one product", _PICKED, "grouped:OneProduct", any_target, ("picked",)),
    Row("products on the array", _PRODUCTS, "array:ArrayProducts", array, _DOTS),
    Row("products on the host", _PRODUCTS, "array:HostProducts", array, _DOTS),
    Row("products of bytes", _DOTS, "dot_bytes:ByteProducts", bytes_alone, _DOTS),
    Row("products on tiles", _PRODUCTS, "matrix:TileProducts", own_tiles, _DOTS),
    Row("products on vectors", _PRODUCTS, "dot:VectorProducts", vectors_alone, _DOTS),
    Row(
        "products of the library",
        _PRODUCTS,
        "dot_joint:LibraryProducts",
        threads_units,
        ("dot", "dots", "gated"),
    ),
    Row("products on threads", _PRODUCTS, "products:lower_tiled", threads, _DOTS, True),
    Row("attention on vectors", _ATTEND, "attention:VectorAttention", vectors, _ATTENTION),
    Row("attention on threads", _ATTEND, "attention:ThreadAttention", threads, _ATTENTION),
    Row("sort on vectors", ("sort",), "scan_sort:lower_sort", vectors),
    Row("sort on threads", ("sort",), "threads.sort:lower_sort", threads),
    Row("running sums on vectors", ("cumulative",), "scan_sort:lower_scan", vectors),
    Row("running sums on threads", ("cumulative",), "threads.sort:lower_scan", threads),
    Row("updates on vectors", ("update",), "update:lower_update", vectors),
    Row("updates on threads", ("update",), "threads.update_threads:lower_update", threads),
    # Ops that a pass rewrites to calls before Regions are cut: at a tie the first row wins.
    Row("append and attention", _APPEND, "paged:AppendAttend", asynchronous),
    Row("append", _APPEND, "paged:Append", any_target),
    Row("paged prefill on units", _PAGED, "paged:UnitPrefill", asynchronous),
    Row("paged attention by a list", _PAGED, "paged:ListAttention", threads_units),
    Row("paged prefill on vectors", _PAGED, "paged:VectorPrefill", vectors),
    Row("paged attention on vectors", _PAGED, "paged:VectorAttention", vectors),
    Row("paged attention on threads", _PAGED, "paged:PortableAttention", threads, fallback=True),
    Row("draws", _DRAWS, "grouped:Draws", any_target, ("draws",)),
    Row("rows in groups", _GROUPS, "grouped:Groups", any_target, ("groups",)),
    Row("weights unpacked first", _UNPACK, "quantised:Unpacked", any_target),
    Row("quantised weights", _UNPACK, "quantised:Quantised", any_target),
    Row("calls", ("call",), "call:CallFamily", any_target),
]
CONTROL = ("scan", "cond", "while_loop")  # ops that are jumps around Regions, and no Region's own

# The kind of a Region by the op that starts it; all others are loops.
KINDS = {op: row.taken[0] for row in TABLE for op in row.anchors if row.anchors is not ANY}
KINDS |= dict.fromkeys(CONTROL, "control")
CHOICES = {**KINDS, "grouped_dot": "picked"}  # the kind of what a pass asks for an op


def register(row: Row) -> None:
    """Add a Family from outside; one of the same name is replaced."""
    remove(row.name)
    if any(row.name == one.name for one in TABLE):
        raise UserError(f"{row.name!r} is a Family of the package", op="register", got=row.name)
    OUTSIDE.register(row.name, row)


def remove(name: str) -> None:
    """Take a Family from outside back."""
    OUTSIDE.remove(name)
    MADE.pop(name, None)
    rows_of.cache_clear()
    outside.cache_clear()


@lru_cache(maxsize=256)
def rows_of(kind: str, op: str, target: Target) -> tuple[Row, ...]:
    """The rows for Regions of a kind that start with an op, on a Target."""
    ours = [row for row in TABLE if kind in row.taken and row.applies(target)]
    others = [row for row in outside_rows(op) if row.applies(target)]
    return (*others, *ours)


def families_of(region: Region) -> list[Family]:
    """The Families that may offer for a Region, those from outside first."""
    rows = rows_of(region.kind, region.anchor.op.name, region.target)
    return [family_of(row) for row in rows]


def outside_rows(op: str) -> list[Row]:
    """The rows from outside for Regions that start with an op."""
    return [row for row in map(OUTSIDE.get, OUTSIDE.names()) if op in row.anchors]


def why_not(node: Node, target: Target | None) -> str:
    """Why no Family takes a Region that would start with a Node; '' where one may."""
    kind = KINDS.get(node.op.name, "loops")
    rows = () if target is None else rows_of(kind, node.op.name, target)
    if target is None or not rows:
        return "no kernel for this machine"
    reasons = [family_of(row).why_not(node, target) for row in rows]
    return "" if "" in reasons else reasons[0]

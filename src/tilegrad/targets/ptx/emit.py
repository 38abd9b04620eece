"""From a Body to PTX text and the Entry that says how it is launched.

One entry per Body, one thread block per program. The portable level runs on all threads of the
block with barriers put in where shared memory changes hands; at the placed level every role is
an arm of one branch over the block's warps. Every op is a row of OPS: a function of the Emission
and the Node, in the file of its family. Invariant: pure text, no state: the same Body gives the
same text.
"""

from __future__ import annotations

import sys

from ...core.dtype import int32, int64
from ...core.errors import InternalError, UserError
from ...core.target import Target
from ...ir.block import Block
from ...ir.node import Node
from ...ir.symbol import high
from ...ir.types import product
from ...tile.build import Body, body_sites, body_symbols
from ...tile.row import emitters
from . import (
    emit_barriers,
    emit_control,
    emit_copies,
    emit_dot,
    emit_elements,
    emit_matrix,
    emit_memory,
    emit_placed,
    emit_shape,
    rules,
)
from .emission import Emission, Emit
from .plan_spread import ELEMENTWISE
from .program import Entry
from .spread import blocked

VERSION = "8.5"


def emit(body: Body, name: str, target: Target) -> tuple[str, Entry]:
    """The PTX of a Body and how to launch it."""
    e = Emission(body, target, walk)
    emit_copies.collect_maps(e)
    frame(e)
    start = len(e.w.lines)
    if e.waits_before is not None:
        e.w.put("griddepcontrol.launch_dependents")
    e.block(body.block)
    e.w.put("ret")
    written, e.w.lines = e.w.lines, []
    e.shared.frame()
    e.w.lines = [*written[:start], *e.w.lines, *written[start:]]
    text = text_of(e, name)
    if target.cpu == "sm_80" and ("e4m3x2" in text or "e5m2x2" in text):
        raise UserError(
            "this GPU does not convert floats of 8 bits",
            op=body.name,
            expected="compute capability 9.0",
            got=target.cpu,
        )
    return text, entry_of(e, name)


# ---- text ---------------------------------------------------------------------------------------


def entry_of(e: Emission, name: str) -> Entry:
    """How the entry is launched."""
    body = e.body
    bytes_ = e.shared.bytes + (1024 if e.swizzled else 0)
    if body.notes.get("alone"):  # two of them do not fit on a core
        bytes_ = max(bytes_, e.target.limits["shared_bytes_per_core"] // 2)
    arguments = (
        *(("pointer", i) for i in range(len(body.parameters) + bool(body_sites(body)))),
        *(("symbol", s.name) for s in body_symbols(body)),
        *(("map", m) for m in e.placed.maps),
    )
    cluster = tuple(body.notes.get("cluster", ()))
    waits = e.waits_before is not None or emit_barriers.dependent(e)
    grid = (product(body.grid),) if flat(body) else tuple(body.grid)
    return Entry(name, arguments, grid, 32 * e.warps, bytes_, cluster, waits)


def flat(body: Body) -> bool:
    """Whether the grid's axes are folded into one, along x: they would not fit."""
    return len(body.grid) > 3 or any(high(size) > 65535 for size in body.grid[1:])


def text_of(e: Emission, name: str) -> str:
    """The whole module."""
    body = e.body
    lines = [f".version {VERSION}", f".target {e.target.cpu or 'sm_90a'}", ".address_size 64", ""]
    if e.shared.bytes or e.shared.sizes:
        lines.append(".extern .shared .align 128 .b8 dynamic_shared[];")
    declared = [f"\t.param .u64 memory_{i}" for i in range(len(body.parameters))]
    declared += ["\t.param .u64 fault"] if body_sites(body) else []
    declared += [f"\t.param .s64 symbol_{s.name}" for s in body_symbols(body)]
    declared += [f"\t.param .align 64 .b8 map_{i}[128]" for i in e.placed.maps.values()]
    lines += [f".visible .entry {name}(", ",\n".join(declared), ")"]
    lines.append(f".maxntid {32 * e.warps}, 1, 1")
    resident = 1 if e.has("role") else body.notes.get("resident", 0)
    if resident:
        lines.append(f".minnctapersm {resident}")
    return "\n".join([*lines, "{", *e.w.declarations(), *e.w.lines, "}", ""])


def frame(e: Emission) -> None:
    """Thread number, parameters, shared memory."""
    w = e.w

    def pointer(name: str) -> str:
        return w.value("cvta.to.global.u64", w.value("ld.param.u64", f"[{name}]"))

    e.threads.number = w.value("mov.u32", "%tid.x")
    for i, parameter in enumerate(e.body.parameters):
        e.pointers[parameter] = pointer(f"memory_{i}")
    for i, site in enumerate(body_sites(e.body)):
        e.sites[site] = i + 1
    e.fault = pointer("fault") if e.sites else ""
    for symbol in body_symbols(e.body):
        e.values.symbols[symbol.name] = w.value("ld.param.s64", f"[symbol_{symbol.name}]")
    for map_, number in e.placed.maps.items():
        address = w.value("mov.u64", f"map_{number}")
        e.placed.map_addresses[map_] = w.value("cvta.param.u64", address)
    if e.has("allocate", "barrier"):
        e.shared.base = w.value("mov.u32", "dynamic_shared")
        if e.swizzled:
            e.shared.base = w.mask(w.add(e.shared.base, 1023), -1024)


# ---- Blocks -------------------------------------------------------------------------------------


def walk(e: Emission, block: Block) -> None:
    """Every Node in order; roles that follow one another are one branch, reductions that do
    and do not need one another one exchange."""
    number, nodes = 0, block.nodes
    while number < len(nodes):
        last = number + 1
        if nodes[number] is e.waits_before:
            e.w.put("griddepcontrol.wait")
        if (name := nodes[number].op.name) in ("role", "reduce"):
            while (
                last < len(nodes)
                and nodes[last].op.name == name
                and not (set(nodes[last].inputs) & set(nodes[number:last]))
            ):
                last += 1
        if name == "role":
            emit_barriers.roles(e, nodes[number:last])
        elif name == "reduce":
            emit_shape.reduces(e, [n for n in nodes[number:last] if not e.plan.free(n)])
        else:
            emit_node(e, nodes[number])
        number = last


def emit_node(e: Emission, node: Node) -> None:
    """Emit one Node; a value that is free is made where it is wanted."""
    name, elementwise = node.op.name, node.op.category in ELEMENTWISE
    scalar = node.type is not None and getattr(node.type, "shape", None) == ()
    if scalar and name == "constant":
        value = rules.constant(e.w, node.attrs["value"], e.values.dtype(node))
        e.values.held[node] = [value]
    elif scalar and elementwise:
        operands = tuple(e.values.scalar(i) for i in node.inputs)
        e.values.held[node] = [e.values.one(node, operands)]
    elif e.plan.free(node):
        return
    elif elementwise:
        e.values.held[node] = e.values.elementwise(node, e.plan.spread(node))
    elif name in OPS:
        found = OPS[name](e, node)
        if found is not None:
            e.values.held[node] = found
    else:
        raise InternalError("ptx.emit", f"no lowering for tile.{name} ({node!r})")


def program(e: Emission, node: Node) -> list[str]:
    """This program's number along an axis of the grid."""
    w, axis, grid = e.w, node.attrs["axis"], e.body.grid
    if not flat(e.body):
        number = w.value("mov.u32", f"%ctaid.{'xyz'[axis]}")
    else:
        value = w.value("cvt.u64.u32", w.value("mov.u32", "%ctaid.x"))
        below = product(grid[axis + 1 :])
        if below != 1:
            value = w.value("div.u64", value, e.values.size64(below))
        if axis:
            value = w.value("rem.u64", value, e.values.size64(grid[axis]))
        number = w.value("cvt.u32.u64", value)
    return [e.values.resize(number, int32, e.values.dtype(node))]


def symbol(e: Emission, node: Node) -> list[str]:
    """A Size as a scalar."""
    size = e.values.size64(node.attrs["value"])
    return [e.values.resize(size, int64, e.values.dtype(node))]


def require(e: Emission, node: Node) -> None:
    """A thread that holds an element for which the condition fails leaves the Site's number;
    of several any one is as good."""
    condition, w = node.inputs[0], e.w
    spread = e.plan.spread(condition) if not e.plan.free(condition) else None
    # held by nobody: any way to share it out will do
    held = e.values.get(condition, spread or blocked(condition.shape, e.threads.count, 1))
    whole, *rest = dict.fromkeys(held)
    for other in rest:
        whole = w.and_predicates(whole, other)
    number = w.copy("b32", e.sites[node])
    w.put("st.relaxed.sys.global.b32", f"[{e.fault}]", number, guard=f"!{whole}")


def hole(e: Emission, node: Node) -> None:
    """A hole that nobody filled."""
    raise InternalError("ptx.emit", f"the hole {node.attrs['name']!r} is not filled")


OPS: dict[str, Emit] = emitters(
    sys.modules[__name__],
    emit_memory,
    emit_elements,
    emit_shape,
    emit_dot,
    emit_control,
    emit_placed,
    emit_barriers,
    emit_copies,
    emit_matrix,
)

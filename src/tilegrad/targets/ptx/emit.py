"""From a Body to PTX text and the Entry that says how it is launched.

One entry per Body, one thread block per program. The portable level runs on all threads of the
block with barriers put in where shared memory changes hands; at the placed level every role is an
arm of one branch over the block's warps. Every op is a row of OPS: a function of the Emission and
the Node, in the file of its family.

Conditions and bounds are scalars, so all threads go the same way. What a loop carries has registers
of its own, set at the end of each turn; an unrolled loop hands values from one copy of its Block to
the next and leaves what does not fill a whole round to a plain loop. A Block is emitted with the
hazards that every way into it may bring. Invariant: pure text, no state: the same Body gives the
same text.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

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
    emit_copies,
    emit_dot,
    emit_elements,
    emit_matrix,
    emit_memory,
    emit_placed,
    emit_shape,
)
from .element import convert, kind_of, type_of
from .emission import Emission, Emit
from .plan_spread import ELEMENTWISE
from .program import Entry
from .spread import SCALAR, blocked
from .values import Carried
from .write import Registers, Writer

VERSION = "8.5"


def emit(body: Body, name: str, target: Target) -> tuple[str, Entry]:
    """The PTX of a Body and how to launch it."""
    e = Emission(body, target, walk)
    emit_copies.collect_maps(e)
    frame(e)
    start = len(e.lines)
    if e.waits_before is not None:
        e.put("griddepcontrol.launch_dependents")
    e.block(body.block)
    e.put("ret")
    written, e.lines = e.lines, []
    e.shared.frame()
    e.lines = [*written[:start], *e.lines, *written[start:]]
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
    given = tuple((kind, value) for kind, value, _ in arguments(e))
    cluster = tuple(body.notes.get("cluster", ()))
    waits = e.waits_before is not None or emit_barriers.dependent(e)
    grid = (product(body.grid),) if flat(body) else tuple(body.grid)
    return Entry(name, given, grid, 32 * e.warps, bytes_, cluster, waits)


def arguments(e: Emission) -> list[tuple[str, Any, str]]:
    """What the entry is given in order: as an Entry says it, and how it is declared."""
    pointers = [f"memory_{i}" for i in range(len(e.body.parameters))]
    pointers += ["fault"] if body_sites(e.body) else []
    symbols = [s.name for s in body_symbols(e.body)]
    return [
        *(("pointer", i, f".u64 {name}") for i, name in enumerate(pointers)),
        *(("symbol", name, f".s64 symbol_{name}") for name in symbols),
        *(("map", m, f".align 64 .b8 map_{i}[128]") for i, m in enumerate(e.maps)),
    ]


def flat(body: Body) -> bool:
    """Whether the grid's axes are folded into one, along x: they would not fit."""
    return len(body.grid) > 3 or any(high(size) > 65535 for size in body.grid[1:])


def text_of(e: Emission, name: str) -> str:
    """The whole module."""
    body = e.body
    lines = [f".version {VERSION}", f".target {e.target.cpu or 'sm_90a'}", ".address_size 64", ""]
    if e.shared.bytes or e.shared.sizes:
        lines.append(".extern .shared .align 128 .b8 dynamic_shared[];")
    declared = [f"\t.param {declaration}" for _, _, declaration in arguments(e)]
    lines += [f".visible .entry {name}(", ",\n".join(declared), ")"]
    lines.append(f".maxntid {32 * e.warps}, 1, 1")
    resident = 1 if e.has("role") else body.notes.get("resident", 0)
    if resident:
        lines.append(f".minnctapersm {resident}")
    return "\n".join([*lines, "{", *e.declarations(), *e.lines, "}", ""])


def frame(e: Emission) -> None:
    """Thread number, parameters, shared memory."""

    def pointer(name: str) -> str:
        return e.value("cvta.to.global.u64", e.value("ld.param.u64", f"[{name}]"))

    e.threads.number = e.value("mov.u32", "%tid.x")
    for i, parameter in enumerate(e.body.parameters):
        e.pointers[parameter] = pointer(f"memory_{i}")
    for i, site in enumerate(body_sites(e.body)):
        e.sites[site] = i + 1
    e.fault = pointer("fault") if e.sites else ""
    for symbol in body_symbols(e.body):
        given = partial(e.value, "ld.param.s64", f"[symbol_{symbol.name}]")
        e.memo.ever(("size", symbol), given)
    for number, map_ in enumerate(e.maps):
        e.maps[map_] = e.value("cvta.param.u64", e.value("mov.u64", f"map_{number}"))
    if e.has("allocate", "barrier"):
        e.shared.base = e.value("mov.u32", "dynamic_shared")
        if e.swizzled:
            e.shared.base = e.mask(e.add(e.shared.base, 1023), -1024)


# ---- Blocks -------------------------------------------------------------------------------------


def walk(e: Emission, block: Block) -> None:
    """Every Node in order; roles that follow one another are one branch, reductions that do
    and wait for as many of them one exchange."""
    number, nodes = 0, block.nodes
    while number < len(nodes):
        last = number + 1
        if nodes[number] is e.waits_before:
            e.put("griddepcontrol.wait")
        if (name := nodes[number].op.name) in ("role", "reduce"):
            while last < len(nodes) and nodes[last].op.name == name:
                last += 1
        if name == "role":
            emit_barriers.roles(e, nodes[number:last])
        elif name == "reduce":
            for some in as_late(nodes[number:last]):
                emit_shape.reduces(e, [n for n in some if not e.plan.free(n)])
        else:
            emit_node(e, nodes[number])
        number = last


def as_late(nodes: Sequence[Node]) -> list[list[Node]]:
    """Nodes in steps that do not need one another, each as late as what reads it lets it be."""
    left: dict[Node, int] = {}  # steps that follow a Node's own
    for node in reversed(nodes):
        left[node] = max((left[n] + 1 for n in left if node in n.inputs), default=0)
    return [
        [n for n in nodes if left[n] == step] for step in reversed(range(len({*left.values()})))
    ]


def emit_node(e: Emission, node: Node) -> None:
    """Emit one Node; a value that is free is made where it is wanted."""
    name, elementwise = node.op.name, node.op.category in ELEMENTWISE
    scalar = getattr(node.type, "shape", None) == ()
    if e.plan.free(node) and not scalar:
        return
    if elementwise or name in ("constant", "broadcast", "transpose", "words"):
        e.values.held[node] = e.values.make(node, e.plan.spread(node))
    elif name in PLAIN:
        if e.overlaps or "griddepcontrol" not in PLAIN[name]:
            guard = e.threads.first() if name == "commit_copies" else ""
            e.put(PLAIN[name], *node.attrs.values(), guard=guard)
    elif name in OPS:
        found = OPS[name](e, node)
        if found is not None:
            e.values.held[node] = found
    else:
        raise InternalError("ptx.emit", f"no lowering for tile.{name} ({node!r})")


def program(e: Emission, node: Node) -> Registers:
    """This program's number along an axis of the grid."""
    axis, grid = node.attrs["axis"], e.body.grid
    if not flat(e.body):
        number = e.value("mov.u32", f"%ctaid.{'xyz'[axis]}")
    else:
        value = e.value("cvt.u64.u32", e.value("mov.u32", "%ctaid.x"))
        below = product(grid[axis + 1 :])
        if below != 1:
            value = e.value("div.u64", value, e.values.size64(below))
        if axis:
            value = e.value("rem.u64", value, e.values.size64(grid[axis]))
        number = e.value("cvt.u32.u64", value)
    return [convert(e, int32, e.values.dtype(node), number)]


def symbol(e: Emission, node: Node) -> Registers:
    """A Size as a scalar."""
    size = e.values.size64(node.attrs["value"])
    return [convert(e, int64, e.values.dtype(node), size)]


def require(e: Emission, node: Node) -> None:
    """A thread that holds an element for which the condition fails leaves the Site's number;
    of several any one is as good."""
    condition = node.inputs[0]
    spread = e.plan.spread(condition) if not e.plan.free(condition) else None
    # held by nobody: any way to share it out will do
    held = e.values.get(condition, spread or blocked(condition.shape, e.threads.count, 1))
    whole, number = e.all_of(held), e.copy("b32", e.sites[node])
    e.put("st.relaxed.sys.global.b32", f"[{e.fault}]", number, guard=f"!{whole}")


# ---- loops and branches -------------------------------------------------------------------------


MOST_UNROLLED = 600  # Nodes


def loop(e: Emission, node: Node) -> None:
    """A Block in turns."""
    index, *carries = node.blocks[0].arguments
    dtype = e.values.dtype(index)
    start, stop = (e.values.get(i, SCALAR, dtype)[0] for i in node.inputs[:2])
    kept = []
    for argument, given in zip(carries, node.inputs[2:]):
        kept.append(e.values.carried(argument))
        e.values.put(kept[-1], given)
    counter, times = e.copy(kind_of(dtype), start), copies(e, node)
    if times > 1:
        limit = e.value(f"sub.{type_of(dtype)}", stop, (times - 1) * node.attrs["step"])
        turns(e, node, kept, counter, limit, times)
    turns(e, node, kept, counter, stop, 1)
    e.results[node] = {number: one.held(e) for number, one in enumerate(kept)}


def copies(e: Emission, node: Node) -> int:
    """Copies of a loop's Block in one turn."""
    times = max(1, node.attrs["unroll"])
    small = len(list(node.blocks[0].all_nodes())) * times <= MOST_UNROLLED
    plain = not node.blocks[0].find("allocate", "barrier", "role")
    return times if small and plain and e.threads.role < 0 else 1


def turns(
    e: Emission, node: Node, carried: list[Carried], counter: str, stop: str, times: int
) -> None:
    """A loop of so many copies of a Block."""
    block, held, step = node.blocks[0], e.values.held, node.attrs["step"]
    type_ = type_of(e.values.dtype(block.arguments[0]))
    head, done, more = e.label("loop"), e.label("done"), e.new("pred")
    e.put(f"setp.ge.{type_}", more, counter, stop)
    e.put("bra.uni", done, guard=more)
    e.place(head)
    with e.shared.loop():
        values = [one.held(e) for one in carried]
        index = counter
        for copy in range(times):
            with e.memo.inside():
                held[block.arguments[0]] = [index]
                held.update((one.like, registers) for one, registers in zip(carried, values))
                e.block(block)
                values = [e.values.given(r, one.like) for r, one in zip(block.results, carried)]
            if copy + 1 < times:
                index = e.value(f"add.{type_}", index, step)
        values = [one.packed(e, new) for one, new in zip(carried, values)]
        swap(e, carried, values)
    e.put(f"add.{type_}", counter, counter, step * times)
    e.put(f"setp.lt.{type_}", more, counter, stop)
    e.put("bra.uni", head, guard=more)
    e.place(done)


def swap(w: Writer, carried: list[Carried], values: list[Registers]) -> None:
    """Set all carried registers at once: a value may be another's old register."""
    targets = {r for one in carried for r in one.registers}
    for one, new in zip(carried, values):
        if any(r in targets and r != own for r, own in zip(new, one.registers)):
            new[:] = [w.copy(one.kind, r) for r in new]
    for one, new in zip(carried, values):
        for own, register in zip(one.registers, new):
            if own != register:
                w.put(f"mov.{one.kind}", own, register)


# ---- results and branches -----------------------------------------------------------------------


def get(e: Emission, node: Node) -> Registers:
    """A result of a loop or branch."""
    return e.results[node.inputs[0]][node.attrs["index"]]


def branch(e: Emission, node: Node) -> None:
    """One Block or the other."""
    hazards = e.shared.hazards
    otherwise, done = e.label("else"), e.label("end")
    gets = {n.attrs["index"]: n for n in e.nodes if n.op.name == "get" and n.inputs[0] is node}
    results = {number: e.values.carried(like) for number, like in gets.items()}
    e.put("bra.uni", otherwise, guard=f"!{e.values.scalar(node.inputs[0])}")
    before, after = hazards.state(), []
    for block in node.blocks:
        hazards.join(before)
        with e.memo.inside():
            e.block(block)
            for number, one in results.items():
                e.values.put(one, block.results[number])
        after.append(hazards.state())
        if block is node.blocks[0]:
            e.put("bra.uni", done)
            e.place(otherwise)
    e.place(done)
    hazards.join(*after)
    e.results[node] = {number: one.held(e) for number, one in results.items()}


# Ops that are one instruction, on the numbers that they have as attrs.
PLAIN = {
    "matrix_fence": "wgmma.fence.sync.aligned",
    "matrix_commit": "wgmma.commit_group.sync.aligned",
    "matrix_wait": "wgmma.wait_group.sync.aligned",
    "commit_copies": "cp.async.bulk.commit_group",
    "commit_threads": "cp.async.commit_group",
    "wait_threads": "cp.async.wait_group",
    "grid_dependency_wait": "griddepcontrol.wait",
    "grid_launch_dependents": "griddepcontrol.launch_dependents",
}
OPS: dict[str, Emit] = emitters(
    sys.modules[__name__],
    emit_memory,
    emit_elements,
    emit_shape,
    emit_dot,
    emit_placed,
    emit_barriers,
    emit_copies,
    emit_matrix,
)

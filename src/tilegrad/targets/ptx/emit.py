"""From a Body to PTX text and the Entry that says how it is launched.

One entry per Body, one thread block per program. The portable level runs on all threads of the
block with barriers put in where shared memory changes hands; at the placed level every role is
an arm of one branch over the block's warps. Invariant: pure text, no state: the same Body gives
the same text.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from ...core.dtype import int32, int64
from ...core.errors import InternalError, UserError
from ...core.target import Target
from ...ir.block import Block
from ...ir.node import Node
from ...ir.symbol import Size, high
from ...ir.types import Memory, product
from ...tile.build import Body, body_sites, body_symbols
from . import rules
from .emit_control import ControlEmitter
from .emit_memory import SWIZZLES, all_nodes
from .emit_placed import arrivals
from .emit_shared import Hazards
from .plan_cluster import ends_alone
from .plan_spread import ELEMENTWISE
from .program import Entry, TensorMap
from .spread import blocked

VERSION = "8.5"
REGISTERS = 65_536  # of a multiprocessor
ONE_THREAD = {
    "wait",
    "expect",
    "arrive",
    "arrive_remote",
    "copy_async",
    "copy_multicast",
    "copy_store",
    "cluster_rank",
    "commit_copies",
    "wait_copies",
    "loop",
    "branch",
    "get",
    "grid_dependency_wait",
    "grid_launch_dependents",
    "program",
    "symbol",
    "constant",
    "fence",
}


def entry_registers(warps: int) -> int:
    """Registers that a thread has at entry where so many warps have the machine to themselves."""
    return min(255, REGISTERS // (32 * warps) // 8 * 8)


def emit(body: Body, name: str, target: Target) -> tuple[str, Entry]:
    """The PTX of a Body and how to launch it."""
    return Emitter(body, target).run(name)


class Emitter(ControlEmitter):
    """Emits one Body."""

    def run(self, name: str) -> tuple[str, Entry]:
        """Emit the entry."""
        self.collect_maps(self.body.block)
        self.frame()
        start = len(self.w.lines)
        if self.waits_first:
            self.w.put("griddepcontrol.launch_dependents")
            self.w.put("griddepcontrol.wait")
        self.block(self.body.block)
        self.w.put("ret")
        self.w.lines[start:start] = self.scratch_frame()
        symbols = [s.name for s in body_symbols(self.body)]
        pointers = len(self.body.parameters) + bool(self.sites)
        arguments: list[tuple[str, Any]] = [("pointer", i) for i in range(pointers)]
        arguments += [("symbol", s) for s in symbols]
        arguments += [("map", m) for m in self.maps]
        bytes_ = self.shared_bytes + (1024 if self.swizzled else 0)
        if self.body.notes.get("alone"):  # two of them do not fit on a core
            bytes_ = max(bytes_, self.target.limits["shared_bytes_per_core"] // 2)
        entry = Entry(
            name,
            tuple(arguments),
            self.launch_grid(),
            32 * self.warps,
            bytes_,
            tuple(self.body.notes.get("cluster", ())),
            self.dependent(),
        )
        text = self.text(name)
        if self.target.cpu == "sm_80" and ("e4m3x2" in text or "e5m2x2" in text):
            raise UserError(
                "this GPU does not convert floats of 8 bits",
                op=self.body.name,
                expected="compute capability 9.0",
                got=self.target.cpu,
            )
        return text, entry

    def dependent(self) -> bool:
        """Whether the entry waits for its dependency itself."""
        return self.overlaps and (
            self.waits_first
            or any(n.op.name == "grid_dependency_wait" for n in all_nodes(self.body.block))
        )

    @property
    def waits_first(self) -> bool:
        """Whether the entry waits before all else, so that launches may overlap: a Body that
        does not say itself when, on a machine that can."""
        said = ("role", "grid_dependency_wait", "grid_launch_dependents")
        return self.overlaps and not any(n.op.name in said for n in all_nodes(self.body.block))

    def launch_grid(self) -> tuple[Size, ...]:
        """The grid: as the Body has it, or all of it along x where it would not fit."""
        return (product(self.body.grid),) if self.flat else tuple(self.body.grid)

    @property
    def flat(self) -> bool:
        """Whether the grid's axes are folded into one."""
        grid = self.body.grid
        return len(grid) > 3 or any(high(size) > 65535 for size in grid[1:])

    @property
    def swizzled(self) -> bool:
        """Whether some place is swizzled: its address must be a multiple of 1024."""
        return any(
            n.op.name == "allocate" and SWIZZLES.get(n.attrs["layout"], 0)
            for n in all_nodes(self.body.block)
        )

    # ---- text -----------------------------------------------------------------------------

    def text(self, name: str) -> str:
        """The whole module."""
        arch = self.target.cpu or "sm_90a"
        lines = [f".version {VERSION}", f".target {arch}", ".address_size 64", ""]
        if self.shared_bytes or self.scratch_bytes:
            lines.append(".extern .shared .align 128 .b8 dynamic_shared[];")
        lines += [f".visible .entry {name}(", ",\n".join(self.declared()), ")"]
        lines.append(f".maxntid {32 * self.warps}, 1, 1")
        resident = 1 if self.has_roles else self.body.notes.get("resident", 0)
        if resident:
            lines.append(f".minnctapersm {resident}")
        lines.append("{")
        return "\n".join([*lines, *self.w.declarations(), *self.w.lines, "}", ""])

    def declared(self) -> list[str]:
        """The `.param` lines."""
        found = [f"\t.param .u64 memory_{i}" for i in range(len(self.body.parameters))]
        found += ["\t.param .u64 fault"] if self.sites else []
        found += [f"\t.param .s64 symbol_{s.name}" for s in body_symbols(self.body)]
        return found + [f"\t.param .align 64 .b8 map_{i}[128]" for i in self.maps.values()]

    @property
    def has_roles(self) -> bool:
        """Whether the Body has roles."""
        return any(n.op.name == "role" for n in self.body.block.nodes)

    # ---- frame ----------------------------------------------------------------------------

    def frame(self) -> None:
        """Thread number, parameters, shared memory."""
        w = self.w
        self.thread = w.value("b32", "mov.u32", "%tid.x")
        for i, parameter in enumerate(self.body.parameters):
            generic = w.value("b64", "ld.param.u64", f"[memory_{i}]")
            self.pointers[parameter] = w.value("b64", "cvta.to.global.u64", generic)
        self.sites = {node: i + 1 for i, node in enumerate(body_sites(self.body))}
        if self.sites:
            generic = w.value("b64", "ld.param.u64", "[fault]")
            self.fault = w.value("b64", "cvta.to.global.u64", generic)
        for symbol in body_symbols(self.body):
            self.symbols[symbol.name] = w.value("b64", "ld.param.s64", f"[symbol_{symbol.name}]")
        for map_, number in self.maps.items():
            address = w.value("b64", "mov.u64", f"map_{number}")
            self.map_addresses[map_] = w.value("b64", "cvta.param.u64", address)
        if any(n.op.name in ("allocate", "barrier") for n in all_nodes(self.body.block)):
            base = w.value("b32", "mov.u32", "dynamic_shared")
            if self.swizzled:
                base = w.value("b32", "add.s32", base, "1023")
                base = w.value("b32", "and.b32", base, "-1024")
            self.base = base

    def scratch_frame(self) -> list[str]:
        """Lines for the entry's start: where scratch lies, and registers with a first value."""
        w = self.w
        written, w.lines = w.lines, []
        if self.scratch_bases and not self.base:
            self.base = w.value("b32", "mov.u32", "dynamic_shared")
        if self.scratch_swapped:
            most = max(self.scratch_bytes[key] for key in self.scratch_keys())
            self.scratch_bytes.update(dict.fromkeys(self.scratch_keys(), most))
        for key, register in self.scratch_bases.items():
            at = self.reserve(self.scratch_bytes[key], 128)
            w.put("add.s32", register, self.base, str(at))
        for register, value in self.toggles.items():
            w.put("mov.b32", register, str(value))
        made, w.lines = w.lines, written
        return made

    def collect_maps(self, block: Block) -> None:
        """Find the tensor maps that copies need, so that they can be parameters."""
        for node in all_nodes(block):
            if node.op.name not in ("copy_async", "copy_store", "copy_multicast", "copy_pages"):
                continue
            order = (1, 0) if node.op.name == "copy_store" else (0, 1)
            place, memory = (node.inputs[i] for i in order)
            assert isinstance(place.type, Memory)
            box, _, _ = self.boxes(place.type, node.attrs["shape"])
            self.map_of(memory, place.type, box, node.attrs["axes"])

    # ---- Blocks ---------------------------------------------------------------------------

    def block(self, block: Block) -> None:
        """Every Node in order; roles that follow one another are one branch, reductions that do
        and do not need one another one exchange."""
        number = 0
        nodes = block.nodes
        while number < len(nodes):
            last = number + 1
            if (name := nodes[number].op.name) in ("role", "reduce"):
                while (
                    last < len(nodes)
                    and nodes[last].op.name == name
                    and not (set(nodes[last].inputs) & set(nodes[number:last]))
                ):
                    last += 1
            if name == "role":
                self.roles(nodes[number:last])
            elif name == "reduce":
                self.reduces([n for n in nodes[number:last] if not self.plan.free(n)])
            else:
                self.node(nodes[number])
            number = last

    def node(self, node: Node) -> None:
        """Emit one Node."""
        if (
            node.type is not None
            and getattr(node.type, "shape", None) == ()
            and (node.op.group in ELEMENTWISE or node.op.name == "constant")
        ):
            self.held[node] = self.scalar_op(node)
            return
        if self.plan.free(node):
            return
        if node.op.group in ELEMENTWISE:
            self.held[node] = self.elementwise(node, self.plan.spread(node))
            return
        method: Callable[[Node], None] | None = getattr(self, f"emit_{node.op.name}", None)
        if method is None:
            raise InternalError("ptx.emit", f"no lowering for tile.{node.op.name} ({node!r})")
        method(node)

    def scalar_op(self, node: Node) -> list[str]:
        """A scalar."""
        if node.op.name == "constant":
            return [rules.constant(self.w, node.attrs["value"], self.dtype(node))]
        return [self.one(node, tuple(self.scalar(i) for i in node.inputs))]

    def emit_program(self, node: Node) -> None:
        axis = node.attrs["axis"]
        if not self.flat:
            self.held[node] = [self.w.value("b32", "mov.u32", f"%ctaid.{'xyz'[axis]}")]
        else:
            number = self.w.value("b32", "mov.u32", "%ctaid.x")
            value = self.w.value("b64", "cvt.u64.u32", number)
            below = product(self.body.grid[axis + 1 :])
            if below != 1:
                value = self.w.value("b64", "div.u64", value, self.size64(below))
            if axis:
                value = self.w.value("b64", "rem.u64", value, self.size64(self.body.grid[axis]))
            self.held[node] = [self.w.value("b32", "cvt.u32.u64", value)]
        if self.dtype(node) is int64:
            self.held[node] = [self.resize(self.held[node][0], int32, int64)]

    def emit_symbol(self, node: Node) -> None:
        self.held[node] = [self.resize(self.size64(node.attrs["value"]), int64, self.dtype(node))]

    def emit_require(self, node: Node) -> None:
        """A thread that holds an element for which the condition fails leaves the Site's number;
        of several any one is as good."""
        condition, w = node.inputs[0], self.w
        if self.plan.free(condition):  # held by nobody: any way to share it out will do
            held = self.get(condition, blocked(condition.shape, self.threads, 1))
        else:
            held = self.own(condition) if condition.shape else [self.scalar(condition)]
        whole, *rest = dict.fromkeys(held)
        for other in rest:
            whole = w.value("pred", "and.pred", whole, other)
        number = w.value("b32", "mov.b32", str(self.sites[node]))
        w.put("st.relaxed.sys.global.b32", f"[{self.fault}]", number, guard=f"!{whole}")

    def emit_hole(self, node: Node) -> None:
        raise InternalError("ptx.emit", f"the hole {node.attrs['name']!r} is not filled")

    # ---- roles ----------------------------------------------------------------------------

    def roles(self, nodes: list[Node]) -> None:
        """Barriers are made ready; then every role is an arm of one branch over the warps."""
        w = self.w
        self.start_barriers(nodes)
        whole, all_threads = self.thread, self.threads
        warp = w.value(
            "b32", "shfl.sync.idx.b32", w.value("b32", "shr.u32", whole, "5"), "0", "31", "-1"
        )
        join, first = w.label("join"), 0
        for number, node in enumerate(nodes):
            warps = node.attrs["warps"]
            after = w.label("role")
            if number + 1 < len(nodes):
                past = w.value("pred", "setp.ge.u32", warp, str(first + warps))
                w.put("bra", after, guard=past)
            self.made.append({})
            self.thread = whole if first == 0 else w.value("b32", "sub.s32", whole, str(32 * first))
            self.threads, self.role_number, self.in_role = 32 * warps, number, True
            self.hazards = Hazards()
            self.role(node, join)
            self.made.pop()
            w.put("bra", join)
            w.place(after)
            first += warps
        w.place(join)
        if self.dependent():  # warps without work wait too
            w.put("griddepcontrol.wait")
        if self.body.notes.get("cluster") and not ends_alone(self.body):
            # nobody leaves while another may still reach in
            w.put("barrier.cluster.arrive.aligned")
            w.put("barrier.cluster.wait.aligned")
        self.thread, self.threads, self.in_role, self.single = whole, all_threads, False, False

    def role(self, node: Node, join: str) -> None:
        """One role: its registers, then its Block."""
        w, registers = self.w, node.attrs["registers"]
        if registers:
            way = "inc" if registers > entry_registers(self.warps) else "dec"
            w.put(f"setmaxnreg.{way}.sync.aligned.u32", str(registers))
        self.single = one_thread(node)
        if self.single or one_warp(node):
            w.put("bra", join, guard=w.value("pred", "setp.ge.u32", self.thread, "32"))
        self.inner(node.blocks[0])
        self.leave()

    def start_barriers(self, roles: list[Node]) -> None:
        """One thread sets the counts of all barriers; then the block meets."""
        w = self.w
        if not self.barriers and not self.maps and not self.body.notes.get("cluster"):
            return
        first = w.value("pred", "setp.eq.s32", self.thread, "0")
        skip = w.label("ready")
        w.put("bra", skip, guard=f"!{first}")
        for map_ in self.maps:
            w.put("prefetch.tensormap", f"[{self.map_addresses[map_]}]")
        factors = barrier_factors(roles, self.telling)
        for node, at in self.barriers.items():
            count = node.attrs["count"] * factors.get(node, 1)
            address = w.value("b32", "add.s32", self.base, str(at))
            for stage in range(node.attrs["stages"]):
                w.put("mbarrier.init.shared::cta.b64", f"[{address}+{8 * stage}]", str(count))
        w.put("fence.mbarrier_init.release.cluster")
        w.place(skip)
        if self.body.notes.get("cluster"):
            w.put("barrier.cluster.arrive.aligned")
            w.put("barrier.cluster.wait.aligned")
        else:
            w.put("bar.sync", "0")


def one_thread(role: Node) -> bool:
    """Whether a role does nothing that needs more than one thread: one warp runs it."""
    nodes = list(all_nodes(role.blocks[0]))
    plain = all(n.op.name in ONE_THREAD or getattr(n.type, "shape", None) == () for n in nodes)
    return plain and any(n.op.name.startswith("copy_") for n in nodes)


def one_warp(role: Node) -> bool:
    """Whether a role of copies needs the threads of one warp alone: the others leave. They would
    wait at barriers that come round without them, and one late by a round would wait for ever."""
    nodes = list(all_nodes(role.blocks[0]))
    small = all(n.op.name in (*ONE_THREAD, "copy_pages") or _elements(n) <= 32 for n in nodes)
    return (
        small
        and any(n.op.name == "copy_pages" for n in nodes)
        and not any(n.op.name in ("arrive", "arrive_remote", "named_sync") for n in nodes)
    )


def _elements(node: Node) -> int:
    """How many values a Node has in a role; many for what is no tile."""
    shape = getattr(node.type, "shape", None)
    return 64 if shape is None or isinstance(node.type, Memory) else prod(shape)


def barrier_factors(roles: list[Node], telling: set[Node]) -> dict[Node, int]:
    """For each barrier, how many arrivals of the machine one of the Body's stands for."""
    found: dict[Node, int] = {}
    for role in roles:
        single = one_thread(role)
        for node in all_nodes(role.blocks[0]):
            if node.op.name not in ("arrive", "expect", "arrive_remote"):
                continue
            factor = arrivals(role.attrs["warps"], single, node in telling, node)
            if found.setdefault(node.inputs[0], factor) != factor:
                raise InternalError("ptx.emit", "roles of different sizes arrive at one barrier")
    return found


__all__ = ["TensorMap", "emit"]

"""From a Graph to a Schedule: fuse, lower each group to Bodies, order, plan memory.

Groups of equal structure are lowered once and share their Bodies, so the time to compile does
not grow with the depth of a model. Invariant: the Schedule computes the results of the Graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..core.config import config
from ..core.errors import InternalError, StateError
from ..core.target import Target
from ..ir.fingerprint import Place, digest, structure
from ..ir.node import Node, needs, topological
from ..ir.symbol import high, multiply
from ..ir.types import Tuple, product
from ..tile.build import prune
from .attention import lower_attention
from .beside import put_side_by_side
from .call import lower_call, state_behind, states_of, work_of_body
from .check import check_schedule
from .control import Frame, lower_control, overwritten
from .cost import bytes_moved, work_of
from .dot import lower_dot
from .dot_joint import join_dots
from .dot_wide import takes_parts
from .epilogue import leave_long_epilogues
from .fuse import DOTS, Fuser, Group
from .handed import hand_over, keep_sums
from .in_place import take_over
from .join import lower_join
from .loops import LoopLowering
from .operands import lay_out
from .order import bit, need
from .reuse import plan_memory, set_lives
from .rows import lower_cumulative, lower_sort
from .schedule import Copy, Kernel, Launch, Schedule, Slot
from .threads.both import pair_up
from .threads.lower import lower_threads
from .threads.recompute import compute_again
from .threads.rounding import rounded_nodes
from .threads.update import lower_update as threads_update
from .update import lower_update


class Lowering:
    """Lowers one Graph for one Target."""

    def __init__(
        self,
        arguments: Sequence[Node],
        results: Sequence[Node],
        target: Target,
        donated: Sequence[int] = (),
        bodies: Any = None,
    ) -> None:
        self.arguments, self.results, self.target = list(arguments), list(results), target
        self.wanted = set(self.results)
        self.donated = {self.arguments[i] for i in donated}
        self.strict = set(self.donated)  # a copy of these would break a promise
        self.rounded: set[Node] = set()  # of which only 16 bits are ever seen
        self.bodies: Any = {} if bodies is None else bodies  # dict or Recent
        self.frame = Frame()
        self.slots, self.kernels = self.frame.slots, self.frame.kernels
        self.depth = 0
        self.slot_of: dict[Node, int] = {}
        self.targets: dict[Node, Callable[[], int]] | None = None  # where a Block's results go

    def run(self) -> Schedule:
        """The Schedule."""
        for a in self.arguments:
            self.slot_of[a] = self.new_slot(a.type, "input")
        self.lower_all()
        outputs = [self.output_slot(r) for r in self.results]
        inputs = [self.slot_of[a] for a in self.arguments]
        schedule = Schedule(self.slots, self.kernels, inputs, outputs)
        set_lives(schedule, self.frame.loops, self.frame.pairs, self.frame.always)
        if take_over(schedule, self.frame.loops, self.fuser.values):
            set_lives(schedule, self.frame.loops, self.frame.pairs, self.frame.always)
        if self.target.has_threads and not self.frame.loops:
            put_side_by_side(schedule.kernels, self.slots)  # in what is left to launch
            set_lives(schedule, self.frame.loops, self.frame.pairs, self.frame.always)
        plan_memory(schedule)
        if config().verify:
            check_schedule(schedule)
        return schedule

    def lower_all(self) -> None:
        """Fuse, and add the Kernels of every group."""
        self.fuser = Fuser(self.arguments, self.results)
        if self.target.has_threads:
            compute_again(self.fuser.extents, self.arguments, self.results)
            keep_sums(self.fuser.values, self.arguments, self.results)
            hand_over(self.fuser.values, self.arguments, self.results)
            lay_out(self.fuser.values, self.arguments, self.results, self.target)
            self.fuser.look_ahead()
            self.rounded = rounded_nodes(self.results)
            self.fuser.takes_parts = partial(takes_parts, target=self.target)
        groups = self.fuser.run()
        if self.target.has_threads:
            leave_long_epilogues(self.fuser, self.target, self.rounded)
            groups = join_dots(self.fuser, self.target)
        self.order_updates(groups)
        ordered = self.fuser.in_order()
        if self.target.has_threads:
            ordered = pair_up(ordered, self.fuser.values, self.results)
        for group in ordered:
            self.lower(group)

    def nested(self, arguments: Sequence[Node], results: Sequence[Node]) -> Lowering:
        """A Lowering of a Block, into the same list of Kernels and over the same Slots."""
        inner = Lowering(arguments, results, self.target, (), self.bodies)
        inner.frame, inner.slots, inner.kernels = self.frame, self.slots, self.kernels
        inner.depth, inner.targets = self.depth + 1, {}
        return inner

    def new_slot(self, type_: Any, kind: str, name: str = "") -> int:
        """A new Slot."""
        slot = Slot(len(self.slots), type_, kind, name)
        self.slots.append(slot)
        return slot.number

    def place(self, node: Node) -> int:
        """The Slot a value is written to."""
        if self.targets is None:
            return self.new_slot(node.type, "output" if node in self.wanted else "scratch")
        found = self.targets.pop(node, None)
        return self.new_slot(node.type, "scratch") if found is None else found()

    def output_slot(self, node: Node) -> int:
        """The Slot a result is read from."""
        if node not in self.slot_of:
            raise InternalError("schedule.lower", f"{node!r} was never stored")
        return self.slot_of[node]

    # ---- groups ---------------------------------------------------------------------------

    def reads_of(self, group: Group) -> list[Node]:
        """Stored values a group reads, in the order its structure names them."""
        inside = set(group.values)
        values = self.fuser.values

        def stop(node: Node) -> bool:
            return node in values and node not in inside

        order = topological(group.stored or group.values, stop)
        return [n for n in order if stop(n)]

    def lower(self, group: Group) -> None:
        """Add the Kernel of a group."""
        if group.kind == "control":
            lower_control(self, group)
            return
        reads = self.reads_of(group)
        for v in group.stored:
            if not isinstance(v.type, Tuple) and not self.shares_slot(v):
                self.slot_of[v] = self.place(v)
        if group.kind == "update":
            self.lower_state(group, reads)
            return
        if group.kind == "join":
            lower_join(self, group, reads)
            return
        group.rounded = self.rounded
        if group.kind in DOTS and not self.depth and self.target.has_threads:
            group.constants = {r for r in reads if r in self.arguments and r not in self.donated}
        key = self.key(group, reads)
        found = self.bodies.get(key)
        if found is None:
            tag = digest(self.key(group, reads, {}))[:8]  # the same wherever it was written
            found = self.bodies[key] = self.lower_bodies(group, reads, tag)
            for body, _ in found:
                prune(body.block, set())
        self.add_kernel(group, reads, key, found)

    def key(
        self, group: Group, reads: Sequence[Node], places: dict[Place, int] | None = None
    ) -> Any:
        """Equal for groups that can share Bodies."""
        results = [v for v in (group.stored or group.values)]
        constant = tuple(r in group.constants for r in reads)
        inside = [n for n in topological(results, set(reads).__contains__) if n not in reads]
        rounded = tuple(n in group.rounded for n in inside) if group.rounded else ()
        return (
            group.kind,
            group.order,
            group.rows,
            constant,
            rounded,
            structure(reads, results, places),
        )

    def lower_bodies(self, group: Group, reads: list[Node], tag: str) -> Any:
        """Bodies with, for each parameter, ('read', i), ('store', i) or ('scratch', type)."""
        group.reads = set(reads)
        stored = [v for v in group.stored if not isinstance(v.type, Tuple)]
        given = [("read", i) for i in range(len(reads))] + [
            ("store", i) for i in range(len(stored))
        ]
        if any(product(v.shape) == 0 for v in stored) and len(stored) == len(group.stored):
            if all(product(v.shape) == 0 for v in stored):
                return []
        if group.kind == "call":
            return lower_call(group, reads, self.target)
        name = f"{group.kind}_{_title(group)}_{tag}"
        if group.kind == "attention":
            return lower_attention(group.values[0], reads, stored, self.target, name)
        if self.target.has_threads:
            return lower_threads(group, reads, self.fuser.values, self.target, name)
        if group.kind in ("loops", "mixed"):
            lowering = LoopLowering(group, self.fuser.values, self.target, name)
            lowering.reads = reads
            return [(lowering.lower(), given)]
        if group.kind == "dot":
            return lower_dot(group, reads, self.fuser.values, self.target, name)
        if group.kind == "cumulative":
            return [(lower_cumulative(group, reads, self.fuser.values, self.target, name), given)]
        if group.kind == "sort":
            return lower_sort(group, reads, self.fuser.values, self.target, name)
        raise InternalError("schedule.lower", f"no lowering for {group.kind}: {group.values}")

    def add_kernel(self, group: Group, reads: Sequence[Node], key: Any, bodies: Any) -> None:
        """Put a group's launches into the Schedule."""
        stored = [v for v in group.stored if not isinstance(v.type, Tuple)]
        name = bodies[0][0].name if bodies else f"{group.kind}_empty"
        kernel = Kernel(name, group.kind, (tuple(reads), tuple(stored)), depth=self.depth)
        kernel.flops = work_of(reads, stored)[0]
        moved = [*reads, *stored]
        held: dict[int, int] = {}
        if group.kind == "call":
            for body, _ in bodies:
                kernel.flops = kernel.flops + work_of_body(body)
            held, kernel.steps = self.hold_states(group.values[0], stored)
            states = {state for _, state in states_of(group.values[0])}  # of which little moves
            moved = [v for v in moved if v not in states and state_behind(v) is None]
        kernel.bytes = bytes_moved(moved)
        kernel.notes["group"] = group
        scratch: dict[Any, int] = {}
        for body, roles in bodies:
            slots = []
            for role, what in roles:
                if role == "read":
                    slots.append(self.slot_of[reads[what]])
                elif role == "store":
                    slots.append(self.slot_of[stored[what]])
                elif role == "state":
                    slots.append(held[what])
                else:
                    if (role, what) not in scratch:  # an Array, or one with a name
                        type_ = what[0] if isinstance(what, tuple) else what
                        scratch[(role, what)] = self.new_slot(type_, "scratch")
                    slots.append(scratch[(role, what)])
            kernel.steps.append(Launch(body, tuple(slots)))
        kernel.key = name
        self.kernels.append(kernel)

    # ---- state ----------------------------------------------------------------------------

    def order_updates(self, groups: Sequence[Group]) -> None:
        """Let readers of a state run before it is overwritten, where that is possible."""
        self.in_place: set[tuple[Node, int]] = set()
        readers: dict[Node, list[Group]] = {}
        dependents: dict[int, list[Group]] = {}
        for group in groups:
            for node in group.reads:
                readers.setdefault(node, []).append(group)
            for number in group.after:
                dependents.setdefault(number, []).append(group)
        for group in groups:
            for number, state, promised in overwritten(group):
                if not self.may_overwrite(state):
                    continue
                others = [g for g in readers.get(state, ()) if g is not group]
                late = [g for g in others if g.needs >> group.number & 1]
                if needs(group.values[0]).count(state) > 1:
                    late = [group]  # it reads what it would overwrite
                if late or state in self.wanted:
                    if state in self.strict and promised:
                        raise self.refuse(late[0].values[0] if late else state)
                    continue
                self.in_place.add((group.values[0], number))
                for g in others:
                    group.after.add(g.number)
                    dependents.setdefault(g.number, []).append(group)
                    need(group, bit(g.number) | g.needs, dependents)

    def refuse(self, reader: Node) -> StateError:
        """A donated state would have to be copied."""
        return StateError(
            "a donated state is read after it is updated: it would be copied",
            op="update",
            expected="no other reader after the update",
            got=f"{reader.op.name} at {reader.location}",
            hint="read the state before updating it, or use the updated one",
        )

    def may_overwrite(self, state: Node) -> bool:
        """Whether the storage of a state may be taken over."""
        if state in self.arguments:
            return state in self.donated
        return state in self.fuser.values and state in self.fuser.group_of

    def shares_slot(self, node: Node) -> bool:
        """Whether a state in place has the very Slot it had before: control may move it."""
        found = state_behind(node)
        if found is None or found[:2] not in self.in_place or found[2] not in self.slot_of:
            return False
        state = found[2]
        moved = self.slot_of[state] in self.frame.moved
        if not self.depth and moved and node in self.wanted:
            self.in_place.discard(found[:2])  # an output has a place of its own
            return False
        if self.depth or moved:
            self.slot_of[node] = self.slot_of[state]
            return True
        return False

    def hold(self, slot: Slot, writer: Node, number: int, state: Node) -> list[Any]:
        """Let a Slot hold a state that is about to be written: in place, or by a copy."""
        if state not in self.slot_of or slot.number == self.slot_of[state]:
            return []
        source = self.slots[self.slot_of[state]]
        if (writer, number) not in self.in_place:
            size = multiply(product(state.shape), state.dtype.size)
            return [Copy(source.number, slot.number, size)]
        if slot.kind == "output" and source.kind == "scratch":
            source.kind = "output" if source.alias is None else source.kind
        slot.alias = source.number
        return []

    def hold_states(self, call: Node, stored: Sequence[Node]) -> tuple[dict[int, int], list[Any]]:
        """Slots of the states that a call writes, by argument, and the copies that need be."""
        held: dict[int, int] = {}
        steps: list[Any] = []
        wanted = {found[1]: v for v in stored if (found := state_behind(v)) is not None}
        for argument, (number, state) in zip(call.attrs["callee"].states, states_of(call)):
            after = wanted.get(number)  # None: nobody reads the state that is left
            slot = self.new_slot(state.type, "scratch") if after is None else self.slot_of[after]
            steps += self.hold(self.slots[slot], call, number, state)
            held[argument] = slot
        return held, steps

    def lower_state(self, group: Group, reads: list[Node]) -> None:
        """update: in place, or on a copy."""
        node = group.values[0]
        slot = self.slots[self.slot_of[node]]
        state = node.inputs[0]
        steps = self.hold(slot, node, 0, state)
        launches = self.update_launches(group, reads, slot.number, state in self.slot_of)
        steps += launches
        name = launches[-1].body.name if launches else "update"
        kernel = Kernel(name, "update", (tuple(reads), (node,)), steps, depth=self.depth)
        kernel.flops = product(node.inputs[1].shape)
        kernel.bytes = bytes_moved([r for r in reads if r is not state])
        kernel.notes["group"] = group
        self.kernels.append(kernel)

    def update_launches(self, group: Group, reads: list[Node], slot: int, stored: bool) -> Any:
        """The launches of an update into a Slot, those that fill it first included."""
        if self.target.has_threads:
            return self.threads_update(group, reads, slot, stored)
        body, body_reads, fills = lower_update(group, reads, self.fuser.values, self.target, stored)
        found = [*fills, *([] if body is None else [(body, body_reads)])]
        return [Launch(b, (*(self.slot_of[r] for r in rs), slot)) for b, rs in found]

    def threads_update(self, group: Group, reads: list[Node], slot: int, stored: bool) -> Any:
        """The same for programs of threads: several launches over scratch."""
        scratch: dict[Any, int] = {}
        launches = []
        key = ("update", stored, self.key(group, reads))
        found = self.bodies.get(key)
        if found is None:
            values = self.fuser.values
            found = self.bodies[key] = threads_update(group, reads, values, self.target, stored)
            for body, _ in found:
                prune(body.block, set())
        for body, roles in found:
            slots = []
            for role, what in roles:
                if role == "scratch" and what not in scratch:
                    scratch[what] = self.new_slot(what[0], "scratch")
                slots.append(
                    self.slot_of[reads[what]]
                    if role == "read"
                    else slot
                    if role == "state"
                    else scratch[what]
                )
            launches.append(Launch(body, tuple(slots)))
        return launches


def _title(group: Group) -> str:
    names = [v.op.name for v in group.values]
    return "_".join(dict.fromkeys(names[:4]))


def tiny(schedule: Schedule) -> bool:
    """Whether waking workers would cost more than it saves."""
    cost = sum((high(k.flops) + high(k.bytes)) * k.times for k in schedule.kernels)
    return cost < 400_000


def lower_graph(
    arguments: Sequence[Node],
    results: Sequence[Node],
    target: Target,
    donated: Sequence[int] = (),
    bodies: Any = None,
) -> Schedule:
    """The Schedule of a Graph."""
    return Lowering(arguments, results, target, donated, bodies).run()

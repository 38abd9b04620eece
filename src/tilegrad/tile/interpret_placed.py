"""What the ops of the placed level do in the interpreter.

Asynchronous ops note at once what they will touch (so that a race shows whatever turn is taken)
and move data when the scheduler completes them. Invariant: HANDLERS and CONTROLS together have
one row per op of `placed` but `role`, which the scheduler runs itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.errors import InternalError
from ..ir.node import Node
from . import numeric
from .concurrent import Named, Phases, RaceError, Steps, Waiting, join

if TYPE_CHECKING:
    from .concurrent import Agent
    from .interpret import Frame, Interpreter, Storage

Array = np.ndarray[Any, Any]


def _ints(frame: Frame, nodes: Any) -> list[int]:
    return [int(frame.values[n]) for n in nodes]


def _whole(storage: Storage, lead: list[int], node: Node) -> Array:
    """Offsets of the tile at a leading index of a place."""
    for position, size in zip(lead, storage.shape):
        if not 0 <= position < size:
            raise InternalError(
                "tile.interpret", f"{node.op.name} at {lead} leaves {storage.name}{storage.shape}"
            )
    rank = len(storage.shape)
    shape = storage.shape[len(lead) :]
    offset, _ = storage.offsets([*lead, *[0] * len(shape)], shape, tuple(range(len(lead), rank)))
    return np.asarray(offset)


def _barrier(self: Interpreter, frame: Frame, node: Node) -> Any:
    a = node.attrs
    names = [self.name(f"{a['name']}[{stage}]") for stage in range(a["stages"])]
    return [Phases(name, a["count"]) for name in names]


def _phases(frame: Frame, node: Node, first: int, stages: Any = None) -> Phases:
    index = int(frame.values[node.inputs[first + 1]])
    stages = frame.values[node.inputs[first]] if stages is None else stages
    if not 0 <= index < len(stages):
        raise InternalError(
            "tile.interpret", f"{node.op.name} at stage {index} of {len(stages)} barriers"
        )
    found: Phases = stages[index]
    return found


def _arrive(self: Interpreter, frame: Frame, node: Node) -> None:
    _phases(frame, node, 0).update(frame.agent.release(), 1, 0)


def _expect(self: Interpreter, frame: Frame, node: Node) -> None:
    _phases(frame, node, 0).update(frame.agent.release(), 1, node.attrs["bytes"])


def _wait(self: Interpreter, frame: Frame, node: Node) -> Steps:
    phases, parity = _phases(frame, node, 0), int(frame.values[node.inputs[2]])

    def ready() -> bool:
        return phases.phase % 2 != parity

    if not ready():
        yield Waiting(ready, lambda: f"{phases} with parity {parity}")
    join(frame.agent.clock, phases.seen)


def _named_arrive(self: Interpreter, frame: Frame, node: Node) -> Named:
    number = node.attrs["number"]
    named = self.named.setdefault(number, Named(number))
    named.arrive(frame.agent, node.attrs["threads"])
    return named


def _named_sync(self: Interpreter, frame: Frame, node: Node) -> Steps:
    number, threads = node.attrs["number"], node.attrs["threads"]
    named = self.named.setdefault(number, Named(number))
    generation = named.arrive(frame.agent, threads)

    def ready() -> bool:
        return named.generation > generation

    if not ready():
        yield Waiting(
            ready, lambda: f"named barrier {number} ({named.arrived} of {threads} threads came)"
        )
    join(frame.agent.clock, named.seen[generation])
    groups = frame.agent.groups.get("copy_threads")
    if groups is not None:  # what each thread waited for, all now know of
        join(frame.agent.clock, {groups.engine.number: groups.known})


def _fence(self: Interpreter, frame: Frame, node: Node) -> None:
    if node.attrs["kind"] == "async":
        for storage, offset in frame.agent.unfenced:
            if storage.history is not None:
                storage.history.plain[offset] = False
        frame.agent.unfenced = []


def _copy_async(self: Interpreter, frame: Frame, node: Node) -> None:
    place, memory = (frame.values[i] for i in node.inputs[:2])
    row, shape = node.attrs["row"], node.attrs["shape"]
    whole = _whole(place, _ints(frame, node.inputs[4 + len(memory.shape) :]), node)
    _begin_copy(self, frame, node, place, whole[row : row + shape[0]], _phases(frame, node, 2))


def _begin_copy(
    self: Interpreter,
    frame: Frame,
    node: Node,
    place: Storage,
    into: Array,
    phases: Phases,
    index: list[int] | None = None,
) -> None:
    """A copy to a place, whose bytes land on a barrier at some time."""
    memory, agent, shape = frame.values[node.inputs[1]], frame.agent, node.attrs["shape"]
    if index is None:
        index = _ints(frame, node.inputs[4 : 4 + len(memory.shape)])
    offset, inside = memory.offsets(index, shape, node.attrs["axes"])
    copy = self.machine.agent(f"{node.op.name} of {agent.name}", agent.release())
    copy.depends = agent.depends
    self.machine.note_read(copy, memory, offset, inside)
    self.machine.note_write(copy, place, into)
    bytes_ = place.type.dtype.storage_bytes(into.size)

    def land() -> None:
        box = np.zeros(shape, place.data.dtype)
        box[inside] = memory.data[offset[inside]]
        place.data[into] = box
        phases.update(copy.clock, 0, -bytes_)

    self.machine.queues[("copy", copy.number)] = [land]


def _copy_pages(self: Interpreter, frame: Frame, node: Node) -> None:
    place, memory = (frame.values[i] for i in node.inputs[:2])
    rank, rows = len(memory.shape), node.attrs["shape"][0]
    whole = _whole(place, _ints(frame, node.inputs[5 + rank :]), node)
    index = _ints(frame, node.inputs[5 : 5 + rank])
    for number, page in enumerate(frame.values[node.inputs[4]]):
        into = whole[number * rows : (number + 1) * rows]
        own = [index[0] + int(page), *index[1:]]
        _begin_copy(self, frame, node, place, into, _phases(frame, node, 2), own)


def _copy_multicast(self: Interpreter, frame: Frame, node: Node) -> None:
    memory, shape = frame.values[node.inputs[1]], node.attrs["shape"]
    *lead, row, first = _ints(frame, node.inputs[4 + len(memory.shape) :])
    chosen = node.attrs["mask"] << first
    if chosen >> len(self.machine.programs):
        raise InternalError(
            "tile.interpret",
            f"copy_multicast to ranks {chosen:b}, of a cluster of {len(self.machine.programs)}",
        )
    for rank in range(len(self.machine.programs)):
        if chosen >> rank & 1:
            place = _remote(self, node, node.inputs[0], rank)
            whole = _whole(place, lead, node)
            if not 0 <= row <= len(whole) - shape[0]:
                raise InternalError(
                    "tile.interpret",
                    f"copy_multicast of rows from {row} on leaves {place.name}{place.shape}",
                )
            phases = _phases(frame, node, 2, _remote(self, node, node.inputs[2], rank))
            _begin_copy(self, frame, node, place, whole[row : row + shape[0]], phases)


def _remote(self: Interpreter, node: Node, what: Node, rank: int) -> Any:
    """What a place or a barrier is in the program of a rank."""
    programs = self.machine.programs
    if not 0 <= rank < len(programs):
        raise InternalError(
            "tile.interpret", f"{node.op.name} to rank {rank} of a cluster of {len(programs)}"
        )
    values = programs[rank].frame.values
    if what not in values:
        raise InternalError(
            "tile.interpret", f"{node.op.name}: rank {rank} has no such place outside of roles"
        )
    return values[what]


def _clear_rows(self: Interpreter, frame: Frame, node: Node) -> None:
    storage, (start, stop, *lead) = frame.values[node.inputs[0]], _ints(frame, node.inputs[1:])
    offset = _whole(storage, lead, node)[max(start, 0) : max(stop, 0)]
    self.write(frame, storage, offset, np.zeros(offset.shape, storage.data.dtype), None)


def _arrive_remote(self: Interpreter, frame: Frame, node: Node) -> None:
    stages = _remote(self, node, node.inputs[0], int(frame.values[node.inputs[2]]))
    _phases(frame, node, 0, stages).update(frame.agent.release(), 1, 0)


def _send(self: Interpreter, frame: Frame, node: Node) -> None:
    value, agent = frame.values[node.inputs[1]], frame.agent
    lead, programs = _ints(frame, node.inputs[4:]), len(self.machine.programs)
    to, ranks = node.attrs["to"], [*range(programs)]
    if to == "one":
        ranks, lead = lead[:1], lead[1:]
    if to == "shares" and len(value) != programs * node.inputs[0].shape[len(lead)]:
        raise InternalError("tile.interpret", f"send of {value.shape} to {programs} programs")
    shares = np.split(value, programs) if to == "shares" else [value] * len(ranks)
    for rank, share in zip(ranks, shares):
        storage = _remote(self, node, node.inputs[0], rank)
        phases = _phases(frame, node, 2, _remote(self, node, node.inputs[2], rank))
        into = _whole(storage, lead, node)
        copy = self.machine.agent(f"send of {agent.name}", agent.release())
        copy.depends = agent.depends
        self.machine.note_write(copy, storage, into)
        _land(self, copy, storage, into, share, phases)


def _land(
    self: Interpreter, copy: Agent, storage: Storage, into: Array, share: Array, phases: Phases
) -> None:
    """A share of what is sent lands at some time; who waits for it knows of it, and of nothing
    else that the sender did."""
    bytes_ = storage.type.dtype.storage_bytes(into.size)
    own = {copy.number: copy.clock[copy.number]}

    def land() -> None:
        storage.data[into] = share
        phases.update(own, 0, -bytes_)

    self.machine.queues[("send", copy.number)] = [land]


def _cluster_rank(self: Interpreter, frame: Frame, node: Node) -> Any:
    return np.asarray(self.rank or 0, np.int64)


def _copy_store(self: Interpreter, frame: Frame, node: Node) -> None:
    memory, place = (frame.values[i] for i in node.inputs[:2])
    rank = len(memory.shape)
    index = _ints(frame, node.inputs[2 : 2 + rank])
    source = _whole(place, _ints(frame, node.inputs[2 + rank :]), node)
    offset, inside = memory.offsets(index, node.attrs["shape"], node.attrs["axes"])

    def land() -> None:
        memory.data[offset[inside]] = place.data[source][inside]

    engine = self.machine.issue(frame.agent, "copy_store", land)
    self.machine.note_read(engine, place, source)
    self.machine.note_write(engine, memory, offset, inside)


def _copy_threads(self: Interpreter, frame: Frame, node: Node) -> None:
    place, memory = (frame.values[i] for i in node.inputs[:2])
    rank, row, shape = len(memory.shape), node.attrs["row"], node.attrs["shape"]
    index = _ints(frame, node.inputs[2 : 2 + rank])
    into = _whole(place, _ints(frame, node.inputs[2 + rank :]), node)[row : row + shape[0]]
    offset, inside = memory.offsets(index, shape, node.attrs["axes"])

    def land() -> None:
        box = np.zeros(shape, place.data.dtype)
        box[inside] = memory.data[offset[inside]]
        place.data[into] = box

    engine = self.machine.issue(frame.agent, "copy_threads", land)
    self.machine.note_read(engine, memory, offset, inside)
    self.machine.note_write(engine, place, into)


def _store_threads(self: Interpreter, frame: Frame, node: Node) -> None:
    memory, place = (frame.values[i] for i in node.inputs[:2])
    rank = len(memory.shape)
    index = _ints(frame, node.inputs[2 : 2 + rank])
    source = _whole(place, _ints(frame, node.inputs[2 + rank :]), node)
    offset, inside = memory.offsets(index, node.attrs["shape"], node.attrs["axes"])
    self.write(frame, memory, offset, self.read(frame, place, source, None), inside)


def _load_operand(self: Interpreter, frame: Frame, node: Node) -> None:
    operand, place = (frame.values[i] for i in node.inputs[:2])
    source = _whole(place, _ints(frame, node.inputs[2:]), node)
    source = source.T if node.attrs["transpose"] else source
    start, wide = node.attrs["start"], operand.shape[1]
    value = self.read(frame, place, source[:, start : start + wide], None)
    self.write(frame, operand, _whole(operand, [], node), value, None)


def _matrix_sync(self: Interpreter, frame: Frame, node: Node) -> None:
    total, left, right = (frame.values[i] for i in node.inputs)
    old, a, b = (self.read(frame, x, _whole(x, [], node), None) for x in (total, left, right))
    value = numeric.dot(a, b.T, old, total.type.dtype)
    self.write(frame, total, _whole(total, [], node), value, None)


def _matrix_async(self: Interpreter, frame: Frame, node: Node) -> None:
    places = [frame.values[i] for i in node.inputs[:3]]
    accumulate, rest = bool(frame.values[node.inputs[3]]), _ints(frame, node.inputs[4:])
    regions = []
    for place in places:
        lead, rest = rest[: len(place.shape) - 2], rest[len(place.shape) - 2 :]
        regions.append(_whole(place, lead, node))
        touched = id(place) in frame.agent.registers or not frame.agent.fenced
        if touched and place.type.scope == "register":
            raise RaceError(
                "tile.interpret",
                f"{frame.agent.name} uses {place.name} in matrix_async without matrix_fence",
            )
    total, left, right = places

    def product() -> None:
        a, b = left.data[regions[1]], right.data[regions[2]]
        a = a.T if node.attrs["transpose_a"] else a
        b = (b.T if node.attrs["transpose_b"] else b)[:, : total.type.shape[-1]]
        old = total.data[regions[0]] if accumulate else np.zeros_like(total.data[regions[0]])
        total.data[regions[0]] = numeric.dot(a, b, old, total.type.dtype)

    engine = self.machine.issue(frame.agent, "matrix_async", product)
    self.machine.note_read(engine, left, regions[1])
    self.machine.note_read(engine, right, regions[2])
    if accumulate:
        self.machine.note_read(engine, total, regions[0])
    self.machine.note_write(engine, total, regions[0])


def _matrix_fence(self: Interpreter, frame: Frame, node: Node) -> None:
    frame.agent.registers.clear()
    frame.agent.fenced = True


def _commit(kind: str) -> Callable[[Interpreter, Frame, Node], None]:
    def handler(self: Interpreter, frame: Frame, node: Node) -> None:
        groups = self.machine.groups(frame.agent, kind)
        groups.groups.append(groups.open)
        groups.open = []

    return handler


def _group_wait(kind: str) -> Callable[[Interpreter, Frame, Node], Steps]:
    def handler(self: Interpreter, frame: Frame, node: Node) -> Steps:
        groups, pending = self.machine.groups(frame.agent, kind), node.attrs["pending"]
        covered = groups.groups[: max(0, len(groups.groups) - pending)]
        last = max([op for group in covered for op in group], default=0)

        def ready() -> bool:
            return groups.done >= last

        if not ready():
            yield Waiting(ready, lambda: f"its groups of {kind}, all but {pending}")
        groups.known = max(groups.known, last)
        if kind == "copy_threads":  # each thread knows of its own alone, until they meet
            return
        join(frame.agent.clock, {groups.engine.number: last})

    return handler


def _register_tile(self: Interpreter, frame: Frame, node: Node) -> Any:
    from .interpret import Storage, poison

    attrs = node.attrs
    data = poison(attrs["shape"], attrs["dtype"])
    storage = Storage(self.name(f"register#{node.serial}"), node, data, self.symbols)
    self.track(storage)
    return storage


def _read_place(self: Interpreter, frame: Frame, node: Node) -> Any:
    storage = frame.values[node.inputs[0]]
    offset = _whole(storage, _ints(frame, node.inputs[1:]), node)
    if node.attrs["rows"]:
        first, count = node.attrs["rows"]
        offset = offset[first : first + count]
    return self.read(frame, storage, offset, None)


def _write_place(self: Interpreter, frame: Frame, node: Node) -> None:
    storage, value = (frame.values[i] for i in node.inputs[:2])
    offset = _whole(storage, _ints(frame, node.inputs[2:]), node)
    self.write(frame, storage, offset, value, None)


def _atomic_add(self: Interpreter, frame: Frame, node: Node) -> Any:
    storage, value, offset = (frame.values[i] for i in node.inputs[:3])
    mask = frame.values[node.inputs[3]] if len(node.inputs) > 3 else np.ones(offset.shape, np.bool_)
    offset = self.checked(node, storage, offset, mask)
    self.machine.depends(frame.agent, storage, "writes")
    before = np.zeros(offset.shape, storage.data.dtype)
    dtype = storage.type.dtype
    for at in np.ndindex(offset.shape):
        if mask[at]:
            where = int(offset[at])
            before[at] = storage.data[where]
            new = numeric.elementwise(
                "add", dtype, [storage.data[where : where + 1], np.asarray([value[at]])]
            )
            storage.data[where] = new[0]
    return before


def _store_add(self: Interpreter, frame: Frame, node: Node) -> None:
    storage, value = (frame.values[i] for i in node.inputs[:2])
    offset, inside = storage.offsets(_ints(frame, node.inputs[2:]), value.shape, node.attrs["axes"])
    if not np.all(inside):
        raise InternalError("tile.interpret", f"store_add leaves {storage.name}{storage.shape}")
    self.machine.depends(frame.agent, storage, "writes")
    storage.data[offset] = numeric.elementwise(
        "add", storage.type.dtype, [storage.data[offset], value]
    )


def _dependency(self: Interpreter, frame: Frame, node: Node) -> None:
    frame.agent.depends = True


def _nothing(self: Interpreter, frame: Frame, node: Node) -> None:
    return None


HANDLERS: dict[str, Callable[[Interpreter, Frame, Node], Any]] = {
    "barrier": _barrier,
    "arrive": _arrive,
    "expect": _expect,
    "named_arrive": _named_arrive,
    "fence": _fence,
    "copy_async": _copy_async,
    "copy_store": _copy_store,
    "commit_copies": _commit("copy_store"),
    "matrix_async": _matrix_async,
    "matrix_fence": _matrix_fence,
    "matrix_commit": _commit("matrix_async"),
    "register_tile": _register_tile,
    "read_place": _read_place,
    "write_place": _write_place,
    "atomic_add": _atomic_add,
    "store_add": _store_add,
    "grid_dependency_wait": _dependency,
    "grid_launch_dependents": _nothing,
    "copy_multicast": _copy_multicast,
    "copy_pages": _copy_pages,
    "arrive_remote": _arrive_remote,
    "cluster_rank": _cluster_rank,
    "send": _send,
    "clear_rows": _clear_rows,
    "copy_threads": _copy_threads,
    "commit_threads": _commit("copy_threads"),
    "store_threads": _store_threads,
    "load_operand": _load_operand,
    "matrix_sync": _matrix_sync,
}
CONTROLS: dict[str, Callable[[Interpreter, Frame, Node], Steps]] = {
    "wait": _wait,
    "named_sync": _named_sync,
    "wait_copies": _group_wait("copy_store"),
    "matrix_wait": _group_wait("matrix_async"),
    "wait_threads": _group_wait("copy_threads"),
}

"""Run a Body with NumPy: slow, exact and suspicious, the judge of every target.

Programs of the grid run one after another, those of a cluster (Body.notes["cluster"]) together.
Within them the roles of the placed level run interleaved (see `concurrent`). What an op computes,
reads and writes stands in its row; here is how that is done, at once or at some time, and the few
ops whose elements depend on each other:

* an index outside of a Memory's shape (or of its storage) is an InternalError that names the op
  and the index, unless a mask leaves it out or the op clips;
* a new place each time `allocate` is reached, filled with nan (0xA5 in every byte of an integer),
  so that a read before a write shows;
* `scatter` and `atomic_add` take equal offsets in order; `sort` sorts the first `count` elements of
  keys in place, places moved along, and leaves the two scratch Memories alone.

Invariant: memories passed in change only where the Body stores; nothing else outlives `run`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from ..core.dtype import DType
from ..core.errors import InternalError, Site
from ..ir.block import Block
from ..ir.node import Node
from ..ir.symbol import evaluate
from ..ir.text import print_node
from ..ir.types import Shape, Tile, unravel
from . import numeric, row
from .build import Body
from .check import PLACED_OPS
from .concurrent import Frame, Judge, Machine, Steps, cluster_of
from .happening import come
from .ordering import scalar
from .row import TileOp, Touch, compute, effects_of, memory_of, touch_of
from .skeleton import OF_RUN

Array = np.ndarray[Any, Any]
Values = dict[Node, Any]


def run(
    body: Body,
    memories: Sequence[Array],
    symbols: Mapping[str, int] | None = None,
    programs: Iterable[int] | None = None,
    *,
    seed: int | None = None,
) -> None:
    """Run all programs of the grid, or the listed ones (row-major numbers), in order.

    Of a cluster all programs run if one is listed. `memories` are changed in place. Roles take
    turns, and copies land as late as they can; with a seed both happen in a random order that the
    seed decides.
    """
    bound = dict(symbols or {})
    grid = tuple(evaluate(size, bound) for size in body.grid)
    chosen = range(math.prod(grid)) if programs is None else programs
    storages = parameters(body, memories, bound)
    judged = bool(body.block.find(*PLACED_OPS))
    for programs_at in together(chosen, grid, math.prod(body.notes.get("cluster", (1,)))):
        order = Judge(body, bound, len(programs_at))
        machine = Machine(seed, order)
        group = []
        for rank, at in enumerate(programs_at):
            frame = Frame(order.roles[rank, None], dict(zip(body.parameters, storages)))
            group.append(Interpreter(body, bound, machine, at, rank, frame, judged))
        machine.run(group)


def together(chosen: Iterable[int], grid: Shape, size: int) -> Iterator[list[Shape]]:
    """The programs that run together."""
    done = set[Shape]()
    if size > 1 and (not grid or grid[0] % size):
        raise InternalError("tile.interpret", f"a grid {grid} of clusters of {size}")
    for number in chosen:
        group = cluster_of(unravel(number, grid), size)
        if group[0] not in done:
            done.add(group[0])
            yield group


def parameters(body: Body, memories: Sequence[Array], symbols: Mapping[str, int]) -> list[Storage]:
    """The storages of a Body's parameters."""
    if len(memories) != len(body.parameters):
        wanted = [p.attrs["name"] for p in body.parameters]
        raise InternalError("tile.interpret", f"{len(memories)} memories for {wanted}")
    found = []
    for node, array in zip(body.parameters, memories):
        if array.dtype != node.dtype.numpy or not array.flags.c_contiguous:
            raise InternalError(
                "tile.interpret",
                f"{node.attrs['name']} is {node.type}, not contiguous {array.dtype}",
            )
        found.append(Storage(node.attrs["name"], node, array.reshape(-1), symbols))
    return found


class Storage:
    """A Memory at run time: flat data, sizes and strides as numbers."""

    def __init__(self, name: str, node: Node, data: Array, symbols: Mapping[str, int]) -> None:
        type_ = memory_of(node)
        self.name, self.type, self.data = name, type_, data
        self.shape = tuple(evaluate(s, symbols) for s in type_.shape)
        self.strides = tuple(evaluate(s, symbols) for s in type_.element_strides())

    def elements(
        self, touch: Touch, values: Mapping[Node, Any], node: Node
    ) -> tuple[Array, Array | None]:
        """Offsets of what is touched, and where that is meant (None: everywhere); an error names
        the Node."""
        mask = None if touch.mask is None else values[touch.mask]
        if touch.offsets is not None:
            offset = values[touch.offsets]
        elif not touch.index:
            offset = np.arange(self.data.size).reshape(self.shape)
        else:
            index = [scalar(s, values) for s in touch.index]
            shapes = touch.shape, touch.axes, self.shape, self.strides
            if touch.pages is not None:
                first, *rest = index
                at = [[first + int(page), *rest] for page in values[touch.pages]]
                boxes = [numeric.box(own, *shapes) for own in at]
                offset, inside = (np.concatenate(part) for part in zip(*boxes))
            else:
                offset, inside = numeric.box(index, *shapes)
            if touch.clips:
                return offset, inside
            bad = ~inside if mask is None else ~inside & mask
            if bad.any():
                where = f"{tuple(index)} of tile {touch.shape}"
                raise outside(node, f"{where} leaves {self.name}<{self.shape}>")
        bad = (offset < 0) | (offset >= self.data.size)
        if mask is not None:
            mask = np.broadcast_to(mask, offset.shape)
            bad, offset = bad & mask, np.where(mask, offset, 0)
        if bad.any():
            where = f"offset {int(offset[bad][0])} of {self.name}"
            raise outside(node, f"{where}, which has {self.data.size} elements")
        return offset, mask


def outside(node: Node, where: str) -> InternalError:
    """The error of an access that leaves a Memory."""
    text = f"{node.op.name} at {where}\n    {print_node(node)}\n "
    return InternalError("tile.interpret", text)


class Located(NamedTuple):
    """Elements of a storage that an op reads or writes."""

    storage: Storage
    offset: Array
    mask: Array | None
    writes: bool

    def read(self) -> Array:
        """What they hold; 0 where masked off."""
        data, offset, mask = self.storage.data, self.offset, self.mask
        if mask is None:
            return np.asarray(data[offset])
        found = np.zeros(offset.shape, data.dtype)
        found[mask] = data[offset[mask]]
        return found

    def write(self, value: Array) -> None:
        """Give them values, in order."""
        if self.mask is None:
            self.storage.data[self.offset.reshape(-1)] = np.asarray(value).reshape(-1)
        else:
            self.storage.data[self.offset[self.mask]] = np.asarray(value)[self.mask]


def poison(shape: Shape, dtype: DType) -> Array:
    """Data of a place that nobody has written."""
    if dtype.is_float:
        return np.full(math.prod(shape), np.nan, np.float32).astype(dtype.numpy)
    return np.full(math.prod(shape) * dtype.size, 0xA5, np.uint8).view(dtype.numpy)


def located(values: Values, node: Node, touch: Touch) -> Located:
    """The elements of a Touch."""
    storage: Storage = values[touch.memory]
    return Located(storage, *storage.elements(touch, values, node), touch.writes)


def move(node: Node, touched: Sequence[Located | None], values: Values) -> Any:
    """Read, compute, and write or give the result."""
    given: list[Any] = [t and t.read() for t in touched if t is None or not t.writes]
    written = [t for t in touched if t is not None and t.writes]
    if written and isinstance(node.inputs[1].type, Tile):
        given.append(values[node.inputs[1]])
    meaning = node.op.numpy if isinstance(node.op, TileOp) else None
    with np.errstate(all="ignore"):
        result = given[-1] if meaning is None else meaning(node, *given)
    for one in written:
        one.write(result)
    return None if written else result


@dataclass(eq=False)
class Interpreter:
    """Runs one program."""

    body: Body
    symbols: Mapping[str, int]
    machine: Machine
    program: Shape
    rank: int
    frame: Frame
    judged: bool  # a Body of the placed level, where ops may be at odds

    # ---- blocks and Nodes -------------------------------------------------------------------

    def block(self, frame: Frame, block: Block) -> Steps:
        """Run the Nodes of a Block; gives its results."""
        values = frame.values
        for are_roles, nodes in groupby(block.nodes, lambda n: n.op.name == "role"):
            if are_roles:
                if frame is not self.frame:
                    raise InternalError("tile.interpret", "a role stands inside of a role")
                yield list(nodes)
                continue
            for node in nodes:
                name = node.op.name
                if name == "loop":
                    values[node] = yield from self.loop(frame, node)
                elif name == "branch":
                    chosen = node.blocks[0 if bool(values[node.inputs[0]]) else 1]
                    values[node] = yield from self.block(frame, chosen)
                elif name in OF_RUN:
                    values[node] = np.asarray(OF_RUN[name](self, node.attrs), np.int64)
                elif node.op.effect:
                    values[node] = yield from self.act(frame, node)
                else:
                    values[node] = compute(node, [values[i] for i in node.inputs])
        return [values[r] for r in block.results]

    def loop(self, frame: Frame, node: Node) -> Steps:
        """As written; `unroll` changes nothing."""
        values, block = frame.values, node.blocks[0]
        lower, upper = (int(values[i]) for i in node.inputs[:2])
        carried = [values[i] for i in node.inputs[2:]]
        for index in range(lower, upper, node.attrs["step"]):
            values[block.arguments[0]] = np.asarray(index, np.int64)
            values.update(zip(block.arguments[1:], carried))
            carried = yield from self.block(frame, block)
        return carried

    # ---- effects ----------------------------------------------------------------------------

    def act(self, frame: Frame, node: Node) -> Steps:
        """A Node with effects: judged, then done."""
        values = frame.values
        if self.judged:
            yield from come(self.machine.order, frame.role, node, values)
        special = SPECIAL.get(node.op.name)
        found = special(self, values, node) if special else self.usual(frame, node)
        if frame is not self.frame:
            yield None
        return found

    def usual(self, frame: Frame, node: Node) -> Any:
        """What the Effects of a Node and its meaning say."""
        values, effects = frame.values, effects_of(node)
        touches = [e for e in effects if isinstance(e, Touch)]
        if touches:
            return move(node, [located(values, node, touch) for touch in touches], values)
        for effect in effects:
            if isinstance(effect, row.Work):
                self.later(frame, node, effect)
            elif isinstance(effect, row.Land):
                self.land(frame, node, effect)
            elif isinstance(effect, row.Drain):
                known = frame.role.groups[effect.engine].known
                self.machine.complete((frame.role.number, effect.engine), until=known)
        return None

    def later(self, frame: Frame, node: Node, work: row.Work) -> None:
        """Work of an engine."""
        role, values = frame.role, frame.values
        touched = [
            located(values, node, touch) if touch.when is None or values[touch.when] else None
            for touch in work.touches
        ]
        number = role.groups[work.engine].issued
        key = (role.number, work.engine)
        self.machine.issue(key, number, lambda: move(node, touched, {}))

    def land(self, frame: Frame, node: Node, land: row.Land) -> None:
        """A copy to places, whose bytes land on barriers at some time."""
        order, role, values = self.machine.order, frame.role, frame.values
        assert order.late is not None
        ranks, counts = order.reached(role, node, land, values), order.late
        order.late = []
        given: Sequence[Any]
        if land.source is not None:
            given = [located(values, node, land.source)] * len(ranks)
        elif land.parts:
            given = np.split(values[node.inputs[1]], land.parts)
        else:
            given = [values[node.inputs[1]]] * len(ranks)
        for rank, count, one in zip(ranks, counts, given):
            storage = self.remote(frame, node, land.into.memory, rank)
            into = Located(storage, *storage.elements(land.into, values, node), True)

            def work(into: Located = into, one: Any = one, count: Any = count) -> None:
                into.write(one.read() if isinstance(one, Located) else one)
                count()

            self.machine.issue(("copy", id(count)), 0, work)

    def remote(self, frame: Frame, node: Node, what: Node, rank: int) -> Storage:
        """What a place is in the program of a rank."""
        values = frame.values if rank == self.rank else self.machine.programs[rank].frame.values
        if what not in values:
            raise InternalError(
                "tile.interpret", f"{node.op.name}: rank {rank} has no such place outside of roles"
            )
        found: Storage = values[what]
        return found


# ---- places, and ops whose elements depend on each other or on data ------------------------------


def _place(self: Interpreter, values: Values, node: Node) -> Storage:
    data = poison(node.attrs["shape"], node.attrs["dtype"])
    return Storage(f"{memory_of(node).scope}#{node.serial}", node, data, self.symbols)


def _scatter(self: Interpreter, values: Values, node: Node) -> None:
    into = located(values, node, touch_of(node))
    written = into.offset if into.mask is None else into.offset[into.mask]
    if self.body.notes.get("distinct") and len(np.unique(written)) < written.size:
        name = self.body.name
        raise InternalError("tile.interpret", f"{name} writes an element twice in one scatter")
    into.write(values[node.inputs[1]])


def _atomic_add(self: Interpreter, values: Values, node: Node) -> Array:
    """Elements grow by values, one after another; gives what each was before."""
    into = located(values, node, touch_of(node))
    data, offset, mask = into.storage.data, into.offset, into.mask
    value = np.broadcast_to(values[node.inputs[1]], offset.shape)
    before = np.zeros(offset.shape, data.dtype)
    with np.errstate(all="ignore"):
        for at in np.ndindex(offset.shape):
            if mask is None or mask[at]:
                before[at] = old = data[offset[at]]
                data[offset[at]] = numeric.elementwise("add", node.dtype, [old, value[at]])
    return before


def _sort(self: Interpreter, values: Values, node: Node) -> None:
    keys, numbers = (values[i].data for i in node.inputs[:2])
    count = int(values[node.inputs[4]])
    order = stable_order(keys[:count], node.attrs["descending"])
    keys[:count], numbers[:count] = keys[:count][order], numbers[:count][order]


def stable_order(row: Array, descending: bool) -> Array:
    """Positions in sorted order; equal keys keep theirs, nan is above every number."""
    wide = row.astype(np.float64) if row.dtype.kind == "V" or row.dtype.itemsize < 4 else row
    if not descending:
        return np.argsort(wide, kind="stable")
    return row.size - 1 - np.argsort(wide[::-1], kind="stable")[::-1]


def _clear_rows(self: Interpreter, values: Values, node: Node) -> None:
    into = located(values, node, touch_of(node))
    start, stop = (max(0, int(values[i])) for i in node.inputs[1:3])
    whole = len(into.offset) == node.inputs[0].shape[-2]  # else these rows alone
    into.storage.data[into.offset[start:stop] if whole else into.offset] = 0


def _require(self: Interpreter, values: Values, node: Node) -> None:
    if not np.all(values[node.inputs[0]]):
        raise Site(node.attrs["message"], node.attrs["location"]).error()


def _hole(self: Interpreter, values: Values, node: Node) -> None:
    raise InternalError("tile.interpret", f"the hole {node.attrs['name']!r} is not filled")


SPECIAL: dict[str, Callable[[Interpreter, Values, Node], Any]] = {
    "allocate": _place,
    "register_tile": _place,
    "scatter": _scatter,
    "atomic_add": _atomic_add,
    "sort": _sort,
    "clear_rows": _clear_rows,
    "require": _require,
    "hole": _hole,
}

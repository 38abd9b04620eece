"""Run a Body with NumPy: slow, exact and suspicious, the judge of every target.

Programs of the grid run one after another, those of a cluster (Body.notes["cluster"]) together.
Within them the roles of the placed level run interleaved (see `concurrent`). What a pure op
computes stands in `numeric`; here are memory and control:

* `load`/`store`: tile axis i walks Memory axis axes[i] from the index; with a mask, elements
  where it is false read as 0 and are not written. An index outside of the Memory's shape (or of
  its storage) is an InternalError that names the op and the index.
* `gather`/`scatter`: linear offsets into the storage; equal offsets are taken in order.
* `allocate`: a new place each time it is reached, filled with nan (0xA5 in every byte of an
  integer), so that a read before a write shows.
* `sort`: the first `count` elements of keys in place, places moved along; stable, nan above
  every number. The two scratch Memories are left alone.
* `loop`, `branch`: as written; `unroll` changes nothing.
* `matrix_load`, `matrix_store`: a 2-D tile along the last two axes of the Memory.

Invariant: memories passed in change only where the Body stores; nothing else outlives `run`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..core.dtype import DType
from ..core.errors import InternalError, Site
from ..ir.block import Block
from ..ir.node import Node
from ..ir.symbol import evaluate
from ..ir.text import print_node
from ..ir.types import Memory
from . import interpret_placed, numeric
from .build import Body
from .concurrent import Agent, History, Machine, Named, Roles, Waiting

Array = np.ndarray[Any, Any]
Steps = Generator["Waiting | Roles | None", None, Any]


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
    tracked, dependent = (has_op(body.block, n) for n in ("role", "grid_dependency_wait"))
    for numbers in together(chosen, grid, math.prod(body.notes.get("cluster", (1,)))):
        for storage in storages:
            storage.history = History(storage.name, storage.data.size) if tracked else None
        machine = Machine(seed, dependent)
        machine.run(
            [
                Interpreter(
                    body, storages, bound, grid, number, machine, rank if len(numbers) > 1 else None
                )
                for rank, number in enumerate(numbers)
            ]
        )


def together(chosen: Iterable[int], grid: tuple[int, ...], size: int) -> Iterator[list[int]]:
    """The numbers of programs that run together: neighbours along the first axis of the grid."""
    stride, done = math.prod(grid[1:]), set()
    if size > 1 and (not grid or grid[0] % size):
        raise InternalError("tile.interpret", f"a grid {grid} of clusters of {size}")
    for number in chosen:
        first = number - number // stride % size * stride
        if size == 1:
            yield [number]
        elif first not in done:
            done.add(first)
            yield [first + rank * stride for rank in range(size)]


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
    """A Memory at run time: flat data, sizes and strides as numbers, and who touched it."""

    def __init__(self, name: str, node: Node, data: Array, symbols: Mapping[str, int]) -> None:
        type_ = node.type
        assert isinstance(type_, Memory)
        self.name, self.type, self.data = name, type_, data
        self.shape = tuple(evaluate(s, symbols) for s in type_.shape)
        self.strides = tuple(evaluate(s, symbols) for s in type_.element_strides())
        self.history: History | None = None

    def offsets(self, index: Sequence[int], shape: tuple[int, ...], axes: tuple[int, ...]) -> Any:
        """Element offsets of a tile at an index, and where they are inside of the shape."""
        offset = np.zeros(shape, np.int64)
        inside = np.ones(shape, np.bool_)
        for axis, (start, size, stride) in enumerate(zip(index, self.shape, self.strides)):
            position = np.full(shape, start, np.int64)
            for tile_axis, walked in enumerate(axes):
                if walked == axis:
                    steps = np.arange(shape[tile_axis], dtype=np.int64)
                    tail = (1,) * (len(shape) - tile_axis - 1)
                    position = position + steps.reshape((-1, *tail))
            inside &= (position >= 0) & (position < size)
            offset += position * stride
        return offset, inside


class Frame:
    """Values of one agent."""

    __slots__ = ("agent", "values")

    def __init__(self, agent: Agent, values: dict[Node, Any]) -> None:
        self.agent, self.values = agent, values


def poison(shape: tuple[int, ...], dtype: DType) -> Array:
    """Data of a place that nobody has written."""
    if dtype.is_float:
        return np.full(math.prod(shape), np.nan, np.float32).astype(dtype.numpy)
    return np.full(math.prod(shape) * dtype.size, 0xA5, np.uint8).view(dtype.numpy)


class Interpreter:
    """Runs one program."""

    def __init__(
        self,
        body: Body,
        storages: list[Storage],
        symbols: Mapping[str, int],
        grid: tuple[int, ...],
        number: int,
        machine: Machine,
        rank: int | None = None,
    ) -> None:
        self.body, self.symbols, self.machine, self.rank = body, symbols, machine, rank
        self.program = np.unravel_index(number, grid) if grid else ()
        self.tracked = has_op(body.block, "role")
        self.named: dict[int, Named] = {}
        main = machine.agent(self.name("the program"))
        main.asynchronous = False
        self.frame = Frame(main, dict(zip(body.parameters, storages)))
        self.handlers: dict[str, Callable[[Interpreter, Frame, Node], Any]] = {
            **HANDLERS,
            **interpret_placed.HANDLERS,
        }
        self.controls: dict[str, Callable[[Interpreter, Frame, Node], Steps]] = {
            **CONTROLS,
            **interpret_placed.CONTROLS,
        }

    def name(self, name: str) -> str:
        """A name, with the rank where there are several programs."""
        return name if self.rank is None else f"{name} of rank {self.rank}"

    def track(self, storage: Storage) -> None:
        """Begin to remember who touches a storage."""
        storage.history = History(storage.name, storage.data.size) if self.tracked else None

    # ---- blocks and Nodes -------------------------------------------------------------------

    def block(self, frame: Frame, block: Block) -> Steps:
        """Run the Nodes of a Block; gives its results."""
        values, roles = frame.values, []
        for node in block.nodes:
            if node.op.name == "role":
                roles.append(node)
                continue
            if roles:
                yield self.roles(frame, roles)
                roles = []
            control = self.controls.get(node.op.name)
            if control is not None:
                values[node] = yield from control(self, frame, node)
            else:
                values[node] = self.node(frame, node)
            if node.op.effect and frame.agent.role is not None:
                yield None
        if roles:
            yield self.roles(frame, roles)
        return [values[r] for r in block.results]

    def roles(self, frame: Frame, nodes: list[Node]) -> Roles:
        """Roles to be run at the same time."""
        if frame.agent.role is not None:
            raise InternalError("tile.interpret", "a role stands inside of a role")
        return Roles(frame, nodes)

    def node(self, frame: Frame, node: Node) -> Any:
        """The value of one Node without Blocks."""
        handler = self.handlers.get(node.op.name)
        if handler is not None:
            return handler(self, frame, node)
        return numeric.compute(node, [frame.values[i] for i in node.inputs])

    # ---- memory -----------------------------------------------------------------------------

    def region(
        self,
        frame: Frame,
        node: Node,
        storage: Storage,
        index: Sequence[int],
        shape: tuple[int, ...],
        axes: tuple[int, ...],
        mask: Array | None,
    ) -> Array:
        """Offsets of a tile; where the mask holds they are inside, elsewhere 0."""
        offset, inside = storage.offsets(index, shape, axes)
        bad = ~inside if mask is None else ~inside & mask
        if bad.any():
            raise InternalError(
                "tile.interpret",
                f"{node.op.name} at {tuple(index)} of tile {shape} leaves {storage.name}"
                f"<{storage.shape}>\n    {print_node(node)}\n ",
            )
        return self.checked(node, storage, offset, mask)

    def checked(self, node: Node, storage: Storage, offset: Array, mask: Array | None) -> Array:
        """Offsets within the storage, 0 where masked off."""
        live = offset if mask is None else np.where(mask, offset, 0)
        bad = (live < 0) | (live >= storage.data.size)
        if mask is not None:
            bad &= mask
        if bad.any():
            raise InternalError(
                "tile.interpret",
                f"{node.op.name} at offset {int(live[bad][0])} of {storage.name}, which has "
                f"{storage.data.size} elements\n    {print_node(node)}\n ",
            )
        return np.asarray(live)

    def read(self, frame: Frame, storage: Storage, offset: Array, mask: Array | None) -> Array:
        """Elements at offsets; 0 where masked off."""
        self.machine.note_read(frame.agent, storage, offset, mask)
        if mask is None:
            return np.asarray(storage.data[offset])
        found = np.zeros(offset.shape, storage.data.dtype)
        found[mask] = storage.data[offset[mask]]
        return found

    def write(
        self, frame: Frame, storage: Storage, offset: Array, value: Array, mask: Array | None
    ) -> None:
        """Elements to offsets, in order."""
        self.machine.note_write(frame.agent, storage, offset, mask)
        if mask is None:
            storage.data[offset.reshape(-1)] = np.asarray(value).reshape(-1)
        else:
            storage.data[offset[mask]] = np.asarray(value)[mask]


def has_op(block: Block, name: str) -> bool:
    """Whether an op occurs in a Block or in the Blocks within."""
    return any(
        n.op.name == name or any(has_op(inner, name) for inner in n.blocks) for n in block.nodes
    )


def scalars(frame: Frame, nodes: Iterable[Node]) -> list[int]:
    """Scalar Nodes as Python integers."""
    return [int(frame.values[n]) for n in nodes]


def _mask(frame: Frame, node: Node | None, shape: tuple[int, ...]) -> Array | None:
    return None if node is None else np.broadcast_to(frame.values[node], shape)


# ---- what each op does -----------------------------------------------------------------------


def _program(self: Interpreter, frame: Frame, node: Node) -> Any:
    return np.asarray(self.program[node.attrs["axis"]], np.int64)


def _symbol(self: Interpreter, frame: Frame, node: Node) -> Any:
    return np.asarray(evaluate(node.attrs["value"], self.symbols), np.int64)


def _constant(self: Interpreter, frame: Frame, node: Node) -> Any:
    return np.full(node.attrs["shape"], np.asarray(node.attrs["value"]).astype(node.dtype.numpy))


def _iota(self: Interpreter, frame: Frame, node: Node) -> Any:
    return np.arange(node.attrs["size"]).astype(node.dtype.numpy)


def _get(self: Interpreter, frame: Frame, node: Node) -> Any:
    return frame.values[node.inputs[0]][node.attrs["index"]]


def _load(self: Interpreter, frame: Frame, node: Node) -> Any:
    storage: Storage = frame.values[node.inputs[0]]
    rank, attrs = len(storage.shape), node.attrs
    mask = _mask(frame, node.inputs[1 + rank] if attrs["masked"] else None, attrs["shape"])
    index = scalars(frame, node.inputs[1 : 1 + rank])
    offset = self.region(frame, node, storage, index, attrs["shape"], attrs["axes"], mask)
    return self.read(frame, storage, offset, mask)


def _store(self: Interpreter, frame: Frame, node: Node) -> Any:
    storage, value = (frame.values[i] for i in node.inputs[:2])
    rank, attrs = len(storage.shape), node.attrs
    mask = _mask(frame, node.inputs[2 + rank] if attrs["masked"] else None, value.shape)
    index = scalars(frame, node.inputs[2 : 2 + rank])
    offset = self.region(frame, node, storage, index, value.shape, attrs["axes"], mask)
    self.write(frame, storage, offset, value, mask)


def _gather(self: Interpreter, frame: Frame, node: Node) -> Any:
    storage, offset = (frame.values[i] for i in node.inputs[:2])
    mask = _mask(frame, node.inputs[2] if len(node.inputs) > 2 else None, offset.shape)
    return self.read(frame, storage, self.checked(node, storage, offset, mask), mask)


SCATTER_OPS = {"add": "add", "multiply": "multiply", "max": "maximum", "min": "minimum"}


def _scatter(self: Interpreter, frame: Frame, node: Node) -> Any:
    storage, value, offset = (frame.values[i] for i in node.inputs[:3])
    mask = _mask(frame, node.inputs[3] if len(node.inputs) > 3 else None, offset.shape)
    offset, mode = self.checked(node, storage, offset, mask), node.attrs["mode"]
    if self.body.notes.get("distinct"):
        written = offset if mask is None else offset[np.broadcast_to(mask, offset.shape)]
        if len(np.unique(written)) < written.size:
            name = self.body.name
            raise InternalError("tile.interpret", f"{name} writes an element twice in one scatter")
    if mode == "set":
        return self.write(frame, storage, offset, value, mask)
    self.machine.note_read(frame.agent, storage, offset, mask)
    self.machine.note_write(frame.agent, storage, offset, mask)
    return combine(storage, node.inputs[1].dtype, SCATTER_OPS[mode], value, offset, mask)


def combine(
    storage: Storage, dtype: DType, name: str, value: Array, offset: Array, mask: Array | None
) -> None:
    """storage[offset] = op(storage[offset], value), one element after another."""
    live = np.ones(offset.shape, np.bool_) if mask is None else mask
    with np.errstate(all="ignore"):
        for where, one in zip(offset[live], np.broadcast_to(value, offset.shape)[live]):
            old = storage.data[where : where + 1]
            new = numeric.elementwise(name, dtype, [old, np.asarray([one], dtype.numpy)])
            storage.data[where] = new[0]


def _allocate(self: Interpreter, frame: Frame, node: Node) -> Any:
    attrs = node.attrs
    name = self.name(f"{attrs['scope']}#{node.serial}")
    storage = Storage(name, node, poison(attrs["shape"], attrs["dtype"]), self.symbols)
    self.track(storage)
    return storage


def _sort(self: Interpreter, frame: Frame, node: Node) -> Any:
    keys, places = (frame.values[i] for i in node.inputs[:2])
    whole = np.arange(int(frame.values[node.inputs[4]]), dtype=np.int64)
    where = self.checked(node, keys, whole, None)
    row = self.read(frame, keys, where, None)
    order = stable_order(row, node.attrs["descending"])
    self.write(frame, keys, where, row[order], None)
    where = self.checked(node, places, whole, None)
    self.write(frame, places, where, self.read(frame, places, where, None)[order], None)


def stable_order(row: Array, descending: bool) -> Array:
    """Positions in sorted order; equal keys keep theirs, nan is above every number."""
    wide = row.astype(np.float64) if row.dtype.kind == "V" or row.dtype.itemsize < 4 else row
    if not descending:
        return np.argsort(wide, kind="stable")
    return row.size - 1 - np.argsort(wide[::-1], kind="stable")[::-1]


def _matrix_offsets(self: Interpreter, frame: Frame, node: Node, shape: Any, first: int) -> Array:
    storage: Storage = frame.values[node.inputs[0]]
    rank = len(storage.shape)
    index = scalars(frame, node.inputs[first:])
    return self.region(frame, node, storage, index, shape, (rank - 2, rank - 1), None)


def _matrix_zero(self: Interpreter, frame: Frame, node: Node) -> Any:
    return np.zeros(node.attrs["shape"], node.dtype.numpy)


def _matrix_load(self: Interpreter, frame: Frame, node: Node) -> Any:
    offset = _matrix_offsets(self, frame, node, node.attrs["shape"], 1)
    return self.read(frame, frame.values[node.inputs[0]], offset, None)


def _matrix_dot(self: Interpreter, frame: Frame, node: Node) -> Any:
    return numeric.matrix_dot(*[frame.values[i] for i in node.inputs])


def _matrix_store(self: Interpreter, frame: Frame, node: Node) -> Any:
    storage, value = (frame.values[i] for i in node.inputs[:2])
    offset = _matrix_offsets(self, frame, node, value.shape, 2)
    self.write(frame, storage, offset, value, None)


def _prefetch(self: Interpreter, frame: Frame, node: Node) -> Any:
    return None  # it changes nothing, and may lie past the end


def _require(self: Interpreter, frame: Frame, node: Node) -> Any:
    if not np.all(frame.values[node.inputs[0]]):
        raise Site(node.attrs["message"], node.attrs["location"]).error()


def _hole(self: Interpreter, frame: Frame, node: Node) -> Any:
    raise InternalError("tile.interpret", f"the hole {node.attrs['name']!r} is not filled")


HANDLERS: dict[str, Callable[[Interpreter, Frame, Node], Any]] = {
    "program": _program,
    "symbol": _symbol,
    "constant": _constant,
    "iota": _iota,
    "get": _get,
    "load": _load,
    "store": _store,
    "gather": _gather,
    "scatter": _scatter,
    "allocate": _allocate,
    "sort": _sort,
    "hole": _hole,
    "prefetch": _prefetch,
    "require": _require,
    "matrix_zero": _matrix_zero,
    "matrix_load": _matrix_load,
    "matrix_dot": _matrix_dot,
    "matrix_store": _matrix_store,
}


def _loop(self: Interpreter, frame: Frame, node: Node) -> Steps:
    lower, upper = scalars(frame, node.inputs[:2])
    carried, block = [frame.values[i] for i in node.inputs[2:]], node.blocks[0]
    for index in range(lower, upper, node.attrs["step"]):
        frame.values[block.arguments[0]] = np.asarray(index, np.int64)
        frame.values.update(zip(block.arguments[1:], carried))
        carried = yield from self.block(frame, block)
    return carried


def _branch(self: Interpreter, frame: Frame, node: Node) -> Steps:
    chosen = node.blocks[0 if bool(frame.values[node.inputs[0]]) else 1]
    return (yield from self.block(frame, chosen))


CONTROLS: dict[str, Callable[[Interpreter, Frame, Node], Steps]] = {
    "loop": _loop,
    "branch": _branch,
}

"""Build Tile IR: a `BodyBuilder` that appends Nodes in order, with broadcasting and Exprs.

Index arithmetic is written with Exprs (`ir.symbol`) and turned into scalar Nodes here, so that
it is simplified before it exists. Invariant: every Node of the Body goes through `add`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

from ..core.dtype import DType, bool_, float32, float64, int64, uint8
from ..core.errors import InternalError, Location
from ..ir.block import Block, Builder, argument
from ..ir.node import Node, Op
from ..ir.symbol import Expr, Size, atoms, floor_divide, high, low, modulo, named
from ..ir.types import Memory, Shape, Tile
from . import ops


def prune(block: Block, used: set[int]) -> None:
    """Drop pure Nodes that nothing reads, innermost Blocks included."""
    used.update(id(r) for r in block.results)
    kept = []
    for node in reversed(block.nodes):
        if not (node.op.effect or node.blocks or id(node) in used):
            continue
        for inner in node.blocks:
            prune(inner, used)
        used.update(id(i) for i in node.inputs)
        kept.append(node)
    block.nodes[:] = reversed(kept)


def prune_body(body: Body, kind: str = "", target: Any = None) -> Body:
    """The pass: the same Body without pure Nodes that nothing reads."""
    prune(body.block, set())
    return body


@dataclass
class Body:
    """The Tile IR of one launch: Block, grid, name, and scratch bytes a worker needs."""

    name: str
    block: Block
    grid: tuple[Size, ...]
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def parameters(self) -> tuple[Node, ...]:
        """The Memory parameters."""
        return self.block.arguments


def body_symbols(body: Body) -> list[Expr]:
    """The Symbols a Body reads at run time, sorted by name."""
    sizes: list[Size] = [n.attrs["value"] for n in body.block.find("symbol")]
    for parameter in body.parameters:
        sizes += (*parameter.shape, *parameter.type.element_strides())  # type: ignore[union-attr]
    found = {atom for size in (*sizes, *body.grid) for atom in atoms(size)}
    return sorted(found, key=lambda e: e.name)


def body_sites(body: Body) -> list[Node]:
    """The `require` Nodes of a Body in order: the number of one is its place, from 1 on."""
    return body.block.find("require")


def _term_text(term: tuple[tuple[Expr, ...], int]) -> str:
    """An order of terms that is the same in every process."""
    return "*".join(sorted(map(repr, term[0])))


def _sum(b: BodyBuilder, value: Expr) -> Node:
    def term(product: tuple[Expr, ...], factor: int) -> Node:
        nodes = (b.index(atom) for atom in sorted(product, key=repr))
        found = reduce(partial(b.apply, "multiply"), nodes)
        return found if factor == 1 else b.apply("multiply", found, factor)

    terms = (term(*t) for t in sorted(value.terms, key=_term_text))
    total = reduce(partial(b.apply, "add"), terms)
    return b.apply("add", total, value.constant) if value.constant else total


def _of_two(b: BodyBuilder, value: Expr) -> Node:
    names = {"div": "floor_divide", "mod": "remainder", "min": "minimum", "max": "maximum"}
    if low(value.args[0]) >= 0:
        names.update(div="unsigned_divide", mod="unsigned_remainder")
    args = sorted(value.args, key=repr) if value.kind in ("min", "max") else value.args
    first, second = (b.index(x) for x in args)
    return b.apply(names[value.kind], first, second)


def ends_of(lower: Size, upper: Size, step: int) -> tuple[int, int]:
    """The least and the most that a loop's index is."""
    first, size = low(lower), high(upper) - low(lower)
    whole = isinstance(lower, int) and isinstance(upper, int)
    last = (size - 1) // step * step if whole else size - 1
    return first, first + max(0, last)


def _along(memory: Node, shape: Shape, axes: Shape | None) -> Shape:
    """The axes of a Memory that a tile lies along: its last ones unless others are named."""
    rank = len(memory.shape)
    return tuple(range(rank - len(shape), rank)) if axes is None else axes


class BodyBuilder:
    """Builds one Body."""

    def __init__(self, name: str, parameters: Sequence[tuple[str, Memory]]) -> None:
        self.name = name
        self.builder = Builder()
        self.parameters = tuple(argument(n, t) for n, t in parameters)
        self._context = self.builder.block(name, self.parameters)
        self.block = self._context.__enter__()
        self.atoms: dict[Expr, Node] = {}
        self.exprs: dict[Node, Expr] = {}  # of indices
        self.serial = 0

    def finish(self, grid: Sequence[Size], **notes: Any) -> Body:
        """Close the Block."""
        self._context.__exit__(None, None, None)
        return Body(self.name, self.block, tuple(grid), notes)

    def add(self, node: Node) -> Node:
        """Append a Node."""
        return self.builder.add(node)

    def do(self, op: Op, *inputs: Node | Size, **attrs: Any) -> Node:
        """Append an op; an Expr among its inputs becomes Nodes."""
        given = tuple(i if isinstance(i, Node) else self.index(i) for i in inputs)
        return self.add(op.make(given, attrs))

    # ---- scalars --------------------------------------------------------------------------

    def atom(self, name: str, node: Node, low: int, high: int) -> Size:
        """An Expr standing for a scalar (or a tile of indices) with bounds."""
        if low == high:
            return low
        self.serial += 1  # no other index has its name
        expr = named("loop", f"{name}{self.serial}", low, max(low, high))
        self.atoms[expr], self.exprs[node] = node, expr
        return expr

    def bounded(self, name: str, node: Node, low: int, high: int) -> Size:
        """An `atom` for a number from memory, brought within its bounds: what is simplified
        relies on them."""
        node = self.apply("minimum", self.apply("maximum", node, low), high)
        return self.atom(name, node, low, high)

    def program(self, axis: int, size: Size) -> Size:
        """This program's number along a grid axis."""
        node = self.add(ops.program(axis=axis))
        return self.atom("p", node, 0, max(0, high(size) - 1))

    def index(self, value: Size) -> Node:
        """An Expr as Nodes; where an atom is a tile the result is one too."""
        if isinstance(value, int):
            return self.constant(value, int64)
        if value in self.atoms:
            return self.atoms[value]
        if value.kind == "symbol":
            return self.add(ops.symbol(value=value))
        if value.kind == "loop":
            raise InternalError("tile.build", f"index {value} has no Node")
        node = _sum(self, value) if value.kind == "sum" else _of_two(self, value)
        self.exprs[node] = value
        return node

    def constant(self, value: Any, dtype: DType, shape: Shape = ()) -> Node:
        """A constant tile."""
        if dtype.kind == "bool":
            value = bool(value)
        elif dtype.is_float:
            value = float(value)
        return self.add(ops.constant(value=value, dtype=dtype, shape=shape))

    # ---- elementwise ----------------------------------------------------------------------

    def broadcast(self, x: Node, shape: Shape) -> Node:
        """x repeated to a shape."""
        return x if x.shape == shape else self.add(ops.broadcast(x, shape=shape))

    def _broadcast_all(self, inputs: Sequence[Node]) -> list[Node]:
        rank = max(len(i.shape) for i in inputs)
        padded = [(1,) * (rank - len(i.shape)) + i.shape for i in inputs]
        shape = tuple(max(sizes) for sizes in zip(*padded))
        return [self.broadcast(i, shape) for i in inputs]

    def apply(self, name: str, *inputs: Node | Expr | float) -> Node:
        """An elementwise op by name, shapes broadcast; an Expr becomes Nodes, and numbers have the
        dtype of the last operand that is none."""
        given = [self.index(i) if isinstance(i, Expr) else i for i in inputs]
        dtype = [i.dtype for i in given if isinstance(i, Node)][-1]
        nodes = [i if isinstance(i, Node) else self.constant(i, dtype) for i in given]
        return self.add(ops.ELEMENTWISE[name](*self._broadcast_all(nodes)))

    def where(self, mask: Node | None, x: Node, other: Any) -> Node:
        """x where a mask holds, or everywhere without one; else a number."""
        return x if mask is None else self.apply("where", mask, x, other)

    def cast(self, x: Node, dtype: DType) -> Node:
        """x converted."""
        if x.dtype is dtype:
            return x
        held = dtype.is_float and x.dtype in (float32, float64) and dtype.bits < x.dtype.bits
        if held and x.op is ops.cast and x.inputs[0].dtype is dtype:
            return x.inputs[0]  # there, where no bit is lost, and back again
        return self.add(ops.cast(x, dtype=dtype))

    def bitcast(self, x: Node, dtype: DType) -> Node:
        """The bits of x as another dtype of the same width. A bool is a byte in memory alone: it
        is true for any byte but 0, and 1 as a byte where it is true."""
        if x.dtype is dtype:
            return x
        if bool_ not in (x.dtype, dtype):
            return self.add(ops.bitcast(x, dtype=dtype))
        if x.dtype is bool_:
            return self.bitcast(self.cast(x, uint8), dtype)
        return self.cast(self.bitcast(x, uint8), bool_)

    def logical_and(self, a: Node | None, b: Node | None) -> Any:
        """Both masks; None is true."""
        if a is None or b is None:
            return a if b is None else b
        return self.apply("bit_and", a, b)

    def less(self, a: Size, b: Size) -> Node:
        """a < b of indices, as a mask."""
        return self.apply("less", self.index(a), self.index(b))

    def less_equal(self, a: Size, b: Size) -> Node:
        """a <= b of indices, as a mask."""
        return self.apply("less_equal", self.index(a), self.index(b))

    def reduce(self, x: Node, axis: int, kind: str) -> Node:
        """One axis of a tile reduced."""
        return self.add(ops.reduce(x, axis=axis, kind=kind))

    def reshape(self, x: Node, shape: Shape) -> Node:
        """The elements of a tile in another shape."""
        return self.add(ops.reshape(x, shape=shape))

    def iota(self, size: int, dtype: DType = int64) -> Node:
        """0 .. size-1."""
        return self.add(ops.iota(size=size, dtype=dtype))

    def line(self, start: Size, size: int, stride: int = 1) -> Node:
        """start, start + stride, ... as a tile."""
        steps = self.iota(size)
        if stride != 1:
            steps = self.apply("multiply", steps, stride)
        return self.apply("add", start, steps)

    def extract(self, x: Node, index: int = 0) -> Node:
        """One index of the first axis of a tile."""
        return self.add(ops.extract(x, index=index))

    def part(self, x: Node, start: Shape, shape: Shape) -> Node:
        """A rectangle of a tile, from the index `start` on."""
        return x if x.shape == shape else self.add(ops.part(x, start=start, shape=shape))

    def turned(self, rows: Sequence[Node]) -> Node:
        """A matrix whose columns are these."""
        return self.add(ops.transpose(self.add(ops.stack_rows(*rows)), order=(1, 0)))

    # ---- memory ---------------------------------------------------------------------------

    def load(
        self,
        memory: Node,
        index: Sequence[Size],
        shape: Shape = (),
        axes: Shape | None = None,
        mask: Node | None = None,
    ) -> Node:
        """A tile at an index; its axes are the Memory's last ones unless others are named."""
        at, axes = self._at(index, shape, mask), _along(memory, shape, axes)
        return self.do(ops.load, memory, *at, shape=shape, axes=axes, masked=mask is not None)

    def _at(self, index: Sequence[Node | Size], shape: Shape, mask: Node | None) -> list[Node]:
        """An index, or offsets, and a mask as the last inputs of an op."""
        found = [i if isinstance(i, Node) else self.index(i) for i in index]
        if mask is None:
            return found
        if mask.dtype is not bool_:
            raise InternalError("tile.build", "a mask is not bool")
        return [*found, mask if mask.shape in ((), shape) else self.broadcast(mask, shape)]

    def store(
        self,
        memory: Node,
        value: Node,
        index: Sequence[Size],
        axes: Shape | None = None,
        mask: Node | None = None,
    ) -> None:
        """Write a tile at an index, as `load` reads it."""
        at, axes = self._at(index, value.shape, mask), _along(memory, value.shape, axes)
        self.do(ops.store, memory, value, *at, axes=axes, masked=mask is not None)

    def prefetch(self, memory: Node, *index: Size, to: str = "l1") -> None:
        """Bring the line at an index into a cache."""
        self.do(ops.prefetch, memory, *index, to=to)

    def gather(self, memory: Node, offset: Node, mask: Node | None = None) -> Node:
        """Elements at offsets."""
        return self.do(ops.gather, memory, *self._at([offset], offset.shape, mask))

    def scatter(self, memory: Node, value: Node, offset: Node, mask: Node | None = None) -> None:
        """Write elements at offsets."""
        value, offset = self._broadcast_all([value, offset])
        self.do(ops.scatter, memory, value, *self._at([offset], offset.shape, mask))

    def require(
        self,
        condition: Node,
        message: str,
        location: Location | str | None = None,
        mask: Node | None = None,
    ) -> None:
        """End the run in an index error unless a condition holds wherever the mask does.

        It is recorded and the program goes on: what it guards needs a mask or a clamped index.
        """
        if mask is not None:
            condition = self.apply("bit_or", condition, self.apply("bit_not", mask))
        self.add(ops.require(condition, message=message, location=str(location or "")))

    def allocate(self, shape: Shape, dtype: DType, scope: str, layout: str = "") -> Node:
        """A private place."""
        return self.add(ops.allocate(shape=shape, dtype=dtype, scope=scope, layout=layout))

    # ---- control --------------------------------------------------------------------------

    def each(
        self,
        name: str,
        lower: Size,
        upper: Size,
        step: int = 1,
        carried: list[Node] | None = None,
        unroll: int = 1,
        bounds: tuple[int, int] | None = None,
    ) -> Iterator[Size]:
        """A loop as `for` writes it: gives the index, once. `carried` holds what one turn hands to
        the next, and after the loop what the last one left. An empty or single trip is written
        out."""
        state = [] if carried is None else carried
        bounds = ends_of(lower, upper, step) if bounds is None else bounds
        if isinstance(lower, int) and isinstance(upper, int) and upper - lower <= step:
            if lower < upper:
                yield lower
            return
        start, stop, before = self.index(lower), self.index(upper), list(state)
        index_argument = argument(name, Tile((), int64))
        state[:] = [argument(f"{name}_carried{i}", c.type) for i, c in enumerate(before)]
        with self.builder.block(name, (index_argument, *state)) as block:
            yield self.atom(name, index_argument, *bounds)
            block.results = tuple(state)
            for r in block.results:
                self.add(r)
        node = self.add(ops.loop(start, stop, *before, blocks=(block,), step=step, unroll=unroll))
        state[:] = [self.add(ops.get(node, index=i)) for i in range(len(before))]

    def steps(
        self,
        name: str,
        start: Size,
        stop: Size,
        step: int,
        carried: list[Node] | None = None,
        rest: str = "rest",
    ) -> Iterator[tuple[Size, bool]]:
        """Places from start to stop, a step apart, as `each` gives them: (place, True) for whole
        steps, then (place, False) for what is left."""
        middle = start + floor_divide(stop - start, step) * step
        for at in self.each(name, start, middle, step, carried):
            yield at, True
        if modulo(stop - start, step) != 0:
            for at in self.each(rest, middle, stop, step, carried):
                yield at, False

    @contextmanager
    def when(self, condition: Node) -> Iterator[None]:
        """What is written inside `with` runs where a condition holds."""
        with self.builder.block("then") as block:
            yield
        with self.builder.block("otherwise") as other:
            pass
        self.add(ops.branch(condition, blocks=(block, other)))

    def branch(
        self,
        condition: Node,
        then: Callable[[], Sequence[Node] | None],
        otherwise: Callable[[], Sequence[Node] | None] = lambda: (),
    ) -> list[Node]:
        """One of two Blocks; None gives no results."""
        blocks = []
        for name, function in (("then", then), ("otherwise", otherwise)):
            with self.builder.block(name) as block:
                block.results = tuple(function() or ())
                for r in block.results:
                    self.add(r)
            blocks.append(block)
        node = self.add(ops.branch(condition, blocks=tuple(blocks)))
        return [self.add(ops.get(node, index=i)) for i in range(len(blocks[0].results))]


# ---- copies of Bodies -----------------------------------------------------------------------

Filler = Callable[[BodyBuilder, Sequence[Node], Sequence[Node]], Node]
Replace = Callable[[BodyBuilder, Node, tuple[Node, ...]], "Node | None"]


def fill(
    body: Body, name: str, filler: Filler, parameters: Sequence[tuple[str, Memory]] = ()
) -> Body:
    """The Body with every hole of a name replaced by what filler(builder, inputs, added) builds.

    `parameters` are added to the Body's; the filler gets their Nodes as `added`.
    """
    found = 0

    def replace(b: BodyBuilder, node: Node, inputs: tuple[Node, ...]) -> Node | None:
        nonlocal found
        if node.op is not ops.hole or node.attrs["name"] != name:
            return None
        found += 1
        new = filler(b, inputs, b.parameters[len(body.parameters) :])
        if new.type != node.type:
            raise InternalError("tile.fill", f"{name} wants {node.type}, not {new.type}")
        return new

    filled = rebuild(body, replace, parameters)
    if not found:
        raise InternalError("tile.fill", f"the Body {body.name} has no hole {name!r}")
    return filled


def rebuild(body: Body, replace: Replace, parameters: Sequence[tuple[str, Memory]] = ()) -> Body:
    """A copy of the Body in which replace(builder, node, inputs) stands for a Node if it gives
    another; `parameters` are added after the Body's own."""
    given = [(p.attrs["name"], p.type) for p in body.parameters]
    b = BodyBuilder(body.name, [*given, *parameters])  # type: ignore[list-item]
    b.block.results = copy_block(b, body.block, b.parameters, replace)
    return b.finish(body.grid, **body.notes)


def copy_block(
    b: BodyBuilder, block: Block, arguments: Sequence[Node], replace: Replace
) -> tuple[Node, ...]:
    """Add the Nodes of a Block, its arguments given; what stands for its results."""
    mapping: dict[Node, Node] = dict(zip(block.arguments, arguments))

    def copy(inner: Block) -> tuple[Node, ...]:
        for node in inner.nodes:
            inputs = tuple(mapping[i] for i in node.inputs)
            new = replace(b, node, inputs)
            if new is None:
                blocks = tuple(within(x) for x in node.blocks)
                new = node.op.make(inputs, node.attrs, blocks, location=node.location)
            mapping[node] = b.add(new)
        return tuple(mapping[r] for r in inner.results)

    def within(inner: Block) -> Block:
        own = tuple(argument(a.attrs["name"], a.type) for a in inner.arguments)
        mapping.update(zip(inner.arguments, own))
        with b.builder.block(inner.name, own) as new:
            new.results = copy(inner)
        return new

    return copy(block)

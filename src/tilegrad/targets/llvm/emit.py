"""From a Body to LLVM IR text: one function per Body, explicit vectors, structured control.

A tile of shape (..., lanes) is a list of LLVM vectors of `lanes` elements, one per leading
index; a scalar is one value. The function runs grid programs [start, stop):

    void name(ptr args, ptr scalars, i64 start, i64 stop, ptr scratch)

`args` holds one pointer per Memory parameter (and, where there are `require` ops, one to the
launch's fault word), `scalars` the values of the Body's Symbols in
sorted order, `scratch` memory private to the worker. Invariant: pure text, no state; the same
Body gives the same text.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence

from ...core.dtype import bool_
from ...core.errors import InternalError
from ...core.target import Target
from ...ir.block import Block
from ...ir.node import Node
from ...tile.build import Body, body_sites, body_symbols
from ...tile.row import emitters
from . import emit_memory, emit_shape
from .emit_shape import (
    Emission,
    Emit,
    Values,
    across,
    count_of,
    in_matrix_unit,
    in_turn,
    lanes_of,
    size_text,
)
from .rules import ROWS, Vectors, literal, scalar_type, splat_constant, type_of


def emit(body: Body, name: str | None = None, target: Target | None = None) -> tuple[str, int]:
    """The LLVM IR of a Body and the scratch bytes it needs."""
    e = Emission(body, frozenset() if target is None else target.feature_set)
    e.start("entry")
    for i, parameter in enumerate(body.parameters):
        at = e.value(f"getelementptr ptr, ptr %args, i64 {i}")
        e.values[parameter] = [e.value(f"load ptr, ptr {at}")]
    for i, symbol in enumerate(body_symbols(body)):
        at = e.value(f"getelementptr i64, ptr %scalars, i64 {i}")
        e.symbols[symbol] = e.value(f"load i64, ptr {at}")
    e.sites = {node: i + 1 for i, node in enumerate(body_sites(body))}
    if e.sites:
        at = e.value(f"getelementptr ptr, ptr %args, i64 {len(body.parameters)}")
        e.fault = e.value(f"load ptr, ptr {at}")
    program_loop(e)
    e.line("ret void")
    head = (
        f"define void @{name or body.name}(ptr noalias %args, ptr noalias %scalars, i64 %start, "
        "i64 %stop, ptr noalias align 64 %scratch) #0 {"
    )
    entry, *lines = e.lines
    text = "\n".join([head, entry, *e.stack, *lines, "}", *e.defined.values()])
    declares = "\n".join(sorted(e.declared.values()))
    attributes = "attributes #0 = { nounwind }\n"
    if e.defined:
        attributes += "attributes #1 = { nounwind noinline }\n"
    return f"{text}\n{declares}\n{attributes}", e.scratch


ANGLES = ("sin", "cos", "tan")


def program_loop(e: Emission) -> None:
    """The loop over this worker's programs."""

    def one(number: str, _: Values) -> Values:
        e.programs = delinearize(e, number)
        return walk(e, e.body.block)

    counted(e, ("programs", "program", "done"), ("%start", "%stop", 1), one)


def delinearize(e: Emission, number: str) -> list[str]:
    """Program numbers per grid axis, the last fastest."""
    grid = e.body.grid
    found: list[str] = []
    for size in reversed(grid[1:]):
        extent = size_text(e, size)
        found.append(e.value(f"urem i64 {number}, {extent}"))
        number = e.value(f"udiv i64 {number}, {extent}")
    return [number, *reversed(found)]


# ---- blocks ---------------------------------------------------------------------------


def walk(e: Emission, block: Block) -> Values:
    """Emit the Nodes of a Block in order; gives the vectors of its results."""
    for node in block.nodes:
        emit_node(e, node)
    return [x for r in block.results for x in e.values[r]]


def emit_node(e: Emission, node: Node) -> None:
    """Emit one Node."""
    emit = OPS.get(node.op.name)
    if emit is None and node.op.name in ROWS:
        emit = elementwise
    if emit is None:
        raise InternalError("llvm.emit", f"no way to emit {node.op}")
    found = emit(e, node)
    if found is not None:
        e.values[node] = found


def elementwise(e: Emission, node: Node) -> Values:
    """One row of `rules`, for every vector of the tile."""
    inputs = [e.values[i] for i in node.inputs]
    dtype, name = node.inputs[-1].dtype, node.op.name
    vectors = Vectors(e, lanes_of(node), name in ANGLES and e.bounds.near_angle(node))
    return [ROWS[name](vectors, dtype, *parts) for parts in zip(*inputs)]


def _program(e: Emission, node: Node) -> Values:
    return [e.programs[node.attrs["axis"]]]


def _symbol(e: Emission, node: Node) -> Values:
    return [e.symbols[node.attrs["value"]]]


def _constant(e: Emission, node: Node) -> Values:
    one = splat_constant(node.attrs["value"], node.dtype, lanes_of(node))
    return [one] * count_of(node)


def _iota(e: Emission, node: Node) -> Values:
    size, dtype = node.attrs["size"], node.dtype
    if size == 1:
        return [literal(0, dtype)]
    lanes, found = lanes_of(node), []
    for start in range(0, size, lanes):
        each = [literal(i, dtype) for i in range(start, start + lanes)]
        items = ", ".join(f"{scalar_type(dtype)} {x}" for x in each)
        found.append(each[0] if lanes == 1 else f"<{items}>")
    return found


def _cast(e: Emission, node: Node) -> Values:
    source, vectors = node.inputs[0], Vectors(e, lanes_of(node))
    change = vectors.convert if node.op.name == "cast" else vectors.bitcast
    return [change(x, source.dtype, node.dtype) for x in e.values[source]]


_bitcast = _cast


# ---- conditions -----------------------------------------------------------------------


def _require(e: Emission, node: Node) -> None:
    """The first Site whose condition does not hold leaves its number."""
    (condition,), lanes = node.inputs, lanes_of(node.inputs[0])
    together = in_turn(e, "prod", bool_, lanes, e.values[condition])
    whole = across(e, together, "prod", bool_, lanes)
    bad, after = e.fresh_label("fault"), e.fresh_label("held")
    e.line(f"br i1 {whole}, label %{after}, label %{bad}")
    e.start(bad)
    e.value(f"cmpxchg ptr {e.fault}, i32 0, i32 {e.sites[node]} monotonic monotonic")
    e.line(f"br label %{after}")
    e.start(after)


# ---- control --------------------------------------------------------------------------


def _get(e: Emission, node: Node) -> Values:
    source = node.inputs[0]
    return list(by_node(e, source.blocks[0].results, e.values[source]))[node.attrs["index"]]


def by_node(e: Emission, nodes: Sequence[Node], values: Values) -> Iterator[Values]:
    """The vectors of each of some values among those of all."""
    at = 0
    for node in nodes:
        yield values[at : at + width_of(e, node)]
        at += width_of(e, node)


def width_of(e: Emission, node: Node) -> int:
    """Vectors (or matrix registers) that hold a value."""
    return 1 if in_matrix_unit(node) else count_of(node)


def _loop(e: Emission, node: Node) -> Values:
    lower, upper = e.values[node.inputs[0]][0], e.values[node.inputs[1]][0]
    carried = [x for i in node.inputs[2:] for x in e.values[i]]
    unroll, step = node.attrs["unroll"], node.attrs["step"]
    if unroll > 1:
        span = e.value(f"sub nsw i64 {upper}, {lower}")
        wide = step * unroll
        whole = e.value(f"sdiv i64 {span}, {wide}")
        whole = e.value(f"mul nsw i64 {whole}, {wide}")
        middle = e.value(f"add nsw i64 {lower}, {whole}")
        carried = one_loop(e, node, lower, middle, wide, unroll, carried)
        lower = middle
    return one_loop(e, node, lower, upper, step, 1, carried)


def one_loop(
    e: Emission, node: Node, lower: str, upper: str, step: int, copies: int, carried: Values
) -> Values:
    """A loop whose body is written `copies` times."""
    block = node.blocks[0]

    def trip(index: str, carried: Values) -> Values:
        place = index
        for copy in range(copies):
            if copy:
                place = e.value(f"add nsw i64 {index}, {copy * node.attrs['step']}")
            e.values[block.arguments[0]] = [place]
            e.values.update(zip(block.arguments[1:], by_node(e, block.results, carried)))
            carried = walk(e, block)
        return carried

    types = register_types(e, block.results)
    return counted(e, (block.name, "in", "out"), (lower, upper, step), trip, carried, types)


def counted(
    e: Emission,
    labels: tuple[str, str, str],
    span: tuple[str, str, int],
    trip: Callable[[str, Values], Values],
    carried: Sequence[str] = (),
    types: Sequence[str] = (),
) -> Values:
    """A loop over lower, upper and step; trip(index, carried) writes its body."""
    lower, upper, step = span
    fresh = [e.fresh_label(n) for n in labels]
    index, following = e.name(), e.name()
    phis = [e.name() for _ in carried]

    def turn() -> Values:
        current = trip(index, list(phis))
        e.line(f"{following} = add nsw i64 {index}, {step}")
        return [following, *current]

    held = [(index, "i64", lower), *zip(phis, types, carried)]
    e.loop(fresh, held, lambda: e.value(f"icmp slt i64 {index}, {upper}"), turn)
    return phis


def register_types(e: Emission, nodes: Sequence[Node]) -> list[str]:
    """LLVM types of the vectors (or matrix registers) that hold some values."""
    found = []
    for node in nodes:
        one = "x86_amx" if in_matrix_unit(node) else type_of(node.dtype, lanes_of(node))
        found += [one] * width_of(e, node)
    return found


def _branch(e: Emission, node: Node) -> Values:
    condition = e.values[node.inputs[0]][0]
    yes, no, join = (e.fresh_label(n) for n in ("then", "otherwise", "join"))
    e.line(f"br i1 {condition}, label %{yes}, label %{no}")
    ends = []
    for label, block in zip((yes, no), node.blocks):
        e.start(label)
        ends.append((walk(e, block), e.label))
        e.line(f"br label %{join}")
    e.start(join)
    types = register_types(e, node.blocks[0].results)
    (first, first_label), (second, second_label) = ends
    return [
        e.value(f"phi {t} [ {a}, %{first_label} ], [ {b}, %{second_label} ]")
        for t, a, b in zip(types, first, second)
    ]


OPS: dict[str, Emit] = emitters(sys.modules[__name__], emit_shape, emit_memory)

"""What a traced function asks of an array: the Problems of its Graph.

Every `dot` is a Problem; one whose operand is a view of windows is a convolution, with the stride
and dilation of the windows, and an `attention` is two products of each head. So any jitted
function is a Workload: `workload(function, *arguments)`. Invariant: equal Problems are one, with
their number; what is no product is left out, as it is not the array's work.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..core.errors import UserError
from ..graph import ops
from ..graph.attention_types import sizes as attention_sizes
from ..ir.node import Node, topological
from ..ir.symbol import high
from ..ir.types import Array
from .explore.problem import Operand, Problem, Term, gemm, summed

WEIGHTS, INPUTS, OUTPUTS = "weights", "inputs", "outputs"
PASSED = (
    ops.cast,
    ops.stop_gradient,
    ops.permute,
    ops.reshape,
    ops.expand,
    ops.unpack,
    ops.slice_,
)  # to find a weight's source
SPACE = (("P", "R"), ("Q", "S"))


@dataclass(frozen=True)
class Work:
    """One Problem of a Workload, and what of it is done and moved."""

    problem: Problem
    kind: str  # convolution, product, attention
    share: float = 1.0  # of the multiplications: about half where attention is causal
    moved: float = 0.0  # bytes, each Operand once; of attention without its scores
    weights: float = 0.0  # bytes of them that are parameters of the model

    @property
    def count(self) -> int:
        """How often the Workload has it."""
        return self.problem.count

    @property
    def flops(self) -> float:
        """Operations of one."""
        return 2.0 * self.problem.macs * self.share


@dataclass(frozen=True)
class Chain:
    """Works, by number, each of which one Work alone reads: the next; and how often that comes."""

    works: tuple[int, ...]
    count: int


@dataclass(frozen=True)
class Workload:
    """The Works of one traced function."""

    name: str
    works: tuple[Work, ...]
    held: float = 0.0  # bytes of all inputs of the Graph: parameters, a cache
    held_weights: float = 0.0  # bytes of those that a product or a gather reads as parameters
    between: float = 0.0  # bytes that ops between products read and write
    chains: tuple[Chain, ...] = ()  # every Work in one of them, as often as it comes

    @property
    def problems(self) -> list[Problem]:
        """The Problems, each once, with their numbers."""
        return [work.problem for work in self.works]

    @property
    def macs(self) -> float:
        """Multiplications of all."""
        return sum(work.count * work.problem.macs * work.share for work in self.works)

    @property
    def flops(self) -> float:
        """Operations of all."""
        return 2.0 * self.macs

    @property
    def weights(self) -> float:
        """Bytes of parameters that are read."""
        return sum(work.count * work.weights for work in self.works)

    @property
    def moved(self) -> float:
        """Bytes of all Operands."""
        return sum(work.count * work.moved for work in self.works)

    def with_bits(self, bits: int | Sequence[int]) -> Workload:
        """The same with other elements: of weights, inputs and outputs."""
        every = (bits,) * 3 if isinstance(bits, int) else tuple(bits)
        changed = []
        scale = every[0] / self.works[0].problem.operands[0].bits
        for work in self.works:
            operands = tuple(
                replace(o, bits=b) for o, b in zip(work.problem.operands, every, strict=True)
            )
            problem = replace(work.problem, operands=operands)
            moved = work.moved * problem.bytes() / work.problem.bytes()
            changed.append(
                replace(work, problem=problem, moved=moved, weights=work.weights * scale)
            )
        held = self.held + (scale - 1) * self.held_weights
        return replace(
            self, works=tuple(changed), held=held, held_weights=scale * self.held_weights
        )


def workload(function: Callable[..., Any], *arguments: Any, name: str = "") -> Workload:
    """The Workload of a function on such arguments; nothing is computed."""
    from ..tensor.jit import jit

    lowered = jit(function).lower(*arguments)
    return workload_of(lowered.outputs, name or lowered.name)


def workload_of(outputs: Sequence[Node], name: str = "graph") -> Workload:
    """The Workload of a Graph."""
    found: dict[tuple, Work] = {}
    numbers: dict[Node, tuple[tuple, ...]] = {}
    counts: dict[Node, int] = {}
    for node, times in _nodes(outputs):
        works: Sequence[Work] = ()
        if node.op is ops.dot:
            works = (_product(node),)
        elif node.op is ops.attention:
            works = _attention(node)
        for work in works:
            problem = work.problem
            same = (tuple(problem.sizes.items()), problem.operands, work.kind, work.share)
            key = (*same, work.weights > 0)
            known = found.get(key)
            before = 0 if known is None else known.count
            base = work if known is None else known
            found[key] = replace(base, problem=replace(base.problem, count=before + times))
            numbers[node] = (*numbers.get(node, ()), key)
            counts[node] = times
    if not found:
        raise UserError("the Graph has no products", op="chip", expected="dot or attention")
    inputs = [n for n in topological(outputs) if n.op is ops.input_]
    weights = _parameters(outputs)
    return Workload(
        name,
        tuple(found.values()),
        held=sum(_bytes(n) for n in inputs),
        held_weights=sum(_bytes(n) for n in weights),
        between=_between(outputs),
        chains=_chains(numbers, counts, list(found)),
    )


def _chains(
    numbers: dict[Node, tuple[tuple, ...]], counts: dict[Node, int], keys: list[tuple]
) -> tuple[Chain, ...]:
    """Chains of the products of a Graph, equal ones once."""
    before = {node: _products_below(node) for node in numbers}
    readers = Counter(source for sources in before.values() for source in sources)
    follows: dict[Node, Node] = {}
    for node, sources in before.items():
        if len(sources) != 1 or node.op is not ops.dot:
            continue
        (first,) = sources
        if first.op is ops.dot and readers[first] == 1 and counts[first] == counts[node]:
            follows[first] = node
    place = {key: number for number, key in enumerate(keys)}
    starts = set(numbers) - set(follows.values())
    found: Counter[tuple[int, ...]] = Counter()
    for node in numbers:
        if node not in starts:
            continue
        if node.op is not ops.dot:  # the two products of an attention
            for key in numbers[node]:
                found[(place[key],)] += counts[node]
            continue
        line = [node]
        while line[-1] in follows:
            line.append(follows[line[-1]])
        found[tuple(place[numbers[one][0]] for one in line)] += counts[node]
    return tuple(Chain(works, count) for works, count in found.items())


def _products_below(node: Node) -> set[Node]:
    """Products that a product's operands come from, past all other ops."""
    found, todo, met = set(), list(node.inputs), set()
    while todo:
        one = todo.pop()
        if one in met:
            continue
        met.add(one)
        if one.op in PRODUCTS:
            found.add(one)
        else:
            todo += one.inputs
    return found


def _bytes(node: Node) -> float:
    return math.prod(int(high(size)) for size in node.shape) * node.dtype.bits / 8


def _parameters(outputs: Sequence[Node]) -> set[Node]:
    """Inputs of the Graph that a product multiplies by, or that rows are gathered from."""
    found = set()
    for node, _ in _nodes(outputs):
        if node.op is ops.dot or node.op is ops.gather:
            for operand in node.inputs[: 1 if node.op is ops.gather else 2]:
                if _is_weight(operand):
                    found.add(_source(operand))
    return found


PRODUCTS = (ops.dot, ops.attention)
LEAVES = (*PRODUCTS, ops.input_, ops.constant, ops.iota, ops.gather, ops.get)


def _between(outputs: Sequence[Node]) -> float:
    """Bytes that ops between products move, fused as far as they can be.

    A value is stored if a product reads it, or if several ops do; computing it reads the stored
    values that it comes from.
    """
    users: dict[Node, set[Node]] = {}
    asked: dict[Node, Node] = {}  # what products read: source -> as it is read
    times_of: dict[Node, int] = {}
    for node, times in _nodes(outputs):
        times_of[node] = times
        if node.op in PASSED:
            continue
        for operand in node.inputs:
            users.setdefault(_source(operand), set()).add(node)
            if node.op in PRODUCTS:
                asked |= {_source(part): part for part in _joined(operand)}
    stored = {n: n for n, by in users.items() if len(by) > 1 and n.op not in LEAVES} | asked
    stored = {n: as_read for n, as_read in stored.items() if n.op not in LEAVES}
    total = 0.0
    for node, as_read in stored.items():
        total += times_of[node] * (_bytes(as_read) + sum(_bytes(n) for n in _reads(node, stored)))
    return total


def _joined(operand: Node) -> list[Node]:
    """Parts of a value that is put together of several: a cache and what is new."""
    source = _source(operand)
    return list(source.inputs) if source.op is ops.concatenate else [operand]


def _reads(node: Node, stored: Container[Node]) -> set[Node]:
    """The stored values, and results of products, that a value is computed from."""
    found, todo, met = set(), list(node.inputs), set()
    while todo:
        source = _source(todo.pop())
        if source in met:
            continue
        met.add(source)
        if source.op in LEAVES or source in stored:
            if isinstance(source.type, Array):
                found.add(source)
        else:
            todo += source.inputs
    return found


def _nodes(outputs: Sequence[Node], times: int = 1) -> Iterator[tuple[Node, int]]:
    """Every Node with how often it runs: bodies of scans as often as they are long."""
    for node in topological(outputs):
        yield node, times
        inner = times * int(high(node.attrs["length"])) if node.op is ops.scan else times
        for block in node.blocks:
            yield from _nodes(block.results, inner)


# ---- products and convolutions --------------------------------------------------------------


def _product(node: Node) -> Work:
    """The Problem of a dot: loops by what its axes are."""
    left, right = node.inputs
    views = [_windows(left), _windows(right)]
    if any(views):
        first = 1 if views[0] else 0  # which side has the weights
    else:
        first = 0 if _is_weight(left) and not _is_weight(right) else 1
    sides = (node.inputs[first], node.inputs[1 - first])
    found = _Axes(node, first, views[1 - first])
    operands = (
        Operand(WEIGHTS, found.axes(0), sides[0].dtype.bits),
        Operand(INPUTS, found.axes(1), sides[1].dtype.bits),
        Operand(OUTPUTS, found.results(), node.dtype.bits),
    )
    kind = "convolution" if found.windows else "product"
    problem = Problem(kind, found.sizes, operands)
    weight = problem.words(operands[0]) * operands[0].bits / 8
    return Work(
        problem,
        kind,
        moved=problem.bytes(),
        weights=weight if _is_weight(sides[0]) else 0.0,
    )


class _Axes:
    """Loops of a dot: G what both sides and the result share, M filters, C what is summed, P and Q
    places of windows with R and S inside them, N what else the inputs have."""

    def __init__(self, node: Node, first: int, windows: dict[int, tuple[int, int, int]]) -> None:
        self.windows = windows
        batch, contract = node.attrs["batch"], node.attrs["contract"]
        self.names: list[dict[int, str]] = [{}, {}]  # of each side: axis -> loop
        shapes = [node.inputs[first].shape, node.inputs[1 - first].shape]
        sides = (first, 1 - first)
        inside = {width: pair for pair, width in zip(SPACE[-len(windows) :], windows)}
        for own, other in zip(contract[sides[0]], contract[sides[1]]):
            loop = self._window_name(other, windows, inside) or "C"
            self.names[0][own] = self.names[1][other] = loop
        for names, side in zip(self.names, sides):
            names |= dict.fromkeys(batch[side], "G")
        for axis in range(len(shapes[0])):
            self.names[0].setdefault(axis, "M")
        for axis in range(len(shapes[1])):
            named = self._window_name(axis, windows, inside)
            self.names[1].setdefault(axis, named or ("N" if windows else "P"))
        self.sizes = dict.fromkeys("NMCPQRS", 1)
        if batch[0]:
            self.sizes["G"] = 1
        for loop, size in self._once(shapes):
            self.sizes[loop] *= int(high(size))

    @staticmethod
    def _window_name(
        axis: int, windows: dict[int, tuple[int, int, int]], inside: dict[int, tuple[str, str]]
    ) -> str:
        for width, (count, _, _) in windows.items():
            if axis == width:
                return inside[width][1]
            if axis == count:
                return inside[width][0]
        return ""

    def _once(self, shapes: Sequence[Sequence[Any]]) -> Iterator[tuple[str, Any]]:
        """Every axis once: all of the inputs', and of the weights' those that are theirs."""
        yield from ((self.names[1][axis], size) for axis, size in enumerate(shapes[1]))
        for axis, size in enumerate(shapes[0]):
            if self.names[0][axis] == "M":
                yield "M", size

    def axes(self, side: int) -> tuple[tuple[Term, ...], ...]:
        """Axes of an Operand: places and insides of windows are sums."""
        loops = dict.fromkeys(self.names[side].values())
        if side == 0:
            return tuple(((loop, 1),) for loop in loops)
        found: list[tuple[Term, ...]] = []
        sliding = {}
        for (place, inside), (_, step, spread) in zip(
            SPACE[-len(self.windows) :], self.windows.values()
        ):
            sliding[place], sliding[inside] = (inside, step, spread), ("", 0, 0)
        for loop in loops:
            if loop not in sliding:
                found.append(((loop, 1),))
            elif sliding[loop][0]:
                inside, step, spread = sliding[loop]
                found.append(summed((loop, step), (inside, spread), sizes=self.sizes))
        return tuple(found)

    def results(self) -> tuple[tuple[Term, ...], ...]:
        """Axes of the result: loops that one side alone has, and G."""
        mine, theirs = set(self.names[0].values()), set(self.names[1].values())
        kept = [v for v in self.sizes if v == "G" or (v in mine) != (v in theirs)]
        return tuple(((loop, 1),) for loop in kept)


def _is_weight(node: Node) -> bool:
    """Whether a value is an input of the Graph, but for its layout and dtype."""
    return _source(node).op is ops.input_


def _source(node: Node) -> Node:
    """What a value is but for its layout and dtype."""
    while node.op in PASSED:
        node = node.inputs[0]
    return node


def _windows(node: Node) -> dict[int, tuple[int, int, int]]:
    """Of a view of windows: axis inside a window -> (axis of places, step, dilation), in order of
    places. Axes of size 1 may come and go between the windows and the view."""
    place: list[int | None] = list(range(len(node.shape)))  # axis here -> axis of the view
    found: dict[int, tuple[int, int, int]] = {}
    while True:
        if node.op is ops.windows:
            axis = node.attrs["axis"]
            inside, counted = place[-1], place[axis]
            if inside is not None and counted is not None and node.attrs["width"] > 1:
                found[inside] = (counted, node.attrs["step"], node.attrs["dilation"])
            place = place[:-1]
        elif node.op is ops.permute:
            order = node.attrs["order"]
            place = [place[order.index(axis)] for axis in range(len(order))]
        elif node.op is ops.reshape and _long(node.shape) == _long(node.inputs[0].shape):
            kept = iter([p for p, size in zip(place, node.shape) if size != 1])
            place = [None if size == 1 else next(kept) for size in node.inputs[0].shape]
        else:
            ordered = sorted(found.items(), key=lambda item: item[1][0])
            return dict(ordered[: len(SPACE)])
        node = node.inputs[0]


def _long(shape: Sequence[Any]) -> list[Any]:
    return [size for size in shape if size != 1]


# ---- attention ------------------------------------------------------------------------------


def _attention(node: Node) -> tuple[Work, Work]:
    """Scores and their product with values, of all heads; scores stay on the chip."""
    found = attention_sizes(node.inputs, node.attrs["orders"])
    batch, queries, keys = (int(high(s)) for s in (found.batch, found.queries, found.keys))
    width, value_width = int(high(found.width)), int(high(found.value_width))
    heads, rows, bits = batch * found.key_heads, found.group * queries, node.inputs[0].dtype.bits
    share = _seen(node.attrs["band"], queries, keys)
    moved = (rows * width + keys * width) * heads * bits / 8
    after = (rows * value_width + keys * value_width) * heads * bits / 8
    scores = gemm(M=rows, N=keys, K=width, B=heads, bits=bits, name="scores")
    values = gemm(M=rows, N=value_width, K=keys, B=heads, bits=bits, name="values")
    return (
        Work(scores, "attention", share, moved),
        Work(values, "attention", share, after),
    )


def _seen(band: tuple[Any, Any], queries: int, keys: int) -> float:
    """Which part of the scores lies in the band key - query in [low, high]."""
    low, most = (None if bound is None else int(high(bound)) for bound in band)
    total = 0
    for query in range(queries):
        first = 0 if low is None else max(0, query + low)
        last = keys - 1 if most is None else min(keys - 1, query + most)
        total += max(0, last - first + 1)
    return total / (queries * keys)


__all__ = ["Work", "Workload", "workload", "workload_of"]

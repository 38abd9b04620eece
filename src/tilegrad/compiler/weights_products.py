"""Calls of kernels in the place of products and gathers of weights that are stored quantised.

Products and row gathers of `unpack(bytes)` become calls of the kernels in `kernels.quantised`,
with the norm before, bias, gates and residual around them where a kernel takes that. Products of
the same tokens with weights of one Format are one product (queries, keys and values). What the
kernels read are the parts that a `Preparation` makes of the bytes; it stands in the Graph as a call
until `prepared.lift_preparations` makes inputs of the parts: the runtime prepares them once.
Products of groups, of which each has its own weights (experts), are calls too: only the weights
of groups with rows are read. Where no kernel takes a Format, or something else reads the weights,
they are unpacked to scratch memory by ordinary ops, with a word in the log. Invariant: which
weights are prepared together depends on what reads them, never on the number of tokens, so all
Executables of a model read the same bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as replace_field
from typing import Any

from ..core.config import config
from ..core.dtype import int32
from ..core.format import Format, format_of
from ..core.target import Target
from ..graph import build, ops
from ..graph.unpack import unpacked
from ..ir.node import Node, topological, users
from ..ir.rewrite import Log, rebuild
from ..ir.symbol import Size
from ..ir.types import Array, Tuple
from ..ir.types import product as product_of
from ..kernels.quantised.prepare import kernels_of, rows_of
from ..kernels.quantised.shape import Around, QuantisedShape
from ..schedule.quantised import UNPACK, chosen_for, families_of
from . import array_weights
from .as_stored import unpacked_there
from .code_products import codes_of_rows, of_codes, of_group_codes, plain
from .code_products import why_not as why_no_codes
from .weights_around import Fused, RowNorm, fused_forms, gates_of, norm_of


@dataclass(eq=False)
class Product:
    """x (..., columns) times the transpose of unpacked weights."""

    dot: Node
    x: Node
    raw: Node
    form: Format
    fused_forms: list[Fused] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Rows of the weights."""
        return self.raw.shape[0]


class Weights:
    """One run of the pass."""

    def __init__(
        self, arguments: Sequence[Node], results: Sequence[Node], target: Target, log: Log
    ) -> None:
        self.target, self.log, self.results = target, log, list(results)
        self.unpacked, self.family = families_of(target)
        self.number = {a: i for i, a in enumerate(arguments)}
        self.order = topological(results)
        self.readers = users(self.order)
        self.kept = set(results)
        self.done: dict[Node, Node] = {}
        self.not_codes: dict[Node, dict[str, None]] = {}  # why products of bytes are none of codes
        self.builds: dict[Node, Callable[[], Node | None]] = {}  # by the Node they stand for

    def run(self) -> list[Node]:
        """The results with calls of kernels."""
        for members in self._joined():
            self._plan(members)
        for node in self.order:
            if self._of_stored(node) and (
                node.inputs[0].op is ops.unpack or self.target.array or plain(node)
            ):
                why = self._why_no_codes(node)
                if why:
                    self.not_codes.setdefault(node.inputs[1].inputs[0], {})[why] = None
                else:
                    self.builds[node] = functools.partial(self._codes, node)
            if node.op is ops.gather and node.inputs[0].op is ops.unpack:
                self.builds[node] = functools.partial(self._take, node)
            if node.op is ops.grouped_dot and node.inputs[1].op is ops.unpack:
                self.builds[node] = functools.partial(self._groups, node)
        for node in self.order:
            build_it = self.builds.get(node)
            made = None if build_it is None else build_it()
            self.done[node] = rebuild(node, self.done) if made is None else made
        return self._unpacked([self.done[r] for r in self.results])

    def _unpacked(self, results: list[Node]) -> list[Node]:
        """Results without an `unpack`: what one reads may come of others (rounded inputs), so Nodes
        are made anew in order."""
        made: dict[Node, Node] = {}
        for node in topological(results):
            made[node] = rebuild(node, made)
            if node.op is ops.unpack:
                made[node] = self._scratch(made[node])
        return [made[r] for r in results]

    # ---- finding ----------------------------------------------------------------------------

    def _only_reader(self, node: Node) -> Node | None:
        """The one Node that reads a value, where nothing else does."""
        found = self.readers.get(node, [])
        return found[0] if len(found) == 1 and node not in self.kept else None

    def _joined(self) -> list[list[Product]]:
        """Products of the same tokens with weights of one Format, in the order of the weights."""
        found: dict[Any, dict[Node, Product]] = {}
        for node in self.order:
            product = self._product(node)
            if product is not None:
                key = (product.x, product.form.name)
                found.setdefault(key, {}).setdefault(product.raw, product)
        joined = []
        for members in found.values():
            ordered = sorted(members.values(), key=lambda p: self.number[p.raw])
            joined += self._apart(ordered)
        return joined

    def _product(self, node: Node) -> Product | None:
        if not self._of_stored(node):
            return None
        x, weight = node.inputs
        raw, form = weight.inputs[0], format_of(weight.attrs["format"])
        contract = ((len(x.shape) - 1,), (1,))
        if node.attrs["batch"] != ((), ()) or node.attrs["contract"] != contract:
            return None
        if weight.dtype is not x.dtype or not self._why_no_codes(node):
            return None
        if self.family.why_not_shape(_problem(form, raw.shape[0], x), self.target):
            return None
        product = Product(node, x, raw, form)
        product.fused_forms = fused_forms(node, x.dtype, self._only_reader)
        return product if product.fused_forms else None

    def _of_stored(self, node: Node) -> bool:
        """Whether a Node is a product with weights that are stored as rows of a Format."""
        if node.op is not ops.dot or node.inputs[1].op is not ops.unpack:
            return False
        raw = node.inputs[1].inputs[0]
        return raw in self.number and len(raw.shape) == 2

    def _apart(self, members: list[Product]) -> list[list[Product]]:
        """Gates and what they gate by themselves, the others together."""
        by_dot = {p.dot: p for p in members}
        joined, rest = [], list(members)
        for product in members:
            if product not in rest:
                continue
            pair = self._gated(product, by_dot)
            if pair is not None and all(p in rest for p in pair):
                joined.append(list(pair))
                rest = [p for p in rest if p not in pair]
        return [*joined, *([rest] if rest else [])]

    def _gated(self, up: Product, by_dot: dict[Node, Product]) -> tuple[Product, Product] | None:
        """(gate, up) where a product is only read to be gated by another one."""
        node = self._only_reader(up.dot)
        pair = None if node is None else gates_of(node, up.x.dtype)
        gate = None if pair is None or pair[1] is not up.dot else by_dot.get(pair[0])
        if gate is None or gate is up or gate.rows != up.rows:
            return None
        return gate, up

    # ---- choosing ---------------------------------------------------------------------------

    def _plan(self, members: list[Product]) -> None:
        """Note what is built in the place of which Node."""
        first = members[0]
        if len(members) == 1:
            self._plan_alone(first)
            return
        norm = self._norm(first.x)
        node = self._only_reader(members[1].dot)
        if len(members) == 2 and self._gated(members[1], {p.dot: p for p in members}) is not None:
            for found in (norm, None) if norm is not None else (None,):
                around = _around(found, gated="silu")
                if self._takes(members, around):
                    assert node is not None
                    self.builds[node] = functools.partial(self._gates, members, found, around)
                    return
        joint = functools.cache(lambda: self._joint(members, norm))
        for number, product in enumerate(members):
            self.builds[product.dot] = functools.partial(lambda n: joint()[n], number)

    def _plan_alone(self, product: Product) -> None:
        norm = self._norm(product.x)
        for fused in reversed(product.fused_forms):
            ends = (fused.bias, fused.residual)
            if any(e is not None and e.dtype is not product.x.dtype for e in ends):
                continue
            for found in (norm, None) if norm is not None else (None,):
                around = _around(found, bias=ends[0] is not None, residual=ends[1] is not None)
                if around == Around() or not self._takes([product], around):
                    continue
                make = functools.partial(self._surrounded, product, fused, found, around)
                self.builds[fused.top] = make
                return
        self.builds[product.dot] = lambda: self._joint([product], None)[0]

    def _norm(self, x: Node) -> RowNorm | None:
        found = norm_of(x)
        fits = found is not None and found.weight.dtype is x.dtype and found.x.shape == x.shape
        return found if fits else None

    def _takes(self, members: list[Product], around: Around) -> bool:
        shape = self._shape(members)
        return not self.family.why_not_around(shape, self.target, around)

    def _shape(self, members: list[Product]) -> QuantisedShape:
        return _problem(members[0].form, sum(p.rows for p in members), members[0].x)

    # ---- building ---------------------------------------------------------------------------

    def _parts(self, raws: Sequence[Node], form: Format, columns: int) -> list[Node]:
        """What kernels read of some weights."""
        rows = [rows_of(raw.type)[0] for raw in raws if isinstance(raw.type, Array)]
        callee = self.family.layout(rows, form.name, columns, self.target)
        return build.items(ops.call(*raws, callee=callee))

    def _launch(
        self, members: list[Product], around: Around, norm: RowNorm | None, last: Sequence[Node]
    ) -> list[Node]:
        """The results (tokens, rows) of one product with what is around it."""
        shape = self._shape(members)
        x = self.done[members[0].x if norm is None else norm.x]
        first = [build.reshape(x, (shape.tokens, shape.columns))]
        if norm is not None:
            first.append(self.done[norm.weight])
        parts = self._parts([p.raw for p in members], shape.format, shape.columns)
        callee = _callee("callee", shape, self.target, around)
        _, callee.verdict = chosen_for(shape, self.target, around)
        made = ops.call(*first, *parts, *last, callee=callee)
        self._count("quantised_product")
        return [made] if len(around.results(shape)) == 1 else build.items(made)

    def _surrounded(
        self, product: Product, fused: Fused, norm: RowNorm | None, around: Around
    ) -> Node:
        last = []
        if fused.bias is not None:
            last.append(self.done[fused.bias])
        if fused.residual is not None:
            flat = (_count(product.x.shape[:-1]), product.rows)
            last.append(build.reshape(self.done[fused.residual], flat))
        (made,) = self._launch([product], around, norm, last)
        return build.reshape(made, fused.top.shape)

    def _gates(self, members: list[Product], norm: RowNorm | None, around: Around) -> Node:
        (made,) = self._launch(members, around, norm, [])
        return build.reshape(made, members[0].dot.shape)

    def _joint(self, members: list[Product], norm: RowNorm | None) -> list[Node]:
        """What each of some products is, of one launch that reads all their weights."""
        splits = tuple(p.rows for p in members)
        if len(members) > 1:
            for found in (norm, None) if norm is not None else (None,):
                around = _around(found, splits=splits)
                if self._takes(members, around):
                    made = self._launch(members, around, found, [])
                    return [self._fitted(p, n) for p, n in zip(members, made)]
        if norm is not None and self._takes(members, _around(norm)):
            (whole,) = self._launch(members, _around(norm), norm, [])
        else:
            whole = self._plain(members)
        if len(members) == 1:
            return [self._fitted(members[0], whole)]
        lead = members[0].x.shape[:-1]
        whole = build.reshape(whole, (*lead, sum(splits)))
        found_, first = [], 0
        for product in members:
            part = build.slice_axis(whole, len(lead), first, first + product.rows)
            found_.append(build.cast(part, product.dot.dtype))
            first += product.rows
        return found_

    def _fitted(self, product: Product, made: Node) -> Node:
        return build.cast(build.reshape(made, product.dot.shape), product.dot.dtype)

    def _plain(self, members: list[Product]) -> Node:
        """A product with nothing around it; many tokens unpack the weights first."""
        shape, x = self._shape(members), self.done[members[0].x]
        parts = self._parts([p.raw for p in members], shape.format, shape.columns)
        self._count("quantised_product")
        offer, verdict = chosen_for(shape, self.target)
        if offer.plan == UNPACK:
            one = _problem(shape.format, shape.rows, x, 1)
            callee = _callee("unpack_callee", one, self.target)
            callee.verdict = verdict
            weights = ops.call(*parts, callee=callee)
            attrs = dict(members[0].dot.attrs)
            if len(members) > 1:
                attrs["dtype"] = x.dtype
            return ops.dot(x, weights, **attrs)
        rows = build.reshape(x, (shape.tokens, shape.columns))
        callee = _callee("callee", shape, self.target)
        callee.verdict = verdict
        return _result(ops.call(rows, *parts, callee=callee))

    def _take(self, node: Node) -> Node | None:
        """Rows by number; None where no kernel takes them."""
        weight, index = node.inputs[0], node.inputs[-1]
        raw, form = weight.inputs[0], format_of(weight.attrs["format"])
        if len(node.inputs) != 2 or node.attrs["axes"] != (0,) or raw not in self.number:
            return None
        shape = _problem(form, raw.shape[0], weight, _count(index.shape))
        if len(raw.shape) != 2 or self.family.why_not_shape(shape, self.target):
            return None
        ids = build.reshape(build.cast(self.done[index], int32), (shape.tokens,))
        made = self._taken(raw, ids, shape)
        self._count("quantised_rows")
        return build.reshape(made, node.shape)

    def _taken(self, raw: Node, ids: Node, shape: QuantisedShape) -> Node:
        parts = self._parts([raw], shape.format, shape.columns)
        callee = _callee("take_callee", shape, self.target)
        _, callee.verdict = chosen_for(shape, self.target, rows=True)
        return ops.call(ids, *parts, callee=callee)

    def _groups(self, node: Node) -> Node | None:
        """A product of groups of rows with weights of their own; None where no kernel takes it."""
        x, weight, offsets, *blocks = node.inputs
        raw, form = weight.inputs[0], format_of(weight.attrs["format"])
        if raw not in self.number or node.attrs["axis"] != 2 or weight.shape[0] < 2:
            return None
        if form.apart:
            why = self._why_no_codes(node)
            if not why:
                self._count("groups_of_codes")
                return of_group_codes(node, raw, self.done)
            self.not_codes.setdefault(raw, {})[why] = None
        rows = _count(weight.shape[:-1])
        shape = replace_field(_problem(form, rows, x), groups=weight.shape[0])
        if self.family.why_not_shape(shape, self.target):
            return None
        callee = _callee("grouped_callee", shape, self.target, node.attrs["block"])
        _, callee.verdict = chosen_for(shape, self.target, rows=True)
        self._count("quantised_groups")
        where = blocks[0] if self.target.has_threads else offsets
        parts = self._parts([raw], form, shape.columns)
        return _result(ops.call(self.done[x], self.done[where], *parts, callee=callee))

    def _why_no_codes(self, dot: Node) -> str:
        """Why a product with stored weights is none of codes; '' where it is."""
        if self.target.array is not None and dot.op is ops.dot:
            return array_weights.why_not(dot, self.target)
        return why_no_codes(dot, self.target)

    def _codes(self, dot: Node) -> Node:
        """A product of codes that matrix units multiply."""
        self._count("product_of_codes")
        if self.target.array is not None:
            x, raw = dot.inputs[0], dot.inputs[1].inputs[0]
            whole = not self.target.array.accumulator.is_float
            given = codes_of_rows(x.inputs[0], self.done[x.inputs[0]]) if whole else None
            return array_weights.of_codes(dot, self.done[x], given, raw, self.target)
        x = dot.inputs[0] if plain(dot) else dot.inputs[0].inputs[0]
        return of_codes(dot, self.done[x], dot.inputs[1].inputs[0])

    def _scratch(self, node: Node) -> Node:
        """All values of weights that no product and no gather could take."""
        raw, form = node.inputs[0], format_of(node.attrs["format"])
        why = f"{raw!r} is computed" if raw not in self.number else ""
        if not why and not node.dtype.is_float and len(node.shape) == 2:
            return array_weights.whole_values(node, self.target)
        if len(node.shape) != 2:
            why = why or "they have other axes than rows and columns, and no kernel of groups"
        shape = None if why else _problem(form, raw.shape[0], node, raw.shape[0])
        why = why or self.family.why_not_shape(shape, self.target)  # type: ignore[arg-type]
        self.log.notes.append(
            f"weights {node.type} of {form} are unpacked to scratch"
            + (f" by ordinary ops: {why}" if why else ": something but a product reads them")
            + "".join(f"; {found}" for found in self.not_codes.get(raw, ()))
        )
        if shape is None or why:
            return unpacked_there(node) if raw in self.number else unpacked(node)
        if self.unpacked.first(form, shape.rows, node.dtype, self.target):
            parts = self._parts([raw], form, shape.columns)
            one = _problem(form, shape.rows, node, 1)
            return ops.call(*parts, callee=_callee("unpack_callee", one, self.target))
        return self._taken(raw, build.iota(shape.rows, int32), shape)

    def _count(self, name: str) -> None:
        self.log.count(name)


def _around(norm: RowNorm | None, **more: Any) -> Around:
    if norm is None:
        return Around(**more)
    return Around(norm.epsilon, norm.offset, **more)


def _problem(form: Format, rows: Any, x: Node, tokens: Size | None = None) -> QuantisedShape:
    """The product of x (..., columns) with so many rows."""
    count = _count(x.shape[:-1]) if tokens is None else tokens
    return QuantisedShape(form, rows, x.shape[-1], count, x.dtype)


def _result(made: Node) -> Node:
    """The result of a call; others are scratch."""
    return build.items(made)[0] if isinstance(made.type, Tuple) else made


def _count(sizes: Sequence[Size]) -> Size:
    return product_of(tuple(sizes))


def _callee(kind: str, shape: QuantisedShape, target: Target, *more: Any) -> Any:
    """A kernel of the Target's, as settings have it now."""
    return _made(kind, config().numerics, shape, target, *more)


@functools.lru_cache(maxsize=512)
def _made(kind: str, settings: Any, shape: QuantisedShape, target: Target, *more: Any) -> Any:
    return getattr(kernels_of(target), kind)(shape, target, *more)


__all__ = ["Weights"]

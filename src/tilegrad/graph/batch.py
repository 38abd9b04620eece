"""Batching (vmap): a Graph over one example becomes a Graph over a batch of them.

`BATCH` has one row per op: rule(node, inputs, flags, size) -> (Node, whether it is batched),
or a list of these for a tuple. A batched value has the batch as its axis 0. What does not
depend on the batch stays as it was, with one exception: `random_bits` with an unbatched key
draws over the batched shape, so every example gets bits of its own; with a batched key each
example gets what it would have got alone. Invariant: per example, the results are what the
unbatched Graph gives. The file is long because it is one table: a rule for each op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..core.dtype import int64
from ..ir.block import Block, argument, pure_block
from ..ir.node import Node, Op, topological
from ..ir.symbol import Size, multiply
from ..ir.types import Array, Tuple, Type
from . import attention, build, ops
from .partial import outputs_of

Pair = tuple[Node, bool]
Flags = list[bool]
Rule = Callable[[Node, list[Node], Flags, Size], Any]


def with_batch(x: Node, flag: bool, size: Size) -> Node:
    """x with a batch axis, repeated if it has none."""
    if flag:
        return x
    return build.expand(build.unsqueeze(x, 0), (size, *x.shape))


def _all(xs: Sequence[Node], flags: Flags, size: Size) -> list[Node]:
    return [with_batch(x, on, size) for x, on in zip(xs, flags)]


def _later(axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + 1 for a in axes)


def _elementwise(node: Node, xs: list[Node], flags: Flags, size: Size) -> Pair:
    return node.with_inputs(tuple(_all(xs, flags, size))), True


def _leaf(node: Node, xs: list[Node], flags: Flags, size: Size) -> Pair:
    return node, False


def _random_bits(node: Node, xs: list[Node], flags: Flags, size: Size) -> Pair:
    if any(flags):
        return _one_by_one(node, xs, flags, size)[0]
    return ops.random_bits(*xs, shape=(size, *node.attrs["shape"])), True


def _one_by_one(node: Node, xs: list[Node], flags: Flags, size: Size) -> list[Pair]:
    """A scan over the batch: for ops that only know one example."""

    def body(carries: list[Node], slices: list[Node]) -> tuple[list[Node], list[Node]]:
        rest = iter(slices)
        inputs = tuple(next(rest) if on else x for x, on in zip(xs, flags))
        return [], outputs_of(node.with_inputs(inputs))

    _, stacked = build.scan(body, [], [x for x, on in zip(xs, flags) if on], size)
    return [(s, True) for s in stacked]


# ---- movement, reductions, dot --------------------------------------------------------------


def _moved(**change: Callable[[Any, Size], Any]) -> Rule:
    """The op with attrs told of the batch axis, on one batched input."""

    def rule(node: Node, xs: list[Node], flags: Flags, size: Size) -> Pair:
        attrs = {k: change[k](v, size) if k in change else v for k, v in node.attrs.items()}
        return node.op.make((xs[0],), attrs, location=node.location), True

    return rule


_shape_rule = _moved(shape=lambda shape, size: (size, *shape))
_axes_rule = _moved(axes=lambda axes, size: _later(axes))
_axis_rule = _moved(axis=lambda axis, size: axis + 1)
_pad_rule = _moved(low=lambda a, size: (0, *a), high=lambda b, size: (0, *b))
_permute_rule = _moved(order=lambda order, size: (0, *_later(order)))
_slice_rule = _moved(
    start=lambda a, size: (0, *a), stop=lambda b, size: (size, *b), step=lambda s, size: (1, *s)
)


def _concatenate(node: Node, xs: list[Node], flags: Flags, size: Size) -> Pair:
    return ops.concatenate(*_all(xs, flags, size), axis=node.attrs["axis"] + 1), True


def _sort(node: Node, xs: list[Node], flags: Flags, size: Size) -> list[Pair]:
    new = ops.sort(xs[0], axis=node.attrs["axis"] + 1, descending=node.attrs["descending"])
    return [(item, True) for item in build.items(new)]


def _dot(node: Node, xs: list[Node], flags: Flags, size: Size) -> Pair:
    pairs = []
    for kind in ("batch", "contract"):
        left, right = node.attrs[kind]
        pairs.append((_later(left) if flags[0] else left, _later(right) if flags[1] else right))
    batch, contract = pairs
    if all(flags):
        batch = ((0, *batch[0]), (0, *batch[1]))
    new = ops.dot(*xs, batch=batch, contract=contract, dtype=node.dtype)
    if all(flags):
        return new, True
    # the batch axis is the first of its operand's own axes
    place = len(batch[0])
    if flags[1]:
        place += len(xs[0].shape) - len(batch[0]) - len(contract[0])
    return build.move_axis(new, place, 0), True


# ---- attention ------------------------------------------------------------------------------


def _fold(x: Node, flag: bool, size: Size, place: int) -> Node:
    """x with the batch merged into the axis at `place` of one example."""
    moved = build.move_axis(with_batch(x, flag, size), 0, place)
    shape = moved.shape
    merged = multiply(shape[place], shape[place + 1])
    return build.reshape(moved, (*shape[:place], merged, *shape[place + 2 :]))


def _unfold(x: Node, size: Size, shape: Sequence[Size], place: int) -> Node:
    """x of one example's shape but for the merged axis, with the batch in front."""
    parts = build.reshape(x, (*shape[:place], size, *shape[place:]))
    return build.move_axis(parts, place, 0)


def _folds(node: Node, flags: Flags) -> bool:
    """Whether examples can be further entries of b."""
    extras = node.attrs["extras"]
    own = dict(zip(extras, flags[len(flags) - len(extras) :]))
    if "query_starts" in extras or {"slopes", "sinks"} & set(node.attrs.get("wanted", ())):
        return False
    return not any(own.get(name) for name in ("slopes", "sinks", "key", "offset"))


def _attention(node: Node, xs: list[Node], flags: Flags, size: Size) -> list[Pair]:
    """Examples become entries of b; where they cannot, the decomposition is batched."""
    if not _folds(node, flags):
        copies = tuple(argument(f"input{i}", x.type) for i, x in enumerate(node.inputs))
        results = attention.decompose(node.with_inputs(copies))
        return _walk(results, dict(zip(copies, zip(xs, flags))), size)
    orders, wanted = node.attrs["orders"], node.attrs.get("wanted", ())
    backward = node.op is ops.attention_backward
    batch_axes = [o.index("b") for o in (orders if backward else orders[:3])] + [0] * 2 * backward
    inputs = [_fold(x, on, size, at) for x, on, at in zip(xs, flags, batch_axes)]
    count = node.inputs[0].shape[batch_axes[0]]
    pairs = list(zip(xs, flags))[len(inputs) :]
    for name, old, (x, on) in zip(node.attrs["extras"], node.inputs[len(inputs) :], pairs):
        shared = name in ("bias", "mask") and old.shape[0] == 1 and not on and name not in wanted
        if name in ("bias", "mask", "key_lengths") and not shared:
            each = build.expand(with_batch(x, on, size), (size, count, *old.shape[1:]))
            x = _fold(each, True, size, 0)
        inputs.append(x)
    made = build.items(node.with_inputs(tuple(inputs)))
    batch_axes = [*batch_axes[:3], *[0] * len(wanted)] if backward else [orders[3].index("b"), 0]
    found = []
    for item, type_, at in zip(made, node.type.items, batch_axes):  # type: ignore[union-attr]
        shape = (*type_.shape[:at], count, *type_.shape[at + 1 :])
        part = _unfold(item, size, shape, at)
        found.append((part if shape == type_.shape else build.sum_(part, 1, keep=True), True))
    return found


# ---- indexing -------------------------------------------------------------------------------


def _with_row(indices: Sequence[Node]) -> list[Node]:
    """Batched indices, and which example each belongs to in front."""
    return [build.iota_along(indices[0].shape, 0, int64), *indices]


def _gather(node: Node, xs: list[Node], flags: Flags, size: Size) -> Pair:
    x, indices, axes = xs[0], xs[1:], node.attrs["axes"]
    if not any(flags[1:]):
        new = ops.gather(x, *indices, axes=_later(axes))
        return build.move_axis(new, len(indices[0].shape), 0), True
    indices = _all(indices, flags[1:], size)
    if not flags[0]:
        return ops.gather(x, *indices, axes=axes), True
    return ops.gather(x, *_with_row(indices), axes=(0, *_later(axes))), True


def _update(node: Node, xs: list[Node], flags: Flags, size: Size) -> Pair:
    state, value = _all(xs[:2], flags[:2], size)
    axes, mode = node.attrs["axes"], node.attrs["mode"]
    if not any(flags[2:]):
        value = build.move_axis(value, 0, len(xs[2].shape))
        return ops.update(state, value, *xs[2:], axes=_later(axes), mode=mode), True
    indices = _with_row(_all(xs[2:], flags[2:], size))
    return ops.update(state, value, *indices, axes=(0, *_later(axes)), mode=mode), True


# ---- control --------------------------------------------------------------------------------


def _argument(name: str, type_: Type, flag: bool, size: Size) -> Node:
    assert isinstance(type_, Array)
    return argument(name, Array((size, *type_.shape), type_.dtype) if flag else type_)


def _enter(block: Block, flags: Sequence[bool], size: Size) -> tuple[list[Node], list[Pair]]:
    """Arguments for a batched Block, and its results on them."""
    arguments = [
        _argument(a.attrs["name"], a.type, on, size) for a, on in zip(block.arguments, flags)
    ]
    given = dict(zip(block.arguments, zip(arguments, flags)))
    return arguments, _walk(block.results, given, size)


def _settle(
    block: Block, flags: list[bool], count: int, size: Size
) -> tuple[list[bool], list[Node], list[Pair]]:
    """Flags under which carries stay as they are, and the Block entered with them."""
    flags = list(flags)
    while True:
        arguments, results = _enter(block, flags, size)
        grown = [flags[i] or results[i][1] for i in range(count)]
        if grown == flags[:count]:
            return flags, arguments, results
        flags[:count] = grown


def _carried(results: Sequence[Pair], flags: Sequence[bool], size: Size) -> list[Node]:
    return [with_batch(x, on, size) if want else x for (x, on), want in zip(results, flags)]


def _scan(node: Node, xs: list[Node], flags: Flags, size: Size) -> list[Pair]:
    count, sliced = node.attrs["carries"], ops.scan_slices(node)
    settled, arguments, results = _settle(node.blocks[0], flags, count, size)
    carried = _carried(results[:count], settled, size)
    new = (*carried, *(x for x, _ in results[count:]))
    inputs = []
    for i, (x, on) in enumerate(zip(xs, flags)):
        if i < count and settled[i]:
            x = with_batch(x, on, size)
        elif count <= i < count + sliced and on:
            x = build.move_axis(x, 0, 1)  # steps first, then the batch
        inputs.append(x)
    block = pure_block(node.blocks[0].name, tuple(arguments), tuple(new))
    items = build.items(node.with_inputs(tuple(inputs), (block,)))
    stacked = [
        (build.move_axis(x, 1, 0) if on else x, on)
        for x, (_, on) in zip(items[count:], results[count:])
    ]
    return [*zip(items[:count], settled), *stacked]


def _cond(node: Node, xs: list[Node], flags: Flags, size: Size) -> list[Pair]:
    if flags[0]:  # both branches, chosen element by element
        found = []
        for block in node.blocks:
            given = dict(zip(block.arguments, zip(xs[1:], flags[1:])))
            found.append(_walk(block.results, given, size))
        return [(_select(xs[0], a, b, size), True) for a, b in zip(*found)]
    entered = [_enter(block, flags[1:], size) for block in node.blocks]
    together = [any(on for _, on in pair) for pair in zip(*(results for _, results in entered))]
    blocks = []
    for old, (arguments, results) in zip(node.blocks, entered):
        made = _carried(results, together, size)
        blocks.append(pure_block(old.name, tuple(arguments), tuple(made)))
    items = build.items(node.with_inputs(tuple(xs), tuple(blocks)))
    return list(zip(items, together))


def _select(condition: Node, a: Pair, b: Pair, size: Size) -> Node:
    """a where the condition (one bool per example) holds, else b."""
    left, right = with_batch(*a, size), with_batch(*b, size)
    mask = build.reshape(condition, condition.shape + (1,) * (len(left.shape) - 1))
    return ops.where(build.expand(mask, left.shape), left, right)


def _while_loop(node: Node, xs: list[Node], flags: Flags, size: Size) -> list[Pair]:
    """While any example goes on; those that are done keep their carries."""
    count = node.attrs["carries"]
    test, body = node.blocks
    settled, arguments, results = _settle(body, flags, count, size)
    tested, (condition,) = _enter(test, settled, size)
    if condition[1]:
        settled = [True] * count + settled[count:]
        tested, (condition,) = _enter(test, settled, size)
        arguments, results = _enter(body, settled, size)
    new = _carried(results, settled, size)
    goes_on = condition[0]
    if condition[1]:
        goes_on = build.max_(condition[0], 0)
        given = dict(zip(test.arguments, zip(arguments, settled)))
        ((mask, _),) = _walk(test.results, given, size)
        new = [_select(mask, (x, True), (old, True), size) for x, old in zip(new, arguments)]
    blocks = (
        pure_block(test.name, tuple(tested), (goes_on,)),
        pure_block(body.name, tuple(arguments), tuple(new)),
    )
    inputs = [with_batch(x, on, size) if want else x for x, on, want in zip(xs, flags, settled)]
    items = build.items(node.with_inputs(tuple(inputs), blocks))
    return list(zip(items, settled))


class BatchedRules:
    """The rules of a custom Node over a batch: those of one example, batched in turn."""

    def __init__(self, rules: Any, flags: Flags, size: Size) -> None:
        self.rules, self.flags, self.size = rules, flags, size
        for name in ("vjp", "jvp"):
            if getattr(rules, name, None) is None:
                setattr(self, name, None)

    def _apply(self, rule: Any, *groups: tuple[Sequence[Node | None], Sequence[bool]]) -> Any:
        given: dict[Node, Pair] = {}
        lists: list[list[Node | None]] = []
        for values, flags in groups:
            copies: list[Node | None] = []
            for value, on in zip(values, flags):
                if value is None:
                    copies.append(None)
                    continue
                shape = value.shape[1:] if on else value.shape
                copy = argument("one", Array(shape, value.dtype))
                given[copy] = (value, on)
                copies.append(copy)
            lists.append(copies)
        found = list(rule(*lists))
        done = iter(_walk([f for f in found if f is not None], given, self.size))
        return [None if f is None else next(done) for f in found]

    def vjp(self, inputs: Any, outputs: Any, cotangents: Any) -> list[Node | None]:
        """Cotangents per example, summed for inputs that all examples share."""
        every = [True] * len(outputs)
        found = self._apply(
            self.rules.vjp, (inputs, self.flags), (outputs, every), (cotangents, every)
        )
        answer: list[Node | None] = []
        for pair, flag in zip(found, self.flags):
            if pair is None:
                answer.append(None)
                continue
            x = with_batch(pair[0], pair[1], self.size)
            answer.append(x if flag else build.sum_(x, 0))
        return answer

    def jvp(self, inputs: Any, outputs: Any, tangents: Any) -> list[Node | None]:
        """Tangents per example."""
        every = [True] * len(outputs)
        found = self._apply(
            self.rules.jvp, (inputs, self.flags), (outputs, every), (tangents, self.flags)
        )
        return [None if p is None else with_batch(p[0], p[1], self.size) for p in found]


def _custom(node: Node, xs: list[Node], flags: Flags, size: Size) -> list[Pair]:
    arguments, results = _enter(node.blocks[0], flags, size)
    new = tuple(with_batch(x, on, size) for x, on in results)
    block = pure_block(node.blocks[0].name, tuple(arguments), new)
    rules = BatchedRules(node.attrs["rules"], list(flags), size)
    made = ops.custom(*xs, blocks=(block,), rules=rules)
    return [(item, True) for item in build.items(made)]


def _call(node: Node, xs: list[Node], flags: Flags, size: Size) -> Any:
    """callee.batch(inputs, flags, size) -> batched results if it is there, else one by one."""
    batch = getattr(node.attrs["callee"], "batch", None)
    if batch is None:
        return _each(node, xs, flags, size)
    found = [(x, True) for x in batch(xs, flags, size)]
    return found if isinstance(node.type, Tuple) else found[0]


def _each(node: Node, xs: list[Node], flags: Flags, size: Size) -> Any:
    found = _one_by_one(node, xs, flags, size)
    return found if isinstance(node.type, Tuple) else found[0]


def _unpack(node: Node, xs: list[Node], flags: Flags, size: Size) -> Pair:
    return ops.unpack(*xs, **node.attrs), True  # rows are the last axis: more of them


def _get(node: Node, xs: list[Node], flags: Flags, size: Size) -> Pair:
    return node, False  # items of batched tuples are read by the walk


BATCH: dict[Op, Rule] = {
    **{
        op: _elementwise
        for op in ops.graph.ops.values()
        if op.category in ("unary", "binary", "compare", "ternary")
    },
    ops.input_: _leaf,
    ops.constant: _leaf,
    ops.size: _leaf,
    ops.iota: _leaf,
    ops.random_bits: _random_bits,
    ops.transfer: lambda node, xs, flags, size: (ops.transfer(xs[0], **node.attrs), flags[0]),
    ops.barrier: lambda node, xs, flags, size: (ops.barrier(*xs), flags[0]),
    ops.pruned: lambda node, xs, flags, size: (ops.pruned(xs[0]), flags[0]),
    ops.reshape: _shape_rule,
    ops.permute: _permute_rule,
    ops.expand: _shape_rule,
    ops.pad: _pad_rule,
    ops.slice_: _slice_rule,
    ops.flip: _axes_rule,
    ops.windows: _axis_rule,
    ops.concatenate: _concatenate,
    ops.sum_: _axes_rule,
    ops.prod: _axes_rule,
    ops.max_: _axes_rule,
    ops.min_: _axes_rule,
    ops.argmax: _axis_rule,
    ops.cumulative: _axis_rule,
    ops.sort: _sort,
    ops.dot: _dot,
    ops.attention: _attention,
    ops.attention_backward: _attention,
    ops.paged_append: _each,
    ops.paged_attention: _each,
    ops.draw: _each,
    ops.top_k: _each,
    ops.add_listed: _each,
    ops.picked_dot: _each,
    ops.group_rows: _each,
    ops.route: _each,
    ops.grouped_dot: _each,
    ops.sparse_dot: _each,
    ops.block_dot: _each,
    ops.grouped_outer: _each,
    ops.gather: _gather,
    ops.update: _update,
    ops.unpack: _unpack,
    ops.pack: _each,
    ops.get: _get,
    ops.scan: _scan,
    ops.cond: _cond,
    ops.while_loop: _while_loop,
    ops.call: _call,
    ops.custom: _custom,
}

# ---- the walk -------------------------------------------------------------------------------


def draws(node: Node) -> bool:
    """Whether a Node draws random bits, itself or in its Blocks."""
    if not node.blocks:
        return node.op is ops.random_bits or bool(node.attrs.get("dropout"))
    return any(draws(inner) for block in node.blocks for inner in block.nodes)


def _walk(
    outputs: Sequence[Node], given: Mapping[Node, Pair], size: Size, copy: bool = True
) -> list[Pair]:
    """The outputs batched; with `copy` (into another Block), owners of Blocks are made anew."""
    done: dict[Node, Any] = dict(given)
    for node in topological(outputs, stop=lambda n: n in given):
        if node in done:
            continue
        if node.op is ops.get:
            source = done[node.inputs[0]]
            index = node.attrs["index"]
            done[node] = (
                source[index]
                if isinstance(source, list)
                else (ops.get(source[0], index=index), False)
            )
            continue
        pairs = [done[i] for i in node.inputs]
        xs, flags = [p[0] for p in pairs], [p[1] for p in pairs]
        if any(flags) or draws(node):
            done[node] = BATCH[node.op](node, xs, flags, size)
        elif node.blocks and (copy or tuple(xs) != node.inputs):
            blocks = tuple([build.fresh_block(b) for b in node.blocks])
            done[node] = (node.with_inputs(tuple(xs), blocks), False)
        else:
            done[node] = (node.with_inputs(tuple(xs)), False)
    return [done[o] for o in outputs]


def batched(
    outputs: Sequence[Node], inputs: Mapping[Node, Node], size: Size
) -> list[tuple[Node, bool]]:
    """The outputs with batched inputs in place of old ones, and whether each has a batch axis."""
    return _walk(outputs, {old: (new, True) for old, new in inputs.items()}, size, copy=False)

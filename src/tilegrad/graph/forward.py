"""Forward mode: the tangents of outputs from the tangents of inputs.

`JVP` has one row per op: rule(node, tangents) -> the Node's tangent, None where it has none.
For a Node that gives a tuple the tangent is a list with an entry per item. Linear ops apply
themselves to the tangent, elementwise rows come from `partial`. Invariant: a tangent has the
type of its value; rules build ordinary Nodes, so the result can be differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..core.errors import InternalError, ShapeError, UserError
from ..ir.block import Block, argument, pure_block
from ..ir.node import Node, Op, topological
from . import attention, build, ops, transpose
from .grad import live_carries
from .partial import (
    CONSTANT,
    PARTIAL,
    carries_derivative,
    exclusive_product,
    extreme_index,
    outputs_of,
    product_of_others,
    take_along,
    ties,
    times,
    zeros,
)

Tangent = Any  # a Node or None; for a tuple a list of these
Rule = Callable[[Node, list[Any]], Tangent]


def no_derivative(node: Node, tangents: list[Any]) -> Tangent:
    """Marks an op through which no derivative flows."""
    return None


def _sum(parts: Sequence[Node | None]) -> Node | None:
    total: Node | None = None
    for part in parts:
        if part is not None:
            total = part if total is None else ops.add(total, part)
    return total


def _elementwise(op: Op) -> Rule:
    partials = PARTIAL[op]

    def rule(node: Node, tangents: list[Any]) -> Tangent:
        return _sum([p(node, t) for p, t in zip(partials, tangents) if t is not None and p])

    return rule


def _linear(node: Node, tangents: list[Any]) -> Tangent:
    """The op itself on the first input's tangent (gather keeps its indices)."""
    return node.with_inputs((tangents[0], *node.inputs[1:]))


def _or_zeros(t: Node | None, x: Node) -> Node:
    return zeros(x.type) if t is None else t


def _concatenate(node: Node, tangents: list[Any]) -> Tangent:
    return node.with_inputs(tuple(_or_zeros(t, x) for t, x in zip(tangents, node.inputs)))


def _where(node: Node, tangents: list[Any]) -> Tangent:
    condition, a, b = node.inputs
    return ops.where(condition, _or_zeros(tangents[1], a), _or_zeros(tangents[2], b))


# ---- reductions, dot ------------------------------------------------------------------------


def _prod(node: Node, tangents: list[Any]) -> Tangent:
    axes = node.attrs["axes"]
    return build.sum_(times(tangents[0], product_of_others(node.inputs[0], axes)), axes)


def _extreme(node: Node, tangents: list[Any]) -> Tangent:
    axes = node.attrs["axes"]
    mask, count = ties(node.inputs[0], node, axes)
    return ops.divide(build.sum_(build.where(mask, tangents[0], 0.0), axes), count)


def _cumulative(node: Node, tangents: list[Any]) -> Tangent:
    x, t, axis, kind = node.inputs[0], tangents[0], node.attrs["axis"], node.attrs["kind"]
    if kind == "sum":
        return _linear(node, tangents)
    if any(isinstance(s, int) and s == 0 for s in x.shape):
        return t
    if kind != "prod":
        return take_along(t, extreme_index(x, node, axis), axis)
    added = ops.multiply(exclusive_product(x, axis), t)

    def body(carries: list[Node], slices: list[Node]) -> tuple[list[Node], list[Node]]:
        new = ops.add(ops.multiply(carries[0], slices[0]), slices[1])
        return [new], [new]

    slices = [build.move_axis(x, axis, 0), build.move_axis(added, axis, 0)]
    first = build.full(slices[0].shape[1:], 0, x.dtype)
    _, (stacked,) = build.scan(body, [first], slices, x.shape[axis])
    return build.move_axis(stacked, 0, axis)


def _sort(node: Node, tangents: list[Any]) -> Tangent:
    return [take_along(tangents[0], ops.get(node, index=1), node.attrs["axis"]), None]


def _dot(node: Node, tangents: list[Any]) -> Tangent:
    (a, b, *offsets), (ta, tb) = node.inputs, tangents[:2]
    left = None if ta is None else node.with_inputs((ta, b, *offsets))
    right = None if tb is None else node.with_inputs((a, tb, *offsets))
    return _sum([left, right])


# ---- indexing -------------------------------------------------------------------------------


def _update(node: Node, tangents: list[Any]) -> Tangent:
    (state, value), indices = node.inputs[:2], node.inputs[2:]
    axes, mode = node.attrs["axes"], node.attrs["mode"]
    t_state, t_value = _or_zeros(tangents[0], state), _or_zeros(tangents[1], value)
    if mode in ("set", "add"):
        return node.with_inputs((t_state, t_value, *indices))
    if mode == "multiply":
        whole, others = transpose.factors(node)
        here = build.gather(state, indices, axes)
        part = times(t_value, ops.multiply(here, others))
        return build.update(times(t_state, whole), part, indices, axes, "add")
    kept, won, count = transpose.winners(node)
    part = build.where(won, t_value, 0.0)
    total = build.update(build.where(kept, t_state, 0.0), part, indices, axes, "add")
    return ops.divide(total, count)


# ---- control --------------------------------------------------------------------------------


def _tangent_arguments(arguments: Sequence[Node], live: Sequence[bool]) -> list[Node | None]:
    pairs = enumerate(zip(arguments, live))
    return [argument(f"tangent{i}", a.type) if on else None for i, (a, on) in pairs]


def _known(values: Sequence[Node | None]) -> list[Node]:
    return [v for v in values if v is not None]


def _block_tangents(block: Block, moved: Sequence[Node | None]) -> list[Node | None]:
    wrt = [a for a, t in zip(block.arguments, moved) if t is not None]
    return tangents(block.results, wrt, _known(moved))


def _starts(node: Node, tangents: list[Any], live: Sequence[bool]) -> list[Node | None]:
    """The tangents of live inputs, zeros where a live carry starts with none."""
    pairs = zip(node.inputs, tangents, live)
    return [_or_zeros(t, x) if on else None for x, t, on in pairs]


def _scan(node: Node, tangents: list[Any]) -> Tangent:
    """One scan that carries values and tangents."""
    block = build.fresh_block(node.blocks[0])
    count, sliced = node.attrs["carries"], ops.scan_slices(node)
    live = live_carries(block, count, [t is not None for t in tangents])
    moved = _tangent_arguments(block.arguments, live)
    starts = _starts(node, tangents, live)
    found = _block_tangents(block, moved)
    carried = [_or_zeros(f, r) for f, r, on in zip(found, block.results[:count], live) if on]
    outputs = _known(found[count:])
    results = [*block.results[:count], *carried, *block.results[count:], *outputs]

    def joined(values: Sequence[Node], extra: Sequence[Node | None]) -> list[Node]:
        parts: list[Node] = []
        for a, b in ((0, count), (count, count + sliced), (count + sliced, len(values))):
            parts += [*values[a:b], *_known(extra[a:b])]
        return parts

    new = pure_block(block.name, tuple(joined(block.arguments, moved)), tuple(results))
    scan = ops.scan(
        *joined(node.inputs, starts),
        blocks=(new,),
        carries=count + len(carried),
        length=node.attrs["length"],
        reverse=node.attrs["reverse"],
    )
    items = build.items(scan)
    carry = iter(items[count : count + len(carried)])
    output = iter(items[len(results) - len(outputs) :])
    first: list[Node | None] = [next(carry) if on else None for on in live[:count]]
    return first + [None if f is None else next(output) for f in found[count:]]


def _cond(node: Node, tangents: list[Any]) -> Tangent:
    """The tangents of the branch that is taken."""
    given = _known(tangents[1:])
    blocks, found = [], []
    for old in node.blocks:
        block = build.fresh_block(old)
        moved = _tangent_arguments(block.arguments, [t is not None for t in tangents[1:]])
        blocks.append((block.name, block.arguments + tuple(_known(moved))))
        found.append(_block_tangents(block, moved))
    kept = [i for i, pair in enumerate(zip(*found)) if any(p is not None for p in pair)]
    answer: list[Node | None] = [None] * len(found[0])
    if not kept:
        return answer
    types = [r.type for r in node.blocks[0].results]
    made = []
    for (name, arguments), parts in zip(blocks, found):
        results = [p if p is not None else zeros(types[i]) for i in kept for p in (parts[i],)]
        made.append(pure_block(name, arguments, tuple(results)))
    for i, item in zip(kept, build.items(ops.cond(*node.inputs, *given, blocks=tuple(made)))):
        answer[i] = item
    return answer


def _while_loop(node: Node, tangents: list[Any]) -> Tangent:
    """One loop that carries values and tangents."""
    count = node.attrs["carries"]
    test, body = (build.fresh_block(b) for b in node.blocks)
    live = live_carries(body, count, [t is not None for t in tangents])
    starts = _starts(node, tangents, live)

    def joined(values: Sequence[Node], extra: Sequence[Node | None]) -> tuple[Node, ...]:
        first = [*values[:count], *_known(extra[:count])]
        return (*first, *values[count:], *_known(extra[count:]))

    moved = _tangent_arguments(body.arguments, live)
    found = _block_tangents(body, moved)
    carried = [_or_zeros(f, r) for f, r, on in zip(found, body.results, live) if on]
    unused = _tangent_arguments(test.arguments, live)
    blocks = (
        pure_block(test.name, joined(test.arguments, unused), test.results),
        pure_block(body.name, joined(body.arguments, moved), (*body.results, *carried)),
    )
    loop = ops.while_loop(*joined(node.inputs, starts), blocks=blocks, carries=count + len(carried))
    rest = iter(build.items(loop)[count:])
    return [next(rest) if on else None for on in live[:count]]


def _call(node: Node, tangents: list[Any]) -> Tangent:
    callee = node.attrs["callee"]
    if getattr(callee, "jvp", None) is None:
        raise UserError(
            f"the kernel {callee.name} has no forward derivative",
            op="call",
            hint="give it a jvp, or wrap the call in custom_jvp",
            location=node.location,
        )
    found = callee.jvp(list(node.inputs), outputs_of(node), _filled(node, tangents))
    return found if len(outputs_of(node)) > 1 else found[0]


def refused(node: Node, tangents: list[Any]) -> Tangent:
    """Marks an op of inference alone."""
    raise UserError(
        f"{node.op.name} has no forward derivative",
        op=node.op.name,
        hint="it is for inference alone",
        location=node.location,
    )


def _filled(node: Node, tangents: list[Any]) -> list[Node | None]:
    """Tangents with zeros for floats that have none."""
    pairs = zip(node.inputs, tangents)
    return [_or_zeros(t, x) if carries_derivative(x.type) else None for x, t in pairs]


def _custom(node: Node, moved: list[Any]) -> Tangent:
    """rules.jvp; without it, the tangents of the Block."""
    rules = node.attrs["rules"]
    if getattr(rules, "jvp", None) is not None:
        outputs = outputs_of(node)
        found = rules.jvp(list(node.inputs), outputs, _filled(node, moved))
        return [t if carries_derivative(o.type) else None for t, o in zip(found, outputs)]
    if getattr(rules, "vjp", None) is not None:
        raise UserError(
            "a function with only a custom reverse derivative has no forward one",
            op="custom",
            hint="use custom_jvp, which serves both directions",
            location=node.location,
        )
    wrt = [(x, t) for x, t in zip(node.inputs, moved) if t is not None]
    results = build.inline(node.blocks[0], node.inputs)
    return tangents(results, [x for x, _ in wrt], [t for _, t in wrt])


def _attention(node: Node, moved: list[Any]) -> Tangent:
    """Through the decomposition."""
    wrt = [(x, t) for x, t in zip(node.inputs, moved) if t is not None]
    return tangents(attention.decompose(node), [x for x, _ in wrt], [t for _, t in wrt])


JVP: dict[Op, Rule] = {
    **{op: no_derivative for op in CONSTANT},
    **{op: _elementwise(op) for op in PARTIAL},
    ops.where: _where,
    ops.cast: lambda node, t: _linear(node, t) if node.dtype.is_float else None,
    ops.reshape: _linear,
    ops.permute: _linear,
    ops.expand: _linear,
    ops.pad: _linear,
    ops.slice_: _linear,
    ops.flip: _linear,
    ops.windows: _linear,
    ops.concatenate: _concatenate,
    ops.sum_: _linear,
    ops.prod: _prod,
    ops.max_: _extreme,
    ops.min_: _extreme,
    ops.cumulative: _cumulative,
    ops.sort: _sort,
    ops.dot: _dot,
    ops.grouped_dot: _dot,
    ops.grouped_outer: _dot,
    ops.attention: _attention,
    ops.attention_backward: _attention,
    ops.paged_append: refused,
    ops.paged_attention: refused,
    ops.add_listed: refused,
    ops.picked_dot: refused,
    ops.sparse_dot: refused,
    ops.block_dot: refused,
    ops.route: refused,
    ops.gather: _linear,
    ops.update: _update,
    ops.get: lambda node, t: t[0][node.attrs["index"]],
    ops.barrier: lambda node, t: t[0],
    ops.transfer: _linear,
    ops.scan: _scan,
    ops.cond: _cond,
    ops.while_loop: _while_loop,
    ops.call: _call,
    ops.custom: _custom,
}


def _absent(tangent: Tangent) -> bool:
    return tangent is None or (isinstance(tangent, list) and all(t is None for t in tangent))


def tangents(
    outputs: Sequence[Node], wrt: Sequence[Node], moved: Sequence[Node | None]
) -> list[Node | None]:
    """The tangent of each output when each of `wrt` moves along its tangent; None for zero."""
    known: dict[Node, Tangent] = {}
    for x, t in zip(wrt, moved):
        if t is not None and t.type != x.type:
            raise ShapeError(
                "a tangent does not fit its input", op="jvp", expected=x.type, got=t.type
            )
        known[x] = t
    for node in topological(outputs):
        if node in known:
            continue
        inputs = [known.get(i) for i in node.inputs]
        if not all(map(_absent, inputs)):
            known[node] = JVP[node.op](node, inputs)
            if isinstance(known[node], Node) and known[node].type != node.type:
                raise InternalError("forward", f"{known[node]!r} does not fit {node!r}")
    return [known.get(o) for o in outputs]

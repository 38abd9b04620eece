"""Reverse mode: the cotangents of inputs from the cotangents of outputs.

`VJP` has one row per op: rule(node, cotangent, wanted) -> one cotangent per input, None where
none flows. For a Node that gives a tuple the cotangent is a list with an entry per item.
Elementwise rows come from `partial`, movement and reductions from `transpose`, control is
here. `no_derivative` marks ops through which nothing flows. Invariant: rules build ordinary
Nodes and copy every Block they reuse, so results can be differentiated and verified again.

The derivative of a scan is a scan the other way. It reads the carries that entered each step
from a second forward scan that also gives them out; the compiler makes the two one
(`compiler/share.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ..core.errors import InternalError, ShapeError, UserError
from ..ir.block import Block, argument, pure_block
from ..ir.node import Node, Op, topological
from ..ir.types import Tuple
from . import attention, build, ops, transpose
from .attention_types import WANTED, sizes
from .partial import CONSTANT, PARTIAL, carries_derivative, outputs_of, zeros

Cotangent = Any  # a Node, or for a tuple a list with a Node or None for each item
Rule = Callable[[Node, Cotangent, tuple[bool, ...]], Sequence[Cotangent]]


def no_derivative(node: Node, g: Cotangent, wanted: tuple[bool, ...]) -> Sequence[Cotangent]:
    """Marks an op through which no derivative flows."""
    return [None] * len(node.inputs)


def _sent_back(node: Node, g: Node) -> Node:
    """The cotangent of a value that came from another Device goes there."""
    return build.transfer(g, node.attrs["device"], node.attrs["source"])


def _elementwise(op: Op) -> Rule:
    partials = PARTIAL[op]

    def rule(node: Node, g: Node, wanted: tuple[bool, ...]) -> Sequence[Cotangent]:
        return [p(node, g) if w and p is not None else None for p, w in zip(partials, wanted)]

    return rule


def _get(node: Node, g: Node, wanted: tuple[bool, ...]) -> Sequence[Cotangent]:
    items: list[Node | None] = [None] * len(node.inputs[0].type.items)  # type: ignore[union-attr]
    items[node.attrs["index"]] = g
    return [items]


# ---- control --------------------------------------------------------------------------------


def live_carries(block: Block, count: int, wanted: Sequence[bool]) -> list[bool]:
    """Which arguments have derivatives: the wanted ones, and carries they flow into."""
    live = list(wanted)
    changed = True
    while changed:
        changed = False
        active = active_nodes(block.results, [a for a, on in zip(block.arguments, live) if on])
        for i in range(count):
            if not live[i] and block.results[i] in active:
                live[i] = changed = True
    return live


def _scan(node: Node, g: list[Node | None], wanted: tuple[bool, ...]) -> Sequence[Cotangent]:
    """Step by step backwards; shared values' cotangents add up in carries."""
    block = build.fresh_block(node.blocks[0])
    count, arguments = node.attrs["carries"], block.arguments
    sliced = ops.scan_slices(node)
    live = live_carries(block, count, wanted)
    arriving: list[Node | None] = []
    for i, result in enumerate(block.results):
        flows = live[i] if i < count else g[i] is not None
        arriving.append(argument(f"cotangent{i}", result.type) if flows else None)
    on = [i for i, flag in enumerate(live) if flag]
    found = gradients(block.results, arriving, [arguments[i] for i in on])
    parts = dict(zip(on, found))
    body = _ReverseBody(node, g, count, sliced, block, arriving)
    for i, part in parts.items():
        body.add(i, part, wanted[i])
    return body.finish()


class _ReverseBody:
    """Collects what one backward step takes and gives, then makes the reverse scan."""

    def __init__(
        self,
        node: Node,
        g: list[Node | None],
        count: int,
        sliced: int,
        block: Block,
        arriving: list[Node | None],
    ) -> None:
        self.node, self.g, self.count, self.block = node, g, count, block
        self.arriving, self.last_slice = arriving, count + sliced
        self.carries: list[tuple[int, Node, Node, Node]] = []  # input, argument, first, result
        self.outputs: list[tuple[int, Node]] = []
        self.given: set[int] = set()

    def add(self, index: int, part: Node | None, wanted: bool) -> None:
        """The cotangent of one argument of the step."""
        type_ = self.block.arguments[index].type
        arrived = self.arriving[index] if index < self.count else None
        if arrived is not None:
            first = self.g[index]
            start = zeros(type_) if first is None else first
            self.carries.append((index, arrived, start, zeros(type_) if part is None else part))
        elif part is None or not wanted:
            return
        elif index < self.last_slice:
            self.outputs.append((index, part))
        else:
            total = argument(f"total{index}", type_)
            self.carries.append((index, total, zeros(type_), ops.add(total, part)))
        if wanted:
            self.given.add(index)

    def finish(self) -> list[Node | None]:
        """The reverse scan's items, as cotangents of the forward scan's inputs."""
        node, count = self.node, self.count
        results = tuple([c[3] for c in self.carries] + [o[1] for o in self.outputs])
        used = set(topological(results))
        arguments = self.block.arguments
        needed = [i for i, a in enumerate(arguments) if a in used]
        entering = [i for i in needed if i < count]
        slices = dict(zip((arguments[i] for i in entering), _entering(node, entering)))
        steps = [i for i in needed if count <= i < self.last_slice]
        slices.update({arguments[i]: node.inputs[i] for i in steps})
        for ct, value in zip(self.arriving[count:], self.g[count:]):
            if ct is not None and value is not None and ct in used:
                slices[ct] = value
        shared = {arguments[i]: node.inputs[i] for i in needed if i >= self.last_slice}
        block = pure_block("backward", (*(c[1] for c in self.carries), *slices, *shared), results)
        reverse = ops.scan(
            *(c[2] for c in self.carries),
            *slices.values(),
            *shared.values(),
            blocks=(block,),
            carries=len(self.carries),
            length=node.attrs["length"],
            reverse=not node.attrs["reverse"],
        )
        order = [c[0] for c in self.carries] + [o[0] for o in self.outputs]
        items = dict(zip(order, build.items(reverse)))
        return [items.get(i) if i in self.given else None for i in range(len(node.inputs))]


def _entering(node: Node, indices: list[int]) -> list[Node]:
    """The carries that enter each step of a scan, stacked."""
    if not indices:
        return []
    block = build.fresh_block(node.blocks[0])
    results = block.results + tuple(block.arguments[i] for i in indices)
    longer = pure_block(block.name, block.arguments, results)
    saved = node.with_inputs(node.inputs, (longer,))
    return build.items(saved)[-len(indices) :]


def _cond(node: Node, g: list[Node | None], wanted: tuple[bool, ...]) -> Sequence[Cotangent]:
    """The derivative of the branch that was taken."""
    arriving = [c for c in g if c is not None]
    blocks, found = [], []
    for old in node.blocks:
        block = build.fresh_block(old)
        extra = [argument(f"cotangent{i}", c.type) for i, c in enumerate(arriving)]
        rest = iter(extra)
        cotangents = [None if c is None else next(rest) for c in g]
        wrt = [a for a, on in zip(block.arguments, wanted[1:]) if on]
        blocks.append((block.name, block.arguments + tuple(extra)))
        found.append(gradients(block.results, cotangents, wrt))
    kept = [i for i, pair in enumerate(zip(*found)) if any(p is not None for p in pair)]
    wanted_inputs = [i for i, on in enumerate(wanted) if on]
    made = []
    for (name, arguments), parts in zip(blocks, found):
        types = [node.inputs[wanted_inputs[i]].type for i in kept]
        results = [zeros(t) if parts[i] is None else parts[i] for i, t in zip(kept, types)]
        made.append(pure_block(name, arguments, tuple(results)))  # type: ignore[arg-type]
    answer: list[Node | None] = [None] * len(node.inputs)
    if kept:
        items = build.items(ops.cond(*node.inputs, *arriving, blocks=tuple(made)))
        for i, item in zip(kept, items):
            answer[wanted_inputs[i]] = item
    return answer


def _while_loop(node: Node, g: Cotangent, wanted: tuple[bool, ...]) -> Sequence[Cotangent]:
    raise UserError(
        "a loop of unknown length has no reverse derivative",
        op="while_loop",
        hint="use scan with a fixed length, or forward mode (jvp)",
        location=node.location,
    )


def _call(node: Node, g: Cotangent, wanted: tuple[bool, ...]) -> Sequence[Cotangent]:
    callee = node.attrs["callee"]
    if getattr(callee, "vjp", None) is None:
        raise UserError(
            f"the kernel {callee.name} has no reverse derivative",
            op="call",
            hint="give it a vjp, or wrap the call in custom_vjp",
            location=node.location,
        )
    outputs = outputs_of(node)
    return _padded(node, callee.vjp(list(node.inputs), outputs, filled(outputs, g)))


def refused(node: Node, g: Cotangent, wanted: tuple[bool, ...]) -> Sequence[Cotangent]:
    """Marks an op of inference alone: a derivative through it is the user's mistake."""
    raise UserError(
        f"{node.op.name} has no reverse derivative",
        op=node.op.name,
        hint="it is for inference alone",
        location=node.location,
    )


def _custom(node: Node, g: Cotangent, wanted: tuple[bool, ...]) -> Sequence[Cotangent]:
    """rules.vjp; without it, the transpose of rules.jvp; without both, of the Block."""
    rules, outputs = node.attrs["rules"], outputs_of(node)
    if getattr(rules, "vjp", None) is not None:
        return _padded(node, rules.vjp(list(node.inputs), outputs, filled(outputs, g)))
    wrt = [x for x, on in zip(node.inputs, wanted) if on]
    if getattr(rules, "jvp", None) is None:
        return _through(node, g, wanted, lambda copies: build.inline(node.blocks[0], copies))
    moved = [argument(f"tangent{i}", x.type) for i, x in enumerate(wrt)]
    rest = iter(moved)
    tangents = [next(rest) if on else zeros_or_none(x) for x, on in zip(node.inputs, wanted)]
    given = g if isinstance(g, list) else [g]
    pairs = zip(rules.jvp(list(node.inputs), outputs, tangents), given)
    known = [(t, c) for t, c in pairs if t is not None]
    found = iter(gradients([t for t, _ in known], [c for _, c in known], moved))
    return [next(found) if on else None for on in wanted]


def _through(
    node: Node,
    g: Cotangent,
    wanted: tuple[bool, ...],
    results: Callable[[list[Node]], Sequence[Node]],
) -> list[Node | None]:
    """The cotangents of inputs through what the Node is made of: results(inputs)."""
    copies = [argument(f"input{i}", x.type) for i, x in enumerate(node.inputs)]
    parts = gradients(results(copies), g, [a for a, on in zip(copies, wanted) if on])
    found = iter(_placed(parts, copies, node.inputs))
    return [next(found) if on else None for on in wanted]


def _placed(
    parts: Sequence[Node | None], old: Sequence[Node], new: Sequence[Node]
) -> list[Node | None]:
    """The parts with values in place of arguments."""
    known = [p for p in parts if p is not None]
    block = pure_block("custom", tuple(old), tuple(known))
    done = iter(build.inline(block, new))
    return [None if p is None else next(done) for p in parts]


def zeros_or_none(x: Node) -> Node | None:
    """Zeros for a float array, None for what has no derivative."""
    return zeros(x.type) if carries_derivative(x.type) else None


def filled(outputs: Sequence[Node], g: Cotangent) -> list[Node]:
    """Cotangents with zeros where there are none."""
    found = g if isinstance(g, list) else [g]
    return [zeros(o.type) if c is None else c for o, c in zip(outputs, found)]


def _padded(node: Node, found: Sequence[Node | None]) -> list[Node | None]:
    return [*found, *[None] * (len(node.inputs) - len(found))]


# ---- attention ------------------------------------------------------------------------------


def _attention(node: Node, g: list[Node | None], wanted: tuple[bool, ...]) -> Sequence[Cotangent]:
    """attention_backward with the kept lse; a cotangent of lse enters through delta."""
    out, lse = outputs_of(node)
    attrs = dict(node.attrs)
    order = attrs["orders"][3]
    dout = zeros(out.type) if g[0] is None else g[0]
    parts = (build.cast(attention.heads_first(x, order), lse.dtype) for x in (dout, out))
    delta = build.sum_(ops.multiply(*parts), 3)
    if g[1] is not None:
        delta = ops.subtract(delta, g[1])
    delta = build.where(build.equal(lse, -math.inf), 0.0, delta)  # it sees nothing
    asked = {name for name, on in zip(attrs["extras"], wanted[3:]) if on}
    attrs["wanted"] = tuple(name for name in WANTED if name in asked)
    inputs = (*node.inputs[:3], dout, lse, delta, *node.inputs[3:])
    found = build.items(ops.attention_backward.make(inputs, attrs, location=node.location))
    of = dict(zip(attrs["wanted"], found[3:]))
    if g[1] is None and "sinks" not in attrs["extras"] and of_one_key(node):
        of = {name: zeros(x.type) for name, x in of.items()}  # its weight is 1 whatever its score
        found = [*(zeros(x.type) for x in node.inputs[:2]), found[2]]
    return [*found[:3], *(of.get(name) for name in attrs["extras"])]


def of_one_key(node: Node) -> bool:
    """Whether an attention has one key."""
    return sizes(node.inputs, node.attrs["orders"]).keys == 1


def _attention_backward(
    node: Node, g: list[Node | None], wanted: tuple[bool, ...]
) -> Sequence[Cotangent]:
    def results(copies: list[Node]) -> Sequence[Node]:
        return attention.decompose(node.with_inputs(tuple(copies)))

    return _through(node, g, wanted, results)


# ---- the table ------------------------------------------------------------------------------

VJP: dict[Op, Rule] = {
    **{op: no_derivative for op in CONSTANT},
    **{op: _elementwise(op) for op in PARTIAL},
    ops.reshape: transpose.reshape,
    ops.permute: transpose.permute,
    ops.expand: transpose.expand,
    ops.pad: transpose.pad,
    ops.slice_: transpose.slice_,
    ops.flip: transpose.flip,
    ops.windows: transpose.windows,
    ops.concatenate: transpose.concatenate,
    ops.sum_: transpose.sum_,
    ops.prod: transpose.prod,
    ops.max_: transpose.extreme,
    ops.min_: transpose.extreme,
    ops.cumulative: transpose.cumulative,
    ops.sort: transpose.sort,
    ops.dot: transpose.dot,
    ops.grouped_dot: transpose.grouped_dot,
    ops.grouped_outer: transpose.grouped_outer,
    ops.attention: _attention,
    ops.attention_backward: _attention_backward,
    ops.paged_append: refused,
    ops.paged_attention: refused,
    ops.add_listed: refused,
    ops.picked_dot: refused,
    ops.sparse_dot: refused,
    ops.block_dot: refused,
    ops.route: refused,
    ops.gather: transpose.gather,
    ops.update: transpose.update,
    ops.get: _get,
    ops.transfer: lambda node, g, wanted: [_sent_back(node, g)],
    ops.barrier: lambda node, g, wanted: [g, *[None] * (len(node.inputs) - 1)],
    ops.scan: _scan,
    ops.cond: _cond,
    ops.while_loop: _while_loop,
    ops.call: _call,
    ops.custom: _custom,
}

# ---- the walk -------------------------------------------------------------------------------


def _has_derivative(node: Node) -> bool:
    if isinstance(node.type, Tuple):
        return any(carries_derivative(t) for t in node.type.items)
    return carries_derivative(node.type)


def active_nodes(
    outputs: Sequence[Node], wrt: Sequence[Node], stop: Collection[Node] = ()
) -> dict[Node, None]:
    """Nodes on a differentiable path from `wrt` to the outputs, inputs first."""
    starts = set(wrt)
    active: dict[Node, None] = {}
    for node in topological(outputs, stop=(lambda n: n in stop) if stop else None):
        flows = node not in stop and VJP.get(node.op, no_derivative) is not no_derivative
        reached = flows and any(i in active for i in node.inputs)
        if (node in starts or reached) and _has_derivative(node):
            active[node] = None
    return active


def _accumulate(pending: dict[Node, Cotangent], node: Node, value: Cotangent) -> None:
    if isinstance(node.type, Tuple):
        old = pending.get(node) or [None] * len(value)
        pending[node] = [b if a is None else _sum(a, b) for a, b in zip(old, value)]
    elif value.type != node.type:
        raise InternalError("grad", f"the cotangent {value!r} does not fit {node!r}")
    else:
        pending[node] = _sum(pending[node], value) if node in pending else value


def _sum(a: Node, b: Node | None) -> Node:
    return a if b is None else ops.add(a, b)


def gradients(
    outputs: Sequence[Node],
    cotangents: Sequence[Node | None],
    wrt: Sequence[Node],
    stop: Collection[Node] = (),
    changed: Callable[[Node, Node], Node] | None = None,
) -> list[Node | None]:
    """The cotangent of each of `wrt`; None where the outputs do not depend on it.

    Nothing flows through a Node in `stop` to its inputs. `changed` may give another cotangent for
    a Node, once that Node's is whole.
    """
    active = active_nodes(outputs, wrt, stop)
    pending: dict[Node, Cotangent] = {}
    for output, cotangent in zip(outputs, cotangents):
        if cotangent is None:
            continue
        if cotangent.type != output.type:
            raise ShapeError(
                "a cotangent does not fit its output",
                op="grad",
                expected=output.type,
                got=cotangent.type,
            )
        if output in active:
            _accumulate(pending, output, cotangent)
    for node in reversed(active):
        g = pending.get(node)
        if changed is not None and isinstance(g, Node):
            g = pending[node] = changed(node, g)
        wanted = tuple([i in active for i in node.inputs])
        if g is None or node in stop or not any(wanted):
            continue
        for source, on, part in zip(node.inputs, wanted, VJP[node.op](node, g, wanted)):
            if on and part is not None:
                _accumulate(pending, source, part)
    return [pending.get(x) for x in wrt]

"""Strength reduction that changes the kind of work: scatters into selects, divisions into
products.

These Rules run late, when derivatives are done: they trade one form for another that fuses
better. Invariant: values are the same, except that a quotient of an exponential by a repeated
value may differ in the last place.
"""

from __future__ import annotations

from ..ir.node import Node
from ..ir.pattern import Match, Rule, RuleSet, any_, of
from . import build, ops


def _reciprocal(m: Match) -> Node:
    """exp(x) / y repeated -> exp(x) * (1 / y) repeated: one division a row."""
    inverse = build.expand(ops.reciprocal(m.y), m.repeated.shape)
    return ops.multiply(m.e, inverse)


def own_axis(node: Node) -> int | None:
    """The axis along which a Node counts 0, 1, 2, ..., if that is all it does."""
    shape = node.shape
    if node.op is ops.cast:
        return own_axis(node.inputs[0])
    if node.op is ops.expand:
        node = node.inputs[0]
    inner = node
    if node.op is ops.reshape:
        inner = node.inputs[0]
    if inner.op is not ops.iota:
        return None
    axes = [i for i, s in enumerate(node.shape) if s != 1]
    if len(axes) != 1 or node.shape[axes[0]] != shape[axes[0]]:
        return None
    return axes[0]


def _select(m: Match) -> Node | None:
    """update(zeros, v, (iota rows, c)) where every row is hit once -> where(iota == c, v, 0)."""
    node = m.root
    state, value, *indices = node.inputs
    axes = node.attrs["axes"]
    if node.attrs["mode"] not in ("add", "set") or len(axes) != len(state.shape):
        return None
    if ops.constant_value(state) not in (0, 0.0):
        return None
    shape = indices[0].shape
    rows = {a: own_axis(i) for a, i in zip(axes, indices)}
    free = [a for a in axes if rows[a] is None and state.shape[a] != 1]
    if len(free) != 1:
        return None
    for a, axis in rows.items():
        if axis is not None and shape[axis] != state.shape[a]:
            return None
    owned = [axis for axis in rows.values() if axis is not None]
    live = [i for i, s in enumerate(shape) if s != 1]
    if sorted(owned) != live:
        return None
    order = [rows[a] for a in sorted(axes) if rows[a] is not None]
    lined = [
        (n if n.shape == shape else build.broadcast_to(n, shape))
        for n in (indices[axes.index(free[0])], value)
    ]
    sizes = tuple(state.shape[a] if rows[a] is not None else 1 for a in range(len(state.shape)))
    moved = []
    for n in lined:
        squeezed = build.reshape(n, tuple(shape[i] for i in live))
        permuted = build.permute(squeezed, [live.index(i) for i in order])  # type: ignore[arg-type]
        moved.append(build.broadcast_to(build.reshape(permuted, sizes), state.shape))
    positions = build.iota_along(state.shape, free[0], moved[0].dtype)
    zero = build.constant(0, state.dtype)
    return build.where(ops.equal(positions, moved[0]), moved[1], zero)


STRENGTH = RuleSet(
    "strength",
    [
        Rule(
            "exp_over_repeated",
            of(
                ops.divide,
                of(ops.exp, any_("x"), name="e"),
                of(ops.expand, any_("y"), name="repeated"),
            ),
            _reciprocal,
        ),
        Rule("update_one_place", ops.update, _select),
    ],
)

"""Examples of every differentiable op, shared by the tests of grad, forward and batch.

A Case is a function of Nodes and inputs at which it is smooth; float64 inputs are
differentiable, others are given as they are. Invariant: inputs depend only on the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tilegrad.core import dtype as dtypes
from tilegrad.graph import build, ops
from tilegrad.graph.interpret import interpret
from tilegrad.ir.block import pure_block
from tilegrad.ir.node import Node, Op
from tilegrad.ir.verify import verify

Function = Callable[..., "Node | Sequence[Node]"]


@dataclass
class Case:
    """One example of an op."""

    op: Op
    name: str
    function: Function
    inputs: list[np.ndarray]

    def __repr__(self) -> str:
        return f"{self.op.name}-{self.name}"

    def outputs(self, nodes: Sequence[Node]) -> list[Node]:
        """The results on these Nodes."""
        found = self.function(*nodes)
        return [found] if isinstance(found, Node) else list(found)

    def nodes(self) -> list[Node]:
        """Fresh inputs."""
        return [build.input_(x.shape, dtypes.BY_NUMPY[x.dtype]) for x in self.inputs]

    def floats(self, things: Sequence) -> list:
        """Those that belong to differentiable inputs."""
        return [t for t, x in zip(things, self.inputs) if x.dtype == np.float64]


def evaluate(results: Sequence[Node], given: Mapping[Node, np.ndarray]) -> list[np.ndarray]:
    """The results, verified first."""
    verify(pure_block("test", (), tuple(results)), "graph")
    return interpret(list(results), given)


STEP = 1e-5


def pieces(case: Case) -> tuple:
    """Nodes, outputs, cotangent inputs, values for all of them, and tangents."""
    nodes = case.nodes()
    outputs = case.outputs(nodes)
    rng = seeded(repr(case))
    seeds = [build.input_(o.shape, o.dtype) for o in outputs]
    given = dict(zip(nodes, case.inputs))
    given.update({s: np.asarray(rng.standard_normal(s.shape)) for s in seeds})
    tangents = [np.asarray(rng.standard_normal(x.shape)) for x in case.floats(case.inputs)]
    return nodes, outputs, seeds, given, tangents


def slope(results: Sequence[Node], given: dict, wrt: Sequence[Node], tangents: Sequence) -> list:
    """Central differences of the results along the tangents."""
    ends = []
    for sign in (1, -1):
        moved = {x: given[x] + sign * STEP * t for x, t in zip(wrt, tangents)}
        ends.append(interpret(list(results), {**given, **moved}))
    return [(a - b) / (2 * STEP) for a, b in zip(*ends)]


def inner(xs: Sequence[np.ndarray], ys: Sequence[np.ndarray]) -> float:
    """The inner product of two lists of arrays."""
    return sum(float(np.sum(x * y)) for x, y in zip(xs, ys))


def or_zeros(found: Sequence[Node | None], wrt: Sequence[Node]) -> list[Node]:
    """Derivatives with zeros where there are none."""
    return [build.like(x, 0) if f is None else f for f, x in zip(found, wrt)]


CASES: list[Case] = []


def seeded(name: str) -> np.random.Generator:
    """Numbers that depend on the name only."""
    return np.random.default_rng(sum(map(ord, name)) * 7919)


def case(op: Op, name: str, function: Function, *inputs: np.ndarray) -> None:
    """Add a Case."""
    CASES.append(Case(op, name, function, [np.asarray(i) for i in inputs]))


def normal(name: str, *shape: int) -> np.ndarray:
    """Normal numbers away from 0 and from each other's ties."""
    x = seeded(name).standard_normal(shape)
    return np.asarray(np.where(x < 0, x - 0.2, x + 0.2))


def within(name: str, low: float, high: float, *shape: int) -> np.ndarray:
    """Uniform numbers."""
    return np.asarray(seeded(name).uniform(low, high, shape))


# ---- elementwise ----------------------------------------------------------------------------

DOMAINS: dict[Op, tuple[float, float]] = {
    ops.square_root: (0.3, 2),
    ops.log: (0.3, 2),
    ops.log2: (0.3, 2),
    ops.log10: (0.3, 2),
    ops.log1p: (-0.5, 2),
    ops.asin: (-0.8, 0.8),
    ops.acos: (-0.8, 0.8),
    ops.erf_inverse: (-0.8, 0.8),
    ops.reciprocal: (0.4, 2),
    ops.tan: (-1, 1),
    ops.acosh: (1.3, 3),
    ops.atanh: (-0.8, 0.8),
    ops.logit: (0.1, 0.9),
}
UNARY = (
    ops.negative, ops.reciprocal, ops.absolute, ops.square_root, ops.exp, ops.log, ops.exp2,
    ops.log2, ops.log10, ops.expm1, ops.log1p, ops.sin, ops.cos, ops.tan, ops.asin, ops.acos,
    ops.atan, ops.sinh, ops.cosh, ops.tanh, ops.erf, ops.erfc, ops.erf_inverse, ops.sigmoid,
    ops.asinh, ops.acosh, ops.atanh, ops.logit,
)  # fmt: skip
for op in UNARY:
    for shape in ((3, 2), (), (0, 2)):
        x = normal(op.name, *shape)
        if op in DOMAINS:
            x = within(op.name, *DOMAINS[op], *shape)
        case(op, f"{shape}", op, x)
for op in (ops.add, ops.subtract, ops.multiply, ops.divide, ops.maximum, ops.minimum, ops.atan2):
    case(op, "plain", op, normal(op.name, 3, 2), normal(op.name + "b", 3, 2))
    case(op, "same", lambda x, op=op: op(x, build.multiply(x, 0.7)), normal(op.name, 3))
    case(op, "scalar", op, normal(op.name), normal(op.name + "b"))
case(ops.multiply, "square", lambda x: ops.multiply(x, x), normal("square", 4))
case(ops.remainder, "plain", ops.remainder, normal("rem", 5) * 3, within("remb", 0.9, 1.3, 5))
case(ops.fmod, "plain", ops.fmod, normal("rem", 5) * 3, within("remb", 0.9, 1.3, 5))
case(ops.power, "plain", ops.power, within("pow", 0.3, 2, 4), normal("powb", 4))
for exponent in (0.0, 1.0, 2.0, 3.0, -1.5):
    case(
        ops.power,
        f"x**{exponent}",
        lambda x, e=exponent: ops.power(x, build.like(x, e)),
        within("pow", 0.3, 2, 3),
    )
case(ops.power, "2**x", lambda x: ops.power(build.like(x, 2.0), x), normal("powx", 3))
MASK = np.array([True, False, True])
case(ops.where, "plain", ops.where, MASK, normal("wa", 3), normal("wb", 3))
case(
    ops.cast,
    "twice",
    lambda x: ops.cast(ops.cast(x, dtype=dtypes.float64), dtype=dtypes.float64),
    normal("cast", 3),
)
case(
    ops.transfer,
    "there and back",
    lambda x: ops.multiply(
        ops.transfer(ops.transfer(x, source="a", device="b"), source="b", device="a"), x
    ),
    normal("transfer", 3),
)
case(
    ops.barrier,
    "token",
    lambda x, t: ops.multiply(ops.barrier(x, t), x),
    normal("barrier", 3),
    normal("token", 2),
)

# ---- movement -------------------------------------------------------------------------------

A23 = normal("a23", 2, 3)
A234 = normal("a234", 2, 3, 4)
case(ops.reshape, "plain", lambda x: build.reshape(x, (3, 2)), A23)
case(ops.permute, "plain", lambda x: build.permute(x, (2, 0, 1)), A234)
case(ops.expand, "plain", lambda x: build.expand(x, (2, 5, 3)), normal("e", 2, 1, 3))
case(ops.expand, "scalar", lambda x: build.broadcast_to(x, (2, 3)), normal("e"))
case(ops.pad, "plain", lambda x: build.pad(x, (1, 0), (0, 2)), A23)
case(ops.slice_, "plain", lambda x: build.slice_(x, (0, 1, 1), (2, 2, 4)), A234)
case(ops.slice_, "step", lambda x: build.slice_(x, (0, 1), (5, 7), (2, 3)), normal("s", 6, 8))
case(ops.slice_, "end", lambda x: build.slice_(x, (1,), (7,), (3,)), normal("s", 7))
case(ops.slice_, "empty", lambda x: build.slice_(x, (1,), (1,), (3,)), normal("s", 7))
case(ops.flip, "plain", lambda x: build.flip(x, (0, 2)), A234)
for width, step, dilation in (
    (3, 1, 1),
    (2, 3, 1),
    (2, 2, 1),
    (3, 2, 1),
    (2, 1, 3),
    (3, 3, 2),
    (1, 2, 1),
    (17, 1, 1),
    (18, 2, 1),
    (17, 1, 2),
):
    case(
        ops.windows,
        f"{width}-{step}-{dilation}",
        lambda x, w=width, s=step, d=dilation: build.windows(x, 1, w, s, d),
        normal("w", 2, 36 if width > 16 else 8, 2),
    )
case(ops.concatenate, "plain", lambda a, b: build.concatenate([a, b, a], 1), A23, normal("c", 2, 1))

# ---- reductions, scans, dot -----------------------------------------------------------------

for op in (ops.sum_, ops.prod, ops.max_, ops.min_):
    case(op, "some", lambda x, op=op: op(x, axes=(0, 2)), A234)
    case(op, "all", lambda x, op=op: op(x, axes=(0, 1)), A23)
case(ops.sum_, "none", lambda x: ops.sum_(x, axes=(1,)), np.zeros((2, 0)))
case(ops.prod, "none", lambda x: ops.prod(x, axes=(1,)), np.zeros((2, 0)))
case(
    ops.prod,
    "zeros",
    lambda x: ops.prod(x, axes=(1,)),
    np.array([[0.0, 2, 3], [0, 0, 2], [1, 2, 3]]),
)
for kind in ("sum", "prod", "max", "min"):
    case(ops.cumulative, kind, lambda x, k=kind: ops.cumulative(x, axis=1, kind=k), A234)
    case(
        ops.cumulative,
        kind + "-one",
        lambda x, k=kind: ops.cumulative(x, axis=0, kind=k),
        normal("cum", 1),
    )
case(
    ops.cumulative,
    "prod-zeros",
    lambda x: ops.cumulative(x, axis=0, kind="prod"),
    np.array([2.0, 0, 3, 0, 4]),
)
for descending in (False, True):
    case(
        ops.sort,
        f"{descending}",
        lambda x, d=descending: ops.get(ops.sort(x, axis=1, descending=d), index=0),
        A234,
    )
case(ops.dot, "matmul", build.matmul, A23, normal("d", 3, 4))
case(
    ops.dot,
    "batch",
    lambda a, b: build.dot(a, b, ((1,), (0,)), ((2,), (2,))),
    A234,
    normal("d", 3, 2, 4),
)
case(
    ops.dot,
    "cross",
    lambda a, b: build.dot(a, b, ((0,), (3,)), ((3, 1), (0, 2))),
    normal("da", 2, 3, 2, 4),
    normal("db", 4, 5, 3, 2),
)
case(
    ops.dot,
    "outer",
    lambda a, b: build.dot(a, b, ((), ()), ((), ())),
    normal("o", 2),
    normal("p", 3),
)
case(ops.dot, "empty", build.matmul, np.zeros((2, 0)), np.zeros((0, 3)))
OFFSETS = np.array([0, 2, 2, 5], np.int32)
for _axis, _shape in ((2, (3, 4, 3)), (1, (3, 3, 4))):
    case(
        ops.grouped_dot,
        f"axis{_axis}",
        lambda x, w, o, axis=_axis: ops.grouped_dot(x, w, o, axis=axis, block=0),
        normal("x", 5, 3),
        normal("w", *_shape),
        OFFSETS,
    )
case(ops.grouped_outer, "rows", ops.grouped_outer, normal("x", 5, 3), normal("y", 5, 4), OFFSETS)
case(ops.dot, "square", lambda a: build.matmul(a, a), normal("d", 3, 3))

# ---- attention ------------------------------------------------------------------------------

ATTRS = {
    "scale": 0.7,
    "band": (None, None),
    "softcap": 0.0,
    "dropout": 0.0,
    "extras": (),
    "orders": ("bhtd",) * 4,
}


def _attend(*inputs: Node, **attrs: object) -> list[Node]:
    return build.items(ops.attention(*inputs, **{**ATTRS, **attrs}))


def _attend_back(*inputs: Node, **attrs: object) -> list[Node]:
    return build.items(ops.attention_backward(*inputs, **{**ATTRS, "wanted": (), **attrs}))


def _starts(*steps: int) -> Node:
    """Starts of sequences of these lengths, as int32."""
    total = build.constant(0, dtypes.int32)
    found = [build.unsqueeze(total, 0)]
    for step in steps:
        total = build.add(total, build.constant(step, dtypes.int32))
        found.append(build.unsqueeze(total, 0))
    return build.concatenate(found, 0)


def _packed(function: Function, **attrs: object) -> Function:
    """The function with starts of sequences in front of its last inputs."""
    starts = ("query_starts", "key_starts")
    return lambda *inputs: function(
        *inputs, _starts(2, 0, 1), _starts(1, 1, 2), extras=starts, **attrs
    )


QKV = [normal("q", 2, 2, 3, 4), normal("k", 2, 1, 4, 4), normal("v", 2, 1, 4, 2)]
BTHD = {"orders": ("bthd", "bthd", "bhtd", "tbhd")}
MIXED = [normal("q", 2, 3, 2, 4), normal("k", 2, 4, 1, 4), normal("v", 2, 1, 4, 2)]
ADDED = [normal("bias", 1, 2, 3, 1), normal("slopes", 2), normal("sinks", 2)]
WHOLE = {"band": (-1, 2), "softcap": 3.0, "extras": ("bias", "slopes", "sinks"), **BTHD}
SEEN = np.array([True, True, False, True]).reshape(1, 1, 1, 4)
ROWS_OF = [normal("lse", 2, 2, 3) + 3.0, normal("delta", 2, 2, 3)]
ONE = [x[:1] for x in QKV]
case(ops.attention, "plain", _attend, *QKV)
case(ops.attention, "whole", lambda *xs: _attend(*xs, **WHOLE), *MIXED, *ADDED)
case(
    ops.attention,
    "seen",
    lambda *xs: _attend(*xs, extras=("mask", "key_lengths"))[0],
    *QKV,
    SEEN,
    np.array([4, 2], np.int32),
)
case(ops.attention, "packed", _packed(lambda *xs, **a: _attend(*xs, **a)[0], band=(None, 0)), *ONE)
case(ops.attention_backward, "plain", _attend_back, *QKV, normal("g", 2, 2, 3, 2), *ROWS_OF)
case(
    ops.attention_backward,
    "bias",
    lambda *xs: _attend_back(*xs, extras=("bias",), wanted=("bias",)),
    *QKV,
    normal("g", 2, 2, 3, 2),
    *ROWS_OF,
    ADDED[0],
)
case(
    ops.attention_backward,
    "whole",
    lambda *xs: _attend_back(*xs, **WHOLE, wanted=("bias", "slopes", "sinks")),
    *MIXED,
    normal("g", 3, 2, 2, 2),
    *ROWS_OF,
    *ADDED,
)
case(
    ops.attention_backward,
    "packed",
    _packed(_attend_back, band=(None, 0)),
    *ONE,
    normal("g", 1, 2, 3, 2),
    *(x[:1] for x in ROWS_OF),
)

# ---- indexing -------------------------------------------------------------------------------

ROWS = np.array([[0, 2], [2, 1]])
COLUMNS = np.array([[3, 0], [0, 3]])
case(ops.gather, "one", lambda x, i: build.gather(x, [i], (1,)), A234, ROWS)
case(ops.gather, "two", lambda x, i, j: build.gather(x, [j, i], (2, 1)), A234, ROWS, COLUMNS)
for mode in ("set", "add", "multiply", "max", "min"):
    case(
        ops.update,
        mode,
        lambda s, v, i, m=mode: build.update(s, v, [i], (1,), m),
        A234,
        normal("u", 3, 2, 4),
        np.array([2, 1, 2]),
    )
    case(
        ops.update,
        mode + "-two",
        lambda s, v, i, j, m=mode: build.update(s, v, [i, j], (0, 2), m),
        A234,
        normal("v", 4, 3),
        np.array([0, 1, -1, 0]),
        np.array([3, 3, 0, 4]),
    )
case(
    ops.update,
    "row",
    lambda s, v: build.update(s, v, [build.constant(1, dtypes.int64)], (0,)),
    A23,
    normal("r", 3),
)
case(
    ops.update,
    "iota",
    lambda s, v: build.update(s, v, [build.iota(2)], (1,)),
    A23,
    normal("r", 2, 2),
)

# ---- control --------------------------------------------------------------------------------


def cumulative_mix(c: Node, xs: Node, w: Node, reverse: bool = False) -> list[Node]:
    """A small recurrent network whose output also counts its steps."""

    def body(carries: list[Node], slices: list[Node]) -> tuple[list[Node], list[Node]]:
        new = ops.tanh(ops.add(ops.multiply(carries[0], w), slices[0]))
        count = build.add(carries[1], 1)
        scaled = ops.multiply(new, build.cast(build.broadcast_to(count, new.shape), new.dtype))
        return [new, count], [scaled, ops.multiply(slices[0], w)]

    start = [c, build.constant(1, dtypes.int64)]
    carries, outputs = build.scan(body, start, [xs], xs.shape[0], reverse)
    return [carries[0], *outputs]


def _late_carry(w: Node) -> list[Node]:
    """Only the shared value is differentiable; it flows into carries step by step."""

    def body(carries: list[Node], slices: list[Node]) -> tuple[list[Node], list[Node]]:
        a, b = carries
        return [ops.add(ops.multiply(b, w), a), ops.sin(ops.add(b, w))], [a]

    first = build.full((2,), 0.5, dtypes.float64)
    carries, outputs = build.scan(body, [first, first], [], 3)
    return [carries[0], outputs[0]]


def _nested(x: Node, w: Node) -> list[Node]:
    def inner(carries: list[Node], slices: list[Node]) -> tuple[list[Node], list[Node]]:
        return [ops.add(ops.multiply(carries[0], w), slices[0])], []

    def body(carries: list[Node], slices: list[Node]) -> tuple[list[Node], list[Node]]:
        zero = build.constant(0.3, dtypes.float64)
        (total,), _ = build.scan(inner, [ops.add(zero, carries[0])], [slices[0]], x.shape[1])
        return [ops.sin(total)], [total]

    carries, outputs = build.scan(body, [w], [x], x.shape[0])
    return [*carries, *outputs]


case(ops.scan, "forward", cumulative_mix, normal("s0", 2), normal("s1", 3, 2), normal("s2", 2))
case(
    ops.scan,
    "reverse",
    lambda *a: cumulative_mix(*a, reverse=True),
    normal("s0", 2),
    normal("s1", 3, 2),
    normal("s2", 2),
)
case(ops.scan, "none", cumulative_mix, normal("s0", 2), np.zeros((0, 2)), normal("s2", 2))
case(ops.scan, "late", _late_carry, normal("s3", 2))
case(ops.scan, "nested", _nested, normal("n", 2, 3), normal("n"))


def _branch(condition: Node, x: Node, y: Node) -> list[Node]:
    return build.cond(
        condition,
        lambda: [ops.multiply(x, y), ops.sin(x)],
        lambda: [ops.exp(y), build.like(x, 1.0)],
    )


for flag in (True, False):
    case(ops.cond, f"{flag}", _branch, np.array(flag), normal("ca", 2), normal("cb", 2))


class ScaleRules:
    """x * sin(y), with its derivatives by hand."""

    def vjp(self, inputs: list, outputs: list, cotangents: list) -> list:
        """Reverse."""
        (x, y), (g,) = inputs, cotangents
        return [ops.multiply(g, ops.sin(y)), ops.multiply(g, ops.multiply(x, ops.cos(y)))]

    def jvp(self, inputs: list, outputs: list, tangents: list) -> list:
        """Forward."""
        (x, y), (s, t) = inputs, tangents
        right = ops.multiply(t, ops.multiply(x, ops.cos(y)))
        return [ops.add(ops.multiply(s, ops.sin(y)), right)]


class ForwardOnly:
    """Only a forward rule: reverse mode transposes it."""

    jvp = ScaleRules.jvp


class NoRules:
    """Neither: the Block itself is differentiated."""


for rules in (ScaleRules(), ForwardOnly(), NoRules()):
    case(
        ops.custom,
        type(rules).__name__,
        lambda x, y, r=rules: build.custom(
            lambda a: [ops.multiply(a[0], ops.sin(a[1]))], [x, y], r
        ),
        normal("x", 3),
        normal("y", 3),
    )
case(
    ops.get,
    "plain",
    lambda x: ops.get(ops.sort(x, axis=0, descending=False), index=0),
    normal("g", 4),
)


def _doubling(x: Node, y: Node) -> list[Node]:
    """while the sum is below 20: x = 1.5 x + y."""
    return build.while_loop(
        lambda c: build.less(build.sum_(ops.absolute(c[0])), 20.0),
        lambda c: [ops.add(build.multiply(c[0], 1.5), ops.multiply(y, y)), build.add(c[1], 1)],
        [x, build.constant(0, dtypes.int64)],
    )[:1]


LOOPS = [Case(ops.while_loop, "doubling", _doubling, [normal("l", 2), normal("m", 2)])]

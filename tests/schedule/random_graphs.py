"""Random small Graphs: what the compiler is tested on against the interpreter.

Values stay small (floats are squashed, indices kept in range), so that tolerances mean
something. Invariant: a Graph depends only on its seed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tilegrad.core import dtype as dtypes
from tilegrad.graph import build, ops
from tilegrad.ir.node import Node

UNARY = (ops.negative, ops.absolute, ops.tanh, ops.sin, ops.erf, ops.exp, ops.sigmoid)
BINARY = (ops.add, ops.subtract, ops.multiply, ops.maximum, ops.minimum)
REDUCE = (ops.sum_, ops.max_, ops.min_, ops.prod)
FLOATS = (dtypes.float32, dtypes.float32, dtypes.float32, dtypes.float64)


class Maker:
    """Grows one Graph from a seed."""

    def __init__(self, seed: int, dtype: dtypes.DType | None = None) -> None:
        self.rng = np.random.default_rng(seed)
        self.dtype = dtype or FLOATS[self.rng.integers(len(FLOATS))]
        self.inputs: list[Node] = []
        self.arrays: list[np.ndarray] = []
        self.values: list[Node] = []
        self.nest = 0  # loops we are inside of

    # ---- choices --------------------------------------------------------------------------

    def pick(self, items: Any) -> Any:
        """One of them."""
        return items[int(self.rng.integers(len(items)))]

    def below(self, count: int) -> int:
        """A number in 0..count-1."""
        return int(self.rng.integers(count))

    def sizes(self, rank: int) -> tuple[int, ...]:
        """A small shape."""
        choices = (1, 2, 3, 4, 5, 7, 8, 16, 17, 33)
        shape = [self.pick(choices) for _ in range(rank)]
        while math.prod(shape) > 3000:
            shape[self.below(rank)] = self.pick((1, 2, 3))
        return tuple(shape)

    def value(self) -> Node:
        """A value made so far: newer ones are more likely."""
        recent = self.values[-4:]
        return self.pick(recent if self.rng.random() < 0.7 else self.values)

    def exact(self) -> Node:
        """A value without rounding, for ops that jump: an input, or any value of integers."""
        given = [v for v in self.inputs if v.dtype is self.dtype]
        return self.pick(given) if self.dtype.is_float else self.value()

    def input(self, shape: tuple[int, ...]) -> Node:
        """A new input."""
        node = build.input_(shape, self.dtype)
        array = self.rng.uniform(-1.5, 1.5, shape)
        if not self.dtype.is_float:
            array = self.rng.integers(-4, 5, shape)
        self.inputs.append(node)
        self.arrays.append(np.asarray(array).astype(self.dtype.numpy))
        return node

    def indices(self, shape: tuple[int, ...], size: int, slack: int = 0) -> Node:
        """An input of integers in 0..size-1 (or `slack` beyond either end)."""
        kind = self.pick((dtypes.int64, dtypes.int32))
        node = build.input_(shape, kind)
        self.inputs.append(node)
        found = self.rng.integers(-slack, size + slack, shape)
        self.arrays.append(np.asarray(found).astype(kind.numpy))
        return node

    def partner(self, x: Node) -> Node:
        """A value that broadcasts with x."""
        for v in reversed(self.values):
            if v is not x and v.shape == x.shape and self.rng.random() < 0.6:
                return v
        if self.rng.random() < 0.3:
            return build.constant(self.pick((-1, 0, 2, 3)), self.dtype)
        shape = tuple(s if self.rng.random() < 0.6 else 1 for s in x.shape)
        return self.input(shape[self.below(len(shape) + 1) if shape else 0 :])

    # ---- steps ----------------------------------------------------------------------------

    def squash(self, x: Node) -> Node:
        """Keep floats within a few units."""
        if not self.dtype.is_float or self.rng.random() < 0.5:
            return x
        return build.unary(ops.tanh, x)

    def step_unary(self) -> Node:
        op = self.pick(UNARY if self.dtype.is_float else (ops.negative, ops.absolute, ops.sign))
        x = self.value()
        return build.unary(op, build.unary(ops.tanh, x) if op is ops.exp else x)

    def step_binary(self) -> Node:
        x = self.value()
        return self.squash(build.binary(self.pick(BINARY), x, self.partner(x)))

    def step_where(self) -> Node:
        x = self.value()
        y = self.partner(x)
        return build.where(build.less(x, y), y, x)

    def step_permute(self) -> Node:
        x = self.value()
        return build.permute(x, [int(i) for i in self.rng.permutation(len(x.shape))])

    def step_reshape(self) -> Node:
        x = self.value()
        sizes: list[int] = []
        for s in x.shape:
            assert isinstance(s, int)
            cut = self.pick([d for d in range(1, s + 1) if s % d == 0] or [0])
            sizes += [s] if self.rng.random() < 0.5 or cut == 0 else [cut, s // cut]
        merged: list[int] = []
        for s in sizes:
            if merged and self.rng.random() < 0.4:
                merged[-1] *= s
            else:
                merged.append(s)
        return build.reshape(x, merged if len(merged) <= 5 else [math.prod(merged)])

    def step_pad(self) -> Node:
        x = self.value()
        low, high = ([self.below(3) for _ in x.shape] for _ in range(2))
        return build.pad(x, low, high)

    def step_slice(self) -> Node:
        x = self.value()
        start, stop, step = [], [], []
        for s in x.shape:
            a = self.below(max(1, s // 2))  # type: ignore[operator]
            start.append(a)
            stop.append(s - self.below(max(1, (s - a) // 2)))  # type: ignore[operator]
            step.append(self.pick((1, 1, 2, 3)))
        return build.slice_(x, start, stop, step)

    def step_flip(self) -> Node:
        x = self.value()
        return build.flip(x, [i for i in range(len(x.shape)) if self.rng.random() < 0.5])

    def step_expand(self) -> Node:
        x = build.unsqueeze(self.value(), 0)
        shape = tuple(
            self.pick((2, 3)) if s == 1 and self.rng.random() < 0.6 else s for s in x.shape
        )
        return build.expand(x, shape)

    def step_windows(self) -> Node:
        x = self.value()
        axes = [i for i, s in enumerate(x.shape) if s >= 4]  # type: ignore[operator]
        if not axes:
            return self.step_pad()
        step, dilation = self.pick((1, 2, 3)), self.pick((1, 1, 2))
        width = self.pick((2, 3)) if dilation == 1 else 2
        return build.windows(x, self.pick(axes), width, step, dilation)

    def step_concatenate(self) -> Node:
        x = self.value()
        if not x.shape:
            return self.step_unary()
        axis = self.below(len(x.shape))
        sizes = list(x.shape)
        sizes[axis] = self.pick((1, 2, 5))
        others = [x, self.input(tuple(sizes))]
        if self.rng.random() < 0.4:
            others.append(build.unary(ops.negative, x))
        return build.concatenate(others if self.rng.random() < 0.5 else others[::-1], axis)

    def step_reduce(self) -> Node:
        x = self.value()
        axes = [i for i in range(len(x.shape)) if self.rng.random() < 0.5]
        op = self.pick(REDUCE)
        if op is ops.prod and self.dtype.is_float:
            x = build.unary(ops.cos, x)
        found = build.reduce(op, x, axes, bool(self.below(2)))
        if self.dtype.is_float and op is ops.sum_ and self.rng.random() < 0.7:
            found = build.unary(ops.tanh, found)
        return found

    def step_argmax(self) -> Node:
        x = self.exact()
        if not x.shape:
            return self.step_unary()
        return build.cast(ops.argmax(x, axis=self.below(len(x.shape))), self.dtype)

    def step_cumulative(self) -> Node:
        x = self.value()
        if not x.shape:
            return self.step_unary()
        kind = self.pick(("sum", "max", "min", "sum"))
        return self.squash(ops.cumulative(x, axis=self.below(len(x.shape)), kind=kind))

    def step_softmax(self) -> Node:
        x = self.value()
        if not x.shape or not self.dtype.is_float:
            return self.step_binary()
        axis = self.below(len(x.shape))
        shifted = build.subtract(x, build.max_(x, axis, keep=True))
        e = build.unary(ops.exp, shifted)
        return build.divide(e, build.sum_(e, axis, keep=True))

    def step_dot(self) -> Node:
        x = self.value()
        if not x.shape:
            return self.step_unary()
        k = self.below(len(x.shape))
        rest = [i for i in range(len(x.shape)) if i != k]
        batch = rest[:1] if rest and self.rng.random() < 0.4 else []
        sizes = [*(x.shape[i] for i in batch), x.shape[k], self.pick((1, 2, 5, 16, 19))]
        order = [int(i) for i in self.rng.permutation(len(sizes))]
        y = self.input(tuple(sizes[i] for i in order))
        if self.rng.random() < 0.3:
            y = build.unary(ops.sin if self.dtype.is_float else ops.negative, y)
        where = [order.index(i) for i in range(len(sizes))]
        contract = ((k,), (where[len(batch)],))
        found = build.dot(x, y, (tuple(batch), tuple(where[: len(batch)])), contract, self.dtype)
        return self.squash(found)

    def step_gather(self) -> Node:
        x = self.value()
        if not x.shape or 0 in x.shape:
            return self.step_unary()
        count = 1 + self.below(min(2, len(x.shape)))
        axes = sorted(int(i) for i in self.rng.permutation(len(x.shape))[:count])
        shape = self.pick(((), (3,), (5,), (2, 3), (17,)))
        found = [self.indices(shape, x.shape[a]) for a in axes]  # type: ignore[arg-type]
        return build.gather(x, found, axes)

    def step_update(self) -> Node:
        x = self.value()
        if not x.shape or 0 in x.shape:
            return self.step_unary()
        count = 1 + self.below(min(2, len(x.shape)))
        axes = sorted(int(i) for i in self.rng.permutation(len(x.shape))[:count])
        shape = self.pick(((), (3,), (5,), (2, 3)))
        found = [self.indices(shape, x.shape[a], 2) for a in axes]  # type: ignore[arg-type]
        rest = tuple(s for i, s in enumerate(x.shape) if i not in axes)
        value = self.input(shape + rest)  # type: ignore[arg-type]
        return build.update(x, value, found, axes, self.pick(("set", "add", "max", "min")))

    def step_cast(self) -> Node:
        middle = self.pick((dtypes.int32, dtypes.bfloat16, dtypes.float16, dtypes.int8))
        x = self.value()
        if self.dtype.is_float:  # rounding jumps
            x = build.multiply(self.exact(), 3)
        return build.cast(build.cast(x, middle), self.dtype)

    def step_sort(self) -> Node:
        x = self.exact()
        if not x.shape:
            return self.step_unary()
        node = ops.sort(x, axis=self.below(len(x.shape)), descending=bool(self.below(2)))
        values, places = build.items(node)
        return values if self.rng.random() < 0.6 else build.cast(places, self.dtype)

    # ---- control --------------------------------------------------------------------------

    def inner(self, values: list[Node], like: Node) -> Node:
        """A few ops on some values inside a Block, shaped as `like`."""
        x = self.pick(values)
        for _ in range(1 + self.below(3)):
            y = self.pick([*values, build.constant(self.pick((1, 2)), self.dtype)])
            if self.rng.random() < 0.2:
                y = build.sum_(y)
            if self.rng.random() < 0.2:
                y = build.unary(ops.negative, y)
            x = self.squash(build.binary(self.pick(BINARY), x, y))
        if self.dtype.is_float:
            x = build.unary(ops.tanh, x)
        x = x if x.shape == like.shape else build.sum_(x)
        return build.broadcast_to(x, like.shape)

    def changed(self, carry: Node, values: list[Node]) -> Node:
        """What becomes of a carry in a step."""
        kind = self.rng.random()
        if kind < 0.15:
            return self.pick([v for v in values if v.shape == carry.shape])
        if kind < 0.35 and carry.shape and carry.shape[0]:
            row = build.sum_(carry, 0) if self.below(2) else build.max_(carry, 0)
            index = build.constant(self.below(carry.shape[0]), dtypes.int64)  # type: ignore[arg-type]
            return build.update(carry, row, [index], [0], self.pick(("set", "max")))
        return self.inner([v for v in values if v.shape in (carry.shape, ())], carry)

    def loop_values(self) -> list[Node]:
        """Carries of one shape, few elements."""
        x = self.value()
        if math.prod(x.shape) > 300:  # type: ignore[arg-type]
            x = self.input((3, 5))
        return [x, *(self.input(x.shape) for _ in range(self.below(3)))]  # type: ignore[arg-type]

    def step_scan(self) -> Node:
        carries, length = self.loop_values(), self.pick((0, 1, 2, 3, 5, 9, 12))
        slices = [self.input((length, *carries[0].shape)) for _ in range(self.below(3))]  # type: ignore[arg-type]
        shared = [v for v in self.values[-2:] if v.shape == carries[0].shape]

        def body(carried: list[Node], sliced: list[Node]) -> tuple[list[Node], list[Node]]:
            values = [*carried, *sliced, *shared]
            if self.nest < 2 and self.rng.random() < 0.25:
                values.append(self.inside(values, carried[0]))
            new = [self.changed(c, values) for c in carried]
            known = [*values, *new]
            outputs = [self.pick(known), self.inner(known, carried[0])][: self.below(3)]
            return new, outputs

        self.nest += 1
        last, stacked = build.scan(body, carries, slices, length, bool(self.below(2)))
        self.nest -= 1
        self.values += [v for v in [*last, *stacked] if math.prod(v.shape) < 5000]  # type: ignore[arg-type]
        return self.pick([*last, *stacked])

    def inside(self, values: list[Node], like: Node) -> Node:
        """Control within a Block."""
        values = [v for v in values if v.shape == like.shape]
        if self.below(2):
            test = build.less(build.sum_(self.pick(values)), build.constant(0, self.dtype))
            return build.cond(
                test, lambda: [self.inner(values, like)], lambda: [self.pick(values)]
            )[0]
        self.nest += 1
        last, _ = build.scan(
            lambda c, s: ([self.changed(c[0], [*c, *values])], []),
            [self.pick(values)],
            [],
            self.pick((1, 3, 10)),
        )
        self.nest -= 1
        return last[0]

    def step_cond(self) -> Node:
        x = self.value()
        values = [v for v in self.values if v.shape in (x.shape, ())][-4:]
        test = build.less(build.sum_(self.exact()), build.constant(self.below(3), self.dtype))
        made = build.cond(
            test,
            lambda: [self.inner(values, x), self.pick([x])],
            lambda: [self.pick([x]), self.inner(values, x)],
        )
        self.values.append(made[0])
        return made[1]

    def step_while(self) -> Node:
        carries, limit = self.loop_values(), self.below(12)
        shared = [v for v in self.values[-2:] if v.shape == carries[0].shape]
        start = build.constant(0, dtypes.int32)

        def body(carried: list[Node]) -> list[Node]:
            values = [*carried[1:], *shared]
            return [build.add(carried[0], 1), *(self.changed(c, values) for c in carried[1:])]

        found = build.while_loop(lambda c: build.less(c[0], limit), body, [start, *carries])
        self.values += found[2:]
        return found[1]


STEPS = (
    "unary",
    "binary",
    "binary",
    "binary",
    "where",
    "permute",
    "reshape",
    "pad",
    "slice",
    "flip",
    "expand",
    "windows",
    "concatenate",
    "reduce",
    "reduce",
    "reduce",
    "argmax",
    "cumulative",
    "softmax",
    "dot",
    "dot",
    "gather",
    "update",
    "cast",
)
CONTROL = (*STEPS, *("scan", "cond", "while", "sort") * 3)


def random_graph(
    seed: int,
    steps: int = 8,
    dtype: dtypes.DType | None = None,
    kinds: tuple[str, ...] = STEPS,
) -> tuple[list[Node], list[Node], list[np.ndarray]]:
    """(inputs, outputs, arrays) of a Graph of about `steps` steps."""
    m = Maker(seed, dtype)
    for _ in range(1 + m.below(2)):
        m.values.append(m.input(m.sizes(m.below(4))))
    while steps:
        found = getattr(m, "step_" + m.pick(kinds))()
        if len(found.shape) > 6 or math.prod(found.shape) > 20000:
            continue
        m.values.append(found)
        steps -= 1
    outputs = [m.values[-1]]
    outputs += [v for v in m.values[:-1] if m.rng.random() < 0.15 and v not in m.inputs]
    return m.inputs, list(dict.fromkeys(outputs)), m.arrays

"""Control inside the Graph: scan, cond, while_loop on nested containers of Tensors.

A body runs once, on arguments without values, and becomes a Block; what it captures is passed
in by the builder. Random numbers drawn in a body differ from step to step. Invariant: a body
has no effect but its result, and carries keep their nesting, shapes and dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from ..core import dtype as dtypes
from ..core.errors import DTypeError, ShapeError
from ..graph import build
from ..ir.node import Node
from ..ir.whole import whole
from .container import Structure, flatten
from .random import step_salt
from .tensor import mode, node_of, wrap
from .transforms import inside_transform, tracked

C = TypeVar("C")
Y = TypeVar("Y")


@contextmanager
def _salted(step: Node) -> Iterator[None]:
    before, mode.salt = mode.salt, step_salt(step)
    try:
        yield
    finally:
        mode.salt = before


def _nodes(value: Any, op: str) -> tuple[list[Node], Structure]:
    leaves, structure = flatten(value)
    for leaf in leaves:
        if isinstance(leaf, (str, bytes)) or callable(leaf):
            raise DTypeError(
                "carries and results are Tensors or numbers",
                op=op,
                expected="a nest of Tensors",
                got=type(leaf).__name__,
            )
    return [node_of(leaf) for leaf in leaves], structure


def _tensors(structure: Structure, nodes: Sequence[Node]) -> Any:
    made = [wrap(n) for n in nodes]
    for tensor in made:
        tensor._requires_grad = mode.grad_enabled and tensor.dtype.is_float
    return structure.unflatten(made)


def _same(op: str, what: str, expected: Structure, got: Structure) -> None:
    if expected.alike is not got.alike:
        raise ShapeError(
            f"{what} are arranged differently", op=op, expected=repr(expected), got=repr(got)
        )


def scan(
    body: Callable[[Any, Any], tuple[C, Y]],
    init: Any,
    xs: Any = None,
    length: Any = None,
    reverse: bool = False,
) -> tuple[C, Y]:
    """Run body(carry, x) -> (carry, y) over the first axis of xs: (last carry, stacked ys)."""
    carries, carry_structure = _nodes(init, "scan")
    slices, slice_structure = _nodes(xs, "scan")
    steps = _length(slices, length)
    counter = build.iota(steps, dtypes.uint32)
    output: list[Structure] = []

    def run(carried: list[Node], sliced: list[Node]) -> tuple[list[Node], list[Node]]:
        with inside_transform(record=False), _salted(sliced[-1]):
            result = body(
                _tensors(carry_structure, carried), _tensors(slice_structure, sliced[:-1])
            )
            if not isinstance(result, tuple) or len(result) != 2:
                raise DTypeError(
                    "the body returns (carry, y)",
                    op="scan",
                    expected="a pair",
                    got=type(result).__name__,
                )
            new, new_structure = _nodes(result[0], "scan")
            _same("scan", "the carries", carry_structure, new_structure)
            ys, y_structure = _nodes(result[1], "scan")
            output.append(y_structure)
        return _like(new, carried), ys

    last, stacked = build.scan(run, carries, [*slices, counter], steps, reverse)
    return (carry_structure.unflatten(tracked(last)), output[0].unflatten(tracked(stacked)))


def _like(new: Sequence[Node], old: Sequence[Node]) -> list[Node]:
    """Results in the dtype of the carries where only a Python number made them differ."""
    return [
        build.broadcast_to(build.cast(n, o.dtype), o.shape)
        if not n.shape and build.ops.is_constant(n)
        else n
        for n, o in zip(new, old)
    ]


def _length(slices: Sequence[Node], length: Any) -> Any:
    sizes = list(dict.fromkeys([s.shape[0] if s.shape else 0 for s in slices]))
    if length is not None:
        sizes = list(dict.fromkeys([*sizes, whole(length, "scan", "the length")]))
    if len(sizes) != 1:
        raise ShapeError(
            "the number of steps is not clear",
            op="scan",
            expected="xs with one first size, or length=",
            got=sizes,
        )
    return sizes[0]


def cond(condition: Any, then: Callable[..., C], otherwise: Callable[..., C], *operands: Any) -> C:
    """then(*operands) where the scalar condition holds, else otherwise(*operands)."""
    if isinstance(condition, bool):
        return then(*operands) if condition else otherwise(*operands)
    test = node_of(condition)
    if test.type.size != 1:  # type: ignore[union-attr]
        raise ShapeError(
            "the condition is not a scalar",
            op="cond",
            expected="one element",
            got=str(test.type),
            hint="use where() to choose by element",
        )
    test = build.cast(build.reshape(test, ()), dtypes.bool_)
    shapes: list[Structure] = []

    def branch(function: Callable[..., Any]) -> Callable[[], list[Node]]:
        def run() -> list[Node]:
            with inside_transform(record=False):
                nodes, structure = _nodes(function(*operands), "cond")
            shapes.append(structure)
            _same("cond", "the results of the branches", shapes[0], structure)
            return nodes

        return run

    found = build.cond(test, branch(then), branch(otherwise))
    return shapes[0].unflatten(tracked(found))


def while_loop(condition: Callable[[Any], Any], body: Callable[[Any], C], init: Any) -> C:
    """Run body(carry) -> carry while condition(carry) holds."""
    carries, structure = _nodes(init, "while_loop")
    step = build.constant(0, dtypes.uint32)

    def test(carried: list[Node]) -> Node:
        with inside_transform(record=False), _salted(carried[-1]):
            found = node_of(condition(_tensors(structure, carried[:-1])))
        return build.cast(build.reshape(found, ()), dtypes.bool_)

    def work(carried: list[Node]) -> list[Node]:
        with inside_transform(record=False), _salted(carried[-1]):
            new, got = _nodes(body(_tensors(structure, carried[:-1])), "while_loop")
        _same("while_loop", "the carries", structure, got)
        following = build.add(carried[-1], build.constant(1, dtypes.uint32))
        return [*_like(new, carried), following]

    found = build.while_loop(test, work, [*carries, step])
    return structure.unflatten(tracked(found[:-1]))

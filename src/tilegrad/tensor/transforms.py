"""Functions of functions: grad, value_and_grad, vjp, jvp, vmap, jacobians, hessian.

Each runs the function once on stand-ins for its arguments, builds more Graph from the result
(the derivative, the batch), and puts the arguments in the place of the stand-ins. So they
compose in any order, with each other and with jit, which inlines inside of them. Containers
nest; an object with `tensors()` may be differentiated too and gives a dict of its gradients.
Invariant: a transform leaves its arguments and its function as they were.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, TypeVar, overload

from ..core.errors import AxisError, DTypeError, ShapeError
from ..graph import build, ops
from ..graph.batch import batched, draws
from ..graph.forward import tangents
from ..graph.grad import gradients
from ..ir.node import Node, next_serial, topological
from ..ir.rewrite import replace
from ..ir.types import Array
from ..ir.whole import is_one, whole, wholes
from .autograd import leaves_below, recognized
from .container import Structure, broadcast_prefix, flatten, is_stateful
from .tensor import Tensor, grad_mode, made_together, mode, node_of, own_node, wrap

Function = Callable[..., Any]
P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")


@contextmanager
def inside_transform(record: bool = True) -> Iterator[None]:
    """While a transform runs its function: jitted functions inline."""
    mode.depth += 1
    try:
        with grad_mode(record or mode.grad_enabled):
            yield
    finally:
        mode.depth -= 1


def tracked(nodes: Sequence[Node]) -> list[Tensor]:
    """Tensors on Nodes; they require a gradient if a leaf is below."""
    found = [wrap(n) for n in nodes]
    if mode.grad_enabled:
        for tensor in found:
            if tensor.dtype.is_float and leaves_below([tensor._node]):
                tensor._requires_grad = True
    return found


def nodes_of(result: Any) -> tuple[list[Node], list[Any], Structure]:
    """The Nodes of a nested result, its leaves and its Structure."""
    leaves, structure = flatten(result)
    return [r.node for r in leaves if isinstance(r, Tensor)], leaves, structure


def rebuilt(leaves: Sequence[Any], structure: Structure, tensors: Sequence[Tensor]) -> Any:
    """The nested result with other Tensors in the place of its own."""
    rest = iter(tensors)
    return structure.unflatten([next(rest) if isinstance(r, Tensor) else r for r in leaves])


@dataclass
class Inputs:
    """Arguments with stand-ins for the Tensors that a transform works on."""

    values: tuple[Any, ...]  # the arguments to call the function with
    stand_ins: list[Node]  # what the transform works on
    originals: list[Node]
    structures: list[Structure]  # how each worked-on argument is nested
    counts: list[int]  # and how many Tensors it has
    leaves: list[list[Any]]

    def restore(self, nodes: Sequence[Node]) -> list[Node]:
        """Nodes with the arguments in the place of the stand-ins."""
        return replace(nodes, dict(zip(self.stand_ins, self.originals)))

    def nest(self, tensors: Sequence[Tensor]) -> list[Any]:
        """One nested value for each worked-on argument."""
        rest = iter(tensors)
        return [
            structure.unflatten([next(rest) if isinstance(x, Tensor) else None for x in leaves])
            for structure, leaves in zip(self.structures, self.leaves)
        ]


def positions_of(argnums: int | Sequence[int], count: int, op: str) -> list[int]:
    """Checked positions of arguments."""
    wanted = wholes(argnums, op, "argnums")
    for position in wanted:
        if not -count <= position < count:
            raise AxisError(
                f"there is no argument {position}",
                op=op,
                expected=f"argnums below {count}",
                got=argnums,
            )
    return [p % count for p in wanted]


def stand_in(node: Node) -> tuple[Tensor, Node]:
    """A Tensor that stands for a Node, and its own Node."""
    fresh = own_node(node)
    tensor = wrap(fresh)
    tensor._requires_grad = fresh.dtype.is_float
    return tensor, fresh


def enter(args: Sequence[Any], positions: Sequence[int], op: str) -> Inputs:
    """Stand-ins for the Tensors of the arguments at the positions."""
    inputs = Inputs(tuple(args), [], [], [], [], [])
    values = list(args)
    for position in positions:
        argument = args[position]
        if is_stateful(argument):
            _enter_state(argument, inputs)
            continue
        if isinstance(argument, (int, float)) and not isinstance(argument, bool):
            argument = wrap(node_of(float(argument)))
        leaves, structure = flatten(argument)
        made: list[Any] = []
        count = 0
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                made.append(leaf)
                continue
            tensor, node = stand_in(leaf.node)
            inputs.stand_ins.append(node)
            inputs.originals.append(leaf.node)
            made.append(tensor)
            count += 1
        values[position] = structure.unflatten(made)
        inputs.structures.append(structure)
        inputs.counts.append(count)
        inputs.leaves.append(leaves)
    inputs.values = tuple(values)
    if not inputs.stand_ins:
        raise DTypeError(
            "no Tensor among the arguments", op=op, expected="a Tensor or a nest of them at argnums"
        )
    return inputs


def _enter_state(argument: Any, inputs: Inputs) -> None:
    """The Tensors of an object stand for themselves; the result is a dict by name."""
    held = {n: t for n, t in argument.tensors().items() if t.dtype.is_float}
    leaves, structure = flatten(held)
    for tensor in leaves:
        if tensor.node.op is not ops.input_ or tensor.node in inputs.stand_ins:
            tensor.node = own_node(tensor.node)  # Nodes are shared by all equal values
        inputs.stand_ins.append(tensor.node)
        inputs.originals.append(tensor.node)
    inputs.structures.append(structure)
    inputs.counts.append(len(leaves))
    inputs.leaves.append(leaves)


def _check_scalar(result: Any, op: str) -> Node:
    if not isinstance(result, Tensor):
        raise DTypeError(
            "the function must return one Tensor",
            op=op,
            expected="a scalar Tensor",
            got=type(result).__name__,
            hint="use has_aux=True to return more",
        )
    if not result.dtype.is_float or result.numel() != 1:
        raise ShapeError(
            "the function must return a scalar",
            op=op,
            expected="a float Tensor of one element",
            got=str(result.node.type),
            hint="reduce it with sum() or mean(), or use vjp or jacrev",
        )
    return result.node


def _check_floats(inputs: Inputs, op: str) -> None:
    for node in inputs.stand_ins:
        if not node.dtype.is_float:
            raise DTypeError(
                "only floats have gradients",
                op=op,
                expected="float Tensors",
                got=str(node.type),
                hint="leave it out of argnums",
            )


def or_zeros(found: Sequence[Node | None], like: Sequence[Node]) -> list[Node]:
    """Derivatives with zeros where there are none."""
    return [build.like(x, 0.0) if n is None else n for n, x in zip(found, like)]


def value_and_grad(
    function: Callable[P, R], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[P, tuple[R, Any]]:
    """fn(...) -> (value, gradients), or ((value, aux), gradients)."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        inputs = enter(args, positions_of(argnums, len(args), "grad"), "grad")
        _check_floats(inputs, "grad")
        with inside_transform():
            result: Any = function(*inputs.values, **kwargs)
            if has_aux and not (isinstance(result, tuple) and len(result) == 2):
                raise DTypeError(
                    "with has_aux the function returns (value, aux)",
                    op="grad",
                    expected="a pair",
                    got=type(result).__name__,
                )
            value, aux = result if has_aux else (result, None)
            aux_nodes, aux_leaves, aux_structure = nodes_of(aux)
            root, *aux_nodes = recognized([_check_scalar(value, "grad"), *aux_nodes])
            found = gradients([root], [build.like(root, 1.0)], inputs.stand_ins)
        made = inputs.restore([root, *or_zeros(found, inputs.stand_ins), *aux_nodes])
        tensors = tracked(made)
        made_together(tensors)
        count = 1 + len(inputs.stand_ins)
        nested = inputs.nest(tensors[1:count])
        grads = nested[0] if is_one(argnums) else tuple(nested)
        if not has_aux:
            return tensors[0], grads
        return (tensors[0], rebuilt(aux_leaves, aux_structure, tensors[count:])), grads

    return run


def grad(
    function: Callable[P, Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[P, Any]:
    """fn(...) -> gradients of a scalar function, or (gradients, aux)."""
    with_value = value_and_grad(function, argnums, has_aux)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        value, grads = with_value(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return run


@overload
def vjp(
    function: Callable[..., R], *args: Any, has_aux: Literal[False] = False
) -> tuple[R, Callable[..., tuple[Any, ...]]]: ...
@overload
def vjp(
    function: Callable[..., tuple[R, A]], *args: Any, has_aux: Literal[True]
) -> tuple[R, Callable[..., tuple[Any, ...]], A]: ...
def vjp(function: Function, *args: Any, has_aux: bool = False) -> Any:
    """(value, pull) where pull(cotangents) gives one cotangent per argument."""
    inputs = enter(args, range(len(args)), "vjp")
    with inside_transform():
        result = function(*inputs.values)
        value, aux = result if has_aux else (result, None)
        nodes, leaves, structure = nodes_of(value)
        aux_nodes, aux_leaves, aux_structure = nodes_of(aux)
    tensors = tracked(inputs.restore([*nodes, *aux_nodes]))

    def pull(*cotangent: Any) -> tuple[Any, ...]:
        given = cotangent[0] if len(cotangent) == 1 else cotangent
        starts = matching(given, nodes, structure, "vjp")
        with inside_transform():
            found = gradients(recognized(nodes), starts, inputs.stand_ins)
        floats = or_zeros(found, inputs.stand_ins)
        return tuple(inputs.nest(tracked(inputs.restore(floats))))

    value = rebuilt(leaves, structure, tensors[: len(nodes)])
    if has_aux:
        return value, pull, rebuilt(aux_leaves, aux_structure, tensors[len(nodes) :])
    return value, pull


def matching(given: Any, nodes: Sequence[Node], structure: Structure, op: str) -> list[Node]:
    """Tangents or cotangents as Nodes, checked against what they belong to."""
    leaves, got = flatten(given)
    if got.alike is not structure.alike or len(leaves) != len(nodes):
        raise ShapeError(
            "not arranged like what it belongs to", op=op, expected=repr(structure), got=repr(got)
        )
    found = []
    for leaf, node in zip(leaves, nodes):
        made = build.cast(node_of(leaf, node.dtype), node.dtype)
        if made.shape != node.shape:
            raise ShapeError(
                "another shape than what it belongs to",
                op=op,
                expected=str(node.type),
                got=str(made.type),
            )
        found.append(made)
    return found


def linearize(function: Callable[..., R], *primals: Any) -> tuple[R, Callable[..., R]]:
    """(value, push) where push(*tangents) gives the tangent of the value; the function runs once,
    so that every tangent is one of the same value."""
    inputs = enter(primals, range(len(primals)), "jvp")
    with inside_transform():
        nodes, leaves, structure = nodes_of(function(*inputs.values))
        nodes = recognized(nodes)

    def push(*moved: Any) -> Any:
        if len(primals) != len(moved):
            raise ShapeError(
                "needs one tangent for each argument",
                op="jvp",
                expected=len(primals),
                got=len(moved),
            )
        directions: list[Node] = []
        place = 0
        for tangent, part, count in zip(moved, inputs.structures, inputs.counts):
            directions += matching(tangent, inputs.originals[place : place + count], part, "jvp")
            place += count
        with inside_transform():
            found = or_zeros(tangents(nodes, inputs.stand_ins, directions), nodes)
        return rebuilt(leaves, structure, tracked(inputs.restore(found)))

    return rebuilt(leaves, structure, tracked(inputs.restore(nodes))), push


def jvp(function: Callable[..., R], primals: Sequence[Any], moved: Sequence[Any]) -> tuple[R, R]:
    """(value, tangent of the value) when the arguments move along tangents."""
    value, push = linearize(function, *primals)
    return value, push(*moved)


# ---- batches ---------------------------------------------------------------------------------


def vmap(
    function: Callable[P, R],
    in_axes: Any = 0,
    out_axes: Any = 0,
    size: int | None = None,
    *,
    in_dims: Any = 0,
    out_dims: Any = 0,
) -> Callable[P, R]:
    """fn over a new axis of its arguments: `in_axes` (None: shared) and `out_axes` may nest;
    `in_dims` and `out_dims` are PyTorch's names of them."""
    in_axes = in_dims if in_axes == 0 else in_axes
    out_axes = out_dims if out_axes == 0 else out_axes

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        axes = tuple(in_axes) if isinstance(in_axes, (tuple, list)) else (in_axes,) * len(args)
        if len(axes) != len(args):
            raise ShapeError(
                "needs an axis for each argument", op="vmap", expected=len(args), got=in_axes
            )
        leaves, structure = flatten(args)
        leaf_axes = broadcast_prefix(axes, args, "vmap")
        given: dict[Node, Node] = {}
        inside = [
            _one_example(leaf, axis, given)
            if axis is not None and isinstance(leaf, Tensor)
            else leaf
            for leaf, axis in zip(leaves, leaf_axes)
        ]
        count = _batch_size(given, size)
        since = next_serial()
        with inside_transform(record=False):
            result = function(*structure.unflatten(inside), **kwargs)
        nodes, out_leaves, out_structure = nodes_of(result)
        pairs = _over_batch(nodes, given, count, since)
        out_leaf_axes = [
            p
            for p, r in zip(broadcast_prefix(out_axes, result, "vmap"), out_leaves)
            if isinstance(r, Tensor)
        ]
        made = [_placed(n, on, axis, count) for (n, on), axis in zip(pairs, out_leaf_axes)]
        return rebuilt(out_leaves, out_structure, tracked(made))

    return run


def _over_batch(
    nodes: Sequence[Node], given: dict[Node, Node], count: Any, since: int
) -> list[tuple[Node, bool]]:
    """The Nodes over a batch. What was drawn at random before the function ran is one value for
    all examples, computed by now or not; what the function draws is drawn for each."""
    drawn = {n for n in topological(nodes) if n.serial < since and draws(n)}
    if not drawn:
        return batched(recognized(nodes), given, count)
    drawn |= {n for n in topological(nodes) if n.op is ops.get and n.inputs[0] in drawn}
    shared = {n: build.input_(n.shape, n.dtype) for n in drawn if isinstance(n.type, Array)}
    pairs = batched(recognized(replace(nodes, shared)), given, count)
    made = replace([n for n, _ in pairs], {b: a for a, b in shared.items()})
    return [(n, on) for n, (_, on) in zip(made, pairs)]


def _one_example(leaf: Tensor, axis: int, given: dict[Node, Node]) -> Tensor:
    """What stands for one example of a batched Tensor."""
    node = leaf.node
    front = build.move_axis(node, build.axis_of(node, axis, "vmap"), 0)
    one = build.input_(front.shape[1:], node.dtype)
    given[one] = front
    tensor = wrap(one)
    tensor._requires_grad = leaf._requires_grad
    return tensor


def _batch_size(given: dict[Node, Node], size: int | None) -> Any:
    sizes = list(dict.fromkeys([n.shape[0] for n in given.values()]))
    size = None if size is None else whole(size, "vmap", "the size")
    if size is not None and not sizes:
        return size
    if len(sizes) != 1 or (size is not None and sizes[0] != size):
        raise ShapeError(
            "the batched axes have different sizes" if sizes else "nothing is batched",
            op="vmap",
            expected="one size on every batched axis",
            got=sizes,
            hint="give in_axes=None for arguments that all examples share",
        )
    return sizes[0]


def _placed(node: Node, on: bool, axis: Any, count: Any) -> Node:
    if axis is None:
        if on:
            raise ShapeError(
                "a result depends on the batch and has no axis to go to",
                op="vmap",
                expected="out_axes=0 for it",
                got="out_axes=None",
            )
        return node
    if not on:
        node = build.broadcast_to(node, (count, *node.shape))
    return build.move_axis(node, 0, axis)


# ---- matrices of derivatives -----------------------------------------------------------------


def _basis(node: Node) -> Tensor:
    """Every unit tangent of an array, stacked: (size, *shape)."""
    count = node.type.size  # type: ignore[union-attr]
    line = build.iota(count)
    square = build.equal(build.unsqueeze(line, 1), build.unsqueeze(line, 0))
    return wrap(build.reshape(build.cast(square, node.dtype), (count, *node.shape)))


def jacrev(function: Callable[..., Tensor], argnums: int = 0) -> Callable[..., Any]:
    """The matrix of derivatives, a row at a time (reverse mode)."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        (position,) = positions_of(argnums, len(args), "jacrev")
        value, pull = vjp(_of_one(function, args, position), args[position])
        result = _single(value, "jacrev")
        rows = vmap(lambda cotangent: pull(cotangent)[0])(_basis(result.node))
        leaves, structure = flatten(rows)
        return structure.unflatten(
            [wrap(build.reshape(r.node, result.shape + r.shape[1:]), r) for r in leaves]
        )

    return run


def jacfwd(function: Callable[..., R], argnums: int = 0) -> Callable[..., R]:
    """The matrix of derivatives, a column at a time (forward mode)."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        (position,) = positions_of(argnums, len(args), "jacfwd")
        x = _single(args[position], "jacfwd")
        push = linearize(_of_one(function, args, position), x)[1]
        leaves, structure = flatten(vmap(push)(_basis(x.node)))
        made = []
        for column in leaves:
            last = build.move_axis(column.node, 0, len(column.shape) - 1)
            made.append(wrap(build.reshape(last, column.shape[1:] + x.shape), column))
        return structure.unflatten(made)

    return run


def hessian(function: Callable[..., Tensor], argnums: int = 0) -> Callable[..., Any]:
    """The second derivatives of a scalar function."""
    return jacfwd(jacrev(function, argnums), argnums)


def _of_one(function: Function, args: Sequence[Any], position: int) -> Function:
    return lambda x: function(*args[:position], x, *args[position + 1 :])


def _single(value: Any, op: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise DTypeError("needs one Tensor", op=op, expected="a Tensor", got=type(value).__name__)
    return value

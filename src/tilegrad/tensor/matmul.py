"""Products that contract axes: matmul and its kin, tensordot, einsum, linear.

Invariant: every contraction becomes `dot`, which accumulates in at least float32 and is rounded
once; a bias is added before the rounding. Operands must have one dtype, as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core import dtype as dtypes
from ..core.dtype import DType
from ..core.errors import DTypeError, ShapeError
from ..graph import build, ops
from ..ir.node import Node
from ..ir.whole import is_one, whole, wholes
from .maths import cast
from .operands import number_for
from .tensor import Tensor, lift, method, node_of, wrap


def matched(op: str, *values: Any) -> list[Tensor]:
    """Tensors of one dtype, which must be a number's."""
    tensors = [lift(v) for v in values]
    first = tensors[0].dtype
    if any(t.dtype is not first for t in tensors) or first.kind == "bool":
        raise DTypeError(
            "the dtypes do not fit",
            op=op,
            expected="one number dtype for all",
            got=" and ".join(t.dtype.name for t in tensors),
            hint="cast with .to(dtype)",
        )
    return tensors


def _ranked(op: str, ranks: Sequence[int], *tensors: Tensor) -> None:
    for rank, tensor in zip(ranks, tensors):
        if tensor.ndim != rank:
            raise ShapeError(
                f"needs {' and '.join(map(str, ranks))} axes",
                op=op,
                expected=f"{rank} axes",
                got=build.show(tensor.shape),
            )


@method("matmul", "__matmul__")
def matmul(a: Any, b: Any) -> Tensor:
    """The product of matrices in the last two axes; the others broadcast."""
    left, right = matched("matmul", a, b)
    return wrap(build.matmul(node_of(left), node_of(right)), left, right)


@method("__rmatmul__")
def _reflected_matmul(self: Tensor, other: Any) -> Tensor:
    return matmul(other, self)


def _strict(op: str, ranks: Sequence[int], a: Any, b: Any) -> Tensor:
    left, right = lift(a), lift(b)
    _ranked(op, ranks, left, right)
    inner, outer = left.shape[-1], right.shape[-2 if right.ndim > 1 else 0]
    if inner != outer or (ranks[0] == 3 and left.shape[0] != right.shape[0]):
        raise ShapeError(
            "the sizes do not fit",
            op=op,
            expected="equal inner and batch sizes",
            got=f"{build.show(left.shape)} and {build.show(right.shape)}",
        )
    return matmul(left, right)


@method()
def mm(a: Any, b: Any) -> Tensor:
    """The product of two matrices."""
    return _strict("mm", (2, 2), a, b)


@method()
def bmm(a: Any, b: Any) -> Tensor:
    """The products of two batches of matrices."""
    return _strict("bmm", (3, 3), a, b)


@method()
def mv(a: Any, b: Any) -> Tensor:
    """A matrix times a vector."""
    return _strict("mv", (2, 1), a, b)


@method()
def dot(a: Any, b: Any) -> Tensor:
    """The scalar product of two vectors."""
    return _strict("dot", (1, 1), a, b)


vdot = dot


@method()
def inner(a: Any, b: Any) -> Tensor:
    """Products summed over the last axes."""
    left, right = lift(a), lift(b)
    if not left.ndim or not right.ndim:
        return left * right
    return tensordot(left, right, ([-1], [-1]))


@method("outer", "ger")
def outer(a: Any, b: Any) -> Tensor:
    """All products of the elements of two vectors."""
    left, right = lift(a), lift(b)
    _ranked("outer", (1, 1), left, right)
    return left.unsqueeze(1) * right.unsqueeze(0)


@method()
def kron(a: Any, b: Any) -> Tensor:
    """Kronecker's product: each element of a times all of b."""
    left, right = lift(a), lift(b)
    rank = max(left.ndim, right.ndim)
    left = left.reshape((1,) * (rank - left.ndim) + left.shape)
    right = right.reshape((1,) * (rank - right.ndim) + right.shape)
    wide = left.reshape([s for size in left.shape for s in (size, 1)])
    tall = right.reshape([s for size in right.shape for s in (1, size)])
    return (wide * tall).reshape([x * y for x, y in zip(left.shape, right.shape)])


def tensordot(a: Any, b: Any, dims: Any = 2) -> Tensor:
    """Contract the last axes of a with the first of b, or the axes listed for each."""
    left, right = matched("tensordot", a, b)
    if is_one(dims):
        count = whole(dims, "tensordot", "the count of axes")
        pair: Any = (range(left.ndim - count, left.ndim), range(count))
    else:
        pair = tuple([wholes(d, "tensordot", "axis") for d in dims])
    first = [build.axis_of(left.node, d, "tensordot") for d in pair[0]]
    second = [build.axis_of(right.node, d, "tensordot") for d in pair[1]]
    sizes = [left.shape[d] for d in first], [right.shape[d] for d in second]
    if sizes[0] != sizes[1]:
        raise ShapeError(
            "contracted sizes differ", op="tensordot", expected=tuple(sizes[0]), got=tuple(sizes[1])
        )
    return wrap(build.dot(node_of(left), node_of(right), ((), ()), (first, second)), left, right)


# ---- with a sum -----------------------------------------------------------------------------


def _wide(dtype: DType) -> DType:
    return dtype.wide


def _wide_matmul(left: Tensor, right: Tensor) -> Tensor:
    """The product before it is rounded."""
    node = build.matmul(node_of(left), node_of(right))
    wide = _wide(left.dtype)
    if wide is not left.dtype:
        node = _unrounded(node, wide)
    return wrap(node, left, right)


def _unrounded(node: Node, dtype: DType) -> Node:
    """A matmul's dot, through the movement on top of it, giving another dtype."""
    if node.op.name == "dot":
        return node.op(*node.inputs, **{**node.attrs, "dtype": dtype})
    return node.op(_unrounded(node.inputs[0], dtype), **node.attrs)


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * number_for(factor, x.dtype)


@method()
def addmm(x: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta * x + alpha * (a @ b)."""
    return _add_product("addmm", (2, 2), x, a, b, beta, alpha)


@method()
def baddbmm(x: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta * x + alpha * (a @ b) for batches."""
    return _add_product("baddbmm", (3, 3), x, a, b, beta, alpha)


@method()
def addmv(x: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta * x + alpha * (a @ b) for a matrix and a vector."""
    return _add_product("addmv", (2, 1), x, a, b, beta, alpha)


@method()
def addr(x: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta * x + alpha * outer(a, b)."""
    base, left, right = matched("addr", x, a, b)
    _ranked("addr", (1, 1), left, right)
    return addmm(base, left.unsqueeze(1), right.unsqueeze(0), beta=beta, alpha=alpha)


@method()
def addbmm(x: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta * x + alpha * (the sum of the products of two batches)."""
    base, left, right = matched("addbmm", x, a, b)
    _ranked("addbmm", (3, 3), left, right)
    wide = left.transpose(0, 1).reshape(left.shape[1], -1)
    tall = right.reshape(-1, right.shape[2])
    return addmm(base, wide, tall, beta=beta, alpha=alpha)


def _add_product(
    op: str, ranks: tuple[int, int], x: Any, a: Any, b: Any, beta: float, alpha: float
) -> Tensor:
    base, left, right = matched(op, x, a, b)
    _ranked(op, ranks, left, right)
    result = _scaled(_wide_matmul(left, right), alpha)
    build.broadcast_to(base.node, result.shape, op)
    if beta != 0:
        result = _scaled(cast(base, result.dtype), beta) + result
    return cast(result, left.dtype)


def linear(x: Any, weight: Any, bias: Any = None) -> Tensor:
    """x @ weight.T + bias: weight is (out, in)."""
    tensor, matrix = matched("linear", x, weight)
    if matrix.ndim > 2 or not tensor.ndim or tensor.shape[-1] != matrix.shape[-1]:
        raise ShapeError(
            "the sizes do not fit",
            op="linear",
            expected=f"input (..., {matrix.shape[-1] if matrix.ndim else '?'})",
            got=f"input {build.show(tensor.shape)}, weight {build.show(matrix.shape)}",
        )
    transposed = matrix.t()
    if bias is None:
        return matmul(tensor, transposed)
    matched("linear", tensor, bias)
    result = _wide_matmul(tensor, transposed)
    return cast(result + cast(lift(bias), result.dtype), tensor.dtype)


def picked_dot(x: Any, weights: Any, ids: Any, axis: int = 1) -> Tensor:
    """(T, K), (S, K, N), (T,) -> (T, N): each row times the weights that its id picks.

    With axis=2 weights are (S, N, K). Rows whose id is negative are zeros; no id is S or above.
    Inference alone: it has no derivative.
    """
    rows, cube = matched("picked_dot", x, weights)
    picks = lift(ids)
    _ranked("picked_dot", (2, 3), rows, cube)
    fits = axis in (1, 2) and rows.shape[1] == cube.shape[axis] and rows.dtype.is_float
    if not fits or picks.shape != rows.shape[:1] or not picks.dtype.is_integer:
        raise ShapeError(
            "the sizes do not fit",
            op="picked_dot",
            expected="floats (T, K), (S, K, N), and integers (T,); with axis=2 (S, N, K)",
            got=f"{rows.node.type}, {cube.node.type}, {picks.node.type}, axis={axis}",
        )
    return wrap(ops.picked_dot(node_of(rows), node_of(cube), node_of(picks), axis=axis), rows, cube)


def group_rows(ids: Any, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """(N,) -> (N,), (N,), (groups + 1,), int32: the rows of group 0, of group 1 and so on, each
    group's as they came; where each row comes to; and where the groups begin, and N at last.

    Rows have ids from 0 to groups - 1.
    """
    picks, groups = lift(ids), whole(groups, "group_rows", "groups")
    if picks.ndim != 1 or not picks.dtype.is_integer or groups < 1:
        raise ShapeError(
            "not a row of ids",
            op="group_rows",
            expected="integers (N,) and a positive number of groups",
            got=f"{picks.node.type} and {groups}",
        )
    known = build.in_range(node_of(picks), groups, "group_rows")
    found = build.items(ops.group_rows(known, groups=groups))
    order, ranks, offsets = (wrap(node, picks) for node in found)
    return order, ranks, offsets


def grouped_dot(x: Any, weights: Any, offsets: Any, axis: int = 2) -> Tensor:
    """(N, K), (G, M, K), (G + 1,) -> (N, M): the rows of each group times its weights.

    Group g has rows offsets[g] to offsets[g + 1]; offsets are int32 and rise from 0 to N. With
    axis=1 weights are (G, K, M). Weights of groups without rows are not read.
    """
    rows, cube = matched("grouped_dot", x, weights)
    ends = lift(offsets)
    _ranked("grouped_dot", (2, 3), rows, cube)
    fits = axis in (1, 2) and rows.shape[1] == cube.shape[axis] and rows.dtype.is_float
    if not fits or ends.dtype is not dtypes.int32 or ends.shape != (cube.shape[0] + 1,):
        raise ShapeError(
            "the sizes do not fit",
            op="grouped_dot",
            expected="floats (N, K), (G, M, K), and int32 (G + 1,); with axis=1 (G, K, M)",
            got=f"{rows.node.type}, {cube.node.type}, {ends.node.type}, axis={axis}",
        )
    known = build.in_range(node_of(ends), rows.shape[0] + 1, "grouped_dot")
    found = ops.grouped_dot(node_of(rows), node_of(cube), known, axis=axis, block=0)
    return wrap(found, rows, cube)


def bilinear(a: Any, b: Any, weight: Any, bias: Any = None) -> Tensor:
    """a @ weight[k] @ b for each output k; weight is (out, in_a, in_b)."""
    left, right, cube = matched("bilinear", a, b, weight)
    _ranked("bilinear", (3,), cube)
    from .einsum import einsum

    result = einsum("...i,kij,...j->...k", left, cube, right)
    return result if bias is None else result + lift(bias)

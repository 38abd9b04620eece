"""Tensors from nothing: data, constants, ranges, masks.

Invariant: a constant Tensor has no memory until something needs it; a function that takes
sizes also takes symbolic ones.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..core import dtype as dtypes
from ..core.dtype import DType, dtype_of
from ..core.errors import DTypeError, ShapeError, UserError
from ..graph import build, ops
from ..ir.node import Node
from ..ir.requirement import require
from ..ir.symbol import Expr, Size
from ..ir.whole import whole, wholes
from ..runtime.buffer import HOST
from ..runtime.device import zeroed
from .convert import place, settle
from .maths import cast
from .movement import sizes_of
from .placement import device_name, elsewhere
from .realize import from_buffer
from .tensor import Tensor, as_array, from_array, lift, method, node_of, wrap


def _made(node: Node, requires_grad: bool, device: Any, op: str) -> Tensor:
    if device is not None and (elsewhere() or device_name(device, op) != HOST):
        node = place(node, device, op)
    tensor = wrap(node)
    if requires_grad:
        tensor.requires_grad = True
    return tensor


# ---- data -----------------------------------------------------------------------------------


def tensor(
    data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False
) -> Tensor:
    """A Tensor with a copy of the data: numbers, nested lists, arrays."""
    if isinstance(data, Tensor):
        data = data.detach()
    _check_fits("tensor", data, dtype)
    return Tensor(data, dtype, requires_grad, device)


def _check_fits(op: str, data: Any, dtype: Any) -> None:
    """An error where a dtype of integers cannot hold numbers; of unsigned ones negatives wrap."""
    found = None if dtype is None else dtype_of(dtype)
    if found is None or not found.is_integer or not isinstance(data, (int, float, list, tuple)):
        return
    array = as_array(data) if isinstance(data, (list, tuple)) else np.asarray(data)
    if not array.size or array.dtype == np.bool_:
        return
    least, most = (v.item() if isinstance(v, np.generic) else v for v in (array.min(), array.max()))
    end = int(found.highest) + 1
    if not (least >= -end and most < end):
        raise DTypeError(
            "a number does not fit the dtype",
            op=op,
            got=least if most < end else most,
            expected=f"{found}: {found.lowest} to {found.highest}",
        )


def as_tensor(data: Any, dtype: Any = None, device: Any = None) -> Tensor:
    """A Tensor of the data, sharing memory with arrays where it can."""
    if isinstance(data, Tensor):
        return data if dtype is None and device is None else data.to(dtype=dtype, device=device)
    if isinstance(data, (list, tuple, bool, int, float)):
        return Tensor(data, dtype, device=device)
    if _on_gpu(data):
        from .interop import from_torch

        return as_tensor(from_torch(data), dtype, device)
    found = from_array(as_array(data), adapts=False)
    if elsewhere() or device is not None:
        found = settle(found, data, device)
    return wrap(found) if dtype is None else cast(wrap(found), dtype_of(dtype))


def _on_gpu(data: Any) -> bool:
    return type(data).__module__ == "torch" and data.is_cuda


def from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    """A Tensor that shares the memory of a NumPy array."""
    if not isinstance(array, np.ndarray):
        raise DTypeError(
            "not a NumPy array", op="from_numpy", expected="numpy.ndarray", got=type(array).__name__
        )
    return wrap(from_array(array, adapts=False))


# ---- constants ------------------------------------------------------------------------------


def _sizes(op: str, sizes: tuple[Any, ...]) -> tuple[Size, ...]:
    found = sizes_of(op, sizes)
    for size in found:
        require(
            size,
            ShapeError,
            "a size is negative",
            op=op,
            expected="sizes >= 0",
            got="{sizes}",
            sizes=found,
        )
    return found


def _filled(
    op: str, sizes: tuple[Any, ...], value: Any, dtype: Any, requires_grad: bool, device: Any
) -> Tensor:
    found = dtypes.float32 if dtype is None else dtype_of(dtype)
    _check_fits(op, value, found)
    return _made(build.full(_sizes(op, sizes), value, found), requires_grad, device, op)


def zeros(*size: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> Tensor:
    """Zeros of a shape."""
    return _filled("zeros", size, 0, dtype, requires_grad, device)


def zeros_of_own(shape: tuple[int, ...], dtype: DType, device: str, label: str) -> Tensor:
    """Zeros with a Buffer of their own, where equal constants share one: for state."""
    buffer = zeroed(math.prod(shape) * dtype.size, device, label)
    return wrap(from_buffer(buffer, shape, dtype))


def empty(*size: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> Tensor:
    """A Tensor of a shape whose values do not matter (they are zeros)."""
    return _filled("empty", size, 0, dtype, requires_grad, device)


def ones(*size: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> Tensor:
    """Ones of a shape."""
    return _filled("ones", size, 1, dtype, requires_grad, device)


def default_dtype(value: Any) -> DType:
    """The dtype of a Python number alone."""
    if isinstance(value, (bool, np.bool_)):
        return dtypes.bool_
    return dtypes.int64 if isinstance(value, (int, np.integer)) else dtypes.float32


def full(
    size: Any,
    fill_value: Any,
    *,
    dtype: Any = None,
    device: Any = None,
    requires_grad: bool = False,
) -> Tensor:
    """One value everywhere; its kind gives the dtype."""
    sizes = size if isinstance(size, (tuple, list)) else (size,)
    if isinstance(fill_value, Tensor):
        wanted = fill_value.dtype if dtype is None else dtype_of(dtype)
        return cast(fill_value, wanted).expand(*_sizes("full", tuple(sizes)))
    found = default_dtype(fill_value) if dtype is None else dtype
    return _filled("full", tuple(sizes), fill_value, found, requires_grad, device)


def _like(op: str, x: Any, value: Any, dtype: Any, requires_grad: bool) -> Tensor:
    tensor = lift(x)
    found = tensor.dtype if dtype is None else dtype
    return _filled(op, (tensor.shape,), value, found, requires_grad, _device(tensor))


def zeros_like(x: Any, *, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """Zeros in x's shape and dtype."""
    return _like("zeros_like", x, 0, dtype, requires_grad)


def empty_like(x: Any, *, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """A Tensor in x's shape and dtype whose values do not matter."""
    return _like("empty_like", x, 0, dtype, requires_grad)


def ones_like(x: Any, *, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """Ones in x's shape and dtype."""
    return _like("ones_like", x, 1, dtype, requires_grad)


def full_like(x: Any, fill_value: Any, *, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """One value in x's shape and dtype."""
    return _like("full_like", x, fill_value, dtype, requires_grad)


@method()
def new_zeros(self: Tensor, *size: Any, dtype: Any = None) -> Tensor:
    """Zeros of a shape in this dtype."""
    return zeros(*size, dtype=self.dtype if dtype is None else dtype, device=_device(self))


@method()
def new_ones(self: Tensor, *size: Any, dtype: Any = None) -> Tensor:
    """Ones of a shape in this dtype."""
    return ones(*size, dtype=self.dtype if dtype is None else dtype, device=_device(self))


@method()
def new_full(self: Tensor, size: Any, fill_value: Any, dtype: Any = None) -> Tensor:
    """One value of a shape in this dtype."""
    wanted = self.dtype if dtype is None else dtype
    return full(size, fill_value, dtype=wanted, device=_device(self))


def _device(x: Tensor) -> str | None:
    return x.device if elsewhere() else None


@method()
def fill_(self: Tensor, value: Any) -> Tensor:
    """One value everywhere, kept in this Tensor."""
    node = build.cast(node_of(value, self.dtype), self.dtype)
    return self.rebind(build.broadcast_to(node, self.shape, "fill_"), value, op="fill_")


@method()
def zero_(self: Tensor) -> Tensor:
    """Zeros, kept in this Tensor."""
    return fill_(self, 0)


@method()
def copy_(self: Tensor, source: Any) -> Tensor:
    """Another's values in this dtype, kept in this Tensor."""
    node = build.cast(node_of(source), self.dtype)
    return self.rebind(build.broadcast_to(node, self.shape, "copy_"), source, op="copy_")


@method()
def fill(x: Any, value: Any) -> Tensor:
    """One value in x's shape and dtype."""
    tensor = lift(x)
    return wrap(
        build.broadcast_to(
            build.cast(node_of(value, tensor.dtype), tensor.dtype), tensor.shape, "fill"
        ),
        value,
    )


def scalar_tensor(value: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
    """A Tensor without axes; float32 unless told."""
    found = dtypes.float32 if dtype is None else dtype_of(dtype)
    return full((), value, dtype=found, device=device)


def frombuffer(
    buffer: Any, *, dtype: Any, count: int = -1, offset: int = 0, requires_grad: bool = False
) -> Tensor:
    """A line of numbers of bytes in memory, without a copy."""
    found = dtype_of(dtype)
    try:
        array = np.frombuffer(buffer, found.numpy, count, offset)
    except ValueError as error:
        raise ShapeError(
            f"the buffer does not fit: {error}",
            op="frombuffer",
            expected=f"whole elements of {found}",
            got=f"count {count} from byte {offset}",
        ) from None
    return _made(from_array(array, adapts=False), requires_grad, None, "frombuffer")


# ---- ranges ---------------------------------------------------------------------------------


def arange(
    start: Any,
    end: Any = None,
    step: Any = 1,
    *,
    dtype: Any = None,
    device: Any = None,
    requires_grad: bool = False,
) -> Tensor:
    """start, start + step, ... before end."""
    if end is None:
        start, end = 0, start
    start, end, step = (
        v.item() if isinstance(v, (Tensor, np.generic, np.ndarray)) else v
        for v in (start, end, step)
    )
    if not isinstance(step, Expr) and step == 0:
        raise UserError("the step is 0", op="arange", expected="a step other than 0", got=step)
    exact = all(isinstance(v, (int, Expr)) for v in (start, end, step))
    found = dtype_of(dtype) if dtype is not None else (dtypes.int64 if exact else dtypes.float32)
    if not exact and not all(isinstance(v, Expr) or math.isfinite(v) for v in (start, end, step)):
        got = f"start {start}, end {end}, step {step}"
        raise UserError("a bound is not finite", op="arange", expected="numbers", got=got)
    count = -((start - end) // step) if exact else math.ceil((end - start) / step)
    count = count if isinstance(count, Expr) else int(count)
    require(
        count,
        UserError,
        "the step leads away from the end",
        op="arange",
        expected="end on the side the step goes to",
        got="start {start}, end {end}, step {step}",
        start=start,
        end=end,
        step=step,
    )
    node = _line(count, start, step, exact, found)
    return _made(node, requires_grad, device, "arange")


def _line(count: Size, start: Any, step: Any, exact: bool, dtype: DType) -> Node:
    """start + i * step, computed exactly enough to be rounded once."""
    if exact and not any(isinstance(v, Expr) for v in (start, step)):
        if step == 1 and start == 0:
            return build.iota(count, dtype)
        line = build.add(build.multiply(build.iota(count, dtypes.int64), step), start)
        return build.cast(line, dtype)
    if exact:
        line = build.multiply(build.iota(count), build.size_value(step))
        return build.cast(build.add(line, build.size_value(start)), dtype)
    line = build.cast(build.iota(count), dtypes.float64)
    return build.cast(build.add(build.multiply(line, float(step)), float(start)), dtype)


def linspace(
    start: Any,
    end: Any,
    steps: int,
    *,
    dtype: Any = None,
    device: Any = None,
    requires_grad: bool = False,
) -> Tensor:
    """`steps` numbers from start to end, both included, evenly spaced."""
    found = dtypes.float32 if dtype is None else dtype_of(dtype)
    return _made(
        build.cast(_even(start, end, steps, "linspace"), found), requires_grad, device, "linspace"
    )


def _even(start: Any, end: Any, steps: int, op: str) -> Node:
    steps = whole(steps, op, "steps")
    if steps < 0:
        raise UserError("bad number of steps", op=op, expected="steps >= 0", got=steps)
    first, last = float(start), float(end)
    step = (last - first) / max(steps - 1, 1)
    place = build.cast(build.iota(steps), dtypes.float64)
    up = build.add(build.multiply(place, step), first)
    back = build.subtract(last, build.multiply(build.subtract(float(steps - 1), place), step))
    half = build.less(place, steps / 2) if steps != 1 else build.less_equal(place, 0.0)
    return build.where(half, up, back)


def logspace(
    start: Any,
    end: Any,
    steps: int,
    base: float = 10.0,
    *,
    dtype: Any = None,
    device: Any = None,
    requires_grad: bool = False,
) -> Tensor:
    """base to the power of evenly spaced exponents."""
    found = dtypes.float32 if dtype is None else dtype_of(dtype)
    powers = build.binary(ops.power, float(base), _even(start, end, steps, "logspace"))
    return _made(build.cast(powers, found), requires_grad, device, "logspace")


# ---- matrices and masks ---------------------------------------------------------------------


def eye(
    n: Size,
    m: Size | None = None,
    *,
    dtype: Any = None,
    device: Any = None,
    requires_grad: bool = False,
) -> Tensor:
    """Ones on the diagonal."""
    found = dtypes.float32 if dtype is None else dtype_of(dtype)
    shape = sizes_of("eye", (n, n if m is None else m))
    on = build.equal(build.iota_along(shape, 0), build.iota_along(shape, 1))
    return _made(build.cast(on, found), requires_grad, device, "eye")


def _triangle(shape: tuple[Size, ...], diagonal: int, lower: bool, op: str) -> Node:
    """Where an element of the last two axes lies in the triangle."""
    if len(shape) < 2:
        raise ShapeError("needs a matrix", op=op, expected="ndim >= 2", got=build.show(shape))
    row = build.add(build.iota_along(shape[-2:], 0), whole(diagonal, op, "the diagonal"))
    column = build.iota_along(shape[-2:], 1)
    return build.less_equal(column, row) if lower else build.less_equal(row, column)


@method()
def tril(x: Any, diagonal: int = 0) -> Tensor:
    """The part on and below a diagonal, zeros elsewhere."""
    found = lift(x)
    mask = _triangle(found.shape, diagonal, True, "tril")
    return wrap(build.where(mask, node_of(found), build.constant(0, found.dtype)), found)


@method()
def triu(x: Any, diagonal: int = 0) -> Tensor:
    """The part on and above a diagonal, zeros elsewhere."""
    found = lift(x)
    mask = _triangle(found.shape, diagonal, False, "triu")
    return wrap(build.where(mask, node_of(found), build.constant(0, found.dtype)), found)


def tri(n: Size, m: Size | None = None, k: int = 0, *, dtype: Any = None) -> Tensor:
    """Ones on and below a diagonal; `dtype=bool` makes a causal mask."""
    found = dtypes.float32 if dtype is None else dtype_of(dtype)
    shape = sizes_of("tri", (n, n if m is None else m))
    return wrap(build.cast(_triangle(shape, k, True, "tri"), found))


def tril_indices(row: int, col: int, offset: int = 0) -> Tensor:
    """Rows and columns of the elements on and below a diagonal."""
    row, col, offset = wholes((row, col, offset), "tril_indices", "a size or offset")
    return from_numpy(np.stack(np.tril_indices(row, offset, col)).astype(np.int64))


def triu_indices(row: int, col: int, offset: int = 0) -> Tensor:
    """Rows and columns of the elements on and above a diagonal."""
    row, col, offset = wholes((row, col, offset), "triu_indices", "a size or offset")
    return from_numpy(np.stack(np.triu_indices(row, offset, col)).astype(np.int64))


def one_hot(x: Any, num_classes: int = -1) -> Tensor:
    """int64 with a 1 at each class; without a number of classes the values are read."""
    found = lift(x)
    if not found.dtype.is_integer:
        raise DTypeError(
            "classes are not integers", op="one_hot", expected="integers", got=found.dtype
        )
    count = whole(num_classes, "one_hot", "num_classes")
    count = int(found.max()) + 1 if count == -1 else count
    classes = wrap(build.iota(count))
    labels = wrap(build.in_range(build.cast(node_of(found), dtypes.int64), count, "one_hot"))
    return cast(labels.unsqueeze(-1) == classes, dtypes.int64)


def meshgrid(*tensors: Any, indexing: str = "ij") -> tuple[Tensor, ...]:
    """Coordinates of a grid, one Tensor per axis; 'xy' swaps the first two axes."""
    if len(tensors) == 1 and isinstance(tensors[0], (tuple, list)):
        tensors = tuple(tensors[0])
    if indexing not in ("ij", "xy"):
        raise UserError(
            "unknown indexing", op="meshgrid", expected="'ij' or 'xy'", got=repr(indexing)
        )
    lines = [lift(x).reshape(-1) for x in tensors]
    if indexing == "xy" and len(lines) > 1:
        second, first, *rest = meshgrid(lines[1], lines[0], *lines[2:])
        return (first, second, *rest)
    shape = tuple(x.shape[0] for x in lines)
    grids = []
    for axis, line in enumerate(lines):
        ones_ = [1] * len(lines)
        ones_[axis] = -1
        grids.append(line.reshape(*ones_).expand(*shape))
    return tuple(grids)

"""The array API standard over Tensors: what `Tensor.__array_namespace__` gives.

Names, arguments and dtypes are the standard's, values are those of the functions below. The default
dtypes are float32 and int64. There is no complex dtype, so `imag` and the complex dtypes are
refused, and the extensions `linalg` and `fft`, which need it, are not here: `tilegrad.linalg` and
`tilegrad.fft` are, with PyTorch's names. Where the standard has a property `size`, a Tensor has
PyTorch's method. Invariant: every required name of the standard with a real meaning is here, and
nothing in it is computed by NumPy. The names of builtins are taken by the standard: Python's own
are read from `builtins` in this file. It is long because one namespace has a function for each
name of the standard.
"""

from __future__ import annotations

import builtins
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ..core import dtype as dtypes
from ..core.dtype import (
    DType,
    dtype_of,
    float32,
    float64,
    int8,
    int16,
    int32,
    int64,
    promote,
    uint8,
    uint16,
    uint32,
    uint64,
)
from ..core.errors import DTypeError, ShapeError, UserError
from ..graph import build
from ..ir.whole import is_one
from ..runtime.buffer import HOST
from . import compare, creation, cumulative, elementwise, maths, movement, reduce, select
from . import sort as sorting
from .convert import bitcast
from .interop import from_dlpack as _shared
from .maths import cast, pick
from .matmul import matmul as _matmul
from .matmul import tensordot as _tensordot
from .placement import get_default_device
from .tensor import Tensor, lift

__array_api_version__ = "2024.12"
VERSIONS = ("2021.12", "2022.12", "2023.12", "2024.12")

bool = dtypes.bool_
e, inf, nan, newaxis, pi = math.e, math.inf, math.nan, None, math.pi
SIGNED, UNSIGNED = (int8, int16, int32, int64), (uint8, uint16, uint32, uint64)
FLOATS = (float32, float64)
KINDS: dict[str, tuple[DType, ...]] = {
    "bool": (bool,),
    "signed integer": SIGNED,
    "unsigned integer": UNSIGNED,
    "integral": SIGNED + UNSIGNED,
    "real floating": FLOATS,
    "complex floating": (),
    "numeric": SIGNED + UNSIGNED + FLOATS,
}
Axis = Any


def __getattr__(name: str) -> Any:
    if name in ("complex64", "complex128"):
        raise AttributeError(f"there is no complex dtype in tilegrad, so no {name}")
    raise AttributeError(f"the array API namespace of tilegrad has no {name!r}")


# ---- dtypes ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class finfo_object:
    """Facts of a float dtype."""

    bits: int
    eps: float
    max: float
    min: float
    smallest_normal: float
    dtype: DType


@dataclass(frozen=True)
class iinfo_object:
    """Facts of an integer dtype."""

    bits: int
    max: int
    min: int
    dtype: DType


def _dtype(x: Any) -> DType:
    return x.dtype if isinstance(x, Tensor) else dtype_of(x)


def finfo(type: Any, /) -> finfo_object:
    """Limits of a float dtype."""
    dtype = _dtype(type)
    if not dtype.is_float:
        raise DTypeError("not a float dtype", op="finfo", got=dtype)
    found = ml_dtypes.finfo(dtype.numpy)
    eps, most, least = float(found.eps), float(found.max), float(found.min)
    return finfo_object(dtype.bits, eps, most, least, float(found.smallest_normal), dtype)


def iinfo(type: Any, /) -> iinfo_object:
    """Limits of an integer dtype."""
    dtype = _dtype(type)
    if not dtype.is_integer:
        raise DTypeError("not an integer dtype", op="iinfo", got=dtype)
    found = np.iinfo(dtype.numpy)
    return iinfo_object(dtype.bits, int(found.max), int(found.min), dtype)


def isdtype(dtype: Any, kind: Any) -> builtins.bool:
    """Whether a dtype is of a kind, a dtype, or one of several."""
    if isinstance(kind, tuple):
        return builtins.any(isdtype(dtype, k) for k in kind)
    if isinstance(kind, str):
        if kind not in KINDS:
            raise UserError("unknown kind", op="isdtype", expected=", ".join(KINDS), got=kind)
        return dtype_of(dtype) in KINDS[kind]
    return dtype_of(dtype) is dtype_of(kind)


def result_type(*arrays_and_dtypes: Any) -> DType:
    """The dtype of an elementwise function of all; Python numbers are weak."""
    found: DType | None = None
    for value in arrays_and_dtypes:
        if not isinstance(value, (builtins.bool, int, float)):
            found = _dtype(value) if found is None else promote(found, _dtype(value))
    if found is None:
        raise DTypeError("needs an array or a dtype", op="result_type", got=arrays_and_dtypes)
    for value in arrays_and_dtypes:
        if isinstance(value, (builtins.bool, int, float)):
            found = dtypes.promote_scalar(found, value)
    return found


def can_cast(from_: Any, to: Any, /) -> builtins.bool:
    """Whether promotion would turn one dtype into another."""
    return promote(_dtype(from_), dtype_of(to)) is dtype_of(to)


def astype(x: Tensor, dtype: Any, /, *, copy: builtins.bool = True, device: Any = None) -> Tensor:
    """The values in a dtype."""
    found = cast(x, dtype_of(dtype))
    found = found if device is None else found.to(device)
    return found.clone() if copy and found is x else found


class Info:
    """`__array_namespace_info__`: what this namespace can do."""

    def capabilities(self) -> dict[str, Any]:
        """Optional behaviour."""
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": 64}

    def default_device(self) -> str:
        """Where new arrays live."""
        return get_default_device()

    def default_dtypes(self, *, device: Any = None) -> dict[str, DType]:
        """The dtype of each kind that is taken unless one is named."""
        return {"real floating": float32, "integral": int64, "indexing": int64}

    def devices(self) -> list[str]:
        """Devices of this process."""
        return list(dict.fromkeys([HOST, get_default_device()]))

    def dtypes(self, *, device: Any = None, kind: Any = None) -> dict[str, DType]:
        """Dtypes by name, of a kind or of several."""
        if kind is None:
            kind = ("bool", "numeric")
        if isinstance(kind, tuple):
            return {n: d for k in kind for n, d in self.dtypes(kind=k).items()}
        return {d.name: d for d in KINDS[kind]}


def __array_namespace_info__() -> Info:
    return Info()


# ---- creation -------------------------------------------------------------------------------


def asarray(obj: Any, /, *, dtype: Any = None, device: Any = None, copy: Any = None) -> Tensor:
    """A Tensor of an array, a nested sequence or a number."""
    if copy is False and not isinstance(obj, Tensor):
        found = _shared(obj)
    elif isinstance(obj, Tensor):
        found = obj.clone() if copy else obj
    else:
        found = lift(obj) if dtype is None else creation.tensor(obj, dtype=dtype)
    found = found if dtype is None else cast(found, dtype_of(dtype))
    return found if device is None else found.to(device)


def from_dlpack(x: Any, /, *, device: Any = None, copy: Any = None) -> Tensor:
    """A Tensor that shares memory with another library's array."""
    found = _shared(x)
    found = found.clone() if copy else found
    return found if device is None else found.to(device)


def _shape(shape: Any) -> tuple[int, ...]:
    return (shape,) if is_one(shape) else tuple(shape)


def zeros(shape: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
    """Zeros."""
    return creation.zeros(*_shape(shape), dtype=dtype, device=device)


def ones(shape: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
    """Ones."""
    return creation.ones(*_shape(shape), dtype=dtype, device=device)


def empty(shape: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
    """Any values."""
    return creation.empty(*_shape(shape), dtype=dtype, device=device)


def full(shape: Any, fill_value: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
    """One value everywhere."""
    return creation.full(_shape(shape), fill_value, dtype=dtype, device=device)


def zeros_like(x: Tensor, /, *, dtype: Any = None, device: Any = None) -> Tensor:
    """Zeros in the shape of x."""
    return zeros(x.shape, dtype=dtype or x.dtype, device=device)


def ones_like(x: Tensor, /, *, dtype: Any = None, device: Any = None) -> Tensor:
    """Ones in the shape of x."""
    return ones(x.shape, dtype=dtype or x.dtype, device=device)


def empty_like(x: Tensor, /, *, dtype: Any = None, device: Any = None) -> Tensor:
    """Any values in the shape of x."""
    return empty(x.shape, dtype=dtype or x.dtype, device=device)


def full_like(x: Tensor, /, fill_value: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
    """One value in the shape of x."""
    return full(x.shape, fill_value, dtype=dtype or x.dtype, device=device)


def arange(
    start: Any, /, stop: Any = None, step: Any = 1, *, dtype: Any = None, device: Any = None
) -> Tensor:
    """start, start + step, ... before stop; none where stop lies behind."""
    begin, end = (0, start) if stop is None else (start, stop)
    if (end - begin) * step <= 0:
        kinds = [isinstance(v, float) for v in (begin, end, step)]
        return empty((0,), dtype=dtype or (float32 if builtins.any(kinds) else int64))
    return creation.arange(begin, end, step, dtype=dtype, device=device)


def linspace(
    start: Any,
    stop: Any,
    /,
    num: int,
    *,
    dtype: Any = None,
    device: Any = None,
    endpoint: builtins.bool = True,
) -> Tensor:
    """`num` numbers from start to stop, which is left out if not endpoint."""
    count = num if endpoint else num + 1
    return creation.linspace(start, stop, count, dtype=dtype, device=device)[:num]


def eye(
    n_rows: int, n_cols: int | None = None, /, *, k: int = 0, dtype: Any = None, device: Any = None
) -> Tensor:
    """Ones on the k-th diagonal."""
    columns = n_rows if n_cols is None else n_cols
    found = creation.arange(columns) == creation.arange(n_rows).unsqueeze(-1) + k
    found = cast(found, float32 if dtype is None else dtype_of(dtype))
    return found if device is None else found.to(device)


def meshgrid(*arrays: Tensor, indexing: str = "xy") -> tuple[Tensor, ...]:
    """Coordinates of a grid."""
    return tuple(creation.meshgrid(*arrays, indexing=indexing))


def tril(x: Tensor, /, *, k: int = 0) -> Tensor:
    """The part on and below a diagonal."""
    return creation.tril(x, k)


def triu(x: Tensor, /, *, k: int = 0) -> Tensor:
    """The part on and above a diagonal."""
    return creation.triu(x, k)


# ---- elementwise ----------------------------------------------------------------------------

abs, negative, positive, square = maths.abs_, maths.neg, maths.positive, maths.square
ceil, floor, trunc, round = maths.ceil, maths.floor, maths.trunc, maths.round_
acos, acosh, asin, asinh, atan, atanh = (
    maths.acos,
    maths.acosh,
    maths.asin,
    maths.asinh,
    maths.atan,
    maths.atanh,
)
cos, cosh, sin, sinh, tan, tanh = (
    maths.cos,
    maths.cosh,
    maths.sin,
    maths.sinh,
    maths.tan,
    maths.tanh,
)
exp, expm1, log, log1p, log2, log10 = (
    maths.exp,
    maths.expm1,
    maths.log,
    maths.log1p,
    maths.log2,
    maths.log10,
)
sqrt, reciprocal = maths.sqrt, maths.reciprocal
isfinite, isinf, isnan, signbit = (compare.isfinite, compare.isinf, compare.isnan, compare.signbit)
logical_and, logical_or, logical_xor, logical_not = (
    compare.logical_and,
    compare.logical_or,
    compare.logical_xor,
    compare.logical_not,
)
bitwise_and, bitwise_or, bitwise_xor, bitwise_invert = (
    compare.bitwise_and,
    compare.bitwise_or,
    compare.bitwise_xor,
    compare.bitwise_not,
)
bitwise_left_shift, bitwise_right_shift = (compare.bitwise_left_shift, compare.bitwise_right_shift)
equal, not_equal, less, less_equal, greater, greater_equal = (
    compare.eq,
    compare.ne,
    compare.lt,
    compare.le,
    compare.gt,
    compare.ge,
)
add, subtract, multiply, divide = (
    elementwise.add,
    elementwise.sub,
    elementwise.mul,
    elementwise.div,
)
pow, floor_divide, remainder = (elementwise.pow, elementwise.floor_divide, elementwise.remainder)
maximum, minimum, atan2, copysign, hypot, logaddexp = (
    elementwise.maximum,
    elementwise.minimum,
    elementwise.atan2,
    elementwise.copysign,
    elementwise.hypot,
    elementwise.logaddexp,
)


def where(condition: Tensor, x1: Any, x2: Any, /) -> Tensor:
    """x1 where the condition holds, else x2."""
    return elementwise.where(condition, x1, x2)


def sign(x: Tensor, /) -> Tensor:
    """-1, 0 or 1; nan of nan."""
    found = maths.sign(x)
    return pick(x != x, x, found) if x.dtype.is_float else found


def clip(x: Tensor, /, min: Any = None, max: Any = None) -> Tensor:
    """x within bounds, in its own dtype."""
    if min is None and max is None:
        return x.clone()
    return cast(elementwise.clamp(x, min, max), x.dtype)


def conj(x: Tensor, /) -> Tensor:
    """x: all numbers are real."""
    return lift(x)


def real(x: Tensor, /) -> Tensor:
    """x: all numbers are real."""
    return lift(x)


def imag(x: Tensor, /) -> Tensor:
    """Refused: there is no complex dtype."""
    raise DTypeError(
        "there is no complex dtype", op="imag", expected="complex numbers", got=lift(x).dtype
    )


def nextafter(x1: Any, x2: Any, /) -> Tensor:
    """The next float after x1 in the direction of x2."""
    a, b = movement.broadcast_tensors(lift(x1), lift(x2))
    dtype = result_type(a, b)
    a, b = cast(a, dtype), cast(b, dtype)
    whole = int32 if dtype.bits == 32 else int64
    bits = bitcast(a, whole)
    away = (a < b) == (a > 0)  # the size grows: bits of a float are ordered like its size
    step = bits + cast(pick(away, 1, -1), whole)
    least = bitcast(creation.full((), 1, dtype=whole), dtype)
    found = pick(a == 0, elementwise.copysign(least, b), bitcast(step, dtype))
    return pick(isnan(a) | isnan(b), a + b, pick(a == b, b, found))


# ---- reductions -----------------------------------------------------------------------------


def _total(x: Tensor, dtype: Any) -> DType:
    """The dtype of a sum: integers grow to 64 bits and keep their kind."""
    if dtype is not None:
        return dtype_of(dtype)
    if x.dtype.is_float:
        return x.dtype
    return uint64 if x.dtype.kind == "uint" else int64


def sum(
    x: Tensor, /, *, axis: Axis = None, dtype: Any = None, keepdims: builtins.bool = False
) -> Tensor:
    """The sum over axes."""
    return reduce.sum_(x, axis, keepdims, dtype=_total(x, dtype))


def prod(
    x: Tensor, /, *, axis: Axis = None, dtype: Any = None, keepdims: builtins.bool = False
) -> Tensor:
    """The product over axes."""
    found, wanted = cast(x, _total(x, dtype)), _total(x, dtype)
    axes = _axes(found, axis)
    for one in sorted(axes, reverse=True):
        found = reduce.prod(found, one, True, dtype=wanted)
    return found if keepdims else found.squeeze(axes) if axes else found


def _axes(x: Tensor, axis: Axis) -> tuple[int, ...]:
    if axis is None:
        return tuple(range(x.ndim))
    given: Any = (axis,) if is_one(axis) else axis
    return tuple(build.axis_of(x.node, a, "axis") for a in given)


def max(x: Tensor, /, *, axis: Axis = None, keepdims: builtins.bool = False) -> Tensor:
    """The largest over axes."""
    return reduce.amax(x, _axes(x, axis), keepdims) if x.ndim else x


def min(x: Tensor, /, *, axis: Axis = None, keepdims: builtins.bool = False) -> Tensor:
    """The smallest over axes."""
    return reduce.amin(x, _axes(x, axis), keepdims) if x.ndim else x


def mean(x: Tensor, /, *, axis: Axis = None, keepdims: builtins.bool = False) -> Tensor:
    """The mean over axes."""
    return reduce.mean(x, axis, keepdims)


def var(
    x: Tensor, /, *, axis: Axis = None, correction: float = 0.0, keepdims: builtins.bool = False
) -> Tensor:
    """The variance over axes."""
    return reduce.var(x, axis, keepdim=keepdims, correction=correction)


def std(
    x: Tensor, /, *, axis: Axis = None, correction: float = 0.0, keepdims: builtins.bool = False
) -> Tensor:
    """The standard deviation over axes."""
    return reduce.std(x, axis, keepdim=keepdims, correction=correction)


def all(x: Tensor, /, *, axis: Axis = None, keepdims: builtins.bool = False) -> Tensor:
    """Whether all elements over axes are nonzero."""
    return reduce.all_(cast(x, bool), axis, keepdims)


def any(x: Tensor, /, *, axis: Axis = None, keepdims: builtins.bool = False) -> Tensor:
    """Whether an element over axes is nonzero."""
    return reduce.any_(cast(x, bool), axis, keepdims)


def count_nonzero(x: Tensor, /, *, axis: Axis = None, keepdims: builtins.bool = False) -> Tensor:
    """How many elements over axes are nonzero."""
    return sum(cast(x != 0, int64), axis=axis, keepdims=keepdims)


def argmax(x: Tensor, /, *, axis: int | None = None, keepdims: builtins.bool = False) -> Tensor:
    """Where the first largest is."""
    return reduce.argmax(x, axis, keepdims)


def argmin(x: Tensor, /, *, axis: int | None = None, keepdims: builtins.bool = False) -> Tensor:
    """Where the first smallest is."""
    return reduce.argmin(x, axis, keepdims)


def cumulative_sum(
    x: Tensor,
    /,
    *,
    axis: int | None = None,
    dtype: Any = None,
    include_initial: builtins.bool = False,
) -> Tensor:
    """Running sums along an axis."""
    return _running(x, axis, dtype, include_initial, cumulative.cumsum, 0)


def cumulative_prod(
    x: Tensor,
    /,
    *,
    axis: int | None = None,
    dtype: Any = None,
    include_initial: builtins.bool = False,
) -> Tensor:
    """Running products along an axis."""
    return _running(x, axis, dtype, include_initial, cumulative.cumprod, 1)


def _running(
    x: Tensor, axis: int | None, dtype: Any, initial: builtins.bool, function: Any, first: int
) -> Tensor:
    if axis is None:
        if x.ndim > 1:
            raise ShapeError(
                "needs an axis", op="cumulative", expected="axis=", got=build.show(x.shape)
            )
        x, axis = x.reshape(-1), 0
    wanted = _total(x, dtype)
    found = function(cast(x, wanted), axis, dtype=wanted)
    if not initial:
        return found
    shape = list(found.shape)
    shape[axis] = 1
    return movement.cat([full(shape, first, dtype=wanted), found], axis)


def diff(
    x: Tensor,
    /,
    *,
    axis: int = -1,
    n: int = 1,
    prepend: Tensor | None = None,
    append: Tensor | None = None,
) -> Tensor:
    """Differences of neighbours along an axis, n times."""
    parts = [p for p in (prepend, x, append) if p is not None]
    found = movement.cat(parts, axis) if len(parts) > 1 else x
    for _ in range(n):
        count = found.shape[axis]
        after, before = found.narrow(axis, 1, count - 1), found.narrow(axis, 0, count - 1)
        found = after != before if found.dtype is bool else after - before
    return found


# ---- movement -------------------------------------------------------------------------------


def broadcast_to(x: Tensor, /, shape: Any) -> Tensor:
    """x repeated to a shape."""
    return movement.broadcast_to(x, tuple(shape))


def stack(arrays: Any, /, *, axis: int = 0) -> Tensor:
    """Arrays side by side along a new axis."""
    return movement.stack(_common(*arrays), axis)


def broadcast_shapes(*shapes: Any) -> tuple[int, ...]:
    """The shape that all shapes broadcast to."""
    return tuple(movement.broadcast_shapes(*shapes))  # type: ignore[arg-type]


def broadcast_arrays(*arrays: Tensor) -> tuple[Tensor, ...]:
    """Arrays repeated to one shape."""
    return tuple(movement.broadcast_tensors(*arrays))


def concat(arrays: Any, /, *, axis: int | None = 0) -> Tensor:
    """Arrays one after the other along an axis, or flat."""
    wanted = result_type(*arrays)
    parts = [cast(a, wanted) for a in arrays]
    if axis is None:
        return movement.cat([p.reshape(-1) for p in parts], 0)
    return movement.cat(parts, axis)


def expand_dims(x: Tensor, /, axis: int = 0) -> Tensor:
    """A new axis of size 1."""
    return movement.unsqueeze(x, axis)


def squeeze(x: Tensor, /, axis: Any) -> Tensor:
    """Without axes of size 1; another size is an error."""
    axes = _axes(x, axis)
    if builtins.any(x.shape[a] != 1 for a in axes):
        raise ShapeError(
            "an axis is not of size 1",
            op="squeeze",
            expected=f"size 1 at {axes}",
            got=build.show(x.shape),
        )
    return movement.squeeze(x, axes)


def flip(x: Tensor, /, *, axis: Any = None) -> Tensor:
    """The axes reversed."""
    axes = _axes(x, axis)
    return movement.flip(x, axes) if axes else x


def moveaxis(x: Tensor, source: Any, destination: Any, /) -> Tensor:
    """Axes in other places."""
    return movement.movedim(x, source, destination)


def permute_dims(x: Tensor, /, axes: Any) -> Tensor:
    """The axes in another order."""
    return movement.permute(x, *axes)


def matrix_transpose(x: Tensor, /) -> Tensor:
    """The last two axes swapped."""
    return movement.swapaxes(x, -1, -2)


def reshape(x: Tensor, /, shape: Any, *, copy: Any = None) -> Tensor:
    """The elements in order under another shape."""
    return movement.reshape(x, tuple(shape))


def roll(x: Tensor, /, shift: Any, *, axis: Any = None) -> Tensor:
    """Elements moved along axes, those at the end to the front."""
    if isinstance(axis, tuple) and is_one(shift):
        shift = (shift,) * len(axis)
    return movement.roll(x, shift, axis)


def repeat(x: Tensor, repeats: Any, /, *, axis: int | None = None) -> Tensor:
    """Each element several times."""
    return movement.repeat_interleave(x, repeats, axis)


def tile(x: Tensor, repetitions: Any, /) -> Tensor:
    """The whole array several times along each axis."""
    return movement.tile(x, *repetitions) if len(repetitions) else x


def unstack(x: Tensor, /, *, axis: int = 0) -> tuple[Tensor, ...]:
    """The slices along an axis."""
    return tuple(movement.unbind(x, axis))


# ---- products -------------------------------------------------------------------------------


def _common(*arrays: Tensor) -> list[Tensor]:
    wanted = result_type(*arrays)
    return [cast(a, wanted) for a in arrays]


def matmul(x1: Tensor, x2: Tensor, /) -> Tensor:
    """The product of matrices in the last two axes."""
    return _matmul(*_common(x1, x2))


def tensordot(x1: Tensor, x2: Tensor, /, *, axes: Any = 2) -> Tensor:
    """The last axes of x1 contracted with the first of x2, or those named."""
    a, b = _common(x1, x2)
    return _tensordot(a, b, axes)


def vecdot(x1: Tensor, x2: Tensor, /, *, axis: int = -1) -> Tensor:
    """The sum of products along an axis."""
    a, b = _common(x1, x2)
    return reduce.sum_(a * b, axis, dtype=a.dtype)


# ---- searching, sorting, sets ---------------------------------------------------------------


def sort(
    x: Tensor, /, *, axis: int = -1, descending: builtins.bool = False, stable: builtins.bool = True
) -> Tensor:
    """The elements in order along an axis."""
    return sorting.sort(x, axis, descending)[0]


def argsort(
    x: Tensor, /, *, axis: int = -1, descending: builtins.bool = False, stable: builtins.bool = True
) -> Tensor:
    """Where the elements in order are."""
    return sorting.argsort(x, axis, descending)


def nonzero(x: Tensor, /) -> tuple[Tensor, ...]:
    """Places of nonzero elements, an array for each axis."""
    return tuple(select.nonzero(x, as_tuple=True))


def searchsorted(x1: Tensor, x2: Any, /, *, side: str = "left", sorter: Any = None) -> Tensor:
    """Where x2 would be put into the sorted x1."""
    known = x1 if sorter is None else x1.take(sorter)
    return sorting.searchsorted(known, lift(x2), side=side)


def isin(x1: Any, x2: Any, /, *, invert: builtins.bool = False) -> Tensor:
    """Whether each element of x1 is one of x2."""
    found = sorting.isin(lift(x1), lift(x2))
    return compare.logical_not(found) if invert else found


def take(x: Tensor, indices: Tensor, /, *, axis: int | None = None) -> Tensor:
    """Elements along an axis by number."""
    at = 0 if axis is None else build.axis_of(x.node, axis, "take")
    found = x.index_select(at, indices.reshape(-1))
    return found.reshape(*x.shape[:at], *indices.shape, *x.shape[at + 1 :])


def take_along_axis(x: Tensor, indices: Tensor, /, *, axis: int = -1) -> Tensor:
    """Elements by number, of each line along an axis."""
    return select.take_along_dim(x, indices, axis)


class UniqueAll(NamedTuple):
    """Distinct values, where each first is, which each element has, how many have it."""

    values: Tensor
    indices: Tensor
    inverse_indices: Tensor
    counts: Tensor


class UniqueCounts(NamedTuple):
    """Distinct values and how many elements have each."""

    values: Tensor
    counts: Tensor


class UniqueInverse(NamedTuple):
    """Distinct values and which each element has."""

    values: Tensor
    inverse_indices: Tensor


def unique_all(x: Tensor, /) -> UniqueAll:
    """Distinct values in order, first places, inverse and counts."""
    values, inverse, counts = sorting.unique(x, return_inverse=True, return_counts=True)
    positions = creation.arange(x.numel())
    first = creation.full(values.shape, x.numel(), dtype=int64)
    first = select.scatter_reduce(first, 0, inverse.reshape(-1), positions, "amin")
    return UniqueAll(values, first, inverse.reshape(x.shape), counts)


def unique_counts(x: Tensor, /) -> UniqueCounts:
    """Distinct values in order, and counts."""
    return UniqueCounts(*sorting.unique(x, return_counts=True))


def unique_inverse(x: Tensor, /) -> UniqueInverse:
    """Distinct values in order, and which each element has."""
    values, inverse = sorting.unique(x, return_inverse=True)
    return UniqueInverse(values, inverse.reshape(x.shape))


def unique_values(x: Tensor, /) -> Tensor:
    """Distinct values in order."""
    return sorting.unique(x)

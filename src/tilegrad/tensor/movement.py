"""Movement: the same elements under other shapes, orders and repetitions.

Invariant: nothing here computes; every function is made of movement ops of the Graph, which
cost nothing by themselves. There are no views: writing to a result never changes its source.
The file is long because it has one short function for each name of torch's.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.dtype import DType, dtype_of
from ..core.errors import AxisError, DTypeError, ShapeError, UserError
from ..graph import build
from ..ir.requirement import require
from ..ir.symbol import Expr, Size
from ..ir.types import product
from ..ir.whole import is_one, whole, wholes
from .numpy_names import numpy_names
from .tensor import Tensor, call, lift, method, node_of, wrap

# ---- arguments ------------------------------------------------------------------------------


def sizes_of(op: str, sizes: tuple[Any, ...]) -> tuple[Size, ...]:
    """Sizes given one by one or as one sequence."""
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = tuple(sizes[0])
    return tuple([whole(s, op, "a size") for s in sizes])


def axes_given(op: str, axes: tuple[Any, ...]) -> tuple[int, ...]:
    """Axes given one by one or as one sequence."""
    if len(axes) == 1 and isinstance(axes[0], (tuple, list)):
        axes = tuple(axes[0])
    return axes


# ---- shape ----------------------------------------------------------------------------------


@method()
def reshape(x: Any, *shape: Any) -> Tensor:
    """The same elements in row-major order under another shape; one size may be -1."""
    tensor = lift(x)
    sizes = sizes_of("reshape", shape)
    if any(isinstance(s, int) and s < -1 for s in sizes):
        raise ShapeError(
            "a size is negative", op="reshape", expected="sizes >= 0, one -1", got=build.show(sizes)
        )
    return wrap(build.reshape(node_of(tensor), sizes), tensor)


@method()
def view(self: Tensor, *shape: Any) -> Tensor:
    """`reshape`, or with a dtype the same bits read as that."""
    if len(shape) == 1 and (isinstance(shape[0], (DType, str)) or "dtype" in repr(type(shape[0]))):
        from .convert import bitcast

        return bitcast(self, dtype_of(shape[0]))
    return reshape(self, *shape)


@method()
def view_as(self: Tensor, other: Tensor) -> Tensor:
    """The elements under another Tensor's shape."""
    return reshape(self, other.shape)


@method()
def reshape_as(self: Tensor, other: Tensor) -> Tensor:
    """The elements under another Tensor's shape."""
    return reshape(self, other.shape)


@method()
def contiguous(self: Tensor) -> Tensor:
    """The Tensor itself: layout is the compiler's business."""
    return self


@method()
def squeeze(x: Any, dim: Any = None) -> Tensor:
    """Axes of size 1 removed: all of them, or those named."""
    tensor = lift(x)
    named = build.axes_of(tensor.node, dim, "squeeze")
    gone = [a for a in named if isinstance(tensor.shape[a], int) and tensor.shape[a] == 1]
    return call(build.squeeze, tensor, axes=gone)


@method()
def unsqueeze(x: Any, dim: int) -> Tensor:
    """A new axis of size 1."""
    return call(build.unsqueeze, lift(x), axis=dim)


@method()
def flatten(x: Any, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """The axes from start to end joined into one."""
    tensor = lift(x)
    if not tensor.shape:
        return reshape(tensor, 1)
    first = build.axis_of(tensor.node, start_dim, "flatten")
    last = build.axis_of(tensor.node, end_dim, "flatten")
    if first > last:
        raise AxisError(
            "the axes are in the wrong order",
            op="flatten",
            expected="start_dim <= end_dim",
            got=(start_dim, end_dim),
        )
    shape = tensor.shape
    return reshape(tensor, *shape[:first], product(shape[first : last + 1]), *shape[last + 1 :])


@method()
def ravel(x: Any) -> Tensor:
    """All axes joined into one."""
    return reshape(lift(x), -1)


@method()
def unflatten(x: Any, dim: int, sizes: Sequence[Size]) -> Tensor:
    """One axis cut into several; one size may be -1."""
    tensor = lift(x)
    axis = build.axis_of(tensor.node, dim, "unflatten")
    sizes = wholes(sizes, "unflatten", "a size")
    known = [s for s in sizes if not (isinstance(s, int) and s == -1)]
    total, rest = tensor.shape[axis], product(tuple(known))
    full = [total // rest if isinstance(s, int) and s == -1 else s for s in sizes]
    require(
        product(tuple(full)) - total,
        ShapeError,
        "the sizes do not make the axis",
        op="unflatten",
        expected="sizes with product {total}",
        got="{sizes}",
        exact=True,
        total=total,
        sizes=sizes,
    )
    return reshape(tensor, *tensor.shape[:axis], *full, *tensor.shape[axis + 1 :])


# ---- order ----------------------------------------------------------------------------------


@method()
def permute(x: Any, *dims: Any) -> Tensor:
    """Axes in another order."""
    return call(build.permute, lift(x), order=axes_given("permute", dims))


@method("transpose", "swapaxes", "swapdims")
def transpose(x: Any, dim0: int, dim1: int) -> Tensor:
    """Two axes swapped."""
    tensor = lift(x)
    if not tensor.shape and {whole(d, "transpose", "axis") for d in (dim0, dim1)} <= {0, -1}:
        return tensor
    return call(build.transpose, tensor, a=dim0, b=dim1)


swapaxes = swapdims = transpose


@method()
def t(x: Any) -> Tensor:
    """A matrix transposed; at most 2 axes."""
    tensor = lift(x)
    if tensor.ndim > 2:
        raise ShapeError(
            "needs at most 2 axes",
            op="t",
            expected="ndim <= 2",
            got=build.show(tensor.shape),
            hint="use x.mT or x.transpose",
        )
    return transpose(tensor, 0, 1) if tensor.ndim == 2 else tensor


@method("movedim", "moveaxis")
def movedim(x: Any, source: Any, destination: Any) -> Tensor:
    """Axes moved to other positions; the rest keep their order."""
    tensor = lift(x)
    pair = [wholes(a, "movedim", "axis") for a in (source, destination)]
    old, new = ([build.axis_of(tensor.node, a, "movedim") for a in axes] for axes in pair)
    if len(old) != len(new) or len(set(old)) != len(old) or len(set(new)) != len(new):
        raise AxisError(
            "source and destination do not match",
            op="movedim",
            expected="as many distinct axes in both",
            got=(source, destination),
        )
    rest = iter(a for a in range(tensor.ndim) if a not in old)
    placed = dict(zip(new, old))
    return permute(tensor, *[placed[i] if i in placed else next(rest) for i in range(tensor.ndim)])


moveaxis = movedim


@method()
def flip(x: Any, *axes: Any, dims: Any = None) -> Tensor:
    """Axes reversed, given one by one or as one sequence (also as `dims=`)."""
    given = axes if dims is None else wholes(dims, "flip", "axis")
    return call(build.flip, lift(x), axes=axes_given("flip", given))


@method()
def fliplr(x: Any) -> Tensor:
    """Axis 1 reversed."""
    return flip(x, 1)


@method()
def flipud(x: Any) -> Tensor:
    """Axis 0 reversed."""
    return flip(x, 0)


@method()
def roll(x: Any, shifts: Any, dims: Any = None) -> Tensor:
    """Elements moved along axes; what falls off comes back at the other end."""
    tensor = lift(x)
    if dims is None:
        return reshape(roll(reshape(tensor, -1), shifts, 0), tensor.shape)
    pair = [wholes(shifts, "roll", "a shift"), wholes(dims, "roll", "axis")]
    if len(pair[0]) != len(pair[1]):
        raise ShapeError(
            "needs a shift for each axis",
            op="roll",
            expected=f"{len(pair[1])} shifts",
            got=len(pair[0]),
        )
    for shift, dim in zip(*pair):
        axis = build.axis_of(tensor.node, dim, "roll")
        size = tensor.shape[axis]
        if isinstance(size, int) and size == 0:
            continue
        cut = (-shift) % size
        if not isinstance(cut, int) or cut:
            first, second = narrow(tensor, axis, cut, size - cut), narrow(tensor, axis, 0, cut)
            tensor = cat([first, second], axis)
    return tensor


@method()
def rot90(x: Any, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    """A plane of two axes turned by k quarter turns."""
    tensor = lift(x)
    first, second = (build.axis_of(tensor.node, d, "rot90") for d in dims)
    quarters = whole(k, "rot90", "k") % 4
    if quarters == 1:
        return transpose(flip(tensor, second), first, second)
    if quarters == 2:
        return flip(tensor, first, second)
    return flip(transpose(tensor, first, second), second) if quarters == 3 else tensor


# ---- repetition -----------------------------------------------------------------------------


@method()
def expand(x: Any, *sizes: Any) -> Tensor:
    """Axes of size 1 repeated, new ones added in front; -1 keeps a size."""
    tensor = lift(x)
    wanted = list(sizes_of("expand", sizes))
    extra = len(wanted) - tensor.ndim
    for i, size in enumerate(wanted):
        if isinstance(size, int) and size == -1 and i >= extra:
            wanted[i] = tensor.shape[i - extra]
    if extra < 0 or any(isinstance(s, int) and s < 0 for s in wanted):
        raise ShapeError(
            "cannot expand",
            op="expand",
            expected=f"at least {tensor.ndim} sizes",
            got=build.show(tuple(wanted)),
        )
    return wrap(build.broadcast_to(node_of(tensor), tuple(wanted), "expand"), tensor)


@method()
def expand_as(self: Tensor, other: Tensor) -> Tensor:
    """Expanded to another Tensor's shape."""
    return expand(self, other.shape)


@method()
def broadcast_to(x: Any, shape: Any) -> Tensor:
    """Repeated to a shape."""
    return expand(x, shape)


def broadcast_tensors(*tensors: Any) -> list[Tensor]:
    """Tensors repeated to their common shape."""
    found = [lift(x) for x in tensors]
    shape = build.broadcast_shapes("broadcast_tensors", *(x.shape for x in found))
    return [expand(x, shape) for x in found]


def broadcast_shapes(*shapes: Any) -> tuple[Size, ...]:
    """The common shape of shapes."""
    found = [wholes(s, "broadcast_shapes", "a size") for s in shapes]
    return build.broadcast_shapes("broadcast_shapes", *found)


@method()
def repeat(self: Tensor, *repeats: Any) -> Tensor:
    """The whole Tensor repeated along each axis; more counts than axes add axes in front."""
    counts = sizes_of("repeat", repeats)
    if len(counts) < self.ndim:
        raise ShapeError(
            "needs a count for each axis",
            op="repeat",
            expected=f"at least {self.ndim} counts",
            got=counts,
        )
    shape = (1,) * (len(counts) - self.ndim) + self.shape
    paired = tuple(itertools.chain.from_iterable(zip(itertools.repeat(1), shape)))
    wide = tuple(itertools.chain.from_iterable(zip(counts, shape)))
    result = expand(reshape(self, paired), wide)
    return reshape(result, tuple(c * s for c, s in zip(counts, shape)))


@method()
def tile(x: Any, *dims: Any) -> Tensor:
    """`repeat`, with missing counts 1."""
    tensor = lift(x)
    counts = sizes_of("tile", dims)
    return repeat(tensor, (1,) * (tensor.ndim - len(counts)) + counts)


@method()
def repeat_interleave(
    x: Any, repeats: Any, dim: int | None = None, *, output_size: int | None = None
) -> Tensor:
    """Each element repeated: so often, or as often as a Tensor or list says for its index."""
    tensor = lift(x)
    if dim is None:
        tensor, dim = reshape(tensor, -1), 0
    axis = build.axis_of(tensor.node, dim, "repeat_interleave")
    if isinstance(repeats, (int, Expr)):
        shape = tensor.shape
        wide = expand(unsqueeze(tensor, axis + 1), *shape[: axis + 1], repeats, *shape[axis + 1 :])
        return flatten(wide, axis, axis + 1)
    if isinstance(repeats, (list, tuple)):
        index = np.repeat(np.arange(len(repeats)), repeats)
        return tensor.index_select(axis, index)
    from .creation import arange
    from .sort import searchsorted

    ends = lift(repeats).expand(tensor.shape[axis]).cumsum(0)
    total = int(ends[-1]) if output_size is None else output_size
    return tensor.index_select(axis, searchsorted(ends, arange(total), right=True))


# ---- joining and cutting --------------------------------------------------------------------


@numpy_names
def cat(tensors: Sequence[Any], dim: int = 0) -> Tensor:
    """Tensors one after the other along an axis."""
    if isinstance(tensors, Tensor) or not isinstance(tensors, (list, tuple)):
        raise DTypeError(
            "needs a sequence of Tensors",
            op="cat",
            expected="list or tuple",
            got=type(tensors).__name__,
        )
    found = [lift(x) for x in tensors]
    if any(x.shape != (0,) for x in found):
        found = [x for x in found if x.shape != (0,)]  # as in PyTorch, these always fit
    return wrap(build.concatenate([node_of(x) for x in found], dim), *found)


concat = concatenate = cat


@numpy_names
def stack(tensors: Sequence[Any], dim: int = 0) -> Tensor:
    """Tensors of one shape along a new axis."""
    found = [lift(x) for x in tensors]
    for x in found:
        if x.shape != found[0].shape:
            raise ShapeError(
                "shapes differ",
                op="stack",
                expected=build.show(found[0].shape),
                got=build.show(x.shape),
            )
    return cat([unsqueeze(x, dim) for x in found], dim)


def _at_least(x: Any, rank: int) -> Tensor:
    tensor = lift(x)
    while tensor.ndim < rank:
        tensor = unsqueeze(tensor, -1 if tensor.ndim == 2 else 0)
    return tensor


def hstack(tensors: Sequence[Any]) -> Tensor:
    """Joined along axis 1, or axis 0 where there is no other."""
    found = [_at_least(x, 1) for x in tensors]
    return cat(found, 0 if found[0].ndim == 1 else 1)


def vstack(tensors: Sequence[Any]) -> Tensor:
    """Joined along axis 0, as rows."""
    return cat([_at_least(x, 2) for x in tensors], 0)


def dstack(tensors: Sequence[Any]) -> Tensor:
    """Joined along axis 2."""
    return cat([_at_least(x, 3) for x in tensors], 2)


@method()
def narrow(x: Any, dim: int, start: Any, length: Size) -> Tensor:
    """`length` elements of an axis from `start`, which may be a Tensor known only at run time."""
    tensor = lift(x)
    axis = build.axis_of(tensor.node, dim, "narrow")
    size, length = tensor.shape[axis], whole(length, "narrow", "length")
    if isinstance(start, Tensor):
        index = build.add(build.iota(length), build.cast(node_of(start), dtype_of("int64")))
        return tensor.index_select(axis, wrap(index))
    start = whole(start, "narrow", "start")
    begin = start + size if isinstance(start, int) and start < 0 else start
    for room in (begin, length, size - begin - length):
        require(
            room,
            AxisError,
            "reaches past the axis",
            op="narrow",
            expected="within 0..{size}",
            got="start {start}, length {length}",
            size=size,
            start=start,
            length=length,
        )
    return call(build.slice_axis, tensor, axis=axis, start=begin, stop=begin + length)


@method()
def split(x: Any, split_size: Any, dim: int = 0) -> tuple[Tensor, ...]:
    """Pieces of one size (the last may be smaller) or of the sizes listed."""
    tensor = lift(x)
    axis = build.axis_of(tensor.node, dim, "split")
    size = tensor.shape[axis]
    if is_one(split_size):
        split_size = whole(split_size, "split", "a size")
        if split_size <= 0 and size != 0:
            raise UserError("bad size", op="split", expected="a size > 0", got=split_size)
        count = max(1, -(-size // split_size)) if split_size else 1
        sizes = [split_size] * (count - 1) + [size - split_size * (count - 1)]
    else:
        sizes = list(wholes(split_size, "split", "a size"))
        require(
            sum(sizes) - size,
            ShapeError,
            "the sizes do not make the axis",
            op="split",
            expected="sizes that add up to {size}",
            got="{sizes}",
            exact=True,
            size=size,
            sizes=tuple(sizes),
        )
    starts = itertools.accumulate(sizes, initial=0)
    return tuple(narrow(tensor, axis, start, s) for start, s in zip(starts, sizes))


@method()
def chunk(x: Any, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """At most so many pieces of one size (the last may be smaller)."""
    tensor = lift(x)
    size = tensor.shape[build.axis_of(tensor.node, dim, "chunk")]
    chunks = whole(chunks, "chunk", "the count")
    if chunks < 1:
        raise UserError("bad count", op="chunk", expected="chunks >= 1", got=chunks)
    if isinstance(size, int) and size == 0:
        return split(tensor, [0] * chunks, dim)
    return (
        split(tensor, -(-size // chunks), dim)
        if isinstance(size, int)
        else split(tensor, [size // chunks] * chunks, dim)
    )


@method()
def tensor_split(x: Any, indices_or_sections: Any, dim: int = 0) -> tuple[Tensor, ...]:
    """Cut at indices, or into so many nearly equal pieces."""
    tensor = lift(x)
    size: Any = tensor.shape[build.axis_of(tensor.node, dim, "tensor_split")]
    if isinstance(indices_or_sections, Tensor):
        indices_or_sections = indices_or_sections.tolist()
    given = wholes(indices_or_sections, "tensor_split", "an index or a count")
    if is_one(indices_or_sections):
        (count,) = given
        if count < 1:
            raise ShapeError("no pieces", op="tensor_split", expected="1 or more", got=count)
        part, larger = divmod(size, count)
        return split(tensor, [part + int(i < larger) for i in range(count)], dim)
    cuts = [0, *(min(max(c + size if c < 0 else c, 0), size) for c in given), size]
    return tuple(narrow(tensor, dim, a, max(b - a, 0)) for a, b in itertools.pairwise(cuts))


@method()
def unbind(x: Any, dim: int = 0) -> tuple[Tensor, ...]:
    """The slices along an axis, which disappears."""
    tensor = lift(x)
    axis = build.axis_of(tensor.node, dim, "unbind")
    return tuple(select(tensor, axis, i) for i in range(tensor.shape[axis]))


@method()
def select(x: Any, dim: int, index: int) -> Tensor:
    """One slice along an axis, which disappears."""
    tensor = lift(x)
    axis = build.axis_of(tensor.node, dim, "select")
    return tensor[(slice(None),) * axis + (index,)]

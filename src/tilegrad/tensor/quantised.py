"""Quantised weights on Tensors: `pack` them for a device, multiply by them, take rows of them.

`pack` reads weights as files store them (rows of blocks of a Format) and repacks them once into
the parts that a device's kernels want, some rows at a time; they stay quantised. Several tensors
with the same columns and Format (q/k/v, gate/up) become one Packed whose rows follow one another,
so that they are one product. Pages of the source are handed back to the system after each tensor.
Invariant: weights are never expanded as a whole; beside the parts, `pack` needs memory for a
chunk of rows alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from ..compiler.dispatch import device as opened
from ..core.config import config
from ..core.dtype import DType, float32, int32
from ..core.errors import DTypeError, ShapeError, UserError
from ..core.format import Format
from ..core.target import Target
from ..graph import build, ops
from ..ir.symbol import Size, low, multiply
from ..ir.types import Tuple
from ..kernels.quantised.shape import QuantisedShape, padded
from ..runtime.buffer import Buffer
from ..tile.callee import KernelCallee
from .convert import cast
from .kernel import target_of
from .placement import default_device, use
from .realize import from_buffer
from .tensor import Tensor, lift, node_of, wrap

Array = np.ndarray[Any, Any]
CHUNK_BYTES = 1 << 20  # of the source that are repacked at a time
ALIGNED = 64


class StoredWeights(Protocol):
    """What `pack` takes: `exchange.Stored`, or anything with rows of a Format's bytes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, columns)."""

    @property
    def format(self) -> Format:
        """How rows are stored."""

    @property
    def raw(self) -> Array:
        """Bytes (rows, bytes of a row)."""

    def drop(self) -> None:
        """Let the system take back the pages of the source."""


class Packed:
    """Weights (rows, columns) of one Format, in the layout of a device's kernels."""

    def __init__(
        self, form: Format, shape: tuple[int, int], parts: dict[str, Tensor], device: str
    ) -> None:
        self.format, self.shape, self.parts, self.device = form, shape, parts, device

    def __repr__(self) -> str:
        rows, columns = self.shape
        return f"<packed {self.format} {rows} x {columns} on {self.device}>"

    @property
    def bytes(self) -> int:
        """Bytes of the parts."""
        return sum(t.numel() * t.dtype.size for t in self.parts.values())

    def tensors(self) -> dict[str, Tensor]:
        """The parts, for `jit`."""
        return dict(self.parts)

    def problem(self, tokens: Size, dtype: DType) -> QuantisedShape:
        """The product of so many tokens with these weights."""
        return QuantisedShape(self.format, *self.shape, tokens, dtype)


def kernels_of(target: Target) -> Any:
    """The kernel file of a kind of Target; see `kernels.quantised.shape`."""
    if target.kind == "gpu":
        from ..kernels.quantised import gpu as quantised_gpu

        return quantised_gpu
    from ..kernels.quantised import cpu as quantised_cpu

    return quantised_cpu


# ---- packing ------------------------------------------------------------------------------------


class Room:
    """Memory of a CPU for many Packed, in one piece: large pages hold it, which small ones would
    not have. What does not fit gets memory of its own."""

    def __init__(self, groups: Sequence[Sequence[StoredWeights]]) -> None:
        kernels = kernels_of(_target("cpu"))
        sizes = (_sizes(kernels.parts(_joint(group)))[1][-1] for group in groups)
        self.whole = Buffer.allocate(max(1, sum(sizes)), "packed weights")
        self.used = 0

    def take(self, bytes: int) -> Buffer:
        """So many bytes."""
        if self.used + bytes > self.whole.bytes:
            return Buffer.allocate(bytes, "packed weights")
        self.used += bytes
        return self.whole.part(self.used - bytes, bytes)


def pack(
    stored: StoredWeights | Sequence[StoredWeights], device: Any = None, room: Room | None = None
) -> Packed:
    """Weights of a file for a device; several become one, their rows one after another."""
    several = list(stored) if isinstance(stored, (list, tuple)) else [stored]
    shape = _joint(several)
    name = device_of(device)
    target = _target(name)
    kernels = kernels_of(target)
    _refuse("pack", kernels.why_not(shape, target), shape)
    places = _places(kernels.parts(shape), name, room)
    first = 0
    for raw in _chunks(several, kernels.ROWS, shape.row_bytes):
        for part, array in kernels.pack(shape.with_rows(len(raw)), raw).items():
            _write(places[part], first, padded(shape.rows, kernels.ROWS), array)
        first += len(raw)
    for one in several:
        one.drop()
    parts = {n: wrap(from_buffer(b, s, d)) for n, (b, s, d) in places.items()}
    return Packed(shape.format, (shape.rows, shape.columns), parts, name)


def device_of(device: Any = None) -> str:
    """The name of the device that weights are packed for."""
    return default_device() if device is None else use(device, "pack")


def why_not(stored: StoredWeights, device: Any = None) -> str:
    """Why `pack` cannot take weights; '' where it can."""
    if len(stored.shape) != 2:
        return "weights are (rows, columns)"
    target = _target(device_of(device))
    shape = QuantisedShape(stored.format, stored.shape[0], stored.shape[1])
    found: str = kernels_of(target).why_not(shape, target)
    return found


def _joint(several: Sequence[StoredWeights]) -> QuantisedShape:
    """The shape of some weights as one."""
    if not several:
        raise UserError("nothing to pack", op="pack", expected="a tensor of a file, or several")
    first = several[0]
    for one in several:
        if len(one.shape) != 2 or one.shape[1] != first.shape[1]:
            raise ShapeError(
                "weights do not fit together",
                op="pack",
                got=tuple(one.shape),
                expected=f"(rows, {first.shape[-1]})",
            )
        if one.format.name != first.format.name:
            raise DTypeError(
                "weights of different formats", op="pack", expected=first.format, got=one.format
            )
    return QuantisedShape(first.format, sum(s.shape[0] for s in several), first.shape[1])


def _sizes(parts: Sequence[tuple[str, tuple[int, ...], DType]]) -> tuple[list[int], list[int]]:
    """Bytes of each part, and where each begins; the last is the end."""
    sizes = [int(np.prod(s)) * d.size for _, s, d in parts]
    return sizes, np.cumsum([0, *(padded(s, ALIGNED) for s in sizes)]).tolist()


def _places(
    parts: Sequence[tuple[str, tuple[int, ...], DType]], device: str, room: Room | None
) -> dict[str, tuple[Buffer, tuple[int, ...], DType]]:
    """Room for all parts, in one piece."""
    sizes, starts = _sizes(parts)
    if device != "cpu":
        whole = opened(device).allocate(max(1, starts[-1]), "packed weights")
    elif room is None:
        whole = Buffer.allocate(max(1, starts[-1]), "packed weights")
    else:
        whole = room.take(starts[-1])
    return {
        name: (whole.part(start, size), shape, dtype)
        for (name, shape, dtype), start, size in zip(parts, starts, sizes)
    }


def _write(place: tuple[Buffer, tuple[int, ...], DType], row: int, rows: int, array: Array) -> None:
    """Put the part of some rows, from `row` of `rows` on, where it belongs."""
    buffer, shape, dtype = place
    first = row * shape[0] // rows
    if buffer.device == "cpu":
        buffer.array(shape, dtype.numpy)[first : first + len(array)] = array
        return
    each = buffer.bytes // shape[0]
    part = buffer.part(first * each, len(array) * each)
    opened(buffer.device).write(part, np.ascontiguousarray(array))


def _chunks(several: Sequence[StoredWeights], step: int, row_bytes: int) -> Iterator[Array]:
    """Rows of all weights in turn, a multiple of `step` at a time but for the last."""
    most = max(1, CHUNK_BYTES // max(1, row_bytes * step)) * step
    left = np.zeros((0, row_bytes), np.uint8)
    for one in several:
        raw, start = one.raw, 0
        if len(left):  # rows of the tensor before that make no whole step
            start = min(step - len(left), len(raw))
            left = np.concatenate([left, raw[:start]])
            if len(left) == step:
                yield left
                left = left[:0]
        whole = start + (len(raw) - start) // step * step
        for first in range(start, whole, most):
            yield raw[first : min(first + most, whole)]
        if whole < len(raw):
            left = raw[whole:].copy()
    if len(left):
        yield left


# ---- products -----------------------------------------------------------------------------------


def quantised_matmul(x: Any, packed: Packed) -> Tensor:
    """x (..., columns) times the transpose of packed weights: (..., rows) in x's dtype."""
    tensor = lift(x)
    if not tensor.ndim or tensor.shape[-1] != packed.shape[1]:
        raise ShapeError(
            "the sizes do not fit",
            op="quantised_matmul",
            expected=f"(..., {packed.shape[1]})",
            got=build.show(tensor.shape),
        )
    lead, tokens = tensor.shape[:-1], _count(tensor.shape[:-1])
    shape, target = packed.problem(tokens, tensor.dtype), _target(packed.device)
    _refuse("quantised_matmul", kernels_of(target).why_not(shape, target), shape)
    many = unpacked_from(tensor.dtype, packed.device)
    if many and low(tokens) >= many:
        unpacks = _unpack_callee(packed.problem(1, tensor.dtype), target)
        weights = ops.call(*(node_of(t) for t in packed.parts.values()), callee=unpacks)
        return tensor @ wrap(weights, tensor).transpose(0, 1)
    rows = node_of(tensor.reshape(tokens, packed.shape[1]))
    nodes = [node_of(t) for t in packed.parts.values()]
    made = ops.call(rows, *nodes, callee=_callee(shape, target))
    first = build.items(made)[0] if isinstance(made.type, Tuple) else made  # the rest is scratch
    return wrap(first, tensor).reshape(*lead, packed.shape[0])


def unpacked_from(dtype: DType, device: str) -> int:
    """Tokens from which a product unpacks its weights to scratch memory, and then is an ordinary
    one (docs/decisions/0026). 0 for never."""
    return kernels_of(_target(device)).MANY if dtype.bits == 16 else 0


def take_rows(packed: Packed, ids: Any, dtype: DType = float32) -> Tensor:
    """Rows of packed weights by number: ids (...) to (..., columns)."""
    index = lift(ids)
    if not index.dtype.is_integer:
        raise DTypeError("ids are not integers", op="take_rows", got=index.dtype)
    lead, tokens = index.shape, _count(index.shape)
    shape, target = packed.problem(tokens, dtype), _target(packed.device)
    _refuse("take_rows", kernels_of(target).why_not(shape, target), shape)
    flat = node_of(cast(index, int32).reshape(tokens))
    nodes = [node_of(t) for t in packed.parts.values()]
    made = wrap(ops.call(flat, *nodes, callee=_take_callee(shape, target)), index)
    return made.reshape(*lead, packed.shape[1])


def _count(sizes: Sequence[Size]) -> Size:
    return functools.reduce(multiply, sizes, 1)


def _target(device: str) -> Target:
    return target_of(device, config().threads)


def _refuse(op: str, why: str, shape: QuantisedShape) -> None:
    if why:
        raise UserError(f"no kernel takes this: {why}", op=op, got=str(shape))


@functools.lru_cache(maxsize=256)
def _callee(shape: QuantisedShape, target: Target) -> KernelCallee:
    return kernels_of(target).callee(shape, target)  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=64)
def _take_callee(shape: QuantisedShape, target: Target) -> KernelCallee:
    return kernels_of(target).take_callee(shape, target)  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=64)
def _unpack_callee(shape: QuantisedShape, target: Target) -> KernelCallee:
    return kernels_of(target).unpack_callee(shape, target)  # type: ignore[no-any-return]


__all__ = [
    "Packed",
    "Room",
    "device_of",
    "pack",
    "quantised_matmul",
    "take_rows",
    "unpacked_from",
    "why_not",
]

"""Conversions: dtype and device, the same bits read anew, history kept or left.

Invariant: a conversion never changes its Tensor; it gives another handle on a Node.
"""

from __future__ import annotations

from typing import Any

from ..core import dtype as dtypes
from ..core.dtype import DType, dtype_of, promote
from ..core.errors import DTypeError, UserError
from ..graph import build, ops
from .maths import cast
from .tensor import Tensor, lift, method, mode, operand, wrap

METHODS: dict[str, DType] = {
    "float": dtypes.float32, "double": dtypes.float64, "half": dtypes.float16,
    "bfloat16": dtypes.bfloat16, "int": dtypes.int32, "long": dtypes.int64,
    "short": dtypes.int16, "char": dtypes.int8, "byte": dtypes.uint8, "bool": dtypes.bool_,
}  # fmt: skip


def _converter(name: str, dtype: DType) -> Any:
    def run(self: Tensor) -> Tensor:
        return cast(self, dtype)

    run.__name__, run.__doc__ = name, f"The values as {dtype}."
    return run


for _name, _dtype in METHODS.items():
    setattr(Tensor, _name, _converter(_name, _dtype))


@method()
def to(self: Tensor, *targets: Any, dtype: Any = None, device: Any = None,
       copy: bool = False, non_blocking: bool = False) -> Tensor:  # fmt: skip
    """The Tensor in a dtype, on a device, or both as another Tensor's."""
    for target in targets:
        if isinstance(target, Tensor):
            dtype = target.dtype
        elif _names_device(target):
            device = target
        elif not isinstance(target, bool):
            dtype = target
    check_device(device, "to")
    return self if dtype is None else cast(self, dtype_of(dtype))


def _names_device(target: Any) -> bool:
    if isinstance(target, str):
        return target not in dtypes.BY_NAME and target not in dtypes.ALIASES
    return type(target).__name__ == "device"


def check_device(device: Any, op: str) -> None:
    """Refuse a device that this machine or this version does not have."""
    if device is not None and str(device).split(":")[0] != "cpu":
        raise UserError("no such device here", op=op, expected="cpu", got=str(device),
                        hint="`tilegrad doctor` shows what this machine has")  # fmt: skip


@method()
def cpu(self: Tensor) -> Tensor:
    """The Tensor on the CPU."""
    return self


@method()
def type_as(self: Tensor, other: Tensor) -> Tensor:
    """The values in another Tensor's dtype."""
    return cast(self, other.dtype)


@method("type")
def type_(self: Tensor, dtype: Any = None) -> Any:
    """The dtype, or the values in another one."""
    return self.dtype if dtype is None else cast(self, dtype_of(dtype))


@method()
def clone(self: Tensor) -> Tensor:
    """Another handle on the same value, with its history."""
    return wrap(operand(self), self)


def _later(name: str) -> Any:
    """A method that loads the derivatives when it is first called."""

    def run(self: Tensor, *args: Any, **options: Any) -> Any:
        from . import autograd

        return getattr(autograd, name)(self, *args, **options)

    return run


for _name in ("backward", "requires_grad_", "zero_grad"):
    setattr(Tensor, _name, _later(_name))


@method()
def is_floating_point(self: Tensor) -> bool:
    """Whether the elements are floats."""
    return self.dtype.is_float


@method()
def element_size(self: Tensor) -> int:
    """Bytes of one element."""
    return self.dtype.size


def bitcast(x: Any, dtype: Any) -> Tensor:
    """The same bits as another dtype; the last axis grows or shrinks with the width."""
    tensor, target = lift(x), dtype_of(dtype)
    source = tensor.dtype
    if source.bits == target.bits:
        return wrap(ops.bitcast(tensor.node, dtype=target))
    if not tensor.shape or 4 in (source.bits, target.bits):
        raise DTypeError("the widths differ", op="view", expected=f"{source.bits} bits",
                         got=f"{target} of {target.bits} bits")  # fmt: skip
    return _split(tensor, target) if source.bits > target.bits else _join(tensor, target)


def _unsigned(bits: int) -> DType:
    return dtypes.BY_NAME[f"uint{bits}"]


def _split(x: Tensor, target: DType) -> Tensor:
    count = x.dtype.bits // target.bits
    whole = ops.bitcast(x.node, dtype=_unsigned(x.dtype.bits))
    shifts = build.multiply(build.iota(count, whole.dtype), target.bits)
    parts = build.binary(ops.shift_right, build.unsqueeze(whole, -1), shifts)
    parts = build.cast(parts, _unsigned(target.bits))
    shape = (*x.shape[:-1], x.shape[-1] * count)
    return wrap(ops.bitcast(build.reshape(parts, shape), dtype=target))


def _join(x: Tensor, target: DType) -> Tensor:
    count = target.bits // x.dtype.bits
    if x.shape[-1] % count:
        raise DTypeError("the last axis does not fill whole elements", op="view",
                         expected=f"a multiple of {count}", got=x.shape[-1])  # fmt: skip
    wide = _unsigned(target.bits)
    parts = build.cast(ops.bitcast(x.node, dtype=_unsigned(x.dtype.bits)), wide)
    parts = build.reshape(parts, (*x.shape[:-1], x.shape[-1] // count, count))
    shifts = build.multiply(build.iota(count, wide), x.dtype.bits)
    whole = build.sum_(build.binary(ops.shift_left, parts, shifts), -1)
    return wrap(ops.bitcast(whole, dtype=target))


def result_type(a: Any, b: Any) -> DType:
    """The dtype of an elementwise op on both."""
    if isinstance(a, (Tensor, bool, int, float)) and isinstance(b, (Tensor, bool, int, float)):
        nodes = [operand(a), operand(b)]
        if not any(isinstance(v, Tensor) for v in (a, b)):
            nodes = [lift(a).node, lift(b).node]
        return build.promoted("result_type", *nodes)[0].dtype  # type: ignore[no-any-return]
    return promote(dtype_of(a), dtype_of(b))


def promote_types(a: Any, b: Any) -> DType:
    """The dtype two dtypes promote to."""
    return promote(dtype_of(a), dtype_of(b))


def is_grad_enabled() -> bool:
    """Whether derivatives are recorded now."""
    return mode.grad_enabled

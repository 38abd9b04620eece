"""Conversions: dtype and device, the same bits read anew, history kept or left.

Invariant: a conversion never changes its Tensor; it gives another handle on a Node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core import dtype as dtypes
from ..core.dtype import DType, dtype_of, promote
from ..core.errors import DTypeError, UserError, meant
from ..graph import build, ops
from ..ir.node import Node
from ..runtime.buffer import HOST
from ..runtime.device import KINDS
from .maths import cast
from .placement import default_device, device_name, elsewhere, moved, settled, use
from .tensor import (
    Tensor,
    compute,
    from_buffer,
    grad_mode,
    lift,
    method,
    mode,
    operand,
    own_node,
    values,
    wrap,
)

if TYPE_CHECKING:
    from contextlib import _GeneratorContextManager

METHODS: dict[str, DType] = {
    "float": dtypes.float32,
    "double": dtypes.float64,
    "half": dtypes.float16,
    "bfloat16": dtypes.bfloat16,
    "int": dtypes.int32,
    "long": dtypes.int64,
    "short": dtypes.int16,
    "char": dtypes.int8,
    "byte": dtypes.uint8,
    "bool": dtypes.bool_,
}


def _converter(name: str, dtype: DType) -> Any:
    def run(self: Tensor) -> Tensor:
        return cast(self, dtype)

    run.__name__, run.__doc__ = name, f"The values as {dtype}."
    return run


for _name, _dtype in METHODS.items():
    setattr(Tensor, _name, _converter(_name, _dtype))


@method()
def to(
    self: Tensor,
    *targets: Any,
    dtype: Any = None,
    device: Any = None,
    copy: bool = False,
    non_blocking: bool = False,
) -> Tensor:
    """The Tensor in a dtype, on a device, or both as another Tensor's."""
    for target in targets:
        if isinstance(target, Tensor):
            dtype, device = target.dtype, target.device if elsewhere() else None
        elif names_device(target):
            device = target
        elif not isinstance(target, bool):
            dtype = target
    found = self if dtype is None else cast(self, dtype_of(dtype))
    return found if device is None else _on(found, device, "to")


def _on(x: Tensor, device: Any, op: str) -> Tensor:
    """The Tensor on a device; a leaf that collects gradients gives a leaf."""
    name = device_name(device, op)
    if not elsewhere() and name == HOST:
        return x
    if mode.trace is not None:
        node = place(x.node, name, op)
        return x if node is x.node else wrap(node, x)
    if x._requires_grad and mode.grad_enabled and not x.is_leaf and name != x.device:
        raise UserError(
            "derivatives do not go from one device to another",
            op=op,
            expected="a leaf, or a Tensor that needs no gradient",
            got=f"a computed Tensor on {x.device}",
            hint="move inputs and parameters before computing, or move x.detach()",
        )
    node = place(x.node, name, op)
    if node is x.node:
        return x
    result = wrap(node)
    if x._requires_grad:
        result.requires_grad = True
    return result


def settle(node: Any, data: Any, device: Any) -> Any:
    """The Node of a new Tensor: data goes to the device named, or else to the default one."""
    buffer = values.get(node)
    if buffer is not None and not isinstance(data, (Node, Tensor)):
        name = default_device() if device is None else use(device, "Tensor")
        buffer = values[node] = moved(buffer, name)
        buffer.adapts = False
    elif device is not None:
        return place(node, device, "Tensor")
    return node


def place(node: Node, device: Any, op: str) -> Node:
    """The value of a Node on a device: computed there if it is free to be, else copied there."""
    name = use(device, op)
    trace = mode.trace
    if trace is not None:
        return build.transfer(node, trace.device_of(node), name)
    if node not in values and not settled([node]):
        return own_node(node, name)
    if node not in values:
        compute([node])
    buffer = values[node]
    if buffer.device == name and not buffer.adapts:
        return node
    buffer = moved(buffer, name)
    buffer.adapts = False
    return from_buffer(buffer, node.shape, node.dtype)


def names_device(target: Any) -> bool:
    """Whether what `to` was given is a device, and no dtype."""
    if isinstance(target, str):
        known = [*dtypes.BY_NAME, *dtypes.ALIASES]
        named = KINDS.has(target.partition(":")[0])
        return target not in known and (named or meant(target, known) is None)
    return type(target).__name__ == "device"


@method()
def cpu(self: Tensor) -> Tensor:
    """The Tensor on the CPU."""
    return _on(self, HOST, "cpu")


@method()
def cuda(self: Tensor, device: Any = None) -> Tensor:
    """The Tensor on a GPU, the first one by default."""
    number = device if isinstance(device, int) else None
    name = "cuda" if device is None else device
    return _on(self, name if number is None else f"cuda:{number}", "cuda")


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


for _name in ("backward", "register_hook", "requires_grad_", "retain_grad", "zero_grad"):
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
        raise DTypeError(
            "the widths differ",
            op="view",
            expected=f"{source.bits} bits",
            got=f"{target} of {target.bits} bits",
        )
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
        raise DTypeError(
            "the last axis does not fill whole elements",
            op="view",
            expected=f"a multiple of {count}",
            got=x.shape[-1],
        )
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
        return build.promoted("result_type", *nodes)[0].dtype
    return promote(dtype_of(a), dtype_of(b))


def promote_types(a: Any, b: Any) -> DType:
    """The dtype two dtypes promote to."""
    return promote(dtype_of(a), dtype_of(b))


class FloatInfo:
    """What a float dtype can hold: `tilegrad.finfo`."""

    def __init__(self, dtype: Any = dtypes.float32) -> None:
        self.dtype = dtype_of(dtype)
        if not self.dtype.is_float:
            raise DTypeError(
                "not a float dtype",
                op="finfo",
                expected="a float dtype",
                got=self.dtype,
                hint="iinfo is for integers",
            )
        from ml_dtypes import finfo

        found = finfo(self.dtype.numpy)
        self.bits = self.dtype.bits
        self.eps, self.max, self.min = float(found.eps), float(found.max), float(found.min)
        self.tiny = self.smallest_normal = float(found.smallest_normal)
        self.resolution = float(found.resolution)

    def __repr__(self) -> str:
        return f"finfo({self.dtype}: eps={self.eps:g}, max={self.max:g}, tiny={self.tiny:g})"


class IntegerInfo:
    """What an integer dtype can hold: `tilegrad.iinfo`."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype_of(dtype)
        if self.dtype.is_float or self.dtype.kind == "bool":
            raise DTypeError(
                "not an integer dtype",
                op="iinfo",
                expected="an integer dtype",
                got=self.dtype,
                hint="finfo is for floats",
            )
        self.bits = self.dtype.bits
        self.min, self.max = int(self.dtype.lowest), int(self.dtype.highest)

    def __repr__(self) -> str:
        return f"iinfo({self.dtype}: min={self.min}, max={self.max})"


finfo, iinfo = FloatInfo, IntegerInfo


def get_default_dtype() -> DType:
    """The dtype of Tensors made of Python floats: float32, always."""
    return dtypes.float32


def set_default_dtype(dtype: Any) -> None:
    """Takes float32 alone: other dtypes are said where Tensors are made."""
    if dtype_of(dtype) is not dtypes.float32:
        raise UserError(
            "the default dtype is always float32",
            op="set_default_dtype",
            expected="float32",
            got=dtype,
            hint="give dtype= where a Tensor is made, or module.to(dtype)",
        )


def enable_grad() -> _GeneratorContextManager[None]:
    """Derivatives are recorded inside `with enable_grad():`, within `no_grad` too."""
    return grad_mode(True)


def inference_mode(mode: bool = True) -> _GeneratorContextManager[None]:
    """`no_grad`: what is computed without history costs nothing more here."""
    return grad_mode(not mode)


def device(
    name: Any, index: int | None = None, *, chip: Any = None, level: str = "compiled"
) -> str:
    """The full name of a device: "cpu", "cuda:0"; nothing is opened. With a `chip` (a preset, a
    file, or a record of parameters) a device of that chip is opened: `device("npu", chip=...)`;
    `level` says by what its array is simulated: compiled, words or registers."""
    if chip is not None:
        kind = KINDS.get(str(name))
        if not hasattr(kind, "open_chip"):
            raise UserError(f"{name!r} has no chips", op="device", expected='"npu"', got=name)
        return str(kind.open_chip(chip, level))
    return device_name(name if index is None else f"{name}:{index}", "device")


def is_grad_enabled() -> bool:
    """Whether derivatives are recorded now."""
    return mode.grad_enabled

"""Tensors and the rest of Python: NumPy, buffers, DLPack, torch, pickle, text, iteration.

Invariant: exchange shares memory wherever both sides can read it; what shares memory with a
Tensor must not be written to. Nothing here imports torch: it is only looked at when it came in.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from ..core import dtype as dtypes
from ..core.dtype import dtype_of
from ..core.errors import DTypeError, UserError
from ..graph import build
from ..runtime.buffer import HOST
from .movement import unbind
from .placement import opened, use
from .tensor import Tensor, from_array, from_buffer, method, mode, values, wrap

# torch dtypes that NumPy does not know, and the integers that carry their bits
CARRIED: dict[str, tuple[str, Any]] = {
    "bfloat16": ("int16", ml_dtypes.bfloat16),
    "float8_e4m3fn": ("uint8", ml_dtypes.float8_e4m3fn),
    "float8_e5m2": ("uint8", ml_dtypes.float8_e5m2),
}

# ---- arrays ---------------------------------------------------------------------------------


@method("__array__")
def _array(self: Tensor, dtype: Any = None, copy: bool | None = None) -> Any:
    found = self.numpy()
    if dtype is not None and found.dtype != np.dtype(dtype):
        return found.astype(dtype)
    return found.copy() if copy else found


@method("__buffer__")
def _buffer(self: Tensor, flags: int) -> memoryview:
    return self.numpy().data


@method("__dlpack__")
def _dlpack(self: Tensor, **options: Any) -> Any:
    buffer = self.buffer()
    if buffer.device != HOST:
        from .dlpack import capsule_of

        return capsule_of(buffer, self.shape, self.dtype, options.get("stream"))
    if self.dtype.name in ("bfloat16", "float8_e4m3", "float8_e5m2"):
        return to_torch(self).__dlpack__()
    return self.numpy().__dlpack__(**options)


@method("__dlpack_device__")
def _dlpack_device(self: Tensor) -> tuple[int, int]:
    device = self.device
    return (1, 0) if device == HOST else (2, int(device.split(":")[1]))  # kDLCPU, kDLCUDA


@method("__array_namespace__")
def _array_namespace(self: Tensor, *, api_version: str | None = None) -> Any:
    """The functions of the array API standard, for Tensors."""
    from . import array_api

    if api_version is not None and api_version not in array_api.VERSIONS:
        raise UserError(
            "unknown version",
            op="__array_namespace__",
            got=repr(api_version),
            expected=", ".join(array_api.VERSIONS),
        )
    return array_api


@method("to_device")
def _to_device(self: Tensor, device: Any, /, *, stream: Any = None) -> Tensor:
    """The same values on a device (the array API's name for it)."""
    return self.to(device)


def from_dlpack(source: Any) -> Tensor:
    """A Tensor that shares the memory of anything with `__dlpack__`."""
    if isinstance(source, Tensor):
        return source
    if type(source).__module__ == "torch":
        return from_torch(source)
    try:
        if source.__dlpack_device__()[0] == 2:  # kDLCUDA
            return wrap(_shared(source))
        return wrap(from_array(np.from_dlpack(source), adapts=False))
    except (AttributeError, TypeError, BufferError, RuntimeError) as error:
        raise DTypeError(
            f"cannot share this memory: {error}",
            op="from_dlpack",
            expected="an array on the CPU with __dlpack__",
            got=type(source).__name__,
        ) from None


# ---- torch ----------------------------------------------------------------------------------


def torch_array(source: Any) -> np.ndarray[Any, Any]:
    """A NumPy array over a torch tensor's memory."""
    source = source.detach()
    source = source.cpu()  # itself, where it is there
    carried = CARRIED.get(str(source.dtype).removeprefix("torch."))
    if carried is None:
        return source.numpy()
    torch = sys.modules["torch"]
    return source.view(getattr(torch, carried[0])).numpy().view(carried[1])


def _shared(source: Any) -> Any:
    """An input Node over another library's memory on a GPU."""
    from .dlpack import buffer_of

    name = use(f"cuda:{source.__dlpack_device__()[1]}", "from_dlpack")
    stream = int(opened(name).stream)  # theirs is made to wait for, by them
    buffer, shape, dtype = buffer_of(source.__dlpack__(stream=stream))
    return from_buffer(buffer, shape, dtype)


def from_torch(source: Any) -> Tensor:
    """A Tensor that shares a torch tensor's memory (copied if it is not contiguous)."""
    if type(source).__module__ not in ("torch", "torch.nn.parameter"):
        raise DTypeError(
            "not a torch tensor",
            op="from_torch",
            expected="torch.Tensor",
            got=type(source).__name__,
        )
    if source.is_cuda:
        return wrap(_shared(source.detach().contiguous()))
    return wrap(from_array(torch_array(source), adapts=False))


@method("torch")
def to_torch(self: Tensor) -> Any:
    """A torch tensor that shares this Tensor's memory."""
    try:
        import torch
    except ImportError:
        raise DTypeError(
            "torch is not installed",
            op="torch",
            expected="the package torch",
            got="none",
            hint="pip install torch",
        ) from None
    if self.device != HOST:
        return torch.from_dlpack(self)
    array = self.numpy()
    if not array.flags.writeable:
        array = array.copy()
    name = "float8_e4m3fn" if self.dtype is dtypes.float8_e4m3 else self.dtype.name
    carried = CARRIED.get(name)
    if carried is None:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(carried[0])).view(getattr(torch, name))


# ---- pickle and copies ----------------------------------------------------------------------


def rebuild(array: np.ndarray[Any, Any], dtype: str, requires_grad: bool) -> Tensor:
    """A Tensor from what `pickle` kept."""
    tensor = wrap(from_array(array.view(dtype_of(dtype).numpy), adapts=False))
    tensor.requires_grad = requires_grad
    return tensor


@method("__reduce__")
def _reduce(self: Tensor) -> Any:
    array = np.array(self.numpy(), order="C")
    return (rebuild, (_plain(array), self.dtype.name, self.requires_grad))


def _plain(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same bits in a dtype that NumPy itself knows."""
    return array if array.dtype.kind in "biuf" else array.view(f"u{array.itemsize}")


@method("__reduce_ex__")
def _reduce_ex(self: Tensor, protocol: Any) -> Any:
    return _reduce(self)


@method("__copy__")
def _copy(self: Tensor) -> Tensor:
    return _twin(self)


@method("__deepcopy__")
def _deepcopy(self: Tensor, memo: dict[int, Any]) -> Tensor:
    twin = _twin(self)
    memo[id(self)] = twin
    twin.grad = None if self.grad is None else _twin(self.grad)
    return twin


def _twin(x: Tensor) -> Tensor:
    """Another leaf with the same value: values never change, so memory can be shared."""
    twin = wrap(x.detach().node)
    if x.requires_grad:
        twin.requires_grad = True
    return twin


# ---- text -----------------------------------------------------------------------------------

THRESHOLD, EDGE, PRECISION = 1000, 3, 4


@method("__repr__")
def _repr(self: Tensor) -> str:
    if not _readable(self):
        sizes = ", ".join(map(str, self.shape))
        return f"Tensor(traced, {self.dtype}[{sizes}])"
    array = self.numpy()
    body = _text(array)
    notes = []
    if array.size == 0 and self.ndim != 1:
        notes.append(f"size={build.show(self.shape)}")
    if self.dtype not in (dtypes.float32, dtypes.int64, dtypes.bool_) or array.size == 0:
        notes.append(f"dtype={self.dtype}")
    if self.requires_grad:
        notes.append("requires_grad=True")
    return f"tensor({', '.join([body, *notes])})"


def _readable(x: Tensor) -> bool:
    """Whether the value exists or can be computed now."""
    if x.node in values:
        return True
    from ..core.errors import TilegradError

    try:
        x.realize()
    except TilegradError:
        return False
    return True


def _text(array: np.ndarray[Any, Any]) -> str:
    if array.size == 0:
        return "[]"
    if array.dtype.kind not in "biu":
        array = array.astype(np.float64)
    show = _number_format(array)
    text = np.array2string(
        array,
        separator=", ",
        prefix="tensor(",
        threshold=THRESHOLD,
        edgeitems=EDGE,
        max_line_width=80,
        formatter={"all": show},
    )
    return text.replace(", ...,", ",  ...,")


def _number_format(array: np.ndarray[Any, Any]) -> Any:
    """How to show one element so that columns line up, as PyTorch does."""
    if array.dtype.kind == "b":
        width = 0 if array.ndim == 0 else (4 if array.all() else 5)
        return lambda v: str(bool(v)).rjust(width)
    if array.size > THRESHOLD:
        corners = tuple(
            slice(None) if s <= 2 * EDGE else np.r_[:EDGE, s - EDGE : s] for s in array.shape
        )
        for axis, corner in enumerate(corners):
            if not isinstance(corner, slice):
                array = np.take(array, corner, axis=axis)
    if array.dtype.kind in "iu":
        one = str
    else:
        one = _float_format(array[np.isfinite(array) & (array != 0)])
    width = max(len(one(v)) for v in array.reshape(-1).tolist()) if array.ndim else 0
    return lambda v: one(v if isinstance(v, (int, float)) else v.item()).rjust(width)


def _float_format(sizes: np.ndarray[Any, Any]) -> Any:
    """Whole numbers as `1.`, else 4 decimals, else with an exponent."""
    sizes = np.abs(sizes)
    if sizes.size == 0:
        return lambda v: f"{v:.0f}." if np.isfinite(v) else f"{v}"
    wide = sizes.max() / sizes.min() > 1000.0 or sizes.max() > 1e8
    if (sizes == np.ceil(sizes)).all():
        if sizes.max() / sizes.min() <= 1000.0 or sizes.max() <= 1e8:
            return lambda v: f"{v:.0f}." if np.isfinite(v) else f"{v}"
    elif not wide and sizes.min() >= 1e-4:
        return lambda v: f"{v:.{PRECISION}f}"
    return lambda v: f"{v:.{PRECISION}e}"


@method("__format__")
def _format(self: Tensor, form: str) -> str:
    return format(self.item(), form) if form and self.ndim == 0 else format(repr(self), form)


# ---- containers -----------------------------------------------------------------------------


@method("__iter__")
def _iterate(self: Tensor) -> Iterator[Tensor]:
    if not self.ndim:
        raise DTypeError(
            "a Tensor without axes cannot be iterated",
            op="iter",
            expected="at least 1 axis",
            got="shape ()",
        )
    return iter(unbind(self, 0))


@method("__contains__")
def _contains(self: Tensor, item: Any) -> bool:
    return bool((self == item).any())


@method("__hash__")
def _hash(self: Tensor) -> int:
    return id(self)


@method("dim", "ndimension")
def dim(self: Tensor) -> int:
    """Number of axes."""
    return self.ndim


@method()
def nelement(self: Tensor) -> int:
    """Number of elements."""
    return self.numel()


@method()
def is_contiguous(self: Tensor) -> bool:
    """True: values are kept in row-major order."""
    return True


def is_tensor(value: Any) -> bool:
    """Whether a value is a Tensor."""
    return isinstance(value, Tensor)


def tracing() -> bool:
    """Whether a jitted function is being traced."""
    return mode.trace is not None

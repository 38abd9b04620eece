"""DLPack: the structs by which libraries hand each other memory on a GPU.

NumPy does it for memory of the CPU; here are the same capsules for pointers it cannot hold.
Invariant: what is handed out is kept alive until its deleter is called, and what is taken in
until our Buffer is gone; streams are put in order on the way.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

from ..core.dtype import BY_NAME, DType
from ..core.errors import DTypeError, UserError
from ..runtime.buffer import Buffer
from .placement import opened, use

CPU, CUDA = 1, 2  # kDLCPU, kDLCUDA
NAME, USED = b"dltensor", b"used_dltensor"
# DLDataTypeCode and bits by the name of a dtype
CODES: dict[str, tuple[int, int]] = {
    "bool": (6, 8),
    "bfloat16": (4, 16),
    "float16": (2, 16),
    "float32": (2, 32),
    "float64": (2, 64),
    "float8_e4m3": (10, 8),
    "float8_e5m2": (12, 8),
    **{f"int{b}": (0, b) for b in (8, 16, 32, 64)},
    **{f"uint{b}": (1, b) for b in (8, 16, 32, 64)},
}
DTYPES = {code: BY_NAME[name] for name, code in CODES.items()}


class DLTensor(ctypes.Structure):
    """The struct of that name: device and dtype spelt out field by field."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class DLManagedTensor(ctypes.Structure):
    """A DLTensor with who owns it and how it is given back."""


DELETER = ctypes.CFUNCTYPE(None, ctypes.POINTER(DLManagedTensor))
DLManagedTensor._fields_ = (
    ("tensor", DLTensor),
    ("context", ctypes.c_void_p),
    ("deleter", DELETER),
)

_python = ctypes.pythonapi
_python.PyCapsule_New.restype = ctypes.py_object
_python.PyCapsule_New.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_python.PyCapsule_GetPointer.restype = ctypes.c_void_p
_python.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_python.PyCapsule_SetName.argtypes = (ctypes.py_object, ctypes.c_char_p)
_python.PyCapsule_IsValid.argtypes = (ctypes.py_object, ctypes.c_char_p)
# The same for a capsule that is being destroyed: it must not be counted as held again.
_dying_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", _python)
)
_dying_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _python)
)

_given: dict[int, Any] = {}  # what others hold of ours, by number
_numbers = itertools.count(1)


@DELETER
def _give_back(managed: Any) -> None:
    _given.pop(managed.contents.context, None)


def _end(capsule: int) -> None:
    """A capsule is going: give its tensor back if nobody took it."""
    if _dying_is_valid(capsule, NAME):
        managed = DLManagedTensor.from_address(_dying_pointer(capsule, NAME))
        _given.pop(managed.context, None)


_DESTRUCTOR = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_end)


def capsule_of(buffer: Buffer, shape: tuple[int, ...], dtype: DType, stream: Any = None) -> Any:
    """A capsule over a Buffer on a GPU; `stream` is the consumer's, as DLPack numbers them."""
    if dtype.name not in CODES:
        raise DTypeError(
            "DLPack has no such dtype", op="__dlpack__", got=dtype, expected=", ".join(CODES)
        )
    device: Any = opened(buffer.device)  # a GPU, which has a number and streams
    if stream not in (None, -1, 0, 1):  # the legacy stream is in order with ours by itself
        device.hand_over(int(stream))
    number = next(_numbers)
    sizes = (ctypes.c_int64 * max(1, len(shape)))(*shape)
    steps: list[int] = []
    step = 1
    for size in reversed(shape):
        steps.insert(0, step)
        step *= size
    strides = (ctypes.c_int64 * max(1, len(shape)))(*steps)
    managed = DLManagedTensor()
    code, bits = CODES[dtype.name]
    managed.tensor = DLTensor(
        buffer.pointer,
        CUDA,
        device.number,
        len(shape),
        code,
        bits,
        1,
        ctypes.cast(sizes, ctypes.POINTER(ctypes.c_int64)),
        ctypes.cast(strides, ctypes.POINTER(ctypes.c_int64)),
        0,
    )
    managed.context, managed.deleter = number, _give_back
    _given[number] = (managed, sizes, strides, buffer.part(0, buffer.bytes))
    return _python.PyCapsule_New(
        ctypes.addressof(managed), NAME, ctypes.cast(_DESTRUCTOR, ctypes.c_void_p)
    )


class Taken:
    """Memory of another library, given back when nothing holds it."""

    def __init__(self, managed: Any) -> None:
        self._managed = managed

    def __del__(self) -> None:
        deleter = self._managed.contents.deleter
        if deleter:
            deleter(self._managed)


def buffer_of(capsule: Any) -> tuple[Buffer, tuple[int, ...], DType]:
    """The memory of a capsule as a Buffer on a GPU, with its shape and dtype."""
    if not _python.PyCapsule_IsValid(capsule, NAME):
        raise DTypeError("not a fresh DLPack capsule", op="from_dlpack", got=repr(capsule))
    managed = ctypes.cast(
        _python.PyCapsule_GetPointer(capsule, NAME), ctypes.POINTER(DLManagedTensor)
    )
    found = managed.contents.tensor
    shape = tuple(found.shape[i] for i in range(found.ndim))
    dtype = DTYPES.get((found.code, found.bits)) if found.lanes == 1 else None
    if dtype is None or found.device_type != CUDA:
        raise DTypeError(
            "cannot share this memory",
            op="from_dlpack",
            expected=f"plain elements on an NVIDIA GPU: {', '.join(CODES)}",
            got=f"device kind {found.device_type}, dtype code "
            f"{found.code} of {found.bits} bits x {found.lanes}",
        )
    if found.strides and not _is_contiguous(shape, found.strides):
        raise UserError(
            "the elements do not lie in row-major order",
            op="from_dlpack",
            expected="a contiguous array",
            got=f"shape {shape}",
            hint="x.contiguous() makes one",
        )
    name = use(f"cuda:{found.device_id}", "from_dlpack")
    _python.PyCapsule_SetName(capsule, USED)
    count = 1
    for size in shape:
        count *= size
    pointer = (found.data or 0) + found.byte_offset
    return Buffer(pointer, count * dtype.size, Taken(managed), name), shape, dtype


def _is_contiguous(shape: tuple[int, ...], strides: Any) -> bool:
    step = 1
    for axis in reversed(range(len(shape))):
        if shape[axis] != 1 and strides[axis] != step:
            return 0 in shape
        step *= shape[axis]
    return True

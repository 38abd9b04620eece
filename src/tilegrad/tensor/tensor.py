"""`Tensor`: a thin handle on a Graph Node, and `realize`, which gives Nodes their values.

Building a Tensor costs no compute; reading one compiles and runs the Graph below it, cut at
every Node whose value is already known. The functions of the library live in the other files
of this folder and attach themselves with `@method`. Invariant: a Node never changes; in-place
ops and assignment rebind the Tensor to another Node.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import string_at
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from ..core import dtype as dtypes
from ..core.dtype import DType, dtype_of
from ..core.errors import DTypeError, ShapeError, StateError
from ..graph import build, ops
from ..ir.node import Node, next_serial
from ..ir.symbol import Expr, Size
from ..runtime.buffer import HOST, Buffer
from .numpy_names import Function, numpy_names
from .placement import default_device, elsewhere, is_pure, is_stored, on_host, settled, state
from .realize import (
    by_device,
    compute,
    copy_of,
    from_array,
    from_buffer,
    own_node,
    stand_ins,
    unknown_value,
    values,
)

if TYPE_CHECKING:
    from contextlib import _GeneratorContextManager

    from .methods import Methods  # a stub: what the other files attach
else:
    Methods = object


class Leaves:
    """The Tensors that collect gradients, by their Node; keeps neither of them alive."""

    def __init__(self) -> None:
        self._tensors: weakref.WeakKeyDictionary[Node, Any] = weakref.WeakKeyDictionary()

    def __setitem__(self, node: Node, tensor: Tensor) -> None:
        self._tensors[node] = weakref.ref(tensor)

    def get(self, node: Node) -> Tensor | None:
        """The Tensor whose Node this is or was, if it lives."""
        found = self._tensors.get(node)
        return None if found is None else found()

    def __contains__(self, node: Node) -> bool:
        return self.get(node) is not None


leaves = Leaves()


class Mode(threading.local):
    """What a thread is doing: recording derivatives, tracing a jitted function."""

    grad_enabled: bool = True
    trace: Any = None  # the jit.Trace in progress, if any
    depth: int = 0  # transforms in progress: jitted functions inline inside of them
    target: Any = None  # the Target that is traced for, where it is none of a Device here
    salt: Any = None  # a uint32 Node that tells apart the steps of a loop for random numbers


mode = Mode()


class Tensor(Methods):
    """An n-dimensional array, lazy: its Node says how to compute it."""

    __slots__ = ("__weakref__", "_grad", "_node", "_requires_grad", "label", "trace")
    __array_priority__ = 1000
    _grad: Tensor | None

    def __init__(
        self, data: Any = None, dtype: Any = None, requires_grad: bool = False, device: Any = None
    ) -> None:
        node = data if isinstance(data, Node) else from_data(data, dtype)
        if elsewhere() or device is not None:
            from .convert import settle

            node = settle(node, data, device)
        elif not isinstance(data, (Node, Tensor)) and node in values:
            values[node].adapts = False
        self._bind(node)
        self.requires_grad = requires_grad

    def _bind(self, node: Node, requires_grad: bool = False) -> None:
        self._node, self._grad, self.label = node, None, ""
        next_serial()  # a Bound sees that something may hold a Node now
        self._requires_grad = requires_grad
        self.trace = mode.trace

    def __class_getitem__(cls, items: Any) -> Any:
        from .annotation import annotation

        return annotation(items)

    @property
    def node(self) -> Node:
        """How the value is computed; inside a trace, what stands for a Tensor from outside."""
        trace = mode.trace
        if trace is None or self.trace is trace:
            return self._node
        return trace.node_of(self)

    @node.setter
    def node(self, node: Node) -> None:
        trace = mode.trace
        if trace is None or self.trace is trace:
            self._node = node
            next_serial()  # a Bound sees that something was rebound
        else:
            trace.rebind(self, node)

    @property
    def grad(self) -> Tensor | None:
        """The gradient that `backward` collected."""
        trace = mode.trace
        if trace is None or self.trace is trace:
            return self._grad
        return trace.grad_of(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None and (not isinstance(value, Tensor) or value.shape != self.shape):
            wanted = f"None, or a Tensor of shape {self.shape}"
            got = f"shape {value.shape}" if isinstance(value, Tensor) else type(value).__name__
            raise ShapeError("a gradient does not fit", op="grad", expected=wanted, got=got)
        trace = mode.trace
        if trace is None or self.trace is trace:
            self._grad = value
        else:
            trace.set_grad(self, value)

    # ---- facts ----------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes; where one is a Symbol, its expression, which computes as an int."""
        return self.node.shape

    @property
    def dtype(self) -> DType:
        """Dtype of the elements."""
        return self.node.dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.node.shape)

    @property
    def device(self) -> str:
        """Where the Tensor lives: "cpu" or "cuda:0"."""
        if not state.active:
            return default_device()
        trace = mode.trace
        if trace is not None:
            return trace.device_of(self.node)
        buffer = values.get(self._node)
        if buffer is not None:
            return buffer.device
        return next(iter(settled([self._node])), None) or default_device()

    @property
    def requires_grad(self) -> bool:
        """Whether `backward` reaches this Tensor."""
        return self._requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if value and not self.dtype.is_float:
            raise DTypeError("only floats have gradients", op="requires_grad", got=self.dtype)
        if value and not self._requires_grad:
            self.node = own_node(self.node)
            leaves[self.node] = self
        self._requires_grad = bool(value)

    @property
    def is_leaf(self) -> bool:
        """Whether gradients are collected here."""
        return not self._requires_grad or leaves.get(self.node) is self

    @property
    def T(self) -> Tensor:
        """All axes in reverse order."""
        return self.permute(*reversed(range(self.ndim)))

    @property
    def mT(self) -> Tensor:
        """The last two axes swapped."""
        if self.ndim < 2:
            got = build.show(self.shape)
            raise ShapeError("needs 2 axes", op="mT", expected="ndim >= 2", got=got)
        return self.transpose(-2, -1)

    @property
    def data(self) -> Tensor:
        """The same value without history."""
        return self.detach()

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.dtype.size

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.numel() * self.dtype.size

    @overload
    def size(self, axis: None = None) -> tuple[int, ...]: ...
    @overload
    def size(self, axis: int) -> int: ...
    def size(self, axis: int | None = None) -> Any:
        """The shape, or one size of it."""
        return self.shape if axis is None else self.shape[build.axis_of(self.node, axis, "size")]

    def numel(self) -> int:
        """Number of elements."""
        type_: Any = self.node.type
        return type_.size

    def __len__(self) -> int:
        if not self.shape:
            raise DTypeError("a Tensor without axes has no length", op="len")
        return self.shape[0]

    # ---- values ---------------------------------------------------------------------------

    def realize(self) -> Tensor:
        """Compute the value now; returns self."""
        realize([self])
        return self

    def buffer(self, device: str | None = None) -> Buffer:
        """The Buffer that holds the value, computing it if need be (on `device` if any will do)."""
        buffer = values.data.get(weakref.ref(self.node))  # type: ignore[attr-defined]  # no call
        if buffer is None:
            if is_stored(self.node):  # it stays in its file: the values are for who asked
                compute([self.node], device)
                return values.pop(self.node)
            realize([self], device)
            buffer = values[self.node]
        return buffer

    def numpy(self) -> np.ndarray[Any, Any]:
        """The value as a NumPy array; on the CPU it shares memory (do not write to it)."""
        return on_host(self.buffer(), self.shape, self.dtype)

    def item(self) -> Any:
        """The value of a Tensor of one element as a Python number."""
        type_: Any = self.node.type
        if type_.shape and any([s != 1 for s in type_.shape]):
            raise ShapeError(
                "needs exactly one element",
                op="item",
                expected="1 element",
                got=f"{self.numel()} in shape {build.show(self.shape)}",
            )
        buffer, dtype = self.buffer(), type_.dtype.numpy
        if buffer.device != HOST:
            return on_host(buffer, (), dtype).item()
        pointer = buffer.pointer  # read by hand: a NumPy view costs several microseconds
        return np.frombuffer(string_at(pointer, dtype.itemsize), dtype).item()

    def tolist(self) -> Any:
        """The value as nested lists."""
        return self.numpy().tolist()

    def __bool__(self) -> bool:
        return bool(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        if not self.dtype.is_integer:
            raise DTypeError("only integers can be an index", op="index", got=self.dtype)
        return int(self.item())

    def assign(self, value: Any) -> Tensor:
        """Rebind this Tensor to another value of the same shape and dtype; no history is kept."""
        node = build.cast(node_of(value), self.dtype)
        node = build.broadcast_to(node, self.shape, "assign")
        if mode.trace is not None:
            mode.trace.check_assign(self)
        elif state.active and not settled([node]):
            node = own_node(node, self.device)  # what has no device comes to this one
        if self.node is node:
            return self
        if self._requires_grad:
            node = own_node(node)  # a leaf is an input of its own, which also cuts the history
            leaves[node] = self
        elif node not in values and node.op is not ops.stop_gradient:
            node = ops.stop_gradient(node)
        self.node = node
        return self

    def rebind(self, node: Node, *parents: Any, op: str) -> Tensor:
        """Take another Node in place of this one, with history: what in-place ops do."""
        if self._requires_grad and mode.grad_enabled and leaves.get(self.node) is self:
            raise StateError(
                "a leaf that requires a gradient cannot be changed in place",
                op=op,
                expected="a Tensor computed from others, or no recording",
                got=f"a leaf {self.node.type}",
                hint="do it inside `with no_grad():`, or on a copy: x = x.clone()",
            )
        if node.shape != self.shape:
            raise ShapeError(
                "an in-place op cannot change the shape",
                op=op,
                expected=build.show(self.shape),
                got=build.show(node.shape),
            )
        if not mode.grad_enabled:
            return self.assign(wrap(node))
        if mode.trace is not None:
            mode.trace.check_assign(self)
        self._requires_grad = wrap(node, self, *parents)._requires_grad
        self.node = build.cast(node, self.dtype)
        return self

    def detach(self) -> Tensor:
        """The same value without history."""
        return wrap(ops.stop_gradient(self.node) if self._requires_grad else self.node)


def wrap(node: Node, *parents: Any) -> Tensor:
    """A Tensor on a Node; it requires a gradient if a parent does."""
    tensor = Tensor.__new__(Tensor)
    needs = mode.grad_enabled and any(isinstance(p, Tensor) and p._requires_grad for p in parents)
    tensor._bind(node, needs and node.type.__class__.__name__ == "Array" and node.dtype.is_float)
    return tensor


def node_of(value: Any, like: DType | None = None) -> Node:
    """The Node of a Tensor, array, list or number."""
    if isinstance(value, Tensor):
        if not mode.grad_enabled and value._requires_grad:
            return ops.stop_gradient(value.node)
        return value.node
    return from_data(value, like)


def operand(value: Any) -> Any:
    """A Node, or a Python number left as it is so that promotion treats it weakly."""
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    if isinstance(value, (bool, int, float)):
        return value
    return build.size_value(value) if isinstance(value, Expr) else node_of(value)


def lift(value: Any, like: DType | None = None) -> Tensor:
    """The Tensor itself, or a Tensor of an array, list or number (in the dtype `like`)."""
    return value if isinstance(value, Tensor) else wrap(from_data(value, like))


def call(function: Callable[..., Node], *inputs: Any, **options: Any) -> Tensor:
    """Apply a Node function to Tensors and numbers."""
    return wrap(function(*[operand(i) for i in inputs], **options), *inputs)


def method(*names: str) -> Callable[[Function], Function]:
    """Attach a function to Tensor under its own name or the names given."""

    def attach(function: Function) -> Function:
        function = numpy_names(function)
        for name in names or (function.__name__,):
            setattr(Tensor, name, function)
        return function

    return attach


def in_place(*names: str) -> None:
    """Attach `name_` for methods `name`: it rebinds the Tensor to the result."""
    for name in names:
        setattr(Tensor, name + "_", _rebinding(name))


def _rebinding(name: str) -> Callable[..., Tensor]:
    function = getattr(Tensor, name)

    def run(self: Tensor, *args: Any, **options: Any) -> Tensor:
        result = function(self, *args, **options)
        if build.category(result.dtype) > build.category(self.dtype):
            raise DTypeError(
                "the result does not fit in place",
                op=name + "_",
                expected=self.dtype,
                got=result.dtype,
                hint=f"use {name}() and keep its result",
            )
        return self.rebind(result.node, result, op=name + "_")

    run.__name__ = name + "_"
    run.__doc__ = f"`{name}`, kept in this Tensor."
    run.__wrapped__ = function  # type: ignore[attr-defined]  # its parameters are this one's
    return run


# ---- data in --------------------------------------------------------------------------------


def from_data(data: Any, dtype: Any = None) -> Node:
    """A Node for data: a constant for numbers, else an input with a Buffer."""
    wanted = None if dtype is None else dtype_of(dtype)
    if isinstance(data, Tensor):
        return data.node if wanted is None else build.cast(data.node, wanted)
    if isinstance(data, (bool, int, float)) and not isinstance(data, np.generic):
        found = wanted or (
            dtypes.bool_
            if isinstance(data, bool)
            else dtypes.int64
            if isinstance(data, int)
            else dtypes.float32
        )
        return build.constant(data, found)
    if data is None:
        raise DTypeError("a Tensor needs data", op="Tensor", expected="array, list or number")
    array = as_array(data)
    made = isinstance(data, (list, tuple, range))
    if wanted is None and array.dtype == np.float64 and made:
        wanted = dtypes.float32
    kind = array.dtype if wanted is None else wanted.numpy
    return from_array(array if made and array.dtype == kind else copy_of(array, kind))


def as_array(data: Any) -> np.ndarray[Any, Any]:
    """A NumPy array of lists, arrays, torch tensors or anything with `__array__`."""
    if isinstance(data, (list, tuple)):
        data = _nested(data)
    elif type(data).__module__ == "torch":
        from .interop import torch_array

        return torch_array(data)
    try:
        array = np.asarray(data)
    except (ValueError, TypeError) as error:
        raise DTypeError(
            f"cannot make a Tensor: {error}",
            op="Tensor",
            got=type(data).__name__,
            expected="array, nested list of equal lengths or number",
        ) from None
    if array.dtype not in dtypes.BY_NUMPY:
        found = type(data).__name__ if array.dtype == object else f"elements of {array.dtype}"
        raise DTypeError(
            "cannot make a Tensor",
            op="Tensor",
            got=found,
            expected="array, nested list of equal lengths or number",
        )
    return array


def _nested(data: Any) -> Any:
    if isinstance(data, (list, tuple)):
        return [_nested(d) for d in data]
    return data.numpy() if isinstance(data, Tensor) else data


# ---- running --------------------------------------------------------------------------------


def realize(tensors: Sequence[Tensor], device: str | None = None) -> None:
    """Compute the values of Tensors together, in one Executable; on `device` if any will do."""
    tensors = [t for t in _with_companions(tensors) if not is_stored(t.node)]
    if elsewhere():
        for tensor in tensors:
            if tensor.node not in values and is_pure(tensor.node):
                tensor.node = own_node(tensor.node, device or default_device())
                if tensor._requires_grad:
                    leaves[tensor.node] = tensor
    wanted = list(dict.fromkeys(t.node for t in tensors if t.node not in values))
    if wanted and elsewhere():
        for name, nodes in by_device(wanted, device).items():
            compute(nodes, name)
    elif wanted:
        compute(wanted)
    for tensor in tensors:
        if not tensor._requires_grad or leaves.get(tensor.node) is tensor:
            _drop_history(tensor)


# Results of one computation, by their Nodes: reading one computes all that are still held.
_made_together: weakref.WeakKeyDictionary[Node, list[Any]] = weakref.WeakKeyDictionary()


def made_together(tensors: Sequence[Tensor]) -> None:
    """Note that Tensors share their work: the first that is read has all of them computed.

    Read one at a time, each gradient of a `backward` would compile a Graph of its own and compute
    what they share again.
    """
    if len(tensors) > 1 and mode.trace is None and not mode.depth:
        group = [weakref.ref(t) for t in tensors]
        for tensor in tensors:
            _made_together[tensor._node] = group


def _with_companions(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The Tensors, and those made together with one that live and have no value yet."""
    found = {id(t): t for t in tensors}
    for group in [_made_together.get(t._node) for t in tensors] if _made_together else ():
        for other in () if group is None else [made() for made in group]:
            if other is None or other._node in values:
                continue
            if _made_together.get(other._node) is group:
                found[id(other)] = other
    return list(found.values())


def _drop_history(tensor: Tensor) -> None:
    """Put a plain input in the place of a computed Node, so that its Graph can go."""
    if tensor.node.op is ops.input_:
        return
    buffer = values[tensor.node]
    tensor.node = from_buffer(buffer, tensor.shape, tensor.dtype)
    if tensor._requires_grad:
        leaves[tensor.node] = tensor


@contextmanager
def grad_mode(enabled: bool) -> Iterator[None]:
    """Switch recording of derivatives on or off for a block of code."""
    before, mode.grad_enabled = mode.grad_enabled, enabled
    try:
        yield
    finally:
        mode.grad_enabled = before


def no_grad() -> _GeneratorContextManager[None]:
    """No derivatives are recorded inside `with no_grad():`."""
    return grad_mode(False)


def is_symbolic(size: Size) -> bool:
    """Whether a size is not known now."""
    return isinstance(size, Expr)


__all__ = ["StateError", "Tensor", "call", "compute", "from_array", "from_buffer", "grad_mode",
           "in_place", "leaves", "lift", "made_together", "method", "mode", "no_grad", "node_of",
           "operand", "realize", "stand_ins", "unknown_value", "values", "wrap"]  # fmt: skip

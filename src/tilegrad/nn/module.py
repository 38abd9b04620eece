"""`Module`: a tree of layers that holds Parameters and buffers by name, and `Parameter`.

Setting an attribute registers it: a Parameter, a Module, or anything else as a plain setting.
Names are PyTorch's, so checkpoints go both ways. Invariant: a Parameter keeps its identity for
life; loading, casting and training rebind its value only, so optimizers and jitted functions
that hold it stay right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

from ..core.dtype import DType, dtype_of
from ..core.errors import DTypeError, ShapeError, UserError
from ..graph import build
from ..runtime.buffer import HOST
from ..tensor.convert import names_device, place
from ..tensor.placement import device_name, elsewhere, is_stored
from ..tensor.tensor import Tensor, leaves, lift, mode, no_grad, own_node, wrap

Self = TypeVar("Self", bound="Module")
P = ParamSpec("P")
R = TypeVar("R", covariant=True)
PLAIN = (bool, int, float, str, tuple, type(None))


class HasForward(Protocol[P, R]):
    """What can be called as its `forward` is: a Module, for type checkers."""

    def forward(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """What the Module computes."""


class Parameter(Tensor):
    """A Tensor that a Module trains."""

    __slots__ = ()

    def __init__(self, data: Any = None, requires_grad: bool = True) -> None:
        super().__init__(data.detach() if isinstance(data, Tensor) else data)
        self.requires_grad = requires_grad

    def __repr__(self) -> str:
        return "Parameter containing:\n" + super().__repr__()

    def __copy__(self) -> Parameter:
        return Parameter(self, self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        twin = memo[id(self)] = Parameter(self, self.requires_grad)
        twin.grad = None if self.grad is None else self.grad.detach()
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        made: Any = super().__reduce__()
        rebuild, arguments = made
        return _rebuild_parameter, (rebuild, arguments[:-1], self.requires_grad)


def _rebuild_parameter(rebuild: Any, arguments: Any, requires_grad: bool) -> Parameter:
    return Parameter(rebuild(*arguments, False), requires_grad)


class Keys(NamedTuple):
    """What `load_state_dict` did not find, and what it could not use."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class Module:
    """A layer or a model: override `__init__` and `forward`."""

    training: bool
    casts = True  # whether `to` gives its buffers another dtype

    def __init__(self) -> None:
        put = object.__setattr__
        put(self, "training", True)
        put(self, "_parameters", {})
        put(self, "_buffers", {})
        put(self, "_modules", {})
        put(self, "_temporary", set())  # names of buffers that a state_dict leaves out
        put(self, "_changes", 0)  # how often a setting changed: a jitted function asks

    # ---- attributes -----------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        holders = self.__dict__
        if "_modules" not in holders:
            raise UserError(
                "set before Module.__init__",
                op=type(self).__name__,
                expected="super().__init__() first",
                got=f"self.{name} = ...",
            )
        if isinstance(value, Parameter):
            self._place("_parameters", name, value)
        elif isinstance(value, Module):
            self._place("_modules", name, value)
        elif name in holders["_parameters"]:
            if value is not None:
                raise DTypeError(
                    "a parameter is replaced by something else",
                    op="setattr",
                    expected="a Parameter or None",
                    got=type(value).__name__,
                    hint=f"use self.{name}.assign(value) for a new value",
                )
            holders["_parameters"][name] = None
        elif name in holders["_buffers"] and (value is None or isinstance(value, Tensor)):
            holders["_buffers"][name] = value
        elif name in holders["_modules"] and value is None:
            holders["_modules"][name] = None
        else:
            if name != "training" and isinstance(value, PLAIN) and mode.trace is None:
                before = holders.get(name)
                if type(before) is not type(value) or before != value:
                    object.__setattr__(self, "_changes", self._changes + 1)
            object.__setattr__(self, name, value)

    def _place(self, holder: str, name: str, value: Any) -> None:
        for other in ("_parameters", "_buffers", "_modules"):
            if other != holder:
                self.__dict__[other].pop(name, None)
        self.__dict__.pop(name, None)
        self.__dict__[holder][name] = value

    def __getattr__(self, name: str) -> Any:
        holders = self.__dict__
        for holder in ("_parameters", "_buffers", "_modules"):
            found = holders.get(holder)
            if found is not None and name in found:
                return found[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __delattr__(self, name: str) -> None:
        for holder in ("_parameters", "_buffers", "_modules"):
            if name in self.__dict__[holder]:
                del self.__dict__[holder][name]
                self._temporary.discard(name)
                return
        object.__delattr__(self, name)

    def __dir__(self) -> list[str]:
        names = list(super().__dir__())
        return sorted({*names, *self._parameters, *self._buffers, *self._modules})

    def register_parameter(self, name: str, param: Parameter | None) -> None:
        """Hold a Parameter (or the place of one) under a name."""
        self._place("_parameters", name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Hold a Tensor that is state but not trained; `persistent` puts it in checkpoints."""
        if tensor is not None and not isinstance(tensor, Tensor):
            raise DTypeError(
                "a buffer is a Tensor",
                op="register_buffer",
                expected="Tensor or None",
                got=type(tensor).__name__,
            )
        self._place("_buffers", name, tensor)
        (self._temporary.discard if persistent else self._temporary.add)(name)

    def add_module(self, name: str, module: Module | None) -> None:
        """Hold a Module under a name."""
        self._place("_modules", name, module)

    register_module = add_module

    # ---- calling --------------------------------------------------------------------------

    def __call__(self: HasForward[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the Module computes."""
        raise UserError("no forward", op=type(self).__name__, expected="a method forward")

    # ---- walking --------------------------------------------------------------------------

    def children(self) -> Iterator[Module]:
        """The Modules held directly."""
        return (m for _, m in self.named_children())

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """The Modules held directly, by name."""
        seen: set[int] = set()
        for name, module in self._modules.items():
            if module is not None and id(module) not in seen:
                seen.add(id(module))
                yield name, module

    def modules(self) -> Iterator[Module]:
        """This Module and all below it, each once."""
        return (m for _, m in self.named_modules())

    def named_modules(
        self, memo: set[int] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Module]]:
        """This Module and all below it, by dotted name."""
        memo = set() if memo is None else memo
        if id(self) in memo:
            return
        if remove_duplicate:
            memo.add(id(self))
        yield prefix, self
        for name, module in self._modules.items():
            if module is not None:
                below = f"{prefix}.{name}" if prefix else name
                yield from module.named_modules(memo, below, remove_duplicate)

    def _named(
        self, holder: str, prefix: str, recurse: bool, unique: bool
    ) -> Iterator[tuple[str, Tensor]]:
        seen: set[int] = set()
        found = self.named_modules(None, prefix, unique) if recurse else [(prefix, self)]
        for path, module in found:
            for name, tensor in module.__dict__[holder].items():
                if tensor is None or (unique and id(tensor) in seen):
                    continue
                seen.add(id(tensor))
                yield (f"{path}.{name}" if path else name), tensor

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        """All Parameters, each once."""
        return (p for _, p in self.named_parameters("", recurse))

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """All Parameters by dotted name."""
        found: Any = self._named("_parameters", prefix, recurse, remove_duplicate)
        return found

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """All buffers, each once."""
        return (b for _, b in self.named_buffers("", recurse))

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """All buffers by dotted name."""
        return self._named("_buffers", prefix, recurse, remove_duplicate)

    def get_submodule(self, target: str) -> Module:
        """The Module at a dotted name."""
        module: Module = self
        for name in target.split(".") if target else ():
            found = module._modules.get(name)
            if found is None:
                raise UserError(
                    "no such Module",
                    op="get_submodule",
                    got=target,
                    expected=f"one of {', '.join(module._modules)}",
                )
            module = found
        return module

    # ---- for jit and transforms -----------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """All Parameters and buffers by name: the state that a jitted function may change."""
        found: dict[str, Tensor] = dict(self.named_parameters())
        found.update(self.named_buffers())
        return found

    def settings(self) -> tuple[Any, ...]:
        """What a trace depends on besides Tensors: modes, and how often settings changed."""
        return tuple([(m.training, m._changes, len(m._modules)) for m in self.modules()])

    # ---- checkpoints ----------------------------------------------------------------------

    def state_dict(self, *, prefix: str = "") -> dict[str, Tensor]:
        """All Parameters and persistent buffers by PyTorch's names, without history."""
        return {n: _without_history(t) for n, t in self._state(prefix)}

    def _state(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        for name, tensor in (*self._parameters.items(), *self._buffers.items()):
            if tensor is not None and name not in self._temporary:
                yield prefix + name, tensor
        for name, module in self._modules.items():
            if module is not None:
                yield from module._state(f"{prefix}{name}.")

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Keys:
        """Take values by name: Tensors, NumPy arrays or torch tensors.

        Nothing changes unless all shapes fit and, if `strict`, the names are exactly ours.
        """
        ours = dict(self._state())
        missing = [n for n in ours if n not in state_dict]
        unexpected = [n for n in state_dict if n not in ours]
        if strict and (missing or unexpected):
            raise UserError(
                "the names do not fit",
                op=f"{type(self).__name__}.load_state_dict",
                expected=f"all of ours; missing: {', '.join(missing) or 'none'}",
                got=f"unexpected: {', '.join(unexpected) or 'none'}",
                hint="strict=False takes what fits",
            )
        found = {n: lift(state_dict[n]) for n in ours if n in state_dict}
        wrong = [
            f"{n}: {build.show(ours[n].shape)} here, {build.show(t.shape)} given"
            for n, t in found.items()
            if t.shape != ours[n].shape
        ]
        if wrong:
            raise ShapeError(
                "shapes do not fit",
                op=f"{type(self).__name__}.load_state_dict",
                expected="the shapes of this Module",
                got="; ".join(wrong),
            )
        with no_grad():
            for name, tensor in found.items():
                ours[name].assign(tensor)
        return Keys(missing, unexpected)

    # ---- modes ----------------------------------------------------------------------------

    def train(self: Self, mode: bool = True) -> Self:
        """Switch to training (dropout on, batch statistics) or away from it."""
        for module in self.modules():
            module.training = bool(mode)
        return self

    def eval(self: Self) -> Self:
        """Switch to inference."""
        return self.train(False)

    def requires_grad_(self: Self, requires_grad: bool = True) -> Self:
        """Train all Parameters, or none."""
        for parameter in self.parameters():
            parameter.requires_grad = requires_grad
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all Parameters."""
        for parameter in self.parameters():
            parameter.grad = None

    def apply(self: Self, function: Callable[[Module], Any]) -> Self:
        """Call a function on all Modules, the innermost first."""
        for module in self.children():
            module.apply(function)
        function(self)
        return self

    def to(self: Self, *targets: Any, dtype: Any = None, device: Any = None) -> Self:
        """Floats in another dtype, everything on a device; changes this Module."""
        for target in targets:
            if isinstance(target, Tensor):
                dtype, device = target.dtype, target.device if elsewhere() else None
            elif isinstance(target, DType) or not names_device(target):
                dtype = target
            else:
                device = target
        if dtype is not None:
            wanted = dtype_of(dtype)
            if not wanted.is_float:
                raise DTypeError(
                    "a Module is cast to floats only",
                    op=f"{type(self).__name__}.to",
                    expected="a float dtype",
                    got=wanted,
                )
            uncast = {id(b) for m in self.modules() if not m.casts for b in m.buffers(False)}
            for tensor in self.tensors().values():
                if tensor.dtype.is_float and id(tensor) not in uncast:
                    _retype(tensor, wanted)
        name = f"{type(self).__name__}.to"
        if device is not None and (elsewhere() or device_name(device, name) != HOST):
            for tensor in self.tensors().values():
                _rehome(tensor, device, name)
        return self

    def float(self: Self) -> Self:
        """Floats in float32."""
        return self.to("float32")

    def double(self: Self) -> Self:
        """Floats in float64."""
        return self.to("float64")

    def half(self: Self) -> Self:
        """Floats in float16."""
        return self.to("float16")

    def bfloat16(self: Self) -> Self:
        """Floats in bfloat16."""
        return self.to("bfloat16")

    def cpu(self: Self) -> Self:
        """Everything on the CPU."""
        return self.to(HOST)

    def cuda(self: Self, device: Any = "cuda") -> Self:
        """Everything on a GPU."""
        return self.to(f"cuda:{device}" if isinstance(device, int) else device)

    # ---- text -----------------------------------------------------------------------------

    def extra_repr(self) -> str:
        """The settings shown by `repr`."""
        return ""

    def __repr__(self) -> str:
        lines = [f"({n}): " + repr(m).replace("\n", "\n  ") for n, m in self._modules.items()]
        extra = self.extra_repr()
        if not lines:
            return f"{type(self).__name__}({extra})"
        body = "\n  ".join([extra, *lines] if extra else lines)
        return f"{type(self).__name__}(\n  {body}\n)"


def functional_call(
    module: Module,
    parameters: Mapping[str, Any],
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Call a Module with Tensors in the place of its parameters and buffers of those names; it is
    as before afterwards."""
    given = args if isinstance(args, tuple) else (args,)
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for name, value in parameters.items():
            path, _, last = name.rpartition(".")
            owner = module.get_submodule(path)
            table = next((t for t in (owner._parameters, owner._buffers) if last in t), None)
            if table is None:
                raise UserError(
                    "no such parameter",
                    op="functional_call",
                    got=repr(name),
                    expected=f"a name of {type(module).__name__}",
                )
            replaced.append((table, last, table[last]))
            table[last] = lift(value)
        return module(*given, **(kwargs or {}))
    finally:
        for table, last, value in reversed(replaced):
            table[last] = value


def _without_history(tensor: Tensor) -> Tensor:
    """The value; weights of a file are read from it again, for this Tensor alone."""
    return wrap(own_node(tensor.node)) if is_stored(tensor.node) else tensor.detach()


def _retype(tensor: Tensor, dtype: DType) -> None:
    """Another dtype for a Tensor that keeps its identity."""
    if tensor.dtype is dtype:
        return
    if mode.trace is not None:
        raise UserError(
            "a Module is cast inside a jitted function",
            op="Module.to",
            expected="the cast before the call",
            got=str(dtype),
        )
    node = tensor.node
    if is_stored(node):  # weights of a file are unpacked to it
        tensor.node = build.unpack(node.inputs[0], node.attrs["format"], dtype)
    else:
        tensor.node = own_node(build.cast(node, dtype))
    if tensor.requires_grad:
        leaves[tensor.node] = tensor
    tensor.grad = None


def _rehome(tensor: Tensor, device: Any, op: str) -> None:
    """Another device for a Tensor that keeps its identity; its gradient comes along."""
    for held in (tensor, tensor.grad):
        if held is None or is_stored(held.node):  # weights of a file are prepared where they run
            continue
        node = place(held.node, device, op)
        if node is not held.node:
            held.node = node
            if held.requires_grad:
                leaves[held.node] = held


__all__ = ["Keys", "Module", "Parameter"]

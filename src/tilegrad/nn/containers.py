"""Modules that hold others: in a row, in a list, by name.

Invariant: names in a state_dict are the positions ("0", "1", ...) or the keys, as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..core.errors import AxisError, DTypeError, UserError
from ..ir.whole import whole
from ..tensor.tensor import Tensor
from .module import Module, Parameter


def _checked(op: str, module: Any) -> Module:
    if not isinstance(module, Module):
        raise DTypeError("not a Module", op=op, expected="Module", got=type(module).__name__)
    return module


def _place(op: str, index: Any, count: int) -> int:
    index = whole(index, op, "a position")
    if not -count <= index < count:
        raise AxisError(
            "no such position", op=op, expected=f"-{count} <= index < {count}", got=index
        )
    return index % count


class _Row(Module):
    """Modules by position."""

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Module]:
        return iter(self._modules.values())

    def __getitem__(self, index: Any) -> Any:
        found = list(self._modules.values())
        if isinstance(index, slice):
            kind: Any = type(self)
            return kind(*found[index]) if isinstance(self, Sequential) else kind(found[index])
        return found[_place(type(self).__name__, index, len(found))]

    def __setitem__(self, index: int, module: Module) -> None:
        names = list(self._modules)
        name = names[_place(type(self).__name__, index, len(names))]
        self._modules[name] = _checked(type(self).__name__, module)

    def __delitem__(self, index: int) -> None:
        found = list(self._modules.values())
        del found[_place(type(self).__name__, index, len(found))]
        self._renumber(found)

    def _renumber(self, modules: Iterable[Module]) -> None:
        self._modules.clear()
        for i, module in enumerate(modules):
            self.add_module(str(i), _checked(type(self).__name__, module))

    def append(self, module: Module) -> Any:
        """One more at the end."""
        self.add_module(str(len(self)), _checked(type(self).__name__, module))
        return self

    def extend(self, modules: Iterable[Module]) -> Any:
        """More at the end."""
        for module in modules:
            self.append(module)
        return self

    def insert(self, index: int, module: Module) -> Any:
        """One more before a position."""
        found = list(self._modules.values())
        found.insert(index, module)
        self._renumber(found)
        return self

    def pop(self, index: int = -1) -> Module:
        """Take one out."""
        module = self[index]
        del self[index]
        return module


class Sequential(_Row):
    """Modules applied one after the other; also from one dict of names."""

    def __init__(self, *modules: Any) -> None:
        super().__init__()
        if len(modules) == 1 and isinstance(modules[0], Mapping):
            for name, module in modules[0].items():
                self.add_module(name, _checked("Sequential", module))
        else:
            self.extend(modules)

    def forward(self, x: Any) -> Any:
        """Each Module on the result of the one before."""
        for module in self:
            x = module(x)
        return x


class ModuleList(_Row):
    """A list of Modules."""

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        super().__init__()
        self.extend(modules)


class ModuleDict(Module):
    """Modules by key."""

    def __init__(self, modules: Mapping[str, Module] | None = None) -> None:
        super().__init__()
        self.update(modules or {})

    def __getitem__(self, key: str) -> Module:
        if key not in self._modules:
            raise UserError(
                "no such key", op="ModuleDict", got=key, expected=f"one of {list(self._modules)}"
            )
        return self._modules[key]

    def __setitem__(self, key: str, module: Module) -> None:
        self.add_module(key, _checked("ModuleDict", module))

    def __delitem__(self, key: str) -> None:
        del self._modules[key]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __contains__(self, key: str) -> bool:
        return key in self._modules

    def keys(self) -> Any:
        """The keys."""
        return self._modules.keys()

    def values(self) -> Any:
        """The Modules."""
        return self._modules.values()

    def items(self) -> Any:
        """Keys and Modules."""
        return self._modules.items()

    def update(self, modules: Mapping[str, Module]) -> None:
        """Take Modules from a dict."""
        for key, module in modules.items():
            self[key] = module


def _parameter(value: Any) -> Parameter:
    return value if isinstance(value, Parameter) else Parameter(value)


class ParameterList(Module):
    """A list of Parameters; Tensors become Parameters."""

    def __init__(self, values: Iterable[Any] = ()) -> None:
        super().__init__()
        self.extend(values)

    def __len__(self) -> int:
        return len(self._parameters)

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self._parameters.values())

    def __getitem__(self, index: Any) -> Any:
        found = list(self._parameters.values())
        if isinstance(index, slice):
            return ParameterList(found[index])
        return found[_place("ParameterList", index, len(found))]

    def __setitem__(self, index: int, value: Any) -> None:
        self._parameters[str(_place("ParameterList", index, len(self)))] = _parameter(value)

    def append(self, value: Any) -> ParameterList:
        """One more at the end."""
        self.register_parameter(str(len(self)), _parameter(value))
        return self

    def extend(self, values: Iterable[Any]) -> ParameterList:
        """More at the end."""
        for value in values:
            self.append(value)
        return self

    def extra_repr(self) -> str:
        """One line per Parameter."""
        return _listed(self._parameters)


class ParameterDict(Module):
    """Parameters by key; Tensors become Parameters."""

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        for key, value in (values or {}).items():
            self[key] = value

    def __getitem__(self, key: str) -> Parameter:
        if key not in self._parameters:
            raise UserError(
                "no such key",
                op="ParameterDict",
                got=key,
                expected=f"one of {list(self._parameters)}",
            )
        return self._parameters[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.register_parameter(key, _parameter(value))

    def __delitem__(self, key: str) -> None:
        del self._parameters[key]

    def __len__(self) -> int:
        return len(self._parameters)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __contains__(self, key: str) -> bool:
        return key in self._parameters

    def keys(self) -> Any:
        """The keys."""
        return self._parameters.keys()

    def values(self) -> Any:
        """The Parameters."""
        return self._parameters.values()

    def items(self) -> Any:
        """Keys and Parameters."""
        return self._parameters.items()

    def extra_repr(self) -> str:
        """One line per Parameter."""
        return _listed(self._parameters)


def _listed(parameters: Mapping[str, Tensor]) -> str:
    lines = [
        f"\n    ({n}): Parameter containing: [{p.dtype} of size {tuple(p.shape)}]"
        for n, p in parameters.items()
    ]
    return "".join(lines) + ("\n" if lines else "")


__all__ = ["ModuleDict", "ModuleList", "ParameterDict", "ParameterList", "Sequential"]

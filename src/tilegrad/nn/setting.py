"""Layers that are only a function and its settings: activations, pooling, losses.

A class names its function, the arguments that must be given and the defaults of the others.
Invariant: settings are plain attributes, so changing one is seen by jitted functions; a setting
that is a Tensor is a buffer and part of the state_dict, as in PyTorch.
"""

from __future__ import annotations

from typing import Any

from ..core.errors import UserError
from ..tensor.tensor import Tensor
from .module import Module


class Setting(Module):
    """A function of x and settings, by name; `defaults` lists them in order."""

    function: Any = None
    defaults: dict[str, Any] = {}
    required: tuple[str, ...] = ()
    tensors_given: tuple[str, ...] = ()  # settings that may be Tensors

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        names = (*self.required, *self.defaults)
        given = dict(zip(names, args))
        unknown = [n for n in kwargs if n not in names or n in given]
        missing = [n for n in self.required if n not in given and n not in kwargs]
        if len(args) > len(names) or unknown or missing:
            raise UserError(
                "bad arguments",
                op=type(self).__name__,
                expected=", ".join(names),
                got=f"{len(args)} by position and {list(kwargs)}",
            )
        for name, value in {**self.defaults, **given, **kwargs}.items():
            if name in self.tensors_given:
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *inputs: Any) -> Tensor:
        """The function of the inputs and the settings."""
        names = [n for n in (*self.required, *self.defaults) if n != "inplace"]
        result: Tensor = type(self).function(*inputs, **{n: getattr(self, n) for n in names})
        return result

    def extra_repr(self) -> str:
        """The settings."""
        names = [n for n in (*self.required, *self.defaults) if n not in self.tensors_given]
        return ", ".join(f"{n}={getattr(self, n)}" for n in names if self._shown(n))

    def _shown(self, name: str) -> bool:
        return name in self.required or getattr(self, name) != self.defaults[name]


__all__ = ["Setting"]

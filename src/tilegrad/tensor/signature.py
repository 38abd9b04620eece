"""Signatures of calls of a jitted function: what a trace depends on of its arguments.

Invariant: calls of equal signatures may share a trace; an object that holds state is told from
others as long as it lives, and its traces go with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from ..core.config import config
from ..core.errors import DTypeError
from ..graph.ops import unpack
from .annotation import VALUE
from .container import Structure, is_stateful
from .placement import state, tag
from .ranges import Symbolic
from .tensor import Tensor, from_data, mode, wrap

NUMBERS = (int, float)


class Signatures(Symbolic):
    """The part of a jitted function that tells calls apart."""

    _objects: dict[int, weakref.ref[Any]]  # by id: those that hold state

    def _signature(
        self, given: tuple[Any, ...], leaves: list[Any], structure: Structure
    ) -> tuple[tuple[Any, ...], dict[int, dict[str, Tensor]], dict[str, int] | None]:
        """The key of a call, the state its objects hold, and the values of Symbols."""
        axes = self._axes_of(structure)
        states: dict[int, dict[str, Tensor]] = {}
        symbols: dict[str, int] | None = {} if axes else None
        key: list[Any] = [structure.alike, mode.grad_enabled, config().numerics]
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                type_: Any = leaf._node.type
                shape = type_.shape
                if symbols is not None and axes is not None and axes[i]:
                    shape = self._bind_symbols(i, shape, axes, symbols, structure)
                key += (shape, type_.dtype, leaf._requires_grad)
                if state.active and (device := tag(leaf._node)):
                    key.append(device)
            elif leaf.__class__ in NUMBERS:
                size = axes[i].get(VALUE) if axes else None
                if size is not None:
                    self._bind_number(i, leaf, size, symbols, structure)
                key.append(leaf.__class__ if size is None else size)
            elif is_stateful(leaf):
                states[i] = leaf.tensors()
                key.append(self._state_key(leaf, states[i]))
            elif _is_array(leaf):
                leaves[i] = wrap(from_data(leaf))
                key += (leaves[i].shape, leaves[i].dtype, False)
            else:
                key.append((leaf.__class__, self._hashable(leaf, i, structure)))
        for position in self._static:
            value = given[position]
            key.append((value.__class__, self._hashable_static(value, position)))
        return tuple(key), states, symbols

    def _state_key(self, value: Any, tensors: dict[str, Tensor]) -> tuple[Any, ...]:
        """What a trace depends on of an object: itself, its Tensors and its settings."""
        if id(value) not in self._objects:
            try:
                self._objects[id(value)] = weakref.ref(value, self._forget(id(value)))
            except TypeError:
                self._objects[id(value)] = lambda: value  # type: ignore[assignment]
        parts: list[Any] = ["state", id(value)]
        for name, tensor in tensors.items():
            type_: Any = tensor._node.type
            parts += (name, id(tensor), type_.shape, type_.dtype, tensor._requires_grad)
            if tensor._node.op is unpack:
                parts.append(tensor._node.attrs["format"])  # weights of a file
            if state.active:
                parts.append(tag(tensor._node))
        settings = getattr(value, "settings", None)
        if callable(settings):
            parts.append(settings())
        return tuple(parts)

    def _forget(self, identity: int) -> Callable[[Any], None]:
        owner = weakref.ref(self)

        def gone(_: Any) -> None:
            jitted = owner()
            if jitted is not None:
                jitted._objects.pop(identity, None)
                for key in list(jitted._lowered):
                    if any(isinstance(k, tuple) and k[:2] == ("state", identity) for k in key):
                        jitted._lowered.pop(key, None)

        return gone

    def _hashable(self, leaf: Any, index: int, structure: Structure) -> Any:
        try:
            hash(leaf)
        except TypeError:
            raise DTypeError(
                f"argument {self._paths(structure)[index]} cannot be traced",
                op=f"jit {self.name}",
                expected="Tensors, numbers, containers of them, or hashable static values",
                got=type(leaf).__name__,
            ) from None
        return leaf

    def _hashable_static(self, value: Any, position: int) -> Any:
        try:
            hash(value)
        except TypeError:
            raise DTypeError(
                f"static argument {self.names[position]} is not hashable",
                op=f"jit {self.name}",
                expected="a hashable value",
                got=type(value).__name__,
                hint="use a tuple in place of a list, or do not mark it static",
            ) from None
        return value


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (np.ndarray, np.generic)) or type(leaf).__module__ == "torch"


__all__ = ["Signatures"]

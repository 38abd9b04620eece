"""The adapters of an engine: which there are, and which slot has which, on the device.

A request that begins writes one number, the adapter of its slot; steps read it there and pick for
each token what its request has. So requests with different adapters share steps, and one with
another adapter rebinds nothing. Invariant: a slot's number is that of the request that has it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from ..core.errors import UserError
from ..exchange.adapter import read_adapter
from ..models.decoder.adapted import adapted
from ..models.decoder.model import Decoder
from ..nn.adapted import Picks
from ..tensor.creation import tensor
from ..tensor.tensor import Tensor
from .ledger import write

NONE = -1
Folders = Mapping[str, str | os.PathLike[str]]


class Adapters:
    """Adapters by name, for a decoder and so many slots; `model` is the decoder with them."""

    def __init__(self, model: Decoder, folders: Folders, slots: int, device: str) -> None:
        self.names = checked_names(folders)
        read = [read_adapter(folders[name]) for name in self.names]
        self.picks = Picks()
        dtype = model.norm.weight.dtype
        self.model = adapted(model, read, self.picks, device, dtype)
        self._host = np.full(slots, NONE, np.int32)
        self.chosen = tensor(self._host, device=device)
        self._fresh: list[int] = []  # slots that the device was not told

    def __repr__(self) -> str:
        return f"<adapters: {', '.join(self.names)}>"

    def tensors(self) -> dict[str, Tensor]:
        """What steps read besides the decoder, for `jit`."""
        return {"chosen": self.chosen}

    def seat(self, slot: int, name: str) -> None:
        """A slot has this adapter from the next `send` on; "" is none."""
        number = self.names.index(name) if name else NONE
        if self._host[slot] != number:
            self._host[slot] = number
            self._fresh.append(slot)

    def send(self) -> None:
        """Tell the device of slots that changed: one copy, or none."""
        if self._fresh:
            first, last = min(self._fresh), max(self._fresh)
            write(self.chosen, first, self._host[first : last + 1])
            self._fresh = []

    def refuse(self, name: str) -> None:
        """An error for an adapter that there is not."""
        if name and name not in self.names:
            raise no_adapter(name, self.names)


def picking(
    adapters: Adapters | None, slots: Tensor, row: Tensor | None = None
) -> AbstractContextManager[None]:
    """Within this, the layers of a step's decoder pick what the tokens' requests have.

    Slots are those of rows; token t belongs to row[t], or to row t.
    """
    if adapters is None:
        return nullcontext()
    chosen = adapters.chosen.index_select(0, slots)
    return adapters.picks.of(chosen if row is None else chosen.index_select(0, row))


def no_adapter(name: Any, names: Sequence[str]) -> UserError:
    """The error for an adapter that there is not."""
    return UserError(
        "there is no such adapter",
        op="Request",
        expected=", ".join(names) or "none: the engine was made without adapters",
        got=str(name)[:100],
    )


def checked_names(folders: Folders) -> tuple[str, ...]:
    """The names of adapters."""
    if not isinstance(folders, Mapping) or not folders:
        raise UserError(
            "adapters are folders by name", op="LLM", expected="{name: folder}", got=repr(folders)
        )
    for name in folders:
        if not isinstance(name, str) or not name.strip():
            raise UserError("an adapter has no name", op="LLM", expected="text", got=repr(name))
    return tuple(folders)


__all__ = ["Adapters", "no_adapter", "picking"]

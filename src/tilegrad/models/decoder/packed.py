"""A decoder's layers over quantised weights: which of them are packed, and which together.

Linear layers and embeddings whose weights a file stores quantised become `nn.PackedLinear` and
`nn.PackedEmbedding`; q/k/v and gate/up whose Formats agree share one Packed, so that they are one
product, and so do an embedding and the head that is tied to it. What does not fit (weights stored
turned, experts, sizes that no kernel takes) is unpacked as ever. Invariant: a layer is replaced
only after all weights were found and fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...core.dtype import DType
from ...core.errors import ShapeError
from ...nn.linear import Embedding, Linear
from ...nn.module import Module
from ...nn.packed import PackedEmbedding, PackedLinear
from ...tensor.quantised import Packed, Room, device_of, pack, why_not

if TYPE_CHECKING:
    from .names import Names, Source

TOGETHER = (("query", "key", "value"), ("gate", "up"))
Progress = Callable[[str, float, float], None]


@dataclass
class Rows:
    """Weights of one layer as `pack` takes them: rows of a stored tensor, in our order."""

    name: str
    stored: Any
    arrange: Callable[[Any], Any] = field(repr=False)
    shape: tuple[int, int] = (0, 0)

    @property
    def format(self) -> Any:
        """How they are stored."""
        return self.stored.format

    @property
    def raw(self) -> Any:
        """Their bytes."""
        return self.arrange(self.stored.raw)

    def drop(self) -> None:
        """Let the system take back the file's pages."""
        self.stored.drop()


def is_quantised(value: Any) -> bool:
    """Whether a weight is a tensor of a file, stored quantised."""
    form = getattr(value, "format", None)
    return form is not None and bool(getattr(form, "quantised", False))


def rows_of(
    name: str, names: Names, source: Source | None, layer: Module, device: Any
) -> Rows | None:
    """The weights of a layer if they are stored quantised and a kernel takes them."""
    if source is None or source.turned or "{}" in source.name:
        return None
    stored = names.given[source.name]
    if not is_quantised(stored) or len(stored.shape) != 2:
        return None
    rows = Rows(name, stored, lambda raw: names.arranged(name, source, raw))
    rows.shape = (len(rows.raw), stored.shape[1])
    assert isinstance(layer, (Linear, Embedding))
    if rows.shape != tuple(layer.weight.shape):
        raise ShapeError(
            f"{source.name} does not fit",
            op="Decoder.load",
            got=rows.shape,
            expected=f"{name} of {tuple(layer.weight.shape)}",
        )
    return None if why_not(rows, device) else rows


def plan(
    model: Module, names: Names, picked: Mapping[str, Source | None], device: Any
) -> list[list[Rows]]:
    """The layers to pack, those together that become one product."""
    found: dict[str, Rows] = {}
    for path, layer in model.named_modules():
        name = f"{path}.weight"
        if isinstance(layer, (Linear, Embedding)) and name in picked:
            rows = rows_of(name, names, picked[name], layer, device)
            if rows is not None:
                found[path] = rows
    groups: list[list[Rows]] = []
    for path, rows in found.items():
        parent, _, last = path.rpartition(".")
        several = next((t for t in TOGETHER if last in t), (last,))
        paths = [f"{parent}.{p}" if parent else p for p in several]
        mates = [found[p] for p in paths if p in found]
        if len(mates) < len(several) or len({m.format.name for m in mates}) > 1:
            groups.append([rows])
        elif last == several[0]:
            groups.append(mates)
    return groups


def replace(
    model: Module,
    groups: list[list[Rows]],
    device: Any,
    dtype: DType,
    progress: Progress | None = None,
) -> None:
    """Pack the layers and put them in the place of those that were there."""
    total = sum(r.stored.bytes for group in groups for r in group)
    done, on_cpu = 0, device_of(device) == "cpu"
    room = Room(groups) if groups and on_cpu else None
    for group in groups:
        packed, first = pack(group, device, room), 0
        for rows in group:
            path = rows.name.removesuffix(".weight")
            _put(model, path, packed, (first, first + rows.shape[0]), dtype)
            first += rows.shape[0]
            done += rows.stored.bytes
        if progress is not None:
            progress("pack", done, total)


def _put(model: Module, path: str, packed: Packed, rows: tuple[int, int], dtype: DType) -> None:
    """One layer, and the head if it is tied to this embedding."""
    parent, _, last = path.rpartition(".")
    holder = model.get_submodule(parent)
    old = getattr(holder, last)
    if isinstance(old, Linear):
        setattr(holder, last, PackedLinear(packed, old.bias, rows))
        return
    setattr(holder, last, PackedEmbedding(packed, dtype))
    for name, layer in list(holder.named_children()):
        if isinstance(layer, Linear) and layer.weight is old.weight:
            setattr(holder, name, PackedLinear(packed, layer.bias))


__all__ = ["Rows", "is_quantised", "plan", "replace"]

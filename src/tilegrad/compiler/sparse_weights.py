"""Stored weights of which two of every four are kept, as sparse matrix units take them.

`Kept` gives the elements that a Format keeps, as they are stored, and the words that say where they
were, in the order of `core.kept`; rows are whole tiles of the kernel. Invariant: elements are those
of the Format, bit for bit; rows and columns that are added keep nothing but zeros.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from ..core.dtype import DType, float32, int32
from ..core.errors import UserError
from ..core.format import NUMPY, Format
from ..core.kept import words_of
from ..core.scaled import digits
from ..core.target import Target
from ..graph import build, ops
from ..ir.node import Node
from ..ir.text import ATTRIBUTE_PARSERS
from ..ir.types import product
from ..kernels.matmul.wide_sparse import ROWS, depth_of
from .as_stored import AsStored

KIND = "kept"


class Kept(AsStored):
    """What some rows of a Format keep, and where."""

    text_name = KIND
    step = ROWS

    @property
    def name(self) -> str:
        """The name, for people."""
        return f"kept_{self.form}"

    @property
    def dtype(self) -> DType:
        """Of the elements."""
        element = self.format.element
        assert element is not None and element.dtype is not None
        return element.dtype

    def parts(self) -> list[tuple[str, tuple[int, ...], DType]]:
        """Elements, words, then the Fields of a row."""
        rows, depth = -(-self.rows[0] // ROWS) * ROWS, depth_of(self.dtype)
        wide = -(-self.columns // depth) * depth
        own = [(part.name, (rows, part.count), part.dtype) for part in self.format.row]
        found = [("codes", (rows, self.columns // 2), self.dtype)]
        return [*found, ("words", (rows // 16, wide // 2), int32), *own]

    def pack(self, raw: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
        """The parts of some rows of bytes."""
        fields, rows = self.format.split(raw), -(-len(raw) // ROWS) * ROWS
        positions = digits(NUMPY, fields["places"].reshape(len(raw), -1), 2)
        pairs = positions.reshape(len(raw), -1, 2)
        if (pairs[..., 0] == pairs[..., 1]).any():
            raise UserError("two kept elements lie at one place", op=self.name)
        depth = depth_of(self.dtype)
        wide = -(-self.columns // depth) * depth
        whole = np.tile(np.array([0, 1], np.uint8), (rows, wide // 4))
        whole[: len(raw), : positions.shape[1]] = positions
        found = {name: fields[name] for name in ("codes", *(p.name for p in self.format.row))}
        made = {
            name: np.pad(x.reshape(len(raw), -1), ((0, rows - len(raw)), (0, 0)))
            for name, x in found.items()
        }
        return {**made, "words": words_of(whole, self.dtype.size, depth)}

    def to_text(self) -> str:
        """The facts as JSON."""
        return json.dumps([KIND, self.form, self.rows[0], self.columns])


def parse_kept(text: str) -> Kept:
    """The Kept that `to_text` wrote."""
    _, form, rows, columns = json.loads(text)
    return Kept(form, rows, columns)


ATTRIBUTE_PARSERS[KIND] = parse_kept


def why_not(form: Format, columns: int, target: Target) -> str:
    """Why no matrix unit takes what a Format keeps of rows; '' where one does."""
    dtype = form.element.dtype if form.element is not None else None
    units = [u for u in target.asynchronous_units if u.sparse and u.inputs == (dtype, dtype)]
    if dtype is None or not units:
        return f"no matrix unit of {target.name} takes two of every four of {form.name}"
    return "" if columns * dtype.size % 32 == 0 else "what is kept of a row is no 16 bytes"


def product_of(x: Node, raw: Node, form: Format, dot: Node) -> tuple[Node, dict[str, Node]]:
    """x (..., k) times the transpose of stored weights, and the Fields that their rows have."""
    rows, columns = dot.inputs[1].shape
    callee = Kept(form.name, rows, columns)
    names = [name for name, _, _ in callee.parts()]
    fields = dict(zip(names, build.items(ops.call(raw, callee=callee))))
    flat = build.reshape(x, (product(x.shape[:-1]), columns))
    attrs = {"rows": rows, "depth": depth_of(x.dtype), "dtype": float32}
    total = ops.sparse_dot(flat, fields.pop("codes"), fields.pop("words"), **attrs)
    own = {name: build.slice_axis(field, 0, 0, rows) for name, field in fields.items()}
    return build.reshape(total, dot.shape), own


__all__ = ["KIND", "Kept", "parse_kept", "product_of", "why_not"]

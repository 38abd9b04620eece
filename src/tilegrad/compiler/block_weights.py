"""Stored weights of codes with a scale for each block of rows and columns, as kernels take them.

`Blocks` gives the codes as they are stored and one scale for each block, in float32; rows are whole
blocks. Invariant: codes are those of the Format, bit for bit; rows that are added are zeros.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from ..core.dtype import DType, float32
from ..core.errors import UserError
from ..core.format import NUMPY, Format
from ..graph import build, ops
from ..ir.node import Node
from ..ir.text import ATTRIBUTE_PARSERS
from ..kernels.matmul.plan import BLOCK
from .as_stored import AsStored

KIND = "blocks"


class Blocks(AsStored):
    """Codes of some rows of a Format, and scales of their blocks."""

    text_name = KIND
    step = BLOCK

    @property
    def name(self) -> str:
        """The name, for people."""
        return f"blocks_{self.form}"

    def parts(self) -> list[tuple[str, tuple[int, ...], DType]]:
        """Codes, and scales."""
        down, across = -(-self.rows[0] // BLOCK), self.columns // BLOCK
        dtype = self.format.fields[0].dtype
        return [("codes", (down * BLOCK, self.columns), dtype), ("scale", (down, across), float32)]

    def pack(self, raw: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
        """The parts of some rows of bytes."""
        fields, more, form = self.format.split(raw), -len(raw) % BLOCK, self.format
        assert form.scales is not None
        scales = form.scales(NUMPY, fields)[0].reshape(len(raw), -1)
        blocks = np.pad(scales, ((0, more), (0, 0)), "edge").reshape(-1, BLOCK, scales.shape[1])
        if (blocks != blocks[:, :1]).any():
            raise UserError(
                "rows of a block have other scales",
                op=self.name,
                expected=f"one for {BLOCK} rows, from the first on",
            )
        codes = np.pad(fields["codes"].reshape(len(raw), -1), ((0, more), (0, 0)))
        return {"codes": codes, "scale": np.ascontiguousarray(blocks[:, 0])}

    def to_text(self) -> str:
        """The facts as JSON."""
        return json.dumps([KIND, self.form, self.rows[0], self.columns])


def parse_blocks(text: str) -> Blocks:
    """The Blocks that `to_text` wrote."""
    _, form, rows, columns = json.loads(text)
    return Blocks(form, rows, columns)


ATTRIBUTE_PARSERS[KIND] = parse_blocks


def parts_of(raw: Node, form: Format, rows: int, columns: int) -> tuple[Node, Node]:
    """Codes (rows in whole blocks, columns) of stored weights, and scales of their blocks."""
    codes, scale = build.items(ops.call(raw, callee=Blocks(form.name, rows, columns)))
    return codes, scale


def product_of(codes: Node, scale: Node, raw: Node, form: Format, rows: int) -> Node:
    """Codes (m, k) with scales (m, blocks) times the transpose of stored weights."""
    stored, own = parts_of(raw, form, rows, codes.shape[1])
    weights = build.slice_axis(stored, 0, 0, rows)
    return ops.block_dot(codes, weights, scale, own, block=BLOCK, rows=BLOCK, dtype=float32)


__all__ = ["KIND", "Blocks", "parse_blocks", "parts_of", "product_of"]

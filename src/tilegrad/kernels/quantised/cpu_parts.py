"""How CPU kernels keep quantised weights: codes in planes of bits, 16 rows side by side.

Sixteen rows are a *block*: lane r of every vector belongs to row r. A row is taken in *steps* of
32 columns, eight *quads* of four columns each. A quad of a block is 16 words of 32 bits, a byte
for each column: what an instruction that multiplies bytes reads at once. Codes are kept without
sign, `centre` above their value, as planes of 8, 4, 2 or 1 bits: in a plane of 4 bits quad j
shares vector j % 4 with quad j + 4, which has the upper half of the bytes, and so on. That is how
files of Q4_0, Q4_1, Q5_0 and Q5_1 order nibbles anyway: only rows are interleaved.

A value is scale * (code - centre) + minimum for each group of 16 or 32 columns, or
scale * (code - zero). Formats of 256
columns keep their two levels: `scale` and `minimum` for 256, whole numbers `scales` and `minima`
for a group. Invariant: nothing is rounded; a Format's bytes grow by less than a fifth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.dtype import DType, float16, float32, int8, int32, uint8
from ...core.format import NUMPY, Format
from ...ir.symbol import round_up
from .shape import Part, QuantisedShape

Array = np.ndarray[Any, Any]
ROWS = 16  # of a block
STEP = 32  # columns
QUADS = STEP // 4


@dataclass(frozen=True)
class Layout:
    """What the parts of a Format are."""

    planes: tuple[int, ...]  # bits of each plane, the lowest bits first
    centre: int = 0
    minimum: bool = False
    group: int = 32
    span: int = 32  # columns that share an entry of `scale`
    scale: DType = float16
    small: DType | None = None  # of `scales`, where there are two levels
    zero: bool = False  # `minimum` holds what codes stand above 0, in scales
    doubled: bool = False  # codes stand for twice a float of 4 bits (E2M1)

    @property
    def vectors(self) -> int:
        """Vectors of 16 words that hold the codes of a step."""
        return sum(self.planes)


LAYOUTS: dict[str, Layout] = {
    "Q4_0": Layout((4,), 8),
    "Q4_1": Layout((4,), minimum=True),
    "Q4_Z": Layout((4,), minimum=True, zero=True),
    "Q5_0": Layout((4, 1), 16),
    "Q5_1": Layout((4, 1), minimum=True),
    "Q8_0": Layout((8,), 128),
    "Q2_K": Layout((2,), 0, True, 16, 256, small=uint8),
    "Q3_K": Layout((2, 1), 4, False, 16, 256, small=int8),
    "Q4_K": Layout((4,), 0, True, 32, 256, small=uint8),
    "Q5_K": Layout((4, 1), 0, True, 32, 256, small=uint8),
    "Q6_K": Layout((4, 2), 32, False, 16, 256, small=int8),
    "MXFP4": Layout((4,), 12, scale=float32, doubled=True),
}


def layout_of(form: Format) -> Layout:
    """The layout of a Format."""
    return LAYOUTS[form.name]


def parts(shape: QuantisedShape) -> list[Part]:
    """Names, shapes and dtypes of the parts, in order."""
    layout = layout_of(shape.format)
    blocks, columns = round_up(shape.rows, ROWS) // ROWS, shape.columns
    found: list[Part] = [
        ("codes", (blocks, columns // STEP, layout.vectors, ROWS), int32),
        ("scale", (blocks, columns // layout.span, ROWS), layout.scale),
    ]
    if layout.minimum:
        found.append(("minimum", (blocks, columns // layout.span, ROWS), layout.scale))
    if layout.small is not None:
        found.append(("scales", (blocks, columns // layout.group, ROWS), layout.small))
        if layout.minimum:
            found.append(("minima", (blocks, columns // layout.group, ROWS), layout.small))
    return found


def pack(shape: QuantisedShape, raw: Array) -> dict[str, Array]:
    """Bytes (n, row bytes) of the Format as the parts of n rows; rows are added as zeros."""
    form, layout = shape.format, layout_of(shape.format)
    assert form.scales is not None
    more = -len(raw) % ROWS
    if more:
        raw = np.concatenate([raw, np.zeros((more, raw.shape[1]), np.uint8)])
    fields = form.split(raw)  # (n, file's blocks, count)
    scale = form.scales(NUMPY, fields)[0] if layout.doubled else fields["scale"]
    found = {"codes": _across(_words(form, layout, fields), 2), "scale": _across(scale, 1)}
    if layout.minimum:
        found["minimum"] = _across(fields["zero" if layout.zero else "minimum"], 1)
    if layout.small is not None:
        scales, minima = form.whole_scales(fields)
        found["scales"] = _across(scales.astype(layout.small.numpy), 1)
        if minima is not None:
            found["minima"] = _across((-minima).astype(layout.small.numpy), 1)
    return found


def _across(x: Array, keep: int) -> Array:
    """(n, ..., keep axes) with 16 rows side by side: (blocks, ..., 16), other axes joined."""
    rows = x.reshape(len(x) // ROWS, ROWS, -1, *x.shape[x.ndim - keep + 1 :])
    return np.ascontiguousarray(np.moveaxis(rows, 1, -1))


def _words(form: Format, layout: Layout, fields: dict[str, Array]) -> Array:
    """Codes (n, steps, vectors) as words of 32 bits."""
    if form.name in ("Q4_0", "Q4_1", "Q4_Z", "MXFP4"):
        return _whole(fields["nibbles"])
    if form.name == "Q8_0":
        return _whole(fields["codes"]) ^ np.int32(-0x7F7F7F80)  # 0x80 in each byte
    assert form.codes is not None
    codes = form.codes(NUMPY, fields).view(np.uint8) + np.uint8(layout.centre)
    codes = codes.reshape(len(codes), -1, QUADS, 4)  # (n, steps, quads, columns)
    found, low = [], 0
    for bits in layout.planes:
        plane = (codes >> np.uint8(low)) & np.uint8((1 << bits) - 1)
        each = 8 // bits  # quads of a vector
        plane = plane.reshape(*plane.shape[:2], each, QUADS // each, 4)
        joined = plane[:, :, 0].copy()
        for place in range(1, each):
            joined |= plane[:, :, place] << np.uint8(place * bits)
        found.append(joined)
        low += bits
    return _whole(np.concatenate(found, axis=2))[..., 0]


def _whole(x: Array) -> Array:
    """Bytes as words; a view where they lie so."""
    if x.strides[-1] != 1:
        x = np.ascontiguousarray(x)
    return x.view(np.int32)

"""How CPU kernels keep quantised weights: codes in planes of bits, 16 rows side by side.

Sixteen rows are a *block*: lane r of every vector belongs to row r. A row is taken in *steps* of
32 columns, eight *quads* of four columns each. A quad of a block is 16 words of 32 bits, a byte
for each column: what an instruction that multiplies bytes reads at once. Codes are kept without
sign, `centre` above their value, as planes of 8, 4, 2 or 1 bits: in a plane of 4 bits quad j
shares vector j % 4 with quad j + 4, which has the upper half of the bytes, and so on. That is how
files of Q4_0, Q4_1, Q5_0 and Q5_1 order nibbles anyway: only rows are interleaved.

Formats of two levels have `scale` and `minimum` for 256 columns, and whole numbers `scales` and
`minima` for a group. Invariant: nothing is rounded; a Format's bytes grow by less than a fifth.
"""

from __future__ import annotations

import numpy as np

from ...core.dtype import float16, float32, int8, int32, uint8
from ...core.format import NUMPY, Format
from ...ir.symbol import round_up
from .layout import Array, Layout, joined
from .shape import Part, QuantisedShape

ROWS = 16  # of a block
STEP = 32  # columns
QUADS = STEP // 4
ALL_SIGNS = -0x7F7F7F80  # the highest bit of each byte of a word


def parts(shape: QuantisedShape) -> list[Part]:
    """Names, shapes and dtypes of the parts, in order."""
    layout, blocks = shape.layout, round_up(shape.rows, ROWS) // ROWS
    found: list[Part] = [
        ("codes", (blocks, shape.columns // STEP, sum(layout.planes), ROWS), int32)
    ]
    levels = [(shape.format.block, float32 if layout.doubled else float16)]
    if layout.two_levels:
        levels.append((layout.group, uint8 if layout.least else int8))
    for (columns, dtype), names in zip(levels, (("scale", "minimum"), ("scales", "minima"))):
        for name in names if layout.least else names[:1]:
            found.append((name, (blocks, shape.columns // columns, ROWS), dtype))
    return found


def pack(shape: QuantisedShape, raw: Array) -> dict[str, Array]:
    """Bytes (n, row bytes) of the Format as the parts of n rows; rows are added as zeros."""
    form, layout = shape.format, shape.layout
    assert form.scales is not None
    more = -len(raw) % ROWS
    if more:
        raw = np.concatenate([raw, np.zeros((more, raw.shape[1]), np.uint8)])
    fields = form.split(raw)  # (n, file's blocks, count)
    found = {"scale": form.scales(NUMPY, fields)[0] if layout.doubled else fields["scale"]}
    if layout.least:
        found["minimum"] = fields[layout.least]
    if layout.two_levels:
        found["scales"], minima = form.whole_scales(fields)
        if minima is not None:
            found["minima"] = -minima
    codes = _across(_words(form, layout, fields), 2)
    (_, *others) = parts(shape)
    return {"codes": codes} | {
        name: _across(found[name].astype(dtype.numpy, copy=False), 1) for name, _, dtype in others
    }


def _across(x: Array, keep: int) -> Array:
    """(n, ..., keep axes) with 16 rows side by side: (blocks, ..., 16), other axes joined."""
    rows = x.reshape(len(x) // ROWS, ROWS, -1, *x.shape[x.ndim - keep + 1 :])
    return np.ascontiguousarray(np.moveaxis(rows, 1, -1))


def _words(form: Format, layout: Layout, fields: dict[str, Array]) -> Array:
    """Codes (n, steps, vectors) as words of 32 bits."""
    if form.name in ("Q4_0", "Q4_1", "Q4_Z", "MXFP4"):
        return _whole(fields["nibbles"])
    if form.name == "Q8_0":
        return _whole(fields["codes"]) ^ np.int32(ALL_SIGNS)
    assert form.codes is not None
    codes = form.codes(NUMPY, fields).view(np.uint8) + np.uint8(layout.centre)
    codes = codes.reshape(len(codes), -1, QUADS, 4)  # (n, steps, quads, columns)
    found, low = [], 0
    for bits in layout.planes:
        each = 8 // bits  # quads of a vector
        plane = (codes >> np.uint8(low)).reshape(*codes.shape[:2], each, QUADS // each, 4)
        found.append(joined(plane.swapaxes(2, 3), bits))
        low += bits
    return _whole(np.concatenate(found, axis=2))[..., 0]


def _whole(x: Array) -> Array:
    """Bytes as words; a view where they lie so."""
    if x.strides[-1] != 1:
        x = np.ascontiguousarray(x)
    return x.view(np.int32)

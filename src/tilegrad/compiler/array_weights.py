"""Stored weights as an array multiplies them: their codes, prepared once, and scales behind them.

`Codes` gives the codes of a Format's rows as an array of elements, of int4 or fp8 where the array
has a rate for those; where two of every four are kept and the array has a 2:4 unit, the Graph says
so by `pruned`. A product of codes is the array's, and scales of rows are factors behind it.
Invariant: sums of whole numbers are exact; values of others are those of the unpacked operands, up
to the order and rounding of sums, and but for one rounding less: codes of fp8 times their scale are
rounded by an unpack to 16-bit floats; here sums are multiplied by the scale in float32.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from ..core.dtype import DType, dtype_of, float8_e4m3, int4, int8
from ..core.format import NUMPY, Format, format_of
from ..core.target import Target
from ..graph import build, ops
from ..ir.node import Node
from ..ir.text import ATTRIBUTE_PARSERS
from ..tile.array import MIXED, SPARSE
from .as_stored import AsStored
from .code_products import factored, with_scales

KIND = "codes"


class Codes(AsStored):
    """The codes of some rows of a Format, and what each row has once."""

    text_name = KIND

    def __init__(self, form: str, rows: int, columns: int, dtype: DType) -> None:
        super().__init__(form, rows, columns)
        self.dtype = dtype

    @property
    def name(self) -> str:
        """The name, for people."""
        return f"codes_{self.form}"

    def parts(self) -> list[tuple[str, tuple[int, ...], DType]]:
        """Codes, then the Fields of a row."""
        (rows,) = self.rows
        own = [(part.name, (rows, part.count), part.dtype) for part in self.format.row]
        return [("codes", (rows, self.columns), self.dtype), *own]

    def pack(self, raw: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
        """The parts of some rows of bytes."""
        fields = self.format.split(raw)
        assert self.format.codes is not None
        codes = np.asarray(self.format.codes(NUMPY, fields)).reshape(len(raw), -1)
        found = {p.name: np.ascontiguousarray(fields[p.name][:, 0]) for p in self.format.row}
        return {"codes": codes.astype(np.float32).astype(self.dtype.numpy), **found}

    def to_text(self) -> str:
        """The facts as JSON."""
        return json.dumps([KIND, self.form, self.rows[0], self.columns, self.dtype.name])


def parse_codes(text: str) -> Codes:
    """The Codes that `to_text` wrote."""
    _, form, rows, columns, dtype = json.loads(text)
    return Codes(form, rows, columns, dtype_of(dtype))


ATTRIBUTE_PARSERS[KIND] = parse_codes


def code_dtype(form: Format, target: Target) -> DType:
    """What codes are stored as for a Target: elements, or of half the bits at that rate."""
    assert form.element is not None
    element = int8 if target.array is None else target.array.inputs[0]
    half = next((u.inputs[1] for u in target.array_rates if u.name == MIXED), element)
    if form.element.name == "E4M3":
        return half if half is float8_e4m3 else element
    return half if half is int4 and form.element.bits <= 4 else element


def codes_of(raw: Node, form: Format, columns: int, target: Target) -> dict[str, Node]:
    """The parts of rows of bytes, as they are prepared."""
    callee = Codes(form.name, raw.shape[0], columns, code_dtype(form, target))
    call = ops.call(raw, callee=callee)
    items = build.items(call) if len(callee.parts()) > 1 else [call]
    found = {name: item for (name, _, _), item in zip(callee.parts(), items)}
    if form.sparse and any(unit.name == SPARSE for unit in target.array_rates):
        found["codes"] = ops.pruned(found["codes"])
    return found


def whole_values(node: Node, target: Target) -> Node:
    """An `unpack` to whole numbers: the codes themselves."""
    form = format_of(node.attrs["format"])
    found = codes_of(node.inputs[0], form, node.shape[-1], target)
    return build.cast(found["codes"], node.dtype)


def why_not(dot: Node, target: Target) -> str:
    """Why a product of something and stored weights is none of the array's; '' where it is."""
    x, weight = dot.inputs
    form, unit = format_of(weight.attrs["format"]), target.array
    assert unit is not None
    if dot.attrs["batch"] != ((), ()) or dot.attrs["contract"] != ((len(x.shape) - 1,), (1,)):
        return "it sums over another axis than the last"
    if not factored(form):
        return "codes of a row have more than one factor"
    assert form.element is not None
    whole = form.element.name.startswith("INT")
    if unit.accumulator.is_float:
        plain = form.element.dtype in (unit.inputs[0], float8_e4m3)
        other = form.element if x.dtype is unit.inputs[0] else x.dtype
        same = plain and other is form.element
        return "" if same else f"the array multiplies {unit.inputs[0].name}, not {other.name}"
    if not whole or x.op is not ops.unpack or x.inputs[0].op is not ops.pack:
        return "the array multiplies whole numbers, and its other operand is rounded to none"
    given = format_of(x.attrs["format"])
    known = given.element is not None and given.element.name == "INT8" and not given.sparse
    return "" if known and factored(given) else f"the array multiplies INT8, not {given.name}"


def of_codes(
    dot: Node, x: Node, encoded: dict[str, Node] | None, raw: Node, target: Target
) -> Node:
    """The product, of `x` or of its codes and scales, and of stored weights."""
    weight = dot.inputs[1]
    form, unit = format_of(weight.attrs["format"]), target.array
    assert unit is not None
    fields = codes_of(raw, form, weight.shape[-1], target)
    lead, element = dot.shape[:-1], unit.inputs[0]
    left = x if encoded is None else build.reshape(encoded["codes"], (*lead, weight.shape[-1]))
    right = build.cast(fields["codes"], element)
    total = build.dot(left, right, dot.attrs["batch"], dot.attrs["contract"], unit.accumulator)
    return with_scales(dot, total, encoded or {}, fields)


__all__ = ["KIND", "Codes", "of_codes", "parse_codes", "whole_values", "why_not"]

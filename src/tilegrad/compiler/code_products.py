"""Products of codes: what unpacked operands give, as a product of their codes and their scales.

sum_k (s_m a_mk) (t_n b_nk) = s_m t_n sum_k a_mk b_nk: where a row of each operand has one scale (or
all rows have), and matrix units of the Target multiply the codes themselves, or instructions of a
CPU for bytes, nothing is unpacked.
The sum over codes is an ordinary dot, whose epilogue multiplies by both scales like any other
factors; activations are encoded by ordinary ops, which fuse with the norm before them. Codes and
scales of weights lie on the Device as they are stored. Invariant: values are those of the unpacked
operands, up to the order and rounding of sums: nothing is rounded that was not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.config import invariant
from ..core.dtype import float8_e4m3, float32, int8, int32
from ..core.errors import UserError
from ..core.format import Format, Grain, format_of
from ..core.scaled import most_of
from ..core.target import Target
from ..graph import build, ops
from ..graph.unpack import encoded
from ..ir.node import Node
from ..ir.symbol import high
from ..ir.types import product
from ..kernels.matmul.plan import BLOCK
from . import block_weights, sparse_weights
from .as_stored import stored_fields
from .norms import norm_of

STEP = 16  # elements of a row, and rows of weights, that products come in
LEAST_SCALE = 2.0**-126  # scale of a row


def why_not(dot: Node, target: Target) -> str:
    """Why a product of something and unpacked weights is none of codes; '' where it is."""
    x, weight = dot.inputs[:2]
    form, last = format_of(weight.attrs["format"]), ((len(x.shape) - 1,), (1,))
    summed: dict[str, Any] = {"batch": ((), ()), "contract": last}
    if dot.op is ops.grouped_dot:
        x, summed = source_of_rows(x), {"axis": 2}
        if form.sparse or (form.grain.columns and weight.shape[1] % BLOCK):
            return "weights of groups are codes with one scale for each row, or in whole blocks"
    if not plain(dot) and not (x.op is ops.unpack and x.inputs[0].op is ops.pack):
        return "its other operand is not rounded to a format"
    if any(dot.attrs[name] != value for name, value in summed.items()):
        return "it sums over another axis than the last"
    if plain(dot):
        return sparse_weights.why_not(form, weight.shape[-1], target) or _odd(weight)
    given = format_of(x.attrs["format"])
    if not (factored(form) and factored(given)) and not in_blocks(form, given):
        return "codes of a row have more than one factor, and those of blocks are others"
    assert form.element is not None and given.element is not None
    units = target.asynchronous_units if target.has_threads else target.matrix
    kinds, pair = {unit.inputs for unit in units}, (given.element, form.element)
    if target.multiplies_bytes and dot.op is ops.dot:
        kinds.add((int8, int8))
    if tuple(element.dtype for element in pair) not in kinds:
        return f"no matrix unit of {target.name} multiplies {given.element.name}"
    taken = [float8_e4m3, *([] if form.grain.columns else [int8])]
    if pair[0].dtype is not pair[1].dtype or pair[0].dtype not in taken:
        names = " or ".join(dtype.name for dtype in taken)
        return f"codes are of {names}, not of {given.element.name} and {form.element.name}"
    if given.sparse:
        return "two of every four are kept of its other operand"
    unfit = sparse_weights.why_not(form, weight.shape[-1], target) if form.sparse else ""
    return unfit or _odd(weight)


def _odd(weight: Node) -> str:
    """Why weights of some sizes are not multiplied; '' where they are."""
    if any(not isinstance(s, int) or s % STEP for s in weight.shape[-2:]):
        return f"rows and columns of its weights are no multiples of {STEP}"
    return ""


def plain(dot: Node) -> bool:
    """Whether weights are elements of x's dtype, of which two of every four are kept, no more."""
    x, weight = dot.inputs[:2]
    form = format_of(weight.attrs["format"])
    own = form.element is not None and form.element.dtype is x.dtype is weight.dtype
    return own and [f.name for f in (*form.fields, *form.row)] == ["codes", "places"]


def factored(form: Format) -> bool:
    """Whether a value is its code times at most one factor of its row, the scale."""
    names = {part.name for part in (*form.fields, *form.row)}
    plain = form.apart and form.element is not None and not form.grain.columns
    floats = all(part.dtype.is_float for part in form.row)  # no power's byte
    return plain and floats and names <= {"codes", "places", "scale"}


def in_blocks(form: Format, given: Format) -> bool:
    """Whether weights have a scale for each block of rows and columns, tokens for as many."""
    plain = all(f.apart and f.element is not None and f.symmetric for f in (form, given))
    named = [f.name for f in (*form.fields, *given.fields)] == ["codes", "scale"] * 2
    fits = form.grain == Grain(BLOCK, BLOCK) and given.grain == Grain(1, BLOCK)
    return plain and named and fits and given.fields[1].dtype.is_float and not given.row


def of_codes(dot: Node, x: Node, raw: Node) -> Node:
    """The product, of `x` (what is packed, and its scale where it is given) and stored weights; of
    x itself where it is not packed."""
    weight = dot.inputs[1]
    form, columns = format_of(weight.attrs["format"]), weight.shape[-1]
    if plain(dot):
        return with_scales(dot, sparse_weights.product_of(x, raw, form, dot)[0], {}, {})
    (packed,) = dot.inputs[0].inputs
    given = codes_of_rows(packed, x)
    lead = packed.inputs[0].shape[:-1]
    codes = build.reshape(given["codes"], (*lead, columns))
    if form.sparse:
        total, fields = sparse_weights.product_of(codes, raw, form, dot)
        return with_scales(dot, total, given, fields)
    if form.grain.columns:
        flat = build.reshape(codes, (product(lead), columns))
        scale = build.cast(given["scale"], float32)
        scales = build.reshape(scale, (flat.shape[0], columns // form.grain.columns))
        total = block_weights.product_of(flat, scales, raw, form, weight.shape[0])
        return build.cast(build.reshape(total, dot.shape), dot.dtype)
    fields = stored_fields(form, raw, columns)
    rows = build.reshape(fields["codes"], weight.shape)
    sums = float32 if codes.dtype.is_float else int32
    total = build.dot(codes, rows, dot.attrs["batch"], dot.attrs["contract"], sums)
    return with_scales(dot, total, given, fields)


def source_of_rows(x: Node) -> Node:
    """What rows are read from, below ops that repeat whole rows or bring them in another order."""
    while x.op in (ops.reshape, ops.expand, ops.gather) and x.attrs.get("axes", (0,)) == (0,):
        below = x.inputs[0]
        if len(below.shape) < 2 or below.shape[-1] != x.shape[-1]:
            break
        x = below
    return x


def of_group_codes(dot: Node, raw: Node, done: Mapping[Node, Node]) -> Node:
    """The product of groups of rows with their own stored weights; `done` has what is computed of
    each Node. Rows are encoded where they are packed, and their codes moved as they were."""
    x, weight, offsets = dot.inputs[:3]
    source, form, columns = source_of_rows(x), format_of(weight.attrs["format"]), x.shape[-1]
    (packed,), lists = source.inputs, [done[n] for n in ops.group_lists(dot)]
    given = codes_of_rows(packed, done[packed])

    def moved(node: Node, size: int, name: str) -> Node:
        if node is source:
            return build.reshape(given[name], (*node.shape[:-1], size))
        below = moved(node.inputs[0], size, name)
        if node.op is ops.gather:
            return build.gather(below, [done[n] for n in node.inputs[1:]], [0])
        way = build.reshape if node.op is ops.reshape else build.broadcast_to
        return way(below, (*node.shape[:-1], size))

    if form.grain.columns:
        codes, own = block_weights.parts_of(
            raw, form, high(product(weight.shape[:-1])), high(columns)
        )
        operands = moved(x, columns, "codes"), build.reshape(codes, weight.shape)
        scale = build.cast(moved(x, columns // BLOCK, "scale"), float32)
        total = ops.grouped_dot(*operands, done[offsets], *lists, scale, own, **dot.attrs)
        return build.cast(total, dot.dtype)
    fields, shape = stored_fields(form, raw, columns), weight.shape[:-1]
    scales = fields.get("scale", build.broadcast_to(build.constant(1.0, float32), shape))
    factors = build.cast(build.reshape(scales, shape), float32)
    operands = moved(x, columns, "codes"), build.reshape(fields["codes"], weight.shape)
    total = ops.grouped_dot(*operands, done[offsets], *lists, factors, **dot.attrs)
    rows = {name: moved(x, 1, name) for name in given if name == "scale"}
    if len(lists) > 1:  # of one token all rows have the same
        one, each = x.shape[0] == 1, (dot.shape[0], 1)
        rows = {
            name: build.broadcast_to(scale, each) if one else build.gather(scale, lists[1:], [0])
            for name, scale in rows.items()
        }
    return with_scales(dot, total, rows, {})


def with_scales(
    dot: Node, total: Node, given: Mapping[str, Node], fields: Mapping[str, Node]
) -> Node:
    """The product of a product of codes: times the scales that rows of its operands have."""
    total = build.cast(total, float32)
    for found, shape in ((given, (*dot.shape[:-1], 1)), (fields, dot.shape[-1:])):
        if "scale" in found:
            factor = build.cast(build.reshape(found["scale"], shape), float32)
            total = build.multiply(total, build.broadcast_to(factor, total.shape))
    return build.cast(total, dot.dtype)


def codes_of_rows(packed: Node, x: Node) -> dict[str, Node]:
    """The codes of what is packed, as `x` computes it, and the factor of each row, if any."""
    form = format_of(packed.attrs["format"])
    if not form.grain.rows and len(packed.inputs) == 1 and invariant():
        raise UserError(
            "one scale for all rows makes a row depend on its neighbours",
            op="pack",
            expected="a scale of each row, or a given one, at the level invariant",
            got=form.name,
        )
    return _encoded(x, form)


def _encoded(packed: Node, form: Format) -> dict[str, Node]:
    """The codes of a `pack`, and the factor of each row.

    The largest of a row is found before values are widened, so that what is packed is stored as
    narrow as it was, and read twice; codes are products with its inverse, one division a row. The
    factor of a norm of few rows cancels out of its codes, so none of them waits for the norm's sum:
    it is a factor of the row's scale (see docs/decisions/0020). Scales are at least LEAST_SCALE, so
    that their inverses are finite: rows of less have smaller codes."""
    kinds = {part.name: part.dtype for part in (*form.fields, *form.row)}
    x, *given = packed.inputs
    width = form.grain.columns
    if kinds.get("scale") is not float32 or (width if given else form.grain.rows != 1):
        return encoded(packed)
    if given:
        scale = build.broadcast_to(build.cast(given[0], float32), (*x.shape[:-1], 1))
        return {**_codes(x, scale, 1.0, packed), "scale": scale}
    norm = norm_of(x) if not invariant() else None
    x = norm.core if norm else x
    if width:
        x = build.reshape(x, (*x.shape[:-1], x.shape[-1] // width, width))
    largest = build.reduce(ops.max_, build.unary(ops.absolute, x), len(x.shape) - 1, True)
    largest = build.maximum(build.cast(largest, float32), most_of(form) * LEAST_SCALE)
    scale = build.multiply(largest, 1.0 / most_of(form))
    if norm:
        factor = build.reshape(norm.factor, (*norm.factor.shape, 1)) if width else norm.factor
        scale = build.multiply(scale, factor)
    return {**_codes(x, largest, most_of(form), packed), "scale": scale}


def _codes(x: Node, of: Node, most: float, packed: Node) -> dict[str, Node]:
    """The codes of x times most / of, a row, which is finite; of x where that is 0."""
    zero, one, top = (build.constant(value, float32) for value in (0.0, 1.0, most))
    nothing = ops.equal(of, build.broadcast_to(zero, of.shape))
    inverse = build.where(nothing, one, build.divide(top, of))
    codes = build.multiply(build.cast(x, float32), build.broadcast_to(inverse, x.shape))
    shape = packed.inputs[0].shape
    ones = build.broadcast_to(one, (*shape[:-1], product(of.shape[len(shape) - 1 :])))
    return encoded(ops.pack(build.reshape(codes, shape), ones, **packed.attrs))


__all__ = [
    "codes_of_rows",
    "factored",
    "of_codes",
    "of_group_codes",
    "plain",
    "source_of_rows",
    "why_not",
    "with_scales",
]

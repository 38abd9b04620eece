"""Folders of torchao in safetensors: the plain layouts, one code in a byte.

A weight of a layer is kept as `_weight_qdata`, `_weight_scale` and `_weight_zero_point`; the file's
metadata says under the weight's name what it is and how inputs are rounded:

| type                     | tensors                                                            |
|--------------------------|--------------------------------------------------------------------|
| Float8Tensor             | f8 (N, K); scales of the tensor, of rows or of blocks              |
| Int8Tensor               | i8 (N, K); scales and zero points of the tensor or of rows         |
| IntxUnpackedToInt8Tensor | i8 (N, K) that hold 2 to 8 bits; scales and zero points of groups  |

What is laid out for one kind of GPU (Int4TilePackedTo4dTensor), or has zero points that are no
whole numbers (Int4Tensor), is refused by its name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np

from .composed import Composed, Group, Rounded, fail, to_bits
from .compressed import byte_codes
from .quantised import Said
from .safetensors import read_metadata

Array = np.ndarray[Any, Any]
WRITTEN = {  # what others call it -> what torchao does
    "weight": "_weight_qdata",
    "weight_scale": "_weight_scale",
    "weight_zero_point": "_weight_zero_point",
}


def readers() -> Callable[[Said, Group], Composed]:
    """How the layers of a folder are read: the metadata of each file is read once."""
    metadata = cache(read_metadata)

    def make(said: Said, group: Group) -> Composed:
        file = group.take("_weight_qdata").file
        told = metadata(file.path).get(f"{group.name}.weight") if file is not None else None
        return weight(_facts(group, told), group)

    return make


def _facts(group: Group, told: str | None) -> Said:
    """What the metadata says of a weight."""
    where = f"metadata of {group.name[:100]}.weight"
    try:
        table = json.loads(told or "null")
    except (ValueError, RecursionError):
        table = None
    return Said(group.path, table, where)


def weight(said: Said, group: Group) -> Composed:
    """One layer's weight, of the type that its metadata names."""
    kinds = {"Float8Tensor": _float8, "Int8Tensor": _int8, "IntxUnpackedToInt8Tensor": _intx}
    kind = said.text("_type")
    if kind not in kinds:
        said.wrong("_type", ", ".join(kinds))
    facts = said.inner("_data")
    if facts is None:
        return said.wrong("_data", "its facts")
    if "_weight_act_pre_scale" in group.parts:
        group.fail("_weight_act_pre_scale", "scales of inputs are not read", "none")
    found = {name: group.get(there) for name, there in WRITTEN.items()}
    parts = {name: part for name, part in found.items() if part is not None}
    return kinds[kind](facts, Group(group.path, group.name, parts, WRITTEN), group)


def _float8(facts: Said, plain: Group, group: Group) -> Composed:
    size = facts.table.get("block_size")
    square = isinstance(size, list) and len(size) == 2 and 1 not in size
    shape = list(plain.take("weight").shape)
    given = _rounded(facts, "E4M3")
    return byte_codes(plain, None, size if square and size != shape else None, given)


def _int8(facts: Said, plain: Group, group: Group) -> Composed:
    given = _rounded(facts, "INT8")
    for name in ("act_quant_scale", "act_quant_zero_point"):
        if f"_weight_{name}" in group.parts:
            group.fail(f"_weight_{name}", "fixed scales of inputs are not read", "none")
    return byte_codes(plain, None, None, given)


def _rounded(facts: Said, element: str) -> Rounded | None:
    """How inputs are rounded: not at all, or token by token, or by one scale for all."""
    told = facts.inner("act_quant_kwargs")
    if told is None:
        return None
    inner = told.inner("_data")
    grain = _word(inner, "granularity", "_type")
    named = {"PerRow": "ROW", "PerTensor": "TENSOR"}
    if inner is None or grain not in named:
        told.wrong("_data", "a granularity of PerRow or PerTensor")
    zero = "_ZERO" if _word(inner, "mapping_type", "_data") == "ASYMMETRIC" else ""
    return Rounded(f"{element}_{named[grain]}_F32{zero}")


def _word(said: Said | None, name: str, key: str) -> Any:
    found = None if said is None else said.table.get(name)
    word = found.get(key) if isinstance(found, Mapping) else None
    return word if isinstance(word, str) else None


def _intx(facts: Said, plain: Group, group: Group) -> Composed:
    """Codes of a few bits, each in a byte: value = scale * (code - zero point)."""
    if facts.table.get("activation_quantization") is not None:
        facts.wrong("activation_quantization", "none: inputs of asymmetric int8 are not read")
    names = {f"int{bits}": bits for bits in range(2, 9)}
    bits = names.get(_word(facts, "target_dtype", "_data") or "")
    if bits is None:
        facts.wrong("target_dtype", ", ".join(names))
    codes = plain.take("weight", "I8")
    scale, kind = plain.scales("weight_scale")
    if len(codes.shape) != 2 or len(scale.shape) != 2 or not all(codes.shape):
        plain.fail("weight", "not a matrix", "(N, K), scales (N, groups)", codes.shape)
    rows, columns = codes.shape
    count = scale.shape[1]
    if scale.shape[0] != rows or not count or columns % (8 * count):
        plain.fail("weight_scale", "another shape", "(N, groups of whole eights)", scale.shape)
    zeros = plain.shaped("weight_zero_point", (rows, count), "I8")
    half = 1 << (bits - 1)
    for part in (codes, zeros):
        values = part.array()
        if values.min() < -half or values.max() >= half:
            fail(plain.path, f"tensor {part.name[:100]}", f"more than {bits} bits", f"{bits} bits")
    symmetric = not zeros.array().any()

    def make() -> dict[str, Array]:
        raw = (codes.array() + np.int16(half)).astype(np.uint8)
        signed = bits == 8 and symmetric  # INT8 has its sign
        found = {"codes": codes.array().view(np.uint8) if signed else to_bits(raw, bits)}
        found["scale"] = scale.array()
        if not symmetric:
            found["zero"] = (zeros.array() + np.int16(half)).astype(np.uint8)
        return found

    grain = "ROW" if count == 1 else f"G{columns // count}"
    name = f"INT{bits}_{grain}_{kind}" + ("" if symmetric else "_ZERO")
    return plain.composed((rows, columns), name, make)


__all__ = ["readers"]

"""Folders that others quantised: their tensors as weights of our Formats.

`quantization_config` of config.json says by whom; the tensors of a layer say how. Read are GPTQ
(versions 1 and 2, groups in any order of columns), AutoAWQ, bitsandbytes NF4, MXFP4 of gpt-oss, in
`exchange/compressed.py` compressed-tensors, fp8 and ModelOpt, and in `exchange/torchao.py` torchao.
Layers without codes stay as they are. Invariant: shapes, group sizes, orders and dtypes are held
against each other before anything is made; what does not fit ends in a `UserError` that names
folder and tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np

from ..core.scaled import NORMAL
from .composed import Composed, Group, bits_of, fail, order_of, to_bits
from .mapped import Stored

Tensors = dict[str, Stored | Composed]
Array = np.ndarray[Any, Any]
AWQ_ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # the column of each nibble of a word
WHERE = "config.json: quantization_config"
STATE = "quant_state.bitsandbytes__"


class Said:
    """Fields of a table in config.json, checked as they are read."""

    def __init__(self, path: str, table: Any, where: str = WHERE) -> None:
        self.path, self.where = path, where
        if not isinstance(table, Mapping):
            fail(path, where, "not a table", "{...}", table)
        self.table = table

    def wrong(self, name: str, expected: object) -> NoReturn:
        """Refuse a field."""
        fail(self.path, f"{self.where}: {name}", "not read", expected, self.table.get(name))

    def whole(self, name: str, usual: int | None = None) -> int:
        """A whole number."""
        found = self.table.get(name, usual)
        if not isinstance(found, int) or isinstance(found, bool):
            self.wrong(name, "a whole number")
        return int(found)

    def text(self, name: str, usual: str | None = None) -> str:
        """A word."""
        found = self.table.get(name, usual)
        if not isinstance(found, str):
            self.wrong(name, "a word")
        return str(found)

    def flag(self, name: str, usual: bool) -> bool:
        """True or false."""
        found = self.table.get(name, usual)
        found = usual if found is None else found
        if not isinstance(found, bool):
            self.wrong(name, "true or false")
        return found

    def inner(self, name: str) -> Said | None:
        """A table inside, if there is one."""
        found = self.table.get(name)
        return None if found is None else Said(self.path, found, f"{self.where}: {name}")


def with_formats(path: str, config: Mapping[str, Any], tensors: dict[str, Stored]) -> Tensors:
    """The tensors of a folder, those of quantised layers as one weight each."""
    table = config.get("quantization_config")
    if table is None:
        return dict(tensors)
    from . import compressed, torchao

    methods: dict[str, Callable[[Said, Group], Composed | None]] = {
        "gptq": gptq,
        "awq": awq,
        "mxfp4": mxfp4,
        "bitsandbytes": nf4,
        "compressed-tensors": compressed.compressed,
        "fp8": compressed.fp8,
        "modelopt": compressed.modelopt,
        "torchao": torchao.readers(),
    }
    said = Said(path, table)
    method = said.text("quant_method")
    if method not in methods:
        said.wrong("quant_method", ", ".join(methods))
    make = methods[method]
    if method == "mxfp4":
        return _each(path, tensors, MX_MARK, lambda group: make(said, group))
    if method == "compressed-tensors":
        make = compressed.schemes(said, config)
    elif method in ("fp8", "modelopt"):
        make = compressed.with_sizes(make, config)
    return _each(path, tensors, MARKS[method], lambda group: make(said, group))


# A layer is quantised if it has such a tensor.
MARKS = {
    "gptq": (".qweight",),
    "awq": (".qweight",),
    "bitsandbytes": (".weight.absmax",),
    "compressed-tensors": (".weight_packed", ".weight_scale", ".bitmask"),
    "fp8": (".weight_scale_inv", ".weight_scale"),
    "modelopt": (".weight_scale",),
    "torchao": ("._weight_qdata",),
}
MX_MARK = ("_blocks",)


def _each(
    path: str,
    tensors: dict[str, Stored],
    marks: tuple[str, ...],
    make: Callable[[Group], Composed | None],
) -> Tensors:
    """Tensors with the parts of each marked layer put together."""
    layers = {name[: -len(mark)]: mark for mark in marks for name in tensors if name.endswith(mark)}
    between = "_" if marks == MX_MARK else "."
    parts: dict[str, dict[str, Stored]] = {layer: {} for layer in layers}
    rest: Tensors = {}
    for name, tensor in tensors.items():
        layer = next((p for p in _prefixes(name, between) if p in parts), None)
        if layer is None:
            rest[name] = tensor
        else:
            parts[layer][name[len(layer) + 1 :]] = tensor
    for layer, own in parts.items():
        group = Group(path, layer, own)
        made = make(group)
        if made is None:
            rest |= {f"{layer}{between}{suffix}": tensor for suffix, tensor in own.items()}
            continue
        name = layer if marks == MX_MARK else made.name
        rest[name] = made
        for suffix in own.keys() - group.used:
            rest[f"{layer}{between}{suffix}"] = own[suffix]
    return rest


def _prefixes(name: str, between: str) -> list[str]:
    """What a name may begin with: all before each dot (or the last underscore)."""
    if between == "_":
        return [name.rpartition("_")[0]]
    return [name[:i] for i, letter in enumerate(name) if letter == "."][::-1]


# ---- GPTQ and AWQ ---------------------------------------------------------------------------


def gptq(said: Said, group: Group) -> Composed:
    """int32 words along the inputs: qweight (K bits / 32, N), qzeros (groups, N bits / 32), scales
    (groups, N), g_idx (K,)."""
    bits, size = said.whole("bits"), said.whole("group_size")
    version = said.text("checkpoint_format", "gptq")
    if bits not in (2, 3, 4, 8):
        said.wrong("bits", "2, 3, 4 or 8")
    if version not in ("gptq", "gptq_v2"):
        said.wrong("checkpoint_format", "gptq or gptq_v2")
    weight = group.take("qweight", "I32")
    if len(weight.shape) != 2 or weight.shape[0] * 32 % bits:
        group.fail("qweight", "not words of whole columns", f"(K * {bits} / 32, N)", weight.shape)
    columns, rows = weight.shape[0] * 32 // bits, weight.shape[1]
    count = _groups(said, group, columns, size)
    scale, kind = group.scales("scales")
    group.shaped("scales", (count, rows))
    if rows * bits % 32:
        group.fail("qweight", "zero points are no whole words", "N * bits / 32", weight.shape)
    zeros = group.shaped("qzeros", (count, rows * bits // 32), "I32")
    order = order_of(group, "g_idx", columns, columns // count)
    off = 1 if version == "gptq" else 0
    middle = said.flag("sym", True) and _all_middle(zeros, bits, rows, off)
    grain = "ROW" if count == 1 else f"G{columns // count}"
    signed = bits == 8 and middle

    def make() -> dict[str, Array]:
        words = np.ascontiguousarray(weight.array().T)
        raw = words.view(np.uint8).reshape(rows, -1)
        if order is not None:
            raw = to_bits(bits_of(words, bits, columns)[:, order], bits)
        found = {"codes": raw ^ np.uint8(0x80) if signed else raw}
        found["scale"] = np.ascontiguousarray(scale.array().T)
        if not middle:
            found["zero"] = bits_of(zeros.array(), bits, rows).T + np.uint8(off)
        return found

    name = f"INT{bits}_{grain}_{kind}" + ("" if middle else "_ZERO")
    return group.composed((rows, columns), name, make, order=order)


def _all_middle(zeros: Stored, bits: int, rows: int, off: int) -> bool:
    return bool((bits_of(zeros.array(), bits, rows) + off == 1 << (bits - 1)).all())


def _groups(said: Said, group: Group, columns: int, size: int) -> int:
    """How many groups a row has; -1 is one."""
    if size == -1:
        return 1
    if size < 1 or columns % size or size % 8:
        fail(
            said.path,
            f"{said.where}: group_size",
            f"{group.name} has {columns} columns",
            "-1, or a divisor that is a multiple of 8",
            size,
        )
    return columns // size


def awq(said: Said, group: Group) -> Composed:
    """int32 words along the outputs, nibbles in the order of AWQ_ORDER: qweight (K, N / 8), qzeros
    (groups, N / 8), scales (groups, N)."""
    if said.whole("bits", 4) != 4:
        said.wrong("bits", 4)
    if said.text("version", "gemm").lower() != "gemm":
        said.wrong("version", "gemm")
    size = said.whole("group_size", 128)
    weight = group.take("qweight", "I32")
    if len(weight.shape) != 2 or not weight.shape[0]:
        group.fail("qweight", "not a matrix", "(K, N / 8)", weight.shape)
    columns, rows = weight.shape[0], weight.shape[1] * 8
    count = _groups(said, group, columns, size)
    scale, kind = group.scales("scales")
    group.shaped("scales", (count, rows))
    zeros = None
    if said.flag("zero_point", True):
        zeros = group.shaped("qzeros", (count, rows // 8), "I32")
    grain = "ROW" if count == 1 else f"G{columns // count}"

    def make() -> dict[str, Array]:
        found = {"codes": to_bits(np.ascontiguousarray(_awq_nibbles(weight.array()).T), 4)}
        found["scale"] = np.ascontiguousarray(scale.array().T)
        if zeros is not None:
            found["zero"] = np.ascontiguousarray(_awq_nibbles(zeros.array()).T)
        return found

    name = f"INT4_{grain}_{kind}" + ("" if zeros is None else "_ZERO")
    return group.composed((rows, columns), name, make)


def _awq_nibbles(words: Array) -> Array:
    """(n, N / 8) words as (n, N) numbers in the order of columns."""
    nibbles = bits_of(words, 4, words.shape[1] * 8).reshape(len(words), -1, 8)
    found = np.empty_like(nibbles)
    found[..., AWQ_ORDER] = nibbles
    return found.reshape(len(words), -1)


# ---- small floats ---------------------------------------------------------------------------


def mxfp4(said: Said, group: Group) -> Composed:
    """gpt-oss: `_blocks` (..., N, K / 32, 16), the low nibble the even element, and powers of two
    `_scales` (..., N, K / 32)."""
    blocks = group.take("blocks", "U8")
    shape = blocks.shape
    if len(shape) < 3 or shape[-1] != 16 or not shape[-2]:
        group.fail("blocks", "another shape", "(..., N, K / 32, 16)", shape)
    scales = group.shaped("scales", shape[:-1], "U8")
    rows, lead = int(np.prod(shape[:-2])), shape[:-2]

    def make() -> dict[str, Array]:
        codes = blocks.array().reshape(rows, -1)
        return {"codes": codes, "scale": scales.array().reshape(rows, -1)}

    whole = (rows, shape[-2] * 32)
    flat = group.composed(whole, "E2M1_G32_E8M0", make)
    form = flat.format
    return Composed(
        group.name,
        (*lead, whole[1]),
        form,
        flat.sources,
        lambda: flat.raw.reshape(*lead, -1),
    )


def nf4(said: Said, group: Group) -> Composed:
    """bitsandbytes: nibbles of the whole tensor, the high one first, an absmax for each `blocksize`
    of them; those may be codes of a table themselves."""
    kinds = [s.removeprefix(f"weight.{STATE}") for s in group.parts if STATE in s]
    if kinds != ["nf4"]:
        group.fail("weight", "these codes are not read", "nf4", kinds)
    state = _state(said, group)
    given, size = state.table.get("shape"), state.whole("blocksize", 64)
    shape = given if isinstance(given, list) and len(given) == 2 else [0, 0]
    good = all(isinstance(s, int) and 0 < s < 1 << 31 for s in shape)
    if not good or size < 1 or shape[1] % size or size % 8:
        group.fail(f"weight.{STATE}nf4", "blocks are not within rows", "whole blocks", shape)
    rows, columns = shape
    weight = group.take("weight", "U8")
    if weight.raw.size != rows * columns // 2:
        group.fail("weight", "another shape", rows * columns // 2, weight.shape)
    table = group.shaped("weight.quant_map", (16,), "F32").array()
    if (np.abs(table - np.array(NORMAL, np.float32)) > 1e-6).any():
        group.fail("weight.quant_map", "another table", "that of NF4", table[:4])
    count = rows * columns // size
    plain = group.parts["weight.absmax"].format.name == "F32"
    absmax = group.shaped("weight.absmax", (count,), "F32" if plain else "U8")
    inner = None if plain else _inner(state, group, count)

    def make() -> dict[str, Array]:
        raw = weight.array().reshape(rows, -1)
        scale = absmax.array() if inner is None else inner(absmax.array())
        swapped = (raw >> np.uint8(4)) | (raw << np.uint8(4))
        return {"codes": swapped, "scale": scale.reshape(rows, -1)}

    return group.composed((rows, columns), f"NF4_G{size}_F32", make)


def _state(said: Said, group: Group) -> Said:
    data = group.take(f"weight.{STATE}nf4", "U8").array().tobytes()
    try:
        table = json.loads(data) if len(data) < 1 << 16 else None
    except (ValueError, RecursionError):
        table = None
    return Said(said.path, table, f"{group.name}.weight.{STATE}nf4")


def _inner(state: Said, group: Group, count: int) -> Callable[[Array], Array]:
    """Scales that are codes of a table, with scales and an offset of their own."""
    size = state.whole("nested_blocksize", 256)
    offset = state.table.get("nested_offset")
    if size < 1 or not isinstance(offset, float):
        state.wrong("nested_offset", "a number, and nested_blocksize above 0")
    table = group.shaped("weight.nested_quant_map", (256,), "F32")
    scales = group.shaped("weight.nested_absmax", (-(-count // size),), "F32")

    def values(codes: Array) -> Array:
        found = table.array()[codes] * np.repeat(scales.array(), size)[:count]
        return np.asarray(found + np.float32(offset), np.float32)

    return values


__all__ = ["with_formats"]

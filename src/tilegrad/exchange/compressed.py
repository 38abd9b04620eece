"""compressed-tensors, fp8 and ModelOpt folders: weights with scales beside them.

| tensors of a layer                                      | means                                  |
|---------------------------------------------------------|----------------------------------------|
| weight_packed i32 (N, K bits / 32), weight_shape        | whole numbers of 2 to 8 bits, packed   |
| weight_packed u8 (N, K / 2)                             | E2M1, the low nibble the even element  |
| weight i8 or f8 (N, K)                                  | one code in a byte                     |
| weight_scale (N, groups), (N, 1), (1,), (N / r, K / c)  | what codes are multiplied by           |
| weight_scale_inv (N / 128, K / 128)                     | the same, of fp8 in blocks             |
| weight_zero_point                                       | zero points, packed as codes are       |
| weight_global_scale, weight_scale_2                     | NVFP4: what scales are divided by, or  |
|                                                         | multiplied with                        |
| weight_g_idx                                            | the group of each column               |
| input_scale                                             | of inputs, where it is fixed           |
| compressed (N, K / 2), bitmask u8 (N, K / 8), shape     | 2:4: the values, a bit for each column |

Invariant: as in `exchange/quantised.py`; a layer that a configuration ignores is read as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .composed import Composed, Group, Rounded, bits_of, order_of, to_bits
from .quantised import Said

Array = np.ndarray[Any, Any]
Make = Callable[[Said, Group], Composed | None]
INTEGERS, FLOATS = ("pack-quantized", "int-quantized"), ("float-quantized", "naive-quantized")
FORMATS = (*INTEGERS, *FLOATS, "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mixed-precision")
SCALES = {"F16", "BF16", "F32"}
SPARSE = "sparse-24-bitmask"


def schemes(said: Said, config: Mapping[str, Any]) -> Make:
    """How the layers of a compressed-tensors folder are read."""
    if said.text("format", "pack-quantized") not in (*FORMATS, "dense"):
        said.wrong("format", ", ".join(FORMATS))
    sparse = False
    if said.table.get("sparsity_config"):
        inner = Said(said.path, said.table["sparsity_config"], f"{said.where}: sparsity_config")
        sparse = inner.text("format", "dense") == SPARSE
        if not sparse and inner.text("format", "dense") != "dense":
            inner.wrong("format", f"dense or {SPARSE}")
    groups = said.inner("config_groups")
    if groups is None or not (groups.table or sparse or said.table.get("kv_cache_scheme")):
        said.wrong("config_groups", "a table of groups")
    assert groups is not None
    tables = [(name, groups.inner(name)) for name in groups.table]
    ignore = _words(said, "ignore")
    sizes = shard_sizes(config)

    def make(_: Said, group: Group) -> Composed | None:
        if any(_matches(word, group.name) for word in ignore):
            return None
        if sparse and "bitmask" in group.parts:
            return halved(group)
        for _, table in tables:
            if table is None:
                continue
            words = _words(table, "targets") or ["Linear"]
            if any(word == "Linear" or _matches(word, group.name) for word in words):
                return compressed(table, group, sizes)
        return group.fail("weight", "no group of config_groups has this layer", [*groups.table])

    return make


def _words(said: Said, name: str) -> list[str]:
    found = said.table.get(name)
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(w, str) and len(w) < 500 for w in found):
        said.wrong(name, "a list of words")
    return list(found)


def _matches(word: str, name: str) -> bool:
    """A layer's name, the end of it, or "re:" with a pattern for it."""
    if not word.startswith("re:"):
        return name == word or name.endswith(f".{word}")
    try:
        return re.match(word[3:], name) is not None
    except (re.error, RecursionError):
        return False


def compressed(said: Said, group: Group, sizes: Any = None) -> Composed:
    """A layer of one of the config_groups."""
    weights = said.inner("weights")
    if weights is None:
        return said.wrong("weights", "how weights are stored")
    kind, bits = weights.text("type", "int"), weights.whole("num_bits", 8)
    given = _input(said, group)
    if kind == "float" and bits == 4:
        return _small_floats(weights, group)
    if kind == "float":
        if bits != 8:
            weights.wrong("num_bits", "8 or 4")
        return byte_codes(group, sizes, weights.table.get("block_structure"), given)
    if kind != "int" or not 2 <= bits <= 8:
        weights.wrong("num_bits", "2 to 8, of the type int")
    if "weight_packed" in group.parts:
        return _packed(weights, group, bits, given)
    if bits != 8:
        weights.wrong("num_bits", "8, where codes are not packed")
    return byte_codes(group, sizes, weights.table.get("block_structure"), given)


def halved(group: Group) -> Composed:
    """Two values of every four, and bits that say which; values are plain ones."""
    values = group.take("compressed", "BF16", "F16")
    shape = group.take("shape", "I64").array().reshape(-1).tolist()
    rows, columns = shape if len(shape) == 2 else (0, 0)
    if not (0 < rows < 1 << 31 and 0 < columns < 1 << 31) or columns % 8:
        group.fail("shape", "not whole fours", "(N, K), K a multiple of 8", shape)
    if tuple(values.shape) != (rows, columns // 2):
        group.fail("compressed", "another shape", [rows, columns // 2], list(values.shape))
    bits = group.shaped("bitmask", (rows, columns // 8), "U8")

    def make() -> dict[str, Array]:
        mask = np.unpackbits(bits.array(), axis=-1, bitorder="little").reshape(rows, -1, 4)
        if (mask.sum(-1) != 2).any():
            group.fail("bitmask", "not two of every four")
        at = np.argsort(1 - mask, axis=-1, kind="stable")[..., :2].astype(np.uint8)
        return {"codes": values.array(), "places": to_bits(at.reshape(rows, -1), 2)}

    return group.composed((rows, columns), f"{values.format.name}_SPARSE", make)


def _packed(weights: Said, group: Group, bits: int, given: Rounded | None) -> Composed:
    """Whole numbers of some bits, above the least of them, in int32 words."""
    words = group.take("weight_packed", "I32")
    shape = group.shaped("weight_shape", (2,), "I32", "I64").array().tolist()
    rows, columns = shape
    if (
        not (0 < rows < 1 << 31 and 0 < columns < 1 << 31)
        or columns * bits % 8
        or tuple(words.shape) != (rows, -(-columns * bits // 32))
    ):
        group.fail("weight_packed", "another shape", f"words of {shape}", words.shape)
    scale, kind = group.scales("weight_scale")
    count = _groups(group, scale.shape, rows, columns)
    order = order_of(group, "weight_g_idx", columns, columns // count)
    zeros = None
    if not weights.flag("symmetric", True):
        zeros = group.shaped("weight_zero_point", (-(-rows * bits // 32), count), "I32")
    grain = "ROW" if count == 1 else f"G{columns // count}"
    flipped = bits == 8 and zeros is None  # INT8 has its sign

    def make() -> dict[str, Array]:
        raw = words.array().view(np.uint8).reshape(rows, -1)[:, : columns * bits // 8]
        if order is not None:
            raw = to_bits(bits_of(words.array(), bits, columns)[:, order], bits)
        found = {"codes": raw ^ np.uint8(0x80) if flipped else raw}
        found["scale"] = np.broadcast_to(scale.array().reshape(-1, count), (rows, count))
        if zeros is not None:
            found["zero"] = bits_of(np.ascontiguousarray(zeros.array().T), bits, rows).T
        return found

    name = f"INT{bits}_{grain}_{kind}" + ("" if zeros is None else "_ZERO")
    return group.composed((rows, columns), name, make, order=order, input=given)


def _groups(group: Group, shape: Any, rows: int, columns: int, suffix: str = "weight_scale") -> int:
    """How many scales a row has, from the shape of scales."""
    count = shape[1] if len(shape) == 2 else 1
    first = shape[0] if len(shape) else 1
    fits = count and columns % count == 0 and (columns // count) % 8 == 0
    if len(shape) > 2 or first not in (1, rows) or not fits:
        group.fail(suffix, "another shape", f"groups of ({rows}, {columns})", list(shape))
    return int(count)


def byte_codes(
    group: Group, sizes: Any, block: Any, given: Rounded | None, suffix: str = "weight_scale"
) -> Composed:
    """One code in a byte, with scales of any granularity."""
    weight = group.take("weight", "I8", "F8_E4M3", "F8_E5M2")
    if len(weight.shape) != 2 or not all(weight.shape):
        group.fail("weight", "not a matrix", "(N, K)", weight.shape)
    rows, columns = weight.shape
    element = {"I8": "INT8", "F8_E4M3": "E4M3", "F8_E5M2": "E5M2"}[weight.format.name]
    scale, kind = group.scales(suffix)
    shape = tuple(scale.shape) or (1,)
    zeros = group.get("weight_zero_point", "I8")
    if zeros is not None:
        if element != "INT8" or zeros.shape != scale.shape:
            group.fail("weight_zero_point", "another shape", list(shape), list(zeros.shape))
        if not zeros.array().any():
            zeros = None
    blocks = _blocks(group, block, suffix)
    if blocks is not None and len(shape) == 2 and shape not in ((1, 1), (rows, 1)):
        high, wide = blocks
        wanted = (-(-rows // high), -(-columns // wide))
        if shape != wanted or columns % wide:
            group.fail(suffix, "another shape", f"{list(wanted)}, whole columns", list(shape))
        grain, count, repeat = f"{high}X{wide}", wanted[1], high
    elif int(np.prod(shape)) == 1 and rows > 1:
        grain, count, repeat = "TENSOR", 1, rows
    elif len(shape) == 1 and shape[0] != rows:
        grain, count, repeat = "ROW", 1, 0
        parts = shards(group, shape[0], rows, sizes, suffix)
    else:
        count = _groups(group, shape if len(shape) == 2 else (*shape, 1), rows, columns, suffix)
        grain, repeat = ("ROW" if count == 1 else f"G{columns // count}"), rows // shape[0]

    def spread(x: Array) -> Array:
        wide = x.reshape(-1, count)
        return np.repeat(wide, repeat or parts, axis=0)[:rows]

    def make() -> dict[str, Array]:
        raw = weight.array().view(np.uint8).reshape(rows, -1)
        found = {"codes": raw if zeros is None else raw ^ np.uint8(0x80)}
        found["scale"] = spread(scale.array())
        if zeros is not None:
            found["zero"] = spread(zeros.array()).view(np.uint8) ^ np.uint8(0x80)
        return found

    name = f"{element}_{grain}_{kind}" + ("" if zeros is None else "_ZERO")
    return group.composed((rows, columns), name, make, input=given)


def _blocks(group: Group, block: Any, suffix: str) -> tuple[int, int] | None:
    if block is None:
        return None
    whole = isinstance(block, list) and len(block) == 2
    if not whole or not all(isinstance(b, int) and 8 <= b <= 4096 for b in block):
        group.fail(suffix, "blocks of another kind", "[rows, columns]", block)
    return block[0], block[1]


def shard_sizes(config: Mapping[str, Any]) -> dict[str, list[int]]:
    """Rows of the parts of fused layers, as far as config.json says."""
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    keys = config.get("num_key_value_heads", heads)
    if not all(isinstance(n, int) and n > 0 for n in (heads, width, keys)):
        return {}
    assert isinstance(heads, int) and isinstance(width, int) and isinstance(keys, int)
    head = config.get("head_dim") or width // heads
    if not isinstance(head, int):
        return {}
    return {"qkv_proj": [heads * head, keys * head, keys * head]}


def shards(group: Group, count: int, rows: int, sizes: Any, suffix: str) -> list[int]:
    """Rows of each part of a fused layer that has a scale for each part."""
    last = group.name.rpartition(".")[2]
    found = (sizes or {}).get(last) or ([rows // 2] * 2 if last == "gate_up_proj" else [])
    if len(found) != count or sum(found) != rows:
        group.fail(suffix, "another shape", f"1, {rows} or one for each part", [count])
    return list(found)


def _small_floats(weights: Said, group: Group) -> Composed:
    """E2M1 with scales of E4M3 and one for all, or with powers of two."""
    codes = group.take("weight_packed", "U8")
    if len(codes.shape) != 2 or not all(codes.shape):
        group.fail("weight_packed", "not a matrix", "(N, K / 2)", codes.shape)
    rows, columns = codes.shape[0], codes.shape[1] * 2
    for unused in ("input_global_scale", "input_scale"):  # weights alone are quantised here
        group.get(unused)
    if group.take("weight_scale").format.name == "U8":
        scale = group.shaped("weight_scale", (rows, columns // 32), "U8")
        return _nibbles(group, codes, scale, None, "E2M1_G32_E8M0")
    scale = group.shaped("weight_scale", (rows, columns // 16), "F8_E4M3")
    total = _one(group, "weight_global_scale")
    if not total > 0 or not np.isfinite(total):
        group.fail("weight_global_scale", "not a divisor", "above 0", total)
    return _nibbles(group, codes, scale, np.float32(1) / total, "E2M1_G16_E4M3_TOTAL")


def _nibbles(group: Group, codes: Any, scale: Any, total: Any, name: str) -> Composed:
    rows, columns = codes.shape[0], codes.shape[1] * 2
    if columns % (32 if total is None else 16):
        group.fail("weight_packed", "not whole groups", "a multiple of 16 bytes", codes.shape)

    def make() -> dict[str, Array]:
        found = {"codes": codes.array(), "scale": scale.array().view(np.uint8)}
        if total is not None:
            found["total"] = np.full((1, 1), total, np.float32)
        return found

    return group.composed((rows, columns), name, make)


def _one(group: Group, suffix: str) -> np.float32:
    """A tensor of one number."""
    found = group.take(suffix, *SCALES)
    if int(np.prod(found.shape)) != 1:
        group.fail(suffix, "not one number", "(1,)", found.shape)
    return np.float32(found.array().reshape(-1)[0])


# ---- inputs -------------------------------------------------------------------------------------


def _input(said: Said, group: Group) -> Rounded | None:
    """How inputs are rounded, where a scheme says so."""
    inputs = said.inner("input_activations")
    scale = group.get("input_scale", *SCALES)
    group.get("input_zero_point")
    if inputs is None:
        return None
    kind, bits = inputs.text("type", "int"), inputs.whole("num_bits", 8)
    strategy = inputs.table.get("strategy") or "tensor"
    element = {("int", 8): "INT8", ("float", 8): "E4M3"}.get((kind, bits))
    if element is None:
        return None if bits == 4 else inputs.wrong("num_bits", "8, or 4 for weights alone")
    zero = "" if inputs.flag("symmetric", True) else "_ZERO"
    if inputs.table.get("dynamic") not in (False, None):
        grain = {"token": "ROW", "tensor": "TENSOR"}.get(strategy)
        if strategy == "group":
            grain = f"G{inputs.whole('group_size')}"
        if grain is None:
            inputs.wrong("strategy", "token, tensor or group")
        return Rounded(f"{element}_{grain}_F32{zero}")
    if zero or scale is None:
        inputs.wrong("symmetric", "true, and an input_scale, where scales are fixed")
    return Rounded(f"{element}_TENSOR_F32", input_scale(group, "input_scale"))


def input_scale(group: Group, suffix: str) -> float:
    """A scale of inputs; of several parts of a fused layer the largest."""
    found = group.take(suffix, *SCALES).array().astype(np.float32).reshape(-1)
    if not len(found) or not np.isfinite(found).all() or (found <= 0).any():
        group.fail(suffix, "not a scale", "above 0", found[:4])
    return float(found.max())


# ---- fp8 and ModelOpt ---------------------------------------------------------------------------


def with_sizes(make: Any, config: Mapping[str, Any]) -> Make:
    """A method with the rows of fused layers."""
    sizes = shard_sizes(config)
    return lambda said, group: make(said, group, sizes)


def fp8(said: Said, group: Group, sizes: Any = None) -> Composed:
    """e4m3 with scales of the tensor, or of blocks (`weight_block_size`)."""
    block = said.table.get("weight_block_size")
    scheme = said.text("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        said.wrong("activation_scheme", "dynamic or static")
    suffix = "weight_scale_inv" if "weight_scale_inv" in group.parts else "weight_scale"
    found = _blocks(group, block, suffix)
    given = Rounded("E4M3_ROW_F32" if found is None else f"E4M3_G{found[1]}_F32")
    if scheme == "static":
        given = Rounded("E4M3_TENSOR_F32", input_scale(group, "input_scale"))
    elif "input_scale" in group.parts:
        group.get("input_scale")
    return byte_codes(group, sizes, block, given, suffix)


def modelopt(said: Said, group: Group, sizes: Any = None) -> Composed:
    """FP8 with fixed scales, or NVFP4."""
    kind = said.text("quant_algo", "FP8").upper()
    for unused in ("k_scale", "v_scale"):
        group.get(unused)
    if kind == "FP8":
        given = Rounded("E4M3_TENSOR_F32", input_scale(group, "input_scale"))
        return byte_codes(group, sizes, None, given)
    if kind not in ("NVFP4", "NVFP4_AWQ"):
        said.wrong("quant_algo", "FP8 or NVFP4")
    group.get("input_scale")
    codes = group.take("weight", "U8")
    if len(codes.shape) != 2 or not all(codes.shape):
        group.fail("weight", "not a matrix", "(N, K / 2)", codes.shape)
    wanted = (codes.shape[0], codes.shape[1] * 2 // 16)
    scale = group.shaped("weight_scale", wanted, "F8_E4M3")
    return _nibbles(group, codes, scale, _one(group, "weight_scale_2"), "E2M1_G16_E4M3_TOTAL")


__all__ = ["SPARSE", "byte_codes", "compressed", "fp8", "modelopt", "schemes", "with_sizes"]

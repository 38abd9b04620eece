"""Layers as others store them, and what they mean: made and read one number at a time, from the
formats' descriptions and not with the code under test.

`LAYERS[name](draw, rows, columns)` gives tensors by suffix, the `quantization_config`, and the
float32 values of the weight.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(np.int32): "I32",
    np.dtype(np.int64): "I64",
    np.dtype(np.int8): "I8",
    np.dtype(np.uint8): "U8",
}
SMALL = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = ml_dtypes.float8_e4m3fn


def write_safetensors(
    path: Path, tensors: dict[str, np.ndarray], metadata: dict[str, str] | None = None
) -> None:
    """A safetensors file, written by hand."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    data = b""
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": DTYPES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Rows of numbers as int32 words, the lowest bits first, one integer for a row."""
    count = -(-numbers.shape[1] * bits // 32)
    found = []
    for row in numbers.tolist():
        whole = sum(int(v) << (bits * i) for i, v in enumerate(row))
        found.append([whole >> (32 * w) & 0xFFFFFFFF for w in range(count)])
    return np.array(found, np.uint32).view(np.int32)


def scales_of(draw: Any, *shape: int, dtype: Any = np.float16) -> np.ndarray:
    return (draw.uniform(0.5, 2.0, shape) * 0.02).astype(dtype)


def gptq(
    bits: int = 4, group: int = 32, version: str = "gptq", ordered: bool = False, sym: bool = False
) -> Any:
    def made(draw: Any, rows: int, columns: int) -> Any:
        size = columns if group == -1 else group
        codes = draw.integers(0, 1 << bits, (columns, rows))
        off = 1 if version == "gptq" else 0
        zeros = draw.integers(off, (1 << bits) - 1 + off, (columns // size, rows))
        if sym:
            zeros[:] = 1 << (bits - 1)
        scales = scales_of(draw, columns // size, rows)
        index = np.arange(columns) // size
        if ordered:
            index = draw.permutation(index)
        wanted = np.empty((rows, columns), np.float32)
        for k in range(columns):
            g = index[k]
            wanted[:, k] = (codes[k] - zeros[g]) * scales[g].astype(np.float64)
        tensors = {
            "qweight": np.ascontiguousarray(words(codes.T, bits).T),
            "qzeros": words(zeros - off, bits),
            "scales": scales,
            "g_idx": index.astype(np.int32),
        }
        config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym}
        return tensors, config | {"checkpoint_format": version, "desc_act": ordered}, wanted

    return made


def awq(draw: Any, rows: int, columns: int) -> Any:
    codes = draw.integers(0, 16, (columns, rows))
    zeros = draw.integers(0, 16, (columns // 32, rows))
    scales = scales_of(draw, columns // 32, rows)

    def packed(x: np.ndarray) -> np.ndarray:
        found = np.zeros((len(x), rows // 8), np.int64)
        for nibble, column in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
            found |= x[:, column::8] << (4 * nibble)
        return found.astype(np.uint32).view(np.int32)

    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    wanted = (codes - np.repeat(zeros, 32, 0)) * np.repeat(scales, 32, 0).astype(np.float64)
    tensors = {"qweight": packed(codes), "qzeros": packed(zeros), "scales": scales}
    return tensors, config | {"version": "gemm"}, wanted.T.astype(np.float32)


def compressed(
    weights: dict[str, Any], form: str, inputs: Any = None, **more: Any
) -> dict[str, Any]:
    one = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    groups = {"group_0": one}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, **more}


def packed(
    bits: int = 4,
    group: int = 32,
    dtype: Any = np.float16,
    zero: bool = False,
    ordered: bool = False,
) -> Any:
    def made(draw: Any, rows: int, columns: int) -> Any:
        size, half = columns if group == -1 else group, 1 << (bits - 1)
        codes = draw.integers(-half, half, (rows, columns))
        scales = scales_of(draw, rows, columns // size, dtype=dtype)
        zeros = draw.integers(-half, half, scales.shape) if zero else np.zeros(scales.shape, int)
        index = np.arange(columns) // size
        if ordered:
            index = draw.permutation(index)
        wide = scales.astype(np.float64)
        wanted = ((codes - zeros[:, index]) * wide[:, index]).astype(np.float32)
        tensors = {
            "weight_packed": words(codes + half, bits),
            "weight_shape": np.array([rows, columns], np.int64),
            "weight_scale": scales,
        }
        if zero:
            tensors["weight_zero_point"] = np.ascontiguousarray(words((zeros + half).T, bits).T)
        if ordered:
            tensors["weight_g_idx"] = index.astype(np.int32)
        said = {"num_bits": bits, "type": "int", "symmetric": not zero, "group_size": size}
        strategy = "channel" if group == -1 else "group"
        return tensors, compressed({**said, "strategy": strategy}, "pack-quantized"), wanted

    return made


def in_bytes(
    kind: str, grain: str, dtype: Any = np.float32, inputs: Any = None, static: bool = False
) -> Any:
    def made(draw: Any, rows: int, columns: int) -> Any:
        if kind == "int":
            codes = draw.integers(-127, 128, (rows, columns)).astype(np.int8)
        else:
            codes = draw.standard_normal((rows, columns)).astype(np.float32).astype(E4M3)
        shape = {"tensor": (1,), "channel": (rows, 1), "block": (-(-rows // 16), columns // 16)}
        scales = scales_of(draw, *shape[grain], dtype=dtype) / (100 if kind == "int" else 1)
        scales = scales.astype(dtype)
        wide = scales.astype(np.float64)
        if grain == "block":
            wide = np.repeat(np.repeat(wide, 16, 0)[:rows], 16, 1)
        wanted = (codes.astype(np.float64) * wide).astype(np.float32)
        tensors = {"weight": codes, "weight_scale": scales}
        said = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": grain}
        if grain == "block":
            said["block_structure"] = [16, 16]
        if static:
            tensors["input_scale"] = np.array([0.03], np.float32)
        form = "int-quantized" if kind == "int" else "float-quantized"
        return tensors, compressed(said, form, inputs), wanted

    return made


def fp8_block(draw: Any, rows: int, columns: int) -> Any:
    tensors, _, wanted = in_bytes("float", "block")(draw, rows, columns)
    tensors["weight_scale_inv"] = tensors.pop("weight_scale")
    config = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    return tensors, config | {"activation_scheme": "dynamic"}, wanted


def fp8_static(draw: Any, rows: int, columns: int) -> Any:
    tensors, _, wanted = in_bytes("float", "tensor", static=True)(draw, rows, columns)
    tensors = {k: v.reshape(()) if "scale" in k else v for k, v in tensors.items()}
    return tensors, {"quant_method": "fp8", "activation_scheme": "static"}, wanted


def nibbles(codes: np.ndarray) -> np.ndarray:
    """Two in a byte, the low one the even element."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)


def small(codes: np.ndarray) -> np.ndarray:
    return np.array([(-1 if c > 7 else 1) * SMALL[c % 8] for c in codes.flat]).reshape(codes.shape)


def nvfp4(modelopt: bool = False) -> Any:
    def made(draw: Any, rows: int, columns: int) -> Any:
        codes = draw.integers(0, 16, (rows, columns))
        scales = draw.uniform(1, 400, (rows, columns // 16)).astype(E4M3)
        total = np.float32(1 / 8192)  # a power of two: no reader rounds it
        wide = np.repeat(scales.astype(np.float64), 16, 1) * total
        wanted = (small(codes) * wide).astype(np.float32)
        if modelopt:
            tensors = {"weight": nibbles(codes), "weight_scale": scales}
            tensors["weight_scale_2"] = np.array(total, np.float32)
            tensors["input_scale"] = np.array(1, np.float32)
            return tensors, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, wanted
        tensors = {"weight_packed": nibbles(codes), "weight_scale": scales}
        tensors["weight_global_scale"] = np.array([1 / total], np.float32)
        said = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
        return tensors, compressed(said, "nvfp4-pack-quantized"), wanted

    return made


def mxfp4(draw: Any, rows: int, columns: int) -> Any:
    codes = draw.integers(0, 16, (rows, columns))
    powers = draw.integers(110, 122, (rows, columns // 32)).astype(np.uint8)
    wide = 2.0 ** (np.repeat(powers, 32, 1).astype(np.float64) - 127)
    tensors = {"weight_packed": nibbles(codes), "weight_scale": powers}
    said = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    config = compressed(said, "mxfp4-pack-quantized")
    return tensors, config, (small(codes) * wide).astype(np.float32)


NF4 = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
]


def nf4(nested: bool = False) -> Any:
    def made(draw: Any, rows: int, columns: int) -> Any:
        table, size = np.array(NF4, np.float32), 32
        codes, count = draw.integers(0, 16, (rows, columns)), rows * columns // size
        flat = codes.reshape(-1)
        state = {"quant_type": "nf4", "blocksize": size, "shape": [rows, columns]}
        tensors = {
            "weight": (flat[0::2] << 4 | flat[1::2]).astype(np.uint8).reshape(-1, 1),
            "weight.quant_map": table,
        }
        if nested:
            inner = np.linspace(-1, 1, 256).astype(np.float32)
            small = draw.integers(0, 256, count).astype(np.uint8)
            outer = scales_of(draw, -(-count // 256), dtype=np.float32)
            absmax = inner[small] * np.repeat(outer, 256)[:count] + np.float32(0.5)
            state |= {"nested_blocksize": 256, "nested_offset": 0.5, "nested_dtype": "float32"}
            tensors |= {"weight.absmax": small, "weight.nested_absmax": outer}
            tensors["weight.nested_quant_map"] = inner
        else:
            absmax = tensors["weight.absmax"] = scales_of(draw, count, dtype=np.float32)
        text = np.frombuffer(json.dumps(state).encode(), np.uint8)
        tensors["weight.quant_state.bitsandbytes__nf4"] = text
        wanted = table[flat] * np.repeat(absmax, size)
        config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
        return tensors, config, wanted.reshape(rows, columns)

    return made


TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}


def halved(dtype: Any) -> Any:
    """2:4 with a bit for each column, the first column the lowest bit of its byte."""

    def made(draw: Any, rows: int, columns: int) -> Any:
        wanted, values, bits = np.zeros((rows, columns), np.float32), [], []
        for row in range(rows):
            kept = [
                4 * f + int(i) for f in range(columns // 4) for i in sorted(draw.permutation(4)[:2])
            ]
            given = draw.standard_normal(len(kept)).astype(dtype)
            wanted[row, kept] = given.astype(np.float32)
            values.append(given)
            bits.append(
                [sum(1 << (c % 8) for c in kept if c // 8 == b) for b in range(columns // 8)]
            )
        tensors = {
            "compressed": np.stack(values),
            "bitmask": np.array(bits, np.uint8),
            "shape": np.array([[rows], [columns]], np.int64),
        }
        sparsity = {
            "format": "sparse-24-bitmask",
            "sparsity_structure": "2:4",
            "targets": ["Linear"],
        }
        config = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}}
        return tensors, config | {"sparsity_config": sparsity}, wanted

    return made


def torchao(kind: str, grain: str, bits: int = 8, zero: bool = False, inputs: Any = None) -> Any:
    """torchao's plain layouts; the metadata of the file says what a weight is."""
    half = 1 << (bits - 1)

    def made(draw: Any, rows: int, columns: int) -> Any:
        if kind == "Float8Tensor":
            codes = draw.standard_normal((rows, columns)).astype(np.float32).astype(E4M3)
        else:
            codes = draw.integers(-half, half, (rows, columns)).astype(np.int8)
        shapes = {"tensor": (1, 1), "channel": (rows, 1), "group": (rows, columns // 32)}
        shapes["block"] = (-(-rows // 16), columns // 16)
        scales = scales_of(draw, *shapes[grain], dtype=np.float32)
        scales /= np.float32(1 if kind == "Float8Tensor" else half)
        zeros = draw.integers(-half, half, scales.shape) * int(zero)
        wide, below = scales.astype(np.float64), zeros
        if grain == "block":
            wide = np.repeat(np.repeat(wide, 16, 0)[:rows], 16, 1)
        if grain == "group":
            wide, below = np.repeat(wide, 32, 1), np.repeat(zeros, 32, 1)
        wanted = (codes.astype(np.float64) - (below if zero else 0)) * wide
        tensors = {"_weight_qdata": codes, "_weight_scale": scales}
        if kind != "Float8Tensor":
            tensors["_weight_zero_point"] = zeros.astype(np.int8)
        sizes = {"tensor": [rows, columns], "channel": [1, columns], "group": [1, 32]}
        facts: dict[str, Any] = {"block_size": sizes.get(grain, [16, 16]), "act_quant_kwargs": None}
        if inputs is not None:
            way = {"_type": "MappingType", "_data": "SYMMETRIC"}
            told = {"granularity": {"_type": inputs, "_data": {}}, "mapping_type": way}
            facts["act_quant_kwargs"] = {"_type": "Quantize", "_data": told}
        if kind == "IntxUnpackedToInt8Tensor":
            facts["target_dtype"] = {"_type": "torch.dtype", "_data": f"int{bits}"}
            facts["activation_quantization"] = None
        config = {"quant_method": "torchao", METADATA: {"_type": kind, "_data": facts}}
        return tensors, config, wanted.astype(np.float32)

    return made


METADATA = "metadata"  # of every weight, in what makes a layer
UNPACKED = "IntxUnpackedToInt8Tensor"
FIXED = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
# name -> (maker, the Format it is read as)
LAYERS: dict[str, tuple[Any, str]] = {
    "gptq": (gptq(), "Q4_Z"),
    "gptq v2": (gptq(version="gptq_v2"), "Q4_Z"),
    "gptq of 2 bits": (gptq(2), "INT2_G32_F16_ZERO"),
    "gptq of 3 bits": (gptq(3), "INT3_G32_F16_ZERO"),
    "gptq of 8 bits": (gptq(8), "INT8_G32_F16_ZERO"),
    "gptq of 8 bits, symmetric": (gptq(8, sym=True), "Q8_0"),
    "gptq, symmetric": (gptq(sym=True), "Q4_0"),
    "gptq, whole rows": (gptq(group=-1), "INT4_ROW_F16_ZERO"),
    "gptq, ordered": (gptq(ordered=True), "Q4_Z"),
    "gptq, ordered and symmetric": (gptq(ordered=True, sym=True), "Q4_0"),
    "awq": (awq, "Q4_Z"),
    "compressed int4": (packed(), "Q4_0"),
    "compressed int4, bf16": (packed(dtype=ml_dtypes.bfloat16, zero=True), "Q4_Z"),
    "compressed int4, float32": (packed(dtype=np.float32), "INT4_G32_F32"),
    "compressed int4, zero points": (packed(zero=True), "Q4_Z"),
    "compressed int4, ordered": (packed(ordered=True), "Q4_0"),
    "compressed int4, channels": (packed(group=-1), "INT4_ROW_F16"),
    "compressed int3": (packed(3), "INT3_G32_F16"),
    "compressed int8 packed": (packed(8, -1), "INT8_ROW_F16"),
    "compressed int8": (in_bytes("int", "channel", inputs=TOKEN), "INT8_ROW_F32"),
    "compressed int8, one scale": (in_bytes("int", "tensor"), "INT8_TENSOR_F32"),
    "compressed fp8": (
        in_bytes("float", "channel", ml_dtypes.bfloat16, TOKEN | {"type": "float"}),
        "E4M3_ROW_BF16",
    ),
    "compressed fp8, fixed": (
        in_bytes("float", "tensor", inputs=FIXED, static=True),
        "E4M3_TENSOR_F32",
    ),
    "compressed fp8, blocks": (in_bytes("float", "block"), "E4M3_16X16_F32"),
    "compressed 2:4": (halved(ml_dtypes.bfloat16), "BF16_SPARSE"),
    "compressed 2:4, float16": (halved(np.float16), "F16_SPARSE"),
    "fp8, blocks": (fp8_block, "E4M3_16X16_F32"),
    "fp8, fixed": (fp8_static, "E4M3_TENSOR_F32"),
    "nvfp4": (nvfp4(), "E2M1_G16_E4M3_TOTAL"),
    "nvfp4 of modelopt": (nvfp4(True), "E2M1_G16_E4M3_TOTAL"),
    "mxfp4": (mxfp4, "MXFP4"),
    "nf4": (nf4(), "NF4_G32_F32"),
    "nf4, nested": (nf4(True), "NF4_G32_F32"),
    "torchao fp8": (torchao("Float8Tensor", "channel", inputs="PerRow"), "E4M3_ROW_F32"),
    "torchao fp8, one scale": (torchao("Float8Tensor", "tensor"), "E4M3_TENSOR_F32"),
    "torchao fp8, blocks": (torchao("Float8Tensor", "block"), "E4M3_16X16_F32"),
    "torchao int8": (torchao("Int8Tensor", "channel", inputs="PerRow"), "INT8_ROW_F32"),
    "torchao int8, zero points": (torchao("Int8Tensor", "channel", zero=True), "INT8_ROW_F32_ZERO"),
    "torchao int4": (torchao(UNPACKED, "group", 4), "INT4_G32_F32"),
    "torchao int4, zero points": (torchao(UNPACKED, "group", 4, True), "INT4_G32_F32_ZERO"),
    "torchao int3": (torchao(UNPACKED, "channel", 3), "INT3_ROW_F32"),
    "torchao int8, groups": (torchao(UNPACKED, "group", 8), "INT8_G32_F32"),
}

SIZES = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
PROJECTIONS = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (96, 64),
    "mlp.up_proj": (96, 64),
    "mlp.down_proj": (64, 96),
}


def metadata_of(config: dict[str, Any], layer: str) -> dict[str, str]:
    """What a file tells of a layer's weight, taken out of what makes the layer."""
    told = config.pop(METADATA, None)
    return {} if told is None else {f"{layer}.weight": json.dumps(told)}


def write_folder(folder: Path, name: str, seed: int = 0) -> dict[str, np.ndarray]:
    """A small Llama whose layers are stored as `name` says; the float32 values of all weights."""
    draw = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    wanted: dict[str, np.ndarray] = {}
    config: dict[str, Any] = {}
    metadata: dict[str, str] = {}
    for layer in range(2):
        start = f"model.layers.{layer}."
        for path, (rows, columns) in PROJECTIONS.items():
            parts, config, values = LAYERS[name][0](draw, rows, columns)
            tensors |= {f"{start}{path}.{suffix}": array for suffix, array in parts.items()}
            wanted[f"{start}{path}.weight"] = values
            metadata |= metadata_of(config, f"{start}{path}")
        for norm in ("input_layernorm", "post_attention_layernorm"):
            plain = draw.uniform(0.5, 1.5, 64).astype(np.float32)
            tensors[f"{start}{norm}.weight"] = wanted[f"{start}{norm}.weight"] = plain
    top = {"model.embed_tokens": (50, 64), "lm_head": (50, 64), "model.norm": (64,)}
    for path, shape in top.items():
        plain = draw.standard_normal(shape).astype(np.float32)
        tensors[f"{path}.weight"] = wanted[f"{path}.weight"] = plain
    folder.mkdir(exist_ok=True)
    write_safetensors(folder / "model.safetensors", tensors, metadata)
    whole = {"model_type": "llama", "tie_word_embeddings": False, **SIZES}
    text = json.dumps(whole | {"quantization_config": config})
    (folder / "config.json").write_text(text)
    return wanted

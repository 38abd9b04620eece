"""exchange/quantised.py and compressed.py: folders that others quantised, read and run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign import LAYERS, PROJECTIONS, metadata_of, write_folder, write_safetensors

import tilegrad as tg
from tilegrad.core.errors import UserError
from tilegrad.core.format import format_of
from tilegrad.exchange.folder import ModelFolder, read_folder
from tilegrad.models.decoder.config import DecoderConfig
from tilegrad.models.decoder.model import Decoder
from tilegrad.quant import PackedLinear
from tilegrad.tensor.stored import stored_in

GATE = "model.layers.1.mlp.gate_proj"
FEW = ["gptq, ordered", "awq", "compressed int4", "compressed int8", "compressed fp8, fixed"]
FEW += ["fp8, blocks", "nvfp4", "nf4, nested", "compressed 2:4", "torchao fp8", "torchao int8"]


@pytest.mark.parametrize("name", LAYERS)
def test_values_bit_for_bit(name: str, tmp_path: Path) -> None:
    wanted = write_folder(tmp_path / "model", name)
    folder = read_folder(tmp_path / "model")
    assert set(folder.tensors) == set(wanted)
    for key, values in wanted.items():
        found = folder.tensors[key]
        assert tuple(found.shape) == values.shape
        np.testing.assert_array_equal(found.values(), values)
    assert folder.tensors[f"{GATE}.weight"].format is format_of(LAYERS[name][1])


def model_of(folder: ModelFolder, **options: Any) -> Decoder:
    model = Decoder(DecoderConfig.from_huggingface(folder.config)).requires_grad_(False).eval()
    model.load(folder.tensors, **options)
    return model


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FEW)
def test_a_folder_runs_as_it_is(name: str, tmp_path: Path) -> None:
    wanted = write_folder(tmp_path / "model", name)
    folder = read_folder(tmp_path / "model")
    model = model_of(folder, keep="quantised")
    assert len(stored_in(model.parameters())) == 14  # all but embedding and head
    layer = model.blocks[1].feed.gate
    x = np.random.default_rng(3).standard_normal((5, 64)).astype(np.float32)
    given = x.astype(np.float64)
    form, scale = getattr(layer, "input_format", ""), getattr(layer, "input_scale", None)
    if form:  # inputs as the file says they are rounded
        rows = x if scale is None else np.clip(x / np.float32(0.03), -448, 448)
        rounded = format_of(form)
        given = rounded.to_float32(rounded.pack(x)).astype(np.float64)
        if scale is not None:
            exact = rows.astype(format_of("F8_E4M3").dtype.numpy).astype(np.float64)
            given = exact * np.float64(np.float32(0.03))
    exact = given @ wanted[f"{GATE}.weight"].astype(np.float64).T
    found = layer(tg.tensor(x)).numpy()
    near = (
        3e-3 if folder.tensors[f"{GATE}.weight"].format.name in ("Q4_0", "Q4_Z", "MXFP4") else 1e-5
    )
    assert np.abs(found - exact).max() < near * np.abs(exact).max()
    assert isinstance(layer, PackedLinear) == ("ordered" in name or bool(form))
    tokens = tg.tensor(np.random.default_rng(4).integers(0, 50, (2, 7)))
    plain = model_of(folder)
    logits, want = model(tokens).numpy(), plain(tokens).numpy()
    assert np.abs(logits - want).max() < (0.25 if form else 5e-3) * np.abs(want).max()


def test_fused_layers_have_rows_of_their_own(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    parts, config, _ = LAYERS["compressed fp8, fixed"][0](draw, 128, 64)
    parts["weight_scale"] = np.array([0.01, 0.02, 0.04], np.float32)  # of queries, keys, values
    write_safetensors(
        tmp_path / "model.safetensors", {f"a.qkv_proj.{k}": v for k, v in parts.items()}
    )
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    table = {"model_type": "phi3", **sizes, "quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(table))
    found = read_folder(tmp_path).tensors["a.qkv_proj.weight"].values()
    scale = np.repeat(np.array([0.01, 0.02, 0.04], np.float32), [64, 32, 32])
    exact = parts["weight"].astype(np.float64) * scale[:, None].astype(np.float64)
    np.testing.assert_array_equal(found, exact.astype(np.float32))


def test_experts_of_gpt_oss(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    blocks = draw.integers(0, 256, (3, 8, 2, 16)).astype(np.uint8)
    scales = draw.integers(115, 125, (3, 8, 2)).astype(np.uint8)
    write_safetensors(
        tmp_path / "model.safetensors",
        {"mlp.experts.down_proj_blocks": blocks, "mlp.experts.down_proj_scales": scales},
    )
    table = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(table))
    found = read_folder(tmp_path).tensors["mlp.experts.down_proj"]
    assert found.shape == (3, 8, 64) and found.format.name == "MXFP4"
    small = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(3, 8, 2, 32)
    exact = small[codes] * 2.0 ** (scales.astype(np.float64)[..., None] - 127)
    np.testing.assert_array_equal(found.values(), exact.reshape(3, 8, 64).astype(np.float32))


IN_BYTES = [name for name in LAYERS if "fp8" in name or "int8" in name]


@pytest.mark.parametrize("name", IN_BYTES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (48, 16), (33, 64), (1, 16)])
def test_one_row_and_one_block_of_columns(
    name: str, rows: int, columns: int, tmp_path: Path
) -> None:
    """Weights of any number of rows, with a scale for all of them in any of its shapes."""
    if columns % 32 and ("groups" in name or "packed" in name):
        pytest.skip("groups of 32")
    parts, config, wanted = LAYERS[name][0](np.random.default_rng(3), rows, columns)
    told = metadata_of(config, "l")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    scales = [n for n in parts if "scale" in n or "zero_point" in n]
    one = all(parts[n].size == 1 for n in scales)
    for shape in [None, (), (1,), (1, 1)] if one else [None]:
        given = {
            n: v.reshape(shape) if n in scales and shape is not None else v
            for n, v in parts.items()
        }
        write_safetensors(
            tmp_path / "model.safetensors", {f"l.{n}": v for n, v in given.items()}, told
        )
        np.testing.assert_array_equal(read_folder(tmp_path).tensors["l.weight"].values(), wanted)


def test_ignored_layers_stay_as_they_are(tmp_path: Path) -> None:
    draw = np.random.default_rng(2)
    parts, config, wanted = LAYERS["compressed int4"][0](draw, 32, 64)
    tensors = {f"a.up_proj.{k}": v for k, v in parts.items()}
    tensors |= {"lm_head.weight": wanted, "b.lm_head.weight_scale": np.ones((32, 1), np.float32)}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    config["ignore"] = ["lm_head", "re:.*lm_head$"]
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    found = read_folder(tmp_path).tensors
    assert set(found) == {"a.up_proj.weight", "lm_head.weight", "b.lm_head.weight_scale"}


# ---- what does not fit --------------------------------------------------------------------------


def refused(tmp_path: Path, name: str, change: Any, match: str) -> None:
    parts, config, _ = LAYERS[name][0](np.random.default_rng(0), 32, 64)
    change(parts, config)
    told = metadata_of(config, "l")
    write_safetensors(tmp_path / "model.safetensors", {f"l.{k}": v for k, v in parts.items()}, told)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(UserError, match=match):
        for tensor in read_folder(tmp_path).tensors.values():
            tensor.values()


def cut(name: str) -> Any:
    return lambda parts, config: parts.update({name: np.ascontiguousarray(parts[name][:-1])})


def said(**fields: Any) -> Any:
    return lambda parts, config: config.update(fields)


def told(**facts: Any) -> Any:
    return lambda parts, config: config["metadata"]["_data"].update(facts)


def index(value: int, at: int = 3) -> Any:
    def change(parts: Any, config: Any) -> None:
        parts["g_idx"][at] = value

    return change


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("gptq", cut("scales"), "l.scales: another shape"),
        ("gptq", cut("qzeros"), "l.qzeros: another shape"),
        ("gptq", cut("g_idx"), "l.g_idx: another shape"),
        ("gptq", said(group_size=48), "group_size"),
        ("gptq", said(group_size="x"), "group_size"),
        ("gptq", said(group_size=0), "group_size"),
        ("gptq", said(bits=5), "bits"),
        ("gptq", said(checkpoint_format="marlin"), "checkpoint_format"),
        ("gptq", said(quant_method="quip"), "quant_method"),
        ("gptq", said(quant_method=None), "quant_method"),
        ("gptq, ordered", index(99), "a group is out of range"),
        ("gptq, ordered", index(-3), "a group is out of range"),
        ("gptq", index(1), "groups are not of one size"),
        ("gptq", lambda p, c: p.pop("qzeros"), "l.qzeros: it is missing"),
        ("gptq", lambda p, c: p.update(scales=p["qzeros"]), "l.scales: another dtype"),
        ("awq", said(version="gemv"), "version"),
        ("awq", cut("qzeros"), "l.qzeros: another shape"),
        ("compressed int4", cut("weight_packed"), "l.weight_packed: another shape"),
        ("compressed int4", cut("weight_scale"), "l.weight_scale: another shape"),
        ("compressed int4", said(config_groups={}), "config_groups"),
        ("compressed int4", said(config_groups={"a": 3}), "config_groups"),
        ("compressed int4", said(format="sparse-24"), "format"),
        ("compressed 2:4", said(sparsity_config={"format": "sparse-bitmask"}), "format"),
        ("compressed 2:4", cut("bitmask"), "l.bitmask: another shape"),
        ("compressed 2:4", cut("compressed"), "l.compressed: another shape"),
        ("compressed 2:4", lambda p, c: p["bitmask"].fill(0b01110011), "not two of every four"),
        ("compressed 2:4", lambda p, c: p["shape"].fill(-4), "l.shape: not whole fours"),
        ("compressed 2:4", lambda p, c: p["shape"].fill(1 << 60), "l.shape: not whole fours"),
        ("compressed 2:4", cut("shape"), "l.shape: not whole fours"),
        ("compressed int4", lambda p, c: p["weight_shape"].fill(-1), "l.weight_packed: another"),
        ("compressed int4", lambda p, c: p["weight_shape"].fill(1 << 60), "l.weight_packed"),
        ("compressed int4, zero points", cut("weight_zero_point"), "l.weight_zero_point"),
        ("compressed fp8, fixed", lambda p, c: p["input_scale"].fill(np.nan), "not a scale"),
        ("compressed fp8, fixed", lambda p, c: p.pop("input_scale"), "input_scale"),
        ("compressed fp8, blocks", cut("weight_scale"), "l.weight_scale: another shape"),
        ("fp8, blocks", said(weight_block_size=[16]), "blocks of another kind"),
        ("fp8, blocks", said(weight_block_size=[16, 0]), "blocks of another kind"),
        ("nvfp4", lambda p, c: p["weight_global_scale"].fill(0), "not a divisor"),
        ("nvfp4", cut("weight_scale"), "l.weight_scale: another shape"),
        ("mxfp4", cut("weight_scale"), "l.weight_scale: another shape"),
        ("nf4", cut("weight.absmax"), "l.weight.absmax: another shape"),
        ("nf4", lambda p, c: p["weight.quant_map"].fill(0), "another table"),
        ("nf4, nested", cut("weight.nested_absmax"), "nested_absmax: another shape"),
        ("nf4", cut("weight.quant_state.bitsandbytes__nf4"), "not a table"),
        ("torchao fp8", cut("_weight_scale"), "l._weight_scale: another shape"),
        ("torchao fp8", lambda p, c: p.pop("_weight_scale"), "l._weight_scale: it is missing"),
        ("torchao int4", cut("_weight_zero_point"), "l._weight_zero_point: another shape"),
        ("torchao int4", lambda p, c: p["_weight_qdata"].fill(9), "more than 4 bits"),
        ("torchao int4", told(target_dtype={"_data": "uint4"}), "target_dtype"),
        ("torchao int4", told(activation_quantization="int8_asym_per_token"), "activation_quant"),
        ("torchao fp8", told(act_quant_kwargs={"_data": {}}), "granularity"),
        ("torchao fp8", lambda p, c: c["metadata"].update(_type="Int4Tensor"), "_type"),
        ("torchao fp8", lambda p, c: c.pop("metadata"), "metadata of l.weight"),
    ],
)
def test_what_does_not_fit(name: str, change: Any, match: str, tmp_path: Path) -> None:
    refused(tmp_path, name, change, match)


@pytest.mark.parametrize("name", LAYERS)
def test_random_changes_end_in_weights_or_in_a_clear_error(name: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(list(name.encode()))
    for _ in range(25):
        parts, config, _ = LAYERS[name][0](draw, 32, 64)
        keys = list(parts)
        for _ in range(int(draw.integers(1, 3))):
            key = keys[int(draw.integers(len(keys)))]
            if key not in parts:
                continue
            array, kind = parts[key], int(draw.integers(6))
            if kind == 0:
                del parts[key]
            elif kind == 1 and array.size and array.ndim:
                parts[key] = np.ascontiguousarray(array[: int(draw.integers(len(array)))])
            elif kind == 2:
                parts[key] = array.reshape(-1)
            elif kind == 3:
                parts[key] = np.ascontiguousarray(array.T)
            elif kind == 4:
                parts[key] = np.frombuffer(draw.bytes(array.nbytes), array.dtype)
                parts[key] = parts[key].reshape(array.shape)
            else:
                config[str(draw.choice(list(config)))] = draw.choice([0, -1, 7, 1 << 40]).item()
        tensors = {f"l.{k}": v for k, v in parts.items()}
        if not tensors:
            continue
        write_safetensors(tmp_path / "model.safetensors", tensors, metadata_of(config, "l"))
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
        try:
            with np.errstate(all="ignore"):
                for tensor in read_folder(tmp_path).tensors.values():
                    tensor.values() if hasattr(tensor, "make") else tensor.array()
        except UserError as error:
            assert "model" in str(error) or "config" in str(error) or str(tmp_path) in str(error)


@pytest.mark.parametrize("keep", ["", "quantised"])
def test_a_layer_of_another_size_is_refused(
    keep: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PROJECTIONS, "mlp.up_proj", (256, 64))
    write_folder(tmp_path / "model", "compressed int4")
    with pytest.raises(UserError, match=r"up_proj\.weight does not fit"):
        model_of(read_folder(tmp_path / "model"), keep=keep)


ODD = [None, True, 0, -1, 3, 1 << 40, 0.5, "", "group", "re:(", [], [0], [16, -16], {}, {"a": 1}]


def changed(draw: Any, table: Any) -> Any:
    """A table with one value, at any depth, put in the place of another or taken out."""
    if isinstance(table, list):
        return [*table, *table] if draw.integers(2) else table[1:]
    key = str(draw.choice(list(table)))
    inner = table[key]
    if isinstance(inner, (dict, list)) and inner and draw.integers(4):
        return {**table, key: changed(draw, inner)}
    if draw.integers(4) == 0:
        return {k: v for k, v in table.items() if k != key}
    return {**table, key: ODD[int(draw.integers(len(ODD)))]}


@pytest.mark.parametrize("name", LAYERS)
def test_odd_configurations_end_in_weights_or_in_a_clear_error(name: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(list(name.encode()))
    parts, config, _ = LAYERS[name][0](draw, 32, 64)
    tensors, refusals = {f"l.{k}": v for k, v in parts.items()}, 0
    for _ in range(40):
        table = changed(draw, config)
        write_safetensors(tmp_path / "model.safetensors", tensors, metadata_of(table, "l"))
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": table}))
        try:
            with np.errstate(all="ignore"):
                for tensor in read_folder(tmp_path).tensors.values():
                    tensor.values() if hasattr(tensor, "make") else tensor.array()
        except UserError as error:
            refusals += 1
            assert str(tmp_path) in str(error), error
    assert refusals

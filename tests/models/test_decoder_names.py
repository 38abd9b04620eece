"""Weights by other names: GGUF files, older checkpoints, models with more than text; and errors.

What GGUF files hold is made from the peer's weights as llama.cpp's converter makes it.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoder_families import loaded, peer
from oss_folder import OSS, write_folder

from tilegrad.core import format as formats
from tilegrad.core.errors import ShapeError, UserError
from tilegrad.exchange.composed import Composed, Rounded
from tilegrad.exchange.folder import read_folder
from tilegrad.exchange.gguf import read_gguf
from tilegrad.exchange.gguf_write import write_gguf
from tilegrad.exchange.mapped import Stored
from tilegrad.models.decoder.config import DecoderConfig
from tilegrad.models.decoder.model import Decoder
from tilegrad.models.decoder.names import Names, halves_of
from tilegrad.tensor.stored import stored_in

ARCHITECTURES = {
    "llama": "llama",
    "llama3": "llama",
    "smollm2": "llama",
    "llama_bias": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "phi3": "phi3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gpt2": "gpt2",
    "gemma": "gemma",
    "granite": "granite",
    "olmo2": "olmo2",
    "phi2": "phi2",
    "smollm3_fourth": "smollm3",
    "gpt_neox": "gptneox",
    "gpt_neox_serial": "gptneox",
    "gpt_oss": "gpt-oss",
}
# Endings of names, longest first where one is within another.
PLAIN = [
    ("self_attn.q_norm", "attn_q_norm"), ("self_attn.k_norm", "attn_k_norm"),
    ("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"), ("self_attn.o_proj", "attn_output"),
    ("self_attn.qkv_proj", "attn_qkv"), ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
    ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("mlp.shared_expert.down_proj", "ffn_down_shexp"), ("mlp.gate_up_proj", "ffn_up"),
    ("mlp.gate_proj", "ffn_gate"), ("mlp.up_proj", "ffn_up"), ("mlp.down_proj", "ffn_down"),
    ("mlp.gate", "ffn_gate_inp"), ("mlp.router", "ffn_gate_inp"), ("input_layernorm", "attn_norm"),
    ("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output"),
    ("attn.c_attn", "attn_qkv"), ("attn.c_proj", "attn_output"), ("mlp.c_fc", "ffn_up"),
    ("mlp.c_proj", "ffn_down"), ("ln_1", "attn_norm"), ("ln_2", "ffn_norm"),
    ("transformer.wte", "token_embd"), ("transformer.wpe", "position_embd"),
    ("transformer.ln_f", "output_norm"), ("self_attn.dense", "attn_output"),
    ("mlp.fc1", "ffn_up"), ("mlp.fc2", "ffn_down"), ("model.final_layernorm", "output_norm"),
    ("attention.query_key_value", "attn_qkv"), ("attention.dense", "attn_output"),
    ("mlp.dense_h_to_4h", "ffn_up"), ("mlp.dense_4h_to_h", "ffn_down"),
    ("gpt_neox.embed_in", "token_embd"), ("gpt_neox.final_layer_norm", "output_norm"),
]  # fmt: skip
LLAMA = [("post_attention_layernorm", "ffn_norm")]
GPT_OSS = [("post_attention_layernorm", "post_attention_norm")]
GEMMA = [
    ("post_attention_layernorm", "post_attention_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
]


def arrays(name: str) -> dict[str, Any]:
    return {n: t.numpy() for n, t in peer(name).state_dict().items()}


def pairs_of(array: Any, heads: int) -> Any:
    """Rows of heads as llama.cpp's converter lays them."""
    cut = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return cut.swapaxes(1, 2).reshape(array.shape)


def gguf_tensors(name: str) -> dict[str, Any]:
    """The peer's weights as a GGUF file has them."""
    config, found = loaded(name).config, {}
    rules = PLAIN + (GEMMA if config.post_norms else GPT_OSS if config.sinks else LLAMA)
    for path, array in arrays(name).items():
        if path == "lm_head.weight" and config.tied:
            continue
        path = re.sub(
            r"^(model\.layers|transformer\.h|gpt_neox\.layers)\.(\d+)\.", r"blk.\2.", path
        )
        if "query_key_value" in path:  # all queries, then all keys, then all values
            cut = array.reshape(config.heads, 3, config.head_width, *array.shape[1:])
            array = cut.swapaxes(0, 1).reshape(array.shape)
        if "mlp.experts." in path and config.sinks:
            found |= _clamped_experts(path, array)
            continue
        path = path.replace("self_attn.sinks", "attn_sinks.weight")
        if path.endswith("experts.gate_up_proj"):
            block = path.removesuffix("mlp.experts.gate_up_proj")
            gate, up = np.split(array, 2, 1)
            found |= {f"{block}ffn_gate_exps.weight": gate, f"{block}ffn_up_exps.weight": up}
            continue
        path = path.replace("mlp.experts.down_proj", "ffn_down_exps.weight")
        if re.search(r"\.c_\w+\.weight$", path):
            array = array.T
        for theirs, ours in rules:
            path = re.sub(rf"(^|\.){re.escape(theirs)}\.(weight|bias)$", rf"\1{ours}.\2", path)
        if ARCHITECTURES[name] in ("llama", "granite", "smollm3"):
            for kind, heads in (("attn_q", config.heads), ("attn_k", config.key_heads)):
                array = pairs_of(array, heads) if f".{kind}." in path else array
        if config.norm_offset and path.endswith("norm.weight"):
            array = array + np.float32(1.0)
        found[path] = array.reshape(-1) if "gate_inp_shexp" in path else array
    if name == "llama3":  # scaling is a tensor in these files
        rotary, width = config.rotary, config.head_width
        plain = 1.0 / rotary.base ** (np.arange(0, width, 2) / width)
        found["rope_freqs.weight"] = (plain / rotary.frequencies()).astype(np.float32)
    if name == "phi3":
        found["rope_factors_short.weight"] = np.array(config.rotary.divisors, np.float32)
    return found


def _clamped_experts(path: str, array: Any) -> dict[str, Any]:
    """Weights (experts, in, out) and biases of gpt-oss, as files of GGUF have them."""
    block, _, part = path.partition("mlp.experts.")
    suffix = "bias" if part.endswith("_bias") else "weight"
    array = np.ascontiguousarray(array.swapaxes(1, 2)) if suffix == "weight" else array
    if "down" in part:
        return {f"{block}ffn_down_exps.{suffix}": array}
    halves = [np.ascontiguousarray(array[:, first::2]) for first in range(2)]
    return {f"{block}ffn_{p}_exps.{suffix}": a for p, a in zip(("gate", "up"), halves)}


def gguf_metadata(name: str) -> dict[str, Any]:
    config, kind = loaded(name).config, ARCHITECTURES[name]
    given = peer(name).config.to_dict()
    norm = "layer_norm_rms_epsilon" if config.norm == "rms" else "layer_norm_epsilon"
    found = {
        "context_length": given.get("max_position_embeddings", given.get("n_positions")),
        "embedding_length": config.width,
        "block_count": config.layers,
        "feed_forward_length": config.hidden,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.key_heads,
        "attention.key_length": config.head_width,
        f"attention.{norm}": config.norm_epsilon,
    }
    if config.rotary is not None:
        found["rope.freq_base"] = config.rotary.base
        found["rope.dimension_count"] = config.rotary.width
    if name == "phi3":
        found["rope.scaling.original_context_length"] = 96
        found["rope.scaling.attn_factor"] = config.rotary.attention_factor
    if kind == "granite":
        found |= {
            "attention.scale": config.scale,
            "logit_scale": 1.0 / config.logit_scale,
            "embedding_scale": config.embedding_scale,
            "residual_scale": config.residual_scale,
        }
    if kind == "gptneox":
        found["use_parallel_residual"] = config.parallel
    if name in ("gemma2", "gemma3"):
        found |= {"attention.sliding_window": 7, "attention.scale": config.scale}
    if name == "gemma3":
        found["attention.sliding_window"] = 7
    if config.sinks:
        found |= {
            "attention.sliding_window": 7,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": config.rotary.factor,
            "rope.scaling.original_context_length": config.rotary.original,
        }
    if config.experts:
        found |= {
            "expert_count": config.experts,
            "expert_used_count": config.experts_used,
            "expert_feed_forward_length": config.expert_hidden,
            "expert_shared_feed_forward_length": config.shared_hidden,
        }
    return {"general.architecture": kind, **{f"{kind}.{k}": v for k, v in found.items()}}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gguf_gives_the_same_model(name: str) -> None:
    ours, tensors = loaded(name), gguf_tensors(name)
    config = DecoderConfig.from_gguf(gguf_metadata(name), tensors)
    for field in DecoderConfig.__dataclass_fields__:
        if field in (
            "family",
            "norm_offset",
            "rotary",
            "hidden",
            "windows",
            "normalize_experts",
            "longest",
            "gate_limit",  # a number that no file says
        ):
            continue
        assert getattr(config, field) == getattr(ours.config, field), field
    if config.rotary is not None:
        np.testing.assert_allclose(
            config.rotary.frequencies(), ours.config.rotary.frequencies(), rtol=1e-6
        )
        assert config.rotary.attention_factor == ours.config.rotary.attention_factor
    if name != "gemma3":  # three layers are no whole pattern of six
        assert config.windows == ours.config.windows
    if config.experts:
        assert config.normalize_experts == (name != "qwen2_moe")
    other = Decoder(config)
    keys = other.load(tensors)
    assert not keys.missing_keys and not keys.unexpected_keys
    wanted = ours.state_dict()
    for path, tensor in other.state_dict().items():
        theirs = wanted[path].numpy()
        if "norm" in path and path.endswith("weight"):
            theirs = theirs + np.float32(ours.config.norm_offset)
        np.testing.assert_array_equal(tensor.numpy(), theirs, err_msg=path)


def test_rows_of_heads_go_both_ways() -> None:
    rows = np.arange(24.0).reshape(24, 1)
    np.testing.assert_array_equal(halves_of(pairs_of(rows, 3), 3), rows)
    assert pairs_of(rows, 3)[:4, 0].tolist() == [0, 4, 1, 5]
    with pytest.raises(ShapeError, match="pairs of heads"):
        halves_of(rows, 5)


# ---- other checkpoints --------------------------------------------------------------------------


def same(name: str, weights: dict[str, Any]) -> None:
    ours = loaded(name)
    other = Decoder(ours.config)
    assert not other.load(weights).unexpected_keys
    wanted = ours.state_dict()
    for path, tensor in other.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), wanted[path].numpy(), err_msg=path)


@pytest.mark.parametrize(
    "name, block, words",
    [
        ("mixtral", "block_sparse_moe", ("w1", "w3", "w2")),
        ("qwen3_moe", "mlp", ("gate_proj", "up_proj", "down_proj")),
    ],
)
def test_experts_one_by_one(name: str, block: str, words: tuple[str, ...]) -> None:
    weights: dict[str, Any] = {}
    for path, array in arrays(name).items():
        start, found, last = path.partition("mlp.experts.")
        if not found:
            weights[path.replace("mlp.gate.", f"{block}.gate.")] = array
            continue
        parts = np.split(array, 2, 1) if last == "gate_up_proj" else [array]
        for word, part in zip(words if len(parts) == 2 else words[2:], parts):
            for e, own in enumerate(part):
                weights[f"{start}{block}.experts.{e}.{word}.weight"] = own
    same(name, weights)


def test_names_without_and_with_other_beginnings() -> None:
    bare = {n.removeprefix("transformer."): a for n, a in arrays("gpt2").items()}
    bare["h.0.attn.bias"] = np.ones((1, 1, 8, 8))
    del bare["lm_head.weight"]
    same("gpt2", bare)
    seeing = {f"language_model.{n}": a for n, a in arrays("gemma3").items()}
    seeing["vision_tower.embeddings.weight"] = np.ones((3, 3))
    same("gemma3", seeing)


def test_errors_name_the_weights() -> None:
    weights = arrays("llama")
    ours = Decoder(loaded("llama").config)
    before = ours.state_dict()["norm.weight"].numpy()
    short = {n: a for n, a in weights.items() if "layers.1.mlp.up_proj" not in n}
    with pytest.raises(UserError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        ours.load(short)
    with pytest.raises(UserError, match=r"unused: model\.layers\.3\.norm\.weight"):
        ours.load({**weights, "model.layers.3.norm.weight": before})
    with pytest.raises(ShapeError, match=r"q_proj\.weight does not fit"):
        ours.load({**weights, "model.layers.0.self_attn.q_proj.weight": np.ones((3, 3))})
    np.testing.assert_array_equal(ours.state_dict()["norm.weight"].numpy(), before)
    keys = ours.load({**short, "more": before}, strict=False)
    assert keys.missing_keys == ["model.layers.1.mlp.up_proj.weight"]
    assert keys.unexpected_keys == ["more"]
    fused = {**arrays("phi3"), "model.layers.0.self_attn.qkv_proj.weight": np.ones((60, 32))}
    with pytest.raises(ShapeError, match="does not hold its parts"):
        Decoder(loaded("phi3").config).load(fused)


# ---- experts in fp8 ------------------------------------------------------------------------------


@pytest.mark.parametrize("scales", [None, (0.02, 0.03)])
def test_experts_in_fp8_stay_where_a_device_multiplies_them(
    scales: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With what they ask of their inputs; elsewhere they are unpacked, and it is said."""
    form, asked = formats.format_of("E4M3_ROW_F32"), []

    def multiplies(*given: Any) -> bool:
        asked.append(given)
        return bool(given[-1] == "cuda:0")

    monkeypatch.setattr("tilegrad.models.decoder.names.multiplies_groups", multiplies)
    weights: dict[str, Any] = {}
    for path, array in arrays("qwen3_moe").items():
        start, found, last = path.partition("mlp.experts.")
        if not found:
            weights[path] = array
            continue
        words = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
        for word, part in zip(words, np.split(array, len(words), 1)):
            for e, own in enumerate(part):
                name = f"{start}mlp.experts.{e}.{word}.weight"
                scale = None if scales is None else scales[word == "up_proj"]
                kind = "E4M3_ROW_F32" if scale is None else "E4M3_TENSOR_F32"
                raw = form.pack(np.asarray(own, np.float32))
                weights[name] = Composed(
                    name, own.shape, form, (), lambda raw=raw: raw, input=Rounded(kind, scale)
                )
    for device in ("cuda:0", "cpu"):
        model = Decoder(loaded("qwen3_moe").config)
        model.load(weights, keep="quantised", device=device)
        count = sum(model.config.routed)
        assert len(stored_in(model.parameters())) == (3 * count if device == "cuda:0" else 0)
        assert ("are unpacked" in caplog.text) == (device == "cpu")
        feed = next(b.feed for b, r in zip(model.blocks, model.config.routed) if r)
        if device == "cpu":
            assert not feed.formats
        else:
            assert set(feed.formats) == {"gate", "down"}
            if scales is not None:
                assert feed.gate_scale.item() == np.float32(0.03)  # the largest
    assert asked[0][2] == tuple(feed.gate.shape)


# ---- gpt-oss -------------------------------------------------------------------------------------


def test_experts_of_gpt_oss_in_mxfp4_are_those_of_plain_weights(tmp_path: Path) -> None:
    """A file of MXFP4 has rows of outputs, a plain one columns; gate and up take turns in both."""
    config = DecoderConfig.from_huggingface(OSS)
    assert config.sinks and config.expert_bias and config.gate_limit == 7.0
    assert config.windows == (8, 0) and config.qkv_bias and config.output_bias
    plain, made = write_folder(tmp_path), []
    for weights in (read_folder(tmp_path).tensors, plain):
        model = Decoder(config)
        model.load(weights, keep="quantised")
        assert len(stored_in(model.parameters())) == (0 if made else 3 * 2), "experts stay"
        made.append(model.requires_grad_(False).eval()(np.arange(12)[None]).numpy())
    np.testing.assert_allclose(*made, atol=1e-4)
    np.testing.assert_array_equal(*(m.argmax(-1) for m in made))
    assert np.abs(made[0]).max() > 0.1


def test_a_gguf_file_of_gpt_oss(tmp_path: Path) -> None:
    """Experts of MXFP4 stay so; the values are those that the gguf package reads."""
    draw = np.random.default_rng(1)
    config = DecoderConfig.from_huggingface(OSS)
    names = Names(replace(config, family="gpt-oss"), {"token_embd.weight": None})
    tensors: dict[str, Any] = {}
    for ours, parameter in Decoder(config).named_parameters():
        name = names.sources(ours)[0].name
        values = (draw.standard_normal(tuple(parameter.shape)) * 0.2).astype(np.float32)
        tensors[name] = values
        if name.endswith("_exps.weight"):
            tensors[name] = Stored(name, values.shape, formats.MXFP4, formats.MXFP4.pack(values))
    said = {
        "context_length": 64,
        "embedding_length": 64,
        "block_count": 2,
        "feed_forward_length": 64,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.sliding_window": 8,
        "expert_count": 3,
        "expert_used_count": 2,
        "expert_feed_forward_length": 64,
    }
    metadata = {"general.architecture": "gpt-oss", **{f"gpt-oss.{k}": v for k, v in said.items()}}
    path = tmp_path / "oss.gguf"
    write_gguf(path, metadata, tensors)
    file = read_gguf(path)
    found = DecoderConfig.from_gguf(file.metadata, file.tensors)
    epsilon = float(np.float32(config.norm_epsilon))
    assert replace(config, family="gpt-oss", norm_epsilon=epsilon) == found
    model = Decoder(found).requires_grad_(False).eval()
    model.load(file.tensors, keep="quantised")
    assert len(stored_in(model.parameters())) == 3 * 2
    plain = Decoder(found).requires_grad_(False).eval()
    plain.load({n: t.values() for n, t in file.tensors.items()})
    logits = [m(np.arange(12)[None]).numpy() for m in (model, plain)]
    np.testing.assert_allclose(*logits, atol=1e-4)
    np.testing.assert_array_equal(*(x.argmax(-1) for x in logits))
    gguf = pytest.importorskip("gguf")
    from gguf.quants import dequantize

    known = {gguf.TENSOR_NAMES[t] for t in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.GPT_OSS]}
    for tensor in gguf.GGUFReader(path).tensors:
        own = re.sub(r"^blk\.\d+\.", "blk.{bid}.", tensor.name).rsplit(".", 1)[0]
        assert own in known, tensor.name
        theirs = dequantize(tensor.data, tensor.tensor_type)
        values = file.tensors[tensor.name].values()
        np.testing.assert_array_equal(theirs.reshape(values.shape), values)

"""generate/cache.py: keys and values in e4m3 and int8, scales of files, given and calibrated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_model
from safetensors.numpy import load_file, save_file

import tilegrad as tg
from tilegrad.core.errors import UserError
from tilegrad.generate import LLM
from tilegrad.generate import llm as llm_module
from tilegrad.generate.bundle import Bundled, save_llm
from tilegrad.generate.cache import asked_by, scales_of
from tilegrad.generate.quantise import Wanted, quantise_model
from tilegrad.nn import PagedCache
from tilegrad.runtime.limits import Limits

PROMPT = "the sea was calm"
NEAR = {"fp8": 0.1, "int8": 0.05}  # logprobs of a drawn model beside a plain cache, on average


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write_folder(tmp_path_factory.mktemp("plain") / "model", {})


@pytest.fixture(scope="module")
def plain(folder: Path) -> LLM:
    return LLM(folder, context=128, requests=2)


def with_scales(source: Path, into: Path, scheme: Any, **scales: Any) -> Path:
    """A copy of a folder that says how keys and values are kept; `{}` is a layer."""
    into.mkdir()
    for file in source.iterdir():
        (into / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    for name, value in scales.items():
        for layer in range(tiny_model.LAYERS):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = np.asarray(value, np.float32)
    save_file(tensors, into / "model.safetensors")
    config = json.loads((into / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "ignore": ["lm_head"],
        "format": "dense",
        "kv_cache_scheme": scheme,
    }
    (into / "config.json").write_text(json.dumps(config))
    return into


SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_scores_are_near_those_of_a_plain_cache(folder: Path, plain: LLM, name: str) -> None:
    ids = plain.tokenizer.encode(PROMPT * 3)
    found = LLM(folder, context=128, requests=2, kv_cache_dtype=name)
    assert found.kv_cache_dtype == name and found.engine.cache.keys[0].dtype.bits == 8
    assert found.engine.cache.bytes * 4 == plain.engine.cache.bytes
    want, got = plain.score(ids), found.score(ids)
    assert np.abs(got - want).mean() < NEAR[name] and (got != want).any()
    assert found.generate(PROMPT, max_tokens=4).tokens  # appends and decodes


def test_calibrated_scales_hold_what_they_were_made_for(folder: Path) -> None:
    llm = LLM(folder, context=256, requests=1, kv_cache_dtype="fp8", kv_cache_scales="calibrated")
    scales = np.stack([s.numpy() for s in llm.engine.cache.scales])
    assert scales.shape == (tiny_model.LAYERS, 2, 1) and (scales > 0).all()
    llm.score(llm.tokenizer.encode("four letters and three people"))
    for one, keys in zip(scales, llm.engine.cache.keys):
        largest = np.abs(keys.numpy().astype(np.float32)).max()
        assert 20 < largest <= 448 and one[0, 0] < 1


def test_scales_of_files(folder: Path, tmp_path: Path, plain: LLM) -> None:
    own = with_scales(folder, tmp_path / "own", SCHEME, k_scale=[0.01], v_scale=[0.02])
    llm = LLM(own, context=128, requests=2)  # as the files ask
    assert llm.kv_cache_dtype == "fp8"
    assert [s.numpy().tolist() for s in llm.engine.cache.scales] == [
        [[np.float32(0.01)], [np.float32(0.02)]]
    ] * tiny_model.LAYERS
    as_int8 = LLM(own, context=128, requests=2, kv_cache_dtype="int8")
    np.testing.assert_allclose(
        as_int8.engine.cache.scales[0].numpy()[0], 0.01 * 448 / 127, rtol=1e-6
    )
    kept = LLM(own, context=128, requests=2, kv_cache_dtype="float32")
    assert not kept.engine.cache.scales
    ids = plain.tokenizer.encode(PROMPT)
    np.testing.assert_array_equal(kept.score(ids), plain.score(ids))


def test_names_of_scales() -> None:
    class Held:
        def __init__(self, *numbers: float) -> None:
            self.numbers = np.array(numbers, np.float32)

        def array(self) -> Any:
            return self.numbers

    found = scales_of(
        {
            "model.layers.0.self_attn.k_proj.k_scale": Held(2.0),  # ModelOpt
            "model.layers.0.self_attn.v_proj.v_scale": Held(3.0),
            "model.layers.1.self_attn.k_scale": Held(4.0, 5.0),  # a head each
            "model.layers.2.self_attn.kv_scale": Held(6.0),
            "model.layers.2.self_attn.q_scale": Held(9.0),
        },
        3,
        2,
    )
    assert found.tolist() == [[[2, 2], [3, 3]], [[4, 5], [1, 1]], [[6, 6], [6, 6]]]
    for wrong in (Held(0.0), Held(-1.0), Held(np.nan), Held(1.0, 2.0, 3.0), Held()):
        with pytest.raises(UserError, match="no scale"):
            scales_of({"model.layers.0.self_attn.k_scale": wrong}, 3, 2)
    for layer in ("3", "1" * 5000, "x"):
        with pytest.raises(UserError, match="no scale"):
            scales_of({f"model.layers.{layer}.self_attn.k_scale": Held(1.0)}, 3, 2)


def test_what_files_ask_for() -> None:
    assert asked_by(None) is None
    assert asked_by("fp8") is tg.float8_e4m3 and asked_by(SCHEME) is tg.float8_e4m3
    assert asked_by({**SCHEME, "type": "int", "strategy": "attn_head"}) is tg.int8
    wrong = [{"dynamic": True}, {"num_bits": 4}, {"strategy": "channel"}, {"symmetric": False}]
    wrong += [{"type": ["float"]}, {"type": {}}, {"num_bits": [8]}]
    for other in ("NVFP4", [], 3, *({**SCHEME, **one} for one in wrong)):
        with pytest.raises(UserError, match="not known"):
            asked_by(other)


def test_what_modelopt_writes_beside(folder: Path, tmp_path: Path) -> None:
    scales = {"k_proj.k_scale": [0.01], "v_proj.v_scale": [0.02]}
    own = with_scales(folder, tmp_path / "own", None, **scales)
    config = json.loads((own / "config.json").read_text())
    del config["quantization_config"]
    (own / "config.json").write_text(json.dumps(config))
    assert LLM(own, context=64, requests=1).kv_cache_dtype == "float32"
    said = {"producer": {"name": "modelopt"}, "quantization": {"kv_cache_quant_algo": "FP8"}}
    (own / "hf_quant_config.json").write_text(json.dumps(said))
    llm = LLM(own, context=64, requests=1)
    assert llm.kv_cache_dtype == "fp8"
    np.testing.assert_allclose(llm.engine.cache.scales[1].numpy()[:, 0], [0.01, 0.02])
    (own / "hf_quant_config.json").write_text("[")
    with pytest.raises(UserError, match="hf_quant_config"):
        LLM(own, context=64, requests=1)


@pytest.mark.parametrize("scheme", [SCHEME, "FP8"])
def test_quantised_files_keep_what_is_said(scheme: Any, folder: Path, tmp_path: Path) -> None:
    own = with_scales(folder, tmp_path / "own", scheme, k_scale=[0.01], v_scale=[0.02])
    quantise_model(own, tmp_path / "out", Wanted("int4", group=16), lambda *_: None)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["quantization_config"]["kv_cache_scheme"] == SCHEME
    llm = LLM(tmp_path / "out", context=64, requests=1)
    assert llm.kv_cache_dtype == "fp8"
    np.testing.assert_allclose(llm.engine.cache.scales[1].numpy()[:, 0], [0.01, 0.02])


def test_what_files_ask_for_can_be_turned_off(folder: Path, tmp_path: Path) -> None:
    own = with_scales(folder, tmp_path / "own", {**SCHEME, "dynamic": True})
    with pytest.raises(UserError, match="not known"):
        LLM(own, context=64, requests=1)
    for wanted in ("float32", "fp8"):
        assert LLM(own, context=64, requests=1, kv_cache_dtype=wanted).kv_cache_dtype == wanted
    scaled = with_scales(folder, tmp_path / "scaled", {**SCHEME, "dynamic": True}, k_scale=[0.1])
    with pytest.raises(UserError, match="not known"):  # of what dtype the scales are
        LLM(scaled, context=64, requests=1, kv_cache_dtype="int8")


def test_errors(folder: Path) -> None:
    with pytest.raises(UserError, match="no such dtype") as error:
        LLM(folder, context=64, kv_cache_dtype="fp8_e5m2")
    assert "e4m3" in str(error.value)
    with pytest.raises(UserError, match="8 bits"):
        LLM(folder, context=64, kv_cache_scales=(1.0, 1.0))
    with pytest.raises(UserError, match="no such scales"):
        LLM(folder, context=64, kv_cache_dtype="fp8", kv_cache_scales="dynamic")
    with pytest.raises(tg.ShapeError, match="scales"):
        LLM(folder, context=64, kv_cache_dtype="fp8", kv_cache_scales=np.ones((3, 2, 1)))
    with pytest.raises(UserError, match="positive"):
        LLM(folder, context=64, kv_cache_dtype="fp8", kv_cache_scales=(0.0, 1.0))
    for scales in (["a", "b"], [[1.0], [1.0, 2.0]], {}, ("calibrated",), [10**400, 1]):
        with pytest.raises(UserError, match=r"expected: .* numbers"):
            LLM(folder, context=64, kv_cache_dtype="fp8", kv_cache_scales=scales)
    with pytest.raises(UserError, match="no such dtype"):
        LLM(folder, context=64, kv_cache_dtype=["float32"])  # type: ignore[arg-type]
    for dtype in (tg.uint8, tg.bool_, tg.int16, tg.int32):
        with pytest.raises(UserError, match="not kept in this dtype"):
            PagedCache(1, 4, 16, 2, 32, requests=1, most_pages=2, dtype=dtype)


def test_the_prefix_cache_tells_caches_apart(folder: Path) -> None:
    def key(**how: Any) -> bytes:
        llm = LLM(folder, context=64, requests=1, **how)
        request = llm._task(llm.tokenizer.encode(PROMPT * 3)).request
        return llm.engine.batcher.add(request).keys(16, 1)[0]

    choices = [{}, {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "int8"}]
    choices.append({"kv_cache_dtype": "fp8", "kv_cache_scales": (0.5, 1.0)})
    assert len({key(**how) for how in choices}) == len(choices)
    assert key(**choices[1]) == key(**choices[1])


def test_invariant(folder: Path) -> None:
    """Alone and beside others: the same tokens and logprobs, to the bit."""
    how = {"context": 128, "requests": 4, "determinism": "invariant", "kv_cache_dtype": "fp8"}
    llm = LLM(folder, **how)
    prompts = [PROMPT, "one", PROMPT * 5, "two three"]
    asked = {"max_tokens": 6, "temperature": 0.7, "seed": 3, "logprobs": 1}
    alone = [llm.generate(p, **asked) for p in prompts]
    beside = llm.generate(prompts, **asked)
    assert [a.tokens for a in alone] == [b.tokens for b in beside]
    assert [a.logprobs for a in alone] == [b.logprobs for b in beside]


def test_bundle(folder: Path, tmp_path: Path) -> None:
    made = save_llm(tmp_path / "made", folder, context=64, requests=2, kv_cache_dtype="int8")
    want = LLM(folder, context=64, requests=2, kv_cache_dtype="int8")
    found = LLM(made, requests=2)
    assert found.kv_cache_dtype == "int8"
    for a, b in zip(want.engine.cache.scales, found.engine.cache.scales):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    assert found.generate(PROMPT, max_tokens=8).tokens == want.generate(PROMPT, max_tokens=8).tokens
    for other in ("fp8", ["int8"]):
        with pytest.raises(UserError, match="kv_cache_dtype"):
            LLM(made, requests=2, kv_cache_dtype=other)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "said", [("fp8", "abc"), ("fp8", {}), ([], None), ("fp8", ["a"]), ("fp8", [[1.0], [1.0, 2.0]])]
)
def test_a_manifest_that_is_wrong(said: Any, folder: Path, monkeypatch: Any) -> None:
    made = Bundled("here", folder, "cpu", "float32", 64, 1, 4, Limits(16, 64), *said)
    monkeypatch.setattr(llm_module, "open_bundled", lambda _: made)
    with pytest.raises(UserError, match=r"keys and values are kept|expected: .* numbers"):
        LLM("here")

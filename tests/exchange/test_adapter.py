"""Adapters in PEFT's layout: what is read, what is refused and how, and hostile files."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tilegrad.core.errors import TilegradError, UserError
from tilegrad.exchange.adapter import read_adapter

sys.path.insert(0, str(Path(__file__).parents[1] / "generate"))
from lora_folder import pairs, write_adapter

MODULE = "model.layers.0.self_attn.q_proj"
A, B = (f"base_model.model.{MODULE}.lora_{side}.weight" for side in "AB")


def test_what_is_read(tmp_path: Path) -> None:
    adapter = read_adapter(write_adapter(tmp_path / "a", 1, 4))
    assert len(adapter.pairs) == 14
    a, b, scale = adapter.pairs[MODULE]
    given = pairs(1, 4)
    assert (a.values() == given[A]).all() and (b.values() == given[B]).all() and scale == 2.0


def test_scales_and_ranks_of_modules(tmp_path: Path) -> None:
    tensors = pairs(1, 4)
    tensors[A], tensors[B] = tensors[A][:2], tensors[B][:, :2]
    said = {"rank_pattern": {MODULE: 2}, "alpha_pattern": {"q_proj": 6}, "use_rslora": True}
    adapter = read_adapter(write_adapter(tmp_path / "a", tensors=tensors, **said))
    assert adapter.pairs[MODULE][2] == pytest.approx(6 / 2**0.5)
    assert adapter.pairs["model.layers.1.self_attn.q_proj"][2] == 3.0
    assert adapter.pairs["model.layers.1.mlp.up_proj"][2] == 4.0


def test_a_pattern_of_modules_is_not_run(tmp_path: Path) -> None:
    """One that takes forever where it is run takes no time."""
    slow = r"(([a-z_.0-9])+)+!"
    assert read_adapter(write_adapter(tmp_path / "a", target_modules=slow)).pairs
    with pytest.raises(UserError, match="alpha_pattern"):
        read_adapter(write_adapter(tmp_path / "b", alpha_pattern={slow: 2}))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"r": 0}, "r"),
        ({"r": True}, "r"),
        ({"r": 8}, "rank is 8"),
        ({"lora_alpha": "8"}, "lora_alpha"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
        ({"use_rslora": 1}, "use_rslora"),
        ({"target_modules": {"q_proj": 1}}, "target_modules"),
        ({"target_modules": ["q_proj"]}, "target_modules"),
        ({"rank_pattern": [1]}, "rank_pattern"),
    ],
)
def test_what_a_configuration_may_not_say(tmp_path: Path, said: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_adapter(write_adapter(tmp_path / "a", **said))


def test_a_module_without_tensors(tmp_path: Path) -> None:
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    with pytest.raises(UserError, match="no lm_head"):
        read_adapter(write_adapter(tmp_path / "a", target_modules=[*modules, "lm_head"]))


def changed(name: str, value: np.ndarray | None) -> dict:
    tensors = pairs(1, 4)
    if value is None:
        del tensors[name]
    else:
        tensors[name] = value
    return tensors


ones = np.ones((4, 32), np.float32)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (A, None, "q_proj.lora_A"),
        (B, None, "q_proj.lora_B"),
        (A, ones[:3], "q_proj.lora_A"),
        (B, ones, "q_proj.lora_B"),
        (A, ones[0], "q_proj.lora_A"),
        (A, ones.astype(np.int32), "q_proj.lora_A.*\n.*float32"),
        (A, ones * np.nan, "q_proj.lora_A.*\n.*finite"),
        (A.replace("A.weight", "magnitude_vector"), ones, "lora_magnitude_vector.*\n.*\n.*DoRA"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", ones, "lora_embedding_A"),
        ("base_model.model.lm_head.weight", ones, "lm_head.weight"),
    ],
)
def test_wrong_tensors_are_named(tmp_path: Path, name: str, value, words: str) -> None:
    folder = write_adapter(tmp_path / "a", tensors=changed(name, value))
    with pytest.raises(UserError, match=f"(?s){words}"):
        read_adapter(folder)


def test_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        read_adapter(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="is missing"):
        read_adapter(tmp_path / "empty")
    folder = write_adapter(tmp_path / "pickled")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(UserError, match="pickle"):
        read_adapter(folder)
    folder = write_adapter(tmp_path / "nothing")
    save_file({}, folder / "adapter_model.safetensors")
    with pytest.raises(UserError, match="no tensors"):
        read_adapter(folder)


def test_hostile_files_end_in_an_error_of_ours(tmp_path: Path) -> None:
    """Bytes changed at random in both files: an Adapter, or a UserError."""
    folder = write_adapter(tmp_path / "a", rank=2, targets=("self_attn.q_proj",))
    random = np.random.default_rng(4)
    files = [folder / "adapter_config.json", folder / "adapter_model.safetensors"]
    whole = [file.read_bytes() for file in files]
    refused = 0
    for number in range(300):
        which = number % 2
        data = bytearray(whole[which])
        for place in random.integers(0, min(len(data), 900), random.integers(1, 4)):
            data[place] = random.integers(0, 256)
        if number % 7 == 0:
            del data[random.integers(0, len(data)) :]
        files[which].write_bytes(data)
        try:
            read_adapter(folder)
        except TilegradError:
            refused += 1
        files[which].write_bytes(whole[which])
    assert refused > 100


def test_hostile_values_of_every_field(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", rank=2)
    config = json.loads((folder / "adapter_config.json").read_text())
    fields = ("r", "lora_alpha", "bias", "target_modules", "use_rslora", "peft_type", "use_dora")
    fields += ("rank_pattern", "alpha_pattern", "modules_to_save", "init_lora_weights")
    for name in fields:
        for value in (
            None,
            [],
            {},
            [None],
            {"a": None},
            {"q_proj": {}},
            "x",
            -1,
            1e300,
            True,
            2**70,
        ):
            (folder / "adapter_config.json").write_text(json.dumps({**config, name: value}))
            try:
                read_adapter(folder)
            except UserError as error:
                assert str(folder) in str(error)

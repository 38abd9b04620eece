"""Folders as transformers writes them, run by LLM: tokens and logprobs are those of transformers.

They have no tokenizer, so ids go in and come out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoder_families import peer, tokens
from oss_folder import OSS, write_folder
from safetensors.numpy import save_file
from torch_peer import torch

from tilegrad.core.errors import UserError
from tilegrad.generate.llm import LLM
from tilegrad.models.tokens.absent import NoTokenizer
from tilegrad.tensor.stored import stored_in

COUNT = 10
# Every kind of block, of norms, of positions and of names; the other families share these.
NAMES = ["gemma", "gpt_oss", "granite", "gpt_neox", "llama_dynamic", "olmo2", "phi2", "smollm3"]


def written(name: str, folder: Path) -> Path:
    """The peer as a folder."""
    peer(name).save_pretrained(folder)
    return folder


@pytest.mark.sampled(3, also=("gpt_oss",))
@pytest.mark.parametrize("name", NAMES)
def test_prefill_and_decode_as_transformers(name: str, tmp_path: Path) -> None:
    llm = LLM(written(name, tmp_path), dtype="float32", requests=2, context=64)
    prompts = [tokens(11, seed=1).tolist(), tokens(4, seed=2).tolist()]
    answers = llm.generate(prompts, max_tokens=COUNT, ignore_end=True, logprobs=1)
    for prompt, answer in zip(prompts, answers):
        whole = torch.tensor([[*prompt, *answer.tokens]])
        rows = peer(name)(whole).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1).numpy()
        assert list(answer.tokens) == rows.argmax(-1).tolist()
        np.testing.assert_allclose(answer.logprobs, rows.max(-1), atol=1e-4)
        assert answer.text == "" and answer.finish == "length"


def test_experts_of_mxfp4_stay_quantised(tmp_path: Path) -> None:
    """Prefill and decode of the engine: tokens are those of a folder of plain weights."""
    quantised, plain = tmp_path / "quantised", tmp_path / "plain"
    for folder in (quantised, plain):
        folder.mkdir()
    save_file(write_folder(quantised), plain / "model.safetensors")
    (plain / "config.json").write_text(json.dumps(OSS))
    prompts = [[3, 9, 27, 5, 14], list(range(30))]
    answers = []
    for folder in (quantised, plain):
        llm = LLM(folder, dtype="float32", requests=2, context=64)
        assert len(stored_in(llm.model.parameters())) == (0 if folder is plain else 3 * 2)
        found = llm.generate(prompts, max_tokens=COUNT, ignore_end=True)
        answers.append([list(a.tokens) for a in found])
    assert answers[0] == answers[1] and len({*answers[0][0]}) > 2


def test_a_longer_context_where_the_file_has_a_scaling(tmp_path: Path) -> None:
    folder = written("llama_dynamic", tmp_path)
    assert LLM(folder, context=100).context == 100
    assert LLM(folder).context == 128
    long = LLM(folder, context=10**6)
    assert long.context == 512 and long.config.rotary.base > 10000.0


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    folder = written("llama", tmp_path)
    (folder / "vocab.json").write_text("{}")
    llm = LLM(folder, context=64)
    assert isinstance(llm.tokenizer, NoTokenizer) and llm.tokenizer.ends == {2}
    prompt = tokens(5).tolist()
    free = llm.generate(prompt, max_tokens=6, ignore_end=True)
    stopped = llm.generate(prompt, max_tokens=6, stop_tokens=[free.tokens[2]], ignore_end=True)
    assert stopped.finish == "stop"
    assert [p.token for p in llm.stream(prompt, max_tokens=6, ignore_end=True)] == list(free.tokens)
    wrong: list[Any] = [
        lambda: llm.generate("text"),
        lambda: llm.chat("text"),
        lambda: list(llm.stream("text")),
        lambda: llm.tokenizer.decode([1]),
        lambda: llm.generate(prompt, stop="end"),
    ]
    for call in wrong:
        with pytest.raises(UserError, match="no tokenizer") as caught:
            call()
        assert "tokenizer.json" in str(caught.value) and "vocab.json" in str(caught.value)


@pytest.mark.parametrize(
    "files, what",
    [
        (
            {"model_index.json": {"_class_name": "StableDiffusionPipeline"}},
            r"this is a diffusers pipeline \(StableDiffusionPipeline\)",
        ),
        (
            {"config.json": {"_class_name": "UNet2DConditionModel", "sample_size": 64}},
            r"this is a part of a diffusers pipeline \(UNet2DConditionModel\)",
        ),
        ({"config.json": {"model_type": "mamba" * 10**5}}, "unknown architecture"),
    ],
)
def test_folders_of_something_else(tmp_path: Path, files: dict[str, Any], what: str) -> None:
    from safetensors.numpy import save_file

    for name, table in files.items():
        (tmp_path / name).write_text(json.dumps(table))
    save_file({"x": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=what) as caught:
        LLM(tmp_path)
    assert len(str(caught.value)) < 4000

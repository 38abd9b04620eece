"""LLM(quantization=...): plain weights that are rounded as they are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_model

from tilegrad import nn
from tilegrad.core.errors import UserError
from tilegrad.core.format import Q8_0
from tilegrad.exchange.gguf import read_gguf
from tilegrad.exchange.gguf_write import write_gguf
from tilegrad.exchange.mapped import Stored
from tilegrad.generate import LLM
from tilegrad.generate.quantise import Wanted, quantise_model
from tilegrad.quant.layers import PackedLinear
from tilegrad.tensor.stored import stored_in

PROMPT = "the sea was calm"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write_folder(tmp_path_factory.mktemp("plain") / "model", {})


def opened(path: Path, **more: Any) -> LLM:
    return LLM(path, context=128, requests=2, **more)


def near(llm: LLM, plain: LLM) -> None:
    """Scores differ, by what rounding does."""
    text = plain.tokenizer.encode(PROMPT * 3)
    assert 0 < np.abs(llm.score(text) - plain.score(text)).mean() < 0.5


def test_fp8_is_what_the_command_makes(folder: Path, tmp_path: Path) -> None:
    """Scores are those of a folder in fp8, to the bit; router, embedding and head are left."""
    found = opened(folder, quantization="fp8")
    text = found.tokenizer.encode(PROMPT * 3)
    layers = [m for m in found.model.blocks.modules() if isinstance(m, nn.Linear)]
    assert all(isinstance(m, PackedLinear) and stored_in([m.weight]) for m in layers)
    assert len(layers) == 7 * tiny_model.LAYERS
    quantise_model(folder, tmp_path / "fp8", Wanted("fp8", PROMPT * 40), lambda *_: None)
    np.testing.assert_array_equal(found.score(text), opened(tmp_path / "fp8").score(text))
    near(found, opened(folder))
    assert found.generate(PROMPT, max_tokens=4).tokens


def test_a_plain_gguf_file(tmp_path: Path) -> None:
    """Rows of queries and keys lie in another order there: their scales go with them."""
    path = tiny_model.write_file(tmp_path / "plain.gguf")
    near(opened(path, quantization="fp8"), opened(path))


def test_int8(folder: Path) -> None:
    near(opened(folder, quantization="int8"), opened(folder))


def test_refused(folder: Path, tmp_path: Path) -> None:
    """Weights that are quantised, drawn ones, and words that nobody knows."""
    file = read_gguf(tiny_model.write_file(tmp_path / "plain.gguf"))
    name = "blk.0.ffn_gate.weight"
    plain = {n: s.array() for n, s in file.tensors.items()}
    plain[name] = Stored(name, plain[name].shape, Q8_0, Q8_0.pack(plain[name]))
    write_gguf(tmp_path / "q.gguf", file.metadata, plain, kinds=file.kinds)
    with pytest.raises(UserError, match="plain weights") as found:
        opened(tmp_path / "q.gguf", quantization="fp8")
    assert f"{name} in Q8_0" in str(found.value)
    with pytest.raises(UserError, match="a file's weights"):
        opened(folder, quantization="fp8", random_weights=True)
    with pytest.raises(UserError, match="no such quantization"):
        opened(folder, quantization="awq")

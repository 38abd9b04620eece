"""generate/quantise.py and the command: files in, quantised files out, judged and opened again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_model
from typer.testing import CliRunner

from tilegrad.cli.commands import app
from tilegrad.core.errors import UserError
from tilegrad.exchange.folder import read_folder
from tilegrad.exchange.gguf import read_gguf
from tilegrad.generate import LLM
from tilegrad.generate.quantise import Wanted, quantise_model

TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps. " * 20


def said(*_: Any) -> None:
    """Nobody is told."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return tiny_model.write_folder(tmp_path_factory.mktemp("plain") / "model", {})


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("to", "form"),
    [
        ("int4", "INT4_G16_F16_ZERO"),
        ("gptq-int4", "INT4_G16_F16_ZERO"),
        ("awq-int4", "INT4_G16_F16_ZERO"),
        ("int8", "INT8_ROW_F32"),
        ("fp8", "E4M3_ROW_F32"),
        ("2:4", "BF16_SPARSE"),
    ],
)
def test_a_folder_becomes_a_folder(to: str, form: str, folder: Path, tmp_path: Path) -> None:
    wanted = Wanted(to, TEXT, TEXT[100:500], group=16, samples=4, length=64)
    report = quantise_model(folder, tmp_path / "out", wanted, said)
    assert len(report.layers) == 14 and {one[1] for one in report.layers} == {form}
    most = 0.6 if to == "2:4" else 0.2
    assert all(0 < error < most for _, _, error in report.layers)
    assert report.bytes_after < report.bytes_before
    assert (
        len(LLM(tmp_path / "out", context=128, requests=1).generate("the", max_tokens=2).tokens)
        == 2
    )
    assert report.perplexity_before is not None and report.perplexity_after is not None
    assert abs(np.log(report.perplexity_after / report.perplexity_before)) < (
        2 if most > 0.5 else 0.35
    )
    found = read_folder(tmp_path / "out")
    assert set(found.tensors) == set(read_folder(folder).tensors)
    assert found.tensors["model.layers.1.mlp.down_proj.weight"].format.name == form
    assert found.tokenizer is not None and json.loads((tmp_path / "out/config.json").read_text())
    assert read_folder(tmp_path / "out").config["quantization_config"]["ignore"] == ["lm_head"]


def test_bits_are_chosen_within_a_budget(folder: Path, tmp_path: Path) -> None:
    wanted = Wanted("gptq-int4", TEXT, TEXT[100:500], 16, 4, 64, target_bits=5.7)
    report = quantise_model(folder, tmp_path / "out", wanted, said)
    assert report.bits is not None and 5.2 < report.bits <= 5.7
    forms = {name: form for name, form, _ in report.layers}
    assert len(set(forms.values())) > 1
    found = read_folder(tmp_path / "out").tensors
    path = "model.layers.1.mlp.down_proj.weight"
    assert found[path].format.name == forms["blocks.1.feed.down"]
    assert report.perplexity_before is not None and report.perplexity_after is not None
    assert abs(np.log(report.perplexity_after / report.perplexity_before)) < 0.35


def gguf_file(path: Path, monkeypatch: Any) -> Path:
    """A tiny model whose rows are whole blocks of 32."""
    shapes = {n: tuple(64 if s == 48 else s for s in z) for n, z in tiny_model.SHAPES.items()}
    monkeypatch.setattr(tiny_model, "SHAPES", shapes)
    monkeypatch.setattr(tiny_model, "HIDDEN", 64)
    return tiny_model.write_file(path / "tiny.gguf")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("to", "form"),
    [("q8_0", "Q8_0"), ("q4_k", "Q5_0"), ("gptq-int4", "Q4_1"), ("awq-int4", "Q4_1")],
)
def test_a_file_becomes_a_file(to: str, form: str, tmp_path: Path, monkeypatch: Any) -> None:
    source, out = gguf_file(tmp_path, monkeypatch), tmp_path / "out.gguf"
    wanted = Wanted(to, TEXT, TEXT[100:500], samples=4, length=64)
    report = quantise_model(source, out, wanted, said)
    found = read_gguf(out)
    assert found.tensors["blk.1.attn_q.weight"].format.name == form
    assert found.metadata.keys() == read_gguf(source).metadata.keys()
    assert report.perplexity_before is not None and report.perplexity_after is not None
    assert abs(np.log(report.perplexity_after / report.perplexity_before)) < 0.35
    assert report.bytes_after < 0.6 * report.bytes_before


def test_the_command(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    out = str(tmp_path / "made")
    words = ["quantize", str(folder), "--to", "fp8", "--out", out]
    result = CliRunner().invoke(app, [*words, "--eval", str(text), "--length", "64"])
    assert result.exit_code == 0, result.output
    assert "perplexity" in result.output and "blocks.0.feed" in result.output
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 1  # there is something already


@pytest.mark.parametrize(
    ("wanted", "match"),
    [
        (dict(to="int9"), "no such numbers"),
        (dict(to="q4_k"), "GGUF files"),
        (dict(to="gptq-int4", group=16), "looks at text"),
        (dict(to="int4", group=100), "multiple of the group"),
        (dict(to="fp8", judged="a", length=64), "too short"),
        (
            dict(to="gptq-int4", group=16, text=TEXT, length=64, target_bits=1.5),
            r"at least 3\.5 bits of a weight(.|\n)*got: 1\.5",  # 2 bits, 24 for every 16 columns
        ),
        (dict(to="fp8", text=TEXT, length=64, target_bits=4.5), "bits are not chosen"),
    ],
)
def test_what_is_refused(wanted: Any, match: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=match):
        quantise_model(folder, tmp_path / "out", Wanted(**wanted), said)


def test_files_have_blocks_of_their_own(tmp_path: Path, monkeypatch: Any) -> None:
    """Another group would not be what is written, so it is not taken."""
    source = gguf_file(tmp_path, monkeypatch)
    with pytest.raises(UserError, match="no --group, or 32"):
        quantise_model(source, tmp_path / "out.gguf", Wanted("int4", group=64), said)


@pytest.mark.parametrize("bits", [float("nan"), float("inf"), -1.0])
def test_bits_are_a_finite_number(bits: float) -> None:
    with pytest.raises(UserError, match="a finite number of bits"):
        Wanted("gptq-int4", target_bits=bits)

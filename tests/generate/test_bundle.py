"""Bundles of language models: what they hold, and that nothing else is compiled when they run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_model
from toy_device import ToyDevice

from tilegrad.compiler import compile as compiling
from tilegrad.compiler.loader import leave_bundle, opened_bundles
from tilegrad.core.errors import UserError
from tilegrad.core.target import A100, H200, Target
from tilegrad.generate.bundle import Bundled, save_llm
from tilegrad.generate.llm import LLM
from tilegrad.runtime.bundle import Bundle
from tilegrad.runtime.device import KINDS
from tilegrad.runtime.limits import Limits, limits_of
from tilegrad.targets.ptx.assemble import find_ptxas


@pytest.fixture(autouse=True)
def no_bundles() -> Any:
    yield
    for opened in opened_bundles():
        leave_bundle(opened.bundle)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of one layer: steps of more have the same programs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_model, "LAYERS", 1)
        return tiny_model.write_file(tmp_path_factory.mktemp("model") / "tiny.gguf")


def nothing_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was compiled")

    monkeypatch.setattr(compiling, "executable_for", refuse)


REQUESTS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 0.0, "logprobs": 1},
    {"temperature": 0.7, "seed": 1, "repetition_penalty": 1.2, "logit_bias": {5: 1.0}},
]


@pytest.mark.parametrize("requests", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_all_that_can_be_asked_for(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requests: int
) -> None:
    folder = tmp_path / "b"
    prompts = [[1, 2, 3], list(range(40)), [7]][:requests]
    plain = LLM(tiny, requests=requests, context=128)
    expected = [[plain.generate(prompts, max_tokens=5, **how)] for how in REQUESTS]
    scores = [plain.score(list(range(n))) for n in (2, 50)]
    save_llm(folder, tiny, requests=requests, context=128)
    nothing_compiles(monkeypatch)
    llm = LLM(folder)
    for how, (answers,) in zip(REQUESTS, expected):
        for one in prompts:
            llm.generate(one, max_tokens=2, **how)
        found = llm.generate(prompts, max_tokens=5, **how)
        assert [a.tokens for a in found] == [a.tokens for a in answers], how
    for wanted, n in zip(scores, (2, 50)):
        assert np.array_equal(llm.score(list(range(n))), wanted)


def test_guesses_are_verified(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By steps of the bundle: with the answers of the model itself, and without guesses too."""
    folder, prompt = tmp_path / "b", [5, 6, 7, 8] * 6
    plain = LLM(tiny, requests=1, context=96)
    expected = [plain.generate(prompt, max_tokens=12, **how).tokens for how in REQUESTS[:2]]
    save_llm(folder, tiny, requests=1, context=96, guesses=2)
    nothing_compiles(monkeypatch)
    for speculate in ("ngram", None):
        llm = LLM(folder, speculate=speculate)
        found = [llm.generate(prompt, max_tokens=12, **how).tokens for how in REQUESTS[:2]]
        assert found[0] == expected[0]  # what is drawn beside guesses has draws of its own
        if speculate is None:
            assert found == expected
        else:
            speculation = llm.engine.speculation
            assert speculation is not None and speculation.most == 2 and speculation.guessed
    with pytest.raises(UserError, match="no steps of what guesses"):
        LLM(folder, speculate=tiny)
    for wrong in (5, -1):
        with pytest.raises(UserError, match="another number of guesses"):
            LLM(folder, speculate="ngram", guesses=wrong)


def test_what_a_bundle_was_not_made_for() -> None:
    made = Bundled("b", Path("m"), "cpu", "float32", 128, 4, 32, Limits(16, 64))
    made.refuse("cpu", None, None, 4)
    with pytest.raises(UserError, match="no steps that verify guesses"):
        made.refuse("cpu", None, None, 4, speculate="ngram")
    with pytest.raises(UserError, match="made without adapters"):
        made.refuse("cpu", None, None, 4, adapters={"a": "folder"})
    with pytest.raises(UserError, match="weights of its own"):
        made.refuse("cpu", None, None, 4, random_weights=True)
    with pytest.raises(UserError, match="another device"):
        made.refuse("cuda:0", None, None, 4)
    with pytest.raises(UserError, match="another number of guesses"):
        made.refuse("cpu", None, None, 4, guesses=2)


# ---- for GPUs that are not here -----------------------------------------------------------------


class StandIn(ToyDevice):
    """A GPU as far as memory goes: what is launched is noted, and computes nothing."""

    def __init__(self, target: Target) -> None:
        super().__init__(0)
        self.name, self.target = "cuda:0", target
        self.code: list[bytes] = []

    def allocate(self, bytes: int, label: str = "") -> Any:
        buffer = super().allocate(bytes, label)
        self.memory[buffer.pointer][:] = 0
        return buffer

    def keep(self, key: str, code: bytes) -> Any:
        self.code.append(code)
        return code

    def prepare(self, code: bytes, name: str, entry: str, symbols: Any) -> Any:
        return Noted(self, name)


class Noted:
    """A launch."""

    empty = False

    def __init__(self, device: StandIn, name: str) -> None:
        self.device, self.name = device, name

    def launch(self, pointers: Any) -> None:
        self.device.launches.append(self.name)


class Kind:
    """One GPU."""

    def __init__(self, target: Target) -> None:
        self.device = StandIn(target)

    def count(self) -> int:
        return 1

    def open(self, number: int) -> StandIn:
        return self.device


@pytest.mark.skipif(find_ptxas() is None, reason="no ptxas here")
def test_for_a_gpu(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps that an LLM on a GPU asks for are those that were compiled for it here."""
    folder = tmp_path / "b"
    save_llm(folder, tiny, requests=1, context=128, target="h200")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["device"] == "cuda" and manifest["llm"]["page"] == limits_of(H200).page
    bundle = Bundle(folder)
    for text in bundle.recipes.values():
        for _, key in json.loads(text)["programs"]:
            assert bundle.code(key)[:4] == b"\x7fELF"
    nothing_compiles(monkeypatch)
    kind = Kind(H200)
    with KINDS.replaced("cuda", kind):
        llm = LLM(folder)
        assert llm.device == "cuda:0"
        for how in REQUESTS:
            assert len(llm.generate([1, 2, 3], max_tokens=3, ignore_end=True, **how).tokens) == 3
    assert kind.device.launches and kind.device.code
    for opened in opened_bundles():
        leave_bundle(opened.bundle)
    other = Kind(A100)
    with KINDS.replaced("cuda", other), pytest.raises(UserError, match="another machine"):
        LLM(folder).generate([1, 2, 3], max_tokens=1)

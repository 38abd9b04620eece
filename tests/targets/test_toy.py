"""A target from outside the package runs a smoke subset of the op tests and a tiny decoder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "graph"))
from cases import CASES, Case
from toy_device import TARGET, ToyDevice, install

import tilegrad as tg
from tilegrad.compiler.compile import executable_for
from tilegrad.core.config import override
from tilegrad.graph.interpret import interpret
from tilegrad.models.decoder.config import DecoderConfig
from tilegrad.models.decoder.model import Decoder
from tilegrad.runtime.device import device
from tilegrad.tensor import placement

SMOKE = [one for number, one in enumerate(CASES) if number % 2 == 0]
TINY = {
    "width": 16,
    "layers": 2,
    "heads": 2,
    "key_heads": 1,
    "hidden": 24,
    "vocabulary": 20,
    "head_width": 8,
    "context": 16,
}


@pytest.fixture(scope="module")
def toy() -> Iterator[ToyDevice]:
    kinds, languages = install()
    with kinds, languages, override(cache_folder=""):
        yield device("toy:0")
    for node, buffer in list(placement.values.items()):
        if buffer.device.startswith("toy"):
            del placement.values[node]
    placement.state.active = False


@pytest.mark.parametrize("case", SMOKE, ids=repr)
def test_ops(case: Case, toy: ToyDevice) -> None:
    nodes = case.nodes()
    outputs = case.outputs(nodes)
    expected = interpret(outputs, dict(zip(nodes, case.inputs)))
    made = executable_for(tuple(nodes), tuple(outputs), (), "toy:0")
    found = made.run([toy.upload(x, "given") for x in case.inputs])
    for node, buffer, want in zip(outputs, found, expected):
        got = toy.download(buffer, want.shape, node.dtype)
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


def test_a_tiny_decoder(toy: ToyDevice) -> None:
    tg.manual_seed(0)
    model = Decoder(DecoderConfig("llama", **TINY)).requires_grad_(False)
    tokens = np.arange(10).reshape(2, 5) % 20
    expected = model(tokens).numpy()
    before = len(toy.launches)
    there = model.to("toy")
    found = there(tg.tensor(tokens, device="toy"))
    assert found.device == "toy:0"
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-5)
    assert len(toy.launches) > before


def test_explain_shows_its_text(toy: ToyDevice) -> None:
    found = tg.explain(lambda x: tg.softmax(x, -1) @ x.T, tg.zeros((5, 7)), target=TARGET)
    assert "products on vectors, the only offer" in found.section("families")
    assert "tilegrad-body" in found.section("toy") and "== toy ==" in str(found)
    assert found.section("llvm") == found.section("ptx") == ""


def test_its_own_passes_are_on_the_page(toy: ToyDevice) -> None:
    def f(x: tg.Tensor) -> tg.Tensor:
        return x.cumsum(0) * 2

    found = tg.explain(f, tg.zeros(9), target=TARGET)
    assert "stamp: +2 Bodies" in found.section("passes")
    assert [p.body.notes["stamped"] for p in found.programs] == ["cumulative", "loops"]
    found = tg.explain(f, tg.zeros(9), target=TARGET, without="stamp")
    assert "left out: stamp" in found.section("passes")
    assert all("stamped" not in p.body.notes for p in found.programs)

"""Decoders in int8 on a chip: its words give the bits of its int8 kernels; SmolLM2's first layers
where it was fetched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilegrad as tg
from tilegrad import nn
from tilegrad.exchange.fetch import kept_models
from tilegrad.generate.load import load_model
from tilegrad.models.decoder.config import DecoderConfig
from tilegrad.models.decoder.model import Decoder
from tilegrad.quant import quantise_rows
from tilegrad.runtime.device import device

KEPT = {model.name: model.path for model in kept_models()}
TINY: dict[str, Any] = {
    "width": 16,
    "layers": 1,
    "heads": 2,
    "key_heads": 1,
    "hidden": 24,
    "vocabulary": 20,
    "head_width": 8,
    "context": 16,
}


def hidden(model: Decoder, tokens: tg.Tensor) -> tg.Tensor:
    positions = tg.arange(int(tokens.shape[1])).to(tokens.device)
    return model.hidden(tokens, positions, model._causal)


def check_levels(model: Decoder, tokens: np.ndarray) -> None:
    """The chip's words give the bits of its host's int8 kernels; a CPU alone, which fuses floats
    otherwise, comes near."""
    quantise_rows(model.blocks)
    near = tg.jit(hidden)(model, tg.tensor(tokens)).numpy()
    want = None
    for level in ("compiled", "words"):
        name = tg.device("npu", chip="16x16", level=level)
        machine: Any = device(name)
        machine.clear()
        found = tg.jit(hidden)(model.to(name), tg.tensor(tokens, device=name)).numpy()
        np.testing.assert_allclose(found, near, atol=0.02 * np.abs(near).max())
        want = found if want is None else want
        np.testing.assert_array_equal(found, want)
        assert machine.account().launches == 7 * len(model.blocks)


def test_a_tiny_decoder() -> None:
    tg.manual_seed(0)
    model = Decoder(DecoderConfig("llama", **TINY)).requires_grad_(False)
    check_levels(model, np.arange(5)[None])


@pytest.mark.slow
@pytest.mark.skipif("smollm2" not in KEPT, reason="smollm2 was not fetched")
def test_first_layers_of_smollm2() -> None:
    loaded = load_model(KEPT["smollm2"], "cpu", tg.float32, lambda *_: None)
    loaded.model.blocks = nn.ModuleList(list(loaded.model.blocks)[:2])
    check_levels(loaded.model, np.array(loaded.tokenizer.encode("The sky is blue."))[None])


def test_numbers_of_a_size_that_changes() -> None:
    """A Symbol is bound when a Kernel of the array runs: one Program for every size."""
    from tilegrad.ir.symbol import symbol

    def f(x: tg.Tensor, w: tg.Tensor, b: tg.Tensor) -> tg.Tensor:
        return tg.relu(x.to(tg.int32) @ w.to(tg.int32) + b)

    rng = np.random.default_rng(0)
    w, b = rng.integers(-128, 128, (9, 7)).astype(np.int8), np.arange(7, dtype=np.int32)
    for level in ("compiled", "registers"):
        name = tg.device("npu", chip="edge", level=level)
        machine: Any = device(name)
        machine.clear()
        jitted = tg.jit(f, dynamic={"x": {0: symbol("rows", 1, 64)}})
        given = [tg.tensor(a, device=name) for a in (w, b)]
        for rows in (1, 5, 20):
            x = rng.integers(-128, 128, (rows, 9)).astype(np.int8)
            found = jitted(tg.tensor(x, device=name), *given).numpy()
            np.testing.assert_array_equal(found, np.maximum(x.astype(int) @ w + b, 0))
        account = machine.account()
        assert account.launches == 3 and account.macs == 26 * 9 * 7
        assert account.simulated in (0, account.counters.cycles)

"""The engine on a GPU that is interpreted: state, pages and ids as on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from lora_folder import pairs, write_adapter
from test_cuda import cuda  # noqa: F401  (a fixture)
from test_speculative import Oracle

import tilegrad as tg
from tilegrad.core.target import H200
from tilegrad.generate.adapters import Adapters
from tilegrad.generate.engine import Engine
from tilegrad.generate.request import Request
from tilegrad.models.decoder.config import DecoderConfig
from tilegrad.models.decoder.model import Decoder
from tilegrad.models.decoder.rotary import Rotary
from tilegrad.targets.ptx import driver

CONFIG = DecoderConfig(
    "llama",
    vocabulary=64,
    width=32,
    layers=1,
    heads=2,
    key_heads=1,
    head_width=64,
    hidden=32,
    context=48,
    rotary=Rotary(10000.0, 64),
)
PROMPTS = {"a": (5, 9, 33, 2, 17, 40, 21), "b": (7, 11), "c": (50, 3, 3)}


@pytest.fixture
def small_gpu(cuda, monkeypatch, request) -> Iterator[Any]:  # noqa: F811
    """The fake device with few cores: a program each is interpreted."""
    if "Simulated" in request.node.name:
        pytest.skip("what a step launches is simulated elsewhere")
    monkeypatch.setattr(driver.Device, "target", replace(H200, cores=4))
    yield cuda


def made(device: str) -> Decoder:
    """A random model, the same on every device; its weights are wide, so tokens are apart."""
    model = Decoder(CONFIG, "bfloat16").requires_grad_(False).eval()
    random = np.random.default_rng(4)
    for name, tensor in model.named_parameters():
        if "norm" not in name:
            tensor.assign(tg.tensor(random.standard_normal(tensor.shape).astype(np.float32) * 0.3))
    return model.to(device=device)


def produced(engine: Engine, adapters: Sequence[str] = ("", "", "")) -> dict[str, list[int]]:
    """Three requests on two slots, prompts in chunks of four tokens."""
    for (name, tokens), adapter in zip(PROMPTS.items(), adapters):
        engine.add(Request(name, tokens, max_tokens=4, adapter=adapter))
    found: dict[str, list[int]] = {name: [] for name in PROMPTS}
    while engine.busy:
        for one in engine.step():
            found[one.id].append(one.token)  # type: ignore[index]
    return found


def test_an_engine_on_a_gpu(small_gpu) -> None:
    sizes = {"requests": 2, "context": 48, "page": 16, "chunk": 4}
    wanted = produced(Engine(made("cpu"), device="cpu", **sizes))
    engine = Engine(made("cuda"), device="cuda", **sizes)
    assert engine.overlaps and engine.cache.device == "cuda:0"
    assert produced(engine) == wanted
    uploads = small_gpu.count("cuMemcpyHtoDAsync")
    engine.add(Request("long", PROMPTS["b"], max_tokens=12))
    engine.step(), engine.step()
    settled = small_gpu.count("cuMemcpyHtoDAsync")
    assert settled > uploads
    for _ in range(6):
        engine.step()
    assert small_gpu.count("cuMemcpyHtoDAsync") == settled  # a decode step uploads nothing
    engine.cancel("long")
    assert not engine.busy and engine.pool.available == engine.pool.pages


def test_adapters_on_a_gpu(small_gpu, tmp_path) -> None:
    """Mixed with none; prompts take one product with all adapters, single tokens read their own."""
    shapes = {"self_attn.q_proj": (128, 32), "mlp.down_proj": (32, 32)}
    folders = {}
    for number, name in enumerate(("first", "second")):
        tensors = pairs(number, 8, shapes, shapes, CONFIG.layers)
        folders[name] = write_adapter(tmp_path / name, 0, 8, tensors, targets=tuple(shapes))
    sizes = {"requests": 2, "context": 48, "page": 16, "chunk": 4}
    found = {}
    for device in ("cpu", "cuda"):
        model = made(device)
        adapters = Adapters(model, folders, 3, device)
        assert adapters.chosen.device.startswith(device)
        engine = Engine(model, device=device, adapters=adapters, **sizes)
        found[device] = produced(engine, ("first", "second", ""))
    assert found["cuda"] == found["cpu"]
    plain = produced(engine)
    assert plain["c"] == found["cpu"]["c"] and plain["a"] != found["cpu"]["a"]


def test_guesses_on_a_gpu(small_gpu) -> None:
    """Rows of one slot in a step see each other's keys: answers are those without guesses."""
    sizes = {"requests": 2, "context": 48, "page": 16, "chunk": 4}
    wanted = produced(Engine(made("cpu"), device="cpu", **sizes))
    proposer = Oracle(dict(wanted), 2)
    engine = Engine(made("cuda"), device="cuda", proposer=proposer, guesses=2, **sizes)
    assert not engine.overlaps
    assert produced(engine) == wanted
    speculation = engine.speculation
    assert speculation is not None and 0 < speculation.true < speculation.guessed

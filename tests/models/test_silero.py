"""Silero VAD, a small real network in int8 on a chip; skipped where its wheel is absent.

`pip download --no-deps silero-vad -d FOLDER`, with FOLDER the `models` of the cache, brings it.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import tilegrad as tg
from tilegrad import quant
from tilegrad.core.config import config
from tilegrad.core.errors import UserError
from tilegrad.models.silero import FILE, SileroVad, load_silero
from tilegrad.runtime.device import device


def weights() -> Path | None:
    """The wheel in the cache, or the file of the package that is installed."""
    found = sorted((Path(config().cache_folder) / "models").glob("silero_vad-*.whl"))
    spec = importlib.util.find_spec("silero_vad")
    for place in (spec.submodule_search_locations or []) if spec else []:
        found += [Path(place) / "data" / FILE]
    return next((f for f in found if f.is_file()), None)


has_weights = pytest.mark.skipif(weights() is None, reason="the wheel of silero-vad is not here")


def sound(chunks: int) -> list[np.ndarray]:
    """A hum that swells, with a hiss: chunks of 576 samples, 64 of them of the one before."""
    t = np.arange(64 + 512 * chunks) / 16000
    hum = 0.3 * np.sin(2 * np.pi * 150 * t) * (1 + np.sin(2 * np.pi * 4 * t))
    hiss = 0.02 * np.random.default_rng(0).standard_normal(t.size)
    whole = (hum + hiss).astype(np.float32)
    return [whole[None, 512 * i : 512 * i + 576] for i in range(chunks)]


def answers(model: SileroVad, chunks: list[np.ndarray], where: str) -> tuple[list, np.ndarray]:
    jitted = tg.jit(model.to(where))
    state, found = tg.zeros((2, 1, 128)).to(where), []
    for chunk in chunks:
        chance, state = jitted(tg.tensor(chunk, device=where), state)
        found.append(chance.numpy())
    return found, state.numpy()


def quantised(model: SileroVad, chunks: list[np.ndarray]) -> SileroVad:
    def run(given: list[np.ndarray]) -> None:
        state = None
        for chunk in given:
            _, state = model(tg.tensor(chunk), state)

    quant.quantise(model, quant.calibrate(model, [chunks], run))
    return model


def test_shapes_without_weights() -> None:
    chance, state = SileroVad()(tg.zeros((2, 576)))
    assert chance.shape == (2, 1) and state.shape == (2, 2, 128)


def test_a_file_without_them(tmp_path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(tmp_path / "a.whl", "w") as made:
        made.writestr("silero_vad/__init__.py", "")
    with pytest.raises(UserError, match="no weights"):
        load_silero(tmp_path / "a.whl")


@has_weights
def test_int8_on_the_chip_is_the_int8_reference() -> None:
    """The chip's words give the bits of the CPU's int8; both are near the floats."""
    chunks = sound(3)
    where = weights()
    assert where is not None
    floats, _ = answers(load_silero(where), chunks, "cpu")
    model = quantised(load_silero(where), chunks)
    want, state = answers(model, chunks, "cpu")
    name = tg.device("npu", chip="16x16", level="words")
    device(name).clear()  # type: ignore[attr-defined]
    found, after = answers(model, chunks, name)
    np.testing.assert_array_equal(found, want)
    np.testing.assert_array_equal(after, state)
    np.testing.assert_allclose(want, floats, atol=0.05)
    assert device(name).account().launches == 8 * len(chunks)  # type: ignore[attr-defined]


@has_weights
@pytest.mark.slow
def test_through_every_register() -> None:
    """One chunk at the register level: the same bits, and the cycles of closed forms."""
    chunks = sound(1)
    where = weights()
    assert where is not None
    model = quantised(load_silero(where), chunks)
    want, _ = answers(model, chunks, "cpu")
    name = tg.device("npu", chip="16x16", level="registers")
    device(name).clear()  # type: ignore[attr-defined]
    found, _ = answers(model, chunks, name)
    np.testing.assert_array_equal(found, want)
    account = device(name).account()  # type: ignore[attr-defined]
    assert account.simulated == account.counters.cycles

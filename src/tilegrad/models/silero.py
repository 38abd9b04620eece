"""Silero VAD at 16 kHz: is somebody speaking? A small recurrent network over chunks of sound.

A chunk of 512 samples with the 64 before it becomes 4 columns of a spectrum (a convolution with
fixed waves), four convolutions make 128 features of it, a recurrent cell remembers, and one number
from 0 to 1 comes out. Weights are in the package `silero-vad`; its wheel is read without being
installed. Invariant: a chunk's answer depends on it and on the state alone.
"""

from __future__ import annotations

import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from .. import nn
from ..core.errors import UserError
from ..exchange.safetensors import read_safetensors
from ..tensor.creation import zeros
from ..tensor.maths import sigmoid, tanh
from ..tensor.movement import cat
from ..tensor.tensor import Tensor, lift

SAMPLES, CONTEXT, WIDTH = 512, 64, 128
WAVES = 129  # frequencies of a window of 256 samples
FILE = "silero_vad_16k.safetensors"


class SileroVad(nn.Module):
    """(B, 576) samples and a state (2, B, 128) to a chance (B, 1) and the next state."""

    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Conv1d(1, 2 * WAVES, 256, 128, bias=False)
        self.conv1 = nn.Conv1d(WAVES, 128, 3, 1, 1)
        self.conv2 = nn.Conv1d(128, 64, 3, 2, 1)
        self.conv3 = nn.Conv1d(64, 64, 3, 2, 1)
        self.conv4 = nn.Conv1d(64, WIDTH, 3, 1, 1)
        self.of_input = nn.Linear(WIDTH, 4 * WIDTH)
        self.of_state = nn.Linear(WIDTH, 4 * WIDTH)
        self.final = nn.Linear(WIDTH, 1)

    def forward(self, x: Any, state: Any = None) -> tuple[Tensor, Tensor]:
        """The chance that somebody speaks in a chunk, and the state for the next one."""
        given = lift(x)
        before = zeros((2, given.shape[0], WIDTH)) if state is None else lift(state)
        mirror = given[:, -CONTEXT - 1 : -1].flip(1)
        waves = self.spectrum(cat([given, mirror], 1)[:, None])  # (B, 258, 4)
        real, imaginary = waves[:, :WAVES], waves[:, WAVES:]
        y = (real * real + imaginary * imaginary).sqrt()
        for layer in (self.conv1, self.conv2, self.conv3, self.conv4):
            y = layer(y).relu()  # in the end (B, 128, 1)
        gates = self.of_input(y[:, :, 0]) + self.of_state(before[0])  # (B, 512)
        enter, forget, fresh, leave = gates.split(WIDTH, 1)
        cell = sigmoid(forget) * before[1] + sigmoid(enter) * tanh(fresh)
        hidden = sigmoid(leave) * tanh(cell)
        chance = sigmoid(self.final(hidden.relu()))
        return chance, cat([hidden[None], cell[None]], 0)


NAMES = {
    "spectrum.weight": "stft_conv.weight",
    **{f"conv{i}.{part}": f"conv{i}.{part}" for i in range(1, 5) for part in ("weight", "bias")},
    "of_input.weight": "lstm_cell.weight_ih",
    "of_input.bias": "lstm_cell.bias_ih",
    "of_state.weight": "lstm_cell.weight_hh",
    "of_state.bias": "lstm_cell.bias_hh",
    "final.weight": "final_conv.weight",
    "final.bias": "final_conv.bias",
}


def load_silero(path: str | os.PathLike[str]) -> SileroVad:
    """The model with the weights of a wheel of `silero-vad`, or of its safetensors file."""
    where = Path(path)
    if where.suffix != ".whl":
        return _loaded(where)
    with zipfile.ZipFile(where) as wheel, tempfile.TemporaryDirectory() as folder:
        inside = [n for n in wheel.namelist() if n.endswith("/" + FILE)]
        if len(inside) != 1:
            raise UserError(f"{where}: no weights", op="silero", expected=FILE)
        file = Path(folder) / FILE
        file.write_bytes(wheel.read(inside[0]))
        return _loaded(file)


def _loaded(file: Path) -> SileroVad:
    stored = read_safetensors(file)
    missing = sorted(set(NAMES.values()) - set(stored))
    if missing:
        raise UserError(f"{file}: tensors are missing", op="silero", expected=", ".join(missing))
    model = SileroVad()
    arrays = {own: stored[name].values() for own, name in NAMES.items()}
    arrays["final.weight"] = arrays["final.weight"].reshape(1, WIDTH)
    model.load_state_dict(arrays)
    return model.requires_grad_(False)


__all__ = ["SileroVad", "load_silero"]

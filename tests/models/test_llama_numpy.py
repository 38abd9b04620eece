"""The NumPy decoder that benches judge by, against transformers in float64."""

import copy
import sys
from pathlib import Path

import numpy as np
import pytest
from decoder_families import peer, tokens
from test_decoder_names import gguf_metadata, gguf_tensors
from torch_peer import torch

from tilegrad.exchange.gguf_write import write_gguf

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from llama_numpy import Llama, log_softmax


@pytest.mark.parametrize("name", ["llama", "smollm2"])
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    write_gguf(tmp_path / "m.gguf", gguf_metadata(name), gguf_tensors(name))
    given = tokens(40)
    exact = copy.deepcopy(peer(name)).double()(torch.tensor(given[None])).logits[0].numpy()
    wide, narrow = Llama(tmp_path / "m.gguf"), Llama(tmp_path / "m.gguf", np.float32)
    found = wide.logits(given)
    assert found.dtype == np.float64 and np.abs(exact).max() > 1.0
    np.testing.assert_allclose(found, exact, atol=1e-5)  # its norms and angles are float32
    assert 0 < np.abs(narrow.logits(given) - found).max() < 1e-4
    parts = np.concatenate(list(wide.logits_in_parts(given, 16)))
    np.testing.assert_allclose(parts, found, atol=1e-12)
    chances = torch.log_softmax(torch.tensor(found), -1).numpy()
    np.testing.assert_allclose(log_softmax(found), chances, atol=1e-12)


def test_what_it_does_not_know_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", gguf_metadata("llama3"), gguf_tensors("llama3"))
    with pytest.raises(SystemExit):
        Llama(tmp_path / "m.gguf")

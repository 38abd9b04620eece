"""Tensors on disk: what is saved comes back, and a damaged file is refused."""

from __future__ import annotations

import io
import json
import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_peer import torch

import tilegrad as tg
from tilegrad import nn


def with_header(header: dict[str, Any]) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


def with_nesting(text: str) -> bytes:
    return with_header({"__metadata__": {"tilegrad.nesting": text}})


def test_files(tmp_path):
    path = tmp_path / "x.safetensors"
    kept = {
        "a": tg.arange(6).reshape(2, 3),
        "b": tg.ones(3, dtype=tg.bfloat16) * 2,
        "scalar": tg.tensor(2.5),
        "empty": tg.zeros(0, 2),
        "mask": tg.tensor([True, False]),
    }
    tg.save(kept, path, {"made": "here"})
    found = tg.load(path)
    assert list(found) == list(kept) and tg.load_metadata(path) == {"made": "here"}
    for name, tensor in kept.items():
        assert found[name].dtype is tensor.dtype and found[name].shape == tensor.shape
        assert found[name].float().tolist() == tensor.float().tolist()
    official = pytest.importorskip("safetensors.numpy").load_file(path)
    assert official["a"].tolist() == kept["a"].tolist()


def test_damaged_files(tmp_path):
    path = tmp_path / "bad.safetensors"
    with pytest.raises(tg.UserError, match="cannot read the file"):
        tg.load(path)
    for content, why in (
        (b"abc", "shorter"),
        (struct.pack("<Q", 99) + b"{}", "cut off"),
        (struct.pack("<Q", 2) + b"[]", "not a table"),
        (struct.pack("<Q", 3) + b"{]]", "JSON"),
        (
            struct.pack("<Q", 61)
            + b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}      ',
            "outside",
        ),
        (struct.pack("<Q", 15) + b'{"a":{"x": 1}} ', "not understood"),
        (struct.pack("<Q", 100_000) + b"[" * 100_000, "JSON"),
        (b"", "shorter"),
        (
            with_header(
                {"a": {"dtype": "F32", "shape": [1 << 32, 1 << 32], "data_offsets": [0, 0]}}
            ),
            "outside",
        ),
        (with_header({"__metadata__": [1]}), "metadata"),
        (with_nesting('{"tensor":"b"}'), "nesting"),
        (with_nesting('{"class":"os"}'), "nesting"),
        (with_nesting('{"dict":[[[], 1]]}'), "nesting"),
        (with_nesting("[" * 100_000), "nesting"),
        (with_nesting('{"dict":[1]}'), "nesting"),
        (with_nesting("{}"), "nesting"),
    ):
        path.write_bytes(content)
        with pytest.raises(tg.UserError, match=why):
            tg.load(path)
        with pytest.raises(tg.UserError, match="not a safetensors file"):
            tg.load(io.BytesIO(content))


# ---- nests -----------------------------------------------------------------------------------

KEYS = st.text(max_size=3) | st.sampled_from(["a.b", "a", "b", "__metadata__", 0, -3, None, True])
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["F32", "I64", "BF16"]).map(lambda name: ("tensor", name))
)
NESTS = st.recursive(
    LEAVES,
    lambda inner: (
        st.dictionaries(KEYS, inner, max_size=3)
        | st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=8,
)
TENSORS = {
    "F32": tg.tensor([[1.5, -2.0], [0.0, math.inf]]),
    "I64": tg.tensor(7),
    "BF16": tg.zeros(0, 3, dtype=tg.bfloat16),
}


def filled(nest: Any) -> Any:
    """The nest with Tensors in their places."""
    if isinstance(nest, tuple) and len(nest) == 2 and nest[0] == "tensor" and nest[1] in TENSORS:
        return TENSORS[nest[1]]
    if isinstance(nest, dict):
        return {k: filled(v) for k, v in nest.items()}
    return type(nest)(filled(v) for v in nest) if isinstance(nest, (list, tuple)) else nest


def shown(value: Any) -> str:
    """All of a nest as text: classes, order of keys, dtypes, values."""
    if isinstance(value, tg.Tensor):
        return f"Tensor({value.dtype}, {tuple(value.shape)}, {value.tolist()})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {shown(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(map(shown, value))})"
    return repr(value)


@given(NESTS)
@settings(max_examples=60, deadline=None)
def test_nests_come_back(nest):
    value, file = filled(nest), io.BytesIO()
    tg.save(value, file)
    tg.save({"after": tg.ones(2)}, file)
    file.seek(0)
    assert shown(tg.load(file)) == shown(value)
    assert tg.load(file)["after"].tolist() == [1.0, 1.0] and not file.read()


def test_a_checkpoint(tmp_path):
    path = tmp_path / "checkpoint.safetensors"

    def make() -> tuple[Any, Any]:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        return model, tg.optim.Adam(model.parameters(), lr=0.1)

    def step(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(tg.ones(2, 3)).square().sum().backward()
        optimizer.step()

    model, optimizer = make()
    step(model, optimizer)
    tg.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "epoch": 3,
            "best": float("nan"),
            "rate": np.float32(0.5),
        },
        path,
        {"made": "here"},
    )
    found = tg.load(path)
    assert found["epoch"] == 3 and math.isnan(found["best"]) and found["rate"].item() == 0.5
    assert tg.load_metadata(path) == {"made": "here"}
    again, other = make()
    again.load_state_dict(found["model"])
    other.load_state_dict(found["optimizer"])
    step(model, optimizer)
    step(again, other)
    for a, b in zip(model.parameters(), again.parameters()):
        assert a.tolist() == b.tolist()
    official = pytest.importorskip("safetensors.numpy").load_file(path)  # others see named arrays
    assert official["model.0.weight"].tolist() == found["model"]["0.weight"].tolist()


def test_file_objects(tmp_path):
    path = tmp_path / "x.safetensors"
    with open(path, "wb") as file:
        tg.save({"x": torch.arange(3)}, file)
    assert tg.load(path)["x"].tolist() == [0, 1, 2]
    with open(path, "rb") as file:
        assert tg.load(file)["x"].tolist() == [0, 1, 2]
    with open(path) as text, pytest.raises(tg.DTypeError, match="binary mode"):
        tg.load(text)
    with pytest.raises(tg.DTypeError, match="binary mode"):
        tg.save({"x": tg.ones(2)}, io.StringIO())


@pytest.mark.parametrize(
    "value, why",
    [
        ({"a": [lambda step: 0.1]}, "'a.0' cannot be saved"),
        (nn.Linear(1, 1), "state_dict"),
        ({(1, 2): 3}, "a key cannot be saved"),
        ({"a": {1.5: 3}}, "a key cannot be saved"),
        ({"a": {1, 2}}, "got: set"),
        (tg.zeros(2, dtype=tg.int4), "cannot be saved"),
    ],
)
def test_what_cannot_be_saved_is_refused(value, why, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"kept")
    with pytest.raises(tg.DTypeError, match=why):
        tg.save(value, path)
    assert path.read_bytes() == b"kept" and len(list(tmp_path.iterdir())) == 1


def test_other_refusals(tmp_path):
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(tg.UserError, match="contains itself"):
        tg.save(loop, tmp_path / "x")
    for metadata in ({"epochs": 20}, {"tilegrad.nesting": "[]"}):
        with pytest.raises(tg.DTypeError, match="metadata is text"):
            tg.save({"x": tg.ones(1)}, tmp_path / "x", metadata)

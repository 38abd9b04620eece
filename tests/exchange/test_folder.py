"""Hugging Face folders: tables, single and sharded weights, and folders that lie."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tilegrad.core import format as f
from tilegrad.core.errors import UserError
from tilegrad.exchange.folder import INDEX, read_folder
from tilegrad.exchange.safetensors import read_safetensors

VALUES = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.linspace(-2, 2, 10).astype(ml_dtypes.bfloat16).reshape(2, 5),
    "c": np.arange(6, dtype=np.int32),
    "scalar": np.float16(1.5),
    "empty": np.zeros((0, 4)),
    "bytes": np.arange(5, dtype=np.uint8),
}
NAMES = {
    "float32": "F32",
    "bfloat16": "BF16",
    "int32": "I32",
    "float16": "F16",
    "float64": "F64",
    "uint8": "U8",
}


def write(path, values):
    """A safetensors file, bfloat16 too."""
    head, data = {}, b""
    for name, value in values.items():
        value = np.asarray(value)
        part = value.tobytes()
        head[name] = {
            "dtype": NAMES[str(value.dtype)],
            "shape": list(value.shape),
            "data_offsets": [len(data), len(data) + len(part)],
        }
        data += part
    text = json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 8}')
    return tmp_path


def equal(found, values):
    assert set(found) == set(values)
    for name, value in values.items():
        value = np.asarray(value)
        assert found[name].array().dtype == value.dtype
        np.testing.assert_array_equal(found[name].array(), value)


def test_single_file_is_mapped(folder):
    write(folder / "model.safetensors", VALUES)
    found = read_folder(folder)
    assert found.architecture == "llama" and found.config["hidden_size"] == 8
    assert (found.generation, found.tokenizer, found.chat_template) == ({}, None, None)
    equal(found.tensors, VALUES)
    assert found.tensors["b"].format is f.BF16
    np.testing.assert_array_equal(found.tensors["b"].values(), VALUES["b"].astype(np.float32))
    for tensor in found.tensors.values():
        if tensor.bytes:
            assert np.shares_memory(tensor.raw, tensor.file.data)


def test_the_librarys_own_files(folder):
    values = {
        "x": np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32),
        "y": np.arange(3, dtype=np.int64),
    }
    save_file(values, folder / "weights.safetensors", metadata={"format": "pt"})
    equal(read_folder(folder).tensors, values)


def shard(folder):
    write(folder / "model-00001-of-00002.safetensors", {"a": VALUES["a"], "extra": VALUES["c"]})
    write(folder / "model-00002-of-00002.safetensors", {"b": VALUES["b"]})
    return {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}


def index(folder, where):
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": where})
    (folder / INDEX).write_text(text)


def test_sharded(folder):
    index(folder, shard(folder))
    equal(read_folder(folder).tensors, {"a": VALUES["a"], "b": VALUES["b"]})


def test_tables_and_templates(folder):
    write(folder / "model.safetensors", VALUES)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    (folder / "tokenizer.json").write_text("{}")
    words = folder / "tokenizer_config.json"
    words.write_text('{"chat_template": "{{ one }}"}')
    found = read_folder(folder)
    assert found.generation == {"eos_token_id": [1, 2]}
    assert found.tokenizer == str(folder / "tokenizer.json")
    assert found.chat_template == "{{ one }}"
    several = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    words.write_text(json.dumps({"chat_template": several}))
    assert read_folder(folder).chat_template == "d"
    (folder / "chat_template.jinja").write_text("file")
    assert read_folder(folder).chat_template == "file"
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(UserError, match="not UTF-8"):
        read_folder(folder)
    (folder / "chat_template.jinja").unlink()
    words.write_text('{"chat_template": 5}')
    with pytest.raises(UserError, match="another type"):
        read_folder(folder)


# ---- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "x.ckpt"])
def test_pickles_are_refused(folder, name):
    (folder / name).write_bytes(b"\x80\x04.")
    with pytest.raises(UserError, match=r"pickles(.|\n)*hint: take the safetensors"):
        read_folder(folder)


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "/etc/x.safetensors",
        "sub/x.safetensors",
        "..\\x.safetensors",
        "..",
        "x.bin",
        "",
        5,
        None,
        ["x.safetensors"],
        ".hidden.safetensors",
        "a\0.safetensors",
        "model.safetensors\n",
    ],
)
def test_an_index_names_only_files_of_the_folder(folder, name):
    write(folder.parent / "secret.safetensors", VALUES)
    index(folder, {**shard(folder), "c": name})
    with pytest.raises(UserError, match="not in a file of this folder"):
        read_folder(folder)


def test_an_index_that_lies(folder):
    where = shard(folder)
    index(folder, {**where, "c": where["a"]})
    with pytest.raises(UserError, match="'c' is missing"):
        read_folder(folder)
    index(folder, {**where, "c": "model-00003.safetensors"})
    with pytest.raises(UserError, match="1 of 3 weight files are missing"):
        read_folder(folder)
    for text in (
        '{"weight_map": []}',
        "{}",
        "[]",
        "{",
        '{"weight_map": {"a": 1, "a": 2}}',
        "[" * 100_000,
        '{"weight_map": {}}',
    ):
        (folder / INDEX).write_text(text)
        with pytest.raises(UserError):
            read_folder(folder)


def test_folders_that_are_none(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        read_folder(tmp_path / "absent")
    with pytest.raises(UserError, match=r"config.json is missing(.|\n)*an empty folder"):
        read_folder(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="no weights found"):
        read_folder(tmp_path)
    write(tmp_path / "model.safetensors", VALUES)
    with pytest.raises(UserError, match="model_type"):
        print(read_folder(tmp_path).architecture)
    (tmp_path / "config.json").write_text('{"a": 1' + "1" * 10_000 + "}")
    with pytest.raises(UserError, match="not JSON"):
        read_folder(tmp_path)


def made(head, data=bytes(64)):
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype="F32", shape=(16,), offsets=(0, 64)):
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


LIES = {
    "nothing": b"",
    "short": b"1234",
    "length": struct.pack("<Q", 1 << 62) + bytes(20),
    "cut": made(entry())[:-1],
    "not JSON": made(b"{"),
    "list": made([]),
    "dtype": made(entry("F7")),
    "beyond": made(entry(shape=(32,), offsets=(0, 128))),
    "smaller": made(entry(shape=(8,))),
    "backwards": made(entry(offsets=(64, 0))),
    "negative": made(entry(shape=(-16,))),
    "overflow": made(entry(shape=(1 << 62, 1 << 62))),
    "fraction": made(entry(shape=(1.5,))),
    "empty and huge": made(entry(shape=(0, 1 << 62, 1 << 62), offsets=(0, 0)), b""),
    "text": made({"x": "y"}),
    "deep": made(b"[" * 50_000),
    "twice": made(
        b'{"x":{"dtype":"U8","shape":[64],"data_offsets":[0,64]},'
        b'"x":{"dtype":"I8","shape":[64],"data_offsets":[0,64]}}'
    ),
}


@pytest.mark.parametrize("data", LIES.values(), ids=LIES)
def test_safetensors_that_lie(tmp_path, data):
    path = tmp_path / "lie.safetensors"
    path.write_bytes(data)
    with pytest.raises(UserError):
        read_safetensors(path)


@settings(max_examples=250, deadline=None, derandomize=True, database=None)
@given(
    changes=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), max_size=6),
    cut=st.integers(0, 1 << 20),
)
def test_flipped_and_cut(tmp_path_factory, changes, cut):
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    write(path, VALUES)
    data = bytearray(path.read_bytes())
    for at, value in changes:
        data[at % len(data)] = value
    path.write_bytes(data[: len(data) - cut % 40] if cut % 2 else data)
    try:
        found = read_safetensors(path)
    except UserError:
        return
    for tensor in found.values():
        assert tensor.values().shape == tensor.shape

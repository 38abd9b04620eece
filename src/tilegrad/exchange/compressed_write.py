"""Write folders of the compressed-tensors layout: packed weights, their scales, and a config.json.

A `FolderWriter` is given tensors a part at a time (a block of a model), writes each part as one
safetensors file, and at the end the index and the configuration. Invariant: nothing is in the
folder under its last name before it is whole; what is written is read back by
`exchange/folder.py` with the same values.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..core.dtype import dtype_of
from ..core.errors import UserError
from ..core.format import NUMPY, PLAIN, Format
from ..core.scaled import packed_bits
from .compressed import SPARSE
from .folder import INDEX

Array = np.ndarray[Any, Any]
COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


def write_safetensors(path: Path, tensors: Mapping[str, Array]) -> None:
    """Arrays by name as a safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    arrays, at = [], 0
    for name, given in tensors.items():
        array = np.asarray(given, order="C")
        form = PLAIN[dtype_of(array.dtype)].name
        spans = [at, at + array.nbytes]
        header[name] = {"dtype": form, "shape": list(array.shape), "data_offsets": spans}
        arrays.append(array)
        at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    unfinished = path.with_name(path.name + ".part")
    with unfinished.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays:
            file.write(array.reshape(-1).view(np.uint8).data)
    os.replace(unfinished, path)


def parts_of(form: Format, raw: Array, shape: tuple[int, int]) -> dict[str, Array]:
    """The tensors of a layer, by what follows its name, from bytes of a Format."""
    rows, columns = shape
    fields, element = form.split(raw), form.element
    if form.sparse and "scale" not in fields:
        return _halved(fields, rows, columns)
    if element is None or form.sparse or form.grain.rows != 1:
        raise UserError("not written as compressed-tensors", op="folder", got=form.name)
    scale = np.array(fields["scale"].reshape(rows, -1))
    codes = np.ascontiguousarray(fields["codes"].reshape(rows, -1))
    if element.dtype is not None and "zero" not in fields:
        return {"weight": codes, "weight_scale": scale}
    if not element.name.startswith("INT"):
        raise UserError("not written as compressed-tensors", op="folder", got=form.name)
    found = {
        "weight_packed": _words(codes.view(np.uint8)),
        "weight_scale": scale,
        "weight_shape": np.array([rows, columns], np.int64),
    }
    if "zero" in fields:
        zero = np.ascontiguousarray(fields["zero"].reshape(rows, -1).T)
        packed = np.zeros((len(zero), -(-rows // 32) * 32), np.uint8)
        packed[:, :rows] = zero
        words = _words(np.asarray(packed_bits(NUMPY, packed, element.bits)))
        found["weight_zero_point"] = np.ascontiguousarray(
            words[:, : -(-rows * element.bits // 32)].T
        )
    return found


def _halved(fields: dict[str, Array], rows: int, columns: int) -> dict[str, Array]:
    """Two of every four values, with a bit for each column that says which."""
    kept = fields["places"].reshape(rows, -1, 1) >> np.arange(0, 8, 2, dtype=np.uint8) & 3
    mask = np.zeros((rows, columns // 4, 4), np.uint8)
    np.put_along_axis(mask, kept.reshape(rows, -1, 2).astype(np.int64), 1, -1)
    return {
        "compressed": np.ascontiguousarray(fields["codes"].reshape(rows, -1)),
        "bitmask": np.packbits(mask.reshape(rows, -1), axis=-1, bitorder="little"),
        "shape": np.array([[rows], [columns]], np.int64),
    }


def _words(raw: Array) -> Array:
    """Rows of bytes as int32 words, zeros at the end."""
    wide = np.zeros((len(raw), -(-raw.shape[1] // 4) * 4), np.uint8)
    wide[:, : raw.shape[1]] = raw
    return wide.view("<i4").astype(np.int32)


def described(form: Format, input_format: str = "", ignore: tuple[str, ...] = ()) -> dict[str, Any]:
    """The `quantization_config` of layers in one Format."""
    element, grain = form.element, form.grain
    assert element is not None
    if form.sparse:
        pruned = {"format": SPARSE, "sparsity_structure": "2:4", "global_sparsity": 0.5}
        return {
            "quant_method": "compressed-tensors",
            "format": "dense",
            "quantization_status": "compressed",
            "config_groups": {},
            "ignore": list(ignore),
            "sparsity_config": {**pruned, "targets": ["Linear"], "ignore": list(ignore)},
        }
    kind = "int" if element.name.startswith("INT") else "float"
    weights: dict[str, Any] = {
        "num_bits": element.bits,
        "type": kind,
        "symmetric": form.symmetric,
        "strategy": "group" if grain.columns else "channel",
        "group_size": grain.columns or None,
        "dynamic": False,
        "observer": "minmax",
    }
    inputs = None
    if input_format:
        inputs = {
            "num_bits": 8,
            "type": "int" if input_format.startswith("INT") else "float",
            "symmetric": True,
            "strategy": "token",
            "dynamic": True,
        }
    plain = element.dtype is not None and form.symmetric
    name = ("int-quantized" if kind == "int" else "float-quantized") if plain else "pack-quantized"
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    }


def described_each(layers: Mapping[str, Format], ignore: tuple[str, ...] = ()) -> dict[str, Any]:
    """The `quantization_config` of layers (by name) in Formats of whole numbers in groups."""
    forms = sorted(set(layers.values()), key=lambda form: form.name)
    found = described(forms[0], ignore=ignore)
    found["config_groups"] = {}
    for number, form in enumerate(forms):
        (group,) = described(form)["config_groups"].values()
        group["targets"] = [name for name, own in layers.items() if own is form]
        found["config_groups"][f"group_{number}"] = group
    return found


class FolderWriter:
    """A folder that is written a part at a time."""

    def __init__(self, path: str | os.PathLike[str], source: str | os.PathLike[str]) -> None:
        self.path, self.source = Path(path), Path(source)
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise UserError(
                "there is something already", op="folder", expected="a new folder", got=str(path)
            )
        self.path.mkdir(parents=True, exist_ok=True)
        self.where: dict[str, str] = {}
        self.bytes = 0

    def add(self, tensors: Mapping[str, Array]) -> None:
        """One more file."""
        if not tensors:
            return
        name = f"model-{len(set(self.where.values())) + 1:05d}.safetensors"
        twice = self.where.keys() & tensors.keys()
        if twice:
            raise UserError("a tensor is written twice", op="folder", got=sorted(twice)[:3])
        write_safetensors(self.path / name, tensors)
        self.where |= dict.fromkeys(tensors, name)
        self.bytes += sum(array.nbytes for array in tensors.values())

    def finish(self, config: Mapping[str, Any], quantised: Mapping[str, Any]) -> None:
        """The index, the configuration, and what the source's folder has besides."""
        index = {"metadata": {"total_size": self.bytes}, "weight_map": self.where}
        (self.path / INDEX).write_text(json.dumps(index, indent=1))
        for name in COPIED:
            if (self.source / name).is_file():
                shutil.copyfile(self.source / name, self.path / name)
        whole = {**config, "quantization_config": dict(quantised)}
        (self.path / "config.json").write_text(json.dumps(whole, indent=1))


__all__ = ["FolderWriter", "described", "described_each", "parts_of", "write_safetensors"]

"""Hugging Face folders: configuration, tokenizer, chat template and safetensors weights, those that
others quantised too (`exchange/quantised.py`).

Invariant: only files that lie in the folder by their plain name are opened (an index cannot name
another place); nothing in the folder is run or unpickled; whatever is in it, reading ends in a
`ModelFolder` or in a `UserError` that names the file.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.errors import UserError
from .composed import Composed
from .mapped import Stored
from .quantised import with_formats
from .safetensors import parse_json, read_safetensors

JSON_BYTES, TOKENIZER_BYTES, TEMPLATE_BYTES = 64 << 20, 512 << 20, 1 << 20
SHARDS = 4096
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
CACHE_SCALE = re.compile(r"\.self_attn\.(?:[kv]_proj\.)?(?:[qkv]|kv)_scale\Z")
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\.safetensors\Z")


@dataclass(frozen=True)
class ModelFolder:
    """A model as Hugging Face lays it out; tensors are mapped."""

    path: str
    config: dict[str, Any] = field(repr=False)
    generation: dict[str, Any] = field(repr=False)
    tokenizer: str | None
    tokenizer_config: dict[str, Any] = field(repr=False)
    chat_template: str | None = field(repr=False)
    tensors: dict[str, Stored | Composed] = field(repr=False)
    cache_scales: dict[str, Stored] = field(default_factory=dict, repr=False)  # of keys, values

    @property
    def architecture(self) -> str:
        """The model family the configuration names, such as "llama"."""
        found = self.config.get("model_type")
        if not isinstance(found, str):
            raise UserError(
                f"{self.path}/config.json: model_type is missing",
                op="folder",
                expected="a name",
                got=repr(found)[:100],
            )
        return found


def read_folder(path: str | os.PathLike[str], weights: bool = True) -> ModelFolder:
    """Read a folder's tables and map its weights, if they are wanted."""
    folder = Path(path)
    if not folder.is_dir():
        raise UserError("no such folder", op="folder", got=os.fspath(path))
    tables = read_config(folder)
    stored = _weights(folder) if weights else {}
    scales = {name: stored.pop(name) for name in list(stored) if CACHE_SCALE.search(name)}
    tensors = with_formats(os.fspath(path), tables[0], stored) if weights else {}
    return ModelFolder(os.fspath(path), *tables, tensors, scales)


def read_config(
    folder: Path,
) -> tuple[dict[str, Any], dict[str, Any], str | None, dict[str, Any], str | None]:
    """config, generation, path of tokenizer.json, tokenizer_config and chat template."""
    config = read_table(folder / "config.json")
    _refuse_diffusers(folder, config)
    if config is None:
        raise UserError(
            f"{folder}: config.json is missing",
            op="folder",
            expected="a model folder as Hugging Face lays it out",
            got=_listing(folder),
        )
    path = folder / "tokenizer.json"
    tokenizer = str(path) if path.is_file() else None
    if tokenizer is not None:
        _small(path, TOKENIZER_BYTES)
    generation = read_table(folder / "generation_config.json") or {}
    words = read_table(folder / "tokenizer_config.json") or {}
    return config, generation, tokenizer, words, _template(folder, words)


def _refuse_diffusers(folder: Path, config: dict[str, Any] | None) -> None:
    """Call a pipeline of diffusers, or a part of one, what it is."""
    index = read_table(folder / "model_index.json")
    table, what = (
        (index, "a diffusers pipeline")
        if index is not None
        else (config or {}, "a part of a diffusers pipeline")
    )
    name = table.get("_class_name")
    if isinstance(name, str) and (index is not None or "model_type" not in table):
        raise UserError(
            f"{folder}: this is {what} ({name}), not a language model",
            op="folder",
            expected="a config.json with a model_type",
            got=_listing(folder),
            hint="its text encoder is a model of its own, in a folder of its own"
            if index is not None
            else None,
        )


def _small(path: Path, limit: int) -> None:
    size = path.stat().st_size
    if size > limit:
        raise UserError(
            f"{path}: too large", op="folder", expected=f"at most {limit} bytes", got=size
        )


def _bytes(path: Path, limit: int) -> bytes | None:
    """A file's bytes; None where there is no such file."""
    try:
        if not path.is_file():
            return None
        _small(path, limit)
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}", op="folder") from None


def read_table(path: Path) -> dict[str, Any] | None:
    """A JSON table of a file; None where there is no such file."""
    data = _bytes(path, JSON_BYTES)
    return None if data is None else parse_json(data, str(path))


def _template(folder: Path, words: dict[str, Any]) -> str | None:
    """The chat template: a file of its own, or an entry of the tokenizer's table."""
    path = folder / "chat_template.jinja"
    data = _bytes(path, TEMPLATE_BYTES)
    if data is not None:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not UTF-8: {error.reason}", op="folder") from None
    found = words.get("chat_template")
    if isinstance(found, list):  # several by name
        named = {
            t.get("name"): t.get("template")
            for t in found
            if isinstance(t, dict) and isinstance(t.get("name"), str)
        }
        found = named.get("default")
    if found is not None and not isinstance(found, str):
        raise UserError(
            f"{folder}/tokenizer_config.json: chat_template is of another type",
            op="folder",
            expected="text",
            got=type(found).__name__,
        )
    return found


def _listing(folder: Path) -> str:
    names = sorted(p.name for p in folder.iterdir())
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "") or "an empty folder"


# ---- weights --------------------------------------------------------------------------------


def _weights(folder: Path) -> dict[str, Stored]:
    index = read_table(folder / INDEX)
    if index is not None:
        return _sharded(folder, index)
    single = folder / SINGLE
    if single.is_file():
        return read_safetensors(single)
    found = sorted(p.name for p in folder.glob("*.safetensors"))
    if len(found) == 1:
        return read_safetensors(folder / found[0])
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES)
    if pickles and not found:
        raise UserError(
            f"{folder}: the weights are pickles, which may run code; they are not read",
            op="folder",
            expected=SINGLE,
            got=", ".join(pickles[:3]),
            hint="take the safetensors of the model, or convert it: "
            "transformers' save_pretrained writes safetensors",
        )
    raise UserError(
        f"{folder}: no weights found",
        op="folder",
        expected=f"{SINGLE} or {INDEX}",
        got=_listing(folder),
    )


def _sharded(folder: Path, index: dict[str, Any]) -> dict[str, Stored]:
    where = index.get("weight_map")
    path = folder / INDEX
    if not isinstance(where, dict) or not where:
        raise UserError(
            f"{path}: weight_map is missing",
            op="folder",
            expected="a table of tensor: file",
            got=str(where)[:100],
        )
    for name, shard in where.items():
        if not isinstance(shard, str) or not PLAIN_NAME.match(shard):
            raise UserError(
                f"{path}: tensor {name[:100]!r} is not in a file of this folder",
                op="folder",
                expected="the plain name of a .safetensors file",
                got=repr(shard)[:200],
            )
    shards = sorted(set(where.values()))
    if len(shards) > SHARDS:
        raise UserError(
            f"{path}: too many files", op="folder", expected=f"at most {SHARDS}", got=len(shards)
        )
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise UserError(
            f"{folder}: {len(missing)} of {len(shards)} weight files are missing",
            op="folder",
            got=", ".join(missing[:3]),
            hint="the download may not be complete",
        )
    stored = {shard: read_safetensors(folder / shard) for shard in shards}
    result = {}
    for name, shard in where.items():
        if name not in stored[shard]:
            raise UserError(
                f"{folder / shard}: tensor {name[:100]!r} is missing, which {INDEX} says is there",
                op="folder",
            )
        result[name] = stored[shard][name]
    return result

"""exchange/compressed_write.py: layers as they are written, read by us and by their own package."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tilegrad.core.errors import UserError
from tilegrad.core.format import format_of
from tilegrad.exchange.compressed_write import FolderWriter, described, parts_of
from tilegrad.exchange.folder import read_folder

NAMES = ["INT4_G32_F16_ZERO", "INT4_G32_F32", "INT3_G32_F16_ZERO", "INT8_G32_F16_ZERO"]
NAMES += ["INT8_ROW_F32", "E4M3_ROW_F32", "INT4_ROW_F16_ZERO"]
PRUNED = ["BF16_SPARSE", "F16_SPARSE"]


def weight(rows: int = 40, columns: int = 64) -> np.ndarray:
    return np.random.default_rng(7).standard_normal((rows, columns)).astype(np.float32)


@pytest.mark.parametrize("name", NAMES + PRUNED)
def test_what_is_written_is_read(name: str, tmp_path: Path) -> None:
    form = format_of(name)
    raw = form.pack(weight())
    writer = FolderWriter(tmp_path / "made", tmp_path)
    writer.add({f"l.{k}": v for k, v in parts_of(form, raw, (40, 64)).items()})
    writer.add({"lm_head.weight": weight(8)})
    writer.finish({"model_type": "llama"}, described(form, ignore=("lm_head",)))
    found = read_folder(tmp_path / "made")
    assert set(found.tensors) == {"l.weight", "lm_head.weight"}
    np.testing.assert_array_equal(found.tensors["l.weight"].values(), form.to_float32(raw))
    with pytest.raises(UserError, match="something already"):
        FolderWriter(tmp_path / "made", tmp_path)


@pytest.mark.parametrize("name", PRUNED)
def test_their_own_package_reads_what_was_pruned(name: str) -> None:
    reading = pytest.importorskip(
        "compressed_tensors.compressors.sparse_compressors.sparse_24_bitmask",
        reason="needs compressed-tensors: pip install 'tilegrad[peers]'",
    )
    import torch

    form = format_of(name)
    raw = form.pack(weight())
    parts = parts_of(form, raw, (40, 64))
    kind = torch.bfloat16 if name.startswith("BF16") else torch.float16
    values = torch.from_numpy(parts["compressed"].view(np.int16)).view(kind)
    found = reading.sparse24_bitmask_decompress(
        values, torch.from_numpy(parts["bitmask"]), parts["shape"].reshape(-1).tolist()
    )
    np.testing.assert_array_equal(found.float().numpy(), form.to_float32(raw))


@pytest.mark.parametrize("name", NAMES)
def test_their_own_package_reads_the_same_values(name: str) -> None:
    package = pytest.importorskip(
        "compressed_tensors", reason="needs compressed-tensors: pip install 'tilegrad[peers]'"
    )
    import torch
    from compressed_tensors.quantization import QuantizationConfig

    form = format_of(name)
    raw = form.pack(weight())
    given = described(form)
    config = QuantizationConfig.model_validate(json.loads(json.dumps(given)))
    scheme = config.config_groups["group_0"]
    reader = package.compressors.base.BaseCompressor.get_value_from_registry(given["format"])
    tensors = {}
    for key, array in parts_of(form, raw, (40, 64)).items():
        low = array.dtype.itemsize == 1 and form.element.name == "E4M3" and key == "weight"
        made = torch.from_numpy(array.view(np.uint8) if low else array)
        tensors[key] = made.view(torch.float8_e4m3fn) if low else made
    found = reader.decompress(tensors, scheme)["weight"].to(torch.float32).numpy()
    wanted = form.to_float32(raw)
    kind = np.float16 if "F16" in name else np.float32
    np.testing.assert_array_equal(found, wanted.astype(kind).astype(np.float32))

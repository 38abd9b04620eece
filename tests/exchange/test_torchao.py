"""exchange/torchao.py beside the torchao package: what it writes is what we read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilegrad.exchange.folder import read_folder

torch = pytest.importorskip("torch")
pytest.importorskip("torchao", reason="needs torchao: pip install torchao")


def configs() -> dict[str, Any]:
    """torchao's recipes that need no GPU."""
    from torchao import quantization as ao

    return {
        "fp8": ao.Float8WeightOnlyConfig(),
        "int8": ao.Int8WeightOnlyConfig(version=2),
        "int8 of inputs": ao.Int8DynamicActivationInt8WeightConfig(version=2),
        "int4": ao.IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=ao.granularity.PerGroup(32)
        ),
        "int3": ao.IntxWeightOnlyConfig(weight_dtype=torch.int3),
    }


@pytest.mark.parametrize("name", ["fp8", "int8", "int8 of inputs", "int4", "int3"])
def test_a_folder_of_torchao(name: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import quantize_

    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(64, 48, dtype=torch.float32))
    quantize_(layer, configs()[name])
    state = {key: value.data for key, value in layer.state_dict().items()}
    tensors, metadata = flatten_tensor_state_dict(state)
    save_file(tensors, tmp_path / "model.safetensors", metadata)
    table = {"model_type": "llama", "quantization_config": {"quant_method": "torchao"}}
    (tmp_path / "config.json").write_text(json.dumps(table))
    found = read_folder(tmp_path).tensors
    assert set(found) == {"0.weight", "0.bias"}
    np.testing.assert_array_equal(
        found["0.weight"].values(), layer[0].weight.dequantize().float().numpy()
    )
    rounded = found["0.weight"].input
    assert (rounded.format if rounded else "") == ("INT8_ROW_F32" if "inputs" in name else "")

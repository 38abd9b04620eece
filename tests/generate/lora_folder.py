"""Random LoRA adapters as PEFT writes them, and a NumPy Llama with their changes merged in."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tiny_model import FOLDER_NAMES, HEAD, LAYERS, SHAPES

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from llama_numpy import Llama, log_softmax

ALL = tuple(FOLDER_NAMES[name] for name in SHAPES)
OURS = {theirs: ours for ours, theirs in FOLDER_NAMES.items()}
TINY = {FOLDER_NAMES[name]: shape for name, shape in SHAPES.items()}


def pairs(
    seed: int,
    rank: int,
    targets: Any = ALL,
    shapes: Any = None,
    layers: int = LAYERS,
    size: float = 0.3,
) -> dict[str, Any]:
    """Tensors A and B of each module, large enough to change what is said."""
    random, found = np.random.default_rng(seed), {}
    for layer in range(layers):
        for target in targets:
            rows, columns = (shapes or TINY)[target]
            for side, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                values = random.standard_normal(shape).astype(np.float32) * size
                found[f"base_model.model.model.layers.{layer}.{target}.lora_{side}.weight"] = values
    return found


def write_adapter(
    folder: Path, seed: int = 1, rank: int = 4, tensors: Any = None, **said: Any
) -> Path:
    """An adapter's folder; `said` are fields of its configuration."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    targets = said.pop("targets", ALL)
    made = pairs(seed, rank, targets) if tensors is None else tensors
    save_file(made, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": rank,
        "lora_alpha": 8,
        "lora_dropout": 0.05,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "target_modules": sorted({t.split(".")[-1] for t in targets}),
        "use_rslora": False,
        "use_dora": False,
        **said,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


class Merged(Llama):
    """A Llama whose weights are W + scale * B @ A."""

    def __init__(self, path: Path, tensors: dict[str, Any], scale: float, head: int = HEAD) -> None:
        self.changes: dict[str, Any] = {}
        for name, a in tensors.items():
            start = "base_model.model.model.layers."
            if name.endswith("lora_A.weight"):
                layer, module = name[len(start) : -len(".lora_A.weight")].split(".", 1)
                b = tensors[name.replace("lora_A", "lora_B")]
                change = scale * (b.astype(np.float64) @ a.astype(np.float64))
                if module in ("self_attn.q_proj", "self_attn.k_proj"):  # as llama.cpp has them
                    cut = change.reshape(len(change) // head, 2, head // 2, -1)
                    change = cut.swapaxes(1, 2).reshape(change.shape)
                self.changes[f"blk.{layer}.{OURS[module]}"] = change
        super().__init__(path)

    def weight(self, name: str) -> Any:
        """A weight with its change."""
        found = super().weight(name)
        return found + self.changes[name] if name in self.changes else found


__all__ = ["ALL", "Merged", "log_softmax", "pairs", "write_adapter"]

"""Chips that people rent and buy: the table.

Peaks are dense unless a figure says sparse. Published pages disagree, and several print sparse
peaks as if dense; each figure says where it was read and when. Invariant: no figure is guessed;
what was not found is not in the table.
"""

from __future__ import annotations

from ...core.errors import UserError
from ...targets.npu.parameters import PRESETS, preset
from .figure import Chip, Figure, load_chip, npu_chip

GPU = ("rooflinenotes.dev, spillfill.com", "2026-11")
TPU = ("jax-ml/scaling-book", "2026-11")
CLOUD_TPU = ("docs.cloud.google.com/tpu", "2026-11")
NEURON = ("awsdocs-neuron, Trainium2 architecture", "2026-11")
BLACKWELL = ("glennklockwood.com, HGX B200 at 1000 W", "2026-11")
OWN = ("bench/llm_decode.py, its ceilings", "2026-11-16")
RENT = ("cloud price pages, weak", "2026-11")
PEAKS = ("bf16", "fp8", "int8", "fp4")

# title, source of its figures, and the figures in the units of FIELDS
ROWS: dict[str, tuple[str, tuple[str, str], dict[str, float]]] = {
    "a100": ("NVIDIA A100 SXM 80 GB", GPU,
             {"bf16": 312, "int8": 624, "memory": 80, "bandwidth": 2.0, "power": 400, "link": 300}),
    "h100": ("NVIDIA H100 SXM", GPU,
             {"bf16": 989.5, "fp8": 1979, "int8": 1979, "memory": 80, "bandwidth": 3.35,
              "power": 700, "link": 450, "area": 814}),
    "h200": ("NVIDIA H200 SXM", GPU,
             {"bf16": 989.5, "fp8": 1979, "int8": 1979, "memory": 141, "bandwidth": 4.8,
              "power": 700, "link": 450}),
    "b200": ("NVIDIA B200", BLACKWELL,
             {"bf16": 2250, "fp8": 4500, "int8": 4500, "fp4": 9000, "memory": 180,
              "bandwidth": 8.0, "power": 1000, "link": 900}),
    "mi300x": ("AMD MI300X", GPU,
               {"bf16": 1307, "fp8": 2615, "int8": 2615, "memory": 192, "bandwidth": 5.3,
                "power": 750, "link": 448}),
    "mi325x": ("AMD MI325X", GPU, {"bf16": 1307, "memory": 256, "bandwidth": 6.0, "power": 1000}),
    "mi355x": ("AMD MI355X", GPU, {"bf16": 2500, "memory": 288, "bandwidth": 8.0}),
    "tpu-v3": ("Google TPU v3", TPU, {"bf16": 140, "int8": 140, "memory": 32, "bandwidth": 0.9}),
    "tpu-v4": ("Google TPU v4", TPU,
               {"bf16": 275, "int8": 275, "memory": 32, "bandwidth": 1.2, "link": 270}),
    "tpu-v5e": ("Google TPU v5e", CLOUD_TPU,
                {"bf16": 197, "int8": 393, "memory": 16, "bandwidth": 0.819, "link": 200}),
    "tpu-v5p": ("Google TPU v5p", CLOUD_TPU,
                {"bf16": 459, "fp8": 459, "int8": 918, "memory": 95, "bandwidth": 2.765,
                 "link": 600}),
    "tpu-v6e": ("Google TPU v6e", TPU,
                {"bf16": 920, "int8": 1840, "memory": 32, "bandwidth": 1.6, "link": 360}),
    "trainium2": ("AWS Trainium2", NEURON,
                  {"bf16": 667, "fp8": 1299, "memory": 103.1, "bandwidth": 2.9, "link": 640}),
    "groq-lpu": ("Groq LPU v1", ("techpowerup", "2026-11"),
                 {"bf16": 188, "int8": 750, "memory": 0.23, "bandwidth": 80}),
    "wse-3": ("Cerebras WSE-3", ("tomshardware", "2026-11"),
              {"bf16": 125_000, "memory": 44, "bandwidth": 21_000, "power": 23_000,
               "area": 46_225}),
    "tpu-v1": ("Google TPU v1", ("ISCA 2017, Jouppi et al.", "2017"),
               {"int8": 92, "memory": 8.6, "bandwidth": 0.034, "power": 75, "area": 331}),
}  # fmt: skip
# Figures of another source or kind than their row's
MORE: dict[tuple[str, str], Figure] = {
    ("h200", "bf16_measured"): Figure(777.6, *OWN, note="a large product, dense"),
    ("h200", "bandwidth_measured"): Figure(4.340, *OWN, note="reading a large array"),
    ("wse-3", "bf16"): Figure(125_000, "tomshardware", "2026-11", "sparse", "fp16"),
    ("groq-lpu", "bf16"): Figure(188, "techpowerup", "2026-11", "dense", "fp16"),
    ("tpu-v5p", "memory"): Figure(95, *CLOUD_TPU, note="GB in one page, GiB in another"),
    ("tpu-v5p", "int8"): Figure(918, *TPU, "dense"),
    ("tpu-v5e", "link"): Figure(200, *CLOUD_TPU, note="400 both ways"),
    ("tpu-v5p", "link"): Figure(600, *CLOUD_TPU, note="1200 both ways"),
    ("tpu-v4", "power"): Figure(170, "TPU v4 paper, ISCA 2023", "2023", note="mean, not design"),
    ("mi300x", "link"): Figure(448, "emergentmind.com, gpu.blog", "2026-11", note="896 both ways"),
    ("trainium2", "link"): Figure(640, *NEURON, note="1280, taken to be both ways"),
    ("groq-lpu", "power"): Figure(300, "awesomeagents.ai, weak", "2026-11"),
    ("b200", "memory"): Figure(180, *GPU, note="180 to 192 by system"),
    ("tpu-v6e", "bf16"): Figure(920, *TPU, "dense", "918 in some pages"),
    ("h100", "price"): Figure(2.65, *RENT, note="2.65 to 2.99"),
    ("h200", "price"): Figure(3.20, *RENT, note="3.20 to 3.29"),
    ("mi300x", "price"): Figure(1.71, *RENT, note="1.71 to 1.85"),
    ("b200", "price"): Figure(4.60, *RENT),
    ("tpu-v5p", "price"): Figure(2.10, *RENT),
}


def _chip(name: str) -> Chip:
    title, source, values = ROWS[name]
    figures = {
        field: Figure(value, *source, "dense" if field in PEAKS else "")
        for field, value in values.items()
    }
    figures |= {field: figure for (chip, field), figure in MORE.items() if chip == name}
    return Chip(name, title, figures)


CHIPS = {name: _chip(name) for name in ROWS}


def chip(name: str) -> Chip:
    """A chip of the table, of a file (`.toml`, `.json`), or a preset of an NPU."""
    if name in PRESETS:
        return npu_chip(preset(name), f"the preset {name}")
    if name.endswith((".toml", ".json")):
        return load_chip(name)
    if name.lower() not in CHIPS:
        raise UserError(
            f"unknown chip {name!r}",
            op="chip",
            expected=f"{', '.join([*CHIPS, *PRESETS])}, or a file .toml or .json",
        )
    return CHIPS[name.lower()]


__all__ = ["CHIPS", "chip"]

"""A block of the mesh that fits Tiny Tapeout: two int8 multipliers, with the project's info file.

Invariant: the multipliers are the mesh's own modules, unchanged.
"""

from __future__ import annotations

from pathlib import Path

from .emit import SOURCES

TOP = "tt_um_tilegrad_pair"
FILES = ("npu_fp.sv", "npu_mesh.sv", f"{TOP}.sv")
PINS = {
    "ui": [f"data {i}" for i in range(8)],
    "uo": [f"sum {i}" for i in range(8)],
    "uio": ["command 0", "command 1", "command 2", "byte 0", "byte 1", "byte 2", "", ""],
}


def info() -> str:
    """The info file that Tiny Tapeout asks for."""
    lines = [
        "project:",
        '  title: "int8 multiplier pair"',
        '  author: "tilegrad"',
        '  description: "Two multipliers of a systolic array with 32-bit sums"',
        '  language: "SystemVerilog"',
        "  clock_hz: 50000000",
        '  tiles: "1x2"',
        f'  top_module: "{TOP}"',
        "  source_files:",
        *(f'    - "{name}"' for name in FILES),
        "pinout:",
    ]
    for port, names in PINS.items():
        lines += [f'  {port}[{i}]: "{name}"' for i, name in enumerate(names)]
    return "\n".join([*lines, "yaml_version: 6", ""])


def write_tiny(folder: Path) -> list[Path]:
    """Writes `src/` and `info.yaml`; the paths of the sources in order."""
    (folder / "src").mkdir(parents=True, exist_ok=True)
    (folder / "info.yaml").write_text(info(), encoding="utf-8")
    made = []
    for name in FILES:
        path = folder / "src" / name
        path.write_text((SOURCES / name).read_text(encoding="utf-8"), encoding="utf-8")
        made.append(path)
    return made


__all__ = ["TOP", "info", "write_tiny"]

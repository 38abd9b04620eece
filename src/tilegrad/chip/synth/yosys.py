"""Yosys: from SystemVerilog to cells of a library, module by module.

Blocks keep their borders, so each kind of block is mapped once however often it is used, and the
report can say what each costs; small modules inside them are dissolved. Memories stay black boxes.
Invariant: the netlist that is timed is the one whose area Yosys itself prints.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from ...core.errors import UserError
from ...targets.npu.parameters import Parameters
from ..rtl.emit import design, top_parameters
from . import tools
from .liberty import Library
from .netlist import MEMORY, Netlist

PARTS = {"chip": "npu_top", "mesh": "npu_mesh", "pe": "npu_pe"}
BLOCKS = (
    "npu_pe",
    "npu_mesh",
    "npu_skew",
    "npu_scratchpad",
    "npu_accumulator",
    "npu_execute",
    "npu_vector_lane",
    "npu_load",
    "npu_unpack",
    "npu_store",
    "npu_narrow",
    "npu_front",
    "npu_control",
    "npu_queue",
    "npu_token",
    "npu_issue",
)
BODY = re.compile(rf"(module {MEMORY} #\(.*?\n\);\n).*?endmodule", re.DOTALL)
Report = Callable[..., None]  # a stage, how far it is, of how much, and a note


def sources(p: Parameters, folder: Path) -> list[str]:
    """Writes the design with memories as black boxes; names in the order to read."""
    folder.mkdir(parents=True, exist_ok=True)
    files = design(p)
    files["npu_memory.sv"] = BODY.sub(
        r"(* blackbox *)\n\1endmodule", files["npu_memory.sv"], count=1
    )
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return list(files)


def reading(p: Parameters, part: str, names: list[str], folder: str = "rtl") -> str:
    """The commands that read a design and set the parameters of the part on top."""
    top = PARTS[part]
    lines = [f"read_verilog -sv {' '.join(f'{folder}/{n}' for n in names)}"]
    if part != "chip":
        text = design(p)["npu_mesh.sv"]
        head = text[text.index(f"module {top} #(") :].split(") (")[0]
        known = re.findall(r"parameter int (\w+)", head)
        values = {n: v for n, v in top_parameters(p).items() if n in known}
        lines.append(f"chparam {' '.join(f'-set {n} {v}' for n, v in values.items())} {top}")
    lines.append(f"hierarchy -check -top {top}")
    return "\n".join(lines)


def map_cells(
    p: Parameters, part: str, liberty: Path, folder: Path, report: Report | None = None
) -> Netlist:
    """The mapped netlist of a part of a chip, still without buffers."""
    names = sources(p, folder / "rtl")
    kept = " ".join(f"*{name}*" for name in BLOCKS)
    script = f"""
{reading(p, part, names)}
setattr -mod -set keep_hierarchy 1 {kept}
synth -flatten -top {PARTS[part]}
dfflibmap -liberty {liberty}
abc -liberty {liberty}
opt_clean -purge
setundef -zero
write_json mapped.json
"""
    (folder / "map.ys").write_text(script, encoding="utf-8")
    lines = _Progress(report)
    command = [tools.needed("yosys"), "-s", "map.ys"]
    tools.run(command, folder, folder / "map.log", lines)
    return Netlist.load(folder / "mapped.json")


class _Progress:
    """How far a run is, by the passes its log names."""

    STAGES = (
        "read_verilog",
        "hierarchy",
        "proc",
        "flatten",
        "opt",
        "wreduce",
        "alumacc",
        "memory",
        "techmap",
        "abc",
        "dfflibmap",
        "json",
    )

    def __init__(self, report: Report | None) -> None:
        self.report, self.seen = report, 0
        self.last = 0

    def __call__(self, line: str) -> None:
        found = re.match(r"[\d.]+\. Executing (\w+)", line)
        if found is None or self.report is None:
            return
        name = found[1].lower()
        name = {"verilog": "read_verilog", "generic": "techmap"}.get(name, name)
        for n, stage in enumerate(self.STAGES):
            if name.startswith(stage) and n >= self.last:
                self.last = n
        self.report("Yosys", self.last + 1, len(self.STAGES), name)


def finish(netlist: Netlist, library: Library, liberty: Path, folder: Path) -> tuple[float, str]:
    """Writes `netlist.v` and has Yosys count it: its area in um2, and its version."""
    table = json.dumps(netlist.to_table(library))
    (folder / "netlist.json").write_text(table, encoding="utf-8")
    script = f"""
read_json netlist.json
hierarchy -top {netlist.top}
tee -o stat.txt stat -liberty {liberty} -top {netlist.top}
write_verilog -noattr -noexpr netlist.v
"""
    (folder / "count.ys").write_text(script, encoding="utf-8")
    command = [tools.needed("yosys"), "-s", "count.ys"]
    said = tools.run(command, folder, folder / "count.log")
    stat = (folder / "stat.txt").read_text(encoding="utf-8")
    found = re.findall(r"Chip area for (?:top )?module '\\?(\S+)': ([\d.e+]+)", stat)
    areas = [float(area) for name, area in found if name == netlist.top]
    if not areas:
        raise UserError("Yosys printed no area", op="chip synth", got=str(folder / "stat.txt"))
    version = re.search(r"Yosys (\d[\w.+]*)", said)
    return areas[-1], version[1] if version else ""


__all__ = ["PARTS", "finish", "map_cells", "reading", "sources"]

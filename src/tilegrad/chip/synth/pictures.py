"""Pictures: the schematic of a multiplier, and the layout of a small mesh by qflow and KLayout.

qflow places and routes with OSU018, whose cells Debian has as outlines with pins and no inner
layers: a layout shows rows of cells and every wire, and is not what a fab takes. Invariant: a
layout is reported only where qflow says that no route failed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from ...core.errors import UserError
from ...targets.npu.parameters import Parameters
from . import tools
from .yosys import Report, reading, sources

LEF = tools.OSU018.with_suffix(".lef")
TILE = "mesh"
STAGES = ("synthesize", "place", "sta", "route")


@dataclass(frozen=True)
class Layout:
    """A placed and routed mesh."""

    rows: int
    columns: int
    cells: int
    width: float  # um
    height: float
    wire: float  # mm
    megahertz: float | None  # before routing, by qflow's own timer
    files: tuple[str, ...]


def schematic(p: Parameters, folder: Path) -> Path:
    """The schematic of one multiplier before it is mapped, as SVG."""
    tools.needed("dot")
    names = sources(p, folder / "rtl")
    script = f"""
{reading(p, "pe", names)}
proc
flatten
opt
opt_clean -purge
rename -top npu_pe
show -format svg -viewer none -prefix schematic -notitle -colors 2 npu_pe
"""
    (folder / "schematic.ys").write_text(script, encoding="utf-8")
    command = [tools.needed("yosys"), "-s", "schematic.ys"]
    tools.run(command, folder, folder / "schematic.log")
    return folder / "schematic.svg"


def place_and_route(
    p: Parameters, folder: Path, sides: tuple[int, int] = (2, 2), report: Report | None = None
) -> Layout:
    """A mesh of these sides through qflow; its layout as GDS and picture where KLayout is here."""
    qflow = tools.needed("qflow")
    if not LEF.is_file():
        raise UserError("no cell outlines", op="chip synth", hint=tools.TOOLS["qflow"][1])
    rows, columns = sides
    small = replace(p, rows=rows, columns=columns, lanes=columns)
    work = folder / "layout"
    (work / "source").mkdir(parents=True, exist_ok=True)
    names = sources(small, work / "rtl")
    script = f"""
{reading(small, "mesh", names)}
proc
flatten
opt
opt_clean -purge
rename -top {TILE}
write_verilog -noattr source/{TILE}.v
"""
    (work / "flat.ys").write_text(script, encoding="utf-8")
    tools.run([tools.needed("yosys"), "-s", "flat.ys"], work, work / "flat.log")
    said = ""
    for n, stage in enumerate(STAGES):
        if report is not None:
            report("qflow", n, len(STAGES), stage)
        said += tools.run([qflow, "-T", "osu018", stage, TILE], work, work / f"{stage}.out")
    if report is not None:
        report("qflow", len(STAGES), len(STAGES))
    if "Final: No failed routes!" not in said:
        raise UserError("qflow left routes open", op="chip synth", hint=str(work / "route.out"))
    return _measured(work, rows, columns)


def _measured(work: Path, rows: int, columns: int) -> Layout:
    text = (work / f"{TILE}.def").read_text(encoding="utf-8", errors="replace")
    units = float(re.search(r"DISTANCE MICRONS (\d+)", text)[1])  # type: ignore[index]
    corner = re.search(r"DIEAREA \( (\S+) (\S+) \) \( (\S+) (\S+) \)", text)
    assert corner is not None
    x0, y0, x1, y1 = (float(x) / units for x in corner.groups())
    cells = len(re.findall(r"^- \S+ (?!FILL)\S+ \+ PLACED", text, re.MULTILINE))
    logs = "".join(f.read_text(errors="replace") for f in sorted((work / "log").glob("*.log")))
    clock = re.search(r"maximum clock frequency \(zero \w+\) = ([\d.]+) MHz", logs)
    files = (f"layout/{TILE}.def", *draw(work / f"{TILE}.def"))
    speed = float(clock[1]) if clock else None
    return Layout(rows, columns, cells, x1 - x0, y1 - y0, wire_length(text), speed, files)


def wire_length(text: str) -> float:
    """mm of wires in a DEF file's text: a route is points, `*` where one is as in the last."""
    units = float(re.search(r"DISTANCE MICRONS (\d+)", text)[1])  # type: ignore[index]
    total = 0.0
    nets = text[text.index("\nNETS ") : text.index("\nEND NETS")]
    for route in re.split(r"\+ ROUTED|\bNEW\b", nets)[1:]:
        last: tuple[float, float] | None = None
        for x, y in re.findall(r"\( (-?[\d.]+|\*) (-?[\d.]+|\*)(?: \S+)? \)", route.split(";")[0]):
            here = (
                float(x) if last is None or x != "*" else last[0],
                float(y) if last is None or y != "*" else last[1],
            )
            if last is not None:
                total += abs(here[0] - last[0]) + abs(here[1] - last[1])
            last = here
    return total / units / 1e3


def draw(path: Path, pixels: int = 1200) -> tuple[str, ...]:
    """GDS and picture of a DEF file by KLayout; nothing where it is not installed."""
    if tools.find("klayout") is None:
        return ()
    import klayout.db as db
    import klayout.lay as lay

    options = db.LoadLayoutOptions()
    options.lefdef_config.lef_files = [str(LEF)]
    options.lefdef_config.read_lef_with_def = False
    options.lefdef_config.produce_labels = False
    options.lefdef_config.macro_resolution_mode = 1  # cells are their outlines and pins
    units = re.search(r"DISTANCE MICRONS (\d+)", path.read_text(errors="replace"))
    options.lefdef_config.dbu = 1 / float(units[1]) if units else 0.001
    gds, picture = path.with_suffix(".gds"), path.with_suffix(".png")
    layout = db.Layout()
    layout.read(str(path), options)
    layout.write(str(gds))
    view = lay.LayoutView()
    view.load_layout(str(gds), True)
    view.max_hier()
    view.zoom_fit()
    view.set_config("background-color", "#ffffff")
    view.set_config("grid-visible", "false")
    view.set_config("text-visible", "false")
    view.set_config("ghost-cells-visible", "false")
    view.set_config("inst-visible", "false")
    view.save_image(str(picture), pixels, pixels)
    return f"layout/{gds.name}", f"layout/{picture.name}"


__all__ = ["Layout", "draw", "place_and_route", "schematic"]

"""A synthesis as text, as plain data, and as one HTML page that needs nothing beside it.

Invariant: the three show the same numbers, and each says what is an estimate and that none is a
sign-off.
"""

from __future__ import annotations

import base64
import html
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .flow import Synthesis

NOT_SIGNED_OFF = (
    "No sign-off: wires, the clock's tree, process corners, hold times, design rules, layout "
    "against schematic and electromigration are not checked here."
)


def record(found: Synthesis) -> dict[str, Any]:
    """All of it as plain data."""
    return {
        "chip": found.parameters.to_table(),
        "part": found.part,
        "library": found.library,
        "yosys": {"version": found.yosys, "area_um2": found.yosys_area},
        "area_um2": found.area,
        "cells": found.cells,
        "gates": found.gates,
        "buffers": found.buffers,
        "kinds": found.kinds,
        "blocks": [asdict(block) for block in found.blocks],
        "memories": {
            "kinds": found.memories,
            "area_um2": found.memory_area,
            "assumed": asdict(found.memory),
        },
        "timing": _timing(found),
        "opensta": asdict(found.opensta) if found.opensta is not None else None,
        "power_estimate": {**asdict(found.power), "total": found.power.total, "unit": "mW"},
        "layout": asdict(found.layout) if found.layout is not None else None,
        "pictures": list(found.pictures),
        "missing": {name: {"gives": a, "install": b} for name, (a, b) in found.missing.items()},
        "failed": found.failed,
        "seconds": found.seconds,
        "sign_off": False,
        "note": NOT_SIGNED_OFF,
    }


def _timing(found: Synthesis) -> dict[str, Any]:
    return {
        **asdict(found.path),
        "period": found.path.period,
        "unit": "ns",
        "megahertz": found.megahertz,
        "clock_megahertz": found.parameters.clock,
        "meets": found.meets,
        "ignored": "wires and the clock's tree",
    }


def facts(found: Synthesis) -> list[tuple[str, str]]:
    """The main numbers, a line each."""
    p, path, yosys = found.parameters, found.path, found.yosys_area / 1e6
    rows = [
        ("part", f"{found.part} of {p.name}: {p.rows} x {p.columns} {p.element}, {p.dataflow}"),
        ("cells", f"{found.cells:,} of {found.library}, {found.buffers:,} of them buffers"),
        (
            "area",
            f"{found.area / 1e6:.4f} mm2; Yosys {found.yosys} says {yosys:.4f}",
        ),
        ("gates", f"{found.gates:,.0f} NANDs of two inputs would have that area"),
    ]
    if found.memories:
        kinds = ", ".join(f"{n} of {k.split('_')[-1]}" for k, n in found.memories.items())
        rows.append(("memories", f"{kinds} bits; {found.memory_area / 1e6:.4f} mm2 (assumed)"))
    rows.append(("period", f"{path.period:.3f} ns, {found.megahertz:.1f} MHz, without wires"))
    if found.opensta is not None:
        apart = 100 * (path.period / found.opensta.period - 1)
        rows.append(("OpenSTA", f"{found.opensta.period:.3f} ns; ours differs by {apart:+.4f}%"))
    verdict = "met" if found.meets else "not met"
    rows.append(("clock", f"{p.clock:g} MHz of the parameters: {verdict} in these cells"))
    w = found.power
    parts = f"{w.switching:.1f} loads, {w.internal:.1f} in cells, {w.leakage:.3f} leak"
    at = f"at {w.megahertz:.1f} MHz and {w.activity:g} toggles of a net in a cycle"
    rows.append(("power", f"estimate: {w.total:.1f} mW ({parts}) {at}"))
    if found.opensta is not None and found.opensta.milliwatts is not None:
        rows.append(("", f"OpenSTA's estimate: {found.opensta.milliwatts:.1f} mW"))
    if found.layout is not None:
        made = found.layout
        speed = f", {made.megahertz:.0f} MHz by qflow's timer" if made.megahertz else ""
        size = f"{made.width:.0f} x {made.height:.0f} um, {made.wire:.0f} mm of wire"
        what = f"{made.rows} x {made.columns} mesh: {made.cells:,} cells in {size}{speed}"
        rows.append(("layout", what))
    times = ", ".join(f"{name} {seconds:.0f}" for name, seconds in found.seconds.items())
    rows.append(("seconds", times))
    rows += [(name, f"failed: {' '.join(said.split())}") for name, said in found.failed.items()]
    return rows


def table(found: Synthesis) -> list[tuple[str, ...]]:
    """The blocks, one row each, with a head."""
    rows: list[tuple[str, ...]] = [
        ("block", "copies", "cells each", "um2 each", "mm2 in all", "share", "ns")
    ]
    for b in found.blocks:
        mine = b.count * b.area
        share = f"{100 * mine / found.area:.1f}%" if found.area else "-"
        period = f"{b.period:.2f}" if b.period is not None else "-"
        cells = (b.name, str(b.count), f"{b.cells:,}", f"{b.area:,.0f}")
        rows.append((*cells, f"{mine / 1e6:.4f}", share, period))
    return rows


def page(found: Synthesis, folder: Path) -> str:
    """One HTML page with the pictures inside."""
    lines = "".join(f"<tr><th>{_e(a)}<td>{_e(b)}" for a, b in facts(found))
    head, *rows = table(found)
    blocks = "<tr>" + "".join(f"<th>{_e(x)}" for x in head)
    for row, b in zip(rows, found.blocks):
        width = 100 * b.count * b.area / found.area if found.area else 0
        bar = f'<div class=bar style="width:{width:.1f}%"></div>'
        blocks += "<tr>" + "".join(f"<td>{_e(x)}" for x in row) + f"<td class=bars>{bar}"
    steps = "".join(
        f"<tr><td>{s.arrival:.3f}<td>{s.delay:.3f}<td>{s.edge}<td>{_e(s.kind)}<td>{_e(s.cell)}"
        for s in found.path.steps
    )
    missing = "".join(
        f"<li>{_e(name)} is not installed: it gives {_e(gives)} (<code>{_e(how)}</code>)"
        for name, (gives, how) in found.missing.items()
    )
    pictures = "".join(_picture(folder / name) for name in found.pictures)
    title = f"Synthesis of {found.parameters.name}"
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{_e(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem;
  color: #1a1a1a; background: #fff }}
table {{ border-collapse: collapse; margin: 1rem 0 }}
th, td {{ text-align: left; padding: .15rem .8rem .15rem 0; vertical-align: top }}
.numbers td:not(:first-child) {{ text-align: right; font-variant-numeric: tabular-nums }}
.bars {{ width: 14rem }} .bar {{ background: #2c6fbb; height: .8rem }}
.note {{ background: #fff4d6; padding: .6rem 1rem; border-left: 4px solid #d9a400 }}
img {{ max-width: 100%; border: 1px solid #ccc }} details {{ margin: 1rem 0 }}
</style>
<h1>{_e(title)}</h1>
<p class="note">{_e(NOT_SIGNED_OFF)}</p>
<table>{lines}</table>
<h2>Blocks</h2><table class="numbers">{blocks}</table>
<h2>Slowest path</h2>
<p>{_e(found.path.start)} to {_e(found.path.end)}: {len(found.path.steps)} cells,
{found.path.arrival:.3f} ns and {found.path.setup:.3f} ns of setup.</p>
<details><summary>Every cell of it</summary>
<table class="numbers"><tr><th>ns<th>delay<th>edge<th>cell<th>where{steps}</table></details>
{pictures}
{"<h2>Not here</h2><ul>" + missing + "</ul>" if missing else ""}
</html>
"""


def _e(text: object) -> str:
    return html.escape(str(text))


def _picture(path: Path) -> str:
    kind = "svg+xml" if path.suffix == ".svg" else "png"
    data = base64.b64encode(path.read_bytes()).decode()
    name = "Layout of a small mesh" if path.suffix == ".png" else "Schematic of one multiplier"
    return f'<h2>{name}</h2><img alt="{name}" src="data:image/{kind};base64,{data}">'


__all__ = ["NOT_SIGNED_OFF", "facts", "page", "record", "table"]

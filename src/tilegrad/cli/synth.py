"""The command `tilegrad chip synth`: area, timing and power of a chip's SystemVerilog.

Invariant: text, JSON and page show the same numbers; what is an estimate says so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from . import options
from .progress import Bars
from .terminal import columns, put, status


def synth(
    parameters: Annotated[
        str, typer.Argument(help="A parameter file (.toml, .json), or a preset: edge, 16x16 ...")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="A folder for netlist, report and pictures; else NAME-synth.", show_default=False
        ),
    ] = None,
    part: Annotated[str, typer.Option(help="chip, mesh, or pe: one multiplier.")] = "chip",
    liberty: Annotated[
        Path | None, typer.Option(help="A cell library; else OSU018 of Debian.", show_default=False)
    ] = None,
    activity: Annotated[
        float, typer.Option(help="Toggles of a net in a cycle, for the power estimate.", min=0.0)
    ] = 0.1,
    layout: Annotated[
        bool, typer.Option("--layout", help="Also place and route a 2 x 2 mesh (minutes).")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Map a chip to cells with Yosys; report area, timing, power, pictures. No sign-off."""
    from ..chip.synth.flow import synthesise
    from ..chip.synth.report import NOT_SIGNED_OFF, facts, page, record, table
    from ..targets.npu.parameters import chip_of

    chip = chip_of(parameters)
    out = out or Path(f"{Path(parameters).stem}-synth")
    with Bars() as bars:
        found = synthesise(
            chip, out, part, liberty, activity=activity, layout=layout, report=bars.stage
        )
    made = json.dumps(record(found))
    text = "\n".join(
        [columns(facts(found)), "", columns(table(found), right=range(1, 7)), "", NOT_SIGNED_OFF]
    )
    for name, content in (
        ("report.json", made),
        ("report.txt", text),
        ("index.html", page(found, out)),
    ):
        (out / name).write_text(content + "\n", encoding="utf-8")
    put(made if as_json else text)
    for name, (gives, how) in found.missing.items():
        status(f"{name} is not installed: it gives {gives} ({how})")
    status(f"written: {out / 'index.html'}")

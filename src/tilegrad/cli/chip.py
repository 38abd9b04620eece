"""The command `tilegrad chip`: compare chips by what they make of a model, open the page; map a
model and try designs (`chip_explore.py`), write a design's SystemVerilog, synthesise it
(`synth.py`).

Invariant: every number shown is predicted and says so; a chip without a figure that a column needs
shows a dash there, and the JSON has null.
"""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.errors import UserError
from ..core.place import check_place
from . import options
from .chip_explore import explore, map_model, put_table, save, table_console
from .flags import App
from .progress import Bars
from .synth import synth
from .terminal import put

if TYPE_CHECKING:
    from ..chip.catalogue import Chip, Prediction, Sizes

app = App(help="What chips, and arrays under design, make of a model.", no_args_is_help=True)
app.command("map")(map_model)
app.command("explore")(explore)
app.command("synth")(synth)
DEFAULT = "a100,h100,h200,b200,mi300x,tpu-v5e,tpu-v5p,tpu-v6e,trainium2"


@app.callback()
def default() -> None:
    """Commands about chips."""


@app.command("compare")
def compare(
    model: Annotated[str, typer.Argument(help="llama-3-8b, resnet-50, bert-base, ...")],
    chips: Annotated[
        str, typer.Option(help="Names or files (.toml, .json), with commas between.")
    ] = DEFAULT,
    batch: Annotated[int, typer.Option(help="Requests of a step.", min=1)] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens of a prompt.", min=1)] = 1024,
    context: Annotated[int, typer.Option(help="Keys of each request when decoding.", min=1)] = 1024,
    dtype: Annotated[
        str, typer.Option(help="bf16, fp8, int8, fp4: of weights and inputs.")
    ] = "bf16",
    count: Annotated[
        int | None, typer.Option(help="Chips; else the power of two that holds it.", min=1)
    ] = None,
    price: Annotated[
        list[str] | None, typer.Option(help="NAME=DOLLARS an hour, instead of the table's.")
    ] = None,
    ops: Annotated[bool, typer.Option("--ops", help="Also the roofline of each product.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a plot as SVG.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write a page, one HTML file.")] = None,
    as_json: options.Json = False,
) -> None:
    """Predict tokens a second and their cost for prefill, decode and training on chips."""
    from ..chip.catalogue import Sizes, chip
    from ..chip.catalogue.picture import page as paged
    from ..chip.catalogue.picture import plotted

    for path in (plot, page):
        if path is not None:
            check_place(path, "chip compare")
    sizes = Sizes(batch, tokens, context, dtype)
    names = [name.strip() for name in chips.split(",") if name.strip()]
    if not names:
        raise UserError("no chips", op="chip", expected="--chips NAME,NAME", got=repr(chips))
    given = _prices(price or [], names)
    known = {name: chip(name) for name in names}
    found = []
    with Bars() as bars:
        for done, (name, one) in enumerate(known.items()):
            bars.stage(f"predicting {model}", done, len(names), name)
            one = one.priced(given[name]) if name in given else one
            found.append((one, _phases(model, one, sizes, count)))
    if plot is not None:
        save(plot, plotted(model, sizes, found))
    if page is not None:
        save(page, paged(model, sizes, found))
    if as_json:
        put(json.dumps(_record(model, sizes, found, ops)))
        return
    _show(model, sizes, found, ops)


def _phases(model: str, chip: Chip, sizes: Sizes, count: int | None) -> list[Prediction]:
    from ..chip.catalogue import PHASES, predict
    from ..chip.networks import DECODERS

    phases = PHASES if model in DECODERS else ("prefill", "training")
    return [predict(model, chip, phase, sizes, count) for phase in phases]


def _record(model: str, sizes: Sizes, found: list[Any], ops: bool) -> dict[str, Any]:
    """All of it as plain data, with the figures that went in."""
    rows = []
    for chip, predictions in found:
        phases = {p.phase: asdict(p) for p in predictions}
        for phase in phases.values():
            phase.pop("phase"), phase.pop("chip")
            if not ops:
                phase.pop("rows")
        figures = {field: asdict(figure) for field, figure in chip.figures.items()}
        rows.append({"chip": chip.name, "title": chip.title, "figures": figures, **phases})
    return {"model": model, "sizes": asdict(sizes), "predicted": True, "chips": rows}


def _show(model: str, sizes: Sizes, found: list[Any], ops: bool) -> None:
    from rich.table import Table

    from ..chip.catalogue.picture import cells, columns, notes, titled

    console = table_console()
    console.print(titled(model, sizes, found), soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns(found)):
        table.add_column(column, justify="left" if number < 4 else "right", no_wrap=True)
    for row in cells(found):
        table.add_row(*row)
    put_table(table)
    for note in notes(found):
        console.print(note)
    if ops:
        _show_ops(console, found)


def _prices(given: list[str], names: list[str]) -> dict[str, float]:
    """NAME=DOLLARS of the command line."""
    found = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            found[name.strip()] = float(value)
        except ValueError:
            raise UserError(
                f"bad --price {text}", op="chip", expected="NAME=DOLLARS an hour", got=text
            ) from None
        if name.strip() not in names:
            raise UserError(
                f"--price for {name.strip()}, which is not compared",
                op="chip",
                expected=f"one of {', '.join(names)}",
            )
    return found


def _show_ops(console: Any, found: list[Any]) -> None:
    from rich.table import Table

    from ..chip.catalogue.picture import number

    for chip, predictions in found:
        for p in predictions:
            console.print(f"\n{chip.name}, {p.phase}")
            table = Table(box=None)
            for column in ("product", "times", "FLOP/byte", "bound", "us each", "%"):
                table.add_column(column, justify="left" if column == "product" else "right")
            for row in sorted(p.rows, key=lambda row: -row.seconds):
                each = 1e6 * row.seconds / row.count
                share = 100 * row.seconds / p.seconds
                intensity = number(row.flops / row.moved)
                cells = (row.name, str(row.count), intensity, row.bound)
                table.add_row(*cells, number(each), f"{share:.1f}")
            put_table(table)


# ---- its SystemVerilog -----------------------------------------------------------------------


@app.command("rtl")
def rtl(
    parameters: Annotated[
        str, typer.Argument(help="A parameter file (.toml, .json), or a preset: edge, 16x16 ...")
    ],
    out: Annotated[
        Path | None, typer.Option(help="A folder for the files; else NAME-rtl.", show_default=False)
    ] = None,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Also two multipliers as a Tiny Tapeout project.")
    ] = False,
) -> None:
    """Write the SystemVerilog of a chip, in the order tools read its files."""
    from ..chip.rtl.emit import write
    from ..chip.rtl.tiny import write_tiny
    from ..targets.npu.parameters import chip_of

    chip = chip_of(parameters)
    folder = out or Path(f"{Path(parameters).stem}-rtl")
    try:
        made = write(chip, folder)
        if tiny:
            made += [folder / "tiny" / "info.yaml", *write_tiny(folder / "tiny")]
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror}", op="chip") from None
    put("\n".join(map(str, made)))


# ---- the page -------------------------------------------------------------------------------


@app.command("serve")
def serve_page(
    chip: Annotated[
        str, typer.Option(help="Where to begin: edge, 16x16, ... or a file (.toml, .json).")
    ] = "16x16",
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8420,
) -> None:
    """Open a page at 127.0.0.1: sliders for an NPU, and what it makes of a network."""
    from ..chip.page import serve
    from ..targets.npu.parameters import chip_of

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    server = serve(port, chip_of(chip))
    put(f"http://127.0.0.1:{server.server_address[1]}/  (Ctrl-C ends it)")
    try:
        server.serve_forever()
    finally:
        server.server_close()

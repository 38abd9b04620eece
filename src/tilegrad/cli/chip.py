"""The command `tilegrad chip`: compare chips by what they make of a model; map one onto an array.

Invariant: every number shown is predicted and says so; a chip without a figure that a column needs
shows a dash there, and the JSON has null.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options
from .flags import App
from .terminal import put

if TYPE_CHECKING:
    from ..chip.catalogue import Chip, Prediction, Sizes
    from ..chip.mapped import Mapped

app = App(help="What chips, and arrays under design, make of a model.", no_args_is_help=True)
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
    count: Annotated[int | None, typer.Option(help="Chips; else as few as hold it.", min=1)] = None,
    ops: Annotated[bool, typer.Option("--ops", help="Also the roofline of each product.")] = False,
    as_json: options.Json = False,
) -> None:
    """Predict tokens a second and their cost for prefill, decode and training on chips."""
    from ..chip.catalogue import Sizes, chip

    sizes = Sizes(batch, tokens, context, dtype)
    found = [(c, _phases(model, c, sizes, count)) for c in map(chip, chips.split(","))]
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
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    pictures = len(found[0][1]) == 2
    unit = "inputs" if pictures else "tokens"
    title = f"{model}, {sizes.dtype}, batch {sizes.batch}: predicted"
    if not pictures:
        title += f"; prompts of {sizes.tokens}, decoding at {sizes.context} keys"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("chip", "phase", "bound", "chips", f"{unit}/s", f"$/M {unit}", "J each"):
        left = column in ("chip", "phase", "bound")
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    for chip, predictions in found:
        for p in predictions:
            marks = ("*" if p.link_seconds is None else "") + ("^" if p.sparse else "")
            phase = "forward" if pictures and p.phase == "prefill" else p.phase
            numbers = (p.tokens_per_second, p.dollars_per_million, p.joules_per_token)
            cells = (chip.name, phase, p.bound + marks, str(p.chips))
            table.add_row(*cells, *map(_number, numbers))
    console.print(table)
    every = [p for _, predictions in found for p in predictions]
    if any(p.link_seconds is None for p in every):
        console.print("* without the time of links between chips: no figure is known")
    if any(p.sparse for p in every):
        console.print("^ at a peak that is published for sparse values alone")
    if ops:
        _show_ops(console, found)


def _show_ops(console: Any, found: list[Any]) -> None:
    from rich.table import Table

    for chip, predictions in found:
        for p in predictions:
            table = Table(title=f"{chip.name}, {p.phase}", title_justify="left", box=None)
            for column in ("product", "times", "FLOP/byte", "bound", "us each", "%"):
                table.add_column(column, justify="left" if column == "product" else "right")
            for row in sorted(p.rows, key=lambda row: -row.seconds):
                each = 1e6 * row.seconds / row.count
                share = 100 * row.seconds / p.seconds
                intensity = _number(row.flops / row.moved)
                cells = (row.name, str(row.count), intensity, row.bound)
                table.add_row(*cells, _number(each), f"{share:.1f}")
            console.print(table)


def _number(value: float | None) -> str:
    """Three digits that matter; a dash for what is not known."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# ---- an array under design ------------------------------------------------------------------


@app.command("map")
def map_model(
    model: Annotated[
        str, typer.Argument(help="resnet-50, mobilenet-v1, bert-base, llama-3-8b ...")
    ],
    array: Annotated[str, typer.Option(help="A parameter file: .toml or .json.")],
    dataflow: Annotated[str, typer.Option(help="any, ws, os, is, rs, nlr, nvdla.")] = "any",
    objective: Annotated[str, typer.Option(help="energy, cycles, or their product.")] = "product",
    batch: Annotated[int, typer.Option(help="Inputs or requests of a run.", min=1)] = 1,
    bits: Annotated[int, typer.Option(help="Bits of an element.", min=1, max=64)] = 8,
    seed: Annotated[int, typer.Option(help="Where the random numbers start.")] = 0,
    as_json: options.Json = False,
) -> None:
    """Find good Mappings of a model's products onto an array: energy, cycles, area."""
    from ..chip.explore import load
    from ..chip.mapped import map_network
    from ..chip.networks import network

    accelerator = load(array)
    work = network(model, batch=batch).with_bits(bits)
    found = map_network(work, accelerator, dataflow, objective=objective, seed=seed)
    if as_json:
        put(json.dumps(_mapped(found)))
    else:
        _show_mapped(found)


def _mapped(found: Mapped) -> dict[str, Any]:
    """All of it as plain data."""
    rows = [
        {
            "sizes": f.problem.sizes,
            "count": f.problem.count,
            "mapping": str(f.mapping),
            "energy_pj": f.energy,
            "cycles": f.cycles,
            "utilisation": f.utilisation,
            "bound": f.cost.bound_by(),
            "exhaustive": f.exhaustive,
        }
        for f in found.found
    ]
    return {
        "model": found.workload.name,
        "array": found.accelerator.name,
        "predicted": True,
        "energy_pj": found.energy,
        "parts_pj": found.parts(),
        "cycles": found.cycles,
        "seconds": found.seconds,
        "utilisation": found.utilisation,
        "area_mm2": found.accelerator.area(),
        "mappings_seen": found.seen,
        "products": rows,
    }


def _show_mapped(found: Mapped) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    title = f"{found.workload.name} on {found.accelerator.name}: predicted"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("product", "times", "uJ", "cycles", "busy", "bound", "Mapping"):
        left = column in ("product", "bound", "Mapping")
        table.add_column(column, justify="left" if left else "right", overflow="fold")
    for f in found.found:
        sizes = " ".join(f"{loop}{size}" for loop, size in f.problem.sizes.items() if size > 1)
        numbers = (_number(f.energy / 1e6), _number(f.cycles), f"{100 * f.utilisation:.0f}%")
        cells = (sizes, str(f.problem.count), *numbers, f.cost.bound_by(), str(f.mapping))
        table.add_row(*cells)
    console.print(table)
    parts = ", ".join(f"{k} {_number(v / 1e6)}" for k, v in found.parts().items() if v)
    console.print(f"energy: {_number(found.energy / 1e6)} uJ ({parts})")
    console.print(
        f"time: {_number(found.cycles)} cycles, {_number(1e3 * found.seconds)} ms, "
        f"{100 * found.utilisation:.0f}% busy; {found.seen:,} Mappings seen"
    )
    if found.accelerator.area():
        console.print(f"area: {_number(found.accelerator.area())} mm2")


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
    from ..targets.npu.parameters import Parameters, preset

    file = chip.endswith((".toml", ".json"))
    server = serve(port, Parameters.load(chip) if file else preset(chip))
    put(f"http://127.0.0.1:{server.server_address[1]}/  (Ctrl-C ends it)")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()

"""The command `tilegrad chip`: compare chips by what they make of a model.

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

app = App(help="Chips as data: what each makes of a model.", no_args_is_help=True)
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

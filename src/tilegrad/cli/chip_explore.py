"""The commands `tilegrad chip map` and `explore`: a model on an array or on many designs of one.

Invariant: every number shown is predicted and says so; how far a search is goes to stderr.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.errors import UserError
from ..core.place import check_place, folder_made
from . import options
from .progress import Bars
from .terminal import is_terminal, put, stdout

if TYPE_CHECKING:
    from ..chip.mapped import Mapped
    from ..chip.pareto import Explored
    from ..chip.together import Together

WIDE = 240  # columns where no terminal says


def table_console() -> Any:
    """Where tables go; a file or a pipe has room for their whole rows."""
    from rich.console import Console

    out = stdout()
    return Console(file=out, highlight=False, width=None if is_terminal(out) else WIDE)


def put_table(table: Any) -> None:
    """Print a table with its rows whole: a narrower terminal wraps them, and no number is cut."""
    from rich.console import Console

    Console(file=stdout(), highlight=False, width=WIDE).print(table)


def save(path: Path, text: str) -> None:
    """Write a file."""
    with folder_made(path, "chip"):
        path.write_text(text, encoding="utf-8")


# ---- an array under design ------------------------------------------------------------------


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
    fuse: Annotated[
        str | None, typer.Option(help="A Level in which results stay for the next layer.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Find good Mappings of a model's products onto an array: energy, cycles, area."""
    from ..chip.explore import load
    from ..chip.mapped import map_network
    from ..chip.networks import network

    accelerator = load(array)
    work = network(model, batch=batch).with_bits(bits)
    if fuse is not None:
        _map_together(work, accelerator, fuse, dataflow, objective, seed, as_json)
        return
    with Bars() as bars:
        found = map_network(
            work,
            accelerator,
            dataflow,
            objective=objective,
            seed=seed,
            report=lambda done, total, note: bars.stage("mapping", done, total, note),
        )
    if as_json:
        put(json.dumps(_mapped(found)))
    else:
        _show_mapped(found)


def _map_together(
    work: Any, accelerator: Any, at: str, dataflow: str, objective: str, seed: int, as_json: bool
) -> None:
    """Layers that run together where that costs less."""
    from ..chip.together import map_together

    names = [level.name for level in accelerator.levels[1:]]
    if at not in names:
        raise UserError("bad --fuse", op="chip", expected=", ".join(names), got=at)
    with Bars() as bars:
        found = map_together(
            work,
            accelerator,
            at,
            dataflow,
            lambda done, total, note: bars.stage("mapping", done, total, note),
            objective=objective,
            seed=seed,
            rounds=2,
            samples=512,
        )
    _show_together(found, at, as_json)


def _show_together(found: Together, at: str, as_json: bool) -> None:
    from rich.table import Table

    from ..chip.catalogue.picture import number
    from ..chip.explore.fuse import Fused
    from ..chip.mapped import named

    work, accelerator = found.workload, found.accelerator
    problems = found.workload.problems
    rows: list[dict[str, Any]] = [
        {
            "layers": [named(problems[n]) for n in run],
            "count": count,
            "energy_pj": made.energy,
            "cycles": made.cycles,
            "parts": made.fusion.parts if isinstance(made, Fused) else None,
            "weights_stay": bool(made.fusion.resident) if isinstance(made, Fused) else None,
        }
        for run, count, made in found.runs
    ]
    if as_json:
        totals = {"energy_pj": found.energy, "alone_pj": found.alone, "cycles": found.cycles}
        put(json.dumps({"model": work.name, "predicted": True, **totals, "runs": rows}))
        return
    console = table_console()
    title = f"{work.name} on {accelerator.name}, results kept in {at}: predicted"
    console.print(title, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for column in ("layers", "times", "uJ", "cycles", "parts", "weights"):
        table.add_column(column, justify="left" if column == "layers" else "right", overflow="fold")
    for row in rows:
        stay = {None: "", True: "stay", False: "come again"}[row["weights_stay"]]
        numbers = (number(row["energy_pj"] / 1e6), number(row["cycles"]))
        cells = (" -> ".join(row["layers"]), str(row["count"]), *numbers, str(row["parts"] or ""))
        table.add_row(*cells, stay)
    put_table(table)
    saved = 100 * (1 - found.energy / found.alone)
    console.print(
        f"energy: {number(found.energy / 1e6)} uJ, {saved:.0f}% less than each layer alone; "
        f"time: {number(found.cycles)} cycles, {number(1e3 * found.seconds)} ms"
    )


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
    from rich.table import Table

    from ..chip.catalogue.picture import number
    from ..chip.mapped import named

    console = table_console()
    title = f"{found.workload.name} on {found.accelerator.name}: predicted"
    console.print(title, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for column in ("product", "times", "uJ", "cycles", "busy", "bound", "Mapping"):
        left = column in ("product", "bound", "Mapping")
        table.add_column(column, justify="left" if left else "right", overflow="fold")
    for f in found.found:
        numbers = (number(f.energy / 1e6), number(f.cycles), f"{100 * f.utilisation:.0f}%")
        cells = (
            named(f.problem),
            str(f.problem.count),
            *numbers,
            f.cost.bound_by(),
            str(f.mapping),
        )
        table.add_row(*cells)
    put_table(table)
    parts = ", ".join(f"{k} {number(v / 1e6)}" for k, v in found.parts().items() if v)
    console.print(f"energy: {number(found.energy / 1e6)} uJ ({parts})")
    console.print(
        f"time: {number(found.cycles)} cycles, {number(1e3 * found.seconds)} ms, "
        f"{100 * found.utilisation:.0f}% busy; {found.seen:,} Mappings seen"
    )
    if found.accelerator.area():
        console.print(f"area: {number(found.accelerator.area())} mm2")


# ---- many designs ---------------------------------------------------------------------------

VARY = ("rows=8,16,32,64", "columns=8,16,32,64", "dataflow=ws,os,is")


def explore(
    model: Annotated[str, typer.Argument(help="resnet-50, mobilenet-v1, bert-base ...")],
    chip: Annotated[
        str, typer.Option(help="The NPU to begin with: edge, 16x16, ... or a file.")
    ] = "16x16",
    array: Annotated[
        str | None,
        typer.Option(help="An array of Levels instead (.toml, .json), by a search of Mappings."),
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(help="FIELD=VALUE,VALUE...; of a Level of an array, LEVEL.FIELD."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Inputs or requests of a run.", min=1)] = 1,
    every: Annotated[bool, typer.Option("--all", help="Show all designs.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a plot as SVG.")] = None,
    as_json: options.Json = False,
) -> None:
    """Try many designs: which are best by energy, time and area (a Pareto front)."""
    from ..chip.networks import network
    from ..chip.pareto import explore_array, explore_npu, plotted
    from ..core.parameter_file import read_parameters
    from ..targets.npu.parameters import chip_of

    if plot is not None:
        check_place(plot, "chip explore")
    default = ["dataflow=ws,os,is"] if array else list(VARY)
    fields = dict(_varied(text) for text in vary or default)
    work = network(model, batch=batch)
    with Bars() as bars:

        def report(done: int, total: int, note: str) -> None:
            bars.stage("exploring", done, total, note)

        if array is not None:
            table, name = read_parameters(array), Path(array).stem
            given = {"rounds": 2, "samples": 512}
            found = explore_array(table, name, work.with_bits(8), fields, report, **given)
        else:
            name = chip
            found = explore_npu(chip_of(chip), work, fields, report)
    title = f"{model} on designs from {name}: predicted"
    if any(p.doubled for p in found.points):
        title += "; weights of half the bits, two a step"
    if plot is not None:
        save(plot, plotted(found, title))
    if as_json:
        record = asdict(found) | {"front": [asdict(p) for p in found.front()], "predicted": True}
        put(json.dumps({"model": model, **record}))
        return
    _show_front(found, title, every)


def _varied(text: str) -> tuple[str, list[Any]]:
    """FIELD=VALUE,VALUE... of the command line: numbers where they are, else words."""
    field, _, values = text.partition("=")
    if not field or not values:
        raise UserError(f"bad --vary {text}", op="chip", expected="FIELD=VALUE,VALUE ...", got=text)
    found: list[Any] = []
    for value in values.split(","):
        try:
            found.append(json.loads(value))
        except ValueError:
            found.append(value.strip())
    return field.strip(), found


def _show_front(found: Explored, title: str, every: bool) -> None:
    from rich.table import Table

    from ..chip.catalogue.picture import number

    console = table_console()
    best = found.front()
    console.print(title, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    names = list(found.points[0].choice)
    for column in (*names, "ms", "mJ", "mm2", *(["best"] if every else [])):
        table.add_column(column, justify="right", no_wrap=True)
    shown = sorted(found.points, key=lambda p: p.seconds) if every else best
    for p in shown:
        values = [number(v) for v in (1e3 * p.seconds, 1e3 * p.energy, p.area)]
        last = ["yes" if p in best else ""] if every else []
        table.add_row(*(str(p.choice[n]) for n in names), *values, *last)
    put_table(table)
    console.print(f"{len(best)} of {len(found.points)} designs are beaten by none in all three")
    for choice, why in found.refused[:3]:
        console.print(f"left out: {', '.join(f'{k} {v}' for k, v in choice.items())}: {why}")
    if len(found.refused) > 3:
        console.print(f"... {len(found.refused)} left out in all")


__all__ = ["explore", "map_model", "put_table", "save", "table_console"]

"""All commands of `tilegrad`: run, chat, serve, batch, info, quantize, bench, models, demo, doctor,
explain, compile, tune, chip, cache.

Invariant: a command imports what it needs when it runs, so that others start quickly.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Annotated

import typer

from .. import __version__
from . import (
    batch,
    bench,
    bench_serve,
    chat,
    chip,
    compile,
    explain,
    info,
    models,
    quantize,
    run,
    serve,
)
from .flags import App, Commands, WithDefault
from .progress import Bars
from .terminal import INTERRUPTED, put, stdout

app = App(
    cls=Commands,
    help="Tensor programs compiled to tiles and to machine code.",
    no_args_is_help=True,
    add_completion=False,
)
app.command("run")(run.run)
app.command("chat")(chat.chat)
app.command("serve")(serve.serve)
app.command("batch")(batch.batch)
app.command("info")(info.info)
app.command("quantize")(quantize.quantize)
bench_app = App(
    cls=WithDefault,
    help="Measure a model here (tilegrad bench MODEL), or an endpoint under load (serve).",
    no_args_is_help=True,
)
bench_app.command("model")(bench.bench)
bench_app.command("serve")(bench_serve.bench_serve)
app.add_typer(bench_app, name="bench")
app.command("explain")(explain.explain)
app.command("compile")(compile.compile_)
app.add_typer(models.app, name="models")
app.add_typer(chip.app, name="chip")
cache_app = App(help="The folder of compiled programs.", invoke_without_command=True)
app.add_typer(cache_app, name="cache")
tune_app = App(
    help="Measure Plans of the library's kernels on this machine's GPU.", no_args_is_help=True
)
app.add_typer(tune_app, name="tune")


def show_version(asked: bool) -> None:
    """Say which version this is, where that is asked."""
    if asked:
        typer.echo(f"tilegrad {__version__} (Python {platform.python_version()})")
        raise typer.Exit


@app.callback()
def all_commands(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=show_version,
            is_eager=True,
            help="Show the version and exit.",
        ),
    ] = False,
) -> None:
    """Tensor programs compiled to tiles and to machine code."""


@app.command()
def demo(
    seconds: Annotated[float, typer.Option(help="How long to train.")] = 60.0,
    steps: Annotated[int | None, typer.Option(help="How many steps instead.")] = None,
    seed: Annotated[int, typer.Option(help="Where the random numbers start.")] = 0,
) -> None:
    """Train a small character-level GPT on Shakespeare and print what it writes."""
    from ..train.demo import run_demo

    with Bars() as bars:
        made = run_demo(steps, seconds, seed, bars.put, bars.stage)
    if made.history.stopped:
        raise typer.Exit(INTERRUPTED)


@app.command()
def doctor() -> None:
    """Show what this machine has, what is missing and how to get it; run a self-test."""
    from rich.console import Console

    from .doctor import examine

    if not examine(Console(file=stdout())):
        raise typer.Exit(1)


@tune_app.callback()
def tune_default() -> None:
    """Kernels have a command each."""


@tune_app.command("matmul")
def tune_matmul(
    shape: Annotated[list[str] | None, typer.Option(help="MxNxK; may be repeated.")] = None,
    layers: Annotated[
        list[str] | None,
        typer.Option(help="All products of a model: llama3-8b, llama3-70b; may be repeated."),
    ] = None,
    sizes: Annotated[
        str, typer.Option(help="Rows (M) for --layers.")
    ] = "1,8,32,64,128,256,512,2048,8192",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, or float32 as tf32.")] = "bfloat16",
    layout: Annotated[
        str, typer.Option(help="Axes along which a and b are dense: kk, kn, mk, mn.")
    ] = "kk",
    device: Annotated[str, typer.Option(help="Which GPU.")] = "cuda:0",
    budget: Annotated[float, typer.Option(help="Seconds, for all problems together.")] = 60.0,
    out: Annotated[
        Path | None, typer.Option(help="A file for the table, instead of the cache folder.")
    ] = None,
    trials: Annotated[Path | None, typer.Option(help="The file of Trials, to go on from.")] = None,
    commit: Annotated[str, typer.Option(help="The commit, where git cannot tell.")] = "",
) -> None:
    """Find the fastest Plans of matrix products and keep them in a PlanTable."""
    from .tune import run, shapes_of

    found = shapes_of(shape or [], layers or [], sizes)
    with Bars() as bars:
        run(
            found,
            dtype,
            device,
            budget,
            layout,
            out,
            trials,
            commit,
            bars.put,
            lambda name, done: bars.stage("tuning", done, len(found), name),
        )


@cache_app.callback()
def cache_default(context: typer.Context) -> None:
    """Show the cache, if nothing else is asked for."""
    if context.invoked_subcommand is None:
        cache_show()


@cache_app.command("show")
def cache_show() -> None:
    """Show where the cache is and how full."""
    from .doctor import cache_line

    put(cache_line())


@cache_app.command("clear")
def cache_clear() -> None:
    """Delete all compiled programs."""
    from ..runtime.store import default_store

    store = default_store()
    size = store.size()
    store.clear()
    put(f"freed {size / 2**20:.1f} MiB")


__all__ = ["app"]

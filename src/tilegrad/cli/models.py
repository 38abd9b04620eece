"""`tilegrad models`: which models are kept here, and taking one away.

Invariant: only files in tilegrad's own models folder are listed and removed; what Hugging Face
keeps is its own (`hf cache`).
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from ..core.errors import TilegradError
from . import options
from .flags import App
from .terminal import columns, put, size_text, status

app = App(help="Models kept on this machine.", invoke_without_command=True)


@app.callback()
def default(context: typer.Context, as_json: options.Json = False) -> None:
    """List the models, if nothing else is asked for."""
    if context.invoked_subcommand is None:
        show(as_json)


@app.command("list")
def show(as_json: options.Json = False) -> None:
    """List kept models and those that can be fetched by name."""
    records = found_models()
    if as_json:
        put(json.dumps(records))
        return
    rows = [("name", "size", "licence", "state")]
    rows += [
        (r["name"], size_text(r["bytes"]), r["licence"], r["path"] or "not fetched yet")
        for r in records
    ]
    put(columns(rows, right=[1]))


@app.command("remove")
def remove(name: Annotated[str, typer.Argument(help="The name that the list shows.")]) -> None:
    """Delete a kept model."""
    from ..exchange.fetch import remove_model

    gone = remove_model(name)
    status(f"{gone.name} is removed; {size_text(gone.bytes)} are free")


def found_models() -> list[dict[str, Any]]:
    """Kept models, then built-in ones that are not here yet."""
    from ..exchange.fetch import BUILT_IN, kept_models

    kept = kept_models()
    records = [
        {
            "name": m.name,
            "bytes": m.bytes,
            "licence": licence_of(m.name, str(m.path)),
            "path": str(m.path),
        }
        for m in kept
    ]
    here = {m.name for m in kept}
    records += [
        {"name": m.name, "bytes": m.bytes, "licence": m.licence, "path": None}
        for m in BUILT_IN.values()
        if m.name not in here
    ]
    return records


def licence_of(name: str, path: str) -> str:
    """A model's licence: as we know it, else as its file says."""
    from ..exchange.fetch import BUILT_IN
    from ..exchange.gguf import read_gguf

    if name in BUILT_IN:
        return BUILT_IN[name].licence
    try:
        return str(read_gguf(path).get("general.license", str, "unknown"))[:60]
    except TilegradError:
        return "unknown: the file cannot be read"

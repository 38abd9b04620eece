"""Parameter files of chips: TOML or JSON, read to plain tables.

Invariant: whatever is wrong with a file is a UserError that names the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import UserError


def read_parameters(path: str | Path) -> dict[str, Any]:
    """The tables of a parameter file, TOML (from Python 3.11 on, or with tomli) or JSON."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}", op="chip") from error
    try:
        if path.suffix == ".json":
            found = json.loads(text)
        else:
            found = _toml(text)
    except ValueError as error:  # of both parsers
        raise UserError(f"{path} is not {path.suffix[1:] or 'TOML'}: {error}", op="chip") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} has no fields", op="chip", expected="a table", got=found)
    return found


def _toml(text: str) -> Any:
    import importlib

    for name in ("tomllib", "tomli"):
        try:
            return importlib.import_module(name).loads(text)
        except ModuleNotFoundError:
            continue
    raise UserError(
        "this Python cannot read TOML",
        op="chip",
        hint="write the same fields as .json, install tomli, or use Python 3.11 or newer",
    )


__all__ = ["read_parameters"]

"""Parameter files of chips: TOML or JSON, read to plain tables and written as TOML.

Invariant: whatever is wrong with a file is a UserError that names the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import UserError


def read_parameters(path: str | Path) -> dict[str, Any]:
    """The tables of a parameter file, TOML (from Python 3.11 on, or with tomli) or JSON."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(f"cannot read {path}: {why}", op="chip") from error
    return parse_parameters(text, str(path))


def parse_parameters(text: str, name: str = "the text") -> dict[str, Any]:
    """The tables of the text of a file of such a name."""
    suffix = Path(name).suffix
    try:
        found = json.loads(text) if suffix == ".json" else _toml(text)
    except ValueError as error:  # of both parsers
        raise UserError(f"{name} is not {suffix[1:] or 'TOML'}: {error}", op="chip") from error
    if not isinstance(found, dict):
        raise UserError(f"{name} has no fields", op="chip", expected="a table", got=found)
    return found


def write_parameters(table: Mapping[str, Any]) -> str:
    """A table as TOML: numbers, text, truths and tables of those."""
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    lines = [f"{key} = {_value(value)}" for key, value in plain.items()]
    for key, value in table.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{key}]", *(f"{name} = {_value(one)}" for name, one in value.items())]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    """Strings and truths of TOML are those of JSON but for one character, floats Python's."""
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


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


__all__ = ["parse_parameters", "read_parameters", "write_parameters"]

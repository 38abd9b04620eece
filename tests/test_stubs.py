"""Stubs show type checkers and editors what arrives when the package runs.

Three things do: methods of `Tensor`, which the files of its folder attach when they are imported,
and the names of `tilegrad` and of `tilegrad.tile` that are imported when they are first asked for.
A stub says for each name which function of which file it is, so a signature and its docstring
stand in one place. `python tests/test_stubs.py` writes the stubs anew.
"""

from __future__ import annotations

import inspect
import json
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import tilegrad as tg
from tilegrad import tile
from tilegrad.core import dtype as dtypes
from tilegrad.tensor.tensor import Tensor

PACKAGE = Path(tg.__file__).parent
WRITES = "`python tests/test_stubs.py` writes this file; do not edit it by hand."
ORDER = "# ruff: noqa: I001, RUF022"
COMPARES = {"__eq__", "__ne__"}
COMPARES_TO_A_TENSOR = "  # type: ignore[override]"  # every other object compares to a bool
PLAIN = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty)


def home(value: Any) -> tuple[str, str] | None:
    """The file (without `tilegrad.`) and the name there of a function, or of one that it wraps."""
    module = sys.modules[value.__module__]
    names = [name for name, found in vars(module).items() if found is value]
    if names:
        own = getattr(value, "__name__", "")
        own = own if own in names else names[0]
        return module.__name__.removeprefix("tilegrad."), own
    wrapped = getattr(value, "__wrapped__", None)
    return None if wrapped is None else home(wrapped)


# ---- Tensor's methods -----------------------------------------------------------------------


def attached() -> dict[str, Callable[..., Any]]:
    """The functions that other files put on the class, by the method's name."""
    for file in pkgutil.iter_modules([str(PACKAGE / "tensor")], "tilegrad.tensor."):
        import_module(file.name)  # `autograd` puts its own in place of what loads it
    found = {}
    for name, value in vars(Tensor).items():
        written = getattr(value, "__qualname__", "").startswith("Tensor.")
        if inspect.isfunction(value) and not written:
            found[name] = value
    return found


def method_line(name: str, function: Callable[..., Any]) -> str:
    """The stub's line for one method."""
    found = home(function)
    if found is None or name in COMPARES:
        signature = inspect.signature(function)
        taken = list(signature.parameters.values())
        assert {(p.kind, p.default) for p in taken} == {PLAIN}, name
        shown = ", ".join(["self", *[f"{p.name}: {p.annotation}" for p in taken[1:]]])
        text = f"    def {name}({shown}) -> {signature.return_annotation}: ..."
        return text + (COMPARES_TO_A_TENSOR if name in COMPARES else "")
    return f"    {name} = _{found[0].removeprefix('tensor.')}.{found[1]}"


def methods() -> str:
    """The stub of a class that `Tensor` inherits from, for type checkers alone."""
    functions = dict(sorted(attached().items()))
    homes = [home(function) for function in functions.values()]
    files = sorted({found[0].removeprefix("tensor.") for found in homes if found is not None})
    return "\n".join(
        [
            f'"""The methods of `Tensor`, each a function of this folder.\n\n{WRITES}\n"""\n',
            "from typing import Any\n",
            *[f"from . import {name} as _{name}" for name in files],
            "from .tensor import Tensor\n",
            "class Methods:",
            *[method_line(name, function) for name, function in functions.items()],
            "",
        ]
    )


# ---- names that are imported when they are asked for -----------------------------------------


def names_of(package: ModuleType) -> Iterator[tuple[str, Any]]:
    """The public names of a package and what they are."""
    for name in dir(package):
        if not name.startswith("_"):
            yield name, getattr(package, name)


def export_line(package: ModuleType, name: str, value: Any) -> str:
    """The stub's line for one name of a package."""
    here = package.__name__.removeprefix("tilegrad").strip(".")
    if isinstance(value, dtypes.DType):
        found: tuple[str, str] | None = ("core.dtype", dtype_name(value))
    elif isinstance(value, ModuleType) and not callable(value):
        return f"from . import {name}"
    elif isinstance(value, ModuleType):
        found = ("tensor.creation", "tensor")
    elif isinstance(value, float):
        return f"\n{name}: float"
    else:
        found = home(value)
    if found is None:  # it is made from a row of a table
        return f'\ndef {name}(*values: Any) -> Any:\n    """{inspect.getdoc(value)}"""'
    file, own = found
    shown = own if own == name else f"{own} as {name}"
    inside = file.removeprefix(here + ".") if here else file
    return f"from {'..' if inside == file and here else '.'}{inside} import {shown}"


def dtype_name(value: dtypes.DType) -> str:
    """A dtype's name in `core/dtype.py`."""
    return next(name for name, found in vars(dtypes).items() if found is value)


def exports(package: ModuleType) -> str:
    """The stub of a package."""
    names = dict(names_of(package))
    lines = [export_line(package, name, value) for name, value in names.items()]
    lines.sort(key=lambda text: (not text.startswith("from"), text))
    if hasattr(package, "__version__"):
        lines.append("\n__version__: str")
    if any("Any" in line for line in lines):
        lines.insert(0, "from typing import Any\n")
    shown = "\n".join([f'    "{name}",' for name in names])
    head = f'"""The names of `{package.__name__}`.\n\n{WRITES}\n"""\n\n{ORDER}'
    return "\n".join([head, *lines, "", f"__all__ = [\n{shown}\n]", ""])


STUBS: dict[str, Callable[[], str]] = {
    "tensor/methods.pyi": methods,
    "__init__.pyi": lambda: exports(tg),
    "tile/__init__.pyi": lambda: exports(tile),
}


@pytest.mark.parametrize("name", STUBS)
def test_the_stub_is_what_runs(name: str) -> None:
    assert (PACKAGE / name).read_text() == STUBS[name](), "run: python tests/test_stubs.py"


def test_every_method_is_there_at_once() -> None:
    """What a Tensor can do does not hang on which other files of the folder were imported."""
    script = "import json, tilegrad; print(json.dumps(sorted(vars(tilegrad.Tensor))))"
    fresh = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert set(attached()) <= set(json.loads(fresh.stdout))


if __name__ == "__main__":
    for _name, _text in STUBS.items():
        (PACKAGE / _name).write_text(_text())

"""`tensor/methods.pyi` shows type checkers and editors the methods that the class has.

Methods arrive on `Tensor` when the files of the folder are imported, so a checker cannot see them
in the class. The stub names, for each of them, the function that it runs: a method's signature and
docstring are those of the function and stand in one place. `python tests/tensor/test_methods.py`
writes the stub anew.
"""

from __future__ import annotations

import inspect
import json
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import tilegrad as tg
from tilegrad.tensor.tensor import Tensor

STUB = Path(tg.__file__).parent / "tensor" / "methods.pyi"
HEAD = '''"""The methods of `Tensor` for type checkers and editors: each is a function of a file.

`python tests/tensor/test_methods.py` writes this file from the class; do not edit it by hand.
"""

from typing import Any

'''
COMPARES = {"__eq__", "__ne__"}
COMPARES_TO_A_TENSOR = "  # type: ignore[override]"  # every other object compares to a bool
PLAIN = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty)


def attached() -> dict[str, Callable[..., Any]]:
    """The functions that other files put on the class, by the method's name."""
    for file in pkgutil.iter_modules([str(STUB.parent)], "tilegrad.tensor."):
        import_module(file.name)  # `autograd` puts its own in place of what loads it
    found = {}
    for name, value in vars(Tensor).items():
        written = getattr(value, "__qualname__", "").startswith("Tensor.")
        if inspect.isfunction(value) and not written:
            found[name] = value
    return found


def home(function: Callable[..., Any]) -> tuple[str, str] | None:
    """The file of the folder and the name there of a function, or of one that it wraps."""
    module = sys.modules[function.__module__]
    names = [name for name, value in vars(module).items() if value is function]
    if names:
        own = function.__name__ if function.__name__ in names else names[0]
        return module.__name__.removeprefix("tilegrad.tensor."), own
    wrapped = getattr(function, "__wrapped__", None)
    return None if wrapped is None else home(wrapped)


def line(name: str, function: Callable[..., Any]) -> str:
    """The stub's line for one method."""
    found = home(function)
    if found is None or name in COMPARES:
        signature = inspect.signature(function)
        taken = list(signature.parameters.values())
        assert {(p.kind, p.default) for p in taken} == {PLAIN}, name
        shown = ", ".join(["self", *[f"{p.name}: {p.annotation}" for p in taken[1:]]])
        text = f"    def {name}({shown}) -> {signature.return_annotation}: ..."
        return text + (COMPARES_TO_A_TENSOR if name in COMPARES else "")
    return f"    {name} = _{found[0]}.{found[1]}"


def written() -> str:
    """The whole stub."""
    functions = dict(sorted(attached().items()))
    homes = {found[0] for found in map(home, functions.values()) if found is not None}
    files = "\n".join(f"from . import {name} as _{name}" for name in sorted(homes))
    lines = "\n".join(line(name, function) for name, function in functions.items())
    return f"{HEAD}{files}\nfrom .tensor import Tensor\n\nclass Methods:\n{lines}\n"


def test_the_stub_is_the_class() -> None:
    assert STUB.read_text() == written(), "run: python tests/tensor/test_methods.py"


def test_every_method_is_there_at_once() -> None:
    """What a Tensor can do does not hang on which other files of the folder were imported."""
    script = "import json, tilegrad; print(json.dumps(sorted(vars(tilegrad.Tensor))))"
    fresh = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert set(attached()) <= set(json.loads(fresh.stdout))


if __name__ == "__main__":
    STUB.write_text(written())

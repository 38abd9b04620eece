"""A person's own program: how commands find a function in it and call it, and whose an error is.

A function is named as module:function, from the folder one stands in, or as path.py:function; what
lies beside that file can be imported by it, as where Python runs it. Invariant: what a person's
code raises is told as theirs, with its line and none of our frames; what our code raises stays
ours.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from ..core.errors import PACKAGE, InternalError, Location, TilegradError, UserError, meant

ARGUMENT = re.compile(r"(\w+)\[([\d,\s]*)\]")
FUNCTION = re.compile(r"(.+\.py|[^\W\d][\w.]*):[^\W\d]\w*\Z", re.DOTALL)
EXPECTED = "module:function or path.py:function"


class ProgramError(TilegradError):
    """An error of a person's program: the line it names is theirs, and is shown."""


def function_of(text: str, op: str) -> Callable[..., Any]:
    """The function that `module:function` or `path.py:function` names."""
    where, _, name = text.rpartition(":")
    if not FUNCTION.match(text):
        raise UserError("this names no function", op=op, expected=EXPECTED, got=text)
    module = module_of(where, op)
    names = [n for n, value in vars(module).items() if callable(value) and n[0] != "_"]
    found = getattr(module, name, module)
    if callable(found):
        return found
    raise UserError(
        f"no such function in {where}" if found is module else f"{name} is no function",
        op=op,
        expected=f"one of {', '.join(names[:20])}" if names else EXPECTED,
        got=name if found is module else type(found).__name__,
        hint=meant(f"{where}:{name}", [f"{where}:{n}" for n in names]) if found is module else None,
    )


def module_of(where: str, op: str) -> ModuleType:
    """The module of a name or of a file, run as an import runs it."""
    path = Path(where).expanduser()
    file = where.endswith(".py")
    folder = str(path.absolute().parent if file else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if not file:
        with reading(where, op):
            return importlib.import_module(where)
    if not path.is_file():
        raise UserError("no such file", op=op, expected=EXPECTED, got=where)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise InternalError("reading a program", f"no loader for {where}")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses look there
    with reading(where, op):
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def reading(where: str, op: str) -> Iterator[None]:
    """While a person's module is read: what it raises is told."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or not f"{where}.".startswith(f"{error.name}."):
            raise told(error, f"{where} cannot be read", op) from error
        raise UserError(
            f"no module named {error.name}", op=op, expected=EXPECTED, got=where
        ) from error
    except (Exception, SystemExit) as error:
        raise told(error, f"{where} cannot be read", op) from error


@contextlib.contextmanager
def calling(function: Callable[..., Any], op: str) -> Iterator[None]:
    """While a person's function is called: what its code raises is told; ours goes on."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    root = os.path.dirname(getattr(module, "__file__", None) or "")
    try:
        yield
    except UserError as error:
        if error.location is not None and is_theirs(error.location.file, root):
            raise ProgramError(str(error)) from error
        raise
    except TilegradError:
        raise
    except (Exception, SystemExit) as error:
        if place(error.__traceback__, root) is None:
            raise
        name = getattr(function, "__name__", type(function).__name__)
        raise told(error, f"{name} cannot be called", op, root) from error


def told(error: BaseException, what: str, op: str, root: str = "") -> TilegradError:
    """An error of a person's code in one message: what it was, and their line."""
    if isinstance(error, UserError) and error.location is not None:
        return ProgramError(str(error))
    if isinstance(error, TilegradError):
        return error
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        at: Location | None = Location(error.filename, error.lineno)
    else:
        at = place(error.__traceback__, root)
    said = "".join(traceback.format_exception_only(type(error), error)).strip().splitlines()[-1]
    if isinstance(error, SystemExit):
        said = f"it ended the program: {said}"
    return ProgramError(f"{op}: {what}\n  got: {said}" + (f"\n  at {at}" if at else ""))


def place(trace: TracebackType | None, root: str = "") -> Location | None:
    """The line of a person's code that raised, or called the library that did; None where ours
    did."""
    for frame in reversed(traceback.extract_tb(trace)):
        if frame.filename.startswith(PACKAGE):
            return None
        if is_theirs(frame.filename, root):
            return Location(frame.filename, frame.lineno or 1)
    return None


def is_theirs(file: str, root: str = "") -> bool:
    """Whether a file is a person's: neither ours nor a library's, or in a folder that is theirs."""
    if file.startswith((PACKAGE, "<")):
        return False
    libraries = tuple(folder + os.sep for folder in sysconfig.get_paths().values())
    return bool(root and file.startswith(root + os.sep)) or not file.startswith(libraries)


def argument_of(text: str, op: str) -> Any:
    """A Tensor of a dtype and shape; its values do not matter."""
    from ..core.dtype import dtype_of
    from ..tensor.creation import zeros

    found = ARGUMENT.fullmatch(text.strip())
    if found is None:
        raise UserError("bad argument", op=op, expected="float32[256,256]", got=text)
    shape = tuple(int(size) for size in found[2].split(",") if size.strip())
    return zeros(shape, dtype=dtype_of(found[1]))


__all__ = ["FUNCTION", "ProgramError", "argument_of", "calling", "function_of"]

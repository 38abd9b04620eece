"""The command `tilegrad explain`: what the compiler makes of a function, for any Target.

The function is named as module:function (or path.py:function); its arguments are named by dtype and
shape, as "bfloat16[64,1024]". Invariant: nothing is computed; the machine needs not be here.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from ..core.errors import UserError

ARGUMENT = re.compile(r"(\w+)\[([\d,\s]*)\]")


def explain(
    function: Annotated[str, typer.Argument(help="module:function, or path.py:function.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help='Its arguments, as "float32[256,256]".')
    ] = None,
    target: Annotated[str, typer.Option(help="A Target: h200, a100, avx512, ...")] = "",
    level: Annotated[str, typer.Option(help="How deep: summary, schedule, tile, ...")] = "summary",
    without: Annotated[
        list[str] | None, typer.Option(help="A pass to leave out; may be repeated.")
    ] = None,
) -> None:
    """Show every stage of compiling a function, or leave passes out to find the one at fault."""
    from ..tensor.explain import explain as explained

    given = [argument_of(text) for text in arguments or ()]
    found = explained(
        function_of(function), *given, level=level, without=without or (), target=target or None
    )
    typer.echo(str(found), nl=False)


def function_of(text: str) -> Any:
    """The function that `module:function` or `path.py:function` names."""
    where, _, name = text.rpartition(":")
    try:
        if where.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(where).stem, where)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
        return getattr(module, name)
    except (ImportError, OSError, ValueError, AttributeError) as error:
        raise UserError(
            "no such function", op="explain", expected="module:function", got=f"{text}: {error}"
        ) from error


def argument_of(text: str) -> Any:
    """A Tensor of a dtype and shape; its values do not matter."""
    from ..core.dtype import dtype_of
    from ..tensor.creation import zeros

    found = ARGUMENT.fullmatch(text.strip())
    if found is None:
        raise UserError("bad argument", op="explain", expected="float32[256,256]", got=text)
    shape = tuple(int(size) for size in found[2].split(",") if size.strip())
    return zeros(shape, dtype=dtype_of(found[1]))

"""The command `tilegrad explain`: what the compiler makes of a function, for any Target.

The function is named as module:function (or path.py:function); its arguments are named by dtype and
shape, as "bfloat16[64,1024]". Invariant: nothing is computed; the machine needs not be here.
"""

from __future__ import annotations

from typing import Annotated

import typer

from .program import argument_of, calling, function_of
from .terminal import put


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

    called = function_of(function, "explain")
    given = [argument_of(text, "explain") for text in arguments or ()]
    with calling(called, "explain"):
        found = explained(called, *given, level=level, without=without or (), target=target or None)
    put(str(found))

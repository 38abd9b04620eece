"""`tilegrad compile`: a model or a function compiled ahead of time, into a folder that runs without
the compiler.

A model is named as for `run`; a function as module:function (or path.py:function) with arguments
by dtype and shape, as "float32[256,256]". Invariant: a folder is a whole bundle or none.
"""

from __future__ import annotations

from typing import Annotated

import typer

from . import options
from .program import FUNCTION, argument_of, calling, function_of
from .progress import Bars
from .terminal import status


def compile_(
    what: Annotated[str, typer.Argument(help="A model, or module:function, path.py:function.")],
    out: Annotated[str, typer.Option(help="The folder to write.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help='Arguments of a function, as "float32[256,256]".')
    ] = None,
    target: Annotated[
        str,
        typer.Option(help="A Target: sm_90a, sm_80, x86-64-v4, aarch64 ...; by default, this CPU."),
    ] = "",
    requests: Annotated[
        int | None,
        typer.Option(help="Requests that run at once (4).", min=1, show_default=False),
    ] = None,
    context: options.Context = None,
    dtype: options.DType = None,
    kv_cache_dtype: options.KvCacheDType = None,
    guesses: Annotated[
        int | None,
        typer.Option(
            help="Guesses of a request that a step verifies, for ngram.", min=0, show_default=False
        ),
    ] = None,
) -> None:
    """Compile ahead of time: tilegrad compile smollm2 --out smollm2.bundle"""
    of_model = options.given(
        requests=requests,
        context=context,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        guesses=guesses,
    )
    if FUNCTION.match(what):
        if of_model:
            words = ", ".join(f"--{name.replace('_', '-')}" for name in of_model)
            raise typer.BadParameter(f"of models, not of functions: {words}")
        from ..tensor.bundle import record, save_bundle
        from ..tensor.jit import jit
        from ..tensor.tensor import no_grad

        function = function_of(what, "compile")
        given = [argument_of(text, "compile") for text in arguments or ()]
        with no_grad(), record() as recorder, calling(function, "compile"):
            jit(function).lower(*given)
        made = save_bundle(out, recorder, target=target or None)
    elif arguments:
        words = f"{', '.join(arguments)}: {what} is a model, which takes none"
        raise typer.BadParameter(f"arguments are of functions, module:function: {words}")
    else:
        from ..generate.bundle import save_llm

        with Bars() as bars:
            made = save_llm(
                out,
                what,
                **of_model,
                target=target or None,
                progress=bars.stage,
            )
    status(f"written: {made}")


__all__ = ["compile_"]

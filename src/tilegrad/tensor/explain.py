"""`explain`: what the compiler makes of a function of Tensors, or of a lazy Tensor.

Invariant: explaining compiles for reading only; nothing runs and no Tensor gets a value.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

from ..compiler.explain import Explanation, explain_graph
from ..compiler.placement import Placement
from ..core.errors import DTypeError, UserError
from ..core.target import Target, target_named
from ..ir.node import topological
from ..runtime.device import device_name, target_for
from .container import flatten
from .jit import Jitted, jit
from .tensor import Tensor, values


def explain(
    function: Callable[..., Any] | Tensor,
    *args: Any,
    level: str = "all",
    without: Sequence[str] = (),
    target: Target | str | None = None,
    **kwargs: Any,
) -> Explanation:
    """Every stage of compiling function(*args, **kwargs); print it, or ask for its parts.

    `level` is summary, graph, schedule, tile, llvm, ptx, assembly or all. `without` names passes to
    leave out, for a bisection; `target` is a Target, or the name of one ("h200"), of which no
    machine needs to be here. A lazy Tensor in place of the function explains the Graph that
    reading it would run.
    """
    without = (without,) if isinstance(without, str) else tuple(without)
    target = target_named(target) if isinstance(target, str) else target
    if isinstance(function, Tensor):
        return _explain_tensor(function, level, without, target)
    if not callable(function):
        raise DTypeError(
            "explain needs a function or a Tensor", op="explain", got=type(function).__name__
        )
    jitted: Any = function if isinstance(function, Jitted) else _jitted(function)
    if isinstance(jitted, types.MethodType):  # a Module, or a method of one
        args, jitted = (jitted.__self__, *args), jitted.__func__
    if target is None:
        lowered = jitted.lower(*args, **kwargs)
    else:
        lowered = jitted._lower_for(target, args, kwargs)
    if not lowered.outputs:
        raise UserError(
            "nothing is computed: every result is an argument or a plain value",
            op="explain",
            got=jitted.name,
        )
    return explain_graph(
        lowered.inputs,
        lowered.outputs,
        donate=lowered.donate,
        target=target or target_for(lowered.device),
        name=_identifier(jitted.name.split("<locals>.")[-1]),
        labels=_labels(jitted, lowered.sources, args, kwargs),
        level=level,
        requirements=lowered.requirements,
        without=without,
        device=lowered.device,
        homes=lowered.homes,
    )


def placement(
    function: Callable[..., Any], *args: Any, device: str = "npu", **kwargs: Any
) -> Placement:
    """What of function(*args, **kwargs) runs on the array of a device, what on its host and why,
    with shares of FLOPs, and cycles and energy by closed forms; nothing is computed."""
    target = target_for(device_name(device, "placement"))
    return explain(function, *args, target=target, **kwargs).placement


def _jitted(function: Callable[..., Any]) -> Any:
    inner = getattr(function, "__func__", None)
    return function if isinstance(inner, Jitted) else jit(function)


def _explain_tensor(
    tensor: Tensor, level: str, without: Sequence[str], target: Target | None
) -> Explanation:
    """The Graph below a Tensor, cut where values are known."""
    if tensor.node in values:
        raise UserError(
            "the Tensor has its value: there is nothing left to compile",
            op="explain",
            hint="explain a function, or the Tensor before it is read",
        )
    order = topological([tensor.node], stop=values.__contains__)
    inputs = [n for n in order if n in values or n.op.name == "input"]
    return explain_graph(
        inputs,
        [tensor.node],
        name="tensor",
        level=level,
        target=target or target_for(tensor.device),
        without=without,
    )


def _labels(
    jitted: Jitted, sources: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[str]:
    """Names of the inputs: paths of arguments, of state within them, or what they stand for."""
    given = jitted._bind(args, kwargs)
    paths = jitted._paths(flatten(jitted._without_static(given))[1])
    labels = []
    for number, source in enumerate(sources):
        path = paths[source.index] if 0 <= source.index < len(paths) else f"{source.kind}{number}"
        label = f"{path}.{source.name}" if source.name else path
        labels.append(_identifier(f"grad_{label}" if source.kind == "grad" else label))
    return labels


def _identifier(text: str) -> str:
    """The text with everything but letters, digits and _ made one _."""
    words = "".join(c if c.isalnum() else " " for c in text).split()
    name = "_".join(words) or "main"
    return name if not name[0].isdigit() else f"_{name}"

"""`trace_function`: a function run under a Trace, as a Lowered.

What the function did to Tensors is the Graph; where inputs come from, where results go and what
state it changed is noted beside it. Invariant: nothing is computed, and the function's Tensors are
as they were before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..core.dtype import float64, int64
from ..graph import build
from ..graph.sizes import size_requirements
from ..ir.node import Node
from ..ir.symbol import Expr
from ..runtime.buffer import HOST
from .container import flatten, is_stateful
from .lowered import Lowered, Outcome, States, Write
from .ownership import is_kept, would_copy
from .placement import common_device, elsewhere, moved, settled
from .tensor import Tensor, unknown_value, wrap
from .trace import Rebindable, Source, Trace, Tracing


def trace_function(
    name: str,
    function: Callable[[list[Any]], Any],
    leaves: Sequence[Any],
    shapes: Sequence[Any],
    states: States,
    given: frozenset[int] = frozenset(),
    keep_gradients: bool = False,
) -> Lowered:
    """Trace a function of argument leaves; Tensors get `shapes`, which may be symbolic."""
    device = _device_of(leaves, states, name)
    trace = Trace(name, device)
    with Tracing(trace):
        inside = [_enter(trace, i, leaf, shapes[i], states) for i, leaf in enumerate(leaves)]
        results, structure = flatten(function(inside))
        tensors = [r.node if isinstance(r, Tensor) else None for r in results]
        changes = [
            c for outer in trace.rebindable.values() for c in _changes(trace, outer, keep_gradients)
        ]
        roots = [n for n in tensors if n is not None]
        roots += [n for _, _, n in changes if isinstance(n, Node)]
        inputs, roots = trace.finish(roots)
    find = _Outcomes(inputs, roots)
    outcomes = [_outcome_of(result, node, find) for result, node in zip(results, tensors)]
    writes = [
        Write(s, what, find.next() if isinstance(n, Node) else Outcome("fixed", value=n))
        for s, what, n in changes
    ]
    sources = tuple(_moved(trace.sources[n], device) for n in inputs)
    differentiable = any(p.value is True and p.kind != "fixed" for p in outcomes)
    donated = _donated(sources, outcomes, writes, given)
    changed = {(w.target.index, w.target.name) for w in writes if w.what == "value"}
    for i, s in enumerate(sources):
        if (s.index, s.name) in changed and i not in donated and is_kept(leaves, s):
            raise would_copy(name, s.name, "the function gives back what it was before")
    return Lowered(
        name,
        tuple(inputs),
        sources,
        find.outputs(),
        structure,
        outcomes,
        writes,
        donated,
        given,
        guards=[
            (s.source.index, s.source.name, s.read_grad)
            for s in trace.rebindable.values()
            if s.read_grad is not None and s.source.kind == "state"
        ],
        randomness=[(g, r.draws) for g, r in trace.randomness.values()],
        tracked=differentiable and not writes and not given,
        device=device,
        requirements=size_requirements(inputs, find.outputs(), trace.requirements.values()),
        homes=tuple(trace.homes.get(n, device) for n in inputs) if trace.homes else (),
    )


def _device_of(leaves: Sequence[Any], states: States, name: str) -> str:
    """The one device of the arguments and of the state they hold."""
    if not elsewhere():
        return HOST
    nodes = [leaf._node for leaf in leaves if isinstance(leaf, Tensor)]
    nodes += [t._node for held in states.values() for t in held.values()]
    found = settled(nodes)
    if len(found) > 1:  # the others are sent to it inside
        return next(device for device in found if device != HOST)
    return common_device(nodes, op=f"jit {name}")


def _moved(source: Source, device: str) -> Source:
    """A constant's Buffer comes to the device once, not at every call."""
    if source.kind != "constant" or source.holder.device == device:
        return source
    return Source("constant", source.index, source.name, moved(source.holder, device))


def _outcome_of(result: Any, node: Node | None, find: _Outcomes) -> Outcome:
    """Where a leaf of the result comes from; a Tensor's outcome says if it has a derivative."""
    if node is None:
        return Outcome("fixed", value=result)
    outcome = find.next()
    outcome.value = bool(result._requires_grad)
    return outcome


def _donated(
    sources: Sequence[Source], outcomes: list[Outcome], writes: list[Write], given: frozenset[int]
) -> tuple[int, ...]:
    """Inputs that may be overwritten: given by the caller, or the old value of changed state."""
    used = {p.number for p in [*outcomes, *(w.outcome for w in writes)] if p.kind == "input"}
    changed = {(w.target.index, w.target.name) for w in writes if w.what == "value"}
    return tuple(
        i
        for i, s in enumerate(sources)
        if i not in used
        and not s.stored
        and s.kind in ("leaf", "state")
        and (s.index in given or (s.index, s.name) in changed)
    )


def _enter(trace: Trace, index: int, leaf: Any, shape: Any, states: States) -> Any:
    """What the traced function gets for an argument leaf."""
    if isinstance(leaf, Tensor):
        if leaf.trace is not None:
            raise unknown_value(leaf._node)
        return trace.add_leaf(Source("leaf", index), leaf, shape)
    if shape is not None:
        return shape  # a number that is a Symbol
    if leaf.__class__ is float:
        return wrap(build.number(trace.add_input(Source("number", index), (), float64)))
    if leaf.__class__ is int:
        return wrap(trace.add_input(Source("number", index), (), int64))
    if is_stateful(leaf):
        for name, tensor in states[index].items():
            trace.add_state(Source("state", index, name), tensor)
    return leaf


def _changes(
    trace: Trace, outer: Rebindable, keep_gradients: bool
) -> list[tuple[Source, str, Any]]:
    """What the traced function did to an argument Tensor or a Tensor of its state."""
    found: list[tuple[Source, str, Any]] = []  # a Node to compute, or a fixed value
    if outer.tensor.node is not outer.first:
        found.append((outer.source, "value", outer.tensor.node))
    if outer.source.kind == "leaf":
        if outer.tensor._grad is not None:
            found.append((outer.source, "add grad", outer.tensor._grad.node))
    elif outer.grad is None:
        if outer.read_grad or outer.cleared:
            found.append((outer.source, "grad", None))
    elif outer.cleared and not keep_gradients:
        # zeroed and filled within the call: reading it afterwards says that it stayed inside
        inside = wrap(build.input_(outer.grad.shape, outer.grad.dtype))
        found.append((outer.source, "grad", inside))
    elif trace.sources.get(outer.grad.node, Source("")).kind != "grad":
        found.append((outer.source, "grad", outer.grad.node))
    return found


class _Outcomes:
    """Gives each root, in order, its Outcome among the distinct outputs or the inputs."""

    def __init__(self, inputs: Sequence[Node], roots: Sequence[Node]) -> None:
        self.inputs = {n: i for i, n in enumerate(inputs)}
        self.unique: dict[Node, int] = {}
        self.roots = iter(roots)

    def next(self) -> Outcome:
        """The Outcome of the next root."""
        node = next(self.roots)
        symbolic = any(isinstance(s, Expr) for s in node.shape)
        if node in self.inputs:
            return Outcome("input", self.inputs[node], type=node.type, symbolic=symbolic)
        number = self.unique.setdefault(node, len(self.unique))
        return Outcome("root", number, type=node.type, symbolic=symbolic)

    def outputs(self) -> tuple[Node, ...]:
        """The distinct Nodes to compute."""
        return tuple(self.unique)


__all__ = ["trace_function"]

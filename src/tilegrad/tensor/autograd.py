"""Reverse-mode derivatives on Tensors: `Tensor.backward` and the functional `grad_of`.

Nothing is recorded while a program runs: the Graph below a Tensor is its history, and the
derivative is more Graph, computed when a gradient is read. A value that came out of a jitted
function has its history kept aside (`histories`) and is given it only when a derivative asks.
Invariant: `backward` adds to `.grad` of every leaf it reaches and changes nothing else.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ..core.errors import DTypeError, ShapeError, StateError, user_location
from ..graph import build, ops
from ..graph.grad import gradients
from ..ir.node import Node, topological
from ..ir.rewrite import replace
from .tensor import Leaves, Tensor, leaves, made_together, method, mode, node_of, wrap

# How to compute what a jitted function already computed, by the Node of its result.
histories: weakref.WeakKeyDictionary[Node, Callable[[], Node]] = weakref.WeakKeyDictionary()


retained = Leaves()  # Tensors that are no leaves and keep their gradients all the same
hooks: weakref.WeakKeyDictionary[Node, dict[int, Callable[[Tensor], Any]]] = (
    weakref.WeakKeyDictionary()
)


class Handle:
    """What takes a hook away again."""

    def __init__(self, node: Node, number: int) -> None:
        self._node, self._number = weakref.ref(node), number

    def remove(self) -> None:
        """Take the hook away."""
        node = self._node()
        if node is not None:
            hooks.get(node, {}).pop(self._number, None)


@method("register_hook")
def register_hook(self: Tensor, hook: Callable[[Tensor], Any]) -> Handle:
    """Call a function with the gradient of this Tensor whenever `backward` finds it; what it gives
    (unless None) is taken in its place."""
    if not self._requires_grad:
        raise StateError(
            "has no gradient",
            op="register_hook",
            expected="a Tensor that requires a gradient",
            got=str(self.node.type),
        )
    table = hooks.setdefault(self.node, {})
    number = max(table, default=-1) + 1
    table[number] = hook
    return Handle(self.node, number)


@method("retain_grad")
def retain_grad(self: Tensor) -> None:
    """Have `backward` keep the gradient of this Tensor, though it is no leaf."""
    if not self._requires_grad:
        raise StateError(
            "has no gradient",
            op="retain_grad",
            expected="a Tensor that requires a gradient",
            got=str(self.node.type),
        )
    if not self.is_leaf:
        retained[self.node] = self


def hooked(node: Node, gradient: Node) -> Node:
    """A gradient after the hooks of its Tensor."""
    for hook in list(hooks.get(node, {}).values()):
        found = hook(wrap(gradient))
        if found is not None:
            gradient = build.cast(node_of(found), gradient.dtype)
            if gradient.shape != node.shape:
                raise ShapeError(
                    "a hook gave another shape",
                    op="register_hook",
                    expected=build.show(node.shape),
                    got=build.show(gradient.shape),
                )
    return gradient


def with_history(nodes: Sequence[Node]) -> list[Node]:
    """The Nodes with the results of jitted functions replaced by how they were computed."""
    nodes = list(nodes)
    while histories:
        known = [n for n in topological(nodes, _stops) if n in histories]
        if not known:
            break
        nodes = replace(nodes, {n: histories[n]() for n in known})
    return nodes


def recognized(nodes: Sequence[Node]) -> list[Node]:
    """The Nodes with big ops found, so that derivatives and batches are those of big ops."""
    from ..graph.recognize import recognize  # a program that only runs models needs none of it

    return recognize(nodes, derived=True)


def _stops(node: Node) -> bool:
    return node.op is ops.stop_gradient


def leaves_below(nodes: Sequence[Node]) -> list[Node]:
    """The Nodes of Tensors that collect gradients and that the Nodes depend on."""
    return [n for n in topological(nodes, _stops) if n in leaves or n in retained]


def cotangent(output: Tensor, gradient: Any, op: str) -> Node:
    """The checked gradient to start from: ones for a scalar."""
    if not output.dtype.is_float:
        raise DTypeError(
            "only floats have gradients",
            op=op,
            expected="a float Tensor",
            got=str(output.node.type),
        )
    if gradient is None:
        if output.numel() != 1:
            raise ShapeError(
                "needs a gradient to start from, since the Tensor is not a scalar",
                op=op,
                expected="a Tensor of one element, or gradient=",
                got=f"shape {build.show(output.shape)}",
                hint="reduce it first, as in loss.sum() or loss.mean()",
            )
        return build.like(output.node, 1.0)
    node = node_of(gradient, output.dtype)
    if node.shape != output.shape:
        raise ShapeError(
            "the gradient has another shape than the Tensor",
            op=op,
            expected=build.show(output.shape),
            got=build.show(node.shape),
        )
    return build.cast(node, output.dtype)


def _check_reachable(output: Tensor, op: str) -> None:
    if not mode.grad_enabled:
        raise StateError(
            "derivatives are switched off here",
            op=op,
            expected="a place where they are recorded",
            got="inside no_grad()",
            hint="move the call out of the `with no_grad():` block",
        )
    if not output._requires_grad:
        raise _no_leaf(output, op)


def _no_leaf(output: Tensor, op: str) -> StateError:
    node = output.node
    if node.op is ops.stop_gradient:
        why = "one whose history was cut by detach(), no_grad() or backward() itself"
    elif node.op is ops.input_:
        why = (
            "a plain value: data, or the result of a jitted function that called backward() or "
            "changed state itself"
        )
    elif output._requires_grad:
        why = "one whose leaves are gone"
    else:
        why = "one computed of Tensors without it"
    return StateError(
        "no Tensor that requires a gradient is reachable",
        op=op,
        expected="a value computed from a Tensor with requires_grad=True",
        got=f"a Tensor {node.type}, {why}",
        hint="set x.requires_grad = True before computing; detach(), no_grad() and values read "
        "back as numbers cut the history; create_graph=True keeps that of gradients",
    )


class Done:
    """The Tensors on which `backward` was called, and where; keeps none of them alive."""

    def __init__(self) -> None:
        self._called: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Node], Any]] = {}

    def add(self, tensor: Tensor) -> None:
        """Note a call."""
        key = id(tensor)
        gone = weakref.ref(tensor, lambda _: self._called.pop(key, None))
        self._called[key] = (gone, weakref.ref(tensor.node), user_location())

    def check(self, tensor: Tensor) -> None:
        """Refuse a second call on the same value: it would add the same gradients again."""
        found = self._called.get(id(tensor))
        if found is None or found[0]() is not tensor or found[1]() is not tensor.node:
            return
        raise StateError(
            "backward() was called on this Tensor before",
            op="backward",
            expected="a value computed anew, or retain_graph=True in the first call",
            got=f"a second backward(), after the one at {found[2]}",
            hint="compute the loss inside the loop; or say loss.backward(retain_graph=True) where "
            "the same gradients are to be added again",
        )


done = Done()


@method("backward")
def backward(
    self: Tensor,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Sequence[Tensor] | None = None,
) -> None:
    """Add d(self)/d(leaf) to `.grad` of every leaf (or of `inputs`).

    A second call on the same Tensor is an error unless the first had `retain_graph=True`.
    """
    _check_reachable(self, "backward")
    done.check(self)
    start = cotangent(self, gradient, "backward")
    (root,) = with_history([self.node])
    if inputs is None:
        wanted = leaves_below([root])
        targets = [(leaves if n in leaves else retained).get(n) for n in wanted]
    else:
        targets = list(inputs)
        wanted = [t.node for t in inputs]
    if not wanted:
        raise _no_leaf(self, "backward")
    if all(n.op is ops.input_ for n in (*wanted, *hooks)):  # no rewriting loses them
        (root,) = recognized([root])
    found = gradients([root], [start], wanted, changed=hooked if hooks else None)
    made = [
        _accumulate(tensor, node, create_graph)
        for tensor, node in zip(targets, found)
        if tensor is not None and node is not None
    ]
    made_together(made)
    if not (create_graph if retain_graph is None else retain_graph):
        done.add(self)


def _accumulate(tensor: Tensor, node: Node, create_graph: bool) -> Tensor:
    before = tensor.grad
    if before is not None:
        node = build.add(before.node, node)
    tensor.grad = made = as_gradient(node, create_graph)
    return made


def as_gradient(node: Node, create_graph: bool) -> Tensor:
    """A Tensor on a derivative; without history unless a further derivative is wanted."""
    if create_graph:
        result = wrap(node)
        result._requires_grad = True
        return result
    return wrap(ops.stop_gradient(node))


def grad_of(
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool = False,
) -> tuple[Tensor | None, ...]:
    """The gradients of outputs with respect to inputs (`torch.autograd.grad`)."""
    results = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    targets = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    given = [grad_outputs] if isinstance(grad_outputs, Tensor) else grad_outputs
    given = [None] * len(results) if given is None else list(given)
    if len(given) != len(results):
        raise ShapeError(
            "needs one gradient for each output",
            op="grad_of",
            expected=len(results),
            got=len(given),
        )
    for output in results:
        _check_reachable(output, "grad_of")
    starts = [cotangent(o, g, "grad_of") for o, g in zip(results, given)]
    roots = with_history([o.node for o in results])
    wanted = [t.node for t in targets]
    if all(n.op is ops.input_ for n in wanted):
        roots = recognized(roots)
    found = gradients(roots, starts, wanted)
    if not allow_unused and None in found:
        raise StateError(
            f"input {found.index(None)} does not influence the outputs",
            op="grad_of",
            expected="inputs that the outputs depend on",
            got=str(targets[found.index(None)].dtype),
            hint="pass allow_unused=True to get None for it",
        )
    made = tuple(None if n is None else as_gradient(n, create_graph) for n in found)
    made_together([m for m in made if m is not None])
    return made


@method("requires_grad_")
def requires_grad_(self: Tensor, value: bool = True) -> Tensor:
    """Set `requires_grad` and return self."""
    self.requires_grad = value
    return self


@method("zero_grad")
def zero_grad(self: Tensor) -> None:
    """Forget the gradient."""
    self.grad = None

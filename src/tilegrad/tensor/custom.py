"""Derivatives of one's own, and derivatives that compute their forward again.

`custom_vjp` and `custom_jvp` replace the derivative of a function; `checkpoint` keeps the
derivative but not the values inside: backward computes them again from the inputs. All three
are the Graph op `custom`, a Block with rules. Invariant: the values of the function itself
never change; captured Tensors get derivatives from `checkpoint`, not from custom rules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, overload

from ..core.errors import DTypeError, ShapeError, UserError
from ..graph import build, ops
from ..graph.forward import tangents
from ..graph.grad import gradients
from ..ir.block import Block, argument, pure_block
from ..ir.node import Node, next_serial
from ..ir.rewrite import replace
from .autograd import recognized
from .container import Structure, flatten
from .tensor import Tensor, wrap
from .transforms import inside_transform, nodes_of, or_zeros, rebuilt, tracked

Function = Callable[..., Any]
P = ParamSpec("P")
R = TypeVar("R")


class Call:
    """One call of a custom function: how its arguments and its result are nested."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.leaves, self.structure = flatten(args)
        self.nodes = [x.node for x in self.leaves if isinstance(x, Tensor)]
        self.result: tuple[list[Any], Structure] | None = None

    def arguments(self, nodes: Sequence[Node]) -> Any:
        """The arguments with other Nodes below their Tensors."""
        made = [wrap(n) for n in nodes]
        for tensor in made:
            tensor._requires_grad = tensor.dtype.is_float
        return rebuilt(self.leaves, self.structure, made)

    def apply(self, function: Function, nodes: Sequence[Node]) -> list[Node]:
        """The Nodes of function(*arguments); the nesting of the result is kept."""
        with inside_transform():
            found, leaves, structure = nodes_of(function(*self.arguments(nodes)))
        self.result = (leaves, structure)
        return found

    def finish(self, nodes: Sequence[Node]) -> Any:
        """The nested result with Tensors on the Nodes."""
        leaves, structure = self.result  # type: ignore[misc]
        return rebuilt(leaves, structure, tracked(nodes))

    def nest_result(self, nodes: Sequence[Node]) -> Any:
        """Cotangents or tangents nested as the result."""
        leaves, structure = self.result  # type: ignore[misc]
        return rebuilt(leaves, structure, [wrap(n) for n in nodes])


class custom_vjp(Generic[R]):
    """A function whose reverse derivative is given: `f.defvjp(forward, backward)`.

    forward(*args) -> (result, residuals); backward(residuals, cotangent) -> one cotangent per
    argument (None for none).
    """

    def __init__(self, function: Callable[..., R]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.forward: Function | None = None
        self.backward: Function | None = None

    def defvjp(self, forward: Function, backward: Function) -> None:
        """Set the derivative."""
        self.forward, self.backward = forward, backward

    def __call__(self, *args: Any) -> R:
        if self.forward is None or self.backward is None:
            raise UserError(
                "no derivative was given", op="custom_vjp", expected="f.defvjp(forward, backward)"
            )
        call = Call(args)
        rules = _ReverseRules(self, call)
        nodes = build.custom(lambda xs: call.apply(self.function, xs), call.nodes, rules)
        return call.finish(nodes)


class _ReverseRules:
    jvp = None

    def __init__(self, owner: custom_vjp[Any], call: Call) -> None:
        self.owner, self.call = owner, call

    def vjp(self, inputs: list[Node], outputs: list[Node], cotangents: list[Node]) -> list[Any]:
        """Cotangents of the inputs."""
        call = self.call
        own = inputs[: len(call.nodes)]
        with inside_transform():
            pair = self.owner.forward(*call.arguments(own))  # type: ignore[misc]
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise DTypeError(
                    "forward returns (result, residuals)",
                    op="custom_vjp",
                    expected="a pair",
                    got=type(pair).__name__,
                )
            given = call.nest_result(cotangents)
            found = self.owner.backward(pair[1], given)  # type: ignore[misc]
        found = found if isinstance(found, (tuple, list)) else (found,)
        return _per_tensor(found, call, own)


def _per_tensor(found: Sequence[Any], call: Call, own: Sequence[Node]) -> list[Node | None]:
    """One cotangent per Tensor argument from one nest per argument."""
    parts = call.structure.parts
    if len(found) != len(parts):
        raise ShapeError(
            "backward returns one cotangent per argument",
            op="custom_vjp",
            expected=len(parts),
            got=len(found),
        )
    flat: list[Any] = []
    for value, part in zip(found, parts):
        flat += [None] * part.count if value is None else flatten(value)[0]
    answer: list[Node | None] = []
    rest = iter(own)
    for leaf, value in zip(call.leaves, flat):
        if not isinstance(leaf, Tensor):
            continue
        node = next(rest)
        if not isinstance(value, Tensor):
            answer.append(None)
            continue
        if value.shape != node.shape:
            raise ShapeError(
                "a cotangent has another shape than its argument",
                op="custom_vjp",
                expected=str(node.type),
                got=str(value.node.type),
            )
        answer.append(build.cast(value.node, node.dtype) if node.dtype.is_float else None)
    return answer


class custom_jvp(Generic[R]):
    """A function whose derivative is given forwards: `f.defjvp(rule)`.

    rule(primals, tangents) -> (result, tangent of the result); it serves reverse mode too.
    """

    def __init__(self, function: Callable[..., R]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.rule: Function | None = None

    def defjvp(self, rule: Function) -> Function:
        """Set the derivative."""
        self.rule = rule
        return rule

    def __call__(self, *args: Any) -> R:
        if self.rule is None:
            raise UserError("no derivative was given", op="custom_jvp", expected="f.defjvp(rule)")
        call = Call(args)
        rules = _ForwardRules(self, call)
        nodes = build.custom(lambda xs: call.apply(self.function, xs), call.nodes, rules)
        return call.finish(nodes)


class _ForwardRules:
    vjp = None

    def __init__(self, owner: custom_jvp[Any], call: Call) -> None:
        self.owner, self.call = owner, call

    def jvp(self, inputs: list[Node], outputs: list[Node], moved: list[Any]) -> list[Any]:
        """Tangents of the outputs."""
        call = self.call
        own = inputs[: len(call.nodes)]
        directions = or_zeros(moved[: len(own)], own)
        with inside_transform():
            primals = call.arguments(own)
            pair = self.owner.rule(primals, call.arguments(directions))  # type: ignore[misc]
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise DTypeError(
                    "the rule returns (result, tangent)",
                    op="custom_jvp",
                    expected="a pair",
                    got=type(pair).__name__,
                )
            found, _, _ = nodes_of(pair[1])
        return [build.cast(f, o.dtype) for f, o in zip(found, outputs)]


# ---- checkpoint ------------------------------------------------------------------------------


@overload
def checkpoint(function: Callable[P, R]) -> Callable[P, R]: ...
@overload
def checkpoint(function: Callable[..., R], *args: Any, **kwargs: Any) -> R: ...
def checkpoint(function: Function, *args: Any, **kwargs: Any) -> Any:
    """Run function(*args), keeping only its inputs for backward; alone, wraps the function."""
    if not args and not kwargs:

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return checkpoint(function, *args, **kwargs)

        return wrapped
    call = Call(args)
    since = next_serial()
    inputs = [build.input_(n.shape, n.dtype) for n in call.nodes]
    results = call.apply(functools.partial(function, **kwargs), inputs)
    block = _closed(inputs, results, since)
    outside = list(block.captures())
    nodes = _as_custom(block, outside, call.nodes)
    return call.finish(nodes)


def _closed(inputs: Sequence[Node], results: Sequence[Node], since: int) -> Block:
    """The Block of what was built; all from before or from outside is captured."""
    own = set(inputs)

    def outside(node: Node) -> bool:
        if node in own or ops.is_constant(node) or node.op in (ops.iota, ops.size):
            return False
        return node.op is ops.input_ or node.serial < since

    return pure_block("checkpoint", tuple(inputs), tuple(results), outside)


def _as_custom(block: Block, captured: list[Node], nodes: Sequence[Node]) -> list[Node]:
    """The Block as a custom op whose inputs are the arguments and all that it captures."""
    given = list(block.arguments) + captured

    def body(xs: list[Node]) -> list[Node]:
        return replace(block.results, dict(zip(given, xs)))

    return build.custom(body, [*nodes, *captured], _RecomputeRules(block, given))


class _RecomputeRules:
    """Derivatives of a Block that is computed again when they are needed."""

    def __init__(self, block: Block, given: list[Node]) -> None:
        self.block, self.given = block, given

    def _recomputed(self, inputs: Sequence[Node]) -> list[Node]:
        return recognized(replace(self.block.results, dict(zip(self.given, inputs))))

    def vjp(self, inputs: list[Node], outputs: list[Node], cotangents: list[Node]) -> list[Any]:
        """Cotangents of the inputs; behind a barrier, so that nothing is kept till then."""
        own = inputs[: len(self.given)]
        held = [ops.barrier(x, *cotangents) for x in own]
        copies = [argument(f"input{i}", x.type) for i, x in enumerate(own)]
        parts = gradients(self._recomputed(copies), cotangents, copies)
        return _placed(parts, dict(zip(copies, held)))

    def jvp(self, inputs: list[Node], outputs: list[Node], moved: list[Any]) -> list[Any]:
        """Tangents of the outputs; they need the values at once, so nothing is recomputed."""
        own = inputs[: len(self.given)]
        copies = [argument(f"input{i}", x.type) for i, x in enumerate(own)]
        parts = tangents(self._recomputed(copies), copies, moved[: len(own)])
        return or_zeros(_placed(parts, dict(zip(copies, own))), outputs)


def _placed(parts: Sequence[Node | None], values: dict[Node, Node]) -> list[Node | None]:
    """The parts with values in place of arguments."""
    done = iter(replace([p for p in parts if p is not None], values))
    return [None if p is None else next(done) for p in parts]

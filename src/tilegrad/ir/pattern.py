"""Patterns and Rules: a pattern is written as the expression it matches.

    x, c = any_("x"), constant("c")
    Rule("add_zero", x + zero, lambda m: m.x)

`any_` matches every Node and binds it; using the same name twice asks for the same Node.
`of(op, ...)` matches an Op with patterns for its inputs; a dialect may register operators
(`OPERATORS`) so that `x + y` means its add. Commutative Ops match in both orders.
Invariant: matching reads, never builds; a Rule's name is unique within its RuleSet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..core.errors import InternalError
from .node import Node, Op

Test = Callable[[Node], bool]
OPERATORS: dict[str, Op] = {}  # '+' -> graph.add ..., filled by the dialect that owns them


class Match:
    """What a pattern bound, as attributes."""

    def __init__(self, bound: dict[str, Node], root: Node) -> None:
        self.__dict__.update(bound)
        self.root = root

    def __getattr__(self, name: str) -> Node:
        raise InternalError("pattern", f"nothing is bound to {name}")


class Pattern:
    """Something a Node may match."""

    op: Op | None = None

    def __init__(self, name: str | None = None, test: Test | None = None) -> None:
        self.name, self.test = name, test

    def _match(self, node: Node, bound: dict[str, Node]) -> Iterator[dict[str, Node]]:
        if self.test is not None and not self.test(node):
            return
        if self.name is not None:
            seen = bound.get(self.name)
            if seen is not None:
                if seen is node:
                    yield bound
                return
            bound = {**bound, self.name: node}
        yield bound

    def __add__(self, other: Any) -> Apply:
        return Apply(OPERATORS["+"], self, lift(other))

    def __sub__(self, other: Any) -> Apply:
        return Apply(OPERATORS["-"], self, lift(other))

    def __mul__(self, other: Any) -> Apply:
        return Apply(OPERATORS["*"], self, lift(other))

    def __truediv__(self, other: Any) -> Apply:
        return Apply(OPERATORS["/"], self, lift(other))

    def __pow__(self, other: Any) -> Apply:
        return Apply(OPERATORS["**"], self, lift(other))

    def __neg__(self) -> Apply:
        return Apply(OPERATORS["neg"], self)

    def __and__(self, other: Any) -> Apply:
        return Apply(OPERATORS["&"], self, lift(other))

    def __or__(self, other: Any) -> Apply:
        return Apply(OPERATORS["|"], self, lift(other))

    def named(self, name: str) -> Pattern:
        """The same pattern, binding the Node it matches."""
        self.name = name
        return self


class Apply(Pattern):
    """An Op applied to patterns; `attrs` must be equal where given."""

    def __init__(
        self, op: Op, *inputs: Pattern, name: str | None = None, test: Test | None = None,
        attrs: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(name, test)
        self.op, self.inputs, self.attrs = op, inputs, attrs or {}

    def _match(self, node: Node, bound: dict[str, Node]) -> Iterator[dict[str, Node]]:
        if node.op is not self.op or len(node.inputs) != len(self.inputs):
            return
        if any(node.attrs.get(k) != v for k, v in self.attrs.items()):
            return
        for outer in super()._match(node, bound):
            yield from self._match_inputs(node.inputs, outer)
            if self.op.commutative and len(node.inputs) == 2:
                yield from self._match_inputs(node.inputs[::-1], outer)

    def _match_inputs(
        self, inputs: tuple[Node, ...], bound: dict[str, Node]
    ) -> Iterator[dict[str, Node]]:
        if len(inputs) == 1:
            yield from self.inputs[0]._match(inputs[0], bound)
        elif len(inputs) == 2:
            for first in self.inputs[0]._match(inputs[0], bound):
                yield from self.inputs[1]._match(inputs[1], first)
        else:
            states = [bound]
            for pattern, node in zip(self.inputs, inputs):
                states = [new for old in states for new in pattern._match(node, old)]
            yield from states


def any_(name: str, test: Test | None = None) -> Pattern:
    """Any Node (that passes the test), bound to the name."""
    return Pattern(name, test)


def of(op: Op, *inputs: Any, name: str | None = None, test: Test | None = None, **attrs: Any) -> Apply:
    """An Op applied to patterns."""
    return Apply(op, *(lift(i) for i in inputs), name=name, test=test, attrs=attrs)


LIFT: list[Callable[[Any], Pattern]] = []  # how a dialect turns a Python number into a pattern


def lift(value: Any) -> Pattern:
    """A Pattern as it is, a number through the dialect's `LIFT`."""
    if isinstance(value, Pattern):
        return value
    if LIFT:
        return LIFT[0](value)
    raise InternalError("pattern", f"{value!r} is not a pattern")


class Rule:
    """A named pattern -> replacement; the builder may return None to decline."""

    def __init__(
        self, name: str, pattern: Apply | Op, build: Callable[[Match], Node | None],
        when: Callable[[Match], bool] | None = None,
    ) -> None:  # fmt: skip
        self.name, self.build, self.when = name, build, when
        self.pattern = pattern
        self.op: Op = pattern if isinstance(pattern, Op) else pattern.op  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<rule {self.name}>"

    def apply(self, node: Node) -> Node | None:
        """The replacement of the Node, or None."""
        if isinstance(self.pattern, Op):
            match = Match({}, node)
            return self.build(match) if self.when is None or self.when(match) else None
        for bound in self.pattern._match(node, {}):
            match = Match(bound, node)
            if self.when is None or self.when(match):
                new = self.build(match)
                if new is not None:
                    return new
        return None


class RuleSet:
    """A list of Rules with unique names."""

    def __init__(self, name: str, rules: Iterable[Rule]) -> None:
        self.name, self.rules = name, list(rules)
        names = [r.name for r in self.rules]
        if len(set(names)) != len(names):
            raise InternalError(f"rules {name}", "a name is used twice")
        self._by_op: dict[Op, list[Rule]] | None = None

    def __add__(self, other: RuleSet) -> RuleSet:
        return RuleSet(f"{self.name}+{other.name}", self.rules + other.rules)

    def by_op(self) -> dict[Op, list[Rule]]:
        """Rules by the Op at their root."""
        if self._by_op is None:
            self._by_op = {}
            for rule in self.rules:
                self._by_op.setdefault(rule.op, []).append(rule)
        return self._by_op

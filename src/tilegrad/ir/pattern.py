"""Patterns and Rules: a pattern is written as the expression it matches.

    x = any_("x")
    Rule("add_zero", x + 0, lambda m: m.x)

`any_` matches every Node and binds it; using the same name twice asks for the same Node.
`of(op, ...)` matches an Op (or one of several) with patterns for its inputs; a dialect may
register operators (`OPERATORS`) so that `x + y` means its add, and say what a number matches
(`LIFT`). Commutative Ops match in both orders: a Rule tries one ordered variant after the
other. A RuleSet looks at the Ops of a Node and of its inputs first, once per combination, so
a Node meets only the few Rules that could fit.
Invariant: matching reads, never builds; a Rule's name is unique within its RuleSet.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Union

from ..core.errors import InternalError
from .node import Node, Op, located

Test = Callable[[Node], bool]
Ops = Union[Op, Sequence[Op]]
OPERATORS: dict[str, Op] = {}  # '+' -> graph.add ..., filled by the dialect that owns them


def _ops(ops: Ops) -> tuple[Op, ...]:
    return (ops,) if isinstance(ops, Op) else tuple(ops)


class Match:
    """What a pattern bound, as attributes; `root` is the Node itself."""

    def __init__(self, bound: dict[str, Node], root: Node) -> None:
        self.__dict__.update(bound)
        self.root = root

    def __getattr__(self, name: str) -> Node:
        raise InternalError("pattern", f"nothing is bound to {name}")


class Pattern:
    """Something a Node may match; `ops` are the only Ops it can match (None: any Op)."""

    def __init__(
        self, name: str | None = None, test: Test | None = None, ops: Ops | None = None
    ) -> None:
        self.name, self.test = name, test
        self.ops = None if ops is None else frozenset(_ops(ops))

    def fits(self, node: Node, bound: dict[str, Node]) -> bool:
        """Whether the Node matches; names are bound on the way (also where it fails)."""
        if self.ops is not None and node.op not in self.ops:
            return False
        if self.test is not None and not self.test(node):
            return False
        return self.name is None or bound.setdefault(self.name, node) is node

    def variants(self) -> list[Pattern]:
        """The pattern with every order of its commutative Ops, each tried in one order only."""
        return [self]

    def could_fit(self, node: Node) -> bool:
        """Whether the Ops of the Node and of its inputs allow a match."""
        return self.ops is None or node.op in self.ops

    def named(self, name: str) -> Pattern:
        """The same pattern, binding the Node it matches."""
        self.name = name
        return self

    def __add__(self, other: Any) -> Apply:
        return Apply(OPERATORS["+"], self, lift(other))

    def __sub__(self, other: Any) -> Apply:
        return Apply(OPERATORS["-"], self, lift(other))

    def __rsub__(self, other: Any) -> Apply:
        return Apply(OPERATORS["-"], lift(other), self)

    def __mul__(self, other: Any) -> Apply:
        return Apply(OPERATORS["*"], self, lift(other))

    def __truediv__(self, other: Any) -> Apply:
        return Apply(OPERATORS["/"], self, lift(other))

    def __rtruediv__(self, other: Any) -> Apply:
        return Apply(OPERATORS["/"], lift(other), self)

    def __floordiv__(self, other: Any) -> Apply:
        return Apply(OPERATORS["//"], self, lift(other))

    def __mod__(self, other: Any) -> Apply:
        return Apply(OPERATORS["%"], self, lift(other))

    def __pow__(self, other: Any) -> Apply:
        return Apply(OPERATORS["**"], self, lift(other))

    def __neg__(self) -> Apply:
        return Apply(OPERATORS["neg"], self)

    def __invert__(self) -> Apply:
        return Apply(OPERATORS["~"], self)

    def __and__(self, other: Any) -> Apply:
        return Apply(OPERATORS["&"], self, lift(other))

    def __or__(self, other: Any) -> Apply:
        return Apply(OPERATORS["|"], self, lift(other))

    def __xor__(self, other: Any) -> Apply:
        return Apply(OPERATORS["^"], self, lift(other))


class Apply(Pattern):
    """One of some Ops applied to patterns; `attrs` must be equal where given."""

    def __init__(
        self,
        op: Ops,
        *inputs: Pattern,
        name: str | None = None,
        test: Test | None = None,
        attrs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(name, test, op)
        self.inputs, self.attrs = inputs, attrs or {}
        self.roots = _ops(op)

    def fits(self, node: Node, bound: dict[str, Node]) -> bool:
        """Whether the Node and its inputs match, in the order written."""
        if node.op not in self.ops or len(node.inputs) != len(self.inputs):  # type: ignore[operator]
            return False
        for key, value in self.attrs.items():
            if node.attrs.get(key) != value:
                return False
        if self.test is not None and not self.test(node):
            return False
        if self.name is not None and bound.setdefault(self.name, node) is not node:
            return False
        for pattern, source in zip(self.inputs, node.inputs):  # noqa: SIM110 (hot: no generator)
            if not pattern.fits(source, bound):
                return False
        return True

    def could_fit(self, node: Node) -> bool:
        """Whether the Ops of the Node and of its inputs allow a match."""
        if node.op not in self.ops or len(node.inputs) != len(self.inputs):  # type: ignore[operator]
            return False
        return all(
            pattern.ops is None or source.op in pattern.ops
            for pattern, source in zip(self.inputs, node.inputs)
        )

    def variants(self) -> list[Pattern]:
        """The pattern with every order of its commutative Ops."""
        found: list[Pattern] = []
        swaps = len(self.inputs) == 2 and all(op.commutative for op in self.roots)
        for inputs in itertools.product(*(p.variants() for p in self.inputs)):
            found.append(self._on(inputs))
            if swaps and inputs[0] is not inputs[1]:
                found.append(self._on(inputs[::-1]))
        return found

    def _on(self, inputs: tuple[Pattern, ...]) -> Apply:
        return Apply(self.roots, *inputs, name=self.name, test=self.test, attrs=self.attrs)


def any_(name: str, test: Test | None = None, ops: Ops | None = None) -> Pattern:
    """Any Node (of the Ops, that passes the test), bound to the name."""
    return Pattern(name, test, ops)


def of(
    op: Ops, *inputs: Any, name: str | None = None, test: Test | None = None, **attrs: Any
) -> Apply:
    """An Op, or one of several, applied to patterns."""
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
    """A named pattern (or just the Ops at its root) -> replacement.

    The builder may return None to decline; then the next order of the pattern is tried.
    """

    def __init__(
        self,
        name: str,
        pattern: Apply | Ops,
        build: Callable[[Match], Node | None],
        when: Callable[[Match], bool] | None = None,
    ) -> None:
        self.name, self.build, self.when = name, build, when
        self.pattern = pattern if isinstance(pattern, Pattern) else Pattern(ops=_ops(pattern))
        self.roots = pattern.roots if isinstance(pattern, Apply) else _ops(pattern)
        self.variants = tuple(self.pattern.variants())

    def __repr__(self) -> str:
        return f"<rule {self.name}>"

    def apply(self, node: Node, variants: Sequence[Pattern] | None = None) -> Node | None:
        """The replacement of the Node, or None; `variants` are those worth a try."""
        for pattern in self.variants if variants is None else variants:
            bound: dict[str, Node] = {}
            if pattern.fits(node, bound):
                match = Match(bound, node)
                if self.when is None or self.when(match):
                    with located(node.location):
                        new = self.build(match)
                    if new is not None and new is not node:
                        return new
        return None


Candidates = tuple[tuple[Rule, tuple[Pattern, ...]], ...]


class RuleSet:
    """A list of Rules with unique names; earlier Rules are tried first."""

    def __init__(self, name: str, rules: Iterable[Rule]) -> None:
        self.name, self.rules = name, list(rules)
        names = [r.name for r in self.rules]
        if len(set(names)) != len(names):
            raise InternalError(f"rules {name}", "a name is used twice")
        self.roots: dict[Op, list[Rule]] = {}
        for rule in self.rules:
            for op in rule.roots:
                self.roots.setdefault(op, []).append(rule)
        self._candidates: dict[tuple[Op, ...], Candidates] = {}

    def __repr__(self) -> str:
        return f"<rules {self.name}: {len(self.rules)}>"

    def __add__(self, other: RuleSet) -> RuleSet:
        return RuleSet(f"{self.name}+{other.name}", self.rules + other.rules)

    def candidates(self, node: Node) -> Candidates:
        """Rules, with the orders of their patterns, that the Ops in sight allow."""
        op, inputs = node.op, node.inputs
        if op not in self.roots:
            return ()
        count = len(inputs)
        if count == 1:
            key: tuple[Op, ...] = (op, inputs[0].op)
        elif count == 2:
            key = (op, inputs[0].op, inputs[1].op)
        elif count > 3:
            return self._select(node)
        else:
            key = (op, *[i.op for i in inputs])
        found = self._candidates.get(key)
        if found is None:
            found = self._candidates[key] = self._select(node)
        return found

    def _select(self, node: Node) -> Candidates:
        chosen = []
        for rule in self.roots[node.op]:
            variants = tuple([p for p in rule.variants if p.could_fit(node)])
            if variants:
                chosen.append((rule, variants))
        return tuple(chosen)

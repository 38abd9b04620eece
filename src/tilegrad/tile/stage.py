"""Rewrite a kernel's Python once, so that loops and branches over tiles can be staged.

`for` and `if` become calls that get their bodies as functions of the variables they set:

    for i in tile.range(n):          def body(item, total):
        total = total + x[i]             i = item; total = total + x[i]
                                         return (total,)
                                     (total,) = stage.loop(tile.range(n), body, (total,), ...)

Over plain Python values the calls do what Python does, so ordinary loops unroll and ordinary
branches choose while tracing. A body with return, break or continue stays plain Python, and a
tile as its condition is an error. Invariant: the rewritten function keeps the file and the line
of every statement, so errors and Nodes point at the user's own source.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Iterable
from typing import Any

from ..core.errors import Location, UserError

STAGE = "__tilegrad_stage__"
FACTORY = "__tilegrad_factory__"
UNSET = object()
Function = Callable[..., Any]


class Staged:
    """A function rewritten for tracing; call it with the tracing operations."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.code = _compiled(function)

    def values(self) -> tuple[Any, ...]:
        """What the function's free variables hold now; UNSET where they hold nothing."""
        found = []
        for cell in self.function.__closure__ or ():
            try:
                found.append(cell.cell_contents)
            except ValueError:
                found.append(UNSET)
        return tuple(found)

    def bind(self, stage: Any, values: tuple[Any, ...] | None = None) -> Function:
        """The rewritten function over given operations, closed over values of its free variables
        (None: what they hold now)."""
        held = self.values() if values is None else values
        free = self.function.__code__.co_freevars
        values = tuple([stage.undefined(n) if v is UNSET else v for n, v in zip(free, held)])
        factory = types.FunctionType(self.code, self.function.__globals__)
        made: Function = factory(stage, *values)
        made.__defaults__ = self.function.__defaults__
        made.__kwdefaults__ = self.function.__kwdefaults__
        return made


def _compiled(function: Function) -> types.CodeType:
    """The code of a factory: factory(stage, *free variables) -> rewritten function."""
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError):
        raise UserError(
            "the source of the kernel cannot be read",
            got=getattr(function, "__qualname__", function),
            hint="write the kernel in a file, not in a prompt",
        ) from None
    file = inspect.getsourcefile(function) or function.__code__.co_filename
    tree = ast.parse(textwrap.dedent("".join(lines)))
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        raise UserError(
            "a kernel is a plain function",
            expected="def name(...):",
            got=type(definition).__name__,
            location=Location(file, first),
        )
    ast.increment_lineno(tree, first - 1)
    new = _Rewriter().outermost(definition)
    given = ", ".join([STAGE, *function.__code__.co_freevars])
    factory = _written(f"def {FACTORY}({given}): return {new.name}", definition)
    factory.body.insert(0, new)
    module = ast.fix_missing_locations(ast.Module([factory], []))
    code = compile(module, file, "exec", dont_inherit=True)
    return next(c for c in code.co_consts if isinstance(c, types.CodeType))


def _written(text: str, near: Any) -> Any:
    """The statement of a text, all of it on the first line of another."""
    (made,) = ast.parse(text).body
    for node in ast.walk(made):
        if "lineno" in node._attributes:
            node.lineno = node.end_lineno = near.lineno  # type: ignore[attr-defined]
            node.col_offset = node.end_col_offset = near.col_offset  # type: ignore[attr-defined]
    return made


def _called(text: str, first: ast.expr, near: ast.AST) -> ast.expr:
    """A call of an operation of tracing, with one more argument before those of the text."""
    made: ast.Call = _written(f"{STAGE}.{text}", near).value
    made.args.insert(0, first)
    return made


def _tuple(names: list[str]) -> str:
    """The text of a tuple of variables."""
    return f"({''.join([f'{n}, ' for n in names])})"


SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
EXPRESSIONS = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)  # with names
LEAVING = (ast.Return, ast.Yield, ast.YieldFrom)


def set_names(nodes: Iterable[ast.AST]) -> list[str]:
    """Names that statements set, in order; functions and comprehensions keep theirs."""
    found: dict[str, None] = {}

    def walk(node: ast.AST) -> None:
        if isinstance(node, SCOPES):
            found[node.name] = None
            return
        if isinstance(node, EXPRESSIONS):
            return
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found[node.id] = None
        for child in ast.iter_child_nodes(node):
            walk(child)

    for node in nodes:
        walk(node)
    return list(found)


def _escapes(nodes: Iterable[ast.AST], loop: bool = False) -> bool:
    """Whether statements leave their body: return, yield, or break/continue of a loop outside."""
    for node in nodes:
        if isinstance(node, (*SCOPES, ast.Lambda)):
            continue
        if isinstance(node, LEAVING) or (not loop and isinstance(node, (ast.Break, ast.Continue))):
            return True
        if _escapes(ast.iter_child_nodes(node), loop or isinstance(node, (ast.For, ast.While))):
            return True
    return False


class _Rewriter(ast.NodeTransformer):
    def __init__(self) -> None:
        self.count = 0

    def outermost(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """The kernel itself: no decorators, no annotations, all names set from the start."""
        own = node.args
        own.args[:0], own.posonlyargs = own.posonlyargs, []  # all are given by name
        for a in ast.walk(own):
            if isinstance(a, ast.arg):
                a.annotation = None
        own.defaults = [ast.Constant(None) for _ in own.defaults]  # put back by bind
        own.kw_defaults = [None if d is None else ast.Constant(None) for d in own.kw_defaults]
        node.decorator_list, node.returns = [], None
        return self.visit_FunctionDef(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """Every name that it sets has a value from the start."""
        taken = {a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)}
        for inner in ast.walk(node):
            if isinstance(inner, (ast.Global, ast.Nonlocal)):
                taken.update(inner.names)
        names = [n for n in set_names(node.body) if n not in taken]
        self.generic_visit(node)
        node.body[:0] = [_written(f"{n} = {STAGE}.undefined({n!r})", node) for n in names]
        return node

    def block(
        self, name: str, given: list[str], body: list[ast.stmt], names: list[str], near: ast.stmt
    ) -> Any:
        """A function of the body: (given, names) -> names."""
        arguments = ", ".join([*given, *names])
        made = _written(f"def {name}({arguments}): return {_tuple(names)}", near)
        made.body[:0] = body
        return made

    def result(self, names: list[str], text: str, first: ast.expr, near: ast.stmt) -> ast.stmt:
        """names = an operation of tracing, with what they hold now and what they are called."""
        made = _written(f"{_tuple(names)} = None", near)
        made.value = _called(text.format(f"{_tuple(names)}, {tuple(names)}"), first, near)
        return made

    def visit_For(self, node: ast.For) -> Any:
        escapes = _escapes(node.body)
        targets = set_names([node.target])
        names = [n for n in set_names(node.body) if n not in targets]
        self.generic_visit(node)
        if escapes or node.orelse:
            node.iter = _called("plain_range()", node.iter, node)
            return node
        self.count += 1
        name, item = f"__tilegrad_loop{self.count}", f"__tilegrad_item{self.count}"
        first = _written(f"_ = {item}", node)
        first.targets = [node.target]
        made = self.block(name, [item], [first, *node.body], names, node)
        known = isinstance(node.target, ast.Name) and node.target.id.strip("_")
        call = f"loop({name}, {{}}, {known or 'i'!r})"  # the index is what Tile IR calls it
        return [made, self.result(names, call, node.iter, node)]

    def visit_If(self, node: ast.If) -> Any:
        escapes = _escapes([*node.body, *node.orelse])
        names = set_names([*node.body, *node.orelse])
        self.generic_visit(node)
        if escapes:
            node.test = _called("plain_test()", node.test, node)
            return node
        self.count += 1
        then, otherwise = (f"__tilegrad_{w}{self.count}" for w in ("then", "otherwise"))
        return [
            self.block(then, [], node.body, names, node),
            self.block(otherwise, [], node.orelse, names, node),
            self.result(names, f"branch({then}, {otherwise}, {{}})", node.test, node),
        ]

    def visit_While(self, node: ast.While) -> Any:
        self.generic_visit(node)
        node.test = _called("plain_test()", node.test, node)
        return node


@functools.lru_cache(maxsize=256)
def staged(function: Function) -> Staged:
    """The rewritten form of a function, made once."""
    return Staged(function)

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
from collections.abc import Callable, Iterator
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
        self.free = function.__code__.co_freevars
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
        values = tuple([stage.undefined(n) if v is UNSET else v for n, v in zip(self.free, held)])
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
    rewriter = _Rewriter(file)
    new = rewriter.outermost(definition)
    given = [ast.arg(STAGE), *[ast.arg(n) for n in function.__code__.co_freevars]]
    back = ast.Return(ast.Name(new.name, ast.Load()))
    factory = ast.FunctionDef(FACTORY, _arguments(given), [new, back], [], None)
    ast.copy_location(factory, definition)
    module = ast.Module([factory], [])
    ast.fix_missing_locations(module)
    code = compile(module, file, "exec", dont_inherit=True)
    return next(c for c in code.co_consts if isinstance(c, types.CodeType))


def _arguments(names: list[ast.arg]) -> ast.arguments:
    return ast.arguments([], names, None, [], [], None, [])


def _at(new: Any, near: ast.AST) -> Any:
    """A made statement, on the first line of what it stands for, and all that is in it."""
    for node in ast.walk(new):
        if getattr(node, "lineno", None) is None and "lineno" in node._attributes:
            node.lineno = node.end_lineno = near.lineno  # type: ignore[attr-defined]
            node.col_offset = node.end_col_offset = near.col_offset  # type: ignore[attr-defined]
    return new


def _given(own: ast.arguments) -> list[ast.arg]:
    found = [*own.posonlyargs, *own.args, *own.kwonlyargs, own.vararg, own.kwarg]
    return [a for a in found if a is not None]


def set_names(nodes: list[ast.stmt]) -> list[str]:
    """Names that statements set, in order; functions and comprehensions keep theirs."""
    found: dict[str, None] = {}

    def walk(node: ast.AST) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found[node.name] = None
            return
        if isinstance(
            node, (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
        ):
            return
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found[node.id] = None
        for child in ast.iter_child_nodes(node):
            walk(child)

    for node in nodes:
        walk(node)
    return [n for n in found if not n.startswith("__tilegrad")]


def _escapes(nodes: list[ast.stmt], loop: bool = False) -> bool:
    """Whether statements leave their body: return, yield, or break/continue of a loop outside."""
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if isinstance(node, ast.Return) or (
            not loop and isinstance(node, (ast.Break, ast.Continue))
        ):
            return True
        if any(isinstance(n, (ast.Yield, ast.YieldFrom)) for n in ast.walk(node)):
            return True
        inner = loop or isinstance(node, (ast.For, ast.While))
        if any(_escapes(part, inner) for part in _bodies(node)):
            return True
    return False


def _bodies(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        part = getattr(node, name, None)
        if part:
            yield part
    for handler in getattr(node, "handlers", ()):
        yield handler.body


class _Rewriter(ast.NodeTransformer):
    def __init__(self, file: str) -> None:
        self.file, self.count = file, 0

    def outermost(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """The kernel itself: no decorators, no annotations, all names set from the start."""
        own = node.args
        for a in _given(own):
            a.annotation = None
        own.defaults = [ast.Constant(None) for _ in own.defaults]  # put back by bind
        own.kw_defaults = [None if d is None else ast.Constant(None) for d in own.kw_defaults]
        new = ast.FunctionDef(node.name, own, self.started(node), [], None)
        return ast.copy_location(new, node)

    def started(self, node: ast.FunctionDef) -> list[ast.stmt]:
        """The rewritten body of a function, after every name it sets was given a value."""
        taken = {a.arg for a in _given(node.args)}
        taken |= {
            n for s in ast.walk(node) if isinstance(s, (ast.Global, ast.Nonlocal)) for n in s.names
        }
        start: list[ast.stmt] = []
        for name in set_names(node.body):
            if name not in taken:
                value = self.call("undefined", [ast.Constant(name)])
                made = ast.Assign([ast.Name(name, ast.Store())], value)
                start.append(ast.copy_location(made, node))
        return [*start, *self.statements(node.body)]

    def statements(self, nodes: list[ast.stmt]) -> list[ast.stmt]:
        """Statements, rewritten."""
        found = [self.visit(node) for node in nodes]
        return [s for new in found for s in (new if isinstance(new, list) else [new])]

    def call(self, name: str, given: list[ast.expr]) -> ast.Call:
        function = ast.Attribute(ast.Name(STAGE, ast.Load()), name, ast.Load())
        return ast.Call(function, given, [])

    def block(
        self, name: str, given: list[str], body: list[ast.stmt], names: list[str], near: ast.stmt
    ) -> ast.FunctionDef:
        """A function of the body: (given, names) -> names."""
        back = ast.Return(self.values(names)[0])
        arguments = _arguments([ast.arg(n) for n in (*given, *names)])
        new = ast.FunctionDef(name, arguments, [*body, back], [], None)
        _at(back, near)
        return ast.copy_location(new, near)

    def finish(self, names: list[str], value: ast.Call, near: ast.stmt) -> ast.stmt:
        """names = value."""
        last: ast.stmt
        if names:
            into = ast.Tuple([ast.Name(n, ast.Store()) for n in names], ast.Store())
            last = ast.Assign([into], value)
        else:
            last = ast.Expr(value)
        return _at(last, near)

    def values(self, names: list[str]) -> list[ast.expr]:
        given: ast.expr = ast.Tuple([ast.Name(n, ast.Load()) for n in names], ast.Load())
        labels: ast.expr = ast.Tuple([ast.Constant(n) for n in names], ast.Load())
        return [given, labels]

    def visit_For(self, node: ast.For) -> Any:
        names = set_names(node.body)
        targets = set_names([ast.copy_location(ast.Assign([node.target], node.iter), node)])
        escapes = _escapes(node.body, loop=False)
        body = self.statements(node.body)
        if escapes or node.orelse:
            node.body = body
            node.iter = _at(self.call("plain_range", [node.iter]), node)
            node.orelse = self.statements(node.orelse)
            return node
        names = [n for n in names if n not in targets]
        self.count += 1
        name, item = f"__tilegrad_loop{self.count}", f"__tilegrad_item{self.count}"
        first = _at(ast.Assign([node.target], ast.Name(item, ast.Load())), node)
        made = self.block(name, [item], [first, *body], names, node)
        known = isinstance(node.target, ast.Name) and node.target.id.strip("_")
        index = ast.Constant(known or "i")  # what Tile IR calls it
        given = [node.iter, ast.Name(name, ast.Load()), *self.values(names), index]
        value = self.call("loop", given)
        return [made, self.finish(names, value, node)]

    def visit_If(self, node: ast.If) -> Any:
        names = set_names([*node.body, *node.orelse])
        escapes = _escapes([*node.body, *node.orelse], loop=False)
        body = self.statements(node.body)
        other = self.statements(node.orelse)
        if escapes:
            node.body, node.orelse = body, other
            node.test = _at(self.call("plain_test", [node.test]), node)
            return node
        self.count += 1
        parts = []
        for word, part in (("then", body), ("otherwise", other)):
            parts.append(self.block(f"__tilegrad_{word}{self.count}", [], part, names, node))
        given = [node.test, *[ast.Name(p.name, ast.Load()) for p in parts], *self.values(names)]
        return [*parts, self.finish(names, self.call("branch", given), node)]

    def visit_While(self, node: ast.While) -> Any:
        node.test = _at(self.call("plain_test", [node.test]), node)
        node.body = self.statements(node.body)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        node.body = self.started(node)
        return node

    def visit_With(self, node: ast.With) -> Any:
        node.body = self.statements(node.body)
        return node


@functools.lru_cache(maxsize=256)
def staged(function: Function) -> Staged:
    """The rewritten form of a function, made once."""
    return Staged(function)

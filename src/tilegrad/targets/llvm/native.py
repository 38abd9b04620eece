"""A small language for native code beside kernels: functions in Python's syntax, as LLVM IR text.

    @exported                        others are the module's own; one with the body `...` is libc's
    def first(p: pool, n: i64) -> i64:
        x = i64[p.table, n]          an element of memory: type, pointer, number; `i64[q] = x` sets
        return x if x > n else n     a choice; both sides are computed, of `and` and `or` too

A name is a variable, of the type of what it is first given, and a number has the type of what it
meets. A record is a NumPy dtype, its fields are read and set by name. Of a place (an element or a
field) `at` gives the address; `load`, `store`, `add` and `sub` with an order are atomic.
`room(bytes)` is memory on the stack, `i32(x)` another width. Invariant: comparisons are of signed
numbers, divisions of unsigned ones, and nothing is checked.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ...core.errors import InternalError

WIDTHS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "ptr": 64}
FIELDS = {"u8": "ptr", "i8": "i64", "u4": "i32", "i4": "i32"}
OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.FloorDiv: "udiv",
    ast.Mod: "urem",
    ast.BitAnd: "and",
    ast.And: "and",
    ast.Or: "or",
    ast.Eq: "eq",
    ast.NotEq: "ne",
    ast.Lt: "slt",
    ast.Gt: "sgt",
    ast.GtE: "sge",
}


class Value(NamedTuple):
    """What an expression gives: its type ('' of a number), and its name in LLVM."""

    type: str
    text: str


@dataclass(frozen=True)
class Module:
    """What functions may name: records, numbers, instructions by name, and one another."""

    records: Mapping[str, np.dtype[Any]]
    names: Mapping[str, Value]
    instructions: Mapping[str, str]
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)

    def text(self, source: str) -> str:
        """The LLVM IR of some functions."""
        found = [f for f in ast.parse(source).body if isinstance(f, ast.FunctionDef)]
        self.functions.update((f.name, f) for f in found)
        return "\n".join(self._declared(f) or Function(self, f).text() for f in found)

    def low(self, type_: str) -> str:
        """A type as LLVM has it."""
        return "ptr" if type_ in self.records else type_

    def head(self, function: ast.FunctionDef) -> tuple[str, list[str], str]:
        """The result's type, those of arguments, and '...' where more may follow."""
        given = [ast.unparse(a.annotation) for a in function.args.args if a.annotation]
        result = ast.unparse(function.returns) if function.returns else "void"
        return result, given, "..." if function.args.vararg else ""

    def _declared(self, function: ast.FunctionDef) -> str:
        """The declaration of a function of libc; '' for others."""
        if ast.unparse(function.body[0]) != "...":
            return ""
        result, given, more = self.head(function)
        types = ", ".join([*given, more] if more else given)
        return f"declare {result} @{function.name}({types})"


class Function:
    """One function being written."""

    def __init__(self, module: Module, node: ast.FunctionDef) -> None:
        self.module, self.node = module, node
        self.types: dict[str, str] = {}  # of variables
        self.rooms: list[str] = []
        self.lines: list[str] = []
        self.count = 0
        self.ended = False  # nothing comes here

    def text(self) -> str:
        """The whole definition."""
        result, types, _ = self.module.head(self.node)
        names = [a.arg for a in self.node.args.args]
        for name, type_ in zip(names, types):
            self.set(name, Value(type_, f"%{name}"))
        self.run(self.node.body)
        self.line("ret void" if result == "void" else "unreachable", ends=True)
        given = ", ".join(f"{self.module.low(t)} %{n}" for t, n in zip(types, names))
        words = [ast.unparse(d) for d in self.node.decorator_list]
        linkage = "" if "exported" in words else "internal "
        apart = " noinline" if "noinline" in words else ""
        head = f"define {linkage}{result} @{self.node.name}({given}){apart} {{"
        return "\n".join([head, *self.rooms, *self.lines, "}"])

    # ---- lines ----------------------------------------------------------------------------

    def line(self, text: str, ends: bool = False) -> Value:
        """One instruction without a result, where something comes to it; one that `ends` a basic
        block."""
        if not self.ended:
            self.lines.append(f"  {text}")
        self.ended |= ends
        return Value("void", "")

    def value(self, type_: str, text: str) -> Value:
        """An instruction that has a result."""
        self.count += 1
        self.line(f"%v{self.count} = {text}")
        return Value(type_, f"%v{self.count}")

    def start(self, label: str) -> None:
        """Begin a basic block."""
        self.line(f"br label %{label}", ends=True)
        self.lines.append(f"{label}:")
        self.ended = False

    def labels(self, *names: str) -> list[str]:
        """Labels that no other block has."""
        self.count += 1
        return [f"{name}{self.count}" for name in names]

    def set(self, name: str, value: Value) -> None:
        """Give a variable a value."""
        if name not in self.types:
            self.types[name] = value.type or "i64"
            self.rooms.append(f"  %{name}.at = alloca {self.module.low(self.types[name])}")
        self.line(f"store {self.typed(value, self.types[name])}, ptr %{name}.at")

    def typed(self, value: Value, type_: str = "") -> str:
        """A value as an operand with its type; a number has that of whom it meets."""
        return f"{self.module.low(value.type or type_ or 'i64')} {value.text}"

    # ---- statements -----------------------------------------------------------------------

    def run(self, body: Sequence[ast.stmt]) -> None:
        """Statements in order."""
        for statement in body:
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self.set(name, self.read(value))
                case ast.AnnAssign(
                    target=ast.Name(id=name), annotation=kind, value=ast.expr() as x
                ):
                    self.set(name, Value(ast.unparse(kind), self.read(x).text))
                case ast.Assign(targets=[place], value=value):
                    type_, address = self.place(place)
                    self.line(f"store {self.typed(self.read(value), type_)}, ptr {address}")
                case ast.Expr(value=value):
                    self.read(value)
                case ast.Return(value=None):
                    self.line("ret void", ends=True)
                case ast.Return(value=ast.expr() as value):
                    result = self.module.head(self.node)[0]
                    self.line(f"ret {self.typed(self.read(value), result)}", ends=True)
                case ast.If(test=test, body=yes, orelse=no):
                    self.branch(test, yes, no)
                case ast.While(test=test, body=inner):
                    self.loop(test, inner)
                case _:
                    raise InternalError("llvm.native", f"no statement: {ast.unparse(statement)}")

    def branch(self, test: ast.expr, *parts: Sequence[ast.stmt]) -> None:
        """One part or the other."""
        yes, no, end = self.labels("yes", "no", "end")
        self.line(f"br i1 {self.holds(test)}, label %{yes}, label %{no}", ends=True)
        for label, part in zip((yes, no), parts):
            self.start(label)
            self.run(part)
            self.line(f"br label %{end}", ends=True)
        self.start(end)

    def loop(self, test: ast.expr, inner: Sequence[ast.stmt]) -> None:
        """A part again and again."""
        head, turn, done = self.labels("head", "turn", "done")
        self.start(head)
        self.line(f"br i1 {self.holds(test)}, label %{turn}, label %{done}", ends=True)
        self.start(turn)
        self.run(inner)
        self.line(f"br label %{head}", ends=True)
        self.start(done)

    # ---- expressions ----------------------------------------------------------------------

    def holds(self, node: ast.expr) -> str:
        """A condition; a number holds if it is not 0."""
        found = self.read(node)
        if found.type == "i1":
            return found.text
        return self.value("i1", f"icmp ne {self.typed(found)}, 0").text

    def read(self, node: ast.expr) -> Value:
        """The value of an expression."""
        match node:
            case ast.Constant(value=bool(value)):
                return Value("i1", str(value).lower())
            case ast.Constant(value=int(value)):
                return Value("", str(value))
            case ast.Name(id=name) if name in self.module.names:
                return self.module.names[name]
            case ast.Name(id=name):
                type_ = self.types[name]
                return self.value(type_, f"load {self.module.low(type_)}, ptr %{name}.at")
            case ast.Attribute() | ast.Subscript():
                type_, address = self.place(node)
                return self.value(type_, f"load {type_}, ptr {address}")
            case ast.BinOp(left=a, op=op, right=b) | ast.Compare(left=a, ops=[op], comparators=[b]):
                return self.computed(node, OPERATORS[type(op)], self.read(a), self.read(b))
            case ast.BoolOp(op=op, values=[a, b]):
                one, other = self.holds(a), self.holds(b)
                return self.value("i1", f"{OPERATORS[type(op)]} i1 {one}, {other}")
            case ast.IfExp(test=test, body=a, orelse=b):
                mask, yes, no = self.holds(test), self.read(a), self.read(b)
                type_ = yes.type or no.type
                chosen = f"{self.typed(yes, type_)}, {self.typed(no, type_)}"
                return self.value(type_, f"select i1 {mask}, {chosen}")
            case ast.Call(func=function, args=given):
                return self.call(function, given)
        raise InternalError("llvm.native", f"no expression: {ast.unparse(node)}")

    def computed(self, node: ast.expr, name: str, a: Value, b: Value) -> Value:
        """An instruction on two values; a pointer moves by bytes."""
        type_ = a.type or b.type
        if isinstance(node, ast.Compare):
            return self.value("i1", f"icmp {name} {self.typed(a, type_)}, {b.text}")
        if type_ == "ptr":
            return self.value("ptr", f"getelementptr i8, {self.typed(a)}, {self.typed(b)}")
        return self.value(type_, f"{name} {self.typed(a, type_)}, {b.text}")

    def place(self, node: ast.expr) -> tuple[str, str]:
        """The type and the address of an element or a field."""
        match node:
            case ast.Attribute(value=owner, attr=name):
                record = self.read(owner)
                kind, at = self.module.records[record.type].fields[name][:2]  # type: ignore[index]
                found = self.value("ptr", f"getelementptr i8, ptr {record.text}, i64 {at}")
                return FIELDS[kind.base.str[1:]], found.text
            case ast.Subscript(value=ast.Name(id=type_), slice=ast.Tuple(elts=[base, number])):
                start, moved = self.read(base), self.typed(self.read(number))
                return type_, self.value(
                    "ptr", f"getelementptr {type_}, ptr {start.text}, {moved}"
                ).text
            case ast.Subscript(value=ast.Name(id=type_), slice=base):
                return type_, self.read(base).text
        raise InternalError("llvm.native", f"no place: {ast.unparse(node)}")

    def call(self, function: ast.expr, given: Sequence[ast.expr]) -> Value:
        """A function's result; what is no name is the address of one."""
        name = ast.unparse(function)
        if name in self.module.instructions:
            values = [self.read(x) for x in given]
            first, rest = [self.typed(x) for x in values[:1]], [x.text for x in values[1:]]
            text = self.module.instructions[name].format(*first, *rest)
            return self.line(text) if text.startswith("call void") else self.value("i1", text)
        if name in WIDTHS:
            return self.resized(self.read(given[0]), name)
        if name == "room":
            self.count += 1
            self.rooms.append(
                f"  %room{self.count} = alloca [{ast.unparse(given[0])} x i8], align 8"
            )
            return Value("ptr", f"%room{self.count}")
        if name in ("at", "load", "store", "add", "sub"):
            return self.atomic(name, *given)
        if name not in self.module.functions:
            held = ", ".join(self.typed(self.read(x)) for x in given)
            return self.line(f"call void {self.read(function).text}({held})")
        result, types, more = self.module.head(self.module.functions[name])
        types += [""] * (len(given) - len(types))
        held = ", ".join(self.typed(self.read(x), t) for x, t in zip(given, types))
        kind = f"{result} ({types[0]}, ...)" if more else result
        if result == "void":
            return self.line(f"call void @{name}({held})")
        return self.value(result, f"call {kind} @{name}({held})")

    def atomic(self, name: str, where: ast.expr, *given: ast.expr) -> Value:
        """The address of a place, or one step on it that no other worker sees half of."""
        type_, address = self.place(where)
        if name == "at":
            return Value("ptr", address)
        *values, order = given
        align = f"{ast.unparse(order)}, align {WIDTHS[type_] // 8}"
        if name == "load":
            return self.value(type_, f"load atomic {type_}, ptr {address} {align}")
        value = self.typed(self.read(values[0]), type_)
        if name == "store":
            return self.line(f"store atomic {value}, ptr {address} {align}")
        return self.value(type_, f"atomicrmw {name} ptr {address}, {value} {align}")

    def resized(self, x: Value, type_: str) -> Value:
        """A number in another width, seen as unsigned."""
        if not x.type or x.type == type_:
            return Value(type_, x.text)
        how = "trunc" if WIDTHS[x.type] > WIDTHS[type_] else "zext"
        return self.value(type_, f"{how} {x.type} {x.text} to {type_}")

"""The text of every IR, printed and parsed by one grammar.

    tilegrad-ir 1 graph
    symbols N in 1..1024
    main(%a: float32[N,8], %b: float32[8]) {
      %0 = expand(%b) {shape=(N, 8)} : float32[N,8]
      %1 = add(%a, %0) : float32[N,8]  @ model.py:12
      return %1
    }

A Node that owns Blocks ends in `{`, its Blocks and `}`; values of enclosing Blocks are visible
in them. A Node of type nothing has no name and no type; a type left out is inferred; `#` starts
a comment. Invariant: print(parse(print(block))) == print(block), and the parsed Block has the
same structure. Nothing recurses on the depth of a Graph, only on the nesting of Blocks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from ..core.errors import Location, TilegradError, UserError, meant
from .block import Block, argument, argument_op
from .distribution import Distribution
from .layout import Layout
from .literal import ATTRIBUTE_PARSERS, Names, Reader, quote, unique, write, write_type
from .node import DIALECTS, Dialect, Node, Op
from .types import NOTHING, Type

__all__ = ["ATTRIBUTE_PARSERS", "VERSION", "parse_block", "print_block", "print_node"]

VERSION = 1
ATTRIBUTE_PARSERS.update(layout=Layout.from_text, distribution=Distribution.from_text)
_PLAIN_FILE = re.compile(r"[\w./+-]+\Z")


def print_block(block: Block, dialect: str, *, locations: bool = False) -> str:
    """The text of a Block of a dialect, with the user's lines if asked."""
    printer = _Printer(dialect, locations)
    printer.mark_used(block)
    printer.block(block, "")
    lines = [f"tilegrad-ir {VERSION} {dialect}"]
    if printer.symbols.of:
        lines.append("symbols " + printer.symbols.declarations())
    return "\n".join(lines + printer.lines) + "\n"


def print_node(node: Node, dialect: str = "") -> str:
    """One Node with its location, for messages; inputs are named by what they are."""
    printer = _Printer(dialect or node.op.dialect.name, locations=True, strict=False)
    for source in node.inputs:
        own = source.attrs.get("name") if source.op is argument_op else None
        printer.names[source] = f"%{own}" if own else f"%{source.op.name}.{source.serial}"
    printer.statement(node, "")
    return printer.lines[0].removesuffix(" {")


class _Printer:
    def __init__(self, dialect: str, locations: bool, strict: bool = True) -> None:
        self.dialect, self.locations, self.strict = dialect, locations, strict
        self.symbols = Names()
        self.names: dict[Node, str] = {}
        self.taken: set[str] = set()
        self.used: set[Node] = set()  # Nodes of type nothing that something refers to
        self.lines: list[str] = []
        self.types: dict[Type, str] = {}
        self.count = 0

    def mark_used(self, block: Block) -> None:
        for node in block.nodes:
            self.used.update([s for s in node.inputs if s.type == NOTHING])
            for inner in node.blocks:
                self.mark_used(inner)
        self.used.update([r for r in block.results if r.type == NOTHING])

    def type(self, type_: Type) -> str:
        found = self.types.get(type_)
        if found is None:
            found = self.types[type_] = write_type(type_, self.symbols)
        return found

    def values(self, nodes: Iterable[Node]) -> str:
        return ", ".join([self.names.get(n) or f"%outside_{n.serial}" for n in nodes])

    def fresh(self) -> str:
        while str(self.count) in self.taken:
            self.count += 1
        self.count += 1
        return f"%{self.count - 1}"

    def argument(self, node: Node) -> str:
        own = str(node.attrs.get("name", ""))
        name = unique(own, self.taken)
        self.names[node] = "%" + name
        given = "" if name == own else " " + quote(own)
        return f"%{name}{given}: {self.type(node.type)}"

    def block(self, block: Block, indent: str) -> None:
        shadowed = {n: self.names[n] for n in (*block.arguments, *block.nodes) if n in self.names}
        arguments = ", ".join([self.argument(a) for a in block.arguments])
        name = block.name if re.fullmatch(r"[A-Za-z_]\w*", block.name) else quote(block.name)
        self.lines.append(f"{indent}{name}({arguments}) {{")
        for node in block.nodes:
            self.statement(node, indent + "  ")
        results = self.values(block.results)
        self.lines.append(f"{indent}  return {results}".rstrip())
        self.lines.append(indent + "}")
        for node in (*block.arguments, *block.nodes):
            self.names.pop(node, None)
        self.names.update(shadowed)

    def statement(self, node: Node, indent: str) -> None:
        op = node.op
        name = op.name if op.dialect.name == self.dialect else f"{op.dialect.name}.{op.name}"
        text = f"{name}({self.values(node.inputs)})"
        if node.attrs:
            parts = [
                f"{key}={write(value, self.symbols, self.strict)}"
                for key, value in node.attrs.items()
            ]
            text += " {" + ", ".join(parts) + "}"
        own = None
        if node.type != NOTHING or node in self.used:
            own = self.fresh()
            text = f"{own} = {text} : {self.type(node.type)}"
        if self.locations and node.location and not node.location.file.startswith("<"):
            file, line = node.location.file, node.location.line
            text += f"  @ {file if _PLAIN_FILE.match(file) else quote(file)}:{line}"
        self.lines.append(indent + text + (" {" if node.blocks else ""))
        if node.blocks and self.strict:
            for inner in node.blocks:
                self.block(inner, indent + "  ")
            self.lines.append(indent + "}")
        if own is not None:
            self.names[node] = own


def parse_block(text: str) -> Block:
    """The Block that a text describes; a mistake in it is a UserError with its line."""
    parser = _Parser(text)
    dialect = parser.header()
    block = parser.block(dialect)
    parser.skip_lines()
    if parser.reader.kind != "end":
        raise parser.reader.fail("the end of the text")
    return block


class _Parser:
    def __init__(self, text: str) -> None:
        self.reader = Reader(text)
        self.values: dict[str, Node] = {}
        self.line = 1

    def skip_lines(self) -> None:
        while self.reader.kind == "newline":
            self.reader.position += 1
            self.line += 1

    def end_line(self) -> None:
        self.reader.expect("\n", " here")
        self.line += 1
        self.skip_lines()

    def header(self) -> Dialect:
        reader = self.reader
        self.skip_lines()
        form = "the first line 'tilegrad-ir 1 <dialect>'"
        for part in ("tilegrad", "-", "ir"):
            if reader.next != part:
                raise reader.fail(form)
            reader.position += 1
        version = reader.integer(form)
        if version != VERSION:
            raise UserError(
                f"cannot read IR text of version {version}",
                expected=f"version {VERSION}",
                got=f"version {version}",
                hint="print it again with this tilegrad, or read it with the one that wrote it",
            )
        name = reader.take("word", "the name of a dialect")
        if name not in DIALECTS:
            reader.position -= 1
            raise reader.fail("one of the dialects " + ", ".join(sorted(DIALECTS)))
        self.end_line()
        if reader.accept("symbols"):
            reader.declarations()
            self.end_line()
        return DIALECTS[name]

    def block(self, dialect: Dialect) -> Block:
        reader = self.reader
        outer = dict(self.values) if self.values else {}
        if reader.kind == "string":
            name = json.loads(reader.take("string", ""))
        else:
            name = reader.take("word", "the name of a Block")
        reader.expect("(", " and the arguments of the Block")
        arguments: list[Node] = []
        while not reader.accept(")"):
            arguments.append(self.argument())
            if not reader.accept(",") and reader.next != ")":
                raise reader.fail("',' or ')' after an argument")
        reader.expect("{", " before the body of the Block")
        self.end_line()
        nodes: list[Node] = []
        while not reader.accept("return"):
            nodes.append(self.statement(dialect))
        results = []
        while reader.kind == "value":
            results.append(self.use())
            if not reader.accept(","):
                break
        self.end_line()
        reader.expect("}", " after return")
        self.values = outer
        return Block(name, tuple(arguments), nodes, tuple(results))

    def argument(self) -> Node:
        reader = self.reader
        printed = reader.take("value", "an argument such as '%a: float32[4]'")
        own = json.loads(reader.take("string", "")) if reader.kind == "string" else printed[1:]
        reader.expect(":", " and the type of the argument")
        node = argument(own, reader.type())
        self.values[printed] = node
        return node

    def use(self) -> Node:
        reader = self.reader
        name = reader.take("value", "a value such as %0")
        found = self.values.get(name)
        if found is None:
            reader.position -= 1
            raise reader.fail("a value defined before this line", name)
        return found

    def statement(self, dialect: Dialect) -> Node:
        reader, line, start = self.reader, self.line, self.reader.position
        name = None
        if reader.kind == "value":
            name = reader.take("value", "")
            reader.expect("=", f" after {name}")
        op = self.op(dialect)
        reader.expect("(", " and the inputs of the op")
        inputs = []
        while not reader.accept(")"):
            inputs.append(self.use())
            if not reader.accept(",") and reader.next != ")":
                raise reader.fail("',' or ')' after an input")
        attrs = self.attrs(op)
        type_ = reader.type() if reader.accept(":") else None
        location = self.location() or Location("<ir>", line)
        blocks = self.blocks(dialect) if reader.accept("{") else ()
        node = self.make(op, tuple(inputs), attrs, blocks, type_, location, start)
        self.end_line()
        if name is not None:
            self.values[name] = node
        return node

    def op(self, dialect: Dialect) -> Op:
        reader = self.reader
        word = reader.take("word", "an op or 'return'")
        if reader.accept("."):
            if word not in DIALECTS:
                reader.position -= 2
                raise reader.fail("one of the dialects " + ", ".join(sorted(DIALECTS)))
            dialect = DIALECTS[word]
            word = reader.take("word", f"an op of {dialect.name}")
        found = dialect.ops.get(word)
        if found is None:
            reader.position -= 1
            raise reader.fail(f"an op of the dialect {dialect.name}", hint=meant(word, dialect.ops))
        return found

    def attrs(self, op: Op) -> dict[str, Any]:
        reader = self.reader
        attrs: dict[str, Any] = {}
        if reader.next == "{" and reader.texts[reader.position + 2] == "=":
            reader.position += 1
            while not reader.accept("}"):
                key = reader.take("word", "the name of an attr")
                if key not in op.attrs:
                    reader.position -= 1
                    raise reader.fail(f"an attr of {op.name}: {', '.join(op.attrs) or 'none'}")
                reader.expect("=", f" after {key}")
                attrs[key] = reader.value()
                if not reader.accept(",") and reader.next != "}":
                    raise reader.fail("',' or '}' after an attr")
        missing = [key for key in op.attrs if key not in attrs]
        if missing:
            raise reader.fail(f"the attrs {', '.join(missing)} of {op.name}")
        return attrs

    def location(self) -> Location | None:
        if self.reader.kind != "location":
            return None
        file, _, line = self.reader.take("location", "")[1:].strip().rpartition(":")
        return Location(json.loads(file) if file.startswith('"') else file, int(line))

    def blocks(self, dialect: Dialect) -> tuple[Block, ...]:
        self.end_line()
        found: list[Block] = []
        while not self.reader.accept("}"):
            found.append(self.block(dialect))
            self.end_line()
        return tuple(found)

    def make(
        self,
        op: Op,
        inputs: tuple[Node, ...],
        attrs: dict[str, Any],
        blocks: tuple[Block, ...],
        type_: Type | None,
        location: Location,
        start: int,
    ) -> Node:
        """Build the Node; where the op infers None, its type is the one in the text."""
        reader = self.reader
        try:
            node = op.make(inputs, attrs, blocks, location=location)
        except (TilegradError, TypeError) as error:
            reader.position = start
            raise reader.fail(f"inputs and attrs that fit {op.name}", str(error)) from error
        if node.type is None:
            return op.make(inputs, attrs, blocks, type=type_ or NOTHING, location=location)
        if type_ is not None and node.type != type_:
            reader.position = start
            raise reader.fail(f"the type {node.type} of {op.name}", str(type_))
        return node

"""Literals: attr values, types and symbolic sizes as text, and back.

`Names` gives every Symbol one name within a text; `write` and `write_type` print with it;
`Reader` is a cursor over tokens that reads the same grammar. Invariant: what `write` prints,
`Reader.value` reads as an equal value of the same class, floats bit for bit (every nan is one).
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from ..core.dtype import BY_NAME, DType
from ..core.errors import InternalError, UserError
from .symbol import Expr, Size, maximum, minimum, named, show
from .types import NOTHING, Array, Barrier, Memory, Nothing, Tile, Tuple, Type

# How an attr of a class with `to_text()` is read back: its `text_name`, or the lower-case name
# of the class, to a parser of that text. Whoever defines such a class registers it here.
ATTRIBUTE_PARSERS: dict[str, Callable[[str], Any]] = {}

WORDS = {"True": True, "False": False, "None": None, "nothing": NOTHING}
RESERVED = {*WORDS, *BY_NAME, "inf", "nan", "min", "max", "tuple", "return", "in", "loop"}
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")

TOKEN = re.compile(
    r"""[ \t\r]*(?:\#[^\n]*)?(?:
      (?P<newline>\n)
    | (?P<value>%[\w.]+)
    | (?P<object>[A-Za-z_]\w*"(?:[^"\\\n]|\\.)*")
    | (?P<word>[A-Za-z_]\w*)
    | (?P<number>-?(?:\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|inf\b))
    | (?P<string>"(?:[^"\\\n]|\\.)*")
    | (?P<location>@[ ]*(?:"(?:[^"\\\n]|\\.)*"|[\w./+-]+):\d+)
    | (?P<sign>//|\.\.|[-+*%(){}\[\]<>=,:.])
    | (?P<end>\Z)
    | (?P<stray>.)
    )""",
    re.VERBOSE,
)


def quote(text: str) -> str:
    """A string between double quotes, on one line."""
    return json.dumps(text)


class Names:
    """One name for each Symbol of a text, its own unless that is taken or not a plain word."""

    def __init__(self) -> None:
        self.of: dict[Expr, str] = {}
        self.taken: set[str] = set(RESERVED)

    def __call__(self, symbol: Expr) -> str:
        found = self.of.get(symbol)
        if found is None:
            found = self.of[symbol] = unique(symbol.name, self.taken)
        return found

    def declarations(self) -> str:
        """`N in 1..1024, i loop in 0..7`: all Symbols named so far."""
        parts = []
        for symbol, name in self.of.items():
            own = "" if symbol.name == name else f" {quote(symbol.name)}"
            loop = " loop" if symbol.kind == "loop" else ""
            parts.append(f"{name}{own}{loop} in {symbol.low}..{symbol.high}")
        return ", ".join(parts)


def unique(name: str, taken: set[str]) -> str:
    """The name, or a plain word near it that is not taken; it is taken from now on."""
    stem = name if IDENTIFIER.match(name) else re.sub(r"[^A-Za-z0-9_]|^(?=\d)", "_", name) or "_"
    found, count = stem, 0
    while found in taken:
        count += 1
        found = f"{stem}_{count}"
    taken.add(found)
    return found


def write_type(type_: Type, names: Names) -> str:
    """The text of a type."""
    if isinstance(type_, Array):
        return f"{type_.dtype.name}[{_sizes(type_.shape, names)}]"
    if isinstance(type_, Memory):
        text = f"{type_.scope}<{_sizes(type_.shape, names)}>{type_.dtype.name}"
        if type_.strides is not None:
            text += f" strides<{_sizes(type_.strides, names)}>"
        if type_.use != "value":
            text += f" {type_.use}"
        if type_.layout:
            plain = IDENTIFIER.match(type_.layout)
            text += f" layout<{type_.layout if plain else quote(type_.layout)}>"
        return text
    if isinstance(type_, Tuple):
        return "tuple(" + ", ".join([write_type(t, names) for t in type_.items]) + ")"
    return repr(type_)


def _sizes(sizes: tuple[Size, ...], names: Names) -> str:
    return ",".join([str(s) if isinstance(s, int) else show(s, names) for s in sizes])


def write(value: Any, names: Names, strict: bool = True) -> str:
    """The text of an attr value; where not strict, what cannot be read back prints as repr."""
    kind = value.__class__
    if kind is int or kind is bool or value is None or kind is float:
        return repr(value)
    if kind is str:
        return quote(value)
    if kind is tuple:
        inner = ", ".join([write(v, names, strict) for v in value])
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, DType):
        return value.name
    if isinstance(value, Expr):
        return show(value, names)
    if isinstance(value, (Array, Tile, Memory, Barrier, Tuple, Nothing)):
        return write_type(value, names)
    name = getattr(value, "text_name", kind.__name__.lower())
    if hasattr(value, "to_text") and (name in ATTRIBUTE_PARSERS or not strict):
        return name + quote(value.to_text())
    if not strict:
        return repr(value)
    raise InternalError(
        "text", f"an attr of class {kind.__name__} has no text; register it in ATTRIBUTE_PARSERS"
    )


class Reader:
    """A cursor over the tokens of a text, with the Symbols declared in it."""

    def __init__(self, text: str, what: str = "IR text") -> None:
        self.what = what
        self.kinds: list[str] = []
        self.texts: list[str] = []
        for match in TOKEN.finditer(text):
            kind = match.lastgroup or "stray"
            self.kinds.append(kind)
            self.texts.append(match[kind])
            if kind == "end":
                break
        self.position = 0
        self.symbols: dict[str, Size] = {}

    @property
    def line(self) -> int:
        """The line of the next token, from 1."""
        return self.kinds[: self.position].count("newline") + 1

    @property
    def next(self) -> str:
        """The text of the next token."""
        return self.texts[self.position]

    @property
    def kind(self) -> str:
        """The kind of the next token."""
        return self.kinds[self.position]

    def fail(self, expected: str, got: str | None = None, hint: str | None = None) -> UserError:
        """The error at the next token."""
        if got is None:
            ends = {"newline": "the end of the line", "end": "the end of the text"}
            got = ends.get(self.kind, repr(self.next))
        return UserError(
            f"cannot read {self.what}, line {self.line}", expected=expected, got=got, hint=hint
        )

    def accept(self, text: str) -> bool:
        """Pass the token if it is this sign or word."""
        if self.texts[self.position] == text:
            self.position += 1
            return True
        return False

    def expect(self, text: str, after: str = "") -> None:
        """Pass this sign or word, or fail."""
        if self.texts[self.position] != text:
            raise self.fail(f"{text!r}{after}" if text != "\n" else f"the end of the line{after}")
        self.position += 1

    def take(self, kind: str, expected: str) -> str:
        """Pass a token of a kind and return its text, or fail."""
        if self.kinds[self.position] != kind:
            raise self.fail(expected)
        self.position += 1
        return self.texts[self.position - 1]

    def integer(self, expected: str = "an integer") -> int:
        """A plain integer."""
        if self.kind == "number" and not set(self.next) & set(".einf"):
            return int(self.take("number", expected))
        raise self.fail(expected)

    def declarations(self) -> None:
        """What `Names.declarations` prints, into `symbols`."""
        while True:
            name = self.take("word", "the name of a Symbol")
            own = json.loads(self.take("string", "")) if self.kind == "string" else name
            kind = "loop" if self.accept("loop") else "symbol"
            self.expect("in", " and the bounds of the Symbol")
            low = self.integer()
            self.expect("..")
            self.symbols[name] = named(kind, own, low, self.integer())
            if not self.accept(","):
                return

    # Values: sums of products of primaries; only integers and Symbols take part in arithmetic.
    def value(self) -> Any:
        """Any attr value."""
        result = self._product()
        while True:
            if self.accept("+"):
                result = self._number(result) + self._number(self._product())
            elif self.accept("-"):
                result = self._number(result) - self._number(self._product())
            elif self.kind == "number" and self.next[0] == "-":  # N -3
                result = self._number(result) + self._number(self._product())
            else:
                return result

    def _number(self, value: Any) -> Any:
        if isinstance(value, (int, Expr)) and not isinstance(value, bool):
            return value
        raise self.fail("an integer or a Symbol on both sides of the operator", repr(value))

    def _product(self) -> Any:
        result = self._primary()
        while self.next in ("*", "//", "%"):
            sign = self.next
            self.position += 1
            a, b = self._number(result), self._number(self._primary())
            result = a * b if sign == "*" else a // b if sign == "//" else a % b
        return result

    def _primary(self) -> Any:
        kind, text = self.kind, self.next
        if kind == "number":
            self.position += 1
            return float(text) if "." in text or "e" in text or "inf" in text else int(text)
        if kind == "string":
            self.position += 1
            return json.loads(text)
        if kind == "object":
            return self._object()
        if kind == "word":
            return self._word()
        if self.accept("("):
            return self._parenthesis()
        raise self.fail("a value")

    def _parenthesis(self) -> Any:
        items = []
        while not self.accept(")"):
            items.append(self.value())
            if self.accept(","):
                continue
            self.expect(")", " or ','")
            if len(items) == 1:
                return items[0]
            break
        return tuple(items)

    def _object(self) -> Any:
        name, _, quoted = self.next.partition('"')
        parser = ATTRIBUTE_PARSERS.get(name)
        if parser is None:
            raise self.fail("one of " + ", ".join(sorted(ATTRIBUTE_PARSERS)), name)
        self.position += 1
        return parser(json.loads('"' + quoted))

    def _word(self) -> Any:
        text, after = self.next, self.texts[self.position + 1]
        if after == "[" or after == "<" or text == "tuple":
            return self.type()
        self.position += 1
        if text in WORDS:
            return WORDS[text]
        if text in ("inf", "nan"):
            return float(text)
        if text in ("min", "max"):
            self.expect("(")
            a = self._number(self.value())
            self.expect(",")
            b = self._number(self.value())
            self.expect(")")
            return minimum(a, b) if text == "min" else maximum(a, b)
        if text in self.symbols:
            return self.symbols[text]
        if text in BY_NAME:
            return BY_NAME[text]
        self.position -= 1
        raise self.fail("a value", hint="Symbols are declared in the line 'symbols N in 1..8'")

    def type(self) -> Type:
        """A type."""
        word = self.take("word", "a type")
        if word == "nothing":
            return NOTHING
        if word == "tuple":
            self.expect("(")
            items: list[Type] = []
            while not self.accept(")"):
                items.append(self.type())
                if not self.accept(",") and self.next != ")":
                    raise self.fail("',' or ')'")
            return Tuple(tuple(items))
        if self.accept("["):
            if word not in BY_NAME:
                self.position -= 2
                raise self.fail("a dtype")
            return Array(self._sizes("]"), BY_NAME[word])
        self.expect("<", " or '[' in a type")
        if word == "barrier":
            count = self.integer()
            self.expect(",")
            kind = self.take("word", "the kind of the barrier")
            self.expect(">")
            return Barrier(count, kind)
        return self._placed(word)

    def _placed(self, word: str) -> Type:
        shape = self._sizes(">")
        name = self.take("word", "a dtype")
        if name not in BY_NAME:
            self.position -= 1
            raise self.fail("a dtype")
        dtype = BY_NAME[name]
        if word == "tile":
            return Tile(shape, dtype)  # type: ignore[arg-type]
        strides, use, layout = None, "value", ""
        while self.kind == "word":
            option = self.take("word", "")
            if option == "strides" and self.accept("<"):
                strides = self._sizes(">")
            elif option == "layout" and self.accept("<"):
                quoted = self.kind == "string"
                layout = json.loads(self.next) if quoted else self.next
                self.position += 1
                self.expect(">")
            else:
                use = option
        return Memory(shape, dtype, word, use, strides, layout)

    def _sizes(self, close: str) -> tuple[Size, ...]:
        sizes: list[Size] = []
        while not self.accept(close):
            value = self.value()
            sizes.append(self._number(value))
            if not self.accept(",") and self.next != close:
                raise self.fail(f"',' or {close!r}")
        return tuple(sizes)


def write_symbolic(parts: Callable[[Names], str]) -> str:
    """A text that stands alone: its Symbols are declared at the end, `... where N in 1..8`."""
    names = Names()
    text = parts(names)
    return f"{text} where {names.declarations()}" if names.of else text


def read_symbolic(text: str, what: str, symbols: Mapping[str, Size] | None = None) -> Reader:
    """A Reader over what `write_symbolic` printed, its Symbols declared."""
    body, found, tail = text.rpartition(" where ")
    reader = Reader(body if found else tail, what)
    if found:
        declared = Reader(tail, what)
        declared.declarations()
        if declared.kind != "end":
            raise declared.fail("the end of the text")
        reader.symbols.update(declared.symbols)
    reader.symbols.update(symbols or {})
    return reader


def size_text(size: Size) -> Any:
    """A size as JSON: a number, or the text of an expression."""
    if isinstance(size, int):
        return size

    def parts(names: Names) -> str:
        return write(size, names)

    return write_symbolic(parts)


def read_size(value: Any) -> Size:
    """The size that `size_text` wrote."""
    return value if isinstance(value, int) else _read_size(value)


@functools.lru_cache(maxsize=4096)
def _read_size(text: str) -> Size:
    """An expression; a Recipe has the same ones hundreds of times."""
    return read_symbolic(text, "size").value()

"""A Jinja sandbox for templates that come with a model: bounded in steps, time and size.

Jinja's own sandbox keeps a template from Python's inner parts, not from running for ever or
filling the memory. So the parsed template is rewritten before it is compiled: each turn of a loop
and each call is counted, and every value that is made (output, lists, joined text, results of
filters and methods) is measured before or as it is made. Filters, methods and global functions
are short lists of what chat templates use.

Invariant: no single operation makes a value larger than the limits allow, so the count, which is
checked between operations, is never late.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.defaults import DEFAULT_FILTERS
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import do_indent
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from ...core.errors import UserError

FILTERS = frozenset({
    "abs", "batch", "capitalize", "count", "d", "default", "dictsort", "first",
    "float", "groupby", "int", "items", "join", "last", "length", "list", "lower", "map", "max",
    "min", "reject", "rejectattr", "replace", "reverse", "round", "select", "selectattr", "slice",
    "sort", "string", "sum", "title", "trim", "unique", "upper", "wordcount",
})  # fmt: skip
# Filters that write their values as text, or compare all of them.
DEEP = frozenset(
    {
        "capitalize",
        "join",
        "lower",
        "replace",
        "string",
        "title",
        "trim",
        "upper",
        "wordcount",
        "sort",
        "unique",
        "max",
        "min",
        "groupby",
        "dictsort",
    }
)
# Filters that look at one item only.
QUICK = frozenset({"count", "d", "default", "first", "last", "length"})
METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        {
            "capitalize",
            "casefold",
            "count",
            "endswith",
            "find",
            "index",
            "isalnum",
            "isalpha",
            "isdigit",
            "islower",
            "isnumeric",
            "isspace",
            "istitle",
            "isupper",
            "join",
            "lower",
            "lstrip",
            "partition",
            "removeprefix",
            "removesuffix",
            "replace",
            "rfind",
            "rindex",
            "rpartition",
            "rsplit",
            "rstrip",
            "split",
            "splitlines",
            "startswith",
            "strip",
            "title",
            "upper",
        }
    ),
    dict: frozenset({"get", "items", "keys", "values"}),
    list: frozenset({"count", "index"}),
    tuple: frozenset({"count", "index"}),
    int: frozenset(),
    float: frozenset(),
    range: frozenset({"start", "stop", "step"}),
}
# Names that no template can write: they hold a space.
CHARGE, JOIN, SPEND, STEP = "charge value", "join values", "spend amount", "one step"
LENGTH = "charge length"
ITEM = 32  # what one item of a list weighs, in characters
WIDEST, NAME = 10_000, "<chat template>"


@dataclass(frozen=True)
class Limits:
    """How much a template may do; work and output grow with what the caller passes in."""

    characters: int = 100_000  # of the template itself
    nodes: int = 12_000  # of its parsed tree: a common template has about a thousand
    output: int = 4_000_000
    work: int = 48_000_000  # characters handled by all operations together
    steps: int = 100_000  # turns of loops and calls
    seconds: float = 0.6  # of this thread's own time


class LimitError(TemplateError):
    """A template went beyond its limits."""


class Refusal(TemplateError):
    """A template called `raise_exception`."""


class Meter:
    """What one rendering has used."""

    def __init__(self, limits: Limits, given: int) -> None:
        self.limits = limits
        self.work, self.steps = limits.work + 64 * given, limits.steps
        self.longest = limits.output + 4 * given
        self.until = time.thread_time() + limits.seconds * (1 + given / limits.output)
        self.checked = 0

    def step(self) -> None:
        """One turn of a loop or one call."""
        self.steps -= 1
        if self.steps < 0:
            raise LimitError(f"more than {self.limits.steps} turns of loops and calls")
        self.spend(ITEM)

    def spend(self, amount: int) -> None:
        """Work in characters."""
        self.work -= amount
        if amount > self.longest or self.work < 0:
            raise LimitError("the template makes too much text")
        self.checked += 1
        if amount > 2000 or self.checked >= 8:
            self.checked = 0
            if time.thread_time() > self.until:
                raise LimitError(f"the template runs longer than {self.limits.seconds} s")

    def charge_length(self, value: Any) -> Any:
        """Spend for the items of a value, not for what is in them; gives the value."""
        if isinstance(value, str):
            self.spend(len(value))
        elif isinstance(value, list | tuple | dict | range):
            self.spend(ITEM * len(value))
        return value

    def charge(self, value: Any) -> Any:
        """Measure a value and spend as much; gives the value."""
        self.spend(measure(value, min(self.longest, self.work)))
        return value


def measure(value: Any, most: int) -> int:
    """Characters in a value, inner ones too; an error beyond `most`."""
    if isinstance(value, str):
        return len(value)
    total, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            total += len(item) + ITEM
        elif isinstance(item, list | tuple):
            total += ITEM * (len(item) + 1)
            waiting += item if total <= most else ()
        elif isinstance(item, dict):
            total += ITEM * (len(item) + 1)
            waiting += [*item.keys(), *item.values()] if total <= most else ()
        elif isinstance(item, Namespace):
            waiting.append(item._Namespace__attrs)
            total += ITEM
        elif isinstance(item, range):
            total += ITEM * len(item)
        else:
            total += ITEM
        if total > most:
            raise LimitError("the template makes too much text")
    return total


# ---- the template's tree ----------------------------------------------------------------------


class Bounding(NodeTransformer):
    """Rewrites a parsed template so that all it does is counted and measured."""

    def filtered(self, node: nodes.Expr | None, name: str, line: int) -> nodes.Filter:
        """A node that goes through one of the counting filters."""
        return nodes.Filter(node, name, [], [], None, None, lineno=line)

    def counted(self, node: Any) -> Any:
        """A loop or macro whose body starts with a step."""
        node = self.generic_visit(node)
        step = self.filtered(nodes.Const(None, lineno=node.lineno), STEP, node.lineno)
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        return node

    def visit_For(self, node: nodes.For) -> nodes.For:
        """Count the turns, and the items that a loop's own condition leaves out."""
        node = self.counted(node)
        if node.test is not None:
            step = self.filtered(nodes.Const(None, lineno=node.lineno), STEP, node.lineno)
            node.test = nodes.And(step, node.test, lineno=node.lineno)
        return node

    visit_Macro = visit_CallBlock = counted

    def visit_Output(self, node: Any) -> list[nodes.Node]:
        """Measure what is written."""
        node = self.generic_visit(node)
        written = sum(len(n.data) for n in node.nodes if isinstance(n, nodes.TemplateData))
        node.nodes = [
            n if isinstance(n, nodes.TemplateData) else self.filtered(n, CHARGE, n.lineno)
            for n in node.nodes
        ]
        amount = nodes.Const(written, lineno=node.lineno)
        spend = self.filtered(amount, SPEND, node.lineno)
        return [nodes.ExprStmt(spend, lineno=node.lineno), node]

    def made(self, node: Any) -> Any:
        """Measure a list, tuple or dict as it is made."""
        node = self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load":
            return node
        return self.filtered(node, CHARGE, node.lineno)

    visit_List = visit_Tuple = visit_Dict = made

    def visit_Concat(self, node: Any) -> nodes.Filter:
        """Measure the parts of a joined text before joining."""
        node = self.generic_visit(node)
        return self.filtered(nodes.List(node.nodes, lineno=node.lineno), JOIN, node.lineno)

    def visit_Compare(self, node: Any) -> nodes.Filter:
        """Look at the time after a comparison, which may be of long values."""
        node = self.generic_visit(node)
        return self.filtered(node, CHARGE, node.lineno)

    def visit_Getitem(self, node: Any) -> nodes.Node:
        """Measure slices."""
        node = self.generic_visit(node)
        sliced = isinstance(node.arg, nodes.Slice)
        return self.filtered(node, LENGTH, node.lineno) if sliced else node

    def visit_Getattr(self, node: nodes.Getattr) -> nodes.Node:
        """Refuse Python's inner names."""
        if node.attr.startswith("__"):
            raise TemplateSyntaxError(f"{node.attr} is not for templates", node.lineno)
        return self.generic_visit(node)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        """Refuse filters that are not on the list."""
        if node.name not in ALLOWED_FILTERS:
            raise TemplateSyntaxError(f"no filter {node.name!r} for templates", node.lineno)
        return self.generic_visit(node)

    def refuse(self, node: nodes.Node) -> nodes.Node:
        """Refuse what loads other templates."""
        raise TemplateSyntaxError(
            f"{type(node).__name__.lower()} is not for chat templates", node.lineno
        )

    visit_Include = visit_Import = visit_FromImport = visit_Extends = visit_Block = refuse


class GenerationExtension(Extension):
    """`generation` blocks, which say what an assistant wrote: their body as it is."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        """The body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# ---- the environment --------------------------------------------------------------------------


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose operations are counted by the meter of the running thread."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, further: Mapping[str, Callable]) -> None:
        extensions = [LoopControlExtension, GenerationExtension]
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            cache_size=0,
            extensions=extensions,
        )
        self.local = threading.local()
        self.filters = {n: self.bounded(n, f) for n, f in DEFAULT_FILTERS.items() if n in FILTERS}
        self.filters |= {
            "tojson": self.to_json,
            "indent": self.indent,
            "safe": lambda value: str(self.meter.charge(value)),
            CHARGE: lambda value: self.meter.charge(value),
            JOIN: self.join,
            LENGTH: lambda value: self.meter.charge_length(value),
            SPEND: lambda amount: self.meter.spend(amount),
            STEP: self.step,
        }
        self.globals = {
            "range": self.range,
            "dict": dict,
            "namespace": Namespace,
            "raise_exception": raise_exception,
            **further,
        }

    @property
    def meter(self) -> Meter:
        """The meter of this thread's rendering."""
        return self.local.meter

    def _parse(self, source: str, name: Any, filename: Any) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        if sum(1 for _ in tree.find_all(nodes.Node)) > self.meter.limits.nodes:
            raise LimitError(f"the template has more than {self.meter.limits.nodes} parts")
        return Bounding().visit(tree).set_environment(self)

    def step(self, value: Any) -> bool:
        """Count a step; true, so that a condition can follow."""
        self.meter.step()
        return True

    def join(self, values: list) -> str:
        """Values as one text."""
        self.meter.charge(values)
        return "".join(map(str, values))

    def range(self, *bounds: int) -> range:
        """A range of bounded length."""
        found = range(*bounds)
        if len(found) > self.meter.limits.steps:
            raise LimitError(f"a range of {len(found)} numbers")
        return found

    def to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON without escapes for HTML, as Hugging Face writes it."""
        if indent is not None and not (isinstance(indent, int) and 0 <= indent <= 16):
            raise LimitError("an indent of JSON is from 0 to 16")
        if separators is not None and any(len(s) > 8 for s in separators):
            raise LimitError("a separator of JSON has at most 8 characters")
        self.meter.spend(8 * measure(value, self.meter.longest))
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def indent(self, text: str, width: Any = 4, first: bool = False, blank: bool = False) -> str:
        """Lines with an indent."""
        size = len(width) if isinstance(width, str) else width
        if not isinstance(size, int) or not 0 <= size <= WIDEST:
            raise LimitError(f"an indent is from 0 to {WIDEST}")
        text = str(self.meter.charge(text))
        self.meter.spend(len(text) + (text.count("\n") + 1) * (size + 1))
        return do_indent(text, width, first, blank)

    def bounded(self, name: str, function: Callable) -> Callable:
        """A filter of Jinja whose arguments and result are measured."""
        skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def run(*told: Any, **named: Any) -> Any:
            self.meter.step()
            self.check_arguments(told[skipped + 1 :], named)
            values = list(told[skipped:])
            if name in QUICK:
                return function(*told, **named)
            charge = self.meter.charge if name in DEEP else self.meter.charge_length
            for value in (*values, *named.values()):
                charge(value)
            if name == "replace" and len(values) >= 3:
                self.check_replace(str(values[0]), str(values[1]), str(values[2]))
            if name == "join":
                self.check_join(values[0], str(named.get("d", (values + [""])[1])))
            return self.settled(function(*told, **named))

        return run

    def check_arguments(self, told: tuple, named: Mapping[str, Any]) -> None:
        """Refuse large numbers: widths, counts and precisions of a filter."""
        for value in (*told, *named.values()):
            if isinstance(value, int | float) and not abs(value) <= WIDEST:
                raise LimitError(f"a number of a filter is at most {WIDEST}")

    def check_replace(self, text: str, old: str, new: str) -> None:
        """Spend what a replacement makes."""
        found = text.count(old) if old else len(text) + 1
        self.meter.spend(len(text) + found * len(new))

    def check_join(self, values: Any, separator: str) -> None:
        """Spend what joining makes."""
        count = len(values) if hasattr(values, "__len__") else 0
        self.meter.spend(count * len(separator))

    def settled(self, value: Any) -> Any:
        """A result: lists for what would run later, and their length spent."""
        if isinstance(value, Iterator | type({}.keys()) | type({}.values()) | type({}.items())):
            value = list(value)
        return self.meter.charge_length(value)

    def call(self, context: Any, function: Any, /, *told: Any, **named: Any) -> Any:
        """Call a method, macro or global function of a template."""
        self.meter.step()
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(owner, str):
            self.meter.spend(len(owner))
            if name == "replace" and len(told) >= 2 and all(isinstance(t, str) for t in told[:2]):
                self.check_replace(owner, *told[:2])
            if name == "join" and told:
                self.meter.charge(told[0])
                self.check_join(told[0], owner)
        found = self.settled(super().call(context, function, *told, **named))
        return self.meter.charge(found) if function in (dict, Namespace) else found

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic, and joining or repeating of text and lists, measured before it is done."""
        sizes = [
            ITEM * len(x) if isinstance(x, list | tuple) else len(x) if isinstance(x, str) else None
            for x in (left, right)
        ]
        if operator == "+":
            self.meter.spend(sum(size or 1 for size in sizes))
        elif operator == "*" and sizes != [None, None]:
            count = right if sizes[0] is not None else left
            self.meter.spend((sizes[0] or sizes[1] or 0) * max(int(count), 0))
        elif operator == "%" and isinstance(left, str):
            if re.search(r"%[^%A-Za-z]*(?:\*|\d{4})", left):
                raise LimitError("a width in a format")
            self.meter.charge([left, right])
        elif operator == "**" and not (abs(left) <= 2**32 and abs(right) <= 32):
            raise LimitError("a power of large numbers")
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int) and result.bit_length() > 4096:
            raise LimitError("a number of more than 4096 bits")
        self.meter.spend(1)
        return result

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may use an attribute: of plain data only listed methods."""
        for kind, allowed in METHODS.items():
            if isinstance(obj, kind):
                return attr in allowed
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """Refuse `str.format`, whose widths can be nested."""
        if isinstance(getattr(value, "__self__", None), str) and "format" in value.__name__:
            raise SecurityError("'format' of a str is not for templates")

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        """Refuse at once what Jinja would refuse on use."""
        raise SecurityError(f"{attribute!r} of a {type(obj).__name__} is not for templates")


ALLOWED_FILTERS = FILTERS | {"tojson", "indent", "safe", CHARGE, LENGTH, JOIN, SPEND, STEP}


def raise_exception(message: Any) -> None:
    """What templates call where messages do not fit them."""
    raise Refusal(str(message)[:1000])


class Sandbox:
    """A compiled template that renders within limits."""

    def __init__(self, text: str, limits: Limits | None, further: Mapping[str, Callable]) -> None:
        self.limits = limits or Limits()
        if len(text) > self.limits.characters:
            raise UserError(
                "the chat template is too long",
                op="chat template",
                expected=f"at most {self.limits.characters} characters",
                got=len(text),
            )
        self.environment = BoundedEnvironment(further)
        self.template = self.guarded(0, self.compile, text)

    def compile(self, text: str) -> Any:
        """The template compiled, under a name that its errors carry."""
        code = self.environment.compile(text, NAME, NAME)
        return self.environment.template_class.from_code(
            self.environment, code, dict(self.environment.globals)
        )

    def render(self, variables: Mapping[str, Any]) -> str:
        """The template's text for some variables."""
        return self.guarded(measure(dict(variables), 1 << 40), self.write, variables)

    def write(self, variables: Mapping[str, Any]) -> str:
        """All pieces of the output."""
        out, left = [], self.environment.meter.longest
        for piece in self.template.generate(**variables):
            left -= len(piece)
            if left < 0:
                raise LimitError("the output is too long")
            out.append(piece)
        return "".join(out)

    def guarded(self, given: int, action: Callable, value: Any) -> Any:
        """Run an action with a meter; every error of the template names its line."""
        before = getattr(self.environment.local, "meter", None)
        self.environment.local.meter = Meter(self.limits, given)
        try:
            return action(value)
        except (Exception, RecursionError, MemoryError) as error:
            raise explained(error) from None
        finally:
            self.environment.local.meter = before


def explained(error: BaseException) -> UserError:
    """A template's error as ours, with the line of the template."""
    line = error.lineno if isinstance(error, TemplateSyntaxError) else None
    trace = error.__traceback__
    while trace is not None and not isinstance(error, TemplateSyntaxError):
        if trace.tb_frame.f_code.co_filename == NAME:
            line = trace.tb_lineno
        trace = trace.tb_next
    where = f"chat template, line {line}" if line else "chat template"
    if isinstance(error, Refusal):
        return UserError(f"it refuses these messages: {error}", op=where)
    if isinstance(error, LimitError | SecurityError):
        return UserError(
            f"not allowed: {error}",
            op=where,
            hint="the template is unusual or hostile; give another",
        )
    if isinstance(error, RecursionError):
        return UserError("not allowed: it nests too deeply", op=where)
    said = str(error).split("\n")[0][:300]
    return UserError(f"{type(error).__name__}: {said}", op=where)

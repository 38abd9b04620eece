"""Define kernels: a Python function, the types of a call, and a Plan give a Callee of Bodies.

Invariant: a Definition traces a function once for each signature (types of arrays, values of the
other arguments, all that the function reaches, Plan, Target); every Body it gives has been
verified, and passed the checks before launch that need no machine.

An Instance is a kernel's definition, what one call gives it, and the Plan that a person stated. A
Graph that calls a kernel holds an Instance and no Target: Bodies for a Target, and what nobody
stated of its Plan, are made when the Schedule asks. An Instance means what the kernel meant when it
was called: where something that it reaches has changed since, or where a Plan that is chosen gives
results of other shapes, the Bodies for any machine are taken, which were traced then.

A function reaches what its code names: free variables, globals, defaults of arguments, members of
modules. Through functions of the user it goes on; the package's own are covered by the compiler's
version, and those of Python and of array libraries are taken as known. `reached` gives equal lists
only for functions that trace alike, as far as plain values and code say; other objects are told
apart by their identity. `code_key` is the same in every process.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from ..core.config import config
from ..core.dtype import DType, dtype_of
from ..core.errors import DTypeError, TraceError, UserError
from ..core.target import Target
from ..ir.node import exact
from ..ir.symbol import Size, ceil_divide, high
from ..ir.types import Array, Memory, product
from .build import Body, BodyBuilder, prune
from .callee import KernelCallee, Launches, types_of
from .control import Stage
from .language_memory import returned
from .plan import Plan
from .stage import staged
from .trace import Tracer
from .value import state

Function = Callable[..., Any]
LOG = logging.getLogger("tilegrad.kernel")


if TYPE_CHECKING:
    from .value import MemoryValue as Argument  # what a kernel sees of its arrays
else:
    Argument = object


class KTile(Argument):
    """An annotation: an array argument or a result of a dtype, `KTile[f16]`.

    `KTile` alone is an array of any dtype; type checkers know no more, since a dtype is a value.
    """

    def __init__(self, dtype: DType) -> None:
        self.element = dtype

    def __class_getitem__(cls, dtype: Any) -> KTile:
        return cls(dtype_of(dtype))

    def __repr__(self) -> str:
        return f"KTile[{self.element}]"


def function(helper: Function) -> Function:
    """A function for use inside kernels, with loops and branches over tiles of its own."""

    @functools.wraps(helper)
    def run(*args: Any, **kwargs: Any) -> Any:
        if state.tracer is None:
            raise TraceError("used outside of a kernel", op=helper.__name__)
        return staged(helper).bind(Stage(state.tracer))(*args, **kwargs)

    return run


class Definition:
    """A kernel's function and what is known of it before any call."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.name = function.__name__
        self.signature = inspect.signature(function)
        self.known: dict[Any, Any] = {}  # what was made, by all that it was made of
        try:
            self.annotations = inspect.get_annotations(function, eval_str=True)
        except (NameError, TypeError, AttributeError, SyntaxError):
            self.annotations = {}

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
        """Arguments by name; sizes that the Plan names take the place of static arguments."""
        names = self.signature.parameters
        given = dict(kwargs)
        for name, value in plan.sizes:
            if name not in names:
                raise UserError(
                    f"the kernel {self.name} has no argument {name!r}",
                    op="schedule",
                    expected=", ".join(names),
                    got=name,
                )
            given.setdefault(name, value)
        try:
            bound = self.signature.bind(*args, **given)
        except TypeError as error:
            raise UserError(
                f"the arguments do not fit: {error}", op=self.name, expected=str(self.signature)
            ) from None
        bound.apply_defaults()
        found = dict(bound.arguments)
        for name in [n for n, p in names.items() if p.kind is p.VAR_KEYWORD]:
            found |= found.pop(name)
        return found

    def callee(self, given: Mapping[str, Any], plan: Plan, target: Target) -> KernelCallee:
        """The Callee for arguments by name: Array types, or values known now."""
        guards = not target.has_threads or config().checked

        def make() -> KernelCallee:
            made = self.trace(given, plan, plan.filled(target), guards)
            return KernelCallee(self.name, made)

        found: KernelCallee = self.once(make, given, plan, target.key, guards)
        return found

    def once(self, make: Function, given: Mapping[str, Any], plan: Plan, *more: Any) -> Any:
        """What is made for a call; calls that are alike, and all that they reach, share it."""
        values = tuple([(n, exact(v)) for n, v in given.items()])
        key = (values, plan, exact(plan.sizes), reached(self.function), *more)
        try:
            found = self.known.get(key)
        except TypeError:
            bad = [n for n, v in given.items() if getattr(v, "__hash__", None) is None]
            raise DTypeError(
                "an argument that is no Tensor must be hashable", op=self.name, got=", ".join(bad)
            ) from None
        if found is None:
            found = self.known[key] = make()
        return found

    def trace(
        self,
        given: Mapping[str, Any],
        plan: Plan,
        filled: Plan,
        guards: bool = True,
        values: tuple[Any, ...] | None = None,
    ) -> Launches:
        """Run the function once, by a Plan that is filled, and make its Bodies; see `inside` for
        guards. `values` are those of its free variables (None: what they hold now)."""
        from .check import verify_body  # a kernel that is not traced needs no proof
        from .prove import require
        from .writes import judge

        arrays = [(n, v) for n, v in given.items() if isinstance(v, Array)]
        for name, type_ in arrays:
            hint = "cast it first: x.to(tilegrad.{})"
            self.check_dtypes(f"argument {name}", name, [type_.dtype], hint)
        parameters = [(n, Memory(v.shape, v.dtype)) for n, v in arrays]
        chosen = fitted(filled, plan, arrays)
        tracer = Tracer(BodyBuilder(self.name, parameters), chosen, plan, guards)
        memories = {m.name: m for m in tracer.inputs}
        with tracer.active():
            call = staged(self.function).bind(Stage(tracer), values)
            returned(call(**{n: memories.get(n, v) for n, v in given.items()}))
        self.check_dtypes("result", "return", [result.dtype for result in tracer.results])
        body = tracer.finish()
        prune(body.block, set())
        findings, partial = judge(tracer, body)
        if not findings:
            verify_body(body, body.notes["level"], where=f"kernel {self.name}")
        for warning in require(body, also=findings):
            LOG.warning("kernel %s: %s", self.name, warning)
        for name in partial:
            tracer.fills[name] = 0
        return self.launches(tracer, body, len(arrays))

    def launches(self, tracer: Tracer, body: Body, arrays: int) -> Launches:
        """The Body, after one that fills each result that asks for it."""
        found = []
        for place, result in enumerate(tracer.results):
            if result.name in tracer.fills:
                value = tracer.fills[result.name]
                found.append((fill_body(self.name, result.type, value), (("store", place),)))
        roles = [("read", i) for i in range(arrays)]
        roles += [("store", i) for i in range(len(tracer.results))]
        return (*found, (body, tuple(roles)))

    def check_dtypes(self, what: str, name: str, dtypes: Iterable[DType], hint: str = "") -> None:
        """An argument, or the results, have the dtype that an annotation names."""
        wanted: Any = self.annotations.get(name)
        for dtype in dtypes if isinstance(wanted, KTile) else ():
            if wanted.element is not dtype:
                raise DTypeError(
                    f"the {what} has another dtype than its annotation",
                    op=self.name,
                    expected=wanted.element,
                    got=dtype,
                    hint=hint.format(wanted.element) or None,
                )


def fitted(plan: Plan, stated: Plan, arrays: Sequence[tuple[str, Array]]) -> Plan:
    """Automatic blocks no larger than the arrays need: the next power of two."""
    sizes = [s for _, t in arrays for s in t.shape[-2:]]
    if not sizes:
        return plan
    most = max(16, 1 << (max(high(s) for s in sizes) - 1).bit_length())
    changes = {
        n: min(getattr(plan, n), most) for n in ("m", "n", "k") if getattr(stated, n) is None
    }
    return replace(plan, **changes)


def fill_body(name: str, type_: Memory, value: float) -> Body:
    """A Body that sets every element of an array."""
    count: Size = product(type_.shape)
    flat = Memory((count,), type_.dtype, use="result")
    b = BodyBuilder(f"{name}_fill", [("out", flat)])
    lanes = 64
    start = b.program(0, ceil_divide(count, lanes)) * lanes
    tile = b.constant(value, type_.dtype, (lanes,))
    mask = b.apply("less", b.line(start, lanes), count) if count % lanes != 0 else None
    b.store(b.parameters[0], tile, (start,), mask=mask)
    return b.finish((ceil_divide(count, lanes),), level="portable")


# ---- Instances ----------------------------------------------------------------------------------


# What is filled in of Plans for any machine: small blocks, or large ones where a kernel needs them.
SMALL, LARGE = Plan(32, 64, 64, 1, 1, 8, "none"), Plan(128, 128, 64, 8, 3, 8, "xor")


class Instance:
    """What makes the Bodies of one call of a kernel."""

    def __init__(self, definition: Definition, given: Mapping[str, Any], plan: Plan) -> None:
        self.definition, self.given, self.plan = definition, dict(given), plan
        self.reached = reached(definition.function)
        self.values = staged(definition.function).values()
        self.checked = config().checked
        self.known: dict[str, Launches] = {}
        try:  # Bodies for any machine; the kernel's own mistakes are told here
            self.portable = self._traced(SMALL)
        except UserError as first:
            try:
                self.portable = self._traced(LARGE)
            except UserError:
                raise first from None

    @cached_property
    def key(self) -> str:
        """A hash of the code that is reached, the arguments, and the Plan."""
        given = [
            f"{n}: {v}" if isinstance(v, Array) else f"{n}={stable(value_key(v))} {v}"
            for n, v in self.given.items()
        ]
        parts = (stable(self.reached), given, str(self.plan), self.checked)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]

    def launches(self, target: Target) -> Launches:
        """Bodies for a Target, by the Plan that suits it."""
        if target.key not in self.known:
            self.known[target.key] = self._made(target)
        return self.known[target.key]

    def _made(self, target: Target) -> Launches:
        name = self.definition.name
        if reached(self.definition.function) != self.reached:
            LOG.info("kernel %s: what it reaches has changed since it was called", name)
            return self.portable
        made = self._traced(self.plan.filled(target), not target.has_threads or self.checked)
        if types_of(made, "store") != types_of(self.portable, "store"):
            LOG.info("kernel %s: shapes of its results follow from its Plan", name)
            return self.portable
        return made

    def _traced(self, filled: Plan, guards: bool = True) -> Launches:
        full = self.plan.over(filled)
        return self.definition.trace(self.given, self.plan, full, guards, self.values)


def instance(definition: Definition, given: Mapping[str, Any], plan: Plan) -> Instance:
    """The Instance of a call; calls that are alike share one."""
    found: Instance = definition.once(
        lambda: Instance(definition, given, plan), given, plan, "instance", config().checked
    )
    return found


# ---- what a function reaches --------------------------------------------------------------------


KNOWN = {__package__.partition(".")[0], "numpy", "ml_dtypes", "torch", *sys.stdlib_module_names}
PLAIN = (bool, int, float, complex, str, bytes, type(None), DType)


@functools.lru_cache(maxsize=4096)
def code_key(code: CodeType) -> str:
    """A hash of what a function does, the same in every process: its code, names, constants."""
    parts = [code.co_code, repr((code.co_names, code.co_freevars)).encode()]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            parts.append(code_key(constant).encode())
        elif isinstance(constant, frozenset):
            parts.append(repr(sorted(map(repr, constant))).encode())
        else:
            parts.append(repr(constant).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


@functools.lru_cache(maxsize=4096)
def _names(code: CodeType) -> tuple[str, ...]:
    """Globals and attributes that a function names, and the functions inside it."""
    inner = [_names(c) for c in code.co_consts if isinstance(c, CodeType)]
    return tuple(dict.fromkeys([*code.co_names, *[n for names in inner for n in names]]))


def reached(function: Callable[..., Any]) -> tuple[tuple[str, Any], ...]:
    """(name, key) of all that a function reaches, in a fixed order."""
    found: list[tuple[str, Any]] = []
    seen: set[int] = set()
    waiting: list[Any] = [function]
    while waiting:
        now = inspect.unwrap(waiting.pop())
        if id(now) in seen:
            continue
        seen.add(id(now))
        found.append(("code", code_key(now.__code__)))
        for name, value in _values(now):
            if isinstance(value, FunctionType):
                if not _is_known(inspect.unwrap(value).__module__):
                    waiting.append(value)
            elif not isinstance(value, ModuleType):
                found.append((name, value_key(value)))
    return tuple(found)


def value_key(value: Any) -> Any:
    """A key of a plain value, or of tuples of them; of a function what it reaches; of any other
    object its identity."""
    if isinstance(value, PLAIN):
        return exact(value)
    if isinstance(value, tuple):
        return tuple([value_key(v) for v in value])
    if isinstance(value, FunctionType):
        return reached(value)
    return (type(value), id(value))


def stable(key: Any) -> str:
    """A key as text that is the same in every process: objects go by their type alone."""
    if isinstance(key, tuple):
        if len(key) == 2 and isinstance(key[0], type):
            kind, value = key
            plain = issubclass(kind, PLAIN)
            return f"{kind.__qualname__} {value!r}" if plain else kind.__qualname__
        return "(" + ", ".join([stable(k) for k in key]) + ")"
    return repr(key)


def _values(function: Any) -> Iterator[tuple[str, Any]]:
    """Values of the names that a function's code has."""
    names, space = _names(function.__code__), function.__globals__
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not set yet
            yield name, None
    yield from (("default", value) for value in function.__defaults__ or ())
    yield from (function.__kwdefaults__ or {}).items()
    for name in names:
        if name in space:
            value = space[name]
            yield name, value
            if isinstance(value, ModuleType) and not _is_known(value.__name__):
                members = vars(value)
                for member in names:
                    if isinstance(members.get(member, ...), (FunctionType, *PLAIN)):
                        yield f"{name}.{member}", members[member]


def _is_known(module: str | None) -> bool:
    return (module or "").partition(".")[0] in KNOWN

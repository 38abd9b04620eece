"""`jit`: a function traced once for each signature, then run as one Executable.

A signature is how the arguments are nested, the shapes and dtypes of their Tensors, the values
of static arguments, and which objects hold state. Python ints and floats are inputs at run
time. What changes from call to call only binds Buffers. Invariant: a jitted function gives the
same results and the same changes of state as the plain one, or raises before it changes
anything; each trace after the first is logged with the argument that differed.
"""

from __future__ import annotations

import functools
import inspect
import logging
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from ..core.config import config
from ..core.errors import DTypeError, UserError, user_location
from ..core.lock import new_rlock
from ..core.recent import SecondChance
from ..ir.symbol import Size, atoms, high, low
from .annotation import VALUE, annotations_of, check_call, dynamic_axes, parameters_of
from .bundled import describe_leaf, find, opened_bundles, recorders, tell
from .container import Default, Structure, differences, flatten, is_stateful
from .last_call import LastCall, buffers_of, remembered
from .lowered import Lowered
from .placement import state, tag
from .ranges import inside_of, narrowed
from .signature import Signatures
from .tensor import Tensor, mode
from .trace import traced_for
from .trace_function import trace_function

if TYPE_CHECKING:
    from .bound import Bound

LOG = logging.getLogger("tilegrad.jit")
DESCRIBED = 63  # traces that a new one is compared with, for the log
Names = Sequence["int | str"] | int | str
P = ParamSpec("P")
R = TypeVar("R")


class Jitted(Signatures, Generic[P, R]):
    """A function that `jit` made; call it as the function it wraps."""

    def __init__(
        self,
        function: Callable[P, R],
        static: Names,
        donate: Names,
        dynamic: Mapping[str, Any],
        symbols: Mapping[str, Any],
        name: str,
        keep_gradients: bool = False,
    ) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.name = name or getattr(function, "__qualname__", type(function).__name__)
        self.parameters = parameters_of(function)
        self.names = tuple(p.name for p in self.parameters)
        plain = all(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in self.parameters)
        self._arity = len(self.parameters) if plain else -1
        self._static = self._positions(static, "static")
        self._donate = frozenset(self._positions(donate, "donate"))
        self.annotations, self.result_annotation = annotations_of(function)
        self.dynamic = dynamic_axes(self.name, self.names, self.annotations, dynamic, symbols)
        sizes = [size for axes in self.dynamic.values() for size in axes.values()]
        self.symbols = {s.name: s for size in sizes for s in atoms(size)}
        self.keep_gradients = keep_gradients
        self.traces = 0
        self._lock = new_rlock()
        self._recent: Structure | None = None
        self._lowered: SecondChance[Lowered] = SecondChance()
        self._described: list[list[tuple[str, str]]] = []
        self._objects: dict[int, weakref.ref[Any]] = {}
        self._dynamic_leaves: dict[Structure, list[Any] | None] = {}
        self._last: LastCall | None = None

    def __repr__(self) -> str:
        return f"<jit {self.name}: {self.traces} traces>"

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Jitted[P, R]: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    # ---- calling: the hot path ------------------------------------------------------------

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if mode.trace is not None or mode.depth:
            return self._inline(args, kwargs)
        if kwargs or len(args) != self._arity:
            args = self._bind(args, kwargs)
        elif (last := self._last) and (buffers := buffers_of(args, last)) is not None:
            return last[3].run_on(buffers)
        given = args
        if self._static:
            args = self._without_static(args)
        structure: Any = self._recent
        leaves = None if structure is None else structure.leaves(args)
        if leaves is None:
            leaves, structure = flatten(args)
            self._recent = structure
        key: list[Any] = [structure.alike, mode.grad_enabled, config().numerics]
        for leaf in leaves:
            kind = leaf.__class__
            if kind is Tensor:
                type_ = leaf._node.type
                key += (type_.shape, type_.dtype, leaf._requires_grad)
                if state.active and (device := tag(leaf._node)):
                    key.append(device)
            elif kind is float or kind is int:
                key.append(kind)
            else:
                break
        else:
            if not self._static and not self.dynamic:
                lowered = self._lowered.get(tuple(key))
                if lowered is not None:
                    lowered.used = True
                    self._last = remembered(args, lowered)
                    return lowered.run(leaves, {}, None)
        return self._general(given, leaves, structure)

    def _general(self, given: tuple[Any, ...], leaves: list[Any], structure: Any) -> Any:
        key, states, symbols = self._signature(given, leaves, structure)
        lowered = self._lowered.get(key)
        if lowered is None or not lowered.matches(states):
            lowered = self._find(key, given, leaves, structure, states)
        if lowered.breaks:
            lowered = self._in_range(lowered, key, given, leaves, structure, states, symbols)
        lowered.used = True
        return lowered.run(leaves, states, symbols)

    def _inline(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.annotations:
            check_call(self.name, self._named(self._bind(args, kwargs)), self.annotations, {})
        return self.function(*args, **kwargs)

    # ---- tracing --------------------------------------------------------------------------

    def _find(
        self,
        key: tuple[Any, ...],
        given: tuple[Any, ...],
        leaves: list[Any],
        structure: Structure,
        states: dict[int, dict[str, Tensor]],
        within: Mapping[str, Size] | None = None,
    ) -> Lowered:
        with self._lock:
            lowered = self._lowered.get(key)
            while lowered is not None:  # those that saw other gradients are chained
                if lowered.matches(states):
                    return lowered
                lowered = lowered.other
            structure = flatten(self._without_static(given))[1]  # keys in the order of this call
            call = (given, leaves, structure, states, within)
            fresh = find(self, *call) if opened_bundles() else None
            if fresh is None:
                fresh = self._trace_anew(*call)
            fresh.other = self._lowered.get(key)
            self._lowered.keep(key, fresh, config().keep)
            return fresh

    def _in_range(
        self,
        whole: Lowered,
        key: tuple[Any, ...],
        given: tuple[Any, ...],
        leaves: list[Any],
        structure: Structure,
        states: dict[int, dict[str, Tensor]],
        symbols: dict[str, int] | None,
    ) -> Lowered:
        """What is compiled for the ranges that the Symbols are in, traced when first met."""
        within = narrowed(whole.breaks, self.symbols, symbols or {})
        own = (*key, *within.values())
        lowered = self._lowered.get(own)
        if lowered is None or not lowered.matches(states):
            lowered = self._find(own, given, leaves, structure, states, within)
        return lowered

    def _trace_anew(
        self,
        given: tuple[Any, ...],
        leaves: list[Any],
        structure: Structure,
        states: dict[int, dict[str, Tensor]],
        within: Mapping[str, Any] | None,
    ) -> Lowered:
        """Trace; those who listen are told."""
        fresh = self._trace(given, leaves, structure, states, within or {})
        if self.symbols and within is None:
            from ..compiler.breaks import breaks_of

            fresh.breaks = breaks_of(fresh.outputs, mode.target or fresh.device)
        if not fresh.breaks:  # else it is looked at, not run
            self._log(given, leaves, structure, states, fresh.ranges)
            self.traces += 1
        if recorders:
            tell(self, fresh, given, leaves, structure, states, within)
        return fresh

    def _trace(
        self,
        given: tuple[Any, ...],
        leaves: list[Any],
        structure: Structure,
        states: dict[int, dict[str, Tensor]],
        within: Mapping[str, Size],
    ) -> Lowered:
        named = self._named(given)
        axes = inside_of(self._axes_of(structure), within)
        shapes: list[Any] = []
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                shape = leaf._node.shape
                known: dict[str, Any] = {}
                if axes is not None and axes[i]:
                    shape = self._bind_symbols(i, shape, axes, known, structure)
                shapes.append(shape)
            else:
                shapes.append(axes[i].get(VALUE) if axes is not None else None)
        sizes = check_call(self.name, named, self.annotations, {}) if self.annotations else {}
        sizes = {n: (self.symbols.get(n, s), where) for n, (s, where) in sizes.items()}

        def run(inside: list[Any]) -> Any:
            result = self._call(self._with_static(structure.unflatten(inside), given))
            if self.result_annotation is not None:
                check_call(
                    self.name, {"the result": result}, {"the result": self.result_annotation}, sizes
                )
            return result

        donated = self._donated_leaves(structure)
        keep = self.keep_gradients
        found = trace_function(self.name, run, leaves, shapes, states, donated, keep)
        found.ranges = {name: (low(s), high(s)) for name, s in within.items()}
        return found

    def _donated_leaves(self, structure: Structure) -> frozenset[int]:
        found: list[int] = []
        place = 0
        free = [i for i in range(len(self.parameters)) if i not in self._static]
        for position, part in zip(free, structure.parts):
            if position in self._donate:
                found += range(place, place + part.count)
            place += part.count
        return frozenset(found)

    def _log(
        self,
        given: tuple[Any, ...],
        leaves: list[Any],
        structure: Structure,
        states: dict[int, dict[str, Tensor]],
        ranges: Mapping[str, tuple[int, int]],
    ) -> None:
        """Log a trace, and what differs from the nearest one before."""
        now = self._describe(given, leaves, structure, states)
        now += [(f"the range of {n}", f"{low}..{high}") for n, (low, high) in ranges.items()]
        if not self._described:
            LOG.debug("jit %s: first trace", self.name)
        else:
            nearest = min((differences(before, now) for before in self._described), key=len)
            LOG.info(
                "jit %s: trace %d at %s: %s",
                self.name,
                self.traces + 1,
                user_location(),
                "; ".join(nearest) or "a gradient or a setting differs",
            )
        self._described = [*self._described[-DESCRIBED:], now]

    def _describe(
        self,
        given: tuple[Any, ...],
        leaves: list[Any],
        structure: Structure,
        states: dict[int, dict[str, Tensor]],
    ) -> list[tuple[str, str]]:
        rows = [
            ("the structure of the arguments", repr(structure)),
            ("recording of derivatives", str(mode.grad_enabled)),
        ]
        for i, (path, leaf) in enumerate(zip(self._paths(structure), leaves)):
            rows.append((f"argument {path}", describe_leaf(leaf)))
            for name, tensor in states.get(i, {}).items():
                rows.append((f"argument {path}.{name}", describe_leaf(tensor)))
        for position in self._static:
            rows.append((f"static argument {self.names[position]}", repr(given[position])))
        return rows

    # ---- arguments ------------------------------------------------------------------------

    def _positions(self, names: Names, what: str) -> tuple[int, ...]:
        """Positions of parameters given by number or name."""
        wanted = (names,) if isinstance(names, (int, str)) else tuple(names)
        found = []
        for name in wanted:
            if isinstance(name, int) and -len(self.names) <= name < len(self.names):
                found.append(name % len(self.names))
            elif name in self.names:
                found.append(self.names.index(name))
            else:
                raise UserError(
                    f"{what} names no parameter",
                    op=f"jit {self.name}",
                    expected=f"some of {', '.join(self.names)}",
                    got=name,
                )
        return tuple(sorted(set(found)))

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One value per parameter: *args as a tuple, **kwargs as a dict, defaults filled in."""
        try:
            bound = inspect.Signature(self.parameters).bind(*args, **kwargs)
        except TypeError as error:
            kinds = [*(type(a).__name__ for a in args), *(f"{name}=" for name in kwargs)]
            raise DTypeError(
                str(error),
                op=f"jit {self.name}",
                expected=f"({', '.join(self.names)})",
                got=f"({', '.join(kinds)})",
            ) from None
        given = set(bound.arguments)
        bound.apply_defaults()
        values = ((n in given, bound.arguments[n]) for n in self.names)
        return tuple(
            v if there or v.__class__ not in (int, float) else Default(v) for there, v in values
        )

    def _call(self, values: Sequence[Any]) -> Any:
        """Call the function with one value per parameter."""
        positional: list[Any] = []
        keyword: dict[str, Any] = {}
        for parameter, value in zip(self.parameters, values):
            if value.__class__ is Default:
                value = value.number
            if parameter.kind is parameter.VAR_POSITIONAL:
                positional += value
            elif parameter.kind is parameter.VAR_KEYWORD:
                keyword.update(value)
            elif parameter.kind is parameter.KEYWORD_ONLY:
                keyword[parameter.name] = value
            else:
                positional.append(value)
        return self.function(*positional, **keyword)

    def _without_static(self, values: tuple[Any, ...]) -> Any:
        return tuple([v for i, v in enumerate(values) if i not in self._static])

    def _with_static(self, values: Sequence[Any], given: tuple[Any, ...]) -> list[Any]:
        rest = iter(values)
        return [given[i] if i in self._static else next(rest) for i in range(len(given))]

    def _named(self, values: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self.names, values))

    # ---- for people and tools -------------------------------------------------------------

    def clear(self) -> None:
        """Forget all traces."""
        with self._lock:
            self._lowered.clear()
            self._described.clear()

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """The traced Graph for these arguments, without running it."""
        return self._traced(args, kwargs)[0]

    def _lower_for(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lowered:
        """The traced Graph for a Target of which no machine needs to be here: ranges of Symbols
        are those of its kernels. Nothing is kept."""
        given = self._bind(args, kwargs)
        leaves, structure = flatten(self._without_static(given))
        _, states, symbols = self._signature(given, leaves, structure)
        with traced_for(target):
            whole = self._trace(given, leaves, structure, states, {})
            if self.symbols:
                from ..compiler.breaks import breaks_of

                within = narrowed(breaks_of(whole.outputs, target), self.symbols, symbols or {})
                if within:
                    return self._trace(given, leaves, structure, states, within)
        return whole

    def bind(self, *args: Any, **kwargs: Any) -> Bound:
        """The function on these arguments, to be run again and again in place; see `bound`."""
        from .bound import Bound

        return Bound(*self._traced(args, kwargs))

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """(Lowered, leaves, their state, Symbols, names of the leaves) of some arguments."""
        given = self._bind(args, kwargs)
        leaves, structure = flatten(self._without_static(given))
        key, states, symbols = self._signature(given, leaves, structure)
        lowered = self._lowered.get(key)
        if lowered is None or not lowered.matches(states):
            lowered = self._find(key, given, leaves, structure, states)
        if lowered.breaks:
            lowered = self._in_range(lowered, key, given, leaves, structure, states, symbols)
        return lowered, leaves, states, symbols, self._paths(structure)


@overload
def jit(
    function: Callable[P, R],
    *,
    static: Names = (),
    donate: Names = (),
    symbols: Mapping[str, Any] | None = None,
    dynamic: Mapping[str, Any] | None = None,
    name: str = "",
    keep_gradients: bool = False,
) -> Jitted[P, R]: ...
@overload
def jit(
    function: None = None,
    *,
    static: Names = (),
    donate: Names = (),
    symbols: Mapping[str, Any] | None = None,
    dynamic: Mapping[str, Any] | None = None,
    name: str = "",
    keep_gradients: bool = False,
) -> Callable[[Callable[P, R]], Jitted[P, R]]: ...
def jit(
    function: Callable[..., Any] | None = None,
    *,
    static: Names = (),
    donate: Names = (),
    symbols: Mapping[str, Any] | None = None,
    dynamic: Mapping[str, Any] | None = None,
    name: str = "",
    keep_gradients: bool = False,
) -> Any:
    """Compile a function whole, once for each signature; see the module's docstring.

    `static` and `donate` name parameters by name or number. `dynamic={"x": {0: ("N", 1, 64)}}`
    makes axis 0 of x a Symbol, and so does an annotation `Tensor["N", 8]` with
    `symbols={"N": (1, 64)}`; a size may be one and a number, `symbol("N", 1, 64) + 1`. A number
    `dynamic={"most": ("N", 1, 64)}` is a Symbol that no shape has. Where kernels differ with a
    Symbol, a range of it is traced and compiled when it is first met.
    `keep_gradients` gives `.grad` that a call zeroes and fills anew
    back to the caller; without it, reading such a gradient afterwards is an error.
    """
    options: dict[str, Any] = dict(static=static, donate=donate, symbols=symbols, dynamic=dynamic)
    options |= {"name": name, "keep_gradients": keep_gradients}
    if function is None:
        return functools.partial(jit, **options)
    if not callable(function):
        raise DTypeError("jit needs a function", op="jit", got=type(function).__name__)
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        kind = "an async function" if inspect.iscoroutinefunction(function) else "a generator"
        raise DTypeError("jit needs a function that returns its results", op="jit", got=kind)
    if is_stateful(function):  # a Module: its Tensors are state, not captured
        options["name"] = name or type(function).__name__
        return types.MethodType(jit(type(function).__call__, **options), function)
    if isinstance(function, types.MethodType) and is_stateful(function.__self__):
        options["name"] = name or function.__qualname__
        return types.MethodType(jit(function.__func__, **options), function.__self__)
    return Jitted(function, static, donate, dynamic or {}, symbols or {}, name, keep_gradients)

"""`kernel`: functions in the tile language, called on Tensors.

A kernel stands in the Graph as one `call`, which holds its definition, its static arguments and
what a person stated of its Plan; so it is lazy, jits, fuses its neighbours around it, and may
carry derivatives. Its Bodies for a machine are made in the Schedule. Invariant: a Kernel's
settings never change; `schedule` and its like give another Kernel. Only `vjp` and `jvp` set a
derivative, once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.errors import DTypeError, StateError, UserError
from ..graph import build, ops
from ..ir.node import Node
from ..ir.symbol import Size, evaluate, high
from ..ir.types import Array, Tuple
from ..runtime.buffer import HOST, Buffer
from ..tile.build import Body
from ..tile.callee import KernelCallee, Launches, Source, batched_launches
from ..tile.define import Definition, instance, reached, stable
from ..tile.plan import Plan
from .tensor import Tensor, lift, mode, node_of, wrap

Function = Callable[..., Any]


class TensorCallee(KernelCallee):
    """A kernel with the rules that need Graph: its batch, and derivatives given on Tensors."""

    def __init__(self, name: str, source: Source, owner: Derivatives) -> None:
        super().__init__(name, source.portable, source)
        self.owner = owner
        if owner.reverse is not None:
            self.vjp = self._vjp
        if owner.forward is not None:
            self.jvp = self._jvp

    @property
    def key(self) -> str:
        """The content, and which derivative comes with it in this process."""
        return f"{self.content}{self.owner.tag}"

    def _vjp(self, inputs: list[Node], outputs: list[Node], given: list[Node]) -> list[Any]:
        found = self.owner.reverse(*_as_tensors(inputs, outputs, given))  # type: ignore[misc]
        return _checked(self.name, found, inputs, "vjp")

    def _jvp(self, inputs: list[Node], outputs: list[Node], given: list[Node]) -> list[Any]:
        moved = [build.like(x, 0.0) if t is None else t for x, t in zip(inputs, given)]
        tensors = [wrap(n) for n in moved]
        first, results, _ = _as_tensors(inputs, outputs, outputs)
        found = self.owner.forward(first, results, tuple(tensors))  # type: ignore[misc]
        return _checked(self.name, found, outputs, "jvp")

    def batch(self, xs: list[Node], flags: Sequence[bool], size: Size) -> list[Node]:
        """The rule of vmap: one grid axis more."""
        if self.level == "placed":
            raise UserError(
                "a placed kernel has no batch",
                op="vmap",
                got=self.name,
                hint="give it a grid axis of its own",
            )
        assert self.source is not None
        source = BatchSource(self.source, tuple(flags), size)
        callee = TensorCallee(self.name, source, self.owner.batched(source.flags))
        return _outputs(ops.call(*xs, callee=callee))


class BatchSource:
    """What makes the Bodies of a kernel over a batch, of what makes those for one example."""

    def __init__(self, source: Source, flags: tuple[bool, ...], size: Size) -> None:
        self.source, self.flags, self.size = source, flags, size
        self.key = f"{source.key} {flags} {size}"
        self.portable = batched_launches(source.portable, flags, size)

    def launches(self, target: Any) -> Launches:
        """The Bodies for a Target."""
        return batched_launches(self.source.launches(target), self.flags, self.size)


def _outputs(node: Node) -> list[Node]:
    return build.items(node) if isinstance(node.type, Tuple) else [node]


def is_array(value: Any) -> bool:
    """Whether an argument is data for a kernel, and not a value it is compiled for."""
    return isinstance(value, (Tensor, np.ndarray)) or type(value).__module__ == "torch"


def _as_tensors(*several: list[Node]) -> tuple[Any, ...]:
    """Inputs as a tuple; outputs and cotangents as one Tensor, or a tuple of several."""
    inputs, *rest = [tuple(wrap(n) for n in nodes) for nodes in several]
    return (inputs, *[r[0] if len(r) == 1 else r for r in rest])


def _checked(name: str, found: Any, like: Sequence[Node], op: str) -> list[Any]:
    given = found if isinstance(found, (tuple, list)) else (found,)
    if len(given) != len(like):
        raise UserError(
            f"the {op} of {name} gives another number of values",
            op=op,
            expected=len(like),
            got=len(given),
        )
    answer: list[Any] = []
    for value, node in zip(given, like):
        if value is None:
            answer.append(None)
            continue
        made = lift(value).node
        if made.shape != node.shape:
            raise UserError(
                f"the {op} of {name} gives another shape",
                op=op,
                expected=str(node.type),
                got=str(made.type),
            )
        answer.append(build.cast(made, node.dtype))
    return answer


@dataclass(frozen=True)
class Derivatives:
    """What a kernel was given as its derivatives: functions of (inputs, outputs, moved)."""

    reverse: Function | None = None
    forward: Function | None = None

    @property
    def tag(self) -> str:
        """What tells derivatives apart in this process (the functions live as long as they)."""
        if self.reverse is None and self.forward is None:
            return ""
        return f" {id(self.reverse)} {id(self.forward)}"

    @functools.lru_cache(maxsize=256)  # noqa: B019  (equal batches of a kernel are one Node)
    def batched(self, flags: tuple[bool, ...]) -> Derivatives:
        """The derivatives of the batch: each rule, over the examples."""
        from .transforms import vmap

        axes = tuple(0 if on else None for on in flags)

        def over(rule: Function | None) -> Function | None:
            if rule is None:
                return None

            @functools.wraps(rule)
            def run(inputs: Any, outputs: Any, moved: Any) -> Any:
                last = axes if rule is self.forward else 0
                return vmap(lambda *a: tuple(rule(*a)), (axes, 0, last))(inputs, outputs, moved)

            return run

        if not all(flags) and self.reverse is not None:
            return Derivatives(_shared(over(self.reverse), flags), over(self.forward))
        return Derivatives(over(self.reverse), over(self.forward))


def _shared(rule: Function | None, flags: tuple[bool, ...]) -> Function:
    """Cotangents of what all examples share are summed over them."""

    @functools.wraps(rule)  # type: ignore[arg-type]
    def run(inputs: Any, outputs: Any, moved: Any) -> Any:
        found = rule(inputs, outputs, moved)  # type: ignore[misc]
        return tuple(x if on or x is None else x.sum(0) for x, on in zip(found, flags))

    return run


@dataclass(frozen=True)
class Tuning:
    """How a kernel is tuned at its first call."""

    space: tuple[tuple[str, tuple[Any, ...]], ...]
    budget_ms: float
    cache: str | None


class Kernel:
    """A kernel that `kernel` made; call it on Tensors."""

    def __init__(
        self,
        definition: Definition,
        plan: Plan | None = None,
        tuning: Tuning | None = None,
        shared: dict[str, Any] | None = None,
    ) -> None:
        self.definition, self.plan, self.tuning = definition, plan or Plan(), tuning
        if shared is None:
            shared = {"derivatives": Derivatives(), "tables": {}, "callees": {}}
        self._shared = shared  # with every Kernel that differs only in its Plan
        self.trials: tuple[Any, ...] = ()  # of the last search, or those the table kept
        functools.update_wrapper(self, definition.function)

    def __repr__(self) -> str:
        return f"<kernel {self.definition.name}: {self.plan}>"

    # ---- calling --------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given, tensors = self._bind(args, kwargs)
        plan = self.plan if self.tuning is None else self._tuned(given, tensors)
        callee = self._callee(given, tensors, plan)
        nodes = _outputs(ops.call(*[node_of(t) for t in tensors.values()], callee=callee))
        found = [wrap(n, *tensors.values()) for n in nodes]
        return found[0] if len(found) == 1 else tuple(found)

    def _bind(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Arguments by name, and those that are data; what is searched for is left out."""
        plan = self.plan
        if self.tuning is not None:
            plan = plan.with_(**{name: values[0] for name, values in self.tuning.space})
        given = self.definition.bind(args, kwargs, plan)
        for name, _ in plan.sizes:
            given.pop(name, None)
        return given, {n: lift(v) for n, v in given.items() if is_array(v)}

    def _callee(
        self, given: Mapping[str, Any], tensors: Mapping[str, Tensor], plan: Plan
    ) -> TensorCallee:
        types = {n: tensors[n].node.type if n in tensors else v for n, v in given.items()}
        if plan.sizes:
            types.update(dict(plan.sizes))
        _device(tensors)  # one for all
        made = instance(self.definition, types, plan)
        key = (made, self._shared["derivatives"])
        known: dict[Any, TensorCallee] = self._shared["callees"]
        if key not in known:
            known[key] = TensorCallee(self.definition.name, made, key[1])
        return known[key]

    def lower(self, *args: Any, **kwargs: Any) -> tuple[Body, ...]:
        """The Bodies that a call would launch where its arguments are."""
        from ..compiler.compile import launches_on

        given, tensors = self._bind(args, kwargs)
        callee = self._callee(given, tensors, self._known_plan(given, tensors))
        return tuple(body for body, _ in launches_on(callee, _device(tensors)))

    def interpret(self, *args: Any, **kwargs: Any) -> Any:
        """The results as NumPy arrays, by the Tile interpreter: slow, and the judge."""
        given, tensors = self._bind(args, kwargs)
        callee = self._callee(given, tensors, self._known_plan(given, tensors))
        found = callee.interpret(*[t.numpy() for t in tensors.values()])
        return found[0] if len(found) == 1 else found

    # ---- the Plan -------------------------------------------------------------------------

    def with_plan(self, **choices: Any) -> Kernel:
        """Another Kernel with choices of its Plan made; it is not tuned."""
        return Kernel(self.definition, self.plan.with_(**choices), None, self._shared)

    def schedule(
        self, block: tuple[int, int] | None = None, k: int | None = None, **sizes: Any
    ) -> Kernel:
        """Block sizes (rows, columns), depth k, and values of static arguments by name."""
        named = {"block": block, "k": k}
        return self.with_plan(**{n: v for n, v in named.items() if v is not None}, **sizes)

    def warps(self, count: int) -> Kernel:
        """Warps that run a program (on a GPU)."""
        return self.with_plan(warps=count)

    def stages(self, count: int) -> Kernel:
        """Copies under way in a pipelined loop."""
        return self.with_plan(stages=count)

    def vector(self, width: int) -> Kernel:
        """Elements one thread moves at a time."""
        return self.with_plan(vector=width)

    def swizzle(self, kind: str) -> Kernel:
        """How tiles lie in shared memory: "xor" or "none"."""
        return self.with_plan(swizzle=kind)

    # ---- derivatives ----------------------------------------------------------------------

    def vjp(self, rule: Function) -> Function:
        """Give the reverse derivative: rule(inputs, outputs, cotangents) -> one for each input.

        `inputs` is a tuple of the array arguments; outputs and cotangents are one Tensor, or
        tuples where the kernel has several results. None stands for no derivative.
        """
        self._derive(reverse=rule)
        return rule

    def jvp(self, rule: Function) -> Function:
        """Give the forward derivative: rule(inputs, outputs, tangents) -> one for each result."""
        self._derive(forward=rule)
        return rule

    def _derive(self, **rules: Function) -> None:
        now: Derivatives = self._shared["derivatives"]
        for name in rules:
            if getattr(now, name) is not None:
                raise StateError(
                    f"the kernel {self.definition.name} has this derivative already", op="kernel"
                )
        self._shared["derivatives"] = Derivatives(**{**vars(now), **rules})

    # ---- tuning ---------------------------------------------------------------------------

    def report(self) -> str:
        """What the last search tried, or what the table knows of it."""
        return "\n".join(str(t) for t in self.trials) or "nothing was tried"

    def _tuned(self, given: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Plan:
        """The best Plan known for this problem, searched for at its first call; for a machine
        that is not here nothing can be measured."""
        assert self.tuning is not None
        if mode.target is not None:
            return self._known_plan(given, tensors)
        device = _device(tensors)

        def make(plan: Plan) -> Any:
            inputs = tuple(build.input_(t.node.shape, t.dtype) for t in tensors.values())
            callee = self._callee(given, tensors, plan)
            return inputs, tuple(_outputs(ops.call(*inputs, callee=callee)))

        best, self.trials = self._plans().tuned(
            self._problem(given, tensors),
            dict(self.tuning.space),
            self.plan,
            make,
            lambda: _arguments(tensors, device),
            self.tuning.budget_ms,
            device,
        )
        return best

    def _plans(self) -> Any:
        """The table of what was tuned, in the folder that a person named."""
        from ..tune.kernel_plans import KernelPlans

        assert self.tuning is not None
        tables: dict[Any, Any] = self._shared["tables"]
        if self.tuning.cache not in tables:
            tables[self.tuning.cache] = KernelPlans(self.definition.name, self.tuning.cache)
        return tables[self.tuning.cache]

    def _known_plan(self, given: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Plan:
        """The Plan of a call that measures nothing: the best known, or the first of the space."""
        if self.tuning is None:
            return self.plan
        where = mode.target or _device(tensors)
        known: Plan | None = self._plans().known(self._problem(given, tensors), where)
        if known is not None:
            return known
        return self.plan.with_(**{name: values[0] for name, values in self.tuning.space})

    def _problem(self, given: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[Any, ...]:
        """What a problem is, but for the machine: code, types, static values, space."""
        code = stable(reached(self.definition.function))
        types = [
            (n, str(tensors[n].node.type) if n in tensors else repr(v)) for n, v in given.items()
        ]
        return code, types, self.tuning, self.plan


def _arguments(tensors: Mapping[str, Tensor], device: str) -> tuple[list[Buffer], dict[str, int]]:
    """Buffers to measure with: the real ones, or random ones of the same types in a trace."""
    if mode.trace is None and not mode.depth:
        return [t.buffer() for t in tensors.values()], {}
    symbols: dict[str, int] = {}
    found = []
    random = np.random.default_rng(0)
    for tensor in tensors.values():
        type_ = tensor.node.type
        assert isinstance(type_, Array)
        for size in type_.shape:
            if not isinstance(size, int):
                from ..ir.symbol import atoms

                symbols.update({a.name: high(a) for a in atoms(size)})
        shape = tuple(evaluate(s, symbols) for s in type_.shape)
        data = random.standard_normal(shape).astype(type_.dtype.numpy)
        found.append(Buffer.wrap(data) if device == HOST else _sent(data, device))
    return found, symbols


def _sent(data: Any, device: str) -> Any:
    """Data as a Buffer on a GPU; the trace in progress does not see it."""
    before, mode.trace = mode.trace, None
    try:
        return lift(data).to(device).buffer()
    finally:
        mode.trace = before


def _device(tensors: Mapping[str, Tensor]) -> str:
    """Where a kernel runs: where its arguments are."""
    devices = {t.device for t in tensors.values()}
    if len(devices) > 1:
        raise UserError(
            "arguments on several devices",
            op="kernel",
            got=sorted(devices),
            hint="move them with .to(device)",
        )
    return devices.pop() if devices else HOST


class Decorator:
    """`@kernel`, and `@kernel.autotune(...)`."""

    def __call__(self, function: Function) -> Kernel:
        """Make a kernel of a function in the tile language."""
        return Kernel(_definition(function))

    def autotune(
        self,
        space: Mapping[str, Sequence[Any]],
        metric: str = "latency_ms",
        budget_ms: float = 200,
        cache: str | None = None,
    ) -> Callable[[Function], Kernel]:
        """Make a kernel that tries the Plans of a space at its first call for a problem.

        `space` names parts of the Plan (BM, BN, BK or BD, warps, stages, vector, swizzle) or
        static arguments; the best is kept in the folder `cache` (None: the cache folder of
        tilegrad, "": this process only).
        """
        if metric != "latency_ms":
            raise UserError(
                "unknown metric", op="kernel.autotune", expected='"latency_ms"', got=metric
            )
        frozen = tuple((name, tuple(values)) for name, values in space.items())

        def decorate(function: Function) -> Kernel:
            return Kernel(_definition(function), None, Tuning(frozen, float(budget_ms), cache))

        return decorate


def _definition(function: Function) -> Definition:
    if not callable(function) or not hasattr(function, "__code__"):
        raise DTypeError(
            "only a Python function can be a kernel", op="kernel", got=type(function).__name__
        )
    found = Definition(function)
    for parameter in found.signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise UserError("a kernel names all of its arguments", op="kernel", got=str(parameter))
    return found


kernel = Decorator()

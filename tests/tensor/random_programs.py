"""Random programs of Tensors as Python text that torch and tilegrad both run.

A Program is a list of lines such as `v3 = F.softmax(v1 @ v2, dim=-1)` over leaves that are given.
It grows line by line: a line is kept if torch takes it and its values stay small and finite, so
every Program is valid and tolerances mean something. Functions that jump (floor, comparisons,
sort) are applied to exact values alone: those that float64 and the declared dtype agree on to the
last bit, so that rounding never decides. Invariant: a Program depends on its seed alone.
"""

from __future__ import annotations

import ast
import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

FLOATS = ("float32", "float64", "bfloat16", "float16")
MOST = 3000  # elements of a value
LARGEST = 200.0
GRAIN = 1024  # exact values are multiples of 1 / GRAIN

warnings.filterwarnings("ignore", category=UserWarning, module="torch")


class Every:
    """torch, with one dtype in the place of every float."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, self.dtype if name in FLOATS else name)

    @contextlib.contextmanager
    def default(self) -> Iterator[None]:
        """What a quotient of integers is, inside."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, self.dtype))
        try:
            yield
        finally:
            torch.set_default_dtype(before)


@dataclass
class Leaf:
    """An argument: its name, dtype and values."""

    name: str
    dtype: str
    values: np.ndarray  # float64 for floats

    @property
    def is_float(self) -> bool:
        """Whether it has a gradient."""
        return self.dtype in FLOATS

    def torch(self, every: Every | None = None) -> torch.Tensor:
        """As torch has it, or with another float."""
        made = torch.from_numpy(self.values.copy()).to(getattr(torch, self.dtype))
        return made.to(getattr(torch, every.dtype)) if every and self.is_float else made


@dataclass
class Program:
    """Leaves, lines, and the names of the results."""

    leaves: list[Leaf] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        shapes = [f"# {x.name}: {x.dtype}{list(x.values.shape)}" for x in self.leaves]
        return "\n".join([*shapes, *self.lines, "# results: " + ", ".join(self.outputs)])

    def run(self, module: Any, functional: Any, leaves: Sequence[Any]) -> dict[str, Any]:
        """Every value by its name."""
        known = {"m": module, "F": functional}
        known.update((x.name, value) for x, value in zip(self.leaves, leaves))
        for line in self.lines:
            exec(line, known)
        return known

    def slice(self, outputs: Sequence[str]) -> Program:
        """What some results need."""
        wanted, lines = set(outputs), []
        for line in reversed(self.lines):
            if names_stored(line) & wanted:
                lines.append(line)
                wanted |= names_read(line)
        leaves = [x for x in self.leaves if x.name in wanted]
        return Program(leaves, lines[::-1], list(outputs))

    @property
    def floats(self) -> list[str]:
        """Float dtypes that it names or is given."""
        text = "\n".join(self.lines)
        return [d for d in FLOATS if f"m.{d}" in text or any(x.dtype == d for x in self.leaves)]


def names_stored(line: str) -> set[str]:
    """Names that a line gives a value."""
    nodes = ast.walk(ast.parse(line))
    return {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def names_read(line: str) -> set[str]:
    """Names that a line reads."""
    nodes = ast.walk(ast.parse(line))
    return {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


@dataclass
class Value:
    """A variable while a Program grows."""

    name: str
    low: torch.Tensor  # in the declared dtype
    high: torch.Tensor  # with float64 for floats
    exact: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""
        return tuple(self.low.shape)

    @property
    def ndim(self) -> int:
        """Its axes."""
        return self.low.ndim

    @property
    def is_float(self) -> bool:
        """Not of integers or bools."""
        return self.low.is_floating_point()

    @property
    def dtype(self) -> str:
        """Its name."""
        return str(self.low.dtype).removeprefix("torch.")

    def untied(self, axis: int) -> bool:
        """Whether no two elements along an axis are equal, with room for rounding unless exact:
        which of two equal ones torch takes is nobody's promise."""
        lines = self.high.double().sort(axis).values
        gaps = lines.diff(dim=axis)
        least = 0.0 if self.exact else 1e-3 * (1 + float(lines.abs().max() if lines.numel() else 0))
        return bool((gaps > least).all()) and (self.exact or self.dtype in FLOATS[:2])


class Maker:
    """Grows a Program."""

    def __init__(self, seed: Any, lines: int = 8) -> None:
        self.rng = np.random.default_rng(seed)
        self.program = Program()
        self.values: list[Value] = []
        self.main = self.weighted({"float32": 10, "float64": 2, "bfloat16": 2, "float16": 1})
        for _ in range(self.number(1, 3)):
            self.leaf(self.shape(), self.main)
        tries = 0
        while len(self.program.lines) < lines and tries < 20 * lines:
            tries += 1
            self.grow()
        self.finish()

    # ---- choices --------------------------------------------------------------------------

    def number(self, low: int, high: int) -> int:
        """From low to high, both included."""
        return int(self.rng.integers(low, high + 1))

    def pick(self, items: Sequence[Any]) -> Any:
        """One of them."""
        return items[self.number(0, len(items) - 1)]

    def weighted(self, weights: dict[Any, float]) -> Any:
        """One of the keys."""
        keys = list(weights)
        shares = np.array(list(weights.values()), float)
        return keys[int(self.rng.choice(len(keys), p=shares / shares.sum()))]

    def chance(self, of: float) -> bool:
        """True so often."""
        return bool(self.rng.random() < of)

    def shape(self) -> tuple[int, ...]:
        """Sizes; sometimes odd ones, sometimes an empty axis."""
        rank = self.weighted({0: 1, 1: 4, 2: 8, 3: 6, 4: 3})
        sizes = (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 31, 33, 64, 65)
        made = [self.pick(sizes[: 15 if rank < 3 else 9]) for _ in range(rank)]
        if rank and self.chance(0.03):
            made[self.number(0, rank - 1)] = 0
        return tuple(made)

    def leaf(self, shape: Sequence[int], dtype: str, exact: bool | None = None) -> Value:
        """A new argument."""
        exact = self.chance(0.4) if exact is None else exact
        if dtype == "bool":
            values: np.ndarray = self.rng.random(tuple(shape)) < 0.5
        elif dtype not in FLOATS:
            least = 0 if dtype == "uint8" else -9
            values = self.rng.integers(least, 10, tuple(shape)).astype(dtype)
        elif exact:
            values = self.rng.integers(-16, 17, tuple(shape)) / 4.0
        else:
            values = self.rng.standard_normal(tuple(shape)) * self.pick((0.5, 1.0, 2.0))
        leaf = Leaf(f"x{len(self.program.leaves)}", dtype, np.asarray(values))
        leaf.values = leaf.torch().to(torch.float64).numpy() if leaf.is_float else leaf.values
        self.program.leaves.append(leaf)
        made = Value(
            leaf.name, leaf.torch(), leaf.torch(Every("float64")), exact or not leaf.is_float
        )
        self.values.append(made)
        return made

    def value(self, wanted: Callable[[Value], bool] = lambda v: True) -> Value:
        """A value that is wanted; recent ones more often."""
        found = [v for v in self.values if wanted(v)]
        if not found:
            raise LookupError
        weights = np.array([1.4**i * (0.3 if v.name[0] == "x" else 1) for i, v in enumerate(found)])
        return found[int(self.rng.choice(len(found), p=weights / weights.sum()))]

    def float_(self, least: int = 0, most: int = 9) -> Value:
        """A float with so many axes."""
        return self.value(lambda v: v.is_float and least <= v.ndim <= most)

    def exact(self, least: int = 0) -> Value:
        """An exact value."""
        return self.value(lambda v: v.exact and v.ndim >= least)

    def axis(self, v: Value) -> int:
        """One of its axes, from either end."""
        return self.number(-v.ndim, v.ndim - 1)

    def fitting(self, v: Value, dtype: str | None = None) -> Value:
        """Another value that broadcasts with it: one that is there, or a leaf."""
        if self.chance(0.5):
            try:
                return self.value(
                    lambda o: (
                        o.is_float == v.is_float
                        and (dtype is None or o.dtype == dtype)
                        and broadcasts(o.shape, v.shape)
                    )
                )
            except LookupError:
                pass
        shape = [1 if self.chance(0.3) else s for s in v.shape]
        cut = self.number(0, v.ndim) if self.chance(0.3) else 0
        return self.leaf(shape[cut:], dtype or v.dtype)

    def ints(self, shape: Sequence[int], high: int, low: int = 0) -> str:
        """Integers as a literal of the Program."""
        made = self.rng.integers(low, high, tuple(shape)).tolist()
        return f"m.tensor({made}, dtype=m.int64)"

    # ---- growth ---------------------------------------------------------------------------

    def grow(self) -> None:
        """One more line, if the one that comes to mind is fit."""
        leaves, values = len(self.program.leaves), len(self.values)
        kind = self.weighted(KINDS)
        try:
            text = kind(self)
        except LookupError:
            text = None
        if text is None or not self.take(text):
            del self.program.leaves[leaves:]
            del self.values[values:]

    def take(self, text: str) -> bool:
        """Add a line, unless torch refuses it or its values are out of hand."""
        name = f"v{len(self.program.lines)}"
        line = f"{name} = {text}"
        read = names_read(line)
        inputs = [v for v in self.values if v.name in read]
        F = torch.nn.functional
        try:
            low, high = {"m": torch, "F": F}, {"m": Every("float64"), "F": F}
            for v in inputs:
                low[v.name], high[v.name] = v.low, v.high
            exec(line, low)
            with high["m"].default():
                exec(line, high)
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
            return False
        made, precise = low[name], high[name]
        if not isinstance(made, torch.Tensor) or made.numel() > MOST or made.ndim > 6:
            return False
        if made.is_complex() or made.shape != precise.shape:
            return False
        if made.is_floating_point():
            wide = made.double()
            if not bool(torch.isfinite(wide).all() & torch.isfinite(precise).all()):
                return False
            if made.numel() and float(precise.abs().max()) > LARGEST:
                return False
            on_grid = precise * GRAIN == (precise * GRAIN).round()
            exact = all(v.exact for v in inputs) and bool(((wide == precise) & on_grid).all())
        else:
            exact = bool((made == precise).all()) and bool((made.double().abs() < 1e6).all())
            if not exact:
                return False
        self.program.lines.append(line)
        self.values.append(Value(name, made, precise, exact))
        return True

    def finish(self) -> None:
        """Name the results: values that nobody reads, and some that somebody does."""
        lines = self.program.lines
        read = set().union(*(names_read(line) for line in lines)) if lines else set()
        made = [v.name for v in self.values if v.name.startswith("v")]
        outputs = [n for n in made if n not in read or self.chance(0.15)]
        self.program = self.program.slice(outputs)


def broadcasts(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether two shapes do."""
    return all(x == y or 1 in (x, y) for x, y in zip(a[::-1], b[::-1]))


# fmt: off
# ---- elementwise --------------------------------------------------------------------------------

SMOOTH = (
    "m.sin({})", "m.cos({})", "m.tanh({})", "m.sigmoid({})", "m.erf({})", "m.atan({})",
    "m.exp({} * 0.5)", "m.exp2({} * 0.5)", "m.expm1({} * 0.5)", "m.log1p({}.abs())",
    "m.log({}.abs() + 0.5)", "m.log2({}.abs() + 0.5)", "m.log10({}.abs() + 1)", "m.asinh({})",
    "m.acosh({}.abs() + 1.5)", "m.atanh(m.tanh({}) * 0.9)", "m.sinh({} * 0.5)", "m.cosh({} * 0.5)",
    "m.sqrt({}.abs() + 0.25)", "m.rsqrt({}.abs() + 0.25)", "m.square({})",
    "({} * {} + 1).reciprocal()",
    "m.erfc({})", "m.erfinv(m.tanh({}) * 0.8)", "m.tan(m.sin({}))", "m.asin(m.sin({}) * 0.9)",
    "m.acos(m.tanh({}) * 0.9)", "m.logit(m.sigmoid({}) * 0.9 + 0.05)", "m.sinc({})",
    "m.lgamma({}.abs() + 1)", "m.digamma({}.detach().abs() + 1)", "F.gelu({})",
    "F.gelu({}, approximate='tanh')",
    "F.silu({})", "F.softplus({})", "F.softplus({}, beta=2, threshold=3)", "F.mish({})",
    "F.elu({}, 0.7)", "F.selu({})",
    "F.celu({})", "F.logsigmoid({})", "F.softsign({})", "F.tanhshrink({})", "F.hardswish({})",
)
KINKED = (
    "{}.abs()", "F.relu({})", "F.relu6({})", "F.leaky_relu({}, 0.2)", "F.hardtanh({}, -1.5, 2)",
    "{}.clamp(-1, 1.5)", "{}.clamp(min=0.25)", "{}.clamp(max=0.75)",
    "F.threshold({}, 0.5, 0.25)", "F.softshrink({}, 0.5)", "F.hardshrink({}, 0.5)",
    "m.nan_to_num({})",
)
JUMPING = (
    "m.floor({})", "m.ceil({})", "m.round({})", "m.trunc({})", "m.sign({})", "m.frac({})",
    "m.signbit({})", "m.logical_not({})", "({} > 0)", "({} <= 0.5)", "({} == 1)", "m.isfinite({})",
    "m.heaviside({}, m.zeros_like({})).detach()", "m.isnan({})",
)
SCALAR = (
    "{} + 2.5", "3 - {}", "{} * 0.37", "{} / 7", "-{}", "{} ** 2", "{} ** 3", "2.0 ** ({} * 0.25)",
    "({}.abs() + 0.5) ** 1.5", "({}.abs() + 0.5) ** -1", "1 / ({}.abs() + 1)",
    "m.add({}, {}, alpha=0.5)",
    "m.rsub({}, 2)", "m.lerp({}, {} * 0.5 + 1, 0.3)",
)
PAIRS = (
    "{a} + {b}", "{a} - {b}", "{a} * {b}", "{a} / ({b} * {b} + 0.5)", "m.maximum({a}, {b})",
    "m.minimum({a}, {b})", "m.atan2({a}, {b} * {b} + 0.5)", "m.hypot({a}, {b}.abs() + 0.5)",
    "m.logaddexp({a}, {b})",
    "m.logaddexp2({a}, {b})", "({a}.abs() + 0.5) ** ({b} * 0.25)", "m.xlogy({a}, {b}.abs() + 0.5)",
    "m.sub({a}, {b}, alpha=2)",
    "m.addcmul({a}, {b}, {a}, value=0.5)", "m.addcdiv({a}, {b}, {b}.abs() + 1, value=0.5)",
    "m.lerp({a}, {b}, 0.25)",
    "F.mse_loss({a}, {b}.expand_as({a}), reduction='none')", "m.fmax({a}, {b})", "m.fmin({a}, {b})",
    "{a} + {b}.to({a}.dtype)",
)
EXACT_PAIRS = (
    "({a} > {b})", "({a} == {b})", "({a} <= {b})", "({a} != {b})", "m.fmod({a}, {b}.abs() + 1)",
    "m.remainder({a}, {b}.abs() + 1)",
    "({a} // ({b}.abs() + 1)).detach()", "m.where({a} > {b}, {a}, {b} * 2)",
    "m.copysign({a}, {b}.abs() + 1)", "m.logical_and({a}, {b})", "m.logical_xor({a}, {b})",
    "m.eq({a}, {b})",
)
WHOLE_PAIRS = (
    "{a} & {b}", "{a} | {b}", "{a} ^ {b}", "{a} + {b}", "{a} * {b}", "{a} - {b}",
    "m.maximum({a}, {b})",
    "{a} // ({b}.abs() + 1)", "{a} % ({b}.abs() + 1)", "{a} << ({b} & 3)", "{a} >> ({b} & 3)",
    "~{a}",
    "{a} / ({b}.abs() + 1)", "{a} * 0.5", "{a}.abs() ** 2", "{a}.clamp(-2, 3)",
)


def unary(g: Maker) -> str:
    """A function of each element."""
    if g.chance(0.12):
        return str(g.pick(JUMPING)).replace("{}", g.exact().name)
    table = g.weighted({SMOOTH: 6, KINKED: 2, SCALAR: 3})
    return str(g.pick(table)).replace("{}", g.float_().name)


def binary(g: Maker) -> str:
    """A function of two elements."""
    if g.chance(0.2):
        a = g.exact()
        b = g.fitting(a)
        if not b.exact:
            raise LookupError
        return str(g.pick(EXACT_PAIRS)).format(a=a.name, b=b.name)
    a = g.float_()
    b = g.fitting(a)
    return str(g.pick(PAIRS)).format(a=a.name, b=b.name)


def whole(g: Maker) -> str:
    """Of integers and bools."""
    kinds = ("int64", "int32", "uint8", "bool", "int8", "int16")
    try:
        a = g.value(lambda v: not v.is_float)
    except LookupError:
        a = g.leaf(g.shape(), g.pick(kinds))
    b = g.fitting(a, a.dtype if g.chance(0.7) else g.pick(kinds))
    return str(g.pick(WHOLE_PAIRS)).format(a=a.name, b=b.name)


def cast(g: Maker) -> str:
    """To another dtype."""
    if g.chance(0.3):
        return f"{g.exact().name}.to(m.{g.pick(('int64', 'int32', 'bool', 'int16'))})"
    v = g.value()
    return f"{v.name}.to(m.{g.weighted({'float32': 6, 'float64': 2, 'bfloat16': 1, 'float16': 1})})"


def chosen(g: Maker) -> str:
    """where and masked_fill by a condition."""
    a = g.float_()
    b = g.fitting(a)
    condition = [v for v in g.values if v.dtype == "bool" and broadcasts(v.shape, a.shape)]
    c = g.pick(condition).name if condition else g.leaf(a.shape, "bool").name
    return g.pick((
        f"m.where({c}, {a.name}, {b.name})", f"m.where({c}, {a.name}, 0.5)",
        f"{a.name}.masked_fill({c}, 1.25)", f"{a.name} * {c}", f"m.where({c}, 1, {a.name})",
    ))


# ---- reductions ---------------------------------------------------------------------------------


def reduced(g: Maker) -> str:
    """Over some axes."""
    v = g.float_(1)
    count = g.number(0, v.ndim)
    axes = tuple(sorted(g.rng.choice(v.ndim, count, replace=False).tolist()))
    at = g.pick((f"dim={axes}", f"dim={axes}, keepdim=True")) if axes else ""
    one = f"{g.axis(v)}, keepdim={g.chance(0.5)}"
    return g.pick((
        f"{v.name}.sum({at})", f"{v.name}.mean({at})", f"{v.name}.sum({at}) * 0.1",
        f"m.var({v.name}, {at or 'dim=None'}, correction={g.number(0, 1)})",
        f"m.std({v.name} * 2, {at or 'dim=None'}, correction=0)", f"m.logsumexp({v.name}, {one})",
        f"{v.name}.norm()",
        f"m.linalg.vector_norm({v.name}, {g.pick((1, 2, 3))}, {at or 'dim=None'})",
        f"({v.name} * 0.2 + 1).prod({one})", f"({v.name} * {v.name}).mean({one})",
        f"m.amax({v.name}, {at or 'dim=()'})", f"m.amin({v.name}, {at or 'dim=()'})",
    ))


def counted(g: Maker) -> str | None:
    """Reductions of exact values: places, counts, truth."""
    v = g.exact(1)
    one = f"{g.axis(v)}"
    table = [
        f"{v.name}.any({one})", f"{v.name}.all({one})", f"m.count_nonzero({v.name}, {one})",
        f"{v.name}.amax({one})", f"{v.name}.max({one}).values", f"{v.name}.sum({one})",
        f"{v.name}.to(m.int64).sum()", f"{v.name}.to(m.bool).any()",
        f"m.sort({v.name}, {one}, stable=True).indices",
        f"m.sort({v.name}, {one}, descending=True, stable=True).values",
    ]
    if v.untied(int(one)):
        table += [
            f"m.argmax({v.name}, {one})", f"m.argmin({v.name}, {one}, keepdim=True)",
            f"m.max({v.name}, {one}).indices", f"m.cummax({v.name}, {one}).values",
            f"m.topk({v.name}, 1, {one}).indices", f"m.argsort({v.name}, {one})",
        ]
    return str(g.pick(table))


def scanned(g: Maker) -> str:
    """Running sums and the like, sorted values."""
    v = g.float_(1)
    one = g.axis(v)
    size = v.shape[one]
    table = [
        f"m.cumsum({v.name}, {one})", f"m.cumsum({v.name}, {one}) * 0.1",
        f"m.logcumsumexp({v.name}, {one})", f"m.cumprod(m.sin({v.name}) * 0.5 + 1, {one})",
        f"m.sort({v.name}, {one}, stable=True).values", f"m.diff({v.name}, dim={one})",
        f"m.flip({v.name}, ({one},)).cumsum({one})",
    ]
    if v.untied(one):
        table += [
            f"m.topk({v.name}, {g.number(0, size)}, {one}).values",
            f"m.cummin({v.name}, {one}).values", f"m.median({v.name}, {one}).values",
            f"m.kthvalue({v.name}, {g.number(1, max(1, size))}, {one}).values",
        ]
    return str(g.pick(table))


def normed(g: Maker) -> str:
    """softmax and the norms."""
    v = g.float_(1)
    one = g.axis(v)
    last = v.shape[-1]
    w, b = g.leaf((last,), v.dtype).name, g.leaf((last,), v.dtype).name
    if v.ndim >= 2 and all(v.shape) and g.chance(0.4):  # of nothing torch's gradients are nan
        channels = v.shape[1]
        groups = g.pick([n for n in (1, 2, 3, 4) if channels and channels % n == 0] or [1])
        weight = g.leaf((channels,), v.dtype).name
        return g.pick((
            f"F.group_norm({v.name}, {groups}, {weight}, {weight}, 1e-3)",
            f"F.batch_norm({v.name}, None, None, {weight}, {weight}, True, 0.1, 1e-2)",
            f"F.instance_norm({v.name}, eps=1e-2)",
        ))
    return g.pick((
        f"F.softmax({v.name}, dim={one})", f"F.log_softmax({v.name}, dim={one})",
        f"F.softmin({v.name}, dim={one})",
        f"F.layer_norm({v.name}, ({last},), {w}, {b}, 1e-3)",
        f"F.layer_norm({v.name}, {v.shape[-2:]}, eps=1e-2)",
        f"F.rms_norm({v.name}, ({last},), {w}, 1e-3)", f"F.normalize({v.name} + 0.1, dim={one})",
        f"F.softmax({v.name} * 3, dim={one}) * {v.name}",
    ))


# ---- movement -----------------------------------------------------------------------------------


def moved(g: Maker) -> str:
    """The same elements elsewhere."""
    v = g.value(lambda v: v.ndim > 0)
    n, one, other = v.name, g.axis(v), g.axis(v)
    order = g.rng.permutation(v.ndim).tolist()
    size = v.shape[one]
    start = g.number(0, max(0, size - 1))
    length = g.number(0 if g.chance(0.1) else min(1, size), max(0, size - start))
    return g.pick((
        f"{n}.transpose({one}, {other})", f"{n}.permute({order})", f"{n}.flip(({one},))",
        f"m.roll({n}, {g.number(-5, 5)}, {one})", f"m.roll({n}, {g.number(-5, 5)})",
        f"{n}.reshape({factored(g, math.prod(v.shape))})", f"{n}.flatten()",
        f"{n}.unsqueeze({one})",
        f"{n}.squeeze()", f"{n}.narrow({one}, {start}, {length})", f"{n}.select({one}, {start})",
        f"{n}.repeat({[g.number(1, 2) for _ in range(v.ndim + g.number(0, 1))]})",
        f"{n}.repeat_interleave({g.number(1, 3)}, {one})", f"{n}.tile((2,))",
        f"m.rot90({n}, 1, (0, {v.ndim - 1}))", f"m.tril({n})", f"m.triu({n}, {g.number(-2, 2)})",
        f"m.diagonal({n}, {g.number(-1, 1)}, {one}, {other})",
        f"{n}.unfold({one}, {g.number(1, max(1, size))}, {g.number(1, 3)})",
        f"m.chunk({n}, {g.number(1, 3)}, {one})[0]",
        f"m.split({n}, {g.number(1, max(1, size))}, {one})[-1]",
        f"{n}.movedim({one}, {other})", f"m.diag_embed({n})", f"{n}.contiguous()",
        f"{n}.expand(2, *{n}.shape)",
    ))


def factored(g: Maker, count: int) -> tuple[int, ...]:
    """A shape with so many elements."""
    if count == 0:
        return (0, 3)
    made = []
    while count > 1 and len(made) < 4:
        factors = [f for f in range(1, min(count, 64) + 1) if count % f == 0]
        made.append(g.pick(factors))
        count //= made[-1]
    return (*made, count) if count > 1 or not made else tuple(made)


def sliced(g: Maker) -> str:
    """Slices with steps, numbers, None and Ellipsis."""
    v = g.value(lambda v: v.ndim > 0)
    parts = []
    for size in v.shape[: g.number(1, v.ndim)]:
        start, stop = sorted((g.number(-size, size), g.number(-size, size)))
        parts.append(str(g.pick((
            ":", f"{start}:{stop}", f"::{g.number(1, 3)}", f"{g.number(0, size)}:",
            f":{g.number(-size, size)}",
            f"{g.number(-size, max(0, size - 1))}" if size else ":", "None, :",
        ))))
    if g.chance(0.2):
        parts.insert(0, "...") if len(parts) == v.ndim else parts.append("...")
    return f"{v.name}[{', '.join(parts)}]"


def joined(g: Maker) -> str:
    """cat, stack and pad."""
    v = g.float_(1)
    one = g.axis(v)
    other = g.fitting(v)
    if g.chance(0.4):
        mode = g.pick(("constant", "constant", "reflect", "replicate", "circular"))
        if mode == "constant":
            least = -2 if g.chance(0.3) else 0
            pads = [g.number(least, 3) for _ in range(2 * g.number(1, v.ndim))]
            return f"F.pad({v.name}, {pads}, value={g.pick((0.0, 1.5))})"
        many = max(1, v.ndim - 2) if v.ndim > 1 else 1
        return f"F.pad({v.name}, {[g.number(0, 2) for _ in range(2 * many)]}, mode='{mode}')"
    if other.shape != v.shape:
        other = g.leaf(v.shape, v.dtype)
    shape = list(v.shape)
    shape[one] = g.number(0, 4)
    third = g.leaf(shape, v.dtype)
    return g.pick((
        f"m.cat([{v.name}, {other.name}], {one})",
        f"m.cat([{v.name}, {third.name}, {v.name}], {one})",
        f"m.stack([{v.name}, {other.name}], {one})",
        f"m.cat([{v.name} * 2, {third.name} + 1], {one})",
        f"m.hstack([{v.name}, {other.name}])", f"m.stack([{v.name}, {v.name}.sin()], -1)",
    ))


# ---- indexing -----------------------------------------------------------------------------------


def indexed(g: Maker) -> str | None:
    """Gathers and scatters."""
    v = g.value(lambda v: v.ndim > 0 and all(v.shape) and v.dtype != "bool")
    one = g.number(0, v.ndim - 1)
    size = v.shape[one]
    n, many = v.name, g.number(1, 7)
    picks = g.ints((many,), size)
    like = list(v.shape)
    like[one] = many
    table = [
        f"m.index_select({n}, {one}, {picks})", f"{n}[{':, ' * one}{picks}]",
        f"m.take_along_dim({n}, {g.ints(like, size)}, {one})",
        f"m.gather({n}, {one}, {g.ints(like, size)})",
        f"m.take({n}, {g.ints((3, many), math.prod(v.shape))})",
        f"{n}[{g.ints((2, many), v.shape[0], -v.shape[0])}]",
    ]
    if v.ndim > 1:
        a, b = g.ints((many,), v.shape[0]), g.ints((many,), v.shape[1])
        table += [f"{n}[{a}, {b}]", f"{n}[{a}, ..., 0]", f"{n}[{a}, None, 1:]"]
    if v.is_float:
        given = g.leaf(like, v.dtype).name
        index, first = g.ints(like, size), g.ints((many,), v.shape[0])
        by = g.pick(("sum", "mean", "amax", "amin"))
        fresh = f"m.tensor({g.rng.permutation(size)[: min(many, size)].tolist()})"
        row = list(v.shape)
        row[one] = min(many, size)
        rows = g.leaf(row, v.dtype).name
        table += [
            f"m.scatter_add({n}, {one}, {index}, {given})",
            f"m.index_add({n}, {one}, {picks}, {given}, alpha=0.5)",
            f"m.index_copy({n}, {one}, {fresh}, {rows})",
            f"m.index_fill({n}, {one}, {fresh}, 0.75)",
            f"m.scatter_reduce({n}, {one}, {index}, {given}, '{by}')",
            f"m.scatter({n}, {one}, {spread(g, v, one)}, {n} * 2)",
            f"m.index_put({n}, ({first},), m.tensor(0.5, dtype={n}.dtype), accumulate=True)",
            # torch writes into neighbours where elements of the view lie at one place
            f"m.select_scatter({n}.contiguous(), {n}.select({one}, 0) * 2, {one}, "
            f"{g.number(0, size - 1)})",
        ]
    if v.is_float and v.ndim == 2:
        table += [f"F.embedding({g.ints((3, 4), v.shape[0])}, {n})"]
    return str(g.pick(table))


def spread(g: Maker, v: Value, one: int) -> str:
    """Places along an axis, each once."""
    shape = [v.shape[one] if i == one else 1 for i in range(v.ndim)]
    order = g.rng.permutation(v.shape[one]).reshape(shape)
    return f"m.tensor({np.broadcast_to(order, v.shape).tolist()})"


# ---- products -----------------------------------------------------------------------------------


def product(g: Maker) -> str:
    """Matrix products."""
    v = g.float_(1)
    n, k, m = v.name, v.shape[-1], g.pick((1, 2, 5, 8, 17, 33))
    if v.ndim == 1:
        other = g.leaf((k, m), v.dtype).name
        return g.pick((f"{n} @ {other}", f"m.dot({n}, {n})", f"m.outer({n}, {n} * 0.5)"))
    right = g.leaf((k, m), v.dtype).name
    out = g.leaf((m, k), v.dtype).name
    batch = v.shape[:-2]
    deep = g.leaf((*batch, k, m), v.dtype).name
    table = [
        f"{n} @ {right}", f"F.linear({n}, {out})",
        f"F.linear({n}, {out}, {g.leaf((m,), v.dtype).name})",
        f"m.matmul({n}, {deep})", f"{n} @ {n}.transpose(-1, -2)",
        f"{n}.transpose(-1, -2) @ {n} * 0.1",
        f"{n} @ {g.leaf((k,), v.dtype).name}", f"m.einsum('...ij,kj->...ik', {n}, {out})",
        f"m.tensordot({n}, {right}, dims=1)", f"m.einsum('...ij,...ij->...i', {n}, {n})",
        f"F.gelu(F.linear({n}, {out})) @ {out}",
        f"F.bilinear({n}, {n}, {g.leaf((2, k, k), v.dtype).name})",
    ]
    if is_small(v):
        table += [f"F.softmax({n} @ {n}.transpose(-1, -2) * 0.3, dim=-1) @ {n}"]
    if v.ndim == 2:
        table += [
            f"m.einsum('ij,ij->ji', {n}, {n})", f"m.einsum('ij->j', {n})",
            f"m.addmm({out} @ {right} * 0 + 1, {out}, {right})",
            f"m.einsum('ij,jk,lk->il', {n}, {right}, {right})",
            f"m.kron({n}[:3, :3], {right}[:2, :2])",
            f"m.cdist({n}, {out})", f"m.einsum('ii->i', {n} @ {n}.T)",
        ]
    if v.ndim == 3:
        table += [
            f"m.bmm({n}, {deep})", f"m.einsum('bij,bjk->bik', {n}, {deep})",
            f"m.einsum('bij,bjk->ik', {n}, {deep}) * 0.2",
            f"m.baddbmm({n} @ {deep}, {n}, {deep}, beta=0.5, alpha=2)",
        ]
    return str(g.pick(table))


def convolved(g: Maker) -> str:
    """Convolutions, pooling, resizing of two spatial axes or one."""
    v = g.value(lambda v: v.is_float and v.ndim in (3, 4) and all(v.shape))
    spatial, channels = v.ndim - 2, v.shape[1]
    groups = g.pick([n for n in (1, 2, 3) if channels and channels % n == 0] or [1])
    kernel = [g.number(1, 3) for _ in range(spatial)]
    w = g.leaf((groups * g.number(1, 3), channels // groups, *kernel), v.dtype).name
    turned = g.leaf((channels, g.number(1, 3), *kernel), v.dtype).name
    b = g.pick(("None", f"m.ones({w}.shape[0], dtype={w}.dtype)"))
    step, pad, wide = g.number(1, 2), g.number(0, 2), g.number(1, 2)
    size = [g.number(1, 5) for _ in range(spatial)]
    mode = "bilinear" if spatial == 2 else "linear"
    return g.pick((
        f"F.conv{spatial}d({v.name}, {w}, {b}, {step}, {pad}, {wide}, {groups})",
        f"F.conv_transpose{spatial}d({v.name}, {turned}, None, {step}, {g.number(0, 1)})",
        f"F.max_pool{spatial}d({v.name}, 2, stride={step})",
        f"F.avg_pool{spatial}d({v.name}, 2, stride={step}, padding=1)",
        f"F.adaptive_avg_pool{spatial}d({v.name}, {size})",
        f"F.interpolate({v.name}, scale_factor=2, mode='nearest')",
        f"F.interpolate({v.name}, size={size}, mode='{mode}', align_corners={g.chance(0.5)})",
    ))


def attended(g: Maker) -> str:
    """Attention, as a function and written out."""
    v = g.value(lambda v: v.is_float and v.ndim in (3, 4) and v.dtype != "float16" and is_small(v))
    keys, width = g.pick((1, 3, 8, 17)), v.shape[-1]
    k = g.leaf((*v.shape[:-2], keys, width), v.dtype).name
    u = g.leaf((*v.shape[:-2], keys, g.pick((width, 5))), v.dtype).name
    q = v.name
    mask = g.leaf((v.shape[-2], keys), "bool")
    scores = f"{q} @ {k}.transpose(-1, -2) * {g.pick((0.3, 0.125))}"
    return g.pick((
        f"F.scaled_dot_product_attention({q}, {k}, {u})",
        f"F.scaled_dot_product_attention({q}, {k}, {u}, is_causal=True)",
        f"F.scaled_dot_product_attention({q}, {k}, {u}, scale=0.2)",
        f"m.softmax({scores}, -1) @ {u}",
        f"m.softmax(({scores}).masked_fill({mask.name}, -1e4), -1) @ {u}",
        f"m.softmax(m.where({mask.name}, {scores}, -3.0), -1) @ {u}",
        f"F.scaled_dot_product_attention({q}, {q}, {q}, is_causal=True)",
        f"m.softmax({scores} + {k}.mean(-1).unsqueeze(-2), -1) @ {u}",
    ))


def is_small(v: Value) -> bool:
    """Whether scores of it stay small: an error of a score is one of its weight, relatively."""
    return not v.low.numel() or float(v.high.abs().max()) < 8


def loss(g: Maker) -> str:
    """Losses."""
    v = g.float_(2, 2)
    rows, classes = v.shape
    if not rows or not classes:
        raise LookupError
    target, like = g.ints((rows,), classes), g.leaf(v.shape, v.dtype).name
    n = v.name
    return g.pick((
        f"F.cross_entropy({n}, {target})",
        f"F.cross_entropy({n}, {target}, reduction='none', label_smoothing=0.1)",
        f"F.nll_loss(F.log_softmax({n}, 1), {target})", f"F.mse_loss({n}, {like})",
        f"F.l1_loss({n}, {like})",
        f"F.smooth_l1_loss({n}, {like}, beta=0.7)", f"F.huber_loss({n}, {like}, delta=0.5)",
        f"F.binary_cross_entropy_with_logits({n}, m.sigmoid({like}))",
        f"F.kl_div(F.log_softmax({n}, 1), F.softmax({like}, 1), reduction='batchmean')",
        f"F.cosine_similarity({n}, {like} + 0.1, dim=1)",
        f"F.cross_entropy({n}, F.softmax({like}, 1))",
        f"F.multi_margin_loss({n}, {target})", f"F.one_hot({target}, {classes}) * {n}",
    ))


def made_anew(g: Maker) -> str:
    """Tensors from nothing."""
    size = g.number(1, 9)
    kind = g.pick(("float32", g.main))
    return g.pick((
        f"m.arange({size}, dtype=m.{kind})", f"m.linspace(-1, 2, {size}, dtype=m.{kind})",
        f"m.eye({size}, {size + 1}, dtype=m.{kind})",
        f"m.full(({size}, 3), 0.75, dtype=m.{kind})", f"m.arange({size})",
        f"m.zeros(2, {size}, dtype=m.{kind})",
    ))


KINDS: dict[Callable[[Maker], str | None], float] = {
    unary: 6, binary: 6, whole: 1.5, cast: 1, chosen: 1.5, reduced: 4, counted: 1.5, scanned: 1.5,
    normed: 2.5, moved: 5, sliced: 2, joined: 2, indexed: 2.5, product: 4, convolved: 1.2,
    attended: 1.2, loss: 0.8, made_anew: 0.4,
}


def make(seed: Any, lines: int = 8) -> Program:
    """The Program of a seed."""
    return Maker(seed, lines).program

"""Every elementwise function beside its meaning in mpmath, and what their errors are measured with.

One row per function: how it is called on a library (tilegrad or torch, by PyTorch's names), and
either the function of mpmath that says the exact value, or nothing where torch's own answer is
the exact one (comparisons, rounding, arithmetic that rounds once; of remainders and whole quotients
NumPy's is, as torch's remainders are nan for large quotients and its quotients of 16-bit floats
are rounded twice). `missing` names what tilegrad exports and no row has, so a
new function needs a row. tests/tensor/test_accuracy.py runs a sample of each row,
bench/accuracy.py a larger one.

Invariant: samples follow from the seed alone; an error is |got - exact| in units of the last place
of the exact value, an infinity counting as the power of two after the largest number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import mpmath
import numpy as np
import torch

import tilegrad as tg

Array = np.ndarray
mp = mpmath.mp.clone()
mp.prec = 160
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
DIGITS = {
    "float32": (24, -149, 128),
    "float64": (53, -1074, 1024),
    "bfloat16": (8, -133, 128),
    "float16": (11, -24, 16),
}
EXTREMES = ("maximum", "minimum", "fmax", "fmin", "clamp", "clamp_min", "clamp_max")
MODULES = ("elementwise", "maths", "activation", "compare")


@dataclass(frozen=True)
class Row:
    """One function, or one choice of its options."""

    name: str
    call: Callable[..., Any]  # of (library, *tensors)
    exact: Callable[..., Any] | None  # of mpmath numbers; none where torch is exact
    count: int = 1  # operands
    covers: str = ""  # the exported name, where it is another
    numpy: Callable[..., Any] | None = None  # of arrays: exact where torch is not
    loose: bool = False  # a formula that cancels, torch's too: its largest error is the bound
    dtypes: tuple[str, ...] = tuple(DTYPES)

    @property
    def zeros(self) -> bool:
        """Whether the sign of a zero means something; not where it is what the machine has."""
        home = getattr(tg, self.covers or self.name).__module__
        return not home.endswith("activation") and self.covers not in EXTREMES


def function(library: Any, name: str) -> Callable[..., Any]:
    """A function by its name in torch, in its parts or in tilegrad."""
    for home in (library, *((torch.special, torch.nn.functional) if library is torch else ())):
        if hasattr(home, name):
            return getattr(home, name)  # type: ignore[no-any-return]
    raise AttributeError(name)


def unary(name: str, exact: Any = None, **options: Any) -> Row:
    """A function of one operand."""
    own = f"{name}({', '.join(f'{k}={v}' for k, v in options.items())})" if options else name
    return Row(own, lambda m, x: function(m, name)(x, **options), exact, 1, covers=name)


def binary(name: str, exact: Any = None, count: int = 2, **options: Any) -> Row:
    """A function of several operands."""
    own = f"{name}({', '.join(f'{k}={v}' for k, v in options.items())})" if options else name
    return Row(own, lambda m, *xs: function(m, name)(*xs, **options), exact, count, covers=name)


def _logit(x: Any) -> Any:
    return mp.log(x / (1 - x)) if 0 < x < 1 else None


def _inside(f: Callable[[Any], Any], low: float, high: float) -> Callable[[Any], Any]:
    return lambda x: f(x) if low <= x <= high else None


def _erfinv(x: Any) -> Any:
    """By Newton's steps on erf, or on erfc near 1."""
    if not -1 < x < 1:
        return None
    if x == 0:
        return x
    a = abs(x)
    y = mp.mpf(str(torch.special.erfinv(torch.tensor(float(a), dtype=torch.float64)).item()))
    if not mp.isfinite(y):
        y = mp.mpf(5.8)
    for _ in range(4):
        rest = (1 - a) - mp.erfc(y) if a > 0.5 else mp.erf(y) - a
        y = y - rest * mp.sqrt(mp.pi) / 2 * mp.exp(y * y)
    return mp.sign(x) * y


def _gelu_tanh(x: Any) -> Any:
    return x / (1 + mp.exp(-2 * mp.sqrt(2 / mp.pi) * (x + mp.mpf(0.044715) * x**3)))


def _softplus(x: Any) -> Any:
    return x if x > 20 else mp.log1p(mp.exp(x))


def _power(a: Any, b: Any) -> Any:
    if a == 0 or (a < 0 and b != mp.floor(b)):
        return None
    size = mp.exp(b * mp.log(abs(a)))
    return -size if a < 0 and mp.floor(b) % 2 == 1 else size


def _elu(alpha: float, scale: float = 1.0, inner: float = 1.0) -> Callable[[Any], Any]:
    return lambda x: scale * (x if x > 0 else alpha * mp.expm1(x / inner))


def _logaddexp(a: Any, b: Any) -> Any:
    return max(a, b) + mp.log1p(mp.exp(-abs(a - b)))


def _atan2(y: Any, x: Any) -> Any:
    return mp.atan2(y, x) if y else None  # the sign of a zero counts


def _remainder(a: Array, b: Array) -> Array:
    rest = np.fmod(a, b)
    return np.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


def _floor_divide(a: Array, b: Array) -> Array:
    rest = np.fmod(a, b)
    quotient = (a - rest) / b - ((rest != 0) & ((rest < 0) != (b < 0)))
    whole = np.floor(quotient)
    whole = np.where(quotient - whole > 0.5, whole + 1, whole)
    whole = np.where(quotient == 0, np.copysign(np.zeros_like(a), a / b), whole)
    return np.where(b == 0, a / b, whole)


def _truncated(a: Array, b: Array) -> Array:
    return np.trunc(a / b)


SELU = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946
ONE = {  # of one operand: (name, exact, options)
    "exp": mp.exp, "exp2": lambda x: mp.power(2, x), "expm1": mp.expm1,
    "log": lambda x: mp.log(x) if x > 0 else None,
    "log2": lambda x: mp.log(x, 2) if x > 0 else None,
    "log10": lambda x: mp.log10(x) if x > 0 else None,
    "log1p": lambda x: mp.log1p(x) if x > -1 else None,
    "sqrt": lambda x: mp.sqrt(x) if x >= 0 else None,
    "rsqrt": lambda x: 1 / mp.sqrt(x) if x > 0 else None,
    "reciprocal": lambda x: 1 / x if x else None,
    "square": lambda x: x * x, "sin": mp.sin, "cos": mp.cos, "tan": mp.tan,
    "asin": _inside(mp.asin, -1, 1), "acos": _inside(mp.acos, -1, 1), "atan": mp.atan,
    "sinh": mp.sinh, "cosh": mp.cosh, "tanh": mp.tanh, "asinh": mp.asinh,
    "acosh": lambda x: mp.acosh(x) if x >= 1 else None,
    "atanh": lambda x: mp.atanh(x) if -1 < x < 1 else None,
    "erf": mp.erf, "erfc": mp.erfc, "erfinv": _erfinv,
    "sigmoid": lambda x: 1 / (1 + mp.exp(-x)), "expit": lambda x: 1 / (1 + mp.exp(-x)),
    "logit": _logit, "deg2rad": lambda x: x * mp.pi / 180, "rad2deg": lambda x: x * 180 / mp.pi,
    "gelu": lambda x: x * mp.erfc(-x / mp.sqrt(2)) / 2,
    "silu": lambda x: x / (1 + mp.exp(-x)), "softplus": _softplus,
    "logsigmoid": lambda x: -_logaddexp(mp.mpf(0), -x),
    "mish": lambda x: x * mp.tanh(mp.log1p(mp.exp(x))),
    "softsign": lambda x: x / (1 + abs(x)), "tanhshrink": lambda x: x - mp.tanh(x),
    "elu": _elu(1.0), "celu": _elu(1.0), "selu": _elu(*SELU),
    "hardsigmoid": lambda x: min(max(x + 3, 0), 6) / 6,
    "hardswish": lambda x: x * min(max(x + 3, 0), 6) / 6,
    "leaky_relu": lambda x: x if x > 0 else x * mp.mpf(0.01),
}  # fmt: skip
ONE_EXACT = (
    "abs",
    "ceil",
    "floor",
    "frac",
    "neg",
    "positive",
    "round",
    "sign",
    "trunc",
    "nan_to_num",
    "relu",
    "relu6",
    "hardtanh",
    "hardshrink",
    "softshrink",
    "isfinite",
    "isinf",
    "isnan",
    "signbit",
    "logical_not",
)
TWO = {
    "pow": _power,
    "atan2": _atan2,
    "hypot": lambda a, b: mp.sqrt(a * a + b * b),
    "logaddexp": _logaddexp,
}
TWO_EXACT = (
    "add",
    "sub",
    "mul",
    "div",
    "floor_divide",
    "fmod",
    "remainder",
    "fmax",
    "fmin",
    "maximum",
    "minimum",
    "copysign",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "isclose",
    "logical_and",
    "logical_or",
    "logical_xor",
)
LOOSE = {"gelu", "tanhshrink", "logit", "logaddexp", "sigmoid", "expit", "silu", "mish"}
NUMPY = {"fmod": np.fmod, "remainder": _remainder, "floor_divide": _floor_divide}
ROWS = [
    *(replace(unary(name, exact), loose=name in LOOSE) for name, exact in ONE.items()),
    *(unary(name) for name in ONE_EXACT),
    replace(unary("gelu", _gelu_tanh, approximate="tanh"), loose=True),
    unary("elu", _elu(0.5), alpha=0.5),
    unary("celu", _elu(2.0, 1.0, 2.0), alpha=2.0),
    unary("nan_to_num", nan=1.0, posinf=2.0, neginf=-3.0),
    unary("threshold", threshold=0.1, value=20.0),
    unary("clamp", min=-0.5, max=2.0),
    unary("clamp", min=math.nan),
    unary("clamp", max=math.nan),
    unary("clamp", min=2.0, max=-1.0),
    *(replace(binary(name, exact), loose=name in LOOSE) for name, exact in TWO.items()),
    replace(binary("float_power", _power), dtypes=("float64",)),
    *(replace(binary(name), numpy=NUMPY.get(name)) for name in TWO_EXACT),
    replace(binary("div", rounding_mode="floor"), numpy=_floor_divide),
    replace(binary("div", rounding_mode="trunc"), numpy=_truncated),
    binary("isclose", equal_nan=True),
    Row("clamp_min", lambda m, x: m.clamp_min(x, 0.5), None, covers="clamp_min"),
    Row("clamp_max", lambda m, x: m.clamp_max(x, 0.5), None, covers="clamp_max"),
    Row("rsub", lambda m, x, y: m.rsub(x, y), None, 2),
    Row("clamp by tensors", lambda m, x, a, b: m.clamp(x, a, b), None, 3, covers="clamp"),
    Row("where", lambda m, x, a, b: m.where(x > 0, a, b), None, 3),
    Row("%", lambda m, a, b: a % b, None, 2, "remainder", _remainder),
    Row("//", lambda m, a, b: a // b, None, 2, "floor_divide", _floor_divide),
]
# Names of another row, of whole Tensors, of integers (test_elementwise), or sums of products.
OTHER = {
    "absolute": "abs", "arccos": "acos", "arccosh": "acosh", "arcsin": "asin", "arcsinh": "asinh",
    "arctan": "atan", "arctan2": "atan2", "arctanh": "atanh", "fix": "trunc", "negative": "neg",
    "clip": "clamp", "divide": "div", "true_divide": "div", "multiply": "mul", "subtract": "sub",
    "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne",
    "allclose": "isclose", "equal": "eq", "glu": "sigmoid", "prelu": "leaky_relu",
    "addcdiv": "add", "addcmul": "add", "lerp": "add", "bitwise_and": "integers",
    "bitwise_not": "integers", "bitwise_or": "integers", "bitwise_xor": "integers",
    "bitwise_left_shift": "integers", "bitwise_right_shift": "integers",
}  # fmt: skip


def missing() -> set[str]:
    """The elementwise functions tilegrad exports that no row covers."""
    homes = {f"tilegrad.tensor.{name}" for name in MODULES}
    found = {name for name in dir(tg) if getattr(getattr(tg, name), "__module__", "") in homes}
    return found - {row.covers or row.name for row in ROWS} - set(OTHER)


# ---- samples ----------------------------------------------------------------------------------

SPECIAL = (
    0.0,
    1.0,
    0.5,
    2.0,
    3.0,
    1.5,
    2.5,
    10.0,
    0.1,
    1 / 3,
    6.0,
    20.0,
    88.0,
    88.5,
    89.0,
    89.5,
    103.5,
    104.5,
    127.5,
    149.0,
    709.5,
    710.0,
    745.0,
    1e4,
    1e6,
    2097152.0,
    1e9,
    1e15,
    1e22,
    1e30,
    1e38,
    1e300,
    math.pi,
    math.pi / 2,
    math.pi / 4,
    3 * math.pi,
    1e-3,
    1e-5,
    1e-8,
    1e-20,
    1e-38,
    1e-40,
    1e-310,
    math.inf,
)


def special(dtype: str) -> Array:
    """Values at which something happens, with both signs, and one nan."""
    digits, least, most = DIGITS[dtype]
    ends = [
        2.0**least,
        2.0 ** (least + digits),
        2.0 ** (least + digits - 1),
        2.0 ** (most - 1) * (2 - 2.0 ** (1 - digits)),
        2.0 ** (most - 1),
        2.0**digits,
        2.0 ** (digits - 1) + 0.5,
        2.0 ** (digits - 1) + 1,
    ]
    near = [b + s * 2.0 ** (-digits + j) for b in (1.0, 2.0) for s in (1, -1) for j in (0, 1)]
    found = np.array([*SPECIAL, *ends, *near])
    return narrow(np.concatenate([found, -found, [math.nan]]), dtype)


def narrow(values: Array, dtype: str) -> Array:
    """Values of a dtype, kept as float64."""
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    with np.errstate(all="ignore"):
        return values.astype(kind).astype(np.float64)


def patterns(dtype: str, random: np.random.Generator, count: int) -> Array:
    """Random bits."""
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    size = np.dtype(kind).itemsize
    bits = random.integers(0, 1 << 8 * size, count, dtype=f"u{size}")
    found = bits.view(kind).astype(np.float64)
    return np.where(np.isnan(found), np.nan, found)  # none that signals


def sample(dtype: str, count: int, operands: int, few: bool = False, seed: int = 0) -> list[Array]:
    """Operands: special values (all pairs of them, or of a few), then `count` of each kind."""
    random = np.random.default_rng([seed, operands])
    digits, least, most = DIGITS[dtype]
    chosen = special(dtype)
    if few and operands > 1:
        chosen = np.concatenate([random.choice(chosen, 24), [0.0, -0.0, 1.0, math.inf, math.nan]])
    if operands == 1:
        turns = np.rint(np.exp2(random.uniform(0, 50, count))) * (math.pi / 2)
        near = random.choice([-1.0, 1.0], count) * (1 - np.exp2(random.uniform(-digits, 0, count)))
        edge = (
            random.uniform(0.97, 1.01, count)
            * math.log(2)
            * random.choice([most, least, -least], count)
        )
        kinds = [
            patterns(dtype, random, 2 * count),
            random.uniform(-1, 1, count),
            random.uniform(-10, 10, count),
            random.uniform(-120, 120, count),
            turns,
            near,
            1 + np.exp2(random.uniform(-digits, 3, count)),
            edge,
            edge / math.log(2),
        ]
        return [narrow(np.concatenate([chosen, *kinds]), dtype)]
    if operands == 3:
        chosen = random.choice(chosen, 9)
    grids = [g.ravel() for g in np.meshgrid(*[chosen] * operands)]
    parts = [grids]
    parts.append([patterns(dtype, random, count) for _ in range(operands)])
    parts.append([random.uniform(-10, 10, count) for _ in range(operands)])
    parts.append([np.rint(random.uniform(-30, 30, count)) for _ in range(operands)])
    first = patterns(dtype, random, count)
    scale = [np.exp2(random.uniform(-20, 20, count)) for _ in range(operands - 1)]
    parts.append([first, *(first * s for s in scale)])
    parts.append(
        [
            1 + np.exp2(random.uniform(-12, 1, count)),
            *(np.exp2(random.uniform(0, 10, count)) for _ in range(operands - 1)),
        ]
    )
    with np.errstate(all="ignore"):
        return [narrow(np.concatenate([p[i] for p in parts]), dtype) for i in range(operands)]


# ---- running and measuring --------------------------------------------------------------------


def run(row: Row, library: Any, dtype: str, inputs: list[Array]) -> Array:
    """The results as float64 (as they are, for bools)."""
    kind = DTYPES[dtype]
    tensors = [torch.from_numpy(x).to(kind) for x in inputs]
    if library is torch and row.numpy is not None:
        kind = np.float64 if dtype == "float64" else np.float32
        with np.errstate(all="ignore"):
            return narrow(row.numpy(*[x.astype(kind) for x in inputs]).astype(np.float64), dtype)
    if library is tg:
        result = row.call(tg, *[tg.from_torch(t) for t in tensors])
        found = result.numpy()
        return found if found.dtype.kind == "b" else found.astype(np.float64)
    result = row.call(torch, *tensors)
    return result.numpy() if result.dtype is torch.bool else result.double().numpy()


def exact_values(row: Row, inputs: list[Array]) -> list[Any]:
    """What mpmath says, and None where there is no finite answer."""
    found: list[Any] = []
    assert row.exact is not None
    for values in zip(*inputs):
        if not all(math.isfinite(v) for v in values):
            found.append(None)
            continue
        try:
            value = row.exact(*[mp.mpf(float(v)) for v in values])
            found.append(None if isinstance(value, mp.mpc) else value)
        except (ValueError, ZeroDivisionError, OverflowError):
            found.append(None)
    return found


def errors(got: Array, exact: list[Any], dtype: str) -> Array:
    """Errors in units of the last place; nan where there is no exact value."""
    digits, least, most = DIGITS[dtype]
    found = np.full(len(exact), np.nan)
    top = mp.ldexp(1, most)
    for i, (g, e) in enumerate(zip(got.tolist(), exact)):
        if e is None:
            continue
        place = mp.mag(e) - digits if e else least
        place = min(max(int(place), least), most - digits)
        if math.isnan(g):
            found[i] = math.inf
            continue
        value = mp.mpf(g) if math.isfinite(g) else math.copysign(1, g) * top
        e = max(min(e, top), -top)
        found[i] = float(mp.ldexp(value - e, -place)) if value != e else 0.0
    return np.abs(found)


def unlike(got: Array, theirs: Array, exact: list[Any] | None) -> Array:
    """Where nan, a value that has no exact one beside it, or the sign of zero is not torch's."""
    if got.dtype.kind == "b":
        return got != theirs
    both = np.isnan(got) == np.isnan(theirs)
    zero = (got == 0) & (theirs == 0) & (np.signbit(got) != np.signbit(theirs))
    same = (got == theirs) | (np.isnan(got) & np.isnan(theirs))
    open_ = np.ones(len(got), bool) if exact is None else np.array([e is None for e in exact])
    return ~both | zero | (open_ & ~same)


@dataclass(frozen=True)
class Found:
    """What a sample of a row showed: the largest errors, and the points that are not as they must
    be, at most as far off as torch there (anywhere, for a loose row) or within the bound."""

    points: int
    error: float
    torch: float
    place: tuple[float, ...]  # where our error is largest
    wrong: list[str]


BOUND = 2.0  # units of the last place


SMALLEST_NORMAL = 2.0**-126


def measure(
    row: Row, dtype: str, count: int, few: bool = False, seed: int = 0, ours: Any = None
) -> Found:
    """Run a row on a sample and judge it; `ours` computes it in another way than a Tensor does."""
    inputs = sample(dtype, count, row.count, few, seed)
    theirs = run(row, torch, dtype, inputs)
    got = run(row, tg, dtype, inputs) if ours is None else ours(row, dtype, inputs)
    any_zero = (got == 0) & (theirs == 0) & (not row.zeros or dtype in ("bfloat16", "float16"))
    if row.exact is None:
        bad = unlike(got, theirs, None) & ~any_zero
        mine, peer, exact = np.zeros(1), np.zeros(1), None
    else:
        exact = exact_values(row, inputs)
        mine, peer = errors(got, exact, dtype), errors(theirs, exact, dtype)
        allowed = 2 * np.nanmax(peer) if row.loose else np.nan_to_num(peer)
        far = mine > np.maximum(BOUND, allowed)
        strange = unlike(got, theirs, exact) & ~any_zero
        if any(e is not None for e in exact):  # torch itself may be nan where a value is known
            strange &= ~(np.isnan(theirs) & (mine <= BOUND))
        if (strange & np.isnan(theirs)).any():  # or where its float64 has a value: gelu(inf)
            strange &= ~(np.isnan(theirs) & (got == run(row, torch, "float64", inputs)))
        bad = far | strange
    if dtype == "bfloat16":  # x86's conversion to it (AVX512-BF16) makes zeros of subnormal numbers
        # of float32, of which some would be rounded to the smallest normal one
        flushed = (got == 0) & (np.abs(theirs) <= SMALLEST_NORMAL)
        bad &= ~flushed
        mine = np.where(flushed, 0.0, mine) if mine.shape == got.shape else mine
    worst = int(np.nanargmax(mine))
    wrong = []
    for i in np.flatnonzero(bad)[:5]:
        known = "" if exact is None or exact[i] is None else f", exactly {mp.nstr(exact[i], 17)}"
        at = ", ".join(repr(float(x[i])) for x in inputs)
        wrong.append(f"{row.name}({at}) {dtype}: {got[i]!r}, torch {theirs[i]!r}{known}")
    place = tuple(float(x[worst]) for x in inputs) if row.exact is not None else ()
    return Found(len(got), float(mine[worst]), float(np.nanmax(peer)), place, wrong)

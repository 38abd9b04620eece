"""Random Tensors: counter-based, reproducible, and the same in any layout.

A `Generator` holds a key and counts draws; the bits of a draw are a hash of (key, number of
the draw, element). Both numbers are inputs at run time: nothing is compiled again from draw to
draw, and a jitted function draws anew at each call. Invariant: after `manual_seed(s)` the same
calls give the same bits, eager or jitted, on any device. The file is long because it has one
short function for each distribution, its checks included.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core import dtype as dtypes
from ..core.dtype import DType, dtype_of
from ..core.errors import DTypeError, ShapeError, UserError
from ..core.lock import new_lock
from ..graph import build, ops
from ..graph.build import Shape
from ..ir.node import Node
from ..ir.requirement import require
from ..ir.whole import whole, wholes
from ..runtime.buffer import HOST
from .convert import place
from .placement import device_name, elsewhere
from .tensor import Tensor, from_array, lift, method, mode, node_of, wrap

WORD = 1 << 32
GOLDEN = 0x9E3779B9


class Generator:
    """A stream of random numbers: a 32-bit key and the number of draws so far."""

    __slots__ = ("_lock", "key", "offset", "seed")

    def __init__(self, seed: int | None = None) -> None:
        self._lock = new_lock()
        self.manual_seed(int.from_bytes(os.urandom(7), "little") if seed is None else seed)

    def manual_seed(self, seed: int) -> Generator:
        """Start again from a seed."""
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
            raise DTypeError(
                "a seed is an int", op="manual_seed", expected="int", got=type(seed).__name__
            )
        with self._lock:
            self.seed, self.key, self.offset = int(seed), _mixed(int(seed)), 0
        return self

    def get_state(self) -> tuple[int, int, int]:
        """What `set_state` needs to continue from here."""
        with self._lock:
            return (self.seed, self.key, self.offset)

    def set_state(self, state: Sequence[int]) -> None:
        """Continue from a state."""
        if len(state) != 3:
            raise ShapeError("not a state", op="set_state", expected="3 ints", got=len(state))
        with self._lock:
            self.seed, self.key, self.offset = (int(s) for s in state)

    def reserve(self, draws: int) -> tuple[int, int]:
        """Key and first offset of the next `draws` draws, which are then used up."""
        with self._lock:
            if self.offset + draws > WORD:  # offsets ran out: go on under another key
                self.key, self.offset = _mixed(self.key + 1), 0
            first = self.offset
            self.offset += draws
            return self.key, first


def _mixed(seed: int) -> int:
    """32 well-spread bits of an int of any size."""
    state = seed % (1 << 64)
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 + 0x9E3779B97F4A7C15) % (1 << 64)
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % (1 << 64)
    return (state ^ (state >> 31)) % WORD


_default: Generator | None = None


def default_generator() -> Generator:
    """The Generator used where none is given; seeded by the system until `manual_seed`."""
    global _default
    if _default is None:
        _default = Generator()
    return _default


def manual_seed(seed: int) -> Generator:
    """Seed the default Generator."""
    return default_generator().manual_seed(seed)


def get_rng_state() -> tuple[int, int, int]:
    """The state of the default Generator."""
    return default_generator().get_state()


def set_rng_state(state: Sequence[int]) -> None:
    """Set the state of the default Generator."""
    default_generator().set_state(state)


def next_key_and_offset(generator: Generator | None = None) -> tuple[Node, Node]:
    """Key and offset of the next draw, as Nodes with values (or inputs of the trace)."""
    generator = default_generator() if generator is None else generator
    if mode.trace is not None:
        key, offset = mode.trace.random(generator)
    else:
        first, second = generator.reserve(1)
        key = from_array(np.array(first, np.uint32))
        offset = from_array(np.array(second, np.uint32))
    return (key if mode.salt is None else build.binary(ops.bit_xor, key, mode.salt)), offset


def step_salt(step: Node) -> Node:
    """What makes the random numbers of one step of a loop differ from those of another."""
    step = build.add(build.cast(step, dtypes.uint32), build.constant(1, dtypes.uint32))
    salt = build.multiply(step, build.constant(GOLDEN, dtypes.uint32))
    return salt if mode.salt is None else build.add(salt, mode.salt)


# ---- bits to numbers -------------------------------------------------------------------------


def bits(shape: Shape, generator: Generator | None = None) -> Node:
    """32 random bits an element."""
    key, offset = next_key_and_offset(generator)
    return ops.random_bits(key, offset, shape=shape)


def unit(shape: Shape, dtype: DType, generator: Generator | None = None) -> Node:
    """Uniform in [0, 1): 24 random bits, 53 for float64."""
    word = bits(shape, generator)
    if dtype is dtypes.float64:
        high = build.cast(_shifted(word, 5), dtype)
        low = build.cast(_shifted(bits(shape, generator), 6), dtype)
        return build.multiply(build.add(build.multiply(high, float(1 << 26)), low), 2.0**-53)
    keep = {dtypes.bfloat16: 8, dtypes.float16: 11}.get(dtype, 24)  # no rounding up to 1
    whole = build.cast(build.cast(_shifted(word, 32 - keep), dtypes.int32), dtypes.float32)
    return build.cast(build.multiply(whole, 2.0**-keep), dtype)


def _shifted(word: Node, amount: int) -> Node:
    return build.binary(ops.shift_right, word, build.constant(amount, dtypes.uint32))


def normal_node(shape: Shape, dtype: DType, generator: Generator | None = None) -> Node:
    """Standard normal, by Box and Muller from two draws."""
    work = dtypes.float64 if dtype is dtypes.float64 else dtypes.float32
    first = build.subtract(build.constant(1.0, work), unit(shape, work, generator))  # in (0, 1]
    second = build.multiply(unit(shape, work, generator), 2.0 * math.pi)
    radius = ops.square_root(build.multiply(ops.log(first), -2.0))
    return build.cast(build.multiply(radius, ops.cos(second)), dtype)


def _in_bounds(op: str, right: bool, expected: str, got: Any) -> None:
    """A number that a distribution has."""
    if not right:
        raise UserError("no distribution is such", op=op, expected=expected, got=got)


def _shape(op: str, sizes: tuple[Any, ...], size: Any = None) -> Shape:
    if size is not None:
        sizes = (size,)
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = tuple(sizes[0])
    found = wholes(sizes, op, "a size")
    if any([isinstance(s, int) and s < 0 for s in found]):
        raise ShapeError("a size is negative", op=op, expected="sizes >= 0", got=found)
    return found


def _float(op: str, dtype: Any) -> DType:
    found = dtypes.float32 if dtype is None else dtype_of(dtype)
    if not found.is_float:
        raise DTypeError("needs a float dtype", op=op, expected="a float", got=found)
    return found


def _leaf(node: Node, requires_grad: bool = False, device: Any = None) -> Tensor:
    if device is not None and (elsewhere() or device_name(device) != HOST):
        node = place(node, device, "random")
    tensor = wrap(node)
    if requires_grad:
        tensor.requires_grad = True
    return tensor


# ---- creation --------------------------------------------------------------------------------


def rand(
    *size: Any,
    dtype: Any = None,
    generator: Generator | None = None,
    requires_grad: bool = False,
    device: Any = None,
) -> Tensor:
    """Uniform in [0, 1)."""
    node = unit(_shape("rand", size), _float("rand", dtype), generator)
    return _leaf(node, requires_grad, device)


def randn(
    *size: Any,
    dtype: Any = None,
    generator: Generator | None = None,
    requires_grad: bool = False,
    device: Any = None,
) -> Tensor:
    """Standard normal."""
    node = normal_node(_shape("randn", size), _float("randn", dtype), generator)
    return _leaf(node, requires_grad, device)


def randint(
    low: int,
    high: Any = None,
    size: Any = None,
    dtype: Any = None,
    generator: Generator | None = None,
    device: Any = None,
) -> Tensor:
    """Integers in low..high-1; `randint(high, size)` starts at 0."""
    if isinstance(high, (tuple, list)) or (size is None and high is not None):
        low, high, size = 0, low, high
    if high is None or size is None:
        raise DTypeError("needs high and size", op="randint", expected="randint(low, high, size)")
    span = int(high) - int(low)
    if span <= 0:
        raise ShapeError("the range is empty", op="randint", expected="low < high", got=(low, high))
    shape = _shape("randint", (size,))
    word = build.cast(bits(shape, generator), dtypes.uint64)
    thirty_two = build.constant(32, dtypes.uint64)
    if span <= WORD:  # the high word of a product: no modulo, almost no bias
        scaled = build.multiply(word, build.constant(span, dtypes.uint64))
        found = build.binary(ops.shift_right, scaled, thirty_two)
    else:
        more = build.cast(bits(shape, generator), dtypes.uint64)
        joined = build.binary(ops.bit_or, build.binary(ops.shift_left, word, thirty_two), more)
        found = build.binary(ops.remainder, joined, build.constant(span, dtypes.uint64))
    whole = build.add(build.cast(found, dtypes.int64), build.constant(int(low), dtypes.int64))
    found = build.cast(whole, dtypes.int64 if dtype is None else dtype_of(dtype))
    return _leaf(found, device=device)


def uniform(
    low: Any = 0.0,
    high: Any = 1.0,
    size: Any = (),
    dtype: Any = None,
    generator: Generator | None = None,
) -> Tensor:
    """Uniform in [low, high)."""
    base = rand(_shape("uniform", (size,)), dtype=dtype, generator=generator)
    return wrap(_affine(base.node, _minus(high, low), low))


def normal(
    mean: Any = 0.0,
    std: Any = 1.0,
    size: Any = None,
    dtype: Any = None,
    generator: Generator | None = None,
) -> Tensor:
    """Normal with mean and standard deviation, numbers or Tensors."""
    scale = std
    if isinstance(std, Tensor):
        right = build.less_equal(0.0, std.node)
        one, wanted = build.constant(1, dtypes.int32), "a std is negative or nan"
        one = build.where_right(right, one, 2, "normal", wanted)
        scale = build.multiply(node_of(std), build.cast(one, std.dtype))
    else:
        _in_bounds("normal", float(std) >= 0, "std >= 0", std)
    if size is None:
        given = [v.shape for v in (mean, std) if isinstance(v, Tensor)]
        size = build.broadcast_shapes("normal", *given)
    base = randn(_shape("normal", (size,)), dtype=dtype, generator=generator)
    return wrap(_affine(base.node, scale, mean), mean, std)


def _value(value: Any) -> Any:
    return node_of(value) if isinstance(value, Tensor) else float(value)


def _minus(a: Any, b: Any) -> Any:
    a, b = _value(a), _value(b)
    return a - b if isinstance(a, float) and isinstance(b, float) else build.subtract(a, b)


def _affine(x: Node, scale: Any, shift: Any) -> Node:
    return build.add(
        build.multiply(x, scale if isinstance(scale, Node) else _value(scale)), _value(shift)
    )


def exponential(
    rate: float = 1.0, size: Any = (), dtype: Any = None, generator: Generator | None = None
) -> Tensor:
    """Exponential with a rate."""
    _in_bounds("exponential", rate > 0, "rate > 0", rate)
    return wrap(
        _exponential(_shape("exponential", (size,)), _float("exponential", dtype), rate, generator)
    )


def _exponential(shape: Shape, dtype: DType, rate: Any, generator: Generator | None) -> Node:
    work = dtypes.float64 if dtype is dtypes.float64 else dtypes.float32
    drawn = ops.negative(ops.log1p(ops.negative(unit(shape, work, generator))))
    return build.cast(build.divide(drawn, float(rate)), dtype)


def truncated_normal(
    mean: float = 0.0,
    std: float = 1.0,
    low: float = -2.0,
    high: float = 2.0,
    size: Any = (),
    dtype: Any = None,
    generator: Generator | None = None,
) -> Tensor:
    """Normal cut to [low, high], by inverting the distribution function."""
    found = _float("truncated_normal", dtype)
    work = dtypes.float64 if found is dtypes.float64 else dtypes.float32
    if not low < high:
        raise ShapeError(
            "the range is empty", op="truncated_normal", expected="low < high", got=(low, high)
        )
    first, last = (math.erf((x - mean) / (std * math.sqrt(2.0))) for x in (low, high))
    drawn = unit(_shape("truncated_normal", (size,)), work, generator)
    inside = build.add(build.multiply(drawn, last - first), first)
    limit = 1.0 - 2.0**-23
    inside = build.minimum(build.maximum(inside, -limit), limit)
    node = _affine(ops.erf_inverse(inside), std * math.sqrt(2.0), mean)
    node = build.minimum(build.maximum(node, float(low)), float(high))
    return wrap(build.cast(node, found))


@method("bernoulli")
def bernoulli(probability: Tensor, generator: Generator | None = None) -> Tensor:
    """1 with the probability given for each element, else 0."""
    if not probability.dtype.is_float:
        raise DTypeError("probabilities are floats", op="bernoulli", got=probability.dtype)
    drawn, given = unit(probability.shape, dtypes.float32, generator), probability.node
    right = build.binary(ops.bit_and, build.less_equal(0.0, given), build.less_equal(given, 1.0))
    one = build.cast(build.less(drawn, given), dtypes.int32)
    wanted = "a probability is not between 0 and 1"
    return wrap(build.cast(build.where_right(right, one, 2, "bernoulli", wanted), given.dtype))


@method("dropout")
def dropout(
    x: Tensor, p: float = 0.5, training: bool = True, generator: Generator | None = None
) -> Tensor:
    """Zero elements with probability p and scale the rest by 1 / (1 - p)."""
    if not 0.0 <= p <= 1.0:
        raise ShapeError("not a probability", op="dropout", expected="0 <= p <= 1", got=p)
    if not training or p == 0.0:
        return x
    keep = build.less(build.full((), p, dtypes.float32), unit(x.shape, dtypes.float32, generator))
    if p == 1.0:
        return wrap(build.multiply(node_of(x), 0.0), x)
    scaled = build.multiply(node_of(x), 1.0 / (1.0 - p))
    return wrap(build.where(keep, scaled, build.like(scaled, 0.0)), x)


def randperm(
    n: int, dtype: Any = None, generator: Generator | None = None, device: Any = None
) -> Tensor:
    """A random order of 0..n-1."""
    drawn = bits(_shape("randperm", (n,)), generator)
    order = ops.get(ops.sort(drawn, axis=0, descending=False), index=1)
    found = build.cast(order, dtypes.int64 if dtype is None else dtype_of(dtype))
    return _leaf(found, device=device)


def _by_largest(given: Node) -> tuple[Node, Node]:
    """Weights divided by the largest of their row, and whether those of a row are right."""
    axis = len(given.shape) - 1
    fit = build.binary(ops.bit_and, build.less_equal(0.0, given), build.less(given, math.inf))
    fits = build.sum_(build.cast(fit, dtypes.int64), axis, keep=True)
    all_fit = build.equal(fits, build.size_value(given.shape[axis]))
    wide = given if given.dtype is dtypes.float64 else build.cast(given, dtypes.float32)
    top = build.max_(wide, axis, keep=True)
    right = build.binary(ops.bit_and, all_fit, build.less(0.0, top))
    return build.cast(build.divide(wide, top), dtypes.float32), right


@method("multinomial")
def multinomial(
    weights: Tensor, num_samples: int, replacement: bool = False, generator: Generator | None = None
) -> Tensor:
    """Indices drawn in proportion to weights along the last axis."""
    if len(weights.shape) not in (1, 2) or not weights.dtype.is_float:
        raise ShapeError(
            "needs float weights with 1 or 2 axes", op="multinomial", got=str(weights.node.type)
        )
    num_samples = whole(num_samples, "multinomial", "num_samples")
    _in_bounds("multinomial", num_samples > 0, "one or more samples", num_samples)
    count = weights.shape[-1]
    lead = weights.shape[:-1]
    node, right = _by_largest(weights.node)
    total = ops.cumulative(node, axis=len(lead), kind="sum")
    last = build.slice_axis(total, len(lead), build.offset_size(count, -1), count)

    def checked(index: Node) -> Tensor:
        wanted = "weights are not finite, negative, or all 0"
        return wrap(build.where_right(right, index, count, "multinomial", wanted))

    if not replacement:
        require(
            count - num_samples,
            ShapeError,
            "cannot draw more than there are without replacement",
            op="multinomial",
            expected="at most {count}",
            got="{drawn}",
            count=count,
            drawn=num_samples,
        )
        # the first arrivals of exponential clocks that tick at these rates
        noise = _exponential(node.shape, dtypes.float32, 1.0, generator)
        tiny = build.full((), 1e-30, dtypes.float32)
        score = build.divide(node, build.maximum(noise, tiny))
        order = ops.get(ops.sort(score, axis=len(lead), descending=True), index=1)
        return checked(build.slice_axis(order, len(lead), 0, num_samples))
    point = build.multiply(unit((*lead, num_samples), dtypes.float32, generator), last)
    passed = build.less_equal(build.unsqueeze(total, len(lead)), build.unsqueeze(point, -1))
    index = build.sum_(build.cast(passed, dtypes.int64), len(lead) + 1)
    top = build.subtract(build.size_value(count), build.constant(1, dtypes.int64))
    return checked(build.minimum(index, top))


def rand_like(x: Tensor, dtype: Any = None, generator: Generator | None = None) -> Tensor:
    """Uniform in [0, 1), shaped as x."""
    return rand(x.shape, dtype=dtype or x.dtype, generator=generator, device=_device(x))


def randn_like(x: Tensor, dtype: Any = None, generator: Generator | None = None) -> Tensor:
    """Standard normal, shaped as x."""
    return randn(x.shape, dtype=dtype or x.dtype, generator=generator, device=_device(x))


def randint_like(
    x: Tensor,
    low: int,
    high: int | None = None,
    dtype: Any = None,
    generator: Generator | None = None,
) -> Tensor:
    """Integers in low..high-1, shaped as x."""
    low, high = (0, low) if high is None else (low, high)
    return randint(low, high, x.shape, dtype or x.dtype, generator, _device(x))


def _device(x: Tensor) -> str | None:
    return x.device if elsewhere() else None


# ---- in place --------------------------------------------------------------------------------


@method("uniform_")
def uniform_(
    self: Tensor, low: float = 0.0, high: float = 1.0, generator: Generator | None = None
) -> Tensor:
    """Fill with uniform numbers in [low, high)."""
    _in_bounds("uniform_", low <= high, "low <= high", (low, high))
    return _fill(self, uniform(low, high, self.shape, self.dtype, generator), "uniform_")


@method("normal_")
def normal_(
    self: Tensor, mean: float = 0.0, std: float = 1.0, generator: Generator | None = None
) -> Tensor:
    """Fill with normal numbers."""
    return _fill(self, normal(mean, std, self.shape, self.dtype, generator), "normal_")


@method("exponential_")
def exponential_(self: Tensor, rate: float = 1.0, generator: Generator | None = None) -> Tensor:
    """Fill with exponential numbers."""
    return _fill(self, exponential(rate, self.shape, self.dtype, generator), "exponential_")


@method("bernoulli_")
def bernoulli_(self: Tensor, p: float = 0.5, generator: Generator | None = None) -> Tensor:
    """Fill with ones with probability p, else zeros."""
    _in_bounds("bernoulli_", 0.0 <= p <= 1.0, "0 <= p <= 1", p)
    drawn = build.less(unit(self.shape, dtypes.float32, generator), float(p))
    return _fill(self, wrap(build.cast(drawn, self.dtype)), "bernoulli_")


def _fill(tensor: Tensor, value: Tensor, op: str) -> Tensor:
    return tensor.rebind(value.node, op=op)


def gumbel_softmax(
    logits: Any, tau: float = 1.0, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> Tensor:
    """A draw of a class as a softmax of noisy logits; `hard`: one-hot, with its derivative."""
    from .reduce import argmax, softmax

    x = lift(logits)
    noise = exponential(1.0, x.shape, x.dtype).log()
    soft = softmax((x - noise) / tau, dim)
    if not hard:
        return soft
    axis = build.axis_of(x.node, dim, "gumbel_softmax")
    place = wrap(build.iota_along(x.shape, axis))
    picked = (place == argmax(soft, axis, keepdim=True)).to(x.dtype)
    return picked - soft.detach() + soft


__all__ = [
    "Generator",
    "bernoulli",
    "bits",
    "default_generator",
    "dropout",
    "exponential",
    "get_rng_state",
    "gumbel_softmax",
    "manual_seed",
    "multinomial",
    "next_key_and_offset",
    "normal",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "set_rng_state",
    "step_salt",
    "truncated_normal",
    "uniform",
]

"""What a chip makes of a model: rooflines of its products, tokens a second, cost of a token.

A product takes the longer of its operations at the peak and its bytes at the bandwidth; what lies
between products takes its bytes. A chip whose product and read rates were measured is judged by
those, another by a share of its peaks that is said. A model that does not fit one chip is cut over
several: each matrix in parts, layers in stages, requests in groups (`parallelism.py`). Invariant:
every assumption is a field of Assumptions or a figure of the Chip; launches, waiting and queues are
not in it, so a prediction is a bound from above that good software comes near.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from ...core.errors import UserError
from ..networks import DECODERS, network
from ..workload import Work, Workload
from .figure import Chip
from .parallelism import Parallelism, bubble, linked_bytes, ways

PHASES = ("prefill", "decode", "training")
PEAK_OF = {"bf16": "bf16", "fp8": "fp8", "int8": "int8", "fp4": "fp4"}
BITS = {"bf16": 16, "fp8": 8, "int8": 8, "fp4": 4}


@dataclass(frozen=True)
class Assumptions:
    """What is assumed where nothing was measured."""

    compute: float = 0.8  # of the peak, in large products
    bandwidth: float = 0.9  # of the peak, reading
    link: float = 0.8  # of the links, in a sum over chips
    sum_seconds: float = 5e-6  # of such a sum, however few its bytes
    room: float = 0.9  # of the memory, for weights, cache and state
    training_bytes: float = 16.0  # of a parameter: weight, gradient, two moments, master copy;
    # activations are taken to be computed again
    optimizer_bytes: float = 28.0  # of a parameter that a step reads and writes
    backward: float = 2.0  # products of the backward pass, over those of the forward pass


@dataclass(frozen=True)
class Sizes:
    """What is asked of a model."""

    batch: int = 8
    tokens: int = 1024  # of a prompt
    context: int = 1024  # keys when decoding
    dtype: str = "bf16"


@dataclass(frozen=True)
class Row:
    """One product of a roofline."""

    name: str
    count: int
    flops: float
    moved: float
    seconds: float  # of all of them
    bound: str  # compute or memory


@dataclass(frozen=True)
class Prediction:
    """A phase of a model on a chip."""

    chip: str
    phase: str
    chips: int  # how many hold the model
    parallelism: Parallelism
    seconds: float  # of a step
    tokens_per_second: float  # of all chips
    bound: str
    link_seconds: float | None  # sums over chips; None: the chip's links are not known
    dollars_per_million: float | None  # tokens; None: no price is known
    joules_per_token: float | None  # at design power
    sparse: bool  # the peak is of sparse values: no dense one is published
    bounded: bool  # whether the chip's memory is known, and the model fits
    rows: tuple[Row, ...]


def rates(chip: Chip, dtype: str, assumed: Assumptions) -> tuple[float, float]:
    """(operations, bytes) a second that a chip is taken to reach."""
    if dtype not in PEAK_OF:
        raise UserError("unknown dtype", op="chip", expected=", ".join(PEAK_OF), got=dtype)
    known = [name for name in PEAK_OF if name in chip.figures]
    if dtype not in known:
        raise UserError(
            f"{chip.name} has no figure for {dtype}",
            op="chip",
            expected=", ".join(known),
            got=dtype,
            hint=f"--dtype {known[0]}" if known else None,
        )
    peak, bandwidth = chip.need(dtype), chip.need("bandwidth")
    share = assumed.compute
    measured, plain = chip.get("bf16_measured"), chip.get("bf16")
    if measured is not None and plain is not None:
        share = measured / plain  # other dtypes are taken to reach the same share
    read = chip.get("bandwidth_measured") or assumed.bandwidth * bandwidth
    return share * peak, read


def roofline(
    workload: Workload, compute: float, bandwidth: float, chips: int = 1, times: float = 1.0
) -> list[Row]:
    """The time of every product, and what bounds it."""
    rows = []
    for work in workload.works:
        seconds = {
            "compute": times * work.flops / compute / chips,
            "memory": times * work.moved / bandwidth / chips,
        }
        bound = max(seconds, key=lambda key: seconds[key])
        total = work.count * seconds[bound]
        rows.append(Row(_text(work), work.count, work.flops, work.moved, total, bound))
    return rows


def _text(work: Work) -> str:
    sizes = ((loop, size) for loop, size in work.problem.sizes.items() if size > 1)
    return f"{work.kind} " + " ".join(f"{loop}{size}" for loop, size in sizes)


@lru_cache(maxsize=32)
def _traced(model: str, phase: str, sizes: Sizes) -> Workload:
    bits = BITS[sizes.dtype]
    if model not in DECODERS:
        found = network(model, batch=sizes.batch)
    elif phase == "decode":
        found = network(model, batch=sizes.batch, tokens=1, context=sizes.context)
    else:
        every = phase == "training"
        found = network(model, batch=sizes.batch, tokens=sizes.tokens, every=every)
    return found.with_bits((bits, bits, 16)) if bits != 16 else found.with_bits(16)


def predict(
    model: str,
    chip: Chip,
    phase: str = "decode",
    sizes: Sizes = Sizes(),
    chips: int | None = None,
    assumed: Assumptions = Assumptions(),
) -> Prediction:
    """How fast a chip runs a phase of a model; `chips` are the power of two that holds it, if
    not given.

    Of all ways to share it over them the fastest is taken whose links are known. Tokens of a
    network that has none (pictures) are its inputs.
    """
    if phase not in PHASES:
        raise UserError("unknown phase", op="chip", expected=", ".join(PHASES), got=phase)
    step = _Step(model, chip, phase, sizes, assumed)
    held = step.held(1)
    memory = chip.get("memory")
    room = math.inf if memory is None else assumed.room * memory
    least = 1 << (max(1, math.ceil(held / room)) - 1).bit_length()  # shared evenly
    count = least if chips is None else chips
    if held > room * count:
        raise UserError(
            f"{model} does not fit {count} of {chip.name}",
            op="chip",
            expected=f"at most {room * count / 1e9:.4g} GB",
            got=f"{held / 1e9:.4g} GB for {phase}",
            hint=f"{least} chips would fit",
        )
    found = [
        step.shared(how)
        for how in ways(model, phase, count, sizes.batch)
        if step.held(how.data) <= room * how.tensor * how.pipeline
    ]
    return min(found, key=lambda p: (p.link_seconds is None, p.seconds))


class _Step:
    """One step of a phase, however it is shared."""

    def __init__(
        self, model: str, chip: Chip, phase: str, sizes: Sizes, assumed: Assumptions
    ) -> None:
        self.model, self.chip, self.phase, self.sizes, self.assumed = (
            model,
            chip,
            phase,
            sizes,
            assumed,
        )
        self.compute, self.bandwidth = rates(chip, sizes.dtype, assumed)
        self.training = phase == "training"

    def work(self, data: int) -> Workload:
        """What each of some data parts computes."""
        return _traced(self.model, self.phase, replace(self.sizes, batch=self.sizes.batch // data))

    def parameters(self) -> float:
        """Weights of the model."""
        return self.work(1).held_weights / (BITS[self.sizes.dtype] / 8)

    def held(self, data: int) -> float:
        """Bytes that a data part holds, of all its chips."""
        work = self.work(data)
        if not self.training:
            return work.held
        return work.held - work.held_weights + self.parameters() * self.assumed.training_bytes

    def shared(self, how: Parallelism) -> Prediction:
        """The step, shared so."""
        work, assumed = self.work(how.data), self.assumed
        share = how.tensor * how.pipeline
        times = 1 + assumed.backward if self.training else 1.0
        rows = roofline(work, self.compute, self.bandwidth, share, times)
        between = times * work.between / self.bandwidth / share
        longer = bubble(how, self.sizes.batch)
        update = 0.0
        if self.training:
            update = self.parameters() * assumed.optimizer_bytes / self.bandwidth / share
        linked = self._links(how, longer)
        busy = longer * (sum(row.seconds for row in rows) + between) + update
        seconds = busy + (linked or 0.0)
        parts = {"compute": 0.0, "memory": between + update, "links": linked or 0.0}
        for row in rows:
            parts[row.bound] += row.seconds
        tokens = self.sizes.batch * self._tokens()
        return self._prediction(how, seconds, tokens / seconds, linked, parts, tuple(rows))

    def _tokens(self) -> int:
        """Of one request."""
        return self.sizes.tokens if self.phase != "decode" and self.model in DECODERS else 1

    def _links(self, how: Parallelism, longer: float) -> float | None:
        """Seconds of the links."""
        if how.chips == 1 or (how.data == how.chips and not self.training):
            return 0.0
        link = self.chip.get("link")
        tokens = self.sizes.batch // how.data * self._tokens()
        carried = linked_bytes(self.model, self.phase, how, tokens, self.parameters())
        if link is None or carried is None:
            return None
        inside, gradients, sums = carried
        waits = longer * sums * self.assumed.sum_seconds
        return (longer * inside + gradients) / (self.assumed.link * link) + waits

    def _prediction(
        self,
        how: Parallelism,
        seconds: float,
        rate: float,
        linked: float | None,
        parts: dict[str, float],
        rows: tuple[Row, ...],
    ) -> Prediction:
        price, power = self.chip.get("price"), self.chip.get("power")
        return Prediction(
            chip=self.chip.name,
            phase=self.phase,
            chips=how.chips,
            parallelism=how,
            seconds=seconds,
            tokens_per_second=rate,
            bound=max(parts, key=lambda key: parts[key]),
            link_seconds=linked,
            dollars_per_million=None if price is None else 1e6 * price * how.chips / 3600 / rate,
            joules_per_token=None if power is None else power * how.chips / rate,
            sparse=self.chip.figures[self.sizes.dtype].kind == "sparse",
            bounded=self.chip.get("memory") is not None,
            rows=rows,
        )


__all__ = [
    "PHASES",
    "Assumptions",
    "Prediction",
    "Row",
    "Sizes",
    "predict",
    "rates",
    "roofline",
]

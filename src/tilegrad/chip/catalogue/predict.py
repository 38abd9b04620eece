"""What a chip makes of a model: rooflines of its products, tokens a second, cost of a token.

A product takes the longer of its operations at the peak and its bytes at the bandwidth; what lies
between products takes its bytes. A chip whose product and read rates were measured is judged by
those, another by a share of its peaks that is said. A model that does not fit one chip is cut over
several (each matrix in parts, two sums over all chips a layer). Invariant: every assumption is a
field of Assumptions or a figure of the Chip; launches, waiting and queues are not in it, so a
prediction is a bound from above that good software comes near.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ...core.errors import UserError
from ..networks import DECODERS, network
from ..workload import Work, Workload
from .figure import Chip

PHASES = ("prefill", "decode", "training")
PEAK_OF = {"bf16": "bf16", "fp8": "fp8", "int8": "int8", "fp4": "fp4"}
BITS = {"bf16": 16, "fp8": 8, "int8": 8, "fp4": 4}


@dataclass(frozen=True)
class Assumptions:
    """What is assumed where nothing was measured."""

    compute: float = 0.8  # of the peak, in large products
    bandwidth: float = 0.9  # of the peak, reading
    link: float = 0.8  # of the links, in a sum over chips
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
    seconds: float  # of a step
    tokens_per_second: float  # of all chips
    bound: str
    link_seconds: float | None  # sums over chips; None: the chip's links are not known
    dollars_per_million: float | None  # tokens; None: no price is known
    joules_per_token: float | None  # at design power
    sparse: bool  # the peak is of sparse values: no dense one is published
    rows: tuple[Row, ...]


def rates(chip: Chip, dtype: str, assumed: Assumptions) -> tuple[float, float]:
    """(operations, bytes) a second that a chip is taken to reach."""
    if dtype not in PEAK_OF:
        raise UserError("unknown dtype", op="chip", expected=", ".join(PEAK_OF), got=dtype)
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
    """How fast a chip runs a phase of a model; `chips` are as few as hold it, if not given.

    Tokens of a network that has none (pictures) are its inputs.
    """
    if phase not in PHASES:
        raise UserError("unknown phase", op="chip", expected=", ".join(PHASES), got=phase)
    compute, bandwidth = rates(chip, sizes.dtype, assumed)
    work = _traced(model, phase, sizes)
    training = phase == "training"
    parameters = work.held_weights / (BITS[sizes.dtype] / 8)
    held = work.held
    if training:
        held += parameters * assumed.training_bytes - work.held_weights
    memory = assumed.room * chip.need("memory")
    least = max(1, math.ceil(held / memory))
    if chips is not None and chips < least:
        raise UserError(
            f"{model} does not fit {chips} of {chip.name}",
            op="chip",
            expected=f"at most {memory * chips / 1e9:.4g} GB",
            got=f"{held / 1e9:.4g} GB for {phase}",
            hint=f"{least} chips would fit",
        )
    count = least if chips is None else chips
    times = 1 + assumed.backward if training else 1.0
    rows = roofline(work, compute, bandwidth, count, times)
    between = times * work.between / bandwidth / count
    if training:
        between += parameters * assumed.optimizer_bytes / bandwidth / count
    linked = _links(model, chip, phase, sizes, count, assumed, times)
    seconds = sum(row.seconds for row in rows) + between + (linked or 0.0)
    tokens = sizes.batch * (sizes.tokens if phase != "decode" and model in DECODERS else 1)
    sparse = chip.figures[sizes.dtype].kind == "sparse"
    return _prediction(chip, phase, count, seconds, tokens / seconds, linked, between, rows, sparse)


def _prediction(
    chip: Chip,
    phase: str,
    count: int,
    seconds: float,
    rate: float,
    linked: float | None,
    between: float,
    rows: list[Row],
    sparse: bool,
) -> Prediction:
    parts = {"compute": 0.0, "memory": between, "links": linked or 0.0}
    for row in rows:
        parts[row.bound] += row.seconds
    price, power = chip.get("price"), chip.get("power")
    return Prediction(
        chip=chip.name,
        phase=phase,
        chips=count,
        seconds=seconds,
        tokens_per_second=rate,
        bound=max(parts, key=lambda key: parts[key]),
        link_seconds=linked,
        dollars_per_million=None if price is None else 1e6 * price * count / 3600 / rate,
        joules_per_token=None if power is None else power * count / rate,
        sparse=sparse,
        rows=tuple(rows),
    )


def _links(
    model: str,
    chip: Chip,
    phase: str,
    sizes: Sizes,
    count: int,
    assumed: Assumptions,
    times: float,
) -> float | None:
    """Seconds of the sums over chips: two of each layer's features, in each pass."""
    if count == 1:
        return 0.0
    link = chip.get("link")
    if link is None or model not in DECODERS:
        return None
    config: Any = DECODERS[model]
    tokens = sizes.batch * (1 if phase == "decode" else sizes.tokens)
    layers, width = int(config["num_hidden_layers"]), int(config["hidden_size"])
    each = 2 * (count - 1) / count * tokens * width * 2  # bytes: scatter the sum, gather it
    passes = 2.0 if times > 1 else 1.0
    return passes * 2 * layers * each / (assumed.link * link)


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

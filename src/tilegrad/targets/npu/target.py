"""The Target of an NPU: a CPU with an array beside it, in one memory.

Vectors, caches and cores are those of this computer's CPU, which runs what the array has not; the
array is a matrix unit with queues of its own, a scratchpad and accumulators. Invariant: the whole
parameter record is in the Target, so a changed parameter is another Target.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace

from ...core.dtype import bfloat16, float8_e4m3, float16, float32, int4, int8, int32
from ...core.target import MatrixUnit, MemorySpace, Target
from ...tile.array import MIXED, SPARSE
from .parameters import Parameters

ARRAY = "array"  # the name of the unit, and of its rate
ANY_DEPTH = 1 << 30  # sums that stay in the mesh
HALVES = {"int4": int4, "fp8": float8_e4m3}  # weights, of which two are a step
ELEMENTS = {"int8": (int8, int32), "bf16": (bfloat16, float32), "fp16": (float16, float32)}


def npu_target(p: Parameters, host: Target) -> Target:
    """The facts of a chip with these parameters beside a CPU."""
    element, wide = ELEMENTS[p.element]
    deep = ANY_DEPTH if p.dataflow == "os" else p.rows
    scopes = ("accumulator", ("scratchpad", "scratchpad"))
    unit = MatrixUnit(ARRAY, p.rows, p.columns, deep, (element, element), wide, *scopes, 0)
    units, double = [unit], ANY_DEPTH if p.dataflow == "os" else 2 * p.rows
    if p.mixed:
        units.append(replace(unit, name=MIXED, k=double, inputs=(element, HALVES[p.weights])))
    if p.sparse:
        units.append(replace(unit, name=SPARSE, k=double))
    moved = p.dma_bytes * p.clock * 1e6 / p.gap
    memories = {
        **host.memories,
        "scratchpad": MemorySpace(
            p.scratchpad_bytes, p.row_elements, ("move_in",), moved, shared=True
        ),
        "accumulator": MemorySpace(p.accumulator_bytes, 4 * p.columns, ("load", "take"), 0.0, True),
    }
    return replace(
        host,
        name=f"npu-{p.name}",
        language="npu",
        memories=memories,
        matrix=tuple(units),
        flops={**host.flops, ARRAY: 2 * p.peak_macs * p.clock * 1e6},
        chip=json.dumps(p.to_table(), sort_keys=True),
    )


@functools.lru_cache(maxsize=64)
def parameters_of(chip: str) -> Parameters:
    """The parameters in a Target."""
    return Parameters.of(json.loads(chip))

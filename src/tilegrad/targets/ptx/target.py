"""The Target of a GPU here, from the attributes its driver gives.

Sizes and counts are the device's own; rates, which no driver tells, are those of the nearest
static Target (core/target.py), cut to what the memory's clock and width allow.

Invariant: a device that is one of the static machines gets that very record, so that what was
compiled for it elsewhere fits; no Target has a fact its device does not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...core.errors import UserError
from ...core.target import A100, H100, H200, Target

REACHED = 0.9  # of the memory's clock times its width, by a copy
NEAR = 0.1  # of its own size may total memory differ, for what the driver keeps


def target_of(properties: Mapping[str, Any]) -> Target:
    """The Target of a device, from attributes by the driver's names in lower case."""
    major = properties.get("compute_capability_major", 0)
    if major < 8:
        raise UserError(
            "this GPU is too old",
            expected="compute capability 8.0 or later",
            got=f"{major}.{properties.get('compute_capability_minor', 0)}",
        )
    nearest = nearest_static(properties)
    found = _measured(nearest, properties)
    return nearest if _same(nearest, found) else found


def nearest_static(properties: Mapping[str, Any]) -> Target:
    """The static Target of the same instruction set, and of about the same memory.

    Only compute capability 9.0 has warpgroup matrices; all others run what sm_80 has.
    """
    if properties["compute_capability_major"] != 9:
        return A100
    size = properties.get("total_memory", H100.memories["global"].bytes)
    return min((H100, H200), key=lambda one: abs(one.memories["global"].bytes - size))


def _measured(nearest: Target, properties: Mapping[str, Any]) -> Target:
    """The nearest Target with every size and count that the attributes give."""
    memories, limits = dict(nearest.memories), dict(nearest.limits)

    def given(attribute: str, otherwise: int) -> int:
        return int(properties.get(attribute) or otherwise)

    space = memories["global"]
    rate = space.bytes_per_second
    # kilohertz, two transfers a clock, bits: zero where the driver no longer says
    peak = 2e3 * properties.get("memory_clock_rate", 0) / 8
    peak *= properties.get("global_memory_bus_width", 0)
    rate = min(rate, REACHED * peak) if peak else rate
    memories["global"] = replace(space, bytes_per_second=rate)
    for memory, attribute in (
        ("global", "total_memory"),
        ("l2", "l2_cache_size"),
        ("shared", "max_shared_memory_per_block_optin"),
    ):
        bytes_ = given(attribute, memories[memory].bytes)
        memories[memory] = replace(memories[memory], bytes=bytes_)
    most = memories["shared"].bytes
    if "cluster" in memories:
        memories["cluster"] = replace(memories["cluster"], bytes=limits["cluster"] * most)
    limits["shared_bytes_per_block"] = most
    for limit, attribute in (
        ("threads_per_warp", "warp_size"),
        ("threads_per_block", "max_threads_per_block"),
        ("threads_per_core", "max_threads_per_multiprocessor"),
        ("blocks_per_core", "max_blocks_per_multiprocessor"),
        ("registers_per_block", "max_registers_per_block"),
        ("registers_per_core", "max_registers_per_multiprocessor"),
        ("shared_bytes_per_core", "max_shared_memory_per_multiprocessor"),
    ):
        limits[limit] = given(attribute, limits[limit])
    limits["warps_per_block"] = limits["threads_per_block"] // limits["threads_per_warp"]
    limits["warps_per_core"] = limits["threads_per_core"] // limits["threads_per_warp"]
    cores = given("multiprocessor_count", nearest.cores)
    name = str(properties.get("name") or nearest.name).lower().replace(" ", "-")
    return replace(nearest, name=name, cores=cores, memories=memories, limits=limits)


def _same(static: Target, found: Target) -> bool:
    """Whether they are one machine: all facts equal but its name and a little of its memory."""
    memory, other = static.memories["global"], found.memories["global"]
    near = abs(memory.bytes - other.bytes) <= NEAR * memory.bytes
    memories = {**found.memories, "global": replace(other, bytes=memory.bytes)}
    return near and replace(found, name=static.name, memories=memories) == static

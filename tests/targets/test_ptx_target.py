"""GPU Targets: the static records, and the Target of a device from its driver's attributes."""

from __future__ import annotations

import isa
import pytest

from tilegrad.core.dtype import bfloat16, float8_e4m3, float8_e5m2, float16, float32, int8
from tilegrad.core.errors import InternalError, UserError
from tilegrad.core.target import A100, H100, H200, from_text, target_named
from tilegrad.targets.ptx.target import nearest_static, target_of

# As the driver (13.0) of an H200 gives them.
DEVICE = {
    "name": "NVIDIA H200",
    "number": 0,
    "total_memory": 150_109_880_320,
    "compute_capability_major": 9,
    "compute_capability_minor": 0,
    "multiprocessor_count": 132,
    "max_threads_per_block": 1024,
    "max_threads_per_multiprocessor": 2048,
    "max_blocks_per_multiprocessor": 32,
    "max_registers_per_block": 65536,
    "max_registers_per_multiprocessor": 65536,
    "warp_size": 32,
    "max_shared_memory_per_block": 49152,
    "max_shared_memory_per_block_optin": 232448,
    "max_shared_memory_per_multiprocessor": 233472,
    "l2_cache_size": 62914560,
    "global_memory_bus_width": 6016,
    "memory_clock_rate": 3_201_000,
    "clock_rate": 1_980_000,
}
STATIC_GPUS = (H100, H200, A100)


@pytest.mark.parametrize("target", STATIC_GPUS, ids=lambda t: t.name)
def test_static_records(target) -> None:
    assert target_named(target.name) is target and from_text(target.to_text()) == target
    assert (
        target.has_threads and target.language == "ptx" and target.triple == "nvptx64-nvidia-cuda"
    )
    assert target.vector_bytes == 16 and target.lanes(float32) == 4 and target.lanes(bfloat16) == 8
    assert target.memories["register"].bytes == 64 * 1024 * 4
    limits = target.limits
    assert limits["threads_per_block"] == 1024 and limits["named_barriers"] == 16
    assert limits["warps_per_block"] * limits["threads_per_warp"] == limits["threads_per_block"]
    assert limits["registers_per_thread"] == 255 and limits["parameter_bytes"] == 32764
    assert limits["shared_bytes_per_block"] == target.memories["shared"].bytes
    assert target.memories["global"].shared and not target.memories["shared"].shared


def test_what_sets_the_machines_apart() -> None:
    assert (H100.cores, H200.cores, A100.cores) == (132, 132, 108)
    assert (H100.cpu, H200.cpu, A100.cpu) == ("sm_90a", "sm_90a", "sm_80")
    assert H200.memories["shared"].bytes == 232448 and A100.memories["shared"].bytes == 163 * 1024
    assert [round(t.peak_bytes() / 1e10) for t in STATIC_GPUS] == [300, 426, 160]
    assert H200.peak_flops(bfloat16) == pytest.approx(989e12)
    assert H200.peak_flops(float8_e4m3) == pytest.approx(1979e12)
    assert A100.peak_flops(bfloat16) == pytest.approx(312e12)
    assert H200.peak_flops(float32) < H200.peak_flops(bfloat16) / 10
    assert H100.limits["cluster"] == 8 and A100.limits["cluster"] == 1
    assert "cluster" in H100.memories and "cluster" not in A100.memories
    assert "copy_store" in H100.memories["shared"].copies
    assert "copy_store" not in A100.memories["shared"].copies


def test_matrix_units_prefer_the_warpgroup() -> None:
    first = {
        (a, b): H200.matrix_units(a, b)[0]
        for a, b in [
            (bfloat16, bfloat16),
            (float16, float16),
            (float32, float32),
            (int8, int8),
            (float8_e4m3, float8_e5m2),
        ]
    }
    assert [(u.m, u.n, u.k) for u in first.values()] == [
        (64, 256, 16),
        (64, 256, 16),
        (64, 256, 8),
        (64, 256, 32),
        (64, 256, 32),
    ]
    assert {u.name.split(".")[0] for u in A100.matrix} == {"mma"}
    (unit,) = A100.matrix_units(bfloat16, bfloat16)
    assert (unit.m, unit.n, unit.k, unit.scope) == (16, 8, 16, "register")
    assert not A100.matrix_units(float8_e4m3, float8_e4m3)


def test_matrix_units_are_instructions() -> None:
    """Every unit of a Target is a form of the table, and needs no more than the Target has."""
    for target in STATIC_GPUS:
        for unit in target.matrix:
            instruction, shape, types = unit.name.split(".", 2)
            if instruction == "wgmma":
                form = f"wgmma.mma_async.sync.aligned.{shape}.{types}"
            else:
                form = f"mma.sync.aligned.{shape}.row.col.{types}.{types.split('.')[0]}"
            needed = isa.requirements([form])[1]
            assert isa.TARGETS.index(needed) <= isa.TARGETS.index(target.cpu), form
            assert shape == f"m{unit.m}n{unit.n}k{unit.k}"
    with pytest.raises(InternalError):
        isa.requirements(["wgmma.mma_async.sync.aligned.m64n256k16.f32.tf32.tf32"])


def test_a_known_device_is_its_static_record() -> None:
    assert target_of(DEVICE) is H200
    assert target_of({**DEVICE, "memory_clock_rate": 0}) is H200  # a driver that does not say
    assert target_of({**DEVICE, "total_memory": 85_520_809_984, "l2_cache_size": 50 << 20}) is H100
    assert nearest_static({"compute_capability_major": 9}) is H100


def test_other_devices_have_their_own_facts() -> None:
    part = target_of(
        {
            **DEVICE,
            "multiprocessor_count": 66,
            "l2_cache_size": 30 << 20,
            "memory_clock_rate": 1_000_000,
        }
    )
    assert part != H200 and part.name == "nvidia-h200" and part.cpu == "sm_90a"
    assert part.cores == 66 and part.memories["l2"].bytes == 30 << 20
    assert part.flops == H200.flops and part.matrix == H200.matrix
    assert part.peak_bytes() == pytest.approx(0.9 * 2e9 * 6016 / 8)
    assert part.memories["global"].bytes == DEVICE["total_memory"]
    assert from_text(part.to_text()) == part


@pytest.mark.parametrize(("major", "minor"), [(8, 0), (8, 6), (8, 9), (10, 0), (12, 0)])
def test_without_warpgroups_it_is_sm_80(major: int, minor: int) -> None:
    found = target_of(
        {
            **DEVICE,
            "name": "other",
            "compute_capability_major": major,
            "compute_capability_minor": minor,
            "multiprocessor_count": 84,
            "max_threads_per_multiprocessor": 1536,
            "max_shared_memory_per_block_optin": 101376,
        }
    )
    assert found.cpu == "sm_80" and found.cores == 84 and "cluster" not in found.memories
    assert not found.asynchronous_units
    assert found.limits["warps_per_core"] == 48 and found.limits["warps_per_block"] == 32
    assert found.memories["shared"].bytes == found.limits["shared_bytes_per_block"] == 101376


def test_too_old_is_said() -> None:
    with pytest.raises(UserError, match="too old"):
        target_of({**DEVICE, "compute_capability_major": 7, "compute_capability_minor": 5})

"""Four designs of the Timeloop and Accelergy exercises: their mappings, accesses and energy.

The numbers are the reference outputs of Accelergy-Project/timeloop-accelergy-exercises (2025),
example_designs, default problem: accesses per instance, energies by its tables (pJ a vector of
several words; registers of one cluster, of which 12 are used, are one vector).
"""

from __future__ import annotations

import pytest

from tilegrad.chip.explore import TIMELOOP, Accelerator, Level, Mapping, convolution, cost_of

PROBLEM = convolution(C=3, M=32, P=112, Q=112, R=3, S=3, stride=2)
W, X, Y = "weights", "inputs", "outputs"


def level(name: str, keeps: tuple[str, ...], read: float, write: float, **more: float) -> Level:
    """A Level whose energies are of a vector of `block` words."""
    block = more.pop("block", 1)
    return Level(name, keeps=keeps, read=read / block, write=write / block, **more)  # type: ignore


def dram(block: int) -> Level:
    return level("DRAM", (W, X, Y), 512.0, 512.0, block=block)


SIMPLE = {"read": 32.377775, "write": 26.156875, "block": 4, "leak": 0.005353}
SPAD = {"read": 0.680237, "write": 1.582678, "leak": 0.001165}
REGISTERS = [level(f"{o[:-1]}_reg", (o,), 0.144, 0.0) for o in (W, X, Y)]
DESIGNS = {
    "eyeriss_like": (
        Accelerator(
            "eyeriss_like",
            (
                dram(8),
                level("glb", (X, Y), 18.183829, 14.137929, block=8, leak=0.005652,
                      columns=14, rows=12),
                level("ifmap", (X,), 0.202442, 0.176713, block=2, leak=0.000101),
                level("weight", (W,), 1.976602, 1.881657, block=2, leak=0.001592),
                level("psum", (Y,), 0.2513, 0.2191, leak=0.000134),
            ),
            mac=0.207692,
        ),
        Mapping.of("P8 Q2 M4", "P14 Q4 | Q14 | C3 S3", "", "R3", "M8"),
        86_016, 59.28,
        {
            ("DRAM", W): (13824, 0, 0), ("DRAM", X): (157296, 0, 0), ("DRAM", Y): (0, 0, 401408),
            ("glb", X): (1354752, 157296, 0), ("glb", Y): (0, 0, 401408),
            ("ifmap", X): (86016, 10752, 0), ("weight", W): (86016, 1536, 0),
            ("psum", Y): (57344, 0, 86016),
        },
    ),
    "simple_weight_stationary": (
        Accelerator(
            "simple_weight_stationary",
            (dram(4), level("glb", (W, X, Y), **SIMPLE, rows=16, columns=16),
             level("spad", (W,), **SPAD), *REGISTERS),
            mac=0.315,
        ),
        Mapping.of("Q14", "S3 P2 M8 | | M4 C3", "R3 Q2 P2", "P28 Q4", "", ""),
        903_168, 151.67,
        {
            ("DRAM", W): (864, 0, 0), ("DRAM", X): (151875, 0, 0), ("DRAM", Y): (0, 0, 401408),
            ("glb", W): (24192, 864, 0), ("glb", X): (2709504, 151875, 0),
            ("glb", Y): (3211264, 0, 3612672), ("spad", W): (2016, 2016, 0),
            ("weight_reg", W): (903168, 2016, 0), ("input_reg", X): (903168, 903168, 0),
            ("output_reg", Y): (802816, 802816, 903168),
        },
    ),
    "simple_output_stationary": (
        Accelerator(
            "simple_output_stationary",
            (dram(4), level("glb", (W, X), **SIMPLE, rows=16, columns=16),
             level("spad", (Y,), **SPAD), *REGISTERS),
            mac=0.315,
        ),
        Mapping.of("P2 Q8 M2", "Q14 R3 | | M16", "C3 P4 S3", "P14", "", ""),
        677_376, 118.46,
        {
            ("DRAM", W): (13824, 0, 0), ("DRAM", X): (157296, 0, 0), ("DRAM", Y): (0, 0, 401408),
            ("glb", W): (774144, 13824, 0), ("glb", X): (677376, 157296, 0),
            ("spad", Y): (652288, 0, 677376), ("weight_reg", W): (677376, 48384, 0),
            ("input_reg", X): (677376, 677376, 0), ("output_reg", Y): (652288, 652288, 677376),
        },
    ),
    "simba_like": (
        Accelerator(
            "simba_like",
            (
                dram(8),
                level("glb", (X, Y), 51.870888, 66.310888, block=32, leak=0.003241, columns=16),
                level("input", (X,), 242.079552, 241.503552, block=8, leak=0.207488, rows=4),
                level("weight", (W,), 121.36387, 120.78787, block=8, leak=0.104535),
                level("accu", (Y,), 3.091057, 2.875058, leak=0.003416),
                level("weight_reg", (W,), 0.259899, 0.080139, block=12, leak=0.000169),
            ),
            mac=0.315,
        ),
        Mapping.of("Q28", "P4 | C3 M4", "Q4 | | M4", "R3 P4 S3", "M2 P7", ""),
        225_792, 239.15,
        {
            ("DRAM", W): (864, 0, 0), ("DRAM", X): (151875, 0, 0), ("DRAM", Y): (0, 0, 401408),
            ("glb", X): (170100, 151875, 0), ("glb", Y): (802816, 0, 1204224),
            ("input", X): (225792, 56700, 0), ("weight", W): (32256, 18, 0),
            ("accu", Y): (200704, 50176, 225792), ("weight_reg", W): (225792, 32256, 0),
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DESIGNS)
def test_accesses_to_the_integer_and_energy(name: str) -> None:
    machine, mapping, cycles, microjoules, published = DESIGNS[name]
    found = cost_of(PROBLEM, machine, mapping, TIMELOOP)
    assert found.counts.cycles[0] == cycles
    levels = [v.name for v in machine.levels]
    for (where, operand), expected in published.items():
        access = found.counts.at(where, operand)
        used = found.counts.instances[levels.index(where)][0]
        each = tuple(float(v[0] / used) for v in vars(access).values())
        assert each[:3] == expected, (where, operand)
    assert found.energy[0] * 1e-6 == pytest.approx(microjoules, rel=1e-3)

"""Published results: Eyeriss' energy, dataflows compared, the first TPU's roofline, NVDLA."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from tilegrad.chip.explore import EYERISS, Mapping, convolution, cost_of, gemm
from tilegrad.chip.explore.dataflow import DATAFLOWS, Dataflow
from tilegrad.chip.explore.presets import NVDLA, eyeriss_energy, nvdla, tpu_v1
from tilegrad.chip.explore.search import Found, search
from tilegrad.chip.mapped import map_network
from tilegrad.chip.networks import resnet_50

LAYERS = {  # each convolution is made in two halves, one after the other
    "conv1": {"M": 48, "C": 3, "P": 55, "Q": 55, "R": 11, "S": 11, "stride": 4},
    "conv2": {"M": 128, "C": 48, "P": 27, "Q": 27, "R": 5, "S": 5},
    "conv3": {"M": 192, "C": 256, "P": 13, "Q": 13, "R": 3, "S": 3},
    "conv4": {"M": 192, "C": 192, "P": 13, "Q": 13, "R": 3, "S": 3},
    "conv5": {"M": 128, "C": 192, "P": 13, "Q": 13, "R": 3, "S": 3},
    "fc1": {"M": 4096, "C": 256, "P": 1, "Q": 1, "R": 6, "S": 6},
    "fc2": {"M": 4096, "C": 4096, "P": 1, "Q": 1},
    "fc3": {"M": 1000, "C": 4096, "P": 1, "Q": 1},
}  # AlexNet
# Eyeriss (ISCA 2016, figure 10): 256 multipliers, batch 16, in 1e9 energies of a multiplication
ALU = dict(zip(LAYERS, (1.69, 3.58, 2.39, 1.79, 1.20, 0.60, 0.27, 0.07)))
DRAM = dict(zip(LAYERS, (2.46, 2.27, 2.02, 1.57, 1.05, 7.78, 3.39, 0.84)))
# nn_dataflow 2.1 on the same machine, where Operands may go past the buffer
NN_DATAFLOW = dict(zip(LAYERS, (2.02, 1.84, 1.65, 1.29, 0.77, 7.67, 3.38, 0.84)))
REGISTERS = dict(zip(LAYERS, (6.75, 14.33, 9.57, 7.18, 4.78, 2.42, 1.07, 0.26)))
# In that paper weight stationary lays the plane of a filter on the array, a weight a multiplier.
PAPER_WS = replace(DATAFLOWS["ws"], rows="RS", columns="RSM", inside="")
NN_ROWS = replace(DATAFLOWS["rs"], inside="NSCMQ")


SAMPLE = ("conv5", "fc3")  # the whole of AlexNet takes a minute
LAYER_CASES = [
    pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in LAYERS
]


@cache
def found(layer: str, flow: Dataflow, past: bool = False) -> tuple[Found, int]:
    """What was found for a layer, and how often it has it."""
    problem = convolution(N=16, **LAYERS[layer], name=layer)
    best = search(
        problem,
        eyeriss_energy(past=past),
        flow,
        conventions=EYERISS,
        pad=1.02,
        slack=1.02 if past else 1.0,
        rounds=8 if past else 24,
        samples=512 if past else 1024,
    )
    return best, 2 if layer.startswith("conv") else 1


def parts_of(layer: str, flow: Dataflow, past: bool = False) -> dict[str, float]:
    best, times = found(layer, flow, past)
    return {name: times * float(v[0]) / 1e9 for name, v in best.cost.parts.items()}


@pytest.mark.parametrize("layer", LAYER_CASES)
def test_row_stationary_energy_of_eyeriss(layer: str) -> None:
    parts = parts_of(layer, DATAFLOWS["rs"])
    # the paper prints two decimals; 0.3% of the number, or the last digit
    assert parts["mac"] == pytest.approx(ALU[layer], rel=3e-3, abs=5.1e-3)
    assert parts["registers"] == pytest.approx(REGISTERS[layer], rel=3e-3, abs=5.1e-3)
    most = DRAM[layer] * (1.0 if layer.startswith("conv") else 1.03)
    assert 0.8 * DRAM[layer] <= parts["DRAM"] <= most + 5e-3


@pytest.mark.parametrize("layer", LAYER_CASES)
def test_row_stationary_past_the_buffer(layer: str) -> None:
    """Where Operands may skip the buffer, DRAM's part is that of nn_dataflow within 10%."""
    parts = parts_of(layer, NN_ROWS, past=True)
    assert parts["registers"] == pytest.approx(REGISTERS[layer], rel=3e-3, abs=5.1e-3)
    assert parts["DRAM"] == pytest.approx(NN_DATAFLOW[layer], rel=0.1)
    assert parts["DRAM"] <= 1.01 * DRAM[layer]


@pytest.mark.slow
@pytest.mark.parametrize(
    "flow", [PAPER_WS, DATAFLOWS["os"], DATAFLOWS["nlr"]], ids=lambda f: f.name
)
def test_row_stationary_against_others(flow: Dataflow) -> None:
    """On AlexNet's convolutions the others need 1.4 to 2.5 times the energy."""
    layers = [layer for layer in LAYERS if layer.startswith("conv")]
    ours = sum(found(layer, DATAFLOWS["rs"])[0].energy for layer in layers)
    theirs = sum(found(layer, flow)[0].energy for layer in layers)
    assert 1.4 <= round(theirs / ours, 1) <= 2.5


def test_row_stationary_is_below_the_others() -> None:
    """One layer of those above."""
    ours = found("conv5", DATAFLOWS["rs"])[0].energy
    assert all(1.0 < found("conv5", DATAFLOWS[f])[0].energy / ours < 4 for f in ("os", "nlr"))


# TPU v1 (ISCA 2017): operations a weight byte, TOPS of the roofline as the paper prints it
WORKLOADS = {
    "MLP0": (200, 13.6),
    "MLP1": (168, 11.4),
    "LSTM0": (64, 4.4),
    "LSTM1": (96, 6.5),
    "CNN0": (2888, 92.0),
    "CNN1": (1750, 92.0),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_roofline_of_the_first_tpu(name: str) -> None:
    rows, printed = WORKLOADS[name]
    problem, machine = gemm(M=rows, N=2048, K=2048, bits=8), tpu_v1()
    made = cost_of(problem, machine, Mapping.of("", "M8 C8", f"P{rows} | M256 | C256", ""))
    cycles = max(float(bound[0]) for bound in made.bounds.values())
    tops = 2 * problem.macs * machine.clock / cycles / 1e12
    assert tops == pytest.approx(min(91.75, 2 * rows * 34e-3), rel=0.01)
    assert tops == pytest.approx(printed, rel=0.01) or round(tops, 1) == printed
    assert made.bound_by() == ("compute" if printed == 92.0 else "DRAM")


@pytest.mark.slow
def test_resnet_50_between_the_bounds_of_nvdla() -> None:
    """An estimate may be up to 2.2 times the frames of the primer's table; bench/chip_explore.py
    has its other rows."""
    network, multipliers = resnet_50().with_bits(8), 2048
    mapped = map_network(
        network, nvdla(multipliers), "nvdla", objective="cycles", rounds=1, samples=512
    )
    frames = 1 / mapped.seconds
    assert NVDLA[multipliers][-1] <= frames <= 2.2 * NVDLA[multipliers][-1]
    assert sum(mapped.parts().values()) == pytest.approx(mapped.energy)

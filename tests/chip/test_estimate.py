"""Networks on an NPU in closed form, against the programs and the simulator they stand for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tilegrad.chip.estimate import areas, bandwidth, dense_peak, estimate, product
from tilegrad.chip.networks import mobilenet_v1, resnet_50
from tilegrad.targets.npu.layout import Narrow
from tilegrad.targets.npu.machine import Machine
from tilegrad.targets.npu.parameters import DATAFLOWS, PRESETS, Parameters, preset
from tilegrad.targets.npu.product import Product

RATES: dict[str, dict[str, Any]] = {"mixed": {"weights": "int4"}, "sparse": {"sparse": True}}
SIZES = [(512, 64, 64), (64, 64, 512), (64, 512, 64), (1, 256, 256), (100, 50, 200), (16, 16, 16)]


@pytest.mark.parametrize("dataflow", DATAFLOWS)
@pytest.mark.parametrize("name", ["edge", "16x16", "eyeriss-like"])
def test_cycles_are_those_of_the_programs(name: str, dataflow: str) -> None:
    p = replace(preset(name), dataflow=dataflow)
    for sizes in SIZES:
        made = Product(p, *sizes, Narrow()).cycles()
        assert product(p, *sizes).cycles == pytest.approx(made, rel=0.04), sizes


def placed(dataflow: str, rate: str, M: int, N: int, K: int) -> tuple[int, int, int]:
    """A product whose weights stay, as a function's with two of them a step is compiled."""
    return (N, M, K) if rate and dataflow == "is" else (M, N, K)


@pytest.mark.parametrize("dataflow", DATAFLOWS)
@pytest.mark.parametrize("rate", RATES)
def test_cycles_of_two_weights_a_step(rate: str, dataflow: str) -> None:
    for name in ("edge", "16x16"):
        p = replace(preset(name), dataflow=dataflow, **RATES[rate])
        for sizes in SIZES:
            made = Product(p, *placed(dataflow, rate, *sizes), Narrow(), rate=rate).cycles()
            assert product(p, *sizes).cycles == pytest.approx(made, rel=0.05), (name, sizes)


@pytest.mark.parametrize("rate", ["", *RATES])
@pytest.mark.parametrize("dataflow", DATAFLOWS)
def test_energy_is_that_of_the_simulator(dataflow: str, rate: str) -> None:
    given = {"dataflow": dataflow, "dma_bytes": 8, "bank_rows": 32, **RATES.get(rate, {})}
    p = Parameters(rows=4, columns=6, lanes=2, **given)
    M, N, K = placed(dataflow, rate, 21, 13, 37)
    made = Product(p, M, N, K, Narrow(), rate=rate)
    rng = np.random.default_rng(0)
    left, right = (rng.integers(-8, 8, s).astype(np.int8) for s in ((M, K), (K, N)))
    pruned = left.T if dataflow == "is" else right
    pruned[2::4], pruned[3::4] = 0, 0
    memory = made.pack(left, right)
    total: dict[str, float] = {}
    for words in made.program():
        machine = Machine(p, words, memory)
        machine.run()
        for part, value in machine.counters().energy.items():
            total[part] = total.get(part, 0.0) + value
    found = product(p, 21, 13, 37).energy
    names = {
        "multipliers": "mac",
        "scratchpad": "scratchpad",
        "accumulators": "accumulator",
        "DRAM": "dram",
    }
    for name, counted in names.items():
        assert found[name] == pytest.approx(total[counted]), name
    assert total["vector"] == total["idle"] == 0


def test_a_network_is_the_sum_of_its_products() -> None:
    p = preset("16x16")
    work = resnet_50()
    found = estimate(p, work)
    assert sum(one.count for one in found.products) == 54
    assert sum(one.count * one.macs for one in found.products) == pytest.approx(work.macs)
    assert found.cycles == pytest.approx(sum(one.count * one.cycles for one in found.products))
    assert sum(found.energy().values()) == pytest.approx(
        sum(one.count * sum(one.energy.values()) for one in found.products)
    )
    assert 0 < found.utilisation < 1 and found.seconds == found.cycles / 1e9
    for one in found.products:
        assert one.cycles >= one.macs / p.peak_macs
        assert one.bound in ("load", "execute", "store")


def test_depthwise_convolutions_leave_the_mesh_idle() -> None:
    p = preset("16x16")
    assert estimate(p, mobilenet_v1()).utilisation < 0.5 * estimate(p, resnet_50()).utilisation


def test_narrow_and_pruned_weights_move_fewer_bytes() -> None:
    p = preset("16x16")
    plain = product(p, 16, 512, 512)
    narrow = product(replace(p, weights="int4", dma_bytes=8), 16, 512, 512)
    wide = product(replace(p, dma_bytes=8), 16, 512, 512)
    pruned = product(replace(p, sparse=True), 16, 512, 512)  # 20 bytes are two beats of 16
    assert narrow.dram_bytes < wide.dram_bytes and pruned.dram_bytes <= plain.dram_bytes
    small = [replace(p, dma_bytes=4, sparse=sparse) for sparse in (False, True)]
    dense, half = (product(one, 16, 512, 512).dram_bytes for one in small)
    assert half < dense
    assert pruned.queues["execute"] == pytest.approx(plain.queues["execute"] / 2)
    assert dense_peak(replace(p, sparse=True)) == 2 * p.peak_macs
    mixed = product(replace(p, weights="int4"), 16, 512, 512)  # two in a place, a pass each
    assert mixed.queues["execute"] == pytest.approx(plain.queues["execute"] / 2)
    assert dense_peak(replace(p, weights="int4")) == 2 * p.peak_macs
    inputs = replace(p, sparse=True, dataflow="is")  # operands are exchanged: weights stay
    assert dense_peak(inputs) == 2 * p.peak_macs


@pytest.mark.parametrize("name", PRESETS)
def test_blocks_have_areas(name: str) -> None:
    p = preset(name)
    found = areas(p)
    assert all(value > 0 for value in found.values())
    more = areas(replace(p, rows=2 * p.rows))
    assert more["multipliers"] == pytest.approx(2 * found["multipliers"])
    assert more["scratchpad"] >= found["scratchpad"]
    assert bandwidth(p) <= 1.001e9 * max(p.dram_bandwidth, p.clock * p.dma_bytes / 1e3)

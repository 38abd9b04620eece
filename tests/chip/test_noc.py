"""Networks on a chip: BookSim's figures, credits that hold, packets that arrive whole."""

from __future__ import annotations

import numpy as np
import pytest

from tilegrad.chip.noc import Network, Topology, hierarchical, measure, mesh, ring
from tilegrad.chip.noc.simulate import _Run
from tilegrad.core.errors import UserError

TOPOLOGIES = [mesh(4, 4), mesh(3, 2), ring(6), ring(5), hierarchical(2, 2, 3)]
# BookSim2, 8 x 8 mesh, 8 channels of 8 flits, packets of one flit, uniform traffic
BOOKSIM = {0.1: 27.2, 0.2: 27.9, 0.3: 29.4}


@pytest.mark.parametrize(("side", "cycles"), [(4, 16.0), (8, 26.9)])
def test_an_idle_mesh_is_booksims(side: int, cycles: float) -> None:
    assert mesh(side, side).zero_load() == pytest.approx(cycles, rel=0.01)


def test_the_simulator_agrees_with_the_closed_form() -> None:
    found = measure(Network(mesh(4, 4)), 0.04, cycles=1200, warm=100)
    assert found.latency == pytest.approx(16.0, rel=0.03) and found.packets > 500


@pytest.mark.parametrize("rate", BOOKSIM)
def test_latency_under_load_is_booksims(rate: float) -> None:
    found = measure(Network(mesh(8, 8)), rate, cycles=700, warm=250)
    assert found.latency == pytest.approx(BOOKSIM[rate], rel=0.03)
    assert found.accepted == pytest.approx(rate, rel=0.05)


def test_an_8_by_8_mesh_saturates_where_booksim_does() -> None:
    """At 0.425; beyond it no more flits leave. bench/chip_noc.py looks for the rate itself."""
    assert mesh(8, 8).capacity() == 0.5
    over = measure(Network(mesh(8, 8)), 0.5, cycles=700, warm=300)
    assert over.accepted == pytest.approx(0.425, rel=0.05)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: t.name)
@pytest.mark.parametrize("length", [1, 4])
def test_every_flit_arrives_and_no_buffer_overflows(topology: Topology, length: int) -> None:
    network = Network(topology, channels=2, depth=3)
    run = _Run(network, 0.3, 120, length, seed=1)
    for now in range(3000):
        run.step(now)
        assert run.held.max() <= network.depth and run.room.min() >= 0
    packets = int((run.born < 120).sum())
    assert run.left == packets * length > 0
    born = np.sort(np.concatenate([b for b, _ in run.done]))
    assert (born == np.sort(run.born[run.born < 120])).all()
    assert (run.room == network.depth).all() and not run.taken.any()


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: t.name)
def test_hops_of_a_lone_packet_take_the_cycles_of_the_route(topology: Topology) -> None:
    network = Network(topology)
    hops = topology.hops()
    for seed in range(4):
        run = _Run(network, 0.004, 60, 1, seed)
        count = int((run.born < 60).sum())
        if count != 1:
            continue
        source = int(np.flatnonzero((run.born < 60).any(1))[0])
        target = int(np.flatnonzero(topology.terminals == run.target[source, 0])[0])
        for now in range(200):
            run.step(now)
        (born,), (end,) = run.done[0]
        assert end - born == 4 * (hops[source, target] + 1) + 2


def test_rings_and_hubs() -> None:
    assert ring(8).zero_load() == 4 * (2 + 1) + 2
    assert ring(8).capacity() == pytest.approx(0.8)
    tree = hierarchical(2, 2, 4)
    assert len(tree.terminals) == 16 and tree.hops().max() == 4
    assert measure(Network(ring(8)), 0.5, cycles=600, warm=100).accepted == pytest.approx(
        0.5, rel=0.1
    )


def test_bad_sizes_name_the_bound() -> None:
    with pytest.raises(UserError, match="bad size of mesh"):
        mesh(64, 64)
    with pytest.raises(UserError, match="bad channels of a network") as raised:
        Network(ring(4), channels=1)
    assert "2 to 64" in str(raised.value) and "channels = 2 would fit" in str(raised.value)
    with pytest.raises(UserError, match="bad traffic"):
        measure(Network(ring(4)), 0.0)

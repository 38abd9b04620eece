"""Chiplets: yield, links, and what a package costs."""

from __future__ import annotations

import pytest

from tilegrad.chip.chiplet import Die, Link, Package, split
from tilegrad.chip.explore import Accelerator, Level, Mapping, cost_of, gemm
from tilegrad.chip.explore.problem import pruned
from tilegrad.core.errors import UserError


def test_yield_is_negative_binomial() -> None:
    die = Die("a", 800.0, defects=0.001, clusters=3.0)
    assert die.good == pytest.approx((1 + 0.8 / 3) ** -3)
    assert Die("b", 100.0).good > die.good
    assert Die("c", 800.0, clusters=1e6).good == pytest.approx(2.718281828**-0.8, rel=1e-4)


def test_a_large_die_is_cheaper_in_parts() -> None:
    large = Die("large", 800.0)
    whole, parts = Package((large,)), split(large, 4, Link("ucie-a"))
    assert parts.cost < whole.cost and parts.area > whole.area
    small = Die("small", 40.0)
    assert split(small, 4, Link("ucie-a")).cost > Package((small,)).cost


def test_links_of_ucie() -> None:
    link = Link("ucie-a", 32.0)
    assert link.bandwidth == pytest.approx(64 * 32e9 / 8 * 236 / 256)
    assert 2 * 64 * 32 / 8 / link.edge == pytest.approx(1317.0)
    assert Link("ucie-s", 16.0).picojoules_per_bit == 0.5
    assert link.seconds(0) == pytest.approx(1e-9)


def test_what_cannot_be_made_names_what_could() -> None:
    with pytest.raises(UserError, match="bad area of die huge") as raised:
        Die("huge", 1000.0)
    assert "858 mm2" in str(raised.value) and "2 dies of 500 mm2 would fit" in str(raised.value)
    with pytest.raises(UserError, match="bad rate") as raised:
        Link("ucie-s", 64.0)
    assert "rate = 32 would fit" in str(raised.value)


def test_two_of_four_halves_work_and_most_bytes() -> None:
    problem = gemm(M=16, N=16, K=16, bits=8)
    sparse = pruned(problem)
    assert sparse.operand("weights").bits == 5  # 0.625 of a byte
    assert pruned(gemm(M=4, N=4, K=4)).operand("weights").bits == 9  # 0.5625 of 16
    machine = Accelerator("a", (Level("DRAM", read=8.0, word_bits=8),), macs_a_cycle=2.0)
    mapping = Mapping.of("P16 M16 C16")
    dense, less = cost_of(problem, machine, mapping), cost_of(sparse, machine, mapping)
    assert less.parts["mac"][0] == dense.parts["mac"][0] / 2
    assert less.energy[0] < dense.energy[0]
    with pytest.raises(UserError, match="cannot be pruned") as raised:
        pruned(gemm(M=4, N=4, K=6))
    assert "C = 8 would fit" in str(raised.value)

"""Stacked DRAM against its bursts one by one; tiles that are loaded while others work."""

from __future__ import annotations

import numpy as np
import pytest

from tilegrad.chip.catalogue import chip
from tilegrad.chip.memory import Stacked, bursts_in_time, double_buffered
from tilegrad.core.errors import UserError


def test_reading_whole_rows_is_bound_by_the_refresh() -> None:
    memory = Stacked()
    assert memory.share() == pytest.approx(1 - 350 / 3900)
    # what an H200 was measured to read
    h200 = chip("h200")
    measured = h200.need("bandwidth_measured") / h200.need("bandwidth")
    assert memory.share() == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("bursts", [1, 2, 16])
def test_the_closed_form_is_that_of_the_bursts(bursts: int) -> None:
    """Rows in turn over the banks, so many bursts of each."""
    memory = Stacked(open_row=60.0, banks=8)
    rows = np.repeat(np.arange(20_000 // bursts), bursts)
    timed = memory.burst * len(rows) / (1e-9 * bursts_in_time(memory, rows)) * memory.channels
    assert memory.bandwidth(1 - 1 / bursts) == pytest.approx(timed, rel=0.01)


def test_one_bank_again_and_again_is_slowest() -> None:
    memory = Stacked()
    same_bank = memory.banks * np.arange(1000)
    assert bursts_in_time(memory, same_bank) >= 999 * memory.open_row
    with pytest.raises(UserError, match="bad hits"):
        memory.share(1.5)
    with pytest.raises(UserError, match="bad refresh of a memory"):
        Stacked(refresh=4000.0)


def test_two_buffers_hide_the_loads() -> None:
    tiles = 10
    one = double_buffered([5.0] * tiles, [5.0] * tiles, [0.0] * tiles, buffers=1)
    two = double_buffered([5.0] * tiles, [5.0] * tiles, [0.0] * tiles)
    assert (one.cycles, two.cycles) == (100.0, 55.0)
    slow = double_buffered([8.0] * tiles, [5.0] * tiles, [1.0] * tiles)
    assert slow.cycles == 8.0 * tiles + 5 + 1 and slow.stalls == slow.cycles - 50
    with pytest.raises(UserError, match="bad buffers"):
        double_buffered([1.0], [1.0], [1.0], buffers=0)

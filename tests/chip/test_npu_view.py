"""What the RTL is compared with in every cycle can be told of every cycle."""

from __future__ import annotations

import pytest
from npu_programs import random_memory, random_program
from npu_view import events, expected

from tilegrad.targets.npu.machine import Machine
from tilegrad.targets.npu.parameters import Parameters


@pytest.mark.parametrize("element", ["int8", "bf16"])
@pytest.mark.parametrize("sparse", [False, True])
def test_every_cycle_has_a_view(element: str, sparse: bool) -> None:
    p = Parameters.of({"rows": 4, "columns": 4, "element": element, "sparse": sparse})
    machine = Machine(p, random_program(p, 1), random_memory(1, floating=p.floating), None)
    names, written = set(), set()
    while not machine.done:
        shown = expected(machine)
        assert all(value >= 0 for value in shown.values())
        names |= set(shown)
        machine.step()
        written |= {name for name, event in events(machine).items() if event is not None}
    assert {"pc", "sums", "inputs", "still", "tokens", "states", "araddr", "wdata"} <= names
    assert ("index" in names) == sparse
    assert written == {"scratchpad", "accumulator"}

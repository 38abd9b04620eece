"""The emitted SystemVerilog: clean in four front ends, equal to the simulator in every cycle,
proved where it can be. Tools that are missing are named."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from npu_programs import small
from rtl_run import lockstep, why_not

from tilegrad.chip.rtl.emit import design, top_parameters, write
from tilegrad.chip.rtl.verify import LINTERS, PROOFS, PROVERS, Proof, lint, missing, prove
from tilegrad.core.fixed import exp_table
from tilegrad.targets.npu.parameters import PRESETS, preset

CHIPS = {
    "ws int8": small(sparse=True, weights="int4", stochastic=True),
    "os bf16": small(element="bf16", weights="fp8", dataflow="os", sparse=True),
}
MORE = {
    "plain ws": small(),
    "is 3x5": small(dataflow="is", rows=3, columns=5, lanes=5),
    "os": small(dataflow="os"),
    "bf16 ws": small(element="bf16", stochastic=True),
    "fp16 os, fp8 weights": small(element="fp16", weights="fp8", dataflow="os"),
    "fp16 ws": small(element="fp16", stochastic=True),
    "is 3x5, int4 weights": small(weights="int4", dataflow="is", rows=3, columns=5, lanes=5),
}


def needs(tool: str) -> None:
    gone = missing({**LINTERS, **PROVERS})
    if tool in gone:
        pytest.skip(f"{tool} is not installed: {gone[tool]}")


@pytest.mark.parametrize("tool", LINTERS)
@pytest.mark.parametrize("chip", CHIPS)
def test_front_ends_are_silent(tool: str, chip: str, tmp_path: Path) -> None:
    needs(tool)
    assert lint(tool, write(CHIPS[chip], tmp_path)) == []


@pytest.mark.slow
@pytest.mark.parametrize("tool", LINTERS)
@pytest.mark.parametrize("chip", [*MORE, "16x16"])
def test_front_ends_are_silent_about_more(tool: str, chip: str, tmp_path: Path) -> None:
    needs(tool)
    p = MORE[chip] if chip in MORE else preset(chip)
    assert lint(tool, write(p, tmp_path)) == []


def test_a_front_end_sees_a_fault(tmp_path: Path) -> None:
    """A width that does not fit, a signal that is not there."""
    files = write(small(), tmp_path)
    top = next(f for f in files if f.name == "npu_top.sv")
    top.write_text(top.read_text().replace(".pc(pc));", ".pc(pcc[3:0]));"))
    for tool in LINTERS:
        if tool not in missing(LINTERS):
            assert lint(tool, files), tool


@pytest.mark.parametrize("chip", CHIPS)
def test_registers_are_the_simulators_in_every_cycle(chip: str, tmp_path: Path) -> None:
    if why_not():
        pytest.skip(why_not())
    assert lockstep(CHIPS[chip], range(2, 4), tmp_path) == ""


@pytest.mark.slow
@pytest.mark.parametrize("chip", {**CHIPS, **MORE})
def test_registers_with_more_programs(chip: str, tmp_path: Path) -> None:
    if why_not():
        pytest.skip(why_not())
    assert lockstep({**CHIPS, **MORE}[chip], range(4, 10), tmp_path) == ""


@pytest.mark.slow
def test_a_memory_that_stalls(tmp_path: Path) -> None:
    """Every AXI channel held back by chance."""
    if why_not():
        pytest.skip(why_not())
    assert lockstep(MORE["os"], [1], tmp_path, stalls=7) == ""


FAULTS = {
    "a row late": ("npu_execute.sv", "clock - (ROWS + COLUMNS)", "clock - (ROWS + COLUMNS + 1)"),
    "an address on": ("npu_dma.sv", "word[31:16]} + row;", "word[31:16]} + row + 1;"),
    "the second input lost": ("npu_mesh.sv", "mixed ? inputs[15:8] : chosen", "chosen"),
}


FIRST = next(iter(FAULTS))
FAULT_CASES = [pytest.param(f, marks=() if f == FIRST else pytest.mark.slow) for f in FAULTS]


@pytest.mark.parametrize("fault", FAULT_CASES)
def test_a_planted_fault_is_seen(fault: str, tmp_path: Path) -> None:
    if why_not():
        pytest.skip(why_not())
    name, old, new = FAULTS[fault]

    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    found = lockstep(small(weights="int4"), [3], tmp_path, change=change)
    assert "seed 3 cycle" in found


QUICK = ("npu_queue", "npu_token")  # the others take minutes
PROOF_CASES = [
    pytest.param(p, id=p.top, marks=() if p.top in QUICK else pytest.mark.slow) for p in PROOFS
]


@pytest.mark.parametrize("proof", PROOF_CASES)
def test_proofs(proof: Proof, tmp_path: Path) -> None:
    for tool in PROVERS:
        needs(tool)
    assert prove(proof, tmp_path) == ""


def test_a_false_claim_has_no_proof(tmp_path: Path) -> None:
    """A token channel that forgets one when both sides move."""
    for tool in PROVERS:
        needs(tool)
    source = (Path(design.__code__.co_filename).parent / "sv" / "npu_queue.sv").read_text()
    broken = source.replace(
        "if (put && !take) count <= count + ONE;", "if (put) count <= count + ONE;"
    )
    assert broken != source
    (tmp_path / "broken.sv").write_text(broken)
    token = next(p for p in PROOFS if p.top == "npu_token")
    files = (str(tmp_path / "broken"),)
    made = Proof(token.top, token.claim, 4, True, files, token.parameters)
    assert "FAILED" in prove(made, tmp_path)


def test_the_text_follows_the_parameters() -> None:
    for name in PRESETS:
        p = preset(name)
        found = dict(re.findall(r"parameter int (\w+)\s*= (\d+)", design(p)["npu_top.sv"]))
        assert {k: int(v) for k, v in found.items()} == top_parameters(p)
    assert design(preset("edge")) == design(preset("edge"))
    entries = re.findall(r"9'd(\d+): value = 18'd(\d+);", design(preset("edge"))["npu_tables.sv"])
    found = np.array([int(v) for _, v in entries[:257]])
    np.testing.assert_array_equal(found, exp_table())

"""Instructions as records, text and bytes; programs that a chip cannot run."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from npu_programs import random_memory, random_program, small

from tilegrad.core.errors import UserError
from tilegrad.targets.npu.check import check
from tilegrad.targets.npu.instructions import (
    FIELDS,
    KINDS,
    OPS,
    Instruction,
    assemble,
    disassemble,
    encode,
    instruction,
    text,
)
from tilegrad.targets.npu.machine import Machine
from tilegrad.targets.npu.timing import perfetto, timeline


@st.composite
def instructions(draw: st.DrawFn) -> Instruction:
    op = draw(st.sampled_from(sorted(OPS)))
    given = {}
    for field in FIELDS[op]:
        most = (1 << field.width) - 1
        if field.name == "kind":
            most = len(KINDS[op]) - 1
        elif field.name == "queue":
            most = 2
        given[field.name] = draw(st.integers(0, most))
    return instruction(op, **given)


@settings(max_examples=300, deadline=None)
@given(instructions())
def test_round_trips(one: Instruction) -> None:
    word = encode(one)
    found = {f.name: word >> f.low & (1 << f.width) - 1 for f in FIELDS[one.op]}
    assert word & 15 == OPS[one.op] and all(one[name] == value for name, value in found.items())
    assert assemble(text(one)) == [one]
    assert word < 1 << 128


@settings(max_examples=50, deadline=None)
@given(st.lists(instructions(), max_size=12))
def test_programs_round_trip(program: list[Instruction]) -> None:
    assert assemble(disassemble(program)) == program


def test_fields_do_not_overlap() -> None:
    for op, fields in FIELDS.items():
        used = 15
        for field in fields:
            mask = ((1 << field.width) - 1) << field.low
            assert not used & mask and field.low + field.width <= 128, (op, field)
            used |= mask


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("jump", "unknown instruction"),
        ("loop count=3", "no field count"),
        ("loop turns=70000", "does not fit its 16 bits"),
        ("vector kind=tanh", "bad kind"),
        ("sync queue=load wait_later", "unknown token"),
        ("loop turns=1 turns=2", "given twice"),
    ],
)
def test_bad_lines_are_named(line: str, message: str) -> None:
    with pytest.raises(UserError, match=f"(?s)line 2.*{message}"):
        assemble("; a comment\n" + line)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("move_in rows=1 columns=5 dram=0", "bad columns"),
        ("move_in rows=40 columns=4 local=100", "bad local"),
        ("move_in rows=1 columns=4 dram=2", "multiple of dma_bytes"),
        ("move_in rows=1 columns=4 indexed=1", "no 2:4 unit"),
        ("matmul count=4 result=30", "bad result"),
        ("matmul count=4 sparse=1", "no 2:4 unit"),
        ("preload rows=5", "bad rows"),
        ("move_out rows=1 columns=4 stochastic=1", "no stochastic rounding"),
        ("reduce count=1 columns=5", "bad columns"),
        ("loop turns=2", "its loops before it"),
        ("config set=1 local=40\nloop turns=2\nmatmul count=1 set=1 local=90\nend", "bad local"),
    ],
)
def test_what_a_chip_cannot_do_is_an_error(lines: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(small(), assemble(lines + "\nhalt"))


def test_operands_of_one_bank_are_an_error() -> None:
    """With sums in place both are read in one cycle."""
    p = small(dataflow="os")
    check(p, assemble("matmul local=0 second=32 count=8\nhalt"))
    for second in (8, 28):
        with pytest.raises(UserError, match="within one bank"):
            check(p, assemble(f"matmul local=0 second={second} count=8\nhalt"))


def test_a_float_chip_has_no_tables() -> None:
    with pytest.raises(UserError, match="bad kind"):
        check(small(element="bf16"), assemble("vector kind=exp count=1\nhalt"))


def test_traces_have_every_instruction() -> None:
    p = small()
    program = random_program(p, 0)
    machine = Machine(p, program, random_memory(0))
    machine.run()
    found = json.loads(perfetto(p, timeline(p, program)))["traceEvents"][3:]
    spans = [(n + 1, *span) for n, lane in enumerate(machine.spans) for span in lane]
    for event, (lane, name, taken, posted) in zip(found, spans, strict=True):
        times = taken / p.clock, (posted - taken + 1) / p.clock
        assert (event["tid"], event["name"], event["ts"], event["dur"]) == (lane, name, *times)

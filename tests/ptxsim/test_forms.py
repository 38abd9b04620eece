"""Every form that the simulator knows, one line each in forms.txt, is parsed and decoded.

A run of registers is written by its ends there: {%r0 .. %r31}.
"""

from __future__ import annotations

import re
from pathlib import Path

from ptxsim import SimulationError
from ptxsim.decode import decode

TEXT = """.version 8.6
.target sm_90a
.address_size 64
.extern .shared .align 128 .b8 shared_bytes[];
.entry kernel(.param .align 64 .b8 argument[128]) .maxntid 128 {{
.reg .pred %p<9>; .reg .b16 %h<20>; .reg .b32 %r<300>; .reg .b64 %d<20>;
{line};
$L: ret; }}
"""
RUN = re.compile(r"%r(\d+) \.\. %r(\d+)")


def whole(line: str) -> str:
    """A line with its runs of registers written out."""
    return RUN.sub(lambda m: ", ".join(f"%r{n}" for n in range(int(m[1]), int(m[2]) + 1)), line)


def test_every_form_is_decoded() -> None:
    lines = (Path(__file__).parent / "forms.txt").read_text().splitlines()
    unknown = []
    for line in lines:
        try:
            decode(TEXT.format(line=whole(line)), 64)
        except SimulationError as error:
            unknown.append(f"{line}: {error}")
    assert len(lines) > 1500 and not unknown, unknown[:10]

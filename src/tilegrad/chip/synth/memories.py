"""Memories of a chip as cells of a library: what no open library has, by stated assumptions.

Invariant: everything here is an assumption and is called one in a report; a real chip takes the
figures of its memory compiler.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .liberty import EDGES
from .netlist import Netlist

# IHP's SRAM of 1024 x 64 bits at 130 nm has 263,946 um2: 4.03 a bit, here by the square to 180 nm.
AREA_PER_BIT = 4.03 * (180 / 130) ** 2


@dataclass(frozen=True)
class Memory:
    """What is assumed of a memory with a read and a write port."""

    access: float = 2.0  # ns from the clock to data
    setup: float = 0.3  # ns
    slew: float = 0.1  # ns of data
    load: float = 0.02  # pF of a pin
    area: float = AREA_PER_BIT  # um2 a bit


def sizes(kind: str) -> tuple[int, int]:
    """Rows and bits of a row, from the name of a memory's cell."""
    found = re.search(r"_(\d+)x(\d+)$", kind)
    assert found is not None, kind
    return int(found[1]), int(found[2])


def library_text(netlist: Netlist, memory: Memory) -> str:
    """A Liberty file with a cell for each kind of memory in a netlist."""
    known = netlist.memories()
    kinds = {
        i.kind: sorted(i.pins)
        for m in netlist.modules.values()
        for i in m.instances
        if i.kind in known
    }
    points = {"input_threshold": 50, "output_threshold": 50}
    points |= {"slew_lower_threshold": 20, "slew_upper_threshold": 80}
    thresholds = "\n".join(f"  {n}_pct_{e} : {v};" for n, v in points.items() for e in EDGES)
    cells = "\n".join(_cell(kind, pins, memory) for kind, pins in kinds.items())
    return f"""library (memories) {{
  comment : "assumptions, not of any process";
  time_unit : "1ns";
  voltage_unit : "1V";
  current_unit : "1uA";
  leakage_power_unit : "1nW";
  capacitive_load_unit (1, pf);
  nom_voltage : 1.8;
{thresholds}
{cells}
}}
"""


def _cell(kind: str, pins: list[str], m: Memory) -> str:
    rows, width = sizes(kind)
    made = [f"  cell ({kind}) {{", f"    area : {rows * width * m.area:.1f};"]
    clock = next(p for p in pins if p.startswith("clk"))
    for pin in pins:
        if pin == clock:
            made.append(
                f"    pin ({pin}) {{ direction : input; clock : true; capacitance : {m.load}; }}"
            )
        elif pin.startswith("q_"):
            names = ("cell_rise", "cell_fall", "rise_transition", "fall_transition")
            tables = tuple(zip(names, (m.access, m.access, m.slew, m.slew)))
            made.append(_pin(pin, "output", 0.0, clock, "rising_edge", tables))
        else:
            edges = (("rise_constraint", m.setup), ("fall_constraint", m.setup))
            made.append(_pin(pin, "input", m.load, clock, "setup_rising", edges))
    return "\n".join([*made, "  }"])


def _pin(
    pin: str,
    direction: str,
    load: float,
    clock: str,
    kind: str,
    tables: tuple[tuple[str, float], ...],
) -> str:
    given = " ".join(f'{name} (scalar) {{ values ("{value}"); }}' for name, value in tables)
    return (
        f"    pin ({pin}) {{ direction : {direction}; capacitance : {load};\n"
        f'      timing () {{ related_pin : "{clock}"; timing_type : {kind}; {given} }} }}'
    )


__all__ = ["Memory", "library_text", "sizes"]

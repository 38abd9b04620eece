"""OpenSTA beside our own timer, where it is installed. Invariant: the same netlist, libraries and
ideal clock, so a difference is a fault of one of the two."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from . import tools
from .timing import CLOCK


@dataclass(frozen=True)
class Checked:
    """What OpenSTA says: the shortest period in ns, and mW at the activity given."""

    period: float
    milliwatts: float | None
    version: str


def check(
    top: str, libraries: list[Path], folder: Path, megahertz: float, activity: float
) -> Checked:
    """Times `netlist.v` of a folder."""
    period = 1e3 / megahertz
    script = "\n".join(
        [
            *(f"read_liberty {path}" for path in libraries),
            "read_verilog netlist.v",
            f"link_design {top}",
            f"create_clock -name {CLOCK} -period {period} [get_ports {CLOCK}]",
            f"set_input_delay 0 -clock {CLOCK} [all_inputs]",
            f"set_output_delay 0 -clock {CLOCK} [all_outputs]",
            "report_checks -path_delay max -digits 6",
            f"set_power_activity -global -activity {activity} -duty 0.5",
            "report_power -digits 9",
            "",
        ]
    )
    (folder / "opensta.tcl").write_text(script, encoding="utf-8")
    command = [tools.needed("sta"), "-exit", "opensta.tcl"]
    said = tools.run(command, folder, folder / "opensta.log")
    slack = re.search(r"(-?[\d.]+)\s+slack", said)
    if slack is None:
        from ...core.errors import UserError

        raise UserError("OpenSTA found no path", op="chip synth", hint=str(folder / "opensta.log"))
    power = re.search(r"^Total\s.*?([\d.e+-]+)(?:\s+[\d.]+%)?\s*$", said, re.MULTILINE)
    version = re.search(r"OpenSTA (\S+)", said)
    return Checked(
        period - float(slack[1]),
        1e3 * float(power[1]) if power else None,
        version[1] if version else "",
    )


__all__ = ["Checked", "check"]

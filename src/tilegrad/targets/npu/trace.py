"""The queues of a run as a trace that Perfetto and chrome://tracing show.

Invariant: Trace Event JSON, times in microseconds at the chip's clock, a lane for each queue, one
event an instruction from when it is taken until it posts.
"""

from __future__ import annotations

import json

from .instructions import QUEUES, text
from .machine import Machine
from .parameters import Parameters
from .timing import Timeline


def perfetto(p: Parameters, made: Timeline) -> str:
    """The trace of a Timeline."""
    names = [[(text(e.word), e.taken, e.posted) for e in made.of(n)] for n in range(3)]
    return _json(p, names)


def machine_perfetto(machine: Machine) -> str:
    """The trace of a run of the register-level simulator."""
    return _json(machine.p, machine.spans)


def _json(p: Parameters, spans: list[list[tuple[str, int, int]]]) -> str:
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": 1, "tid": n + 1, "name": "thread_name", "args": {"name": name}}
        for n, name in enumerate(QUEUES)
    ]
    for number, lane in enumerate(spans):
        for line, taken, posted in lane:
            events.append(
                {
                    "ph": "X",
                    "pid": 1,
                    "tid": number + 1,
                    "name": line.split()[0],
                    "ts": taken / p.clock,
                    "dur": (posted - taken + 1) / p.clock,
                    "args": {"instruction": line, "cycle": taken},
                }
            )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"})

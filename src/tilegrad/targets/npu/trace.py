"""The queues of a run as a trace that Perfetto and chrome://tracing show.

Invariant: Trace Event JSON, times in microseconds at the chip's clock, a lane for each queue, one
event an instruction from when it is taken until it posts.
"""

from __future__ import annotations

import json

from .instructions import QUEUES, text
from .parameters import Parameters
from .timing import Queues


def perfetto(p: Parameters, made: Queues) -> str:
    """The trace of a timeline."""
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": 1, "tid": n + 1, "name": "thread_name", "args": {"name": name}}
        for n, name in enumerate(QUEUES)
    ]
    for number, lane in enumerate(made.events):
        for one in lane:
            events.append(
                {
                    "ph": "X",
                    "pid": 1,
                    "tid": number + 1,
                    "name": one.word.op,
                    "ts": one.taken / p.clock,
                    "dur": (one.posted - one.taken + 1) / p.clock,
                    "args": {"instruction": text(one.word), "cycle": one.taken},
                }
            )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"})

"""What stands for measuring on a GPU: seconds computed from a Plan, in this or another process."""

from __future__ import annotations

import json
import os
import time

from tilegrad.tune.measure import Timing

BEST = {"stages": 3, "group": 2, "early": False}


def seconds_of(plan: dict) -> float:
    """The further from BEST, the slower; tiles count for most."""
    seconds = 1e-5 + 1e-7 * abs(plan["stages"] - BEST["stages"])
    seconds += 1e-7 * abs(plan["group"].bit_length() - BEST["group"].bit_length())
    seconds += 1e-7 * (plan["early"] != BEST["early"]) + 2e-7 * (plan["together"] - 1)
    seconds += 1e-6 * (plan["split"] + plan["cluster"] - 2)
    return seconds + 1e-8 * abs(plan["tile"][1] - 128) + 1e-9 * abs(plan["programs"] - 128)


def timed(product, codes, number=0, rounds=5):
    """Timings of Plans that are their own code."""
    return [Timing(seconds_of(json.loads(c.code)), 1e-3) for c in codes]


def timed_with_trouble(product, codes, number=0, rounds=5):
    """The same, but of Plans with 6 stages some hang and some kill their process; where two
    pieces are staged at once, results are wrong."""
    for code in codes:
        plan = json.loads(code.code)
        if plan["stages"] == 6 and plan["group"] == 8 and not plan["early"]:
            time.sleep(60)
        if plan["stages"] == 6 and plan["group"] == 1:
            os._exit(3)
        if plan["together"] == 2:
            return [Timing(None, 0.5)]
    return timed(product, codes, number, rounds)

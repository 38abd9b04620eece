"""Several replicas' numbers as one server's: Prometheus text and the live view, summed.

Invariant: counts and sums are added; a share (of a cache) is the mean; facts are the first one's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(\{.*\})?\s+(\S+)")
SHARES = ("_perc", "_ratio", "_usage")
ADDED = ("running", "waiting", "most_running", "tokens_per_second", "prompt_tokens", "made_tokens")
MOST_REQUESTS = 256


def summed_metrics(texts: Sequence[str]) -> str:
    """One Prometheus text of several."""
    values: dict[str, float] = {}
    lines: list[str] = []  # comments, and places of samples in the order they came
    seen: set[str] = set()
    for text in texts:
        for line in text.splitlines():
            found = None if line.startswith("#") else SAMPLE.match(line)
            key = line if found is None else f"{found[1]}{found[2] or ''}"
            if found is not None:
                number = float(found[3])
                values[key] = _joined(found[1], values.get(key), number, len(texts))
            if key and key not in seen:
                seen.add(key)
                lines.append(key)
    return "".join(
        f"{key} {_text(values[key])}\n" if key in values else f"{key}\n" for key in lines
    )


def _joined(name: str, before: float | None, value: float, count: int) -> float:
    if name.endswith("_info") or name.endswith("_created"):
        return value if before is None else max(before, value)
    return (before or 0.0) + (value / count if name.endswith(SHARES) else value)


def _text(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)


def summed_live(views: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One live view of several; the slowest replica's step stands for all."""
    if not views:
        return {"state": "dead", "model": "", "requests": []}
    found = dict(views[0])
    for name in ADDED:
        found[name] = sum(view.get(name) or 0 for view in views)
    pages = [view.get("pages") or {} for view in views]
    found["pages"] = {n: sum(one.get(n) or 0 for one in pages) for n in ("used", "all")}
    slowest = max(views, key=lambda view: view.get("step_seconds") or 0.0)
    for name in ("step_seconds", "roofline_seconds"):
        found[name] = slowest.get(name)
    found["seconds"] = max(view.get("seconds") or 0.0 for view in views)
    found["restarts"] = sum(view.get("restarts") or 0 for view in views)
    found["requests"] = [
        {**one, "id": f"{number}/{one.get('id')}"}
        for number, view in enumerate(views)
        for one in view.get("requests") or ()
    ][:MOST_REQUESTS]
    return found


__all__ = ["summed_live", "summed_metrics"]

"""What a load measured: latencies by percentile, rates, goodput, errors.

TTFT is the time to the first token, TPOT that of a token after it, ITL the gap between two parts
of a stream (one part may bring several tokens), E2E the whole. Invariant: only requests that ended
well count in latencies, tokens and rates; the others are counted by their error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...core.errors import UserError
from .load_run import Result
from .reply import Reply

PERCENTILES = (50, 90, 99)
LATENCIES = ("ttft", "tpot", "itl", "e2e")
MOST_ERRORS = 10  # kinds that are shown


def summed_up(result: Result, limits: Mapping[str, float] | None = None) -> dict[str, Any]:
    """The numbers of a load; `limits` (seconds by latency) say which requests are good."""
    good = [reply for reply in result.replies if not reply.error]
    values = latencies(good)
    seconds = result.seconds or float("nan")
    prompt, answer = (sum(getattr(r, n) for r in good) for n in ("prompt_tokens", "answer_tokens"))
    found: dict[str, Any] = {
        "requests": len(result.replies),
        "completed": len(good),
        "failed": len(result.replies) - len(good),
        "seconds": result.seconds,
        "most_at_once": result.most_at_once,
        "late_seconds": result.late,
        "prompt_tokens": prompt,
        "cached_tokens": sum(reply.cached_tokens for reply in good),
        "answer_tokens": answer,
        "short_answers": sum(reply.answer_tokens < reply.asked_tokens for reply in good),
        "tokens_counted_by": counted_by(good),
        "requests_per_second": len(good) / seconds if good else 0.0,
        "answer_tokens_per_second": answer / seconds if good else 0.0,
        "total_tokens_per_second": (prompt + answer) / seconds if good else 0.0,
        **{f"{name}_ms": spread(values[name]) for name in LATENCIES},
        "errors": errors_of(result.replies),
        "notes": result.notes,
    }
    if limits:
        fine = sum(is_within(reply, limits) for reply in good)
        found["goodput"] = {
            "limits_ms": {name: 1e3 * limit for name, limit in limits.items()},
            "requests": fine,
            "share": fine / len(result.replies) if result.replies else 0.0,
            "requests_per_second": fine / seconds if fine else 0.0,
        }
    return found


def latencies(good: Sequence[Reply]) -> dict[str, list[float]]:
    """Every latency in seconds, by its name."""
    return {
        "ttft": [reply.first for reply in good],
        "tpot": [value for reply in good if (value := reply.per_token) is not None],
        "itl": [gap for reply in good for gap in reply.gaps],
        "e2e": [reply.whole for reply in good],
    }


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles in milliseconds; None where there is nothing to count."""
    if not seconds:
        return None
    values = 1e3 * np.asarray(seconds)
    found = {"mean": float(values.mean())}
    return found | {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}


def counted_by(good: Sequence[Reply]) -> str:
    """Who counted the tokens of answers."""
    counted = sum(reply.counted for reply in good)
    if counted == len(good):
        return "the endpoint's usage"
    return "parts of the stream" if not counted else "usage, or parts where there was none"


def errors_of(replies: Sequence[Reply]) -> list[dict[str, Any]]:
    """Errors by what they said, the most frequent first; `others` are no longer told apart."""
    counts = Counter(reply.error for reply in replies if reply.error)
    shown = [{"error": text, "count": n} for text, n in counts.most_common(MOST_ERRORS)]
    rest = counts.total() - sum(row["count"] for row in shown)  # type: ignore[misc]
    return shown + ([{"error": "others", "count": rest}] if rest else [])


def is_within(reply: Reply, limits: Mapping[str, float]) -> bool:
    """Whether a request kept all limits; an answer of one token has no TPOT to keep."""
    own = {"ttft": reply.first, "tpot": reply.per_token or 0.0, "e2e": reply.whole}
    return all(own[name] <= limit for name, limit in limits.items())


def limits_of(text: str) -> dict[str, float]:
    """Limits in seconds from "ttft:200,tpot:50" (milliseconds)."""
    found = {}
    for part in filter(None, text.split(",")):
        name, _, number = part.partition(":")
        try:
            limit = float(number)
        except ValueError:
            limit = -1.0
        if name not in ("ttft", "tpot", "e2e") or not limit > 0:
            raise UserError(
                "bad limit of goodput",
                op="bench serve",
                expected="ttft:MS, tpot:MS or e2e:MS, with commas between",
                got=part,
            )
        found[name] = limit / 1e3
    return found


__all__ = ["LATENCIES", "latencies", "limits_of", "summed_up"]

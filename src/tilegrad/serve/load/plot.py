"""A load as one SVG: answer tokens a second over time, and each latency by its share of requests.

Written by hand, so that no package for plots is needed; colours follow the reader's light or dark
setting. Invariant: all text that comes from outside is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from ...core.svg import nice, path, short, words
from .load_run import Result
from .reply import Reply
from .summary import LATENCIES, latencies

WIDTH, PANEL, GAP, LEFT, TOP = 880, 150, 58, 58, 84
NAMES = {
    "ttft": "time to first token, ms",
    "tpot": "time per token after it, ms",
    "itl": "gap between parts, ms",
    "e2e": "whole request, ms",
}
POINTS = 200  # of a curve
BINS = 60
STYLE = """
svg{background:#fff;font:12px system-ui,sans-serif}text{fill:#333}
.head{font-size:16px;font-weight:600}
.soft{fill:#777}.grid{stroke:#ddd}.line{fill:none;stroke:#2563eb;stroke-width:2}
.area{fill:#2563eb;fill-opacity:.16}.many{fill:none;stroke:#d97706;stroke-width:1.5}
.mark{stroke:#d97706;stroke-dasharray:3 3}.orange{fill:#b45309}.blue{fill:#1d4ed8}
@media(prefers-color-scheme:dark){svg{background:#111418}text{fill:#e5e7eb}.soft{fill:#9ca3af}
.grid{stroke:#2b3138}
.line{stroke:#60a5fa}.area{fill:#60a5fa}.orange{fill:#fbbf24}.blue{fill:#93c5fd}}
"""


def plotted(result: Result, summary: dict[str, Any], title: str) -> str:
    """The SVG of a load."""
    good = [reply for reply in result.replies if not reply.error]
    rows = 1 + (len(LATENCIES) + 1) // 2
    height = TOP + rows * (PANEL + GAP)
    rate, failed = summary["answer_tokens_per_second"], summary["failed"]
    line = (
        f"{summary['completed']} of {summary['requests']} requests in {summary['seconds']:.2f} s, "
        f"{rate:,.0f} answer tokens/s" + (f", {failed} failed" if failed else "")
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        words(20, 28, title, "head"),
        words(20, 48, line, "soft"),
        timeline(good, LEFT, TOP, WIDTH - LEFT - 40, PANEL),
    ]
    half = (WIDTH - 2 * LEFT - 40) // 2
    values = latencies(good)
    for number, name in enumerate(LATENCIES):
        x = LEFT + (number % 2) * (half + LEFT)
        y = TOP + (1 + number // 2) * (PANEL + GAP)
        parts.append(shares([1e3 * v for v in values[name]], NAMES[name], x, y, half, PANEL))
    return "\n".join(part for part in parts if part) + "\n</svg>\n"


# ---- panels -------------------------------------------------------------------------------------


def timeline(good: Sequence[Reply], x: float, y: float, width: float, height: float) -> str:
    """Tokens a second and requests at once, over the seconds of the load."""
    if not good:
        return words(x, y + height / 2, "no request ended well", "soft")
    start = min(reply.begun for reply in good)
    seconds = max(max(reply.end for reply in good) - start, 1e-9)
    moments = np.concatenate([np.asarray(reply.parts) for reply in good]) - start
    weights = np.concatenate(
        [np.full(len(r.parts), r.answer_tokens / max(1, len(r.parts))) for r in good]
    )
    counts, edges = np.histogram(moments, BINS, (0.0, seconds), weights=weights)
    rates = counts / (seconds / BINS)
    middles = (edges[:-1] + edges[1:]) / 2
    busy = [sum(r.begun - start <= t <= r.end - start for r in good) for t in middles]
    most, crowd = nice(float(rates.max())), nice(float(max(busy)))
    points = [
        (x + width * t / seconds, y + height * (1 - v / most)) for t, v in zip(middles, rates)
    ]
    line = [(x + width * t / seconds, y + height * (1 - v / crowd)) for t, v in zip(middles, busy)]
    floor = [(points[-1][0], y + height), (points[0][0], y + height)]
    return "\n".join(
        [
            words(x, y - 8, "answer tokens a second", "blue"),
            words(x + width, y - 8, "requests at once", "orange", "end"),
            *grid(x, y, width, height, (0.0, seconds), (0.0, most), "seconds"),
            *[
                words(x + width + 4, y + height * (1 - i / 4) + 4, short(crowd * i / 4), "orange")
                for i in range(5)
            ],
            f'<polygon class="area" points="{path(points + floor)}"/>',
            f'<polyline class="line" points="{path(points)}"/>',
            f'<polyline class="many" points="{path(line)}"/>',
        ]
    )


def shares(
    values: Sequence[float], name: str, x: float, y: float, width: float, height: float
) -> str:
    """Which share of the values is at most so large, with p50, p90 and p99."""
    if not values:
        return words(x, y - 8, name) + words(x, y + height / 2, "nothing to count", "soft")
    ordered = np.sort(np.asarray(values))
    most = nice(float(ordered[-1]))
    ranks = np.unique(np.linspace(0, len(ordered) - 1, POINTS).astype(int))
    curve = [
        (x + width * ordered[i] / most, y + height * (1 - (i + 1) / len(ordered))) for i in ranks
    ]
    marks = []
    for percent in (50, 90, 99):
        value = float(np.percentile(ordered, percent))
        place = x + width * value / most
        top = y + height * (1 - percent / 100)
        marks.append(
            f'<line class="mark" x1="{place:.1f}" x2="{place:.1f}" y1="{top:.1f}" '
            f'y2="{y + height}"/>'
        )
    told = "   ".join(f"p{p} {short(float(np.percentile(ordered, p)))}" for p in (50, 90, 99))
    return "\n".join(
        [
            words(x, y - 8, name),
            words(x + width, y - 8, told, "orange", "end"),
            *grid(x, y, width, height, (0.0, most), (0.0, 100.0), ""),
            f'<polyline class="line" points="{path(curve)}"/>',
            *marks,
        ]
    )


def grid(
    x: float,
    y: float,
    width: float,
    height: float,
    across: tuple[float, float],
    up: tuple[float, float],
    unit: str,
) -> list[str]:
    """Lines and numbers of a panel."""
    found = []
    for i in range(5):
        top, place = y + height * (1 - i / 4), x + width * i / 4
        found.append(f'<line class="grid" x1="{x}" x2="{x + width}" y1="{top}" y2="{top}"/>')
        found.append(words(x - 6, top + 4, short(up[1] * i / 4), "soft", "end"))
        text = short(across[1] * i / 4) + (f" {unit}" if unit and i == 4 else "")
        found.append(words(place, y + height + 16, text, "soft", "middle" if i < 4 else "end"))
    return found


__all__ = ["plotted"]

"""Pieces of pictures as SVG text: words, points, ends of axes, short numbers.

Invariant: text that comes from outside is escaped; nothing is needed to draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape


def words(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    """A line of text."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def line(x1: float, y1: float, x2: float, y2: float, kind: str = "grid") -> str:
    """A straight line."""
    return f'<line class="{kind}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def box(x: float, y: float, width: float, height: float, kind: str, hint: str = "") -> str:
    """A rectangle, with words for who points at it."""
    told = f"<title>{escape(hint)}</title>" if hint else ""
    sizes = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect class="{kind}" {sizes} rx="3">{told}</rect>'


def dot(x: float, y: float, radius: float, kind: str, hint: str = "") -> str:
    """A circle, with words for who points at it."""
    told = f"<title>{escape(hint)}</title>" if hint else ""
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}">{told}</circle>'


def path(points: Sequence[tuple[float, float]]) -> str:
    """Points as SVG writes them."""
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in points)


def nice(most: float) -> float:
    """A round number not below `most`, for the end of an axis."""
    if not most > 0:
        return 1.0
    step = 10.0 ** math.floor(math.log10(most))
    return next(n * step for n in (1, 2, 4, 6, 8, 10) if n * step >= most)


def decades(low: float, high: float) -> list[float]:
    """Powers of ten around two numbers, for an axis of logarithms."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    return [10.0**e for e in range(first, max(last, first + 1) + 1)]


def ticks(low: float, high: float) -> list[float]:
    """Ones, twos and fives around two numbers, for a short axis of logarithms."""
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    every = [n * 10.0**e for e in powers for n in (1, 2, 5)]
    first = max(n for n, v in enumerate(every) if v <= low * (1 + 1e-9))
    last = min(n for n, v in enumerate(every) if v >= high * (1 - 1e-9))
    return every[first : max(last, first + 1) + 1]


def short(value: float) -> str:
    """A number in few letters."""
    for scale, mark in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= scale:
            return f"{value / (1e3 if mark == 'k' else scale):,.3g}{mark}"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def picture(width: float, height: float, title: str, style: str, parts: Sequence[str]) -> str:
    """A whole picture."""
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    body = "\n".join(part for part in parts if part)
    return f"{head}\n<title>{escape(title)}</title><style>{style}</style>\n{body}\n</svg>\n"


__all__ = ["box", "decades", "dot", "line", "nice", "path", "picture", "short", "ticks", "words"]

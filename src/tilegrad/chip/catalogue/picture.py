"""Predictions as a picture (SVG) and as a page (one HTML file that needs nothing else).

Invariant: all text that comes from outside is escaped; nothing is loaded from elsewhere; colours
follow the reader's light or dark setting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from html import escape

from ...core.svg import box, decades, line, path, picture, short, words
from .figure import FIELDS, Chip
from .predict import Assumptions, Prediction, Sizes, rates

Found = Sequence[tuple[Chip, Sequence[Prediction]]]
WIDTH, LEFT, ROW = 920, 104, 24
BARS = WIDTH - LEFT - 330  # what is left for the words behind a bar
COLOURS = 8
STYLE = """
svg{font:12px system-ui,sans-serif;background:#fff}text{fill:#1b1f24}.soft{fill:#667079}
.head{font-size:16px;font-weight:600}.sub{font-size:13px;font-weight:600}
.grid{stroke:#e3e6e9}.bar{fill:#0d9488}.phase{stroke:#98a2ad;stroke-dasharray:4 3}
.roof{fill:none;stroke-width:2}.r0{stroke:#0d9488}.r1{stroke:#c77700}.r2{stroke:#6d5bd0}
.r3{stroke:#2f74c8}.r4{stroke:#b8475f}.r5{stroke:#5c7a29}.r6{stroke:#8a6d3b}.r7{stroke:#71808d}
@media(prefers-color-scheme:dark){svg{background:#15181c}text{fill:#e8eaed}.soft{fill:#98a2ad}
.grid{stroke:#2c3138}.bar{fill:#2dd4bf}.r0{stroke:#2dd4bf}.r1{stroke:#f0a840}.r2{stroke:#a99bff}
.r3{stroke:#74b2f7}.r4{stroke:#f08aa0}.r5{stroke:#a8cf6a}.r6{stroke:#d6b67c}.r7{stroke:#93a1ae}}
"""
PAGE = """
:root{color-scheme:light dark;font:15px/1.5 system-ui,sans-serif}
body{max-width:960px;margin:0 auto;padding:1.2rem;background:#fff;color:#1b1f24}
svg{max-width:100%;height:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;
font-size:.88rem}
td,th{padding:.15rem .7rem .15rem 0;text-align:right;border-bottom:1px solid #e3e6e9}
td.l,th.l{text-align:left}th{font-weight:600}.wide{overflow-x:auto}h1{font-size:1.3rem}
h2{font-size:1.05rem;margin:1.4rem 0 .4rem}details{margin:.3rem 0}summary{cursor:pointer}
p.soft{color:#667079;font-size:.88rem}
td{white-space:nowrap}
@media(prefers-color-scheme:dark){body{background:#15181c;color:#e8eaed}td,th{border-color:#2c3138}
p.soft{color:#98a2ad}}
"""


def number(value: float | None) -> str:
    """Three digits that matter; a dash for what is not known."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def titled(model: str, sizes: Sizes, found: Found) -> str:
    """What was asked, in a line."""
    title = f"{model}, {sizes.dtype}, batch {sizes.batch}: predicted"
    if unit_of(found) == "inputs":
        return title
    return title + f"; prompts of {sizes.tokens}, decoding at {sizes.context} keys"


def unit_of(found: Found) -> str:
    """What is counted: tokens, or inputs of a network that has none."""
    return "tokens" if any(p.phase == "decode" for _, some in found for p in some) else "inputs"


def phase_name(phase: str, found: Found) -> str:
    """A phase as a reader knows it."""
    return "forward" if phase == "prefill" and unit_of(found) == "inputs" else phase


def marks(p: Prediction) -> str:
    """Signs of what `notes` says."""
    return (
        ("*" if p.link_seconds is None else "")
        + ("^" if p.sparse else "")
        + ("" if p.bounded else "+")
    )


def notes(found: Found) -> list[str]:
    """What the signs mean, of those that are used."""
    every = [p for _, some in found for p in some]
    said = []
    if any(p.link_seconds is None for p in every):
        said.append("* without the time of links between chips: no figure is known")
    if any(p.sparse for p in every):
        said.append("^ at a peak that is published for sparse values alone")
    if not all(p.bounded for p in every):
        said.append("+ the size of the memory is not known: taken to hold the model")
    return said


# ---- the picture --------------------------------------------------------------------------------


def plotted(model: str, sizes: Sizes, found: Found) -> str:
    """Tokens a second of each chip and phase as bars, and all roofs in one roofline."""
    phases = [p.phase for p in found[0][1]]
    parts = [words(20, 28, titled(model, sizes, found), "head")]
    y = 58.0
    for number_of, phase in enumerate(phases):
        rows = [(chip, some[number_of]) for chip, some in found]
        parts += _bars(rows, f"{phase_name(phase, found)}: {unit_of(found)} a second", y)
        y += 30 + ROW * len(rows)
    parts += _roofs(found, sizes, y + 4)
    y += 330
    for note in notes(found):
        parts.append(words(20, y, note, "soft"))
        y += 18
    return picture(WIDTH, y + 6, titled(model, sizes, found), STYLE, parts)


def _bars(rows: Sequence[tuple[Chip, Prediction]], title: str, y: float) -> list[str]:
    most = max(p.tokens_per_second for _, p in rows)
    parts = [words(20, y, title, "sub")]
    for place, (chip, p) in enumerate(rows):
        top = y + 10 + ROW * place
        long = max(BARS * p.tokens_per_second / most, 1.5)
        cost = "" if p.dollars_per_million is None else f", {number(p.dollars_per_million)} $/M"
        several = "" if p.chips == 1 else f", {p.chips} chips ({p.parallelism})"
        told = f"{number(p.tokens_per_second)}{cost}{several}{marks(p)}"
        parts.append(words(LEFT - 8, top + 14, chip.name[:14], "", "end"))
        parts.append(box(LEFT, top + 2, long, ROW - 7, "bar", f"{chip.title}: {told}"))
        parts.append(words(LEFT + long + 7, top + 14, told, "soft"))
    return parts


def _roofs(found: Found, sizes: Sizes, top: float) -> list[str]:
    """FLOP/s of one chip by FLOP a byte, and where the phases of the model lie."""
    peaks = [rates(chip, sizes.dtype, Assumptions()) for chip, _ in found]
    marked = {p.phase: _intensity(p) for p in found[0][1]}
    ridges = [compute / read for compute, read in peaks]
    across = decades(min([*ridges, *marked.values()]) / 2, max([*ridges, *marked.values()]) * 2)
    up = decades(min(peak for peak, _ in peaks) / 30, max(peak for peak, _ in peaks))
    left, right, bottom = LEFT, WIDTH - 190, top + 264

    def x(value: float) -> float:
        share = math.log10(value / across[0]) / math.log10(across[-1] / across[0])
        return left + (right - left) * share

    def y(value: float) -> float:
        return bottom - (bottom - top - 26) * math.log10(value / up[0]) / math.log10(up[-1] / up[0])

    parts = [words(20, top, "rooflines of one chip: FLOP/s by FLOP for each byte", "sub")]
    parts += [line(x(v), top + 26, x(v), bottom) for v in across]
    parts += [words(x(v), bottom + 16, short(v), "soft", "middle") for v in across]
    parts += [line(left, y(v), right, y(v)) for v in up]
    parts += [words(left - 6, y(v) + 4, short(v), "soft", "end") for v in up]
    for place, (phase, value) in enumerate(marked.items()):
        parts.append(line(x(value), top + 22, x(value), bottom, "phase"))
        name = phase_name(phase, found)
        parts.append(words(x(value), bottom + 32 + 14 * place, name, "", "middle"))
    for place, ((chip, _), (compute, read)) in enumerate(zip(found, peaks)):
        kind = f"r{place % COLOURS}"
        start = max(across[0], up[0] / read)
        roof = [(x(start), y(start * read)), (x(compute / read), y(compute))]
        parts.append(
            f'<polyline class="roof {kind}" points="{path([*roof, (right, y(compute))])}"/>'
        )
        parts.append(
            line(
                right + 14, top + 30 + 18 * place, right + 36, top + 30 + 18 * place, f"roof {kind}"
            )
        )
        parts.append(words(right + 42, top + 34 + 18 * place, chip.name[:18]))
    return parts


def _intensity(p: Prediction) -> float:
    """FLOP for each byte of all products of a phase."""
    flops = sum(row.count * row.flops for row in p.rows)
    return flops / sum(row.count * row.moved for row in p.rows)


# ---- the page -----------------------------------------------------------------------------------


def page(model: str, sizes: Sizes, found: Found) -> str:
    """One HTML file: the picture, the table, every figure with its source, what is assumed."""
    title = escape(titled(model, sizes, found))
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title><style>{PAGE}</style></head><body>",
        f"<h1>{title}</h1>",
        '<p class="soft">By rooflines of the products in the Graph of the model. Launches, waiting '
        "and queues are not in it: good software comes near these numbers from below.</p>",
        plotted(model, sizes, found),
        "<h2>Numbers</h2>",
        _numbers(found),
        *(f'<p class="soft">{escape(note)}</p>' for note in notes(found)),
        "<h2>Figures of the chips</h2>",
        *(_figures(chip) for chip, _ in found),
        "<h2>Assumed where nothing was measured</h2>",
        _assumed(),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """A table whose first columns are words."""

    def cells(kind: str, row: Sequence[str]) -> str:
        made = (
            f"<{kind}{' class=l' if n < left else ''}>{escape(text)}</{kind}>"
            for n, text in enumerate(row)
        )
        return f"<tr>{''.join(made)}</tr>"

    body = "".join(cells("td", row) for row in rows)
    return f'<div class="wide"><table>{cells("th", head)}{body}</table></div>'


def columns(found: Found) -> list[str]:
    """Heads of the table of numbers."""
    unit = unit_of(found)
    return ["chip", "phase", "bound", "shared", "chips", f"{unit}/s", f"$/M {unit}", "J each"]


def cells(found: Found) -> list[list[str]]:
    """Rows of the table of numbers."""
    rows = []
    for chip, some in found:
        for p in some:
            values = (p.tokens_per_second, p.dollars_per_million, p.joules_per_token)
            name = phase_name(p.phase, found)
            rows.append(
                [
                    chip.name,
                    name,
                    p.bound + marks(p),
                    str(p.parallelism),
                    str(p.chips),
                    *map(number, values),
                ]
            )
    return rows


def _numbers(found: Found) -> str:
    return _table(columns(found), cells(found), 4)


def _figures(chip: Chip) -> str:
    rows = [
        [
            field,
            number(figure.value),
            FIELDS[field].unit,
            figure.kind,
            figure.source,
            figure.date,
            figure.note,
        ]
        for field, figure in chip.figures.items()
    ]
    head = ["field", "value", "unit", "kind", "source", "date", "note"]
    made = _table(head, rows, 0).replace("<td>", '<td class="l">').replace("<th>", '<th class="l">')
    return f"<details><summary>{escape(chip.title)}</summary>{made}</details>"


def _assumed() -> str:
    assumed = Assumptions()
    rows = [[f.name.replace("_", " "), f"{getattr(assumed, f.name):g}"] for f in fields(assumed)]
    return _table(["what", "value"], rows, 1)


__all__ = ["cells", "columns", "notes", "number", "page", "phase_name", "plotted", "titled"]

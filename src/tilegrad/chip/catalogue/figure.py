"""A chip as data: figures with their unit, what they count, where they were read and when.

Invariant: what nobody published is absent, not guessed; a figure's value lies within the bounds of
its field, or a UserError names the field, the bound and what would fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ...core.errors import UserError
from ...core.parameter_file import read_parameters
from ...targets.npu.parameters import Parameters
from ..estimate import areas, bandwidth, doubles, prunes


class Field(NamedTuple):
    """A field of a chip: its unit, how many of the base unit that is, bounds, and its meaning."""

    unit: str
    scale: float
    low: float
    high: float
    meaning: str


FIELDS = {
    "bf16": Field("TFLOP/s", 1e12, 1e-6, 1e7, "peak of 16-bit floats, 32-bit sums"),
    "fp8": Field("TFLOP/s", 1e12, 1e-6, 1e7, "peak of 8-bit floats"),
    "int8": Field("TOP/s", 1e12, 1e-6, 1e7, "peak of 8-bit integers"),
    "fp4": Field("TFLOP/s", 1e12, 1e-6, 1e7, "peak of 4-bit floats"),
    "memory": Field("GB", 1e9, 1e-6, 1e6, "bytes beside the chip, or on it where it has no other"),
    "bandwidth": Field("TB/s", 1e12, 1e-6, 1e6, "of that memory"),
    "power": Field("W", 1.0, 1e-3, 1e6, "design power of one chip"),
    "link": Field("GB/s", 1e9, 1e-3, 1e6, "to other chips, all links, one way"),
    "area": Field("mm2", 1.0, 1e-3, 1e5, "of the die"),
    "price": Field("$/h", 1.0, 1e-4, 1e5, "rent of one chip"),
    "bf16_measured": Field("TFLOP/s", 1e12, 1e-6, 1e7, "the most a large product reached"),
    "bandwidth_measured": Field("TB/s", 1e12, 1e-6, 1e6, "the most that reading reached"),
}
NPU = {"preset", "rows", "columns", "dataflow"}  # fields that say so
KINDS = ("dense", "sparse", "")  # sparse: the figure holds for 2:4 or other zeros alone


@dataclass(frozen=True)
class Figure:
    """One number of a chip, in the unit of its field."""

    value: float
    source: str
    date: str
    kind: str = ""
    note: str = ""


@dataclass(frozen=True)
class Chip:
    """A chip: a name and its figures."""

    name: str
    title: str
    figures: dict[str, Figure]

    def __post_init__(self) -> None:
        for field, figure in self.figures.items():
            check_figure(self.name, field, figure)

    def get(self, field: str) -> float | None:
        """A figure in base units (FLOP/s, bytes, bytes/s, W, $/h); None where it is not known."""
        figure = self.figures.get(field)
        return None if figure is None else figure.value * FIELDS[field].scale

    def priced(self, dollars: float) -> Chip:
        """The same at another price an hour."""
        figure = Figure(dollars, "given", "")
        return replace(self, figures={**self.figures, "price": figure})

    def need(self, field: str) -> float:
        """The same, where a prediction cannot do without."""
        found = self.get(field)
        if found is None:
            raise UserError(
                f"{self.name} has no figure for {field}",
                op="chip",
                expected=f"{FIELDS[field].meaning}, in {FIELDS[field].unit}",
                got=f"figures for {', '.join(self.figures)}",
            )
        return found


def check_figure(name: str, field: str, figure: Figure) -> None:
    """Raise unless a figure is of a known field and within its bounds."""
    if field not in FIELDS:
        raise UserError(
            f"unknown field {field!r} of chip {name}", op="chip", expected=", ".join(FIELDS)
        )
    known, value = FIELDS[field], figure.value
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not known.low <= value <= known.high:
        fit = f"{min(max(value, known.low), known.high):g} would fit" if number else None
        raise UserError(
            f"bad {field} of chip {name}",
            op="chip",
            expected=f"a number from {known.low:g} to {known.high:g} {known.unit} "
            f"({known.meaning})",
            got=value,
            hint=fit if value == value else None,
        )
    if figure.kind not in KINDS:
        raise UserError(
            f"bad kind of {field} of chip {name}",
            op="chip",
            expected="dense or sparse",
            got=figure.kind,
        )


def load_chip(path: str | Path) -> Chip:
    """A chip of a file: numbers by field, or tables with value, source, date, kind and note.

    `bf16 = 100` or `[bf16]` with `value = 100`, `source = "..."`. A number's source is the file.
    A file with the parameters of an NPU is a chip too: its peak and bandwidth follow.
    """
    given = read_parameters(path)
    if NPU & set(given):
        return npu_chip(Parameters.of(given, Path(path).stem), str(path))
    name = str(given.pop("name", Path(path).stem))
    title = str(given.pop("title", name))
    figures = {}
    for field, value in given.items():
        figures[field] = _figure(name, field, value, str(path))
    for field in ("bf16", "bandwidth", "memory"):
        if field not in figures:
            known = FIELDS[field]
            raise UserError(
                f"chip {name} lacks {field}",
                op="chip",
                expected=f"{field} = a number from {known.low:g} to {known.high:g} {known.unit}",
                got=f"fields {', '.join(figures) or 'none'}",
            )
    return Chip(name, title, figures)


def npu_chip(p: Parameters, source: str) -> Chip:
    """An NPU under design as a chip: what its record says; how large its DRAM is, it does not."""
    element = "bf16" if p.floating else p.element  # 16-bit floats
    macs = p.peak_macs * (2 if prunes(p) else 1)  # of weights as wide as the element
    peak = 2e6 * p.clock * macs / FIELDS[element].scale
    kind, note = ("sparse", "a 2:4 unit") if prunes(p) else ("dense", "")
    if doubles(p):
        note = f"twice that in programs with weights of {p.weights}"
    figures = {
        element: Figure(peak, source, "", kind, note),
        "bandwidth": Figure(bandwidth(p) / FIELDS["bandwidth"].scale, source, ""),
        "area": Figure(sum(areas(p).values()), source, "", note="estimated, 45 nm"),
    }
    return Chip(p.name, f"{p.name}: {p.rows} x {p.columns} {p.element}", figures)


def _figure(name: str, field: str, value: Any, path: str) -> Figure:
    if not isinstance(value, Mapping):
        return Figure(value, path, "")
    unknown = set(value) - {"value", "source", "date", "kind", "note"}
    if unknown or "value" not in value:
        raise UserError(
            f"bad {field} of chip {name}",
            op="chip",
            expected="value, and source, date, kind, note",
            got=", ".join(value),
        )
    rest = {key: str(value.get(key, "")) for key in ("date", "kind", "note")}
    return Figure(value["value"], str(value.get("source", path)), **rest)


__all__ = ["FIELDS", "Chip", "Field", "Figure", "check_figure", "load_chip"]

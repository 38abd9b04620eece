"""An Accelerator as the explorer sees it: memory Levels from the outside in, then multipliers.

A Level has a size, bandwidth, energy and how many of the next Level hang below each of it.
Invariant: an Accelerator is whole and consistent; what is missing or out of bounds is a UserError
that names the field, its bound and what would fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ...core.errors import UserError
from ...core.parameter_file import read_parameters

SHARING = ("none", "equal", "halo")
NAMES = ("weights", "inputs", "outputs")
LARGEST = 1e18


@dataclass(frozen=True)
class Level:
    """One memory: energies in pJ a word of `word_bits`, bandwidths in words a cycle of one.

    `sharing` says what a word read for several Levels below costs: `none`, one read each; `equal`,
    one read for tiles that are equal (multicast; results are added on the way up); `halo`, each
    word that is new to the array below is read once (neighbours pass on what they share).
    """

    name: str
    bytes: float | None = None  # None: without bound
    keeps: tuple[str, ...] = NAMES
    skips: tuple[str, ...] = ()  # of those, what a Mapping may bring past it
    streams: str = ""  # loops of which it holds one turn at a time: a row that slides past
    read: float = 0.0
    write: float = 0.0
    leak: float = 0.0  # pJ a cycle
    network: float = 0.0  # pJ a word brought to or from a Level below
    word_bits: int = 16
    read_bandwidth: float | None = None
    write_bandwidth: float | None = None
    columns: int = 1  # of the array below
    rows: int = 1
    sharing: str = "equal"
    double: bool = False  # holds the next tile beside this one
    area: float = 0.0  # mm2

    def __post_init__(self) -> None:
        for name, low in (("columns", 1), ("rows", 1), ("word_bits", 1)):
            _bounded(self, name, low, 1 << 24, whole=True)
        for name in ("read", "write", "leak", "network", "area"):
            _bounded(self, name, 0.0, LARGEST)
        for name in ("bytes", "read_bandwidth", "write_bandwidth"):
            if getattr(self, name) is not None:
                _bounded(self, name, 1e-9, LARGEST)
        if self.sharing not in SHARING:
            raise _bad(self.name, "sharing", f"one of {', '.join(SHARING)}", self.sharing)
        if set(self.keeps) - set(NAMES):
            raise _bad(self.name, "keeps", f"some of {', '.join(NAMES)}", self.keeps)
        if set(self.skips) - set(self.keeps):
            raise _bad(self.name, "skips", f"some of {', '.join(self.keeps)}", self.skips)

    @property
    def fanout(self) -> int:
        """How many of the next Level hang below one."""
        return self.columns * self.rows


@dataclass(frozen=True)
class Accelerator:
    """Levels from the outermost in; below the last are the multipliers."""

    name: str
    levels: tuple[Level, ...]
    mac: float = 1.0  # pJ
    mac_area: float = 0.0  # mm2
    mac_leak: float = 0.0  # pJ a cycle
    clock: float = 1e9  # Hz
    macs_a_cycle: float = 1.0  # of one multiplier: 2 for a 2:4 unit on pruned weights
    inside: tuple[str, ...] = ()  # Operands that layers run together keep: the first Level that
    # keeps one has its place apart, and no Level above it

    def __post_init__(self) -> None:
        if not self.levels:
            raise _bad(self.name, "levels", "at least one", "none")
        missing = set(NAMES) - set(self.levels[0].keeps) - set(self.inside)
        if missing or self.levels[0].bytes is not None:
            raise _bad(
                f"{self.name}.{self.levels[0].name}",
                "keeps" if missing else "bytes",
                "the outermost Level keeps all Operands, without bound",
                self.levels[0].keeps if missing else self.levels[0].bytes,
            )
        if len({level.name for level in self.levels}) < len(self.levels):
            raise _bad(self.name, "levels", "names that differ", [v.name for v in self.levels])
        for name in ("mac", "mac_area", "mac_leak"):
            _bounded(self, name, 0.0, LARGEST)
        for name in ("clock", "macs_a_cycle"):
            _bounded(self, name, 1e-9, LARGEST)

    @property
    def multipliers(self) -> int:
        """Multipliers of the whole array."""
        found = 1
        for level in self.levels:
            found *= level.fanout
        return found

    def area(self) -> float:
        """mm2 of all Levels and multipliers."""
        total, instances = 0.0, 1
        for level in self.levels:
            total += instances * level.area
            instances *= level.fanout
        return total + instances * self.mac_area

    @classmethod
    def of(cls, given: Mapping[str, Any], name: str = "accelerator") -> Accelerator:
        """From the tables of a parameter file: fields of Accelerator, and `level` a list."""
        own = {f.name for f in fields(cls)} - {"levels", "name", "inside"}
        _known(given, own | {"level", "name"}, name)
        levels = given.get("level", [])
        if not isinstance(levels, list) or not all(isinstance(v, Mapping) for v in levels):
            raise _bad(name, "level", "a list of tables, [[level]]", levels)
        made = []
        for number, table in enumerate(levels):
            where = f"{name}.level[{number}]"
            _known(table, {f.name for f in fields(Level)}, where)
            if not isinstance(table.get("name"), str):
                raise _bad(where, "name", "text", table.get("name"))
            values = dict(table)
            for key in ("keeps", "skips"):
                if key in values:
                    values[key] = tuple(values[key])
            made.append(Level(**values))
        rest = {key: given[key] for key in own if key in given}
        return cls(str(given.get("name", name)), tuple(made), **rest)


def _bad(where: str, field: str, expected: object, got: object, hint: str = "") -> UserError:
    return UserError(
        f"bad {field} of {where}", op="chip", expected=expected, got=got, hint=hint or None
    )


def _bounded(record: Any, field: str, low: float, high: float, whole: bool = False) -> None:
    value = getattr(record, field)
    kind = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
        what = "a whole number" if whole else "a number"
        nearest = ""
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value == value:
            fit = min(max(value, low), high)
            nearest = f"{field} = {int(fit) if whole else fit:g} would fit"
        raise _bad(record.name, field, f"{what} from {low:g} to {high:g}", value, nearest)


def _known(given: Mapping[str, Any], names: set[str], where: str) -> None:
    for key in given:
        if key not in names:
            raise _bad(where, repr(key), f"a field of {', '.join(sorted(names))}", key)


def load(path: str | Path) -> Accelerator:
    """The Accelerator of a parameter file."""
    return Accelerator.of(read_parameters(path), Path(path).stem)


__all__ = ["Accelerator", "Level", "load"]

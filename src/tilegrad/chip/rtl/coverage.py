"""Coverage of the emitted SystemVerilog, read from Verilator's coverage.dat.

A point is a line, a branch or a bit of a signal that should change; copies of a module share their
points. Invariant: a point that any run hit, in any copy, is hit; runs add up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ...core.errors import UserError

LINE = re.compile(r"^C '(?P<key>.*)' (?P<count>\d+)$")
KINDS = ("line", "branch", "toggle")  # toggle: with `--coverage`, which builds much longer


@dataclass(frozen=True)
class Point:
    """What should happen somewhere in a file."""

    kind: str
    file: str
    line: int
    what: str


@dataclass
class Coverage:
    """How often each point was hit."""

    counts: dict[Point, int] = field(default_factory=dict)

    def share(self, kind: str, file: str = "") -> float:
        """Of the points of a kind (of a file), those that were hit; an error if there are none."""
        hits = [n > 0 for p, n in self.counts.items() if p.kind == kind and file in ("", p.file)]
        if not hits:
            files = sorted({p.file for p in self.counts if p.kind == kind})
            raise UserError(
                f"no {kind} to cover", op="rtl", expected=files or KINDS, got=file or kind
            )
        return sum(hits) / len(hits)

    def _cell(self, kind: str, file: str) -> str:
        there = any(p.kind == kind and file in ("", p.file) for p in self.counts)
        return f"{100 * self.share(kind, file):.1f}%" if there else "-"

    def missed(self, kind: str) -> list[Point]:
        """Points that nothing hit, by file and line."""
        found = [p for p, n in self.counts.items() if p.kind == kind and n == 0]
        return sorted(found, key=lambda p: (p.file, p.line, p.what))

    def table(self) -> str:
        """A line for each file: the share of every kind."""
        files = sorted({p.file for p in self.counts})
        kinds = [kind for kind in KINDS if any(p.kind == kind for p in self.counts)]
        lines = [f"{'file':22}" + "".join(f"{kind:>9}" for kind in kinds)]
        for name in (*files, ""):
            shares = "".join(f"{self._cell(kind, name):>9}" for kind in kinds)
            lines.append(f"{name or 'together':22}{shares}")
        return "\n".join(lines)


def read(paths: Iterable[Path | str]) -> Coverage:
    """The coverage of some runs together."""
    made = Coverage()
    for path in paths:
        text = Path(path).read_text()
        if not text.startswith("# SystemC::Coverage"):
            raise UserError("no coverage file", op="rtl", expected="coverage.dat", got=str(path))
        for line in text.splitlines():
            found = LINE.match(line)
            if found is None:
                continue
            pairs = (part.split("\x02", 1) for part in found["key"].split("\x01") if part)
            keys = {pair[0]: pair[1] for pair in pairs if len(pair) == 2}
            kind = keys.get("page", "").removeprefix("v_").partition("/")[0]
            place = Path(keys.get("f", "")).name, int(keys.get("l", 0))
            what = f"{keys.get('n', '')} {keys.get('o', '')}".strip()
            point = Point(kind, *place, what)
            made.counts[point] = made.counts.get(point, 0) + int(found["count"])
    return made


__all__ = ["Coverage", "Point", "read"]

"""The Plan of a kernel: the choices that change how fast it runs, and never what it computes.

Invariant: a Plan is a frozen record; `with_` gives another. What a person did not set is None
until `filled` chooses it from the facts of a Target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..core.errors import UserError
from ..core.target import Target

SWIZZLES = ("none", "xor")
# How a search space may spell the numbers of a Plan.
SPELLINGS = {
    "BM": "m",
    "BN": "n",
    "BK": "k",
    "BD": "k",
    "block_m": "m",
    "block_n": "n",
    "block_k": "k",
    "m": "m",
    "n": "n",
    "k": "k",
    "warps": "warps",
    "stages": "stages",
    "vector": "vector",
}


@dataclass(frozen=True)
class Plan:
    """Block sizes, depth of a block, warps, stages, vector width, swizzle, and named sizes."""

    m: int | None = None
    n: int | None = None
    k: int | None = None
    warps: int | None = None
    stages: int | None = None
    vector: int | None = None
    swizzle: str | None = None
    sizes: tuple[tuple[str, Any], ...] = ()  # values of the kernel's own static arguments

    def with_(self, **changes: Any) -> Plan:
        """Another Plan; unknown names are values of the kernel's static arguments."""
        known: dict[str, Any] = {}
        sizes = dict(self.sizes)
        for name, value in changes.items():
            if name == "block":
                known["m"], known["n"] = _pair(value)
            elif name in SPELLINGS:
                known[SPELLINGS[name]] = _positive(name, value)
            elif name == "swizzle":
                if value not in SWIZZLES:
                    raise UserError("unknown swizzle", op="schedule", expected=SWIZZLES, got=value)
                known[name] = value
            else:
                sizes[name] = value
        return replace(self, **known, sizes=tuple(sorted(sizes.items())))

    def filled(self, target: Target) -> Plan:
        """The Plan with every choice made: by the person, else by the Target's registers."""
        return self.over(defaults(target))

    def over(self, other: Plan) -> Plan:
        """Another Plan with the choices that were made here."""
        return replace(other, **{n: v for n, v in vars(self).items() if v is not None})

    def notes(self) -> dict[str, Any]:
        """What is noted of it in a Body."""
        return {n: getattr(self, n) for n in ("warps", "stages", "vector", "swizzle")}

    def to_record(self) -> dict[str, Any]:
        """The choices that were made, as plain data."""
        made = vars(self) | {"sizes": None}
        return {n: v for n, v in made.items() if v is not None} | dict(self.sizes)

    def __str__(self) -> str:
        return ", ".join(f"{n}={v}" for n, v in self.to_record().items()) or "automatic"


def from_record(record: Mapping[str, Any]) -> Plan:
    """The Plan that `to_record` wrote."""
    return Plan().with_(**record)


def defaults(target: Target) -> Plan:
    """Choices by the Target's facts: large blocks where many registers hold them."""
    space = target.memories.get("register")
    held = 0 if space is None else space.bytes
    if held >= 64 << 10:  # registers of a whole block of threads
        return Plan(128, 128, 64, 8, 3, 8, "xor")
    lanes = max(1, target.vector_bytes // 4)
    return Plan(32, 8 * lanes if lanes < 16 else 64, 64, 1, 1, lanes, "none")


def _positive(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"bad {name}", op="schedule", expected="a whole number >= 1", got=value)
    return value


def _pair(value: Any) -> tuple[int, int]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise UserError("bad block", op="schedule", expected="(rows, columns)", got=value)
    return _positive("block", value[0]), _positive("block", value[1])

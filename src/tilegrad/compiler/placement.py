"""What of a Schedule runs on the array beside the CPU, what on the host and why, and what it costs.

Invariant: every Kernel that is launched has a row; shares are of all FLOPs, loops counted as often
as they are known to run; cycles are those of the Target's closed forms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ..core.target import Target
from ..ir.symbol import high
from ..runtime.buffer import HOST
from ..runtime.language import language_of
from ..schedule.schedule import Kernel, Launch, Schedule


@dataclass(frozen=True)
class Placed:
    """One Kernel: where it runs, its FLOPs, what it costs there, and why it is not on the array."""

    number: int
    name: str
    device: str
    flops: int
    costs: Mapping[str, float]
    why: str = ""
    rate_note: str = ""  # of the array's multipliers, where it has several


@dataclass(frozen=True)
class Placement:
    """All Kernels of a function; `str` of it is the report."""

    target: str
    kernels: tuple[Placed, ...]

    @property
    def host(self) -> tuple[Placed, ...]:
        """Those on the host."""
        return tuple(k for k in self.kernels if k.device == HOST)

    @property
    def flops(self) -> int:
        """Of all Kernels."""
        return sum(k.flops for k in self.kernels)

    @property
    def host_share(self) -> float:
        """The share of FLOPs on the host."""
        return sum(k.flops for k in self.host) / max(1, self.flops)

    def total(self, name: str) -> float:
        """A cost of all Kernels of the array: cycles, macs, packed (bytes), seconds, energy."""
        return sum(k.costs.get(name, 0.0) for k in self.kernels)

    @property
    def utilisation(self) -> float:
        """Multiplications over those that fit into the cycles of the array."""
        fits = sum(
            k.costs["macs"] / k.costs["utilisation"]
            for k in self.kernels
            if k.costs.get("utilisation")
        )
        spent = self.total("cycles")
        used = sum(k.costs["cycles"] for k in self.kernels if k.costs.get("utilisation"))
        return self.total("macs") / (fits * spent / used) if fits else 0.0

    def reasons(self) -> dict[str, float]:
        """Why Kernels are on the host, each with its share of all FLOPs, the largest first."""
        found: dict[str, float] = {}
        for k in self.host:
            found[k.why] = found.get(k.why, 0.0) + k.flops / max(1, self.flops)
        return dict(sorted(found.items(), key=lambda one: -one[1]))

    def __str__(self) -> str:
        array = len(self.kernels) - len(self.host)
        lines = [
            f"{self.target}: {array} of {len(self.kernels)} kernels and "
            f"{100 * (1 - self.host_share):.2f}% of FLOPs on the array",
            f"{self.total('cycles'):,.0f} cycles, {1e3 * self.total('seconds'):,.3f} ms, "
            f"{1e3 * self.total('energy'):,.4g} mJ, {100 * self.utilisation:.1f}% of multipliers "
            "busy, by closed forms",
            f"host packs {self.total('packed'):,.0f} bytes for it",
        ]
        notes = Counter(k.rate_note for k in self.kernels if k.rate_note)
        lines += [f"array, {count} kernels: {note}" for note, count in notes.items()]
        for why, share in self.reasons().items():
            count = sum(k.why == why for k in self.host)
            lines.append(f"host, {100 * share:6.2f}% of FLOPs, {count} kernels: {why}")
        return "\n".join(lines)


def placement_of(schedule: Schedule, target: Target) -> Placement:
    """Where the Kernels of a Schedule run."""
    language = language_of(target)
    costs, note_of = language.costs, language.rate_note
    rows = []
    for number, kernel in enumerate(schedule.kernels):
        launches = [s.body for s in kernel.steps if isinstance(s, Launch)]
        if not launches:
            continue
        device = kernel.host or kernel.device or target.name
        counted: dict[str, float] = {}
        if costs is not None and not kernel.host:
            for body in launches:
                for name, value in costs(body, target).items():
                    many = 1 if name == "utilisation" else kernel.times
                    counted[name] = counted.get(name, 0.0) + many * value
        flops = high(kernel.flops) * kernel.times
        why = _why(kernel) if kernel.host else ""
        notes = [] if note_of is None or kernel.host else [note_of(b, target) for b in launches]
        note = "; ".join(filter(None, notes))
        rows.append(Placed(number, kernel.name, device, flops, counted, why, note))
    return Placement(target.name, tuple(rows))


def _why(kernel: Kernel) -> str:
    verdict = kernel.notes.get("verdict")
    refused = dict(verdict.refused) if verdict is not None else {}
    for name, why in refused.items():
        if name.endswith("on the array"):
            return why
    return f"the array has no {kernel.kind}"


__all__ = ["Placed", "Placement", "placement_of"]

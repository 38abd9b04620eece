"""A Recipe over several Devices: each runs its own steps, Transfers go between.

Steps that follow each other on one Device are one part, with a Launcher of that Device's. The parts
run one after the other; a Transfer waits for what it copies. Invariant: a part is given the
addresses of its own Slots alone, after all parts before it were launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ..core.lock import new_rlock
from ..ir.symbol import evaluate
from .launcher import Launcher, SlotCopy
from .profile import Profile, in_order
from .recipe import Recipe, Step

if TYPE_CHECKING:
    from .device import Device

Machines = Mapping[str, tuple["Device", Mapping[str, Any]]]  # with loaded code; '' is the own one


class Part:
    """Steps that one Device runs in a go."""

    def __init__(self, recipe: Recipe, first: int, stop: int, machines: Machines) -> None:
        device, code = machines[recipe.steps[first].device]
        self.launcher = device.launcher(recipe.part(first, stop), code)
        faults = {n for n, s in enumerate(recipe.slots) if s.kind == "fault"}
        used = {s for step in recipe.steps[first:stop] for s in step.slots}
        self.used = sorted(used - faults)

    def point(self, slots: Sequence[int]) -> None:
        """Take the addresses of the Slots that it touches."""
        own = self.launcher.slots
        for number in self.used:
            own[number] = slots[number]


class Across:
    """A Transfer."""

    def __init__(self, recipe: Recipe, step: Step, machines: Machines) -> None:
        self.target, self.source = step.slots
        self.bytes, self.region = step.grid, step.region
        self.to = machines[recipe.slots[self.target].device][0]
        self.origin = machines[recipe.slots[self.source].device][0]

    def launch(self, slots: Sequence[int], bytes: int) -> None:
        """Copy between the addresses that the Slots have."""
        with self.to.lock:
            self.to.copy_across(slots[self.target], slots[self.source], bytes, self.origin)


class Relay(Launcher):
    """Runs a Recipe on its Devices in turn."""

    def __init__(self, recipe: Recipe, machines: Machines) -> None:
        self.recipe, self.machines = recipe, machines
        self.device, self.lock = machines[""][0], new_rlock()
        self.slots: list[int] = [0] * max(1, len(recipe.slots))
        self.parts = list(self._cut())
        launchers = [p.launcher for p in self.parts if isinstance(p, Part)]
        self.decided = any(one.decided for one in launchers)
        self.symbolic = not recipe.is_static() or any(one.symbolic for one in launchers)

    def _cut(self) -> Iterator[Part | Across]:
        steps, first = self.recipe.steps, 0
        while first < len(steps):
            stop = first + 1
            if steps[first].kind == "transfer":
                yield Across(self.recipe, steps[first], self.machines)
            else:
                device = steps[first].device
                while stop < len(steps) and steps[stop].kind != "transfer":
                    if steps[stop].device != device:
                        break
                    stop += 1
                yield Part(self.recipe, first, stop, self.machines)
            first = stop

    def bind(self, symbols: Mapping[str, int]) -> list[Any]:
        """What depends on the Symbols alone, of each part."""
        return [
            p.launcher.bind(symbols) if isinstance(p, Part) else int(evaluate(p.bytes, symbols))
            for p in self.parts
        ]

    def launch(self, steps: list[Any]) -> None:
        """Run every part over the addresses in `slots`."""
        for part, bound in zip(self.parts, steps):
            if isinstance(part, Across):
                part.launch(self.slots, bound)
            else:
                with part.launcher.lock:
                    part.point(self.slots)
                    part.launcher.launch(bound)

    def capture(
        self, steps: list[Any], slots: Sequence[int], copies: Sequence[SlotCopy]
    ) -> RelayCaptured:
        """Every part captured, and the copies after them."""
        return RelayCaptured(self, steps, slots, copies)


class RelayCaptured:
    """Parts over addresses that stay; see `Captured`."""

    def __init__(
        self, relay: Relay, steps: list[Any], slots: Sequence[int], copies: Sequence[SlotCopy]
    ) -> None:
        self.relay, self.steps, self.copies = relay, steps, list(copies)
        self.parts = [
            part.launcher.capture(bound, self._own(part, slots), ())
            if isinstance(part, Part)
            else part
            for part, bound in zip(relay.parts, steps)
        ]
        self.slots = list(slots)

    def _own(self, part: Part, slots: Sequence[int]) -> list[int]:
        """The addresses for a part: its fault words are its own."""
        found = list(part.launcher.slots)
        for number in part.used:
            found[number] = slots[number]
        return found

    @property
    def launches(self) -> int:
        """Kernels, copies and transfers of a run."""
        counts = [1 if isinstance(p, Across) else p.launches for p in self.parts]
        return sum(counts) + len(self.copies)

    def point(self, slots: Sequence[int]) -> None:
        """Use these addresses from now on; the lock is held."""
        for part, captured in zip(self.relay.parts, self.parts):
            if isinstance(part, Part):
                captured.point(self._own(part, slots))  # type: ignore[union-attr]
        self.slots = list(slots)

    def launch(self) -> None:
        """Run once more."""
        with self.relay.lock:
            for number in range(len(self.parts)):
                self._launch(number)
            for copy in self.copies:
                self.relay.device.copy_bytes(
                    self.slots[copy.target], self.slots[copy.source], copy.bytes
                )

    def _launch(self, number: int) -> None:
        part = self.parts[number]
        if isinstance(part, Across):
            part.launch(self.slots, self.steps[number])
        else:
            part.launch()

    def profile(self, name: str, runs: int, restore: Callable[[], None]) -> Profile:
        """Times of the parts of `runs` runs, each waited for (the median counts); `restore` puts
        back what a run changed."""
        devices = {d.name: d for d, _ in self.relay.machines.values()}
        whole: list[float] = []
        times: list[list[float]] = [[] for _ in self.parts]
        for _ in range(runs):
            restore()
            begin = perf_counter()
            for number, taken in enumerate(times):
                start = perf_counter()
                self._launch(number)
                for device in devices.values():
                    device.synchronize()
                taken.append(1e6 * (perf_counter() - start))
            whole.append(1e6 * (perf_counter() - begin))
        restore()
        records = in_order((*self._described(i), *_none(median(t))) for i, t in enumerate(times))
        return Profile(name, ", ".join(devices), "each part waited for", records, median(whole))

    def _described(self, number: int) -> tuple[str, str]:
        part = self.relay.parts[number]
        if isinstance(part, Across):
            return "transfer", f"{part.region} from {part.origin.name} to {part.to.name}"
        count = len(part.launcher.recipe.steps)
        return part.launcher.device.name, f"{count} steps on it"


def _none(us: float) -> tuple[float, int, int]:
    """A time, and nothing known of bytes and FLOPs."""
    return us, 0, 0


__all__ = ["Relay"]

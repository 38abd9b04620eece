"""The NPU as a Device, simulated: an array beside this computer's CPU, in its memory.

Its level says who computes what the array does: `compiled`, the CPU by kernels of the same values;
`words`, the chip's instructions one by one; `registers`, the chip's every register in every cycle.
What was launched is counted, and `account` tells cycles and energy by closed forms. "npu:0" has the
chip of the Config; `open_chip` gives a Device of its own to another chip. Invariant: values do not
depend on the level.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ...core.config import config
from ...core.dtype import dtype_of
from ...core.errors import UserError
from ...core.target import Target
from ...runtime.buffer import HOST, Buffer
from ...runtime.device import Device, device
from ...runtime.fault import fault_slots
from ...runtime.launcher import Launcher, SlotCopy, Steps
from ...runtime.recipe import Recipe, Step
from .arithmetic import Array
from .kernel import LEVELS, Account, ArrayKernel, account_of, kernel_of
from .parameters import Parameters, chip_of
from .target import npu_target


class NpuDevice(Device):
    """One chip beside this computer's CPU."""

    def __init__(self, name: str, parameters: Parameters, level: str = "compiled") -> None:
        super().__init__(name)
        self.parameters = parameters
        self.host = device(HOST)
        for name in ("put", "get", "copy_bytes", "memory_info", "trim", "loaded", "keep"):
            setattr(self, name, getattr(self.host, name))  # memory and code are the host's
        self.alignment = self.host.alignment
        self.level = level
        self.clear()

    @property
    def target(self) -> Target:
        """The chip's facts beside those of this CPU."""
        return npu_target(self.parameters, self.host.target)

    @property
    def level(self) -> str:
        """Who computes what the array does."""
        return self._level

    @level.setter
    def level(self, level: str) -> None:
        if level not in LEVELS:
            raise UserError("no such level", op="npu", expected=", ".join(LEVELS), got=repr(level))
        self._level = level

    def allocate(self, bytes: int, label: str = "") -> Buffer:
        """Memory of this computer."""
        found = self.host.allocate(bytes, label)
        return Buffer(found.pointer, bytes, found, self.name, label=label)

    def launcher(self, recipe: Recipe, code: Mapping[str, Any]) -> NpuLauncher:
        """The host's loop, or one step by step where the array is simulated."""
        return NpuLauncher(recipe, code, self)

    # ---- the account ----

    def clear(self) -> None:
        """Forget what was launched."""
        self.launched: Counter[ArrayKernel] = Counter()
        self.simulated = 0

    def account(self) -> Account:
        """What the array did since it was cleared."""
        return account_of(self.parameters, self.launched, self.simulated)


class NpuLauncher(Launcher):
    """Runs a Recipe: by the host's Launcher at the level `compiled`, else step after step, those of
    the array simulated or counted and the host's natively."""

    device: NpuDevice

    def __init__(self, recipe: Recipe, code: Mapping[str, Any], device: NpuDevice) -> None:
        super().__init__(recipe, code, device)
        self.by_key, self.chip = code, device.target.chip
        self.fault_words = {number: self.slots[number] for number, _ in fault_slots(recipe)}
        self.native = device.host.launcher(recipe, code)
        self.lock, self.slots = self.native.lock, self.native.slots
        self.decided = self.native.decided
        straight = all(s.kind in ("kernel", "copy") for s in recipe.steps)
        self.counted = straight or not any(recipe.entries)  # it is known how often each step runs
        self.hosts: dict[int, Launcher] = {}  # of single steps

    @property
    def runs_natively(self) -> bool:
        """Whether the host's Launcher runs all steps."""
        return self.device.level == "compiled" and self.counted

    def kernel(self, step: Step, symbols: Mapping[str, int]) -> ArrayKernel | None:
        """What the array runs of a step, if it does."""
        entries = self.recipe.entries
        entry = entries[step.program] if step.kind == "kernel" and entries else ""
        return kernel_of(self.chip, entry, tuple(sorted(symbols.items()))) if entry else None

    def bind(self, symbols: Mapping[str, int]) -> Bound:
        """What depends on the Symbols alone."""
        return Bound(self, symbols)

    def prepare(self, step: Step, symbols: Mapping[str, int]) -> Any:
        """A launch of the array, or of the host."""
        number = self.recipe.steps.index(step)
        if number not in self.hosts:
            part = self.recipe.part(number, number + 1)
            self.hosts[number] = self.device.host.launcher(part, self.by_key)
        host = OnHost(self.hosts[number], step, symbols)
        kernel = self.kernel(step, symbols)
        return host if kernel is None else OnArray(self.device, kernel, host)

    def keeps_results(self) -> bool:
        """As the host does."""
        return self.native.keeps_results()

    def launch(self, steps: Any) -> None:
        """Run once."""
        self.run(lambda: self.native.launch(steps.native), steps, self.slots)

    def run(self, native: Callable[[], None], bound: Bound, slots: Sequence[int]) -> None:
        """Run once at the Device's level: natively, or step by step over these addresses, with
        fault words of its own."""
        if self.runs_natively:
            native()
            self.device.launched.update(k for k in bound.kernels if k is not None)
            return
        addresses = list(slots)
        for number, word in self.fault_words.items():
            addresses[number] = word
        for operation in self.operations(bound.steps, addresses):
            self.start(operation)
        self.device.faults.check()

    def capture(self, steps: Any, slots: Sequence[int], copies: Sequence[SlotCopy]) -> NpuCaptured:
        """The same over addresses that stay."""
        return NpuCaptured(self, steps, slots, copies)


class Bound:
    """The steps of a Recipe for one choice of Symbols: the host's, and Kernels of the array."""

    def __init__(self, launcher: NpuLauncher, symbols: Mapping[str, int]) -> None:
        self.launcher, self.symbols = launcher, symbols
        self.native = launcher.native.bind(symbols)
        self.kernels = [launcher.kernel(step, symbols) for step in launcher.recipe.steps]

    @cached_property
    def steps(self) -> Steps:
        """Each step as a launch of its own."""
        return Steps(self.launcher, self.symbols)


class NpuCaptured:
    """What the host captured, or steps and copies one after the other."""

    def __init__(
        self, launcher: NpuLauncher, steps: Bound, slots: Sequence[int], copies: Sequence[SlotCopy]
    ) -> None:
        self.launcher, self.steps, self.copies = launcher, steps, list(copies)
        self.native = launcher.native.capture(steps.native, slots, copies)
        self.slots = list(slots)

    @property
    def launches(self) -> int:
        """Kernels and copies."""
        return int(self.native.launches)

    def point(self, slots: Sequence[int]) -> None:
        """Use these addresses from now on."""
        self.native.point(slots)
        self.slots = list(slots)

    def launch(self) -> None:
        """Run once more."""
        launcher = self.launcher
        launcher.run(self.native.launch, self.steps, self.slots)
        for copy in self.copies if not launcher.runs_natively else ():
            pair = self.slots[copy.target], self.slots[copy.source]
            launcher.device.copy_bytes(*pair, copy.bytes)

    def profile(self, name: str, runs: int, restore: Callable[[], None]) -> Any:
        """Times on this computer, not on the chip."""
        return self.native.profile(name, runs, restore)


class OnHost:
    """A step that the CPU runs."""

    empty = False

    def __init__(self, launcher: Launcher, step: Step, symbols: Mapping[str, int]) -> None:
        self.launcher, self.step = launcher, step
        self.steps = launcher.bind(symbols)

    def launch(self, pointers: Sequence[int]) -> None:
        """Run it."""
        for number, pointer in zip(self.step.slots, pointers):
            self.launcher.slots[number] = pointer
        self.launcher.launch(self.steps)


@dataclass
class OnArray:
    """A step that the array runs: by the CPU with the same values, or simulated."""

    empty = False
    device: NpuDevice
    kernel: ArrayKernel
    host: OnHost

    def launch(self, pointers: Sequence[int]) -> None:
        """Run it at the Device's level."""
        device, work = self.device, self.kernel.work
        device.launched[self.kernel] += 1
        if device.level == "compiled":
            self.host.launch(pointers)
            return
        given: dict[int, Array] = {}
        for o in work.operands:
            given[o.parameter] = _array(pointers[o.parameter], o.dtype, o.shape)
        arrays = [given.get(i, np.empty(0)) for i in range(max(given, default=-1) + 1)]
        results, cycles = self.kernel.run(arrays, device.level)
        device.simulated += cycles
        for out, found in zip(work.outputs, results):
            _array(pointers[out.parameter], out.dtype, out.shape)[...] = found


def _array(pointer: int, dtype: str, shape: Sequence[Any]) -> Array:
    """An array at an address of this computer's memory."""
    kind = dtype_of(dtype).numpy
    count = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    raw = (ctypes.c_uint8 * count).from_address(pointer)
    return np.frombuffer(raw, np.uint8).view(kind).reshape(shape)


class Kind:
    """Chips by number: the first is the Config's, others are opened by `open_chip`."""

    def __init__(self) -> None:
        self.devices: dict[int, NpuDevice] = {}
        self.numbers: dict[tuple[str, str], int] = {}

    def count(self) -> int:
        """Those that were opened, and the Config's."""
        return max(1, len(self.devices))

    def open(self, number: int) -> NpuDevice:
        """A chip that was opened."""
        if number == 0 and 0 not in self.devices:
            self.devices[0] = NpuDevice("npu:0", chip_of(config().chip))
        if number not in self.devices:
            raise UserError(
                "no such chip",
                op="device",
                expected=", ".join(f"npu:{n}" for n in sorted({0, *self.devices})),
                got=f"npu:{number}",
                hint='tg.device("npu", chip="edge.toml") opens another',
            )
        return self.devices[number]

    def open_chip(self, chip: str | Parameters, level: str = "compiled") -> str:
        """The name of the Device of a chip (a preset, a file or a record) at a level."""
        parameters = chip if isinstance(chip, Parameters) else chip_of(chip)
        key = (repr(parameters), level)
        if key not in self.numbers:
            number = max({0, *self.devices}) + 1
            self.devices[number] = NpuDevice(f"npu:{number}", parameters, level)
            self.numbers[key] = number
        return f"npu:{self.numbers[key]}"


KIND = Kind()

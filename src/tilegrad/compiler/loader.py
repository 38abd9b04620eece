"""Executables by their Graph: from an opened Bundle, else from the compiler.

All that is run is asked for here. A Bundle has a Recipe for every Graph that it was made of, so a
program that computes nothing else never imports the compiler, and needs neither LLVM nor ptxas.
Who makes a Bundle listens to what is asked for. Invariant: a Recipe of a Bundle is used exactly for
a Graph of the name that the compiler would give it; what only Bundles and prepared weights need is
imported where one is met.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..core.config import CHOICES, config
from ..core.lock import new_rlock
from ..graph import ops
from ..ir.fingerprint import UserLine, digest, structure
from ..ir.node import Node
from ..ir.requirement import Requirement, check_all
from ..runtime.buffer import HOST, Buffer
from ..runtime.device import Device, device
from ..runtime.executable import Executable
from ..runtime.recipe import Recipe

if TYPE_CHECKING:
    from ..runtime.bundle import Bundle
    from ..runtime.prepared import Layout
    from ..runtime.preparing import LayoutOf

_bundles: list[Opened] = []
_listeners: list[Callable[[Wanted], None]] = []
_lock = new_rlock()
counters = {"compiled": 0, "loaded": 0, "programs": 0}  # Executables, and Programs assembled


@dataclass(frozen=True)
class Wanted:
    """A Graph that somebody wants to run: what an Executable depends on."""

    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    donate: tuple[int, ...] = ()
    device: str = HOST
    requirements: Sequence[Requirement] = ()

    def name(self, lines: dict[UserLine, int]) -> str:
        """The name of the Graph in a Bundle; the user's lines in it are added to `lines`."""
        needs = [r.to_text(placed=False) for r in self.requirements]
        bounds = [(s.name, s.low, s.high) for s in ops.symbols(list(self.inputs))]
        rows = structure(self.inputs, self.outputs, lines)
        return digest(rows, bounds, self.donate, needs)


@dataclass
class Opened:
    """A Bundle in use, with the Executables that were bound of it."""

    bundle: Bundle
    bound: dict[tuple[str, str], Any] = field(default_factory=dict)

    @property
    def numerics(self) -> tuple[str, ...]:
        """The settings that it was compiled for, as `Config.numerics`."""
        said = self.bundle.manifest.get("settings", {})
        return tuple(str(said.get(name, known[0])) for name, known in CHOICES.items())

    def executable(self, wanted: Wanted) -> Any | None:
        """The Executable of a Graph, if the Bundle has it."""
        if wanted.device.split(":")[0] != self.bundle.device:
            return None
        lines: dict[UserLine, int] = {}
        return self.named(wanted.name(lines), wanted.device, wanted.requirements, list(lines))

    def named(
        self,
        name: str,
        where: str,
        requirements: Sequence[Requirement] = (),
        lines: Sequence[str] = (),
    ) -> Any | None:
        """The Executable of a Graph by its name."""
        text = self.bundle.recipes.get(name)
        if text is None:
            return None
        with _lock:
            found = self.bound.get((name, where))
            if found is None:
                recipe = Recipe.from_text(text)
                recipe.requirements = list(requirements)
                recipe.move(lines)
                machine = device(where)
                if self.bundle.device != HOST:
                    self.bundle.refuse_other(machine.target)
                code = {}
                for _, key in recipe.programs:
                    code[key] = machine.loaded(key) or machine.keep(key, self.bundle.code(key))
                found = self.bound[name, where] = bind(recipe, code, machine, self.layout_of)
            return found

    def layout_of(self, text: str, sources: Sequence[Buffer]) -> Layout:
        """Weights of the Bundle, where it has them; others are packed by the compiler's Layout."""
        from ..runtime.prepared import Ready, Source

        names = [s.name if isinstance(s, Source) else "" for s in sources]
        if self.bundle.has_weights(text, names):
            return Ready(self.bundle, text, names)
        from .compile import layout_of

        return layout_of(text, sources)


def bind(
    recipe: Recipe,
    code: Mapping[str, Any],
    machine: Device,
    layout_of: LayoutOf,
    others: Mapping[str, tuple[Device, Any]] | None = None,
) -> Any:
    """A Recipe over loaded code as an Executable; `others` are further Devices and their code."""
    if not recipe.preparing:
        return Executable(recipe, code, machine, others)
    from ..runtime.preparing import PreparedExecutable, inner_recipe

    inner = Executable(inner_recipe(recipe), code, machine, others)
    return PreparedExecutable(inner, recipe, machine, layout_of)


class Idle:
    """The Executable of a function that computes nothing."""

    def __init__(self, requirements: Sequence[Requirement]) -> None:
        self.requirements = requirements

    def check(self, symbols: Mapping[str, int] | None) -> None:
        """Raise unless what the ops need of these Symbols holds."""
        check_all(self.requirements, symbols)

    def run(self, buffers: Sequence[Any], symbols: Mapping[str, int] | None = None) -> list[Any]:
        """No results."""
        self.check(symbols)
        return []


def executable_for(
    inputs: tuple[Node, ...],
    outputs: tuple[Node, ...],
    donate: tuple[int, ...] = (),
    device: str = HOST,
    requirements: Sequence[Requirement] = (),
    homes: tuple[str, ...] = (),
) -> Any:
    """The Executable that computes outputs from inputs (in that order) on a device; `donate`
    numbers the inputs whose Buffers it may overwrite, `requirements` are what it needs of its
    Symbols, `homes` the Devices of the inputs where they differ. `run(buffers, symbols) ->
    buffers`, `check(symbols)`."""
    if not outputs:
        return Idle(requirements)
    if (_bundles or _listeners) and not homes:
        found = _told(Wanted(inputs, outputs, donate, device, requirements))
        if found is not None:
            return found
    from .compile import executable_for as compiled_for

    return compiled_for(inputs, outputs, donate, device, requirements, homes)


def executable_on_numbers(
    inputs: Sequence[Node], outputs: Sequence[Node], device: str = HOST
) -> tuple[Any, list[Buffer]]:
    """The Executable that computes outputs from inputs, and Buffers to give it after those: see
    `lift`, which makes numbers that change arguments."""
    if _bundles or _listeners:
        found = _told(Wanted(tuple(inputs), tuple(outputs), (), device))
        if found is not None:
            return found, []
    from .lift import executable_on_numbers as lifted

    return lifted(inputs, outputs, device)


def _told(wanted: Wanted) -> Any | None:
    """Tell who listens; what a Bundle has."""
    for listener in _listeners:
        listener(wanted)
    if config().eager_debug:
        return None
    for opened in opened_bundles():
        found = opened.executable(wanted)
        if found is not None:
            return found
    return None


def is_told() -> bool:
    """Whether a Bundle or a listener is asked before the compiler."""
    return bool(_bundles or _listeners)


@contextmanager
def listening(listener: Callable[[Wanted], None]) -> Iterator[None]:
    """Within the block, tell of every Graph that is asked for."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def use_bundle(bundle: Bundle) -> Opened:
    """Let a Bundle serve this process from now on; the same one again changes nothing."""
    with _lock:
        for opened in _bundles:
            if opened.bundle.folder == bundle.folder:
                return opened
        opened = Opened(bundle)
        _bundles.append(opened)
    native_loop = bundle.native_loop()
    if native_loop is not None:
        from ..targets.llvm import workers

        workers.use_native_loop(native_loop)
    return opened


def leave_bundle(bundle: Bundle) -> None:
    """Let a Bundle serve no longer; what was bound of it stays valid."""
    with _lock:
        _bundles[:] = [o for o in _bundles if o.bundle.folder != bundle.folder]


def opened_bundles() -> list[Opened]:
    """The Bundles that serve this process, for the settings that results depend on."""
    return [opened for opened in _bundles if opened.numerics == config().numerics]


__all__ = ["Idle", "Wanted", "executable_for", "executable_on_numbers", "listening", "use_bundle"]

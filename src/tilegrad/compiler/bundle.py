"""Making Bundles: Graphs compiled ahead of time for a Target that need not be here.

Invariant: a Bundle has for each Graph the Recipe and the object code that the compiler would make
on a machine of the Target, and weights as that machine's kernels read them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.config import CHOICES, config
from ..core.errors import InternalError, UserError
from ..core.target import Target
from ..ir.fingerprint import UserLine
from ..runtime.buffer import HOST, Buffer
from ..runtime.bundle import WEIGHTS, BundleWriter, weights_key
from ..runtime.device import Device, device, target_for
from ..runtime.language import language_of
from ..runtime.prepared import Source, prepared
from ..runtime.recipe import Recipe
from .compile import layout_of, schedule_for
from .flatten import recipe_of
from .loader import Wanted

Array = np.ndarray[Any, Any]
DEVICES = {"llvm": HOST, "ptx": "cuda"}  # kinds of Devices by the language of their programs


class BundleFile(Device):
    """A Bundle's file of weights, as a Device that holds them."""

    def __init__(self, path: Any) -> None:
        super().__init__(f"file:{path}")
        self.path, self.end = path, 0
        self.rooms: list[tuple[Buffer, int]] = []  # and where each begins

    def allocate(self, bytes: int, label: str = "") -> Buffer:
        """Some bytes of the file."""
        with open(self.path, "ab") as file:
            file.truncate(self.end + bytes)
        mapped = np.memmap(self.path, np.uint8, "r+", self.end, (bytes,))
        room = Buffer.wrap(mapped)
        self.rooms.append((room, self.end))
        self.end += -(-bytes // 4096) * 4096
        return room

    def write(self, buffer: Buffer, array: Array) -> None:
        """Copy an array into a part of the file."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        buffer.array((data.nbytes,), np.uint8)[:] = data

    def start_of(self, buffer: Buffer) -> int:
        """Where in the file a part begins."""
        for room, start in reversed(self.rooms):
            if 0 <= buffer.pointer - room.pointer < max(1, room.bytes):
                return start + buffer.pointer - room.pointer
        raise InternalError("bundle", f"{buffer} is not in {self.path}")


class Maker:
    """Compiles Graphs into a Bundle."""

    def __init__(self, folder: str | os.PathLike[str], target: Target | None = None) -> None:
        self.target = target_for(HOST) if target is None else target
        name = self.target.language
        if name not in DEVICES:
            raise UserError("no bundle for this language", op="bundle", got=name)
        self.writer = BundleWriter(folder, self.target, DEVICES[name])
        self.file = BundleFile(self.writer.folder / WEIGHTS)
        self.on_host = self.writer.device == HOST
        self.arch = device(HOST).arch if self.on_host else self.target.cpu

    def add(self, wanted: Wanted, sources: Sequence[Buffer] | None = None) -> str:
        """Compile a Graph; the name it has in the Bundle. `sources` are the Buffers of its inputs,
        for those whose weights are to be prepared."""
        lines: dict[UserLine, int] = {}
        name = wanted.name(lines)
        if name in self.writer.recipes:
            return name
        schedule = schedule_for(wanted.inputs, wanted.outputs, self.target, wanted.donate)
        recipe, texts = recipe_of(schedule, self.target, wanted.requirements)
        recipe.lines = list(lines)
        compile_text = language_of(self.target).compile
        for key, text in texts.items():
            if key not in self.writer.code:
                self.writer.code[key] = compile_text(text, self.target, self.arch)
        self.writer.recipes[name] = recipe.to_text()
        if sources is not None:
            self._prepare(recipe, sources)
        return name

    def _prepare(self, recipe: Recipe, sources: Sequence[Buffer]) -> None:
        """Put weights into the file as the Recipe wants them."""
        for one in recipe.preparing:
            given = [sources[i] for i in one.sources]
            if not all(isinstance(s, Source) and s.name for s in given):
                continue  # prepared where it runs
            key = weights_key(one.layout, [s.name for s in given])  # type: ignore[attr-defined]
            if key not in self.writer.weights:
                (parts,) = prepared([(given, layout_of(one.layout, given))], self.file)
                self.writer.weights[key] = [(self.file.start_of(p), p.bytes) for p in parts]

    def finish(self, **more: Any) -> Any:
        """Write the Bundle."""
        if self.on_host:
            self.writer.code["native_loop"] = self._native_loop()
        more.setdefault("settings", dict(zip(CHOICES, config().numerics)))
        return self.writer.finish(more)

    def _native_loop(self) -> bytes:
        from ..targets.llvm.workers import native_loop_for

        return native_loop_for(self.target.triple.split("-")[0])


__all__ = ["Maker"]

"""Bundles: what was compiled ahead of time, in a folder, to be run without the compiler.

    manifest.json   what it was made by and for, and the size and hash of every other file
    recipes.json    Recipes by the name of their Graph, and the signatures of functions
    objects.bin     object code, one after the other; the manifest says where each begins
    weights.bin     weights as kernels read them (see `prepared`), if the functions read any
    model/          the files of a model, if it is of one

A Graph's name covers its structure, what is donated and what it needs of its Symbols, so a Recipe
is found exactly where the compiler would make the same one. Object code and signatures are checked
against their hashes when a Bundle is opened; of weights only the size (`check_all` reads them too).
Invariant: a Bundle of another release, for another machine, or damaged is refused with the reason.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core.config import cpu_flags
from ..core.errors import UserError
from ..core.place import check_place
from ..core.target import Target, from_text
from .buffer import HOST, Buffer

FORMAT = 1
MANIFEST, RECIPES, OBJECTS, WEIGHTS, MODEL = (
    "manifest.json",
    "recipes.json",
    "objects.bin",
    "weights.bin",
    "model",
)
CHUNK = 1 << 22


def is_bundle(path: str | os.PathLike[str]) -> bool:
    """Whether a path is the folder of a Bundle."""
    return (Path(path) / MANIFEST).is_file() and (Path(path) / RECIPES).is_file()


class Bundle:
    """An opened Bundle; see the module's docstring."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.manifest = self._manifest()
        self._refuse_stale()
        self.target: Target = from_text(self.manifest["target"])
        self._refuse_foreign()
        self._check(RECIPES, OBJECTS)
        found = json.loads((self.folder / RECIPES).read_text())
        self.recipes: dict[str, str] = found["recipes"]
        self.functions: dict[str, list[dict[str, Any]]] = found["functions"]
        self._objects = (self.folder / OBJECTS).read_bytes()
        self._code: dict[str, tuple[int, int]] = {
            k: (a, b) for k, (a, b) in self.manifest["objects"].items()
        }
        self._weights: dict[str, list[tuple[int, int]]] = {
            k: [(a, b) for a, b in rows] for k, rows in self.manifest["weights"].items()
        }
        self._ahead: ReadAhead | None = None
        self._not_taken: set[str] = set()
        size = self.manifest["files"].get(WEIGHTS, [0, ""])[0]
        if size and (self.folder / WEIGHTS).stat().st_size != size:
            raise self._refused("its weights are cut short", f"{WEIGHTS} of {size} bytes")

    def __repr__(self) -> str:
        names = ", ".join(self.functions) or "no functions"
        return f"<bundle {self.folder}: {names}, for {self.target.name}>"

    @property
    def device(self) -> str:
        """The kind of Device it runs on: "cpu" or "cuda"."""
        return str(self.manifest["device"])

    @property
    def model(self) -> Path | None:
        """The model's files, if it is of one."""
        named = self.manifest.get("model")
        return None if named is None else self.folder / MODEL / named

    def code(self, key: str) -> bytes:
        """Object code by its key."""
        start, size = self._code[key]
        return self._objects[start : start + size]

    def native_loop(self) -> bytes | None:
        """The object code that runs the steps of a CPU."""
        return self.code("native_loop") if "native_loop" in self._code else None

    # ---- weights ----------------------------------------------------------------------------

    def has_weights(self, layout: str, sources: Sequence[str]) -> bool:
        """Whether it has weights in a Layout, by the names of their sources."""
        return weights_key(layout, sources) in self._weights

    def part_bytes(self, layout: str, sources: Sequence[str]) -> list[int]:
        """Bytes of each part of some weights."""
        return [size for _, size in self._weights[weights_key(layout, sources)]]

    def read_part(self, layout: str, sources: Sequence[str], part: int, room: Buffer) -> None:
        """Read one part of some weights into memory of the host."""
        start, size = self._weights[weights_key(layout, sources)][part]
        room.array((size,), np.uint8)[:] = self._weights_file[start : start + size]

    def read_ahead(self) -> None:
        """Begin to read all weights into memory of the host, in a thread: a model is set up
        meanwhile."""
        if self._weights and self._ahead is None:
            self._ahead = ReadAhead(self.folder / WEIGHTS)
            self._not_taken = set(self._weights)

    def take_parts(self, layout: str, sources: Sequence[str]) -> list[Buffer] | None:
        """The parts of some weights in the memory that they were read ahead to; None where they
        were not, or were taken before. The Bundle lets go of the memory with the last of them."""
        key = weights_key(layout, sources)
        if self._ahead is None or key not in self._not_taken:
            return None
        found = self._ahead.wait()
        self._not_taken.remove(key)
        if not self._not_taken:
            self._ahead = None
        return [found.part(start, size) for start, size in self._weights[key]]

    @functools.cached_property
    def _weights_file(self) -> np.ndarray[Any, Any]:
        return np.memmap(self.folder / WEIGHTS, np.uint8, "r")

    # ---- what is refused --------------------------------------------------------------------

    def check_all(self) -> None:
        """Compare every file with its hash, weights and the model's files too."""
        self._check(*self.manifest["files"])

    def _manifest(self) -> dict[str, Any]:
        try:
            found = json.loads((self.folder / MANIFEST).read_text())
        except (OSError, ValueError) as error:
            raise self._refused("it has no manifest", f"{MANIFEST}: {error}") from None
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            got = found.get("format") if isinstance(found, dict) else type(found).__name__
            raise self._refused("it is of another format", f"format {FORMAT}", got)
        return found

    def _refuse_stale(self) -> None:
        if self.manifest["source"] != source_digest():
            raise self._refused(
                "it was made by another tilegrad",
                f"made by this one, {package_version()} ({source_digest()})",
                f"{self.manifest['tilegrad']} ({self.manifest['source']})",
            )

    def _refuse_foreign(self) -> None:
        if self.device != HOST:
            return
        machine = platform.machine()
        made_for = self.target.triple.split("-")[0]
        if made_for != machine:
            raise self._refused("it is for another machine", machine, made_for)
        missing = missing_features(self.target.features)
        if missing:
            raise self._refused(
                "this CPU lacks instructions that it uses", ", ".join(sorted(missing)), "none"
            )

    def refuse_other(self, here: Target) -> None:
        """An error where it was made for another GPU than the one that is to run it."""
        made = self.target
        if made.cpu != here.cpu or made.cores > here.cores:
            shown = [f"{t.name} ({t.cpu}, {t.cores} multiprocessors)" for t in (here, made)]
            raise self._refused("it is for another machine", *shown)

    def _check(self, *names: str) -> None:
        for name in names:
            size, digest = self.manifest["files"].get(name, [-1, ""])
            path = self.folder / name
            if not path.is_file() or path.stat().st_size != size or file_hash(path) != digest:
                raise self._refused("a file is missing or damaged", f"{name} of {size} bytes")

    def _refused(self, why: str, expected: Any, got: Any = None) -> UserError:
        return UserError(
            f"this bundle cannot be used: {why}",
            op="load_bundle",
            expected=expected,
            got=str(self.folder) if got is None else got,
            hint="make it anew: tilegrad compile",
        )


class ReadAhead:
    """A file that a thread reads into memory of the host, in one piece."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.buffer = Buffer.allocate(path.stat().st_size, "prepared weights")
        self.done = 0
        self.thread = threading.Thread(target=self._read, name="read weights", daemon=True)
        self.thread.start()

    def _read(self) -> None:
        view = self.buffer.array((self.buffer.bytes,), np.uint8).data
        with open(self.path, "rb", buffering=0) as file:
            while got := file.readinto(view[self.done : self.done + CHUNK]):
                self.done += got

    def wait(self) -> Buffer:
        """The bytes, once all are there."""
        self.thread.join()
        if self.done < self.buffer.bytes:
            raise UserError(
                "the weights of a bundle could not be read",
                op="load_bundle",
                expected=f"{self.path} of {self.buffer.bytes} bytes",
                got=f"{self.done} bytes",
            )
        return self.buffer


# ---- names and hashes ---------------------------------------------------------------------------


def weights_key(layout: str, sources: Sequence[str]) -> str:
    """What weights are found by: how they are prepared, and what of."""
    return json.dumps([layout, list(sources)])


def file_hash(path: Path) -> str:
    """A hash of a file's content."""
    state = hashlib.blake2b(digest_size=20)
    with open(path, "rb") as file:
        while data := file.read(CHUNK):
            state.update(data)
    return state.hexdigest()


def package_version() -> str:
    """The release that this is."""
    from .. import __version__

    return str(__version__)


@functools.cache
def source_digest() -> str:
    """A hash of the package's source."""
    root = str(Path(__file__).resolve().parents[1])
    state = hashlib.blake2b(digest_size=16)
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if f != "__pycache__")
        for name in sorted(f for f in files if f.endswith(".py")):
            path = os.path.join(folder, name)
            state.update(path[len(root) + 1 :].encode() + b"\0")
            with open(path, "rb", buffering=0) as file:
                state.update(file.readall())
    return state.hexdigest()


# Names that Linux has for features which LLVM calls otherwise; others are the same.
LINUX_NAMES = {
    "sse3": "pni",
    "sse4.1": "sse4_1",
    "sse4.2": "sse4_2",
    "cx16": "cx16",
    "sahf": "lahf_lm",
    "lzcnt": "abm",
    "bmi": "bmi1",
    "neon": "asimd",
    "dotprod": "asimddp",
    "fp-armv8": "fp",
    "amx-tile": "amx_tile",
    "amx-bf16": "amx_bf16",
    "amx-int8": "amx_int8",
    "avx512bf16": "avx512_bf16",
    "avx512vnni": "avx512_vnni",
    "avx512vbmi2": "avx512_vbmi2",
    "avx512bitalg": "avx512_bitalg",
    "avx512vpopcntdq": "avx512_vpopcntdq",
    "avx512fp16": "avx512_fp16",
    "avxvnni": "avx_vnni",
}
# Those that kernels would fault without; what else LLVM lists changes no instruction of ours.
NEEDED = (
    "avx", "avx2", "fma", "f16c", "bmi", "bmi2", "popcnt", "lzcnt", "avx512f", "avx512bw",
    "avx512dq", "avx512vl", "avx512bf16", "avx512vnni", "avx512fp16", "avx512vbmi", "amx-tile",
    "amx-bf16", "amx-int8", "neon", "dotprod", "i8mm",
)  # fmt: skip


def missing_features(features: str) -> set[str]:
    """Features that code was compiled with and that this CPU does not say it has."""
    wanted = {f[1:] for f in features.split(",") if f.startswith("+")} & set(NEEDED)
    there = cpu_flags()
    return {f for f in wanted if LINUX_NAMES.get(f, f) not in there} if there else set()


# ---- writing ------------------------------------------------------------------------------------


def check_folder(folder: str | os.PathLike[str]) -> None:
    """An error where no Bundle can be written: into files of others, or where nothing can be."""
    check_place(folder, "bundle", folder=True)
    path = Path(folder)
    if path.exists() and any(path.iterdir()) and not is_bundle(path):
        raise UserError(
            "the folder has other files in it",
            op="bundle",
            expected="an empty folder, or a bundle to replace",
            got=str(folder),
        )


class BundleWriter:
    """Writes a Bundle: code, Recipes and weights as they come, the manifest last."""

    def __init__(self, folder: str | os.PathLike[str], target: Target, device: str) -> None:
        self.folder, self.target, self.device = Path(folder), target, device
        check_folder(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / MANIFEST).unlink(missing_ok=True)  # until all is there it is none
        self.recipes: dict[str, str] = {}
        self.functions: dict[str, list[dict[str, Any]]] = {}
        self.code: dict[str, bytes] = {}
        self.weights: dict[str, list[tuple[int, int]]] = {}
        self.model: str | None = None
        (self.folder / WEIGHTS).unlink(missing_ok=True)

    def finish(self, more: Mapping[str, Any]) -> Path:
        """Write what is left, and the manifest with `more` in it."""
        objects, start = {}, 0
        with open(self.folder / OBJECTS, "wb") as file:
            for key, data in self.code.items():
                file.write(data)
                objects[key] = (start, len(data))
                start += len(data)
        text = json.dumps({"recipes": self.recipes, "functions": self.functions})
        (self.folder / RECIPES).write_text(text)
        written = sorted(p for p in self.folder.rglob("*") if p.is_file())
        files = {
            p.relative_to(self.folder).as_posix(): [p.stat().st_size, file_hash(p)] for p in written
        }
        manifest = {
            "format": FORMAT,
            "tilegrad": package_version(),
            "source": source_digest(),
            "target": self.target.to_text(),
            "device": self.device,
            "model": self.model,
            "objects": objects,
            "weights": self.weights,
            "files": files,
            **more,
        }
        (self.folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        return self.folder


__all__ = ["Bundle", "BundleWriter", "is_bundle", "weights_key"]

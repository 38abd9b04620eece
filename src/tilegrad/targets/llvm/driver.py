"""The LLVM driver: IR text to object code, and object code into this process.

Object code is kept in the Store under a hash of everything it depends on. The pipeline neither
vectorises nor unrolls: the text we emit already says both.

Invariant: llvmlite is imported here and only inside functions; every call into it happens under
one lock, so any thread may compile and load. Code loaded here stays valid while its LoadedModule
is alive. Permission to use AMX tiles is asked for before the first object is loaded.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import itertools
import os
import sys
from typing import TYPE_CHECKING, Any

from ...core.errors import InternalError
from ...core.lock import LLVM, awaited_rlock
from ...core.target import Target
from ...runtime.store import content_key, default_store
from .object import FUNCTION, HEAD, MACHINES, Object, place

if TYPE_CHECKING:
    from llvmlite import binding

LEVEL = 3  # of optimisation
VERSION = "1"  # part of every key: raise it when the pipeline below changes
ARCH_REQ_XCOMP_PERM = 0x1023
XFEATURE_TILE_DATA = 18
SYS_ARCH_PRCTL = 158

_lock = awaited_rlock(LLVM)

_library_numbers = itertools.count()


@functools.cache
def llvm_version() -> str:
    """What tells one llvmlite from another, found without importing it (that takes 50 ms)."""
    spec = importlib.util.find_spec("llvmlite")
    if spec is None or spec.origin is None:
        raise InternalError("llvm driver", "llvmlite is not installed")
    try:
        with open(os.path.join(os.path.dirname(spec.origin), "_version.py"), "rb") as file:
            return content_key(file.read())
    except OSError:
        return str(llvm().llvm_version_info)


def compile_text(text: str, target: Target) -> bytes:
    """Object code of an LLVM module for `target`, from the Store where it is known."""
    key = content_key(
        "object",
        VERSION,
        llvm_version(),
        str(LEVEL),
        target.triple,
        target.cpu,
        target.features,
        text,
    )
    store = default_store()
    found = store.get(key)
    if found is not None:
        return found
    with _lock:
        module, machine = _optimize(text, target)
        data: bytes = machine.emit_object(module)
    store.put(key, data)
    return data


def optimized(text: str, target: Target) -> str:
    """The module's LLVM IR after the pipeline."""
    with _lock:
        return str(_optimize(text, target)[0])


def assembly(text: str, target: Target) -> str:
    """The module as assembly text of `target`."""
    with _lock:
        module, machine = _optimize(text, target)
        machine.set_asm_verbosity(True)
        result: str = machine.emit_assembly(module)
        return result


class LoadedModule:
    """Object code in this process; addresses are valid while it is alive."""

    __slots__ = ("__weakref__", "_addresses", "_tracker")

    def __init__(self, tracker: Any, addresses: dict[str, int]) -> None:
        self._tracker = tracker
        self._addresses = addresses

    @property
    def functions(self) -> tuple[str, ...]:
        """The names of the functions it defines."""
        return tuple(self._addresses)

    def address(self, function_name: str) -> int:
        """The address of a function it defines."""
        try:
            return self._addresses[function_name]
        except KeyError:
            raise InternalError(
                "llvm driver", f"no function {function_name!r}; the object has {self.functions}"
            ) from None


def load(object_bytes: bytes) -> LoadedModule:
    """Link object code of this machine into the process; libm and libc names resolve to ours.

    LLVM does it only where an object has what `object.place` does not know.
    """
    request_amx()
    _refuse_foreign(object_bytes)
    placed = place(object_bytes)
    if placed is not None:
        return LoadedModule(placed, placed.functions)
    names = function_names(object_bytes)
    with _lock:
        jit, builder = _lljit(), llvm().JITLibraryBuilder()
        builder.add_object_img(object_bytes).add_current_process()
        for name in names:
            builder.export_symbol(name)
        try:
            tracker = builder.link(jit, f"tilegrad{next(_library_numbers)}")
        except RuntimeError as error:
            raise InternalError("llvm driver", f"cannot link: {error}") from error
        return LoadedModule(tracker, {name: tracker[name] for name in names})


def _refuse_foreign(object_bytes: bytes) -> None:
    """Object code of another machine would end the process at its first instruction."""
    names = {number: name for name, number in MACHINES.items()}
    found = names.get(int.from_bytes(object_bytes[18:20], "little"), "")
    own = os.uname().machine
    if found and own in MACHINES and found != own:
        raise InternalError("llvm driver", f"code of {found} can be compiled on {own}, not run")


def function_names(object_bytes: bytes) -> list[str]:
    """The global functions that a 64-bit ELF object defines."""
    if object_bytes[:6] != HEAD:
        raise InternalError("llvm driver", "not a little-endian 64-bit ELF object")
    symbols = Object(object_bytes, "").symbols
    return [name for name, info, section, _ in symbols if info == FUNCTION and section]


@functools.cache
def request_amx() -> bool:
    """Ask Linux, once per process, for leave to use AMX tiles; whether it was given."""
    if not sys.platform.startswith("linux") or os.uname().machine != "x86_64":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.syscall(SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_TILE_DATA) == 0)


@functools.cache
def llvm() -> Any:
    """The llvmlite binding with the native target ready."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    binding.initialize_native_asmparser()
    return binding


@functools.cache
def _lljit() -> binding.LLJIT:
    request_amx()
    for name in ("libm.so.6", "libSystem.dylib"):
        try:
            llvm().load_library_permanently(name)
            break
        except RuntimeError:
            continue
    machine = llvm().Target.from_default_triple().create_target_machine(jit=True)
    return llvm().create_lljit_compiler(machine)


@functools.cache
def _machine(triple: str, cpu: str, features: str) -> binding.TargetMachine:
    """The TargetMachine of a Target, made once."""
    if triple.split("-")[0] != llvm().get_process_triple().split("-")[0]:
        llvm().initialize_all_targets()
        llvm().initialize_all_asmprinters()
    try:
        chosen = llvm().Target.from_triple(triple)
    except RuntimeError as error:
        raise InternalError("llvm driver", f"no code generator: {error}") from error
    return chosen.create_target_machine(
        cpu=cpu, features=features, opt=LEVEL, reloc="pic", codemodel="default"
    )


def _optimize(text: str, target: Target) -> tuple[binding.ModuleRef, binding.TargetMachine]:
    """A module after the pipeline, and the machine that it is for."""
    binding, machine = llvm(), _machine(target.triple, target.cpu, target.features)
    try:
        module = binding.parse_assembly(text)
        module.triple = target.triple
        module.data_layout = str(machine.target_data)
        module.verify()
    except RuntimeError as error:
        raise InternalError("llvm driver", f"bad LLVM IR: {error}") from error
    options = binding.create_pipeline_tuning_options(speed_level=LEVEL)
    options.loop_vectorization = False
    options.slp_vectorization = False
    options.loop_unrolling = False
    options.loop_interleaving = False
    passes = binding.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    return module, machine

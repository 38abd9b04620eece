"""Targets: what a compiler must know of a machine, as a frozen record of facts.

Passes ask these facts (`target.memories`, `target.matrix`, `target.lanes`) and never who the
machine is. Static Targets for cross compiling stand at the end; the Target of this computer is
found by `targets/llvm/target.py`, that of a GPU in it by `targets/ptx/target.py`.

Invariant: a Target never changes and equals every Target with the same facts; `key` is the same
in every process and on every machine; `from_text(to_text(t)) == t`. Half of the file is tables of
facts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from .dtype import (
    DType,
    bfloat16,
    dtype_of,
    float8_e4m3,
    float8_e5m2,
    float16,
    float32,
    float64,
    int8,
    int32,
    uint8,
)
from .errors import UserError, meant


@dataclass(frozen=True)
class MemorySpace:
    """One Scope: bytes of one instance, line, ops that copy into it, bytes/s of one instance."""

    bytes: int
    line_bytes: int = 64
    copies: tuple[str, ...] = ()
    bytes_per_second: float = 0.0
    shared: bool = False  # one instance for the whole machine, else one per core


@dataclass(frozen=True)
class MatrixUnit:
    """An instruction that adds an (m, k) by (k, n) product to an (m, n) accumulator."""

    name: str
    m: int
    n: int
    k: int
    inputs: tuple[DType, DType]
    accumulator: DType
    scope: str  # where the accumulator lies
    operands: tuple[str, str] = ("register", "register")  # the Scopes of left and right
    threads: int = 1  # that run it together; 0: it has queues of its own, beside the CPU
    asynchronous: bool = False  # it runs while its threads go on, and is waited for
    sparse: bool = False  # at twice the rate, a left operand of which two of every four are kept


@dataclass(frozen=True, eq=False)
class Target:
    """The facts of one machine; see the module's docstring."""

    name: str
    language: str  # of its programs' text; the target folder, or the package, that writes it
    triple: str = ""
    cpu: str = ""
    features: str = ""  # as LLVM writes them: '+avx2,+fma,-prefer-256-bit'
    vector_bytes: int = 16
    vector_registers: int = 16
    cores: int = 1
    memories: Mapping[str, MemorySpace] = field(default_factory=dict)
    matrix: tuple[MatrixUnit, ...] = ()
    limits: Mapping[str, int] = field(default_factory=dict)
    flops: Mapping[str, float] = field(default_factory=dict)  # per core, by dtype name
    chip: str = ""  # of a chip under design: its parameters, as its target folder writes them

    def __post_init__(self) -> None:
        for name in ("memories", "limits", "flops"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Target) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __reduce__(self) -> tuple[Any, ...]:
        return (from_text, (self.to_text(),))

    @cached_property
    def key(self) -> str:
        """A stable hash of all facts."""
        return hashlib.blake2b(self.to_text().encode(), digest_size=16).hexdigest()

    @cached_property
    def threads(self) -> int:
        """Threads that run in step (a warp); 1 where a program is one thread with vectors."""
        return self.limits.get("threads_per_warp", 1)

    @property
    def has_threads(self) -> bool:
        """Whether a program is a block of threads that share memory and run in step."""
        return self.threads > 1

    @cached_property
    def asynchronous_units(self) -> tuple[MatrixUnit, ...]:
        """The matrix units that run while their threads go on."""
        return tuple(unit for unit in self.matrix if unit.asynchronous)

    @cached_property
    def array(self) -> MatrixUnit | None:
        """The matrix unit beside the CPU, in the same memory, that takes instructions itself."""
        return next(iter(self.array_rates), None)

    @cached_property
    def array_rates(self) -> tuple[MatrixUnit, ...]:
        """The array with one weight a step, then with two where it has such rates, by name."""
        return tuple(unit for unit in self.matrix if unit.threads == 0)

    @cached_property
    def feature_set(self) -> frozenset[str]:
        """The LLVM features that are on, without their '+'."""
        return frozenset(f[1:] for f in self.features.split(",") if f.startswith("+"))

    def has(self, feature: str) -> bool:
        """Whether the LLVM feature (say 'avx512vnni') may be used."""
        return feature in self.feature_set

    @property
    def multiplies_by_lane(self) -> bool:
        """Whether a multiply-add takes one lane of a vector as the factor of another: where not,
        that factor comes from memory."""
        return self.has("neon")

    @property
    def multiplies_bytes(self) -> bool:
        """Whether an instruction adds four products of bytes to a number of 32 bits."""
        return any(self.has(name) for name in ("dotprod", "avx512vnni", "avxvnni"))

    def lanes(self, dtype: DType) -> int:
        """Elements of `dtype` in one vector register (at least one)."""
        return max(1, self.vector_bytes * 8 // dtype.bits)

    def matrix_units(self, left: DType, right: DType) -> tuple[MatrixUnit, ...]:
        """The matrix units that multiply `left` by `right`."""
        return tuple(unit for unit in self.matrix if unit.inputs == (left, right))

    def peak_flops(self, dtype: DType, cores: int | None = None) -> float:
        """Estimated FLOP/s in `dtype` on `cores` cores (all of them by default)."""
        one = self.flops.get(dtype.name, self.flops.get("float32", 0.0))
        return one * (self.cores if cores is None else cores)

    def peak_bytes(self, scope: str = "global", cores: int | None = None) -> float:
        """Estimated bytes/s that `cores` cores move from `scope`."""
        memory = self.memories[scope]
        count = 1 if memory.shared else (self.cores if cores is None else cores)
        return memory.bytes_per_second * count

    def with_cores(self, cores: int) -> Target:
        """The same machine with `cores` cores."""
        return replace(self, cores=cores)

    def to_text(self) -> str:
        """The Target as JSON with sorted keys."""
        record: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        record["memories"] = {name: vars(space) for name, space in self.memories.items()}
        record["matrix"] = [_unit_record(unit) for unit in self.matrix]
        record["limits"], record["flops"] = dict(self.limits), dict(self.flops)
        return json.dumps(record, sort_keys=True)


def from_text(text: str) -> Target:
    """The Target that `Target.to_text` wrote."""
    try:
        record = json.loads(text)
        record["memories"] = {
            name: MemorySpace(**{**space, "copies": tuple(space["copies"])})
            for name, space in record["memories"].items()
        }
        record["matrix"] = tuple(_unit_of(unit) for unit in record["matrix"])
        return Target(**record)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            "not the text of a Target", expected="JSON written by Target.to_text", got=error
        ) from error


def _unit_record(unit: MatrixUnit) -> dict[str, Any]:
    record = dict(vars(unit))
    record["inputs"] = [dtype.name for dtype in unit.inputs]
    record["accumulator"] = unit.accumulator.name
    return record


def _unit_of(record: dict[str, Any]) -> MatrixUnit:
    left, right = (dtype_of(name) for name in record["inputs"])
    accumulator = dtype_of(record["accumulator"])
    typed = {"inputs": (left, right), "accumulator": accumulator}
    return MatrixUnit(**{**record, **typed, "operands": tuple(record["operands"])})


# --- static CPU Targets -------------------------------------------------------------------------

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

_AMX_TILES = ("amx", ("amx", "amx"))  # where the accumulator and the operands lie
_CPU_LIMITS = {"page_tokens": 64, "step_tokens": 512}  # see _GPU_LIMITS
AMX_BF16 = (MatrixUnit("tdpbf16ps", 16, 16, 32, (bfloat16, bfloat16), float32, *_AMX_TILES),)
AMX_INT8 = (
    MatrixUnit("tdpbssd", 16, 16, 64, (int8, int8), int32, *_AMX_TILES),
    MatrixUnit("tdpbsud", 16, 16, 64, (int8, uint8), int32, *_AMX_TILES),
    MatrixUnit("tdpbusd", 16, 16, 64, (uint8, int8), int32, *_AMX_TILES),
    MatrixUnit("tdpbuud", 16, 16, 64, (uint8, uint8), int32, *_AMX_TILES),
)
AMX_FEATURES = {"amx-bf16": AMX_BF16, "amx-int8": AMX_INT8}


def cpu_target(
    name: str,
    *,
    triple: str,
    cpu: str,
    features: str,
    vector_bytes: int,
    vector_registers: int,
    cores: int = 1,
    hertz: float = 2.5e9,
    caches: Mapping[str, int] | None = None,
    memory_bytes: int = 16 * GIB,
) -> Target:
    """A CPU Target: matrix units and estimates follow from features, vectors and clock."""
    have = {f[1:] for f in features.split(",") if f.startswith("+")}
    sizes = {"l1": 32 * KIB, "l2": 1 * MIB, "l3": 32 * MIB, **(caches or {})}
    memories = {
        "register": MemorySpace(vector_bytes * vector_registers, vector_bytes, ("load", "store")),
        "l1": MemorySpace(sizes["l1"], 64, ("prefetch",), hertz * 2 * vector_bytes),
        "l2": MemorySpace(sizes["l2"], 64, ("prefetch",), hertz * 24),
        "l3": MemorySpace(sizes["l3"], 64, ("prefetch",), 80e9, shared=True),
        "global": MemorySpace(memory_bytes, 64, ("load", "store"), 60e9, shared=True),
    }
    matrix = tuple(unit for f, units in AMX_FEATURES.items() if f in have for unit in units)
    if matrix:
        memories["amx"] = MemorySpace(8 * KIB, 64, ("tileload", "tilestore"), hertz * 64)
    return Target(
        name,
        "llvm",
        triple,
        cpu,
        features,
        vector_bytes,
        vector_registers,
        cores,
        memories,
        matrix,
        {**_CPU_LIMITS, **({"tiles": 8, "tile_bytes": KIB} if matrix else {})},
        cpu_flops(have, vector_bytes, hertz),
    )


def cpu_flops(features: set[str], vector_bytes: int, hertz: float) -> dict[str, float]:
    """Estimated FLOP/s of one core by dtype name: two vector units, fused where it can."""
    fused = 2 if features & {"fma", "neon", "avx512f"} else 1
    single = hertz * (vector_bytes // 4) * 2 * fused
    flops = {
        "float32": single,
        "float64": single / 2,
        "bfloat16": single,
        "float16": single,
        "int32": single / 2,
        "int8": single,
    }
    if "avx512fp16" in features:
        flops["float16"] = single * 2
    if "avx512bf16" in features:
        flops["bfloat16"] = single * 1.5
    if features & {"avx512vnni", "dotprod"}:
        flops["int8"] = single * 4
    if "amx-bf16" in features:
        flops["bfloat16"] = hertz * 2048 * 0.5
    if "amx-int8" in features:
        flops["int8"] = hertz * 4096 * 0.5
    return flops


X86_LINUX = "x86_64-unknown-linux-gnu"
_AVX2 = "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe,+popcnt,+sse4.2"
_AVX512 = f"{_AVX2},+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512cd,-prefer-256-bit"
_AMX = (
    f"{_AVX512},+avx512bf16,+avx512vnni,+avx512fp16,+avx512vbmi,+avx512ifma"
    ",+amx-tile,+amx-bf16,+amx-int8"
)

SSE2 = cpu_target(
    "x86-64", triple=X86_LINUX, cpu="x86-64", features="+sse2", vector_bytes=16, vector_registers=16
)
AVX2 = cpu_target(
    "avx2", triple=X86_LINUX, cpu="x86-64-v3", features=_AVX2, vector_bytes=32, vector_registers=16
)
AVX512 = cpu_target(
    "avx512",
    triple=X86_LINUX,
    cpu="x86-64-v4",
    features=_AVX512,
    vector_bytes=64,
    vector_registers=32,
)
AVX512_AMX = cpu_target(
    "avx512-amx",
    triple=X86_LINUX,
    cpu="sapphirerapids",
    features=_AMX,
    vector_bytes=64,
    vector_registers=32,
    caches={"l1": 48 * KIB, "l2": 2 * MIB},
)
NEON = cpu_target(
    "neon",
    triple="aarch64-unknown-linux-gnu",
    cpu="generic",
    features="+neon",
    vector_bytes=16,
    vector_registers=32,
)

# --- static GPU Targets -------------------------------------------------------------------------
# A core is a streaming multiprocessor, a vector what one thread moves in one access. The FLOP/s
# are those of the data sheets, dense; what power leaves of them on random data is beside them;
# 'tf32' is float32 through the matrix units.

_WARP = {  # one warp, operands in registers: sm_80 and later
    "m16n8k16.f32.bf16.bf16": (16, 8, 16, bfloat16, bfloat16, float32),
    "m16n8k16.f32.f16.f16": (16, 8, 16, float16, float16, float32),
    "m16n8k8.f32.tf32.tf32": (16, 8, 8, float32, float32, float32),  # cuts floats to 10 bits
    "m16n8k32.s32.s8.s8": (16, 8, 32, int8, int8, int32),
    "m16n8k32.s32.u8.u8": (16, 8, 32, uint8, uint8, int32),
    "m16n8k32.s32.s8.u8": (16, 8, 32, int8, uint8, int32),
    "m16n8k32.s32.u8.s8": (16, 8, 32, uint8, int8, int32),
    "m8n8k4.f64.f64.f64": (8, 8, 4, float64, float64, float64),
}
_WARPGROUP = {  # four warps, operands in shared memory, any n that is a multiple of 8: sm_90a
    "m64n256k16.f32.bf16.bf16": (64, 256, 16, bfloat16, bfloat16, float32),
    "m64n256k16.f32.f16.f16": (64, 256, 16, float16, float16, float32),
    "m64n256k8.f32.tf32.tf32": (64, 256, 8, float32, float32, float32),  # cuts floats to 10 bits
    "m64n256k32.f32.e4m3.e4m3": (64, 256, 32, float8_e4m3, float8_e4m3, float32),
    "m64n256k32.f32.e4m3.e5m2": (64, 256, 32, float8_e4m3, float8_e5m2, float32),
    "m64n256k32.f32.e5m2.e4m3": (64, 256, 32, float8_e5m2, float8_e4m3, float32),
    "m64n256k32.f32.e5m2.e5m2": (64, 256, 32, float8_e5m2, float8_e5m2, float32),
    "m64n256k32.s32.s8.s8": (64, 256, 32, int8, int8, int32),
    "m64n256k32.s32.u8.u8": (64, 256, 32, uint8, uint8, int32),
    "m64n256k32.s32.s8.u8": (64, 256, 32, int8, uint8, int32),
    "m64n256k32.s32.u8.s8": (64, 256, 32, uint8, int8, int32),
}


def _units(
    instruction: str, table: Mapping[str, tuple[Any, ...]], operands: str, threads: int
) -> tuple[MatrixUnit, ...]:
    shared = operands == "shared"
    scopes = ("register", (operands, operands), threads, shared)
    return tuple(
        MatrixUnit(
            f"{instruction}.{name}",
            m,
            n,
            k,
            (left, right),
            accumulator,
            *scopes,
            sparse=shared and left.is_float and left.bits < 32,
        )
        for name, (m, n, k, left, right, accumulator) in table.items()
    )


MMA, WGMMA = _units("mma", _WARP, "register", 32), _units("wgmma", _WARPGROUP, "shared", 128)
_GPU_LIMITS = {
    "page_tokens": 32,  # of a paged cache: what is past a request's last token is read in vain
    "step_tokens": 2048,  # of a step that has prompts in it; more are no quicker
    "threads_per_warp": 32,
    "threads_per_block": 1024,
    "threads_per_core": 2048,
    "warps_per_block": 32,
    "warps_per_core": 64,
    "blocks_per_core": 32,
    "registers_per_thread": 255,
    "registers_per_block": 65536,
    "registers_per_core": 65536,
    "named_barriers": 16,
    "parameter_bytes": 32764,
    "parameter_bytes_before_ptx_8_1": 4096,
    "grid_x": 2**31 - 1,
    "grid_y": 65535,
    "grid_z": 65535,
}


def gpu_target(
    name: str,
    *,
    cpu: str,
    cores: int,
    hertz: float,
    memory_bytes: int,
    memory_rate: float,
    l2_bytes: int,
    l2_rate: float,
    shared_bytes: int,
    cluster: int,
    flops: Mapping[str, float],
) -> Target:
    """An NVIDIA Target; `flops` are of the whole machine, `cluster` blocks may share memory."""
    copies = ("load", "store", "copy_async", *(("copy_store",) if cluster > 1 else ()))
    memories = {
        "register": MemorySpace(256 * KIB, 4, ("load", "store")),
        "shared": MemorySpace(shared_bytes, 128, copies, hertz * 128),
        "l2": MemorySpace(l2_bytes, 128, ("prefetch",), l2_rate, shared=True),
        "global": MemorySpace(memory_bytes, 128, ("load", "store"), memory_rate, shared=True),
    }
    if cluster > 1:  # the shared memories of all blocks of a cluster; about 25 GB/s for each core
        memories["cluster"] = MemorySpace(cluster * shared_bytes, 128, ("load", "store"), 25e9)
    limits = {
        **_GPU_LIMITS,
        "shared_bytes_per_block": shared_bytes,
        "shared_bytes_per_core": shared_bytes + KIB,
        "cluster": cluster,
    }
    return Target(
        name,
        "ptx",
        "nvptx64-nvidia-cuda",
        cpu,
        vector_bytes=16,
        vector_registers=63,
        cores=cores,
        memories=memories,
        matrix=(*(WGMMA if cpu == "sm_90a" else ()), *MMA),
        limits=limits,
        flops={kind: rate / cores for kind, rate in flops.items()},
    )


# cuBLAS sustains 670 to 710e12 in bfloat16 and 1200 to 1500e12 in float8 on random data.
_HOPPER_FLOPS = {
    "bfloat16": 989e12,
    "float16": 989e12,
    "float8_e4m3": 1979e12,
    "float8_e5m2": 1979e12,
    "int8": 1979e12,
    "uint8": 1979e12,
    "tf32": 494e12,
    "float32": 67e12,
    "float64": 67e12,
    "int32": 33.5e12,
}
_HOPPER_SHARED = 227 * KIB

H100 = gpu_target(
    "h100",
    cpu="sm_90a",
    cores=132,
    hertz=1.83e9,
    memory_bytes=79 * GIB,
    memory_rate=3.0e12,
    l2_bytes=50 * MIB,
    l2_rate=5.5e12,
    cluster=8,
    shared_bytes=_HOPPER_SHARED,
    flops=_HOPPER_FLOPS,
)
# A copy moves 4.26e12 bytes a second, a pure read 4.47e12.
H200 = gpu_target(
    "h200",
    cpu="sm_90a",
    cores=132,
    hertz=1.83e9,
    memory_bytes=139 * GIB,
    memory_rate=4.26e12,
    l2_bytes=60 * MIB,
    l2_rate=5.5e12,
    cluster=8,
    shared_bytes=_HOPPER_SHARED,
    flops=_HOPPER_FLOPS,
)
# cuBLAS sustains about 250e12 in bfloat16.
A100 = gpu_target(
    "a100",
    cpu="sm_80",
    cores=108,
    hertz=1.41e9,
    memory_bytes=79 * GIB,
    memory_rate=1.6e12,
    l2_bytes=40 * MIB,
    l2_rate=4.0e12,
    cluster=1,
    shared_bytes=163 * KIB,
    flops={
        "bfloat16": 312e12,
        "float16": 312e12,
        "int8": 624e12,
        "uint8": 624e12,
        "tf32": 156e12,
        "float32": 19.5e12,
        "float64": 19.5e12,
        "int32": 9.7e12,
    },
)

STATIC: Mapping[str, Target] = MappingProxyType(
    {target.name: target for target in (SSE2, AVX2, AVX512, AVX512_AMX, NEON, H100, H200, A100)}
)


# What compilers call these machines.
ALIASES = MappingProxyType(
    {
        "sm_90a": "h200",
        "sm_80": "a100",
        "x86-64-v2": "x86-64",
        "x86-64-v3": "avx2",
        "x86-64-v4": "avx512",
        "aarch64": "neon",
    }
)


def target_named(name: str) -> Target:
    """The static Target called `name`, or by the name that compilers have for it."""
    found = STATIC.get(ALIASES.get(name, name))
    if found is None:
        raise UserError(
            "unknown Target",
            expected="one of " + ", ".join([*STATIC, *ALIASES]),
            got=name,
            hint=meant(name, [*STATIC, *ALIASES]),
        )
    return found

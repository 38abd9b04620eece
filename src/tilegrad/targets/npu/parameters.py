"""The parameters of an NPU: one frozen record that simulator, compiler and RTL read alike.

A mesh of `rows` x `columns` multipliers is fed from a scratchpad and adds into an accumulator
memory; a vector unit works on the accumulators; three queues (load, execute, store) run side by
side. Invariant: a `Parameters` that exists can be built: every field is within its bound, and an
error names the field, its bound and what would fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ...core.errors import UserError
from ...core.parameter_file import read_parameters

DATAFLOWS = ("ws", "os", "is")  # what stays in the mesh: weights, sums, inputs
WEIGHTS = {  # elements of the multipliers, and the weights that each may have
    "int8": ("int8", "int4"),
    "bf16": ("bf16", "fp8"),
    "fp16": ("fp16", "fp8"),
}
BITS = {"int8": 8, "int4": 4, "bf16": 16, "fp16": 16, "fp8": 8}
BOUNDS = {
    "rows": (1, 256),
    "columns": (1, 256),
    "banks": (2, 16),
    "bank_rows": (4, 32768),
    "accumulator_rows": (4, 65536),
    "lanes": (1, 256),
    "queue": (2, 64),
    "tokens": (1, 255),
    "program_words": (16, 65536),
    "dma_bytes": (1, 128),
    "dram_latency": (1, 65535),
    "dram_bandwidth": (1e-3, 1e5),
    "clock": (1e-3, 1e5),
}
TYPES = {float: "a number", int: "a whole number", str: "a text", bool: "true or false"}
POWERS = ("banks", "bank_rows", "accumulator_rows", "program_words", "dma_bytes")


@dataclass(frozen=True)
class Energy:
    """What an event costs, in pJ (45 nm: chip.md's table of adders and small memories)."""

    mac: float = 0.23
    scratchpad_byte: float = 1.45
    accumulator_byte: float = 1.45
    vector: float = 0.4  # one lane, one beat
    dram_byte: float = 64.0
    idle_cycle: float = 0.0


@dataclass(frozen=True)
class Parameters:
    """An NPU; see the module's docstring."""

    name: str = "npu"
    rows: int = 16
    columns: int = 16
    dataflow: str = "ws"
    element: str = "int8"  # int8 with int32 sums, bf16 or fp16 with fp32 sums
    weights: str = ""  # the element, or of half its bits: int4, fp8 (e4m3); two then make a step
    banks: int = 4  # of the scratchpad
    bank_rows: int = 1024
    accumulator_rows: int = 1024
    lanes: int = 4  # of the vector unit
    queue: int = 4  # instructions that wait before each unit
    tokens: int = 15  # most that a channel between two units holds
    program_words: int = 1024
    dma_bytes: int = 16  # a cycle
    dram_latency: int = 40  # cycles
    dram_bandwidth: float = 16.0  # GB/s, each way
    sparse: bool = False  # a 2:4 unit
    stochastic: bool = False  # stochastic rounding of what is stored
    clock: float = 1000.0  # MHz
    energy: Energy = field(default_factory=Energy)

    def __post_init__(self) -> None:
        if not self.weights:
            object.__setattr__(self, "weights", self.element)
        _check(self)

    @property
    def side(self) -> int:
        """Elements that a row of the scratchpad must hold for either side of the mesh."""
        return max(self.rows, self.columns)

    @property
    def row_elements(self) -> int:
        """Elements of a row of the scratchpad: twice a side where a step may take pairs."""
        return self.side * (2 if self.sparse or self.mixed else 1)

    @property
    def mixed(self) -> bool:
        """Whether a multiplier is one of mixed precision: it holds one weight of an element's bits,
        or two of half as many, each with an input of its own."""
        return self.weights != self.element

    @property
    def lane(self) -> int:
        """Inputs that a row of the mesh takes at once."""
        return 4 if self.sparse else 2 if self.mixed else 1

    @property
    def element_bits(self) -> int:
        """Bits of an element of the multipliers."""
        return BITS[self.element]

    @property
    def stored_bits(self) -> int:
        """Bits of an element in the scratchpad: with a 2:4 unit each has its index."""
        return self.element_bits + (2 if self.sparse else 0)

    @property
    def planes(self) -> int:
        """Rows of the scratchpad that hold one row of 32-bit values."""
        return 32 // self.element_bits

    @property
    def floating(self) -> bool:
        """Whether sums are fp32."""
        return self.element != "int8"

    @property
    def scratchpad_rows(self) -> int:
        """Rows of all banks."""
        return self.banks * self.bank_rows

    @property
    def scratchpad_bytes(self) -> int:
        """Bytes of elements that the scratchpad holds."""
        return self.scratchpad_rows * self.row_elements * self.element_bits // 8

    @property
    def accumulator_bytes(self) -> int:
        """Bytes of the accumulator memory (it exists twice, for two readers)."""
        return self.accumulator_rows * self.columns * 4

    @property
    def gap(self) -> int:
        """Cycles from one beat of DRAM to the next."""
        return max(1, math.ceil(self.dma_bytes * self.clock / (self.dram_bandwidth * 1e3) - 1e-9))

    @property
    def peak_macs(self) -> int:
        """Multiplications a cycle."""
        return self.rows * self.columns

    @staticmethod
    def of(table: Mapping[str, Any], name: str = "npu") -> Parameters:
        """The parameters of a table of fields; `preset` names where to begin."""
        given = dict(table)
        base = preset(str(given.pop("preset"))) if "preset" in given else Parameters()
        given.setdefault("name", name)
        energy = given.pop("energy", None)
        if energy is not None:
            if not isinstance(energy, Mapping):
                raise _bad("energy", "a table of fields", energy)
            _known(energy, Energy, "energy.")
            given["energy"] = Energy(**{**vars(base.energy), **energy})
        _known(given, Parameters, "")
        if "element" in given and "weights" not in given:
            given["weights"] = ""
        return Parameters(**{**vars(base), **given})

    @staticmethod
    def load(path: str | Path) -> Parameters:
        """The parameters of a file, `.toml` or `.json`."""
        return Parameters.of(read_parameters(path), Path(path).stem)

    def to_table(self) -> dict[str, Any]:
        """All fields, as `of` takes them."""
        return asdict(self)


def _bad(name: str, expected: str, got: object, hint: str | None = None) -> UserError:
    return UserError(f"bad {name}", op="npu", expected=expected, got=repr(got), hint=hint)


def _known(given: Mapping[str, Any], kind: type, where: str) -> None:
    names = {f.name for f in fields(kind)}
    for key in given:
        if key not in names:
            raise _bad(f"field {where}{key}", f"a field of {', '.join(sorted(names))}", key)


def _check(p: Parameters) -> None:
    """Every bound; the first that does not hold is an error."""
    _check_types(p)
    for name, (least, most) in BOUNDS.items():
        value = getattr(p, name)
        if not least <= value <= most:
            fits = min(max(least, value), most)  # the least for what is not a number
            raise _bad(name, f"{least} to {most}", value, f"{name} = {fits} would fit")
    for name in POWERS:
        value = getattr(p, name)
        if value & (value - 1):
            below = 1 << (value.bit_length() - 1)
            hint = f"{name} = {below} or {2 * below} would fit"
            raise _bad(name, "a power of two", value, hint)
    if p.columns % p.lanes:
        fits = max(n for n in range(1, p.lanes + 1) if p.columns % n == 0)
        hint = f"lanes = {fits} would fit"
        raise _bad("lanes", f"a divisor of columns ({p.columns})", p.lanes, hint)
    if p.scratchpad_rows > 65536:
        hint = f"bank_rows = {65536 // p.banks} would fit"
        raise _bad("bank_rows", "at most 65536 rows in all banks", p.bank_rows, hint)
    if p.sparse and p.rows % 2:
        raise _bad("rows", "even, for a 2:4 unit", p.rows, f"rows = {p.rows + 1} would fit")
    least = p.dma_bytes * p.clock / (1e3 * BOUNDS["dram_latency"][1])  # GB/s, of any latency
    if p.dram_bandwidth < least:
        hint = f"dram_bandwidth = {1.001 * least:.4g} would fit"
        raise _bad("dram_bandwidth", f"at least {least:.4g} for this port", p.dram_bandwidth, hint)
    if p.dram_latency < p.gap:
        hint = f"dram_latency = {p.gap} would fit, or more dram_bandwidth"
        raise _bad("dram_latency", f"at least {p.gap}, the cycles of a beat", p.dram_latency, hint)


def _check_types(p: Parameters) -> None:
    for f in fields(Parameters):
        if f.name == "energy":
            continue
        value, kind = getattr(p, f.name), type(f.default)
        if type(value) is not kind and (type(value), kind) != (int, float):
            raise _bad(f.name, TYPES[kind], value, f"{f.name} = {f.default!r} would fit")
    for name, known in (("dataflow", DATAFLOWS), ("element", tuple(WEIGHTS))):
        if getattr(p, name) not in known:
            hint = f"{name} = {known[0]!r} would fit"
            raise _bad(name, " or ".join(known), getattr(p, name), hint)
    if p.weights not in WEIGHTS[p.element]:
        hint = f"weights = {p.element!r} would fit"
        raise _bad("weights", f"{' or '.join(WEIGHTS[p.element])} for {p.element}", p.weights, hint)
    for f in fields(Energy):
        value = getattr(p.energy, f.name)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not 0 <= value < math.inf
        ):
            hint = f"energy.{f.name} = {f.default} would fit"
            raise _bad(f"energy.{f.name}", "a number of pJ, at least 0", value, hint)


PRESETS: dict[str, dict[str, Any]] = {
    "edge": {
        "rows": 8,
        "columns": 8,
        "lanes": 4,
        "bank_rows": 2048,
        "dma_bytes": 8,
        "dram_bandwidth": 4.0,
        "clock": 500.0,
    },
    "16x16": {},
    # The sizes of a TPU's unit: weights stay, wide memory.
    "tpu-like": {
        "rows": 128,
        "columns": 128,
        "element": "bf16",
        "bank_rows": 8192,
        "accumulator_rows": 4096,
        "lanes": 128,
        "dma_bytes": 128,
        "dram_bandwidth": 819.0,
        "dram_latency": 200,
        "clock": 1500.0,
    },
    # Eyeriss' array and buffer; its row-stationary flow is the explorer's, here sums stay.
    "eyeriss-like": {
        "rows": 12,
        "columns": 14,
        "dataflow": "os",
        "lanes": 7,
        "bank_rows": 2048,
        "accumulator_rows": 256,
        "dma_bytes": 4,
        "dram_bandwidth": 0.8,
        "clock": 200.0,
    },
}


def preset(name: str) -> Parameters:
    """A known NPU by its name."""
    if name not in PRESETS:
        raise UserError("unknown preset", op="npu", expected=", ".join(PRESETS), got=repr(name))
    return Parameters(name=name, **PRESETS[name])


def chip_of(name: str) -> Parameters:
    """The parameters of a preset, or of a file."""
    if name in PRESETS:
        return preset(name)
    if not Path(name).is_file():
        raise UserError(
            "no such chip",
            op="npu",
            expected=f"a file, or a preset: {', '.join(PRESETS)}",
            got=repr(name),
        )
    return Parameters.load(name)

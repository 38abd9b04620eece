"""A whole network on an NPU in closed form: cycles, energy and area, fast enough for a slider.

A product of matrices is many steps of a few kinds, each a handful of instructions; the lengths of
instructions are the simulator's own (`targets/npu/timing.py`), and what a kind does is counted once
and taken as often as it comes. The three queues work side by side, so a product takes what the
busiest one needs, and the first load and the last store around it. Invariant: energies are exactly
the counters of the simulator for the programs of `targets/npu/product.py`, cycles within some
percent of theirs; between products (activations, norms) nothing is counted. Areas are estimates.
Weights of half the bits (`doubles`) and pruned ones (`prunes`) are counted two a step, as the mesh
takes them; functions whose weights are not stored so are slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..targets.npu.instructions import QUEUES, Instruction, instruction
from ..targets.npu.layout import Narrow
from ..targets.npu.parameters import Parameters
from ..targets.npu.product import Product
from ..targets.npu.timing import row_beats, row_bytes, run_cycles
from ..tile import array
from .explore.problem import Problem
from .mapped import named
from .workload import Workload

# mm2 at 45 nm, from CACTI and Aladdin: an int8 multiplier with its sum, a byte of SRAM
MULTIPLIER = {"int8": 783e-6, "bf16": 2.5 * 783e-6, "fp16": 2.5 * 783e-6}  # floats: assumed
MIXED = {"int8": 1.2, "bf16": 1.8, "fp16": 1.8}  # a second product for weights of half the bits
SRAM = 3.3e-6
LANE = 4 * 783e-6  # of the vector unit: an assumption
CONTROL = 0.05  # of the rest, for queues, DMA and control: an assumption
Step = tuple[int, list[Instruction]]  # how often, and its instructions


@dataclass
class Tally:
    """What instructions do: cycles of each queue, multiplications, bytes of each memory."""

    cycles: list[float] = field(default_factory=lambda: [0.0] * len(QUEUES))
    macs: float = 0.0  # of the whole mesh, padding too
    dram: float = 0.0
    scratchpad: float = 0.0
    accumulators: float = 0.0

    def add(self, p: Parameters, word: Instruction, times: float) -> None:
        """An instruction, so many times."""
        assert word.queue is not None
        self.cycles[word.queue] += times * (run_cycles(p, word) + 2)  # taking and posting it
        row, sums = p.row_elements * p.stored_bits // 8, p.columns * 4
        if word.op == "move_in":
            read = times * word["rows"] * row_beats(p, word) * p.dma_bytes
            self.dram += read
            self.scratchpad += read
        elif word.op == "move_out":
            self.dram += times * word["rows"] * row_bytes(p, word)
        elif word.op == "preload":
            self.scratchpad += times * word["rows"] * row
        else:
            count, output = word["count"], p.dataflow == "os"
            self.macs += times * count * p.peak_macs * (1 + word["mixed"])
            self.scratchpad += times * count * row * (2 if output else 1)
            written = (word["rows"] if word["drain"] else 0) if output else count
            self.accumulators += times * written * sums * (2 if word["accumulate"] else 1)


@dataclass(frozen=True)
class Estimated:
    """One product of a network on an NPU."""

    name: str
    count: int  # how often the network has it
    macs: float  # that are asked for
    dram_bytes: float
    queues: dict[str, float]  # cycles that each is busy
    ends: float  # cycles of the first load and the last store, which nothing hides
    energy: dict[str, float]  # pJ by part

    @property
    def cycles(self) -> float:
        """Cycles of one such product."""
        return max(self.queues.values()) + self.ends

    @property
    def bound(self) -> str:
        """The busiest queue: load, execute or store."""
        return max(self.queues, key=lambda name: self.queues[name])


@dataclass(frozen=True)
class Estimate:
    """A network on an NPU."""

    parameters: Parameters
    products: tuple[Estimated, ...]

    @property
    def cycles(self) -> float:
        """Cycles, product after product."""
        return sum(p.count * p.cycles for p in self.products)

    @property
    def seconds(self) -> float:
        """Seconds."""
        return self.cycles / (1e6 * self.parameters.clock)

    @property
    def utilisation(self) -> float:
        """Multiplications asked for, over those that the mesh could do in that time."""
        done = sum(p.count * p.macs for p in self.products)
        return done / (self.cycles * dense_peak(self.parameters))

    def energy(self) -> dict[str, float]:
        """pJ by part."""
        total: dict[str, float] = {}
        for product in self.products:
            for name, value in product.energy.items():
                total[name] = total.get(name, 0.0) + product.count * value
        return total


def areas(p: Parameters) -> dict[str, float]:
    """mm2 of each block at 45 nm, estimated."""
    found = {
        "multipliers": p.peak_macs * MULTIPLIER[p.element] * (MIXED[p.element] if p.mixed else 1.0),
        "scratchpad": SRAM * p.scratchpad_rows * p.row_elements * p.stored_bits / 8,
        "accumulators": 2 * SRAM * p.accumulator_bytes,  # two copies, for two readers
        "vector unit": p.lanes * LANE,
    }
    return {**found, "control": CONTROL * sum(found.values())}


def prunes(p: Parameters) -> bool:
    """Whether the chip gains by weights pruned to two of four."""
    return p.sparse


def doubles(p: Parameters) -> bool:
    """Whether weights of half the bits can go through the mesh two at once (not those that are
    pruned as well)."""
    return p.mixed and not p.sparse


def dense_peak(p: Parameters) -> float:
    """Multiplications a cycle, of dense values: a 2:4 unit leaves out half, multipliers of mixed
    precision do two."""
    return p.peak_macs * (2.0 if prunes(p) or doubles(p) else 1.0)


def bandwidth(p: Parameters) -> float:
    """Bytes/s from DRAM, in a row: a beat every gap."""
    return 1e6 * p.clock * p.dma_bytes / p.gap


def estimate(p: Parameters, workload: Workload) -> Estimate:
    """What the products of a network take on an NPU, one after the other."""
    return Estimate(p, tuple(_problem(p, problem) for problem in workload.problems))


def _problem(p: Parameters, problem: Problem) -> Estimated:
    """A convolution is the product of its windows; groups run one after the other."""
    sizes = problem.sizes
    groups = sizes.get("G", 1)
    positions, depth = sizes["N"] * sizes["P"] * sizes["Q"], sizes["C"] * sizes["R"] * sizes["S"]
    return product(p, positions, sizes["M"], depth, groups, problem.count, named(problem))


def product(
    p: Parameters, M: int, N: int, K: int, groups: int = 1, count: int = 1, name: str = ""
) -> Estimated:
    """An (M, K) by (K, N) product whose sums are stored as elements."""
    tally = Tally()
    steps, results, begin, between, end = 0, 0, 0, 0, 0
    for times, words in _steps(p, M, N, K):
        spent = [0] * len(QUEUES)
        for word in words:
            tally.add(p, word, groups * times)
            assert word.queue is not None
            spent[word.queue] += run_cycles(p, word) + 2
        if words[-1].op == "move_out":
            results, end = results + times, spent[2]
        else:
            begin, between = begin or spent[0], between or spent[1]
            steps += times
    queues = dict(zip(QUEUES, tally.cycles))
    first = begin + between + (steps // results - 1) * max(begin, between)  # result, until stored
    around = {"load": between + end, "execute": begin + end, "store": first}
    cost = p.energy
    energy = {
        "multipliers": tally.macs * cost.mac,
        "scratchpad": tally.scratchpad * cost.scratchpad_byte,
        "accumulators": tally.accumulators * cost.accumulator_byte,
        "DRAM": tally.dram * cost.dram_byte,
    }
    bound = max(queues, key=lambda queue: queues[queue])
    done = groups * float(M) * N * K
    found = Estimated(name, count, done, tally.dram, queues, groups * around[bound], energy)
    if cost.idle_cycle:
        energy["idle"] = found.cycles * cost.idle_cycle
    return found


def _steps(p: Parameters, M: int, N: int, K: int) -> Iterator[Step]:
    """The instructions of each kind of step and of each kind of store, and how many there are."""
    rate = array.SPARSE if prunes(p) else array.MIXED if doubles(p) else ""
    sides = (N, M) if rate and p.dataflow == "is" else (M, N)  # what stays goes two a step
    made = Product(p, *sides, K, None if p.floating else Narrow(), rate=rate)
    yield from (_sums_in_place if p.dataflow == "os" else _weights_in_place)(p, made)


def _weights_in_place(p: Parameters, made: Product) -> Iterator[Step]:
    """Steps of `tall` rows or of what is left, of some tiles of `wide` inputs of K each."""
    depths, wide = made.depths, made.wide
    stays = bool(made.rate) or not made.exchanged  # weights, not inputs
    preload = instruction("preload", rows=p.rows)
    for times, count in _parts(made.m, made.tall):
        begin = instruction("matmul", count=count, mixed=int(doubles(p)))
        more = instruction("matmul", count=count, accumulate=1, mixed=int(doubles(p)))
        for number, (steps, tiles) in enumerate(_parts(depths, min(made.tiles, depths))):
            moves = [
                _move(p, tiles * count, wide, weights=not stays),
                _move(p, tiles * p.rows, p.columns, weights=stays),
            ]
            rest = [preload, more] * (tiles - 1)
            first = number == 0
            if first:
                yield times * made.columns, [*moves, preload, begin, *rest]
            if steps > first:
                yield times * made.columns * (steps - first), [*moves, preload, more, *rest]
        for tiles, columns in _parts(made.n, p.columns):
            yield times * tiles, [_store(p, count, columns)]


def _sums_in_place(p: Parameters, made: Product) -> Iterator[Step]:
    """Steps of some rows of weights or of what is left; the last of a result drains it."""
    parts = list(_parts(made.k, made.deep))
    for tall, rows in _parts(made.m, p.rows):
        for tiles, columns in _parts(made.n, p.columns):
            for number, (times, count) in enumerate(parts):
                moves = [
                    _move(p, count, made.wide, weights=False),
                    _move(p, count, p.columns, weights=True),
                ]
                final = number == len(parts) - 1
                inner = times - 1 if final else times
                given = {"count": count, "sparse": int(prunes(p)), "mixed": int(doubles(p))}
                if inner:
                    plain = instruction("matmul", **given)
                    yield tall * tiles * inner, [*moves, plain]
                if final:
                    drain = instruction("matmul", rows=rows, drain=1, **given)
                    yield tall * tiles, [*moves, drain]
            yield tall * tiles, [_store(p, rows, columns)]


def _parts(size: int, part: int) -> Iterator[tuple[int, int]]:
    """(how many, how long) of the parts of a size."""
    if size >= part:
        yield size // part, part
    if size % part:
        yield 1, size % part


def _move(p: Parameters, rows: int, columns: int, weights: bool) -> Instruction:
    """A load; weights may be narrower in DRAM, and pruned ones have an index each."""
    narrow = int(weights and p.mixed and not doubles(p))  # two in a place come as they are
    indexed = int(weights and prunes(p))
    return instruction("move_in", rows=rows, columns=columns, narrow=narrow, indexed=indexed)


def _store(p: Parameters, rows: int, columns: int) -> Instruction:
    stride = -(-p.columns * p.element_bits // 8 // p.dma_bytes) * p.dma_bytes
    return instruction("move_out", rows=rows, columns=columns, stride=stride)


__all__ = [
    "Estimate",
    "Estimated",
    "areas",
    "bandwidth",
    "dense_peak",
    "doubles",
    "estimate",
    "product",
    "prunes",
]

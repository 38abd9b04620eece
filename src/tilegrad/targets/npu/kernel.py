"""A Kernel of the array: an ArrayWork on a chip, with its programs, costs and values.

The DMA reads operands where they lie if it can; the host packs the others (a convolution's windows
become rows here) and takes results back. Cycles and energy are the chip's alone. Invariant: `run`
at either level gives the values of the Body that the work belongs to, and `counts` what the
register level counts.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ...core.dtype import dtype_of
from ...core.errors import UserError
from ...graph.interpret import interpret
from ...ir.text import parse_block
from ...tile.array import HELD, LEFT, MIXED, RIGHT, SPARSE, ArrayWork, Operand
from .arithmetic import Array
from .functional import Functional
from .instructions import disassemble
from .layout import Narrow, Stored, Strides, VectorOperand
from .machine import Machine
from .parameters import Parameters
from .product import Product
from .target import ELEMENTS, HALVES, parameters_of
from .timing import Counters, Counts, counters_of

LEVELS = ("compiled", "words", "registers")
SHOWN = 120  # words of a listing
WIDE = ("int32", "float32")  # sums as they are


class ArrayKernel:
    """One launch of the array."""

    def __init__(
        self, p: Parameters, work: ArrayWork, symbols: Mapping[str, int] | None = None
    ) -> None:
        self.p, self.work, self.symbols = p, work, symbols or {}
        stored = tuple(
            Stored(o.value, None if o.dtype in WIDE else Narrow(o.scale, o.shift, o.relu))
            for o in work.outputs
        )
        vector_operands = tuple(
            VectorOperand(o.role == HELD, o.dtype in WIDE, self._strides(o))
            for o in work.vector_operands
        )
        sides = (work.N, work.M) if work.turned else (work.M, work.N)
        factors = self._factors()
        why = self.why_not(work.rate) if work.rate else ""
        if why:
            raise UserError(why, op="npu")
        self.product = Product(
            p,
            *sides,
            work.K,
            vector_operands=vector_operands,
            steps=work.steps,
            stored=stored,
            left_strides=self._strides(factors[0]) if factors else None,
            right_strides=self._strides(factors[1]) if factors else None,
            rate=work.rate,
        )

    @property
    def weights(self) -> Operand:
        """The Operand of the product that stays in the mesh, or goes down it with sums in place."""
        return self._factors()[0 if self.p.dataflow == "is" else 1]

    def why_not(self, rate: str) -> str:
        """Why weights do not go through the mesh at a rate that the chip has; '' where they do."""
        p, half = self.p, HALVES.get(self.p.weights)
        if rate == SPARSE and p.floating:
            return "2:4 weights are left out of integers alone: infinities times 0 are none"
        fits = [o.pruned if rate == SPARSE else o.dtype == str(half) for o in self._factors()]
        if not any(fits):
            kinds = " and ".join(dict.fromkeys(o.dtype for o in self._factors()))
            return "no operand is known to be 2:4" if rate == SPARSE else f"operands are {kinds}"
        return "" if fits[self._factors().index(self.weights)] else "inputs stay, weights go by"

    @property
    def rate_note(self) -> str:
        """How many weights a step takes, and why not two where the chip could; '' where there is no
        product, or one rate alone."""
        has = {MIXED: self.p.mixed, SPARSE: self.p.sparse}
        if not self.work.K or not any(has.values()):
            return ""
        if self.work.rate:
            kind = self.weights.dtype if self.work.rate == MIXED else "2:4"
            return f"two {kind} weights a step"
        why = {
            self.why_not(name) or "two take no less time" for name, there in has.items() if there
        }
        return "one weight a step: " + "; ".join(sorted(why))

    @property
    def busy_steps(self) -> float:
        """Multiplications over the weights of a step: what multipliers are busy for."""
        return self.work.macs / self.product.pairs

    def _factors(self) -> tuple[Operand, ...]:
        """The Operands of the product, as it is computed."""
        factors = self.work.operands[:2] if self.work.K else ()
        return factors[::-1] if self.work.turned else factors

    def _strides(self, o: Operand) -> Strides | None:
        """Bytes between rows and between columns, if all parts of a batch begin on beats."""
        if not o.strides or o.dtype not in (*WIDE, ELEMENTS[self.p.element][0].name):
            return None
        size = dtype_of(o.dtype).numpy.itemsize
        part, row, column, first = (s * size for s in o.strides)
        if first % self.p.dma_bytes or (self.work.batch > 1 and part % self.p.dma_bytes):
            return None
        return (column, row) if self.work.turned else (row, column)

    @property
    def packed_bytes(self) -> int:
        """What the host packs for the DMA."""
        return self.work.batch * self.product.packed_bytes

    @cached_property
    def counts(self) -> Counts:
        """Cycles and events by closed forms; parts of a batch run one after the other."""
        return Counts().plus(self.product.counts, self.work.batch)

    def run(self, arrays: Sequence[Array], level: str) -> tuple[list[Any], int]:
        """What is stored, in order, for the arrays of the parameters; and the cycles that the
        register level took, 0 at the level of words."""
        turned = self.work.turned
        order = (*self._factors(), *self.work.vector_operands)
        views = [
            self._lying(o, arrays[o.parameter]) if lies else self._moved(o, arrays[o.parameter])
            for o, lies in zip(order, self.product.lying)
        ]
        found: list[list[Array]] = [[] for _ in self.work.outputs]
        cycles = 0
        for b in range(self.work.batch):
            memory = self.product.pack(*[v[b] for v in views])
            for words in self.product.program():
                if level == "registers":
                    cycles += Machine(self.p, words, memory).run(1 << 40)
                else:
                    Functional(self.p, memory).run(words)
            for i, one in enumerate(found):
                found_here = self.product.unpack(memory, i)
                one.append(found_here.T if turned else found_here)
        results = []
        for o, parts in zip(self.work.outputs, found):
            kind = dtype_of(o.dtype).numpy
            whole = np.ascontiguousarray(np.stack(parts))
            results.append((whole if whole.dtype == kind else whole.view(kind)).reshape(o.shape))
        return results, cycles

    def _lying(self, o: Operand, array: Array) -> list[Array]:
        """The bytes of memory from the first element of each part of a batch on."""
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        part, _, _, first = (s * array.itemsize for s in o.strides)
        return [raw[first + b * part :] for b in range(self.work.batch)]

    def _moved(self, o: Operand, array: Array) -> Array:
        """An Operand as (batch, rows, columns), in the bits that the chip takes."""
        block = _view(o.view)
        given = {block.arguments[0]: array.reshape(o.shape)}
        found = interpret(list(block.results), given, self.symbols)[0]
        if self.work.turned:
            found = found.transpose(0, 2, 1)
        if o.role == HELD:
            found = found[:, :1]
        if o.role in (LEFT, RIGHT) and not (o is self.weights and self.work.rate == MIXED):
            found = found.astype(ELEMENTS[self.p.element][0].numpy)  # int4 and fp8 are exact
        if found.dtype.itemsize == 2:
            found = np.ascontiguousarray(found).view(np.uint16)
        return found

    def listing(self) -> str:
        """The words of the first program, and how many there are."""
        programs = list(self.product.shares())
        words = self.product.words(programs[0])
        w = self.work
        lines = disassemble(words).splitlines()
        rest = [f"... {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
        head = (
            f"; ({w.M}, {w.K}) by ({w.K}, {w.N}), {w.batch} times, {len(w.steps)} vector steps: "
            f"{len(programs)} programs, the first of {len(words)} words, "
            f"{self.counts.cycles} cycles"
        )
        lying = zip((*self._factors(), *w.vector_operands), self.product.lying)
        there = ", ".join(o.role for o, lies in lying if lies) or "nothing"
        rate = [f"; {self.rate_note}"] if self.rate_note else []
        moved = f"; read where it lies: {there}; packed by the host: {self.packed_bytes} bytes"
        return "\n".join([head, *rate, moved, *lines[:SHOWN], *rest]) + "\n"


@dataclass(frozen=True)
class Account:
    """What the array did since its Device was cleared, by closed forms."""

    counters: Counters
    macs: int  # of the work itself, without padding
    busy_steps: float  # those that multipliers were busy for: two weights a step are one
    launches: int
    packed_bytes: int  # that the host packed for the DMA
    clock: float  # MHz
    simulated: int = 0  # cycles that the register level took

    @property
    def seconds(self) -> float:
        """At the chip's clock."""
        return self.counters.cycles / (self.clock * 1e6)

    @property
    def energy(self) -> float:
        """Joules."""
        return sum(self.counters.energy.values()) * 1e-12

    @property
    def utilisation(self) -> float:
        """Steps of multipliers over those that fit into the cycles."""
        return self.busy_steps / max(1, self.counters.peak_macs * self.counters.cycles)


def account_of(p: Parameters, launched: Mapping[ArrayKernel, int], simulated: int = 0) -> Account:
    """What Kernels cost together that were launched so often."""
    total, macs, busy, packed = Counts(), 0, 0.0, 0
    for kernel, times in launched.items():
        total = total.plus(kernel.counts, times)
        macs += kernel.work.macs * times
        busy += kernel.busy_steps * times
        packed += kernel.packed_bytes * times
    count = sum(launched.values())
    return Account(counters_of(p, total), macs, busy, count, packed, p.clock, simulated)


@functools.lru_cache(maxsize=512)
def _view(text: str) -> Any:
    return parse_block(text)


@functools.lru_cache(maxsize=2048)
def kernel_of(chip: str, work: str, symbols: tuple[tuple[str, int], ...] = ()) -> ArrayKernel:
    """The Kernel of a work, as text, on a chip, as text, with its Symbols bound."""
    made = ArrayWork.of_text(work)
    known = dict(symbols)
    return ArrayKernel(parameters_of(chip), made.bound(known) if symbols else made, known)

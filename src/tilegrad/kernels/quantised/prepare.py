"""How the bytes of weights are prepared for a machine's kernels: once, by the runtime.

A `Preparation` is called in a Graph on the bytes of weights as a file stores them, (rows, bytes of
a row) each or (experts, rows, bytes of a row), and gives the parts that kernels read (see `shape`);
rows of several weights follow one another. What it makes depends on Format, sizes and the kind of
kernels alone, so that whatever reads the weights reads the same bytes. The Schedule never computes
one: the Recipe names it, and `runtime.prepared` keeps what was made. Invariant: equal keys make
equal parts of equal bytes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from importlib import import_module
from typing import Any

import numpy as np

from ...core.dtype import DType
from ...core.errors import InternalError, ShapeError
from ...core.format import format_of
from ...core.target import Target
from ...ir.callee import Callee
from ...ir.symbol import high
from ...ir.text import ATTRIBUTE_PARSERS
from ...ir.types import Array, Type, product
from .shape import QuantisedShape

NdArray = np.ndarray[Any, Any]
THREADS, VECTORS = "threads", "vectors"  # kinds of kernels
# The files of a kind: of its kernels (see `shape`), and of what packs for them, which needs none
FILES = {THREADS: ("gpu", "gpu_layout"), VECTORS: ("cpu", "cpu_parts")}


def kernels_of(target: Target) -> Any:
    """The kernel file for a Target; see `shape`."""
    return import_module(f".{FILES[kind_of(target)][0]}", __package__)


def kind_of(target: Target) -> str:
    """Which kernels a Target has: for threads, or for vectors."""
    return THREADS if target.has_threads else VECTORS


def _layouts(kind: str) -> Any:
    """The file that packs for a kind of kernels."""
    if kind not in FILES:
        raise InternalError("kernels.quantised", f"no kernels are called {kind!r}")
    return import_module(f".{FILES[kind][1]}", __package__)


class Preparation(Callee):
    """Weights of one Format and so many rows each, for one kind of kernels."""

    text_name = "prepare"
    once = True

    def __init__(self, kind: str, form: str, rows: Sequence[int], columns: int) -> None:
        self.kind, self.form, self.rows, self.columns = kind, form, tuple(rows), columns

    @property
    def name(self) -> str:
        """The name, for people."""
        return f"prepare_{self.form}"

    @cached_property
    def key(self) -> str:
        """Everything that decides what is made."""
        return self.to_text()

    @cached_property
    def shape(self) -> QuantisedShape:
        """All rows as those of one product."""
        return QuantisedShape(format_of(self.form), sum(self.rows), self.columns)

    @property
    def step(self) -> int:
        """Rows that are packed together."""
        return _layouts(self.kind).ROWS

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as it is stored."""
        return self.shape.row_bytes

    def alone(self, member: int) -> Preparation:
        """The Preparation of one of the weights."""
        return Preparation(self.kind, self.form, (self.rows[member],), self.columns)

    def parts(self) -> list[tuple[str, tuple[int, ...], DType]]:
        """Names, shapes and dtypes of what is made, in order."""
        return _layouts(self.kind).parts(self.shape)

    def pack(self, raw: NdArray) -> dict[str, NdArray]:
        """The parts of some rows of bytes."""
        return _layouts(self.kind).pack(self.shape, raw)

    def result_types(self, argument_types: tuple[Type, ...]) -> tuple[Type, ...]:
        """The types of the parts."""
        wanted = [(rows, self.row_bytes) for rows in self.rows]
        got = [rows_of(t) for t in argument_types if isinstance(t, Array)]
        if got != wanted:
            raise ShapeError("these are other weights", op=self.name, expected=wanted, got=got)
        return tuple(Array(shape, dtype) for _, shape, dtype in self.parts())

    def to_text(self) -> str:
        """The facts as JSON."""
        return json.dumps([self.kind, self.form, self.rows, self.columns])

    def interpret(self, *arrays: Any) -> tuple[Any, ...]:
        """The parts."""
        made = self.pack(np.concatenate([x.reshape(-1, x.shape[-1]) for x in arrays]))
        return tuple(made[name] for name, _, _ in self.parts())


def rows_of(raw: Array) -> tuple[int, ...]:
    """Bytes of weights as (rows, bytes of a row): rows of all experts follow one another."""
    return high(product(raw.shape[:-1])), high(raw.shape[-1])


def parse_preparation(text: str) -> Preparation:
    """The Preparation that `to_text` wrote."""
    return Preparation(*json.loads(text))


ATTRIBUTE_PARSERS["prepare"] = parse_preparation

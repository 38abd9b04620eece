"""A small product through the mesh, cycle by cycle, as data for a picture.

Invariant: the numbers are the registers of the simulator's own mesh (`targets/npu/mesh.py`), which
the RTL has too; the last frame has the whole product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.errors import UserError
from ..targets.npu.mesh import Mesh
from ..targets.npu.parameters import DATAFLOWS, Parameters

MOST_SHOWN = 8  # rows and columns that a picture shows
SOON = 3  # values that are shown on their way to the mesh
Matrix = list[list[int]]


@dataclass(frozen=True)
class Frame:
    """The registers after one edge, what comes next, and what has come out."""

    phase: str  # load, stream, drain
    inputs: Matrix  # of each multiplier: what moves right
    still: Matrix  # ws, is: what stays; os: what moves down
    sums: Matrix
    left: list[list[int | None]]  # of each row, what comes in the next cycles, the next one first
    top: list[list[int | None]]  # of each column, with sums in place
    out: Matrix


@dataclass(frozen=True)
class Film:
    """Every cycle of a product."""

    dataflow: str
    inputs: Matrix  # (M, K)
    weights: Matrix  # (K, N)
    product: Matrix
    frames: tuple[Frame, ...]


def film(
    dataflow: str = "ws", rows: int = 4, columns: int = 4, length: int = 4, seed: int = 0
) -> Film:
    """A product on a mesh of a few rows and columns; `length` is what streams through it."""
    if dataflow not in DATAFLOWS:
        expected = ", ".join(DATAFLOWS)
        raise UserError("bad dataflow", op="chip", expected=expected, got=repr(dataflow))
    for name, value in (("rows", rows), ("columns", columns), ("length", length)):
        if not isinstance(value, int) or not 1 <= value <= MOST_SHOWN:
            raise UserError(
                f"bad {name}", op="chip", expected=f"1 to {MOST_SHOWN}", got=repr(value)
            )
    p = Parameters(rows=rows, columns=columns, lanes=1, dataflow=dataflow)
    m, n, k = {
        "ws": (length, columns, rows),
        "os": (rows, columns, length),
        "is": (columns, length, rows),
    }[dataflow]
    random = np.random.default_rng(seed)
    a, b = random.integers(1, 6, (m, k)), random.integers(1, 6, (k, n))
    if dataflow == "os":
        frames, product = _sums_stay(Mesh(p), a, b)
    elif dataflow == "ws":
        frames, product = _values_stay(Mesh(p), a, b)
    else:  # inputs stay: the product of the transposes
        frames, product = _values_stay(Mesh(p), b.T, a.T)
        product = product.T
    return Film(dataflow, a.tolist(), b.tolist(), product.tolist(), tuple(frames))


def _soon(lines: np.ndarray, clock: int) -> list[list[int | None]]:
    """What each lane is fed after `clock` edges: lane i gets a line i cycles late."""
    found: list[list[int | None]] = []
    for lane in range(lines.shape[1]):
        times = range(clock - lane, clock - lane + SOON)
        found.append([int(lines[t, lane]) if 0 <= t < len(lines) else None for t in times])
    return found


def _frame(mesh: Mesh, phase: str, left: Any, top: Any, out: Matrix) -> Frame:
    inputs, still, sums = (x.astype(int).tolist() for x in (mesh.inputs, mesh.still, mesh.sums))
    return Frame(phase, inputs, still, sums, left, top, [list(row) for row in out])


def _sums_stay(mesh: Mesh, a: np.ndarray, b: np.ndarray) -> tuple[list[Frame], np.ndarray]:
    rows, columns, depth = mesh.p.rows, mesh.p.columns, a.shape[1]
    frames = []
    for clock in range(depth + rows + columns - 2):
        feed = a[:, clock].astype(np.int32) if clock < depth else None
        row = mesh.row(b[clock].astype(np.int32)) if clock < depth else None
        mesh.step_output(feed, row, clear=False, drain=False)
        frames.append(_frame(mesh, "stream", _soon(a.T, clock + 1), _soon(b, clock + 1), []))
    product = mesh.sums.copy()
    empty = _soon(a.T, depth + rows + columns), _soon(b, depth + rows + columns)
    out: Matrix = []
    for _ in range(rows):
        out.insert(0, [int(x) for x in mesh.sums[-1]])
        mesh.step_output(None, None, clear=False, drain=True)
        frames.append(_frame(mesh, "drain", *empty, out))
    return frames, product


def _values_stay(
    mesh: Mesh, moves: np.ndarray, stays: np.ndarray
) -> tuple[list[Frame], np.ndarray]:
    """(M, K) of what moves, a row a cycle, past (K, N) of what stays."""
    rows, columns = mesh.p.rows, mesh.p.columns
    frames = []
    for number, row in enumerate(stays[::-1]):
        mesh.step_stationary(None, mesh.row(row.astype(np.int32)))
        frames.append(_frame(mesh, "load", _soon(moves, number + 1 - rows), [], []))
    out: Matrix = []
    first = rows + columns - 1  # cycles until the first row has left the deskew
    for clock in range(len(moves) + first):
        left = mesh.leaving()
        if clock >= first:
            out.append([int(x) for x in left])
        feed = moves[clock].astype(np.int32) if clock < len(moves) else None
        mesh.step_stationary(feed, None)
        frames.append(_frame(mesh, "stream", _soon(moves, clock + 1), [], out))
    return frames, np.array(out)


__all__ = ["Film", "Frame", "film"]

"""Quantised products on a machine with a GPU: run by hand or by run_all.py, not by pytest.

    PYTHONPATH=src python tests/gpu/quantised_checks.py [--only Q4_1]

Every Format, through `pack` and the compiler: products of 1, 3, 8 and 70 tokens, products with what
is around them, rows by number. Prints one row per Format and ends with a status other than 0 if
any failed. Judged against float64 products with the Format's own values.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import tilegrad as tg
from tilegrad.core.format import QUANTISED, Format
from tilegrad.tensor.quantised import pack, quantised_matmul, take_rows
from tilegrad.tensor.quantised_around import Norm, split_matmul, surrounded_matmul

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

from quantised_rows import random_rows

ROWS, COLUMNS = 192, 1536
ALLOWED = 1.2e-2  # of the largest result: weights and results are rounded to bfloat16


class Stored:
    """Rows of a Format in memory."""

    def __init__(self, form: Format) -> None:
        self.format, self.shape = form, (ROWS, COLUMNS)
        self.raw = random_rows(form, ROWS, COLUMNS)

    def drop(self) -> None:
        """Nothing to hand back."""


def on_gpu(values: np.ndarray) -> tg.Tensor:
    """bfloat16 on the GPU."""
    return tg.tensor(values.astype(ml_dtypes.bfloat16), device="cuda")


def off(found: tg.Tensor, want: np.ndarray) -> float:
    """How far off, of the largest result."""
    got = found.numpy().astype(np.float64)
    return float(np.abs(got - want).max() / np.abs(want).max())


def check(form: Format) -> dict[str, float]:
    """Errors by what was computed."""
    rng = np.random.default_rng(0)
    stored = Stored(form)
    packed = pack(stored, "cuda:0")
    w = form.to_float32(stored.raw).astype(np.float64)
    errors: dict[str, float] = {}

    def drawn(*shape: int) -> tuple[tg.Tensor, np.ndarray]:
        made = on_gpu(rng.standard_normal(shape))
        return made, made.numpy().astype(np.float64)

    for tokens in (1, 3, 8, 70):
        x, exact = drawn(tokens, COLUMNS)
        errors[f"{tokens} tokens"] = off(quantised_matmul(x, packed), exact @ w.T)
    x, exact = drawn(1, COLUMNS)
    weight, factor = drawn(COLUMNS)
    residual, more = drawn(1, ROWS // 2)
    normed = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5) * factor
    whole = normed @ w.T
    gate, up = whole[:, : ROWS // 2], whole[:, ROWS // 2 :]
    around: dict[str, Any] = {"norm": Norm(weight, 1e-5), "gated": "silu", "residual": residual}
    found = surrounded_matmul(x, packed, **around)
    errors["around"] = off(found, gate / (1 + np.exp(-gate)) * up + more)
    for i, part in enumerate(split_matmul(x, packed, (64, 128), Norm(weight, 1e-5))):
        errors[f"split {i}"] = off(part, whole[:, :64] if i == 0 else whole[:, 64:])
    ids = np.array([5, 0, ROWS - 1], np.int32)
    rows = take_rows(packed, tg.tensor(ids, device="cuda")).numpy()
    errors["rows"] = 0.0 if (rows == form.to_float32(stored.raw)[ids]).all() else 1.0
    return errors


def main() -> int:
    """Run the checks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    failed = 0
    for form in QUANTISED:
        if given.only and form.name != given.only:
            continue
        try:
            errors = check(form)
            good = all(e < ALLOWED for e in errors.values())
            text = ", ".join(f"{name} {e:.1e}" for name, e in errors.items())
        except Exception:  # one Format that fails must not hide the others
            good, text = False, traceback.format_exc(limit=3)
        failed += not good
        print(f"{'ok' if good else 'FAIL'} {form.name}: {text}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

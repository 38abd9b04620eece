"""Random kernels against what each of their programs touches: a wrong one is refused or ends in an
error, a right one computes what it says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_kernels import Text, Truth, sample

import tilegrad as tg
from tilegrad import kernel

# Refusals of kernels that are right: what is not proved, and parts without elements.
CAREFUL = (
    "it is not known",
    "nothing set it before",
    "end in different places",
    "is out of bounds",
    "do not fit",
)


def made(text: Text, path: Path) -> Any:
    """The kernel, from a file: errors show its lines."""
    path.write_text("from tilegrad import tile\n\n\n" + text.source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return kernel(module.k)


def judged(number: int, text: Text, x: np.ndarray, folder: Path) -> tuple[str, str]:
    """How one ends, and what is amiss about that."""
    truth = Truth(text, x)
    faults = truth.faults
    try:
        found = made(text, folder / f"random{number}.py")(tg.tensor(x)).numpy()
    except tg.UserError as error:
        surely = not faults and not any(word in str(error) for word in CAREFUL)
        return "refused", f"refused, and it is right: {error}" if surely else ""
    if faults & {"outside", "race"}:
        return "ran", f"accepted, and it has {faults}"
    if not np.array_equal(found, truth.out):  # what nothing wrote is 0
        return "ran", f"{found} is not {truth.out}"
    return "ran", ""


def check(seed: int, count: int, folder: Path) -> None:
    amiss, ran = [], 0
    for number, text, x in sample(seed, count):
        how, why = judged(number, text, x, folder)
        ran += how == "ran"
        amiss += [f"seed {number}: {why}\n{text.source}"] if why else []
    assert not amiss, "\n\n".join(amiss[:3])
    assert ran >= count // 20  # right ones are among them


def test_random_kernels(tmp_path: Path) -> None:
    check(0, 300, tmp_path)


@pytest.mark.slow
def test_many_random_kernels(tmp_path: Path) -> None:
    check(1000, 4000, tmp_path)

"""The simulator's own tests on a GPU: `python tests/ptxsim/ptx_device.py` where one is.

The hand-written kernels that obey the rules are launched instead of simulated, so the expected
numbers in the tests, and with them the simulator, are judged by the hardware. Approximate
functions, which hardware does not round correctly, and faults on purpose are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ptx_text
import pytest

import ptxsim
from tilegrad.core.dtype import BY_NUMPY
from tilegrad.targets.ptx.driver import open_device
from tilegrad.targets.ptx.launch import Prepared
from tilegrad.targets.ptx.program import Entry, TensorMap

HERE = Path(__file__).resolve().parent
OBEYING = (
    "test_scalar.py and not functions and not float_arithmetic",
    "diverge_and_meet or branches_of_branches or grids_symbols or widths_and_vectors or atomics",
    "test_shuffles or votes_matches or reducing_barriers",
    "test_named_barriers and not wrongly",
    "test_mbarriers and not wrongly",
    "ldmatrix_and_stmatrix or movmatrix or test_mma or reads_by_descriptors or a_in_registers",
    "wgmma_that_obeys",
    "test_sparse.py and products",
    "test_tensor_loads and not wrongly",
    "test_tensor_stores and not wrongly",
    "reducing_tensor_stores",
    "test_bulk_copies and not wrongly",
    "test_cp_async and not wrongly and not mbarrier",
    "test_clusters and not wrongly",
    "one_tile",
    "test_ring and not fault and not quick",
)


def entry_of(launch: ptxsim.Launch) -> tuple[Entry, dict[str, int]]:
    """What the driver needs for a launch: an Entry, and the values of its Symbols."""
    arguments: list[tuple[str, Any]] = []
    values = {}
    for number, (kind, value) in enumerate(launch.arguments):
        if kind == "map":
            fields = value.sizes, value.strides, value.box, value.swizzle
            value = TensorMap(value.memory, BY_NUMPY[value.dtype], *fields)
        elif kind == "value":
            values[f"p{number}"] = value
            kind, value = "symbol", f"p{number}"
        arguments.append((kind, value))
    sizes = launch.grid, launch.threads, launch.shared_bytes, launch.cluster, launch.dependent
    return Entry(launch.name, tuple(arguments), *sizes), values


def run(text: str, launch: ptxsim.Launch, memories: Sequence[np.ndarray], **_: Any) -> None:
    """What `simulate` does, on the first GPU."""
    device = open_device(0)
    entry, values = entry_of(launch)
    function = device.load(text).function(entry.name)
    buffers = [device.upload(memory) for memory in memories]
    prepared = Prepared(function, entry, values)
    prepared.point([buffer.pointer for buffer in buffers])
    prepared.start()
    device.synchronize()
    for buffer, memory in zip(buffers, memories):
        if memory.flags.writeable:
            memory[...] = device.download(buffer, memory.shape, memory.dtype)


if __name__ == "__main__":
    ptx_text.simulate = run
    ptx_text.assemble = lambda text, target: None  # the driver does
    chosen = " or ".join(f"({one})" for one in OBEYING)
    files = [str(path) for path in sorted(HERE.glob("test_*.py"))]
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-k", chosen, *files]))

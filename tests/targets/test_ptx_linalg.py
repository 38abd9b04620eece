"""The panel kernels of linear algebra as PTX on the simulator, and assembled without spills."""

from __future__ import annotations

import numpy as np
import pytest
from assembled import assemble_all
from simulated import assembled, check_body  # noqa: F401

import tilegrad as tg
from tilegrad.core.target import H200
from tilegrad.targets.ptx.assemble import find_ptxas
from tilegrad.targets.ptx.emit import emit
from tilegrad.tensor.linalg import panels

RANDOM = np.random.default_rng(2)


def body_of(kernel, *arrays, **options):
    """The Body of a call, as a GPU would get it."""
    (body,) = kernel.lower(*[tg.tensor(a) for a in arrays], **options)
    return body


def results(body, *arrays):
    """The arguments, then memories for the results."""
    rest = body.parameters[len(arrays) :]
    return [*arrays, *[np.zeros(p.type.shape, p.type.dtype.numpy) for p in rest]]


@pytest.mark.usefixtures("assembled")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_panels_run(dtype):
    tall = RANDOM.standard_normal((2, 16, 4)).astype(dtype)
    first = np.array([4], np.int32)
    square = RANDOM.standard_normal((2, 8, 8)).astype(dtype)
    definite = square @ square.swapaxes(1, 2) + np.eye(8, dtype=dtype)
    close = 64 * float(np.finfo(dtype).eps)
    for kernel, arrays in (
        (panels.lu_panel, (tall, first)),
        (panels.qr_panel, (tall, first)),
        (panels.cholesky_block, (definite,)),
        (panels.solve_block, (square + 3, square)),
    ):
        body = body_of(kernel, *arrays)
        check_body(body, *results(body, *arrays), rounding=close)


@pytest.mark.skipif(find_ptxas() is None, reason="NO PTXAS HERE")
@pytest.mark.parametrize("dtype", [tg.float32, tg.float64], ids=str)
@pytest.mark.parametrize("bytes_of_a_column", [256, 2048])
def test_panels_of_a_gpu_fit_its_registers(bytes_of_a_column, dtype):
    rows = bytes_of_a_column // dtype.size
    tall, first = np.zeros((1, rows, 16), dtype.numpy), np.zeros(1, np.int32)
    square, right = np.zeros((1, 32, 32), dtype.numpy), np.zeros((1, 32, 64), dtype.numpy)
    texts = {}
    for kernel, size, arrays in (
        (panels.lu_panel, (rows, 16), (tall, first)),
        (panels.qr_panel, (rows, 16), (tall, first)),
        (panels.cholesky_block, (32, 32), (square,)),
        (panels.solve_block, (32, 64), (square, right)),
    ):
        body = body_of(panels.spread(kernel, *size, dtype), *arrays)
        texts[body.block.name] = emit(body, body.block.name, H200)[0]
    for made in assemble_all(texts, H200.cpu).values():
        for report in made.reports.values():
            assert not report.spill_stores and not report.stack_bytes, report

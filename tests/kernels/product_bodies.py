"""Bodies of products with holes, over parameters of their own: for tests and benches."""

from __future__ import annotations

from typing import Any

from tilegrad import tile
from tilegrad.core.dtype import float32, int32
from tilegrad.ir.symbol import ceil_divide, high
from tilegrad.ir.types import Memory
from tilegrad.kernels.matmul.joint import JointMatmul
from tilegrad.kernels.matmul.plan import BLOCK
from tilegrad.kernels.matmul.shape import Epilogue, Operands, WidePlan, positions, side
from tilegrad.kernels.matmul.threads_matmul import ThreadMatmul, ThreadPlan
from tilegrad.kernels.matmul.wide import WideMatmul
from tilegrad.kernels.matmul.wide_blocks import BlockJoint, BlockMatmul
from tilegrad.kernels.matmul.wide_sparse import ROWS, SparseMatmul
from tilegrad.tile.build import Body, BodyBuilder


def hole_of(x: Operands, name: str = "epilogue", products: int = 1) -> Epilogue:
    """The hole `name(piece of each product, rows, columns, batch, pieces of residuals)`, the batch
    where there is one, for whoever fills it."""

    def hole(*given: Any) -> Any:
        *pieces, (batch, row, column) = given
        rows, columns = shape = pieces[0].shape
        indices = positions(rows, row)[:, None], positions(columns, column)[None, :]
        lead = [] if x.batch == 1 else [batch]
        inputs = (*pieces[:products], *indices, *lead, *pieces[products:])
        return tile.hole(name, shape, *inputs, dtype=float32 if x.result.is_float else int32)

    return hole


def with_hole(kernel: Any) -> Any:
    """A kernel whose epilogue is a hole: a function of tiles, not of Nodes."""
    kernel.epilogue = hole_of(kernel.x)
    return kernel


def wide_matmul(x: Operands, plan: WidePlan, residuals: int = 0) -> Body:
    """The Body with the hole `epilogue`; parameters a, b, c, then those that fill it.

    With `residuals`, as many matrices like the result, in the operands' dtype, follow c and come
    through the ring; the hole's last inputs are their pieces.
    """
    *_, (_, result) = x.parameters
    further = [(f"r{i}", Memory(result.shape, x.dtype)) for i in range(residuals)]
    builder = BodyBuilder("wide_matmul", [*x.parameters, *further])
    memories = builder.parameters
    kernel = WideMatmul(x, plan, builder, memories[:3], hole_of(x), residuals=memories[3:])
    return with_hole(kernel).build()


def sparse_matmul(x: Operands, plan: WidePlan) -> Body:
    """The Body with the hole `epilogue`, of operands that are turned: parameters are what is kept
    of the weights, tokens, the result and the words, then those that fill the hole."""
    rows, depth = -(-high(x.m) // ROWS) * ROWS, plan.tile[2]
    wide = -(-high(x.k) // depth) * depth
    kept = ("a", Memory((rows, high(x.k) // 2), x.dtype, use="constant"))
    words_of = ("words", Memory((rows // 16, wide // 2), int32, use="constant"))
    builder = BodyBuilder("sparse_matmul", [kept, *x.parameters[1:], words_of])
    *first, words = builder.parameters
    kernel = SparseMatmul(x, plan, builder, first, hole_of(x))
    kernel.words = tile.memory(words)
    return with_hole(kernel).build()


def block_matmul(x: Operands, plan: WidePlan) -> Body:
    """The Body with the hole `epilogue`; parameters a, b, c, the scales of tokens (tokens, blocks)
    and of weights (blocks of rows, blocks), then those that fill the hole."""
    (tokens, weights), blocks = side(x.m, x.n, not x.turned), ceil_divide(x.k, BLOCK)
    sizes = {"value": tokens, "constant": ceil_divide(weights, BLOCK)}
    scales = [(f"{u}_scale", Memory((n, blocks), float32, use=u)) for u, n in sizes.items()]
    builder = BodyBuilder("block_matmul", [*x.parameters, *scales])
    kernel = BlockMatmul(x, plan, builder, builder.parameters[:3], hole_of(x))
    kernel.scales = [tile.memory(m) for m in builder.parameters[3:]]
    return with_hole(kernel).build()


def joint_matmul(x: Operands, plan: WidePlan) -> Body:
    """Products of one input with several weights; parameters: the input, the weights, the results.

    Plain, weight i has a hole `epilogue{i}(piece, rows, columns)`; gated, there is one,
    `epilogue(piece of each weight, rows, columns)`. Of blocks the scales follow: of tokens, then
    of each weight.
    """
    tokens = x.n if x.turned else x.m
    along = (x.b_along_k, x.a_along_k) if x.turned else (x.a_along_k, x.b_along_k)
    parameters = [("x", Memory(side(tokens, x.k, along[0]), x.dtype, use="value"))]
    for i, n in enumerate(x.weights):
        parameters.append((f"w{i}", Memory(side(n, x.k, along[1]), x.dtype, use="constant")))
    results = x.weights[:1] if x.gated else x.weights
    for i, n in enumerate(results):
        parameters.append((f"c{i}", Memory((tokens, n), x.result, use="result")))
    last, end, blocks = 1 + len(x.weights), len(parameters), ceil_divide(x.k, BLOCK)
    if x.scaled:
        parameters.append(("x_scale", Memory((tokens, blocks), float32, use="value")))
        for i, n in enumerate(x.weights):
            scale = Memory((ceil_divide(n, BLOCK), blocks), float32, use="constant")
            parameters.append((f"scale{i}", scale))
    b = BodyBuilder("joint_matmul", parameters)
    names = ["epilogue"] if x.gated else [f"epilogue{i}" for i in range(len(results))]
    holes = [hole_of(x, name, len(x.weights) if x.gated else 1) for name in names]
    given = (b.parameters[0], b.parameters[1:last], b.parameters[last:end], holes)
    kernel: Any = (BlockJoint if x.scaled else JointMatmul)(x, plan, b, *given)
    kernel.scales = [tile.memory(m) for m in b.parameters[end:]]
    kernel.epilogue, kernel.epilogues = holes[0], holes  # of tiles, not of Nodes
    return kernel.build()


def thread_matmul(x: Operands, plan: ThreadPlan) -> Body:
    """A product by threads with the hole `epilogue`; parameters a, b, c."""
    builder = BodyBuilder("thread_matmul", x.parameters)
    return with_hole(ThreadMatmul(x, plan, builder, builder.parameters, hole_of(x))).build()

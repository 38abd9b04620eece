"""Bodies of products with holes, over parameters of their own: for tests and benches."""

from __future__ import annotations

from tilegrad.ir.types import Memory
from tilegrad.kernels.matmul.joint import JointMatmul
from tilegrad.kernels.matmul.shape import Operands, WidePlan, hole_of, side
from tilegrad.kernels.matmul.threads_matmul import ThreadMatmul, ThreadPlan
from tilegrad.tile.build import Body, BodyBuilder


def joint_matmul(x: Operands, plan: WidePlan) -> Body:
    """Products of one input with several weights; parameters: the input, the weights, the results.

    Plain, weight i has a hole `epilogue{i}(piece, rows, columns)`; gated, there is one,
    `epilogue(piece of each weight, rows, columns)`.
    """
    tokens = x.n if x.turned else x.m
    along = (x.b_along_k, x.a_along_k) if x.turned else (x.a_along_k, x.b_along_k)
    parameters = [("x", Memory(side(tokens, x.k, along[0]), x.dtype, use="value"))]
    for i, n in enumerate(x.weights):
        parameters.append((f"w{i}", Memory(side(n, x.k, along[1]), x.dtype, use="constant")))
    results = x.weights[:1] if x.gated else x.weights
    for i, n in enumerate(results):
        parameters.append((f"c{i}", Memory((tokens, n), x.result, use="result")))
    b = BodyBuilder("joint_matmul", parameters)
    last = 1 + len(x.weights)
    names = ["epilogue"] if x.gated else [f"epilogue{i}" for i in range(len(results))]
    holes = [hole_of(x, name, len(x.weights) if x.gated else 1) for name in names]
    given = (b.parameters[0], b.parameters[1:last], b.parameters[last:], holes)
    kernel = JointMatmul(x, plan, b, *given)
    kernel.epilogue, kernel.epilogues = holes[0], holes  # of tiles, not of Nodes
    return kernel.build()


def thread_matmul(x: Operands, plan: ThreadPlan) -> Body:
    """A product by threads with the hole `epilogue`; parameters a, b, c."""
    builder = BodyBuilder("thread_matmul", x.parameters)
    kernel = ThreadMatmul(x, plan, builder, builder.parameters, hole_of(x))
    kernel.epilogue = hole_of(x)  # of tiles, not of Nodes
    return kernel.build()

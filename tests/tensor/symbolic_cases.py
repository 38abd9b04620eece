"""Every op that indexes, or whose result's size follows from sizes, over a symbolic axis.

A Case runs jitted with a Symbol for its axis at sizes around its edge, and again with each size
static: both give the same values, or both the same error (class, text and line). As a program this
runs the table under guard pages and prints what differs, so that a crash names its case:
`python symbolic_cases.py end|start [first case]`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import tilegrad as tg
from tilegrad.core.errors import UserError
from tilegrad.nn import functional as F
from tilegrad.runtime.buffer import Buffer
from tilegrad.tensor.tensor import from_buffer, wrap

MOST = 40  # the upper bound of the Symbol


@dataclass(frozen=True)
class Case:
    """One op on x, whose axis "N" is symbolic; `edge` is the first size that is enough."""

    name: str
    function: Callable[..., Any]
    edge: int
    shape: tuple[Any, ...] = ("N",)
    more: tuple[Any, ...] = ()  # further arguments
    refused: bool = False  # a symbolic axis is refused with a word
    only: str = ""  # "even": sizes that are
    texts: bool = True  # errors have the same text; those of the run itself name the Symbol

    def sizes(self) -> list[int]:
        near = {0, 1, self.edge - 2, self.edge - 1, self.edge, self.edge + 1, self.edge + 2, MOST}
        return sorted(n for n in near if 0 <= n <= MOST)


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def changed(change: Callable[[Any], None]) -> Callable[..., Any]:
    """The function that gives x after a change in place."""

    def run(x: Any, *more: Any) -> Any:
        y = x + 0
        change(y, *more)
        return y

    return run


def put_at(key: Any, value: Any = 1.0) -> Callable[..., Any]:
    return changed(lambda y: y.__setitem__(key, value))


def gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *more: tg.grad(lambda x: (function(x, *more) ** 2).sum())(x)


def over_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *more: tg.vmap(lambda row: function(row, *more))(x)


def in_scan(function: Callable[..., Any]) -> Callable[..., Any]:
    """The op in the body of a loop over three steps."""

    def run(x: Any, *more: Any) -> Any:
        return tg.scan(lambda c, _: (c + 1, function(x * c, *more)), tg.ones(()), length=3)[1]

    return run


WINDOW = np.linspace(-1, 1, 3, dtype=np.float32).reshape(1, 1, 3)
IMAGE = np.linspace(-1, 1, 6, dtype=np.float32).reshape(1, 1, 2, 3)
TABLE = np.arange(12, dtype=np.float32).reshape(4, 3)

CASES = [
    # subscripts
    Case("x[5]", lambda x: x[5], 6),
    Case("x[-6]", lambda x: x[-6], 6),
    Case("x[5] of rows", lambda x: x[5], 6, ("N", 3)),
    Case("x[:, 5]", lambda x: x[:, 5], 6, (3, "N")),
    Case("x[:, -6]", lambda x: x[:, -6], 6, (3, "N")),
    Case("x[N - 3]", lambda x: x[x.shape[0] - 3], 3),
    Case("x[2:5]", lambda x: x[2:5] * 1, 5),
    Case("x[5:]", lambda x: x[5:] * 1, 5),
    Case("x[:-3]", lambda x: x[:-3] * 1, 3),
    Case("x[-4:-1]", lambda x: x[-4:-1] * 1, 4),
    Case("x[1::3]", lambda x: x[1::3] * 1, 4),
    Case("x[2:7:2]", lambda x: x[2:7:2] * 1, 7),
    Case("x[::-1]", lambda x: x[::-1] * 1, 1, refused=True),
    Case("x[[0, 4]]", lambda x: x[[0, 4]], 5, ("N", 2)),
    Case("x[[-5, 1]]", lambda x: x[[-5, 1]], 5),
    Case("x[[1, 2], 5]", lambda x: x[[1, 2], 5], 6, (3, "N")),
    Case("x[None, 4]", lambda x: x[None, 4], 5, ("N", 2)),
    Case("x[..., 4]", lambda x: x[..., 4], 5, (2, "N")),
    Case("narrow", lambda x: x.narrow(0, 2, 4), 6),
    Case("narrow from the end", lambda x: x.narrow(0, -4, 3), 4),
    Case("narrow to the end", lambda x: x.narrow(0, 3, x.shape[0] - 3), 3),
    Case("select", lambda x: x.select(1, 4), 5, (2, "N")),
    Case("select from the end", lambda x: x.select(0, -4), 4, ("N", 2)),
    Case("take", lambda x: x.take(tg.tensor(ids(0, 5))), 6),
    Case("index_select", lambda x: x.index_select(0, np.array([0, 4])), 5, ("N", 2)),
    Case("gather", lambda x, i: x.gather(1, i), 4, ("N", 3), (ids(*[0, 2] * 4).reshape(4, 2),)),
    Case("take_along_dim", lambda x, i: x.take_along_dim(i, 0), 1, ("N", 3),
         (np.zeros((2, 3), np.int64),)),
    # assignments and scatters
    Case("x[5] = 1", put_at(5), 6),
    Case("x[-6] = 1", put_at(-6), 6),
    Case("x[2:5] = 1", put_at(slice(2, 5)), 5),
    Case("x[5:] = 1", put_at(slice(5, None)), 5),
    Case("x[:, -3] = 1", put_at((slice(None), -3)), 3, (2, "N")),
    Case("x[[0, 4]] = 1", put_at([0, 4]), 5),
    Case("x[[0, 4]] = rows", changed(lambda y, v: y.__setitem__([0, 4], v)), 5, ("N", 2),
         (np.ones((2, 2), np.float32),)),
    Case("scatter", lambda x, i: x.scatter(1, i, 2.0), 4, ("N", 3),
         (ids(*[0, 2] * 4).reshape(4, 2),)),
    Case("scatter_add", lambda x, i, s: x.scatter_add(1, i, s), 4, ("N", 3),
         (ids(*[0, 2] * 4).reshape(4, 2), np.ones((4, 2), np.float32))),
    Case("scatter_reduce", lambda x, i, s: x.scatter_reduce(1, i, s, "amax"), 4, ("N", 3),
         (ids(*[0, 2] * 4).reshape(4, 2), np.ones((4, 2), np.float32))),
    Case("index_add", lambda x, s: x.index_add(0, np.array([0, 4]), s), 5, ("N", 2),
         (np.ones((2, 2), np.float32),)),
    Case("index_copy", lambda x, s: x.index_copy(0, np.array([4, 0]), s), 5, ("N", 2),
         (np.ones((2, 2), np.float32),)),
    Case("index_fill", lambda x: x.index_fill(1, np.array([4]), 3.0), 5, (2, "N")),
    Case("put", lambda x, s: x.put(tg.tensor(ids(0, 5)), s), 6, ("N",),
         (np.ones(2, np.float32),)),
    # order
    Case("topk", lambda x: x.topk(3).values, 3),
    Case("topk indices of rows", lambda x: x.topk(3, dim=0).indices, 3, ("N", 2)),
    Case("kthvalue", lambda x: x.kthvalue(3).values, 3),
    Case("median", lambda x: x.median(0).values, 1),
    Case("sort", lambda x: x.sort(0).values, 1, ("N", 2)),
    Case("quantile", lambda x: x.quantile(0.5), 1),
    Case("searchsorted", lambda x: tg.searchsorted(x, x), 1, refused=True),
    # extremes and scans
    Case("amax", lambda x: x.amax(0), 1, ("N", 2)),
    Case("min of all", lambda x: x.min(), 1),
    Case("argmax", lambda x: x.argmax(0), 1, ("N", 2)),
    Case("max of an axis", lambda x: x.max(1).values, 1, (2, "N")),
    Case("cumsum", lambda x: x.cumsum(0), 1, ("N", 2)),
    Case("cummax", lambda x: x.cummax(0).values, 1),
    Case("logcumsumexp", lambda x: x.logcumsumexp(0), 1, refused=True),
    Case("softmax", lambda x: x.softmax(0), 1, ("N", 2)),
    Case("var", lambda x: x.var(0), 2, ("N", 2)),
    # padding, windows, convolutions
    Case("pad", lambda x: tg.pad(x, (2, 1)), 1),
    Case("pad with a value", lambda x: tg.pad(x, (2, 1), value=3.0), 1),
    Case("pad negative", lambda x: tg.pad(x, (-2, -3)), 5),
    Case("pad one side", lambda x: tg.pad(x, (-4, 2)), 4),
    Case("pad reflect", lambda x: tg.pad(x, (3, 2), mode="reflect"), 4),
    Case("pad circular", lambda x: tg.pad(x, (2, 3), mode="circular"), 3),
    Case("pad replicate", lambda x: tg.pad(x, (2, 1), mode="replicate"), 1),
    Case("unfold", lambda x: x.unfold(0, 5, 2), 5),
    Case("unfold of rows", lambda x: x.unfold(1, 3, 1).sum(-1), 3, (2, "N")),
    Case("conv1d", lambda x, w: tg.conv1d(x, w), 3, (1, 1, "N"), (WINDOW,)),
    Case("conv1d, steps", lambda x, w: tg.conv1d(x, w, stride=2, dilation=2), 5, (2, 1, "N"),
         (WINDOW,)),
    Case("conv1d, padded", lambda x, w: tg.conv1d(x, w, padding=1), 1, (1, 1, "N"), (WINDOW,)),
    Case("conv2d", lambda x, w: tg.conv2d(x, w), 3, (1, 1, 4, "N"), (IMAGE,)),
    Case("conv2d of rows", lambda x, w: tg.conv2d(x, w), 2, (1, 1, "N", 5), (IMAGE,)),
    Case("conv_transpose1d", lambda x, w: tg.conv_transpose1d(x, w, padding=2), 3, (1, 1, "N"),
         (WINDOW,)),
    Case("conv_transpose1d, steps", lambda x, w: tg.conv_transpose1d(x, w, stride=2), 1,
         (1, 1, "N"), (WINDOW,)),
    Case("max_pool1d", lambda x: F.max_pool1d(x, 3, 2), 3, (1, 2, "N")),
    Case("avg_pool1d", lambda x: F.avg_pool1d(x, 4, 1), 4, (1, 2, "N")),
    Case("max_pool1d, ceil", lambda x: F.max_pool1d(x, 3, 2, ceil_mode=True), 3, (1, 2, "N"),
         refused=True),
    Case("F.unfold", lambda x: F.unfold(x, 2), 2, (1, 1, "N", 4)),
    # shapes
    Case("reshape(-1, 2)", lambda x: x.reshape(-1, 2) * 1, 4),
    Case("reshape(3, -1)", lambda x: x.reshape(3, -1) + 1, 6),
    Case("reshape of rows", lambda x: x.reshape(-1, 4) * 2, 4, ("N", 6)),
    Case("reshape(-1, 2).sum(1)", lambda x: x.reshape(-1, 2).sum(1), 4),
    Case("reshape(-1, 2).T", lambda x: (x.reshape(-1, 2).T + 1) * 2, 4),
    Case("unflatten", lambda x: x.unflatten(0, (2, -1)) * 1, 4),
    Case("flatten", lambda x: x.flatten() * 1, 1, ("N", 3)),
    Case("split", lambda x: x.split([2, x.shape[0] - 2]), 2),
    Case("split into known sizes", lambda x: x.split([2, 3]), 5),
    Case("tensor_split", lambda x: x.tensor_split([2, 4]), 4, refused=True),
    Case("chunk", lambda x: x.chunk(2)[1] * 1, 4, only="even"),
    Case("unbind", lambda x: x.unbind(0)[0], 1, refused=True),
    Case("roll", lambda x: x.roll(2, 0), 1),
    Case("flip", lambda x: x.flip(0), 1, ("N", 2)),
    Case("repeat", lambda x: x.repeat(2, 3), 1, ("N", 2)),
    Case("repeat_interleave", lambda x: x.repeat_interleave(2, 0), 1),
    Case("expand", lambda x: x.unsqueeze(1).expand(-1, 4) * 1, 1),
    Case("cat", lambda x: tg.cat([x, x[1:]], 0), 1, ("N", 2)),
    Case("stack", lambda x: tg.stack([x, x + 1], 1), 1),
    Case("diagonal", lambda x: x.diagonal(), 3, ("N", 3), refused=True),
    Case("diag", lambda x: x.diag(), 1),
    Case("tril", lambda x: x.tril(), 1, ("N", 3)),
    Case("pixel_unshuffle", lambda x: tg.pixel_unshuffle(x, 2), 2, (1, "N", 4)),
    Case("zeros(N - 3)", lambda x: tg.zeros(x.shape[0] - 3) + x.sum(), 3),
    Case("arange(N - 3)", lambda x: tg.arange(x.shape[0] - 3) + x.sum(), 3),
    Case("interpolate", lambda x: F.interpolate(x, scale_factor=2), 1, (1, 1, "N"), refused=True),
    # tables and losses
    Case("embedding", lambda x: tg.embedding(tg.tensor(ids(0, 4)), x), 5, ("N", 2)),
    Case("one_hot", lambda x: tg.one_hot(tg.arange(x.shape[0]), MOST), 1),
    Case("cross_entropy", lambda x: F.cross_entropy(x, tg.zeros(x.shape[0]).long()), 1, ("N", 3)),
    Case("batch_norm", lambda x: tg.batch_norm(x, None, None, training=True), 2, ("N", 2)),
    Case("layer_norm", lambda x: tg.layer_norm(x, (3,)), 1, ("N", 3)),
    Case("matmul", lambda x, t: x @ t.T, 1, ("N", 3), (TABLE,)),
    Case("matmul over N", lambda x, t: x.T @ x, 1, ("N", 3), (TABLE,)),
    Case("einsum", lambda x: tg.einsum("ni,nj->ij", x, x), 1, ("N", 3)),
    Case("attention", lambda x: F.scaled_dot_product_attention(x, x, x), 1, (1, 2, "N", 8)),
    # indices that only the run knows
    Case("x[i]", lambda x, i: x[i] * 1, 5, ("N", 2), (ids(0, 4),), texts=False),
    Case("x[i] from the end", lambda x, i: x[i] * 1, 5, ("N", 2), (ids(0, -5),), texts=False),
    Case("x[:, i]", lambda x, i: x[:, i], 5, (2, "N"), (ids(4, 1),), texts=False),
    Case("x[i, j]", lambda x, i, j: x[i, j], 5, ("N", 3), (ids(4, 1), ids(0, 2)), texts=False),
    Case("embedding of ids", lambda x, i: tg.embedding(i, x), 5, ("N", 2), (ids(0, 4),),
         texts=False),
    Case("gather of ids", lambda x, i: x.gather(0, i), 5, ("N", 2), (ids(0, 4).reshape(1, 2),),
         texts=False),
    Case("index_add of ids", lambda x, i, s: x.index_add(0, i, s), 5, ("N", 2),
         (ids(4, 4), np.ones((2, 2), np.float32)), texts=False),
    Case("scatter of ids", lambda x, i: x.scatter(0, i, 1.0), 5, ("N", 2),
         (ids(0, 4).reshape(1, 2),), texts=False),
    Case("x[i] = 1", changed(lambda y, i: y.__setitem__(i, 1.0)), 5, ("N", 2), (ids(0, 4),),
         texts=False),
    Case("narrow at run time", lambda x, i: x.narrow(0, i[0], 3), 5, ("N",), (ids(2, 4),),
         texts=False),
    Case("cross_entropy over N classes", lambda x, i: F.cross_entropy(x, i), 5, (2, "N"),
         (ids(0, 4),), texts=False),
    Case("grad of x[i]", gradient(lambda x, i: x[i]), 5, ("N", 2), (ids(0, 4),), texts=False),
    # within transforms
    Case("grad of x[5]", gradient(lambda x: x[5]), 6),
    Case("grad of x[5:]", gradient(lambda x: x[5:]), 5),
    Case("grad of narrow", gradient(lambda x: x.narrow(0, 2, 4)), 6),
    Case("grad of pad reflect", gradient(lambda x: tg.pad(x, (3, 2), mode="reflect")), 4),
    Case("grad of unfold", gradient(lambda x: x.unfold(0, 5, 2)), 5),
    Case("grad of conv1d", gradient(lambda x, w: tg.conv1d(x, w)), 3, (1, 1, "N"), (WINDOW,)),
    Case("grad of topk", gradient(lambda x: x.topk(3).values), 3),
    Case("grad of x[[0, 4]]", gradient(lambda x: x[[0, 4]]), 5),
    Case("grad of reshape", gradient(lambda x: x.reshape(-1, 2).sum(1)), 4),
    Case("vmap of x[4]", over_rows(lambda x: x[4]), 5, (2, "N")),
    Case("vmap of topk", over_rows(lambda x: x.topk(3).values), 3, (2, "N")),
    Case("vmap of conv1d", over_rows(lambda x, w: tg.conv1d(x, w)), 3, (2, 1, 1, "N"), (WINDOW,)),
    Case("scan of x[4]", in_scan(lambda x: x[4]), 5),
    Case("scan of unfold", in_scan(lambda x: x.unfold(0, 3, 1).sum(1)), 3),
]  # fmt: skip


def guarded(array: np.ndarray) -> tg.Tensor:
    """A Tensor whose memory comes from the pool, which may be a guarded one."""
    memory = Buffer.allocate(array.nbytes)
    memory.array(array.shape, array.dtype)[...] = array
    return wrap(from_buffer(memory, array.shape, tg.core.dtype.dtype_of(array.dtype)))


def outcome(function: Callable[..., Any], arrays: list[np.ndarray]) -> Any:
    """The values, or the error as text."""
    try:
        found = function(*map(guarded, arrays))
        return [np.array(x.numpy()) for x in (found if isinstance(found, tuple) else (found,))]
    except UserError as error:
        return f"{type(error).__name__}: {error}"


def same(a: Any, b: Any, texts: bool) -> bool:
    if isinstance(a, str) and isinstance(b, str):
        return a == b if texts else a.split(":")[0] == b.split(":")[0]
    if isinstance(a, str) or isinstance(b, str):
        return False
    return len(a) == len(b) and all(
        x.shape == y.shape and x.dtype == y.dtype and np.allclose(x, y, 1e-5, 1e-5, equal_nan=True)
        for x, y in zip(a, b)
    )


def run(case: Case) -> list[str]:
    """What differs between the symbolic and the static sizes."""
    axis = case.shape.index("N")
    arguments = ", ".join(["x", *(f"more{i}" for i in range(len(case.more)))])
    plain = eval(f"lambda {arguments}: function({arguments})", {"function": case.function})
    jitted = tg.jit(plain, dynamic={"x": {axis: ("N", 0, MOST)}})
    found = []
    for size in [*case.sizes(), *case.sizes()]:  # again: calls that find everything checked
        if case.only == "even" and size % 2:
            continue
        shape = tuple(size if s == "N" else s for s in case.shape)
        x = np.sin(np.arange(int(np.prod(shape)), dtype=np.float32) * 1.7).reshape(shape)
        got = outcome(jitted, [x, *case.more])
        if case.refused:
            ok = isinstance(got, str)
            wanted: Any = "a refusal"
        else:
            wanted = outcome(plain, [x, *case.more])
            ok = same(wanted, got, case.texts)
        if not ok:
            found.append(f"N = {size}: static {wanted}, symbolic {got}")
    return found


def main(side: str, first: int = 0, step: int = 1) -> None:
    from guard_pages import install

    install(side)
    for number, case in list(enumerate(CASES))[first::step]:
        print(f"begin {number}", flush=True)
        for line in run(case):
            print(f"wrong {number} {line!r}", flush=True)
    print("end", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))

"""What bad input gets: the op, what was expected, what came, the user's line and a hint."""

from __future__ import annotations

import inspect

import pytest

import tilegrad as tg

X, LINE = tg.ones(2, 3), tg.arange(3)


def assign(x, key, value):
    x[key] = value


# function, kind of error, and the text that must be in it
TABLE = [
    (lambda: X + tg.ones(4), tg.ShapeError, "add: shapes do not broadcast", "(2, 3) and (4,)",
     "hint: axis -1 has sizes 3 and 4"),
    (lambda: X + "a", tg.DTypeError, "add: operand is not a Tensor", "got: str", "hint:"),
    (lambda: X + [1, 2, 3], tg.DTypeError, "add: operand is not a Tensor", "got: list"),
    (lambda: tg.tensor([True]) - tg.tensor([True]), tg.DTypeError,
     "subtract: bools", "hint: use a ^ b"),
    (lambda: -tg.tensor([True]), tg.DTypeError, "neg: bools", "hint: use ~x"),
    (lambda: X & X, tg.DTypeError, "bitwise_and: has no bits", "got: float32", "hint: cast"),
    (lambda: LINE ** -1, tg.DTypeError,
     "pow: an integer has no negative power", "int64 ** -1", "hint:"),
    (lambda: X.div(2, rounding_mode="up"), tg.UserError, "divide: unknown rounding", "got: 'up'"),
    (lambda: X.clamp(), tg.UserError, "clamp: needs a bound"),
    (lambda: X.gelu(approximate="fast"), tg.UserError, "gelu: unknown approximation"),
    (lambda: X.to("tpu"), tg.UserError, "to: no such device", '"cpu", "cuda", "npu" or', "hint:"),
    (lambda: X.view(tg.int4), tg.DTypeError, "view: the widths differ"),
    (lambda: X.reshape(4, 2), tg.ShapeError, "reshape: the number of elements changes",
     "expected: 6 elements as in (2, 3)", "got: 8 elements in (4, 2)"),
    (lambda: X.reshape(-1, -1), tg.ShapeError, "reshape: only one size may be -1"),
    (lambda: X.reshape("a"), tg.DTypeError, "reshape: a size is not an int", "got: str"),
    (lambda: X.permute(0, 0), tg.AxisError, "permute: not an order of the axes"),
    (lambda: X.transpose(0, 2), tg.AxisError, "axis 2 is out of range for shape (2, 3)",
     "expected: -2 <= axis < 2"),
    (lambda: X.expand(3, 3), tg.ShapeError, "expand:", "(3, 3)"),
    (lambda: X.repeat(2), tg.ShapeError, "repeat: needs a count for each axis"),
    (lambda: tg.cat([X, tg.ones(3, 2)]), tg.ShapeError, "concatenate: sizes differ off the axis"),
    (lambda: tg.cat(X), tg.DTypeError, "cat: needs a sequence of Tensors"),
    (lambda: tg.stack([X, LINE]), tg.ShapeError, "stack: shapes differ"),
    (lambda: X.split([1, 1], 1), tg.ShapeError, "split: the sizes do not make the axis"),
    (lambda: X.narrow(1, 2, 5), tg.AxisError, "narrow: reaches past the axis"),
    (lambda: X.unflatten(1, (2, 2)), tg.ShapeError, "unflatten: the sizes do not make the axis"),
    (lambda: tg.pad(X, [1]), tg.ShapeError, "pad: bad amounts"),
    (lambda: tg.pad(X, [1, 1], mode="mirror"), tg.UserError, "pad: unknown mode", "got: 'mirror'"),
    (lambda: tg.pad(X, [5, 0], mode="reflect"), tg.ShapeError, "wider than reflect can fill"),
    (lambda: X.sum(2), tg.AxisError, "sum: axis 2 is out of range", "got: 2"),
    (lambda: X.sum((0, 0)), tg.AxisError, "sum: an axis is named twice"),
    (lambda: X.sum("a"), tg.DTypeError, "sum: axis is not an int", "got: str"),
    (lambda: LINE.mean(), tg.DTypeError,
     "mean: needs floats", "got: int64", "hint: use x.float().mean()"),
    (lambda: tg.zeros(0).max(), tg.ShapeError, "max: there is nothing to choose from"),
    (lambda: tg.zeros(2, 0).argmax(1), tg.ShapeError, "argmax: there is nothing to choose from"),
    (lambda: X.topk(9), tg.UserError, "topk: k is out of range", "expected: 0 <= k <= 3"),
    (lambda: X.norm("nuc"), tg.UserError, "norm: unknown norm"),
    (lambda: X @ tg.ones(2, 3), tg.ShapeError, "matmul: inner sizes differ", "(2, 3) @ (2, 3)"),
    (lambda: X @ LINE, tg.DTypeError,
     "matmul: the dtypes do not fit", "float32 and int64", "hint: cast"),
    (lambda: tg.mm(X, tg.ones(3)), tg.ShapeError, "mm: needs 2 and 2 axes"),
    (lambda: tg.linear(X, tg.ones(4, 5)), tg.ShapeError, "linear: the sizes do not fit"),
    (lambda: tg.einsum("ij,jk->ik", X), tg.UserError, "einsum: the equation does not fit"),
    (lambda: tg.einsum("ijk->i", X), tg.ShapeError, "einsum: an operand does not fit its letters"),
    (lambda: tg.einsum("ij,jk->ik", X, X), tg.ShapeError, "einsum: letter 'j' has two sizes"),
    (lambda: tg.einsum("ij->ik", X), tg.UserError, "einsum: bad output"),
    (lambda: X[2], tg.AxisError, "index 2 is out of range for axis 0 of size 2",
     "expected: -2 <= index < 2"),
    (lambda: X[0, -4], tg.AxisError, "index -4 is out of range for axis 1 of size 3"),
    (lambda: X[0, 0, 0], tg.AxisError, "index: too many indices", "got: 3 for shape (2, 3)"),
    (lambda: X[[0, 5]], tg.AxisError, "index 5 is out of range for axis 0 of size 2"),
    (lambda: X[1.5], tg.DTypeError, "index: cannot be an index", "got: float"),
    (lambda: X[tg.tensor([0.5])], tg.DTypeError, "index: indices are not integers", "hint:"),
    (lambda: X[tg.tensor([True] * 3)], tg.AxisError, "index: the mask does not fit"),
    (lambda: X["a"], tg.DTypeError, "index: cannot be an index", "got: str"),
    (lambda: X[::0], tg.UserError, "index: bad step"),
    (lambda: assign(tg.ones(2, 3), 0, tg.ones(4)), tg.ShapeError, "assign:", "(4,)"),
    (lambda: assign(tg.ones(2, requires_grad=True), 0, 1.0), tg.StateError,
     "assign: a leaf that requires a gradient cannot be changed in place", "hint: do it inside"),
    (lambda: X.gather(0, LINE), tg.ShapeError, "gather: the index has another rank"),
    (lambda: X.gather(0, tg.tensor([[7,
     0, 0]]).realize()), tg.AxisError, "gather: index 7 is out of range"),
    (lambda: X.index_add(0, LINE[:1], tg.ones(3)),
     tg.ShapeError, "index_add: the source does not fit"),
    (lambda: X.masked_fill(X > 0, tg.ones(3)),
     tg.ShapeError, "masked_fill: the value is not one number"),
    (lambda: tg.zeros(-1), tg.ShapeError, "zeros: a size is negative"),
    (lambda: tg.arange(0, 5, -1), tg.UserError, "arange: the step leads away"),
    (lambda: tg.arange(0, 5, 0), tg.UserError, "arange: the step is 0"),
    (lambda: tg.zeros(2, dtype="float12"), tg.DTypeError, "unknown dtype", "got: 'float12'"),
    (lambda: tg.tensor([[1], [1, 2]]), tg.DTypeError, "Tensor: cannot make a Tensor"),
    (lambda: tg.tensor("abc"), tg.DTypeError, "Tensor"),
    (lambda: tg.one_hot(X), tg.DTypeError, "one_hot: classes are not integers"),
    (lambda: X.item(), tg.ShapeError, "item: needs exactly one element"),
    (lambda: iter(tg.tensor(1.0)), tg.DTypeError, "iter: a Tensor without axes"),
    (lambda: LINE.requires_grad_(), tg.DTypeError, "requires_grad: only floats have gradients"),
    (lambda: len(tg.tensor(1)), tg.DTypeError, "len: a Tensor without axes has no length"),
]  # fmt: skip


@pytest.mark.parametrize("row", TABLE, ids=[f"{i}" for i in range(len(TABLE))])
def test_text(row):
    function, kind, *texts = row
    with pytest.raises(kind) as caught:
        function()
    message = str(caught.value)
    for text in texts:
        assert text in message
    line = inspect.getsourcelines(function)[1]
    assert f"at {__file__}:" in message
    if "assign(" not in inspect.getsource(function):
        number = int(message.split(f"{__file__}:")[1].split()[0])
        assert abs(number - line) <= 2


def test_kinds_are_pythons_own():
    assert issubclass(tg.ShapeError, ValueError) and issubclass(tg.DTypeError, TypeError)
    assert issubclass(tg.AxisError, IndexError) and issubclass(tg.StateError, RuntimeError)


def test_masks_inside_jit():
    with pytest.raises(tg.TraceError) as caught:
        tg.jit(lambda x: x[x > 0])(X)
    for text in ("the size of the result depends", "hint: use where(mask"):
        assert text in str(caught.value)
    with pytest.raises(tg.TraceError, match="minlength"):
        tg.jit(lambda x: tg.bincount(x))(LINE)

    def fill(x):
        y = x * 1
        y[y > 0.5] = 0.0
        y[0, 1:] = 3.0
        return y

    assert tg.jit(fill)(X).tolist() == [[0.0, 3.0, 3.0], [0.0, 0.0, 0.0]]

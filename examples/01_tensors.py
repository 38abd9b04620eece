"""Tensors: PyTorch's names, lazy values, NumPy on both sides."""

import numpy as np

import tilegrad as tg

# Building costs nothing; reading a value compiles and runs all that it needs, in one go.
x = tg.arange(12, dtype=tg.float32).reshape(3, 4)
y = (x - x.mean(dim=0)) / (x.std(dim=0) + 1e-5)
print(y)

# Movement ops (reshape, permute, expand, slice, flip) copy nothing: they become index arithmetic.
print(x.T[1:3, ::2].flip(0).tolist())

# Indexing, broadcasting and reductions follow PyTorch.
print(x[x > 5].tolist(), x[[0, 2], [1, 3]].tolist())
print(tg.einsum("ij,kj->ik", x, x).shape, x.softmax(-1).sum(-1).tolist())

# Dtypes promote as in PyTorch; low floats are stored low and computed in float32.
half = x.to(tg.bfloat16)
print(half.dtype, (half + 1).dtype, (half + x).dtype)

# NumPy in and out shares memory where it can.
array = np.linspace(0, 1, 5, dtype=np.float32)
print(np.asarray(tg.from_numpy(array) * 2))

# Random numbers come from a counter: a seed gives the same bits again.
tg.manual_seed(7)
first = tg.randn(3).tolist()
tg.manual_seed(7)
print(first == tg.randn(3).tolist())

# A mistake names the op, what was expected, what came, and your line.
try:
    x @ tg.ones(3, 4)
except tg.ShapeError as error:
    print(error)

"""Creation against torch: data, constants, ranges, masks."""

from __future__ import annotations

import numpy as np
import pytest
from torch_tables import compare, data, torch

import tilegrad as tg
from tilegrad.core.errors import ShapeError

CASES = [
    ("zeros", lambda m: [m.zeros(2, 3), m.zeros((2, 3)), m.zeros([2]), m.zeros(())]),
    ("ones", lambda m: [m.ones(2, dtype=m.int32), m.ones(0, 3)]),
    ("full", lambda m: [m.full((2,), 3), m.full((2, 2), 1.5), m.full((1,), True)]),
    ("full dtype", lambda m: m.full((2,), 3, dtype=m.float16)),
    ("arange", lambda m: [m.arange(5), m.arange(2, 7), m.arange(1, 10, 3), m.arange(0)]),
    ("arange down", lambda m: [m.arange(5, 0, -2), m.arange(3, -1, -1)]),
    ("arange floats", lambda m: [m.arange(0.0, 1.0, 0.1), m.arange(2.5), m.arange(1, 2, 0.25)]),
    ("arange dtype", lambda m: [m.arange(5, dtype=m.float32), m.arange(5, dtype=m.uint8)]),
    ("linspace", lambda m: [m.linspace(0, 1, 5), m.linspace(-3, 10, 7), m.linspace(2, 2, 1),
                            m.linspace(0, 1, 0), m.linspace(5, -5, 11, dtype=m.float64)]),
    ("logspace", lambda m: [m.logspace(0, 2, 5), m.logspace(-1, 1, 3, base=2.0)]),
    ("eye", lambda m: [m.eye(3), m.eye(2, 4), m.eye(3, dtype=m.int64)]),
    ("tensor", lambda m: [m.tensor([1, 2]), m.tensor([1.0, 2]), m.tensor([[True], [False]]),
                          m.tensor(3), m.tensor(2.5), m.tensor([]), m.tensor([[], []])]),
    ("tensor dtype", lambda m: [m.tensor([1, 2], dtype=m.float64), m.tensor(1.7, dtype=m.int32)]),
    ("triangles", lambda m: [m.tril_indices(3, 4), m.triu_indices(3, 4, 1)]),
    ("meshgrid", lambda m: [*m.meshgrid(m.arange(3), m.arange(2), indexing="ij"),
                            *m.meshgrid(m.arange(3), m.arange(2), indexing="xy")]),
    ("meshgrid 3", lambda m: m.meshgrid(m.arange(2), m.arange(3), m.arange(4), indexing="xy")),
]  # fmt: skip


def test_creation():
    compare(CASES)


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool", "bfloat16"])
def test_like(dtype):
    compare(
        [
            ("zeros_like", lambda m, x: m.zeros_like(x)),
            ("ones_like", lambda m, x: m.ones_like(x)),
            ("full_like", lambda m, x: m.full_like(x, 1)),
            ("dtype", lambda m, x: m.zeros_like(x, dtype=m.float64)),
            ("new", lambda m, x: [x.new_zeros(2, 3), x.new_ones((2,)), x.new_full((2,), 1)]),
        ],
        data(dtype, (2, 3)),
    )


def test_one_hot():
    def one_hot(m, x, *classes):
        return (m if m is tg else torch.nn.functional).one_hot(x, *classes)

    x = torch.tensor([[0, 2], [1, 3]])
    compare([("classes", lambda m, x: one_hot(m, x, 5)), ("all", lambda m, x: one_hot(m, x))], x)


def test_dtypes_of_data():
    assert tg.tensor(np.float64(1)).dtype is tg.float64
    assert tg.tensor(np.arange(3, dtype=np.int16)).dtype is tg.int16
    assert tg.tensor([np.float32(1)]).dtype is tg.float32
    assert tg.tensor([tg.tensor(1.0), tg.tensor(2.0)]).tolist() == [1.0, 2.0]
    assert tg.tensor(torch.ones(2, dtype=torch.bfloat16)).dtype is tg.bfloat16
    assert tg.Tensor([1, 2], "float16").dtype is tg.float16


def test_memory():
    array = np.zeros(3, np.float32)
    copied, shared = tg.tensor(array), tg.from_numpy(array)
    array[0] = 5
    assert copied.tolist() == [0, 0, 0] and shared.tolist() == [5, 0, 0]
    assert tg.as_tensor(array).numpy().ctypes.data == array.ctypes.data
    assert tg.as_tensor(shared) is shared


def test_filling_in_place():
    x = tg.zeros(2, 2)
    x.fill_(3)
    assert x.tolist() == [[3.0, 3.0]] * 2
    x.zero_().copy_(tg.tensor([1, 2]))
    assert x.tolist() == [[1.0, 2.0]] * 2 and x.dtype is tg.float32


def test_two_leaves_of_one_constant():
    a, b = tg.zeros(3, requires_grad=True), tg.zeros(3, requires_grad=True)
    (a * 2 + b * 3).sum().backward()
    assert a.grad.tolist() == [2.0] * 3 and b.grad.tolist() == [3.0] * 3


def test_tri():
    assert tg.tri(2, 3, dtype=bool).tolist() == [[True, False, False], [True, True, False]]
    assert np.array_equal(tg.tri(3, 4, 1).numpy(), np.tri(3, 4, 1, dtype=np.float32))


def test_large_data_is_copied_to_whole_lines() -> None:
    source = np.arange(3 << 19, dtype=np.float32).reshape(1024, -1)[:, ::2]
    for dtype in (tg.float32, tg.bfloat16, tg.int32):
        made = tg.tensor(source, dtype=dtype)
        found = made.numpy()
        assert found.ctypes.data % 64 == 0 and found.flags.c_contiguous
        np.testing.assert_array_equal(found, source.astype(found.dtype))
    source[:] = 0
    assert found[0, 1] == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: tg.ones(2**40, 2**40).sum(),
        lambda: tg.zeros(0, 2**40, 2**40),
        lambda: tg.arange(2**61),
        lambda: tg.ones(2**40, 1) @ tg.ones(1, 2**40),
        lambda: tg.randn(2**33, 2**31),
        lambda: tg.ones(2**40, 1).repeat(1, 2**30),
        lambda: tg.ones(2**31).outer(tg.ones(2**31)),
        lambda: tg.pad(tg.ones(2**60), (2**62, 0)),
        lambda: tg.cat([tg.zeros(2**60, dtype="int8")] * 9),
        lambda: tg.jit(lambda x: x.expand(2**40, -1).sum(), dynamic={"x": {0: ("N", 1, 2**40)}})(
            tg.ones(4)
        ),
    ],
)
def test_sizes_beyond_64_bits_are_refused(make) -> None:
    with pytest.raises(ShapeError, match="cannot be addressed"):
        make()


@pytest.mark.parametrize("data", [2**70, -(2**70)])
def test_numbers_wider_than_any_integer(data: int) -> None:
    with pytest.raises(tg.DTypeError, match="a number does not fit the dtype"):
        tg.tensor(data, dtype=tg.int64)

"""NumPy, buffers, DLPack, torch, pickle, copies, files and text."""

from __future__ import annotations

import copy
import pickle
import sys

import numpy as np
import pytest

import tilegrad as tg


def test_numpy():
    x = tg.arange(6).reshape(2, 3) * 2
    assert np.asarray(x).tolist() == [[0, 2, 4], [6, 8, 10]]
    assert np.array(x, dtype=np.float32).dtype == np.float32
    assert np.shares_memory(x.numpy(), np.asarray(x))
    assert np.sum(x.numpy()) == 30
    assert np.asarray(tg.ones(2, dtype=tg.bfloat16)).astype(np.float32).tolist() == [1.0, 1.0]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the buffer protocol of classes is 3.12's")
def test_buffer_protocol():
    assert bytes(memoryview(tg.tensor([1, 2], dtype=tg.uint8))) == b"\x01\x02"


def test_buffer_by_hand():
    assert bytes(tg.tensor([1, 2], dtype=tg.uint8).__buffer__(0)) == b"\x01\x02"


def test_dlpack():
    array = np.arange(4, dtype=np.float32)
    x = tg.from_dlpack(array)
    assert x.numpy().ctypes.data == array.ctypes.data
    back = np.from_dlpack(x)
    assert back.ctypes.data == array.ctypes.data
    assert x.__dlpack_device__() == (1, 0)
    with pytest.raises(tg.DTypeError, match="cannot share this memory"):
        tg.from_dlpack("text")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64", "bool", "uint8"])
def test_torch_shares_memory(dtype):
    torch = pytest.importorskip("torch")
    source = torch.ones(2, 3).to(getattr(torch, dtype))
    x = tg.from_torch(source)
    assert x.dtype.name == dtype and x.numpy().ctypes.data == source.data_ptr()
    assert tg.from_dlpack(source).numpy().ctypes.data == source.data_ptr()
    back = x.torch()
    assert back.data_ptr() == source.data_ptr() and back.dtype == source.dtype
    assert torch.equal(torch.from_dlpack(x + 0), source)
    assert (x + source).tolist() == (x + x).tolist()


@pytest.mark.parametrize(
    "dtype",
    [d.name for d in (tg.float32, tg.bfloat16, tg.int64, tg.bool, tg.float8_e4m3, tg.uint16)],
)
def test_pickle_and_copies(dtype):
    x = tg.arange(6).reshape(2, 3).to(dtype)
    back = pickle.loads(pickle.dumps(x))
    assert back.dtype is x.dtype and back.float().tolist() == x.float().tolist()
    assert copy.deepcopy(x).float().tolist() == copy.copy(x).float().tolist() == x.float().tolist()


def test_copies_of_leaves():
    x = tg.ones(2, requires_grad=True)
    y = copy.deepcopy(x)
    assert y.requires_grad and y.is_leaf
    (x * 2 + y * 3).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0] and y.grad.tolist() == [3.0, 3.0]
    assert pickle.loads(pickle.dumps(x)).requires_grad
    z = copy.deepcopy({"a": x, "b": x})
    assert z["a"] is z["b"] and z["a"].grad.tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda m: m.tensor([[1.0, 2.5], [3, 4]]),
        lambda m: m.tensor([1.0, 2.0, -3.0]),
        lambda m: m.tensor([1, 20, 300]),
        lambda m: m.tensor([True, False]),
        lambda m: m.tensor(3),
        lambda m: m.tensor(2.5),
        lambda m: m.tensor([1e-5, 1.0]),
        lambda m: m.arange(24).reshape(2, 3, 4),
        lambda m: m.tensor([1.5, float("nan"), float("inf")]),
        lambda m: m.tensor([1e10, 1.5]),
        lambda m: m.zeros(40, 50),
        lambda m: m.tensor([0.1, 100.0]),
    ],
)
def test_repr_is_as_in_torch(make):
    torch = pytest.importorskip("torch")
    assert repr(make(tg)) == repr(make(torch))


def test_repr_says_more():
    assert repr(tg.ones(2, dtype=tg.bfloat16)) == "tensor([1., 1.], dtype=bfloat16)"
    assert repr(tg.ones(1, requires_grad=True)) == "tensor([1.], requires_grad=True)"
    assert repr(tg.zeros(0, 3)) == "tensor([], size=(0, 3), dtype=float32)"
    seen = []

    def function(x):
        seen.append(repr(x))
        return x + 1

    tg.jit(function)(tg.ones(4, 2))
    assert seen == ["Tensor(traced, float32[4, 2])"]


def test_python_protocols():
    x = tg.tensor([1.5, 2.5])
    assert f"{x[0]:.2f}" == "1.50" and f"{tg.tensor([1.0])}" == "tensor([1.])"
    assert [float(v) for v in x] == [1.5, 2.5] and len(x) == 2
    assert 2.5 in x and 9 not in x
    assert (x == None) is False and (x != None) is True  # noqa: E711
    assert hash(x) != hash(tg.tensor([1.5, 2.5])) and {x: 1}[x] == 1
    assert [1, 2, 3][tg.tensor(1)] == 2 and bool(tg.tensor(True))
    assert int(tg.tensor(3.7)) == 3 and x.dim() == 2 - 1
    assert round(tg.tensor(2.6)).item() == 3.0 and abs(tg.tensor(-1)).item() == 1


def test_callable_folder():
    import tilegrad.tensor.jit as jit_module

    assert jit_module.__name__ == "tilegrad.tensor.jit"
    assert tg.tensor([1]).tolist() == [1]

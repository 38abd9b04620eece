"""Module: registration, walking, checkpoints, modes, copies, text, jit."""

import copy
import pickle

import numpy as np
import pytest

import tilegrad as tg
from tilegrad import nn
from tilegrad.core.errors import DTypeError, ShapeError, UserError


class Small(nn.Module):
    """A little of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.rest = nn.ModuleList([nn.Linear(4, 4), nn.Dropout(0.5)])
        self.scale = nn.Parameter([2.0])
        self.register_buffer("seen", tg.zeros(2))
        self.register_buffer("scratch", tg.zeros(1), persistent=False)
        self.factor = 1.0

    def forward(self, x: tg.Tensor) -> tg.Tensor:
        x = self.norm(self.first(x))
        for module in self.rest:
            x = module(x)
        return x * self.scale * self.factor


def test_names() -> None:
    model = Small()
    assert [n for n, _ in model.named_parameters()] == [
        "scale",
        "first.weight",
        "first.bias",
        "norm.weight",
        "norm.bias",
        "rest.0.weight",
        "rest.0.bias",
    ]
    assert [n for n, _ in model.named_buffers()] == [
        "seen",
        "scratch",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]
    assert "scratch" not in model.state_dict() and "seen" in model.state_dict()
    names = ["", "first", "norm", "rest", "rest.0", "rest.1"]
    assert [n for n, _ in model.named_modules()] == names
    assert [n for n, _ in model.named_children()] == ["first", "norm", "rest"]
    assert model.get_submodule("rest.1") is model.rest[1]
    assert set(model.tensors()) == {n for n, _ in model.named_parameters()} | {
        n for n, _ in model.named_buffers()
    }


def test_tied_parameters_are_listed_once_and_stored_twice() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    assert len(list(model.parameters())) == 3
    assert len(model.state_dict()) == 4
    twin = copy.deepcopy(model)
    assert twin[1].weight is twin[0].weight is not model[0].weight


def test_attributes() -> None:
    model = Small()
    with pytest.raises(DTypeError, match="a parameter is replaced"):
        model.scale = tg.zeros(1)
    model.scale = None
    assert model.scale is None and "scale" not in model.state_dict()
    del model.first
    assert not hasattr(model, "first")
    with pytest.raises(AttributeError, match="'Small' object has no attribute 'nothing'"):
        _ = model.nothing

    class Early(nn.Module):
        def __init__(self) -> None:
            self.weight = nn.Parameter([1.0])

    with pytest.raises(UserError, match="super"):
        Early()


def test_load_state_dict() -> None:
    model, other = Small(), Small()
    before = {id(p) for p in other.parameters()}
    assert other.load_state_dict(model.state_dict()) == ([], [])
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), other.state_dict()[name].numpy())
    assert {id(p) for p in other.parameters()} == before
    assert all(p.requires_grad and p.is_leaf for p in other.parameters())
    state = dict(model.state_dict(), extra=tg.zeros(1))
    del state["seen"]
    with pytest.raises(UserError, match=r"missing: seen\n.*unexpected: extra"):
        other.load_state_dict(state)
    assert other.load_state_dict(state, strict=False) == (["seen"], ["extra"])
    state["scale"] = np.zeros(3, np.float32)
    with pytest.raises(ShapeError, match=r"scale: \(1,\) here, \(3,\) given"):
        other.load_state_dict(state, strict=False)


def test_modes() -> None:
    model = Small()
    assert model.training and model.eval() is model
    assert not any(m.training for m in model.modules())
    x = tg.ones(2, 3)
    np.testing.assert_array_equal(model(x).numpy(), model(x).numpy())
    model.train().requires_grad_(False)
    assert not any(p.requires_grad for p in model.parameters())
    model.requires_grad_().apply(lambda m: setattr(m, "visited", True))
    assert all(m.visited for m in model.modules())
    model(tg.randn(4, 3)).sum().backward()
    assert model.first.weight.grad is not None
    model.zero_grad()
    assert model.first.weight.grad is None


def test_to() -> None:
    model = Small()
    weight = model.first.weight
    kept = weight.numpy().copy()
    assert model.to("bfloat16") is model and model.first.weight is weight
    assert weight.dtype is tg.bfloat16 and model.norm.running_mean.dtype is tg.bfloat16
    assert model.norm.num_batches_tracked.dtype is tg.int64
    np.testing.assert_allclose(model.float().first.weight.numpy(), kept, rtol=1e-2)
    with pytest.raises(UserError, match="no such device"):
        model.to("mps")
    with pytest.raises(DTypeError, match="floats only"):
        model.to(tg.int64)


def test_copies_and_pickle() -> None:
    model = Small().eval()
    x = tg.ones(2, 3)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        np.testing.assert_array_equal(twin(x).numpy(), model(x).numpy())
        assert isinstance(twin.first.weight, nn.Parameter) and twin.first.weight.requires_grad
        twin.first.weight.assign(tg.zeros(4, 3))
        assert np.any(model.first.weight.numpy() != 0)
    assert pickle.loads(pickle.dumps(nn.ReLU())).training


def test_repr() -> None:
    assert repr(nn.Sequential(nn.Linear(2, 3, bias=False), nn.ReLU(), nn.Conv1d(1, 2, 3))) == (
        "Sequential(\n"
        "  (0): Linear(in_features=2, out_features=3, bias=False)\n"
        "  (1): ReLU()\n"
        "  (2): Conv1d(1, 2, kernel_size=(3,), stride=(1,))\n"
        ")"
    )
    assert repr(nn.Parameter([1.0])).startswith("Parameter containing:\n")


def test_jit_follows_state_and_settings() -> None:
    model = Small().eval()
    run = tg.jit(lambda m, x: m(x))
    x = tg.ones(2, 3)
    np.testing.assert_allclose(run(model, x).numpy(), model(x).numpy(), rtol=1e-5)
    with tg.no_grad():
        model.scale.assign([4.0])
    np.testing.assert_allclose(run(model, x).numpy(), model(x).numpy(), rtol=1e-5)
    assert run.traces == 1
    model.factor = 3.0
    np.testing.assert_allclose(run(model, x).numpy(), model(x).numpy(), rtol=1e-5)
    assert run.traces == 2
    model.train()
    run(model, tg.randn(4, 3))
    assert int(model.norm.num_batches_tracked) == 1


def test_containers() -> None:
    layers = nn.ModuleList([nn.ReLU()])
    layers.append(nn.Tanh()).insert(0, nn.GELU())
    assert [type(m).__name__ for m in layers] == ["GELU", "ReLU", "Tanh"]
    assert isinstance(layers.pop(1), nn.ReLU) and len(layers) == 2
    assert isinstance(layers[-1], nn.Tanh) and len(layers[:1]) == 1
    with pytest.raises(IndexError, match="no such position"):
        layers[2]
    with pytest.raises(DTypeError, match="not a Module"):
        layers.append(3)
    named = nn.ModuleDict({"a": nn.Linear(1, 1)})
    named["b"] = nn.ReLU()
    assert list(named) == ["a", "b"] and "a" in named and "a.weight" in named.state_dict()
    row = nn.ParameterList([tg.zeros(2)])
    row.append(tg.ones(1))
    assert list(row.state_dict()) == ["0", "1"] and len(row) == 2
    table = nn.ParameterDict({"x": tg.zeros(2)})
    assert list(table.state_dict()) == ["x"] and isinstance(table["x"], nn.Parameter)
    first = nn.Sequential({"a": nn.ReLU(), "b": nn.Tanh()})
    assert list(first._modules) == ["a", "b"] and len(first[:1]) == 1

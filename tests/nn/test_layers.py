"""Layers against torch's: state_dicts exchanged both ways, outputs and gradients equal."""

from collections.abc import Callable

import numpy as np
import pytest
from torch_peer import close, random_array, torch

import tilegrad as tg
from tilegrad import nn
from tilegrad.core.errors import ShapeError, UserError

# (name, arguments, options, input shapes)
LAYERS = [
    ("Linear", (5, 4), {}, [(3, 5)]),
    ("Linear", (5, 4), {"bias": False}, [(5,)]),
    ("Bilinear", (5, 3, 4), {}, [(2, 5), (2, 3)]),
    ("LayerNorm", ((4, 5),), {}, [(2, 4, 5)]),
    ("LayerNorm", (5,), {"bias": False}, [(2, 5)]),
    ("RMSNorm", (5,), {"eps": 1e-5}, [(2, 5)]),
    ("GroupNorm", (2, 4), {}, [(2, 4, 5)]),
    ("BatchNorm1d", (5,), {}, [(3, 5)]),
    ("BatchNorm1d", (5,), {"momentum": None}, [(3, 5, 2)]),
    ("BatchNorm2d", (4,), {"affine": False}, [(2, 4, 3, 3)]),
    ("InstanceNorm1d", (4,), {"affine": True}, [(2, 4, 5)]),
    ("Conv1d", (4, 6, 3), {"padding": 1, "padding_mode": "circular"}, [(2, 4, 7)]),
    ("Conv2d", (4, 6, (3, 2)), {"stride": 2, "groups": 2}, [(2, 4, 6, 7)]),
    ("Conv3d", (2, 2, 2), {"bias": False}, [(1, 2, 3, 4, 3)]),
    ("ConvTranspose1d", (4, 6, 3), {"stride": 2, "output_padding": 1}, [(2, 4, 5)]),
    ("ConvTranspose2d", (4, 2, 3), {"stride": 2, "padding": 1}, [(1, 4, 3, 4)]),
    ("MaxPool2d", (2,), {"padding": 1}, [(2, 3, 5, 6)]),
    ("AvgPool1d", (3, 2), {}, [(2, 3, 7)]),
    ("AdaptiveAvgPool2d", ((2, 3),), {}, [(2, 3, 5, 6)]),
    ("AdaptiveMaxPool1d", (3,), {}, [(2, 3, 7)]),
    ("Upsample", (), {"scale_factor": 2, "mode": "bilinear"}, [(1, 2, 3, 4)]),
    ("PixelShuffle", (2,), {}, [(1, 8, 3, 4)]),
    ("Flatten", (), {}, [(2, 3, 4)]),
    ("Identity", (), {}, [(2, 3)]),
    ("PReLU", (3,), {}, [(2, 3)]),
    ("RNN", (5, 4), {"num_layers": 2}, [(3, 2, 5)]),
    ("LSTM", (5, 4), {"batch_first": True}, [(2, 3, 5)]),
    ("GRU", (5, 4), {"bidirectional": True}, [(3, 2, 5)]),
    ("TransformerEncoderLayer", (8, 2, 16), {"batch_first": True, "dropout": 0.0}, [(2, 3, 8)]),
    (
        "TransformerEncoderLayer",
        (8, 2, 16),
        {"norm_first": True, "dropout": 0.0, "activation": "gelu"},
        [(3, 2, 8)],
    ),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name,args,options,shapes", LAYERS, ids=lambda v: str(v)[:40])
def test_layer(name: str, args: tuple, options: dict, shapes: list) -> None:
    ours, theirs = getattr(nn, name)(*args, **options), getattr(torch.nn, name)(*args, **options)
    state = theirs.state_dict()
    assert list(ours.state_dict()) == list(state)
    assert {n: tuple(t.shape) for n, t in ours.state_dict().items()} == {
        n: tuple(t.shape) for n, t in state.items()
    }
    ours.load_state_dict(state)
    back = {n: torch.tensor(np.array(t.numpy())) for n, t in ours.state_dict().items()}
    theirs.load_state_dict(back)
    inputs = [random_array(s, i) for i, s in enumerate(shapes)]
    for _ in range(2):  # twice: running statistics move
        _compare_call(ours, theirs, inputs)
    for n, tensor in ours.state_dict().items():
        close(tensor, theirs.state_dict()[n], 1e-4, n)


def _compare_call(ours: nn.Module, theirs: object, inputs: list) -> None:
    mine = [tg.tensor(x, requires_grad=True) for x in inputs]
    peers = [torch.tensor(x, requires_grad=True) for x in inputs]
    found, wanted = ours(*mine), theirs(*peers)
    if isinstance(wanted, tuple):
        found, wanted = found[0], wanted[0]
    close(found, wanted, 1e-4, "value")
    weights = random_array(tuple(wanted.shape), 9)
    ours.zero_grad()
    theirs.zero_grad()
    (found * tg.tensor(weights)).sum().backward()
    (wanted * torch.tensor(weights)).sum().backward()
    for a, b in zip(mine, peers):
        close(a.grad, b.grad, 1e-3, "input gradient")
    for (n, a), b in zip(ours.named_parameters(), theirs.parameters()):
        close(a.grad, b.grad, 1e-3, n)


ACTIVATIONS = [n for n in nn.activation.__all__ if n not in ("PReLU", "Threshold", "GLU")]


def test_activations() -> None:
    x = random_array((4, 6))
    for name in ACTIVATIONS:
        peer = getattr(torch.nn, name)
        theirs = peer(dim=-1) if name in ("Softmax", "Softmin", "LogSoftmax") else peer()
        close(getattr(nn, name)()(tg.tensor(x)), theirs(torch.tensor(x)), 1e-5, name)
    close(nn.GLU()(tg.tensor(x)), torch.nn.GLU()(torch.tensor(x)))
    close(nn.Threshold(0.1, 3.0)(tg.tensor(x)), torch.nn.Threshold(0.1, 3.0)(torch.tensor(x)))


def test_losses() -> None:
    x, y = random_array((4, 5)), random_array((4, 5), 1)
    for name in ("MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BCEWithLogitsLoss"):
        ours, theirs = getattr(nn, name)(), getattr(torch.nn, name)()
        close(ours(tg.tensor(x), tg.tensor(y)), theirs(torch.tensor(x), torch.tensor(y)))
    weight, target = np.abs(random_array((5,))), np.array([1, 4, 0, 1])
    ours = nn.CrossEntropyLoss(weight=tg.tensor(weight), label_smoothing=0.1)
    theirs = torch.nn.CrossEntropyLoss(weight=torch.tensor(weight), label_smoothing=0.1)
    assert list(ours.state_dict()) == list(theirs.state_dict()) == ["weight"]
    close(ours(tg.tensor(x), tg.tensor(target)), theirs(torch.tensor(x), torch.tensor(target)))


def test_embedding() -> None:
    ours = nn.Embedding(6, 3, padding_idx=2)
    assert not ours.weight.numpy()[2].any() and ours.weight.numpy()[1].any()
    theirs = torch.nn.Embedding(6, 3, padding_idx=2)
    ours.load_state_dict(theirs.state_dict())
    index = np.array([[0, 2], [5, 1]])
    close(ours(tg.tensor(index)), theirs(torch.tensor(index)))
    ours(tg.tensor(index)).sum().backward()
    theirs(torch.tensor(index)).sum().backward()
    close(ours.weight.grad, theirs.weight.grad)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"kdim": 6, "vdim": 5},
        {"add_bias_kv": True},
        {"add_zero_attn": True, "bias": False},
        {"kdim": 6, "vdim": 5, "add_bias_kv": True, "add_zero_attn": True},
    ],
    ids=str,
)
def test_multihead_attention(batch_first: bool, sizes: dict) -> None:
    ours = nn.MultiheadAttention(8, 2, batch_first=batch_first, **sizes)
    theirs = torch.nn.MultiheadAttention(8, 2, batch_first=batch_first, **sizes)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    shapes = [(2, 3, 8), (2, 4, sizes.get("kdim", 8)), (2, 4, sizes.get("vdim", 8))]
    arrays = [random_array(s if batch_first else (s[1], s[0], s[2])) for s in shapes]
    padding = np.array([[False, False, True, False], [False, False, False, True]])
    mask = np.array([[False, True, False, False]] * 3)
    for options in (
        {},
        {"need_weights": False},
        {"average_attn_weights": False},
        {"key_padding_mask": padding, "attn_mask": mask},
    ):
        found = ours(*map(tg.tensor, arrays), **_of(tg.tensor, options))
        wanted = theirs(*map(torch.tensor, arrays), **_of(torch.tensor, options))
        close(found[0], wanted[0], 1e-4)
        assert (found[1] is None) == (wanted[1] is None)
        if wanted[1] is not None:
            close(found[1], wanted[1], 1e-4)


def _of(make: Callable, options: dict) -> dict:
    return {k: make(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}


def test_dropout() -> None:
    tg.manual_seed(0)
    x = tg.ones(100, 50)
    found = nn.Dropout(0.25)(x).numpy()
    assert set(np.unique(found)) == {np.float32(0.0), np.float32(1 / 0.75)}
    assert abs((found == 0).mean() - 0.25) < 0.03
    assert nn.Dropout(0.25).eval()(x) is x
    channels = nn.Dropout2d(0.5)(tg.ones(8, 8, 2, 2)).numpy()
    assert (channels == channels[:, :, :1, :1]).all() and (channels == 0).any()
    with pytest.raises(UserError, match="not a probability"):
        nn.Dropout(1.5)


def test_default_values_follow_torch() -> None:
    tg.manual_seed(0)
    torch.manual_seed(0)
    for ours, theirs in (
        (nn.Linear(64, 48), torch.nn.Linear(64, 48)),
        (nn.Conv2d(8, 16, 3), torch.nn.Conv2d(8, 16, 3)),
        (nn.Embedding(64, 32), torch.nn.Embedding(64, 32)),
        (nn.MultiheadAttention(32, 4), torch.nn.MultiheadAttention(32, 4)),
    ):
        for (name, a), b in zip(ours.named_parameters(), theirs.parameters()):
            spread, wanted = float(a.numpy().std()), float(b.detach().std())
            few = a.numel() < 200
            assert spread == pytest.approx(wanted, rel=0.5 if few else 0.2, abs=1e-6), name


def test_init_functions() -> None:
    tg.manual_seed(0)
    weight = nn.Parameter(tg.zeros(64, 32))
    for name in (
        "xavier_uniform_",
        "xavier_normal_",
        "kaiming_uniform_",
        "kaiming_normal_",
        "trunc_normal_",
        "orthogonal_",
        "eye_",
    ):
        assert getattr(nn.init, name)(weight) is weight
        peer = getattr(torch.nn.init, name)(torch.empty(64, 32))
        assert weight.numpy().std() == pytest.approx(float(peer.std()), rel=0.15), name
    nn.init.orthogonal_(weight)
    np.testing.assert_allclose(weight.numpy().T @ weight.numpy(), np.eye(32), atol=1e-5)
    assert weight.requires_grad and weight.is_leaf
    assert nn.init.calculate_gain("leaky_relu", 0.2) == torch.nn.init.calculate_gain(
        "leaky_relu", 0.2
    )


def test_errors() -> None:
    with pytest.raises(ShapeError, match="BatchNorm2d: the input does not fit"):
        nn.BatchNorm2d(3)(tg.zeros(2, 3, 4))
    with pytest.raises(UserError, match="features do not divide into heads"):
        nn.MultiheadAttention(7, 2)
    with pytest.raises(UserError, match="MaxPool2d: bad arguments"):
        nn.MaxPool2d()

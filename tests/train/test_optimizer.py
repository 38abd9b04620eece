"""Optimizers against torch: trajectories, jitted and not; state exchanged; rates and clipping."""

import copy
import inspect
import pickle

import numpy as np
import pytest
from torch_peer import close, random_array, torch

import tilegrad as tg
from tilegrad import nn, train
from tilegrad.core.errors import UserError

OPTIMIZERS = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.5, "dampening": 0.2, "maximize": True}),
    ("Adam", {"lr": 0.05, "weight_decay": 0.1}),
    ("Adam", {"lr": 0.05, "amsgrad": True}),
    ("AdamW", {"lr": 0.05}),
    ("AdamW", {"lr": 0.05, "betas": (0.5, 0.9), "weight_decay": 0.3}),
    ("RMSprop", {"lr": 0.02}),
    ("RMSprop", {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}),
    ("RMSprop", {"lr": 0.02, "centered": True, "alpha": 0.9, "eps": 1e-4, "maximize": True}),
    ("Adagrad", {"lr": 0.1}),
    (
        "Adagrad",
        {
            "lr": 0.1,
            "lr_decay": 0.2,
            "weight_decay": 0.1,
            "maximize": True,
            "initial_accumulator_value": 0.5,
        },
    ),
]
X, Y = random_array((6, 3)), random_array((6, 4), 1)


def models() -> tuple:
    """The same small net on both sides."""
    theirs = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 4))
    ours = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def our_step(model: nn.Module, optimizer: train.Optimizer, x: tg.Tensor, y: tg.Tensor) -> tg.Tensor:
    """One step of training."""
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def their_step(model: object, optimizer: object) -> object:
    """The same with torch."""
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(torch.tensor(X)), torch.tensor(Y))
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.sampled(2)
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name,options", OPTIMIZERS, ids=str)
def test_trajectory(name: str, options: dict, jitted: bool) -> None:
    ours, theirs = models()
    mine = getattr(train, name)(ours.parameters(), **options)
    peer = getattr(torch.optim, name)(theirs.parameters(), **options)
    step = tg.jit(our_step) if jitted else our_step
    for _ in range(4):
        close(step(ours, mine, tg.tensor(X), tg.tensor(Y)), their_step(theirs, peer), 1e-5)
    for (n, a), b in zip(ours.named_parameters(), theirs.parameters()):
        close(a, b, 2e-5, n)
    if jitted:
        assert step.traces == 1


def test_rate_changes_without_a_new_trace() -> None:
    ours, theirs = models()
    mine = train.SGD(ours.parameters(), lr=0.1)
    peer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    step = tg.jit(our_step)
    for lr in (0.1, 0.5, 0.02):
        mine.lr = lr
        mine.param_groups[0]["lr"] = lr
        peer.param_groups[0]["lr"] = lr
        step(ours, mine, tg.tensor(X), tg.tensor(Y))
        their_step(theirs, peer)
    assert step.traces == 1
    close(ours[0].weight, theirs[0].weight, 1e-5)


def test_a_rate_that_follows_the_step() -> None:
    ours, theirs = models()
    mine = train.SGD(ours.parameters(), lr=train.rate.cosine(0.3, 4, warmup=2))
    peer = torch.optim.SGD(theirs.parameters(), lr=0.3)
    step = tg.jit(our_step)
    for i in range(4):
        peer.param_groups[0]["lr"] = [0.15, 0.3, 0.3, 0.15][i]
        step(ours, mine, tg.tensor(X), tg.tensor(Y))
        their_step(theirs, peer)
    assert step.traces == 1
    close(ours[0].weight, theirs[0].weight, 1e-5)


def test_groups() -> None:
    ours, theirs = models()
    mine = train.AdamW(
        [
            {"params": ours[0].parameters(), "weight_decay": 0.5},
            {"params": ours[2].parameters(), "lr": 0.3},
        ],
        lr=0.1,
    )
    peer = torch.optim.AdamW(
        [
            {"params": theirs[0].parameters(), "weight_decay": 0.5},
            {"params": theirs[2].parameters(), "lr": 0.3},
        ],
        lr=0.1,
    )
    for _ in range(2):
        our_step(ours, mine, tg.tensor(X), tg.tensor(Y))
        their_step(theirs, peer)
    for a, b in zip(ours.parameters(), theirs.parameters()):
        close(a, b, 1e-5)


def test_state_goes_on_from_torch_and_from_a_copy() -> None:
    ours, theirs = models()
    mine = train.AdamW(ours.parameters(), lr=0.05)
    peer = torch.optim.AdamW(theirs.parameters(), lr=0.1)
    their_step(theirs, peer)
    ours.load_state_dict(theirs.state_dict())
    mine.load_state_dict(peer.state_dict())
    assert float(mine.lr) == pytest.approx(0.1)
    twin_model, twin = pickle.loads(pickle.dumps((ours, mine)))
    second_model, second = copy.deepcopy((ours, mine))
    their_step(theirs, peer)
    for model, optimizer in ((ours, mine), (twin_model, twin), (second_model, second)):
        our_step(model, optimizer, tg.tensor(X), tg.tensor(Y))
        close(model[0].weight, theirs[0].weight, 1e-5)
    third = train.AdamW(ours.parameters())
    third.load_state_dict(mine.state_dict())
    assert float(third.count) == 2.0


def test_low_precision_parameters_keep_wide_moments() -> None:
    weight = nn.Parameter(tg.ones(4).to("bfloat16"))
    optimizer = train.AdamW([weight], lr=0.1)
    (weight.float() * tg.arange(4)).sum().backward()
    optimizer.step()
    assert weight.dtype is tg.bfloat16
    assert optimizer.state[id(weight)]["exp_avg"].dtype is tg.float32
    assert weight.numpy().astype(np.float32)[1] == pytest.approx(0.9, abs=0.01)


def test_rates() -> None:
    steps = np.arange(12)
    for rate, wanted in (
        (train.rate.constant(2.0, 4), [0.5, 1.0, 1.5] + [2.0] * 9),
        (train.rate.linear(1.0, 0.0, 10, 5), [0.2, 0.4, 0.6, 0.8, 1, 1, 0.8, 0.6, 0.4, 0.2, 0, 0]),
        (
            train.rate.cosine(1.0, 10, floor=0.2),
            [0.2 + 0.4 * (1 + np.cos(np.pi * min(s / 10, 1))) for s in steps],
        ),
    ):
        found = [float(rate(int(s))) for s in steps]
        np.testing.assert_allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize("kind", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("bound", [0.1, 100.0])
def test_clip(bound: float, kind: float) -> None:
    ours, theirs = models()
    nn.functional.mse_loss(ours(tg.tensor(X)), tg.tensor(Y)).backward()
    torch.nn.functional.mse_loss(theirs(torch.tensor(X)), torch.tensor(Y)).backward()
    found = train.clip_grad_norm_(ours.parameters(), bound, kind)
    close(found, torch.nn.utils.clip_grad_norm_(theirs.parameters(), bound, kind), 1e-5)
    for a, b in zip(ours.parameters(), theirs.parameters()):
        close(a.grad, b.grad, 1e-5)
    train.clip_grad_value_(ours.parameters(), 0.01)
    assert max(float(p.grad.abs().max()) for p in ours.parameters()) <= 0.01


def test_errors() -> None:
    weight = nn.Parameter([1.0])
    with pytest.raises(UserError, match="no parameters"):
        train.SGD([])
    with pytest.raises(UserError, match="given twice"):
        train.SGD([weight, weight])
    with pytest.raises(UserError, match="AdamW: bad beta1"):
        train.AdamW([weight], betas=(1.0, 0.9))
    with pytest.raises(UserError, match="bad learning rate"):
        train.SGD([weight], lr=-1.0)


def test_optim_is_train() -> None:
    """torch.optim's names for the one implementation."""
    import tilegrad.optim as optim

    assert tg.optim is optim
    for name in {name for name, _ in OPTIMIZERS}:
        assert getattr(optim, name) is getattr(train, name)
        theirs = inspect.signature(getattr(torch.optim, name)).parameters
        ours = inspect.signature(getattr(optim, name)).parameters
        assert [n for n in theirs if n in ours] == list(ours), name


def test_state_of_adaptive_optimizers_from_torch() -> None:
    for name, options in OPTIMIZERS[-5:]:
        ours, theirs = models()
        peer = getattr(torch.optim, name)(theirs.parameters(), **options)
        their_step(theirs, peer)
        ours.load_state_dict(theirs.state_dict())
        mine = getattr(train, name)(ours.parameters(), **options)
        mine.load_state_dict(peer.state_dict())
        their_step(theirs, peer)
        our_step(ours, mine, tg.tensor(X), tg.tensor(Y))
        for (n, a), b in zip(ours.named_parameters(), theirs.parameters()):
            close(a, b, 2e-5, f"{name} {n}")

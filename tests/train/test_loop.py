"""The training loop: it learns, compiles once, and stops between steps."""

import gc
import signal
from collections.abc import Iterator

import pytest

import tilegrad as tg
from tilegrad import nn, train
from tilegrad.core.errors import UserError


def batches(count: int) -> Iterator[tuple]:
    """Points on a line."""
    generator = tg.Generator(0)
    for _ in range(count):
        x = tg.randn(8, 2, generator=generator)
        yield x, x.sum(1, keepdim=True)


def loss(model: nn.Module, x: tg.Tensor, y: tg.Tensor) -> tg.Tensor:
    """How far off."""
    return nn.functional.mse_loss(model(x), y)


def test_train() -> None:
    tg.manual_seed(0)
    model = nn.Linear(2, 1)
    seen = []
    history = train.train(
        model,
        train.AdamW(model.parameters(), 0.1, weight_decay=0.0),
        batches(60),
        loss,
        steps=50,
        clip=1.0,
        on_step=lambda number, value, _: seen.append((number, value)),
    )
    assert history.steps == len(seen) == 50 and not history.stopped
    assert history.losses[-1] < 0.05 * history.losses[0]
    assert history.losses == [value for _, value in seen]


@pytest.fixture
def no_gc() -> Iterator[None]:
    """No callback or finaliser runs where a signal may come."""
    gc.disable()
    yield
    gc.enable()


def test_interrupt_stops_between_steps(no_gc: None) -> None:
    model = nn.Linear(2, 1)
    before = signal.getsignal(signal.SIGINT)

    def interrupt(number: int, *_: object) -> None:
        if number == 2:
            signal.raise_signal(signal.SIGINT)  # handled before this returns

    optimizer = train.SGD(model.parameters())
    history = train.train(model, optimizer, batches(10), loss, on_step=interrupt)
    assert history.stopped and history.steps == 3
    assert signal.getsignal(signal.SIGINT) is before


def test_interrupt_before_anything_is_kept_ends_it_at_once(no_gc: None) -> None:
    model = nn.Linear(2, 1)
    before = signal.getsignal(signal.SIGINT)

    def first(number: int) -> Iterator[tuple]:
        signal.raise_signal(signal.SIGINT)
        yield from batches(number)

    with pytest.raises(KeyboardInterrupt):
        train.train(model, train.SGD(model.parameters()), first(3), loss)
    assert signal.getsignal(signal.SIGINT) is before


def test_no_batches() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(UserError, match="nothing was trained"):
        train.train(model, train.SGD(model.parameters()), [], loss)

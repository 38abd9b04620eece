"""A small training loop: one jitted step, and a clean stop.

Invariant: Ctrl-C ends the loop between two steps, so parameters and optimizer are always those
of a whole step; a second Ctrl-C interrupts at once.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..core.errors import UserError
from ..tensor.jit import jit
from ..tensor.tensor import Tensor
from .clip import clip_grad_norm_
from .optimizer import Optimizer

Loss = Callable[..., Tensor]


@dataclass
class History:
    """What a training run did."""

    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0  # without the first step, which compiles
    first_seconds: float = 0.0
    stopped: bool = False  # by Ctrl-C

    @property
    def steps(self) -> int:
        """How many steps ran."""
        return len(self.losses)


def make_step(loss: Loss, clip: float | None = None) -> Any:
    """A jitted step(model, optimizer, *batch) -> loss: forward, backward, update in one."""

    def step(model: Any, optimizer: Any, *batch: Any) -> Tensor:
        optimizer.zero_grad()
        value = loss(model, *batch)
        value.backward()
        if clip is not None:
            clip_grad_norm_(optimizer.parameters(), clip)
        optimizer.step()
        return value.detach()

    return jit(step, name="training step")


def train(
    model: Any,
    optimizer: Optimizer,
    batches: Iterable[tuple[Any, ...]],
    loss: Loss,
    *,
    steps: int | None = None,
    seconds: float | None = None,
    clip: float | None = None,
    on_step: Callable[[int, float, History], None] | None = None,
) -> History:
    """Train on batches until they, the steps or the seconds run out, or Ctrl-C: that ends it after
    a step, and at once where there was none yet.

    `loss(model, *batch)` gives a scalar; `on_step(number, loss, history)` is called after each.
    """
    step, history = make_step(loss, clip), History()
    model.train()
    begin = time.perf_counter()
    with stop_flag(lambda: bool(history.losses)) as stopping:
        for number, batch in enumerate(batches):
            if (steps is not None and number >= steps) or stopping.is_set():
                break
            history.losses.append(float(step(model, optimizer, *batch)))
            now = time.perf_counter()
            if number == 0:
                history.first_seconds, begin = now - begin, now
            history.seconds = now - begin
            if on_step is not None:
                on_step(number, history.losses[-1], history)
            if seconds is not None and history.seconds >= seconds:
                break
        history.stopped = stopping.is_set()
    if not history.losses:
        raise UserError(
            "nothing was trained", op="train", expected="at least one batch", got="none"
        )
    return history


@contextmanager
def stop_flag(kept: Callable[[], bool] = lambda: True) -> Iterator[threading.Event]:
    """An Event that Ctrl-C sets instead of interrupting; a second one interrupts, and one before
    there is anything that is kept."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def handle(number: int, frame: Any) -> None:
        if event.is_set() or not kept():
            signal.default_int_handler(number, frame)
        event.set()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


__all__ = ["History", "make_step", "stop_flag", "train"]

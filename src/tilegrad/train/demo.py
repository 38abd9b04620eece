"""`tilegrad demo`: a small character-level GPT trained on Shakespeare, and what it then writes.

Invariant: needs nothing but the install; with `steps` given, the same seed gives the same text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np

from ..core.errors import UserError
from ..models.gpt2 import GPT2, GPT2Config
from ..tensor.creation import tensor
from ..tensor.random import Generator, manual_seed
from .loop import History, train
from .optimizer import AdamW

TOKENS, BATCH = 64, 16  # a window of text, and how many a step sees
PEAK_RATE, WARMUP, FLOOR = 3e-3, 0.03, 0.05  # of the learning rate, over the run

Stage = Callable[..., None]  # (name, done, total, note="")


@dataclass
class Demo:
    """What the demo made."""

    model: GPT2
    history: History
    sample: str


def read_text() -> str:
    """The text that comes with the package."""
    return resources.files(__package__).joinpath("text", "shakespeare.txt").read_text("utf-8")


def windows(data: np.ndarray[Any, Any], seed: int) -> Iterator[tuple[Any, Any]]:
    """Batches of random windows and the same moved on by one: (BATCH, TOKENS) each."""
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(data) - TOKENS - 1, BATCH)
        block = data[starts[:, None] + np.arange(TOKENS + 1)]
        yield tensor(block[:, :-1]), tensor(block[:, 1:])


def rate_at(share: float) -> float:
    """The learning rate when a share of the run is over: up in a line, down along a cosine."""
    if share < WARMUP:
        return PEAK_RATE * (share + 0.1 * WARMUP) / (1.1 * WARMUP)
    rest = min((share - WARMUP) / (1.0 - WARMUP), 1.0)
    return PEAK_RATE * (FLOOR + (1.0 - FLOOR) * 0.5 * (1.0 + math.cos(math.pi * rest)))


def run_demo(
    steps: int | None = None,
    seconds: float = 60,
    seed: int = 0,
    say: Callable[[str], Any] = lambda _: None,
    stage: Stage = lambda *_: None,
) -> Demo:
    """Train for so many steps, or seconds, and say what was written; Ctrl-C stops early.

    `say` gets lines of text; `stage` what is under way, how far, of how much, and a note.
    """
    if (steps is not None and steps < 1) or not seconds > 0:
        raise UserError(
            "nothing to do",
            op="demo",
            expected="steps >= 1 and seconds > 0",
            got=f"steps {steps}, seconds {seconds}",
        )
    manual_seed(seed)
    text = read_text()
    letters = sorted(set(text))
    data = np.searchsorted(np.array(letters), np.array(list(text)))
    model = GPT2(GPT2Config(len(letters), TOKENS, n_embd=128, n_layer=4, n_head=4))
    count = sum(int(p.numel()) for p in model.parameters())
    say(
        f"A GPT of {count:,} parameters learns to write, letter by letter, from "
        f"{len(text):,} letters of Shakespeare. Ctrl-C stops early."
    )
    history = _train(model, data, steps, seconds, seed, stage)
    speed = BATCH * TOKENS * max(history.steps - 1, 1) / max(history.seconds, 1e-9)
    say(
        f"{history.steps} steps, loss {history.losses[0]:.2f} -> {_recent(history):.2f}, "
        f"{speed:,.0f} tokens/s, compiled in {history.first_seconds:.1f} s"
    )
    stage("writing a sample", 0, 1)
    sample = write(model.eval(), letters, 400, seed)
    stage("writing a sample", 1, 1)
    say(f"\n---- sample ----\n\n{sample}")
    return Demo(model, history, sample)


def _train(
    model: GPT2, data: Any, steps: int | None, seconds: float, seed: int, stage: Stage
) -> History:
    optimizer = AdamW(model.parameters(), lr=rate_at(0.0), weight_decay=0.1, betas=(0.9, 0.99))
    total = float(steps) if steps is not None else float(seconds)
    begin = time.perf_counter()
    stage("compile", 0, 1)

    def after(number: int, loss: float, history: History) -> None:
        if number == 0:
            stage("compile", 1, 1)
        done = number + 1.0 if steps is not None else history.seconds
        optimizer.lr = rate_at(done / total)
        spent = max(time.perf_counter() - begin - history.first_seconds, 1e-9)
        if number % 10 == 0:
            speed = number * BATCH * TOKENS / spent
            stage(
                "training",
                done,
                total,
                f"step {number + 1}, loss {_recent(history):.3f}, {speed:,.0f} tokens/s",
            )

    history = train(
        model,
        optimizer,
        windows(data, seed),
        GPT2.loss,
        steps=steps,
        seconds=None if steps is not None else seconds,
        clip=1.0,
        on_step=after,
    )
    stage("training", total, total)
    return history


def _recent(history: History) -> float:
    """The mean of the last losses."""
    last = history.losses[-20:]
    return sum(last) / len(last)


def write(model: GPT2, letters: list[str], count: int, seed: int, prompt: str = "\n") -> str:
    """Text that the model makes up after a prompt."""
    start = tensor([[letters.index(c) for c in prompt]])
    found = model.generate(start, count, temperature=0.8, generator=Generator(seed))
    return "".join(letters[i] for i in found.tolist()[0]).strip()


__all__ = ["Demo", "read_text", "run_demo", "windows", "write"]

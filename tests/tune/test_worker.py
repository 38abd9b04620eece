"""Trials in child processes: values, errors, hangs and deaths."""

from __future__ import annotations

import os

import pytest
import trial_functions

from tilegrad.tune.worker import Worker


@pytest.fixture
def worker():
    with Worker() as made:
        yield made


def test_values_errors_hangs_and_deaths(worker) -> None:
    assert worker.run(trial_functions.add, 1, b=2).value == 3
    first = worker.run(trial_functions.process).value
    assert first != os.getpid()
    failed = worker.run(trial_functions.spoil, "no such tile")
    assert (failed.kind, failed.good) == ("error", False)
    assert failed.error == "ValueError: no such tile"
    assert worker.run(trial_functions.process).value == first  # it lives on
    hung = worker.run(trial_functions.sleep, 3600, seconds=0.3)
    assert hung.kind == "timeout" and "0.3 s" in hung.error
    assert worker.run(trial_functions.process).value != first  # another one
    dead = worker.run(trial_functions.die)
    assert dead.kind == "crash" and "exit code 9" in dead.error
    assert worker.run(trial_functions.add, 5).value == 6


def test_what_cannot_be_sent(worker) -> None:
    outcome = worker.run(lambda: 1)
    assert outcome.kind == "error" and "cannot be sent" in outcome.error

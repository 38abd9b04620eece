"""What runs by hand on a GPU is ready to: every case of these scripts is built here, without one.

Kernels of the library are built and emitted for an H200, functions of Tensors are traced and (one
in some) compiled for it, and checks that need no time or kernel of their own run on a device whose
kernels are interpreted. So a call that a change of the library no longer fits is found here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import bound_checks
import cache_checks
import packed_checks
import pytest
import quantised_checks
import sanitize
import sanitize_attention
import sanitize_quantised
import smoke
from test_cuda import Interpreted, cuda  # noqa: F401  (a fixture)

import tilegrad as tg
from tilegrad.compiler.compile import schedule_for
from tilegrad.core.format import format_of
from tilegrad.core.target import H200
from tilegrad.runtime.language import language_of
from tilegrad.schedule.schedule import Launch
from tilegrad.targets.ptx import driver
from tilegrad.targets.ptx.emit import emit

LIBRARY = dict(sanitize.library())
STEPS = dict([*sanitize_attention.cases(), *sanitize_quantised.cases()])
ON_TENSORS: dict[str, Callable[[Any], str]] = {
    name: CHECKS[name]
    for CHECKS, names in (
        (smoke.CHECKS, ("tensor_round_trip", "tensor_ops", "tensor_control")),
        (bound_checks.CHECKS, ("plain_calls_in_between", "writes_overtake_nothing")),
    )
    for name in names
}


def emits(body: Any) -> None:
    """A Body is a Program of an H200."""
    text, entry = emit(body, "kernel", H200)
    assert ".entry kernel(" in text and entry.shared_bytes <= H200.memories["shared"].bytes


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", LIBRARY)
def test_products_are_emitted(name: str) -> None:
    run = LIBRARY[name]()
    emits(run.body)
    assert len(run.body.parameters) == len(run.memories) and run.wanted


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", STEPS)
def test_steps_are_emitted(name: str) -> None:
    steps = STEPS[name]()
    for body, names in steps.launches:
        emits(body)
        assert len(body.parameters) == len(names) and set(names) <= set(steps.memories)
    assert steps.wanted and set(steps.wanted) <= set(steps.memories)


def traced(name: str) -> Any:
    """A function of Tensors, traced for an H200 with its own arguments."""
    function, arrays = sanitize.GENERATED[name]
    return tg.jit(function)._lower_for(H200, tuple(tg.tensor(a) for a in arrays), {})


@pytest.mark.parametrize("name", sanitize.GENERATED)
def test_functions_are_traced(name: str) -> None:
    lowered = traced(name)
    assert lowered.outputs and all(s.kind == "leaf" for s in lowered.sources)


@pytest.mark.sampled(4, also=["experts, few tokens"])
@pytest.mark.parametrize("name", sanitize.GENERATED)
def test_functions_are_emitted(name: str) -> None:
    lowered = traced(name)
    schedule = schedule_for(lowered.inputs, lowered.outputs, H200, lowered.donate)
    bodies = [s.body for k in schedule.kernels for s in k.steps if isinstance(s, Launch)]
    assert bodies
    for body in {id(b): b for b in bodies}.values():
        assert language_of(H200).emit(body, "kernel", H200).text


@pytest.mark.parametrize("cuda", [Interpreted], indirect=True)
@pytest.mark.parametrize("name", ON_TENSORS)
def test_checks_of_tensors_pass(name: str, cuda, monkeypatch) -> None:  # noqa: F811
    monkeypatch.setattr(driver.Device, "target", replace(H200, cores=4))
    assert ON_TENSORS[name](driver.open_device(0))


@pytest.mark.parametrize("cuda", [Interpreted], indirect=True)
@pytest.mark.parametrize(
    "name",
    ["Q4_1", *(pytest.param(n, marks=pytest.mark.slow) for n in ("INT8_ROW_F32", "BF16_SPARSE"))],
)
def test_quantised_checks_pass(name: str, cuda, monkeypatch) -> None:  # noqa: F811
    monkeypatch.setattr(quantised_checks, "ROWS", 96)
    form = format_of(name)
    of_codes = name in quantised_checks.INPUTS
    made = (quantised_checks.check_codes if of_codes else quantised_checks.check)(form)
    assert made and max(made.values()) < quantised_checks.ALLOWED


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", cache_checks.KEPT)
def test_cache_checks_pass(name: str) -> None:
    run = cache_checks.Run(cache_checks.KEPT[name], (4, 2, 64), 16, "cpu")
    for step in cache_checks.STEPS:
        assert run.worst(*step) <= cache_checks.ALLOWED


@pytest.mark.sampled(8, also=("before and behind-True",))
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("name", packed_checks.CASES)
def test_packed_checks_pass(name: str, causal: bool) -> None:
    errors = packed_checks.check(packed_checks.CASES[name], causal, "cpu")
    assert max(errors.values()) < packed_checks.ALLOWED

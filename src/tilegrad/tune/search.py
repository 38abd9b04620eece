"""Try the Plans of a kernel on real arguments within a budget of time, and keep the fastest.

Plans that give the same Programs on this Target are measured once. The budget limits the time
spent running kernels; compiling is not counted, and the first Plan is always measured.
Invariant: the order of trials depends on the space alone, and a Plan that cannot be compiled is
reported, never chosen.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..compiler.compile import executable_for, schedule_for
from ..compiler.flatten import recipe_of
from ..core.errors import UserError
from ..core.target import Target
from ..ir.node import Node
from ..kernels.plan_table import Entry, Trial
from ..runtime.buffer import HOST
from ..runtime.device import target_for
from ..tile.plan import Plan

Graph = tuple[tuple[Node, ...], tuple[Node, ...]]  # inputs and outputs
Build = Callable[[Plan], Graph]
TRIES = 20


def plans_in(space: Mapping[str, Sequence[Any]], base: Plan) -> list[Plan]:
    """Every Plan of a space, in order; the choices in `base` hold where it says nothing."""
    if not space:
        raise UserError("an empty space", op="autotune", expected="dict(BM=[64, 128], ...)")
    for name, values in space.items():
        if isinstance(values, (str, bytes)) or not len(values):
            raise UserError(f"no choices for {name}", op="autotune", expected="a list", got=values)
    names = list(space)
    return [
        base.with_(**dict(zip(names, chosen)))
        for chosen in itertools.product(*[space[n] for n in names])
    ]


def search(
    plans: Sequence[Plan],
    build: Build,
    buffers: Sequence[Any],
    symbols: Mapping[str, int],
    budget_ms: float,
    device: str = HOST,
) -> Entry:
    """Measure Plans on a Device; the Entry of the fastest, with every Trial."""
    target = target_for(device)
    trials: list[Trial] = []
    seen: dict[Any, Plan] = {}
    refused: list[tuple[Plan, UserError]] = []
    spent = 0.0
    for number, plan in enumerate(plans):
        if spent >= budget_ms and number and any(t.seconds is not None for t in trials):
            trials += [Trial(p.to_record(), None, "no time left") for p in plans[number:]]
            break
        try:
            inputs, outputs = build(plan)
            programs = _programs(inputs, outputs, target)
            if programs in seen:
                same = f"the same program as {seen[programs]}"
                trials.append(Trial(plan.to_record(), None, same))
                continue
            seen[programs] = plan
            run = executable_for(inputs, outputs, device=device)
        except UserError as error:
            refused.append((plan, error))
            trials.append(Trial(plan.to_record(), None, str(error).splitlines()[0]))
            continue
        start = time.perf_counter()
        share = max(1.0, (budget_ms - spent) / max(1, len(plans) - number))
        taken = measure(_runner(run, buffers, symbols, device), share)
        trials.append(Trial(plan.to_record(), 1e-3 * taken))
        spent += 1e3 * (time.perf_counter() - start)
    timed = [t for t in trials if t.seconds is not None]
    if not timed:
        raise _refusal(refused)
    best = min(timed, key=lambda t: t.seconds or 0.0)
    return Entry(best.plan, best.seconds, trials=tuple(trials))


def _refusal(refused: Sequence[tuple[Plan, UserError]]) -> UserError:
    """Why no Plan can be run: the error itself if it is the same for all, else each one once."""
    kinds: dict[str, list[tuple[Plan, UserError]]] = {}
    for plan, error in refused:
        kinds.setdefault(str(error).splitlines()[0], []).append((plan, error))
    if len(kinds) == 1:
        return refused[0][1]
    shown = [
        f"{len(found)} of {len(refused)}, such as {found[0][0]}: {found[0][1]}"
        for found in list(kinds.values())[:8]
    ]
    return UserError("no Plan of the space can be run\n" + "\n".join(shown), op="autotune")


def _runner(
    executable: Any, buffers: Sequence[Any], symbols: Mapping[str, int], device: str
) -> Callable[[], Any]:
    """A run to its end: on a GPU, until the device is done."""
    if device == HOST:
        return lambda: executable.run(list(buffers), symbols)
    from ..runtime.device import device as opened

    def run() -> None:
        executable.run(list(buffers), symbols)
        opened(device).synchronize()

    return run


def _programs(inputs: Sequence[Node], outputs: Sequence[Node], target: Target) -> Any:
    """What a Graph compiles to: equal for Plans that make no difference here."""
    recipe, _ = recipe_of(schedule_for(inputs, outputs, target), target)
    return tuple(sorted(key for _, key, *_ in recipe.programs)), tuple(
        (s.kind, str(s.grid)) for s in recipe.steps
    )


def measure(run: Callable[[], Any], budget_ms: float) -> float:
    """The least milliseconds of a run, tried within a budget (once to warm up)."""
    run()
    best, spent = float("inf"), 0.0
    for _ in range(TRIES):
        start = time.perf_counter()
        run()
        took = 1e3 * (time.perf_counter() - start)
        best, spent = min(best, took), spent + took
        if spent >= budget_ms:
            break
    return best

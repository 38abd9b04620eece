"""A random program in torch and in tilegrad: values, dtypes and gradients side by side.

torch runs it twice: as declared, and with float64 for every float. What the two differ by is what
rounding does to this program; tilegrad may be off by some of that, and by a few units in the last
place of the least precise float that it names. What float64 itself is off by is found with a third
run, in float32: both grow alike. Where rounding decides the result (the two differ by much),
nothing is compared. What differs is compared again with torch at arguments that are almost the
same: who wins of two equal values (a maximum's derivative) is decided by rounding too, so what is
right there, or lies between, is no find. What a softmax is off by where its derivative is that of
attention (its two terms are summed apart, in another order each, so they cancel to rounding alone)
is found with a further run, and counts as what rounding does. Integers and bools are equal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from random_programs import Every, Program

EPSILON = {"float64": 2.2e-16, "float32": 1.2e-7, "float16": 9.8e-4, "bfloat16": 7.8e-3}
TIMES, UNITS = 30.0, 60.0
MOVES, MOVED = 8, 1e-5  # runs with arguments that are almost the same, and how far off they are
FINER = EPSILON["float64"] / EPSILON["float32"]
HOPELESS = 0.02  # of a result's size, by which float64 and the declared dtype differ


def weights(shape: Sequence[int]) -> np.ndarray:
    """What a result is multiplied by in the sum that is differentiated."""
    count = int(np.prod(shape)) if len(shape) else 1
    return (0.5 + 0.5 * np.sin(np.arange(count) * 1.7 + 0.3)).reshape(tuple(shape))


class SummedApart(torch.autograd.Function):
    """softmax whose derivative p * (dp - sum(p * dp)) has a sum that was rounded elsewhere."""

    @staticmethod
    def forward(context: Any, scores: torch.Tensor, dim: int) -> torch.Tensor:
        """The weights."""
        p = torch.softmax(scores, dim)
        context.save_for_backward(p)
        context.dim = dim
        return p

    @staticmethod
    def backward(context: Any, *given: Any) -> Any:
        """The gradient of scores."""
        (p,), (dp,) = context.saved_tensors, given
        whole = (p * dp).sum(context.dim, keepdim=True)
        return p * (dp - whole * (1 + torch.finfo(p.dtype).eps)), None


class Apart:
    """torch, or its functions, with that softmax."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def softmax(self, scores: torch.Tensor, dim: int) -> torch.Tensor:
        """As attention has it."""
        return SummedApart.apply(scores, dim)


def in_torch(
    program: Program, every: Every | None = None, apart: bool = False
) -> tuple[list[Any], list[Any]]:
    """Results, and gradients of the float leaves (None where there is none)."""
    modules = [torch if every is None else every, torch.nn.functional]
    with contextlib.nullcontext() if every is None else every.default():
        return run_in_torch(program, [Apart(m) if apart else m for m in modules], every)


def run_in_torch(
    program: Program, modules: Sequence[Any], every: Every | None
) -> tuple[list[Any], list[Any]]:
    """The same, with what a quotient of integers is set already."""
    leaves = [leaf.torch(every) for leaf in program.leaves]
    floats = [x.requires_grad_() for x, leaf in zip(leaves, program.leaves) if leaf.is_float]
    known = program.run(*modules, leaves)
    results = [known[name] for name in program.outputs]
    parts = [
        (r.double() * torch.from_numpy(weights(r.shape))).sum()
        for r in results
        if r.is_floating_point() and r.requires_grad
    ]
    if not parts or not floats:
        return results, [None] * len(floats)
    grads = torch.autograd.grad(sum(parts), floats, allow_unused=True)
    return results, list(grads)


def in_tilegrad(program: Program, way: str) -> tuple[list[Any], list[Any]]:
    """The same here: 'lazy' reads at the end, 'steps' computes each line, 'jit' compiles all."""
    import tilegrad as tg

    arrays = [tg.tensor(leaf.values, dtype=getattr(tg, leaf.dtype)) for leaf in program.leaves]
    at = [i for i, leaf in enumerate(program.leaves) if leaf.is_float]

    def total(results: Sequence[Any]) -> Any:
        parts = [
            (r.to(tg.float64) * tg.tensor(weights(r.shape))).sum()
            for r in results
            if r.dtype.is_float
        ]
        return sum(parts) if parts else None

    def run(*leaves: Any) -> list[Any]:
        known = program.run(tg, tg.nn.functional, leaves)
        return [known[name] for name in program.outputs]

    if way == "jit":
        results = tg.jit(lambda *leaves: run(*leaves))(*arrays)
        if not at or not any(r.dtype.is_float for r in results):
            return list(results), [None] * len(at)
        derived = tg.jit(tg.grad(lambda *leaves: total(run(*leaves)), argnums=tuple(at)))
        return list(results), list(derived(*arrays))
    leaves = [a.requires_grad_() if i in at else a for i, a in enumerate(arrays)]
    if way == "steps":
        known: dict[str, Any] = {"m": tg, "F": tg.nn.functional}
        known.update((x.name, value) for x, value in zip(program.leaves, leaves))
        for line in program.lines:
            exec(line, known)
            known[line.split(" ")[0]].realize()
        results = [known[name] for name in program.outputs]
    else:
        results = run(*leaves)
    sum_ = total([r for r in results if r.requires_grad])
    if sum_ is not None and sum_.requires_grad:
        sum_.backward()
    return results, [leaves[i].grad for i in at]


def moved(program: Program, number: int) -> Program:
    """The same with floats that are a little off, up or down."""
    draw = np.random.default_rng(number)
    leaves = []
    for leaf in program.leaves:
        values = leaf.values
        if leaf.is_float:
            by = max(MOVED, EPSILON[leaf.dtype]) * draw.choice((-1.0, 1.0), values.shape)
            values = np.asarray(values * (1 + by))  # a scalar stays an array
        leaves.append(replace(leaf, values=values))
    return Program(leaves, program.lines, program.outputs)


def compare_with_torch(program: Program, way: str) -> str:
    """How tilegrad's results or gradients are wrong; '' where they are right."""
    if not program.lines:
        return ""
    found = compared(program, way, ())
    if "allowed" not in found:
        return found
    near = [in_torch(moved(program, i)) for i in range(MOVES)]
    return compared(program, way, [[*results, *grads] for results, grads in near])


def compared(program: Program, way: str, near: Sequence[Sequence[Any]]) -> str:
    """The same; `near` are results and gradients of arguments that are almost these."""
    low, low_grads = in_torch(program)
    apart = in_torch(program, apart=True)[1] if near else low_grads
    high, high_grads = in_torch(program, Every("float64"))
    if "float64" in program.floats:
        coarse, coarse_grads = in_torch(program, Every("float32"))
    else:
        coarse, coarse_grads = high, high_grads
    ours, our_grads = in_tilegrad(program, way)
    unit = max(EPSILON[d] for d in [*program.floats, "float64"])
    if "float32" not in program.floats and "bool" not in program.floats:
        unit = max(unit, EPSILON["float32"] if needs_float32(low) else 0.0)
    least = 0.1 * max([size_of(x) for x in [*high, *high_grads]])  # what cancels is off by it
    columns: Any = zip(program.outputs, ours, low, high, coarse)
    for i, (name, mine, theirs, best, rough) in enumerate(columns):
        found = difference(mine, theirs, best, rough, [n[i] for n in near], unit, least)
        if found:
            return f"value: {name} {found}"
    floats = [leaf for leaf in program.leaves if leaf.is_float]
    columns = zip(floats, our_grads, low_grads, high_grads, coarse_grads)
    for i, (leaf, mine, theirs, best, rough) in enumerate(columns, len(low)):
        if theirs is None:
            if mine is not None and np.any(np.asarray(mine.to("float64").numpy()) != 0):
                return f"gradient: of {leaf.name} should be none or zero"
            continue
        if mine is None:
            if bool((theirs != 0).any()):
                return f"gradient: of {leaf.name} is missing"
            continue
        loose, others = apart[i - len(low)], [n[i] for n in near]
        found = difference(mine, theirs, best, rough, others, unit, least, loose)
        if found:
            return f"gradient: of {leaf.name} {found}"
    return ""


def needs_float32(results: Sequence[Any]) -> bool:
    """Whether any result is a float32 that no leaf and no line names."""
    return any(r.dtype == torch.float32 for r in results)


def size_of(value: torch.Tensor | None) -> float:
    """The largest finite element of a float."""
    if value is None or not value.is_floating_point():
        return 0.0
    finite = value.detach()[torch.isfinite(value)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def difference(
    mine: Any,
    theirs: torch.Tensor,
    best: torch.Tensor,
    rough: torch.Tensor,
    near: Sequence[torch.Tensor],
    unit: float,
    least: float,
    loose: torch.Tensor | None = None,
) -> str:
    """How a value differs from torch's, and from its `near` ones, of almost the same arguments; a
    `loose` one is off by what rounding does as well."""
    if str(mine.dtype) != str(theirs.dtype).removeprefix("torch."):
        return f"is {mine.dtype}, torch has {theirs.dtype}"
    if tuple(mine.shape) != tuple(theirs.shape):
        return f"has shape {tuple(mine.shape)}, torch {tuple(theirs.shape)}"
    theirs, best = theirs.detach(), best.detach()
    if not theirs.is_floating_point():
        got, want = mine.numpy(), theirs.numpy()
        wrong = int((got != want).sum())
        return f"has {wrong} wrong of {want.size}" if wrong else ""
    got = np.asarray(mine.to("float64").numpy())
    want, exact = theirs.double().numpy(), best.double().numpy()
    if not want.size:
        return ""
    usual = np.isfinite(want) & np.isfinite(exact)
    if not usual.all():
        same = (np.isnan(want) == np.isnan(exact)) & (np.isinf(want) == np.isinf(exact))
        odd = ~usual & same
        agree = (np.isnan(got) == np.isnan(want)) & (np.isinf(got) == np.isinf(want))
        if not agree[odd].all():
            return "differs in nan or inf"
    if not usual.any():
        return ""
    size = max(float(np.abs(exact[usual]).max()), least)
    also = want if loose is None else loose.detach().double().numpy()
    own = float(np.fmax(np.abs(want - exact), np.abs(also - exact))[usual].max())
    if own > HOPELESS * size and own > 1e-12:
        return ""
    apart = np.abs(rough.detach().double().numpy() - exact)[usual]
    own = max(own, FINER * float(np.nanmax(apart, initial=0.0, where=np.isfinite(apart))))
    allowed = TIMES * own + UNITS * unit * size + 1e-30
    with np.errstate(all="ignore"):
        off = np.abs(got - exact)
    off = np.where(usual, off, 0.0)
    if near:
        others = np.stack([want, *(other.detach().double().numpy() for other in near)])
        with np.errstate(all="ignore"):
            beside = (np.abs(others - got) <= off / 4).any(0)
            between = (others.min(0) <= got) & (got <= others.max(0))  # of both sides of a kink
        off = np.where(beside | between, 0.0, off)
    if bool((off <= allowed).all()):
        return ""
    at = np.unravel_index(int(np.nanargmax(np.where(np.isnan(off), np.inf, off))), off.shape)
    return (
        f"is {got[at]} at {tuple(map(int, at))}, torch has {want[at]}, exact is {exact[at]}"
        f" (allowed {allowed:.2g}, size {size:.3g})"
    )


def compiled_for_gpus(program: Program, names: Sequence[str]) -> str:
    """How a program's Graphs fail for GPUs: scheduled, emitted, assembled, simulated."""
    from recorded import recording, run_case

    from tilegrad.core.target import A100, H200

    with recording() as recorder:
        results, grads = in_tilegrad(program, "lazy")
        for value in [*results, *(g for g in grads if g is not None)]:
            value.realize()
    for name in names:
        target = {"sm_80": A100, "sm_90a": H200}[name]
        for case in recorder.cases.values():
            try:
                run_case(case, target)
            except Exception as failure:
                lines = [w.strip() for w in str(failure).splitlines() if w.strip()]
                said = " ".join(lines[:4])[:300]
                return f"{name} {type(failure).__name__}: {said} [{str(case)[:200]}]"
    return ""

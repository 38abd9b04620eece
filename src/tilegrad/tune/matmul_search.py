"""Tune the library's matmul: measure Plans around the model's choice, keep the best of each size.

For each problem the model's best Plans are measured, then the neighbours of the fastest so far,
until none is faster or the problem's share of the budget is spent; the fastest are measured once
more, in turns with the model's choice, which stays unless another is clearly faster. Trials run
in one worker process that is killed and started anew when a Plan hangs or faults.
Invariant: the order of Trials depends on the problems and on what was measured alone; the model's
choice is always measured, whatever the budget; what the log of Trials knows is not run again.
"""

from __future__ import annotations

import datetime
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.config import adopt, config, usable_cores
from ..core.dtype import DType, bfloat16, dtype_of, float16, float32
from ..core.errors import TilegradError, UserError
from ..core.target import Target
from ..kernels.matmul.plan import transposed
from ..kernels.matmul.shape import Operands
from ..kernels.matmul.table import machine_name, plain_operands, problem_key, to_record
from ..kernels.matmul.wide import WideMatmul
from ..kernels.plan_table import Entry, PlanTable, Trial
from ..runtime.device import device_name
from ..runtime.store import content_key
from ..targets.ptx.assemble import assemble, find_ptxas
from ..targets.ptx.context import devices
from ..targets.ptx.emit import emit
from ..targets.ptx.target import target_of
from ..tile.build import BodyBuilder
from .measure import Code, Product, Timing, measure, open_gpu
from .space import Candidate, first_candidates, neighbours
from .trials import TrialLog
from .worker import Worker

DTYPES = (bfloat16, float16, float32)
FINALISTS, FINAL_ROUNDS = 3, 11
OPEN_SECONDS = 120.0
CLEARLY = 0.995  # of the model's choice's seconds, that another Plan must stay under

Shape = tuple[int, int, int]  # m, n, k


@dataclass(frozen=True)
class Machine:
    """The GPU that is tuned for: what it is, and its number."""

    target: Target
    name: str
    arch: str
    number: int = 0


@dataclass(frozen=True)
class Result:
    """What came of a problem: its best Plan, its seconds and those of the model's choice."""

    product: Product
    key: str
    entry: Entry
    untuned_seconds: float | None
    trials: int  # Plans looked at
    measured: int  # of those, measured now and not known from before


@dataclass(frozen=True)
class Progress:
    """Where a search stands: the problem, of how many, and its Trial that ended last."""

    number: int
    of: int
    product: Product
    trial: Trial | None = None
    result: Result | None = None


@dataclass
class Ready:
    """A candidate on its way: its code, or why there is none."""

    candidate: Candidate
    text: str = ""  # the hash of its text
    code: Code | None = None
    note: str = ""


@dataclass
class Settings:
    """How a search is run; tests put functions of their own in."""

    budget: float = 60.0  # seconds of all problems together
    limit: float = 30.0  # seconds of one Trial
    count: int = 8  # Plans of the model's ranking
    rounds: int = 5
    run: Callable[..., list[Timing]] = measure  # a function that a fresh process can import
    report: Callable[[Progress], None] = lambda _: None
    clock: Callable[[], float] = time.perf_counter
    worker: Worker = field(default_factory=lambda: Worker())


def matmul(
    shapes: Sequence[Shape],
    dtype: Any = bfloat16,
    device: str = "cuda:0",
    budget: float = 60.0,
    *,
    layout: str = "kk",
    table: PlanTable | None = None,
    trials: Path | None = None,
    commit: str = "",
    report: Callable[[Progress], None] | None = None,
) -> list[Result]:
    """Tune products of (m, n, k) on a GPU and keep the best Plans in a PlanTable (that of the
    cache folder by default); `budget` is in seconds, for all of them together."""
    products = [product_of(shape, dtype, layout) for shape in shapes]
    machine = machine_of(device)
    table = PlanTable(None) if table is None else table
    if trials is None and config().cache_folder:
        trials = Path(config().cache_folder).expanduser() / "plans" / "trials.jsonl"
    log = TrialLog(trials, origin_of(machine, commit))
    settings = Settings(budget=budget, report=report or (lambda _: None))
    with settings.worker as worker:
        opened = worker.run(open_gpu, machine.number, seconds=OPEN_SECONDS)
        if not opened.good:
            raise UserError("the GPU cannot be opened", op="tune", got=opened.error)
        return list(Search(machine, settings, log, table).run(products))


def product_of(shape: Shape, dtype: Any, layout: str = "kk") -> Product:
    """A problem to tune, checked."""
    kind: DType = dtype_of(dtype)
    if kind not in DTYPES:
        raise UserError(
            "no wide matmul of this dtype",
            op="tune",
            expected=", ".join(d.name for d in DTYPES),
            got=kind,
        )
    if len(shape) != 3 or not all(isinstance(s, int) and s > 0 for s in shape):
        raise UserError("bad shape", op="tune", expected="(m, n, k), all above 0", got=shape)
    m, n, k = shape
    plain_operands(m, n, k, kind, layout)
    dense = {"a": k if layout[0] == "k" else m, "b": k if layout[1] == "k" else n, "result": n}
    for name, size in dense.items():
        if size * kind.size % 16:
            raise UserError(
                "rows that the wide matmul cannot copy",
                op="tune",
                expected="rows of a multiple of 16 bytes",
                got=f"{size * kind.size} bytes in a row of {name}",
            )
    return Product(m, n, k, kind.name, layout)


def machine_of(device: str) -> Machine:
    """The GPU called `device`, not opened; UserError where there is none."""
    found = {f"cuda:{one['number']}": one for one in devices()}
    facts = found.get(device_name(device))
    if facts is None:
        raise UserError(
            "no such GPU" if found else "there is no GPU here",
            op="tune",
            expected=f"cuda:0 to cuda:{len(found) - 1}"
            if found
            else "a machine with an NVIDIA GPU and its driver",
            got=device,
            hint="`tilegrad doctor` shows what this machine has",
        )
    major, minor = facts["compute_capability_major"], facts["compute_capability_minor"]
    target = target_of(facts)
    if not target.asynchronous_units:
        raise UserError(
            "this GPU does not run the wide matmul",
            op="tune",
            expected="compute capability 9.0",
            got=f"{major}.{minor}",
        )
    return Machine(target, facts["name"], f"sm_{major}{minor}a", facts["number"])


def origin_of(machine: Machine, commit: str = "") -> dict[str, str]:
    """Where measurements come from: device, date and commit."""
    return {
        "device": machine.name,
        "date": datetime.date.today().isoformat(),
        "commit": commit or _commit(),
    }


def _commit() -> str:
    here = Path(__file__).resolve().parent
    command = ["git", "describe", "--always", "--dirty=+"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, cwd=here, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    return said.stdout.strip() if said.returncode == 0 else ""


class Search:
    """A search over several problems with one worker."""

    def __init__(
        self, machine: Machine, settings: Settings, log: TrialLog, table: PlanTable
    ) -> None:
        self.machine, self.settings, self.log, self.table = machine, settings, log, table
        self.target = machine.target
        self.measured = 0

    def run(self, products: Sequence[Product]) -> Iterable[Result]:
        """Tune the problems one by one; each Result is in the table before the next begins."""
        settings = self.settings
        end = settings.clock() + settings.budget
        workers = max(1, usable_cores() - 1)
        with ThreadPoolExecutor(workers, initializer=adopt, initargs=(config(),)) as pool:
            self.pool = pool
            ahead = [self.prepare(p, self.first(p)) for p in products[:1]]
            try:
                for number, product in enumerate(products):
                    ahead += [self.prepare(p, self.first(p)) for p in products[number + 1 :][:1]]
                    now = settings.clock()
                    share = max(0.0, end - now) / (len(products) - number)
                    self.place = (number, len(products), product)
                    result = self.tune(product, ahead[number], now + share)
                    if result is not None:
                        self.table.put(result.key, result.entry)
                        settings.report(Progress(*self.place, result=result))
                        yield result
            finally:
                pool.shutdown(cancel_futures=True)

    def first(self, product: Product) -> list[Candidate]:
        """The Plans that are measured first, the model's choice at their head."""
        found = first_candidates(product.operands, self.target, self.settings.count)
        if not found:
            raise UserError("the wide matmul has no Plan for this product", op="tune", got=product)
        return found

    # ---- one problem ----------------------------------------------------------------------

    def tune(self, product: Product, first: list[Future[Ready]], end: float) -> Result | None:
        """Measure the first Plans, then neighbours of the fastest while that is worth it."""
        x, before = product.operands, self.measured
        tried: dict[Candidate, tuple[Ready, Trial]] = {}
        expanded: set[Candidate] = set()
        wave = first
        while wave:
            for number, future in enumerate(wave):
                if (tried or number) and self.settings.clock() >= end:
                    break
                self.attempt(product, future.result(), tried)
            best = fastest(tried)
            if not best or best[0] in expanded or self.settings.clock() >= end:
                break
            expanded.add(best[0])
            fresh = [c for c in neighbours(x, best[0], self.target) if c not in tried]
            wave = self.prepare(product, fresh)
        return self.conclude(product, tried, self.measured - before)

    def prepare(self, product: Product, candidates: Sequence[Candidate]) -> list[Future[Ready]]:
        """Candidates built and assembled in other threads."""
        return [self.pool.submit(self.built, product.operands, c) for c in candidates]

    def built(self, x: Operands, candidate: Candidate) -> Ready:
        """The code of a candidate; a kernel that spills is not one."""
        plan, turned = candidate
        ready = Ready(candidate)
        try:
            own = transposed(x) if turned else x
            b = BodyBuilder("wide_matmul", own.parameters)
            body = WideMatmul(own, plan, b, b.parameters, lambda piece, where: piece).build()
            text, entry = emit(body, "matmul", self.target)
            ready.text = content_key(text)[:16]
            code = text.encode()
            if find_ptxas() is not None:
                made = assemble(text, self.machine.arch)
                made.check_library("matmul")
                code = made.cubin
            ready.code = Code(code, entry.to_text(), turned)
        except TilegradError as error:
            ready.note = str(error).splitlines()[0][:300]
        return ready

    def attempt(self, product: Product, ready: Ready, tried: dict[Candidate, Any]) -> None:
        """Measure a candidate, unless the log knows it."""
        record = to_record(*ready.candidate)
        key = self.key(product)
        known = self.log.get(key, ready.text) if ready.text else None
        if known is not None:
            trial = Trial(record, known.seconds, known.note)
        elif ready.code is None:
            trial = Trial(record, None, ready.note)
        else:
            (timing,), note = self.timed(product, [ready.code], self.settings.rounds)
            trial = Trial(record, timing.seconds, note)
            self.measured += 1
            self.log.add(key, ready.text, trial, error=timing.error)
        tried[ready.candidate] = (ready, trial)
        self.settings.report(Progress(*self.place, trial=trial))

    def timed(self, product: Product, codes: list[Code], rounds: int) -> tuple[list[Timing], str]:
        """Timings from the worker; without seconds, and a note, where it fails."""
        s = self.settings
        outcome = s.worker.run(s.run, product, codes, self.machine.number, rounds, seconds=s.limit)
        if not outcome.good:
            return [Timing(None, -1.0)] * len(codes), f"{outcome.kind}: {outcome.error}"[:300]
        wrong = [t for t in outcome.value if t.seconds is None]
        return outcome.value, f"wrong: error {wrong[0].error:.1e}" if wrong else ""

    def conclude(
        self, product: Product, tried: dict[Candidate, tuple[Ready, Trial]], measured: int
    ) -> Result | None:
        """The fastest of a last comparison; None where no Plan ran."""
        best = fastest(tried)[:FINALISTS]
        if not best:
            return None
        choice = next(iter(tried))  # the model's
        seconds = {c: tried[c][1].seconds for c in best}
        if choice not in best and tried[choice][1].seconds is not None:
            best.append(choice)
        known = self.table.get(self.key(product))
        if not measured and known is not None:
            untuned = known.origin.get("untuned_seconds")
            return Result(product, self.key(product), known, untuned, len(tried), 0)
        ready = [c for c in (tried[c][0].code for c in best) if c is not None]
        if len(best) > 1 and len(ready) == len(best):
            timings, _ = self.timed(product, ready, FINAL_ROUNDS)
            if all(t.seconds is not None for t in timings):
                seconds = {c: t.seconds for c, t in zip(best, timings)}
        untuned = seconds.get(choice, tried[choice][1].seconds)
        winner = min(seconds, key=lambda c: seconds[c] or 0.0)
        if untuned is not None and (seconds[winner] or 0.0) > CLEARLY * untuned:
            winner = choice
        taken = untuned if winner == choice else seconds[winner]
        origin = {**self.log.origin, "untuned_seconds": untuned}
        entry = Entry(to_record(*winner), taken, origin)
        return Result(product, self.key(product), entry, untuned, len(tried), measured)

    def key(self, product: Product) -> str:
        """The problem's key in a PlanTable."""
        return problem_key(product.operands, machine_name(self.target))


def fastest(tried: dict[Candidate, tuple[Ready, Trial]]) -> list[Candidate]:
    """Candidates with seconds, the fastest first."""
    timed = [
        (trial.seconds, number, c)
        for number, (c, (_, trial)) in enumerate(tried.items())
        if trial.seconds is not None
    ]
    return [c for _, _, c in sorted(timed, key=lambda row: row[:2])]


__all__ = ["Progress", "Result", "matmul"]

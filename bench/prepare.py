"""What it costs to compile all steps of an engine for an H200 that need not be here, by phase.

    python bench/prepare.py                       the Llama-3-8B shape, an empty cache
    python bench/prepare.py --layers 8            fewer layers: programs are the same ones
    python bench/prepare.py --profile             cProfile of the Python work

`Engine.prepare` runs as on a GPU, on a Device that has memory and launches in name only; what is
compiled, assembled and stored is what a GPU would load. What the driver does (loading machine code,
tensor maps, graphs) is not in it. Seconds are those of the processor, so that a busy machine shows
little; those of ptxas are of its processes. Nothing is compiled ahead in worker processes, whatever
the number of cores: what they do could not be told apart here.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import itertools
import json
import os
import pstats
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shapes import SHAPES

from tilegrad.compiler import ahead, breaks, compile, flatten, pipeline
from tilegrad.core.config import override
from tilegrad.core.target import H200
from tilegrad.generate.engine import Engine
from tilegrad.models.decoder.config import DecoderConfig
from tilegrad.models.decoder.model import Decoder
from tilegrad.runtime.buffer import Buffer
from tilegrad.runtime.device import KINDS, Device
from tilegrad.runtime.launcher import Launcher
from tilegrad.runtime.recipe import Recipe
from tilegrad.targets.ptx import assemble, language
from tilegrad.tensor.bound import Bound
from tilegrad.tensor.jit import Jitted

CONTEXT = 8192


class Absent(Device):
    """An H200 in name: addresses without memory, launches that do nothing."""

    alignment = 16
    target = H200
    arch = H200.cpu

    def __init__(self) -> None:
        super().__init__("cuda:0")
        self.next = itertools.count(1 << 40, 1 << 36)
        self.code: dict[str, bytes] = {}

    def allocate(self, bytes: int, label: str = "") -> Buffer:
        """An address of its own."""
        return Buffer(next(self.next), bytes, object(), self.name, label=label)

    def put(self, pointer: int, source: int, bytes: int) -> None:
        """Nothing."""

    def copy_bytes(self, target: int, source: int, bytes: int) -> None:
        """Nothing."""

    def memory_info(self) -> tuple[int, int]:
        """As many bytes as an H200 has."""
        return 139 << 30, 139 << 30

    def loaded(self, key: str) -> Any:
        """Code that was kept."""
        return self.code.get(key)

    def keep(self, key: str, code: bytes) -> Any:
        """The code itself."""
        return self.code.setdefault(key, code)

    def prepare(self, code: Any, name: str, entry: str, symbols: Mapping[str, int]) -> Any:
        """A launch of nothing."""
        return Nothing()

    def launcher(self, recipe: Recipe, code: Mapping[str, Any]) -> Launcher:
        """What runs no steps."""
        return Idle(recipe, code, self)


class Nothing:
    """A launch that does nothing."""

    empty = True

    def launch(self, pointers: Any) -> None:
        """Nothing."""


class Idle(Launcher):
    """Runs nothing."""

    def launch(self, steps: Any) -> None:
        """Nothing."""


class Kind:
    """One of them."""

    def __init__(self) -> None:
        self.one = Absent()

    def count(self) -> int:
        """One."""
        return 1

    def open(self, number: int) -> Device:
        """It."""
        return self.one


class Phases:
    """Processor seconds of this thread by phase; a phase within another counts for itself alone."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.open: list[str] = []
        self.since = time.thread_time()

    def switch(self) -> None:
        """What passed since the last switch is of the phase that is open."""
        now = time.thread_time()
        self.seconds[self.open[-1] if self.open else "other"] += now - self.since
        self.since = now

    def watch(self, owner: Any, name: str, phase: str) -> None:
        """Count a function for a phase."""
        plain = getattr(owner, name)

        @functools.wraps(plain)
        def watched(*given: Any, **named: Any) -> Any:
            self.switch()
            self.open.append(phase)
            self.calls[phase] += 1
            try:
                return plain(*given, **named)
            finally:
                self.switch()
                self.open.pop()

        setattr(owner, name, watched)


def watched() -> Phases:
    """The phases of a compile."""
    phases = Phases()
    phases.watch(Jitted, "_trace", "trace")
    phases.watch(breaks, "breaks_of", "breakpoints")
    phases.watch(compile, "structure", "hash the Graph")
    phases.watch(compile, "digest", "hash the Graph")
    phases.watch(pipeline, "run_pipeline", "passes over the Graph")
    phases.watch(pipeline, "lowered", "Regions, Bodies, memory")
    phases.watch(flatten, "recipe_and_texts", "flatten")
    phases.watch(flatten, "program_text", "emit")
    phases.watch(compile, "_compile_all", "wait for ptxas")
    phases.watch(compile, "bind", "make the Executable")
    phases.watch(Recipe, "to_text", "store the Recipe")
    phases.watch(Bound, "__init__", "bind Buffers")
    return phases


def children() -> float:
    """Processor seconds of processes that were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Prepare an engine; what it cost."""
    shape = dict(SHAPES[options.shape])
    if options.layers:
        shape["num_hidden_layers"] = options.layers
    model = Decoder(DecoderConfig.from_huggingface(shape), "bfloat16").to(device="cuda:0")
    for parameter in model.parameters():
        parameter.realize()
    engine = Engine(
        model,
        device="cuda:0",
        requests=options.requests,
        context=CONTEXT,
        pages=8192,
        chunk=options.chunk,
    )
    if not options.ptxas:
        language.find_ptxas = lambda: None  # the text is the code, as where no ptxas is
    ran: list[float] = []
    plain = assemble._run

    def counted(*given: Any) -> Any:
        began = time.perf_counter()
        made = plain(*given)
        ran.append(time.perf_counter() - began)
        return made

    assemble._run = counted
    ahead.compile_ahead = lambda graphs: 0  # workers would do what is measured here
    phases, profile = watched(), cProfile.Profile()
    counts, ptxas = dict(compile.counters), children()
    began, own = time.perf_counter(), time.process_time()
    if options.profile:
        profile.runcall(engine.prepare)
    else:
        engine.prepare()
    phases.switch()
    wall, own, ptxas = time.perf_counter() - began, time.process_time() - own, children() - ptxas
    if options.profile:
        stats = pstats.Stats(profile)
        stats.sort_stats("cumtime").print_stats(options.lines)
        stats.sort_stats("tottime").print_stats(options.lines)
    return {
        "wall_s": wall,
        "python_s": own,
        "ptxas_s": ptxas,
        "ptxas_calls": len(ran),
        "compiled": compile.counters["compiled"] - counts["compiled"],
        "programs": compile.counters["programs"] - counts["programs"],
        "phases": {n: (s, phases.calls[n]) for n, s in phases.seconds.most_common()},
    }


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3-8b")
    parser.add_argument("--layers", type=int, default=0, help="fewer layers than the shape has")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a step, at most")
    parser.add_argument("--no-ptxas", dest="ptxas", action="store_false", help="Python alone")
    parser.add_argument("--profile", action="store_true", help="by function")
    parser.add_argument("--lines", type=int, default=60, help="of the profile")
    parser.add_argument("--cache", default="", help="a folder; else an empty one")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        KINDS.replaced("cuda", Kind()),
        override(cache_folder=options.cache or folder),
    ):
        found = measure(options)
    print(
        f"{found['wall_s']:.1f} s: Python {found['python_s']:.1f}, ptxas {found['ptxas_s']:.1f} "
        f"in {found['ptxas_calls']} calls; {found['compiled']} Executables compiled, "
        f"{found['programs']} programs"
    )
    for name, (seconds, calls) in found["phases"].items():
        print(f"  {name:<26} {seconds:7.2f} s {calls:7d} calls")
    if options.out:
        about = {"commit": os.environ.get("TILEGRAD_COMMIT", ""), **vars(options)}
        Path(options.out).write_text(json.dumps({**about, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

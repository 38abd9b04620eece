"""Graphs compiled ahead of their first run, side by side in processes of their own.

Passes are Python: one process compiles one Graph at a time. `compile_ahead` hands Graphs as text to
workers, which compile them and leave Recipes and object code in the Store; whoever asks for an
Executable finds it there. A worker opens no device: it has the facts of the Target alone.
Invariant: a worker stores a Recipe under the name that follows from what it read, and only where
its caller expects that name; what is not stored is compiled by who needs it.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..core.config import config, override, usable_cores
from ..core.target import from_text
from ..graph import build, ops
from ..ir.block import argument, pure_block
from ..ir.fingerprint import UserLine
from ..ir.node import topological
from ..ir.requirement import Requirement
from ..ir.rewrite import replace
from ..ir.text import parse_block, print_block
from ..runtime.device import device
from ..runtime.store import default_store
from ..schedule.outside import outside
from .compile import circumstances, recipe_name, store_recipe
from .loader import Wanted, is_told

LOG = logging.getLogger("tilegrad.compile")
LEAST_NODES = 500  # Nodes of a Graph from which on it is worth a worker
MOST_WORKERS = 12  # workers; each has some 200 MB
SETTINGS = (
    *("cache_folder", "cache_bytes", "plan_table"),
    *("checked", "determinism", "dots", "threads"),
)
START = f"import sys; sys.path[:] = sys.argv[1:]; from {__name__} import main; main()"


def compile_ahead(graphs: Iterable[Wanted]) -> int:
    """Compile those Graphs that the Store has not, in workers; how many they compiled.

    Graphs may come one by one: workers begin with the first. Where there are too few cores or
    threads for workers, or no Store, nothing is done, and `graphs` are not looked at. An error or
    an interrupt waits for the Graphs that are being compiled, not for those in the queue.
    """
    threads = min(usable_cores(), config().threads)
    count = min(MOST_WORKERS, threads, usable_cores() - 1)
    alone = is_told() or outside() or config().eager_debug
    if count < 2 or alone or not default_store().folder:
        return 0
    jobs: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    with ThreadPoolExecutor(count) as pool:
        serving: list[Future[int]] = []
        try:
            for wanted in graphs:
                job = job_of(wanted, threads // count)
                if job is not None:
                    jobs.put(job)
                    if len(serving) < count:
                        serving.append(pool.submit(_serve, jobs))
            for _ in serving:
                jobs.put(None)
            return sum(one.result() for one in serving)
        except BaseException:
            with suppress(queue.Empty):
                while True:
                    jobs.get_nowait()
            for _ in serving:
                jobs.put(None)
            raise


def job_of(wanted: Wanted, side: int = 1) -> dict[str, Any] | None:
    """What a worker must know of a Graph, as plain data; None where it is small, stored already or
    cannot be told. The worker assembles so many programs side by side."""
    nodes = topological(wanted.outputs)
    if len(nodes) < LEAST_NODES or build.Transfers.used or any(n.op is ops.call for n in nodes):
        return None
    machine = device(wanted.device)
    given = (wanted.donate, circumstances(wanted.device))
    graph = (wanted.inputs, wanted.outputs)
    lines: dict[UserLine, int] = {}
    name = recipe_name(*graph, given, wanted.requirements, machine.target, lines)
    if default_store().get(name) is not None:
        return None
    arguments = tuple([argument(f"in{i}", n.type) for i, n in enumerate(wanted.inputs)])
    results = replace(wanted.outputs, dict(zip(wanted.inputs, arguments)))
    settings = {field: getattr(config(), field) for field in SETTINGS}
    return {
        "name": name,
        "graph": print_block(
            pure_block("graph", arguments, tuple(results)), "graph", locations=True
        ),
        "donate": wanted.donate,
        "requirements": [r.to_text() for r in wanted.requirements],
        "device": wanted.device,
        "target": machine.target.to_text(),
        "arch": machine.arch,
        "settings": settings,
        "side": side,
    }


def _serve(jobs: queue.SimpleQueue[dict[str, Any] | None]) -> int:
    """Have one worker do jobs until there are no more; how many it did."""
    done = 0
    command = [sys.executable, "-c", START, *_module_folders()]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    try:
        with subprocess.Popen(command, **pipes) as worker:  # type: ignore[call-overload]
            while (job := jobs.get()) is not None:
                worker.stdin.write(json.dumps(job) + "\n")
                worker.stdin.flush()
                said = json.loads(worker.stdout.readline())  # nothing, where it ended
                if said:
                    LOG.warning("a Graph was not compiled ahead: %s", said)
                done += not said
    except (OSError, ValueError) as error:
        LOG.warning("a worker that compiles ahead ended: %s", error)
    return done


def _module_folders() -> list[str]:
    """Where a worker finds modules: where this process does, and this package. Relative ones are
    left out: files of the current folder may be anybody's."""
    found = [place for place in sys.path if isinstance(place, str) and os.path.isabs(place)]
    return [*found, str(Path(__file__).resolve().parents[2])]


def do(job: dict[str, Any]) -> None:
    """Compile what a job says, and store it."""
    block = parse_block(job["graph"])
    requirements = [Requirement.from_text(text) for text in job["requirements"]]
    graph = (tuple(block.arguments), tuple(block.results))
    wanted = Wanted(*graph, tuple(job["donate"]), job["device"], requirements)
    with override(**job["settings"]):
        store_recipe(wanted, from_text(job["target"]), job["arch"], job["name"], job["side"])


def main() -> None:
    """A worker: a job a line in, and for each a line out, '' or what went wrong."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        try:
            do(json.loads(line))
            said = ""
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        answers.write(json.dumps(said) + "\n")
        answers.flush()

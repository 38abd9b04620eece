"""The command `tilegrad tune matmul`: problems from the command line, progress, a table.

With `--out` the best Plans go to that one file, in the format of the tables that ship with the
package (kernels/data), after every problem, so that a run that is cut short keeps what it has;
without it they go to the cache folder, where compile finds them.
Invariant: what was measured before (the file of Trials) is not measured again.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core.errors import UserError
from ..kernels.plan_table import PlanTable, read_table, text_of, write_whole
from ..tune.matmul_search import Progress, Result, matmul

# (n, k) of the products in one block of a model: gate and up, and q, k and v, are one each
MODELS = {
    "llama3-8b": {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate+up": (28672, 4096),
        "down": (4096, 14336),
    },
    "llama3-70b": {
        "qkv": (10240, 8192),
        "o": (8192, 8192),
        "gate+up": (57344, 8192),
        "down": (8192, 28672),
    },
}
SIZES = (1, 8, 32, 64, 128, 256, 512, 2048, 8192)

Shape = tuple[int, int, int]


def shapes_of(shapes: list[str], models: list[str], sizes: str) -> list[Shape]:
    """(m, n, k) of everything that was asked for, each once."""
    found = [_shape(text) for text in shapes]
    counts = _sizes(sizes)
    for model in models:
        if model not in MODELS:
            raise UserError("unknown model", op="tune", expected=", ".join(MODELS), got=model)
        found += [(m, n, k) for n, k in MODELS[model].values() for m in counts]
    if not found:
        raise UserError("nothing to tune", op="tune", expected="--shape MxNxK or --layers MODEL")
    return list(dict.fromkeys(found))


def _shape(text: str) -> Shape:
    parts = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text.strip())
    if parts is None:
        raise UserError("bad shape", op="tune", expected="MxNxK, as 512x4096x4096", got=text)
    m, n, k = (int(p) for p in parts.groups())
    return m, n, k


def _sizes(text: str) -> list[int]:
    if not re.fullmatch(r"\d+(,\d+)*", text.strip()):
        raise UserError("bad sizes", op="tune", expected="rows as 1,8,512", got=text)
    return [int(part) for part in text.split(",")]


def run(
    shapes: list[Shape],
    dtype: str = "bfloat16",
    device: str = "cuda:0",
    budget: float = 60.0,
    layout: str = "kk",
    out: Path | None = None,
    trials: Path | None = None,
    commit: str = "",
    say: Callable[[str], Any] = print,
    advance: Callable[[str, int], Any] = lambda *_: None,
) -> list[Result]:
    """Tune and write the table; `say` gets lines of text, `advance` what is under way and how
    many problems are done."""
    table: PlanTable | None = None
    if out is not None:
        table = read_table(out) if out.exists() else PlanTable("")
        trials = trials or out.with_suffix(".trials.jsonl")

    def report(now: Progress) -> None:
        done = now.number + (now.result is not None)
        advance(str(now.product), done)
        if now.result is not None:
            say(line_of(now.result))
            if out is not None and table is not None:
                write_whole(out, text_of(table.known, about(now.result)))
        elif now.trial is not None and now.trial.seconds is None:
            say(f"{now.product}: {now.trial.note}")

    results = matmul(
        shapes,
        dtype,
        device,
        budget,
        layout=layout,
        table=table,
        trials=trials,
        commit=commit,
        report=report,
    )
    say(summary(results))
    say(f"{len(results)} Plans are in {'the cache folder' if out is None else out}")
    return results


def about(result: Result) -> dict[str, Any]:
    """What a table says of itself."""
    origin = {k: v for k, v in result.entry.origin.items() if k != "untuned_seconds"}
    return {"written by": "tilegrad tune matmul", **origin}


def line_of(result: Result) -> str:
    """One problem: its seconds, and how much was gained."""
    taken, before = result.entry.seconds or 0.0, result.untuned_seconds
    gain = f"{before / taken:.3f}x of untuned {1e6 * before:.1f} us" if before and taken else ""
    plan = result.entry.plan
    return (
        f"{result.product!s:28} {1e6 * taken:8.1f} us  {gain}  ({result.trials} Plans,"
        f" {result.measured} measured)  {'turned ' if plan['turned'] else ''}"
        f"{'x'.join(map(str, plan['tile']))} s{plan['stages']} p{plan['programs']}"
        f" g{plan['group']} c{plan['cluster']} a{plan['across']:d} k{plan['split']}"
        f" e{plan['early']:d} t{plan['together']} w{plan['staged']}"
    )


def summary(results: list[Result]) -> str:
    """The gain over all problems."""
    gains = [
        r.untuned_seconds / r.entry.seconds
        for r in results
        if r.untuned_seconds and r.entry.seconds
    ]
    if not gains:
        return "nothing was measured"
    mean = 1.0
    for gain in gains:
        mean *= gain ** (1 / len(gains))
    return f"tuned over untuned: geometric mean {mean:.3f}x, most {max(gains):.3f}x"

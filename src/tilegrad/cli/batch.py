"""`tilegrad batch`: a file of requests into a file of answers; run again, it goes on.

Invariant: Ctrl-C leaves whole lines and ends with status 130; a run with failed lines says how
many, and ends with status 1 only if none ended well.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from . import options
from .progress import Bars
from .serve import advised, found, need_packages
from .terminal import INTERRUPTED, status

Source = Annotated[
    Path,
    typer.Argument(
        metavar="IN",
        help="Requests, one a line: as OpenAI's batch files, or with just a prompt or messages.",
    ),
]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="Answers, one a line; gone on with.")]
Model = Annotated[
    str,
    typer.Option(
        "--model",
        show_default=False,
        help="smollm2, a .gguf file, a folder, or a Hugging Face id (owner/name).",
    ),
]
Requests = Annotated[int, typer.Option(min=1, help="Requests that run at once at most.")]
RetryErrors = Annotated[
    bool, typer.Option("--retry-errors", help="Ask again for lines that failed in an earlier run.")
]


def batch(
    source: Source,
    out: Out,
    model: Model,
    requests: Requests = 16,
    retry_errors: RetryErrors = False,
    context: options.Context = None,
    device: options.Device = None,
    dtype: options.DType = None,
    quantization: options.Quantization = None,
    kv_cache_dtype: options.KvCacheDType = None,
    threads: options.Threads = None,
    determinism: options.Determinism = None,
    lora: options.Loras = None,
) -> None:
    """Answer a file of requests: tilegrad batch in.jsonl out.jsonl --model smollm2"""
    need_packages()
    import asyncio

    from ..serve.batch.batch_run import Counts, run_batch
    from ..serve.batch.file import Answered
    from ..serve.settings import Settings

    counts, begun = Counts(), time.perf_counter()
    with Bars() as bars:
        answered = Answered(out, retry_errors)
        if answered.torn:
            bars.line(f"{out}: its last line was torn, and is asked for again")
        opening = options.given(
            device=device,
            dtype=dtype,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            threads=threads,
            context=context,
            requests=requests,
            determinism=determinism,
            prepare=False,  # nobody waits for a single answer
        )
        opening |= options.adapters(lora)
        path = found(model, bars)
        settings = Settings(path, model, opening=opening, sampling=advised(model))
        told = Progress(bars).tell
        try:
            work = run_batch(settings, source, answered, counts, tell=bars.stage, told=told)
            asyncio.run(work)
        except KeyboardInterrupt:
            bars.close()
            status(f"{summary(counts)}; the same command goes on from there")
            raise typer.Exit(INTERRUPTED) from None
    seconds = time.perf_counter() - begun
    status(f"{summary(counts)} in {seconds:.1f} s")
    if counts.failed and not counts.good:
        raise typer.Exit(1)


class Progress:
    """Says how far a batch is, with its rate."""

    def __init__(self, bars: Bars) -> None:
        self.bars, self.begun = bars, time.perf_counter()

    def tell(self, counts: Any) -> None:
        """Show some counts."""
        if not counts.good:
            self.begun = time.perf_counter()  # from the first answer on
        rate = counts.answer_tokens / max(time.perf_counter() - self.begun, 1e-9)
        note = f"{rate:.0f} tokens/s" if counts.good > 1 else ""
        self.bars.stage("requests", counts.done, counts.total, note)


def summary(counts: Any) -> str:
    """Counts as a person reads them."""
    parts = [f"{counts.good + counts.skipped} of {counts.total} answered"]
    parts += [f"{counts.skipped} by an earlier run"] * bool(counts.skipped)
    parts += [f"{counts.failed} failed"] * bool(counts.failed)
    if counts.good:
        parts.append(f"{counts.prompt_tokens:,} + {counts.answer_tokens:,} tokens")
    return ", ".join(parts)

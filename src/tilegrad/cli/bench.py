"""`tilegrad bench`: how fast a model reads a prompt and writes an answer here, against the memory.

A round adds requests of random tokens to the engine itself, so no text, template or stop token
gets in the way: the prompt is in when each request has its first token, and what follows is
decoding. Numbers are medians of rounds, after one that does not count (it compiles).
Invariant: the limit's rate is named with how it was come by, and measured in the same minute.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from ..core.errors import UserError
from ..core.place import check_place, folder_made
from ..serve.engine.roofline import BUSY, Others
from . import options
from .info import needs_of
from .opening import context_of, open_llm
from .progress import Bars
from .terminal import columns, put, size_text, status

ROWS = "quantised_take"  # the kernel that takes rows of packed weights
PAGED = "paged_attention"  # in names of kernels that read the cache
PromptTokens = Annotated[int, typer.Option("--prompt", min=1, help="Tokens of each prompt.")]
AnswerTokens = Annotated[int, typer.Option("--tokens", min=2, help="Tokens of each answer.")]
Requests = Annotated[int, typer.Option("--batch", min=1, help="Requests at once.")]
Repeats = Annotated[int, typer.Option(min=1, help="Rounds that count.")]
Trace = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        metavar="FILE",
        show_default=False,
        help="Write a trace of one decode step for ui.perfetto.dev; show a table of its kernels.",
    ),
]


def bench(
    model: options.Model,
    prompt: PromptTokens = 512,
    tokens: AnswerTokens = 128,
    batch: Requests = 1,
    repeats: Repeats = 5,
    device: options.Device = None,
    dtype: options.DType = None,
    quantization: options.Quantization = None,
    kv_cache_dtype: options.KvCacheDType = None,
    threads: options.Threads = None,
    context: options.Context = None,
    profile: Trace = None,
    as_json: options.Json = False,
) -> None:
    """Measure tokens a second of prompts and of answers, and the share of the memory's speed."""
    if profile is not None:
        check_place(profile, "bench")
    with Bars() as bars:
        chosen = options.given(device=device, dtype=dtype, threads=threads)
        chosen |= options.given(quantization=quantization, kv_cache_dtype=kv_cache_dtype)
        llm = open_llm(model, bars, requests=batch, context=context or prompt + tokens, **chosen)
        if prompt + tokens > context_of(llm):
            raise UserError(
                "prompt and answer are longer than the context",
                op="bench",
                expected=f"at most {context_of(llm)} tokens",
                got=f"{prompt} + {tokens}",
            )
        others = Others()
        rounds = measured(llm, prompt, tokens, batch, repeats, bars)
        busy = others.share() > BUSY
        traced = None if profile is None else profiled(llm, prompt, tokens, batch)
    result = summed_up(model, llm, rounds, prompt, tokens, batch)
    result["busy"] |= busy
    limit = result["limit_bytes_per_second"]
    if traced is not None and profile is not None:
        result["kernels"] = [asdict(row) for row in traced.table(limit)]
        save(traced, profile)
    if as_json:
        put(json.dumps(result))
        return
    put(columns(lines(result)))
    if traced is not None:
        put("\n" + traced.text(limit))
        status(f"the trace is in {profile}: ui.perfetto.dev shows it")


@dataclass(frozen=True)
class Round:
    """Seconds until every request had its first token, of the rest, and tokens of the rest."""

    prefill: float
    decode: float
    decoded: int
    steps: int


def measured(
    llm: Any, prompt: int, tokens: int, batch: int, repeats: int, bars: Bars
) -> list[Round]:
    """The rounds that count."""
    found = []
    for number in range(repeats + 1):
        bars.stage("measuring", number, repeats + 1)
        found.append(one_round(llm, prompt, tokens, batch, number))
    return found[1:]


def one_round(llm: Any, prompt: int, tokens: int, batch: int, number: int) -> Round:
    """Run requests of random tokens to their end."""
    engine = llm.engine
    waiting = set()
    for request in requests_of(llm, prompt, tokens, batch, number):
        engine.add(request)
        waiting.add(request.id)
    start = time.perf_counter()
    while waiting:
        waiting -= {made.id for made in stepped(engine)}
    middle = time.perf_counter()
    decoded = steps = 0
    while engine.busy:
        decoded += len(stepped(engine))
        steps += 1
    return Round(middle - start, time.perf_counter() - middle, decoded, steps)


def stepped(engine: Any) -> list[Any]:
    """What one step made; the error of a request that failed."""
    made: list[Any] = engine.step()
    for one in made:
        if one.error is not None:
            raise one.error
    return made


def requests_of(llm: Any, prompt: int, tokens: int, batch: int, number: int) -> list[Any]:
    """Requests of random tokens that nothing stops early."""
    from ..generate.request import Request

    random = np.random.default_rng(number + 1)
    most = llm.config.vocabulary
    return [
        Request(
            f"bench {number} {i}",
            tuple(random.integers(0, most, prompt).tolist()),
            max_tokens=tokens,
        )
        for i in range(batch)
    ]


def summed_up(
    model: str, llm: Any, rounds: list[Round], prompt: int, tokens: int, batch: int
) -> dict[str, Any]:
    """Rates of the rounds, and what the memory would allow."""
    from ..exchange.fetch import open_model
    from ..serve.engine.roofline import read_rate

    prefill = statistics.median(r.prefill for r in rounds)
    steps = [r for r in rounds if r.steps and r.decode > 0]
    step = statistics.median(r.decode / r.steps for r in steps) if steps else 0.0
    rate = statistics.median(r.decoded / r.decode for r in steps) if steps else 0.0
    kept = llm.engine.cache.keys[0].dtype
    needs = needs_of(llm.config, open_model(llm.path).tensors, llm.dtype, llm.device, kept)
    moved = needs.weights_a_token + batch * needs.cache_a_token * (prompt + tokens // 2)
    limit = read_rate(llm.device, moved, fresh=True)
    reached = moved / step if step else 0.0
    return {
        "model": model,
        "device": llm.device,
        "kv_cache_dtype": llm.kv_cache_dtype,
        "batch": batch,
        "prompt_tokens": prompt,
        "answer_tokens": tokens,
        "prefill_seconds": prefill,
        "prefill_tokens_per_second": batch * prompt / prefill,
        "step_seconds": step,
        "decode_tokens_per_second": rate,
        "bytes_per_step": moved,
        "bytes_per_second": reached,
        "limit_bytes_per_second": limit.bytes_per_second,
        "limit_how": limit.how,
        "busy": limit.busy,
        "share_of_limit": reached / limit.bytes_per_second if limit.bytes_per_second else 0.0,
        "launches_per_step": launches_of(llm, batch),
        "rounds": [asdict(r) for r in rounds],
    }


def launches_of(llm: Any, batch: int) -> int:
    """Kernels and copies of one decode step."""
    bound = llm.engine.steps.bound(batch)
    return 0 if bound is None else int(bound.launches)


# ---- one step, kernel by kernel --------------------------------------------------------------


def profiled(llm: Any, prompt: int, tokens: int, batch: int) -> Any:
    """The Profile of a decode step in the middle of answers."""
    engine = llm.engine
    made = requests_of(llm, prompt, tokens, batch, -1)
    waiting = {request.id for request in made}
    for request in made:
        engine.add(request)
    try:
        while waiting:
            waiting -= {one.id for one in stepped(engine)}
        stepped(engine)
        bound = engine.steps.bound(batch)
        # Shapes tell the bytes of the whole cache and of all rows of an embedding; a step reads
        # what is in it, and a row for each token.
        config = llm.config
        kept = engine.cache.keys[0].dtype.size
        cache = 2 * config.key_heads * config.head_width * kept * batch * (prompt + 2)
        return bound.profile(bytes={PAGED: cache, ROWS: 2 * batch * config.width * llm.dtype.size})
    finally:
        for request in made:
            engine.cancel(request.id)


def save(traced: Any, path: Path) -> None:
    """Write the trace."""
    with folder_made(path, "bench"):
        traced.save(path)


# ---- words -----------------------------------------------------------------------------------


def lines(result: dict[str, Any]) -> list[tuple[str, str]]:
    """A result as (word, text)."""
    return [
        (
            "prompt",
            f"{result['prefill_tokens_per_second']:.1f} tokens/s "
            f"({result['batch']} x {result['prompt_tokens']} tokens in "
            f"{result['prefill_seconds'] * 1e3:.1f} ms)",
        ),
        (
            "answer",
            f"{result['decode_tokens_per_second']:.1f} tokens/s "
            f"({result['step_seconds'] * 1e3:.2f} ms a step of {result['batch']})",
        ),
        (
            "memory",
            f"{size_text(result['bytes_per_second'])}/s: "
            f"{size_text(result['bytes_per_step'])} a step",
        ),
        (
            "",
            f"{100 * result['share_of_limit']:.0f}% of "
            f"{size_text(result['limit_bytes_per_second'])}/s ({result['limit_how']})",
        ),
        ("launches", f"{result['launches_per_step']} a step"),
        *[("busy", "other programs ran: an idle machine is faster")] * result["busy"],
    ]

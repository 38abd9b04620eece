"""`tilegrad bench serve`: a load on any endpoint that speaks as OpenAI's, and its latencies.

Invariant: requests that failed are counted and shown, and end the command with status 1 when none
ended well.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..core.errors import UserError
from ..core.place import check_place, folder_made
from . import options
from .progress import Bars
from .terminal import columns, put, status

Url = Annotated[str, typer.Option(help="Where the endpoint is, without /v1.")]
Model = Annotated[
    str | None,
    typer.Option(help="The model's name there; its first if not given.", show_default=False),
]
Key = Annotated[
    str, typer.Option(envvar="OPENAI_API_KEY", help="The endpoint's key.", show_default=False)
]
Count = Annotated[int, typer.Option(min=1, help="Requests that count.")]
Rate = Annotated[float, typer.Option(help="Requests a second; inf: all at once.")]
Arrivals = Annotated[
    Literal["poisson", "fixed"], typer.Option(help="By chance around the rate, or evenly.")
]
Concurrency = Annotated[
    int | None, typer.Option(min=1, help="Most requests at once.", show_default=False)
]
Prompt = Annotated[str, typer.Option(help="Tokens of a prompt: 512, or 100-1024 (uniform).")]
Tokens = Annotated[
    str | None,
    typer.Option(
        help="Tokens of an answer: 128 (without a dataset), or a range.", show_default=False
    ),
]
Script = Annotated[
    Literal["mini-sglang"] | None,
    typer.Option(
        help="A known load: mini-sglang is 256 requests, prompts and answers of 100 to 1024"
        " tokens, seed 0.",
        show_default=False,
    ),
]
Dataset = Annotated[
    Path | None,
    typer.Option(help="Prompts from a file of conversations as ShareGPT's.", show_default=False),
]
PrefixTokens = Annotated[int, typer.Option(min=0, help="Tokens that prompts share.")]
PrefixGroups = Annotated[int, typer.Option(min=1, help="Different shared prefixes.")]
Vocabulary = Annotated[int, typer.Option(min=1, help="Random ids are below this.")]
Kind = Annotated[
    Literal["completions", "chat"], typer.Option(help="/v1/completions or /v1/chat/completions.")
]
Prompts = Annotated[
    Literal["auto", "ids", "text"],
    typer.Option(help="Send ids or words; auto: ids where the endpoint takes them."),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=2.0,
        show_default=False,
        help="0: the likeliest token, if no script says otherwise (mini-sglang: 0.6).",
    ),
]
IgnoreEos = Annotated[
    bool, typer.Option(help="Answers have their full length, whatever the model says.")
]
WarmUp = Annotated[int, typer.Option(min=0, help="Requests before those that count.")]
Goodput = Annotated[
    str,
    typer.Option(
        help="Limits in ms, as ttft:200,tpot:50,e2e:5000: how many requests keep them all.",
        show_default=False,
    ),
]
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds that a request may take.")]
Out = Annotated[Path | None, typer.Option(help="Write the numbers as JSON.", show_default=False)]
Plot = Annotated[Path | None, typer.Option(help="Write a plot as SVG.", show_default=False)]


def bench_serve(
    url: Url = "http://127.0.0.1:8000",
    model: Model = None,
    api_key: Key = "",
    requests: Count = 128,
    rate: Rate = float("inf"),
    arrivals: Arrivals = "poisson",
    concurrency: Concurrency = None,
    prompt: Prompt = "512",
    tokens: Tokens = None,
    script: Script = None,
    dataset: Dataset = None,
    prefix_tokens: PrefixTokens = 0,
    prefix_groups: PrefixGroups = 1,
    vocabulary: Vocabulary = 10_000,
    endpoint: Kind = "completions",
    prompts: Prompts = "auto",
    temperature: Temperature = None,
    ignore_eos: IgnoreEos = True,
    warm_up: WarmUp = 2,
    seed: Annotated[int, typer.Option(help="Where the random numbers start.")] = 0,
    goodput: Goodput = "",
    timeout: Timeout = 3600.0,
    out: Out = None,
    plot: Plot = None,
    as_json: options.Json = False,
) -> None:
    """Put a load on an OpenAI endpoint and measure its latencies and rates."""
    import asyncio

    for path in (out, plot):
        if path is not None:
            check_place(path, "bench serve")
    load = loading()
    if not rate > 0:
        raise typer.BadParameter("--rate is a number above 0, or inf")
    if script and dataset:
        raise typer.BadParameter("--script and --dataset are two loads: give one")
    limits = load.limits_of(goodput)
    shared = load.Prefixes(prefix_tokens, prefix_groups)
    random = {"seed": seed, "prefixes": shared, "vocabulary": vocabulary}
    calls = calls_of(load, script, dataset, requests, prompt, tokens, random)
    calls = load.at_rate(calls, rate, poisson=arrivals == "poisson", seed=seed)
    url = url.rstrip("/").removesuffix("/v1")
    model = model or asyncio.run(load.model_of(url, api_key))
    if temperature is None:
        temperature = 0.6 if script else 0.0
    chat, named = endpoint == "chat", {"temperature": temperature, "timeout": timeout}
    where = load.Endpoint(url, model, api_key, chat, ignore_eos, **named)
    result = loaded(where, calls, concurrency, warm_up, prompts)
    summary = {
        "model": model,
        "url": url,
        "endpoint": endpoint,
        "script": script or "",
        "dataset": str(dataset or ""),
        "rate": str(rate),
        "arrivals": arrivals,
        "concurrency": concurrency,
        "temperature": temperature,
        "ignore_eos": ignore_eos,
        "warm_up": warm_up,
        "seed": seed,
        **load.summed_up(result, limits),
    }
    title = f"{model} at {url}"
    if plot is not None:
        save(plot, load.plotted(result, summary, title))
    shown(summary, out, as_json)


def calls_of(
    load: Any,
    script: str | None,
    dataset: Path | None,
    requests: int,
    prompt: str,
    tokens: str | None,
    random: dict[str, Any],
) -> list[Any]:
    """What is asked for: a known script, the conversations of a file, or random ids."""
    if script:
        return list(load.mini_sglang())
    if dataset:
        answer = load.Lengths.of(tokens) if tokens else None
        return list(load.of_file(dataset, requests, answer, seed=random["seed"]))
    sizes = load.Lengths.of(prompt), load.Lengths.of(tokens or "128")
    return list(load.drawn(requests, *sizes, **random))


def loading() -> Any:
    """The folder of the load, or how to get what it needs."""
    try:
        from ..serve import load
    except ImportError as error:
        raise UserError(
            f"the package {error.name} is missing",
            op="bench serve",
            hint="pip install 'tilegrad[serve]'",
        ) from None
    return load


def loaded(
    where: Any, calls: Sequence[Any], concurrency: int | None, warm_up: int, prompts: str
) -> Any:
    """The Result of a load, with a bar meanwhile."""
    import asyncio

    from ..serve.load import run_load

    with Bars() as bars:
        work = run_load(
            where,
            calls,
            concurrency=concurrency,
            warm_up=warm_up,
            prompts=prompts,
            told=lambda done, total: bars.stage("requests", done, total),
        )
        return asyncio.run(work)


# ---- what it says -------------------------------------------------------------------------------


def shown(summary: dict[str, Any], out: Path | None, as_json: bool) -> None:
    """Write the numbers, show the table; an error where no request ended well."""
    if out is not None:
        save(out, json.dumps(summary, indent=1) + "\n")
    if as_json:
        put(json.dumps(summary))
    else:
        put(table(summary))
    if not summary["completed"]:
        status("error: no request ended well")
        raise typer.Exit(1)


def save(path: Path, text: str) -> None:
    """Write a file."""
    with folder_made(path, "bench serve"):
        path.write_text(text, encoding="utf-8")


def table(summary: dict[str, Any]) -> str:
    """The numbers as a person reads them."""
    from ..serve.load import LATENCIES, PERCENTILES

    s = summary
    lines = [
        ("requests", f"{s['completed']} of {s['requests']} in {s['seconds']:.2f} s, "
                     f"{s['most_at_once']} at once at most"),
        ("tokens", f"{s['prompt_tokens']:,} of prompts ({s['cached_tokens']:,} from the cache), "
                   f"{s['answer_tokens']:,} of answers, by {s['tokens_counted_by']}"),
        ("rates", f"{s['requests_per_second']:.2f} requests/s, "
                  f"{s['answer_tokens_per_second']:,.1f} answer tokens/s, "
                  f"{s['total_tokens_per_second']:,.1f} tokens/s in all"),
    ]  # fmt: skip
    if s["short_answers"] and s["ignore_eos"]:
        lines.append(("short", f"{s['short_answers']} answers were shorter than asked for"))
    if "goodput" in s:
        good = s["goodput"]
        kept = ", ".join(f"{n} {v:g} ms" for n, v in good["limits_ms"].items())
        lines.append(
            (
                "goodput",
                f"{good['requests_per_second']:.2f} requests/s, "
                f"{100 * good['share']:.1f}% within {kept}",
            )
        )
    lines += [("failed", f"{row['count']} times {row['error']}") for row in s["errors"]]
    lines += [("note", note) for note in s["notes"]]
    heads = ["mean", *[f"p{p}" for p in PERCENTILES]]
    rows = [["ms", *heads]]
    for name in LATENCIES:
        values = s[f"{name}_ms"]
        rows.append([name.upper(), *["-" if values is None else f"{values[h]:.2f}" for h in heads]])
    return columns(lines) + "\n\n" + columns(rows, right=range(1, len(heads) + 1))

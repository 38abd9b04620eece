"""Tables of language models and of serving, for docs/results.md (`bench/table.py`)."""

from __future__ import annotations

import statistics
from typing import Any

from kept import Result

# ms a step of vLLM 0.24, on the same kind of GPU
VLLM = {
    "llm": {1: 5.09, 8: 5.40, 32: 6.51, 128: 10.78},
    "llm-fp8": {1: 3.5, 8: 3.87, 32: 5.47, 128: 9.24},
}
SERVE_VLLM = {"qwen3-0.6b": 21_334, "qwen3-14b": 5_918}  # output tokens/s
FIRST = ("llm", "llm-fp8", "llm-fp8-cache", "llm-blocks", "llm-int8")


def steps(results: list[Result]) -> list[str]:
    """A decode step of the 8B shape by batch, one format below the other."""
    found = [r for r in results if "batches" in r.record]
    found.sort(key=lambda r: (FIRST.index(r.kind) if r.kind in FIRST else len(FIRST), r.kind))
    head = found[0]
    lines = [
        "A decode step of the Llama-3-8B shape, contexts of 1024 tokens, the engine's own "
        f"step, {head.where()}:",
        "",
        "| weights | batch | ours | limit of bytes | torch.compile | vLLM 0.24 | launches |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [row for r in found for row in step_rows(r, head)]
    return [*lines, "", *(prefill(r, head) for r in found if r.record.get("prefill"))]


def name_of(result: Result, head: Result) -> str:
    """The format of weights and cache, and what else the head of its table does not say."""
    record = result.record
    layers = "" if record["layers"] == 32 else f", {record['layers']} of 32 layers"
    cache = record.get("kv_cache_dtype", "auto")
    cached = "" if cache == "auto" else f", {cache} cache"
    return f"{record['format']}{cached}{layers}{result.beside(head)}"


def step_rows(result: Result, head: Result) -> list[str]:
    """The batches of one format."""
    lines = []
    for r in result.record["batches"]:
        torch_ms = f"{r['torch_ms']:.2f} ms" if "torch_ms" in r else ""
        peer = VLLM.get(result.kind, {}).get(r["batch"])
        vllm = f"{peer} ms" if peer else ""
        lines.append(
            f"| {name_of(result, head)} | {r['batch']} | {r['ms']:.2f} ms | "
            f"{r['limit_ms']:.2f} ms ({100 * r['limit_ms'] / r['ms']:.0f}%) | "
            f"{torch_ms} | {vllm} | {r['launches']} |"
        )
    return lines


def prefill(result: Result, head: Result) -> str:
    """How fast prompts are read."""
    peer = " (vLLM 0.24: 43,100)" if result.kind == "llm" else ""
    rate = result.record["prefill"]["tokens_per_second"]
    return f"- prefill of 8 x 1024 tokens, {name_of(result, head)}: {rate:,.0f} tokens/s{peer}"


def experts(results: list[Result]) -> list[str]:
    """A decode step of a model with experts, or its experts alone, by requests."""
    head = results[0]
    lines = [
        f"Qwen3-30B-A3B's shape by requests, picks about uniform, {head.where()}:",
        "",
    ]
    for result in results:
        record = result.record
        what = "a decode step" if record["model"] else "experts alone"
        layers = "" if record["layers"] == 48 else f" of {record['layers']} layers"
        times = ", ".join(
            f"{r['requests']} {r['ms']:.2f} ms (limit {r['limit_ms']:.2f})"
            for r in record["rows"]
            if "limit_ms" in r and "requests" in r
        )
        format = record.get("format", "bf16")
        lines.append(f"- {what}{layers} in {format}{result.beside(head)}: {times}")
    return lines


def start(results: list[Result]) -> list[str]:
    """How soon a process has its first token."""
    result = results[0]
    cold, warm = (result.record[name]["total"] for name in ("cold", "warm"))
    return [
        f"- from the start of a process to the first token ({result.where()}): {cold:.1f} s "
        f"cold, {warm:.1f} s with the disk cache, making weights aside"
    ]


CPU_FILES = {"llm-cpu": "Q4_1"}  # others by what follows `llm-cpu-`


def on_cpu(results: list[Result]) -> list[str]:
    """SmolLM2 beside its peers."""
    head = min(results, key=lambda r: r.kind)
    lines = [
        f"SmolLM2-135M, {head.where()}:",
        "",
        "| case | peer | ours | against the peer |",
        "|---|---|---|---|",
    ]
    for result in sorted(results, key=lambda r: r.kind):
        of = CPU_FILES.get(result.kind, result.kind.removeprefix("llm-cpu-"))
        of = of.replace("-int8-tokens", ", tokens in int8,") + result.beside(head)
        lines += cpu_rows(of, result.record["results"])
    return lines


def cpu_rows(of: str, results: dict[str, Any]) -> list[str]:
    """The cases of one file or folder."""
    lines = []
    for name, r in results.items():
        note = " (void)" if r.get("void") else ""
        if "ratio" in r:
            rate = r["tokens_per_second"]["ours"]
            lines.append(
                f"| {of} {name} | {r['peer']} | {rate:.0f} tok/s | {r['ratio']:.2f}x{note} |"
            )
        elif name == "resident":
            lines.append(f"| {of} memory | | file + {r['value'] / 1e6:.0f} MB | |")
        elif "value" in r:
            lines.append(f"| {of} {name} token | | {r['value']:.1f} s | |")
    return lines


def offline(results: list[Result]) -> list[str]:
    """The mini-sglang script by shape."""
    head = results[0]
    lines = [
        "256 requests of the mini-sglang script (prompts and answers of 100 to 1,024 tokens, "
        f"random bf16 weights, temperature 0.6), {head.where()}:",
        "",
        "| shape | output tokens/s | vLLM 0.24 | the GPU was busy |",
        "|---|---|---|---|",
    ]
    for result in results:
        found, shape = result.record, result.kind.removeprefix("serve-offline-")
        rate = max(r["tokens"] / r["seconds"] for r in found["runs"])
        peer = f"{SERVE_VLLM[shape]:,}" if shape in SERVE_VLLM else ""
        busy = f"{100 * found['busy_share']:.1f}%" if "busy_share" in found else ""
        lines.append(f"| {shape}{result.beside(head)} | {rate:,.0f} | {peer} | {busy} |")
    return lines


def over_http(results: list[Result]) -> list[str]:
    """Streams over HTTP beside the engine alone."""
    lines = []
    for result in results:
        over, shape = result.record, result.kind.removeprefix("serve-rate-")
        run = over["http"][0]
        lines.append(
            f"- {shape}'s shape, {over['streams']} streams over HTTP ({result.where()}): "
            f"{run['tokens_per_second']:,.0f} tokens/s, {100 * over['ratio']:.1f}% of the engine "
            f"alone; the HTTP process takes {run['http_us_per_token']:.0f} us of CPU a token"
        )
    return lines


def first_tokens(results: list[Result]) -> list[str]:
    """Prompts of lengths that no step was made for."""
    result = results[0]
    times = ", ".join(
        f"{int(n):,} tokens {statistics.median(row['ms']):.1f} ms"
        for n, row in result.record["first"].items()
    )
    shape = result.record["shape"]
    return [f"- the first token of a prompt, new lengths, {shape} ({result.where()}): {times}"]


def prefix(results: list[Result]) -> list[str]:
    """A prefix that other requests had."""
    result = results[0]
    return [
        f"- SmolLM2 on a CPU, a prefix of {result.record['prefix']:,} tokens that others had "
        f"({result.where()}): first token {result.record['ratio']:.0f}x sooner"
    ]


def guesses(results: list[Result]) -> list[str]:
    """Guesses from the prompt."""
    result = results[0]
    gains = ", ".join(f"{name} {t['ratio']:.1f}x" for name, t in result.record["tasks"].items())
    return [f"- SmolLM2, guesses from the prompt, one request ({result.where()}): {gains}"]


def lora(results: list[Result]) -> list[str]:
    """What adapters cost."""
    result, found = results[0], results[0].record
    return [
        f"- {found['adapters']} LoRA adapters of rank {found['rank']} in a batch of "
        f"{found['requests']} ({result.where()}): {100 * found['slower']:.0f}% slower than none"
    ]

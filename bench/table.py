"""docs/results.md, made from the newest files in bench/results.

python bench/table.py            prints the page
python bench/table.py --write    writes it
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure

ROOT = Path(__file__).resolve().parents[1]
VLLM = {1: 5.09, 8: 5.40, 32: 6.51, 128: 10.78}  # ms a step, on the same kind of GPU
VLLM_FP8 = {1: 3.5, 8: 3.87, 32: 5.47, 128: 9.24}  # the same, weights in fp8
PRODUCTS = (
    ("gemm-sparse", "products of fp8 with 2:4 weights beside our dense ones", 2048),
    ("gemm-block", "products of fp8 in blocks, sums promoted, beside torch's", 512),
    ("gemm-int8", "products of int8 beside torch's, sums to the bit", 32),
)
PAGE = ROOT / "docs" / "results.md"
HEAD = """# Results

Each case runs ours and the peer interleaved in one process, on random data, and takes the median of
the rounds' ratios. The scripts in `bench/` measure and write `bench/results/`;
`python bench/table.py --write` makes this page of the newest of them. A case is void where the
machine was busy with something else.
"""


def of_kind(kind: str) -> list[dict[str, Any]]:
    """The result files of a kind, the oldest first."""
    files = [json.loads(p.read_text()) for p in (ROOT / "bench/results").glob(f"{kind}-2*.json")]
    return sorted(files, key=lambda r: r["date"])


def newest(kind: str) -> dict[str, Any] | None:
    """The newest result file of a kind."""
    return next(reversed(of_kind(kind)), None)


def by_cpu(kind: str) -> dict[str, dict[str, Any]]:
    """The newest result file of a kind for each CPU."""
    return {measure.cpu_of(r): r for r in of_kind(kind)}


def cpu_table(record: dict[str, Any]) -> list[str]:
    """A table for each CPU."""
    return [line for found in by_cpu("cpu").values() for line in (*one_cpu(found), "")]


def one_cpu(record: dict[str, Any]) -> list[str]:
    """One row for each case, one line for each bar."""
    lines = ["| case | peer | speed against the peer | ours | peer's |", "|---|---|---|---|---|"]
    for row in record["cases"]:
        if "failed" in row:
            lines.append(f"| {row['name']} | {row['peer']} | failed | | |")
            continue
        note = " (void)" if row["void"] else " (wrong)" if row["wrong"] else ""
        lines.append(
            f"| {row['name']} | {row['peer']} | {row['ratio']:.2f}x{note} | "
            f"{time_text(row['ours_seconds'])} | {time_text(row['peer_seconds'])} |"
        )
    lines.append("")
    for v in record["verdicts"]:
        if "mean" in v:
            lines.append(
                f"- {v['group']}: geometric mean {v['mean']:.2f}x, least "
                f"{v['least']:.2f}x of {v['cases']} cases"
            )
        else:
            lines.append(f"- {v['group']}: {time_text(v['seconds'])}, value read")
    return [source(record), "", *lines]


def compile_table(record: dict[str, Any]) -> list[str]:
    """Compile and import times."""
    lines = ["", f"- import: {record['import_seconds']:.2f} s"]
    for name, what in (("cold", "compiles cold"), ("warm", "starts from the disk cache")):
        if "failed" not in record[name]:
            lines.append(
                f"- GPT-2 124M training step {what} in {record[name]['compile_seconds']:.1f} s"
            )
    if "failed" not in record["schedule"]:
        lines.append(
            "- its {kernels} kernels are served by {programs} programs".format(**record["schedule"])
        )
    return lines


def gemm_table(record: dict[str, Any]) -> list[str]:
    """Speed against cuBLAS by layer and number of tokens."""
    rows = [r for r in record["rows"] if r["layer"] not in ("random", "cube")]
    sizes = sorted({r["m"] for r in rows})
    ratio = {(r["layer"], r["n"], r["k"], r["m"]): r["ratio"] for r in rows}
    lines = [
        "",
        f"Matrix products in {rows[0]['dtype']} against cuBLAS, {gpu_source(record)}",
        "",
        "| layer (n x k) | " + " | ".join(f"m={m}" for m in sizes) + " |",
        "|---" * (len(sizes) + 1) + "|",
    ]
    for layer, n, k in dict.fromkeys((r["layer"], r["n"], r["k"]) for r in rows):
        found = [ratio.get((layer, n, k, m)) for m in sizes]
        cells = ["" if f is None else f"{f:.2f}x" for f in found]
        lines.append(f"| {layer} {n}x{k} | " + " | ".join(cells) + " |")
    other = [r["ratio"] for r in record["rows"] if r["layer"] == "random"]
    if other:
        mean = math.exp(sum(math.log(r) for r in other) / len(other))
        lines += [
            "",
            f"- {len(other)} random sizes: geometric mean {mean:.2f}x, least {min(other):.2f}x",
        ]
    return lines


def memory_table(record: dict[str, Any]) -> list[str]:
    """Bytes a second of the kernels that memory bounds."""
    copy = record["copy_bytes_per_second"]
    lines = [
        "",
        f"Kernels that memory bounds, {gpu_source(record)} A copy runs at {copy / 1e12:.2f} TB/s.",
        "",
        "| case | ours | share of a copy | against torch.compile |",
        "|---|---|---|---|",
    ]
    for r in record["rows"]:
        if "bytes_per_second" not in r:
            lines.append(f"| {r['case']} | wrong | | |")
            continue
        peer = f"{r['ratio']:.2f}x" if "ratio" in r else ""
        lines.append(
            f"| {r['case']} | {r['bytes_per_second'] / 1e12:.2f} TB/s |"
            f" {r['share_of_copy']:.2f} | {peer} |"
        )
    return lines


def attention_table(record: dict[str, Any]) -> list[str]:
    """TFLOP/s of attention, and speed against cuDNN, by head size and length."""
    rows = [r for r in record["rows"] if "cudnn" in r]
    parts = list(dict.fromkeys(r["part"] for r in rows))
    lines = [
        "",
        f"Attention in bfloat16 against cuDNN, {gpu_source(record)} TFLOP/s (speed)",
        "",
        "| case | " + " | ".join(parts) + " |",
        "|---" * (len(parts) + 1) + "|",
    ]
    found = {(r["case"], r["part"]): r for r in rows}
    for case in dict.fromkeys(r["case"] for r in rows):
        cells = [found.get((case, part)) for part in parts]
        texts = [
            ""
            if c is None
            else "wrong"
            if not c["right"]
            else f"{c['tflops']:.0f} ({c['cudnn']['ratio']:.2f}x)"
            for c in cells
        ]
        lines.append(f"| {case} | " + " | ".join(texts) + " |")
    lines.append("")
    for part, v in record["verdicts"].items():
        lines.append(f"- {part}: geometric mean {v['mean']:.2f}x, least {v['least']:.2f}x")
    return lines


def decode_table(record: dict[str, Any]) -> list[str]:
    """Microseconds of decode attention over a paged cache."""
    lines = [
        "",
        f"Decode attention over a paged cache against cuDNN over contiguous keys,"
        f" {gpu_source(record)}",
        "",
        "| case | page | ours | bytes/s | against cuDNN |",
        "|---|---|---|---|---|",
    ]
    for r in record["rows"]:
        if "ratio" in r:
            lines.append(
                f"| {r['case']} | {r['page']} | {r['ours_us']:.1f} us |"
                f" {r['tb_per_s']:.2f} TB/s | {r['ratio']:.2f}x |"
            )
    return lines


def llm_table(record: dict[str, Any]) -> list[str]:
    """A decode step of the 8B shape by batch, quantised formats below."""
    lines = [
        "",
        "A decode step of the Llama-3-8B shape, contexts of 1024 tokens, the engine's own "
        f"step, {gpu_source(record)}",
        "",
        "| weights | batch | ours | limit of bytes | torch.compile | vLLM 0.24 | launches |",
        "|---|---|---|---|---|---|---|",
    ]
    peers = {"llm": VLLM, "llm-fp8": VLLM_FP8}
    for kind in (
        "llm",
        "llm-fp8",
        "llm-fp8-cache",
        "llm-blocks",
        "llm-int8",
        "llm-q4_1",
        "llm-q8_0",
    ):
        found = newest(kind)
        other = bool(found) and found["commit"] != record["commit"]  # type: ignore[index]
        note = f" (commit {found['commit']})" if other else ""  # type: ignore[index]
        cache = ", fp8 cache" if kind == "llm-fp8-cache" else ""
        for r in found["batches"] if found else ():
            torch_ms = f"{r['torch_ms']:.2f} ms" if "torch_ms" in r else ""
            peer = peers.get(kind, {}).get(r["batch"])
            vllm = f"{peer} ms" if peer else ""
            lines.append(
                f"| {found['format']}{cache}{note} | {r['batch']} | {r['ms']:.2f} ms | "
                f"{r['limit_ms']:.2f} ms ({100 * r['limit_ms'] / r['ms']:.0f}%) | "
                f"{torch_ms} | {vllm} | {r['launches']} |"
            )  # type: ignore[index]
    prefill, start = record.get("prefill"), newest("llm-start")
    if prefill:
        lines += [
            "",
            f"- prefill of 8 x 1024 tokens: {prefill['tokens_per_second']:.0f} tokens/s "
            "(vLLM 0.24: 43,100)",
        ]
    for experts in filter(None, map(newest, ("moe", "moe-fp8", "moe-int8"))):
        if not (experts["model"] and experts["layers"] == 48):
            continue
        steps = ", ".join(
            f"{r['requests']} {r['ms']:.2f} ms (limit {r['limit_ms']:.2f})"
            for r in experts["rows"]
            if "requests" in r
        )
        lines.append(
            f"- a decode step of Qwen3-30B-A3B's shape in {experts.get('format', 'bf16')} "
            f"by requests, picks about uniform (commit {experts['commit']}): {steps}"
        )
    for kind, what, least in PRODUCTS:
        if found := newest(kind):
            rows = [r for r in found["rows"] if r["m"] >= least and r["ratio"]]
            rows = [r for r in rows if r.get("dtype") != "bfloat16"]
            mean = statistics.geometric_mean(r["ratio"] for r in rows)
            lines.append(
                f"- {what}, from {least:,} tokens (commit {found['commit']}): {mean:.2f}x, "
                f"{min(r['ratio'] for r in rows):.2f}x to {max(r['ratio'] for r in rows):.2f}x"
            )
    if start:
        cold, warm = (start[name]["total"] for name in ("cold", "warm"))
        lines.append(
            f"- from the start of a process to the first token: {cold:.1f} s cold, "
            f"{warm:.1f} s with the disk cache, making weights aside"
        )
    return lines


LLM_CPU = {"Q4_1": "llm-cpu"} | {w: f"llm-cpu-{w}" for w in ("Q4_0", "Q8_0", "int8", "bf16")}
LLM_CPU |= {f"{w}, tokens in int8,": f"llm-cpu-{w}-int8-tokens" for w in ("Q4_0", "Q8_0")}


def llm_cpu_table(record: dict[str, Any]) -> list[str]:
    """SmolLM2 beside its peers, a table for each CPU."""
    found = {of: by_cpu(kind) for of, kind in LLM_CPU.items()}
    lines = []
    for cpu in dict.fromkeys(name for records in found.values() for name in records):
        records = {of: made[cpu] for of, made in found.items() if cpu in made}
        lines += [
            "",
            f"SmolLM2-135M, {source(next(iter(records.values())))}",
            "",
            "| case | peer | ours | against the peer |",
            "|---|---|---|---|",
        ]
        lines += [text for of, one in records.items() for text in llm_cpu_rows(of, one["results"])]
    return lines


def llm_cpu_rows(of: str, results: dict[str, Any]) -> list[str]:
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


SERVE_VLLM = {"qwen3-0.6b": 21_334, "qwen3-14b": 5_918}


def serve_table(record: dict[str, Any]) -> list[str]:
    """The mini-sglang script by shape, and what else a server's users wait for."""
    lines = [
        "",
        "256 requests of the mini-sglang script (prompts and answers of 100 to 1,024 tokens, "
        f"random bf16 weights, temperature 0.6), {gpu_source(record)}",
        "",
        "| shape | output tokens/s | vLLM 0.24 | the GPU was busy |",
        "|---|---|---|---|",
    ]
    for shape, vllm in SERVE_VLLM.items():
        found = newest(f"serve-offline-{shape}")
        if found:
            rate = max(r["tokens"] / r["seconds"] for r in found["runs"])
            lines.append(f"| {shape} | {rate:,.0f} | {vllm:,} | {100 * found['busy_share']:.1f}% |")
    lines.append("")
    if over := newest("serve-rate-llama-3-8b"):
        run = over["http"][0]
        lines.append(
            f"- Llama-3-8B's shape, {over['streams']} streams over HTTP: "
            f"{run['tokens_per_second']:,.0f} tokens/s, {100 * over['ratio']:.1f}% of the engine "
            f"alone; the HTTP process takes {run['http_us_per_token']:.0f} us of CPU a token"
        )
    if first := newest("serve-first-tokens"):
        times = ", ".join(
            f"{int(n):,} tokens {statistics.median(row['ms']):.1f} ms"
            for n, row in first["first"].items()
        )
        lines.append(f"- the first token of a prompt, new lengths, Llama-3-8B's shape: {times}")
    if shared := newest("serve-prefix"):
        lines.append(
            f"- SmolLM2 on 2 cores, a prefix of {shared['prefix']:,} tokens that others had: first "
            f"token {shared['ratio']:.0f}x sooner"
        )
    if guessed := newest("speculative"):
        gains = ", ".join(f"{name} {t['ratio']:.1f}x" for name, t in guessed["tasks"].items())
        lines.append(f"- SmolLM2, guesses from the prompt, one request: {gains}")
    if lora := newest("lora"):
        lines.append(
            f"- {lora['adapters']} LoRA adapters of rank {lora['rank']} in a batch of "
            f"{lora['requests']}: {100 * lora['slower']:.0f}% slower than none"
        )
    return lines


def gpu_source(record: dict[str, Any]) -> str:
    """Where and when, on a GPU."""
    return (
        f"{record['device']}, {record['date'][:10]}, commit {record['commit']}, torch "
        f"{record['torch']}:"
    )


def source(record: dict[str, Any]) -> str:
    """Where and when the figures were taken, and the best that the machine gave then."""
    versions, cases = record["versions"], record.get("cases", ())
    best = max([record["calibration"], *(c.get("calibration", 0) for c in cases)])
    return (
        f"{measure.cpu_of(record)}, {record['threads']} threads, {record['date'][:10]}, commit "
        f"{record['commit']}, torch {versions['torch']}, calibration "
        f"{best:.0f} GFLOP/s."
    )


def time_text(seconds: float) -> str:
    """A time with three digits."""
    for scale, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * scale < 1000:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.3g} s"


def step_table(record: dict[str, Any]) -> list[str]:
    """A training step of GPT-2 beside torch.compile."""
    lines = [
        "",
        "## Training",
        "",
        f"GPT-2 124M, bfloat16 with float32 AdamW. {gpu_source(record)}",
        "",
    ]
    lines += ["| batch x 1024 tokens | tokens/s | torch.compile | ratio | compiled cold |"]
    lines += ["|---|---|---|---|---|"]
    for row in record["rows"]:
        ours, peer = row["tokens_per_s"], row["torch_tokens_per_s"]
        lines.append(
            f"| {row['batch']} | {ours:,.0f} | {peer:,.0f} | {ours / peer:.2f}x |"
            f" {row['compile_s']:.1f} s |"
        )
    return lines


def scale_table(record: dict[str, Any]) -> list[str]:
    """How the compiler's time grows."""
    lines = ["", f"Seconds to build, compile and run once ({record['date'][:10]}):", ""]
    lines += ["| program | size | at half of it | whole | grows by |", "|---|---|---|---|---|"]
    for name, found in record["programs"].items():
        half, whole = found["runs"][-2:]
        lines.append(
            f"| {name} | {whole['size']:,} | {half['seconds']:.2f} s | {whole['seconds']:.2f} s |"
            f" {found['ratio']:.2f}x |"
        )
    return lines


def recipes_table(record: dict[str, Any]) -> list[str]:
    """What rounding costs, recipe by recipe."""
    tuned, sizes = record["tuned"], record["sizes"]
    lines = [
        f"{record['model']}, unpacked and trained by our own loop until its weights had moved by "
        f"{tuned['moved']:.2f} steps of Q4_1 ({len(tuned['losses'])} steps of {sizes['window']} "
        f"tokens, noise of {sizes['noise']} steps of Q4_1 added {tuned['noises']} times); "
        f"{sizes['samples']} rows of {sizes['length']} tokens looked at, "
        f"{sizes['judged']} others judged; groups of {sizes['group']} columns "
        f"(`bench/recipes.py`, {record['date'][:10]}, commit {record['commit']}). A share is that "
        "of the loss of plain rounding to as many bits: of log perplexity, and of the divergence "
        "from what the unrounded model says.",
        "",
        "| recipe | bits | perplexity | log perplexity lost | share | of divergence | bar |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in record["rows"].items():
        shares = [f"{row[k]:.2f}" if k in row else "" for k in ("share", "divergence_share")]
        bar = f"{row['bar']}: {'met' if row['met'] else 'missed'}" if "bar" in row else ""
        cells = [name, f"{row['bits']:.2f}", f"{row['perplexity']:.3f}", f"{row['lost']:+.4f}"]
        lines.append(f"| {' | '.join([*cells, *shares, bar])} |")
    return lines


PARTS: tuple[tuple[str, str, Callable[[dict[str, Any]], list[str]]], ...] = (
    ("## CPU", "cpu", cpu_table),
    ("## Compiling", "compile", compile_table),
    ("", "compile-scale", scale_table),
    ("## GPU", "gemm", gemm_table),
    ("", "memory", memory_table),
    ("", "attention", attention_table),
    ("", "decode", decode_table),
    ("", "gpt2-step", step_table),
    ("## Language models", "llm", llm_table),
    ("", "llm-cpu", llm_cpu_table),
    ("## Quantisation", "recipes", recipes_table),
    ("## Serving", "serve-offline-qwen3-14b", serve_table),
)


def page() -> str:
    """The whole page."""
    lines = [HEAD]
    for heading, kind, make in PARTS:
        if heading:
            lines += ["", heading, ""]
        found = newest(kind)
        lines += [f"No results of `{kind}` yet."] if found is None else make(found)
    text = "\n".join(lines)
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text.rstrip() + "\n"


def main() -> None:
    """Print the page, or write it."""
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page())
    else:
        print(page(), end="")


if __name__ == "__main__":
    main()

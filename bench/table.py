"""docs/results.md and docs/results-before.md, made from the files in bench/results.

python bench/table.py            prints the pages
python bench/table.py --write    writes them

The first shows each machine's newest date, the other what was measured before (`kept.py` says
which is which): a new file moves the older ones by itself.
"""

from __future__ import annotations

import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import model_tables
from kept import Result, by_machine, current, kept

DOCS = Path(__file__).resolve().parents[1] / "docs"
PRODUCTS = {
    "gemm-sparse": ("products of fp8 with 2:4 weights beside our dense ones", 2048),
    "gemm-block": ("products of fp8 in blocks, sums promoted, beside torch's", 512),
    "gemm-int8": ("products of int8 beside torch's, sums to the bit", 32),
}
HEAD = """# Results

Each case runs ours and the peer interleaved in one process, on random data, and takes the median of
the rounds' ratios. The scripts in `bench/` measure and write `bench/results/`;
`python bench/table.py --write` makes this page of them. A case is void where the machine was busy
with something else.

What a machine shows here is of one date, its newest, or of 24 hours where a night's measurements
cross midnight (UTC). What is older: [measured before](results-before.md).
"""
HEAD_BEFORE = """# Measured before

Results older than those of the same machine's newest date, which [Results](results.md) shows:
each table and line with its machine, date and commit. `python bench/table.py --write` makes both
pages. Later commits may be faster or slower.
"""
Make = Callable[[list[Result]], list[str]]


def cpu_table(result: Result) -> list[str]:
    """One row for each case, one line for each bar."""
    record = result.record
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
    return [f"{result.where()}:", "", *lines]


def compile_table(result: Result) -> list[str]:
    """Compile and import times."""
    record = result.record
    lines = [f"{result.where()}:", "", f"- import: {record['import_seconds']:.2f} s"]
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


def scale_table(result: Result) -> list[str]:
    """How the compiler's time grows."""
    record = result.record
    lines = [f"Seconds to build, compile and run once, {result.where()}:", ""]
    lines += ["| program | size | at half of it | whole | grows by |", "|---|---|---|---|---|"]
    for name, found in record["programs"].items():
        half, whole = found["runs"][-2:]
        lines.append(
            f"| {name} | {whole['size']:,} | {half['seconds']:.2f} s | {whole['seconds']:.2f} s |"
            f" {found['ratio']:.2f}x |"
        )
    return lines


def gemm_table(result: Result) -> list[str]:
    """Speed against cuBLAS by layer and number of tokens."""
    record = result.record
    rows = [r for r in record["rows"] if r["layer"] not in ("random", "cube")]
    sizes = sorted({r["m"] for r in rows})
    ratio = {(r["layer"], r["n"], r["k"], r["m"]): r["ratio"] for r in rows}
    lines = [
        f"Matrix products in {rows[0]['dtype']} against cuBLAS, {result.where()}:",
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


def memory_table(result: Result) -> list[str]:
    """Bytes a second of the kernels that memory bounds."""
    record = result.record
    copy = record["copy_bytes_per_second"]
    lines = [
        f"Kernels that memory bounds, {result.where()}. A copy runs at {copy / 1e12:.2f} TB/s:",
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


def attention_table(result: Result) -> list[str]:
    """TFLOP/s of attention, and speed against cuDNN, by head size and length."""
    record = result.record
    rows = [r for r in record["rows"] if "cudnn" in r]
    parts = list(dict.fromkeys(r["part"] for r in rows))
    lines = [
        f"Attention in bfloat16 against cuDNN, {result.where()}, TFLOP/s (speed):",
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


def decode_table(result: Result) -> list[str]:
    """Microseconds of decode attention over a paged cache."""
    record = result.record
    lines = [
        f"Decode attention over a paged cache against cuDNN over contiguous keys,"
        f" {result.where()}:",
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


def step_table(result: Result) -> list[str]:
    """A training step of GPT-2 beside torch.compile."""
    record = result.record
    lines = [
        f"GPT-2 124M, bfloat16 with float32 AdamW, {result.where()}:",
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


def recipes_table(result: Result) -> list[str]:
    """What rounding costs, recipe by recipe."""
    record = result.record
    tuned, sizes = record["tuned"], record["sizes"]
    lines = [
        f"{record['model']}, unpacked and trained by our own loop until its weights had moved by "
        f"{tuned['moved']:.2f} steps of Q4_1 ({len(tuned['losses'])} steps of {sizes['window']} "
        f"tokens, noise of {sizes['noise']} steps of Q4_1 added {tuned['noises']} times); "
        f"{sizes['samples']} rows of {sizes['length']} tokens looked at, "
        f"{sizes['judged']} others judged; groups of {sizes['group']} columns "
        f"(`bench/recipes.py`, {result.where()}). A share is that "
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


def time_text(seconds: float) -> str:
    """A time with three digits."""
    for scale, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * scale < 1000:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.3g} s"


def products_table(results: list[Result]) -> list[str]:
    """Products of weights that are not of 16 bits, a line for each kind."""
    head = results[0]
    lines = [f"Other products, {head.where()}:", ""]
    for result in results:
        what, least = PRODUCTS[result.kind]
        rows = [r for r in result.record["rows"] if r["m"] >= least and r["ratio"]]
        ratios = [r["ratio"] for r in rows if r.get("dtype") != "bfloat16"]
        lines.append(
            f"- {what}, from {least:,} tokens{result.beside(head)}: "
            f"{statistics.geometric_mean(ratios):.2f}x, {min(ratios):.2f}x to {max(ratios):.2f}x"
        )
    return lines


def each(make: Callable[[Result], list[str]]) -> Make:
    """A table for each result."""
    return lambda results: [line for one in results for line in (*make(one), "")]


@dataclass(frozen=True)
class Part:
    """A table, and the kinds of files that it is made of; one for each machine and date."""

    heading: str
    kinds: str  # a regular expression
    make: Make

    def takes(self, result: Result) -> bool:
        """Whether a file is for this table."""
        return re.fullmatch(self.kinds, result.kind) is not None

    def lines(self, groups: Iterable[list[Result]]) -> list[str]:
        """The table of each group that has files for it."""
        found = [[r for r in group if self.takes(r)] for group in groups]
        return [line for group in found if group for line in (*self.make(group), "")]


MODELS = "## Language models"
PARTS = (
    Part("## CPU", "cpu", each(cpu_table)),
    Part("## Compiling", "compile", each(compile_table)),
    Part("## Compiling", "compile-scale", each(scale_table)),
    Part("## GPU", "gemm(-fp16|-tf32)?", each(gemm_table)),
    Part("## GPU", "|".join(PRODUCTS), products_table),
    Part("## GPU", "memory", each(memory_table)),
    Part("## GPU", "attention", each(attention_table)),
    Part("## GPU", "decode", each(decode_table)),
    Part("## Training", "gpt2-step", each(step_table)),
    Part(MODELS, r"llm(-(?!accuracy|start|cpu).+)?", model_tables.steps),
    Part(MODELS, r"moe(-.+)?", model_tables.experts),
    Part(MODELS, "llm-start", model_tables.start),
    Part(MODELS, r"llm-cpu(-.+)?", model_tables.on_cpu),
    Part("## Quantisation", "recipes", each(recipes_table)),
    Part("## Serving", r"serve-offline-.+", model_tables.offline),
    Part("## Serving", r"serve-rate-.+", model_tables.over_http),
    Part("## Serving", "serve-first-tokens", model_tables.first_tokens),
    Part("## Serving", "serve-prefix", model_tables.prefix),
    Part("## Serving", "speculative", model_tables.guesses),
    Part("## Serving", "lora", model_tables.lora),
)


def shown(results: Iterable[Result]) -> list[Result]:
    """The results that have a table."""
    return [r for r in results if any(part.takes(r) for part in PARTS)]


def machine_lines(results: list[Result]) -> list[str]:
    """Each machine with its date, or the two of a night, and its commits."""
    lines = []
    groups = by_machine(results)
    for machine in sorted(groups, key=lambda name: "cores" in name):  # GPUs first
        group = groups[machine]
        when = " and ".join(sorted({r.day for r in group}))
        commits = list(dict.fromkeys(r.commit for r in group))
        word = "commit" if len(commits) == 1 else "commits"
        lines.append(f"- {machine}: {when}, {word} {', '.join(commits)}")
    return lines


def sections(groups: list[list[Result]]) -> dict[str, list[str]]:
    """The lines below each heading."""
    found: dict[str, list[str]] = {part.heading: [] for part in PARTS}
    for part in PARTS:
        found[part.heading] += part.lines(groups)
    return found


def page(results: list[Result]) -> str:
    """The first page: each machine's newest date."""
    lines = [HEAD, *machine_lines(results)]
    for heading, found in sections(list(by_machine(results).values())).items():
        anchor = heading.removeprefix("## ").lower().replace(" ", "-")
        none = [f"Nothing of these dates; [measured before](results-before.md#{anchor})."]
        lines += ["", heading, "", *(found or none)]
    return tidy(lines)


def page_before(results: list[Result]) -> str:
    """The other page: all older results, a table for each machine and day."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for one in results:
        groups.setdefault((one.day, one.machine), []).append(one)
    lines = [HEAD_BEFORE]
    for heading, found in sections(list(groups.values())).items():
        lines += ["", heading, "", *found] if found else []
    return tidy(lines)


def tidy(lines: list[str]) -> str:
    """One text, with no two empty lines in a row, and none between bullets."""
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines))
    text = re.sub(r"^(- .*)\n\n(?=- )", r"\1\n", text, flags=re.MULTILINE)
    return text.rstrip() + "\n"


def pages(results: Iterable[Result]) -> dict[str, str]:
    """Both pages by file name; every result that has a table is on one of them."""
    found = shown(results)
    now = current(found)
    before = [r for r in found if r not in now]
    return {"results.md": page(now), "results-before.md": page_before(before)}


def main() -> None:
    """Print the pages, or write them."""
    for name, text in pages(kept()).items():
        if "--write" in sys.argv[1:]:
            (DOCS / name).write_text(text)
        else:
            print(text, end="")


if __name__ == "__main__":
    main()

"""The README's table of results, made from the newest files in bench/results.

    python bench/table.py            prints the table
    python bench/table.py --write    puts it into README.md between its two marks
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def newest(kind: str) -> dict[str, Any] | None:
    """The newest result file of a kind, void and partial ones last."""
    files = [json.loads(p.read_text()) for p in (ROOT / "bench/results").glob(f"{kind}-2*.json")]
    return max(files, key=lambda r: r["date"], default=None)


def cpu_table(record: dict[str, Any]) -> list[str]:
    """One row for each case, one line for each bar."""
    lines = ["| case | peer | speed against the peer | ours | peer's |", "|---|---|---|---|---|"]
    for row in record["cases"]:
        if "failed" in row:
            lines.append(f"| {row['name']} | {row['peer']} | failed | | |")
            continue
        note = " (void)" if row["void"] else " (wrong)" if row["wrong"] else ""
        lines.append(f"| {row['name']} | {row['peer']} | {row['ratio']:.2f}x{note} | "
                     f"{time_text(row['ours_seconds'])} | {time_text(row['peer_seconds'])} |")
    lines.append("")
    for v in record["verdicts"]:
        if "mean" in v:
            lines.append(f"- {v['group']}: geometric mean {v['mean']:.2f}x, least "
                         f"{v['least']:.2f}x of {v['cases']} cases")
        else:
            lines.append(f"- {v['group']}: {time_text(v['seconds'])}, value read")
    return [source(record), "", *lines]


def compile_table(record: dict[str, Any]) -> list[str]:
    """Compile and import times."""
    lines = ["", f"- import: {record['import_seconds']:.2f} s"]
    for name, what in (("cold", "compiles cold"), ("warm", "starts from the disk cache")):
        if "failed" not in record[name]:
            lines.append(f"- GPT-2 124M training step {what} in "
                         f"{record[name]['compile_seconds']:.1f} s")
    if "failed" not in record["schedule"]:
        lines.append("- its {kernels} kernels are served by {programs} programs".format(
            **record["schedule"]))
    return lines


def source(record: dict[str, Any]) -> str:
    """Where and when the figures were taken."""
    machine, versions = record["machine"], record["versions"]
    return (f"{machine['cpu']}, {record['threads']} threads, {record['date'][:10]}, commit "
            f"{record['commit']}, torch {versions['torch']}, calibration "
            f"{record['calibration']:.0f} GFLOP/s.")


def time_text(seconds: float) -> str:
    """A time with three digits."""
    for scale, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * scale < 1000:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.3g} s"


def table() -> str:
    """The whole section."""
    lines: list[str] = []
    cpu, compiled = newest("cpu"), newest("compile")
    if cpu is not None:
        lines += cpu_table(cpu)
    if compiled is not None:
        lines += compile_table(compiled)
    return "\n".join(lines) or "No results yet: run `python bench/cpu.py`."


def main() -> None:
    """Print the section, or write it into the README."""
    if "--write" not in sys.argv[1:]:
        print(table())
        return
    path = ROOT / "README.md"
    before, rest = path.read_text().split(BEGIN)
    path.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()

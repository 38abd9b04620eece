"""How exact is each elementwise function? Errors in units of the last place, beside torch's.

    python bench/accuracy.py                 all rows, writes bench/results/accuracy-cpu-<date>.json
    python bench/accuracy.py --count 2000    points of each kind in a row's sample (default 1000)
    python bench/accuracy.py --only sin,cos  some functions, printed and not kept
    python bench/accuracy.py --table         docs/accuracy.md anew from the newest result

Rows, references and bounds are those of tests/tensor/accuracy_table.py, on larger samples: special
values and their pairs, random bits, dense ranges, the ends of ranges. It ends with a fault where a
row is beyond its bound: 2 units of the last place, or torch's own error.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import measure

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "tensor"))
PAGE = ROOT / "docs" / "accuracy.md"
HEAD = """# Accuracy of the elementwise functions

Written by `python bench/accuracy.py --table`. The largest error of each function that was found on
a CPU, in units of the last place of the exact value (mpmath), beside that of PyTorch {torch} on the
same points: special values and their pairs, random bits, dense ranges and the ends of ranges.
tests/tensor/test_accuracy.py holds a smaller sample to the bound: 2 units, or PyTorch's own error
where that is larger. An infinity counts as the power of two after the largest number.

Not in the table are functions whose results are exact, that is, equal to PyTorch's to the last bit
with nan, infinities and the sign of zero: arithmetic, rounding, comparison, `fmod`, `remainder`,
`%`, `//` (exact for every quotient, where PyTorch's remainders of large quotients may be nan).
Nor are `lgamma`, `digamma`, `sinc`, `xlogy` and `logaddexp2`: they are compared with PyTorch's to
1e-5 (tests/tensor/test_names.py).

GPUs compute the same formulas, but float32 `exp`, `exp2` and `tanh` rest on the machine's
`ex2.approx`: at most 3, 2 and 4 units (tests/targets/test_ptx_rules.py). The emitted PTX of every
function runs over a sample in tests/targets/test_ptx_accuracy.py.

Errors of millions are values lost: `gelu`, `tanhshrink`, `logit`, `logaddexp`, `sigmoid`, `silu`
and `mish` are computed by PyTorch's formulas, which cancel or underflow far out, and `hardswish`
by one that overflows. PyTorch's own `sinh`, `cosh` and `erf` lose values in vectors on some
machines.

Measured on {cpu}, {date}, commit {commit}; {points} points in all.

| function | dtype | largest error | PyTorch's | at |
|---|---|---|---|---|
"""


def run(count: int, only: list[str]) -> dict[str, Any]:
    """Measure rows of all dtypes."""
    import accuracy_table as table

    cases, faults = [], []
    for dtype in table.DTYPES:
        for row in table.ROWS:
            if (only and row.covers not in only) or dtype not in row.dtypes:
                continue
            start = time.perf_counter()
            some = count if dtype.endswith(("32", "64")) else max(1, count // 4)
            found = table.measure(row, dtype, some, few=row.exact is not None, seed=1)
            faults += found.wrong
            cases.append(
                {
                    "function": row.name,
                    "dtype": dtype,
                    "exact": row.exact is None,
                    "error": found.error,
                    "torch": found.torch,
                    "place": found.place,
                    "points": found.points,
                    "wrong": found.wrong,
                }
            )
            if row.exact is not None or found.wrong:
                print(
                    f"{row.name:28s} {dtype:9s} {found.error:10.4g} torch {found.torch:10.4g} "
                    f"at {found.place} ({found.points} points, "
                    f"{time.perf_counter() - start:.1f} s)",
                    flush=True,
                )
    return measure.facts(kind="accuracy", count=count, cases=cases, faults=faults)


def page(record: dict[str, Any]) -> str:
    """docs/accuracy.md of a result."""
    lines = []
    for case in record["cases"]:
        if case["exact"]:
            continue
        place = ", ".join(f"{x:.9g}" for x in case["place"])
        lines.append(
            f"| {case['function']} | {case['dtype']} | {_size(case['error'])} | "
            f"{_size(case['torch'])} | {place} |"
        )
    lines.sort(key=lambda line: line.split("|")[1])
    machine = record["machine"]["cpu"] or record["machine"]["system"]
    head = HEAD.format(
        torch=record["versions"]["torch"],
        cpu=machine,
        date=record["date"][:10],
        commit=record["commit"],
        points=sum(c["points"] for c in record["cases"]),
    )
    return head + "\n".join(lines) + "\n"


def _size(error: float) -> str:
    return f"{error:.2f}" if error < 1e3 else f"{error:.1e}"


def main() -> None:
    """Measure, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--only", default="")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        import kept

        record = kept.newest("accuracy-cpu")
        if record is None:
            sys.exit("there is no result yet: run python bench/accuracy.py first")
        PAGE.write_text(page(record))
        return
    only = [name for name in options.only.split(",") if name]
    record = run(options.count, only)
    if not only:
        print(measure.save("accuracy-cpu", record))
    if record["faults"]:
        sys.exit("\n".join(record["faults"]))


if __name__ == "__main__":
    main()

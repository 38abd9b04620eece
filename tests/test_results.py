"""docs/results.md shows each machine's newest date, docs/results-before.md all that is older."""

from __future__ import annotations

import datetime
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench"))

import kept  # noqa: E402
import table  # noqa: E402

FILES = kept.kept()
SHOWN = table.shown(FILES)
NOW = kept.current(SHOWN)
DAY = datetime.timedelta(hours=24)


def result(kind: str, date: str, device: str = "NVIDIA H200", **more: Any) -> kept.Result:
    return kept.Result(kind, {"date": date, "device": device, **more})


def kinds(*results: kept.Result) -> set[tuple[str, str]]:
    return {(r.kind, r.record["date"]) for r in kept.current(results)}


def dates_in(text: str) -> set[str]:
    return set(re.findall(r"\d{4}-\d\d-\d\d", text))


@pytest.mark.parametrize("machine", sorted(kept.by_machine(NOW)))
def test_a_machine_shows_one_date(machine: str) -> None:
    """Of one day, or, where all say their time, within 24 hours."""
    group = kept.by_machine(NOW)[machine]
    if len({r.day for r in group}) > 1:
        times = [r.time for r in group if r.time]
        days = {r.day for r in group if not r.time}
        assert max(times) - min(times) < DAY and days <= {max(r.day for r in group)}
    newest = max(r.day for r in SHOWN if r.machine == machine)
    assert newest == max(r.day for r in group)
    assert len({r.kind for r in group}) == len(group)


def test_the_page_names_no_other_date() -> None:
    """Wherever the first page has a machine and a date, the machine's line at its top has both."""
    page = (ROOT / "docs" / "results.md").read_text()
    top, below = page.split("\n## ", 1)
    lines = dict(re.findall(r"^- (.+?): (\d.+)$", top, re.MULTILINE))
    assert set(lines) == set(kept.by_machine(NOW))
    heads = re.findall(r"^(?!\|).*\d{4}-\d\d-\d\d.*$", below, re.MULTILINE)
    assert heads
    for head in heads:
        (line,) = (line for machine, line in lines.items() if f"{machine}, " in head)
        assert dates_in(head) <= dates_in(line), head
    for row in re.findall(r"^\|.*$", below, re.MULTILINE):
        assert dates_in(row) <= {r.day for r in NOW}, row


@pytest.mark.parametrize("one", SHOWN, ids=lambda r: f"{r.kind} {r.machine} {r.day}")
def test_nothing_is_lost(one: kept.Result) -> None:
    """It is on one of both pages: without it that page has fewer lines."""
    now = one in NOW
    page, name = (table.page, "results") if now else (table.page_before, "results-before")
    others = [r for r in SHOWN if r is not one and (r in NOW) == now]
    text = (ROOT / "docs" / f"{name}.md").read_text()
    below = text.split("\n## ", 1)[1]
    assert page(others).split("\n## ", 1)[1].count("\n") < below.count("\n")


def test_files_without_a_table_are_known() -> None:
    """A new kind gets a table, or a page or decision that quotes it."""
    without = {r.kind for r in FILES} - {r.kind for r in SHOWN}
    assert without <= {
        *("accuracy-cpu", "attention-accuracy", "llm-accuracy", "tokenizer", "gpu-tests"),
        *("attention-sm80", "gemm-sm80", "gemm-sweep", "cpu-attention", "cpu-matmul"),
        *("beside", "bundle-start", "epilogue", "launch", "invariant-cost", "invariant-streams"),
        *("npu-speed", "npu-table", "serve-fuzz", "serve-http", "serve-streams"),
    }


def test_a_newer_day_sends_the_others_to_the_other_page() -> None:
    new, old = result("gemm", "2026-11-20"), result("decode", "2026-11-19")
    assert kinds(new, old) == {("gemm", "2026-11-20")}
    other = result("cpu", "2026-11-18", device="cpu", machine="aarch64, 2 cores")
    assert kinds(new, old, other) == {("gemm", "2026-11-20"), ("cpu", "2026-11-18")}


def test_a_night_is_one_date() -> None:
    early, late = "2026-11-19T22:00:00+00:00", "2026-11-20T03:00:00+00:00"
    assert kinds(result("gemm", early), result("decode", late)) == {
        ("gemm", early),
        ("decode", late),
    }
    day_before = result("gemm", "2026-11-19T02:00:00+00:00")
    assert kinds(day_before, result("decode", late)) == {("decode", late)}
    assert kinds(result("gemm", "2026-11-19"), result("decode", late)) == {("decode", late)}
    assert kinds(result("gemm", early), result("gemm", late)) == {("gemm", late)}


def test_what_names_no_machine_is_not_current() -> None:
    assert not kinds(kept.Result("speculative", {"date": "2026-11-20"}))

"""The table of networks on chips: what it prints is in the file that it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

TABLE = Path(__file__).resolve().parents[2] / "bench" / "npu_table.py"


def test_the_rows_are_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    words = [sys.executable, str(TABLE), "--only", "rms norm", "--chips", "16x16", "--out"]
    said = subprocess.run([*words, str(file)], capture_output=True, text=True, timeout=300)
    assert said.returncode == 0, said.stderr
    record = json.loads(file.read_text())
    assert record["kind"] == "npu_table" and record["commit"] and record["watts"] == 3.0
    assert [row["on"] for row in record["rows"]] == ["16x16", "CPU, measured"]
    assert f"{record['rows'][0]['cycles']:,.0f}" in said.stdout

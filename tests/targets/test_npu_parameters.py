"""Parameter files of NPUs: what they say, and what is wrong with bad ones."""

from __future__ import annotations

import json
import random
from dataclasses import fields
from pathlib import Path

import pytest

from tilegrad.core.errors import UserError
from tilegrad.targets.npu.parameters import BOUNDS, PRESETS, Parameters, preset


def test_presets_stand() -> None:
    assert {n: (preset(n).rows, preset(n).columns) for n in PRESETS} == {
        "edge": (8, 8),
        "16x16": (16, 16),
        "tpu-like": (128, 128),
        "eyeriss-like": (12, 14),
    }
    assert preset("tpu-like").scratchpad_bytes == 8 << 20
    with pytest.raises(UserError, match="unknown preset"):
        preset("gpu")


def test_a_file_is_a_preset_with_changes(tmp_path: Path) -> None:
    pytest.importorskip("tomllib", reason="TOML is read from Python 3.11 on")
    path = tmp_path / "mine.toml"
    path.write_text('preset = "edge"\ndataflow = "os"\nsparse = true\n[energy]\nmac = 0.5\n')
    p = Parameters.load(path)
    assert (p.name, p.rows, p.dataflow, p.sparse, p.energy.mac) == ("mine", 8, "os", True, 0.5)
    assert p.row_elements == 16 and p.stored_bits == 10
    same = tmp_path / "same.json"
    same.write_text(json.dumps(p.to_table()))
    assert Parameters.load(same) == p


@pytest.mark.parametrize(
    ("given", "message", "fits"),
    [
        ({"rows": 0}, "bad rows(?s:.*)1 to 256", "rows = 1"),
        ({"columns": 300}, "bad columns(?s:.*)1 to 256", "columns = 256"),
        ({"rows": 4.5}, "bad rows(?s:.*)a whole number", ""),
        ({"sparse": 1}, "bad sparse", ""),
        ({"dataflow": "rs"}, "bad dataflow(?s:.*)ws or os or is", ""),
        ({"element": "int4"}, "bad element(?s:.*)int8 or bf16", ""),
        ({"weights": "fp8"}, "bad weights(?s:.*)int8 or int4 for int8", ""),
        ({"bank_rows": 1000}, "bad bank_rows(?s:.*)power of two", "512 or 1024"),
        ({"banks": 16, "bank_rows": 8192}, "bad bank_rows(?s:.*)65536", "bank_rows = 4096"),
        ({"lanes": 5}, r"bad lanes(?s:.*)a divisor of columns \(16\)", "4 would fit"),
        ({"sparse": True, "rows": 3}, "bad rows(?s:.*)even", "rows = 4"),
        ({"dram_latency": 2, "dram_bandwidth": 4}, "bad dram_latency(?s:.*)at least 4", "4 would"),
        ({"colums": 4}, "bad field colums(?s:.*)columns", ""),
        ({"energy": {"mac": -1}}, "bad energy.mac(?s:.*)at least 0", ""),
        ({"energy": {"macs": 1}}, "bad field energy.macs", ""),
    ],
)
def test_bad_fields_are_named(given: dict[str, object], message: str, fits: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        Parameters.of(given)
    assert fits in (caught.value.hint or "")


def test_every_bound_holds_at_both_ends() -> None:
    for name, (least, most) in BOUNDS.items():
        for value in (least - 1, most * 2 if isinstance(most, int) else most * 1.1):
            with pytest.raises(UserError, match=f"bad {name}"):
                Parameters(**{name: value})  # type: ignore[arg-type]


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        Parameters.load(tmp_path / "none.toml")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(UserError, match="is not json"):
        Parameters.load(tmp_path / "bad.json")


FIELDS = [f.name for f in fields(Parameters) if f.name not in ("energy", "name")]
ODD = (-5, 0, 3, 255, 70000, 2.5, 1e-3, 1e9, float("nan"), float("inf"), True, "x", "os", None)


def random_tables() -> list[tuple[dict[str, object], dict[str, object]]]:
    """Some fields of a chip and of its energies with numbers and texts of all kinds."""
    r = random.Random(0)
    made: list[tuple[dict[str, object], dict[str, object]]] = [
        ({"dram_bandwidth": 1e-3, "dma_bytes": 128, "clock": 1e5}, {}),
        ({"sparse": True, "rows": 255}, {}),
    ]
    for _ in range(500):
        table = {name: r.choice(ODD) for name in r.sample(FIELDS, r.randint(0, 3))}
        made.append((table, {"mac": r.choice(ODD)} if r.random() < 0.3 else {}))
    return made


def test_what_an_error_says_would_fit_does() -> None:
    """Each error names one field, its bound and a value for it; with those, a file is a chip."""
    for table, energy in random_tables():
        fitted({**table, "energy": energy}, energy)


def fitted(made: dict[str, object], energy: dict[str, object]) -> None:
    for _ in range(12):
        try:
            Parameters.of(made)
            return
        except UserError as error:
            assert "expected" in str(error) and error.hint is not None, error
            name, _, rest = error.hint.partition(" = ")
            assert f"bad {name}" in str(error)
            value = rest.split(" would")[0].split(" or ")[0].strip("'\"")
            known = value in ("True", "False") or value[:1].isdigit()
            number = json.loads(value.lower()) if known else value
            if "." in name:
                energy[name.split(".")[1]] = number
            else:
                made[name] = number
    raise AssertionError(f"nothing fits: {made}")

"""What `--chip` changes, and the table of what a chip did."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import typer

import tilegrad as tg
from tilegrad.cli.on_chip import chip_table, on_chip
from tilegrad.core.errors import UserError
from tilegrad.runtime.device import device


def test_a_chip_is_a_device_with_int8() -> None:
    assert on_chip(None, None, None) == on_chip("cpu", None, "float32") == {}
    found = on_chip("npu", "edge", None)
    assert found == {
        "device": tg.device("npu", chip="edge"),
        "quantization": "int8",
        "dtype": "float32",
    }
    assert on_chip("npu", None, "bfloat16")["dtype"] == "bfloat16"
    with pytest.raises(typer.BadParameter, match="--device npu"):
        on_chip("cuda", "edge", None)
    with pytest.raises(UserError, match="no such chip"):
        on_chip(None, "nothing.toml", None)


def test_the_table_has_what_was_counted() -> None:
    name = tg.device("npu", chip="edge")
    machine: Any = device(name)
    machine.clear()
    assert "0 in 0 launches" in chip_table(name, 0, 0)
    x, w = (tg.tensor(np.ones(s, np.int8), device=name) for s in ((4, 16), (16, 8)))
    tg.jit(lambda x, w: x.to(tg.int32) @ w.to(tg.int32))(x, w).numpy()
    found = chip_table(name, 3, 1)
    cycles = machine.account().counters.cycles
    assert f"{cycles:,}, {cycles // 4:,} a token" in found and "512 in 1 launches" in found

"""Hand-written PTX for the simulator's tests: a whole module around a body, checked by ptxas."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxsim import Launch, TensorMap, simulate

PTXAS = shutil.which("ptxas")


@cache
def assemble(text: str, target: str) -> None:
    """Fail unless ptxas takes the text; skip loudly where there is none."""
    if PTXAS is None:
        pytest.skip("NO PTXAS HERE: hand-written PTX is not checked against the assembler")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.ptx"
        path.write_text(text)
        done = subprocess.run(
            [PTXAS, f"-arch={target}", "-O0", str(path), "-o", f"{folder}/cubin"],
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stdout + done.stderr + text


def module(
    body: str,
    parameters: Sequence[str],
    *,
    target: str = "sm_90a",
    shared: int = 0,
    static: str = "",
    directives: str = "",
) -> str:
    """A module with one entry: parameters are 'pointer', 'value' or 'map', named p0, p1..."""
    kinds = {
        "pointer": ".param .u64 p{}",
        "value": ".param .s64 p{}",
        "map": ".param .align 64 .b8 p{}[128]",
    }
    listed = ",\n\t".join(kinds[kind].format(n) for n, kind in enumerate(parameters))
    dynamic = ".extern .shared .align 1024 .b8 smem[];\n" if shared else ""
    return (
        f".version 8.6\n.target {target}\n.address_size 64\n{dynamic}{static}"
        f".visible .entry kernel(\n\t{listed}\n) {directives}\n{{\n"
        "\t.reg .pred %p<32>;\n\t.reg .b16 %h<64>;\n\t.reg .b32 %r<300>;\n\t.reg .b64 %d<64>;\n"
        f"{body}\n\tret;\n}}\n"
    )


def run(
    body: str,
    arrays: Sequence[np.ndarray],
    *,
    threads: int = 32,
    grid: Sequence[int] = (1,),
    cluster: tuple[int, ...] = (),
    shared: int = 0,
    static: str = "",
    directives: str = "",
    maps: Sequence[TensorMap] = (),
    values: Sequence[int] = (),
    target: str = "sm_90a",
    dependent: bool = False,
    assembled: bool = True,
    **options: Any,
) -> None:
    """Assemble and simulate a body: pointers p0.. first, then maps, then values in order."""
    arguments = (
        *(("pointer", n) for n in range(len(arrays))),
        *(("map", m) for m in maps),
        *(("value", value) for value in values),
    )
    kinds = [kind for kind, _ in arguments]
    text = module(body, kinds, target=target, shared=shared, static=static, directives=directives)
    if assembled:
        assemble(text, target)
    launch = Launch("kernel", arguments, tuple(grid), threads, shared, cluster, dependent)
    simulate(text, launch, arrays, **options)

"""Emits the SystemVerilog of an NPU: the modules of `sv/`, with its parameters and its tables.

The modules are written by hand and take parameters; what is generated are the opcodes (from the
instruction table), the tables of the vector lanes (from the simulator's) and the values of the
top's parameters. Invariant: the same parameters give the same text, and nothing of an instruction
or a table is written twice.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from ...core.fixed import exp_table, reciprocal_table, rsqrt_table
from ...targets.npu.instructions import OPS
from ...targets.npu.parameters import BITS, Parameters

SOURCES = Path(__file__).parent / "sv"
MODULES = (  # in the order tools read them
    "npu_fp",
    "npu_mesh",
    "npu_memory",
    "npu_queue",
    "npu_front",
    "npu_vector",
    "npu_dma",
    "npu_execute",
    "npu_control",
    "npu_top",
)
PARAMETER = re.compile(r"(parameter int (\w+)\s*= )\d+")


def top_parameters(p: Parameters) -> dict[str, int]:
    """The values of the top's parameters."""
    return {
        "ROWS": p.rows,
        "COLUMNS": p.columns,
        "SUMS_STAY": int(p.dataflow == "os"),
        "ELEMENT": p.element_bits,
        "WEIGHT": BITS[p.weights],
        "FLOATING": {"int8": 0, "bf16": 8, "fp16": 5}[p.element],
        "SPARSE": int(p.sparse),
        "STOCHASTIC": int(p.stochastic),
        "BANKS": p.banks,
        "BANK_ROWS": p.bank_rows,
        "SUM_ROWS": p.accumulator_rows,
        "LANES": p.lanes,
        "QUEUE": p.queue,
        "TOKENS": p.tokens,
        "WORDS": p.program_words,
        "DMA": p.dma_bytes,
    }


def words_package() -> str:
    """The opcodes."""
    lines = ["// Opcodes of the instruction set.", "package npu_words;"]
    lines += [f"  localparam logic [3:0] OP_{name.upper()} = 4'd{n};" for name, n in OPS.items()]
    return "\n".join([*lines, "endpackage", ""])


def table_module(name: str, values: np.ndarray) -> str:
    """A table as a module: an index in, 18 bits out."""
    lines = [
        f"module npu_table_{name} (",
        "    input  logic [8:0]  index,",
        "    output logic [17:0] value",
        ");",
        "  always_comb begin",
        "    case (index)",
    ]
    lines += [f"      9'd{i}: value = 18'd{int(v)};" for i, v in enumerate(values)]
    return "\n".join(
        [*lines, "      default: value = 18'd0;", "    endcase", "  end", "endmodule", ""]
    )


def tables() -> str:
    """The tables of exp, reciprocal and reciprocal square root."""
    made = ["// 16 bits after the point; the simulator has the same.\n"]
    found = {"exp": exp_table(), "reciprocal": reciprocal_table(), "rsqrt": rsqrt_table()}
    made += [table_module(name, values) for name, values in found.items()]
    return "\n".join(made)


def design(p: Parameters) -> dict[str, str]:
    """The files of a chip, by name, in the order tools read them."""
    made = {"npu_words.sv": words_package(), "npu_tables.sv": tables()}
    for name in MODULES:
        made[f"{name}.sv"] = (SOURCES / f"{name}.sv").read_text(encoding="utf-8")
    values = top_parameters(p)
    head, body = made["npu_top.sv"].split(") (", 1)
    head = PARAMETER.sub(lambda found: found[1] + str(values[found[2]]), head)
    made["npu_top.sv"] = f"// {p.name}: generated\n{head}) ({body}"
    return made


def write(p: Parameters, folder: Path) -> list[Path]:
    """Writes a chip's files into a folder; their paths in the order tools read them."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, text in design(p).items():
        path = folder / name
        path.write_text(text, encoding="utf-8")
        made.append(path)
    return made


__all__ = ["design", "top_parameters", "write"]

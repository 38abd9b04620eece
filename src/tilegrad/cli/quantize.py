"""`tilegrad quantize`: a model's weights in fewer bits, and what that cost.

Invariant: a report is written whatever the recipe is; numbers that were not measured are not shown.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from ..core.errors import UserError
from . import options
from .progress import Bars
from .terminal import columns, put, size_text

To = Annotated[
    str,
    typer.Option(
        help="int4, gptq-int4, awq-int4, awq-gptq-int4 (or other bits, as gptq-int3), int8 "
        "(SmoothQuant), fp8 or 2:4 (Wanda); of GGUF files also q8_0, q4_k and other block formats.",
        show_default=False,
    ),
]
Out = Annotated[Path, typer.Option(help="A new folder, or a new .gguf file.", show_default=False)]
Text = Annotated[
    Path | None,
    typer.Option(
        help="Text that a recipe looks at, and that perplexity is measured on if no "
        "other is given.",
        show_default=False,
    ),
]
Judged = Annotated[
    Path | None, typer.Option("--eval", help="Text for perplexity.", show_default=False)
]
Group = Annotated[
    int | None,
    typer.Option(
        min=8, help="Columns that share a scale: 128, and 32 in GGUF files.", show_default=False
    ),
]
Samples = Annotated[int, typer.Option(min=1, help="Rows of text that a recipe looks at.")]
Length = Annotated[int, typer.Option(min=8, help="Tokens of a row.")]
Target = Annotated[
    float | None,
    typer.Option(
        min=1.0,
        help="Bits of a weight in the mean, scales included: each layer gets as many as pay most, "
        "rounded as --to says.",
        show_default=False,
    ),
]
SHOWN = 8  # layers that cost most


def quantize(
    model: options.Model,
    to: To,
    out: Out,
    text: Text = None,
    judged: Judged = None,
    group: Group = None,
    samples: Samples = 32,
    length: Length = 256,
    target_bits: Target = None,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Quantise a model: tilegrad quantize FOLDER --to gptq-int4 --text FILE --out FOLDER"""
    from ..core.config import set_threads
    from ..generate.quantise import Wanted, quantise_model

    if threads is not None:
        set_threads(threads)
    seen, asked = _read(text), _read(judged)
    wanted = Wanted(
        to.lower(), seen, asked or seen, group or 0, samples, length, target_bits or 0.0
    )
    begun = time.perf_counter()
    with Bars() as bars:
        report = quantise_model(model, out, wanted, bars.stage)
    record = {**report.record(), "seconds": round(time.perf_counter() - begun, 1)}
    put(json.dumps(record) if as_json else columns(lines(record)))


def _read(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}", op="quantize") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8: {error.reason}", op="quantize") from None
    if not text.strip():
        raise UserError(f"{path}: has no text", op="quantize")
    return text


def lines(record: dict[str, Any]) -> list[tuple[str, str]]:
    """A report as rows of two columns."""
    before, after = record["bytes_before"], record["bytes_after"]
    share = f" ({after / before:.0%})" if before else ""
    found = [
        ("written", record["out"]),
        ("recipe", record["to"]),
        ("size", f"{size_text(before)} -> {size_text(after)}{share}"),
    ]
    if record["bits"] is not None:
        found.append(("bits of a weight", f"{record['bits']:.3f}"))
    kinds = Counter(form for _, form, _ in record["layers"])
    if len(kinds) > 1:
        found += [
            ("  in", f"{form}: 1 layer" if count == 1 else f"{form}: {count} layers")
            for form, count in sorted(kinds.items())
        ]
    first, last = record["perplexity_before"], record["perplexity_after"]
    if first is not None and last is not None:
        found.append(("perplexity", f"{first:.4f} -> {last:.4f} ({last / first - 1:+.2%})"))
    layers = sorted(record["layers"], key=lambda one: -one[2])
    if layers:
        mean = sum(one[2] for one in layers) / len(layers)
        found.append(("error of layers", f"mean {mean:.4f}, of {len(layers)}"))
    found += [(f"  {name}", f"{error:.4f} {form}") for name, form, error in layers[:SHOWN]]
    return [*found, ("time", f"{record['seconds']} s")]


__all__ = ["quantize"]

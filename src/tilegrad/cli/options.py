"""Options that several commands share, each written once.

Invariant: an option that was not given is not passed on, so what it is then is said in one place,
where it is used.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

import typer

Model = Annotated[
    str,
    typer.Argument(
        show_default=False,
        help="smollm2, a .gguf file, a folder, or a Hugging Face id (owner/name).",
    ),
]

# ---- how it runs
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.", show_default=False)]
Chip = Annotated[
    str | None,
    typer.Option(
        help="A chip under design (device npu), a preset or a file; linear layers in int8.",
        show_default=False,
    ),
]
DType = Annotated[
    str | None,
    typer.Option(
        help="What weights that are not quantised are computed in: float32, bfloat16, float16.",
        show_default=False,
    ),
]
KvCacheDType = Annotated[
    Literal["auto", "fp8", "fp8_e4m3", "int8", "bfloat16", "float16", "float32"] | None,
    typer.Option(
        "--kv-cache-dtype",
        metavar="DTYPE",
        help="What keys and values are kept in: auto, fp8 (e4m3), int8, bfloat16, float16 or "
        "float32. By default, auto: what the model's files say, else what it computes in.",
        show_default=False,
    ),
]
Quantization = Annotated[
    Literal["fp8", "int8"] | None,
    typer.Option(
        "--quantization",
        metavar="FORMAT",
        help="What plain weights are rounded to as they are loaded, with the inputs of their "
        "products: fp8 (e4m3 by channel and by token) or int8. By default they stay as they are.",
        show_default=False,
    ),
]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Worker threads on the CPU.", show_default=False)
]
Context = Annotated[
    int | None,
    typer.Option(min=1, help="Most tokens of prompt and answer together.", show_default=False),
]
Determinism = Annotated[
    Literal["fast", "reproducible", "invariant"] | None,
    typer.Option(
        help="What the bits of an answer may depend on: anything; the machine and its other "
        "requests (the default); its own request alone.",
        show_default=False,
    ),
]
RandomWeights = Annotated[
    bool,
    typer.Option(
        "--random-weights",
        help="Draw the weights, for measuring: a folder needs config.json and a tokenizer alone.",
    ),
]
Speculate = Annotated[
    str | None,
    typer.Option(
        metavar="ngram|MODEL",
        help="Guess the next tokens: from the text so far, or by a smaller model.",
        show_default=False,
    ),
]
Guesses = Annotated[
    int | None,
    typer.Option(
        min=1, help="Tokens guessed at once at most, with --speculate.", show_default=False
    ),
]

Lora = Annotated[
    str | None,
    typer.Option(help="A folder with a LoRA adapter, as PEFT saves it.", show_default=False),
]
Loras = Annotated[
    list[str] | None,
    typer.Option(
        "--lora",
        metavar="NAME=FOLDER",
        help="A LoRA adapter, which clients ask for as a model of that name; may be repeated.",
        show_default=False,
    ),
]

# ---- what it writes
System = Annotated[str | None, typer.Option(help="A system message.", show_default=False)]
MaxTokens = Annotated[
    int | None, typer.Option(min=1, help="Most tokens of an answer.", show_default=False)
]
Temperature = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=2.0,
        help="0: always the likeliest token; 1: as the model says.",
        show_default=False,
    ),
]
TopK = Annotated[
    int | None, typer.Option(min=0, help="Only the K likeliest tokens; 0: all.", show_default=False)
]
TopP = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=1.0,
        help="Only the likeliest tokens that make up this share.",
        show_default=False,
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        min=0.0, max=1.0, help="Only tokens this likely beside the likeliest.", show_default=False
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        help="Where random numbers start: the same seed, the same answer.", show_default=False
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        min=0.01,
        help="Above 1: tokens that were there already are less likely.",
        show_default=False,
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="End the answer before this text; may be repeated.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")]


def words(text: str) -> str:
    """An argument as UTF-8, whatever the locale took it for."""
    return os.fsencode(text).decode("utf-8", "replace")


def speculation(speculate: str | None, guesses: int | None) -> dict[str, Any]:
    """Choices of `LLM` about guesses."""
    if guesses is not None and speculate is None:
        raise typer.BadParameter("--guesses is for --speculate")
    return given(speculate=speculate, guesses=guesses)


def given(**values: Any) -> dict[str, Any]:
    """The options that were given, by name."""
    return {name: value for name, value in values.items() if value is not None}


def adapters(folders: list[str] | None) -> dict[str, Any]:
    """`adapters` of an LLM from NAME=FOLDER; nothing where there are none."""
    found: dict[str, str] = {}
    for one in folders or ():
        name, sign, folder = one.partition("=")
        if not (name.strip() and sign and folder) or name in found:
            raise typer.BadParameter(f"--lora {one}: expected NAME=FOLDER, each name once")
        found[name] = os.path.abspath(folder)
    return {"adapters": found} if found else {}


def with_lora(folder: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """What opens a model with one adapter, and what asks for it."""
    if folder is None:
        return {}, {}
    return {"adapters": {"lora": folder}}, {"adapter": "lora"}

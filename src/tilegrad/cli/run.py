"""`tilegrad run`: one prompt, one answer.

Invariant: stdout holds the answer and nothing else (or one JSON object), as far as it came: after
Ctrl-C too, which ends the command with status 130.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer

from ..core.errors import UserError
from . import options
from .on_chip import chip_table, on_chip
from .opening import chat_messages, has_template, open_llm
from .progress import Bars
from .terminal import INTERRUPTED, Answers, is_terminal, put, readable_stdin, status

MOST_BYTES = 64 << 20  # of a prompt; far above any context
Prompt = Annotated[
    str | None,
    typer.Argument(
        show_default=False,
        help="The prompt; text on stdin is put after it. Without one, or with -, stdin is the"
        " prompt.",
    ),
]
Raw = Annotated[bool, typer.Option("--raw", help="Go on from the prompt: no chat template.")]
Stats = Annotated[bool, typer.Option("--stats", help="Say on stderr how fast it was.")]


def run(
    model: options.Model,
    prompt: Prompt = None,
    system: options.System = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    raw: Raw = False,
    device: options.Device = None,
    chip: options.Chip = None,
    dtype: options.DType = None,
    quantization: options.Quantization = None,
    kv_cache_dtype: options.KvCacheDType = None,
    threads: options.Threads = None,
    context: options.Context = None,
    lora: options.Lora = None,
    speculate: options.Speculate = None,
    guesses: options.Guesses = None,
    as_json: options.Json = False,
    stats: Stats = False,
) -> None:
    """Answer a prompt: tilegrad run smollm2 "Why is the sky blue?" """
    if raw and system:
        raise typer.BadParameter("--raw has no system message: there is no chat template")
    text = whole_prompt(prompt)
    sampling = options.given(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop or None,
    )
    with Bars() as bars:
        chosen = options.given(device=device, dtype=dtype, threads=threads, context=context)
        chosen |= options.given(quantization=quantization, kv_cache_dtype=kv_cache_dtype)
        chosen |= (on := on_chip(device, chip, dtype))
        adapters, asked = options.with_lora(lora)
        chosen |= options.speculation(speculate, guesses)
        llm = open_llm(model, bars, requests=1, **chosen, **adapters)
        ids = prompt_ids(llm, text, system and options.words(system), raw)
        pieces = llm.stream(ids, **sampling, **asked)
        answer = Answer(model, pieces, None if as_json else Answers(), llm.tokenizer.ends)
        answer.take(bars)
    answer.finish(stats, len(ids))
    if on:
        status(chip_table(llm.device, len(ids), len(answer.tokens)))


def whole_prompt(prompt: str | None) -> str:
    """The prompt with what stdin has: it is read where it is asked for, or is no terminal."""
    asked = prompt is None or prompt == "-"
    prompt = options.words(prompt or "")
    if not asked and is_terminal(sys.stdin):
        return prompt
    if asked and is_terminal(sys.stdin):
        status("the prompt, ended by Ctrl-D:")
    given = read_stdin()
    if asked:
        if not given.strip():
            raise typer.BadParameter("there is no prompt: give one, or text on stdin")
        return given
    return f"{prompt}\n\n{given}" if given.strip() else prompt


def read_stdin() -> str:
    """All of stdin; its last newline is the shell's, not the prompt's."""
    stream = readable_stdin()
    if stream is None:
        return ""
    data = stream.buffer.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise UserError(
            "stdin is too long for a prompt", op="run", expected=f"at most {MOST_BYTES >> 20} MiB"
        )
    try:
        return data.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UserError(
            "stdin is not UTF-8", op="run", got=f"byte {error.start}: {error.reason}"
        ) from None


def prompt_ids(llm: Any, text: str, system: str | None, raw: bool) -> list[int]:
    """The tokens of a prompt: by the chat template if the model has one."""
    if not raw and not has_template(llm) and not system:
        status("this model has no chat template: it goes on from the prompt, as with --raw")
        raw = True
    if raw:
        return llm.tokenizer.encode(text)
    return llm.tokenizer.encode_chat(chat_messages(text, system))


class Answer:
    """An answer as it comes: shown (or kept for JSON), counted and timed."""

    def __init__(
        self, model: str, pieces: Iterator[Any], shown: Answers | None, ends: Iterable[int] = ()
    ) -> None:
        self.model, self.pieces, self.shown, self.ends = model, pieces, shown, frozenset(ends)
        self.words: list[str] = []
        self.tokens: list[int] = []
        self.finish_word: str = "cancelled"
        self.start = self.first = self.last = time.perf_counter()

    def take(self, bars: Bars) -> None:
        """Take all pieces; Ctrl-C ends it where it is."""
        try:
            for piece in self.pieces:
                self.last = time.perf_counter()
                if not self.tokens:
                    bars.close()
                    self.first = self.last
                if piece.token >= 0 and piece.token not in self.ends:
                    self.tokens.append(int(piece.token))
                self.words.append(piece.text)
                if self.shown is not None:
                    self.shown.write(piece.text)
                self.finish_word = piece.finish or self.finish_word
        except KeyboardInterrupt:
            self.finish_word = "cancelled"
        finally:
            if hasattr(self.pieces, "close"):
                with contextlib.suppress(KeyboardInterrupt):
                    self.pieces.close()
            if self.shown is not None:
                self.shown.end()

    @property
    def rate(self) -> float:
        """Tokens a second, from the second on."""
        seconds = self.last - self.first
        return (len(self.tokens) - 1) / seconds if len(self.tokens) > 1 and seconds > 0 else 0.0

    def finish(self, stats: bool, prompt: int) -> None:
        """Say what is left to say; Ctrl-C gives the command its status."""
        if self.shown is None:
            record = {
                "model": self.model,
                "text": "".join(self.words),
                "finish": self.finish_word,
                "prompt_tokens": prompt,
                "tokens": self.tokens,
                "first_token_seconds": round(self.first - self.start, 4),
                "tokens_per_second": round(self.rate, 2),
            }
            put(json.dumps(record))
        elif self.finish_word == "length" and is_terminal(sys.stderr):
            status(f"[ended at {len(self.tokens)} tokens; --max-tokens and --context allow more]")
        if stats:
            status(f"[a prompt of {prompt} tokens]")
            status(stats_line(len(self.tokens), self.first - self.start, self.rate))
        if self.finish_word == "cancelled":
            raise typer.Exit(INTERRUPTED)


def stats_line(tokens: int, wait: float, rate: float) -> str:
    """How many tokens, how long the first took, how fast the others came."""
    return f"[{tokens} tokens, the first after {wait:.2f} s, then {rate:.1f} a second]"

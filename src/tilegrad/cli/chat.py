'''`tilegrad chat`: a conversation in the terminal.

A line is a message, lines between two `"""` are one, a line that begins with / is a command. The
history goes to the model each time; what no longer fits loses its oldest messages, with a notice.
At a terminal answers are drawn as the markdown they are. Tokens are drawn as the model's makers
advise: the likeliest one each time would soon go round in a loop.
Invariant: the history alternates user and assistant; Ctrl-C ends an answer and keeps what came of
it, and nothing but Ctrl-D, /exit or the end of stdin ends the chat.
'''

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core.errors import TilegradError, UserError
from . import options
from .opening import context_of, has_template, open_llm
from .progress import Bars
from .run import stats_line
from .terminal import Answers, error_text, is_terminal, readable_stdin, status

Read = Callable[[str], "str | None"]
MARK = ">>> "
ROOM = 256  # tokens kept free for an answer
QUOTES = '"""'
UNADVISED = {"temperature": 0.7, "top_p": 0.95}  # where nobody says how tokens are drawn
HELP = """\
/clear          forget the conversation, but for the system message
/system TEXT    give the model a system message; without TEXT, take it away
/save FILE      write the conversation to a new file, as JSON
/stats          tokens and speed of the last answer, and how full the context is
/exit           leave (Ctrl-D too); Ctrl-C ends an answer
Lines between two \"\"\" are one message."""


def chat(
    model: options.Model,
    system: options.System = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    device: options.Device = None,
    dtype: options.DType = None,
    quantization: options.Quantization = None,
    kv_cache_dtype: options.KvCacheDType = None,
    threads: options.Threads = None,
    context: options.Context = None,
    lora: options.Lora = None,
    speculate: options.Speculate = None,
    guesses: options.Guesses = None,
) -> None:
    """Talk with a model; /help says what may be typed."""
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
        adapters, asked = options.with_lora(lora)
        chosen |= options.speculation(speculate, guesses)
        chosen |= options.given(quantization=quantization, kv_cache_dtype=kv_cache_dtype)
        llm = open_llm(model, bars, requests=1, **chosen, **adapters)
    if not has_template(llm):
        raise UserError(
            "this model has no chat template",
            op="chat",
            hint="tilegrad run --raw goes on from a prompt",
        )
    sampling = asked | (advised(model, llm) | sampling if temperature is None else sampling)
    talk = Chat(llm, sampling, system and options.words(system), answers())
    if is_terminal(sys.stdin):
        status(f"{model}, {context_of(llm)} tokens of context; /help, Ctrl-D leaves")
    loop(talk, reader())


def advised(model: str, llm: Any) -> dict[str, Any]:
    """How tokens are drawn where the person does not say and the model's files do not."""
    from ..exchange.fetch import BUILT_IN

    if "temperature" in llm.defaults:
        return {}
    return dict(BUILT_IN[model].sampling if model in BUILT_IN else UNADVISED)


def answers() -> Any:
    """What shows answers: as they are, or drawn as markdown where stdout is a terminal."""
    if not is_terminal(sys.stdout):
        return Answers()
    from .markdown import Console, Rendered

    console = Console(highlight=False)
    return Answers() if console.is_dumb_terminal else Rendered(console)


def reader() -> Read:
    """What reads a line after a mark."""
    if not (is_terminal(sys.stdin) and is_terminal(sys.stdout)):
        return plain_line
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (lines can be edited and called back)
    return typed_line


def typed_line(mark: str) -> str | None:
    """A line that a person types; None for Ctrl-D."""
    try:
        return input(mark)
    except EOFError:
        status("")
        return None


def plain_line(mark: str) -> str | None:
    """A line of stdin, None at its end; no marks where nobody types."""
    if is_terminal(sys.stdin):
        print(mark, end="", file=sys.stderr, flush=True)
    stream = readable_stdin()
    line = "" if stream is None else stream.readline()
    return line.rstrip("\n") if line else None


def loop(talk: Chat, read: Read) -> None:
    """Messages and commands until the end."""
    while True:
        try:
            text = message(read)
        except KeyboardInterrupt:
            status("\n(Ctrl-D leaves)")
            continue
        except UnicodeDecodeError as error:
            status(f"this line is not UTF-8: {error.reason}")
            continue
        if text is None:
            return
        if not text.strip():
            continue
        try:
            if text.startswith("/"):
                if not talk.command(text):
                    return
            else:
                talk.say(text)
        except TilegradError as error:  # one message went wrong; the chat did not
            status(f"error: {error_text(error)}")
        except KeyboardInterrupt:  # it came just after the end of an answer
            status("\n(Ctrl-D leaves)")


def message(read: Read) -> str | None:
    """One message: a line, or all lines between two marks of quotes; None at the end."""
    line = read(MARK)
    if line is None or not line.startswith(QUOTES):
        return line
    line = line[len(QUOTES) :]
    lines = [line]
    while not line.rstrip().endswith(QUOTES):
        more = read("... ")
        if more is None:
            return None
        line = more
        lines.append(line)
    lines[-1] = line.rstrip()[: -len(QUOTES)]
    return "\n".join(lines).strip("\n")


class Chat:
    """A conversation: its messages, and what the last answer cost."""

    def __init__(self, llm: Any, sampling: dict[str, Any], system: str | None, shown: Any) -> None:
        self.llm, self.sampling, self.system, self.shown = llm, sampling, system, shown
        self.history: list[dict[str, str]] = []
        self.last = (0, 0.0, 0.0)  # tokens, seconds to the first, tokens a second after it

    # ---- talking

    def say(self, text: str) -> None:
        """Send a message and show the answer."""
        self.history.append({"role": "user", "content": text})
        try:
            self.make_room()
            answer = self.answer()
        except (TilegradError, KeyboardInterrupt):
            self.history.pop()
            raise
        if answer:
            self.history.append({"role": "assistant", "content": answer})
        else:
            self.history.pop()  # nothing came: as if it had not been asked

    def answer(self) -> str:
        """Show the answer as it comes; Ctrl-C ends it."""
        words: list[str] = []
        count, start = 0, time.perf_counter()
        first = last = start
        pieces = self.llm.chat_stream(self.messages(), **self.sampling)
        finish = None
        try:
            for piece in pieces:
                last = time.perf_counter()
                first = last if not count else first
                count += piece.token >= 0
                words.append(piece.text)
                self.shown.write(piece.text)
                finish = piece.finish or finish
        except KeyboardInterrupt:
            finish = "cancelled"
        finally:
            if hasattr(pieces, "close"):
                with contextlib.suppress(KeyboardInterrupt):
                    pieces.close()
            self.shown.end()
        rate = (count - 1) / (last - first) if count > 1 and last > first else 0.0
        self.last = (count, first - start, rate)
        if finish == "cancelled":
            status("[stopped]")
        elif finish == "length":
            status(f"[ended at {count} tokens; --max-tokens and --context allow more]")
        return "".join(words)

    def messages(self, forgotten: int = 0) -> list[dict[str, str]]:
        """What the model is given: the system message and the history, but for its start."""
        start = [{"role": "system", "content": self.system}] if self.system else []
        return [*start, *self.history[forgotten:]]

    def used(self, forgotten: int = 0) -> int:
        """Tokens that the conversation takes."""
        given = self.messages(forgotten)
        return len(self.llm.tokenizer.encode_chat(given)) if given else 0

    def make_room(self) -> None:
        """Drop the oldest messages until an answer fits; refuse what can never fit."""
        context = context_of(self.llm)
        room = min(self.sampling.get("max_tokens", ROOM), max(context // 4, 1))
        gone, used = 0, self.used()
        while used + room > context and gone + 2 < len(self.history):
            gone += 2  # a question and its answer
            used = self.used(gone)
        if used >= context:
            raise UserError(
                "the message is longer than the context",
                op="chat",
                expected=f"fewer than {context} tokens",
                got=f"{used} tokens",
                hint="--context may allow more",
            )
        if gone:
            del self.history[:gone]
            status(
                f"[the context is full ({context} tokens): "
                f"the oldest {gone} messages are forgotten]"
            )

    # ---- commands

    def command(self, line: str) -> bool:
        """Do what a line with / asks for; whether the chat goes on."""
        name, _, rest = line[1:].partition(" ")
        rest = rest.strip()
        if name in ("exit", "quit", "bye"):
            return False
        known = {
            "help": self.show_help,
            "?": self.show_help,
            "clear": self.clear,
            "system": self.set_system,
            "save": self.save,
            "stats": self.show_stats,
        }
        if name not in known:
            status(f"there is no /{name}\n{HELP}")
        else:
            known[name](rest)
        return True

    def show_help(self, rest: str) -> None:
        """Say what may be typed."""
        status(HELP)

    def clear(self, rest: str) -> None:
        """Forget the conversation."""
        self.history = []
        status("[the conversation is forgotten]")

    def set_system(self, rest: str) -> None:
        """Set or take away the system message."""
        self.system = rest or None
        status("[the system message is set]" if rest else "[there is no system message]")

    def save(self, rest: str) -> None:
        """Write the conversation to a file that is not there yet."""
        if not rest:
            status("/save FILE")
            return
        try:
            with open(Path(rest).expanduser(), "x", encoding="utf-8") as file:
                json.dump(self.messages(), file, indent=2)
                file.write("\n")
        except FileExistsError:
            status(f"{rest} is there already; nothing was written")
        except OSError as error:
            status(f"{rest}: {error.strerror}")
        else:
            status(f"[{len(self.messages())} messages are in {rest}]")

    def show_stats(self, rest: str) -> None:
        """Say what the last answer cost and how full the context is."""
        status(stats_line(*self.last))
        status(f"[{self.used()} of {context_of(self.llm)} tokens of the context are used]")

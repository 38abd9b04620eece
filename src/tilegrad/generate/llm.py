"""`LLM`: a model by its name, and answers from it.

`LLM("smollm2").generate("Once upon a time")`, `.chat("What is a tile?")`, or piece by piece with
`.stream` and `.chat_stream`. Several answers may be on their way at once, in threads too (see
`tasks`). Invariant: a prompt that does not fit is an error before anything runs; closing a stream
frees its request.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..core.config import set_threads
from ..core.errors import UserError, meant
from ..models.decoder.config import DecoderConfig
from ..runtime.limits import limits_of
from ..tensor.placement import default_device, use
from ..tensor.tensor import mode
from .adapters import Adapters, Folders
from .answer import Answer, Piece
from .bundle import VARIANTS, Bundled, open_bundled
from .constraint import SETTINGS as CONSTRAINTS
from .constraint import of_settings
from .draft import open_draft, proposer_of
from .engine import Engine
from .grammar import Grammars
from .load import load_model, room_for
from .request import Request
from .sampling import Sampling
from .steps import Tell
from .task import Task
from .tasks import Tasks

GUESSES = 3  # of a request that a step verifies, if nobody says
Prompt = str | Sequence[int]
Messages = str | Sequence[Mapping[str, Any]]
SETTINGS = (
    "max_tokens",
    "min_tokens",
    "stop",
    "stop_tokens",
    "ignore_end",
    "priority",
    "salt",
    "adapter",
    *CONSTRAINTS,
)  # besides those of Sampling


class LLM:
    """A language model that answers; see the module's docstring."""

    def __init__(
        self,
        name_or_path: str | os.PathLike[str],
        *,
        device: Any = None,
        dtype: Any = None,
        threads: int | None = None,
        context: int | None = None,
        requests: int = 8,
        progress: Tell | None = None,
        determinism: str | None = None,
        adapters: Folders | None = None,
        speculate: Any = None,
        guesses: int | None = None,
        quantization: str | None = None,
        random_weights: bool = False,
        kv_cache_dtype: str = "auto",
        kv_cache_scales: Any = None,
    ) -> None:
        """`progress(stage, done, total)` is told of downloads, loading and compiling.

        The context is the model's, or what memory can hold, or less if less is asked for;
        `requests` run at once at most. At the level of determinism "invariant" an answer does not
        depend on who else is there, to the bit (docs/determinism.md); None is the Config's.
        `adapters` are folders of LoRA adapters by name, of which each request may have one.
        With `speculate` so many next tokens of an answer (`guesses`: 3, or those that a bundle was
        made for) are guessed at most, and verified in one step: "ngram" looks them up in the text
        so far, an LLM, a name or a path is a smaller model with the same words, or an EAGLE head.
        Answers are drawn as without (docs/llm.md).
        With `quantization` plain weights of linear layers and experts are rounded as they are
        loaded, and what they multiply as it comes: "fp8" (e4m3, by channel and by token), or
        "int8", as chips under design take them.
        With `random_weights` they are drawn, for measuring: a folder then needs none.
        Keys and values are kept in `kv_cache_dtype`: "fp8" (e4m3), "int8", or "auto", what the
        files ask for, else the model's dtype. `kv_cache_scales` are (layers, 2, key heads), or
        "calibrated"; None: the files', else 1.0 for fp8, and calibrated for int8.
        """
        if threads is not None:
            set_threads(threads)
        tell = progress or (lambda *_: None)
        made = open_bundled(name_or_path)
        if made is not None and device is None:
            device = made.device
        place = default_device() if device is None else use(device, "LLM")
        if made is not None:
            asked = (adapters, speculate, random_weights, guesses)
            made.refuse(place, dtype, context, requests, *asked)
            kv_cache_dtype, kv_cache_scales = made.cache_of(kv_cache_dtype, kv_cache_scales)
            dtype, context, requests = made.dtype, made.context, made.requests
            guesses = made.guesses or None
        if quantization is not None and (made is not None or adapters):
            text = f"{quantization} takes plain weights"
            raise UserError(text, op="LLM", hint="no bundle, no adapters")
        loaded = load_model(
            name_or_path if made is None else made.model,
            place,
            dtype,
            tell,
            context,
            quantization,
            random_weights,
        )
        self.name, self.path, self.device = os.fspath(name_or_path), loaded.path, place
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.defaults, self.file_bytes = loaded.defaults, loaded.file_bytes
        self.dtype = self.model.norm.weight.dtype
        self.kv_cache_dtype, kept = str(self.dtype), {"cache_dtype": self.dtype}
        if kv_cache_dtype != "auto" or kv_cache_scales is not None or loaded.cache is not None:
            from .cache import kept_for

            found = kept_for(kv_cache_dtype, kv_cache_scales, loaded)
            self.kv_cache_dtype, kept["cache_dtype"] = found.name, found.dtype
            if found.scales is not None:
                kept["cache_scales"] = found.scales
        self.adapters = (
            Adapters(self.model, adapters, requests + 1, place) if adapters else None
        )  # before pages are counted: they take memory
        self.grammars = Grammars(self.tokenizer, self.config.vocabulary)
        how = {"requests": requests, "determinism": determinism, "tell": tell}
        self.engine = self._engine(made, context, speculate, guesses, how, kept)
        self.context = self.engine.context
        self._tasks = Tasks(self.engine)
        self._numbers = itertools.count()

    def _engine(
        self,
        made: Bundled | None,
        context: int | None,
        speculate: Any,
        guesses: int | None,
        how: dict[str, Any],
        kept: dict[str, Any],
    ) -> Engine:
        """The engine, with as many pages as memory has room for beside weights, adapters and a
        draft; of a Bundle, as many as it was made for. A draft's engine is like it in `how`, not in
        how keys and values are `kept`."""
        place, tell, model = self.device, how["tell"], self.model
        limits = limits_of(mode.target or place) if made is None else made.limits
        draft = open_draft(speculate, model, self.tokenizer, place, tell)
        context, pages = room_for(
            model, place, kept["cache_dtype"], how["requests"], context, limits.page, draft
        )
        if made is not None:
            made.check(context, pages)
            pages = made.pages
        sizes = {**how, "device": place, "pages": pages, "page": limits.page, "chunk": limits.chunk}
        sizes["words"] = len(self.tokenizer) or self.config.vocabulary
        engine = Engine(
            model,
            context=context,
            **kept,
            grammars=self.grammars,
            adapters=self.adapters,
            proposer=None if speculate is None else proposer_of(draft, context, **sizes),
            guesses=GUESSES if guesses is None else guesses,
            **sizes,
        )
        if made is not None:
            engine.steps.serve(VARIANTS)
        return engine

    def __repr__(self) -> str:
        return f"LLM({self.name!r}, {self.config.family}, {self.device}, context {self.context})"

    @property
    def config(self) -> DecoderConfig:
        """Sizes and traits of the model."""
        return self.model.config

    # ---- answers ------------------------------------------------------------------------------

    def generate(self, prompt: Prompt | Sequence[Prompt], **settings: Any) -> Any:
        """An Answer to a prompt (text, or ids), or a list of Answers to several, made together.

        `settings` are `max_tokens`, `stop` (strings), `stop_tokens`, `ignore_end` (go on after
        the model's own end), `min_tokens`, `priority`, `salt`, `adapter` (as for a Request), and
        the fields of `Sampling`: temperature, top_k, seed and so on.
        One of `json_schema` (a dict or text), `json_object=True`, `regex`, `choices` (strings)
        and `ebnf` (text) says what every answer must look like.
        """
        if is_one(prompt):
            task = self._task(self._ids(prompt), **settings)  # type: ignore[arg-type]
            return self._tasks.answers([task])[0]
        tasks = [self._task(self._ids(p), **settings) for p in prompt]  # type: ignore[arg-type]
        return self._tasks.answers(tasks)

    def stream(self, prompt: Prompt, **settings: Any) -> Iterator[Piece]:
        """An answer piece by piece, as its tokens come; `settings` as for `generate`."""
        return self._tasks.pieces(self._task(self._ids(prompt), **settings))

    def chat(self, messages: Messages, *, system: str | None = None, **settings: Any) -> Answer:
        """The answer to a chat (or to one message) by the model's template."""
        task = self._task(self.chat_ids(messages, system), **settings)
        return self._tasks.answers([task])[0]

    def chat_stream(
        self, messages: Messages, *, system: str | None = None, **settings: Any
    ) -> Iterator[Piece]:
        """The answer to a chat piece by piece."""
        return self._tasks.pieces(self._task(self.chat_ids(messages, system), **settings))

    def score(self, tokens: Sequence[int], adapter: str = "") -> np.ndarray[Any, Any]:
        """The logprob of each token but the first, given those before it, as float32."""
        with self._tasks.turns.taken():
            return self.engine.score([int(t) for t in tokens], adapter)

    def cancel(self) -> None:
        """End all answers that are on their way."""
        self._tasks.cancel()

    # ---- prompts ------------------------------------------------------------------------------

    def chat_ids(self, messages: Messages, system: str | None = None) -> list[int]:
        """The ids of a chat; a string is the one message of a user."""
        chat = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        if not isinstance(chat, list | tuple) or not chat:
            raise UserError(
                "messages are needed",
                op="chat",
                expected="a string, or a list of {'role': ..., 'content': ...}",
                got=repr(messages)[:80],
            )
        if system is not None:
            chat = [{"role": "system", "content": system}, *chat]
        return self.tokenizer.encode_chat(list(chat))

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if not isinstance(prompt, Sequence | np.ndarray) or not all(map(is_whole, prompt)):
            raise _wrong_prompt(prompt)
        return [int(token) for token in prompt]

    def _task(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        stop_tokens: Sequence[int] | None = None,
        ignore_end: bool = False,
        min_tokens: int = 0,
        priority: int = 0,
        salt: str = "",
        adapter: str = "",
        **sampling: Any,
    ) -> Task:
        """A Task for a prompt that fits; it waits for its first step."""
        constraint = of_settings(sampling)
        sampling = {n: v for n, v in sampling.items() if n not in CONSTRAINTS}
        refuse_unknown(sampling)
        if constraint is not None:
            self.grammars.matcher(constraint)  # compiled here, while others' steps go on
        if len(tokens) >= self.context:
            raise UserError(
                f"the prompt has {len(tokens)} tokens and the context is {self.context}",
                op="LLM",
                expected=f"at most {self.context - 1} tokens, so that an answer fits",
                got=len(tokens),
                hint="shorten the prompt, or ask for a longer context",
            )
        left = self.context - len(tokens)
        more = () if stop_tokens is None else stop_tokens
        if not isinstance(more, Collection | np.ndarray) or not all(map(is_whole, more)):
            raise UserError(
                "stop_tokens are ids", op="LLM", expected="a list of ids", got=repr(more)[:80]
            )
        open_end = ignore_end and constraint is None
        ends = set(more) | (set() if open_end else self.tokenizer.ends)
        request = Request(
            next(self._numbers),
            tuple(tokens),
            Sampling(**{**self.defaults, **sampling}),
            frozenset(ends),
            _fewer(max_tokens, left),
            priority,
            salt,
            min_tokens,
            constraint,
            adapter,
        )
        ends_at = [stop] if isinstance(stop, str) else () if stop is None else stop
        if not isinstance(ends_at, Collection) or not all(isinstance(s, str) for s in ends_at):
            raise UserError("stop is text", op="LLM", expected="strings", got=repr(stop)[:80])
        return Task(request, self.tokenizer, list(ends_at))


def refuse_unknown(settings: Mapping[str, Any]) -> None:
    """An error for a setting that there is not, with the name that may be meant."""
    known = [*SETTINGS, *Sampling.__dataclass_fields__]
    for name in settings:
        if name not in Sampling.__dataclass_fields__:
            raise UserError(
                f"generate has no setting {name!r}",
                op="LLM",
                expected=", ".join(known),
                got=name,
                hint=meant(name, known),
            )


def is_one(prompt: Any) -> bool:
    """Whether a prompt is one (text or ids), not several."""
    if isinstance(prompt, str):
        return True
    if not isinstance(prompt, Sequence | np.ndarray):
        raise _wrong_prompt(prompt)
    return len(prompt) > 0 and all(map(is_whole, prompt))


def is_whole(value: Any) -> bool:
    """Whether a value may be an id."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _wrong_prompt(prompt: Any) -> UserError:
    return UserError(
        "a prompt is text or ids",
        op="LLM",
        got=type(prompt).__name__,
        expected="a string, ids, or a list of those",
    )


def _fewer(asked: Any, left: int) -> Any:
    """How many tokens an answer may have; what is no number is refused later, by its name."""
    if asked is None:
        return left
    return min(asked, left) if isinstance(asked, int) else asked


__all__ = ["LLM"]

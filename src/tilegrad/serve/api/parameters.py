"""What a body says of how an answer is made: sampling, lengths, stops; alike on all routes.

Invariant: what is read here is within the ranges of `Sampling` and of `Limits`, so that the engine
has nothing left to refuse.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..answer.parts import AnswerParser
from ..model import ServedModel
from ..refused import Refused
from ..settings import Limits
from .fields import Fields
from .ids import Ids

WHOLE = (1 << 31) - 1
SEED = (1 << 63) - 1
# No request names a file, a URL, a template or code.
FORBIDDEN = ("chat_template", "lora_path", "documents", "mm_processor_kwargs", "prompt_embeds")
TEMPLATE_FLAGS = ("enable_thinking", "thinking", "add_generation_prompt")
NUMBERS: dict[str, tuple[float, float, bool]] = {
    "temperature": (0.0, 2.0, False),
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0, False),
    "repetition_penalty": (0.0, 1e6, True),
    "presence_penalty": (-2.0, 2.0, False),
    "frequency_penalty": (-2.0, 2.0, False),
}


@dataclass
class Ask:
    """What a client wants, whatever the route: prompts, and how each is answered."""

    prompts: list[list[int]]
    spec: dict[str, Any]  # of the engine's request, but for id and tokens
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    show_special: bool = False
    stream: bool = False
    usage: bool = False  # at the end of a stream
    logprobs: int | None = None  # how many likeliest tokens are shown beside each; None: nothing
    parser: Callable[[], AnswerParser] | None = None  # what takes an answer apart
    fields: Any = None  # what the route keeps for itself
    ids: Ids = field(default_factory=Ids)
    created: int = field(default_factory=lambda: int(time.time()))
    name: str = ""  # by a router, which is told of every token
    made: list[list[int]] | None = None  # ids of each choice, by another replica

    def named(self, model: ServedModel) -> str:
        """What the client calls the model: an adapter has a name of its own."""
        return self.spec.get("adapter") or model.name

    def specs(self) -> list[dict[str, Any]]:
        """One spec for each choice of each prompt."""
        found = []
        seed = self.spec["sampling"].get("seed")
        for tokens in self.prompts:
            for choice in range(self.n):
                spec = {**self.spec, "tokens": tokens}
                if seed is not None and choice:
                    spec["sampling"] = {**spec["sampling"], "seed": wrapped(seed + choice)}
                found.append(spec)
        return found


def wrapped(seed: int) -> int:
    """A seed within 64 bits."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def refuse_foreign(fields: Fields) -> None:
    """Refuse what would have the server read or run something."""
    fields.refuse(*FORBIDDEN, why="is not taken from requests")


def template_flags(fields: Fields) -> dict[str, bool]:
    """Switches of a chat template that a request may set: a few booleans."""
    inner = fields.inner("chat_template_kwargs")
    found = {}
    for name, value in (inner.body if inner else {}).items():
        if name not in TEMPLATE_FLAGS or not isinstance(value, bool):
            raise Refused(
                f"'chat_template_kwargs.{name[:40]}' is not taken from requests; "
                f"of booleans, these are: {', '.join(TEMPLATE_FLAGS)}",
                param="chat_template_kwargs",
                code="unsupported_parameter",
            )
        found[name] = value
    return found


def sampling_of(fields: Fields, model: ServedModel, limits: Limits) -> dict[str, Any]:
    """The fields of `Sampling`, the model's own where the client says nothing."""
    found: dict[str, Any] = dict(model.defaults)
    for name, (low, high, above) in NUMBERS.items():
        value = fields.number(name, low, high, above=above)
        if value is not None:
            found[name] = value
    top_k = fields.whole("top_k", -1, WHOLE)
    if top_k is not None:
        found["top_k"] = top_k
    seed = fields.whole("seed", -SEED - 1, SEED)
    if seed is not None:
        found["seed"] = seed
    bias = bias_of(fields, model, limits)
    if bias:
        found["logit_bias"] = bias
    return found


def bias_of(fields: Fields, model: ServedModel, limits: Limits) -> list[list[float]]:
    """Biases as pairs of id and value: keys of JSON are strings."""
    inner = fields.inner("logit_bias")
    if inner is None:
        return []
    if len(inner.body) > limits.biases:
        raise fields.wrong("logit_bias", f"an object of at most {limits.biases} tokens")
    pairs = []
    for word, value in inner.body.items():
        token = int(word) if word.isascii() and word.isdigit() and len(word) < 10 else -1
        if not 0 <= token < model.vocabulary:
            raise fields.wrong("logit_bias", f"of ids from 0 to {model.vocabulary - 1}")
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 100:
            raise fields.wrong("logit_bias", "of numbers from -100 to 100")
        pairs.append([token, float(value)])
    return pairs


def stops_of(fields: Fields, limits: Limits, name: str = "stop") -> tuple[str, ...]:
    """Stop strings: one, or a list."""
    given = fields.any(name)
    if isinstance(given, str):
        given = [given]
    if given is None:
        return ()
    good = isinstance(given, list) and len(given) <= limits.stop
    if not good or not all(isinstance(s, str) and 1 <= len(s) <= limits.stop_length for s in given):
        raise fields.wrong(
            name,
            f"a string or a list of at most {limits.stop} strings of 1 to "
            f"{limits.stop_length} characters",
        )
    return tuple(dict.fromkeys(given))


def stop_ids_of(fields: Fields, model: ServedModel, limits: Limits) -> list[int]:
    """Ids that end an answer."""
    given = fields.listed("stop_token_ids", limits.stop)
    for token in given:
        if isinstance(token, bool) or not isinstance(token, int):
            raise fields.wrong("stop_token_ids", "a list of ids")
        if not 0 <= token < model.vocabulary:
            raise fields.wrong("stop_token_ids", f"ids from 0 to {model.vocabulary - 1}")
    return given


def spec_of(fields: Fields, model: ServedModel, limits: Limits, most: int | None) -> dict[str, Any]:
    """The engine's request, but for id, tokens and what is fitted to the prompt."""
    asked = stop_ids_of(fields, model, limits)
    ends = [] if fields.flag("ignore_eos") else sorted(model.tokenizer.ends)
    least = fields.whole("min_tokens", 0, WHOLE) or 0
    if most is not None and least > most:
        raise fields.wrong("min_tokens", "at most as many as the answer may have")
    name = fields.text("model", None, 512)
    return {
        **({"adapter": name} if name in model.adapters else {}),
        "sampling": sampling_of(fields, model, limits),
        "stop_tokens": sorted({*asked, *ends}),
        "asked_stops": asked,
        "max_tokens": most,
        "min_tokens": least,
        "priority": fields.whole("priority", -WHOLE, WHOLE) or 0,
    }


def fit(ask: Ask, model: ServedModel, param: str) -> None:
    """Fit the length of the answer to what the context leaves; a prompt that leaves no room, or
    an id that the model has not, is refused."""
    longest = 0
    for tokens in ask.prompts:
        if not tokens:
            raise Refused("the prompt has no tokens", param=param, code="invalid_value")
        if len(tokens) >= model.context:
            raise Refused(
                f"the prompt has {len(tokens)} tokens; the model's context is {model.context}, "
                "prompt and answer together",
                param=param,
                code="context_length_exceeded",
            )
        if max(tokens) >= model.vocabulary or min(tokens) < 0:
            raise Refused(
                f"the prompt has ids that are not from 0 to {model.vocabulary - 1}",
                param=param,
                code="invalid_value",
            )
        longest = max(longest, len(tokens))
    room = model.context - longest
    asked = ask.spec["max_tokens"]
    most = ask.spec["max_tokens"] = room if asked is None else min(asked, room)
    ask.spec["min_tokens"] = min(ask.spec["min_tokens"], most)


def check_model(fields: Fields, model: ServedModel) -> None:
    """Refuse the name of a model that is not served."""
    asked = fields.text("model", None, 512)
    if asked is not None and asked not in model.names:
        raise Refused(
            f"the model '{asked[:100]}' does not exist; this server has {', '.join(model.names)}",
            status=404,
            param="model",
            code="model_not_found",
        )


__all__ = [
    "Ask",
    "check_model",
    "fit",
    "refuse_foreign",
    "sampling_of",
    "spec_of",
    "stops_of",
    "template_flags",
]

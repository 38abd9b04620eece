"""How commands get at a model: found or fetched, then loaded, with bars on the way.

Invariant: nothing is loaded before the model's files were found and read; what this process has
not loaded by then is no cost of a usage error.
"""

from __future__ import annotations

import gc
from typing import Any

from ..core.collector import no_collection
from .progress import Bars


def open_llm(model: str, bars: Bars, **choices: Any) -> Any:
    """The LLM of a name, a path or an id; `choices` are those of `LLM` that were given."""
    from ..exchange.fetch import find_model
    from ..runtime.bundle import is_bundle

    path = model if is_bundle(model) else find_model(model, bars.report)
    with no_collection():
        llm = llm_class()(path, progress=bars.stage, **choices)
        gc.freeze()  # a model stays: no collection need look at it
    if llm.context < choices.get("context", 0):
        bars.line(f"the context is {llm.context} tokens: the model has no more")
    return llm


def llm_class() -> Any:
    """`LLM`, imported when it is needed."""
    from ..generate.llm import LLM

    return LLM


def context_of(llm: Any) -> int:
    """Most tokens of prompt and answer together that a loaded model takes."""
    return int(llm.context)


def has_template(llm: Any) -> bool:
    """Whether the model says how a chat is written."""
    return llm.tokenizer.template_text is not None


def chat_messages(text: str, system: str | None) -> list[dict[str, str]]:
    """A chat of one message, after the system's if there is one."""
    start = [{"role": "system", "content": system}] if system else []
    return [*start, {"role": "user", "content": text}]

"""Text out of decoders: pages, one ragged step, requests that share it, and `LLM` over all."""

from importlib import import_module
from typing import Any

LAZY = {
    "LLM": "llm",
    "Answer": "answer",
    "Piece": "answer",
    "Timing": "answer",
    "Engine": "engine",
    "Request": "request",
    "Produced": "request",
    "Constraint": "constraint",
    "PagePool": "pages",
}


def __getattr__(name: str) -> Any:
    if name in LAZY:
        return getattr(import_module(f".{LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""What a person sets of a server, and the caps on what a client may send.

Invariant: both are whole before anything listens, and never change afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Limits:
    """The most of everything that a request may have."""

    body: int = 8 << 20  # bytes
    header: int = 16 << 10  # bytes of one line or field
    messages: int = 4096
    parts: int = 1024  # of the content of one message
    prompts: int = 256  # of one request
    choices: int = 256  # prompts times n
    n: int = 64
    logprobs: int = 20
    stop: int = 16  # strings, and as many ids
    stop_length: int = 256
    biases: int = 512
    tools: int = 128
    schema: int = 64 << 10  # bytes
    depth: int = 32  # of a schema, and of anything else in a body
    characters: int = 64  # of a prompt, for each token of the context
    slow: int = 4 << 20  # bytes that a client may leave unread
    read: float = 30.0  # seconds for headers and body
    ping: float = 15.0  # seconds between signs of life on a stream


@dataclass(frozen=True)
class Settings:
    """A server: where it listens, whom it serves, which model it runs."""

    model: str
    name: str
    host: str = LOOPBACK
    port: int = 8000
    keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()  # other sites whose pages may use the server
    queue: int = 256  # requests that may wait for a place in the batch
    timeout: float = 600.0  # seconds for one request
    silence: float = 300.0  # seconds after which an engine with work that says nothing is ended
    drain: float = 30.0  # seconds that requests have to end in once the server is to stop
    log_prompts: bool = False
    opening: dict[str, Any] = field(default_factory=dict)  # arguments of LLM
    sampling: dict[str, Any] = field(default_factory=dict)  # where neither client nor model says
    command: tuple[str, ...] = ()  # what starts the engine process, but for its socket
    limits: Limits = Limits()


__all__ = ["LOOPBACK", "Limits", "Settings"]

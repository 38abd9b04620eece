"""An engine process that does what prompts say, for the tiny model's tokens (which are bytes).

The last line of a prompt that begins with `SAY ` is what it answers, then it stops; without one it
counts letters until the answer is as long as it may be. Words elsewhere in a prompt: `SLOW` takes
20 ms a step, `HOLD` gives five tokens and no more while the file `hold` of the opening is there,
`NAN` fails after two tokens, `BOOM` breaks a step, `DIE` kills the process, `STUCK`
never gives a token, `HANG` never ends a step, `BEYOND` gives an id beyond the
vocabulary, `CACHED` had 7 tokens of the prompt in the prefix cache.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tilegrad.core.errors import UserError
from tilegrad.generate.request import Produced
from tilegrad.serve.engine.process import serve

END, LONG = 257, 600.0
MARK = b"\x00assistant\n"  # as this file reads a chat: 256 begins a message


class Script:
    """A request, read; `hold` says whether those that HOLD wait."""

    def __init__(self, request: Any, hold: Callable[[], bool]) -> None:
        self.request, self.hold = request, hold
        data = bytes(t if t < 256 else 0 for t in request.tokens)
        at = data.rfind(MARK)
        prompt = data[: at + len(MARK)] if at >= 0 else data
        self.made = len(data) - len(prompt)  # by an engine before
        self.words = set(re.findall(rb"[A-Z]{3,}", prompt))
        lines = re.findall(rb"SAY ([^\x00\n]*)", prompt)
        said = lines[-1].replace(b"\\n", b"\n") if lines else None
        self.tokens = None if said is None else [*said, END]
        self.count = 0

    def produce(self) -> Produced | None:
        """The next token."""
        if b"STUCK" in self.words:
            return None
        if b"HOLD" in self.words and self.made + self.count >= 5 and self.hold():
            return None
        if b"NAN" in self.words and self.count == 2:
            error = UserError("the logits of the next token are not finite", op="generate")
            return Produced(self.request.id, finished="error", error=error)
        place, self.count = self.made + self.count, self.count + 1
        token = self.tokens[place] if self.tokens else 97 + place % 26
        if b"BEYOND" in self.words:
            token = 10**6
        finished = None
        if token in self.request.stop_tokens:
            finished = "stop"
        elif self.count >= self.request.max_tokens:
            finished = "length"
        if not self.request.sampling.logprobs:
            more = {"cached": 7} if b"CACHED" in self.words else {}
            return Produced(self.request.id, token, finished=finished, **more)
        top = tuple((token + i if token < 200 else token - i, -0.5 - i) for i in range(20))
        top = top[: self.request.sampling.logprobs]
        return Produced(self.request.id, token, -0.5, top, finished)


class ScriptedEngine:
    """What `EngineLoop` needs of an engine."""

    def __init__(self, requests: int, hold: str = "") -> None:
        self.requests, self.file = requests, hold
        self.running: dict[int, Script] = {}
        self.waiting: dict[int, Any] = {}
        prefixes = SimpleNamespace(asked=30, found=20)
        self.pool = SimpleNamespace(pages=64, page=16, available=64, prefixes=prefixes)
        self.batcher = SimpleNamespace(preemptions=3)
        self.adapters = None
        self.grammars = None
        self.speculation = SimpleNamespace(asked=5, guessed=9, true=4)

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, request: Any) -> None:
        if any(not 0 <= t < 258 for t in request.tokens):
            raise UserError("tokens that are not in the vocabulary", op="Engine")
        self.waiting[request.id] = request

    def cancel(self, id: int) -> bool:
        found = self.waiting.pop(id, None) or self.running.pop(id, None)
        return found is not None

    def step(self) -> list[Produced]:
        while self.waiting and len(self.running) < self.requests:
            id, request = next(iter(self.waiting.items()))
            del self.waiting[id]
            self.running[id] = Script(request, lambda: os.path.exists(self.file))
        words = set().union(*(s.words for s in self.running.values()))
        if b"DIE" in words:
            os.kill(os.getpid(), signal.SIGKILL)
        if b"HANG" in words:
            time.sleep(LONG)
        if b"BOOM" in words:
            self.running.clear()
            raise RuntimeError("secret of the inside")
        if words & {b"SLOW", b"STUCK", b"HOLD"}:
            time.sleep(0.02)
        found = [p for s in list(self.running.values()) if (p := s.produce())]
        for one in found:
            if one.finished:
                del self.running[one.id]
        return found


def open_scripted(given: dict[str, Any], tell: Any) -> tuple[Any, dict[str, Any]]:
    """A scripted engine and its facts."""
    tell("load", 1, 2)
    while os.path.exists(given.get("closed", "")):  # a test wants to see a server without an engine
        time.sleep(0.01)
    if given.get("fails"):
        raise UserError("this model cannot be opened", op="LLM")
    if given.get("dies"):
        os._exit(3)
    requests = given.get("requests", 64)
    return ScriptedEngine(requests, given.get("hold", "")), {
        "context": given.get("context", 512),
        "requests": requests,
        "vocabulary": 258,
        "defaults": {},
        "device": "cpu",
        "dtype": "float32",
        "determinism": "reproducible",
        "family": "llama",
        "page": 16,
        "pages": 64,
        "bytes": 1000,
        "adapters": [],
    }


if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[1]), open_scripted))

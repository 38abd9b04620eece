"""One replica as a process of its own: settings on stdin, its address on stdout, until stdin ends.

`python -m tilegrad.serve.router.replica_process` reads one line of JSON, so keys are in no list of
processes and in no file. Invariant: when whoever started it is gone, its stdin ends, and it does.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from dataclasses import asdict
from typing import Any

from ...core.errors import TilegradError
from ..run import run_server
from ..settings import Limits, Settings


def settings_text(settings: Settings) -> str:
    """Settings as a line."""
    return json.dumps(asdict(settings))


def settings_of(text: str) -> Settings:
    """Settings from a line."""
    given: dict[str, Any] = json.loads(text)
    given["limits"] = Limits(**given["limits"])
    tuples = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    return Settings(**{**given, **tuples})


def main() -> int:
    """Serve; the status of the process."""
    settings = settings_of(sys.stdin.readline())
    threading.Thread(target=_watch, daemon=True).start()

    def ready(server: Any, port: int) -> None:
        sys.stdout.write(f"http://{settings.host}:{port}\n")
        sys.stdout.flush()

    try:
        asyncio.run(run_server(settings, ready=ready))
    except TilegradError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _watch() -> None:
    """End this process, as by a signal, when stdin ends."""
    while sys.stdin.read(4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())


__all__ = ["main", "settings_of", "settings_text"]

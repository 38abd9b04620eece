"""Trials in a process of their own: a kernel that hangs or faults ends that process and no more.

A fault of a kernel spoils its process for the GPU, and a hung one cannot be stopped from inside,
so tuning measures in a child. The child is started once and serves one trial after another;
after a fault or a timeout it is killed and the next trial starts another. Invariant: `run`
returns within the time limit and a little, whatever the function does; the parent never opens
the GPU on the child's behalf.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..core.errors import InternalError

START_SECONDS = 120.0  # a child imports the package and what it is to run
END_SECONDS = 5.0
BEGUN = "begun"


@dataclass(frozen=True)
class Outcome:
    """What a trial gave: a value (the seconds measured, say), or the error."""

    value: Any = None
    error: str = ""
    kind: str = "done"  # or 'error', 'timeout', 'crash'

    @property
    def good(self) -> bool:
        """Whether there is a value."""
        return self.kind == "done"


class Worker:
    """A child process that runs functions, one at a time."""

    def __init__(self) -> None:
        self._process: Any = None
        self._pipe: Any = None
        self._owner = os.getpid()

    def run(
        self, function: Callable[..., Any], *arguments: Any, seconds: float = 30.0, **options: Any
    ) -> Outcome:
        """Call a function (one that a fresh process can import) in the child; the limit counts from
        when the child has imported it."""
        try:
            self._start()
        except (OSError, EOFError, InternalError) as error:
            self.close()
            return Outcome(error=f"the worker did not start: {error}", kind="crash")
        try:
            self._pipe.send((function, arguments, options))
        except (BrokenPipeError, OSError):
            return self._died()
        except Exception as error:  # what cannot be pickled
            return Outcome(error=f"cannot be sent to a worker: {error}", kind="error")
        said: Any = None
        for limit in (START_SECONDS, seconds):
            if not self._pipe.poll(limit):
                self.close()
                return Outcome(error=f"stopped after {limit:g} s", kind="timeout")
            try:
                said = self._pipe.recv()
            except (EOFError, OSError):
                return self._died()
            if said != BEGUN:
                break
        outcome, healthy = said
        if not healthy:
            self.close()
        return outcome

    def _start(self) -> None:
        if self._process is not None and self._process.is_alive():
            return
        context = multiprocessing.get_context("spawn")
        self._pipe, far = context.Pipe()
        self._process = context.Process(target=serve, args=(far,), daemon=True)
        self._process.start()
        far.close()
        if not self._pipe.poll(START_SECONDS):
            raise InternalError("tune worker", f"no sign of life in {START_SECONDS:g} s")
        self._pipe.recv()

    def _died(self) -> Outcome:
        self._process.join(END_SECONDS)
        code = self._process.exitcode
        self.close()
        return Outcome(error=f"the worker died (exit code {code})", kind="crash")

    def close(self) -> None:
        """End the child, whatever it is doing."""
        process, self._process = self._process, None
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if process is not None and process.pid is not None:
            process.kill()
            process.join(END_SECONDS)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __del__(self) -> None:
        if self._owner == os.getpid():
            self.close()


def serve(pipe: Any) -> None:
    """The child's loop: functions come in, Outcomes go out."""
    pipe.send("ready")
    while True:
        try:
            function, arguments, options = pipe.recv()
        except EOFError:
            return
        except Exception as error:  # the function cannot be imported here
            pipe.send((Outcome(error=f"cannot be imported: {error}", kind="error"), True))
            continue
        pipe.send(BEGUN)
        outcome = _outcome(function, arguments, options)
        pipe.send((outcome, outcome.good or not _spoilt()))


def _outcome(function: Callable[..., Any], arguments: Any, options: Any) -> Outcome:
    try:
        return Outcome(function(*arguments, **options))
    except BaseException as error:
        lines = traceback.format_exception_only(type(error), error)
        return Outcome(error="".join(lines).strip(), kind="error")


def _spoilt() -> bool:
    """Whether the GPU refuses this process after a kernel's fault."""
    from ..targets.ptx import driver

    try:
        for device in driver._devices.values():
            device.synchronize()
    except Exception:
        return True
    return False

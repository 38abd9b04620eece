"""The command `tilegrad`: see `commands` for all of them.

Invariant: typer and rich are imported by this folder only; an error ends a command with its message
and status 1 (2 for bad usage, 130 for Ctrl-C), without a traceback. What answers a prompt is set up
without the other commands, so that the first word comes sooner.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from ..core.config import config
from ..core.errors import TilegradError
from .flags import App, Commands
from .terminal import INTERRUPTED, error_text, status


def chosen(words: Sequence[str]) -> App:
    """The app with all commands, or with the one that is meant."""
    if list(words[:1]) != ["run"]:
        from .commands import app

        return app
    from .run import run

    alone = App(cls=Commands, add_completion=False)
    alone.callback()(lambda: None)  # so that the command's name is still read
    alone.command("run")(run)
    return alone


def main() -> None:
    """Run the command line."""
    try:
        chosen(sys.argv[1:])(prog_name="tilegrad")
    except KeyboardInterrupt:  # while commands are imported
        status("")
        sys.exit(INTERRUPTED)
    except TilegradError as error:
        status(f"error: {error_text(error)}")
        sys.exit(1)
    except OSError as error:  # a disk, a pipe
        status(
            f"error: {error.filename}: {error.strerror}" if error.filename else f"error: {error}"
        )
        sys.exit(1)
    except Exception as error:
        if config().log_level == "debug":
            raise
        status(
            f"internal error: {type(error).__name__}: {error}\n"
            "  please report this; TILEGRAD_LOG=debug shows where it happened"
        )
        sys.exit(1)


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(name)
    from .commands import app

    return app


__all__ = ["chosen", "main"]


if __name__ == "__main__":
    main()

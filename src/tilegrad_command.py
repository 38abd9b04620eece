"""The command `tilegrad` begins here, beside the package: importing that takes a while, and Ctrl-C
in that time ends the command as a shell expects, without a traceback.

Invariant: importing this module imports nothing of tilegrad.
"""

import signal


def main() -> None:
    """Run the command line."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from tilegrad.cli.main import main as command

    signal.signal(signal.SIGINT, before)
    command()


__all__ = ["main"]

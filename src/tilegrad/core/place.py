"""The place of a result: asked for before the work, so that no work is lost for want of one.

Invariant: asking writes and makes nothing; folders are made when the result is there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import UserError


def check_place(path: str | os.PathLike[str], op: str, *, folder: bool = False) -> None:
    """An error where no file (or folder) can be written at a path, in folders made for it."""
    place = Path(path).absolute()
    there = next(one for one in (place, *place.parents) if os.path.lexists(one))
    if there != place and not there.is_dir():
        raise UserError(f"{path}: cannot be written: {there} is no folder", op=op)
    if there == place and place.is_dir() != folder:
        kind = "it is a file" if folder else "it is a folder"
        raise UserError(f"{path}: cannot be written: {kind}", op=op)
    if os.path.exists(there) and not os.access(there, os.W_OK):  # no link to what is yet to be
        raise UserError(f"{path}: cannot be written: {there} does not allow it", op=op)


@contextmanager
def folder_made(path: Path, op: str) -> Iterator[None]:
    """A file is written at a path: its folders are made, and why it cannot be is an error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}", op=op) from None


__all__ = ["check_place", "folder_made"]

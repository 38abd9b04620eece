"""Server-sent events out of bytes as they come, whatever pieces the network cut them into.

Invariant: an event is given once, when its empty line has come, however long it is.
"""

from __future__ import annotations


class Events:
    """Takes bytes, gives the data of the events that are whole."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def add(self, data: bytes) -> list[bytes]:
        """The data of events that end in these bytes."""
        self._rest += data.replace(b"\r", b"")  # lines may end in CR LF; JSON escapes its own
        if b"\n\n" not in self._rest:
            return []
        *whole, rest = bytes(self._rest).split(b"\n\n")
        self._rest = bytearray(rest)
        return [found for event in whole if (found := data_of(event))]


def data_of(event: bytes) -> bytes:
    """The data of one event; none for a comment (a ping)."""
    lines = [line[5:] for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(line.removeprefix(b" ") for line in lines)


__all__ = ["Events"]

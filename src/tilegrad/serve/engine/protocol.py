"""Frames between the HTTP process and the engine process: a length, then JSON.

| kind     | from   | body                                                                       |
|----------|--------|----------------------------------------------------------------------------|
| open     | HTTP   | which model, and how: the arguments of `LLM`                               |
| add      | HTTP   | a list of requests                                                         |
| cancel   | HTTP   | a list of ids                                                              |
| progress | engine | stage, done, total                                                         |
| ready    | engine | facts of the model: context, requests, vocabulary, ...                     |
| failed   | engine | why the model cannot be opened                                             |
| step     | engine | all that one step made; see `process`                                      |

Invariant: a frame is plain data, checked by its reader; nothing in it is ever run.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

from ...core.errors import InternalError

MOST_BYTES = 256 << 20  # of a frame
_LENGTH = struct.Struct(">I")
_encode = json.JSONEncoder(separators=(",", ":")).encode


def frame(kind: str, body: Any) -> bytes:
    """One frame as bytes."""
    data = _encode([kind, body]).encode()
    if len(data) > MOST_BYTES:
        raise InternalError("serve", f"a frame of {len(data)} bytes")
    return _LENGTH.pack(len(data)) + data


class Frames:
    """Bytes in as they come, whole frames out."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[str, Any]]:
        """Take some more bytes; the frames that are whole now."""
        held = self._data
        held += data
        place = 0
        try:
            while len(held) - place >= 4:
                (count,) = _LENGTH.unpack_from(held, place)
                if count > MOST_BYTES:
                    raise InternalError("serve", f"a frame of {count} bytes")
                if len(held) - place - 4 < count:
                    break
                kind, body = json.loads(held[place + 4 : place + 4 + count])
                place += 4 + count
                yield kind, body
        finally:
            del held[:place]


__all__ = ["Frames", "frame"]

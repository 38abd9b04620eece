"""What a replica has probably seen: prompts cut into chunks, each chunk known by all before it.

A router cannot look into a replica's cache; it remembers what it sent there. Chunks are hashed in a
chain, so a set of hashes is a tree of prefixes, and the longest known start of a prompt is found by
following its chain. Invariant: at most `most` chunks are remembered; the least recent go first.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

CHUNK = 256  # bytes of a prompt's text
MOST_CHUNKS = 1 << 16  # chunks a replica
LONGEST = 1 << 20  # bytes of a prompt that are looked at


def chain(data: bytes, salt: bytes = b"") -> list[bytes]:
    """The hashes of a prompt's chunks; a last part that fills no chunk has none."""
    found, before = [], salt
    for start in range(0, min(len(data), LONGEST) - CHUNK + 1, CHUNK):
        before = hashlib.blake2b(before + data[start : start + CHUNK], digest_size=16).digest()
        found.append(before)
    return found


def prompt_bytes(body: Any) -> bytes:
    """The part of a request's body that a model reads, in the order it does."""
    if not isinstance(body, dict):
        return b""
    parts = list(_texts(body.get("system"))) + list(_texts(body.get("tools")))
    for name in ("instructions", "messages", "input", "prompt"):
        parts += _texts(body.get(name))
    return "\n".join(parts).encode("utf-8", "replace")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list) and value and not isinstance(value[0], dict | list | str):
        yield json.dumps(value)  # ids
    elif isinstance(value, list):
        for item in value:
            if isinstance(item, dict) and "role" in item:
                yield str(item["role"])
                yield from _texts(item.get("content"))
            else:
                yield from _texts(item)
    elif isinstance(value, dict):
        yield value["text"] if isinstance(value.get("text"), str) else json.dumps(value)


class Prefixes:
    """The chunks that were sent to one replica."""

    def __init__(self, most: int = MOST_CHUNKS) -> None:
        self.most = most
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def match(self, hashes: list[bytes]) -> int:
        """How many chunks at the start of a prompt are known."""
        count = 0
        for one in hashes:
            if one not in self._known:
                break
            count += 1
        return count

    def add(self, hashes: list[bytes]) -> None:
        """Remember a prompt. Its end is forgotten before its start."""
        for one in reversed(hashes[: self.most]):
            self._known[one] = None
            self._known.move_to_end(one)
        while len(self._known) > self.most:
            self._known.popitem(last=False)

    def clear(self) -> None:
        """Forget all: the replica was started anew."""
        self._known.clear()


__all__ = ["CHUNK", "Prefixes", "chain", "prompt_bytes"]

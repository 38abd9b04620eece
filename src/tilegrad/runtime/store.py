"""Store: bytes on disk by content hash, shared by every process of a person.

Invariant: `get` gives exactly what some `put` of that key was given, or None. Entries are written
whole (temporary file, then rename) and carry a checksum of key and content, so a torn, damaged or
misplaced entry reads as missing. A Store that cannot write says so once and goes on; it never
fails its caller.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import re
import struct
import time
from collections.abc import Iterator

from ..core.config import config
from ..core.lock import new_lock

LOG = logging.getLogger("tilegrad.store")
MAGIC = b"TGS2"
HEADER = struct.Struct("<4sQ16s")  # magic, length, checksum of key and content
HEX = re.compile(r"[0-9a-f]{8,128}\Z")
FOLDER = re.compile(r"[0-9a-f]{2}\Z")
TEMPORARY = ".tilegrad-part"
STALE_SECONDS = 3600.0
_writes = itertools.count()


def content_key(*parts: str | bytes) -> str:
    """A hash of `parts` in order, fit to be a key."""
    digest = hashlib.blake2b(digest_size=20)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(struct.pack("<Q", len(data)))
        digest.update(data)
    return digest.hexdigest()


class Store:
    """A folder of entries under a cap of bytes; the least recently used leave first."""

    def __init__(self, folder: str, cap_bytes: int, evict_every: int = 64) -> None:
        self.folder = folder
        self.cap_bytes = cap_bytes
        self.evict_every = max(1, evict_every)
        self._lock = new_lock()
        # Short processes put little: start part way, so that some of them sweep.
        self._puts = os.getpid() % self.evict_every
        self._put_bytes = 0
        self._room = 0  # bytes that may be put before the next sweep, by what the last one found
        self._warned = False

    def get(self, key: str) -> bytes | None:
        """The bytes under `key`, or None when missing or damaged."""
        if not self.folder:
            return None
        path = self._path(key)
        try:
            with open(path, "rb") as file:
                data = file.read()
        except OSError:
            return None
        content = _content(key, data)
        if content is None:
            LOG.warning("damaged cache entry dropped: %s", path)
            _remove(path)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return content

    def put(self, key: str, data: bytes) -> None:
        """Keep `data` under `key`; on a full or read-only disk, warn once and go on."""
        size = len(data) + HEADER.size
        if not self.folder or size > self.cap_bytes:
            return
        try:
            self._write(key, data)
        except OSError as error:
            self._warn(error)
            return
        with self._lock:
            self._puts += 1
            self._put_bytes += size
            due = self._puts >= self.evict_every and self._put_bytes >= self._room
            due |= self._put_bytes > self.cap_bytes // 8
            if due:
                self._puts = self._put_bytes = 0
        if due:
            self.evict()

    def evict(self) -> None:
        """Drop least recently used entries until at most the cap is held."""
        entries, now = [], time.time()
        for path, status in self._files():
            if path.endswith(TEMPORARY):
                if now - status.st_mtime > STALE_SECONDS:
                    _remove(path)
            else:
                entries.append((status.st_mtime, status.st_size, path))
        held = sum(size for _, size, _ in entries)
        self._room = max(0, self.cap_bytes - held) // 16  # others may put as much, and more
        if held <= self.cap_bytes:
            return
        goal = self.cap_bytes * 9 // 10
        for _, size, path in sorted(entries):
            if held <= goal:
                break
            _remove(path)
            held -= size

    def clear(self) -> None:
        """Drop every entry."""
        for path, _ in self._files():
            _remove(path)

    def size(self) -> int:
        """Bytes held on disk."""
        return sum(s.st_size for path, s in self._files() if not path.endswith(TEMPORARY))

    def _path(self, key: str) -> str:
        name = key if HEX.match(key) else content_key(key)
        return os.path.join(self.folder, name[:2], name)

    def _write(self, key: str, data: bytes) -> None:
        path = self._path(key)
        folder = os.path.dirname(path)
        os.makedirs(folder, exist_ok=True)
        temporary = f"{path}.{os.getpid()}.{next(_writes)}{TEMPORARY}"
        try:
            with open(temporary, "xb") as file:
                file.write(HEADER.pack(MAGIC, len(data), _checksum(key, data)))
                file.write(data)
            os.replace(temporary, path)
        except BaseException:
            _remove(temporary)
            raise

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            LOG.warning("cannot write the cache in %s (%s); going on without", self.folder, error)

    def _files(self) -> Iterator[tuple[str, os.stat_result]]:
        try:
            with os.scandir(self.folder) as entries:
                folders = [entry.path for entry in entries if FOLDER.match(entry.name)]
        except OSError:
            return
        for folder in folders:
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    ours = HEX.match(entry.name) or entry.name.endswith(TEMPORARY)
                    with contextlib.suppress(OSError):
                        if ours and entry.is_file(follow_symlinks=False):
                            yield entry.path, entry.stat(follow_symlinks=False)


def _checksum(key: str, data: bytes) -> bytes:
    digest = hashlib.blake2b(data, digest_size=16)
    digest.update(key.encode())
    return digest.digest()


def _content(key: str, data: bytes) -> bytes | None:
    if len(data) < HEADER.size:
        return None
    magic, length, checksum = HEADER.unpack_from(data)
    content = data[HEADER.size :]
    if magic != MAGIC or length != len(content) or checksum != _checksum(key, content):
        return None
    return content


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


_stores: dict[tuple[str, int], Store] = {}


def default_store() -> Store:
    """The Store that the Config names."""
    settings = config()
    key = (settings.cache_folder, settings.cache_bytes)
    store = _stores.get(key)
    if store is None:
        store = _stores.setdefault(key, Store(*key))
    return store

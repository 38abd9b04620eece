"""The files of a batch: requests in, a line each; answers out, a line each.

A line in is as OpenAI's batch files have it (`custom_id`, `method`, `url`, `body`), or just the
body of a completion (`prompt`) or of a chat (`messages`). Invariant: a line of the output is whole
or was the last one when the process ended; `Answered` cuts such a torn line off before more come.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ...core.errors import UserError
from ..refused import Refused

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True)
class Line:
    """One request of a batch; `error` where the line is no request."""

    id: str
    url: str = ""
    body: Any = None
    error: Refused | None = None


def read_lines(path: Path) -> Iterator[Line]:
    """The requests of a file, in order."""
    try:
        with path.open("rb") as file:
            for number, data in enumerate(file, 1):
                if data.strip():
                    yield parsed_line(data, number)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}", op="batch") from None


def parsed_line(data: bytes, number: int) -> Line:
    """The request of a line."""
    name = f"line-{number}"
    try:
        given = json.loads(data)
    except (ValueError, RecursionError):
        return Line(name, error=Refused(f"line {number} is not JSON", code="invalid_line"))
    if not isinstance(given, dict):
        return Line(name, error=Refused(f"line {number} is not an object", code="invalid_line"))
    own = given.get("custom_id")
    if own is not None and not isinstance(own, str):
        error = Refused(f"line {number}: 'custom_id' must be a string", code="invalid_line")
        return Line(name, error=error)
    name = own or name
    if "body" not in given:
        body = {key: value for key, value in given.items() if key != "custom_id"}
        return Line(name, CHAT if "messages" in body else COMPLETIONS, body)
    method, url = given.get("method", "POST"), given.get("url", CHAT)
    if method != "POST" or url not in (CHAT, COMPLETIONS):
        error = Refused(
            f"line {number}: a batch has POST {CHAT} and POST {COMPLETIONS}", code="invalid_url"
        )
        return Line(name, error=error)
    return Line(name, url, given["body"])


def check_ids(path: Path) -> int:
    """How many requests a file has; an error where two have one id."""
    seen: set[str] = set()
    for line in read_lines(path):
        if line.id in seen:
            raise UserError(
                f"{path}: two lines have one custom_id",
                op="batch",
                expected="a custom_id of its own for each line",
                got=line.id[:80],
            )
        seen.add(line.id)
    return len(seen)


START = b'{"id": "batch_req-'  # of every line that a batch writes


class Answered:
    """The output of a batch: which ids are in it, and lines that are added."""

    def __init__(self, path: Path, retry_errors: bool = False) -> None:
        """`retry_errors` drops the answers that failed, so that they are asked for once more."""
        self.path = path
        self.ids: set[str] = set()
        self.torn = False  # the last line was cut off
        self._file: BinaryIO | None = None
        if path.exists():
            self._repair(retry_errors)

    def _repair(self, retry_errors: bool) -> None:
        """Learn what is answered; cut off a torn line."""
        kept: list[bytes] = []
        size = dropped = 0
        try:
            with self.path.open("rb") as file:
                for number, data in enumerate(file, 1):
                    if not data.endswith(b"\n"):
                        if number == 1 and data[: len(START)] != START[: len(data)]:
                            raise no_answer(self.path, number)
                        self.torn = True
                        break
                    found = answer_of(data, self.path, number)
                    size += len(data)
                    if retry_errors and not is_good(found):
                        dropped += 1
                        continue
                    self.ids.add(found["custom_id"])
                    kept += [data] if retry_errors else []
            if dropped:
                self._rewrite(kept)
            elif self.torn:
                os.truncate(self.path, size)
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror}", op="batch") from None

    def _rewrite(self, lines: list[bytes]) -> None:
        """Put other lines in the place of the file, all at once."""
        other = self.path.with_name(self.path.name + ".new")
        other.write_bytes(b"".join(lines))
        other.replace(self.path)

    def __enter__(self) -> Answered:
        try:
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise UserError(
                f"{self.path}: cannot be written: {error.strerror}", op="batch"
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def add(self, record: dict[str, Any]) -> None:
        """Write one line."""
        data = json.dumps(record, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        if self._file is not None:
            try:
                self._file.write(data)
            except OSError as error:
                raise UserError(
                    f"{self.path}: cannot be written: {error.strerror}", op="batch"
                ) from None
        self.ids.add(record["custom_id"])


def answer_of(data: bytes, path: Path, number: int) -> dict[str, Any]:
    """A line of the output; a file of something else is not touched."""
    try:
        found = json.loads(data)
        if isinstance(found["custom_id"], str) and found.keys() & {"response", "error"}:
            return dict(found)
    except (ValueError, LookupError, TypeError, AttributeError):
        pass
    raise no_answer(path, number)


def no_answer(path: Path, number: int) -> UserError:
    """The error of a file that is somebody's: a batch adds nothing to it, and cuts nothing off."""
    return UserError(
        f"{path}: line {number} is no answer of a batch",
        op="batch",
        expected="a file that a batch wrote, or a new one",
    )


def is_good(record: dict[str, Any]) -> bool:
    """Whether an answer is one."""
    response = record.get("response") or {}
    return record.get("error") is None and response.get("status_code") == 200


__all__ = ["CHAT", "COMPLETIONS", "Answered", "Line", "check_ids", "is_good", "read_lines"]

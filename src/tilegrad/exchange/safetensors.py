"""safetensors files: mapped, their tensors views of the file, in the Format they are stored in.

The `safetensors` library checks the header (names, types, no holes, no overlaps); what is taken
from it is checked here once more, since the library hands NumPy copies and we want views.
Invariant: every tensor lies within the file and its bytes are those its shape and dtype need;
whatever the bytes are, reading ends in tensors or in a `UserError` that names file and tensor.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import Any, NoReturn

from ..core.errors import UserError
from ..core.format import BY_NAME, PLAIN
from .mapped import MappedFile, Stored, view

HEADER_BYTES = 100 << 20
LARGEST = (1 << 63) - 1
READ = [form.name for form in PLAIN.values()]


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, Stored]:
    """The tensors of a safetensors file by name, mapped."""
    file = MappedFile.open(path)
    header, start = _header(file)
    return {
        name: _tensor(file, name, facts, start)
        for name, facts in header.items()
        if name != "__metadata__"
    }


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """What a safetensors file tells beside its tensors."""
    header, _ = _header(MappedFile.open(path))
    return dict(header.get("__metadata__") or {})


def _header(file: MappedFile) -> tuple[dict[str, Any], int]:
    """The checked header of a file, and where its tensors begin."""
    if file.size < 8:
        _fail(file.path, "header", "the file is cut off", "8 bytes", file.size)
    length = int.from_bytes(file.data[:8].tobytes(), "little")
    if length > min(HEADER_BYTES, file.size - 8):
        _fail(
            file.path,
            "header",
            "its length does not fit the file",
            f"at most {min(HEADER_BYTES, file.size - 8)}",
            length,
        )
    _check_by_library(file.path)
    return parse_json(file.data[8 : 8 + length].tobytes(), f"{file.path}: header"), 8 + length


def _fail(path: str, what: str, why: str, expected: object = None, got: object = None) -> NoReturn:
    text = None if got is None else str(got)[:200]
    raise UserError(f"{path}: {what}: {why}", op="safetensors", expected=expected, got=text)


def _check_by_library(path: str) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError, ValueError) as error:
        _fail(path, "header", str(error)[:300])


def _tensor(file: MappedFile, name: str, facts: Any, start: int) -> Stored:
    what = f"tensor {name[:100]!r}"
    if not isinstance(facts, dict):
        _fail(file.path, what, "not a table", "dtype, shape, data_offsets", facts)
    form = BY_NAME.get(str(facts.get("dtype")))
    if form is None or form.dtype is None:
        _fail(file.path, what, "its dtype is not read", ", ".join(READ), facts.get("dtype"))
    shape, span = _wholes(facts.get("shape")), _wholes(facts.get("data_offsets"))
    if shape is None or span is None or len(span) != 2 or len(shape) > 32:
        _fail(file.path, what, "shape or data_offsets are not whole numbers", got=facts)
    product = 1
    for size in shape:
        product *= max(size, 1)
    if product > LARGEST // 8:
        _fail(file.path, what, "the shape overflows", got=shape)
    begin, end = span
    size = form.storage_bytes(shape)
    if end > file.size - start or begin > end or end - begin != size:
        _fail(
            file.path,
            what,
            "it does not fit the file",
            f"{size} bytes within {file.size - start}",
            span,
        )
    return view(file, name, shape, form, start + begin)


def _wholes(value: Any) -> list[int] | None:
    if not isinstance(value, list):
        return None
    right = all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value)
    return value if right else None


def parse_json(data: bytes, what: str) -> dict[str, Any]:
    """A JSON table whose keys differ, or a UserError that says what is wrong with `what`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            twice = [name for name, times in Counter(n for n, _ in pairs).items() if times > 1]
            raise UserError(f"{what}: a key stands twice", op="json", got=str(twice[:3])[:200])
        return table

    try:
        found = json.loads(data, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        why = "nested too deep" if isinstance(error, RecursionError) else str(error)[:200]
        raise UserError(f"{what}: not JSON: {why}", op="json") from None
    if not isinstance(found, dict):
        raise UserError(
            f"{what}: not a table", op="json", expected="{...}", got=type(found).__name__
        )
    return found

"""A Hugging Face folder's tokenizer: `tokenizer.json` and the files beside it.

The library keeps the file's own normaliser and pre-tokenizer. Two copies of it are held: one that
takes texts of special tokens for tokens, one that takes them for plain words.

Invariant: no code of the folder runs, only JSON and a template's text are read, and an id of a
control token never comes out of text unless the caller asks for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...core.errors import UserError
from .byte_pairs import bytes_of
from .sentencepiece import SPACE
from .special import SpecialToken
from .tokenizer import Tokenizer, byte_of, refuse_surrogates
from .vocabulary import END_TEXTS, MOST_TOKENS

MOST_BYTES, MOST_TEMPLATE_BYTES = 256 << 20, 1 << 20
BARRIER = "\ufdd0\ufdd1\ufdd0"  # a word of no language: what follows it does not start a text


def read_json(path: Path) -> Any:
    """A JSON file of the folder, or {} where it is not there."""
    if not path.is_file():
        return {}
    if path.stat().st_size > MOST_BYTES:
        raise UserError(
            f"{path} is too long",
            op="tokenizer",
            expected=f"at most {MOST_BYTES} B",
            got=path.stat().st_size,
        )
    try:
        return json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON: {error}", op="tokenizer") from None


def load(text: str, path: Path) -> Any:
    """The library's tokenizer of a JSON text, without padding or truncation."""
    import tokenizers

    try:
        found = tokenizers.Tokenizer.from_str(text)
    except BaseException as error:  # the library panics with a class of its own
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise UserError(f"{path} cannot be read: {error}", op="tokenizer") from None
    found.no_padding()
    found.no_truncation()
    return found


class FolderEncoder:
    """The library's tokenizer as an Encoder of plain text."""

    def __init__(self, text: str, path: Path) -> None:
        self.parsing, self.plain = load(text, path), load(text, path)
        self.plain.encode_special_tokens = True
        self.plain.add_tokens([BARRIER])
        self.control: frozenset[int] = frozenset()

    def encode(self, text: str, first: bool) -> list[int]:
        """Ids of text as plain words."""
        if not first:
            return self.without_control(BARRIER + text)[1:]
        return self.without_control(text)

    def without_control(self, text: str) -> list[int]:
        """Ids of text, where a control token that merging gave is spelt out instead."""
        ids = self.plain.encode(text, add_special_tokens=False).ids
        if self.control.isdisjoint(ids):
            return ids
        out: list[int] = []
        for i in ids:
            out += self.spelt(i) if i in self.control else [i]
        return out

    def spelt(self, token: int) -> list[int]:
        """A control token's text, letter by letter."""
        text = self.plain.id_to_token(token) or ""
        parts = [part.id for letter in text for part in self.plain.model.tokenize(letter)]
        return [i for i in parts if i not in self.control]


class FolderTokenizer(Tokenizer):
    """A Tokenizer whose special tokens are cut out by the library, as the file describes them."""

    encoder: FolderEncoder

    def encode_parts(
        self, text: str, special: Sequence[SpecialToken], control: bool, sign: str | None = None
    ) -> list[int]:
        """Ids of text; the library cuts it unless marks are to be taken out of it."""
        refuse_surrogates(text)
        if sign is None:
            if control:
                return self.encoder.parsing.encode(text, add_special_tokens=False).ids
            return self.encoder.without_control(text)
        special = [token for token in special if token.control]
        out: list[int] = []
        started = False
        for part in self.parts(text, special):
            if isinstance(part, SpecialToken):
                out.append(part.id)
            else:
                out += self.encoder.encode(part.replace(sign, ""), not started)
            started = True
        return out

    def parts(self, text: str, special: Sequence[SpecialToken]) -> Iterator[str | SpecialToken]:
        """Text cut at control tokens."""
        from .special import cut

        yield from cut(text, special, True)


def read_folder(path: Path) -> Tokenizer:
    """The tokenizer of a folder or of one `tokenizer.json`."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"no tokenizer at {file}", op="tokenizer", expected="tokenizer.json")
    description = read_json(file)
    if not isinstance(description, dict):
        raise UserError(f"{file} is no tokenizer", op="tokenizer", expected="a JSON object")
    config = read_json(file.parent / "tokenizer_config.json")
    generation = read_json(file.parent / "generation_config.json")
    config = config if isinstance(config, dict) else {}
    encoder = FolderEncoder(json.dumps(description), file)
    special = special_of(encoder.parsing)
    encoder.control = frozenset(t.id for t in special if t.control)
    encoder.control -= unknown_ids(description, encoder)
    texts, pieces, strips = pieces_of(encoder.parsing, description, special, file)
    ids = {text: i for i, text in enumerate(texts)}
    named = {
        name: ids.get(token_text(config.get(f"{name}_token")))
        for name in ("bos", "eos", "pad", "unk")
    }
    prefix, suffix = around(encoder.parsing)
    ends = {ids[text] for text in END_TEXTS if text in ids and any(t.text == text for t in special)}
    ends |= {i for i in [named["eos"], *listed(generation, len(texts))] if i is not None}
    return FolderTokenizer(
        texts,
        pieces,
        special,
        encoder,
        prefix=prefix,
        suffix=suffix,
        bos=named["bos"],
        eos=named["eos"],
        padding=named["pad"],
        unknown=named["unk"],
        ends=ends,
        strips_first_space=strips,
        chat_template=template_of(config, file.parent),
    )


def listed(generation: Any, count: int) -> list[int]:
    """Ids that `generation_config.json` says end an answer."""
    found = generation.get("eos_token_id") if isinstance(generation, dict) else None
    found = found if isinstance(found, list) else [found]
    return [i for i in found if isinstance(i, int) and 0 <= i < count]


def token_text(entry: Any) -> str:
    """The text of a token that a configuration names, as a string or as an object."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else ""


def template_of(config: dict, folder: Path) -> str | None:
    """The chat template: a file of its own, else the configuration's, the default of several."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        if file.stat().st_size > MOST_TEMPLATE_BYTES:
            raise UserError(
                f"{file} is too long",
                op="tokenizer",
                got=file.stat().st_size,
                expected=f"at most {MOST_TEMPLATE_BYTES} B",
            )
        try:
            return file.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{file} is not UTF-8: {error.reason}", op="tokenizer") from None
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {
            entry.get("name"): entry.get("template")
            for entry in found
            if isinstance(entry, dict) and isinstance(entry.get("name"), str)
        }
        found = named.get("default", next(iter(named.values()), None))
    return found if isinstance(found, str) else None


def unknown_ids(description: dict, encoder: FolderEncoder) -> set[int]:
    """The id that the model itself gives for what it does not know."""
    model = description.get("model")
    text = model.get("unk_token") if isinstance(model, dict) else None
    found = encoder.parsing.token_to_id(text) if isinstance(text, str) else None
    return set() if found is None else {found}


def special_of(tokenizer: Any) -> list[SpecialToken]:
    """The tokens that the library cuts out of text."""
    return [
        SpecialToken(token.content, i, token.special, token.lstrip, token.rstrip)
        for i, token in tokenizer.get_added_tokens_decoder().items()
        if token.content
    ]


def around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the file's post-processor puts before and after a text."""
    found = tokenizer.encode("a", add_special_tokens=True)
    inner = len(tokenizer.encode("a", add_special_tokens=False).ids)
    mask = found.special_tokens_mask
    before = next((i for i, special in enumerate(mask) if not special), len(mask))
    return found.ids[:before], found.ids[before + inner :]


def decoder_kinds(decoder: Any) -> list[dict]:
    """The steps of a file's decoder."""
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") == "Sequence":
        return [step for step in decoder.get("decoders", []) if isinstance(step, dict)]
    return [decoder]


def pieces_of(
    tokenizer: Any, description: dict, special: Sequence[SpecialToken], file: Path
) -> tuple[list[str], list[bytes], bool]:
    """Text and bytes of each id, and whether a text's first space is the tokenizer's own."""
    steps = {step.get("type"): step for step in decoder_kinds(description.get("decoder"))}
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    count = max(vocabulary.values(), default=-1) + 1
    if count > MOST_TOKENS:
        raise UserError(
            f"{file} has too large an id",
            op="tokenizer",
            expected=f"ids below {MOST_TOKENS}",
            got=count - 1,
        )
    texts = [""] * count
    for text, i in vocabulary.items():
        texts[i] = text
    whole = {token.id for token in special}
    if "ByteLevel" in steps:
        convert, strips = bytes_of, False
    elif "Metaspace" in steps or "Replace" in steps:
        bytewise = "ByteFallback" in steps

        def convert(text: str) -> bytes:
            found = byte_of(text) if bytewise else text.encode("utf-8")
            return found if len(found) == 1 else text.replace(SPACE, " ").encode("utf-8")

        strips = steps.get("Strip", {}).get("start", 0) > 0
        strips = strips or steps.get("Metaspace", {}).get("prepend_scheme", "never") != "never"
    else:
        raise UserError(
            f"{file} has a decoder that is not supported",
            op="tokenizer",
            expected="ByteLevel, Metaspace or Replace",
            got=list(steps),
        )
    pieces = [t.encode("utf-8") if i in whole else convert(t) for i, t in enumerate(texts)]
    return texts, pieces, strips

"""Text to token ids and back, from a Hugging Face folder or the metadata of a GGUF file.

Invariant: text becomes control tokens only where the caller asks for it (`parse_special`), ids
outside the vocabulary are refused, and the bytes of a decoded answer are those of its tokens one
after the other, so that decoding as tokens arrive gives the same text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ...core.errors import UserError
from .byte_pairs import PairEncoder, bytes_of
from .sentencepiece import SPACE, PieceEncoder
from .special import SpecialToken, by_length, cut, free_mark, mark_all
from .vocabulary import (
    BYTE,
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
    read_vocabulary,
)

if TYPE_CHECKING:
    from .chat import ChatTemplate
    from .detokenize import Detokenizer


class Encoder(Protocol):
    """Text without special tokens to ids."""

    def encode(self, text: str, first: bool) -> list[int]:
        """Ids of a stretch of text; `first` where nothing or a special token is before it."""


class Tokenizer:
    """The tokens of a model: `encode`, `decode`, and chats as ids."""

    def __init__(
        self,
        texts: list[str],
        pieces: Sequence[bytes],
        special: Iterable[SpecialToken],
        encoder: Encoder,
        *,
        hidden: Iterable[int] = (),
        prefix: Sequence[int] = (),
        suffix: Sequence[int] = (),
        bos: int | None = None,
        eos: int | None = None,
        padding: int | None = None,
        unknown: int | None = None,
        ends: Iterable[int] = (),
        strips_first_space: bool = False,
        chat_template: str | None = None,
        ids: dict[str, int] | None = None,
    ) -> None:
        self.texts, self.pieces = texts, pieces
        self.ids = {text: i for i, text in enumerate(texts)} if ids is None else ids
        self.special = by_length(special)
        self.control = frozenset(token.id for token in self.special if token.control)
        self.hidden = self.control | frozenset(hidden)
        self.encoder = encoder
        self.prefix, self.suffix = list(prefix), list(suffix)
        self.bos, self.eos, self.padding, self.unknown = bos, eos, padding, unknown
        self.ends = frozenset(ends)
        self.strips_first_space = strips_first_space
        self.template_text = chat_template
        self._template: ChatTemplate | None = None

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer that the metadata of a GGUF file describes."""
        return from_vocabulary(read_vocabulary(metadata))

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """The tokenizer of a Hugging Face folder, or of its `tokenizer.json`."""
        from .folder import read_folder

        return read_folder(Path(folder))

    def __len__(self) -> int:
        return len(self.texts)

    def __repr__(self) -> str:
        return f"Tokenizer({len(self)} tokens, {len(self.special)} special)"

    # ---- text to ids ------------------------------------------------------------------------

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list:
        """Ids of text, between the tokens the model wants around it if `add_special`.

        Texts of control tokens are plain words unless `parse_special`.
        """
        if not isinstance(text, str):
            raise UserError("text is needed", op="encode", expected="str", got=type(text).__name__)
        ids = self.encode_parts(text, self.special, parse_special)
        return [*self.prefix, *ids, *self.suffix] if add_special else ids

    def encode_parts(
        self, text: str, special: Sequence[SpecialToken], control: bool, sign: str | None = None
    ) -> list[int]:
        """Ids of text cut at special tokens; a mark is taken out once the text is cut."""
        refuse_surrogates(text)
        out: list[int] = []
        first = True
        for part in cut(text, special, control):
            if isinstance(part, SpecialToken):
                out.append(part.id)
            else:
                out += self.encoder.encode(part.replace(sign, "") if sign else part, first)
            first = isinstance(part, SpecialToken)
        return out

    # ---- ids to text ------------------------------------------------------------------------

    def checked(self, token: int) -> int:
        """An id that is in the vocabulary."""
        try:
            number = int(token.__index__())
        except (AttributeError, TypeError):
            number = -1
        if not 0 <= number < len(self.pieces) or isinstance(token, bool):
            raise UserError(
                "no such token", op="decode", expected=f"an id from 0 to {len(self) - 1}", got=token
            )
        return number

    def piece(self, token: int, *, show_special: bool = False) -> bytes:
        """The bytes of one token; none for a hidden one unless `show_special`."""
        token = self.checked(token)
        return b"" if token in self.hidden and not show_special else self.pieces[token]

    def decode(self, ids: Iterable[int], *, show_special: bool = False) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD."""
        data = b"".join(self.piece(token, show_special=show_special) for token in ids)
        if self.strips_first_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def detokenizer(self, **settings: Any) -> Detokenizer:
        """A Detokenizer for one answer of this model, with its settings."""
        from .detokenize import Detokenizer

        return Detokenizer(self, **settings)

    # ---- chats ------------------------------------------------------------------------------

    @property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template."""
        if self._template is None:
            if self.template_text is None:
                raise UserError(
                    "this model has no chat template",
                    op="chat",
                    hint="encode plain text, or set template_text",
                )
            from .chat import ChatTemplate

            self._template = ChatTemplate(self.template_text)
        return self._template

    def token_texts(self) -> dict[str, str]:
        """What a template may call `bos_token`, `eos_token`, `pad_token`, `unk_token`."""
        named = {"bos": self.bos, "eos": self.eos, "pad": self.padding, "unk": self.unknown}
        return {f"{name}_token": "" if i is None else self.texts[i] for name, i in named.items()}

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The text of a chat as the model's template writes it."""
        return self.chat_template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            **{**self.token_texts(), **variables},
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Ids of a chat: control tokens come from the template, never out of a message."""
        from .chat import plain_data

        told = plain_data([list(messages), tools and list(tools), variables], "messages")
        control = [t.text for t in self.special if t.control and len(t.text) > 1]
        sign = free_mark(told)
        marked = mark_all(told[:2], control, sign)
        marked.append({k: mark_all(v, control, sign) for k, v in told[2].items()})
        text = self.render_chat(
            marked[0], tools=marked[1], add_generation_prompt=add_generation_prompt, **marked[2]
        )
        if marked == told:
            return self.encode(text, add_special=False, parse_special=True)
        special = [t for t in self.special if not t.control or len(t.text) > 1]
        return self.encode_parts(text, special, True, sign)


def refuse_surrogates(text: str) -> None:
    """Refuse text that no UTF-8 can hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"half a surrogate pair (U+{ord(text[error.start]):04X}) at character {error.start}",
            op="encode",
            hint="text must be encodable as UTF-8",
        ) from None


def from_vocabulary(vocabulary: Vocabulary) -> Tokenizer:
    """The Tokenizer of a GGUF file's Vocabulary."""
    pieces = vocabulary.model == "llama"
    special = [
        SpecialToken(
            text,
            i,
            vocabulary.kinds[i] != USER_DEFINED,
            strips_right=strips_right(vocabulary, text),
        )
        for i, text in enumerate(vocabulary.texts)
        if vocabulary.kinds[i] in (CONTROL, UNKNOWN, USER_DEFINED)
    ]
    return Tokenizer(
        vocabulary.texts,
        Pieces(vocabulary, pieces),
        special,
        PieceEncoder(vocabulary) if pieces else PairEncoder(vocabulary),
        prefix=[vocabulary.bos] if vocabulary.add_bos and vocabulary.bos is not None else [],
        suffix=[vocabulary.eos] if vocabulary.add_eos and vocabulary.eos is not None else [],
        bos=vocabulary.bos,
        eos=vocabulary.eos,
        padding=vocabulary.padding,
        unknown=vocabulary.unknown,
        ends=vocabulary.ends,
        strips_first_space=pieces and vocabulary.add_space_prefix,
        chat_template=vocabulary.chat_template,
        ids=vocabulary.ids,
    )


def strips_right(vocabulary: Vocabulary, text: str) -> bool:
    """Whether blanks after a special token belong to it: so in Phi-3, which files do not say."""
    name = vocabulary.name.lower()
    is_phi = "phi-3" in name or "phi3" in name
    return is_phi and text not in ("<unk>", "<s>", "<|endoftext|>")


class Pieces(Sequence[bytes]):
    """The bytes of each token, worked out when they are asked for: few of many ever are."""

    def __init__(self, vocabulary: Vocabulary, pieces: bool) -> None:
        self.vocabulary = replace(vocabulary, merges=[], scores=[])  # which take much memory
        self.pieces = pieces

    def __len__(self) -> int:
        return len(self.vocabulary.texts)

    def __getitem__(self, token: Any) -> Any:
        if isinstance(token, slice):
            return [self[i] for i in range(*token.indices(len(self)))]
        return piece_of(self.vocabulary, range(len(self))[token], self.pieces)


def piece_of(vocabulary: Vocabulary, token: int, pieces: bool) -> bytes:
    """The bytes a token stands for."""
    text, kind = vocabulary.texts[token], vocabulary.kinds[token]
    if kind in (CONTROL, UNKNOWN) or (kind == USER_DEFINED and not pieces):
        return text.encode("utf-8", "replace")
    if not pieces:
        return bytes_of(text)
    if kind == BYTE:
        return byte_of(text)
    return text.replace(SPACE, " ").encode("utf-8", "replace")


def byte_of(text: str) -> bytes:
    """The byte of a token such as `<0x0A>`; other texts stand for themselves."""
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return bytes([int(text[3:5], 16)])
        except ValueError:
            pass
    return text.encode("utf-8", "replace")

"""Text while tokens arrive: whole characters, stop strings over token boundaries, spaces."""

from __future__ import annotations

import random
import time

import pytest

from tilegrad.core.errors import UserError
from tilegrad.models.tokens.detokenize import Detokenizer, StopStrings
from tilegrad.models.tokens.special import SpecialToken
from tilegrad.models.tokens.tokenizer import Tokenizer


class NoEncoder:
    """Encodes nothing: these tests make their own ids."""

    def encode(self, text: str, first: bool) -> list[int]:
        raise AssertionError(text)


def of_pieces(
    pieces: list[bytes], control: tuple[int, ...] = (), strips: bool = False
) -> Tokenizer:
    """A tokenizer whose tokens stand for given bytes."""
    texts = [f"t{i}" for i in range(len(pieces))]
    special = [SpecialToken(texts[i], i, True) for i in control]
    return Tokenizer(texts, pieces, special, NoEncoder(), strips_first_space=strips)


def cuttings(chance: random.Random, data: bytes) -> list[bytes]:
    """Bytes cut at random places, in the middle of characters too."""
    out = []
    while data:
        size = chance.randint(1, 4)
        out.append(data[:size])
        data = data[size:]
    return out


def test_text_is_the_same_however_it_is_cut() -> None:
    chance = random.Random(0)
    text = "naïve 👩‍👩‍👧 日本語\u0000 e\u0301 \U0010ffff end"
    for _ in range(200):
        pieces = cuttings(chance, text.encode())
        stream = Detokenizer(of_pieces(pieces))
        given = [stream.add(i) for i in range(len(pieces))]
        assert "".join(given) + stream.finish() == text
        assert all("\ufffd" not in part for part in given)


def test_invalid_bytes_become_one_sign_and_match_decode() -> None:
    chance = random.Random(1)
    for _ in range(300):
        values = chance.choices([0x41, 0xE2, 0x82, 0xAC, 0xFF, 0xF0, 0x9F], k=12)
        pieces = cuttings(chance, bytes(values))
        tokenizer = of_pieces(pieces)
        stream = tokenizer.detokenizer()
        text = stream.add_all(range(len(pieces))) + stream.finish()
        assert text == tokenizer.decode(range(len(pieces)))


def test_half_a_character_waits_and_ends_as_a_sign() -> None:
    stream = Detokenizer(of_pieces([b"a\xf0\x9f", b"\x98", b"\x80"]))
    assert [stream.add(0), stream.add(1)] == ["a", ""]
    assert stream.finish() == "\ufffd"
    assert stream.add(2) == ""


def slow_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Text before the stop string that ends first, the longest of those."""
    ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    if not ends:
        return text, None
    end, size, stop = min(ends)
    return text[: end + size], stop


def test_stop_strings_against_a_search_of_the_whole() -> None:
    chance = random.Random(2)
    stopped = 0
    for _ in range(3000):
        stops = [
            "".join(chance.choices("abß", k=chance.randint(1, 5)))
            for _ in range(chance.randint(1, 4))
        ]
        text = "".join(chance.choices("abßc", k=chance.randint(0, 20)))
        pieces = cuttings(chance, text.encode())
        stream = Detokenizer(of_pieces(pieces), stop=stops)
        given = stream.add_all(range(len(pieces))) + stream.finish()
        assert (given, stream.stopped) == slow_stop(text, stops), (text, stops)
        stopped += stream.stopped is not None
    assert 500 < stopped < 2990


def test_only_what_could_stop_is_held() -> None:
    pieces = [b"Hello \n", b"\nUs", b"e", b"r:", b" x"]
    stream = Detokenizer(of_pieces(pieces), stop=["\n\nUser:", "###"])
    assert [stream.add(0), stream.add(1), stream.add(2)] == ["Hello ", "", ""]
    assert stream.add(3) == "" and stream.stopped == "\n\nUser:"
    assert stream.add(4) == "" and stream.finish() == ""
    stream = Detokenizer(of_pieces([b"\n\nUs", b"ed"]), stop=["\n\nUser:"])
    assert [stream.add(0), stream.add(1)] == ["", "\n\nUsed"]
    stream = Detokenizer(of_pieces([b"a##"]), stop=["###"])
    assert (stream.add(0), stream.finish()) == ("a", "##")


def test_stop_strings_can_be_kept_and_put_off() -> None:
    pieces = [b"a", b"END", b"b", b"END", b"c"]
    stream = Detokenizer(of_pieces(pieces), stop=["END"], include_stop=True, minimum_tokens=2)
    assert stream.add_all(range(5)) == "aENDbEND"
    assert stream.stopped == "END"


def test_first_space_belongs_to_the_tokenizer_unless_text_goes_on() -> None:
    tokenizer = of_pieces([b"<s>", b" Hello", b" world"], control=(0,), strips=True)
    ids = [0, 1, 2]
    assert tokenizer.decode(ids) == tokenizer.detokenizer().add_all(ids) == "Hello world"
    assert tokenizer.detokenizer(continues=True).add_all(ids) == " Hello world"
    assert tokenizer.decode(ids, show_special=True) == "<s> Hello world"
    assert tokenizer.detokenizer(show_special=True).add_all(ids) == "<s> Hello world"


def test_time_does_not_grow_with_the_answer() -> None:
    tokenizer = of_pieces([b"ab", b"a", b"\xe2\x82", b"\xac"])
    stream = tokenizer.detokenizer(stop=["a" * 4000 + "b"])
    start = time.process_time()
    for _ in range(5000):  # a long held text would make this quadratic if it were looked at anew
        stream.add(1)
        stream.add(2)
        stream.add(3)
    assert time.process_time() - start < 15  # about 0.1 s


def test_bad_stop_strings_and_ids() -> None:
    tokenizer = of_pieces([b"a"])
    for stops in ([""], [1], ["x"] * 0 + [str(i) for i in range(65)], ["x" * 5000]):
        with pytest.raises(UserError, match="stop"):
            tokenizer.detokenizer(stop=stops)
    for token in (-1, 1, None, "a", 0.0, True):
        with pytest.raises(UserError, match="no such token"):
            tokenizer.detokenizer().add(token)
    assert StopStrings("one").stops == ["one"]

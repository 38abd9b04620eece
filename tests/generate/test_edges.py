"""LLM at its edges: odd prompts and settings, full contexts, neighbours of every kind."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_model import END, write_file, write_folder

import tilegrad as tg
from tilegrad.core.errors import UserError
from tilegrad.exchange.gguf import read_gguf
from tilegrad.exchange.gguf_write import write_gguf
from tilegrad.generate.llm import LLM


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(write_file(tmp_path_factory.mktemp("model") / "tiny.gguf"), requests=4)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = write_file(tmp_path_factory.mktemp("model") / "long.gguf", context=8192)
    return LLM(path, requests=2)


@pytest.fixture(autouse=True)
def nothing_stays(llm: LLM) -> Any:
    """Whatever a test does, slots and pages are free after it."""
    yield
    engine = llm.engine
    engine.batcher.check()
    assert engine.pool.available == engine.pool.pages
    assert len(engine.batcher.slots) == engine.requests
    assert not engine.busy and not llm._tasks


@tg.jit
def forward(model: Any, given: Any) -> Any:
    """Logits of all tokens."""
    return model(given)


def logits(llm: LLM, known: list[int]) -> Any:
    """Logits of a plain forward pass over all tokens, in a window of one of few sizes."""
    sizes = (32, 128, 1100, 5100)
    window = np.zeros((1, next(size for size in sizes if size >= len(known))), np.int64)
    window[0, : len(known)] = known
    with tg.no_grad():
        return forward(llm.model, tg.tensor(window)).numpy()[0, : len(known)].astype(np.float64)


PROMPTS: list[Any] = [
    None,
    5,
    2.5,
    {"a": 1},
    {"a"},
    (x for x in "ab"),
    "",
    [[]],
    ["a", ""],
    ["a", None],
    ["a", 5],
    [1.5, 2.0],
    np.array([1.0, 2.0]),
    [True, False],
    [-1],
    [258],
    [10**30],
    "a\ud800b",
    [["a"]],
    [[65], [None]],
]


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda p: repr(p)[:20])
def test_what_is_no_prompt(llm: LLM, prompt: Any) -> None:
    with pytest.raises(UserError):
        llm.generate(prompt, max_tokens=2)


SETTINGS: list[dict[str, Any]] = [
    {"max_tokens": 0},
    {"max_tokens": -1},
    {"max_tokens": True},
    {"max_tokens": "5"},
    {"max_tokens": 2.5},
    {"stop": [""]},
    {"stop": ""},
    {"stop": [None]},
    {"stop": 5},
    {"stop": 0},
    {"stop": b"a"},
    {"stop": [["a"]]},
    {"stop": ["x" * 5000]},
    {"stop": [str(i) for i in range(65)]},
    {"stop_tokens": 5},
    {"stop_tokens": ["a"]},
    {"stop_tokens": [2.5]},
    {"logit_bias": {258: 1.0}},
    {"logit_bias": {65: float("nan")}},
    {"temperature": float("nan")},
    {"seed": 1 << 64},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: repr(s)[:30])
def test_what_is_no_setting(llm: LLM, settings: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        llm.generate("a", **{"max_tokens": 2, **settings})


def test_prompts_of_all_kinds(llm: LLM) -> None:
    assert llm.generate([]) == []
    wanted = [llm.generate(p, max_tokens=4).tokens for p in ("A", "BC")]
    mixed = llm.generate(["A", [66, 67], np.array([66, 67]), (65,)], max_tokens=4)
    assert [a.tokens for a in mixed] == [wanted[0], wanted[1], wanted[1], wanted[0]]
    rows = llm.generate(np.array([[66, 67], [66, 67]]), max_tokens=4)
    assert [a.tokens for a in rows] == [wanted[1]] * 2
    assert llm.generate("A", max_tokens=4, stop=None, stop_tokens=None).tokens == wanted[0]
    assert len(llm.generate("\0", max_tokens=4).tokens) == 4


def test_special_tokens_alone(llm: LLM) -> None:
    for token in (256, END):
        answer = llm.generate([token], max_tokens=3, ignore_end=True)
        assert answer.tokens[0] == logits(llm, [token])[-1].argmax()
    assert llm.generate("<|im_end|>", max_tokens=1).prompt_tokens == len("<|im_end|>")


def test_one_token_each(llm: LLM) -> None:
    answers = llm.generate(list("abcdefg"), max_tokens=1)
    assert [a.tokens for a in answers] == [llm.generate(p, max_tokens=1).tokens for p in "abcdefg"]
    assert {a.finish for a in answers} == {"length"}


def test_one_ends_at_once_and_the_others_go_on(llm: LLM) -> None:
    prompts = ["Once", "tiles", "xyz"]
    free = [a.tokens for a in llm.generate(prompts, max_tokens=20)]
    for number in range(3):
        stop = free[number][0]
        found = llm.generate(prompts, max_tokens=20, stop_tokens=[stop])
        assert found[number].tokens == () and found[number].text == ""
        assert found[number].finish == "stop"
        for tokens, answer in zip(free, found):
            end = tokens.index(stop) if stop in tokens else len(tokens)
            assert answer.tokens == tokens[:end]


def test_contexts_that_are_full(llm: LLM) -> None:
    prompts = ["x" * 127, "y" * 126, "z" * 127, "w" * 100, "v" * 127]
    answers = llm.generate(prompts, ignore_end=True)
    assert [len(a.tokens) for a in answers] == [1, 2, 1, 28, 1]
    assert {a.finish for a in answers} == {"length"}
    for prompt, answer in zip(prompts, answers):
        known = llm.tokenizer.encode(prompt) + list(answer.tokens[:-1])
        assert answer.tokens[-1] == logits(llm, known)[-1].argmax()


def test_a_stop_string_that_never_comes(llm: LLM) -> None:
    """What could still become one is held back, and comes at the end."""
    plain = llm.generate("tiles", max_tokens=30)
    last = plain.text[-1]
    pieces = list(llm.stream("tiles", max_tokens=30, stop=[last + "\u2603" * 40, "\u2603"]))
    assert "".join(p.text for p in pieces) == plain.text and pieces[-1].finish == "length"


def test_pages_and_chunks_at_their_edges(long: LLM) -> None:
    random = np.random.default_rng(0)
    for count in (63, 64, 65, 511, 512, 513, 1025):
        tokens = random.integers(0, 256, count).tolist()
        made = list(long.generate(tokens, max_tokens=3, ignore_end=True).tokens)
        found = logits(long, tokens + made)[count - 1 : -1].argmax(-1)
        assert made == found.tolist(), count


def test_a_long_prompt_beside_a_short_one(long: LLM) -> None:
    tokens = np.random.default_rng(1).integers(0, 256, 5000).tolist()
    short = long.generate("abc", max_tokens=6, ignore_end=True).tokens
    answers = long.generate([tokens, "abc"], max_tokens=6, ignore_end=True)
    made = list(answers[0].tokens)
    assert answers[1].tokens == short
    rows = logits(long, tokens + made)
    assert made == rows[4999:-1].argmax(-1).tolist()
    whole = tokens + made
    rows -= rows.max(-1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(-1, keepdims=True))
    wanted = rows[np.arange(len(whole) - 1), whole[1:]]
    np.testing.assert_allclose(long.score(whole), wanted, atol=1e-3)
    with pytest.raises(UserError, match="has 8192 tokens and the context is 8192"):
        long.generate([1] * 8192)


def test_files_without_weights_and_odd_defaults(tmp_path: Path) -> None:
    write_gguf(
        tmp_path / "words.gguf",
        read_gguf(write_file(tmp_path / "m.gguf")).metadata,
        {},
        kinds={"tokenizer.ggml.merges": ("array", "string")},
    )
    with pytest.raises(UserError, match="no weights"):
        LLM(tmp_path / "words.gguf")


BAD_GENERATION: list[dict[str, Any]] = [
    {"top_k": float("nan")},
    {"top_k": 2.5},
    {"top_p": 10**400},
    {"top_p": 0.0},
    {"temperature": "hot"},
    {"temperature": -1.0},
    {"min_p": 2},
    {"repetition_penalty": 0.0},
    {"do_sample": "yes"},
    {"eos_token_id": [END, 258]},
    {"eos_token_id": "</s>"},
    {"eos_token_id": [True]},
]


@pytest.mark.parametrize("bad", BAD_GENERATION, ids=str)
def test_generation_config_is_checked(tmp_path: Path, bad: dict[str, Any]) -> None:
    folder = write_folder(tmp_path / "folder", bad)
    with pytest.raises(UserError) as caught:
        LLM(folder, context=64)
    assert "generation_config.json" in str(caught.value) and next(iter(bad)) in str(caught.value)


KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "top_k": 5, "seed": 9},
    {"temperature": 1.3, "top_p": 0.8, "min_p": 0.01, "seed": 4},
    {"repetition_penalty": 1.5},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "temperature": 1.0, "seed": 5},
    {"logit_bias": {65: 5.0, 66: -100.0}},
    {"logprobs": 3},
    {"logprobs": 2, "temperature": 1.0, "seed": 8},
]


def told(piece: Any) -> tuple[Any, ...]:
    """A Piece without what rounding may change."""
    chance = None if piece.logprob is None else round(piece.logprob, 2)
    return piece.token, chance, [token for token, _ in piece.top]


def test_neighbours_that_sample_in_other_ways(llm: LLM) -> None:
    chance = random.Random(0)
    for _ in range(12):
        wanted = []
        for _ in range(chance.randint(2, 6)):
            how = {"max_tokens": chance.randint(1, 25), "ignore_end": True}
            wanted.append(
                (
                    "".join(chance.choices("abcdefg ", k=chance.randint(1, 40))),
                    how | chance.choice(KINDS),
                )
            )
        alone = [[told(p) for p in llm.stream(prompt, **how)] for prompt, how in wanted]
        streams = [llm.stream(prompt, **how) for prompt, how in wanted]
        beside: list[list[Any]] = [[] for _ in streams]
        live = list(range(len(streams)))
        while live:
            number = chance.choice(live)
            piece = next(streams[number], None)
            if piece is None:
                live.remove(number)
            else:
                beside[number].append(told(piece))
        assert beside == alone


def test_repetitions_are_counted_in_every_step(llm: LLM) -> None:
    """Beside a request that wants logprobs too, against the rule by hand."""
    prompt, count, penalty = " cc ec agab", 12, 1.5
    known = llm.tokenizer.encode(prompt)
    for _ in range(count):
        row, seen = logits(llm, known)[-1], sorted(set(known))
        row[seen] = np.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
        known.append(int(row.argmax()))
    others = [llm.stream("x" * n, max_tokens=40, ignore_end=True, logprobs=n) for n in (2, 3)]
    for stream in others:
        next(stream)
    answer = llm.generate(prompt, max_tokens=count, repetition_penalty=penalty, ignore_end=True)
    assert list(answer.tokens) == known[-count:]
    for stream in others:
        stream.close()


@pytest.mark.parametrize("messages", [None, [], (), 5, {"role": "user", "content": "a"}], ids=str)
def test_a_chat_of_nothing_is_refused(llm: LLM, messages: Any) -> None:
    for system in (None, "Be brief."):
        with pytest.raises(UserError, match="messages are needed"):
            llm.chat(messages, system=system, max_tokens=1)

"""LLM over a tiny model: answers, streams, chats, stop strings, defaults, refusals."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_model import BYTES, END, write_file, write_folder

import tilegrad as tg
from tilegrad.core.errors import StateError, UserError
from tilegrad.generate import load
from tilegrad.generate.llm import LLM

PROMPTS = ("Once upon", "tiles", "a", "The quick brown fox jumps over the lazy dog")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_file(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def told() -> list[tuple[str, float, float]]:
    return []


@pytest.fixture(scope="module")
def llm(path: Path, told: list[tuple[str, float, float]]) -> LLM:
    return LLM(path, requests=3, progress=lambda *said: told.append(said))


@tg.jit
def forward(model: Any, given: Any) -> Any:
    """Logits of all tokens."""
    return model(given)


def logits(llm: LLM, known: list[int]) -> Any:
    """Logits by a plain forward pass, in a window of one size for all."""
    window = np.zeros((1, 64), np.int64)
    window[0, : len(known)] = known
    with tg.no_grad():
        return forward(llm.model, tg.tensor(window)).numpy()[0, : len(known)]


def greedy(llm: LLM, text: str, count: int) -> list[int]:
    """The likeliest tokens by plain forward passes."""
    known = llm.tokenizer.encode(text)
    for _ in range(count):
        known.append(int(logits(llm, known)[-1].argmax()))
    return known[-count:]


def is_idle(llm: LLM) -> bool:
    engine = llm.engine
    engine.batcher.check()
    free = len(engine.batcher.slots) == engine.requests
    return (
        free and engine.pool.available == engine.pool.pages and not engine.busy and not llm._tasks
    )


def test_an_answer(llm: LLM) -> None:
    answer = llm.generate("Once upon", max_tokens=12)
    assert list(answer.tokens) == greedy(llm, "Once upon", 12)
    assert answer.finish == "length" and answer.prompt_tokens == len("Once upon")
    assert answer.text == llm.tokenizer.decode(answer.tokens) == str(answer)
    assert answer.timing.total >= answer.timing.first > 0 and answer.timing.made_tokens == 12
    ids = llm.tokenizer.encode("Once upon")
    assert llm.generate(ids, max_tokens=12).tokens == answer.tokens
    assert llm.generate(np.array(ids), max_tokens=12).tokens == answer.tokens


def test_several_prompts_at_once_are_as_each_alone(llm: LLM) -> None:
    answers = llm.generate(list(PROMPTS), max_tokens=9)
    assert [a.tokens for a in answers] == [llm.generate(p, max_tokens=9).tokens for p in PROMPTS]
    assert is_idle(llm)


def test_a_stream_is_the_answer_in_pieces(llm: LLM) -> None:
    pieces = list(llm.stream("tiles", max_tokens=20))
    answer = llm.generate("tiles", max_tokens=20)
    assert "".join(p.text for p in pieces) == answer.text
    assert tuple(p.token for p in pieces) == answer.tokens
    assert [p.finish for p in pieces] == [None] * 19 + ["length"]


def test_half_characters_wait(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of an e with an accent come one by one; text comes when it is whole."""
    script = [*"é".encode(), *"€".encode()[:2]]
    given = iter(script)
    made = llm.engine._made

    def scripted(run: Any, found: Any, row: int) -> Any:
        return made(run, found._replace(ids=np.array([next(given)])), row)

    monkeypatch.setattr(llm.engine, "_made", scripted)
    pieces = list(llm.stream("a", max_tokens=4))
    assert [p.text for p in pieces] == ["", "é", "", "�"]


def test_stop_strings_across_tokens(llm: LLM) -> None:
    text = llm.generate("Once upon", max_tokens=30).text
    cut = next(i for i in range(3, 20) if text.find(text[i : i + 3]) == i)
    stop = text[cut : cut + 3]
    answer = llm.generate("Once upon", max_tokens=30, stop=stop)
    assert answer.text == text[:cut] and answer.finish == "stop"
    assert answer.text + stop == llm.tokenizer.decode(answer.tokens)[: cut + 3]
    pieces = list(llm.stream("Once upon", max_tokens=30, stop=["never", stop]))
    assert "".join(p.text for p in pieces) == text[:cut] and pieces[-1].finish == "stop"
    assert is_idle(llm)


def test_the_token_that_ends_an_answer_is_no_text(llm: LLM) -> None:
    free = llm.generate("tiles", max_tokens=8)
    stop = free.tokens[5]
    count = free.tokens.index(stop)
    answer = llm.generate("tiles", max_tokens=8, stop_tokens=[stop])
    assert answer.tokens == free.tokens[:count] and answer.finish == "stop"
    assert answer.text == llm.tokenizer.decode(free.tokens[:count])


def test_closing_a_stream_frees_its_request(llm: LLM) -> None:
    stream = llm.stream("tiles", max_tokens=60)
    next(stream), next(stream)
    assert llm.engine.busy
    stream.close()
    assert is_idle(llm)
    llm.stream("tiles").close()  # before it began
    assert is_idle(llm)


def test_streams_side_by_side(llm: LLM) -> None:
    streams = [llm.stream(p, max_tokens=10) for p in PROMPTS]
    found: list[list[int]] = [[] for _ in streams]
    for _ in range(10):
        for stream, tokens in zip(streams, found):
            tokens.append(next(stream).token)
    assert found == [list(llm.generate(p, max_tokens=10).tokens) for p in PROMPTS]
    for stream in streams:
        stream.close()
    assert is_idle(llm)


def test_threads_share_the_engine(llm: LLM) -> None:
    wanted = [llm.generate(p, max_tokens=15).tokens for p in PROMPTS]
    found: dict[int, Any] = {}

    def ask(i: int) -> None:
        found[i] = tuple(p.token for p in llm.stream(PROMPTS[i], max_tokens=15))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(len(PROMPTS))] == wanted and is_idle(llm)


def test_cancel_ends_what_is_on_its_way(llm: LLM) -> None:
    stream = llm.stream("tiles", max_tokens=60)
    first = next(stream)
    llm.cancel()
    rest = list(stream)
    assert [p.finish for p in rest] == ["cancelled"] and first.finish is None
    assert is_idle(llm)


def test_a_step_that_fails_ends_what_it_ran(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = llm.generate("tiles", max_tokens=8).tokens
    beside, late = llm.stream("a", max_tokens=60), llm.stream("Once upon", max_tokens=8)
    next(beside), next(beside)

    def fails(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.steps, "ragged", fails)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("tiles", max_tokens=8)
    with pytest.raises(StateError, match="KeyboardInterrupt"):
        next(beside)
    assert is_idle(llm)
    assert llm.generate("tiles", max_tokens=8).tokens == wanted
    assert len(list(late)) == 8


def test_a_stream_thrown_away_in_a_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = llm.generate("tiles", max_tokens=8).tokens
    kept = [llm.stream("a", max_tokens=60)]
    next(kept[0])
    launch = llm.engine.steps.decode

    def drops(*given: Any) -> Any:
        kept.clear()
        return launch(*given)

    monkeypatch.setattr(llm.engine.steps, "decode", drops)
    assert llm.generate("tiles", max_tokens=8).tokens == wanted
    assert not kept and is_idle(llm)


def test_a_chat_goes_through_the_template(llm: LLM) -> None:
    ids = llm.chat_ids("Hi", system="Be brief.")
    assert llm.tokenizer.decode(ids, show_special=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    answer = llm.chat([{"role": "user", "content": "Hi"}], max_tokens=5)
    assert answer.prompt_tokens == len(llm.chat_ids("Hi"))
    assert "".join(p.text for p in llm.chat_stream("Hi", max_tokens=5)) == answer.text


def test_sampling_is_repeatable_and_reaches_the_engine(llm: LLM) -> None:
    hot = {"temperature": 1.0, "max_tokens": 12}
    first, again, other = (llm.generate("tiles", seed=s, **hot) for s in (1, 1, 2))
    assert first.tokens == again.tokens != other.tokens
    beside = llm.generate(["a", "tiles", "Once upon"], seed=1, **hot)
    assert beside[1].tokens == first.tokens
    mixed = llm.generate("tiles", max_tokens=12, logprobs=3)
    assert list(mixed.tokens) == greedy(llm, "tiles", 12)
    assert all(
        len(top) == 3 and top[0] == (t, p)
        for t, p, top in zip(mixed.tokens, mixed.logprobs, mixed.top)
    )
    banned = llm.generate("tiles", max_tokens=12, logit_bias={mixed.tokens[0]: -100.0})
    assert banned.tokens[0] == mixed.top[0][1][0]
    assert not first.logprobs and is_idle(llm)


def test_scores(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPTS[3])
    rows = logits(llm, ids).astype(np.float64)
    wanted = rows - np.log(np.exp(rows).sum(-1, keepdims=True))
    np.testing.assert_allclose(llm.score(ids), wanted[np.arange(len(ids) - 1), ids[1:]], atol=1e-4)


def test_what_does_not_fit_is_refused(llm: LLM) -> None:
    assert llm.context == 128
    with pytest.raises(UserError, match="has 128 tokens and the context is 128"):
        llm.generate("x" * 128)
    assert llm.generate("x" * 127).finish == "length"
    assert len(llm.generate("tiles", max_tokens=10**6).tokens) == 123
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        ("", {}, "no tokens"),
        (3, {}, "text or ids"),
        ("a", {"max_tokens": 0}, "max_tokens"),
        ("a", {"temperature": -1.0}, "temperature"),
        ("a", {"stop": [""]}, "stop string"),
        ([BYTES + 2], {}, "vocabulary"),
    ]
    for prompt, settings, why in wrong:
        with pytest.raises(UserError, match=why):
            llm.generate(prompt, **settings)
    for name, near in (("temprature", "temperature"), ("maxtokens", "max_tokens"), ("heat", "")):
        with pytest.raises(UserError, match=f"no setting '{name}'") as caught:
            llm.generate("a", **{name: 1.0})
        assert f"did you mean {near}?" in str(caught.value) or not near
    with pytest.raises(UserError) as caught:
        llm.generate("a", **{"x" * 10**6: 1})
    assert len(str(caught.value)) < 5000
    assert is_idle(llm)


def test_the_context_is_what_the_model_and_memory_allow(
    path: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def room(context: int | None, memory: int) -> tuple[int, int]:
        monkeypatch.setattr(load, "_physical", lambda: 4 * memory)
        return load.room_for(llm.model, "cpu", tg.float32, 3, context, 64)

    page = 64 * 2 * 2 * 16 * 4  # bytes of keys and values of 64 tokens, 2 layers of 16 features
    assert room(None, 100 * page) == (128, 6) and room(10**6, 100 * page) == (128, 6)
    assert room(65, 100 * page) == (65, 6) and room(64, 100 * page) == (64, 3)
    assert room(None, 3 * page) == (128, 3) and room(None, page) == (64, 1)
    with pytest.raises(UserError, match="at most 64 tokens"):
        room(128, page)
    with pytest.raises(UserError, match="cannot hold keys and values"):
        room(None, page - 1)


def test_progress_is_told(llm: LLM, told: list[tuple[str, float, float]]) -> None:
    llm.generate("a", max_tokens=2)
    assert {stage for stage, _, _ in told} >= {"load", "compile"}
    loads = [done for stage, done, total in told if stage == "load"]
    assert loads == sorted(loads) and loads[-1] == max(t for s, _, t in told if s == "load")


def test_a_file_with_its_defaults(tmp_path: Path) -> None:
    from tilegrad.exchange.gguf import read_gguf

    files = read_gguf(write_file(tmp_path / "tiny.gguf"))
    assert load.defaults_of(files) == {}
    said = {"temp": np.float32(0.5), "top_k": 20, "penalty_repeat": 1.5, "mirostat": 2}
    files.metadata.update({f"general.sampling.{name}": value for name, value in said.items()})
    assert load.defaults_of(files) == {"temperature": 0.5, "top_k": 20, "repetition_penalty": 1.5}
    files.metadata["general.sampling.top_p"] = 3.0
    with pytest.raises(UserError, match=r"general.sampling.*top_p"):
        load.defaults_of(files)


def test_a_folder_with_its_defaults(tmp_path: Path) -> None:
    asks = {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "eos_token_id": [END, 65]}
    llm = LLM(write_folder(tmp_path / "tiny", asks), context=64)
    assert llm.defaults == {"temperature": 0.5, "top_k": 50, "top_p": 0.9}
    assert llm.tokenizer.ends == {END, 65} and llm.context == 64
    answer = llm.generate("tiles", max_tokens=6, temperature=0.0, ignore_end=True)
    assert list(answer.tokens) == greedy(llm, "tiles", 6)
    assert llm.chat("Hi", max_tokens=3, seed=1).prompt_tokens > 2


def test_a_folder_in_bfloat16_computes_in_it(tmp_path: Path) -> None:
    llm = LLM(write_folder(tmp_path / "tiny", {}, tg.bfloat16.numpy), context=64)
    assert llm.dtype is tg.bfloat16 and llm.defaults == {}
    assert len(llm.generate("tiles", max_tokens=6, ignore_end=True).tokens) == 6


def test_importing_is_light_and_the_name_is_there() -> None:
    code = (
        "import sys, tilegrad; before = set(sys.modules); tilegrad.LLM; "
        "assert 'tilegrad.generate.llm' not in before; "
        "heavy = {'llvmlite', 'jinja2', 'tokenizers', 'huggingface_hub', 'torch'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stderr


def test_drawn_weights_of_a_folder_without_any(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "shape", {})
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="no weights found"):
        LLM(folder)
    before = tg.get_rng_state()
    first, again = (LLM(folder, random_weights=True, requests=1) for _ in range(2))
    assert tg.get_rng_state() == before
    for one, other in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert np.array_equal(one.numpy(), other.numpy())
    weight = first.model.blocks[1].attention.query.weight.numpy()
    assert 0 < np.abs(weight).max() <= weight.shape[1] ** -0.5 and weight.std() > 0
    assert first.file_bytes == 4 * sum(p.numel() for p in first.model.parameters())
    assert len(first.generate("tiles", max_tokens=4, ignore_end=True).tokens) == 4

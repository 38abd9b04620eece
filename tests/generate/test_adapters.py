"""Adapters: parity with merged weights, several in one batch, and what is told to the device."""

from pathlib import Path

import numpy as np
import pytest
from lora_folder import ALL, Merged, log_softmax, pairs, write_adapter
from tiny_model import write_file, write_folder

from tilegrad.core.errors import UserError
from tilegrad.generate.llm import LLM
from tilegrad.generate.request import Request

TOKENS = [int(t) for t in np.random.default_rng(0).integers(0, 256, 40)]
PROMPTS = [[10 + i, 20, 30 + i, 40, 50] for i in range(8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def path(folder: Path) -> Path:
    return write_file(folder / "tiny.gguf")


@pytest.fixture(scope="module")
def adapters(folder: Path) -> dict[str, Path]:
    """Of different ranks, scales and modules."""
    return {
        "all": write_adapter(folder / "all", 1, 4),
        "roots": write_adapter(folder / "roots", 2, 8, lora_alpha=4, use_rslora=True),
        "some": write_adapter(folder / "some", 3, 2, targets=ALL[:1] + ALL[2:3]),
    }


@pytest.fixture(scope="module")
def llm(path: Path, adapters: dict[str, Path]) -> LLM:
    return LLM(path, adapters=adapters, determinism="invariant", threads=1)


EXACT = {
    "": lambda path: Merged(path, {}, 0.0),
    "all": lambda path: Merged(path, pairs(1, 4), 8 / 4),
    "roots": lambda path: Merged(path, pairs(2, 8), 4 / np.sqrt(8)),
    "some": lambda path: Merged(path, pairs(3, 2, ALL[:1] + ALL[2:3]), 8 / 2),
}


def exact_scores(path: Path, name: str) -> np.ndarray:
    logits = EXACT[name](path).logits(TOKENS)
    return log_softmax(logits)[np.arange(len(TOKENS) - 1), TOKENS[1:]]


@pytest.mark.parametrize("name", EXACT)
def test_logprobs_are_those_of_merged_weights(llm: LLM, path: Path, name: str) -> None:
    expected = exact_scores(path, name)
    np.testing.assert_allclose(llm.score(TOKENS, name), expected, atol=2e-4)
    if name:
        assert np.abs(expected - exact_scores(path, "")).max() > 0.1


@pytest.mark.parametrize("level", ["reproducible", "invariant"])
def test_answers_are_those_of_merged_weights(
    path: Path, adapters: dict[str, Path], level: str
) -> None:
    """Prompts and decoding, mixed in one batch: the likeliest token of the merged model."""
    llm = LLM(path, adapters=adapters, determinism=level, threads=1)
    engine, names = llm.engine, ["", *adapters]
    for number, prompt in enumerate(PROMPTS):
        engine.add(Request(number, tuple(prompt), max_tokens=6, adapter=names[number % 4]))
    made = run(engine)
    for number, prompt in enumerate(PROMPTS):
        logits = EXACT[names[number % 4]](path).logits([*prompt, *made[number]])
        picked = logits[len(prompt) - 1 : -1]
        best = picked.max(-1) - picked[np.arange(6), made[number]]
        assert best.max() < 1e-4


def run(engine) -> dict:
    made: dict = {}
    while engine.busy:
        for one in engine.step():
            assert one.error is None
            made.setdefault(one.id, []).append(one.token)
    return made


def test_a_request_does_not_depend_on_its_neighbours_adapters(llm: LLM) -> None:
    engine, names = llm.engine, ["", "all", "roots", "some"]
    settings = {"temperature": 0.8, "logprobs": 3}

    def asked(number: int) -> dict:
        return {**settings, "seed": number, "max_tokens": 12, "adapter": names[number % 4]}

    tasks = [llm._task(p, **asked(i)) for i, p in enumerate(PROMPTS)]
    together = llm._tasks.answers(tasks)
    assert len({a.tokens[-1] for a in together}) > 1
    for i, prompt in enumerate(PROMPTS):
        alone = llm.generate(prompt, **asked(i))
        assert alone.tokens == together[i].tokens
        assert alone.logprobs == together[i].logprobs  # to the bit
    assert not engine.busy


def test_none_is_the_plain_model(llm: LLM, path: Path) -> None:
    plain = LLM(path, determinism="invariant", threads=1)
    for prompt in PROMPTS[:2]:
        settings = {"max_tokens": 10, "logprobs": 2}
        found, expected = llm.generate(prompt, **settings), plain.generate(prompt, **settings)
        assert found.tokens == expected.tokens and found.logprobs == expected.logprobs


def test_pages_are_not_shared_with_another_adapter(llm: LLM) -> None:
    engine, prompt = llm.engine, TOKENS + TOKENS
    page = engine.pool.page
    cached = {}
    for number, name in enumerate(("all", "", "all", "roots", "")):
        engine.add(Request(number, tuple(prompt), max_tokens=1, adapter=name, salt="pages"))
        while engine.busy:
            for one in engine.step():
                cached[number] = one.cached
    assert len(prompt) > page  # so that a page is full
    assert [cached[i] > 0 for i in range(5)] == [False, False, True, False, True]


def test_another_adapter_compiles_and_binds_nothing(llm: LLM, monkeypatch) -> None:
    engine = llm.engine
    for adapter in ("", "all"):
        engine.add(Request(adapter, (1, 2, 3), max_tokens=3, adapter=adapter))
    run(engine)
    compiled, bound = set(engine.steps._compiled), dict(engine.steps._chunks)
    for number, adapter in enumerate(("some", "roots")):
        engine.add(Request(number, (1, 2, 3), max_tokens=3, adapter=adapter))
    run(engine)
    assert engine.steps._compiled == compiled and engine.steps._chunks == bound


def test_the_device_is_told_once_and_only_of_changes(llm: LLM, monkeypatch) -> None:
    from tilegrad.generate import adapters as file

    told, write = [], file.write

    def telling(target, first, values) -> None:
        told.append(len(values))
        write(target, first, values)

    monkeypatch.setattr(file, "write", telling)
    engine = llm.engine
    for wanted in (["all"] * 4, ["all"] * 4, ["", "all", "some", "all"]):
        for number, adapter in enumerate(wanted):
            engine.add(Request(number, (1, 2, 3), max_tokens=2, adapter=adapter))
        run(engine)
    assert len(told) <= 2 and max(told) <= 4


def test_a_plain_engine_has_nothing_of_it(path: Path) -> None:
    from tilegrad.nn.adapted import AdaptedLinear

    plain = LLM(path, threads=1)
    assert plain.adapters is None and list(plain.engine.steps.rows.tensors()) == ["last"]
    assert not any(isinstance(m, AdaptedLinear) for m in plain.engine.steps.model.modules())
    with pytest.raises(UserError, match="no such adapter"):
        plain.generate([1, 2, 3], adapter="all")


def test_the_base_stays_as_it_is(llm: LLM) -> None:
    names = list(llm.model.state_dict())
    assert list(llm.adapters.model.state_dict()) == names
    assert llm.model.blocks[0].attention.query is not llm.adapters.model.blocks[0].attention.query
    assert llm.model.norm.weight is llm.adapters.model.norm.weight


def test_wrong_names_are_refused(llm: LLM, path: Path) -> None:
    with pytest.raises(UserError, match="no such adapter"):
        llm.generate([1, 2, 3], adapter="non")
    with pytest.raises(UserError, match="bad adapter"):
        llm.generate([1, 2, 3], adapter=3)
    with pytest.raises(UserError, match="no such adapter"):
        llm.score([1, 2, 3], "non")
    with pytest.raises(UserError, match="has no name"):
        LLM(path, adapters={"": "nowhere"})
    with pytest.raises(UserError, match="no such folder"):
        LLM(path, adapters={"a": "nowhere"})


def test_a_folder_of_half_precision(folder: Path, adapters: dict[str, Path]) -> None:
    """bfloat16 weights and adapters: near the exact ones."""
    import ml_dtypes

    model = write_folder(folder / "half", {}, np.float16)
    made = {n: t.astype(ml_dtypes.bfloat16) for n, t in pairs(1, 4).items()}
    write_adapter(folder / "bf16", tensors=made)
    llm = LLM(model, adapters={"a": folder / "bf16"}, threads=1)
    base, found = llm.score(TOKENS), llm.score(TOKENS, "a")
    assert np.isfinite(found).all() and np.abs(found - base).max() > 0.1


def test_guesses_are_verified_with_the_request_s_adapter(
    llm: LLM, path: Path, adapters: dict[str, Path]
) -> None:
    fast = LLM(
        path, adapters=adapters, determinism="invariant", threads=1, speculate="ngram", guesses=3
    )
    prompt = [10, 20, 30, 40] * 4
    for name in ("", "all", "roots"):
        settings = {"max_tokens": 12, "adapter": name, "ignore_end": True}
        assert fast.generate(prompt, **settings).tokens == llm.generate(prompt, **settings).tokens

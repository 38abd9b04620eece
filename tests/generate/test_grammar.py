"""Constraints: matchers of several tokenizers, the mask against NumPy, answers, limits, faults."""

import json
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_model import BYTES, END, write_file

import tilegrad as tg
from tilegrad.core.errors import UserError
from tilegrad.generate.constraint import Constraint, ConstraintLimits, check, of_settings
from tilegrad.generate.grammar import Grammars, Matcher
from tilegrad.generate.llm import LLM
from tilegrad.generate.request import Request
from tilegrad.generate.sampling import Sampling, SamplingState, Variant, sample
from tilegrad.models.tokens.special import SpecialToken
from tilegrad.models.tokens.tokenizer import Tokenizer

pytest.importorskip("llguidance", reason="llguidance is not installed")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "kind": {"enum": ["cat", "dog", "café"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "kind", "legs"],
    "additionalProperties": False,
}
TIGHT = {"json_schema": SCHEMA, "max_tokens": 500}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = write_file(tmp_path_factory.mktemp("model") / "tiny.gguf", context=640)
    return LLM(path, requests=4)


class Words:
    """An encoder that takes the longest token first."""

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = tokens

    def encode(self, text: str, first: bool) -> list[int]:
        data, out = text.encode(), []
        while data:
            best = max((t for t in self.tokens if t and data.startswith(t)), key=len)
            out.append(self.tokens.index(best))
            data = data[len(best) :]
        return out


def tokenizer_of(words: list[str], ends: int = 1) -> Tokenizer:
    """Bytes, some words, a token without bytes, then a control token and tokens that end."""
    tokens = [bytes([b]) for b in range(256)] + [w.encode() for w in words] + [b""]
    names = ["<|hidden|>", *(f"<|end{i}|>" for i in range(ends))]
    special = [SpecialToken(n, len(tokens) + i, True) for i, n in enumerate(names)]
    tokens += [n.encode() for n in names]
    texts = [f"{i}" for i in range(len(tokens))]
    last = range(len(tokens) - ends, len(tokens))
    return Tokenizer(texts, tokens, special, Words(tokens[:-2]), ends=last, eos=last[0])


def allowed(matcher: Matcher) -> set[int]:
    bits = np.unpackbits(matcher.words().view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


# ---- matchers -------------------------------------------------------------------------------


def test_ids_that_keep_to_the_grammar_and_no_others() -> None:
    tokenizer = tokenizer_of(["ab", "abc", "bb", "b<|hidden|>"], ends=2)
    ends = {len(tokenizer) - 2, len(tokenizer) - 1}
    grammars = Grammars(tokenizer, len(tokenizer) + 100)  # the model has more ids
    matcher = grammars.matcher(Constraint("regex", "ab+"))
    assert allowed(matcher) == {ord("a"), 256}
    assert len(matcher.words()) == -(-(len(tokenizer) + 100) // 32)
    matcher.take(256)  # "ab"
    assert allowed(matcher) == {ord("b"), 258} | ends and matcher.is_whole
    other = grammars.matcher(Constraint("regex", "ab+"))  # a copy of the first, at the begin
    assert allowed(other) == {ord("a"), 256} and not other.is_whole


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        (Constraint.choice(["ja", "nein", "größer", 'a"b\\n']), ["ja", "größer", 'a"b\\n'], ["j"]),
        (Constraint("regex", r"\d{3}-[a-f]*"), ["123-", "999-abc"], ["12-", "123-g"]),
        (Constraint.schema({"type": "boolean"}), ["true"], ["True", "1"]),
        (Constraint("json_object"), ["{}", '{"a": [1, {"b": null}]}'], ["[]", '{"a"}']),
        (Constraint("ebnf", 'start: "x" start "y" | "."'), ["xx.yy", "."], ["xx.y", ""]),
        (Constraint("ebnf", 'root ::= "a" [0-9]+'), ["a12"], ["a"]),
    ],
)
def test_every_kind_takes_its_words_only(
    constraint: Constraint, good: list[str], bad: list[str]
) -> None:
    grammars = Grammars(tokenizer_of(["ab", "12"]), 400)
    end = max(grammars.ends)
    for text, fits in [*((t, True) for t in good), *((t, False) for t in bad)]:
        matcher, so_far = grammars.matcher(constraint), True
        for byte in text.encode():
            so_far = so_far and byte in allowed(matcher)
            if so_far:
                matcher.take(byte)
        assert (so_far and end in allowed(matcher)) == fits, text
        assert (so_far and matcher.is_whole) == fits, text


def test_white_space_in_json_ends() -> None:
    matcher = Grammars(tokenizer_of([]), 300).matcher(Constraint("json_object"))
    matcher.take(ord("{"))
    taken = 0
    while ord("\n") in allowed(matcher):
        matcher.take(ord("\n"))
        taken += 1
        assert taken < 100
    assert taken >= 20


def test_a_token_that_does_not_fit_is_an_error_that_stays() -> None:
    matcher = Grammars(tokenizer_of([]), 300).matcher(Constraint("regex", "ab"))
    for token in (ord("x"), ord("a")):
        with pytest.raises(UserError, match="cannot be followed any further"):
            matcher.take(token)


# ---- limits ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("constraint", "says"),
    [
        (Constraint("regex", "a" * 70_000), "too long.*65536 bytes.*70000"),
        (Constraint("regex", "(" * 65 + "a" + ")" * 65), "nested too deeply.*64 levels.*65"),
        (Constraint("json_schema", '{"items":' * 80 + "{}" + "}" * 80), "nested too deeply"),
        (Constraint("json_schema", "{"), "json_schema does not fit"),
        (Constraint("json_schema", "[1]"), "a schema is a JSON object"),
        (Constraint.choice([]), "list of strings"),
        (Constraint("choice", '["a", 1]'), "list of strings"),
        (Constraint("choice", '["\ud800"]'), "does not fit"),
    ],
)
def test_what_is_beyond_the_limits_is_refused_at_once(constraint: Constraint, says: str) -> None:
    with pytest.raises(UserError, match="(?s)" + says):
        check(constraint)


@pytest.mark.parametrize(
    ("constraint", "says"),
    [
        (Constraint("regex", "(a"), "does not fit"),
        (Constraint("regex", "(?=a)b"), "does not fit"),
        (Constraint("ebnf", "start: missing"), "does not fit"),
        (Constraint.schema({"type": "cat"}), "does not fit"),
        (Constraint.schema({"$ref": "http://example.com/x"}), "not present in a registry"),
        (Constraint.schema({"not": {"type": "string"}}), "Unimplemented"),
    ],
)
def test_what_means_nothing_is_refused(constraint: Constraint, says: str) -> None:
    with pytest.raises(UserError, match="(?s)" + says):
        Grammars(tokenizer_of([]), 300).matcher(constraint)


def chain(kind: str) -> Constraint:
    """Rules that refer to one another as often as the limit of bytes lets them."""
    if kind == "ebnf":
        rules = [f"r{i:x}:r{i + 1:x}|A" for i in range(4800)]
        return Constraint("ebnf", "\n".join(["start:r0", *rules, f"r{4800:x}:A", "A: /b/"]))
    places = {f"{i}": {"properties": {"x": {"$ref": f"#/$defs/{i + 1}"}}} for i in range(1100)}
    schema = {"$ref": "#/$defs/0", "$defs": {**places, "1100": {"type": "string"}}}
    return Constraint.schema(json.dumps(schema, separators=(",", ":")))


@pytest.mark.parametrize("kind", ["ebnf", "json_schema"])
def test_a_long_chain_of_references_does_not_break_the_stack(kind: str) -> None:
    grammars = Grammars(tokenizer_of([]), 300, ConstraintLimits(seconds=120))
    try:
        matcher = grammars.matcher(chain(kind))
    except UserError as error:
        assert "does not fit" in str(error)
    else:
        assert allowed(matcher)


def test_compiling_takes_only_so_long_and_others_still_can() -> None:
    grammars = Grammars(tokenizer_of([]), 300, ConstraintLimits(seconds=0.05))
    grammars._llguidance_tokens()
    many = Constraint.schema({"properties": {f"k{i}": {"type": "string"} for i in range(1500)}})
    with pytest.raises(UserError, match=r"(?s)takes too long to compile.*0\.05 s"):
        grammars.matcher(many)
    grammars.limits = ConstraintLimits(seconds=120)
    assert grammars.matcher(Constraint("regex", "a")).words().any()
    assert threading.stack_size() == 0  # as before


def test_settings_name_one_constraint() -> None:
    assert of_settings({"regex": "a", "json_object": False}) == Constraint("regex", "a")
    assert of_settings({"temperature": 1.0, "regex": None}) is None
    with pytest.raises(UserError, match="one constraint"):
        of_settings({"regex": "a", "choices": ["b"]})
    for wrong in ({"choices": "ab"}, {"regex": ""}, {"json_schema": {"a": object()}}, {"ebnf": 3}):
        with pytest.raises(UserError):
            of_settings(wrong)
    with pytest.raises(UserError, match="no such kind"):
        Constraint("yaml", "a")


# ---- the mask on the device -----------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [64, 75])
@pytest.mark.parametrize("variant", [Variant(masks=True), Variant(True, True, True, 1, True)])
def test_the_mask_is_that_of_numpy(vocabulary: int, variant: Variant) -> None:
    random = np.random.default_rng(vocabulary)
    state = SamplingState(5, vocabulary)
    words = random.integers(-(1 << 31), 1 << 31, (3, -(-vocabulary // 32))).astype(np.int32)
    for slot in range(3):
        state.allow(slot, words[slot])
        state.set_row(slot, Sampling(logit_bias={2: 3.0}))
    logits = (random.standard_normal((4, vocabulary)) * 3).astype(np.float32)
    slots = np.array([2, 0, 3, 1], np.int32)  # slot 3 may get every token

    def run(x: Any, state: Any, slots: Any, positions: Any) -> Any:
        return sample(x, state, slots, positions, variant)

    found = tg.jit(run)(tg.tensor(logits), state, tg.tensor(slots), tg.tensor(slots))
    biased = logits.copy()
    if variant.bias:
        biased[slots < 3, 2] += 3.0
    for row, slot in enumerate(slots):
        may = np.ones(vocabulary, bool)
        if slot < 3:
            bits = np.unpackbits(words[slot].view(np.uint8), bitorder="little")
            may = bits[:vocabulary].astype(bool)
        chosen = int(found.ids.numpy()[row])
        assert chosen == np.where(may, biased[row], -np.inf).argmax()
        if variant.logprobs:  # those of the logits as the model gave them
            x = logits[row].astype(np.float64)
            logprob = x[chosen] - np.log(np.exp(x).sum())
            assert found.logprob.numpy()[row] == pytest.approx(logprob, abs=1e-4)
            assert found.top_ids.numpy()[row, 0] == logits[row].argmax()


def test_a_row_of_no_tokens_has_none() -> None:
    state = SamplingState(2, 40)
    state.allow(0, np.zeros(2, np.int32))

    def run(x: Any, state: Any, slots: Any) -> Any:
        return sample(x, state, slots, slots, Variant(masks=True))

    found = tg.jit(run)(tg.tensor(np.ones((1, 40), np.float32)), state, tg.tensor(np.int32([0])))
    assert found.ids.numpy().tolist() == [-1]
    with pytest.raises(UserError, match=r"int32\[2\]"):
        state.allow(0, np.zeros(3, np.int32))


# ---- answers --------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_json_of_the_schema(llm: LLM, temperature: float) -> None:
    prompts = ["a", "Once upon a time", "{", "xyz"]
    for answer in llm.generate(prompts, temperature=temperature, seed=3, **TIGHT):
        assert answer.finish == "stop"
        found = json.loads(answer.text)
        assert list(found) == ["name", "kind", "legs"]
        assert len(found["name"]) <= 4 and 0 <= found["legs"] <= 99
        assert found["kind"] in ("cat", "dog", "café")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_match(llm: LLM, temperature: float) -> None:
    common: dict[str, Any] = {"temperature": temperature, "seed": 1, "max_tokens": 60}
    pattern = r"[a-c]{2,5}: (\d{1,3}|none)\."
    for prompt in ("a", "bb", "the"):
        assert re.fullmatch(pattern, llm.generate(prompt, regex=pattern, **common).text)
        choices = ["yes", "no", "größer"]
        answer = llm.generate(prompt, choices=choices, ignore_end=True, **common)
        assert answer.text in choices and answer.finish == "stop"
        grammar = 'start: sum\nsum: N ("+" N)~0..2\nN: /[0-9]/'
        text = llm.generate(prompt, ebnf=grammar, **common).text
        assert re.fullmatch(r"\d(\+\d){0,2}", text)
    assert "".join(p.text for p in llm.stream("a", choices=["yes"])) == "yes"
    assert llm.chat("a", choices=["only"]).text == "only"


def test_a_random_object_is_a_prefix_of_json(llm: LLM) -> None:
    answer = llm.generate("a", json_object=True, temperature=1.0, seed=0, max_tokens=40)
    assert answer.text.startswith("{")
    assert answer.finish == "length" or isinstance(json.loads(answer.text), dict)


def test_mixed_with_others_that_do_not_change(llm: LLM) -> None:
    """Constrained, drawing and greedy requests in one batch; slots are used again after it."""
    rest: list[tuple[str, dict[str, Any]]] = [
        ("Once", {"max_tokens": 30}),
        ("tiles", {"max_tokens": 25, "temperature": 0.9, "seed": 5}),
        ("abc", {"max_tokens": 30, "logprobs": 3}),
    ]
    alone = [llm.generate(prompt, **settings) for prompt, settings in rest]
    tasks = [llm._task(llm._ids(prompt), **settings) for prompt, settings in rest]
    tasks.insert(1, llm._task(llm._ids("x"), temperature=1.0, seed=2, **TIGHT))
    answers = llm._tasks.answers(tasks)
    json.loads(answers.pop(1).text)
    assert [a.tokens for a in answers] == [a.tokens for a in alone]
    again = [llm.generate(prompt, **settings) for prompt, settings in rest]
    assert [a.tokens for a in again] == [a.tokens for a in alone]
    assert not llm.engine.busy


def test_logprobs_are_those_of_the_model(llm: LLM) -> None:
    answer = llm.generate("ab", regex="[x-z]{5}", logprobs=2, max_tokens=9)
    known = [*llm.tokenizer.encode("ab"), *answer.tokens]
    assert np.allclose(answer.logprobs, llm.score(known)[1:], atol=1e-4)


# ---- faults ---------------------------------------------------------------------------------


class Failing:
    """A Matcher that allows everything twice and then cannot go on."""

    ends = frozenset({END})

    def __init__(self, words: int) -> None:
        self.size, self.left = words, 2

    def words(self) -> Any:
        return np.full(self.size, -1, np.int32)

    def take(self, token: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise UserError("lost", op="constraint")


def test_a_matcher_that_fails_ends_its_own_request_only(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = llm.generate("Once", max_tokens=12)
    engine = llm.engine
    made = Failing(-(-(BYTES + 2) // 32))
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_matcher", lambda request: made)
        engine.add(
            Request(
                "bad", (1, 2), None, frozenset({END}), 12, constraint=Constraint("regex", "never")
            )
        )
    engine.add(Request("good", tuple(llm._ids("Once")), max_tokens=12))
    found: dict[Any, list[Any]] = {"bad": [], "good": []}
    while engine.busy:
        for produced in engine.step():
            found[produced.id].append(produced)
    assert [p.finished for p in found["bad"]] == [None, None, "error"]
    assert "lost" in str(found["bad"][-1].error)
    assert tuple(p.token for p in found["good"]) == alone.tokens
    assert len(engine.batcher.slots) == engine.requests and not engine.busy


def test_what_cannot_be_served_is_refused(llm: LLM) -> None:
    with pytest.raises(UserError, match="regex does not fit"):
        llm.generate("a", regex="(a")
    with pytest.raises(UserError, match="one constraint"):
        llm.generate("a", regex="a", json_object=True)
    with pytest.raises(UserError, match="own end"):
        llm.engine.add(Request("a", (1,), constraint=Constraint("regex", "a")))
    assert "a" not in llm.engine and not llm.engine.busy
    with pytest.raises(UserError, match="tokenizer with a token that ends"):
        Grammars(Tokenizer([], [], [], Words([])), 10).matcher(Constraint("regex", "a"))


def test_real_words(tmp_path: Path) -> None:
    """A byte-level tokenizer of the tokenizers package, with merges, through llguidance."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([Path(__file__).read_text()], trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(tmp_path)
    grammars = Grammars(tokenizer, 640)
    text = '{"name": "ab", "kind": "café", "legs": 4}'
    matcher = grammars.matcher(Constraint.schema(SCHEMA))
    ids = tokenizer.encode(text, add_special=False)
    assert len(ids) < len(text.encode())
    for token in ids:
        assert token in allowed(matcher)
        matcher.take(token)
    assert allowed(matcher) & grammars.ends == grammars.ends == {tokenizer.eos}
    assert all(token < len(tokenizer) for token in allowed(matcher))


def test_min_tokens_and_a_constraint_exclude_each_other(llm: LLM) -> None:
    with pytest.raises(UserError, match="ends where its grammar does"):
        llm.generate("a", regex="a", min_tokens=3)


def test_no_step_begins_before_the_token_of_a_constrained_request(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where steps overlap: the answers stay, and others overlap once it is gone."""
    alone = llm.generate("Once", max_tokens=90)
    pattern = "[a-d]{30}"
    wanted = llm.generate("x", regex=pattern, max_tokens=60)
    monkeypatch.setattr(llm.engine, "overlaps", True)
    tasks = [
        llm._task(llm._ids("Once"), max_tokens=90),
        llm._task(llm._ids("x"), regex=pattern, max_tokens=60),
    ]
    answers = llm._tasks.answers(tasks)
    assert [a.tokens for a in answers] == [alone.tokens, wanted.tokens]
    assert re.fullmatch(pattern, answers[1].text)

"""Files that lie about a model: configurations, GGUF metadata, tokenizers; an error or a model.

Every reader of `tests/exchange` has its own lies; these are about what is made of what was read.
Nothing here needs a real model. Memory is counted, so that a number in a file buys none.
"""

import copy
import json
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tilegrad.core.errors import UserError
from tilegrad.models.decoder.config import DecoderConfig
from tilegrad.models.tokens.tokenizer import Tokenizer

SAMPLES = json.loads((Path(__file__).parent / "data" / "tokenizer_samples.json").read_text())
MOST = 16 << 20  # bytes that a small file may cost
STEADY = settings(max_examples=300, deadline=None, derandomize=True, database=None)

LLAMA = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "layer_types": None,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_type": "llama3",
    },
}
EXPERTS = {
    **LLAMA,
    "model_type": "qwen2_moe",
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0},
}
GEMMA = {
    **LLAMA,
    "model_type": "gemma3_text",
    "sliding_window": 7,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 11,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": None,
    "rope_local_base_freq": 10000.0,
    "hidden_activation": "gelu_pytorch_tanh",
}
PHI = {
    **LLAMA,
    "model_type": "phi3",
    "original_max_position_embeddings": 96,
    "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
}
GPT = {
    "model_type": "gpt2",
    "vocab_size": 96,
    "n_positions": 128,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "activation_function": "gelu_new",
}
CONFIGS = {"llama": LLAMA, "experts": EXPERTS, "gemma": GEMMA, "phi": PHI, "gpt": GPT}
METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 3,
    "llama.context_length": 128,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 48,
    "llama.vocab_size": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.key_length": 8,
    "llama.attention.sliding_window": 16,
    "llama.rope.freq_base": 100000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": 8,
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 4.0,
    "llama.rope.scaling.original_context_length": 32,
    "llama.expert_count": 4,
    "llama.expert_used_count": 2,
    "tokenizer.ggml.tokens": ["a"] * 96,
}

NUMBERS = [
    0,
    1,
    -1,
    2,
    3,
    7,
    1 << 16,
    1 << 31,
    (1 << 63) - 1,
    1 << 64,
    10**400,
    -(10**400),
    0.5,
    1e-320,
    1e308,
    -1e308,
    float("inf"),
    float("nan"),
]
ODD: list[Any] = [
    *NUMBERS, None, True, False, "", "llama", "full_attention", "yarn", "longrope", "su", "linear",
    "x" * 1000, "\0", [], [[]], [1], [[1]], [{}], [1.0] * 4, [float("nan")] * 4, [None] * 3,
    ["full_attention"] * 3, [10**400] * 4, {}, {"a": 1}, {"rope_type": []},
    {"rope_type": "linear", "factor": 1e308}, {"full_attention": 5},
    {"full_attention": {"rope_type": "yarn", "factor": 0.0}},
]  # fmt: skip
JUNK = st.sampled_from(ODD) | st.integers() | st.floats() | st.text(max_size=5)
ARRAYS = [
    np.zeros(0, np.int32),
    np.arange(3),
    np.full(3, np.nan),
    np.array([[1]]),
    np.float32(2),
    np.array([1 << 62] * 3),
    np.array(["a"]),
]


@contextmanager
def little() -> Iterator[None]:
    """What is done within makes little memory."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST
    finally:
        tracemalloc.stop()


def changed(table: dict[str, Any], changes: list[tuple[int, int, Any]]) -> dict[str, Any]:
    """A table with some values others, also those of a table within it."""
    table = copy.deepcopy(table)
    for at, within, value in changes:
        value = copy.deepcopy(value)
        name = sorted(table)[at % len(table)]
        inner = table[name]
        if isinstance(inner, dict) and inner and within % 3:
            inner[sorted(inner, key=str)[within % len(inner)]] = value
        else:
            table[name] = value
    return table


CHANGES = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9), JUNK), min_size=1, max_size=3)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_tables_are_good_before_they_are_changed(name: str) -> None:
    assert DecoderConfig.from_huggingface(CONFIGS[name]).layers == 3
    assert DecoderConfig.from_gguf(METADATA).layers == 3


def configure(table: Any) -> None:
    """A configuration, or an error of the person's file."""
    with little():
        try:
            found = DecoderConfig.from_huggingface(table)
        except UserError:
            return
        speeds = [r.frequencies() for r in found.rotaries()]
    assert len(found.windows) == found.layers and all(s.ndim == 1 for s in speeds)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_field_with_every_odd_value(name: str) -> None:
    table = CONFIGS[name]
    for field in [*table, "rope_parameters", "text_config", "use_bidirectional_attention"]:
        for value in ODD:
            configure({**table, field: value})
    for field in table.get("rope_scaling", ()):
        for value in ODD:
            configure({**table, "rope_scaling": {**table["rope_scaling"], field: value}})


@STEADY
@given(name=st.sampled_from(sorted(CONFIGS)), changes=CHANGES)
@example(name="llama", changes=[(0, 0, 1 << 40)])
def test_configurations(name: str, changes: list[tuple[int, int, Any]]) -> None:
    configure(changed(CONFIGS[name], changes))


@pytest.mark.parametrize(
    "given_table",
    [None, 5, "llama", [], {}, {"model_type": []}, {"text_config": {"model_type": {}}}],
)
def test_what_is_no_configuration(given_table: Any) -> None:
    with pytest.raises(UserError):
        DecoderConfig.from_huggingface(given_table)


@STEADY
@given(
    changes=st.lists(
        st.tuples(st.integers(0, 99), st.integers(0, 9), JUNK | st.sampled_from(ARRAYS)),
        min_size=1,
        max_size=3,
    ),
    architecture=st.sampled_from(["llama", "gemma3", "phi3", "qwen2moe", "gpt2"]),
)
def test_metadata(changes: list[tuple[int, int, Any]], architecture: str) -> None:
    table = {k.replace("llama.", f"{architecture}."): v for k, v in METADATA.items()}
    table = changed({**table, "general.architecture": architecture}, changes)
    with little():
        try:
            found = DecoderConfig.from_gguf(table)
        except UserError:
            return
        speeds = [r.frequencies() for r in found.rotaries()]
    assert len(found.windows) == found.layers and all(s.ndim == 1 for s in speeds)


# ---- tokenizers -------------------------------------------------------------------------------

TEXTS = ["", "a quick test", "<|im_start|>user\n", "\u00e9\U0001f389 \u0120", "  \n\n 12345"]


def read_words(metadata: dict[str, Any]) -> None:
    """A tokenizer that encodes and decodes, or an error."""
    try:
        tokenizer = Tokenizer.from_gguf(metadata)
    except UserError:
        return
    for text in TEXTS:
        try:
            ids = tokenizer.encode(text, parse_special=True)
        except UserError:  # a vocabulary that has no token for a byte
            continue
        assert all(0 <= i < len(tokenizer.texts) for i in ids)
        assert isinstance(tokenizer.decode(ids), str)


@settings(STEADY, max_examples=60)
@given(
    kind=st.sampled_from(["smollm", "pieces"]),
    changes=CHANGES,
    spots=st.lists(st.tuples(st.integers(0, 1 << 20), JUNK), max_size=3),
)
def test_vocabularies(kind: str, changes: Any, spots: Any) -> None:
    metadata = dict(SAMPLES[kind]["metadata"])
    if spots:  # items of an array
        arrays = sorted(k for k, v in metadata.items() if isinstance(v, list))
        for at, value in spots:
            name = arrays[at % len(arrays)]
            metadata[name] = list(metadata[name])
            metadata[name][at % len(metadata[name])] = value
        read_words(metadata)
    else:
        read_words(changed(metadata, changes))


def folder_tokenizer() -> dict[str, Any]:
    """A small tokenizer.json."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Library

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: i for i, letter in enumerate([*letters, "th", "the"])}
    made = Library(models.BPE(words, [("t", "h"), ("th", "e")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<end>", special=True)])
    return json.loads(made.to_str())


WORDS = folder_tokenizer()


def read_tokenizer(folder: Path) -> None:
    """A tokenizer of a folder that works, or an error."""
    with little():
        try:
            tokenizer = Tokenizer.from_folder(folder)
            ids = tokenizer.encode("the end<end>", parse_special=True)
        except UserError:
            return
        assert isinstance(tokenizer.decode(ids), str)


@settings(STEADY, max_examples=120)
@given(changes=CHANGES, table=CHANGES, generation=JUNK)
def test_tokenizers_of_folders(
    tmp_path_factory: Any, changes: Any, table: Any, generation: Any
) -> None:
    folder = tmp_path_factory.mktemp("words")
    (folder / "tokenizer.json").write_text(json.dumps(changed(WORDS, changes)))
    config = {
        "bos_token": "<end>",
        "eos_token": {"content": "<end>"},
        "chat_template": "{{ 1 }}",
        "pad_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(changed(config, table)))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    read_tokenizer(folder)


@pytest.mark.parametrize("number", [1 << 31, (1 << 32) - 1, 1 << 40, -1])
def test_an_id_far_beyond_the_others(tmp_path: Path, number: int) -> None:
    """The library takes any id of 32 bits; a list of so many texts would fill the memory."""
    words = copy.deepcopy(WORDS)
    words["model"]["vocab"]["far"] = number
    (tmp_path / "tokenizer.json").write_text(json.dumps(words))
    with little(), pytest.raises(UserError):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "file, data",
    [
        ("chat_template.jinja", b"\xff\xfe"),
        ("tokenizer.json", b"\xff"),
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b"[]"),
        ("tokenizer.json", b"[" * 100_000),
        ("tokenizer.json", b""),
        ("tokenizer_config.json", b'{"chat_template": [{"name": [], "template": "x"}]}'),
        ("tokenizer_config.json", b'{"a": 1' + b"1" * 10_000 + b"}"),
        ("tokenizer_config.json", b"[" * 100_000),
        ("generation_config.json", b"\xff"),
    ],
)
def test_files_of_a_folder(tmp_path: Path, file: str, data: bytes) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(WORDS))
    (tmp_path / file).write_bytes(data)
    read_tokenizer(tmp_path)


@settings(STEADY, max_examples=120)
@given(
    spots=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), max_size=6),
    cut=st.integers(0, 1 << 20),
)
def test_flipped_and_cut(tmp_path_factory: Any, spots: Any, cut: int) -> None:
    folder = tmp_path_factory.mktemp("words")
    data = bytearray(json.dumps(WORDS).encode())
    for at, value in spots:
        data[at % len(data)] = value
    (folder / "tokenizer.json").write_bytes(data[: cut % len(data)] if cut % 4 == 0 else data)
    read_tokenizer(folder)

"""Which layers an adapter's tensors change, by family: fused and turned modules, and wrong ones."""

from types import SimpleNamespace

import numpy as np
import pytest

from tilegrad.core.errors import ShapeError, UserError
from tilegrad.exchange.adapter import Adapter
from tilegrad.models.decoder.adapted import adapted, changes_of
from tilegrad.models.decoder.config import DecoderConfig
from tilegrad.models.decoder.model import Decoder
from tilegrad.nn.adapted import AdaptedLinear, Picks

RANDOM = np.random.default_rng(3)
SMALL = {"vocab_size": 32, "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4}
LLAMA = {
    **SMALL,
    "model_type": "llama",
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
}
PHI3 = {**LLAMA, "model_type": "phi3"}
GPT2 = {"model_type": "gpt2", "vocab_size": 32, "n_embd": 16, "n_head": 4, "n_layer": 2}


def model_of(config: dict) -> Decoder:
    return Decoder(DecoderConfig.from_huggingface(config))


def adapter_of(**shapes: tuple[int, int]) -> Adapter:
    """One of rank 3 and scale 2, with (out, in) of each module; `__` stands for a dot."""
    pairs = {}
    for name, (rows, columns) in shapes.items():
        sides = [RANDOM.standard_normal(s).astype(np.float32) for s in ((3, columns), (rows, 3))]
        stored = [
            SimpleNamespace(name=f"{name}.lora_{side}.weight", values=lambda v=v: v)
            for side, v in zip("AB", sides)
        ]
        pairs[name.replace("__", ".")] = (*stored, 2.0)
    return Adapter("somewhere", pairs)


def test_a_fused_module_is_several_layers() -> None:
    given = adapter_of(
        model__layers__1__self_attn__qkv_proj=(32, 16), model__layers__1__mlp__gate_up_proj=(48, 16)
    )
    found = changes_of(model_of(PHI3), given)
    start = "blocks.1."
    assert set(found) == {
        start + p
        for p in ("attention.query", "attention.key", "attention.value", "feed.gate", "feed.up")
    }
    a, b, _ = given.pairs["model.layers.1.self_attn.qkv_proj"]
    whole = np.concatenate(
        [
            found[f"{start}attention.{p}"][1].T @ found[f"{start}attention.{p}"][0]
            for p in ("query", "key", "value")
        ]
    )
    np.testing.assert_allclose(whole, 2.0 * b.values() @ a.values(), rtol=1e-5)


def test_a_turned_module_has_its_sides_as_all_others() -> None:
    found = changes_of(model_of(GPT2), adapter_of(transformer__h__0__attn__c_attn=(48, 16)))
    assert {p: (d.shape, u.shape) for p, (d, u) in found.items()} == {
        f"blocks.0.attention.{p}": ((3, 16), (3, 16)) for p in ("query", "key", "value")
    }


def test_the_text_part_of_a_model_that_also_sees() -> None:
    name = "model__language_model__layers__0__self_attn__q_proj"
    found = changes_of(model_of(LLAMA), adapter_of(**{name: (16, 16)}))
    assert list(found) == ["blocks.0.attention.query"]


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("model__layers__2__self_attn__q_proj", (16, 16), "changes no layer"),
        ("model__layers__0__self_attn__rotary", (16, 16), "changes no layer"),
        ("lm_head", (32, 16), "changes no layer"),
        ("model__layers__0__self_attn__q_proj", (16, 8), "lora_A.* does not fit"),
        ("model__layers__0__self_attn__q_proj", (8, 16), "lora_B.* does not fit"),
    ],
)
def test_what_fits_nowhere_is_named(name: str, shape: tuple[int, int], words: str) -> None:
    with pytest.raises(UserError, match=words):
        changes_of(model_of(LLAMA), adapter_of(**{name: shape}))


def test_parts_that_do_not_fit_are_named() -> None:
    with pytest.raises(ShapeError, match="qkv_proj"):
        changes_of(model_of(PHI3), adapter_of(model__layers__0__self_attn__qkv_proj=(40, 16)))


def test_adapters_are_stacked_to_the_largest_rank() -> None:
    model, picks = model_of(LLAMA), Picks()
    first = adapter_of(model__layers__0__self_attn__q_proj=(16, 16))
    second = adapter_of(model__layers__0__mlp__down_proj=(16, 24))
    made = adapted(model, [first, second], picks, "cpu", model.norm.weight.dtype)
    query, down = made.blocks[0].attention.query, made.blocks[0].feed.down
    assert isinstance(query, AdaptedLinear) and isinstance(down, AdaptedLinear)
    assert not isinstance(made.blocks[1].attention.query, AdaptedLinear)
    assert tuple(query.down.shape) == (2, 3, 16) and tuple(down.down.shape) == (2, 3, 24)
    assert (query.up.numpy()[1] == 0).all() and (down.up.numpy()[0] == 0).all()
    assert query.weight is model.blocks[0].attention.query.weight
    x = RANDOM.standard_normal((3, 16)).astype(np.float32)
    plain = query(x).numpy()
    with picks.of(np.array([-1, 0, 1], np.int32)):
        found = query(x).numpy()
    a, b, scale = first.pairs["model.layers.0.self_attn.q_proj"]
    change = scale * b.values() @ a.values()
    np.testing.assert_allclose(found[[0, 2]], plain[[0, 2]], rtol=1e-6)
    np.testing.assert_allclose(found[1], plain[1] + change @ x[1], rtol=1e-3, atol=1e-4)

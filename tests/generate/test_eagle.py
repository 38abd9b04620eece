"""EAGLE heads: logits beside NumPy's, guesses over pages beside a plain loop, answers kept."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from test_engine import prompt
from test_invariant import FAMILIES, model_of
from test_speculative import ids, run

import tilegrad as tg
from tilegrad.core.errors import UserError
from tilegrad.generate.draft import load_head
from tilegrad.generate.eagle import Eagle
from tilegrad.generate.engine import Engine
from tilegrad.generate.request import Request
from tilegrad.generate.sampling import Sampling
from tilegrad.models.decoder.eagle import EagleHead
from tilegrad.models.decoder.model import Decoder
from tilegrad.nn.functional import attention

Array = np.ndarray[Any, Any]
CONFIG: dict[str, Any] = {**FAMILIES["llama"], "architectures": ["LlamaForCausalLM"]}
WIDTH, HIDDEN, WORDS = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
HEADS, KEYS = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]
HEAD = WIDTH // HEADS
LENGTH = 64  # tokens that a plain pass is compiled for


def drawn(bias: bool = True, embeds: bool = True, seed: int = 4) -> dict[str, Array]:
    """Random weights by the published names."""
    random = np.random.default_rng(seed)
    shapes = {
        "fc.weight": (WIDTH, 2 * WIDTH),
        "layers.0.self_attn.q_proj.weight": (WIDTH, WIDTH),
        "layers.0.self_attn.k_proj.weight": (KEYS * HEAD, WIDTH),
        "layers.0.self_attn.v_proj.weight": (KEYS * HEAD, WIDTH),
        "layers.0.self_attn.o_proj.weight": (WIDTH, WIDTH),
        "layers.0.mlp.gate_proj.weight": (HIDDEN, WIDTH),
        "layers.0.mlp.up_proj.weight": (HIDDEN, WIDTH),
        "layers.0.mlp.down_proj.weight": (WIDTH, HIDDEN),
    }
    found = {n: random.standard_normal(s) * 1.5 * s[1] ** -0.5 for n, s in shapes.items()}
    found["layers.0.post_attention_layernorm.weight"] = random.uniform(0.5, 1.5, WIDTH)
    if bias:
        found["fc.bias"] = random.standard_normal(WIDTH) * 0.1
    if embeds:
        found["embed_tokens.weight"] = random.standard_normal((WORDS, WIDTH))
    return {name: array.astype(np.float32) for name, array in found.items()}


def write_head(folder: Path, weights: dict[str, Array], **changed: Any) -> Path:
    folder.mkdir()
    save_file(
        {n: np.ascontiguousarray(w) for n, w in weights.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changed}))
    return folder


def by_numpy(weights: dict[str, Array], tokens: Any, features: Array, embed: Array) -> Array:
    """The head's features (T, C) in float64, as the published layout says."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    layer, count = "layers.0.", len(tokens)
    x = np.concatenate([w.get("embed_tokens.weight", embed)[tokens], features], -1)
    x = x @ w["fc.weight"].T + w.get("fc.bias", np.zeros(1))

    def heads(name: str) -> Array:
        return (x @ w[f"{layer}self_attn.{name}_proj.weight"].T).reshape(count, -1, HEAD)

    half = HEAD // 2
    angles = np.arange(count)[:, None] / CONFIG["rope_theta"] ** (np.arange(half) / half)
    cos, sin = (np.concatenate([f(angles)] * 2, -1)[:, None] for f in (np.cos, np.sin))

    def turned(y: Array) -> Array:
        return y * cos + np.concatenate([-y[..., half:], y[..., :half]], -1) * sin

    q, k, v = turned(heads("q")), turned(heads("k")), heads("v")
    k, v = (np.repeat(y, HEADS // KEYS, 1) for y in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(HEAD)
    scores[:, np.triu(np.ones((count, count), bool), 1)] = -np.inf
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    out = np.einsum("hqk,khd->qhd", shares, v).reshape(count, -1)
    x = x + out @ w[f"{layer}self_attn.o_proj.weight"].T
    y = x / np.sqrt((x * x).mean(-1, keepdims=True) + CONFIG["rms_norm_eps"])
    y = y * w[f"{layer}post_attention_layernorm.weight"]
    gate = y @ w[f"{layer}mlp.gate_proj.weight"].T
    inner = gate / (1 + np.exp(-gate)) * (y @ w[f"{layer}mlp.up_proj.weight"].T)
    return x + inner @ w[f"{layer}mlp.down_proj.weight"].T


def target() -> Decoder:
    return model_of("llama", None, tg.float32)


def features_of(model: Decoder, tokens: list[int]) -> Array:
    """What the decoder's head reads at each token, by a plain pass over one length (so that it is
    compiled once): what follows the tokens changes nothing before it."""
    with tg.no_grad():
        index = tg.tensor(np.array([tokens + [0] * (LENGTH - len(tokens))]))
        found = model.hidden(index, tg.arange(LENGTH), model._causal)
        return model.norm(found).numpy()[0, : len(tokens)].astype(np.float64)


def arrays(model: Decoder) -> tuple[Array, Array]:
    """Its embedding and the weight of its head."""
    embed, last = (w.numpy().astype(np.float64) for w in (model.embed.weight, model.head.weight))
    return embed, last


def head_of(folder: Path, weights: dict[str, Array], **changed: Any) -> EagleHead:
    found = load_head(write_head(folder, weights, **changed), target(), "cpu", lambda *_: None)
    assert found is not None
    return found


@pytest.mark.parametrize(("bias", "embeds"), [(True, True), (False, False)])
def test_logits_are_those_of_the_published_layout(tmp_path: Path, bias: bool, embeds: bool) -> None:
    model, weights = target(), drawn(bias, embeds)
    head = head_of(tmp_path / "head", weights)
    assert (head.embed is not None) is embeds
    random = np.random.default_rng(0)
    tokens = random.integers(0, WORDS, 40)
    features = random.standard_normal((40, WIDTH)).astype(np.float32)

    def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
        how = head.config.attention(layer)
        return attention(q[None], k[None], v[None], causal=True, layout="bthd", **how)[0]

    rotary = head.config.rotary_of(0)
    assert rotary is not None
    with tg.no_grad():
        angles = rotary.angles(tg.arange(40))
        made = head(tg.tensor(tokens), tg.tensor(features), attend, model.embed, angles)
        logits = model.read(made).numpy()
    embed, last = arrays(model)
    wanted = by_numpy(weights, tokens, features.astype(np.float64), embed) @ last.T
    np.testing.assert_allclose(logits, wanted, atol=2e-5 * np.abs(wanted).max())


class Watched(Eagle):
    """Keeps what was guessed after which tokens."""

    def __init__(self, head: EagleHead) -> None:
        super().__init__(head)
        self.made: list[tuple[list[int], list[int]]] = []

    def guess(self, works: Any, most: Any) -> list[list[int]]:
        found = super().guess(works, most)
        self.made += [(list(w.known), g) for w, g in zip(works, found) if g]
        return found


def engine_of(model: Decoder, proposer: Any = None, **how: Any) -> Engine:
    sizes = {"requests": 3, "context": 128, "page": 8, "chunk": 16, "guesses": 3, **how}
    return Engine(model, proposer=proposer, **sizes)


def asked() -> list[Request]:
    ways = [None, Sampling(temperature=0.8, seed=3), None, Sampling(logprobs=2)]
    return [Request(i, prompt(5 + 9 * i), ways[i], max_tokens=12) for i in range(4)]


def test_guesses_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    """Over pages, chunks and steps that verify, with neighbours: the likeliest by the head, each
    from the head's own feature before it. Answers are those without guesses."""
    model, weights = target(), drawn()
    proposer = Watched(head_of(tmp_path / "head", weights))
    found, _ = run(engine_of(model, proposer, prefix_cache=False), asked())
    assert ids(found) == ids(run(engine_of(model), asked())[0])
    assert len(proposer.made) > 30 and max(len(g) for _, g in proposer.made) == 3
    embed, last = arrays(model)
    for known, guesses in proposer.made[::15]:
        features, tokens = features_of(model, known)[:-1], known[1:]
        for guess in guesses:
            made = by_numpy(weights, tokens, features, embed)[-1]
            logits = made @ last.T
            assert logits[guess] > logits.max() - 1e-3 * np.abs(logits).max()
            features, tokens = np.concatenate([features, made[None]]), [*tokens, guess]


def test_known_prefixes_and_requests_sent_back(tmp_path: Path) -> None:
    """Few pages, shared ones among them: answers stay, nothing is left behind."""
    model = target()
    requests = [Request(i, prompt(40 - i // 3), max_tokens=30) for i in range(4)]
    wanted = ids(run(engine_of(model), requests)[0])
    engine = engine_of(model, Eagle(head_of(tmp_path / "head", drawn())), pages=18)
    found, _ = run(engine, requests)
    assert ids(found) == wanted and engine.batcher.preemptions > 0
    speculation = engine.speculation
    assert speculation is not None and speculation.guessed > 20
    assert engine.pool.available == engine.pool.pages


def test_what_is_no_head_for_this_model_is_refused(tmp_path: Path) -> None:
    weights = drawn()
    with pytest.raises(UserError, match="another width"):
        head_of(tmp_path / "wide", weights, hidden_size=2 * WIDTH)
    with pytest.raises(UserError, match="names do not fit"):
        head_of(tmp_path / "more", {**weights, "norm.weight": np.ones(WIDTH, np.float32)})
    with pytest.raises(UserError, match="o_proj"):
        head_of(tmp_path / "fewer", {n: w for n, w in weights.items() if "o_proj" not in n})
    with pytest.raises(UserError, match="does not fit"):
        head_of(tmp_path / "other", {**weights, "fc.weight": weights["fc.weight"][:, :WIDTH]})
    plain = write_head(tmp_path / "plain", {"model.norm.weight": np.ones(WIDTH, np.float32)})
    assert load_head(plain, target(), "cpu", lambda *_: None) is None

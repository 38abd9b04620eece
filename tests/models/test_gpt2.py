"""GPT-2 against a plain torch one: logits, gradients, checkpoints, generation, training."""

import numpy as np
import pytest
from torch_peer import close, torch

import tilegrad as tg
from tilegrad import train
from tilegrad.core.errors import ShapeError, UserError
from tilegrad.models.gpt2 import GPT2, PRESETS, GPT2Config

CONFIG = GPT2Config(vocab_size=11, n_positions=8, n_embd=12, n_layer=2, n_head=3)
functional = torch.nn.functional


def reference(state: dict, tokens: object) -> object:
    """Logits by torch ops from a state_dict with Hugging Face's names and (in, out) weights."""
    x = state["transformer.wte.weight"][tokens] + state["transformer.wpe.weight"][: tokens.shape[1]]
    shape = (CONFIG.n_embd,)
    for i in range(CONFIG.n_layer):
        layer = {n.split(f"h.{i}.")[1]: v for n, v in state.items() if f".h.{i}." in n}
        y = functional.layer_norm(x, shape, layer["ln_1.weight"], layer["ln_1.bias"])
        q, k, v = (y @ layer["attn.c_attn.weight"] + layer["attn.c_attn.bias"]).chunk(3, -1)
        q, k, v = (p.unflatten(-1, (CONFIG.n_head, -1)).transpose(1, 2) for p in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).flatten(2)
        x = x + y @ layer["attn.c_proj.weight"] + layer["attn.c_proj.bias"]
        y = functional.layer_norm(x, shape, layer["ln_2.weight"], layer["ln_2.bias"])
        y = y @ layer["mlp.c_fc.weight"] + layer["mlp.c_fc.bias"]
        y = functional.gelu(y, approximate="tanh")
        x = x + y @ layer["mlp.c_proj.weight"] + layer["mlp.c_proj.bias"]
    x = functional.layer_norm(
        x, shape, state["transformer.ln_f.weight"], state["transformer.ln_f.bias"]
    )
    return x @ state["transformer.wte.weight"].T


def weights() -> dict:
    """Random weights as Hugging Face stores them."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, tensor in GPT2(CONFIG).state_dict().items():
        if name == "lm_head.weight":
            continue
        turned = tensor.ndim == 2 and ".h." in name
        shape = tuple(reversed(tensor.shape)) if turned else tuple(tensor.shape)
        found[name] = torch.randn(shape, generator=generator) * 0.3
    return found


TOKENS = np.array([[1, 4, 10, 0, 3, 3], [7, 2, 2, 9, 5, 6]])


@pytest.fixture(scope="module")
def loaded() -> tuple:
    state = weights()
    model = GPT2(CONFIG)
    model.load_state_dict(state)
    return model.eval(), state


def test_logits_and_gradients(loaded: tuple) -> None:
    model, state = loaded
    peers = {n: t.clone().requires_grad_() for n, t in state.items()}
    logits, wanted = model(tg.tensor(TOKENS)), reference(peers, torch.tensor(TOKENS))
    close(logits, wanted, 1e-4)
    model.loss(tg.tensor(TOKENS[:, :-1]), tg.tensor(TOKENS[:, 1:])).backward()
    loss = functional.cross_entropy(
        reference(peers, torch.tensor(TOKENS[:, :-1])).flatten(0, 1),
        torch.tensor(TOKENS[:, 1:]).flatten(),
    )
    loss.backward()
    for name, parameter in model.named_parameters():
        peer = peers[name].grad
        turned = peer.T if parameter.ndim == 2 and ".h." in name else peer
        close(parameter.grad, turned, 1e-3, name)
    model.zero_grad()


def test_checkpoint_names(loaded: tuple) -> None:
    state = loaded[1]
    bare = {n.removeprefix("transformer."): t for n, t in state.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    other = GPT2(CONFIG)
    other.load_state_dict(bare)
    third = GPT2(CONFIG)
    third.load_state_dict(other.state_dict())
    assert third.lm_head.weight is third.transformer["wte"].weight
    close(third(tg.tensor(TOKENS)), reference(state, torch.tensor(TOKENS)), 1e-4)


def test_later_tokens_do_not_matter(loaded: tuple) -> None:
    model, _ = loaded
    changed = TOKENS.copy()
    changed[:, 4:] = 8
    a, b = model(tg.tensor(TOKENS)).numpy(), model(tg.tensor(changed)).numpy()
    np.testing.assert_allclose(a[:, :4], b[:, :4], atol=1e-5)


def test_generate(loaded: tuple) -> None:
    model, state = loaded
    found = model.generate(tg.tensor(TOKENS[:, :2]), 8, temperature=0.0).numpy()
    wanted = torch.tensor(TOKENS[:, :2])
    for _ in range(8):
        last = reference(state, wanted[:, -CONFIG.n_positions :])[:, -1]
        wanted = torch.cat([wanted, last.argmax(-1, keepdim=True)], 1)
    np.testing.assert_array_equal(found, wanted.numpy())


def test_sampling_is_reproducible_and_keeps_to_top_k(loaded: tuple) -> None:
    model, state = loaded
    prompt = tg.tensor(TOKENS[:, :2])
    draws = [model.generate(prompt, 4, 0.8, 3, tg.Generator(s)).numpy() for s in (1, 1, 2)]
    np.testing.assert_array_equal(draws[0], draws[1])
    first = reference(state, torch.tensor(TOKENS[:, :2]))[:, -1].topk(3).indices.numpy()
    for draw in draws:
        assert all(token in allowed for token, allowed in zip(draw[:, 2], first))
    with pytest.raises(UserError, match="bad top_k"):
        model.generate(prompt, 1, top_k=99)


def test_training_lowers_the_loss() -> None:
    tg.manual_seed(0)
    model = GPT2(CONFIG)
    optimizer = train.AdamW(model.parameters(), lr=3e-2)
    batch = (tg.tensor(TOKENS[:, :-1]), tg.tensor(TOKENS[:, 1:]))
    history = train.train(model, optimizer, (batch for _ in range(12)), GPT2.loss)
    assert history.losses[0] == pytest.approx(np.log(CONFIG.vocab_size), rel=0.1)
    assert history.losses[-1] < 0.5 * history.losses[0]


def test_sizes_and_errors() -> None:
    model = GPT2(PRESETS["gpt2"])
    assert sum(p.numel() for p in model.parameters()) == 124_439_808
    with pytest.raises(UserError, match="unknown size"):
        GPT2.preset("gpt9")
    with pytest.raises(ShapeError, match="too many tokens"):
        GPT2(CONFIG)(tg.zeros(1, 9, dtype="int64"))

"""A transformer block from plain functions, trained to copy; its layers share one program each."""

import tilegrad as tg
import tilegrad.nn.functional as F

WIDTH, HEADS, TOKENS, BATCH, SYMBOLS = 32, 4, 16, 8, 11


def make_block():
    """Parameters of one block."""
    return {
        "norm1": tg.ones(WIDTH),
        "norm2": tg.ones(WIDTH),
        "qkv": tg.randn(3 * WIDTH, WIDTH) * WIDTH**-0.5,
        "out": tg.randn(WIDTH, WIDTH) * 0.05,
        "up": tg.randn(4 * WIDTH, WIDTH) * WIDTH**-0.5,
        "down": tg.randn(WIDTH, 4 * WIDTH) * 0.05,
    }


def block(p, x):
    """Attention over earlier tokens, then a two-layer network; both added to x."""
    batch, tokens, width = x.shape  # (batch, tokens, width)
    qkv = F.linear(F.rms_norm(x, (width,), p["norm1"], 1e-5), p["qkv"])
    qkv = qkv.reshape(batch, tokens, 3, HEADS, width // HEADS)
    q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))  # (batch, heads, tokens, head_dim)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + F.linear(mixed.transpose(1, 2).reshape(batch, tokens, width), p["out"])
    return x + F.linear(
        F.gelu(F.linear(F.rms_norm(x, (width,), p["norm2"], 1e-5), p["up"])), p["down"]
    )


def loss_of(p, tokens):
    """Predict each token of the second half, which repeats the first."""
    x = p["embed"][tokens[:, :-1]] + p["place"]
    for one in p["blocks"]:
        x = block(one, x)
    logits = x @ p["embed"].T  # (batch, tokens, symbols)
    half = TOKENS // 2
    return F.cross_entropy(logits[:, half - 1 :].reshape(-1, SYMBOLS), tokens[:, half:].reshape(-1))


@tg.jit
def train_step(p, speed, tokens):
    """One step of Lion-like descent: the sign of a running mean of gradients."""
    loss, slopes = tg.value_and_grad(loss_of)(p, tokens)

    def move(weights, speed, slopes):
        if isinstance(weights, dict):
            pairs = {k: move(weights[k], speed[k], slopes[k]) for k in weights}
            return {k: v[0] for k, v in pairs.items()}, {k: v[1] for k, v in pairs.items()}
        if isinstance(weights, list):
            pairs = [move(*three) for three in zip(weights, speed, slopes)]
            return [v[0] for v in pairs], [v[1] for v in pairs]
        faster = 0.9 * speed + 0.1 * slopes
        return weights - 2e-3 * faster.sign(), faster

    return *move(p, speed, slopes), loss


tg.manual_seed(0)
p = {
    "embed": tg.randn(SYMBOLS, WIDTH) * 0.3,
    "place": tg.randn(TOKENS - 1, WIDTH) * 0.3,
    "blocks": [make_block() for _ in range(3)],
}
speed = {
    "embed": p["embed"] * 0,
    "place": p["place"] * 0,
    "blocks": [{k: v * 0 for k, v in one.items()} for one in p["blocks"]],
}
for step in range(201):
    first = tg.randint(0, SYMBOLS, (BATCH, TOKENS // 2))
    tokens = tg.cat([first, first], 1)
    p, speed, loss = train_step(p, speed, tokens)
    if step % 50 == 0:
        print(f"step {step:4d}  loss {loss.item():.3f}")
print(tg.explain(train_step, p, speed, tokens, level="summary").section("summary"))

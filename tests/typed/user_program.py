"""What a person writes with tilegrad, fully annotated: `mypy --strict` and pyright take it.

`tests/test_types.py` runs it, and has both refuse every line of `mistakes` that says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import tilegrad as tg
from tilegrad import Tensor, kernel, nn, tile
from tilegrad.nn import functional as F
from tilegrad.tile import INF, KTile


class Attention(nn.Module):
    """Heads of causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.scale = nn.Parameter(tg.ones(1))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).split(width, dim=-1)
        shape = (batch, tokens, self.heads, width // self.heads)
        q, k, v = (part.reshape(*shape).transpose(1, 2) for part in (q, k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -INF)
        mixed = tg.softmax(scores, -1) @ v * self.scale
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    """Attention and a perceptron, each around a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norms[0](x), mask)
        return x + self.dropout(self.down(F.gelu(self.up(self.norms[1](x)))))


@tg.jit
def train_step(
    model: Block, optimizer: tg.optim.Optimizer, x: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    norm = tg.train.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach(), norm


@tg.jit(static=("power",), donate=("state",))
def average(state: Tensor, x: Tensor, power: int = 1) -> Tensor:
    return 0.9 * state + 0.1 * x**power


@kernel
def row_softmax(x: KTile) -> None:
    rows, columns = x.shape
    block = 64
    i = tile.grid(rows)
    out = tile.result(x.shape, x.dtype)
    largest, total = tile.full((), -INF), tile.zeros(())
    for j in tile.range(0, columns, block):
        part = tile.load(x, (i, j), (block,))
        new = tile.maximum(largest, tile.max(part))
        total = total * tile.exp(largest - new) + tile.sum(tile.exp(part - new))
        largest = new
    for j in tile.range(0, columns, block):
        out[i, j : j + block] = tile.exp(x[i, j : j + block] - largest) / total


@row_softmax.vjp
def row_softmax_backward(inputs: tuple[Tensor], y: Tensor, g: Tensor) -> tuple[Tensor]:
    return ((g - (g * y).sum(-1, keepdim=True)) * y,)


def energy(w: Tensor, x: Tensor) -> Tensor:
    return ((x @ w).tanh() ** 2).mean()


def transforms(w: Tensor, x: Tensor) -> Tensor:
    slope: Tensor = tg.grad(energy)(w, x)
    value, gradient = tg.value_and_grad(energy, argnums=(0, 1))(w, x)
    rows = tg.vmap(lambda row: row.square().sum())(x)
    _, tangent = tg.jvp(energy, (w, x), (tg.ones_like(w), tg.zeros_like(x)))
    carry, steps = tg.scan(lambda c, row: (c + row.sum(), c), tg.tensor(0.0), x)
    total: Tensor = value + rows.sum() + gradient[0].sum() + carry + steps.sum()
    return total + slope.sum() + tangent


def batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    random = np.random.default_rng(0)
    for _ in range(count):
        x = tg.from_numpy(random.standard_normal((2, 8, 16), np.float32))
        yield x, x.roll(1, 1)


def main(folder: Path) -> dict[str, Any]:
    tg.manual_seed(0)
    model = Block(16, 4).to(tg.float32).train()
    optimizer = tg.optim.AdamW(model.parameters(), lr=tg.train.rate.cosine(1e-2, 50))
    losses: list[float] = []
    state = x = tg.zeros(2, 8, 16)
    for x, y in batches(5):
        loss, norm = train_step(model, optimizer, x, y)
        state = average(state, x, power=2)
        losses.append(loss.item())
        assert norm.ndim == 0
    tg.save(model.state_dict(), folder / "model.safetensors")
    keys = model.load_state_dict(tg.load(folder / "model.safetensors"))
    assert not keys.missing_keys
    with tg.no_grad():
        answer = model.eval()(x, tg.ones(8, 8).tril())
    best = answer.max(-1)
    chosen = answer.argmax(dim=-1)[0].tolist()
    top, places = answer.flatten(1).topk(3)
    counts = (answer > 0).sum(dim=-1).to(tg.int32)
    probabilities: Tensor = row_softmax(answer[0])
    array = (best.values.numpy() + top.mean().numpy()).astype(np.float64)
    w = tg.randn(16, requires_grad=True)
    transforms(w, x[0]).backward()
    assert w.grad is not None and w.T.dtype is tg.float32
    q, r = tg.linalg.qr(answer[0].T)
    parts = [counts.sum(), probabilities[..., None].sum(), (q * 1).sum() - r[0, 0]]
    text = tg.explain(energy, w, x[0]).graph
    return {
        "losses": losses,
        "chosen": chosen,
        "array": array,
        "parts": parts,
        "text": text,
        "places": places,
        "gradient": w.grad.norm().item(),
    }


def mistakes(x: Tensor, model: Block) -> None:
    x.summ()  # error
    x.sum(dims=0)  # error
    _ = x.max(-1).value  # error
    tg.softmaxx(x)  # error
    tg.nn.Linaer(1, 2)  # error
    nn.Linear(1)  # error
    F.gleu(x)  # error
    tg.optim.AdamX(model.parameters())  # error
    model(x, masks=x)  # error
    model(3)  # error
    nn.Dropout(0.1)(x, x)  # error
    train_step(model, x)  # error
    _ = average(x, x).traces  # error
    _ = average.tracez  # error
    tile.laod(x)  # error
    tg.vmap(energy)(x)  # error
    _ = x.shape.rank  # error
    tg.jit(energy, statik=("x",))  # error
